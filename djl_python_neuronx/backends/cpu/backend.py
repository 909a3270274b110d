"""Any Hugging Face causal LM on the CPU, in the shapes and limits of a compiled device.

Slots and buckets are those of the plan; a step that a device would refuse is refused.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import torch

from djl_python_neuronx.backends.base import (
    Float32Array,
    PartKind,
    Rows,
    Step,
    StepOutput,
    Want,
)
from djl_python_neuronx.backends.cpu.checkpoint import check_version, load_checkpoint
from djl_python_neuronx.backends.cpu.model import SlotModel, translate
from djl_python_neuronx.backends.env import count_cores
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.backends.shapes import choose_bucket
from djl_python_neuronx.backends.slots import SlotBackend, make_spec

logger = logging.getLogger(__name__)


def load(plan: LoadPlan) -> CpuBackend:
    """Load a model and try it out. Sets torch's threads for the whole process.

    Raises:
        ArtifactError: files or tensors are missing, damaged, of the wrong shape or not finite.
        BackendError: the architecture does not run on a slot cache, or memory is short.
        IncompatibleOptionsError: a slot is longer than the model's positions reach.
    """
    check_version()
    # One core is left for the server's threads: if they share all cores, every parallel operator waits for a thread
    # that is not running (tiny-llama, 16 rows, a busy client, 2 vCPU: 55 ms a step against 6).
    torch.set_num_threads(plan.num_threads or max(1, count_cores() - 1))
    began = time.monotonic()
    model = SlotModel(load_checkpoint(plan), plan.num_slots, plan.max_model_len)
    backend = CpuBackend(model, plan)
    logger.info(
        "loaded backend=cpu model=%s dtype=%s threads=%d cache_bytes=%d seconds=%.1f",
        type(model.module).__name__,
        plan.dtype,
        torch.get_num_threads(),
        model.cache_bytes,
        time.monotonic() - began,
    )
    return backend


_SCORED_BYTES = 2**25
"""Most bytes of the logits with which one step scores a prompt."""


class CpuBackend(SlotBackend):
    """A `Backend` that runs `model` on a cache with one row per slot."""

    name = "cpu"

    _model: SlotModel

    def __init__(self, model: SlotModel, plan: LoadPlan) -> None:
        """Every slot is empty."""
        most = max(1, _SCORED_BYTES // (4 * model.vocab_size))
        spec = make_spec(
            plan,
            model.vocab_size,
            plan.token_buckets,
            max_prefill_batch=plan.num_slots,
            outputs=Want.LOGITS | Want.ALL_LOGITS,
            score_columns=0 if plan.mixed_steps else min(most, plan.prefill_buckets[-1]),
            num_speculative_tokens=plan.num_speculative_tokens,
            mixed_steps=plan.mixed_steps,
            prefix_block=int(plan.prefix_caching),
            num_adapters=0 if plan.lora is None else plan.lora.max_loras,
            changes_adapters=True,
        )
        super().__init__(spec, model)
        for place, folder in enumerate(plan.lora.adapters if plan.lora else (), 1):
            self._set_adapter(place, folder)

    def _set_adapter(self, place: int, folder: Path | None) -> None:
        self._model.lora.set(place, folder)

    def _reuse(self, source: int, slot: int, count: int) -> int:
        if source != slot:
            self._model.copy(source, slot, count)
        return count

    def _run(self, step: Step) -> StepOutput:
        """Run a step. Padding columns of ALL_LOGITS are undefined."""
        values = [self._forward(kind, rows) for kind, rows in step.parts]
        if not values[0].shape[1] and len(values) > 1:
            values[0] = np.zeros((len(values[0]), *values[1].shape[1:]), np.float32)
        return StepOutput(values[0] if len(values) == 1 else np.concatenate(values))

    def _forward(self, kind: PartKind, rows: Rows) -> Float32Array:
        width, reach = self._shapes(kind, rows)
        try:
            return self._model.forward(rows, reach=reach, width=width)
        except Exception as error:
            raise translate(error, f"a {kind} step of {len(rows.slots)} rows") from error

    def _shapes(self, kind: PartKind, rows: Rows) -> tuple[int, int]:
        """Return the columns of the rows, and the columns of the cache that attention reads."""
        spec = self.spec
        longest, end = int(rows.lens.max()), int((rows.starts + rows.lens).max())
        if kind == "decode":
            return longest, choose_bucket(end, spec.token_buckets)
        width = choose_bucket(longest, spec.prefill_buckets)
        return width, width if end <= width else choose_bucket(end, spec.token_buckets)
