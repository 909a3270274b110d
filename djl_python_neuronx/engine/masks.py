"""Masks: for each slot with constraints, the tokens that may follow its output."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import numpy.typing as npt

UInt32Array = npt.NDArray[np.uint32]
BoolArray = npt.NDArray[np.bool_]
_ALL = np.uint32(0xFFFFFFFF)


class Constraint(Protocol):
    """A rule of one sequence that excludes tokens by the output so far. One thread at a time."""

    def narrow(self, bits: UInt32Array, output_ids: list[int]) -> None:
        """Clear the bits of the tokens that may not follow `output_ids`. See `Masks.bits`.

        `output_ids` grows from call to call; the first call may have any number of them. It is only read.
        """


class Masks:
    """The masks of the slots with constraints. Engine thread only.

    They are made on another thread while the device runs: whoever reads them calls `wait` first.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        """Memory: num_slots * vocab_size bits, touched for slots with constraints only."""
        self.bits: UInt32Array = np.zeros((num_slots, -(-vocab_size // 32)), np.uint32)
        """uint32[slots, ceil(V / 32)]: token i of a slot may follow if bit i % 32 of word i // 32 is 1."""
        self._vocab_size = vocab_size
        self._constrained: dict[int, tuple[list[int], tuple[Constraint, ...]]] = {}
        """Slot to its output and constraints."""
        self._thread = ThreadPoolExecutor(1, "djl-neuronx-masks")  # started by the first mask
        self._making: list[Future[None]] = []

    def __bool__(self) -> bool:
        """True if some slot has constraints."""
        return bool(self._constrained)

    def assign(
        self, slot: int, constraints: Sequence[Constraint], output_ids: Sequence[int]
    ) -> None:
        """Start a sequence with constraints, behind `output_ids`. The first of them may set all bits."""
        self._constrained[slot] = [*output_ids], (*constraints,)
        self._making.append(self._thread.submit(self._make, [slot]))

    def release(self, slot: int) -> None:
        """End the sequence of a slot; idempotent."""
        if slot in self._constrained:
            self.wait()
            del self._constrained[slot]

    def note(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """Begin to make the masks that follow a step's tokens; -1 or less is none."""
        self.wait()
        noted = []
        for slot, token_id in zip(slots, token_ids, strict=True):
            if token_id >= 0 and slot in self._constrained:
                self._constrained[slot][0].append(token_id)
                noted.append(slot)
        if noted:
            self._making.append(self._thread.submit(self._make, noted))

    def wait(self) -> None:
        """Wait until the masks are made."""
        while self._making:
            self._making.pop().result()

    def allowed(self, slot: int) -> BoolArray:
        """bool[V]: the mask of a slot."""
        bits = np.unpackbits(
            self.bits[slot].astype("<u4", copy=False).view(np.uint8),
            bitorder="little",
            count=self._vocab_size,
        )
        return bits.view(np.bool_)

    def _make(self, slots: list[int]) -> None:
        for slot in slots:
            output_ids, constraints = self._constrained[slot]
            bits = self.bits[slot]
            bits[:] = _ALL
            for constraint in constraints:
                constraint.narrow(bits, output_ids)
