"""The machines with Neuron devices that exist, and the tensor parallel degrees that run on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

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


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
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
)
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


INSTANCES: Mapping[str, Instance] = MappingProxyType(
    {
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
)
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
