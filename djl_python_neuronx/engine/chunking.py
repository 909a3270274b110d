"""Who runs next where prompts come in chunks and share their calls with decodes."""

from __future__ import annotations

import bisect

from djl_python_neuronx.backends.base import ModelSpec
from djl_python_neuronx.engine.scheduler import (
    Chunk,
    Scheduled,
    ScheduledChunks,
    ScheduledDecode,
    Scheduler,
    slot_of,
)
from djl_python_neuronx.engine.sequence import Sequence


class ChunkScheduler(Scheduler):
    """First come, first served, a budget of tokens for every step, and a token for every running sequence in it.

    Streams are never silent: what a step has room for beyond their tokens goes to the prompts, the oldest first. So the
    largest bucket bounds what an arrival can add to the time between two tokens.
    """

    def __init__(self, spec: ModelSpec) -> None:
        """`spec.prefill_buckets` are numbers of tokens of a whole step.

        Raises:
            ValueError: the running sequences alone can fill a step.
        """
        super().__init__(spec)
        self._budget = spec.prefill_buckets[-1]
        if self._budget <= spec.num_slots:
            msg = (
                f"a step has room for {self._budget} tokens, which {spec.num_slots} slots use up; expected more. Raise "
                "context_length_estimate or lower max_rolling_batch_size"
            )
            raise ValueError(msg)
        self._entered: list[Sequence] = []
        """Those whose prompt is not whole in the cache yet, by arrival."""

    def schedule(self) -> Scheduled | None:
        """The next device call, or None when there is nothing to do."""
        budget = self._budget - len(self.running)
        entering: list[Sequence] = []
        chunks: list[Chunk] = []
        for sequence in self._entered:
            if budget > 0:
                chunks.append(_chunk(sequence, budget))
                budget -= chunks[-1].num_tokens
        while budget > 0 and self.waiting and self.slots.num_free:
            sequence = self.waiting.popleft()
            sequence.slot = self.slots.take()
            entering.append(sequence)
            chunks.append(_chunk(sequence, budget))
            budget -= chunks[-1].num_tokens
        self._entered += entering
        if chunks:
            chunks.sort(key=lambda chunk: slot_of(chunk.sequence))
            return ScheduledChunks(chunks, self.running, entering)
        return ScheduledDecode(self.running) if self.running else None

    def advance(self, scheduled: Scheduled) -> None:
        """The chunks are in the cache; with its last one a sequence runs."""
        running = self.running.copy()
        for chunk in scheduled.chunks if isinstance(scheduled, ScheduledChunks) else ():
            sequence, runs = chunk.sequence, chunk.is_last
            sequence.num_cached += chunk.num_tokens
            if runs:
                self._entered.remove(sequence)
                bisect.insort(running, sequence, key=slot_of)
        if len(running) != len(self.running):
            self.running = running

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is."""
        if sequence in self._entered:
            self._entered.remove(sequence)
        super().remove(sequence)


def _chunk(sequence: Sequence, budget: int) -> Chunk:
    return Chunk(sequence, min(sequence.prompt_len - sequence.num_cached, budget))
