"""Files and folders that appear whole or not at all, locks between processes, and errors of a full disk.

What appears whole here is still whole after a crash of the machine.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import json
import logging
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path

from filelock import FileLock, Timeout

from djl_python_neuronx.errors import ArtifactAccessError, ServingError

logger = logging.getLogger(__name__)

_GIB = 2**30
_PARTIAL = ".partial-"
_RANDOM = "[a-z0-9_]" * 8
"""Pattern of the end of a name by `tempfile.mkdtemp`: people name folders otherwise (`.out.output-backup`)."""
_LOG_WAIT_S = 10.0
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextmanager
def hold_lock(path: Path, *, what: str) -> Iterator[None]:
    """Hold the lock file `path` and wait for it first; the log names `what` while waiting.

    It is a `flock`: the kernel frees it even after SIGKILL, and the file itself stays. The holder's process id is
    written to `<path>.json`, for people and logs, never for a decision.

    Raises:
        ArtifactAccessError: the file cannot be created.
    """
    lock = FileLock(path)
    holder = path.with_name(path.name + ".json")
    with ExitStack() as stack:
        with storing(f"the lock of {what}", path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            _acquire(lock, holder, what)
            stack.callback(lock.release)
            since = datetime.now(timezone.utc).isoformat(timespec="seconds")
            holder.write_text(json.dumps({"pid": os.getpid(), "since": since}), encoding="utf-8")
        yield


@contextmanager
def flock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file or folder itself, so that no lock file is left beside the user's files.

    Raises:
        OSError: another process has one, or `path` cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def temporary_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder `<parent>/<prefix><random>`, removed at the end, for files on their way to `parent`.

    It is locked until then. A killed process's folder is not locked, and is removed first, unless the file system has
    no locks.

    Raises:
        OSError: it cannot be made.
    """
    remove_abandoned(parent, prefix)
    parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        while True:
            folder = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
            try:
                stack.enter_context(flock(folder))
            except (BlockingIOError, FileNotFoundError):
                continue  # removed as abandoned before it was locked
            except OSError as error:
                logger.info("temporary_folder_not_locked folder=%s reason=%s", folder, error)
            if folder.exists():
                break
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


def staging(destination: Path) -> tuple[Path, str]:
    """Parent and prefix of the `temporary_folder` of a new folder `destination`: on the same file system."""
    parent = destination if destination.is_mount() else destination.parent
    return parent, f".{destination.name}.output-"


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove this user's temporary folders whose process was killed, as far as possible."""
    for left in parent.glob(glob.escape(prefix) + _RANDOM):
        with suppress(OSError):
            status = left.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                with flock(left):
                    shutil.rmtree(left, ignore_errors=True)


def _acquire(lock: FileLock, holder: Path, what: str) -> None:
    wait_s = 0.0
    while True:
        with suppress(Timeout):
            lock.acquire(timeout=wait_s, poll_interval=0.1)
            return
        wait_s = _LOG_WAIT_S
        logger.info("lock_waiting what=%s %s lock=%s", what, _describe(holder), lock.lock_file)


def _describe(holder: Path) -> str:
    try:
        known = json.loads(holder.read_bytes())
        return f"holder_pid={known['pid']} holder_since={known['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        # The holder has not written the file yet, or is writing it.
        return "holder_pid=unknown"


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`; its file replaces `path` when the block ends without error."""
    temporary = path.with_name(f"{_PARTIAL}{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def remove_partial_files(folder: Path) -> None:
    """Remove what killed `whole_file` blocks left. The caller must be the folder's only user."""
    for path in folder.rglob(f"{_PARTIAL}*"):
        path.unlink(missing_ok=True)


def sync_tree(folder: Path) -> None:
    """Return when everything in a folder has reached the disk: a rename may get there before the data does."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))


def sync(path: Path) -> None:
    """Return when a file, or the names in a folder, have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(new: Path, place: Path, trash: Path) -> None:
    """Put the folder `new`, which has reached the disk, at `place`, and remove the previous one through `trash`.

    All three are on one file system. Where the kernel cannot exchange two names there is a moment without a folder
    at `place`, but never a mixture of both.
    """
    trash.mkdir(parents=True, exist_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    if not (place.exists() or place.is_symlink()):
        new.rename(place)
    elif _exchange(new, place):
        new.rename(trash / uuid.uuid4().hex)
    else:
        place.rename(trash / uuid.uuid4().hex)
        new.rename(place)
    sync(place.parent)
    for path in list(trash.iterdir()):
        remove(path)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two paths in one step; False where that is not possible."""
    try:
        # Numbers as in Linux, include/uapi/linux/fs.h and fcntl.h; glibc has had the function since 2.28.
        renameat2, exchange, here = ctypes.CDLL(None).renameat2, 2, -100
    except (OSError, AttributeError):
        return False
    return bool(renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)


def remove(path: Path) -> None:
    """Remove a file, link or folder, as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def is_writable(folder: Path) -> bool:
    """True if files can be created in a folder, which is created if missing; only trying shows it.

    Access rights say yes to root on a read-only disk. A full disk counts as writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return error.errno in _DISK_FULL
    return True


def require_space(what: str, folder: Path, num_bytes: int, remedy: str) -> None:
    """Refuse to write `num_bytes` for `what` to the disk of `folder` if they do not fit.

    Raises:
        ArtifactAccessError: they do not; `remedy` completes its message "Make room, or ...".
    """
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        needed, there = (
            f"{size / _GIB:.2f} GiB" if size >= _GIB / 100 else f"{size:,} bytes"
            for size in (num_bytes, free)
        )
        msg = f"{what} needs {needed} in {folder}, {there} are free there. Make room, or {remedy}."
        raise ArtifactAccessError(msg)


@contextmanager
def storing(what: str, place: Path, *, only_full: bool = False) -> Iterator[None]:
    """Translate the system's refusals to write `what` at `place`; with `only_full` only that of a full disk.

    Raises:
        ArtifactAccessError: the disk is full, or the place cannot be written.
    """
    try:
        yield
    except OSError as error:
        is_full = error.errno in _DISK_FULL
        # Some of our own errors are OSErrors too.
        if isinstance(error, ServingError) or (only_full and not is_full):
            raise
        if is_full:
            msg = (
                f"{what} could not be stored: {place} is full ({error.strerror}). Make room there, or name a folder "
                "on a larger disk, and start again; what was finished is kept."
            )
        elif error.errno == errno.ENAMETOOLONG:
            msg = f"{what} could not be stored in {place}: {error.strerror}. Shorten names in it."
        else:
            msg = f"{what} could not be stored in {place}: {error}. Give this user a folder that it can write."
        raise ArtifactAccessError(msg) from error
