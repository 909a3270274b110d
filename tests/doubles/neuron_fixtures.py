"""The machine of `neuron_machine` for a test, and what it is served with: a plugin."""

from __future__ import annotations

import os
import sys

import pytest

from djl_python_neuronx import backends
from tests.doubles.neuron_machine import FOLDER, Machine, place_backend


@pytest.fixture
def machine(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, f"{backends.__name__}.tnx", raising=False)
    monkeypatch.delattr(backends, "tnx", raising=False)
    monkeypatch.setattr(backends, "__path__", list(backends.__path__))
    monkeypatch.setattr(sys, "path", list(sys.path))
    place_backend()
    for name in [name for name in os.environ if name.startswith(("NEURON_", "OPTION_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{FOLDER / 'bin'}:{os.environ['PATH']}")
    yield Machine(tmp_path, monkeypatch)
    sys.modules.pop(f"{backends.__name__}.tnx", None)


@pytest.fixture
def options(tmp_path):
    """The double's options."""
    (tmp_path / "cache").mkdir()
    return {
        "model_loader": "tnx",
        "tensor_parallel_degree": "1",
        "n_positions": "128",
        "context_length_estimate": "64,128",
        "max_rolling_batch_size": "2",
        "compiled_graph_path": str(tmp_path / "cache"),
        "skip_warmup": "true",
    }
