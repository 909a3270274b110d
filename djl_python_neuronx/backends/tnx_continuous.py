"""Continuous batching on transformers-neuronx: llama, mistral, mixtral."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from djl_python_neuronx.backends.base import Rows
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.backends.tnx_slots import SlotBackend


class ContinuousBackend(SlotBackend):
    """Each slot has a position of its own; prompts run one at a time.

    The library writes a token into position 0 of every slot that a decode leaves out. So none is left out: the arrays
    hold each slot's last token and position, and what is written again is what was there. Positions of free slots are
    0, where a new prompt writes first.
    """

    def __init__(self, model: Any, plan: LoadPlan) -> None:  # noqa: ANN401
        """Take a model on the device over."""
        super().__init__(model, plan)
        self.spec = replace(self.spec, max_prefill_batch=1)
        # The arrays share their memory with the tensors that the model is given at every decode.
        self._ids = np.zeros((plan.num_slots, 1), np.int32)
        self._positions = np.zeros((plan.num_slots, 1), np.int32)
        self._tensors = (
            torch.from_numpy(self._ids),
            torch.from_numpy(self._positions),
            # int64: the library compares it with an arange to leave the answer as it is.
            torch.arange(plan.num_slots),
        )

    def acquire(self, slot: int, prompt_ids: Sequence[int], adapter: int) -> int:
        """0: no prefix is ever reused."""
        self._ids[slot] = self._positions[slot] = 0
        return super().acquire(slot, prompt_ids, adapter)

    def release(self, slots: Sequence[int]) -> None:
        """Empty these slots."""
        super().release(slots)
        self._ids[list(slots)] = self._positions[list(slots)] = 0

    def _prefill(self, rows: Rows) -> torch.Tensor:
        """Each row by itself: the library runs them one after another, and all in the bucket of the longest."""
        answers = []
        for row, slot in enumerate(rows.slots.tolist()):
            ids = rows.input_ids[row, : rows.lens[row]]
            start = int(rows.starts[row])
            answers.append(self._continue(ids, slot, start) if start else self._begin(ids, slot))
            self._ids[slot], self._positions[slot] = ids[-1], start + len(ids) - 1
        return answers[0] if len(answers) == 1 else torch.cat(answers)

    def _begin(self, ids: np.ndarray[Any, np.dtype[np.int32]], slot: int) -> torch.Tensor:
        """A fresh prompt."""
        if len(ids) == 1:
            # One column would be taken for a decode: a second one on position 0 tells that it is a prompt of one.
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
        """Tokens behind those in the cache, one decode each: the library has no prefill from a position > 0."""
        for position, token_id in enumerate(ids.tolist(), start):
            self._ids[slot], self._positions[slot] = token_id, position
            answer: torch.Tensor = self._model(*self._tensors)
        return answer[slot : slot + 1]

    def _decode(self, rows: Rows) -> torch.Tensor:
        slots = rows.slots
        self._ids[slots, 0] = rows.input_ids[:, 0]
        self._positions[slots, 0] = rows.starts
        answer: torch.Tensor = self._model(*self._tensors)
        return answer if len(slots) == len(answer) else answer[torch.from_numpy(slots).long()]

    def _scrub(self, slot: int) -> None:
        from transformers_neuronx import ops

        axis = 0 if self._model.neuron_config.bsh_cache_layout else 1
        for layer in self._model.decoder_lm_head.layers:
            for caches in (layer.attn_k_cache, layer.attn_v_cache):
                for cache in caches.values():
                    # A core has all slots of its heads. There is no call that writes a part of a tensor.
                    shards = [shard.clone() for shard in ops.parallel_cpu(cache)]
                    for shard in shards:
                        shard.select(axis, slot).zero_()
                    ops.parallel_write(cache, shards)
        self._spoiled[slot] = False
