"""An installed DJL Serving (`DJL_SERVING_HOME`) over HTTP: what its HTTP front and its worker threads decide."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.djl.folders import write_model, write_toy
from tests.djl.java import ROOT
from tests.djl.questions import CHECKS, TOY_TEXT, toy_body
from tests.processes import PATIENCE_S, command_line, held_port, tree, wait_gone, wait_until

httpx = pytest.importorskip("httpx", reason="needs httpx")
pytest.importorskip("torch", reason="needs the `cpu` extra")
HOME = os.environ.get("DJL_SERVING_HOME", "")
pytestmark = [
    pytest.mark.djl,
    pytest.mark.skipif(not HOME, reason="needs an installed DJL Serving: set DJL_SERVING_HOME"),
]
READ_TIMEOUT_S = 2
KEYS = {"minWorkers": 1, "maxWorkers": 1, "retry_threshold": 3}
"""In place of those of `write_model`, as in serving.properties.example."""


class Server:
    """DJL Serving with a folder of models; its log is in the folder above."""

    def __init__(self, models):
        self._temporary = tempfile.mkdtemp(prefix="djl-")  # sockets: a short path
        self._held = ExitStack()
        url = f"http://127.0.0.1:{self._held.enter_context(held_port())}"
        self.client = httpx.Client(base_url=url, timeout=PATIENCE_S)
        self.log = models.parent / "server.log"
        config = models.parent / "config.properties"
        config.write_text(
            f"inference_address={url}\nmanagement_address={url}\nmodel_store={models}\nload_models=ALL\n"
        )
        search_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environ = {
            **os.environ,
            "PYTHON_EXECUTABLE": sys.executable,
            "PYTHONPATH": search_path,
            "TMPDIR": self._temporary,
            "JAVA_OPTS": f"-Djava.io.tmpdir={self._temporary}",
            "DJL_CACHE_DIR": str(models.parent / "cache"),
            "MODEL_SERVER_HOME": str(models.parent),
            "OPT_OUT_TRACKING": "true",
            "SERVING_CHUNKED_READ_TIMEOUT": str(READ_TIMEOUT_S),
        }
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [Path(HOME, "bin", "serving"), "-f", config],
                env=environ,
                cwd=models.parent,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def health(self):
        """Status of `/ping`, and of each model; 0 and nothing while the port is not bound."""
        try:
            answer = self.client.get("/ping")
        except httpx.ConnectError:
            return 0, {}
        return answer.status_code, {
            name: one["status"].upper() for name, one in answer.json().items()
        }

    def ask(self, model, request):
        return self.client.post(f"/predictions/{model}", json=request)

    def worker(self, model):
        """The process of a model."""
        (found,) = [
            pid
            for pid in tree(self._process.pid)
            if any(word.endswith(f"/models/{model}") for word in command_line(pid))
        ]
        return found

    def tail(self):
        return self.log.read_text(errors="replace")[-5000:]

    def close(self):
        self._held.close()
        self.client.close()
        processes = tree(self._process.pid)
        for pid in processes:
            os.kill(pid, signal.SIGTERM)
        self._process.wait(PATIENCE_S)
        wait_gone(processes)
        shutil.rmtree(self._temporary, ignore_errors=True)


def write_keys(folder):
    """The keys of serving.properties.example."""
    file = folder / "serving.properties"
    kept = [line for line in file.read_text().splitlines() if line.partition("=")[0] not in KEYS]
    file.write_text("\n".join([*kept, *(f"{name}={value}" for name, value in KEYS.items()), ""]))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    models = tmp_path_factory.mktemp("server") / "models"
    for name in ("tiny", "broken", "late_async", "late_rolling"):
        (models / name).mkdir(parents=True)
    write_model(models / "tiny", "async")
    write_model(models / "broken", "async", dtyp="fp32")
    write_toy(models / "late_async", "async", toy_step_s=0.05)
    write_toy(models / "late_rolling", "rolling", toy_step_s=0.05)
    for folder in models.iterdir():
        write_keys(folder)
    server = Server(models)
    yield server
    server.close()


def ask_tiny(server):
    check = CHECKS[0]
    parameters = {"max_new_tokens": check["max_new_tokens"]}
    return server.ask("tiny", {"inputs": check["prompt"], "parameters": parameters})


def test_a_model_that_cannot_load_fails_alone(server):
    wait_until(lambda: server.health()[1].get("broken") == "FAILED", server.tail)
    status, models = server.health()
    assert status == 500
    assert {name for name, one in models.items() if one == "HEALTHY"} == models.keys() - {"broken"}
    assert "unknown option 'dtyp'" in server.log.read_text()
    assert server.ask("broken", toy_body()).status_code == 503
    assert ask_tiny(server).json() == {"generated_text": CHECKS[0]["completion"]}


@pytest.mark.parametrize("model", ["late_async", "late_rolling"])
def test_a_json_answer_arrives_that_takes_longer_than_chunked_read_timeout(server, model):
    wait_until(lambda: server.health()[0], server.tail)
    answer = server.ask(model, toy_body())
    assert answer.content.startswith(b" ")  # what holds the connection open meanwhile
    assert answer.status_code == 200
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.content.startswith(b" ")
    assert json.loads(answer.content) == {"generated_text": TOY_TEXT}


def test_a_killed_process_is_started_again_within_retry_threshold(server):
    wait_until(lambda: server.health()[0], server.tail)
    first = server.worker("tiny")
    processes = tree(first)
    os.kill(first, signal.SIGKILL)
    wait_gone(processes)
    wait_until(lambda: ask_tiny(server).status_code == 200, server.tail)
    assert ask_tiny(server).json() == {"generated_text": CHECKS[0]["completion"]}
    assert server.health()[1]["tiny"] == "HEALTHY"
    assert server.worker("tiny") != first
