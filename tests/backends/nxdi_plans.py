"""Plans for NxD Inference, whole starts in this process, and the tiny models that it can load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the nxdi backend needs torch")
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType

import pytest

from djl_python_neuronx import backends
from djl_python_neuronx.backends import LoadPlan
from djl_python_neuronx.backends.base import Backend
from djl_python_neuronx.loading import compiled as graphs
from djl_python_neuronx.loading.compiled import Compiled, obtain
from djl_python_neuronx.loading.prepare import prepare_or_raise
from djl_python_neuronx.planning.machines import named
from tests.backends.tnx_plans import library_plan
from tests.doubles.tiny_models import save_tiny_model
from tests.doubles.toy_tokenizer import TOKENIZER

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama": ("llama", {}),
        "llama-mha": ("llama", {"num_key_value_heads": 4}),
        "llama3-rope": ("llama", {"rope_scaling": _LLAMA3}),
        "mistral": ("mistral", {"sliding_window": None}),
        "mistral-window": ("mistral", {"sliding_window": 7}),
        "mixtral": ("mixtral", {}),
        "qwen2": ("qwen2", {"use_sliding_window": False}),
        "qwen3": ("qwen3", {"head_dim": 8}),
    }
)
"""Name → model type and what differs from `tiny_models`."""


nxdi_plan = partial(library_plan, "nxdi")
"""The plan of a start, see `library_plan`."""


SETTINGS: Mapping[str, str] = {
    "model_loader": "nxdi",
    "dtype": "fp32",
    "tensor_parallel_degree": "1",
    "n_positions": "24,48",
    "context_length_estimate": "8,20",
    "max_rolling_batch_size": "4",
}


def save_variant(name: str, directory: Path, **settings: Any) -> Path:
    """Write the checkpoint of a variant; returns its directory. Every degree here divides its vocabulary."""
    model_type, own = VARIANTS[name]
    return save_tiny_model(model_type, directory, **{"vocab_size": 96, **own, **settings})


def environ_of(store: Path) -> dict[str, str]:
    """The variables of a start whose compiles and downloads are kept in a folder."""
    cache, downloads = str(store / "cache"), str(store / "downloads")
    return {**os.environ, "NEURON_COMPILE_CACHE_URL": cache, "DJL_CACHE_DIR": downloads}


def obtained(
    folder: Path,
    store: Path,
    *,
    here: bool = True,
    machine: str = "trn1.32xlarge",
    **settings: str,
) -> Compiled:
    """The plan and the graphs of a folder's model, as a start obtains them: options, planning, compile store.

    `here`: compile in this process, because another one would import the library again, for many seconds.
    """
    environ = environ_of(store)
    options = {**SETTINGS, **settings}
    prepared = prepare_or_raise(
        None, folder, environ=environ, overrides=options, machine=named(machine)
    )
    with pytest.MonkeyPatch.context() as patch:
        if here:
            patch.setattr(graphs, "compile_guarded", compile_here)
        return obtain(prepared, lambda: TOKENIZER)


def compile_here(backend: str, plan: LoadPlan, target: Path, **_: object) -> None:
    """Compile as `compile_guarded`, in this process."""
    compiler = backends.compiler(backend)
    assert compiler is not None
    compiler.compile(plan, target)


@contextmanager
def loaded(plan: LoadPlan, compiled: Path | None = None) -> Iterator[Backend]:
    """A loaded backend; the rig's processes end with it."""
    backend: Any = backends.get("nxdi").load(plan, compiled)
    ranks = backend._model.application.traced_model.nxd_model.ranks
    try:
        yield backend
    finally:
        backend.close()
        ranks.close()


def log_lines(path: Path, event: str) -> list[dict[str, Any]]:
    """The lines of the rig's log about an event."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if line["event"] == event]
