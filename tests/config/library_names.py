"""Names that the libraries really take, recorded from their sources. Data only; nothing here is ours.

TNX: transformers-neuronx 0.13, commit 1ade6d7 of aws-neuron/transformers-neuronx: config.py, and the constructor of
llama/model.py (`from_pretrained` hands its keywords on to it; module.py).
NXDI: neuronx-distributed-inference 0.9.0, commit 4bcdc54 of aws-neuron/neuronx-distributed-inference: models/config.py,
every `kwargs.pop` and named argument of the constructors; `KV_QUANTIZATION` from inference_demo.py.
"""

TNX_CONSTRUCTOR = frozenset(
    [
        "n_positions",
        "batch_size",
        "amp",
        "tp_degree",
        "context_length_estimate",
        "context_unroll",
        "unroll",
        "neuron_config",
        "prefixed_length",
    ]
)
TNX_NEURON_CONFIG = frozenset(
    [
        "sparse_attn",
        "quant",
        "kv_cache_quant",
        "continuous_batching",
        "attention_layout",
        "collectives_layout",
        "cache_layout",
        "padding_side",
        "group_query_attention",
        "sequence_parallel_norm",
        "sequence_parallel_norm_threshold",
        "bf16_rms_norm",
        "on_device_embedding",
        "on_device_generation",
        "all_reduce_dtype",
        "cast_logits_dtype",
        "fuse_qkv",
        "qkv_tiling",
        "weight_tiling",
        "mlp_in_weight_tiling_permute_order",
        "mlp_out_weight_tiling_permute_order",
        "log_softmax_scores",
        "shard_over_sequence",
        "output_all_logits",
        "attn_output_transposed",
        "fused_rmsnorm_qkv",
        "fused_rmsnorm_mlp",
        "mlp_out_weight_transpose",
        "fuse_mlp",
        "is_eagle_target",
        "is_eagle_draft",
        "has_pre_attention_norm",
        "compilation_worker_count",
        "duplicate_q_weight_sos",
        "lhs_aligned",
        "use_2d_cache_ids",
    ]
)
TNX_QUANTIZATION = frozenset(
    ["quant_dtype", "dequant_dtype", "quantize_method", "quantize_attn", "no_quantize_list"]
)
TNX_KV_CACHE_QUANTIZATION = frozenset(["quant_dtype", "dequant_dtype", "quantize_method"])
TNX_CONTINUOUS_BATCHING = frozenset(
    [
        "max_num_seqs",
        "batch_size_for_shared_caches",
        "max_model_len",
        "optimized_paged_attention",
        "enable_chunked_prefill",
    ]
)
TNX_GENERATION = frozenset(
    [
        "max_length",
        "do_sample",
        "top_k",
        "top_p",
        "top_p_min_tokens",
        "global_top_k",
        "eos_token_id",
        "temperature",
        "dynamic",
        "deterministic",
        "per_batch_line",
    ]
)
TNX_NESTED = {
    "quant": TNX_QUANTIZATION,
    "kv_cache_quant": TNX_KV_CACHE_QUANTIZATION,
    "continuous_batching": TNX_CONTINUOUS_BATCHING,
    "on_device_generation": TNX_GENERATION,
}
"""Keyword of `NeuronConfig` to those of the object that it takes."""
TNX_METHODS = frozenset(
    [
        "from_pretrained",
        "load",
        "save",
        "enable_speculative_decoder",
        "init_cache_engine",
        "NeuronConfig",
    ]
)
TNX_FLAGS = frozenset(
    [
        "-O",
        "--enable-mixed-precision-accumulation",
        "--enable-saturate-infinity",
        "--tensorizer-options",
        "--internal-hlo2tensorizer-options",
    ]
)
"""Of the compiler; source: its reference guide, and the flags that the libraries' own demos set."""

NXDI_NEURON_CONFIG = frozenset(
    [
        "activation_quantization_type",
        "allow_input_truncation",
        "apply_seq_ids_mask",
        "async_mode",
        "attention_dp_degree",
        "attention_dtype",
        "attn_block_cte_nki_kernel_enabled",
        "attn_block_tkg_nki_kernel_cache_update",
        "attn_block_tkg_nki_kernel_cascaded_attention",
        "attn_block_tkg_nki_kernel_disable_gpsimd_sb2sb",
        "attn_block_tkg_nki_kernel_enabled",
        "attn_block_tkg_nki_kernel_use_online_softmax",
        "attn_cls",
        "attn_kernel_enabled",
        "attn_tkg_builtin_kernel_enabled",
        "attn_tkg_nki_kernel_enabled",
        "batch_size",
        "bucket_n_active_tokens",
        "buckets",
        "cast_type",
        "cc_pipeline_tiling_factor",
        "chunked_prefill_config",
        "context_encoding_buckets",
        "cp_degree",
        "ctx_batch_size",
        "disable_argmax_kernel",
        "disable_kv_cache_tiling",
        "disable_numeric_cc_token",
        "dma_order_config",
        "draft_model_modules_to_not_convert",
        "eagle_rolling_buffer_kernel_enabled",
        "enable_bucketing",
        "enable_cte_modular_flow",
        "enable_eagle_draft_input_norm",
        "enable_eagle_speculation",
        "enable_fused_speculation",
        "enable_output_completion_notifications",
        "enable_spill_reload_dge",
        "enable_ve_data_parallel",
        "ep_degree",
        "ep_dispatch_cc_option",
        "expert_mlp_nki_kernel_enabled",
        "flash_decoding_enabled",
        "fused_qkv",
        "fused_rmsnorm_skip_gamma",
        "is_block_kv_layout",
        "is_continuous_batching",
        "is_eagle3",
        "is_eagle_draft",
        "is_full_model_shuffled",
        "is_medusa",
        "is_mxfp4_compute",
        "is_prefix_caching",
        "k_cache_transposed",
        "kv_cache_batch_size",
        "kv_cache_padding_size",
        "kv_cache_quant",
        "kv_quant_config",
        "layer_boundary_markers",
        "lm_head_pad",
        "lm_head_pad_alignment_size",
        "local_ranks_size",
        "logical_nc_config",
        "logical_neuron_cores",
        "lora_config",
        "max_batch_size",
        "max_context_length",
        "max_length",
        "max_new_tokens",
        "medusa_speculation_length",
        "medusa_tree",
        "mlp_cp_degree",
        "mlp_kernel_enabled",
        "mlp_kernel_fuse_residual_add",
        "mlp_tkg_nki_kernel_enabled",
        "modules_to_not_convert",
        "moe_fused_nki_kernel_enabled",
        "n_active_tokens",
        "n_positions",
        "num_medusa_heads",
        "on_cpu",
        "on_device_sampling_config",
        "out_proj_kernel_enabled",
        "output_logits",
        "overrides_torch_dtype",
        "pa_block_size",
        "pa_num_blocks",
        "padded_hidden_size",
        "padded_intermediate_size",
        "padding_side",
        "pp_degree",
        "pre_rope_rmsnorm",
        "prefix_buckets",
        "qk_layernorm",
        "qkv_cte_nki_kernel_fuse_rope",
        "qkv_kernel_enabled",
        "qkv_kernel_fuse_residual_add",
        "qkv_kernel_nbsd_layout",
        "qkv_nki_kernel_enabled",
        "quantization_block_axis",
        "quantization_block_size",
        "quantization_dtype",
        "quantization_scale_dtype",
        "quantization_type",
        "quantize_clamp_bound",
        "quantized",
        "quantized_checkpoints_path",
        "quantized_mlp_kernel_enabled",
        "rmsnorm_quantize_kernel_enabled",
        "router_topk_nki_kernel_enabled",
        "rpl_reduce_dtype",
        "save_sharded_checkpoint",
        "scratchpad_page_size",
        "seq_len",
        "seq_len_threshold_for_cc_tiling",
        "sequence_parallel_enabled",
        "shared_mlp_nki_kernel_enabled",
        "skip_sharding",
        "skip_warmup",
        "spec_batch_size",
        "speculation_length",
        "start_rank_id",
        "strided_context_parallel_kernel_enabled",
        "switch_cc",
        "target",
        "tensor_capture_config",
        "tensor_replacement_config",
        "tkg_batch_size",
        "token_generation_batches",
        "token_generation_buckets",
        "token_tree_config",
        "torch_dtype",
        "tp_degree",
        "vocab_parallel",
        "weight_gather_seq_len_threshold",
        "weights_to_skip_layout_optimization",
        "windowed_context_encoding_size",
        "world_size",
    ]
)
NXDI_MOE_NEURON_CONFIG = NXDI_NEURON_CONFIG | frozenset(
    [
        "blockwise_matmul_config",
        "capacity_factor",
        "disable_normalize_top_k_affinities",
        "early_expert_affinity_modulation",
        "fused_shared_experts",
        "gate_clamp_lower_limit",
        "gate_clamp_upper_limit",
        "glu_mlp",
        "glu_type",
        "hidden_act_bias",
        "hidden_act_scaling_factor",
        "hybrid_sharding_config",
        "moe_ep_degree",
        "moe_mask_padded_tokens",
        "moe_tp_degree",
        "return_expert_index",
        "return_router_logits",
        "router_config",
        "shared_experts_sequence_parallel_enabled",
        "transpose_shared_experts_weights",
        "up_clamp_lower_limit",
        "up_clamp_upper_limit",
        "use_index_calc_kernel",
    ]
)
NXDI_ON_DEVICE_SAMPLING = frozenset(
    [
        "deterministic",
        "do_sample",
        "dynamic",
        "global_topk",
        "on_device_sampling_config",
        "sampling_dp_degree",
        "temperature",
        "top_k",
        "top_k_kernel_enabled",
        "top_p",
    ]
)
NXDI_KV_QUANTIZATION = frozenset(["quant_dtype", "direct_cast", "k_quant_method", "v_quant_method"])
NXDI_LORA = frozenset(
    [
        "batch_size",
        "dynamic_multi_lora",
        "lora_shard_linear_layer",
        "max_lora_rank",
        "max_loras",
        "target_modules",
    ]
)
"""Those that are written."""
NXDI_NESTED = {
    "on_device_sampling_config": NXDI_ON_DEVICE_SAMPLING,
    "kv_quant_config": NXDI_KV_QUANTIZATION,
    "lora_config": NXDI_LORA,
}
NXDI_METHODS = frozenset(
    {"LoraServingConfig", "NeuronConfig", "NeuronBaseForCausalLM", "compile"}
    | {"enable_token_generation"}
)
NXDI_OTHER = frozenset({"fused_spec_config.draft_model_path"})
"""Beside `NeuronConfig`: a field of `InferenceConfig` and of the object in it."""

VARIABLES = frozenset(
    {"NEURON_COMPILE_CACHE_URL", "NEURON_LOGICAL_NC_CONFIG", "XLA_HANDLE_SPECIAL_SCALAR"}
    | {"UNSAFE_FP8FNCAST"}
)
"""Environment variables that the libraries and the runtime read."""
