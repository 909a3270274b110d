"""Placement of several models and copies on the NeuronCores of one machine.

Each copy is an engine process with cores of its own, named in its `NEURON_RT_VISIBLE_CORES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from djl_python_neuronx.config.values import join_words
from djl_python_neuronx.errors import ConfigError
from djl_python_neuronx.planning.machines import FAMILIES, DeviceInfo, listed_cores

_LARGEST_BLOCK = 128
"""No machine has more logical cores."""


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
    largest first. `max` models get a copy each beside the copies
    that are numbered, then further ones in turn until no more fits.

    A placement is found whenever there is one if the cores have no gaps, or if each size divides the next larger one.

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
    step, largest = alignment(cores, device), alignment(_LARGEST_BLOCK, device)
    found = [
        (_block(first, step, largest, free), len(run), first)
        for run in _runs(free)
        for first in range(-(-run.start // step) * step, run.stop - cores + 1, step)
    ]
    if not found:
        return None
    *_, first = min(found)
    free.difference_update(range(first, first + cores))
    return _text([range(first, first + cores)])


def _block(first: int, size: int, largest: int, free: set[int]) -> int:
    """Return the size of the largest aligned block of free cores around one that begins at `first`."""
    while size < largest:
        start = first // (2 * size) * 2 * size
        if not free.issuperset(range(start, start + 2 * size)):
            break
        size *= 2
    return size


def _runs(free: set[int]) -> Iterator[range]:
    """Yield the runs of neighbouring cores, ascending."""
    first = None
    for core in sorted(free):
        first = core if first is None else first
        if core + 1 not in free:
            yield range(first, core + 1)
            first = None


def _text(runs: Iterable[range]) -> str:
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _described(needs: Sequence[Need]) -> str:
    """``2 copies of a with 8 cores each and 1 copy of b with 4 cores``."""
    return join_words(
        f"{need.replicas} {'copy' if need.replicas == 1 else 'copies'} of {need.name} with {need.cores} "
        f"core{'s' * (need.cores != 1)}{' each' * (need.replicas != 1)}"
        for need in needs
        if need.cores
    )


def _too_many(needs: Sequence[Need], device: DeviceInfo) -> str:
    least = sum(need.cores * (1 if need.replicas == "max" else need.replicas) for need in needs)
    where = f" of {device.instance_type}" if device.instance_type else ""
    limit = f" ({device.limited_by})" if device.limited_by else ""
    there = device.visible_cores
    problem = f"{_described(needs)} need {least} NeuronCores, and {there}{where} can be used{limit}"
    if least <= there:
        problem += ", not in ranges that the chips' topology allows"
    return (
        f"{problem}; lower option.replicas (or set max) or option.tensor_parallel_degree, serve fewer models, or use a "
        "larger machine"
    )
