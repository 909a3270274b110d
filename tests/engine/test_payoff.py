"""Drafts that lose are switched off, on the engine's clock; each text stays as it is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from djl_python_neuronx.backends.base import Float32Array, Rows, Step, StepOutput, Want
from djl_python_neuronx.engine import payoff
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.grammars import Grammar, Grammars
from djl_python_neuronx.engine.payoff import CYCLE, FIRST, PART, TRIAL, Payoff
from djl_python_neuronx.engine.speculation import DraftModel, NgramProposer, Proposer
from djl_python_neuronx.grammar import checked
from djl_python_neuronx.types import EngineRequest
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend, expected
from tests.engine.modes import draft_toy
from tests.engine.steps import assert_clean, request

NUM_DRAFTS = 3
SPEC = replace(
    TOY_SPEC,
    max_model_len=2048,
    token_buckets=(),
    num_speculative_tokens=NUM_DRAFTS,
    outputs=Want.LOGITS | Want.ALL_LOGITS,
    eos_ids=frozenset(),
)


def judged(one: Payoff, plain_s: float, drafted_s: float, tokens: float) -> list[bool]:
    """The decodes up to the end of a trial, and of one that repeats it; True for those with drafts.

    Each takes and gives the same.
    """
    found = []
    for _ in range(CYCLE + TRIAL):
        found.append(one.drafts)
        if one.drafts:
            one.note(drafted_s, tokens)
        else:
            one.note(plain_s, 1.0)
        if one._left == CYCLE:
            break
    return found


def test_the_speeds_of_each_trial_decide_until_the_next_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Payoff()
    trial = ([False] * PART + [True] * PART) * 2
    first = judged(one, 1.0, 1.5, 2.0)
    assert first == [True] * (FIRST - TRIAL) + trial
    was_on = True
    # Seconds of a plain decode and of one with drafts, the tokens of that, and whether drafts are on then.
    for plain_s, drafted_s, tokens, is_on in (
        (1.0, 1.5, 2.0, True),
        (1.0, 2.0, 1.94, True),  # as good either way: what there is stays
        (1.0, 2.0, 1.8, False),
        (1.0, 2.0, 2.05, False),
        (0.02, 0.03, 1.55, False),
        (0.02, 0.03, 1.6, True),
        (0.02, 0.03, 1.45, True),
        (0.02, 0.03, 1.0, False),
    ):
        with caplog.at_level(logging.INFO):
            caplog.clear()
            found = judged(one, plain_s, drafted_s, tokens)
        trials = trial if is_on == was_on else 2 * trial
        assert found == [was_on] * (CYCLE - TRIAL) + trials
        assert one.is_off == (not is_on)
        gain = plain_s * tokens / drafted_s
        line = f"speculation_{'on' if is_on else 'off'} gain={gain:.2f}"
        assert caplog.messages == ([line] if is_on != was_on else [])
        was_on = is_on


def test_a_clock_that_stands_still_decides_nothing() -> None:
    one = Payoff()
    judged(one, 0.0, 0.0, 1.0)
    assert not one.is_off


@pytest.mark.parametrize("gain", [2.0, 0.5])
def test_a_stall_changes_nothing(gain: float) -> None:
    """Each trial has one, in a decode with drafts if they gain, else in one without."""
    one = Payoff()
    while one.is_off != (gain < 1):
        judged(one, gain, 1.0, 1.0)
    for _ in range(4):
        stalls = True
        for _ in range(CYCLE):
            drafts = one.drafts
            counts = one._left <= TRIAL - PART - 2 and drafts == (gain > 1)
            one.note((50.0 if counts and stalls else 1.0) * (1.0 if drafts else gain), 1.0)
            stalls = stalls and not counts
        while one._left != CYCLE:  # a second trial without a stall
            one.note(1.0 if one.drafts else gain, 1.0)
        assert one.is_off == (gain < 1)


def test_the_decodes_after_a_change_do_not_count() -> None:
    """A draft model reads what it has missed in the first one with drafts."""
    one, before = Payoff(), True
    for _ in range(FIRST):
        drafts = one.drafts
        one.note(1.0 if drafts == before else 1000.0, 1.0 + drafts)
        before = drafts
    assert not one.is_off


class Clock:
    """Seconds that only device calls take."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Costs(NamedTuple):
    """Seconds of calls of both models."""

    plain: float = 1.0
    verification: float = 1.2
    draft: float = 0.2


class Timed(ToyBackend):
    """A toy whose calls take time by the clock."""

    clock: Clock
    costs: Costs

    def run(self, step: Step) -> StepOutput:
        output = super().run(step)
        wide = step.decode is not None and step.decode.input_ids.shape[1] > 1
        self.clock.now_s += self.costs.verification if wide else self.costs.plain
        return output


class Repeating(Timed):
    """A toy whose text is a few tokens again and again; `turns`: each time with another third one."""

    turns = False

    def _compute(self, rows: Rows) -> Float32Array:
        logits = super()._compute(rows)
        logits[:] = 0.0
        for row, start in enumerate(rows.starts.tolist()):
            for column in range(logits.shape[1]):
                position = start + column + 1
                token = 10 + position % 3
                if self.turns and position % 3 == 2:
                    token += position // 3 % 250
                logits[row, column, token] = 9.0
        return logits


def draft_model(clock: Clock, costs: Costs, *, is_right: bool) -> DraftModel:
    class Small(ToyBackend):
        def run(self, step: Step) -> StepOutput:
            output = super().run(step)
            clock.now_s += costs.draft
            assert output.logits is not None
            return output if is_right else StepOutput(np.roll(output.logits, 1, axis=-1))

    return DraftModel(
        Small(replace(SPEC, num_speculative_tokens=0, outputs=Want.LOGITS), rewinds=True)
    )


def lookup(clock: Clock, costs: Costs, *, is_right: bool) -> NgramProposer:
    return NgramProposer(SPEC, 3)


@pytest.mark.parametrize("after_the_call", [False, True], ids=["in the call", "simulation"])
@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize(
    ("make", "kind"), [(draft_model, Timed), (lookup, Repeating)], ids=["draft model", "look-up"]
)
def test_drafts_stop_where_they_lose(
    make: Callable[..., Proposer],
    kind: type[Timed],
    pays: bool,
    after_the_call: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A proposer that is right pays although a verification takes longer, and one that is wrong loses."""
    clock, costs = Clock(), Costs()
    backend = kind(SPEC)
    backend.clock, backend.costs = clock, Costs(0.0, 0.0) if after_the_call else costs
    if isinstance(backend, Repeating):
        backend.turns = not pays
    engine = Engine(backend, proposer=make(clock, costs, is_right=pays), clock=clock)
    wanted = [expected([5, 6], 300), expected([7], 1300)] if kind is Timed else []
    found: dict[str, list[int]] = {"0": [], "1": []}
    drafted = []
    with caplog.at_level(logging.INFO):
        engine.add(request("0", [5, 6], 300))
        for turn in range(FIRST + TRIAL + 110):
            if turn == 40:
                engine.add(request("1", [7], 1300))
            if not engine.has_work:
                break
            call = engine.run(engine.schedule())
            assert call.error is None
            if after_the_call:  # as `simulation.simulate`
                assert call.ran is not None
                kinds = {"verification": costs.verification}
                clock.now_s += kinds.get(call.ran.kind, costs.plain)
            outputs, info = engine.advance(call)
            assert info is not None
            drafted.append(info.drafted)
            for output in outputs:
                found[output.request_id] += output.token_ids
    engine.abort_all()
    assert_clean(engine, backend)
    for name, tokens in enumerate(wanted):
        assert found[str(name)] == tokens[: len(found[str(name)])]
    assert len(found["0"]) == 300
    assert engine.speculates == pays
    lines = [line for line in caplog.messages if line.startswith("speculation_")]
    assert [line.split()[0] for line in lines] == ([] if pays else ["speculation_off"])
    assert any(drafted[: FIRST - TRIAL])
    assert any(drafted[FIRST + TRIAL + 10 :]) == pays


def test_the_time_without_requests_counts_for_nothing() -> None:
    clock, costs = Clock(), Costs()
    backend = Timed(SPEC)
    backend.clock, backend.costs = clock, costs
    engine = Engine(backend, proposer=draft_model(clock, costs, is_right=True), clock=clock)
    for i in range(80):
        engine.add(request(str(i), [5, i], 20))
        while engine.has_work:
            drafted = engine.step().info
        if drafted is not None and drafted.drafted:
            clock.now_s += 1e6
    assert engine._speculator._payoff._left > TRIAL, "there was a trial"
    assert engine.speculates


def test_forced_tokens_go_on_and_a_draft_model_that_is_tried_again_reads_what_it_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(payoff, "CYCLE", 300)
    clock = Clock()
    small = draft_toy(max_model_len=2048, prefill_buckets=(64, 2048), token_buckets=())
    backend = Timed(SPEC)
    backend.clock, backend.costs = clock, Costs(1.0, 100.0)
    engine = Engine(backend, proposer=DraftModel(small), clock=clock)
    engine.add(request("a", [5, 6], 2000))
    while engine.speculates:
        engine.step()
    grammars = Grammars([chr(i) for i in range(256)], [], SPEC)
    one = EngineRequest(
        "b", [7], max_new_tokens=20, grammar=checked("choice", '[["abcdef"], null]')
    )
    engine.add(one, Grammar(grammars, one))
    calls, forced = small.num_steps, 0
    text: list[int] = []
    while len(text) < 6:
        outputs, info = engine.step()
        assert info is not None
        forced += info.accepted
        text += [t for output in outputs if output.request_id == "b" for t in output.token_ids]
    assert bytes(text[:6]) == b"abcdef"
    assert forced
    assert small.num_steps == calls
    # The next trial: the draft model reads what is missing in one call.
    backend.costs = Costs(1.0, 1.0)
    left = engine._speculator._payoff._left - TRIAL + 2 * PART
    prompts = [step for step in small.steps if step.kind == "prefill"]
    for _ in range(left):
        engine.step()
    more = [step for step in small.steps if step.kind == "prefill"][len(prompts) :]
    assert [step.starts for step in more] == [(0,)]
    assert more[0].lens[0] > FIRST + 300 - TRIAL
