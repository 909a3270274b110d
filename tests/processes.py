"""Processes as /proc shows them, ports held for them, and waiting for what they do."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PATIENCE_S = 120.0
"""Duration of a hang that fails a test; nothing that works waits for its end."""


def wait_until(
    condition: Callable[[], Any],
    why: Callable[[], str] = lambda: "",
    patience_s: float = PATIENCE_S,
) -> Any:
    """Wait for a condition; returns its value."""
    deadline_s = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, why() or "the condition did not become true"
        time.sleep(0.005)
    return value


def wait_gone(pids: Sequence[int]) -> None:
    """Wait until none of the processes lives."""
    wait_until(lambda: not any(map(alive, pids)), lambda: str([*map(command_line, pids)]))


def alive(pid: int) -> bool:
    """True until the process has ended; a zombie has, which a container's first process may never collect."""
    stat = read(pid, "stat")
    return bool(stat) and stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


def children(pid: int) -> list[int]:
    """Ids of the processes that all threads of a process have started, zombies included, in no order.

    Two looks: a thread that ends during one leaves its children to another thread, which may have been read before.
    """
    found: set[int] = set()
    for _ in range(2):
        for listing in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):
                found.update(map(int, listing.read_text().split()))
    return [*found]


def descendants(pid: int) -> list[int]:
    """Children of a process, and theirs; zombies included."""
    return [each for child in children(pid) for each in (child, *descendants(child))]


def tree(pid: int) -> list[int]:
    """The id of a process and those of its descendants."""
    return [pid, *descendants(pid)]


def engines(front: int) -> list[int]:
    """Living engine processes of a front: children of its guards."""
    guards = [
        pid for pid in descendants(front) if any("guard.py" in word for word in command_line(pid))
    ]
    return [pid for guard in guards for pid in children(guard) if alive(pid)]


def engines_of(front: int, model: Path) -> list[int]:
    """Engine processes of a front that map a file of a model's folder."""
    return [pid for pid in engines(front) if f" {model}/".encode() in read(pid, "maps")]


def command_line(pid: int) -> list[str]:
    """The arguments of a process; those of one that is gone are empty."""
    return read(pid, "cmdline").decode().split("\0")


def read(pid: int, name: str) -> bytes:
    """A file of a process in /proc; empty if the process is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


@contextmanager
def held_port() -> Iterator[int]:
    """A port that nobody is given meanwhile, and that a server with SO_REUSEADDR may listen on."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
