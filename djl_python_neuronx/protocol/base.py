"""Interface of wire protocols (a parser and a formatter) and of the service that runs their requests."""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from djl_python_neuronx.engine.detokenizer import Delta
from djl_python_neuronx.engine.loop import EngineLoop
from djl_python_neuronx.engine.streams import Generation
from djl_python_neuronx.errors import PromptTooLongError, ServingError
from djl_python_neuronx.types import GenerationRequest, Tokenizer

INLINE_BODY_BYTES = 8 * 1024
"""Bodies up to this size are tokenised in the event loop: a thread hop would take longer than the work."""


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
    max_prompt_chars: int | None = None
    """Text longer than this cannot fit whatever its tokens are: refused before it costs seconds to tokenise."""
    output_formatter: str | None = None
    """`option.output_formatter`: json, jsonlines or sse; None: the protocol's own choice."""
    has_logprobs: bool = True
    """Log-probabilities can be told. Where the device samples they are null in streams, and refused as details."""

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt.

        Raises:
            PromptTooLongError: the text is longer than any prompt that fits.
        """
        if self.max_prompt_chars is not None and len(text) > self.max_prompt_chars:
            msg = (
                f"the prompt has {len(text)} characters, more than any prompt that fits this deployment; "
                "shorten it, or raise option.n_positions or option.context_length_estimate"
            )
            raise PromptTooLongError(msg)
        return self.tokenizer.encode(text)


def shown(name: object) -> str:
    """A name from a request for an error message, cut to a readable length."""
    return reprlib.repr(name)


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


class Serving(Protocol):
    """The part of a `Service` that request handlers use."""

    @property
    def loop(self) -> EngineLoop:
        """The loop that requests are submitted to."""

    def parse(
        self, body: bytes, *, request_id: str | None, headers: Mapping[str, str]
    ) -> ParsedRequest:
        """Parse and validate a body."""


async def generate(
    service: Serving, body: bytes, *, request_id: str | None, headers: Mapping[str, str]
) -> tuple[ParsedRequest, Generation]:
    """Parse a body and submit its request, in a running event loop. A long body is parsed on a thread.

    Raises:
        ServingError: the request was rejected.
    """
    if len(body) <= INLINE_BODY_BYTES:
        parsed = service.parse(body, request_id=request_id, headers=headers)
    else:
        parsed = await asyncio.to_thread(
            service.parse, body, request_id=request_id, headers=headers
        )
    return parsed, service.loop.generate(parsed.request)


def error_body(error: ServingError) -> bytes:
    """The body of an error that is the whole answer: ``{"code": 413, "error": "…", "type": "prompt_too_long"}``."""
    return orjson.dumps({"code": error.status, "error": str(error), "type": error.code})
