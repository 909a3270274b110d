"""A model folder: its names, safe reads and copies of its files, and the files that serving needs. See `links`."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from djl_python_neuronx import links
from djl_python_neuronx.config.values import shortened
from djl_python_neuronx.errors import ArtifactAccessError, ArtifactError, ArtifactNotFoundError
from djl_python_neuronx.links import AGAIN

_LFS_POINTER = b"version https://git-lfs"
TEMPLATES = "additional_chat_templates"
"""The folder of chat templates besides the main one, which transformers reads."""
LEGAL_STEMS = ("LICENSE", "NOTICE", "USE_POLICY")
"""Beginnings of the names of files that are copied and never read."""
_COPY_BYTES = 2**20
MAX_JSON_BYTES = 32 * 2**20
"""Of a JSON file, and of a safetensors header: five times the index of the largest models."""


@dataclass(frozen=True)
class Folder:
    """The names in a folder, each checked by `links.check`."""

    path: Path
    root: Path
    """The resolved model folder, which no link in it may leave."""
    names: frozenset[str]
    folders: frozenset[str]
    """Those of `names` that are folders."""

    @classmethod
    def open(cls, path: Path, root: Path | None = None) -> Folder:
        """List a folder, without bad links that nothing would follow (`README.md`, `runs`, hidden ones).

        Raises:
            OSError: it cannot be listed.
            ArtifactAccessError: a link in it leads out of the model's folder, or there is a special file.
            ArtifactNotFoundError: a link in it leads nowhere.
        """
        root = root or path.resolve()
        entries = []
        for entry in path.iterdir():
            try:
                links.check(entry, root)
            except ArtifactError:
                name = entry.name
                if _is_foreign(name) or _is_foreign(f"{name}/") or _NEVER_READ.fullmatch(name):
                    continue
                raise
            entries.append(entry)
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
            msg = f"{path} is missing or not a folder; expected one in a model like this. {AGAIN}"
            raise ArtifactNotFoundError(msg)
        with reading(path):
            return Folder.open(path, self.root)

    def check_tree(self, name: str) -> None:
        """Check all files below a sub-folder as `copy_tree` does, which may come hours later.

        Raises:
            ArtifactAccessError: one cannot be read, is a link to a folder or out of the model, or is no file.
            ArtifactNotFoundError: a link leads nowhere.
        """
        path = self.path / name
        with reading(path):
            for file in SERVING.choose(file_names(path)):
                links.check(path / file, self.root, is_file=True)

    def json(self, name: str) -> dict[str, Any]:
        """The object in a JSON file of the folder; {} if there is no such file."""
        return read_json(self.path / name, self.root) if name in self.names else {}

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


def read_json(path: Path, root: Path | None = None) -> dict[str, Any]:
    """The object in a JSON file of a model in the folder `root`, by default the file's own.

    Raises:
        ArtifactAccessError: it cannot be read, or is elsewhere.
        ArtifactError: it is malformed.
    """
    with reading(path), links.opened(path, root or path.parent) as file:
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
    """The paths, with `/`, of all files and links in a folder. Links are not followed.

    Raises:
        OSError: a folder in it cannot be listed.
    """
    names, folders = set(), [""]
    while folders:
        inner = folders.pop()
        with os.scandir(folder / inner) as entries:
            for entry in entries:
                name = f"{inner}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{name}/")
                else:
                    names.add(name)
    return names


def copy_file(source: Path, target: Path, root: Path, *, link: bool = False) -> None:
    """Copy a file of the model in the folder `root`, or `link` it where that is possible. Links become files.

    Raises:
        OSError: it cannot be read or written.
        ArtifactError: see `links.check`.
    """
    with links.opened(source, root) as file:
        if link:
            with suppress(OSError):  # another file system, or one without links
                os.link(source.resolve(), target, follow_symlinks=False)
                if os.path.samestat(target.lstat(), os.fstat(file.fileno())):
                    return
                target.unlink()  # of another file, which has taken the name
        with target.open("wb") as copy:
            shutil.copyfileobj(file, copy, _COPY_BYTES)


def copy_tree(
    source: Path,
    target: Path,
    root: Path | None = None,
    *,
    link: bool = False,
    choose: Callable[[Collection[str]], Collection[str]] = sorted,
) -> None:
    """Copy the chosen files below a folder of the model in `root`, by default of that folder alone; see `copy_file`.

    Folders get this user's usual rights, whatever a read-only source has.
    """
    target.mkdir(exist_ok=True)
    for name in choose(file_names(source)):
        copied = target / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        copy_file(source / name, copied, root or source, link=link)


def some(names: Iterable[str], limit: int = 8) -> str:
    """The first names, shortened, and the number of the others, for a message."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return (", ".join(str(shortened(name)) for name in listed[:limit]) or "nothing") + more


def check_names(names: Iterable[str], where: str) -> None:
    """Check that all names can be files below one folder.

    Raises:
        ArtifactError: one would leave the folder, or is a file and a folder; all such are listed.
    """
    names = list(names)
    known = set(names)
    problems = []
    for name in names:
        parts = name.split("/")
        parents = ["/".join(parts[:n]) for n in range(1, len(parts))]
        if not {"", ".", ".."}.isdisjoint(parts) or "\\" in name or not name.isprintable():
            problems.append(f"{name!r} is not a plain path")
        elif any(len(part.encode()) > 255 for part in parts):
            problems.append(f"too long for a file's name: {name!r}")
        elif both := known.intersection(parents):
            problems.append(f"{sorted(both)[0]!r} is a file and a folder")
    if problems:
        msg = (
            f"{where} has names that cannot be files of one folder: {some(problems, limit=5)}. "
            "Nothing was loaded; correct or remove them there."
        )
        raise ArtifactError(msg)


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
        is_too_long = error.errno == errno.ENAMETOOLONG
        remedy = "Shorten names in it" if is_too_long else "Give this user access"
        msg = f"{path} cannot be read: {error.strerror}. {remedy}, or copy it again."
        raise ArtifactAccessError(msg) from error


class Selection(NamedTuple):
    """A choice among the names of a remote folder. Its name is part of the path in the cache."""

    name: str
    choose: Callable[[Collection[str]], Collection[str]]
    """Maps names relative to the folder, with `/`, to the selected ones."""


# Other libraries' copies of the weights, and leftovers of training. A list of exclusions, because compiled formats
# name their files as they like (`p0.transformer.wte`, `<hash>.neff`, `VERSION`).
_FOREIGN_FOLDERS = frozenset({"onnx", "openvino", "coreml", "original", "metal", "runs"})
_FOREIGN_FILES = re.compile(
    r".*\.(h5|msgpack|onnx|onnx_data|ot|tflite|gguf|ggml|mlmodel|pth|nemo|md|rst|png|jpe?g|gif|svg|webp|mp4|pdf|ipynb)"
    r"|consolidated.*|training_args\.bin|(optimizer|scheduler)\.(pt|bin)",
    re.IGNORECASE,
)
_NEVER_READ = re.compile(rf"({'|'.join(LEGAL_STEMS)}|events\.out\.tfevents).*|logs|checkpoint-\d+")
"""Names of what is selected, and left out where it is a bad link."""
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


def _is_tensors(name: str) -> bool:
    """True for a file of weights or graphs, and for one in a folder that is named as such a file."""
    return any(part.endswith((*WEIGHT_SUFFIXES, ".neff", ".pt")) for part in name.split("/"))


WEIGHT_SUFFIXES = (".safetensors", ".bin", ".index.json")
"""Suffixes of weights beside config.json; a folder `pytorch_model.bin` holds weights too."""

SERVING = Selection("serving", _for_serving)
"""The files that any format reads. Pickled weights only where there are no safetensors beside them."""

CONFIGURATION = Selection(
    "configuration", lambda names: [name for name in _for_serving(names) if not _is_tensors(name)]
)
"""Those without weights and graphs."""

EVERYTHING = Selection("everything", sorted)
"""All files: for compile caches and folders that this package wrote."""
