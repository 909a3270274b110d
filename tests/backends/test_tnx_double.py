"""The adapter where the library is not: how it drives it, and that the stand-in is like it."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import types
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the tnx backend needs torch")

from djl_python_neuronx import backends
from djl_python_neuronx.backends import tnx
from djl_python_neuronx.backends.base import Want
from djl_python_neuronx.backends.env import count_cores
from djl_python_neuronx.errors import (
    ArtifactError,
    BackendError,
    BackendUnavailableError,
    IncompatibleOptionsError,
)
from djl_python_neuronx.planning import backend_choice
from tests.backends.double_traffic import VOCAB_SIZE, assert_expected, folder_of
from tests.backends.tnx_plans import tnx_plan
from tests.doubles import tnx_double
from tests.doubles.device_driver import Text
from tests.doubles.mixed_driver import assert_like_alone_in_chunks
from tests.doubles.toy_backend import expected

WAYS = [("llama", True), ("llama", False), ("opt", False), ("gpt2", False)]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tnx_double.Model]:
    return tnx_double.install(monkeypatch)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 3))]
)
@pytest.mark.parametrize(("model_type", "continuous"), WAYS)
def test_any_traffic_gives_what_each_gets_alone(
    tmp_path: Path, made: list[Any], model_type: str, continuous: bool, seed: int
) -> None:
    plan = tnx_plan(folder_of(tmp_path, model_type), continuous=continuous)
    backend = backends.get("tnx").load(plan)
    assert_expected(backend, seed)
    assert len(made) == 1
    backend.close()


@pytest.mark.parametrize(("model_type", "continuous"), WAYS)
def test_tokens_of_the_device_are_taken_as_they_are(
    tmp_path: Path, made: list[Any], model_type: str, continuous: bool
) -> None:
    generation = {"do_sample": True, "dynamic": True, "global_top_k": 8}
    plan = tnx_plan(
        folder_of(tmp_path, model_type), continuous=continuous, on_device_generation=generation
    )
    backend = backends.get("tnx").load(plan)
    assert (backend.spec.outputs, backend.spec.largest_top_k) == (Want.TOKENS, 8)
    assert_expected(backend, 1)
    assert 1 <= len(made[0].configs) <= 4  # the first time that a slot is greedy, never again
    assert made[0].configs[-1].top_k == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 3))]
)
def test_any_chunks_give_what_each_gets_alone(tmp_path: Path, made: list[Any], seed: int) -> None:
    plan = tnx_plan(folder_of(tmp_path, "llama"), block_size=8)
    backend = backends.get("tnx").load(plan)

    def best(prompt: list[int], tokens: list[int]) -> Text:
        wanted = expected(prompt, len(tokens), vocab_size=VOCAB_SIZE)
        return Text(prompt, wanted, [1.0] * len(wanted))

    assert assert_like_alone_in_chunks(backend, best, seed) > 100
    assert len(made) == 1
    backend.close()


def test_objects_are_made_anew_for_every_model(tmp_path: Path, made: list[Any]) -> None:
    plan = tnx_plan(
        folder_of(tmp_path, "llama"),
        quant={"quant_dtype": "s8", "dequant_dtype": "f32"},
        group_query_attention="replicated-heads",
        on_device_generation={"do_sample": False, "top_k": 1},
    )
    for _ in range(2):
        backends.get("tnx").load(plan)
    first, second = (model.neuron_config for model in made)
    assert first.group_query_attention is tnx_double.GQA.REPLICATED_HEADS
    assert first.on_device_generation is not second.on_device_generation
    assert isinstance(first.continuous_batching, tnx_double.ContinuousBatchingConfig)


def test_compiled_programs_fit_their_plan_only(tmp_path: Path, made: list[Any]) -> None:
    plan = tnx_plan(folder_of(tmp_path, "llama"))
    tnx.compile(plan, tmp_path)
    tnx.load(plan, tmp_path)
    assert [model.loaded_from for model in made] == [None, tmp_path]
    with pytest.raises(ArtifactError, match="Compile it again"):
        tnx.load(tnx_plan(tmp_path, token_buckets=(48,)), tmp_path)


@pytest.mark.parametrize(("asked", "got"), [(None, 3), (5, 5)])
def test_as_many_compilers_as_the_plan_says(
    tmp_path: Path, made: list[Any], asked: int | None, got: int
) -> None:
    given = {} if asked is None else {"compilation_worker_count": asked}
    plan = replace(tnx_plan(folder_of(tmp_path, "llama"), **given), compile_workers=3)
    tnx.compile(plan, tmp_path)
    assert made[0].neuron_config.compilation_worker_count == got


@pytest.mark.parametrize("model_type", ["gpt2", "opt"])
def test_of_another_program_s_graphs_no_longer_prompt_is_asked_for(
    tmp_path: Path, made: list[Any], model_type: str
) -> None:
    plan = tnx_plan(folder_of(tmp_path, model_type), continuous=False)
    foreign = tnx_plan(tmp_path, continuous=False, foreign_graphs=True)
    tnx.compile(foreign, tmp_path)
    with pytest.raises(ArtifactError, match="Compile it again"):
        tnx.load(plan, tmp_path)
    backend = tnx.load(foreign, tmp_path)
    assert [model.context_buckets for model in made] == [[8, 20], [8, 20, 48], [8, 20]]
    assert_expected(backend, 1)


@pytest.mark.parametrize(("continuous", "num_slots"), [(True, 4), (False, 1)])
def test_of_another_program_s_graphs_all_are_used_where_no_more_is_needed(
    tmp_path: Path, continuous: bool, num_slots: int
) -> None:
    folder = folder_of(tmp_path, "llama")
    plans = [
        tnx_plan(folder, num_slots, continuous=continuous, foreign_graphs=foreign)
        for foreign in (False, True)
    ]
    assert plans[0] == plans[1]


def test_the_environment_is_left_as_it_was(tmp_path: Path, made: list[Any]) -> None:
    before = dict(os.environ)
    backends.get("tnx").load(tnx_plan(folder_of(tmp_path, "llama")))
    assert dict(os.environ) == before


def test_torch_takes_no_more_threads_than_there_are_cores(tmp_path: Path, made: list[Any]) -> None:
    torch = importlib.import_module("torch")
    before = torch.get_num_threads()
    plan = tnx_plan(folder_of(tmp_path, "llama"))
    try:
        for threads, left in ((count_cores() + 7, count_cores()), (1, 1)):
            torch.set_num_threads(threads)
            backends.get("tnx").load(plan)
            assert torch.get_num_threads() == left
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("model_type", ["qwen2", "gpt_neo"])
def test_an_unknown_architecture_is_refused(
    tmp_path: Path, made: list[Any], model_type: str
) -> None:
    with pytest.raises(BackendError, match=model_type):
        backends.get("tnx").load(tnx_plan(folder_of(tmp_path, model_type)))
    assert made == []


def test_a_missing_library_is_told_with_the_way_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers_neuronx", None)
    with pytest.raises(BackendUnavailableError, match=r"cannot be imported.*setup guide"):
        backends.get("tnx").load(tnx_plan(folder_of(tmp_path, "llama")))


def test_a_missing_compiler_is_told_with_the_way_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.setitem(sys.modules, "neuronxcc", None)
    compiler = backends.compiler("tnx")
    assert compiler is not None
    with pytest.raises(BackendUnavailableError, match=r"neuronx-cc.*setup guide"):
        compiler.compiler_version()


@pytest.mark.tnx
@pytest.mark.parametrize(
    "name", [entry.__name__ for entry in (*tnx_double.CONFIGS, *tnx_double.MODELS)]
)
def test_the_stand_in_takes_what_the_library_takes(name: str) -> None:
    package = importlib.import_module("transformers_neuronx")
    real = getattr(package, name, None) or getattr(
        importlib.import_module("transformers_neuronx.config"), name
    )
    double = getattr(tnx_double, name)
    mine, theirs = (inspect.signature(entry.__init__).parameters for entry in (double, real))
    for parameter in mine.values():
        assert theirs[parameter.name].kind == parameter.kind
        if parameter.name not in {"neuron_config", "no_quantize_list", "cache_layout"}:
            assert theirs[parameter.name].default == parameter.default, parameter.name
    methods = (
        *("save", "load", "to_neuron", "update_generation_config"),
        "enable_speculative_decoder",
    )
    for method in methods if issubclass(double, tnx_double.Model) else ():
        wanted, found = (inspect.signature(getattr(entry, method)) for entry in (real, double))
        assert list(wanted.parameters) == list(found.parameters), method


def test_the_library_is_found_by_its_module(made: list[Any]) -> None:
    assert backend_choice.libraries()["transformers-neuronx"].state == "installed"


def test_a_keyword_that_the_library_does_not_know_is_refused(
    tmp_path: Path, made: list[Any]
) -> None:
    for name, told in (
        ("fuse_qvk", r"fuse_qvk=True.*did you mean 'fuse_qkv'\?"),
        ("kwargs", "kwargs="),
    ):
        plan = tnx_plan(folder_of(tmp_path, "llama"), **{name: True})
        with pytest.raises(IncompatibleOptionsError, match=told):
            backends.get("tnx").load(plan)
    assert made == []


def test_weights_are_rearranged_without_changing_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each row with its number as value: GPT-J's pairs become halves, GPT-BigCode's heads become blocks."""
    torch = importlib.import_module("torch")
    for path, names in {
        "gpt2.model": ("GPT2Block", "GPT2ForSampling", "GPT2ForSamplingWithContextBroadcasting"),
        "gptj.model": ("GPTJBlock", "GPTJTransformer"),
        "gptneox.model": ("GPTNeoXForSampling", "GPTNeoXLayer"),
        "module": ("LowMemoryModuleList",),
    }.items():
        module = types.ModuleType(f"transformers_neuronx.{path}")
        for name in names:
            methods = {"load_weights": None, "maybe_nullify_embeddings": None}
            setattr(module, name, type(name, (), methods))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        parent = module.__name__.rpartition(".")[0]
        monkeypatch.setitem(
            sys.modules, parent, sys.modules.get(parent) or types.ModuleType(parent)
        )
    path = "djl_python_neuronx.backends.tnx.adapted"
    monkeypatch.delitem(sys.modules, path, raising=False)
    adapted = importlib.import_module(path)
    del sys.modules[path]
    rows = torch.arange(12.0)[:, None].repeat(1, 12)
    fused = adapted.fuse_rotary(rows, rows + 100, rows + 200, num_heads=2, rotary_dim=4)
    halves = torch.tensor([0, 2, 1, 3, 4, 5])
    heads = [halves, halves + 100, torch.arange(6) + 200]
    assert (
        fused[:, 0].tolist() == torch.cat([head + 6 * i for i in (0, 1) for head in heads]).tolist()
    )
    grouped = torch.tensor([0, 1, 100, 101, 200, 201, 2, 3, 102, 103, 202, 203])
    blocks = [0, 1, 2, 3, 100, 101, 102, 103, 200, 201, 202, 203]
    assert adapted.ungroup(grouped, 2).tolist() == blocks
    assert adapted.ungroup(grouped[:, None], 2)[:, 0].tolist() == blocks
