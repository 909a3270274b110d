"""Defects of the Neuron compiler that users report: the settings that meet one, and the text of a failed compile.

The rows, with their public threads, are in `defects.toml`. None was seen here: there was no chip.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from djl_python_neuronx.config.findings import SET, UNSET, Finding, above, when
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning import sdks
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.tables import read_table


@dataclass(frozen=True, kw_only=True)
class CompilerDefect:
    """One row: what it takes to meet the defect, and what to do. A condition that is left out always holds."""

    compiler: str
    """The versions of neuronx-cc, as pip writes them; from the first that is known to have the defect to the first that
    has it no more, or of which nothing is reported."""
    backend: str
    families: tuple[str, ...]
    """Kinds of chips; a machine of an unknown kind may be any of them. Empty: its text is recognised, no settings."""
    model: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    """Fields of `ModelFacts`, each with its values: an architecture, the shape of a model."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options, each `set`, `unset`, a list of values or a table with the number that they are `above`. Also
    properties of `ServingOptions`."""
    prompt_tokens: int = 0
    """Least length of the longest prompt graph."""
    symptom: str
    """The failure, as a sentence without a full stop."""
    text: str = ""
    """Regular expression for the output of a compile that failed of it; empty: no such text is reported."""
    cure: str
    """The way around it, as a sentence without a full stop."""
    sources: tuple[str, ...]
    """The public threads."""
    refused: bool = False
    """No plan like it is reported to compile: with a compiler that has the defect it is an error, unless
    `allow_known_defects` is set."""

    @property
    def report(self) -> str:
        """The report, its cure and its sources, in words."""
        symptom = f"users of neuronx-cc {self.compiler} report that {self.symptom}"
        return f"{symptom}: {self.cure} ({', '.join(self.sources)})"

    def meets(self, case: Case) -> bool:
        """True if a compile of this case meets the defect, with a version of the compiler that has it."""
        conditions = {name: _condition(value) for name, value in self.options.items()}
        family = case.device.family
        prompts = (
            graph.bucket
            for graph in (case.neuron.graphs(case) if case.neuron else ())
            if graph.kind == "prefill"
        )
        return (
            case.backend == self.backend
            and (family in self.families if family else self.families != ())
            and all(getattr(case.model, name) in values for name, values in self.model.items())
            and when(**conditions).holds(case.effective)
            and max(prompts, default=0) >= self.prompt_tokens
        )


def known_defects(case: Case, compiler: str | None) -> Iterator[Finding]:
    """Yield a warning for each defect that a compile of this case meets, or an error (see `CompilerDefect.refused`).

    `compiler`: its version; None, or no number: it is not known. Then those of all SDKs with a library that the backend
    drives count. A defect that the newest of them does not have is a note, and those of none of them are one note.
    """
    known = bool(compiler and sdks.release(compiler))
    versions = [compiler] if compiler and known else _compilers(case)
    others = []
    for row in _table().values():
        if not row.meets(case):
            continue
        has = [sdks.within(version, row.compiler) for version in versions]
        names = tuple(
            name
            for name, value in row.options.items()
            if name in ServingOptions.model_fields and value != "unset"
        )
        if any(has):
            problem = row.report if known else f"{row.report}. The compiler is not known here"
            if known and row.refused and not case.options.allow_known_defects:
                yield Finding(names, f"{problem}; to try it, set allow_known_defects=true")
            else:
                yield Finding(names, problem, "warning" if has[0] else "note")
        elif not known:
            others.append(row.report)
    if others:
        yield Finding((), f"with compilers of other SDKs alone, {'; '.join(others)}", "note")


def _compilers(case: Case) -> list[str]:
    """Return the compilers of the SDKs with a library that the backend drives, the newest first."""
    library = case.neuron
    return [
        compiler
        for sdk in sdks.table().sdk
        if library is not None
        and any(sdks.within(one, library.driven) for one in sdk.packages.get(library.package, ()))
        for compiler in sdk.packages["neuronx-cc"]
    ]


def recognised(text: str) -> CompilerDefect | None:
    """Return the first defect whose text the output of a failed compile has; None if there is none."""
    return next((row for row in _table().values() if row.text and re.search(row.text, text)), None)


@cache
def _table() -> dict[str, CompilerDefect]:
    return read_table(__file__, "defects.toml", dict[str, CompilerDefect])


def _condition(value: Any) -> object:  # noqa: ANN401  (of a TOML file)
    """Return a condition of `when`."""
    if isinstance(value, dict):
        return above(value["above"])
    return {"set": SET, "unset": UNSET}[value] if isinstance(value, str) else frozenset(value)
