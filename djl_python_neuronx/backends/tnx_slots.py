"""What both ways to batch on transformers-neuronx share: checks, the answer's form, the slots' state."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from djl_python_neuronx.backends.base import (
    Decode,
    DeviceTokens,
    HostLogits,
    Mixed,
    ModelSpec,
    Prefill,
    Rows,
    Step,
    StepOutput,
    Want,
)
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.backends.shapes import check_rows, refuse
from djl_python_neuronx.backends.tnx_errors import of_step
from djl_python_neuronx.backends.tnx_model import generation_of
from djl_python_neuronx.backends.tnx_sampling import DeviceSampling
from djl_python_neuronx.errors import StepError

_PIECE = 8192


class SlotBackend(ABC):
    """A `Backend` on a model that `to_neuron` has put on the device."""

    def __init__(self, model: Any, plan: LoadPlan) -> None:  # noqa: ANN401
        """Take the model over."""
        generation = generation_of(plan)
        self._model = model
        self._sampling = generation and DeviceSampling(model, generation, plan.num_slots)
        self._filled = np.zeros(plan.num_slots, np.int64)
        self._spoiled = np.zeros(plan.num_slots, np.bool_)
        spec = ModelSpec(
            num_slots=plan.num_slots,
            max_model_len=plan.max_model_len,
            prefill_buckets=plan.prefill_buckets,
            token_buckets=_token_buckets(model, plan),
            vocab_size=int(model.config.vocab_size),
            eos_ids=plan.eos_ids,
            outputs=Want.TOKENS if generation else Want.LOGITS,
        )
        if self._sampling:
            largest, fixed = self._sampling.largest_top_k, self._sampling.fixed
            spec = replace(spec, largest_top_k=largest, fixed_sampling=fixed)
        self.spec = spec

    @abstractmethod
    def _prefill(self, rows: Rows) -> torch.Tensor:
        """What the model answers for these rows, in their order."""

    @abstractmethod
    def _decode(self, rows: Rows) -> torch.Tensor:
        """As `_prefill`, one token for each row."""

    @abstractmethod
    def _scrub(self, slot: int) -> None:
        """Leave nothing in a free slot's cache that is not a number: masked, it still spoils what is read with it."""

    def run(self, step: Step) -> StepOutput:
        """Run a step.

        Raises:
            StepError: it breaks a limit of the spec, or the device failed; `fatal` if that is lost.
            DeviceMemoryError: the device's memory is short.
        """
        if self._model is None:
            message = "the tnx backend is closed; expected no more steps. Load the model again"
            error = StepError(message)
            error.fatal = True
            raise error
        if isinstance(step, Mixed):
            refuse("a mixed step", "Prefill or Decode")
        rows = step.rows
        check_rows(rows, self.spec)
        self._check(step)
        run = self._decode if isinstance(step, Decode) else self._prefill
        try:
            if self._sampling:
                self._sampling.send(rows)
            with torch.inference_mode():
                output = self._answer(run(rows), rows)
        except Exception as error:
            # What lies beyond the start of these rows is not to be trusted.
            self._filled[rows.slots] = rows.starts
            what = f"a {type(step).__name__} of {len(rows.slots)} rows"
            raise of_step(error, what) from error
        self._filled[rows.slots] = rows.starts + rows.lens
        return output

    def acquire(self, slot: int, prompt_ids: Sequence[int], adapter: int) -> int:  # noqa: ARG002
        """0: no prefix is ever reused."""
        self._filled[slot] = 0
        if self._spoiled[slot]:
            try:
                self._scrub(slot)
            except Exception as error:
                raise of_step(error, f"clearing slot {slot}") from error
        return 0

    def fork(self, slot: int, into: int) -> None:
        """Refused: `can_fork` is false."""
        refuse(f"a fork of slot {slot} into {into}", "none: the tnx backend cannot fork")

    def release(self, slots: Sequence[int]) -> None:
        """Empty these slots; a decode of an empty slot is refused."""
        self._filled[list(slots)] = 0

    def close(self) -> None:
        """Let go of the model: the runtime frees its memory with the last reference."""
        self._model = None
        self._sampling = None
        gc.collect()  # its parts refer to one another

    def _check(self, step: Prefill | Decode) -> None:
        rows, cached = step.rows, self._filled[step.rows.slots]
        if (rows.starts > cached).any():
            refuse(f"starts {rows.starts.tolist()}", f"at most the cached {cached.tolist()}")
        width = rows.input_ids.shape[1]
        if isinstance(step, Decode):
            if width != 1:
                refuse(f"a decode of {width} columns", "one token for each row")
            if not rows.starts.all():
                refuse(f"a decode of slots {rows.slots.tolist()}", "slots that hold a prompt")
        elif int(rows.lens.max()) > self.spec.prefill_buckets[-1]:
            refuse(f"a prompt of {rows.lens.max()} tokens", f"{self.spec.prefill_buckets[-1]}")

    def _answer(self, output: torch.Tensor, rows: Rows) -> StepOutput:
        """float32[B, V] logits or int32[B] tokens, in arrays that are the caller's."""
        num_rows, columns = len(rows.slots), int(rows.wants != Want.NOTHING)
        if self._sampling:
            return DeviceTokens(output.reshape(num_rows, 1)[:, :columns].to(torch.int32).numpy())
        values = torch.empty((num_rows, columns, self.spec.vocab_size), dtype=torch.float32)
        # The library answers with a transposed view of [V, B], of which rows have to be made: in pieces that the cores'
        # caches hold, 8 rows of 128 256 take 0.5 ms, as a whole 1.0 (torch 2.13, 2 vCPU, 2026-11-21).
        for start in range(0, self.spec.vocab_size * columns, _PIECE):
            piece = slice(start, start + _PIECE)
            values[:, 0, piece] = output[:, piece]
        logits = values.numpy()
        # The output layer spreads what is not a number over the whole vocabulary: one column tells.
        if columns and not np.isfinite(logits[:, 0, 0]).all():
            self._spoiled[rows.slots] |= ~np.isfinite(logits[:, 0, 0])
        return HostLogits(logits)


def _token_buckets(model: Any, plan: LoadPlan) -> tuple[int, ...]:  # noqa: ANN401
    """Lengths that the model has decode programs for, as far as the engine may use them."""
    found: list[int] = getattr(model, "token_buckets", None) or model.n_positions_list
    limit = plan.max_model_len
    shorter = sorted(length for length in found if length < limit)
    return (*shorter, limit)
