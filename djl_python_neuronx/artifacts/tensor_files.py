"""Headers of safetensors, and checks of `torch.save` files. No tensor is read, nothing is unpickled.

Headers are parsed here, because `safetensors.safe_open` (0.4 to 0.8) gives no offsets, which digests need, refuses
types that are newer than itself, and its errors name neither the file nor what to do.

A pickle is a program. `check_pickles` reads its instructions without running any and refuses a file that would call
anything but the functions that rebuild tensors: before anything is loaded and without torch, also in `check`, and
TorchScript archives and tar files too, which run code in torch before 2.6 even in a weights-only load
(CVE-2025-32434). `backends.env` sets TORCH_FORCE_WEIGHTS_ONLY_LOAD besides, so that the libraries' own `torch.load`
refuses what this check could read otherwise than torch does.
"""

from __future__ import annotations

import io
import json
import math
import operator
import pickle
import pickletools
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from djl_python_neuronx.artifacts.folder import MAX_JSON_BYTES, Folder, check_start, reading, some
from djl_python_neuronx.config.values import shortened
from djl_python_neuronx.errors import ArtifactError

_MAX_DIMENSIONS = 64
_MAX_SIZE = 2**63

DTYPES: dict[str, tuple[int, str]] = {
    "F64": (64, "float64"),
    "F32": (32, "float32"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "I64": (64, "int64"),
    "I32": (32, "int32"),
    "I16": (16, "int16"),
    "I8": (8, "int8"),
    "U8": (8, "uint8"),
    "BOOL": (8, "bool"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    **dict.fromkeys(("U64", "C64"), (64, "")),
    "U32": (32, ""),
    "U16": (16, ""),
    "F8_E8M0": (8, ""),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), (6, "")),
    "F4": (4, ""),
}
"""Safetensors' name of a type -> bits of an element, and torch's name if `convert` takes it.

Source: safetensors 0.8, enum Dtype."""

# Source: torch 2.13, _weights_only_unpickler: the functions that its weights-only loader accepts, of those that
# checkpoints of language models contain.
_HARMLESS = re.compile(
    r"collections (OrderedDict|Counter)"
    r"|(__builtin__|builtins) (bytearray|complex|set)"
    r"|torch ([A-Z]\w+Storage|Size|Tensor|device|bool|(b?float|complex|q?u?int|bits)\d+\w*)"
    r"|torch\.storage ([A-Z]\w+Storage)"
    r"|torch\.nn\.parameter Parameter"
    r"|torch\._utils _rebuild_\w+"
    r"|torch\._tensor _rebuild_from_type_v2"
    r"|torch\.serialization _get_layout"
    r"|_codecs encode",
    re.ASCII,
)
# Source: as above: all instructions that it accepts. Every other one can build or name functions, or is not written by
# torch.save.
_INSTRUCTIONS = re.compile(
    r"APPENDS?|BIN(FLOAT|GET|INT[12]?|PERSID|PUT|UNICODE)|BUILD|EMPTY_(DICT|LIST|SET|TUPLE)|GLOBAL|LONG1"
    r"|LONG_BIN(GET|PUT)|MARK|NEW(FALSE|OBJ|TRUE)|NONE|PROTO|REDUCE|SETITEMS?|SHORT_BINSTRING|STOP|TUPLE[123]?"
)
# Source: torch 2.13, serialization._legacy_save: magic number, protocol, system, the object, the storages' keys.
_PICKLES_OF_LEGACY_FILE = 5
# Of the pickles and the directories of all files of a model. A tensor takes some 350 bytes of them: enough for 70,000,
# read in seconds.
_MAX_PICKLE_BYTES = 24 << 20
_MIN_PICKLE_BYTES = 4096
"""The least size a file is counted with: opening it takes time too."""
# Source: torch 2.13, serialization._is_zipfile. `zipfile.is_zipfile` looks at the end of the file instead.
_ZIP_START = b"PK\3\4"
# Source: PKWARE APPNOTE 4.3.14 to 4.3.16: the end record of 64 bits, its locator, and the end record without a comment.
_END = struct.Struct("<4s36xQQ4s4xQ4x4s8xLLH")
_END_32_BYTES = 22


class TensorEntry(NamedTuple):
    """One tensor of a safetensors file; `begin` and `end` are bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Tensor(NamedTuple):
    """A tensor of a checkpoint."""

    dtype: str
    """Safetensors' name."""
    shape: tuple[int, ...]
    num_bytes: int
    load: Callable[[], Any]
    """Returns the torch.Tensor: mapped from the file, loaded or computed again, each time."""
    path: Path
    """The file."""


def torch_name(dtype: str) -> str:
    """Torch's name of a safetensors type: `bfloat16` for `BF16`; its own in lower case where there is none."""
    return DTYPES[dtype][1] or dtype.lower()


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file; see `read_headers`."""
    (header,) = read_headers([path])
    return header


def read_headers(paths: Iterable[Path]) -> Iterator[dict[str, TensorEntry]]:
    """The tensors of each safetensors file, checked against each other and against the size of the file.

    Source: the safetensors format: uint64 little-endian length, a JSON header of that length, then the data.

    Raises:
        ArtifactAccessError: one cannot be read.
        ArtifactError: one is cut off, malformed, or holds a type that is unknown or does not fit its bytes, or all
            headers together have more than `MAX_JSON_BYTES`.
    """
    room = MAX_JSON_BYTES
    for path in paths:
        with reading(path), path.open("rb") as file:
            actual = path.stat().st_size
            start = file.read(8)
            header_bytes = int.from_bytes(start, "little")
            raw = file.read(header_bytes) if header_bytes <= room else b""
            file.seek(0)
            check_start(path, file.read(64))
        if room < header_bytes <= actual:
            msg = (
                f"{path} has a header of {header_bytes} bytes; expected at most {room} ({MAX_JSON_BYTES} with the "
                "files before it). Save the model with fewer tensors."
            )
            raise ArtifactError(msg)
        if len(start) < 8 or len(raw) < header_bytes:
            raise _wrong_size(path, f"at least {8 + header_bytes}", actual)
        room -= header_bytes
        yield _parse_header(path, raw, actual)


def _parse_header(path: Path, raw: bytes, actual: int) -> dict[str, TensorEntry]:
    try:
        listed = json.loads(raw).items()
        header = {name: _parse_entry(entry) for name, entry in listed if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        msg = (
            f"{path} has a malformed safetensors header; expected dtype, shape and data_offsets per tensor. "
            "Copy or download it again."
        )
        raise ArtifactError(msg) from error
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1][2:]):
        _check_entry(path, name, entry, end)
        end = entry.end
    if actual != 8 + len(raw) + end:
        raise _wrong_size(path, str(8 + len(raw) + end), actual)
    return header


def damage(path: Path) -> str:
    """The error in a safetensors file that its header shows; empty without one, and for other files."""
    try:
        if path.suffix == ".safetensors":
            read_header(path)
    except ArtifactError as error:
        return str(error)
    return ""


def _parse_entry(entry: Any) -> TensorEntry:  # noqa: ANN401
    begin, end = map(operator.index, entry["data_offsets"])
    shape = tuple(map(operator.index, entry["shape"]))
    if len(shape) > _MAX_DIMENSIONS or max((end, *shape)) >= _MAX_SIZE:
        raise ValueError
    return TensorEntry(entry["dtype"].upper(), shape, begin, end)


def _check_entry(path: Path, name: str, entry: TensorEntry, free: int) -> None:
    """Tensors lie one after the other, as the format demands, from byte `free` on, in known types."""
    dtype, shape, begin, end = entry
    name = str(shortened(name))
    if begin != free or end < begin:
        msg = (
            f"{path} has a malformed safetensors header: {name} lies at bytes {begin} to {end}, "
            f"expected it from {free} on. Copy or download it again."
        )
        raise ArtifactError(msg)
    if dtype not in DTYPES:
        msg = (
            f"{path} holds {name} in the type {shortened(dtype)!r}, which safetensors does not have; expected one of "
            f"{', '.join(sorted(DTYPES))}. Save the model again."
        )
        raise ArtifactError(msg)
    if min(shape, default=0) < 0 or math.prod(shape) * DTYPES[dtype][0] != (end - begin) * 8:
        msg = (
            f"{path} gives {name} {end - begin} bytes, which {list(shape)} of {dtype} do not take; its shape or "
            "type is wrong. Copy or download it again."
        )
        raise ArtifactError(msg)


def _wrong_size(path: Path, expected: str, actual: int) -> ArtifactError:
    return ArtifactError(
        f"{path} is cut off or damaged: its header requires {expected} bytes, the file has {actual}. "
        "Copy or download it again."
    )


def check_pickles(folder: Folder, names: Iterable[str]) -> None:
    """Refuse files of `torch.save` that are not whole, do more than rebuild tensors, or take long to check.

    Raises:
        ArtifactError: one is missing, unreadable, cut off, no such file, may hold code, or all together have more than
            `_MAX_PICKLE_BYTES` beside their tensors.
    """
    room = _MAX_PICKLE_BYTES
    for name in names:
        path = folder.file(name)
        try:
            with reading(path), path.open("rb") as file:
                _check_room(path, "a block", _MIN_PICKLE_BYTES, room)
                check = _check_zip if file.read(len(_ZIP_START)) == _ZIP_START else _check_legacy
                room -= max(check(path, file, room), _MIN_PICKLE_BYTES)
        except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, RuntimeError) as error:
            msg = (
                f"{path} is not a whole file of torch.save: it is cut off, or something else has its name. "
                "Copy or download it again."
            )
            raise ArtifactError(msg) from error


def check_archive(folder: Folder, name: str) -> None:
    """Refuse a TorchScript file (`torch.jit.save`) that is not a whole zip archive; nothing in it is run.

    Raises:
        ArtifactError: it is missing, unreadable, cut off or no archive.
    """
    path = folder.file(name)
    with reading(path):
        is_whole = zipfile.is_zipfile(path)
    if not is_whole:
        msg = f"{path} is not a TorchScript archive, or is cut off; expected the compilation's output. Copy it again."
        raise ArtifactError(msg)


def _check_end(path: Path, file: IO[bytes], room: int) -> int:
    """The size of an archive's directory, whose members are where the end record places them from the file's start.

    `zipfile` corrects such places for data before the archive, torch does not: they would read different members.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - _END.size))
    records = _END.unpack(file.read().rjust(_END.size, b"\0"))
    magic_64, length_64, start_64, locator, located, magic, length, start, comment = records
    if magic != b"PK\5\6":
        raise zipfile.BadZipFile
    stop = size - _END_32_BYTES
    if is_64 := locator == b"PK\6\7":
        stop, length, start = size - _END.size, length_64, start_64
    is_true_64 = (magic_64, located) == (b"PK\6\6", stop)
    _check_room(path, "a directory", length, room)
    if comment or start + length != stop or is_64 != is_true_64:
        raise _ambiguous(path, "has data before or behind its zip archive")
    return int(length)


def _check_zip(path: Path, file: IO[bytes], room: int) -> int:
    """Check an archive. Returns the bytes of its directory and its pickle."""
    room -= (used := _check_end(path, file, room))
    archive = zipfile.ZipFile(file)
    # torch looks names up without regard to case; `filename` may come from a field that torch ignores.
    members = {member.orig_filename.lower(): member for member in archive.infolist()}
    if len(members) < len(archive.infolist()):
        raise _ambiguous(path, "has two members of one name")
    for extra in (member.extra for member in members.values()):
        # torch.save writes sizes of 64 bits alone: `zipfile` takes all such fields, torch the first.
        if extra and (extra[:2], int.from_bytes(extra[2:4], "little")) != (b"\1\0", len(extra) - 4):
            raise _ambiguous(path, "has other fields than sizes in its zip archive")
    names = [name for name in members if name.endswith(".pkl")]
    if [name.rpartition("/")[2] for name in names] != ["data.pkl"]:
        # Source: torch 2.13, serialization._is_torchscript_zip: torch.load hands these to torch.jit.load.
        raise _ambiguous(path, f"has the pickles {some(names)} instead of one data.pkl")
    member = members[names[0]]
    _check_room(path, "a pickle", member.file_size, room)
    if member.compress_type != zipfile.ZIP_STORED:
        raise _unchecked(path, "a compressed pickle")
    _check_instructions(path, io.BytesIO(archive.read(member)))
    return used + member.file_size


def _check_legacy(path: Path, file: IO[bytes], room: int) -> int:
    """Check a file of the time before archives. Returns the bytes of its pickles."""
    if zipfile.is_zipfile(file):
        raise _ambiguous(path, "is both pickles and a zip archive")
    file.seek(0)
    start = io.BytesIO(file.read(room))
    if start.read(1) != pickle.PROTO:
        raise EOFError
    # Not is_tarfile, which reads what a header declares.
    with suppress(tarfile.HeaderError):
        tarfile.TarInfo.frombuf(start.getvalue()[: tarfile.BLOCKSIZE], "utf-8", "replace")
        raise _ambiguous(path, "is both pickles and a tar file")
    start.seek(0)
    for _ in range(_PICKLES_OF_LEGACY_FILE):
        _check_instructions(path, start)
    return start.tell()


def _check_instructions(path: Path, stream: io.BytesIO) -> None:
    """Refuse what the weights-only loader of torch would refuse, without making any of the objects."""
    for instruction, argument, _ in pickletools.genops(stream):
        if not _INSTRUCTIONS.fullmatch(instruction.name):
            raise _unchecked(path, f"the pickle instruction {instruction.name}")
        if instruction.name == "GLOBAL" and not _HARMLESS.fullmatch(str(argument)):
            raise _unchecked(path, "a call of " + str(shortened(argument)).replace(" ", "."))


def _unchecked(path: Path, what: str) -> ArtifactError:
    return ArtifactError(
        f"{path} may hold code: it has {what}, which cannot be checked; expected tensors only. Use the model's "
        "safetensors files, or a file with the tensors of its state_dict alone."
    )


def _check_room(path: Path, what: str, size: int, room: int) -> None:
    if size > room:
        msg = (
            f"{path} has {what} of {size} bytes beside its tensors; expected at most {room} ({_MAX_PICKLE_BYTES} with "
            "the files before it). Use the model's safetensors files."
        )
        raise ArtifactError(msg)


def _ambiguous(path: Path, what: str) -> ArtifactError:
    return ArtifactError(
        f"{path} {what}, so that programs read it differently and code can hide in it; expected what torch.save "
        "writes. Do not load it with anything; use the model's safetensors files."
    )
