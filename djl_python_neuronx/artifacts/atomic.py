"""Files and folders that appear whole or not at all, and are still whole after a crash of the machine."""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from filelock import FileLock, Timeout

from djl_python_neuronx.errors import ArtifactAccessError, ServingError

logger = logging.getLogger(__name__)

_REMIND_S = 10.0


@contextmanager
def held(path: Path, *, what: str) -> Iterator[None]:
    """Hold the lock file `path`, waiting for whoever has it; `what` tells the log what is waited for.

    It is a `flock`, so the kernel frees it even after SIGKILL, and the file itself stays. Who holds it is written
    beside it, as `<path>.json`: for people and logs, never for a decision.

    Raises:
        OSError: the file cannot be made.
    """
    lock = FileLock(path)
    holder = path.with_name(path.name + ".json")
    while True:
        try:
            lock.acquire(timeout=0)
            break
        except Timeout:
            logger.info("lock_waiting what=%s %s lock=%s", what, _describe(holder), path)
        try:
            lock.acquire(timeout=_REMIND_S, poll_interval=0.1)
            break
        except Timeout:
            continue
    try:
        holder.write_text(json.dumps(_self()), encoding="utf-8")
        yield
    finally:
        lock.release()


def _self() -> dict[str, object]:
    return {
        "pid": os.getpid(),
        "process_start_ticks": _start_ticks(),
        "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _start_ticks() -> int | None:
    """When this process began, in ticks since boot: with the pid it names one process, as pids come round again.

    Source: proc(5), /proc/pid/stat, field 22; the name in field 2 may hold spaces and brackets.
    """
    try:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def _describe(holder: Path) -> str:
    try:
        known = json.loads(holder.read_bytes())
        return f"holder_pid={known['pid']} holder_since={known['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        # The holder has the lock but has not written yet, or is just writing.
        return "holder_pid=unknown"


_PARTIAL = ".partial-"


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, whose file takes the place of `path` when the block ends without error."""
    temporary = path.with_name(f"{_PARTIAL}{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def remove_partial_files(folder: Path) -> None:
    """Remove what killed `whole_file` blocks left; for who alone has the folder."""
    for path in folder.rglob(f"{_PARTIAL}*"):
        path.unlink(missing_ok=True)


def sync_tree(folder: Path) -> None:
    """Return when everything in a folder has reached the disk: a rename may do so before the data does."""
    for parent, _, names in os.walk(folder):
        for name in names:
            _sync(Path(parent, name))
        _sync(Path(parent))


def replace_folder(new: Path, place: Path, trash: Path) -> None:
    """Put the folder `new`, which has reached the disk, at `place`; what was there goes by way of `trash`.

    All three are on one file system. Where the kernel cannot exchange two names, there is a moment without any
    folder at `place`; there is none with a mixture.
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
    _sync(place.parent)
    empty(trash)


def _exchange(one: Path, other: Path) -> bool:
    """Let two paths swap what they name, in one step; False where that cannot be done."""
    try:
        # Numbers as in Linux, include/uapi/linux/fs.h and fcntl.h; glibc has had the function since 2.28.
        renameat2, exchange, here = ctypes.CDLL(None).renameat2, 2, -100
    except (OSError, AttributeError):
        return False
    return bool(renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)


def empty(trash: Path) -> None:
    """Remove what is in a trash folder; what cannot be removed is left for the next time."""
    for path in list(trash.iterdir()) if trash.is_dir() else []:
        remove(path)


def remove(path: Path) -> None:
    """Remove a file, link or folder, as far as that can be done."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def is_writable(folder: Path) -> bool:
    """True if files can be made in a folder, which is made if it is not there; only trying tells.

    Access rights say yes to root on a read-only disk. A full disk is not asked about.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"{_PARTIAL}{uuid.uuid4().hex}"
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        return error.errno in {errno.ENOSPC, errno.EDQUOT}
    return True


@contextmanager
def storing(what: str, place: Path) -> Iterator[None]:
    """The system's refusals to write `what` at `place` come out as ours.

    Raises:
        ArtifactAccessError: the disk is full, or the place cannot be written.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, ServingError):
            raise
        raise _refused(what, place, error) from error


@contextmanager
def room(what: str, place: Path) -> Iterator[None]:
    """As `storing`, for a full disk alone: other errors of the block are its own.

    Raises:
        ArtifactAccessError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        raise _refused(what, place, error) from error


def _refused(what: str, place: Path, error: OSError) -> ArtifactAccessError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        msg = (
            f"{what} could not be stored: {place} is full ({error.strerror}). Make room there, or name a folder on a "
            "larger disk; what was finished is kept."
        )
    else:
        msg = f"{what} could not be stored in {place}: {error}. Give this user a folder that it can write."
    return ArtifactAccessError(msg)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
