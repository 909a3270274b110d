"""NxD Inference: which class and keywords it is given, and which files."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from djl_python_neuronx import backends
from djl_python_neuronx.backends import LoadPlan
from djl_python_neuronx.backends.nxdi import model
from djl_python_neuronx.errors import (
    ArtifactNotFoundError,
    BackendError,
    IncompatibleOptionsError,
)
from djl_python_neuronx.planning.arguments import LibraryArguments

LIBRARY = "neuronx_distributed_inference"


class Base:
    def __init__(self, **kwargs: Any) -> None:
        self.tp_degree = kwargs.pop("tp_degree", 1)
        self.seq_len = kwargs.pop(
            "seq_len",
            128,
        )
        if sampling := kwargs.pop("on_device_sampling_config", None):
            self.sampling = Sampling(**sampling)


class Special(Base):
    def __init__(self, glu_mlp: bool = True, **kwargs: Any) -> None:
        self.glu_mlp = glu_mlp
        super().__init__(**kwargs)


class Sampling:
    def __init__(self, **kwargs: Any) -> None:
        self.top_k = kwargs.pop("top_k", 1)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """`models.config` of a library."""
    config = types.ModuleType(f"{LIBRARY}.models.config")
    config.__dict__.update(OnDeviceSamplingConfig=Sampling, HybridShardingConfig=Sampling)
    for name in (LIBRARY, f"{LIBRARY}.models", f"{LIBRARY}.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, config.__name__, config)
    return config


MADE = types.SimpleNamespace(get_neuron_config_cls=lambda: Special)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"tp_degre": 2}, "tp_degre=2.*Special.*did you mean 'tp_degree'"),
        ({"kwargs": 1}, "kwargs=1"),
        (
            {"on_device_sampling_config": {"topk": 5}},
            "on_device_sampling_config.topk=5.*Sampling.*'top_k'",
        ),
    ],
)
@pytest.mark.usefixtures("library")
def test_a_keyword_that_the_library_would_drop_is_refused(
    keywords: dict[str, Any], words: str
) -> None:
    with pytest.raises(IncompatibleOptionsError, match=words):
        model._neuron_config(MADE, keywords)


@pytest.mark.usefixtures("library")
def test_a_class_gets_its_own_keywords_and_those_of_its_bases() -> None:
    given = {"glu_mlp": False, "tp_degree": 2, "seq_len": 64, "is_prefix_caching": False}
    with pytest.raises(IncompatibleOptionsError, match="is_prefix_caching"):
        model._neuron_config(MADE, given)
    del given["is_prefix_caching"]
    assert vars(model._neuron_config(MADE, given)) == given


def modules(monkeypatch: pytest.MonkeyPatch, **classes: dict[str, Any]) -> None:
    for path, content in classes.items():
        module = types.ModuleType(f"{LIBRARY}.{path.replace('__', '.')}")
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("library")
def test_a_class_is_taken_from_its_own_file_else_from_the_registry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {"models__llama__modeling_llama": {"NeuronLlamaForCausalLM": "llama's"}}
    modules(monkeypatch, **own)
    assert model.find_class("llama") == "llama's"
    registry = {"llama": {"causal-lm": "moved"}, "gemma3": {"causal-lm": "gemma's"}, "clip": {}}
    modules(
        monkeypatch,
        models__llama__modeling_llama={},
        utils__constants={"MODEL_TYPES": registry},
    )
    assert model.find_class("llama") == "moved"
    assert model.find_class("gemma3") == "gemma's"
    for name in ("clip", "gemma2"):
        with pytest.raises(BackendError, match=f"no class for model_type '{name}'.*gemma3, llama"):
            model.find_class(name)
    with pytest.raises(BackendError, match=r"'mistral'; the second release of 0.9 .SDK 2.29. is"):
        model.find_class("mistral")


@pytest.mark.parametrize("kind", ["tp", "pp", "ep"])
def test_graphs_or_weights_that_are_nowhere_are_an_error_before_the_library_is_touched(
    tmp_path: Path, kind: str
) -> None:
    checkpoint, compiled = tmp_path / "model", tmp_path / "compiled"
    (compiled / "weights").mkdir(parents=True)
    checkpoint.mkdir()
    degrees = LibraryArguments(neuron_config={f"{kind}_degree": 2})
    plan = LoadPlan(checkpoint, 1, 8, (8,), tensor_parallel_degree=2, arguments=degrees)
    load = backends.get("nxdi").load
    with pytest.raises(ArtifactNotFoundError, match=rf"no model.pt in {compiled}"):
        load(plan, compiled)
    (compiled / "model.pt").touch()
    with pytest.raises(ArtifactNotFoundError, match=rf"{checkpoint} has no checkpoint"):
        load(plan, compiled)
    (compiled / "weights" / "tp0_sharded_checkpoint.safetensors").touch()
    with pytest.raises(ArtifactNotFoundError, match="lacks tp1_sharded_checkpoint"):
        load(replace(plan, kind="ranks"), compiled)


@pytest.mark.nxdi
def test_divided_weights_need_no_checkpoint_and_no_second_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And neither believes the place that a configuration names."""
    from tests.backends.nxdi_plans import loaded, nxdi_plan
    from tests.backends.tnx_engine import assert_like_alone
    from tests.doubles.tiny_models import load_reference, save_tiny_model

    folder, compiled, log = tmp_path / "model", tmp_path / "compiled", tmp_path / "log"
    save_tiny_model("llama", folder)
    config = json.loads((folder / "config.json").read_text())
    other = save_tiny_model("llama", tmp_path / "other", seed=1)
    (folder / "config.json").write_text(json.dumps({**config, "_name_or_path": str(other)}))
    reference, plan = load_reference(folder), nxdi_plan(folder)
    compiled.mkdir()
    monkeypatch.setenv("NXDI_RIG_LOG", str(log))
    compiler: Any = backends.get("nxdi")
    compiler.compile(plan, compiled)
    written = sorted(path.name for path in compiled.iterdir())
    assert written == ["model.pt", "neuron_config.json"]
    assert str(tmp_path) not in (compiled / "neuron_config.json").read_text()
    compiler.compile(replace(plan, presharded=True), compiled)
    assert log.read_text().count('"event": "compile"') == 4
    assert [path.name for path in (compiled / "weights").iterdir()] == [
        "tp0_sharded_checkpoint.safetensors"
    ]
    (folder / "model.safetensors").unlink()
    with loaded(replace(plan, kind="ranks"), compiled) as backend:
        assert assert_like_alone(backend, reference, seed=2) > 100
    assert log.read_text().count('"event": "compile"') == 4
