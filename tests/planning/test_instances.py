"""The machines by name, and the degrees that run on them."""

import pytest

from djl_python_neuronx.errors import ConfigError
from djl_python_neuronx.planning.machines import (
    FAMILIES,
    GIB,
    INSTANCES,
    DeviceInfo,
    for_process,
    known,
    legal_degrees,
    named,
    on_single_cores,
)

# Accelerator memory in GiB and cores, from AWS's product pages of Inf2, Trn1 and Trn2 (LNC 2).
SOLD = {
    "inf2.xlarge": (32, 2),
    "inf2.8xlarge": (32, 2),
    "inf2.24xlarge": (192, 12),
    "inf2.48xlarge": (384, 24),
    "trn1.2xlarge": (32, 2),
    "trn1.32xlarge": (512, 32),
    "trn1n.32xlarge": (512, 32),
    "trn2.3xlarge": (96, 4),
    "trn2.48xlarge": (1536, 64),
    "trn2u.48xlarge": (1536, 64),
}


@pytest.mark.parametrize("name", SOLD)
def test_a_machine_is_what_is_sold(name):
    gib, cores = SOLD[name]
    found = named(name)
    assert (found.instance_type, found.memory_bytes, found.neuron_cores) == (name, gib * GIB, cores)
    assert found.core_memory_bytes * found.visible_cores == found.memory_bytes
    assert found.has_neuron
    assert found.assumed is None
    assert name.startswith(found.family)


def test_every_machine_is_compared():
    assert set(INSTANCES) == set(SOLD)


@pytest.mark.parametrize("name", ["ml.inf2.xlarge", "ML.INF2.XLARGE", " inf2.xlarge "])
def test_sagemakers_spelling(name):
    assert named(name) == named("inf2.xlarge")


@pytest.mark.parametrize("name", ["", "inf2", "inf1.xlarge", "p4d.24xlarge", "ml.ml.inf2.xlarge"])
def test_an_unknown_machine_names_the_known_ones(name):
    assert known(name) is None
    with pytest.raises(ConfigError, match=r"inf2\.48xlarge") as caught:
        named(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("family", "cores", "degrees"),
    [
        ("inf2", 24, (1, 2, 4, 8, 24)),
        ("inf2", 23, (1, 2, 4, 8)),
        ("inf2", 12, (1, 2, 4, 8)),
        ("inf2", 1, (1,)),
        ("trn1", 32, (1, 2, 8, 16, 32)),
        ("trn1", 7, (1, 2)),
        ("trn2", 64, (1, 2, 4, 8, 16, 32, 64)),
        (None, 8, (1, 2, 4, 8)),
        (None, 1000, (1, 2, 4, 8, 16, 24, 32, 64)),
        ("unheard-of", 4, (1, 2, 4)),
        ("inf2", 0, ()),
    ],
)
def test_legal_degrees(family, cores, degrees):
    assert legal_degrees(family, cores) == degrees


def test_every_machine_but_one_can_use_all_of_its_cores():
    idle = {
        name
        for name, instance in INSTANCES.items()
        if instance.cores not in FAMILIES[instance.family].degrees
    }
    assert idle == {"inf2.24xlarge"}
    assert INSTANCES["inf2.24xlarge"].cores in FAMILIES["inf2"].used_degrees


def test_all_cores_are_visible_unless_told_otherwise():
    assert DeviceInfo(None, 1, 2, 0, 1, "").visible_cores == 2
    assert DeviceInfo(None, 1, 2, 0, 1, "", visible_cores=1).visible_cores == 1
    assert DeviceInfo(None, 1, 2, 0, 1, "", visible_cores=0).visible_cores == 0


@pytest.mark.parametrize(
    ("family", "cores", "degrees"),
    [
        ("inf2", 24, (1, 2, 4, 6, 8, 12, 16, 20, 24)),
        ("inf2", 11, (1, 2, 4, 6, 8)),
        ("trn1", 12, (1, 2, 8)),
    ],
)
def test_degrees_that_guides_use_beside_them(family, cores, degrees):
    assert legal_degrees(family, cores, used=True) == degrees


class TestSingleCores:
    PAIRS = named("trn2.48xlarge")

    def test_twice_as_many_and_half_as_large(self):
        found = on_single_cores(self.PAIRS, 1)
        assert (found.neuron_cores, found.visible_cores) == (128, 128)
        assert found.core_memory_bytes * found.neuron_cores == self.PAIRS.memory_bytes

    @pytest.mark.parametrize(("count", "visible"), [("3", 3), ("4", 4), ("6", 6), ("99", 8)])
    def test_a_limit_counts_the_cores_that_there_are_going_to_be(self, count, visible):
        limit = {"NEURON_RT_NUM_CORES": count}
        assert for_process(named("trn2.3xlarge"), limit).visible_cores == min(visible, 4)
        divided = for_process(on_single_cores(named("trn2.3xlarge"), 1), limit)
        assert divided.visible_cores == visible
        assert on_single_cores(divided, 1) is divided

    @pytest.mark.parametrize("asked", [None, 2])
    def test_pairs_are_the_default(self, asked):
        assert on_single_cores(self.PAIRS, asked) is self.PAIRS

    @pytest.mark.parametrize(
        "machine",
        [named("trn1.32xlarge"), on_single_cores(PAIRS, 1), DeviceInfo(None, 1, 4, 0, 8, "")],
    )
    def test_nothing_is_divided_twice_or_elsewhere(self, machine):
        assert on_single_cores(machine, 1) is machine
