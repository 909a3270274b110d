"""The settings of all sources, read in order of precedence, to one valid value for each option."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from djl_python_neuronx.config import djl_serving, sources, strictness
from djl_python_neuronx.config.findings import Finding
from djl_python_neuronx.config.legacy import TRANSLATED
from djl_python_neuronx.config.options import NAMES, ServingOptions, allowed_values, option
from djl_python_neuronx.config.sources import Setting
from djl_python_neuronx.config.values import truth
from djl_python_neuronx.errors import ConfigError, InvalidOptionError


@dataclass
class Reading:
    """What becomes of the settings while they are read, highest precedence first."""

    ignored: dict[str, str]
    problems: list[ConfigError]
    suspicious: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Option to its value that is not allowed."""
    chosen: dict[str, tuple[Setting, object]] = field(default_factory=dict)
    """Option to the setting that counts, and to the value that it stands for."""
    notes: list[Finding] = field(default_factory=list)
    worker_variables: dict[str, Setting] = field(default_factory=dict)
    """What `option.env` is going to set, outside DJL Serving."""
    all_cores: bool = False
    """The user wrote `max` for the tensor parallel degree."""
    _negatives: dict[str, Setting] = field(default_factory=dict)
    """Option to the first of its old names that was set to false."""
    _firsts: dict[tuple[str, str], tuple[Setting, object]] = field(default_factory=dict)

    def read(self, setting: Setting) -> None:
        """Take one setting in, weaker than those before it."""
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


def written_settings(
    properties: Mapping[str, Any] | None,
    model_dir: Path | None,
    environ: Mapping[str, str],
    strongest: list[Setting],
    file: Path | None,
    reading: Reading,
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
            environ, model_dir, [*stripped(stronger)], in_djl=properties is not None
        )
    reading.ignored.update(silent)
    variables = sources.from_environ(environ)
    named = [*stronger, *hub, *(setting for setting in variables if setting.by_user)]
    if properties is None:
        reading.worker_variables = sources.worker_variables(named)
        environ = sources.with_worker_variables(environ, reading.worker_variables)
    return [
        *stripped(
            [
                *named,
                *arguments,
                *(setting for setting in variables if not setting.by_user),
                *sources.from_fallbacks(environ),
            ]
        )
    ]


def _from_file(model_dir: Path | None, file: Path | None, reading: Reading) -> list[Setting]:
    try:
        if file is not None:
            return sources.from_properties(file)
        return [] if model_dir is None else sources.from_file(model_dir)
    except ConfigError as error:
        reading.problems.append(error)
        return []


def stripped(settings: Sequence[Setting]) -> Iterator[Setting]:
    """Without blanks around the values, which Java keeps; those that say nothing left out."""
    for setting in settings:
        value = setting.value.strip() if isinstance(setting.value, str) else setting.value
        if value is not None and value != "":
            yield replace(setting, value=value)


def validated(reading: Reading, folder: Path) -> ServingOptions:
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
