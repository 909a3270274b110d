"""Buckets: the fixed lengths that compiled graphs exist for. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from djl_python_neuronx.backends.base import Int32Array, ModelSpec, Rows
from djl_python_neuronx.errors import StepError


def choose_bucket(length: int, buckets: Sequence[int]) -> int:
    """Return the smallest bucket that holds `length` tokens; `buckets` ascend.

    Raises:
        ValueError: no bucket is that long.
    """
    for bucket in buckets:
        if length <= bucket:
            return bucket
    message = f"{length} tokens fit no bucket; the largest holds {buckets[-1] if buckets else 0}"
    raise ValueError(message)


def pad_to_bucket(ids: Int32Array, bucket: int, fill: int = 0) -> Int32Array:
    """Pad int32[B, S] on the right to int32[B, bucket]; return `ids` itself if it fits exactly.

    Raises:
        ValueError: the rows are longer than the bucket.
    """
    rows, width = ids.shape
    if width > bucket:
        message = f"rows of {width} columns do not fit a bucket of {bucket}"
        raise ValueError(message)
    if width == bucket:
        return ids
    padded = np.full((rows, bucket), fill, np.int32)
    padded[:, :width] = ids
    return padded


def check_rows(rows: Rows, spec: ModelSpec) -> None:
    """Refuse rows that exceed the shapes of a model.

    Raises:
        StepError: the first limit that is broken, with the value.
    """
    slots, width = rows.slots, rows.input_ids.shape[1]
    if not 0 < len(slots) <= spec.num_slots:
        refuse(f"{len(slots)} rows", f"1 to {spec.num_slots}, the number of slots")
    if slots[0] < 0 or slots[-1] >= spec.num_slots or (slots[1:] <= slots[:-1]).any():
        refuse(f"slots {slots.tolist()}", f"ascending slots from 0 to {spec.num_slots - 1}")
    if rows.lens.min() < 1 or rows.lens.max() > width:
        refuse(f"rows of {rows.lens.tolist()} tokens", f"1 to {width}, the number of columns")
    first, last = int(rows.starts.min()), int((rows.starts + rows.lens).max()) - 1
    if first < 0 or last >= spec.max_model_len:
        refuse(f"positions {first} to {last}", f"0 to {spec.max_model_len - 1}")
    if rows.adapters.min() < 0 or rows.adapters.max() > spec.num_adapters:
        refuse(f"adapters {rows.adapters.tolist()}", f"0 to {spec.num_adapters}")
    if rows.wants & ~spec.outputs:
        refuse(f"{rows.wants}", f"{spec.outputs}, what the model can return")


def check_budget(parts: Sequence[Rows], spec: ModelSpec) -> None:
    """Refuse parts of a mixed step with too many tokens together, or with a slot in both.

    Raises:
        StepError: the first limit that is broken, with the value.
    """
    slots = np.concatenate([part.slots for part in parts])
    if len(np.unique(slots)) < len(slots):
        refuse(f"slots {slots.tolist()}", "each slot once")
    tokens, most = sum(int(part.lens.sum()) for part in parts), spec.prefill_buckets[-1]
    if tokens > most:
        refuse(f"{tokens} tokens", f"at most {most} in one step")


def check_top_k(rows: Rows, largest: int) -> None:
    """Refuse a top_k that the device cannot sample with.

    Raises:
        StepError: one is not from 1 to `largest`.
    """
    top_k = rows.sampling[:, 0]
    if top_k.min() < 1 or top_k.max() > largest:
        refuse(f"top_k {top_k.astype(int).tolist()}", f"1 to {largest} on the device")


def refuse(asked: str, expected: str) -> NoReturn:
    """Raise the error of a step that the engine must not build."""
    message = f"a step asks for {asked}; expected {expected}. The step was not run"
    raise StepError(message)
