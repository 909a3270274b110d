"""From sources to validated, frozen options that know where each value came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from djl_python_neuronx.config import djl_serving, sources, strictness
from djl_python_neuronx.config.findings import Finding
from djl_python_neuronx.config.options import NAMES, SECTIONS, ServingOptions
from djl_python_neuronx.config.reading import Reading, stripped, validated, written_settings
from djl_python_neuronx.config.sources import Setting
from djl_python_neuronx.config.values import shown
from djl_python_neuronx.errors import ConfigError, IncompatibleOptionsError

_DEFAULT = "default"
_NOTHING: Mapping[str, str] = MappingProxyType({})
_NO_VARIABLES: Mapping[str, Setting] = MappingProxyType({})


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
    worker_variables: Mapping[str, Setting] = field(
        default_factory=lambda: _NO_VARIABLES, repr=False
    )
    """Variables that DJL Serving is going to give its Python process, because `option.env` names them; they can be
    secrets."""

    def explain(self) -> list[tuple[str, object, str]]:
        """Name, value and origin of every option, in the order of the documentation."""
        return [
            (
                name,
                getattr(self.options, name),
                "; ".join(filter(None, (self.origins.get(name, _DEFAULT), self.refused.get(name)))),
            )
            for names in SECTIONS.values()
            for name in names
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


def read_settings(
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
    reading = Reading(ignored={}, problems=[])
    strongest = sources.from_overrides(overrides, overrides_from)
    written = written_settings(properties, model_dir, environ, strongest, file, reading)
    passed = sources.from_djl(properties or {}, written)
    reading.all_cores = any(
        NAMES.get(setting.name) == "tensor_parallel_degree" and str(setting.value).lower() == "max"
        for setting in written
    )
    for setting in [*sources.from_folder(model_dir), *stripped(passed), *written]:
        reading.read(setting)
    options = validated(reading, model_dir or (file.parent if file else Path()))
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
        worker_variables=MappingProxyType(reading.worker_variables),
    )
    found = [*about_djl, *strictness.idle(options), *reading.notes]
    resolved, conflicting = judge(resolved, found)
    return resolved, reading.problems + conflicting


def judge(resolved: Resolved, found: Iterable[Finding]) -> tuple[Resolved, list[ConfigError]]:
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
