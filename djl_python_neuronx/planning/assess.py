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
from djl_python_neuronx.planning import defaults, plan, suitability
from djl_python_neuronx.planning.device import DeviceInfo
from djl_python_neuronx.planning.model import ModelFacts
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
    minutes = plan.compile_minutes(plan.graphs(options, facts, loader), facts, draft)
    found = suitability.findings(
        options,
        facts,
        device,
        loader,
        draft=draft,
        estimated_load_s=60 * minutes or None,
        filled=filled,
    )
    return judge(resolved, found)
