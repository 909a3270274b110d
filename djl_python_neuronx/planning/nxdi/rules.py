"""Combinations of options that NxD Inference refuses.

Source: neuronx-distributed-inference 0.9.0, models/config.py (`NeuronConfig.__init__` and its validators) and, where
stated, another file. Limits of architectures are in capabilities.py.
"""

from __future__ import annotations

from collections.abc import Callable

from djl_python_neuronx.config.findings import ANY, SET, UNSET, Rule, above, when
from djl_python_neuronx.config.options import ServingOptions, option

LATER = (
    "quantize",
    "kv_cache_quantize",
    "quantized_mlp_kernel_enabled",
    "activation_quantization_type",
    "speculative_draft_model",
    "enable_eagle_speculation",
    "is_medusa",
    "token_tree_config",
    "enable_prefix_caching",
    "is_block_kv_layout",
)
"""Options of the library that this version does not serve."""
_MEDUSA_PARTS = ("medusa_speculation_length", "num_medusa_heads", "medusa_tree")


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


def _quantised_without_names(options: ServingOptions) -> bool:
    quantised = options.quantize or options.quantized_mlp_kernel_enabled
    return bool(quantised and _qkv_kernel(options) and not options.modules_to_not_convert)


def _uneven_degree(name: str) -> Callable[[ServingOptions], object]:
    return lambda options: _degree(options) % (getattr(options, name) or 1)


def _uneven_groups(options: ServingOptions) -> bool:
    prompts, decodes = options.cp_degree or 1, options.attention_dp_degree or 1
    return prompts > 1 and decodes > 1 and (prompts < decodes or prompts % decodes != 0)


def _uneven_axes(options: ServingOptions) -> bool:
    sizes, axes = options.quantization_block_size, options.quantization_block_axis
    return not sizes or len(sizes) != len(axes or ())


def _static_batches(options: ServingOptions) -> bool:
    if options.rolling_batch_strategy is not None:
        return options.rolling_batch_strategy == "naive_rolling_batch"
    return _slots(options) == 1


def _other_dtype(options: ServingOptions) -> bool:
    return options.attention_dtype not in {None, options.dtype} and options.dtype != "auto"


_DEGREES = (
    *(
        when(_uneven_degree(name), **{name: ANY}, tensor_parallel_degree=ANY).refuse(
            f"tensor_parallel_degree has to be a multiple of {name}; change one of them"
        )
        for name in ("cp_degree", "attention_dp_degree")
    ),
    when(
        lambda options: _slots(options) % (options.attention_dp_degree or 1),
        attention_dp_degree=ANY,
        max_rolling_batch_size=ANY,
    ).refuse(
        "all groups have equally many slots: max_rolling_batch_size has to be a multiple of attention_dp_degree"
    ),
    when(
        _static_batches,
        attention_dp_degree=above(1),
        rolling_batch_strategy=ANY,
        max_rolling_batch_size=ANY,
    ).refuse(
        "groups of cores share sequences only with continuous batching; raise max_rolling_batch_size and leave "
        "rolling_batch_strategy out, or leave attention_dp_degree out"
    ),
    when(_uneven_groups, cp_degree=ANY, attention_dp_degree=ANY).refuse(
        "if both are above 1, cp_degree has to be a multiple of attention_dp_degree; change one of them"
    ),
    when(mlp_cp_degree=above(1), sequence_parallel=UNSET).refuse(
        "the MLP can divide a prompt only with sequence_parallel=true; set it, or leave mlp_cp_degree out"
    ),
    when(strided_context_parallel_kernel_enabled=True, cp_degree={None, 1}).refuse(
        "the kernel needs a cp_degree above 1; set that, or leave the kernel out"
    ),
    when(
        lambda options: _degree(options) > _slots(options),
        ep_dispatch_cc_option="RS_AG",
        tensor_parallel_degree=ANY,
        max_rolling_batch_size=ANY,
    ).refuse(
        "RS_AG needs at least as many slots as cores; raise max_rolling_batch_size or change the dispatch"
    ),
    when(
        lambda options: not options.attn_block_tkg_nki_kernel_cascaded_attention,
        attention_dp_degree=above(1),
        attn_block_tkg_nki_kernel_cache_update=True,
    ).refuse(
        "with groups of cores the kernel writes the cache only in cascaded attention; set "
        "attn_block_tkg_nki_kernel_cascaded_attention=true, or leave one of them out"
    ),
)
_PRECISION = (
    when(
        lambda options: _other_dtype(options) and options.cast_type != "as-declared",
        attention_dtype=ANY,
        dtype=ANY,
        cast_type=ANY,
    ).refuse(
        "an attention_dtype other than dtype needs cast_type=as-declared; set it, or leave attention_dtype out"
    ),
    when(
        _quantised_without_names,
        quantize=ANY,
        fused_rmsnorm_qkv=ANY,
        qkv_nki_kernel_enabled=ANY,
        modules_to_not_convert=ANY,
    ).refuse(
        "a QKV kernel needs the names of the modules that stay unquantised; set modules_to_not_convert, or leave the "
        "kernel out"
    ),
    *(
        when(activation_quantization_type=SET, **{kernel: SET}).refuse(
            "quantised activations and the MLP kernels exclude each other; leave one of them out"
        )
        for kernel in ("fused_rmsnorm_mlp", "quantized_mlp_kernel_enabled")
    ),
    when(activation_quantization_type="static", fuse_qkv=True).refuse(
        "static activation scales and fuse_qkv exclude each other; leave one of them out"
    ),
    when(fuse_qkv=True, activation_quantization_type="dynamic").warn(
        "NxD Inference ignores fuse_qkv where activations are quantised; leave fuse_qkv out"
    ),
    when(rmsnorm_quantize_kernel_enabled=SET, quantized_mlp_kernel_enabled=UNSET).refuse(
        "its output is for quantized_mlp_kernel_enabled; set that too, or leave it out"
    ),
    when(
        _uneven_axes,
        quantization_type="blockwise_symmetric",
        quantization_block_size=ANY,
        quantization_block_axis=ANY,
    ).refuse(
        "each axis needs a block size; set quantization_block_size and quantization_block_axis to equally many numbers"
    ),
    *(
        when(
            lambda options: options.quantization_type != "blockwise_symmetric",
            **{name: SET},
            quantization_type=ANY,
        ).warn("only quantization_type=blockwise_symmetric has blocks; set that, or leave it out")
        for name in ("quantization_block_size", "quantization_block_axis")
    ),
)
_KERNELS = (
    when(
        lambda options: not (options.fused_rmsnorm_qkv and options.qkv_nki_kernel_enabled),
        qkv_cte_nki_kernel_fuse_rope=True,
        fused_rmsnorm_qkv=ANY,
        qkv_nki_kernel_enabled=ANY,
    ).refuse(
        "it is part of the NKI kernel; set fused_rmsnorm_qkv=true and qkv_nki_kernel_enabled=true, or leave it out"
    ),
    when(
        attn_block_tkg_nki_kernel_enabled=True,
        fused_rmsnorm_qkv=UNSET,
        qkv_nki_kernel_enabled=UNSET,
    ).refuse(
        "it needs a QKV kernel; set fused_rmsnorm_qkv=true or qkv_nki_kernel_enabled=true, or leave it out"
    ),
    *(
        when(**{name: SET}, attn_block_tkg_nki_kernel_enabled=UNSET).refuse(
            "it is part of the decode kernel; set attn_block_tkg_nki_kernel_enabled=true, or leave it out"
        )
        for name in (
            "attn_block_tkg_nki_kernel_cache_update",
            "attn_block_tkg_nki_kernel_cascaded_attention",
        )
    ),
    *(
        when(**{name: SET}, shard_over_sequence=SET).refuse(
            "it excludes flash decoding; leave one of them out"
        )
        for name in ("attn_block_tkg_nki_kernel_enabled", "k_cache_transposed")
    ),
    when(_in_blocks, k_cache_transposed=True, is_block_kv_layout=ANY).refuse(
        "a KV cache in blocks, which prefix caching implies, cannot be transposed; leave one of them out"
    ),
)
_BATCHES = (
    when(
        lambda options: (options.token_generation_batches or (0,))[-1] > _slots(options),
        token_generation_batches=ANY,
        max_rolling_batch_size=ANY,
    ).refuse(
        "a step has at most as many sequences as slots; lower it or raise max_rolling_batch_size"
    ),
    when(
        lambda options: _speculating(options) or _in_blocks(options),
        token_generation_batches=SET,
        speculative_draft_model=ANY,
        is_medusa=ANY,
        is_block_kv_layout=ANY,
    ).refuse(
        "graphs for fewer sequences exclude speculation and a KV cache in blocks (prefix caching); leave one of them "
        "out"
    ),
    # Source: models/model_wrapper.py, `_forward_with_pad`.
    when(
        _static_batches,
        output_logits=True,
        token_generation_batches=SET,
        rolling_batch_strategy=ANY,
        max_rolling_batch_size=ANY,
    ).refuse(
        "graphs for fewer sequences give logits beside tokens only with continuous batching; leave one of them out"
    ),
    # Source: backends/nxdi/batching.py: rows are written from position 0 on, static batches too.
    when(padding_side="left").refuse(
        "prompts are padded on the right with NxD Inference; leave padding_side out"
    ),
    # Source: modules/kvcache/block_kv_cache_manager.py, which lays blocks out for one of the two.
    when(
        lambda options: not options.enable_chunked_prefill,
        is_block_kv_layout=True,
        enable_prefix_caching=UNSET,
    ).refuse(
        "only prefix caching and chunked prefill use blocks; set enable_prefix_caching=true, or leave "
        "is_block_kv_layout out"
    ),
    # Source: modules/attention/attention_base.py.
    when(
        enable_prefix_caching=True, context_length_estimate=lambda lengths: lengths[0] < 128
    ).refuse(
        "prompts with a cached prefix need lengths of at least 128 tokens; set context_length_estimate from 128 on"
    ),
    when(prefix_buckets=SET, enable_prefix_caching=UNSET).warn(
        "no effect without prefix caching; set enable_prefix_caching=true, or leave prefix_buckets out"
    ),
)
_SPECULATION = (
    when(
        lambda options: any(getattr(options, name) is None for name in _MEDUSA_PARTS),
        is_medusa=True,
        **dict.fromkeys(_MEDUSA_PARTS, ANY),
    ).refuse(f"Medusa needs all of {', '.join(_MEDUSA_PARTS)}; set them"),
    *(
        when(**{name: SET}, is_medusa=UNSET).warn(
            "no effect without is_medusa=true; set that, or leave it out"
        )
        for name in _MEDUSA_PARTS
    ),
    when(is_medusa=SET, speculative_draft_model=SET).refuse(
        "Medusa heads replace the draft model; leave one of them out"
    ),
    when(is_eagle3=SET, enable_eagle_speculation=UNSET).refuse(
        "EAGLE 3 is a kind of EAGLE; set enable_eagle_speculation=true too, or leave it out"
    ),
    # Source: models/model_base.py.
    when(
        lambda options: options.is_eagle3 or not options.enable_eagle_speculation,
        token_tree_config=SET,
        enable_eagle_speculation=ANY,
        is_eagle3=ANY,
    ).refuse("a token tree is for EAGLE, but not for EAGLE 3; leave one of them out"),
    when(
        _speculating,
        speculative_draft_model=ANY,
        enable_eagle_speculation=ANY,
        is_medusa=ANY,
        token_tree_config=ANY,
        on_device_generation=UNSET,
    ).refuse(
        "NxD Inference verifies drafts on the device, which therefore samples; set on_device_generation=true"
    ),
    # Source: modules/async_execution.py.
    when(async_execution=SET, on_device_generation=UNSET).refuse(
        "the next step starts from the token that the device has sampled; set on_device_generation=true, or leave "
        "async_execution out"
    ),
    # Source: models/model_base.py, which takes both outputs for one.
    when(output_logits=SET, on_device_generation=UNSET).refuse(
        "without sampling on the device the host has the logits anyway, and NxD Inference fails at the second output; "
        "leave it out, or set on_device_generation=true"
    ),
    # Source: models/model_wrapper.py, which pads a step ahead to all slots.
    when(async_execution=SET, token_generation_batches=SET).refuse(
        "a step that runs ahead has a graph for all slots only; leave one of them out"
    ),
    when(async_execution=SET, async_mode=ANY).note(
        "the library gets the first under its own name async_mode; the option async_mode is DJL Serving's way to send "
        "requests, so set each for itself"
    ),
    when(async_execution=SET, is_medusa=SET).refuse(
        "Medusa's steps wait for the host; leave one of them out"
    ),
    when(
        lambda options: not options.enable_eagle_speculation,
        async_execution=True,
        enable_prefix_caching=True,
        speculative_draft_model=SET,
    ).refuse(
        "prefix caching with a draft model other than EAGLE's waits for the host; leave one of the three out"
    ),
)
_ELSEWHERE = ", or set model_loader=tnx if transformers-neuronx has the model"
_LATER = tuple(
    when(**{name: SET}).refuse(
        "served with NxD Inference in a later version; leave it out"
        + ("tnx" in option(name).to) * _ELSEWHERE
    )
    for name in LATER
)
NXDI_RULES: tuple[Rule, ...] = (
    *_LATER,
    *_DEGREES,
    *_PRECISION,
    *_KERNELS,
    *_BATCHES,
    *_SPECULATION,
)
"""Checked in this order."""
