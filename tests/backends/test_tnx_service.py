"""From the options of a deployment to text: the model of the quick start on transformers-neuronx."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the tnx backend needs torch")
pytest.importorskip("uvicorn", reason="needs the `server` extra")
httpx = pytest.importorskip("httpx", reason="needs httpx")

from djl_python_neuronx import backends  # noqa: E402
from djl_python_neuronx.backends.base import Want  # noqa: E402
from djl_python_neuronx.backends.tnx.model import CLASSES  # noqa: E402
from djl_python_neuronx.errors import (  # noqa: E402
    ArtifactNotFoundError,
    BackendUnavailableError,
    ConfigError,
)
from djl_python_neuronx.loading import compiled as graphs  # noqa: E402
from djl_python_neuronx.loading.check import check  # noqa: E402
from djl_python_neuronx.loading.load_plan import load_plan  # noqa: E402
from djl_python_neuronx.loading.partition import compile_model  # noqa: E402
from djl_python_neuronx.loading.prepare import prepare_or_raise  # noqa: E402
from djl_python_neuronx.server.app import Application  # noqa: E402
from djl_python_neuronx.server.models import Model  # noqa: E402
from djl_python_neuronx.service import Service  # noqa: E402
from tests.backends.tnx_engine import assert_like_alone  # noqa: E402
from tests.backends.tnx_plans import BASE, CACHE, ENVIRON, VARIANTS  # noqa: E402  # noqa: E402
from tests.backends.top_tokens import assert_top_tokens  # noqa: E402
from tests.doubles.tiny_models import load_reference, save_tiny_model  # noqa: E402
from tests.doubles.toy_tokenizer import TOKENIZER  # noqa: E402
from tests.processes import engines  # noqa: E402
from tests.server.running import TINY_LLAMA, Running, checks  # noqa: E402

pytestmark = pytest.mark.tnx

WAYS: dict[str, dict[str, str]] = {
    "continuous": {},
    "static": {"rolling_batch_strategy": "naive_rolling_batch"},
    "on the device": {"on_device_generation": "true"},
    "in chunks": {"enable_chunked_prefill": "true", "context_length_estimate": "8,24"},
    "fused": {
        "fuse_qkv": "true",
        "attention_layout": "BSH",
        "group_query_attention": "replicated-heads",
        "compiled_graph_path": CACHE,
    },
    "a look-up": {"ngram_prompt_lookup_max": "3"},
    "a draft model": {
        "speculative_draft_model": str(TINY_LLAMA),
        "speculative_length": "3",
        "draft_model_tp_size": "1",
    },
    "a draft model for one slot": {
        "speculative_draft_model": str(TINY_LLAMA),
        "max_rolling_batch_size": "1",
    },
}


@pytest.fixture(params=list(WAYS))
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    settings = {**BASE, **WAYS[request.param]}
    loaded = Service.load(None, TINY_LLAMA, environ=ENVIRON, overrides=settings)
    yield loaded
    loaded.close()


def test_known_answers_come_through_the_server(service: Service) -> None:
    application = Application(Model("tiny-llama"))
    application.models[0].service = service
    server = Running(application)
    wanted = [check for check in checks() if len(check["prompt"].encode()) < 100][:24]
    device = service.loop.spec.outputs == Want.TOKENS

    def answer(i: int, check: dict[str, Any]) -> str:
        parameters = {"max_new_tokens": check["max_new_tokens"], "do_sample": False}
        stream = i % 2 == 0
        payload = {"inputs": check["prompt"], "parameters": parameters, "stream": stream}
        response = httpx.post(server.url + "/invocations", json=payload, timeout=60)
        assert response.status_code == 200, response.text
        text: str = json.loads(response.text.splitlines()[-1])["generated_text"]
        return text

    try:
        with ThreadPoolExecutor(8) as clients:
            found = list(clients.map(answer, range(len(wanted)), wanted))
        assert found == [check["completion"] for check in wanted]
        seeded = {"inputs": "x", "parameters": {"do_sample": True, "seed": 1, "max_new_tokens": 2}}
        status = httpx.post(server.url + "/invocations", json=seeded, timeout=60).status_code
        assert status == (400 if device else 200)
        if not device:
            assert_top_tokens(service, wanted[0]["prompt"])
    finally:
        server.close()


def test_a_degree_above_the_cores_is_refused_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No variable announces the cores: `neuron-ls` does, or nothing."""
    cache = tmp_path / "cache"
    environ = {"NEURON_COMPILE_CACHE_URL": str(cache), "DJL_CACHE_DIR": str(tmp_path / "downloads")}
    monkeypatch.setenv("NEURON_EMU_CORES", "4")
    for name in ("NEURON_RT_NUM_CORES", "NEURON_RT_VISIBLE_CORES"):
        monkeypatch.delenv(name, raising=False)
    settings = {**BASE, "tensor_parallel_degree": "8"}
    with pytest.raises(ConfigError, match="8 NeuronCores are needed and 4 can be used"):
        Service.load(None, TINY_LLAMA, environ=environ, overrides=settings)
    monkeypatch.setenv("PATH", os.defpath)
    with pytest.raises(BackendUnavailableError, match="no Neuron device is visible here"):
        Service.load(None, TINY_LLAMA, environ=environ, overrides=settings)
    assert not cache.exists()


@pytest.mark.nightly
def test_each_copy_has_cores_of_its_own_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as a machine of four cores has room for. Each answers alone, also started again."""
    for name in ("NEURON_RT_NUM_CORES", "NEURON_RT_VISIBLE_CORES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NEURON_EMU_CORES", "4")
    environ = {**os.environ, "NEURON_COMPILE_CACHE_URL": CACHE, "DJL_CACHE_DIR": str(tmp_path)}
    settings = {**BASE, "replicas": "max"}
    service = Service.load(None, TINY_LLAMA, environ=environ, overrides=settings)
    known = checks()[0]
    application = Application(Model("tiny-llama"))
    application.models[0].service = service
    server = Running(application)

    def cores() -> list[str]:
        """Of the engine processes, as the system has their variables."""
        variables = [
            dict(
                line.partition("=")[::2]
                for line in Path(f"/proc/{pid}/environ").read_text().split("\0")
            )
            for pid in engines(os.getpid())
        ]
        assert not any("NEURON_RT_NUM_CORES" in each for each in variables)
        return sorted(each["NEURON_RT_VISIBLE_CORES"] for each in variables)

    def ask() -> str:
        parameters = {"max_new_tokens": known["max_new_tokens"]}
        payload = {"inputs": known["prompt"], "parameters": parameters}
        response = httpx.post(server.url + "/invocations", json=payload, timeout=60)
        return str(response.json()["generated_text"])

    try:
        assert cores() == ["0-1", "2-3"]
        for i, others in enumerate(("2-3", "0-1")):
            service.loop.retire(i)
            assert cores() == [others]
            assert ask() == known["completion"]
            service.loop.start(i)
            assert cores() == ["0-1", "2-3"]
    finally:
        server.close()
        service.close()


def test_what_the_library_gets_wrong_is_refused_before_it_is_loaded() -> None:
    wrong = {"group_query_attention": "shard-over-batch"}
    with pytest.raises(ConfigError, match="mixes up the rows"):
        Service.load(None, TINY_LLAMA, environ=ENVIRON, overrides={**BASE, **wrong})


def test_the_class_is_looked_up_by_the_model_type(tmp_path: Path) -> None:
    for name in TINY_LLAMA.iterdir():
        (tmp_path / name.name).write_bytes(name.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "qwen2"}))
    with pytest.raises(Exception, match="no class for model_type qwen2; supported types: bloom"):
        Service.load(None, tmp_path, environ=ENVIRON, overrides=BASE)


def hits_and_misses(service: Service) -> tuple[int, int]:
    """Of the compile store, for the models of a service."""
    counters = (
        service.metrics["compile_cache_hits_total"],
        service.metrics["compile_cache_misses_total"],
    )
    hits, misses = (int(counter._value.get()) for counter in counters)
    return hits, misses


def test_a_second_start_compiles_nothing_and_another_option_names_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    environ = {
        "NEURON_RT_NUM_CORES": "8",
        "NEURON_COMPILE_CACHE_URL": str(cache),
        "DJL_CACHE_DIR": str(tmp_path / "downloads"),
    }

    def start(**more: str) -> tuple[int, int]:
        settings = {**BASE, "n_positions": "64", "context_length_estimate": "16,64", **more}
        service = Service.load(None, TINY_LLAMA, environ=environ, overrides=settings)
        service.close()
        return hits_and_misses(service)

    assert start() == (0, 1)
    num_compiled = len(list(cache.rglob("MODULE_*")))
    assert num_compiled > 0
    assert start() == (1, 0)
    assert len(list(cache.rglob("MODULE_*"))) == num_compiled
    with pytest.raises(ArtifactNotFoundError, match="max_rolling_batch_size: compiled 4") as caught:
        start(max_rolling_batch_size="2", compilation="forbid")
    assert "n_positions" not in str(caught.value)
    assert len(list(cache.rglob("MODULE_*"))) == num_compiled
    assert start(compilation="forbid") == (1, 0)
    caplog.clear()
    assert start(max_rolling_batch_size="2") == (0, 1)
    assert "compile_needed" in caplog.text
    assert "max_rolling_batch_size: compiled 4, wanted 2" in caplog.text
    assert len(list(cache.rglob("MODULE_*"))) > num_compiled


def test_a_draft_model_is_compiled_by_itself_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab_size = json.loads((TINY_LLAMA / "config.json").read_text())["vocab_size"]
    draft = save_tiny_model("llama", tmp_path / "draft", vocab_size=vocab_size)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_LLAMA / name, draft)
    environ = {
        "NEURON_RT_NUM_CORES": "8",
        "NEURON_COMPILE_CACHE_URL": str(tmp_path / "cache"),
        "DJL_CACHE_DIR": str(tmp_path / "downloads"),
    }
    settings = {
        **BASE,
        "n_positions": "64",
        "context_length_estimate": "64",
        "speculative_draft_model": str(draft),
        "draft_model_tp_size": "1",
    }

    def start(folder: Path = TINY_LLAMA, **more: str) -> tuple[int, int]:
        options = {**settings, **more} if folder == TINY_LLAMA else {}
        service = Service.load(None, folder, environ=environ, overrides=options)
        service.close()
        return hits_and_misses(service)

    turns: list[str] = []
    for module, name in ((graphs, "compile_guarded"), (backends.get("tnx"), "load")):
        real = getattr(module, name)
        noted = partial(lambda real, name, *a, **k: turns.append(name) or real(*a, **k), real, name)
        monkeypatch.setattr(module, name, noted)
    assert start(engine_process="false") == (
        0,
        2,
    )  # loads in this process, where the turns are noted
    # A model that is loaded holds the cores that a compilation needs.
    assert turns == ["compile_guarded", "compile_guarded", "load", "load"]
    assert start() == (2, 0)
    # The draft model does not depend on how many drafts are verified.
    assert start(speculative_length="3") == (1, 1)
    output = tmp_path / "output"
    compile_model(str(TINY_LLAMA), str(output), environ=environ, overrides=settings)
    shutil.rmtree(tmp_path / "cache")
    assert start(output) == (0, 0)
    assert not list(tmp_path.glob("cache/**/MODULE_*"))
    # The draft model alone, compiled for the same shapes, is used as it is; and a model may draft for itself.
    alone = {"n_positions": "64", "context_length_estimate": "64", "tensor_parallel_degree": "1"}
    compile_model(str(draft), str(tmp_path / "alone"), environ=environ, overrides={**BASE, **alone})
    assert start(speculative_draft_model=str(tmp_path / "alone")) == (0, 1)
    assert start(speculative_draft_model=str(TINY_LLAMA)) == (1, 1)


@pytest.mark.parametrize("tp", ["1", "2"])
def test_an_output_has_the_weights_as_each_core_takes_them(tmp_path: Path, tp: str) -> None:
    """It is served by a new process, compiles nothing and needs no checkpoint; and the compile store has no weights."""
    cache, output = tmp_path / "cache", tmp_path / "out"
    environ = {
        "NEURON_RT_NUM_CORES": "8",
        "NEURON_COMPILE_CACHE_URL": str(cache),
        "DJL_CACHE_DIR": str(tmp_path / "downloads"),
    }
    source = Path(shutil.copytree(TINY_LLAMA, tmp_path / "model"))
    settings = {**BASE, "tensor_parallel_degree": tp}
    made = compile_model(
        str(source), str(output), environ=environ, overrides=settings, weights="presharded"
    )
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    names = {"DecoderLMHead", *(f"decoder_layer_{i}" for i in range(layers))}
    written = {name for name in made.files if name.endswith(".safetensors")}
    assert written == {f"compiled/{name}.safetensors" for name in names}
    assert not list(cache.rglob("*.safetensors"))
    graphs = [name for name in made.files if name.endswith(".neff")]
    assert graphs
    assert all((output / name).stat().st_nlink == 1 for name in graphs)
    assert not list(tmp_path.glob(".out.*"))
    assert "option.on_device_embedding=true" in (output / "serving.properties").read_text()
    shutil.rmtree(source)
    shutil.rmtree(cache)
    report = check(str(output), environ=environ, overrides={})
    assert not report.findings.errors
    assert not report.lacking
    loaded = Service.load(None, output, environ=environ)
    assert not list(cache.rglob("MODULE_*"))
    application = Application(Model("cut"))
    application.models[0].service = loaded
    server = Running(application)
    try:
        for known in [known for known in checks() if len(known["prompt"].encode()) < 100][:8]:
            parameters = {"max_new_tokens": known["max_new_tokens"], "do_sample": False}
            payload = {"inputs": known["prompt"], "parameters": parameters}
            response = httpx.post(server.url + "/invocations", json=payload, timeout=60)
            assert response.json()["generated_text"] == known["completion"]
    finally:
        server.close()
        loaded.close()


@pytest.mark.parametrize("layout", ["graphs", "no graphs", "lmi_aot"])
def test_weights_in_the_cut_of_another_program_are_served(tmp_path: Path, layout: str) -> None:
    """As the library's `save(sharded_weights=True)` leaves them, beside the tokenizer; and as the old container did."""
    prompt = "Monday Tuesday Wednesday"
    settings = {**BASE, "on_device_embedding": "true"}
    prepared = prepare_or_raise(None, TINY_LLAMA, environ=ENVIRON, overrides=settings)
    cut = tmp_path / "compiled" if layout == "lmi_aot" else tmp_path
    cut.mkdir(exist_ok=True)
    backends.get("tnx").compile(
        replace(load_plan(prepared, prepared.load_tokenizer), presharded=True), cut
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_LLAMA / name, tmp_path)
    if layout == "lmi_aot":
        shutil.copy(TINY_LLAMA / "config.json", tmp_path)
    for graph in list(cut.glob("*.neff")) if layout == "no graphs" else []:
        graph.unlink()
    loaded = Service.load(
        None, tmp_path, environ=ENVIRON, overrides={**BASE, "on_mismatch": "recompile"}
    )
    application = Application(Model("cut"))
    application.models[0].service = loaded
    server = Running(application)
    try:
        payload = {"inputs": prompt, "parameters": {"max_new_tokens": 9}}
        response = httpx.post(server.url + "/invocations", json=payload, timeout=60)
        assert response.json()["generated_text"] == " Thursday Friday"
    finally:
        server.close()
        loaded.close()


OPTIMUM: dict[str, tuple[str, str, int, dict[str, Any], dict[str, Any]]] = {
    # model_type, transformers, slots; arguments of NeuronConfig and further ones of the model's class.
    # Source: Optimum Neuron 0.0.23 to 0.0.28, modeling_decoder.py, __init__, and the exporters' model_configs.
    "llama of 0.0.25": (
        *("llama", "4.43.2", 3),
        {"attention_layout": "BSH", "fuse_qkv": True},
        {"n_positions": [136], "context_length_estimate": [136]},
    ),
    "mistral of 0.0.23": (
        *("mistral", "4.41.1", 3),
        {"attention_layout": "HSB"},
        {"n_positions": [136], "context_length_estimate": [136]},
    ),
    "opt of 0.0.28": (
        *("opt", "4.48.3", 3),
        {"attention_layout": "HSB", "fuse_qkv": True},
        {"n_positions": 136},
    ),
    "llama of 0.0.27, one slot": (
        *("llama", "4.43.2", 1),
        {"attention_layout": "BSH", "fuse_qkv": True},
        {"n_positions": 136},
    ),
    "mixtral of 0.0.27": (
        *("mixtral", "4.43.2", 3),
        {"attention_layout": "HSB", "fuse_qkv": True},
        {"n_positions": 136},
    ),
}


def export(folder: Path, name: str) -> None:
    """Write a model folder as Optimum Neuron's `NeuronDecoderModel.from_pretrained(export=True)` and its save do."""
    from transformers_neuronx import config as library

    kind, version, slots, graphs, lengths = OPTIMUM[name]
    own = {**VARIANTS[kind][1], "max_position_embeddings": 136}
    checkpoint = save_tiny_model(kind, folder / "checkpoint", **own)
    if isinstance(lengths["n_positions"], list):
        shared = library.ContinuousBatchingConfig(batch_size_for_shared_caches=slots)
        graphs = {**graphs, "continuous_batching": shared}
    made = getattr(importlib.import_module("transformers_neuronx"), CLASSES[kind]).from_pretrained(
        str(checkpoint),
        batch_size=slots,
        tp_degree=2,
        amp="f32",
        neuron_config=library.NeuronConfig(**graphs),
        **lengths,
    )
    made.to_neuron()
    made.save(str(folder / "compiled"))
    section = {
        "task": "text-generation",
        "batch_size": slots,
        "num_cores": 2,
        "auto_cast_type": "fp32",
        "sequence_length": 136,
        "compiler_type": "neuronx-cc",
        "compiler_version": backends.get("tnx").compiler_version(),
        "checkpoint_id": None,
        "checkpoint_revision": None,
    }
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"transformers_version": version, "neuron": section}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(checkpoint / "generation_config.json", folder)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] * (i > 2)) for i, name in enumerate(OPTIMUM)],
)
def test_what_optimum_exported_is_served_and_nothing_is_compiled(tmp_path: Path, name: str) -> None:
    export(tmp_path / "model", name)
    cache = tmp_path / "cache"
    environ = {"NEURON_RT_NUM_CORES": "8", "NEURON_COMPILE_CACHE_URL": str(cache)}
    settings = {"model_loader": "tnx", "compilation": "forbid"}
    prepared = prepare_or_raise(None, tmp_path / "model", environ=environ, overrides=settings)
    obtained = graphs.obtain(prepared, lambda: TOKENIZER)
    assert obtained.folder == tmp_path / "model" / "compiled"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEURON_COMPILE_CACHE_URL", str(cache))
        backend = backends.get("tnx").load(obtained.plan, obtained.folder)
    reference = load_reference(tmp_path / "model" / "checkpoint")
    assert assert_like_alone(backend, reference, seed=5, num_requests=8) > 100
    backend.close()
    assert not list(cache.rglob("MODULE_*"))
