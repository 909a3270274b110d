"""Headers of safetensors files: which tensors, of which type, and whether the file is whole. No tensor is read."""

from __future__ import annotations

import json
import math
import operator
import pickle
import pickletools
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

from djl_python_neuronx.artifacts.folder import Folder, check_start, unreadable
from djl_python_neuronx.errors import ArtifactError

# Source: safetensors 0.4 to 0.8, MAX_HEADER_SIZE: its readers refuse longer headers.
_MAX_HEADER_BYTES = 100_000_000

BITS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
        **dict.fromkeys(("F32", "I32", "U32"), 32),
        **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
        **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
        **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
        **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
        "F4": 4,
    }
)
"""Bits of an element. Source: safetensors 0.8, enum Dtype."""

# Safetensors' names to torch's; the others (F8 variants, integers) keep their own in lower case.
_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class TensorEntry(NamedTuple):
    """One tensor of a file; `begin` and `end` are bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def torch_name(dtype: str) -> str:
    """Torch's word for a safetensors type: `bfloat16` for `BF16`."""
    return _TORCH_NAMES.get(dtype, dtype.lower())


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file, checked against each other and against the size of the file.

    Source: the safetensors format: uint64 little-endian length, a JSON header of that length, then the data.

    Raises:
        ArtifactAccessError: it cannot be read.
        ArtifactError: it is cut off, malformed, or holds a type that is unknown or does not fit its bytes.
    """
    try:
        actual = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            header_bytes = int.from_bytes(start, "little")
            raw = file.read(header_bytes) if header_bytes <= _MAX_HEADER_BYTES else b""
            file.seek(0)
            check_start(path, file.read(64))
    except OSError as error:
        raise unreadable(path, error) from error
    if len(start) < 8 or len(raw) < header_bytes:
        raise _wrong_size(path, f"at least {8 + header_bytes}", actual)
    header = _parse(path, raw)
    _check_places(path, header.values())
    expected = 8 + header_bytes + max((entry.end for entry in header.values()), default=0)
    if actual != expected:
        raise _wrong_size(path, str(expected), actual)
    _check_types(path, header)
    return header


def _parse(path: Path, raw: bytes) -> dict[str, TensorEntry]:
    try:
        return {
            name: _entry(entry) for name, entry in json.loads(raw).items() if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        msg = (
            f"{path} has a malformed safetensors header; expected dtype, shape and data_offsets per tensor. "
            "Copy or download it again."
        )
        raise ArtifactError(msg) from error


def _entry(entry: Any) -> TensorEntry:  # noqa: ANN401
    begin, end = map(operator.index, entry["data_offsets"])
    return TensorEntry(
        entry["dtype"].upper(), tuple(map(operator.index, entry["shape"])), begin, end
    )


def _check_places(path: Path, entries: Iterable[TensorEntry]) -> None:
    """The tensors lie one after the other, as the format demands."""
    free = 0
    for begin, end in sorted((entry.begin, entry.end) for entry in entries):
        if begin != free or end < begin:
            msg = (
                f"{path} has a malformed safetensors header: a tensor lies at bytes {begin} to {end}, "
                f"expected it from {free} on. Copy or download it again."
            )
            raise ArtifactError(msg)
        free = end


def _check_types(path: Path, header: Mapping[str, TensorEntry]) -> None:
    for name, (dtype, shape, begin, end) in header.items():
        if dtype not in BITS:
            msg = (
                f"{path} holds {name} in the type {dtype!r}, which safetensors does not have; expected one of "
                f"{', '.join(sorted(BITS))}. Save the model again."
            )
            raise ArtifactError(msg)
        if min(shape, default=0) < 0 or math.prod(shape) * BITS[dtype] != (end - begin) * 8:
            msg = (
                f"{path} gives {name} {end - begin} bytes, which {list(shape)} of {dtype} do not take; its shape or "
                "type is wrong. Copy or download it again."
            )
            raise ArtifactError(msg)


def _wrong_size(path: Path, expected: str, actual: int) -> ArtifactError:
    msg = (
        f"{path} is cut off or damaged: its header asks for {expected} bytes, the file has {actual}. "
        "Copy or download it again."
    )
    return ArtifactError(msg)


# Source: torch 2.13, _weights_only_unpickler: the functions that its weights-only loader accepts, of those that
# checkpoints of language models have.
_HARMLESS = re.compile(
    r"collections (OrderedDict|Counter)"
    r"|torch (\w+Storage|Size|Tensor|device|[a-z]+\d+\w*)"
    r"|torch\.storage (\w+Storage)"
    r"|torch\.nn\.parameter Parameter"
    r"|torch\._utils _rebuild_\w+"
    r"|torch\._tensor _rebuild_from_type_v2"
    r"|torch\.serialization _get_layout"
    r"|_codecs encode"
)
# The weights-only loader knows none of these, and a checkpoint needs none.
_FOREIGN = frozenset({"STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4", "PERSID", "NEWOBJ_EX"})
# Source: torch 2.13, serialization._legacy_save: magic number, protocol, system, the object, the storages' keys.
_PICKLES_OF_LEGACY_FILE = 5
_MAX_PICKLE_BYTES = 1 << 30


def check_pickle(folder: Folder, name: str) -> None:
    """Refuse a file of `torch.save` that is not whole or does more than rebuild tensors.

    Raises:
        ArtifactError: it is missing, unreadable, cut off, no such file, or holds code.
    """
    path = folder.file(name)
    try:
        if not zipfile.is_zipfile(path):
            with path.open("rb") as file:
                _check_legacy(path, file)
            return
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if member.filename.endswith(".pkl"):
                    _check_size(path, member.file_size)
                    with archive.open(member) as stream:
                        _check_instructions(path, stream)
    except OSError as error:
        raise unreadable(path, error) from error
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError) as error:
        raise _cut(path) from error


def check_archive(folder: Folder, name: str) -> Path:
    """The path of a TorchScript file (`torch.jit.save`), which must be a whole zip archive; nothing in it is run.

    Raises:
        ArtifactError: it is missing, unreadable, cut off or no archive.
    """
    path = folder.file(name)
    try:
        whole = zipfile.is_zipfile(path)
    except OSError as error:
        raise unreadable(path, error) from error
    if not whole:
        msg = f"{path} is no TorchScript archive or is cut off; expected what the compilation wrote. Copy it again."
        raise ArtifactError(msg)
    return path


def _check_legacy(path: Path, file: IO[bytes]) -> None:
    if file.read(1) != pickle.PROTO:
        raise _cut(path)
    file.seek(0)
    for _ in range(_PICKLES_OF_LEGACY_FILE):
        _check_instructions(path, file)


def _check_instructions(path: Path, stream: IO[bytes]) -> None:
    for called in _calls(stream):
        if not _HARMLESS.fullmatch(called):
            msg = (
                f"{path} holds code: loading it would call {called.replace(' ', '.')}; expected tensors only. Do not "
                "load it with anything; use the model's safetensors files, or fetch it from a source that you trust."
            )
            raise ArtifactError(msg)


def _calls(stream: IO[bytes]) -> Iterator[str]:
    """'module name' of each function or class that the pickle would fetch."""
    for instruction, argument, _ in pickletools.genops(stream):
        if instruction.name == "GLOBAL":
            yield str(argument)
        elif instruction.name in _FOREIGN:
            yield f"pickle {instruction.name}"


def _check_size(path: Path, num_bytes: int) -> None:
    if num_bytes > _MAX_PICKLE_BYTES:
        msg = f"{path} has a pickle of {num_bytes} bytes beside its tensors; expected at most {_MAX_PICKLE_BYTES}."
        raise ArtifactError(msg)


def _cut(path: Path) -> ArtifactError:
    return ArtifactError(
        f"{path} is no whole file of torch.save; it is cut off, or something else has its name. "
        "Copy or download it again."
    )
