"""Sequences that go on behind tokens that were generated before: the rest is that of one run."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest

from djl_python_neuronx.backends.base import Want
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.limits import check
from djl_python_neuronx.errors import RequestError
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.types import FinishReason, GenerationRequest
from tests.doubles.toy_backend import ToyBackend, expected
from tests.engine.modes import DEVICE_ADDS, LENGTH, MODES, SPEC, Mode, alone
from tests.engine.steps import LateResults, assert_clean, come_and_go, request, run, tokens

PARAMETERS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=11),
    SamplingParams(temperature=1.5, top_k=20, top_p=0.9, seed=3),
    SamplingParams(temperature=1.2, repetition_penalty=1.6, seed=5),
    SamplingParams(presence_penalty=1.0, frequency_penalty=1.5, logit_bias=((7, 5.0), (8, 5.5))),
    SamplingParams(
        temperature=0.5,
        seed=7,
        typical_p=0.9,
        allowed_token_ids=tuple(range(10, 20)),
        bad_words=((12, 13), (14,)),
        no_repeat_ngram_size=2,
        begin_suppress_tokens=(15,),
    ),
)
CASES = {
    **MODES,
    "the device samples": Mode(replace(SPEC, outputs=Want.TOKENS, largest_top_k=64)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rest_is_that_of_one_run_wherever_it_begins(name: str) -> None:
    case, draw = CASES[name], random.Random(name)
    backend = ToyBackend(case.spec, device_adds=DEVICE_ADDS)
    engine = Engine(backend, proposer=case.proposer())
    late = LateResults(engine, backend, lambda: draw.random() < 0.5)
    asked: list[GenerationRequest] = []
    wanted: dict[str, list[int]] = {}
    for params in PARAMETERS if case.spec.has_logits else [SamplingParams()]:
        for num_given in range(LENGTH):
            prompt = [draw.randint(3, 8) for _ in range(draw.randint(1, 8))]
            whole = GenerationRequest(str(len(asked)), prompt, params, max_new_tokens=LENGTH)
            ids = alone(whole, case.spec)
            asked.append(replace(whole, given_ids=ids[:num_given]))
            check(asked[-1], case.spec)
            wanted[whole.request_id] = ids[num_given:]
    arrivals = [draw.randrange(60) for _ in asked]
    found: dict[str, list[int]] = defaultdict(list)
    for turn in range(3000):
        come_and_go(engine, turn, asked, arrivals, {})
        outputs = late.step().outputs
        if turn > 60 and not engine.has_work:
            outputs = outputs + late.last_outputs()
        for output in outputs:
            assert output.error is None, output.error
            found[output.request_id] += output.token_ids
        if turn > 60 and not engine.has_work:
            break
    assert found == wanted
    assert_clean(engine, backend)


def test_known_tokens_take_one_prefill_and_a_decode_for_each_that_it_does_not_hold() -> None:
    prompt = [5, 6, 7]
    ids = expected(prompt, LENGTH)
    for num_given in range(1, LENGTH):
        backend = ToyBackend(SPEC)
        engine = Engine(backend)
        engine.add(request("a", prompt, LENGTH, given_ids=ids[:num_given]))
        outputs = run(engine)["a"]
        prefilled = min(len(prompt) + num_given, SPEC.prefill_buckets[-1])
        starts = [step.starts for step in backend.steps]
        assert starts == [(0,), *((at,) for at in range(prefilled, len(prompt) + LENGTH - 1))]
        assert backend.steps[0].lens == (prefilled,)
        assert tokens(outputs) == ids[num_given:]
        assert [one.finish_reason for one in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_given_tokens_are_judged() -> None:
    spec = replace(SPEC, max_model_len=12)
    for fields in (
        {"given_ids": [1, 2, 3], "max_new_tokens": 3},
        {"given_ids": [1] * 7, "max_new_tokens": None},
        {"given_ids": [1, spec.vocab_size]},
        {"given_ids": [-1, 1]},
    ):
        with pytest.raises(RequestError, match="given_ids has"):
            check(request("a", [5] * 5, **fields), spec)  # type: ignore[arg-type]
    check(request("a", [5] * 5, None, given_ids=[1] * 6), spec)
