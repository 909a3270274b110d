"""Calls of `check` on folders without weights, and its printed report."""

import io
import json
from pathlib import Path

from djl_python_neuronx.loading.check import Placement, check
from djl_python_neuronx.loading.report import render
from djl_python_neuronx.planning import machines
from djl_python_neuronx.planning.machines import DeviceInfo

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny-llama"
LAPTOP = DeviceInfo(None, 0, 0, 64 * 2**30, 8, "a laptop")


def folder(path, text="", config=None):
    """A model folder without weights."""
    config = json.loads((TINY / "config.json").read_text()) if config is None else config
    (path / "config.json").write_text(json.dumps(config))
    if text:
        (path / "serving.properties").write_text(text)
    return str(path)


def run(target, environ=None, machine=None, **options):
    machine = machines.named(machine) if isinstance(machine, str) else machine
    return check(str(target), environ=environ or {}, overrides=options, machine=machine)


def printed(report, **kwargs):
    stream = io.StringIO()
    render(Placement((report,), report.findings, ()), stream, **kwargs)
    return stream.getvalue()


INF2 = machines.named("inf2.xlarge")
