"""The released engine, one JVM for each of DJL Serving's three modes."""

from __future__ import annotations

import asyncio
import json
import os

import pytest

from djl_python_neuronx.service import Service
from tests.clients.front import Answer, front
from tests.djl.java import ROOT, Java, MavenError, compile_driver, missing_programs

MODEL = ROOT / "examples" / "tiny-llama"
MODES = {
    "rolling": {"rolling_batch": "tnx"},
    "async": {"async_mode": "true", "rolling_batch": "disable"},
    "plain": {"rolling_batch": "disable"},
}
MAX_RUNNING, MAX_WAITING = 8, 16


@pytest.fixture(scope="session")
def class_path(tmp_path_factory):
    """The class path of the driver. In CI everything that is missing is a failure."""
    why = missing_programs()
    if why is None:
        try:
            return compile_driver(tmp_path_factory.mktemp("classes"))
        except MavenError as error:
            why = str(error)
    return pytest.fail(why) if os.environ.get("CI") == "true" else pytest.skip(why)


@pytest.fixture(scope="session")
def engine_cache(tmp_path_factory):
    """The folder into which Java unpacks its Python engine, for all JVMs."""
    return tmp_path_factory.mktemp("djl")


@pytest.fixture(scope="session")
def start_java(class_path, engine_cache):
    """Start a JVM; the caller closes it."""

    def start(environ=None):
        return Java(class_path, engine_cache, environ)

    return start


@pytest.fixture(scope="session", params=MODES)
def mode(request):
    return request.param


@pytest.fixture(scope="session", params=["true", pytest.param("false", marks=pytest.mark.nightly)])
def engine_process(request):
    """The option's value: the engine in a process of its own, or in that of the worker."""
    return request.param


@pytest.fixture(scope="session")
def served(mode, engine_process, start_java, tmp_path_factory):
    """A JVM that serves the example model as "tiny"."""
    folder = write_model(
        tmp_path_factory.mktemp(mode),
        mode,
        max_rolling_batch_size=MAX_RUNNING,
        max_waiting=MAX_WAITING,
        engine_process=engine_process,
        served_model_name="tiny",
    )
    with start_java() as java:
        java.load("tiny", folder)
        before = java.workers()
        yield java
        assert java.workers() == before, java.tail()


@pytest.fixture(scope="session")
def url(served):
    """The URL of the model of `served` for HTTP clients: every path is its own, as in DJL Serving those that exist."""

    def ask(_path, headers, body):
        (answer,) = served.submit("tiny", body, headers=headers)
        answer.wait()
        assert not answer.errors
        return Answer(answer.status, answer.headers, answer.chunks)

    with front(ask) as url:
        yield url


def write_model(folder, mode, *, workers=1, **options):
    """A model folder for DJL: the example model on the cpu backend. `workers`: number of Python processes."""
    options = {
        "entryPoint": "djl_python_neuronx.handler",
        "model_id": MODEL,
        "model_loader": "cpu",
        **MODES[mode],
        **options,
    }
    lines = ["engine=Python", "retry_threshold=10"]
    lines += [f"minWorkers={workers}", f"maxWorkers={workers}"]
    lines += [f"option.{name}={value}" for name, value in options.items()]
    (folder / "serving.properties").write_text("\n".join(lines) + "\n")
    return folder


def write_toy(folder, mode, **options):
    """A model folder for DJL with the toy backend of `tests.doubles.djl_entry`."""
    lines = ["engine=Python", "option.entryPoint=tests.doubles.djl_entry"]
    lines += [f"option.{name}={value}" for name, value in {**MODES[mode], **options}.items()]
    (folder / "serving.properties").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session")
def alone():
    """Answer a body with a service of this process: what the cpu backend gives by itself."""
    service = Service.load(
        None, MODEL, overrides={"model_loader": "cpu", "max_rolling_batch_size": str(MAX_RUNNING)}
    )

    async def content(body):
        parsed = service.parse(json.dumps(body).encode())
        deltas = service.loop.generate(service.loop.prepare(*parsed.requests))
        return b"".join([parsed.formatter.feed(delta) async for delta in deltas])

    yield lambda body: asyncio.run(content(body))
    service.close()
