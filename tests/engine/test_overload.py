"""Ten minutes of overload on a virtual clock: code of the engine and the front, without threads and devices."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import orjson
import pytest

from djl_python_neuronx.backends.base import ModelSpec, Step, StepOutput, Want
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.detokenizer import Delta
from djl_python_neuronx.engine.link import REQUEST, EngineState, encode_step
from djl_python_neuronx.engine.loop import WATCHDOG_PERIOD_S, LoopSettings
from djl_python_neuronx.engine.pace import Pace
from djl_python_neuronx.engine.replicas import Replicas
from djl_python_neuronx.errors import QueueFullError
from djl_python_neuronx.types import GenerationRequest
from tests.doubles.toy_backend import ToyBackend
from tests.doubles.toy_tokenizer import TOKENIZER
from tests.engine.loops import Recorder

DURATION_S = 600.0
MAX_WAITING = 64
PREFILL_S, DECODE_S = 0.15, 0.2
SPEC = ModelSpec(8, 128, (16,), 300, outputs=Want.TOKENS, largest_top_k=300, default_top_k=300)
ENDS = frozenset(range(15))
"""Of 300 tokens, so that answers have 20 in the mean."""


@dataclass(frozen=True)
class Traffic:
    """Requests by their lengths and deadlines."""

    stop_token_ids: frozenset[int]
    max_new_tokens: int
    max_seconds: float
    capacity: float
    """Requests for each second, about as many as the slots can answer."""


TRAFFIC = {
    "lengths unknown before": Traffic(ENDS, 60, 20.0, 1.6),
    "all as long": Traffic(frozenset(), 20, 9.0, 1.5),
    "too long for their time": Traffic(frozenset(), 20, 3.0, 1.5),
    "time for long waits": Traffic(ENDS, 60, 120.0, 1.6),
}


class Simulation:
    """A front and its engine on one thread; each step of the device moves the clock on."""

    def __init__(self, traffic: Traffic, load: float, seed: int = 0) -> None:
        self.now_s = 1000.0
        self.ends: Counter[str] = Counter()
        self.retries_s: list[int] = []
        self._draw = random.Random(seed)
        self._traffic, self._rate = traffic, load * traffic.capacity
        self._tokens = np.random.default_rng(seed)
        self._next_arrival_s = self._next_watch_s = self.now_s
        self.num_sent = 0
        self._messages: deque[list[Any]] = deque()

    def run(self) -> float:
        """Run it for its time; returns the answers in time for each second."""
        backend = ToyBackend(SPEC)
        backend.run = self._run_device  # type: ignore[method-assign]
        self._engine = Engine(backend, clock=lambda: self.now_s)
        self.link = self
        self._replicas = Replicas(
            [lambda: self],  # type: ignore[list-item, return-value]
            lambda: TOKENIZER,
            observer=Recorder(),
            settings=LoopSettings(max_waiting=MAX_WAITING),
        )
        (copy,) = self._replicas.copies
        self._loop = copy.loop
        self._replicas.spec = self._loop.spec = SPEC
        self._loop._host, copy.takes = self, True  # type: ignore[assignment]
        self._loop.streams.num_slots = SPEC.num_slots
        self._loop.streams.connect(self)  # type: ignore[arg-type]
        self._loop._receive()
        good = self.ends["eos_token"] + self.ends["length"]
        return good / DURATION_S

    # The queue of the answers

    def deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                self.ends[delta.finish_reason.value] += 1

    # The engine's host, and the link to it

    def wait(self, _timeout_s: float) -> str:
        return "end of the simulation"

    def send_encoded(self, message: bytes) -> None:
        self._engine.add(REQUEST.validate_python(orjson.loads(message)[1]))

    def send(self, kind: str, request_id: str) -> None:
        assert kind == "abort"
        self._engine.abort(request_id)

    def receive(self) -> list[Any] | None:
        """The engine's next message; None at the end of the time."""
        while not self._messages:
            if self.now_s >= 1000.0 + DURATION_S:
                return None
            self._arrive()
            if self.now_s >= self._next_watch_s:
                self._next_watch_s += WATCHDOG_PERIOD_S
                self._loop._delivery.end_late()
            if self._engine.has_work:
                self._step()
            else:
                self.now_s = min(self._next_arrival_s, self._next_watch_s)
        return self._messages.popleft()

    def _step(self) -> None:
        engine = self._engine
        batch = engine.schedule()
        if batch.entering:
            self._messages.append(["entering", [one.request_id for one in batch.entering]])
        result = engine.advance(engine.run(batch))
        state = EngineState(engine.num_running, engine.num_waiting)
        self._messages.append(orjson.loads(orjson.dumps(("step", *encode_step(result, state)))))

    def _run_device(self, step: Step) -> StepOutput:
        self.now_s += PREFILL_S if step.prefill is not None else DECODE_S
        ((_, rows),) = step.parts
        ids = self._tokens.integers(0, SPEC.vocab_size, (len(rows.slots), 1), np.int32)
        return StepOutput(ids=ids)

    def _arrive(self) -> None:
        while self._next_arrival_s <= self.now_s:
            self.num_sent += 1
            request = GenerationRequest(
                f"r{self.num_sent}",
                [5] * self._draw.randint(2, 16),
                max_new_tokens=self._traffic.max_new_tokens,
                stop_token_ids=self._traffic.stop_token_ids,
                max_seconds=self._traffic.max_seconds,
                arrived_s=self._next_arrival_s,
            )
            self._next_arrival_s += self._draw.expovariate(self._rate)
            try:
                self._replicas.submit(request, self)
            except QueueFullError as error:
                self.retries_s.append(error.retry_after_s or 0)


@pytest.mark.parametrize("name", [one for one in TRAFFIC if one != "too long for their time"])
def test_three_times_the_capacity_brings_as_many_answers_in_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {load: Simulation(TRAFFIC[name], load) for load in (1.0, 1.3, 2.0, 3.0)}
    goodput: dict[float, float] = {}
    for load, simulation in found.items():
        monkeypatch.setattr(time, "monotonic", lambda simulation=simulation: simulation.now_s)
        goodput[load] = simulation.run()
    monkeypatch.undo()
    assert min(goodput.values()) > 0.7 * TRAFFIC[name].capacity, "the device has been busy"
    assert goodput[3.0] >= 0.95 * max(goodput.values()), goodput
    refused = found[3.0].retries_s
    assert len(refused) + found[3.0].ends["error"] > 0.5 * found[3.0].num_sent
    # The time that the device needs for a full queue.
    wanted_s = (MAX_WAITING + SPEC.num_slots) / goodput[3.0]
    if name == "all as long":
        assert not refused, "they leave the queue before it is full"
    else:
        assert 0.5 * wanted_s < median(refused) < 2 * wanted_s


def test_without_a_crowd_a_request_gets_what_there_is_in_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = Simulation(TRAFFIC["too long for their time"], 0.25)
    monkeypatch.setattr(time, "monotonic", lambda: simulation.now_s)
    simulation.run()
    monkeypatch.undo()
    assert simulation.ends["time"] >= 0.99 * (simulation.num_sent - SPEC.num_slots)
    assert simulation.ends["error"] == 0


def test_the_time_that_an_answer_needs() -> None:
    """As long as most answers, and no longer than its tokens."""
    pace = Pace()
    assert pace.needed_s(None) == pace.needed_s(5) == 0
    for _ in range(300):
        pace.note(4.0, 0.2, 20)
    assert pace.needed_s(None) == pytest.approx(4.0, rel=1e-3)
    assert pace.needed_s(5) == pytest.approx(1.0, rel=1e-3)
    draw = random.Random(0)
    lengths = [1 + int(draw.expovariate(0.02)) for _ in range(3000)]
    for length in lengths:
        pace.note(0.5 + 0.1 * length, 0.6, length)
    needed = [pace.needed_s(length) for length in lengths]
    enough = sum(one >= 0.1 * n for one, n in zip(needed, lengths, strict=True))
    assert 0.8 <= enough / len(lengths) <= 0.99


def test_an_answer_needs_no_more_time_for_others_of_another_kind() -> None:
    """Chats of a second beside prompts that are scored for 30 s, and beside answers of one token."""
    pace = Pace()
    for _ in range(100):
        pace.note(1.0, 0.02, 50)
        pace.note(30.0, None, 1)
    assert pace.needed_s(50) == pytest.approx(1.0)
    assert pace.service_s > 10, "all that hold a slot make others wait"
    for _ in range(100):
        pace.note(0.02, 0.02, 1)
    assert 0.02 < pace.needed_s(50) < 1.01
    assert pace.needed_s(1) == pytest.approx(0.02)
