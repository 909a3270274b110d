"""A device that only waits, in the shapes of a plan, and the logits that it makes up."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from djl_python_neuronx.artifacts.folder import read_json
from djl_python_neuronx.backends.base import (
    Float32Array,
    ModelSpec,
    Rows,
    Step,
    StepOutput,
)
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.backends.shapes import choose_bucket
from djl_python_neuronx.backends.slots import SlotBackend, make_spec
from djl_python_neuronx.planning.model import ModelFacts

logger = logging.getLogger(__name__)

UInt64Array = npt.NDArray[np.uint64]

_CONFIG = "config.json"
_RING_BYTES = 64 * 2**20
"""More than the caches of a CPU hold, so that logits come from memory, as those of a device do."""
_RING_STEPS = 12
"""Fewest steps before logits are used again. The engine process reads them for log-probabilities while up to
`engine.worker.MOST_UNREAD` later steps wait to be sent."""
_SPIN_S = 0.3e-3
"""`time.sleep` is late by 70 to 160 µs (2 vCPU VMs, 2026-11), so the end of each step is spun."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def load(plan: LoadPlan) -> SimBackend:
    """Make the device.

    Raises:
        ArtifactError: config.json is missing or malformed.
    """
    logger.warning("loaded backend=sim: no model runs, and all answers are made up")
    return SimBackend.of(plan)


class SimBackend(SlotBackend):
    """A `Backend` whose steps take the time of `LoadPlan.sim_step_ms`, from the call to the return."""

    name = "sim"

    _model: MadeUpModel

    def __init__(self, plan: LoadPlan, vocab_size: int, seed: int) -> None:
        """Every slot is empty. `seed`: everything in the answers follows from it and from the prompts."""
        spec = make_spec(
            plan,
            vocab_size,
            plan.token_buckets,
            mixed_steps=plan.mixed_steps,
            max_prefill_batch=plan.num_slots if plan.mixed_steps else 1,
            simulated=True,
            num_adapters=0 if plan.lora is None else plan.lora.max_loras,
            changes_adapters=True,
        )
        super().__init__(spec, MadeUpModel(spec, seed, self._noise(spec, seed)))
        self._step_ms = plan.sim_step_ms
        self._began_ns = 0

    @classmethod
    def of(cls, plan: LoadPlan) -> Self:
        """Make the device of a model folder, whose config.json is its seed.

        Raises:
            ArtifactError: config.json is missing or malformed.
        """
        path = plan.model_dir / _CONFIG
        vocab_size = ModelFacts.from_config(read_json(path)).vocab_size or 0
        return cls(plan, vocab_size, crc32(path.read_bytes()))

    def run(self, step: Step) -> StepOutput:
        """See `Backend`."""
        self._began_ns = time.monotonic_ns()
        return super().run(step)

    def _set_adapter(self, place: int, folder: Path | None) -> None:
        """See `SlotBackend`. Answers are made up, whatever it is."""

    def _noise(self, spec: ModelSpec, seed: int) -> Float32Array:
        """Return float32[V]: the logits of the tokens that do not come next."""
        return np.random.default_rng(seed).standard_normal(spec.vocab_size, np.float32)

    def _run(self, step: Step) -> StepOutput:
        end_ns = self._began_ns + round(self._milliseconds(step) * 1e6)
        logits = self._model.run(step)
        time.sleep(max(0.0, (end_ns - time.monotonic_ns()) / 1e9 - _SPIN_S))
        while time.monotonic_ns() < end_ns:
            time.sleep(0)  # releases the GIL in each turn
        return StepOutput(logits)

    def _milliseconds(self, step: Step) -> float:
        times, spec, parts = self._step_ms, self.spec, step.parts
        if isinstance(times, float):
            return times
        if spec.mixed_steps:
            tokens = sum(int(rows.lens.sum()) for _, rows in parts)
            return times.of("prefill", choose_bucket(tokens, spec.prefill_buckets))
        [(part, rows)] = parts
        if part == "prefill":
            return times.of(part, choose_bucket(int(rows.lens.max()), spec.prefill_buckets))
        end = int((rows.starts + rows.lens).max())
        return times.of(part, choose_bucket(end, spec.token_buckets))


class MadeUpModel:
    """Logits that cost the host nothing: rows of noise, in which the next token of each slot is raised in place.

    All rows have the same noise, and the next token follows from the seed and from every token before it in the slot.
    So an answer depends on nothing else, sampled or not. The noise leaves eos out: a text is as long as its request
    allows.
    """

    def __init__(self, spec: ModelSpec, seed: int, noise: Float32Array) -> None:
        """Every slot is empty. `noise`: float32[V]."""
        self._histories = Histories(spec, seed)
        self._noise = noise
        self._best = noise.max() + 1
        # A configuration may name ids beyond its vocabulary, which no model makes.
        eos_ids = [token for token in spec.eos_ids if 0 <= token < spec.vocab_size]
        self._noise[eos_ids] = self._noise.min() - 100
        step_bytes = spec.num_slots * self._noise.nbytes
        num_steps = max(_RING_STEPS, -(-_RING_BYTES // step_bytes))
        self.ring: Float32Array = np.empty(
            (num_steps, spec.num_slots, 1, spec.vocab_size), np.float32
        )
        """The logits of as many steps, used in turn."""
        self.ring[:] = self._noise
        self._raised: list[npt.NDArray[np.intp]] = [np.empty(0, np.intp)] * num_steps
        self._turn = 0

    def run(self, step: Step) -> Float32Array:
        """Return float32[B, 1, V], or [B, 0, V] if nothing is wanted; the array is used again a turn of the ring on."""
        best = np.concatenate([self._histories.extend(rows) for _, rows in step.parts])
        logits, raised = self.ring[self._turn], self._raised[self._turn]
        logits[np.arange(len(raised)), 0, raised] = self._noise[raised]
        logits[np.arange(len(best)), 0, best] = self._best
        self._raised[self._turn] = best
        self._turn = (self._turn + 1) % len(self.ring)
        wanted = any(rows.wants for _, rows in step.parts)
        output: Float32Array = logits[: len(best), : int(wanted)]
        return output


class Histories:
    """The tokens in each slot, and the one that follows them."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        """Every slot is empty."""
        # For each length the sum of a hash of each token and its place, so that any part can be written again.
        self._sums: UInt64Array = np.zeros((spec.num_slots, spec.max_model_len + 1), np.uint64)
        self._sums[:, 0] = seed
        self._ids = np.setdiff1d(np.arange(spec.vocab_size), [*spec.eos_ids])

    def extend(self, rows: Rows) -> npt.NDArray[np.intp]:
        """Write the tokens of `rows` into their slots, from `starts` on. Returns int[B]: the token that follows each.

        It is never an eos.
        """
        slots, columns = rows.slots[:, None], np.arange(rows.input_ids.shape[1])
        valid, ends = columns < rows.lens[:, None], rows.starts[:, None] + columns + 1
        added = _mix(ends.astype(np.uint64) * _GOLDEN + rows.input_ids.astype(np.uint64))
        before = self._sums[rows.slots, rows.starts][:, None]
        sums = before + added.cumsum(axis=1, dtype=np.uint64)
        self._sums[np.broadcast_to(slots, ends.shape)[valid], ends[valid]] = sums[valid]
        last = sums[np.arange(len(sums)), rows.lens - 1]
        following: npt.NDArray[np.intp] = self._ids[_mix(last) % np.uint64(len(self._ids))]
        return following


def _mix(values: UInt64Array) -> UInt64Array:
    """Scatter the bits of each number. Source: SplitMix64 (Steele, Lea, Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
