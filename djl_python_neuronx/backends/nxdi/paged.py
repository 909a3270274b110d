"""The steps of NxD Inference with a KV cache in blocks: prompts begin behind what the cache has of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from djl_python_neuronx.backends.base import (
    Float32Array,
    Int32Array,
    PartKind,
    Rows,
    Step,
    StepOutput,
)
from djl_python_neuronx.backends.nxdi.batching import ContinuousBackend
from djl_python_neuronx.backends.nxdi.blocks import Blocks
from djl_python_neuronx.backends.nxdi.spec import prefix_lengths
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.backends.shapes import refuse


class PagedBackend(ContinuousBackend):
    """Each slot has its own position and its own blocks, but for those of a prefix, which it has with others.

    A prompt runs alone. The library gets all its tokens and the number of those in the cache: it takes the smallest
    graph that holds the others, fills that up with the last ones of the prefix, which it runs again and writes nowhere,
    and reads what is before them.

    A decode names every slot, in order, and writes the slots of its step alone: a token of any other has the place
    -1, which is nowhere.

    A graph reads whole blocks, whatever is masked in them. So a block that may hold NaN is overwritten before another
    slot gets it, and no other slot ever gets one by its digest before its keys are proven to be numbers (`Doubts`).
    """

    def __init__(self, application: Any, plan: LoadPlan) -> None:  # noqa: ANN401
        """Every slot is empty. `application`: loaded."""
        config = application.neuron_config
        size, prefixes = config.pa_block_size, prefix_lengths(application)
        super().__init__(application, plan, prefix_block=size, prefix_buckets=prefixes)
        self._prefixes = None  # those of slots; blocks have their own
        shape = self.spec.num_slots, self.spec.max_model_len
        self._blocks = Blocks(config.pa_num_blocks, size, *shape)
        self._tokens = np.zeros(shape, np.int32)

    def cached(self, prompt_ids: Sequence[int], adapter: int, salt: str = "") -> int:
        """Return how many tokens of a prompt are in the cache, in whole blocks."""
        return len(self._blocks.find(prompt_ids, (adapter, salt))) * self._blocks.size

    def acquire(self, slot: int, prompt_ids: Sequence[int], adapter: int, salt: str = "") -> int:
        """Empty a slot for a prompt, but for the blocks that hold a prefix of it."""
        super().acquire(slot, prompt_ids, adapter, salt)
        count = self._blocks.acquire(slot, prompt_ids, (adapter, salt))
        self._tokens[slot, :count] = prompt_ids[:count]
        self._doubts.forget(slot, count)
        self._filled[slot] = count
        return count

    def release(self, slots: Sequence[int]) -> None:
        """Empty these slots; their blocks keep what they hold until another slot takes them."""
        for slot in slots:
            self._blocks.release(slot, self._doubts.of(slot, 0))
            self._doubts.forget(slot)
        super().release(slots)

    def _forget(self, place: int) -> None:
        self._blocks.forget(place)

    def _check(self, kind: PartKind, rows: Rows) -> None:
        """Refuse what `ContinuousBackend._check` refuses, and writing a second time what others may read."""
        super()._check(kind, rows)
        filled = self._filled[rows.slots]
        if (rows.starts != filled).any():
            refuse(f"starts {rows.starts.tolist()}", f"the cached {filled.tolist()}, in blocks")

    def _run(self, step: Step) -> StepOutput:
        try:
            return super()._run(step)
        except Exception:
            [(_, rows)] = step.parts
            ends = rows.starts + np.maximum(rows.lens, self._model.num_written)
            self._doubts.note(rows, ends, StepOutput())
            raise

    def _note(self, parts: Sequence[tuple[PartKind, Rows]], output: StepOutput) -> None:
        super()._note(parts, output)
        [(_, rows)] = parts
        proven = self._doubts.proven(rows.slots).tolist()
        for slot, count in zip(rows.slots.tolist(), proven, strict=True):
            self._blocks.keep(slot, self._tokens[slot], count)

    def _prefill(self, rows: Rows) -> StepOutput:
        [slot], [start], [count] = (each.tolist() for each in (rows.slots, rows.starts, rows.lens))
        end = start + count
        self._tokens[slot, start:end] = rows.input_ids[0, :count]
        self._reserve(slot, end, 0)  # the prompt itself brings its adapter
        newest = self._tokens[slot, end - 1 : end]
        self._newest.keep(rows.slots, newest, np.array([end - 1]), rows.sampling)
        sampling = self._newest.sampling[rows.slots]
        ids, table = self._tokens[slot, :end], self._blocks.tables[slot]
        output = self._prompt(slot, ids, start, table, sampling, rows.adapters[:1].copy())
        return self._answer(output, rows, end)

    def _decode(self, rows: Rows) -> StepOutput:
        self._tokens[rows.slots, rows.starts] = rows.input_ids[:, 0]
        ends = np.minimum(rows.starts + self._model.num_written, self.spec.max_model_len)
        for slot, end, place in zip(rows.slots, ends, rows.adapters, strict=True):
            self._reserve(int(slot), int(end), int(place))
        return super()._decode(rows)

    def _placed(self, positions: Int32Array, rows: Rows | None = None) -> dict[str, torch.Tensor]:
        places, tables, size = np.full_like(positions, -1), self._blocks.tables, self._blocks.size
        if rows is not None:
            blocks = tables[rows.slots, rows.starts // size]
            places[rows.slots, 0] = blocks * size + rows.starts % size
        inputs = {
            "slot_mapping": places,
            "block_table": tables.copy(),
            "full_context_lens": positions + 1,
            "computed_context_lens": positions.copy(),
        }
        return {name: torch.from_numpy(values) for name, values in inputs.items()}

    def _reserve(self, slot: int, end: int, place: int) -> None:
        """Give a slot blocks for its first `end` tokens, without NaN, and the adapter of a place.

        An adapter may give NaN itself. So a decode overwrites blocks with its row's: it reads them, and shows that.
        """
        spoilt = np.array(self._blocks.extend(slot, end), np.int32)
        size = self._blocks.size
        most = self._model.prompt_buckets[-1] // size
        for first in range(0, len(spoilt), most):
            # A prompt without a prefix reads nothing.
            chosen = spoilt[first : first + most]
            zeros, sampling = np.zeros(len(chosen) * size, np.int32), np.ones((1, 3), np.float32)
            self._prompt(slot, zeros, 0, chosen, sampling, np.array([place], np.int32))
            self._blocks.clean(chosen.tolist())

    def _prompt(
        self,
        slot: int,
        ids: Int32Array,
        start: int,
        table: Int32Array,
        sampling: Float32Array,
        adapters: Int32Array,
    ) -> Any:  # noqa: ANN401
        """Return the output for a prompt, int32[L], whose first `start` tokens are in the blocks of `table` already."""
        positions = np.arange(start, len(ids), dtype=np.int32)
        size = self._blocks.size
        places = table[positions // size] * size + positions % size
        return self._model.prompt(slot, ids, start, places, table, sampling, adapters)
