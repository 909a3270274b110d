"""From what a device returns to the tokens of each sequence."""

from __future__ import annotations

import numpy as np

from djl_python_neuronx.backends.base import (
    Float32Array,
    HostLogits,
    Int32Array,
    Step,
    StepOutput,
    Want,
)
from djl_python_neuronx.engine.drafts import verify
from djl_python_neuronx.engine.faults import require_shape
from djl_python_neuronx.engine.sampler import Sampler
from djl_python_neuronx.engine.scheduler import Scheduled, ScheduledChunks


def choose(
    sampler: Sampler,
    step: Step,
    output: StepOutput,
    scheduled: Scheduled,
    vocab_size: int,
) -> Int32Array:
    """int32[B, K]: tokens for `scheduled.sequences`, in their order; -1: none.

    Raises:
        StepError: the output has not the shape that the step asked for.
    """
    count = len(scheduled.sequences)
    if not isinstance(output, HostLogits):
        require_shape(output.ids.shape, (count, *output.ids.shape[1:2]))
        return output.ids
    values = output.values
    if isinstance(scheduled, ScheduledChunks):
        return _choose_ends(sampler, values, scheduled, vocab_size)
    [(_, rows)] = step.parts
    if rows.wants == Want.ALL_LOGITS:
        # Columns beyond the longest row are padding, which may be left out.
        columns = max(values.shape[1], int(rows.lens.max()))
        require_shape(values.shape, (count, columns, vocab_size))
        return verify(sampler, values, rows)
    require_shape(values.shape, (count, 1, vocab_size))
    return sampler.sample(values[:, 0], rows.slots, rows.starts + rows.lens)[:, None]


def _choose_ends(
    sampler: Sampler,
    values: Float32Array,
    scheduled: Scheduled,
    vocab_size: int,
) -> Int32Array:
    """As `choose`, none for the prompts that go on."""
    sequences, unfinished = scheduled.sequences, scheduled.unfinished
    tokens = np.full((len(sequences), 1), -1, np.int32)
    ends = [row for row in range(len(sequences)) if row not in unfinished]
    if ends:
        require_shape(values.shape, (len(sequences), 1, vocab_size))
        slots = np.array([sequences[row].slot for row in ends], np.int32)
        positions = np.array([sequences[row].next_position + 1 for row in ends], np.int32)
        tokens[ends, 0] = sampler.sample(values[ends, 0], slots, positions)
    return tokens
