"""Wire protocols. A new one is a module and its line in `PROTOCOLS`; the first that knows a payload parses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from djl_python_neuronx.errors import RequestError
from djl_python_neuronx.protocol.base import ParseContext, ParsedRequest, WireProtocol, shown
from djl_python_neuronx.protocol.lmi import LmiProtocol

PROTOCOLS: tuple[WireProtocol, ...] = (LmiProtocol(),)


def detect(payload: Mapping[str, Any]) -> WireProtocol:
    """The protocol that a payload speaks.

    Raises:
        RequestError: none does; the message lists the keys that were found, never their values.
    """
    for protocol in PROTOCOLS:
        if protocol.detect(payload):
            return protocol
    found = ", ".join(shown(key) for key in list(payload)[:8]) or "an empty object"
    known = "; ".join(f"{protocol.name}: {protocol.shape}" for protocol in PROTOCOLS)
    msg = f"the body speaks no known protocol: found {found}; expected {known}"
    raise RequestError(msg)


def parse_body(body: bytes, context: ParseContext) -> ParsedRequest:
    """A request out of a JSON body.

    Raises:
        RequestError: the body is not JSON, not an object, or not a request that its protocol accepts.
    """
    if not body:
        msg = 'the body is empty; send JSON such as {"inputs": "…", "parameters": {}}'
        raise RequestError(msg)
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        msg = f"the body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}"
        raise RequestError(msg) from error
    if not isinstance(payload, dict):
        msg = f"the body is a JSON {_json_type(payload)}; expected an object"
        raise RequestError(msg)
    return detect(payload).parse(payload, context)


def _json_type(value: object) -> str:
    names = {
        list: "array",
        str: "string",
        bool: "boolean",
        int: "number",
        float: "number",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)
