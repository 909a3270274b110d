"""Machines with Neuron devices: instance types, what this machine has, and the cores that a process may use.

Detection never raises; `DeviceInfo.seen` and `assumed` describe what was found and what was assumed.
Sources: AWS Neuron documentation, "Neuron Runtime configuration"; of several machines, transformers-neuronx 0.13,
config.py (`NeuronConfig` reads the variables), decoder.py and base.py `pp_forward`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from djl_python_neuronx.errors import ConfigError

GIB = 2**30
_AS_MANY_AS_THERE_ARE = -1


@dataclass(frozen=True)
class DeviceInfo:
    """Facts of a machine, as far as they can be seen."""

    instance_type: str | None
    """Such as ``inf2.xlarge``."""
    neuron_devices: int
    """Chips, each with one or more cores."""
    neuron_cores: int
    """Logical cores. 0 with `neuron_devices` > 0: the devices are there but nothing tells their cores."""
    memory_bytes: int
    """Of all Neuron devices, or, on a machine without any, of the host; 0: unknown."""
    cpus: int
    """CPUs that this process may use."""
    seen: str
    """What was looked at and found, for messages."""
    family: str | None = None
    """``inf2``, ``trn1`` (also Trn1n) or ``trn2`` (also Trn2 UltraServers); None: not known."""
    core_memory_bytes: int = 0
    """Of each logical core; 0: unknown."""
    visible_cores: int = _AS_MANY_AS_THERE_ARE
    """Logical cores that this process may use; all of `neuron_cores` unless told otherwise."""
    limited_by: str | None = None
    """The variable, with its value, that limits `visible_cores`; None: none does."""
    allowed_cores: int | None = None
    """What it allows, whether or not there are as many."""
    assumed: str | None = None
    """What was assumed because it could not be seen, as a sentence; None: nothing."""
    local_degree: int | None = None
    """Cores that each of several machines gives to one tensor parallel group; None: a group lies on one machine."""

    def __post_init__(self) -> None:
        if self.visible_cores == _AS_MANY_AS_THERE_ARE:
            object.__setattr__(self, "visible_cores", self.neuron_cores)

    @property
    def has_neuron(self) -> bool:
        """True on a machine with a Neuron device, whether or not it works."""
        return self.neuron_devices > 0

    def machines(self, degree: int) -> int:
        """Machines like this one that a tensor parallel group of so many cores lies on."""
        return -(-degree // self.local_degree) if self.local_degree else 1

    def cores_for(self, degree: int) -> int:
        """Cores that such a group can be laid on, on all of its machines; 0: not known."""
        return self.visible_cores * self.machines(degree)


@dataclass(frozen=True)
class Family:
    """What all instances of one kind of chip have in common."""

    name: str
    degrees: tuple[int, ...]
    """Tensor parallel degrees that the runtime documents, ascending."""
    cores_per_device: int
    """Logical cores of a chip in its default configuration."""
    core_memory_bytes: int
    """Device memory of a chip divided by its logical cores."""
    used_degrees: tuple[int, ...] = ()
    """Degrees that are not documented and that guides use nevertheless."""


FAMILIES: Final[Mapping[str, Family]] = {
    family.name: family
    for family in (
        Family(
            "inf2",
            (1, 2, 4, 8, 24),
            cores_per_device=2,
            core_memory_bytes=16 * GIB,
            used_degrees=(12,),  # all cores of an inf2.24xlarge
        ),
        Family("trn1", (1, 2, 8, 16, 32), cores_per_device=2, core_memory_bytes=16 * GIB),
        Family(
            "trn2",
            (1, 2, 4, 8, 16, 32, 64),
            cores_per_device=4,
            core_memory_bytes=24 * GIB,
        ),
    )
}
"""Kinds of chips by name. Trn2 is counted with two physical cores to a logical one (LNC 2), its default.

Source: AWS Neuron SDK documentation: "Tensor-parallelism support" of the transformers-neuronx guide, the
architecture pages of Inferentia2, Trainium and Trainium2, and "Logical NeuronCore configuration".
"""


@dataclass(frozen=True)
class Instance:
    """One instance type as AWS sells it."""

    name: str
    family: str
    devices: int
    host_memory_gib: int
    vcpus: int

    @property
    def cores(self) -> int:
        """Logical cores of all devices."""
        return self.devices * FAMILIES[self.family].cores_per_device


INSTANCES: Final[Mapping[str, Instance]] = {
    row.name: row
    for row in (
        Instance("inf2.xlarge", "inf2", devices=1, host_memory_gib=16, vcpus=4),
        Instance("inf2.8xlarge", "inf2", devices=1, host_memory_gib=128, vcpus=32),
        Instance("inf2.24xlarge", "inf2", devices=6, host_memory_gib=384, vcpus=96),
        Instance("inf2.48xlarge", "inf2", devices=12, host_memory_gib=768, vcpus=192),
        Instance("trn1.2xlarge", "trn1", devices=1, host_memory_gib=32, vcpus=8),
        Instance("trn1.32xlarge", "trn1", devices=16, host_memory_gib=512, vcpus=128),
        Instance("trn1n.32xlarge", "trn1", devices=16, host_memory_gib=512, vcpus=128),
        Instance("trn2.3xlarge", "trn2", devices=1, host_memory_gib=128, vcpus=12),
        Instance("trn2.48xlarge", "trn2", devices=16, host_memory_gib=2048, vcpus=192),
        Instance("trn2u.48xlarge", "trn2", devices=16, host_memory_gib=2048, vcpus=192),
    )
}
"""Instance types by name, in each family from the smallest. Source: AWS's pages of Inf2, Trn1 and Trn2."""


def known(instance_type: str | None) -> Instance | None:
    """The instance type of this name, written for EC2 or for SageMaker (``ml.inf2.xlarge``); None: not one of ours."""
    return INSTANCES.get((instance_type or "").strip().lower().removeprefix("ml."))


def named(instance_type: str) -> DeviceInfo:
    """The machine that an instance type is, all of its cores free.

    Raises:
        ConfigError: no such instance type has Neuron devices that we know.
    """
    instance = known(instance_type)
    if instance is None:
        message = f"{instance_type!r} is no instance type with Neuron devices; expected one of {', '.join(INSTANCES)}"
        raise ConfigError(message)
    family = FAMILIES[instance.family]
    return DeviceInfo(
        instance_type=instance.name,
        neuron_devices=instance.devices,
        neuron_cores=instance.cores,
        memory_bytes=instance.cores * family.core_memory_bytes,
        cpus=instance.vcpus,
        seen=f"the instance type {instance.name}, by name",
        family=family.name,
        core_memory_bytes=family.core_memory_bytes,
    )


def on_single_cores(device: DeviceInfo, cores_in_one: int | None) -> DeviceInfo:
    """The machine with each physical core a logical one, if `cores_in_one` (logical_nc_config) is 1 and it has pairs.

    Only Trn2 has pairs. A machine that was seen with `NEURON_LOGICAL_NC_CONFIG=1` is divided already.
    """
    family = FAMILIES.get(device.family or "")
    if cores_in_one != 1 or family is None or family.name != "trn2":
        return device
    if device.neuron_cores != device.neuron_devices * family.cores_per_device:
        return device
    cores, visible = 2 * device.neuron_cores, device.visible_cores
    if device.allowed_cores is not None:
        # A limit counts logical cores as they are going to be.
        visible = min(device.allowed_cores, cores)
    elif visible == device.neuron_cores:
        visible = cores
    return replace(
        device,
        neuron_cores=cores,
        core_memory_bytes=device.core_memory_bytes // 2,
        visible_cores=visible,
    )


def legal_degrees(family: str | None, cores: int, *, used: bool = False) -> tuple[int, ...]:
    """Documented tensor parallel degrees within `cores`, ascending; all families' where the family is not known.

    `used`: those that guides use beside them, too.
    """
    known_family = FAMILIES.get(family or "")
    chosen = [known_family] if known_family else FAMILIES.values()
    degrees = {
        degree
        for entry in chosen
        for degree in (*entry.degrees, *(entry.used_degrees if used else ()))
        if degree <= cores
    }
    return tuple(sorted(degrees))


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
    environ: Mapping[str, str] = {},
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
    return replace(limited, local_degree=local_degree(environ))


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


LOCAL_TP = "NEURON_LOCAL_TP"
RANK_ID = "NEURON_RANK_ID"
PP_STAGES = "NEURON_PP_STAGES"


def local_degree(environ: Mapping[str, str]) -> int | None:
    """`NEURON_LOCAL_TP`: cores that each machine gives to a tensor parallel group; None: not set, or no number."""
    text = environ.get(LOCAL_TP, "").strip()
    return int(text) or None if text.isdecimal() and len(text) < 6 else None


def spanning(degree: int, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The variables, with their values, by which a model of this tensor parallel degree lies on several machines."""
    single = {LOCAL_TP: degree, RANK_ID: 0, PP_STAGES: 1}
    return tuple(
        f"{name}={environ[name]}"
        for name, expected in single.items()
        if environ.get(name, "").strip() not in {"", str(expected)}
    )


def obstacle(degree: int, environ: Mapping[str, str]) -> str | None:
    """Why a process with these variables cannot serve a model of this tensor parallel degree; None: it can.

    The machines of a group wait for each other in every step, so each of them has to make the same calls at the same
    time, and those follow from requests that only the first one gets.
    """
    found = spanning(degree, environ)
    if not found:
        return None
    return (
        f"{' and '.join(found)}, with tensor_parallel_degree={degree}, is a part of a model on several machines, which "
        f"is not served here: nothing tells the other machines what to run. Expected {LOCAL_TP} to be the degree, "
        f"{RANK_ID} 0 and {PP_STAGES} 1, or none of them; unset them, and take a machine that holds the model"
    )
