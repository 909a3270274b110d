"""What backends have in common whose slots are neither copied nor reused for a prefix. Numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from djl_python_neuronx.backends.base import ModelSpec, PartKind, Rows
from djl_python_neuronx.backends.shapes import check_rows, refuse
from djl_python_neuronx.errors import StepError


class SlotBackend:
    """The part of a `Backend` that knows how many tokens each slot holds."""

    name: ClassVar[str]
    """What messages call it."""
    spec: ModelSpec

    def __init__(self, num_slots: int) -> None:
        """Every slot is empty."""
        self._filled = np.zeros(num_slots, np.int64)

    def acquire(self, slot: int, prompt_ids: Sequence[int], adapter: int) -> int:  # noqa: ARG002
        """0: no prefix is ever reused."""
        self._filled[slot] = 0
        return 0

    def fork(self, slot: int, into: int) -> None:
        """Refused: `can_fork` is false."""
        refuse(f"a fork of slot {slot} into {into}", f"none: the {self.name} backend cannot fork")

    def release(self, slots: Sequence[int]) -> None:
        """Empty these slots; a decode of an empty slot is refused."""
        self._filled[list(slots)] = 0

    def _check(self, kind: PartKind, rows: Rows) -> None:
        """Refuse a part of a step that breaks a limit of the spec or does not go with what its slots hold.

        Raises:
            StepError: the first limit that is broken, with what was asked.
        """
        check_rows(rows, self.spec)
        cached, longest = self._filled[rows.slots], self.spec.prefill_buckets[-1]
        if (rows.starts > cached).any():
            refuse(f"starts {rows.starts.tolist()}", f"at most the cached {cached.tolist()}")
        if kind == "decode":
            if not rows.starts.all():
                refuse(f"a decode of slots {rows.slots.tolist()}", "slots that hold a prompt")
        elif rows.lens.max() > longest:
            refuse(f"a prompt of {rows.lens.max()} tokens", f"at most {longest}")

    def _closed(self) -> StepError:
        """The error of a step after `close`."""
        message = f"the {self.name} backend is closed; expected no more steps. Load the model again"
        error = StepError(message)
        error.fatal = True
        return error
