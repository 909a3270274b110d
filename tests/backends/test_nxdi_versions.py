"""The installed release of NxD Inference: what planning says of it, and each model's tokens through HTTP.

`.ci/nightly` runs this with every release from 0.4 to 0.9.
"""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the nxdi backend needs torch")
pytest.importorskip("uvicorn", reason="needs the `server` extra")

from djl_python_neuronx.backends.nxdi import model as nxdi
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.errors import IncompatibleOptionsError, ServingError
from djl_python_neuronx.planning.backend_choice import libraries
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.machines import named
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.nxdi.recorded import as_options, differences
from djl_python_neuronx.planning.nxdi.versions import numbers, releases
from djl_python_neuronx.planning.plan import library_arguments
from djl_python_neuronx.server.app import Application
from djl_python_neuronx.server.models import Model
from tests.backends.nxdi_plans import VARIANTS, loaded, log_lines, obtained
from tests.backends.tnx_engine import assert_greedy, assert_like_alone
from tests.config import library_names as real
from tests.doubles.tiny_models import load_reference, save_tiny_model
from tests.doubles.toy_service import toy_service
from tests.doubles.toy_tokenizer import ToyTokenizer
from tests.server.running import Running, http

pytestmark = pytest.mark.nxdi

LIBRARY = "neuronx_distributed_inference"
VOCAB_SIZE = 96
DBRX = {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 64,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
}
QWEN3_MOE = {
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **{name: VARIANTS[name] for name in ("llama", "mistral", "mixtral", "qwen3")},
    "dbrx": ("dbrx", DBRX),
    "qwen3_moe": ("qwen3_moe", QWEN3_MOE),
    # transformers 4.51 masks what is beyond a window that use_sliding_window=false turns off.
    "qwen2": ("qwen2", {"use_sliding_window": False, "sliding_window": None}),
}
FIRST = {"qwen3": (0, 5), "qwen3_moe": (0, 6), "mistral": (0, 9)}
"""The first version with a model; others are in all. Of 0.9 the second release has mistral: its folder shows it."""
WAYS: Mapping[str, Mapping[str, str]] = {
    "continuous": {},
    "static": {"rolling_batch_strategy": "naive_rolling_batch"},
}
# One token looks like a decode; around a prompt graph's 8 and 20 tokens the next one begins.
LENGTHS = (1, 20, 2, 9, 7, 8, 19, 3, 13, 1)


def installed() -> tuple[int, ...]:
    version = libraries()["neuronx-distributed-inference"].version
    assert version is not None
    return numbers(version)


def absent(name: str) -> bool:
    if name == "mistral" and installed() == FIRST[name]:
        return find_spec(f"{LIBRARY}.models.mistral") is None
    return installed() < FIRST.get(name, (0, 4))


def test_the_table_of_releases_has_what_the_library_has() -> None:
    """Keywords by the source of its classes, models by its registry and its folders."""
    config = importlib.import_module(f"{LIBRARY}.models.config")
    kinds = {
        "": (config.MoENeuronConfig, real.NXDI_NEURON_CONFIG | real.NXDI_MOE_NEURON_CONFIG),
        "on_device_sampling_config.": (config.OnDeviceSamplingConfig, real.NXDI_ON_DEVICE_SAMPLING),
        "lora_config.": (config.LoraServingConfig, {"dynamic_multi_lora"}),
    }
    later, wrong = set[str](), []
    for release in releases():
        if numbers(release.version) > installed():
            later.update(release.keywords)
    for prefix, (kind, names) in kinds.items():
        listed = {word for release in releases() for word in release.keywords}
        own = {
            word.removeprefix(prefix)
            for word in listed
            if word.startswith(prefix) and ("." in word) == bool(prefix)
        }
        wrong += names - own
        for name in names | own:
            try:
                nxdi._check_keywords(kind, {name: 1})
                has = True
            except IncompatibleOptionsError:
                has = False
            if has == (prefix + name in later):
                wrong.append(prefix + name)
    assert wrong == []
    registry = importlib.import_module(f"{LIBRARY}.utils.constants").MODEL_TYPES
    for release in releases():
        for name in release.models:
            has = name in registry or find_spec(f"{LIBRARY}.models.{name}") is not None
            # Modules that no registry of their release names: qwen3_moe in 0.5, gemma3 in 0.8.
            if name in registry or name not in {"qwen3_moe", "gemma3"}:
                newer = numbers(release.version) > installed()
                assert has is not newer or release.name, name


@pytest.mark.nightly
@pytest.mark.parametrize("tp", ["1", "2"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_through_http_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, way: str, tp: str
) -> None:
    """Ten requests on four slots: they join a running batch, and slots are taken again."""
    model_type, settings = MODELS[name]
    folder = save_tiny_model(
        model_type, tmp_path / "model", **{"vocab_size": VOCAB_SIZE, **settings}
    )
    if absent(name):
        registry = importlib.import_module(f"{LIBRARY}.utils.constants").MODEL_TYPES
        assert model_type not in registry
        wanted = f"first for model_type {model_type}|no class for model_type '{model_type}'"
        with pytest.raises(ServingError, match=wanted):
            obtained(folder, tmp_path, tensor_parallel_degree=tp, **WAYS[way])
        return
    made = obtained(folder, tmp_path, tensor_parallel_degree=tp, **WAYS[way])
    assert made.folder is not None
    check_recorded(made.folder, folder)
    log = tmp_path / "rig.log"
    monkeypatch.setenv("NXDI_RIG_LOG", str(log))
    draw = random.Random(f"{name} {way} {tp}")
    prompts = [draw.choices(range(3, 90), k=length) for length in LENGTHS]
    counts = [draw.randint(4, 28) for _ in prompts]
    with loaded(made.plan, made.folder) as backend:
        assert backend.spec.joins == ("reprefill" if way == "static" else "free")
        application = Application(Model("toy"))
        application.models[0].service = toy_service(backend, tokenizer=ToyTokenizer(VOCAB_SIZE))
        server = Running(application)
        try:
            with ThreadPoolExecutor(len(prompts)) as clients:
                found = list(clients.map(lambda *of: answer(server.url, *of), prompts, counts))
        finally:
            server.close()
    model = load_reference(folder)
    for prompt, count, tokens in zip(prompts, counts, found, strict=True):
        assert len(tokens) == count
        assert_greedy(model, prompt, tokens)
    calls = [line["model"] for line in log_lines(log, "run")]
    first = calls.index("token_generation_model")
    assert "context_encoding_model" in calls[first:], "no sequence has joined"


def check_recorded(compiled: Path, model: Path) -> None:
    """Compare what the library has recorded with what its options lead to: the same, and no keyword besides."""
    recorded = json.loads((compiled / "neuron_config.json").read_text())["neuron_config"]
    options = as_options(recorded)
    assert "override_neuron_config" not in options
    facts = ModelFacts.from_config(json.loads((model / "config.json").read_text()))
    neuron = NEURON_BACKENDS["nxdi"]
    case = Case(ServingOptions.model_validate(options), facts, named("trn1.32xlarge"), neuron)
    assert differences(recorded, library_arguments(case).neuron_config) == {}


def answer(url: str, prompt: list[int], count: int) -> list[int]:
    """The tokens of a completion."""
    asked = {
        "model": "toy",
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_tokens_as_token_ids": True,
    }
    response = http.post(f"{url}/v1/completions", json=asked)
    assert response.status_code == 200, response.text
    tokens = response.json()["choices"][0]["logprobs"]["tokens"]
    return [int(token.removeprefix("token_id:")) for token in tokens]


STEPS: Mapping[str, Mapping[str, str]] = {
    "device": {"on_device_generation": "true"},
    "ahead": {"on_device_generation": "true", "async_execution": "true"},
    "both": {"on_device_generation": "true", "output_logits": "true"},
    "few": {"token_generation_batches": "1,2"},
}


@pytest.mark.nightly
@pytest.mark.parametrize("way", STEPS)
def test_other_steps_give_the_same_tokens(tmp_path: Path, way: str) -> None:
    """The device samples, also ahead of the host; decode graphs for few sequences, which 0.8 has first."""
    folder = save_tiny_model("llama", tmp_path / "model", vocab_size=VOCAB_SIZE)
    more = {"tensor_parallel_degree": "2", **STEPS[way]}
    if way == "few" and installed() < (0, 8):
        with pytest.raises(ServingError, match=r"0\.8 \(SDK 2\.28\) is the first"):
            obtained(folder, tmp_path, **more)
        return
    made = obtained(folder, tmp_path, **more)
    with loaded(made.plan, made.folder) as backend:
        assert backend.spec.decode_slots == ((1, 2, 4) if way == "few" else ())
        assert assert_like_alone(backend, load_reference(folder), seed=5, num_requests=20) > 200


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral"])
def test_each_row_gets_its_adapter(tmp_path: Path, name: str) -> None:
    """Adapters are written after a load, which 0.7 has first; before 0.8 layers of qwen2 hand none on."""
    pytest.importorskip("peft", reason="the oracle")
    from tests.backends import test_nxdi_lora as lora

    case = lora.make(tmp_path, name)
    if installed() < ((0, 8) if name == "qwen2" else (0, 7)):
        with pytest.raises(ServingError, match="is the first for the keyword lora_config"):
            obtained(case.folder, tmp_path, enable_lora="true")
        return
    with loaded(lora.plan_of(case, ("wide", "narrow"))) as backend:
        lora.run(backend, case, {1: "wide", 2: "narrow", 3: None}, seed=1)
