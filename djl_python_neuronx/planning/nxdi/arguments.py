"""Arguments of NxD Inference, derived from the options.

Source: neuronx-distributed-inference 0.9.0, models/config.py, models/model_wrapper.py and inference_demo.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import ceil, log2
from typing import Any

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.values import SMALLEST_BUCKET
from djl_python_neuronx.planning.arguments import (
    LibraryArguments,
    PlannedGraph,
    blocks_of,
    degree_of,
    environment_of,
    handed_through,
    override,
    plain,
    put,
)
from djl_python_neuronx.planning.capabilities import round_up
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.lora import MODULES
from djl_python_neuronx.planning.nxdi.versions import numbers

_LARGEST_TOP_K = 256
BLOCK_SIZE = 32
"""Largest default of `pa_block_size`."""
_8_BITS = {"int8": "int8", "fp8": "f8e4m3"}


def write_arguments(case: Case) -> LibraryArguments:
    """Return the arguments of NxD Inference for options that are filled in."""
    options = case.effective
    arguments = LibraryArguments(environment=environment_of(options))
    config = arguments.neuron_config
    config.update(handed_through(options, "nxdi"))
    put(
        config,
        tp_degree=degree_of(options),
        pp_degree=_above_one(options.pipeline_parallel_degree),
        ep_degree=_above_one(options.ep_degree),
        torch_dtype=None if options.dtype == "auto" else options.dtype,
        on_device_sampling_config=_sampling(options),
        lora_config=_adapters(case),
    )
    config.update(_lengths(case, _prompts(case)))
    if case.lookahead:
        config["speculation_length"] = options.speculative_length + 1
    if case.fused:
        drafts, of_draft = _fused(options)
        config.update(drafts)
        arguments.fused_draft.update(of_draft)
    config.update(_batches(options, case.continuous_batching))
    config.update(_blocks(case))
    config.update(_quantised(case, options))
    if "fp8" in {options.weight_dtype, options.kv_cache_quantize}:
        # Source: inference_demo.py, and AWS's guide of the features.
        arguments.environment.update(XLA_HANDLE_SPECIAL_SCALAR="1", UNSAFE_FP8FNCAST="1")
    if options.logical_nc_config is not None:
        arguments.environment["NEURON_LOGICAL_NC_CONFIG"] = str(options.logical_nc_config)
    override(config, options)
    return arguments


def graphs(case: Case) -> Iterator[PlannedGraph]:
    """Return the graphs that the library compiles.

    Source: neuronx-distributed-inference 0.9, modules/autobucketing.py: a prefill graph for each context length; a
    decode graph for each token length and number of sequences. With prefix caching each prefill graph again for each
    length of a prefix.
    """
    options, slots = case.effective, case.slots
    rows = 1 if case.continuous_batching else slots
    for prefix, prompt in product((0, *prefixes(case)), _prompts(case)):
        yield PlannedGraph("prefill", prompt, rows, prefix)
    lengths = _decodes(case)
    if case.lookahead:
        yield from (PlannedGraph("speculation", length, slots) for length in lengths)
    if case.fused:
        return
    for size in sorted({*(options.token_generation_batches or ()), slots}):
        yield from (PlannedGraph("decode", length, size) for length in lengths)


def prefixes(case: Case) -> tuple[int, ...]:
    """Return the lengths of a cached prefix to compile for; none without prefix caching.

    By default the longest one that the library reads, and a quarter: of a prompt it runs at least as many tokens as the
    shortest prefill graph has.
    """
    options, prompts = case.effective, _prompts(case)
    if not options.enable_prefix_caching or not prompts:
        return ()
    if options.prefix_buckets:
        return options.prefix_buckets
    step = max(options.pa_block_size or 1, SMALLEST_BUCKET)
    longest = round_up(max(prompts[-1] - prompts[0], 1), step)
    return tuple(sorted({round_up(longest // 4, step) or step, longest}))


def library_buckets(limit: int) -> list[int]:
    """Return the lengths that the library chooses up to a limit. Source: modules/autobucketing.py, generate_buckets."""
    return [*(2**power for power in range(ceil(log2(SMALLEST_BUCKET)), round(log2(limit)))), limit]


def _prompts(case: Case) -> tuple[int, ...]:
    """Return the prompt lengths to compile for.

    A static batch prefills all its sequences again when one joins: as long as they are by then.
    """
    prompts, limit = case.effective.context_length_estimate or (), case.effective.max_model_len
    if not prompts or limit is None or case.continuous_batching or case.slots == 1:
        return prompts
    return (*(length for length in prompts if length < limit), limit)


def _fused(options: ServingOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return keywords for a draft model in the same graphs, and those in which its own configuration differs."""
    eagle = options.draft_model_kind != "draft_model"
    eagle3 = options.draft_model_kind == "eagle3"
    config = put(
        {"enable_fused_speculation": True},
        enable_eagle_speculation=eagle or None,
        is_eagle3=eagle3 or None,
        enable_eagle_draft_input_norm=options.enable_eagle_draft_input_norm or eagle3 or None,
    )
    draft: dict[str, Any] = {"enable_fused_speculation": False}
    draft |= {"is_eagle_draft": True} if eagle else {"speculation_length": 0}
    return config, put(draft, tp_degree=options.draft_model_tp_size)


def _decodes(case: Case) -> Sequence[int]:
    """Return the lengths of the graphs for decodes; the last has the positions for drafts behind a slot's end."""
    limit, lengths = (
        (case.options.max_model_len or 1) + case.lookahead,
        case.effective.token_buckets,
    )
    return (*lengths[:-1], limit) if lengths else library_buckets(limit)


def _lengths(case: Case, prompts: tuple[int, ...]) -> dict[str, object]:
    options, more = case.effective, case.lookahead
    limit = options.max_model_len and options.max_model_len + more
    buckets = _decodes(case) if options.token_buckets else None
    lengths = put(
        {},
        seq_len=limit,
        max_length=limit,
        max_context_length=prompts[-1] if prompts else options.max_model_len,
        context_encoding_buckets=plain(prompts or None),
        token_generation_buckets=plain(buckets),
    )
    if prompts or options.token_buckets:
        lengths["enable_bucketing"] = True
    return lengths


def _batches(options: ServingOptions, continuous: bool) -> dict[str, object]:
    slots = options.max_rolling_batch_size
    if slots is None:
        return {}
    names = ("batch_size", "ctx_batch_size", "tkg_batch_size", "max_batch_size")
    batches: dict[str, object] = dict.fromkeys(names, slots)
    if continuous:
        # A prefill graph of continuous batching takes one row (kv_cache_manager.py asserts it).
        batches.update(ctx_batch_size=1, is_continuous_batching=True)
    return batches


def _blocks(case: Case) -> dict[str, object]:
    """Keywords of prefix caching, the one use of a KV cache in blocks. The library adds a block for padding."""
    options = case.effective
    limit, slots, size = (
        options.max_model_len,
        options.max_rolling_batch_size,
        options.pa_block_size,
    )
    if not options.enable_prefix_caching or limit is None or slots is None or size is None:
        return {}
    return {
        "is_block_kv_layout": True,
        "is_prefix_caching": True,
        "pa_num_blocks": options.pa_num_blocks or blocks_of(limit, slots, size),
        "prefix_buckets": [*prefixes(case)],
    }


def _sampling(options: ServingOptions) -> dict[str, object] | None:
    """`OnDeviceSamplingConfig`; `per_batch_line` and `top_p_min_tokens` are unknown to it."""
    generation = options.on_device_generation
    if generation is None:
        return None
    names = {"do_sample", "dynamic", "deterministic", "top_k", "top_p", "temperature"}
    written = generation.model_dump(include=names)
    written["global_topk"] = generation.global_top_k or _LARGEST_TOP_K
    return written


def _adapters(case: Case) -> dict[str, object] | None:
    """`LoraServingConfig`: its first place stays empty, for the model itself. Adapters are written after a load."""
    options = case.effective
    if not options.enable_lora:
        return None
    shards, even = options.lora_shard_linear_layer, (case.model.hidden_size or 0) % case.degree == 0
    return {
        "max_loras": options.max_loras + 1,
        "max_lora_rank": options.max_lora_rank,
        "batch_size": case.slots,
        "target_modules": [*(options.lora_target_modules or MODULES)],
        "lora_shard_linear_layer": even if shards is None else shards,
        "dynamic_multi_lora": True,
    }


def _quantised(case: Case, options: ServingOptions) -> dict[str, object]:
    """Return the keywords of weights and a cache in 8 bits.

    Tied embeddings replace the weights of `lm_head` when all are loaded, so that it has to stay as it is. With a scale
    for each matrix the others cannot be left out. `kv_cache_quant` is the cache's up to 0.7; from 0.8 on it lets the
    compiler take fp8, and `kv_quant_config` is the cache's.
    """
    config: dict[str, object] = {}
    if options.weight_dtype is not None:
        kind = options.quantization_type or "per_channel_symmetric"
        stays = kind == "per_channel_symmetric" or case.model.tied_embeddings
        left = ("lm_head",) if stays else None
        put(
            config,
            quantized=True,
            quantization_dtype=_8_BITS[options.weight_dtype],
            quantization_type=kind,
            modules_to_not_convert=plain(options.modules_to_not_convert or left),
        )
    if options.kv_cache_quantize == "fp8":
        config["kv_cache_quant"] = True
        if case.library_version is None or numbers(case.library_version) >= (0, 8):
            config["kv_quant_config"] = {"direct_cast": True}
    return config


def _above_one(degree: int) -> int | None:
    return degree if degree > 1 else None
