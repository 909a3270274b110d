"""What serving a model would do, told before it does it: settings, plan, memory, and everything that is wrong.

Nothing is compiled, no weight is read or downloaded, and neither torch nor transformers nor numpy is imported.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from djl_python_neuronx.artifacts import fetch
from djl_python_neuronx.config import sources
from djl_python_neuronx.config.findings import Level, Problem, Problems
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.resolve import Resolved
from djl_python_neuronx.errors import (
    ArtifactNotFoundError,
    ConfigError,
    InvalidOptionError,
    ServingError,
)
from djl_python_neuronx.loading.fitting import graph_target
from djl_python_neuronx.loading.outline import (
    Model,
    Place,
    completed,
    judge_graphs,
    model_of,
    recorded,
)
from djl_python_neuronx.planning import machines
from djl_python_neuronx.planning.advice import NOT_SERVED
from djl_python_neuronx.planning.assess import assess, examine
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.draft import ORIGIN, alone, draft_settings
from djl_python_neuronx.planning.graph_facts import flag_facts, library_facts
from djl_python_neuronx.planning.intent import drafting
from djl_python_neuronx.planning.loader import NEURON_LOADERS, libraries, preferred
from djl_python_neuronx.planning.machines import DeviceInfo
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.plan import ServingPlan, make_plan

ASSUMED_INSTANCES = ("inf2.48xlarge", "trn1.32xlarge", "trn2.48xlarge")
"""Machines to plan for where there is none: the first whose runtime takes the tensor parallel degrees."""


@dataclass(frozen=True)
class Report:
    """Everything that `check` found out."""

    target: str
    resolved: Resolved | None = None
    """None: there was nothing to read settings from."""
    model: Model | None = None
    facts: ModelFacts | None = None
    plan: ServingPlan | None = None
    """None: the model's configuration could not be had."""
    draft_plan: ServingPlan | None = None
    """The draft model's, as it is loaded beside; None: there is none, or something is wrong with either."""
    findings: tuple[Problem, ...] = ()
    """What is to be said, in the order in which it was found."""
    lacking: tuple[str, ...] = ()
    """Why a plan that holds could not be carried out here and now, in words."""

    @property
    def errors(self) -> tuple[str, ...]:
        """What stands in the way."""
        return self._of("error")

    @property
    def warnings(self) -> tuple[str, ...]:
        """What costs time, memory or speed, or may go wrong."""
        return self._of("warning")

    @property
    def notes(self) -> tuple[str, ...]:
        """What is good to know."""
        return self._of("note")

    @property
    def ok(self) -> bool:
        """True if nothing stands in the way of the plan."""
        return not self.errors

    @property
    def loadable(self) -> bool:
        """True if this version, with what is here of the model, would load it like this."""
        return self.ok and self.plan is not None and not self.lacking

    def _of(self, level: Level) -> tuple[str, ...]:
        return tuple(problem.message for problem in self.findings if problem.level == level)


def check(
    target: str | None,
    *,
    environ: Mapping[str, str],
    overrides: Mapping[str, str],
    machine: DeviceInfo | None = None,
) -> Report:
    """What would happen with the model folder, `.properties` file, Hugging Face id or URI `target`.

    `target` None: SageMaker's folder, or, where there is none, the model that variables or `overrides` name.
    `overrides` are the command line's options. `machine` None: the one this runs on, or a stated assumption. Looks
    at config.json only, which for a hub id or a URI is fetched. Never raises for what is wrong with the settings or
    the model: that is in the report.
    """
    problems = Problems()
    name = target or str(sources.MODEL_DIR)
    try:
        resolved = _settings(target, environ, overrides, problems)
    except ServingError as error:
        problems.add_error(error)
        return Report(name, findings=tuple(problems))
    # The process that serves is going to have the variables of `option.env` too.
    process = sources.with_worker_variables(environ, resolved.worker_variables)
    model = model_of(resolved, process, problems)
    if model is None:
        _add_findings(problems, resolved)
        return Report(name, resolved=resolved, findings=tuple(problems))
    facts = ModelFacts.from_config(model.config, model.dtype)
    here = machines.detect(environ=process) if machine is None else machine
    loader = _loader(resolved.options, facts, model, here, explicit=machine is not None)
    resolved, draft_model = completed(resolved, model, loader, process, problems)
    place = _place(resolved, here, loader, process, problems, explicit=machine is not None)
    _missing(loader, here if machine is None else None, problems)
    draft = None if draft_model is None else ModelFacts.from_config(draft_model.config)
    resolved, case, unsuitable = assess(
        resolved, Case(resolved.options, facts, place.machine, loader, draft)
    )
    _add_errors(problems, resolved, unsuitable)
    _add_findings(problems, resolved)
    judge_graphs(model, resolved.options, place, problems)
    draft_plan = None
    if draft_model is not None and drafting(resolved.options) and not unsuitable:
        draft_plan = _draft_plan(resolved, draft_model, place, problems)
    if loader == "cpu" and facts.num_parameters is None:
        kind = facts.model_type or "(config.json names none)"
        doubt = "whether transformers can load it, and what it takes, shows when it is loaded"
        problems.add("warning", f"the model_type {kind} is not known here: {doubt}")
    plan = make_plan(case, artifact_format=model.format)
    lacking = tuple(_lacking(loader, model, resolved.options, process))
    return Report(name, resolved, model, facts, plan, draft_plan, tuple(problems), lacking)


def _settings(
    target: str | None,
    environ: Mapping[str, str],
    overrides: Mapping[str, str],
    problems: Problems,
) -> Resolved:
    """The options of a folder, of a file as if it lay beside the model, or of a model by its name alone."""
    path = _path(str(sources.MODEL_DIR) if target is None else target)
    folder: Path | None = None
    file: Path | None = None
    if _is(path, Path.is_dir):
        folder = path
    elif _is(path, Path.is_file):
        folder, file = path.parent, path
    elif target is not None and (fetch.uri_scheme(target) or _names_hub_model(target)):
        overrides = {"model_id": target, **overrides}
    elif target is not None:
        msg = (
            f"there is no {target!r}; expected a model folder, a .properties file, a Hugging Face id ('owner/name') "
            "or s3://bucket/folder"
        )
        raise ArtifactNotFoundError(msg)
    resolved, invalid = examine(None, folder, environ, overrides, file=file)
    if folder is None and resolved.options.model_id is None:
        msg = (
            f"there is no {str(path)!r}, and neither variables nor command line name a model; expected a target, or "
            "HF_MODEL_ID, or OPTION_MODEL_ID"
        )
        raise ArtifactNotFoundError(msg)
    _add_errors(problems, resolved, invalid)
    return resolved


def _add_errors(problems: Problems, resolved: Resolved, errors: Iterable[ConfigError]) -> None:
    about = {resolved.describe(finding): finding.names for finding in resolved.conflicts}
    for error in errors:
        for leaf in error.problems:
            problems.add_error(leaf, about.get(str(leaf), ()))


def _add_findings(problems: Problems, resolved: Resolved) -> None:
    for finding in resolved.findings:
        problems.add(finding.level, resolved.describe(finding), finding.names)
    for key, doubt in resolved.suspicious.items():
        problems.add("warning", f"{key}: {doubt}", (key,))


def _path(target: str) -> Path:
    try:
        return Path(target).expanduser()
    except RuntimeError:  # ~somebody who is not there
        return Path(target)


def _is(path: Path, question: Callable[[Path], bool]) -> bool:
    try:
        return question(path)
    except (OSError, ValueError):
        return False


def _names_hub_model(target: str) -> bool:
    return fetch.is_hub_id(target) and not target.endswith(".properties")


def _draft_plan(
    resolved: Resolved, draft: Model, place: Place, problems: Problems
) -> ServingPlan | None:
    """The plan of the draft model, which is prepared as every model is; None, with that told, if a load refuses it."""
    whose = "the draft model: "
    settings = draft_settings(resolved.options, place.loader, draft.name)
    examined, invalid = examine(None, None, {}, settings, overrides_from=ORIGIN)
    examined = recorded(examined, draft, place.loader, problems)
    examined = replace(examined, options=alone(examined.options))
    facts = ModelFacts.from_config(draft.config, draft.dtype)
    finished, case, unsuitable = assess(
        examined, Case(examined.options, facts, place.machine, place.loader)
    )
    for problem in (*invalid, *unsuitable):
        problems.add("error", f"{whose}{problem}", ("speculative_draft_model",))
    if invalid or unsuitable:
        return None
    judge_graphs(draft, finished.options, place, problems, whose)
    return make_plan(case)


def _loader(
    options: ServingOptions, facts: ModelFacts, model: Model, here: DeviceInfo, *, explicit: bool
) -> str:
    """The backend to plan for: asked for, the artifact's, or the one that knows the model.

    As when the model is served, a library goes first that this version can load with, and on a Neuron machine that was
    not merely named, one that is installed there.
    """
    if options.model_loader in {"cpu", *NEURON_LOADERS}:
        return options.model_loader
    if model.backend is not None:
        return model.backend
    degree = options.tensor_parallel_degree
    if not here.has_neuron and degree in {None, 1}:
        return "cpu"
    served = [name for name in NEURON_LOADERS if name not in NOT_SERVED]
    candidates = [served, [*NEURON_LOADERS]]
    if here.has_neuron and not explicit:
        installed = libraries()
        ready = [name for name in served if installed[NEURON_LOADERS[name]].state == "installed"]
        candidates.insert(0, ready)
    chosen = (preferred(options, facts.model_type, names) for names in candidates)
    return next(filter(None, chosen), "tnx")


def _place(
    resolved: Resolved,
    here: DeviceInfo,
    loader: str,
    environ: Mapping[str, str],
    problems: Problems,
    *,
    explicit: bool,
) -> Place:
    """Where a process with these variables loads the model; its flags, its cores and what graphs there depend on.

    Of a machine that was merely named it is not known what is installed there, of an assumed one nothing.
    """
    machine = _machine(resolved.options, here, loader, environ, problems)
    if loader == "cpu":
        return Place(loader, machine, environ, {})
    _tell_limit(machine, environ, resolved, problems)
    try:
        flag_facts(environ)
    except InvalidOptionError as error:
        problems.add_error(error)
    known: dict[str, object] = {}
    if here.has_neuron:
        known["target"] = graph_target(machine, loader)
    if here.has_neuron and not explicit:
        known |= library_facts(loader)
        if (version := libraries()["neuronx-cc"].version) is not None:
            known["compiler_version"] = version
    return Place(loader, machine, environ, known)


def _machine(
    options: ServingOptions,
    here: DeviceInfo,
    loader: str,
    environ: Mapping[str, str],
    problems: Problems,
) -> DeviceInfo:
    """The machine to plan for, as a process with these variables has it.

    It is this or the named one, else an assumed one that suits the degrees.
    """
    if loader == "cpu" or here.has_neuron:
        if loader != "cpu" and here.assumed:
            problems.add("note", here.assumed)
        return machines.for_process(here, environ)
    candidates = [machines.for_process(machines.named(name), environ) for name in ASSUMED_INSTANCES]
    chosen = next((one for one in candidates if _suits(options, one)), candidates[0])
    problems.add(
        "note",
        f"no Neuron device here: planned for {chosen.instance_type}, name another with --instance",
    )
    return chosen


def _suits(options: ServingOptions, machine: DeviceInfo) -> bool:
    """Whether the runtime of a machine takes the degrees that were set, whatever part of it a process may use."""
    degrees = [options.tensor_parallel_degree]
    if drafting(options):
        degrees.append(options.draft_model_tp_size)
    legal = machines.legal_degrees(machine.family, machine.neuron_cores)
    numbers = [degree for degree in degrees if isinstance(degree, int)]
    return bool(numbers) and all(degree // machine.machines(degree) in legal for degree in numbers)


def _tell_limit(
    machine: DeviceInfo, environ: Mapping[str, str], resolved: Resolved, problems: Problems
) -> None:
    """Which cores a variable leaves to the process that serves, and where it is set."""
    limit = machines.core_limit(environ)
    if limit is None:
        return
    setting = resolved.worker_variables.get(limit.name)
    where = "environment" if setting is None else f"option.env, {setting.origin}"
    if limit.problem is not None:
        problems.add("warning", f"{limit.problem} ({where})")
    elif beyond := limit.beyond(machine):
        problems.add("error", f"{beyond} ({where})")
    elif machine.limited_by is not None:
        whole = f" of the {machine.neuron_cores}" if machine.neuron_cores else ""
        problems.add(
            "note",
            f"{limit} ({where}) leaves {machine.visible_cores}{whole} NeuronCores: the plan counts these alone",
        )


def _missing(loader: str, here: DeviceInfo | None, problems: Problems) -> None:
    """What this installation lacks for the loader; only a note where nobody would serve with it anyway.

    `here` is the machine that this runs on, None if another was named.
    """
    for obstacle in _obstacles(loader):
        problems.add("warning" if here is not None and here.has_neuron else "note", obstacle)


def _obstacles(loader: str) -> Iterator[str]:
    package = NEURON_LOADERS.get(loader)
    if package is not None and (state := libraries()[package].state) != "installed":
        what = "not installed" if state == "missing" else "PyPI's placeholder, not the library,"
        yield f"{package} is {what} here; the machine that serves needs it"
    if not _has_backend(loader):
        yield f"this version of djl_python_neuronx plans for {loader} but cannot load with it yet"


def _has_backend(loader: str) -> bool:
    # The folder is read, not the package: importing that costs numpy.
    folder = str(Path(__file__).parents[1] / "backends")
    return loader in {module.name for module in pkgutil.iter_modules([folder])}


def _lacking(
    loader: str, model: Model, options: ServingOptions, environ: Mapping[str, str]
) -> Iterator[str]:
    """What stands between a plan that holds and a load."""
    if not _has_backend(loader):
        yield f"this version cannot load with {loader} yet"
    degree = options.tensor_parallel_degree
    if (
        loader != "cpu"
        and isinstance(degree, int)
        and (found := machines.spanning(degree, environ))
    ):
        yield f"a model on several machines ({', '.join(found)}) is not served by this version"
    if model.artifact is None or not model.artifact.weights:
        yield "its weights are not here and were not looked at"
