"""NaN in the KV cache on the device: how to recognise it and how to clear it.

NaN (or infinity) spoils whatever is read with it, masked or not: the mask sets its weight to 0, and 0 times
NaN is NaN (transformers-neuronx 0.13, layers/attention.py: `context`; scores are selected, values multiplied). A prompt
writes its whole bucket, so an earlier sequence spoils a later one only from beyond that bucket.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

logger = logging.getLogger(__name__)


def find_nan_token(
    model: Any,  # noqa: ANN401
    decode: Callable[[int], torch.Tensor],
    lengths: Iterable[int],
) -> int | None:
    """Return the token that this device samples if all logits are NaN; None if it is not always the same one.

    Comparisons with NaN do not depend on the other operand, so it is one token for all parameters and draws; which
    one depends on the compiler (seen on a CPU: the last of the padded vocabulary if greedy, 0 if not). So it is
    measured: `decode` runs token 0 at a position of every slot, once for each of the cache `lengths`, while the last
    layer's values are NaN. All slots must be empty; they are empty again afterwards.
    """
    caches = _last_values(model)
    empty = [_read(cache) for cache in caches]
    if not all(shard.is_floating_point() for shards in empty for shard in shards):
        return -1  # integers are never NaN
    try:
        for cache, shards in zip(caches, empty, strict=True):
            _write(cache, [torch.full_like(shard, math.nan) for shard in shards])
        with torch.inference_mode():
            answers = [decode(length - 1).flatten() for length in lengths]
        found = set(torch.cat(answers).tolist())
    finally:
        for cache, shards in zip(caches, empty, strict=True):
            _write(cache, [torch.zeros_like(shard) for shard in shards])
    if len(found) == 1:
        return int(found.pop())
    reason = "the device samples different tokens from NaN, so the cache is read whenever a slot is reused"
    logger.warning("nan_unrecognised tokens=%s reason=%r", sorted(found)[:8], reason)
    return None


def is_spoiled(model: Any, slot: int) -> bool:  # noqa: ANN401
    """Return whether a slot's cache holds NaN or infinity.

    The last layer's values are enough: NaN at a position of one layer makes NaN of everything that the next layers
    compute there.
    """
    axis = _axis(model)
    return any(
        not shard.select(axis, slot).float().isfinite().all()
        for cache in _last_values(model)
        for shard in _read(cache)
    )


def clear(model: Any, slot: int) -> None:  # noqa: ANN401
    """Zero a slot. All slots are copied to the host and back: no call of the library writes a part of a tensor."""
    axis = _axis(model)
    for layer in model.decoder_lm_head.layers:
        for caches in (layer.attn_k_cache, layer.attn_v_cache):
            for cache in caches.values():
                shards = [shard.clone() for shard in _read(cache)]
                for shard in shards:
                    shard.select(axis, slot).zero_()
                _write(cache, shards)


def _last_values(model: Any) -> list[Any]:  # noqa: ANN401
    return list(model.decoder_lm_head.layers[-1].attn_v_cache.values())


def _axis(model: Any) -> int:  # noqa: ANN401
    return 0 if model.neuron_config.bsh_cache_layout else 1


def _read(cache: Any) -> list[torch.Tensor]:  # noqa: ANN401
    """Return a tensor for each core: all slots, some heads or, with `shard_over_sequence`, some positions."""
    from transformers_neuronx import ops

    shards: list[torch.Tensor] = ops.parallel_cpu(cache)
    return shards


def _write(cache: Any, shards: list[torch.Tensor]) -> None:  # noqa: ANN401
    from transformers_neuronx import ops

    ops.parallel_write(cache, shards)
