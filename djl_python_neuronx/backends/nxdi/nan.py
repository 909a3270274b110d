"""Cache positions that may hold what is not a number (NaN), and overwriting them.

NaN spoils whatever is read with it, masked or not: the mask sets its weight to 0, and 0 times NaN is NaN (NxD Inference
0.9, modules/attention/attention_base.py `compute_for_token_gen`: scores are selected, values multiplied). A prompt
reads nothing and writes its whole bucket, so an earlier sequence spoils a later one only from beyond that bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from djl_python_neuronx.backends.base import Int32Array, Rows, StepOutput
from djl_python_neuronx.backends.nxdi.calls import Calls
from djl_python_neuronx.backends.nxdi.rows import FREE
from djl_python_neuronx.errors import StepError

_PROBES = 4
"""Tokens to try before one that follows all of them is taken for the one that NaN yields: clearing a slot takes a call
for each layer, or many."""
_PROBES_OF_ROW = 16
"""The same for a slot in use, whose sequence ends then, and with drafts of the device, where the engine ends. Each is
tried behind the sequence's first token alone, where no two tokens of a trained model are followed by the same."""
_REPEATS = 4
"""Equal tokens behind a first one from which on a row is tried: at 4, 8, 16 and so on."""


class Doubts:
    """For each slot the positions that may hold NaN: from `first` to `end`.

    Logits show it. A token does not: which one is sampled from NaN is the compiler's choice. But it is always the same
    one, and NaN stays, so two different tokens in a row show that nothing before the newest column is NaN, and a row
    that repeats one token may be of NaN (`repeating`). NaN of the very last token of a sequence is not noticed.
    """

    def __init__(self, num_slots: int) -> None:
        """Every slot is clean."""
        self._first = np.zeros(num_slots, np.int64)
        self._end = np.zeros(num_slots, np.int64)
        self._newest = np.full(num_slots, -1, np.int32)
        self._repeats = np.zeros(num_slots, np.int32)

    def note(self, rows: Rows, ends: Int32Array | int, output: StepOutput) -> None:
        """Note what a step has shown. `ends`: int32[B], the ends of the columns that it has written, or one of all."""
        slots, written = rows.slots, rows.starts + rows.lens
        healthy, clean = np.zeros(slots.shape, np.bool_), written
        if output.logits is not None:
            # The output layer spreads NaN over the whole vocabulary: one number of each token is enough.
            finite = np.isfinite(output.logits[:, :, 0])
            healthy = np.asarray(finite.all(axis=1) & finite.any(axis=1))
        elif output.ids is not None and output.ids.shape[1]:
            ids, clean = output.ids[:, 0], written - 1
            later = (rows.starts > 0) & (self._newest[slots] >= 0)
            same = later & (ids == self._newest[slots])
            healthy = later & ~same & (ids >= 0)
            last = np.maximum(np.count_nonzero(output.ids >= 0, axis=1), 1) - 1
            self._newest[slots] = output.ids[np.arange(len(last)), last]
            self._repeats[slots] = np.where(same, self._repeats[slots] + 1, 0)
        first, end = clean, clean
        if not healthy.all():
            first = np.where(healthy, clean, np.minimum(self._first[slots], rows.starts))
            end = np.where(healthy, clean, np.maximum(ends, self._end[slots]))
        self._first[slots], self._end[slots] = first, end

    def spread(self, slots: npt.NDArray[np.integer[Any]], end: int) -> None:
        """Note that the tokens of these slots were read again, with a graph that has written them up to `end`.

        Its columns behind a token that yields NaN are NaN too, those of the padding included.
        """
        doubtful = slots[self._first[slots] < self._end[slots]]
        self._end[doubtful] = np.maximum(self._end[doubtful], end)

    def repeating(self, slots: Int32Array) -> list[int]:
        """Return those of these slots whose sequence repeats one token so often that it is to be tried now."""
        repeats = self._repeats[slots]
        due = (repeats >= _REPEATS) & (repeats & (repeats - 1) == 0)
        chosen: list[int] = slots[due].tolist()
        return chosen

    def of(self, slot: int, bucket: int) -> range:
        """Return the doubtful positions of a slot that a prompt of this bucket does not overwrite."""
        return range(max(int(self._first[slot]), bucket), int(self._end[slot]))

    def proven(self, slots: Int32Array) -> npt.NDArray[np.int64]:
        """Return int64[B]: the first positions of these slots that are known not to be NaN."""
        return self._first[slots]

    def forget(self, slot: int, proven: int = 0) -> None:
        """Mark a slot as clean, which another sequence begins in, behind its first `proven` positions."""
        self._first[slot] = self._end[slot] = proven
        self._newest[slot] = -1


class Mender:
    """Finds NaN in the cache of a slot, and overwrites it in that of a free one."""

    def __init__(
        self,
        calls: Calls,
        slot: int,
        filled: npt.NDArray[np.int64],
        placed: Callable[[Int32Array], Mapping[str, Any]],
    ) -> None:
        """`filled`: the tokens that each slot holds; every other slot's calls write where its next token does.

        `placed` returns the inputs of a cache in blocks.
        """
        self._calls, self._slot, self._placed = calls, slot, placed
        newest = np.clip(filled[: calls.num_rows(slot)], FREE, calls.spec.max_model_len - 1)
        self._positions = newest[:, None].astype(np.int32)

    def mend(self, doubtful: range, blank: Callable[[int, int], object]) -> None:
        """Overwrite the doubtful positions if one of them is NaN. `blank` writes the first columns of a slot.

        No call clears a slot, and a prefill does not read the old values. Each decode that reads and rewrites the
        position cleans one more layer, so this repeats once per layer.
        """
        longest = self._calls.prompt_buckets[-1]
        probes = _PROBES_OF_ROW if self._calls.fused else _PROBES
        for turn in range(int(self._calls.application.config.num_hidden_layers) + 1):
            if not self.is_spoiled(FREE, doubtful.stop, probes):
                return
            if turn and self._calls.fused:
                # Its decodes read all positions up to those that they write.
                message = f"slot {self._slot} holds NaN behind the longest prompt, which only another load removes"
                error = StepError(message)
                error.fatal = True
                raise error
            if turn == 0:
                blank(self._slot, longest)
            if self._calls.fused:
                continue
            for position in range(max(doubtful.start, longest), doubtful.stop):
                self._decode(0, position, 1)

    def is_spoiled(self, position: int, end: int, probes: int) -> bool:
        """Return whether the slot's cache holds NaN before `end`, or may do so; it is written at `position`.

        Without logits: whether tokens from all over the vocabulary are followed by one and the same.
        """
        vocab_size, found = self._calls.spec.vocab_size, set()
        for token_id in range(0, vocab_size, -(-vocab_size // probes)):
            output = self._decode(token_id, position, end)
            if output.logits is not None:
                return not bool(output.logits[self._slot, 0, 0].isfinite())
            found.add(int(output.tokens.reshape(len(output.tokens), -1)[self._slot, 0]))
            if len(found) > 1:
                return False
        return True

    def is_row_spoiled(self) -> bool:
        """Return whether the sequence in the slot, whose next position is overwritten, gets its tokens from NaN."""
        position = int(self._positions[self._slot, 0])
        return self.is_spoiled(position, position + 1, _PROBES_OF_ROW)

    def _decode(self, token_id: int, position: int, length: int) -> Any:  # noqa: ANN401
        positions = self._positions.copy()
        positions[self._slot] = position
        return self._calls.decode_alone(token_id, positions, length, **self._placed(positions))
