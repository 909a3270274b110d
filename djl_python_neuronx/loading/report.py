"""Print a `check.Placement`: as text, with rich if it is installed, or as JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TextIO

from djl_python_neuronx.config.findings import Level, Problems
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.values import as_property, jsonable
from djl_python_neuronx.errors import redacted
from djl_python_neuronx.loading.check import Placement, Report
from djl_python_neuronx.loading.prepared import Prepared
from djl_python_neuronx.planning.arguments import LibraryArguments
from djl_python_neuronx.planning.cores import chips, free_cores
from djl_python_neuronx.planning.memory import CoreMemory
from djl_python_neuronx.planning.plan import COMPILE_BASIS, ServingPlan
from djl_python_neuronx.telemetry import printable

_GIB = 2**30
_BAR_WIDTH = 60
PARTS = (
    # attribute, words, mark, colour
    ("weights", "weights", "█", "blue"),
    ("padding", "padding", "▓", "red"),
    ("kv_cache", "KV cache", "▒", "green"),
    ("adapters", "adapters", "▚", "magenta"),
    ("headroom", "headroom", "░", "yellow"),
)
"""The parts of a core's memory, in the order of the bar."""
IN_ASCII = str.maketrans("█▓▒▚░·", "#%=+-.")
"""The marks of a stream that has no others."""
_FILE_WIDTH = 160
"""Columns of a table in a file or a pipe, which have no width."""
_LEVELS: tuple[tuple[str, Level, str], ...] = (
    # heading, level, style; the worst last, where a terminal shows it
    ("Notes", "note", ""),
    ("Warnings", "warning", "yellow"),
    ("Errors", "error", "red"),
)
_COPY = ("model", "copy", "cores", "devices", "memory_per_core")
"""Keys of a copy in the placement."""


@dataclass(frozen=True)
class Block:
    """Rows under a heading. Those of a single cell are never wrapped, so that they can be searched for."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    columns: tuple[str, ...] = ()
    """Names of the columns of a table."""
    style: str = ""

    @classmethod
    def of_lines(cls, title: str, lines: Iterable[str], style: str = "") -> Block:
        """A block without columns."""
        return cls(title, tuple((line,) for line in lines), style=style)


def all_as_json(placement: Placement) -> dict[str, Any]:
    """The report of the only model, or those of all models, with their placement, under the keys of docs/check.md."""
    shown, *others = models = [as_json(report) for report in placement.reports]
    if others:
        errors = placement.findings.messages("error")
        shown = {"ok": placement.ok, "errors": list(errors), "models": models}
    copies = [dict(zip(_COPY, copy, strict=True)) for copy in _copies(placement)]
    placed = {"copies": copies, "free": free_cores(placement.placed, placement.device)}
    return {**shown, "placement": jsonable(placed) if copies else None}


def as_json(report: Report) -> dict[str, Any]:
    """The report as JSON values, under the keys that docs/check.md lists."""
    resolved, prepared, findings = report.resolved, report.prepared, report.findings
    model = plan = None
    if prepared is not None:
        facts = prepared.case.model
        model = {"name": prepared.name, "config": prepared.source, "facts": facts}
        plan = _plan_json(prepared)
    shown: dict[str, Any] = {
        "target": report.target,
        "ok": report.ok,
        "loadable": report.loadable,
        "errors": list(findings.messages("error")),
        "warnings": list(findings.messages("warning")),
        "notes": list(findings.messages("note")),
        "findings": tuple(findings),
        "options": {
            name: {"value": value, "origin": origin}
            for name, value, origin in (resolved.explain() if resolved else ())
        },
        "ignored": dict(resolved.ignored) if resolved else {},
        "model": model,
        "plan": plan,
    }
    return {name: jsonable(value) for name, value in shown.items()}


def render(placement: Placement, stream: TextIO, *, everything: bool = False) -> None:
    """Write the reports and the placement to `stream`. `everything`: options at their default too."""
    write_blocks(all_blocks(placement, everything=everything), stream)


def write_blocks(blocks: Iterable[Block], stream: TextIO) -> None:
    """Write blocks to `stream`, with rich if it is installed, without credentials of URIs."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    marks = {} if _encodes_marks(encoding) else IN_ASCII
    write = _plain_writer(stream)
    with suppress(ImportError):
        write = _rich_writer(stream)
    for block in blocks:
        rows = (
            tuple(_escape(redacted(cell).translate(marks), encoding) for cell in row)
            for row in block.rows
        )
        write(replace(block, rows=tuple(rows)))


def all_blocks(placement: Placement, *, everything: bool = False) -> Iterator[Block]:
    """The sections of each report, those of several models below their names, and of the placement."""
    several = len(placement.reports) > 1
    for report in placement.reports:
        if several:
            yield Block(f"Model {report.target}", ())
        yield from blocks(report, everything=everything)
    rows = [(*map(str, copy[:-1]), gib(copy[-1] or 0)) for copy in _copies(placement)]
    if rows:
        size = "GiB per core" if placement.device.has_neuron else "GiB"
        yield Block("Placement", tuple(rows), (*_COPY[:-1], size))
    if rows and placement.device.has_neuron:
        free = free_cores(placement.placed, placement.device)
        yield Block.of_lines("Free cores", [free or "none"])
    if several:
        yield from finding_blocks(placement.findings)


def _copies(placement: Placement) -> Iterator[tuple[str, int, str, str, int | None]]:
    """Yield the values of `_COPY` for each copy of each model; nothing where there is only one."""
    if sum(map(len, placement.placed)) > 1:
        for model, copies in zip(placement.models, placement.placed, strict=True):
            memory = None if model.planned.memory is None else model.planned.memory.needed
            for number, cores in enumerate(copies):
                yield model.name, number, cores, chips(cores, placement.device), memory


def blocks(report: Report, *, everything: bool = False) -> Iterator[Block]:
    """The sections of the report: settings, plan, library arguments, findings, verdict."""
    if report.resolved is not None:
        rows = tuple(
            (name, as_property(value), origin)
            for name, value, origin in report.resolved.explain()
            if everything or origin != "default"
        )
        yield Block("Options", rows, ("option", "value", "from"))
        if ignored := tuple(sorted(report.resolved.ignored.items())):
            yield Block("Not for this handler", ignored, ("name", "why"))
    prepared = report.prepared
    if prepared is None:
        yield Block.of_lines("Plan", ["none: see the errors below"])
    else:
        yield Block.of_lines("Plan", _plan_lines(prepared))
        yield from _argument_blocks(prepared)
    yield from finding_blocks(report.findings)
    yield Block.of_lines("Result", [_verdict(report)], "green" if report.ok else "red")


def finding_blocks(findings: Problems) -> Iterator[Block]:
    """Notes, warnings and errors, each level under its heading."""
    for title, level, style in _LEVELS:
        if messages := [f"- {message}" for message in findings.messages(level)]:
            lines = [line for one in messages for line in one.replace("\n", "\n  ").split("\n")]
            yield Block.of_lines(title, lines, style)


def gib(size_bytes: int) -> str:
    """Bytes as GiB with two digits."""
    return f"{size_bytes / _GIB:.2f}"


def bar(memory: CoreMemory, width: int = _BAR_WIDTH) -> str:
    """Draw the memory of one core as `width` marks. Memory that does not fit stands after a `|`."""
    # A configuration that makes no sense can make a part negative, and its mark endless.
    sizes = [max(getattr(memory, attribute), 0) for attribute, *_ in PARTS]
    whole = max(sum(sizes), memory.capacity, 1)
    edges, marks, total = [0], [], 0
    for size, (_, _, mark, _) in zip(sizes, PARTS, strict=True):
        total += size
        edges.append(round(width * total / whole))
        marks.append(mark * (edges[-1] - edges[-2]))
    line = "".join(marks).ljust(width, "·")
    if not memory.capacity or memory.needed <= memory.capacity:
        return f"[{line}]"
    end = round(width * memory.capacity / whole)
    return f"[{line[:end]}|{line[end:]}]"


def _plan_lines(prepared: Prepared) -> Iterator[str]:
    plan, model, options = prepared.planned, prepared.case.model, prepared.options
    size = _count(model.num_parameters)
    yield f"model     {prepared.name}: {model.model_type}, {size} parameters ({prepared.source})"
    yield f"backend   {prepared.backend}, from the format {prepared.artifact.format}"
    yield f"machine   {_machine(prepared)}"
    if options.speculating:
        yield f"drafts    {options.speculative_length} tokens at a time, {_draft_source(options)}"
    for one in prepared.adapters:
        what = f"rank {one.rank}, {', '.join(one.modules)}" if one.config else "not fetched"
        yield f"adapter   {one.name}: {what} ({one.place})"
    if plan.graphs and any(one.own_graphs is None for one in prepared.models):
        graphs = "1 graph" if len(plan.graphs) == 1 else f"{len(plan.graphs)} graphs"
        yield f"compiles  {graphs}, tokens x rows: {_graphs(plan)}"
        yield f"          roughly {_duration(plan.estimated_compile_s)}: {COMPILE_BASIS}"
    else:
        yield "compiles  nothing"
    if plan.memory is None:
        no_size = "config.json does not give the model's size"
        yield f"memory    unknown: {'no model runs' if prepared.options.simulated else no_size}"
    else:
        whose = "of this machine" if prepared.case.on_cpu else "per core"
        if degrees := _two_degrees(prepared):
            few = min(degrees)
            cores = "the core that holds" if few == 1 else f"each of the {few} cores that hold"
            whose = f"on {cores} both models"
        yield from _memory_lines(plan.memory, whose)
    if (needed := prepared.compile_memory) is not None and prepared.own_graphs is None:
        size = f"{gib(needed.least)} to {gib(needed.most)} GiB"
        yield f"host      a compile takes {size} of the host's memory (estimate); compilers at once: {needed.workers}"
    if prepared.host_bytes is not None:
        yield f"host      a load takes up to {gib(prepared.host_bytes)} GiB of the host's memory"


def _two_degrees(prepared: Prepared) -> tuple[int, ...]:
    """Degrees of the model and of its draft model. Empty if both use the same cores."""
    case = prepared.case
    if case.on_cpu or case.draft_degree in {None, case.degree}:
        return ()
    return case.degree, case.draft_degree or case.degree


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
    device, degree = prepared.case.device, prepared.options.tensor_parallel_degree
    if prepared.case.on_cpu:
        known = device.memory_bytes and not device.has_neuron  # else it is the device's memory
        memory = f", {gib(device.memory_bytes)} GiB of memory" if known else ""
        return f"{device.cpus} CPUs{memory}"
    machines = device.machines(degree) if isinstance(degree, int) else 1
    name = device.instance_type or "Neuron instance of unknown type"
    size = device.core_memory_bytes
    capacity = f"of {gib(size)} GiB" if size else "of unknown memory"
    both = _two_degrees(prepared)
    whole = f"{machines} x {name}" if machines > 1 else name
    needed, cores = max(both or (prepared.case.degree,)), machines * device.visible_cores
    used = f"{needed} of {cores}" if needed <= cores else f"{cores} of the {needed} required"
    limit = f" ({device.limited_by})" if device.limited_by else ""
    parts = f"; the model takes {both[0]}, the draft model {both[1]}" if both else ""
    return f"{whole}: {used} NeuronCores{limit} {capacity}{parts}"


def _graphs(plan: ServingPlan) -> str:
    kinds: dict[tuple[str, int, int], list[str]] = defaultdict(list)
    for graph in plan.graphs:
        kinds[graph.kind, graph.batch, graph.prefix].append(str(graph.bucket))
    return "; ".join(
        f"{kind} {', '.join(buckets)} x {rows}{' blocks' * (kind == 'mixed')}"
        f"{f' after {prefix} cached' if prefix else ''}"
        for (kind, rows, prefix), buckets in kinds.items()
    )


def _memory_lines(memory: CoreMemory, whose: str) -> Iterator[str]:
    capacity = f", of {gib(memory.capacity)} GiB" if memory.capacity else ", capacity unknown"
    yield f"memory    {whose}: {gib(memory.needed)} GiB{capacity}"
    yield f"          {bar(memory)}"
    parts = [
        f"{mark} {words} {gib(getattr(memory, attribute))}"
        for attribute, words, mark, _ in PARTS
        if attribute != "adapters" or memory.adapters
    ]
    yield f"          {'  '.join(parts)} GiB"
    if not memory.possible:
        yield "          does not fit: there are fewer cores than it takes"
    elif memory.capacity and memory.fits:
        yield "          it fits"
    elif memory.capacity:
        yield f"          does not fit: needs {gib(memory.needed)} GiB, has {gib(memory.capacity)}"


def _verdict(report: Report) -> str:
    found = {word: len(report.findings.messages(word)) for word in ("error", "warning")}
    counts = [f"{count} {word}{'s' * (count > 1)}" for word, count in found.items() if count]
    verdict = "ready"
    if not report.ok:
        verdict = "cannot be served like this"
    elif report.lacking:
        verdict = f"plan OK, but {', and '.join(report.lacking)}"
    return verdict + (f": {', '.join(counts)}" if counts else "")


def _argument_blocks(prepared: Prepared) -> Iterator[Block]:
    """Yield the arguments of the library, for the model and for its draft model."""
    for one, whose in zip(prepared.models, ("", ", for the draft model"), strict=False):
        if one.planned.arguments is not None:
            title = f"Handed to the {one.backend} library{whose}"
            rows = tuple(_argument_rows(one.planned.arguments))
            yield Block(title, rows, ("where", "name", "value"))


def _argument_rows(arguments: LibraryArguments) -> Iterator[tuple[str, str, str]]:
    groups: tuple[tuple[str, Mapping[str, object]], ...] = (
        ("constructor", arguments.constructor),
        ("NeuronConfig", arguments.neuron_config),
        ("draft model", arguments.fused_draft),
        *((f"{method}()", keywords) for method, keywords in arguments.calls.items()),
        ("environment", arguments.environment),
    )
    for where, values in groups:
        yield from ((where, name, json.dumps(jsonable(value))) for name, value in values.items())
    for flag in arguments.compiler_flags:
        yield "compiler", flag, ""


def _plan_json(prepared: Prepared) -> dict[str, Any]:
    plan, draft = prepared.planned, prepared.draft
    memory = None
    if plan.memory is not None:
        memory = {
            **{f"{attribute}_bytes": getattr(plan.memory, attribute) for attribute, *_ in PARTS},
            "needed_bytes": plan.memory.needed,
            "capacity_bytes": plan.memory.capacity,
            "fits": plan.memory.fits,
        }
    return {
        "loader": prepared.backend,
        "format": prepared.artifact.format,
        "adapters": [
            {"name": one.name, "place": one.place, "rank": one.rank, "modules": one.modules}
            for one in prepared.adapters
        ],
        "graphs": plan.graphs,
        "estimated_compile_s": plan.estimated_compile_s,
        "memory_per_core": memory,
        "host_bytes": prepared.host_bytes,
        "compile_memory": None if prepared.own_graphs else prepared.compile_memory,
        "device": prepared.case.device,
        "arguments": plan.arguments,
        "calls": {} if plan.arguments is None else plan.arguments.calls,
        "draft_arguments": None if draft is None else draft.planned.arguments,
    }


def _encodes_marks(encoding: str) -> bool:
    try:
        "".join(mark for _, _, mark, _ in PARTS).encode(encoding)
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def _escape(text: str, encoding: str) -> str:
    """Escape what the stream cannot encode and what would control the terminal."""
    return printable(text).encode(encoding, "backslashreplace").decode(encoding)


def _plain_writer(stream: TextIO) -> Callable[[Block], None]:
    def write(block: Block) -> None:
        rows = [block.columns, *block.rows] if block.columns else block.rows
        # The last column has the long texts and no width.
        widths = [max(map(len, column)) for column in [*zip(*rows, strict=True)][:-1]] + [0]
        stream.write(f"{block.title}\n")
        for row in rows:
            cells = "  ".join(map(str.ljust, row, widths)).rstrip()
            stream.write(f"  {cells}\n")
        stream.write("\n")

    return write


def _rich_writer(stream: TextIO) -> Callable[[Block], None]:
    """Return a function that writes blocks with rich.

    Raises:
        ImportError: rich is not installed.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH

    def write(block: Block) -> None:
        console.print(Text(block.title, style="bold"))
        if block.columns:
            table = Table(box=box.SIMPLE_HEAD)
            for column in block.columns:
                table.add_column(column, overflow="fold")
            for row in block.rows:
                table.add_row(*map(Text, row))
            console.print(table)
        else:
            for (line,) in block.rows:
                text = Text(f"  {line}", style=block.style)
                for _, _, mark, colour in PARTS:
                    text.highlight_words([mark], colour)
                console.print(text, soft_wrap=True)
        console.print()

    return write
