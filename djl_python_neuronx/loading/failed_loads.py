"""Processes of DJL Serving that ended without a loaded model, noted where the next one finds them.

Those of a model folder and a Java process are lines of a file, in a folder of temporary files that only this user may
use.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

_STALE_S = 7 * 24 * 3600.0
"""A count that was not written for so long is removed: its Java process has ended, or has other troubles."""


PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0
"""Time after a failed load in which none begins; it doubles with each in a row."""


class FailedLoad(NamedTuple):
    """The last failed load."""

    reason: str
    pause_s: float
    """Time until the next load may begin."""


class FailedLoads:
    """Failed loads of a model folder by the processes that this process's parent started."""

    def __init__(self, model_dir: str) -> None:
        """Process id and start time identify the parent."""
        parent, started = os.getppid(), "0"
        with suppress(OSError):  # no /proc
            # Source: proc(5): field 22; the name in field 2 may have spaces and brackets.
            started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
        digest = hashlib.sha256(os.fsencode(model_dir)).hexdigest()[:16]
        self._name = f"failed-loads-{parent}-{started}-{digest}"

    @property
    def folder(self) -> Path:
        """The folder of the counts.

        Raises:
            FileNotFoundError: no folder for temporary files can be written.
        """
        return Path(tempfile.gettempdir()) / f"djl-neuronx-{os.getuid()}"

    def add(self, reason: str | None) -> int:
        """Note an end: after a failed load, or without one (None). Returns the number of ends since a success."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        line = json.dumps([time.time(), reason]).encode() + b"\n"
        try:
            with self._opened() as folder:
                _remove_stale(folder)
                file = os.open(self._name, flags, 0o600, dir_fd=folder)
                with os.fdopen(file, "ab", buffering=0) as lines:
                    lines.write(line)
                return len(self._read(folder))
        except (OSError, ValueError) as error:
            logger.warning("failed_load_not_noted reason=%r", str(error))
            return 1

    def recent(self) -> FailedLoad | None:
        """The last failed load since a success, if its pause is not over."""
        try:
            if not self.folder.exists():
                return None
            with self._opened() as folder:
                failed = [(time_s, reason) for time_s, reason in self._read(folder) if reason]
        except (OSError, ValueError):
            return None
        if not failed:  # another process of the model has loaded it since this one read them
            return None
        time_s, reason = failed[-1]
        pause_s = min(PAUSE_S * 2.0 ** min(len(failed) - 1, 9), LONGEST_PAUSE_S)
        left_s = pause_s - (time.time() - time_s)
        return FailedLoad(reason, left_s) if 0 < left_s <= pause_s else None

    def _read(self, folder: int) -> list[list[Any]]:
        """The lines: time and reason.

        Raises:
            OSError, ValueError: the file cannot be read, or is damaged.
        """
        file = os.open(self._name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
        with os.fdopen(file, encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    def clear(self) -> None:
        """Forget them, after a load that succeeded."""
        if self.folder.exists():
            with suppress(OSError), self._opened() as folder:
                os.unlink(self._name, dir_fd=folder)
            with suppress(OSError):  # it has the counts of others
                self.folder.rmdir()

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The folder's descriptor.

        Raises:
            OSError: it is a link, belongs to another user or lets others in.
        """
        with suppress(FileExistsError):
            self.folder.mkdir(0o700)
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            status = os.fstat(folder)
            if status.st_uid != os.getuid() or status.st_mode & 0o077:
                msg = (
                    f"{self.folder} must belong to user {os.getuid()} alone (mode 0700); remove it"
                )
                raise PermissionError(msg)
            yield folder
        finally:
            os.close(folder)


def _remove_stale(folder: int) -> None:
    oldest_s = time.time() - _STALE_S
    for name in os.listdir(folder):
        with suppress(OSError):
            if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < oldest_s:
                os.unlink(name, dir_fd=folder)
