"""Scheduling: which sequences run in the next device call, and in which slots."""

from __future__ import annotations

import bisect
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from djl_python_neuronx.backends.base import LEAST_PREFIX, ModelSpec
from djl_python_neuronx.backends.shapes import choose_bucket
from djl_python_neuronx.engine.sequence import Sequence


class Chunk(NamedTuple):
    """The next tokens of a prefill, at most `num_tokens`; a whole one is one chunk, the last."""

    sequence: Sequence
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """True if the prefill ends with it."""
        return self.num_tokens >= self.sequence.num_uncached


@dataclass
class Batch:
    """The sequences of one device call; both lists ascend by slot."""

    chunks: list[Chunk]
    decoding: list[Sequence]
    entering: list[Sequence]
    """Sequences of `chunks` that have just got their slot."""

    def __bool__(self) -> bool:
        return bool(self.chunks or self.decoding)

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences, in the order of the output's rows."""
        return [chunk.sequence for chunk in self.chunks] + self.decoding

    # Cached: the batch of a steady decode is the same in each step, and one that feeds tokens is of one step.
    @cached_property
    def sampled(self) -> list[tuple[int, Sequence]]:
        """The rows that get a token, with their sequences: those whose known tokens end in this call."""
        return [(row, one) for row, one in self._last_rows if not one.num_ahead]

    @cached_property
    def fed(self) -> list[Sequence]:
        """The sequences that get no token because a later call runs their last known one."""
        return [one for _, one in self._last_rows if one.num_ahead]

    @property
    def _last_rows(self) -> list[tuple[int, Sequence]]:
        """All rows but those of prompts with more chunks to come."""
        last = [(row, chunk.sequence) for row, chunk in enumerate(self.chunks) if chunk.is_last]
        return [*last, *enumerate(self.decoding, len(self.chunks))]

    def drop(self, sequence: Sequence) -> None:
        """Remove the chunk of a sequence."""
        self.chunks = [chunk for chunk in self.chunks if chunk.sequence is not sequence]


class WaitingQueue:
    """The sequences that wait for a slot, the ones with the lowest `priority` first.

    Among these each slot goes to the client, and to that request of it, that came, or had its last turn, longest ago.
    So a client of many requests, and a request of many sequences, delays each of the others by one sequence at a time.
    A sequence that leaves without a slot takes nobody's turn.
    """

    def __init__(self) -> None:
        self._clients: dict[int, OrderedDict[str, OrderedDict[str, deque[Sequence]]]] = {}
        """By priority, client and request."""
        self._num_sequences = 0

    def __len__(self) -> int:
        return self._num_sequences

    def __iter__(self) -> Iterator[Sequence]:
        """In the order in which they get slots, if no request comes or leaves meanwhile."""
        for priority in sorted(self._clients):
            clients = self._clients[priority].values()
            yield from _by_turns(_by_turns(map(iter, requests.values())) for requests in clients)

    @property
    def head(self) -> Sequence:
        """The sequence that gets the next slot."""
        clients = self._clients[min(self._clients)]
        requests = next(iter(clients.values()))
        return next(iter(requests.values()))[0]

    def add(self, sequence: Sequence) -> None:
        """Add a sequence behind those of its request, or its request behind all others of its client, or its client."""
        request = sequence.request
        clients = self._clients.setdefault(request.priority, OrderedDict())
        requests = clients.setdefault(request.client, OrderedDict())
        requests.setdefault(request.group, deque()).append(sequence)
        self._num_sequences += 1

    def take(self, sequence: Sequence) -> None:
        """Remove a sequence that gets a slot: this was the turn of its client and of its request."""
        request = sequence.request
        clients = self._clients[request.priority]
        clients[request.client].move_to_end(request.group)
        clients.move_to_end(request.client)
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence."""
        request = sequence.request
        clients = self._clients[request.priority]
        requests = clients[request.client]
        requests[request.group].remove(sequence)
        self._num_sequences -= 1
        if not requests[request.group]:
            del requests[request.group]
        if not requests:
            del clients[request.client]
        if not clients:
            del self._clients[request.priority]


def _by_turns(queues: Iterable[Iterator[Sequence]]) -> Iterator[Sequence]:
    """Yield a sequence of each queue in turn, until all are empty."""
    turns = deque(queues)
    while turns:
        queue = turns.popleft()
        for sequence in queue:
            yield sequence
            turns.append(queue)
            break


class SlotPool:
    """Free and taken slots."""

    def __init__(self, num_slots: int) -> None:
        self.free = list(range(num_slots))
        """Ascending."""
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Free slots."""
        return len(self.free)

    @property
    def num_taken(self) -> int:
        """Slots in use."""
        return len(self._taken)

    def take(self, slot: int) -> None:
        """Take a slot.

        Raises:
            ValueError: it is not free.
        """
        self.free.remove(slot)
        self._taken.add(slot)

    def give_back(self, slot: int) -> None:
        """Free a slot.

        Raises:
            KeyError: it is not taken; freeing twice would give one slot to two sequences.
        """
        self._taken.remove(slot)
        bisect.insort(self.free, slot)


_by_slot = attrgetter("held_slot")


class Scheduler:
    """First come, first served, by turns (`WaitingQueue`); prefill before decode, but with a cap.

    After a prefill the running sequences get `decode_interleave` decode steps before the next one, so that a
    burst of arrivals never silences the running streams.

    Where a new sequence costs every running one a re-prefill (`ModelSpec.joins`), waiting sequences gather while others
    run: until they fill the free slots, but none for longer than `max_join_wait_s` since it arrived, after the
    decode steps that are owed. They join in one call, whatever their buckets.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        decode_interleave: int = 1,
        max_join_wait_s: float = 0.0,
        cached: Callable[[Sequence], int] = lambda _: 0,
        place: Callable[[list[int], Sequence], int] = lambda free, _: free[0],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing waits. `cached`, `place`: see `Backend`. `clock`: seconds, on the scale of `Sequence.arrived_s`."""
        self.slots = SlotPool(spec.num_slots)
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        """Ascending by slot. The list is replaced, never changed in place: the same list means the same batch."""
        self._spec = spec
        self._reprefills = spec.joins == "reprefill"
        self._decode_interleave = decode_interleave
        self._max_join_wait_s = max_join_wait_s
        self._cached = cached
        self._place = place
        self._clock = clock
        self._decodes_owed = 0
        self._scored = False
        """The last prefill went on with a prompt that is scored: the next one is of those that wait."""
        self._entered: list[Sequence] = []
        """Sequences with a slot whose prompt is not complete in the cache yet, by arrival."""

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.add(sequence)

    def schedule(self) -> Batch:
        """The next device call; empty if there is nothing to do. `advance` must follow once it has run."""
        enters = self.waiting and self.slots.num_free and not (self.running and self._holds_back())
        owed = self.running and self._decodes_owed
        if self._entered and not owed and not (enters and self._scored):  # a prompt that is scored
            self._decodes_owed, self._scored = self._decode_interleave, True
            oldest = self._entered[0]
            return Batch([Chunk(oldest, oldest.score_columns)], [], [])
        if enters:
            self._decodes_owed, self._scored = self._decode_interleave, False
            entering = self._admit()
            self._entered += entering
            chunks = [Chunk(one, one.score_columns or len(one.prefill_ids)) for one in entering]
            return Batch(chunks, [], entering)
        self._decodes_owed = max(0, self._decodes_owed - 1)
        return Batch([], self.running, [])

    def repeat(self) -> bool:
        """Schedule the same decode again. False if something may join: `schedule` then decides."""
        if self._entered or (self.waiting and self.slots.num_free):
            return False
        self._decodes_owed = max(0, self._decodes_owed - 1)
        return True

    def advance(self, batch: Batch) -> None:
        """Record that a batch has run: its chunks are in the cache, and a sequence runs after its last one."""
        for sequence in batch.fed:
            sequence.num_ahead -= 1
        if not batch.chunks:
            return
        running = self.running.copy()
        for chunk in batch.chunks:
            sequence, ends = chunk.sequence, chunk.is_last
            sequence.num_cached += min(chunk.num_tokens, sequence.num_uncached)
            if ends:
                self._entered.remove(sequence)
                bisect.insort(running, sequence, key=_by_slot)
        if len(running) > len(self.running):
            self.running = running

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, wherever it is; its slot is free for the next prefill."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return
        self._entered = [other for other in self._entered if other is not sequence]
        self.running = [other for other in self.running if other is not sequence]
        self.slots.give_back(sequence.slot)
        sequence.slot = None

    def _holds_back(self) -> bool:
        """Return True if the next step is a decode: decodes are owed, or more sequences can share the next prefill."""
        if self._decodes_owed:
            return True
        if not self._reprefills or len(self.waiting) >= self.slots.num_free:
            return False
        oldest_s = min(sequence.arrived_s for sequence in self.waiting)
        return self._clock() - oldest_s < self._max_join_wait_s

    def _admit(self) -> list[Sequence]:
        """Give slots to the head of the queue and those behind it that share its call.

        They share it if their bucket is the head's; with re-prefill all do. Of those with the same prompt, which can be
        reused, the first goes alone. A sequence is overtaken only while a slot is left for it: another sequence in the
        same call costs it nothing, losing its slot would.
        """
        head_bucket = self._bucket(self.waiting.head)
        most = min(self._spec.max_prefill_batch, self.slots.num_free) if head_bucket else 1
        chosen: list[Sequence] = []
        passed_over = 0
        for sequence in self.waiting:
            if len(chosen) == most or len(chosen) + passed_over == self.slots.num_free:
                break
            joins = self._reprefills or self._bucket(sequence) == head_bucket
            if joins and not self._gains_from(chosen, sequence):
                chosen.append(sequence)
            else:
                passed_over += 1
        for sequence in chosen:
            self._enter(sequence)
        return sorted(chosen, key=_by_slot)

    def _bucket(self, sequence: Sequence) -> int:
        """The bucket of a waiting prompt, without the tokens that are in the cache; 0: it has calls of its own."""
        if sequence.score_columns:
            return 0
        sequence.num_cached = self._cached(sequence)
        return choose_bucket(sequence.num_uncached, self._spec.prefill_buckets)

    def _gains_from(self, prefilling: list[Sequence], sequence: Sequence) -> bool:
        """Return True if one of these prefills puts more of a waiting prompt into the cache than there is now."""
        block, key = self._spec.prefix_block, sequence.prefix_key
        # The last token is never reused.
        if not block or len(key[0]) - 1 - sequence.num_cached < max(block, LEAST_PREFIX):
            return False
        return any(one.prefix_key == key for one in prefilling)

    def _enter(self, sequence: Sequence) -> None:
        """Give a waiting sequence its slot."""
        self.waiting.take(sequence)
        sequence.slot = self._place(self.slots.free, sequence)
        self.slots.take(sequence.slot)


class ChunkScheduler(Scheduler):
    """First come, first served, by turns; a token budget for every step, and a token for every running sequence in it.

    Running streams are never silent: the budget that their tokens leave goes to the prompts, the oldest first. So the
    largest bucket bounds how much an arrival can add to the time between two tokens.

    The prefill buckets are numbers of tokens of a whole step; the last is larger than the number of slots (`LoadPlan`).
    """

    def schedule(self) -> Batch:
        """See `Scheduler`."""
        budget = self._spec.prefill_buckets[-1] - len(self.running)
        chunks: list[Chunk] = []
        known = len(self._entered)
        for sequence in self._entered:
            if budget > 0:
                chunks.append(_chunk(sequence, budget))
                budget -= chunks[-1].num_tokens
        for sequence in [*islice(self.waiting, self.slots.num_free)]:
            if budget <= 0:
                break
            sequence.num_cached = self._cached(sequence)
            if not self._gains_from(self._entered, sequence):
                self._enter(sequence)
                self._entered.append(sequence)
                chunks.append(_chunk(sequence, budget))
                budget -= chunks[-1].num_tokens
        chunks.sort(key=lambda chunk: chunk.sequence.held_slot)
        return Batch(chunks, self.running, self._entered[known:])


def _chunk(sequence: Sequence, budget: int) -> Chunk:
    return Chunk(sequence, min(sequence.num_uncached, budget))
