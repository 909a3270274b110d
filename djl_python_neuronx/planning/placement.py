"""How a model lies on the cores that it is given: degree, heads, KV heads, memory; and what is wrong with that."""

from __future__ import annotations

from collections.abc import Iterator

from djl_python_neuronx.config.findings import Finding, listed
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning import alternatives, division, memory, shares
from djl_python_neuronx.planning.capabilities import LIBRARIES
from djl_python_neuronx.planning.intent import drafting
from djl_python_neuronx.planning.machines import FAMILIES, GIB, DeviceInfo, Family, legal_degrees
from djl_python_neuronx.planning.model import ModelFacts


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
        yield from shares.of_heads(options, facts, degree, loader)
    yield from shares.of_widths(options, facts, degree, loader)
    yield from _blocks(options, loader)
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
        problem = f"the Neuron runtime documents {listed(documented)} on {where}; {degree} is used in practice"
        yield Finding((name,), problem, "note")
    else:
        problem = f"the Neuron runtime takes {listed(documented)} on {where}; set one of them"
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
    whole = device.neuron_cores
    if 0 < device.visible_cores < whole or (device.limited_by and not whole):
        limit = device.limited_by or "NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES"
        machine += f", of {whole}" if whole else ""
        machine += f": {limit} limits this process"
    if cores and world > cores:
        names = tuple(factors)
        problem = f"{world} NeuronCores are asked for and {cores} can be used{machine}; lower it, or take more cores"
        if _needed(options, facts, degree, device, loader, draft) is not None:
            load = memory.Load.of(options, loader, draft)
            fit = alternatives.smallest_fit(facts, load, device, loader)
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
        f"set {listed(dividing, 'or')}"
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


def _blocks(options: ServingOptions, loader: str) -> Iterator[Finding]:
    blocks, size = options.pa_num_blocks, options.pa_block_size
    length, slots = options.max_model_len or 0, options.max_rolling_batch_size or 1
    if loader != "tnx" or not options.enable_chunked_prefill or not blocks or not size:
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
        fit = alternatives.smallest_fit(facts, load, device, loader, below=degree)
        ways = [
            f"set {saving}" for saving in alternatives.savings(facts, load, degree, device, loader)
        ]
        if options.context_length_estimate:
            shorter = "and prompts (context_length_estimate) no longer than that"
            ways = [f"{way} {shorter}" if "n_positions" in way else way for way in ways]
        if fit:
            told = f"smallest that fits: {fit}. {listed(['Take that', *ways], 'or')}"
        elif ways:
            told = f"no machine holds it as it is; {listed(ways, 'or')}"
        else:
            told = "nothing known holds it; take a smaller model"
        problem = f"does not fit: needs {needed.needed / GIB:.1f} GiB per core, has {needed.capacity / GIB:.1f} GiB; "
        drafts = () if load.draft_degree is None else ("draft_model_tp_size",)
        yield Finding((*names, *drafts), problem + told)
