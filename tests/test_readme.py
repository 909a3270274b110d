"""The README's quick start gives the answers that it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from djl_python_neuronx.engine.streams import BlockingQueue

ROOT = Path(__file__).parent.parent
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
    """The same without what differs between machines: log-probabilities."""
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items() if name != "log_prob"}
    return value


def test_the_quick_starts_answers() -> None:
    pytest.importorskip("torch", reason="needs the `cpu` extra")
    from djl_python_neuronx.service import Service

    examples = shown()
    assert len(examples) == 2
    service = Service.load(
        None,
        ROOT / "examples" / "tiny-llama",
        environ={},
        overrides={"model_loader": "cpu", "max_rolling_batch_size": "2"},
    )
    try:
        for body, lines in examples:
            parsed, inbox = service.parse(json.dumps(body).encode()), BlockingQueue()
            service.loop.submit(parsed.request, inbox)
            answer, finished = b"", False
            while not finished:
                for delta in inbox.drain(30.0):
                    answer += parsed.formatter.feed(delta)
                    finished = delta.finished
            assert [rounded(json.loads(line)) for line in answer.splitlines()] == rounded_all(lines)
    finally:
        service.close()


def rounded_all(lines: list[Any]) -> list[Any]:
    return [rounded(line) for line in lines]
