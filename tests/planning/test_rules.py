"""Rules across options: for each, what breaks it and the nearest that does not."""

from typing import NamedTuple

import pytest

from djl_python_neuronx.config.options import MAX_ROWS, ServingOptions, option
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.rules import RULES, broken_rules, conflicts

BACKEND_RULES = {name: neuron.rules for name, neuron in NEURON_BACKENDS.items()}

PER_ROW = {"do_sample": True, "dynamic": True, "per_batch_line": True}
DRAFT = {"speculative_draft_model": "draft"}
LOOKUP = {"ngram_prompt_lookup_max": 3}
KERNEL = {
    "attn_block_tkg_nki_kernel_enabled": True,
    "qkv_nki_kernel_enabled": True,
    "fuse_qkv": True,
}


class Row(NamedTuple):
    """A finding's first option and its level, options that break the rule, and the changes that mend them."""

    option: str
    level: str
    breaks: dict
    mends: dict


_LORA = {
    "adapters": {"a": "/a", "b": "/b"},
    "max_loras": 2,
    "max_lora_rank": 8,
    "lora_target_modules": ("q_proj",),
}
GENERAL = [
    *(
        Row(name, "error", breaks={name: value}, mends={"enable_lora": True})
        for name, value in _LORA.items()
    ),
    Row("model_id", "error", breaks={"model_id": None}, mends={"model_id": "m"}),
    Row(
        "batch_size",
        "error",
        breaks={"batch_size": 2, "rolling_batch": "tnx"},
        mends={"batch_size": 1},
    ),
    Row(
        "batch_size",
        "error",
        breaks={"batch_size": 2, "rolling_batch": "vllm"},
        mends={"rolling_batch": "auto"},
    ),
    Row(
        "async_mode",
        "error",
        breaks={"async_mode": True, "rolling_batch": "tnx"},
        mends={"async_mode": False},
    ),
    Row(
        "async_mode",
        "error",
        breaks={"async_mode": True, "rolling_batch": "vllm"},
        mends={"rolling_batch": "disable"},
    ),
    Row(
        "batch_size",
        "warning",
        breaks={"batch_size": 4, "max_rolling_batch_size": 3},
        mends={"max_rolling_batch_size": 4},
    ),
    Row(
        "max_rolling_batch_size",
        "error",
        breaks={"max_rolling_batch_size": MAX_ROWS + 1, "rolling_batch": "tnx"},
        mends={"max_rolling_batch_size": MAX_ROWS},
    ),
    Row(
        "context_length_estimate",
        "error",
        breaks={"context_length_estimate": (128, 512), "n_positions": 511},
        mends={"n_positions": 512},
    ),
    Row(
        "context_length_estimate",
        "error",
        breaks={"context_length_estimate": (512,), "n_positions": (128, 256)},
        mends={"n_positions": (128, 512)},
    ),
    Row(
        "max_join_wait_ms",
        "error",
        breaks={"max_join_wait_ms": 2000, "predict_timeout": 2},
        mends={"max_join_wait_ms": 1999},
    ),
    Row(
        "max_join_wait_ms",
        "error",
        breaks={"max_join_wait_ms": 2000, "predict_timeout": 1},
        mends={"queue_timeout": 3},
    ),
    Row(
        "max_join_wait_ms",
        "error",
        breaks={"max_join_wait_ms": 2000, "queue_timeout": 1},
        mends={"max_join_wait_ms": 999},
    ),
    Row(
        "rolling_batch_strategy",
        "note",
        breaks={"rolling_batch_strategy": "continuous_batching", "rolling_batch": "disable"},
        mends={"async_mode": True},
    ),
    Row("model_loader", "note", breaks={"model_loader": "optimum"}, mends={"model_loader": "auto"}),
    Row("model_loader", "note", breaks={"model_loader": "vllm"}, mends={"model_loader": "tnx"}),
    Row(
        "tensor_parallel_degree",
        "error",
        breaks={"tensor_parallel_degree": "max", "replicas": 2},
        mends={"tensor_parallel_degree": 2},
    ),
    Row(
        "batch_size",
        "note",
        breaks={"batch_size": 4},
        mends={"batch_size": 1},
    ),
    Row(
        "replicas",
        "error",
        breaks={"engine_process": False, "replicas": "max"},
        mends={"replicas": 1},
    ),
    Row(
        "speculative_draft_model",
        "error",
        breaks={**DRAFT, "speculative_length": 0},
        mends={"speculative_length": 1},
    ),
    Row("speculative_length", "warning", breaks={"speculative_length": 4}, mends=DRAFT),
    Row("speculative_length", "warning", breaks={"speculative_length": 4}, mends=LOOKUP),
    Row(
        "ngram_prompt_lookup_max",
        "error",
        breaks={**LOOKUP, "speculative_length": 0},
        mends={"speculative_length": 1},
    ),
    Row(
        "ngram_prompt_lookup_max",
        "error",
        breaks={**LOOKUP, **DRAFT},
        mends={"speculative_draft_model": None},
    ),
    Row(
        "ngram_prompt_lookup_max",
        "error",
        breaks={**LOOKUP, "enable_chunked_prefill": True},
        mends={"enable_chunked_prefill": False},
    ),
    Row(
        "speculative_length",
        "warning",
        breaks={"speculative_length": 6},
        mends={"speculative_length": 5},
    ),
    Row(
        "speculative_length",
        "warning",
        breaks={"speculative_length": 1},
        mends={"speculative_length": 0},
    ),
    Row("draft_model_tp_size", "warning", breaks={"draft_model_tp_size": 1}, mends=DRAFT),
    Row(
        "draft_model_compiled_path",
        "warning",
        breaks={"draft_model_compiled_path": "p"},
        mends=DRAFT,
    ),
    Row(
        "speculative_draft_model",
        "error",
        breaks={**DRAFT, "enable_chunked_prefill": True},
        mends={"enable_chunked_prefill": False},
    ),
    Row(
        "enable_chunked_prefill",
        "error",
        breaks={"enable_chunked_prefill": True, "is_block_kv_layout": False},
        mends={"is_block_kv_layout": True},
    ),
    Row(
        "pa_block_size", "warning", breaks={"pa_block_size": 32}, mends={"is_block_kv_layout": True}
    ),
    Row(
        "pa_num_blocks",
        "warning",
        breaks={"pa_num_blocks": 32},
        mends={"enable_chunked_prefill": True},
    ),
    *(
        Row(
            name,
            "error",
            breaks={name: True, "rolling_batch_strategy": "naive_rolling_batch"},
            mends={"rolling_batch_strategy": "continuous_batching"},
        )
        for name in ("enable_chunked_prefill", "is_block_kv_layout")
    ),
    Row(
        "padding_side",
        "error",
        breaks={"padding_side": "left", "rolling_batch_strategy": "continuous_batching"},
        mends={"padding_side": "right"},
    ),
    Row(
        "on_device_generation",
        "error",
        breaks={"on_device_generation": {**PER_ROW, "top_k": 65, "global_top_k": 64}},
        mends={"on_device_generation": {**PER_ROW, "top_k": 64, "global_top_k": 64}},
    ),
    Row(
        "on_device_generation",
        "error",
        breaks={"on_device_generation": {"do_sample": True, "per_batch_line": True}},
        mends={"on_device_generation": PER_ROW},
    ),
    Row(
        "on_device_default_top_k",
        "warning",
        breaks={"on_device_default_top_k": "global_top_k"},
        mends={"on_device_generation": True},
    ),
    Row(
        "on_device_generation",
        "warning",
        breaks={"on_device_generation": {"temperature": 0.5}},
        mends={"on_device_generation": {"temperature": 0.5, "do_sample": True}},
    ),
    Row(
        "on_device_generation",
        "warning",
        breaks={"on_device_generation": {"top_p": 0.5}},
        mends={"on_device_generation": {"top_p": 0.5, "dynamic": True}},
    ),
    Row(
        "partition_schema",
        "error",
        breaks={"partition_schema": "optimum", "save_mp_checkpoint_path": "p"},
        mends={"partition_schema": None},
    ),
    Row(
        "partition_schema",
        "warning",
        breaks={"partition_schema": "optimum"},
        mends={"partition_schema": None},
    ),
    Row(
        "load_split_model",
        "error",
        breaks={"load_split_model": True, "partition_schema": "safetensors"},
        mends={"load_split_model": False},
    ),
    Row(
        "load_split_model",
        "error",
        breaks={"load_split_model": True, "save_mp_checkpoint_path": "p"},
        mends={"save_mp_checkpoint_path": None},
    ),
    Row(
        "quantize",
        "warning",
        breaks={"quantize": "static_int8", "dtype": "float32"},
        mends={"dtype": "bfloat16"},
    ),
]
WHOLE_HEADS = {"attention_layout": "BSH", "group_query_attention": "replicated-heads"}
SKIP = {"fused_rmsnorm_skip_gamma": True, "fused_rmsnorm_qkv": True, "fuse_qkv": True}
NORM = {"fused_rmsnorm_qkv": True, "fuse_qkv": True, **WHOLE_HEADS}
ORDERS = ("mlp_in_weight_tiling_permute_order", "mlp_out_weight_tiling_permute_order")
BSH = {"cache_layout": "BSH", "n_positions": 512, "max_rolling_batch_size": 4}
CHUNKS = {"enable_chunked_prefill": True}
ONE_LENGTH = {**BSH, "context_length_estimate": (512,)}
TNX = [
    Row("qkv_tiling", "error", breaks={"qkv_tiling": True}, mends={"fuse_qkv": True}),
    Row("fuse_mlp", "error", breaks={"fuse_mlp": True}, mends={"mlp_out_weight_transpose": True}),
    Row("fuse_mlp", "error", breaks={"fuse_mlp": True}, mends={"multi_node": True}),
    Row(
        "fuse_mlp",
        "error",
        breaks={"multi_node": True, "mlp_out_weight_transpose": False},
        mends={"mlp_out_weight_transpose": None},
    ),
    Row(
        "fused_rmsnorm_qkv", "warning", breaks={**NORM, "fuse_qkv": None}, mends={"fuse_qkv": True}
    ),
    Row(
        "fused_rmsnorm_qkv",
        "warning",
        breaks={**NORM, "attention_layout": "HSB"},
        mends={"attention_layout": "BSH"},
    ),
    Row(
        "fused_rmsnorm_qkv",
        "warning",
        breaks={**NORM, "group_query_attention": "shard-over-heads"},
        mends=WHOLE_HEADS,
    ),
    Row(
        "fused_rmsnorm_qkv",
        "warning",
        breaks={**NORM, "sequence_parallel": True},
        mends={"sequence_parallel": False},
    ),
    Row(
        "fused_rmsnorm_mlp",
        "warning",
        breaks={"fused_rmsnorm_mlp": True, "attention_layout": "BSH"},
        mends=WHOLE_HEADS,
    ),
    *(
        Row(name, "error", breaks={name: order, "weight_tiling": True}, mends={name: (1, 2, 0, 3)})
        for name in ORDERS
        for order in ((3, 2, 1, 0), (1, 1, 2, 3))
    ),
    *(
        Row(name, "warning", breaks={name: (1, 2, 0, 3)}, mends={"weight_tiling": True})
        for name in ORDERS
    ),
    Row(
        "mlp_out_weight_transpose",
        "warning",
        breaks={"mlp_out_weight_transpose": True, "weight_tiling": True},
        mends={"fuse_mlp": True},
    ),
    Row(
        "cache_layout",
        "error",
        breaks={**ONE_LENGTH, "rolling_batch_strategy": "naive_rolling_batch"},
        mends={"rolling_batch_strategy": None},
    ),
    Row(
        "cache_layout",
        "error",
        breaks={**ONE_LENGTH, "max_rolling_batch_size": 1},
        mends={"max_rolling_batch_size": 2},
    ),
    Row(
        "cache_layout",
        "error",
        breaks={**BSH, "context_length_estimate": (128, 512)},
        mends={"context_length_estimate": (512,)},
    ),
    Row(
        "cache_layout",
        "error",
        breaks={**BSH, "n_positions": (128, 512)},
        mends={"n_positions": (512,)},
    ),
    Row("is_block_kv_layout", "error", breaks={"is_block_kv_layout": True}, mends=CHUNKS),
    Row("enable_prefix_caching", "note", breaks={"enable_prefix_caching": True}, mends=CHUNKS),
    Row(
        "enable_chunked_prefill",
        "error",
        breaks={**CHUNKS, "cache_layout": "SBH"},
        mends={"cache_layout": "BSH"},
    ),
    Row(
        "pa_block_size",
        "error",
        breaks={**CHUNKS, "pa_block_size": 48},
        mends={"pa_block_size": 32},
    ),
    Row(
        "pa_block_size",
        "error",
        breaks={**CHUNKS, "pa_block_size": 64, "n_positions": 64},
        mends={"n_positions": 65},
    ),
    Row(
        "enable_chunked_prefill",
        "error",
        breaks={**CHUNKS, "group_query_attention": "shard-over-batch"},
        mends={"group_query_attention": "replicated-heads"},
    ),
    Row(
        "kv_cache_quantize",
        "error",
        breaks={**CHUNKS, "kv_cache_quantize": "fp8"},
        mends={"kv_cache_quantize": None},
    ),
    Row(
        "shard_over_sequence",
        "error",
        breaks={**CHUNKS, "shard_over_sequence": True},
        mends={"shard_over_sequence": False},
    ),
    Row(
        "on_device_generation",
        "error",
        breaks={**CHUNKS, "on_device_generation": True},
        mends={"on_device_generation": {"do_sample": False}},
    ),
    Row(
        "on_device_generation",
        "error",
        breaks={**CHUNKS, "on_device_generation": {"do_sample": True, "top_k": 4}},
        mends={"on_device_generation": {"do_sample": False}},
    ),
    Row(
        "on_device_generation",
        "error",
        breaks={**CHUNKS, "on_device_generation": {"do_sample": True}},
        mends={"enable_chunked_prefill": False},
    ),
    Row(
        "cache_layout",
        "error",
        breaks={**ONE_LENGTH, "group_query_attention": "shard-over-batch"},
        mends={"group_query_attention": "replicated-heads"},
    ),
    Row(
        "shard_over_sequence",
        "error",
        breaks={**ONE_LENGTH, "shard_over_sequence": True},
        mends={"cache_layout": "SBH"},
    ),
    Row(
        "duplicate_q_weight_sos",
        "warning",
        breaks={"duplicate_q_weight_sos": True},
        mends={"shard_over_sequence": True},
    ),
    Row(
        "sequence_parallel_norm_threshold",
        "warning",
        breaks={"sequence_parallel_norm_threshold": 512},
        mends={"sequence_parallel": True},
    ),
    Row(
        "speculative_length",
        "error",
        breaks={**LOOKUP, "speculative_length": 128, "context_length_estimate": (64, 128)},
        mends={"speculative_length": 127},
    ),
    *(
        row
        for drafts in (DRAFT, LOOKUP)
        for row in (
            Row(
                "rolling_batch_strategy",
                "error",
                breaks={**drafts, "rolling_batch_strategy": "naive_rolling_batch"},
                mends={"rolling_batch_strategy": "continuous_batching"},
            ),
            Row(
                "cache_layout",
                "error",
                breaks={**drafts, **ONE_LENGTH},
                mends={"cache_layout": "SBH"},
            ),
            Row(
                "cache_layout",
                "error",
                breaks={**drafts, **ONE_LENGTH},
                mends={"speculative_length": 0},
            ),
            Row(
                next(iter(drafts)),
                "error",
                breaks={**drafts, "on_device_generation": True},
                mends={"on_device_generation": None},
            ),
            Row(
                next(iter(drafts)),
                "error",
                breaks={**drafts, "shard_over_sequence": True},
                mends={"shard_over_sequence": None},
            ),
        )
    ),
    Row(
        "speculative_length", "error", breaks={**LOOKUP, "n_positions": 6}, mends={"n_positions": 7}
    ),
    Row(
        "speculative_length",
        "error",
        breaks={**DRAFT, "n_positions": (6,)},
        mends={"n_positions": (6, 7)},
    ),
    Row(
        "speculative_length",
        "error",
        breaks={**DRAFT, "n_positions": (5, 64)},
        mends={"n_positions": (6, 64)},
    ),
    Row(
        "speculative_length",
        "error",
        breaks={**LOOKUP, "speculative_length": 128, "n_positions": 512},
        mends={"speculative_length": 127},
    ),
    Row(
        "speculative_length",
        "error",
        breaks={**LOOKUP, "speculative_length": 128, "n_positions": 512},
        mends={"n_positions": (256, 512)},
    ),
    *(
        Row(
            "sequence_parallel",
            "error",
            breaks={**LOOKUP, "sequence_parallel": True, **norm},
            mends=change,
        )
        for norm, change in (
            ({"sequence_parallel_norm_threshold": 5}, {"sequence_parallel_norm_threshold": 6}),
            ({"sequence_parallel_norm_threshold": 5}, {"speculative_length": 4}),
            ({"speculative_length": 2048}, {"speculative_length": 2047}),
        )
    ),
    Row(
        "on_device_generation",
        "error",
        breaks={"on_device_generation": {"do_sample": True, "global_top_k": 64}},
        mends={"on_device_generation": {"do_sample": True, "global_top_k": 64, "dynamic": True}},
    ),
]
CORES = {"tensor_parallel_degree": 8, "max_rolling_batch_size": 8}
_OF_DRAFTS: dict[str, tuple[object, object]] = {
    "on_device_generation": ({}, None),
    "rolling_batch_strategy": ("naive_rolling_batch", "continuous_batching"),
    "token_generation_batches": (1, None),
    "shard_over_sequence": (True, None),
    "attention_dp_degree": (2, 1),
    "cp_degree": (2, 1),
    "enable_prefix_caching": (True, None),
    "nxdi_model_code": ("code", None),
}
"""Option to a value that excludes drafts of the engine, and one that does not."""
_FUSED = {"speculative_draft_model": "draft"}
_EAGLE = {**_FUSED, "draft_model_kind": "eagle"}
_OF_FUSED: dict[str, tuple[object, object]] = {
    "async_execution": (True, None),
    "output_logits": (True, False),
    "rolling_batch_strategy": ("naive_rolling_batch", "continuous_batching"),
    "token_generation_batches": (1, None),
    "shard_over_sequence": (True, None),
    "attention_dp_degree": (2, 1),
    "cp_degree": (2, 1),
    "enable_lora": (True, False),
    "quantize": ("static_int8", None),
    "nxdi_model_code": ("code", None),
}
"""Option to a value that excludes a fused draft model, and one that does not."""
NXDI = [
    *(
        Row(
            name,
            "error",
            breaks={**CORES, **breaks, "enable_lora": True},
            mends={"enable_lora": False},
        )
        for breaks in (
            {"fuse_qkv": True},
            {"fused_rmsnorm_mlp": True},
            {"out_proj_kernel_enabled": True},
            {"sequence_parallel": True},
            {"token_generation_batches": (1, 2)},
            {"cp_degree": 2},
            {"attention_dp_degree": 2},
            {"shard_over_sequence": True},
            {"windowed_context_encoding_size": 64},
            {"nxdi_model_code": "code", "trust_remote_code": True},
        )
        for name in [next(iter(breaks))]
    ),
    *(
        Row(
            "ngram_prompt_lookup_max", "error", breaks={**LOOKUP, name: breaks}, mends={name: mends}
        )
        for name, (breaks, mends) in _OF_DRAFTS.items()
    ),
    *(
        Row("speculative_length", "error", breaks={**LOOKUP, **breaks}, mends=mends)
        for breaks, mends in (
            (
                {"speculative_length": 7, "context_length_estimate": "8,64"},
                {"speculative_length": 6},
            ),
            ({"speculative_length": 7, "n_positions": "9,64"}, {"n_positions": "10,64"}),
        )
    ),
    Row(
        "is_block_kv_layout",
        "error",
        breaks={"is_block_kv_layout": True},
        mends={"enable_prefix_caching": True},
    ),
    Row(
        "enable_prefix_caching",
        "error",
        breaks={"enable_prefix_caching": True, "is_block_kv_layout": False},
        mends={"is_block_kv_layout": True},
    ),
    Row(
        "prefix_buckets",
        "warning",
        breaks={"prefix_buckets": (128,)},
        mends={"enable_prefix_caching": True},
    ),
    Row(
        "enable_prefix_caching",
        "error",
        breaks={"enable_prefix_caching": True, "rolling_batch_strategy": "naive_rolling_batch"},
        mends={"rolling_batch_strategy": "continuous_batching"},
    ),
    *(
        Row(name, "error", breaks={**more, name: value, "enable_prefix_caching": True}, mends=off)
        for name, value, more in (
            ("token_generation_batches", (1,), CORES),
            ("k_cache_transposed", True, {}),
            ("shard_over_sequence", True, {}),
            ("attention_dp_degree", 2, CORES),
            ("cp_degree", 2, CORES),
            ("windowed_context_encoding_size", 128, {}),
            ("attn_block_tkg_nki_kernel_enabled", True, {}),
            ("kv_cache_quantize", "int8", {}),
            ("speculative_draft_model", "draft", {}),
        )
        for off in ({"enable_prefix_caching": None},)
    ),
    *(
        Row(
            "speculative_draft_model", "error", breaks={**_FUSED, name: breaks}, mends={name: mends}
        )
        for name, (breaks, mends) in _OF_FUSED.items()
    ),
    *(
        Row(
            "speculative_draft_model",
            "error",
            breaks={**given, "on_device_generation": breaks},
            mends=mends,
        )
        for given, breaks, mends in (
            (_FUSED, {"do_sample": True}, {"on_device_generation": {"do_sample": False}}),
            (_FUSED, {"dynamic": True}, {"on_device_generation": {"dynamic": False}}),
            (_EAGLE, {"do_sample": True}, {"on_device_generation": {"do_sample": False}}),
        )
    ),
    Row(
        "draft_model_kind",
        "error",
        breaks={**_FUSED, "draft_model_kind": "eagle3"},
        mends={"sequence_parallel": True, "neuron_cc_pipeline_factor": 1},
    ),
    Row(
        "draft_model_kind",
        "error",
        breaks={**_EAGLE, "sequence_parallel": True},
        mends={"neuron_cc_pipeline_factor": 1},
    ),
    Row(
        "speculative_draft_model",
        "error",
        breaks={**_FUSED, "draft_model_tp_size": 2, "tensor_parallel_degree": 8},
        mends={"draft_model_tp_size": 8},
    ),
    Row("draft_model_kind", "error", breaks={"draft_model_kind": "eagle"}, mends=_FUSED),
    Row(
        "enable_fused_speculation", "error", breaks={"enable_fused_speculation": True}, mends=_FUSED
    ),
    Row(
        "draft_model_kind",
        "error",
        breaks={**_FUSED, "enable_eagle_draft_input_norm": True},
        mends={"draft_model_kind": "eagle"},
    ),
    Row(
        "speculative_draft_model",
        "error",
        breaks={**_EAGLE, "enable_fused_speculation": False},
        mends={"enable_fused_speculation": None},
    ),
    Row("cp_degree", "error", breaks={**CORES, "cp_degree": 3}, mends={"cp_degree": 4}),
    Row(
        "pipeline_parallel_degree",
        "error",
        breaks={"pipeline_parallel_degree": 2},
        mends={"pipeline_parallel_degree": 1},
    ),
    Row(
        "attention_dp_degree",
        "error",
        breaks={
            "tensor_parallel_degree": 8,
            "max_rolling_batch_size": 12,
            "attention_dp_degree": 3,
        },
        mends={"attention_dp_degree": 4},
    ),
    Row(
        "attention_dp_degree",
        "error",
        breaks={**CORES, "max_rolling_batch_size": 6, "attention_dp_degree": 4},
        mends={"max_rolling_batch_size": 12},
    ),
    Row(
        "attention_dp_degree",
        "error",
        breaks={**CORES, "attention_dp_degree": 2, "rolling_batch_strategy": "naive_rolling_batch"},
        mends={"rolling_batch_strategy": "continuous_batching"},
    ),
    Row(
        "cp_degree",
        "error",
        breaks={**CORES, "cp_degree": 2, "attention_dp_degree": 4},
        mends={"cp_degree": 4},
    ),
    Row(
        "mlp_cp_degree",
        "error",
        breaks={"mlp_cp_degree": 2, "cp_degree": 2},
        mends={"sequence_parallel": True},
    ),
    Row(
        "mlp_cp_degree",
        "error",
        breaks={**CORES, "mlp_cp_degree": 2, "sequence_parallel": True},
        mends={"cp_degree": 2},
    ),
    *(
        Row(name, "error", breaks={name: True}, mends={"fuse_qkv": True})
        for name in ("fused_rmsnorm_qkv", "qkv_nki_kernel_enabled")
    ),
    Row(
        "qkv_kernel_fuse_residual_add",
        "error",
        breaks={"qkv_kernel_fuse_residual_add": True, "fuse_qkv": True},
        mends={"fused_rmsnorm_qkv": True},
    ),
    *(
        Row(
            f"{part}_kernel_fuse_residual_add",
            "error",
            breaks={
                f"{part}_kernel_fuse_residual_add": True,
                f"fused_rmsnorm_{part}": True,
                "fuse_qkv": True,
                "sequence_parallel": True,
            },
            mends={"sequence_parallel": False},
        )
        for part in ("mlp", "qkv")
    ),
    *(
        Row(
            "fused_rmsnorm_skip_gamma",
            "error",
            breaks={**SKIP, **more},
            mends=dict.fromkeys(more, False),
        )
        for more in (
            {"fused_rmsnorm_mlp": True},
            {"sequence_parallel": True},
            {"attn_block_tkg_nki_kernel_enabled": True},
        )
    ),
    Row(
        "strided_context_parallel_kernel_enabled",
        "error",
        breaks={**CORES, "strided_context_parallel_kernel_enabled": True, "cp_degree": 1},
        mends={"cp_degree": 2},
    ),
    Row(
        "ep_dispatch_cc_option",
        "error",
        breaks={**CORES, "ep_dispatch_cc_option": "RS_AG", "max_rolling_batch_size": 7},
        mends={"max_rolling_batch_size": 8},
    ),
    Row(
        "attention_dp_degree",
        "error",
        breaks={
            **CORES,
            **KERNEL,
            "attention_dp_degree": 2,
            "attn_block_tkg_nki_kernel_cache_update": True,
        },
        mends={"attn_block_tkg_nki_kernel_cascaded_attention": True},
    ),
    Row(
        "attention_dtype",
        "error",
        breaks={"attention_dtype": "float32", "dtype": "bfloat16"},
        mends={"cast_type": "as-declared"},
    ),
    Row(
        "attention_dtype",
        "error",
        breaks={"attention_dtype": "float32", "dtype": "float16"},
        mends={"dtype": "float32"},
    ),
    Row(
        "qkv_cte_nki_kernel_fuse_rope",
        "error",
        breaks={
            "qkv_cte_nki_kernel_fuse_rope": True,
            "qkv_nki_kernel_enabled": True,
            "fuse_qkv": True,
        },
        mends={"fused_rmsnorm_qkv": True},
    ),
    Row(
        "attn_block_tkg_nki_kernel_enabled",
        "error",
        breaks={"attn_block_tkg_nki_kernel_enabled": True, "fuse_qkv": True},
        mends={"qkv_nki_kernel_enabled": True},
    ),
    *(
        Row(name, "error", breaks={name: True}, mends=KERNEL)
        for name in (
            "attn_block_tkg_nki_kernel_cache_update",
            "attn_block_tkg_nki_kernel_cascaded_attention",
        )
    ),
    Row(
        "attn_block_tkg_nki_kernel_enabled",
        "error",
        breaks={**KERNEL, "shard_over_sequence": True},
        mends={"shard_over_sequence": False},
    ),
    Row(
        "k_cache_transposed",
        "error",
        breaks={"k_cache_transposed": True, "shard_over_sequence": True},
        mends={"k_cache_transposed": False},
    ),
    *(
        Row(name, "error", breaks={**CORES, name: 2, "shard_over_sequence": True}, mends={name: 1})
        for name in ("cp_degree", "attention_dp_degree")
    ),
    Row(
        "attention_dp_degree",
        "error",
        breaks={**CORES, "attention_dp_degree": 2, "token_generation_batches": (4,)},
        mends={"token_generation_batches": None},
    ),
    Row(
        "token_generation_batches",
        "error",
        breaks={**CORES, "token_generation_batches": (4, 9)},
        mends={"token_generation_batches": (4, 8)},
    ),
    Row(
        "nxdi_model_code",
        "error",
        breaks={"nxdi_model_code": "./code"},
        mends={"trust_remote_code": True},
    ),
    Row(
        "nxdi_model_class",
        "error",
        breaks={"nxdi_model_class": "A"},
        mends={"nxdi_model_code": "./code", "trust_remote_code": True},
    ),
    Row(
        "padding_side",
        "error",
        breaks={"padding_side": "left", "rolling_batch_strategy": "naive_rolling_batch"},
        mends={"padding_side": "right"},
    ),
    Row(
        "output_logits",
        "error",
        breaks={
            **CORES,
            "on_device_generation": True,
            "output_logits": True,
            "token_generation_batches": (1, 2),
            "rolling_batch_strategy": "naive_rolling_batch",
        },
        mends={"rolling_batch_strategy": "continuous_batching"},
    ),
    Row(
        "async_execution",
        "error",
        breaks={"async_execution": True},
        mends={"on_device_generation": True},
    ),
    Row(
        "on_device_generation",
        "error",
        breaks={"on_device_generation": {"do_sample": True, "top_p": 0.9}},
        mends={"on_device_generation": {"do_sample": True, "dynamic": True, "top_p": 0.9}},
    ),
    Row(
        "on_device_generation",
        "error",
        breaks={
            "on_device_generation": {"do_sample": True, "dynamic": True},
            "override_neuron_config": {"on_device_sampling_config": {"sampling_dp_degree": 2}},
        },
        mends={"override_neuron_config": {"on_device_sampling_config": {"sampling_dp_degree": 1}}},
    ),
    *(
        Row(
            "on_device_generation",
            "error",
            breaks={
                "on_device_generation": {
                    "do_sample": True,
                    "dynamic": dynamic,
                    "deterministic": True,
                }
            },
            mends={"on_device_generation": {"do_sample": True, "dynamic": dynamic}},
        )
        for dynamic in (False, True)
    ),
    Row(
        "on_device_generation",
        "error",
        breaks={"on_device_generation": {"dynamic": True, "deterministic": True}},
        mends={"on_device_generation": {"deterministic": True}},
    ),
    Row(
        "on_device_generation",
        "note",
        breaks={"on_device_generation": {"dynamic": True, "top_p": 0.9}},
        mends={"on_device_generation": {"dynamic": True}},
    ),
    Row(
        "output_logits",
        "error",
        breaks={"output_logits": True},
        mends={"on_device_generation": True},
    ),
    Row(
        "async_execution",
        "error",
        breaks={
            "async_execution": True,
            "on_device_generation": True,
            "token_generation_batches": (1,),
        },
        mends={"token_generation_batches": None},
    ),
    Row(
        "async_execution",
        "note",
        breaks={"async_execution": True, "on_device_generation": True, "async_mode": True},
        mends={"async_execution": None},
    ),
]
INT8, FP8_CACHE = {"quantize": "static_int8"}, {"kv_cache_quantize": "fp8"}
NXDI += [
    *(
        Row(
            "quantize",
            "error",
            breaks={"quantize": "static_int8", name: True},
            mends={"quantize": None},
        )
        for name in (
            "enable_lora",
            *("fused_rmsnorm_qkv", "fused_rmsnorm_mlp", "qkv_nki_kernel_enabled"),
            *("out_proj_kernel_enabled", "attn_block_tkg_nki_kernel_enabled"),
        )
    ),
    *(
        Row(name, "error", breaks={**CORES, name: value, **eight}, mends={name: None})
        for name, value, eight in (
            *((name, 2, INT8) for name in ("cp_degree", "attention_dp_degree")),
            ("shard_over_sequence", True, INT8),
            *((name, 2, FP8_CACHE) for name in ("cp_degree", "attention_dp_degree")),
            ("token_generation_batches", (1, 2), FP8_CACHE),
        )
    ),
    *(
        Row(
            "kv_cache_quantize",
            "error",
            breaks={"kv_cache_quantize": "fp8", name: value},
            mends={"kv_cache_quantize": None},
        )
        for name, value in {
            **dict.fromkeys(("shard_over_sequence", "k_cache_transposed"), True),
            **DRAFT,
            **LOOKUP,
        }.items()
    ),
    Row(
        "kv_cache_quantize",
        "error",
        breaks={"kv_cache_quantize": "int8"},
        mends={"kv_cache_quantize": "fp8"},
    ),
    Row(
        "quantize",
        "error",
        breaks={"quantize": "static_fp8", "quantization_type": "per_tensor_symmetric"},
        mends={"quantize": "static_int8"},
    ),
    Row(
        "quantization_type",
        "error",
        breaks={"quantization_type": "per_channel_symmetric"},
        mends={"quantize": "static_int8"},
    ),
    Row(
        "modules_to_not_convert",
        "error",
        breaks={"modules_to_not_convert": ["lm_head"]},
        mends={"quantize": "static_int8"},
    ),
    *(
        Row(
            name,
            "error",
            breaks={
                "quantize": "static_int8",
                "quantization_type": "per_tensor_symmetric",
                name: value,
            },
            mends={"quantization_type": None},
        )
        for name, value in {"modules_to_not_convert": ["mlp"], "fuse_qkv": True}.items()
    ),
]
LISTED = [
    (loader, row) for loader, its in {"": GENERAL, "tnx": TNX, "nxdi": NXDI}.items() for row in its
]
"""Loader, or "" for any, and row."""


def options(**values):
    return ServingOptions.model_validate({"model_id": "m", **values})


def findings_of(loader, values):
    """First names and levels of all findings; without a loader of those that need none."""
    if not loader:
        return [(found.names[0], found.level) for found in conflicts(options(**values))]
    chosen = options(**{"model_loader": loader, **values})
    found = [*conflicts(chosen), *broken_rules(BACKEND_RULES.get(loader, ()), chosen)]
    return [(entry.names[0], entry.level) for entry in found]


@pytest.mark.parametrize(
    ("loader", "row"), [pytest.param(*each, id=f"{each[0]}-{each[1].option}") for each in LISTED]
)
def test_a_rule_is_told_when_broken_and_not_when_mended(loader, row):
    finding = row.option, row.level
    before = findings_of(loader, row.breaks).count(finding)
    assert before >= 1
    assert findings_of(loader, {**row.breaks, **row.mends}).count(finding) == before - 1


def test_the_fix_for_deterministic_draws_is_greedy_whatever_is_set():
    for given in ({"dynamic": True}, {"do_sample": True}):
        chosen = options(on_device_generation={**given, "deterministic": True})
        (problem,) = (
            entry.problem
            for entry in broken_rules(BACKEND_RULES["nxdi"], chosen)
            if "deterministic" in entry.problem
        )
        assert "set do_sample=false and dynamic=false" in problem


EVERY_RULE = [
    *(("", rule) for rule in RULES),
    *((loader, rule) for loader, its in BACKEND_RULES.items() for rule in its),
]


def test_every_rule_is_in_the_table(subtests):
    for loader, rule in EVERY_RULE:
        with subtests.test("-".join((loader, rule.names[0]))):
            rows = [(row.breaks, row.mends) for its, row in LISTED if its == loader]
            assert any(
                rule.holds(options(**broken)) and not rule.holds(options(**{**broken, **mended}))
                for broken, mended in rows
            )


def test_a_rule_names_options_and_the_way_out(subtests):
    for _, rule in EVERY_RULE:
        with subtests.test(rule.names[0]):
            assert set(rule.names) <= ServingOptions.model_fields.keys()
            assert len(set(rule.names)) == len(rule.names)
            ways = (
                "set ",
                "leave ",
                "lower ",
                "raise ",
                "give ",
                "expected ",
                "change ",
                "taken as",
                "has to",
            )
            assert any(way in rule.problem for way in ways), f"say what to do, with one of {ways}"
            assert not rule.problem.endswith("."), "part of a sentence: no full stop"


@pytest.mark.parametrize("loader", BACKEND_RULES)
def test_the_rules_of_a_library_are_about_what_it_knows(loader):
    for rule in BACKEND_RULES[loader]:
        mapped = [name for name in rule.names if option(name).to]
        assert any(loader in option(name).to for name in mapped)


def test_defaults_break_no_rule():
    chosen = options()
    assert [*conflicts(chosen)] == []
    for loader in BACKEND_RULES:
        assert [*broken_rules(BACKEND_RULES.get(loader, ()), chosen)] == []


def test_every_broken_rule_is_told_at_once():
    values = {"batch_size": 2, "rolling_batch": "tnx", "async_mode": True, "output_logits": True}
    assert [name for name, _ in findings_of("nxdi", values)] == [
        *("batch_size", "async_mode", "output_logits")
    ]


def test_a_finding_about_drafts_names_where_they_come_from():
    for drafts in (DRAFT, LOOKUP):
        naive = {"model_loader": "tnx", "rolling_batch_strategy": "naive_rolling_batch"}
        (found,) = broken_rules(BACKEND_RULES["tnx"], options(**drafts, **naive))
        assert found.names == ("rolling_batch_strategy", *drafts)


def test_drafts_that_nobody_makes_can_come_from_either():
    (found,) = conflicts(options(speculative_length=4))
    for name in (*DRAFT, *LOOKUP):
        assert name in found.names
        assert name in found.problem


def test_a_cache_in_blocks_may_have_several_lengths():
    several = {**BSH, "context_length_estimate": (128, 512)}
    broken = ("cache_layout", "error")
    assert broken in findings_of("tnx", several)
    assert broken not in findings_of("tnx", {**several, "is_block_kv_layout": True})
    assert broken not in findings_of("tnx", {**several, "enable_chunked_prefill": True})


class TestLibraries:
    """A rule of one library is judged once its backend is chosen, and for no other backend."""

    def test_an_option_of_one_library_waits_for_the_backend(self):
        odd = {"enable_chunked_prefill": True, "pa_block_size": 48}
        assert findings_of("", odd) == []
        assert findings_of("tnx", odd) == [("pa_block_size", "error")]
        assert findings_of("", {"output_logits": True}) == []
        assert findings_of("nxdi", {"output_logits": True}) == [("output_logits", "error")]

    def test_an_option_that_another_library_just_leaves_out_waits_for_the_loader(self):
        divided = {"shard_over_sequence": True, "cache_layout": "BSH"}
        assert findings_of("", divided) == []
        chosen = options(**divided)
        assert [*broken_rules(BACKEND_RULES["nxdi"], chosen)] == []
        (found,) = broken_rules(BACKEND_RULES["tnx"], chosen)
        assert found.names == ("shard_over_sequence", "cache_layout")

    @pytest.mark.parametrize("other", ["nxdi", "cpu"])
    def test_a_loader_by_name_hears_of_no_other(self, other):
        assert findings_of(other, {"qkv_tiling": True}) == []

    @pytest.mark.parametrize(
        ("loader", "expected"), [("tnx", 1), ("nxdi", 1), ("cpu", 0), (None, 0)]
    )
    def test_an_option_of_both_waits_for_the_loader(self, loader, expected):
        chosen = options(**DRAFT, rolling_batch_strategy="naive_rolling_batch")
        early = [*conflicts(chosen)]
        late = [] if loader is None else [*broken_rules(BACKEND_RULES.get(loader, ()), chosen)]
        assert early == []
        assert len([found for found in late if "rolling_batch_strategy" in found.names]) == expected

    @pytest.mark.parametrize("loader", BACKEND_RULES)
    @pytest.mark.parametrize("named", [True, False])
    def test_nothing_is_told_twice(self, loader, named):
        for its, row in LISTED:
            if its == loader:
                chosen = options(**{"model_loader": loader if named else "auto", **row.breaks})
                found = [*conflicts(chosen), *broken_rules(BACKEND_RULES.get(loader, ()), chosen)]
                assert len(found) == len(set(found))
                assert found

    def test_values_that_are_filled_in_are_judged_then(self):
        chosen = options(model_loader="tnx", **DRAFT)
        assert [*broken_rules(BACKEND_RULES["tnx"], chosen)] == []
        filled = chosen.model_copy(update={"context_length_estimate": (5,)})
        (found,) = broken_rules(BACKEND_RULES["tnx"], filled)
        assert found.names == ("speculative_length", "context_length_estimate")
