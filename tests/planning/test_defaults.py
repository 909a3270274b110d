"""Values that follow from the model and the machine."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.values import make_buckets
from djl_python_neuronx.planning import defaults
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.defaults import fill, make_steps
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.machines import (
    GIB,
    INSTANCES,
    DeviceInfo,
    legal_degrees,
    named,
)
from djl_python_neuronx.planning.memory import core_memory
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.plan import graphs, library_arguments

CPU = DeviceInfo(None, 0, 0, 2**40, 6, "")
MODELS = Path(__file__).parent / "models"
NAMES = sorted(path.stem for path in MODELS.glob("*.json"))
TINY = "tinyllama-1.1b"
FILLED = (
    "dtype",
    "tensor_parallel_degree",
    "n_positions",
    "max_rolling_batch_size",
    "context_length_estimate",
)


def facts_of(name):
    return ModelFacts.from_config(json.loads((MODELS / f"{name}.json").read_text()))


def options_with(**values):
    return ServingOptions.model_validate({"model_id": "m", **values})


def filled(name, machine, loader="tnx", **values):
    """Options with every value filled in; `name`: a model's or its facts, `machine`: an instance type's or a device."""
    facts = facts_of(name) if isinstance(name, str) else name
    device = named(machine) if isinstance(machine, str) else machine
    options = options_with(**values)
    found = fill(Case(options, facts, device, NEURON_BACKENDS.get(loader)))
    assert all(why for _, why in found.values())
    return options.model_copy(update={option: value for option, (value, _) in found.items()})


def chosen(name, machine, loader="tnx", **values):
    options = filled(name, machine, loader, **values)
    return options.tensor_parallel_degree, options.n_positions, options.max_rolling_batch_size


def memory_of(options, facts, device, loader, **changes):
    """Bytes on each core, whether there are as many or not."""
    case = Case(options, facts, device, NEURON_BACKENDS.get(loader)).with_options(**changes)
    return replace(core_memory(case), possible=True)


def fits(options, name, machine, loader):
    return memory_of(options, facts_of(name), named(machine), loader).fits


def can_split(facts, degree, loader):
    case = Case(ServingOptions(), facts, named("inf2.xlarge"), NEURON_BACKENDS.get(loader))
    return case.indivisible(degree) is None


# degree, n_positions, max_rolling_batch_size; None: no choice fits, and the smallest is filled in
PLANS = {
    "llama-3-8b": {
        "inf2.xlarge": (2, 4096, 16),
        "inf2.8xlarge": (2, 4096, 16),
        "inf2.24xlarge": (8, 4096, 32),
        "inf2.48xlarge": (24, 4096, 32),
        "trn1.2xlarge": (2, 4096, 16),
        "trn1.32xlarge": (32, 4096, 32),
        "trn2.3xlarge": (4, 4096, 32),
        "trn2.48xlarge": (64, 4096, 32),
    },
    "llama-3-70b": {
        "inf2.xlarge": None,
        "inf2.24xlarge": None,
        "inf2.48xlarge": (24, 4096, 32),
        "trn1.2xlarge": None,
        "trn1.32xlarge": (32, 4096, 32),
        "trn2.3xlarge": None,
        "trn2.48xlarge": (64, 4096, 32),
    },
    "llama-2-7b": {"inf2.xlarge": (2, 4096, 8), "inf2.24xlarge": (8, 4096, 32)},
    "llama-2-13b": {"inf2.xlarge": (2, 4096, 1), "inf2.24xlarge": (8, 4096, 16)},
    "mistral-7b-v0.1": {"inf2.xlarge": (2, 4096, 16), "inf2.48xlarge": (24, 4096, 32)},
    "mixtral-8x7b": {
        "inf2.xlarge": None,
        "inf2.24xlarge": (8, 4096, 32),
        "trn1.32xlarge": (32, 4096, 32),
    },
    "gpt-neox-20b": {
        "inf2.xlarge": None,
        "inf2.24xlarge": (8, 2048, 32),
        "inf2.48xlarge": (8, 2048, 32),  # 64 heads, which 24 does not divide
        "trn1.32xlarge": (32, 2048, 32),
    },
    "bloom-176b": {"inf2.24xlarge": None, "trn1.32xlarge": (32, 2048, 8)},
    "opt-66b": {"inf2.24xlarge": None, "inf2.48xlarge": (24, 2048, 32)},
    "qwen2.5-32b": {"inf2.xlarge": None, "inf2.24xlarge": (8, 4096, 32)},
    TINY: {
        "inf2.xlarge": (2, 2048, 32),
        "inf2.48xlarge": (24, 2048, 32),
        "trn1.2xlarge": (2, 2048, 32),
        "trn2.3xlarge": (4, 2048, 32),
    },
}


class TestOnDevices:
    @pytest.mark.parametrize(
        ("name", "machine", "plan"),
        [(name, machine, plan) for name, row in PLANS.items() for machine, plan in row.items()],
    )
    def test_plans(self, name, machine, plan):
        options = filled(name, machine)
        assert fits(options, name, machine, "tnx") is (plan is not None)
        if plan is None:
            assert (options.n_positions, options.max_rolling_batch_size) == (128, 1)
        else:
            assert chosen(name, machine) == plan

    def test_each_model_on_each_machine_has_a_legal_plan_or_none_fits(self, subtests):
        for case in itertools.product(NAMES, INSTANCES, ("tnx", "nxdi")):
            with subtests.test(str(case)):
                self.check_plan(*case)

    def check_plan(self, name, machine, loader):
        device = named(machine)
        options = filled(name, machine, loader)
        degree = options.tensor_parallel_degree
        legal = legal_degrees(device.family, device.visible_cores)
        assert degree in legal
        if fits(options, name, machine, loader):
            return
        smallest = {"n_positions": 128, "max_rolling_batch_size": 1}
        sizes = (
            memory_of(
                options, facts_of(name), device, loader, **smallest, tensor_parallel_degree=degree
            )
            for degree in legal
            if can_split(facts_of(name), degree, loader)
        )
        assert all(size.needed > device.core_memory_bytes for size in sizes)

    @pytest.mark.parametrize(
        ("loader", "window", "positions", "prompts"),
        [
            ("nxdi", 4096, 4096, (128, 256, 512, 1024, 2048, 4096)),
            ("nxdi", 4096, 4097, (4096, 4097)),
            ("nxdi", 4096, 8192, (4096, 8192)),
            ("nxdi", 4097, 8192, (4096, 8192)),
            ("nxdi", 4098, 8192, (8192,)),
            ("tnx", 512, 1024, (128, 256, 512, 1024)),
        ],
    )
    def test_each_prompt_graph_fills_the_ring_of_a_sliding_window(
        self, loader, window, positions, prompts
    ):
        facts = replace(facts_of("mistral-7b-v0.1"), sliding_window=window)
        options = filled(facts, "inf2.48xlarge", loader, n_positions=positions)
        assert options.context_length_estimate == prompts

    def test_int8_makes_room(self):
        assert not fits(
            filled("llama-3-70b", "inf2.24xlarge"), "llama-3-70b", "inf2.24xlarge", "tnx"
        )
        options = filled("llama-3-70b", "inf2.24xlarge", quantize="static_int8")
        assert fits(options, "llama-3-70b", "inf2.24xlarge", "tnx")
        assert options.n_positions == 4096

    def test_a_model_of_unknown_size_is_filled_without_a_look_at_memory(self):
        facts = ModelFacts(model_type="other", max_positions=65536)
        assert chosen(facts, "inf2.xlarge") == (2, 4096, 32)
        found = fill(Case(options_with(), facts, named("inf2.xlarge"), NEURON_BACKENDS["tnx"]))
        assert "whether it fits in memory is not known" in found["max_rolling_batch_size"][1]


class TestDegree:
    @pytest.mark.parametrize(
        ("visible", "degree"), [(24, 24), (23, 8), (12, 8), (6, 4), (3, 2), (1, 1), (0, 1)]
    )
    def test_within_the_cores_of_this_process(self, visible, degree):
        device = replace(named("inf2.48xlarge"), visible_cores=visible)
        assert filled(TINY, device).tensor_parallel_degree == degree
        assert filled(TINY, device, tensor_parallel_degree="max").tensor_parallel_degree == degree

    def test_twelve_is_only_taken_when_asked_for(self):
        assert filled(TINY, "inf2.24xlarge").tensor_parallel_degree == 8
        asked = filled(TINY, "inf2.24xlarge", tensor_parallel_degree=12)
        assert asked.tensor_parallel_degree == 12

    def test_max_is_nothing_that_the_library_refuses(self):
        assert filled(
            "gpt-neox-20b", "inf2.48xlarge", "tnx", tensor_parallel_degree="max"
        ) == filled("gpt-neox-20b", "inf2.48xlarge", "tnx")
        padding = filled("gpt-neox-20b", "inf2.48xlarge", "nxdi", tensor_parallel_degree="max")
        assert padding.tensor_parallel_degree == 24

    def test_the_reason_names_the_heads_that_decide(self):
        found = fill(
            Case(
                options_with(),
                facts_of("gpt-neox-20b"),
                named("inf2.48xlarge"),
                NEURON_BACKENDS["tnx"],
            )
        )
        assert "64 heads" in found["tensor_parallel_degree"][1]

    def test_a_larger_degree_that_needs_more_memory_on_each_core_is_only_taken_as_max(self):
        """10 KV heads: on 2 cores each holds 5, on 4 the library copies them for each of the 40 query heads: 10."""
        facts = replace(
            facts_of("llama-3-8b"),
            num_heads=40,
            num_kv_heads=10,
            cache_values_per_token=2 * 32 * 10 * 128,
        )
        device = replace(named("inf2.48xlarge"), visible_cores=4)
        # With nothing but the cache to hold, its copies decide.
        facts = replace(facts, num_parameters=facts.embedding_parameters * 2 + 10**6)
        assert filled(facts, device).tensor_parallel_degree == 2
        assert filled(facts, device, tensor_parallel_degree="max").tensor_parallel_degree == 4

    def copied(self, billions):
        """10 KV heads: 2 cores hold 5 each; on 4 the library copies them for each of the 40 query heads, 10 each."""
        return replace(
            facts_of("llama-3-8b"),
            num_heads=40,
            num_kv_heads=10,
            cache_values_per_token=2 * 32 * 10 * 128,
            num_parameters=billions * 10**9,
        )

    def test_one_that_cannot_hold_the_model_is_not_taken_for_its_short_step(self):
        device = replace(named("inf2.48xlarge"), visible_cores=4)
        # With 32 slots 2 cores would read less each, but they do not even hold the weights.
        options = filled(self.copied(19), device)
        assert options.tensor_parallel_degree == 4
        assert memory_of(options, self.copied(19), device, "tnx").roomy

    def test_slots_that_are_set_decide(self):
        device = replace(named("inf2.48xlarge"), visible_cores=4)
        few, many = (
            filled(self.copied(8), device, max_rolling_batch_size=slots, n_positions=4096)
            for slots in (1, 32)
        )
        assert (few.tensor_parallel_degree, many.tensor_parallel_degree) == (4, 2)

    def test_no_other_that_holds_the_model_reads_less_in_a_step(self, subtests):
        for case in itertools.product(NAMES, (1, 2, 8, 13, 24), ("tnx", "nxdi"), (None, 1, 32)):
            with subtests.test(str(case)):
                self.check_reads(*case)

    def check_reads(self, name, visible, loader, slots):
        device = replace(named("inf2.48xlarge"), visible_cores=visible)
        facts, given = facts_of(name), {} if slots is None else {"max_rolling_batch_size": slots}
        options = filled(facts, device, loader, **given)
        wanted = min(facts.max_positions or 4096, 4096)

        def on(degree, positions, rows):
            shape = {"n_positions": positions, "max_rolling_batch_size": rows}
            return memory_of(options, facts, device, loader, **shape, tensor_parallel_degree=degree)

        chosen = options.tensor_parallel_degree
        able = [
            degree
            for degree in legal_degrees("inf2", visible)
            if can_split(facts, degree, loader) and on(degree, 128, slots or 1).roomy
        ]
        steps = {degree: on(degree, wanted, slots or 32) for degree in {*able, chosen}}
        reads = {n: m.weights + m.kv_cache + m.padding for n, m in steps.items()}
        assert chosen in able or not able
        assert all(reads[chosen] <= reads[degree] for degree in able)

    def test_pipeline_stages_have_cores_of_their_own(self):
        unknown = replace(facts_of("llama-3-8b"), model_type="new")
        options = filled(unknown, "trn1.32xlarge", "nxdi", pipeline_parallel_degree=2)
        assert options.tensor_parallel_degree == 16


class TestDegreeOfCopies:
    """With several models or copies: the degree with the most slots per core."""

    @pytest.mark.parametrize(
        ("name", "machine", "values", "degree"),
        [
            ("llama-3-8b", "inf2.48xlarge", {}, 2),  # 16 slots on 2 cores, 32 on 4
            ("llama-3-8b", "inf2.48xlarge", {"max_rolling_batch_size": 32}, 4),
            ("llama-3-8b", "inf2.48xlarge", {"max_rolling_batch_size": 16}, 2),
            ("llama-3-8b", "inf2.48xlarge", {"n_positions": 128}, 2),
            ("llama-3-8b", "trn2.48xlarge", {}, 2),  # 8 slots on one core, 32 on 2
            ("llama-3-8b", "trn2.48xlarge", {"max_rolling_batch_size": 8}, 1),
            ("tinyllama-1.1b", "inf2.48xlarge", {}, 1),
            ("llama-3-70b", "inf2.48xlarge", {}, 24),
            ("llama-3-70b", "trn1.32xlarge", {}, 16),
            ("llama-3-70b", "inf2.xlarge", {}, 2),  # nothing holds it: the largest, and an error
        ],
    )
    def test_holds_the_wanted_lengths_and_slots(self, name, machine, values, degree):
        for replicas in (2, "max"):
            options = filled(name, machine, "nxdi", replicas=replicas, **values)
            assert options.tensor_parallel_degree == degree

    def test_no_other_degree_gives_the_machine_more_slots(self, subtests):
        for case in itertools.product(NAMES, INSTANCES):
            with subtests.test(str(case)):
                self.check_slots(*case)

    def check_slots(self, name, machine):
        facts, device = facts_of(name), named(machine)

        def slots(degree):
            options = filled(name, machine, "tnx", replicas="max", **degree)
            case = Case(options, facts, device, NEURON_BACKENDS["tnx"])
            held = core_memory(case).roomy and options.max_model_len == wanted
            return options.max_rolling_batch_size * held / options.tensor_parallel_degree

        wanted = min(facts.max_positions or 4096, 4096)
        degrees = legal_degrees(device.family, device.visible_cores)
        takes = [degree for degree in degrees if can_split(facts, degree, "tnx")]
        each = [slots({"tensor_parallel_degree": degree}) for degree in takes]
        if any(each):
            assert slots({}) == max(each)

    def test_one_of_several_models(self):
        case = Case(
            options_with(),
            facts_of("llama-3-8b"),
            named("inf2.48xlarge"),
            NEURON_BACKENDS["tnx"],
            among_others=True,
        )
        degree, why = fill(case)["tensor_parallel_degree"]
        assert (degree, why) == (
            2,
            "the most slots per core for several models or copies: 16 of 4096 tokens on 2",
        )
        assert fill(replace(case, among_others=False))["tensor_parallel_degree"][0] == 24


class TestPositions:
    @pytest.mark.parametrize(
        ("limit", "positions"), [(1024, 1024), (4096, 4096), (131072, 4096), (None, 4096), (64, 64)]
    )
    def test_the_models_limit_but_not_too_many(self, limit, positions):
        facts = replace(facts_of(TINY), max_positions=limit)
        assert filled(facts, "inf2.xlarge").n_positions == positions

    @pytest.mark.parametrize(
        ("buckets", "positions"),
        [("64,512", 4096), ("4096", 4096), ("8192", 8192), ("99999", 16384)],
    )
    def test_prompts_that_were_asked_for_fit(self, buckets, positions):
        facts = replace(facts_of(TINY), max_positions=16384)
        options = filled(facts, "inf2.48xlarge", context_length_estimate=buckets)
        assert options.n_positions == positions

    def test_the_slots_that_were_asked_for_decide(self):
        options = filled("llama-3-8b", "inf2.xlarge", max_rolling_batch_size=64)
        assert options.n_positions == 1024
        assert fits(options, "llama-3-8b", "inf2.xlarge", "tnx")
        assert chosen("llama-3-8b", "inf2.xlarge", max_rolling_batch_size=1) == (2, 4096, 1)

    def test_never_less_than_the_longest_prompt_asked_for(self):
        options = filled(
            "llama-3-8b", "inf2.xlarge", max_rolling_batch_size=64, context_length_estimate="3000"
        )
        assert options.n_positions == 3000

    @pytest.mark.parametrize("given", [1000, "256,1000"])
    def test_what_was_set_stays(self, given):
        options = filled("llama-3-70b", "inf2.xlarge", n_positions=given)
        assert options.max_model_len == 1000
        assert options.context_length_estimate == (128, 256, 512, 1000)


class TestSlots:
    @pytest.mark.parametrize("slots", [1, 7, 64, 999])
    def test_what_was_set_stays(self, slots):
        options = filled(
            "llama-3-8b", "inf2.xlarge", n_positions=4096, max_rolling_batch_size=slots
        )
        assert options.max_rolling_batch_size == slots

    def test_shorter_slots_are_more(self):
        by_length = [
            filled("llama-3-8b", "inf2.xlarge", n_positions=length).max_rolling_batch_size
            for length in (2048, 4096, 8192)
        ]
        assert by_length == [32, 16, 8]

    def test_a_quantised_cache_has_room_for_more(self):
        options = filled("llama-3-8b", "inf2.xlarge", kv_cache_quantize="int8")
        assert options.max_rolling_batch_size == 32

    def test_speculation_takes_no_slot_away(self):
        draft = {"speculative_draft_model": "d"}
        assert chosen("llama-3-8b", "inf2.48xlarge", "tnx", **draft) == (24, 4096, 32)
        assert chosen("llama-3-8b", "inf2.48xlarge", "nxdi", **draft) == (24, 4096, 32)

    @pytest.mark.parametrize("machine", ["inf2.xlarge", "inf2.24xlarge", "trn1.2xlarge"])
    @pytest.mark.parametrize("name", ["llama-2-7b", "llama-2-13b", "llama-3-8b", "opt-13b"])
    def test_one_doubling_more_would_not_leave_a_twentieth(self, name, machine):
        options = filled(name, machine)
        slots = options.max_rolling_batch_size
        if slots == defaults.MAX_ROLLING_BATCH_SIZE:
            return
        device, more = named(machine), {"max_rolling_batch_size": 2 * slots}
        found = memory_of(options, facts_of(name), device, "tnx", **more)
        assert found.needed > device.core_memory_bytes * 0.95


class TestBuckets:
    def test_powers_of_two_up_to_the_longest(self):
        options = filled("llama-3-8b", "inf2.xlarge")
        assert options.context_length_estimate == (128, 256, 512, 1024, 2048, 4096)

    def test_what_was_set_stays(self):
        options = filled("llama-3-8b", "inf2.xlarge", context_length_estimate="16,32")
        assert options.context_length_estimate == (16, 32)

    def test_a_layout_that_takes_one_length_gets_one(self):
        options = filled("llama-3-8b", "inf2.xlarge", cache_layout="BSH")
        assert options.context_length_estimate == (4096,)

    def test_architectures_that_take_none_get_none(self):
        found = fill(
            Case(
                options_with(),
                facts_of("gpt-neox-20b"),
                named("inf2.48xlarge"),
                NEURON_BACKENDS["tnx"],
            )
        )
        assert "context_length_estimate" not in found

    @given(longest=st.integers(1, 2**20))
    def test_at_most_half_of_a_row_is_padding(self, longest):
        buckets = make_buckets(longest)
        assert buckets[-1] == longest
        assert all(b <= 2 * a for a, b in itertools.pairwise(buckets))


class TestChunks:
    """Defaults that follow from `enable_chunked_prefill`."""

    NAMES = ("cache_layout", "pa_block_size", "context_length_estimate")

    def chosen(self, name="llama-3-8b", loader="tnx", **values):
        machine = CPU if loader == "cpu" else "inf2.48xlarge"
        options = filled(name, machine, loader, enable_chunked_prefill=True, **values)
        return tuple(getattr(options, name) for name in self.NAMES)

    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            ({}, ("BSH", 512, (32, 128))),
            ({"max_rolling_batch_size": 8}, ("BSH", 128, (8, 128))),
            ({"max_rolling_batch_size": 9}, ("BSH", 256, (16, 128))),
            ({"n_positions": 128}, ("BSH", 64, (32, 128))),
            ({"n_positions": 100, "max_rolling_batch_size": 9}, ("BSH", 64, (16, 100))),
            ({"max_rolling_batch_size": 1}, ("BSH", 128, (2, 128))),
            ({"max_rolling_batch_size": 64, "n_positions": 512}, ("BSH", 128, (64, 128))),
            (
                {"pa_block_size": 32, "context_length_estimate": (64,), "cache_layout": "BSH"},
                ("BSH", 32, (64,)),
            ),
        ],
    )
    def test_all_that_the_library_needs(self, values, expected):
        assert self.chosen(**values) == expected

    def test_a_cpu_has_no_blocks(self):
        assert self.chosen(TINY, "cpu", max_rolling_batch_size=8) == (None, None, (8, 128))

    def test_neither_has_what_cannot_use_them(self):
        assert self.chosen("mistral-7b-v0.1")[:2] == (None, None)

    @given(slots=st.integers(1, 4096), longest=st.integers(1, 2**16))
    def test_a_step_has_room_for_all_slots_and_a_chunk(self, slots, longest):
        steps = make_steps(slots, longest)
        assert steps[-1] <= longest
        assert len(steps) <= 2
        if longest > max(slots, 1):
            assert steps[0] >= max(slots, 2)
            assert steps[-1] > slots


class TestDtype:
    @pytest.mark.parametrize(
        ("stored", "on_cpu", "on_device"),
        [
            ("float16", "float32", "float16"),
            ("bfloat16", "bfloat16", "bfloat16"),
            ("float32", "float32", "bfloat16"),
            (None, "float32", "bfloat16"),
        ],
    )
    def test_auto(self, stored, on_cpu, on_device):
        facts = replace(facts_of(TINY), dtype=stored)
        assert filled(facts, CPU, "cpu").dtype == on_cpu
        for loader in ("tnx", "nxdi"):
            assert filled(facts, "inf2.xlarge", loader).dtype == on_device

    @pytest.mark.parametrize("loader", ["tnx", "nxdi"])
    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_what_was_set_stays(self, dtype, loader):
        assert filled(TINY, "inf2.xlarge", loader, dtype=dtype).dtype == dtype

    def test_a_cpu_computes_float16_in_float32_and_says_so(self):
        found = fill(Case(options_with(dtype="fp16"), facts_of(TINY), CPU, None))
        assert found["dtype"][0] == "float32"
        assert "float16" in found["dtype"][1]
        assert "dtype" not in fill(Case(options_with(dtype="bf16"), facts_of(TINY), CPU, None))


class TestOnCpu:
    def test_a_large_host(self):
        options = filled(TINY, CPU, "cpu")
        assert chosen(TINY, CPU, "cpu") == (1, 2048, 32)
        assert options.context_length_estimate == (128, 256, 512, 1024, 2048)
        assert options.cpu_threads is None  # the backend counts the physical cores

    def test_at_most_2048_unasked(self):
        assert filled("llama-3-8b", CPU, "cpu").n_positions == 2048
        asked = filled("llama-3-8b", CPU, "cpu", context_length_estimate="8192")
        assert asked.n_positions == 8192

    def test_degrees_count_neuron_cores_and_stay(self):
        assert filled(TINY, CPU, "cpu", tensor_parallel_degree=8).tensor_parallel_degree == 8
        assert filled(TINY, CPU, "cpu", tensor_parallel_degree="max").tensor_parallel_degree == 1

    @given(gib=st.floats(0.1, 64), dtype=st.sampled_from(("float32", "bfloat16")))
    def test_the_cache_fits_beside_the_weights(self, gib, dtype):
        facts = facts_of(TINY)
        host = replace(CPU, memory_bytes=int(gib * GIB))
        options = filled(facts, host, "cpu", dtype=dtype)
        width = 4 if dtype == "float32" else 2
        slots, positions = options.max_rolling_batch_size, options.n_positions
        cache = slots * positions * facts.cache_values_per_token * width
        room = min(gib * GIB / 2, gib * GIB - facts.num_parameters * width - GIB)
        assert cache <= room or (slots, positions) == (1, 128)
        if slots < 32:
            assert 2 * cache > room

    def test_a_model_of_unknown_size_gets_half_of_the_memory(self):
        facts = ModelFacts(max_positions=2048, cache_values_per_token=2**15, dtype="float32")
        for gib, slots in ((4, 8), (2, 4)):  # 256 MiB a slot
            host = replace(CPU, memory_bytes=gib * GIB)
            assert chosen(facts, host, "cpu") == (1, 2048, slots)
        shared = replace(CPU, memory_bytes=4 * GIB)
        assert chosen(facts, shared, "cpu", replicas=2) == (1, 2048, 4)

    def test_memory_of_neuron_devices_is_not_the_hosts(self):
        tight = replace(named("inf2.xlarge"), memory_bytes=1)
        assert chosen(TINY, tight, "cpu") == (1, 2048, 32)

    def test_nothing_known_is_nothing_judged(self):
        assert chosen(ModelFacts(), replace(CPU, memory_bytes=0), "cpu") == (1, 2048, 32)


@given(
    name=st.sampled_from(NAMES),
    loader=st.sampled_from(("cpu", "tnx", "nxdi")),
    machine=st.sampled_from(sorted(INSTANCES)),
    values=st.fixed_dictionaries(
        {},
        optional={
            "n_positions": st.integers(2, 2**17) | st.lists(st.integers(2, 8192), min_size=1),
            "max_rolling_batch_size": st.integers(1, 999),
            "tensor_parallel_degree": st.integers(1, 100) | st.just("max"),
            "context_length_estimate": st.lists(st.integers(1, 2**17), min_size=1),
            "dtype": st.sampled_from(("auto", "fp32", "fp16", "bf16")),
            "quantize": st.sampled_from(("static_int8", "static_fp8")),
            "kv_cache_quantize": st.sampled_from(("int8", "fp8")),
            "speculative_draft_model": st.just("d"),
        },
    ),
)
def test_every_value_is_sensible_whatever_was_set(name, loader, machine, values):
    options = options_with(**values)
    done = filled(name, machine, loader, **values)
    assert done.dtype != "auto"
    assert type(done.tensor_parallel_degree) is int
    assert 1 <= done.max_rolling_batch_size <= 999
    limit = facts_of(name).max_positions or math.inf  # bloom's ALiBi has none
    if options.n_positions is None:
        assert 1 <= done.max_model_len <= limit
    buckets = done.context_length_estimate
    if options.context_length_estimate is None and buckets is not None:
        assert buckets[-1] == done.max_model_len
    for field in FILLED:
        if (set_to := getattr(options, field)) not in {None, "auto", "max"} and field != "dtype":
            assert getattr(done, field) == set_to


def test_filling_what_is_filled_changes_nothing():
    for name in NAMES:
        options = filled(name, "inf2.48xlarge", "nxdi")
        assert (
            fill(Case(options, facts_of(name), named("inf2.48xlarge"), NEURON_BACKENDS["nxdi"]))
            == {}
        )


class TestWhatTheReasonsSay:
    """A reason never claims what is not so."""

    TOO_LARGE = replace(facts_of("llama-3-8b"), num_parameters=10**13)

    def reasons(self, facts, machine, loader="tnx", **values):
        draft = values.pop("draft", None)
        found = fill(
            Case(
                options_with(**values),
                facts,
                named(machine),
                NEURON_BACKENDS.get(loader),
                draft=draft,
            )
        )
        return {name: (value, why) for name, (value, why) in found.items()}

    def test_where_nothing_fits(self):
        found = self.reasons(self.TOO_LARGE, "inf2.xlarge")
        assert found["n_positions"][0] == 128
        assert found["max_rolling_batch_size"][0] == 1
        assert "does not fit in memory" in found["n_positions"][1]
        assert "does not fit in memory" in found["max_rolling_batch_size"][1]
        for name in ("n_positions", "max_rolling_batch_size"):
            assert "fitted" not in found[name][1]
            assert "largest power" not in found[name][1]

    def test_what_fits_without_a_spare(self):
        """On one core of 16 GiB NxD Inference needs 15.97 for Llama 3.1 8B with one slot of 128 tokens."""
        degree = {"tensor_parallel_degree": 1}
        found = self.reasons(facts_of("llama-3.1-8b"), "inf2.xlarge", "nxdi", **degree)
        for name, value in (("n_positions", 128), ("max_rolling_batch_size", 1)):
            assert found[name][0] == value
            assert "leaves less than 1/20 of the memory free" in found[name][1]

    def test_cores_that_are_left_over(self):
        small = facts_of("llama-2-7b")
        degree, why = self.reasons(small, "inf2.24xlarge", tensor_parallel_degree="max")[
            "tensor_parallel_degree"
        ]
        assert degree == 8
        assert "4 of 12 cores are left over; guides use a larger degree: 12" in why
        everything = self.reasons(small, "inf2.xlarge", tensor_parallel_degree="max")
        assert "left over" not in everything["tensor_parallel_degree"][1]

    def test_what_the_library_cannot_divide(self):
        for name, loader, what in (
            ("mixtral-8x7b", "nxdi", "24 is not a divisor of the hidden size of 4096"),
            ("mixtral-8x7b", "tnx", "24 is not a divisor of the width of all 8 experts"),
            ("gpt-neox-20b", "tnx", "24 is not a divisor of the 64 heads"),
        ):
            found = self.reasons(
                facts_of(name), "inf2.48xlarge", loader, tensor_parallel_degree="max"
            )
            degree, why = found["tensor_parallel_degree"]
            assert degree == 8
            assert what in why
            assert "12 is accepted" not in why or facts_of(name).num_heads % 12 == 0

    def test_the_draft_models_limit_counts_too(self):
        facts, draft = facts_of("llama-3-8b"), facts_of("tinyllama-1.1b")
        assert draft.max_positions == 2048
        values = {"speculative_draft_model": "d"}
        found = self.reasons(facts, "inf2.48xlarge", draft=draft, **values)
        assert found["n_positions"] == (2048, "the limit of the draft model (d)")
        long = self.reasons(facts, "inf2.48xlarge", draft=facts_of("llama-2-7b"), **values)
        assert long["n_positions"] == (
            4096,
            "the limit of the draft model (d), but by default at most 4096",
        )
        same = self.reasons(facts, "inf2.48xlarge", draft=facts, **values)
        assert "draft" not in same["n_positions"][1]
        assert self.reasons(facts, "inf2.48xlarge", **values)["n_positions"][0] == 4096

    @pytest.mark.parametrize(
        ("values", "slots"),
        [
            ({"batch_size": 4, "rolling_batch": "disable"}, 4),
            ({"batch_size": 4, "rolling_batch": "disable", "async_mode": True}, 32),
            ({"batch_size": 1, "rolling_batch": "disable"}, 32),
        ],
    )
    def test_slots_for_the_batch_that_djl_collects(self, values, slots):
        found = self.reasons(facts_of("gpt2"), "inf2.xlarge", **values)
        value, why = found["max_rolling_batch_size"]
        assert value == slots
        assert ("batch_size" in why) == (slots == 4)

    def test_single_cores_are_filled_as_such(self):
        facts = facts_of("llama-3-8b")
        alone = self.reasons(facts, "trn2.3xlarge", "nxdi", logical_nc_config=1)
        pairs = self.reasons(facts, "trn2.3xlarge", "nxdi")
        assert alone["tensor_parallel_degree"][0] == 8
        assert pairs["tensor_parallel_degree"][0] == 4

    @pytest.mark.parametrize(
        ("tokens", "sampled", "top_ks"),
        [
            (256, True, None),
            (97, True, (50, 97)),
            (32, True, (32, 32)),
            (32, {"do_sample": True, "top_k": 64}, (32, None)),
            (97, {"do_sample": True, "top_k": 64}, None),
        ],
    )
    def test_a_device_chooses_among_no_more_than_the_vocabulary(self, tokens, sampled, top_ks):
        facts = replace(facts_of(TINY), vocab_size=tokens)
        found = self.reasons(facts, "inf2.xlarge", on_device_generation=sampled)
        if top_ks is None:
            assert "on_device_generation" not in found
            return
        value, why = found["on_device_generation"]
        assert (value.top_k, value.global_top_k) == top_ks
        assert f"{tokens} tokens" in why


PLAIN = {"rolling_batch": "disable", "async_mode": False, "batch_size": 4}


class TestStaticBatches:
    """NxD Inference prefills in one call what DJL Serving hands over in one call."""

    @pytest.mark.parametrize(
        ("loader", "changes", "strategy"),
        [
            ("nxdi", {}, "naive_rolling_batch"),
            ("nxdi", {"rolling_batch_strategy": "continuous_batching"}, "continuous_batching"),
            ("nxdi", {"batch_size": 1}, None),
            ("nxdi", {"async_mode": True}, None),
            ("nxdi", {"rolling_batch": "tnx", "batch_size": 1}, None),
            ("tnx", {}, None),
        ],
    )
    def test_are_the_default_for_whole_batches(self, loader, changes, strategy):
        options = filled("llama-3-8b", "inf2.48xlarge", loader, **{**PLAIN, **changes})
        assert options.rolling_batch_strategy == strategy

    def test_compile_a_prefill_of_the_whole_length_for_those_that_run(self):
        options = filled(
            "llama-3-8b",
            "inf2.48xlarge",
            "nxdi",
            **PLAIN,
            n_positions=512,
            context_length_estimate="128",
        )
        case = Case(
            options, facts_of("llama-3-8b"), named("inf2.48xlarge"), NEURON_BACKENDS["nxdi"]
        )
        assert library_arguments(case).neuron_config["context_encoding_buckets"] == [128, 512]
        assert [
            (graph.bucket, graph.batch) for graph in graphs(case) if graph.kind == "prefill"
        ] == [(128, 4), (512, 4)]
        alone = case.with_options(max_rolling_batch_size=1)
        assert library_arguments(alone).neuron_config["context_encoding_buckets"] == [128]
