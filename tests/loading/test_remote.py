"""Models, compiled models and compiled graphs in S3 and on the hub, served from there."""

from __future__ import annotations

import logging
import shutil

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("boto3", reason="boto3 is not installed")
pytest.importorskip("moto.server", reason="moto[server] is not installed")

from djl_python_neuronx import backends
from djl_python_neuronx.errors import ArtifactError, ArtifactNotFoundError
from djl_python_neuronx.loading import judge as judge_module
from djl_python_neuronx.loading import prepare as prepare_module
from djl_python_neuronx.loading.partition import compile_model
from djl_python_neuronx.loading.prepare import prepare_or_raise
from djl_python_neuronx.planning import plan
from djl_python_neuronx.planning.backend_choice import Library
from djl_python_neuronx.planning.machines import named as machine_named
from tests.artifacts import folders
from tests.doubles.hub import Hub
from tests.doubles.neuron_machine import GRAPHS, TINY, load
from tests.doubles.s3_rig import KEYS

pytest_plugins = ["tests.doubles.s3_fixtures", "tests.doubles.neuron_fixtures"]


@pytest.fixture
def aws(machine, proxy):
    """The machine reaches S3 through the proxy."""
    machine.set(**KEYS, AWS_ENDPOINT_URL=proxy.url)
    return machine


def put_tiny(bucket):
    for path in TINY.iterdir():
        if path.is_file():
            bucket.put_object(Bucket="models", Key=f"tiny/{path.name}", Body=path.read_bytes())


def test_a_model_in_s3_is_served_and_fetched_once(aws, bucket, options, tmp_path, caplog):
    put_tiny(bucket)
    caplog.set_level(logging.INFO, "djl_python_neuronx")
    seen = []
    for _ in range(2):
        load(aws, {**options, "model_id": "s3://models/tiny"}, tmp_path)
        seen.append(caplog.text.count("transfer_done uri=s3://models/tiny/"))
    assert seen == [1, 1]
    fetched = [record.getMessage() for record in caplog.records if record.msg.startswith("fetched")]
    assert len(fetched) == 2
    size = (TINY / "model.safetensors").stat().st_size
    assert int(fetched[0].split("bytes=")[1].split()[0]) > size
    assert "seconds=" in fetched[0]


def test_a_simulated_device_fetches_no_weights(aws, bucket, options, tmp_path):
    put_tiny(bucket)
    for loader, num_files in (("sim", 0), ("tnx", 1)):
        named = {**options, "model_loader": loader, "model_id": "s3://models/tiny"}
        load(aws, named, tmp_path)
        assert len([*(tmp_path / "downloads").rglob("model.safetensors")]) == num_files


def test_a_model_that_s3_does_not_have(aws, options, tmp_path):
    with pytest.raises(ArtifactNotFoundError, match="s3://models/none/"):
        load(aws, {**options, "model_id": "s3://models/none"}, tmp_path)


def test_an_output_in_s3_is_served(aws, bucket, options, tmp_path):
    uri = "s3://models/out"
    compile_model(str(TINY), uri, environ=aws.environ, overrides=options)
    assert not list((tmp_path / "downloads").rglob("output-*"))
    shutil.rmtree(tmp_path / "cache")
    aws.set(SERVING_DOWNLOAD_DIR=tmp_path / "elsewhere")
    assert load(aws, {"model_id": uri, "skip_warmup": "true"}, tmp_path) == (0, 0)
    assert aws.compiled() == GRAPHS


def test_what_one_machine_compiled_the_next_one_fetches(aws, bucket, options, tmp_path):
    options = {**options, "compiled_graph_path": "s3://models/cache"}
    assert load(aws, options) == (0, 1)
    aws.set(SERVING_DOWNLOAD_DIR=tmp_path / "elsewhere")
    assert load(aws, options) == (1, 0)
    assert aws.compiled() == GRAPHS


def test_saved_graphs_in_s3_are_fetched(aws, bucket, options, tmp_path):
    load(aws, options)
    (folder,) = (path.parent for path in tmp_path.glob("cache/djl-neuronx/*/manifest.json"))
    for name in GRAPHS:
        bucket.put_object(Bucket="models", Key=f"graphs/{name}", Body=(folder / name).read_bytes())
    named = {**options, "compiled_graph_path": "s3://models/graphs"}
    assert load(aws, named) == (0, 0)
    assert aws.compiled() == GRAPHS


@pytest.mark.parametrize("place", ["", "neuron-compiled-artifacts/", "vllm/", "digest/"])
def test_graphs_of_nxd_inference_in_s3_are_fetched(aws, bucket, tmp_path, monkeypatch, place):
    """Saved by the library itself, or by vLLM below a digest; of several digests the error lists them."""
    name = "neuronx-distributed-inference"
    library = {**prepare_module.libraries(), name: Library(name, "0.9.0", "installed")}
    for module in (prepare_module, judge_module, plan):
        monkeypatch.setattr(module, "libraries", lambda: library)
    monkeypatch.setattr(backends.get("nxdi"), "compiler_version", lambda: "2.24.1")
    model = folders.huggingface(tmp_path / "model")
    (model / "tokenizer.json").touch()
    digest = f"{'0' * 32}/"
    place = {"vllm/": f"neuron-compiled-artifacts/{digest}", "digest/": digest}.get(place, place)
    graphs = folders.nxdi(tmp_path / "graphs", save_sharded_checkpoint=False)

    def upload(place):
        for name in ("neuron_config.json", "model.pt"):
            body = (graphs / name).read_bytes()
            bucket.put_object(Bucket="models", Key=f"graphs/{place}{name}", Body=body)

    upload(place)
    named = {"model_loader": "nxdi", "compiled_graph_path": "s3://models/graphs"}

    def prepared():
        return prepare_or_raise(
            None,
            model,
            environ=aws.environ,
            overrides=named,
            machine=machine_named("inf2.48xlarge"),
        )

    found = prepared()
    assert (found.own_graphs / "model.pt").read_bytes() == (graphs / "model.pt").read_bytes()
    assert found.options.max_rolling_batch_size == 4
    if digest in place:
        upload(place.replace("0", "1"))
        with pytest.raises(ArtifactError, match=f"2 compiled models: .*{'0' * 32}.*{'1' * 32}"):
            prepared()


def test_a_draft_model_is_fetched_too(aws, bucket, options):
    put_tiny(bucket)
    options = {**options, "speculative_draft_model": "s3://models/tiny"}
    options["max_rolling_batch_size"] = "1"
    prepared = prepare_or_raise(None, TINY, environ=aws.environ, overrides=options)
    assert (prepared.draft.weights.folder / "config.json").read_bytes() == (
        TINY / "config.json"
    ).read_bytes()


def test_a_model_of_the_hub_is_served(machine, options, tmp_path):
    hub = Hub()
    try:
        hub.models["ours/tiny"] = {
            path.name: path.read_bytes() for path in TINY.iterdir() if path.is_file()
        }
        machine.set(HF_ENDPOINT=hub.url, HF_HOME=tmp_path / "hf")
        assert load(machine, {**options, "model_id": "ours/tiny"}, tmp_path) == (0, 1)
        hub.loaded.clear()
        load(machine, {**options, "model_id": "ours/tiny", "revision": "main"}, tmp_path)
        assert not hub.loaded
    finally:
        hub.close()
