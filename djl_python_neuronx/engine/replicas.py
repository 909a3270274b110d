"""Copies of one model behind one front: which copy gets a request, and which other one if an engine has died."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from weakref import WeakValueDictionary

from djl_python_neuronx.backends.base import ModelSpec
from djl_python_neuronx.engine.delivery import notify
from djl_python_neuronx.engine.limits import check
from djl_python_neuronx.engine.link import EngineState
from djl_python_neuronx.engine.loop import JOIN_S, STOPPING, EngineLoop, Host, LoopSettings
from djl_python_neuronx.engine.streams import AsyncQueue, Generation, Observer, OutputQueue, Stream
from djl_python_neuronx.engine.worker import SWITCH_INTERVAL_S
from djl_python_neuronx.errors import (
    BackendUnavailableError,
    QueueFullError,
    RequestError,
    ServingError,
)
from djl_python_neuronx.types import GenerationRequest, Tokenizer

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Copy:
    """A copy of a model."""

    new_loop: Callable[[], EngineLoop]
    loop: EngineLoop
    """A new one after each `Replicas.retire`."""
    cores: str
    """Its NeuronCores, as in NEURON_RT_VISIBLE_CORES; empty: not limited, or on a CPU."""
    takes: bool = False
    """It gets new requests; also while its engine is started again."""

    @property
    def alive(self) -> bool:
        """True while it takes requests and an engine is ready to answer them."""
        return self.takes and self.loop.streams.alive


class Replicas:
    """The copies of a model. Thread-safe; nothing here runs per token.

    A request goes to the copy with the fewest open ones (all have the same number of slots). Where the cache may have
    a part of its prompt, and slots are free, a copy counts as if that part of its slots were open requests less.

    If the engine of a copy dies, its requests go to others that have an engine, as soon as there is room; until then
    they wait for the restart.
    """

    def __init__(
        self,
        launches: Sequence[Callable[[], Host]],
        tokenizer: Callable[[], Tokenizer],
        *,
        observer: Observer,
        settings: LoopSettings,
        cores: Sequence[str] = (),
        on_death: Callable[[ServingError], None] = lambda _error: None,
        on_progress: Callable[[str], None] = logger.debug,
        adapters: Sequence[Path] = (),
    ) -> None:
        """Start nothing. `launches`: a function for each copy that starts its engine. `cores`: see `Copy`.

        `adapters`: the folders of those that every engine loads at its start, in the places from 1 on.

        `on_death` is called when the last copy is given up, after every request has got the error.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._tokenizer = tokenizer
        self._observer = observer
        self._on_death = on_death
        self._resumes = settings.resumes
        self._closing = False
        self._heir: Replicas | None = None
        """Copies of the same model that replace these."""
        self._lock = threading.Condition()
        """See `StreamRegistry.lock`. Held while a copy is chosen and gets requests, and while one is retired."""
        self.places: dict[str, int] = {}
        """The places of adapters by their names; see `Adapters`."""
        # A queue lives as long as a request of its event loop, and holds that loop.
        self._async_queues = WeakValueDictionary[asyncio.AbstractEventLoop, AsyncQueue]()
        self.spec: ModelSpec
        """Facts of the model, once a copy has been started."""
        self.speculation: dict[str, object] | None = None
        """The speculation in use: number of drafts, their source. Or None."""
        self._started = dict(enumerate(adapters, 1))
        self._changed: dict[int, Path | None] = {}
        """The places that have another adapter than an engine loads at its start, and the folders."""
        self.copies: list[Copy] = []
        for i, launch in enumerate(launches):
            new_loop = partial(
                EngineLoop,
                launch,
                lock=self._lock,
                copy=i,
                observer=observer,
                settings=settings,
                on_orphans=partial(self._move, i),
                on_death=self._give_up,
                on_progress=on_progress,
                vocabulary=self._vocabulary,
                adapters=self._changed,
            )
            self.copies.append(Copy(new_loop, new_loop(), cores[i] if cores else ""))

    @property
    def state(self) -> EngineState:
        """The state of all copies together; one that speculates is enough."""
        states = [loop.state for loop in self._loops]
        return EngineState(
            sum(state.running for state in states),
            sum(state.waiting for state in states),
            any(state.speculates for state in states),
        )

    @property
    def streams(self) -> list[Stream]:
        """The open requests of all copies."""
        return [stream for loop in self._loops for stream in loop.streams.open_streams()]

    @property
    def places_in_use(self) -> set[int]:
        """The places of adapters that open requests have."""
        with self._lock:  # or one that moves to another copy is missed
            return {stream.request.adapter for stream in self.streams}

    @property
    def most(self) -> int:
        """Requests that may be open at once."""
        return sum(loop.streams.most for loop in self._loops)

    @property
    def error(self) -> ServingError | None:
        """The reason why nothing is accepted any more; None while a copy has or will have an engine."""
        errors = [loop.streams.closed for loop in self._loops]
        return errors[-1] if all(errors) else None

    @property
    def alive(self) -> bool:
        """True while a copy has an engine that takes requests."""
        return any(copy.alive for copy in self.copies)

    @property
    def stage(self) -> str:
        """The stage of each copy without an engine, for people."""
        stages = [
            f"copy {i}: {one.loop.stage}" for i, one in enumerate(self.copies) if not one.alive
        ]
        return ", ".join(stages)

    @property
    def _loops(self) -> list[EngineLoop]:
        return [copy.loop for copy in self.copies]

    def _vocabulary(self) -> tuple[list[str], list[int]]:
        """The bytes of each token as Latin-1 text, none if that depends on others, and the ids of special ones."""
        tokenizer = self._tokenizer()
        pieces = [*(tokenizer.pieces or ())]
        special_ids = [one for one in tokenizer.special_ids if one < len(pieces)]
        for special_id in special_ids:
            pieces[special_id] = tokenizer.token_bytes(special_id)
        return [piece.decode("latin-1") for piece in pieces], special_ids

    # Start and end

    def start_all(self) -> None:
        """Start every copy, side by side, and wait until all take requests; if one fails, end the others.

        Raises:
            ServingError: an engine could not be loaded.
        """
        with ThreadPoolExecutor(len(self.copies)) as pool:
            starts = [pool.submit(self.start, i) for i in range(len(self.copies))]
            try:
                for start in as_completed(starts):
                    start.result()
            except BaseException:
                self.close()
                raise

    def start(self, i: int) -> None:
        """Start copy `i`, new or retired, and wait until it takes requests. `on_death` is not called for a failure.

        Raises:
            ServingError: its engine could not be loaded, or the copies are closed.
        """
        copy = self.copies[i]
        try:
            copy.loop.start()
        except ServingError as error:
            copy.loop.streams.close(error)
            raise
        with self._lock:
            self.spec, self.speculation = copy.loop.spec, copy.loop.speculation
            copy.takes = True
            if len(self.copies) > 1 and self.spec.prefix_block:
                copy.loop.streams.remember(self.spec.num_slots * self.spec.max_model_len)

    def retire(self, i: int, heir: Replicas | None = None) -> None:
        """Give copy `i` no more requests, hand over those that it has, and end its engine when all others have ended.

        They go to other copies here, or to those of `heir`, which has the same model, running or not.
        """
        copy = self.copies[i]
        with self._lock:
            copy.takes = False
            self._heir = heir
        if self._resumes:
            copy.loop.hand_over()
        copy.loop.streams.wait_until_empty(threading.TIMEOUT_MAX)
        _end([copy.loop], JOIN_S)
        with self._lock:
            if not self._closing:
                copy.loop = copy.new_loop()

    def lose(self, i: int, error: ServingError) -> None:
        """Give the requests that wait for copy `i`, which could not be started, to others, or end them."""
        self.copies[i].loop.lose(error)

    def close(self, drain_s: float = 0.0, join_s: float = JOIN_S) -> bool:
        """Accept nothing more, let running requests end for at most `drain_s`, answer the rest with an error, stop.

        An engine that has not ended after `join_s` is killed. Idempotent; a second call cuts the drain of the first
        short. False: an engine's thread is stuck in the device and left behind, because nothing can end it.
        """
        stopping = BackendUnavailableError(STOPPING)
        with self._lock:
            self._closing = True
            loops = self._loops
            for loop in loops:
                loop.streams.close(stopping)
        ends_s = time.monotonic() + drain_s
        for loop in loops:
            loop.streams.wait_until_empty(max(0.0, ends_s - time.monotonic()))
        return _end(loops, join_s)

    # Adapters

    def adapter(self, place: int) -> Path | None:
        """The folder of the adapter in a place; None: it has none, as place 0."""
        return self._changed.get(place, self._started.get(place))

    def set_adapter(self, place: int, folder: Path | None) -> None:
        """Load the adapter of a PEFT folder, which has been checked, into a place of all copies; None: empty the place.

        No open request may have the place, and one thread at a time may call. Blocks until each copy with an engine has
        done so. An engine that starts later gets it, too. After an error the place has what it had before.

        Raises:
            RequestError: the model cannot change its adapters.
            ServingError: an engine refuses the adapter, or has ended before it had loaded it.
        """
        before = self.adapter(place)
        try:
            self._change(place, folder)
        except ServingError:
            with suppress(ServingError):  # the engine has logged it
                self._change(place, before)
            raise

    def _change(self, place: int, folder: Path | None) -> None:
        """Change a place in every engine that is ready. Those that become ready later get it before any request."""
        with self._lock:
            ready = [loop for loop in self._loops if loop.streams.link is not None]
            if not all(loop.spec.changes_adapters for loop in ready):
                msg = "the loaded model cannot change its adapters; set option.adapters, and restart the server"
                raise RequestError(msg)
            self._changed[place] = folder
            changes = [loop.streams.set_adapter(place, folder) for loop in ready]
        for change in changes:
            change.result()

    # Requests

    def submit(self, request: GenerationRequest, output_queue: OutputQueue) -> None:
        """Check and queue a request; its deltas go to `output_queue`. See `prepare` and `submit_all`."""
        self.submit_all(self.prepare(request), output_queue)

    def prepare(self, *requests: GenerationRequest) -> list[Stream]:
        """Check requests that are answered together, and encode them: up to 0.1 µs for each token of a prompt.

        Raises:
            RequestError: the loaded model cannot serve one of them.
        """
        try:
            for request in requests:
                check(request, self.spec)
        except ServingError as error:
            notify(self._observer.rejected, error)
            raise
        tokenizer = self._tokenizer()
        group = [Stream(one, tokenizer) for one in requests]
        ends = dict.fromkeys([one.request_id for one in requests])
        for stream in group:
            stream.begun, stream.ends = group[0].begun, ends
        return group

    def submit_all(self, group: Sequence[Stream], output_queue: OutputQueue) -> None:
        """Queue requests that `prepare` has passed, all or none, on one copy; their deltas go to `output_queue`.

        Whoever reads them aborts the others if one fails.

        Raises:
            ServingError: see `StreamRegistry.open`; or no copy takes requests, or an adapter was unregistered.
        """
        for stream in group:
            stream.queue = output_queue
            if len(self.copies) > 1 and self.spec.prefix_block:
                stream.digests()  # which it keeps: under the lock others would wait
        with self._lock:
            copy = self._choose(group)
            if copy is None:
                why = self.error or f"no copy of the model takes requests now ({self.stage}); retry"
                raise BackendUnavailableError(str(why))
            try:
                for stream in group:
                    self._find_place(stream)
                copy.loop.streams.open(group)
            except ServingError as error:
                if isinstance(error, QueueFullError):
                    streams = copy.loop.streams
                    wait_s = copy.loop.load_s if streams.link is None else streams.queue_s
                    error.retry_after_s = max(1, math.ceil(wait_s))
                notify(self._observer.rejected, error)
                raise

    def _find_place(self, stream: Stream) -> None:
        """Give a request the place that its adapter has now.

        Raises:
            RequestError: the adapter was unregistered.
        """
        name, before = stream.request.adapter_name, stream.request.adapter
        place = self.places.get(name) if name else before
        if place is None:
            msg = f"the adapter {name!r} was unregistered before this request was queued; send another name"
            raise RequestError(msg, param="adapters")
        if place != before:
            stream.request = replace(stream.request, adapter=place)
            stream.encode()

    def generate(self, group: Sequence[Stream]) -> Generation:
        """Submit requests that `prepare` has passed, and iterate over their deltas in the running event loop.

        Raises:
            ServingError: see `submit_all`; after that an error is the last delta, never an exception.
        """
        event_loop = asyncio.get_running_loop()
        async_queue = self._async_queues.setdefault(event_loop, AsyncQueue(event_loop, self.abort))
        self.submit_all(group, async_queue)
        # No delta can overtake the registration: both happen in this event loop's thread.
        request_ids = [stream.request.request_id for stream in group]
        return Generation(request_ids, async_queue, self.abort)

    def abort(self, request_id: str) -> None:
        """Abort a request: it gets no further delta, and its slot is free before the next step. Idempotent."""
        for replicas in self._line:
            with replicas._lock:
                for loop in replicas._loops:
                    if (stream := loop.streams.end(request_id)) is not None:
                        notify(self._observer.given_up, stream)

    @property
    def _line(self) -> list[Replicas]:
        """These copies, and those that requests have been handed over to."""
        line = [self]
        while (heir := line[-1]._heir) is not None and heir not in line:
            line.append(heir)
        return line

    def _choose(self, group: Sequence[Stream]) -> Copy | None:
        """The copy for requests, one with an engine if there is one; None if none takes requests. With the lock."""

        def preference(copy: Copy) -> tuple[bool, float]:
            streams = copy.loop.streams
            return streams.alive, streams.num_slots * streams.cached_part(group) - len(streams)

        return max((copy for copy in self.copies if copy.takes), key=preference, default=None)

    # Deaths, on the output thread of the copy

    def _move(self, i: int, given_up: ServingError | None) -> None:
        """Give the requests of copy `i`, which has no engine or is retired, to others; see `Delivery`."""
        num_moved = 0
        with self._lock:
            copy = self.copies[i]
            streams = copy.loop.streams
            if given_up is not None:
                copy.takes = False
                streams.close(given_up)
            for _, together in groupby(streams.open_streams(), lambda one: id(one.begun)):
                group = list(together)
                taker = self._taker(i, group, given_up)
                if taker is None:
                    continue
                if not taker.loop.streams.adopt(group, streams):
                    break
                num_moved += len(group)
        if num_moved:
            logger.warning("requests_moved from_copy=%d requests=%d", i, num_moved)

    def _taker(self, i: int, group: list[Stream], given_up: ServingError | None) -> Copy | None:
        """The copy that gets requests of copy `i`, which are ready for another engine then, or None."""
        copy, other, heir = self.copies[i], self._choose(group), self._heir
        if copy.takes or given_up is not None:
            # Without another engine, requests may as well wait for the next one of this copy.
            return other if other is not copy and other and (other.alive or given_up) else None
        taker = heir._choose(group) if heir is not None else None
        places = {stream.request.adapter for stream in group}
        if heir is not None and any(heir.adapter(one) != self.adapter(one) for one in places):
            heir = None
        if heir is not None and not (taker and any(one.refusal(heir.spec) for one in group)):
            other = taker or other or heir.copies[i]
            for stream in group:
                stream.text.use(heir._tokenizer())
        for stream in group if other is not None else ():
            stream.resume()
        return other

    def _give_up(self, error: ServingError) -> None:
        if self.error is not None:
            self._on_death(error)


def _end(loops: Sequence[EngineLoop], join_s: float) -> bool:
    """End engines, all within `join_s` or by force. Returns False if one is stuck in the device."""
    for loop in loops:
        loop.stop()
    ends_s = time.monotonic() + join_s
    for loop in loops:
        loop.join(ends_s - time.monotonic())
    ends_s = time.monotonic() + join_s
    return all(loop.ended(max(0.0, ends_s - time.monotonic())) for loop in loops)
