"""A model folder: its names, safe reads of its files, and the files that serving needs.

Links: a file of a model is in the model's folder, or in the blobs of a Hugging Face cache, where each file of a
snapshot is a link. A link to any other place is refused: folders come from archives and buckets that others fill, and
the files read here are copied and uploaded with the model. The folder itself may be a link.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from djl_python_neuronx.config.values import shortened
from djl_python_neuronx.errors import ArtifactAccessError, ArtifactError, ArtifactNotFoundError

_LFS_POINTER = b"version https://git-lfs"
MAX_JSON_BYTES = 32 * 2**20
"""Of a JSON file, and of a safetensors header: five times the index of the largest models."""
_FOR_PEOPLE = (".md", ".rst")
"""Suffixes of files that neither this package nor the libraries open: in a working copy these often are links."""


@dataclass(frozen=True)
class Folder:
    """The names in a folder, with every link in it checked."""

    path: Path
    root: Path
    """The resolved model folder, which no link in it may leave."""
    names: frozenset[str]
    folders: frozenset[str]
    """Those of `names` that are folders."""

    @classmethod
    def open(cls, path: Path, root: Path | None = None) -> Folder:
        """List a folder.

        Raises:
            OSError: it cannot be listed.
            ArtifactAccessError: a link in it leads out of the model's folder, or something in it is neither file nor
                folder: opening a pipe would wait for ever.
            ArtifactNotFoundError: a link in it leads nowhere.
        """
        root = path.resolve() if root is None else root
        entries = list(path.iterdir())
        for entry in entries:
            if entry.name.endswith(_FOR_PEOPLE):
                continue
            if entry.is_symlink():
                _check_link(entry, root)
            if not entry.is_file() and not entry.is_dir():
                msg = f"{entry} is a pipe, a socket or a device; expected a file or a folder. Remove it."
                raise ArtifactAccessError(msg)
        names = frozenset(entry.name for entry in entries)
        return cls(path, root, names, frozenset(one.name for one in entries if one.is_dir()))

    def sub(self, name: str) -> Folder:
        """A sub-folder.

        Raises:
            ArtifactNotFoundError: there is none of that name.
            ArtifactAccessError: it cannot be listed, or a link in it leads out of the model's folder.
        """
        path = self.path / name
        if name not in self.folders:
            msg = f"{path} is missing or no folder; expected one in a model like this. {AGAIN}"
            raise ArtifactNotFoundError(msg)
        with reading(path):
            return Folder.open(path, self.root)

    def json(self, name: str) -> dict[str, Any]:
        """The object in a JSON file of the folder; {} if there is no such file."""
        return read_json(self.path / name) if name in self.names else {}

    def file(self, name: str) -> Path:
        """The path of a file that must exist and not be empty; reads only its first bytes.

        Raises:
            ArtifactNotFoundError: it is missing.
            ArtifactAccessError: it cannot be read.
            ArtifactError: it is empty or a Git LFS pointer.
        """
        path = self.path / name
        if name not in self.names:
            msg = f"{path} is missing; expected it in a model like this. {AGAIN}"
            raise ArtifactNotFoundError(msg)
        with reading(path), path.open("rb") as file:
            check_start(path, file.read(len(_LFS_POINTER)))
        return path


AGAIN = "Copy or download the model again."


def check_start(path: Path, start: bytes) -> None:
    """Refuse a file that is empty, or a Git LFS pointer, by its first bytes.

    Raises:
        ArtifactError: it is either.
    """
    if start.startswith(_LFS_POINTER):
        msg = f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in its repository."
        raise ArtifactError(msg)
    if not start:
        msg = f"{path} is empty; the write that made it was cut short. {AGAIN}"
        raise ArtifactError(msg)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model folder.

    Raises:
        ArtifactAccessError: it cannot be read.
        ArtifactError: it is malformed.
    """
    with reading(path), path.open("rb") as file:
        raw = file.read(MAX_JSON_BYTES + 1)
    check_start(path, raw)
    if len(raw) > MAX_JSON_BYTES:
        msg = f"{path} has more than {MAX_JSON_BYTES} bytes, too many for a file of settings or names. {AGAIN}"
        raise ArtifactError(msg)
    return parse_object(raw, str(path))


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """The JSON object in the content of a file; `where` names it in messages.

    Raises:
        ArtifactError: it is malformed.
    """
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        msg = f"{where} is not valid JSON: {error}. Copy or download it again."
        raise ArtifactError(msg) from error
    if not isinstance(value, dict):
        msg = f"{where} holds a JSON {type(value).__name__}; expected an object. Copy or download it again."
        raise ArtifactError(msg)
    return value


def is_plain_name(name: object) -> bool:
    """True for the name of a file in the same folder: a path could lead anywhere."""
    return (
        isinstance(name, str)
        and name not in {"", ".", ".."}
        and not any(char in name for char in "/\\\0")
    )


def file_names(folder: Path) -> set[str]:
    """The paths, with `/`, of all files and links in a folder."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }


def some(names: Iterable[str], limit: int = 8) -> str:
    """The first names, shortened, and the number of the others, for a message."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return (", ".join(str(shortened(name)) for name in listed[:limit]) or "nothing") + more


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Translate the system's refusals to read a file or folder.

    Raises:
        ArtifactNotFoundError: it is gone.
        ArtifactAccessError: it cannot be read.
    """
    try:
        yield
    except ArtifactError:
        raise  # some are OSErrors too
    except FileNotFoundError as error:
        msg = f"{path} disappeared while it was read. {AGAIN}"
        raise ArtifactNotFoundError(msg) from error
    except OSError as error:
        msg = f"{path} cannot be read: {error.strerror}. Give this user access, or copy it again."
        raise ArtifactAccessError(msg) from error


def _check_link(link: Path, root: Path) -> None:
    try:
        target = link.resolve(strict=True)
    except FileNotFoundError as error:
        msg = f"{link} is a link to a file that is gone, {link.readlink()}. {AGAIN}"
        raise ArtifactNotFoundError(msg) from error
    except (OSError, RuntimeError) as error:
        msg = f"{link} is a link that cannot be followed: {error}. {AGAIN}"
        raise ArtifactAccessError(msg) from error
    # Source: huggingface_hub, the guide "Understand caching": models--<organisation>--<name>/blobs/<digest>.
    cached = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
    if not cached and not target.is_relative_to(root):
        msg = (
            f"{link} is a link out of the model's folder, to {target}; expected a file of the model or of a "
            "Hugging Face cache. If you trust it, put a copy in its place (cp -L)."
        )
        raise ArtifactAccessError(msg)


class Selection(NamedTuple):
    """A choice among the names of a remote folder. Its name is part of the path in the cache."""

    name: str
    choose: Callable[[Collection[str]], Collection[str]]
    """Maps names relative to the folder, with `/`, to the selected ones."""


# Other libraries' copies of the weights, and leftovers of training. A list of exclusions, because compiled formats
# name their files as they like (`p0.transformer.wte`, `<hash>.neff`, `VERSION`).
_FOREIGN_FOLDERS = frozenset({"onnx", "openvino", "coreml", "original", "metal", "runs"})
_FOREIGN_FILES = re.compile(
    r".*\.(h5|msgpack|onnx|onnx_data|ot|tflite|gguf|ggml|mlmodel|pth|nemo|md|png|jpe?g|gif|svg|webp|mp4|pdf|ipynb)"
    r"|consolidated.*|training_args\.bin|(optimizer|scheduler)\.(pt|bin)",
    re.IGNORECASE,
)
_SAFETENSORS = re.compile(
    r"((?:.*/)?(?:adapter_)?model)(?:-\d+-of-\d+)?\.safetensors(?:\.index\.json)?"
)
_PICKLE = re.compile(
    r"((?:.*/)?)(?:pytorch_|(adapter_))(model)(?:-\d+-of-\d+)?\.bin(?:\.index\.json)?"
)


def _for_serving(names: Collection[str]) -> list[str]:
    kept = [name for name in names if not _is_foreign(name)]
    safe = {match[1] for name in kept if (match := _SAFETENSORS.fullmatch(name))}
    pickles = {name: match for name in kept if (match := _PICKLE.fullmatch(name))}
    replaced = {name for name, match in pickles.items() if "".join(match.groups("")) in safe}
    return sorted(name for name in kept if name not in replaced)


def _is_foreign(name: str) -> bool:
    *folders, file = name.split("/")
    return (
        any(part.startswith(".") for part in (*folders, file))
        or not _FOREIGN_FOLDERS.isdisjoint(folders)
        or _FOREIGN_FILES.fullmatch(file) is not None
    )


WEIGHT_SUFFIXES = (".safetensors", ".bin", ".index.json")
"""Suffixes of weights beside config.json; a folder `pytorch_model.bin` holds weights too."""

SERVING = Selection("serving", _for_serving)
"""The files that any format reads. Pickled weights only where there are no safetensors beside them."""

EVERYTHING = Selection("everything", sorted)
"""All files: for compile caches and folders that this package wrote."""
