"""The arguments of transformers-neuronx are one value: `check` prints it, and a start compiles exactly its graphs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the tnx backend needs torch")

from djl_python_neuronx import backends
from djl_python_neuronx.backends import LoadPlan
from djl_python_neuronx.backends.base import ModelSpec
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.warmup import warm_up
from djl_python_neuronx.loading.check import check
from djl_python_neuronx.loading.load_plan import load_plan
from djl_python_neuronx.loading.prepare import prepare_or_raise
from djl_python_neuronx.planning import machines
from djl_python_neuronx.planning.arguments import LibraryArguments, PlannedGraph
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.plan import make_plan
from djl_python_neuronx.simulation import spec_of
from tests.backends.tnx_plans import tnx_plan
from tests.doubles import tnx_double

TINY = Path(__file__).parents[2] / "examples" / "tiny-llama"
MODELS = Path(__file__).parents[1] / "planning" / "models"
MACHINE = machines.named("inf2.24xlarge")
SETTINGS = {
    "model_loader": "tnx",
    "tensor_parallel_degree": "1",
    "n_positions": "256",
    "max_rolling_batch_size": "2",
}
SHARDED = {"tensor_parallel_degree": "4", "n_positions": "64,128,256"}
LOOKUP = {"ngram_prompt_lookup_max": "3", "speculative_length": "4"}
STARTS: dict[str, dict[str, str]] = {
    "the defaults": {},
    "float16": {"dtype": "fp16"},
    "one prompt length": {"context_length_estimate": "64"},
    "drafts looked up": LOOKUP,
    "a draft model": {"speculative_draft_model": str(TINY), "speculative_length": "2"},
    "prompts in chunks": {"enable_chunked_prefill": "true"},
    "lengths that are no whole blocks": {
        "enable_chunked_prefill": "true",
        "n_positions": "100,250",
        "pa_block_size": "64",
    },
    "a cache divided by tokens": {**SHARDED, "shard_over_sequence": "true"},
    "divided by an override": {
        **SHARDED,
        "override_neuron_config": json.dumps({"shard_over_sequence": True}),
    },
    "divided, static batches": {
        **SHARDED,
        "shard_over_sequence": "true",
        "rolling_batch_strategy": "naive_rolling_batch",
    },
    "static batches": {"rolling_batch_strategy": "naive_rolling_batch"},
    "sampling on the device": {"on_device_generation": "true"},
}


def compiled(model: Any) -> set[tuple[str, int]]:
    """The graphs that the double would compile for what it was made with; kind and tokens."""
    if model.chunked:
        return {("mixed", length) for length in model.context_buckets}
    graphs = {("prefill", length) for length in model.context_buckets}
    kinds = ["decode"]
    if "enable_speculative_decoder" in tnx_double.CALLS:
        kinds.append("speculation")
    return graphs | {(kind, length) for kind in kinds for length in model.token_buckets}


def own(graphs: Iterable[PlannedGraph]) -> set[tuple[str, int]]:
    return {(graph.kind, graph.bucket) for graph in graphs if not graph.kind.startswith("draft")}


def _shapes(spec: ModelSpec) -> dict[str, object]:
    """The facts that scheduling and the choice of graphs depend on."""
    names = (
        "num_slots max_model_len prefill_buckets max_prefill_batch token_buckets cache_buckets cache_block mixed_steps "
        "joins decode_slots"
    )
    return {name: getattr(spec, name) for name in names.split()}


@pytest.mark.parametrize("settings", STARTS.values(), ids=STARTS)
def test_check_plans_what_a_start_compiles(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    models = tnx_double.install(monkeypatch)
    overrides = {**SETTINGS, **settings}
    report = check(str(TINY), environ={}, overrides=overrides, machine=MACHINE)
    assert report.findings.messages("error") == ()
    assert report.prepared is not None
    arguments = report.prepared.planned.arguments
    assert arguments is not None
    prepared = prepare_or_raise(None, TINY, environ={}, overrides=overrides, machine=MACHINE)
    plan = load_plan(prepared, prepared.load_tokenizer)
    assert plan.arguments == prepared.planned.arguments == arguments
    assert plan.dtype == prepared.options.dtype
    backend = backends.get("tnx").load(plan)
    assert _shapes(spec_of(prepared.case)) == _shapes(backend.spec)
    (model,) = models
    assert list(tnx_double.CALLS.items()) == list(arguments.calls.items())
    assert model.amp == arguments.constructor["amp"]
    assert model.token_buckets == arguments.constructor["n_positions"]
    assert compiled(model) == own(report.prepared.planned.graphs)
    if model.chunked:
        blocks = {graph.batch for graph in report.prepared.planned.graphs}
        assert blocks == set(model.block_buckets)
        assert {columns // backend.spec.cache_block for columns in backend.spec.cache_buckets} == (
            blocks
        )
    elif not prepared.options.on_device_generation:
        ends = {graph.bucket for graph in report.prepared.planned.graphs if graph.kind == "decode"}
        assert set(backend.spec.token_buckets) == ends
    if report.prepared.draft is not None:
        assert prepared.draft is not None
        assert prepared.draft.planned.arguments == report.prepared.draft.planned.arguments
        drafts = {
            graph for graph in report.prepared.planned.graphs if graph.kind.startswith("draft")
        }
        kinds = {replace(graph, kind=graph.kind.removeprefix("draft ")) for graph in drafts}  # type: ignore[arg-type]
        assert kinds == set(report.prepared.draft.planned.graphs)
    backend.close()


@pytest.mark.parametrize("name", ["the defaults", "one prompt length", "static batches"])
def test_the_warm_up_runs_what_was_planned(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    tnx_double.install(monkeypatch)
    prepared = prepare_or_raise(
        None, TINY, environ={}, overrides={**SETTINGS, **STARTS[name]}, machine=MACHINE
    )
    engine = Engine(backends.get("tnx").load(load_plan(prepared, prepared.load_tokenizer)))
    cold = warm_up(engine)
    ran = {(graph.kind, graph.bucket) for graph in (*engine.runner.graphs_run, *cold)}
    assert ran <= own(prepared.planned.graphs)
    assert {end for kind, end in ran if kind == "decode"} == {
        graph.bucket for graph in prepared.planned.graphs if graph.kind == "decode"
    }


def test_a_large_model_whose_cache_is_divided_by_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 3 8B on 32 cores: decodes for 4096 tokens alone, in `check` as at a start."""
    models = tnx_double.install(monkeypatch)
    config = json.loads((MODELS / "llama-3-8b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {
        "model_loader": "tnx",
        "tensor_parallel_degree": "32",
        "n_positions": "1024,2048,4096",
        "shard_over_sequence": "true",
    }
    machine = machines.named("trn1.32xlarge")
    report = check(str(tmp_path), environ={}, overrides=settings, machine=machine)
    assert report.findings.messages("error") == ()
    assert any(
        "decode graphs are compiled for the longest only" in w
        for w in report.findings.messages("warning")
    )
    plan = report.prepared.planned
    assert plan is not None
    assert plan.arguments is not None
    assert plan.arguments.constructor["n_positions"] == [4096]
    assert [graph.bucket for graph in plan.graphs if graph.kind == "decode"] == [4096]
    slots = plan.arguments.constructor["batch_size"]
    prompts = tuple(plan.arguments.constructor["context_length_estimate"])
    large = LoadPlan(tmp_path, slots, 4096, prompts, arguments=plan.arguments)
    backends.get("tnx").load(large).close()
    (model,) = models
    assert compiled(model) == own(plan.graphs)


def test_a_model_without_shared_heads_has_a_decode_for_every_length(tmp_path: Path) -> None:
    """Llama 2 7B: the library does not divide its cache, and one finding says so."""
    (tmp_path / "config.json").write_text((MODELS / "llama-2-7b.json").read_text())
    settings = {
        "model_loader": "tnx",
        "tensor_parallel_degree": "8",
        "n_positions": "1024,2048",
        "shard_over_sequence": "true",
    }
    report = check(
        str(tmp_path), environ={}, overrides=settings, machine=machines.named("inf2.48xlarge")
    )
    assert report.findings.messages("error") == ()
    (warning,) = (w for w in report.findings.messages("warning") if "shard_over_sequence" in w)
    assert "switches it off" in warning
    plan = report.prepared.planned
    assert plan.arguments.constructor["n_positions"] == [1024, 2048]
    assert [graph.bucket for graph in plan.graphs if graph.kind == "decode"] == [1024, 2048]


@pytest.mark.parametrize("name", ["gpt2", "opt-13b"])
def test_architectures_with_static_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    models = tnx_double.install(monkeypatch)
    config = json.loads((MODELS / f"{name}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 97}))
    plan = tnx_plan(tmp_path, 4, 1024, (128, 512), (1024,), continuous=False)
    backends.get("tnx").load(plan).close()
    options = ServingOptions(
        n_positions=(1024,),
        context_length_estimate=(128, 512),
        max_rolling_batch_size=4,
        tensor_parallel_degree=1,
        dtype="float32",
    )
    case = Case(options, ModelFacts.from_config(config), MACHINE, NEURON_BACKENDS["tnx"])
    prefills = {graph.bucket for graph in make_plan(case).graphs if graph.kind == "prefill"}
    assert prefills == set(models[0].context_buckets) == {128, 512, 1024}


def test_the_arguments_are_plain_values() -> None:
    plan = tnx_plan(TINY, 2, 256, (64,), (256,), num_speculative_tokens=3)
    arguments = plan.arguments
    parts = {name: getattr(arguments, name) for name in LibraryArguments.__dataclass_fields__}
    again = json.loads(json.dumps(parts))
    assert again == {**parts, "compiler_flags": list(arguments.compiler_flags)}
