"""From sources to validated, frozen options that know where each value came from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from djl_python_neuronx.config import defaults, sources, strictness
from djl_python_neuronx.config.device import DeviceInfo
from djl_python_neuronx.config.options import NAMES, ServingOptions, allowed_values
from djl_python_neuronx.config.rules import Finding, conflicts
from djl_python_neuronx.config.sources import Setting
from djl_python_neuronx.errors import (
    ConfigError,
    IncompatibleOptionsError,
    InvalidOptionError,
)

_DEFAULT = "default"


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

    def explain(self) -> list[tuple[str, object, str]]:
        """Name, value and origin of every option, in the order of the documentation."""
        return [
            (name, getattr(self.options, name), self.origins.get(name, _DEFAULT))
            for name in ServingOptions.model_fields
        ]


def resolve(
    properties: Mapping[str, Any] | None,
    model_dir: Path | None,
    environ: Mapping[str, str],
    overrides: Mapping[str, str] = MappingProxyType({}),
) -> Resolved:
    """Options from everything that can set them; the earlier of these wins.

    `overrides` (command line), `properties` (what DJL Serving passes, None outside it), `serving.properties` in
    `model_dir`, `OPTION_*`, fallbacks such as `TENSOR_PARALLEL_DEGREE`. Empty values count as not given.

    Raises:
        ConfigError: every problem of every source at once.
    """
    if model_dir is None and properties and properties.get("model_dir"):
        model_dir = Path(str(properties["model_dir"]))
    ignored = sources.overruled(environ, model_dir, in_djl=properties is not None)
    gathered, problems = _gather(properties, model_dir, environ, overrides, ignored)
    chosen: dict[str, Setting] = {}
    firsts: dict[tuple[str, str], Setting] = {}
    suspicious: dict[str, str] = {}
    for setting in gathered:
        name = NAMES.get(setting.name)
        if name is None:
            problems += strictness.unknown(setting, ignored, suspicious)
        elif reason := strictness.passed_over(name, setting):
            ignored[setting.name] = reason
        else:
            chosen.setdefault(name, setting)
            first = firsts.setdefault((setting.source, name), setting)
            problems += strictness.misplaced(name, setting)
            problems += strictness.contradiction(first, setting)
    if "model_loading_timeout" in chosen:
        ignored["model_loading_timeout"] = "DJL Serving reads it itself"
    options = _validate(chosen, problems)
    origins = {name: setting.origin for name, setting in chosen.items()}
    problems += [_incompatible(conflict, options, origins) for conflict in conflicts(options)]
    if problems:
        raise ConfigError.collect(problems)
    ignored = {name: reason for name, reason in ignored.items() if name not in suspicious}
    return Resolved(
        options, MappingProxyType(origins), MappingProxyType(ignored), MappingProxyType(suspicious)
    )


def complete(
    resolved: Resolved,
    model_config: Mapping[str, Any],
    device: DeviceInfo,
    loader: str,
    checkpoint_dtype: str | None = None,
) -> Resolved:
    """The same options with every value that follows from the model and the machine filled in.

    `model_config` is the content of the model's `config.json`, `loader` the answer of `choose_loader`,
    `checkpoint_dtype` torch's word for what the weight files hold, if they tell.

    Raises:
        IncompatibleOptionsError: what the user set does not suit the model.
    """
    facts = defaults.ModelFacts.from_config(model_config, checkpoint_dtype)
    filled = defaults.fill(resolved.options, facts, device, loader)
    options = resolved.options.model_copy(
        update={name: value for name, (value, _) in filled.items()}
    )
    origins = {
        **resolved.origins,
        **{name: f"{_DEFAULT}: {why}" for name, (_, why) in filled.items()},
    }
    unsuited = defaults.unsuited(resolved.options, facts)
    if problems := [_incompatible(conflict, options, origins) for conflict in unsuited]:
        raise ConfigError.collect(problems)
    ignored = MappingProxyType({**resolved.ignored, **defaults.unused(options, loader)})
    return replace(resolved, options=options, origins=MappingProxyType(origins), ignored=ignored)


def _gather(
    properties: Mapping[str, Any] | None,
    model_dir: Path | None,
    environ: Mapping[str, str],
    overrides: Mapping[str, str],
    overruled: Collection[str],
) -> tuple[list[Setting], list[ConfigError]]:
    """Every setting that says something, highest precedence first; the variables in `overruled` say nothing."""
    problems: list[ConfigError] = []
    written: list[Setting] = []
    folder: list[Setting] = []
    if model_dir is not None:
        folder.append(
            Setting("model_dir", model_dir, "the model folder", "argument", by_user=False)
        )
        try:
            written += sources.from_file(model_dir)
        except ConfigError as error:
            problems.append(error)
    written += sources.from_environ(environ)
    settings = [
        *folder,
        *sources.from_overrides(overrides),
        *sources.from_djl(properties or {}, written),
        *written,
        *sources.from_fallbacks(
            {name: value for name, value in environ.items() if name not in overruled}
        ),
    ]
    return [stripped for setting in settings if (stripped := _stripped(setting))], problems


def _stripped(setting: Setting) -> Setting | None:
    """Without blanks around the value, which Java keeps; None if nothing is left."""
    if setting.value is None:
        return None
    if not isinstance(setting.value, str):
        return setting
    value = setting.value.strip()
    return replace(setting, value=value) if value else None


def _validate(chosen: Mapping[str, Setting], problems: list[ConfigError]) -> ServingOptions:
    """The options; one that is not valid is added to `problems` and left at its default."""
    values = {name: setting.value for name, setting in chosen.items()}
    try:
        return ServingOptions.model_validate(values)
    except ValidationError as error:
        wrong = {str(entry["loc"][0]) for entry in error.errors(include_url=False)}
    for name in sorted(wrong):
        setting = chosen[name]
        problems.append(
            InvalidOptionError(setting.name, setting.value, setting.origin, allowed_values(name))
        )
    return ServingOptions.model_validate({name: values[name] for name in values.keys() - wrong})


def _incompatible(
    conflict: Finding, options: ServingOptions, origins: Mapping[str, str]
) -> ConfigError:
    listed = " and ".join(
        f"{name}={getattr(options, name)} ({origins.get(name, _DEFAULT)})"
        for name in conflict.names
    )
    return IncompatibleOptionsError(f"{listed}: {conflict.problem}")
