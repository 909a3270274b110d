"""Continuous batching on transformers-neuronx: llama, mistral, mixtral."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from djl_python_neuronx.backends.base import Rows
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.backends.tnx.base import TnxBackend


class ContinuousBackend(TnxBackend):
    """Each slot has its own position; prompts run one at a time.

    The library writes a token into position 0 of every slot that a decode leaves out. So no slot is left out: the
    arrays hold each slot's last token and position, which the library writes again unchanged. Positions of free slots
    are 0, where a new prompt writes first.
    """

    def __init__(self, model: Any, plan: LoadPlan) -> None:  # noqa: ANN401
        """Every slot is empty."""
        super().__init__(model, plan)
        # The arrays share their memory with the tensors that the model is given at every decode.
        self._ids = np.zeros((plan.num_slots, 1), np.int32)
        self._positions = np.zeros((plan.num_slots, 1), np.int32)
        self._tensors = (
            torch.from_numpy(self._ids),
            torch.from_numpy(self._positions),
            # int64: the library compares it with an arange to leave the answer as it is.
            torch.arange(plan.num_slots),
        )
        verifying = model.decoder_lm_head_for_speculation if plan.num_speculative_tokens else {}
        for head in verifying.values():
            # `last_token_id` has an entry for each row, and the library cuts it to the number of columns: with fewer
            # of these than slots no verification would run (decoder.py, `forward`, 0.13).
            head.inputs_sdim = (*head.inputs_sdim[:3], None, *head.inputs_sdim[4:])

    def release(self, slots: Sequence[int]) -> None:
        """Empty these slots."""
        super().release(slots)
        self._ids[list(slots)] = self._positions[list(slots)] = 0

    def _prefill(self, rows: Rows) -> torch.Tensor:
        """Run one row: the library would run several one after another, all in the bucket of the longest."""
        ids, slot, start = (
            rows.input_ids[0, : rows.lens[0]],
            int(rows.slots[0]),
            int(rows.starts[0]),
        )
        answer = self._continue(ids, slot, start) if start else self._begin(ids, slot)
        self._ids[slot], self._positions[slot] = ids[-1], start + len(ids) - 1
        return answer

    def _begin(self, ids: np.ndarray[Any, np.dtype[np.int32]], slot: int) -> torch.Tensor:
        """Run a fresh prompt."""
        if len(ids) == 1:
            # The library takes one column for a decode; a second one on position 0 makes it a prompt of one.
            ids, positions = np.repeat(ids, 2), np.zeros(2, np.int32)
        else:
            positions = np.arange(len(ids), dtype=np.int32)
        answer: torch.Tensor = self._model(
            torch.tensor(ids)[None], torch.from_numpy(positions)[None], torch.tensor([slot])
        )
        # With a BSH cache there is a row for every slot.
        return answer[slot : slot + 1] if len(answer) > 1 else answer

    def _continue(
        self, ids: np.ndarray[Any, np.dtype[np.int32]], slot: int, start: int
    ) -> torch.Tensor:
        """Run tokens behind those in the cache, one decode each: the library has no prefill from a position > 0."""
        for position, token_id in enumerate(ids.tolist(), start):
            self._ids[slot], self._positions[slot] = token_id, position
            answer: torch.Tensor = self._model(*self._tensors)
        return answer[slot : slot + 1]

    def _verify(self, rows: Rows) -> torch.Tensor:
        """Return float32[B, K, V] logits after every column, each slot at its own position.

        The next prompt overwrites what free slots get, the next step overwrites columns without a draft. Columns behind
        the slot's end share its last position, where no decode writes: a token there fits no text.
        """
        shape, last = (self.spec.num_slots, rows.input_ids.shape[1]), self.spec.max_model_len - 1
        ids, starts = np.zeros(shape, np.int32), np.ones((shape[0], 1), np.int32)
        ids[rows.slots], starts[rows.slots, 0] = rows.input_ids, rows.starts
        positions = np.minimum(starts + np.arange(shape[1], dtype=np.int32), last)
        answer: torch.Tensor = self._model.speculative_forward(
            torch.from_numpy(ids), torch.from_numpy(positions), self._tensors[2], shape[1]
        )
        # Later calls that leave these slots out write the same token again.
        self._ids[rows.slots, 0], self._positions[rows.slots, 0] = rows.input_ids[:, 0], rows.starts
        return answer.permute(2, 0, 1)[torch.from_numpy(rows.slots).long()]

    def _decode(self, rows: Rows) -> torch.Tensor:
        if rows.input_ids.shape[1] > 1:
            return self._verify(rows)
        slots = rows.slots
        self._ids[slots, 0] = rows.input_ids[:, 0]
        self._positions[slots, 0] = rows.starts
        answer: torch.Tensor = self._model(*self._tensors)
        return answer if len(slots) == len(answer) else answer[torch.from_numpy(slots).long()]

    def _decode_empty(self, position: int) -> torch.Tensor:
        shape = (self.spec.num_slots, 1)
        ids, positions = (torch.full(shape, value, dtype=torch.int32) for value in (0, position))
        answer: torch.Tensor = self._model(ids, positions, torch.arange(len(ids)))
        return answer
