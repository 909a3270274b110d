"""Credentials that a user wrote into a URI: nothing that people or files get to see repeats them."""

from __future__ import annotations

import json
import logging
import traceback
from contextlib import suppress

import pytest

from djl_python_neuronx import cli
from djl_python_neuronx.errors import ServingError
from djl_python_neuronx.loading.check import Placement, check
from djl_python_neuronx.loading.partition import compile_model
from djl_python_neuronx.loading.prepare import prepare_or_raise
from djl_python_neuronx.loading.report import as_json, render
from djl_python_neuronx.planning.machines import named
from tests.doubles.neuron_machine import TINY

S3 = "s3://AKIADUMMYDUMMYDUMMY0:dummy/Dummy+dummyDUMMYdummyDUMMYdummy00@bucket/llama"
HTTPS = "https://me:DUMMY/pass@host.invalid/x?X-Amz-Signature=DUMMY"
CPU = {"model_loader": "cpu", "n_positions": "64", "max_rolling_batch_size": "1"}
TNX = {"model_loader": "tnx", "n_positions": "64", "tensor_parallel_degree": "1"}
OVERRIDES = {
    "the model": {"model_id": S3},
    "a model of another scheme": {"model_id": HTTPS},
    "the draft model": {**TNX, "speculative_draft_model": S3, "speculative_length": "3"},
    "the compiled graphs": {**TNX, "compiled_graph_path": S3},
    "the output": {**CPU, "save_mp_checkpoint_path": S3},
    "a number": {**CPU, "max_rolling_batch_size": S3},
    "a value of a choice": {**CPU, "model_loader": HTTPS},
    "an object": {**CPU, "override_neuron_config": json.dumps({"a": S3})},
    "an old name": {**CPU, "load_split_model": S3},
    "an unknown option": {**CPU, S3: S3},
    "a name of another era": {**CPU, "max_loras": S3},
    "two names": {**CPU, "n_positions": S3, "max_model_len": HTTPS},
    "DJL's own": {**CPU, "minWorkers": S3},
}
VARIABLES = {
    "OPTION_MODEL_ID": S3,
    "HF_MODEL_ID": S3,
    "NEURON_COMPILE_CACHE_URL": S3,
    "NEURON_CC_FLAGS": f"--cache_dir={S3}",
    "NEURON_RT_NUM_CORES": S3,
    "OPTION_COMPILED_GRAPH_PATH": HTTPS,
    "TENSOR_PARALLEL_DEGREE": HTTPS,
}


@pytest.fixture(autouse=True)
def _machine(monkeypatch, tmp_path, caplog):
    """No network, no credentials, nothing of this machine's caches."""
    caplog.set_level(logging.DEBUG, "djl_python_neuronx")
    for name in ("HF_HOME", "SERVING_DOWNLOAD_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def shown(report, tmp_path):
    text = tmp_path / "report"
    with text.open("w") as stream:
        render(Placement((report,), report.findings, ()), stream, everything=True)
    return text.read_text() + json.dumps(as_json(report)) + repr(report.findings.errors)


@pytest.mark.parametrize("what", OVERRIDES)
def test_options(what, tmp_path, caplog):
    overrides = OVERRIDES[what]
    model = None if "model_id" in overrides else str(TINY)
    target = overrides.get("model_id", model)
    report = check(target, environ={}, overrides=overrides, machine=named("inf2.xlarge"))
    assert "DUMMY" not in shown(report, tmp_path)
    try:
        prepare_or_raise(None, model and TINY, environ={}, overrides=overrides)
    except ServingError as error:
        assert "DUMMY" not in "".join(traceback.format_exception(error))  # noqa: PT017  (some are no errors)
    assert "DUMMY" not in caplog.text


@pytest.mark.parametrize("variable", VARIABLES)
def test_variables(variable, tmp_path, caplog):
    environ = {variable: VARIABLES[variable]}
    target = None if "MODEL" in variable else str(TINY)
    report = check(target, environ=environ, overrides=TNX, machine=named("inf2.xlarge"))
    assert "DUMMY" not in shown(report, tmp_path) + caplog.text


def test_a_file(tmp_path, caplog):
    (tmp_path / "serving.properties").write_text(
        f"option.model_id={S3}\noption.dtype={S3}\nmodel_url={S3}\noption.model_url={S3}\n{S3}=x\n"
    )
    report = check(str(tmp_path), environ={}, overrides={})
    assert "DUMMY" not in shown(report, tmp_path) + caplog.text


@pytest.mark.parametrize("name", ["HF_ENDPOINT", "AWS_ENDPOINT_URL"])
@pytest.mark.parametrize(
    "url", ["http://me:DUMMY@127.0.0.1:9/x", "http://me:DUMMY/x@127.0.0.1:9", "http://DUMMY@[x"]
)
def test_endpoints(name, url, tmp_path, caplog):
    model = "owner/name" if name == "HF_ENDPOINT" else "s3://bucket/llama"
    keys = {"AWS_ACCESS_KEY_ID": "DUMMY", "AWS_SECRET_ACCESS_KEY": "DUMMY", "HF_TOKEN": "hf_DUMMY"}
    environ = {**keys, name: url, "AWS_MAX_ATTEMPTS": "1", "AWS_REGION": "us-east-1"}
    report = check(model, environ=environ, overrides={})
    assert report.findings.errors
    assert "DUMMY" not in shown(report, tmp_path) + caplog.text


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", S3],
        ["check", S3, "--json"],
        ["check", HTTPS],
        ["check", str(TINY), S3],
        ["check", str(TINY), S3, "--json"],
        ["serve", S3],
        ["serve", str(TINY), "-o", S3],
        ["serve", str(TINY), S3],
        ["compile", S3, "--output", "x"],
        ["compile", str(TINY), "--output", S3, "-o", "model_loader=cpu"],
        ["compile", str(TINY), "--output", HTTPS, "-o", "model_loader=cpu"],
        ["compile", str(TINY), "--output", "x", "--weights", S3],
        ["convert", S3, "x", "--to", "split"],
    ],
    ids=lambda arguments: " ".join(arguments[:1]),
)
def test_the_command_line(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # A server that stops ends its process half a minute later if that still runs, as this one does.
    monkeypatch.setattr("djl_python_neuronx.server.process.Server._end_late", lambda _server: None)
    with suppress(SystemExit):
        assert cli.main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.out + printed.err
    assert "DUMMY" not in printed.out + printed.err


def test_what_an_output_records(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    out = tmp_path / "out"
    environ = {"SERVING_DOWNLOAD_DIR": str(tmp_path / "downloads")}
    options = {**CPU, "compiled_graph_path": S3, "save_mp_checkpoint_path": S3}
    compile_model(str(TINY), str(out), environ=environ, overrides=options)
    for name in ("manifest.json", "serving.properties"):
        assert "DUMMY" not in (out / name).read_text()
