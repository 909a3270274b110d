"""Dry run of a start: resolve the settings, plan graphs and memory, and report every problem without loading anything.

No weights are read or downloaded, and neither torch nor transformers is imported into this process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from djl_python_neuronx.config import djl_serving, sources, trust
from djl_python_neuronx.config.findings import Finding, Problems
from djl_python_neuronx.config.resolve import Resolved
from djl_python_neuronx.config.server_options import ServerOptions
from djl_python_neuronx.config.values import as_property, join_words
from djl_python_neuronx.errors import ConfigError, ServingError, redacted
from djl_python_neuronx.loading.advice import advice, small_host
from djl_python_neuronx.loading.compile_risks import compile_risks
from djl_python_neuronx.loading.compiled import foresee, foresee_elsewhere
from djl_python_neuronx.loading.mismatch import SURROUNDINGS
from djl_python_neuronx.loading.preparation_log import log_preparation
from djl_python_neuronx.loading.prepare import DRAFT_PREFIX, prepare
from djl_python_neuronx.loading.prepared import Prepared
from djl_python_neuronx.loading.situation import Purpose, Situation
from djl_python_neuronx.loading.targets import read_target
from djl_python_neuronx.planning import machines
from djl_python_neuronx.planning.backend_choice import libraries
from djl_python_neuronx.planning.cores import place
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.machines import DeviceInfo


@dataclass(frozen=True)
class Report:
    """The result of a check."""

    target: str
    findings: Problems
    """Every error, warning and note."""
    resolved: Resolved | None = None
    """The settings, filled in as far as possible; None: they could not be read."""
    prepared: Prepared | None = None
    """None: the model's configuration could not be read."""
    lacking: tuple[str, ...] = ()
    """Reasons why a valid plan could not be loaded here and now."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model and of its adapters, as far as they are known."""
        names = () if self.resolved is None else self.resolved.options.model_names
        adapters = () if self.prepared is None else self.prepared.adapters
        return (*names, *(one.name for one in adapters))

    @property
    def ok(self) -> bool:
        """True if there are no errors."""
        return not self.findings.errors

    @property
    def error(self) -> ServingError | None:
        """Its errors as one."""
        try:
            self.findings.raise_errors()
        except ServingError as error:
            return error
        return None

    @property
    def loadable(self) -> bool:
        """True if this version could load the model like this, from the files that are here."""
        return self.ok and self.prepared is not None and not self.lacking


@dataclass(frozen=True)
class Placement:
    """The models of one server, and the cores of their copies."""

    reports: tuple[Report, ...]
    findings: Problems
    """The errors of all models together; of a single model its own findings."""
    placed: tuple[tuple[str, ...], ...] = ()
    """For each model the cores of each copy, see `cores.place`; empty if there is an error."""

    @property
    def ok(self) -> bool:
        """True if there are no errors."""
        return not self.findings.errors and all(report.ok for report in self.reports)

    @property
    def models(self) -> list[Prepared]:
        """The models whose configuration could be read."""
        return [report.prepared for report in self.reports if report.prepared is not None]

    @property
    def device(self) -> DeviceInfo:
        """The machine of the models, with the cores of those that are not on its CPU."""
        on_cpu = DeviceInfo(None, 0, 0, 0, 0, "only CPUs are used")
        return next((one.case.device for one in self.models if not one.case.on_cpu), on_cpu)

    def raise_errors(self) -> None:
        """Raise all errors; return if there are none.

        Raises:
            ServingError: the only error as it is, or a `ConfigError` that lists all of them.
        """
        together = Problems()
        for report in self.reports if len(self.reports) > 1 else ():
            together.include(report.findings, f"{report.target}: ", ())
        together.include(self.findings, "", ())
        together.raise_errors()

    def without_broken(self) -> tuple[tuple[str, ...] | ServingError, ...]:
        """For each model the cores of each copy, as if those with errors were not there, or its error.

        Raises:
            ServingError: the others cannot be placed together, or there are none.
        """
        sound = tuple(report for report in self.reports if report.ok)
        if not sound:
            self.raise_errors()
        together = _together(sound, several=True)
        together.raise_errors()
        cores = iter(together.placed)
        return tuple(report.error or next(cores) for report in self.reports)


def check_all(
    targets: Sequence[str | None],
    *,
    environ: Mapping[str, str],
    overrides: Mapping[str, str],
    machine: DeviceInfo | None = None,
    purpose: Purpose = Purpose.CHECK,
) -> Placement:
    """Check all models of one server, and place their copies on the machine's cores.

    `purpose`: `SERVE` to prepare each model as a start does. Others: see `check`.
    """
    several = len(targets) > 1
    checked = partial(check, environ=environ, overrides=overrides, machine=machine)
    reports = tuple(checked(one, among_others=several, purpose=purpose) for one in targets)
    return _together(reports, several=several)


def _together(reports: tuple[Report, ...], *, several: bool) -> Placement:
    """Judge models together, and place them if there is no error."""
    found = Placement(reports, Problems() if several else reports[0].findings)
    for conflict in _conflicts(reports) if several else ():
        found.findings.add("error", conflict)
    if found.ok and len(found.models) == len(reports):
        with found.findings.catch():
            return replace(found, placed=tuple(_place(found)))
    return found


def _conflicts(reports: Sequence[Report]) -> Iterator[str]:
    """Yield why models cannot be served together: equal names, options of the server itself that differ, no process."""
    read = [(report.target, report.resolved) for report in reports if report.resolved is not None]
    for target, resolved in read:
        if not resolved.options.engine_process:
            why = "each of several models needs its own process; leave it out"
            yield f"{target}: {resolved.describe(Finding(('engine_process',), why))}"
    for name in dict.fromkeys(name for report in reports for name in report.names):
        named = [report.target for report in reports if name in report.names]
        if len(named) > 1:
            fix = "set option.model_name in each folder, or option.replicas for copies of one model"
            yield f"{join_words(named)} are models named {name!r}, or have such an adapter; {fix}"
    for (one, first), (other, second) in product(read[:1], read[1:]):
        for name in ServerOptions.model_fields:
            value, another = (getattr(each.options, name) for each in (first, second))
            if value != another:
                yield (
                    f"option.{name} holds for the whole server: it is {as_property(value)} for {one} and "
                    f"{as_property(another)} for {other}; write one value, or set it with -o {name}=…"
                )


def _place(found: Placement) -> list[tuple[str, ...]]:
    """Return the cores of each copy.

    Raises:
        ConfigError: the cores do not hold all copies, or the models are not planned for the same cores.
    """
    for model in found.models:
        mine, first = model.case.device, found.device
        if not model.case.on_cpu and mine.core_numbers != first.core_numbers:
            seen = [
                f"{one.visible_cores} cores ({one.limited_by or one.instance_type})"
                for one in (mine, first)
            ]
            msg = (
                f"{model.name} is planned for {', another model for '.join(seen)}; name the machine (--instance), set "
                "NEURON_RT_VISIBLE_CORES for the server, not in option.env, and give all models the same "
                "logical_nc_config"
            )
            raise ConfigError(msg)
    return place([model.need for model in found.models], found.device)


def check(
    target: str | None,
    *,
    environ: Mapping[str, str],
    overrides: Mapping[str, str],
    machine: DeviceInfo | None = None,
    among_others: bool = False,
    purpose: Purpose = Purpose.CHECK,
) -> Report:
    """Check the model folder, `.properties` file, Hugging Face id or URI `target`.

    Never raises for problems of settings or model; the report has them.

    Args:
        target: None for SageMaker's folder or, without it, the model that variables or `overrides` name.
        environ: the environment's variables.
        overrides: options of the command line.
        machine: the machine to plan for; None for this one or, without a Neuron device, an assumed one.
        among_others: the machine serves other models too.
        purpose: see `check_all`.
    """
    problems = Problems()
    name = redacted(target or str(sources.MODEL_DIR))
    try:
        embedded = purpose is Purpose.SERVE
        settings, in_file = read_target(target, environ, overrides, problems, embedded=embedded)
    except ServingError as error:
        problems = Problems()  # without settings nothing else is worth reporting
        problems.add_error(error)
        return Report(name, problems)
    variables = settings.worker_variables
    serving = trust.serving_environ(environ, variables, problems, inherited=False)
    here = machine or machines.detect(environ=serving)
    on_cpu = not here.has_neuron
    if not embedded:
        _add(problems, djl_serving.missing_arguments(in_file, environ, on_cpu=on_cpu))
    is_named = machine is not None
    situation = Situation(purpose, here, serving, problems, is_named, among_others)
    prepared = prepare(settings, situation)
    if prepared is None:
        return Report(name, problems, settings)
    if purpose is not Purpose.CHECK:
        if not problems.errors:
            log_preparation(prepared, problems)
        return Report(name, problems, prepared.resolved, prepared)
    serves_here = not is_named and not on_cpu
    if obstacle := _missing_here(prepared.backend):
        problems.add("warning" if serves_here else "note", obstacle)
    if not problems.errors:
        is_known = serves_here and not obstacle
        unknown = SURROUNDINGS - ({"target"} if here.has_neuron else frozenset())
        _foresee(prepared, problems, frozenset() if is_known else unknown)
        _add(problems, small_host(prepared))
    _add(problems, advice(settings, prepared))
    return Report(name, problems, prepared.resolved, prepared, tuple(_lacking(prepared)))


def _foresee(prepared: Prepared, problems: Problems, unknown: Collection[str]) -> None:
    """Report whether a start compiles the model and its draft model, where this is the machine that serves.

    `unknown`: the facts that are not known of another machine.
    """
    own = Problems()
    if not unknown and prepared.weights is not None:
        with problems.catch():
            foresee(prepared, problems)
        with own.catch():
            for draft in prepared.models[1:]:
                foresee(draft, own)
        problems.include(own, DRAFT_PREFIX, ("speculative_draft_model",))
        return
    for model in prepared.models:
        if model.own_graphs is None and not model.case.on_cpu:
            with problems.catch():
                foresee_elsewhere(model, unknown)
            model.resolved.report(compile_risks(model), problems)
    if prepared.options.compilation == "forbid" and not prepared.case.on_cpu:
        unseen = "compilation=forbid: only the machine that serves shows, with the weights, whether it has the graphs"
        problems.add("note", unseen, ("compilation",))


def _add(problems: Problems, findings: Iterable[Finding]) -> None:
    for finding in findings:
        problems.add(finding.level, finding.problem, finding.names)


def _missing_here(backend: str) -> str:
    """Return what this installation lacks to load with a backend; empty if nothing."""
    facts = NEURON_BACKENDS.get(backend)
    if facts is not None and (state := libraries()[facts.package].state) != "installed":
        what = "not installed" if state == "missing" else "PyPI's placeholder, not the library,"
        return f"{facts.package} is {what} here; the machine that serves needs it"
    return ""


def _lacking(prepared: Prepared) -> Iterator[str]:
    """Reasons why a valid plan cannot be loaded."""
    case = prepared.case
    if not case.on_cpu and (found := machines.spanning(case.degree, prepared.environ)):
        yield f"a model on several machines ({', '.join(found)}) is not served by this version"
    if not (prepared.artifact.weights or prepared.options.simulated):
        yield "the weights were not downloaded or checked"
