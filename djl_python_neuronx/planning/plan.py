"""The plan of a start: settings judged and filled in, library arguments, graphs, compile time and memory.

`examine` judges the settings alone, `assess` with the model and the machine; then `make_plan`. Nothing is compiled or
loaded.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from djl_python_neuronx.config import sources
from djl_python_neuronx.config.findings import Finding, Problems, is_set
from djl_python_neuronx.config.options import ServingOptions, SpeculationOptions, option
from djl_python_neuronx.config.resolve import Resolved, read_settings
from djl_python_neuronx.config.values import join_words
from djl_python_neuronx.errors import InvalidOptionError
from djl_python_neuronx.planning import defaults, memory, model_rules, placement
from djl_python_neuronx.planning.arguments import LibraryArguments, PlannedGraph
from djl_python_neuronx.planning.backend_choice import installed_versions, libraries
from djl_python_neuronx.planning.case import Case, Filled, NeuronBackend
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.memory import CoreMemory
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.rules import conflicts

_SECONDS_PER_LAYER = 3.0
_UNKNOWN_LAYERS = 32
COMPILE_BASIS = (
    "3 s per layer and graph, one by one, nothing cached; real times are 0.5 to 2 times that"
)
"""Basis of the estimated compile time, for messages.

Chosen so that 70B models (80 layers, ten to seventeen graphs) take the 40 to 70 minutes that their users tell of; the
compiler's real time depends on its version, on the host's CPUs and on how many graphs it compiles at once.
"""
_FLAGS = "NEURON_CC_FLAGS"
_PLACE = "--cache_dir"
_NOTHING: Mapping[str, str] = MappingProxyType({})
_DEFAULT = "default"
_DEGREE = "tensor_parallel_degree"


@dataclass(frozen=True)
class ServingPlan:
    """The graphs that a load would compile and the memory it would allocate: pure data."""

    graphs: tuple[PlannedGraph, ...]
    """Empty: nothing is compiled."""
    estimated_compile_s: float
    """Rough, see `COMPILE_BASIS`; 0 where nothing is compiled."""
    memory: CoreMemory | None
    """Bytes per core; None: sizes of the model are not known."""
    arguments: LibraryArguments | None
    """All arguments of the library; None with the cpu backend."""


def examine(
    properties: Mapping[str, Any] | None,
    model_dir: Path | None,
    environ: Mapping[str, str],
    problems: Problems,
    overrides: Mapping[str, str] = _NOTHING,
    *,
    file: str | None = None,
    content: bytes | None = None,
    overrides_from: str = sources.COMMAND_LINE,
    embedded: bool = False,
) -> Resolved:
    """Read the options from every source (`config.resolve.read_settings`) and judge their combinations."""
    resolved = read_settings(
        properties,
        model_dir,
        environ,
        problems,
        overrides,
        file=file,
        content=content,
        overrides_from=overrides_from,
        embedded=embedded,
    )
    resolved.report(conflicts(resolved.options), problems)
    return resolved


def judge(case: Case, origins: Mapping[str, str]) -> Sequence[Finding]:
    """Return the findings about a case whose options are not filled in. `origins`: of those that are set."""
    return [*model_rules.findings(_fill(case, origins).case)]


def assess(
    resolved: Resolved, case: Case, problems: Problems, others: Iterable[NeuronBackend] = ()
) -> tuple[Resolved, Case]:
    """Fill in every option that follows from the model and the machine, and judge the result.

    `case.options` are those of `resolved`, before they are filled in. `others`: backends that an error may advise.
    """
    unfilled, given = case, resolved.origins
    case, filled, chosen, _ = _fill(unfilled, given)
    origins = {
        **given,
        **{name: f"{given.get(name, _DEFAULT)}: {why}" for name, (_, why) in filled.items()},
    }
    resolved = replace(resolved, options=case.options, origins=MappingProxyType(origins))
    minutes = compile_minutes(graphs(case), case.model, case.draft)
    # Only DJL Serving limits the time of a load.
    estimated_load_s = 60 * minutes if resolved.written_for_djl and minutes else None
    found = [*model_rules.findings(case, estimated_load_s=estimated_load_s)]
    if _wrong(found):
        for other in others:
            found = _with_advice(found, other, judge(replace(unfilled, neuron=other), given))
    resolved.report([*found, *_few_slots(chosen), *_small_degree(unfilled, chosen)], problems)
    return resolved, case


def _with_advice(
    found: Sequence[Finding], other: NeuronBackend, elsewhere: Sequence[Finding]
) -> list[Finding]:
    """Name another backend in each error that it would not make, if it makes no further ones (`elsewhere`)."""
    left, switch = _wrong(elsewhere), f"model_loader={other.name}"
    if not left.keys() < _wrong(found).keys():
        return [*found]
    return [
        finding
        if finding.level != "error" or finding.names in left or switch in finding.problem
        else replace(finding, problem=f"{finding.problem}, or set {switch}")
        for finding in found
    ]


def _wrong(found: Iterable[Finding]) -> dict[tuple[str, ...], None]:
    """Return the options of each error."""
    return dict.fromkeys(finding.names for finding in found if finding.level == "error")


def _few_slots(chosen: Filled) -> Iterator[Finding]:
    slots, others = chosen.get("max_rolling_batch_size", (None, ""))
    if isinstance(slots, int) and slots < defaults.MAX_ROLLING_BATCH_SIZE:
        problem = (
            f"no more are possible with {others}; further requests wait. Change that, or set "
            f"option.max_rolling_batch_size={slots} to accept it"
        )
        yield Finding(("max_rolling_batch_size",), problem, "warning")


def _small_degree(unfilled: Case, chosen: Filled) -> Iterator[Finding]:
    """Note the reason that a larger degree, the usual default, is not taken."""
    if _DEGREE in chosen:
        usual = _with_defaults(unfilled, {}).case
        for finding in model_rules.findings(usual):
            if finding.level == "error" and _DEGREE in finding.names:
                yield Finding((_DEGREE,), f"not {usual.degree}: {finding.problem}", "note")


class _Filled(NamedTuple):
    """A case whose options are filled in."""

    case: Case
    filled: Filled
    """Options whose values were filled in."""
    chosen: Filled
    """Values among them that differ from the usual default, each with the options that caused it, as a text."""
    wrong: dict[tuple[str, ...], None]
    """The options of each error that is left."""


def _fill(case: Case, origins: Mapping[str, str]) -> _Filled:
    """Fill in every option, with another default where a rule refuses the usual one: only what is set is an error.

    `origins`: of the options that are set.
    """
    best = _with_defaults(case, {})
    while best.wrong and placement.fits(best.case) is not False:
        attempts = (_with_defaults(case, chosen) for chosen in _attempts(case, best, origins))
        better = next((one for one in attempts if one.wrong.keys() < best.wrong.keys()), None)
        if better is None:
            break
        best = better
    return best


def _attempts(case: Case, best: _Filled, origins: Mapping[str, str]) -> Iterator[Filled]:
    """Yield values for unset options that an error names, with those that were chosen before."""
    for names in best.wrong:
        for name in names:
            largest = getattr(case.options, name) == "max"
            is_open = largest or name not in origins
            if is_open and (name in best.filled or not is_set(case.options, name)):
                others = join_words(one for one in names if one not in {name, *best.filled})
                for value in defaults.others(name, best.case, largest=largest):
                    yield {**best.chosen, name: (value, others or "the model")}


def _with_defaults(case: Case, chosen: Filled) -> _Filled:
    case = case.with_options(**{name: value for name, (value, _) in chosen.items()})
    suits = {name: (value, f"suits {others}") for name, (value, others) in chosen.items()}
    filled = {**suits, **defaults.fill(case)}
    values = {name: value for name, (value, _) in filled.items()}
    case = replace(case.with_options(**values), filled=(*filled,))
    found = (*conflicts(case.options), *model_rules.findings(case))
    return _Filled(case, filled, chosen, _wrong(found))


def make_plan(case: Case) -> ServingPlan:
    """Return the plan of a case whose options `assess` has filled in."""
    planned = tuple(graphs(case))
    return ServingPlan(
        graphs=planned,
        estimated_compile_s=60.0 * compile_minutes(planned, case.model, case.draft),
        memory=memory.core_memory(case),
        arguments=None if case.on_cpu else library_arguments(case),
    )


def compile_minutes(
    planned: Iterable[PlannedGraph], facts: ModelFacts, draft: ModelFacts | None = None
) -> float:
    """Return the minutes that compiling takes without a cache; rough, see `COMPILE_BASIS`.

    A draft model's graphs have its number of layers, or the large model's if it is not known.
    """
    models = (
        draft if draft is not None and graph.kind in {"draft prefill", "draft decode"} else facts
        for graph in planned
    )
    layers = sum(model.num_layers or _UNKNOWN_LAYERS for model in models)
    return layers * _SECONDS_PER_LAYER / 60.0


def library_arguments(case: Case) -> LibraryArguments:
    """Return all arguments of the backend's library, for options that are filled in; none for the cpu backend."""
    return LibraryArguments() if case.neuron is None else case.neuron.write_arguments(case)


def stored_findings(case: Case) -> Iterable[Finding]:
    """Return the findings about what exists already: `Case.presharded`, `Case.foreign_graphs`."""
    return () if case.neuron is None else case.neuron.stored_findings(case)


def graphs(case: Case) -> Iterable[PlannedGraph]:
    """Return the graphs that a load compiles, a draft model's included; none on a CPU or before n_positions is set."""
    if case.neuron is None or case.options.max_model_len is None:
        return ()
    return case.neuron.graphs(case)


def graph_options(options: ServingOptions, backend: str) -> dict[str, Any]:
    """Options that the graphs of a backend depend on, as JSON values; without those that are not set.

    Everything that the backend's library gets counts, unless `Option.graph` says otherwise.
    """
    names = {
        name
        for name, entry in ServingOptions.model_fields.items()
        if option(name).shapes_graphs(backend)
        and not (getattr(options, name) is False and entry.default is False)
    }
    if not options.speculating:
        names -= set(SpeculationOptions.model_fields)
    return {
        name: value
        for name, value in options.model_dump(mode="json", include=names).items()
        if value is not None
    }


def library_facts(backend: str) -> dict[str, Any]:
    """Return the versions of the packages that trace the graphs, since they change them; empty if unknown."""
    if (facts := NEURON_BACKENDS.get(backend)) is None:
        return {}
    found = {_version_fact(name): v for name, v in installed_versions(facts.traced_with).items()}
    version = libraries()[facts.package].version
    return found if version is None else {**found, "library_version": version}


def _version_fact(package: str) -> str:
    return f"{package.replace('-', '_')}_version"


PACKAGE_VERSIONS = frozenset(
    _version_fact(name) for facts in NEURON_BACKENDS.values() for name in facts.traced_with
)
"""The facts about `NeuronBackend.traced_with`. Manifests of before have none."""


def flag_facts(environ: Mapping[str, str]) -> dict[str, Any]:
    """The compiler's flags that the environment adds to those of the options, in their order; empty: none.

    Where the compiler keeps its cache (`--cache_dir`) changes no graph.

    Raises:
        InvalidOptionError: a quote is not closed.
    """
    text = environ.get(_FLAGS, "")
    try:
        words = iter(shlex.split(text))
    except ValueError as error:
        expected = "flags in shell syntax, with every quote closed"
        raise InvalidOptionError(_FLAGS, text, "environment", expected) from error
    flags = []
    for word in words:
        if word == _PLACE:
            next(words, None)  # its value
        elif not word.startswith(f"{_PLACE}="):
            flags.append(word)
    return {"cc_flags": flags} if flags else {}
