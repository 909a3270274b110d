"""Options that only NxD Inference knows: keywords of its `NeuronConfig` and `MoENeuronConfig`.

Source: neuronx-distributed-inference 0.9.0, models/config.py. What a model's own `config.json` decides (activations,
clamp limits, layer norms), what takes no part in serving (capturing and replacing tensors, router outputs), what is
for vision alone and what the library itself calls deprecated are no options: `override_neuron_config` reaches them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from djl_python_neuronx.config.values import (
    SAME,
    Buckets,
    Count,
    Dtype,
    Hyphenated,
    Identifier,
    ModelSource,
    Object,
    Option,
    OptionGroup,
    Positive,
    Unquoted,
    Upper,
    Word,
    Words,
)


def _nxdi(allowed: str = "", *, keyword: str = SAME, tunes: bool = True, **facts: Any) -> Option:  # noqa: ANN401
    """The marker of an option that only NxD Inference has; `facts` are further fields of `Option`."""
    return Option(allowed=allowed, to={"nxdi": keyword}, tunes=tunes, **facts)


_TUNING = _nxdi()
_FEATURE = _nxdi(tunes=False)
_Tuning = Annotated[bool | None, _TUNING]
_TuningCount = Annotated[Count | None, _TUNING]
_TuningObject = Annotated[Object | None, _nxdi(file=True)]
_Feature = Annotated[bool | None, _FEATURE]


_CODE = {"nxdi": "NeuronBaseForCausalLM()"}


class NxdiOptions(OptionGroup):
    """NxD Inference only."""

    nxdi_model_code: Annotated[
        ModelSource | None,
        Field(min_length=1),
        Option("a folder, owner/name[@revision] or s3://bucket/key", to=_CODE, graph=()),
    ] = None
    """Code of the model in the place of the library's own class: a folder as in `contrib/models` of its repository, or
    one of the Hub or S3. It is run, so it needs `trust_remote_code`; its content is part of the compile key, and an
    output has a copy (docs/nxdi.md)."""
    nxdi_model_class: Annotated[Identifier | None, Option("the name of a class", to=_CODE)] = None
    """Class of that code, where it has several subclasses of `NeuronBaseForCausalLM`."""
    nxdi_model_code_unverified: Annotated[bool, Option(output="file")] = False
    """Run code of which nothing is known, that is known to be wrong, or beyond what was compared with transformers.
    Without it these are errors."""

    cp_degree: _TuningCount = None
    """Ranks that share one prompt's tokens in attention (context parallelism). Must divide `tensor_parallel_degree`."""
    mlp_cp_degree: _TuningCount = None
    """The same in the MLP: 1, or `cp_degree` with `sequence_parallel`."""
    attention_dp_degree: _TuningCount = None
    """Groups that the sequences of a decode step are divided into in attention. Must divide `tensor_parallel_degree`
    and `max_rolling_batch_size`; needs continuous batching."""
    ep_degree: Annotated[Count, _nxdi(tunes=False, computed=True)] = 1
    """Groups that experts are divided into, each with its own cores: the model takes tensor x pipeline x expert degree
    cores."""
    moe_tp_degree: _TuningCount = None
    """Cores that share one expert."""
    moe_ep_degree: _TuningCount = None
    """Groups that the experts of a layer are divided into, within the tensor parallel cores."""
    hybrid_sharding_config: _TuningObject = None
    """Expert degrees that differ between prompts and decoding: `moe_cte_tp_degree`, `moe_cte_ep_degree`,
    `moe_tkg_tp_degree` and `moe_tkg_ep_degree`."""
    ep_dispatch_cc_option: Annotated[Literal["AR_AG", "RS_AG", "AG_AR"] | None, Upper, _TUNING] = (
        None
    )
    """Collectives that send tokens to their experts. Library default: `AR_AG`; `RS_AG` needs at least as many slots as
    cores."""
    logical_nc_config: Annotated[
        Annotated[int, Field(ge=1, le=2)] | None,
        _nxdi(
            "1 or 2",
            tunes=False,
            env=("NEURON_LOGICAL_NC_CONFIG",),
        ),
    ] = None
    """Physical cores that act as one. Default: the platform's, 2 on Trn2, else 1. 1 on Trn2 gives twice as many cores
    with half of the memory each. `NEURON_LOGICAL_NC_CONFIG`, which in the library overrides this option, must have the
    same value for the runtime."""
    vocab_parallel: _Tuning = None
    """Divide the embedding table among the cores by rows of the vocabulary instead of columns."""
    weight_gather_seq_len_threshold: _TuningCount = None
    """Prompt length in tokens from which weights are gathered instead of activations. Library default: 32768."""

    cast_type: Annotated[Literal["config", "as-declared"] | None, Hyphenated, _FEATURE] = None
    """`config` casts every weight to `dtype`; `as-declared` keeps the types that the model's code declares."""
    attention_dtype: Annotated[Dtype | None, _FEATURE] = None
    """Type that attention computes in. A type other than `dtype` needs `cast_type=as-declared`."""
    quantization_type: Annotated[
        Literal["per_channel_symmetric", "per_tensor_symmetric"] | None,
        _nxdi(tunes=False, computed=True),
    ] = None
    """Weights that share a scale with `quantize`: those of one output (the default here), or of a whole matrix (the
    default of the library)."""
    modules_to_not_convert: Annotated[Words | None, _nxdi(tunes=False, computed=True)] = None
    """Parts of names of the layers that `quantize` leaves in `dtype`. Default: `lm_head`; with
    `quantization_type=per_tensor_symmetric` the library knows no such layers."""
    is_mxfp4_compute: _Feature = None
    """Compute in MXFP4 with a checkpoint that is stored in it (gpt-oss)."""

    async_execution: Annotated[bool | None, _nxdi(keyword="async_mode", graph=())] = None
    """Start each decode step on the device before the host has read the previous one. It is the library's `async_mode`;
    the option `async_mode` is another, DJL Serving's way to send requests. Needs on-device sampling; excludes
    `token_generation_batches`. A request that the host samples (`output_logits`) makes all steps synchronous
    while it runs."""
    output_logits: _Feature = None
    """Return the logits to the host although the device samples, so that requests that only the host can sample, those
    with top_p among them, are served too."""
    token_generation_batches: Annotated[
        Buckets | None,
        _nxdi('ascending counts such as "256,512,1024", each a whole number of at least 1'),
    ] = None
    """Batch sizes to compile decode graphs for besides all slots."""
    windowed_context_encoding_size: _TuningCount = None
    """Prompt tokens that are prefilled at a time. Longer prompts need static batches, to which it changes the default:
    each prefill takes all slots. For a sliding window model it must equal the window."""
    enable_cte_modular_flow: _Tuning = None
    """Compile prefill graphs layer by layer. Library 0.9 accepts the keyword and does not use it."""
    layer_boundary_markers: _Tuning = None
    """Mark the borders of layers for the compiler."""
    k_cache_transposed: _Tuning = None
    """Store the keys transposed. Excludes `shard_over_sequence`."""

    attn_kernel_enabled: _Tuning = None
    """Kernel for attention over prompts. Default: the library decides by length."""
    strided_context_parallel_kernel_enabled: _Tuning = None
    """Kernel for context parallel attention with interleaved tokens; with `cp_degree` above 1."""
    qkv_nki_kernel_enabled: _Tuning = None
    """NKI version of the kernel that `fused_rmsnorm_qkv` turns on."""
    qkv_cte_nki_kernel_fuse_rope: _Tuning = None
    """Rotary embedding inside the QKV kernel, for prompts. Needs `fused_rmsnorm_qkv` and `qkv_nki_kernel_enabled`."""
    qkv_kernel_nbsd_layout: _Tuning = None
    """Layout of the QKV kernel's output with the heads first."""
    qkv_kernel_fuse_residual_add: _Tuning = None
    """Residual addition inside the QKV kernel."""
    mlp_kernel_fuse_residual_add: _Tuning = None
    """Residual addition inside the MLP kernel."""
    fused_rmsnorm_skip_gamma: _Tuning = None
    """Multiply the norm's weights into the matrices once, at load, instead of in each step. With llama and
    `fused_rmsnorm_qkv`; excludes `fused_rmsnorm_mlp`, `sequence_parallel` and `attn_block_tkg_nki_kernel_enabled`, with
    which the library's answers would be wrong."""
    out_proj_kernel_enabled: _Tuning = None
    """Kernel for the projection after attention."""
    attn_block_tkg_nki_kernel_enabled: _Tuning = None
    """Kernel for the whole attention block of a decode step. Needs a QKV kernel; excludes `shard_over_sequence`."""
    attn_block_tkg_nki_kernel_cache_update: _Tuning = None
    """The kernel of `attn_block_tkg_nki_kernel_enabled` also writes the KV cache."""
    attn_block_tkg_nki_kernel_cascaded_attention: _Tuning = None
    """The kernel of `attn_block_tkg_nki_kernel_enabled` attends in two stages."""
    attn_block_tkg_nki_kernel_use_online_softmax: _Tuning = None
    """The kernel of `attn_block_tkg_nki_kernel_enabled` computes the softmax in one pass. Library default: true."""
    attn_block_tkg_nki_kernel_disable_gpsimd_sb2sb: _Tuning = None
    """The kernel of `attn_block_tkg_nki_kernel_enabled` does not transfer data between cores with their GpSimd
    engine."""
    disable_argmax_kernel: _Tuning = None
    """Sample greedily on the device without the argmax kernel."""
    moe_fused_nki_kernel_enabled: _Tuning = None
    """Kernel for a whole mixture-of-experts layer of a decode step."""
    router_topk_nki_kernel_enabled: _Tuning = None
    """Kernel for the router."""
    expert_mlp_nki_kernel_enabled: _Tuning = None
    """Kernel for the experts."""
    shared_mlp_nki_kernel_enabled: _Tuning = None
    """Kernel for the shared experts."""

    capacity_factor: Annotated[Positive | None, _FEATURE] = None
    """Tokens that an expert takes, as a multiple of an even share; further tokens are dropped. Default: none are
    dropped."""
    early_expert_affinity_modulation: _Feature = None
    """Scale the inputs of the experts instead of their outputs."""
    disable_normalize_top_k_affinities: _Feature = None
    """Do not scale the weights of the chosen experts to a sum of 1."""
    fused_shared_experts: _Tuning = None
    """Fuse the gate and up projections of the shared experts."""
    shared_experts_sequence_parallel_enabled: _Tuning = None
    """Divide a prompt's tokens instead of the weights among the cores in the shared experts."""
    transpose_shared_experts_weights: _Tuning = None
    """Store the weights of the shared experts transposed."""
    use_index_calc_kernel: _Tuning = None
    """Kernel that finds each expert's tokens."""
    moe_mask_padded_tokens: _Feature = None
    """Mask padding for the experts."""
    blockwise_matmul_config: _TuningObject = None
    """Arguments of the experts' blockwise matrix product, such as `block_size`."""
    router_config: Annotated[Object | None, _nxdi(tunes=False, file=True)] = None
    """Arguments of the router: `act_fn` and `dtype`."""

    save_sharded_checkpoint: Annotated[bool | None, _nxdi(graph=())] = None
    """Store the weights divided among the cores in what `djl-neuronx compile` and DJL's partition script write, which
    makes starts faster. Default: true. The store of compiled graphs holds no weights."""
    seq_len_threshold_for_cc_tiling: _TuningCount = None
    """Prompt length in tokens from which collectives are split into tiles. Library default: 16384."""
    enable_spill_reload_dge: _Tuning = None
    """Use less memory for DMA rings, for long contexts."""
    scratchpad_page_size: _TuningCount = None
    """Page size of the scratch memory in MiB. Library default for prompts of 32768 tokens and more: 1024."""
    weights_to_skip_layout_optimization: Annotated[Words | None, _TUNING] = None
    """Regular expressions for weights whose layout the compiler does not change."""
    dma_order_config: Annotated[Unquoted | None, _nxdi(file=True)] = None
    """Order of transfers for the compiler, by submodel. Experimental in the library."""
    compiler_target: Annotated[
        Annotated[Word, Field(pattern=r"^\w+$")] | None,
        _nxdi("a platform such as trn2", keyword="target"),
    ] = None
    """Platform to compile for. Default: this machine's."""
    switch_cc: _Tuning = None
    """Order the ranks for machines whose devices are connected by switches."""
    disable_numeric_cc_token: _Tuning = None
    """Compile collectives without numeric tokens."""
    lm_head_pad: _Tuning = None
    """Pad the vocabulary to a multiple of the cores. The library does so where two cores act as one."""
    lm_head_pad_alignment_size: _TuningCount = None
    """The padded vocabulary is a multiple of this value times the degree."""
