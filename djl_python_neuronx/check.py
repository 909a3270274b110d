"""What serving a model would do, told before it does it: settings, plan, memory, and everything that is wrong.

Nothing is compiled, no weight is read or downloaded, and neither torch nor transformers nor numpy is imported.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from djl_python_neuronx.artifacts import fetch, formats
from djl_python_neuronx.config import device, instances
from djl_python_neuronx.config.capabilities import CAPABILITIES
from djl_python_neuronx.config.device import DeviceInfo
from djl_python_neuronx.config.loader import NEURON_LOADERS, libraries
from djl_python_neuronx.config.model import ModelFacts
from djl_python_neuronx.config.options import ServingOptions
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


@dataclass(frozen=True)
class Report:
    """Everything that `check` found out. `errors` empty: the model would be loaded like this."""

    target: str
    resolved: Resolved | None = None
    """None: there was nothing to read settings from."""
    model: Model | None = None
    facts: ModelFacts | None = None
    plan: ServingPlan | None = None
    """None: the model's configuration could not be had."""
    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if nothing stands in the way."""
        return not self.errors


@dataclass
class _Messages:
    """What is to be said, each thing once, in the order in which it was found."""

    errors: dict[str, None] = field(default_factory=dict)
    warnings: dict[str, None] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)

    def refuse(self, errors: Iterable[Exception]) -> None:
        for error in errors:
            leaves = error.problems if isinstance(error, ConfigError) else (error,)
            self.errors.update(dict.fromkeys(map(str, leaves)))

    def add(self, resolved: Resolved) -> None:
        """What the sources, the rules and the facts gave beside errors."""
        for finding in resolved.findings:
            told = self.warnings if finding.level == "warning" else self.notes
            told[resolved.describe(finding)] = None
        for key, doubt in resolved.suspicious.items():
            self.warnings[f"{key}: {doubt}"] = None

    def into(self, report: Report) -> Report:
        return replace(
            report,
            errors=tuple(self.errors),
            warnings=tuple(self.warnings),
            notes=tuple(self.notes),
        )


def check(
    target: str,
    *,
    environ: Mapping[str, str],
    overrides: Mapping[str, str],
    machine: DeviceInfo | None = None,
) -> Report:
    """What would happen with the model folder, `.properties` file, Hugging Face id or URI `target`.

    `overrides` are the command line's options. `machine` None: the one this runs on, or a stated assumption. Looks
    at config.json only, which for a hub id or a URI is fetched. Never raises for what is wrong with the settings or
    the model: that is in the report.
    """
    messages = _Messages()
    try:
        resolved = _settings(target, environ, overrides, messages)
    except ServingError as error:
        messages.refuse([error])
        return messages.into(Report(target))
    model = _model(resolved, environ, messages)
    if model is None:
        messages.add(resolved)
        return messages.into(Report(target, resolved=resolved))
    facts = ModelFacts.from_config(model.config, model.dtype)
    here = device.detect(environ=environ) if machine is None else machine
    loader = _loader(resolved.options, facts, model, here, explicit=machine is not None)
    planned_for = _machine(resolved.options, here, loader, messages)
    _missing(loader, here if machine is None else None, messages)
    draft = _draft(resolved, environ, messages)
    resolved, problems = assess(
        resolved, model.config, planned_for, loader, model.dtype, draft=draft
    )
    messages.refuse(problems)
    messages.add(resolved)
    plan = make_plan(
        resolved, facts, planned_for, loader, artifact_format=model.format, draft=draft
    )
    return messages.into(Report(target, resolved, model, facts, plan))


def _settings(
    target: str,
    environ: Mapping[str, str],
    overrides: Mapping[str, str],
    messages: _Messages,
) -> Resolved:
    """The options of a folder, of a file as if it lay beside the model, or of a model by its name alone."""
    path = _path(target)
    folder: Path | None = None
    file: Path | None = None
    if _is(path, Path.is_dir):
        folder = path
    elif _is(path, Path.is_file):
        folder, file = path.parent, path
    elif fetch.uri_scheme(target) or _names_hub_model(target):
        overrides = {"model_id": target, **overrides}
    else:
        msg = (
            f"there is no {target!r}; expected a model folder, a .properties file, a Hugging Face id ('owner/name') "
            "or s3://bucket/folder"
        )
        raise ArtifactNotFoundError(msg)
    resolved, problems = examine(None, folder, environ, overrides, file=file)
    messages.refuse(problems)
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
        messages.warnings[str(error)] = None
        return Model(name, f"{folder / fetch.CONFIG}", formats.read_json(folder / fetch.CONFIG))
    return Model(
        name, str(folder), artifact.config, artifact.format, artifact.backend, artifact.dtype
    )


def _draft(
    resolved: Resolved, environ: Mapping[str, str], messages: _Messages
) -> ModelFacts | None:
    """The facts of the draft model, if one is named and its configuration can be had."""
    name, model_dir = resolved.options.speculative_draft_model, resolved.options.model_dir
    if name is None:
        return None
    folder = fetch.local_folder(name, model_dir)
    try:
        if folder is None:
            return ModelFacts.from_config(fetch.fetch_config(name, None, environ))
        return ModelFacts.from_config(formats.read_json(folder / fetch.CONFIG))
    except ServingError as error:
        messages.errors[f"the draft model (option.speculative_draft_model): {error}"] = None
        return None


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
    able = [name for name in NEURON_LOADERS if facts.model_type in CAPABILITIES[name]]
    if here.has_neuron and not explicit:
        installed = libraries()
        ready = [name for name in able if installed[NEURON_LOADERS[name]].state == "installed"]
        able = ready or able
    return able[0] if able else "tnx"


def _machine(
    options: ServingOptions, here: DeviceInfo, loader: str, messages: _Messages
) -> DeviceInfo:
    """The machine to plan for: this or the named one, else an assumed one that suits the degree."""
    if loader == "cpu" or here.has_neuron:
        if loader != "cpu" and here.assumed:
            messages.notes[here.assumed] = None
        return here
    degree = options.tensor_parallel_degree
    candidates = [instances.named(name) for name in ASSUMED_INSTANCES]
    chosen = next(
        (
            one
            for one in candidates
            if isinstance(degree, int)
            and degree in instances.legal_degrees(one.family, one.neuron_cores)
        ),
        candidates[0],
    )
    messages.notes[
        f"no Neuron device here: planned for {chosen.instance_type}, name another with --instance"
    ] = None
    return chosen


def _missing(loader: str, here: DeviceInfo | None, messages: _Messages) -> None:
    """What this installation lacks for the loader; only a note where nobody would serve with it anyway.

    `here` is the machine that this runs on, None if another was named.
    """
    obstacles = list(_obstacles(loader))
    told = messages.warnings if here is not None and here.has_neuron else messages.notes
    told.update(dict.fromkeys(obstacles))


def _obstacles(loader: str) -> Iterator[str]:
    package = NEURON_LOADERS.get(loader)
    if package is not None and (state := libraries()[package].state) != "installed":
        what = "not installed" if state == "missing" else "PyPI's placeholder, not the library,"
        yield f"{package} is {what} here; the machine that serves needs it"
    # The folder is read, not the package: importing that costs numpy.
    folder = str(Path(__file__).parent / "backends")
    if loader not in {module.name for module in pkgutil.iter_modules([folder])}:
        yield f"this version of djl_python_neuronx plans for {loader} but cannot load with it yet"
