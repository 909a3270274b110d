"""Locks between processes that end with their holder, however it ends."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from filelock import FileLock, Timeout

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
