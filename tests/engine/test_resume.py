"""Requests that outlive the engine that runs them: the client gets what a run without a death gives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from djl_python_neuronx.backends.base import Step, StepOutput
from djl_python_neuronx.engine import streams as streams_module
from djl_python_neuronx.engine.core import Engine, StepResult
from djl_python_neuronx.engine.detokenizer import Delta
from djl_python_neuronx.engine.link import EngineState
from djl_python_neuronx.engine.loop import LoopSettings
from djl_python_neuronx.engine.replicas import Replicas
from djl_python_neuronx.engine.runner import StepInfo
from djl_python_neuronx.engine.streams import FIRST, BlockingQueue
from djl_python_neuronx.engine.worker import EngineThread
from djl_python_neuronx.errors import BackendUnavailableError, ServingError
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.types import FinishReason, GenerationRequest, TokenOutput
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend, expected
from tests.doubles.toy_tokenizer import TOKENIZER, ToyTokenizer
from tests.engine.loops import Parts, Recorder, Rig, collect, in_parts, request, rig, shown, text
from tests.processes import PATIENCE_S, wait_until

LENGTH = 12
SPEC = replace(TOY_SPEC, prefill_buckets=(4, 8))
"""Soon a prompt and its tokens are longer than a prefill holds."""
SAMPLED = SamplingParams(temperature=1.3, top_k=40)
GREEDY = expected([5, 6], LENGTH)


class Dying(ToyBackend):
    """Its engine ends with a step, if it is that step's turn."""

    def __init__(self, last_step: int | None) -> None:
        super().__init__(SPEC)
        self._last_step = last_step
        self.end: Callable[[], None]

    def run(self, step: Step) -> StepOutput:
        if self.num_steps == self._last_step:
            self.end()
        return super().run(step)


class DyingHost(EngineThread):
    restartable = True

    def __init__(self, last_step: int | None) -> None:
        backend = Dying(last_step)
        super().__init__(lambda: Engine(backend))
        backend.end = self.kill


def groups() -> list[list[GenerationRequest]]:
    """Requests of all kinds, by the answer that they are in."""
    stop = f"<{GREEDY[6]}><{GREEDY[7]}>"
    seeded = replace(SAMPLED, seed=7)
    penalised = replace(SAMPLED, repetition_penalty=1.5, seed=9)
    ruled = replace(
        seeded,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        logit_bias=tuple((token, 6.0) for token in range(20, 26)),
        bad_words=((20, 21), (22,)),
        no_repeat_ngram_size=2,
        min_new_tokens=8,
    )
    return [
        [request("greedy", [5, 6], LENGTH)],
        [request("seeded", [5, 6], LENGTH, sampling=seeded)],
        [request("unseeded", [7, 6], LENGTH, sampling=SAMPLED)],
        [request("penalised", [5, 6], LENGTH, sampling=penalised)],
        [request("ruled", [5, 6], LENGTH, sampling=ruled, stop_token_ids=frozenset({25}))],
        [request("stops", [5, 6], LENGTH, stop_strings=("never", stop))],
        [request("ends", [5, 6], LENGTH, stop_token_ids=frozenset({GREEDY[9]}))],
        [request("scored", [8], LENGTH, sampling=seeded, logprobs=True, top_logprobs=2)],
        [request("prompt", [6, 7, 8, 9, 6], LENGTH, scores_prompt=1)],
        [request(f"both.{i}", [9] * 8, LENGTH, sampling=replace(SAMPLED, seed=i)) for i in (0, 1)],
    ]


def serve(num_copies: int, last_step: int | None) -> tuple[dict[str, Any], list[str]]:
    """The answers of all requests, and what was observed. The first engine of the first copy ends with that step."""
    left = [last_step]

    def launch() -> DyingHost:
        return DyingHost(left.pop() if left else None)

    recorder = Recorder()
    loop = Replicas(
        [launch] * num_copies,
        lambda: TOKENIZER,
        observer=recorder,
        settings=LoopSettings(restarts=1),
    )
    for i in range(num_copies):
        loop.start(i)
    inbox = BlockingQueue()
    try:
        for group in groups():
            loop.submit_all(loop.prepare(*group), inbox)
        names = [one.request_id for group in groups() for one in group]
        found = collect(inbox, *names)
    finally:
        loop.close()
    assert loop.streams == []
    return {name: whole(deltas) for name, deltas in found.items()}, recorder.seen


def whole(deltas: list[Delta]) -> tuple[Any, ...]:
    """The parts of an answer that do not depend on how it was split."""
    last = deltas[-1]
    tokens = [token for delta in deltas for token in (*delta.prompt, *delta.tokens)]
    return text(deltas), tokens, last.finish_reason, last.error, last.num_generated_tokens


@pytest.mark.parametrize("num_copies", [1, 2])
def test_whenever_an_engine_dies_the_answers_are_those_of_one_run(
    num_copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams_module.secrets, "randbits", lambda _bits: 3)
    wanted, seen = serve(num_copies, None)
    assert wanted["greedy"][0] == shown(GREEDY)
    assert wanted["stops"][:1] + wanted["stops"][2:3] == (shown(GREEDY[:6]), FinishReason.STOP)
    assert wanted["ends"][2] is FinishReason.EOS
    assert not any(one.startswith(("died", "resumed")) for one in seen)
    # So many steps has each copy at least.
    num_steps = sum(one.startswith(("prefill", "decode")) for one in seen) // num_copies
    resumed: set[str] = set()
    wrong = {}
    for last_step in range(num_steps):
        found, seen = serve(num_copies, last_step)
        resumed |= {one.split()[1] for one in seen if one.startswith("resumed")}
        if found != wanted:
            wrong[last_step] = found
    assert wrong == {}
    on_the_first = {one.request_id for group in groups()[::num_copies] for one in group}
    assert resumed >= on_the_first - {"both.0", "both.1"}


def die(host: Parts) -> None:
    host.ended.set()
    host.engine.close()


def test_the_next_engine_gets_the_request_with_its_tokens_and_the_same_seed() -> None:
    with in_parts(restarts=5) as (loop, hosts, _):
        begun, waiting = BlockingQueue(), BlockingQueue()
        loop.submit(request("begun", [5, 6], sampling=SAMPLED), begun)
        loop.submit(request("waiting", [5, 6], sampling=SAMPLED), waiting)
        first, second = hosts[0].receive("add"), hosts[0].receive("add")
        assert first["seed"] != second["seed"]
        hosts[0].engine.send("entering", ["begun"])
        hosts[0].step(TokenOutput("begun", (7,)))
        hosts[0].step(TokenOutput("begun", (8, 9)))
        wait_until(lambda: loop.streams[0].output_ids == [7, 8, 9])
        die(hosts[0])
        wait_until(lambda: len(hosts) == 2)
        resumed = {**first, "given_ids": [7, 8, 9], "priority": FIRST}
        assert [hosts[1].receive("add") for _ in "12"] == [resumed, second]
        die(hosts[1])  # at which none of them was running
        wait_until(lambda: len(hosts) == 3)
        assert [hosts[2].receive("add") for _ in "12"] == [resumed, second]
        hosts[2].engine.send("entering", ["begun", "waiting"])
        hosts[2].step(TokenOutput("begun", (4,)), running=2)
        wait_until(lambda: len(loop.streams[0].output_ids) == 4)
        die(hosts[2])
        # It was running at two deaths; the other one at the last.
        deltas = collect(begun, "begun")["begun"]
        assert "crashed twice" in str(deltas[-1].error)
        assert (text(deltas), deltas[-1].num_generated_tokens) == (shown([7, 8, 9, 4]), 4)
        wait_until(lambda: len(hosts) == 4)
        assert hosts[3].receive("add") == second
        hosts[3].step(TokenOutput("waiting", (8,), FinishReason.LENGTH), running=0)
        assert text(collect(waiting, "waiting")["waiting"]) == shown([8])


@pytest.mark.parametrize("has_tokens", [True, False])
def test_a_deadline_without_an_engine_ends_what_has_tokens_with_them(
    has_tokens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_parts(restarts=5) as (loop, hosts, _):
        inbox = BlockingQueue()
        group = [request(name, [5, 6], max_seconds=1.5) for name in ("a", "a.1")]
        loop.submit_all(loop.prepare(*group), inbox)
        hosts[0].engine.send("entering", ["a"])
        if has_tokens:
            hosts[0].step(TokenOutput("a", (7,)))
        wait_until(lambda: has_tokens == bool(loop.streams[0].output_ids))
        wait_until(lambda: loop.streams[0].running)
        monkeypatch.setattr(Parts, "loads", False)
        die(hosts[0])
        found = collect(inbox, "a", "a.1")
        reasons = {found[name][-1].finish_reason for name in found}
        assert reasons == {FinishReason.TIME if has_tokens else FinishReason.ERROR}
        assert text(found["a"]) == (shown([7]) if has_tokens else "")
        assert not loop.alive


def test_a_text_that_is_held_back_is_shown_after_the_death() -> None:
    with in_parts(restarts=5) as (loop, hosts, _):
        inbox = BlockingQueue()
        loop.submit(request("a", [5, 6], stop_strings=("<7><8><9>",)), inbox)
        hosts[0].engine.send("entering", ["a"])
        hosts[0].step(TokenOutput("a", (7,)))
        hosts[0].step(TokenOutput("a", (8,)))
        wait_until(lambda: loop.streams[0].output_ids == [7, 8])
        assert text(inbox.drain(PATIENCE_S)) == ""
        die(hosts[0])
        wait_until(lambda: len(hosts) == 2)
        assert hosts[1].receive("add")["given_ids"] == [7, 8]
        hosts[1].step(TokenOutput("a", (5,), FinishReason.LENGTH), running=0)
        assert text(collect(inbox, "a")["a"]) == shown([7, 8, 5])


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_resume_is_counted_when_an_engine_has_got_the_request(restarts: int) -> None:
    with in_parts(restarts=restarts) as (loop, hosts, _):
        inbox = BlockingQueue()
        loop.submit(request("a", [5, 6]), inbox)
        hosts[0].engine.send("entering", ["a"])
        hosts[0].step(TokenOutput("a", (7,)))
        wait_until(lambda: loop.streams[0].output_ids == [7])
        die(hosts[0])
        if restarts:
            wait_until(lambda: len(hosts) == 2)
            assert hosts[1].receive("add")["given_ids"] == [7]
            hosts[1].step(TokenOutput("a", (5,), FinishReason.LENGTH), running=0)
        assert (collect(inbox, "a")["a"][-1].error is None) == bool(restarts)
        recorder: Any = loop._observer
        assert recorder.seen.count("resumed a 1") == restarts


def retire(copies: Rig, i: int, heir: Rig | None = None) -> None:
    copies.hosts[i][-1].ended.set()
    copies.loop.retire(i, None if heir is None else heir.loop)


def given(host: Parts) -> tuple[str, list[int]]:
    """A request that an engine gets, and the tokens that it has."""
    got = host.receive("add")
    return got["request_id"], got["given_ids"]


def test_what_a_retired_copy_runs_goes_on_at_the_others() -> None:
    with rig(2) as copies:
        inbox = copies.submit("a", "a.1")
        assert copies.where("a", "a.1") == 0
        copies.begin(0, "a")
        copies.hosts[0][0].step(TokenOutput("a", (7,)))
        assert text(inbox.drain(PATIENCE_S)) == shown([7])
        retire(copies, 0)
        assert [given(copies.hosts[1][0]) for _ in "12"] == [("a", [7]), ("a.1", [])]
        copies.hosts[1][0].step(TokenOutput("a", (8,), FinishReason.LENGTH))
        assert text(collect(inbox, "a")["a"]) == shown([8])
        copies.loop.abort("a.1")
        assert copies.hosts[1][0].receive("abort") == "a.1"
        assert copies.recorder.seen.count("resumed a 1") == 1


class Closing(ToyTokenizer):
    """It has no table, and no text any more once it is closed."""

    closed = False

    def __init__(self) -> None:
        super().__init__()
        self.pieces = None

    def decode(self, ids: Sequence[int], **how: bool) -> str:
        assert not self.closed
        return super().decode(ids, **how)

    def close(self) -> None:
        self.closed = True


def test_requests_outlive_their_copies_at_those_of_an_heir() -> None:
    """First at a copy that runs, then at one that is not started yet; and back, if that cannot be started."""
    with rig(2) as old:
        new = Rig(2)
        tokenizer = Closing()
        old.loop._tokenizer = lambda: tokenizer
        inboxes = [old.submit(name) for name in "ab"]
        assert (old.where("a"), old.where("b")) == (0, 1)
        for i, name in enumerate("ab"):
            old.begin(i, name)
            old.hosts[i][0].step(TokenOutput(name, (7,)))
            assert text(inboxes[i].drain(PATIENCE_S)) == shown([7])
        retire(old, 0, new)
        assert given(old.hosts[1][0]) == ("a", [7])
        new.loop.start(0)
        retire(old, 1, new)
        assert [given(new.hosts[0][0]) for _ in "12"] == [("b", [7]), ("a", [7])]
        tokenizer.close()
        old.loop._tokenizer = lambda: TOKENIZER
        new.hosts[0][0].step(TokenOutput("b", (8,)), TokenOutput("a", (9,)))
        assert text(inboxes[1].drain(PATIENCE_S)) == shown([8])
        old.loop.abort("a")
        assert new.hosts[0][0].receive("abort") == "a"
        # The new copies are replaced by the old ones, none of which runs.
        retire(new, 0, old)
        assert old.owners("b") == [0]
        old.loop.start(0)
        assert given(old.hosts[0][-1]) == ("b", [7, 8])
        old.hosts[0][-1].step(TokenOutput("b", (5,), FinishReason.LENGTH), running=0)
        assert text(collect(inboxes[1], "b")["b"]) == shown([5])
        new.loop.close()
        for host in new.hosts[0]:
            host.engine.close()


def test_a_request_that_waits_for_an_heir_keeps_its_deadline_and_is_ended_with_it() -> None:
    with rig(1) as old:
        new = Rig(1)
        inboxes = [old.submit(name, max_seconds=s) for name, s in (("late", 1.0), ("left", 3600.0))]
        old.begin(0, "late", "left")
        old.hosts[0][0].step(TokenOutput("late", (7,)), TokenOutput("left", (7,)))
        wait_until(lambda: all(stream.output_ids for stream in old.loop.streams))
        retire(old, 0, new)
        assert new.owners("late") == new.owners("left") == [0]
        Parts.loads = False

        def start() -> None:
            with pytest.raises(ServingError):
                new.loop.start(0)

        starting = threading.Thread(target=start)
        starting.start()
        assert collect(inboxes[0], "late")["late"][-1].finish_reason is FinishReason.TIME
        new.loop.close(join_s=0.1)
        assert isinstance(collect(inboxes[1], "left")["left"][-1].error, BackendUnavailableError)
        new.hosts[0][0].ended.set()
        new.hosts[0][0].engine.close()
        starting.join(PATIENCE_S)
        assert not starting.is_alive()


def test_an_heir_with_other_limits_leaves_what_does_not_fit_to_the_old_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with rig(2) as old:
        monkeypatch.setattr(Parts, "spec", replace(Parts.spec, max_model_len=4, token_buckets=(4,)))
        with rig(2) as new:
            inbox = old.submit("a", max_new_tokens=9)
            old.begin(0, "a")
            old.hosts[0][0].step(TokenOutput("a", (7, 8)))
            wait_until(lambda: old.loop.streams[0].output_ids)
            old.loop.copies[1].takes = False
            retiring = threading.Thread(target=retire, args=(old, 0, new))
            retiring.start()
            wait_until(lambda: not old.loop.copies[0].alive)
            old.hosts[0][0].step(TokenOutput("a", (9,), FinishReason.LENGTH), running=0)
            assert text(collect(inbox, "a")["a"]) == shown([7, 8, 9])
            retiring.join(PATIENCE_S)
            assert not retiring.is_alive()


def test_what_waits_for_copies_that_are_lost_gets_their_error() -> None:
    with rig(1) as old:
        new = Rig(1)
        inbox = old.submit("a")
        retire(old, 0, new)
        new.loop.lose(0, BackendUnavailableError("the device is gone"))
        assert "the device is gone" in str(collect(inbox, "a")["a"][-1].error)
        new.loop.close()


def test_the_tokens_that_were_cached_are_those_of_the_first_engine() -> None:
    with in_parts(restarts=5) as (loop, hosts, _):
        inbox = BlockingQueue()
        loop.submit(request("a", [5, 6]), inbox)
        for i, (count, reason) in enumerate([(1, None), (0, FinishReason.LENGTH)]):
            info = StepInfo("prefill", 4, 1, 2, 0.1, cached={"a": count})
            result = StepResult([TokenOutput("a", (7,), reason)], info)
            hosts[i].receive("add")
            hosts[i].engine.send_step(lambda result=result: (result, EngineState(1)))
            if reason is None:
                wait_until(lambda: loop.streams[0].output_ids)
                die(hosts[0])
                wait_until(lambda: len(hosts) == 2)
        assert [delta.num_cached_tokens for delta in collect(inbox, "a")["a"]] == [1, 1]
