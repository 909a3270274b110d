"""The KV cache of the CPU backend: one row per slot, as a compiled device keeps it."""

from __future__ import annotations

import numpy as np
import torch
from transformers import Cache

from djl_python_neuronx.backends.base import Rows


class SlotCache(Cache):
    """Keys and values of every slot, handed to attention cut to the step's bucket.

    `aim` says where the next forward pass writes and what it reads. Only valid columns are written:
    padding leaves nothing behind, and what an earlier row left is wiped. A layer's
    [num_slots, kv_heads, max_model_len, head_dim] are made when the layer first runs: only then is
    the shape known for every architecture.
    """

    def __init__(self, num_slots: int, max_model_len: int) -> None:
        super().__init__(layers=[])
        self._shape = (num_slots, max_model_len)
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._slots: slice | torch.Tensor = slice(0)
        self._reach = 0
        self._ends = np.zeros(num_slots, np.int64)  # from here on, a slot holds zeros
        self._written = (torch.empty(0), torch.empty(0))
        self._target = (torch.empty(0), torch.empty(0))

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values))

    def aim(self, rows: Rows, reach: int) -> None:
        """Write the valid columns of `rows` to their slots; let attention read `reach` columns."""
        slots = torch.from_numpy(rows.slots).long()
        lens = torch.from_numpy(rows.lens).long()
        row, column = (torch.arange(rows.input_ids.shape[1]) < lens[:, None]).nonzero(as_tuple=True)
        self._written = (row, column)
        self._target = (slots[row], torch.from_numpy(rows.starts).long()[row] + column)
        first, last = int(slots[0]), int(slots[-1])
        # Neighbouring slots are read in place: a gather copies all that attention reads.
        self._slots = slice(first, last + 1) if last - first + 1 == len(slots) else slots
        self._reach = reach
        self._wipe(rows)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's [B, kv_heads, S, head_dim]; returns its keys and values up to `reach`."""
        while layer_idx >= len(self._keys):
            self._keys.append(self._allocate(key_states))
            self._values.append(self._allocate(value_states))
        keys = self._store(self._keys[layer_idx], key_states)
        values = self._store(self._values[layer_idx], value_states)
        return keys, values

    def _wipe(self, rows: Rows) -> None:
        """Zero what lies beyond the start of each row: a mask hides numbers, but 0 times NaN is NaN."""
        ends = self._ends[rows.slots]
        for i in np.flatnonzero(rows.starts < ends):
            for layer in (*self._keys, *self._values):
                layer[rows.slots[i], :, rows.starts[i] : ends[i]] = 0
        self._ends[rows.slots] = rows.starts + rows.lens

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        num_slots, max_model_len = self._shape
        return states.new_zeros(num_slots, states.shape[1], max_model_len, states.shape[3])

    def _store(self, layer: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        (row, column), (slot, position) = self._written, self._target
        layer[slot, :, position] = states[row, :, column]
        return layer[self._slots, :, : self._reach]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """0: positions and mask are given with every call, never derived from the cache."""
        return 0

    def get_mask_sizes(self, query: object, layer_idx: int = 0) -> tuple[int, int]:  # noqa: ARG002
        """Columns that attention reads, and the first of them."""
        return self._reach, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Positions of a slot."""
        return self._shape[1]

    def clear(self) -> None:
        """Free every tensor."""
        self._keys.clear()
        self._values.clear()
