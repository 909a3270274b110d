"""Print a `check.Report`: as text, with rich if it is installed, or as JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TextIO

from djl_python_neuronx.config.findings import Level
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.values import jsonable, shown
from djl_python_neuronx.loading.check import Report
from djl_python_neuronx.loading.prepare import Prepared
from djl_python_neuronx.planning.arguments import LibraryArguments
from djl_python_neuronx.planning.memory import CoreMemory
from djl_python_neuronx.planning.plan import COMPILE_BASIS, ServingPlan

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_GIB = 2**30
_BAR_WIDTH = 60
PARTS = (
    # attribute, words, mark, mark in ASCII, colour
    ("weights", "weights", "█", "#", "blue"),
    ("padding", "padding", "▓", "%", "red"),
    ("kv_cache", "KV cache", "▒", "=", "green"),
    ("headroom", "headroom", "░", "-", "yellow"),
)
"""The parts of a core's memory, in the order of the bar."""
_COLOURS = {mark: colour for _, _, mark, _, colour in PARTS}
_FILE_WIDTH = 160
"""Columns of a table in a file or a pipe, which have no width of their own."""
_LEVELS: tuple[tuple[str, Level, str], ...] = (
    # heading, level, style; the worst last, where a terminal shows it
    ("Notes", "note", ""),
    ("Warnings", "warning", "yellow"),
    ("Errors", "error", "red"),
)


@dataclass(frozen=True)
class Table:
    """Rows under a heading."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Lines:
    """Lines under a heading. They are never wrapped, so that they can be searched for."""

    title: str
    lines: tuple[str, ...]
    style: str = ""


Block = Table | Lines


def as_json(report: Report) -> dict[str, Any]:
    """The report as JSON values, under the keys that docs/check.md lists."""
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


def render(report: Report, stream: TextIO, *, everything: bool = False) -> None:
    """Write the report to `stream`. `everything`: options at their default too."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    ascii_only = not _takes(encoding, "".join(_COLOURS))
    found = [
        _printable(block, encoding)
        for block in blocks(report, everything=everything, ascii_only=ascii_only)
    ]
    try:
        from rich.console import Console
    except ImportError:
        _render_plain(found, stream)
        return
    console = Console(file=stream, highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    _render_rich(found, console)


def blocks(
    report: Report, *, everything: bool = False, ascii_only: bool = False
) -> Iterator[Block]:
    """The sections of the report: settings, plan, library arguments, findings, verdict."""
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
    for title, level, style in _LEVELS:
        if messages := report.findings.messages(level):
            yield Lines(title, tuple(f"- {message}" for message in messages), style)
    yield Lines("Result", (_verdict(report),), "green" if report.ok else "red")


def gib(size_bytes: int) -> str:
    """Bytes as GiB with two digits."""
    return f"{size_bytes / _GIB:.2f}"


def bar(memory: CoreMemory, width: int = _BAR_WIDTH, *, ascii_only: bool = False) -> str:
    """Draw the memory of one core as `width` marks. What does not fit stands after a `|`."""
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
    prepared = report.prepared
    if prepared is None:
        yield "none: config.json is missing"
        return
    plan, model, options = prepared.planned, prepared.case.model, prepared.options
    size = _count(model.num_parameters)
    yield f"model     {prepared.name}: {model.model_type}, {size} parameters ({prepared.source})"
    yield f"backend   {plan.backend}, from the format {plan.format}"
    yield f"machine   {_machine(prepared)}"
    if options.speculating:
        yield f"drafts    {options.speculative_length} tokens at a time, {_draft_source(options)}"
    if plan.graphs:
        graphs = "1 graph" if len(plan.graphs) == 1 else f"{len(plan.graphs)} graphs"
        yield f"compiles  {graphs}, tokens x rows: {_graphs(plan)}"
        yield f"          roughly {_duration(plan.estimated_compile_s)}: {COMPILE_BASIS}"
    else:
        yield "compiles  nothing"
    if plan.memory is None:
        yield "memory    unknown: config.json does not give the model's size"
    else:
        whose = "of this machine" if plan.backend == "cpu" else "per core"
        if degrees := _two_degrees(prepared):
            few = min(degrees)
            cores = "the core that holds" if few == 1 else f"each of the {few} cores that hold"
            whose = f"on {cores} both models"
        yield from _memory_lines(plan.memory, whose, ascii_only=ascii_only)


def _two_degrees(prepared: Prepared) -> tuple[int, ...]:
    """Degrees of the model and of its draft model. Empty if both use the same cores."""
    case, of_draft = prepared.case, prepared.options.draft_model_tp_size
    if not prepared.options.drafting or case.on_cpu or of_draft in {None, case.degree}:
        return ()
    return case.degree, of_draft or case.degree


def _draft_source(options: ServingOptions) -> str:
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


def _machine(prepared: Prepared) -> str:
    device, degree = prepared.planned.device, prepared.options.tensor_parallel_degree
    if prepared.case.on_cpu:
        memory = f", {gib(device.memory_bytes)} GiB of memory" if device.memory_bytes else ""
        return f"{device.cpus} CPUs{memory}"
    machines = device.machines(degree) if isinstance(degree, int) else 1
    name = device.instance_type or "Neuron instance of unknown type"
    size = device.core_memory_bytes
    capacity = f"of {gib(size)} GiB" if size else "of unknown memory"
    both = _two_degrees(prepared)
    return "".join(
        (
            f"{machines} x {name}" if machines > 1 else name,
            f": {max(both) if both else degree} of {machines * device.visible_cores} NeuronCores",
            f" ({device.limited_by})" if device.limited_by else "",
            f" {capacity}",
            f"; the model takes {both[0]}, the draft model {both[1]}" if both else "",
        )
    )


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
    elif memory.capacity and memory.fits:
        yield "          it fits"
    elif memory.capacity:
        needs = f"needs {gib(memory.needed)} GiB, has {gib(memory.capacity)}"
        yield f"          does not fit: {needs}"


def _verdict(report: Report) -> str:
    counts = [
        f"{len(messages)} {word if len(messages) == 1 else word + 's'}"
        for messages, word in ((report.errors, "error"), (report.warnings, "warning"))
        if messages
    ]
    verdict = "ready"
    if not report.ok:
        verdict = "cannot be served like this"
    elif report.lacking:
        verdict = f"plan OK, but {', and '.join(report.lacking)}"
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


def _takes(encoding: str, text: str) -> bool:
    try:
        text.encode(encoding)
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def _printable(block: Block, encoding: str) -> Block:
    """Escape what the stream cannot encode and what would control the terminal."""
    if isinstance(block, Lines):
        return replace(block, lines=tuple(_escaped(line, encoding) for line in block.lines))
    rows = (tuple(_escaped(cell, encoding) for cell in row) for row in block.rows)
    return replace(block, rows=tuple(rows))


def _escaped(text: str, encoding: str) -> str:
    shown = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def _render_plain(found: Iterable[Block], stream: TextIO) -> None:
    for block in found:
        stream.write(f"{block.title}\n")
        if isinstance(block, Lines):
            lines: Iterable[str] = block.lines
        else:
            rows = [block.columns, *block.rows]
            # The last column has the long texts and no width.
            widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
            lines = ("  ".join(_padded(row, widths)).rstrip() for row in rows)
        stream.writelines(f"  {line}\n" for line in lines)
        stream.write("\n")


def _padded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]


def _render_rich(found: Iterable[Block], console: Console) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    for block in found:
        console.print(Text(block.title, style="bold"))
        if isinstance(block, Lines):
            for line in block.lines:
                text = Text(f"  {line}", style=block.style)
                _colour(text)
                console.print(text, soft_wrap=True)
        else:
            table = Table(box=box.SIMPLE_HEAD)
            for column in block.columns:
                table.add_column(column, overflow="fold")
            for row in block.rows:
                table.add_row(*map(Text, row))
            console.print(table)
        console.print()


def _colour(text: Text) -> None:
    """Colour the marks of the memory bar."""
    for index, character in enumerate(text.plain):
        if colour := _COLOURS.get(character):
            text.stylize(colour, index, index + 1)
