"""Combinations of options that NxD Inference refuses.

Source: neuronx-distributed-inference 0.9.0, models/config.py (`NeuronConfig.__init__` and its validators) and, where
stated, another file. What depends on the architecture is in capabilities.py.
"""

from __future__ import annotations

from djl_python_neuronx.config.findings import Rule, excluding, lacking
from djl_python_neuronx.config.options import ServingOptions

_MEDUSA_PARTS = ("medusa_speculation_length", "num_medusa_heads", "medusa_tree")
_BLOCKWISE = "blockwise_symmetric"
_NO_FLASH = "it excludes flash decoding; leave one of them out"
_NO_MLP_KERNEL = (
    "quantised activations and the MLP kernels exclude each other; leave one of them out"
)
_PART_OF_DECODE = (
    "it is part of the decode kernel; set attn_block_tkg_nki_kernel_enabled=true, or leave it out"
)


def _degree(options: ServingOptions) -> int:
    degree = options.tensor_parallel_degree
    return degree if isinstance(degree, int) else 1


def _slots(options: ServingOptions) -> int:
    return options.max_rolling_batch_size or 1


def _speculating(options: ServingOptions) -> bool:
    return bool(
        options.speculative_draft_model
        or options.enable_eagle_speculation
        or options.is_medusa
        or options.token_tree_config
    )


def _in_blocks(options: ServingOptions) -> bool:
    return bool(options.is_block_kv_layout or options.enable_prefix_caching)


def _qkv_kernel(options: ServingOptions) -> bool:
    return bool(options.fused_rmsnorm_qkv or options.qkv_nki_kernel_enabled)


def _in_groups(options: ServingOptions) -> bool:
    return (options.attention_dp_degree or 1) > 1


def _uneven_groups(options: ServingOptions) -> bool:
    prompts, decodes = options.cp_degree or 1, options.attention_dp_degree or 1
    return prompts > 1 and decodes > 1 and (prompts < decodes or prompts % decodes != 0)


def _one_by_one(options: ServingOptions) -> bool:
    """No continuous batching."""
    if options.rolling_batch_strategy is not None:
        return options.rolling_batch_strategy == "naive_rolling_batch"
    return _slots(options) == 1


def _other_dtype(options: ServingOptions) -> bool:
    return options.attention_dtype not in {None, options.dtype} and options.dtype != "auto"


def _in_blocks_only(name: str) -> Rule:
    return Rule(
        (name, "quantization_type"),
        lambda options: (
            getattr(options, name) is not None and options.quantization_type != _BLOCKWISE
        ),
        f"only quantization_type={_BLOCKWISE} has blocks; set that, or leave it out",
        "warning",
    )


_DEGREES = (
    Rule(
        ("cp_degree", "tensor_parallel_degree"),
        lambda options: _degree(options) % (options.cp_degree or 1),
        "tensor_parallel_degree has to be a multiple of cp_degree; change one of them",
    ),
    Rule(
        ("attention_dp_degree", "tensor_parallel_degree"),
        lambda options: _degree(options) % (options.attention_dp_degree or 1),
        "tensor_parallel_degree has to be a multiple of attention_dp_degree; change one of them",
    ),
    Rule(
        ("attention_dp_degree", "max_rolling_batch_size"),
        lambda options: _slots(options) % (options.attention_dp_degree or 1),
        "each group has as many slots as the next: max_rolling_batch_size has to be a multiple of attention_dp_degree",
    ),
    Rule(
        ("attention_dp_degree", "rolling_batch_strategy", "max_rolling_batch_size"),
        lambda options: _in_groups(options) and _one_by_one(options),
        "sequences are divided among groups under continuous batching only; raise max_rolling_batch_size and leave "
        "rolling_batch_strategy out, or leave attention_dp_degree out",
    ),
    Rule(
        ("cp_degree", "attention_dp_degree"),
        _uneven_groups,
        "together, cp_degree has to be a multiple of attention_dp_degree; change one of them",
    ),
    Rule(
        ("mlp_cp_degree", "sequence_parallel"),
        lambda options: (options.mlp_cp_degree or 1) > 1 and not options.sequence_parallel,
        "dividing a prompt in the MLP needs sequence_parallel=true; set it, or leave mlp_cp_degree out",
    ),
    Rule(
        ("strided_context_parallel_kernel_enabled", "cp_degree"),
        lambda options: (
            options.strided_context_parallel_kernel_enabled and (options.cp_degree or 1) == 1
        ),
        "the kernel is for a cp_degree above 1; set that, or leave the kernel out",
    ),
    Rule(
        ("ep_dispatch_cc_option", "tensor_parallel_degree", "max_rolling_batch_size"),
        lambda options: (
            options.ep_dispatch_cc_option == "RS_AG" and _degree(options) > _slots(options)
        ),
        "RS_AG needs at least as many slots as cores; raise max_rolling_batch_size or take another dispatch",
    ),
    Rule(
        ("attention_dp_degree", "attn_block_tkg_nki_kernel_cache_update"),
        lambda options: (
            _in_groups(options)
            and options.attn_block_tkg_nki_kernel_cache_update
            and not options.attn_block_tkg_nki_kernel_cascaded_attention
        ),
        "with groups the kernel writes the cache only in cascaded attention; set "
        "attn_block_tkg_nki_kernel_cascaded_attention=true, or leave one of them out",
    ),
)
_PRECISION = (
    Rule(
        ("attention_dtype", "dtype", "cast_type"),
        lambda options: _other_dtype(options) and options.cast_type != "as-declared",
        "attention in another type than dtype needs cast_type=as-declared; set it, or leave attention_dtype out",
    ),
    Rule(
        ("quantize", "fused_rmsnorm_qkv", "qkv_nki_kernel_enabled", "modules_to_not_convert"),
        lambda options: (
            (options.quantize or options.quantized_mlp_kernel_enabled)
            and _qkv_kernel(options)
            and not options.modules_to_not_convert
        ),
        "with a QKV kernel the modules that stay unquantised have to be named; set modules_to_not_convert, or leave "
        "the kernel out",
    ),
    excluding("activation_quantization_type", "fused_rmsnorm_mlp", _NO_MLP_KERNEL),
    excluding("activation_quantization_type", "quantized_mlp_kernel_enabled", _NO_MLP_KERNEL),
    Rule(
        ("activation_quantization_type", "fuse_qkv"),
        lambda options: options.activation_quantization_type == "static" and options.fuse_qkv,
        "static activation scales exclude the fused projection; leave one of them out",
    ),
    Rule(
        ("fuse_qkv", "activation_quantization_type"),
        lambda options: options.fuse_qkv and options.activation_quantization_type == "dynamic",
        "NxD Inference forgets the fused projection where activations are quantised; leave fuse_qkv out",
        "warning",
    ),
    lacking(
        "rmsnorm_quantize_kernel_enabled",
        "quantized_mlp_kernel_enabled",
        "the kernel feeds quantized_mlp_kernel_enabled; set that too, or leave it out",
        "error",
    ),
    Rule(
        ("quantization_type", "quantization_block_size", "quantization_block_axis"),
        lambda options: (
            options.quantization_type == _BLOCKWISE
            and (
                not options.quantization_block_size
                or len(options.quantization_block_size)
                != len(options.quantization_block_axis or ())
            )
        ),
        "blocks need a size for each of their axes; set quantization_block_size and quantization_block_axis alike",
    ),
    _in_blocks_only("quantization_block_size"),
    _in_blocks_only("quantization_block_axis"),
)
_KERNELS = (
    Rule(
        ("qkv_cte_nki_kernel_fuse_rope", "fused_rmsnorm_qkv", "qkv_nki_kernel_enabled"),
        lambda options: (
            options.qkv_cte_nki_kernel_fuse_rope
            and not (options.fused_rmsnorm_qkv and options.qkv_nki_kernel_enabled)
        ),
        "it is part of the NKI kernel; set fused_rmsnorm_qkv=true and qkv_nki_kernel_enabled=true, or leave it out",
    ),
    Rule(
        ("attn_block_tkg_nki_kernel_enabled", "fused_rmsnorm_qkv", "qkv_nki_kernel_enabled"),
        lambda options: options.attn_block_tkg_nki_kernel_enabled and not _qkv_kernel(options),
        "it needs a QKV kernel; set fused_rmsnorm_qkv=true or qkv_nki_kernel_enabled=true, or leave it out",
    ),
    *(
        lacking(name, "attn_block_tkg_nki_kernel_enabled", _PART_OF_DECODE, "error")
        for name in (
            "attn_block_tkg_nki_kernel_cache_update",
            "attn_block_tkg_nki_kernel_cascaded_attention",
        )
    ),
    excluding("attn_block_tkg_nki_kernel_enabled", "shard_over_sequence", _NO_FLASH),
    excluding("k_cache_transposed", "shard_over_sequence", _NO_FLASH),
    Rule(
        ("k_cache_transposed", "is_block_kv_layout"),
        lambda options: options.k_cache_transposed and _in_blocks(options),
        "blocks of the KV cache cannot be transposed (prefix caching keeps it in blocks too); leave one of them out",
    ),
)
_BATCHES = (
    Rule(
        ("token_generation_batches", "max_rolling_batch_size"),
        lambda options: (
            options.token_generation_batches
            and options.token_generation_batches[-1] > _slots(options)
        ),
        "no step has more sequences than slots; lower it or raise max_rolling_batch_size",
    ),
    Rule(
        ("token_generation_batches", "speculative_draft_model", "is_medusa", "is_block_kv_layout"),
        lambda options: (
            options.token_generation_batches and (_speculating(options) or _in_blocks(options))
        ),
        "graphs for fewer sequences exclude speculation and a KV cache in blocks (prefix caching); leave one of them "
        "out",
    ),
    # Source: modules/kvcache/kv_cache_manager.py and models/model_wrapper.py: rows are written from position 0 on.
    Rule(
        ("padding_side", "max_rolling_batch_size", "rolling_batch_strategy"),
        lambda options: options.padding_side == "left" and not _one_by_one(options),
        "continuous batching pads on the right; leave padding_side out",
    ),
    # Source: modules/kvcache/block_kv_cache_manager.py, which lays blocks out for one of the two.
    Rule(
        ("is_block_kv_layout", "enable_prefix_caching"),
        lambda options: (
            options.is_block_kv_layout
            and not options.enable_prefix_caching
            and not options.enable_chunked_prefill
        ),
        "blocks are for prefix caching or chunked prefill; set enable_prefix_caching=true, or leave is_block_kv_layout "
        "out",
    ),
    # Source: modules/autobucketing.py.
    Rule(
        ("enable_prefix_caching", "context_length_estimate", "prefix_buckets"),
        lambda options: (
            options.enable_prefix_caching
            and options.context_length_estimate
            and not options.prefix_buckets
        ),
        "prompt graphs with a cached prefix are compiled for pairs of lengths; set prefix_buckets, such as "
        'prefix_buckets="512,1024"',
    ),
    # Source: modules/attention/attention_base.py.
    Rule(
        ("enable_prefix_caching", "context_length_estimate"),
        lambda options: (
            options.enable_prefix_caching and (options.context_length_estimate or (128,))[0] < 128
        ),
        "prompts with a cached prefix run in 128 tokens or more; set context_length_estimate from 128 on",
    ),
    lacking(
        "prefix_buckets",
        "enable_prefix_caching",
        "no prefix is cached; set enable_prefix_caching=true, or leave prefix_buckets out",
    ),
)
_AHEAD = (
    Rule(
        ("is_medusa", *_MEDUSA_PARTS),
        lambda options: (
            options.is_medusa and any(getattr(options, name) is None for name in _MEDUSA_PARTS)
        ),
        f"Medusa needs all of {', '.join(_MEDUSA_PARTS)}; set them",
    ),
    *(
        lacking(
            name, "is_medusa", "it does nothing without is_medusa=true; set that, or leave it out"
        )
        for name in _MEDUSA_PARTS
    ),
    excluding(
        "is_medusa",
        "speculative_draft_model",
        "Medusa heads draft in place of a draft model; leave one of them out",
    ),
    lacking(
        "is_eagle3",
        "enable_eagle_speculation",
        "EAGLE 3 is a kind of EAGLE; set enable_eagle_speculation=true too, or leave it out",
        "error",
    ),
    # Source: models/model_base.py.
    Rule(
        ("token_tree_config", "enable_eagle_speculation", "is_eagle3"),
        lambda options: (
            options.token_tree_config
            and (options.is_eagle3 or not options.enable_eagle_speculation)
        ),
        "a tree of drafts is for EAGLE, and not for EAGLE 3; leave one of them out",
    ),
    Rule(
        ("speculative_draft_model", "is_medusa", "on_device_generation"),
        lambda options: _speculating(options) and options.on_device_generation is None,
        "NxD Inference judges drafts on the device, which samples then; set on_device_generation=true",
    ),
    # Source: modules/async_execution.py.
    lacking(
        "async_execution",
        "on_device_generation",
        "the next step starts from the token that the device has sampled; set on_device_generation=true, or leave "
        "async_execution out",
        "error",
    ),
    excluding(
        "async_execution", "is_medusa", "Medusa's steps wait for the host; leave one of them out"
    ),
    Rule(
        ("async_execution", "enable_prefix_caching", "speculative_draft_model"),
        lambda options: (
            options.async_execution
            and options.enable_prefix_caching
            and options.speculative_draft_model is not None
            and not options.enable_eagle_speculation
        ),
        "prefix caching with a draft model that is not EAGLE's has to wait for the host; leave one of the three out",
    ),
)
NXDI_RULES: tuple[Rule, ...] = (*_DEGREES, *_PRECISION, *_KERNELS, *_BATCHES, *_AHEAD)
"""Judged in this order."""
