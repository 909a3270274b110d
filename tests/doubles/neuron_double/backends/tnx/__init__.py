"""A backend that compiles: one file per graph, each told in a log. Its device is the simulated one, without torch.

Variables: `TOYC_LOG` names the log, `TOYC_VERSION` the compiler's version, `TOYC_STOP_AT` the graph whose compile
hangs, `TOYC_FAIL` and `TOYC_UNCOMPILABLE` what is wrong, `TOYC_RUN` the program that compiles. With `CORE` it takes the
core of `core_driver` to compile and to load, as the library does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from djl_python_neuronx.artifacts.atomic import whole_file
from djl_python_neuronx.backends import sim
from djl_python_neuronx.backends.neuron import translated
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.errors import CompileError
from tests.doubles.core_driver.usercustomize import take


def compiler_version():
    return os.environ.get("TOYC_VERSION", "1.0")


def uncompilable(config):
    return os.environ.get("TOYC_UNCOMPILABLE")


def compile(plan: LoadPlan, target: Path) -> None:
    for name in _graphs(plan):
        if (target / name).exists():
            continue
        with Path(os.environ["TOYC_LOG"]).open("a") as log:
            log.write(f"{name} {os.getpid()}\n")
        if program := os.environ.get("TOYC_RUN"):
            with translated(plan):
                _run_compiler(program)
        if os.environ.get("TOYC_FAIL"):
            raise CompileError(os.environ["TOYC_FAIL"])
        if name == os.environ.get("TOYC_STOP_AT"):
            time.sleep(60)
        with whole_file(target / name) as temporary:
            temporary.write_text(repr((plan.num_slots, plan.tensor_parallel_degree)))
    _start(plan)
    if plan.presharded:
        assert plan.arguments.neuron_config["on_device_embedding"]
        _cut(plan, target)


def _run_compiler(program: str) -> None:
    """Run it as libneuronxla does, whose error has what the compiler has written."""
    command = ["neuronx-cc", "-c", program]
    ran = subprocess.run(
        command, executable=sys.executable, capture_output=True, text=True, check=False
    )
    if ran.returncode > 0:
        raise RuntimeError(f"Failed compilation with ['neuronx-cc', 'compile']: {ran.stderr}")
    ran.check_returncode()


def _cut(plan: LoadPlan, target: Path) -> None:
    """Rewrite the graphs in place, as the library does, and write shards with the library's names."""
    for name in _graphs(plan):
        with (target / name).open("r+") as graph:
            text = graph.read()
            graph.seek(0)
            graph.write(text + "\n")
    config = json.loads((plan.model_dir / "config.json").read_text())
    layers = (f"decoder_layer_{i}" for i in range(config["num_hidden_layers"]))
    shards = {
        f"weight*{core}": np.ones(2, np.float32) for core in range(plan.tensor_parallel_degree)
    }
    for name in ("DecoderLMHead", *layers):
        save_file(shards, target / f"{name}.safetensors")
    cut = {**config, "is_presharded_checkpoint": True}
    (target / "config.json").write_text(json.dumps(cut))


def _start(plan: LoadPlan) -> None:
    if "CORE" in os.environ:
        with translated(plan):
            take()


def load(plan: LoadPlan, compiled: Path | None = None):
    _start(plan)
    if uncompilable({}):
        assert compiled is None
        return sim.load(plan)
    assert compiled is not None
    for name in _graphs(plan):
        assert (compiled / name).read_text().strip() == repr(
            (plan.num_slots, plan.tensor_parallel_degree)
        )
    return sim.load(plan)


def _graphs(plan):
    yield from (f"prefill-{length}.neff" for length in plan.prefill_buckets)
    yield from (f"decode-{length}.neff" for length in plan.token_buckets)
