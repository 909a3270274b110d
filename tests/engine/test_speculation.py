"""Drafts: whatever is proposed, by whomever, the text is the one that there is without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from djl_python_neuronx.backends.base import Step, StepOutput, Want
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.runner import MAX_FAILED_STEPS, StepInfo
from djl_python_neuronx.engine.sampler import Sampler
from djl_python_neuronx.engine.sequence import Sequence as Running
from djl_python_neuronx.engine.speculation import DraftModel, NgramProposer, Proposer
from djl_python_neuronx.engine.warmup import warm_up
from djl_python_neuronx.errors import DeviceMemoryError, StepError
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.types import FinishReason, GenerationRequest, TokenOutput
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend, expected
from tests.effort import examples
from tests.engine.modes import Guesser, draft_toy
from tests.engine.steps import (
    across_the_border,
    assert_clean,
    come_and_go,
    request,
    run,
    tokens,
)

NUM_DRAFTS = 3
SPEC = replace(
    TOY_SPEC,
    num_speculative_tokens=NUM_DRAFTS,
    outputs=Want.LOGITS | Want.ALL_LOGITS,
    eos_ids=frozenset(),
)
PARAMETERS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=11),
    SamplingParams(temperature=1.5, top_k=20, top_p=0.9, seed=3),
    SamplingParams(temperature=0.7, repetition_penalty=1.4, seed=5),
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(frequency_penalty=2, no_repeat_ngram_size=3, suppress_tokens=(*range(30, 300),)),
    SamplingParams(temperature=0.9, presence_penalty=2.0, bad_words_ids=((5,), (6, 7)), seed=4),
)


class Unsure(ToyBackend):
    """A toy that ranks its tokens otherwise in a third of its steps."""

    def run(self, step: Step) -> StepOutput:
        output = super().run(step)
        if output.logits is not None and output.ids is None and self.num_steps % 3 == 0:
            return StepOutput(np.roll(output.logits, 1, axis=-1))
        return output


PROPOSERS: dict[str, Callable[[], Proposer]] = {
    "guesses": lambda: Guesser(1),
    "prompt lookup": lambda: NgramProposer(SPEC, 3),
    "the same model": lambda: DraftModel(draft_toy()),
    "an unsure model": lambda: DraftModel(draft_toy(Unsure)),
    "a model of short prompts": lambda: DraftModel(draft_toy(prefill_buckets=(8, 16))),
}


@pytest.mark.parametrize("proposer", PROPOSERS)
@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_any_arrivals_give_what_they_give_without_drafts(
    proposer: str, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, 9), "requests")
    requests = [
        GenerationRequest(
            str(i),
            # Few different tokens, so that they repeat.
            data.draw(st.lists(st.integers(3, 6), min_size=1, max_size=64), "prompt"),
            data.draw(st.sampled_from(PARAMETERS), "parameters"),
            max_new_tokens=data.draw(st.integers(1, 64), "new tokens"),
            logprobs=data.draw(st.booleans(), "logprobs"),
        )
        for i in range(count)
    ]
    arrivals = [data.draw(st.integers(0, 20), "arrival") for _ in requests]
    given_up = data.draw(st.dictionaries(st.integers(0, count - 1), st.integers(0, 30)), "given up")
    backend = ToyBackend(SPEC)
    drafting = PROPOSERS[proposer]()
    engine = Engine(backend, proposer=drafting)
    found: dict[str, list[int]] = {str(i): [] for i in range(count)}
    reasons: dict[str, FinishReason | None] = {}
    for turn in range(3000):
        for i, arrival in enumerate(arrivals):
            if arrival == turn:
                engine.add(requests[i])
        for i, when in given_up.items():
            if when == turn:
                engine.abort(str(i))
        if turn > 30 and not engine.has_work:
            break
        for output in engine.step().outputs:
            assert output.error is None, output.error
            if requests[int(output.request_id)].logprobs:
                assert output.logits is not None
                assert output.logits.shape == (len(output.token_ids), SPEC.vocab_size)
            found[output.request_id] += output.token_ids
            reasons[output.request_id] = output.finish_reason
    for i, one in enumerate(requests):
        engine_alone = Engine(ToyBackend(replace(SPEC, num_speculative_tokens=0)))
        engine_alone.add(one)
        wanted = run(engine_alone)[str(i)]
        if i in given_up:
            assert found[str(i)] == tokens(wanted)[: len(found[str(i)])]
        else:
            assert found[str(i)] == tokens(wanted)
            assert reasons[str(i)] == wanted[-1].finish_reason
    assert_clean(engine, backend)
    if isinstance(drafting, DraftModel):
        draft = drafting._backend
        assert isinstance(draft, ToyBackend)
        assert draft.violations == []
        assert draft.acquired == frozenset()


@pytest.mark.parametrize("kind", ["guesses", "the same model", "static batches", "mixed steps"])
def test_top_tokens_are_those_of_each_request_alone_until_its_slot_is_full(kind: str) -> None:
    prompts = [[5, 6, 7], [3, 4] * 20, [9]]
    requests = [
        GenerationRequest(str(i), prompts[i], PARAMETERS[i], top_logprobs=i + 2) for i in range(3)
    ]
    spec = {
        "static batches": replace(SPEC, num_speculative_tokens=0, joins="reprefill"),
        "mixed steps": replace(SPEC, num_speculative_tokens=0, mixed_steps=True),
    }.get(kind, SPEC)
    backend = ToyBackend(spec)
    engine = Engine(backend, proposer=PROPOSERS[kind]() if spec is SPEC else None)
    for one in requests:
        engine.add(one)
    together = run(engine)
    for one in requests:
        engine_alone = Engine(ToyBackend(replace(SPEC, num_speculative_tokens=0)))
        engine_alone.add(one)
        alone = [*map(across_the_border, run(engine_alone)[one.request_id])]
        found = [*map(across_the_border, together[one.request_id])]
        assert len(tokens(found)) == SPEC.max_model_len - len(one.prompt_ids)
        assert found[-1].finish_reason is FinishReason.LENGTH
        assert spec is not SPEC or len(found) < len(alone)
        for column in ("token_ids", "logprobs", "top"):
            assert [*chain(*(getattr(output, column) for output in found))] == [
                *chain(*(getattr(output, column) for output in alone))
            ]
        assert {len(top) for output in alone for top in output.top or ()} == {one.top_logprobs}
        # The raw distribution, whatever the parameters: the toy's winner has the logit 6.
        assert alone[0].top is not None
        assert alone[0].top[0][0][0] == expected(one.prompt_ids, 1)[0]
    assert_clean(engine, backend)


def test_drafts_of_the_same_model_all_stand_greedy_or_sampled() -> None:
    # Penalties are left out: a draft does not count as seen before it stands.
    for params, count in product(PARAMETERS[:3], (1, NUM_DRAFTS)):
        spec = replace(SPEC, num_speculative_tokens=count)
        engine = Engine(ToyBackend(spec), proposer=DraftModel(draft_toy()))
        engine.add(GenerationRequest("a", [5, 6, 7], params, max_new_tokens=41))
        drafted = accepted = steps = 0
        while engine.has_work:
            info = engine.step().info
            assert info is not None
            drafted += info.drafted
            accepted += info.accepted
            steps += info.kind == "verification"
        assert drafted == accepted > 0
        assert steps <= 1 + 40 / (count + 1)


def test_a_draft_that_does_not_stand_is_not_penalised() -> None:
    params = SamplingParams(repetition_penalty=4.0)
    for start in range(3, 11):
        found = []
        for proposer in (None, DraftModel(draft_toy(Unsure))):
            engine = Engine(ToyBackend(SPEC), proposer=proposer)
            engine.add(request("a", [start, 5], 100, sampling=params))
            found.append(tokens(run(engine)["a"]))
        assert found[0] == found[1]


def test_a_draft_that_did_not_stand_spoils_none_that_follow() -> None:
    """Two of three steps of the draft model are right."""
    engine = Engine(ToyBackend(SPEC), proposer=DraftModel(draft_toy(Unsure)))
    engine.add(request("a", [5, 6, 7], 100, ignore_eos=True))
    infos = []
    while engine.has_work:
        infos.append(engine.step().info)
    drafted, accepted = (
        sum(getattr(info, name) for info in infos if info) for name in ("drafted", "accepted")
    )
    assert accepted > drafted / 4


def test_prompt_lookup_takes_the_longest_match_and_of_those_the_last() -> None:
    lookup = NgramProposer(SPEC, 3)
    cases = {
        (1, 2, 3, 9, 8, 7, 2, 3): [9, 8, 7],  # two tokens match
        (5, 1, 2, 3, 9, 1, 2, 3, 4, 1, 2, 3): [4, 1, 2],  # of two matches of three the last
        (5, 1, 2, 3, 9, 6, 2, 3, 4, 1, 2, 3): [9, 6, 2],  # three tokens count before two
        (1, 2, 3, 4, 5, 3): [],  # one is too little
        (1, 2, 3): [],
        (7, 7, 7): [7],
        (4,): [],
    }
    for slot, (text, wanted) in enumerate(cases.items()):
        sequence = Running(GenerationRequest("a", text[:-1] or text), SPEC, arrived_s=0.0)
        sequence.slot = slot % SPEC.num_slots
        sequence.output_ids = list(text[-1:]) if len(text) > 1 else []
        sampler = Sampler(SPEC.num_slots, SPEC.vocab_size)
        assert lookup.propose([sequence], [3], sampler) == [wanted], text
        lookup.release(sequence.slot)


@settings(max_examples=examples(200), deadline=None)
@given(text=st.lists(st.integers(1, 3), min_size=2, max_size=40), longest=st.integers(1, 5))
def test_prompt_lookup_is_the_plain_search(text: list[int], longest: int) -> None:
    wanted: list[int] = []
    for size in range(longest, min(2, longest) - 1, -1):
        key = text[-size:]
        places = [i for i in range(len(text) - size) if text[i : i + size] == key]
        if len(key) == size and places:
            wanted = text[places[-1] + size :][:4]
            break
    sequence = Running(GenerationRequest("a", text[:1]), SPEC, arrived_s=0.0)
    sequence.slot = 1
    lookup = NgramProposer(SPEC, longest)
    sampler = Sampler(SPEC.num_slots, SPEC.vocab_size)
    found: list[int] = []
    # As the engine calls it: the text grows between the calls.
    for end in range(2, len(text) + 1):
        sequence.output_ids = text[1:end]
        found = lookup.propose([sequence], [4], sampler)[0]
    assert found == wanted


@pytest.mark.parametrize("at", [0, 1, 2, 5])
@pytest.mark.parametrize("fatal", [False, True])
def test_a_draft_model_that_fails_costs_speed_and_no_request(at: int, fatal: bool) -> None:
    draft, backend = draft_toy(), ToyBackend(SPEC)
    error = DeviceMemoryError("told to") if not fatal else StepError("lost")
    error.fatal = fatal
    draft.fail_at[at] = error
    engine = Engine(backend, proposer=DraftModel(draft))
    for name in "abc":
        engine.add(request(name, [ord(name), 5], 30))
    found = run(engine)
    for name in "abc":
        assert tokens(found[name]) == expected([ord(name), 5], 30)
    assert_clean(engine, backend)
    # After a failure that is none of the device itself it drafts again.
    kinds = {graph.kind for graph in engine.runner.graphs_run}
    assert ("verification" in kinds) == (not fatal or at > 4)
    assert engine.speculates == (not fatal)


def test_the_device_that_verifies_may_fail_and_the_next_request_works() -> None:
    backend = ToyBackend(SPEC)
    engine = Engine(backend, proposer=DraftModel(draft_toy()))
    backend.fail_at[2] = RuntimeError("told to")
    engine.add(request("a", [5, 6], 20))
    assert run(engine)["a"][-1].finish_reason is FinishReason.ERROR
    engine.add(request("b", [5, 6], 20))
    assert tokens(run(engine)["b"]) == expected([5, 6], 20)
    assert_clean(engine, backend)


def test_a_verification_of_another_shape_fails_its_step() -> None:
    class Narrow(ToyBackend):
        def run(self, step: Step) -> StepOutput:
            output = super().run(step)
            assert output.logits is not None
            return StepOutput(output.logits[..., :-1]) if step.kind == "decode" else output

    engine = Engine(Narrow(SPEC), proposer=DraftModel(draft_toy()))
    engine.add(request("a", [5, 6], 20))
    error = run(engine)["a"][-1].error
    assert "answered with shape (1, 4, 299), expected (1, 4, 300)" in str(error)


def test_stop_tokens_end_a_sequence_within_its_drafts() -> None:
    wanted = expected([5, 6, 7], 30)
    for place in range(1, 12):
        stop = wanted[place]
        engine = Engine(ToyBackend(SPEC), proposer=DraftModel(draft_toy()))
        engine.add(request("a", [5, 6, 7], 30, stop_token_ids=frozenset({stop})))
        found = run(engine)["a"]
        assert tokens(found) == wanted[: wanted.index(stop) + 1]
        assert found[-1].finish_reason is FinishReason.EOS


@pytest.mark.parametrize("ends", [(32, 64, 128), (40, 43, 128), (128,)])
def test_warm_up_runs_every_graph_that_may_verify(ends: tuple[int, ...]) -> None:
    spec = replace(SPEC, token_buckets=ends)
    engine = Engine(ToyBackend(spec), proposer=DraftModel(draft_toy()))
    assert warm_up(engine) == ()
    graphs = {graph.bucket for graph in engine.runner.graphs_run if graph.kind == "verification"}
    assert graphs == {*ends}


@pytest.mark.parametrize("kind", ["the same model", "prompt lookup"])
def test_warm_up_runs_every_graph_that_verifies_and_drafts(kind: str) -> None:
    draft = draft_toy()
    proposer = DraftModel(draft) if kind == "the same model" else PROPOSERS[kind]()
    backend = ToyBackend(SPEC)
    engine = Engine(backend, proposer=proposer)
    assert warm_up(engine) == ()
    assert engine.speculates
    assert {step.bucket for step in backend.steps if step.kind == "prefill"} == {8, 16, 32, 64}
    if kind == "the same model":
        assert {step.bucket for step in draft.steps if step.kind == "prefill"} == {8, 16, 32, 64}
        assert {step.bucket for step in draft.steps if step.kind == "decode"} >= {32, 64}


def test_warm_up_tells_of_a_draft_model_that_does_not_run() -> None:
    draft = draft_toy()
    draft.fail_at[0] = StepError("told to")
    with pytest.raises(StepError, match="told to"):
        warm_up(Engine(ToyBackend(SPEC), proposer=DraftModel(draft)))


def test_a_draft_model_that_fails_again_and_again_is_given_up() -> None:
    draft, backend = draft_toy(), ToyBackend(SPEC)
    draft.fail_at.update(dict.fromkeys(range(1000), StepError("told to")))
    engine = Engine(backend, proposer=DraftModel(draft))
    engine.add(request("a", [5, 6], 30))
    assert tokens(run(engine)["a"]) == expected([5, 6], 30)
    assert not engine.speculates
    assert draft.num_steps == MAX_FAILED_STEPS


def test_a_draft_model_that_fails_now_and_then_stays() -> None:
    draft, backend = draft_toy(), ToyBackend(SPEC)
    draft.fail_at.update({at: StepError("told to") for at in range(0, 500, 12)})
    engine = Engine(backend, proposer=DraftModel(draft))
    engine.add(request("a", [5, 6], 100))
    assert tokens(run(engine)["a"]) == expected([5, 6], 100)
    assert engine.speculates
    assert draft.num_steps > 12 * MAX_FAILED_STEPS


def test_the_step_tells_what_was_drafted_and_stands() -> None:
    """Of the drafts behind a stop token none stands in the text; the bucket holds all columns."""
    stop = expected([5, 6, 7], 40)[6]
    backend = ToyBackend(SPEC)
    engine = Engine(backend, proposer=Guesser(3))
    engine.add(request("a", [5, 6, 7], 40, stop_token_ids=frozenset({stop})))
    engine.add(request("b", [8] * 28, 40))
    while engine.has_work:
        (outputs, info), record = engine.step(), backend.steps[-1]
        assert info is not None
        assert info.bucket == record.bucket
        taken = sum(len(output.token_ids) for output in outputs)
        if info.kind == "verification":
            assert info.draft_s > 0
            assert info.drafts == sum(length > 1 for length in record.lens)
            assert info.drafted == sum(record.lens) - len(record.lens)
            assert info.accepted == taken - len(outputs)
        else:
            assert (info.drafts, info.drafted, info.accepted) == (0, 0, 0)
            assert taken == len(outputs)


class DraftsOnDevice(ToyBackend):
    """A device whose decodes give a row one token or more, as a fused draft model; some behind the slot's end."""

    def run(self, step: Step) -> StepOutput:
        output = super().run(step)
        width = self.spec.num_fused_drafts + 1
        assert output.ids is not None
        ids = np.full((len(output.ids), width), -1, np.int32)
        ids[:, :1] = output.ids
        if step.decode is not None:
            limit = self.spec.max_model_len
            for row, slot in enumerate(step.decode.slots.tolist()):
                seen = self._cache[slot, : self._filled[slot]].tolist()
                for column in range(1, (self.num_steps + slot) % width + 1):
                    seen.append(int(ids[row, column - 1]))
                    ids[row, column] = expected(seen, 1)[0]
                self._cache[slot, : len(seen)] = seen[:limit]
                self._filled[slot] = min(len(seen), limit)
        return StepOutput(None, ids)


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_drafts_of_the_device_give_what_there_is_without_them(data: st.DataObject) -> None:
    spec = replace(SPEC, num_speculative_tokens=0, num_fused_drafts=NUM_DRAFTS, outputs=Want.TOKENS)
    spec = replace(spec, fixed_sampling=(1.0, 1.0, 1.0))
    backend = DraftsOnDevice(spec)
    requests = [
        GenerationRequest(
            str(i),
            data.draw(st.lists(st.integers(3, 6), min_size=1, max_size=64), "prompt"),
            max_new_tokens=data.draw(st.none() | st.integers(1, 70), "new tokens"),
            stop_token_ids=data.draw(st.frozensets(st.integers(0, 299), max_size=40), "stop ids"),
        )
        for i in range(data.draw(st.integers(1, 9), "requests"))
    ]
    engine = Engine(backend)
    arrivals = [data.draw(st.integers(0, 20), "arrival") for _ in requests]
    found: list[TokenOutput] = []
    for turn in range(21):
        come_and_go(engine, turn, requests, arrivals, {})
        found += engine.step().outputs
    results = run(engine, found)
    for one in requests:
        most = min(one.max_new_tokens or TOY_SPEC.max_model_len, 128 - len(one.prompt_ids))
        assert tokens(results[one.request_id]) == expected(one.prompt_ids, most, one.stop_token_ids)
    assert_clean(engine, backend)


def test_drafts_of_the_device_are_counted_too() -> None:
    spec = replace(SPEC, num_speculative_tokens=0, num_fused_drafts=NUM_DRAFTS, outputs=Want.TOKENS)
    engine = Engine(DraftsOnDevice(replace(spec, fixed_sampling=(1.0, 1.0, 1.0))))
    engine.add(request("a", [5, 6, 7], 40))
    engine.add(request("b", [8] * 9, 30))
    infos: list[StepInfo] = []
    while engine.has_work:
        outputs, info = engine.step()
        assert info is not None
        further = sum(len(output.token_ids) - 1 for output in outputs)
        wanted = (0, 0) if info.kind == "prefill" else (len(outputs), further)
        assert (info.drafts, info.accepted) == wanted
        assert info.drafted == NUM_DRAFTS * info.drafts
        infos.append(info)
    assert 0 < sum(info.accepted for info in infos) < sum(info.drafted for info in infos)
