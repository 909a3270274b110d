"""Reading of files into the host's page cache, while the process that needs them still imports its libraries."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

_PART_BYTES, _BLOCK_BYTES = 2**25, 2**20
_NUM_READERS = 4
"""Parts that are read at once: the system's own reading ahead is too short for disks on a network."""


def read_ahead(paths: Sequence[Path], room: int) -> threading.Thread:
    """Read files in their order on threads, at most `room` bytes, and log the rate. Returns the one that ends last.

    They hold nothing, and end with the process: a later read, in any process, finds the pages that the system still
    has. What cannot be read is left to that one.
    """
    thread = threading.Thread(
        target=_read, args=(paths, room), name="djl-neuronx-read-ahead", daemon=True
    )
    thread.start()
    return thread


def _read(paths: Sequence[Path], room: int) -> None:
    began_s = time.monotonic()
    try:
        sizes = [path.stat().st_size for path in paths]
    except OSError as error:
        logger.warning("read_ahead_failed error=%s", error)
        return
    parts = [
        (path, start)
        for path, size in zip(paths, sizes, strict=True)
        for start in range(0, size, _PART_BYTES)
    ]
    left, counts = iter(parts[: max(0, room // _PART_BYTES)]), list[int]()
    # No pool: Python's exit waits for the threads of one.
    readers = [
        threading.Thread(target=_read_parts, args=(left, counts), daemon=True)
        for _ in range(_NUM_READERS)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    seconds = time.monotonic() - began_s
    logger.info(
        "read_ahead bytes=%d of=%d seconds=%.2f mb_per_s=%.0f",
        sum(counts), sum(sizes), seconds, sum(counts) / max(seconds, 1e-6) / 1e6,
    )  # fmt: skip


def _read_parts(left: Iterator[tuple[Path, int]], counts: list[int]) -> None:
    """Read parts until none is left, beside other threads; append the bytes of each to `counts`."""
    try:
        for part in left:
            counts.append(_read_part(part))  # noqa: PERF401  (other threads append too)
    except OSError as error:
        logger.warning("read_ahead_failed error=%s", error)


def _read_part(part: tuple[Path, int]) -> int:
    path, start = part
    block, num_bytes = bytearray(_BLOCK_BYTES), 0
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while num_bytes < _PART_BYTES and (count := file.readinto(block)):
            num_bytes += count
    return num_bytes
