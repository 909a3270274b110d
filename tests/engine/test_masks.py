"""Constraints and their masks: which tokens a slot may sample."""

from __future__ import annotations

import re
import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from djl_python_neuronx.engine import core
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.masks import Constraint, UInt32Array, constraints_of
from djl_python_neuronx.engine.native import LIBRARY
from djl_python_neuronx.engine.sampler import NO_TOKEN, NONE_ALLOWED, Sampler
from djl_python_neuronx.errors import BackendError, RequestError, ServingError
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.types import FinishReason
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend, expected
from tests.engine.steps import assert_clean, request, run, tokens
from tests.processes import PATIENCE_S


class Ascending:
    """Only larger tokens than the last one follow, and only those of one residue."""

    def __init__(self, modulus: int) -> None:
        self.modulus = modulus

    def allows(self, output_ids: list[int], token: int) -> bool:
        return token % self.modulus == 0 and token > max(output_ids[-1:], default=-1)

    def narrow(self, bits: UInt32Array, output_ids: list[int]) -> None:
        for token in range(32 * len(bits)):
            if not self.allows(output_ids, token):
                bits[token // 32] &= ~np.uint32(1 << token % 32)


class Noting:
    """Keeps the outputs that it gets. It waits with the first one that has tokens."""

    def __init__(self) -> None:
        self.goes_on, self.seen = threading.Event(), list[list[int]]()

    def narrow(self, bits: UInt32Array, output_ids: list[int]) -> None:
        assert not output_ids or self.goes_on.wait(PATIENCE_S)
        self.seen.append([*output_ids])


def test_a_token_of_the_sequence_before_is_none_of_the_next_one_in_its_slot() -> None:
    """The slot changes hands while the masks of the step before are made."""
    sampler, logits = Sampler(2, 64), np.zeros((2, 64), np.float32)
    slots, at = np.arange(2, dtype=np.int32), np.zeros(2, np.int32)
    logits[:, 5] = 1.0
    first, second = Noting(), Noting()
    second.goes_on.set()
    sampler.assign(0, SamplingParams(), [1], 7, (), [first])
    sampler.assign(1, SamplingParams(), [1], 7)
    sampler.sample(logits, slots, at)
    sampler.release(1)
    sampler.assign(1, SamplingParams(), [1], 7, (), [second])
    first.goes_on.set()
    for _ in range(2):
        sampler.sample(logits, slots, at)
    assert first.seen[:3] == [[], [5], [5, 5]]
    assert second.seen[:2] == [[], [5]]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("vocab_size", [31, 32, 75, 1100])
def test_only_what_each_constraint_allows_is_sampled(vocab_size: int, native: bool) -> None:
    """Two constraints in one slot, and a slot without any beside it, behind given tokens."""
    sampler = Sampler(3, vocab_size, library=LIBRARY if native else None)
    logits = np.random.default_rng(5).standard_normal((2, vocab_size)).astype(np.float32)
    slots, rules = np.array([0, 2], np.int32), [Ascending(3), Ascending(2)]
    for params in (SamplingParams(), SamplingParams(temperature=2.0, top_k=4, top_p=0.9)):
        output, ended = [6], False
        sampler.assign(0, params, [1], 7)
        sampler.assign(2, params, [1], 7, output, rules)
        for position in range(2, 2 + vocab_size):
            at = np.array([position] * 2, np.int32)
            allowed = [
                token
                for token in range(vocab_size)
                if all(rule.allows(output, token) for rule in rules)
            ]
            alone = Sampler(1, vocab_size, library=None)
            alone.assign(0, params, [1], 7)
            draft = sampler.sample(logits, slots, at, note=False)
            free, token = sampler.sample(logits, slots, at).tolist()
            assert [free] == alone.sample(logits[:1], slots[:1], at[:1]).tolist()
            assert draft[1] == alone.sample(logits[1:], slots[:1], at[:1])[0]
            if not allowed:
                assert token == NONE_ALLOWED
                ended = True
                break
            masked = np.full((1, vocab_size), -np.inf, np.float32)
            masked[0, allowed] = logits[1, allowed]
            assert token == alone.sample(masked, slots[:1], at[:1])[0]
            output.append(token)
        assert ended
    sampler.release(2)
    sampler.assign(2, SamplingParams(), [], 0)
    assert sampler.sample(logits, slots, at)[1] == logits[1].argmax()


@pytest.mark.parametrize("native", [True, False])
def test_a_mask_that_leaves_nothing_differs_from_logits_that_are_no_distribution(
    native: bool,
) -> None:
    sampler = Sampler(4, 100, library=LIBRARY if native else None)
    logits = np.zeros((4, 100), np.float32)
    logits[0, 50], logits[1, ::3], logits[2] = np.nan, -np.inf, -np.inf
    for slot in (0, 1):
        sampler.assign(slot, SamplingParams(), [], 0, constraints=[Ascending(3)])
    found = sampler.sample(logits, np.arange(4, dtype=np.int32), np.zeros(4, np.int32))
    # Token 50 of the first is not allowed.
    assert found.tolist() == [0, NONE_ALLOWED, NO_TOKEN, 0]


@pytest.mark.parametrize("at", [0, 3])
def test_a_request_whose_rules_exclude_all_tokens_fails_alone(at: int) -> None:
    backend = ToyBackend()
    engine = Engine(backend)
    for name, prompt in (("before", [5, 6]), ("bad", [7, 8]), ("after", [9])):
        sampling = SamplingParams()
        if name == "bad":
            allowed = (7, 8, 9, 10, 11)[: at + 2]
            sampling = SamplingParams(allowed_token_ids=allowed, no_repeat_ngram_size=1)
        engine.add(request(name, prompt, 9, sampling=sampling, ignore_eos=True))
    found = run(engine)
    assert tokens(found["before"]) == expected([5, 6], 9)
    assert tokens(found["after"]) == expected([9], 9)
    assert sorted(tokens(found["bad"])) == [9, 10, 11][:at]
    assert found["bad"][-1].finish_reason is FinishReason.ERROR
    assert isinstance(found["bad"][-1].error, RequestError)
    assert "the request's rules exclude each one" in str(found["bad"][-1].error)
    assert_clean(engine, backend)


WORDS: dict[str, tuple[tuple[int, ...], ...]] = {
    "of one token": tuple((i,) for i in range(1024)),
    "behind one token": tuple((5, i) for i in range(512)),
    "of many lengths": tuple((*[5] * i, 5) for i in range(1, 40)),
}


@pytest.mark.parametrize("name", WORDS)
def test_a_mask_takes_one_look_for_each_length_of_bad_words(name: str) -> None:
    """Lines of Python that run, because all rows wait for them: not one for each word."""
    num_lines = 0

    def count(*_: object) -> Any:
        nonlocal num_lines
        num_lines += 1
        return count

    constraints = constraints_of(SamplingParams(bad_words_ids=WORDS[name]), [7], (), 2000)
    bits, output = np.full(63, 0xFFFFFFFF, np.uint32), [5] * 50
    before = sys.gettrace()
    sys.settrace(count)
    try:
        for constraint in constraints:
            constraint.narrow(bits, output)
    finally:
        sys.settrace(before)
    left = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    assert set(range(2016)) - set(left.tolist()) == {word[-1] for word in WORDS[name]}
    assert 0 < num_lines < 30 * len({*map(len, WORDS[name])})


class Panic(BaseException):
    """As a library in Rust raises it."""


class Failing:
    """A grammar whose mask cannot be made at some place of the text."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.at, self.error = at, error

    def narrow(self, bits: UInt32Array, output_ids: list[int]) -> None:
        if len(output_ids) == self.at:
            raise self.error

    def forced(self, most: int) -> list[int]:
        return []


@pytest.mark.parametrize("at", [0, 2])
def test_rules_that_fail_end_their_own_request(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the masks' thread, by an error of any kind, and at the start of a sequence."""
    backend = ToyBackend()
    engine = Engine(backend)

    def made(params: SamplingParams, *more: Any) -> list[Constraint]:
        if params.suppress_tokens == (77,):
            raise IndexError("bad rules")
        return constraints_of(params, *more)

    monkeypatch.setattr(core, "constraints_of", made)
    cases: list[tuple[BaseException, type[ServingError], str]] = [
        (RequestError("too slow"), RequestError, "^too slow$"),
        (ValueError("odd"), BackendError, r"rules failed \(ValueError: odd\)"),
        (Panic("worse"), BackendError, r"rules failed \(Panic: worse\)"),
    ]
    engine.add(request("before", [5, 6], 9))
    for i, (error, *_) in enumerate(cases):
        engine.add(request(f"bad{i}", [7, 8], 9), Failing(at, error))  # type: ignore[arg-type]
    for i in range(5):  # more than failed steps end an engine
        bad = request(f"worst{i}", [7], 9, sampling=SamplingParams(suppress_tokens=(77,)))
        engine.add(bad)
    engine.add(request("after", [9], 6))
    found = run(engine)
    assert tokens(found["before"]) == expected([5, 6], 9)
    assert tokens(found["after"]) == expected([9], 6)
    for i, (_, kind, message) in enumerate(cases):
        assert len(tokens(found[f"bad{i}"])) == at
        last = found[f"bad{i}"][-1].error
        assert type(last) is kind
        assert re.search(message, str(last))
    for i in range(5):
        assert "IndexError: bad rules" in str(found[f"worst{i}"][-1].error)
    assert_clean(engine, backend)


def test_ends_of_a_text_that_the_model_lacks_change_nothing() -> None:
    """The tokenizer, or generation_config.json, has more tokens than the weights."""
    spec = replace(TOY_SPEC, eos_ids=frozenset({2, TOY_SPEC.vocab_size, 4000}))
    engine = Engine(ToyBackend(spec))
    sampling = SamplingParams(min_new_tokens=3)
    for name, fields in (("a", {}), ("b", {"ignore_eos": True})):
        stops = frozenset({400, 2**31})
        engine.add(request(name, [5, 6], 9, sampling=sampling, stop_token_ids=stops, **fields))
    found = run(engine)
    assert tokens(found["a"]) == tokens(found["b"]) == expected([5, 6], 9)


@pytest.mark.parametrize("fields", [{"min_new_tokens": 4}, {"min_length": 6}])
def test_neither_eos_nor_stop_tokens_come_before_the_least_number(fields: dict[str, int]) -> None:
    """Both are the likeliest, always; as far as they may not come, the next likely token does."""
    ends = {2: 90.0, 77: 80.0}
    spec = replace(TOY_SPEC, eos_ids=frozenset({2}))
    for ignore_eos, last in ((False, 2), (True, 77)):
        engine = Engine(ToyBackend(spec))
        sampling = SamplingParams(logit_bias=(*ends.items(), (99, 70.0)), **fields)
        stops = frozenset({77})
        engine.add(
            request("a", [5, 6], 9, sampling=sampling, stop_token_ids=stops, ignore_eos=ignore_eos)
        )
        found = run(engine)["a"]
        wanted = [99, 99, 99, 99, 2] if not ignore_eos else [99, 99, 99, 99, 2, 2, 2, 2, 2]
        assert tokens(found) == wanted, last
