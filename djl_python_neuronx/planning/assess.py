"""Settings judged by the rules, first alone, then with the model and the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from djl_python_neuronx.config import sources
from djl_python_neuronx.config.resolve import Resolved, judge, read_settings
from djl_python_neuronx.errors import ConfigError
from djl_python_neuronx.planning import defaults, model_rules, plan
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.rules import conflicts

_NOTHING: Mapping[str, str] = MappingProxyType({})
_DEFAULT = "default"


def examine(
    properties: Mapping[str, Any] | None,
    model_dir: Path | None,
    environ: Mapping[str, str],
    overrides: Mapping[str, str] = _NOTHING,
    *,
    file: Path | None = None,
    overrides_from: str = sources.COMMAND_LINE,
) -> tuple[Resolved, list[ConfigError]]:
    """Options from every source and every problem: `config.resolve.read_settings`, then the rules across options."""
    resolved, problems = read_settings(
        properties, model_dir, environ, overrides, file=file, overrides_from=overrides_from
    )
    resolved, conflicting = judge(resolved, conflicts(resolved.options))
    return resolved, problems + conflicting


def assess(resolved: Resolved, case: Case) -> tuple[Resolved, Case, list[ConfigError]]:
    """Settings and case with every option filled in that follows from the model and the machine, and all errors.

    `case.options` are those of `resolved`, before they are filled in.
    """
    filled = defaults.fill(case)
    case = replace(
        case.with_options(**{name: value for name, (value, _) in filled.items()}), filled=(*filled,)
    )
    origins = {
        **resolved.origins,
        **{name: f"{_DEFAULT}: {why}" for name, (_, why) in filled.items()},
    }
    resolved = replace(resolved, options=case.options, origins=MappingProxyType(origins))
    minutes = plan.compile_minutes(plan.graphs(case), case.model, case.draft)
    resolved, errors = judge(
        resolved, model_rules.findings(case, estimated_load_s=60 * minutes or None)
    )
    return resolved, case, errors
