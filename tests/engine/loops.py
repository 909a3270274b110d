"""Engine loops in the hands of a test: their requests, what they tell, and an engine in parts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from djl_python_neuronx.engine.core import Engine, StepResult
from djl_python_neuronx.engine.detokenizer import Delta
from djl_python_neuronx.engine.link import (
    SPEC,
    EngineState,
    Link,
)
from djl_python_neuronx.engine.loop import LoopSettings
from djl_python_neuronx.engine.replicas import Replicas
from djl_python_neuronx.engine.streams import BlockingQueue
from djl_python_neuronx.engine.worker import EngineThread, WorkerSettings
from djl_python_neuronx.errors import (
    ServingError,
)
from djl_python_neuronx.types import FinishReason, GenerationRequest, TokenOutput
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend
from tests.doubles.toy_tokenizer import TOKENIZER
from tests.processes import PATIENCE_S, wait_until

LONG = replace(TOY_SPEC, num_slots=1, max_model_len=4096, token_buckets=(4096,))


class ThreadLoop(Replicas):
    """One copy whose engine is on a thread and at hand."""

    def __init__(
        self,
        backend: ToyBackend,
        *,
        queue_timeout_s: float = 120.0,
        on_death: Any = lambda _error: None,
        observer: Any = None,
        **settings: Any,
    ) -> None:
        self.engine = Engine(backend)
        super().__init__(
            [lambda: EngineThread(lambda: self.engine, WorkerSettings(queue_timeout_s))],
            lambda: TOKENIZER,
            observer=observer or Recorder(),
            settings=LoopSettings(**settings),
            on_death=on_death,
        )
        self.start_all()


@contextmanager
def running(backend: ToyBackend, **settings: Any) -> Iterator[ThreadLoop]:
    loop = ThreadLoop(backend, **settings)
    try:
        yield loop
    finally:
        backend.resume.set()
        loop.close()


def request(
    name: str, prompt: list[int], max_new_tokens: int | None = 5, **fields: Any
) -> GenerationRequest:
    return GenerationRequest(
        name, prompt, max_new_tokens=max_new_tokens, **{"ignore_eos": True, **fields}
    )


def collect(inbox: BlockingQueue, *names: str) -> dict[str, list[Delta]]:
    """Drain until each of the requests has its last delta."""
    found: dict[str, list[Delta]] = {}
    open_names = set(names)
    deadline = time.monotonic() + PATIENCE_S
    while open_names:
        assert time.monotonic() < deadline, f"no end of {open_names}"
        for delta in inbox.drain(1.0):
            found.setdefault(delta.request_id, []).append(delta)
            if delta.finished:
                open_names.discard(delta.request_id)
    return found


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def shown(ids: list[int]) -> str:
    return TOKENIZER.decode(ids)


class Recorder:
    def __init__(self) -> None:
        self.seen: list[str] = []
        self.broken = False

    def rejected(self, error: ServingError) -> None:
        self.seen.append(f"rejected {error.code}")

    def stepped(self, info: Any, num_tokens: int) -> None:
        if self.broken:
            msg = "no"
            raise RuntimeError(msg)
        self.seen.append(f"{'failed' if info is None else info.kind} {num_tokens}")

    def died(self, cause: str, copy: int) -> None:
        self.seen.append(f"died {cause} {copy}")

    def resumed(self, stream: Any) -> None:
        self.seen.append(f"resumed {stream.request.request_id} {len(stream.output_ids)}")

    def given_up(self, stream: Any) -> None:
        self.seen.append(f"given up {stream.request.request_id}")

    def ended(self, stream: Any, delta: Delta) -> None:
        self.seen.append(f"ended {delta.finish_reason and delta.finish_reason.value}")


class Parts:
    """An engine's end of a link in the hands of the test: it answers what it likes, and ends when it likes."""

    restartable = True
    loads = True
    spec = LONG

    def __init__(self, log: list[str]) -> None:
        front, end = socket.socketpair()
        self.link, self.engine = Link(front), Link(end)
        self.ended = threading.Event()
        self._log = log
        log.append("started")
        if self.loads:
            self.engine.send("ready", SPEC.dump_python(self.spec, mode="json"), None)

    def receive(self, kind: str) -> Any:
        """The next message, which must be of a kind. The vocabulary, which each engine gets first, is left out."""
        message = self.engine.receive()
        if message is not None and message[0] == "vocabulary":
            message = self.engine.receive()
        assert message is not None
        assert message[0] == kind
        return message[1]

    def step(self, *outputs: TokenOutput, running: int = 1) -> None:
        self.engine.send_step(lambda: (StepResult([*outputs]), EngineState(running)))

    def kill(self) -> None:
        """As of a process that waits in a driver: its end comes late."""
        self._log.append("killed")
        self.link.end()

    def wait(self, timeout_s: float) -> str | None:
        return "SIGKILL" if self.ended.wait(min(timeout_s, 0.1)) else None


@contextmanager
def in_parts(
    restarts: int = 1, **settings: Any
) -> Iterator[tuple[Replicas, list[Parts], list[str]]]:
    log: list[str] = []
    hosts: list[Parts] = []

    def launch() -> Parts:
        hosts.append(Parts(log))
        return hosts[-1]

    loop = Replicas(
        [launch],
        lambda: TOKENIZER,
        observer=Recorder(),
        settings=LoopSettings(restarts=restarts, **settings),
    )
    loop.start_all()
    try:
        yield loop, hosts, log
    finally:
        for host in hosts:
            host.ended.set()
            host.engine.close()
        loop.close()


class Rig:
    """Copies whose engines are in the hands of the test."""

    def __init__(self, num_copies: int, **settings: Any) -> None:
        self.recorder = Recorder()
        self.deaths: list[ServingError] = []
        self.hosts: list[list[Parts]] = [[] for _ in range(num_copies)]
        """The engines of each copy, in the order of their starts."""
        self.loop = Replicas(
            [self._launch(i) for i in range(num_copies)],
            lambda: TOKENIZER,
            observer=self.recorder,
            cores=[str(i) for i in range(num_copies)],
            settings=LoopSettings(**settings),
            on_death=self.deaths.append,
        )

    def _launch(self, i: int) -> Callable[[], Parts]:
        def launch() -> Parts:
            self.hosts[i].append(Parts([]))
            return self.hosts[i][-1]

        return launch

    def submit(self, *names: str, **fields: Any) -> BlockingQueue:
        """Submit requests that are answered together."""
        inbox = BlockingQueue()
        group = [request(name, [5, 6], **fields) for name in names]
        self.loop.submit_all(self.loop.prepare(*group), inbox)
        return inbox

    def place(self, *names: str, **fields: Any) -> int:
        """Submit requests that are answered together; returns the copy that has them all."""
        self.submit(*names, **fields)
        return self.where(*names)

    def where(self, *names: str) -> int:
        """The copy whose engine, the last one started, has got these requests next."""
        (i,) = {i for name in names for i in self.owners(name)}
        for name in names:
            assert self.hosts[i][-1].receive("add")["request_id"] == name
        return i

    def owners(self, name: str) -> list[int]:
        return [i for i, loop in enumerate(self.loop._loops) if loop.streams.get(name)]

    def begin(self, i: int, *names: str) -> None:
        """The engine of a copy begins requests."""
        self.hosts[i][-1].engine.send("entering", [*names])
        streams = [self.loop._loops[i].streams.get(name) for name in names]
        wait_until(lambda: all(s and s.request.request_id in s.begun for s in streams))

    def kill(self, i: int) -> None:
        self.hosts[i][-1].ended.set()
        self.hosts[i][-1].engine.close()

    def finish(self, i: int, name: str) -> None:
        self.hosts[i][-1].step(TokenOutput(name, (8,), FinishReason.LENGTH), running=0)


@contextmanager
def rig(num_copies: int = 2, **settings: Any) -> Iterator[Rig]:
    made = Rig(num_copies, **settings)
    made.loop.start_all()
    try:
        yield made
    finally:
        Parts.loads = True
        for host in (one for hosts in made.hosts for one in hosts):
            host.ended.set()
        made.loop.close()
        for host in (one for hosts in made.hosts for one in hosts):
            host.engine.close()
