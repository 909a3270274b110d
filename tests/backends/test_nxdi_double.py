"""The adapter of NxD Inference where the library is not: how it drives it, and that the stand-in is like it."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the nxdi backend needs torch")
pytest.importorskip("transformers", "4.57", reason="the nxdi backend needs transformers 4.57")

from djl_python_neuronx import backends
from djl_python_neuronx.backends.base import Want
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.warmup import warm_up
from djl_python_neuronx.errors import (
    ArtifactNotFoundError,
    BackendUnavailableError,
    DeviceMemoryError,
    IncompatibleOptionsError,
    StepError,
)
from djl_python_neuronx.types import GenerationRequest
from tests.backends import nxdi_double
from tests.backends.nxdi_plans import nxdi_plan
from tests.backends.test_tnx_double import assert_expected, folder_of


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return nxdi_double.install(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_text("")
    return folder_of(tmp_path, "llama")


WAYS: dict[str, dict[str, Any]] = {
    "continuous": {},
    "static": {"continuous": False},
    "few rows": {"token_generation_batches": [1, 2]},
    "one slot": {"num_slots": 1},
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", WAYS)
def test_any_traffic_gives_what_each_gets_alone(
    folder: Path, made: list[Any], name: str, seed: int
) -> None:
    backend = backends.get("nxdi").load(nxdi_plan(folder, **WAYS[name]))
    assert_expected(backend, seed)
    backend.close()


@pytest.mark.parametrize("name", WAYS)
def test_tokens_of_the_device_are_taken_as_they_are(
    folder: Path, made: list[Any], name: str
) -> None:
    generation = {"do_sample": True, "dynamic": True, "global_topk": 8}
    plan = nxdi_plan(folder, on_device_sampling_config=generation, **WAYS[name])
    backend = backends.get("nxdi").load(plan)
    assert (backend.spec.outputs, backend.spec.largest_top_k) == (Want.TOKENS, 8)
    assert_expected(backend, 1)


@pytest.mark.parametrize("name", WAYS)
def test_warm_up_runs_every_graph(folder: Path, made: list[Any], name: str) -> None:
    plan = nxdi_plan(folder, prefill_buckets=(8, 47), **WAYS[name])
    assert warm_up(Engine(backends.get("nxdi").load(plan))) == ()
    application = made[-1]
    assert not application.warmed
    assert {call[1] for call in application.calls} == set(range(len(application.graphs)))


def test_the_environment_is_left_as_it_was(folder: Path, made: list[Any]) -> None:
    before = dict(os.environ)
    backends.get("nxdi").load(nxdi_plan(folder))
    assert dict(os.environ) == before
