"""Grammars as requests send them: what is served, and what is refused by name, without harm to others."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

jsonschema = pytest.importorskip("jsonschema", reason="has the keywords")

from djl_python_neuronx.errors import RequestError, TextLimitError  # noqa: E402
from djl_python_neuronx.grammar import KINDS, Vocabulary, checked, matcher  # noqa: E402
from djl_python_neuronx.loading import tokenizer_process  # noqa: E402
from djl_python_neuronx.loading.tokenizer_process import TokenizerProcess  # noqa: E402

TINY = Path(__file__).parents[1] / "examples" / "tiny-llama"
SUITE = Path(__file__).parent / "schemas" / "json_schema_test_suite.jsonl"
"""JSON-Schema-Test-Suite, drafts 2020-12 and 7, its required tests."""
UNUSUAL = {
    *(
        "contains",
        "maxContains",
        "minContains",
        "uniqueItems",
        "unevaluatedItems",
        "not",
        "propertyNames",
        "refRemote",
    ),
    *(
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "if-then-else",
        "unevaluatedProperties",
        "dynamicRef",
    ),
    *("vocabulary", "defs", "definitions"),
}
"""Files about keywords that a text cannot be held to while it grows, or that need other documents. The others have 407
schemas."""
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
KEYWORDS = {
    *jsonschema.Draft202012Validator.VALIDATORS,
    *jsonschema.Draft7Validator.VALIDATORS,
    *("$dynamicAnchor", "else", "then", "maxContains", "minContains", "patternPropert"),
} | {"Unsatisfiable schema", "Anchor"}


BYTES = Vocabulary([bytes([i]) for i in range(256)]).tables


def written(kind: str, value: Any, whitespace: str | None = None) -> str:
    return checked(kind, json.dumps([value, whitespace]))


def accepts(grammar: str, text: str) -> bool:
    """True if the text fulfils a grammar, whose tokens are all bytes."""
    one = matcher(grammar, BYTES)
    content = text.encode()
    return one.try_consume_tokens(list(content)) == len(content) and one.is_accepting()


def spellings(value: Any) -> list[str]:
    """A value's JSON, and that with each letter and digit of its strings escaped."""
    plain = json.dumps(value, ensure_ascii=False)
    inside = re.compile(r'"(?:\\.|[^"\\])*"')
    letter = re.compile(r"\\.|[0-9A-Za-z]")

    def escaped(found: re.Match[str]) -> str:
        return letter.sub(
            lambda one: one[0] if one[0][0] == "\\" else f"\\u{ord(one[0]):04x}", found[0]
        )

    return list(dict.fromkeys([plain, inside.sub(escaped, plain)]))


def test_no_wrong_value_of_the_suite_is_accepted_and_most_schemas_are_served() -> None:
    usual, served, wrong, unnamed = 0, 0, [], []
    accepted: dict[bool, int] = defaultdict(int)
    for line in SUITE.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        draft, _, name = case["file"].partition("/")
        is_usual = name not in UNUSUAL
        usual += is_usual
        try:
            grammar = written("json", {"$schema": DRAFTS[draft], **case["schema"]})
        except RequestError as error:
            if not any(word in str(error) for word in KEYWORDS):
                unnamed.append((case["name"], str(error)))
            continue
        served += is_usual
        for value, valid in case["tests"]:
            for text in spellings(value):
                assert json.loads(text) == value
                if not accepts(grammar, text):
                    continue
                accepted[valid] += 1
                if not valid:
                    wrong.append((case["file"], case["name"], value))
    assert wrong == []
    assert unnamed == []
    assert usual >= 300
    assert served / usual >= 0.76
    assert accepted[True] > 600


DEEP: dict[str, Any] = {}
for _ in range(200):
    DEEP = {"items": DEEP}
OVERLAPPING = [{"properties": {f"k{i}": {"type": "string"}}} for i in range(4)]
HOSTILE: dict[str, tuple[str, Any, str]] = {
    "deep": ("json", DEEP, "recursion limit"),
    "many optional keys": (
        "json",
        {"type": "object", "properties": {f"k{i}": {} for i in range(3000)}},
        "items",
    ),
    "an intersection that explodes": (
        "json",
        {"allOf": [{"anyOf": OVERLAPPING} for _ in range(10)]},
        "too large",
    ),
    "a reference to itself": ("json", {"$ref": "#"}, "no text fulfils it"),
    "another document": ("json", {"$ref": "http://127.0.0.1:9/a.json"}, r"\$ref: .*does not fetch"),
    "a file": ("json", {"$ref": "file:///etc/passwd"}, r"\$ref: .*does not fetch"),
    "not": ("json", {"type": "string", "not": {"const": "a"}}, '"not"'),
    "overlapping branches": ("json", {"oneOf": [{"minimum": 1}, {"maximum": 5}]}, "oneOf"),
    "keys that may come twice": (
        "json",
        {"additionalProperties": {}, "minProperties": 2},
        "minProperties is 2",
    ),
    "a text that only \\u writes": ("json", {"const": "a\x01"}, "const has a control character"),
    "one in a list": ("json", {"enum": ["b", {"k": "\x7f"}]}, "enum has a control character"),
    "one in a pattern": ("json", {"pattern": r"^a\x01$"}, "pattern has a control character"),
    "one in a key's pattern": (
        "json",
        {"patternProperties": {"^\x02": {}}},
        "pattern has a control character",
    ),
    "a class by name": ("json", {"pattern": r"[\p{Cc}a]"}, "pattern has a control character"),
    "a class by its other name": (
        "json",
        {"pattern": "[[:cntrl:]]"},
        "pattern has a control character",
    ),
    "a class of one": ("json", {"pattern": r"[\x01]"}, "pattern has a control character"),
    "least keys below a property named default": (
        "json",
        {"properties": {"default": {"minProperties": 2}}},
        "minProperties is 2",
    ),
    "the library's options": ("json", {"not": {}, "x-guidance": {"lenient": True}}, "x-guidance"),
    "a format": ("json", {"format": "uri-template"}, "format: uri-template"),
    "an exploding regex": (
        "regex",
        "((a{1,100}){1,100}){1,100}{1,100}{1,100}",
        "cannot be enforced",
    ),
    "a look-around": ("regex", "(?=a)b", "regex"),
    "a back-reference": ("regex", r"(a)\1", "regex"),
    "the end of a regex": ("regex", "a\\", "backslash"),
    "parentheses": ("grammar", "root ::= " + "(" * 50_000, "RecursionError"),
    "no rules": ("grammar", "garbage", "GbnfToLarkError"),
    "no grammar": ("grammar", "start: undefined", "undefined"),
    "no tags": (
        "structural_tag",
        {"type": "structural_tag", "format": {}},
        "has 'format'; expected type, structures",
    ),
    "no trigger": (
        "structural_tag",
        {"structures": [{"begin": "<a>"}], "triggers": []},
        "structural_tag",
    ),
    "no JSON": ("json", '{"type":', "JSONDecodeError"),
    "no object": ("json", "3", "is no json that can be read"),
    "a number": ("json", 3, "is a number"),
    "false": ("json_object", False, "expected true"),
    "no choice": ("choice", [], "empty list"),
    "choices that are no texts": ("choice", ["a", 1], "cannot be enforced"),
}


def test_what_is_not_served_is_refused_by_name_and_delays_no_neighbour() -> None:
    """In the processes of a tokenizer, all at once, beside prompts that are encoded."""
    tokenizer = TokenizerProcess(TINY, timeout_s=60.0)
    try:
        with ThreadPoolExecutor(4) as pool:
            asked = {
                name: pool.submit(tokenizer.grammar, kind, json.dumps([value, None]))
                for name, (kind, value, _) in HOSTILE.items()
            }
            while not all(one.done() for one in asked.values()):
                assert tokenizer.encode("The fox")
                time.sleep(0.05)
        problems = []
        for name, (_, _, reason) in HOSTILE.items():
            error = asked[name].exception()
            if type(error) is TextLimitError or not isinstance(error, RequestError):
                problems.append((name, error))
            with pytest.raises(RequestError, match=reason):
                raise error or AssertionError(name)
        assert problems == []
    finally:
        tokenizer.close()


def test_a_verdict_is_kept_and_the_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, goes_on = [], threading.Event()
    goes_on.set()
    call = TokenizerProcess._call

    def counted(self: TokenizerProcess, limit_s: float, kind: str, *more: Any) -> Any:
        calls.append((limit_s, kind))
        goes_on.wait(60)
        return call(self, limit_s, kind, *more)

    monkeypatch.setattr(TokenizerProcess, "_call", counted)
    monkeypatch.setattr(tokenizer_process, "MOST_VERDICTS", 3)
    tokenizer = TokenizerProcess(TINY, timeout_s=60.0)
    try:
        good, bad = json.dumps(["a+", None]), json.dumps(["(?=a)", None])
        for _ in range(3):
            assert tokenizer.grammar("regex", good) == checked("regex", good)
            with pytest.raises(RequestError, match="look-around"):
                tokenizer.grammar("regex", bad)
        assert calls == [(tokenizer_process.GRAMMAR_S, "grammar")] * 2
        for i in range(3):
            tokenizer.grammar("regex", json.dumps([f"b{i}", None]))
        tokenizer.grammar("regex", good)
        assert len(calls) == 6
        calls.clear()
        goes_on.clear()
        with ThreadPoolExecutor(8) as pool:
            text = json.dumps([{"enum": [f"{i}" for i in range(2000)]}, None])
            asked = [pool.submit(tokenizer.grammar, "json", text) for _ in range(8)]
            time.sleep(0.2)  # so that all wait
            goes_on.set()
        assert len(calls) == len({one.result() for one in asked}) == 1
        monkeypatch.setattr(tokenizer_process, "GRAMMAR_S", 1e-4)
        large = json.dumps([{"enum": [f"{i}" for i in range(20_000)]}, None])
        with pytest.raises(
            TextLimitError, match=r"cannot be checked: it takes more than .*; simplify"
        ):
            tokenizer.grammar("json", large)
        monkeypatch.undo()
        assert tokenizer.grammar("json", large), "its failure is not kept"
        assert tokenizer.grammar("regex", good)
    finally:
        tokenizer.close()


STRINGS = [
    "",
    "a",
    "b",
    "ab",
    "-",
    "]",
    "^",
    "[",
    '"',
    "\\",
    "\n",
    "\t",
    '"\\',
    " ",
    "é",
    "😀",
    "\\n",
]
CLASSES = [
    *(r"[^\"]*", r"[^\\]", r"[^\"\\]+", r"[^a]", r"[^-a]", r"[^]a]", r"[^\]]", r"[^^]", r"\["),
    *(
        r"[^\x00-\x1f\"]",
        r"[^\n\"]",
        r"[\x00-!]",
        r"[\x00-\x1f]",
        r"[\u0000-\u001f ]",
        r"[\x00-\x7f]*",
    ),
    *(r"[^\[]\[?", r"\\[^\\]", r"[a-z-]*", r"\S+", r"\W", r"\P{P}", ".", r"(?:[^\"]|\\\")*"),
]


def test_a_pattern_accepts_the_strings_that_it_matches_alone() -> None:
    """As a value's pattern and as a key's; Python's regexes are the oracle."""
    wrong = []
    for regex in CLASSES:
        one = re.compile(regex.replace(r"\P{P}", r"[^][\\\"-]"), re.ASCII)
        value = written("json", {"type": "string", "pattern": f"^{regex}$"})
        key = {"patternProperties": {f"^{regex}$": {"const": 1}}, "additionalProperties": False}
        keys = written("json", {"type": "object", **key})
        for text in STRINGS:
            quoted, matches = json.dumps(text, ensure_ascii=False), one.fullmatch(text) is not None
            if accepts(value, quoted) != matches or accepts(keys, f"{{{quoted}: 1}}") != matches:
                wrong.append((regex, text, matches))
    assert wrong == []


VALUES = {"minProperties": 5, "a": [{"minProperties": 2}]}


def test_a_key_has_one_spelling_and_values_are_no_schemas() -> None:
    role = {"type": "object", "properties": {"role": {"enum": ["user"]}}, "required": ["role"]}
    cases: list[tuple[Any, str, bool]] = [
        (role, '{"role": "user", "r": "admin"}', True),
        (role, '{"role": "user", "\\u0072ole": "admin"}', False),
        (role, '{"role": "user", "role": "admin"}', False),
        ({"properties": {"a": {"type": "integer"}}}, '{"\\u0061": "x"}', False),
        ({"patternProperties": {"^x": {"type": "integer"}}}, '{"\\u0078": "s"}', False),
        ({"patternProperties": {"^x": {"type": "integer"}}}, '{"x": 1, "y": "s"}', True),
        ({"const": VALUES}, json.dumps(VALUES), True),
        ({"const": VALUES}, '{"minProperties": 5}', False),
        ({"enum": [VALUES, 1]}, json.dumps(VALUES), True),
        ({"default": VALUES, "examples": [VALUES], "type": "string"}, '"a"', True),
        ({"properties": {"minProperties": {"const": 3}}}, '{"minProperties": 3}', True),
        ({"properties": {"title": {"const": 3, "title": "A"}}}, '{"title": 3}', True),
        ({"properties": {"title": {"const": 3, "title": "A"}}}, '{"title": 4}', False),
    ]
    wrong = [case for case in cases if accepts(written("json", case[0]), case[1]) != case[2]]
    assert wrong == []


CONTROLS = ["\x7f", "\x01", "\t", "\x85", "\u2028", "😀"]
WHITESPACE = {
    None: (['{"a": 1}', '{"a":1}', '{ "a" :1 }'], ['{"a":  1}', '{\n"a":1}']),
    "": (['{"a":1}'], ['{"a": 1}']),
    "[ \n]+": (['{\n  "a":1\n}', '{"a":1}'], ['{\t"a":1}']),
}


def test_each_kind_accepts_its_texts_alone() -> None:
    schema = {"properties": {"a": {"type": "integer"}}, "required": ["a"], "type": "object"}
    tag = {
        "structures": [{"begin": "<f=x>", "schema": schema, "end": "</f>"}],
        "triggers": ["<f="],
    }
    gbnf = 'root ::= "a" [0-9]+ item\nitem ::= "x" | "y" root'
    wanted: dict[str, list[tuple[Any, list[str], list[str]]]] = {
        "json": [
            (schema, ['{"a": 12, "b": [null]}'], ['{"b": 1}', '{"a": 1.5}', "{}", '{"a": 1']),
            (json.dumps(schema), ['{"a": -2}'], ["[]"]),
            ({"type": "string", "minLength": 2.0}, ['"ab"', '"é\\n"'], ['"a"', '"a\nb"', "ab"]),
        ],
        "json_object": [(True, ["{}", '{"a": {"b": [1, true]}}'], ["[]", "1", "", '{"a"}'])],
        "regex": [(r"^\d{2}/(a|b)\w*$", ["12/a_", "00/b"], ["1/a", "12/aé", "٣٣/a", "x12/a"])],
        "choice": [
            (["a", "ab", 'é"\n\\'], ["a", "ab", 'é"\n\\'], ["abc", "b", ""]),
            (CONTROLS, CONTROLS, ["", "a", "\\u007f"]),
        ],
        "grammar": [
            (gbnf, ["a1x", "a12ya3x"], ["a1", "ax", "a1y"]),
            ('start: "a" B+\nB: /[bc]/', ["ab", "acb"], ["a", "abd"]),
        ],
        "structural_tag": [
            (tag, ["free", 'so <f=x>{"a": 1}</f> and', ""], ["<f=y>", '<f=x>{"b": 1}</f>', "<f="]),
        ],
    }
    assert wanted.keys() == KINDS.keys() - {"tools"}, "tests/test_tool_grammar.py has that kind"
    wrong = []
    for kind, cases in wanted.items():
        for value, good, bad in cases:
            grammar = written(kind, value)
            texts = [(text, text in good) for text in (*good, *bad)]
            wrong += [
                (kind, value, *case) for case in texts if accepts(grammar, case[0]) != case[1]
            ]
    for whitespace, (good, bad) in WHITESPACE.items():
        grammar = written("json", schema, whitespace)
        texts = [(text, text in good) for text in (*good, *bad)]
        wrong += [(whitespace, *case) for case in texts if accepts(grammar, case[0]) != case[1]]
    assert wrong == []
