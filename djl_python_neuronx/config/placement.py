"""How a model lies on the cores that it is given: degree, heads, KV heads, memory; and what is wrong with that."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import replace

from djl_python_neuronx.config import division, memory
from djl_python_neuronx.config.capabilities import CAPABILITIES, LIBRARIES
from djl_python_neuronx.config.findings import Finding
from djl_python_neuronx.config.instances import FAMILIES, GIB, DeviceInfo, Family, legal_degrees
from djl_python_neuronx.config.intent import continuous_batching, drafting
from djl_python_neuronx.config.model import ModelFacts
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.tnx_arguments import context_lengths

_STEP = 128
"""Tokens: lengths are advised in multiples of this."""
_GQA = "group_query_attention"
_FLASH = "shard_over_sequence"


def findings(
    options: ServingOptions,
    facts: ModelFacts,
    device: DeviceInfo,
    loader: str,
    draft: ModelFacts | None = None,
) -> Iterator[Finding]:
    """What is to be said of a Neuron loader's use of cores; `options` are filled in."""
    degree = options.tensor_parallel_degree
    if not isinstance(degree, int):
        return
    lost = fits(options, facts, device, loader, draft) is False
    yield from _degree("tensor_parallel_degree", degree, device)
    if drafting(options) and options.draft_model_tp_size is not None:
        yield from _degree("draft_model_tp_size", options.draft_model_tp_size, device)
    yield from _world(options, facts, degree, device, loader, draft)
    if not division.takes(facts, degree, loader):
        yield _undivided(facts, degree, device, loader)
    elif facts.num_heads and facts.num_kv_heads:
        if not lost:
            yield from _padding(options, facts, degree, device, loader)
        yield from _groups(options, facts, degree, loader)
        yield from _flash_decoding(options, facts, degree, loader)
    yield from _widths(options, facts, degree, loader)
    yield from _memory(options, facts, degree, device, loader, draft)


def fits(
    options: ServingOptions,
    facts: ModelFacts,
    device: DeviceInfo,
    loader: str,
    draft: ModelFacts | None = None,
) -> bool | None:
    """Whether the cores are there and hold it; None: nothing tells. `options` are filled in."""
    degree = options.tensor_parallel_degree
    if not isinstance(degree, int):
        return None
    needed = _needed(options, facts, degree, device, loader, draft)
    return None if needed is None else needed.fits


def _degree(name: str, degree: int, device: DeviceInfo) -> Iterator[Finding]:
    machines = device.machines(degree)
    if machines > 1 and degree != machines * (device.local_degree or 0):
        problem = (
            f"each machine gives {device.local_degree} cores (NEURON_LOCAL_TP); set a multiple of that, or another "
            "NEURON_LOCAL_TP"
        )
        yield Finding((name,), problem)
        return
    degree //= machines
    families = _families(device)
    documented = sorted({legal for family in families for legal in family.degrees})
    where = " or ".join(family.name for family in families)
    if degree in documented:
        return
    if any(degree in family.used_degrees for family in families):
        problem = f"the Neuron runtime documents {_listed(documented)} on {where}; {degree} is used in practice"
        yield Finding((name,), problem, "note")
    else:
        problem = f"the Neuron runtime takes {_listed(documented)} on {where}; set one of them"
        yield Finding((name,), problem)


def _families(device: DeviceInfo) -> list[Family]:
    family = FAMILIES.get(device.family or "")
    return [*FAMILIES.values()] if family is None else [family]


def _world(
    options: ServingOptions,
    facts: ModelFacts,
    degree: int,
    device: DeviceInfo,
    loader: str,
    draft: ModelFacts | None,
) -> Iterator[Finding]:
    cores, machines = device.cores_for(degree), device.machines(degree)
    sizes = {
        "tensor_parallel_degree": degree,
        "pipeline_parallel_degree": options.pipeline_parallel_degree,
        "ep_degree": options.ep_degree,
    }
    factors = {name: size for name, size in sizes.items() if size > 1}
    world = 1
    for size in factors.values():
        world *= size
    draft_degree = options.draft_model_tp_size if drafting(options) else None
    machine = f" on {device.instance_type}" if device.instance_type else ""
    machine = f" on {machines} machines" if machines > 1 else machine
    if 0 < device.visible_cores < device.neuron_cores:
        machine += f", of {device.neuron_cores}: NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES limits this process"
    if cores and world > cores:
        names = tuple(factors)
        problem = f"{world} NeuronCores are asked for and {cores} can be used{machine}; lower it, or take more cores"
        if _needed(options, facts, degree, device, loader, draft) is not None:
            load = memory.Load.of(options, loader, draft)
            fit = memory.smallest_fit(facts, load, device, loader)
            problem += f" (smallest that fits: {fit})" if fit else "; nothing known holds it"
        yield Finding(names or ("tensor_parallel_degree",), problem)
    if cores and draft_degree is not None and draft_degree > cores:
        problem = f"{cores} NeuronCores can be used{machine}; lower it, or take more cores"
        yield Finding(("draft_model_tp_size",), problem)


def _undivided(facts: ModelFacts, degree: int, device: DeviceInfo, loader: str) -> Finding:
    families = _families(device)
    cores = device.visible_cores or max(degree, 1)
    dividing = sorted(
        {
            legal
            for family in families
            for legal in family.degrees
            if legal <= cores and division.takes(facts, legal, loader)
        }
    )
    what = division.undivided(facts, degree, loader)
    problem = (
        f"{LIBRARIES[loader]} does not pad a {facts.model_type} model, so the degree has to divide {what}; "
        f"set {_listed(dividing, 'or')}"
    )
    return Finding(("tensor_parallel_degree",), problem)


def _padding(
    options: ServingOptions, facts: ModelFacts, degree: int, device: DeviceInfo, loader: str
) -> Iterator[Finding]:
    heads, kv_heads = facts.num_heads or 1, facts.num_kv_heads or 1
    way = options.group_query_attention
    if way and not division.keeps(way, facts, options.max_rolling_batch_size or 1, degree):
        way = None
    laid = division.padded_heads(heads, kv_heads, degree, loader, way)
    changes = []
    if laid.query != heads:
        changes.append(f"{heads} heads are padded to {laid.query}")
    if laid.kv != kv_heads and (heads != kv_heads):
        changes.append(f"{kv_heads} KV heads are copied to {laid.kv}")
    if not changes:
        return
    problem = f"{' and '.join(changes)} so that {degree} cores share them evenly"
    needed = _needed(options, facts, degree, device, loader)
    if needed is None or needed.padding == 0:
        yield Finding(("tensor_parallel_degree",), problem, "note")
        return
    problem += f": {needed.padding / GIB:.2f} GiB more on each core"
    better = [
        smaller
        for smaller in legal_degrees(device.family, degree - 1)
        if division.takes(facts, smaller, loader)
        and (less := _needed(options, facts, smaller, device, loader)) is not None
        and less.needed <= needed.needed
    ]
    if better:
        problem += f"; tensor_parallel_degree={better[-1]} needs no more memory on each"
    yield Finding(("tensor_parallel_degree",), problem, "warning" if better else "note")


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


def _widths(
    options: ServingOptions, facts: ModelFacts, degree: int, loader: str
) -> Iterator[Finding]:
    """Source: transformers-neuronx 0.13, decoder.py and llama/model.py, which assert these."""
    if loader != "tnx":
        return
    if options.weight_tiling and (facts.hidden_size or 0) % 128:
        problem = (
            f"tiles are 128 wide, and the model's hidden size is {facts.hidden_size}; leave it out"
        )
        yield Finding(("weight_tiling",), problem)
    yield from _tiled_qkv(options, facts, degree)
    yield from _blocks(options)
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
        problem = f"the degree has to divide prompt lengths above {threshold}, and not {_listed(uneven)}; round them up"
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


def _blocks(options: ServingOptions) -> Iterator[Finding]:
    blocks, size = options.pa_num_blocks, options.pa_block_size
    length, slots = options.max_model_len or 0, options.max_rolling_batch_size or 1
    if not options.enable_chunked_prefill or not blocks or not size:
        return
    used = memory.blocks_of(length, slots, size) + 1
    told = f"all slots at their full length take {used} blocks of {size} tokens, the one for padding among them"
    if blocks < used:
        problem = (
            f"{told}, and no sequence is put off for another; leave it out, or lower max_rolling_batch_size or "
            "n_positions"
        )
        yield Finding(("pa_num_blocks",), problem)
    elif blocks > used:
        yield Finding(("pa_num_blocks",), f"{told}; more are never used, leave it out", "warning")


def _needed(
    options: ServingOptions,
    facts: ModelFacts,
    degree: int,
    device: DeviceInfo,
    loader: str,
    draft: ModelFacts | None = None,
) -> memory.CoreMemory | None:
    """None where options or model do not tell enough."""
    if facts.num_parameters is None or None in {
        options.max_model_len,
        options.max_rolling_batch_size,
    }:
        return None
    load = memory.Load.of(options, loader, draft)
    return memory.needed(
        facts,
        load,
        degree=degree,
        core_memory_bytes=device.core_memory_bytes,
        loader=loader,
        cores=device.cores_for(degree),
    )


def _memory(
    options: ServingOptions,
    facts: ModelFacts,
    degree: int,
    device: DeviceInfo,
    loader: str,
    draft: ModelFacts | None,
) -> Iterator[Finding]:
    needed = _needed(options, facts, degree, device, loader, draft)
    names = ("tensor_parallel_degree", "max_rolling_batch_size", "n_positions")
    if needed is None:
        problem = f"the sizes of a {facts.model_type} model are not known here, so nothing tells whether it fits"
        yield Finding(("tensor_parallel_degree",), problem, "note")
    elif needed.possible and not needed.fits:
        load = memory.Load.of(options, loader, draft)
        fit = memory.smallest_fit(facts, load, device, loader, below=degree)
        ways = [f"set {saving}" for saving in _savings(facts, load, degree, device, loader)]
        if fit:
            told = f"smallest that fits: {fit}. {_listed(['Take that', *ways], 'or')}"
        else:
            ways = ways or ["take a smaller model"]
            told = f"nothing known holds it; {_listed(ways, 'or')}"
        problem = f"does not fit: needs {needed.needed / GIB:.1f} GiB per core, has {needed.capacity / GIB:.1f} GiB; "
        yield Finding(names, problem + told)


def _savings(
    facts: ModelFacts, load: memory.Load, degree: int, device: DeviceInfo, loader: str
) -> Iterator[str]:
    """What, changed alone, makes it fit on these cores with some to spare: the greatest value of each that does."""

    def roomy(changed: memory.Load) -> bool:
        return memory.needed(
            facts,
            changed,
            degree=degree,
            core_memory_bytes=device.core_memory_bytes,
            loader=loader,
        ).roomy

    slots = _most(load.num_slots - 1, lambda number: roomy(replace(load, num_slots=number)))
    if slots:
        yield f"max_rolling_batch_size={slots}"
    steps = _most(
        (load.max_model_len - 1) // _STEP,
        lambda number: roomy(replace(load, max_model_len=number * _STEP)),
    )
    if steps:
        yield f"n_positions={steps * _STEP}"
    capability = CAPABILITIES[loader].get(facts.model_type or "")
    quantised = capability is None or capability.int8
    if load.weight_dtype is None and quantised and roomy(replace(load, weight_dtype="int8")):
        yield "quantize=static_int8"


def _most(limit: int, does: Callable[[int], bool]) -> int:
    """The greatest number up to `limit` that does, where all smaller ones do too; 0: none."""
    return bisect.bisect_left(range(1, limit + 1), True, key=lambda number: not does(number))


def _listed(values: list[int] | list[str], last: str = "and") -> str:
    words = [str(value) for value in values]
    return f" {last} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
