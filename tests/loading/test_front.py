"""The process in front of the engine's imports neither torch nor a Neuron library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doubles.neuron_machine import TINY

pytest_plugins = ["tests.doubles.neuron_fixtures"]

ROOT = Path(__file__).parents[2]
FRONT = """
import importlib.util, json, os, sys
from tests.doubles import neuron_machine
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
assert importlib.util.find_spec("torch")  # the interpreter itself still finds it
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
from pathlib import Path
from djl_python_neuronx.service import Service
options = {"model_loader": "cpu", "n_positions": "64", "engine_process": sys.argv[1]}
service = Service.load(None, Path(sys.argv[2]), overrides=options)
print("torch" in sys.modules)
try:
    print(service.parse(b'{"question": "1 2 3"}').request.prompt_ids == service.tokenizer.encode("1 2 3"))
except ValueError as error:
    print("expected inputs" if "question" in str(error) else error)
service.close()
"""


QUESTION = """
from djl_python.input_parser import input_formatter
@input_formatter
def read(payload, tokenizer=None):
    return {"inputs": payload["question"]}
"""


@pytest.mark.parametrize(
    ("engine_process", "has_torch", "trusts", "parsed"),
    [("true", "False", "true", "True"), ("false", "True", "false", "expected inputs")],
)
def test_the_process_that_runs_the_model_has_torch(
    machine, tmp_path, engine_process, has_torch, trusts, parsed
):
    """The front has the functions of `model.py`, if the folder's code is trusted."""
    pytest.importorskip("torch", reason="torch is not installed")
    (tmp_path / "model.py").write_text(QUESTION)
    settings = f"option.model_id={TINY}\noption.trust_remote_code={trusts}\n"
    (tmp_path / "serving.properties").write_text(settings)
    ran = subprocess.run(
        [sys.executable, "-c", SERVED, engine_process, tmp_path],
        cwd=ROOT, env=machine.environ, stdout=subprocess.PIPE, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert ran.stdout.splitlines() == [has_torch, parsed]
