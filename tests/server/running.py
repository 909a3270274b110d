"""A served application in a thread of the test, and requests for its toy model."""

from __future__ import annotations

import json
import os
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the `server` extra")
httpx = pytest.importorskip("httpx", reason="needs httpx")
from djl_python_neuronx import backends  # noqa: E402
from djl_python_neuronx.server.app import Application  # noqa: E402
from djl_python_neuronx.server.models import Model  # noqa: E402
from djl_python_neuronx.server.process import Server  # noqa: E402
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend, expected  # noqa: E402
from tests.doubles.toy_service import toy_service  # noqa: E402
from tests.doubles.toy_tokenizer import TOKENIZER, ToyTokenizer  # noqa: E402
from tests.processes import PATIENCE_S, wait_until  # noqa: E402

CROSSING_S = 0.02
"""A step that is so slow that an abort reaches the engine long before a sequence of a hundred tokens ends."""
# As httpx.get and httpx.post, a connection per request, but those wait for five seconds only.
http = httpx.Client(timeout=PATIENCE_S, limits=httpx.Limits(max_keepalive_connections=0))


class Running:
    """A server on a free port of 127.0.0.1, in a thread."""

    def __init__(self, application: Application, drain_s: float = 5.0, **edges: Any) -> None:
        """`edges`: more arguments of `Server`."""
        self.application = application
        self._server = Server(application, "127.0.0.1", 0, drain_s, **edges)
        # An end by force has status 0 after a drain: here it would end the tests as if all had passed.
        self._server._end_late = lambda: os._exit(1)  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started)
        self.port: int = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)


def num_descriptors(pid: int | str = "self") -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def body(prompt: list[int], max_new_tokens: int = 5, **more: Any) -> dict[str, Any]:
    parameters = {
        "max_new_tokens": max_new_tokens,
        "ignore_eos": True,
        **more.pop("parameters", {}),
    }
    return {"inputs": "".join(f"<{i}>" for i in prompt), "parameters": parameters, **more}


def answer(prompt: list[int], num_tokens: int = 5) -> str:
    return TOKENIZER.decode(expected([1, *prompt], num_tokens))


@contextmanager
def serving(
    backend: ToyBackend | None = None,
    tls: ssl.SSLContext | None = None,
    api_keys: Sequence[bytes] = (),
    **options: Any,
) -> Iterator[Running]:
    """A server of a toy with these options."""
    backend = backend or ToyBackend(replace(TOY_SPEC, num_slots=2))
    application = Application(Model("toy"))
    application.models[0].service = toy_service(backend, **options)
    running = Running(application, tls=tls, api_keys=api_keys)
    try:
        yield running
    finally:
        backend.resume.set()
        running.close()
        application.models[0].service.close()


@contextmanager
def serving_tiny(folder: Path, **facts: Any) -> Iterator[Running]:
    """A server of a tiny model on the CPU, with four slots. `facts`: more fields of its `LoadPlan`."""
    from tests.doubles.tiny_models import MAX_POSITIONS, VOCAB_SIZE  # needs torch

    plan = backends.LoadPlan(folder, 4, MAX_POSITIONS, (8, 16, 40), num_threads=1, **facts)
    application = Application(Model("tiny"))
    application.models[0].service = toy_service(
        backends.get("cpu").load(plan), tokenizer=ToyTokenizer(VOCAB_SIZE)
    )
    running = Running(application)
    try:
        yield running
    finally:
        running.close()


TINY_LLAMA = Path(__file__).parents[2] / "examples" / "tiny-llama"


def checks() -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (TINY_LLAMA / "checks.jsonl").read_text(encoding="utf-8").splitlines()
    ]
