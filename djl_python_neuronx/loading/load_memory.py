"""Memory of the host: loads side by side within it, and the objects that stay after a load."""

from __future__ import annotations

import gc
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from djl_python_neuronx.planning.machines import GIB, available_memory

logger = logging.getLogger(__name__)

_POLL_S = 1.0
"""Seconds between two looks at the memory, which other processes take and free."""
YOUNG_OBJECTS = 10_000
"""New objects before a collection of the young ones: more than the steps of four engines make at once, ten for a row.
At Python's 700 each step was several collections, in which all its objects lived: 8 % of the front (2026-11)."""


class LoadMemory:
    """Room for loads in the host's memory. Any thread."""

    def __init__(self, available: Callable[[], int | None] = available_memory) -> None:
        """Start without loads. `available`: the bytes that can be taken now; None if unknown, which holds all."""
        self._available = available
        self._change = threading.Condition()
        self._running: list[float] = []

    @contextmanager
    def of(self, num_bytes: int | None) -> Iterator[None]:
        """Wait for room for a load of `num_bytes`, and keep it for the block. None: not known, it loads alone.

        A load always has room while no other runs. The running ones count in full, as if they had taken nothing yet.
        """
        size = math.inf if num_bytes is None else num_bytes
        with self._change:
            if not self._has_room(size):
                logger.info("load_waits reason='memory of the host' gib=%.1f", size / GIB)
            while not self._has_room(size):
                self._change.wait(_POLL_S)
            self._running.append(size)
        try:
            yield
        finally:
            with self._change:
                self._running.remove(size)
                self._change.notify_all()

    def _has_room(self, size: float) -> bool:
        needed, there = sum(self._running) + size, self._available()
        return not self._running or needed <= (sys.maxsize if there is None else there)


LOAD_MEMORY = LoadMemory()
"""The loads of this process."""


def freeze_heap() -> None:
    """Keep all objects that live now out of Python's garbage collections; collect those that a reload has left first.

    From then on young objects are collected by `YOUNG_OBJECTS`. A collection stops all streams. In the front it takes
    0.17 s in every 6 s if it visits the objects of the load, and 0.05 s if not (four engines, 400 streams); in an
    engine with torch and transformers 0.21 s, and less than 0.1 ms if not (2 vCPU VMs, 2026-11).
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
