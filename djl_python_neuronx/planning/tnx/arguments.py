"""Arguments of transformers-neuronx, and the graphs that it compiles with them.

Source: transformers-neuronx 0.13, config.py and the models' constructors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from djl_python_neuronx.config.findings import Finding
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.values import SMALLEST_BUCKET, make_buckets
from djl_python_neuronx.planning.arguments import (
    LibraryArguments,
    PlannedGraph,
    blocks_of,
    degree_of,
    environment_of,
    graph_lengths,
    handed_through,
    override,
    put,
)
from djl_python_neuronx.planning.capabilities import Capability
from djl_python_neuronx.planning.case import Case, Filled

_AMP = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_8_BITS = {"int8": "s8", "fp8": "f8e4m3fn"}
# The compiler takes fp8 only with the range that its hardware has. Source: transformers-neuronx, generation_demo.py.
_FP8_FLAG = "--internal-hlo2tensorizer-options=--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"
_ROW_SAMPLING = ("top_k", "top_p", "temperature", "top_p_min_tokens")
"""Keywords of `GenerationConfig` that hold a value for each row with `per_batch_line`."""
_MOST_BLOCKS = 256
"""The library unrolls a loop over all blocks: 48 instructions for each, where a layer has 154 (seen, tp 1). Large
blocks cost little, for none is shared: the last of a sequence lies half empty, and is read all the same."""


def write_arguments(case: Case) -> LibraryArguments:
    """Return the arguments of transformers-neuronx for options that are filled in."""
    options, capability = case.effective, case.capability or Capability()
    slots, limit = options.max_rolling_batch_size, options.max_model_len
    config = _neuron_config(case)
    prompts = options.context_length_estimate or ()
    if not case.foreign_graphs:
        prompts = context_lengths(prompts, limit, slots, continuous=case.continuous_batching)
    positions: object = limit
    if limit is not None and capability.token_buckets:
        positions = list(_token_lengths(case, limit))
    constructor = put(
        {},
        tp_degree=degree_of(options),
        batch_size=slots,
        prompt_batch_size=slots if capability.prompt_batch_size else None,
        amp=_AMP.get(options.dtype),
        n_positions=positions,
        context_length_estimate=list(prompts) or None,
        unroll=options.unroll,
    )
    return LibraryArguments(
        constructor=constructor,
        neuron_config=config,
        calls=_calls(options),
        compiler_flags=tuple(_flags(options)),
        environment=environment_of(options),
    )


def graphs(case: Case) -> Iterator[PlannedGraph]:
    """Yield the graphs that the library compiles, and those of a draft model.

    A prefill graph for each context length and a decode graph for each token length; with continuous batching a
    prefill runs one row. A class that takes no list of token lengths doubles from 128. For prompts in chunks the
    library makes no decode graph, but a mixed one for each number of tokens of a step and of cache blocks that all
    slots take at one of the lengths. A speculation graph for each token length comes on top.
    """
    arguments, slots = write_arguments(case), case.slots
    positions = arguments.constructor["n_positions"]
    lengths = positions if isinstance(positions, list) else make_buckets(positions)
    prompts = arguments.constructor.get("context_length_estimate", ())
    if engine := arguments.calls.get("init_cache_engine"):
        for blocks in sorted({length * slots // engine["block_size"] for length in lengths}):
            yield from (PlannedGraph("mixed", tokens, blocks) for tokens in prompts)
    else:
        rows = 1 if "continuous_batching" in arguments.neuron_config else slots
        yield from (PlannedGraph("prefill", prompt, rows) for prompt in prompts)
        yield from (PlannedGraph("decode", length, slots) for length in lengths)
        if "enable_speculative_decoder" in arguments.calls:
            yield from (PlannedGraph("speculation", length, slots) for length in lengths)
    if case.options.drafting:
        # A draft model has its own options, and only architectures with continuous batching can be one.
        prompts, lengths = graph_lengths(case.options)
        yield from (PlannedGraph("draft prefill", prompt, 1) for prompt in prompts)
        yield from (PlannedGraph("draft decode", length, slots) for length in lengths)


def fill(case: Case, positions: int, slots: int) -> Filled:
    """Return what a KV cache in blocks needs, for prompts in chunks: its layout and the size of a block."""
    filled: Filled = {}
    if not case.effective.enable_chunked_prefill:
        return filled
    if case.options.cache_layout is None:
        filled["cache_layout"] = "BSH", "the layout of a KV cache in blocks"
    if case.options.pa_block_size is None:
        size, below = SMALLEST_BUCKET, 1 << (max(positions - 1, 1).bit_length() - 1)
        while size * _MOST_BLOCKS < positions * slots:
            size *= 2
        why = f"a power of two below n_positions, from {SMALLEST_BUCKET} on, for at most {_MOST_BLOCKS} blocks"
        filled["pa_block_size"] = min(size, below), why
    return filled


def stored_findings(case: Case) -> Iterator[Finding]:
    """Return what weights that are cut exclude, and what graphs lack that another program compiled."""
    options = case.effective
    if case.presharded and options.shard_over_sequence:
        problem = "with shard_over_sequence transformers-neuronx cannot load the weights that it has cut; leave it out"
        yield Finding(("shard_over_sequence",), problem)
    prompts, limit = options.context_length_estimate or (), options.max_model_len
    here = context_lengths(prompts, limit, case.slots, continuous=case.continuous_batching)
    if case.foreign_graphs and here != prompts:
        problem = (
            f"another program compiled the graphs, for these prompts only: when a sequence joins, the tokens beyond "
            f"{prompts[-1]} run one by one; compile the model again to have a graph for {limit} tokens"
        )
        yield Finding(("context_length_estimate",), problem, "warning")
    # Source: LMI before djl-serving 1132e3ab, model_loader.py get_model_specific_kwargs.
    lengths = () if options.token_buckets else make_buckets(limit or 1)
    if case.foreign_graphs and case.continuous_batching and len(lengths) > 1:
        problem = (
            "another program compiled the graphs, and the old LMI container did so for decodes of the longest length "
            f"alone; if a start finds no graphs, set n_positions=[{limit}]"
        )
        yield Finding(("n_positions",), problem, "warning")


def context_lengths(
    prompts: tuple[int, ...] | None, limit: int | None, slots: int | None, *, continuous: bool
) -> tuple[int, ...]:
    """Return the prompt lengths to compile where prompts of `prompts` are served, ascending.

    A sequence that joins a static batch makes all of them prefill again, however long they have become. Beyond the
    largest length that would run token by token, so a graph for `limit` tokens is added. Without `prompts` there are
    no prefill graphs.
    """
    if continuous or not prompts or not limit or (slots or 1) == 1:
        return prompts or ()
    return tuple(sorted({*prompts, limit}))


def takes_longest_only(case: Case) -> bool:
    """Return whether decodes are compiled for the longest token length only.

    It is so where continuous batching meets a cache that is divided by tokens: transformers-neuronx 0.13 changes to the
    next length too late there (decoder.py: `forward_single` allows for the division only where all rows share a
    position). Seen: lengths 24 and 48, tp 4, wrong from position 24 on. Where every head has its own keys the
    library does not divide the cache (`placement.findings`).
    """
    options, heads = case.effective, case.model.num_heads
    shared = not heads or heads != case.model.num_kv_heads or options.group_query_attention
    return bool(options.shard_over_sequence and shared and case.continuous_batching)


def _token_lengths(case: Case, limit: int) -> tuple[int, ...]:
    """Return the lengths to compile decodes for, ascending."""
    options = case.effective
    lengths = options.token_buckets or make_buckets(limit)
    if options.enable_chunked_prefill and (size := options.pa_block_size):
        # A graph takes `length * slots // size` blocks: all that slots of this length can fill only if they are whole.
        return tuple(sorted({-(-length // size) * size for length in lengths}))
    return lengths[-1:] if takes_longest_only(case) else lengths


def _neuron_config(case: Case) -> dict[str, Any]:
    options = case.effective
    slots, amp = options.max_rolling_batch_size, _AMP.get(options.dtype)
    config = handed_through(options, "tnx")
    quantised = {"quant": options.weight_dtype, "kv_cache_quant": options.kv_cache_quantize}
    for keyword, bits in quantised.items():
        if bits is not None:
            config[keyword] = put({}, quant_dtype=_8_BITS[bits], dequant_dtype=amp)
    if case.continuous_batching and slots is not None:
        config["continuous_batching"] = _shared_cache(options, slots)
    if options.on_device_generation is not None:
        config["on_device_generation"] = _generation(options, slots)
    if options.load_split_model:
        config.setdefault("on_device_embedding", True)
    if options.multi_node:
        config.setdefault("fuse_mlp", True)
        config.setdefault("mlp_out_weight_transpose", True)
    override(config, options)
    if case.presharded:
        config["on_device_embedding"] = True  # the host has no embedding in weights that are cut
    return config


def _shared_cache(options: ServingOptions, slots: int) -> dict[str, Any]:
    # The other name of it, max_num_seqs, is unknown to libraries before 0.12.
    cache: dict[str, Any] = {"batch_size_for_shared_caches": slots}
    if options.is_block_kv_layout or options.enable_chunked_prefill:
        cache["optimized_paged_attention"] = True
        put(cache, max_model_len=options.max_model_len)
    if options.enable_chunked_prefill:
        cache["enable_chunked_prefill"] = True
    return cache


def _generation(options: ServingOptions, slots: int | None) -> dict[str, Any]:
    generation = options.on_device_generation
    written = {} if generation is None else generation.model_dump(exclude_none=True)
    if written.get("dynamic"):
        written["per_batch_line"] = True  # each request has its own parameters
    if written.get("per_batch_line") and slots is not None:
        for name in _ROW_SAMPLING:
            written[name] = [written[name]] * slots
    return written


def _calls(options: ServingOptions) -> dict[str, dict[str, Any]]:
    calls: dict[str, dict[str, Any]] = {}
    slots, limit = options.max_rolling_batch_size, options.max_model_len
    size = options.pa_block_size
    if options.enable_chunked_prefill and slots and limit and size:
        blocks = options.pa_num_blocks or blocks_of(limit, slots, size)
        calls["init_cache_engine"] = {"block_size": size, "num_blocks": blocks}
    if options.speculating and slots:
        # The last of a step's tokens is the model's own.
        length = options.speculative_length + 1
        calls["enable_speculative_decoder"] = {"speculation_length": length, "batch_sizes": [slots]}
    calls["to_neuron"] = {}
    return calls


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
