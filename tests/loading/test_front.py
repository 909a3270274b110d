"""The process in front of the engine's imports neither torch nor a Neuron library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["tests.neuron_fixtures"]

ROOT = Path(__file__).parents[2]
FRONT = """
import json, os, sys
from tests import neuron_machine
options = json.loads(sys.argv[1])
if options["model_loader"] == "tnx":
    neuron_machine.place_backend()
from djl_python_neuronx import service
from djl_python_neuronx.loading.prepare import prepare_or_raise
from djl_python_neuronx.loading.compiled import obtain
heavy = {"torch", "torch_neuronx", "torch_xla", "transformers_neuronx", "libneuronxla", "jax", "tensorflow"}
prepared = prepare_or_raise(None, neuron_machine.TINY, environ=dict(os.environ), overrides=options)
tokenizer = prepared.load_tokenizer(needs_torch=False)
obtain(prepared, lambda: tokenizer)
ids = tokenizer.encode_chat([{"role": "user", "content": "to be or not"}])
assert "to be or not" in tokenizer.decode(ids)
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
import torch  # the interpreter itself still finds it
"""


@pytest.mark.parametrize("backend", ["cpu", "tnx"])
def test_the_front_imports_no_torch(machine, options, backend):
    pytest.importorskip("torch", reason="torch is not installed")
    given = options if backend == "tnx" else {"model_loader": backend}
    ran = subprocess.run(
        [sys.executable, "-c", FRONT, json.dumps(given)],
        cwd=ROOT, env=machine.environ, stderr=subprocess.PIPE, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "PyTorch was not found" not in ran.stderr


SERVED = """
import sys
from tests.neuron_machine import TINY
from djl_python_neuronx.service import Service
options = {"model_loader": "cpu", "n_positions": "64", "engine_process": sys.argv[1]}
Service.load(None, TINY, overrides=options).close()
print("torch" in sys.modules)
"""


@pytest.mark.parametrize(("engine_process", "has_torch"), [("true", "False"), ("false", "True")])
def test_the_process_that_runs_the_model_has_torch(machine, engine_process, has_torch):
    pytest.importorskip("torch", reason="torch is not installed")
    ran = subprocess.run(
        [sys.executable, "-c", SERVED, engine_process],
        cwd=ROOT, env=machine.environ, stdout=subprocess.PIPE, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert ran.stdout.split() == [has_torch]
