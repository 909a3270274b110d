"""The remote copy of a compile store in S3: one machine compiles, all others download."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from djl_python_neuronx.artifacts import cache, fetch
from djl_python_neuronx.artifacts import manifest as manifests
from djl_python_neuronx.artifacts.atomic import storing, temporary_folder
from djl_python_neuronx.artifacts.folder import EVERYTHING, copy_tree, parse_object
from djl_python_neuronx.artifacts.manifest import CompileFacts, Manifest, check_facts
from djl_python_neuronx.errors import ArtifactError, ArtifactNotFoundError


class Mirror:
    """Finished compiles below `uri`, as `<uri>/<key>`, and the manifest of each artifact's latest one per role.

    Downloads go through the cache in `cache_root`. `environ`: see `s3`.

    Raises:
        ArtifactAccessError: a package of the extra `s3` is missing.
    """

    def __init__(self, uri: str, cache_root: Path, environ: Mapping[str, str]) -> None:
        self._uri = uri.rstrip("/")
        self._cache_root, self._environ = cache_root, environ
        self._s3 = fetch.s3_module(uri)

    def place(self, facts: CompileFacts) -> str:
        """The URI of the compile for these facts."""
        return f"{self._uri}/{facts.key}"

    def manifest(self, facts: CompileFacts) -> Manifest | None:
        """The manifest of the finished compile for these facts, or None.

        Raises:
            ArtifactMismatchError: it is of other facts.
            ArtifactError: it is damaged, or cannot be read.
        """
        found = self._read(self.place(facts))
        if found is not None:
            check_facts(facts, found.facts, where=self.place(facts))
        return found

    def pull(self, facts: CompileFacts, manifest: Manifest, folder: Path) -> None:
        """Download the compile with that manifest into an empty folder, and verify it.

        Raises:
            ArtifactError: it cannot be downloaded, or differs from its manifest.
        """
        fetched = self._s3.fetch(
            self.place(facts), self._cache_root, self._environ, selection=EVERYTHING
        )
        copy_tree(fetched, folder, link=True)
        try:
            manifests.verify(folder, manifest)
        except ArtifactError:
            cache.discard(fetched)
            raise

    def push(self, folder: Path, manifest: Manifest) -> None:
        """Upload a finished compile of this machine and make it the latest one of its artifact and role.

        Raises:
            ArtifactError: it cannot be uploaded.
        """
        facts = manifest.facts
        self._s3.upload(folder, self.place(facts), self._environ)
        self._upload_alone((folder / manifests.FILE_NAME).read_text("utf-8"), self._latest(facts))

    def probe(self) -> None:
        """Write a small file: a push that cannot succeed is noticed before the compile, not an hour later.

        Raises:
            ArtifactNotFoundError: no such bucket, which a missing compile alone does not show.
            ArtifactError: it cannot be written.
        """
        self._upload_alone("{}", f"{self._uri}/write-test")

    def latest(self, facts: CompileFacts) -> tuple[str, CompileFacts] | None:
        """URI and facts of the compile of the same artifact and role that was pushed last, or None.

        Raises:
            ArtifactError: its manifest is damaged, or cannot be read.
        """
        found = self._read(self._latest(facts))
        return None if found is None else (self.place(found.facts), found.facts)

    def _latest(self, facts: CompileFacts) -> str:
        prefix = "" if facts.role == "model" else f"{facts.role}-"
        return f"{self._uri}/latest/{prefix}{facts.artifact_digest.replace(':', '-')}"

    def _upload_alone(self, manifest: str, uri: str) -> None:
        root = self._cache_root
        with storing("a manifest", root), temporary_folder(root, "manifest-") as alone:
            (alone / manifests.FILE_NAME).write_text(manifest, encoding="utf-8")
            self._s3.upload(alone, uri, self._environ)

    def _read(self, uri: str) -> Manifest | None:
        try:
            content = self._s3.read(
                uri, manifests.FILE_NAME, self._environ, attempts=self._s3.ATTEMPTS
            )
        except ArtifactNotFoundError:
            return None
        where = f"{uri}/{manifests.FILE_NAME}"
        value = parse_object(content, where)
        return None if manifests.is_unfinished(value) else manifests.parse(value, where)
