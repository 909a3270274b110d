"""Formats of calls and reasoning by a model's chat template, and the models of `tools` and `tool_choice`."""

from __future__ import annotations

import json
import re
from typing import Any, get_args, get_type_hints

import pytest

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.engine.detokenizer import Delta
from djl_python_neuronx.errors import QueueFullError, RequestError, TextLimitError
from djl_python_neuronx.protocol.tools import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    reasoning_format,
    tool_format,
)
from djl_python_neuronx.types import FinishReason
from tests.doubles.chat_model import TEMPLATE, ChatTokenizer
from tests.protocol.parsing import answered, parse

TEMPLATES = {
    # As in Qwen 2.5 and 3: a text within quotes of Jinja.
    r'{{- "with its name, inside tags:\n<tool_call>\n{\"name\": <name>, \"arguments\": <json>}" }}': "hermes",
    """{{ "<tool_call>" + '{"arguments": ' + call.arguments + '}' }}""": "hermes",
    # As in Hermes 3: the marks are texts of their own.
    """{{- "<tool_call>\n" }}\n    {{- '{"name": <name>, "arguments": <dict>}\n' }}""": "hermes",
    # As in Qwen 3 Coder and GLM 4.5, whose calls are no JSON.
    r"{{- '<tool_call>\n<function=' + call.name + '>\n' }}": None,
    r"{{- '<tool_call>' + call.name + '\n<arg_key>' }}": None,
    "{{ 'write <|tool_call|> and then a list' }}": "granite",
    "{{ 'write <tool_call>[' + calls + ']' }}": "granite",
    "{{ '[TOOL_CALLS] [' + calls + ']' }}": "mistral",
    "{{ '[TOOL_CALLS]' + call.name + '[ARGS]' + call.arguments }}": "mistral",
    'Write {"name": function name, "parameters": …}': "llama3_json",
    "{{ '<\uff5ctool\u2581call\u2581begin\uff5c>' + call.type }}\n```json\n": "deepseek_v3",
    "{{ '<\uff5ctool\u2581call\u2581begin\uff5c>' + call.name }}": "deepseek_v31",
    "{{ bos_token }}{{ message.content }}": None,
}
THINKING = {
    "{{ '<think>\n' }}": "deepseek_r1",
    "{{ content.split('</think>')[-1] }}": "deepseek_r1",
    "{{ 'put it between [THINK] and [/THINK]' }}": "mistral",
    "{{ \"Begin with 'Here is my thought process:'\" }}": "granite",
    "{{ content }}": None,
}


def test_a_format_is_found_by_the_template() -> None:
    for found_format, table in ((tool_format, TEMPLATES), (reasoning_format, THINKING)):
        for template, name in table.items():
            found: Any = found_format("auto", template)
            assert (found and found.name) == name, template


@pytest.mark.parametrize(("option", "args"), [("mistral", False), ("mistral", True)])
def test_of_formats_with_one_name_the_template_decides(option: str, args: bool) -> None:
    template = "[TOOL_CALLS] [ARGS]" if args else "[TOOL_CALLS]"
    found = tool_format(option, template)
    assert found is not None
    assert (found.between == "[ARGS]") is args


def test_an_option_wins_over_the_template() -> None:
    found = tool_format("hermes", "[TOOL_CALLS]")
    assert found is not None
    assert found.name == "hermes"
    assert tool_format("none", "[TOOL_CALLS]") is None


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {"type": ["object"], "properties": {"city": {"type": "string"}}},
    },
}
FIND = {"type": "function", "function": {"strict": True, "name": "find"}, "x": 1}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris é"}}\n</tool_call>'


def body(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Is it cold?"}]
    return {"messages": messages, "tools": [WEATHER, FIND], "logprobs": True, **more}


def chunks(written: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix(b"data: ") for line in written.split(b"\n") if line]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def joined(written: bytes) -> dict[str, Any]:
    """A stream's message, as its client puts it together."""
    completions = pytest.importorskip("openai.lib.streaming.chat._completions")
    types = pytest.importorskip("openai.types.chat")
    state = completions.ChatCompletionStreamState()
    for one in chunks(written):
        state.handle_chunk(types.ChatCompletionChunk.model_validate(one))
    return state.current_completion_snapshot.model_dump(exclude_none=True)


CASES = {
    # The text of an answer: content, reasoning, calls.
    "Hello": ("Hello", None, []),
    f"Let me look.\n{CALL}\n": ("Let me look.", None, ["get_weather"]),
    f"{CALL}\n{CALL.replace('get_weather', 'find')}": (None, None, ["get_weather", "find"]),
    f"<think>\nHm\n</think>\n\n{CALL}": (None, "Hm", ["get_weather"]),
    "<think>\nHm\n</think>\n\nHello": ("Hello", "Hm", []),
    CALL.replace("}}", "}") + "\nIt is cold.": ("It is cold.", None, ["get_weather"]),
    f"{CALL.replace('get_weather', 'no_tool')}": (CALL.replace("get_weather", "no_tool"), None, []),
}


@pytest.mark.parametrize("text", CASES)
def test_answers_and_streams(text: str) -> None:
    content, thought, names = CASES[text]
    whole = json.loads(answered(body(), text))
    types = pytest.importorskip("openai.types.chat")
    types.ChatCompletion.model_validate(whole)
    [choice] = whole["choices"]
    message = choice["message"]
    assert message["content"] == content
    assert message.get("reasoning_content") == message.get("reasoning") == thought
    calls = message.get("tool_calls", [])
    assert [one["function"]["name"] for one in calls] == names
    assert choice["finish_reason"] == ("tool_calls" if names else "stop")
    for one in calls:
        assert one["type"] == "function"
        assert one["id"].startswith("call_")
        assert json.loads(one["function"]["arguments"]) == {"city": "Paris é"}
    assert len({one["id"] for one in calls}) == len(calls)
    # A stream comes to the same, token by token.
    stream = answered(body(stream=True, stream_options={"include_usage": True}), text)
    final = joined(stream)
    streamed = final["choices"][0]
    assert streamed["message"].get("content", "") == (content or "")
    assert streamed["message"].get("reasoning_content") == thought
    again = streamed["message"].get("tool_calls", [])
    assert [one["function"] for one in again] == [one["function"] for one in calls]
    assert streamed["finish_reason"] == choice["finish_reason"]
    for usage in (whole["usage"], final["usage"]):
        size = text.find("</think>") + len("</think>") if thought else None
        details = usage.get("completion_tokens_details", {})
        assert details.get("reasoning_tokens") == size
        assert usage["completion_tokens"] == len(text.encode()) + 1
    for scores in (choice["logprobs"], streamed["logprobs"]):
        texts = b"".join(bytes(one["bytes"]) for one in scores["content"][:-1])
        assert texts.decode() == text


def test_arguments_are_streamed_as_they_grow() -> None:
    sent = chunks(answered(body(stream=True, logprobs=False), CALL))
    deltas = [one["choices"][0]["delta"] for one in sent]
    calls = [one["tool_calls"][0] for one in deltas if "tool_calls" in one]
    first, *others = calls
    assert {key: first[key] for key in ("index", "type")} == {"index": 0, "type": "function"}
    assert first["function"] == {"name": "get_weather", "arguments": ""}
    assert all(one.keys() == {"index", "function"} for one in others)
    assert len(others) == len('{"city": "Paris é"}')
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert not any(one.get("content") for one in deltas)


def test_a_call_that_breaks_off_is_text() -> None:
    cut = CALL[:60]
    for reason, said in ((FinishReason.LENGTH, "length"), (FinishReason.EOS, "stop")):
        [choice] = json.loads(answered(body(), cut, reason=reason))["choices"]
        assert choice["message"]["content"] == cut
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == said
        streamed = joined(answered(body(stream=True), cut, reason=reason))["choices"][0]
        assert streamed["finish_reason"] == said
        assert '{"city": "Par'.startswith(
            streamed["message"]["tool_calls"][0]["function"]["arguments"]
        )
    [choice] = json.loads(answered(body(stop=["Par"]), CALL))["choices"]
    assert choice["message"]["content"] == CALL[: CALL.index("Par")]


def test_several_answers_have_calls_each() -> None:
    for stream in (False, True):
        written = answered(body(n=2, stream=stream), CALL, "Hello")
        parts = chunks(written) if stream else [json.loads(written)]
        reasons = {
            one["index"]: one["finish_reason"]
            for part in parts
            for one in part["choices"]
            if one["finish_reason"]
        }
        assert reasons == {0: "tool_calls", 1: "stop"}


def test_reasoning_is_shown_as_the_request_asks() -> None:
    text = "<think>Hm</think>Hello"
    hidden = body(include_reasoning=False, tools=[])
    together = body(separate_reasoning=False, tools=[])
    for payload, content in ((hidden, "Hello"), (together, text)):
        message = json.loads(answered(payload, text))["choices"][0]["message"]
        assert message == {"role": "assistant", "content": content, "refusal": None}
        streamed = joined(answered({**payload, "stream": True}, text))["choices"][0]
        assert streamed["message"]["content"] == content
        assert "reasoning_content" not in streamed["message"]
        assert len(streamed["logprobs"]["content"]) == len(text) + 1
    thought = f"<think>\nUse {CALL}?\n</think>\n\n"
    for kwargs, begin in (({}, ""), ({"enable_thinking": True}, "<think>\n")):
        payload = body(separate_reasoning=False, chat_template_kwargs=kwargs)
        text = thought.removeprefix(begin) + "Hello" + CALL.replace("get_weather", "find")
        whole = json.loads(answered(payload, text))["choices"][0]["message"]
        streamed = joined(answered({**payload, "stream": True}, text))["choices"][0]["message"]
        for message in (whole, streamed):
            assert message["content"] == text.partition("Hello")[0] + "Hello"
            assert "reasoning_content" not in message
            assert [one["function"]["name"] for one in message["tool_calls"]] == ["find"]
    # The prompt decides where an answer begins.
    for thinking, text in ((True, "Hm</think>Hello"), (False, "Hello")):
        kwargs = {"enable_thinking": thinking}
        message = json.loads(answered(body(chat_template_kwargs=kwargs), text))["choices"][0]
        assert message["message"]["content"] == "Hello"
        assert message["message"].get("reasoning_content") == ("Hm" if thinking else None)
    tokenizer = ChatTokenizer("{{ reasoning_effort }}{{ enable_thinking }}<think>")
    for effort, shown in (("high", "high"), ("none", "noneFalse")):
        answered(body(reasoning_effort=effort, tools=[]), "Hi", tokenizer=tokenizer)
        assert tokenizer.rendered[-1] == f"{shown}<think>"


def test_a_prompt_that_closes_the_reasoning_lets_none_open() -> None:
    """As in Qwen's template; in vLLM a grammar begins at once then."""
    pytest.importorskip("llguidance")

    def grammar(thinking: bool, **options: Any) -> str | None:
        kwargs = {"enable_thinking": thinking}
        asked = body(tool_choice="required", chat_template_kwargs=kwargs)
        return parse(
            asked, tokenizer=ChatTokenizer(), path="/v1/chat/completions", **options
        ).request.grammar

    assert grammar(False) == grammar(False, reasoning_parser="none")
    assert grammar(True) != grammar(True, reasoning_parser="none")


def test_the_template_gets_tools_and_the_history_as_sent() -> None:
    tokenizer = ChatTokenizer("{{ tools | tojson }}{{ messages | tojson }}<tool_call>{'name'")
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "find", "arguments": '{"a": 12345678901234567890123}'},
    }
    messages = [
        {"role": "user", "content": "Find"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "found"}]},
    ]
    answered(body(messages=messages), "Hi", tokenizer=tokenizer)
    shown, size = json.JSONDecoder().raw_decode(tokenizer.rendered[-1])
    assert shown == [WEATHER, FIND]
    assert [*shown[1]] == [*FIND], "the keys keep their order"
    history, _ = json.JSONDecoder().raw_decode(tokenizer.rendered[-1][size:])
    expected = {**call, "function": {"name": "find", "arguments": {"a": 12345678901234567890123}}}
    assert history[1] == {"role": "assistant", "content": "", "tool_calls": [expected]}
    assert history[2]["tool_call_id"] == "call_1"
    other = [{"type": "web_search"}, {"type": "function", "function": {"name": "f g"}}]
    none = {"tool_choice": "none"}
    for more in (none, {**none, "tools": other}, {"tools": []}, {"tools": None}):
        answered(body(messages=messages, **more), CALL, tokenizer=tokenizer)
        assert tokenizer.rendered[-1].startswith("null")


@pytest.mark.parametrize("sent", ["call_1", "call_1234", "0123456789", "aB3dE5gH7"])
def test_mistrals_ids_have_nine_letters_and_digits(sent: str) -> None:
    special = ("[TOOL_CALLS]", "[ARGS]")
    tokenizer = ChatTokenizer("{{ tools }}[TOOL_CALLS][ARGS]{{ messages | tojson }}", special)
    call = {"id": sent, "type": "function", "function": {"name": "find", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": sent, "content": "found"},
    ]
    text = '[TOOL_CALLS]find[ARGS]{"a": 1}'
    whole = json.loads(answered(body(messages=messages), text, tokenizer=tokenizer))
    history = json.loads(tokenizer.rendered[-1].rpartition("[ARGS]")[2])
    used = {history[0]["tool_calls"][0]["id"], history[1]["tool_call_id"]}
    [made] = whole["choices"][0]["message"]["tool_calls"]
    for one in (*used, made["id"]):
        assert re.fullmatch("[a-zA-Z0-9]{9}", one)
    assert len(used) == 1
    assert (used == {sent}) == (sent == "aB3dE5gH7")
    assert made["function"] == {"name": "find", "arguments": '{"a": 1}'}
    # Without tools their marks are special tokens like others.
    plain = json.loads(answered(body(tools=[]), text, tokenizer=tokenizer))
    assert plain["choices"][0]["message"]["content"] == 'find{"a": 1}'


def test_what_is_wrong_is_named() -> None:
    def tool(**function: Any) -> dict[str, Any]:
        return {"type": "function", "function": function}

    named = {"type": "function", "function": {"name": "no"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}
    xml = ChatTokenizer("{{ tools }}<tool_call><function=")
    for more, param, said, context in (
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "'get_weather'", {}),
        ({"tools": [tool(name="a b")]}, "tools[0].function.name", "letters, digits", {}),
        ({"tools": [tool(name="")]}, "tools[0].function.name", "letters, digits", {}),
        ({"tools": [tool()]}, "tools[0].function.name", "missing", {}),
        ({"tools": [{"type": "custom"}]}, "tools[0].type", "custom", {}),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search", {}),
        ({"tools": [tool(name="a", parameters=[])]}, "tools[0].function.parameters", "object", {}),
        (
            {"tools": [tool(name="a", parameters={"type": "array"})]},
            "tools[0].function.parameters",
            "its type is array",
            {},
        ),
        (
            {"tools": [tool(name="a", parameters={"type": ["string", "null"]})]},
            "tools[0].function.parameters",
            "type is object",
            {},
        ),
        ({"tools": {}}, "tools", "a list of at most 512 tools", {}),
        ({"tools": [5]}, "tools[0]", "expected an object", {}),
        ({"tool_choice": named}, "tool_choice", "'no'", {}),
        (
            {"tool_choice": named, "tools": [tool(name=f"f{i}" + "x" * 100) for i in range(512)]},
            "tool_choice",
            "f7",
            {},
        ),
        ({"tool_choice": choice}, "tool_choice", "allowed_tools", {}),
        ({"tool_choice": "any"}, "tool_choice", "required", {}),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "none", {}),
        ({"functions": [{"name": "f"}]}, "functions", "not supported", {}),
        ({}, "tools", "option.chat_template", {"tokenizer": ChatTokenizer("{{ messages }}")}),
        ({}, "tools", "option.tool_call_parser", {"tokenizer": xml}),
        ({}, "tools", "option.tool_call_parser", {"tool_call_parser": "none"}),
        ({"reasoning_effort": "much"}, "reasoning_effort", "high", {}),
    ):
        given = {"tokenizer": ChatTokenizer(), **context}
        with pytest.raises(RequestError) as caught:
            parse(body(**more), path="/v1/chat/completions", **given)
        assert caught.value.param == param
        assert said in str(caught.value)
        assert len(str(caught.value)) < 2000


def test_a_choice_limits_the_calls() -> None:
    def called(**more: Any) -> list[str]:
        text = CALL + CALL.replace("get_weather", "find")
        message = json.loads(answered(body(**more), text))["choices"][0]["message"]
        return [one["function"]["name"] for one in message.get("tool_calls", [])]

    function = {"type": "function", "function": {"name": "find"}}
    allowed = {"mode": "auto", "tools": [function]}
    assert called() == ["get_weather", "find"]
    assert called(parallel_tool_calls=False) == ["get_weather"]
    assert called(tool_choice={"type": "allowed_tools", "allowed_tools": allowed}) == ["find"]
    assert called(tool_choice="none") == []


@pytest.mark.parametrize(
    "test", ["not message.tool_calls|length == 1", "message['tool_calls'] | length > 1"]
)
def test_a_template_that_takes_one_call_gets_one(test: str) -> None:
    """The next turn has the answer as its history."""
    refusal = (
        "{%- if message.tool_calls and (" + test + ") %}{{ raise_exception('one!') }}{% endif %}"
    )
    template = TEMPLATE.replace("[{{ message.role }}]", refusal + "[{{ message.role }}]")
    text, tokenizer = CALL + CALL.replace("get_weather", "find"), ChatTokenizer(template)
    for choice in ("auto", "required"):
        asked = body(parallel_tool_calls=True, tool_choice=choice)
        message = json.loads(answered(asked, text, tokenizer=tokenizer))["choices"][0]["message"]
        assert [one["function"]["name"] for one in message["tool_calls"]] == ["get_weather"]
        grammars = {
            parse(
                {**asked, "parallel_tool_calls": parallel},
                tokenizer=one,
                path="/v1/chat/completions",
            ).request.grammar
            for parallel, one in ((True, tokenizer), (False, ChatTokenizer()))
        }
        assert len(grammars) == 1


def test_tools_that_exceed_a_limit_are_served_unless_they_have_to_be_held(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With `auto` any object is taken as arguments, and without a limit of time that suffices no grammar holds them."""
    pytest.importorskip("llguidance", reason="enforces grammars")
    tokenizer = ChatTokenizer()
    function = {"name": "find", "parameters": {"description": "x" * 2**18}}
    large, strict = (
        {"type": "function", "function": {**function, "strict": one}} for one in (False, True)
    )

    def grammar(**more: Any) -> str | None:
        payload = body(**{"tools": [WEATHER, large], **more})
        return parse(payload, tokenizer=tokenizer, path="/v1/chat/completions").requests[0].grammar

    assert str(grammar()).count("city") == 0
    assert "tools_relaxed num_tools=2" in caplog.text
    assert "city" in str(grammar(tools=[WEATHER]))
    for more in ({"tool_choice": "required"}, {"tools": [strict]}):
        with pytest.raises(RequestError, match=r"characters of JSON; .*Leave out tools"):
            grammar(**more)

    def fail(error: RequestError) -> None:
        def fails(*_: object) -> str:
            raise error

        monkeypatch.setattr(tokenizer, "grammar", fails)

    fail(TextLimitError("cannot be checked"))
    assert grammar() is None
    with pytest.raises(TextLimitError, match="tools cannot be checked"):
        grammar(tools=[WEATHER], tool_choice="required")
    with pytest.raises(TextLimitError, match="response_format"):
        grammar(response_format={"type": "json_object"})
    fail(QueueFullError("retry later"))
    with pytest.raises(QueueFullError):
        grammar()


def test_a_least_length_makes_no_call() -> None:
    for name in ("min_tokens", "min_new_tokens", "min_length"):
        least = []
        for more in ({}, {"tool_choice": "required"}, {"tool_choice": "none"}):
            parsed = parse(
                body(**{name: 9}, **more), path="/v1/chat/completions", tokenizer=ChatTokenizer()
            )
            least.append(parsed.requests[0].sampling.num_unending(0))
        assert least == [0, 0, 9]


def test_routes_of_other_protocols() -> None:
    """A chat on a route of LMI's clients is lines of JSON; `/tokenize` counts tools too."""
    written = answered(body(stream=True), CALL, path="/invocations")
    *_, end = [json.loads(line)["choices"][0] for line in written.splitlines()]
    assert end["finish_reason"] == "tool_calls"
    tokenizer, counts = ChatTokenizer(), []
    for tools in ([WEATHER, FIND], []):
        payload = {"messages": body()["messages"], "tools": tools}
        parsed = parse(payload, tokenizer=tokenizer, path="/tokenize")
        counts.append(json.loads(parsed.formatter.feed(Delta("r", "", ())))["count"])
        assert counts[-1] == len(tokenizer.encode(tokenizer.rendered[-1]))
    assert counts[0] > counts[1]


def test_options_name_all_formats() -> None:
    for name, formats in (
        ("tool_call_parser", TOOL_FORMATS),
        ("reasoning_parser", REASONING_FORMATS),
    ):
        options = get_args(get_type_hints(ServingOptions)[name])
        assert {*options} == {"auto", "none", *(one.name for one in formats)}
