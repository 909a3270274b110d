"""What serving a model would do, told before it does it: settings, plan, memory, and everything that is wrong.

Nothing is compiled, no weight is read or downloaded, and neither torch nor transformers nor numpy is imported.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from djl_python_neuronx.artifacts import fetch, formats
from djl_python_neuronx.config import device, instances, nodes, sources
from djl_python_neuronx.config.device import DeviceInfo
from djl_python_neuronx.config.draft import ORIGIN, draft_settings
from djl_python_neuronx.config.findings import Level
from djl_python_neuronx.config.intent import drafting
from djl_python_neuronx.config.loader import NEURON_LOADERS, libraries, preferred
from djl_python_neuronx.config.model import ModelFacts
from djl_python_neuronx.config.options import NAMES, ServingOptions
from djl_python_neuronx.config.plan import ServingPlan, make_plan
from djl_python_neuronx.config.resolve import Resolved, assess, examine
from djl_python_neuronx.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    ConfigError,
    ServingError,
)

ASSUMED_INSTANCES = ("inf2.48xlarge", "trn1.32xlarge", "trn2.48xlarge")
"""Machines to plan for where there is none: the first whose runtime takes the tensor parallel degree."""
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
VOCABULARY_SUFFIXES = (".model", ".tiktoken")
"""What artifacts.tokenizer, whose import is not light, takes for a tokenizer."""


@dataclass(frozen=True)
class Model:
    """What is known of a model without its weights."""

    name: str
    """As the options name it, or its folder."""
    where: str
    """Where its configuration was read, in words."""
    config: Mapping[str, Any]
    """config.json"""
    format: str = "huggingface"
    backend: str | None = None
    """The only backend that can load it; None: any that knows the architecture."""
    dtype: str | None = None
    """Of most of the checkpoint; None: nothing but config.json was read."""
    has_weights: bool = False
    """The weights lie here too."""


@dataclass(frozen=True)
class Told:
    """One sentence of a report."""

    level: Level
    options: tuple[str, ...]
    """The options that it is about; empty where it is about none."""
    message: str


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
    findings: tuple[Told, ...] = ()
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
        return tuple(told.message for told in self.findings if told.level == level)


@dataclass
class _Messages:
    """What is to be said, each thing once, in the order in which it was found."""

    said: dict[tuple[Level, str], tuple[str, ...]] = field(default_factory=dict)
    """Level and sentence to the options that it is about."""

    def tell(self, level: Level, message: str, options: tuple[str, ...] = ()) -> None:
        self.said.setdefault((level, message), options)

    def refuse(
        self,
        errors: Iterable[Exception],
        about: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    ) -> None:
        """The errors, each problem by itself; `about`: a problem's text to its options."""
        for error in errors:
            for leaf in error.problems if isinstance(error, ConfigError) else (error,):
                name = getattr(leaf, "name", None)
                options = (NAMES.get(name, name),) if isinstance(name, str) else ()
                self.tell("error", str(leaf), about.get(str(leaf), options))

    def judge(self, resolved: Resolved, errors: Iterable[ConfigError]) -> None:
        """The errors of the settings."""
        about = {resolved.describe(finding): finding.names for finding in resolved.conflicts}
        self.refuse(errors, about)

    def add(self, resolved: Resolved) -> None:
        """What the sources, the rules and the facts gave beside errors."""
        for finding in resolved.findings:
            self.tell(finding.level, resolved.describe(finding), finding.names)
        for key, doubt in resolved.suspicious.items():
            self.tell("warning", f"{key}: {doubt}", (key,))

    def into(self, report: Report) -> Report:
        found = (Told(level, names, message) for (level, message), names in self.said.items())
        return replace(report, findings=tuple(found))


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
    messages = _Messages()
    name = target or str(sources.MODEL_DIR)
    try:
        resolved = _settings(target, environ, overrides, messages)
    except ServingError as error:
        messages.refuse([error])
        return messages.into(Report(name))
    model = _model(resolved, environ, messages)
    if model is None:
        messages.add(resolved)
        return messages.into(Report(name, resolved=resolved))
    facts = ModelFacts.from_config(model.config, model.dtype)
    here = device.detect(environ=environ) if machine is None else machine
    here = replace(here, local_degree=nodes.local_degree(environ))
    loader = _loader(resolved.options, facts, model, here, explicit=machine is not None)
    planned_for = _machine(resolved.options, here, loader, messages)
    _missing(loader, here if machine is None else None, messages)
    draft_config = _draft(resolved, model, environ, messages)
    draft = None if draft_config is None else ModelFacts.from_config(draft_config)
    resolved, problems = assess(
        resolved, model.config, planned_for, loader, model.dtype, draft=draft
    )
    messages.judge(resolved, problems)
    messages.add(resolved)
    if draft_config is not None and drafting(resolved.options) and not problems:
        _judge_draft(resolved, draft_config, planned_for, loader, messages)
    if loader == "cpu" and facts.num_parameters is None:
        kind = facts.model_type or "(config.json names none)"
        doubt = "whether transformers can load it, and what it takes, shows when it is loaded"
        messages.tell("warning", f"the model_type {kind} is not known here: {doubt}")
    plan = make_plan(
        resolved, facts, planned_for, loader, artifact_format=model.format, draft=draft
    )
    lacking = tuple(_lacking(loader, model, resolved.options, environ))
    return messages.into(Report(name, resolved, model, facts, plan, lacking=lacking))


def _settings(
    target: str | None,
    environ: Mapping[str, str],
    overrides: Mapping[str, str],
    messages: _Messages,
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
    resolved, problems = examine(None, folder, environ, overrides, file=file)
    if folder is None and resolved.options.model_id is None:
        msg = (
            f"there is no {str(path)!r}, and neither variables nor command line name a model; expected a target, or "
            "HF_MODEL_ID, or OPTION_MODEL_ID"
        )
        raise ArtifactNotFoundError(msg)
    messages.judge(resolved, problems)
    return resolved


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


def _model(resolved: Resolved, environ: Mapping[str, str], messages: _Messages) -> Model | None:
    """The model that the options name; None, with the error told, if its configuration cannot be had."""
    options = resolved.options
    folder = fetch.local_folder(options.model_id, options.model_dir)
    try:
        if folder is not None:
            return _local(folder, resolved, messages)
        if options.model_id is None:
            return None  # a rule has said that there is no model
        config = fetch.fetch_config(options.model_id, options.revision, environ)
        if not isinstance(config.get("model_type"), str):
            msg = f"{fetch.CONFIG} of {options.model_id!r} names no model_type; expected one such as 'llama'"
            messages.refuse([ArtifactError(msg)])
            return None
    except ServingError as error:
        messages.refuse([error])
        return None
    kind = fetch.uri_scheme(options.model_id)
    where = f"config.json from {kind or 'the hub'}"
    return Model(options.model_id, where, config)


def _local(folder: Path, resolved: Resolved, messages: _Messages) -> Model:
    """A local model, whole or without its weights, which then is only a warning."""
    options = resolved.options
    origin = "the argument" if options.model_id is None else "option.model_id"
    name = options.model_id or str(folder)
    try:
        artifact = formats.detect(folder, origin=origin)
    except ArtifactNotFoundError as error:
        if not (folder / fetch.CONFIG).is_file():
            raise
        messages.tell("warning", f"{error} It is only planned")
        return Model(name, f"{folder / fetch.CONFIG}", formats.read_json(folder / fetch.CONFIG))
    if not options.trust_remote_code and not _has_tokenizer(folder):
        messages.tell(
            "error",
            f"no tokenizer in {folder}: expected one of {', '.join(VOCABULARIES)}, *.model or *.tiktoken. "
            "Copy the tokenizer's files beside config.json",
        )
    return Model(
        name,
        str(folder),
        artifact.config,
        artifact.format,
        artifact.backend,
        artifact.dtype,
        has_weights=True,
    )


def _has_tokenizer(folder: Path) -> bool:
    return any(
        entry.name in VOCABULARIES or entry.name.endswith(VOCABULARY_SUFFIXES)
        for entry in folder.iterdir()
    )


def _draft(
    resolved: Resolved, model: Model, environ: Mapping[str, str], messages: _Messages
) -> Mapping[str, Any] | None:
    """The draft model's configuration, if one is named and it can be had.

    Without its weights it is good for a plan, as the model is.
    """
    name, model_dir = resolved.options.speculative_draft_model, resolved.options.model_dir
    if name is None:
        return None
    folder = fetch.local_folder(name, model_dir)
    try:
        if folder is None:
            return fetch.fetch_config(name, None, environ, origin="option.speculative_draft_model")
        try:
            formats.detect(folder, origin="option.speculative_draft_model")
        except ArtifactNotFoundError as error:
            if not (folder / fetch.CONFIG).is_file():
                raise
            level: Level = "error" if model.has_weights else "warning"
            messages.tell(level, f"the draft model: {error}", ("speculative_draft_model",))
        return formats.read_json(folder / fetch.CONFIG)
    except ServingError as error:
        problem = f"the draft model (option.speculative_draft_model): {error}"
        messages.tell("error", problem, ("speculative_draft_model",))
        return None


def _judge_draft(
    resolved: Resolved,
    config: Mapping[str, Any],
    machine: DeviceInfo,
    loader: str,
    messages: _Messages,
) -> None:
    """Tell what a load would refuse of the draft model, which is prepared as every model is."""
    name = resolved.options.speculative_draft_model or ""
    settings = draft_settings(resolved.options, loader, name)
    examined, problems = examine(None, None, {}, settings, overrides_from=ORIGIN)
    _, unsuitable = assess(examined, config, machine, loader)
    for problem in (*problems, *unsuitable):
        messages.tell("error", f"the draft model: {problem}", ("speculative_draft_model",))


def _loader(
    options: ServingOptions, facts: ModelFacts, model: Model, here: DeviceInfo, *, explicit: bool
) -> str:
    """The backend to plan for: asked for, the artifact's, or the one that knows the model.

    Where the libraries are, on a Neuron machine that was not merely named, the installed one goes first, as it does
    when the model is served.
    """
    if options.model_loader in {"cpu", *NEURON_LOADERS}:
        return options.model_loader
    if model.backend is not None:
        return model.backend
    degree = options.tensor_parallel_degree
    if not here.has_neuron and degree in {None, 1}:
        return "cpu"
    if here.has_neuron and not explicit:
        installed = libraries()
        ready = [
            name
            for name, package in NEURON_LOADERS.items()
            if installed[package].state == "installed"
        ]
        if chosen := preferred(options, facts.model_type, ready):
            return chosen
    return preferred(options, facts.model_type) or "tnx"


def _machine(
    options: ServingOptions, here: DeviceInfo, loader: str, messages: _Messages
) -> DeviceInfo:
    """The machine to plan for: this or the named one, else an assumed one that suits the degree."""
    if loader == "cpu" or here.has_neuron:
        if loader != "cpu" and here.assumed:
            messages.tell("note", here.assumed)
        return here
    degree = options.tensor_parallel_degree
    candidates = [
        replace(instances.named(name), local_degree=here.local_degree) for name in ASSUMED_INSTANCES
    ]
    chosen = next(
        (
            one
            for one in candidates
            if isinstance(degree, int)
            and degree // one.machines(degree)
            in instances.legal_degrees(one.family, one.neuron_cores)
        ),
        candidates[0],
    )
    messages.tell(
        "note",
        f"no Neuron device here: planned for {chosen.instance_type}, name another with --instance",
    )
    return chosen


def _missing(loader: str, here: DeviceInfo | None, messages: _Messages) -> None:
    """What this installation lacks for the loader; only a note where nobody would serve with it anyway.

    `here` is the machine that this runs on, None if another was named.
    """
    for obstacle in _obstacles(loader):
        messages.tell("warning" if here is not None and here.has_neuron else "note", obstacle)


def _obstacles(loader: str) -> Iterator[str]:
    package = NEURON_LOADERS.get(loader)
    if package is not None and (state := libraries()[package].state) != "installed":
        what = "not installed" if state == "missing" else "PyPI's placeholder, not the library,"
        yield f"{package} is {what} here; the machine that serves needs it"
    if not _has_backend(loader):
        yield f"this version of djl_python_neuronx plans for {loader} but cannot load with it yet"


def _has_backend(loader: str) -> bool:
    # The folder is read, not the package: importing that costs numpy.
    folder = str(Path(__file__).parent / "backends")
    return loader in {module.name for module in pkgutil.iter_modules([folder])}


def _lacking(
    loader: str, model: Model, options: ServingOptions, environ: Mapping[str, str]
) -> Iterator[str]:
    """What stands between a plan that holds and a load."""
    if not _has_backend(loader):
        yield f"this version cannot load with {loader} yet"
    degree = options.tensor_parallel_degree
    if loader != "cpu" and isinstance(degree, int) and (found := nodes.spanning(degree, environ)):
        yield f"a model on several machines ({', '.join(found)}) is not served by this version"
    if not model.has_weights:
        yield "its weights are not here and were not looked at"
