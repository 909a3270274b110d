"""Bodies parsed for the toy model."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.protocol import parse_body
from djl_python_neuronx.protocol.base import (
    ParseContext,
    ParsedRequest,
)
from tests.doubles.toy_tokenizer import TOKENIZER


def parse(payload: object, **context: Any) -> ParsedRequest:
    body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    facts = {field.name for field in dataclasses.fields(ParseContext)}
    settings = {name: context.pop(name) for name in context.keys() - facts}
    options = ServingOptions(**{"model_name": "toy", **settings})
    given = {"tokenizer": TOKENIZER, "request_id": "r", "options": options, "vocab_size": 300}
    context = {**given, **context}
    return parse_body(body, ParseContext(**context))
