"""What options are in the words of transformers-neuronx.

Source: transformers-neuronx 0.13, config.py and the models' constructors.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning import memory
from djl_python_neuronx.planning.arguments import (
    LibraryArguments,
    degree_of,
    environment_of,
    handed_through,
    plain,
    put,
)

_AMP = MappingProxyType({"float32": "f32", "float16": "f16", "bfloat16": "bf16"})
_8_BITS = MappingProxyType({"int8": "s8", "fp8": "f8e4m3fn"})
# The compiler takes fp8 only with the range that its hardware has. Source: transformers-neuronx, generation_demo.py.
_FP8_FLAG = "--internal-hlo2tensorizer-options=--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"


def tnx_arguments(options: ServingOptions, continuous: bool) -> LibraryArguments:
    """The arguments of transformers-neuronx. `continuous`: whether the model is batched continuously."""
    arguments = LibraryArguments(
        compiler_flags=tuple(_flags(options)), environment=environment_of(options)
    )
    amp = _AMP.get(options.dtype)
    slots = options.max_rolling_batch_size
    lengths = context_lengths(
        options.context_length_estimate, options.max_model_len, slots, continuous=continuous
    )
    put(
        arguments.constructor,
        tp_degree=degree_of(options),
        batch_size=slots,
        amp=amp,
        n_positions=plain(options.n_positions),
        context_length_estimate=list(lengths) or None,
        unroll=options.unroll,
    )
    config = arguments.neuron_config
    config.update(handed_through(options, "tnx"))
    for keyword, bits in (
        ("quant", options.weight_dtype),
        ("kv_cache_quant", options.kv_cache_quantize),
    ):
        if bits is not None:
            config[keyword] = put({}, quant_dtype=_8_BITS[bits], dequant_dtype=amp)
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
        put(cache, max_model_len=length)
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


def _flags(options: ServingOptions) -> Iterator[str]:
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
