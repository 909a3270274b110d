"""What the machine is: Neuron devices, memory, CPUs. Looking never fails; what was seen is told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class DeviceInfo:
    """Facts of the machine, as far as they can be seen."""

    instance_type: str | None
    """Such as ``inf2.xlarge``."""
    neuron_devices: int
    """Chips, each with one or more cores."""
    neuron_cores: int
    """0 with `neuron_devices` > 0: the devices are there but `neuron-ls` could not count their cores."""
    memory_bytes: int
    """Of all Neuron devices if `neuron-ls` knows it, else of the host; 0: unknown."""
    cpus: int
    """CPUs that this process may use."""
    seen: str
    """What was looked at and found, for messages."""

    @property
    def has_neuron(self) -> bool:
        """True on a machine with a Neuron device, whether or not it works."""
        return self.neuron_devices > 0


def detect(root: Path = Path("/"), search_path: str | None = None) -> DeviceInfo:
    """The machine's facts from `/dev/neuron*`, `neuron-ls -j`, the firmware's product name and the host's memory.

    Never raises. `root` and `search_path` (None: `$PATH`) tell where to look.
    """
    nodes = [
        path for path in _glob(root / "dev", "neuron*") if path.name[len("neuron") :].isdigit()
    ]
    listed, listing = _neuron_ls(search_path)
    devices = max(len(nodes), len(listed))
    memory = sum(_number(entry, "memory_size") for entry in listed)
    return DeviceInfo(
        instance_type=_product_name(root),
        neuron_devices=devices,
        neuron_cores=sum(_number(entry, "nc_count") for entry in listed),
        memory_bytes=memory or (0 if devices else _host_memory(root)),
        cpus=_cpus(),
        seen=f"{len(nodes)} devices under {root / 'dev'}, {listing}",
    )


def _neuron_ls(search_path: str | None) -> tuple[list[dict[str, Any]], str]:
    """The devices that `neuron-ls` lists, and what became of the call in words."""
    program = shutil.which("neuron-ls", path=search_path)
    if program is None:
        return [], "no neuron-ls"
    try:
        ran = subprocess.run(  # noqa: S603 - a fixed argument, and no shell
            [program, "-j"], capture_output=True, timeout=_TIMEOUT_S, check=True
        )
        answer = json.loads(ran.stdout)
    except (OSError, subprocess.SubprocessError, ValueError, RecursionError) as error:
        return [], f"{program} failed ({type(error).__name__})"
    # An object with the instance beside the list of devices is allowed for: the format is not documented.
    rows = answer.get("mlas", []) if isinstance(answer, dict) else answer
    listed = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return listed, f"{program} lists {len(listed)}"


def _number(entry: dict[str, Any], key: str) -> int:
    value = entry.get(key)
    return value if isinstance(value, int) and value > 0 else 0


def _product_name(root: Path) -> str | None:
    return _read(root / "sys/devices/virtual/dmi/id/product_name").strip() or None


def _host_memory(root: Path) -> int:
    """Memory of the host or of this container, whichever is less."""
    sizes = [
        int(words[1]) * 1024
        for words in map(str.split, _read(root / "proc/meminfo").splitlines())
        if len(words) > 1 and words[0] == "MemTotal:" and words[1].isdigit()
    ]
    limit = _read(root / "sys/fs/cgroup/memory.max").strip()
    return min([*sizes, *([int(limit)] if limit.isdigit() else [])], default=0)


def _cpus() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on macOS
        return os.cpu_count() or 1


def _glob(folder: Path, pattern: str) -> list[Path]:
    try:
        return list(folder.glob(pattern))
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
