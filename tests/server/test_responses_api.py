"""OpenAI's responses through sockets: its client, Open Responses' cases, and what Codex sends in a session.

The model writes given texts, calls of tools too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the `server` extra")
openai = pytest.importorskip("openai", reason="needs the `dev` extra")

from pydantic import BaseModel  # noqa: E402

from djl_python_neuronx.server.app import Application  # noqa: E402
from djl_python_neuronx.server.models import Model  # noqa: E402
from tests.doubles.chat_model import ChatTokenizer, ScriptedBackend  # noqa: E402
from tests.doubles.toy_service import toy_service  # noqa: E402
from tests.protocol.wire_schemas import SCHEMAS  # noqa: E402
from tests.server.running import Running, http  # noqa: E402

WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "San Francisco, CA"}}\n</tool_call>'
PLAN = (
    '<tool_call>\n{"name": "update_plan", "arguments": {"plan": [{"step": "look", "status": "pending"}]}}\n'
    "</tool_call>"
)
FETCH = '<tool_call>\n{"name": "mcp__docs__fetch", "arguments": {"page": "a"}}\n</tool_call>'
SCRIPTS = {
    "Say hello": "Hello to you.",
    "Count to five": "1 2 3 4 5",
    "What is my name?": "Alice.",
    "weather like": WEATHER,
    "64 degrees": "It is 64 degrees.",
    "Two and three": '{"sum": 5}',
    "List the files": f"<think>\nI look first.\n</think>\n\nLet me see.\n{PLAN}",
    "README.md": FETCH,
    "The page says so.": "There is one file.",
}
"""Text of a prompt, of several the last one, to what the model writes then."""
WEATHER_TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a place",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "City and state"}},
        "required": ["location"],
    },
}
ASKED = {"type": "message", "role": "user", "content": "What is the weather like in San Francisco?"}


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer()


@pytest.fixture(scope="module")
def server(tokenizer: ChatTokenizer) -> Iterator[Running]:
    application = Application(Model("toy"))
    backend = ScriptedBackend(tokenizer, SCRIPTS)
    application.models[0].service = toy_service(backend, tokenizer=tokenizer)
    running = Running(application)
    yield running
    running.close()
    application.models[0].service.close()


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def post(server: Running, **body: Any) -> Any:
    """The answer, or the last event's response, by the schemas."""
    found = http.post(f"{server.url}/v1/responses", json={"model": "toy", "temperature": 0, **body})
    assert found.status_code == 200, found.text
    schema = "response_events" if body.get("stream") else "response"
    return SCHEMAS[schema](found.content).record


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


PIRATE = {"type": "message", "role": "system", "content": "You are a pirate."}
HISTORY = [
    user("My name is Alice."),
    {"type": "message", "role": "assistant", "content": "Hello Alice."},
]
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "basic-response": ({"input": [user("Say hello.")]}, ["message"]),
    "streaming-response": ({"input": [user("Count to five.")], "stream": True}, ["message"]),
    "system-prompt": ({"input": [PIRATE, user("Say hello.")]}, ["message"]),
    "tool-calling": ({"input": [ASKED], "tools": [WEATHER_TOOL]}, ["function_call"]),
    "tool-calling-streaming": (
        {"input": [ASKED], "tools": [WEATHER_TOOL], "stream": True},
        ["function_call"],
    ),
    "multi-turn": ({"input": [*HISTORY, user("What is my name?")]}, ["message"]),
}
"""Open Responses' cases (openresponses/openresponses 0cb939cc, src/lib/compliance-tests.ts) in words of ours: a body
and the types of its items. Its case "image-input" is a 400 here: tests/protocol/recorded/responses.json."""


@pytest.mark.parametrize("name", CASES)
def test_open_responses(server: Running, name: str) -> None:
    body, types = CASES[name]
    response = post(server, **body)
    assert response["status"] == "completed"
    assert [item["type"] for item in response["output"]] == types
    if types == ["function_call"]:
        (call,) = response["output"]
        assert (call["name"], json.loads(call["arguments"])) == (
            "get_weather",
            {"location": "San Francisco, CA"},
        )


def test_openais_client(client: Any, tokenizer: ChatTokenizer) -> None:
    whole = client.responses.create(model="toy", input="Say hello.", metadata={"team": "a"})
    assert (whole.output_text, whole.status, whole.metadata) == (
        "Hello to you.",
        "completed",
        {"team": "a"},
    )
    with client.responses.stream(model="toy", input="Count to five.") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == "1 2 3 4 5"
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert deltas[-1].snapshot == final.output_text
    assert len(deltas) > 2

    tools = [{**WEATHER_TOOL, "strict": True}]
    history: list[Any] = [ASKED]
    first = client.responses.create(model="toy", input=history, tools=tools)
    (call,) = first.output
    history += [
        *first.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "64 degrees"},
    ]
    second = client.responses.create(model="toy", input=history, tools=tools)
    assert second.output_text == "It is 64 degrees."
    assert tokenizer.rendered[-1].endswith(f"[assistant]{WEATHER}[tool]64 degrees[assistant]")
    with client.responses.stream(model="toy", input=[ASKED], tools=tools) as stream:
        final = stream.get_final_response()
    assert final.output[0].parsed_arguments == {"location": "San Francisco, CA"}


class Sum(BaseModel):
    sum: int


def test_openais_client_parses(client: Any) -> None:
    parsed = client.responses.parse(model="toy", input="Two and three", text_format=Sum)
    assert parsed.output_parsed == Sum(sum=5)


def test_nothing_is_stored(client: Any) -> None:
    made = client.responses.create(model="toy", input="Say hello.", store=True)
    assert made.model_dump()["store"] is False
    for refused in (
        lambda: client.responses.retrieve(made.id),
        lambda: client.responses.delete(made.id),
        lambda: client.responses.cancel(made.id),
        lambda: client.responses.input_items.list(made.id),
    ):
        with pytest.raises(openai.NotFoundError, match="no response is stored") as caught:
            refused()
        assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="nothing is stored") as caught:
        client.responses.create(model="toy", input="And?", previous_response_id=made.id)
    assert caught.value.param == "previous_response_id"


# Codex


def codex_function(name: str, required: list[str], **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    words = {"name": name, "description": f"The tool {name}.", "strict": False}
    return {"type": "function", **words, "parameters": parameters}


TEXT: dict[str, Any] = {"type": "string"}
NUMBER: dict[str, Any] = {"type": "number"}
STEP = {
    "type": "object",
    "properties": {"step": TEXT, "status": TEXT},
    "required": ["step", "status"],
    "additionalProperties": False,
}
CODEX_TOOLS: list[dict[str, Any]] = [
    codex_function(
        "exec_command",
        ["cmd"],
        cmd=TEXT,
        workdir=TEXT,
        tty={"type": "boolean"},
        yield_time_ms=NUMBER,
    ),
    codex_function("write_stdin", ["session_id"], session_id=NUMBER, chars=TEXT),
    codex_function(
        "update_plan", ["plan"], explanation=TEXT, plan={"type": "array", "items": STEP}
    ),
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'},
    },
    {"type": "local_shell"},
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation", "output_format": "png"},
    {
        "type": "tool_search",
        "execution": "client",
        "description": "Finds tools.",
        "parameters": {"type": "object"},
    },
    {
        "type": "namespace",
        "name": "mcp__docs",
        "description": "Tools in the mcp__docs namespace.",
        "tools": [codex_function("fetch", ["page"], page=TEXT)],
    },
]


def codex_message(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def codex_body(history: list[Any]) -> dict[str, Any]:
    """A turn: openai/codex, codex-rs/codex-api/src/common.rs (`ResponsesApiRequest`), codex-rs/core/src/client.rs."""
    return {
        "instructions": "You are a coding agent.",
        "input": history,
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
        "text": {"verbosity": "low"},
        "client_metadata": {"x-codex-installation-id": "2f1c"},
    }


def codex_item(item: dict[str, Any]) -> dict[str, Any]:
    """An item of an answer as Codex sends it back (codex-rs/protocol/src/models.rs): without id and status."""
    kept = {key: value for key, value in item.items() if key not in ("id", "status")}
    if item["type"] == "message":
        kept["content"] = [
            {"type": "output_text", "text": part["text"]} for part in item["content"]
        ]
    if item["type"] == "reasoning":  # which it keeps for itself
        kept = {"type": "reasoning", "summary": [], "encrypted_content": None}
    return kept


def test_a_session_of_codex(server: Running, tokenizer: ChatTokenizer) -> None:
    history: list[Any] = [
        codex_message(
            "developer",
            "<permissions instructions>Ask before you write.</permissions instructions>",
        ),
        codex_message("user", "# AGENTS.md instructions"),
        codex_message("user", "<environment_context>\n  <cwd>/repo</cwd>\n</environment_context>"),
        codex_message("user", "List the files."),
    ]
    first = post(server, **codex_body(history))
    kinds = [item["type"] for item in first["output"]]
    assert kinds == ["reasoning", "message", "function_call"]
    assert first["output"][2]["name"] == "update_plan"
    assert [tool["name"] for tool in first["tools"]] == [
        "exec_command",
        "write_stdin",
        "update_plan",
        "mcp__docs",
    ]
    call_id = first["output"][2]["call_id"]
    history += map(codex_item, first["output"])
    history.append(
        {"type": "function_call_output", "call_id": call_id, "output": "Plan updated: README.md"}
    )
    second = post(server, **codex_body(history))
    (call,) = second["output"]
    assert (call["namespace"], call["name"], call["arguments"]) == (
        "mcp__docs",
        "fetch",
        '{"page": "a"}',
    )
    history.append(codex_item(call))
    parts = [{"type": "input_text", "text": "The page says so."}]
    history.append({"type": "function_call_output", "call_id": call["call_id"], "output": parts})
    third = post(server, **codex_body(history))
    assert third["output"][0]["content"][0]["text"] == "There is one file."
    prompt = tokenizer.rendered[-1]
    turns = [part.partition("]")[0] for part in prompt.split("[")]
    assert [one for one in turns if one in ("system", "developer", "user")] == ["system", "user"]
    assert '{"name": "mcp__docs__fetch", "arguments": {"page": "a"}}' in prompt
    assert "web_search" not in prompt
