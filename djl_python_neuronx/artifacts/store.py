"""Store of compiled files: one folder per compile, named by the digest of everything that it depends on.

<root>/
    <key>/              a finished compile: its files and manifest.json; never changed
    .work/<key>.<token> an unfinished one, handed to the next attempt at the same key
    .locks/<key>        held during a compile or download; <key>.json names the holder
    .pushed/<key>       the mirror has it
    .failed/<key>-<v>   a compile that would fail again with version v of this package, in words; a mirror never has it
    .copies/            see `copy_once`
    .trash/             being removed
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TypeVar, get_args

from filelock import FileLock

from djl_python_neuronx.artifacts import manifest as manifests
from djl_python_neuronx.artifacts.atomic import (
    hold_lock,
    is_writable,
    remove_partial_files,
    replace_folder,
    storing,
    sync_tree,
    temporary_folder,
    whole_file,
)
from djl_python_neuronx.artifacts.folder import copy_tree, file_names
from djl_python_neuronx.artifacts.manifest import (
    CompileFacts,
    Hashes,
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
    BackendError,
    IncompatibleOptionsError,
    InvalidOptionError,
)

logger = logging.getLogger(__name__)

URL_VARIABLE = "NEURON_COMPILE_CACHE_URL"
_FLAGS_VARIABLE = "NEURON_CC_FLAGS"
CACHE_DIR_FLAG = re.compile(r"--cache_dir[= ](\S+)")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)

_Found = TypeVar("_Found")

_STALE_S = 7 * 24 * 3600.0
"""Unfinished work that was not continued for so long is removed."""


@dataclass(frozen=True)
class CompilePlace:
    """Folders of compiled files."""

    store: str
    """The root of the `CompileStore`: a folder, or `s3://...`."""
    neff_cache: str
    """The compiler's own cache of single graphs, which contains the store. A compile sets
    `NEURON_COMPILE_CACHE_URL` to it, so that a killed one resumes at the next graph."""
    origin: str
    """The option or variable that named it."""

    @property
    def is_remote(self) -> bool:
        """True for `s3://...`."""
        return self.store.startswith("s3://")


def locate(
    option: str | None, origin: str, environ: Mapping[str, str], default: Path
) -> CompilePlace:
    """The place that `option` (from `origin`) or the environment names, else `default`; touches nothing.

    The variables are `NEURON_COMPILE_CACHE_URL` and `--cache_dir` in `NEURON_CC_FLAGS`, which the compiler's cache
    prefers (source: libneuronxla, as Ray's TorchXLAConfig calls it).

    Raises:
        IncompatibleOptionsError: two of them name different places: half of the graphs would be compiled twice.
        InvalidOptionError: it is neither an absolute folder nor `s3://`.
    """
    flag = CACHE_DIR_FLAG.search(environ.get(_FLAGS_VARIABLE, ""))
    named = [
        (source, _parse_place(value.strip(), source))
        for source, value in (
            (origin, option or ""),
            (f"environment {URL_VARIABLE}", environ.get(URL_VARIABLE, "")),
            (f"--cache_dir in environment {_FLAGS_VARIABLE}", flag[1] if flag else ""),
        )
        if value.strip()
    ]
    if len({place for _, place in named}) > 1:
        listed = " and ".join(f"{place} ({source})" for source, place in named)
        msg = f"several places are set for compiled files: {listed}; expected one. Keep one of the settings"
        raise IncompatibleOptionsError(msg)
    source, place = named[0] if named else ("default", str(default))
    return CompilePlace(f"{place}/djl-neuronx", place, source)


def _parse_place(value: str, origin: str) -> str:
    match = _SCHEME.fullmatch(value)
    scheme, rest = match.groups() if match else ("file", value)
    if scheme == "s3" and rest.strip("/"):
        return f"s3://{rest.rstrip('/')}"
    if scheme == "file" and Path(rest).is_absolute():
        return str(Path(rest))
    name, expected = "compile cache", "an absolute folder, or s3://bucket/prefix"
    raise InvalidOptionError(name, value, origin, expected)


@dataclass(frozen=True)
class Miss:
    """The reason that a store has no compile for the wanted facts."""

    wanted: CompileFacts
    damage: ArtifactError | None = None
    """The error of the stored compile for these facts; None if nothing is stored."""
    nearest: tuple[str, CompileFacts] | None = None
    """See `CompileStore.nearest`."""
    failure: str = ""
    """The time and the error of the last compile for these facts, if that would fail again."""


class CompileStore:
    """Finished compiles under `root`, shared by any number of processes.

    `root` may be read-only: its compiles are used in place, missing ones are made in `fallback`.
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

    def nearest(self, facts: CompileFacts) -> tuple[str, CompileFacts] | None:
        """Place and facts of the compile of the same artifact and role with the fewest differences, or None.

        Of the mirror only the latest one is considered; one that is damaged or cannot be read is left out.
        """
        found = [
            (str(path.parent), manifest.facts)
            for root in self._roots
            for path in sorted(root.glob(f"[0-9a-f]*/{manifests.FILE_NAME}"))
            if (manifest := _read_manifest(path.parent)) is not None
        ]
        with suppress(ArtifactError):
            if self._mirror and (latest := self._mirror.latest(facts)):
                found.append(latest)
        others = [
            (where, other)
            for where, other in found
            if (other.artifact_digest, other.role) == (facts.artifact_digest, facts.role)
            and other.key != facts.key
        ]
        return min(others, key=lambda one: len(differences(facts, one[1])), default=None)

    def look(self, facts: CompileFacts) -> Miss | None:
        """The reason that `build` would compile; None if it would not. Compares sizes only, and writes nothing.

        Raises:
            ArtifactAccessError: a compile or the mirror cannot be read.
        """
        damages: list[ArtifactError] = []
        for one in (facts, *_in_other_roles(facts)):
            found = damages if one == facts else []
            if self._find(one, found, "none"):
                return None
            if self._mirror and _unless_damaged(partial(self._mirror.manifest, one), found):
                return None
        return self._miss(facts, damages)

    def build(
        self,
        facts: CompileFacts,
        compile_into: Callable[[Path], None],
        *,
        on_miss: Callable[[Miss], None],
        effective_options: Mapping[str, object],
        packages: Mapping[str, str],
    ) -> Path:
        """The finished compile for these facts: found, downloaded from the mirror, or made by `compile_into`.

        `on_miss` is called before a compile, and forbids it by raising an error. A damaged compile is replaced.

        `compile_into` fills the folder it gets, in this thread. One process per key compiles, others wait and share
        the result. After a killed attempt it gets that attempt's folder again, under another path: it may keep the
        files that were put there whole (`atomic.whole_file`), and must trust no others. Commands that it runs must end
        with this process (`guard.guarded`). Its errors are raised as they are; its files stay for the next attempt. One
        that is `lasting` is kept, until a compile succeeds, as the `failure` of the next miss.

        A mirror that cannot be read is an error, as it may have what would take an hour to compile. One that cannot
        be written is logged before the compile, and tried again at each start.

        Raises:
            ArtifactNotFoundError: the mirror's bucket does not exist.
            ArtifactAccessError: no folder can be written, or the disk is full.
            ArtifactError: a compile or the mirror cannot be read.
        """
        found = self._find(facts, [])
        if found is not None and (self._is_pushed(facts) or not any(map(is_writable, self._roots))):
            return found
        root = self._writable_root()
        with hold_lock(root / ".locks" / facts.key, what=f"compile {facts.key}"):
            damages: list[ArtifactError] = []
            # The previous holder of the lock may have made it.
            found = (
                found
                or self._find(facts, damages)
                or self._pull(facts, root, damages)
                or self._adopt(facts, root)
            )
            if found is None:
                on_miss(self._miss(facts, damages))
                self._probe()
                try:
                    found = _compile(root, facts, compile_into, effective_options, packages)
                except BackendError as error:
                    _note_failure(root, facts, error)
                    raise
                with suppress(OSError):  # it may be another user's
                    _failure_note(root, facts).unlink()
            self._push(found, facts, root)
            remove_stale(root / ".work", root / ".locks")
        return found

    def _find(
        self, facts: CompileFacts, damages: list[ArtifactError], hashes: Hashes = "all"
    ) -> Path | None:
        """The finished compile for these facts, verified; None if there is no whole one on this machine.

        Raises:
            ArtifactAccessError: it cannot be read.
        """
        for folder in [root / facts.key for root in self._roots]:
            verified = partial(_verified, folder, facts, hashes)
            if not folder.is_dir() or _unless_damaged(verified, damages) is None:
                continue
            for damage in damages:
                logger.warning("compile_damaged key=%s used=%s error=%s", facts.key, folder, damage)
            return folder
        return None

    def _miss(self, facts: CompileFacts, damages: list[ArtifactError]) -> Miss:
        failure = ""
        for root in self._roots:
            with suppress(OSError):
                failure = failure or _failure_note(root, facts).read_text("utf-8", "replace")
        return Miss(facts, next(iter(damages), None), self.nearest(facts), failure)

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

    def _pull(self, facts: CompileFacts, root: Path, damages: list[ArtifactError]) -> Path | None:
        """Download the compile for these facts from the mirror; None if it has none."""
        mirror = self._mirror
        if mirror is None:
            return None
        return _unless_damaged(lambda: _download(mirror, facts, root), damages)

    def _adopt(self, facts: CompileFacts, root: Path) -> Path | None:
        """Link the compile for the same facts in another role, whose files are the same; None if there is none."""
        for other in _in_other_roles(facts):
            found = self._find(other, []) or self._pull(other, root, [])
            if found is None:
                continue
            with storing(f"the compile {facts.key}", root):
                folder = empty_folder(root / ".work", f"{facts.key}-pull")
                copy_tree(found, folder, link=True)
                manifest = manifests.read(folder).model_copy(update={"facts": facts})
                _finish(folder, manifest, root)
            return root / facts.key
        return None

    def _probe(self) -> None:
        try:
            if self._mirror is not None:
                self._mirror.probe()
        except ArtifactNotFoundError:
            raise
        except ArtifactError as error:
            # A user may be allowed to read a common store and not to write it.
            logger.warning("compile_will_not_be_pushed error=%s", error)

    def _is_pushed(self, facts: CompileFacts) -> bool:
        return self._mirror is None or any(
            (root / ".pushed" / facts.key).exists() for root in self._roots
        )

    def _push(self, folder: Path, facts: CompileFacts, root: Path) -> None:
        if self._mirror is None or self._is_pushed(facts):
            return
        try:
            self._mirror.push(folder, manifests.read(folder))
        except ArtifactError as error:
            # An hour's work is safe on this machine; losing the start over its copy would help nobody.
            logger.error("compile_not_pushed folder=%s error=%s", folder, error)  # noqa: TRY400
            return
        _mark_pushed(root, facts)


def _in_other_roles(facts: CompileFacts) -> list[CompileFacts]:
    others = [role for role in get_args(Role) if role != facts.role]
    return [facts.model_copy(update={"role": role}) for role in others]


def _verified(folder: Path, facts: CompileFacts, hashes: Hashes) -> Path:
    """`folder` itself, which holds the whole compile for these facts.

    Raises:
        ArtifactError: it does not, or cannot be read.
    """
    manifest = manifests.read(folder)
    check_facts(facts, manifest.facts, where=str(folder))
    manifests.verify(folder, manifest, hashes=hashes)
    return folder


def _unless_damaged(get: Callable[[], _Found], damages: list[ArtifactError]) -> _Found | None:
    """The result of `get`; None, and its error in `damages`, if what it reads is damaged."""
    try:
        return get()
    except ArtifactAccessError:
        raise
    except ArtifactError as error:
        damages.append(error)
        return None


def _download(mirror: Mirror, facts: CompileFacts, root: Path) -> Path | None:
    manifest = mirror.manifest(facts)
    if manifest is None:
        return None
    with storing(f"the compile {facts.key}", root):
        folder = empty_folder(root / ".work", f"{facts.key}-pull")
        try:
            mirror.pull(facts, manifest, folder)
        except ArtifactAccessError:
            raise
        except ArtifactError:
            # This machine's cached copy may be the damaged one; it is discarded.
            folder = empty_folder(root / ".work", f"{facts.key}-pull")
            mirror.pull(facts, manifest, folder)
        sync_tree(folder)
        replace_folder(folder, root / facts.key, root / ".trash")
    _mark_pushed(root, facts)
    return root / facts.key


def _compile(
    root: Path,
    facts: CompileFacts,
    compile_into: Callable[[Path], None],
    effective_options: Mapping[str, object],
    packages: Mapping[str, str],
) -> Path:
    what = f"the compile {facts.key}"
    with storing(what, root):
        folder = take_folder(root / ".work", facts.key)
    started_s = time.monotonic()
    logger.info("compile_start folder=%s", folder)
    with storing(what, root, only_full=True):
        compile_into(folder)
    logger.info("compile_done folder=%s seconds=%.1f", folder, time.monotonic() - started_s)
    if (folder / manifests.FILE_NAME).exists():
        msg = f"the compile wrote {manifests.FILE_NAME} into {folder}; that name is the store's. Rename its own."
        raise ArtifactError(msg)
    with storing(what, root):
        remove_partial_files(folder)
        manifest = Manifest.of(
            folder, facts, effective_options=effective_options, packages=packages
        )
        _finish(folder, manifest, root)
    logger.info("compile_stored folder=%s files=%d", root / facts.key, len(manifest.files))
    return root / facts.key


def _finish(folder: Path, manifest: Manifest, root: Path) -> None:
    sync_tree(folder)
    manifests.write(folder, manifest)
    replace_folder(folder, root / manifest.facts.key, root / ".trash")


def _mark_pushed(root: Path, facts: CompileFacts) -> None:
    # Without the mark it is only pushed once more, at the next start.
    with suppress(OSError):
        (root / ".pushed").mkdir(exist_ok=True)
        (root / ".pushed" / facts.key).touch()


def _note_failure(root: Path, facts: CompileFacts, error: BackendError) -> None:
    """Keep a compile's error if it is lasting. Where it cannot be written, the next start compiles again."""
    if error.lasting:
        when = datetime.now(timezone.utc).isoformat(" ", "minutes")
        with suppress(OSError):
            note = _failure_note(root, facts)
            note.parent.mkdir(exist_ok=True)
            with whole_file(note) as temporary:
                temporary.write_text(f"{when}, {facts.compiler} {facts.compiler_version}: {error}")


def _failure_note(root: Path, facts: CompileFacts) -> Path:
    """Return the file for the failure of a compile. Another version of this package may mend it."""
    return root / ".failed" / f"{facts.key}-{manifests.package_version()}"


def _read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder that only serves to explain a miss; None if it is damaged."""
    try:
        return manifests.read(folder)
    except ArtifactError:
        return None


def take_folder(root: Path, key: str) -> Path:
    """A folder for work on `key`, empty or with the files of an earlier attempt; for the holder of the key's lock.

    Its path is new each time, so that a process which outlived the earlier attempt cannot write into it.
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
    # Killed between this last file and the rename that publishes the folder: verified again, as all the rest.
    (folder / manifests.FILE_NAME).unlink(missing_ok=True)
    logger.info("work_resumed folder=%s", folder)
    return folder


def empty_folder(root: Path, key: str) -> Path:
    """Return a new folder for work that cannot be resumed; removes what earlier work left."""
    for other in root.glob(f"{key}.*"):
        shutil.rmtree(other, ignore_errors=True)
    return take_folder(root, key)


def remove_stale(root: Path, locks: Path, *, stale_s: float = _STALE_S) -> None:
    """Remove the work of keys whose lock is free and that was not written to for `stale_s`."""
    oldest_s = time.time() - stale_s
    for folder in root.glob("*.*"):
        if _newest_s(folder) >= oldest_s:
            continue
        try:
            with FileLock(locks / folder.name.partition(".")[0].removesuffix("-pull"), timeout=0):
                shutil.rmtree(folder, ignore_errors=True)
                logger.info("work_removed folder=%s", folder)
        except OSError:  # held by another process (filelock's Timeout is one), or another user's
            continue


def _newest_s(folder: Path) -> float:
    """Time of the last write in a folder, in seconds since 1970; 0 if it was just removed."""
    newest_s = 0.0
    with suppress(FileNotFoundError):
        for path in (folder, *folder.rglob("*")):
            newest_s = max(newest_s, path.lstat().st_mtime)
    return newest_s


def copy_once(source: Path, root: Path) -> Path:
    """A writable copy of the folder `source` below `root`; the same one for every process, until `source` changes.

    For a compiler's cache on a read-only disk. The copy is named after the source's path and the names and sizes of
    its files. It appears whole; later writes into it stay.

    Raises:
        ArtifactAccessError: the source cannot be read or has a link out of it, there is no room, or `root` cannot be
            written.
    """
    with storing(f"a writable copy of {source}", root):
        place = root / f"{source.name}-{_digest_listing(source)}"
        if place.is_dir():
            return place
        with hold_lock(root / ".locks" / place.name, what=f"copy of {source}"):
            if place.is_dir():
                return place
            with temporary_folder(root / ".partial", "") as partial:
                copy_tree(source, partial / "new")
                sync_tree(partial / "new")
                replace_folder(partial / "new", place, partial / "old")
    logger.info("copied_for_writing source=%s into=%s", source, place)
    return place


def _digest_listing(source: Path) -> str:
    sizes = {name: (source / name).stat().st_size for name in sorted(file_names(source))}
    listing = json.dumps([str(source.resolve()), sizes])
    return hashlib.sha256(listing.encode()).hexdigest()[:16]
