"""Structured output: the fields of OpenAI, vLLM, TGI and LMI that ask for it, and the one grammar that they mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from djl_python_neuronx.errors import (
    QueueFullError,
    RequestError,
    TextLimitError,
    UnsupportedParameterError,
    json_type,
)
from djl_python_neuronx.grammar import KINDS, MOST_CHARS
from djl_python_neuronx.types import Tokenizer

if TYPE_CHECKING:
    from djl_python_neuronx.protocol.parameters import GenerationParameters

FIELDS: Mapping[str, str] = {
    "response_format": "",
    "grammar": "",
    "structured_outputs": "",
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""The fields, with the kind of grammar that each has; "" if the value names it."""
_OPTIONS = frozenset({"whitespace_pattern", "disable_any_whitespace"})
_NEUTRAL = frozenset({"disable_fallback", "disable_additional_properties"})
_TYPED = ("text", "json_object", "json", "json_schema", "regex", "structural_tag")


class Asked(NamedTuple):
    """A grammar that a field asks for."""

    name: str
    kind: str
    value: Any
    whitespace: str | None = None


def grammar_of(given: GenerationParameters, tokenizer: Tokenizer) -> str | None:
    """The grammar of a request in the engine's form; None if it asks for none.

    Raises:
        RequestError: it asks for several, or for one that cannot be read or enforced.
    """
    fields = given.model_fields_set & FIELDS.keys()
    found = [one for name in fields for one in _asked(name, getattr(given, name))]
    if not found:
        return None
    if len(found) > 1:
        names = sorted(one.name for one in found)
        msg = f"{' and '.join(names)} each have a grammar; send one of them"
        raise RequestError(msg, names[1])
    name, kind, value, whitespace = found[0]
    if tokenizer.pieces is None:
        msg = (
            f"{name} cannot be enforced, because the text of this model's tokens depends on the tokens around them; "
            "leave it out"
        )
        raise UnsupportedParameterError(msg, name)
    if whitespace is None:
        whitespace = given.guided_whitespace_pattern
    text = orjson.dumps([value, whitespace]).decode()
    if len(text) > MOST_CHARS:
        msg = f"{name} has {len(text)} characters of JSON; expected at most {MOST_CHARS}"
        raise RequestError(msg, name)
    try:
        return tokenizer.grammar(kind, text)
    except (TextLimitError, QueueFullError):
        raise
    except RequestError as error:
        msg = f"{name} {error}"
        raise type(error)(msg, param=name) from None


def _asked(name: str, value: Any) -> Iterator[Asked]:  # noqa: ANN401
    if FIELDS[name]:
        yield Asked(name, FIELDS[name], value)
    elif name == "structured_outputs":
        yield from _structured_outputs(name, value)
    else:
        yield from _typed(name, value)


def _structured_outputs(name: str, value: Mapping[str, Any]) -> Iterator[Asked]:
    """vLLM's: an object with one of the kinds, and options."""
    values = {key: one for key, one in value.items() if one is not None and one is not False}
    for key in values.keys() - KINDS.keys() - _OPTIONS:
        msg = f"{name} has {key!r}; expected one of {', '.join(KINDS)}, and {' or '.join(sorted(_OPTIONS))}"
        raise UnsupportedParameterError(msg, f"{name}.{key}")
    whitespace = "" if "disable_any_whitespace" in values else values.get("whitespace_pattern")
    for kind in values.keys() & KINDS.keys():
        yield Asked(f"{name}.{kind}", kind, values[kind], whitespace)


def _typed(name: str, value: Mapping[str, Any]) -> Iterator[Asked]:
    """An object with a type: OpenAI's `response_format`, TGI's and LMI's `grammar`."""
    kind = value.get("type")
    if kind == "text":
        return
    if kind not in _TYPED:
        shown = kind if isinstance(kind, str) else json_type(kind)
        msg = f"{name}.type is {shown[:100]}; expected {', '.join(_TYPED)}"
        raise RequestError(msg, f"{name}.type")
    if kind == "structural_tag":
        yield Asked(name, kind, dict(value))
    elif kind == "regex":
        yield Asked(name, kind, value.get("value"))
    elif kind == "json_object" and "value" not in value:
        yield Asked(name, kind, True)
    elif kind == "json_schema":
        described = value.get("json_schema", value.get("value"))
        schema = described.get("schema") if isinstance(described, dict) else None
        yield Asked(f"{name}.json_schema.schema", "json", schema)
    else:
        yield Asked(f"{name}.value", "json", value.get("value"))
