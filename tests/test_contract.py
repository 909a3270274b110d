"""Duties of every backend to the engine, at the protocol itself, on each backend that loads here."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from djl_python_neuronx import backends
from djl_python_neuronx.backends.base import Backend, Step, Want
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.errors import BackendError, StepError
from djl_python_neuronx.types import EngineRequest, GenerationRequest
from tests.doubles.device_driver import Driver, Text, assert_same, logits_of, make_rows
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend, expected
from tests.engine.steps import across_the_border

NUM_SLOTS, MAX_LEN = 4, 48
PREFILL_BUCKETS, TOKEN_BUCKETS = (4, 8, 20), (12, 24, 48)
POISON = 96
"""This token and the padding give NaN in a real model; no prompt of the tests has it by chance."""


def load_toy(_: Path) -> Backend:
    """The double that the engine is tested with: it keeps the same contract."""
    return ToyBackend(
        replace(
            TOY_SPEC,
            num_slots=NUM_SLOTS,
            max_model_len=MAX_LEN,
            prefill_buckets=PREFILL_BUCKETS,
            token_buckets=TOKEN_BUCKETS,
        )
    )


def load_cpu(directory: Path, *, mixed_steps: bool = False) -> Backend:
    pytest.importorskip("torch", reason="the cpu backend needs torch")
    pytest.importorskip("transformers", "4.57", reason="the cpu backend needs transformers 4.57")
    from tests.doubles.tiny_models import poison, save_tiny_model

    save_tiny_model("llama", directory)
    poison(directory / "model.safetensors", 0, POISON)
    plan = backends.LoadPlan(
        directory,
        NUM_SLOTS,
        MAX_LEN,
        PREFILL_BUCKETS,
        TOKEN_BUCKETS,
        num_threads=1,
        mixed_steps=mixed_steps,
    )
    return backends.get("cpu").load(plan)


def load_sim(directory: Path, *, mixed_steps: bool = False) -> Backend:
    (directory / "config.json").write_text('{"model_type": "llama", "vocab_size": 97}')
    shapes = (NUM_SLOTS, MAX_LEN, PREFILL_BUCKETS, TOKEN_BUCKETS)
    return backends.get("sim").load(backends.LoadPlan(directory, *shapes, mixed_steps=mixed_steps))


def load_tnx(directory: Path, *, continuous: bool = True, block_size: int | None = None) -> Backend:
    """On the rig or a device; padding is a token like any other there, so it has to be a number."""
    from tests.backends.tnx_plans import tnx_plan
    from tests.doubles.tiny_models import poison, save_tiny_model

    save_tiny_model("llama", directory)
    poison(directory / "model.safetensors", POISON)
    shapes = (NUM_SLOTS, MAX_LEN, PREFILL_BUCKETS, TOKEN_BUCKETS)
    plan = tnx_plan(directory, *shapes, continuous=continuous, block_size=block_size)
    return backends.get("tnx").load(plan)


def load_nxdi(directory: Path, *, continuous: bool = True) -> Backend:
    """On the rig or a device; padding is a token like any other there, so it has to be a number."""
    from tests.backends.nxdi_plans import nxdi_plan
    from tests.doubles.tiny_models import poison, save_tiny_model

    save_tiny_model("llama", directory)
    poison(directory / "model.safetensors", POISON)
    shapes = (NUM_SLOTS, MAX_LEN, PREFILL_BUCKETS, TOKEN_BUCKETS)
    return backends.get("nxdi").load(nxdi_plan(directory, *shapes, continuous=continuous))


def load_double(directory: Path, **plan: object) -> Backend:
    """The nxdi backend on the library's stand-in."""
    pytest.importorskip("torch", reason="the nxdi backend needs torch")
    pytest.importorskip("transformers", "4.57", reason="the nxdi backend needs transformers 4.57")
    from tests.backends.nxdi_plans import nxdi_plan
    from tests.doubles import nxdi_double

    (directory / "model.safetensors").write_text("")
    (directory / "config.json").write_text('{"model_type": "llama", "vocab_size": 97}')
    shapes = (NUM_SLOTS, MAX_LEN, PREFILL_BUCKETS, TOKEN_BUCKETS)
    with pytest.MonkeyPatch.context() as patch:
        nxdi_double.install(patch, POISON)
        return backends.get("nxdi").load(nxdi_plan(directory, *shapes, **plan))


LOADERS: dict[str, Callable[[Path], Backend]] = {
    "toy": load_toy,
    "cpu": load_cpu,
    "cpu-mixed": lambda directory: load_cpu(directory, mixed_steps=True),
    "sim": load_sim,
    "sim-mixed": lambda directory: load_sim(directory, mixed_steps=True),
    "tnx": load_tnx,
    "tnx-static": lambda directory: load_tnx(directory, continuous=False),
    "tnx-paged": lambda directory: load_tnx(directory, block_size=8),
    "toy-nxdi": load_double,
    "toy-nxdi-static": lambda directory: load_double(directory, continuous=False),
    "toy-nxdi-few": lambda directory: load_double(directory, token_generation_batches=[1, 2]),
    "nxdi": load_nxdi,
    "nxdi-static": lambda directory: load_nxdi(directory, continuous=False),
}
PARAMETERS = [
    pytest.param(name, marks=[getattr(pytest.mark, library)] if library in {"nxdi", "tnx"} else [])
    for name in LOADERS
    for library in [name.partition("-")[0]]
]


def test_every_backend_of_the_folder_is_tested_here() -> None:
    assert {name.partition("-")[0] for name in LOADERS} == {"toy", *backends.names()}


@pytest.fixture(scope="module", params=PARAMETERS)
def load(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Backend]:
    directory = tmp_path_factory.mktemp(request.param)
    return lambda: LOADERS[request.param](directory)


@pytest.fixture(scope="module")
def shared(load: Callable[[], Backend]) -> Iterator[Backend]:
    """One backend for all tests that leave every slot empty."""
    backend = load()
    yield backend
    backend.close()


@pytest.fixture
def driver(shared: Backend) -> Iterator[Driver]:
    driver = Driver(shared)
    yield driver
    for slot in list(driver.live):
        driver.leave(slot)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{seed} {length}").choices(range(3, 90), k=length)


def test_spec_holds_what_was_asked_for(shared: Backend) -> None:
    spec = shared.spec
    assert (spec.num_slots, spec.max_model_len) == (NUM_SLOTS, MAX_LEN)
    assert spec.prefill_buckets == PREFILL_BUCKETS
    # Where steps are mixed a library may have graphs by tokens and by no row's length.
    assert spec.token_buckets in {TOKEN_BUCKETS, *([(MAX_LEN,)] if spec.mixed_steps else [])}
    assert 1 <= spec.max_prefill_batch <= NUM_SLOTS
    assert Want.LOGITS in spec.outputs


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 8),  # decodes before it joins
        st.integers(1, 20),  # prompt tokens
        st.integers(1, 14),  # tokens until it leaves
        st.integers(0, NUM_SLOTS - 1),  # which of the free slots
    ),
    min_size=1,
    max_size=8,
)


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(arrivals=ARRIVALS)
def test_any_joins_and_leaves_give_what_each_prompt_gives_alone(
    driver: Driver, arrivals: list[tuple[int, int, int, int]]
) -> None:
    waiting, leaves, clock = list(enumerate(arrivals)), {}, 0
    done: list[Text] = []
    while waiting or driver.live:
        joins: dict[int, list[int]] = {}
        for name, (due, length, num_tokens, choice) in list(waiting):
            free = [slot for slot in driver.free if slot not in joins]
            if due <= clock and free:
                slot = free[choice % len(free)]
                joins[slot], leaves[slot] = prompt_of(length, name), num_tokens
                waiting.remove((name, (due, length, num_tokens, choice)))
        driver.join(joins)
        over = [slot for slot, text in driver.live.items() if len(text.tokens) == leaves[slot]]
        done += [driver.leave(slot) for slot in over]
        driver.decode()
        clock += 1
    assert len(done) == len(arrivals)
    for text in done:
        assert_same(text, driver.alone(text.prompt, len(text.tokens), slot=NUM_SLOTS - 1))


@pytest.mark.parametrize("length", [1, 4, 5, 20])
def test_every_slot_gives_the_same(driver: Driver, length: int) -> None:
    wanted = driver.alone(prompt_of(length), 6)
    for slot in range(1, NUM_SLOTS):
        assert_same(driver.alone(prompt_of(length), 6, slot), wanted)


def test_a_slot_can_be_filled_to_its_last_position(driver: Driver) -> None:
    driver.join({1: prompt_of(3), 2: prompt_of(20)})
    while len(driver.live[2].tokens) < MAX_LEN - 20 + 1:
        driver.decode()
    with pytest.raises(StepError, match=str(MAX_LEN)):
        driver.decode()
    driver.leave(2)
    driver.decode()
    found = driver.leave(1)
    assert_same(found, driver.alone(prompt_of(3), len(found.tokens), slot=3))


def test_a_sequence_goes_on_behind_its_tokens(driver: Driver) -> None:
    """Some of its known tokens are more than a prefill holds."""
    texts = (driver.alone(prompt_of(5, seed), MAX_LEN - 5) for seed in range(99))
    wanted = next(text for text in texts if POISON not in text.tokens)
    prompt, engine = wanted.prompt, Engine(driver.backend)
    for num_given in (1, 9, 20, len(wanted.tokens) - 1):
        known = wanted.tokens[:num_given]
        engine.add(GenerationRequest(str(num_given), prompt, ignore_eos=True, given_ids=known))
    found = {output: Text(prompt, wanted.tokens[: int(output)]) for output in engine._live}
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.error is None, output.error
            found[output.request_id].tokens += output.token_ids
    for text in found.values():
        assert_same(text, wanted)
        assert len(text.tokens) == len(wanted.tokens)


def test_a_reused_slot_remembers_nothing(load: Callable[[], Backend]) -> None:
    fresh, used = Driver(load()), Driver(load())
    used.alone(prompt_of(20, seed=1), 20)
    fresh.join({0: prompt_of(2)})
    used.join({0: prompt_of(2)})
    for _ in range(15):
        first, second = (logits_of(each.backend, each.next()) for each in (fresh, used))
        np.testing.assert_array_equal(first, second)
        for each in (fresh, used):
            each.live[0].add(first[0, 0])


@pytest.mark.parametrize("at", [0, 1, 19])
def test_a_slot_recovers_from_what_is_not_a_number(driver: Driver, at: int) -> None:
    wanted = driver.alone(prompt_of(3), 8, slot=3)
    bad = prompt_of(20)
    bad[at] = POISON
    driver.join({1: bad, 2: prompt_of(3)})
    driver.decode()
    driver.leave(1)
    for _ in range(6):
        driver.decode()
    assert_same(driver.leave(2), wanted)
    assert_same(driver.alone(prompt_of(3), 8, slot=1), wanted)


def test_a_slot_recovers_from_what_a_join_has_spread(driver: Driver) -> None:
    """A static batch reads all its tokens again, with a graph that the longest sequence chooses."""
    wanted = driver.alone(prompt_of(20), 8, slot=3)
    bad = prompt_of(3)
    bad[1] = POISON
    driver.join({1: bad, 2: prompt_of(20)})
    driver.decode()
    driver.join({0: prompt_of(3)})
    for slot in range(3):
        driver.leave(slot)
    assert_same(driver.alone(prompt_of(20), 8, slot=1), wanted)


def test_logits_belong_to_the_caller(driver: Driver) -> None:
    driver.join({0: prompt_of(5), 2: prompt_of(6)})
    rows = driver.next_rows()
    first = logits_of(driver.backend, Step(decode=rows))
    assert first.dtype == np.float32
    assert first.shape == (2, 1, driver.backend.spec.vocab_size)
    assert first.flags.c_contiguous
    assert first.flags.writeable
    assert np.isfinite(first).all()
    kept = first.copy()
    for text, row in zip(driver.live.values(), first, strict=True):
        text.add(row[0])
    # The engine reuses the arrays of its rows: whatever it writes there must change nothing.
    for array in (rows.input_ids, rows.starts, rows.lens, rows.slots):
        array.fill(1)
    driver.decode()
    np.testing.assert_array_equal(first, kept)
    first.fill(0)
    driver.decode()
    for slot in (0, 2):
        text = driver.leave(slot)
        assert_same(text, driver.alone(text.prompt, len(text.tokens), slot=1))


# Slots 0 and 2 hold 6 and 7 tokens, slot 3 is acquired and empty.
REFUSED: dict[str, Step] = {
    "more rows than slots": Step(prefill=make_rows({slot: [5] for slot in range(NUM_SLOTS + 1)})),
    "no rows": Step(prefill=make_rows({})),
    "slots that descend": Step(decode=make_rows({2: [5], 0: [5]}, {0: 6, 2: 7})),
    "a slot that does not exist": Step(prefill=make_rows({NUM_SLOTS: [5]})),
    "a negative slot": Step(prefill=make_rows({-1: [5]})),
    "a prompt beyond the largest bucket": Step(prefill=make_rows({3: prompt_of(21)})),
    "an empty prompt": Step(prefill=make_rows({3: []})),
    "a position beyond the slot": Step(decode=make_rows({0: [5], 2: [5]}, {0: 6, 2: MAX_LEN})),
    "a decode of an empty slot": Step(decode=make_rows({3: [5]}, {3: 0})),
    "a decode beyond what is cached": Step(decode=make_rows({0: [5], 2: [5]}, {0: 6, 2: 8})),
    "a chunk beyond what is cached": Step(prefill=make_rows({3: [5]}, {3: 1})),
    "an output that it cannot give": Step(
        decode=make_rows({0: [5], 2: [5]}, {0: 6, 2: 7}, Want.TOKENS)
    ),
    # Without mixed steps any, with them this one.
    "a mixed step with a slot twice": Step(
        make_rows({0: [5]}, {0: 6}), make_rows({0: [5], 2: [5]}, {0: 6, 2: 7})
    ),
    "a mixed step whose decode is refused": Step(make_rows({0: [5]}), make_rows({2: [5]}, {2: 8})),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_refused_step_changes_nothing(driver: Driver, name: str) -> None:
    driver.join({0: prompt_of(5), 2: prompt_of(6)})
    driver.decode()
    driver.backend.acquire(3, [5], 0)
    with pytest.raises(StepError, match=r"\w") as caught:
        driver.backend.run(REFUSED[name])
    assert not caught.value.fatal
    driver.backend.release([3])
    for _ in range(4):
        driver.decode()
    for slot in (0, 2):
        text = driver.leave(slot)
        assert_same(text, driver.alone(text.prompt, len(text.tokens), slot=1))


@pytest.mark.parametrize("again", [False, True])
def test_a_slot_without_its_sequence_does_not_decode(driver: Driver, again: bool) -> None:
    driver.join({1: prompt_of(5)})
    step = driver.next()
    driver.leave(1)
    if again:
        driver.backend.acquire(1, prompt_of(7), 0)
    with pytest.raises(StepError):
        driver.backend.run(step)
    if again:
        driver.backend.release([1])


def test_nothing_wanted_is_nothing_returned(driver: Driver) -> None:
    """A prompt in three chunks is the prompt in one."""
    prompt = prompt_of(20)
    wanted = driver.alone(prompt, 5)
    driver.backend.acquire(1, prompt, 0)
    for start, end in ((0, 7), (7, 8)):
        rows = make_rows({1: prompt[start:end]}, {1: start}, Want.NOTHING)
        values = logits_of(driver.backend, Step(prefill=rows))
        assert values.shape == (1, 0, driver.backend.spec.vocab_size)
    last = logits_of(driver.backend, Step(prefill=make_rows({1: prompt[8:]}, {1: 8})))
    driver.live[1] = Text(prompt)
    driver.live[1].add(last[0, 0])
    for _ in range(4):
        driver.decode()
    assert_same(driver.leave(1), wanted)


def test_a_chunk_can_be_written_again(driver: Driver) -> None:
    """From any place on, and what was behind it is no more."""
    if not driver.backend.spec.mixed_steps:
        pytest.skip("no mixed steps")
    prompt = prompt_of(20)
    wanted = driver.alone(prompt, 5)
    driver.backend.acquire(1, prompt, 0)
    driver.backend.run(Step(prefill=make_rows({1: prompt_of(20, seed=1)})))
    for start, end in ((18, 20), (0, 7), (5, 12)):
        rows = make_rows({1: prompt[start:end]}, {1: start}, Want.NOTHING)
        driver.backend.run(Step(prefill=rows))
    with pytest.raises(StepError):
        driver.backend.run(Step(prefill=make_rows({1: prompt[13:]}, {1: 13})))
    last = logits_of(driver.backend, Step(prefill=make_rows({1: prompt[12:]}, {1: 12})))
    driver.live[1] = Text(prompt)
    driver.live[1].add(last[0, 0])
    for _ in range(4):
        driver.decode()
    assert_same(driver.leave(1), wanted)


def test_a_prompt_is_scored_with_the_logits_of_its_prefixes_beside_a_stream(
    driver: Driver,
) -> None:
    """By the engine: decode steps feed it, or a prefill returns all logits. The stream's tokens stay as they are."""
    stream, prompt = driver.alone(prompt_of(2, seed=1), 8), prompt_of(20, seed=2)
    exact = {}
    for length in range(1, len(prompt), 3):
        driver.backend.acquire(1, prompt[:length], 0)
        rows = make_rows({1: prompt[:length]})
        logits = logits_of(driver.backend, Step(prefill=rows))[0, 0].astype(np.float64)
        exact[length] = logits[prompt[length]] - np.log(np.exp(logits).sum())
        driver.backend.release([1])
    engine = Engine(driver.backend)
    engine.add(EngineRequest("stream", stream.prompt, max_new_tokens=8))
    engine.add(EngineRequest("scored", prompt, max_new_tokens=0, scores_prompt=1))
    found, tokens = {}, []
    while engine.has_work:
        for output in map(across_the_border, engine.step().outputs):
            assert output.error is None
            tokens += output.token_ids
            if output.scored is not None:
                assert output.request_id == "scored"
                places = range(output.scored.start, len(prompt))
                found.update(zip(places, output.logprobs or (), strict=False))
    assert_same(Text(stream.prompt, tokens), stream)
    assert sorted(found) == [*range(1, len(prompt))]
    assert {place: found[place] for place in exact} == pytest.approx(exact, abs=1e-3)


def test_closed_is_closed(load: Callable[[], Backend]) -> None:
    backend = load()
    backend.acquire(0, [5], 0)
    backend.close()
    backend.close()
    with pytest.raises(BackendError) as caught:
        backend.run(Step(prefill=make_rows({0: [5]})))
    assert caught.value.fatal


def test_toy_gives_what_it_promises() -> None:
    backend = ToyBackend()
    driver = Driver(backend)
    for length in (1, 9, 40):
        found = driver.alone(prompt_of(length), 20, slot=length % 4)
        assert found.tokens == expected(prompt_of(length), 20)
    stop = expected(prompt_of(9), 20)[7]
    assert expected(prompt_of(9), 20, {stop})[-1] == stop
    assert backend.violations == []


def test_toy_spoils_a_live_slot_that_a_decode_leaves_out() -> None:
    backend = ToyBackend()
    driver = Driver(backend)
    driver.join({0: prompt_of(5), 1: prompt_of(6)})
    absent = driver.live.pop(1)
    driver.decode()
    assert len(backend.violations) == 1
    driver.live[1] = absent
    driver.decode()
    assert driver.leave(1).tokens != expected(prompt_of(6), 2)
    assert driver.leave(0).tokens == expected(prompt_of(5), 3)


def test_toy_fails_and_dies_as_told() -> None:
    backend = ToyBackend()
    driver = Driver(backend)
    driver.join({0: prompt_of(5)})
    backend.fail_at[backend.num_steps] = RuntimeError("told to")
    with pytest.raises(RuntimeError, match="told to"):
        driver.decode()
    driver.leave(0)
    assert driver.alone(prompt_of(5), 3).tokens == expected(prompt_of(5), 3)
    deadly = StepError("told to die")
    deadly.fatal = True
    backend.fail_at[backend.num_steps] = deadly
    backend.acquire(0, [5], 0)
    for message in ("told to die", "closed or dead"):
        with pytest.raises(StepError, match=message):
            backend.run(Step(prefill=make_rows({0: [5]})))


def test_toy_hangs_until_it_is_let_go() -> None:
    backend = ToyBackend()
    backend.hang_at.add(0)
    backend.acquire(0, [5], 0)
    answers: list[object] = []
    thread = threading.Thread(
        target=lambda: answers.append(backend.run(Step(prefill=make_rows({0: [5]}))))
    )
    thread.start()
    assert backend.hanging.wait(60)
    assert answers == []
    backend.resume.set()
    thread.join(60)
    assert answers[0].logits is not None
