"""Who runs next."""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass
from typing import Union

from djl_python_neuronx.backends.base import ModelSpec
from djl_python_neuronx.backends.shapes import choose_bucket
from djl_python_neuronx.engine.sequence import Sequence
from djl_python_neuronx.engine.slots import SlotPool


@dataclass
class ScheduledPrefill:
    """Prompts to run in one call, ascending by slot, with slots assigned."""

    sequences: list[Sequence]


@dataclass
class ScheduledDecode:
    """Every live sequence, ascending by slot."""

    sequences: list[Sequence]


Scheduled = Union[ScheduledPrefill, ScheduledDecode]


class Scheduler:
    """First come, first served; prefill before decode, but with a cap.

    After a prefill the running sequences get `decode_interleave` decode steps before the next one, so that a
    burst of arrivals never silences the streams that run.
    """

    def __init__(self, spec: ModelSpec, *, decode_interleave: int = 1) -> None:
        self.slots = SlotPool(spec.num_slots)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """Ascending by slot. The list is replaced, never changed in place: its identity tells who is in the batch."""
        self._spec = spec
        self._decode_interleave = decode_interleave
        self._decodes_owed = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def schedule(self) -> Scheduled | None:
        """The next device call, or None when there is nothing to do."""
        if self.waiting and self.slots.num_free and not (self.running and self._decodes_owed):
            self._decodes_owed = self._decode_interleave
            return ScheduledPrefill(self._admit())
        if self.running:
            self._decodes_owed = max(0, self._decodes_owed - 1)
            return ScheduledDecode(self.running)
        return None

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is; its slot is free for the next prefill."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return
        self.running = [other for other in self.running if other is not sequence]
        self.slots.give_back(sequence.slot)
        sequence.slot = None

    def _admit(self) -> list[Sequence]:
        """The head of the queue and those behind it that share its bucket.

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
            if choose_bucket(sequence.prompt_len, buckets) == head_bucket:
                chosen.append(sequence)
            else:
                passed_over += 1
        for sequence in chosen:
            self.waiting.remove(sequence)
            sequence.slot = self.slots.take()
        running = self.running.copy()
        for sequence in chosen:
            bisect.insort(running, sequence, key=_slot_of)
        self.running = running
        return chosen


def _slot_of(sequence: Sequence) -> int:
    assert sequence.slot is not None  # noqa: S101  (narrowing for mypy: only running sequences come here)
    return sequence.slot
