"""What every wire protocol provides: a parser and a formatter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from djl_python_neuronx.engine.text import Delta
from djl_python_neuronx.errors import ServingError
from djl_python_neuronx.types import GenerationRequest, Tokenizer


class Formatter(Protocol):
    """The wire memory of one request: deltas in, bytes out. Used by one thread at a time."""

    content_type: str

    def feed(self, delta: Delta) -> bytes:
        """Bytes to send for a delta; b"" if there is nothing to send yet.

        A streaming formatter gives bytes as text becomes readable, the others everything at the last delta. A delta
        that carries an error gives the error in the format's own shape.
        """


@dataclass(frozen=True)
class ParsedRequest:
    """A request that its protocol has understood."""

    request: GenerationRequest
    formatter: Formatter
    stream: bool
    """The client wants bytes as they come."""


@dataclass(frozen=True)
class ParseContext:
    """What a parser may know beside the payload."""

    tokenizer: Tokenizer
    request_id: str
    client_id: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Lower-case names."""
    output_formatter: str | None = None
    """`option.output_formatter`: json, jsonlines or sse; None: the protocol's own choice."""


class WireProtocol(Protocol):
    """A module in `protocol/` with these two functions, listed in `PROTOCOLS`."""

    name: str
    shape: str
    """What a payload looks like, for error messages."""

    def detect(self, payload: Mapping[str, Any]) -> bool:
        """True if the payload speaks this protocol."""

    def parse(self, payload: Mapping[str, Any], context: ParseContext) -> ParsedRequest:
        """Validate and tokenise.

        Raises:
            RequestError: what is wrong with the payload, by name.
        """


def error_body(error: ServingError) -> bytes:
    """The body of an error that is the whole answer: ``{"code": 413, "error": "…", "type": "prompt_too_long"}``."""
    return orjson.dumps({"code": error.status, "error": str(error), "type": error.code})
