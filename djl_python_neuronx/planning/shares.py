"""What each core gets of heads, matrices and prompts, and what the libraries refuse or give up of that."""

from __future__ import annotations

from collections.abc import Iterator

from djl_python_neuronx.config.findings import Finding, listed
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning import division
from djl_python_neuronx.planning.capabilities import CAPABILITIES
from djl_python_neuronx.planning.intent import continuous_batching
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.tnx.arguments import context_lengths

_GQA = "group_query_attention"
_FLASH = "shard_over_sequence"


def of_heads(
    options: ServingOptions, facts: ModelFacts, degree: int, loader: str
) -> Iterator[Finding]:
    """What is to be said of the way in which the cores share KV heads; `options` are filled in."""
    yield from _groups(options, facts, degree, loader)
    yield from _flash_decoding(options, facts, degree, loader)


def of_widths(
    options: ServingOptions, facts: ModelFacts, degree: int, loader: str
) -> Iterator[Finding]:
    """What a core's part of matrices and prompts has to be a multiple of; `options` are filled in.

    Source: transformers-neuronx 0.13, decoder.py and llama/model.py, which assert these.
    """
    if loader != "tnx":
        return
    if options.weight_tiling and (facts.hidden_size or 0) % 128:
        problem = (
            f"tiles are 128 wide, and the model's hidden size is {facts.hidden_size}; leave it out"
        )
        yield Finding(("weight_tiling",), problem)
    yield from _tiled_qkv(options, facts, degree)
    if options.fuse_mlp and (facts.intermediate_size or 0) % degree:
        problem = f"the degree has to divide the MLP's width {facts.intermediate_size}; set such a one, or leave it out"
        yield Finding(("fuse_mlp", "tensor_parallel_degree"), problem)
    threshold = options.sequence_parallel_norm_threshold or 2048
    prompts = context_lengths(
        options.context_length_estimate,
        options.max_model_len,
        options.max_rolling_batch_size,
        continuous=continuous_batching(options),
    )
    uneven = [length for length in prompts if length > threshold and length % degree]
    if options.sequence_parallel and uneven:
        problem = f"the degree has to divide prompt lengths above {threshold}, and not {listed(uneven)}; round them up"
        yield Finding(("sequence_parallel", "context_length_estimate"), problem)


def _tiled_qkv(options: ServingOptions, facts: ModelFacts, degree: int) -> Iterator[Finding]:
    if not (options.qkv_tiling and options.fuse_qkv and facts.num_heads and facts.num_kv_heads):
        return
    laid = division.padded_heads(
        facts.num_heads, facts.num_kv_heads, degree, "tnx", options.group_query_attention
    )
    hidden = facts.hidden_size or 0
    width = (laid.query + 2 * laid.kv) * (facts.head_dim or 0) // degree
    if hidden % 128 or width % 128:
        problem = (
            f"tiles are 128 wide, and the projection on each core is {hidden} x {width}; leave qkv_tiling out, or take "
            "another degree"
        )
        yield Finding(("qkv_tiling", "tensor_parallel_degree"), problem)


def _groups(
    options: ServingOptions, facts: ModelFacts, degree: int, loader: str
) -> Iterator[Finding]:
    """Ways to share KV heads that transformers-neuronx gives up with a warning in its log.

    Source: transformers-neuronx 0.13, decoder.py check_gqa_fallback.
    """
    way = options.group_query_attention
    heads, kv_heads = facts.num_heads or 1, facts.num_kv_heads or 1
    if loader != "tnx" or way is None or way == "replicated-heads":
        return
    slots = options.max_rolling_batch_size or 1
    if heads == kv_heads:
        problem = f"each of the {heads} heads has keys and values of its own: nothing is shared; leave it out"
        yield Finding((_GQA,), problem, "warning")
        return
    wanted = {
        "shard-over-heads": f"a degree that divides the {kv_heads} KV heads",
        "shard-over-batch": f"a degree that divides the {slots} slots",
        "all-gather-heads": f"a degree that divides KV heads and query heads ({kv_heads} and {heads})",
    }
    if not division.keeps(way, facts, slots, degree):
        problem = (
            f"it needs {wanted[way]}; transformers-neuronx copies the KV heads instead. Set replicated-heads, or "
            "another degree"
        )
        yield Finding((_GQA, "tensor_parallel_degree"), problem, "warning")


def _flash_decoding(
    options: ServingOptions, facts: ModelFacts, degree: int, loader: str
) -> Iterator[Finding]:
    """Cores that share a KV head divide its tokens among them, so there have to be several, and as many for each.

    Where each KV head has one core, transformers-neuronx makes masks for a cache that is divided by the degree, and the
    cache is not: an AssertionError while it builds the decode graph. Seen with 2 KV heads on 2 cores.

    Source: transformers-neuronx 0.13, decoder.py and llama/hlo.py (`cores_per_kv_head`); neuronx-distributed-inference
    0.9, modules/flashdecode/utils.py.
    """
    capability = CAPABILITIES[loader].get(facts.model_type or "")
    if not options.shard_over_sequence or (capability and _FLASH in capability.unread):
        return
    heads, kv_heads = facts.num_heads or 1, facts.num_kv_heads or 1
    names = (_FLASH, "tensor_parallel_degree")
    sharing = degree if loader == "tnx" else min(degree, heads)
    if loader == "tnx" and heads == kv_heads:
        problem = f"each of the {heads} heads has keys and values of its own: transformers-neuronx"
        if options.group_query_attention is None:
            yield Finding((_FLASH,), f"{problem} switches it off; leave it out", "warning")
        else:
            problem += " stops at it while group_query_attention is set"
            yield Finding((_FLASH, _GQA), f"{problem}; leave both out")
    elif sharing % kv_heads != 0:
        problem = f"the cores have to be a multiple of the {kv_heads} KV heads; set such a degree, or leave it out"
        yield Finding(names, problem)
    elif loader == "tnx" and 1 < degree == kv_heads:
        problem = (
            f"each of the {kv_heads} KV heads has one core, which leaves nothing to divide, and transformers-neuronx "
            f"stops at it; set a larger multiple of {kv_heads}, or leave it out"
        )
        yield Finding(names, problem)
