"""Where a model fits that does not fit as it is set: cores, instance types, and options that save memory."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from djl_python_neuronx.planning.capabilities import CAPABILITIES
from djl_python_neuronx.planning.division import takes
from djl_python_neuronx.planning.machines import INSTANCES, DeviceInfo, legal_degrees, named
from djl_python_neuronx.planning.memory import Load, needed
from djl_python_neuronx.planning.model import ModelFacts

_STEP = 128
"""Tokens: lengths are advised in multiples of this."""


class Fit(NamedTuple):
    """Where something fits; as text, what to set or to take."""

    degree: int
    instance_type: str | None
    """None: this machine."""
    draft_degree: int | None = None
    """None: as it is set."""

    def __str__(self) -> str:
        setting = f"tensor_parallel_degree={self.degree}"
        if self.draft_degree is not None:
            setting += f" with draft_model_tp_size={self.draft_degree}"
        return f"{setting} on {self.instance_type}" if self.instance_type else setting


def smallest_fit(
    facts: ModelFacts, load: Load, device: DeviceInfo, loader: str, *, below: int = 0
) -> Fit | None:
    """The least that holds it with `SPARE`: more cores of this machine, else the smallest instance type.

    Its own family goes before others. `below`: degrees up to this are known not to fit here. A draft model that was
    given cores of its own may be given as many as the model instead. None: nothing holds it.
    """
    if facts.num_parameters is None or loader == "cpu":
        return None
    worlds = load.stages * load.expert_groups
    here = _degrees(device, worlds) if device.core_memory_bytes else ()
    more = tuple(degree for degree in here if degree > below)
    machines = [named(name) for name in INSTANCES]
    machines.sort(key=lambda machine: (machine.family != device.family, machine.memory_bytes))
    places: list[tuple[str | None, DeviceInfo, tuple[int, ...]]] = [(None, device, more)]
    places += [(machine.instance_type, machine, _degrees(machine, worlds)) for machine in machines]
    for name, machine, degrees in places:
        for degree in degrees:
            if not takes(facts, degree, loader):
                continue
            if _roomy(facts, load, degree, machine, loader):
                return Fit(degree, name)
            if load.draft_degree is None:
                continue
            spread = replace(load, draft_degree=degree)
            if _roomy(facts, spread, degree, machine, loader):
                return Fit(degree, name, degree)
    return None


def _roomy(facts: ModelFacts, load: Load, degree: int, machine: DeviceInfo, loader: str) -> bool:
    """Whether it fits on these cores with some to spare; the draft model may need more of them than the model."""
    return needed(
        facts,
        load,
        degree=degree,
        core_memory_bytes=machine.core_memory_bytes,
        loader=loader,
        cores=machine.visible_cores,
    ).roomy


def _degrees(device: DeviceInfo, worlds: int) -> tuple[int, ...]:
    """What `placement` accepts as a degree where `worlds` times as many cores are taken."""
    return legal_degrees(device.family, device.visible_cores // worlds, used=True)


def savings(
    facts: ModelFacts, load: Load, degree: int, device: DeviceInfo, loader: str
) -> Iterator[str]:
    """What, changed alone, makes it fit on these cores with some to spare: the greatest value of each that does."""

    def roomy(changed: Load) -> bool:
        return needed(
            facts,
            changed,
            degree=degree,
            core_memory_bytes=device.core_memory_bytes,
            loader=loader,
        ).roomy

    slots = _most(load.num_slots - 1, lambda number: roomy(replace(load, num_slots=number)))
    if slots:
        yield f"max_rolling_batch_size={slots}"
    steps = _most(
        (load.max_model_len - 1) // _STEP,
        lambda number: roomy(replace(load, max_model_len=number * _STEP)),
    )
    if steps:
        yield f"n_positions={steps * _STEP}"
    capability = CAPABILITIES[loader].get(facts.model_type or "")
    quantised = capability is None or capability.int8
    if load.weight_dtype is None and quantised and roomy(replace(load, weight_dtype="int8")):
        yield "quantize=static_int8"
    spread = (load.draft_degree or degree) < degree
    if spread and roomy(replace(load, draft_degree=degree)):
        yield f"draft_model_tp_size={degree}"


def _most(limit: int, does: Callable[[int], bool]) -> int:
    """The greatest number up to `limit` that does, where all smaller ones do too; 0: none."""
    return bisect.bisect_left(range(1, limit + 1), True, key=lambda number: not does(number))
