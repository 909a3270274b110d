"""Requests between submission and their last delta, and the queues that their deltas go to."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from djl_python_neuronx.backends.base import ModelSpec
from djl_python_neuronx.engine.detokenizer import Delta, TextStream
from djl_python_neuronx.engine.limits import check
from djl_python_neuronx.engine.link import Link, encode_request
from djl_python_neuronx.engine.pace import Pace
from djl_python_neuronx.engine.runner import StepInfo
from djl_python_neuronx.errors import (
    BackendUnavailableError,
    QueueFullError,
    RequestAbortedError,
    RequestError,
    ServingError,
)
from djl_python_neuronx.types import FinishReason, GenerationRequest, Tokenizer

FIRST = -(2**62)
"""Priority of a request that goes on at another engine: lower than that of any that a client sends."""
MAX_UNREAD_DELTAS = 8192
"""Deltas that may wait for a client that reads slowly; in an answer they are about 1 MB."""
MAX_SUNK_DELTAS = 128
"""Deltas that a sink takes at once, as many as a step gives an answer: of more the reader takes one, and waits for its
client if that has too much to read."""
BLOCK_TOKENS = 128
"""Tokens by which the beginnings of sequences are compared. To reuse fewer saves next to nothing: with prefix caching
no prompt graph of NxD Inference has fewer."""


class OutputQueue(Protocol):
    """Receives the deltas of the requests submitted with it."""

    def deliver(self, deltas: list[Delta]) -> None:
        """Take the deltas of one step, of all its requests in one message. Output thread; must not block."""


class BlockingQueue:
    """A queue for a thread that waits: everything delivered since the last `drain`."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._arrived = threading.Condition()

    def deliver(self, deltas: list[Delta]) -> None:
        """See `OutputQueue`."""
        with self._arrived:
            self._deltas += deltas
            self._arrived.notify_all()

    def drain(self, timeout_s: float) -> list[Delta]:
        """Wait for the first delta, at most `timeout_s`, and take all that have arrived."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._deltas, timeout_s)
            deltas, self._deltas = self._deltas, []
            return deltas


class AsyncQueue:
    """The queue of all requests of one event loop: one wake-up per step, however many requests it has."""

    def __init__(self, loop: asyncio.AbstractEventLoop, abort: Callable[[str], None]) -> None:
        self.generations: dict[str, Generation] = {}
        self._loop = loop
        self._abort = abort
        self._arrived: deque[list[Delta]] = deque()

    def deliver(self, deltas: list[Delta]) -> None:
        """See `OutputQueue`. While the event loop is late the steps join, and a request gets them together."""
        self._arrived.append(deltas)
        try:
            self._loop.call_soon_threadsafe(self._sort)
        except RuntimeError:  # the event loop is closed
            while self._arrived:
                for delta in self._arrived.popleft():
                    self._abort(delta.request_id)

    def _sort(self) -> None:
        """Hand over all that has arrived: the calls for steps that joined this one find nothing."""
        by_generation: dict[Generation, list[Delta]] = {}
        while self._arrived:
            for delta in self._arrived.popleft():
                generation = self.generations.get(delta.request_id)
                if generation is not None:
                    by_generation.setdefault(generation, []).append(delta)
        for generation, deltas in by_generation.items():
            generation.put(deltas)


class Generation:
    """The deltas of requests that are answered together, for ``async for``. An error of one ends all of them.

    Closing it before the end aborts the requests and ends the iteration, also one that waits for a delta.
    """

    def __init__(
        self, request_ids: Sequence[str], queue: AsyncQueue, abort: Callable[[str], None]
    ) -> None:
        self.sink: Callable[[list[Delta]], bool] | None = None
        """Takes deltas that are not finished in place of a reader that waits, which costs less than to wake it. Returns
        False if it cannot. An exception of it is one of the reader's."""
        self._abort = abort
        self._open_ids = set(request_ids)
        self._open_generations = queue.generations
        self._unread: deque[Delta] = deque()
        self._reader: asyncio.Future[None] | None = None
        """Done when a reader that waits may go on, with the exception of the sink if there was one."""
        queue.generations.update(dict.fromkeys(request_ids, self))

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta:
        self._pour()
        if not self._unread and not self.finished:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        if self.finished:
            raise StopAsyncIteration
        delta = self._unread.popleft()
        if delta.finished:
            self._open_ids.discard(delta.request_id)
            self._open_generations.pop(delta.request_id, None)
        if delta.error is not None:
            self.close()
        return delta

    @property
    def finished(self) -> bool:
        """True once there are no more deltas."""
        return not self._open_ids

    def put(self, deltas: list[Delta]) -> None:
        """Add deltas that have arrived; those behind `MAX_UNREAD_DELTAS` are dropped, and the request is aborted."""
        for delta in deltas:
            late = len(self._unread) - MAX_UNREAD_DELTAS
            if late > 0:
                break
            if late == 0:
                self._abort(delta.request_id)
                msg = f"the client reads too slowly: {MAX_UNREAD_DELTAS} parts of the answer wait for it"
                error = RequestAbortedError(msg)
                delta = delta._replace(finish_reason=FinishReason.ERROR, error=error)
            self._unread.append(delta)
        reader = self._reader
        if reader is not None and not reader.done():
            try:
                self._pour()
            except Exception as error:  # noqa: BLE001  (the reader raises it)
                reader.set_exception(error)
            else:
                if self._unread:
                    reader.set_result(None)

    def _pour(self) -> None:
        """Give the sink what is unread, up to a delta that is finished. The reader is not busy with one."""
        if self.sink is None:
            return
        goes_on = takewhile(lambda one: one.finish_reason is None, self._unread)
        deltas = [*islice(goes_on, MAX_SUNK_DELTAS)]
        if deltas and self.sink(deltas):
            for _ in deltas:
                self._unread.popleft()

    def close(self) -> None:
        """Abort the requests that are not finished; idempotent."""
        self.sink = None
        while self._open_ids:
            request_id = self._open_ids.pop()
            self._open_generations.pop(request_id, None)
            self._abort(request_id)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def wake(self) -> None:
        """Deliver an empty delta, so that the reader can do what is due by now."""
        if self._open_ids:
            self.put([Delta(next(iter(self._open_ids)), "", ())])


class Stream:
    """One request, its text and the queue for its deltas."""

    queue: OutputQueue
    """Set when the stream is submitted."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self.request = request
        self.text = TextStream(request, tokenizer)
        self.output_ids: list[int] = []
        """The tokens so far."""
        self.num_sent = 0
        """Those of them that the last engine got with it."""
        self._seed = secrets.randbits(63)
        self.encode()
        self.submitted_s = time.monotonic()
        self.first_token_s: float | None = None
        self.last_token_s = self.submitted_s
        self.copy: int | None = None
        """The copy that last gave it a slot."""
        self.ends: dict[str, Any] = {}
        """The requests answered together, each to what `Tracing` keeps of its end, None until then."""
        self.begun: set[str] = set()
        """The requests answered together that have tokens, or that a step of this engine has begun. Ids, not `Stream`s:
        references among streams would form a cycle."""
        self.slots_s: list[float] = []
        """Times at which it got a slot: more than one if other engines went on with it."""
        self.running = False
        """A step of this engine has begun it."""
        self.deaths = 0
        """Ends of the engine at which the request was running."""

    def encode(self) -> None:
        """Encode the request for an engine, which goes on behind the tokens so far."""
        request, given_ids = self.request, self.output_ids.copy()
        self.num_given = len(given_ids)
        """The tokens that are in `message`."""
        # A client that has the beginning of an answer waits for no other's.
        priority = FIRST if given_ids else request.priority
        self.message = encode_request(
            request,
            self.text.stop_tokens,
            seed=self._seed,
            given_ids=given_ids,
            priority=priority,
        )
        self._digests = [hash((request.adapter, request.cache_salt))]

    @property
    def num_tokens(self) -> int:
        """Tokens so far, of prompt and answer."""
        return len(self.request.prompt_ids) + len(self.output_ids)

    def digests(self) -> list[int]:
        """Return a digest of each beginning of the tokens so far, in whole blocks; adapter and salt are in it.

        Takes 15 µs for 2,048 new tokens.
        """
        first, num_tokens = len(self._digests) * BLOCK_TOKENS, self.num_tokens
        ids = [*self.request.prompt_ids, *self.output_ids] if first <= num_tokens else []
        for end in range(first, num_tokens + 1, BLOCK_TOKENS):
            self._digests.append(hash((self._digests[-1], *ids[end - BLOCK_TOKENS : end])))
        return self._digests[1:]

    def resume(self) -> None:
        """Make it ready for another engine."""
        self.running = False
        if len(self.output_ids) > self.num_given:
            self.encode()

    def refusal(self, spec: ModelSpec) -> ServingError | None:
        """The reason that a model cannot go on with it, or None."""
        try:
            check(replace(self.request, given_ids=self.output_ids), spec)
        except ServingError as error:
            return error
        return None

    def failed(self, error: ServingError) -> Delta:
        """The last delta of a stream that ends with an error."""
        request, reason, count = self.request, FinishReason.ERROR, self.text.num_generated
        return Delta(request.request_id, "", (), reason, error, len(request.prompt_ids), count)


class Observer(Protocol):
    """Receives the loop's events, for metrics and logs. Output thread; `rejected` and `given_up`: any thread."""

    def rejected(self, error: ServingError) -> None:
        """A request was not accepted."""

    def stepped(self, info: StepInfo | None, num_tokens: int) -> None:
        """A step has run and given tokens; `info` is None if it failed."""

    def died(self, cause: str, copy: int) -> None:
        """The engine of a copy has ended, by a signal, a status or an error."""

    def resumed(self, stream: Stream) -> None:
        """Another engine has got a request, to go on behind the tokens so far."""

    def given_up(self, stream: Stream) -> None:
        """A request was aborted; it gets no last delta."""

    def ended(self, stream: Stream, delta: Delta) -> None:
        """A request has got its last delta."""


class StreamRegistry:
    """Open requests of one copy: those that its engine has, or that wait for it. Thread-safe."""

    def __init__(
        self,
        max_waiting: int,
        lock: threading.Condition,
        on_resumed: Callable[[Stream], None] = lambda _: None,
        adapters: Mapping[int, Path | None] = MappingProxyType({}),
    ) -> None:
        """`on_resumed` is called with each stream that another engine goes on with, once that has got it.

        `adapters`: the places that have another adapter than an engine loads at its start; it changes under the lock.
        """
        self.closed: ServingError | None = None
        """The error for which no request is accepted any more; None while there is or will be an engine."""
        self.num_slots = 0
        """Slots of the engine, once one has been loaded."""
        self._most_digests = 0
        """0: nothing is remembered."""
        self._digests = OrderedDict[int, int]()
        """`Stream.digests` of what the engine has had, the latest last; each with the place of its adapter."""
        self.pace = Pace()
        self._max_waiting, self._on_resumed = max_waiting, on_resumed
        self.link: Link | None = None
        """To the engine; None while none is ready."""
        self.lock = lock
        """Of all copies of a model, reentrant: each request is in exactly one of them.

        Held while a request or an engine comes or goes. What the engine gets is sent under it: the message that ends a
        request follows the one that adds it."""
        self._open: dict[str, Stream] = {}
        self._adapters = adapters
        self.changes = deque[Future[None]]()
        """The changes of adapters that the engine has not answered; it does so in their order."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def most(self) -> int:
        """Requests that may be open."""
        return self._max_waiting + self.num_slots

    @property
    def queue_s(self) -> float:
        """Seconds in which the open requests end, as fast as others did; 0 if that is unknown."""
        return len(self._open) * self.pace.service_s / max(1, self.num_slots)

    @property
    def alive(self) -> bool:
        """True while requests are accepted and an engine is ready to answer them."""
        return self.closed is None and self.link is not None

    def get(self, request_id: str) -> Stream | None:
        """The stream of an id, or None if it is not open."""
        return self._open.get(request_id)

    def connect(self, link: Link | None) -> None:
        """Give adapters and all requests to an engine that is ready; None: they wait for the next one."""
        with self.lock:
            self.link = link
            self._digests.clear()
            unanswered, self.changes = self.changes, deque()
            for change in unanswered:
                msg = "the engine ended before it had loaded the adapter; retry"
                change.set_exception(BackendUnavailableError(msg))
            if link is not None:
                for place, folder in self._adapters.items():
                    self.set_adapter(place, folder)
            self._send(self._open.values())

    def set_adapter(self, place: int, folder: Path | None) -> Future[None]:
        """Let the engine, which is ready, change the adapter of a place. The result has its error, if it refuses."""
        with self.lock:
            assert self.link is not None  # noqa: S101  (`Replicas` looks under the lock)
            change = Future[None]()
            self.changes.append(change)
            for digest in [one for one, of_place in self._digests.items() if of_place == place]:
                del self._digests[digest]
            self.link.send("adapter", (place, None if folder is None else str(folder)))
            return change

    def adapter_set(self, error: ServingError | None) -> None:
        """Take the engine's answer to `set_adapter`."""
        with self.lock:
            change = self.changes.popleft()
        if error is None:
            change.set_result(None)
        else:
            change.set_exception(error)

    def open(self, streams: Sequence[Stream]) -> None:
        """Accept requests, all or none; the engine gets them, or the next one if none is ready.

        Raises:
            BackendUnavailableError: nothing is accepted any more.
            QueueFullError: there is no room for them among the open ones, or for more of their client.
            RequestError: there are more than may ever be open, or an id is in use.
        """
        if len(streams) > self.most:
            msg = f"the request has {len(streams)} prompts; this deployment takes at most {self.most} at a time"
            raise RequestError(msg)
        with self.lock:
            if self.closed is not None:
                raise BackendUnavailableError(str(self.closed)) from self.closed
            self._check_room(streams[0].request.client, len(streams))
            if used := {stream.request.request_id for stream in streams} & self._open.keys():
                msg = f"request id {min(used)!r} is already in use; send another"
                raise RequestError(msg)
            self._add(streams)

    def _check_room(self, client: str, count: int) -> None:
        """Refuse more requests than there is room for. The less room is left, the fewer one client may have.

        Raises:
            QueueFullError: there is no room.
        """
        room, of_client = self.most - len(self._open), ""
        if client:
            own = sum(stream.request.client == client for stream in self._open.values())
            room, of_client = min(room, max(self.num_slots, room) - own), f", {own} of this client"
        if count > room:
            msg = (
                f"{len(self._open)} requests are running or waiting{of_client}, of at most {self.most}: no room for "
                f"{count} more. Retry later, or raise option.max_waiting or option.max_rolling_batch_size"
            )
            raise QueueFullError(msg)

    def adopt(self, streams: Sequence[Stream], other: StreamRegistry) -> bool:
        """Take open requests from another copy, all or none. False: they stay there, because there is no room."""
        with self.lock:
            if self.closed is not None or len(self._open) + len(streams) > self.most:
                return False
            for stream in streams:
                other.end(stream.request.request_id)
            self._add(streams)
            return True

    def end(self, request_id: str, *, abort: bool = True) -> Stream | None:
        """Remove a request, and abort its sequence if an engine has it. Returns None if it is not open."""
        with self.lock:
            stream = self._open.pop(request_id, None)
            if stream is not None:
                if abort and self.link is not None:
                    self.link.send("abort", request_id)
                self._remember(stream)
                if not self._open:
                    self.lock.notify_all()
            return stream

    def open_streams(self) -> list[Stream]:
        """All streams, the oldest first."""
        with self.lock:
            return list(self._open.values())

    def remember(self, num_tokens: int) -> None:
        """From now on, remember for `cached_part` what the engine gets, as many tokens as its cache holds."""
        self._most_digests = num_tokens // BLOCK_TOKENS

    def cached_part(self, streams: Sequence[Stream]) -> float:
        """The part of the tokens of requests that the cache may have, 0 to 1; 0 without free slots for all of them."""
        if not self._digests or len(self._open) + len(streams) > self.num_slots:
            return 0.0
        found = sum(len([*takewhile(self._digests.__contains__, one.digests())]) for one in streams)
        return found * BLOCK_TOKENS / sum(one.num_tokens for one in streams)

    def num_tokens(self, block: int) -> int:
        """Tokens of the requests that have a slot, each rounded up to blocks of so many."""
        running = [stream for stream in self.open_streams() if stream.running]
        return sum(-(-one.num_tokens // block) * block for one in running)

    def close(self, why: ServingError) -> None:
        """Accept nothing more; the first reason counts."""
        with self.lock:
            self.closed = self.closed or why

    def wait_until_empty(self, timeout_s: float) -> bool:
        """True once no stream is open; False after `timeout_s`."""
        with self.lock:
            return self.lock.wait_for(lambda: not self._open, timeout_s)

    def _add(self, streams: Sequence[Stream]) -> None:
        self._open.update({stream.request.request_id: stream for stream in streams})
        self._send(streams)

    def _send(self, streams: Iterable[Stream]) -> None:
        if self.link is not None:
            for stream in streams:
                self.link.send_encoded(stream.message)
                self._remember(stream)
                if stream.num_given > stream.num_sent:
                    stream.num_sent = stream.num_given
                    self._on_resumed(stream)

    def _remember(self, stream: Stream) -> None:
        """Remember the tokens so far of a request that the engine has. Of one sequence the end is forgotten first."""
        if self._most_digests and self.link is not None:
            for digest in reversed(stream.digests()):
                self._digests[digest] = stream.request.adapter
                self._digests.move_to_end(digest)
            while len(self._digests) > self._most_digests:
                self._digests.popitem(last=False)
