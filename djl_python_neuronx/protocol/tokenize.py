"""`/tokenize` and `/detokenize`: vLLM's for a prompt, messages and ids, and TGI's for `inputs`.

Source: vllm 030ea52e, vllm/entrypoints/serve/tokenize/protocol.py; text-generation-inference db931fcf,
router/src/server.rs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Union

import orjson
from pydantic import Field, WithJsonSchema
from typing_extensions import TypedDict

from djl_python_neuronx.engine.detokenizer import Delta
from djl_python_neuronx.errors import RequestError, json_type
from djl_python_neuronx.protocol.base import ParseContext, ParsedRequest, WireProtocol
from djl_python_neuronx.protocol.openai import OpenAiErrorBody, answer_error
from djl_python_neuronx.protocol.openai_chat import Conversation, Message
from djl_python_neuronx.protocol.parameters import (
    Flag,
    RequestModel,
    sampling_params,
    validated,
)
from djl_python_neuronx.protocol.text_generation import Body


class _Named(RequestModel):
    model: str | None = None


class TokenizeBody(_Named, Conversation):
    """A prompt or a conversation."""

    prompt: str | None = None
    messages: Annotated[
        list[Message] | None, Field(min_length=1, description="a list of at least 1 message")
    ] = None
    return_token_strs: Flag = False
    add_special_tokens: Flag = True
    """Of a prompt. A conversation has those that its template writes."""


class DetokenizeBody(_Named):
    """Token ids."""

    tokens: Annotated[
        Any, WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}})
    ]


class Tokens(TypedDict):
    """The ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenPiece(TypedDict):
    """A token of TGI's `inputs`; `start` and `stop` count the bytes of the tokens' texts."""

    id: int
    text: str
    start: int
    stop: int


class PromptText(TypedDict):
    """The text of ids."""

    prompt: str


class Ready:
    """The `Formatter` of an answer that needs no engine."""

    content_type = "application/json"

    def __init__(self, answer: object) -> None:
        """`answer`: a value for JSON."""
        self._body = orjson.dumps(answer)

    def feed(self, _delta: Delta) -> bytes:
        """See `Formatter`."""
        return self._body


class TokenizeProtocol(WireProtocol):
    """Routes that need no engine. Errors have OpenAI's shape, as in vLLM."""

    name = "tokenize"
    outline = '{"prompt": "…"}'
    key = "prompt"
    paths = ("/tokenize", "/detokenize")
    anywhere = False
    requests: Mapping[str, Any] = {"application/json": Union[TokenizeBody, Body, DetokenizeBody]}
    answers: Mapping[str, Any] = {"application/json": Union[Tokens, list[TokenPiece], PromptText]}
    error = OpenAiErrorBody

    answer_error = staticmethod(answer_error)

    def parse(self, payload: Mapping[str, Any], context: ParseContext) -> ParsedRequest:
        """See `WireProtocol.parse`. The answer is complete."""
        answer: Tokens | PromptText | list[TokenPiece]
        if context.path == "/detokenize":
            body = validated(DetokenizeBody, payload, context.options)
            answer = _detokenized(body, context)
        elif "inputs" in payload:
            inputs = validated(Body, payload, context.options)
            sampling_params(inputs.parameters.given_sampling())  # which judges their values
            answer = _pieces(context.encode(inputs.inputs), context)
        else:
            answer = _tokenized(validated(TokenizeBody, payload, context.options), context)
        return ParsedRequest((), Ready(answer), stream=False)


def _tokenized(body: TokenizeBody, context: ParseContext) -> Tokens:
    if (body.prompt is None) == (body.messages is None):
        msg = "expected one of prompt, messages and inputs"
        raise RequestError(msg, param="prompt")
    if body.messages is not None:
        ids = body.encode(body.messages, context)
    else:
        ids = context.encode(body.prompt or "", special=body.add_special_tokens)
    return {
        "count": len(ids),
        "max_model_len": context.max_model_len,
        "tokens": ids,
        "token_strs": [piece["text"] for piece in _pieces(ids, context)]
        if body.return_token_strs
        else None,
    }


def _pieces(ids: list[int], context: ParseContext) -> list[TokenPiece]:
    pieces: list[TokenPiece] = []
    start = 0
    for token_id in ids:
        text = context.tokenizer.token_bytes(token_id)
        stop = start + len(text) * (token_id not in context.tokenizer.special_ids)
        shown = text.decode(errors="replace")
        pieces.append({"id": token_id, "text": shown, "start": start, "stop": stop})
        start = stop
    return pieces


def _detokenized(body: DetokenizeBody, context: ParseContext) -> PromptText:
    if not isinstance(body.tokens, list):
        msg = f"tokens is {json_type(body.tokens)}; expected a list of token ids"
        raise RequestError(msg, param="tokens")
    ids = context.encode(body.tokens, "tokens")
    return {"prompt": context.tokenizer.decode(ids)}
