"""Supervision of one engine: start it, receive from it, end it if it hangs, and start it again after its death.

The engine runs in a separate process (or on a thread, see `EngineThread`). Two threads here: the output thread
receives what the engine sends and starts it again; the watchdog detects an engine that does not answer, and the
requests whose time is over. `Delivery` has what both do to requests, `Replicas` the loops of a model.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

from djl_python_neuronx.backends.base import ModelSpec
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.engine.delivery import Delivery, notify
from djl_python_neuronx.engine.link import SPEC, EngineState, Link, decode_error, decode_step
from djl_python_neuronx.engine.streams import Observer, StreamRegistry
from djl_python_neuronx.errors import (
    BackendUnavailableError,
    CoresTakenError,
    ServingError,
    revive,
)

logger = logging.getLogger(__name__)

FIRST_CALL_FACTOR = 10
"""The first call of a graph may take this many times longer than others."""
WATCHDOG_PERIOD_S = 0.2
JOIN_S = 5.0
RESTART_WINDOW_S = 600.0
"""Deaths of the engine are counted over this time, and all starts that failed since the last one."""
RELOAD_S, RELOAD_FACTOR = 60.0, 2.0
"""A load after a death hangs if it takes longer than this, plus so many times the load before it."""
LONGEST_PAUSE_S = 30.0
"""Longest pause before the engine is started again; it doubles with each start that gave no token."""
STOPPING = "the server is stopping; send the request elsewhere"


class Host(Protocol):
    """An engine that was started, in a process or on a thread."""

    link: Link
    restartable: bool
    """Another engine can be started after this one."""

    def kill(self) -> None:
        """End the engine at once; any thread, idempotent."""

    def wait(self, timeout_s: float) -> str | None:
        """Wait for the engine's end. Returns how it ended, in words, or None if it still runs."""


def _at_once(load: Callable[[], _Death | None], **_: object) -> _Death | None:
    return load()


@dataclass(frozen=True)
class LoopSettings:
    """Settings of an engine loop."""

    model: str = ""
    """The model's name, for logs."""
    max_waiting: int = 1000
    step_timeout_s: float = 120.0
    """Longest time of a device call; of the first call of a graph, `FIRST_CALL_FACTOR` times as long."""
    restart_timeout_s: float = 120.0
    """Longest time that a request waits for an engine that is started again, from the end of the one before."""
    restarts: int = 0
    """Starts after deaths within `RESTART_WINDOW_S`, and of those that fail in a row."""
    resumes: bool = True
    """After a death another engine goes on with the requests that have tokens."""
    max_request_s: float = math.inf
    """Longest time of every request: see `GenerationRequest.max_seconds`."""
    once_free: Callable[..., _Death | None] = _at_once
    """Calls a function that loads an engine, and again while it raises `CoresTakenError`: see `holders.once_free`."""
    room: Callable[[], AbstractContextManager[object]] = nullcontext
    """Waits until the host has memory for a load; held during each."""

    @classmethod
    def of(
        cls,
        options: ServingOptions,
        room: Callable[[], AbstractContextManager[object]],
        once_free: Callable[..., _Death | None],
    ) -> LoopSettings:
        """Return the settings that `options` give."""
        return cls(
            model=options.model_names[0],
            max_waiting=options.max_waiting,
            step_timeout_s=options.step_timeout or options.predict_timeout,
            restart_timeout_s=options.restart_timeout or options.predict_timeout,
            restarts=options.engine_restarts,
            resumes=options.resume_requests,
            max_request_s=options.max_request_seconds or math.inf,
            once_free=once_free,
            room=room,
        )


def end_engine(host: Host) -> None:
    """End an engine, by force if it does not end in time. For the thread that receives from it."""
    host.link.end()
    if host.wait(JOIN_S) is None:
        host.kill()
        host.wait(JOIN_S)
    host.link.close()


class _Death(NamedTuple):
    """The end of an engine."""

    error: ServingError
    cause: str
    """A signal's name, a status, or an error's code: for metrics and logs."""


class EngineLoop:
    """Keeps one engine running, from `start` until `stop` or until the engine is given up. Thread-safe."""

    def __init__(
        self,
        launch: Callable[[], Host],
        *,
        lock: threading.Condition,
        observer: Observer,
        settings: LoopSettings = LoopSettings(),
        copy: int = 0,
        on_orphans: Callable[[ServingError | None], None],
        on_death: Callable[[ServingError], None],
        on_progress: Callable[[str], None],
        vocabulary: Callable[[], object],
        adapters: Mapping[int, Path | None] = MappingProxyType({}),
    ) -> None:
        """`launch` starts an engine, now and after each death. `copy`: the number of this copy, for logs and metrics.

        `lock`, `adapters`: see `StreamRegistry`; `on_orphans`: see `Delivery`. `on_death` is called when no engine is
        started any more, after every request left has got the error. `on_progress` gets a line of text at each stage of
        a load. `vocabulary`: see `Grammars`; each engine waits for it.
        """
        self.state = EngineState()
        self._copy = copy
        self._settings = settings
        self._launch = launch
        self._observer = observer
        self._on_death = on_death
        self._on_progress = on_progress
        self._vocabulary = vocabulary
        self._closing = threading.Event()
        self.stage = "starting"
        """The stage of a load, for people."""
        self._hang: ServingError | None = None
        """The error for which the watchdog has ended the engine."""
        self._deaths: list[float] = []
        self._idle_starts = 0
        """Starts since an engine last gave a token."""
        self.load_s = 0.0
        """Seconds of the last load."""
        self._busy = False
        """The engine has sequences, as far as it has reported."""
        self._silent_s = 0.0
        self._patience_s = settings.step_timeout_s
        self._died_s = math.inf
        """The time at which an engine last ended that was ready; until then no request has waited for one too long."""
        self.speculation: dict[str, object] | None = None
        """The speculation in use: number of drafts, their source. Or None."""
        self._host: Host | None = None
        self.spec: ModelSpec
        """Facts of the loaded model."""
        self.streams = StreamRegistry(
            settings.max_waiting, lock, lambda stream: notify(observer.resumed, stream), adapters
        )
        self._delivery = Delivery(
            self.streams,
            observer,
            max_request_s=settings.max_request_s,
            restart_timeout_s=settings.restart_timeout_s,
            resumes=settings.resumes,
            on_orphans=on_orphans,
        )
        self._threads = [
            threading.Thread(target=body, name=f"djl-neuronx-{name}-{copy}", daemon=True)
            for name, body in (("output", self._serve), ("watchdog", self._watch))
        ]

    def start(self) -> None:
        """Start an engine, wait until it is ready, and serve.

        Raises:
            ServingError: the engine could not be loaded.
        """
        output_thread, watchdog = self._threads
        watchdog.start()
        if (death := self._load_once_free()) is not None:
            raise death.error
        self.streams.num_slots = self.spec.num_slots
        self._delivery.check(self.spec)
        self.streams.connect(self._engine.link)
        output_thread.start()

    @property
    def _serves(self) -> bool:
        """False before the end of the first load."""
        return self._threads[0].ident is not None

    @property
    def _engine(self) -> Host:
        """The engine that was started last."""
        assert self._host is not None  # noqa: S101  (after the first launch)
        return self._host

    def hand_over(self) -> None:
        """Let other copies go on with all requests."""
        self._delivery.leave(None, retired=True)

    def lose(self, error: ServingError) -> None:
        """Let other copies have the requests that wait for an engine that could not be started, or end them."""
        self._delivery.leave(error)
        self._delivery.fail(self.streams.open_streams(), error)

    def stop(self) -> None:
        """End the engine; requests that still run get an error. Does not wait."""
        self.streams.close(BackendUnavailableError(STOPPING))
        self._closing.set()
        if not self._serves:
            self._delivery.fail(self.streams.open_streams(), BackendUnavailableError(STOPPING))
        if self._host is not None:
            if self.streams.link is None:
                self._host.kill()  # during a load an engine does not notice the end of its connection
            self._host.link.end()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the threads after `stop`, and kill an engine that has not ended then."""
        ends_s = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, ends_s - time.monotonic()))
        if self._host is not None and self._host.wait(0) is None:
            self._host.kill()

    def ended(self, timeout_s: float) -> bool:
        """Wait for the engine's end after `join`. False: it is stuck in the device."""
        return self._host is None or self._host.wait(timeout_s) is not None

    # Output thread

    def _serve(self) -> None:
        """Deliver what the engine sends, and start it again when it ends. The end of this thread ends every stream."""
        try:
            death = self._receive()
            while not self._closing.is_set() and self._restart(death):
                death = self._receive()
        except Exception as error:
            logger.exception("output_failed")
            message = (
                f"the output thread failed ({type(error).__name__}: {error}); restart the server"
            )
            death = _Death(BackendUnavailableError(message), "output thread")
        self.streams.connect(None)
        if self._closing.is_set():
            stopped = "the server stopped before this request was finished; send it elsewhere"
            self._delivery.fail(self.streams.open_streams(), BackendUnavailableError(stopped))
            end_engine(self._engine)
            return
        logger.critical(
            "engine_given_up copy=%d model=%s deaths=%d engine_restarts=%d error=%s", self._copy,
            self._settings.model, len(self._deaths), self._settings.restarts, death.error,
        )  # fmt: skip
        self._delivery.settle(death.error)
        self._delivery.leave(death.error)
        self._delivery.fail(self.streams.open_streams(), death.error)
        self._on_death(death.error)
        end_engine(self._engine)

    def _receive(self) -> _Death:
        """Deliver what the engine sends until it ends. Returns why it ended."""
        while (message := self._engine.link.receive()) is not None:
            kind, *fields = message
            self._silent_s = 0.0
            if kind == "dead":
                error = revive(*fields)
                return _Death(error, error.code)
            if kind == "first_call":
                self._patience_s = self._settings.step_timeout_s * FIRST_CALL_FACTOR
                continue
            if kind == "entering":
                self._busy = True
                self._note_entering(*fields)
                continue
            if kind == "adapter":
                (failure,) = fields
                self.streams.adapter_set(decode_error(failure))
                continue
            self._patience_s = self._settings.step_timeout_s
            result, self.state = decode_step(*fields)
            self._busy = bool(self.state.running or self.state.waiting)
            if result.info is not None and result.info.cached:
                self._note_cached(result.info.cached)
            self._delivery.deliver(result.outputs)
            if num_tokens := sum([len(output.token_ids) for output in result.outputs]):
                self._idle_starts = 0
            notify(self._observer.stepped, result.info, num_tokens)
        return self._explain_end()

    def _note_entering(self, request_ids: list[str]) -> None:
        for stream in map(self.streams.get, request_ids):
            if stream is not None:
                stream.running, stream.copy = True, self._copy
                stream.slots_s.append(time.monotonic())
                stream.begun.add(stream.request.request_id)

    def _note_cached(self, cached: Mapping[str, int]) -> None:
        for request_id, count in cached.items():
            stream = self.streams.get(request_id)
            if stream is not None and not stream.num_given:
                stream.text.num_cached = count

    def _explain_end(self) -> _Death:
        """The end of an engine whose connection ended without a last message."""
        if self._hang is not None:
            return _Death(self._hang, "hang")
        # At a close nobody reads the reason, and all requests wait for their answers.
        how = self._engine.wait(0.0 if self._closing.is_set() else JOIN_S) or "closed connection"
        guess = ", as when the system runs out of memory" if how == "SIGKILL" else ""
        return _Death(BackendUnavailableError(f"the engine ended ({how}{guess})"), how)

    def _load_once_free(self) -> _Death | None:
        """Load an engine within the host's memory, again while other processes hold its cores; see `_load`.

        Only the first start after a token waits for them: those after it have pauses.
        """

        def load() -> _Death | None:
            with self._settings.room():
                if self._closing.is_set():
                    return _Death(BackendUnavailableError(STOPPING), "stop")
                death = self._load()
            if death and isinstance(death.error, CoresTakenError) and self._engine.restartable:
                raise death.error
            return death

        def pause(seconds: float) -> bool:
            self._silent_s = 0.0
            return self._closing.wait(seconds) or self._idle_starts > 1

        try:
            return self._settings.once_free(load, pause=pause, report=self._report)
        except CoresTakenError as error:
            return _Death(error, error.code)

    def _load(self) -> _Death | None:
        """Start an engine and wait until it is loaded. Returns why it could not be, or None."""
        self._silent_s, self._patience_s = 0.0, RELOAD_S + RELOAD_FACTOR * self.load_s
        try:
            self._host, self._hang = self._launch(), None
            self._host.link.send_made(lambda: ("vocabulary", self._vocabulary()))
        except ServingError as error:
            return _Death(error, error.code)
        if self._closing.is_set():
            self._host.kill()
        if (death := self._await_ready()) is not None:
            end_engine(self._engine)
            return death
        self._silent_s, self._patience_s = 0.0, self._settings.step_timeout_s
        return None

    def _await_ready(self) -> _Death | None:
        """Wait until the engine that was started is ready. Returns why it is not, or None."""
        while (message := self._engine.link.receive()) is not None:
            kind, *fields = message
            if kind == "ready":
                facts, self.speculation = fields
                self.load_s = time.monotonic() - self._engine.link.opened_s
                self.spec = SPEC.validate_python(facts)
                return None
            if kind == "failed":
                error = revive(*fields)
                return _Death(error, error.code)
            self._report(*fields)
        return self._explain_end()

    # Death and restart, output thread

    def _restart(self, death: _Death) -> bool:
        """Start the engine again, with pauses, until it is ready. False: the loop is closing, or gives it up."""
        self.stage = f"the engine has ended ({death.cause})"
        self.state, self._busy = EngineState(), False
        self._died_s = time.monotonic()
        self._delivery.settle(death.error)
        self.streams.connect(None)
        if self._engine.restartable:
            self._delivery.leave(None)
            end_engine(self._engine)
        while self._may_restart(death):
            pause_s = (
                min(LONGEST_PAUSE_S, 2.0 ** (self._idle_starts - 1)) if self._idle_starts else 0.0
            )
            self._idle_starts += 1
            self._report(f"starting the engine again after its end ({death.cause})")
            if self._closing.wait(pause_s):
                return False
            failed = self._load_once_free()
            if self._closing.is_set():
                return False
            if failed is None:
                self.streams.connect(self._engine.link)
                logger.warning(
                    "engine_restarted copy=%d model=%s seconds=%.2f",
                    self._copy, self._settings.model, self.load_s,
                )  # fmt: skip
                return True
            death = failed
        return False

    def _may_restart(self, death: _Death) -> bool:
        """Record a death, or a start that failed, however long it took; False if there are too many."""
        now_s = time.monotonic()
        recent = [at for at in self._deaths if self._died_s - at < RESTART_WINDOW_S]
        self._deaths = [*recent, now_s]
        logger.error(
            "engine_died copy=%d model=%s cause=%r deaths=%d engine_restarts=%d window_s=%g error=%s", self._copy,
            self._settings.model, death.cause, len(self._deaths), self._settings.restarts, RESTART_WINDOW_S,
            death.error,
        )  # fmt: skip
        notify(self._observer.died, death.cause, self._copy)
        return self._engine.restartable and len(self._deaths) <= self._settings.restarts

    def _report(self, stage: str) -> None:
        logger.info("engine_progress copy=%d stage=%r", self._copy, stage)
        self.stage = stage
        notify(self._on_progress, stage)

    # Watchdog thread

    def _watch(self) -> None:
        """Detect an engine that is silent although it has work, and end the requests whose time is over.

        The silence is counted in turns, so that a stop of this process does not count.
        """
        period_s = min(WATCHDOG_PERIOD_S, self._settings.step_timeout_s / 4)
        output_thread, _ = self._threads
        while not self._closing.wait(period_s) and (output_thread.is_alive() or not self._serves):
            self._delivery.end_late()
            if self.streams.link is None:
                self._delivery.leave(None)
                self._delivery.expire(self._died_s)
            elif not (self._busy or len(self.streams) or self.streams.changes):
                self._silent_s = 0.0
                continue
            if not self._serves:
                continue  # a first load may take any time
            self._silent_s += period_s
            if self._silent_s > self._patience_s:
                self._hang = BackendUnavailableError(
                    f"the engine has not answered for {self._patience_s:g} s, so a device call hangs. If calls may "
                    "take so long, raise option.step_timeout (default: option.predict_timeout)"
                )
                self._silent_s = 0.0
                self._engine.kill()
