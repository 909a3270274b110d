"""Cache positions that may hold what is not a number (NaN). Numpy only.

NaN spoils whatever is read with it, masked or not: the mask sets its weight to 0, and 0 times NaN is NaN (NxD Inference
0.9, modules/attention/attention_base.py `compute_for_token_gen`: scores are selected, values multiplied). A prompt
reads nothing and writes its whole bucket, so an earlier sequence spoils a later one only from beyond that bucket.
"""

from __future__ import annotations

import numpy as np

from djl_python_neuronx.backends.base import DeviceTokens, Int32Array, Rows, StepOutput


class Doubts:
    """For each slot the positions that may hold NaN: from `first` to `end`.

    Logits show it. A token does not: which one is sampled from NaN is the compiler's choice. But it is always the same
    one, and NaN stays, so two different tokens in a row show that nothing before the newest column is NaN. NaN of the
    very last token of a sequence is not noticed.
    """

    def __init__(self, num_slots: int) -> None:
        """Every slot is clean."""
        self._first = np.zeros(num_slots, np.int64)
        self._end = np.zeros(num_slots, np.int64)
        self._newest = np.zeros(num_slots, np.int32)

    def note(self, rows: Rows, ends: Int32Array | int, output: StepOutput) -> None:
        """Note what a step has shown. `ends`: int32[B], the ends of the columns that it has written, or one of all."""
        slots, written = rows.slots, rows.starts + rows.lens
        logits = output.logits if isinstance(output, DeviceTokens) else output.values
        healthy, clean = np.zeros(slots.shape, np.bool_), written
        if logits is not None:
            # The output layer spreads NaN over the whole vocabulary: one column is enough.
            healthy = np.asarray(np.isfinite(logits[:, :1, 0]).any(axis=1))
        elif isinstance(output, DeviceTokens) and output.ids.shape[1]:
            ids, clean = output.ids[:, 0], written - 1
            healthy = (rows.starts > 0) & (ids != self._newest[slots]) & (ids >= 0)
            self._newest[slots] = ids
        first, end = clean, clean
        if not healthy.all():
            first = np.where(healthy, clean, np.minimum(self._first[slots], rows.starts))
            end = np.where(healthy, clean, np.maximum(ends, self._end[slots]))
        self._first[slots], self._end[slots] = first, end

    def of(self, slot: int, bucket: int) -> range:
        """Return the doubtful positions of a slot that a prompt of this bucket does not overwrite."""
        return range(max(int(self._first[slot]), bucket), int(self._end[slot]))

    def forget(self, slot: int) -> None:
        """Mark a slot as clean."""
        self._first[slot] = self._end[slot] = 0
