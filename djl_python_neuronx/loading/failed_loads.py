"""Count of failed loads in a row that outlives the process: DJL Serving starts a new one for each attempt.

The count of a model folder and a Java process is the size of a file, in a folder of temporary files that only this user
may use.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

_STALE_S = 7 * 24 * 3600.0
"""A count that was not written for so long is removed: its Java process has ended, or has other troubles."""


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

    def add(self) -> int:
        """Count one more. Returns the number of failed loads since the last success; 1 if it cannot be kept."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        try:
            with self._opened() as folder:
                _remove_stale(folder)
                file = os.open(self._name, flags, 0o600, dir_fd=folder)
                try:
                    os.write(file, b".")
                    return os.fstat(file).st_size
                finally:
                    os.close(file)
        except OSError as error:
            logger.warning("failed_loads_not_counted reason=%r", str(error))
            return 1

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
