"""The released engine, one JVM for each of DJL Serving's three modes."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager

import pytest

from djl_python_neuronx.service import Service
from tests.clients.answers import TOOL_TEMPLATE
from tests.clients.front import Answer, front
from tests.djl.folders import MAX_RUNNING, MAX_WAITING, MODEL, MODES, write_model
from tests.djl.questions import CHECKS, body


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
        chat_template=TOOL_TEMPLATE,
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


@contextmanager
def answering(**overrides):
    """A service of this process; yields a function from a body to the content of its answer."""
    service = Service.load(None, MODEL, overrides={"engine_process": "false", **overrides})

    async def content(body):
        parsed = service.parse(json.dumps(body).encode())
        deltas = service.loop.generate(service.loop.prepare(*parsed.requests))
        return b"".join([parsed.formatter.feed(delta) async for delta in deltas])

    yield lambda body: asyncio.run(content(body))
    service.close()


@pytest.fixture(scope="session")
def alone():
    """Answer a body as the cpu backend does by itself."""
    with answering(model_loader="cpu", max_rolling_batch_size=str(MAX_RUNNING)) as answer:
        yield answer


@pytest.fixture(scope="session")
def made_up():
    """The texts that follow the prompts of `CHECKS` on a simulated device by itself."""
    with answering(model_loader="sim", sim_step_ms="0") as answer:
        bodies = [body(check["prompt"], check["max_new_tokens"]) for check in CHECKS[:24]]
        return [json.loads(answer(each))["generated_text"] for each in bodies]
