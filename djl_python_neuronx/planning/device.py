"""What the machine is: Neuron devices, memory, CPUs. Looking never fails; what was seen and assumed is told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from djl_python_neuronx.planning import nodes
from djl_python_neuronx.planning.instances import FAMILIES, DeviceInfo, Family, Instance, known

__all__ = ["CoreLimit", "DeviceInfo", "core_limit", "detect", "for_process"]

_VISIBLE_CORES, _NUM_CORES = "NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"
_TIMEOUT_S = 20.0
_SHOWN = 60
"""Characters of a value that is not understood."""
_MOST_CORES = 4096
"""More than any machine has; a longer list of cores is a typing error, not a wish."""


class CoreLimit(NamedTuple):
    """What a variable lets the Neuron runtime take; as text, the variable and its value."""

    name: str
    value: str
    num_cores: int | None
    """None: the value is not understood, or asks for all cores."""
    last_core: int | None = None
    """The greatest number that is listed; None: none is, any cores will do."""

    def __str__(self) -> str:
        return f"{self.name}={self.value}"

    @property
    def problem(self) -> str | None:
        """What is wrong with the value, in words; None: it is understood."""
        if self.num_cores is not None or (self.name == _NUM_CORES and not self.value.strip("0")):
            return None
        expected = "a number" if self.name == _NUM_CORES else "cores such as 0-7 or 0,1,4-5"
        value = self.value if len(self.value) <= _SHOWN else f"{self.value[:_SHOWN]}…"
        return f"{self.name}={value} is not understood and left aside; expected {expected}"

    def beyond(self, machine: DeviceInfo) -> str | None:
        """What is wrong with the value on a machine that has no such cores; None: nothing, or nobody knows."""
        cores = machine.neuron_cores
        if cores and machine.family == "trn2":
            # As many as there are if each physical core is a logical one.
            cores = 2 * machine.neuron_devices * FAMILIES["trn2"].cores_per_device
        if not cores or self.last_core is None or self.last_core < cores:
            return None
        name = machine.instance_type or "this machine"
        return f"{self}: {name} has no core {self.last_core}; its cores are 0 to {cores - 1}"


@dataclass(frozen=True)
class _Listing:
    """What `neuron-ls` said."""

    devices: list[dict[str, Any]]
    instance_type: str | None
    told: str
    """What became of the call, in words."""


def detect(
    root: Path = Path("/"),
    search_path: str | None = None,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> DeviceInfo:
    """The machine's facts from `/dev/neuron*`, `neuron-ls -j`, the firmware's product name and the host's memory.

    Never raises. `root` and `search_path` (None: `$PATH`) tell where to look; of `environ` the variables that limit
    the cores of this process count: that of `core_limit`, and `NEURON_LOGICAL_NC_CONFIG`.
    """
    paths = [
        path for path in _glob(root / "dev", "neuron*") if path.name[len("neuron") :].isdigit()
    ]
    listing = _neuron_ls(search_path)
    devices = max(len(paths), len(listing.devices))
    told = _product_name(root) or listing.instance_type
    instance = known(told)
    cores, memory = _total(listing.devices, "nc_count"), _total(listing.devices, "memory_size")
    assumed = None
    if devices and instance:
        cores, memory, assumed = _corrected(cores, memory, devices, instance, environ)
    limit = core_limit(environ)
    found = DeviceInfo(
        instance_type=instance.name if instance else told,
        neuron_devices=devices,
        neuron_cores=cores,
        memory_bytes=memory or (0 if devices else _host_memory(root)),
        cpus=_cpus(),
        seen=f"{len(paths)} devices under {root / 'dev'}, {listing.told}{_told(limit)}",
        family=instance.family if instance else None,
        core_memory_bytes=memory // cores if cores else 0,
        assumed=assumed,
    )
    return _limited(found, limit)


def for_process(machine: DeviceInfo, environ: Mapping[str, str]) -> DeviceInfo:
    """The machine as a process with these variables has it: fewer cores (`core_limit`), or as one of several (`nodes`).

    The variables count for a machine that was only named too, on which such a process is going to run.
    """
    limited = _limited(machine, core_limit(environ))
    return replace(limited, local_degree=nodes.local_degree(environ))


def core_limit(environ: Mapping[str, str]) -> CoreLimit | None:
    """The limit on the cores of a process: `NEURON_RT_VISIBLE_CORES`, else `NEURON_RT_NUM_CORES`; None: none is set.

    Source: AWS Neuron documentation, "Neuron Runtime configuration".
    """
    listed = environ.get(_VISIBLE_CORES, "").strip()
    if listed:
        cores = _listed_cores(listed)
        return CoreLimit(_VISIBLE_CORES, listed, len(cores) or None, max(cores, default=None))
    count = environ.get(_NUM_CORES, "").strip()
    if not count:
        return None
    understood = count.isdecimal() and len(count) < 6
    return CoreLimit(_NUM_CORES, count, (understood and int(count)) or None)


def _corrected(
    cores: int, memory: int, devices: int, instance: Instance, environ: Mapping[str, str]
) -> tuple[int, int, str | None]:
    """Logical cores, their memory in bytes, and what had to be assumed to know them."""
    family = FAMILIES[instance.family]
    expected = devices * _logical_cores(family, environ)
    told = []
    if not cores:
        told.append("neuron-ls does not tell the cores")
    elif cores != expected and family.name == "trn2":
        # Which of the two neuron-ls lists is not documented.
        told.append(f"neuron-ls lists {cores} cores, taken for physical ones")
        cores = 0
    if not memory:
        told.append("neuron-ls does not tell the memory")
        memory = devices * family.cores_per_device * family.core_memory_bytes
    cores = cores or expected
    if not told:
        return cores, memory, None
    size = memory / cores / 2**30
    counted = f"{cores} cores with {size:g} GiB each, as {devices} devices of {instance.name} have"
    return cores, memory, f"{' and '.join(told)}: {counted}"


def _logical_cores(family: Family, environ: Mapping[str, str]) -> int:
    """Logical cores of a device; Trn2's can be told to make one of each physical core."""
    alone = environ.get("NEURON_LOGICAL_NC_CONFIG", "").strip() == "1"
    return family.cores_per_device * (2 if alone and family.name == "trn2" else 1)


def _limited(machine: DeviceInfo, limit: CoreLimit | None) -> DeviceInfo:
    """The machine with no more cores than the limit allows; one that is not understood is left aside."""
    if limit is None or limit.num_cores is None or not machine.has_neuron:
        return machine
    cores = machine.neuron_cores
    visible = min(limit.num_cores, cores) if cores else limit.num_cores
    return replace(
        machine, visible_cores=visible, limited_by=str(limit), allowed_cores=limit.num_cores
    )


def _told(limit: CoreLimit | None) -> str:
    """The words about a limit that was set."""
    if limit is None:
        return ""
    if limit.num_cores is None:
        return f", {limit.problem}" if limit.problem else f", {limit} allows all cores"
    return f", {limit} allows {limit.num_cores} cores"


def _listed_cores(text: str) -> set[int]:
    """The cores that a list such as ``0,1,4-7`` names; empty if it is no such list."""
    named: set[int] = set()
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and len(last) < 6 and len(first) < 6):
            return set()
        if int(first) > int(last):
            return set()
        named.update(range(int(first), min(int(last), _MOST_CORES) + 1))
        named.add(int(last))
    return named


def _neuron_ls(search_path: str | None) -> _Listing:
    program = shutil.which("neuron-ls", path=search_path)
    if program is None:
        return _Listing([], None, "no neuron-ls")
    try:
        ran = subprocess.run(  # noqa: S603 - a fixed argument, and no shell
            [program, "-j"], capture_output=True, timeout=_TIMEOUT_S, check=True
        )
        answer = json.loads(ran.stdout)
    except (OSError, subprocess.SubprocessError, ValueError, RecursionError) as error:
        return _Listing([], None, f"{program} failed ({type(error).__name__})")
    # An object with the instance beside the list of devices is allowed for: the format is not documented.
    rows, name = answer, None
    if isinstance(answer, dict):
        rows, name = answer.get("mlas", []), answer.get("instance_type")
    listed = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    name = name if isinstance(name, str) and name else None
    return _Listing(listed, name, f"{program} lists {len(listed)}")


def _total(rows: list[dict[str, Any]], key: str) -> int:
    values = (row.get(key) for row in rows)
    return sum(value for value in values if type(value) is int and value > 0)


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
