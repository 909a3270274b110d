"""The content of a model folder whose format is known."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from djl_python_neuronx.artifacts.folder import Folder
from djl_python_neuronx.artifacts.manifest import Manifest
from djl_python_neuronx.artifacts.weights import Weights, WeightsKind
from djl_python_neuronx.config.values import MAX_SHOWN
from djl_python_neuronx.errors import ArtifactError, ArtifactMismatchError, ArtifactNotFoundError

logger = logging.getLogger(__name__)

_KINDS: dict[WeightsKind, str] = {
    "safetensors": "whole safetensors",
    "pickle": "a whole pickle",
    "split": "a split checkpoint",
    "presharded": "weights that transformers-neuronx has cut",
    "ranks": "weights that NxD has cut",
}
"""Words for messages."""
WHOLE: frozenset[str] = frozenset({"safetensors", "pickle"})
"""Kinds that any backend can shard as it needs."""
CUT: frozenset[str] = frozenset({"presharded", "ranks"})
"""Kinds that are sharded for one number of cores already."""


@dataclass(frozen=True)
class Artifact:
    """A model folder whose format is known and whose files are complete."""

    path: Path
    """The folder itself: configuration and tokenizer lie here."""
    format: str
    backend: str | None
    """The backend that it was compiled for, or that alone can read it; None if any can."""
    config: Mapping[str, Any]
    """config.json"""
    weights: tuple[Weights, ...]
    """The preferred ones first; a compiled model can have sharded ones, whole ones, both or none."""
    compiled: Path | None = None
    """Folder of the compiled graphs; None if there are none that can be used."""
    compiled_for: Mapping[str, object] = field(default_factory=dict)
    """Options that the graphs were compiled for, as far as they are recorded, and `compiler_version`."""
    neuron_config: Mapping[str, Any] = field(default_factory=dict)
    """NxD Inference's own record of that: all keywords of its `NeuronConfig`. It decides where another program compiled
    the graphs."""
    unused: str = ""
    """The reason not to use graphs in the folder; empty if they are used, or if the folder has none."""
    weights_source: str | None = None
    """Hub id (with @revision) or path of the weights that were compiled, if the folder has none."""
    eos_ids: frozenset[int] = frozenset()
    """Ids that end a sequence, of generation_config.json or else config.json; empty if neither has any."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """generation_config.json"""
    manifest: Manifest | None = None
    """Of an output of this package."""

    @property
    def model_type(self) -> str:
        """The libraries' name of the model's family: `llama`, `gpt2`."""
        return str(self.config["model_type"])

    @property
    def kind(self) -> WeightsKind | None:
        """Layout of the preferred weights; None if there are none."""
        return self.weights[0].kind if self.weights else None

    @property
    def dtype(self) -> str | None:
        """Of most bytes of the preferred weights, by torch's name (`bfloat16`); None if it is not recorded."""
        return self.weights[0].dtype if self.weights else None

    def weights_for(self, backend: str, kinds: Collection[str]) -> Weights:
        """The weights to load for a backend that reads `kinds`.

        Raises:
            ArtifactNotFoundError: the folder has no weights.
            ArtifactError: it has none of these kinds.
        """
        for weights in self.weights:
            if weights.kind in kinds:
                return weights
        wanted = " or ".join(words for kind, words in _KINDS.items() if kind in kinds)
        if not self.weights:
            advice = "put them into the folder"
            if backend == "nxdi" and self.compiled:
                advice = (
                    f"put them into the folder, or set option.model_id to that checkpoint and "
                    f"option.compiled_graph_path to {self.compiled}"
                )
            msg = (
                f"{self.path} holds a compiled model ({self.format}) without weights; expected {wanted} for the "
                f"{backend} backend. The compilation took them from {self.weights_source}: {advice}."
            )
            raise ArtifactNotFoundError(msg)
        held = " and ".join(_KINDS[weights.kind] for weights in self.weights)
        advice = (
            "Run `djl-neuronx convert` to make one of the other"
            if self.kind == "split"
            else "Serve the checkpoint that it was made from"
        )
        if self.backend not in {None, backend}:
            advice += f", or set option.model_loader={self.backend}"
        msg = (
            f"the {backend} backend cannot load the model in {self.path} ({self.format}): it holds {held}; expected "
            f"{wanted}. {advice}."
        )
        raise ArtifactError(msg)

    def check_fit(self, wanted: Mapping[str, object]) -> None:
        """Refuse settings that the graphs were not compiled for; unrecorded ones are not compared.

        Raises:
            ArtifactMismatchError: each setting that differs, compiled and wanted.
        """
        differences = {
            key: (compiled, wanted[key])
            for key, compiled in self.compiled_for.items()
            if key in wanted and wanted[key] != compiled
        }
        if differences:
            raise ArtifactMismatchError(differences, str(self.path))


class Format:
    """One way to lay out a model folder."""

    name: str
    looks_for: str
    """Files that mark a folder of this format, for the message when no format matches."""
    over: frozenset[str] = frozenset({"huggingface"})
    """Names of formats that it is a special case of: where both match, this one is meant."""
    backend: str | None = None
    """See `Artifact`."""

    def matches(self, folder: Folder) -> bool:
        """True if a folder is meant to be of this format, complete or not.

        Raises:
            ArtifactError: a JSON file that decides cannot be read.
        """
        raise NotImplementedError

    def read(self, folder: Folder) -> Artifact:
        """The facts of a folder that matches.

        Raises:
            ArtifactError: a file is missing, unreadable, malformed, cut off or hostile.
        """
        raise NotImplementedError

    def artifact(
        self,
        folder: Folder,
        config: Mapping[str, Any],
        weights: tuple[Weights, ...],
        **compiled: Any,  # noqa: ANN401  (the fields of `Artifact` about a compilation)
    ) -> Artifact:
        """The artifact in a folder of this format; reads generation_config.json.

        Raises:
            ArtifactError: that file is malformed, or transformers refuses it.
        """
        generation = folder.json("generation_config.json")
        most = generation.get("max_new_tokens")
        if most is not None and not (isinstance(most, (int, float)) and most > 0):
            msg = (
                f"max_new_tokens is {most!r:.80} in {folder.path / 'generation_config.json'}; expected a number above "
                "0. Correct it or leave it out."
            )
            raise ArtifactError(msg)
        return Artifact(
            folder.path,
            self.name,
            self.backend,
            config,
            weights,
            eos_ids=_read_eos_ids(generation, folder, config),
            generation=generation,
            **compiled,
        )


def read_config(folder: Folder) -> dict[str, Any]:
    """config.json of a language model.

    Raises:
        ArtifactError: it is missing, unreadable, malformed or names no model_type.
    """
    return require_model_type(folder.json(folder.file("config.json").name), folder, "config.json")


def require_model_type(config: dict[str, Any], folder: Folder, name: str) -> dict[str, Any]:
    """`config` itself, which is the content of `name`.

    Raises:
        ArtifactError: it names no model_type.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or len(kind) > MAX_SHOWN:
        msg = f"{folder.path / name} names no model_type; expected one such as 'llama'. Point to a language model."
        raise ArtifactError(msg)
    return config


def _read_eos_ids(
    generation: Mapping[str, Any], folder: Folder, config: Mapping[str, Any]
) -> frozenset[int]:
    """Ids of the first file that has any, without those beyond the vocabulary, which the model never returns.

    In a multimodal model `text_config` describes the language model.
    """
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else {}
    vocab_size = config.get("vocab_size", text.get("vocab_size"))
    for source in (generation, config, text):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            msg = f"eos_token_id is {value!r} in {folder.path}; expected an id or a list of ids. Correct the file."
            raise ArtifactError(msg)
        beyond = {i for i in ids if isinstance(vocab_size, int) and i >= vocab_size}
        if beyond:
            logger.warning("eos_ids_unused ids=%s vocab_size=%d", sorted(beyond), vocab_size)
        if set(ids) - beyond:
            return frozenset(ids) - beyond
    return frozenset()
