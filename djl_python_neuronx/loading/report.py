"""What a `check.Report` says: for people as tables and lines, for programs as JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from djl_python_neuronx.config.values import jsonable, shown
from djl_python_neuronx.planning.plan import COMPILE_BASIS, ServingPlan

if TYPE_CHECKING:
    from djl_python_neuronx.config.options import ServingOptions
    from djl_python_neuronx.loading.check import Report
    from djl_python_neuronx.planning.arguments import LibraryArguments
    from djl_python_neuronx.planning.memory import CoreMemory

_GIB = 2**30
_BAR_WIDTH = 60
PARTS = (
    # attribute, words, mark, mark in ASCII, colour
    ("weights", "weights", "█", "#", "blue"),
    ("padding", "padding", "▓", "%", "red"),
    ("kv_cache", "KV cache", "▒", "=", "green"),
    ("headroom", "headroom", "░", "-", "yellow"),
)
"""What a core's memory goes to, in the order of the bar."""
_LEVELS: tuple[tuple[str, str, str], ...] = (
    # heading, attribute of the report, style; the worst last, where a terminal shows it
    ("Notes", "notes", ""),
    ("Warnings", "warnings", "yellow"),
    ("Errors", "errors", "red"),
)


@dataclass(frozen=True)
class Table:
    """Rows under a heading."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Lines:
    """Lines under a heading, never broken, so that they can be searched for."""

    title: str
    lines: tuple[str, ...]
    style: str = ""


Block = Table | Lines


def as_json(report: Report) -> dict[str, Any]:
    """The report in plain values, under the keys that docs/check.md lists."""
    resolved, facts, plan = report.resolved, report.facts, report.plan
    explained = resolved.explain() if resolved else []
    return {
        "target": report.target,
        "ok": report.ok,
        "loadable": report.loadable,
        "errors": list(report.errors),
        "warnings": list(report.warnings),
        "notes": list(report.notes),
        "findings": jsonable(tuple(report.findings)),
        "options": {
            name: {"value": jsonable(value), "origin": origin} for name, value, origin in explained
        },
        "ignored": dict(resolved.ignored) if resolved else {},
        "model": None
        if report.prepared is None
        else {
            "name": report.prepared.name,
            "config": report.prepared.source,
            "facts": jsonable(facts),
        },
        "plan": None if plan is None else _plan_json(plan, report),
    }


def blocks(
    report: Report, *, everything: bool = False, ascii_only: bool = False
) -> Iterator[Block]:
    """The report in the order of reading: settings, plan, what is wrong, verdict."""
    if report.resolved is not None:
        rows = tuple(
            (name, shown(value), origin)
            for name, value, origin in report.resolved.explain()
            if everything or origin != "default"
        )
        yield Table("Options", ("option", "value", "from"), rows)
        if report.resolved.ignored:
            ignored = tuple(sorted(report.resolved.ignored.items()))
            yield Table("Not for this handler", ("name", "why"), ignored)
    yield Lines("Plan", tuple(_plan_lines(report, ascii_only=ascii_only)))
    yield from _handed_over(report)
    for title, attribute, style in _LEVELS:
        messages: tuple[str, ...] = getattr(report, attribute)
        if messages:
            yield Lines(title, tuple(f"- {message}" for message in messages), style)
    yield Lines("Result", (_verdict(report),), "green" if report.ok else "red")


def gib(size_bytes: int) -> str:
    """Bytes as GiB with two digits."""
    return f"{size_bytes / _GIB:.2f}"


def bar(memory: CoreMemory, width: int = _BAR_WIDTH, *, ascii_only: bool = False) -> str:
    """Memory of one core as a line of `width` marks; what does not fit lies beyond a `|`."""
    # A configuration that makes no sense can make a part negative, and its mark endless.
    sizes = [max(getattr(memory, attribute), 0) for attribute, *_ in PARTS]
    whole = max(sum(sizes), memory.capacity, 1)
    edges, marks, total = [0], [], 0
    for size, (_, _, mark, plain, _) in zip(sizes, PARTS, strict=True):
        total += size
        edges.append(round(width * total / whole))
        marks.append((plain if ascii_only else mark) * (edges[-1] - edges[-2]))
    line = "".join(marks).ljust(width, "." if ascii_only else "·")
    if not memory.capacity or memory.needed <= memory.capacity:
        return f"[{line}]"
    end = round(width * memory.capacity / whole)
    return f"[{line[:end]}|{line[end:]}]"


def _plan_lines(report: Report, *, ascii_only: bool) -> Iterator[str]:
    plan, prepared, facts = report.plan, report.prepared, report.facts
    if prepared is not None and facts is not None:
        size = _count(facts.num_parameters)
        yield f"model     {prepared.name}: {facts.model_type}, {size} parameters ({prepared.source})"
    if plan is None:
        yield "none: it takes the model's config.json"
        return
    yield f"backend   {plan.backend}, from the format {plan.format}"
    yield f"machine   {_machine(plan, report)}"
    if (options := _options(report)) is not None and options.speculating:
        yield f"drafts    {options.speculative_length} tokens at a time, {_drafts_from(options)}"
    if plan.graphs:
        graphs = "1 graph" if len(plan.graphs) == 1 else f"{len(plan.graphs)} graphs"
        yield f"compiles  {graphs}, tokens x rows: {_graphs(plan)}"
        yield f"          roughly {_duration(plan.estimated_compile_s)}: {COMPILE_BASIS}"
    else:
        yield "compiles  nothing"
    if plan.memory is None:
        yield "memory    unknown: config.json does not tell the model's size"
    else:
        whose = "of this machine" if plan.backend == "cpu" else "per core"
        if degrees := _degrees(report):
            few = min(degrees)
            cores = "the core that holds" if few == 1 else f"each of the {few} cores that hold"
            whose = f"on {cores} both models"
        yield from _memory_lines(plan.memory, whose, ascii_only=ascii_only)


def _options(report: Report) -> ServingOptions | None:
    return report.resolved.options if report.resolved else None


def _degrees(report: Report) -> tuple[int, ...]:
    """Cores of the model and of its draft model; empty where they are the same ones."""
    options = _options(report)
    if options is None or not options.drafting or report.plan is None:
        return ()
    degree, of_draft = options.tensor_parallel_degree, options.draft_model_tp_size
    if report.plan.backend == "cpu" or not isinstance(degree, int) or of_draft in {None, degree}:
        return ()
    return degree, of_draft or degree


def _drafts_from(options: ServingOptions) -> str:
    if options.drafting:
        return f"from the draft model {options.speculative_draft_model}"
    longest = options.ngram_prompt_lookup_max
    return f"looked up in prompt and text by the newest {longest} or fewer"


def _count(number: int | None) -> str:
    if number is None:
        return "unknown number of"
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.2f} million"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return "less than a minute"
    return f"{minutes} min" if minutes < 90 else f"{seconds / 3600:.1f} h"


def _machine(plan: ServingPlan, report: Report) -> str:
    device = plan.device
    if plan.backend == "cpu":
        memory = f", {gib(device.memory_bytes)} GiB of memory" if device.memory_bytes else ""
        return f"{device.cpus} CPUs{memory}"
    name = device.instance_type or "Neuron instance of unknown type"
    capacity = (
        f" of {gib(device.core_memory_bytes)} GiB"
        if device.core_memory_bytes
        else " of unknown memory"
    )
    options = _options(report)
    degree = None if options is None else options.tensor_parallel_degree
    machines = device.machines(degree) if isinstance(degree, int) else 1
    name = f"{machines} x {name}" if machines > 1 else name
    both = _degrees(report)
    shared = f"; the model takes {both[0]}, the draft model {both[1]}" if both else ""
    limit = f" ({device.limited_by})" if device.limited_by else ""
    there = machines * device.visible_cores
    taken = max(both) if both else degree
    return f"{name}: {taken} of {there} NeuronCores{limit}{capacity}{shared}"


def _graphs(plan: ServingPlan) -> str:
    kinds: dict[tuple[str, int], list[str]] = defaultdict(list)
    for graph in plan.graphs:
        kinds[graph.kind, graph.batch].append(str(graph.bucket))
    return "; ".join(
        f"{kind} {', '.join(buckets)} x {rows}{' blocks' * (kind == 'mixed')}"
        for (kind, rows), buckets in kinds.items()
    )


def _memory_lines(memory: CoreMemory, whose: str, *, ascii_only: bool) -> Iterator[str]:
    capacity = f", of {gib(memory.capacity)} GiB" if memory.capacity else ", capacity unknown"
    yield f"memory    {whose}: {gib(memory.needed)} GiB{capacity}"
    yield f"          {bar(memory, ascii_only=ascii_only)}"
    parts = [
        f"{plain if ascii_only else mark} {words} {gib(getattr(memory, attribute))}"
        for attribute, words, mark, plain, _ in PARTS
    ]
    yield f"          {'  '.join(parts)} GiB"
    if not memory.possible:
        yield "          does not fit: there are fewer cores than it takes"
    elif memory.capacity:
        fit = (
            "it fits"
            if memory.fits
            else f"does not fit: needs {gib(memory.needed)} GiB, has {gib(memory.capacity)}"
        )
        yield f"          {fit}"


def _verdict(report: Report) -> str:
    counts = [
        f"{len(told)} {word if len(told) == 1 else word + 's'}"
        for told, word in ((report.errors, "error"), (report.warnings, "warning"))
        if told
    ]
    verdict = "ready"
    if not report.ok:
        verdict = "cannot be served like this"
    elif report.lacking:
        verdict = f"the plan holds; {', and '.join(report.lacking)}"
    return verdict + (f": {', '.join(counts)}" if counts else "")


def _handed_over(report: Report) -> Iterator[Table]:
    """What the library is given, for the model and for its draft model."""
    for plan, whose in ((report.plan, ""), (report.draft_plan, ", for the draft model")):
        if plan is not None and plan.arguments is not None:
            title = f"Handed to the {plan.backend} library{whose}"
            rows = tuple(_argument_rows(plan.arguments))
            yield Table(title, ("where", "name", "value"), rows)


def _argument_rows(arguments: LibraryArguments) -> Iterator[tuple[str, str, str]]:
    groups: tuple[tuple[str, Mapping[str, object]], ...] = (
        ("constructor", arguments.constructor),
        ("NeuronConfig", arguments.neuron_config),
        *((f"{method}()", keywords) for method, keywords in arguments.calls.items()),
        ("environment", arguments.environment),
    )
    for where, values in groups:
        yield from ((where, name, json.dumps(jsonable(value))) for name, value in values.items())
    for flag in arguments.compiler_flags:
        yield "compiler", flag, ""


def _plan_json(plan: ServingPlan, report: Report) -> dict[str, Any]:
    memory, draft = plan.memory, report.draft_plan
    return {
        "loader": plan.backend,
        "format": plan.format,
        "graphs": jsonable(plan.graphs),
        "estimated_compile_s": plan.estimated_compile_s,
        "memory_per_core": None
        if memory is None
        else {
            **{f"{attribute}_bytes": getattr(memory, attribute) for attribute, *_ in PARTS},
            "needed_bytes": memory.needed,
            "capacity_bytes": memory.capacity,
            "fits": memory.fits,
        },
        "device": jsonable(plan.device),
        "arguments": jsonable(plan.arguments),
        "calls": {} if plan.arguments is None else jsonable(plan.arguments.calls),
        "draft_arguments": None if draft is None else jsonable(draft.arguments),
    }
