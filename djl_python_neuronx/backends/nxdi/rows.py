"""The newest token of each slot, as a decode takes it. Numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from djl_python_neuronx.backends.base import Float32Array, Int32Array, ModelSpec
from djl_python_neuronx.backends.nxdi.spec import GREEDY

FREE = 1
"""Position of a free slot in a decode: position 0 would make a prefill of the call."""
NO_TOP_P = 2.0
"""A top_p with which the device keeps every token. The library leaves out each with which the sum of probabilities is
above top_p (modules/generation/sampling.py, 0.9), and a rounded sum may be above 1: with top_k 2, of one row in 50, so
that its second token is never drawn."""


class SlotRows:
    """Each slot's newest token, its position, and the parameters that its sequence is sampled with."""

    def __init__(self, spec: ModelSpec) -> None:
        """Every slot is free."""
        self._ids = np.zeros((spec.num_slots, 1), np.int32)
        self._positions = np.full((spec.num_slots, 1), FREE, np.int32)
        self._default = spec.fixed_sampling or GREEDY
        self.sampling = np.tile(np.array(self._default, np.float32), (spec.num_slots, 1))
        """float32[slots, 3]: top_k, top_p and temperature."""
        self._dynamic = spec.largest_top_k is not None

    def keep(
        self, slots: Int32Array, ids: Int32Array, positions: Int32Array, sampling: Float32Array
    ) -> None:
        """Keep the newest token of these slots, its position, and the parameters of their rows."""
        self._ids[slots, 0] = ids
        # Position 0 is no decode's: the first one will write position 1.
        self._positions[slots, 0] = np.maximum(positions, FREE)
        if self._dynamic:
            self.sampling[slots] = sampling
            self.sampling[slots, 1] = NO_TOP_P

    def forget(self, slots: Sequence[int]) -> None:
        """Free these slots."""
        chosen = list(slots)
        self._ids[chosen], self._positions[chosen], self.sampling[chosen] = 0, FREE, self._default

    def first(self, count: int) -> tuple[Int32Array, Int32Array, Float32Array]:
        """Return int32[count, 1] ids, int32[count, 1] positions and float32[count, 3] parameters of the first slots.

        Copies: the library changes parameters in place, and reads arrays after it has returned.
        """
        return (
            self._ids[:count].copy(),
            self._positions[:count].copy(),
            self.sampling[:count].copy(),
        )
