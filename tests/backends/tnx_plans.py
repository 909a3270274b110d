"""Plans for transformers-neuronx, and the tiny models that it can load."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from djl_python_neuronx.backends import LoadPlan
from djl_python_neuronx.planning.arguments import LibraryArguments

# A process has its cores once: those of the largest model here. The cache keeps the rig's programs for one run.
os.environ.setdefault("NEURON_RT_NUM_CORES", "8")
os.environ.setdefault("NEURON_EMU_LOG_LEVEL", "WARNING")
CACHE = os.environ.setdefault("NEURON_COMPILE_CACHE_URL", tempfile.mkdtemp(prefix="neuron-cache-"))

VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama": ("llama", {}),
        "llama-mha": ("llama", {"num_key_value_heads": 4}),
        "llama3-rope": (
            "llama",
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            },
        ),
        "mistral": ("mistral", {"sliding_window": None}),
        "mixtral": ("mixtral", {}),
        "gpt2": ("gpt2", {}),
        "gpt_neox": (
            "gpt_neox",
            {"hidden_act": "gelu_new", "rotary_pct": 0.5, "use_parallel_residual": True},
        ),
        "opt": ("opt", {"word_embed_proj_dim": 32, "do_layer_norm_before": True}),
        "bloom": ("bloom", {"hidden_size": 32, "n_head": 4}),
    }
)
"""Name → model type and what differs from `tiny_models`: transformers-neuronx knows no projected embeddings."""


def tnx_plan(
    directory: Path,
    num_slots: int = 4,
    max_model_len: int = 48,
    prefill_buckets: tuple[int, ...] = (8, 20),
    token_buckets: tuple[int, ...] = (24, 48),
    *,
    continuous: bool = True,
    block_size: int | None = None,
    tp: int = 1,
    **neuron_config: object,
) -> LoadPlan:
    """A plan with these keywords of `NeuronConfig`, as `mapping.library_arguments` writes them.

    `block_size`: prompts in chunks, the cache in blocks.
    """
    shared: dict[str, object] = {"batch_size_for_shared_caches": num_slots}
    if block_size is not None:
        neuron_config["cache_layout"] = "BSH"
        shared |= {
            "max_model_len": max_model_len,
            "optimized_paged_attention": True,
            "enable_chunked_prefill": True,
            "block_size": block_size,
            "num_blocks": num_slots * -(-max_model_len // block_size) + 1,
        }
    if continuous:
        neuron_config["continuous_batching"] = shared
    return LoadPlan(
        directory,
        num_slots,
        max_model_len,
        prefill_buckets,
        token_buckets,
        mixed_steps=block_size is not None,
        tensor_parallel_degree=tp,
        arguments=LibraryArguments(neuron_config=neuron_config),
    )
