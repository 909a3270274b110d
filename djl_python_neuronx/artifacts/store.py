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

import hashlib
import logging
import re
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from filelock import FileLock, Timeout

from djl_python_neuronx.artifacts import manifest as manifests
from djl_python_neuronx.artifacts.atomic import (
    held,
    is_writable,
    remove_partial_files,
    replace_folder,
    room,
    storing,
    sync_tree,
)
from djl_python_neuronx.artifacts.manifest import (
    FILE_NAME,
    CompileFacts,
    Manifest,
    Role,
    check_facts,
    differences,
)
from djl_python_neuronx.artifacts.mirror import Mirror
from djl_python_neuronx.errors import (
    ArtifactAccessError,
    ArtifactError,
    ArtifactNotFoundError,
    IncompatibleOptionsError,
    InvalidOptionError,
)

logger = logging.getLogger(__name__)

URL_VARIABLE = "NEURON_COMPILE_CACHE_URL"
_FLAGS_VARIABLE = "NEURON_CC_FLAGS"
_CACHE_DIR_FLAG = re.compile(r"--cache_dir[= ](\S+)")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)


@dataclass(frozen=True)
class CompilePlace:
    """What `locate` found."""

    store: str
    """Where the `CompileStore` lies: a folder, or `s3://…`."""
    neff_cache: str
    """The compiler's own cache of single graphs, which the store lies in. Whoever starts a compile sets
    `NEURON_COMPILE_CACHE_URL` to it, so that a killed compile resumes at the next graph."""
    origin: str
    """Who named it."""

    @property
    def is_remote(self) -> bool:
        """True for `s3://…`."""
        return self.store.startswith("s3://")


def locate(
    option: str | None, origin: str, environ: Mapping[str, str], default: Path
) -> CompilePlace:
    """The place that `option` (from `origin`) or the environment names, else `default`; nothing is looked at or made.

    The variables are `NEURON_COMPILE_CACHE_URL` and `--cache_dir` in `NEURON_CC_FLAGS`, which the compiler's cache
    prefers (source: libneuronxla, as Ray's TorchXLAConfig calls it). The caller passes `config.sources.environment()`.

    Raises:
        IncompatibleOptionsError: two of them name different places: half of the graphs would be compiled twice.
        InvalidOptionError: it is neither a folder nor `s3://`.
    """
    flag = _CACHE_DIR_FLAG.search(environ.get(_FLAGS_VARIABLE, ""))
    named = [
        (who, _place(value.strip(), who))
        for who, value in (
            (origin, option or ""),
            (f"environment {URL_VARIABLE}", environ.get(URL_VARIABLE, "")),
            (f"--cache_dir in environment {_FLAGS_VARIABLE}", flag[1] if flag else ""),
        )
        if value.strip()
    ]
    if len({place for _, place in named}) > 1:
        listed = " and ".join(f"{place} ({who})" for who, place in named)
        msg = f"compiled files are to be kept in different places: {listed}; expected one. Keep one of the settings"
        raise IncompatibleOptionsError(msg)
    who, place = named[0] if named else ("default", str(default))
    return CompilePlace(f"{place}/djl-neuronx", place, who)


def _place(value: str, who: str) -> str:
    match = _SCHEME.fullmatch(value)
    scheme, rest = match.groups() if match else ("file", value)
    if scheme == "s3" and rest.strip("/"):
        return f"s3://{rest.rstrip('/')}"
    if scheme == "file" and Path(rest).is_absolute():
        return str(Path(rest))
    name, expected = "compile cache", "an absolute folder, or s3://bucket/prefix"
    raise InvalidOptionError(name, value, who, expected)


STALE_S = 7 * 24 * 3600.0
"""Work that nobody took up for so long is removed."""


def take_folder(root: Path, key: str) -> Path:
    """A folder for work on `key` with what an earlier try left, or an empty one; for who holds the key's lock.

    Its path is a new one each time, so that a process which outlived the earlier try cannot write into it.
    """
    folder = root / f"{key}.{uuid.uuid4().hex[:12]}"
    earlier = sorted(root.glob(f"{key}.*"), key=_newest_s)
    for other in earlier[:-1]:
        shutil.rmtree(other, ignore_errors=True)
    if not earlier:
        folder.mkdir(parents=True)
        return folder
    earlier[-1].rename(folder)
    remove_partial_files(folder)
    # Killed between this last file and the rename that publishes the folder: proved again, as all the rest.
    (folder / FILE_NAME).unlink(missing_ok=True)
    logger.info("work_resumed folder=%s", folder)
    return folder


def empty_folder(root: Path, key: str) -> Path:
    """As `take_folder`, for work that cannot be resumed."""
    for other in root.glob(f"{key}.*"):
        shutil.rmtree(other, ignore_errors=True)
    return take_folder(root, key)


def remove_stale(root: Path, locks: Path, *, stale_s: float = STALE_S) -> None:
    """Remove the work of keys that nobody holds the lock of, and that nothing was written to for `stale_s`."""
    oldest_s = time.time() - stale_s
    for folder in root.glob("*.*"):
        if _newest_s(folder) >= oldest_s:
            continue
        try:
            with FileLock(locks / folder.name.partition(".")[0].removesuffix("-pull"), timeout=0):
                shutil.rmtree(folder, ignore_errors=True)
                logger.info("work_removed folder=%s", folder)
        except Timeout:
            continue


def _newest_s(folder: Path) -> float:
    """When something in a folder was written last, in seconds since 1970; 0 if it has just gone."""
    newest_s = 0.0
    with suppress(FileNotFoundError):
        for path in (folder, *folder.rglob("*")):
            newest_s = max(newest_s, path.lstat().st_mtime)
    return newest_s


def copy_once(source: Path, root: Path) -> Path:
    """A copy of the folder `source` below `root`, to be written to; the same one for every process, until it changes.

    For a compiler's cache on a read-only disk. The copy is named
    after the source's path and the names and sizes of its files. It appears whole; what was written into it stays.

    Raises:
        ArtifactAccessError: the source cannot be read, there is no room, or `root` cannot be written.
    """
    with storing(f"a writable copy of {source}", root):
        place = root / f"{source.name}-{_listing(source)}"
        if place.is_dir():
            return place
        (root / ".locks").mkdir(parents=True, exist_ok=True)
        with held(root / ".locks" / place.name, what=f"copy of {source}"):
            if place.is_dir():
                return place
            partial = root / ".partial" / place.name
            shutil.rmtree(partial, ignore_errors=True)  # of a killed process, as the lock is ours
            partial.parent.mkdir(exist_ok=True)
            # Content only: the modes of a read-only source are what this is to get rid of.
            shutil.copytree(source, partial, copy_function=shutil.copyfile)
            for folder in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
                folder.chmod(0o755)
            replace_folder(partial, place, root / ".trash" / uuid.uuid4().hex)
    logger.info("copied_for_writing source=%s into=%s", source, place)
    return place


def _listing(source: Path) -> str:
    digest = hashlib.sha256(str(source.resolve()).encode("utf-8", "surrogateescape"))
    for path in sorted(source.rglob("*")):
        if path.is_file():
            name = path.relative_to(source).as_posix()
            digest.update(f"\0{name}\0{path.stat().st_size}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


OnMismatch = Literal["error", "recompile"]
_ROLES: tuple[Role, ...] = get_args(Role)


class CompileStore:
    """Finished compiles under `root`, shared by any number of processes.

    `root` may be read-only: what is there is used in place, what is not is made in `fallback`.
    """

    def __init__(
        self,
        root: Path,
        *,
        fallback: Path | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        """Touches nothing."""
        self._roots = (root,) if fallback is None else (root, fallback)
        self._mirror = mirror

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
            return found
        root = self._writable_root()
        with ExitStack() as stack:
            with storing(f"the lock of the compile {facts.key}", root):
                (root / ".locks").mkdir(exist_ok=True)
                stack.enter_context(held(root / ".locks" / facts.key, what=f"compile {facts.key}"))
            # Whoever held the lock before may have made it.
            found = self._look(facts, on_mismatch) or self._pull(facts, root, on_mismatch)
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
