"""Asynchronous execution: the library runs a step ahead, and every answer is the one that its request gets alone."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch", reason="the nxdi backend needs torch")
pytest.importorskip("transformers", "4.57", reason="the nxdi backend needs transformers 4.57")

import torch

from djl_python_neuronx.backends.base import Float32Array, Step, Want
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.sampler import Sampler
from djl_python_neuronx.engine.warmup import warm_up
from djl_python_neuronx.errors import StepError
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.types import GenerationRequest
from tests.backends.double_traffic import folder_of
from tests.backends.nxdi_plans import loaded, nxdi_plan
from tests.doubles import nxdi_double
from tests.doubles.device_driver import make_rows
from tests.doubles.tiny_models import load_reference, save_tiny_model
from tests.doubles.toy_backend import toy_logits

DECODES = "token_generation_model"


class Case(NamedTuple):
    backend: Any
    logits: Callable[[list[int]], Float32Array]
    """float32[V] after these tokens, of the same model by other means."""
    graphs: Callable[[], list[tuple[str, int]]]
    """The graphs that the device has run so far."""

    def alone(self, one: GenerationRequest) -> list[int]:
        """The tokens of a request, with nothing beside it."""
        assert one.max_new_tokens is not None
        sampler = Sampler(1, self.backend.spec.vocab_size)
        sampler.assign(0, one.sampling, one.prompt_ids, one.sampling.seed or 0)
        ids, slots = list(one.prompt_ids), np.zeros(1, np.int32)
        while len(ids) < min(len(one.prompt_ids) + one.max_new_tokens, 48):
            ids += sampler.sample(self.logits(ids)[None], slots, np.array([len(ids)])).tolist()
        return ids[len(one.prompt_ids) :]

    def decodes(self) -> int:
        return sum(model == DECODES for model, _ in self.graphs())


@pytest.fixture(
    scope="module",
    params=[
        "double continuous",
        "double static",
        pytest.param("rig continuous", marks=pytest.mark.nxdi),
        pytest.param("rig static", marks=pytest.mark.nxdi),
    ],
)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    library, joins = request.param.split()
    folder = tmp_path_factory.mktemp(library)
    log = folder / "rig.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        if library == "double":
            made = nxdi_double.install(patch)
            (folder / "model.safetensors").write_text("")
            folder_of(folder, "llama")
        else:
            patch.setenv("NXDI_RIG_LOG", str(log))
            save_tiny_model("llama", folder)
            model = load_reference(folder)
        plan = nxdi_plan(
            folder,
            continuous=joins == "continuous",
            prefill_buckets=(8, 34 if joins == "continuous" else 47),
            on_device_generation={"do_sample": True, "dynamic": True, "global_top_k": 16},
            async_execution=True,
            output_logits=True,
        )

        def logits(ids: list[int]) -> Float32Array:
            if library == "double":
                return toy_logits(np.array(ids), backend.spec.vocab_size)
            with torch.inference_mode():
                found: Float32Array = model(torch.tensor([ids])).logits[0, -1].numpy()
            return found

        def graphs() -> list[tuple[str, int]]:
            if library == "double":
                return [(call[0], call[1]) for call in made[-1].calls]
            calls = [json.loads(line) for line in log.read_text().splitlines()]
            return [(one["model"], one["bucket"]) for one in calls if one["event"] != "compile"]

        with loaded(plan) as backend:
            yield Case(backend, logits, graphs)


def request(name: str, prompt: list[int], count: int, **fields: Any) -> GenerationRequest:
    return GenerationRequest(name, prompt, max_new_tokens=count, ignore_eos=True, **fields)


def test_warm_up_runs_every_decode_graph(case: Case) -> None:
    assert warm_up(Engine(case.backend)) == ()
    assert len({graph for graph in case.graphs() if graph[0] == DECODES}) == 2


ON_DEVICE: list[dict[str, Any]] = [{}, {"sampling": SamplingParams(temperature=5.0, top_k=1)}]
ON_HOST: list[dict[str, Any]] = [
    {"logprobs": True},
    {"sampling": SamplingParams(temperature=2.0, seed=4)},
    {"sampling": SamplingParams(repetition_penalty=3.0)},
]


@pytest.mark.parametrize("seed", range(4))
def test_any_traffic_gives_what_each_gets_alone(case: Case, seed: int) -> None:
    """Arrivals, lengths, ends, cancels, slots and tokens that are known at random; odd seeds have rows for the host."""
    choose = random.Random(seed)
    engine = Engine(case.backend, decode_interleave=choose.choice([1, 2]))
    asked: dict[str, GenerationRequest] = {}
    arrivals, given_up, wanted = {}, {}, {}
    for name in "abcdefghij":
        prompt = [choose.randrange(2, 97) for _ in range(choose.choice([1, 2, 7, 20]))]
        kind = choose.choice([*ON_DEVICE, *ON_HOST] if seed % 2 else ON_DEVICE)
        asked[name] = one = request(name, prompt, choose.choice([1, 5, 30]), **kind)
        wanted[name] = case.alone(one)
        if choose.random() < 0.5:
            num_given = choose.randrange(len(wanted[name]))
            asked[name] = replace(one, given_ids=wanted[name][:num_given])
            del wanted[name][:num_given]
        arrivals[name] = choose.randrange(60)
        if choose.random() < 0.3:
            given_up[name] = arrivals[name] + choose.randrange(12)
    found: dict[str, list[int]] = defaultdict(list)
    for turn in range(1000):
        for name, one in asked.items():
            if arrivals[name] == turn:
                engine.add(one)
            if given_up.get(name) == turn:
                engine.abort(name)
        if turn > 72 and not engine.has_work:
            break
        for output in engine.step().outputs:
            assert output.error is None, output.error
            found[output.request_id] += output.token_ids
    for name, alone in wanted.items():
        assert found[name] == (alone[: len(found[name])] if name in given_up else alone), name


def test_a_steady_decode_runs_each_step_once(case: Case) -> None:
    """Two executions are dropped: the one that is ahead at the end of a bucket, and at the end of the sequence."""
    for fields, dropped in (({}, 2), ({"logprobs": True}, 0)):
        engine = Engine(case.backend)
        engine.add(request("a", [5, 6, 7], 31, **fields))
        engine.step()
        before = case.decodes()
        places: Counter[str | None] = Counter()
        while engine.has_work:
            info = engine.step().info
            places[info and info.place] += 1
        assert places == {"host" if fields else "device": 30}
        assert case.decodes() - before == 30 + dropped


def test_a_step_ahead_with_other_inputs_is_dropped(case: Case) -> None:
    """Each decode writes position 3 to 5 again: the device's token, another one, or after another one."""
    prompt, slot = [5, 6, 7], 2
    case.backend.acquire(slot, prompt, 0)
    case.backend.run(Step(prefill=make_rows({slot: prompt}, wants=Want.TOKENS)))

    def decode(*ids: int) -> int:
        """The token after the prompt and `ids`, of which the last is new."""
        rows = make_rows({slot: ids[-1:]}, {slot: len(prompt) + len(ids) - 1}, Want.TOKENS)
        token: int = case.backend.run(Step(decode=rows)).ids.item()
        assert [token] == case.alone(request("a", [*prompt, *ids], 1)), ids
        return token

    second = decode(9)
    third = decode(9, second)
    for ids in ((9, 11), (9, second), (9, second), (9,), (9, second), (9, second, third), (8,)):
        decode(*ids)
    case.backend.release([slot])


def test_a_call_that_fails_harms_no_later_request(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fifth call runs, with a step ahead, and its answer is lost."""
    one = request("a", [5, 6, 7], 9)
    alone = case.alone(one)
    engine = Engine(case.backend)
    engine.add(one)
    for _ in range(4):
        engine.step()
    calls = case.backend._model
    application = calls.application
    assert application.prior_outputs is not None

    def loses(**inputs: Any) -> None:
        application(**inputs)
        message = "the answer is lost"
        raise RuntimeError(message)

    with monkeypatch.context() as patch:
        patch.setattr(calls, "application", loses)
        (output,) = engine.step().outputs
    assert isinstance(output.error, StepError)
    for name in "bc":
        engine.add(replace(one, request_id=name))
    found: dict[str, list[int]] = defaultdict(list)
    while engine.has_work:
        for output in engine.step().outputs:
            found[output.request_id] += output.token_ids
    assert found == {"b": alone, "c": alone}
