"""Base classes of the backends: the state of slots, and checks of the steps. Numpy only."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from djl_python_neuronx.backends.base import (
    Int32Array,
    ModelSpec,
    PartKind,
    Rows,
    Step,
    StepKind,
    StepOutput,
)
from djl_python_neuronx.backends.faults import of_step
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

    def cached(self, prompt_ids: Sequence[int], adapter: int) -> int:  # noqa: ARG002
        """Return 0: no prefix is ever reused."""
        return 0

    def acquire(self, slot: int, prompt_ids: Sequence[int], adapter: int) -> int:
        """Empty a slot for a prompt."""
        self._filled[slot] = 0
        return self.cached(prompt_ids, adapter)

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


class DeviceBackend(SlotBackend, ABC):
    """The part that the backends of the Neuron libraries share: steps without parts of both kinds, and their state."""

    def __init__(self, spec: ModelSpec, model: Any) -> None:  # noqa: ANN401
        """Every slot is empty. `model`: the library's, on the device."""
        super().__init__(spec)
        self._model = model
        self._num_reprefilled = 0
        """Tokens that the present step has prefilled again."""

    @abstractmethod
    def _run(self, kind: StepKind, rows: Rows) -> StepOutput:
        """Run the rows of a step that has been checked."""

    def run(self, step: Step) -> StepOutput:
        """Run a step.

        Raises:
            StepError: it breaks a limit of the spec, or the device failed; `fatal` if the device is lost.
            DeviceMemoryError: the device is out of memory.
        """
        if self._model is None:
            raise self._closed()
        rows = self._rows_of(step)
        self._num_reprefilled = 0
        try:
            output = self._run(step.kind, rows)
        except Exception as error:
            # The cache of these rows is undefined from their starts on.
            self._filled[rows.slots] = rows.starts
            raise of_step(error, f"a {step.kind} step of {len(rows.slots)} rows") from error
        self._filled[rows.slots] = rows.starts + rows.lens
        output.num_reprefilled = self._num_reprefilled
        return output

    def close(self) -> None:
        """Drop the model: the runtime frees the device's memory with the last reference."""
        self._model = None
        gc.collect()  # the model's parts refer to one another

    def _rows_of(self, step: Step) -> Rows:
        """Return the rows of a step after checking them against the spec."""
        if step.kind == "mixed":
            refuse("a mixed step", "a prefill or a decode")
        [(kind, rows)] = step.parts
        self._check(kind, rows)
        return rows


def record(history: Int32Array, filled: npt.NDArray[np.int64], rows: Rows) -> Int32Array:
    """Write the tokens of `rows` into `history`, int32[slots, positions], of a static batch.

    `filled`: the number of tokens that each slot had. Returns int32[slots]: the same with those of `rows`.
    """
    lens = filled.astype(np.int32)
    lens[rows.slots] = rows.starts + rows.lens
    for slot, start, count, new in zip(
        rows.slots, rows.starts, rows.lens, rows.input_ids, strict=True
    ):
        history[slot, start : lens[slot]] = new[:count]
    return lens
