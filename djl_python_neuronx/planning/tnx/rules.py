"""Combinations of options that transformers-neuronx refuses, gets wrong or ignores.

Source: transformers-neuronx 0.13, config.py and, where stated, another file. Limits of architectures are in
capabilities.py; `findings` compares options with the model's sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from operator import attrgetter

from djl_python_neuronx.config.findings import ANY, SET, UNSET, Finding, Rule, when
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.values import join_words, make_buckets
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.tnx.arguments import context_lengths, takes_longest_only
from djl_python_neuronx.planning.tnx.heads import keeps_strategy, padded_heads

_speculating = attrgetter("speculating")
_DISABLED = "transformers-neuronx disables it without a message unless"
_FLASH = "shard_over_sequence"
_TILE_ORDERS = ("mlp_in_weight_tiling_permute_order", "mlp_out_weight_tiling_permute_order")


def _whole_heads(options: ServingOptions) -> bool:
    return options.attention_layout == "BSH" and options.group_query_attention == "replicated-heads"


def _half_fused(options: ServingOptions) -> bool:
    fused, transposed = options.fuse_mlp, options.mlp_out_weight_transpose
    if options.multi_node:  # which implies both where they are not set
        fused = fused is not False
        transposed = transposed is not False
    return bool(fused) and not transposed


def _several_buckets(options: ServingOptions) -> bool:
    limit = options.max_model_len
    if limit is None or options.in_blocks:
        return False
    one = {None, (limit,)}
    return options.context_length_estimate not in one or options.token_buckets not in one


def _out_of_order(order: tuple[int, ...]) -> bool:
    return sorted(order) != [0, 1, 2, 3] or order.index(2) > order.index(3)


def _one_block(options: ServingOptions) -> bool:
    size, limit = options.pa_block_size, options.max_model_len
    return bool(size and limit and size >= limit)


# Seen on the real library, tiny llamas; Source: llama/hlo.py, layers/attention_utils.py and generation.py.
_CHUNKS: tuple[Rule, ...] = (
    when(enable_prefix_caching=True, enable_chunked_prefill=UNSET).note(
        "no effect: transformers-neuronx shares prefixes in blocks alone; set enable_chunked_prefill=true, or leave it "
        "out"
    ),
    when(is_block_kv_layout=True, enable_chunked_prefill=UNSET).refuse(
        "only chunked prefill uses a KV cache in blocks; set enable_chunked_prefill=true, or leave is_block_kv_layout "
        "out"
    ),
    when(enable_chunked_prefill=True, cache_layout="SBH").refuse(
        "blocks of the KV cache need the BSH layout; leave cache_layout out"
    ),
    when(
        pa_block_size=lambda size: size.bit_count() != 1,
        enable_chunked_prefill=True,
    ).refuse(
        "transformers-neuronx divides positions by it, exactly for powers of two only (41 and 47 gave wrong tokens); "
        "set a power of two"
    ),
    when(_one_block, pa_block_size=ANY, n_positions=ANY, enable_chunked_prefill=True).refuse(
        "pa_block_size must be smaller than n_positions; lower it, or raise n_positions"
    ),
    when(enable_chunked_prefill=True, group_query_attention="shard-over-batch").refuse(
        "a cache divided by rows cannot have blocks (decoder.py asserts it); leave one of them out"
    ),
    when(kv_cache_quantize=SET, enable_chunked_prefill=SET).refuse(
        "transformers-neuronx joins cached and new values, which must have one type; leave one of them out"
    ),
    when(shard_over_sequence=SET, enable_chunked_prefill=SET).refuse(
        "flash decoding needs blocks for 128 more positions in every slot, which are not allocated; leave one of them "
        "out"
    ),
    when(on_device_generation=lambda sampled: sampled.dynamic, enable_chunked_prefill=True).refuse(
        "transformers-neuronx looks up a row's parameters by its place in the KV cache, and gets those of another row; "
        'leave one of them out, or set on_device_generation={"do_sample": false}'
    ),
    # Source: layers/generation.py, where the token of a row of NaN is one that others may draw too.
    when(
        on_device_generation=lambda sampled: sampled.do_sample and not sampled.dynamic,
        enable_chunked_prefill=True,
    ).refuse(
        "a step is repeated where a row's token may stand for NaN, and samples again, which changes the distribution; "
        'leave one of them out, or set on_device_generation={"do_sample": false}'
    ),
)


def _with_drafts(source: str) -> Iterator[Rule]:
    """Yield the rules of speculation with drafts from the option `source`."""
    yield when(_speculating, rolling_batch_strategy="naive_rolling_batch", **{source: SET}).refuse(
        "sequences of a static batch share a position, so all would wait for the one with the fewest accepted drafts; "
        "leave rolling_batch_strategy out"
    )
    yield when(_speculating, cache_layout="BSH", **{source: SET}).refuse(
        "transformers-neuronx verifies several tokens a row only with an SBH cache; leave cache_layout out"
    )
    yield when(**{source: SET}, shard_over_sequence=SET).refuse(
        "flash decoding takes one token a step and speculation several; leave one of them out"
    )
    yield when(**{source: SET}, on_device_generation=SET).refuse(
        "drafts are verified by logits, which a device that samples does not return; leave on_device_generation out"
    )


def _verified(options: ServingOptions) -> int:
    """Return the tokens of a row in a step that verifies drafts; 0 without speculation."""
    return options.speculative_length + 1 if options.speculating else 0


def _too_few_positions(options: ServingOptions) -> bool:
    limit, verified = options.max_model_len, _verified(options)
    if limit is None:
        return False
    return verified >= limit or verified > (options.token_buckets or make_buckets(limit))[0]


# Seen on the real library, tiny llamas; Source: base.py, llama/model.py, bucket.py and layers/transformer.py.
_SPECULATION: tuple[Rule, ...] = (
    *_with_drafts("speculative_draft_model"),
    *_with_drafts("ngram_prompt_lookup_max"),
    when(
        lambda options: (
            _verified(options) > (options.context_length_estimate or (sys.maxsize,))[-1]
        ),
        speculative_length=ANY,
        context_length_estimate=ANY,
    ).refuse(
        "a step that verifies drafts must not be longer than the longest prompt (base.py asserts it); lower "
        "speculative_length"
    ),
    # As long as a slot, a step is taken for a prompt and gives wrong tokens; above the first length no graph is built.
    when(_too_few_positions, speculative_length=ANY, n_positions=ANY).refuse(
        "a step that verifies drafts has one token more than speculative_length, and must be shorter than a slot and "
        "no longer than the smallest of n_positions (128 if one number is set); lower speculative_length, or raise "
        "n_positions or its first length"
    ),
    when(
        lambda options: _verified(options) > (options.sequence_parallel_norm_threshold or 2048),
        sequence_parallel=True,
        sequence_parallel_norm_threshold=ANY,
        speculative_length=ANY,
    ).refuse(
        "a step that verifies drafts cannot be divided among cores, and has one token more than speculative_length; "
        "raise sequence_parallel_norm_threshold to at least that (2048 unless set), or lower speculative_length"
    ),
)

_PROJECTIONS = (
    when(qkv_tiling=SET, fuse_qkv=UNSET).refuse(
        "only the fused projection can be tiled; set fuse_qkv=true, or leave qkv_tiling out"
    ),
    when(
        lambda options: (
            not (options.fuse_qkv and _whole_heads(options)) or options.sequence_parallel
        ),
        fused_rmsnorm_qkv=True,
        fuse_qkv=ANY,
        attention_layout=ANY,
        group_query_attention=ANY,
        sequence_parallel=ANY,
    ).warn(
        f"{_DISABLED} fuse_qkv=true, attention_layout=BSH, group_query_attention=replicated-heads and no "
        "sequence_parallel; set these, or leave fused_rmsnorm_qkv out"
    ),
    when(
        lambda options: not _whole_heads(options),
        fused_rmsnorm_mlp=True,
        attention_layout=ANY,
        group_query_attention=ANY,
    ).warn(
        f"{_DISABLED} attention_layout=BSH and group_query_attention=replicated-heads; set these, or leave "
        "fused_rmsnorm_mlp out"
    ),
    *(
        when(**{name: _out_of_order}).refuse(
            "expected each of 0, 1, 2 and 3 once, 2 before 3, such as 1,2,0,3"
        )
        for name in _TILE_ORDERS
    ),
    *(
        when(**{name: SET}, weight_tiling=UNSET).warn(
            "no effect: no weight of the MLP is tiled; set weight_tiling=true, or leave the order out"
        )
        for name in _TILE_ORDERS
    ),
    # Source: llama/model.py, where the weights of the other layout are forgotten: a TypeError.
    when(_half_fused, fuse_mlp=ANY, mlp_out_weight_transpose=ANY).refuse(
        "a fused MLP needs its output projection transposed; set mlp_out_weight_transpose=true, or leave fuse_mlp out"
    ),
    # Source: llama/model.py.
    when(mlp_out_weight_transpose=True, weight_tiling=True, fuse_mlp=UNSET).warn(
        "tiled weights are not transposed; set fuse_mlp=true, or leave one of them out"
    ),
)
_BSH_CACHE = (
    when(cache_layout="BSH", rolling_batch_strategy="naive_rolling_batch").refuse(
        "the BSH cache needs continuous batching; leave one of them out"
    ),
    when(
        lambda options: not options.in_blocks and options.rolling_batch_strategy is None,
        cache_layout="BSH",
        max_rolling_batch_size=1,
    ).refuse(
        "the BSH cache needs continuous batching, which is off for one slot; raise max_rolling_batch_size, set "
        "rolling_batch_strategy=continuous_batching, or leave cache_layout out"
    ),
    when(_several_buckets, cache_layout="BSH", context_length_estimate=ANY, n_positions=ANY).refuse(
        "the BSH cache supports one length; set n_positions to one number, and context_length_estimate to the same"
    ),
    when(cache_layout="BSH", group_query_attention="shard-over-batch").refuse(
        "a cache divided by rows cannot have the BSH layout (decoder.py asserts it); leave one of them out"
    ),
    when(
        lambda options: not options.in_blocks, shard_over_sequence=True, cache_layout="BSH"
    ).refuse("a cache divided by tokens cannot have the BSH layout; leave cache_layout out"),
)
_DIVIDED_TOKENS = (
    when(duplicate_q_weight_sos=SET, shard_over_sequence=UNSET).warn(
        "duplicate_q_weight_sos has no effect without shard_over_sequence; set both, or remove it"
    ),
    when(sequence_parallel_norm_threshold=SET, sequence_parallel=UNSET).warn(
        "sequence_parallel_norm_threshold has no effect without sequence_parallel; set both, or remove it"
    ),
)
_SAMPLING = (
    # Source: layers/generation.py.
    when(
        on_device_generation=lambda sampled: (
            sampled.global_top_k is not None and not sampled.dynamic
        )
    ).refuse(
        "global_top_k needs dynamic=true (transformers-neuronx asserts it); set it, or use top_k alone"
    ),
)
TNX_RULES = (*_PROJECTIONS, *_BSH_CACHE, *_CHUNKS, *_DIVIDED_TOKENS, *_SPECULATION, *_SAMPLING)
"""Checked in this order."""


def findings(case: Case) -> Iterator[Finding]:
    """Yield findings about sizes and degrees that the library refuses, or gives an option up for.

    Source: transformers-neuronx 0.13, decoder.py and llama/model.py, which assert these.
    """
    options, model, degree = case.effective, case.model, case.degree
    hidden = model.hidden_size or 0
    if options.weight_tiling and hidden % 128:
        problem = f"tiles are 128 wide, and the model's hidden size is {hidden}; leave it out"
        yield Finding(("weight_tiling",), problem)
    if options.unroll and (model.num_layers or 0) % options.unroll:
        problem = f"the model has {model.num_layers} layers; set a divisor of that, or leave it out"
        yield Finding(("unroll",), problem)
    if options.qkv_tiling and options.fuse_qkv and model.num_heads and model.num_kv_heads:
        padded = padded_heads(model, degree, options.group_query_attention, case.slots)
        width = (padded.query + 2 * padded.kv) * (model.head_dim or 0) // degree
        if hidden % 128 or width % 128:
            problem = (
                f"tiles are 128 wide, and the projection on each core is {hidden} x {width}; leave qkv_tiling out, or "
                "use another degree"
            )
            yield Finding(("qkv_tiling", "tensor_parallel_degree"), problem)
    if options.fuse_mlp and (model.intermediate_size or 0) % degree:
        problem = f"the degree must divide the MLP width {model.intermediate_size}; set one that does, or drop fuse_mlp"
        yield Finding(("fuse_mlp", "tensor_parallel_degree"), problem)
    if len(options.token_buckets or ()) > 1 and takes_longest_only(case):
        problem = (
            "with continuous batching transformers-neuronx loses tokens between the lengths of a cache that is divided "
            "by tokens, so decode graphs are compiled for the longest only; set n_positions to that one, or leave "
            "shard_over_sequence out"
        )
        yield Finding(("shard_over_sequence", "n_positions"), problem, "warning")
    yield from _uneven_prompts(case)
    if model.num_heads and model.num_kv_heads:
        yield from _shared_heads(case, model.num_heads, model.num_kv_heads)
        yield from _flash_decoding(case, model.num_heads, model.num_kv_heads)
    yield from _padding_side(case)
    yield from _device_sampling(case)


def _uneven_prompts(case: Case) -> Iterator[Finding]:
    options = case.effective
    threshold = options.sequence_parallel_norm_threshold or 2048
    prompts = context_lengths(
        options.context_length_estimate,
        options.max_model_len,
        case.slots,
        continuous=case.continuous_batching,
    )
    uneven = [length for length in prompts if length > threshold and length % case.degree]
    if options.sequence_parallel and uneven:
        lengths = join_words(uneven)
        problem = f"the degree must divide prompt lengths above {threshold}, and not {lengths}; round them up"
        yield Finding(("sequence_parallel", "context_length_estimate"), problem)


def _shared_heads(case: Case, heads: int, kv_heads: int) -> Iterator[Finding]:
    """Strategies to share KV heads that transformers-neuronx gives up with a warning in its log.

    Source: transformers-neuronx 0.13, decoder.py check_gqa_fallback.
    """
    strategy = case.effective.group_query_attention
    if strategy is None or strategy == "replicated-heads":
        return
    if heads == kv_heads:
        problem = f"each of the {heads} heads has its own keys and values, so nothing is shared; leave it out"
        yield Finding(("group_query_attention",), problem, "warning")
        return
    needs = {
        "shard-over-heads": f"a degree that divides the {kv_heads} KV heads",
        "shard-over-batch": f"a degree that divides the {case.slots} slots",
        "all-gather-heads": f"a degree that divides KV heads and query heads ({kv_heads} and {heads})",
    }
    if not keeps_strategy(strategy, case.model, case.slots, case.degree):
        problem = (
            f"it needs {needs[strategy]}; transformers-neuronx copies the KV heads instead. Set replicated-heads, or "
            "another degree"
        )
        yield Finding(("group_query_attention", "tensor_parallel_degree"), problem, "warning")


def _flash_decoding(case: Case, heads: int, kv_heads: int) -> Iterator[Finding]:
    """Check flash decoding: all KV heads need the same number of cores, at least two, which divide its tokens.

    Where each KV head has one core, the library makes masks for a cache that is divided by the degree, and the cache is
    not: an AssertionError while it builds the decode graph. Seen with 2 KV heads on 2 cores. Padded heads are counted
    without their padding: another AssertionError. Seen with 6 heads on 4 and 8 cores.

    Source: transformers-neuronx 0.13, decoder.py and llama/hlo.py (`cores_per_kv_head`).
    """
    degree = case.degree
    if not case.effective.shard_over_sequence:
        return
    if heads == kv_heads:
        problem = f"no KV head is shared by several of the {heads} heads: transformers-neuronx"
        if case.effective.group_query_attention is None:
            yield Finding((_FLASH,), f"{problem} switches it off; remove it", "warning")
        else:
            problem += " fails while group_query_attention is set"
            yield Finding((_FLASH, "group_query_attention"), f"{problem}; leave both out")
        return
    problem = ""
    if degree % kv_heads:
        problem = f"the number of cores must be a multiple of the {kv_heads} KV heads; set one, or remove {_FLASH}"
    elif 1 < degree == kv_heads:
        problem = (
            f"each of the {kv_heads} KV heads has one core, so no head can be divided and transformers-neuronx fails; "
            f"set a larger multiple of {kv_heads}, or remove shard_over_sequence"
        )
    elif heads % degree and degree % heads:
        problem = (
            f"the {heads} heads are padded, which transformers-neuronx divides no cache for; set a degree that divides "
            f"them or a multiple of them, or remove {_FLASH}"
        )
    if problem:
        yield Finding((_FLASH, "tensor_parallel_degree"), problem)


def _padding_side(case: Case) -> Iterator[Finding]:
    options, batching = case.options, "rolling_batch_strategy"
    if case.capability is None or not case.capability.continuous_batching:
        return
    # A rule refuses left padding with an explicit rolling_batch_strategy=continuous_batching.
    automatic = options.rolling_batch_strategy is None
    if options.padding_side == "left" and automatic and case.continuous_batching:
        problem = "continuous batching pads on the right; leave padding_side out"
        yield Finding(("padding_side", batching, "max_rolling_batch_size"), problem)
    if options.padding_side == "right" and not case.continuous_batching:
        problem = "static batches pad on the left; leave it out"
        yield Finding(("padding_side", batching), problem)


def _device_sampling(case: Case) -> Iterator[Finding]:
    """Source: layers/generation.py. The shares: half the summed differences, of normal logits in bfloat16."""
    sampled = case.options.on_device_generation
    if sampled and (sampled.do_sample or sampled.dynamic) and case.options.dtype != "float32":
        problem = (
            "probabilities are added up in the 16 bits of the dtype: with bfloat16 3 % of the draws among 50 tokens "
            "are wrong, and 19 % among 256; send a small top_k, or sample on the host"
        )
        yield Finding(("on_device_generation",), problem, "warning")
