"""`manifest.json` of a folder of compiled files: what it was compiled from, and sizes and hashes of its files.

It is written last, so a folder that has one was finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeGuard

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    computed_field,
)

from djl_python_neuronx import links
from djl_python_neuronx.artifacts.atomic import storing, whole_file
from djl_python_neuronx.artifacts.folder import file_names, is_plain_name, read_json, reading, some
from djl_python_neuronx.artifacts.tensor_files import read_header
from djl_python_neuronx.config.values import jsonable, plain
from djl_python_neuronx.errors import ArtifactError, ArtifactMismatchError, ArtifactNotFoundError

FILE_NAME = "manifest.json"
FORMAT = "djl_python_neuronx"
VERSION = 1

Role: TypeAlias = Literal["model", "draft"]
"""Use of a compiled model: served itself, or the draft model of another one."""
Hashes: TypeAlias = Literal["all", "without weights", "none"]
"""Which files `verify` hashes. Weights can take minutes to read: without them it compares samples of theirs. Of the
others it hashes the smallest, up to 8 GiB."""

_FACTS = ("artifact_digest", "compiler", "compiler_version", "target")
_WEIGHTS = re.compile(r"\.(safetensors|bin|pt)$|(^|/)pytorch_model\.bin/")
_BLOCK_BYTES = 2**20
_MAX_HASHED_BYTES = 8 * 2**30
"""Of an output, beside its weights: an unknown folder may have any size on a disk with holes."""
_SAMPLE_BYTES = 4096
_SAMPLES_PER_FILE = 64
_MAX_THREADS = 8
# The first kind that exists is the model's, as for the libraries; downloading both changes nothing.
_WEIGHT_KINDS = (("*.safetensors",), ("pytorch_model*.bin", "pytorch_model.bin/p*"))
_SMALL_FILES = ("config.json", "*.py")


Options = Annotated[dict[str, Any], BeforeValidator(lambda value: plain(value))]
"""Values of JSON by name, as they are read back: lists for tuples."""


class CompileFacts(BaseModel):
    """Everything that compiled files depend on: with equal facts one compile can replace the other.

    Raises:
        ValueError: an option's value is not JSON's.
    """

    model_config = ConfigDict(frozen=True)

    graph_options: Options
    artifact_digest: str
    """See `artifact_digest`."""
    compiler: str
    """Its package, such as `neuronx-cc`."""
    compiler_version: str
    target: str
    """The kind of device, such as `inf2`."""
    role: Role = "model"
    """Part of the key, and no difference: the files are the same, but a model is not to be compared with what it was
    compiled for as another one's draft."""

    @property
    def key(self) -> str:
        """32 hexadecimal digits that name these facts."""
        # The role of a served model is left out: keys from before roles were a fact stay valid.
        text = json.dumps(self.model_dump(exclude_defaults=True), sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def flat(self) -> dict[str, object]:
        """Every fact but the role by its name; options by theirs, a table's as `table.name`. No option has a fact's."""
        return {**_flatten(self.graph_options), **{name: getattr(self, name) for name in _FACTS}}


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()
"""Value in `differences` of an option that one side lacks."""


def differences(wanted: CompileFacts, compiled: CompileFacts) -> dict[str, tuple[object, object]]:
    """Name of each fact that differs -> its compiled and its wanted value; the role is not compared."""
    ours, theirs = wanted.flat(), compiled.flat()
    pairs = {
        key: (theirs.get(key, ABSENT), ours.get(key, ABSENT)) for key in sorted({*ours, *theirs})
    }
    return {key: pair for key, pair in pairs.items() if _json(pair[0]) != _json(pair[1])}


def check_facts(wanted: CompileFacts, compiled: CompileFacts, where: str) -> None:
    """Refuse files in `where` that were compiled for other facts.

    Raises:
        ArtifactMismatchError: each differing fact with its compiled and its wanted value.
    """
    if found := differences(wanted, compiled):
        raise ArtifactMismatchError(found, where=where)


def _json(value: object) -> str:
    """JSON text that distinguishes 1, 1.0 and true."""
    return "absent" if value is ABSENT else json.dumps(value, sort_keys=True)


def _flatten(options: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in options.items():
        # Quoted where it could be mistaken for a name in a table.
        key = prefix + (json.dumps(name) if "." in name or '"' in name else name)
        flat.update(
            _flatten(value, f"{key}.") if isinstance(value, dict) and value else {key: value}
        )
    return flat


def _inside(name: str) -> str:
    if name == FILE_NAME or not all(map(is_plain_name, name.split("/"))):
        msg = f"{name!r} is not the path of a file inside the folder"
        raise ValueError(msg)
    return name


_Name = Annotated[str, AfterValidator(_inside)]


class FileEntry(BaseModel):
    """One file of the folder."""

    model_config = ConfigDict(frozen=True)

    bytes: int = Field(ge=0, strict=True)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    sampled: str = ""
    """Of weights: the digest of samples, see `artifact_digest`. Empty: the file is malformed, or the manifest has no
    samples."""


class Manifest(BaseModel):
    """The content of a `manifest.json`."""

    model_config = ConfigDict(frozen=True)

    format: str = FORMAT
    version: int = VERSION
    """Of the file's own form."""
    layout: str | None = None
    """Name of the folder's format in `formats`; None: compiled files alone, which cannot be served."""
    facts: CompileFacts
    effective_options: Options
    """All options in force at the compile, including those that no graph depends on."""
    packages: dict[str, str]
    """Versions of the libraries that compiled it."""
    files: dict[_Name, FileEntry]
    """By path in the folder, with `/`; all but the manifest itself."""
    created: str
    """UTC, ISO 8601."""
    package_version: str = ""
    """Version of this package that wrote it."""

    @computed_field  # type: ignore[prop-decorator]  # pydantic's way
    @property
    def compiled_for(self) -> dict[str, Any]:
        """The folder's part of `Artifact.compiled_for`."""
        return {**self.facts.graph_options, "compiler_version": self.facts.compiler_version}

    @classmethod
    def of(
        cls,
        folder: Path,
        facts: CompileFacts,
        *,
        effective_options: Mapping[str, object],
        packages: Mapping[str, str],
        layout: str | None = None,
    ) -> Manifest:
        """The manifest for all files that are in a folder now; reads each of them completely.

        Raises:
            OSError: a file cannot be read.
            ArtifactError: something in it is neither a file nor a folder, such as a link.
        """
        return cls(
            layout=layout,
            facts=facts,
            effective_options=jsonable(effective_options),
            packages=dict(packages),
            files=_entries(folder, list(_names(folder))),
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            package_version=package_version(),
        )

    def refreshed(self, folder: Path) -> Manifest:
        """The same manifest with the present sizes and hashes of the files that it lists, without those that are gone.

        Raises:
            OSError: a file cannot be read.
        """
        return self.model_copy(
            update={
                "files": _entries(folder, [name for name in self.files if (folder / name).exists()])
            }
        )


def _entries(folder: Path, names: Sequence[str]) -> dict[str, FileEntry]:
    hashes = _of_each(sha256_of, folder, names)
    weights = [name for name in names if _WEIGHTS.search(name)]
    samples = dict(zip(weights, _of_each(_sampled, folder, weights), strict=True))
    return {
        name: FileEntry(
            bytes=(folder / name).stat().st_size, sha256=sha256, sampled=samples.get(name, "")
        )
        for name, sha256 in zip(names, hashes, strict=True)
    }


def unfinished(files: Iterable[str]) -> dict[str, Any]:
    """The manifest's content while an output is written.

    `files`: all that may be found there, of this output and of the one that it replaces; the next writer clears them.
    """
    marker = {"format": FORMAT, "version": VERSION, "unfinished": True}
    return {**marker, "files": {name: {} for name in sorted(files)}}


def is_unfinished(manifest: object) -> bool:
    """True for the result of `unfinished`."""
    return _is_ours(manifest) and manifest.get("unfinished") is True


def _is_ours(manifest: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def listed_files(raw: bytes) -> set[str]:
    """The paths that a manifest of this package lists, finished or not; empty if it is another's or damaged."""
    try:
        manifest = json.loads(raw)
    except (ValueError, RecursionError):
        return set()
    files = manifest.get("files") if _is_ours(manifest) else None
    return set(files) if isinstance(files, dict) else set()


def write(folder: Path, manifest: Manifest) -> None:
    """Put the manifest into its folder in one step, after all other files.

    Raises:
        ArtifactAccessError: it cannot be written.
    """
    with storing("the manifest", folder), whole_file(folder / FILE_NAME) as temporary:
        temporary.write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


def read(folder: Path) -> Manifest:
    """The manifest of a folder, whose files are not checked.

    Raises:
        ArtifactNotFoundError: there is none: the folder is not finished, or not of this package.
        ArtifactAccessError: it cannot be read.
        ArtifactError: see `parse`.
    """
    path = folder / FILE_NAME
    if not path.exists():
        msg = (
            f"{path} is missing; expected it in a finished compile, where it is written last. Copy the folder again "
            "with all its files, or compile again."
        )
        raise ArtifactNotFoundError(msg)
    return parse(read_json(path), str(path))


def parse(value: Mapping[str, Any], where: str) -> Manifest:
    """The manifest in a JSON object that was read from `where`.

    Raises:
        ArtifactError: it is unfinished, damaged, or of a newer version of this package.
    """
    if is_unfinished(value):
        msg = (
            f"{where} marks an unfinished output: its writer was interrupted, or is still at work. "
            "Wait for it, or compile to that place again."
        )
        raise ArtifactError(msg)
    number = value.get("version")
    if (value.get("format"), number) != (FORMAT, VERSION):
        msg = (
            f"{where} has format {value.get('format')!r}, version {number!r}, of {value.get('package_version')} of "
            f"this package; {package_version()} expected {FORMAT!r}, {VERSION}. Install that version of the package, "
            "or copy the folder again, or compile again."
        )
        raise ArtifactError(msg)
    try:
        return Manifest.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        msg = f"{where} is not a manifest of this package: {reason}. Copy the folder again, or compile again."
        raise ArtifactError(msg) from error


def verify(folder: Path, manifest: Manifest, *, hashes: Hashes = "all", exact: bool = True) -> None:
    """Refuse a folder whose files are not the manifest's; sizes are always compared.

    With `exact` it may hold nothing else, and no links. Without, links are followed, as a Hub cache has them.

    Raises:
        ArtifactNotFoundError: files are missing, and no other is wrong.
        ArtifactAccessError: a file cannot be read.
        ArtifactError: the files that are missing, were changed, or are not listed.
    """
    expected = manifest.files
    with reading(folder):
        names = set(_names(folder)) if exact else {n for n in expected if (folder / n).is_file()}
        known = names & expected.keys()
        changed = {n for n in known if (folder / n).stat().st_size != expected[n].bytes}
        hashed = sorted(known - changed, key=lambda name: expected[name].bytes)
        sampled: list[str] = []
        if hashes != "all":
            allowed = hashed if hashes == "without weights" else []
            sampled = [name for name in allowed if expected[name].sampled]
            hashed = [name for name in allowed if not _WEIGHTS.search(name)]
            sums = accumulate(expected[name].bytes for name in hashed)
            hashed = hashed[: sum(total <= _MAX_HASHED_BYTES for total in sums)]
        actual = zip(hashed, _of_each(sha256_of, folder, hashed), strict=True)
        changed |= {name for name, sha256 in actual if expected[name].sha256 != sha256}
        samples = zip(sampled, _of_each(_sampled, folder, sampled), strict=True)
        changed |= {name for name, sample in samples if expected[name].sampled != sample}
    missing, extra = expected.keys() - names, names - expected.keys()
    faults = [
        f"{what} {some(sorted(found))}"
        for what, found in (("missing", missing), ("changed", changed), ("not of it", extra))
        if found
    ]
    if faults:
        msg = (
            f"the files in {folder} are not those of its {FILE_NAME}: {'; '.join(faults)}. "
            "Copy the folder again, or compile again."
        )
        raise (ArtifactNotFoundError if missing and len(faults) == 1 else ArtifactError)(msg)


def _names(folder: Path) -> Iterator[str]:
    """Paths of all files in a folder but its manifest, in order."""
    for name in sorted(file_names(folder)):
        path = folder / name
        if path.is_symlink() or not path.is_file():
            msg = f"{path} is a link or a special file; expected only files and folders in it. Put a copy in its place."
            raise ArtifactError(msg)
        if name != FILE_NAME:
            yield name


def package_version() -> str:
    """This package's version."""
    try:
        return metadata.version("djl-python-neuronx")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


def artifact_digest(folder: Path) -> str:
    """A name for the model in a folder: `sampled:<hex>`.

    It reads a few MiB of any model: config.json and the model's own code whole; of each weight file its name
    and size, a safetensors file's tensors (name, dtype, shape, place) and 4 KiB from the middle of each, of any other
    file 64 such samples. Names and times of other files do not count, nor does the folder's path.

    Equal digests prove the same configuration, and tensors of the same names, types and shapes; so a graph
    without weights fits. They make it all but certain that no tensor was trained further, which changes values
    everywhere in it. They do not prove that single rows (an added token's embedding) are the same.

    Raises:
        ArtifactAccessError: a file cannot be read.
        ArtifactError: a safetensors file is damaged.
    """
    digest = hashlib.sha256()
    with reading(folder):
        small = _sorted(folder, _SMALL_FILES)
        weights = next((found for kind in _WEIGHT_KINDS if (found := _sorted(folder, kind))), [])
    for path in (*small, *weights):
        with reading(path):
            # Which links are followed was checked when the model was found.
            content = sha256_of(path, Path("/")) if path in small else _sample(path)
        _feed(digest, path.relative_to(folder).as_posix(), content)
    return f"sampled:{digest.hexdigest()}"


def contents_digest(folder: Path, names: Iterable[str]) -> str:
    """Hexadecimal SHA-256 of the names and of all bytes of files of the model in a folder.

    Raises:
        ArtifactError: a file cannot be read, or lies elsewhere.
    """
    digest, names = hashlib.sha256(), sorted(names)
    with reading(folder):
        _feed(digest, *names, *_of_each(sha256_of, folder, names))
    return digest.hexdigest()


def sha256_of(path: Path, root: Path) -> str:
    """Hexadecimal SHA-256 of a file of the model in the folder `root`; releases the GIL."""
    digest = hashlib.sha256()
    with links.opened(path, root) as file:
        # Not hashlib.file_digest, which Python 3.10 lacks.
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _of_each(digest: Callable[[Path, Path], str], folder: Path, names: Iterable[str]) -> list[str]:
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda name: digest(folder / name, folder), names))


def _feed(digest: hashlib._Hash, *parts: object) -> None:
    # A NUL ends each part: no file name holds one, so no two lists of parts give the same bytes.
    for part in parts:
        digest.update(str(part).encode("utf-8", "surrogateescape") + b"\0")


def _sorted(folder: Path, patterns: Iterable[str]) -> list[Path]:
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _sampled(path: Path, root: Path) -> str:
    links.check(path, root, is_file=True)
    with suppress(ArtifactError):
        return _sample(path)
    return ""


def _sample(path: Path) -> str:
    digest = hashlib.sha256()
    size = path.stat().st_size
    _feed(digest, size)
    with path.open("rb", buffering=0) as file:
        for middle in _middles(path, size, digest):
            file.seek(max(0, min(middle - _SAMPLE_BYTES // 2, size - _SAMPLE_BYTES)))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _middles(path: Path, size: int, digest: hashlib._Hash) -> Iterator[int]:
    """Byte offsets of the samples."""
    if path.suffix != ".safetensors":
        yield from ((2 * i + 1) * size // (2 * _SAMPLES_PER_FILE) for i in range(_SAMPLES_PER_FILE))
        return
    header = read_header(path)
    start = size - max((entry.end for entry in header.values()), default=0)
    for name, entry in sorted(header.items()):
        _feed(digest, name, *entry)
        yield start + (entry.begin + entry.end) // 2
