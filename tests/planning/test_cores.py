"""Placement: every instance type, random needs, and brute force on small machines."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.errors import ConfigError
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.cores import Need, alignment, place
from djl_python_neuronx.planning.defaults import fill
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.machines import (
    FAMILIES,
    INSTANCES,
    DeviceInfo,
    for_process,
    named,
    on_single_cores,
)
from djl_python_neuronx.planning.model import ModelFacts

NOWHERE = DeviceInfo(None, 0, 0, 0, 4, "no devices")


def cores_of(text: str) -> list[int]:
    """Read `NEURON_RT_VISIBLE_CORES`, as the runtime does."""
    first, _, last = text.partition("-")
    return [*range(int(first), int(last or first) + 1)]


def check_placement(
    needs: list[Need], device: DeviceInfo, placed: list[tuple[str, ...]]
) -> set[int]:
    """Assert what holds for every placement; return the cores that stay free."""
    assert len(placed) == len(needs)
    free = set(device.core_numbers)
    for need, copies in zip(needs, placed, strict=True):
        assert len(copies) >= 1 if need.replicas == "max" else len(copies) == need.replicas
        for copy in copies:
            cores = cores_of(copy)
            assert len(cores) == need.cores
            assert free.issuperset(cores), "outside the machine, or taken by another copy"
            free.difference_update(cores)
            assert starts_right(cores[0], need.cores, device)
    return free


def starts_right(first: int, cores: int, device: DeviceInfo) -> bool:
    """Inf2's ring: groups of several cores begin with a chip of two. Trn1, Trn2: at a multiple of their size."""
    if device.family == "inf2":
        return cores % 2 == 1 or first % 2 == 0
    return first % next(size for size in (64, 32, 16, 8, 4, 2, 1) if cores % size == 0) == 0


def has_room(cores: int, free: set[int], device: DeviceInfo) -> bool:
    return any(
        free.issuperset(range(first, first + cores)) and starts_right(first, cores, device)
        for first in free
    )


MACHINES = [*map(named, INSTANCES), on_single_cores(named("trn2.48xlarge"), 1)]


@pytest.mark.parametrize(
    "device", MACHINES, ids=lambda one: f"{one.instance_type}-{one.neuron_cores}"
)
def test_each_degree_fills_each_machine(device):
    family = FAMILIES[device.family]
    for degree in (*family.degrees, *family.used_degrees):
        most = device.neuron_cores // degree
        if not most:
            with pytest.raises(ConfigError, match=f"need {degree} NeuronCores, and"):
                place([Need("m", degree, "max")], device)
            continue
        (copies,) = place([Need("m", degree, "max")], device)
        assert len(copies) == most
        check_placement([Need("m", degree, "max")], device, [copies])
        for number in {most, most - 1, 2} - {0, 1}:
            if number > most:
                with pytest.raises(ConfigError, match=f"m \\({number} with {degree} each\\)"):
                    place([Need("m", degree, number)], device)
            else:
                assert place([Need("m", degree, number)], device) == [copies[:number]]


TABLE = [
    # instance, needs as (cores, replicas), cores of each copy
    ("inf2.xlarge", [(1, "max")], [("0", "1")]),
    ("inf2.xlarge", [(1, 1), (1, 1)], [("0",), ("1",)]),
    ("inf2.xlarge", [(2, "max")], [("0-1",)]),
    ("inf2.24xlarge", [(12, "max")], [("0-11",)]),
    ("inf2.24xlarge", [(8, 1), (4, "max")], [("0-7",), ("8-11",)]),
    ("inf2.24xlarge", [(2, "max"), (8, 1)], [("8-9", "10-11"), ("0-7",)]),
    ("inf2.48xlarge", [(2, "max")], [tuple(f"{n}-{n + 1}" for n in range(0, 24, 2))]),
    ("inf2.48xlarge", [(8, "max")], [("0-7", "8-15", "16-23")]),
    ("inf2.48xlarge", [(12, 2)], [("0-11", "12-23")]),
    ("inf2.48xlarge", [(12, 1), (8, 1), (4, 1)], [("0-11",), ("12-19",), ("20-23",)]),
    ("inf2.48xlarge", [(8, 2), (1, 3), (2, "max")], [
        ("0-7", "8-15"), ("18", "19", "20"), ("16-17", "22-23"),
    ]),
    ("inf2.48xlarge", [(8, "max"), (4, "max")], [("0-7", "12-19"), ("8-11", "20-23")]),
    ("trn1.2xlarge", [(2, "max")], [("0-1",)]),
    ("trn1.32xlarge", [(8, 1), (2, "max"), (16, 1)], [
        ("16-23",), ("24-25", "26-27", "28-29", "30-31"), ("0-15",),
    ]),
    ("trn1.32xlarge", [(2, 1), (8, "max")], [("8-9",), ("0-7", "16-23", "24-31")]),
    ("trn1n.32xlarge", [(32, "max")], [("0-31",)]),
    ("trn2.3xlarge", [(4, "max")], [("0-3",)]),
    ("trn2.48xlarge", [(64, 1)], [("",)]),
    ("trn2.48xlarge", [(32, 1), (16, "max")], [("0-31",), ("32-47", "48-63")]),
    ("trn2u.48xlarge", [(32, 2)], [("0-31", "32-63")]),
]  # fmt: skip


@pytest.mark.parametrize(("instance", "needs", "expected"), TABLE)
def test_table(instance, needs, expected):
    named_needs = [Need(f"m{i}", cores, copies) for i, (cores, copies) in enumerate(needs)]
    assert place(named_needs, named(instance)) == expected


@pytest.mark.parametrize(
    ("limit", "needs", "expected"),
    [
        ("8-15", [(4, "max")], [("8-11", "12-15")]),
        ("8-15,20-23", [(4, "max")], [("20-23", "8-11", "12-15")]),
        ("1-8", [(2, "max"), (1, 2)], [("2-3", "4-5", "6-7"), ("1", "8")]),
        ("0,2,4", [(1, "max")], [("0", "2", "4")]),
        ("3", [(1, "max")], [("3",)]),
        ("4-11", [(8, "max")], [("4-11",)]),  # of Inf2's ring
    ],
)
def test_within_the_cores_that_the_environment_lists(limit, needs, expected):
    device = for_process(named("inf2.48xlarge"), {"NEURON_RT_VISIBLE_CORES": limit})
    assert place([Need("m", *need) for need in needs], device) == expected


def test_within_the_number_of_cores():
    device = for_process(named("inf2.48xlarge"), {"NEURON_RT_NUM_CORES": "8"})
    assert place([Need("m", 4, "max")], device) == [("0-3", "4-7")]


def test_a_ring_takes_neighbours_a_torus_does_not():
    limit = {"NEURON_RT_VISIBLE_CORES": "4-11"}
    with pytest.raises(ConfigError, match="topology") as raised:
        place([Need("m", 8, "max")], for_process(named("trn1.32xlarge"), limit))
    assert "NEURON_RT_VISIBLE_CORES=4-11 gives 8" in str(raised.value)
    assert "give it whole chips" in str(raised.value)


def test_one_copy_of_one_model_keeps_the_environment():
    """Two servers that are started by hand each take the first free cores."""
    assert place([Need("m", 8, 1)], named("inf2.48xlarge")) == [("",)]
    assert place([Need("m", 8, 1)], replace(named("inf2.48xlarge"), visible_cores=0)) == [("",)]


def test_on_a_cpu():
    needs = [Need("a", 0, 3), Need("b", 0, "max"), Need("c", 0, 1)]
    assert place(needs, NOWHERE) == [("", "", ""), ("",), ("",)]


def test_a_model_on_the_host_takes_no_cores():
    needs = [Need("a", 0, 2), Need("b", 2, "max")]
    assert place(needs, named("inf2.xlarge")) == [("", ""), ("0-1",)]


def test_too_many_name_models_cores_and_the_fix():
    needs = [Need("llama", 8, 3), Need("qwen", 2, "max")]
    with pytest.raises(ConfigError) as raised:
        place(needs, named("inf2.48xlarge"))
    assert str(raised.value) == (
        "copies of llama (3 with 8 each) and qwen (max with 2 each) need 26 NeuronCores, and inf2.48xlarge gives 24; "
        "lower option.replicas or option.tensor_parallel_degree, serve fewer models, or use a larger machine"
    )


def test_unknown_cores():
    device = replace(named("inf2.48xlarge"), neuron_cores=0, visible_cores=0)
    with pytest.raises(ConfigError, match="set NEURON_RT_VISIBLE_CORES to the cores"):
        place([Need("m", 2, "max")], device)
    limited = for_process(device, {"NEURON_RT_VISIBLE_CORES": "0-3"})
    assert place([Need("m", 2, "max")], limited) == [("0-1", "2-3")]


MODELS = Path(__file__).parent / "models"
NAMES = sorted(path.stem for path in MODELS.glob("*.json"))


def test_each_model_fills_each_machine_with_what_its_degree_leaves_room_for(subtests):
    for case in itertools.product(NAMES, INSTANCES):
        with subtests.test(str(case)):
            check_copies(*case)


def check_copies(model, machine):
    facts = ModelFacts.from_config(json.loads((MODELS / f"{model}.json").read_text()))
    device = named(machine)
    for replicas in ("max", 2):
        options = ServingOptions(model_id="m", model_loader="tnx", replicas=replicas)
        degree, _ = fill(Case(options, facts, device, NEURON_BACKENDS["tnx"]))[
            "tensor_parallel_degree"
        ]
        needs = [Need("m", degree, replicas)]
        if replicas == 2 and 2 * degree > device.neuron_cores:
            with pytest.raises(ConfigError, match=f"need {2 * degree} NeuronCores"):
                place(needs, device)
            continue
        placed = place(needs, device)
        free = check_placement(needs, device, placed)
        assert replicas == 2 or len(free) < degree


def _random_needs(draw: random.Random, device: DeviceInfo) -> list[Need]:
    family = FAMILIES[device.family]
    degrees = (*family.degrees, *family.used_degrees)
    return [
        Need(
            f"m{i}", draw.choice(degrees) * draw.choice([1, 1, 1, 3]), draw.choice([1, 2, 3, "max"])
        )
        for i in range(draw.randint(2, 4))
    ]


@pytest.mark.parametrize("seed", range(20))
def test_random_needs(seed):
    draw = random.Random(seed)
    placed_ones = 0
    for _ in range(100):
        device = draw.choice(MACHINES)
        numbers = sorted(
            draw.sample(range(device.neuron_cores), draw.randint(1, device.neuron_cores))
        )
        if draw.random() < 0.5:
            limit = {"NEURON_RT_VISIBLE_CORES": ",".join(map(str, numbers))}
            device = for_process(device, limit)
        needs = _random_needs(draw, device)
        try:
            placed = place(needs, device)
        except ConfigError:
            continue
        placed_ones += 1
        free = check_placement(needs, device, placed)
        for need in needs:
            if need.replicas == "max":
                assert not has_room(need.cores, free, device), "one more copy would fit"
    assert placed_ones


def _possible(sizes: tuple[int, ...], free: frozenset[int], device: DeviceInfo) -> bool:
    """Try every position of every group."""
    if not sizes:
        return True
    size, *others = sizes
    return any(
        _possible((*others,), free.difference(range(first, first + size)), device)
        for first in sorted(free)
        if free.issuperset(range(first, first + size)) and starts_right(first, size, device)
    )


SMALL = {
    "inf2": replace(named("inf2.24xlarge"), neuron_cores=8, visible_cores=8),
    "trn1": replace(named("trn1.32xlarge"), neuron_cores=8, visible_cores=8),
    "trn2": replace(named("trn2.48xlarge"), neuron_cores=8, visible_cores=8),
}


@pytest.mark.parametrize(
    ("family", "sizes"),
    [*((family, (1, 2, 4, 8)) for family in SMALL), ("inf2", (1, 2, 3, 4, 6))],
)
def test_found_whenever_there_is_one(family, sizes):
    """With gaps where each size divides the next, on Inf2 without gaps whatever the sizes."""
    device, compared = SMALL[family], 0
    lists = [range(8)]
    if sizes == (1, 2, 4, 8):
        lists = [numbers for n in range(2, 9) for numbers in itertools.combinations(range(8), n)]
    for numbers in lists:
        limit = {"NEURON_RT_VISIBLE_CORES": ",".join(map(str, numbers))}
        limited = for_process(device, limit)
        for count in (2, 3, 4):
            for wanted in itertools.combinations_with_replacement(sizes, count):
                if sum(wanted) > len(numbers):
                    continue
                possible = _possible(wanted[::-1], frozenset(numbers), limited)
                try:
                    place([Need(f"m{i}", size, 1) for i, size in enumerate(wanted)], limited)
                except ConfigError:
                    assert not possible, (numbers, wanted)
                else:
                    assert possible, (numbers, wanted)
                compared += 1
    assert compared > 20


def test_alignment_without_a_known_family_is_the_strictest():
    assert alignment(8, NOWHERE) == 8
