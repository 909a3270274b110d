"""The adapter of NxD Inference where the library is not: how it drives it, and that the stand-in is like it."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import random
import sys
from concurrent import futures
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the nxdi backend needs torch")
pytest.importorskip("transformers", "4.57", reason="the nxdi backend needs transformers 4.57")

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from djl_python_neuronx import backends
from djl_python_neuronx.backends import env, nxdi
from djl_python_neuronx.backends.base import Backend, Step, Want
from djl_python_neuronx.backends.nxdi import fused
from djl_python_neuronx.backends.nxdi.model import rolls
from djl_python_neuronx.backends.nxdi.nan import Mender
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.limits import check
from djl_python_neuronx.engine.sequence import Sequence as Running
from djl_python_neuronx.engine.warmup import warm_up
from djl_python_neuronx.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    BackendUnavailableError,
    CompileError,
    DeviceMemoryError,
    StepError,
    UnsupportedParameterError,
)
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.types import GenerationRequest
from tests.backends.double_traffic import VOCAB_SIZE, assert_expected, folder_of
from tests.backends.nxdi_plans import loaded, nxdi_plan
from tests.doubles import nxdi_double
from tests.doubles.device_driver import make_rows
from tests.doubles.tiny_models import poison, save_tiny_model
from tests.doubles.toy_backend import expected

POISON = 95
"""No prompt of these tests makes the model choose it: a step ahead would write it."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_text("")
    return folder_of(tmp_path, "llama")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return nxdi_double.install(monkeypatch)


WAYS: dict[str, dict[str, Any]] = {
    "continuous": {},
    "static": {"continuous": False},
    "few rows": {"token_generation_batches": [1, 2]},
    "one slot": {"num_slots": 1},
}
DRAFTS = {
    "ngram_prompt_lookup_max": 2,
    "speculative_length": 3,
    "facts": {"num_speculative_tokens": 3},
}
"""A graph that verifies three drafts, beside that of a decode."""
DYNAMIC = {"do_sample": True, "dynamic": True, "global_topk": 8}


def answers(backend: Backend, asked: dict[str, tuple[int, list[int], int]]) -> dict[str, list[int]]:
    """The tokens of requests: name -> the step at which it comes, its prompt, and how many it wants."""
    engine, found = Engine(backend), dict[str, list[int]]()
    for turn in range(100):
        for request_id, (arrival, prompt, count) in asked.items():
            if turn == arrival:
                engine.add(GenerationRequest(request_id, prompt, max_new_tokens=count))
        for output in engine.step().outputs:
            assert output.error is None, output.error
            found.setdefault(output.request_id, []).extend(output.token_ids)
    return found


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", WAYS)
def test_any_traffic_gives_what_each_gets_alone(
    folder: Path, made: list[Any], name: str, seed: int
) -> None:
    with loaded(nxdi_plan(folder, **WAYS[name])) as backend:
        assert_expected(backend, seed)


class Guesser:
    """Proposes tokens that are right in part."""

    runner = None

    def propose(self, sequences: list[Running], counts: list[int], _: object) -> list[list[int]]:
        return [
            [
                token if (token + count) % 4 else POISON
                for token in expected(one.tokens_from(0), max(count, 0), vocab_size=VOCAB_SIZE)
            ]
            for one, count in zip(sequences, counts, strict=True)
        ]

    def release(self, slot: int) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize("num_slots", [1, 4])
def test_drafts_give_what_each_gets_alone(folder: Path, made: list[Any], num_slots: int) -> None:
    """In batches with joins, slots that are taken again, and up to the last position of a slot."""
    with loaded(nxdi_plan(folder, num_slots, **DRAFTS)) as backend:
        assert backend.spec.num_speculative_tokens == 3
        assert_expected(backend, 0, proposer=Guesser())
    application = made[-1]
    verifying = {i for i, graph in enumerate(application.graphs) if graph[0] == nxdi_double.SPEC}
    assert len(verifying) == 2
    assert {call[1] for call in application.calls} >= verifying


@pytest.mark.parametrize("name", WAYS)
def test_tokens_of_the_device_are_taken_as_they_are(
    folder: Path, made: list[Any], name: str
) -> None:
    with loaded(nxdi_plan(folder, on_device_sampling_config=DYNAMIC, **WAYS[name])) as backend:
        assert (backend.spec.outputs, backend.spec.largest_top_k) == (Want.TOKENS, 8)
        assert_expected(backend, 1)


@pytest.mark.parametrize("name", ["continuous", "static"])
def test_a_row_is_drawn_with_its_own_parameters(folder: Path, made: list[Any], name: str) -> None:
    """Of prompts and decodes, also where the slot had others before."""
    with loaded(nxdi_plan(folder, on_device_sampling_config=DYNAMIC, **WAYS[name])) as backend:
        for slot in (0, 1):
            backend.acquire(slot, [5, 6, 7], 0)
        for ids, start in (([5, 6, 7], 0), ([9], 3)):
            history = np.array([5, 6, 7, 9][: start + len(ids)])
            best = np.argsort(-nxdi_double.toy_logits(history, VOCAB_SIZE)).tolist()
            together = start > 0 or backend.spec.max_prefill_batch > 1
            for hot in (0, 1):
                steps = []
                for slots in [(0, 1)] if together else [(0,), (1,)]:
                    rows = make_rows(
                        dict.fromkeys(slots, ids), dict.fromkeys(slots, start), Want.TOKENS
                    )
                    rows.sampling[rows.slots == hot] = (4, 1, 100)
                    steps.append(Step(decode=rows) if start else Step(prefill=rows))
                drawn = [
                    [token for step in steps for token in backend.run(step).ids[:, 0].tolist()]
                    for _ in range(40)
                ]
                assert {row[1 - hot] for row in drawn} == {best[0]}
                assert 1 < len({row[hot] for row in drawn}) <= 4
                assert {row[hot] for row in drawn} <= {*best[:4]}
        rows.sampling[0, 1] = 0.9
        with pytest.raises(StepError, match="top_p"):
            backend.run(Step(decode=rows))


def test_a_row_is_drawn_with_the_parameters_that_are_compiled(
    folder: Path, made: list[Any]
) -> None:
    """The graph takes them with each call."""
    fixed = {"do_sample": True, "top_k": 4, "temperature": 100.0}
    best = np.argsort(-nxdi_double.toy_logits(np.array([5, 6, 7, 9]), VOCAB_SIZE))[:4].tolist()
    with loaded(nxdi_plan(folder, on_device_sampling_config=fixed)) as backend:
        for _ in range(2):
            backend.acquire(0, [5, 6, 7], 0)
            backend.run(Step(prefill=make_rows({0: [5, 6, 7]}, wants=Want.TOKENS)))
            step = Step(decode=make_rows({0: [9]}, {0: 3}, Want.TOKENS))
            drawn = {backend.run(step).ids.item() for _ in range(40)}
            assert len(drawn) > 1
            assert drawn <= {*best}
            backend.release([0])


@pytest.mark.parametrize(
    ("sampling", "facts", "wanted"),
    [
        (None, {}, (None, None, None)),
        ({"do_sample": False, "top_k": 5}, {}, ((1, 1, 1), None, None)),
        ({"do_sample": True, "top_k": 5, "temperature": 3.0}, {}, ((5, 1, 3), None, None)),
        (DYNAMIC, {}, (None, 8, None)),
        (DYNAMIC, {"default_top_k": "global_top_k"}, (None, 8, 8)),
        ({**DYNAMIC, "global_topk": 2 * VOCAB_SIZE}, {}, (None, VOCAB_SIZE, None)),
    ],
)
def test_what_the_device_samples_with_is_told(
    folder: Path, made: list[Any], sampling: Any, facts: dict[str, Any], wanted: Any
) -> None:
    with loaded(nxdi_plan(folder, on_device_sampling_config=sampling, facts=facts)) as backend:
        spec = backend.spec
        assert (spec.fixed_sampling, spec.largest_top_k, spec.default_top_k) == wanted
        if sampling == DYNAMIC:
            for temperature, served in ((0.01, True), (100.0, True), (101.0, False)):
                params = SamplingParams(temperature=temperature, top_k=3)
                with nullcontext() if served else pytest.raises(UnsupportedParameterError):
                    check(GenerationRequest("r", [5, 6, 7], params), spec)


@pytest.mark.parametrize(
    ("settings", "field", "wanted"),
    [
        ({"sliding_window": 48}, "sliding_window", None),
        ({"sliding_window": 47}, "sliding_window", 47),
        ({"hidden_act": "swish"}, "hidden_act", "silu"),
    ],
)
def test_a_configuration_is_translated_for_the_library(
    tmp_path: Path, made: list[Any], settings: dict[str, Any], field: str, wanted: Any
) -> None:
    (tmp_path / "model.safetensors").touch()
    plan = nxdi_plan(folder_of(tmp_path, "mistral", **settings), prefill_buckets=(46,))
    with loaded(plan):
        assert getattr(made[-1].config, field) == wanted


def test_linear_positions_are_those_of_transformers_by_another_name(
    tmp_path: Path, made: list[Any]
) -> None:
    (tmp_path / "model.safetensors").touch()
    linear = {"rope_type": "linear", "factor": 4.0}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "rope_theta": 10000.0}
    with loaded(nxdi_plan(folder_of(tmp_path, "llama", **sizes, rope_scaling=linear))):
        given = made[-1].config.rope_scaling
    frequencies = []
    for scaling in (linear, given):
        parameters = {**scaling, "rope_theta": sizes["rope_theta"]}
        config = LlamaConfig(**sizes, rope_scaling=parameters)
        config.rope_parameters = parameters  # transformers 5
        frequencies.append(ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, None)[0].tolist())
    assert given["rope_type"] == "llama3"
    assert frequencies[0] == frequencies[1]


def test_what_no_graph_takes_is_refused(folder: Path, made: list[Any]) -> None:
    with loaded(nxdi_plan(folder)) as backend:
        for slot in (0, 1):
            backend.acquire(slot, [5, 6, 7], 0)
        backend.run(Step(prefill=make_rows({0: [5, 6, 7]})))
        with pytest.raises(StepError, match=r"2 prompts; expected at most 1"):
            backend.run(Step(prefill=make_rows({0: [8, 9], 1: [5, 6, 7]}, {0: 3})))
        with pytest.raises(StepError, match="a decode of 2 columns; expected 1 for each row"):
            backend.run(Step(decode=make_rows({0: [8, 9]}, {0: 3})))
    with pytest.raises(StepError, match="the nxdi backend is closed"):
        backend.run(Step(decode=make_rows({0: [8]}, {0: 3})))


def test_a_static_decode_is_one_call_until_a_prefill_fails(folder: Path, made: list[Any]) -> None:
    with loaded(nxdi_plan(folder, continuous=False)) as backend:
        backend.acquire(0, [5, 6, 7], 0)
        backend.run(Step(prefill=make_rows({0: [5, 6, 7]})))
        calls = made[-1].calls
        for start, tags in ((3, [nxdi_double.TKG]), (4, [nxdi_double.CTE]), (5, [nxdi_double.TKG])):
            if start == 4:
                made[-1].fail = RuntimeError("nrt_execute status=1003")
                backend.acquire(1, [8, 9], 0)
                with pytest.raises(StepError):
                    backend.run(Step(prefill=make_rows({1: [8, 9]})))
                backend.release([1])
            before = len(calls)
            output: Any = backend.run(Step(decode=make_rows({0: [9]}, {0: start})))
            assert [tag for tag, *_ in calls[before:]] == tags
            seen = np.array([5, 6, 7, *[9] * (start - 2)])
            assert (output.logits[0, 0] == nxdi_double.toy_logits(seen, VOCAB_SIZE)).all()


@pytest.mark.parametrize("name", WAYS)
def test_warm_up_runs_every_graph_once_and_the_library_s_does_not_run(
    folder: Path, made: list[Any], name: str
) -> None:
    with loaded(nxdi_plan(folder, prefill_buckets=(8, 47), **WAYS[name])) as backend:
        assert warm_up(Engine(backend)) == ()
    application = made[-1]
    assert not application.warmed
    assert {call[1] for call in application.calls} == set(range(len(application.graphs)))


def test_the_environment_is_left_as_it_was(folder: Path, made: list[Any]) -> None:
    before = dict(os.environ)
    backends.get("nxdi").load(nxdi_plan(folder))
    assert dict(os.environ) == before


def test_a_missing_library_is_named_with_the_way_to_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, nxdi_double.PACKAGE, None)
    with pytest.raises(BackendUnavailableError, match=r"cannot be imported.*setup guide"):
        backends.get("nxdi").load(nxdi_plan(folder))


def test_more_cores_than_the_process_has_are_refused_before_the_library_is_used(
    folder: Path, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env._Runtime, "limit", None)
    monkeypatch.delenv("NEURON_RT_NUM_CORES", raising=False)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-2")
    with pytest.raises(
        BackendUnavailableError, match="4 NeuronCores are needed, and NEURON_RT_VISIBLE_CORES=0-2"
    ):
        backends.get("nxdi").load(nxdi_plan(folder, tp=2, pp_degree=2))
    assert made == []


def test_physical_cores_per_core_are_those_of_the_option(
    folder: Path, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
    with loaded(nxdi_plan(folder, logical_nc_config=2)):
        assert made[-1].neuron_config.logical_nc_config == 2
    assert "NEURON_LOGICAL_NC_CONFIG" not in os.environ


def test_a_failed_compile_ends_with_the_compiler_s_lines_and_leaves_no_folder(
    folder: Path, made: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(self: Any, compiled_model_path: str, **_: object) -> None:
        work = Path(os.environ["BASE_COMPILE_WORK_DIR"]) / "token_generation_model/_tp0_bk1"
        work.mkdir(parents=True)
        (work / "log-neuron-cc.txt").write_text("ERROR [NCC_EBVF030] too many instructions")
        raise RuntimeError("Failed compilation with ['neuronx-cc', 'compile']")

    monkeypatch.setattr(nxdi_double.NeuronLlamaForCausalLM, "compile", fail)
    target = tmp_path / "compiled"
    target.mkdir()
    with pytest.raises(
        CompileError, match=r"_tp0_bk1/log-neuron-cc.txt:\n.*too many instructions$"
    ):
        nxdi.compile(nxdi_plan(folder), target)
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("most", [0, 3])
def test_as_many_compilers_as_the_plan_says(
    folder: Path, made: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, most: int
) -> None:
    """The library's pool names no number; one that does keeps it."""
    seen: list[int] = []

    def look(self: Any, compiled_model_path: str, **_: object) -> None:
        seen.append(futures.ThreadPoolExecutor()._max_workers)
        seen.append(futures.ThreadPoolExecutor(max_workers=9)._max_workers)

    usual = futures.ThreadPoolExecutor()._max_workers
    monkeypatch.setattr(nxdi_double.NeuronLlamaForCausalLM, "compile", look)
    nxdi.compile(replace(nxdi_plan(folder), compile_workers=most), tmp_path)
    assert seen == [most or usual, 9]
    assert futures.ThreadPoolExecutor()._max_workers == usual


def test_graphs_of_other_shapes_end_the_start(
    folder: Path, made: list[Any], tmp_path: Path
) -> None:
    """The library loads them, and its own warm-up would log the error alone."""
    target = tmp_path / "compiled"
    target.mkdir()
    nxdi.compile(nxdi_plan(folder), target)
    with (
        loaded(nxdi_plan(folder, token_buckets=(32, 48)), target) as backend,
        pytest.raises(StepError, match=r"not found in input_shape_map.*Compile it again"),
    ):
        warm_up(Engine(backend))


def test_weights_that_are_divided_later_need_no_second_compile_and_no_checkpoint(
    folder: Path, made: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, whole = tmp_path / "compiled", tmp_path / "whole"
    compiled.mkdir()
    whole.mkdir()
    plan = nxdi_plan(folder, tp=2)
    divided = replace(plan, presharded=True)
    nxdi.compile(divided, whole)
    nxdi.compile(plan, compiled)
    assert not (compiled / "weights").exists()
    with monkeypatch.context() as patch:
        patch.delattr(nxdi_double.NeuronLlamaForCausalLM, "compile")
        nxdi.compile(divided, compiled)
    for target in (compiled, whole):
        config = json.loads((target / nxdi_double.CONFIG).read_text())
        assert config["neuron_config"]["save_sharded_checkpoint"] is True
        assert len(list((target / "weights").iterdir())) == 2
        assert (target / nxdi_double.GRAPHS).is_file()
    for path in (*folder.glob("*.safetensors"), folder / "config.json"):
        path.unlink()
    with loaded(replace(plan, kind="ranks"), compiled) as backend:
        assert made[-1].neuron_config.save_sharded_checkpoint
        assert_expected(backend, 1)
    (compiled / nxdi_double.CONFIG).unlink()
    with pytest.raises(ArtifactNotFoundError, match=f"no config.json in {folder}; expected"):
        backends.get("nxdi").load(replace(plan, kind="ranks"), compiled)


@pytest.mark.parametrize(
    ("text", "kind", "fatal"),
    [
        ("nrt_execute status=1202 message=NRT_EXEC_HW_ERR_NC_UE", StepError, True),
        ("nrt_tensor_allocate status=4", DeviceMemoryError, False),
        ("nrt_execute status=1003", StepError, False),
    ],
)
def test_a_failed_call_fails_its_rows_alone(
    folder: Path, made: list[Any], text: str, kind: type[Exception], fatal: bool
) -> None:
    with loaded(nxdi_plan(folder)) as backend:
        engine = Engine(backend)
        made[-1].fail = RuntimeError(text)
        engine.add(GenerationRequest("a", [5, 6, 7], max_new_tokens=3))
        outputs = engine.step().outputs
        assert (engine.dead is not None) == fatal
        if not fatal:
            assert [type(output.error) for output in outputs] == [kind]
            assert_expected(backend, 1)


def test_a_start_whose_graph_fails_ends(folder: Path, made: list[Any]) -> None:
    with loaded(nxdi_plan(folder)) as backend:
        made[-1].fail = RuntimeError("nrt_execute status=1003")
        with pytest.raises(StepError, match="a prefill step of 1 rows failed"):
            warm_up(Engine(backend))


@pytest.fixture(params=["double", pytest.param("rig", marks=pytest.mark.nxdi)])
def poisoned(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A llama with a token that is not a number."""
    if request.param == "rig":
        save_tiny_model("llama", tmp_path)
        poison(tmp_path / "model.safetensors", POISON)
        return tmp_path
    nxdi_double.install(request.getfixturevalue("monkeypatch"), POISON)
    return request.getfixturevalue("folder")


def tokens_of(backend: Any, slot: int, prompt: list[int], fed: list[int]) -> list[int]:
    """One greedy request whose decodes are fed these tokens: what the device makes of each."""
    wants = Want.TOKENS if Want.TOKENS in backend.spec.outputs else Want.LOGITS
    backend.acquire(slot, prompt, 0)
    steps = [Step(prefill=make_rows({slot: prompt}, wants=wants))]
    for start, token_id in enumerate(fed, len(prompt)):
        steps.append(Step(decode=make_rows({slot: [token_id]}, {slot: start}, wants)))
    found = []
    for step in steps:
        output = backend.run(step)
        best = output.logits.argmax(axis=2) if wants == Want.LOGITS else output.ids
        found += best.ravel().tolist()
    backend.release([slot])
    return found


SAMPLED: dict[str, dict[str, Any]] = {
    "host": {},
    "greedy": {"on_device_sampling_config": {"do_sample": False}},
    "dynamic": {"on_device_sampling_config": DYNAMIC},
    "ahead": {"on_device_sampling_config": {"do_sample": False}, "async_execution": True},
    "dynamic with logits": {"on_device_sampling_config": DYNAMIC, "output_logits": True},
    "static": {"continuous": False},
    "static greedy": {"continuous": False, "on_device_sampling_config": {"do_sample": False}},
    "few rows": {"token_generation_batches": [1, 2]},
}


@pytest.mark.parametrize("name", SAMPLED)
def test_a_slot_recovers_from_what_is_not_a_number(poisoned: Path, name: str) -> None:
    """NaN beyond the next prompt's bucket: at position 15 of a prompt, and of decodes within and beyond all buckets."""
    with loaded(nxdi_plan(poisoned, **SAMPLED[name])) as backend:
        fed = [3 + i * i % 83 for i in range(40)]
        wanted = tokens_of(backend, 1, [5, 6, 7], fed)
        beside = tokens_of(backend, 0, [8, 9], fed[:5])
        assert len(set(wanted)) > 3
        for prompt, rest in (
            ([*fed[:15], POISON, *fed[16:18]], []),
            ([*fed[:15], POISON, *fed[16:18]], fed[:3]),
            ([5, 6, 7], [*fed[:12], POISON, *fed[13:16]]),
            ([5, 6, 7], [*fed[:26], POISON, *fed[27:30]]),
        ):
            spoiled = tokens_of(backend, 1, prompt, rest)
            assert len({*spoiled[-4:]} - {-1}) <= 1
            assert tokens_of(backend, 1, [5, 6, 7], fed) == wanted
        assert tokens_of(backend, 0, [8, 9], fed[:5]) == beside


@pytest.mark.parametrize("name", ["greedy", "dynamic", "ahead", "static greedy"])
def test_a_row_of_what_is_not_a_number_ends_alone(poisoned: Path, name: str) -> None:
    """Without logits. Its neighbours, one of which repeats a token, get what they get alone."""
    with loaded(nxdi_plan(poisoned, **SAMPLED[name])) as backend:
        fed = {0: [3 + i * i % 83 for i in range(20)], 2: [11] * 20}
        alone = {slot: tokens_of(backend, slot, [5, 6, 7], ids) for slot, ids in fed.items()}
        prompts = {0: [5, 6, 7], 1: [5, POISON, 7], 2: [5, 6, 7]}
        found: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for slot, prompt in prompts.items():
            backend.acquire(slot, prompt, 0)
            output = backend.run(Step(prefill=make_rows({slot: prompt}, wants=Want.TOKENS)))
            found[slot] += output.ids[-1:].ravel().tolist()
        for turn in range(20):
            live = {0: [fed[0][turn]], 2: [fed[2][turn]]}
            if found[1][-1] >= 0:
                live[1] = [found[1][-1]]
            elif turn == 10:
                backend.release([1])
            rows = make_rows(dict(sorted(live.items())), dict.fromkeys(live, 3 + turn), Want.TOKENS)
            output = backend.run(Step(decode=rows))
            for slot, ids in zip(sorted(live), output.ids, strict=True):
                found[slot].append(int(ids[0]))
        assert {slot: found[slot] for slot in alone} == alone
        assert len(set(found[1][:-1])) == 1
        assert len(found[1]) < 9
        assert found[1][-1] == -1


def test_a_static_neighbour_outlives_a_slot_that_is_cleared(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clearing a slot prefills all of them with nothing."""
    made = nxdi_double.install(monkeypatch, POISON)
    with loaded(nxdi_plan(folder, continuous=False)) as backend:
        tokens_of(backend, 1, [5, 6, 7], [*range(8, 20), POISON, 20])
        backend.acquire(0, [8, 9], 0)
        backend.run(Step(prefill=make_rows({0: [8, 9]})))
        calls = len(made[-1].calls)
        backend.acquire(1, [5, 6, 7], 0)
        assert len(made[-1].calls) > calls
        output: Any = backend.run(Step(decode=make_rows({0: [3]}, {0: 2})))
        wanted = nxdi_double.toy_logits(np.array([8, 9, 3]), VOCAB_SIZE)
        assert (output.logits[0, 0] == wanted).all()


def test_a_slot_in_doubt_costs_few_calls(
    folder: Path, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last two tokens are the same, as NaN has it; and after the first two of the vocabulary follows the same."""
    toy_logits = nxdi_double.toy_logits
    monkeypatch.setattr(
        nxdi_double, "toy_logits", lambda ids, size: toy_logits(np.where(ids == 1, 0, ids), size)
    )
    with loaded(nxdi_plan(folder, **SAMPLED["greedy"])) as backend:
        backend.acquire(1, [5, 6, 7], 0)
        backend.run(Step(prefill=make_rows({1: [5, 6, 7]}, wants=Want.TOKENS)))
        for start in [*range(3, 30), 29]:
            backend.run(Step(decode=make_rows({1: [3 + start]}, {1: start}, Want.TOKENS)))
        backend.release([1])
        calls = len(made[-1].calls)
        backend.acquire(1, [5, 6, 7], 0)
        assert [tag for tag, *_ in made[-1].calls[calls:]] == [nxdi_double.TKG] * 2


WINDOW = 7


@pytest.fixture
def ring(tmp_path: Path, made: list[Any]) -> Path:
    """A mistral whose cache is a ring: a step that is run again would read its own key in place of the oldest."""
    (tmp_path / "model.safetensors").write_text("")
    return folder_of(tmp_path, "mistral", sliding_window=WINDOW)


@pytest.mark.parametrize("name", SAMPLED)
def test_any_traffic_in_a_ring_gives_what_each_gets_alone(ring: Path, name: str) -> None:
    with loaded(nxdi_plan(ring, **SAMPLED[name])) as backend:
        warm_up(Engine(backend))
        assert_expected(backend, 3, WINDOW)


def answer_of(prompt: list[int], count: int) -> list[int]:
    return expected(prompt, count, vocab_size=VOCAB_SIZE, window=WINDOW)


@pytest.mark.parametrize("name", SAMPLED)
def test_a_slot_in_doubt_costs_no_neighbour_its_oldest_key(ring: Path, name: str) -> None:
    """A answers throughout; B ends with a token that comes twice, as with NaN, and C takes its slot."""
    draw, twice = random.Random(5), -1
    while twice < 8:  # beyond the columns of C's prompt
        second = draw.choices(range(1, VOCAB_SIZE), k=9)
        answer = answer_of(second, 12)
        twice = max((i for i in range(1, 12) if answer[i] == answer[i - 1]), default=-1)
    asked = {"a": (0, [5, 6, 7], 40), "b": (3, second, twice + 1), "c": (25, [8, 9], 20)}
    with loaded(nxdi_plan(ring, **SAMPLED[name])) as backend:
        found = answers(backend, asked)
    assert found == {name: answer_of(*one) for name, (_, *one) in asked.items()}


@pytest.mark.parametrize(
    ("model_type", "window", "wanted"),
    [("mistral", 7, True), ("mistral", None, False), ("gpt_oss", 7, True), ("qwen2", 7, False)],
)
def test_whose_cache_is_a_ring(model_type: str, window: int | None, wanted: bool) -> None:
    assert rolls(SimpleNamespace(model_type=model_type, sliding_window=window)) is wanted


@pytest.mark.usefixtures("made")
def test_a_decode_in_a_ring_leaves_no_live_slot_out(ring: Path) -> None:
    with loaded(nxdi_plan(ring)) as backend:
        for slot in (0, 2):
            backend.acquire(slot, [5, 6, 7], 0)
            backend.run(Step(prefill=make_rows({slot: [5, 6, 7]})))
        with pytest.raises(StepError, match=r"a decode of slots \[2\]; expected all that hold"):
            backend.run(Step(decode=make_rows({2: [8]}, {2: 3})))
        backend.release([0])
        backend.run(Step(decode=make_rows({2: [8]}, {2: 3})))


@pytest.mark.nxdi
def test_the_stand_in_takes_what_the_library_takes() -> None:
    config = importlib.import_module(f"{nxdi_double.PACKAGE}.models.config")
    model = importlib.import_module(f"{nxdi_double.PACKAGE}.models.llama.modeling_llama")
    adapter = importlib.import_module(f"{nxdi_double.PACKAGE}.utils.hf_adapter")
    double = nxdi_double.NeuronLlamaForCausalLM
    pairs = [
        (adapter.load_pretrained_config, nxdi_double.load_pretrained_config),
        (config.InferenceConfig.__init__, nxdi_double.InferenceConfig.__init__),
        *(
            (getattr(config.InferenceConfig, name), getattr(nxdi_double.InferenceConfig, name))
            for name in ("get_neuron_config_cls", "load", "save")
        ),
        *(
            (getattr(model.NeuronLlamaForCausalLM, name), getattr(double, name))
            for name in (
                *("compile", "load", "shard_weights", "forward", "reset"),
                *("get_config_cls", "get_neuron_config_cls"),
            )
        ),
    ]
    for real, mine in pairs:
        theirs, ours = (inspect.signature(entry).parameters for entry in (real, mine))
        assert list(ours) == list(theirs), real
        for name, parameter in ours.items():
            assert parameter.kind == theirs[name].kind
            # The library's is a list.
            assert parameter.default == theirs[name].default or name == "llava_args"
    for entry in nxdi_double.CONFIGS:
        made = vars(getattr(config, entry.__name__)())
        assert {name: made[name] for name in vars(entry())} == vars(entry())


@pytest.mark.nxdi
@pytest.mark.parametrize("name", ["continuous", "static", "few rows"])
def test_the_stand_in_is_called_as_the_library_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The same traffic: every call with the same graph, shapes, cache lines and positions."""
    options = WAYS[name]
    log = tmp_path / "log"
    log.touch()
    save_tiny_model("llama", tmp_path)
    monkeypatch.setenv("NXDI_RIG_LOG", str(log))
    with loaded(nxdi_plan(tmp_path, **options)) as backend:
        drive(backend)
    real = [json.loads(line) for line in log.read_text().splitlines()]
    wanted = [
        [each["model"], each["shapes"][:2], each["seq_ids"], list(np.ravel(each["pos"]))]
        for each in real
        if each["event"] == "run"
    ]
    with monkeypatch.context() as patch:
        made = nxdi_double.install(patch)
        with loaded(nxdi_plan(tmp_path, **options)) as backend:
            drive(backend)
    found = [[tag, shapes, lines, positions] for tag, _, shapes, lines, positions in made[-1].calls]
    assert len(found) > 60
    assert found == wanted


def drive(backend: Backend) -> None:
    """Requests whose number of tokens does not depend on what they are."""
    draw, engine = random.Random(1), Engine(backend)
    for turn in range(400):
        if turn % 7 == 0 and turn < 100:
            prompt = draw.choices(range(3, 90), k=draw.choice([1, 2, 8, 9, 19, 20]))
            engine.add(
                GenerationRequest(
                    str(turn), prompt, max_new_tokens=draw.randint(1, 28), ignore_eos=True
                )
            )
        engine.step()
    assert not engine.has_work


class LikeAt:
    """Calls with drafts on the device, after which tokens at multiples of a number are followed by the same one."""

    fused, prompt_buckets = True, (128,)
    spec = SimpleNamespace(vocab_size=96, max_model_len=256)
    application = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=2))

    def __init__(self, multiple: int) -> None:
        self.multiple = multiple

    def num_rows(self, slot: int) -> int:
        return slot + 1

    def decode_alone(self, token_id: int, *_: Any, **__: Any) -> Any:
        following = token_id % self.multiple
        return SimpleNamespace(logits=None, tokens=torch.tensor([[following, -1]]))


def test_few_tokens_that_are_followed_by_one_end_no_engine_with_drafts() -> None:
    def mend(multiple: int) -> None:
        mender = Mender(LikeAt(multiple), 0, np.array([0]), lambda _: {})  # type: ignore[arg-type]
        mender.mend(range(150, 160), lambda *_: None)

    mend(12)
    with pytest.raises(StepError, match="only another load removes") as caught:
        mend(1)
    assert caught.value.fatal


def test_a_reduced_vocabulary_keeps_each_of_its_tokens() -> None:
    """Tokens that the draft lacks never come before one that it has. Rows are orthogonal: each is its own likeliest."""
    head, ids = torch.eye(4), torch.tensor([3, 5, 6, 9])
    config: Any = SimpleNamespace(neuron_config=SimpleNamespace(is_eagle_draft=True), vocab_size=12)

    def likeliest(**weights: Any) -> list[int]:
        found = fused._renamed(
            {name.replace("__", "."): one for name, one in weights.items()}, config
        )
        return (head @ found["lm_head.weight"].T).argmax(-1).tolist()

    offsets = ids - torch.arange(4)
    assert likeliest(lm_head__weight=head, d2t=offsets) == ids.tolist()
    wrong = {"d2t": offsets}, {"lm_head__weight": head[:3], "d2t": offsets}
    for weights in (*wrong, {"lm_head__weight": head, "d2t": offsets + 9}):
        with pytest.raises(ArtifactError, match=r"d2t.*4 tokens"):
            likeliest(**weights)
