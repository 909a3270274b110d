"""Compiled folders of every program that uses NxD Inference, written by the library and served as they are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the nxdi backend needs torch")
pytest.importorskip("uvicorn", reason="needs the `server` extra")
httpx = pytest.importorskip("httpx", reason="needs httpx")

from djl_python_neuronx.artifacts import formats  # noqa: E402
from djl_python_neuronx.artifacts import manifest as manifests  # noqa: E402
from djl_python_neuronx.loading.partition import compile_model  # noqa: E402
from djl_python_neuronx.server.app import Application  # noqa: E402
from djl_python_neuronx.server.models import Model  # noqa: E402
from djl_python_neuronx.service import Service  # noqa: E402
from tests.artifacts.folders import NXDI_KEYWORDS, NXDI_RECORD  # noqa: E402
from tests.doubles import neuron_machine  # noqa: E402
from tests.server.running import TINY_LLAMA, Running, checks  # noqa: E402

pytestmark = pytest.mark.nxdi

WRITE = """
import json, sys
from neuronx_distributed_inference.models.llama.modeling_llama import NeuronLlamaForCausalLM as kind
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config
model, folder, keywords = sys.argv[1:]
config = kind.get_neuron_config_cls()(**json.loads(keywords))
loaded = load_pretrained_config(model)
kind(model, kind.get_config_cls()(config, load_config=loaded)).compile(folder)
"""
"""The compilation as vllm-neuron 0.2 and the library's inference_demo do it."""
OF_VLLM = {
    "tp_degree": 1,
    "batch_size": 4,
    "ctx_batch_size": 1,
    "max_context_length": 256,
    "seq_len": 256,
    "enable_bucketing": True,
    "is_continuous_batching": True,
    "torch_dtype": "float32",
    "padding_side": "right",
    "on_device_sampling_config": {"dynamic": True, "deterministic": False},
}
"""The keywords of vllm-neuron 0.2 for four sequences of 256 tokens, without those of its blocks."""
PLAIN = {
    "tp_degree": 2,
    "batch_size": 2,
    "ctx_batch_size": 1,
    "seq_len": 128,
    "is_continuous_batching": True,
    "torch_dtype": "float32",
    "save_sharded_checkpoint": True,
}


def write(folder: Path, keywords: Mapping[str, Any]) -> Path:
    """Compile tiny-llama as a program does that has the library alone."""
    work = {**os.environ, "BASE_COMPILE_WORK_DIR": f"{folder}.work/"}
    arguments = [str(TINY_LLAMA), f"{folder}/", json.dumps(keywords)]
    subprocess.run([sys.executable, "-c", WRITE, *arguments], env=work, check=True, timeout=200)
    return folder


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The rig's log; two cores, and a store of this module's own."""
    work = tmp_path_factory.mktemp("nxdi")
    (work / "cache").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{neuron_machine.FOLDER / 'bin'}:{os.environ['PATH']}")
        patch.setenv("NEURON_RT_NUM_CORES", "2")
        patch.setenv("NEURON_COMPILE_CACHE_URL", str(work / "cache"))
        patch.setenv("NXDI_RIG_LOG", str(work / "rig.log"))
        yield work / "rig.log"


@pytest.fixture(scope="module")
def of_vllm(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("vllm") / "0cc175b9c0f1b6a831c399e269772661", OF_VLLM)


def num_compiled(log: Path) -> int:
    lines = log.read_text().splitlines() if log.exists() else []
    return sum("compile" in json.loads(line).values() for line in lines)


def assert_served(log: Path, model: Path) -> Any:
    """A start in a process of its own compiles nothing and gives known answers. Returns the model's facts."""
    before = num_compiled(log)
    service = Service.load(None, model, environ=dict(os.environ))
    application = Application(Model("tiny-llama"))
    application.models[0].service = service
    server = Running(application)
    try:
        for check in [one for one in checks() if len(one["prompt"].encode()) < 60][:2]:
            parameters = {"max_new_tokens": check["max_new_tokens"], "do_sample": False}
            body = {"inputs": check["prompt"], "parameters": parameters}
            response = httpx.post(f"{server.url}/invocations", json=body, timeout=120)
            assert response.status_code == 200, response.text
            assert json.loads(response.text)["generated_text"] == check["completion"]
        assert num_compiled(log) == before
        return service.loop.spec
    finally:
        server.close()
        service.close()


def test_the_library_still_writes_what_the_tests_without_it_read(tmp_path: Path) -> None:
    code = (
        "import json, sys; from neuronx_distributed_inference.models.config import NeuronConfig, to_dict; "
        "print('\\n' + json.dumps(to_dict(NeuronConfig(**json.loads(sys.argv[1])))))"
    )
    arguments = [sys.executable, "-c", code, json.dumps(NXDI_KEYWORDS)]
    run = subprocess.run(arguments, capture_output=True, check=True, text=True, timeout=200)
    assert json.loads(run.stdout.splitlines()[-1]) == NXDI_RECORD


def test_a_model_that_vllm_has_served(log: Path, of_vllm: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(TINY_LLAMA, model)
    shutil.copytree(of_vllm, model / "neuron-compiled-artifacts" / of_vllm.name)
    spec = assert_served(log, model)
    assert (spec.num_slots, spec.max_model_len, spec.prefill_buckets) == (4, 256, (128, 256))
    assert spec.largest_top_k == 256


def test_compiled_artifacts_that_the_variable_names(
    log: Path, of_vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NEURON_COMPILE_CACHE_URL")
    monkeypatch.setenv("NEURON_COMPILED_ARTIFACTS", str(of_vllm))
    assert assert_served(log, TINY_LLAMA).num_slots == 4


def test_a_compiled_folder_with_cut_weights_needs_no_checkpoint(log: Path, tmp_path: Path) -> None:
    """As the old LMI container's partition leaves it too."""
    folder = write(tmp_path / "compiled", PLAIN)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_LLAMA / name, folder)
    assert not (folder / "config.json").exists()
    spec = assert_served(log, folder)
    assert (spec.num_slots, spec.max_model_len, spec.prefill_buckets) == (2, 128, (128,))


def test_an_output_of_this_package_holds_cut_weights(log: Path, tmp_path: Path) -> None:
    settings = {
        "model_loader": "nxdi",
        "tensor_parallel_degree": "1",
        "dtype": "fp32",
        "n_positions": "128",
        "context_length_estimate": "128",
        "max_rolling_batch_size": "2",
    }
    out = tmp_path / "out"
    before = num_compiled(log)
    compile_model(str(TINY_LLAMA), str(out), environ=dict(os.environ), overrides=settings)
    assert num_compiled(log) == before + 2
    artifact = formats.detect(out)
    assert (artifact.format, artifact.backend, artifact.kind) == ("djl_neuronx", "nxdi", "ranks")
    assert not list(out.glob("*.safetensors"))
    manifests.verify(out / "compiled", manifests.read(out / "compiled"), exact=False)
    shutil.rmtree(os.environ["NEURON_COMPILE_CACHE_URL"])
    assert assert_served(log, out).num_slots == 2
