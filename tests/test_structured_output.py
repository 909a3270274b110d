"""Structured output from a request to its text. `jsonschema` and Python's `re` judge the texts."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import pydantic
import pytest

jsonschema = pytest.importorskip("jsonschema", reason="judges the texts")

from djl_python_neuronx import grammar  # noqa: E402
from djl_python_neuronx.backends.base import ModelSpec, Want  # noqa: E402
from djl_python_neuronx.engine.speculation import NgramProposer  # noqa: E402
from djl_python_neuronx.engine.streams import BlockingQueue  # noqa: E402
from djl_python_neuronx.errors import RequestError, ServingError, UnsupportedParameterError  # noqa: E402
from djl_python_neuronx.grammar import checked  # noqa: E402
from djl_python_neuronx.protocol import base as protocol  # noqa: E402
from djl_python_neuronx.service import Service  # noqa: E402
from djl_python_neuronx.types import FinishReason  # noqa: E402
from tests.doubles.byte_tokenizer import ByteTokenizer  # noqa: E402
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend  # noqa: E402
from tests.doubles.toy_service import toy_service  # noqa: E402

SPEC = replace(TOY_SPEC, num_slots=16, max_model_len=512)
VERIFIES = replace(SPEC, num_speculative_tokens=3, outputs=Want.LOGITS | Want.ALL_LOGITS)
MIXED = replace(SPEC, outputs=Want.TOKENS | Want.LOGITS, largest_top_k=64)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "ab", 'é"\\']}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"place": {"const": {"x": [1, True, None]}}},
}
BOUNDED: list[dict[str, Any]] = [
    PERSON,
    {"type": "string", "pattern": "^[a-c]{2,5}-[0-9]{3}$"},
    {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"enum": [1, "x", None]}],
        "items": False,
    },
    {"oneOf": [{"const": "yes"}, {"type": "integer", "minimum": -5, "exclusiveMaximum": 5}]},
    {"type": "string", "format": "date"},
]
"""Their longest texts have fewer bytes than the slots have tokens."""
PATTERN = r"(yes|no)[,;] \d{1,4}(\.\d)?"
SAMPLED = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 400}


def fulfils(schema: Mapping[str, Any]) -> Callable[[str], bool]:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    return lambda text: validator.is_valid(json.loads(text))


def serve(spec: ModelSpec = SPEC, **options: Any) -> Service:
    proposer = NgramProposer(spec, 3) if spec.num_speculative_tokens else None
    return toy_service(ToyBackend(spec), tokenizer=ByteTokenizer(), proposer=proposer, **options)


def generate(
    service: Service, requests: Iterable[Mapping[str, Any]]
) -> list[tuple[str, FinishReason | None, ServingError | None]]:
    """The text of each request (parameters of LMI), its finish reason and its error, all at the same time."""
    inbox, texts, ends = BlockingQueue(), defaultdict[str, str](str), {}
    parsed = [
        service.parse(json.dumps({"inputs": f"{one['seed']}", "parameters": one}).encode())
        for one in requests
    ]
    names = [one.request_id for answer in parsed for one in answer.requests]
    for answer in parsed:
        service.loop.submit_all(service.loop.prepare(*answer.requests), inbox)
    while len(ends) < len(names):
        for delta in inbox.drain(60):
            texts[delta.request_id] += delta.text
            if delta.finish_reason is not None:
                ends[delta.request_id] = (delta.finish_reason, delta.error)
    return [(texts[name], *ends[name]) for name in names]


@pytest.mark.parametrize("spec", [SPEC, VERIFIES, MIXED], ids=["plain", "drafts", "device samples"])
def test_sampled_texts_fulfil_bounded_schemas(spec: ModelSpec) -> None:
    """500 texts and some beside them that have no grammar; no text ends by its length."""
    count = 500 if spec is SPEC else 60
    wanted, requests = [], []
    for i in range(count):
        schema = BOUNDED[i % len(BOUNDED)]
        asked: dict[str, Any] = {"guided_json": schema}
        judge = fulfils(schema)
        if i % 7 == 5:
            asked, judge = (
                {"guided_regex": PATTERN},
                lambda text: bool(re.fullmatch(PATTERN, text, re.A)),
            )
        wanted.append(judge)
        requests.append({**SAMPLED, "seed": i, "top_p": 0.9 if i % 3 else 1, **asked})
    free = [{**SAMPLED, "seed": i, "max_new_tokens": 30} for i in range(20)]
    service = serve(spec)
    try:
        found = generate(service, requests)
        plain = generate(service, free)
        assert generate(service, [*requests[:20], *free])[20:] == plain
    finally:
        service.close()
    wrong = [
        (requests[i], found[i])
        for i, judge in enumerate(wanted)
        if found[i][1] is not FinishReason.EOS or not judge(found[i][0])
    ]
    assert wrong == []
    assert len({text for text, *_ in found}) > count / 3


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "null"}},
    "required": ["a"],
}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f="],
}
OPENAI_SCHEMA = {"name": "a", "description": "d", "strict": True, "schema": SCHEMA}
FIELDS: list[tuple[dict[str, Any], str, Any]] = [
    ({"response_format": {"type": "json_schema", "json_schema": OPENAI_SCHEMA}}, "json", SCHEMA),
    ({"response_format": {"type": "json_object"}}, "json_object", True),
    ({"response_format": {"type": "json_object", "schema": {}}}, "json_object", True),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json", SCHEMA),
    ({"grammar": {"type": "json_object", "schema": SCHEMA}}, "json", SCHEMA),
    ({"response_format": {"type": "regex", "value": "a+"}}, "regex", "a+"),
    ({"response_format": TAG}, "structural_tag", TAG),
    ({"structured_outputs": {"json": SCHEMA, "regex": None, "json_object": False}}, "json", SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json", json.dumps(SCHEMA)),
    ({"structured_outputs": {"json_object": True}}, "json_object", True),
    ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "grammar", 'root ::= "a"'),
    (
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
        "structural_tag",
        json.dumps(TAG),
    ),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "outlines"}, "json", SCHEMA),
    ({"guided_json": json.dumps(SCHEMA)}, "json", json.dumps(SCHEMA)),
    ({"guided_regex": "a+", "response_format": {"type": "text"}}, "regex", "a+"),
    ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"]),
    ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"'),
    ({"structural_tag": TAG}, "structural_tag", TAG),
    ({"grammar": {"type": "json", "value": SCHEMA}}, "json", SCHEMA),
    ({"grammar": {"type": "json_schema", "value": OPENAI_SCHEMA}}, "json", SCHEMA),
    ({"grammar": {"type": "regex", "value": "a+"}}, "regex", "a+"),
]
WHITESPACE = [
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": "[ \n]*"}, "[ \n]*"),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "x?"}}, "x?"),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, ""),
]
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "guided_json and guided_regex"),
    (
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs.regex",
        "each have",
    ),
    (
        {"structured_outputs": {"regexp": "a"}},
        "structured_outputs.regexp",
        "'regexp'; expected json,",
    ),
    *(
        ({"structured_outputs": value}, "structured_outputs", "has no grammar; expected one of")
        for value in (
            {},
            {"whitespace_pattern": " "},
            {"json": None, "json_object": False, "disable_any_whitespace": False},
        )
    ),
    *(
        ({"structured_outputs": {name: value}}, f"structured_outputs.{name}", "; expected ")
        for name in ("json", "regex", "choice", "grammar", "structural_tag")
        for value in (False, 0, "", [])
    ),
    *(
        (
            {"structured_outputs": {"json": SCHEMA, name: value}},
            f"structured_outputs.{name}",
            "is a number; expected",
        )
        for name, value in (
            ("json_object", 0),
            ("disable_any_whitespace", 0),
            ("whitespace_pattern", 5),
        )
    ),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "no grammar beside it"),
    *(
        (
            {field: {"type": kind, **members, "banana": 1}},
            f"{field}.banana",
            f"{field} has 'banana'; expected type",
        )
        for field in ("response_format", "grammar")
        for kind, members in (
            ("text", {}),
            ("json_object", {}),
            ("json_schema", {"json_schema": OPENAI_SCHEMA}),
            ("json_schema", {"value": OPENAI_SCHEMA}),
            ("regex", {"value": "a"}),
            ("json", {"value": SCHEMA}),
        )
    ),
    ({"response_format": {**TAG, "banana": 1}}, "response_format.banana", "has 'banana'"),
    ({"structural_tag": {**TAG, "banana": 1}}, "structural_tag", "has 'banana'; expected type"),
    (
        {"structural_tag": {**TAG, "structures": [{**TAG["structures"][0], "banana": 1}]}},
        "structural_tag",
        "has 'banana'; expected begin, schema, end",
    ),
    (
        {"response_format": {"type": "json_object", "json_schema": OPENAI_SCHEMA}},
        "response_format.json_schema",
        "has 'json_schema'; expected type, schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {**OPENAI_SCHEMA, "b": 1}}},
        "response_format.json_schema.b",
        "has 'b'; expected schema, name",
    ),
    (
        {"grammar": {"type": "json_schema", "value": SCHEMA}},
        "grammar.value.schema",
        "grammar.value.schema is null; expected a schema",
    ),
    ({"guided_json": {"pattern": "(?=a)b"}}, "guided_json", r'pattern "\(\?=a\)b".*look-around'),
    ({"guided_regex": "a(?!b)"}, "guided_regex", r'"a\(\?!b\)".*look-around'),
    ({"guided_grammar": "start: </s>"}, "guided_grammar", "cannot be enforced: it cannot be read"),
    ({"structured_outputs": "a"}, "structured_outputs", "a string; expected an object"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml; expected text"),
    ({"response_format": {}}, "response_format.type", "missing; expected text"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "is null"),
    ({"grammar": {"type": "json"}}, "grammar.value", "is null; expected a schema"),
    ({"guided_json": {"not": {}}}, "guided_json", r'guided_json cannot be enforced: .*"not"'),
    ({"guided_json": {"enum": ["a" * 2**18]}}, "guided_json", "262,?144|262[0-9]{3} characters"),
    ({"guided_choice": "a"}, "guided_choice", "expected"),
    ({"guided_regex": ["a"]}, "guided_regex", "expected"),
    ({"structural_tag": {"type": "structural_tag", "format": {}}}, "structural_tag", "structures"),
]


def test_each_field_of_each_protocol_asks_for_the_same_grammar() -> None:
    service = serve()
    wrong = []

    def grammar_of(path: str, body: dict[str, Any]) -> str | None:
        return service.parse(json.dumps(body).encode(), path=path).request.grammar

    def bodies(fields: dict[str, Any]) -> dict[str, dict[str, Any]]:
        text = {"inputs": "a", "parameters": fields}
        message = {"role": "user", "content": "a"}
        return {
            "/invocations": text,
            "/generate": text,
            "/v1/chat/completions": {"messages": [message], **fields},
            "/v1/completions": {"prompt": "a", **fields},
        }

    try:
        cases = [
            (fields, checked(kind, json.dumps([value, None]))) for fields, kind, value in FIELDS
        ]
        cases += [
            (fields, checked("json", json.dumps([SCHEMA, one]))) for fields, one in WHITESPACE
        ]
        for fields, wanted in cases:
            for path, body in bodies(fields).items():
                if grammar_of(path, body) != wanted:
                    wrong.append((path, fields))
        for path, body in bodies({"response_format": {"type": "text"}}).items():
            assert grammar_of(path, body) is None
        for fields, param, reason in REFUSED:
            for path, body in bodies(fields).items():
                with pytest.raises(RequestError, match=reason) as raised:
                    grammar_of(path, body)
                if raised.value.param != param:
                    wrong.append((path, fields, raised.value.param))
    finally:
        service.close()
    assert wrong == []


def test_a_grammar_is_refused_where_nothing_can_enforce_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [{**SAMPLED, "seed": 1, "guided_choice": ["a", "b"]}]
    alone = serve(replace(SPEC, outputs=Want.TOKENS, largest_top_k=64))
    endless = serve(replace(SPEC, eos_ids=frozenset()))
    tokenizer = ByteTokenizer()
    tokenizer.pieces = None
    dependent = toy_service(ToyBackend(SPEC), tokenizer=tokenizer)
    try:
        with pytest.raises(
            UnsupportedParameterError, match=r"structured output.*option\.output_logits"
        ):
            generate(alone, [{**asked[0], "top_k": 5}])
        with pytest.raises(UnsupportedParameterError, match="send stop_token_ids"):
            generate(endless, asked)
        ended = generate(endless, [{**asked[0], "stop_token_ids": [1]}])
        assert [text in {"a", "b"} and reason is FinishReason.EOS for text, reason, _ in ended] == [
            True
        ]
        with pytest.raises(UnsupportedParameterError, match="depends on the tokens around them"):
            generate(dependent, asked)
        monkeypatch.setitem(sys.modules, "llguidance", None)
        grammar._library.cache_clear()
        with pytest.raises(
            UnsupportedParameterError, match=r"guided_regex needs llguidance .*pip install"
        ):
            generate(endless, [{"seed": 1, "guided_regex": "a"}])
    finally:
        grammar._library.cache_clear()
        for service in (alone, endless, dependent):
            service.close()


@pytest.mark.parametrize("longest", [1024, 10**6])
def test_a_token_that_the_library_cannot_have_harms_no_other_request(
    longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left out of the masks; the panic that it causes otherwise is an error of requests with a grammar."""
    monkeypatch.setattr(grammar, "_LONGEST_BYTES", longest)
    tokenizer = ByteTokenizer()
    assert tokenizer.pieces is not None
    tokenizer.pieces = [*tokenizer.pieces[:-1], b"=" * 1100]
    free, asked = {**SAMPLED, "seed": 1, "max_new_tokens": 30}, {"seed": 1, "guided_choice": ["a"]}
    found = []
    for warm_up in (False, True):
        service = toy_service(ToyBackend(SPEC), tokenizer=tokenizer, warm_up=warm_up)
        try:
            alone = generate(service, [free])
            for _ in range(2):
                (text, _, error), *others = generate(service, [asked, free])
                assert others == alone
                found.append((text, type(error), "llguidance failed (PanicExc" in str(error)))
        finally:
            service.close()
    panicked = ("", UnsupportedParameterError, True)
    assert found == [("a", type(None), False) if longest == 1024 else panicked] * 4


@pytest.mark.parametrize(("n", "inline"), [(1, True), (8, False)])
def test_a_long_grammar_is_encoded_for_each_sequence_beside_the_event_loop(
    n: int, inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, threads = serve(), list[threading.Thread]()
    prepare = service.loop.prepare

    def noted(*requests: Any) -> Any:
        threads.append(threading.current_thread())
        return prepare(*requests)

    monkeypatch.setattr(service.loop, "prepare", noted)
    parameters = {"n": n, "do_sample": True, "guided_choice": ["a" * 1000]}

    async def ask() -> None:
        parsed = service.parse(json.dumps({"inputs": "1", "parameters": parameters}).encode())
        (await protocol.generate(service, parsed)).close()

    try:
        asyncio.run(ask())
    finally:
        service.close()
    assert [one is threading.current_thread() for one in threads] == [inline]


def test_what_else_a_request_has_keeps_its_meaning_beside_a_grammar() -> None:
    """Stop strings and limits cut, ignored eos makes the text go on as far as it may, and all else changes nothing."""
    service = serve()
    schema = {"type": "string", "pattern": "^[ab]{3,9}$"}
    one = {**SAMPLED, "seed": 5, "guided_json": schema}
    same = [
        {},
        {"stop": ["never"]},
        {"skip_special_tokens": False},
        {"details": True, "top_n_tokens": 2},
    ]
    try:
        (whole, reason, _), *others = generate(service, [{**one, **more} for more in same])
        assert reason is FinishReason.EOS
        assert [text for text, *_ in others] == [whole] * 3
        stopped, limited, longest = generate(
            service,
            [
                {**one, "stop": [whole[3]]},
                {**one, "max_new_tokens": 2},
                {**one, "ignore_eos": True, "guided_json": None, "guided_regex": "[ab]{3,9}"},
            ],
        )
        several = generate(service, [{**one, "n": 3}])
        ((_, _, error),) = generate(service, [{**one, "min_tokens": 20}])
    finally:
        service.close()
    assert stopped == (whole[: whole.index(whole[3])], FinishReason.STOP, None)
    assert limited[1] is FinishReason.LENGTH
    assert whole.startswith(limited[0])
    assert longest[1] is FinishReason.EOS
    assert re.fullmatch("[ab]{9}", longest[0])
    assert re.search(r"exclude each one \(min_tokens and the grammar\)", str(error))
    assert vars(error)["param"] == "min_tokens"
    assert several[0][0] == whole
    assert all(fulfils(schema)(text) for text, *_ in several)
    assert len(set(several)) > 1


ENDS = [
    "",
    '"',
    "0",
    ":null",
    '":null',
    "null",
    '"a":null',
    "ull",
    "ll",
    "l",
    "rue",
    "ue",
    "e",
    "alse",
    "lse",
    "se",
    "n",
]


def can_become_json(text: str) -> bool:
    """True if a text is the beginning of JSON: some end, and the brackets that are open, make it whole."""
    bare = re.sub(r'"(\\.|[^"\\])*("|$)', "", text, flags=re.S)
    opened: list[str] = []
    for letter in bare:
        if letter in "[{":
            opened.append({"[": "]", "{": "}"}[letter])
        elif letter in "]}":
            opened.pop()
    closing = "".join(reversed(opened))
    escaped = text + {True: "u0000", False: ""}[text.endswith("\\")]
    for begun in (text, escaped, *(text + "0" * i for i in range(1, 5))):
        for end in ENDS:
            try:
                json.loads(begun + end + closing)
            except ValueError:
                continue
            return True
    return False


def test_each_beginning_of_an_unbounded_text_can_still_fulfil_its_grammar() -> None:
    service = serve()
    requests = [
        {**SAMPLED, "seed": i, "max_new_tokens": 60, "response_format": {"type": "json_object"}}
        for i in range(60)
    ]
    try:
        found = generate(service, requests)
    finally:
        service.close()
    assert sum(reason is FinishReason.LENGTH for _, reason, _ in found) > 10
    texts = [text.rstrip("\N{REPLACEMENT CHARACTER}") for text, *_ in found]
    assert [text for text in texts if not can_become_json(text)] == []
    ended = [text for text, reason, _ in found if reason is FinishReason.EOS]
    assert all(isinstance(json.loads(text), dict) for text in ended)


def test_openais_client_parses_a_model_of_pydantic() -> None:
    openai = pytest.importorskip("openai", reason="the official client")
    running = pytest.importorskip("tests.server.running", reason="needs the `server` extra")

    class Place(pydantic.BaseModel):
        x: Literal[1, 2]
        kind: Literal["house", "flat"]

    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=9)
        age: Annotated[int, pydantic.Field(ge=0, le=120)]
        home: Place | None

    messages: Any = [{"role": "user", "content": "Who?"}]
    with running.serving(ToyBackend(SPEC), tokenizer=ByteTokenizer()) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-")
        for seed in range(10):
            answer = client.chat.completions.parse(
                model="toy", messages=messages, response_format=Person, seed=seed, n=2
            )
            assert all(isinstance(one.message.parsed, Person) for one in answer.choices)
        with client.chat.completions.stream(
            model="toy", messages=messages, response_format=Person, seed=9
        ) as stream:
            text = "".join(event.delta for event in stream if event.type == "content.delta")
            streamed = stream.get_final_completion().choices[0].message
        assert text == streamed.content == answer.choices[0].message.content
        assert streamed.parsed == answer.choices[0].message.parsed
        schema = {"type": "array", "uniqueItems": True}
        refused = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        with pytest.raises(openai.BadRequestError, match="uniqueItems") as raised:
            client.chat.completions.create(model="toy", messages=messages, response_format=refused)
        assert raised.value.param == "response_format.json_schema.schema"


@pytest.mark.parametrize("special", [False, True])
def test_what_a_grammar_forces_is_proposed_as_drafts(special: bool) -> None:
    """A text of which each byte follows from the first takes fewer steps, and is the same; nothing in it repeats.

    `special`: a special token, which has no text, stands behind the third byte, and the text is a byte shorter.
    """
    words = ["abcdefghijkl"[i:] + "abcdefghijkl"[:i] for i in range(12)]
    one = {**SAMPLED, "seed": 3, "guided_choice": words}
    if special:
        words = [word[:-1] for word in words]
        rules = " | ".join(f'"{word[:3]}" <[0]> "{word[3:]}"' for word in words)
        one = {**SAMPLED, "seed": 3, "guided_grammar": f"start: {rules}"}
    found, num_steps = [], []
    for spec in (SPEC, VERIFIES):
        tokenizer, backend = ByteTokenizer(), ToyBackend(spec)
        assert tokenizer.pieces is not None
        tokenizer.pieces = [*tokenizer.pieces[:259], *[b""] * 41]  # bytes alone: one division
        proposer = NgramProposer(spec, 3) if spec.num_speculative_tokens else None
        service = toy_service(backend, tokenizer=tokenizer, proposer=proposer)
        try:
            found.append(generate(service, [one]))
        finally:
            service.close()
        num_steps.append(backend.num_steps)
    assert found[0] == found[1]
    assert found[0][0][0] in words
    assert num_steps == [13, 4]
