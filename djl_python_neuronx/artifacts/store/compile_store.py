"""Compiled once, found for ever: folders of compiled files by the digest of all that they depend on.

<root>/
    <key>/              a finished compile: its files and manifest.json; never changed
    .work/<key>.<token> an unfinished one, handed to the next try of the same key
    .locks/<key>        held by who compiles or fetches it; <key>.json tells who
    .roles/<key>.<role> it was found for another role than it was made for, too
    .pushed/<key>       the remote store has it
    .pushed/<key>.<role> it was the latest one there for this role
    .copies/            see `copies.copy_once`
    .trash/             on its way out
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal, get_args

from djl_python_neuronx.artifacts.remote.locks import held
from djl_python_neuronx.artifacts.store import manifest as manifests
from djl_python_neuronx.artifacts.store.facts import CompileFacts, check_facts, differences
from djl_python_neuronx.artifacts.store.manifest import Manifest, Role
from djl_python_neuronx.artifacts.store.mirror import Mirror
from djl_python_neuronx.artifacts.store.publish import (
    is_writable,
    remove_partial_files,
    replace_folder,
    room,
    storing,
    sync_tree,
)
from djl_python_neuronx.artifacts.store.workspace import empty_folder, remove_stale, take_folder
from djl_python_neuronx.errors import ArtifactAccessError, ArtifactError, ArtifactNotFoundError

logger = logging.getLogger(__name__)

OnMismatch = Literal["error", "recompile"]
_ROLES: tuple[Role, ...] = get_args(Role)


def _count_nothing(_metric: str) -> None: ...


class CompileStore:
    """Finished compiles under `root`, shared by any number of processes.

    `root` may be read-only: what is there is used in place, what is not is made in `fallback`. `count` gets the name
    of a metric when `build` finds (`compile_cache_hits_total`) or compiles (`compile_cache_misses_total`).
    """

    def __init__(
        self,
        root: Path,
        *,
        fallback: Path | None = None,
        mirror: Mirror | None = None,
        count: Callable[[str], None] = _count_nothing,
    ) -> None:
        """Touches nothing."""
        self._roots = (root,) if fallback is None else (root, fallback)
        self._mirror = mirror
        self._count = count

    def find(self, facts: CompileFacts) -> Path | None:
        """The finished compile for these facts, proved whole; None if there is none on this machine.

        Raises:
            ArtifactAccessError: it cannot be read.
            ArtifactError: there is one that is damaged, and no whole one.
        """
        damage: ArtifactError | None = None
        for root in self._roots:
            folder = root / facts.key
            if not folder.is_dir():
                continue
            try:
                manifest = manifests.read(folder)
                check_facts(facts, manifest.facts, where=str(folder))
                manifests.verify(folder, manifest)
            except ArtifactAccessError:
                raise
            except ArtifactError as error:
                damage = damage or error
                continue
            if damage is not None:
                logger.warning("compile_damaged key=%s used=%s error=%s", facts.key, folder, damage)
            return folder
        if damage is not None:
            raise damage
        return None

    def nearest(self, facts: CompileFacts, role: Role = "model") -> tuple[str, CompileFacts] | None:
        """Place and facts of the compile of the same artifact for the same role that differs least, if there is one.

        Of the remote store only the latest one is looked at.

        Raises:
            ArtifactError: the remote store cannot be read.
        """
        found = [
            (str(path.parent), other.facts)
            for root in self._roots
            for path in sorted(root.glob(f"[0-9a-f]*/{manifests.FILE_NAME}"))
            if (other := _manifest_in(path.parent)) is not None and role in self._roles(other)
        ]
        if self._mirror and (latest := self._mirror.latest(facts.artifact_digest, role)):
            found.append(latest)
        others = [one for one in found if one[1].artifact_digest == facts.artifact_digest]
        return min(
            (one for one in others if one[1].key != facts.key),
            key=lambda one: len(differences(facts, one[1])),
            default=None,
        )

    def build(
        self,
        facts: CompileFacts,
        compile: Callable[[Path], None],
        *,
        effective_options: Mapping[str, object],
        packages: Mapping[str, str],
        on_mismatch: OnMismatch = "error",
        role: Role = "model",
    ) -> Path:
        """The finished compile for these facts: found, fetched from the remote store, or made by `compile`.

        `compile` fills the folder it gets, in this thread. One process per key does so, others wait and share what
        it made. After a killed try it gets that try's folder again, under another path: it may keep the files that
        were put there whole (`publish.whole_file`), and must trust no others. Commands that it runs must end with
        this process (`guard.guarded`). What it raises comes out; its files stay for the next try.

        `role` tells whose earlier compiles are looked at where there is none for these facts: what a model was
        compiled for as another one's draft says nothing of what it is to be served with. One that fits is taken
        whatever it was made as, and is of both roles from then on.

        A remote store that cannot be read is an error, as it may have what would take an hour to make. One that
        cannot be written is logged before the compile, and tried again at each start.

        Raises:
            ArtifactMismatchError: there are compiles of the same artifact and role, but for other facts. With
                `recompile` this one is made beside them.
            ArtifactNotFoundError: the remote store's bucket does not exist.
            ArtifactAccessError: no folder can be written, or the disk is full.
            ArtifactError: the one that is there is damaged. With `recompile` it is made again.
        """
        found = self._look(facts, on_mismatch)
        if found is not None and (
            self._is_noted(found, role) or not any(map(is_writable, self._roots))
        ):
            self._count("compile_cache_hits_total")
            return found
        root = self._writable_root()
        with ExitStack() as stack:
            with storing(f"the lock of the compile {facts.key}", root):
                (root / ".locks").mkdir(exist_ok=True)
                stack.enter_context(held(root / ".locks" / facts.key, what=f"compile {facts.key}"))
            # Whoever held the lock before may have made it.
            found = self._look(facts, on_mismatch) or self._pull(facts, root, on_mismatch)
            self._count(f"compile_cache_{'misses' if found is None else 'hits'}_total")
            if found is None:
                self._explain_miss(facts, on_mismatch, role)
                self._probe()
                folder = _run(compile, root, facts.key)
                found = self._finish(folder, root, facts, effective_options, packages, role)
            if role not in self._roles(manifests.read(found)):
                _mark(root, ".roles", f"{facts.key}.{role}")
            self._push(found, root, role)
            remove_stale(root / ".work", root / ".locks")
        return found

    def _look(self, facts: CompileFacts, on_mismatch: OnMismatch) -> Path | None:
        try:
            return self.find(facts)
        except ArtifactAccessError:
            raise
        except ArtifactError as error:
            if on_mismatch == "error":
                msg = f"{error} To have it made again, remove the folder, or allow it with on_mismatch=recompile."
                raise ArtifactError(msg) from error
            logger.warning("compile_damaged key=%s error=%s", facts.key, error)
            return None

    def _writable_root(self) -> Path:
        for root in self._roots:
            if is_writable(root):
                return root
            logger.warning("compile_store_not_writable root=%s", root)
        msg = (
            f"compiled files cannot be kept: {' and '.join(map(str, self._roots))} cannot be written; expected a "
            "folder that this user can write. Mount one, or name another."
        )
        raise ArtifactAccessError(msg)

    def _explain_miss(self, facts: CompileFacts, on_mismatch: OnMismatch, role: Role) -> None:
        near = self.nearest(facts, role)
        if near is None:
            logger.info(
                "compile_miss key=%s role=%s reason='first of its artifact'", facts.key, role
            )
            return
        where, other = near
        if on_mismatch == "error":
            check_facts(facts, other, where)
        for key, compiled, wanted in differences(facts, other):
            logger.info(
                "compile_miss key=%s differs=%s compiled=%r wanted=%r nearest=%s",
                facts.key, key, compiled, wanted, where,
            )  # fmt: skip

    def _finish(
        self,
        folder: Path,
        root: Path,
        facts: CompileFacts,
        effective_options: Mapping[str, object],
        packages: Mapping[str, str],
        role: Role,
    ) -> Path:
        place = root / facts.key
        with storing(f"the compile {facts.key}", root):
            remove_partial_files(folder)
            made = Manifest.of(
                folder, facts, effective_options=effective_options, packages=packages, role=role
            )
            sync_tree(folder)
            manifests.write(folder, made)
            replace_folder(folder, place, root / ".trash")
        logger.info("compile_stored folder=%s files=%d", place, len(made.files))
        return place

    def _pull(self, facts: CompileFacts, root: Path, on_mismatch: OnMismatch) -> Path | None:
        if self._mirror is None:
            return None
        try:
            manifest = self._mirror.manifest(facts)
            if manifest is None:
                return None
            with storing(f"the compile {facts.key}", root):
                folder = empty_folder(root / ".work", f"{facts.key}-pull")
                self._mirror.pull(facts, manifest, folder)
                sync_tree(folder)
        except ArtifactAccessError:
            raise
        except ArtifactError as error:
            where = self._mirror.place(facts)
            if on_mismatch == "error":
                msg = f"{where} is damaged: {error} Remove it there, or allow to compile again (on_mismatch=recompile)."
                raise ArtifactError(msg) from error
            logger.warning("compile_damaged uri=%s error=%s", where, error)
            return None
        with storing(f"the compile {facts.key}", root):
            replace_folder(folder, root / facts.key, root / ".trash")
        for name in (facts.key, f"{facts.key}.{manifest.role}"):
            _mark(root, ".pushed", name)
        return root / facts.key

    def _probe(self) -> None:
        try:
            if self._mirror is not None:
                self._mirror.probe()
        except ArtifactNotFoundError:
            raise
        except ArtifactError as error:
            # One may be allowed to read a common store and not to write it.
            logger.warning("compile_will_not_be_pushed error=%s", error)

    def _is_noted(self, folder: Path, role: Role) -> bool:
        """Whether all is written down that a start with a finished compile has to leave."""
        manifest = manifests.read(folder)
        return role in self._roles(manifest) and self._is_pushed(manifest.facts, role)

    def _roles(self, manifest: Manifest) -> set[Role]:
        """What a compile was made for, and found for since."""
        key = manifest.facts.key
        found = {role for role in _ROLES if self._is_marked(".roles", f"{key}.{role}")}
        return {manifest.role, *found}

    def _is_pushed(self, facts: CompileFacts, role: Role) -> bool:
        return self._mirror is None or all(
            self._is_marked(".pushed", name) for name in (facts.key, f"{facts.key}.{role}")
        )

    def _is_marked(self, what: str, name: str) -> bool:
        return any((root / what / name).exists() for root in self._roots)

    def _push(self, folder: Path, root: Path, role: Role) -> None:
        manifest = manifests.read(folder)
        facts = manifest.facts
        if self._mirror is None or self._is_pushed(facts, role):
            return
        try:
            if not self._is_marked(".pushed", facts.key):
                self._mirror.push(folder, manifest)
                _mark(root, ".pushed", facts.key)
            self._mirror.set_latest(folder, manifest, role)
        except ArtifactError as error:
            # An hour's work is safe on this machine; losing the start over its copy would help nobody.
            logger.error("compile_not_pushed folder=%s error=%s", folder, error)  # noqa: TRY400
            return
        _mark(root, ".pushed", f"{facts.key}.{role}")


def _mark(root: Path, what: str, name: str) -> None:
    # Without the mark the same is only done once more, at the next start.
    with suppress(OSError):
        (root / what).mkdir(exist_ok=True)
        (root / what / name).touch()


def _manifest_in(folder: Path) -> Manifest | None:
    """Of a folder that only serves to explain: a damaged one explains nothing."""
    try:
        return manifests.read(folder)
    except ArtifactError:
        return None


def _run(compile: Callable[[Path], None], root: Path, key: str) -> Path:
    with storing(f"the compile {key}", root):
        folder = take_folder(root / ".work", key)
    started_s = time.monotonic()
    logger.info("compile_start folder=%s", folder)
    with room(f"the compile {key}", root):
        compile(folder)
    logger.info("compile_done folder=%s seconds=%.1f", folder, time.monotonic() - started_s)
    if (folder / manifests.FILE_NAME).exists():
        msg = f"the compile wrote {manifests.FILE_NAME} into {folder}; that name is the store's. Rename its own."
        raise ArtifactError(msg)
    return folder
