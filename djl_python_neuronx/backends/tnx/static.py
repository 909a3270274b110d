"""Static batches on transformers-neuronx, for the architectures without continuous batching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from djl_python_neuronx.backends.base import Rows
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.backends.slots import record
from djl_python_neuronx.backends.tnx.base import TnxBackend

_NOWHERE = -1


class StaticBackend(TnxBackend):
    """Static batches, one position for all rows, that sequences can join and leave.

    Rows are padded on the left, so that they end together. Each slot's tokens are kept: when a sequence joins, when the
    shared position reaches the end of the cache or when a call has failed, all of them prefill again. A sequence that
    leaves costs nothing. Free slots are rows of padding.
    """

    def __init__(self, model: Any, plan: LoadPlan) -> None:  # noqa: ANN401
        """Every slot is empty."""
        super().__init__(model, plan, max_prefill_batch=plan.num_slots, joins="reprefill")
        self._history = np.zeros((plan.num_slots, plan.max_model_len), np.int32)
        self._next = np.zeros((plan.num_slots, 1), np.int32)
        self._end = _NOWHERE
        self._pads = torch.zeros(plan.num_slots, dtype=torch.int32)

    def release(self, slots: Sequence[int]) -> None:
        """Empty these slots; their rows are padding from now on."""
        super().release(slots)
        self._next[list(slots)] = 0

    def _decode(self, rows: Rows) -> torch.Tensor:
        slots, ends = rows.slots, rows.starts
        all_rows = np.count_nonzero(self._filled) == len(slots)
        in_step = all_rows and (self._filled[slots] == ends).all()
        if not in_step or not 0 <= self._end < self.spec.max_model_len:
            return self._prefill(rows)
        self._history[slots, ends] = self._next[slots, 0] = rows.input_ids[:, 0]
        position = torch.tensor([self._end], dtype=torch.int32)
        self._end, end = _NOWHERE, self._end  # until the call has succeeded
        answer: torch.Tensor = self._model(torch.from_numpy(self._next), position, self._pads)
        self._end = end + 1
        return answer if len(slots) == len(answer) else answer[torch.from_numpy(slots).long()]

    def _prefill(self, rows: Rows) -> torch.Tensor:
        """Prefill all sequences from their first tokens on; return the output of `rows`, whose new tokens come last."""
        lens = record(self._history, self._filled, rows)
        width = int(lens.max())
        ids = np.zeros((len(lens), width), np.int32)
        pads = np.where(lens, width - lens, 0).astype(np.int32)
        for slot in np.flatnonzero(lens).tolist():
            ids[slot, pads[slot] :] = self._history[slot, : lens[slot]]
        self._end, self._pads = _NOWHERE, torch.from_numpy(pads)
        position = torch.zeros(1, dtype=torch.int32) if width == 1 else None
        answer: torch.Tensor = self._model(torch.from_numpy(ids), position, self._pads)
        self._end = width
        self._num_reprefilled = int(lens.sum() - rows.lens.sum())
        return answer[torch.from_numpy(rows.slots).long()]

    def _decode_empty(self, position: int) -> torch.Tensor:
        ids = torch.zeros((self.spec.num_slots, 1), dtype=torch.int32)
        pads = torch.zeros(len(ids), dtype=torch.int32)
        answer: torch.Tensor = self._model(ids, torch.tensor([position], dtype=torch.int32), pads)
        return answer

    def _clear_nan(self, slot: int) -> None:  # noqa: ARG002  (all at once: the next step prefills all again)
        getattr(self._model, "decoder_lm_head", self._model).reset()
        self._end = _NOWHERE
        self._spoiled[self._filled == 0] = False
