"""A Hugging Face causal LM on a cache with one row per slot."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from djl_python_neuronx.backends.base import Float32Array, Int32Array, Rows, Want
from djl_python_neuronx.backends.cpu import unserved_layers
from djl_python_neuronx.backends.cpu.attention import (
    SlotCache,
    Windows,
    causal_mask,
    padded_positions,
    position_limits,
    possible_windows,
    short_windows,
)
from djl_python_neuronx.backends.cpu.lora import Lora
from djl_python_neuronx.backends.shapes import pad_to_bucket
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


class SlotModel:
    """Runs rows of tokens through `module`, which reads and writes the cache of their slots."""

    def __init__(self, module: Any, num_slots: int, max_model_len: int) -> None:  # noqa: ANN401
        """Adapt a model on the CPU to slots, and try it out.

        Raises:
            ArtifactError: its logits are not finite.
            BackendError: its architecture does not run on a slot cache.
            IncompatibleOptionsError: a slot is longer than the model's positions.
        """
        self.module = module
        self._config = module.config.get_text_config(decoder=True)
        self._cache = SlotCache(num_slots, max_model_len)
        self._last_slot = num_slots - 1
        self.lora = Lora(module.base_model)
        self._windows: Windows = {}
        self._accepted = inspect.signature(module.forward).parameters
        self._adapt()
        self.vocab_size = self._try_out()

    @property
    def cache_bytes(self) -> int:
        """Size of the KV cache."""
        return self._cache.num_bytes

    @torch.inference_mode()
    def copy(self, source: int, slot: int, count: int) -> None:
        """Copy the first `count` tokens in the cache of a slot to another one."""
        self._cache.copy(source, slot, count)

    @torch.inference_mode()
    def forward(self, rows: Rows, *, reach: int, width: int = 0) -> Float32Array:
        """Return float32[B, K, V] for rows padded to `width`, reading `reach` columns of the cache."""
        longest = int(rows.lens.max())
        width = max(width, longest)
        ids = pad_to_bucket(rows.input_ids[:, :longest], width)
        positions = padded_positions(rows, width)
        # transformers 5.24 has another name for it, and warns of the old one.
        cache = "cache" if "cache" in self._accepted else "past_key_values"
        arguments: dict[str, Any] = {
            "attention_mask": self._mask(positions, reach),
            cache: self._cache,
        }
        if "position_ids" in self._accepted:
            arguments["position_ids"] = positions
        # Only the wanted columns go through the output layer. An index selects the same
        # columns of every row, so rows of different lengths keep the union of their last columns.
        columns, last = np.unique(rows.lens - 1, return_inverse=True)
        every = Want.ALL_LOGITS in rows.wants
        index = torch.arange(longest) if every else torch.from_numpy(columns).long()
        if "logits_to_keep" in self._accepted:
            arguments["logits_to_keep"] = index
        self._cache.aim(rows, reach)
        self.lora.aim(rows.adapters)
        logits: torch.Tensor = self.module(
            input_ids=torch.from_numpy(ids).long(),
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
        dtype = self.module.dtype
        masks = {kind: causal_mask(positions, reach, dtype, w) for kind, w in self._windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _adapt(self) -> None:
        """Refuse an architecture without positions or a mask; make ALiBi accept a 4-d mask."""
        name, reach = type(self.module).__name__, self._cache.get_max_cache_shape()
        for what, limit in position_limits(self._config).items():
            if reach > limit:
                message = (
                    f"n_positions is {reach}, but {name} has {limit} "
                    f"positions ({what}). Set n_positions to at most {limit}"
                )
                raise IncompatibleOptionsError(message)
        reason = unserved_layers(getattr(self._config, "layer_types", None))
        if reason:
            message = f"{name} cannot be served: {reason}. Use another backend"
            raise BackendError(message)
        build: Callable[..., torch.Tensor] | None
        build = getattr(self.module.base_model, "build_alibi_tensor", None)
        if build is not None:
            # Bloom counts positions along a 2-d mask. In a slot the column is the position and masked
            # columns have no weight, so ones of the mask's length give the same.
            self.module.base_model.build_alibi_tensor = lambda mask, *rest, **named: build(
                torch.ones(mask.shape[0], mask.shape[-1]), *rest, **named
            )
        elif "position_ids" not in self._accepted:
            message = (
                f"{name} takes no position_ids; expected an architecture that does. Use another"
            )
            raise BackendError(message)

    def _try_out(self) -> int:
        """Compare the slot cache with the model's own forward pass; return the vocabulary's size.

        An architecture that ignores mask or positions would give wrong text without an error, and so would a wrong
        sliding window: of the possible windows, the one closest to the model's own output is kept.

        Raises:
            ArtifactError: the model's logits are not finite.
            BackendError: the two differ, or the model fails on the cache.
        """
        name, reach = type(self.module).__name__, self._cache.get_max_cache_shape()
        ids = np.arange(1, min(_TRIED, reach) + 1, dtype=np.int32)[None]
        try:
            with torch.inference_mode(), short_windows(self.module, self._config):
                own = self.module(input_ids=torch.from_numpy(ids).long(), use_cache=False).logits
                wanted = own.float().numpy()
                found = [self._compare(w, ids, wanted) for w in possible_windows(self._config)]
        except Exception as error:
            raise translate(error, f"{name} on a slot cache") from error
        if not np.isfinite(wanted).all():
            message = (
                f"{name} is damaged: its logits are not finite in {self.module.dtype}; expected "
                "finite weights that fit the dtype. Fetch the model again, or use dtype fp32"
            )
            raise ArtifactError(message)
        best = min(range(len(found)), key=found.__getitem__)
        self._windows = possible_windows(self._config)[best]
        if best:
            logger.warning("window_unused model=%s reason='its code has no sliding window'", name)
        tolerance = _TOLERANCE[self.module.dtype] * float(wanted.std())
        if not found[best] <= tolerance:
            message = (
                f"{name} gives other logits on a slot cache than alone: they differ by "
                f"{found[best]:.2g}, expected at most {tolerance:.2g}. It ignores the mask or the "
                "positions; serve it with another backend"
            )
            raise BackendError(message)
        return int(wanted.shape[-1])

    def _compare(self, windows: Windows, ids: Int32Array, wanted: Float32Array) -> float:
        """Return the root mean square of the difference from `wanted`, for a row in two steps on the slot cache."""
        self._windows = windows
        reach = self._cache.get_max_cache_shape()
        parts = [self.forward(rows, reach=reach) for rows in _halves(ids, self._last_slot)]
        return float(np.sqrt(np.mean((np.concatenate(parts, axis=1) - wanted) ** 2)))


def _halves(ids: Int32Array, slot: int) -> Iterator[Rows]:
    """Yield a row in two steps that want every column; the second one reads the first one's cache."""
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


def translate(error: Exception, what: str) -> BackendError:
    """Return the `BackendError` for an error of torch or transformers."""
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return DeviceMemoryError(
            f"{what} needs more memory than there is ({error}). "
            "Lower max_rolling_batch_size or n_positions, or use dtype bf16"
        )
    return StepError(f"{what} failed: {type(error).__name__}: {error}")
