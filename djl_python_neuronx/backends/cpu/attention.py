"""Attention on slots: the KV cache with one row per slot, masks, and limits of positions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from transformers import Cache

from djl_python_neuronx.backends.base import Rows
from djl_python_neuronx.backends.cpu import LAYER_TYPES

_TRIAL_WINDOW = 2

Windows = dict[str, int | None]
"""Kind of layer → its sliding window. With several kinds, the model takes a mask for each."""


def possible_windows(config: Any) -> list[Windows]:  # noqa: ANN401
    """Return the windows that the configuration declares and, if it declares any, full attention everywhere.

    A `sliding_window` proves nothing, llama and gpt_neox never read theirs: a trial has to show which applies.
    """
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or [LAYER_TYPES[window is not None]]
    declared = {k: window if k == LAYER_TYPES[1] else None for k in sorted(set(kinds))}
    plain: Windows = {LAYER_TYPES[0]: None}
    return [declared] if declared == plain else [declared, plain]


@contextlib.contextmanager
def short_windows(model: torch.nn.Module, config: Any) -> Iterator[None]:  # noqa: ANN401
    """Set every sliding window to 2 tokens meanwhile, so that a trial of a few tokens shows it."""
    owners = [config, *model.modules()]
    found = [(owner, getattr(owner, "sliding_window", None)) for owner in owners]
    before = [(owner, window) for owner, window in found if type(window) is int]
    try:
        for owner, _ in before:
            owner.sliding_window = _TRIAL_WINDOW
        yield
    finally:
        for owner, window in before:
            owner.sliding_window = window


def position_limits(config: Any) -> dict[str, int]:  # noqa: ANN401
    """Return the limits of a slot's positions by their names in the configuration.

    Source: transformers 4.57 to 5.23, dynamic_rope_update: longrope takes its factors for the longest row of a batch,
    so beyond the original length a row's logits depend on the others. Dynamic NTK does so beyond
    max_position_embeddings only, where no slot reaches.
    """
    limits = {"max_position_embeddings": getattr(config, "max_position_embeddings", None)}
    ropes = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for rope in (ropes, *ropes.values()):  # transformers 5 has one for each kind of layer
        if isinstance(rope, Mapping) and "longrope" in (rope.get("rope_type"), rope.get("type")):
            name = "original_max_position_embeddings"
            limit = rope.get(name) or getattr(config, name, None)
            limits[f"{name}; with rope_type longrope, longer rows change the others"] = limit
    return {name: limit for name, limit in limits.items() if isinstance(limit, int)}


def causal_mask(
    positions: torch.Tensor, reach: int, dtype: torch.dtype, window: int | None
) -> torch.Tensor:
    """Return the additive mask [B, 1, S, reach]: a query at position p attends to the columns up to p.

    With a sliding window it attends to the last `window` of them, its own included.
    """
    columns = torch.arange(reach)
    hidden = columns > positions[:, :, None]
    if window is not None:
        hidden |= columns <= positions[:, :, None] - window
    mask = torch.zeros(hidden.shape, dtype=dtype)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]


def padded_positions(rows: Rows, width: int) -> torch.Tensor:
    """Return int64[B, width]: the position of every column; padding repeats the last valid one.

    Past the end of a learned position table, padding would be an index error.
    """
    starts = torch.from_numpy(rows.starts).long()[:, None]
    last = torch.from_numpy(rows.lens).long()[:, None] - 1
    return starts + torch.minimum(torch.arange(width), last)


class SlotCache(Cache):
    """Keys and values of every slot; attention gets them cut to the step's bucket.

    `aim` sets where the next forward pass writes and what it reads. Only valid columns are written:
    padding writes nothing, and leftovers of an earlier row are zeroed. A layer's
    [num_slots, kv_heads, max_model_len, head_dim] are made when the layer first runs: only then is
    the shape known for every architecture.
    """

    def __init__(self, num_slots: int, max_model_len: int) -> None:
        super().__init__(layers=[])
        self._shape = (num_slots, max_model_len)
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Keys and values of each layer."""
        self._slots: slice | torch.Tensor = slice(0)
        self._reach = 0
        self._ends = np.zeros(num_slots, np.int64)  # from here on, a slot holds zeros
        self._written = (torch.empty(0), torch.empty(0))
        self._target = (torch.empty(0), torch.empty(0))

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(tensor.nbytes for tensor in chain(*self._layers))

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

    def copy(self, source: int, slot: int, count: int) -> None:
        """Copy the first `count` columns of a slot to another one."""
        for layer in chain(*self._layers):
            layer[slot, :, :count] = layer[source, :, :count]
        self._ends[slot] = max(self._ends[slot], count)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's [B, kv_heads, S, head_dim]; returns its keys and values up to `reach`."""
        while layer_idx >= len(self._layers):
            self._layers.append((self._allocate(key_states), self._allocate(value_states)))
        keys, values = self._layers[layer_idx]
        return self._store(keys, key_states), self._store(values, value_states)

    def _wipe(self, rows: Rows) -> None:
        """Zero the columns from the start of each row on: a mask hides numbers, but 0 times NaN is NaN."""
        ends = self._ends[rows.slots]
        for i in np.flatnonzero(rows.starts < ends):
            for layer in chain(*self._layers):
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
