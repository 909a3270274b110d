"""Combinations of options that transformers-neuronx refuses, mixes up or drops.

Source: transformers-neuronx 0.13, config.py and, where stated, another file. What depends on the architecture is in
capabilities.py, what depends on the model's numbers in suitability.py.
"""

from __future__ import annotations

from djl_python_neuronx.config.findings import Rule, excluding, lacking
from djl_python_neuronx.config.options import ServingOptions

_USELESS = "it does nothing without the other; set that, or leave it out"
_SILENT = "transformers-neuronx switches it off without a word unless"


def _speculating(options: ServingOptions) -> bool:
    return options.speculative_draft_model is not None


def _paged(options: ServingOptions) -> bool:
    return bool(options.is_block_kv_layout or options.enable_chunked_prefill)


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
        filled_in=True,
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
            and options.rolling_batch_strategy is None
            and options.max_rolling_batch_size == 1
        ),
        "the BSH cache needs continuous batching, which one slot has no use for; raise max_rolling_batch_size, set "
        "rolling_batch_strategy=continuous_batching, or leave cache_layout out",
        filled_in=True,
    ),
    Rule(
        ("cache_layout", "context_length_estimate", "n_positions"),
        _several_buckets,
        "the BSH cache takes one length; set n_positions to one number, and context_length_estimate to the same",
    ),
    Rule(
        ("enable_chunked_prefill", "is_block_kv_layout", "cache_layout"),
        lambda options: _paged(options) and options.cache_layout != "BSH",
        "blocks of the KV cache are laid out as BSH; set cache_layout=BSH",
    ),
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
    excluding(
        "shard_over_sequence",
        "speculative_draft_model",
        "flash decoding takes one token a step and speculation several; leave one of them out",
    ),
    lacking("duplicate_q_weight_sos", "shard_over_sequence", _USELESS),
    lacking("sequence_parallel_norm_threshold", "sequence_parallel", _USELESS),
    # Source: speculation.py: the accepted tokens of one sequence decide where all of them go on.
    Rule(
        ("speculative_draft_model", "max_rolling_batch_size"),
        lambda options: _speculating(options) and (options.max_rolling_batch_size or 1) > 1,
        "transformers-neuronx speculates for one sequence at a time; set max_rolling_batch_size=1, or leave the draft "
        "model out",
        filled_in=True,
    ),
    excluding(
        "speculative_draft_model",
        "batch_size",
        "transformers-neuronx speculates for one sequence at a time; set batch_size=1, or leave the draft model out",
    ),
    excluding(
        "speculative_draft_model",
        "on_device_generation",
        "drafts are judged by logits, which a device that samples does not give; leave on_device_generation out",
    ),
    # Source: layers/generation.py.
    Rule(
        ("on_device_generation",),
        _unbounded,
        "global_top_k needs dynamic=true (transformers-neuronx asserts it); set it, or use top_k alone",
    ),
)
"""Judged in this order."""
