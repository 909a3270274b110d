"""Folders of unfinished work in a store, kept for the next try."""

from __future__ import annotations

import logging
import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from djl_python_neuronx.artifacts.store.manifest import FILE_NAME
from djl_python_neuronx.artifacts.store.publish import remove_partial_files

logger = logging.getLogger(__name__)

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
