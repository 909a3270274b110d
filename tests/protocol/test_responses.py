"""OpenAI's responses: requests become chats, answers items."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from djl_python_neuronx.engine import limits
from djl_python_neuronx.engine.detokenizer import Delta
from djl_python_neuronx.errors import RequestError, StepError
from djl_python_neuronx.protocol import parameters
from djl_python_neuronx.protocol.neutral import NEUTRAL, OF_RESPONSES
from djl_python_neuronx.protocol.openai_responses import ResponsesParameters
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.types import FinishReason
from tests.doubles.chat_model import ChatTokenizer
from tests.doubles.toy_backend import TOY_SPEC
from tests.protocol.parsing import SAMPLED, SAMPLING, NotingTokenizer, answered, parse
from tests.protocol.wire_schemas import SCHEMAS

pytest.importorskip("openai", reason="needs the `dev` extra")

PATH = "/v1/responses"
LISTS_TOOLS = "{{ tools }}<tool_call>{'name'"
"""A chat template in which tools and the format of calls are found."""
USER = {"role": "user", "content": "<5><6>"}
FIND = {"type": "function", "name": "find", "parameters": {"type": "object"}, "strict": False}
LOOK = {"type": "function", "name": "look", "description": "Looks."}
SEARCH = {"type": "web_search", "external_web_access": False}


def rendered(**body: Any) -> NotingTokenizer:
    tokenizer = NotingTokenizer(LISTS_TOOLS)
    parse({"input": "<5>", **body}, path=PATH, tokenizer=tokenizer)
    return tokenizer


def call(name: str, number: int, arguments: str = "{}") -> dict[str, Any]:
    call_id = f"call_{number}"
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def output(number: int, text: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"call_{number}", "output": text}


def thought(text: str) -> dict[str, Any]:
    return {"reasoning_content": text, "reasoning": text}


def chat_call(name: str, number: int, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{number}", "type": "function", "function": function}


SYSTEM = {"role": "system", "content": "s"}
HM = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
CONVERSATIONS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"input": "a"}, [{"role": "user", "content": "a"}]),
    (
        {"input": [{**USER, "content": [{"type": "input_text", "text": "a"}]}]},
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    ),
    # What is before the first turn is one message of the system if there are instructions.
    ({"input": [USER], "instructions": "i"}, [{**SYSTEM, "content": "i"}, USER]),
    (
        {
            "input": [
                SYSTEM,
                {"role": "developer", "content": [{"type": "input_text", "text": "d"}]},
                USER,
                {"role": "developer", "content": "e"},
            ],
            "instructions": "i",
        },
        [
            {**SYSTEM, "content": "i\n\ns\n\nd"},
            USER,
            {"role": "developer", "content": "e"},
        ],
    ),
    ({"input": [SYSTEM, USER]}, [SYSTEM, USER]),
    # Messages of the user that follow each other are one.
    (
        {"input": [USER, {**USER, "content": [{"type": "input_text", "text": "a"}]}, SYSTEM, USER]},
        [{"role": "user", "content": "<5><6>\n\na"}, SYSTEM, USER],
    ),
    # Reasoning, text and calls that follow each other are one message of the assistant.
    (
        {
            "input": [
                USER,
                HM,
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "b"}],
                },
                call("find", 1, '{"q": 1}'),
                call("look", 2),
                output(1, "r"),
                output(2, [{"type": "input_text", "text": "s"}]),
                {"role": "assistant", "content": "c"},
            ]
        },
        [
            USER,
            {
                "role": "assistant",
                "content": "b",
                "tool_calls": [chat_call("find", 1, q=1), chat_call("look", 2)],
                **thought("hm"),
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "r"},
            {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "s"}]},
            {"role": "assistant", "content": "c"},
        ],
    ),
    # So are further reasoning and texts between calls; space of their own parts them.
    (
        {
            "input": [
                USER,
                {"role": "assistant", "content": "a"},
                call("find", 1),
                HM,
                {"role": "assistant", "content": "\nb"},
                HM,
                call("look", 2),
                {"role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
            ]
        },
        [
            USER,
            {
                "role": "assistant",
                "content": "a\nb\n\nc",
                "tool_calls": [chat_call("find", 1), chat_call("look", 2)],
                **thought("hm\n\nhm"),
            },
        ],
    ),
    # Of reasoning that another server has encrypted there is a summary, or nothing.
    (
        {
            "input": [
                USER,
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [{"type": "summary_text", "text": "so"}],
                    "encrypted_content": "gAAA",
                },
                {"role": "assistant", "content": "b"},
                {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
                call("find", 1),
                output(1, ""),
            ]
        },
        [
            USER,
            {
                "role": "assistant",
                "content": "b",
                "tool_calls": [chat_call("find", 1)],
                **thought("so"),
            },
            {"role": "tool", "tool_call_id": "call_1", "content": ""},
        ],
    ),
    (
        {
            "input": [
                USER,
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            ]
        },
        [USER, {"role": "assistant", "content": [{"type": "text", "text": "No."}]}],
    ),
]


@pytest.mark.parametrize(("body", "messages"), CONVERSATIONS)
def test_items_become_messages(body: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    assert rendered(**body).messages == messages


def test_tools_and_variables_reach_the_template() -> None:
    found = rendered(
        tools=[FIND, LOOK],
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "high"},
        chat_template_kwargs={"date": "today"},
    ).rendering
    assert [*found.tools] == [
        {
            "type": "function",
            "function": {key: FIND[key] for key in ("name", "parameters", "strict")},
        },
        {"type": "function", "function": {key: LOOK[key] for key in ("name", "description")}},
    ]
    assert found.variables == {"reasoning_effort": "low", "verbosity": "high", "date": "today"}
    asked = {"text": {"verbosity": "high"}, "chat_template_kwargs": {"verbosity": "own"}}
    assert rendered(**asked).rendering.variables == {"verbosity": "own"}
    for tools in ([FIND, SEARCH], [SEARCH]):
        assert not rendered(tools=tools, tool_choice="none").rendering.tools
    space = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [LOOK]}
    history = [USER, {**call("look", 1), "namespace": "mcp__files"}, output(1, "r")]
    found = rendered(tools=[FIND, space, SEARCH], input=history)
    names = [tool["function"]["name"] for tool in found.rendering.tools]
    assert names == ["find", "mcp__files__look"]
    assert found.messages[1]["tool_calls"] == [chat_call("mcp__files__look", 1)]


def test_every_parameter_arrives() -> None:
    request = parse(
        {
            "input": "<5>",
            **SAMPLING,
            "max_output_tokens": 3,
            "stop": "a",
            "stop_token_ids": [4],
            "max_time": 2.5,
            "ignore_eos": True,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 4,
        },
        path=PATH,
    ).request
    assert vars(request.sampling) == SAMPLED
    assert (request.max_new_tokens, request.max_seconds) == (3, 2.5)
    assert (request.stop_strings, request.stop_token_ids) == (("a",), {4})
    assert (request.logprobs, request.top_logprobs, request.ignore_eos) == (True, 4, True)
    scored = parse({"input": "<5>", "top_logprobs": 4}, path=PATH).request
    assert (scored.logprobs, scored.top_logprobs) == (True, 4)
    plain = parse({"input": "<5>"}, path=PATH).request
    assert plain.sampling == SamplingParams(temperature=1.0)
    assert (plain.max_new_tokens, plain.logprobs, plain.grammar) == (None, False, None)
    long = {"input": "<5><6><7><8><9>", "truncation": "auto", "max_output_tokens": 1}
    cut = parse(long, path=PATH, longest_prompt=4, max_model_len=10).request
    assert cut.prompt_ids == [6, 7, 8, 9]


def test_the_form_of_a_text_is_that_of_a_chat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for form, chat in (
        ({"type": "text"}, {"type": "text"}),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "n", "schema": schema, "strict": True},
            {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
        ),
    ):
        asked = parse({"input": "<5>", "text": {"format": form}}, path=PATH).request
        other = parse({"messages": [USER], "response_format": chat}, path="/v1/chat/completions")
        assert asked.grammar == other.request.grammar
        assert (asked.grammar is None) == (form["type"] == "text")


def test_every_field_of_the_reference_is_known() -> None:
    from openai.types.responses import response_create_params as reference

    fields = reference.ResponseCreateParamsBase.__annotations__
    assert len(fields) > 20
    assert set(fields) <= {*ResponsesParameters.model_fields, *NEUTRAL, *OF_RESPONSES}


DEEP = '{"a": ' + "[" * 300 + "]" * 300 + "}"
ITEM_ERRORS = [
    ({"role": "bot", "content": "a"}, "input[0].role", "'user'"),
    ({"role": "user"}, "input[0]", "expected content in an item of type message"),
    ({"role": "user", "content": 5}, "input[0].content", "is 5; expected a string or a list"),
    ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[0]", "expected call_id in"),
    (call("f", 1, "{"), "input[0].arguments", "expected an object, or a string with its JSON"),
    (call("f", 1, DEEP), "input[0].arguments", "nested at most 254 deep"),
    (output(1, [{"type": "input_image"}]), "input[0].output", "part 0 is 'input_image'"),
    ({"type": "web_search_call", "id": "ws_1"}, "input[0].type", "it is 'web_search_call'"),
    ({"type": "item_reference", "id": "i"}, "input[0].type", "store=false in providerOptions"),
    ("a", "input[0]", ""),
]
ERRORS: list[tuple[dict[str, Any], str | None, str]] = [
    *[({"input": [item]}, param, text) for item, param, text in ITEM_ERRORS],
    ({"input": []}, "input", "expected a text, or a list of 1 to"),
    ({"input": None}, "input", "is missing"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
    ({"conversation": {"id": "c"}}, "conversation", "nothing is stored"),
    ({"prompt": {"id": "p"}}, "prompt", "nothing is stored"),
    ({"background": True}, "background", "nothing is stored"),
    ({"max_tokens": 5}, "max_tokens", "did you mean 'max_output_tokens'"),
    ({"temperature": 3}, "temperature", "from 0 to 2"),
    ({"top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    ({"stream_options": {}}, "stream_options", "needs stream=true"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "xml; expected text"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "is null"),
    ({"text": {"format": "json"}}, "text.format", "is a string"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity", "'medium'"),
    (
        {"text": {"format": {"type": "json_object"}}, "response_format": {"type": "json_object"}},
        "text.format",
        "text.format and response_format each have a grammar",
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type", "response_format.type is xml"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "'reasoning.effort' is a string"),
    ({"tools": [SEARCH]}, "tools", "no tool is a function; the first is of type 'web_search'"),
    ({"tools": [{"name": "f"}]}, "tools[0].type", "is missing"),
    (
        {"tools": [SEARCH, {"type": "function", "function": {"name": "f"}}]},
        "tools[1].name",
        "tools[1].name is missing or empty; expected name, description and parameters beside type",
    ),
    (
        {"tools": [SEARCH, FIND, FIND]},
        "tools[2].name",
        "tools[2].name is 'find', as of a tool before",
    ),
    (
        {
            "tools": [
                SEARCH,
                {
                    "type": "namespace",
                    "name": "n" * 100,
                    "tools": [SEARCH, {**FIND, "name": "f" * 60}],
                },
            ]
        },
        "tools[1].tools[1].name",
        "'tools[1].tools[1].name' is a string; expected a name of 1 to 128",
    ),
    ({"tools": [{**FIND, "parameters": []}]}, "tools[0].parameters", "expected an object"),
    ({"tools": [{**FIND, "parameters": {"type": "array"}}]}, "tools[0].parameters", "is array"),
    ({"tools": [FIND], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "'g'"),
    (
        {"tools": [FIND], "tool_choice": {"type": "web_search"}},
        "tool_choice",
        "expected none, auto",
    ),
    ({"tool_choice": "required"}, "tool_choice", "tools has none"),
    ({"tools": [FIND], "tool_choice": "always"}, "tool_choice", '{"type": "function", "name"}'),
    (
        {"tools": [FIND], "tool_choice": {"type": "allowed_tools", "tools": [SEARCH]}},
        "tool_choice",
        "with tools of type function",
    ),
    *[
        ({"tools": [FIND], "tool_choice": choice}, "tool_choice", '{"type": "function", "name"} or')
        for choice in (
            {"type": "function", "name": 5},
            {"type": "allowed_tools", "tools": []},
            {"type": "allowed_tools", "tools": ["auto"]},
            {"type": "allowed_tools", "tools": [LOOK], "mode": "none"},
        )
    ],
]


def test_errors_name_the_clients_fields() -> None:
    failed = []
    for body, param, text in ERRORS:
        with pytest.raises(RequestError) as caught:
            parse({"input": "<5>", **body}, path=PATH, tokenizer=NotingTokenizer(LISTS_TOOLS))
        found = (caught.value.param, str(caught.value))
        if found[0] != param or text not in found[1]:
            failed.append((body, found))
    assert not failed
    short = parse({"input": "<5>", "max_output_tokens": 5, "min_tokens": 9}, path=PATH).request
    with pytest.raises(RequestError, match="max_output_tokens is 5"):
        limits.check(short, TOY_SPEC)


def test_tools_of_other_types_are_left_out_beside_functions(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of coding agents, which send OpenAI's own tools to any server. The answer has the tools that there were."""
    monkeypatch.setattr(parameters, "_ignored", set())
    custom = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}
    body = {"input": "<5>", "tools": [SEARCH, FIND, custom]}
    for _ in range(2):
        found = json.loads(answered(body, "a", path=PATH))
    assert [tool["name"] for tool in found["tools"]] == ["find"]
    assert found["tools"][0]["description"] is None
    logged = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.args and record.args[0] for record in logged] == [
        "\"tools of type 'web_search'\"",
        "\"tools of type 'custom'\"",
    ]


CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "é"}}\n</tool_call>'
LOOKS = CALL.replace("find", "look")
ANSWERS: dict[str, list[tuple[str, str]]] = {
    "Hello é": [("message", "Hello é")],
    "": [("message", "")],
    "<think>\nHm\n</think>\n\nHello": [("reasoning", "Hm"), ("message", "Hello")],
    "<think>Hm</think>é": [("reasoning", "Hm"), ("message", "é")],
    CALL: [("find", '{"q": "é"}')],
    f"<think>Hm</think>See.\n{CALL}\n{LOOKS}": [
        ("reasoning", "Hm"),
        ("message", "See."),
        ("find", '{"q": "é"}'),
        ("look", '{"q": "é"}'),
    ],
    f"One. {CALL}\nTwo.\n{LOOKS} Three.": [
        ("message", "One."),
        ("find", '{"q": "é"}'),
        ("message", "\nTwo."),
        ("look", '{"q": "é"}'),
        ("message", " Three."),
    ],
}
"""Text that a model writes, and its items."""


def items(response: Any) -> list[tuple[str, str]]:
    return [
        (item["name"], item["arguments"])
        if item["type"] == "function_call"
        else (item["type"], item["content"][0]["text"])
        for item in response["output"]
    ]


@pytest.mark.parametrize("text", ANSWERS)
@pytest.mark.parametrize("num_top", [None, 0], ids=["plain", "scored"])
def test_answers_have_items(text: str, num_top: int | None) -> None:
    include = [] if num_top is None else ["message.output_text.logprobs"]
    body = {"input": "<5>", "tools": [FIND, LOOK], "include": include}
    whole = SCHEMAS["response"](answered(body, text, path=PATH), num_top).record
    streamed = answered({**body, "stream": True}, text, path=PATH)
    final = SCHEMAS["response_events"](streamed, num_top).record
    for response in (whole, final):
        assert items(response) == ANSWERS[text]
        assert response["status"] == "completed"
        assert response["tool_choice"] == "auto"
        usage = response["usage"]
        assert usage["output_tokens"] == len(text.encode()) + 1
        thinks = usage["output_tokens_details"]["reasoning_tokens"]
        assert (thinks > 0) == ("think" in text)
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        assert len({one["call_id"] for one in calls}) == len(calls)
        for item in response["output"]:
            if item["type"] == "message" and num_top is not None:
                scores = item["content"][0]["logprobs"]
                assert len(scores) == len(text.encode()) + 1 or "<" in text
                found = b"".join(bytes(one["bytes"]) for one in scores)
                assert item["content"][0]["text"].encode() in found
                assert b"Hm" not in found
                assert b"q" not in found


def test_what_a_request_says_of_itself_comes_back() -> None:
    sent = {"metadata": {"a": "b"}, "prompt_cache_key": "k", "max_tool_calls": 3, "user": "u"}
    given = {"input": "<5>", "instructions": "Be brief.", "truncation": "auto", **sent}
    found = json.loads(answered(given, "a", path=PATH))
    assert {name: found[name] for name in sent} == sent
    assert (found["instructions"], found["truncation"]) == ("Be brief.", "auto")


@pytest.mark.parametrize("stream", [False, True])
def test_the_deepest_body_is_answered(stream: bool) -> None:
    """An answer has parts of the body, in a stream within further objects."""

    def deep(levels: int) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for _ in range(levels - 1):
            value = {"default": value}
        return value

    tool = {**FIND, "parameters": deep(247)}
    for more in (
        {"metadata": deep(249)},
        {"tools": [tool]},
        {"tools": [tool], "tool_choice": "none"},
    ):
        assert answered({"input": "<5>", "stream": stream, **more}, "a", path=PATH)
    with pytest.raises(RequestError, match="expected at most 250"):
        parse({"input": "<5>", "metadata": deep(250)}, path=PATH)


def test_a_stop_string_completes_an_answer() -> None:
    body = {"input": "<5>", "stop": "lo"}
    for stream in (False, True):
        schema = SCHEMAS["response_events" if stream else "response"]
        found = schema(answered({**body, "stream": stream}, "Hello.", path=PATH)).record
        assert (items(found), found["status"]) == ([("message", "Hel")], "completed")


def test_a_cut_answer_is_incomplete() -> None:
    for text, found in (
        ("Hello", [("message", "Hello")]),
        ("<think>Hm", [("reasoning", "Hm")]),
        (f"Hi.\n{CALL}", [("message", "Hi."), ("find", '{"q": "é"}')]),
    ):
        for reason in (FinishReason.LENGTH, FinishReason.TIME):
            body = {"input": "<5>", "tools": [FIND], "max_output_tokens": 99}
            whole = SCHEMAS["response"](answered(body, text, path=PATH, reason=reason)).record
            stream = answered({**body, "stream": True}, text, path=PATH, reason=reason)
            final = SCHEMAS["response_events"](stream).record
            for response in (whole, final):
                assert response["status"] == "incomplete"
                assert response["incomplete_details"] == {"reason": "max_output_tokens"}
                assert items(response) == found
                last = response["output"][-1]
                assert last["status"] == ("completed" if "name" in last else "incomplete")


def test_a_call_that_breaks_off() -> None:
    """In a stream its item has begun; a whole answer has its text."""
    text = CALL[: CALL.index("}}")]
    body = {"input": "<5>", "tools": [FIND]}
    cut = {"path": PATH, "reason": FinishReason.LENGTH}
    assert items(json.loads(answered(body, text, **cut))) == [("message", text)]
    final = SCHEMAS["response_events"](answered({**body, "stream": True}, text, **cut)).record
    (item,) = final["output"]
    assert (item["type"], item["status"]) == ("function_call", "incomplete")
    assert '{"q": "é"}'.startswith(item["arguments"])


def test_a_failed_stream_ends_with_its_response() -> None:
    parsed = parse({"input": "<5>", "stream": True}, path=PATH)
    feed = parsed.formatter.feed
    written = feed(Delta("r", "a", ()))
    written += feed(Delta("r", "", (), FinishReason.ERROR, StepError("the device failed")))
    response = SCHEMAS["response_events"](written).record
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "the device failed"}
    assert items(response) == [("message", "a")]
    assert response["output"][0]["status"] == "incomplete"
    parsed = parse({"input": "<5>", "stream": True}, path=PATH)
    written = parsed.formatter.feed(Delta("r", "", (), FinishReason.ERROR, RequestError("no")))
    response = SCHEMAS["response_events"](written).record
    assert (response["status"], response["output"]) == ("failed", [])
    assert response["error"] == {"code": "invalid_prompt", "message": "no"}


def test_a_choice_limits_the_calls() -> None:
    look = {"type": "function", "name": "look"}
    for choice in (look, {"type": "allowed_tools", "tools": [look]}):
        body = {"input": "<5>", "tools": [FIND, LOOK], "tool_choice": choice}
        for text, kind in ((CALL, "message"), (LOOKS, "function_call")):
            found = json.loads(answered(body, text, path=PATH))
            assert [item["type"] for item in found["output"]] == [kind]
            assert found["tool_choice"] == choice
    allowed = {"type": "allowed_tools", "tools": [look]}
    grammars = []
    for choice in (allowed, {**allowed, "mode": "auto"}, {**allowed, "mode": "required"}):
        body = {"input": "<5>", "tools": [FIND, LOOK], "tool_choice": choice}
        request = parse(body, path=PATH, tokenizer=ChatTokenizer()).request
        grammars.append(request.grammar)
    assert grammars[0] == grammars[1] != grammars[2]


def test_a_call_names_the_namespace_of_its_tool() -> None:
    space = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [LOOK]}
    text = CALL.replace("find", "mcp__files__look")
    body = {"input": "<5>", "tools": [FIND, space]}
    for stream in (False, True):
        written = answered({**body, "stream": stream}, text, path=PATH)
        found = json.loads(
            written.split(b"\n\n")[-3].partition(b"data: ")[2] if stream else written
        )
        found = found["response"] if stream else found
        (item,) = found["output"]
        assert (item["namespace"], item["name"]) == ("mcp__files", "look")
        assert [tool["type"] for tool in found["tools"]] == ["function", "namespace"]
        assert [tool["name"] for tool in found["tools"][1]["tools"]] == ["look"]


def test_tokens_of_the_cache_are_counted() -> None:
    for stream in (False, True):
        parsed = parse({"input": "<5><6>", "stream": stream}, path=PATH)
        delta = Delta("r", "a", (), FinishReason.EOS, num_generated_tokens=1, num_cached_tokens=2)
        written = parsed.formatter.feed(delta)
        usage = SCHEMAS["response_events" if stream else "response"](written).record["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] == 2
        assert usage["input_tokens"] == 3


def test_an_answer_is_an_item_of_the_next_turn() -> None:
    body = {"input": [USER], "tools": [FIND]}
    first = json.loads(answered(body, f"<think>Hm</think>See.\n{CALL}", path=PATH))
    call_id = first["output"][-1]["call_id"]
    result = {**output(1, "cold"), "call_id": call_id}
    assert rendered(tools=[FIND], input=[USER, *first["output"], result]).messages == [
        USER,
        {
            "role": "assistant",
            "content": "See.",
            "tool_calls": [{**chat_call("find", 1, q="é"), "id": call_id}],
            **thought("Hm"),
        },
        {"role": "tool", "tool_call_id": call_id, "content": "cold"},
    ]


def test_a_body_is_told_from_those_of_other_protocols() -> None:
    for body, protocol in (
        ({"input": [USER]}, "openai_responses"),
        ({"input": "<5>", "instructions": "<6>"}, "openai_responses"),
        ({"input": "<5>", "max_output_tokens": 5, "model": "toy"}, "openai_responses"),
        ({"input": "<5>", "text": {}}, "openai_responses"),
        ({"input": "<5>", "reasoning": {}}, "openai_responses"),
        ({"input": "<5>", "include": []}, "openai_responses"),
        ({"input": "<5>", "truncation": "auto"}, "openai_responses"),
        ({"inputs": "<5>", "parameters": {}}, "lmi"),
        ({"prompt": "<5>"}, "openai_completion"),
    ):
        for path in ("", "/invocations"):
            assert parse(body, path=path).request.protocol == protocol
    for body in (
        {"input": "<5>"},  # a slip of `inputs`
        {"input": ["<5>", "<6>"], "model": "toy"},  # texts to embed
        {"input": "<5>", "image": "<6>", "metadata": {}},
        {"input": "<5>", "background": False, "conversation": None},
        {"input": "<5>", "stream": True},
        {"max_output_tokens": 5},
    ):
        with pytest.raises(RequestError, match="matches no known protocol"):
            parse(body, path="/invocations")
