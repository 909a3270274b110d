"""The markers: a test whose needs are not met is skipped, and says what is missing.

Hypothesis never judges speed here: how long an example takes says more about the machine. With
`--hypothesis-profile=repeatable`, as CI runs it, the examples are the same each time.
"""

import gc
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from djl_python_neuronx.engine import native, sampler
from djl_python_neuronx.planning import backend_choice, machines
from tests import effort
from tests.djl.java import missing_programs

pytest_plugins = ["tests.djl.start"]

# Models of tests are so small that several threads of torch only wait for each other, with all of a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("patient", **PATIENT)
settings.register_profile("repeatable", derandomize=True, **PATIENT)
settings.load_profile("patient")

NEEDS = {
    "tnx": (
        "transformers-neuronx",
        "transformers_neuronx",
        "transformers-neuronx on a machine with a Neuron device, or a checkout of it ($TNX_SRC) and its CPU rig, both "
        "on the path (PYTHONPATH=<rig>:$TNX_SRC/src)",
    ),
    "nxdi": (
        "neuronx-distributed-inference",
        "neuronx_distributed_inference.models.config",
        "NxD Inference on a machine with a Neuron device, or checkouts of it ($NXDI_SRC) and of neuronx-distributed "
        "($NXD_SRC) with its CPU rig, all on the path (PYTHONPATH=tests/rig_fixes:<rig>:$NXDI_SRC/src:$NXD_SRC/src)",
    ),
}
"""Backend → its package, a module that imports it with all that it needs, and what its tests need."""


@pytest.fixture(autouse=True)
def _logging_as_before():
    """Undo `telemetry.setup_logging`, so that `caplog` sees the records of later tests."""
    package = logging.getLogger("djl_python_neuronx")
    root, before = logging.getLogger(), (package.handlers, package.level, package.propagate)
    handlers = root.handlers
    yield
    package.handlers, package.level, package.propagate = before
    if root.handlers is not handlers:
        root.handlers = handlers
        logging.captureWarnings(False)


if os.environ.get("DJL_NEURONX_NATIVE") == "0":
    sampler.load = lambda _library: native.load(None)


def pytest_report_header():
    return f"sampler: {'numpy' if sampler.Sampler(1, 1)._kernel is None else 'compiled kernel'}"


def pytest_addoption(parser):
    parser.addoption("--nightly", action="store_true", help="run the tests marked nightly too")


def pytest_configure(config):
    effort.choose(nightly=config.getoption("--nightly"))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep modules and tests, a million objects that stay, out of garbage collections."""
    gc.disable()
    result = yield
    gc.enable()
    gc.freeze()
    return result


def _missing_library(backend):
    """Imported by a process of its own: the library's sources alone are found and do not import."""
    package, module, needs = NEEDS[backend]
    why = f"{package} is not installed"
    if backend_choice.libraries()[package].state == "installed":
        command = [sys.executable, "-c", f"import {module}"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        why = ran.stderr.strip().rpartition("\n")[2] if ran.returncode else None
    return why and f"needs {needs}; here: {why}"


def _missing(marker, config):
    """The reason that tests with this marker cannot run here; None if they can."""
    match marker:
        case "nightly":
            return None if config.getoption("--nightly") else "--nightly was not given"
        case "tnx" | "nxdi":
            return _missing_library(marker)
        case "neuron":
            found = machines.detect()
            return None if found.has_neuron else f"no Neuron device: {found.seen}"
        case "djl":
            # With CI=true the tests run, and their fixture fails with this reason.
            return None if os.environ.get("CI") == "true" else missing_programs()
        case "djl_src":
            source = os.environ.get("DJL_SRC")
            there = source is not None and Path(source).is_dir()
            return None if there else "DJL_SRC names no checkout of djl-serving"
    return None


def pytest_collection_modifyitems(config, items):
    reasons = {}
    for item in items:
        for marker in {mark.name for mark in item.iter_markers()}:
            if marker not in reasons:
                reasons[marker] = _missing(marker, config)
            if reasons[marker]:
                item.add_marker(pytest.mark.skip(reason=reasons[marker]))


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable():
    """Let workers of xdist send what is no UTF-8: some tests log such texts."""
    return _encodable((yield))


def _encodable(value):
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {key: _encodable(each) for key, each in value.items()}
        case list() | tuple():
            return type(value)(map(_encodable, value))
    return value
