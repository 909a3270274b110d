"""Anthropic's bodies in, Anthropic's bytes out."""

from __future__ import annotations

import json
from math import inf
from typing import Any

import pytest

from djl_python_neuronx.engine.detokenizer import Delta, TextStream
from djl_python_neuronx.errors import (
    BackendUnavailableError,
    DeviceMemoryError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
    ServingError,
    StepError,
    UnauthorizedError,
    UnknownModelError,
)
from djl_python_neuronx.protocol import answer_error
from djl_python_neuronx.protocol.base import ParsedRequest
from djl_python_neuronx.types import FinishReason, Tokenizer, TokenOutput
from tests.doubles.chat_model import TEMPLATE, ChatTokenizer
from tests.doubles.toy_tokenizer import TOKENIZER
from tests.protocol.parsing import SAMPLED, SAMPLING, NotingTokenizer, parse
from tests.protocol.wire_schemas import SCHEMAS

USER = {"role": "user", "content": "<5>"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a"}}
CALLED = {"role": "assistant", "content": [CALL]}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "found"}
PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"


def body(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"max_tokens": 9, "messages": list(messages) or [USER], **more}


def answer(
    parsed: ParsedRequest,
    *ids: int,
    ends: FinishReason = FinishReason.LENGTH,
    tokenizer: Tokenizer = TOKENIZER,
) -> bytes:
    """The bytes for tokens, one a step, of which the last one ends the sequence."""
    stream = TextStream(parsed.request, tokenizer)
    made = b""
    for i, token_id in enumerate(ids, 1):
        reason = ends if i == len(ids) else None
        delta = stream.feed(TokenOutput("r", [token_id], reason))
        made += b"" if delta is None else parsed.formatter.feed(delta)
    return made


def said(error: ServingError) -> Any:
    return json.loads(answer_error(error, path=PATH)[1])["error"]


ASSISTANT = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "toolu_1", "type": "function", "function": {"name": "read", "arguments": {"path": "a"}}}
]}  # fmt: skip
TOOL = {"role": "tool", "tool_call_id": "toolu_1", "content": "found"}
TRANSLATED: tuple[tuple[str, dict[str, Any], list[dict[str, Any]]], ...] = (
    ("a text", body(), [USER]),
    (
        "a system prompt, of which each line of the sender's is left out",
        body(
            system=[
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=a1b2c;"},
                {"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "Be right."},
            ]
        ),
        [{"role": "system", "content": "Be short.\nBe right."}, USER],
    ),
    (
        "the same line before others of its text",
        body(system="x-anthropic-billing-header: cch=0;\nBe short."),
        [{"role": "system", "content": "Be short."}, USER],
    ),
    ("an empty system prompt", body(system=[]), [USER]),
    (
        "turns of several messages",
        body(USER, USER, {"role": "assistant", "content": "<6>"}, {"role": "assistant", "content": [
            {"type": "text", "text": "<7>"}, {"type": "redacted_thinking", "data": "x"}]}, USER),
        [
            {"role": "user", "content": "<5>\n<5>"},
            {"role": "assistant", "content": "<6>\n<7>"},
            USER,
        ],
    ),
    (
        "a call with reasoning, its result, and a text",
        body(
            USER,
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"}, CALL]},
            {"role": "user", "content": [{"type": "text", "text": "<6>"}, RESULT]},
        ),
        [USER, {**ASSISTANT, "reasoning_content": "hm", "reasoning": "hm"}, TOOL,
         {"role": "user", "content": "<6>"}],
    ),
    (
        "results of several forms",
        body(USER, CALLED, {"role": "user", "content": [
            {**RESULT, "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {**RESULT, "content": "none", "is_error": True},
            {"type": "tool_result", "tool_use_id": "toolu_1"},
            {**RESULT, "content": [{"type": "tool_reference", "tool_name": "write"}]},
        ]}),
        [USER, ASSISTANT, {**TOOL, "content": "a\nb"}, {**TOOL, "content": "Error: none"},
         {**TOOL, "content": ""}, {**TOOL, "content": "write"}],
    ),
    (
        "instructions behind a text",
        body(USER, {"role": "system", "content": "<7>"}),
        [{"role": "user", "content": "<5>\n<7>"}],
    ),
    (
        "instructions behind a result",
        body(USER, CALLED, {"role": "user", "content": [RESULT]},
             {"role": "system", "content": [{"type": "text", "text": "<7>"}]}),
        [USER, ASSISTANT, {**TOOL, "content": "found\n<7>"}],
    ),
    (
        "instructions between a call and its result",
        body(USER, CALLED, {"role": "system", "content": "<7>"},
             {"role": "user", "content": [RESULT, {"type": "text", "text": "<8>"}]}),
        [USER, ASSISTANT, TOOL, {"role": "user", "content": "<7>\n<8>"}],
    ),
)  # fmt: skip


@pytest.mark.parametrize("path", [PATH, COUNT])
def test_a_template_gets_the_messages_of_a_chat(path: str) -> None:
    failed = []
    for name, given, expected in TRANSLATED:
        tokenizer = NotingTokenizer(TEMPLATE)
        parsed = parse(given, path=path, tokenizer=tokenizer)
        if list(tokenizer.messages) != expected:
            failed.append((name, tokenizer.messages))
        if path == COUNT:
            count = json.loads(parsed.formatter.feed(Delta("", "", ())))
            assert count == {"input_tokens": len(tokenizer.encode_chat(expected))}
    assert not failed


def test_an_answer_goes_on_with_a_text_of_the_assistant() -> None:
    tokenizer = NotingTokenizer(TEMPLATE)
    parse(body(USER, {"role": "assistant", "content": "<6>"}), path=PATH, tokenizer=tokenizer)
    assert (tokenizer.rendering.begins_turn, tokenizer.rendering.continues) == (False, True)
    parse(body(), path=PATH, tokenizer=tokenizer)
    assert (tokenizer.rendering.begins_turn, tokenizer.rendering.continues) == (True, False)
    for last in (CALLED, {"role": "assistant", "content": " \n"}):
        with pytest.raises(RequestError, match="the last of messages") as caught:
            parse(body(USER, last), path=PATH)
        assert caught.value.param == "messages"


def test_thinking_is_a_variable_of_the_template() -> None:
    found = []
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"},
                     {"type": "between_tools"}, {"type": "disabled"}, None):  # fmt: skip
        tokenizer = NotingTokenizer(TEMPLATE)
        parse(body(thinking=thinking), path=PATH, tokenizer=tokenizer)
        found.append(dict(tokenizer.rendering.variables))
    on, off = ({"enable_thinking": one, "thinking": one} for one in (True, False))
    assert found == [on, on, on, off, {}]
    own = {"thinking": True, "date": "today"}
    tokenizer = NotingTokenizer(TEMPLATE)
    given = body(thinking={"type": "disabled"}, chat_template_kwargs=own)
    parse(given, path=PATH, tokenizer=tokenizer)
    assert tokenizer.rendering.variables == {**own, "enable_thinking": False}


SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ = {"name": "read", "description": "Reads.", "input_schema": SCHEMA}
LISTED = {
    "type": "function",
    "function": {"name": "read", "description": "Reads.", "parameters": SCHEMA},
}


def test_a_template_gets_the_tools_of_a_chat() -> None:
    more = {"type": "custom", "cache_control": {"type": "ephemeral"}, "defer_loading": True}
    strict = {"name": "run", "input_schema": {"type": "object"}, "strict": True}
    function = {"name": "run", "parameters": {"type": "object"}, "strict": True}
    both = (LISTED, {"type": "function", "function": function})
    for choice, listed in (
        (None, both),
        ({"type": "auto", "disable_parallel_tool_use": True}, both),
        ({"type": "any"}, both),
        ({"type": "tool", "name": "run"}, both),
        ({"type": "none"}, ()),
    ):
        tokenizer = NotingTokenizer(TEMPLATE)
        given = body(tools=[{**READ, **more}, strict], tool_choice=choice)
        parse(given, path=PATH, tokenizer=tokenizer)
        assert tuple(tokenizer.rendering.tools) == listed


def test_effort_is_a_variable_of_the_template() -> None:
    tokenizer = NotingTokenizer(TEMPLATE)
    parse(body(output_config={"effort": "max"}), path=PATH, tokenizer=tokenizer)
    assert tokenizer.rendering.variables == {"reasoning_effort": "max"}


CALLS = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
USE = {"type": "tool_use", "name": "read", "input": {"path": "a"}}
EXACT = '{"n": 12345678901234567890123, "deep": ' + "[" * 300 + "]" * 300 + "}"
THOUGHT = {"type": "thinking", "thinking": "hm"}
SAYS = {"type": "text", "text": "Yes."}
WRITTEN: tuple[tuple[str, dict[str, Any], list[dict[str, Any]], str], ...] = (
    (f"<think>hm</think>Yes.\n{CALLS}", {}, [THOUGHT, SAYS, USE], "tool_use"),
    (f"{CALLS}\n{CALLS}", {}, [USE, USE], "tool_use"),
    (
        f"Yes.\n{CALLS}\nMore.",
        {},
        [SAYS, USE, {"type": "text", "text": "\nMore."}],
        "tool_use",
    ),
    ("<think>\nhm\n</think>\n\nYes.", {}, [THOUGHT, SAYS], "end_turn"),
    (
        f"hm</think>{CALLS}",
        {"thinking": {"type": "enabled", "budget_tokens": 9, "display": "omitted"}},
        [USE],
        "tool_use",
    ),
    (CALLS.replace('{"path": "a"}', EXACT), {}, [{**USE, "input": json.loads(EXACT)}], "tool_use"),
    (CALLS.replace('"a"', "1e400"), {}, [{**USE, "input": {"path": inf}}], "tool_use"),
    (f"{CALLS}", {"tools": []}, [{"type": "text", "text": CALLS}], "end_turn"),
    ("", {}, [], "end_turn"),
)
"""Texts of a model, fields of a request, the content of the answer, and why it stopped."""


@pytest.mark.parametrize("stream", [False, True])
def test_blocks(stream: bool) -> None:
    tokenizer = ChatTokenizer()
    failed = []
    for text, more, content, reason in WRITTEN:
        given = body(**{"tools": [READ], "stream": stream, **more})
        parsed = parse(given, path=PATH, tokenizer=tokenizer)
        ids = (*tokenizer.encode(text, special=False), 2)
        sent = answer(parsed, *ids, ends=FinishReason.EOS, tokenizer=tokenizer)
        found = SCHEMAS["messages_events" if stream else "messages"](sent).record
        for block in found["content"]:
            assert block.pop("id", "call_").startswith("call_")
            assert block.pop("signature", "x")
        if (found["content"], found["stop_reason"]) != (content, reason):
            failed.append((text, found))
    assert not failed


def test_a_call_that_breaks_off_is_text_and_in_a_stream_a_part_of_its_input() -> None:
    tokenizer, cut = ChatTokenizer(), CALLS[:-20]
    for stream, content in (
        (False, [{"type": "text", "text": cut}]),
        (True, [{"type": "tool_use", "name": "read", "input": {}}]),
    ):
        parsed = parse(body(tools=[READ], stream=stream), path=PATH, tokenizer=tokenizer)
        sent = answer(parsed, *tokenizer.encode(cut, special=False), tokenizer=tokenizer)
        found = SCHEMAS["messages_events" if stream else "messages"](sent).record
        for block in found["content"]:
            block.pop("id", None)
        assert (found["content"], found["stop_reason"]) == (content, "max_tokens")


def test_every_parameter_arrives() -> None:
    given = body(
        **SAMPLING, stop_sequences=["<7>"], stop=["<8>"], max_time=5, metadata={"user_id": "me"}
    )
    request = parse(given, path=PATH, fairness_key="user").request
    sampling = {name: getattr(request.sampling, name) for name in SAMPLED}
    assert sampling == SAMPLED
    assert (request.max_new_tokens, request.max_seconds) == (9, 5)
    assert request.stop_strings == ("<8>", "<7>")
    assert request.client
    assert request.client != parse(body(), path=PATH, fairness_key="user").request.client
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "schema": schema}
    for asked in ({"output_config": {"format": form}}, {"output_format": form}):
        assert parse(body(**asked), path=PATH).request.grammar
    assert parse(body(), path=PATH).request.grammar is None


def test_the_key_of_either_header_is_a_client() -> None:
    clients = [
        parse(body(), path=PATH, fairness_key="api_key", headers=headers).request.client
        for headers in (
            {"x-api-key": "a"},
            {"authorization": "Bearer a"},
            {"x-api-key": "b"},
            {},
        )
    ]
    assert clients[0] == clients[1]
    assert len(set(clients)) == 3


ENDS = (
    ((10, 11), FinishReason.LENGTH, "<10><11>", "max_tokens", None, 2),
    ((10, 11), FinishReason.TIME, "<10><11>", "max_tokens", None, 2),
    ((10, 2), FinishReason.EOS, "<10>", "end_turn", None, 2),
    ((10, 7, 11), FinishReason.LENGTH, "<10>", "stop_sequence", "<7>", 2),
    ((10, 2), FinishReason.EOS, "<10>", "stop_sequence", "<eos>", 2),
    ((2,), FinishReason.EOS, "", "end_turn", None, 1),
)


@pytest.mark.parametrize("stream", [False, True])
def test_ends(stream: bool) -> None:
    schema = "messages_events" if stream else "messages"
    for ids, ends, text, reason, stop, count in ENDS:
        stops = ["<7>"] if stop != "<eos>" else ["<7>", "<eos>"]
        parsed = parse(body(stop_sequences=stops, stream=stream), path=PATH)
        found = SCHEMAS[schema](answer(parsed, *ids, ends=ends))
        content = [{"type": "text", "text": text}] if text else []
        assert found.record == {"content": content, "stop_reason": reason, "stop_sequence": stop}
        assert (found.num_tokens, found.num_prompt_tokens) == ([count], 2)


def test_tokens_from_the_cache_are_not_among_the_input() -> None:
    parsed = parse(body(), path=PATH)
    delta = Delta("r", "<9>", (), FinishReason.EOS, None, 2, 1, 1)
    usage = json.loads(parsed.formatter.feed(delta))["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (1, 1)


def test_a_stream_that_fails_ends_with_an_error() -> None:
    parsed = parse(body(stream=True), path=PATH)
    parsed.formatter.feed(Delta("r", "<9>", ()))
    error = StepError("the step failed")
    last = parsed.formatter.feed(Delta("r", "", (), FinishReason.ERROR, error))
    name, data = last.removesuffix(b"\n\n").split(b"\n")
    assert name == b"event: error"
    shown = json.loads(data.removeprefix(b"data: "))
    assert shown == {"type": "error", "error": {"type": "api_error", "message": "the step failed"}}


def test_errors() -> None:
    table = (
        (RequestError("no"), 400, "invalid_request_error"),
        (PromptTooLongError("no"), 400, "invalid_request_error"),
        (UnauthorizedError("no"), 401, "authentication_error"),
        (UnknownModelError("no"), 404, "not_found_error"),
        (RequestTimeoutError("no"), 408, "timeout_error"),
        (QueueFullError("no"), 529, "overloaded_error"),
        (BackendUnavailableError("no"), 503, "overloaded_error"),
        (StepError("no"), 500, "api_error"),
        (DeviceMemoryError("no"), 507, "api_error"),
        (ServingError("no"), 500, "api_error"),
    )
    for error, status, kind in table:
        found, content = answer_error(error, path=PATH)
        SCHEMAS["anthropic_error"](content)
        assert (found, json.loads(content)["error"]["type"]) == (status, kind)


BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"max_tokens": 0}, "'max_tokens' is 0; expected an integer of at least 1"),
    ({"messages": []}, "'messages' is an empty list; expected a list of 1 to 8192 messages"),
    ({"messages": [5]}, "'messages[0]' is 5; expected an object"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "'messages[0].role' is a string; expected"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "block 0 is a number"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "block 0 is image"),
    ({"messages": [USER, {"role": "user", "content": [
        {**RESULT, "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]}]},
     "'messages[1].content' is a list; expected a string or blocks of type text (text) or tool_reference"),
    ({"messages": [{"role": "user", "content": [CALL]}]}, "block 0 is tool_use"),
    ({"messages": [{"role": "assistant", "content": [RESULT]}]}, "block 0 is tool_result"),
    ({"messages": [{"role": "assistant", "content": [{**CALL, "input": "{}"}]}]},
     "tool_use (id, name, input) or thinking (thinking) or redacted_thinking, as the model reads text; block 0 is "
     "tool_use, whose input is a string"),
    ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "server_tool_use"),
    ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "block 0 is ['text']"),
    ({"system": [{"type": "image"}]}, "'system' is a list; expected a string or blocks of type text"),
    ({"thinking": {"type": "on"}}, "'thinking.type' is a string; expected 'enabled'"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is missing"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
     "output_config.format.schema "),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]},
     "'tools[0].type' is a string; expected custom: bash_20250124 is a tool of Anthropic's"),
    ({"tools": [{"type": "function", "function": {"name": "a"}}]},
     "'tools[0].type' is a string; expected custom, with name and input_schema beside it"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "'tools[0].name' is a string; expected a name"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema is missing"),
    ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "type is object; its type is array"),
    ({"tools": [READ, READ]}, "tools[1].name is 'read'"),
    ({"tools": [READ]}, "tools cannot be called"),
    ({"tools": [READ], "tool_choice": {"type": "tool", "name": "run"}}, "tool_choice names 'run'"),
    ({"tools": [READ], "tool_choice": {"type": "tool"}}, "tool_choice names ''"),
    ({"tool_choice": {"type": "any"}}, "tool_choice asks for a call"),
    ({"tool_choice": "auto"}, "'tool_choice' is a string; expected an object whose type is auto, any,"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"thread": {"type": "create"}}, "'thread' is not supported"),
    ({"mcp_servers": [{}]}, "'mcp_servers' is not supported"),
    ({"container": "c"}, "'container' is not supported"),
    ({"n": 2}, "unknown parameter 'n'"),
    ({"temperature": 2.5}, "temperature is 2.5; expected a number from 0 to 2"),
)  # fmt: skip


def test_errors_name_the_clients_fields() -> None:
    failed = []
    for more, says in BAD:
        try:
            parse({**body(), **more}, path=PATH)
        except RequestError as error:  # noqa: PERF203
            if says not in said(error)["message"]:
                failed.append((more, said(error)))
        else:
            failed.append((more, "accepted"))
    assert not failed
    thread = {"type": "continue", "previous_message_id": "msg_1"}
    with pytest.raises(RequestError) as caught:
        parse(body(thread=thread), path=PATH)
    assert said(caught.value)["details"] == {"error_code": "thread_unsupported_request"}
    with pytest.raises(RequestError, match="max_tokens is missing"):
        parse({"messages": [USER]}, path=PATH)


def test_no_chat_of_openais_is_taken_for_a_message() -> None:
    chat = {"messages": [USER], "max_tokens": 5}
    tool = {"name": "a", "input_schema": {"type": "object"}}
    system = {"role": "system", "content": "a"}
    version = {"anthropic-version": "2023-06-01"}
    table: tuple[tuple[dict[str, Any], dict[str, str], str], ...] = (
        (chat, {}, "openai_chat"),
        ({**chat, "messages": [system, USER]}, {}, "openai_chat"),
        ({**chat, "metadata": {"a": "b"}, "stop": ["a"], "top_k": 3}, {}, "openai_chat"),
        (chat, version, "anthropic"),
        ({**chat, "system": "a"}, {}, "anthropic"),
        ({**chat, "anthropic_version": "bedrock-2023-05-31"}, {}, "anthropic"),
    )
    for given, headers, protocol in table:
        assert parse(given, path="/invocations", headers=headers).request.protocol == protocol
        assert parse(given, headers=headers).request.protocol == protocol
    assert parse(chat, path="/v1/chat/completions", headers=version).request.protocol == (
        "openai_chat"
    )
    for given in ({**chat, "tools": [tool]}, {"messages": "a", "tools": [tool], "max_tokens": 5}):
        with pytest.raises(RequestError) as caught:
            parse(given, path="/invocations")
        assert caught.value.protocol == "anthropic"
