"""From sources to validated, frozen options that know where each value came from."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from djl_python_neuronx.config import defaults, djl_serving, plan, sources, strictness, suitability
from djl_python_neuronx.config.device import DeviceInfo
from djl_python_neuronx.config.legacy import TRANSLATED
from djl_python_neuronx.config.model import ModelFacts
from djl_python_neuronx.config.options import NAMES, ServingOptions, allowed_values, option
from djl_python_neuronx.config.rules import Finding, conflicts
from djl_python_neuronx.config.sources import Setting
from djl_python_neuronx.config.values import shown, truth
from djl_python_neuronx.errors import (
    ConfigError,
    IncompatibleOptionsError,
    InvalidOptionError,
)

_DEFAULT = "default"
# pydantic lists a base's fields before a class's own, the documentation the general ones first.
_DOCUMENTED = tuple(
    name
    for group in ServingOptions.__mro__
    for name in inspect.get_annotations(group)
    if name in ServingOptions.model_fields
)
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Resolved:
    """Options, where each value came from, and what was written but does nothing."""

    options: ServingOptions
    origins: Mapping[str, str]
    """Option name to the place of its value; options left at their default are not listed."""
    ignored: Mapping[str, str]
    """Name as written to the reason why it does nothing here."""
    suspicious: Mapping[str, str]
    """Key of the file that nobody is known to read to what may be wrong with it; worth a warning."""
    findings: tuple[Finding, ...] = ()
    """Warnings and notes; errors are raised, or returned beside."""
    conflicts: tuple[Finding, ...] = ()
    """The findings that those errors were made of."""
    refused: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    """Option name to what was written and is not allowed; the option stands at its default."""

    def explain(self) -> list[tuple[str, object, str]]:
        """Name, value and origin of every option, in the order of the documentation."""
        return [
            (
                name,
                getattr(self.options, name),
                "; ".join(filter(None, (self.origins.get(name, _DEFAULT), self.refused.get(name)))),
            )
            for name in _DOCUMENTED
        ]

    def describe(self, finding: Finding) -> str:
        """The finding as a sentence, each option with its value and origin."""
        listed = " and ".join(
            f"{name}={strictness.cut(shown(getattr(self.options, name)))} ({self.origins.get(name, _DEFAULT)})"
            if name in ServingOptions.model_fields
            else name
            for name in finding.names
        )
        return f"{listed}: {finding.problem}" if listed else finding.problem


@dataclass
class _Reading:
    """What becomes of the settings while they are read, highest precedence first."""

    ignored: dict[str, str]
    problems: list[ConfigError]
    suspicious: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Option to its value that is not allowed."""
    chosen: dict[str, tuple[Setting, object]] = field(default_factory=dict)
    """Option to the setting that counts, and to the value that it stands for."""
    notes: list[Finding] = field(default_factory=list)
    all_cores: bool = False
    """The user wrote `max` for the tensor parallel degree."""
    _negatives: dict[str, Setting] = field(default_factory=dict)
    """Option to the first of its old names that was set to false."""
    _firsts: dict[tuple[str, str], tuple[Setting, object]] = field(default_factory=dict)

    def read(self, setting: Setting) -> None:
        name, value = NAMES.get(setting.name), setting.value
        known = (name,) if name else (strictness.cut(setting.name),)
        self.notes += (Finding(known, text, level) for level, text in setting.remarks)
        if name is None and setting.name in TRANSLATED:
            try:
                meant = strictness.translated(setting, self.ignored)
            except InvalidOptionError as error:
                self.problems.append(error)
                return
            if meant is None:
                if truth(setting.value) is False:
                    self._negatives.setdefault(TRANSLATED[setting.name].option, setting)
                return
            name, value = meant
        if name is None:
            self.problems += strictness.unknown(setting, self.ignored, self.suspicious)
        elif reason := strictness.passed_over(name, setting, all_cores=self.all_cores):
            self.ignored[setting.name] = reason
        else:
            self._choose(name, setting, value)

    def _choose(self, name: str, setting: Setting, value: object) -> None:
        if name in self._negatives and name not in self.chosen:
            note = strictness.told_off(name, self._negatives[name], (setting, value))
            if note is not None:
                self.notes.append(note)
                return
        first = self._firsts.setdefault((setting.source, name), (setting, value))
        self.problems += strictness.misplaced(name, setting)
        self.problems += strictness.contradiction(name, first, (setting, value))
        winner = self.chosen.setdefault(name, (setting, value))
        self.notes += strictness.overruled(name, winner, (setting, value))


def resolve(
    properties: Mapping[str, Any] | None,
    model_dir: Path | None,
    environ: Mapping[str, str],
    overrides: Mapping[str, str] = _NOTHING,
    *,
    file: Path | None = None,
) -> Resolved:
    """Options from everything that can set them: `examine`, for those who cannot go on with a problem.

    Raises:
        ConfigError: every problem of every source at once.
    """
    resolved, problems = examine(properties, model_dir, environ, overrides, file=file)
    if problems:
        raise ConfigError.collect(problems)
    return resolved


def examine(
    properties: Mapping[str, Any] | None,
    model_dir: Path | None,
    environ: Mapping[str, str],
    overrides: Mapping[str, str] = _NOTHING,
    *,
    file: Path | None = None,
    overrides_from: str = sources.COMMAND_LINE,
) -> tuple[Resolved, list[ConfigError]]:
    """Options from everything that can set them, and every problem; what is not valid is left at its default.

    The earlier of these wins: `overrides` (of the command line, or `overrides_from`), `properties` (what DJL Serving
    passes, None outside it), SageMaker's variables, `option.*` in `serving.properties` of `model_dir` (or in `file`, if
    given), the variables that name a model of the hub, `OPTION_*`, DJL's arguments in file and environment, fallbacks
    such as `TENSOR_PARALLEL_DEGREE`. Empty values count as not given.
    """
    if model_dir is None and properties and properties.get("model_dir"):
        model_dir = Path(str(properties["model_dir"]))
    reading = _Reading(ignored={}, problems=[])
    strongest = sources.from_overrides(overrides, overrides_from)
    written = _written(properties, model_dir, environ, strongest, file, reading)
    passed = sources.from_djl(properties or {}, written)
    reading.all_cores = any(
        NAMES.get(setting.name) == "tensor_parallel_degree" and str(setting.value).lower() == "max"
        for setting in written
    )
    for setting in [*_folder(model_dir), *_stripped(passed), *written]:
        reading.read(setting)
    options = _validate(reading, model_dir or (file.parent if file else Path()))
    origins = {name: entry.origin for name, (entry, _) in reading.chosen.items()}
    if properties is None:
        about_djl = [*djl_serving.ahead(written, options, model_dir, environ)]
        if djl_serving.collects(written, options):
            options = options.model_copy(update={"rolling_batch": "disable"})
            origins["rolling_batch"] = sources.DJL
    else:
        about_djl = [*djl_serving.inside(properties, written, options)]
    told = set(reading.suspicious)
    if any("entryPoint" in finding.names for finding in about_djl):
        told.add("entryPoint")
    resolved = Resolved(
        options,
        MappingProxyType(
            {name: origin for name, origin in origins.items() if name not in reading.refused}
        ),
        MappingProxyType({k: reason for k, reason in reading.ignored.items() if k not in told}),
        MappingProxyType(reading.suspicious),
        refused=MappingProxyType(reading.refused),
    )
    found = [*about_djl, *conflicts(options), *strictness.idle(options), *reading.notes]
    resolved, conflicting = _judged(resolved, found)
    return resolved, reading.problems + conflicting


def complete(
    resolved: Resolved,
    model_config: Mapping[str, Any],
    device: DeviceInfo,
    loader: str,
    checkpoint_dtype: str | None = None,
    *,
    draft: ModelFacts | None = None,
) -> Resolved:
    """The options filled in and judged: `assess`, for those who cannot go on with a problem.

    Raises:
        ConfigError: every option that does not suit the model or the machine.
    """
    resolved, problems = assess(
        resolved, model_config, device, loader, checkpoint_dtype, draft=draft
    )
    if problems:
        raise ConfigError.collect(problems)
    return resolved


def assess(
    resolved: Resolved,
    model_config: Mapping[str, Any],
    device: DeviceInfo,
    loader: str,
    checkpoint_dtype: str | None = None,
    *,
    draft: ModelFacts | None = None,
) -> tuple[Resolved, list[ConfigError]]:
    """The same options with every value that follows from the model and the machine filled in, and every problem.

    `model_config` is the content of the model's `config.json`, `loader` the answer of `choose_loader`,
    `checkpoint_dtype` torch's word for what the weight files hold, if they tell, `draft` the facts of the
    draft model, if they are known.
    """
    facts = ModelFacts.from_config(model_config, checkpoint_dtype)
    filled = defaults.fill(resolved.options, facts, device, loader, draft=draft)
    options = resolved.options.model_copy(
        update={name: value for name, (value, _) in filled.items()}
    )
    origins = {
        **resolved.origins,
        **{name: f"{_DEFAULT}: {why}" for name, (_, why) in filled.items()},
    }
    resolved = replace(resolved, options=options, origins=MappingProxyType(origins))
    minutes = plan.compile_minutes(facts, len([*plan.graphs(options, facts, loader)]))
    found = suitability.findings(
        options,
        facts,
        device,
        loader,
        draft=draft,
        estimated_load_s=60 * minutes or None,
        filled=filled,
    )
    return _judged(resolved, found)


def _judged(
    resolved: Resolved, found: Iterator[Finding] | Sequence[Finding]
) -> tuple[Resolved, list[ConfigError]]:
    """The findings that only warn or note, added to those of `resolved`, and the others as errors."""
    findings = list(found)
    errors: list[ConfigError] = [
        IncompatibleOptionsError(resolved.describe(finding))
        for finding in findings
        if finding.level == "error"
    ]
    milder = tuple(finding for finding in findings if finding.level != "error")
    severe = tuple(finding for finding in findings if finding.level == "error")
    resolved = replace(
        resolved,
        findings=resolved.findings + milder,
        conflicts=resolved.conflicts + severe,
    )
    return resolved, errors


def _written(
    properties: Mapping[str, Any] | None,
    model_dir: Path | None,
    environ: Mapping[str, str],
    strongest: list[Setting],
    file: Path | None,
    reading: _Reading,
) -> list[Setting]:
    """Every setting that a user wrote and that says something, highest precedence first."""
    in_file = _from_file(model_dir, file, reading)
    options = [setting for setting in in_file if setting.by_user]
    arguments = [setting for setting in in_file if not setting.by_user]
    stronger = [*strongest, *sources.from_sagemaker(environ), *options]
    hub: list[Setting] = []
    silent: dict[str, str] = {}
    if djl_serving.wrote(in_file, environ):
        stronger = [*stronger[: -len(options)], *djl_serving.retold(options)]
    else:
        hub, silent = sources.from_hub(
            environ, model_dir, [*_stripped(stronger)], in_djl=properties is not None
        )
    reading.ignored.update(silent)
    variables = sources.from_environ(environ)
    named = [*stronger, *hub, *(setting for setting in variables if setting.by_user)]
    if properties is None:
        environ = sources.with_env_option(environ, named)
    return [
        *_stripped(
            [
                *named,
                *arguments,
                *(setting for setting in variables if not setting.by_user),
                *sources.from_fallbacks(environ),
            ]
        )
    ]


def _from_file(model_dir: Path | None, file: Path | None, reading: _Reading) -> list[Setting]:
    try:
        if file is not None:
            return sources.from_properties(file)
        return [] if model_dir is None else sources.from_file(model_dir)
    except ConfigError as error:
        reading.problems.append(error)
        return []


def _folder(model_dir: Path | None) -> list[Setting]:
    if model_dir is None:
        return []
    return [Setting("model_dir", model_dir, "the model folder", "argument", by_user=False)]


def _stripped(settings: Sequence[Setting]) -> Iterator[Setting]:
    """Without blanks around the values, which Java keeps; those that say nothing left out."""
    for setting in settings:
        value = setting.value.strip() if isinstance(setting.value, str) else setting.value
        if value is not None and value != "":
            yield replace(setting, value=value)


def _validate(reading: _Reading, folder: Path) -> ServingOptions:
    """The options; one that is not valid becomes a problem and is left at its default. Files lie in `folder`."""
    values: dict[str, object] = {}
    wrong: dict[str, str] = {}
    for name, (_, value) in reading.chosen.items():
        values[name], obstacle = (
            sources.content(value, folder) if option(name).file else (value, "")
        )
        if obstacle:
            wrong[name] = f"; {obstacle}"
            del values[name]
    try:
        options = ServingOptions.model_validate(values)
    except ValidationError as error:
        invalid = strictness.reasons(error)
        wrong.update(invalid)
        options = ServingOptions.model_validate(
            {name: value for name, value in values.items() if name not in invalid}
        )
    for name, why in wrong.items():
        setting = reading.chosen[name][0]
        reading.problems.append(strictness.invalid(setting, allowed_values(name) + why))
        value = strictness.shown(setting.value)
        reading.refused[name] = f"{value!r} ({setting.origin}) is not allowed"
    return options
