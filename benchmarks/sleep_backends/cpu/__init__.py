"""The backend of `sleep_device.py`, in place of `cpu`: a device that only waits, and answers with prepared logits.

With `answers`, a number in the model's config.json, its tokens follow from the prompt: see `Answers`.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from djl_python_neuronx.backends.base import Float32Array, HostLogits, ModelSpec, Step
from djl_python_neuronx.backends.plan import LoadPlan

SPIN_S = 0.3e-3
"""`time.sleep` is late by 70 to 160 µs (2 vCPU VMs, 2026-11), so the end of each wait is spun."""
RING_BYTES = 64 * 2**20
"""Logits that are returned in turn: more than the caches hold, as those of a device are."""
STAMPS = "stamps"
"""File in the model's folder, int64[1 + n]: number of steps so far, then the end of step i at 1 + i % n, in ns."""
FIRST_WORD = 256
"""Ids from here on are words in the tokenizer of `sleep_device.save_model`; those below are single bytes."""
SCATTER = np.uint64(0x9E3779B97F4A7C15)
clock_gettime = ctypes.CDLL(None).clock_gettime


class Device:
    """A decode step takes `step_s` from its call to its return, whatever the host does, and costs it no copy.

    The wait is in C without the GIL (`time.sleep` is clock_nanosleep with an absolute time) until `SPIN_S` before its
    end. The spin reads the clock in C, where the GIL is free in each turn.
    """

    def __init__(self, folder: Path, num_rows: int) -> None:
        """`folder`: written by `sleep_device.save_model`."""
        config = json.loads((folder / "config.json").read_bytes())
        self.vocab_size: int = config["vocab_size"]
        self._step_ns = round(config["step_s"] * 1e9)
        self._now = (ctypes.c_long * 2)()
        self._stamps = memoryview(np.memmap(folder / STAMPS, np.int64, "r+")).cast("B").cast("q")
        num_steps = max(2, -(-RING_BYTES // (num_rows * self.vocab_size * 4)))
        random = np.random.default_rng(0)
        self._ring: Float32Array = random.standard_normal(
            (num_steps, num_rows, 1, self.vocab_size), dtype=np.float32
        )

    def decode(self, num_rows: int) -> Float32Array:
        """Run a step. Returns float32[num_rows, 1, V]: flat random logits."""
        end_ns = time.monotonic_ns() + self._step_ns
        time.sleep(max(0.0, self._step_ns / 1e9 - SPIN_S))
        now = self._now
        while not clock_gettime(time.CLOCK_MONOTONIC, now) and now[0] * 10**9 + now[1] < end_ns:
            pass
        done = self._stamps[0]
        self._stamps[1 + done % (len(self._stamps) - 1)] = time.monotonic_ns()
        self._stamps[0] = done + 1
        return self._ring[done % len(self._ring)][:num_rows]

    def prefill(self, num_rows: int) -> Float32Array:
        """Return logits at once: no run is measured before all its rows decode."""
        return self._ring[0][:num_rows]


class Answers:
    """Logits whose best token follows from a number and from every token before it in the slot."""

    def __init__(self, number: int, num_slots: int, vocab_size: int) -> None:
        self._number, self._vocab_size = np.uint64(number), vocab_size
        self._seen: npt.NDArray[np.uint64] = np.zeros(num_slots, np.uint64)

    def after(
        self,
        slots: npt.NDArray[np.integer[Any]],
        ids: npt.NDArray[np.integer[Any]],
        *,
        fresh: bool,
        lens: npt.NDArray[np.integer[Any]] | None = None,
    ) -> Float32Array:
        """Take the tokens of slots, int[B, S], of which `lens` count; `fresh`: prompts. Returns float32[B, 1, V]."""
        seen = np.full(len(slots), self._number) if fresh else self._seen[slots]
        for i in range(ids.shape[1]):
            mixed = (seen + ids[:, i].astype(np.uint64) + np.uint64(1)) * SCATTER
            mixed ^= mixed >> np.uint64(32)
            seen = mixed if lens is None else np.where(i < lens, mixed, seen)
        self._seen[slots] = seen
        logits = np.zeros((len(slots), 1, self._vocab_size), np.float32)
        best = FIRST_WORD + seen % np.uint64(self._vocab_size - FIRST_WORD)
        logits[np.arange(len(slots)), 0, best.astype(np.intp)] = 1
        return logits


class SleepBackend:
    """See `Backend`."""

    def __init__(self, plan: LoadPlan) -> None:
        self._device = Device(plan.model_dir, plan.num_slots)
        number = json.loads((plan.model_dir / "config.json").read_bytes()).get("answers")
        vocab_size = self._device.vocab_size
        self._answers = None if number is None else Answers(number, plan.num_slots, vocab_size)
        self.spec = ModelSpec(
            num_slots=plan.num_slots,
            max_model_len=plan.max_model_len,
            prefill_buckets=plan.prefill_buckets,
            vocab_size=vocab_size,
            eos_ids=plan.eos_ids,
            max_prefill_batch=plan.num_slots,
        )

    def run(self, step: Step) -> HostLogits:
        """See `Backend`."""
        [(kind, rows)] = step.parts
        run = self._device.decode if kind == "decode" else self._device.prefill
        logits = run(len(rows.slots))
        if self._answers is not None:
            fresh = kind == "prefill"
            logits = self._answers.after(rows.slots, rows.input_ids, fresh=fresh, lens=rows.lens)
        return HostLogits(logits)

    def cached(self, prompt_ids: Sequence[int], adapter: int) -> int:  # noqa: ARG002
        """Nothing is cached."""
        return 0

    def acquire(self, slot: int, prompt_ids: Sequence[int], adapter: int) -> int:  # noqa: ARG002
        """Nothing is cached."""
        return 0

    def release(self, slots: Sequence[int]) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


def supports(config: Mapping[str, Any]) -> str | None:
    """See `BackendModule`: only models that `sleep_device.save_model` has written."""
    return None if "step_s" in config else "its config.json has no step_s"


def load(plan: LoadPlan, compiled: Path | None = None) -> SleepBackend:  # noqa: ARG001
    """See `BackendModule`."""
    return SleepBackend(plan)
