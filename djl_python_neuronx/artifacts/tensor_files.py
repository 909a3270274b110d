"""The tensors of a whole checkpoint, one at a time, through torch. Imports it only when it is used."""

from __future__ import annotations

import contextlib
import importlib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from djl_python_neuronx.artifacts.layouts.folder import Folder, some, unreadable
from djl_python_neuronx.artifacts.layouts.safetensors_header import BITS, read_header
from djl_python_neuronx.artifacts.layouts.weights import (
    SPLIT_FOLDER,
    Weights,
    read_key_to_filename,
    whole_files,
)
from djl_python_neuronx.errors import ArtifactError, BackendUnavailableError

if TYPE_CHECKING:
    import torch

# Safetensors' names to torch's; types that this torch lacks cannot be in its files.
_TORCH_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U8": "uint8",
        "BOOL": "bool",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
    }
)


class Facts(NamedTuple):
    """What a tensor is, without its values."""

    dtype: str
    """Safetensors' name."""
    shape: tuple[int, ...]
    element_bytes: int
    num_bytes: int


class TensorFiles:
    """Names, types and shapes of all tensors of `weights`; the values are mapped from the files when asked for.

    Raises:
        ArtifactError: a file cannot be loaded, or holds anything but tensors of known types.
        BackendUnavailableError: torch is not installed.
    """

    def __init__(self, weights: Weights) -> None:
        self._kind = weights.kind
        self._torch = torch_module()
        self._names = {
            getattr(self._torch, name): dtype
            for dtype, name in _TORCH_TYPES.items()
            if hasattr(self._torch, name)
        }
        self._pickles: dict[Path, dict[str, Any]] = {}
        self._places: dict[str, Path] = {}
        self.facts: dict[str, Facts] = {}
        folder = Folder.open(weights.folder)
        if self._kind == "split":
            inner = folder.sub(SPLIT_FOLDER)
            for name, file in read_key_to_filename(inner).items():
                self._places[name] = inner.path / file
                self._describe(name)
        else:
            for file in whole_files(folder):
                self._add(folder.path / file)

    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(facts.num_bytes for facts in self.facts.values())

    def load(self, name: str) -> torch.Tensor:
        """The values; those of pickles and split files are read from the disk as they are used."""
        path = self._places[name]
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
            for name, (dtype, shape, begin, end) in read_header(path).items():
                self._places[name] = path
                if dtype not in _TORCH_TYPES:
                    raise self._foreign(name, dtype)
                self.facts[name] = Facts(dtype, shape, BITS[dtype] // 8, end - begin)
            return
        with self._translated(path):
            loaded = self._unpickle(path)
        if not isinstance(loaded, dict):
            msg = f"{path} holds a {type(loaded).__name__}; expected a dictionary of tensors. Use another checkpoint."
            raise ArtifactError(msg)
        self._pickles[path] = loaded
        for name in loaded:
            self._places[name] = path
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
        size = tensor.element_size()
        self.facts[name] = Facts(dtype, tuple(tensor.shape), size, size * tensor.numel())

    def _foreign(self, name: str, dtype: str) -> ArtifactError:
        return ArtifactError(
            f"{self._places[name]} holds {name} as {dtype}; expected a dense tensor of "
            f"{some(_TORCH_TYPES.values(), limit=20)}. Quantised or sparse checkpoints cannot be converted."
        )

    @contextlib.contextmanager
    def _translated(self, path: Path) -> Iterator[None]:
        try:
            yield
        except ArtifactError:
            raise
        except OSError as error:
            raise unreadable(path, error) from error
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
