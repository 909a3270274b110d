"""Layers that LoRA adapters change, with their shapes, and the size of adapters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from djl_python_neuronx.planning.model import ModelFacts

MODULES: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Names of these layers: those of llama and of all architectures that are named like it."""


def layer_shapes(model: ModelFacts) -> Mapping[str, tuple[int, int]]:
    """Return the outputs and inputs of these layers, by their path in a decoder layer, as in `mlp.up_proj`.

    Empty for a model whose configuration does not have its sizes. Experts are no such layers.
    """
    hidden, inner = model.hidden_size, model.intermediate_size
    heads, kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim
    if not (hidden and inner and heads and kv_heads and head_dim):
        return {}
    queries, keys = heads * head_dim, kv_heads * head_dim
    sizes = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    if model.num_experts == 1:
        sizes += [(inner, hidden), (inner, hidden), (hidden, inner)]
    paths = [f"{'mlp' if i > 3 else 'self_attn'}.{name}" for i, name in enumerate(MODULES)]
    return dict(zip(paths, sizes, strict=False))


def adapter_values(model: ModelFacts, rank: int, modules: Collection[str]) -> int:
    """Return the numbers in an adapter of these layers: rank x (inputs + outputs) of each."""
    sizes = [
        sum(shape)
        for path, shape in layer_shapes(model).items()
        if path.rpartition(".")[2] in modules
    ]
    return rank * sum(sizes) * (model.num_layers or 0)
