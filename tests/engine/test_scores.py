"""Scores of prompts: the log-probabilities of the model's own distribution in each place, beside running streams."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from djl_python_neuronx.backends.base import Want
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.detokenizer import TextStream, Token
from djl_python_neuronx.engine.limits import check
from djl_python_neuronx.engine.speculation import NgramProposer
from djl_python_neuronx.errors import (
    PromptTooLongError,
    RequestError,
    StepError,
    UnsupportedParameterError,
)
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.types import FinishReason, GenerationRequest, Scored, TokenOutput
from tests.doubles.toy_backend import ToyBackend, toy_logits
from tests.doubles.toy_tokenizer import TOKENIZER
from tests.engine.modes import DEVICE_ADDS, LENGTH, MODES, SPEC, VERIFIES, Mode, alone
from tests.engine.steps import (
    LateResults,
    across_the_border,
    assert_clean,
    come_and_go,
    request,
    run,
    tokens,
)

ALL = Want.LOGITS | Want.ALL_LOGITS
CASES = {
    **MODES,
    "prefills": Mode(replace(SPEC, outputs=ALL, score_columns=3, max_prefill_batch=2)),
    "prefills of one token": Mode(replace(SPEC, outputs=ALL, score_columns=1)),
    "prefills and lookup": Mode(
        replace(VERIFIES, score_columns=8), lambda: NgramProposer(VERIFIES, 3)
    ),
}


def reference(prompt: Sequence[int], vocab_size: int, most: int) -> list[tuple[int, float, list]]:
    """Rank, log-probability and the likeliest tokens of each token of a prompt but the first, by their definitions."""
    found = []
    for place in range(1, len(prompt)):
        logits = toy_logits(np.array(prompt[:place]), vocab_size).astype(np.float64)
        scores = logits - np.log(np.exp(logits).sum())
        best = np.argsort(-scores, kind="stable")[:most]
        rank = int((scores >= scores[prompt[place]]).sum())
        found.append((rank, scores[prompt[place]], [(int(i), scores[i]) for i in best]))
    return found


@pytest.mark.parametrize("name", CASES)
def test_scores_in_batches_are_those_of_each_prefix(name: str) -> None:
    case, draw = CASES[name], random.Random(name)
    backend = ToyBackend(case.spec, device_adds=DEVICE_ADDS)
    engine = Engine(backend, proposer=case.proposer())
    late = LateResults(engine, backend, lambda: draw.random() < 0.5)
    asked: list[GenerationRequest] = []
    for most in (None, 0, 2, None, 3) * 8:
        # Longer than any bucket, if it is scored.
        prompt = [draw.randint(3, 8) for _ in range(draw.randint(1, 8 if most is None else 20))]
        params = draw.choice([SamplingParams(), SamplingParams(temperature=0.8, seed=11)])
        length = LENGTH if most is None else draw.choice([0, 1, LENGTH])
        one = GenerationRequest(str(len(asked)), prompt, params, length, scores_prompt=most)
        check(one, case.spec)
        asked.append(one)
    arrivals = [draw.randrange(60) for _ in asked]
    found: dict[str, list[TokenOutput]] = defaultdict(list)
    for turn in range(3000):
        come_and_go(engine, turn, asked, arrivals, {})
        outputs = late.step().outputs
        over = turn > 60 and not engine.has_work
        for output in [*outputs, *(late.last_outputs() if over else [])]:
            assert output.error is None, output.error
            found[output.request_id].append(output)
        if over:
            break
    assert_clean(engine, backend)
    for one in asked:
        outputs = found[one.request_id]
        length = one.max_new_tokens or 0
        assert tokens(outputs) == alone(one, case.spec)[:length]
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        scored = [token for output in outputs for token in scores_of(one, output)]
        if one.scores_prompt is None:
            assert not scored
            continue
        exact = reference(one.prompt_ids, case.spec.vocab_size, one.scores_prompt)
        assert [token.id for token in scored] == list(one.prompt_ids[1:])
        assert [token.rank for token in scored] == [rank for rank, _, _ in exact]
        for token, (_, logprob, likeliest) in zip(scored, exact, strict=True):
            assert token.logprob == pytest.approx(logprob, abs=1e-5)
            assert [other.id for other in token.top] == [i for i, _ in likeliest]
            assert [other.logprob for other in token.top] == pytest.approx(
                [score for _, score in likeliest], abs=1e-5
            )


def scores_of(one: GenerationRequest, output: TokenOutput) -> tuple[Token, ...]:
    """The prompt's tokens of an output, as the front gets them."""
    delta = TextStream(one, TOKENIZER).feed(across_the_border(output))
    assert delta is not None
    assert not (delta.prompt and (delta.tokens or delta.text or delta.finished))
    return delta.prompt


def test_a_prompt_is_scored_in_chunks_between_the_decodes_of_others() -> None:
    backend = ToyBackend(replace(SPEC, outputs=ALL, score_columns=3, max_prefill_batch=2))
    engine = Engine(backend)
    engine.add(request("stream", [5, 6], 9))
    engine.step()
    engine.add(request("scored", [5] * 8, 0, scores_prompt=0))
    engine.add(request("other", [7, 8], 1))
    run(engine)
    kinds = [(step.kind, step.starts, step.lens) for step in backend.steps[1:]]
    prefills = [(starts, lens) for kind, starts, lens in kinds if kind == "prefill"]
    assert prefills == [((0,), (3,)), ((3,), (3,)), ((0,), (2,)), ((6,), (2,))]
    assert [kind for kind, _, _ in kinds[:8]] == ["decode", "prefill"] * 4


def test_a_prompt_without_finite_logits_costs_its_request_alone() -> None:
    class Damaged(ToyBackend):
        def run(self, step):  # type: ignore[no-untyped-def]
            output = super().run(step)
            for place, (_, rows) in enumerate(step.parts):
                assert place == 0
                output.logits[(rows.slots == 1) & (rows.starts + rows.lens > 2)] = np.nan
            return output

    for columns in (0, 2, 8):
        backend = Damaged(replace(SPEC, outputs=ALL, score_columns=columns))
        engine = Engine(backend)
        engine.add(request("stream", [5, 6], 9))
        engine.add(request("scored", [5] * 8, 3, scores_prompt=1))
        outputs = run(engine)
        assert len(tokens(outputs["stream"])) == 9
        assert isinstance(outputs["scored"][-1].error, StepError)
        assert [one.finish_reason for one in outputs["scored"]].count(FinishReason.ERROR) == 1
        assert not tokens(outputs["scored"])
        assert_clean(engine, backend)


def test_scores_that_another_engine_gives_again_are_left_out() -> None:
    stream = TextStream(GenerationRequest("r", [5, 6, 7, 8], scores_prompt=0), TOKENIZER)

    def feed(start: int, *ids: int) -> list[tuple[int, float | None]]:
        scored = Scored(start, ids, [1] * len(ids))
        output = TokenOutput("r", (), logprobs=[-float(one) for one in ids], scored=scored)
        delta = stream.feed(output)
        assert delta is not None
        return [(token.id, token.logprob) for token in delta.prompt]

    assert feed(1, 6) == [(6, -6.0)]
    assert stream.lacks_scores
    assert feed(1, 6, 7) == [(7, -7.0)]
    assert feed(1, 6) == []
    assert feed(2, 7, 8) == [(8, -8.0)]
    assert not stream.lacks_scores


def test_limits_of_prompts_that_are_scored() -> None:
    spec = replace(SPEC, max_model_len=12)
    for length in (0, 1, None):
        check(request("a", [5] * 11, length, scores_prompt=0), spec)
    with pytest.raises(PromptTooLongError, match=r"at most 11 \(n_positions 12\); shorten"):
        check(request("a", [5] * 12, 0, scores_prompt=0), spec)
    with pytest.raises(RequestError, match="max_new_tokens is 0"):
        check(request("a", [5], 0), spec)
    device = replace(spec, outputs=Want.TOKENS, largest_top_k=64)
    with pytest.raises(UnsupportedParameterError, match=r"prompt_logprobs.*on_device_generation"):
        check(request("a", [5], 0, scores_prompt=0), device)
