"""Placement of several models and copies on the NeuronCores of one machine.

Each copy is an engine process with its own cores, named in its `NEURON_RT_VISIBLE_CORES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from djl_python_neuronx.config.values import join_words
from djl_python_neuronx.errors import ConfigError
from djl_python_neuronx.planning.machines import FAMILIES, DeviceInfo, listed_cores

_BLOCKS = (2, 4, 8, 16, 32, 64, 128)
"""Sizes of aligned blocks of cores. No machine has more logical cores."""


@dataclass(frozen=True)
class Need:
    """The cores that a model needs."""

    name: str
    """The model, for messages."""
    cores: int
    """NeuronCores of each copy; 0 on a CPU."""
    replicas: int | Literal["max"]
    """Copies; ``max``: as many as fit beside the other models, at least 1."""


def place(needs: Sequence[Need], device: DeviceInfo) -> list[tuple[str, ...]]:
    """Return the cores of each copy of each model, as values of `NEURON_RT_VISIBLE_CORES`; no two copies share one.

    Empty texts set no variable: on a CPU, where `max` is 1, and for one copy of one model, which takes the cores that
    the environment leaves it or the first free ones. All others get contiguous ranges of `device.core_numbers`, the
    largest first. `max` models get a copy each beside the copies that are numbered, then further ones in turn until no
    more fits.

    A placement is found whenever there is one, if each size divides the next larger one, and on Inf2 also with 12 cores
    beside 8 if the numbers have no gaps. Other mixtures, such as three pipeline stages on Trn1, may be refused although
    they would fit in another order.

    Raises:
        ConfigError: the cores do not hold all copies, or their number is not known.
    """
    copies = [1 if need.replicas == "max" else need.replicas for need in needs]
    if not any(need.cores for need in needs) or (sum(copies) == 1 and needs[0].replicas == 1):
        return [("",) * number for number in copies]
    if not device.visible_cores:
        message = (
            f"the number of NeuronCores is not known ({device.seen}), so {_described(needs)} cannot be placed; set "
            "NEURON_RT_VISIBLE_CORES to the cores that they may use, such as 0-23"
        )
        raise ConfigError(message)
    placed: list[list[str]] = [[] for _ in needs]
    free = set(device.core_numbers)

    def add(index: int) -> bool:
        cores = _take(needs[index].cores, free, device)
        if cores is not None:
            placed[index].append(cores)
        return cores is not None

    numbered = [index for index, number in enumerate(copies) for _ in range(number)]
    if not all(map(add, sorted(numbered, key=lambda index: -needs[index].cores))):
        raise ConfigError(_too_many(needs, device))
    growing = [index for index, need in enumerate(needs) if need.replicas == "max" and need.cores]
    while growing:
        growing = [index for index in growing if add(index)]
    return [tuple(ranges) for ranges in placed]


def free_cores(placed: Iterable[Sequence[str]], device: DeviceInfo) -> str:
    """Return the cores that a placement leaves free, such as ``18-19,22-23``; empty if there are none."""
    taken = {core for copies in placed for cores in copies for core in listed_cores(cores)}
    return _text(_runs({*device.core_numbers} - taken))


def chips(cores: str, device: DeviceInfo) -> str:
    """Return the Neuron devices that have these cores, such as ``0-3``."""
    each = max(device.neuron_cores // max(device.neuron_devices, 1), 1)
    return _text(_runs({core // each for core in listed_cores(cores)}))


def alignment(cores: int, device: DeviceInfo) -> int:
    """Return the number that the first core of a group of `cores` must be a multiple of.

    The chips of Inf2 form a ring, on which any neighbours are a group: a group begins with a chip. Those of Trn1 and
    Trn2 form a torus, where only its rows, halves and so on are: a group begins at a multiple of its size, or of the
    largest power of two in it (pipeline stages).

    Source: AWS Neuron documentation, "Neuron scheduler extension" (device allocation by instance type). DJL Serving
    places its workers at multiples of the degree on all of them (ModelInfo.java getLoadOnDevices).
    """
    largest = cores & -cores
    family = FAMILIES.get(device.family or "")
    return min(largest, family.cores_per_device) if family and family.name == "inf2" else largest


def _take(cores: int, free: set[int], device: DeviceInfo) -> str | None:
    """Remove an aligned range from the free cores, and return it as text; None if there is none.

    Of several it is one in the smallest aligned block of free cores, so that the larger ones stay whole for others,
    then in the shortest run of free cores, then the first.
    """
    if not cores:
        return ""
    step, largest = alignment(cores, device), alignment(_BLOCKS[-1], device)
    blocks = [size for size in _BLOCKS if step < size <= largest]
    found = [
        (sum(_is_free(first // size * size, size, free) for size in blocks), len(run), first)
        for run in _runs(free)
        for first in range(-(-run.start // step) * step, run.stop - cores + 1, step)
    ]
    if not found:
        return None
    *_, first = min(found)
    free.difference_update(range(first, first + cores))
    return _text([range(first, first + cores)])


def _is_free(first: int, size: int, free: set[int]) -> bool:
    return free.issuperset(range(first, first + size))


def _runs(cores: set[int]) -> list[range]:
    """Return the runs of neighbouring cores, ascending."""
    firsts = sorted(core for core in cores if core - 1 not in cores)
    lasts = sorted(core for core in cores if core + 1 not in cores)
    return [range(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]


def _text(runs: Iterable[range]) -> str:
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _described(needs: Sequence[Need]) -> str:
    """``copies of a (2 with 8 cores each) and b (max with 2)``."""
    sizes = [
        f"{need.name} ({need.replicas} with {need.cores} each)" for need in needs if need.cores
    ]
    return f"copies of {join_words(sizes)}"


def _too_many(needs: Sequence[Need], device: DeviceInfo) -> str:
    least = sum(need.cores * (1 if need.replicas == "max" else need.replicas) for need in needs)
    there = device.visible_cores
    limit = device.limited_by or device.instance_type or "this machine"
    topology, fix = "", "lower option.replicas or option.tensor_parallel_degree, serve fewer models"
    if least <= there:
        topology = ", not in ranges that its chips' topology allows"
        fix = f"give it whole chips (NEURON_RT_VISIBLE_CORES), {fix}"
    return (
        f"{_described(needs)} need {least} NeuronCores, and {limit} gives {there}{topology}; {fix}, or use a larger "
        "machine"
    )
