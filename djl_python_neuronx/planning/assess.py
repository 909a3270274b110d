"""Settings judged by the rules: first by themselves, then with the model and the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from djl_python_neuronx.config import sources
from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.config.resolve import Resolved, read_settings
from djl_python_neuronx.planning import defaults, model_rules, plan
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.rules import conflicts

_NOTHING: Mapping[str, str] = MappingProxyType({})
_DEFAULT = "default"


def examine(
    properties: Mapping[str, Any] | None,
    model_dir: Path | None,
    environ: Mapping[str, str],
    problems: Problems,
    overrides: Mapping[str, str] = _NOTHING,
    *,
    file: Path | None = None,
    overrides_from: str = sources.COMMAND_LINE,
) -> Resolved:
    """Read the options from every source (`config.resolve.read_settings`) and judge their combinations."""
    resolved = read_settings(
        properties,
        model_dir,
        environ,
        problems,
        overrides,
        file=file,
        overrides_from=overrides_from,
    )
    resolved.report(conflicts(resolved.options), problems)
    return resolved


def assess(resolved: Resolved, case: Case, problems: Problems) -> tuple[Resolved, Case]:
    """Fill in every option that follows from the model and the machine, and judge the result.

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
    found = model_rules.findings(case, estimated_load_s=60 * minutes or None)
    resolved.report(found, problems)
    return resolved, case
