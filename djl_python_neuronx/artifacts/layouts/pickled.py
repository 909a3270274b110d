"""Files of `torch.save`: whole or not, and free of code. Nothing is ever unpickled here.

A pickle is a program. Reading its instructions, without running any, tells which functions it would call; those that
rebuild tensors are known, and any other makes the file refused. Old libraries load such files with the full loader
(transformers-neuronx: `torch.load(path)`), so this look is what stands between a stranger's file and this machine.
"""

from __future__ import annotations

import pickle
import pickletools
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from djl_python_neuronx.artifacts.layouts.folder import Folder, unreadable
from djl_python_neuronx.errors import ArtifactError

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
