"""Any Hugging Face causal LM on the CPU, in the shapes and limits of a compiled device.

Slots and buckets are those of the plan; what a device would refuse is refused.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from djl_python_neuronx.backends.attention import (
    Windows,
    causal_mask,
    padded_positions,
    position_limits,
    possible_windows,
    short_windows,
    unserved_layers,
)
from djl_python_neuronx.backends.base import (
    Decode,
    Float32Array,
    HostLogits,
    Int32Array,
    Mixed,
    ModelSpec,
    Prefill,
    Rows,
    Step,
    Want,
)
from djl_python_neuronx.backends.checkpoint import check_version, load_checkpoint
from djl_python_neuronx.backends.cores import count_cores
from djl_python_neuronx.backends.plan import LoadPlan, ModelFacts
from djl_python_neuronx.backends.shapes import (
    check_budget,
    check_rows,
    choose_bucket,
    pad_to_bucket,
    refuse,
)
from djl_python_neuronx.backends.slot_cache import SlotCache
from djl_python_neuronx.errors import (
    ArtifactError,
    BackendError,
    DeviceMemoryError,
    IncompatibleOptionsError,
    StepError,
)

logger = logging.getLogger(__name__)

_TRIED = 8
"""Tokens of the trial run."""
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Allowed difference of the trial run (root mean square) in standard deviations of the logits.

Rounding gives 2e-6 and 0.03; a token that changes its expert in bfloat16 gives more."""


def supports(artifact: ModelFacts) -> str | None:
    """Why a model cannot be served; None: it can, as far as its `config.json` tells."""
    nested = artifact.config.get("text_config")
    for config in (artifact.config, nested if isinstance(nested, Mapping) else {}):
        reason = unserved_layers(config.get("layer_types"))
        if reason:
            return reason
    if artifact.config.get("is_encoder_decoder"):
        return "it is an encoder-decoder; expected a causal language model"
    return None


def load(plan: LoadPlan) -> CpuBackend:
    """A loaded model, tried once; sets torch's threads for the whole process.

    Raises:
        ArtifactError: files or tensors are missing, damaged, of the wrong shape or not finite.
        BackendError: the architecture cannot be driven like this, or memory is short.
        IncompatibleOptionsError: a slot is longer than the model's positions reach.
    """
    check_version()
    # One core is left to the host's own threads: where they share all of them, every parallel operator waits for
    # a thread that is not running (tiny-llama, 16 rows, a busy client, 2 vCPU: 55 ms a step against 6).
    torch.set_num_threads(plan.num_threads or max(1, count_cores() - 1))
    began = time.monotonic()
    model = load_checkpoint(plan)
    backend = CpuBackend(model, plan)
    logger.info(
        "loaded backend=cpu model=%s dtype=%s threads=%d cache_bytes=%d seconds=%.1f",
        type(model).__name__,
        plan.dtype,
        torch.get_num_threads(),
        backend.cache_bytes,
        time.monotonic() - began,
    )
    return backend


class CpuBackend:
    """A `Backend` that runs `model` on a cache with one row per slot."""

    def __init__(self, model: Any, plan: LoadPlan) -> None:  # noqa: ANN401
        """Take a model on the CPU over and try it out."""
        self._model = model
        self._config = model.config.get_text_config(decoder=True)
        self._cache = SlotCache(plan.num_slots, plan.max_model_len)
        self._filled = np.zeros(plan.num_slots, np.int64)
        self._windows: Windows = {}
        self._accepted = inspect.signature(model.forward).parameters
        self._adapt(plan)
        self.spec = ModelSpec(
            num_slots=plan.num_slots,
            max_model_len=plan.max_model_len,
            prefill_buckets=plan.prefill_buckets,
            token_buckets=plan.token_buckets or (plan.max_model_len,),
            vocab_size=self._try_out(),
            eos_ids=plan.eos_ids,
            max_prefill_batch=plan.num_slots,
            outputs=Want.LOGITS | Want.ALL_LOGITS,
            max_drafts=plan.num_drafts,
            mixed_steps=plan.mixed_steps,
        )

    @property
    def cache_bytes(self) -> int:
        """Size of the KV cache."""
        return self._cache.num_bytes

    def acquire(self, slot: int, prompt_ids: Sequence[int], adapter: int) -> int:  # noqa: ARG002
        """0: no prefix is ever reused."""
        self._filled[slot] = 0
        return 0

    def fork(self, slot: int, into: int) -> None:
        """Refused: `can_fork` is false."""
        refuse(f"a fork of slot {slot} into {into}", "none: the cpu backend cannot fork")

    def release(self, slots: Sequence[int]) -> None:
        """Empty these slots; a decode of an empty slot is refused."""
        self._filled[list(slots)] = 0

    def close(self) -> None:
        """Free weights and cache."""
        self._model = None
        self._cache.clear()

    def run(self, step: Step) -> HostLogits:
        """Run a step; padding columns of ALL_LOGITS mean nothing.

        Raises:
            StepError: the step breaks a limit of the spec, or torch failed.
            DeviceMemoryError: memory is short.
        """
        if self._model is None:
            message = "the cpu backend is closed; expected no more steps. Load the model again"
            error = StepError(message)
            error.fatal = True
            raise error
        if self.spec.mixed_steps:
            parts = [step.prefill, step.decode] if isinstance(step, Mixed) else [step.rows]
            check_budget(parts, self.spec)
        if not isinstance(step, Mixed):
            return HostLogits(self._run(step))
        if not self.spec.mixed_steps:
            refuse("a mixed step", "Prefill or Decode")
        prompts, decodes = self._run(Prefill(step.prefill)), self._run(Decode(step.decode))
        if not prompts.shape[1]:
            prompts = np.zeros((len(prompts), *decodes.shape[1:]), np.float32)
        return HostLogits(np.concatenate((prompts, decodes)))

    def _run(self, step: Prefill | Decode) -> Float32Array:
        rows = step.rows
        check_rows(rows, self.spec)
        width, reach = self._shapes(step)
        # Until the step has succeeded, what lies beyond its start is not to be trusted.
        self._filled[rows.slots] = rows.starts
        try:
            values = self._forward(rows, reach=reach, width=width)
        except Exception as error:
            raise _translate(error, f"a {type(step).__name__} of {len(rows.slots)} rows") from error
        self._filled[rows.slots] += rows.lens
        return values

    def _shapes(self, step: Prefill | Decode) -> tuple[int, int]:
        """Columns of the step's rows, and columns of the cache that attention reads."""
        rows, spec = step.rows, self.spec
        cached = self._filled[rows.slots]
        if (rows.starts > cached).any():
            refuse(f"starts {rows.starts.tolist()}", f"at most the cached {cached.tolist()}")
        if isinstance(step, Decode) and not rows.starts.all():
            refuse(f"a decode of slots {rows.slots.tolist()}", "slots that hold a prompt")
        longest, end = int(rows.lens.max()), int((rows.starts + rows.lens).max())
        if isinstance(step, Decode):
            return longest, choose_bucket(end, spec.token_buckets)
        if longest > spec.prefill_buckets[-1]:
            refuse(f"a prompt of {longest} tokens", f"at most {spec.prefill_buckets[-1]}")
        width = choose_bucket(longest, spec.prefill_buckets)
        return width, width if end <= width else choose_bucket(end, spec.token_buckets)

    @torch.inference_mode()
    def _forward(self, rows: Rows, *, reach: int, width: int = 0) -> Float32Array:
        """float32[B, K, V] of rows padded to `width`, reading `reach` columns of the cache."""
        longest = int(rows.lens.max())
        width = max(width, longest)
        ids = pad_to_bucket(rows.input_ids[:, :longest], width)
        positions = padded_positions(rows, width)
        arguments: dict[str, Any] = {"attention_mask": self._mask(positions, reach)}
        if "position_ids" in self._accepted:
            arguments["position_ids"] = positions
        # Only the columns that are asked for go through the output layer. An index selects the same
        # columns of every row, so rows of different lengths keep the union of their last columns.
        columns, last = np.unique(rows.lens - 1, return_inverse=True)
        every = Want.ALL_LOGITS in rows.wants
        index = torch.arange(longest) if every else torch.from_numpy(columns).long()
        if "logits_to_keep" in self._accepted:
            arguments["logits_to_keep"] = index
        self._cache.aim(rows, reach)
        logits: torch.Tensor = self._model(
            input_ids=torch.from_numpy(ids).long(),
            past_key_values=self._cache,
            use_cache=True,
            return_dict=True,
            **arguments,
        ).logits
        if "logits_to_keep" not in self._accepted:
            logits = logits[:, index]
        if not rows.wants:
            logits = logits[:, :0]
        elif not every:
            logits = logits[torch.arange(len(last)), torch.from_numpy(last)][:, None]
        values: Float32Array = logits.float().contiguous().numpy()
        return values

    def _mask(self, positions: torch.Tensor, reach: int) -> torch.Tensor | dict[str, torch.Tensor]:
        dtype = self._model.dtype
        masks = {kind: causal_mask(positions, reach, dtype, w) for kind, w in self._windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _adapt(self, plan: LoadPlan) -> None:
        """Refuse what the architecture cannot do; make ALiBi accept a 4-d mask."""
        name = type(self._model).__name__
        for what, limit in position_limits(self._config).items():
            if plan.max_model_len > limit:
                message = (
                    f"n_positions is {plan.max_model_len}, but {name} reaches {limit} "
                    f"positions ({what}). Set n_positions to at most {limit}"
                )
                raise IncompatibleOptionsError(message)
        reason = unserved_layers(getattr(self._config, "layer_types", None))
        if reason:
            message = f"{name} cannot be served: {reason}. Use another backend"
            raise BackendError(message)
        build: Callable[..., torch.Tensor] | None
        build = getattr(self._model.base_model, "build_alibi_tensor", None)
        if build is not None:
            # Bloom counts positions along a 2-d mask. In a slot the column is the position and what
            # is masked has no weight, so ones of the mask's length give the same.
            self._model.base_model.build_alibi_tensor = lambda mask, *rest, **named: build(
                torch.ones(mask.shape[0], mask.shape[-1]), *rest, **named
            )
        elif "position_ids" not in self._accepted:
            message = (
                f"{name} takes no position_ids; expected an architecture that does. Use another"
            )
            raise BackendError(message)

    def _try_out(self) -> int:
        """Compare the slot cache with the model's own forward pass; returns the vocabulary's size.

        An architecture that ignores mask or positions would give wrong text without an error, and so would a window
        that it does not have: of those that are possible, the one that the model itself shows is kept.

        Raises:
            ArtifactError: the model's logits are not finite.
            BackendError: the two differ, or the model does not run on the cache.
        """
        name, reach = type(self._model).__name__, self._cache.get_max_cache_shape()
        ids = np.arange(1, min(_TRIED, reach) + 1, dtype=np.int32)[None]
        try:
            with torch.inference_mode(), short_windows(self._model, self._config):
                own = self._model(input_ids=torch.from_numpy(ids).long(), use_cache=False).logits
                wanted = own.float().numpy()
                found = [self._compare(w, ids, wanted) for w in possible_windows(self._config)]
        except Exception as error:
            raise _translate(error, f"{name} on a slot cache") from error
        if not np.isfinite(wanted).all():
            message = (
                f"{name} is damaged: its logits are not finite in {self._model.dtype}; expected "
                "finite weights that fit the dtype. Fetch the model again, or use dtype fp32"
            )
            raise ArtifactError(message)
        best = min(range(len(found)), key=found.__getitem__)
        self._windows = possible_windows(self._config)[best]
        if best:
            logger.warning("window_unused model=%s reason='its code has no sliding window'", name)
        tolerance = _TOLERANCE[self._model.dtype] * float(wanted.std())
        if not found[best] <= tolerance:
            message = (
                f"{name} gives other logits on a slot cache than alone: they differ by "
                f"{found[best]:.2g}, expected at most {tolerance:.2g}. It ignores the mask or the "
                "positions; serve it with another backend"
            )
            raise BackendError(message)
        return int(wanted.shape[-1])

    def _compare(self, windows: Windows, ids: Int32Array, wanted: Float32Array) -> float:
        """Root mean square of what the slot cache gives less `wanted`, in two steps of a row."""
        self._windows = windows
        reach = self._cache.get_max_cache_shape()
        parts = [self._forward(rows, reach=reach) for rows in _halves(ids, len(self._filled) - 1)]
        return float(np.sqrt(np.mean((np.concatenate(parts, axis=1) - wanted) ** 2)))


def _halves(ids: Int32Array, slot: int) -> Iterator[Rows]:
    """A row in two steps that want every column; the second reads what the first wrote."""
    half = (ids.shape[1] + 1) // 2
    one = np.ones(1, np.int32)
    for start in range(0, ids.shape[1], half):
        part = ids[:, start : start + half]
        yield Rows(
            input_ids=part,
            lens=one * part.shape[1],
            starts=one * start,
            slots=one * slot,
            adapters=one * 0,
            wants=Want.ALL_LOGITS,
            sampling=np.ones((1, 3), np.float32),
        )


def _translate(error: Exception, what: str) -> BackendError:
    """An error of ours for one of torch's or transformers'."""
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return DeviceMemoryError(
            f"{what} needs more memory than there is ({error}). "
            "Lower max_rolling_batch_size or n_positions, or use dtype bf16"
        )
    return StepError(f"{what} failed: {type(error).__name__}: {error}")
