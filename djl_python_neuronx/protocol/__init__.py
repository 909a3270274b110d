"""Wire protocols. Add one as a module and an entry of `PROTOCOLS`; the first that detects a payload parses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from djl_python_neuronx.errors import RequestError, ServingError, json_type
from djl_python_neuronx.protocol.anthropic import CountProtocol, MessagesProtocol
from djl_python_neuronx.protocol.base import (
    ADAPTER,
    ParseContext,
    ParsedRequest,
    WireProtocol,
    check_model,
    named_model,
)
from djl_python_neuronx.protocol.bedrock import BedrockProtocol
from djl_python_neuronx.protocol.custom import CustomFormatters
from djl_python_neuronx.protocol.lmi import LmiProtocol
from djl_python_neuronx.protocol.openai import OpenAiErrorBody
from djl_python_neuronx.protocol.openai_chat import ChatProtocol
from djl_python_neuronx.protocol.openai_completions import CompletionProtocol
from djl_python_neuronx.protocol.openai_responses import ResponsesProtocol
from djl_python_neuronx.protocol.parameters import shown_name
from djl_python_neuronx.protocol.plain import PlainProtocol
from djl_python_neuronx.protocol.tgi import TgiProtocol
from djl_python_neuronx.protocol.tokenize import TokenizeProtocol

MAX_NODES = 2**15
"""Most objects, lists and keys of a body: a message of a chat has 3 to 7."""
MAX_VALUES = 2**18
"""Most values of a body: twice the longest list of token ids. orjson holds the GIL while it makes them: 3 to 10 ms for
as many numbers, 12 to 18 ms for strings (least of 15 on a shared machine of 2 vCPU, 2026-11-22). Without the limits
6 MiB of empty objects take 100 ms."""
MAX_DEPTH = 250
"""Most objects and lists within each other in a body. orjson writes 254, and the answers and grammars that have parts
of a body put up to 4 around them."""
_OPENING, _COMMA, _QUOTE = b"{[:", b",", b'"'
_TEXT = bytes(set(range(256)) - {*_OPENING, *_COMMA, *_QUOTE})

PROTOCOLS: tuple[WireProtocol, ...] = (
    TgiProtocol(),
    PlainProtocol(),
    BedrockProtocol(),
    LmiProtocol(),
    MessagesProtocol(),
    CountProtocol(),
    ChatProtocol(),
    CompletionProtocol(),
    ResponsesProtocol(),
    TokenizeProtocol(),
)
_WITHOUT_ENGINE = (*TokenizeProtocol.paths, *CountProtocol.paths)
"""Paths whose answers are complete when a request is parsed; functions of `model.py` have no part in them."""
_DEFAULT = LmiProtocol()
"""The protocol of requests and errors that belong to no other."""


def detect(payload: Mapping[str, Any], context: ParseContext) -> WireProtocol:
    """The protocol of a payload.

    Raises:
        RequestError: it is of no protocol of its path; the message lists the keys, never their values.
    """
    possible = _possible(context)
    if len(possible) == 1:
        return possible[0]
    for protocol in possible:
        if protocol.detect(payload, context):
            return protocol
    found = ", ".join(map(shown_name, list(payload)[:8])) or "an empty object"
    msg = f"the body matches no known protocol: it has {found}; expected {_shapes(possible)}"
    raise RequestError(msg)


def _possible(context: ParseContext) -> list[WireProtocol]:
    of_path = [protocol for protocol in PROTOCOLS if context.path in protocol.paths]
    return of_path or [one for one in PROTOCOLS if one.anywhere and one.is_allowed(context.options)]


def _shapes(protocols: Sequence[WireProtocol]) -> str:
    return "; ".join(f"{protocol.name}: {protocol.outline}" for protocol in protocols)


def beside(path: str) -> list[WireProtocol]:
    """The protocols of a path or above it. One below `/v1/` that does not exist, `/v1/embeddings`, is OpenAI's."""
    below = [one for one in PROTOCOLS for own in one.paths if f"{path}/".startswith(f"{own}/")]
    is_openai = path.startswith("/v1/")
    return below or [one for one in PROTOCOLS if is_openai and one.error is OpenAiErrorBody]


def answer_error(error: ServingError, *, protocol: str = "", path: str = "") -> tuple[int, bytes]:
    """HTTP status and body of an error, in the shape of its protocol: by name, if it is known, else by the path."""
    name = protocol or error.protocol
    known = [one for one in PROTOCOLS if one.name == name] if name else beside(path)
    status, body = (*known, _DEFAULT)[0].answer_error(error)
    return status, orjson.dumps(body)


def parse_body(
    body: bytes,
    context: ParseContext,
    payload: dict[str, Any] | None = None,
    custom: CustomFormatters | None = None,
) -> ParsedRequest:
    """Parse a JSON body, or one of type text/plain, which is a prompt, with the `custom` formatters around it.

    `payload`: what `decode` has made of it, if it has.

    Raises:
        RequestError: the body is too large, not UTF-8, not JSON, not an object, or not a request that its protocol
            accepts.
        FormatterError: the input formatter failed.
    """
    if not body:
        msg = f"the body is empty{_wrong_type(context.headers)}; expected {_shapes(_possible(context))}"
        raise RequestError(msg)
    context.check_size(body)

    def decoded(*_: object) -> dict[str, Any]:
        if payload is not None:
            return payload
        return decode(body, context.headers, context.path)

    if custom is not None and context.path not in _WITHOUT_ENGINE:
        return custom.parse(body, context, decoded, _parse)
    return _parse(decoded(), context)


def decode(body: bytes, headers: Mapping[str, str], path: str = "") -> dict[str, Any]:
    """The object in a JSON body, or that of a prompt of type text/plain, which on a protocol's own routes is JSON too.

    Raises:
        RequestError: the body is neither.
    """
    if _content_type(headers) == "text/plain" and not any(path in one.paths for one in PROTOCOLS):
        if _is_request(body):
            msg = (
                "the body is a request in JSON, but its Content-Type is text/plain, by which it would be the prompt; "
                "send it as application/json"
            )
            raise RequestError(msg)
        return {"inputs": _decode_text(body)}
    _check_structure(body)
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        msg = f"the body is not valid JSON (UTF-8, no gzip): {error.msg} at line {error.lineno} column {error.colno}"
        raise RequestError(msg + _wrong_type(headers)) from error
    if not isinstance(payload, dict):
        msg = f"the body is {json_type(payload)}; expected an object"
        raise RequestError(msg)
    _check_depth(payload, body)
    return payload


def _content_type(headers: Mapping[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _wrong_type(headers: Mapping[str, str]) -> str:
    """The part of an error about a body that is none: its type may be the reason, as DJL Serving parses forms."""
    found = _content_type(headers)
    if found in {"", "application/json"}:
        return ""
    return f"; its Content-Type is {shown_name(found)}, expected application/json or text/plain"


def _is_request(body: bytes) -> bool:
    """True if a text is an object with a protocol's key."""
    if not body.lstrip().startswith(b"{"):
        return False
    try:
        _check_structure(body)
        payload = orjson.loads(body)
    except (RequestError, orjson.JSONDecodeError):
        return False
    return any(one.key in payload for one in PROTOCOLS)


def _parse(payload: Mapping[str, Any], context: ParseContext) -> ParsedRequest:
    protocol = detect(payload, context)
    try:
        names = [*context.options.model_names, *context.adapters]
        model = named_model(payload, names) if protocol.names_model else None
        check_model(model, names)
        adapter = _adapter(payload, context) or (model if model in context.adapters else None)
        if adapter:
            context = replace(context, adapter=adapter)
        payload = {name: value for name, value in payload.items() if name != "adapters"}
        return protocol.parse(payload, context)
    except ServingError as error:
        error.protocol = protocol.name
        raise


def _adapter(payload: Mapping[str, Any], context: ParseContext) -> str | list[str]:
    """The adapters that a request names beside its model: one, or one for each prompt. The header takes precedence.

    Raises:
        RequestError: one is unknown.
    """
    if name := context.headers.get(ADAPTER):
        return context.checked_adapter(name, ADAPTER)
    sent = payload.get("adapters")
    if isinstance(sent, list):
        return [context.checked_adapter(name) for name in sent]
    return context.checked_adapter(sent)


def _decode_text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        msg = f"the body of type text/plain is not UTF-8: {error.reason} at byte {error.start}"
    # Outside the except clause: the cause holds the body.
    raise RequestError(msg)


def _check_structure(body: bytes) -> None:
    """Refuse a body of very many parts before it is parsed. See `_check_depth` for their nesting.

    Raises:
        RequestError: the body has more than `MAX_NODES` objects, lists and keys or more than `MAX_VALUES` values.
    """
    if len(body) <= MAX_NODES:
        return
    num_nodes, num_values = sum(map(body.count, _OPENING)), body.count(_COMMA)
    if num_nodes > MAX_NODES or num_values > MAX_VALUES:
        # Text may hold any number of them, so those in strings are left out.
        marks = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _TEXT)
        codes = np.frombuffer(marks, np.uint8)
        codes = codes[~np.logical_xor.accumulate(codes == ord(_QUOTE))]
        num_values = int(np.count_nonzero(codes == ord(_COMMA)))
        num_nodes = int(np.count_nonzero(codes != ord(_QUOTE))) - num_values
    if num_nodes > MAX_NODES or num_values > MAX_VALUES:
        msg = (
            f"the body has {num_nodes} objects, lists and keys and {num_values} commas between values; "
            f"expected at most {MAX_NODES} and {MAX_VALUES}"
        )
        raise RequestError(msg)


def _check_depth(payload: Mapping[str, Any], body: bytes) -> None:
    """Refuse what an answer could not show.

    Raises:
        RequestError: the body is nested deeper than `MAX_DEPTH`.
    """
    if body.count(b"{") + body.count(b"[") <= MAX_DEPTH:
        return
    try:
        orjson.dumps([[[[payload]]]])
    except orjson.JSONEncodeError:
        msg = f"the body has more than {MAX_DEPTH} objects and lists within each other; expected at most {MAX_DEPTH}"
    else:
        return
    raise RequestError(msg)
