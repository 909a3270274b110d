"""What is known of a model without its weights: config.json, from a folder, the hub or S3, and what lies beside it.

What is compiled there is judged as a start judges it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from djl_python_neuronx.artifacts import fetch, formats
from djl_python_neuronx.artifacts.artifact import Artifact
from djl_python_neuronx.artifacts.tokenizer import has_vocabulary, no_tokenizer
from djl_python_neuronx.config.findings import Level, Problems
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.resolve import Resolved
from djl_python_neuronx.errors import (
    ArtifactError,
    ArtifactMismatchError,
    ArtifactNotFoundError,
    ServingError,
)
from djl_python_neuronx.loading.fitting import (
    check_fit,
    flags_fit,
    proved,
    weights_to_load,
    with_recorded,
)
from djl_python_neuronx.planning.machines import DeviceInfo

_DRAFT = "speculative_draft_model"


@dataclass(frozen=True)
class Model:
    """What is known of a model without its weights."""

    name: str
    """As the options name it, or its folder."""
    where: str
    """Where its configuration was read, in words."""
    config: Mapping[str, Any]
    """config.json"""
    artifact: Artifact | None = None
    """The folder that holds it; None: nothing but config.json was read."""

    @property
    def format(self) -> str:
        """The folder's."""
        return "huggingface" if self.artifact is None else self.artifact.format

    @property
    def backend(self) -> str | None:
        """The only backend that can load it; None: any that knows the architecture."""
        return None if self.artifact is None else self.artifact.backend

    @property
    def dtype(self) -> str | None:
        """Of most of the checkpoint; None: not known."""
        return None if self.artifact is None else self.artifact.dtype


@dataclass(frozen=True)
class Place:
    """Where the model is going to be loaded, and by what."""

    loader: str
    machine: DeviceInfo
    environ: Mapping[str, str]
    """The variables of the process that serves."""
    surroundings: Mapping[str, object]
    """What graphs depend on there, as far as it is known; see `fitting.check_fit`."""


def model_of(resolved: Resolved, environ: Mapping[str, str], problems: Problems) -> Model | None:
    """The model that the options name; None, with the error told, if its configuration cannot be had."""
    options = resolved.options
    folder = fetch.local_folder(options.model_id, options.model_dir)
    try:
        if folder is not None:
            return _local(folder, resolved, problems)
        if options.model_id is None:
            return None  # a rule has said that there is no model
        config = fetch.fetch_config(options.model_id, options.revision, environ)
        if not isinstance(config.get("model_type"), str):
            msg = f"{fetch.CONFIG} of {options.model_id!r} names no model_type; expected one such as 'llama'"
            problems.add_error(ArtifactError(msg))
            return None
    except ServingError as error:
        problems.add_error(error)
        return None
    kind = fetch.uri_scheme(options.model_id)
    where = f"config.json from {kind or 'the hub'}"
    return Model(options.model_id, where, config)


def _local(folder: Path, resolved: Resolved, problems: Problems) -> Model:
    """A local model, whole or without its weights, which then is only a warning."""
    options = resolved.options
    origin = "the argument" if options.model_id is None else "option.model_id"
    name = options.model_id or str(folder)
    try:
        artifact = proved(formats.detect(folder, origin=origin))
    except ArtifactNotFoundError as error:
        if not (folder / fetch.CONFIG).is_file():
            raise
        problems.add("warning", f"{error} It is only planned")
        return Model(name, f"{folder / fetch.CONFIG}", formats.read_json(folder / fetch.CONFIG))
    if not options.trust_remote_code and not has_vocabulary(
        entry.name for entry in folder.iterdir()
    ):
        problems.add("error", no_tokenizer(folder))
    return Model(name, str(folder), artifact.config, artifact)


def completed(
    settings: Resolved,
    model: Model,
    loader: str,
    environ: Mapping[str, str],
    problems: Problems,
) -> tuple[Resolved, Model | None]:
    """The settings with what the model's folder was compiled for, and the draft model that is named then."""
    filled = recorded(settings, model, loader, problems)
    base = settings.options.model_dir
    if model.artifact is not None and _DRAFT not in settings.origins:
        base = model.artifact.path  # which names it
    return filled, _draft_of(filled, base, model, environ, problems)


def recorded(settings: Resolved, model: Model, loader: str, problems: Problems) -> Resolved:
    """The settings with what the model's folder was compiled for, where nobody set another value."""
    if model.artifact is None:
        return settings
    try:
        return with_recorded(settings, model.artifact, loader)
    except ServingError as error:
        problems.add_error(error)
        return settings


def _draft_of(
    resolved: Resolved,
    base: Path | None,
    model: Model,
    environ: Mapping[str, str],
    problems: Problems,
) -> Model | None:
    """The draft model, if one is named and its configuration can be had. `base` is where a relative name starts.

    Without its weights it is good for a plan, as the model is.
    """
    name, origin = resolved.options.speculative_draft_model, f"option.{_DRAFT}"
    if name is None:
        return None
    folder = fetch.local_folder(name, base)
    try:
        if folder is None:
            return Model(name, "", fetch.fetch_config(name, None, environ, origin=origin))
        try:
            artifact = proved(formats.detect(folder, origin=origin))
        except ArtifactNotFoundError as error:
            if not (folder / fetch.CONFIG).is_file():
                raise
            level: Level = "error" if model.artifact is not None else "warning"
            problems.add(level, f"the draft model: {error}", (_DRAFT,))
            return Model(name, str(folder), formats.read_json(folder / fetch.CONFIG))
        return Model(name, str(folder), artifact.config, artifact)
    except ServingError as error:
        problems.add("error", f"the draft model ({origin}): {error}", (_DRAFT,))
        return None


def judge_graphs(
    model: Model, options: ServingOptions, place: Place, problems: Problems, whose: str = ""
) -> None:
    """Tell where what is compiled in the model's folder is not for these options, and its weights cannot be read.

    See `fitting.check_fit`. `whose`: words for a draft model, whose graphs are compiled again for other flags.
    """
    artifact = model.artifact
    if artifact is None:
        return
    strict = options.model_copy(update={"on_mismatch": "error"})
    telling = partial(_telling, problems, artifact, whose)
    fits = False
    with telling(options.on_mismatch):
        fits = check_fit(artifact, strict, place.loader, place.surroundings)
    unused = options.on_mismatch == "recompile" or artifact.backend != place.loader
    if artifact.weights and (fits or unused):
        with telling(options.on_mismatch):
            weights_to_load(artifact, place.loader, fits=fits)
    if fits:
        with telling("recompile" if whose else options.on_mismatch):
            flags_fit(artifact, strict, place.environ)


@contextmanager
def _telling(
    problems: Problems, artifact: Artifact, whose: str, on_mismatch: str
) -> Iterator[None]:
    """Tells what is raised within, instead of raising it."""
    try:
        yield
    except ArtifactMismatchError as error:
        names = tuple(sorted(error.differences))
        if on_mismatch == "error":
            problems.add("error", f"{whose}{error}", names)
        else:
            told = f"{whose}what is compiled in {artifact.path} differs in {', '.join(names)}"
            problems.add("warning", f"{told}: it is not used, and compiled again", names)
    except ServingError as error:
        problems.add("error", f"{whose}{error}")
