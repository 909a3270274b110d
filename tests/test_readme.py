"""The README's quick start gives the answers that it shows."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from djl_python_neuronx.engine.streams import BlockingQueue
from tests.known_answers import ROOT, rounded, shown
from tests.protocol.wire_schemas import SCHEMAS

EXAMPLE = ROOT / "examples" / "tiny-llama"


@pytest.fixture(scope="module")
def service() -> Iterator[Any]:
    pytest.importorskip("torch", reason="needs the `cpu` extra")
    from djl_python_neuronx.service import Service

    service = Service.load(
        None,
        EXAMPLE,
        environ={},
        overrides={
            "model_loader": "cpu",
            "max_rolling_batch_size": "8",
            "engine_process": "false",
        },
    )
    yield service
    service.close()


def answers(service: Any, bodies: Sequence[Any], path: str = "") -> list[bytes]:
    """The answers to bodies that are sent at once."""
    inbox, formatters, found = BlockingQueue(), {}, {}
    for body in bodies:
        parsed = service.parse(json.dumps(body).encode(), path=path)
        service.loop.submit(parsed.request, inbox)
        formatters[parsed.request.request_id] = parsed.formatter
        found[parsed.request.request_id] = b""
    unfinished = len(bodies)
    while unfinished:
        for delta in inbox.drain(30.0):
            found[delta.request_id] += formatters[delta.request_id].feed(delta)
            unfinished -= delta.finished
    return list(found.values())


def test_the_quick_starts_answers(service: Any) -> None:
    examples = shown()
    assert len(examples) == 3
    for path, headers, body, lines in examples:
        assert headers == {"content-type": "application/json"}, "DJL Serving takes a form apart"
        (answer,) = answers(service, [body], path=path)
        assert [rounded(json.loads(line)) for line in answer.splitlines()] == lines


@pytest.mark.parametrize(("changed", "status"), [(b"", 0), (b" Saturday", 1)])
def test_a_server_that_answers_otherwise_is_found_out(changed: bytes, status: int) -> None:
    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            (lines,) = (
                lines for path, _, asked, lines in shown() if (path, asked) == (self.path, body)
            )
            answer = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer.replace(b" Friday", b" Friday" + changed))

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        command = [sys.executable, "-I", str(ROOT / "tests/known_answers.py"), url]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        # Its answers would say nothing about the server that this command starts.
        command += [sys.executable, "-c", ""]
        other = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        server.shutdown()
    assert other.returncode == 1
    assert f"another server answers at {url}" in other.stderr
    assert ran.returncode == status, ran.stderr
    assert f"{3 - status} of 3 answers" in ran.stdout
    assert (" Friday Saturday" in ran.stdout) == bool(changed)


@pytest.mark.parametrize("stream", [False, True])
def test_the_example_models_chats(service: Any, stream: bool) -> None:
    """Greedy answers, in the model's own chat template, are those of transformers' `generate`."""
    lines = (EXAMPLE / "chat_checks.jsonl").read_text(encoding="utf-8").splitlines()
    checks = [json.loads(line) for line in lines]
    bodies = [
        {
            "model": "tiny-llama",
            "messages": check["messages"],
            "max_tokens": check["max_new_tokens"],
            "temperature": 0,
            "stream": stream,
        }
        for check in checks
    ]
    contents = answers(service, bodies, path="/v1/chat/completions")
    check = SCHEMAS["chat_sse" if stream else "chat"]
    assert [check(content).texts for content in contents] == [[one["completion"]] for one in checks]
