"""Grammars of structured output, by llguidance: from what a request asks for to masks of tokens.

The front has a grammar checked in a process that can be ended (`Tokenizer.grammar`); the engine gets the form that this
returns, a grammar in llguidance's Lark syntax, and compiles it for the model's vocabulary (`engine/grammars.py`). Both
have the same limits. Source: llguidance 1.9, docs/syntax.md and docs/json_schema.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, NoReturn

from djl_python_neuronx.errors import RequestError, UnsupportedParameterError, json_type

MOST_CHARS = 2**18
"""Longest grammar of a request."""
MOST_ITEMS = 600
"""Alternatives that a grammar has at one place. An optional property of an object takes four, a tool at most one."""
MOST_MASK_ITEMS = 5_000
"""Most of them for all tokens of a mask: a schema's take a tenth (MaskBench), and 50,000, the default, up to 135 ms."""
_WHITESPACE = "[ ]"
"""Where JSON allows whitespace: at most one space, so that a model can neither indent without end nor write 1 MB."""
HEADER = '%llguidance {"no_forcing": true}\n'
"""The model chooses how it divides forced text into tokens."""
_LONGEST_BYTES = 1024
"""Longest token that the library takes; it panics at a longer one."""
_ESCAPES = 'nrbtf\\"'
"""JSON's escapes without its \\u: else a key that is written another way evades the schema of its property."""
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that have no other escape. Of a text that has one the library leaves it out in silence."""
_WRITTEN = re.compile(
    r"\\(?:x[01]|x7[Ff]|u00[01]|u007[Ff]|[xu]\{|[acv0-7]|p(?:C|\{(?:Cc?|Control|Other)\}))|\[:(?:\^|cntrl)"
    rf"|{_CONTROL.pattern}"
)
"""Control characters in a regex, and classes of them by name."""
_PATTERN = re.compile(
    r"\[(?P<negated>\^(?:-+|\]|))?(?P<rest>(?:\\.|[^][\\])*\])?"
    rf"|(?P<control>{_WRITTEN.pattern})|\\P(?P<name>\w|\{{[^}}]*\}})|\\.",
    re.DOTALL,
)
"""A regex's classes, and the control characters beside them."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose object has names of the client's, not keywords."""
_VALUES = frozenset({"const", "enum"})
"""Keywords that have JSON, not schemas."""
_NOTES = frozenset({"title", "description", "default", "example", "examples", "$comment"})
"""Keywords that have no effect on what fits a schema."""
_ANY = "(?s:.*)"
"""A regex of any text."""
_GAP = r"[ \n]{0,2}"
"""Whitespace that models write or leave out around the punctuation of a call."""
_MARK = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+])")
"""A mark of a call, such as <tool_call> or [TOOL_CALLS]."""
_PUNCTUATION = re.compile(r"(\s*[][{},:;]\s*|\s+)")
_LEAD = r"[\s\x1c-\x1f]{0,64}"
"""Python's whitespace, as much as `protocol/reading.py` holds back (`MOST_SPACE`)."""
_SPACE = r"[ \t\r\n]*"
"""JSON's whitespace."""
_MEMBERS = rf'(?:{_SPACE}"(?:type|id)"{_SPACE}:{_SPACE}(?:"(?:[^"\\]|\\.)*"|[0-9A-Za-z.+-]+){_SPACE},)*{_SPACE}'
BARE = rf'{_LEAD}\{{{_MEMBERS}"name"{_SPACE}:{_SPACE}"%s"{_SPACE},{_MEMBERS}"(?:arguments|parameters)"{_SPACE}:'
"""A regex of the beginning of a call without a mark, with the name: `protocol/reading.py` reads no other one then."""
_SPECIAL = re.compile(r"<\[\d+]>")
"""A special token in Lark."""
_PROBED_BYTES = 128
"""Length of the text that `_probe` goes along."""
_PLACE = re.compile(r"^at \d+\(\d+\): ")
"""The line and column in an error of the library."""


@cache
def _library() -> Any:  # noqa: ANN401
    """The module; imported by the first request with a grammar."""
    try:
        import llguidance
    except ImportError as error:
        msg = f"needs llguidance ({error}); expected it installed. Run `pip install 'llguidance>=1.9'`"
        raise UnsupportedParameterError(msg) from error
    return llguidance


def is_installed() -> bool:
    """True if there is the library."""
    return find_spec("llguidance") is not None


class Vocabulary:
    """The tokens of a model, behind the library's interface of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], special_ids: Sequence[int] = (), end_id: int | None = None
    ) -> None:
        """`tokens`: UTF-8 bytes of each id; b"", one that is too long and those of `special_ids` never follow.

        `end_id`: the token that ends a text; None adds one.
        """
        self.tokens = [one if len(one) <= _LONGEST_BYTES else b"" for one in tokens]
        self.special_token_ids, self.eos_token_id = special_ids, end_id
        self.tables = _library().LLTokenizer(self)
        """The library's tables: of 128,256 tokens 75 MB, made in 0.25 s with the GIL (2 vCPU, 2026-11)."""

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens of forced text, where a grammar overrides `HEADER`."""
        ids: list[int] = self.tables.greedy_tokenize(
            text if isinstance(text, str) else text.decode()
        )
        return ids


@cache
def _bytes() -> Any:  # noqa: ANN401
    """The vocabulary of all bytes: a grammar compiles with it as with any other, in a millisecond."""
    return Vocabulary([bytes([i]) for i in range(256)]).tables


def matcher(grammar: str, tokens: Any) -> Any:  # noqa: ANN401
    """Compile a grammar for a vocabulary. The library's object; `is_error` where it could not. Releases the GIL."""
    library = _library()
    # The library's own limits of size and work, but for that of ambiguity, which costs its third power: with 2000 items
    # a mask of `s: s s s | s s | /[a-z]/` takes 0.8 s (2 vCPU, 2026-11). Errors have no part of the output.
    limits = library.LLParserLimits(
        verbose_errors=False, max_items_in_row=MOST_ITEMS, step_max_items=MOST_MASK_ITEMS
    )
    return library.LLMatcher(tokens, grammar, log_level=0, limits=limits)


def checked(kind: str, text: str) -> str:
    """The engine's form of a grammar. `kind`: one of `KINDS`; `text`: JSON of `[value, whitespace, reasoning]`.

    `whitespace`: a regex for the places where JSON allows some, "" for none; None: at most one space. `reasoning`, if
    the model's text may begin with some: see `_after`.

    Raises:
        RequestError: it is none, or the library cannot enforce it within its limits; the message names the keyword.
    """
    write, types, expected = KINDS[kind]
    value, whitespace, *reasoning = json.loads(text)
    if not isinstance(value, types) or value in ("", [], False):
        msg = f"is {json_type(value)}; expected {expected}"
        raise RequestError(msg)
    try:
        grammar: str = write(value, whitespace)
    except (RequestError, MemoryError):
        raise
    except Exception as error:
        msg = f"is no {kind} that can be read ({type(error).__name__}: {str(error)[:200]}); correct it"
        raise RequestError(msg) from error
    for one in reasoning:
        is_free = kind == "tools" and value["choice"] == "auto" and value["text"] is None
        grammar = _after(one, grammar, is_free=is_free)
    grammar = HEADER + grammar
    _probe(grammar)
    return grammar


def reason(compiled: Any) -> str:  # noqa: ANN401
    """The reason that a matcher has failed, in one line."""
    first, *more = compiled.get_error().split("\n")
    details = [one.removeprefix("error:") for one in more if one.startswith("error:")]
    line: str = _PLACE.sub("", "".join([first, *details]))
    if line.startswith("NoExtension"):
        return "no text fulfils it"
    if line.startswith("panic"):
        return "it cannot be read"
    line = line.removeprefix("failed to compile JSON schema: ").partition(" Enable ")[0]
    if line.startswith("regex parse error") and more:
        line = f"the pattern {json.dumps(more[0].strip()[:100])}: {line}"
    return f"$ref: {line}"[:300] if line.startswith("Resource ") else line[:300]


def _probe(grammar: str, begins: Sequence[str] = ("",)) -> None:
    """Compile a grammar, and go along a text behind each beginning: some exceed limits at a text's first letter only.

    Raises:
        UnsupportedParameterError: it exceeds the library's limits.
    """
    # Special tokens stand as byte 0 there, which is no part of JSON.
    whole = matcher(_SPECIAL.sub("<[0]>", grammar), _bytes())
    for begin in begins:
        compiled = whole.deep_copy()
        compiled.consume_tokens([*begin.encode()])
        for turn in range(_PROBED_BYTES):
            if compiled.is_error() or compiled.is_stopped():
                break
            # A byte that may follow, in each turn another one: `bits` has a digit for each byte.
            bits = f"{int.from_bytes(compiled.compute_bitmask(), 'little'):b}"[:-257:-1]
            found = (bits + bits).find("1", turn * 7919 % len(bits))
            if found < 0 or compiled.is_error():
                break
            compiled.consume_token(found % len(bits))
        if compiled.is_error():
            msg = f"cannot be enforced: {reason(compiled)}; change or simplify it"
            raise UnsupportedParameterError(msg)


def _json(value: Any, whitespace: str | None) -> str:  # noqa: ANN401
    schema = json.loads(value) if isinstance(value, str) else value
    return f"start: %json {json.dumps(_schema(schema, whitespace))}"


def _schema(schema: Mapping[str, Any], whitespace: str | None) -> dict[str, Any]:
    """The schema with the library's options. Those of the client could make it ignore keywords."""
    if "x-guidance" in schema:
        msg = "has x-guidance, the library's options; leave them out"
        raise RequestError(msg)
    pattern = _WHITESPACE if whitespace is None else whitespace
    flexible = {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}
    return {**_read(schema), "x-guidance": {**flexible, "json_allowed_escapes": _ESCAPES}}


def _read(schema: Any, keyword: str = "") -> Any:  # noqa: ANN401
    """A part of a schema, the value of a keyword, as the library reads it."""
    if isinstance(schema, list):
        return [_read(one, keyword) for one in schema]
    if isinstance(schema, dict):
        least = schema.get("minProperties")
        is_schema = keyword not in _NAMED | _VALUES
        if is_schema and isinstance(least, (int, float)) and least > 1:
            # The library counts a key that comes twice twice, as in {"a": 1, "a": 2}.
            msg = f"cannot be enforced: minProperties is {least}; expected at most 1. List keys in required"
            raise UnsupportedParameterError(msg)
        return {
            _pattern(name) if keyword == "patternProperties" else name: _read(
                one, name if is_schema else keyword if keyword in _VALUES else ""
            )
            for name, one in schema.items()
            if not (is_schema and name in _NOTES)
        }
    if isinstance(schema, str) and keyword == "pattern":
        return _pattern(schema)
    if isinstance(schema, str) and keyword in _VALUES and _CONTROL.search(schema):
        _refuse_control(keyword)
    # 2.0 is an integer in JSON schemas, and not in the library.
    return int(schema) if isinstance(schema, float) and schema.is_integer() else schema


def _pattern(regex: str) -> str:
    """A schema's regex whose classes are without U+0000, which no text has.

    The library takes a class of all control characters to have quotes and backslashes too.
    """

    def read(found: re.Match[str]) -> str:
        negated, rest, name = found["negated"], found["rest"] or "", found["name"]
        if negated is not None:
            return rf"[{negated}\x00{rest}"
        if found["control"] or ("-" not in rest and _WRITTEN.search(found[0])):
            _refuse_control("pattern")
        if name:
            return rf"[^\p{name}\x00]"
        return re.sub(r"\\(x00|u0000)-", r"\\x01-", found[0]) if rest else found[0]

    return _PATTERN.sub(read, regex)


def _refuse_control(keyword: str) -> NoReturn:
    msg = f"cannot be enforced: {keyword} has a control character that JSON writes as \\u; leave it out"
    raise UnsupportedParameterError(msg)


def _regex(value: str, _whitespace: str | None) -> str:
    if (len(value) - len(value.rstrip("\\"))) % 2:
        msg = "ends with a backslash; expected a regex"
        raise RequestError(msg)
    # With ASCII's \d, \w and \s, as most engines of vLLM.
    pattern = _library().regex_to_lark(value, "dws")
    return f"start: /{pattern}/".replace("\n", "\\n")


def _choice(value: list[str], _whitespace: str | None) -> str:
    # U+007F is no character of a string in the library's grammars.
    texts = [json.dumps(one, ensure_ascii=False).replace("\x7f", "\\u007f") for one in value]
    return "start: " + " | ".join(texts)


def _ebnf(value: str, _whitespace: str | None) -> str:
    _library()
    from llguidance.gbnf_to_lark import any_to_lark

    grammar: str = any_to_lark(value)
    return grammar


def _structural_tag(value: Any, whitespace: str | None) -> str:  # noqa: ANN401
    found = json.loads(value) if isinstance(value, str) else value
    parts = [(found, ("type", "structures", "triggers"))]
    parts += [(one, ("begin", "schema", "end")) for one in found.get("structures", ())]
    for part, known in parts:
        for name in part.keys() - {*known}:
            msg = f"has {name[:100]!r}; expected {', '.join(known)}"
            raise UnsupportedParameterError(msg)
    tag = _library().StructTag
    tags = [
        tag(
            trigger=next(one for one in found["triggers"] if structure["begin"].startswith(one)),
            begin=structure["begin"],
            grammar=_schema(structure["schema"], whitespace),
            end=structure["end"],
        )
        for structure in found["structures"]
    ]
    grammar: str = tag.to_grammar(tags, assume_special=False)
    return grammar


def _tools(value: Mapping[str, Any], whitespace: str | None) -> str:
    """Calls of tools, and with the choice `auto` text around them.

    `value` has the members of a `protocol.tools.ToolFormat`, the ids of its `special` tokens by their text, the `tools`
    with name, schema and whether it is strict, the `choice`, whether several calls may come (`parallel`), and a grammar
    of a `text` without calls, else any text is one.
    """
    special = value["special"]

    def written(text: str) -> str:
        return " ".join(
            f"<[{special[one]}]>" if one in special else _loose(one)
            for one in _MARK.split(text)
            if one
        )

    begin, mark = value["opens"] + value["before"], value["starts"][0]
    inside = "".join(f"({written(one)} /[0-9A-Za-z]{{1,64}}/)?" for one in value["inside"])
    more = f"({written(value['separator'] + value['before'])} call)*" if value["parallel"] else ""
    rules, calls = [f"end: {more} {written(value['closes'])}"], list[str]()
    arguments = _arguments(value["tools"], whitespace)
    for i, ((name, *_), schema) in enumerate(zip(value["tools"], arguments, strict=True)):
        rules.append(f"rest_{i}: %json {json.dumps(schema)} {written(value['after'])}")
        calls.append(f"/{_escaped(name)}/ {inside} {written(value['between'])} rest_{i}")
    rules.append(f"call: {' | '.join(calls)}")
    if value["choice"] != "auto":
        leads = f"<[{special[mark]}]>?" if value["bare"] and mark in special else ""
        return "\n".join([f"start: {leads} {written(begin)} call end", *rules])
    text, before = f"/{_ANY}/", _ANY
    if value["text"] is not None:
        text, before = "text", ""
        rules.append(f"text: %lark {{\n{value['text']}\n}}")
    opened = f"{_maybe(before)} <[{special[mark]}]> | head" if mark in special else "head"
    rules += [
        f"head[lazy]: /{before}{_escaped(mark)}/",
        f"block: ({opened}) {written(begin.removeprefix(mark))} call end",
    ]
    # Text may follow where a further call has its own mark: the reader takes other JSON for one.
    again = value["parallel"] and value["before"].startswith(mark) and value["text"] is None
    start = f"block* {text}" if again else f"block | {text}"
    if value["bare"] and value["text"] is None:
        start += " | bare end"
        heads = [BARE % _escaped(name) for name, *_ in value["tools"]]
        rules += [f"bare_{i}[lazy]: /{head}/" for i, head in enumerate(heads)]
        bare = [f"bare_{i} {_loose(' ')} rest_{i}" for i in range(len(heads))]
        rules.append(f"bare: {' | '.join(bare)}")
    return "\n".join([f"start: {start}", *rules])


def _loose(text: str) -> str:
    """Lark for a mark, or for a text around whose punctuation there may be whitespace."""
    if _MARK.fullmatch(text):
        return f"/{_escaped(text)}/"
    if not text.strip():
        return r"/[ \n]{1,2}/?"  # as `_GAP`: a lexeme is not empty
    parts = [
        f"{_GAP}{_escaped(one.strip())}{_GAP}" if i % 2 else _escaped(one)
        for i, one in enumerate(_PUNCTUATION.split(text))
    ]
    return f"/{''.join(parts)}/"


def _maybe(regex: str) -> str:
    return f"/{regex}/?" if regex else ""


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _arguments(
    tools: Sequence[tuple[str, Any, bool]], whitespace: str | None
) -> list[dict[str, Any]]:
    """The schemas of tools' arguments. A tool that is not strict has that of any object if its own cannot be enforced.

    Checked together, which takes a quarter of the time of each by itself, and by halves where some are refused.

    Raises:
        UnsupportedParameterError: it is strict.
    """
    none = {"properties": {}, "additionalProperties": False}
    try:
        made = [
            _schema({**(none if schema is None else schema), "type": "object"}, whitespace)
            for _, schema, _ in tools
        ]
        begins = [f"{i} " for i in range(len(tools))]
        rules = [f"of_{i}: %json {json.dumps(one)}" for i, one in enumerate(made)]
        starts = " | ".join(f'"{begin}" of_{i}' for i, begin in enumerate(begins))
        _probe("\n".join([f"{HEADER}start: {starts}", *rules]), begins)
    except RequestError as error:
        if len(tools) > 1:
            half = len(tools) // 2
            return _arguments(tools[:half], whitespace) + _arguments(tools[half:], whitespace)
        ((name, _, strict),) = tools
        if strict:
            msg = f"of {name} {error}, or leave out strict"
            raise UnsupportedParameterError(msg) from error
        made = [_schema({"type": "object"}, whitespace)]
    return made


def _after(reasoning: Mapping[str, Any], grammar: str, *, is_free: bool) -> str:
    """A grammar of a model's reasoning and, behind it, of the text of `grammar`.

    `reasoning` has the texts with which it `begins` and `ends`, the ids of `special` tokens by their text, and whether
    it has begun `inside` the prompt. `is_free`: the text may end with the reasoning.
    """
    special, begins, ends = reasoning["special"], reasoning["begins"], reasoning["ends"]
    # Unless any text may stand in place of reasoning, a model that began with whitespace, or with the letters of a mark
    # that is a token too, could go on with reasoning alone.
    lead = _LEAD if is_free else ""
    spelled, rules = [one for one in begins if is_free or one not in special], list[str]()
    for name, marks, texts, text in (
        ("begun", begins, spelled, lead),
        ("ended", ends, ends, _ANY),
    ):
        ids = [str(special[one]) for one in marks if one in special]
        forms = [f"{_maybe(text)} <[{','.join(ids)}]>"] if ids else []
        if texts:
            forms.append(f"{name}_text")
            rules.append(f"{name}_text[lazy]: /{text}({'|'.join(map(_escaped, texts))})/")
        rules.append(f"{name}: {' | '.join(forms)}")
    after = f"ended {_loose(' ')} body" + (f" | /{_ANY}/" if is_free else "")
    start = "after" if reasoning["inside"] else "begun after | body"
    return "\n".join(
        [f"start: {start}", f"after: {after}", *rules, f"body: %lark {{\n{grammar}\n}}"]
    )


KINDS: Mapping[str, tuple[Any, Any, str]] = {
    "json": (_json, (dict, str), "a schema, as an object or its JSON"),
    "json_object": (lambda _, whitespace: _json({"type": "object"}, whitespace), bool, "true"),
    "regex": (_regex, str, "a regex"),
    "choice": (_choice, list, "a list of strings"),
    "grammar": (_ebnf, str, "a grammar in Lark or GBNF"),
    "structural_tag": (_structural_tag, (dict, str), "an object or its JSON"),
    "tools": (_tools, dict, "a format, tools and a choice"),
}
"""Kinds of grammars by vLLM's names, each with the function that writes it, and the types of its value in words."""
