"""Whole checkpoints from one layout into another: split for transformers-neuronx, safetensors for everyone else."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from djl_python_neuronx.artifacts.formats import detect
from djl_python_neuronx.artifacts.layouts.artifact import Artifact
from djl_python_neuronx.artifacts.layouts.folder import unreadable
from djl_python_neuronx.artifacts.layouts.weights import KEY_TO_FILENAME, SPLIT_FOLDER, Weights
from djl_python_neuronx.artifacts.tensor_files import TensorFiles, torch_module
from djl_python_neuronx.errors import (
    ArtifactAccessError,
    ArtifactError,
    InvalidOptionError,
    ServingError,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

TARGETS = ("safetensors", "split")
MAX_SHARD_BYTES = 5_000_000_000
"""Of one safetensors file, as Hugging Face's libraries have it."""

_COPIED = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py", ".md")
_NOT_COPIED = frozenset({"config.json", "neuron_config.json", "manifest.json", KEY_TO_FILENAME})
# What config.json says of compiled graphs or cut weights, which do not come along.
_DROPPED_KEYS = frozenset({"neuron", "is_presharded_checkpoint"})


def convert(
    source: Path, destination: Path, to: str, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write the model in `source` to the new folder `destination`, as `to` (one of `TARGETS`) wants it.

    One tensor is in memory at a time; each is compared with its original before the folder gets its name, so that a
    conversion which was cut short leaves nothing that looks finished.

    Raises:
        InvalidOptionError: there is no such target.
        ArtifactError: the source cannot be converted, or is damaged.
        ArtifactAccessError: the destination is taken, has no room or cannot be written.
        BackendUnavailableError: torch is not installed.
    """
    if to not in TARGETS:
        raise InvalidOptionError(
            name="to", value=to, origin="the command line", allowed=" or ".join(TARGETS)
        )
    artifact = detect(source, origin="the source of the conversion")
    tensors = TensorFiles(_choose_weights(artifact, to))
    _check_destination(destination, tensors.num_bytes())
    partial = destination.with_name(f".{destination.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        partial.mkdir(parents=True)
        _copy_beside(artifact, partial)
        if to == "split":
            _write_split(tensors, partial)
        else:
            _write_safetensors(tensors, partial, max_shard_bytes)
        _compare(tensors, detect(partial, origin="the conversion's own output").weights[0])
        _sync(partial)
        # Takes the place of an empty folder, fails for any other.
        partial.replace(destination)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, ServingError):
            msg = f"{destination} cannot be written: {error.strerror or error}. Make room or give this user access."
            raise ArtifactAccessError(msg) from error
        raise
    logger.info("converted source=%s destination=%s to=%s", source, destination, to)


def _choose_weights(artifact: Artifact, to: str) -> Weights:
    if any(weights.kind == to for weights in artifact.weights):
        msg = f"the weights in {artifact.path} are in the layout {to} already; expected another. Use them as they are."
        raise ArtifactError(msg)
    for weights in artifact.weights:
        if weights.kind in {"split", "safetensors", "pickle"}:
            return weights
    if artifact.kind is None:
        return artifact.weights_for("converting", {"safetensors", "pickle", "split"})
    msg = (
        f"the weights in {artifact.path} ({artifact.format}) cannot be converted: they are cut for tensor parallel "
        "degree and layout, padded, some fused or transposed, and nothing records how to undo it. Convert the "
        "checkpoint that they were made from."
    )
    raise ArtifactError(msg)


def _check_destination(destination: Path, num_bytes: int) -> None:
    try:
        if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
            msg = f"{destination} exists and is no empty folder; name a new one, as nothing is overwritten."
            raise ArtifactAccessError(msg)
        existing = next(parent for parent in destination.absolute().parents if parent.is_dir())
        free = shutil.disk_usage(existing).free
    except OSError as error:
        raise unreadable(destination, error) from error
    if free < num_bytes:
        msg = (
            f"{destination} needs {num_bytes / 2**30:.1f} GiB, {existing} has {free / 2**30:.1f} GiB free. "
            "Make room, or name another disk."
        )
        raise ArtifactAccessError(msg)


def _copy_beside(artifact: Artifact, into: Path) -> None:
    """Configuration, tokenizer and what else is text; links become files."""
    for file in sorted(artifact.path.iterdir()):
        other = file.name in _NOT_COPIED or file.name.endswith(".index.json")
        if file.suffix in _COPIED and file.is_file() and not other:
            shutil.copyfile(file, into / file.name)
    config = {key: value for key, value in artifact.config.items() if key not in _DROPPED_KEYS}
    (into / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_split(tensors: TensorFiles, into: Path) -> None:
    """As transformers-neuronx's `save_pretrained_split` lays it out.

    Source: transformers-neuronx, module.py, save_split.
    """
    torch = torch_module()
    folder = into / SPLIT_FOLDER
    folder.mkdir()
    files = {
        name: f"p{i}.{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}"
        for i, name in enumerate(tensors.facts)
    }
    for name, file_name in files.items():
        with (folder / file_name).open("wb") as file:
            # A clone, because a view would be saved with all that it looks into.
            torch.save(tensors.load(name).clone(), file)
    with (folder / KEY_TO_FILENAME).open("w", encoding="utf-8") as text:
        json.dump(files, text, indent=2)


def _write_safetensors(tensors: TensorFiles, into: Path, max_shard_bytes: int) -> None:
    shards = list(_plan_shards(tensors, max_shard_bytes))
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        one = len(shards) == 1
        file_name = (
            "model.safetensors" if one else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        )
        _write_shard(tensors, names, into / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": tensors.num_bytes()}, "weight_map": weight_map}
        (into / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2), encoding="utf-8"
        )


def _plan_shards(tensors: TensorFiles, max_shard_bytes: int) -> Iterator[list[str]]:
    shard: list[str] = []
    used = 0
    for name, facts in tensors.facts.items():
        if shard and used + facts.num_bytes > max_shard_bytes:
            yield shard
            shard, used = [], 0
        shard.append(name)
        used += facts.num_bytes
    yield shard


def _write_shard(tensors: TensorFiles, names: list[str], path: Path) -> None:
    """One safetensors file, tensor by tensor: the library (0.4 to 0.8) takes all of them at once.

    Source: the safetensors format: uint64 little-endian length, a JSON header padded with spaces, then the data.
    """
    # The widest types first, so that each tensor begins at a multiple of its element's size.
    ordered = sorted(names, key=lambda name: -tensors.facts[name].element_bytes)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in ordered:
        begin, end = end, end + tensors.facts[name].num_bytes
        facts = tensors.facts[name]
        header[name] = {
            "dtype": facts.dtype,
            "shape": list(facts.shape),
            "data_offsets": [begin, end],
        }
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name in ordered:
            file.write(_bytes(tensors.load(name)).numpy().data)


def _compare(tensors: TensorFiles, written: Weights) -> None:
    """Each tensor is in the output, with its type, shape and bits."""
    torch, output = torch_module(), TensorFiles(written)
    different = [
        name
        for name, facts in tensors.facts.items()
        if output.facts.get(name) != facts
        or not torch.equal(_bytes(tensors.load(name)), _bytes(output.load(name)))
    ]
    if different or len(output.facts) != len(tensors.facts):
        msg = (
            f"what was written to {written.folder} differs from its source in {different}; the disk or the source "
            "changed meanwhile. Convert again."
        )
        raise ArtifactError(msg)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch_module().uint8)


def _sync(folder: Path) -> None:
    """Onto the disk, before the folder gets its name: a machine that dies must not leave holes under it."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
