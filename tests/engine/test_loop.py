"""The thread shell: delivery, stop strings, cancelling, the queue's bound, the watchdog, the end."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import random
import socket
import threading
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from djl_python_neuronx.engine import loop as loop_module
from djl_python_neuronx.engine import worker
from djl_python_neuronx.engine.core import Engine, StepResult
from djl_python_neuronx.engine.detokenizer import Delta
from djl_python_neuronx.engine.link import (
    EngineState,
    Link,
    decode_step,
    encode_request,
)
from djl_python_neuronx.engine.loop import EngineLoop, end_engine
from djl_python_neuronx.engine.replicas import Replicas
from djl_python_neuronx.engine.streams import BlockingQueue
from djl_python_neuronx.engine.worker import WorkerSettings, _Worker, work
from djl_python_neuronx.errors import (
    BackendError,
    BackendUnavailableError,
    CoresTakenError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
    ServingError,
    StepError,
)
from djl_python_neuronx.types import FinishReason, TokenOutput
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend, expected
from tests.engine.loops import (
    LONG,
    Parts,
    Recorder,
    ThreadLoop,
    collect,
    in_parts,
    request,
    running,
    shown,
    text,
)
from tests.processes import PATIENCE_S, wait_until

ENDLESS = 4000
"""Tokens that take longer than any test, with `LONG` and a step of some milliseconds."""


def only(loop: Replicas) -> EngineLoop:
    """The engine loop of the only copy."""
    (copy,) = loop._loops
    return copy


def assert_idle(loop: ThreadLoop, backend: ToyBackend) -> None:
    wait_until(lambda: not (loop.engine.has_work or backend.acquired) and len(loop.streams) == 0)
    assert backend.violations == []


def test_deltas_carry_the_text_and_the_counts() -> None:
    backend = ToyBackend()
    with running(backend) as loop:
        inbox = BlockingQueue()
        loop.submit(request("a", [5, 6], 6), inbox)
        deltas = collect(inbox, "a")["a"]
        assert text(deltas) == shown(expected([5, 6], 6))
        assert [delta.num_generated_tokens for delta in deltas] == list(range(1, 7))
        assert {delta.num_prompt_tokens for delta in deltas} == {2}
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert_idle(loop, backend)


@pytest.mark.parametrize("where", ["reading", "grammar", "queue"])
def test_a_request_that_the_engine_cannot_take_ends_alone(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        pass

    def fails(*_: Any) -> None:
        raise Panic("odd") if where != "queue" else KeyError("odd")

    backend = ToyBackend(LONG, step_s=0.001)
    with running(backend) as loop:
        inbox = BlockingQueue()
        loop.submit(request("neighbour", [7, 6], 50), inbox)
        wait_until(lambda: loop.engine.num_running == 1)
        with monkeypatch.context() as patched:
            if where == "reading":
                patched.setattr(worker, "REQUEST", SimpleNamespace(validate_python=fails))
            elif where == "grammar":
                patched.setattr("djl_python_neuronx.engine.grammars.Grammars.new", fails)
            else:
                patched.setattr(loop.engine, "add", fails)
            grammar = "start: /a/" if where == "grammar" else None
            loop.submit(request("bad", [5, 6], 6, grammar=grammar), inbox)
            found = collect(inbox, "bad", "neighbour")
        assert text(found["neighbour"]) == shown(expected([7, 6], 50))
        error = found["bad"][-1].error
        assert isinstance(error, BackendError)
        assert "the engine could not take the request" in str(error)
        assert_idle(loop, backend)


@pytest.mark.parametrize("length", [1, 60, 64])
def test_without_a_number_of_tokens_a_request_ends_when_its_slot_is_full(length: int) -> None:
    backend = ToyBackend()
    with running(backend) as loop:
        inbox = BlockingQueue()
        loop.submit(request("a", [5] * length, None, top_logprobs=2), inbox)
        deltas = collect(inbox, "a")["a"]
        assert text(deltas) == shown(expected([5] * length, 128 - length))
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert all(len(token.top) == 2 for delta in deltas for token in delta.tokens)
        assert_idle(loop, backend)


def test_a_stop_string_ends_the_request_and_frees_its_slot() -> None:
    backend = ToyBackend(replace(TOY_SPEC, num_slots=1), step_s=0.001)
    with running(backend) as loop:
        ids = expected([5, 6], 40)
        stop = f"<{ids[7]}><{ids[8]}>"
        inbox = BlockingQueue()
        loop.submit(request("a", [5, 6], 100, stop_strings=("never", stop)), inbox)
        loop.submit(request("b", [7, 6], 5), inbox)
        found = collect(inbox, "a", "b")
        assert text(found["a"]) == shown(ids[:7])
        assert found["a"][-1].finish_reason is FinishReason.STOP
        assert text(found["b"]) == shown(expected([7, 6], 5))
        assert_idle(loop, backend)


def test_abort_delivers_nothing_more_and_frees_the_slot() -> None:
    backend = ToyBackend(LONG, step_s=0.005)
    with running(backend) as loop:
        inbox, other = BlockingQueue(), BlockingQueue()
        loop.submit(request("a", [5, 6], ENDLESS), inbox)
        loop.submit(request("b", [7, 6], 3), other)
        assert inbox.drain(PATIENCE_S)
        loop.abort("a")
        loop.abort("a")
        loop.abort("unknown")
        assert text(collect(other, "b")["b"]) == shown(expected([7, 6], 3))
        assert not any(delta.finished for delta in inbox.drain(0.0))
        assert_idle(loop, backend)


def test_an_id_in_use_is_refused() -> None:
    backend = ToyBackend()
    backend.hang_at = {0}
    with running(backend) as loop:
        inbox = BlockingQueue()
        loop.submit(request("same", [5, 6], 4), inbox)
        with pytest.raises(RequestError, match="already in use"):
            loop.submit(request("same", [5, 6], 4), inbox)
        backend.resume.set()
        assert text(collect(inbox, "same")["same"]) == shown(expected([5, 6], 4))
        assert_idle(loop, backend)


def test_the_queue_is_bounded() -> None:
    backend = ToyBackend(replace(TOY_SPEC, num_slots=1))
    backend.hang_at = {0}
    with running(backend, max_waiting=2) as loop:
        inbox = BlockingQueue()
        for name in "abc":
            loop.submit(request(name, [5, 6]), inbox)
        with pytest.raises(QueueFullError, match=r"option\.max_waiting"):
            loop.submit(request("d", [5, 6]), inbox)
        backend.resume.set()
        for deltas in collect(inbox, "a", "b", "c").values():
            assert text(deltas) == shown(expected([5, 6], 5))
        loop.submit(request("d", [5, 6]), inbox)
        collect(inbox, "d")
        assert_idle(loop, backend)


def test_a_group_is_queued_whole_or_not_at_all() -> None:
    backend = ToyBackend(replace(TOY_SPEC, num_slots=1))
    backend.hang_at = {0}
    with running(backend, max_waiting=2) as loop:
        inbox = BlockingQueue()
        loop.submit(request("a", [5, 6]), inbox)
        group = [request(name, [6, ord(name)]) for name in "bcde"]
        with pytest.raises(QueueFullError, match=r"option\.max_waiting"):
            loop.submit_all(loop.prepare(*group[:3]), inbox)
        with pytest.raises(
            RequestError, match="4 prompts; this deployment takes at most 3"
        ) as found:
            loop.submit_all(loop.prepare(*group), inbox)
        assert found.value.status == 400
        with pytest.raises(RequestError, match="'a' is already in use"):
            loop.submit_all(loop.prepare(group[0], request("a", [5])), inbox)
        with pytest.raises(PromptTooLongError, match="has 100 tokens"):
            loop.prepare(group[0], request("z", [5] * 100))
        assert len(loop.streams) == 1
        loop.submit_all(loop.prepare(*group[:2]), inbox)
        backend.resume.set()
        found = collect(inbox, "a", "b", "c")
        for name in "bc":
            assert text(found[name]) == shown(expected([6, ord(name)], 5))
        assert_idle(loop, backend)


@pytest.mark.parametrize("ends_by", ["error", "close"])
def test_a_group_that_is_not_read_to_its_end_leaves_nothing(ends_by: str) -> None:
    backend = ToyBackend(replace(LONG, num_slots=2), step_s=0.002)

    async def read(loop: ThreadLoop) -> list[Delta]:
        # Two run and two wait. The prefills come one after the other, so the first one fails alone.
        backend.fail_at = {0: RuntimeError("no")} if ends_by == "error" else {}
        generation = loop.generate(
            loop.prepare(*(request(name, [5, 6], ENDLESS) for name in "abcd"))
        )
        if ends_by == "close":
            asyncio.get_running_loop().call_later(0.05, generation.close)
        deltas = [delta async for delta in generation]
        assert generation.finished
        return deltas

    with running(backend) as loop:
        deltas = asyncio.run(asyncio.wait_for(read(loop), PATIENCE_S))
        assert [delta.finished for delta in deltas].count(True) == (ends_by == "error")
        assert len(loop.streams) == 0
        wait_until(lambda: not loop.engine.has_work)
        assert backend.num_steps < ENDLESS
        assert_idle(loop, backend)


@pytest.mark.parametrize("names", ["a", "abc"])
def test_a_request_that_has_ended_leaves_no_garbage(names: str) -> None:
    """A prompt's ids and its text are free at its end, not when a collector looks for cycles."""
    backend = ToyBackend()
    backend.hang_at = {0}
    with running(backend) as loop:
        inbox = BlockingQueue()
        gc.disable()
        try:
            loop.submit_all(loop.prepare(*(request(name, [5, 6]) for name in names)), inbox)
            streams = [weakref.ref(stream) for stream in loop.streams]
            backend.resume.set()
            collect(inbox, *names)
            assert len(streams) == len(names)
            wait_until(lambda: not any(stream() for stream in streams))
        finally:
            gc.enable()


@pytest.mark.parametrize(("own", "general"), [(1.0, 3600.0), (3600.0, 1.0), (1.0, math.inf)])
def test_at_its_deadline_a_request_ends_with_what_there_is(own: float, general: float) -> None:
    backend = ToyBackend(LONG, step_s=0.005)
    with running(backend, max_request_s=general) as loop:
        inbox = BlockingQueue()
        loop.submit(request("a", [5, 6], ENDLESS, max_seconds=own), inbox)
        deltas = collect(inbox, "a")["a"]
        last, count = deltas[-1], sum(len(delta.tokens) for delta in deltas)
        assert (last.finish_reason, last.error) == (FinishReason.TIME, None)
        assert 0 < last.num_generated_tokens == count < ENDLESS
        assert text(deltas) == shown(expected([5, 6], count))
        assert_idle(loop, backend)
        loop.submit(request("b", [5, 6], 3), inbox)
        assert text(collect(inbox, "b")["b"]) == shown(expected([5, 6], 3))
        assert_idle(loop, backend)


def test_a_deadline_counts_from_the_arrival() -> None:
    backend = ToyBackend(LONG, step_s=0.005)
    with running(backend) as loop:
        inbox = BlockingQueue()
        arrived_s = time.monotonic() - 3600
        loop.submit(request("a", [5, 6], ENDLESS, max_seconds=3601.0, arrived_s=arrived_s), inbox)
        assert collect(inbox, "a")["a"][-1].finish_reason is FinishReason.TIME


def test_a_deadline_holds_while_a_device_call_hangs() -> None:
    backend = ToyBackend(LONG)
    backend.hang_at = {3}
    with running(backend) as loop:
        inbox = BlockingQueue()
        loop.submit(request("a", [5, 6], ENDLESS, max_seconds=1.0), inbox)
        deltas = collect(inbox, "a")["a"]
        assert backend.hanging.is_set()
        assert deltas[-1].finish_reason is FinishReason.TIME
        assert deltas[-1].num_generated_tokens == 3
        assert text(deltas) == shown(expected([5, 6], 3))
        backend.resume.set()
        assert_idle(loop, backend)
        assert inbox.drain(0.0) == []


def test_a_request_that_has_no_slot_at_its_deadline_gets_an_error() -> None:
    backend = ToyBackend(LONG, step_s=0.005)
    with running(backend) as loop:
        inbox = BlockingQueue()
        loop.submit(request("a", [5, 6], ENDLESS), BlockingQueue())
        wait_until(lambda: backend.num_steps)
        loop.submit(request("b", [5, 6], 4, max_seconds=0.3), inbox)
        error = collect(inbox, "b")["b"][-1].error
        assert isinstance(error, RequestTimeoutError)
        assert "no slot within its 0.3 s" in str(error)
        loop.abort("a")
        assert_idle(loop, backend)


def test_a_prompt_that_is_not_scored_whole_at_its_deadline_gets_an_error() -> None:
    backend = ToyBackend(LONG)
    backend.hang_at = {3}
    with running(backend) as loop:
        inbox = BlockingQueue()
        loop.submit(request("a", [5] * 8, 0, scores_prompt=0, max_seconds=1.0), inbox)
        deltas = collect(inbox, "a")["a"]
        assert [token.id for delta in deltas for token in delta.prompt] == [5] * 3
        assert isinstance(deltas[-1].error, RequestTimeoutError)
        assert "not all scores of its prompt within its 1 s" in str(deltas[-1].error)
        backend.resume.set()
        assert_idle(loop, backend)


def test_what_answers_need_does_not_follow_from_prompts_that_are_scored() -> None:
    with running(ToyBackend(LONG)) as loop:
        inbox, pace = BlockingQueue(), only(loop).streams.pace
        loop.submit(request("a", [5] * 8, 3, scores_prompt=0), inbox)
        collect(inbox, "a")
        assert pace.service_s > 0
        assert pace.needed_s(3) == 0
        loop.submit(request("b", [5] * 8, 3), inbox)
        collect(inbox, "b")
        assert 0 < pace.needed_s(1) < pace.needed_s(3)


def test_at_the_deadline_of_a_group_what_waits_ends_like_what_runs() -> None:
    backend = ToyBackend(LONG, step_s=0.005)
    with running(backend) as loop:
        inbox = BlockingQueue()
        group = [request(name, [5, 6], ENDLESS, max_seconds=1.0) for name in "ab"]
        loop.submit_all(loop.prepare(*group), inbox)
        found = collect(inbox, "a", "b")
        assert [found[name][-1].finish_reason for name in "ab"] == [FinishReason.TIME] * 2
        assert [found[name][-1].num_generated_tokens > 0 for name in "ab"] == [True, False]
        assert text(found["b"]) == ""
        assert_idle(loop, backend)


def test_what_the_model_cannot_serve_is_refused_at_the_door() -> None:
    with running(ToyBackend()) as loop, pytest.raises(PromptTooLongError):
        loop.submit(request("a", [5] * 100), BlockingQueue())
    assert len(loop.streams) == 0


def test_waiting_longer_than_allowed_is_a_timeout() -> None:
    backend = ToyBackend(LONG, step_s=0.005)
    with running(backend, queue_timeout_s=1.0) as loop:
        inbox = BlockingQueue()
        loop.submit(request("a", [5, 6], ENDLESS), BlockingQueue())
        wait_until(lambda: backend.num_steps)
        loop.submit(request("b", [5, 6], 4), inbox)
        assert isinstance(collect(inbox, "b")["b"][-1].error, RequestTimeoutError)
        assert len(loop.streams) == 1
        loop.abort("a")
        assert_idle(loop, backend)


def test_a_failed_step_is_an_error_delta_and_the_loop_goes_on() -> None:
    backend = ToyBackend()
    backend.fail_at = {3: RuntimeError("XLA says no")}
    with running(backend) as loop:
        inbox = BlockingQueue()
        loop.submit(request("a", [5, 6], 10), inbox)
        (last,) = [delta for delta in collect(inbox, "a")["a"] if delta.finished]
        assert isinstance(last.error, StepError)
        assert last.num_generated_tokens == 3
        loop.submit(request("b", [5, 6], 10), inbox)
        assert text(collect(inbox, "b")["b"]) == shown(expected([5, 6], 10))
        assert loop.alive
        assert_idle(loop, backend)


def test_a_device_call_that_hangs_kills_the_engine_and_answers_everyone() -> None:
    backend = ToyBackend(replace(TOY_SPEC, num_slots=1))
    deaths: list[ServingError] = []
    answered_before_death: list[int] = []
    inbox = BlockingQueue()

    def on_death(error: ServingError) -> None:
        answered_before_death.append(sum(delta.finished for delta in inbox.drain(0.0)))
        deaths.append(error)

    with running(backend, on_death=on_death) as loop:
        loop.submit(request("warm", [5, 6], 30), inbox)
        collect(inbox, "warm")
        backend.hang_at = {backend.num_steps + 3}
        for name in "abc":
            loop.submit(request(name, [5, 6], 30), inbox)
        assert backend.hanging.wait(PATIENCE_S)
        # From now on: other steps may be slow on a busy machine.
        only(loop)._settings = replace(only(loop)._settings, step_timeout_s=0.2)
        only(loop)._patience_s = 0.2
        wait_until(lambda: deaths)
        assert answered_before_death == [3]
        assert isinstance(deaths[0], BackendUnavailableError)
        assert "option.step_timeout" in str(deaths[0])
        assert not loop.alive
        with pytest.raises(BackendUnavailableError):
            loop.submit(request("late", [5, 6]), inbox)
        backend.resume.set()
        wait_until(lambda: only(loop)._engine.wait(0))
        assert inbox.drain(0.0) == []


def test_the_first_call_of_a_graph_may_take_longer() -> None:
    backend = ToyBackend(prefill_s=1.0)
    with running(backend, step_timeout_s=0.6) as loop:
        inbox = BlockingQueue()
        loop.submit(request("a", [5, 6], 1), inbox)
        assert text(collect(inbox, "a")["a"]) == shown(expected([5, 6], 1))
        assert loop.alive


def test_a_fatal_error_ends_the_loop() -> None:
    backend = ToyBackend()
    fatal = StepError("the device is gone")
    fatal.fatal = True
    backend.fail_at = {2: fatal}
    deaths: list[ServingError] = []
    with running(backend, on_death=deaths.append) as loop:
        inbox = BlockingQueue()
        loop.submit(request("a", [5, 6], 10), inbox)
        assert str(collect(inbox, "a")["a"][-1].error) == str(fatal)
        wait_until(lambda: deaths)
        assert not loop.alive


def test_an_outlet_that_fails_harms_nobody_else() -> None:
    class Broken:
        def deliver(self, deltas: list[Delta]) -> None:
            msg = "no"
            raise RuntimeError(msg)

    backend = ToyBackend(step_s=0.001)
    with running(backend) as loop:
        inbox = BlockingQueue()
        loop.submit(request("a", [5, 6], 10), Broken())
        loop.submit(request("b", [7, 6], 10), inbox)
        assert text(collect(inbox, "b")["b"]) == shown(expected([7, 6], 10))
        assert_idle(loop, backend)


def test_close_lets_running_requests_end() -> None:
    backend = ToyBackend()
    backend.hang_at = {3}
    with running(backend) as loop:
        inbox = BlockingQueue()
        loop.submit(request("a", [5, 6], 20), inbox)
        inbox_deltas = inbox.drain(PATIENCE_S)
        closer = threading.Thread(target=loop.close, args=(PATIENCE_S,))
        closer.start()
        wait_until(lambda: loop.error is not None)
        with pytest.raises(BackendUnavailableError, match="stopping"):
            loop.submit(request("b", [5, 6]), inbox)
        backend.resume.set()
        rest = collect(inbox, "a")["a"]
        closer.join(PATIENCE_S)
        assert text(inbox_deltas + rest) == shown(expected([5, 6], 20))


def test_close_answers_what_cannot_end_and_stops_the_threads() -> None:
    backend = ToyBackend(LONG, step_s=0.005)
    with running(backend) as loop:
        inbox = BlockingQueue()
        loop.submit(request("a", [5, 6], ENDLESS), inbox)
        inbox.drain(PATIENCE_S)
        loop.close()
        last = collect(inbox, "a")["a"][-1]
        assert isinstance(last.error, BackendUnavailableError)
        assert last.error.retry_after_s
        assert last.num_generated_tokens > 0
        assert backend.acquired == frozenset()
    assert not any(thread.is_alive() for thread in only(loop)._threads)


def test_closing_a_generation_ends_an_iteration_that_waits() -> None:
    backend = ToyBackend()
    backend.hang_at = {0}

    async def wait(loop: EngineLoop) -> list[Delta]:
        generation = loop.generate(loop.prepare(request("a", [5, 6], 4)))
        asyncio.get_running_loop().call_later(0.05, generation.close)
        return [delta async for delta in generation]

    with running(backend) as loop:
        assert asyncio.run(asyncio.wait_for(wait(loop), PATIENCE_S)) == []
        backend.resume.set()
        wait_until(lambda: not loop.engine.has_work)
        assert_idle(loop, backend)


def test_generate_in_an_event_loop_and_closing_aborts() -> None:
    backend = ToyBackend(step_s=0.001)
    pick = random.Random(5)

    async def one(
        loop: EngineLoop, name: str, prompt: list[int], num_tokens: int, give_up: bool
    ) -> str | None:
        generation = loop.generate(loop.prepare(request(name, prompt, num_tokens)))
        deltas = []
        try:
            async for delta in generation:
                deltas.append(delta)
                if give_up and len(deltas) == 2:
                    return None
        finally:
            generation.close()
        return text(deltas)

    async def many(loop: EngineLoop) -> None:
        prompts = [
            [pick.randrange(3, 300) for _ in range(pick.randrange(1, 30))] for _ in range(60)
        ]
        sizes = [pick.randrange(3, 30) for _ in prompts]
        answers = await asyncio.gather(
            *(one(loop, str(i), prompts[i], sizes[i], i % 3 == 0) for i in range(len(prompts)))
        )
        for i, answer in enumerate(answers):
            assert answer == (None if i % 3 == 0 else shown(expected(prompts[i], sizes[i])))
        with pytest.raises(PromptTooLongError):
            loop.prepare(request("long", [5] * 100))

    with running(backend) as loop:
        asyncio.run(many(loop))
        assert_idle(loop, backend)
        asyncio.run(many(loop))
        assert_idle(loop, backend)
        assert len(loop._async_queues) <= 2


def test_the_observer_hears_what_happened_and_cannot_break_anything() -> None:
    backend = ToyBackend()
    recorder = Recorder()
    with running(backend, observer=recorder) as loop:
        inbox = BlockingQueue()
        loop.submit(request("a", [5, 6], 2), inbox)
        collect(inbox, "a")
        backend.fail_at = {2: RuntimeError("no")}
        loop.submit(request("b", [5, 6], 2), inbox)
        collect(inbox, "b")
        backend.hang_at = {backend.num_steps}
        loop.submit(request("c", [5, 6], 90), inbox)
        loop.abort("c")
        backend.resume.set()
        wait_until(lambda: not loop.engine.has_work)
        with pytest.raises(RequestError):
            loop.submit(request("e", [], 2), inbox)
        assert "rejected bad_request" in recorder.seen
        events = {"prefill 1", "decode 1", "ended length", "failed 0", "ended error", "given up c"}
        wait_until(lambda: events <= set(recorder.seen))
        recorder.broken = True
        loop.submit(request("d", [5, 6], 4), inbox)
        assert text(collect(inbox, "d")["d"]) == shown(expected([5, 6], 4))
        assert loop.alive


def test_an_output_thread_that_ends_is_a_death_and_not_silence() -> None:
    backend = ToyBackend(LONG, step_s=0.005)
    deaths: list[ServingError] = []
    with running(backend, on_death=deaths.append) as loop:
        inbox = BlockingQueue()
        loop.submit(request("a", [5, 6], ENDLESS), inbox)
        inbox.drain(PATIENCE_S)
        only(loop)._delivery.deliver = None  # type: ignore[assignment,method-assign]
        assert isinstance(collect(inbox, "a")["a"][-1].error, BackendUnavailableError)
        wait_until(lambda: not loop.alive)
        with pytest.raises(BackendUnavailableError):
            loop.submit(request("b", [5, 6], 4), inbox)
    assert len(deaths) == 1


def test_death_is_told_once() -> None:
    backend = ToyBackend()
    fatal = StepError("the device is gone")
    fatal.fatal = True
    backend.fail_at = {1: fatal}
    deaths: list[ServingError] = []
    with running(backend, on_death=deaths.append) as loop:
        inbox = BlockingQueue()
        loop.submit(request("a", [5, 6], 10), inbox)
        collect(inbox, "a")
        wait_until(lambda: deaths)
        loop.close()
    assert [*map(str, deaths)] == [str(fatal)]


def test_an_event_loop_that_is_gone_gives_its_requests_up() -> None:
    backend = ToyBackend(LONG, step_s=0.005)

    async def start(loop: Replicas) -> None:
        generation = loop.generate(loop.prepare(request("a", [5, 6], ENDLESS)))
        await generation.__anext__()

    with running(backend) as loop:
        asyncio.run(start(loop))
        wait_until(lambda: len(loop.streams) == 0 and loop.engine.num_running == 0)
        assert backend.num_steps < ENDLESS


def test_a_request_that_has_sent_no_token_is_run_again_once() -> None:
    with in_parts(restarts=5, resumes=False) as (loop, hosts, _):
        sent, unsent, waiting = BlockingQueue(), BlockingQueue(), BlockingQueue()
        for name, inbox in (("sent", sent), ("unsent", unsent), ("waiting", waiting)):
            loop.submit(request(name, [5, 6]), inbox)
            assert hosts[0].receive("add")["request_id"] == name
        hosts[0].engine.send("entering", ["sent", "unsent"])
        hosts[0].step(TokenOutput("sent", (7,)))
        assert sent.drain(PATIENCE_S)[0].tokens[0].id == 7
        hosts[0].ended.set()
        hosts[0].engine.close()
        (last,) = sent.drain(PATIENCE_S)
        assert isinstance(last.error, BackendUnavailableError)
        assert "SIGKILL" in str(last.error)
        wait_until(lambda: len(hosts) == 2)
        assert [hosts[1].receive("add")["request_id"] for _ in "12"] == ["unsent", "waiting"]
        hosts[1].engine.send("entering", ["unsent"])
        wait_until(lambda: only(loop).streams.get("unsent").begun)  # type: ignore[union-attr]
        hosts[1].ended.set()
        hosts[1].engine.close()
        (last,) = unsent.drain(PATIENCE_S)
        assert last.error is not None
        assert last.error.status == 500
        wait_until(lambda: len(hosts) == 3)
        assert hosts[2].receive("add")["request_id"] == "waiting"
        hosts[2].step(TokenOutput("waiting", (8,), FinishReason.LENGTH), running=0)
        assert waiting.drain(PATIENCE_S)[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("ends", "killed"), [(True, []), (False, ["killed"])])
def test_an_engine_is_killed_only_if_it_does_not_end(ends: bool, killed: list[str]) -> None:
    log: list[str] = []
    host = Parts(log)
    if ends:
        host.ended.set()
    end_engine(host)
    assert log == ["started", *killed]


def test_after_the_first_call_of_a_graph_the_engine_has_the_time_of_a_step() -> None:
    with in_parts(restarts=0, step_timeout_s=0.2) as (loop, hosts, _):
        inbox = BlockingQueue()
        loop.submit(request("a", [5, 6]), inbox)
        hosts[0].receive("add")
        hosts[0].engine.send("first_call")
        hosts[0].step(TokenOutput("a", (7,)))
        deltas = collect(inbox, "a")["a"]
        assert "the engine has not answered for 0.2 s" in str(deltas[-1].error)


@pytest.mark.parametrize(("seconds_ago", "is_given_up"), [(590, True), (610, False)])
def test_deaths_count_for_ten_minutes(seconds_ago: float, is_given_up: bool) -> None:
    with in_parts(restarts=2) as (loop, hosts, _):
        only(loop)._deaths = [time.monotonic() - seconds_ago] * 2
        hosts[0].ended.set()
        hosts[0].engine.close()
        wait_until(lambda: (loop.error is not None) if is_given_up else len(hosts) == 2)
        assert (loop.error is not None) == is_given_up


def test_starts_that_fail_slowly_are_given_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes longer than the window in which deaths count; only the first waits for cores."""
    monkeypatch.setattr(loop_module, "RESTART_WINDOW_S", 0.0)
    monkeypatch.setattr(loop_module, "LONGEST_PAUSE_S", 0.0)
    waits: list[bool] = []

    def once_free(load: Any, *, pause: Any, **_: Any) -> Any:
        waits.append(not pause(0))
        if len(waits) == 1:
            return load()
        msg = "taken"
        raise CoresTakenError(msg)

    with in_parts(restarts=3, once_free=once_free) as (loop, hosts, _):
        hosts[0].ended.set()
        hosts[0].engine.close()
        wait_until(lambda: loop.error is not None)
    assert waits == [True, True, False, False]


def test_everyone_is_answered_when_the_engine_cannot_be_killed_at_once() -> None:
    with in_parts(restarts=1, step_timeout_s=0.4) as (loop, hosts, log):
        inbox = BlockingQueue()
        loop.submit(request("a", [5, 6]), inbox)
        hosts[0].engine.send("entering", ["a"])
        hosts[0].step(TokenOutput("a", (7,)))
        error = collect(inbox, "a")["a"][-1].error
        assert "option.step_timeout" in str(error)
        wait_until(lambda: len(hosts) == 2)
        assert log[:2] == ["started", "killed"]


def test_drafting_is_given_up_only_when_the_engine_says_so() -> None:
    """An idle engine may not have said anything yet."""
    with in_parts() as (loop, hosts, _):
        assert loop.state.speculates
        hosts[0].engine.send_step(lambda: (StepResult([]), EngineState(speculates=False)))
        wait_until(lambda: not loop.state.speculates)


def test_a_hang_is_noticed_although_its_clients_have_left() -> None:
    with in_parts(restarts=1, step_timeout_s=0.4) as (loop, hosts, _):
        loop.submit(request("a", [5, 6]), BlockingQueue())
        hosts[0].receive("add")
        hosts[0].engine.send("entering", ["a"])
        wait_until(lambda: only(loop)._busy)
        loop.abort("a")
        wait_until(lambda: len(hosts) == 2)


def test_the_last_state_of_an_engine_that_becomes_idle_is_idle() -> None:
    """Else the watchdog would end it. Its state is read for a step's message, and a moment later nothing runs."""
    being_read, is_idle = threading.Event(), threading.Event()

    class Interrupted(Engine):
        @property
        def num_running(self) -> int:
            count = super().num_running
            if count and not being_read.is_set():
                being_read.set()
                assert is_idle.wait(PATIENCE_S)
            return count

    front, end = socket.socketpair()
    link, engine = Link(front), Interrupted(ToyBackend())
    one = _Worker(engine, Link(end), WorkerSettings())
    one._send_state()
    engine.add(request("a", [5, 6]))
    one._send(engine.run(engine.schedule()))
    assert being_read.wait(PATIENCE_S)
    engine.abort("a")
    one._send_state()
    is_idle.set()
    one._link.close()
    *_, (_, *last) = iter(link.receive, None)
    assert decode_step(*last)[1] == EngineState(speculates=False)
    link.close()


def test_an_idle_engine_does_not_hang() -> None:
    with in_parts(restarts=1, step_timeout_s=0.2) as (loop, hosts, log):
        inbox = BlockingQueue()
        loop.submit(request("a", [5, 6]), inbox)
        hosts[0].engine.send("entering", ["a"])
        hosts[0].step(TokenOutput("a", (7,), FinishReason.LENGTH), running=0)
        collect(inbox, "a")
        time.sleep(1.0)
        assert log == ["started"]


def test_a_hang_during_the_drain_is_noticed() -> None:
    with in_parts(restarts=0, step_timeout_s=0.4) as (loop, hosts, _):
        inbox = BlockingQueue()
        loop.submit(request("a", [5, 6]), inbox)
        hosts[0].engine.send("entering", ["a"])
        closer = threading.Thread(target=loop.close, args=(PATIENCE_S,))
        closer.start()
        error = collect(inbox, "a")["a"][-1].error
        assert isinstance(error, BackendUnavailableError)
        hosts[0].ended.set()
        closer.join(PATIENCE_S)
        assert not closer.is_alive()


def test_a_deadline_holds_while_the_engine_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with in_parts(restarts=5) as (loop, hosts, _):
        inbox = BlockingQueue()
        loop.submit(request("a", [5, 6], max_seconds=0.6), inbox)
        monkeypatch.setattr(Parts, "loads", False)
        hosts[0].ended.set()
        hosts[0].engine.close()
        assert isinstance(collect(inbox, "a")["a"][-1].error, RequestTimeoutError)
        assert not loop.alive


def test_a_stop_string_that_is_a_special_token_also_stops_at_the_token() -> None:
    with in_parts() as (loop, hosts, _):
        stops = {"stop_strings": ("<eos>", "end"), "stop_token_ids": frozenset({7})}
        loop.submit(request("a", [5, 6], **stops), BlockingQueue())
        assert sorted(hosts[0].receive("add")["stop_token_ids"]) == [2, 7]


def test_the_wait_for_an_engine_begins_with_its_end() -> None:
    with in_parts(restart_timeout_s=PATIENCE_S) as (loop, hosts, _):
        inbox = BlockingQueue()
        for name in ("running", "waiting"):
            loop.submit(request(name, [5, 6]), inbox)
            only(loop).streams.get(name).submitted_s -= 2 * PATIENCE_S  # type: ignore[union-attr]
            hosts[0].receive("add")
        hosts[0].engine.send("entering", ["running"])
        wait_until(lambda: only(loop).streams.get("running").begun)  # type: ignore[union-attr]
        hosts[0].ended.set()
        hosts[0].engine.close()
        wait_until(lambda: len(hosts) == 2)
        only(loop)._delivery.expire(only(loop)._died_s)
        assert len(loop.streams) == 2
        assert [hosts[1].receive("add")["request_id"] for _ in "12"] == ["running", "waiting"]


def test_what_waits_too_long_for_an_engine_is_not_left_with_one() -> None:
    with in_parts(restart_timeout_s=0.0) as (loop, hosts, _):
        loop.submit(request("a", [5, 6]), BlockingQueue())
        hosts[0].receive("add")
        only(loop)._delivery.expire(-math.inf)  # as if the engine had become ready just then
        assert hosts[0].receive("abort") == "a"


def test_a_worker_that_cannot_load_says_so_and_frees_its_descriptor() -> None:
    front, end = socket.socketpair()
    link, descriptor = Link(front), front.fileno()

    def load() -> Engine:
        msg = "told to"
        raise StepError(msg)

    assert not work(Link(end), load, WorkerSettings())
    assert end.fileno() == -1
    messages = iter(link.receive, None)
    assert "told to" in str([*messages][-1])
    link.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_an_error_of_the_engine_itself_reaches_the_front(monkeypatch: pytest.MonkeyPatch) -> None:
    front, end = socket.socketpair()
    link, engine = Link(front), Engine(ToyBackend())
    monkeypatch.setattr(engine, "schedule", lambda: {}["told to"])
    link.send("vocabulary", ([], []))
    link.send_encoded(encode_request(request("a", [5, 6])))
    assert not work(Link(end), lambda: engine, WorkerSettings())
    *_, (kind, code, reason) = iter(link.receive, None)
    assert (kind, code) == ("dead", BackendUnavailableError.code)
    assert "the engine failed (KeyError: 'told to')" in reason
    link.close()


def test_an_engine_waits_for_a_front_that_does_not_read() -> None:
    front, end = socket.socketpair()
    backend = ToyBackend(replace(LONG, vocab_size=30_000))
    engine = Engine(backend)
    thread = threading.Thread(
        target=work, args=(Link(end), lambda: engine, WorkerSettings()), daemon=True
    )
    link = Link(front)
    thread.start()
    asked = request("a", [5, 6], ENDLESS, logprobs=True)
    link.send("vocabulary", ([], []))
    link.send_encoded(encode_request(asked))
    wait_until(lambda: backend.num_steps)
    before = -1
    while before != backend.num_steps:
        before = backend.num_steps
        time.sleep(0.5)
    assert 0 < before < ENDLESS - 100
    while (message := link.receive()) is not None and backend.num_steps < before + 50:
        assert message[0] != "dead"
    assert message is not None
    link.end()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    link.close()


def test_an_error_that_is_no_unicode_ends_its_request_alone() -> None:
    backend = ToyBackend()
    backend.fail_at = {1: RuntimeError("no file named \udcff")}
    with running(backend) as loop:
        inbox = BlockingQueue()
        loop.submit(request("a", [5, 6], 10), inbox)
        assert isinstance(collect(inbox, "a")["a"][-1].error, StepError)
        loop.submit(request("b", [5, 6], 10), inbox)
        assert text(collect(inbox, "b")["b"]) == shown(expected([5, 6], 10))
