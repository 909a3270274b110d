"""How many CPU cores this process may really use."""

from __future__ import annotations

import os
from pathlib import Path


def count_cores(root: Path = Path("/sys")) -> int:
    """Physical cores within the process's affinity and its container's quota; at least 1.

    Hyper-threads are not counted: two of them share the vector unit that a matmul keeps busy.
    """
    usable = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    cores = {_siblings(root, cpu) for cpu in usable}
    return max(1, int(min(len(cores), _quota(root))))


def _siblings(root: Path, cpu: int) -> str:
    """The hardware threads of one core as the kernel writes them; equal for all of them."""
    try:
        return (root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _quota(root: Path) -> float:
    """CPUs that cgroup v2 grants (`docker run --cpus`); infinite without a limit."""
    try:
        granted, period = (root / "fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if granted == "max" else int(granted) / int(period)
