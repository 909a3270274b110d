"""Local copies of remote folders: downloaded once for all processes, resumable, whole or not at all.

<root>/<name>-<digest of the identity>/
    lock  lock.json           held during a download, and its holder
    partial/                  an unfinished download, see `PartialFolder`
    versions/<digest of the listing>/
        files/                what `fetch` returns
        manifest.json         what the remote listed; moved here with the files, so no version is without one
        durable               the files have reached the disk
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from djl_python_neuronx.artifacts.atomic import (
    flock,
    hold_lock,
    require_space,
    storing,
    sync,
    sync_tree,
)
from djl_python_neuronx.artifacts.tensor_files import damage
from djl_python_neuronx.errors import ArtifactAccessError

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Bytes done and bytes in total. Called often, from any thread, one call at a time."""

PIECE_BYTES = 16 * 2**20
"""Bytes of one request, and the most that a killed download loses per thread."""
_LOG_EVERY_S = 10.0
_NUM_THREADS = 10
_MANIFEST, _DURABLE = "manifest.json", "durable"
_SCHEMA = 1
_LOST = frozenset({errno.EIO, errno.ENOSPC, errno.EDQUOT})
"""Errors with which `fsync` reports lost writes (network disks report a full disk late)."""

# Open descriptors with a shared flock on the manifest of each version that this process uses, until it ends: only a
# process that gets the exclusive lock removes a version. Forked children share the descriptors, so they count too.
_in_use: dict[Path, int] = {}
_in_use_lock = threading.Lock()


class RemoteChangedError(Exception):
    """A file differs from what the remote listed. Never leaves `fetch`."""


@dataclass(frozen=True)
class RemoteFile:
    """One file of a remote folder, as its listing describes it."""

    name: str
    """Relative to the folder, with `/`."""
    size: int
    etag: str
    """Changes whenever the content does."""


@dataclass(frozen=True)
class Piece:
    """Bytes `start` to `end` (exclusive) of a file: what one request fetches."""

    file: RemoteFile
    start: int
    end: int

    @property
    def size(self) -> int:
        """In bytes."""
        return self.end - self.start

    @property
    def is_whole(self) -> bool:
        """True if the file is just this piece."""
        return self.size == self.file.size


class Remote(Protocol):
    """A remote folder."""

    uri: str
    """For messages."""
    identity: Sequence[str]
    """Everything that distinguishes it from other folders: scheme, endpoint, bucket, prefix, selection."""

    def list(self) -> Sequence[RemoteFile]:
        """The selected files as they are now; makes at least one request."""

    def download(
        self, pieces: Sequence[Piece], into: PartialFolder, on_bytes: Callable[[int], None]
    ) -> None:
        """Write and record all `pieces`. `on_bytes` gets counts, negative for bytes taken back; any thread.

        Raises:
            RemoteChangedError: a file differs from the listing.
            OSError: the local disk refuses.
        """

    def verify(self, file: RemoteFile, path: Path) -> bool | None:
        """True if `path` has the content of `file`, False if not; None if the remote has no checksum. Any thread."""


def fetch(remote: Remote, root: Path, *, progress: Progress | None = None) -> Path:
    """A read-only local folder with the files of `remote` as they are now.

    One process downloads and the others wait; what is there is not downloaded again. A changed remote gives a new
    folder, in which unchanged files are links; the old one stays while a process uses it.

    Raises:
        ArtifactAccessError: no room, no access, or the remote keeps changing, or delivers damaged files.
        ArtifactNotFoundError: raised by `remote`.
    """
    digest = hashlib.sha256("\n".join(remote.identity).encode()).hexdigest()[:16]
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", remote.identity[-1].rpartition("/")[2])[:48]
    place = root / f"{readable.strip('.-') or 'root'}-{digest}"
    with storing(remote.uri, place):
        return _fetch(remote, place, progress)


def _fetch(remote: Remote, place: Path, progress: Progress | None) -> Path:
    if ready := _use(place / "versions" / _version(remote.list())):
        return ready
    with hold_lock(place / "lock", what=remote.uri):
        for _ in range(2):
            # Listed again: meanwhile another process may have finished, or the remote may have changed.
            listed = remote.list()
            version = place / "versions" / _version(listed)
            if ready := _use(version):
                return ready
            try:
                _download(remote, listed, place, progress)
            except RemoteChangedError as error:
                logger.warning("remote_differs uri=%s reason=%s", remote.uri, error)
                reason = error
                continue
            _publish(listed, place, version)
            if ready := _use(version):
                # The model need not wait for the disk. If the process ends first, the next boot fetches again.
                threading.Thread(
                    target=_settle, args=(version,), name="cache-settle", daemon=True
                ).start()
                _remove_unused(place, version)
                return ready
            msg = f"{version} was removed while it was made. Let nothing clean {place.parent} while models load."
            raise ArtifactAccessError(msg)
    msg = (
        f"{remote.uri} differed twice from what it lists, last: {reason}. Wait until its upload has ended, check "
        "network, disk and memory, and start again; if that does not help, upload it again."
    )
    raise ArtifactAccessError(msg) from reason


def _version(files: Sequence[RemoteFile]) -> str:
    described = sorted([file.name, file.size, file.etag] for file in files)
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]


def _download(
    remote: Remote, listed: Sequence[RemoteFile], place: Path, progress: Progress | None
) -> None:
    partial = PartialFolder(place / "partial")
    present = _present(place)
    needed, total = partial.missing_bytes(listed, present), sum(file.size for file in listed)
    require_space(remote.uri, place, needed, "name a cache folder on a larger disk")
    logger.info(
        "fetch_start uri=%s files=%d bytes=%d missing_bytes=%d into=%s",
        remote.uri, len(listed), total, needed, place,
    )  # fmt: skip
    missing = partial.prepare(listed, present)
    with measure_transfer(remote.uri, total, total - needed, progress) as on_bytes:
        remote.download(missing, partial, on_bytes)
    left = partial.missing(listed)
    if left:
        msg = f"{remote.uri} is not whole after its download: {left[0].file.name} lacks bytes from {left[0].start} on."
        raise ArtifactAccessError(msg)
    _verify(remote, [file for file in listed if file.size and file not in present], partial.files)


def _verify(remote: Remote, files: Sequence[RemoteFile], folder: Path) -> None:
    """Compare what was downloaded with the remote's checksums, safetensors files without one with their headers.

    Raises:
        RemoteChangedError: some differ. They are removed, so that they are downloaded again.
    """
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        verdicts = list(pool.map(lambda file: remote.verify(file, folder / file.name), files))
    faults = []
    for file, intact in zip(files, verdicts, strict=True):
        if intact:
            continue  # it is as it was uploaded; whether it can be served is for `detect`
        path = folder / file.name
        if fault := damage(path) if intact is None else f"{path} differs from its checksum":
            faults.append(fault)
            path.unlink()
    if faults:
        raise RemoteChangedError("; ".join(faults[:3]))
    unknown = [file.size for file, intact in zip(files, verdicts, strict=True) if intact is None]
    if unknown:
        logger.info(
            "fetch_unverified uri=%s files=%d of=%d bytes=%d reason='no checksum that can be computed'",
            remote.uri, len(unknown), len(files), sum(unknown),
        )  # fmt: skip


def _present(place: Path) -> dict[RemoteFile, Path]:
    """Whole files of published versions: most of a model stays when its configuration is edited."""
    return {
        file: manifest.parent / "files" / file.name
        for manifest in place.glob(f"versions/*/{_MANIFEST}")
        for file in _check(manifest.parent) or ()
    }


def _publish(listed: Sequence[RemoteFile], place: Path, version: Path) -> None:
    partial = place / "partial"
    files = [[file.name, file.size, file.etag] for file in listed]
    manifest = {"schema": _SCHEMA, "boot_id": boot_id(), "files": files}
    (partial / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    version.parent.mkdir(exist_ok=True)
    shutil.rmtree(version, ignore_errors=True)  # what `_use` found damaged
    partial.replace(version)


def _settle(version: Path) -> None:
    try:
        sync_tree(version)
        sync(version.parent)
        (version / _DURABLE).touch()
    except OSError as error:
        logger.warning("cache_settle_failed version=%s error=%s", version, error)
        if error.errno in _LOST:
            discard(version / "files")


def _check(version: Path) -> list[RemoteFile] | None:
    """The files of a version, or None if it is not whole."""
    try:
        manifest = json.loads((version / _MANIFEST).read_bytes())
        files = [RemoteFile(*file) for file in manifest["files"]]
        survived = manifest["boot_id"] == boot_id() != "" or (version / _DURABLE).exists()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = all(_size(version / "files" / file.name) == file.size for file in files)
    return files if survived and whole else None


def _use(version: Path) -> Path | None:
    """The files of a published version, protected from removal while this process lives; None if it is not whole."""
    with _in_use_lock:
        if version not in _in_use or not _is_current(version, _in_use[version]):
            descriptor = _share(version)
            if descriptor is None:
                return None
            _in_use[version] = descriptor
    if _check(version) is None:
        logger.warning("cache_damaged version=%s", version)
        return None
    return version / "files"


def _share(version: Path) -> int | None:
    try:
        descriptor = os.open(version / _MANIFEST, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        removing = False
    except OSError as error:
        # Held by a process that removes it. Where there are no locks, nothing is ever removed.
        removing = error.errno in {errno.EAGAIN, errno.EACCES}
    if removing or not _is_current(version, descriptor):
        os.close(descriptor)
        return None
    return descriptor


def discard(files: Path) -> None:
    """Forget a version, the result of `fetch`, whose files are damaged: the next `fetch` downloads it again."""
    (files.parent / _MANIFEST).unlink(missing_ok=True)


def _is_current(version: Path, descriptor: int) -> bool:
    """True if the version's manifest still is the open one."""
    try:
        return os.path.samestat((version / _MANIFEST).stat(), os.fstat(descriptor))
    except OSError:
        return False


def _remove_unused(place: Path, current: Path) -> None:
    for manifest in place.glob(f"versions/*/{_MANIFEST}"):
        if manifest.parent == current:
            continue
        try:
            with flock(manifest):
                manifest.unlink()  # first: a version without it does not count, however far the rest gets
                shutil.rmtree(manifest.parent, ignore_errors=True)
            logger.info("cache_removed version=%s", manifest.parent)
        except OSError as error:
            logger.info("cache_kept version=%s reason=%s", manifest.parent, error)


class PartialFolder:
    """Files filled piece by piece, and a journal of the finished pieces. One process at a time.

    A piece enters the journal after its last byte is written, under the ETag that it was fetched with; everything
    else is fetched again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = path / "files"
        self._journal = path / "journal"
        self._lock = threading.Lock()
        self._done: set[Piece] = set()

    def missing_bytes(
        self, wanted: Sequence[RemoteFile], present: Mapping[RemoteFile, Path]
    ) -> int:
        """Bytes that `prepare` would find missing; changes nothing."""
        done = self._read_journal(wanted)
        # By the files' sizes: the pieces of a remote that is far too large are too many to list.
        return sum(file.size for file in wanted if file not in present) - sum(
            piece.size for piece in done if piece.file not in present
        )

    def prepare(
        self, wanted: Sequence[RemoteFile], present: Mapping[RemoteFile, Path]
    ) -> list[Piece]:
        """Create the files and the journal for `wanted`, remove all others, and return the missing pieces.

        Files in `present` lie whole at these paths: they are linked, not copied.
        """
        done = self._read_journal(wanted)
        if not done:
            shutil.rmtree(self.path, ignore_errors=True)
        self.files.mkdir(parents=True, exist_ok=True)
        self._remove_others({file.name for file in wanted})
        linked = {file for file in wanted if file in present and self._link(file, present[file])}
        fresh = {file for file in wanted if file not in linked and self._allot(file)}
        done = {piece for piece in done if piece.file not in fresh}
        done |= {piece for file in linked for piece in _pieces(file)}
        # In one step, before any byte changes: else pieces of an ETag that was replaced and came back would count.
        temporary = self._journal.with_name("journal.new")
        temporary.write_text(f"{boot_id()}\n" + "".join(map(_line, done)), encoding="utf-8")
        temporary.replace(self._journal)
        self._done = done
        return self.missing(wanted)

    def missing(self, wanted: Sequence[RemoteFile]) -> list[Piece]:
        """Pieces not yet recorded in the journal. Call `prepare` first."""
        return [piece for file in wanted for piece in _pieces(file) if piece not in self._done]

    @contextmanager
    def open(self, file: RemoteFile) -> Iterator[int]:
        """A descriptor to write pieces of this file through, at their offsets."""
        descriptor = os.open(self.files / file.name, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @staticmethod
    def write(descriptor: int, content: bytes, at: int) -> None:
        """Write all of `content` to an open file from byte `at` on.

        Raises:
            OSError: the disk is full.
        """
        left = memoryview(content)
        while left:
            # A nearly full disk takes a part, and only the next call is an error.
            written = os.pwrite(descriptor, left, at)
            if not written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            left, at = left[written:], at + written

    def record(self, piece: Piece) -> None:
        """Enter a piece whose bytes are all written into the journal. Any thread."""
        with self._lock, self._journal.open("a", encoding="utf-8") as journal:
            journal.write(_line(piece))
            self._done.add(piece)

    def _read_journal(self, wanted: Sequence[RemoteFile]) -> set[Piece]:
        try:
            header, *lines = self._journal.read_text(encoding="utf-8").split("\n")
        except (OSError, ValueError):
            return set()
        if header != boot_id() or not header:
            return set()
        recorded = set(lines[:-1])  # what follows the last newline was cut off
        return {
            piece
            for file in wanted
            if _size(self.files / file.name) == file.size
            for piece in _pieces(file)
            if _line(piece).rstrip("\n") in recorded
        }

    def _remove_others(self, names: Collection[str]) -> None:
        for path in sorted(self.files.rglob("*"), reverse=True):  # deeper paths come first
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path.relative_to(self.files).as_posix() not in names:
                path.unlink()

    def _link(self, file: RemoteFile, source: Path) -> bool:
        if _size(source) != file.size:
            return False
        target = self._free(file)
        with suppress(OSError):  # a file system without links, or one that is full
            os.link(source, target)
        return target.exists()

    def _allot(self, file: RemoteFile) -> bool:
        """Create the file in its full size, empty; False if it exists already."""
        path = self.files / file.name
        # A file with a second name belongs to a published version too: never written to.
        if _size(path) == file.size and path.stat().st_nlink == 1:
            return False
        with self._free(file).open("xb") as created:
            created.truncate(file.size)
        return True

    def _free(self, file: RemoteFile) -> Path:
        """The path of a file, without what is there."""
        path = self.files / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        return path


def boot_id() -> str:
    """An id of the time since this machine's kernel started; empty if the system has none.

    What a killed process wrote is safe in the page cache; what a crashed machine wrote may be zeros in a file of the
    right size. A different id means that the second is possible.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _pieces(file: RemoteFile) -> Iterator[Piece]:
    for start in range(0, file.size, PIECE_BYTES):
        yield Piece(file, start, min(start + PIECE_BYTES, file.size))


def _line(piece: Piece) -> str:
    return json.dumps([piece.file.name, piece.file.etag, piece.start, piece.end]) + "\n"


def _size(path: Path) -> int | None:
    """In bytes, links not followed; None if there is nothing."""
    try:
        return path.stat(follow_symlinks=False).st_size
    except OSError:
        return None


@contextmanager
def measure_transfer(
    uri: str, total: int, resumed: int, progress: Progress | None
) -> Iterator[Callable[[int], None]]:
    """Count the bytes of one transfer, from `resumed` up to `total`, for a callback or the log.

    Yields a function for any thread that counts more bytes, or fewer if some must be loaded again.
    """
    lock, started_s = threading.Lock(), time.monotonic()
    done, logged_s = resumed, started_s

    def log(event: str) -> None:
        seconds = time.monotonic() - started_s
        logger.info(
            "%s uri=%s bytes=%d of=%d percent=%.1f seconds=%.1f mib_per_s=%.1f",
            event, uri, done, total, 100 * done / max(total, 1),
            seconds, (done - resumed) / 2**20 / max(seconds, 1e-6),
        )  # fmt: skip

    def add(count: int) -> None:
        nonlocal done, logged_s
        with lock:
            done += count
            if progress is not None:
                progress(done, total)
            elif time.monotonic() - logged_s >= _LOG_EVERY_S:
                logged_s = time.monotonic()
                log("transfer_progress")

    event = "transfer_stopped"
    try:
        yield add
        event = "transfer_done"
    finally:
        log(event)
