"""Base class of the backends: the state of slots, and checks of the steps. Numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from djl_python_neuronx.backends.base import ModelSpec, PartKind, Rows
from djl_python_neuronx.backends.shapes import check_rows, refuse
from djl_python_neuronx.errors import StepError


class SlotBackend:
    """The part of a `Backend` that counts the tokens of each slot."""

    name: ClassVar[str]
    """The backend's name in messages."""

    def __init__(self, spec: ModelSpec) -> None:
        """Every slot is empty."""
        self._spec = spec
        self._filled = np.zeros(spec.num_slots, np.int64)

    @property
    def spec(self) -> ModelSpec:
        """Facts of the loaded model; constant."""
        return self._spec

    def acquire(self, slot: int, prompt_ids: Sequence[int], adapter: int) -> int:  # noqa: ARG002
        """Return 0: no prefix is ever reused."""
        self._filled[slot] = 0
        return 0

    def fork(self, slot: int, into: int) -> None:
        """Refuse: `can_fork` is false."""
        refuse(f"a fork of slot {slot} into {into}", f"none: the {self.name} backend cannot fork")

    def release(self, slots: Sequence[int]) -> None:
        """Empty these slots; a decode of an empty slot is refused."""
        self._filled[list(slots)] = 0

    def _check(self, kind: PartKind, rows: Rows) -> None:
        """Refuse a part of a step that breaks a limit of the spec or does not fit the tokens in its slots.

        Raises:
            StepError: the first limit that is broken, with the value.
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
        """Return the error of a step after `close`."""
        message = f"the {self.name} backend is closed; expected no more steps. Load the model again"
        error = StepError(message)
        error.fatal = True
        return error
