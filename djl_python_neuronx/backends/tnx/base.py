"""Base class of all batching modes on transformers-neuronx: checks, the form of outputs, the state of slots."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from djl_python_neuronx.backends.base import (
    ModelSpec,
    PartKind,
    Rows,
    Step,
    StepOutput,
    Want,
)
from djl_python_neuronx.backends.faults import of_step
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.backends.shapes import pad_to_bucket, refuse
from djl_python_neuronx.backends.slots import SlotBackend, make_spec
from djl_python_neuronx.backends.tnx.nan import clear, find_nan_token, is_spoiled
from djl_python_neuronx.backends.tnx.sampling import TEMPERATURES, DeviceSampling

_PIECE = 8192
PER_ROW = ("lens", "starts", "slots", "adapters", "sampling")
"""Arrays of `Rows` with a value for each row, of the same shape whatever the step."""


class TnxBackend(SlotBackend):
    """A `Backend` on a model that `to_neuron` has put on the device."""

    name = "tnx"

    def __init__(self, model: Any, plan: LoadPlan, **of_mode: Any) -> None:  # noqa: ANN401
        """Every slot is empty. `of_mode`: fields of `ModelSpec` that depend on how the model batches."""
        sampling = DeviceSampling.of(model, plan)
        super().__init__(replace(_read_spec(model, plan, sampling), **of_mode), model)
        self._sampling = sampling
        self._spoiled = np.zeros(plan.num_slots, np.bool_)
        """Slots whose cache may hold NaN."""
        self._nan_token: int | None = None

    def find_nan_token(self) -> None:
        """Find the token that a sampling device returns for NaN, so that a spoiled slot is recognised by its tokens.

        Until then, every slot that has been used counts as spoiled. All slots must be empty.
        """
        if self._sampling:
            lengths = self.spec.token_buckets
            self._nan_token = find_nan_token(self._model, self._decode_empty, lengths)

    @abstractmethod
    def _prefill(self, rows: Rows) -> torch.Tensor:
        """Return the model's output for these rows, in their order."""

    @abstractmethod
    def _decode(self, rows: Rows) -> torch.Tensor:
        """Decode one token per row; returns the same shapes as `_prefill`."""

    @abstractmethod
    def _decode_empty(self, position: int) -> torch.Tensor:
        """Return the model's output for token 0 at this position of every slot."""

    def _clear_nan(self, slot: int) -> None:
        """Remove every NaN and infinity from a free slot's cache."""
        clear(self._model, slot)

    def _run(self, step: Step) -> StepOutput:
        rows = joined([rows for _, rows in step.parts])
        if self._sampling:
            self._sampling.send(rows, self._model)
        run = self._decode if step.kind == "decode" else self._prefill
        with torch.inference_mode():
            return self._answer(run(rows), rows)

    def acquire(self, slot: int, prompt_ids: Sequence[int], adapter: int, salt: str = "") -> int:
        """See `SlotBackend`; whatever may be NaN in the slot is cleared."""
        held = super().acquire(slot, prompt_ids, adapter, salt)
        if self._spoiled[slot]:
            try:
                # Logits are evidence, a token is only suspect. Clearing moves the whole cache, 1 to 2 ms per MiB and so
                # seconds for 4 GiB; the last layer's values are 1 part in (4 * layers) of that (2 vCPU, 2026-11-22).
                if not self._sampling or is_spoiled(self._model, slot):
                    self._clear_nan(slot)
            except Exception as error:
                raise of_step(error, f"clearing slot {slot}") from error
            self._spoiled[slot] = False
        return held

    def _check(self, kind: PartKind, rows: Rows) -> None:
        """Refuse what `SlotBackend._check` refuses, and shapes that the library has no graphs for."""
        super()._check(kind, rows)
        if kind == "prefill" and Want.ALL_LOGITS in rows.wants:
            refuse("the logits of every column of a prompt", "those of the last")

    def _answer(self, output: torch.Tensor, rows: Rows) -> StepOutput:
        """Copy float32[B, K, V] or float32[B, V] logits or int32[B] tokens into arrays that the caller owns."""
        num_rows, columns = len(rows.slots), int(rows.wants != Want.NOTHING)
        if self._sampling:
            ids = output.reshape(num_rows, 1)[:, :columns].to(torch.int32).numpy()
            if columns:
                # Once sampled from NaN, a sequence repeats the same token to its end: the newest one is enough.
                self._spoiled[rows.slots] = self._nan_token is None or ids[:, 0] == self._nan_token
            # The vocabulary is padded to a multiple of the cores; only NaN yields a token of the padding.
            return StepOutput(ids=np.where(ids < self.spec.vocab_size, ids, -1).astype(np.int32))
        if columns:
            output = output[:, None] if output.ndim < 3 else output
            columns = output.shape[1]
        returned = output.float().numpy()
        logits = np.empty((num_rows, columns, self.spec.vocab_size), np.float32)
        # The library returns a transposed view of [V, B]. It is copied into rows in pieces that fit the cores' caches:
        # 8 rows of 128 256 take 0.39 ms, as a whole 0.51 (numpy 2.4, 2 vCPU, 2026-11-22). Not with torch, whose threads
        # are no faster, take 3 ms of CPU to wait for one another, and stall where a core is busy.
        for start in range(0, self.spec.vocab_size * (columns > 0), _PIECE):
            piece = slice(start, start + _PIECE)
            logits[..., piece] = returned[..., piece]
        # The output layer spreads NaN over the whole vocabulary: one column is enough.
        if columns and not np.isfinite(logits[:, :, 0]).all():
            self._spoiled[rows.slots] |= ~np.isfinite(logits[:, :, 0]).all(axis=1)
        return StepOutput(logits)


def joined(parts: list[Rows]) -> Rows:
    """Return the rows of all parts of a step, in this order."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.input_ids.shape[1] for part in parts)
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in PER_ROW}
    ids = np.concatenate([pad_to_bucket(part.input_ids, width) for part in parts])
    return Rows(ids, wants=parts[0].wants | parts[-1].wants, **arrays)


def _read_spec(model: Any, plan: LoadPlan, sampling: DeviceSampling | None) -> ModelSpec:  # noqa: ANN401
    """Return the part of a model's spec that does not depend on how it batches."""
    # The decode graphs that the library has made.
    found: list[int] = getattr(model, "token_buckets", None) or model.n_positions_list
    outputs = Want.TOKENS if sampling else Want.LOGITS
    return make_spec(
        plan,
        int(model.config.vocab_size),
        found,
        outputs=outputs | Want.ALL_LOGITS if plan.num_speculative_tokens else outputs,
        num_speculative_tokens=plan.num_speculative_tokens,
        largest_top_k=sampling.largest_top_k if sampling else None,
        temperatures=TEMPERATURES,
        fixed_sampling=sampling.fixed if sampling else None,
    )
