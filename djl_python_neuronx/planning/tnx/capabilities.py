"""Support of each architecture by transformers-neuronx, and its known wrong results.

Source: transformers-neuronx 0.13 (`<architecture>/model.py`, `config.py`, `hlo.py`, `decoder.py`, `layers/`), read and
run on a CPU. "Verified" means compared with Hugging Face's logits: tiny models with random weights on an emulated
device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning.capabilities import (
    Capability,
    Defect,
    sequences_beyond_window,
    window_ignored,
)
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.tnx.fields import TNX_FIELDS


def _shard_over_batch(options: ServingOptions, model: ModelFacts) -> bool:
    degree = options.tensor_parallel_degree
    return (
        options.group_query_attention == "shard-over-batch"
        and model.num_heads != model.num_kv_heads
        and isinstance(degree, int)
        and degree > 1
        and (options.max_rolling_batch_size or 1) % degree == 0
    )


def _prompts_beyond_window(options: ServingOptions, model: ModelFacts) -> bool:
    limit = options.max_model_len or 0
    longest = (options.context_length_estimate or (limit,))[-1]
    if not options.continuous_batching and (options.max_rolling_batch_size or 1) > 1:
        longest = limit  # static batches are prefilled again at any length
    return model.sliding_window is not None and longest > model.sliding_window


_GROUP_DEFECTS = (
    Defect(
        "transformers-neuronx cuts the KV cache's values off to whole numbers, without a scale",
        lambda options, _model: options.kv_cache_quantize == "int8",
        ("kv_cache_quantize",),
        "set kv_cache_quantize=fp8, or leave it out",
    ),
    Defect(
        "transformers-neuronx mixes up the rows that a prefill graph has written to the divided cache",
        _shard_over_batch,
        ("group_query_attention",),
        "set replicated-heads, or leave it out",
    ),
)
_WINDOW_PREFILL = Defect(
    "transformers-neuronx lets a prompt look back one token more than the model's window",
    _prompts_beyond_window,
    ("n_positions", "context_length_estimate"),
    "set context_length_estimate, for static batches n_positions, to the window at most",
)
_WINDOW_DECODE = Defect(
    "transformers-neuronx moves the model's window over a BSH cache only, in continuous batching",
    lambda options, model: (
        options.continuous_batching
        and options.cache_layout != "BSH"
        and sequences_beyond_window(options, model)
    ),
    ("n_positions", "max_rolling_batch_size"),
    "set n_positions to the window at most, or max_rolling_batch_size=1 with prompts within the window",
    stops=True,
)


# These two sets are facts of the architectures' code, not of the options, so they stand here and not on the markers.
# What only llama's code reads, of the options that transformers-neuronx has. Blocks of the cache and prompts in chunks:
# seen right with llamas of all kinds of heads; a mistral fails while its graph is traced, which has no mask for them.
_LLAMA_ONLY = frozenset(
    {
        "attn_output_transposed",
        "duplicate_q_weight_sos",
        "enable_chunked_prefill",
        "fuse_mlp",
        "fused_rmsnorm_mlp",
        "fused_rmsnorm_qkv",
        "is_block_kv_layout",
        "mlp_out_weight_transpose",
        "multi_node",
        "sequence_parallel",
        "sequence_parallel_norm_threshold",
        "shard_over_sequence",
    }
)
# gptj and gpt_neox predate the shared decoder: their code reads the degree, the dtype and hardly anything else.
_DECODER = frozenset(
    {
        "attention_layout",
        "bf16_rms_norm",
        "cache_layout",
        "collectives_layout",
        "fuse_qkv",
        "group_query_attention",
        "kv_cache_quantize",
        "on_device_embedding",
        "on_device_generation",
        "qkv_tiling",
        "weight_tiling",
    }
)
_WITHOUT_GROUPS = _LLAMA_ONLY | {"bf16_rms_norm", "group_query_attention"}
_NO_CACHE = {"kv_cache_quantize": "transformers-neuronx stores its KV cache in dtype only"}
_NO_WEIGHTS = {"quantize": "transformers-neuronx has no quantised weights for it"}
# Seen on the real library: gpt2, opt and bloom answer with other tokens, whatever the degree.
_COLLECTIVES = (
    "transformers-neuronx computes wrong values with BSH collectives in another attention layout"
)
_NO_MOE_WEIGHTS = {
    "quantize": "transformers-neuronx fails to build its experts from quantised weights",
    "attention_layout": "transformers-neuronx has no BSH layout for experts",
}

_GPT2 = Capability(
    continuous_batching=False,
    token_buckets=False,
    prompt_batch_size=True,
    # The library has it for one sequence at a time, in static batches only.
    speculation=False,
    ignored_options=_WITHOUT_GROUPS,
    unsupported_options=_NO_CACHE,
    bsh_collectives=_COLLECTIVES,
    fields=TNX_FIELDS["gpt2"],
)
_GPT_NEOX = Capability(
    continuous_batching=False,
    pads_heads=False,
    context_buckets=False,
    token_buckets=False,
    speculation=False,
    degree_divides=("intermediate_size",),
    ignored_options=_LLAMA_ONLY | _DECODER | {"unroll"},
    unsupported_options=_NO_WEIGHTS,
    fields=TNX_FIELDS["gpt_neox"],
)

TNX: Final[Mapping[str, Capability]] = {
    "bloom": Capability(
        continuous_batching=False,
        speculation=False,
        ignored_options=_WITHOUT_GROUPS,
        unsupported_options=_NO_CACHE,
        bsh_collectives=_COLLECTIVES,
        fields=TNX_FIELDS["bloom"],
    ),
    "gpt2": _GPT2,
    "gpt_bigcode": replace(
        _GPT2,
        ignored_options=_GPT2.ignored_options | {"fuse_qkv", "qkv_tiling"},
        unsupported_options={
            **_NO_CACHE,
            "attention_layout": "transformers-neuronx has no BSH layout for it",
            "collectives_layout": _COLLECTIVES,
        },
        bsh_collectives="",
        fields=TNX_FIELDS["gpt_bigcode"],
    ),
    "gpt_neox": _GPT_NEOX,
    "gptj": replace(_GPT_NEOX, fields=TNX_FIELDS["gptj"]),
    "llama": Capability(defects=_GROUP_DEFECTS, fields=TNX_FIELDS["llama"]),
    "mistral": Capability(
        speculation=False,
        ignored_options=_LLAMA_ONLY,
        defects=(*_GROUP_DEFECTS, _WINDOW_PREFILL, _WINDOW_DECODE),
        fields=TNX_FIELDS["mistral"],
    ),
    "mixtral": Capability(
        speculation=False,
        whole_experts=True,
        ignored_options=_LLAMA_ONLY | {"weight_tiling"},
        unsupported_options=_NO_MOE_WEIGHTS,
        defects=(*_GROUP_DEFECTS, window_ignored("transformers-neuronx")),
        fields=TNX_FIELDS["mixtral"],
    ),
    "opt": Capability(
        continuous_batching=False,
        speculation=False,
        ignored_options=_WITHOUT_GROUPS,
        unsupported_options={
            **_NO_CACHE,
            "attention_layout": "transformers-neuronx has no BSH layout for it",
            "collectives_layout": _COLLECTIVES,
        },
        fields=TNX_FIELDS["opt"],
    ),
}
"""Architectures of transformers-neuronx, by `model_type`."""
