"""Structured output: the fields of OpenAI, vLLM, TGI and LMI that ask for it, and the one grammar that they mean."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from djl_python_neuronx.errors import (
    QueueFullError,
    RequestError,
    UnsupportedParameterError,
    json_type,
)
from djl_python_neuronx.grammar import KINDS, MOST_CHARS, is_installed
from djl_python_neuronx.types import Tokenizer

if TYPE_CHECKING:
    from djl_python_neuronx.protocol.base import ParseContext
    from djl_python_neuronx.protocol.parameters import GenerationParameters

logger = logging.getLogger(__name__)

KIND_OF = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""Fields that have a grammar of one kind. The type in the value of the others names it, or its key."""
_KINDS = [kind for kind in KINDS if kind != "tools"]
"""Those that a field may name."""
FIELDS = frozenset({*KIND_OF, "response_format", "grammar", "structured_outputs"})
_OPTIONS = ("whitespace_pattern", "disable_any_whitespace")
_DESCRIPTION = ("schema", "name", "description", "strict")
"""Members of a `json_schema` of OpenAI and TGI."""
Asked = tuple[str, str, Any, "str | None"]
"""The name of a field, and the kind, the value and the whitespace of its grammar."""


def grammar_of(
    given: GenerationParameters,
    context: ParseContext,
    calls: Mapping[str, Any] | None = None,
    reasoning: Mapping[str, Any] | None = None,
) -> str | None:
    """The grammar of a request in the engine's form; None if it asks for none.

    `calls`: the value of a grammar of the kind "tools" but for its `text`, which is that of the request's own grammar.
    With the choice `auto`, and without a strict tool, one that exceeds a limit takes any object as arguments, and is
    left out where that is not enough, or where none can be enforced. `reasoning`: see `grammar.checked`.

    Raises:
        RequestError: it asks for several, or for one that cannot be read or enforced.
    """
    text, tokenizer = requested_grammar(given), context.tokenizer
    is_auto = calls is None or calls["choice"] == "auto"
    enforces = calls and context.has_logprobs and tokenizer.pieces is not None and is_installed()
    if calls is None or (is_auto and not enforces):
        return None if text is None else _checked(text, given, tokenizer, reasoning)
    own = _checked(text, given, tokenizer) if text is not None and is_auto else None
    one = ("tools" if enforces else "tool_choice", "tools", {**calls, "text": own}, None)
    try:
        return _checked(one, given, tokenizer, reasoning)
    except RequestError as error:
        is_strict = not is_auto or any(strict for *_, strict in calls["tools"])
        if is_strict or isinstance(error, QueueFullError):
            raise
        logger.warning("tools_relaxed num_tools=%d reason=%r", len(calls["tools"]), str(error))
        tools = [(name, {"type": "object"}, False) for name, *_ in calls["tools"]]
        if tools != calls["tools"]:
            return grammar_of(given, context, {**calls, "tools": tools}, reasoning)
        if own is not None:
            raise
        return None


def _checked(
    one: Asked,
    given: GenerationParameters,
    tokenizer: Tokenizer,
    reasoning: Mapping[str, Any] | None = None,
) -> str:
    name, kind, value, whitespace = one
    if tokenizer.pieces is None:
        msg = (
            f"{name} cannot be enforced, because the text of this model's tokens depends on the tokens around them; "
            "leave it out"
        )
        raise UnsupportedParameterError(msg, name)
    if whitespace is None:
        whitespace = given.guided_whitespace_pattern
    parts = [value, whitespace] if reasoning is None else [value, whitespace, reasoning]
    text = orjson.dumps(parts).decode()
    if len(text) > MOST_CHARS:
        msg = (
            f"{name} has {len(text)} characters of JSON; expected at most {MOST_CHARS}. Leave out "
        )
        msg += "tools, or parts of their schemas" if kind == "tools" else "parts of it"
        raise RequestError(msg, name)
    try:
        return tokenizer.grammar(kind, text)
    except QueueFullError:
        raise
    except RequestError as error:
        msg = f"{name} {error}"
        raise type(error)(msg, param=name) from None


def requested_grammar(given: GenerationParameters) -> Asked | None:
    """The grammar that the fields of a request ask for; None if they ask for none.

    Raises:
        RequestError: they ask for several.
    """
    fields = given.model_fields_set & FIELDS
    found = [one for field in fields for one in _asked(field, getattr(given, field))]
    if len(found) > 1:
        names = sorted(name for name, *_ in found)
        msg = f"{' and '.join(names)} each have a grammar; send one of them"
        raise RequestError(msg, names[1])
    if not found and given.guided_whitespace_pattern is not None:
        field = "guided_whitespace_pattern"
        msg = f"{field} has no grammar beside it; send guided_json, or leave it out"
        raise RequestError(msg, field)
    return found[0] if found else None


def _asked(field: str, value: Any) -> Iterator[Asked]:  # noqa: ANN401
    if field in KIND_OF:
        yield field, KIND_OF[field], value, None
    elif field == "structured_outputs":
        yield from _structured_outputs(field, value)
    else:
        yield from _typed(field, {key: one for key, one in value.items() if one is not None})


def _structured_outputs(field: str, value: Mapping[str, Any]) -> Iterator[Asked]:
    """vLLM's: an object with one of the kinds, and options."""
    values = {key: one for key, one in value.items() if one is not None}
    _check_members(field, values, (*_KINDS, *_OPTIONS))
    for key, kind, expected in (
        ("whitespace_pattern", str, "a regex"),
        ("disable_any_whitespace", bool, "true or false"),
        ("json_object", bool, "true or false"),
    ):
        if not isinstance(values.get(key, kind()), kind):
            msg = f"{field}.{key} is {json_type(values[key])}; expected {expected}"
            raise RequestError(msg, f"{field}.{key}")
    whitespace = values.pop("whitespace_pattern", None)
    if values.pop("disable_any_whitespace", False):
        whitespace = ""
    if not values.get("json_object", True):
        del values["json_object"]
    if not values:
        msg = f"{field} has no grammar; expected one of {', '.join(_KINDS)}"
        raise RequestError(msg, field)
    for key, one in values.items():
        yield f"{field}.{key}", key, one, whitespace


def _typed(field: str, value: Mapping[str, Any]) -> Iterator[Asked]:
    """A grammar by its type: OpenAI's `response_format`, TGI's and LMI's `grammar`."""
    default = "json_schema" if field == "response_format" else "value"
    member = next((name for name in ("json_schema", "value") if name in value), default)
    described = value.get(member)
    if not isinstance(described, dict):
        described = {}
    schema = described.get("schema")
    json_object: Asked = (field, "json_object", True, None)
    if value.get("schema", {}) != {}:  # as llama.cpp's server has it
        json_object = (f"{field}.schema", "json", value["schema"], None)
    types: dict[str, tuple[tuple[str, ...], Asked | None]] = {
        "text": ((), None),
        "json_object": (("schema",), json_object),
        "json_schema": ((member,), (f"{field}.{member}.schema", "json", schema, None)),
        "json": (("value",), (f"{field}.value", "json", value.get("value"), None)),
        "regex": (("value",), (f"{field}.value", "regex", value.get("value"), None)),
        "structural_tag": (
            ("structures", "triggers"),
            (field, "structural_tag", value, None),
        ),
    }
    kind = str(value.get("type", "missing"))
    if kind not in types:
        msg = f"{field}.type is {kind[:100]}; expected {', '.join(types)}"
        raise RequestError(msg, f"{field}.type")
    members, asked = types[kind]
    _check_members(field, value, ("type", *members))
    if kind == "json_schema" and schema is not None:
        _check_members(f"{field}.{member}", described, _DESCRIPTION)
    if asked is not None:
        yield asked


def _check_members(field: str, value: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse unknown members, also with `option.unknown_parameters=warn`: without them the grammar is another."""
    for name in value.keys() - {*known}:
        msg = f"{field} has {name[:100]!r}; expected {', '.join(known)}"
        raise UnsupportedParameterError(msg, f"{field}.{name[:100]}")
