"""The engine's side of the border: loads an engine and steps it for the front at the other end of a link."""

from __future__ import annotations

import dataclasses
import logging
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from djl_python_neuronx.backends.base import ModelSpec
from djl_python_neuronx.engine.core import Call, Engine, StepResult
from djl_python_neuronx.engine.grammars import Grammar, Grammars
from djl_python_neuronx.engine.link import (
    REQUEST,
    SPEC,
    EngineState,
    Link,
    encode_error,
)
from djl_python_neuronx.engine.runner import translate
from djl_python_neuronx.engine.speculation import DraftModel
from djl_python_neuronx.engine.warmup import warm_up
from djl_python_neuronx.errors import (
    BackendError,
    BackendUnavailableError,
    ServingError,
    StepError,
    UnsupportedParameterError,
    load_failure,
)
from djl_python_neuronx.types import EngineRequest, FinishReason, TokenOutput

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 1e-4
"""Python's switch interval. A busy thread delays the return from the device by this long: 5.2 ms at the default of
5 ms, 0.3 ms at 0.1 ms (2 vCPU, 2026-11)."""
EXPIRE_EVERY_S = 0.2
MOST_UNREAD, UNREAD_PAUSE_S = 8, 0.001
"""Messages that wait beyond the socket's buffer before the engine waits for the front: each may hold logits."""

Load = Callable[[], Engine]


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
    """Settings of a worker."""

    queue_timeout_s: float = 120.0
    """Longest time that a request waits for a slot of this engine."""
    warm_up: bool = False
    """Run every graph once before the first request."""
    num_adapters: int = 0
    """Adapters that the load puts into the places from 1 on."""


def work(link: Link, load: Load, settings: WorkerSettings) -> bool:
    """Load an engine, and run it until the front leaves or the engine is dead. Returns False if it failed.

    The body of the engine process, or of the engine's thread.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        engine = _load(link, load, settings)
        if engine is None:
            return False
        try:
            return _Worker(engine, link, settings).run()
        except Exception as error:
            logger.exception("engine_failed")
            reason = (
                f"the engine failed ({type(error).__name__}: {error}); its log has the traceback"
            )
            link.send("dead", BackendUnavailableError.code, reason)
            return False
        finally:
            engine.close()
    finally:
        link.close()


def _load(link: Link, load: Load, settings: WorkerSettings) -> Engine | None:
    engine: Engine | None = None
    try:
        link.send("progress", "loading the model")
        engine = load()
        with ThreadPoolExecutor(1, "djl-neuronx-tables") as beside:
            made = beside.submit(_grammars, link, engine.spec, settings.warm_up)
            if settings.warm_up:
                link.send("progress", "running every graph once")
                _warm_up(engine)
            engine.grammars = made.result()
        link.send("ready", SPEC.dump_python(engine.spec, mode="json"), _speculation(engine))
    except Exception as error:
        if not isinstance(error, ServingError):
            logger.exception("load_failed")
        link.send("failed", *(encode_error(load_failure(error)) or ()))
        if engine is not None:
            engine.close()
        return None
    return engine


def _grammars(link: Link, spec: ModelSpec, warm_up: bool) -> Grammars:
    """Read the vocabulary. Its tables hold the GIL, so with `warm_up` they are made before the first request."""
    _, (tokens, special_ids) = link.receive() or ("", ([], []))  # or the front has left
    grammars = Grammars(tokens, special_ids, spec)
    if warm_up:
        with suppress(UnsupportedParameterError):  # each request with a grammar gets it
            _ = grammars.tables
    return grammars


def _warm_up(engine: Engine) -> None:
    started_s = time.monotonic()
    try:
        cold = warm_up(engine)
    except StepError as error:
        msg = f"the first run of every graph failed: {error}"
        raise BackendError(msg) from error
    seconds = time.monotonic() - started_s
    logger.info("warmed_up seconds=%.2f cold_graphs=%s", seconds, [*map(tuple, cold)])


def _speculation(engine: Engine) -> dict[str, object] | None:
    """The speculation in use as plain values: number of drafts and their source. Or None."""
    if engine.spec.num_fused_drafts:
        return {"drafts": engine.spec.num_fused_drafts, "from": "draft model"}
    if engine.proposer is None:
        return None
    from_model = isinstance(engine.proposer, DraftModel)
    return {
        "drafts": engine.spec.num_speculative_tokens,
        "from": "draft model" if from_model else "prompt lookup",
    }


class _Worker:
    """Steps an engine on the calling thread; a separate thread receives commands."""

    def __init__(self, engine: Engine, link: Link, settings: WorkerSettings) -> None:
        self._engine, self._link = engine, link
        self._queue_timeout_s = settings.queue_timeout_s
        self._expire_every_s = min(EXPIRE_EVERY_S, settings.queue_timeout_s / 4)
        self._places = {*range(settings.num_adapters + 1)}
        """Those that requests may have: place 0, and those with an adapter."""
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sent: EngineState | None = EngineState()
        self._expired_s = time.monotonic()
        for runner in engine.runners:
            runner.on_first_call = partial(link.send, "first_call")

    def run(self) -> bool:
        """Step until the front leaves or the engine is dead. Returns False if it is dead."""
        engine, commands = self._engine, self._commands
        threading.Thread(target=self._receive, name="djl-neuronx-commands", daemon=True).start()
        call: Call | None = None
        while engine.dead is None:
            while not engine.has_work or not commands.empty():
                self._send(call)
                call = None
                if not engine.has_work:
                    self._send_state()
                command = commands.get()
                if command is None:
                    engine.abort_all()
                    return True
                command()
            if engine.num_waiting and self._expire():
                continue
            batch = engine.schedule()
            if batch.entering:
                self._link.send_now("entering", [one.request_id for one in batch.entering])
            self._send(call)
            call = engine.run(batch)
        self._send(call)
        self._link.send("dead", *(encode_error(engine.dead) or ()))
        return False

    def _receive(self) -> None:
        try:
            while (message := self._link.receive()) is not None:
                kind, argument = message
                if kind == "add":
                    self._add(argument)
                elif kind == "adapter":
                    self._commands.put(partial(self._change_adapter, *argument))
                else:
                    self._commands.put(partial(self._engine.abort, argument))
        finally:
            self._commands.put(None)

    def _add(self, fields: Mapping[str, Any]) -> None:
        """Give the engine a request, with its grammar: it is compiled here, so that no step waits for it."""
        try:
            request = REQUEST.validate_python(fields)
            grammar = None if request.grammar is None else self._engine.grammars.new(request)
        except BaseException as error:  # noqa: BLE001  (a border: an error of this request alone)
            self._fail(fields["request_id"], error)
        else:
            self._commands.put(partial(self._enter, request, grammar))

    def _enter(self, request: EngineRequest, grammar: Grammar | None) -> None:
        try:
            if request.adapter not in self._places:
                message = f"the adapter of the request is not loaded now (place {request.adapter}); retry later"
                raise BackendUnavailableError(message)  # noqa: TRY301
            self._engine.add(request, grammar)
        except Exception as error:  # noqa: BLE001  (as above)
            self._fail(request.request_id, error)

    def _change_adapter(self, place: int, folder: str | None) -> None:
        """Load an adapter into a place that no request has, or empty it. After an error it is empty."""
        self._link.send("first_call")  # as that of a graph it may take long
        self._places.discard(place)
        failure: ServingError | None = None
        try:
            self._engine.set_adapter(place, None if folder is None else Path(folder))
            self._places |= {place} if folder is not None else set()
        except Exception as error:
            logger.exception("adapter_failed place=%d folder=%s", place, folder)
            failure = error if isinstance(error, ServingError) else translate(error)
        self._link.send("adapter", encode_error(failure))

    def _fail(self, request_id: str, error: BaseException) -> None:
        """End a request that the engine has not got."""
        if not isinstance(error, ServingError):
            logger.error("request_failed request_id=%s", request_id, exc_info=error)
            message = f"the engine could not take the request ({type(error).__name__}: {error}); change it"
            error = BackendError(message)
        failed = TokenOutput(request_id, (), FinishReason.ERROR, error)
        self._link.send_step(lambda: (StepResult([failed]), self._state()))

    def _send(self, call: Call | None) -> None:
        """Send the result of the last call. It is made while the device runs the next one, which nothing delays."""
        if call is None:
            return
        while self._link.backlog > MOST_UNREAD:
            time.sleep(UNREAD_PAUSE_S)
        self._link.send_step(partial(self._finish, call))

    def _finish(self, call: Call) -> tuple[StepResult, EngineState]:
        """Return the result of a call, and the engine's state. Any thread."""
        result = self._engine.advance(call)
        self._sent = None  # until it is known, so that `_send_state` compares with no older one
        self._sent = state = self._state()
        return result, state

    def _state(self) -> EngineState:
        engine = self._engine
        speculates = engine.speculates or engine.spec.num_fused_drafts > 0
        return EngineState(engine.num_running, engine.num_waiting, speculates)

    def _send_state(self) -> None:
        """Send the state of an idle engine, if it has changed."""
        if (state := self._state()) != self._sent:
            self._sent = state
            self._link.send_step(lambda: (StepResult([]), state))

    def _expire(self) -> bool:
        """End the sequences that have waited too long for a slot, if there are any; checked several times a second."""
        engine, now_s = self._engine, time.monotonic()
        if now_s - self._expired_s < self._expire_every_s:
            return False
        self._expired_s = now_s
        outputs = engine.expire(self._queue_timeout_s)
        if outputs:
            self._link.send_step(lambda: (StepResult(outputs), self._state()))
        return bool(outputs)


class EngineThread:
    """An engine on a thread of this process, for debuggers and tests. It cannot be killed, nor started again."""

    restartable = False

    def __init__(self, load: Load, settings: WorkerSettings = WorkerSettings()) -> None:
        front, end = socket.socketpair()
        self.link = Link(front)
        self._thread = threading.Thread(
            target=work,
            args=(Link(end), load, settings),
            name="djl-neuronx-engine",
            daemon=True,
        )
        self._thread.start()

    def kill(self) -> None:
        """End the connection: the thread ends after the call in flight."""
        self.link.end()

    def wait(self, timeout_s: float) -> str | None:
        """Wait for the end. Returns how it ended, or None if it has not."""
        self._thread.join(timeout_s)
        return None if self._thread.is_alive() else "thread"
