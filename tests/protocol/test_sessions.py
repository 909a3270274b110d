"""Sessions of coding agents, replayed. Their bodies are written by hand from what the agents' sources send."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the `server` extra")
pytest.importorskip("httpx", reason="needs httpx")

import itertools

from djl_python_neuronx.server.app import Application
from djl_python_neuronx.server.models import Model
from tests.doubles.chat_model import ChatTokenizer, ScriptedBackend
from tests.doubles.toy_service import toy_service
from tests.protocol.wire_schemas import SCHEMAS
from tests.server.running import Running, http

SESSIONS = Path(__file__).parent / "sessions"


class Agent:
    """A server of a model that answers each request with a given text."""

    def __init__(self, names: str) -> None:
        self.tokenizer, self._scripts = ChatTokenizer(), {"": ""}
        backend = ScriptedBackend(self.tokenizer, self._scripts)
        application = Application(Model("agent"))
        self._service = toy_service(backend, tokenizer=self.tokenizer, model_name=names)
        application.models[0].service = self._service
        self.running = Running(application)

    def send(self, request: dict[str, Any], headers: dict[str, str]) -> Any:
        """The answer to a request of a session."""
        self._scripts[""] = request.get("answer", "")
        method, path = request.get("method", "POST"), request.get("path", "/v1/messages?beta=true")
        url, body = self.running.url + path, request.get("body")
        return http.request(method, url, json=body, headers=headers)

    def close(self) -> None:
        self.running.close()
        self._service.close()


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent("qwen-coder,claude-haiku-4-5-20251001")
    yield agent
    agent.close()


def test_a_session_of_claude_code(agent: Agent) -> None:
    session = json.loads((SESSIONS / "claude_code.json").read_text(encoding="utf-8"))
    turns: list[str] = []
    failed: list[Any] = []
    for request in session["requests"]:
        response = agent.send(request, session["headers"])
        if "expect" not in request:
            assert response.status_code < 500
            continue
        expect = request["expect"]
        if response.status_code != expect.get("status", 200):
            failed.append((request["name"], response.text))
            continue
        found = SCHEMAS[expect["schema"]](response.content)
        if "says" in expect:
            assert expect["says"] in found.error["message"]
        if "content" in expect:
            ours = ("id", "signature")
            content = [
                {name: value for name, value in block.items() if name not in ours}
                for block in found.record["content"]
            ]
            if (content, found.record["stop_reason"]) != (expect["content"], expect["stop_reason"]):
                failed.append((request["name"], found.record))
        if "turn" in request:
            turns.append(agent.tokenizer.rendered[-1])
    assert not failed
    assert "x-anthropic-billing-header" not in turns[0]
    for before, after in itertools.pairwise(turns):
        same = before.removesuffix("[assistant]<think>\n")
        assert after.startswith(same), "the cache would hold nothing of the turn before"


def test_a_choice_of_any_tool_is_a_call(agent: Agent) -> None:
    """Whatever the model would write behind its reasoning: here a text."""
    only = {"required": ["n"], "additionalProperties": False}
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, **only}
    tools = [{"name": name, "input_schema": schema} for name in ("one", "two")]
    for choice, names, stream in (
        ({"type": "any"}, {"one", "two"}, False),
        ({"type": "any", "disable_parallel_tool_use": True}, {"one", "two"}, True),
        ({"type": "tool", "name": "two"}, {"two"}, True),
    ):
        messages = [{"role": "user", "content": "Hello"}]
        body = {"max_tokens": 900, "messages": messages, "tools": tools, "tool_choice": choice}
        request = {"answer": "<think>hm</think>Hello", "body": {**body, "stream": stream}}
        response = agent.send(request, {})
        found = SCHEMAS["messages_events" if stream else "messages"](response.content).record
        thought, *calls = found["content"]
        assert thought["thinking"] == "hm"
        assert found["stop_reason"] == "tool_use"
        assert {call["name"] for call in calls} <= names
        assert all(call["input"] in ({"n": 1}, {"n": 2}) for call in calls)
        assert len(calls) == 1 or choice == {"type": "any"}


def test_counted_tokens_are_those_of_the_answer(agent: Agent) -> None:
    session = json.loads((SESSIONS / "claude_code.json").read_text(encoding="utf-8"))
    for request in session["requests"]:
        if "content" not in request.get("expect", ()):
            continue
        whole = {**request, "body": {**request["body"], "stream": False}}
        used = agent.send(whole, session["headers"]).json()["usage"]["input_tokens"]
        count = {**request, "path": "/v1/messages/count_tokens"}
        assert agent.send(count, session["headers"]).json() == {"input_tokens": used}
