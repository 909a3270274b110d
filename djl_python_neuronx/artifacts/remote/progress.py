"""How far a transfer has come: to a callback, or to the log from time to time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Bytes done and bytes in all. Called often, from any thread, one call at a time."""

_LOG_EVERY_S = 10.0


class ProgressMeter:
    """Counts the bytes of one transfer, from `resumed` up to `total`."""

    def __init__(self, uri: str, total: int, resumed: int, progress: Progress | None) -> None:
        self._uri, self._total, self._done, self._resumed = uri, total, resumed, resumed
        self._progress = progress
        self._lock = threading.Lock()
        self._started_s = self._logged_s = time.monotonic()

    def add(self, count: int) -> None:
        """`count` more bytes; negative if some must be loaded again. Any thread."""
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(self._done, self._total)
            elif time.monotonic() - self._logged_s >= _LOG_EVERY_S:
                self._logged_s = time.monotonic()
                self._log("transfer_progress")

    def __enter__(self) -> ProgressMeter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._log("transfer_done" if kind is None else "transfer_stopped")

    def _log(self, event: str) -> None:
        seconds = time.monotonic() - self._started_s
        logger.info(
            "%s uri=%s bytes=%d of=%d percent=%.1f seconds=%.1f mib_per_s=%.1f",
            event, self._uri, self._done, self._total, 100 * self._done / max(self._total, 1),
            seconds, (self._done - self._resumed) / 2**20 / max(seconds, 1e-6),
        )  # fmt: skip
