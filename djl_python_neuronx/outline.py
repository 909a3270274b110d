"""What is known of a model without its weights: config.json, from a folder, the hub or S3, and what lies beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from djl_python_neuronx.artifacts import fetch, formats
from djl_python_neuronx.config.findings import Level
from djl_python_neuronx.config.resolve import Resolved
from djl_python_neuronx.errors import ArtifactError, ArtifactNotFoundError, ServingError
from djl_python_neuronx.messages import Messages

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
VOCABULARY_SUFFIXES = (".model", ".tiktoken")
"""What artifacts.tokenizer, whose import is not light, takes for a tokenizer."""


@dataclass(frozen=True)
class Model:
    """What is known of a model without its weights."""

    name: str
    """As the options name it, or its folder."""
    where: str
    """Where its configuration was read, in words."""
    config: Mapping[str, Any]
    """config.json"""
    format: str = "huggingface"
    backend: str | None = None
    """The only backend that can load it; None: any that knows the architecture."""
    dtype: str | None = None
    """Of most of the checkpoint; None: nothing but config.json was read."""
    has_weights: bool = False
    """The weights lie here too."""


def model_of(resolved: Resolved, environ: Mapping[str, str], messages: Messages) -> Model | None:
    """The model that the options name; None, with the error told, if its configuration cannot be had."""
    options = resolved.options
    folder = fetch.local_folder(options.model_id, options.model_dir)
    try:
        if folder is not None:
            return _local(folder, resolved, messages)
        if options.model_id is None:
            return None  # a rule has said that there is no model
        config = fetch.fetch_config(options.model_id, options.revision, environ)
        if not isinstance(config.get("model_type"), str):
            msg = f"{fetch.CONFIG} of {options.model_id!r} names no model_type; expected one such as 'llama'"
            messages.refuse([ArtifactError(msg)])
            return None
    except ServingError as error:
        messages.refuse([error])
        return None
    kind = fetch.uri_scheme(options.model_id)
    where = f"config.json from {kind or 'the hub'}"
    return Model(options.model_id, where, config)


def _local(folder: Path, resolved: Resolved, messages: Messages) -> Model:
    """A local model, whole or without its weights, which then is only a warning."""
    options = resolved.options
    origin = "the argument" if options.model_id is None else "option.model_id"
    name = options.model_id or str(folder)
    try:
        artifact = formats.detect(folder, origin=origin)
    except ArtifactNotFoundError as error:
        if not (folder / fetch.CONFIG).is_file():
            raise
        messages.tell("warning", f"{error} It is only planned")
        return Model(name, f"{folder / fetch.CONFIG}", formats.read_json(folder / fetch.CONFIG))
    if not options.trust_remote_code and not _has_tokenizer(folder):
        messages.tell(
            "error",
            f"no tokenizer in {folder}: expected one of {', '.join(VOCABULARIES)}, *.model or *.tiktoken. "
            "Copy the tokenizer's files beside config.json",
        )
    return Model(
        name,
        str(folder),
        artifact.config,
        artifact.format,
        artifact.backend,
        artifact.dtype,
        has_weights=True,
    )


def _has_tokenizer(folder: Path) -> bool:
    return any(
        entry.name in VOCABULARIES or entry.name.endswith(VOCABULARY_SUFFIXES)
        for entry in folder.iterdir()
    )


def draft_of(
    resolved: Resolved, model: Model, environ: Mapping[str, str], messages: Messages
) -> Mapping[str, Any] | None:
    """The draft model's configuration, if one is named and it can be had.

    Without its weights it is good for a plan, as the model is.
    """
    name, model_dir = resolved.options.speculative_draft_model, resolved.options.model_dir
    if name is None:
        return None
    folder = fetch.local_folder(name, model_dir)
    try:
        if folder is None:
            return fetch.fetch_config(name, None, environ, origin="option.speculative_draft_model")
        try:
            formats.detect(folder, origin="option.speculative_draft_model")
        except ArtifactNotFoundError as error:
            if not (folder / fetch.CONFIG).is_file():
                raise
            level: Level = "error" if model.has_weights else "warning"
            messages.tell(level, f"the draft model: {error}", ("speculative_draft_model",))
        return formats.read_json(folder / fetch.CONFIG)
    except ServingError as error:
        problem = f"the draft model (option.speculative_draft_model): {error}"
        messages.tell("error", problem, ("speculative_draft_model",))
        return None
