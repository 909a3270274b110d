"""The cores of a process on transformers-neuronx, each time in a process that has no runtime yet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the tnx backend needs torch")

from tests.backends.tnx_plans import CACHE
from tests.doubles.tiny_models import save_tiny_model

pytestmark = pytest.mark.tnx

ROOT = Path(__file__).parents[2]
START = """
import os, sys
from pathlib import Path
from djl_python_neuronx import backends
from djl_python_neuronx.backends import env
from djl_python_neuronx.planning.arguments import LibraryArguments
from djl_python_neuronx.errors import ServingError
from tests.backends.tnx_engine import reference
from tests.backends.tnx_plans import tnx_plan
from tests.doubles.device_driver import Driver, assert_same
from tests.doubles.tiny_models import load_reference

FOLDER = Path(sys.argv[1])
os.environ.pop("NEURON_RT_NUM_CORES")  # tnx_plans gives its tests 8

def load(tp):
    return backends.get("tnx").load(tnx_plan(FOLDER, tp=tp))

def check(backend):
    wanted = reference(load_reference(FOLDER), [5, 7, 11], 6)
    assert_same(Driver(backend).alone([5, 7, 11], 6, slot=1), wanted)
"""


def run(folder: Path, script: str, **variables: str) -> str:
    save_tiny_model("llama", folder)
    limits = ("NEURON_RT_NUM_CORES", "NEURON_RT_VISIBLE_CORES", "NEURON_LOCAL_TP", "NEURON_RANK_ID")
    environ = {name: value for name, value in os.environ.items() if name not in limits}
    ran = subprocess.run(
        [sys.executable, "-c", START + script, str(folder)],
        env={**environ, "NEURON_COMPILE_CACHE_URL": CACHE, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout.splitlines()[-1]


def test_a_larger_model_after_a_smaller_one_is_refused_with_both_numbers(tmp_path: Path) -> None:
    said = run(
        tmp_path,
        """
small = load(2)
try:
    load(4)
except ServingError as error:
    print(type(error).__name__, error)
check(small)
check(load(1))
""",
    )
    assert said.startswith("BackendUnavailableError 4 NeuronCores are needed")
    assert "started with NEURON_RT_NUM_CORES=2" in said


def test_models_of_different_degrees_share_the_cores_of_the_largest(tmp_path: Path) -> None:
    said = run(
        tmp_path,
        """
with env.applied(LibraryArguments(), 4):
    both = load(2), load(4)
for backend in (*both, both[0]):
    check(backend)
print(os.environ.get("NEURON_RT_NUM_CORES"))
""",
    )
    assert said == "None"


def test_fewer_visible_cores_than_the_degree_are_refused_before_the_runtime_is(
    tmp_path: Path,
) -> None:
    said = run(
        tmp_path,
        """
try:
    load(4)
except ServingError as error:
    print(type(error).__name__, error)
check(load(2))
""",
        NEURON_RT_VISIBLE_CORES="3,6",
    )
    assert said.startswith("BackendUnavailableError 4 NeuronCores are needed")
    assert "NEURON_RT_VISIBLE_CORES=3,6 gives this process 2" in said


def test_a_part_of_a_model_on_several_machines_is_refused(tmp_path: Path) -> None:
    said = run(
        tmp_path,
        """
try:
    load(4)
except ServingError as error:
    print(type(error).__name__, error)
""",
        NEURON_LOCAL_TP="2",
        NEURON_RANK_ID="1",
    )
    assert said.startswith("IncompatibleOptionsError NEURON_LOCAL_TP=2 and NEURON_RANK_ID=1")
