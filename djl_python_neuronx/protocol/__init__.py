"""Wire protocols. Add one as a module and an entry of `PROTOCOLS`; the first that detects a payload parses it."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import orjson

from djl_python_neuronx.errors import RequestError, json_type
from djl_python_neuronx.protocol.base import ParseContext, ParsedRequest, WireProtocol
from djl_python_neuronx.protocol.lmi import LmiProtocol

PROTOCOLS: tuple[WireProtocol, ...] = (LmiProtocol(),)


def detect(payload: Mapping[str, Any]) -> WireProtocol:
    """The protocol of a payload.

    Raises:
        RequestError: it is of no known protocol; the message lists the keys, never their values.
    """
    for protocol in PROTOCOLS:
        if protocol.detect(payload):
            return protocol
    found = ", ".join(reprlib.repr(key) for key in list(payload)[:8]) or "an empty object"
    known = "; ".join(f"{protocol.name}: {protocol.shape}" for protocol in PROTOCOLS)
    msg = f"the body matches no known protocol: it has {found}; expected {known}"
    raise RequestError(msg)


def parse_body(body: bytes, context: ParseContext) -> ParsedRequest:
    """Parse a JSON body.

    Raises:
        RequestError: the body is too large, not JSON, not an object, or not a request that its protocol accepts.
    """
    if not body:
        msg = 'the body is empty; send JSON such as {"inputs": "…", "parameters": {}}'
        raise RequestError(msg)
    context.check_size(body)
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        msg = f"the body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}"
        raise RequestError(msg) from error
    if not isinstance(payload, dict):
        msg = f"the body is {json_type(payload)}; expected an object"
        raise RequestError(msg)
    return detect(payload).parse(payload, context)
