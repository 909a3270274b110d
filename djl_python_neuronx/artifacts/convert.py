"""Whole checkpoints from one layout into another: split for transformers-neuronx, safetensors for everyone else."""

from __future__ import annotations

import json
import logging
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from safetensors import safe_open

from djl_python_neuronx.artifacts import adapters
from djl_python_neuronx.artifacts.artifact import WHOLE, Artifact
from djl_python_neuronx.artifacts.atomic import (
    require_space,
    staging,
    storing,
    sync_tree,
    temporary_folder,
)
from djl_python_neuronx.artifacts.dequantise import dequantised
from djl_python_neuronx.artifacts.folder import TEMPLATES, Folder, copy_file, copy_tree, reading
from djl_python_neuronx.artifacts.formats import detect
from djl_python_neuronx.artifacts.quantised import plain_config
from djl_python_neuronx.artifacts.tensor_files import DTYPES, Tensor, read_header
from djl_python_neuronx.artifacts.weights import (
    KEY_TO_FILENAME,
    SPLIT_FOLDER,
    Weights,
    first_layers,
    limit_layers,
    read_key_to_filename,
    whole_file_names,
)
from djl_python_neuronx.errors import ArtifactAccessError, ArtifactError

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = 5_000_000_000
"""Of one safetensors file; the default of Hugging Face's libraries."""

_COPIED = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py", ".md")
_NOT_COPIED = frozenset({"config.json", "neuron_config.json", "manifest.json", KEY_TO_FILENAME})
# Keys of config.json about compiled graphs or cut weights, which are not copied.
_DROPPED_KEYS = frozenset({"neuron", "is_presharded_checkpoint"})
_NAMES = {
    getattr(torch, name): dtype
    for dtype, (_, name) in DTYPES.items()
    if name and hasattr(torch, name)
}
"""Types of torch to safetensors' names."""


_Tensors: TypeAlias = Mapping[str, Tensor]


def convert(
    source: Path,
    destination: Path,
    to: Literal["safetensors", "split"],
    *,
    dequantize: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the model in `source` to the new folder `destination` in the layout `to`.

    With `dequantize` a quantised checkpoint is written in bfloat16.

    One tensor is in memory at a time; each is compared with its original before the folder gets its name, so that an
    interrupted conversion leaves nothing that looks finished.

    Raises:
        ArtifactError: the source cannot be converted, or is damaged.
        ArtifactAccessError: the destination is taken, has no room or cannot be written.
    """
    artifact = detect(source, origin="the argument `source`")
    if dequantize:
        tensors = dequantised(artifact, _read(artifact.weights_for("dequantising", WHOLE)))
        artifact = replace(artifact, config=plain_config(artifact.config))
    else:
        tensors = _read(_choose_weights(artifact, to))
    _write(artifact, tensors, destination, to, max_shard_bytes)
    logger.info("converted source=%s destination=%s to=%s", source, destination, to)


def write_first_layers(artifact: Artifact, weights: Weights, count: int, destination: Path) -> None:
    """Write a model with its first `count` layers alone to the new folder `destination`, as safetensors.

    Raises:
        ArtifactError: the weights are not whole, or damaged.
        ArtifactAccessError: the destination is taken, has no room or cannot be written.
    """
    tensors = _read(weights)
    kept = {name: tensors[name] for name in first_layers(tensors, count)}
    limited = replace(artifact, config=limit_layers(artifact.config, count))
    _write(limited, kept, destination, "safetensors", MAX_SHARD_BYTES)


def convert_adapter(source: Path, destination: Path) -> None:
    """Write a LoRA adapter whose tensors are pickled to the new folder `destination`, as safetensors.

    Raises:
        ArtifactError: a file is damaged, or holds anything but tensors.
        ArtifactAccessError: the destination cannot be written.
    """
    folder = Folder.open(source)
    file = folder.file(next(name for name in adapters.PICKLES if name in folder.names))
    with (
        storing(f"the adapter {source}", destination.parent),
        temporary_folder(*staging(destination)) as beside,
    ):
        new = beside / "new"
        new.mkdir()
        copy_file(source / adapters.CONFIG, new / adapters.CONFIG, folder.root)
        tensors = dict(_read_pickle(file))
        _write_shard(tensors, [*tensors], new / adapters.WEIGHTS)
        sync_tree(new)
        if not destination.exists():  # else another process was faster
            new.replace(destination)


def _write(
    artifact: Artifact, tensors: _Tensors, destination: Path, to: str, max_shard_bytes: int
) -> None:
    with (
        storing(f"the converted model {destination}", destination.parent),
        temporary_folder(*staging(destination)) as beside,
    ):
        _check_destination(destination, _num_bytes(tensors))
        new = beside / "new"
        new.mkdir()
        _copy_beside(artifact, new)
        if to == "split":
            _write_split(tensors, new)
        else:
            _write_safetensors(tensors, new, max_shard_bytes)
        _compare(tensors, detect(new, origin="the conversion's own output").weights[0])
        sync_tree(new)
        # Replaces an empty folder, fails for any other.
        new.replace(destination)


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
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        msg = f"{destination} exists and is not an empty folder; name a new one, as nothing is overwritten."
        raise ArtifactAccessError(msg)
    require_space(str(destination), destination.parent, num_bytes, "name another disk")


def _copy_beside(artifact: Artifact, into: Path) -> None:
    """Copy configuration, tokenizer and other text files; links become files."""
    folder = Folder.open(artifact.path)
    for name in folder.names - folder.folders - _NOT_COPIED:
        if name.endswith(_COPIED) and not name.endswith(".index.json"):
            copy_file(folder.path / name, into / name, folder.root)
    if TEMPLATES in folder.folders:
        copy_tree(folder.path / TEMPLATES, into / TEMPLATES, folder.root)
    config = {key: value for key, value in artifact.config.items() if key not in _DROPPED_KEYS}
    (into / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_split(tensors: _Tensors, into: Path) -> None:
    """Write the layout of transformers-neuronx's `save_pretrained_split`.

    Source: transformers-neuronx, module.py, save_split.
    """
    folder = into / SPLIT_FOLDER
    folder.mkdir()
    files = {
        name: f"p{i}.{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}" for i, name in enumerate(tensors)
    }
    for name, file_name in files.items():
        with (folder / file_name).open("wb") as file:
            # A clone, because a view would be saved with its whole storage.
            torch.save(tensors[name].load().clone(), file)
    with (folder / KEY_TO_FILENAME).open("w", encoding="utf-8") as text:
        json.dump(files, text, indent=2)


def _write_safetensors(tensors: _Tensors, into: Path, max_shard_bytes: int) -> None:
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
        index = {"metadata": {"total_size": _num_bytes(tensors)}, "weight_map": weight_map}
        (into / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2), encoding="utf-8"
        )


def _plan_shards(tensors: _Tensors, max_shard_bytes: int) -> Iterator[list[str]]:
    shard: list[str] = []
    used = 0
    for name, tensor in tensors.items():
        if shard and used + tensor.num_bytes > max_shard_bytes:
            yield shard
            shard, used = [], 0
        shard.append(name)
        used += tensor.num_bytes
    yield shard


def _write_shard(tensors: _Tensors, names: list[str], path: Path) -> None:
    """Write one safetensors file, tensor by tensor: the library (0.4 to 0.8) needs all of them in memory.

    Source: the safetensors format: uint64 little-endian length, a JSON header padded with spaces, then the data.
    """
    # The widest types first, so that each tensor begins at a multiple of its element's size.
    ordered = sorted(names, key=lambda name: -DTYPES[tensors[name].dtype][0])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in ordered:
        dtype, shape, num_bytes = tensors[name][:3]
        begin, end = end, end + num_bytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name in ordered:
            file.write(_bytes(tensors[name]).numpy().data)


def _compare(tensors: _Tensors, written: Weights) -> None:
    """Check that each tensor is in the output, with its type, shape and bits."""
    output = _read(written)
    different = [
        name
        for name, tensor in tensors.items()
        if name not in output
        or output[name][:3] != tensor[:3]
        or not torch.equal(_bytes(tensor), _bytes(output[name]))
    ]
    if different or len(output) != len(tensors):
        msg = (
            f"the tensors written to {written.folder} differ from their source: {different}; the disk or the source "
            "changed meanwhile. Convert again."
        )
        raise ArtifactError(msg)


def _bytes(tensor: Tensor) -> torch.Tensor:
    loaded: torch.Tensor = tensor.load()
    return loaded.contiguous().reshape(-1).view(torch.uint8)


def _num_bytes(tensors: _Tensors) -> int:
    return sum(tensor.num_bytes for tensor in tensors.values())


def _read(weights: Weights) -> dict[str, Tensor]:
    """All tensors of a checkpoint.

    Raises:
        ArtifactError: a file cannot be loaded, or holds anything but tensors of known types.
    """
    folder = Folder.open(weights.folder)
    if weights.kind == "split":
        inner = folder.sub(SPLIT_FOLDER)
        files = {name: inner.path / file for name, file in read_key_to_filename(inner).items()}
        return {
            name: _described(path, name, partial(_unpickle, path)) for name, path in files.items()
        }
    read = _read_safetensors if weights.kind == "safetensors" else _read_pickle
    return dict(chain(*(read(folder.path / file) for file in whole_file_names(folder))))


def _read_safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    for name, (dtype, shape, begin, end) in read_header(path).items():
        if not DTYPES[dtype][1]:
            raise _foreign(path, name, dtype)
        yield name, Tensor(dtype, shape, end - begin, partial(_mapped, path, name), path)


def _read_pickle(path: Path) -> Iterator[tuple[str, Tensor]]:
    loaded = _unpickle(path)
    if not isinstance(loaded, dict):
        msg = f"{path} holds a {type(loaded).__name__}; expected a dictionary of tensors. Use another checkpoint."
        raise ArtifactError(msg)
    for name in loaded:
        yield name, _described(path, name, partial(loaded.__getitem__, name))


def _described(path: Path, name: str, load: Callable[[], Any]) -> Tensor:
    tensor = load()
    if not isinstance(tensor, torch.Tensor):
        msg = f"{path} holds a {type(tensor).__name__} as {name}; expected a tensor. Use the original checkpoint."
        raise ArtifactError(msg)
    if tensor.dtype not in _NAMES or tensor.layout != torch.strided:
        raise _foreign(path, name, f"{tensor.layout} {tensor.dtype}")
    return Tensor(_NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes, load, path)


def _mapped(path: Path, name: str) -> torch.Tensor:
    with _translated(path), safe_open(str(path), framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def _unpickle(path: Path) -> Any:  # noqa: ANN401
    # Files from before torch 1.6 are no archives and cannot be mapped: these are in memory as a whole.
    with _translated(path):
        mapped = zipfile.is_zipfile(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


def _foreign(path: Path, name: str, dtype: str) -> ArtifactError:
    return ArtifactError(
        f"{path} holds {name} as {dtype}; expected a dense tensor of "
        f"{', '.join(known for _, known in DTYPES.values() if known)}. Quantised or sparse checkpoints cannot be "
        "converted."
    )


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        with reading(path):
            yield
    except ArtifactError:
        raise
    except Exception as error:
        # torch and safetensors raise RuntimeError, UnpicklingError, KeyError and types of their own.
        msg = (
            f"{path} cannot be loaded: {type(error).__name__}: {error}. Copy or download it again."
        )
        raise ArtifactError(msg) from error
