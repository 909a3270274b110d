"""The engine on the toy device: whatever arrives, leaves or fails, every answer is the one it gets alone."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from djl_python_neuronx.backends.base import ModelSpec, Step, StepOutput, Want
from djl_python_neuronx.backends.shapes import choose_bucket
from djl_python_neuronx.engine.core import Engine, StepResult
from djl_python_neuronx.engine.limits import check, sampled_on_host
from djl_python_neuronx.engine.runner import MAX_FAILED_STEPS
from djl_python_neuronx.engine.warmup import warm_up
from djl_python_neuronx.errors import (
    BackendError,
    DeviceMemoryError,
    PromptTooLongError,
    RequestError,
    RequestTimeoutError,
    StepError,
    UnsupportedParameterError,
)
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.types import FinishReason, GenerationRequest, TokenOutput
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend, expected
from tests.engine.steps import LateResults, assert_clean, come_and_go, request, run, tokens

EOS = frozenset(TOY_SPEC.eos_ids)


DEVICE = replace(TOY_SPEC, outputs=Want.TOKENS, largest_top_k=64)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_arrivals_give_what_each_gets_alone(data: st.DataObject) -> None:
    num_slots = data.draw(st.integers(1, 6), "slots")
    spec = replace(
        TOY_SPEC,
        num_slots=num_slots,
        max_prefill_batch=data.draw(st.integers(1, 3), "prefill batch"),
        joins=data.draw(st.sampled_from(["free", "reprefill"]), "joins"),
    )
    options = {
        "decode_interleave": data.draw(st.integers(1, 3), "interleave"),
        "max_join_wait_s": data.draw(st.sampled_from([0.0, 0.001, 3600.0]), "join wait"),
    }
    prompts = data.draw(
        st.lists(st.lists(st.integers(3, 299), min_size=1, max_size=64), min_size=1, max_size=12),
        "prompts",
    )
    lengths = [data.draw(st.integers(1, 40), "new tokens") for _ in prompts]
    asked = [request(str(i), *each) for i, each in enumerate(zip(prompts, lengths, strict=True))]
    arrivals = [data.draw(st.integers(0, 20), "arrival") for _ in prompts]
    given_up = data.draw(
        st.dictionaries(st.integers(0, len(prompts) - 1), st.integers(0, 40)), "given up"
    )
    backend, late_backend = ToyBackend(spec), ToyBackend(spec)
    engine, late_engine = Engine(backend, **options), Engine(late_backend, **options)
    late = LateResults(late_engine, late_backend, lambda: data.draw(st.booleans(), "during"))

    def serve(engine: Engine, step: Callable[[], StepResult]) -> dict[str, list[TokenOutput]]:
        found: dict[str, list[TokenOutput]] = defaultdict(list)
        for turn in range(2000):
            come_and_go(engine, turn, asked, arrivals, given_up)
            if turn > max([*arrivals, *given_up.values()]) and not engine.has_work:
                break
            for output in step().outputs:
                found[output.request_id].append(output)
        return found

    found = serve(engine, engine.step)
    late_found = serve(late_engine, late.step)
    for output in late.last_outputs():
        late_found[output.request_id].append(output)
    if options["max_join_wait_s"] != 0.001:  # which the clock decides
        assert late_backend.steps == backend.steps, "a late result costs no call"
        assert late_found == found
    assert_clean(late_engine, late_backend)
    for i, prompt in enumerate(prompts):
        alone = expected(prompt, min(lengths[i], spec.max_model_len - len(prompt)), EOS)
        outputs = found[str(i)]
        if i in given_up:
            assert tokens(outputs) == alone[: len(tokens(outputs))]
            continue
        assert tokens(outputs) == alone
        ends = [output.finish_reason for output in outputs]
        assert ends[:-1] == [None] * (len(ends) - 1)
        assert ends[-1] is (FinishReason.EOS if alone[-1] in EOS else FinishReason.LENGTH)
    assert_clean(engine, backend)


def test_joiners_of_a_static_batch_share_one_prefill_and_its_cost_is_told() -> None:
    backend = ToyBackend(replace(TOY_SPEC, max_prefill_batch=4, joins="reprefill"))
    engine = Engine(backend, max_join_wait_s=3600.0)
    prompts = {"a": [5, 6, 7], "b": [8] * 4, "c": list(range(10, 50)), "d": [9]}
    found: dict[str, list[TokenOutput]] = defaultdict(list)
    reprefilled = []
    for arrival in ("a", "", "b", "", "cd", "", ""):
        for name in arrival:
            engine.add(request(name, prompts[name], 30, ignore_eos=True))
        outputs, info = engine.step()
        for output in outputs:
            found[output.request_id].append(output)
        assert info is not None
        reprefilled.append(info.num_reprefilled)
    kinds = [(step.kind, step.slots) for step in backend.steps]
    alone, together = ("decode", (0,)), ("decode", (0, 1, 2, 3))
    joins = [("prefill", (0,)), ("prefill", (1, 2, 3))]
    assert kinds == [joins[0], alone, alone, alone, joins[1], together, together]
    # Three decodes have cached as many tokens behind the three of a's prompt.
    assert reprefilled == [0, 0, 0, 0, 6, 0, 0]
    found = run(engine, [output for of_one in found.values() for output in of_one])
    for name, prompt in prompts.items():
        assert tokens(found[name]) == expected(prompt, 30)
    assert_clean(engine, backend)


def test_what_does_not_fit_is_cut_to_the_slot() -> None:
    backend = ToyBackend()
    engine = Engine(backend)
    prompt = list(range(10, 70))
    engine.add(request("a", prompt, 1000, ignore_eos=True))
    engine.add(request("b", prompt, None, ignore_eos=True))
    found = run(engine)
    fits = TOY_SPEC.max_model_len - len(prompt)
    for name in "ab":
        assert tokens(found[name]) == expected(prompt, fits)
        assert found[name][-1].finish_reason is FinishReason.LENGTH
    assert_clean(engine, backend)


def test_eos_and_stop_tokens() -> None:
    prompt = [5, 6, 7]
    free = expected(prompt, 12)
    spec = replace(TOY_SPEC, eos_ids=frozenset({free[3]}))
    backend = ToyBackend(spec)
    engine = Engine(backend)
    first = free.index(free[3])
    engine.add(request("eos", prompt, 12))
    engine.add(request("ignored", prompt, 12, ignore_eos=True))
    stop = next(token for token in free[4:] if token not in free[:4])
    engine.add(request("stop", prompt, 12, ignore_eos=True, stop_token_ids=frozenset({stop})))
    found = run(engine)
    assert tokens(found["eos"]) == free[: first + 1]
    assert found["eos"][-1].finish_reason is FinishReason.EOS
    assert tokens(found["ignored"]) == free
    assert tokens(found["stop"]) == free[: free.index(stop) + 1]
    assert found["stop"][-1].finish_reason is FinishReason.EOS
    assert_clean(engine, backend)


def test_abort_frees_the_slot_before_the_next_step() -> None:
    backend = ToyBackend(replace(TOY_SPEC, num_slots=1))
    engine = Engine(backend)
    engine.add(request("a", [5, 6], 50, ignore_eos=True))
    engine.add(request("b", [7, 8], 3, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.abort("a")
    engine.abort("a")
    found = run(engine)
    assert "a" not in found
    assert tokens(found["b"]) == expected([7, 8], 3)
    assert_clean(engine, backend)


@pytest.mark.parametrize("error", [StepError("broken"), RuntimeError("XLA says no")])
@pytest.mark.parametrize("at", range(7))
def test_a_step_that_fails_answers_its_sequences_and_no_other(at: int, error: Exception) -> None:
    backend = ToyBackend(replace(TOY_SPEC, num_slots=2))
    backend.fail_at = {at: error}
    engine = Engine(backend)
    prompts = {name: [10 + i, 20 + i, 30] for i, name in enumerate("abcd")}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, 4, ignore_eos=True))
    found = run(engine)
    failed = backend.steps[at]
    errors = 0
    for name, prompt in prompts.items():
        last = found[name][-1]
        if last.finish_reason is FinishReason.ERROR:
            errors += 1
            assert isinstance(last.error, BackendError)
            assert str(error) in str(last.error)
            assert last.error.status == 424
        else:
            assert tokens(found[name]) == expected(prompt, 4)
    assert errors == len(failed.slots)
    engine.add(request("next", [9, 9], 4, ignore_eos=True))
    assert tokens(run(engine)["next"]) == expected([9, 9], 4)
    assert_clean(engine, backend)


def test_a_lost_device_ends_the_engine_and_leaves_its_sequences_to_another() -> None:
    backend = ToyBackend(replace(TOY_SPEC, num_slots=1))
    fatal = DeviceMemoryError("gone")
    fatal.fatal = True
    backend.fail_at = {1: fatal}
    engine = Engine(backend)
    for name in "abc":
        engine.add(request(name, [5, 6], 4))
    found = run(engine)
    assert len(tokens(found["a"])) == 1
    assert not {"b", "c"} & found.keys()
    assert engine.dead is fatal
    assert not engine.has_work


def test_a_device_that_fails_every_call_is_given_up() -> None:
    backend = ToyBackend()
    backend.fail_at = {i: RuntimeError("gone") for i in range(100)}
    engine = Engine(backend)
    for i in range(10):
        engine.add(request(str(i), [5, 6], 4))
    found = run(engine)
    ended = [found[str(i)][-1].finish_reason for i in range(10) if str(i) in found]
    assert ended == [FinishReason.ERROR] * (MAX_FAILED_STEPS - 1)
    assert backend.num_steps == MAX_FAILED_STEPS
    assert engine.dead is not None


def test_a_sequence_that_the_backend_refuses_leaves_alone() -> None:
    class Refusing(ToyBackend):
        def acquire(self, slot: int, prompt_ids: object, adapter: int, salt: str = "") -> int:
            ids = list(prompt_ids)  # type: ignore[call-overload]
            if ids[0] == 13:
                msg = "no blocks left"
                raise DeviceMemoryError(msg)
            return super().acquire(slot, ids, adapter)

    backend = Refusing(replace(TOY_SPEC, max_prefill_batch=4))
    engine = Engine(backend)
    for name, first in (("a", 5), ("b", 13), ("c", 7)):
        engine.add(request(name, [first, 8], 3, ignore_eos=True))
    found = run(engine)
    assert isinstance(found["b"][-1].error, DeviceMemoryError)
    assert tokens(found["a"]) == expected([5, 8], 3)
    assert tokens(found["c"]) == expected([7, 8], 3)
    assert_clean(engine, backend)


def test_a_backend_that_takes_nobody_is_given_up_unless_streams_still_run() -> None:
    class Full(ToyBackend):
        full = True

        def acquire(self, slot: int, prompt_ids: object, adapter: int, salt: str = "") -> int:
            if self.full:
                msg = "the slot cannot be cleared"
                raise DeviceMemoryError(msg)
            return super().acquire(slot, prompt_ids, adapter)  # type: ignore[arg-type]

    backend = Full()
    engine = Engine(backend, decode_interleave=0)
    backend.full = False
    engine.add(request("stream", [5, 6], 30, ignore_eos=True))
    outputs = engine.step().outputs
    backend.full = True
    for i in range(2 * MAX_FAILED_STEPS):
        engine.add(request(f"beside {i}", [5, 6], 3))
    found = run(engine, outputs)
    assert tokens(found["stream"]) == expected([5, 6], 30)
    assert engine.dead is None
    for i in range(MAX_FAILED_STEPS + 1):
        engine.add(request(f"alone {i}", [5, 6], 3))
    found = run(engine)
    assert len(found) == MAX_FAILED_STEPS - 1, "another engine may run the one of the last failure"
    assert isinstance(engine.dead, DeviceMemoryError)


def test_prompts_that_a_backend_refuses_do_not_end_it() -> None:
    class Choosy(ToyBackend):
        def acquire(self, slot: int, prompt_ids: object, adapter: int, salt: str = "") -> int:
            ids = list(prompt_ids)  # type: ignore[call-overload]
            if 9 in ids:
                msg = "no adapter for this prompt"
                raise BackendError(msg)
            return super().acquire(slot, ids, adapter)

    backend = Choosy()
    engine = Engine(backend)
    for i in range(MAX_FAILED_STEPS + 1):
        engine.add(request(f"refused {i}", [5, 9], 3))
        found = run(engine)
        assert isinstance(found[f"refused {i}"][-1].error, BackendError)
    engine.add(request("served", [5, 6], 3, ignore_eos=True))
    assert tokens(run(engine)["served"]) == expected([5, 6], 3)
    assert_clean(engine, backend)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7, 13, 15, 16, 17, 40])
def test_what_the_backend_has_of_a_prompt_is_not_run_again(length: int, mixed: bool) -> None:
    class Remembering(ToyBackend):
        def cached(self, prompt_ids: Sequence[int], adapter: int, salt: str = "") -> int:
            return min(len(prompt_ids) - 1, 6)

        def acquire(
            self, slot: int, prompt_ids: Sequence[int], adapter: int, salt: str = ""
        ) -> int:
            ids = list(prompt_ids)
            self._filled[slot] = known = super().acquire(slot, ids, adapter)
            self._cache[slot, :known] = ids[:known]
            return known

    backend = Remembering(replace(TOY_SPEC, max_prefill_batch=2, mixed_steps=mixed))
    if mixed:
        backend.spec = replace(backend.spec, prefill_buckets=(8, 16))
    engine = Engine(backend)
    for name in "ab":
        engine.add(request(name, [ord(name)] * length, 9, ignore_eos=True))
    found: dict[str, list[TokenOutput]] = defaultdict(list)
    while engine.has_work:
        outputs, info = engine.step()
        for output in outputs:
            found[output.request_id].append(output)
        assert info is not None
        if info.kind in {"prefill", "mixed"}:
            longest = info.tokens if mixed else max(backend.steps[-1].lens)
            assert info.bucket == choose_bucket(longest, backend.spec.prefill_buckets)
    for name in "ab":
        assert tokens(found[name]) == expected([ord(name)] * length, 9)
    prefills = [sum(step.lens) for step in backend.steps if step.kind == "prefill"]
    assert sum(prefills) == 2 * (length - min(length - 1, 6))
    if mixed:
        assert len(prefills) == -(-sum(prefills) // 16), (
            "no token in the cache takes room of a step"
        )
    assert_clean(engine, backend)


def test_logits_that_are_not_numbers_fail_their_row_only() -> None:
    class Sick(ToyBackend):
        def run(self, step: Step) -> StepOutput:
            output = super().run(step)
            [(_, rows)] = step.parts
            for row, slot in enumerate(rows.slots.tolist()):
                if slot == 1 and self.num_steps > 6:
                    output.logits[row] = np.nan  # type: ignore[union-attr]
            return output

    backend = Sick()
    engine = Engine(backend)  # type: ignore[arg-type]
    for i, name in enumerate("abc"):
        engine.add(request(name, [5 + i, 8], 8, ignore_eos=True))
    late = LateResults(engine, backend, lambda: True)
    found: dict[str, list[TokenOutput]] = defaultdict(list)
    while engine.has_work:
        for output in late.step().outputs:
            found[output.request_id].append(output)
    for output in late.last_outputs():
        found[output.request_id].append(output)
    assert isinstance(found["b"][-1].error, StepError)
    for i, name in enumerate("abc"):
        if name != "b":
            assert tokens(found[name]) == expected([5 + i, 8], 8)
    assert_clean(engine, backend)


def test_a_seed_gives_the_same_tokens_in_any_company() -> None:
    hot = SamplingParams(temperature=3.0, seed=7)
    alone = Engine(ToyBackend())
    alone.add(request("x", [5, 6, 7], 12, sampling=hot, ignore_eos=True))
    reference = tokens(run(alone)["x"])
    assert reference != expected([5, 6, 7], 12)
    crowd = Engine(ToyBackend())
    for i in range(3):
        others = SamplingParams(temperature=1.0, top_k=i * 5)
        crowd.add(request(str(i), [9, i + 3], 20, sampling=others, ignore_eos=True))
    crowd.add(request("x", [5, 6, 7], 12, sampling=hot, ignore_eos=True))
    assert tokens(run(crowd)["x"]) == reference


def test_no_seed_differs_between_requests() -> None:
    engine = Engine(ToyBackend())
    for name in "ab":
        engine.add(
            request(name, [5, 6, 7], 20, sampling=SamplingParams(temperature=5.0), ignore_eos=True)
        )
    found = run(engine)
    assert tokens(found["a"]) != tokens(found["b"])


def test_waiting_too_long_is_an_error() -> None:
    """By the clock that the engine got, which goes on by a minute in each step."""
    now_s = 0.0
    backend = ToyBackend(replace(TOY_SPEC, num_slots=1))
    run_toy = backend.run

    def run_a_minute(step: Step) -> StepOutput:
        nonlocal now_s
        now_s += 60.0
        return run_toy(step)

    backend.run = run_a_minute  # type: ignore[method-assign]
    engine = Engine(backend, clock=lambda: now_s)
    engine.add(request("a", [5, 6], 4, ignore_eos=True))
    engine.add(request("b", [5, 6], 4, ignore_eos=True))
    info = engine.step().info
    assert info is not None
    assert info.device_s == 60.0
    engine.add(request("c", [5, 6], 4, ignore_eos=True))
    assert engine.expire(60.0) == []
    (late,) = engine.expire(59.0)
    assert late.request_id == "b"
    assert isinstance(late.error, RequestTimeoutError)
    assert list(run(engine)) == ["a", "c"]
    assert_clean(engine, backend)


@pytest.mark.parametrize(
    ("facts", "names"),
    [
        ({"num_slots": 1}, ["max_rolling_batch_size"]),
        ({}, ["decode_interleave"]),
        ({"joins": "reprefill"}, ["decode_interleave"]),
        ({"mixed_steps": True, "prefill_buckets": (8,)}, ["context_length_estimate"]),
    ],
)
def test_who_waits_too_long_is_told_what_helps(facts: dict[str, Any], names: list[str]) -> None:
    """Slots are free in all rows but the first: the first prompt fills the step of chunks, decodes are owed else."""
    engine = Engine(ToyBackend(replace(TOY_SPEC, **facts)), decode_interleave=9)
    engine.add(request("a", [5] * 9, 20, ignore_eos=True))
    engine.step()
    engine.add(request("b", [5, 6], 4))
    (late,) = engine.expire(0.0)
    options = re.findall(r"(?:raise|lower) option\.(\w+)", str(late.error))
    assert [one for one in options if one != "queue_timeout"] == names


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"prompt_ids": []}, RequestError, "no tokens"),
        ({"prompt_ids": [1] * 65}, PromptTooLongError, "65 tokens.*at most 64"),
        ({"prompt_ids": [1, 300]}, RequestError, "the prompt has the token id 300; .*0 to 299"),
        ({"prompt_ids": [-1, 2]}, RequestError, "the token id -1; expected"),
        ({"prompt_ids": [2**63]}, RequestError, "the token id 9223372036854775808; expected"),
        ({"max_new_tokens": 0}, RequestError, "max_new_tokens is 0"),
        ({"adapter": 1}, UnsupportedParameterError, "adapter 1"),
        *(
            ({"sampling": SamplingParams(**fields)}, RequestError, says)  # type: ignore[arg-type]
            for fields, says in (
                ({"min_new_tokens": 6}, "min_new_tokens is 6, max_new_tokens is 5; lower"),
                ({"logit_bias": ((5, 1.0), (300, 1.0))}, "logit_bias has 300; expected ids of"),
                ({"allowed_token_ids": (5, 2**70)}, "allowed_token_ids has 11805916207174113034"),
                ({"bad_words_ids": ((5, 300),)}, "bad_words_ids has 300; expected ids of the mod"),
                ({"bad_words": ((5,), (6, 301))}, "bad_words has 301; expected ids of the model"),
                ({"suppress_tokens": (300,)}, "suppress_tokens has 300; expected ids of the mod"),
                ({"begin_suppress_tokens": (300,)}, "begin_suppress_tokens has 300; expected id"),
            )
        ),
        ({"stop_token_ids": frozenset({2, 300})}, RequestError, "300; expected.*from 0 to 299"),
        ({"stop_token_ids": frozenset({2**40})}, RequestError, "expected ids of the model"),
        ({"stop_token_ids": frozenset({-1})}, RequestError, "expected ids of the model"),
    ],
)
def test_check_refuses(fields: dict[str, object], error: type[Exception], says: str) -> None:
    good = GenerationRequest("a", [1, 2], max_new_tokens=5)
    engine = Engine(ToyBackend())
    check(good, engine.spec)
    with pytest.raises(error, match=says):
        check(replace(good, **fields), engine.spec)  # type: ignore[arg-type]


def test_the_longest_prompt_leaves_room_for_a_token() -> None:
    engine = Engine(ToyBackend(replace(TOY_SPEC, prefill_buckets=(32, 128))))
    check(request("a", [5] * 127), engine.spec)
    with pytest.raises(PromptTooLongError):
        check(request("a", [5] * 128), engine.spec)


def test_device_sampling_gives_the_devices_tokens_and_refuses_what_it_cannot() -> None:
    spec: ModelSpec = replace(TOY_SPEC, outputs=Want.TOKENS)
    backend = ToyBackend(spec)
    engine = Engine(backend)
    engine.add(request("a", [5, 6], 9, ignore_eos=True))
    assert tokens(run(engine)["a"]) == expected([5, 6], 9)
    for sampling in (
        SamplingParams(repetition_penalty=1.2),
        SamplingParams(temperature=1.0, seed=3),
    ):
        with pytest.raises(UnsupportedParameterError, match="samples on the device"):
            check(request("b", [5, 6], sampling=sampling), engine.spec)
    for wanted in ({"logprobs": True}, {"top_logprobs": 1}):
        with pytest.raises(
            UnsupportedParameterError, match=r"log-probabilities \(details, logprobs"
        ):
            check(request("b", [5, 6], **wanted), engine.spec)
    assert_clean(engine, backend)


@pytest.mark.parametrize(
    ("facts", "sampling", "says"),
    [
        ({"fixed_sampling": (1.0, 1.0, 1.0)}, SamplingParams(), None),
        ({"fixed_sampling": (1.0, 1.0, 1.0)}, SamplingParams(temperature=0.7, top_k=1), None),
        ({"fixed_sampling": (1.0, 1.0, 1.0)}, SamplingParams(temperature=0.7), "compiled in"),
        ({"fixed_sampling": (50.0, 1.0, 1.0)}, SamplingParams(temperature=1.0, top_k=50), None),
        ({"fixed_sampling": (50.0, 1.0, 1.0)}, SamplingParams(), "compiled in"),
        ({"largest_top_k": 256}, SamplingParams(), None),
        ({"largest_top_k": 256}, SamplingParams(temperature=1.0, top_k=256), None),
        ({"largest_top_k": 256}, SamplingParams(temperature=1.0, top_k=257), "top_k is 257"),
        (
            {"largest_top_k": 256},
            SamplingParams(temperature=1.0),
            r"top_k is 0 \(off\).*default_top_k",
        ),
        ({"applies_top_p": False}, SamplingParams(temperature=1.0, top_k=3), None),
        ({"applies_top_p": False}, SamplingParams(top_p=0.5), None),
        (
            {"applies_top_p": False},
            SamplingParams(temperature=1.0, top_k=3, top_p=0.5),
            "top_p is 0.5.*with option.output_logits=true",
        ),
        ({"temperatures": (0.01, 9.0)}, SamplingParams(temperature=9.0, top_k=3), None),
        ({"temperatures": (0.01, 9.0)}, SamplingParams(temperature=99.0, top_k=1), None),
        ({"temperatures": (0.01, 9.0)}, SamplingParams(temperature=0.01, top_k=3), None),
        (
            {"temperatures": (0.01, 9.0)},
            SamplingParams(temperature=0.009, top_k=3),
            r"temperature is 0.009.*greedily \(0\). Change it",
        ),
        (
            {"temperatures": (0.01, 9.0)},
            SamplingParams(temperature=9.5, top_k=3),
            "temperature is 9.5; this deployment samples on the device with 0.01 to 9,",
        ),
        (
            {"temperatures": (0.01, None)},
            SamplingParams(temperature=0.009, top_k=3),
            r"samples on the device with 0.01 or more, or greedily",
        ),
        ({"temperatures": (0.01, None)}, SamplingParams(temperature=1e9, top_k=3), None),
        ({"largest_top_k": 64, "default_top_k": 64}, SamplingParams(temperature=1.0), None),
        (
            {"largest_top_k": 64, "default_top_k": 64},
            SamplingParams(temperature=1.0, top_k=65),
            "1 to 64 tokens. Send a top_k in that range, or deploy",
        ),
    ],
)
def test_what_a_sampling_device_cannot_do_is_refused(facts, sampling, says) -> None:  # type: ignore[no-untyped-def]
    engine = Engine(ToyBackend(replace(TOY_SPEC, outputs=Want.TOKENS, **facts)))
    asked = request("a", [5, 6], sampling=sampling)
    if says is None:
        check(asked, engine.spec)
        return
    with pytest.raises(UnsupportedParameterError, match=says):
        check(asked, engine.spec)


MIXED = replace(TOY_SPEC, outputs=Want.TOKENS | Want.LOGITS, largest_top_k=64)
ON_DEVICE: list[dict[str, object]] = [
    {},
    {"sampling": SamplingParams(temperature=0.7, top_k=64, top_p=1e-50)},
]
ON_HOST: list[dict[str, object]] = [
    {"logprobs": True},
    {"top_logprobs": 2},
    {"sampling": SamplingParams(repetition_penalty=5.0)},
    {"sampling": SamplingParams(seed=3)},
    {"sampling": SamplingParams(temperature=2.0, seed=4)},
    {"sampling": SamplingParams(temperature=2.0, top_k=65, seed=5, repetition_penalty=3.0)},
    {"sampling": SamplingParams(frequency_penalty=0.5, suppress_tokens=(5, 6, 7))},
    {"sampling": SamplingParams(temperature=2.0, top_k=60, seed=6, typical_p=0.5)},
    {"sampling": SamplingParams(min_new_tokens=1)},
]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_of_host_and_device_share_steps(data: st.DataObject) -> None:
    """The device of this test adds 7 to each token, so that a row sampled in the wrong place shows."""
    facts: dict[str, object] = {"num_slots": data.draw(st.integers(1, 6), "slots")}
    if data.draw(st.booleans(), "chunks"):
        facts.update(mixed_steps=True, prefill_buckets=(data.draw(st.integers(7, 20), "budget"),))
    else:
        facts.update(max_prefill_batch=data.draw(st.integers(1, 3), "prefill batch"))
    backend = ToyBackend(replace(MIXED, **facts), device_adds=7)  # type: ignore[arg-type]
    engine = Engine(backend)
    asked: dict[str, GenerationRequest] = {}
    kinds = st.lists(st.sampled_from([*ON_DEVICE, *ON_HOST]), min_size=1, max_size=10)
    for i, fields in enumerate(data.draw(kinds, "requests")):
        prompt = data.draw(st.lists(st.integers(3, 299), min_size=1, max_size=40), "prompt")
        num_tokens = data.draw(st.integers(1, 30), "new tokens")
        asked[str(i)] = request(str(i), prompt, num_tokens, ignore_eos=True, **fields)
    turns = st.integers(0, 20)
    arrivals = {name: data.draw(turns, "arrival") for name in asked}
    given_up = data.draw(st.dictionaries(st.sampled_from([*asked]), turns), "given up")
    on_host = {name for name, one in asked.items() if sampled_on_host(one, engine.spec)}
    found: dict[str, list[TokenOutput]] = defaultdict(list)
    for turn in range(2000):
        for name, one in asked.items():
            if arrivals[name] == turn:
                engine.add(one)
            if given_up.get(name) == turn:
                engine.abort(name)
        if turn > 20 and not engine.has_work:
            break
        num_records = len(backend.steps)
        outputs, info = engine.step()
        for output in outputs:
            assert output.error is None, output.error
            found[output.request_id].append(output)
        places = {"host" if output.request_id in on_host else "device" for output in outputs}
        wanted = "mixed" if len(places) == 2 else "".join(places)
        assert ((info and info.place) or "") == wanted
        wants = {record.wants for record in backend.steps[num_records:]} - {Want.NOTHING}
        if wanted == "device":
            assert wants == {Want.TOKENS}
    for name, one in asked.items():
        check(one, TOY_SPEC)
        alone = Engine(ToyBackend(TOY_SPEC if name in on_host else DEVICE, device_adds=7))
        alone.add(one)
        wanted_tokens = tokens(run(alone)[name])
        got = tokens(found[name])
        assert got == (wanted_tokens[: len(got)] if name in given_up else wanted_tokens)
        for output in found[name]:
            assert (output.logits is not None) == bool(one.logprobs or one.top_logprobs)
    assert_clean(engine, backend)


def test_what_needs_the_host_is_what_a_device_without_logits_refuses() -> None:
    for one in [request("a", [5], **fields) for fields in ON_HOST]:  # type: ignore[arg-type]
        assert sampled_on_host(one, MIXED)
        assert sampled_on_host(one, TOY_SPEC)
        check(one, MIXED)
        with pytest.raises(UnsupportedParameterError, match="output_logits"):
            check(one, DEVICE)
    for one in [request("a", [5], **fields) for fields in ON_DEVICE]:  # type: ignore[arg-type]
        assert not sampled_on_host(one, MIXED)
        check(one, DEVICE)


def test_a_backend_that_forgets_wanted_logits_fails_the_step() -> None:
    class Forgetful(ToyBackend):
        def run(self, step: Step) -> StepOutput:
            return replace(super().run(step), logits=None)  # type: ignore[type-var,call-arg]

    engine = Engine(Forgetful(MIXED))
    engine.add(request("device", [5, 6]))
    assert tokens(run(engine)["device"]) == expected([5, 6], 5)
    engine.add(request("host", [5, 6], logprobs=True))
    (output,) = run(engine)["host"]
    assert isinstance(output.error, StepError)
    assert "bug of the backend" in str(output.error)


def test_a_row_without_top_k_gets_the_default_and_no_other_does() -> None:
    spec = replace(TOY_SPEC, outputs=Want.TOKENS, largest_top_k=64, default_top_k=64)
    backend = ToyBackend(spec)
    engine = Engine(backend)
    for name, params in (
        ("off", SamplingParams(temperature=0.5, top_p=0.25)),
        ("given", SamplingParams(temperature=2.0, top_k=3)),
        ("greedy", SamplingParams()),
    ):
        check(request(name, [5, 6], 3, sampling=params), engine.spec)
        engine.add(request(name, [5, 6], 3, sampling=params, ignore_eos=True))
    run(engine)
    rows = {(64.0, 0.25, 0.5), (3.0, 1.0, 2.0), (1.0, 1.0, 1.0)}
    assert {row for step in backend.steps for row in step.sampling} == rows
    assert_clean(engine, backend)


def test_the_default_top_k_is_that_of_the_host_too() -> None:
    spec = replace(MIXED, default_top_k=2)
    engine = Engine(ToyBackend(spec))
    for name in range(30):
        sampling = SamplingParams(temperature=1e4, seed=name)
        engine.add(request(str(name), [5, 6], 1, sampling=sampling, ignore_eos=True))
    drawn = {token for outputs in run(engine).values() for token in tokens(outputs)}
    assert len(drawn) == 2


def test_logits_travel_only_with_requests_that_want_logprobs() -> None:
    engine = Engine(ToyBackend())
    engine.add(request("with", [5, 6], 3, logprobs=True, ignore_eos=True))
    engine.add(request("top", [5, 6], 3, top_logprobs=4, ignore_eos=True))
    engine.add(request("without", [5, 6], 3, ignore_eos=True))
    found = run(engine)
    assert all(output.logits is None for output in found["without"])
    assert {output.top_logprobs for output in found["top"]} == {4}
    for output in found["with"] + found["top"]:
        assert output.logits is not None
        assert output.logits.shape == (1, 300)
        assert int(output.logits[0].argmax()) == output.token_ids[0]


def test_a_backend_that_loses_a_row_fails_the_step_and_not_the_engine() -> None:
    class Short(ToyBackend):
        def run(self, step: object) -> object:  # type: ignore[override]
            output = super().run(step)  # type: ignore[arg-type]
            if self.num_steps == 4:
                output.logits = output.logits[:-1]  # type: ignore[union-attr]
            return output

    backend = Short()
    engine = Engine(backend)  # type: ignore[arg-type]
    engine.add(request("a", [5, 6], 9, ignore_eos=True))
    engine.add(request("b", [7, 6], 9, ignore_eos=True))
    found = run(engine)
    for name in "ab":
        assert "shape (1, 1, 300), expected (2, 1, 300)" in str(found[name][-1].error)
    engine.add(request("c", [5, 6], 9, ignore_eos=True))
    assert tokens(run(engine)["c"]) == expected([5, 6], 9)
    assert_clean(engine, backend)


@pytest.mark.parametrize(
    ("prefill", "decode", "length", "cold"),
    [
        ((8, 16, 32), (32, 64, 128), 128, (128,)),
        ((128,), (128,), 128, ()),
        ((64, 128), (64, 128), 128, ()),
        ((128,), (), 128, ()),
        ((3,), (3,), 3, ()),
    ],
)
def test_warm_up_runs_every_graph_that_a_prompt_reaches(
    prefill: tuple[int, ...], decode: tuple[int, ...], length: int, cold: tuple[int, ...]
) -> None:
    spec = replace(TOY_SPEC, prefill_buckets=prefill, token_buckets=decode, max_model_len=length)
    backend = ToyBackend(spec)
    engine = Engine(backend)
    assert [graph.bucket for graph in warm_up(engine)] == list(cold)
    ran = {(step.kind, step.bucket) for step in backend.steps}
    assert {bucket for kind, bucket in ran if kind == "prefill"} == set(prefill)
    decodes = {bucket for kind, bucket in ran if kind == "decode"}
    assert decodes == set(decode or (length,)) - set(cold)
    assert_clean(engine, backend)


@pytest.mark.parametrize("at", [0, 3])
def test_warm_up_tells_of_a_device_that_is_lost(at: int) -> None:
    backend = ToyBackend()
    backend.fail_at[at] = error = StepError("told to")
    error.fatal = True
    with pytest.raises(StepError, match="told to"):
        warm_up(Engine(backend))


def test_warm_up_of_static_batches_prefills_a_sequence_as_long_as_its_slot() -> None:
    backend = ToyBackend(replace(TOY_SPEC, joins="reprefill", max_prefill_batch=4))
    engine = Engine(backend)
    warm_up(engine)
    prefills = [step for step in backend.steps if step.kind == "prefill"]
    assert max(step.starts[0] + step.lens[0] for step in prefills) == 128
    assert_clean(engine, backend)


@pytest.mark.parametrize(
    ("decode", "cold"), [((32, 96, 128), {(128, 1), (128, 2), (128, 4)}), ((), set())]
)
def test_warm_up_decodes_with_every_number_of_slots(
    decode: tuple[int, ...], cold: set[tuple[int, int]]
) -> None:
    """No prompt is as long as 96 tokens."""
    spec = replace(TOY_SPEC, token_buckets=decode, decode_slots=(1, 2, 4))
    backend = ToyBackend(spec)
    engine = Engine(backend)
    assert {(graph.bucket, graph.slots) for graph in warm_up(engine)} == cold
    ran = {(step.bucket, step.slots[-1]) for step in backend.steps if step.kind == "decode"}
    assert {slot for _, slot in ran} == {0, 1, 3}
    lengths = set(decode or (128,)) - {bucket for bucket, _ in cold}
    assert ran == {(length, slot) for length in lengths for slot in (0, 1, 3)}
    assert_clean(engine, backend)


def test_the_first_call_of_every_graph_is_announced() -> None:
    """Of two live sequences the second lies in slot 1: a graph that a single one does not run."""
    engine = Engine(ToyBackend(replace(TOY_SPEC, token_buckets=(), decode_slots=(1, 2, 4))))
    announced: list[None] = []
    engine.runner.on_first_call = lambda: announced.append(None)
    engine.add(request("a", [5, 6], 9))
    while not engine.runner.graphs_run & {("decode", 128, 0, 1)}:
        engine.step()
    announced.clear()
    engine.add(request("b", [5, 7], 3))
    run(engine)
    assert len(announced) == 1
    assert ("decode", 128, 0, 2) in engine.runner.graphs_run


def test_every_step_names_the_graph_that_ran_also_where_a_decode_grows_into_the_next() -> None:
    backend = ToyBackend()
    engine = Engine(backend)
    announced: list[int] = []
    engine.runner.on_first_call = lambda: announced.append(backend.num_steps)
    engine.add(request("a", [5, 6], 126, ignore_eos=True))
    while engine.has_work:
        if backend.num_steps == 40:
            engine.add(request("b", [7] * 9, 80, ignore_eos=True))
        info = engine.step().info
        assert info is not None
        assert (info.kind, info.bucket) == (backend.steps[-1].kind, backend.steps[-1].bucket)
    ran = [(step.kind, step.bucket) for step in backend.steps]
    assert announced == sorted(map(ran.index, set(ran)))
    assert {bucket for kind, bucket in ran if kind == "decode"} == {32, 64, 128}


def test_a_device_that_is_lost_while_a_slot_is_acquired_is_not_driven_again() -> None:
    class Losing(ToyBackend):
        def acquire(self, slot: int, prompt_ids: object, adapter: int, salt: str = "") -> int:
            if next(iter(prompt_ids)) == 13:  # type: ignore[call-overload]
                error = DeviceMemoryError("the device is gone")
                error.fatal = True
                raise error
            return super().acquire(slot, prompt_ids, adapter)  # type: ignore[arg-type]

    backend = Losing(replace(TOY_SPEC, max_prefill_batch=4))
    engine = Engine(backend)
    for name, first in (("a", 5), ("b", 13), ("c", 7)):
        engine.add(request(name, [first, 8], 3))
    assert engine.step() == ([], None), "another engine may run all of them"
    assert engine.dead is not None
    assert backend.num_steps == 0
    held = backend.acquired
    engine.add(request("d", [9, 8], 3))
    assert engine.step() == ([], None)
    assert backend.acquired == held
