"""Graphs, compile time and memory of a plan, against counts made by hand and against the memory module."""

import json
from pathlib import Path
from types import MappingProxyType

import pytest

from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.resolve import Resolved
from djl_python_neuronx.planning import machines
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.machines import DeviceInfo
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.plan import (
    PlannedGraph,
    assess,
    compile_minutes,
    graph_options,
    graphs,
    library_arguments,
    make_plan,
)

MODELS = Path(__file__).parent / "models"
BASE = {
    "n_positions": 512,
    "context_length_estimate": (128, 512),
    "max_rolling_batch_size": 4,
    "tensor_parallel_degree": 2,
    "dtype": "bfloat16",
}


def config(name):
    return json.loads((MODELS / f"{name}.json").read_text())


INF2 = machines.named("inf2.48xlarge")


def facts(name):
    return ModelFacts.from_config(config(name))


def options_with(**values):
    return ServingOptions(**{**BASE, **values})


def prefill(*buckets, rows=1, kind="prefill"):
    return [PlannedGraph(kind, bucket, rows) for bucket in buckets]


def decode(*buckets, rows=4, kind="decode"):
    return [PlannedGraph(kind, bucket, rows) for bucket in buckets]


CHUNKS = {"enable_chunked_prefill": True, "context_length_estimate": (16, 128)}
DRAFT = {"speculative_draft_model": "owner/draft", "max_rolling_batch_size": 1}
CASES = [
    # model, loader, options, the graphs
    ("llama-3-8b", "tnx", {}, prefill(128, 512) + decode(128, 256, 512)),
    ("llama-3-8b", "nxdi", {}, prefill(128, 512) + decode(128, 256, 512)),
    ("llama-3-8b", "cpu", {}, []),
    # the library rounds: no length a little below the longest
    (
        "llama-3-8b",
        "nxdi",
        {"n_positions": 2500},
        prefill(128, 512) + decode(128, 256, 512, 1024, 2500),
    ),
    (
        "llama-3-8b",
        "nxdi",
        {"n_positions": 3000},
        prefill(128, 512) + decode(128, 256, 512, 1024, 2048, 3000),
    ),
    # a list of n_positions is the list of token buckets
    ("llama-3-8b", "tnx", {"n_positions": (256, 512)}, prefill(128, 512) + decode(256, 512)),
    ("llama-3-8b", "nxdi", {"n_positions": [512]}, prefill(128, 512) + decode(512)),
    # static batches: every row is in every prefill
    ("opt-13b", "tnx", {}, prefill(128, 512, rows=4) + decode(128, 256, 512)),
    (
        "llama-3-8b",
        "tnx",
        {"rolling_batch_strategy": "naive_rolling_batch"},
        prefill(128, 512, rows=4) + decode(128, 256, 512),
    ),
    # and somebody who joins has sequences of any length re-prefilled, unless there is one slot
    (
        "opt-13b",
        "tnx",
        {"context_length_estimate": (64, 128)},
        prefill(64, 128, 512, rows=4) + decode(128, 256, 512),
    ),
    (
        "llama-3-8b",
        "tnx",
        {
            "context_length_estimate": (128,),
            "rolling_batch_strategy": "naive_rolling_batch",
        },
        prefill(128, 512, rows=4) + decode(128, 256, 512),
    ),
    (
        "opt-13b",
        "tnx",
        {"context_length_estimate": (128,), "max_rolling_batch_size": 1},
        prefill(128) + decode(128, 256, 512, rows=1),
    ),
    # no list of decode lengths: the library doubles from 128; gpt-neox has no prompt graphs
    ("gpt2", "tnx", {}, prefill(128, 512, rows=4) + decode(128, 256, 512)),
    ("gpt2", "tnx", {"n_positions": (512,)}, prefill(128, 512, rows=4) + decode(128, 256, 512)),
    ("gpt-neox-20b", "tnx", {}, decode(128, 256, 512)),
    ("gpt-j-6b", "tnx", {"n_positions": 300}, decode(128, 256, 300)),
    # NxDI: a decode graph for each number of sequences
    (
        "llama-3-8b",
        "nxdi",
        {"token_generation_batches": (1, 2)},
        [
            *prefill(128, 512),
            *decode(128, 256, 512, rows=1),
            *decode(128, 256, 512, rows=2),
            *decode(128, 256, 512),
        ],
    ),
    # prompts in chunks: tokens of a step by blocks of all slots at one of the lengths, and no decode graphs
    (
        "llama-3-8b",
        "tnx",
        {**CHUNKS, "n_positions": 500, "pa_block_size": 128},
        [
            *prefill(16, 128, rows=4, kind="mixed"),
            *prefill(16, 128, rows=8, kind="mixed"),
            *prefill(16, 128, rows=16, kind="mixed"),
        ],
    ),
    (
        "llama-3-8b",
        "tnx",
        {**CHUNKS, "n_positions": (200, 300), "pa_block_size": 256},
        prefill(16, 128, rows=4, kind="mixed") + prefill(16, 128, rows=8, kind="mixed"),
    ),
    # a draft model has its own graphs in TNX, and is refused with NxDI
    (
        "llama-3-8b",
        "tnx",
        DRAFT,
        [
            *prefill(128, 512),
            *decode(128, 256, 512, rows=1),
            *decode(128, 256, 512, rows=1, kind="speculation"),
            *prefill(128, 512, kind="draft prefill"),
            *decode(128, 256, 512, rows=1, kind="draft decode"),
        ],
    ),
    # an architecture that nobody knows is planned as one that can everything
    (None, "nxdi", {}, prefill(128, 512) + decode(128, 256, 512)),
]


@pytest.mark.parametrize(("model", "loader", "options", "expected"), CASES)
def test_the_graphs_that_are_compiled(model, loader, options, expected):
    known = ModelFacts(model_type="new") if model is None else facts(model)
    found = list(graphs(Case(options_with(**options), known, INF2, NEURON_BACKENDS.get(loader))))
    assert found == expected


def test_what_the_host_does_with_nxdis_graphs_is_none_of_them():
    plain = options_with(on_device_generation=True)
    for name in ("async_execution", "save_sharded_checkpoint"):
        changed = plain.model_copy(update={name: True})
        assert graph_options(changed, "nxdi") == graph_options(plain, "nxdi")
        assert library_arguments(
            Case(changed, facts("llama-3-8b"), INF2, NEURON_BACKENDS["nxdi"])
        ) != library_arguments(Case(plain, facts("llama-3-8b"), INF2, NEURON_BACKENDS["nxdi"]))


@pytest.mark.parametrize(("positions", "ahead"), [(4096, True), (4097, None)])
def test_no_step_runs_ahead_where_the_cache_is_a_ring(positions, ahead):
    options = options_with(n_positions=positions, on_device_generation=True, async_execution=True)
    found = library_arguments(
        Case(options, facts("mistral-7b-v0.1"), INF2, NEURON_BACKENDS["nxdi"])
    )
    assert found.neuron_config.get("async_mode") == ahead


def test_no_graph_is_told_before_lengths_are_known():
    options = ServingOptions(n_positions=None)
    assert list(graphs(Case(options, facts("llama-3-8b"), INF2, NEURON_BACKENDS["tnx"]))) == []


def test_compiling_takes_longer_for_more_graphs_and_more_layers():
    small, large = facts("llama-3-8b"), facts("llama-3-70b")
    one = [PlannedGraph("decode", 128, 8)]
    assert compile_minutes([], small) == 0
    assert compile_minutes(10 * one, small) == pytest.approx(10 * compile_minutes(one, small))
    ratio = compile_minutes(one, large) / compile_minutes(one, small)
    assert ratio == pytest.approx(large.num_layers / small.num_layers)
    # What users of 70B models tell of: 30 to 70 minutes.
    assert 30 <= compile_minutes(12 * one, large) <= 70


def test_a_draft_models_graphs_take_as_long_as_it_is_deep():
    small, large = facts("llama-3-8b"), facts("llama-3-70b")
    own, drafts = PlannedGraph("speculation", 128, 8), PlannedGraph("draft decode", 128, 8)
    both = compile_minutes([own, drafts], large, small)
    assert both == pytest.approx(compile_minutes([own], large) + compile_minutes([drafts], small))
    assert compile_minutes([drafts], large) == compile_minutes([own], large)


def test_a_model_of_unknown_depth_has_an_estimate_too():
    assert compile_minutes([PlannedGraph("decode", 128, 8)], ModelFacts()) > 0


@pytest.mark.parametrize("loader", ["tnx", "nxdi"])
def test_the_plan_of_a_neuron_loader(loader):
    device, known = machines.named("inf2.xlarge"), facts("llama-3-8b")
    plan = make_plan(Case(options_with(), known, device, NEURON_BACKENDS.get(loader)))
    assert plan.estimated_compile_s == pytest.approx(60 * compile_minutes(plan.graphs, known))
    table = 2 * 2 * known.vocab_size * known.hidden_size
    weights = 2 * known.num_parameters - (table // 2 if loader == "tnx" else 0)
    assert plan.memory.weights == weights // 2
    assert plan.memory.kv_cache == known.cache_values_per_token * 512 * 4 * 2 // 2
    assert plan.memory.capacity == device.core_memory_bytes
    flat = {**plan.arguments.constructor, **plan.arguments.neuron_config}
    assert flat["tp_degree"] == 2
    assert flat["batch_size"] == 4


def test_quantised_weights_and_caches_take_less():
    device, known = machines.named("inf2.xlarge"), facts("llama-3-8b")
    plain = make_plan(Case(options_with(), known, device, NEURON_BACKENDS["tnx"])).memory
    quantised = options_with(quantize="static_int8", kv_cache_quantize="fp8")
    less = make_plan(Case(quantised, known, device, NEURON_BACKENDS["tnx"])).memory
    assert less.weights < plain.weights
    assert 2 * less.kv_cache == plain.kv_cache


def test_the_plan_of_the_cpu_is_the_whole_machine():
    device = DeviceInfo(None, 0, 0, 64 * 2**30, 8, "a laptop")
    known = facts("llama-3-8b")
    plan = make_plan(Case(options_with(tensor_parallel_degree=2), known, device, None))
    assert plan.graphs == ()
    assert plan.estimated_compile_s == 0
    assert plan.arguments is None
    assert plan.memory.capacity == 64 * 2**30
    assert plan.memory.weights == 2 * known.num_parameters
    on_neuron = make_plan(Case(options_with(), known, machines.named("inf2.xlarge"), None))
    assert on_neuron.memory.capacity == 0  # the devices' memory is not the host's


def test_no_memory_is_told_of_an_unknown_architecture():
    unknown = ModelFacts(model_type="new")
    plan = make_plan(
        Case(options_with(), unknown, machines.named("inf2.xlarge"), NEURON_BACKENDS["nxdi"])
    )
    assert plan.memory is None


def test_static_batching_reaches_the_librarys_arguments():
    device = machines.named("inf2.24xlarge")
    able = make_plan(
        Case(options_with(), facts("llama-3-8b"), device, NEURON_BACKENDS["tnx"])
    ).arguments
    unable = make_plan(
        Case(options_with(), facts("opt-13b"), device, NEURON_BACKENDS["tnx"])
    ).arguments
    assert "continuous_batching" in able.neuron_config
    assert "continuous_batching" not in unable.neuron_config


@pytest.mark.parametrize("machine", sorted(machines.INSTANCES))
@pytest.mark.parametrize(
    "model", ["llama-3-8b", "llama-3-70b", "mixtral-8x7b", "gpt-neox-20b", "opt-66b", "bloom-176b"]
)
def test_every_model_has_a_legal_plan_that_fits_or_a_clear_no(model, machine):
    device, known = machines.named(machine), facts(model)
    loader = "nxdi" if known.model_type in {"llama", "mixtral"} else "tnx"
    options = ServingOptions(model_id="owner/model", model_loader=loader)
    empty = Resolved(options, *(MappingProxyType({}) for _ in range(3)))
    problems = Problems()
    _, case = assess(empty, Case(options, known, device, NEURON_BACKENDS.get(loader)), problems)
    plan = make_plan(case)
    degree = case.options.tensor_parallel_degree
    assert degree in machines.legal_degrees(device.family, device.visible_cores)
    if plan.memory.fits:
        assert problems.errors == ()
    else:
        assert any("does not fit" in error for error in problems.messages("error"))


@pytest.mark.parametrize(("positions", "slots"), [(8192, None), (8192, 1), (4096, None)])
def test_few_slots_that_suit_another_option_are_a_warning(positions, slots):
    given = {"n_positions": positions, "max_rolling_batch_size": slots}
    given = {name: value for name, value in given.items() if value is not None}
    options = ServingOptions(model_id="o/m", model_loader="tnx", tensor_parallel_degree=8, **given)
    origins = dict.fromkeys([*given, "tensor_parallel_degree"], "here")
    resolved = Resolved(
        options, MappingProxyType(origins), MappingProxyType({}), MappingProxyType({})
    )
    problems = Problems()
    case = Case(
        options, facts("mistral-7b-v0.1"), machines.named("inf2.48xlarge"), NEURON_BACKENDS["tnx"]
    )
    _, case = assess(resolved, case, problems)
    warned = any("further requests wait" in text for text in problems.messages("warning"))
    assert warned is (positions == 8192 and slots is None)
    assert case.slots == (1 if positions == 8192 else 32)


@pytest.mark.parametrize(
    ("machine", "positions", "kernel"),
    [
        ("trn1.32xlarge", 8192, False),
        ("trn1.32xlarge", 4096, None),
        ("trn2.48xlarge", 8192, None),
    ],
)
def test_a_ring_on_trn1_is_filled_without_the_kernel_that_has_no_window(machine, positions, kernel):
    options = ServingOptions(model_id="o/m", model_loader="nxdi", n_positions=positions)
    resolved = Resolved(
        options, MappingProxyType({"n_positions": "here"}), *(MappingProxyType({}),) * 2
    )
    problems = Problems()
    case = Case(options, facts("mistral-7b-v0.1"), machines.named(machine), NEURON_BACKENDS["nxdi"])
    _, case = assess(resolved, case, problems)
    assert problems.errors == ()
    written = make_plan(case).arguments.neuron_config
    assert (case.options.attn_kernel_enabled, written.get("attn_kernel_enabled")) == (kernel,) * 2
