"""Structured output: the fields of OpenAI, vLLM, TGI and LMI that ask for it, and the one grammar that they mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import orjson

from djl_python_neuronx.errors import (
    QueueFullError,
    RequestError,
    TextLimitError,
    UnsupportedParameterError,
)
from djl_python_neuronx.grammar import KINDS, MOST_CHARS
from djl_python_neuronx.types import Tokenizer

if TYPE_CHECKING:
    from djl_python_neuronx.protocol.parameters import GenerationParameters

KIND_OF = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""Fields that have a grammar of one kind. The type in the value of the others names it, or its key."""
FIELDS = frozenset({*KIND_OF, "response_format", "grammar", "structured_outputs"})
_OPTIONS = ("whitespace_pattern", "disable_any_whitespace")
Asked = tuple[str, str, Any, "str | None"]
"""The name of a field, and the kind, the value and the whitespace of its grammar."""


def grammar_of(given: GenerationParameters, tokenizer: Tokenizer) -> str | None:
    """The grammar of a request in the engine's form; None if it asks for none.

    Raises:
        RequestError: it asks for several, or for one that cannot be read or enforced.
    """
    fields = given.model_fields_set & FIELDS
    found = [one for field in fields for one in _asked(field, getattr(given, field))]
    if not found:
        return None
    if len(found) > 1:
        names = sorted(name for name, *_ in found)
        msg = f"{' and '.join(names)} each have a grammar; send one of them"
        raise RequestError(msg, names[1])
    ((name, kind, value, whitespace),) = found
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


def _asked(field: str, value: Any) -> Iterator[Asked]:  # noqa: ANN401
    if field in KIND_OF:
        yield field, KIND_OF[field], value, None
    elif field == "structured_outputs":
        yield from _structured_outputs(field, value)
    elif (kind := value.get("type", "missing")) != "text":
        yield _typed(field, str(kind), value)


def _structured_outputs(field: str, value: Mapping[str, Any]) -> Iterator[Asked]:
    """vLLM's: an object with one of the kinds, and options."""
    values = {key: one for key, one in value.items() if one is not None and one is not False}
    whitespace = "" if "disable_any_whitespace" in values else values.get("whitespace_pattern")
    for key in values.keys() - {*_OPTIONS}:
        if key not in KINDS:
            msg = f"{field} has {key!r}; expected {', '.join((*KINDS, *_OPTIONS))}"
            raise UnsupportedParameterError(msg, f"{field}.{key}")
        yield f"{field}.{key}", key, values[key], whitespace


def _typed(field: str, kind: str, value: Mapping[str, Any]) -> Asked:
    """A grammar by its type: OpenAI's `response_format`, TGI's and LMI's `grammar`."""
    described = value.get("json_schema", value.get("value"))
    schema = described.get("schema") if isinstance(described, dict) else None
    types: dict[str, Asked] = {
        "json_object": (field, "json_object", True, None),
        "json_schema": (f"{field}.json_schema.schema", "json", schema, None),
        "json": (f"{field}.value", "json", value.get("value"), None),
        "regex": (f"{field}.value", "regex", value.get("value"), None),
        "structural_tag": (field, "structural_tag", value, None),
    }
    if kind not in types:
        msg = f"{field}.type is {kind[:100]}; expected text, {', '.join(types)}"
        raise RequestError(msg, f"{field}.type")
    return types[kind]
