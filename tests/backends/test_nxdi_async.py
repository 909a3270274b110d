"""Asynchronous execution: the library runs a step ahead, and every answer is the one of Hugging Face."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from djl_python_neuronx.backends.base import Step, Want
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.sampler import Sampler
from djl_python_neuronx.errors import StepError
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.types import GenerationRequest
from tests.backends.nxdi_plans import loaded, nxdi_plan
from tests.device_driver import make_rows
from tests.tiny_models import VOCAB_SIZE, load_reference, save_tiny_model

pytestmark = pytest.mark.nxdi

DYNAMIC = {"do_sample": True, "dynamic": True, "global_top_k": 16}


class Case(NamedTuple):
    backend: Any
    reference: Any
    log: Path

    def runs(self) -> list[dict[str, Any]]:
        """The rig's calls of decode graphs since the last look."""
        found = [json.loads(line) for line in self.log.read_text().splitlines()]
        self.log.write_text("")
        return [one for one in found if one.get("model") == "token_generation_model"]

    def alone(self, one: GenerationRequest) -> list[int]:
        """The tokens of a request, from transformers' logits."""
        sampler = Sampler(1, VOCAB_SIZE)
        sampler.assign(0, one.sampling, one.prompt_ids, one.sampling.seed or 0)
        ids, slots = list(one.prompt_ids), np.zeros(1, np.int32)
        assert one.max_new_tokens is not None
        while len(ids) < min(len(one.prompt_ids) + one.max_new_tokens, 48):
            with torch.inference_mode():
                logits = self.reference(torch.tensor([ids])).logits[:, -1].numpy()
            ids += sampler.sample(logits, slots, np.array([len(ids)], np.int32)).tolist()
        return ids[len(one.prompt_ids) :]


@pytest.fixture(scope="module", params=["continuous", "static"])
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("async")
    log = folder / "rig.jsonl"
    directory = save_tiny_model("llama", folder / "model")
    plan = nxdi_plan(
        directory,
        continuous=request.param == "continuous",
        prefill_buckets=(8, 47),
        on_device_generation=DYNAMIC,
        async_execution=True,
        output_logits=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NXDI_RIG_LOG", str(log))
        with loaded(plan) as backend:
            yield Case(backend, load_reference(directory), log)


def request(name: str, prompt: list[int], count: int, **fields: Any) -> GenerationRequest:
    return GenerationRequest(name, prompt, max_new_tokens=count, ignore_eos=True, **fields)


KINDS: list[dict[str, Any]] = [
    {},
    {"sampling": SamplingParams(temperature=5.0, top_k=1)},
    {"logprobs": True},
    {"sampling": SamplingParams(temperature=2.0, seed=4)},
    {"sampling": SamplingParams(repetition_penalty=3.0)},
]


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic(case: Case, seed: int) -> None:
    """Arrivals, lengths, ends, cancels and slots at random; odd seeds have rows for the host."""
    choose = random.Random(seed)
    engine = Engine(case.backend, decode_interleave=choose.choice([1, 2]))
    case.runs()
    asked, arrivals, given_up = {}, {}, {}
    for i in range(12):
        prompt = [choose.randrange(2, VOCAB_SIZE) for _ in range(choose.choice([1, 2, 7, 20]))]
        kind = choose.choice(KINDS if seed % 2 else KINDS[:2])
        asked[str(i)] = request(str(i), prompt, choose.choice([1, 5, 30]), **kind)
        arrivals[str(i)] = choose.randrange(60)
        if choose.random() < 0.3:
            given_up[str(i)] = arrivals[str(i)] + choose.randrange(12)
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
    for name, one in asked.items():
        alone = case.alone(one)
        assert found[name] == (alone[: len(found[name])] if name in given_up else alone), name
    assert len(case.runs()) > 0


def test_a_steady_decode_runs_each_step_once(case: Case) -> None:
    """Two executions are dropped: the one that is ahead at the end of a bucket, and at the end of the sequence."""
    for fields, dropped in (({}, 2), ({"logprobs": True}, 0)):
        case.runs()
        engine = Engine(case.backend)
        engine.add(request("a", [5, 6, 7], 30, **fields))
        places = Counter()
        while engine.has_work:
            info = engine.step().info
            places[info and info.place] += 1
        assert places == {"host" if fields else "device": 30}
        assert len(case.runs()) == 29 + dropped


def test_a_step_ahead_with_other_inputs_is_dropped(case: Case) -> None:
    """Each decode writes position 3 or 4 again, with the device's token, another one, or other parameters."""
    prompt, slot = [5, 6, 7], 2
    case.backend.acquire(slot, prompt, 0)
    case.backend.run(Step(prefill=make_rows({slot: prompt}, wants=Want.TOKENS)))

    def decode(*ids: int) -> int:
        """The token after the prompt and `ids`, of which the last is new."""
        rows = make_rows({slot: ids[-1:]}, {slot: len(prompt) + len(ids) - 1}, Want.TOKENS)
        (token,) = case.backend.run(Step(decode=rows)).ids.ravel().tolist()
        assert [token] == case.alone(request("a", [*prompt, *ids], 1)), ids
        return token

    token = decode(9)
    for second in (token, 11, token, token):
        decode(9, second)
    decode(9)
    third = decode(9, token)
    decode(8)
    decode(9)
    decode(9, token)
    decode(9, token, third)
    case.backend.release([slot])


def test_a_call_that_fails_harms_no_later_request(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of the fourth decode do not arrive, while the next one runs."""
    one = request("a", [5, 6, 7], 9)
    alone = case.alone(one)
    engine = Engine(case.backend)
    engine.add(one)
    for _ in range(4):
        engine.step()
    model = case.backend._application
    assert model.prior_outputs is not None
    with monkeypatch.context() as patch:
        patch.setattr(type(model.prior_outputs), "sync_async_result_to_cpu", _fails)
        (output,) = engine.step().outputs
    assert isinstance(output.error, StepError)
    for name in ("b", "c"):
        engine.add(replace(one, request_id=name))
    found: dict[str, list[int]] = defaultdict(list)
    while engine.has_work:
        for output in engine.step().outputs:
            found[output.request_id] += output.token_ids
    assert found == {"b": alone, "c": alone}


def _fails(*given: object, **more: object) -> None:
    message = "the tokens are lost"
    raise RuntimeError(message)
