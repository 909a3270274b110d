"""The reader of answers, against transformers' own response parsing and the formats' definitions."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from djl_python_neuronx.engine.detokenizer import Delta, Token
from djl_python_neuronx.protocol.answers import (
    ArgumentsEvent,
    Call,
    CallEvent,
    Part,
    ReasoningEvent,
    TextEvent,
)
from djl_python_neuronx.protocol.reading import AnswerReader
from djl_python_neuronx.protocol.tools import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
    ToolFunction,
    ToolUse,
)
from djl_python_neuronx.types import FinishReason
from tests.effort import examples

NAMES = ("get_weather", "find-it", "f.2")
FUNCTIONS = {name: ToolFunction(name=name) for name in NAMES}
FORMATS = {f"{one.name}-{i}": one for i, one in enumerate(TOOL_FORMATS)}
THOUGHT = {one.name: one for one in REASONING_FORMATS}


def deepseek(words: str) -> str:
    """A mark, as DeepSeek's chat template has it."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


def feed(
    parts: Sequence[str],
    form: ToolFormat | None = None,
    reasoning: ReasoningFormat | None = None,
    *,
    parallel: bool = True,
    inside: bool = False,
    separate: bool = True,
) -> list[Part]:
    """The events of an answer that comes in parts."""
    use = form and ToolUse(form, FUNCTIONS, "auto", parallel)
    reader = AnswerReader(use, reasoning, inside=inside, separate=separate)
    events = []
    for i, text in enumerate(parts):
        reason = FinishReason.EOS if i == len(parts) - 1 else None
        events += reader.feed(Delta("r", text, (Token(i, text, None, False),), reason))
    return events


def joined(events: Iterable[Part]) -> list[tuple[Any, ...]]:
    """Events that say the same whatever parts the text came in."""

    def kind(event: Part) -> tuple[Any, ...]:
        call = event.call if isinstance(event, (CallEvent, ArgumentsEvent)) else None
        return type(event).__name__, call and (call.index, call.name, call.whole, call.raw)

    said = [(kind(one), getattr(one, "text", "")) for one in events]
    merged = [
        (what, "".join(text for _, text in group))
        for what, group in groupby(said, lambda one: one[0])
    ]
    return [(*what, text) for what, text in merged if text or what[0] == "CallEvent"]


def calls(events: Iterable[Part]) -> list[Call]:
    return [one.call for one in events if isinstance(one, CallEvent)]


def whole_calls(events: Sequence[Part]) -> list[tuple[str, Any]]:
    """The calls as parsed arguments, which must be the sum of their deltas too."""
    found = []
    for call in calls(events):
        parts = [one.text for one in events if isinstance(one, ArgumentsEvent) and one.call is call]
        if call.whole:
            assert "".join(parts) == call.arguments
            found.append((call.name, json.loads(call.arguments)))
    return found


def content(events: Iterable[Part]) -> str:
    """The content of a whole answer."""
    texts = []
    for one in events:
        if isinstance(one, TextEvent):
            texts.append(one.text)
        elif isinstance(one, CallEvent) and not one.call.whole:
            texts.append(one.call.raw)
    return "".join(texts)


def cut(text: str, rng: random.Random) -> list[str]:
    """A text in tokens of 1 to 9 characters."""
    parts = []
    while text:
        size = rng.randint(1, 9)
        parts.append(text[:size])
        text = text[size:]
    return parts or [""]


# Sequences of the formats, as models write them, with what the format's definition makes of them.


def values(rng: random.Random) -> dict[str, Any]:
    """Arguments with all that makes JSON hard to follow."""
    texts = ("", "Paris", 'a "b" \\ }', "]}, {[", "日本 é", "line\nnext", "<tool>", "`json`", " x ")

    def value(depth: int) -> Any:
        kind = rng.randint(0, 3) if depth < 3 else 0
        if kind == 1:
            return [value(depth + 1) for _ in range(rng.randint(0, 2))]
        if kind == 2:
            return {rng.choice(texts): value(depth + 1)}
        return rng.choice((*texts, rng.randint(-9, 9), 1.5e-3, True, None))

    return {rng.choice(("city", "n", 'q"}', "a b")): value(0) for _ in range(rng.randint(0, 3))}


def call_object(rng: random.Random, name: str, arguments: Any, key: str = "arguments") -> str:
    """A call as an object: members in any order, whitespace as it comes, arguments perhaps in a string."""
    members: list[tuple[str, Any]] = [("name", name), (key, arguments)]
    if rng.random() < 0.3:
        members.reverse()
    if rng.random() < 0.2:
        members.insert(0, ("type", "function"))
    return json.dumps(dict(members), indent=rng.choice((None, 2)), ensure_ascii=rng.random() < 0.5)


def hermes(rng: random.Random, asked: Sequence[tuple[str, Any]]) -> str:
    space = rng.choice(("", "\n", "\n\n "))
    return rng.choice(("", "\n")).join(
        f"<tool_call>{space}{call_object(rng, *one)}{space}</tool_call>" for one in asked
    )


def listed(mark: str) -> Callable[[random.Random, Sequence[tuple[str, Any]]], str]:
    def write(rng: random.Random, asked: Sequence[tuple[str, Any]]) -> str:
        inner = rng.choice((", ", ",\n")).join(call_object(rng, *one) for one in asked)
        return f"{mark}{rng.choice(('', ' '))}[{inner}]"

    return write


def llama(rng: random.Random, asked: Sequence[tuple[str, Any]]) -> str:
    key = rng.choice(("parameters", "arguments"))
    inner = "; ".join(call_object(rng, *one, key=key) for one in asked)
    return rng.choice(("", "<|python_tag|>")) + inner


def mistral(rng: random.Random, asked: Sequence[tuple[str, Any]]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(one)}" for name, one in asked)


def deepseek_v3(rng: random.Random, asked: Sequence[tuple[str, Any]]) -> str:
    begin, sep, end = (deepseek(f"tool {one}") for one in ("call begin", "sep", "call end"))
    inner = "\n".join(
        f"{begin}function{sep}{name}\n```json\n{json.dumps(one)}\n```{end}" for name, one in asked
    )
    return f"{deepseek('tool calls begin')}{inner}{deepseek('tool calls end')}"


def deepseek_v31(rng: random.Random, asked: Sequence[tuple[str, Any]]) -> str:
    begin, sep, end = (deepseek(f"tool {one}") for one in ("call begin", "sep", "call end"))
    inner = "".join(f"{begin}{name}{sep}{json.dumps(one)}{end}" for name, one in asked)
    return f"{deepseek('tool calls begin')}{inner}{deepseek('tool calls end')}"


WRITERS = {
    "hermes-0": hermes,
    "granite-1": listed("<|tool_call|>"),
    "granite-2": listed("<tool_call>"),
    "mistral-3": mistral,
    "mistral-4": listed("[TOOL_CALLS]"),
    "llama3_json-5": llama,
    "deepseek_v3-6": deepseek_v3,
    "deepseek_v31-7": deepseek_v31,
}


def transform(name: str, arguments: str) -> dict[str, Any]:
    return {"transform": {"function": {"name": name, "arguments": arguments}}, "content": "json"}


OF_OBJECT = {**transform("{content.name}", "{content.arguments}"), "repeats": True}
OF_NAME = {**transform("{name}", "{content}"), "repeats": True}
OF_LIST = {**transform("{name}", "{arguments}"), "transform_each": True}
BEGIN, SEP = deepseek("tool call begin"), deepseek("tool sep")
RESPONSES: Mapping[str, Mapping[str, Any]] = {
    # The field `tool_calls` of transformers' response templates.
    "hermes-0": {"open": "<tool_call>", "close": "</tool_call>", **OF_OBJECT},
    "granite-1": {"open": "<|tool_call|>", **OF_LIST},
    "granite-2": {"open": "<tool_call>", **OF_LIST},
    "mistral-3": {
        "open_pattern": r"\[TOOL_CALLS\](?P<name>[\w.-]+)\[ARGS\]",
        "close_pattern": r"(?=\[TOOL_CALLS\])|$",
        **OF_NAME,
    },
    "mistral-4": {"open": "[TOOL_CALLS]", **OF_LIST},
    "deepseek_v3-6": {
        "open_pattern": rf"{BEGIN}function{SEP}(?P<name>[\w.-]+)\n```json\n",
        "close": f"\n```{deepseek('tool call end')}",
        **OF_NAME,
    },
    "deepseek_v31-7": {
        "open_pattern": rf"{BEGIN}(?P<name>[\w.-]+){SEP}",
        "close": deepseek("tool call end"),
        **OF_NAME,
    },
}


def by_transformers(label: str, text: str) -> list[tuple[str, Any]]:
    """The calls by the library's parser."""
    parsing = pytest.importorskip("transformers.utils.chat_parsing")
    template = {
        "start_anchor": "assistant",
        "fields": {"content": {"repeats": True, "join": ""}, "tool_calls": RESPONSES[label]},
    }
    found = parsing.parse_response(text, template, prefix="").get("tool_calls", [])
    return [(one["function"]["name"], one["function"]["arguments"]) for one in found]


def by_json(text: str) -> list[tuple[str, Any]]:
    """The calls of Llama 3, which are JSON with semicolons between. Source: vLLM's llama3_json."""
    text, found, decoder = text.removeprefix("<|python_tag|>"), [], json.JSONDecoder()
    while text:
        one, size = decoder.raw_decode(text)
        found.append((one["name"], one["parameters" if "parameters" in one else "arguments"]))
        text = text[size:].lstrip("; ")
    return found


@pytest.mark.parametrize("label", WRITERS)
def test_calls_equal_those_of_the_reference(label: str) -> None:
    rng, failed = random.Random(label), []
    for _ in range(200):
        asked = [(rng.choice(NAMES), values(rng)) for _ in range(rng.randint(1, 3))]
        before = "" if "llama" in label else rng.choice(("", "Let me look.", "a < b [c] {d}: "))
        text = before + rng.choice(("", "\n")) * bool(before) + WRITERS[label](rng, asked)
        oracle = by_json(text) if "llama" in label else by_transformers(label, text)
        events = feed(cut(text, rng), FORMATS[label])
        if not oracle == asked == whole_calls(events) or content(events) != before.rstrip():
            failed.append((text, oracle, joined(events)))
    assert not failed


FRAGMENTS = sorted(
    {
        *(
            part
            for one in TOOL_FORMATS
            for part in (*one.marks, one.before, one.between, one.after)
        ),
        *(mark for one in REASONING_FORMATS for mark in one.marks),
        *(
            '{"a": 1}',
            '"',
            "\\",
            "}",
            "{",
            "]",
            "[",
            ", ",
            ": ",
            '"name"',
            '"arguments"',
            "\n",
            " ",
        ),
        *(
            "get_weather",
            '"find-it"',
            "null",
            "text",
            '{"name": "get_weather", "arguments": {"b": [2]}}',
            '{"name": "get_weather", "arguments": {"b": [2]}',
            ', "id": "a"',
        ),
    }
    - {""}
)
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=14).map("".join)


@given(
    TEXTS,
    st.sampled_from([None, *TOOL_FORMATS]),
    st.sampled_from([None, *REASONING_FORMATS]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.randoms(use_true_random=False),
)
@settings(max_examples=examples(2000), deadline=None)
def test_any_split_gives_the_same_events(
    text: str,
    form: ToolFormat | None,
    reasoning: ReasoningFormat | None,
    parallel: bool,
    inside: bool,
    separate: bool,
    rng: random.Random,
) -> None:
    inside &= reasoning is not None
    how = {"parallel": parallel, "inside": inside, "separate": separate}
    whole = feed([text], form, reasoning, **how)
    split = feed(cut(text, rng), form, reasoning, **how)
    letters = feed([*text, ""], form, reasoning, **how)
    assert joined(whole) == joined(split) == joined(letters)
    # Nothing is lost where nothing is a call or reasoning, and all tokens come, in their order.
    if not whole_calls(whole) and (reasoning is None or not separate):
        assert content(whole) == text
    assert [token.id for one in letters for token in one.tokens] == list(range(len(text) + 1))
    assert len(whole_calls(whole)) <= 1 or parallel


def test_what_is_no_call_comes_back_as_text() -> None:
    begin = FORMATS["hermes-0"]
    bad = [
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": {"a": 1',
        '<tool_call>{"name": "get_weather", "arguments": {"a": }}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": ["get_weather"], "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"a": }, "name": "get_weather"}</tool_call>',
        "<tool_call>get_weather</tool_call>",
        "The tag <tool_call> begins a call.",
        "<tool_",
        '<tool_call>{"name": "get_weather", "arguments": {"a": [1] </tool_call> and more',
        "  \n",
    ]
    for text in bad:
        events = feed([text], begin)
        assert whole_calls(events) == [], text
        assert content(events) == text
    for label, text in (
        ("llama3_json-5", '{"city": "Paris"}'),
        ("llama3_json-5", '{"name": "Paris"}'),
        ("mistral-3", "[TOOL_CALLS]unknown[ARGS]{}"),
        ("mistral-3", "[TOOL_CALLS]" + "x" * 2000),
        ("deepseek_v31-7", deepseek("tool calls begin") + " {"),
        ("granite-1", "<|tool_call|> [ ] {"),
    ):
        events = feed([text], FORMATS[label])
        assert whole_calls(events) == [], text
        assert content(events) == text


def test_what_models_write_is_read_leniently() -> None:
    inner = '{"name": "get_weather", "arguments": {"a": 1}}'
    for label, text, expected in (
        ("hermes-0", f"<tool_call>{inner}", [{"a": 1}]),
        ("hermes-0", f"Hi <tool_call>{inner}</tool_call>{inner}", [{"a": 1}]),
        ("hermes-0", '<tool_call>{"name": "get_weather"}</tool_call>', [{}]),
        ("hermes-0", '<tool_call>{"name": "get_weather", "arguments": null}</tool_call>', [{}]),
        ("hermes-0", '<tool_call>{"name": "get_weather", "arguments": ""}</tool_call>', [{}]),
        (
            "hermes-0",
            '<tool_call>{"name": "get_weather", "arguments": "{\\"a\\": \\"}\\"}"}</tool_call>',
            [{"a": "}"}],
        ),
        ("hermes-0", f"<tool_call>{inner.replace('arguments', 'parameters')}", [{"a": 1}]),
        ("llama3_json-5", f" \n{inner};{inner}", [{"a": 1}] * 2),
        ("mistral-3", '[TOOL_CALLS]get_weather[CALL_ID]ab12[ARGS]{"a": 1}', [{"a": 1}]),
        ("mistral-3", '[TOOL_CALLS]get_weather{"a": 1}', [{"a": 1}]),
        ("granite-1", f"<|tool_call|>{inner}", [{"a": 1}]),
        ("granite-1", f"<|tool_call|>[{inner}", [{"a": 1}]),
    ):
        assert [one for _, one in whole_calls(feed([text], FORMATS[label]))] == expected, text


def test_what_follows_a_call_that_breaks_off_is_read() -> None:
    begin = '<tool_call>{"name": "get_weather", "arguments": {"a": 1'
    other = '{"name": "find-it", "arguments": {}}'
    one, two = [("get_weather", {"a": 1})], [("get_weather", {"a": 1}), ("find-it", {})]
    listed = begin.replace("<tool_call>", "[TOOL_CALLS][")
    for label, text, found, said in (
        # Calls, and the text that a stream sends.
        ("hermes-0", begin + "}\n</tool_call>\nIt is cold.", one, "It is cold."),
        ("hermes-0", begin + "}\nIt is cold.", one, "It is cold."),
        ("hermes-0", begin + "}, and cold.", one, ", and cold."),
        ("hermes-0", begin + '}, "a": ' + "x" * 600, one, ', "a": ' + "x" * 600),
        ("hermes-0", begin + "}", one, ""),
        ("hermes-0", begin + '}, "id": "a}<b", "n": 1}</tool_call>', one, ""),
        ("hermes-0", begin + "}</tool_call><tool_call>" + other + "</tool_call>", two, ""),
        ("hermes-0", begin + "</tool_call>It is cold.", [], "</tool_call>It is cold."),
        ("hermes-0", begin + "</tool_call><tool_call>" + other, two[1:], "</tool_call>"),
        ("mistral-4", listed + "}, " + other + "]", two, ""),
        ("llama3_json-5", begin.removeprefix("<tool_call>") + "}; " + other, two, ""),
        (
            "deepseek_v31-7",
            deepseek("tool calls begin") + BEGIN + "f.2" + SEP + '{"a": 1' + SEP + "cold",
            [],
            SEP + "cold",
        ),
    ):
        for parts in ([text], [*text, ""]):
            events = feed(parts, FORMATS[label])
            assert whole_calls(events) == found, text
            assert "".join(e.text for e in events if isinstance(e, TextEvent)) == said, text


def test_whitespace_between_texts_is_kept_once_across_calls() -> None:
    call = '<tool_call>{"name": "f.2", "arguments": {}}\n</tool_call>'
    other = call.replace("f.2", "no")
    for text, kept in (
        (f"Let me add. {call}\nThen more.", "Let me add.\nThen more."),
        (f"One\n\n{call}two", "One\n\ntwo"),
        (f"One{call} two", "One two"),
        (f"One{call}two", "Onetwo"),
        (f"One{call[:-13]} two", "One two"),
        (f"One\n{call}\n{call} \ntwo{call} three", "One \ntwo three"),
        (f"One\n{call}\n{call}two", "One\ntwo"),
        (f"One {call}\n{call}", "One"),
        (f" {call} two", "two"),
        (f"<think>\nHm\n</think>\n\n{call}\ntwo\n{call}\n", "two"),
        (f"<think>\nHm\n</think>\n\none{call}\n\ntwo", "one\n\ntwo"),
        (f"One {call}\n{other}", f"One\n{other}"),
        (f"One {call}\n{other}\ntwo", f"One\n{other}\ntwo"),
    ):
        for parts in ([text], [*text, ""]):
            said = content(feed(parts, FORMATS["hermes-0"], THOUGHT["qwen3"]))
            assert said == kept, text


def test_arguments_come_as_they_grow() -> None:
    head, body, tail = '<tool_call>{"name": "get_weather", "arguments": ', '{"city": "Par', 'is"}}'
    events = feed([head, *body, tail], FORMATS["hermes-0"])
    grown = [one.text for one in events if isinstance(one, ArgumentsEvent)]
    assert grown == [*body, 'is"}']


def test_text_comes_with_its_token() -> None:
    """Nothing waits for a further token but what may become a mark."""
    whole = '<tool_call>{"name": "f.2", "arguments": {}}</tool_call>'
    for text, shown in ((f"{whole}Yes", "Yes"), ("<tool_call>no", "<tool_call>no"), ("a<b", "a<b")):
        reader = AnswerReader(ToolUse(FORMATS["hermes-0"], FUNCTIONS, "auto", True), None)
        assert content(reader.feed(Delta("r", text, (Token(0, text, None, False),)))) == shown


def test_arguments_keep_their_letters() -> None:
    text = '<tool_call>{"arguments": {"a": "日本 é"}, "name": "f.2"}</tool_call>'
    [call] = calls(feed([text], FORMATS["hermes-0"]))
    assert call.arguments == '{"a": "日本 é"}'


def test_further_calls_are_text_if_one_is_allowed() -> None:
    first, second = '{"name": "f.2", "arguments": {}}', '{"name": "find-it", "arguments": {}}'
    for label, text, rest in (
        ("granite-1", f"<|tool_call|>[{first}, {second}]", f"{second}]"),
        ("llama3_json-5", f"{first}; {second}", second),
        ("hermes-0", f"<tool_call>{first}</tool_call><tool_call>{second}", f"<tool_call>{second}"),
    ):
        events = feed([text], FORMATS[label], parallel=False)
        assert whole_calls(events) == [("f.2", {})]
        assert content(events) == rest


def test_reasoning_is_split_from_the_text() -> None:
    r1, granite = THOUGHT["deepseek_r1"], THOUGHT["granite"]
    begin, end = "Here is my thought process:", "Here is my response:"
    for text, form, inside, thought, rest in (
        ("<think>\nHm.\n</think>\n\nYes", r1, False, "Hm.", "Yes"),
        ("Hm.</think>Yes", r1, True, "Hm.", "Yes"),
        ("<think>\n\n</think>\n\nYes", r1, False, "", "Yes"),
        ("<think>Hm", r1, False, "Hm", ""),
        (" Yes, <think>no</think>", r1, False, "", " Yes, <think>no</think>"),
        ("Yes </think>", r1, False, "", "Yes </think>"),
        ("[THINK]Hm[/THINK]Yes", THOUGHT["mistral"], False, "Hm", "Yes"),
        (f"{begin} Hm\n\n{end} Yes", granite, False, "Hm", "Yes"),
    ):
        events = feed([*text, ""], None, form, inside=inside)
        thoughts = [one.text for one in events if isinstance(one, ReasoningEvent)]
        assert ("".join(thoughts), content(events)) == (thought, rest), text


def test_a_call_follows_reasoning() -> None:
    text = '<think>Use <tool_call>?</think>\n{"name": "f.2", "parameters": {}}'
    events = feed([*text, ""], FORMATS["llama3_json-5"], THOUGHT["qwen3"])
    assert whole_calls(events) == [("f.2", {})]
    assert content(events) == ""
    num = sum(len(one.tokens) for one in events if isinstance(one, ReasoningEvent))
    assert num == len("<think>Use <tool_call>?</think>")
