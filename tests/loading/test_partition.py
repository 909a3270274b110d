"""Ahead of time: the output is served as it is, gives the same answers, and is refused when it is damaged."""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from djl_python_neuronx import cli, handler
from djl_python_neuronx.artifacts import formats
from djl_python_neuronx.artifacts import manifest as manifests
from djl_python_neuronx.config.sources import from_file
from djl_python_neuronx.engine.streams import BlockingQueue
from djl_python_neuronx.errors import (
    ArtifactError,
    ArtifactMismatchError,
    CompileError,
    IncompatibleOptionsError,
    InvalidOptionError,
)
from djl_python_neuronx.loading import partition
from djl_python_neuronx.loading.check import check
from djl_python_neuronx.loading.partition import compile_model
from djl_python_neuronx.loading.prepare import prepare_or_raise
from djl_python_neuronx.planning.machines import named
from djl_python_neuronx.service import Service
from tests.doubles.neuron_machine import GRAPHS, TINY, load
from tests.known_answers import rounded

pytest_plugins = ["tests.doubles.neuron_fixtures"]

BODY = b'{"inputs": "Monday Tuesday Wednesday", "parameters": {"max_new_tokens": 9}}'
SMALL = {"n_positions": "128", "max_rolling_batch_size": "2", "model_loader": "cpu"}


class Inputs:
    """The inputs from DJL's partition script."""

    def __init__(self, **properties):
        self._properties = {"model_dir": str(TINY), "entryPoint": "djl_python_neuronx.handler"}
        self._properties |= properties

    def get_properties(self):
        return self._properties

    def get_function_name(self):
        return None


def answer(model, **overrides):
    """The answer of the model in a folder."""
    service = Service.load(None, model, overrides=overrides)
    try:
        parsed, inbox = service.parse(BODY), BlockingQueue()
        service.loop.submit(parsed.request, inbox)
        text, finished = b"", False
        while not finished:
            for delta in inbox.drain(30.0):
                text += parsed.formatter.feed(delta)
                finished = delta.finished
        return rounded(json.loads(text))
    finally:
        service.close()


def options_of(model, **overrides):
    """The options with which the model in a folder is served."""
    return prepare_or_raise(None, model, environ={}, overrides=overrides).options


def test_a_properties_file_is_compiled_as_if_it_lay_beside_the_model(tmp_path, capfd):
    """Without warnings about DJL Serving: the output has its entry point and `async_mode`."""
    shutil.copytree(TINY, tmp_path / "model")
    file = tmp_path / "model" / "small.properties"
    file.write_text("".join(f"option.{name}={value}\n" for name, value in SMALL.items()))
    assert cli.main(["compile", str(file), "--output", str(tmp_path / "out")]) == 0
    written = {one.name: one.value for one in from_file(tmp_path / "out")}
    assert (written["n_positions"], written["max_rolling_batch_size"]) == ("128", "2")
    assert (written["entryPoint"], written["async_mode"]) == ("djl_python_neuronx.handler", "true")
    assert "DJL Serving" not in capfd.readouterr().err


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """tiny-llama, compiled for the cpu backend by the command."""
    folder = tmp_path_factory.mktemp("compiled") / "out"
    pairs = [f"{name}={value}" for name, value in SMALL.items()]
    arguments = [part for pair in pairs for part in ("-o", pair)]
    assert cli.main(["compile", str(TINY), "--output", str(folder), *arguments]) == 0
    return folder


@pytest.fixture
def copied(output, tmp_path):
    """A copy of it to be harmed."""
    return Path(shutil.copytree(output, tmp_path / "copy"))


def test_the_output_says_the_same(output):
    assert answer(output) == {"generated_text": " Thursday Friday"}
    options, pinned = options_of(TINY, **SMALL), options_of(output)
    assert (pinned.n_positions, pinned.max_rolling_batch_size, pinned.model_loader) == (
        128,
        2,
        "cpu",
    )
    assert pinned.context_length_estimate == options.context_length_estimate


def test_an_output_keeps_its_pins_by_its_name(output, tmp_path):
    named = options_of(tmp_path, model_id=str(output))
    assert (named.n_positions, named.max_rolling_batch_size) == (128, 2)
    # Who sets another value has it.
    changed = options_of(tmp_path, model_id=str(output), max_rolling_batch_size="3")
    assert changed == named.model_copy(update={"max_rolling_batch_size": 3})


def test_a_manifest_gives_no_leave_to_run_code(copied, tmp_path):
    path = copied / "manifest.json"
    manifest = json.loads(path.read_text())
    leave = {"trust_remote_code": True, "nxdi_model_code_unverified": True}
    manifest["effective_options"] |= {**leave, "max_waiting": 7}
    manifest["facts"]["graph_options"] |= leave
    path.write_text(json.dumps(manifest))
    (tmp_path / "empty").mkdir()
    options = options_of(tmp_path / "empty", model_id=str(copied))
    assert {name: getattr(options, name) for name in leave} == dict.fromkeys(leave, False)
    assert options.max_waiting == 7


def test_the_output_pins_what_followed_from_the_machine(output):
    settings = {setting.name: setting for setting in from_file(output)}
    assert settings["entryPoint"].value == "djl_python_neuronx.handler"
    assert settings["dtype"].value == "float32"
    assert settings["async_mode"].value == "true"
    assert not {"model_dir", "model_id"} & set(settings)
    artifact = formats.detect(output)
    assert (artifact.format, artifact.backend) == ("djl_neuronx", "cpu")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_changed_file_is_refused_though_its_size_is_right(copied, name):
    content = bytearray((copied / name).read_bytes())
    content[-2] ^= 1
    (copied / name).write_bytes(content)
    with pytest.raises(ArtifactError, match=name.replace(".", r"\.")):
        Service.load(None, copied)


def test_changed_pins_are_refused_though_their_size_is_right(copied):
    pins = copied / "serving.properties"
    text = pins.read_text()
    assert "option.n_positions=128" in text
    pins.write_text(text.replace("option.n_positions=128", "option.n_positions=256"))
    with pytest.raises(ArtifactError, match=r"changed serving\.properties"):
        Service.load(None, copied)


def test_a_cut_file_is_refused(copied):
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match=r"model\.safetensors"):
        Service.load(None, copied)


def test_an_output_of_graphs_compiles_nothing(machine, options, tmp_path):
    environ = machine.environ
    made = compile_model(str(TINY), str(tmp_path / "out"), environ=environ, overrides=options)
    assert {f"compiled/{name}" for name in GRAPHS} <= made.files.keys()
    shutil.rmtree(tmp_path / "cache")
    machine.set(SERVING_DOWNLOAD_DIR=tmp_path / "elsewhere")
    assert load(machine, {}, tmp_path / "out") == (0, 0)
    # By its name it is the same: what was compiled is known, whoever reads serving.properties.
    (tmp_path / "other").mkdir()
    named = {"model_id": str(tmp_path / "out"), "skip_warmup": "true"}
    assert load(machine, named, tmp_path / "other") == (0, 0)
    assert machine.compiled() == GRAPHS
    with pytest.raises(ArtifactMismatchError) as caught:
        load(machine, {**named, "max_rolling_batch_size": "4"}, tmp_path / "other")
    assert caught.value.differences == {"max_rolling_batch_size": (2, 4)}
    (tmp_path / "cache").mkdir()
    anew = {**named, "max_rolling_batch_size": "4", "on_mismatch": "recompile"}
    anew["compiled_graph_path"] = options["compiled_graph_path"]
    assert load(machine, anew, tmp_path / "other") == (0, 1)
    assert machine.compiled() == 2 * GRAPHS


def test_another_version_of_this_package_compiles_nothing_again(
    machine, options, tmp_path, monkeypatch
):
    """A version from git changes with each commit: it is recorded and decides nothing."""
    real, ours = metadata.version, "djl-python-neuronx"
    installed = {}
    monkeypatch.setattr(metadata, "version", lambda name: installed.get(name) or real(name))
    for number in ("0.1.0", "0.1.1.dev3+g78251c299.d20261123"):
        installed[ours] = number
        out = tmp_path / number
        made = compile_model(str(TINY), str(out), environ=machine.environ, overrides=options)
        assert (made.package_version, made.packages[ours]) == (number, number)
        assert machine.compiled() == GRAPHS
    assert load(machine, {}, tmp_path / "0.1.0") == (0, 0)
    assert machine.compiled() == GRAPHS


def test_weights_are_cut_beside_copies_of_the_stored_graphs(machine, options, tmp_path, caplog):
    caplog.set_level("INFO")
    out, stored = tmp_path / "out", tmp_path / "cache"
    arguments = {"environ": machine.environ, "overrides": options, "weights": "presharded"}
    made = compile_model(str(TINY), str(out), **arguments)
    assert machine.compiled() == GRAPHS
    assert "cutting_weights elapsed_s=" in caplog.text
    assert "graph=0/0" not in caplog.text
    cut = {name for name in made.files if name.endswith(".safetensors")}
    layers = json.loads((TINY / "config.json").read_text())["num_hidden_layers"]
    assert cut == {
        "compiled/DecoderLMHead.safetensors",
        *(f"compiled/decoder_layer_{i}.safetensors" for i in range(layers)),
    }
    # Another user may serve it, as a container does: safetensors 0.8 writes files for their owner alone.
    usual = (tmp_path / "usual").touch() or (tmp_path / "usual").stat().st_mode
    assert {name: (out / name).stat().st_mode for name in made.files} == dict.fromkeys(
        made.files, usual
    )
    # The inner folder may be named as a folder of graphs; by itself it is no model.
    manifests.verify(out / "compiled", manifests.read(out / "compiled"), exact=False)
    inner = check(str(out / "compiled"), environ=machine.environ, overrides={})
    assert "compiled graphs and no model" in str(inner.findings.errors[0])
    # What the library writes into the output never reaches the store, and the store holds no weights.
    assert all((out / "compiled" / name).stat().st_nlink == 1 for name in GRAPHS)
    assert not list(stored.rglob("*.safetensors"))
    artifact = formats.detect(out)
    assert (artifact.format, artifact.backend, artifact.kind) == (
        "djl_neuronx",
        "tnx",
        "presharded",
    )
    report = check(str(out), environ=machine.environ, overrides={})
    assert not report.findings.errors
    assert report.resolved.options.on_device_embedding
    assert report.prepared.planned.arguments.neuron_config["on_device_embedding"]
    # Cut for one core, they serve no other number of them.
    other = {"tensor_parallel_degree": "2"}
    refused = check(str(out), environ=machine.environ, overrides=other)
    assert any("tensor_parallel_degree" in str(error) for error in refused.findings.errors)
    # An output without a checkpoint cannot be the source of another.
    with pytest.raises(ArtifactError, match="Compile the checkpoint"):
        compile_model(str(out), str(tmp_path / "again"), environ=machine.environ)


def test_nothing_is_left_of_weights_whose_cut_failed(machine, options, tmp_path):
    arguments = {"environ": machine.environ, "overrides": options}
    compile_model(str(TINY), str(tmp_path / "plain"), **arguments)
    machine.set(TOYC_FAIL="the device is gone")
    before = sorted(path.name for path in tmp_path.iterdir())
    overrides = {**options, "n_positions": "64", "context_length_estimate": "64"}
    arguments = {"environ": machine.environ, "overrides": overrides, "weights": "presharded"}
    with pytest.raises(CompileError, match="the device is gone"):
        compile_model(str(TINY), str(tmp_path / "out"), **arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_the_cpu_backend_cuts_no_weights(tmp_path, capsys):
    command = ["compile", str(TINY), "--output", str(tmp_path / "out"), "--weights", "presharded"]
    assert cli.main([*command, "-o", "model_loader=cpu"]) == 1
    assert "the cpu backend reads no weights that are cut" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("excluded", "message"),
    [
        (
            {"shard_over_sequence": "true", "group_query_attention": "replicated-heads"},
            "cannot load the weights that it has cut",
        ),
        (
            {"override_neuron_config": '{"on_device_embedding": false}'},
            "override_neuron_config sets on_device_embedding=false",
        ),
    ],
)
def test_what_excludes_cut_weights_is_refused_before_the_compile(
    machine, options, tmp_path, excluded, message
):
    settings = {**options, **excluded, "tensor_parallel_degree": "4"}
    with pytest.raises(IncompatibleOptionsError, match=message):
        compile_model(
            str(TINY),
            str(tmp_path / "out"),
            environ=machine.environ,
            overrides=settings,
            machine=named("inf2.24xlarge"),
            weights="presharded",
        )
    assert machine.compiled() == []


def test_an_output_keeps_to_its_compilers_flags(machine, options, tmp_path):
    machine.set(NEURON_CC_FLAGS="-O1")
    out = tmp_path / "out"
    compile_model(str(TINY), str(out), environ=machine.environ, overrides=options)
    assert load(machine, {}, out) == (0, 0)
    machine.set(NEURON_CC_FLAGS="-O3")
    with pytest.raises(ArtifactMismatchError) as caught:
        load(machine, {}, out)
    assert caught.value.differences == {"cc_flags": (("-O1",), ("-O3",))}
    shutil.rmtree(tmp_path / "cache" / "djl-neuronx")
    anew = {"compiled_graph_path": options["compiled_graph_path"]}
    assert load(machine, {**anew, "on_mismatch": "recompile"}, out) == (0, 1)
    assert machine.compiled() == 2 * GRAPHS


def test_a_graph_that_was_changed_is_refused(machine, options, tmp_path):
    out = tmp_path / "out"
    compile_model(str(TINY), str(out), environ=machine.environ, overrides=options, weights="copy")
    graph = out / "compiled" / GRAPHS[0]
    content = graph.read_text()
    graph.unlink()  # it is a link to the store's
    graph.write_text(content[::-1])
    with pytest.raises(ArtifactError, match=GRAPHS[0]):
        load(machine, {}, out)


def test_djls_partition(tmp_path):
    out = tmp_path / "out"
    handler.partition(Inputs(save_mp_checkpoint_path=str(out), **SMALL))
    # The script then writes its own properties and copies the source's small files over ours.
    (out / "serving.properties").write_text("engine=Python\noption.n_positions=128\n")
    for path in TINY.glob("*.json"):
        shutil.copy(path, out)
    assert options_of(out, model_loader="cpu").n_positions == 128


@pytest.mark.parametrize(
    ("properties", "error", "words"),
    [
        ({}, InvalidOptionError, "save_mp_checkpoint_path"),
        ({"partition_schema": "optimum"}, IncompatibleOptionsError, "read but not written"),
    ],
)
def test_what_partition_refuses(tmp_path, properties, error, words):
    if properties:
        properties = {**properties, "save_mp_checkpoint_path": str(tmp_path / "out")}
    with pytest.raises(error, match=words):
        handler.partition(Inputs(**properties, **SMALL))


def test_convert_there_and_back(tmp_path):
    split, whole = tmp_path / "split", tmp_path / "whole"
    assert cli.main(["convert", str(TINY), str(split), "--to", "split"]) == 0
    assert formats.detect(split).kind == "split"
    assert cli.main(["convert", str(split), str(whole), "--to", "safetensors"]) == 0
    assert formats.detect(whole).kind == "safetensors"


def test_an_output_that_holds_something_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    status = cli.main(["compile", str(TINY), "--output", str(tmp_path), "-o", "model_loader=cpu"])
    assert status == 1
    assert "mine.txt" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_destination_is_judged_before_the_compile(tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("mine")
    monkeypatch.setattr(partition, "obtain", pytest.fail)
    with pytest.raises(ArtifactError, match=r"mine\.txt"):
        compile_model(str(TINY), str(tmp_path), environ={}, overrides=SMALL)
