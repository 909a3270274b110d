"""The report of a verification: values for JSON, Markdown, and a short verdict. No secrets, prompts, names or paths."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

from djl_python_neuronx.artifacts.artifact import CUT
from djl_python_neuronx.config.values import jsonable
from djl_python_neuronx.loading.own_model import code_facts
from djl_python_neuronx.loading.prepared import Prepared
from djl_python_neuronx.planning.plan import graph_options
from djl_python_neuronx.planning.sdks import machine_versions

_SEND = (
    "Please send this report, right or wrong: docs/hardware-reports.md of djl-python-neuronx has the way. It has no "
    "secrets, prompts, names of models or paths."
)
_MODEL = (
    *("model_type", "num_parameters", "num_layers", "hidden_size", "num_heads", "num_kv_heads"),
    *("head_dim", "vocab_size", "num_experts", "sliding_window", "dtype"),
)
_OPTIONS = ("dtype", "n_positions", "max_rolling_batch_size", "context_length_estimate")


def make_report(
    prepared: Prepared, outcome: Mapping[str, Any], layers: int | None, total: int | None
) -> dict[str, Any]:
    """Return the report as JSON values, under the keys that docs/verify.md lists.

    `outcome`: see `judge`. `layers`: the number of first layers that were verified of `total`; None: all.
    """
    case, machine, memory = prepared.case, prepared.machine, prepared.planned.memory
    values = prepared.options.model_dump(mode="json", include={*_OPTIONS})
    values |= graph_options(prepared.options, prepared.backend) | code_facts(case.code)
    weights = "cut" if prepared.weights and prepared.weights.kind in CUT else "whole"
    compared = f"all layers, {weights} weights"
    if layers is not None:
        compared = f"the first {layers} of {total} layers alone"
    cores = prepared.need.cores
    device = f"{cores} NeuronCore{'s' * (cores > 1)} of {machine.instance_type or 'this machine'}"
    report = {
        "verdict": "wrong" if outcome["findings"] else "right",
        "compared": f"{compared}, by {prepared.backend} on {'the CPU, no chip' if case.on_cpu else device}",
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "send": _SEND,
        **outcome,
        "model": {name: getattr(case.model, name) for name in _MODEL},
        # A value with a slash may be a path or a private name.
        "options": {name: value for name, value in values.items() if "/" not in json.dumps(value)},
        "machine": {
            "instance_type": machine.instance_type,
            "backend": prepared.backend,
            "cores": prepared.need.cores,
            "cpus": machine.cpus,
        },
        "versions": machine_versions(),
    }
    if memory and machine.core_bytes_per_s and not case.on_cpu:
        report["least_decode_ms"] = 1000 * memory.read / machine.core_bytes_per_s
    return {name: jsonable(value) for name, value in report.items()}


def summary(report: Mapping[str, Any]) -> str:
    """Return the verdict in a few lines."""
    outputs = sum(graph["outputs"] for graph in report["graphs"])
    draws, graphs = len(report["draws"]), len(report["graphs"])
    lines = [
        f"{report['verdict']}: {outputs} outputs of {graphs} graphs and {draws} distributions against transformers "
        f"on the CPU, {report['compared']}",
        *(f"- {finding['place']}: {finding['problem']}" for finding in report["findings"]),
        *(f"not compared: {reason}" for reason in report["left_out"]),
        report["send"],
    ]
    return "\n".join(lines) + "\n"


def markdown(report: Mapping[str, Any]) -> str:
    """Return the report as a page: a line for each value, a table for each group of values."""
    lines = ["# djl-neuronx verify", ""]
    for name, value in report.items():
        if isinstance(value, (dict, list)):
            lines += _table(name, value)
    plain = {name: value for name, value in report.items() if not isinstance(value, (dict, list))}
    lines[2:2] = [f"- {name}: {_cell(value)}" for name, value in plain.items()]
    return "\n".join(lines) + "\n"


def _table(title: str, group: Mapping[str, Any] | list[Any]) -> Iterator[str]:
    """Yield a section, if there are rows."""
    if not group:
        return
    if isinstance(group, dict):
        group = [{"name": name, "value": value} for name, value in group.items()]
    rows = [one if isinstance(one, dict) else {"what": one} for one in group]
    yield from ("", f"## {title}", "", f"| {' | '.join(rows[0])} |", f"|{' --- |' * len(rows[0])}")
    yield from (f"| {' | '.join(map(_cell, row.values()))} |" for row in rows)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return value if isinstance(value, str) else json.dumps(value)
