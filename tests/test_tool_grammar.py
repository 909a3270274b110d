"""Grammars of calls and of what follows reasoning: what they accept, written out as the models' templates have it."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jsonschema", reason="judges arguments")
pytest.importorskip("llguidance", reason="enforces them")

import jsonschema

from djl_python_neuronx.engine.detokenizer import Delta, Token
from djl_python_neuronx.engine.grammars import Grammar, Grammars
from djl_python_neuronx.errors import RequestError
from djl_python_neuronx.grammar import Vocabulary, checked, matcher
from djl_python_neuronx.protocol.answers import CallEvent, TextEvent
from djl_python_neuronx.protocol.reading import AnswerReader
from djl_python_neuronx.protocol.tools import TOOL_FORMATS, ToolFormat, ToolFunction, ToolUse
from djl_python_neuronx.types import EngineRequest, FinishReason
from tests.doubles.toy_backend import TOY_SPEC
from tests.effort import examples

SPECIAL = {
    one: 300 + i
    for i, one in enumerate(
        ("[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|python_tag|>", "<think>", "</think>")
    )
}
END = 300 + len(SPECIAL)
PIECES = [*(bytes([i]) for i in range(256)), *[b""] * 44, *map(str.encode, SPECIAL), b"</s>"]
TOKENS = Vocabulary(PIECES, [*SPECIAL.values(), END], END).tables
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "A town.", "default": "Bath"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
}
UNIQUE = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
TOOLS = [
    ("get", UNIQUE, False),
    ("get_weather", WEATHER, True),
    ("now", None, False),
    ("a.b:c", None, False),
]
BATH, OSLO = '{"city": "Bath }"}', '{"city":"Oslo","days":2}'
DS = "<\uff5ctool\u2581{}\uff5c>"
CALLS, ENDS, BEGIN, END_ONE, SEP = (
    DS.format(one)
    for one in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
)


@dataclass
class Written:
    """Texts of a format, by hand from the chat templates of models that have it."""

    one: str
    two: str
    other: str
    """With other whitespace, as some models write it."""


WRITTEN: Mapping[str, Written] = {
    "hermes": Written(
        f'<tool_call>\n{{"name": "get_weather", "arguments": {BATH}}}\n</tool_call>',
        f'<tool_call>\n{{"name": "get_weather", "arguments": {BATH}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        f'<tool_call>{{"name":"get_weather","arguments":{OSLO}}}</tool_call>',
    ),
    "granite <|tool_call|>": Written(
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {BATH}}}]',
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {BATH}}}, {{"name": "now", "arguments": {{}}}}]',
        f'<|tool_call|> [{{"name":"get_weather","arguments":{OSLO}}}]',
    ),
    "granite <tool_call>": Written(
        f'<tool_call>[{{"name": "get_weather", "arguments": {BATH}}}]',
        f'<tool_call>[{{"name": "get_weather", "arguments": {BATH}}}, {{"name": "now", "arguments": {{}}}}]',
        f'<tool_call>\n[ {{"name":"get_weather","arguments":{OSLO}}} ]',
    ),
    "mistral [ARGS]": Written(
        f"[TOOL_CALLS]get_weather[ARGS]{BATH}",
        f"[TOOL_CALLS]get_weather[ARGS]{BATH}[TOOL_CALLS]now[ARGS]{{}}",
        f"[TOOL_CALLS]get_weather[ARGS]{OSLO}",
    ),
    "mistral [TOOL_CALLS][": Written(
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {BATH}}}]',
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {BATH}}}, {{"name": "now", "arguments": {{}}}}]',
        f'[TOOL_CALLS] [{{"name":"get_weather","arguments":{OSLO}}}]',
    ),
    "llama3_json": Written(
        f'{{"name": "get_weather", "parameters": {BATH}}}',
        f'{{"name": "get_weather", "parameters": {BATH}}}; {{"name": "now", "parameters": {{}}}}',
        f'{{"name":"get_weather","parameters":{OSLO}}}',
    ),
    "deepseek_v3": Written(
        f"{CALLS}{BEGIN}function{SEP}get_weather\n```json\n{BATH}\n```{END_ONE}{ENDS}",
        f"{CALLS}{BEGIN}function{SEP}get_weather\n```json\n{BATH}\n```{END_ONE}\n"
        f"{BEGIN}function{SEP}now\n```json\n{{}}\n```{END_ONE}{ENDS}",
        f"{CALLS}{BEGIN}function{SEP}get_weather\n```json\n{OSLO}\n```{END_ONE}{ENDS}",
    ),
    "deepseek_v31": Written(
        f"{CALLS}{BEGIN}get_weather{SEP}{BATH}{END_ONE}{ENDS}",
        f"{CALLS}{BEGIN}get_weather{SEP}{BATH}{END_ONE}{BEGIN}now{SEP}{{}}{END_ONE}{ENDS}",
        f"{CALLS}{BEGIN}get_weather{SEP}{OSLO}{END_ONE}{ENDS}",
    ),
}


def row(name: str) -> ToolFormat:
    """The format of a name of `WRITTEN`: a format's name, and a text of the row that is meant."""
    first, *part = name.split(" ")
    return next(
        one
        for one in TOOL_FORMATS
        if one.name == first and "".join(part) in f"{one.before} {one.between} {one.opens}"
    )


def value(
    name: str, choice: str, special: Mapping[str, int], *, parallel: bool = True
) -> dict[str, Any]:
    tools = TOOLS[2:3] if choice == "named" else TOOLS
    more = {"tools": tools, "choice": choice, "parallel": parallel, "text": None}
    return {**vars(row(name)), "special": special, **more}


def tokens(text: str, known: Mapping[str, int]) -> list[int]:
    """The ids of a text, its special tokens as such."""
    parts = re.split(f"({'|'.join(map(re.escape, known))})", text) if known else [text]
    return [one for part in parts for one in ([known[part]] if part in known else part.encode())]


def accepts(grammar: str, text: str, known: Mapping[str, int]) -> bool:
    """True if the text fulfils a grammar."""
    compiled, ids = matcher(grammar, TOKENS), tokens(text, known)
    num_read: int = compiled.try_consume_tokens(ids)
    return num_read == len(ids) and bool(compiled.is_accepting())


def test_calls_of_each_format_are_accepted_as_the_choice_asks_and_others_are_not() -> None:
    """With marks that are special tokens, and with the same text in ordinary ones."""
    assert {one.split()[0] for one in WRITTEN} == {one.name for one in TOOL_FORMATS}
    wrong = []
    for name, written in WRITTEN.items():
        mark = re.match(r"<[^>]*>|\[[A-Z_]+]|", written.one)[0]  # type: ignore[index]
        cut = written.one[: len(written.one) // 2]
        first, named = (
            one.replace("get_weather", "now").replace(BATH, "{}")
            for one in (written.one, written.two)
        )
        unknown = written.one.replace("get_weather", "got")
        dotted = written.one.replace("get_weather", "a.b:c").replace(BATH, "{}")
        spaced = dotted.replace("a.b:c", "a.b: c")
        unfit = written.one.replace(BATH, '{"days": 2}')
        free = ["", "Hello.\n", '{"name": "Alice"}', '{"name": "get", "age": 2}', '[{"a": 1}]']
        for known in ({}, SPECIAL):
            grammars = {
                how: checked("tools", json.dumps([value(name, choice, known, parallel=many), None]))
                for how, choice, many in (
                    ("auto", "auto", True),
                    ("one of auto", "auto", False),
                    ("required", "required", True),
                    ("one", "required", False),
                    ("named", "named", False),
                )
            }
            calls = [written.one, written.other]
            wanted = {
                "auto": ([*free, *calls, written.two], [unfit, cut if mark else unfit]),
                "one of auto": ([*free, *calls], [unfit, written.two]),
                "required": ([*calls, written.two, dotted], [*free, unknown, unfit, cut, spaced]),
                "one": (calls, [*free, unknown, unfit, written.two]),
                "named": ([first], [*free, *calls, named]),
            }
            if mark:
                beside = [f"Hello.\n{written.one}", f"Hello <{written.two}"]
                again = f"{written.one} Hello {written.one}"
                wanted["auto"][name not in ("hermes", "mistral [ARGS]")].append(again)
                wanted["auto"][0].extend(beside)
                wanted["auto"][1].extend([mark, f"Hello {mark}", unknown, f"{mark}{mark}"])
                wanted["one of auto"][0].extend(beside[:1])
                wanted["one of auto"][1].extend([mark, beside[1], f"{written.one}{mark}"])
            for how, (good, bad) in wanted.items():
                wrong += [
                    (name, how, bool(known), text)
                    for text in (*good, *bad)
                    if accepts(grammars[how], text, known) != (text in good)
                ]
    assert wrong == []


def test_a_call_may_have_an_id_where_the_format_has_a_mark_for_it() -> None:
    for special in ({}, {**SPECIAL, "[CALL_ID]": 299}):
        for choice in ("auto", "required"):
            grammar = checked("tools", json.dumps([value("mistral [ARGS]", choice, special), None]))
            text = f"[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{BATH}"
            cases = {text: True, text.replace("a1B2c3D4e", ""): False}
            assert {one: accepts(grammar, one, special) for one in cases} == cases


def test_a_call_without_a_mark_is_held_from_its_name_and_arguments_on() -> None:
    """Free text is no call for the reader either."""
    grammar = checked("tools", json.dumps([value("llama3_json", "auto", {}), None]))
    cases = {
        f' {{"type": "function", "name": "get_weather", "parameters": {BATH}}}': True,
        f'{{"id": 7, "name": "get_weather", "arguments": {BATH}}}': True,
        f'{{"id": "{"7" * 600}",{" " * 70}"name": "get_weather", "arguments": {BATH}}}': True,
        f'{" " * 64}{{"name": "get_weather", "arguments": {BATH}}}': True,
        f'{" " * 65}{{"name": "get_weather", "arguments": 5}}': True,
        '\u00a0{"name": "get_weather", "arguments": 5}': False,
        '\x1c{"name": "get_weather", "arguments": 5}': False,
        '{"type": "function", "name": "get_weather", "parameters": {}}': False,
        '{"name": "get_weather", "id": "a\\"b", "parameters": {}}': False,
        '{"name": "get_weather", "parameters": 5}': False,
        f'{{"name": "get_weather", "parameters": {BATH}}} and': False,
        f'So: {{"name": "get_weather", "parameters": {BATH}}} and': True,
        '{"name": "got", "parameters": 5}': True,
        '{"names": "get_weather", "parameters": 5}': True,
        '{"name": "get_weather", "size": 1, "parameters": 5}': True,
        '{"name": "get_weather"}': True,
        '{"tools": [{"name": "get_weather", "parameters": 5}]}': True,
        '["a"] {': True,
        '{"parameters": {"days": 99}, "name": "get_weather"}': True,
        '{"name": "get_weather", "name": "now", "parameters": {"days": 99}}': True,
        '{"n\\u0061me": "get_weather", "parameters": {"days": 99}}': True,
        '{"type": {}, "name": "get_weather", "parameters": {"days": 99}}': True,
    }
    assert [text for text, good in cases.items() if accepts(grammar, text, {}) != good] == []
    form = next(one for one in TOOL_FORMATS if one.bare)
    functions = {name: ToolFunction(name=name, parameters=one) for name, one, _ in TOOLS}
    read = {}
    for text in [one for one, good in cases.items() if good]:
        reader = AnswerReader(ToolUse(form, functions, "auto", True), None, is_held=True)
        parts = reader.feed(Delta("r", text, (), FinishReason.EOS))
        calls = [one.call for one in parts if isinstance(one, CallEvent)]
        read[text] = [(one.name, one.arguments) for one in calls if one.whole]
    called = {text: calls for text, calls in read.items() if calls}
    assert called == {text: [("get_weather", BATH)] for text in [*cases][:4]}


def test_a_schema_that_cannot_be_enforced_is_refused_by_name_or_means_any_object() -> None:
    def written(*, strict: bool) -> str:
        tools = [("a", UNIQUE, strict)]
        return checked(
            "tools", json.dumps([{**value("hermes", "required", {}), "tools": tools}, None])
        )

    def call(arguments: str) -> str:
        return f'<tool_call>\n{{"name": "a", "arguments": {arguments}}}\n</tool_call>'

    grammar = written(strict=False)
    texts = {call('{"tags": [1, 1], "b": {"c": null}}'): True, call("[]"): False, call("1"): False}
    assert {text: accepts(grammar, text, {}) for text in texts} == texts
    with pytest.raises(
        RequestError, match=r"of a cannot be enforced: .*uniqueItems.*, or leave out strict"
    ):
        written(strict=True)


def test_many_tools_are_checked_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that cannot be enforced mean any object, wherever they stand; the time does not grow with each tool."""
    compiled = list[str]()

    def counted(grammar: str, tokens: Any) -> Any:
        compiled.append(grammar)
        return matcher(grammar, tokens)

    monkeypatch.setattr("djl_python_neuronx.grammar.matcher", counted)
    many = {"type": "object", "properties": {f"k{i}": {} for i in range(200)}}
    for bad in ({}, {3: UNIQUE, 200: many, 511: UNIQUE}):
        compiled.clear()
        tools = [(f"t{i}", bad.get(i, PLACE), False) for i in range(512)]
        for choice in ("auto", "required"):
            given = {**value("llama3_json", choice, {}), "tools": tools}
            grammar = checked("tools", json.dumps([given, None]))
            held = {
                i: not accepts(grammar, f'{{"name": "t{i}", "parameters": {{"a": [1, 1]}}}}', {})
                for i in (0, 3, 4, 200, 201, 511)
            }
            assert held == {i: i not in bad for i in held}
        assert len(compiled) <= 4 + 40 * len(bad)
    tools[200] = ("t200", many, True)
    with pytest.raises(RequestError, match=r"of t200 cannot be enforced: .* items"):
        checked("tools", json.dumps([{**value("hermes", "auto", {}), "tools": tools}, None]))


REASONING = {"begins": ["<think>"], "ends": ["</think>", "<end>"]}
PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TAG = {"structures": [{"begin": "<f=x>", "schema": PLACE, "end": "</f>"}], "triggers": ["<f="]}
KINDS: Mapping[str, tuple[Any, str, str]] = {
    "json": (PLACE, '{"city": "Bath"}', '{"town": "Bath"}'),
    "json_object": (True, "{}", "[]"),
    "regex": ("[ab]+}", "ab}", "abc"),
    "choice": (["a", "b"], "a", "c"),
    "grammar": ('%ignore / /\nstart: "a" B\nB: /[}{]/', "a }", "a"),
    "structural_tag": (TAG, 'so <f=x>{"city": "Bath"}</f>', "<f=y>"),
    "tools": ("required", WRITTEN["hermes"].one, "hello"),
}


def test_a_grammar_begins_behind_the_reasoning_that_a_text_may_begin_with() -> None:
    thought = "So <tool_call>, \n{ <thin"
    wrong = []
    for known in ({}, SPECIAL):
        for inside in (False, True):
            reasoning = {**REASONING, "special": known, "inside": inside}
            begin = "" if inside else "<think>"
            for kind, (asked, good, bad) in KINDS.items():
                given = value("hermes", "required", known) if kind == "tools" else asked
                is_text = kind == "structural_tag" and not known
                grammar = checked(kind, json.dumps([given, None, reasoning]))
                cases = {
                    good: not inside,
                    f"\n{begin}{thought}</think>{good}": inside or is_text,
                    f"{begin}{thought}</think>{good}": True,
                    f"{begin}</think>\n\n{good}": True,
                    f"{begin}{thought}<end> {good}": True,
                    f"{begin}{thought}</think>{bad}": False,
                    f"{begin}{thought}": False,
                    bad: False,
                }
                if not inside:  # a special token is not spelled
                    spelled = tokens(f"<think>{thought}</think>{good}", {})
                    num_read = matcher(grammar, TOKENS).try_consume_tokens(spelled)
                    assert (num_read == len(spelled)) == (kind == "structural_tag" or not known)
                wrong += [
                    (kind, inside, bool(known), text)
                    for text, fits in cases.items()
                    if accepts(grammar, text, known) != fits
                ]
            grammar = checked(
                "tools", json.dumps([value("hermes", "auto", known), None, reasoning])
            )
            call = WRITTEN["hermes"].one
            cases = {
                f"{begin}{thought}": True,
                f"{begin}{thought}</think>\n\nHello {call}": True,
                f"{begin}{thought}</think>": True,
                f"{begin}{thought}</think><tool_call>": False,
                "Hello <think>": not known,  # no special token but marks
                "Hello <tool_call>": inside,
                f"{' ' * 64}<think><tool_call>": not (inside and known),
                f"{' ' * 65}<think><tool_call>": inside and not known,
            }
            wrong += [
                ("auto", inside, bool(known), text)
                for text, fits in cases.items()
                if accepts(grammar, text, known) != fits
            ]
    assert wrong == []


def test_a_text_beside_calls_may_have_a_grammar_too() -> None:
    for name, known in (("hermes", {}), ("mistral [ARGS]", SPECIAL), ("llama3_json", SPECIAL)):
        text = checked("json", json.dumps([PLACE, None]))
        grammar = checked("tools", json.dumps([{**value(name, "auto", known), "text": text}, None]))
        call = f"<|python_tag|>{WRITTEN[name].one}" if name == "llama3_json" else WRITTEN[name].one
        cases = {
            '{"city": "Bath"}': True,
            '{"name": 1}': False,
            "Hello": False,
            call: True,
            f"\n{call}": False,
            f'{call}{{"city": "Bath"}}': False,
        }
        assert {one: accepts(grammar, one, known) for one in cases} == cases, name


def test_a_sequence_that_goes_on_elsewhere_has_the_same_masks() -> None:
    """Along random texts with calls; as behind a crash, a grammar reads the whole output at once."""
    spec = replace(TOY_SPEC, vocab_size=len(PIECES), eos_ids=frozenset({END}))
    grammars = Grammars([one.decode("latin-1") for one in PIECES], [*SPECIAL.values(), END], spec)
    rng, num_marks = random.Random(5), 0
    reasoning = {**REASONING, "special": SPECIAL, "inside": True}

    def mask(grammar: Grammar, output_ids: list[int]) -> list[int]:
        bits = np.full(-(-spec.vocab_size // 32), 0xFFFFFFFF, np.uint32)
        grammar.narrow(bits, output_ids)
        return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()

    for name in WRITTEN:
        for choice in ("auto", "required"):
            text = checked("tools", json.dumps([value(name, choice, SPECIAL), None, reasoning]))
            request = EngineRequest("a", [1], grammar=text)
            grammar, output_ids = Grammar(grammars, request), list[int]()
            for turn in range(120):
                found = mask(grammar, output_ids)
                if turn % 10 == 0:
                    assert mask(Grammar(grammars, request), output_ids) == found
                marks = [one for one in found if one > 255 and one != END]
                following = marks or [one for one in found if one != END]
                if not following:
                    break
                num_marks += bool(marks)
                output_ids.append(rng.choice(following))
    assert num_marks > 30


def fragments(name: str) -> list[str]:
    """Whole calls of a format, their parts, and what is almost one."""
    form, written = row(name), WRITTEN[name]
    parts = [*form.marks, form.opens, form.before, form.between, form.after, form.separator]
    parts += [piece for part in parts for piece in part.split()]
    named = '{"name": "get_weather", "parameters": '
    parts += [*'{}[],:"\\ \n`', "; ", "Hi ", "now", "get", "got", "null", '"name"', '"arguments"']
    parts += ['"type": "function", ', '"id": 1, ', BATH, OSLO, "{}", '{"days": 99}', named]
    parts += [f'{{"city": "{form.starts[0]}"}}', named + '{"days": 77}}']
    parts += ['{"parameters": {"days": 77}, "name": "get_weather"}']
    return [one for one in dict.fromkeys(parts) if one] + [
        written.one,
        written.two,
        written.other,
    ] * 2


@pytest.mark.parametrize("name", WRITTEN)
def test_the_reader_takes_for_calls_what_the_grammar_holds_alone(name: str) -> None:
    """In texts of fragments that a grammar accepts, with marks that are special tokens and spelled ones."""
    rng, num_calls, pieces, form = random.Random(name), 0, fragments(name), row(name)
    functions = {one: ToolFunction(name=one, parameters=schema) for one, schema, _ in TOOLS}
    for known, parallel in itertools.product(({}, SPECIAL), (True, False)):
        given = value(name, "auto", known, parallel=parallel)
        grammar = matcher(checked("tools", json.dumps([given, None])), TOKENS)
        for _ in range(examples(200)):
            begun, text = grammar.deep_copy(), ""
            for _ in range(rng.randrange(1, 30)):
                piece = rng.choice(pieces)
                ids = tokens(piece, known if rng.random() < 0.7 else {})
                further = begun.deep_copy()
                if further.try_consume_tokens(ids) == len(ids):
                    begun, text = further, text + piece
            size = rng.choice((1, 3, 1000))
            use = ToolUse(form, functions, "auto", parallel)
            reader, events = AnswerReader(use, None, is_held=True), list[Any]()
            for i in range(0, len(text) + size, size):
                token = Token(9, text[i : i + size], None, special=False)
                reason = FinishReason.EOS if i >= len(text) else None
                events += reader.feed(Delta("r", token.text, (token,), reason))
            calls = [one.call for one in events if isinstance(one, CallEvent)]
            for call in [one for one in calls if one.whole]:
                schema = functions[call.name].parameters or {"maxProperties": 0}
                validator = jsonschema.Draft202012Validator(schema)
                assert validator.is_valid(json.loads(call.arguments)), text
            if begun.is_accepting():
                assert all(call.whole for call in calls), text
                free = "".join(one.text for one in events if isinstance(one, TextEvent))
                assert form.starts[0] not in free, text
            num_calls += len(calls)
    assert num_calls > examples(100)
