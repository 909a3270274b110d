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
    DeviceTokens,
    HostLogits,
    ModelSpec,
    PartKind,
    Rows,
    Step,
    StepOutput,
    Want,
)
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.backends.shapes import refuse
from djl_python_neuronx.backends.slots import SlotBackend
from djl_python_neuronx.backends.tnx.errors import of_step
from djl_python_neuronx.backends.tnx.model import generation_of
from djl_python_neuronx.backends.tnx.nan import is_spoiled, sampled_from_nan
from djl_python_neuronx.backends.tnx.sampling import DeviceSampling

_PIECE = 8192


class TnxBackend(SlotBackend, ABC):
    """A `Backend` on a model that `to_neuron` has put on the device."""

    name = "tnx"

    def __init__(self, model: Any, plan: LoadPlan) -> None:  # noqa: ANN401
        """Take the model over."""
        super().__init__(plan.num_slots)
        generation = generation_of(plan)
        self._model = model
        self._sampling = generation and DeviceSampling(model, generation, plan.num_slots)
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
            default = largest if plan.default_top_k else None
            spec = replace(spec, largest_top_k=largest, default_top_k=default, fixed_sampling=fixed)
        self.spec = spec
        self._of_nan = (
            sampled_from_nan(model, self._decode_empty, spec.token_buckets)
            if self._sampling
            else None
        )

    @abstractmethod
    def _prefill(self, rows: Rows) -> torch.Tensor:
        """What the model answers for these rows, in their order."""

    @abstractmethod
    def _decode(self, rows: Rows) -> torch.Tensor:
        """As `_prefill`, one token for each row."""

    @abstractmethod
    def _decode_empty(self, position: int) -> torch.Tensor:
        """What the model answers to token 0 at this position of every slot."""

    @abstractmethod
    def _scrub(self, slot: int) -> None:
        """Leave nothing in a free slot's cache that is not a number."""

    def run(self, step: Step) -> StepOutput:
        """Run a step.

        Raises:
            StepError: it breaks a limit of the spec, or the device failed; `fatal` if that is lost.
            DeviceMemoryError: the device's memory is short.
        """
        if self._model is None:
            raise self._closed()
        rows = self._rows_of(step)
        run = self._decode if step.prefill is None else self._prefill
        try:
            if self._sampling:
                self._sampling.send(rows)
            with torch.inference_mode():
                output = self._answer(run(rows), rows)
        except Exception as error:
            # What lies beyond the start of these rows is not to be trusted.
            self._filled[rows.slots] = rows.starts
            what = f"a {step.kind} step of {len(rows.slots)} rows"
            raise of_step(error, what) from error
        self._filled[rows.slots] = rows.starts + rows.lens
        return output

    def acquire(self, slot: int, prompt_ids: Sequence[int], adapter: int) -> int:
        """0: no prefix is ever reused."""
        held = super().acquire(slot, prompt_ids, adapter)
        if self._spoiled[slot]:
            try:
                # Logits are evidence, a token is only suspect. Clearing moves the whole cache, 1 to 2 ms per MiB and so
                # seconds for 4 GiB; the last layer's values are 1 part in (4 * layers) of that (2 vCPU, 2026-11-22).
                if not self._sampling or is_spoiled(self._model, slot):
                    self._scrub(slot)
            except Exception as error:
                raise of_step(error, f"clearing slot {slot}") from error
            self._spoiled[slot] = False
        return held

    def close(self) -> None:
        """Let go of the model: the runtime frees its memory with the last reference."""
        self._model = None
        self._sampling = None
        gc.collect()  # its parts refer to one another

    def _rows_of(self, step: Step) -> Rows:
        """The rows of a step, once they are known to keep the limits of the spec."""
        if step.kind == "mixed":
            refuse("a mixed step", "a prefill or a decode")
        [(kind, rows)] = step.parts
        self._check(kind, rows)
        return rows

    def _check(self, kind: PartKind, rows: Rows) -> None:
        """As `SlotBackend._check`; also what the library's graphs are not made for."""
        super()._check(kind, rows)
        width = rows.input_ids.shape[1]
        if kind == "decode":
            drafts = rows.wants == Want.ALL_LOGITS and self.spec.max_drafts
            if width != 1 + drafts:
                refuse(f"a decode of {width} columns", f"{1 + drafts} for each row")
        elif Want.ALL_LOGITS in rows.wants:
            refuse("the logits of every column of a prompt", "those of the last")

    def _answer(self, output: torch.Tensor, rows: Rows) -> StepOutput:
        """float32[B, K, V] or float32[B, V] logits or int32[B] tokens, in arrays that are the caller's."""
        num_rows, columns = len(rows.slots), int(rows.wants != Want.NOTHING)
        if self._sampling:
            ids = output.reshape(num_rows, 1)[:, :columns].to(torch.int32).numpy()
            if columns:
                # Once it has been sampled from NaN, a sequence gets the same token to its end: the newest one tells.
                self._spoiled[rows.slots] = self._of_nan is None or ids[:, 0] == self._of_nan
            # The vocabulary is padded to a multiple of the cores; only NaN makes a token of the padding.
            return DeviceTokens(np.where(ids < self.spec.vocab_size, ids, -1).astype(np.int32))
        if columns:
            output = output[:, None] if output.ndim < 3 else output
            columns = output.shape[1]
        found = output.float().numpy()
        logits = np.empty((num_rows, columns, self.spec.vocab_size), np.float32)
        # The library answers with a transposed view of [V, B], of which rows have to be made, in pieces that the cores'
        # caches hold: 8 rows of 128 256 take 0.39 ms, as a whole 0.51 (numpy 2.4, 2 vCPU, 2026-11-22). Not with torch,
        # whose threads are no faster, take 3 ms of CPU to wait for one another, and stall where a core is busy.
        for start in range(0, self.spec.vocab_size * (columns > 0), _PIECE):
            piece = slice(start, start + _PIECE)
            logits[..., piece] = found[..., piece]
        # The output layer spreads what is not a number over the whole vocabulary: one column tells.
        if columns and not np.isfinite(logits[:, :, 0]).all():
            self._spoiled[rows.slots] |= ~np.isfinite(logits[:, :, 0]).all(axis=1)
        return HostLogits(logits)


def _token_buckets(model: Any, plan: LoadPlan) -> tuple[int, ...]:  # noqa: ANN401
    """Lengths that the model has decode programs for, as far as the engine may use them."""
    found: list[int] = getattr(model, "token_buckets", None) or model.n_positions_list
    limit = plan.max_model_len
    shorter = sorted(length for length in found if length < limit)
    return (*shorter, limit)
