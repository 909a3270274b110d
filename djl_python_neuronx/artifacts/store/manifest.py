"""`manifest.json`: what a folder of compiled files was made from, and what makes it whole.

It is written last, so a folder that has it was finished; its sizes and hashes say whether it still is what it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    computed_field,
)

from djl_python_neuronx.artifacts.layouts.folder import is_plain_name, read_json, some, unreadable
from djl_python_neuronx.artifacts.layouts.own_output import (
    MANIFEST,
    MANIFEST_FORMAT,
    MANIFEST_VERSION,
    is_unfinished,
)
from djl_python_neuronx.artifacts.store.digest import sha256_of_each
from djl_python_neuronx.artifacts.store.facts import CompileFacts, Options
from djl_python_neuronx.artifacts.store.publish import storing, whole_file
from djl_python_neuronx.errors import ArtifactError, ArtifactNotFoundError

FILE_NAME = MANIFEST

Role: TypeAlias = Literal["model", "draft"]
"""What a model was compiled as: to be served, or to draft for another one."""


def _inside(name: str) -> str:
    if name == FILE_NAME or not all(map(is_plain_name, name.split("/"))):
        msg = f"{name!r} is no path of a file inside the folder"
        raise ValueError(msg)
    return name


_Name = Annotated[str, AfterValidator(_inside)]


class FileEntry(BaseModel):
    """One file of the folder."""

    model_config = ConfigDict(frozen=True)

    bytes: int = Field(ge=0, strict=True)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Manifest(BaseModel):
    """The content of a `manifest.json`."""

    model_config = ConfigDict(frozen=True)

    format: str = MANIFEST_FORMAT
    version: int = MANIFEST_VERSION
    """Of the file's own form."""
    layout: str | None = None
    """Of the folder: the name of a format of `formats`; None: for a backend alone, not to be served from."""
    role: Role = "model"
    """What the first who asked for it needed it as. Older manifests do not tell; most are of models that are served."""
    facts: CompileFacts
    effective_options: Options
    """All options in force when it was made, those too that no graph depends on."""
    packages: dict[str, str]
    """Versions of the libraries that made it."""
    files: dict[_Name, FileEntry]
    """By path in the folder, with `/`; all but the manifest itself."""
    created: str
    """UTC, ISO 8601."""
    package_version: str = ""
    """Of this package, which made it."""

    @computed_field  # type: ignore[prop-decorator]  # pydantic's way
    @property
    def compiled_for(self) -> dict[str, Any]:
        """What `Artifact.compiled_for` says of the folder."""
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
        role: Role = "model",
    ) -> Manifest:
        """The manifest for all files that are in a folder now; reads each to its end.

        Raises:
            OSError: a file cannot be read.
            ArtifactError: something in it is neither a file nor a folder, such as a link.
        """
        names = list(_names(folder))
        hashes = sha256_of_each(folder / name for name in names)
        return cls(
            layout=layout,
            role=role,
            facts=facts,
            effective_options=dict(effective_options),
            packages=dict(packages),
            files={
                name: FileEntry(bytes=(folder / name).stat().st_size, sha256=sha256)
                for name, sha256 in zip(names, hashes, strict=True)
            },
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            package_version=_package_version(),
        )


def write(folder: Path, manifest: Manifest) -> None:
    """Put the manifest into its folder in one step, after all other files.

    Raises:
        ArtifactAccessError: it cannot be written.
    """
    with storing("the manifest", folder), whole_file(folder / FILE_NAME) as temporary:
        temporary.write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


def read(folder: Path) -> Manifest:
    """The manifest of a folder; its files are not looked at.

    Raises:
        ArtifactNotFoundError: there is none: the folder is not finished, or not of this package.
        ArtifactAccessError: it cannot be read.
        ArtifactError: it is damaged, or of a newer version of this package.
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
        ArtifactError: as `read`.
    """
    if is_unfinished(value):
        msg = f"{where} says that the folder is not finished: it is being written, or was cut off. Compile again."
        raise ArtifactError(msg)
    number = value.get("version")
    if value.get("format") == MANIFEST_FORMAT and type(number) is int and number > MANIFEST_VERSION:
        msg = (
            f"{where} is a manifest of version {number}, of {value.get('package_version')} of this package; "
            f"{_package_version()} reads up to version {MANIFEST_VERSION}. Install that one, or compile again."
        )
        raise ArtifactError(msg)
    if (value.get("format"), number) != (MANIFEST_FORMAT, MANIFEST_VERSION):
        msg = (
            f"{where} has format {value.get('format')!r}, version {number!r}; expected {MANIFEST_FORMAT!r}, "
            f"{MANIFEST_VERSION}. It is not of this package, or damaged: copy the folder again, or compile again."
        )
        raise ArtifactError(msg)
    try:
        return Manifest.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        msg = f"{where} is no manifest of this package: {reason}. Copy the folder again, or compile again."
        raise ArtifactError(msg) from error


def verify(
    folder: Path, manifest: Manifest, *, hashes: bool = True, allow_extra: bool = False
) -> None:
    """Refuse a folder whose files are not the manifest's. Without `hashes` only names and sizes are compared.

    Raises:
        ArtifactAccessError: a file cannot be read.
        ArtifactError: the files that are missing, were changed, or are too many.
    """
    expected = manifest.files
    try:
        found = {name: (folder / name).stat().st_size for name in _names(folder)}
        known = found.keys() & expected.keys()
        changed = {name for name in known if found[name] != expected[name].bytes}
        if hashes:
            names = sorted(known - changed)
            actual = sha256_of_each(folder / name for name in names)
            pairs = zip(names, actual, strict=True)
            changed |= {name for name, sha256 in pairs if expected[name].sha256 != sha256}
    except OSError as error:
        raise unreadable(folder, error) from error
    missing = expected.keys() - found.keys()
    extra = set() if allow_extra else found.keys() - expected.keys()
    faults = [
        f"{what} {some(sorted(names))}"
        for what, names in (("missing", missing), ("changed", changed), ("not of it", extra))
        if names
    ]
    if faults:
        msg = (
            f"the files in {folder} are not those of its {FILE_NAME}: {'; '.join(faults)}. "
            "Copy the folder again, or compile again."
        )
        raise ArtifactError(msg)


def _names(folder: Path) -> Iterator[str]:
    """Paths of all files in a folder but its manifest, in order."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            msg = f"{path} is a link or a special file; expected only files and folders in it. Put a copy in its place."
            raise ArtifactError(msg)
        if path.is_file() and name != FILE_NAME:
            yield name


def _package_version() -> str:
    try:
        return metadata.version("djl-python-neuronx")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
