"""The calls of NxD Inference: their inputs, in the shapes that its graphs take."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from djl_python_neuronx.backends.base import Float32Array, Int32Array, ModelSpec, Rows, Want
from djl_python_neuronx.backends.nxdi.ahead import StepAhead
from djl_python_neuronx.backends.nxdi.fused import accepted
from djl_python_neuronx.backends.nxdi.spec import prompt_lengths
from djl_python_neuronx.backends.shapes import choose_bucket


class Calls:
    """Calls the library's application.

    The library takes the smallest bucket that is longer than the attention mask. The masks here are one column shorter
    than the bucket that is meant: a prompt's is not read if it is padded on the right, and the token of a decode is not
    in it.
    """

    def __init__(self, application: Any, spec: ModelSpec) -> None:  # noqa: ANN401
        """`application`: loaded."""
        self.application = application
        self.spec = spec
        self.prompt_buckets = prompt_lengths(application)
        self._batches = spec.decode_slots or (spec.num_slots,)
        self._seq_ids = torch.arange(spec.num_slots, dtype=torch.int32)
        self._columns = np.arange(spec.max_model_len, dtype=np.int32)
        self._ahead = StepAhead(application) if application.neuron_config.async_mode else None
        self.fused = spec.num_fused_drafts > 0
        self.num_written = 1 + spec.num_fused_drafts + (self._ahead is not None)
        """Positions of each slot that a decode may write."""
        eagle = self.fused and application.neuron_config.enable_eagle_speculation
        self._num_behind = int(eagle)
        """Columns that a prompt leaves free in each graph but the last: EAGLE counts its tokens by the mask."""
        # It refuses `rows.NO_TOP_P`; the backend has looked at the rows.
        application.validate_sampling_params = lambda _: None

    def prompt_bucket(self, length: int) -> int:
        """Return the length of the graph for a prompt."""
        longest = self.prompt_buckets[-1]
        return choose_bucket(min(length + self._num_behind, longest), self.prompt_buckets)

    def num_rows(self, slot: int) -> int:
        """Return the number of rows of a decode whose highest slot is `slot`."""
        return choose_bucket(slot + 1, self._batches)

    def prefill(
        self,
        slots: Int32Array,
        ids: Int32Array,
        lens: Int32Array,
        sampling: Float32Array,
        adapters: Int32Array,
    ) -> Any:  # noqa: ANN401
        """Return the output for prompts of `lens` tokens, one row for each slot; `ids`: int32[B, >= lens]."""
        bucket = self.prompt_bucket(int(lens.max()))
        columns, ends = np.arange(bucket, dtype=np.int32), lens[:, None]
        # As the library pads, which finds a prompt's end by its largest position.
        inside = columns < ends
        positions = np.where(inside, columns, 1)
        tokens = np.zeros((len(lens), bucket), np.int32)
        width = min(bucket, ids.shape[1])
        tokens[:, :width] = np.where(inside[:, :width], ids[:, :width], 0)
        # One token would have two largest positions. The same one everywhere at position 0 gives the same output in
        # every column; the next tokens overwrite the others.
        alone = lens <= 1
        tokens[alone], positions[alone] = tokens[alone, :1], 0
        mask = inside[:, : bucket - (bucket < self.prompt_buckets[-1])].astype(np.int32)
        slot_ids, adapted = torch.from_numpy(slots.copy()), self._adapted(adapters)
        return self._call(tokens, mask, positions, sampling, slot_ids, **adapted)

    def blank(self, slots: Int32Array, length: int) -> None:
        """Write the first columns of these slots."""
        ids, sampling = (
            np.zeros((len(slots), length), np.int32),
            np.ones((len(slots), 3), np.float32),
        )
        self.prefill(slots, ids, np.full_like(slots, length), sampling, np.zeros_like(slots))

    def prompt(
        self,
        slot: int,
        ids: Int32Array,
        start: int,
        places: Int32Array,
        table: Int32Array,
        sampling: Float32Array,
        adapters: Int32Array,
    ) -> Any:  # noqa: ANN401
        """Return the output for a prompt in blocks, int32[L], of which the blocks of `table` have `start` tokens.

        `places`: int32[L - start], where each of the others is written.
        """
        positions, mask = np.arange(len(ids), dtype=np.int32), np.ones((1, len(ids)), np.int32)
        if len(ids) == 1:
            # As in `prefill`. The graph is filled, so that the library pads nothing; it takes that of 512 tokens for
            # all from 257 on.
            width = self.prompt_bucket(512 if 256 < self.prompt_buckets[0] <= 512 else 1)
            ids, positions = np.repeat(ids, width), np.zeros(width, np.int32)
            mask, places = (
                np.ones((1, width), np.int32),
                np.pad(places, (0, width - 1), constant_values=-1),
            )
        lens = torch.tensor([[len(ids)], [start]], dtype=torch.int32)
        return self._call(
            ids[None].copy(),
            mask,
            positions[None],
            sampling,
            torch.tensor([slot], dtype=torch.int32),
            slot_mapping=torch.from_numpy(places[None]),
            block_table=torch.from_numpy(table[None].copy()),
            full_context_lens=lens[:1],
            computed_context_lens=lens[1:],
            **self._adapted(adapters),
        )

    def decode(
        self,
        ids: Int32Array,
        positions: Int32Array,
        sampling: Float32Array,
        rows: Rows,
        **blocks: torch.Tensor,
    ) -> Any:  # noqa: ANN401
        """Return the output for the newest tokens of the first slots; `rows`: those of them that the step is for.

        `blocks`: inputs of a cache in blocks.
        """
        width = choose_bucket(int(positions.max()) + 1, self.spec.token_buckets) - 1
        if self._ahead is not None:
            # One column less than a bucket would keep every step synchronous.
            width = int(positions.max())
            if rows.wants == Want.TOKENS:
                self._ahead.settle(rows.slots, ids, positions, sampling)
            else:
                self._ahead.drop(alone=True)
        mask = (self._columns[:width] < positions).astype(np.int32)
        seq_ids = self._seq_ids[: len(ids)]
        output = self._call(ids, mask, positions, sampling.copy(), seq_ids, **blocks)
        if self._ahead is not None:
            self._ahead.note(output.tokens.reshape(-1, 1).numpy(), positions, sampling)
        return output

    def verify(self, ids: Int32Array, positions: Int32Array, sampling: Float32Array) -> Any:  # noqa: ANN401
        """Return the output for `ids`, int32[B, K], of the first slots, each row from its position on.

        The library wants more columns than the mask and these have, but in the last graph.
        """
        width, longest = ids.shape[1], int(positions.max())
        end = min(longest + width + 1, self.spec.max_model_len)
        shown = max(longest, choose_bucket(end, self.spec.token_buckets) - width - 1)
        mask = (self._columns[:shown] < positions).astype(np.int32)
        places = (positions + np.arange(width)).astype(np.int32)
        return self._call(ids, mask, places, sampling, self._seq_ids[: len(ids)])

    def decode_alone(
        self, token_id: int, positions: Int32Array, length: int, **blocks: torch.Tensor
    ) -> Any:  # noqa: ANN401
        """Return the output where the same token is at `positions`, int32[B, 1], of the first slots.

        It attends to position 0 and to itself, with a graph for `length` columns.
        """
        if self.fused:  # which reads no position beyond its mask
            length = max(length, int(positions.max()) + 1)
        length = min(length, self.spec.max_model_len)
        shape = (len(positions), choose_bucket(length, self.spec.token_buckets) - 1)
        mask = np.zeros(shape, np.int32)
        mask[:, 0] = 1
        if self._ahead is not None:
            self._ahead.drop(alone=True)
        ids, sampling = np.full_like(positions, token_id), np.ones((len(positions), 3), np.float32)
        return self._call(ids, mask, positions, sampling, self._seq_ids[: len(ids)], **blocks)

    def _adapted(self, adapters: Int32Array) -> dict[str, torch.Tensor]:
        """Return the input of a prefill for adapters; decodes need none, as slots keep the matrices of their prompt."""
        return {"adapter_ids": torch.from_numpy(adapters)} if self.spec.num_adapters else {}

    def _call(
        self,
        ids: Int32Array,
        mask: Int32Array,
        positions: Int32Array,
        sampling: Float32Array,
        seq_ids: torch.Tensor,
        **more: torch.Tensor,
    ) -> Any:  # noqa: ANN401
        output = self.application(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(mask),
            position_ids=torch.from_numpy(positions),
            seq_ids=seq_ids,
            sampling_params=torch.from_numpy(sampling),
            **more,
        )
        if self.fused:
            starts = positions if positions.shape[1] == 1 else None
            output.tokens = torch.from_numpy(accepted(output, starts))
        return output
