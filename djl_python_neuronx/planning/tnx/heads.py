"""Attention heads that transformers-neuronx allocates: padded, and KV heads that cores share.

Source: transformers-neuronx 0.13, utils.py get_qkv_padding and decoder.py check_gqa_fallback.
"""

from __future__ import annotations

from djl_python_neuronx.planning.capabilities import Heads, round_up
from djl_python_neuronx.planning.model import ModelFacts


def padded_heads(model: ModelFacts, degree: int, strategy: str | None, slots: int) -> Heads:
    """Return the heads on `degree` cores: rounded up to it, few KV heads copied.

    `strategy`: the `group_query_attention` that is set; the library may give it up.
    """
    heads, kv_heads = model.num_heads or 1, model.num_kv_heads or 1
    query = round_up(heads, degree)
    if heads == kv_heads:
        return Heads(query, query)
    if strategy and not keeps_strategy(strategy, model, slots, degree):
        strategy = None
    if strategy in {"shard-over-batch", "all-gather-heads"}:
        return Heads(query, kv_heads)
    if strategy != "replicated-heads" and kv_heads % degree == 0:
        return Heads(query, kv_heads)
    return Heads(query, _replicated(heads, kv_heads, query, degree))


def _replicated(heads: int, kv_heads: int, query: int, degree: int) -> int:
    """Return the KV heads of replicated-heads: one per core, or one per query head."""
    added = query - heads
    copies = heads // kv_heads
    if (
        kv_heads < degree
        and degree % kv_heads == 0
        and (added == 0 or (added > 0 and added % kv_heads == 0))
    ):
        copies = degree // kv_heads
    elif query * kv_heads == heads * degree:
        copies = 1
    copied = max(kv_heads * copies, degree)
    return query if copied == heads else copied


def keeps_strategy(strategy: str, model: ModelFacts, num_slots: int, degree: int) -> bool:
    """Return whether transformers-neuronx keeps a `group_query_attention` strategy or falls back to its default."""
    heads, kv_heads, size = model.num_heads or 1, model.num_kv_heads or 1, model.head_dim or 1
    if strategy == "shard-over-heads":
        return kv_heads % degree == 0
    if strategy == "shard-over-batch":
        return num_slots % degree == 0
    if strategy == "all-gather-heads":
        return (kv_heads * size) % degree == 0 and -heads % degree % kv_heads == 0
    return True
