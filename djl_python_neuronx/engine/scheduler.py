"""Who runs next."""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Union

from djl_python_neuronx.backends.base import ModelSpec
from djl_python_neuronx.backends.shapes import choose_bucket
from djl_python_neuronx.engine.sequence import Sequence
from djl_python_neuronx.engine.slots import SlotPool


@dataclass
class ScheduledPrefill:
    """Prompts to run in one call, ascending by slot, with slots assigned."""

    sequences: list[Sequence]
    unfinished: frozenset[int] = frozenset()
    """Rows of `sequences` that get no token yet: none, for these are whole prompts."""

    @property
    def entering(self) -> list[Sequence]:
        """Those that have just got their slot."""
        return self.sequences

    def drop(self, sequence: Sequence) -> None:
        """Leave one out, which the backend refuses."""
        self.sequences.remove(sequence)


@dataclass
class ScheduledDecode:
    """Every live sequence, ascending by slot."""

    sequences: list[Sequence]
    unfinished: frozenset[int] = frozenset()
    """Rows of `sequences` that get no token: none."""


class Chunk(NamedTuple):
    """The next tokens of a prompt."""

    sequence: Sequence
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """True if the prompt ends with it, so that a token follows."""
        return self.sequence.num_cached + self.num_tokens >= self.sequence.prompt_len


@dataclass
class ScheduledChunks:
    """Chunks of prompts, and every running sequence beside them; each ascends by slot."""

    chunks: list[Chunk]
    decoding: list[Sequence]
    entering: list[Sequence]
    """Those among the chunks' sequences that have just got their slot."""

    @property
    def sequences(self) -> list[Sequence]:
        """In the order of the output's rows."""
        return [chunk.sequence for chunk in self.chunks] + self.decoding

    @property
    def unfinished(self) -> frozenset[int]:
        """Rows of `sequences` whose prompt goes on, so that they get no token yet."""
        return frozenset(row for row, chunk in enumerate(self.chunks) if not chunk.is_last)

    def drop(self, sequence: Sequence) -> None:
        """Leave one out, which the backend refuses."""
        self.chunks = [chunk for chunk in self.chunks if chunk.sequence is not sequence]


Scheduled = Union[ScheduledPrefill, ScheduledDecode, ScheduledChunks]


class Scheduler:
    """First come, first served; prefill before decode, but with a cap.

    After a prefill the running sequences get `decode_interleave` decode steps before the next one, so that a
    burst of arrivals never silences the streams that run.

    Where a joiner has everyone encoded anew (`ModelSpec.joins`), those who wait gather while others run: until they
    fill the free slots, but none for longer than `max_join_wait_s` since it arrived, beside the decode steps that are
    owed. They join in one call, whatever their buckets. `clock` gives seconds, as `Sequence.arrived_s` has them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        decode_interleave: int = 1,
        max_join_wait_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slots = SlotPool(spec.num_slots)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """Ascending by slot. The list is replaced, never changed in place: its identity tells who is in the batch."""
        self._spec = spec
        self._reencodes = spec.joins == "reencode"
        self._decode_interleave = decode_interleave
        self._max_join_wait_s = max_join_wait_s
        self._clock = clock
        self._decodes_owed = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def schedule(self) -> Scheduled | None:
        """The next device call, or None when there is nothing to do."""
        if self.waiting and self.slots.num_free and not (self.running and self._holds_back()):
            self._decodes_owed = self._decode_interleave
            return ScheduledPrefill(self._admit())
        if self.running:
            self._decodes_owed = max(0, self._decodes_owed - 1)
            return ScheduledDecode(self.running)
        return None

    def advance(self, scheduled: Scheduled) -> None:
        """What was scheduled has run. Whole prompts run on from when they are admitted."""

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is; its slot is free for the next prefill."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return
        self.running = [other for other in self.running if other is not sequence]
        self.slots.give_back(sequence.slot)
        sequence.slot = None

    def _holds_back(self) -> bool:
        """Whether those who run go on first: with decode steps that are owed, or until more joiners share a prefill."""
        if self._decodes_owed:
            return True
        if not self._reencodes or len(self.waiting) >= self.slots.num_free:
            return False
        return self._clock() - self.waiting[0].arrived_s < self._max_join_wait_s

    def _admit(self) -> list[Sequence]:
        """The head of the queue and those behind it that share its call: its bucket, unless all are encoded anew.

        A sequence is overtaken only while a slot is left for it: being in the same call costs it nothing, losing
        its slot would.
        """
        buckets = self._spec.prefill_buckets
        head_bucket = choose_bucket(self.waiting[0].prompt_len, buckets)
        most = min(self._spec.max_prefill_batch, self.slots.num_free)
        chosen: list[Sequence] = []
        passed_over = 0
        for sequence in self.waiting:
            if len(chosen) == most or len(chosen) + passed_over == self.slots.num_free:
                break
            if self._reencodes or choose_bucket(sequence.prompt_len, buckets) == head_bucket:
                chosen.append(sequence)
            else:
                passed_over += 1
        for sequence in chosen:
            self.waiting.remove(sequence)
            sequence.slot = self.slots.take()
        running = self.running.copy()
        for sequence in chosen:
            bisect.insort(running, sequence, key=slot_of)
        self.running = running
        return chosen


def slot_of(sequence: Sequence) -> int:
    """The slot of a sequence that has one."""
    assert sequence.slot is not None  # noqa: S101  (narrowing for mypy: only running sequences come here)
    return sequence.slot
