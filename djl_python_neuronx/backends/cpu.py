"""Any Hugging Face causal LM on the CPU, in the shapes and limits of a compiled device.

Slots, prefill buckets and token buckets are those of the plan; what a device would refuse is refused.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors import safe_open
from transformers.utils import logging as transformers_logging

from djl_python_neuronx.backends.base import (
    Decode,
    HostLogits,
    Mixed,
    ModelSpec,
    Prefill,
    Rows,
    Step,
    Want,
)
from djl_python_neuronx.backends.cores import count_cores
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.backends.shapes import check_rows, choose_bucket, pad_to_bucket
from djl_python_neuronx.backends.slot_cache import SlotCache, causal_mask, padded_positions
from djl_python_neuronx.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    BackendError,
    BackendUnavailableError,
    DeviceMemoryError,
    IncompatibleOptionsError,
    StepError,
)

logger = logging.getLogger(__name__)

_ATTENTION = {"full_attention", "sliding_attention"}
_NAMED = 5
"""Tensors named in a message; the rest is counted."""


def supports(config: Mapping[str, Any]) -> str | None:
    """Why a model with this `config.json` cannot be served; None: as far as it tells, it can."""
    other = set(config.get("layer_types") or ()) - _ATTENTION
    if other:
        return f"layers of type {', '.join(sorted(other))} keep a state that is not keys and values"
    if config.get("is_encoder_decoder"):
        return "an encoder-decoder is not a causal language model"
    return None


def load(plan: LoadPlan) -> CpuBackend:
    """A loaded model, tried once; sets torch's threads for the whole process.

    Raises:
        ArtifactError: files or tensors are missing, damaged or of the wrong shape.
        BackendError: the architecture cannot be driven like this, or memory is short.
        IncompatibleOptionsError: a slot is longer than the model's positions.
    """
    _check_version()
    torch.set_num_threads(plan.num_threads or count_cores())
    began = time.monotonic()
    model = _load_model(plan)
    backend = CpuBackend(model, plan)
    logger.info(
        "loaded backend=cpu model=%s dtype=%s threads=%d slots=%d seconds=%.1f",
        type(model).__name__,
        plan.dtype,
        torch.get_num_threads(),
        plan.num_slots,
        time.monotonic() - began,
    )
    return backend


class CpuBackend:
    """A `Backend` that runs `model` on a cache with one row per slot."""

    def __init__(self, model: Any, plan: LoadPlan) -> None:  # noqa: ANN401
        self._model = model
        self._plan = plan
        self._cache = SlotCache(plan.num_slots, plan.max_model_len)
        self._filled = np.zeros(plan.num_slots, np.int64)
        self._buckets = plan.token_buckets or (plan.max_model_len,)
        self._masks = _mask_kinds(model.config.get_text_config(decoder=True))
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._keeps_logits = "logits_to_keep" in accepted
        self._fit(model)
        self.spec = ModelSpec(
            num_slots=plan.num_slots,
            max_model_len=plan.max_model_len,
            prefill_buckets=plan.prefill_buckets,
            token_buckets=plan.token_buckets,
            vocab_size=self._try_out(),
            eos_ids=plan.eos_ids,
            max_prefill_batch=plan.num_slots,
            outputs=Want.LOGITS | Want.ALL_LOGITS,
        )
