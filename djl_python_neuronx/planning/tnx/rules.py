"""Combinations of options that transformers-neuronx refuses, mixes up or drops.

Source: transformers-neuronx 0.13, config.py and, where stated, another file. Limits of architectures are in
capabilities.py; `shape_findings` compares options with the model's sizes.
"""

from __future__ import annotations

from collections.abc import Iterator

from djl_python_neuronx.config.findings import Finding, Rule, asked, excluding, lacking, listed
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.defaults import make_buckets
from djl_python_neuronx.planning.memory import keeps_strategy, padded_heads
from djl_python_neuronx.planning.tnx.arguments import context_lengths

_USELESS = "it does nothing without the other; set that, or leave it out"
_SILENT = "transformers-neuronx switches it off without a word unless"


def _paged(options: ServingOptions) -> bool:
    return bool(options.is_block_kv_layout or options.enable_chunked_prefill)


def _shards_by_tokens(options: ServingOptions) -> bool:
    override = options.override_neuron_config or {}
    return bool(override.get("shard_over_sequence", options.shard_over_sequence))


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
    prompts, lengths = options.context_length_estimate, options.token_buckets
    return (
        options.cache_layout == "BSH"
        and not _paged(options)
        and limit is not None
        and (prompts not in {None, (limit,)} or lengths not in {None, (limit,)})
    )


def _out_of_order(order: tuple[int, ...] | None) -> bool:
    return order is not None and (sorted(order) != [0, 1, 2, 3] or order.index(2) > order.index(3))


def _unbounded(options: ServingOptions) -> bool:
    sampled = options.on_device_generation
    return sampled is not None and sampled.global_top_k is not None and not sampled.dynamic


_ORDERS = ("mlp_in_weight_tiling_permute_order", "mlp_out_weight_tiling_permute_order")
_NO_TILES = "no weight of the MLP is tiled; set weight_tiling=true, or leave the order out"


def _order(name: str) -> Rule:
    return Rule(
        (name,),
        lambda options: _out_of_order(getattr(options, name)),
        "expected each of 0, 1, 2 and 3 once, 2 before 3, such as 1,2,0,3",
    )


def _uneven_blocks(options: ServingOptions) -> bool:
    size = options.pa_block_size
    return options.enable_chunked_prefill and size is not None and size.bit_count() != 1


def _one_block(options: ServingOptions) -> bool:
    size, limit = options.pa_block_size, options.max_model_len
    return bool(options.enable_chunked_prefill and size and limit and size >= limit)


# Seen on the real library, tiny llamas; Source: llama/hlo.py, layers/attention_utils.py and generation.py.
_CHUNKS: tuple[Rule, ...] = (
    Rule(
        ("is_block_kv_layout", "enable_chunked_prefill"),
        lambda options: options.is_block_kv_layout and not options.enable_chunked_prefill,
        "blocks of the KV cache are served with prompts in chunks only; set enable_chunked_prefill=true, or leave "
        "is_block_kv_layout out",
    ),
    Rule(
        ("enable_chunked_prefill", "cache_layout"),
        lambda options: options.enable_chunked_prefill and options.cache_layout == "SBH",
        "blocks of the KV cache are laid out as BSH; leave cache_layout out",
    ),
    Rule(
        ("pa_block_size", "enable_chunked_prefill"),
        _uneven_blocks,
        "transformers-neuronx counts blocks by a division that is exact for powers of two alone (41 and 47 gave wrong "
        "tokens); set one of these",
    ),
    Rule(
        ("pa_block_size", "n_positions"),
        _one_block,
        "a block that holds a whole slot is none to transformers-neuronx; set a smaller one, or raise n_positions",
    ),
    Rule(
        ("enable_chunked_prefill", "group_query_attention"),
        lambda options: (
            options.enable_chunked_prefill and options.group_query_attention == "shard-over-batch"
        ),
        "a cache divided by rows has no blocks (decoder.py asserts it); leave one of them out",
    ),
    excluding(
        "kv_cache_quantize",
        "enable_chunked_prefill",
        "transformers-neuronx joins cached and new values of one type; leave one of them out",
    ),
    excluding(
        "shard_over_sequence",
        "enable_chunked_prefill",
        "flash decoding asks for blocks of 128 positions more in every slot, which are not provided; leave one of them "
        "out",
    ),
    Rule(
        ("on_device_generation", "enable_chunked_prefill"),
        lambda options: (
            options.enable_chunked_prefill
            and options.on_device_generation is not None
            and options.on_device_generation.dynamic
        ),
        "transformers-neuronx looks a row's parameters up by its place in the KV cache, and finds another's; leave one "
        'of them out, or set on_device_generation={"do_sample": false}',
    ),
    # Source: layers/generation.py, where the token of a row of NaN is one that others may draw too.
    Rule(
        ("on_device_generation", "enable_chunked_prefill"),
        lambda options: (
            options.enable_chunked_prefill
            and options.on_device_generation is not None
            and options.on_device_generation.do_sample
            and not options.on_device_generation.dynamic
        ),
        "a step is run again where a row's token may stand for NaN, and draws anew, which changes the distribution; "
        'leave one of them out, or set on_device_generation={"do_sample": false}',
    ),
)


def _with_drafts(source: str) -> Iterator[Rule]:
    """What does not go with speculation, drafts coming from the option `source`."""
    yield Rule(
        ("rolling_batch_strategy", source),
        lambda options: (
            asked(options, source)
            and options.speculating
            and options.rolling_batch_strategy == "naive_rolling_batch"
        ),
        "the sequences of a static batch share a position, so that all of them would wait for the one whose drafts "
        "stand least; leave rolling_batch_strategy out",
    )
    yield Rule(
        ("cache_layout", source),
        lambda options: (
            asked(options, source) and options.speculating and options.cache_layout == "BSH"
        ),
        "transformers-neuronx builds steps of several tokens a row for an SBH cache alone; leave cache_layout out",
    )
    yield excluding(
        source,
        "shard_over_sequence",
        "flash decoding takes one token a step and speculation several; leave one of them out",
    )
    yield excluding(
        source,
        "on_device_generation",
        "drafts are judged by logits, which a device that samples does not give; leave on_device_generation out",
    )


def _verified(options: ServingOptions) -> int:
    """Tokens of a row in a step that verifies drafts; 0: there is none."""
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
    Rule(
        ("speculative_length", "context_length_estimate"),
        lambda options: (
            _verified(options) > (options.context_length_estimate or (_verified(options),))[-1]
        ),
        "a step that verifies drafts is no longer than the longest prompt (base.py asserts it); lower "
        "speculative_length",
    ),
    # As long as a slot, a step is taken for a prompt and gives wrong tokens; above the first length no graph is built.
    Rule(
        ("speculative_length", "n_positions"),
        _too_few_positions,
        "a step that verifies drafts has one token more than speculative_length, and has to be shorter than a slot and "
        "no longer than the smallest of n_positions (128 where one number is written); lower speculative_length, or "
        "raise n_positions or its first length",
    ),
    Rule(
        ("sequence_parallel", "sequence_parallel_norm_threshold", "speculative_length"),
        lambda options: (
            options.sequence_parallel
            and _verified(options) > (options.sequence_parallel_norm_threshold or 2048)
        ),
        "a step that verifies drafts is not divided among cores, and has one token more than speculative_length; raise "
        "sequence_parallel_norm_threshold to that at least (2048 unless set), or lower speculative_length",
    ),
    Rule(
        ("enable_eagle_speculation",),
        lambda options: options.enable_eagle_speculation,
        "this backend drives no EAGLE model, whose drafts need the hidden states of the large one; leave it out, and "
        "give a draft model that drafts by itself",
    ),
)

TNX_RULES: tuple[Rule, ...] = (
    lacking(
        "qkv_tiling",
        "fuse_qkv",
        "only the fused projection is tiled; set fuse_qkv=true, or leave qkv_tiling out",
        "error",
    ),
    Rule(
        (
            *("fused_rmsnorm_qkv", "fuse_qkv", "attention_layout"),
            *("group_query_attention", "sequence_parallel"),
        ),
        lambda options: (
            options.fused_rmsnorm_qkv
            and not (options.fuse_qkv and _whole_heads(options) and not options.sequence_parallel)
        ),
        f"{_SILENT} fuse_qkv=true, attention_layout=BSH, group_query_attention=replicated-heads and no "
        "sequence_parallel; set these, or leave fused_rmsnorm_qkv out",
        "warning",
    ),
    Rule(
        ("fused_rmsnorm_mlp", "attention_layout", "group_query_attention"),
        lambda options: options.fused_rmsnorm_mlp and not _whole_heads(options),
        f"{_SILENT} attention_layout=BSH and group_query_attention=replicated-heads; set these, or leave "
        "fused_rmsnorm_mlp out",
        "warning",
    ),
    *map(_order, _ORDERS),
    *(lacking(name, "weight_tiling", _NO_TILES) for name in _ORDERS),
    # Source: llama/model.py, where the weights of the other layout are forgotten: a TypeError.
    Rule(
        ("fuse_mlp", "mlp_out_weight_transpose"),
        _half_fused,
        "the exit of a fused MLP is built transposed or not at all; set mlp_out_weight_transpose=true, or leave "
        "fuse_mlp out",
    ),
    # Source: llama/model.py.
    Rule(
        ("mlp_out_weight_transpose", "weight_tiling", "fuse_mlp"),
        lambda options: (
            options.mlp_out_weight_transpose and options.weight_tiling and not options.fuse_mlp
        ),
        "weights in tiles are not transposed; set fuse_mlp=true, or leave one of them out",
        "warning",
    ),
    Rule(
        ("cache_layout", "rolling_batch_strategy"),
        lambda options: (
            options.cache_layout == "BSH"
            and options.rolling_batch_strategy == "naive_rolling_batch"
        ),
        "the BSH cache needs continuous batching; leave one of them out",
    ),
    Rule(
        ("cache_layout", "max_rolling_batch_size"),
        lambda options: (
            options.cache_layout == "BSH"
            and not _paged(options)
            and options.rolling_batch_strategy is None
            and options.max_rolling_batch_size == 1
        ),
        "the BSH cache needs continuous batching, which one slot has no use for; raise max_rolling_batch_size, set "
        "rolling_batch_strategy=continuous_batching, or leave cache_layout out",
    ),
    Rule(
        ("cache_layout", "context_length_estimate", "n_positions"),
        _several_buckets,
        "the BSH cache takes one length; set n_positions to one number, and context_length_estimate to the same",
    ),
    *_CHUNKS,
    Rule(
        ("cache_layout", "group_query_attention"),
        lambda options: (
            options.cache_layout == "BSH" and options.group_query_attention == "shard-over-batch"
        ),
        "a cache divided by rows has no BSH layout (decoder.py asserts it); leave one of them out",
    ),
    Rule(
        ("shard_over_sequence", "cache_layout"),
        lambda options: (
            options.shard_over_sequence and options.cache_layout == "BSH" and not _paged(options)
        ),
        "a cache divided by tokens has no BSH layout; leave cache_layout out",
    ),
    # See `tnx.arguments`.
    Rule(
        ("shard_over_sequence", "n_positions"),
        lambda options: (
            _shards_by_tokens(options)
            and len(options.token_buckets or ()) > 1
            and options.continuous_batching
        ),
        "with continuous batching transformers-neuronx loses tokens between the lengths of a cache that is divided by "
        "tokens: decode graphs are compiled for the longest alone; set n_positions to that one, or leave "
        "shard_over_sequence out",
        "warning",
    ),
    lacking("duplicate_q_weight_sos", "shard_over_sequence", _USELESS),
    lacking("sequence_parallel_norm_threshold", "sequence_parallel", _USELESS),
    *_SPECULATION,
    # Source: layers/generation.py.
    Rule(
        ("on_device_generation",),
        _unbounded,
        "global_top_k needs dynamic=true (transformers-neuronx asserts it); set it, or use top_k alone",
    ),
)
"""Judged in this order."""


def shape_findings(case: Case) -> Iterator[Finding]:
    """Yield what the library refuses or gives up because of the model's sizes and the degree.

    Source: transformers-neuronx 0.13, decoder.py and llama/model.py, which assert these.
    """
    options, model, degree = case.effective, case.model, case.degree
    hidden = model.hidden_size or 0
    if options.weight_tiling and hidden % 128:
        problem = f"tiles are 128 wide, and the model's hidden size is {hidden}; leave it out"
        yield Finding(("weight_tiling",), problem)
    if options.qkv_tiling and options.fuse_qkv and model.num_heads and model.num_kv_heads:
        padded = padded_heads(
            model.num_heads, model.num_kv_heads, degree, "tnx", options.group_query_attention
        )
        width = (padded.query + 2 * padded.kv) * (model.head_dim or 0) // degree
        if hidden % 128 or width % 128:
            problem = (
                f"tiles are 128 wide, and the projection on each core is {hidden} x {width}; leave qkv_tiling out, or "
                "use another degree"
            )
            yield Finding(("qkv_tiling", "tensor_parallel_degree"), problem)
    if options.fuse_mlp and (model.intermediate_size or 0) % degree:
        problem = f"the degree must divide the MLP's width {model.intermediate_size}; set such a one, or leave it out"
        yield Finding(("fuse_mlp", "tensor_parallel_degree"), problem)
    yield from _uneven_prompts(case)
    yield from _shared_heads(case)


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
        problem = f"the degree must divide prompt lengths above {threshold}, and not {listed(uneven)}; round them up"
        yield Finding(("sequence_parallel", "context_length_estimate"), problem)


def _shared_heads(case: Case) -> Iterator[Finding]:
    """Strategies to share KV heads that transformers-neuronx gives up with a warning in its log.

    Source: transformers-neuronx 0.13, decoder.py check_gqa_fallback.
    """
    strategy, model = case.effective.group_query_attention, case.model
    heads, kv_heads = model.num_heads, model.num_kv_heads
    if strategy is None or strategy == "replicated-heads" or not heads or not kv_heads:
        return
    if heads == kv_heads:
        problem = f"each of the {heads} heads has keys and values of its own: nothing is shared; leave it out"
        yield Finding(("group_query_attention",), problem, "warning")
        return
    needs = {
        "shard-over-heads": f"a degree that divides the {kv_heads} KV heads",
        "shard-over-batch": f"a degree that divides the {case.slots} slots",
        "all-gather-heads": f"a degree that divides KV heads and query heads ({kv_heads} and {heads})",
    }
    if not keeps_strategy(strategy, model, case.slots, case.degree):
        problem = (
            f"it needs {needs[strategy]}; transformers-neuronx copies the KV heads instead. Set replicated-heads, or "
            "another degree"
        )
        yield Finding(("group_query_attention", "tensor_parallel_degree"), problem, "warning")
