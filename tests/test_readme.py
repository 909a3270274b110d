"""The README's quick start gives the answers that it shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from djl_python_neuronx.engine.streams import BlockingQueue
from tests.protocol.wire_schemas import SCHEMAS

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "tiny-llama"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def shown() -> list[tuple[dict[str, Any], list[Any]]]:
    """Each curl's body with the lines that the README shows as its answer; a long one goes on behind a blank."""
    (block,) = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    found = []
    for part in block.split("$ curl ")[1:]:
        command, *lines = part.strip().replace("\n ", "").splitlines()
        body = re.search(r"-d '(.*)'$", command)
        assert body is not None
        found.append((json.loads(body[1]), [json.loads(line) for line in lines]))
    return found


def rounded(value: Any) -> Any:
    """The same without what differs between machines and answers: log-probabilities, times and ids of chats."""
    if isinstance(value, dict):
        return {
            name: rounded(inner)
            for name, inner in value.items()
            if name not in ("log_prob", "created") and not str(inner).startswith("chatcmpl-")
        }
    return value


@pytest.fixture(scope="module")
def service() -> Iterator[Any]:
    pytest.importorskip("torch", reason="needs the `cpu` extra")
    from djl_python_neuronx.service import Service

    service = Service.load(
        None,
        EXAMPLE,
        environ={},
        overrides={"model_loader": "cpu", "max_rolling_batch_size": "8"},
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
    for body, lines in examples:
        (answer,) = answers(service, [body])
        assert [rounded(json.loads(line)) for line in answer.splitlines()] == rounded_all(lines)


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


def rounded_all(lines: list[Any]) -> list[Any]:
    return [rounded(line) for line in lines]
