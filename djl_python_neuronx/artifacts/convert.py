"""Whole checkpoints from one layout into another: split for transformers-neuronx, safetensors for everyone else."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from djl_python_neuronx.artifacts.artifact import Artifact
from djl_python_neuronx.artifacts.atomic import (
    remove_abandoned,
    require_space,
    staging,
    storing,
    sync_tree,
    temporary_folder,
)
from djl_python_neuronx.artifacts.folder import TEMPLATES, Folder, copy_file, copy_tree, reading
from djl_python_neuronx.artifacts.formats import detect
from djl_python_neuronx.artifacts.tensor_files import DTYPES, read_header
from djl_python_neuronx.artifacts.weights import (
    KEY_TO_FILENAME,
    SPLIT_FOLDER,
    Weights,
    read_key_to_filename,
    whole_file_names,
)
from djl_python_neuronx.errors import (
    ArtifactAccessError,
    ArtifactError,
    BackendUnavailableError,
    InvalidOptionError,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

TARGETS = ("safetensors", "split")
MAX_SHARD_BYTES = 5_000_000_000
"""Of one safetensors file; the default of Hugging Face's libraries."""

_COPIED = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py", ".md")
_NOT_COPIED = frozenset({"config.json", "neuron_config.json", "manifest.json", KEY_TO_FILENAME})
# Keys of config.json about compiled graphs or cut weights, which are not copied.
_DROPPED_KEYS = frozenset({"neuron", "is_presharded_checkpoint"})


def convert(
    source: Path, destination: Path, to: str, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write the model in `source` to the new folder `destination` in the layout `to`, one of `TARGETS`.

    One tensor is in memory at a time; each is compared with its original before the folder gets its name, so that an
    interrupted conversion leaves nothing that looks finished.

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
    artifact = detect(source, origin="the argument `source`")
    tensors = TensorFiles(_choose_weights(artifact, to))
    _check_destination(destination, tensors.num_bytes())
    with (
        storing(f"the converted model {destination}", destination.parent),
        temporary_folder(*staging(destination)) as beside,
    ):
        partial = beside / "new"
        partial.mkdir()
        _copy_beside(artifact, partial)
        if to == "split":
            _write_split(tensors, partial)
        else:
            _write_safetensors(tensors, partial, max_shard_bytes)
        _compare(tensors, detect(partial, origin="the conversion's own output").weights[0])
        sync_tree(partial)
        # Replaces an empty folder, fails for any other.
        partial.replace(destination)
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
    with storing(f"the converted model {destination}", destination.parent):
        remove_abandoned(*staging(destination))
        if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
            msg = f"{destination} exists and is not an empty folder; name a new one, as nothing is overwritten."
            raise ArtifactAccessError(msg)
        existing = next(parent for parent in destination.absolute().parents if parent.is_dir())
        require_space(str(destination), existing, num_bytes, "name another disk")


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


def _write_split(tensors: TensorFiles, into: Path) -> None:
    """Write the layout of transformers-neuronx's `save_pretrained_split`.

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
            # A clone, because a view would be saved with its whole storage.
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
    """Write one safetensors file, tensor by tensor: the library (0.4 to 0.8) needs all of them in memory.

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
    """Check that each tensor is in the output, with its type, shape and bits."""
    torch, output = torch_module(), TensorFiles(written)
    different = [
        name
        for name, facts in tensors.facts.items()
        if output.facts.get(name) != facts
        or not torch.equal(_bytes(tensors.load(name)), _bytes(output.load(name)))
    ]
    if different or len(output.facts) != len(tensors.facts):
        msg = (
            f"the tensors written to {written.folder} differ from their source: {different}; the disk or the source "
            "changed meanwhile. Convert again."
        )
        raise ArtifactError(msg)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch_module().uint8)


class Facts(NamedTuple):
    """A tensor without its values."""

    dtype: str
    """Safetensors' name."""
    shape: tuple[int, ...]

    @property
    def element_bytes(self) -> int:
        """Of one element."""
        return DTYPES[self.dtype][0] // 8

    @property
    def num_bytes(self) -> int:
        """Of all elements."""
        return math.prod(self.shape) * self.element_bytes


class TensorFiles:
    """Names, types and shapes of all tensors of `weights`; values are mapped from the files on demand.

    Raises:
        ArtifactError: a file cannot be loaded, or holds anything but tensors of known types.
        BackendUnavailableError: torch is not installed.
    """

    def __init__(self, weights: Weights) -> None:
        self._kind = weights.kind
        self._torch = torch_module()
        self._names = {
            getattr(self._torch, name): dtype
            for dtype, (_, name) in DTYPES.items()
            if name and hasattr(self._torch, name)
        }
        self._pickles: dict[Path, dict[str, Any]] = {}
        self._paths: dict[str, Path] = {}
        self.facts: dict[str, Facts] = {}
        folder = Folder.open(weights.folder)
        if self._kind == "split":
            inner = folder.sub(SPLIT_FOLDER)
            for name, file in read_key_to_filename(inner).items():
                self._paths[name] = inner.path / file
                self._describe(name)
        else:
            for file in whole_file_names(folder):
                self._add(folder.path / file)

    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(facts.num_bytes for facts in self.facts.values())

    def load(self, name: str) -> torch.Tensor:
        """The values; those of pickles and split files are mapped, so read from the disk when they are used."""
        path = self._paths[name]
        with self._translated(path):
            if self._kind == "safetensors":
                opener = importlib.import_module("safetensors").safe_open
                with opener(str(path), framework="pt") as file:
                    loaded = file.get_tensor(name)
            elif self._kind == "split":
                loaded = self._unpickle(path)
            else:
                loaded = self._pickles[path][name]
        if not isinstance(loaded, self._torch.Tensor):
            msg = f"{path} holds a {type(loaded).__name__} as {name}; expected a tensor. Use the original checkpoint."
            raise ArtifactError(msg)
        return cast("torch.Tensor", loaded)

    def _add(self, path: Path) -> None:
        """The tensors of one file of whole weights."""
        if self._kind == "safetensors":
            for name, entry in read_header(path).items():
                self._paths[name] = path
                if not DTYPES[entry.dtype][1]:
                    raise self._foreign(name, entry.dtype)
                self.facts[name] = Facts(entry.dtype, entry.shape)
            return
        with self._translated(path):
            loaded = self._unpickle(path)
        if not isinstance(loaded, dict):
            msg = f"{path} holds a {type(loaded).__name__}; expected a dictionary of tensors. Use another checkpoint."
            raise ArtifactError(msg)
        self._pickles[path] = loaded
        for name in loaded:
            self._paths[name] = path
            self._describe(name)

    def _unpickle(self, path: Path) -> Any:  # noqa: ANN401
        # Files from before torch 1.6 are no archives and cannot be mapped: these are in memory as a whole.
        mapped = zipfile.is_zipfile(path)
        return self._torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)

    def _describe(self, name: str) -> None:
        tensor = self.load(name)
        dtype = self._names.get(tensor.dtype)
        if dtype is None or tensor.layout != self._torch.strided:
            raise self._foreign(name, f"{tensor.layout} {tensor.dtype}")
        self.facts[name] = Facts(dtype, tuple(tensor.shape))

    def _foreign(self, name: str, dtype: str) -> ArtifactError:
        return ArtifactError(
            f"{self._paths[name]} holds {name} as {dtype}; expected a dense tensor of "
            f"{', '.join(known for _, known in DTYPES.values() if known)}. Quantised or sparse checkpoints cannot be "
            "converted."
        )

    @contextlib.contextmanager
    def _translated(self, path: Path) -> Iterator[None]:
        try:
            with reading(path):
                yield
        except ArtifactError:
            raise
        except Exception as error:
            # torch and safetensors raise RuntimeError, UnpicklingError, KeyError and types of their own.
            msg = f"{path} cannot be loaded: {type(error).__name__}: {error}. Copy or download it again."
            raise ArtifactError(msg) from error


def torch_module() -> Any:  # noqa: ANN401
    """The module torch.

    Raises:
        BackendUnavailableError: it is not installed.
    """
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        msg = "converting a checkpoint needs torch, which is not installed. Run: pip install 'djl-python-neuronx[cpu]'"
        raise BackendUnavailableError(msg) from error
