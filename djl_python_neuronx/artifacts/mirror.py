"""The remote twin of a compile store: what one machine compiled, all others fetch."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from djl_python_neuronx.artifacts import manifest as manifests
from djl_python_neuronx.artifacts.manifest import (
    CompileFacts,
    Manifest,
    Role,
    check_facts,
    is_unfinished,
)
from djl_python_neuronx.errors import ArtifactError, ArtifactNotFoundError

if TYPE_CHECKING:
    from djl_python_neuronx.artifacts.s3 import Settings

logger = logging.getLogger(__name__)


class Transport(Protocol):
    """What carries folders to a place that a URI names, and back."""

    def read_object(self, uri: str, name: str) -> bytes:
        """One small file of a remote folder.

        Raises:
            ArtifactNotFoundError: there is none.
            ArtifactError: anything else that keeps it from us.
        """

    def download(self, uri: str, folder: Path) -> None:
        """Put all files of a remote folder into an empty local one."""

    def upload(self, folder: Path, uri: str) -> None:
        """Put all files of a local folder into a remote one, its manifest.json last."""


class S3Transport:
    """`Transport` for `s3://`, over the download cache in `cache_root`. Needs the extra `s3`."""

    def __init__(self, cache_root: Path, settings: Settings | None = None) -> None:
        from djl_python_neuronx.artifacts import folder as selection
        from djl_python_neuronx.artifacts import s3

        self._s3, self._everything = s3, selection.EVERYTHING
        self._root, self._settings = cache_root, settings or s3.DEFAULTS

    def read_object(self, uri: str, name: str) -> bytes:
        """See `Transport`."""
        return self._s3.read_object(uri, name, settings=self._settings)

    def download(self, uri: str, folder: Path) -> None:
        """See `Transport`. Files are links to the cache's where the file system allows it."""
        fetched = self._s3.fetch(
            uri, self._root, selection=self._everything, settings=self._settings
        )
        shutil.copytree(fetched, folder, copy_function=_link, dirs_exist_ok=True)

    def upload(self, folder: Path, uri: str) -> None:
        """See `Transport`."""
        self._s3.upload(folder, uri, settings=self._settings)


class Mirror:
    """Finished compiles below `uri`, as `<uri>/<key>`, and the manifest of each artifact's latest one in each role."""

    def __init__(self, uri: str, transport: Transport) -> None:
        self._uri = uri.rstrip("/")
        self._transport = transport

    def place(self, facts: CompileFacts) -> str:
        """The URI of the compile for these facts."""
        return f"{self._uri}/{facts.key}"

    def manifest(self, facts: CompileFacts) -> Manifest | None:
        """The manifest of the finished compile for these facts; None if there is none.

        Raises:
            ArtifactMismatchError: it is of other facts.
            ArtifactError: it is damaged, or cannot be read.
        """
        found = self._read(self.place(facts))
        if found is not None:
            check_facts(facts, found.facts, where=self.place(facts))
        return found

    def pull(self, facts: CompileFacts, manifest: Manifest, folder: Path) -> None:
        """Fetch the compile whose manifest that is into an empty folder, and prove it.

        Raises:
            ArtifactError: it cannot be fetched, or what came is not the manifest's.
        """
        self._transport.download(self.place(facts), folder)
        manifests.verify(folder, manifest)

    def push(self, folder: Path, manifest: Manifest) -> None:
        """Store a finished compile of this machine for the others.

        Raises:
            ArtifactError: it cannot be stored.
        """
        self._transport.upload(folder, self.place(manifest.facts))

    def set_latest(self, folder: Path, manifest: Manifest, role: Role) -> None:
        """Make a compile that was pushed the artifact's latest one for a role, whatever it was made for.

        Raises:
            ArtifactError: it cannot be stored.
        """
        latest = self._latest(manifest.facts.artifact_digest, role)
        with tempfile.TemporaryDirectory() as alone:
            shutil.copyfile(folder / manifests.FILE_NAME, Path(alone, manifests.FILE_NAME))
            self._transport.upload(Path(alone), latest)

    def probe(self) -> None:
        """Write a small file: whether a push can succeed is known before the compile, not an hour later.

        Raises:
            ArtifactNotFoundError: no such bucket, which a missing compile alone does not tell.
            ArtifactError: it cannot be written.
        """
        with tempfile.TemporaryDirectory() as alone:
            Path(alone, manifests.FILE_NAME).write_text("{}", encoding="utf-8")
            self._transport.upload(Path(alone), f"{self._uri}/write-test")

    def latest(self, artifact_digest: str, role: Role) -> tuple[str, CompileFacts] | None:
        """Place and facts of the artifact's compile for this role that was pushed last; None if there is none.

        Raises:
            ArtifactError: its manifest is damaged, or cannot be read.
        """
        found = self._read(self._latest(artifact_digest, role))
        return None if found is None else (self.place(found.facts), found.facts)

    def _latest(self, artifact_digest: str, role: Role) -> str:
        prefix = "" if role == "model" else f"{role}-"
        return f"{self._uri}/latest/{prefix}{artifact_digest.replace(':', '-')}"

    def _read(self, uri: str) -> Manifest | None:
        try:
            content = self._transport.read_object(uri, manifests.FILE_NAME)
        except ArtifactNotFoundError:
            return None
        where = f"{uri}/{manifests.FILE_NAME}"
        try:
            value: Any = json.loads(content)
        except ValueError as error:
            msg = f"{where} is not valid JSON: {error}. Remove the folder there, or compile again."
            raise ArtifactError(msg) from error
        return None if is_unfinished(value) else manifests.parse(value, where)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
