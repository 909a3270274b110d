"""Calls of tools from a request to its answer, sampled from random logits. `jsonschema` judges their arguments."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

jsonschema = pytest.importorskip("jsonschema", reason="judges the arguments")
pytest.importorskip("llguidance", reason="holds the calls")

from djl_python_neuronx import grammar  # noqa: E402
from djl_python_neuronx.backends.base import ModelSpec, Want  # noqa: E402
from djl_python_neuronx.engine.speculation import NgramProposer  # noqa: E402
from djl_python_neuronx.engine.streams import BlockingQueue  # noqa: E402
from djl_python_neuronx.errors import RequestError, UnsupportedParameterError  # noqa: E402
from djl_python_neuronx.protocol.answers import AnswerFormatter  # noqa: E402
from djl_python_neuronx.service import Service  # noqa: E402
from tests.doubles.byte_tokenizer import ByteTokenizer  # noqa: E402
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend  # noqa: E402
from tests.doubles.toy_service import toy_service  # noqa: E402
from tests.effort import examples  # noqa: E402

SPEC = replace(TOY_SPEC, num_slots=16, max_model_len=512, vocab_size=320, token_buckets=())
VERIFIES = replace(SPEC, num_speculative_tokens=3, outputs=Want.LOGITS | Want.ALL_LOGITS)
ALONE = replace(SPEC, outputs=Want.TOKENS, largest_top_k=64)
SCHEMAS: dict[str, dict[str, Any] | None] = {
    "find_person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 14},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "ab", 'é"\\}']}, "maxItems": 3},
            "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
        "$defs": {"place": {"const": {"x": [1, True, None]}}},
    },
    "find": {
        "type": "object",
        "properties": {"code": {"type": "string", "pattern": "^[a-c]{2,5}-[0-9]{3}$"}},
        "required": ["code"],
        "additionalProperties": False,
    },
    "move": {
        "properties": {
            "by": {"oneOf": [{"const": "far"}, {"type": "integer", "minimum": -5, "maximum": 5}]},
            "on": {"type": "string", "format": "date"},
        },
        "patternProperties": {"^x[a-z]?$": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "now": None,
}
TOOLS = [
    {"type": "function", "function": {"name": name, **({"parameters": one} if one else {})}}
    for name, one in SCHEMAS.items()
]
DS = "<\uff5ctool\u2581{}\uff5c>"
BEGIN = DS.format("calls\u2581begin")
FORMATS: Mapping[str, tuple[str, str, Sequence[str]]] = {
    "hermes": ('tools <tool_call>\n{"name": ', "<tool_call>", ()),
    "granite": ("tools <|tool_call|>", "<|tool_call|>", ("<|tool_call|>",)),
    "granite 3": ("tools <tool_call>[", "<tool_call>", ()),
    "mistral": ("tools [TOOL_CALLS] [ARGS]", "[TOOL_CALLS]", ("[TOOL_CALLS]", "[ARGS]")),
    "mistral 7": ("tools [TOOL_CALLS]", "[TOOL_CALLS]", ("[TOOL_CALLS]",)),
    "llama3_json": ("tools <|python_tag|>", "<|python_tag|>", ("<|python_tag|>",)),
    "llama3_json bare": ("tools <|python_tag|>", '{"name": "find', ()),
    "deepseek_v3": (f"tools {DS.format('call▁begin')} ```json", BEGIN, ()),
    "deepseek_v31": (f"tools {DS.format('call▁begin')}", BEGIN, (BEGIN, DS.format("sep"))),
}
"""Templates by which formats are found, the text with which a call opens, and marks that are special tokens."""
MARK_ID = 318


class MarkTokenizer(ByteTokenizer):
    """Bytes, some special tokens, and the token `MARK_ID` of a mark, which is special or not."""

    def __init__(self, template: str, mark: str, special: Sequence[str] = ()) -> None:
        super().__init__(SPEC.vocab_size)
        self.template = template
        others = [one for one in special if one != mark]
        ids = {one: 310 + i for i, one in enumerate(others)}
        if mark in special:
            ids[mark] = MARK_ID
        pieces = [*self.pieces]
        pieces[MARK_ID] = b"" if mark in special else mark.encode()
        self.pieces, self._marks = pieces, ids
        self.special_ids = frozenset({0, 1, 2, *ids.values()})

    def special_id(self, text: str) -> int | None:
        """See `Tokenizer`."""
        return self._marks.get(text, super().special_id(text))

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer`."""
        names = {one: text.encode() for text, one in self._marks.items()}
        return names.get(token_id) or super().token_bytes(token_id)


def serve(name: str, spec: ModelSpec = SPEC, **settings: Any) -> Service:
    proposer = NgramProposer(spec, 3) if spec.num_speculative_tokens else None
    tokenizer = MarkTokenizer(*FORMATS[name])
    return toy_service(ToyBackend(spec), tokenizer=tokenizer, proposer=proposer, **settings)


def body(seed: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{seed}"}]
    return {"messages": messages, "seed": seed, "temperature": 1.2, "max_tokens": 400, **more}


def chat(service: Service, bodies: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The answers of chats, all at the same time."""
    inbox, formatters, found = BlockingQueue(), dict[str, AnswerFormatter](), dict[str, bytes]()
    names = []
    for one in bodies:
        parsed = service.parse(json.dumps(one).encode(), path="/v1/chat/completions")
        assert isinstance(parsed.formatter, AnswerFormatter)
        formatters |= {request.request_id: parsed.formatter for request in parsed.requests}
        names.append([request.request_id for request in parsed.requests])
        service.loop.submit_all(service.loop.prepare(*parsed.requests), inbox)
    left = len(formatters)
    while left:
        for delta in inbox.drain(60):
            found[delta.request_id] = formatters[delta.request_id].feed(delta)
            left -= delta.finished
    return [json.loads(b"".join(found[one] for one in group)) for group in names]


def wrong_calls(message: Mapping[str, Any], tools: Iterable[str] = SCHEMAS) -> list[Any]:
    """The calls of a message that do not fit their tool."""
    wrong = []
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        schema = SCHEMAS.get(name, {}) or {"maxProperties": 0}
        validator = jsonschema.Draft202012Validator(
            {"type": "object", **schema},
            format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
        )
        if name not in tools or not validator.is_valid(json.loads(arguments)):
            wrong.append(call)
    return wrong


EACH = examples(4 * 38)
"""Answers of a format; 38 of each make 300."""


@pytest.mark.parametrize("spec", [SPEC, VERIFIES], ids=["plain", "drafts"])
def test_sampled_calls_all_fit_their_schemas_where_one_is_required(spec: ModelSpec) -> None:
    count, num_cut, wrong, names = 0, 0, [], Counter[str]()
    for name in FORMATS.keys() - {"llama3_json bare"}:
        service = serve(name, spec)
        one = {"type": "function", "function": {"name": "find"}}
        hows: list[dict[str, Any]] = [
            {"tool_choice": "required", "parallel_tool_calls": False},
            {"tool_choice": "required"},
            {"tool_choice": one},
        ]
        bodies = [body(i, tools=TOOLS, **hows[i % 3]) for i in range(EACH if spec is SPEC else 6)]
        try:
            answers = chat(service, bodies)
        finally:
            service.close()
        for given, answer in zip(bodies, answers, strict=True):
            choice = answer["choices"][0]
            message, calls = choice["message"], choice["message"].get("tool_calls", [])
            allowed = ["find"] if given["tool_choice"] == one else SCHEMAS
            alone = given["tool_choice"] == one or "parallel_tool_calls" in given
            num_cut += choice["finish_reason"] == "length"
            fits = choice["finish_reason"] == "length" or (
                choice["finish_reason"] == "tool_calls"
                and message["content"] is None
                and (len(calls) == 1 if alone else len(calls) >= 1)
            )
            if wrong_calls(message, allowed) or not fits:
                wrong.append((name, given["seed"], choice))
            count += len(calls)
            names.update(call["function"]["name"] for call in calls)
    assert wrong == []
    assert num_cut < count / 10
    assert names.keys() == SCHEMAS.keys()
    assert spec is not SPEC or count >= 300


def test_every_call_that_opens_fits_its_schema_where_the_model_chooses() -> None:
    opened, cut, free, wrong = 0, 0, 0, []
    for name, (_, mark, _) in FORMATS.items():
        service = serve(name)
        more = {
            "tools": TOOLS,
            "logit_bias": {MARK_ID: 9 if "bare" in name else 5},
            "max_tokens": 80,
        }
        bodies = [body(i, parallel_tool_calls=i % 4 == 0, **more) for i in range(EACH)]
        try:
            answers = chat(service, bodies)
        finally:
            service.close()
        for given, answer in zip(bodies, answers, strict=True):
            choice = answer["choices"][0]
            message = choice["message"]
            content, calls = message["content"] or "", message.get("tool_calls", [])
            # Text without a call has no mark. The last call may break off: it is text.
            left = content.startswith(f'{mark}"') if "bare" in name else mark in content
            is_cut = choice["finish_reason"] == "length"
            opened += len(calls) + left
            cut += is_cut and left
            free += not calls
            if (
                wrong_calls(message)
                or left > is_cut
                or (calls and not is_cut and choice["finish_reason"] != "tool_calls")
            ):
                wrong.append((name, given["seed"], choice))
            if not given["parallel_tool_calls"] and len(calls) > 1:
                wrong.append((name, given["seed"], choice))
    assert wrong == []
    assert opened >= 300
    assert cut > 3
    assert free > 3


ASCII = [one + 3 for one in range(32, 127)]
"""Tokens of `ByteTokenizer`, each of them a letter."""


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3_json"])
def test_a_text_without_a_call_is_that_of_the_same_request_without_tools(name: str) -> None:
    """Token by token, with each of 24 seeds."""
    service = serve(name)
    more = {"allowed_token_ids": [*ASCII, 2], "max_tokens": 60, "logprobs": True}
    bodies = [body(i, **more) for i in range(24)]
    try:
        plain = chat(service, bodies)
        tools = chat(service, [{**one, "tools": TOOLS} for one in bodies])
    finally:
        service.close()
    for before, after in zip(plain, tools, strict=True):
        assert after["choices"] == before["choices"]
        assert after["usage"] == before["usage"]


def test_tools_are_served_without_a_grammar_or_refused_where_none_can_be_enforced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a device that samples, by texts of tokens that depend on others, and without llguidance."""
    refused = {"tools": TOOLS, "tool_choice": "required", "top_k": 5}
    dependent = MarkTokenizer(*FORMATS["hermes"])
    dependent.pieces = None
    services = {
        r"tool_choice.*option\.output_logits": serve("hermes", ALONE),
        "tool_choice cannot be enforced, because the text": toy_service(
            ToyBackend(SPEC), tokenizer=dependent
        ),
        r"tool_choice needs llguidance .*pip install": serve("hermes"),
    }
    for reason, service in services.items():
        try:
            if "llguidance" in reason:
                monkeypatch.setitem(sys.modules, "llguidance", None)
                grammar._library.cache_clear()
            unseeded = {**body(1, **refused), "seed": None, "max_tokens": 20}
            auto = {**unseeded, "tool_choice": "auto"}
            parsed = service.parse(json.dumps(auto).encode(), path="/v1/chat/completions")
            assert parsed.request.grammar is None
            if service.tokenizer.pieces is not None:  # the double makes no text otherwise
                (answer,) = chat(service, [auto])
                assert answer["usage"]["completion_tokens"] > 0
            with pytest.raises(UnsupportedParameterError, match=reason):
                chat(service, [unseeded])
        finally:
            service.close()
            grammar._library.cache_clear()


def test_what_else_a_request_has_keeps_its_meaning_beside_calls() -> None:
    """Limits and stop strings cut a call, which is text then; priority, n and drafts change nothing."""
    service = serve("hermes", scheduling_policy="priority")
    asked = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    try:
        whole, *others = chat(
            service, [body(7, **asked), body(7, **asked, priority=3), body(7, **asked, n=3)]
        )
        cut, stopped = chat(
            service, [body(7, **{**asked, "max_tokens": 25}), body(7, **asked, stop=["arguments"])]
        )
        unfit = {"name": "find", "strict": True, "parameters": {"uniqueItems": True}}
        with pytest.raises(RequestError, match=r"of find cannot be enforced: .*unique") as raised:
            chat(service, [body(7, tools=[{"type": "function", "function": unfit}])])
    finally:
        service.close()
    assert raised.value.param == "tools"

    def functions(answer: Mapping[str, Any], index: int = 0) -> list[Any]:
        calls = answer["choices"][index]["message"].get("tool_calls", [])
        return [one["function"] for one in calls]

    (call,) = functions(whole)
    assert [functions(one) for one in others] == [[call]] * 2
    assert [len(functions(others[1], i)) for i in (1, 2)] == [1, 1]
    for answer, reason in ((cut, "length"), (stopped, "stop")):
        choice = answer["choices"][0]
        assert (choice["finish_reason"], functions(answer)) == (reason, [])
        assert choice["message"]["content"].startswith("<tool_call>")


def test_calls_and_structured_output_come_after_reasoning() -> None:
    """Of a model that may begin with it, and of one whose template has begun it."""
    wrong, thought = [], Counter[bool]()
    schema = SCHEMAS["find"]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for inside in (False, True):
        tokenizer = MarkTokenizer(f"{FORMATS['hermes'][0]} <think>", "</think>", ["</think>"])
        begin = "<think>\n" if inside else ""
        service = toy_service(ToyBackend(SPEC), tokenizer=tokenizer)
        hows: list[dict[str, Any]] = [
            {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
            {"response_format": form},
            {"tools": TOOLS, "response_format": form, "parallel_tool_calls": False},
        ]
        bias = {MARK_ID: 6, 3 + ord("<"): 2 * (not inside)}
        bodies = [body(i, logit_bias=bias, **hows[i % 3]) for i in range(42)]
        for i, one in enumerate(bodies):
            one["messages"][0]["content"] = f"{i}{begin}"
        try:
            answers = chat(service, bodies)
        finally:
            service.close()
        for given, answer in zip(bodies, answers, strict=True):
            choice = answer["choices"][0]
            message, calls = choice["message"], choice["message"].get("tool_calls", [])
            thought[bool(message.get("reasoning_content"))] += 1
            fits = len(calls) == 1 and message["content"] is None and not wrong_calls(message)
            if not calls and "response_format" in given:
                fits = jsonschema.Draft202012Validator(schema).is_valid(
                    json.loads(message["content"])
                )
            if not fits and choice["finish_reason"] != "length":
                wrong.append((inside, given["seed"], choice))
    assert wrong == []
    assert min(thought[True], thought[False]) > 5


def test_whitespace_at_the_beginning_is_not_the_beginning_of_reasoning() -> None:
    """Of a model that likes to begin with lines, and would not reason by itself."""
    service = toy_service(
        ToyBackend(SPEC), tokenizer=MarkTokenizer(f"{FORMATS['hermes'][0]} <think>", "</think>")
    )
    schema = SCHEMAS["find"]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    required = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    hows: list[dict[str, Any]] = [
        {"response_format": form},
        required,
        {"tools": TOOLS, "response_format": form},
    ]
    bias = {3 + ord("\n"): 20, 3 + ord("<"): -100, 3 + ord("h"): -100}
    bodies = [body(i, logit_bias=bias, **hows[i % 3]) for i in range(24)]
    try:
        answers = chat(service, bodies)
    finally:
        service.close()
    wrong = []
    for given, answer in zip(bodies, answers, strict=True):
        message = answer["choices"][0]["message"]
        if "response_format" in given:
            value = json.loads(message["content"] or "null")
            fits = jsonschema.Draft202012Validator(schema).is_valid(value)
        else:
            fits = len(message.get("tool_calls", [])) == 1 and not wrong_calls(message)
        if not fits:
            wrong.append((given, answer["choices"]))
    assert wrong == []
