"""Tools and reasoning through the embedded server, by OpenAI's client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("uvicorn", reason="needs the `server` extra")

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

from tests.doubles.chat_model import ChatTokenizer, ScriptedBackend
from tests.server.running import serving

CALL = (
    '<tool_call>\n{"name": "GetWeather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
)
SCRIPTS = {
    "[user]Is it cold?[assistant]": f"<think>I look.</think>\nLet me look.\n{CALL}\n{CALL}",
    "[tool]7 degrees[assistant]": "It is 7 degrees.",
}


class GetWeather(BaseModel):
    """The weather of the next days."""

    city: str
    days: int


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    tokenizer = ChatTokenizer()
    backend = ScriptedBackend(tokenizer, SCRIPTS)
    with serving(backend, tokenizer=tokenizer) as server:
        yield OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


SETTINGS: dict[str, Any] = {
    "model": "toy",
    "temperature": 0,
    "tools": [pydantic_function_tool(GetWeather)],
}


def test_a_conversation_with_a_tool(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Is it cold?"}]
    parsed = client.chat.completions.parse(messages=messages, **SETTINGS)
    choice = parsed.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    assert choice.message.reasoning_content == "I look."  # type: ignore[attr-defined]
    assert choice.message.tool_calls is not None
    found = [call.function.parsed_arguments for call in choice.message.tool_calls]
    assert found == [GetWeather(city="Paris", days=2)] * 2
    messages += [choice.message]
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": "7 degrees"}
        for call in choice.message.tool_calls
    ]
    second = client.chat.completions.create(messages=messages, **SETTINGS)
    assert second.choices[0].message.content == "It is 7 degrees."
    assert second.choices[0].finish_reason == "stop"


def test_calls_are_streamed(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Is it cold?"}]
    grown, done = [], []
    with client.chat.completions.stream(messages=messages, **SETTINGS) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                grown.append(event.arguments_delta)
            elif event.type == "tool_calls.function.arguments.done":
                done.append(event.parsed_arguments)
        final = stream.get_final_completion().choices[0]
    assert done == [GetWeather(city="Paris", days=2)] * 2
    assert len(grown) > 20
    assert "".join(grown) == '{"city": "Paris", "days": 2}' * 2
    assert final.finish_reason == "tool_calls"
    assert final.message.content == "Let me look."


def test_without_tools_marks_are_text(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Is it cold?"}]
    plain = client.chat.completions.create(messages=messages, model="toy", temperature=0)
    assert plain.choices[0].message.content == f"Let me look.\n{CALL}\n{CALL}"
    assert plain.choices[0].finish_reason == "stop"
