"""Prompts in chunks beside running streams: the same texts, and no stream that waits for a long prompt."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.limits import check
from djl_python_neuronx.engine.runner import Graph
from djl_python_neuronx.engine.warmup import warm_up
from djl_python_neuronx.errors import IncompatibleOptionsError, PromptTooLongError, StepError
from djl_python_neuronx.types import FinishReason
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend, expected
from tests.engine.steps import assert_clean, come_and_go, request, run, tokens

SPEC = replace(TOY_SPEC, mixed_steps=True, prefill_buckets=(4, 8, 16), eos_ids=frozenset())


class Refusing(ToyBackend):
    """It has no room for prompts of three tokens."""

    def acquire(self, slot: int, prompt_ids, adapter: int, salt: str = "") -> int:  # type: ignore[no-untyped-def]
        if len(prompt_ids) == 3:
            message = "no blocks left"
            raise StepError(message)
        return super().acquire(slot, prompt_ids, adapter)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_arrivals_give_what_each_gets_alone(data: st.DataObject) -> None:
    num_slots = data.draw(st.integers(1, 6), "slots")
    budget = data.draw(st.integers(num_slots + 1, 20), "tokens of a step")
    backend = ToyBackend(replace(SPEC, num_slots=num_slots, prefill_buckets=(budget,)))
    engine = Engine(backend)
    prompts = data.draw(
        st.lists(st.lists(st.integers(3, 299), min_size=1, max_size=90), min_size=1, max_size=10),
        "prompts",
    )
    lengths = [data.draw(st.integers(1, 38), "new tokens") for _ in prompts]
    asked = [request(str(i), *each) for i, each in enumerate(zip(prompts, lengths, strict=True))]
    arrivals = [data.draw(st.integers(0, 20), "arrival") for _ in prompts]
    given_up = data.draw(
        st.dictionaries(st.integers(0, len(prompts) - 1), st.integers(0, 40)), "given up"
    )
    found: dict[str, list[int]] = defaultdict(list)
    for turn in range(3000):
        come_and_go(engine, turn, asked, arrivals, given_up)
        if turn > 40 and not engine.has_work:
            break
        before = {name: len(ids) for name, ids in found.items()}
        running = [name for name, ids in before.items() if ids and name in engine._live]
        for output in engine.step().outputs:
            assert output.error is None, output.error
            found[output.request_id] += output.token_ids
        # A running stream gets a token in every step, whatever else is in it.
        assert all(len(found[name]) == before[name] + 1 for name in running)
    for i, prompt in enumerate(prompts):
        wanted = expected(prompt, lengths[i])
        assert found[str(i)] == (wanted[: len(found[str(i)])] if i in given_up else wanted)
    assert_clean(engine, backend)


def test_the_oldest_prompt_gets_what_a_step_has_room_for() -> None:
    backend = ToyBackend(SPEC)
    engine = Engine(backend)
    engine.add(request("stream", [5], 40))
    engine.step()
    engine.add(request("long", [6] * 40, 5))
    engine.add(request("short", [7] * 3, 5))
    backend.steps.clear()
    names: list[str] = []
    while "short" not in names:
        outputs, info = engine.step()
        names += [output.request_id for output in outputs]
    prefills = [step.lens for step in backend.steps if step.kind == "prefill"]
    # 15 of 16 tokens beside the stream's: 40 = 15 + 15 + 10, and the short one finds room beside the rest.
    assert prefills == [(15,), (15,), (10, 3)]
    assert {name: names.count(name) for name in set(names)} == {"stream": 3, "long": 1, "short": 1}
    assert info is not None
    assert (info.kind, info.bucket, info.tokens) == ("mixed", 16, 14)


def test_prompts_are_as_long_as_the_slot() -> None:
    engine = Engine(ToyBackend(SPEC))
    longest = SPEC.max_model_len - 1
    check(request("a", [5] * longest), engine.spec)
    with pytest.raises(PromptTooLongError, match=str(longest)):
        check(request("b", [5] * (longest + 1)), engine.spec)
    engine.add(request("a", [5] * longest, 5))
    assert tokens(run(engine)["a"]) == expected([5] * longest, 1)


def test_a_step_that_fails_fails_its_prompts_too_and_the_next_ones_work() -> None:
    backend = ToyBackend(SPEC)
    engine = Engine(backend)
    engine.add(request("stream", [5], 40))
    engine.step()
    engine.add(request("long", [6] * 40, 5))
    backend.fail_at[backend.num_steps + 1] = RuntimeError("told to")
    found = run(engine)
    assert {name: outputs[-1].finish_reason for name, outputs in found.items()} == {
        "stream": FinishReason.ERROR,
        "long": FinishReason.ERROR,
    }
    engine.add(request("again", [6] * 40, 5))
    assert tokens(run(engine)["again"]) == expected([6] * 40, 5)
    assert_clean(engine, backend)


def test_a_prompt_that_the_backend_refuses_leaves_alone() -> None:
    backend = Refusing(SPEC)
    engine = Engine(backend)
    for name, length in (("a", 2), ("b", 3), ("c", 4)):
        engine.add(request(name, [5] * length, 6))
    found = run(engine)
    assert found["b"][-1].error is not None
    for name, length in (("a", 2), ("c", 4)):
        assert tokens(found[name]) == expected([5] * length, 6)
    assert_clean(engine, backend)


def test_warm_up_runs_a_step_of_every_size() -> None:
    engine = Engine(ToyBackend(SPEC))
    assert warm_up(engine) == ()
    assert engine.runner.graphs_run == {Graph("mixed", bucket) for bucket in SPEC.prefill_buckets}


def test_slots_that_can_fill_a_step_are_refused() -> None:
    buckets, limit = SPEC.prefill_buckets, SPEC.max_model_len
    LoadPlan(Path("model"), buckets[-1] - 1, limit, buckets, mixed_steps=True)
    with pytest.raises(IncompatibleOptionsError, match="max_rolling_batch_size"):
        LoadPlan(Path("model"), buckets[-1], limit, buckets, mixed_steps=True)


def test_a_prompt_that_is_refused_alone_leaves_the_streams_alone() -> None:
    backend = Refusing(SPEC)
    engine = Engine(backend)
    engine.add(request("stream", [5], 10))
    engine.step()
    engine.add(request("refused", [5] * 3, 6))
    found = run(engine)
    assert found["refused"][-1].error is not None
    assert tokens(found["stream"]) == expected([5], 10)[1:]
    assert_clean(engine, backend)


@pytest.mark.parametrize(
    "facts",
    [
        {"cache_buckets": (128, 512), "cache_block": 8},
        {"cache_buckets": (32, 128, 512), "cache_block": 1, "prefill_buckets": (1, 5, 16)},
        {"cache_buckets": (128,), "cache_block": 128, "num_slots": 1},
        {"cache_buckets": (90, 300), "cache_block": 10, "num_slots": 3, "max_model_len": 100},
    ],
)
def test_warm_up_fills_the_cache_for_the_graphs_that_only_a_full_one_needs(
    facts: dict[str, Any],
) -> None:
    """So that no request waits for the first call of one."""
    spec = replace(SPEC, **facts)
    backend = ToyBackend(spec)
    engine = Engine(backend)
    assert warm_up(engine) == ()
    # All that there are, but that no step of one token needs what takes two slots.
    graphs = {Graph("mixed", n, c) for n in spec.prefill_buckets for c in spec.cache_buckets}
    assert graphs - engine.runner.graphs_run == ({Graph("mixed", 1, 512)} & graphs)
    warm = engine.runner.graphs_run.copy()
    for i in range(2 * spec.num_slots):
        engine.add(request(str(i), [5 + i] * (60 + i), 30))
    found = run(engine)
    assert engine.runner.graphs_run == warm
    for i in range(2 * spec.num_slots):
        assert tokens(found[str(i)]) == expected([5 + i] * (60 + i), 30)
    assert_clean(engine, backend)


def test_a_graph_is_also_told_by_the_cache_that_is_in_use() -> None:
    """So that its first call has the time of a first call."""
    spec = replace(SPEC, prefill_buckets=(8, 16), cache_buckets=(128, 512), cache_block=8)
    engine = Engine(ToyBackend(spec))
    for name in "abc":
        engine.add(request(name, [5] * 60, 20))
    run(engine)
    assert Graph("mixed", 8, 128) in engine.runner.graphs_run
    assert Graph("mixed", 8, 512) in engine.runner.graphs_run
