"""Memory per core against arithmetic by hand, and against what guides publish."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.machines import GIB, INSTANCES, DeviceInfo, named
from djl_python_neuronx.planning.memory import (
    HEADROOM_BYTES,
    CompileMemory,
    CoreMemory,
    Fit,
    compile_memory,
    core_memory,
    host_bytes,
    savings,
    smallest_fit,
)
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.tnx.heads import keeps_strategy

GB = 1e9
MODELS = Path(__file__).parent / "models"
NAMES = sorted(path.stem for path in MODELS.glob("*.json"))


def facts_of(name):
    return ModelFacts.from_config(json.loads((MODELS / f"{name}.json").read_text()))


def case_of(facts, backend, length, slots, degree=1, *, machine=None, draft=None, **options):
    """Options as they are filled in; without a machine of one whose cores and memory are not known."""
    shape = {"n_positions": length, "max_rolling_batch_size": slots, "dtype": "bfloat16"}
    values = {**shape, "tensor_parallel_degree": degree, **options}
    return Case(
        ServingOptions().model_copy(update=values),
        facts,
        named(machine) if machine else DeviceInfo(None, 1, 0, 0, 8, ""),
        NEURON_BACKENDS.get(backend),
        draft,
    )


def needed(*shape, **options):
    return core_memory(case_of(*shape, **options))


def total(facts, length, slots, **options):
    """Bytes of all weights and of the cache on however many cores: what guides give as a model's size."""
    whole = needed(facts, "cpu", length, slots, **options)
    return whole.weights + whole.kv_cache


def on_cores(degree):
    """Options of a draft model on so many cores."""
    return {"speculative_draft_model": "draft", "draft_model_tp_size": degree}


def can_split(facts, degree, loader):
    return case_of(facts, loader, 1, 1).indivisible(degree) is None


class TestGuides:
    """Totals over all cores in GB (10**9 bytes), 16-bit weights and cache, one sequence."""

    @pytest.mark.parametrize(
        ("name", "tokens", "gigabytes"),
        [
            ("opt-13b", 4096, 29.1),
            ("opt-13b", 2048, 27.4),
            ("opt-30b", 4096, 65.6),
            ("opt-30b", 2048, 62.8),
            ("llama-3.1-8b", 0, 16.1),
        ],
    )
    def test_totals(self, name, tokens, gigabytes):
        found = total(facts_of(name), tokens, 1)
        assert found / GB == pytest.approx(gigabytes, abs=0.05)

    def test_the_70b_example_is_weights_and_a_twentieth(self):
        """148 GB are the 141 GB of weights and a twentieth on top: our reading of a number given without its parts."""
        weights = total(facts_of("llama-3-70b"), 0, 1)
        assert weights / GB == pytest.approx(148 / 1.05, abs=0.2)

    @pytest.mark.parametrize(
        ("name", "tokens", "instance", "degree"),
        [
            ("opt-13b", 4096, "trn1.2xlarge", 2),
            ("opt-30b", 4096, "inf2.24xlarge", 8),
            ("opt-30b", 4096, "trn1.32xlarge", 8),
            ("llama-3.1-8b", 4096, "inf2.xlarge", 2),
            ("llama-3-70b", 4096, "trn1.32xlarge", 16),
        ],
    )
    def test_the_fewest_cores(self, name, tokens, instance, degree):
        for loader in ("tnx", "nxdi"):
            case = case_of(facts_of(name), loader, tokens, 1, machine=instance)
            assert smallest_fit(case) == Fit(degree, None)

    def test_llama_3_8b_at_batch_32_is_decided_by_the_unit(self):
        """33.2 GB are less than the 34.4 GB (32 GiB) of two cores, but not with room to compute."""
        facts = facts_of("llama-3-8b")
        assert total(facts, 4096, 32) / GB == pytest.approx(33.24, abs=0.01)
        assert total(facts, 4096, 32) < 32 * GIB
        assert not needed(facts, "nxdi", 4096, 32, 2, machine="inf2.xlarge").fits
        assert needed(facts, "nxdi", 4096, 16, 2, machine="inf2.xlarge").fits


class TestParts:
    LLAMA = facts_of("llama-3-8b")
    TABLE = 128256 * 4096

    def parts(self, facts, degree, loader, *, slots=1, length=1024, **more):
        return needed(facts, loader, length, slots, degree, **more)

    def test_by_hand(self):
        found = self.parts(self.LLAMA, 8, "nxdi", slots=4)
        assert found.weights == 8_030_261_248 * 2 // 8
        assert found.kv_cache == 2 * 32 * 8 * 128 * 1024 * 4 * 2 // 8
        assert (found.padding, found.headroom, found.capacity) == (0, HEADROOM_BYTES, 0)
        assert found.needed == found.weights + found.kv_cache + HEADROOM_BYTES

    def test_transformers_neuronx_leaves_the_embedding_on_the_host_unless_told(self):
        on_host = self.parts(self.LLAMA, 8, "tnx")
        on_device = self.parts(self.LLAMA, 8, "tnx", on_device_embedding=True)
        assert on_device.weights - on_host.weights == self.TABLE * 2 // 8
        assert on_device == self.parts(self.LLAMA, 8, "nxdi")

    def test_a_tied_table_is_on_a_device_twice_but_on_a_cpu_once(self):
        facts = facts_of("opt-13b")
        table = facts.vocab_size * facts.hidden_size
        assert self.parts(facts, 1, "cpu").weights == facts.num_parameters * 2
        assert self.parts(facts, 1, "nxdi").weights == (facts.num_parameters + table) * 2
        positions = facts.embedding_parameters - table
        assert self.parts(facts, 1, "tnx").weights == (facts.num_parameters - positions) * 2

    @pytest.mark.parametrize("stored", ["static_int8", "static_fp8"])
    def test_quantised_weights_leave_embedding_and_head_alone(self, stored):
        found = self.parts(self.LLAMA, 1, "nxdi", quantize=stored)
        assert found.weights == (8_030_261_248 - 2 * self.TABLE) + 2 * self.TABLE * 2

    def test_a_quantised_cache_is_half(self):
        plain = self.parts(self.LLAMA, 1, "nxdi")
        assert (
            2 * self.parts(self.LLAMA, 1, "nxdi", kv_cache_quantize="fp8").kv_cache
            == plain.kv_cache
        )

    def test_float32_is_twice(self):
        plain, wide = (self.parts(self.LLAMA, 1, "nxdi", dtype=t) for t in ("float16", "float32"))
        assert (wide.weights, wide.kv_cache) == (2 * plain.weights, 2 * plain.kv_cache)

    def test_copied_kv_heads_are_padding(self):
        """8 KV heads on 32 cores: each core holds one, four times as many as there are."""
        found = self.parts(self.LLAMA, 32, "tnx")
        one_head = 2 * 32 * 128 * 1024 * 2
        weights = 2 * 32 * 4096 * 128 * 2  # of the keys and values of one head
        assert found.kv_cache * 4 == one_head
        assert found.padding == (32 - 8) * (one_head + weights) // 32

    def test_padded_heads_and_vocabulary(self):
        """GPT-2's 12 heads on 8 cores become 16, its 50257 tokens 50264."""
        facts = facts_of("gpt2")
        found = self.parts(facts, 8, "tnx")
        heads = 4 * (2 + 2) * 12 * 768 * 64 * 2
        cache = 4 * 2 * 12 * 64 * 1024 * 2
        assert found.padding == -(-(heads + cache + 7 * 768 * 2) // 8)

    def test_a_cache_split_otherwise_is_not_copied(self):
        copied = self.parts(self.LLAMA, 32, "tnx", slots=32)
        for split in ({"shard_over_sequence": True}, {"group_query_attention": "shard-over-batch"}):
            found = self.parts(self.LLAMA, 32, "tnx", slots=32, **split)
            assert found.padding < copied.padding

    def test_a_draft_model_comes_on_top(self):
        draft = facts_of("tinyllama-1.1b")
        alone = self.parts(self.LLAMA, 8, "nxdi")
        found = self.parts(self.LLAMA, 8, "nxdi", draft=draft)
        own = self.parts(draft, 8, "nxdi")
        assert found.weights == alone.weights + own.weights
        assert found.kv_cache == alone.kv_cache + own.kv_cache
        assert found.padding == own.padding
        on_two = self.parts(self.LLAMA, 8, "nxdi", draft=draft, **on_cores(2))
        assert on_two.weights == alone.weights + self.parts(draft, 2, "nxdi").weights
        unknown = self.parts(self.LLAMA, 8, "nxdi", draft=ModelFacts(model_type="other"))
        assert unknown == alone

    def test_an_unknown_architecture_is_not_guessed(self):
        assert self.parts(ModelFacts(model_type="other"), 1, "nxdi") is None

    @pytest.mark.parametrize(
        "missing", [{"n_positions": None}, {"max_rolling_batch_size": None}, {"dtype": "auto"}]
    )
    def test_nor_are_options_that_are_not_filled_in(self, missing):
        assert self.parts(self.LLAMA, 1, "nxdi", **missing) is None

    def test_only_what_the_backend_has_decides(self):
        """A CPU has one type and no layout, and a draft model has cores of its own only where there is one."""
        layout = {"quantize": "static_int8", "kv_cache_quantize": "fp8", "is_block_kv_layout": True}
        assert self.parts(self.LLAMA, 1, "cpu", **layout) == self.parts(self.LLAMA, 1, "cpu")
        unused = {"draft": facts_of("tinyllama-1.1b"), **on_cores(2), "speculative_length": 0}
        assert case_of(self.LLAMA, "tnx", 1024, 1, 8, **on_cores(2)).draft_degree == 2
        assert case_of(self.LLAMA, "tnx", 1024, 1, 8, **unused).draft_degree is None


def test_what_fits():
    full = CoreMemory(weights=1, kv_cache=2, padding=3, headroom=4, capacity=10)
    assert full.needed == 10
    assert full.fits
    assert not replace(full, capacity=9).fits
    assert replace(full, capacity=0).fits  # not known


def test_what_is_advised_leaves_a_twentieth():
    full = CoreMemory(weights=90, kv_cache=5, padding=0, headroom=0, capacity=100)
    assert full.roomy
    assert not replace(full, padding=1).roomy
    assert replace(full, padding=1).fits
    assert replace(full, capacity=0).roomy  # not known


# AWS Neuron documentation, Inference performance (SDK 2.18): the median time of a token in ms, inf2.48xlarge with 24
# cores and trn1.32xlarge with 32; both have the same cores.
MEASURED = (
    # model, weights, slots, tokens, 24 cores, 32 cores
    ("llama-3-8b", "int8", 1, 4096, 6.42, 5.86),
    ("llama-3-8b", "int8", 1, 8192, 7.41, 7.03),
    ("llama-3-8b", "int8", 8, 4096, 10.45, 7.65),
    ("llama-3-8b", "int8", 8, 8192, 15.22, 9.95),
    ("llama-2-7b", None, 1, 8192, 7.34, 6.70),
    ("llama-2-7b", None, 8, 8192, 16.39, 10.10),
    ("llama-2-13b", None, 1, 8192, 10.17, 9.84),
    ("llama-2-13b", None, 1, 16384, 13.50, 13.41),
    ("llama-2-13b", None, 4, 16384, 21.71, 21.09),
    ("llama-2-13b", None, 8, 8192, 20.99, 19.86),
    ("llama-3-70b", None, 1, 256, 32.20, 26.48),
    ("llama-3-70b", None, 1, 4096, 34.67, 26.20),
    ("mistral-7b-instruct-v0.2", None, 1, 16384, 10.33, 9.89),
    ("mistral-7b-instruct-v0.2", None, 8, 16384, 18.01, 15.44),
)


class TestStep:
    """Bytes that a decode step reads on each core, padding included: the measure of the default degree."""

    @staticmethod
    def least_ms(name, weights, slots, tokens, degree):
        machine = "inf2.48xlarge" if degree == 24 else "trn1.32xlarge"
        stored = {"quantize": weights and f"static_{weights}", "machine": machine}
        memory = needed(facts_of(name), "tnx", tokens, slots, degree, **stored)
        assert memory.fits
        return 1000 * memory.read / named(machine).core_bytes_per_s

    @pytest.mark.parametrize("row", MEASURED)
    def test_degrees_are_in_the_order_that_aws_measured(self, row):
        *load, fewer, more = row
        with_fewer, with_more = (self.least_ms(*load, degree) for degree in (24, 32))
        assert (with_more < with_fewer) is (more < fewer)
        # A lower bound: layers and collectives take time of their own.
        assert with_fewer < fewer
        assert with_more < more

    def test_models_are_in_the_order_that_aws_measured(self):
        alone = [row for row in MEASURED if row[0].startswith("llama-") and row[1:3] == (None, 1)]
        least = {self.least_ms(*row[:4], 24): row[4] for row in alone}
        assert len(least) == 5
        assert [least[ms] for ms in sorted(least)] == sorted(least.values())


def padded_heads(heads, kv_heads, degree, loader, strategy=None):
    """The heads of a model with as many slots as cores."""
    facts = ModelFacts(num_heads=heads, num_kv_heads=kv_heads, head_dim=128)
    return NEURON_BACKENDS[loader].padded_heads(facts, degree, strategy, degree)


class TestHeads:
    """Query and KV heads after padding. Source: tests and comments of both libraries, and the rig's runs."""

    @pytest.mark.parametrize(
        ("heads", "kv_heads", "degree", "tnx", "nxdi"),
        [
            (32, 32, 8, (32, 32), (32, 32)),
            (32, 8, 8, (32, 8), (32, 8)),
            (32, 8, 2, (32, 8), (32, 8)),
            (32, 8, 32, (32, 32), (32, 32)),
            (32, 8, 24, (48, 24), (48, 24)),
            (64, 8, 24, (72, 24), (72, 24)),
            (64, 64, 24, (72, 72), (72, 72)),
            (40, 40, 12, (48, 48), (48, 48)),
            (40, 8, 24, (48, 24), (48, 24)),
            (56, 8, 32, (64, 32), (64, 32)),
            (6, 2, 4, (8, 4), (8, 4)),
            (40, 10, 8, (40, 40), (40, 40)),
            (72, 24, 32, (96, 32), (96, 96)),
            (48, 1, 8, (48, 8), (48, 8)),
        ],
    )
    def test_padded(self, heads, kv_heads, degree, tnx, nxdi):
        assert padded_heads(heads, kv_heads, degree, "tnx") == tnx
        assert padded_heads(heads, kv_heads, degree, "nxdi") == nxdi

    @pytest.mark.parametrize(
        ("strategy", "kv_heads"),
        [
            ("shard-over-heads", 8),
            ("replicated-heads", 32),
            ("shard-over-batch", 8),
            ("all-gather-heads", 8),
        ],
    )
    def test_a_strategy_that_was_asked_for(self, strategy, kv_heads):
        assert padded_heads(32, 8, 4, "tnx", strategy).kv == kv_heads

    @given(
        kv_heads=st.integers(1, 64),
        group=st.integers(1, 16),
        degree=st.sampled_from((1, 2, 4, 8, 12, 16, 24, 32, 64)),
        loader=st.sampled_from(("tnx", "nxdi")),
    )
    def test_cores_get_equal_shares_and_no_head_is_lost(self, kv_heads, group, degree, loader):
        heads = kv_heads * group
        padded = padded_heads(heads, kv_heads, degree, loader)
        assert padded.query % degree == 0
        assert heads <= padded.query < heads + degree
        assert padded.kv >= max(kv_heads, min(degree, padded.query))

    def test_what_the_library_does_not_pad(self):
        neox = facts_of("gpt-neox-20b")
        assert can_split(neox, 8, "tnx")
        assert not can_split(neox, 24, "tnx")
        assert can_split(neox, 24, "nxdi")
        assert can_split(facts_of("opt-13b"), 24, "tnx")

    def test_kv_heads_are_copied_for_whole_groups_of_cores_only(self):
        llama = facts_of("llama-3-8b")  # 8 KV heads
        assert [can_split(llama, degree, "nxdi") for degree in (4, 8, 12, 24)] == [
            True,
            True,
            False,
            True,
        ]
        assert can_split(llama, 12, "tnx")
        assert can_split(facts_of("llama-2-7b"), 12, "nxdi")  # as many as heads


class TestSmallestFit:
    @staticmethod
    def of(name, machine, loader="tnx", length=4096, slots=1, below=0, **options):
        case = case_of(facts_of(name), loader, length, slots, machine=machine, **options)
        return smallest_fit(case, below=below)

    def test_more_cores_of_this_machine_come_first(self):
        assert self.of("llama-3-8b", "inf2.48xlarge") == Fit(2, None)
        assert self.of("llama-3-8b", "inf2.48xlarge", below=2) == Fit(4, None)

    def test_then_the_smallest_machine_of_the_family(self):
        found = self.of("llama-3-70b", "inf2.xlarge")
        assert found == Fit(12, "inf2.24xlarge")
        assert str(found) == "tensor_parallel_degree=12 on inf2.24xlarge"
        assert str(Fit(8, None)) == "tensor_parallel_degree=8"

    def test_then_another_family(self):
        assert self.of("bloom-176b", "inf2.xlarge", "nxdi", 2048, 4) == Fit(32, "trn1.32xlarge")

    def test_nothing_holds_everything(self):
        assert self.of("bloom-176b", "inf2.xlarge", "tnx", 2**20, 999, dtype="float32") is None

    def test_a_degree_that_the_library_refuses_is_not_offered(self):
        found = self.of("gpt-neox-20b", "inf2.48xlarge", "tnx", 2048, 64)
        assert found == Fit(16, "trn1.32xlarge")

    def test_a_machine_of_unknown_memory_is_not_offered(self):
        assert self.of("llama-3-8b", None).instance_type in INSTANCES
        unknown = case_of(facts_of("llama-3-8b"), "tnx", 4096, 1)
        unknown = replace(unknown, machine=DeviceInfo(None, 1, 64, 0, 8, ""))
        assert smallest_fit(unknown).instance_type in INSTANCES

    def test_not_for_a_cpu_nor_an_unknown_architecture(self):
        assert self.of("gpt2", "inf2.xlarge", "cpu") is None
        assert smallest_fit(case_of(ModelFacts(), "tnx", 4096, 1, machine="inf2.xlarge")) is None

    def test_a_draft_model_is_spread_before_a_larger_machine_is_taken(self):
        small = {"draft": facts_of("tinyllama-1.1b"), "length": 2048}
        assert self.of("llama-3-8b", "inf2.xlarge", **small) == Fit(2, None)
        assert self.of("llama-3-8b", "inf2.xlarge", **small, **on_cores(8)) == Fit(2, None, 2)
        assert str(Fit(2, None, 2)) == "tensor_parallel_degree=2 with draft_model_tp_size=2"
        large = {"draft": facts_of("llama-3-8b"), "length": 8192, "slots": 32}
        found = self.of("llama-3-8b", "inf2.48xlarge", **large, **on_cores(2), below=2)
        assert found == Fit(8, None, 8)

    def test_a_draft_model_on_few_cores_may_be_spread(self):
        facts, machine = facts_of("llama-3-8b"), named("inf2.48xlarge")
        options = ServingOptions(
            n_positions=2048,
            max_rolling_batch_size=1,
            dtype="float32",
            tensor_parallel_degree=8,
            speculative_draft_model="draft",
            draft_model_tp_size=2,
        )
        case = Case(options, facts, machine, NEURON_BACKENDS["tnx"], facts)
        assert "draft_model_tp_size=8" in savings(case)
        spread = case.with_options(draft_model_tp_size=16)
        assert not any("draft" in saving for saving in savings(spread))


@given(
    name=st.sampled_from(NAMES),
    loader=st.sampled_from(("tnx", "nxdi")),
    degree=st.sampled_from((1, 2, 4, 8, 16, 24, 32, 64)),
    length=st.integers(1, 2**17),
    slots=st.integers(1, 999),
)
def test_all_cores_together_hold_at_least_everything(name, loader, degree, length, slots):
    facts, kept = facts_of(name), {"on_device_embedding": True}
    found = needed(facts, loader, length, slots, degree, **kept)
    held = length
    if loader == "nxdi" and facts.model_type == "mistral" and facts.sliding_window:
        held = min(length, facts.sliding_window)
    embedding = facts.embedding_parameters * 2
    if loader == "nxdi" or case_of(facts, loader, 1, 1, **kept).effective.on_device_embedding:
        embedding = 0
    assert degree * (found.weights + found.kv_cache) >= total(facts, held, slots) - embedding
    assert found.padding >= 0
    assert needed(facts, loader, length + 1, slots, degree, **kept).needed >= found.needed


def test_cores_that_are_not_there_fit_nothing():
    def found(cores, **more):
        case = case_of(facts_of("gpt2"), "nxdi", 1024, 1, 4, machine="inf2.48xlarge", **more)
        return core_memory(replace(case, machine=replace(case.machine, visible_cores=cores)))

    draft = facts_of("gpt2")
    assert found(4).fits
    assert found(0).fits  # not known
    assert not found(2).fits
    assert not found(2).roomy
    assert not found(4, pipeline_parallel_degree=2).fits
    assert not found(4, ep_degree=2).fits
    assert found(4, draft=draft, **on_cores(4)).fits
    assert not found(4, draft=draft, **on_cores(8)).fits


class TestCache:
    """Tokens that the cache holds, per core and by hand; Llama 3 8B keeps 65536 values of 2 bytes for each."""

    TOKEN = 65536 * 2

    def cache(self, length=1024, slots=4, *, facts=None, degree=8, loader="nxdi", **options):
        return needed(
            facts or facts_of("llama-3-8b"), loader, length, slots, degree, **options
        ).kv_cache

    @pytest.mark.parametrize(
        ("changes", "tokens"),
        [
            ({}, 4 * 1024),
            ({"is_block_kv_layout": True}, 5 * 1024),
            (
                {"is_block_kv_layout": True, "pa_num_blocks": 100, "pa_block_size": 32},
                100 * 32,
            ),
            ({"is_block_kv_layout": True, "pa_block_size": 300}, (4 * 4 + 1) * 300),
            ({"pa_num_blocks": 99, "pa_block_size": 32}, 4 * 1024),
        ],
    )
    @pytest.mark.parametrize("loader", ["tnx", "nxdi"])
    def test_blocks(self, changes, tokens, loader):
        assert self.cache(loader=loader, **changes) == tokens * self.TOKEN // 8

    @pytest.mark.parametrize(("num_blocks", "tokens"), [(None, 33 * 128), (40, 40 * 128)])
    def test_blocks_that_an_option_counts_hold_the_one_for_padding(self, num_blocks, tokens):
        chunks = {"enable_chunked_prefill": True, "pa_block_size": 128, "pa_num_blocks": num_blocks}
        assert self.cache(loader="tnx", **chunks) == tokens * self.TOKEN // 8

    def test_a_window_is_all_that_some_keep(self):
        windowed = replace(facts_of("mistral-7b-v0.1"), sliding_window=512)
        assert self.cache(4096, facts=windowed) == 4 * 512 * self.TOKEN // 8
        wide = replace(windowed, sliding_window=8192)
        assert self.cache(4096, facts=wide) == 4 * 4096 * self.TOKEN // 8
        assert self.cache(4096, facts=windowed, loader="tnx") == 4 * 4096 * self.TOKEN // 8
        assert self.cache(4096, facts=replace(windowed, model_type="llama")) == (
            4 * 4096 * self.TOKEN // 8
        )
        blocks = {"is_block_kv_layout": True}
        assert self.cache(4096, facts=windowed, **blocks) == 5 * 4096 * self.TOKEN // 8

    def test_groups_of_sequences_copy_fewer_heads(self):
        def whole(**groups):
            found = needed(facts_of("llama-3-8b"), "nxdi", 4096, 8, 32, **groups)
            return found.kv_cache + found.padding

        # 32 cores need four copies of 8 heads; four groups of 8 cores have two sequences and 8 heads each.
        saved = whole() - whole(attention_dp_degree=4)
        assert saved == 3 * 8 * 4096 * self.TOKEN // 32

    def test_groups_of_experts_share_the_experts_alone(self):
        one, two = (
            needed(facts_of("mixtral-8x7b"), "nxdi", 1, 1, 8, ep_degree=groups).weights
            for groups in (1, 2)
        )
        experts = 32 * 8 * 3 * 4096 * 14336 * 2
        assert one - two == experts // 2 // 8


@pytest.mark.parametrize(
    ("way", "num_slots", "degree", "kept"),
    [
        ("shard-over-heads", 1, 8, True),
        ("shard-over-heads", 1, 16, False),
        ("shard-over-batch", 16, 16, True),
        ("shard-over-batch", 9, 16, False),
        ("all-gather-heads", 1, 16, True),
        ("all-gather-heads", 1, 24, False),  # 24 does not divide 1024 values
        ("replicated-heads", 1, 24, True),
    ],
)
def test_a_way_that_is_given_up_for_the_default(way, num_slots, degree, kept):
    facts = facts_of("llama-3-8b")
    assert keeps_strategy(way, facts, num_slots, degree) == kept
    asked, usual = (
        needed(facts, "tnx", 1024, num_slots, degree, group_query_attention=each)
        for each in (way, None)
    )
    assert asked == usual or kept


def test_the_family_goes_before_the_size():
    """An inf2.48xlarge is larger than a trn1.2xlarge and than a trn2.3xlarge, and still comes first on Inf2."""
    found, elsewhere = (
        smallest_fit(
            case_of(
                facts_of("llama-3-70b"), "tnx", 4096, 1, machine=machine, quantize="static_int8"
            ),
            below=below,
        )
        for machine, below in (("inf2.xlarge", 0), ("trn2.3xlarge", 4))
    )
    assert found.instance_type == "inf2.24xlarge"
    assert elsewhere.instance_type.startswith("trn2")


@pytest.mark.parametrize("loader", ["tnx", "nxdi"])
@pytest.mark.parametrize("kv_heads", [64, 2**40])
def test_more_kv_heads_than_heads_are_nonsense_and_pad_nothing(loader, kv_heads):
    facts = replace(facts_of("llama-3-8b"), num_kv_heads=kv_heads)
    assert needed(facts, loader, 128, 1, 8).padding == 0


class TestHost:
    """The host's memory that a load takes, against arithmetic by hand: 8.03 billion parameters."""

    WEIGHTS = 8_030_261_248
    TABLE = 4096 * 128_256
    PROCESS = GIB // 2

    def case(self, backend, facts=None, **values):
        options = {"dtype": "bfloat16", "n_positions": 4096, "max_rolling_batch_size": 4}
        options |= {"tensor_parallel_degree": 8, "model_id": "m"} | values
        return Case(
            ServingOptions.model_validate(options),
            facts or facts_of("llama-3-8b"),
            named("inf2.48xlarge"),
            NEURON_BACKENDS.get(backend),
        )

    def of(self, backend, kind="safetensors", stored="bfloat16", facts=None, **values):
        return host_bytes(self.case(backend, facts, **values), kind, stored)

    @pytest.mark.parametrize(
        ("available_gib", "workers"), [(None, 12), (1000, 12), (16, 11), (8, 3), (4, 1)]
    )
    def test_a_compile_of_nxdi_takes_two_to_four_parts_of_a_core(self, available_gib, workers):
        part = 2 * self.WEIGHTS // 8
        found = self.compile("nxdi", available_gib)
        assert found.workers == workers
        assert found.least == pytest.approx(self.PROCESS + 2 * part + workers * GIB, rel=1e-3)
        assert found.most == pytest.approx(self.PROCESS + 4 * part + 4 * workers * GIB, rel=1e-3)

    def test_a_compile_of_tnx_takes_what_its_load_takes(self):
        load = self.of("tnx")
        assert self.compile("tnx", None) == CompileMemory(load + 12 * GIB, load + 48 * GIB, 12)
        assert self.compile("tnx", 12).workers == (12 * GIB - load) // GIB == 8
        asked = self.compile("tnx", 12, compilation_worker_count=7)
        assert asked == CompileMemory(load + 7 * GIB, load + 28 * GIB, 7)

    def test_more_compilers_than_the_library_starts_are_not_counted(self):
        case = replace(self.case("nxdi"), machine=replace(named("inf2.48xlarge"), cpus=4))
        assert compile_memory(case, 12, 0, None).workers == 8
        assert compile_memory(case, 3, 0, None).workers == 3

    def test_nothing_is_compiled_or_known(self):
        assert compile_memory(self.case("cpu"), 0, 1, None) is None
        assert compile_memory(self.case("nxdi"), 0, 1, None) is None
        assert compile_memory(self.case("nxdi"), 3, None, None) is None

    def compile(self, backend, available_gib, **values):
        available = None if available_gib is None else available_gib * GIB
        return compile_memory(
            self.case(backend, **values), 12, self.of(backend, **values), available
        )

    def test_cpu_takes_weights_and_cache(self):
        cache = 32 * 2 * 8 * 128 * 4096 * 4
        assert self.of("cpu") == self.PROCESS + 2 * (self.WEIGHTS + cache)
        assert self.of("cpu", dtype="float32") == self.PROCESS + 4 * (self.WEIGHTS + cache)

    def test_tnx_takes_a_layer_at_a_time(self):
        """The output projection is larger than a layer here."""
        assert self.of("tnx") == self.PROCESS + 2 * (self.TABLE + 2 * self.TABLE)
        assert self.of("tnx", on_device_embedding=True) == self.PROCESS + 4 * self.TABLE
        assert self.of("tnx", "split") == self.of("tnx", "presharded") == self.of("tnx", None)

    def test_tnx_reads_pickles_whole(self):
        assert self.of("tnx", "pickle") == self.PROCESS + 4 * self.WEIGHTS
        assert self.of("tnx", "pickle", "float32") == self.PROCESS + 6 * self.WEIGHTS

    def test_nxdi_takes_the_checkpoint_and_what_the_cores_take(self):
        assert self.of("nxdi") == self.PROCESS + 4 * self.WEIGHTS
        assert self.of("nxdi", "ranks") == self.PROCESS + 2 * self.WEIGHTS
        assert self.of("nxdi", stored="of_the_future") == self.of("nxdi")

    def test_heads_that_are_padded_count(self):
        padded = self.of("nxdi", "ranks", tensor_parallel_degree=24)
        assert padded > self.of("nxdi", "ranks") + 2 * 32 * 2 * 4096 * 128 * (48 - 32)
        longer = self.of("nxdi", "ranks", tensor_parallel_degree=24, n_positions=8192)
        assert longer == padded, "the cache is the device's"

    def test_unknown(self):
        facts = replace(facts_of("llama-3-8b"), num_parameters=None)
        assert self.of("nxdi", facts=facts) is None
