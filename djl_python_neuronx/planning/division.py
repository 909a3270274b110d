"""How the libraries divide a model among cores: what the degree has to divide, and heads after padding and copying."""

from __future__ import annotations

from typing import NamedTuple

from djl_python_neuronx.planning.capabilities import CAPABILITIES
from djl_python_neuronx.planning.model import ModelFacts


class Heads(NamedTuple):
    """Attention heads of all cores together."""

    query: int
    kv: int


def takes(facts: ModelFacts, degree: int, loader: str) -> bool:
    """Whether the library can split this model over `degree` cores, padding it if it does that."""
    return undivided(facts, degree, loader) is None


def undivided(facts: ModelFacts, degree: int, loader: str) -> str | None:
    """What of the model the degree has to divide and does not, in words; None: the library can split it.

    Source: transformers-neuronx 0.13, mixtral/model.py; neuronx-distributed-inference 0.9, models/*/modeling_*.py.
    """
    capability = CAPABILITIES.get(loader, {}).get(facts.model_type or "")
    if capability is None:
        return None
    if not capability.pads_heads and facts.num_heads and facts.num_heads % degree:
        return f"the {facts.num_heads} heads"
    for name in capability.divides:
        size = getattr(facts, name)
        if size and size % degree:
            return f"the {name.replace('_', ' ')} of {size}"
    experts, width = facts.num_experts, facts.intermediate_size or 0
    if capability.experts_apart and experts % degree:
        if degree % experts:
            return f"the {experts} experts, or they the degree"
        if width % (degree // experts):
            return f"the width of all {experts} experts, {experts} x {width}"
    return None


def padded_heads(
    heads: int, kv_heads: int, degree: int, loader: str, group_query_attention: str | None = None
) -> Heads:
    """Heads as the library lays them out over `degree` cores: rounded up to it, KV heads copied where they are few.

    Source: transformers-neuronx 0.13, utils.py get_qkv_padding and decoder.py check_gqa_fallback;
    neuronx-distributed-inference 0.9, modules/attention/gqa.py.
    """
    query = round_up(heads, degree)
    if heads == kv_heads:
        return Heads(query, query)
    if loader == "nxdi":
        if kv_heads % degree == 0:
            return Heads(query, kv_heads)
        return Heads(query, degree if degree % kv_heads == 0 else query)
    if group_query_attention in {"shard-over-batch", "all-gather-heads"}:
        return Heads(query, kv_heads)
    if group_query_attention != "replicated-heads" and kv_heads % degree == 0:
        return Heads(query, kv_heads)
    return Heads(query, _copied(heads, kv_heads, query, degree))


def _copied(heads: int, kv_heads: int, query: int, degree: int) -> int:
    """KV heads of transformers-neuronx' replicated-heads: one for each core, or one for each query head."""
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


def keeps(way: str, facts: ModelFacts, num_slots: int, degree: int) -> bool:
    """Whether transformers-neuronx shares KV heads in the way that was asked for; else it falls back to its default.

    Source: transformers-neuronx 0.13, decoder.py check_gqa_fallback.
    """
    heads, kv_heads, size = facts.num_heads or 1, facts.num_kv_heads or 1, facts.head_dim or 1
    if way == "shard-over-heads":
        return kv_heads % degree == 0
    if way == "shard-over-batch":
        return num_slots % degree == 0
    if way == "all-gather-heads":
        return (kv_heads * size) % degree == 0 and -heads % degree % kv_heads == 0
    return True


def round_up(value: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step
