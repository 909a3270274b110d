"""Loads side by side, within the host's memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from djl_python_neuronx.planning.machines import GIB, available_memory

logger = logging.getLogger(__name__)

_POLL_S = 1.0
"""Seconds between two looks at the memory, which other processes take and free."""


class LoadMemory:
    """Room for loads in the host's memory. Any thread."""

    def __init__(self, available: Callable[[], int | None] = available_memory) -> None:
        """Start without loads. `available`: the bytes that can be taken now; None if unknown, which holds all."""
        self._available = available
        self._change = threading.Condition()
        self._running: list[int | None] = []

    @contextmanager
    def of(self, num_bytes: int | None) -> Iterator[None]:
        """Wait for room for a load of `num_bytes`, and keep it for the block. None: not known, it loads alone.

        A load always has room while no other runs. The running ones count in full, as if they had taken nothing yet.
        """
        with self._change:
            if not self._has_room(num_bytes):
                logger.info("load_waits reason='memory of the host' gib=%s", _gib(num_bytes))
            while not self._has_room(num_bytes):
                self._change.wait(_POLL_S)
            self._running.append(num_bytes)
        try:
            yield
        finally:
            with self._change:
                self._running.remove(num_bytes)
                self._change.notify_all()

    def _has_room(self, num_bytes: int | None) -> bool:
        loads = (*self._running, num_bytes)
        known = [size for size in loads if size is not None]
        if not self._running or len(known) < len(loads):
            return not self._running
        there = self._available()
        return there is None or sum(known) <= there


def _gib(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / GIB:.1f}"


LOAD_MEMORY = LoadMemory()
"""The loads of this process."""
