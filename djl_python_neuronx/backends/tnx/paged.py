"""Prompts in chunks beside decodes on transformers-neuronx: llama, with a KV cache in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from djl_python_neuronx.backends.base import Int32Array, Rows, StepOutput, Want
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.backends.tnx.base import PER_ROW, TnxBackend
from djl_python_neuronx.backends.tnx.model import CACHE_CALL


@dataclass(frozen=True)
class _Sequences:
    """The places of a call's sequences, under the names that the library reads from its `input_metadata`."""

    block_tables: torch.Tensor
    """int32[B, blocks of a slot]"""
    context_lens: torch.Tensor
    """int32[B]: tokens in the cache."""
    seq_lens_tensor: torch.Tensor
    """int32[B]: tokens in the cache after the call."""


class PagedBackend(TnxBackend):
    """All new tokens of a step in one row, of all sequences; the keys and values they attend to come from blocks.

    A slot has as many blocks as its full length needs, so no sequence waits for one. Slots with the same prefix share
    its full blocks, which nobody writes again. Block 0 is for padding. A call reads the blocks of its own sequences, as
    far as they have been written. So a slot that is left out loses nothing, and a slot needs no clearing before its
    next sequence.

    Source: transformers-neuronx 0.13, llama/hlo.py and layers/attention_utils.py (`contexted_kv`).
    """

    def __init__(self, model: Any, plan: LoadPlan) -> None:  # noqa: ANN401
        """Every slot is empty."""
        size: int = plan.arguments.calls[CACHE_CALL]["block_size"]
        super().__init__(
            model,
            plan,
            mixed_steps=True,
            max_prefill_batch=plan.num_slots,
            # Graphs differ by the blocks in use in all slots, not by the length of a row. Source: llama/model.py.
            token_buckets=(plan.max_model_len,),
            cache_buckets=tuple(length * plan.num_slots for length in model.token_buckets),
            cache_block=size,
            prefix_block=size if plan.prefix_caching else 0,
        )
        self._block_size = size
        blocks = -(-plan.max_model_len // size)
        tables = np.arange(1, 1 + plan.num_slots * blocks, dtype=np.int32)
        self._block_tables = tables.reshape(plan.num_slots, blocks)
        self._sharers = np.ones(tables.size + 1, np.int32)
        """Slots that have each block in their table."""

    def acquire(self, slot: int, prompt_ids: Sequence[int], adapter: int, salt: str = "") -> int:
        """See `SlotBackend`."""
        self._spoiled[slot] = False  # nothing to clear, see the class
        return super().acquire(slot, prompt_ids, adapter, salt)

    def _reuse(self, source: int, slot: int, count: int) -> int:
        """Share the full blocks of a prefix. The last one, which the slot goes on writing, stays if no other has it."""
        table, held = self._block_tables[slot], self._block_tables[source]
        last = held[min(count // self._block_size, len(held) - 1)]
        if source != slot or self._sharers[last] > 1:
            count -= count % self._block_size
        kept = held[: -(-count // self._block_size)]
        self._sharers[kept] += 1
        self._sharers[table] -= 1
        # Every slot has a full table, so where two share a block another one is free.
        free = np.flatnonzero(self._sharers == 0)[: len(table) - len(kept)]
        self._sharers[free] += 1
        table[:] = np.concatenate([kept, free])
        return count

    def _spoilt(self, slots: Int32Array, output: StepOutput) -> npt.NDArray[np.bool_]:  # noqa: ARG002
        return self._spoiled[slots]

    def _prefill(self, rows: Rows) -> torch.Tensor:
        answer = self._call(rows)
        if len(rows.slots) > 1 and self._is_finite(answer) is False:
            # All rows attend to all, and a weight of 0 does not hide NaN. Run alone, a sequence writes again what it
            # had written from NaN.
            answer = torch.cat([self._call(_row(rows, i)) for i in range(len(rows.slots))])
        return answer

    _decode = _prefill

    def _call(self, rows: Rows) -> torch.Tensor:
        owners = np.repeat(np.arange(len(rows.slots)), rows.lens)
        columns = np.arange(len(owners)) - np.repeat(np.cumsum(rows.lens) - rows.lens, rows.lens)
        positions = (rows.starts[owners] + columns).astype(np.int32)
        tables = self._block_tables[rows.slots]
        blocks = tables[owners, positions // self._block_size]
        places = blocks * self._block_size + positions % self._block_size
        answer: torch.Tensor = self._model(
            torch.from_numpy(rows.input_ids[owners, columns])[None],
            torch.from_numpy(positions)[None],
            torch.from_numpy(places),
            input_metadata=_Sequences(
                torch.from_numpy(tables),
                # A copy: the engine reuses its arrays.
                torch.from_numpy(rows.starts.copy()),
                torch.from_numpy(rows.starts + rows.lens),
            ),
        )
        return answer[: len(rows.slots)]  # a row for every slot; the call's rows come first

    def _is_finite(self, answer: torch.Tensor) -> bool | None:
        """Return whether no row is NaN; None if that cannot be recognised."""
        if self._sampling:
            return None if self._nan_token is None else bool((answer != self._nan_token).all())
        return bool(answer[:, 0].isfinite().all())

    def _decode_empty(self, position: int) -> torch.Tensor:
        slots = np.arange(len(self._block_tables), dtype=np.int32)
        nothing = np.zeros_like(slots)
        return self._call(
            Rows(
                input_ids=nothing[:, None],
                lens=nothing + 1,
                starts=nothing + np.int32(position),
                slots=slots,
                adapters=nothing,
                wants=Want.TOKENS,
                sampling=np.ones((len(slots), 3), np.float32),
            )
        )


def _row(rows: Rows, index: int) -> Rows:
    """Return one of the rows."""
    arrays = {name: getattr(rows, name)[[index]] for name in ("input_ids", *PER_ROW)}
    return replace(rows, **arrays)
