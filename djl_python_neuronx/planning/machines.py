"""Machines with Neuron devices: instance types, detection of this machine, and the cores that a process may use.

Detection never raises; `DeviceInfo.seen` and `assumed` describe what was found and what was assumed.
Sources: AWS Neuron documentation, "Neuron Runtime configuration"; for several machines, transformers-neuronx 0.13,
config.py (`NeuronConfig` reads the variables), decoder.py and base.py `pp_forward`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from djl_python_neuronx.config.values import shortened
from djl_python_neuronx.errors import ConfigError
from djl_python_neuronx.planning.programs import UnreadError, output

GIB = 2**30
_AS_MANY_AS_THERE_ARE = -1


@dataclass(frozen=True)
class DeviceInfo:
    """The properties of a machine that were detected or looked up."""

    instance_type: str | None
    """Such as ``inf2.xlarge``."""
    neuron_devices: int
    """Chips, each with one or more cores."""
    neuron_cores: int
    """Logical cores. 0 with `neuron_devices` > 0: the number is unknown."""
    memory_bytes: int
    """Memory of all Neuron devices, or of the host if there are none; 0 if unknown."""
    cpus: int
    """CPUs that this process may use."""
    seen: str
    """Where the machine was looked for and what was found, for messages."""
    family: str | None = None
    """``inf2``, ``trn1`` (also Trn1n) or ``trn2`` (also Trn2 UltraServers); None if unknown."""
    core_memory_bytes: int = 0
    """Memory of each logical core; 0 if unknown."""
    visible_cores: int = _AS_MANY_AS_THERE_ARE
    """Logical cores that this process may use; by default all of `neuron_cores`."""
    limited_by: str | None = None
    """The variable, with its value, that limits `visible_cores`; None without a limit."""
    listed_cores: tuple[int, ...] = ()
    """The numbers of the cores that this variable lists, ascending; empty without a list."""
    assumed: str | None = None
    """Assumptions about values that could not be detected, as a sentence; None without any."""
    local_degree: int | None = None
    """Cores of each machine in a tensor parallel group that spans several; None: one machine."""
    unread: str | None = None
    """The reason that the answer of `neuron-ls` cannot be read; None: it was read, or there is no such program."""

    def __post_init__(self) -> None:
        if self.visible_cores == _AS_MANY_AS_THERE_ARE:
            object.__setattr__(self, "visible_cores", self.neuron_cores)

    @property
    def has_neuron(self) -> bool:
        """True if the machine has a Neuron device, working or not."""
        return self.neuron_devices > 0

    @property
    def core_numbers(self) -> tuple[int, ...]:
        """Numbers of the cores that this process may use: those listed, else from 0 on; empty if not known."""
        return (self.listed_cores or tuple(range(self.visible_cores)))[: self.visible_cores]

    @property
    def core_bytes_per_s(self) -> float:
        """Memory bandwidth of a logical core, an even share of its chip's; 0 if unknown."""
        family = FAMILIES.get(self.family or "")
        if family is None:
            return 0.0
        chip_bytes = family.core_memory_bytes * family.cores_per_device
        return family.chip_bytes_per_s * self.core_memory_bytes / chip_bytes

    @property
    def core_flops(self) -> float:
        """Operations a second of a logical core with bfloat16, an even share of its chip's; 0 if unknown."""
        family = FAMILIES.get(self.family or "")
        return (
            self.core_bytes_per_s * family.chip_flops / family.chip_bytes_per_s if family else 0.0
        )

    def machines(self, degree: int) -> int:
        """Return the number of machines like this one that a tensor parallel group of `degree` cores spans."""
        return -(-degree // self.local_degree) if self.local_degree else 1

    def cores_for(self, degree: int) -> int:
        """Return the cores available to such a group on all of its machines; 0 if unknown."""
        return self.visible_cores * self.machines(degree)


@dataclass(frozen=True)
class Family:
    """The common properties of all instances with one kind of chip."""

    name: str
    degrees: tuple[int, ...]
    """Tensor parallel degrees that the runtime documents, ascending."""
    cores_per_device: int = 2
    """Logical cores of a chip in its default configuration. The defaults are those of Inferentia2 and Trainium."""
    core_memory_bytes: int = 16 * GIB
    """Device memory of a chip divided by its logical cores."""
    chip_bytes_per_s: float = 820e9
    """Bandwidth of a chip's device memory."""
    chip_flops: float = 190e12
    """Operations a second of a chip with dense bfloat16."""
    used_degrees: tuple[int, ...] = ()
    """Undocumented degrees that guides use."""


FAMILIES: Final[Mapping[str, Family]] = {
    family.name: family
    for family in (
        # 12: all cores of an inf2.24xlarge. 6, 16, 20: AWS's fmbench (Mistral) and ai-on-eks-charts (Llama). On Trn1
        # the runtime itself refers those who want "multiples of 2" to Inf2 (nrt_load_collectives, SDK 2.18).
        Family("inf2", (1, 2, 4, 8, 24), used_degrees=(6, 12, 16, 20)),
        Family("trn1", (1, 2, 8, 16, 32)),
        Family(
            "trn2",
            (1, 2, 4, 8, 16, 32, 64),
            cores_per_device=4,
            core_memory_bytes=24 * GIB,
            chip_bytes_per_s=2.9e12,
            chip_flops=667e12,
        ),
    )
}
"""Kinds of chips by name. Trn2 is counted with two physical cores to a logical one (LNC 2), its default.

Source: AWS Neuron SDK documentation: "Tensor-parallelism support" of the transformers-neuronx guide, the
architecture pages of Inferentia2, Trainium and Trainium2, and "Logical NeuronCore configuration".
"""


@dataclass(frozen=True)
class Instance:
    """An EC2 instance type."""

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
    """Return the instance type of an EC2 or SageMaker (``ml.inf2.xlarge``) name; None if it is not in `INSTANCES`."""
    return INSTANCES.get((instance_type or "").strip().lower().removeprefix("ml."))


def named(instance_type: str) -> DeviceInfo:
    """Return the machine of an instance type, with all of its cores visible.

    Raises:
        ConfigError: the instance type is not in `INSTANCES`.
    """
    instance = known(instance_type)
    if instance is None:
        message = f"{instance_type!r} is not a Neuron instance type; expected one of {', '.join(INSTANCES)}"
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
    """Return a Trn2 machine with one physical core per logical core if `cores_in_one` (logical_nc_config) is 1.

    Other machines are returned unchanged, and one that was detected with `NEURON_LOGICAL_NC_CONFIG=1`. A limit on the
    cores counts those that result: `for_process` comes after it.
    """
    family = FAMILIES.get(device.family or "")
    if cores_in_one != 1 or family is None or family.name != "trn2":
        return device
    if device.neuron_cores != device.neuron_devices * family.cores_per_device:
        return device
    return replace(
        device,
        neuron_cores=2 * device.neuron_cores,
        core_memory_bytes=device.core_memory_bytes // 2,
        visible_cores=2 * device.neuron_cores,
    )


def legal_degrees(family: str | None, cores: int, *, used: bool = False) -> tuple[int, ...]:
    """Return the documented tensor parallel degrees up to `cores`, ascending; of all families if it is unknown.

    `used`: include undocumented degrees that guides use.
    """
    each = [entry.degrees + entry.used_degrees * used for entry in families(family)]
    return tuple(sorted({degree for degrees in each for degree in degrees if degree <= cores}))


def families(name: str | None) -> list[Family]:
    """Return the family of this name; all families if it is unknown."""
    family = FAMILIES.get(name or "")
    return [*FAMILIES.values()] if family is None else [family]


_VISIBLE_CORES, _NUM_CORES = "NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"
_NEURON_LS = "/opt/aws/neuron/bin/neuron-ls"
"""Its place in AWS's packages, which only login shells of the DLAMI have on the path."""
_MOST_CORES = 4096
"""More than any machine has; a longer list of cores is a typing error."""


class CoreLimit(NamedTuple):
    """The cores that a variable leaves to the Neuron runtime; as text, the variable and its value."""

    name: str
    value: str
    num_cores: int | None
    """None: the value is invalid, or allows all cores."""
    listed: tuple[int, ...] = ()
    """The core numbers in the list, ascending; empty without a list."""

    def __str__(self) -> str:
        return f"{self.name}={self.value}"

    @property
    def problem(self) -> str | None:
        """The problem with the value; None if it is valid."""
        if self.num_cores is not None or (self.name == _NUM_CORES and not self.value.strip("0")):
            return None
        expected = "a number" if self.name == _NUM_CORES else "cores such as 0-7 or 0,1,4-5"
        return f"{self.name}={shortened(self.value)} is ignored: expected {expected}"

    def beyond(self, machine: DeviceInfo) -> str | None:
        """Return the problem with the value on a machine that lacks these cores; None if it has them, or is unknown."""
        cores = machine.neuron_cores
        if not cores or not self.listed or self.listed[-1] < cores:
            return None
        name = machine.instance_type or "this machine"
        return f"{self}: {name} has no core {self.listed[-1]}; its cores are 0 to {cores - 1}"


@dataclass(frozen=True)
class _Listing:
    """The output of `neuron-ls`."""

    devices: list[dict[str, Any]]
    instance_type: str | None
    outcome: str
    """The outcome of the call, for messages."""
    unread: str | None = None
    """The reason that its answer cannot be read; None: it was read."""


def detect(
    root: Path = Path("/"),
    search_path: str | None = None,
    environ: Mapping[str, str] = {},
) -> DeviceInfo:
    """Detect the machine from `/dev/neuron*`, `neuron-ls -j`, the driver, the product name and the host's memory.

    Never raises. `root`: root of the file system. `search_path`: folders of `neuron-ls`; None: `$PATH`. `environ`: only
    `NEURON_LOGICAL_NC_CONFIG` is read.
    """
    nodes = (root / "dev").glob("neuron*")
    paths = [path for path in nodes if path.name.removeprefix("neuron").isdigit()]
    listing = _neuron_ls(search_path)
    devices = max(len(paths), len(listing.devices))
    name = _product_name(root) or listing.instance_type
    instance = known(name)
    cores, memory = _total(listing.devices, "nc_count"), _total(listing.devices, "memory_size")
    cores = cores or sum(_core_count(root, path.name) for path in paths)
    assumed = None
    if devices and instance:
        cores, memory, assumed = _corrected(cores, memory, devices, instance, environ)
    return DeviceInfo(
        instance_type=instance.name if instance else name,
        neuron_devices=devices,
        neuron_cores=cores,
        memory_bytes=memory or (0 if devices else _host_memory(root)),
        cpus=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        seen=f"{len(paths)} devices under {root / 'dev'}, {listing.outcome}",
        family=instance.family if instance else None,
        core_memory_bytes=memory // cores if cores else 0,
        assumed=assumed,
        unread=listing.unread,
    )


def for_process(machine: DeviceInfo, environ: Mapping[str, str]) -> DeviceInfo:
    """Return the machine as a process with these variables sees it: with limited cores, or as one of several.

    This includes a machine that was only named, since the process will run on it.
    """
    machine, limit = replace(machine, local_degree=local_degree(environ)), core_limit(environ)
    if limit is None or limit.num_cores is None or not machine.has_neuron:
        return machine
    cores = machine.neuron_cores
    return replace(
        machine,
        visible_cores=min(limit.num_cores, cores) if cores else limit.num_cores,
        limited_by=str(limit),
        listed_cores=limit.listed,
    )


def core_limit(environ: Mapping[str, str]) -> CoreLimit | None:
    """Return the core limit in `NEURON_RT_VISIBLE_CORES`, else `NEURON_RT_NUM_CORES`; None if neither is set.

    Source: AWS Neuron documentation, "Neuron Runtime configuration".
    """
    listed = environ.get(_VISIBLE_CORES, "").strip()
    if listed:
        cores = listed_cores(listed)
        return CoreLimit(_VISIBLE_CORES, listed, len(cores) or None, cores)
    count = environ.get(_NUM_CORES, "").strip()
    if not count:
        return None
    understood = count.isdecimal() and len(count) < 6
    return CoreLimit(_NUM_CORES, count, (understood and int(count)) or None)


def with_cores(environ: Mapping[str, str], cores: str) -> Mapping[str, str]:
    """Return the variables of a process with its own cores (as in NEURON_RT_VISIBLE_CORES); unchanged without any.

    NEURON_RT_NUM_CORES is removed, because it is the limit of all processes together.
    """
    if not cores:
        return environ
    others = {name: value for name, value in environ.items() if name != _NUM_CORES}
    return {**others, _VISIBLE_CORES: cores}


def _corrected(
    cores: int, memory: int, devices: int, instance: Instance, environ: Mapping[str, str]
) -> tuple[int, int, str | None]:
    """Return the logical cores, their memory in bytes, and the assumptions behind them."""
    family = FAMILIES[instance.family]
    expected = devices * _logical_cores(family, environ)
    assumed = []
    if not cores:
        assumed.append("neuron-ls does not list the cores")
    elif cores != expected and family.name == "trn2":
        # Which of the two neuron-ls lists is not documented.
        assumed.append(f"{cores} cores are listed, assumed to be physical ones")
        cores = 0
    if not memory:
        assumed.append("neuron-ls does not list the memory")
        memory = devices * family.cores_per_device * family.core_memory_bytes
    cores = cores or expected
    if not assumed:
        return cores, memory, None
    size = memory / cores / 2**30
    counted = f"{cores} cores with {size:g} GiB each, as {devices} devices of {instance.name} have"
    return cores, memory, f"{' and '.join(assumed)}: {counted}"


def _logical_cores(family: Family, environ: Mapping[str, str]) -> int:
    """Return the logical cores of a device; on Trn2 they depend on NEURON_LOGICAL_NC_CONFIG."""
    alone = environ.get("NEURON_LOGICAL_NC_CONFIG", "").strip() == "1"
    return family.cores_per_device * (2 if alone and family.name == "trn2" else 1)


def listed_cores(text: str) -> tuple[int, ...]:
    """Parse a list of cores such as ``0,1,4-7``, ascending; empty if it is invalid."""
    named: set[int] = set()
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and len(last) < 6 and len(first) < 6):
            return ()
        if int(first) > int(last):
            return ()
        named.update(range(int(first), min(int(last), _MOST_CORES) + 1))
        named.add(int(last))
    return tuple(sorted(named))


def _neuron_ls(search_path: str | None) -> _Listing:
    program = shutil.which("neuron-ls", path=search_path)
    if program is None and search_path is None:
        program = shutil.which(_NEURON_LS)
    if program is None:
        return _Listing([], None, "no neuron-ls")
    try:
        answer = json.loads(output([program, "-j"]))
    except UnreadError as error:
        return _Listing([], None, f"{program} failed ({error})", str(error))
    except (ValueError, RecursionError):
        answer = None
    # The format is not documented: a list of devices, or an object with that list and the instance type.
    rows, name = answer, None
    if isinstance(answer, dict):
        rows, name = answer.get("mlas"), answer.get("instance_type")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        reason = "its output is no list of devices in JSON"
        return _Listing([], None, f"{program} failed ({reason})", reason)
    name = name if isinstance(name, str) and name else None
    return _Listing(rows, name, f"{program} lists {len(rows)}")


def neuron_processes(search_path: str | None = None) -> dict[int, tuple[str, set[int]]]:
    """Return pid -> the command and the devices of each process that `neuron-ls` lists; empty if it fails.

    Never raises. `search_path`: its folders; None: `$PATH`. The command is shortened; of a process in another container
    it is empty. Source: AWS Neuron documentation, "Neuron LS user guide".
    """
    found: dict[int, tuple[str, set[int]]] = {}
    for device in _neuron_ls(search_path).devices:
        number, rows = device.get("neuron_device"), device.get("neuron_processes")
        for row in rows if isinstance(rows, list) else []:
            pid = row.get("pid") if isinstance(row, dict) else None
            if type(pid) is int and type(number) is int:
                found.setdefault(pid, (str(row.get("command") or ""), set()))[1].add(number)
    return found


def _core_count(root: Path, device: str) -> int:
    """Return the cores that the driver counts on a device; 0 if unknown. Source: ai.djl.util.NeuronUtils (DJL 0.36)."""
    text = read_text(root / "sys/devices/virtual/neuron_device" / device / "core_count").strip()
    return int(text) if text.isdecimal() and len(text) < 4 else 0


def _total(rows: list[dict[str, Any]], key: str) -> int:
    values = (row.get(key) for row in rows)
    return sum(value for value in values if type(value) is int and value > 0)


def _product_name(root: Path) -> str | None:
    return read_text(root / "sys/devices/virtual/dmi/id/product_name").strip() or None


def _host_memory(root: Path) -> int:
    """Return the memory of the host or the limit of this container, whichever is less."""
    found = _fields(root / "proc/meminfo")
    sizes = [found["MemTotal:"] * 1024] if "MemTotal:" in found else []
    limit = read_text(root / "sys/fs/cgroup/memory.max").strip()
    return min([*sizes, *([int(limit)] if limit.isdigit() else [])], default=0)


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes of host memory that processes can still take here, in this container; None if unknown.

    Cached files count as available. Source: the kernel's cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    found = _fields(root / "proc/meminfo")
    sizes = [found["MemAvailable:"] * 1024] if "MemAvailable:" in found else []
    own = read_text(root / "proc/self/cgroup").rpartition("0::/")[2].strip()
    groups, v1 = root / "sys/fs/cgroup", root / "sys/fs/cgroup/memory"
    v2 = [(one, "max", "current", "") for one in ((groups / own), *(groups / own).parents)]
    for folder, limit, used, kind in (*v2, (v1, "limit_in_bytes", "usage_in_bytes", "total_")):
        most, taken = (read_text(folder / f"memory.{name}").strip() for name in (limit, used))
        if most.isdigit() and taken.isdigit():
            stat = _fields(folder / "memory.stat")
            cached = sum(stat.get(f"{kind}{name}_file", 0) for name in ("active", "inactive"))
            sizes.append(max(int(most) - int(taken) + cached, 0))
    return min(sizes, default=None)


def oom_kills(root: Path = Path("/")) -> int | None:
    """Return the processes of this control group that the kernel has killed for memory so far; None if unknown.

    Source: the kernel's cgroup-v2.rst (`memory.events`) and cgroup-v1/memory.rst (`memory.oom_control`).
    """
    groups, files = root / "sys/fs/cgroup", ["memory.events", "memory/memory.oom_control"]
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, kind, own = line.split(":", 2)
        files += [f".{own}/memory.events"] * (not kind)
        files += [f"memory/.{own}/memory.oom_control"] * (kind == "memory")
    found = [_fields(groups / file).get("oom_kill") for file in files]
    return max((count for count in found if count is not None), default=None)


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file of the kernel with a name and a number in each line."""
    lines = [line.split() for line in read_text(path).splitlines()]
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def read_text(path: Path) -> str:
    """Return the text of a file of the kernel; empty if there is none, or it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


LOCAL_TP = "NEURON_LOCAL_TP"
RANK_ID = "NEURON_RANK_ID"
PP_STAGES = "NEURON_PP_STAGES"


def local_degree(environ: Mapping[str, str]) -> int | None:
    """Return `NEURON_LOCAL_TP`, the cores of each machine in a tensor parallel group; None if unset or no number."""
    text = environ.get(LOCAL_TP, "").strip()
    return int(text) or None if text.isdecimal() and len(text) < 6 else None


def spanning(degree: int, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables, with their values, that spread a model of this degree over several machines."""
    single = {LOCAL_TP: degree, RANK_ID: 0, PP_STAGES: 1}
    return tuple(
        f"{name}={environ[name]}"
        for name, expected in single.items()
        if environ.get(name, "").strip() not in {"", str(expected)}
    )


def obstacle(degree: int, environ: Mapping[str, str]) -> str | None:
    """Explain why a process with these variables cannot serve a model of this degree; None if it can.

    The machines of a group wait for each other in every step, so each of them has to make the same calls at the same
    time. Those calls follow from requests, which only the first machine gets.
    """
    found = spanning(degree, environ)
    if not found:
        return None
    return (
        f"{' and '.join(found)} with tensor_parallel_degree={degree} spreads the model over several machines, which is "
        f"not supported. Expected {LOCAL_TP} to be the degree, {RANK_ID} 0 and {PP_STAGES} 1, or none of them; unset "
        "them, and use a machine that holds the model"
    )
