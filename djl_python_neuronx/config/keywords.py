"""Keywords of the libraries' `NeuronConfig` that `override_neuron_config` must not set.

Sources: transformers-neuronx 0.13 (config.py) and NxD Inference 0.9 (models/config.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_FOLLOW: Mapping[str, tuple[str, ...]] = {
    "model_loader": ("on_cpu",),
    "tensor_parallel_degree": ("tp_degree", "world_size", "start_rank_id", "local_ranks_size"),
    "dtype": ("amp", "torch_dtype", "overrides_torch_dtype"),
    "skip_warmup": ("skip_warmup",),
    "n_positions": (
        *("n_positions", "seq_len", "max_length", "max_new_tokens", "n_active_tokens"),
        "token_generation_buckets",
    ),
    "context_length_estimate": (
        *("context_length_estimate", "context_encoding_buckets", "max_context_length", "buckets"),
        *("enable_bucketing", "bucket_n_active_tokens", "allow_input_truncation"),
    ),
    "max_rolling_batch_size": (
        *("batch_size", "ctx_batch_size", "tkg_batch_size", "max_batch_size", "spec_batch_size"),
        *("kv_cache_batch_size", "kv_cache_padding_size"),
        *("continuous_batching", "apply_seq_ids_mask"),
    ),
    "on_device_generation": ("on_device_generation", "on_device_sampling_config"),
    "padding_side": ("use_2d_cache_ids", "lhs_aligned"),
    "enable_prefix_caching": ("is_prefix_caching",),
    "enable_chunked_prefill": ("chunked_prefill_config",),
    "pipeline_parallel_degree": ("pp_degree",),
    "rolling_batch_strategy": ("is_continuous_batching",),
    "quantize": ("quant", "quantized", "quantization_dtype"),
    "kv_cache_quantize": ("kv_cache_quant", "kv_quant_config"),
    "speculative_draft_model": ("enable_fused_speculation",),
    "speculative_length": ("speculation_length",),
    "enable_eagle_speculation": ("is_eagle_target", "is_eagle_draft", "enable_eagle_speculation"),
    "ep_degree": ("ep_degree",),
    "logical_nc_config": ("logical_neuron_cores",),
    "async_execution": ("async_mode",),
    "save_sharded_checkpoint": ("skip_sharding",),
}
DERIVED: Final[Mapping[str, str]] = {
    keyword: option for option, keywords in _FOLLOW.items() for keyword in keywords
}
"""Keyword to the option that it follows from."""

_SHAPE = "it changes what a call returns, which the server relies on"
RESERVED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("output_all_logits", "log_softmax_scores"), _SHAPE),
    **dict.fromkeys(("return_expert_index", "return_router_logits"), _SHAPE),
    "sparse_attn": "it is an object, which no file can hold",
    "lora_config": "adapters are not served",
}
"""Keyword that no configuration may set, to the reason."""
