"""The package's sim backend, which also writes the end of each decode step to a file. It stands in for that package."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import djl_python_neuronx
from djl_python_neuronx.artifacts.folder import read_json
from djl_python_neuronx.backends.base import Float32Array, Step, StepOutput, Want
from djl_python_neuronx.backends.plan import LoadPlan

__path__ = [str(Path(djl_python_neuronx.__file__).parent / "backends" / "sim")]

from djl_python_neuronx.backends.sim.backend import SimBackend

STAMPS = "stamps"
"""File in the model's folder, int64[1 + n]: number of steps so far, then the end of step i at 1 + i % n, in ns."""


DEVICE_SAMPLES = "device_samples"
"""Key of config.json: the device takes the likeliest token itself."""


class Greedy:
    """A model of a device that samples: it takes the tokens within the time of its step."""

    def __init__(self, model: Any) -> None:  # noqa: ANN401
        """`model` makes the logits."""
        self._model = model
        self.ids = np.empty((0, 1), np.int32)

    def run(self, step: Step) -> Float32Array:
        """Return the logits of a step, and keep its tokens, int32[B, 1]."""
        logits: Float32Array = self._model.run(step)
        self.ids = logits.argmax(axis=2).astype(np.int32)
        return logits


class StampedBackend(SimBackend):
    """A `SimBackend` that stamps its decode steps. All that waits is prefilled in one call."""

    def __init__(self, plan: LoadPlan, *how: Any) -> None:  # noqa: ANN401
        super().__init__(plan, *how)
        self.spec = replace(self.spec, max_prefill_batch=plan.num_slots)
        self._greedy: Greedy | None = None
        if read_json(plan.model_dir / "config.json").get(DEVICE_SAMPLES):
            self.spec = replace(self.spec, outputs=Want.TOKENS, largest_top_k=1)
            self._model = self._greedy = Greedy(self._model)
        stamps = np.memmap(plan.model_dir / STAMPS, np.int64, "r+")
        self._stamps = memoryview(stamps).cast("B").cast("q")

    def run(self, step: Step) -> StepOutput:
        """See `Backend`."""
        output = super().run(step)
        if step.decode is not None:
            done = self._stamps[0]
            self._stamps[1 + done % (len(self._stamps) - 1)] = time.monotonic_ns()
            self._stamps[0] = done + 1
        return output if self._greedy is None else StepOutput(ids=self._greedy.ids)


def load(plan: LoadPlan, compiled: Path | None = None) -> StampedBackend:  # noqa: ARG001
    """See `BackendModule`."""
    return StampedBackend.of(plan)
