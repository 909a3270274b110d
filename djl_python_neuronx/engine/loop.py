"""The thread shell around the engine.

Three threads: the engine thread steps; the output thread detokenizes and delivers; the watchdog detects a device call
that does not return. A caller submits requests and gets `Delta`s through its `OutputQueue`. Two queues connect the
engine thread with the others: commands in, one message per step out.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ParamSpec, Union
from weakref import WeakValueDictionary

from djl_python_neuronx.engine.core import Engine, StepResult
from djl_python_neuronx.engine.detokenizer import Delta
from djl_python_neuronx.engine.limits import check
from djl_python_neuronx.engine.runner import StepInfo
from djl_python_neuronx.engine.streams import (
    AsyncQueue,
    Generation,
    Observer,
    OutputQueue,
    Stream,
    StreamRegistry,
)
from djl_python_neuronx.errors import BackendUnavailableError, RequestAbortedError, ServingError
from djl_python_neuronx.types import GenerationRequest, Tokenizer, TokenOutput

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")

FIRST_CALL_FACTOR = 10
"""The first call of a graph may take this many times longer than others."""

HEAD_START_S, HEAD_START_SHARE = 0.003, 0.2
"""Seconds that the output thread waits for the engine thread after each step, and their most as a share of the step.

A library computes for some milliseconds of Python before its device runs. Text made meanwhile delays the device by as
much: 8 streams on transformers-neuronx's rig, steps of 30 ms, lost 4 % to a bare loop, and 0.1 % with this (2 vCPU,
2026-11-22). A token is shown that much later.
"""
SHORTEST_SLEEP_S = 1e-4
"""A shorter sleep takes longer than requested."""
WATCHDOG_PERIOD_S = 0.2
JOIN_S = 5.0
SWITCH_INTERVAL_S = 1e-4
"""A busy Python thread delays the return from the device by this long: 5.2 ms at Python's default of 5 ms, 0.3 ms
at 0.1 ms (2 vCPU, 2026-11)."""

_Command = tuple[Callable[..., list[TokenOutput] | None], tuple[Any, ...]]
"""A method of `Engine` and its arguments."""
_Message = Union[StepResult, ServingError, None]
"""Result of a step; an error that ends every stream; None: the output thread stops."""


class _SwitchInterval:
    """Python's switch interval: short while any loop of the process runs, then again what it was before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loops: set[EngineLoop] = set()
        self._before_s = 0.0

    def shorten(self, loop: EngineLoop) -> None:
        """Shorten the interval for a loop; idempotent."""
        with self._lock:
            if not self._loops:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(SWITCH_INTERVAL_S)
            self._loops.add(loop)

    def restore(self, loop: EngineLoop) -> None:
        """Restore the interval after the last loop; idempotent."""
        with self._lock:
            if self._loops == {loop}:
                sys.setswitchinterval(self._before_s)
            self._loops.discard(loop)


_switch_interval = _SwitchInterval()


class EngineLoop:
    """Runs an engine until it is closed or dies. Every public method is safe from any thread."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        observer: Observer,
        max_waiting: int = 1000,
        step_timeout_s: float = 120.0,
        queue_timeout_s: float | None = None,
        on_death: Callable[[ServingError], None] | None = None,
    ) -> None:
        """`on_death` is called on the output thread, after every waiting request has got the error."""
        self.engine = engine
        self._tokenizer = tokenizer
        self.streams = StreamRegistry(engine.spec.num_slots + max_waiting)
        self._step_timeout_s = step_timeout_s
        self._queue_timeout_s = step_timeout_s if queue_timeout_s is None else queue_timeout_s
        self._on_death = on_death
        self._observer = observer
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._messages: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._dead = threading.Event()
        self._dying = threading.Lock()
        # A queue lives as long as a request of its event loop, and holds that loop.
        self._async_queues = WeakValueDictionary[asyncio.AbstractEventLoop, AsyncQueue]()
        self._death: ServingError | None = None
        self._threads = [
            threading.Thread(
                target=self._run, args=(name, body), name=f"djl-neuronx-{name}", daemon=True
            )
            for name, body in (
                ("engine", self._step_until_closed),
                ("output", self._output_until_closed),
                ("watchdog", self._watch),
            )
        ]

    @property
    def error(self) -> ServingError | None:
        """The reason why nothing is accepted any more; None while the loop is healthy."""
        return self.streams.closed

    @property
    def alive(self) -> bool:
        """True while requests are accepted and answered."""
        engine, output, _ = self._threads
        return self.error is None and engine.is_alive() and output.is_alive()

    def start(self) -> None:
        """Start the threads."""
        _switch_interval.shorten(self)
        for thread in self._threads:
            thread.start()

    def submit(self, request: GenerationRequest, output_queue: OutputQueue) -> None:
        """Check and queue a request; its deltas go to `output_queue`.

        Raises:
            RequestError: the loaded model cannot serve it, or the waiting queue is full.
            BackendUnavailableError: the engine is dead or stopping.
        """
        try:
            check(request, self.engine.spec)
            stream = Stream(request, self._tokenizer, output_queue)
            self.streams.open(stream, lambda: self._commands.put((Engine.add, (request,))))
        except ServingError as error:
            self._notify(self._observer.rejected, error)
            raise

    def abort(self, request_id: str) -> None:
        """Abort a request: it gets no further delta, and its slot is free before the next step. Idempotent."""
        stream = self._remove(request_id)
        if stream is not None:
            self._notify(self._observer.given_up, stream)

    def _remove(self, request_id: str, *, abort: bool = True) -> Stream | None:
        """Remove a stream, and abort its sequence. Returns None if it is not open."""
        command = (Engine.abort, (request_id,))
        return self.streams.end(request_id, lambda: self._commands.put(command) if abort else None)

    def generate(self, request: GenerationRequest) -> Generation:
        """Submit a request and iterate over its deltas in the running event loop.

        Raises:
            ServingError: see `submit`; after that an error is the last delta, never an exception.
        """
        event_loop = asyncio.get_running_loop()
        async_queue = self._async_queues.setdefault(event_loop, AsyncQueue(event_loop, self.abort))
        self.submit(request, async_queue)
        # No delta can overtake the registration: both happen in this event loop's thread.
        return Generation(request.request_id, async_queue, self.abort)

    def close(self, drain_s: float = 0.0) -> bool:
        """Accept nothing more, let running requests end for at most `drain_s`, answer the rest with an error, stop.

        Idempotent; a second call cuts the drain of the first short. False: the engine thread is stuck in the device
        and left behind, because nothing can end it.
        """
        self.streams.close(
            BackendUnavailableError("the server is stopping; send the request elsewhere")
        )
        self.streams.wait_until_empty(drain_s)
        self._closing.set()
        self._commands.put((Engine.abort_all, ()))
        self._commands.put(None)
        self._messages.put(
            RequestAbortedError("the server stopped before this request was finished")
        )
        self._messages.put(None)
        current = threading.current_thread()
        for thread in self._threads:
            if thread.is_alive() and thread is not current:
                thread.join(JOIN_S)
        _switch_interval.restore(self)
        return not self._threads[0].is_alive()

    def _run(self, name: str, body: Callable[[], None]) -> None:
        """The body of a thread; its failure ends the loop, so that no request waits for ever."""
        try:
            body()
        except Exception as error:
            logger.exception("%s_failed", name)
            failure = BackendUnavailableError(
                f"the {name} thread failed ({type(error).__name__}: {error}); restart the server"
            )
            self._die(failure)
            if name == "output":
                self._end_all(self._death or failure)

    # Engine thread

    def _step_until_closed(self) -> None:
        engine, commands = self.engine, self._commands
        while not self._dead.is_set():
            while not engine.has_work or not commands.empty():
                command = commands.get()
                if command is None:
                    return
                function, arguments = command
                outputs = function(engine, *arguments)
                if outputs:
                    self._messages.put(StepResult(outputs))
            self._messages.put(engine.step())
            if engine.dead is not None:
                self._die(engine.dead)

    # Output thread

    def _output_until_closed(self) -> None:
        while True:
            message = self._messages.get()
            if message is None:
                return
            if isinstance(message, ServingError):
                self._end_all(message)
            else:
                self._give_way(message.info)
                self._deliver(message)

    def _give_way(self, info: StepInfo | None) -> None:
        """Let the engine thread start its next call before this thread needs the GIL, unless messages are waiting."""
        head_start_s = 0.0 if info is None else info.device_s * HEAD_START_SHARE
        if head_start_s > SHORTEST_SLEEP_S and self._messages.empty():
            time.sleep(min(HEAD_START_S, head_start_s))

    def _deliver(self, message: StepResult) -> None:
        by_queue: dict[OutputQueue, list[Delta]] = defaultdict(list)
        for output in message.outputs:
            stream = self.streams.get(output.request_id)
            delta = None if stream is None else self._next_delta(stream, output)
            if stream is not None and delta is not None:
                by_queue[stream.queue].append(delta)
        for output_queue, deltas in by_queue.items():
            self._hand_over(output_queue, deltas)
        num_tokens = sum([len(output.token_ids) for output in message.outputs])
        self._notify(self._observer.stepped, message.info, num_tokens)

    def _next_delta(self, stream: Stream, output: TokenOutput) -> Delta | None:
        """Feed a stream; a failure of its text is an error of this request only."""
        try:
            delta = stream.text.feed(output)
        except Exception as error:
            logger.exception("text_failed request_id=%s", stream.request.label)
            delta = stream.failed(
                ServingError(f"the text of this request cannot be made ({type(error).__name__})")
            )
        if delta is None:
            return None
        stream.last_token_s = time.monotonic()
        if stream.first_token_s is None and delta.tokens:
            stream.first_token_s = stream.last_token_s
        if delta.finish_reason is None:
            return delta
        # A stop string: the token that was decoded meanwhile never reaches the text.
        if self._remove(output.request_id, abort=output.finish_reason is None) is None:
            return None
        self._notify(self._observer.ended, stream, delta)
        return delta

    def _hand_over(self, output_queue: OutputQueue, deltas: list[Delta]) -> None:
        try:
            output_queue.deliver(deltas)
        except Exception:
            logger.exception("delivery_failed requests=%d", len(deltas))

    def _end_all(self, error: ServingError) -> None:
        """Answer every stream with an error."""
        for stream in self.streams.end_all():
            delta = stream.failed(error)
            self._notify(self._observer.ended, stream, delta)
            self._hand_over(stream.queue, [delta])
        if self._on_death is not None and error is self._death:
            on_death, self._on_death = self._on_death, None
            on_death(error)

    def _notify(self, event: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Call a method of the observer: a failure of metrics or logs must never cost a request."""
        try:
            event(*args, **kwargs)
        except Exception:
            logger.exception("observer_failed")

    # Watchdog thread

    def _watch(self) -> None:
        period_s = min(WATCHDOG_PERIOD_S, self._step_timeout_s / 4)
        while not self._closing.wait(period_s) and not self._dead.is_set():
            call = self.engine.device_call
            if call is not None:
                limit_s = self._step_timeout_s * (FIRST_CALL_FACTOR if call.first else 1)
                if time.monotonic() - call.started_s > limit_s:
                    message = (
                        f"a device call has not returned within {limit_s:g} s; the engine is dead and must be "
                        "restarted. If such calls are expected, raise option.predict_timeout"
                    )
                    self._die(BackendUnavailableError(message))
            if self.engine.num_waiting:
                self._commands.put((Engine.expire, (self._queue_timeout_s,)))

    def _die(self, error: ServingError) -> None:
        """End the loop, once: the first reason counts."""
        self.streams.close(error)
        with self._dying:
            if self._dead.is_set():
                return
            self._death = error
            self._dead.set()
        logger.critical("engine_dead error=%s", error)
        self._messages.put(error)
