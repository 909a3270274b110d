"""Servers that a model folder's own `serving.properties` names: what arrives there, and at the operator's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

pytest.importorskip("boto3", reason="boto3 is not installed")

from huggingface_hub import constants

from djl_python_neuronx.config import trust
from djl_python_neuronx.errors import ServingError
from djl_python_neuronx.loading.check import check
from djl_python_neuronx.loading.partition import compile_model, partition
from djl_python_neuronx.loading.prepare import prepare_or_raise
from djl_python_neuronx.loading.report import as_json
from djl_python_neuronx.service import Service
from tests.doubles import remote_doubles
from tests.doubles.neuron_machine import TINY

pytest_plugins = ["tests.doubles.neuron_fixtures"]

KEYS = {
    "HF_TOKEN": "hf_operator",
    "AWS_ACCESS_KEY_ID": "OPERATOR",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_SESSION_TOKEN": "session",
    "AWS_REGION": "us-east-1",
}
CONFIG = json.dumps({"model_type": "llama"}).encode()
MODELS = {"hub": "owner/model", "s3": "s3://bucket/model"}


class Servers:
    """A hub and an S3 of a stranger's, and the operator's own."""

    def __init__(self, stranger, own):
        self._stranger, self._own = stranger, own
        self.named = {"HF_ENDPOINT": stranger[0][0], "AWS_ENDPOINT_URL": stranger[1][0]}
        self.operators = {"HF_ENDPOINT": own[0][0], "AWS_ENDPOINT_URL": own[1][0]}

    @staticmethod
    def _headers(servers):
        logs = [
            {k.lower(): v for k, v in headers.items()}
            for _, log in servers
            for _, path, headers in log
            if path != "/api/agent-harnesses"  # of the library, for its own statistics
        ]
        return [
            headers.get("authorization", "") + headers.get("x-amz-security-token", "")
            for headers in logs
        ]

    def seen(self):
        """Headers that identified the sender, request by request: to the stranger's servers, and to the operator's."""
        return self._headers(self._stranger), self._headers(self._own)


@pytest.fixture
def servers(tmp_path, monkeypatch):
    for name in ("AWS_PROFILE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**KEYS, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    hub, s3 = {MODELS["hub"]: CONFIG}, {"bucket/model/config.json": CONFIG}
    with (
        remote_doubles.hub(hub) as one,
        remote_doubles.s3(s3) as two,
        remote_doubles.hub(hub) as three,
        remote_doubles.s3(s3) as four,
    ):
        yield Servers((one, two), (three, four))


def environment(servers, tmp_path, **more):
    places = {"HF_HOME": str(tmp_path / "hf"), "SERVING_DOWNLOAD_DIR": str(tmp_path / "got")}
    return {**KEYS, **servers.operators, **places, **more}


def stranger(tmp_path, servers, model, *more):
    """A folder whose file names the stranger's servers, and the variables as Java adds them."""
    folder = tmp_path / "model"
    folder.mkdir()
    added = {**servers.named, **dict(pair.split("=") for pair in more)}
    line = ",".join(f"{name}={value}" for name, value in added.items())
    (folder / "serving.properties").write_text(f"option.env={line}\noption.model_id={model}\n")
    return folder, added


def start(door, folder, environ, added, monkeypatch, model):
    """Go through a door; without weights none gets far."""
    if door in {"djl", "partition"}:
        for name, value in added.items():
            monkeypatch.setenv(name, value)
        environ = {**environ, **added}
    passed = {"model_dir": str(folder), "model_id": model}
    calls = {
        "check": lambda: check(str(folder), environ=environ, overrides={}),
        "serve": lambda: Service.load(None, folder, environ=environ),
        "compile": lambda: compile_model(str(folder), str(folder.parent / "out"), environ=environ),
        "djl": lambda: Service.load(passed, folder, environ=environ),
        "partition": lambda: partition(passed, environ=environ),
    }
    with nullcontext() if door == "check" else pytest.raises(ServingError):
        calls[door]()


FORGOTTEN = """
import os
from pathlib import Path
from djl_python_neuronx.config.sources import environment
from djl_python_neuronx.errors import ServingError
from djl_python_neuronx.service import Service
folder = os.environ["FOLDER"]
try:
    Service.load({"model_dir": folder, "model_id": "owner/model"}, Path(folder), environ=environment())
except ServingError:
    from huggingface_hub import constants
    print(constants.ENDPOINT, constants.HF_HUB_CACHE, {*os.environ} & {"https_proxy", "SSL_CERT_FILE"})
"""


def test_libraries_are_imported_without_what_java_has_set(tmp_path):
    """They read the process's variables once, at their import."""
    added = {"HF_ENDPOINT": "http://evil", "HF_HOME": f"{tmp_path}/evil", "https_proxy": "evil"}
    added["SSL_CERT_FILE"] = "/evil"
    line = ",".join(f"{name}={value}" for name, value in added.items())
    (tmp_path / "serving.properties").write_text(f"option.env={line}\n")
    told = subprocess.run(
        [sys.executable, "-c", FORGOTTEN],
        env={
            **{n: os.environ[n] for n in ("PATH", "PYTHONPATH") if n in os.environ},
            **added,
            "FOLDER": str(tmp_path),
            "HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "1",
        },
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    assert told == f"https://huggingface.co {tmp_path}/.cache/huggingface/hub set()\n"


def tree(folder):
    return {str(path): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


@pytest.mark.parametrize(
    "line",
    [
        "NEURON_COMPILE_CACHE_URL={evil}",
        "NEURON_CC_FLAGS=-O1 --cache_dir={evil}",
        "XLA_FLAGS=--xla_dump_to={evil}",
    ],
)
def test_compiled_files_go_where_the_operator_says(line, machine, options, tmp_path):
    evil = tmp_path / "evil"
    evil.mkdir()
    model = shutil.copytree(TINY, tmp_path / "model")
    line = line.format(evil=evil)
    (model / "serving.properties").write_text(f"option.env={line}\n")
    name, before = line.partition("=")[0], tree(tmp_path)
    cache = options.pop("compiled_graph_path")
    environ = {**machine.environ, "NEURON_COMPILE_CACHE_URL": cache}
    report = check(str(model), environ=environ, overrides=options)
    assert f"sets {name}" in json.dumps(as_json(report)["warnings"])
    assert tree(tmp_path) == before
    compile_model(str(model), str(tmp_path / "out"), environ=environ, overrides=options)
    assert "option.env" not in (tmp_path / "out" / "serving.properties").read_text()
    Service.load(None, model, environ=environ, overrides=options).close()
    assert not list(evil.rglob("*"))
    del environ["NEURON_COMPILE_CACHE_URL"]
    seen = prepare_or_raise(None, model, environ={**environ, trust.TRUST: name}, overrides=options)
    assert seen.environ[name] == line.partition("=")[2]


DOORS = ("check", "serve", "compile", "djl", "partition")


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("door", DOORS)
def test_a_strangers_server_is_not_asked(door, model, tmp_path, servers, monkeypatch):
    folder, added = stranger(tmp_path, servers, model, f"HF_HOME={tmp_path}/evil")
    if door in {"djl", "partition"}:  # Java has replaced the operator's value, the default counts
        monkeypatch.setattr(constants, "ENDPOINT", servers.operators["HF_ENDPOINT"])
    environ = environment(servers, tmp_path, AWS_MAX_ATTEMPTS="1")
    start(door, folder, environ, added, monkeypatch, model)
    told, own = servers.seen()
    assert told == []
    assert not (tmp_path / "evil").exists()
    if model == MODELS["hub"] or door in {"check", "serve", "compile"}:
        assert own
        assert all("hf_operator" in value or "OPERATOR" in value for value in own)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("door", ["check", "djl"])
def test_they_arrive_where_the_operator_allows_it(door, model, tmp_path, servers, monkeypatch):
    folder, added = stranger(tmp_path, servers, model)
    environ = environment(servers, tmp_path, **{trust.TRUST: "HF_ENDPOINT,AWS_ENDPOINT_URL"})
    start(door, folder, environ, added, monkeypatch, model)
    told, _ = servers.seen()
    assert told
    assert all("hf_operator" in value or "OPERATOR" in value for value in told)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_files_own_credentials_arrive(model, tmp_path, servers, monkeypatch):
    mine = ("HF_TOKEN=hf_mine", "AWS_ACCESS_KEY_ID=MINE", "AWS_SECRET_ACCESS_KEY=mine")
    folder, added = stranger(tmp_path, servers, model, *mine)
    environ = environment(servers, tmp_path)
    start("serve", folder, environ, added, monkeypatch, model)
    _, own = servers.seen()
    assert own
    assert all("hf_mine" in value or "MINE" in value for value in own)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("door", DOORS)
def test_ordinary_use_keeps_its_credentials(door, model, tmp_path, servers, monkeypatch):
    folder, _ = stranger(tmp_path, servers, model)
    text = f"option.env=NEURON_CC_FLAGS=-O1,OMP_NUM_THREADS=4\noption.model_id={model}\n"
    (folder / "serving.properties").write_text(text)
    start(door, folder, environment(servers, tmp_path), {}, monkeypatch, model)
    told, own = servers.seen()
    assert (told, bool(own)) == ([], True)
    assert all("hf_operator" in value or "OPERATOR" in value for value in own)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_no_credentials_of_the_machine_or_a_login(model, tmp_path, servers, monkeypatch):
    """A file of the folder would run a program for credentials; a login's token lies in the home."""
    login, program = tmp_path / "token", tmp_path / "config"
    login.write_text("hf_login")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(login))
    program.write_text(f"[profile x]\ncredential_process = touch {tmp_path}/ran\n")
    names = (f"AWS_CONFIG_FILE={program}", "AWS_PROFILE=x")
    folder, added = stranger(tmp_path, servers, model, *names)
    environ = environment(servers, tmp_path, AWS_MAX_ATTEMPTS="1")
    for name in KEYS.keys() - {"AWS_REGION"}:
        monkeypatch.delenv(name)
        del environ[name]
    for door in ("djl", "check"):
        start(door, folder, environ, added, monkeypatch, model)
    assert servers.seen()[0] == []
    assert not (tmp_path / "ran").exists()
    allowed = {**environ, trust.TRUST: ",".join(added)}
    start("djl", folder, allowed, added, monkeypatch, model)
    assert (tmp_path / "ran").exists() or "Bearer hf_login" in servers.seen()[0]
