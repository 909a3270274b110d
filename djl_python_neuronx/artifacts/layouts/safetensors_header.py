"""Headers of safetensors files: which tensors, of which type, and whether the file is whole. No tensor is read."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from djl_python_neuronx.artifacts.layouts.folder import check_start, unreadable
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
