"""The thread shell around the engine, one for every door.

Three threads: the engine thread steps; the output thread makes text and delivers it; the watchdog notices a device
call that does not come back. A door submits requests and gets `Delta`s through its `Outlet`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol, Union

from djl_python_neuronx.engine.core import Engine, StepInfo
from djl_python_neuronx.engine.text import Delta, TextStream
from djl_python_neuronx.errors import (
    BackendUnavailableError,
    QueueFullError,
    RequestAbortedError,
    RequestError,
    ServingError,
)
from djl_python_neuronx.types import FinishReason, GenerationRequest, Tokenizer, TokenOutput

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 1e-4
"""A busy Python thread delays the return from the device by this long: 5.2 ms at Python's default of 5 ms, 0.3 ms
at 0.1 ms (2 vCPU, 2026-11)."""

FIRST_CALL_FACTOR = 10
"""The first call of a graph may take this many times longer than others."""

WATCHDOG_PERIOD_S = 0.2


class Outlet(Protocol):
    """Where the deltas of a door's requests go."""

    def deliver(self, deltas: list[Delta]) -> None:
        """Take one step's deltas of all requests submitted with this outlet. Output thread; must not block."""


class Observer(Protocol):
    """Told what happens, for metrics and logs. Called on the output thread, but `rejected` on any."""

    def stepped(self, info: StepInfo, num_running: int, num_waiting: int) -> None:
        """A step came back from the device."""

    def ended(self, stream: Stream, delta: Delta) -> None:
        """A request got its last delta."""


class Inbox:
    """An outlet for doors that wait: everything delivered since the last `drain`."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._arrived = threading.Condition()

    def deliver(self, deltas: list[Delta]) -> None:
        """See `Outlet`."""
        with self._arrived:
            self._deltas += deltas
            self._arrived.notify_all()

    def drain(self, timeout_s: float) -> list[Delta]:
        """Wait until something is there, at most `timeout_s`, and take all of it."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._deltas, timeout_s)
            deltas, self._deltas = self._deltas, []
            return deltas


class Stream:
    """One request between submission and its last delta."""

    __slots__ = ("first_token_s", "last_token_s", "outlet", "request", "submitted_s", "text")

    def __init__(self, request: GenerationRequest, text: TextStream, outlet: Outlet) -> None:
        self.request = request
        self.text = text
        self.outlet = outlet
        self.submitted_s = time.monotonic()
        self.first_token_s: float | None = None
        self.last_token_s = self.submitted_s


class _Stepped:
    """What the engine thread hands over after a step."""

    __slots__ = ("info", "num_running", "num_waiting", "outputs")

    def __init__(self, outputs: list[TokenOutput], info: StepInfo | None, num_running: int, num_waiting: int) -> None:
        self.outputs = outputs
        self.info = info
        self.num_running = num_running
        self.num_waiting = num_waiting


_Message = Union[_Stepped, ServingError, None]
"""Outputs of a step; an error that ends every stream; None: the output thread stops."""


class EngineLoop:
    """Runs an engine until it is closed or dies. Every method is safe from any thread."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        max_waiting: int = 1000,
        step_timeout_s: float = 120.0,
        queue_timeout_s: float | None = None,
        on_death: Callable[[ServingError], None] | None = None,
        observer: Observer | None = None,
    ) -> None:
        """`on_death` is called on the output thread, after everyone waiting has got the error."""
        self.engine = engine
        self.error: ServingError | None = None
        """Why nothing is accepted any more."""
        self._tokenizer = tokenizer
        self._most_streams = engine.spec.num_slots + max_waiting
        self._step_timeout_s = step_timeout_s
        self._queue_timeout_s = step_timeout_s if queue_timeout_s is None else queue_timeout_s
        self._on_death = on_death
        self._observer = observer
        self._streams: dict[str, Stream] = {}
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._commands: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._messages: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._dead = threading.Event()
        self._mailboxes: dict[asyncio.AbstractEventLoop, _LoopMailbox] = {}
        self._switch_interval_s = sys.getswitchinterval()
        self._threads = [
            threading.Thread(target=target, name=f"djl-neuronx-{name}", daemon=True)
            for name, target in (("engine", self._step), ("output", self._output), ("watchdog", self._watch))
        ]

    @property
    def alive(self) -> bool:
        """True while requests are accepted and answered."""
        return self.error is None and self._threads[0].is_alive()

    @property
    def num_streams(self) -> int:
        """Requests that have not got their last delta."""
        return len(self._streams)

    def start(self) -> None:
        """Start the threads."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        for thread in self._threads:
            thread.start()

    def submit(self, request: GenerationRequest, outlet: Outlet) -> None:
        """Check and queue a request; its deltas go to `outlet`.

        Raises:
            RequestError: the loaded model cannot serve it, or the waiting queue is full.
            BackendUnavailableError: the engine is dead or stopping.
        """
        self.engine.check(request)
        stream = Stream(request, TextStream(request, self._tokenizer), outlet)
        with self._lock:
            if self.error is not None:
                raise BackendUnavailableError(str(self.error)) from self.error
            if len(self._streams) >= self._most_streams:
                msg = (
                    f"{len(self._streams)} requests are running or waiting, the most that this deployment queues; "
                    "retry later, or raise option.max_waiting or option.max_rolling_batch_size"
                )
                raise QueueFullError(msg)
            if request.request_id in self._streams:
                msg = f"request id {request.request_id!r} is already in use; send another"
                raise RequestError(msg)
            self._streams[request.request_id] = stream
            self._commands.put((self.engine.add, (request,)))

    def abort(self, request_id: str) -> None:
        """Give a request up: no further delta is delivered and its slot is free before the next step. Idempotent."""
        with self._lock:
            if self._forget(request_id) is not None:
                self._commands.put((self.engine.abort, (request_id,)))

    def generate(self, request: GenerationRequest) -> Generation:
        """Submit a request and iterate over its deltas in the running event loop.

        Raises:
            ServingError: see `submit`; after that an error is the last delta, never an exception.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            mailbox = self._mailboxes.get(loop)
            if mailbox is None:
                self._mailboxes = {known: box for known, box in self._mailboxes.items() if not known.is_closed()}
                mailbox = self._mailboxes[loop] = _LoopMailbox(loop)
        # No delta can overtake the registration: both happen in this event loop's thread.
        self.submit(request, mailbox)
        return Generation(self, request.request_id, mailbox)

    def close(self, drain_s: float = 0.0) -> None:
        """Accept nothing more, let running requests end for at most `drain_s`, answer the rest with an error, stop.

        Idempotent. A thread that is stuck in the device is left behind: nothing can end it.
        """
        stopping = BackendUnavailableError("the server is stopping; send the request elsewhere")
        with self._idle:
            self.error = self.error or stopping
            self._idle.wait_for(lambda: not self._streams, drain_s)
            leftover = list(self._streams)
        for request_id in leftover:
            self._commands.put((self.engine.abort, (request_id,)))
        self._stop.set()
        self._commands.put(None)
        self._messages.put(RequestAbortedError("the server stopped before this request was finished"))
        self._messages.put(None)
        current = threading.current_thread()
        for thread in self._threads:
            if thread.is_alive() and thread is not current:
                thread.join(timeout=5.0)
        sys.setswitchinterval(self._switch_interval_s)

    # Engine thread

    def _step(self) -> None:
        try:
            self._step_until_closed()
        except Exception as error:
            logger.exception("engine_failed")
            self._die(BackendUnavailableError(f"the engine failed ({type(error).__name__}: {error}); restart it"))

    def _step_until_closed(self) -> None:
        engine, commands = self.engine, self._commands
        while not self._dead.is_set():
            while not engine.has_work or not commands.empty():
                command = commands.get()
                if command is None:
                    return
                function, arguments = command
                outputs = function(*arguments)
                if outputs:
                    self._messages.put(_Stepped(outputs, None, engine.num_running, engine.num_waiting))
            outputs = engine.step()
            self._messages.put(_Stepped(outputs, engine.last_step, engine.num_running, engine.num_waiting))
            if engine.dead is not None:
                self._die(engine.dead)
                return

    # Output thread

    def _output(self) -> None:
        while True:
            message = self._messages.get()
            if message is None:
                return
            if isinstance(message, ServingError):
                self._end_all(message)
                continue
            self._deliver(message)

    def _deliver(self, message: _Stepped) -> None:
        by_outlet: dict[Outlet, list[Delta]] = defaultdict(list)
        for output in message.outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            delta = self._text(stream, output)
            if delta is not None:
                by_outlet[stream.outlet].append(delta)
        for outlet, deltas in by_outlet.items():
            self._hand_over(outlet, deltas)
        if self._observer is not None and message.info is not None:
            self._observer.stepped(message.info, message.num_running, message.num_waiting)

    def _text(self, stream: Stream, output: TokenOutput) -> Delta | None:
        """Feed a stream; whatever goes wrong with its text is that request's error and nobody else's."""
        request_id = output.request_id
        try:
            delta = stream.text.feed(output)
        except Exception as error:
            logger.exception("text_failed request_id=%s", request_id)
            self._commands.put((self.engine.abort, (request_id,)))
            delta = _error_delta(stream, ServingError(f"the text of this request cannot be made: {error}"))
        if delta is None:
            return None
        now_s = time.monotonic()
        if stream.first_token_s is None and delta.tokens:
            stream.first_token_s = now_s
        stream.last_token_s = now_s
        if delta.finished:
            with self._lock:  # the id is free for a new request only once the engine will hear of the end first
                if output.finish_reason is None and delta.finish_reason is FinishReason.STOP:
                    end = (request_id, FinishReason.STOP, delta.num_generated_tokens)
                    self._commands.put((self.engine.finish, end))
                if self._forget(request_id) is None:
                    return None
            if self._observer is not None:
                self._observer.ended(stream, delta)
        return delta

    def _hand_over(self, outlet: Outlet, deltas: list[Delta]) -> None:
        try:
            outlet.deliver(deltas)
        except Exception:
            logger.exception("delivery_failed requests=%d", len(deltas))

    def _end_all(self, error: ServingError) -> None:
        """Answer every stream with an error."""
        with self._lock:
            streams = list(self._streams.values())
            self._streams.clear()
            self._idle.notify_all()
        for stream in streams:
            delta = _error_delta(stream, error)
            if self._observer is not None:
                self._observer.ended(stream, delta)
            self._hand_over(stream.outlet, [delta])
        if self._on_death is not None and self._dead.is_set():
            self._on_death(error)

    def _forget(self, request_id: str) -> Stream | None:
        """Take a stream out; the lock is held."""
        stream = self._streams.pop(request_id, None)
        if not self._streams:
            self._idle.notify_all()
        return stream

    # Watchdog thread

    def _watch(self) -> None:
        while not self._stop.wait(min(WATCHDOG_PERIOD_S, self._step_timeout_s / 4)):
            call = self.engine.device_call
            if call is not None:
                limit_s = self._step_timeout_s * (FIRST_CALL_FACTOR if call.first else 1)
                if time.monotonic() - call.started_s > limit_s:
                    message = (
                        f"a device call has not returned within {limit_s:g} s; the engine is dead and must be "
                        "restarted. If such calls are expected, raise option.predict_timeout"
                    )
                    self._die(BackendUnavailableError(message))
                    return
            if self.engine.num_waiting:
                self._commands.put((self.engine.expire, (self._queue_timeout_s,)))

    def _die(self, error: ServingError) -> None:
        logger.critical("engine_dead error=%s", error)
        with self._lock:
            self.error = self.error or error
        self._dead.set()
        self._messages.put(error)


class _LoopMailbox:
    """The outlet of all requests of one event loop: one wake-up per step, however many requests it has."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.queues: dict[str, asyncio.Queue[Delta]] = {}
        self._loop = loop

    def deliver(self, deltas: list[Delta]) -> None:
        """See `Outlet`."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody is left to read
            self._loop.call_soon_threadsafe(self._sort, deltas)

    def _sort(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            waiting = self.queues.get(delta.request_id)
            if waiting is not None:
                waiting.put_nowait(delta)


class Generation:
    """The deltas of one request, for ``async for``. Closing it before the end aborts the request."""

    def __init__(self, loop: EngineLoop, request_id: str, mailbox: _LoopMailbox) -> None:
        self._loop = loop
        self._request_id = request_id
        self._mailbox = mailbox
        self._queue = mailbox.queues[request_id] = asyncio.Queue[Delta]()
        self._finished = False

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta:
        if self._finished:
            raise StopAsyncIteration
        delta = await self._queue.get()
        if delta.finished:
            self._finish()
        return delta

    async def aclose(self) -> None:
        """Give the request up if it is not finished; idempotent."""
        self.close()

    def close(self) -> None:
        """Same as `aclose`, for callers that cannot wait."""
        if not self._finished:
            self._finish()
            self._loop.abort(self._request_id)

    def _finish(self) -> None:
        self._finished = True
        self._mailbox.queues.pop(self._request_id, None)


def _error_delta(stream: Stream, error: ServingError) -> Delta:
    return Delta(
        stream.request.request_id,
        text="",
        tokens=(),
        finish_reason=FinishReason.ERROR,
        error=error,
        num_prompt_tokens=len(stream.request.prompt_ids),
    )
