"""What `override_neuron_config` must not hold: keywords that follow from options, and those that nobody may set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from djl_python_neuronx.config.findings import Finding
from djl_python_neuronx.config.options import ServingOptions

DERIVED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("tp_degree", "world_size"), "tensor_parallel_degree"),
        **dict.fromkeys(("start_rank_id", "local_ranks_size"), "tensor_parallel_degree"),
        "pp_degree": "pipeline_parallel_degree",
        "ep_degree": "ep_degree",
        **dict.fromkeys(("amp", "torch_dtype", "overrides_torch_dtype"), "dtype"),
        **dict.fromkeys(("batch_size", "continuous_batching"), "max_rolling_batch_size"),
        **dict.fromkeys(("ctx_batch_size", "tkg_batch_size"), "max_rolling_batch_size"),
        **dict.fromkeys(("max_batch_size", "kv_cache_batch_size"), "max_rolling_batch_size"),
        **dict.fromkeys(("kv_cache_padding_size", "spec_batch_size"), "max_rolling_batch_size"),
        "apply_seq_ids_mask": "max_rolling_batch_size",
        "is_continuous_batching": "rolling_batch_strategy",
        **dict.fromkeys(("n_positions", "seq_len", "max_length", "max_new_tokens"), "n_positions"),
        **dict.fromkeys(("token_generation_buckets", "n_active_tokens"), "n_positions"),
        **dict.fromkeys(
            ("context_length_estimate", "context_encoding_buckets"), "context_length_estimate"
        ),
        **dict.fromkeys(("max_context_length", "buckets"), "context_length_estimate"),
        **dict.fromkeys(("enable_bucketing", "bucket_n_active_tokens"), "context_length_estimate"),
        "allow_input_truncation": "context_length_estimate",
        **dict.fromkeys(("quant", "quantized", "quantization_dtype"), "quantize"),
        **dict.fromkeys(("kv_cache_quant", "kv_quant_config"), "kv_cache_quantize"),
        **dict.fromkeys(
            ("on_device_generation", "on_device_sampling_config"), "on_device_generation"
        ),
        **dict.fromkeys(("use_2d_cache_ids", "lhs_aligned"), "padding_side"),
        "enable_fused_speculation": "speculative_draft_model",
        "speculation_length": "speculative_length",
        **dict.fromkeys(("is_eagle_target", "is_eagle_draft"), "enable_eagle_speculation"),
        "enable_eagle_speculation": "enable_eagle_speculation",
        "is_prefix_caching": "enable_prefix_caching",
        "chunked_prefill_config": "enable_chunked_prefill",
        "async_mode": "async_execution",
        "logical_neuron_cores": "logical_nc_config",
        "on_cpu": "model_loader",
        "skip_warmup": "skip_warmup",
        "skip_sharding": "save_sharded_checkpoint",
    }
)
"""Keywords that follow from an option, to that option: `override_neuron_config` must not set them."""

_SHAPE = "it changes what a call returns, which the server relies on"
RESERVED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("output_all_logits", "log_softmax_scores"), _SHAPE),
        **dict.fromkeys(("return_expert_index", "return_router_logits"), _SHAPE),
        "sparse_attn": "it is an object, which no file can hold",
        "lora_config": "adapters are not served",
    }
)
"""Keywords that no configuration may set, to the reason."""


def findings(options: ServingOptions) -> Iterator[Finding]:
    """What is wrong with the names in `override_neuron_config`, as far as no library is needed to tell."""
    names = options.override_neuron_config or {}
    if others := [name for name in names if name not in {*DERIVED, *RESERVED}]:
        problem = f"whether the library knows {', '.join(others)} is seen when it loads"
        yield Finding(("override_neuron_config",), problem, "note")
    for name in names:
        if name in DERIVED:
            advice = f"it follows from {DERIVED[name]}; set option.{DERIVED[name]} instead"
        elif name in RESERVED:
            advice = f"it cannot be set: {RESERVED[name]}; remove it"
        else:
            continue
        yield Finding(("override_neuron_config",), f"{name}: {advice}")
