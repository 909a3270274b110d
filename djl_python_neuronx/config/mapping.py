"""What options are in the libraries' own words: transformers-neuronx (`tnx`) and NxD Inference (`nxdi`).

Pure: nothing is imported, built or set. A backend makes the library's objects of the plain values given here and
applies the environment.

Source: transformers-neuronx 0.13, config.py and the models' constructors; neuronx-distributed-inference 0.9.0,
models/config.py, models/model_wrapper.py and inference_demo.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from pydantic import BaseModel

from djl_python_neuronx.config import memory
from djl_python_neuronx.config.capabilities import Capability
from djl_python_neuronx.config.findings import Finding
from djl_python_neuronx.config.options import ServingOptions, option
from djl_python_neuronx.errors import did_you_mean

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

_GIVEN: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "nxdi": MappingProxyType({"cast_logits_dtype": "float32", "on_device_embedding": True}),
    }
)
"""Values of options without an equivalent that the library has anyway: asking for them asks for nothing."""

_LACKING: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {"nxdi": MappingProxyType({"kv_cache_quantize": "int8"})}
)
"""Values that the library cannot do, of options that it otherwise has. NxDI casts the cache without scales, which
leaves nothing of it in int8."""

_AMP = MappingProxyType({"float32": "f32", "float16": "f16", "bfloat16": "bf16"})
_TNX_8_BITS = MappingProxyType({"int8": "s8", "fp8": "f8e4m3fn"})
_NXDI_8_BITS = MappingProxyType({"int8": "int8", "fp8": "f8e4m3"})
_LARGEST_TOP_K = 256

# The compiler takes fp8 only with the range that its hardware has. Source: transformers-neuronx, generation_demo.py.
_FP8_FLAG = "--internal-hlo2tensorizer-options=--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"
_KEYWORD = re.compile(r"[a-z]\w*")

_BY_HAND = frozenset(
    {
        *("tensor_parallel_degree", "dtype", "n_positions", "context_length_estimate"),
        *("max_rolling_batch_size", "pipeline_parallel_degree", "ep_degree", "unroll"),
        *("quantize", "on_device_generation", "multi_node", "draft_model_tp_size"),
        *("speculative_length", "enable_prefix_caching", "is_block_kv_layout"),
    }
)
"""Options whose values are not handed through as they are, or not to `NeuronConfig`."""


@dataclass(frozen=True)
class LibraryArguments:
    """What a library is given: plain values that JSON can hold, nothing that was left at its default."""

    constructor: dict[str, object] = field(default_factory=dict)
    """Keywords of TNX's `from_pretrained` beside `neuron_config`; empty for NxDI."""
    neuron_config: dict[str, object] = field(default_factory=dict)
    """Keywords of `NeuronConfig`. Where TNX takes an object (`quant`, `kv_cache_quant`, `continuous_batching`,
    `on_device_generation`) this is a dict of that object's keywords."""
    compiler_flags: tuple[str, ...] = ()
    """One argument each; `shlex.join` makes `NEURON_CC_FLAGS` of them."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables beside `NEURON_CC_FLAGS` that are to be set before the library is imported."""


def library_arguments(
    options: ServingOptions,
    loader: str,
    *,
    continuous: bool | None = None,
    capability: Capability | None = None,
) -> LibraryArguments:
    """The arguments that `options` (filled in) mean for a library; none for the cpu loader.

    `continuous` tells whether the model is batched continuously; None: as `continuous_batching` decides.
    `capability` is what the library can do with the architecture: what it cannot use is not among the arguments.
    """
    if continuous is None:
        continuous = continuous_batching(options)
    options = honoured(options, capability)
    writers: Mapping[str, Callable[[ServingOptions, bool], LibraryArguments]] = {
        "tnx": _tnx,
        "nxdi": _nxdi,
    }
    writer = writers.get(loader)
    if writer is None:
        return LibraryArguments()
    arguments = writer(options, continuous)
    arguments.neuron_config.update(options.override_neuron_config or {})
    return arguments


def honoured(options: ServingOptions, capability: Capability | None) -> ServingOptions:
    """The options without those that the architecture's code cannot use; all of them where it is not known.

    A library that is handed one all the same fails while it builds its graphs, hours later, or computes nonsense.
    """
    if capability is None:
        return options
    left = (*capability.unread, *capability.refused)
    changes: dict[str, object] = {name: ServingOptions.model_fields[name].default for name in left}
    if not capability.context_buckets:
        changes["context_length_estimate"] = None
    if not capability.token_buckets:
        changes["n_positions"] = options.max_model_len
    return options.model_copy(update=changes)


def continuous_batching(options: ServingOptions) -> bool:
    """True if new sequences join a running batch without encoding the others anew, as far as options decide it.

    One slot needs no batching, unless it verifies drafts or its prompts come in chunks. What the model's architecture
    can do is not asked here.
    """
    if options.rolling_batch_strategy is not None:
        return options.rolling_batch_strategy == "continuous_batching"
    several = (options.max_rolling_batch_size or 0) > 1
    return several or speculating(options) or options.enable_chunked_prefill


def drafting(options: ServingOptions) -> bool:
    """True if a draft model is to be used."""
    return options.speculative_draft_model is not None and options.speculative_length > 0


def context_lengths(
    prompts: tuple[int, ...] | None, limit: int | None, slots: int | None, *, continuous: bool
) -> tuple[int, ...]:
    """The prompt lengths that transformers-neuronx compiles where prompts of `prompts` are served, ascending.

    A sequence that joins a static batch has everyone encoded anew, however long they have become. What is beyond the
    largest length would run token by token, so sequences of `limit` tokens have a graph there. Without `prompts` there
    are no prompt graphs.
    """
    if continuous or not prompts or not limit or (slots or 1) == 1:
        return prompts or ()
    return tuple(sorted({*prompts, limit}))


def speculating(options: ServingOptions) -> bool:
    """True if drafts are to be verified, wherever they come from."""
    looking_up = options.ngram_prompt_lookup_max is not None and options.speculative_length > 0
    return looking_up or drafting(options)


def unmapped(options: ServingOptions, loader: str) -> tuple[str, ...]:
    """The options that ask for something of a library and have no equivalent in this one.

    Those whose marker has `tunes` are to be left out, the others to be refused. Options that are ours alone, and values
    that ask for what the library does anyway, are not among them.
    """
    found = []
    for name, entry in ServingOptions.model_fields.items():
        value = getattr(options, name)
        given = _GIVEN.get(loader, {}).get(name)
        nothing = value is None or value is False or value == entry.default or value == given
        missing = bool(option(name).to) and loader not in option(name).to
        lacking = value is not None and value == _LACKING.get(loader, {}).get(name)
        if lacking or (missing and not nothing):
            found.append(name)
    return tuple(found)


def unknown_overrides(
    options: ServingOptions, loader: str, known: Collection[str] = ()
) -> Iterator[Finding]:
    """What is wrong with the names in `override_neuron_config`.

    `known` are the keywords of the installed library's `NeuronConfig`; without it (no library at hand) only the names
    that no configuration may set are found.
    """
    for name in options.override_neuron_config or {}:
        problem = _override_problem(name, loader, known)
        if problem is not None:
            yield Finding(("override_neuron_config",), f"{name}: {problem}")


def _override_problem(name: str, loader: str, known: Collection[str]) -> str | None:
    if name in DERIVED:
        return f"it follows from {DERIVED[name]}; set option.{DERIVED[name]} instead"
    if name in RESERVED:
        return f"it cannot be set: {RESERVED[name]}; remove it"
    if not known or name in known:
        return None
    hint = did_you_mean(name, known) or "; correct or remove it."
    return f"the installed library ({loader}) has no such keyword{hint}"


def _tnx(options: ServingOptions, continuous: bool) -> LibraryArguments:
    arguments = LibraryArguments(
        compiler_flags=tuple(_tnx_flags(options)), environment=_environment(options)
    )
    amp = _AMP.get(options.dtype)
    slots = options.max_rolling_batch_size
    lengths = context_lengths(
        options.context_length_estimate, options.max_model_len, slots, continuous=continuous
    )
    _put(
        arguments.constructor,
        tp_degree=_degree(options),
        batch_size=slots,
        amp=amp,
        n_positions=_plain(options.n_positions),
        context_length_estimate=list(lengths) or None,
        unroll=options.unroll,
    )
    config = arguments.neuron_config
    config.update(_handed_through(options, "tnx"))
    for keyword, bits in (
        ("quant", options.weight_dtype),
        ("kv_cache_quant", options.kv_cache_quantize),
    ):
        if bits is not None:
            config[keyword] = _put({}, quant_dtype=_TNX_8_BITS[bits], dequant_dtype=amp)
    if continuous and slots is not None:
        config["continuous_batching"] = _shared_cache(options, slots)
    if options.on_device_generation is not None:
        config["on_device_generation"] = _generation(options, slots)
    if options.load_split_model:
        config.setdefault("on_device_embedding", True)
    if options.multi_node:
        config.setdefault("fuse_mlp", True)
        config.setdefault("mlp_out_weight_transpose", True)
    return arguments


def _shared_cache(options: ServingOptions, slots: int) -> dict[str, object]:
    # The other name of it, max_num_seqs, is unknown to libraries before 0.12.
    cache: dict[str, object] = {"batch_size_for_shared_caches": slots}
    length, size = options.max_model_len, options.pa_block_size
    if options.is_block_kv_layout or options.enable_chunked_prefill:
        cache["optimized_paged_attention"] = True
        _put(cache, max_model_len=length)
    if options.enable_chunked_prefill:
        cache["enable_chunked_prefill"] = True
    if options.enable_chunked_prefill and length is not None and size is not None:
        # What `init_cache_engine` takes. Block 0 is for padding.
        blocks = options.pa_num_blocks or memory.blocks_of(length, slots, size) + 1
        cache.update(block_size=size, num_blocks=blocks)
    return cache


def _generation(options: ServingOptions, slots: int | None) -> dict[str, object]:
    generation = options.on_device_generation
    written = {} if generation is None else generation.model_dump(exclude_none=True)
    if written.get("per_batch_line") and slots is not None:
        for name in ("top_k", "top_p", "temperature", "top_p_min_tokens"):
            written[name] = [written[name]] * slots
    return written


def _tnx_flags(options: ServingOptions) -> Iterator[str]:
    if options.neuron_optimize_level is not None:
        yield f"-O{options.neuron_optimize_level}"
    if options.enable_mixed_precision_accumulation:
        yield "--enable-mixed-precision-accumulation"
    if options.enable_saturate_infinity:
        yield "--enable-saturate-infinity"
    if (factor := options.neuron_cc_pipeline_factor) is not None:
        yield f"--tensorizer-options=--enable-ccop-compute-overlap --cc-pipeline-tiling-factor={factor}"
    if "fp8" in {options.weight_dtype, options.kv_cache_quantize}:
        yield _FP8_FLAG


def _nxdi(options: ServingOptions, continuous: bool) -> LibraryArguments:
    arguments = LibraryArguments(environment=_environment(options))
    config = arguments.neuron_config
    config.update(_handed_through(options, "nxdi"))
    _put(
        config,
        tp_degree=_degree(options),
        pp_degree=_above_one(options.pipeline_parallel_degree),
        ep_degree=_above_one(options.ep_degree),
        torch_dtype=None if options.dtype == "auto" else options.dtype,
        on_device_sampling_config=_sampling(options),
    )
    config.update(_nxdi_lengths(options))
    config.update(_nxdi_batches(options, continuous))
    config.update(_nxdi_quantization(options))
    if options.enable_prefix_caching:
        config["is_prefix_caching"] = True
    if options.is_block_kv_layout or options.enable_prefix_caching:
        config["is_block_kv_layout"] = True
    if drafting(options):
        config["enable_fused_speculation"] = True
        # TNX counts drafts; NxDI counts tokens of a step, of which the last is the large model's own.
        config["speculation_length"] = options.speculative_length + 1
    if "fp8" in {options.weight_dtype, options.kv_cache_quantize}:
        arguments.environment.update(XLA_HANDLE_SPECIAL_SCALAR="1", UNSAFE_FP8FNCAST="1")
    if options.logical_nc_config is not None:
        arguments.environment["NEURON_LOGICAL_NC_CONFIG"] = str(options.logical_nc_config)
    return arguments


def _nxdi_lengths(options: ServingOptions) -> dict[str, object]:
    limit, prompts = options.max_model_len, options.context_length_estimate
    lengths = _put(
        {},
        seq_len=limit,
        max_length=limit,
        max_context_length=prompts[-1] if prompts else limit,
        context_encoding_buckets=_plain(prompts),
        token_generation_buckets=_plain(options.token_buckets),
    )
    if prompts or options.token_buckets:
        lengths["enable_bucketing"] = True
    return lengths


def _nxdi_batches(options: ServingOptions, continuous: bool) -> dict[str, object]:
    slots = options.max_rolling_batch_size
    if slots is None:
        return {}
    names = ("batch_size", "ctx_batch_size", "tkg_batch_size", "max_batch_size")
    batches: dict[str, object] = dict.fromkeys(names, slots)
    if continuous:
        # A continuous batching prompt graph takes one row (kv_cache_manager.py asserts it).
        batches.update(ctx_batch_size=1, is_continuous_batching=True)
    return batches


def _nxdi_quantization(options: ServingOptions) -> dict[str, object]:
    written: dict[str, object] = {}
    if options.weight_dtype is not None:
        written["quantized"] = True
        written["quantization_dtype"] = _NXDI_8_BITS[options.weight_dtype]
        written["quantization_type"] = options.quantization_type or "per_channel_symmetric"
    if options.kv_cache_quantize == "fp8":
        # The type is the library's default, and a torch object: text would not do.
        written["kv_quant_config"] = {"direct_cast": True}
    return written


def _sampling(options: ServingOptions) -> dict[str, object] | None:
    """`OnDeviceSamplingConfig`; `per_batch_line` and `top_p_min_tokens` are unknown to it."""
    generation = options.on_device_generation
    if generation is None:
        return None
    names = {"do_sample", "dynamic", "deterministic", "top_k", "top_p", "temperature"}
    written = generation.model_dump(include=names)
    written["global_topk"] = generation.global_top_k or _LARGEST_TOP_K
    return written


def _handed_through(options: ServingOptions, loader: str) -> dict[str, object]:
    """The options whose values the library's `NeuronConfig` takes as they are, by its own names."""
    written: dict[str, object] = {}
    for name, entry in ServingOptions.model_fields.items():
        keyword, value = option(name).to.get(loader, ""), getattr(options, name)
        unset = value is None or (value is False and entry.default is False)
        if name not in _BY_HAND and _KEYWORD.fullmatch(keyword) and not unset:
            written[keyword] = _plain(value)
    return written


def _environment(options: ServingOptions) -> dict[str, str]:
    cache = options.compiled_graph_path
    return {} if cache is None else {"NEURON_COMPILE_CACHE_URL": cache}


def _put(target: dict[str, object], **values: object) -> dict[str, object]:
    """`target` with the values that are not None."""
    target.update({name: value for name, value in values.items() if value is not None})
    return target


def _degree(options: ServingOptions) -> int | None:
    degree = options.tensor_parallel_degree
    return degree if isinstance(degree, int) else None


def _above_one(degree: int) -> int | None:
    return degree if degree > 1 else None


def _plain(value: object) -> object:
    """Tuples become lists, models dicts: what JSON holds and the libraries sort in place."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value
