"""Several copies behind one front: which gets a request, what a death moves, who is retired and started."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.detokenizer import Delta
from djl_python_neuronx.engine.link import EngineState
from djl_python_neuronx.engine.loop import LoopSettings
from djl_python_neuronx.engine.replicas import Replicas
from djl_python_neuronx.engine.streams import BlockingQueue
from djl_python_neuronx.engine.worker import EngineThread
from djl_python_neuronx.errors import (
    BackendError,
    BackendUnavailableError,
    DeviceMemoryError,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
)
from djl_python_neuronx.types import FinishReason, TokenOutput
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend, expected
from tests.doubles.toy_tokenizer import TOKENIZER
from tests.engine.loops import LONG, Parts, Recorder, Rig, collect, request, rig, shown, text
from tests.processes import PATIENCE_S, wait_until


@pytest.fixture
def no_load(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Parts that are started from now on never become ready."""
    return lambda: monkeypatch.setattr(Parts, "loads", False)


def test_each_request_goes_to_the_copy_with_the_fewest() -> None:
    with rig(3) as copies:
        assert [copies.place(name) for name in "abcdef"] == [0, 1, 2, 0, 1, 2]
        copies.loop.abort("b")
        copies.loop.abort("e")
        assert copies.hosts[1][-1].receive("abort") == "b"
        assert copies.hosts[1][-1].receive("abort") == "e"
        assert [copies.place(name) for name in "ghi"] == [1, 1, 0]
        assert len(copies.loop.streams) == 7


def test_what_is_answered_together_stays_on_one_copy() -> None:
    with rig(2) as copies:
        assert copies.place(*"abc") == 0
        assert [copies.place(*names) for names in ("d", "ef", "g")] == [1, 1, 0]


def test_requests_of_a_dead_copy_go_to_another_at_once(
    no_load: Callable[[], None],
) -> None:
    with rig(2, restarts=5) as copies:
        names = ("sent", "elsewhere", "begun", "there", "waiting")
        inboxes = {name: copies.submit(name) for name in names}
        for name in names:
            copies.where(name)
        copies.begin(0, "sent", "begun")
        copies.hosts[0][0].step(TokenOutput("sent", (7,)))
        assert inboxes["sent"].drain(PATIENCE_S)[0].tokens[0].id == 7
        no_load()
        copies.kill(0)
        got = [copies.hosts[1][0].receive("add") for _ in "123"]
        assert [(one["request_id"], one["given_ids"]) for one in got] == [
            ("sent", [7]),
            ("begun", []),
            ("waiting", []),
        ]
        copies.hosts[1][0].step(TokenOutput("begun", (7,)), TokenOutput("there", (7,)))
        copies.finish(1, "sent")
        assert text(collect(inboxes["sent"], "sent")["sent"]) == shown([8])
        assert inboxes["begun"].drain(PATIENCE_S)[0].tokens[0].id == 7
        copies.finish(1, "waiting")
        assert inboxes["waiting"].drain(PATIENCE_S)[-1].finish_reason is FinishReason.LENGTH
        state, other = copies.loop.copies
        assert not state.alive
        assert "copy 0: " in copies.loop.stage
        assert "SIGKILL" in copies.loop.stage
        assert other.alive
        assert copies.loop.alive
        assert copies.place("late") == 1, "the dead copy has no requests, and gets none"
        assert not copies.deaths
        wait_until(lambda: "died SIGKILL 0" in copies.recorder.seen)


def test_a_request_that_was_running_at_two_deaths_is_not_run_by_a_third_copy() -> None:
    with rig(3, restarts=5) as copies:
        inbox = copies.submit("poison")
        others = [copies.submit(name) for name in "ab"]
        assert [copies.where(name) for name in ("poison", *"ab")] == [0, 1, 2]
        copies.begin(0, "poison")
        copies.kill(0)
        wait_until(lambda: copies.owners("poison") == [1])
        assert copies.where("poison") == 1
        copies.begin(1, "poison")
        copies.kill(1)
        (last,) = inbox.drain(PATIENCE_S)
        assert last.error is not None
        assert last.error.status == 500
        wait_until(lambda: copies.owners("a") not in ([], [1]))
        assert [other.drain(0) for other in others] == [[], []]


def test_a_request_at_which_a_device_dies_before_its_first_call_runs_elsewhere() -> None:
    class Losing(ToyBackend):
        def acquire(self, slot: int, prompt_ids: object, adapter: int, salt: str = "") -> int:
            error = DeviceMemoryError("the device is gone")
            error.fatal = True
            raise error

    engines = [Engine(Losing()), Engine(ToyBackend())]
    starts = [partial(EngineThread, lambda engine=engine: engine) for engine in engines]
    copies = Replicas(starts, lambda: TOKENIZER, observer=Recorder(), settings=LoopSettings())
    copies.start_all()
    inbox = BlockingQueue()
    copies.submit(request("a", [5, 6]), inbox)
    assert text(collect(inbox, "a")["a"]) == shown(expected([5, 6], 5))
    assert engines[0].dead is not None
    copies.close()


def test_a_group_moves_as_one(no_load: Callable[[], None]) -> None:
    with rig(3, restarts=5) as copies:
        assert copies.place(*"abc") == 0
        assert [copies.place(name) for name in "de"] == [1, 2]
        no_load()
        copies.kill(0)
        wait_until(lambda: copies.owners("a"))
        wait_until(lambda: copies.owners("c") == copies.owners("a") != [0])
        assert copies.where(*"abc") == 1


def test_an_abort_and_a_deadline_find_what_was_moved(no_load: Callable[[], None]) -> None:
    with rig(2, restarts=5) as copies:
        late = copies.submit("late", max_seconds=3.0)
        copies.place("other")
        left = copies.submit("left")
        assert copies.where("late", "left") == 0
        no_load()
        copies.kill(0)
        assert [copies.hosts[1][0].receive("add")["request_id"] for _ in "12"] == ["late", "left"]
        copies.loop.abort("left")
        assert copies.hosts[1][0].receive("abort") == "left"
        assert isinstance(collect(late, "late")["late"][-1].error, RequestTimeoutError)
        assert copies.hosts[1][0].receive("abort") == "late"
        assert left.drain(0) == []


def test_what_finds_no_room_waits_for_the_restart(no_load: Callable[[], None]) -> None:
    with rig(2, restarts=5, max_waiting=1) as copies:
        first, _, second, _ = (copies.submit(name) for name in "abcd")
        assert (copies.where(*"ac"), copies.where(*"bd")) == (0, 1)
        with pytest.raises(QueueFullError):
            copies.submit("e")
        copies.kill(0)
        wait_until(lambda: len(copies.hosts[0]) == 2)
        assert copies.where(*"ac") == 0
        copies.finish(0, "a")
        copies.finish(0, "c")
        assert [box.drain(PATIENCE_S)[-1].error for box in (first, second)] == [None, None]


def test_without_any_engine_requests_wait_for_the_first_that_is_ready() -> None:
    with rig(2, restarts=5) as copies:
        Parts.loads = False
        copies.kill(0)
        copies.kill(1)
        wait_until(lambda: not copies.loop.alive)
        assert copies.loop.error is None
        inbox = copies.submit("a")
        wait_until(lambda: len(copies.hosts[0]) == len(copies.hosts[1]) == 2)
        wait_until(lambda: copies.loop.stage.count("starting the engine again") == 2)
        assert copies.loop.stage.startswith("copy 0: ")
        Parts.loads = True
        for i in (0, 1):
            copies.kill(i)
        wait_until(lambda: len(copies.hosts[0]) == len(copies.hosts[1]) == 3)
        i = copies.where("a")
        copies.finish(i, "a")
        assert inbox.drain(PATIENCE_S)[-1].error is None


def test_what_waits_for_a_restart_goes_to_the_first_copy_with_room_and_an_engine(
    no_load: Callable[[], None],
) -> None:
    with rig(2, restarts=5, max_waiting=1) as copies:
        for name in "abcd":
            copies.submit(name)
        assert (copies.where(*"ac"), copies.where(*"bd")) == (0, 1)
        no_load()
        copies.kill(0)
        wait_until(lambda: len(copies.hosts[0]) == 2)
        assert copies.owners("a") == [0]
        copies.finish(1, "b")
        assert copies.hosts[1][0].receive("add")["request_id"] == "a"
        assert copies.owners("c") == [0]
        copies.finish(1, "a")
        assert copies.hosts[1][0].receive("add")["request_id"] == "c"
        assert len(copies.loop.streams) == 2


def test_what_an_engine_has_is_not_moved_by_a_watchdog_that_saw_none_just_before() -> None:
    with rig(2) as copies:
        inbox = copies.submit("a")
        assert copies.where("a") == 0
        copies.hosts[0][0].step(TokenOutput("a", (7,)))
        assert inbox.drain(PATIENCE_S)[0].tokens[0].id == 7
        copies.loop._loops[0]._delivery.leave(None)
        assert copies.owners("a") == [0]


def test_the_others_serve_on_when_a_copy_is_given_up_and_the_last_ends_all() -> None:
    with rig(2, restarts=0) as copies:
        inboxes = [copies.submit(name) for name in "abc"]
        assert (copies.where(*"ac"), copies.where("b")) == (0, 1)
        copies.kill(0)
        wait_until(lambda: copies.owners("a") == copies.owners("c") == [1])
        assert copies.where(*"ac") == 1
        wait_until(lambda: not copies.loop.copies[0].alive)
        assert copies.loop.alive
        assert copies.loop.error is None
        assert copies.place("d") == 1
        assert copies.deaths == []
        copies.kill(1)
        errors = [inbox.drain(PATIENCE_S)[-1].error for inbox in inboxes]
        assert all(isinstance(error, BackendUnavailableError) for error in errors)
        wait_until(lambda: copies.deaths)
        assert str(copies.loop.error) == str(copies.deaths[0])
        assert not copies.loop.alive
        with pytest.raises(BackendUnavailableError, match="SIGKILL"):
            copies.submit("e")
    assert len(copies.deaths) == 1


def test_a_copy_that_is_given_up_leaves_its_requests_to_one_that_restarts() -> None:
    with rig(2, restarts=1) as copies:
        inbox = copies.submit("a")
        assert copies.where("a") == 0
        Parts.loads = False
        copies.kill(1)
        wait_until(lambda: len(copies.hosts[1]) == 2)
        copies.kill(0)
        wait_until(lambda: len(copies.hosts[0]) == 2)
        assert copies.owners("a") == [0]
        copies.kill(0)
        wait_until(lambda: copies.owners("a") == [1])
        assert copies.loop.error is None
        Parts.loads = True
        copies.kill(1)
        assert isinstance(inbox.drain(PATIENCE_S)[-1].error, BackendUnavailableError)
        wait_until(lambda: copies.deaths)


def test_a_copy_is_retired_when_its_requests_have_ended_and_can_be_started_again() -> None:
    with rig(2, resumes=False) as copies:
        inbox = copies.submit("a")
        assert copies.where("a") == 0
        retiring = threading.Thread(target=copies.loop.retire, args=(0,))
        retiring.start()
        wait_until(lambda: not copies.loop.copies[0].alive)
        assert [copies.place(name) for name in "bc"] == [1, 1]
        assert retiring.is_alive()
        copies.hosts[0][0].ended.set()
        copies.finish(0, "a")
        assert inbox.drain(PATIENCE_S)[-1].error is None
        retiring.join(PATIENCE_S)
        assert not retiring.is_alive()
        assert copies.hosts[0][0].engine.receive() is None
        assert [state.alive for state in copies.loop.copies] == [False, True]
        assert copies.loop.error is None
        assert copies.place("d") == 1
        copies.loop.start(0)
        assert copies.place("e") == 0


def test_without_a_copy_that_takes_requests_they_are_refused() -> None:
    made = Rig(1)
    assert (made.loop.alive, made.loop.error, made.loop.state[:2]) == (False, None, (0, 0))
    made.loop.start(0)
    made.hosts[0][0].ended.set()
    made.loop.retire(0)
    with pytest.raises(BackendUnavailableError, match="no copy of the model takes requests"):
        made.submit("a")
    made.loop.close()
    with pytest.raises(BackendUnavailableError, match="stopping"):
        made.loop.start(0)
    made.hosts[0][0].engine.close()
    assert made.deaths == []


def test_a_first_load_that_fails_ends_the_others_and_names_its_reason() -> None:
    class Failing(Parts):
        loads = False

        def __init__(self, log: list[str]) -> None:
            super().__init__(log)
            self.engine.send("failed", "backend_error", "the weights are damaged")
            self.ended.set()

    started: list[Parts] = []

    class Slow(Parts):
        loads = False

        def kill(self) -> None:
            super().kill()
            self.ended.set()

    def launch(kind: type[Parts]) -> Parts:
        started.append(kind([]))
        return started[-1]

    loop = Replicas(
        [partial(launch, kind) for kind in (Slow, Failing, Slow)],
        lambda: TOKENIZER,
        observer=Recorder(),
        settings=LoopSettings(restarts=5),
    )
    with pytest.raises(BackendError, match="the weights are damaged"):
        loop.start_all()
    assert all("killed" in host._log for host in started if isinstance(host, Slow))
    assert not loop.alive
    for host in started:
        host.engine.close()


def test_close_drains_all_copies_in_one_time() -> None:
    with rig(2) as copies:
        inboxes = [copies.submit(name) for name in "ab"]
        for name in "ab":
            copies.where(name)
        closing = threading.Thread(target=copies.loop.close, args=(PATIENCE_S,))
        closing.start()
        wait_until(lambda: copies.loop.error is not None)
        with pytest.raises(BackendUnavailableError):
            copies.submit("c")
        for i, name in enumerate("ab"):
            copies.finish(i, name)
            assert inboxes[i].drain(PATIENCE_S)[-1].error is None
            copies.hosts[i][0].ended.set()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
        assert copies.deaths == []


def test_a_copy_that_is_given_up_during_the_drain_answers_its_requests() -> None:
    with rig(2, restarts=0) as copies:
        inbox, other = copies.submit("a"), copies.submit("b")
        assert (copies.where("a"), copies.where("b")) == (0, 1)
        closing = threading.Thread(target=copies.loop.close, args=(PATIENCE_S,))
        closing.start()
        wait_until(lambda: copies.loop.error is not None)
        copies.kill(0)
        assert isinstance(inbox.drain(PATIENCE_S)[-1].error, BackendUnavailableError)
        copies.finish(1, "b")
        assert other.drain(PATIENCE_S)[-1].error is None
        copies.hosts[1][0].ended.set()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()


def test_an_engine_that_does_not_end_is_told() -> None:
    with rig(2) as copies:
        copies.hosts[0][0].ended.set()
        assert not copies.loop.close(join_s=0.1)
        copies.hosts[1][0].ended.set()
        assert copies.loop.close(join_s=PATIENCE_S)


def test_a_stop_ends_what_a_retired_copy_still_answers() -> None:
    with rig(2, resumes=False) as copies:
        retired = copies.loop.copies[0].loop
        inbox = copies.submit("a")
        copies.where("a")
        copies.hosts[0][0].ended.set()
        retiring = threading.Thread(target=copies.loop.retire, args=(0,))
        retiring.start()
        wait_until(lambda: not copies.loop.copies[0].alive)
        copies.hosts[1][0].ended.set()
        copies.loop.close()
        assert isinstance(inbox.drain(PATIENCE_S)[-1].error, BackendUnavailableError)
        retiring.join(PATIENCE_S)
        assert not retiring.is_alive()
        assert copies.loop.copies[0].loop is retired, "after the stop nothing is made ready again"


def test_the_state_is_that_of_all_copies() -> None:
    with rig(2) as copies:
        for i in (0, 1):
            copies.hosts[i][0].step(running=i + 1)
        wait_until(lambda: copies.loop.state == EngineState(3, 0, speculates=True))
        assert [copy.loop.state.running for copy in copies.loop.copies] == [1, 2]
        assert [state.cores for state in copies.loop.copies] == ["0", "1"]


class Mortal(EngineThread):
    """A real engine on a thread that ends at `kill`, and another one can follow."""

    restartable = True

    def __init__(self, spec: Any) -> None:
        super().__init__(lambda: Engine(ToyBackend(spec, step_s=0.001)))


@contextmanager
def mortal(
    num_copies: int, restarts: int, spec: Any = TOY_SPEC
) -> Iterator[tuple[Replicas, list[Mortal | None]]]:
    hosts: list[Mortal | None] = [None] * num_copies

    def launch(i: int) -> Callable[[], Mortal]:
        def launched() -> Mortal:
            hosts[i] = host = Mortal(spec)
            return host

        return launched

    loop = Replicas(
        [launch(i) for i in range(num_copies)],
        lambda: TOKENIZER,
        observer=Recorder(),
        settings=LoopSettings(restarts=restarts),
    )
    loop.start_all()
    try:
        yield loop, hosts
    finally:
        loop.close()


async def ask(loop: Replicas, name: str, prompt: list[int], num_tokens: int) -> list[Delta]:
    generation = loop.generate(loop.prepare(request(name, prompt, num_tokens)))
    return [delta async for delta in generation]


def test_a_rolling_restart_under_load_loses_and_doubles_no_token() -> None:
    answers: list[str] = []

    async def client(loop: Replicas, name: int, rolling: asyncio.Future[None]) -> None:
        count = 0
        while not rolling.done():
            prompt = [5 + name, 6 + count % 90]
            deltas = await ask(loop, f"{name} {count}", prompt, 12)
            assert deltas[-1].error is None
            assert text(deltas) == shown(expected(prompt, 12))
            answers.append(deltas[-1].request_id)
            count += 1

    def roll(loop: Replicas) -> None:
        for i in (0, 1, 0, 1):
            enough = len(answers) + 20
            wait_until(lambda enough=enough: len(answers) >= enough)
            loop.retire(i)
            loop.start(i)

    async def run(loop: Replicas) -> None:
        rolling = asyncio.get_running_loop().run_in_executor(None, roll, loop)
        await asyncio.gather(rolling, *(client(loop, name, rolling) for name in range(12)))

    with mortal(2, restarts=0) as (loop, _):
        asyncio.run(run(loop))
        assert loop.streams == []
        assert loop._observer.seen.count("ended length") == len(answers)  # type: ignore[attr-defined]


def test_whatever_dies_when_each_request_ends_once_with_its_own_tokens() -> None:
    rng = random.Random(1)

    async def client(loop: Replicas, name: int) -> list[str]:
        outcomes = []
        for count in range(20):
            prompt = [5 + name, 6 + count]
            deltas = await ask(loop, f"{name} {count}", prompt, 10)
            assert [delta.finished for delta in deltas] == [*[False] * (len(deltas) - 1), True]
            right = shown(expected(prompt, 10))
            if (error := deltas[-1].error) is None:
                assert text(deltas) == right
            else:
                assert right.startswith(text(deltas))
                assert isinstance(error, BackendUnavailableError) or "crashed twice" in str(error)
            outcomes.append("ok" if error is None else error.code)
        return outcomes

    async def run(loop: Replicas, hosts: list[Mortal | None]) -> list[str]:
        async def kill() -> None:
            for _ in range(15):
                await asyncio.sleep(rng.random() * 0.05)
                host = hosts[rng.randrange(len(hosts))]
                assert host is not None
                host.kill()

        lists, _ = await asyncio.gather(
            asyncio.gather(*(client(loop, name) for name in range(16))), kill()
        )
        return [outcome for outcomes in lists for outcome in outcomes]

    with mortal(3, restarts=1000) as (loop, hosts):
        outcomes = asyncio.run(run(loop, hosts))
        assert outcomes.count("ok") > len(outcomes) // 2
        assert loop.streams == []
        assert sum(seen.startswith("died") for seen in loop._observer.seen) > 0  # type: ignore[attr-defined]


def test_ids_are_unique_on_each_copy_and_aborts_of_many_threads_find_theirs() -> None:
    with mortal(3, restarts=0, spec=replace(LONG, num_slots=2)) as (loop, _):
        inbox = BlockingQueue()

        def one(i: int) -> None:
            loop.submit(request(str(i), [5, 6], 3000), inbox)
            loop.abort(str(i))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, range(200)))
        assert loop.streams == []
        wait_until(lambda: loop.state[:2] == (0, 0))
        with pytest.raises(RequestError):
            loop.submit(request("bad", []), inbox)
