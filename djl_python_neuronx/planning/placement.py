"""Findings about cores and memory: degrees, heads, KV heads and whether the model fits."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from djl_python_neuronx.config.findings import Finding
from djl_python_neuronx.config.values import SMALLEST_BUCKET, join_words
from djl_python_neuronx.planning.arguments import blocks_of
from djl_python_neuronx.planning.case import Case, NeuronBackend
from djl_python_neuronx.planning.machines import GIB, DeviceInfo, families, legal_degrees
from djl_python_neuronx.planning.memory import CoreMemory, core_memory, savings, smallest_fit

_DEGREE = "tensor_parallel_degree"
_DRAFT_DEGREE = "draft_model_tp_size"
CUT_SHORT = ("n_positions", _DEGREE)
"""The options of the finding about a default length that memory makes the least."""


def findings(case: Case) -> Iterator[Finding]:
    """Yield the findings about the NeuronCores of a case whose options are filled in."""
    if case.neuron is None or not isinstance(case.options.tensor_parallel_degree, int):
        return
    yield from _degree(_DEGREE, case.degree, case.device, case.takes)
    if case.draft_degree is not None:
        yield from _degree(_DRAFT_DEGREE, case.draft_degree, case.device)
    yield from _cores(case)
    if case.options.logical_nc_config == 2 and case.device.family in {"inf2", "trn1"}:
        problem = f"two cores act as one from trn2 on, not on {case.device.family}; leave it out"
        yield Finding(("logical_nc_config",), problem)
    if wanted := case.indivisible(case.degree):
        yield _indivisible(case, wanted)
    elif case.model.num_heads and case.model.num_kv_heads and fits(case) is not False:
        yield from _padding(case, case.neuron)
    yield from _blocks(case)
    yield from _memory(case)


def fits(case: Case) -> bool | None:
    """Return whether the cores exist and hold the model; None if that is not known."""
    memory = core_memory(case)
    return None if memory is None else memory.fits


def _degree(
    name: str, degree: int, device: DeviceInfo, takes: Callable[[int], bool] = bool
) -> Iterator[Finding]:
    """`takes`: whether the library takes a degree that the runtime does; all by default."""
    machines = device.machines(degree)
    if machines > 1 and degree != machines * (device.local_degree or 0):
        problem = (
            f"each machine gives {device.local_degree} cores (NEURON_LOCAL_TP); set a multiple of that, or change "
            "NEURON_LOCAL_TP"
        )
        yield Finding((name,), problem)
        return
    degree //= machines
    possible = families(device.family)
    documented, used = (
        legal_degrees(device.family, sys.maxsize, used=used) for used in (False, True)
    )
    where = " or ".join(family.name for family in possible)
    if degree in documented:
        return
    if degree in used:
        problem = f"the Neuron runtime documents {join_words(documented)} on {where}; {degree} is used in practice"
        yield Finding((name,), problem, "note")
    else:
        able = [each for each in used if takes(each) and each <= (device.visible_cores or each)]
        problem = f"the Neuron runtime does not take it on {where}; leave it out, or set "
        problem += join_words(able, "or")
        yield Finding((name,), problem)


def _cores(case: Case) -> Iterator[Finding]:
    device, cores = case.device, case.device.cores_for(case.degree)
    if not cores:
        if device.has_neuron:
            problem = f"the number of NeuronCores is not known, so the degree is not compared with it ({device.seen})"
            yield Finding((_DEGREE,), problem, "warning")
        return
    machines = device.machines(case.degree)
    where = f" on {device.instance_type}" if device.instance_type else ""
    where = f" on {machines} machines" if machines > 1 else where
    advice = "lower the degree, or use a larger machine"
    whole = device.neuron_cores
    if 0 < device.visible_cores < whole or (device.limited_by and not whole):
        limit = device.limited_by or "NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES"
        where += f", of {whole}" if whole else ""
        where += f": {limit} limits this process"
        advice = "lower the degree, raise that limit, or use a larger machine"
    names = (_DEGREE, "pipeline_parallel_degree", "ep_degree")
    factors = {name: size for name in names if (size := getattr(case.options, name)) > 1}
    world = math.prod(factors.values())
    if world > cores:
        problem = f"{world} NeuronCores are needed and {cores} can be used{where}; {advice}"
        if core_memory(case) is not None:
            fit = smallest_fit(case)
            problem += f" (smallest that fits: {fit})" if fit else "; no known machine holds it"
        yield Finding(tuple(factors), problem)
    if (case.draft_degree or 0) > cores:
        problem = f"{cores} NeuronCores can be used{where}; {advice}"
        yield Finding((_DRAFT_DEGREE,), problem)


def _indivisible(case: Case, wanted: str) -> Finding:
    cores = case.device.visible_cores or max(case.degree, 1)
    degrees = legal_degrees(case.device.family, cores)
    dividing = [degree for degree in degrees if case.takes(degree)]
    problem = (
        f"the degree must be {wanted}, for {case.library} to split a {case.model.model_type} model; set "
        f"{join_words(dividing, 'or')}"
    )
    return Finding((_DEGREE,), problem)


def _padding(case: Case, neuron: NeuronBackend) -> Iterator[Finding]:
    case = replace(case, draft=None)
    model, degree = case.model, case.degree
    heads, kv_heads = model.num_heads or 1, model.num_kv_heads or 1
    padded = neuron.padded_heads(model, degree, case.effective.group_query_attention, case.slots)
    changes = []
    if padded.query != heads:
        changes.append(f"{heads} heads are padded to {padded.query}")
    if padded.kv != kv_heads and heads != kv_heads:
        changes.append(
            f"{kv_heads} KV head{'s are' if kv_heads > 1 else ' is'} copied to {padded.kv}"
        )
    if not changes:
        return
    problem = f"{' and '.join(changes)} so that {degree} cores share them evenly"
    memory = core_memory(case)
    if memory is None or memory.padding == 0:
        yield Finding((_DEGREE,), problem, "note")
        return
    more = f"{memory.padding / GIB:.2f}" if memory.padding >= GIB / 100 else "less than 0.01"
    problem += f": {more} GiB more on each core"
    smaller = {
        lower: less
        for lower in legal_degrees(case.device.family, degree - 1)
        if case.takes(lower)
        and (less := core_memory(case.with_options(tensor_parallel_degree=lower))) is not None
    }
    better = [lower for lower, less in smaller.items() if less.needed <= memory.needed]
    if better:
        problem += f"; tensor_parallel_degree={better[-1]} needs no more memory on each"
    problem += f". A decode step of full slots {_reading(memory, case.device)}"
    for lower in [*smaller][-1:]:
        unfit = "" if smaller[lower].fits else ", which does not fit"
        problem += f"; with {lower} cores it {_reading(smaller[lower], case.device)}{unfit}"
    yield Finding((_DEGREE,), problem, "warning" if better else "note")


def _reading(memory: CoreMemory, device: DeviceInfo) -> str:
    """The text for the bytes that a core reads in a decode step, and the least time for them."""
    speed = device.core_bytes_per_s
    least = f" in at least {1000 * memory.read / speed:.1f} ms" if speed else ""
    return f"reads {memory.read / GIB:.2f} GiB on each{least}"


def _blocks(case: Case) -> Iterator[Finding]:
    options = case.effective
    blocks, size = options.pa_num_blocks, options.pa_block_size
    if not options.in_blocks or not blocks or not size:
        return
    used = blocks_of(options.max_model_len or 0, case.slots, size)
    need = (
        f"all slots at full length need {used} blocks of {size} tokens, including the padding block"
    )
    if blocks < used:
        problem = f"{need}; leave it out, or lower max_rolling_batch_size or n_positions"
        yield Finding(("pa_num_blocks",), problem)
    elif blocks > used and not options.enable_prefix_caching:
        yield Finding(
            ("pa_num_blocks",), f"{need}; the others are never used, leave it out", "warning"
        )


def _memory(case: Case) -> Iterator[Finding]:
    memory = core_memory(case)
    names = (_DEGREE, "max_rolling_batch_size", "n_positions")
    if memory is None:
        problem = f"the parameter count of a {case.model.model_type} model is unknown, so the memory is not checked"
        yield Finding((_DEGREE,), problem, "note")
    elif memory.possible and not memory.fits:
        fit = smallest_fit(case, below=case.degree)
        ways = [f"set {saving}" for saving in savings(case)]
        if case.options.context_length_estimate:
            shorter = "and prompts (context_length_estimate) no longer than that"
            ways = [f"{way} {shorter}" if "n_positions" in way else way for way in ways]
        if fit:
            advice = f"smallest that fits: {fit}. {join_words(['Take that', *ways], 'or')}"
        elif ways:
            advice = f"no machine holds it as it is; {join_words(ways, 'or')}"
        else:
            advice = "no known machine holds it; use a smaller model"
        problem = f"does not fit: needs {memory.needed / GIB:.1f} GiB per core, has {memory.capacity / GIB:.1f} GiB; "
        drafts = () if case.draft_degree is None else (_DRAFT_DEGREE,)
        yield Finding((*names, *drafts), problem + advice)
    elif memory.possible and _is_least(case, memory):
        problem = (
            f"{memory.needed / GIB:.2f} of {memory.capacity / GIB:.2f} GiB per core are needed, and memory leaves room "
            f"for no longer sequences; raise the degree, or set n_positions={case.options.max_model_len} to accept it"
        )
        yield Finding(CUT_SHORT, problem, "warning")


def _is_least(case: Case, memory: CoreMemory) -> bool:
    """Return True for a default length that is the least because of the memory, or that fits only without a spare."""
    if "n_positions" not in case.filled:
        return False
    models = (case.model, case.draft)
    limits = [model.max_positions for model in models if model and model.max_positions]
    length, limit = case.options.max_model_len or 0, min(limits, default=sys.maxsize)
    return not memory.roomy or length <= SMALLEST_BUCKET < limit
