"""Structured output from a request to its text. `jsonschema` and Python's `re` judge the texts."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

jsonschema = pytest.importorskip("jsonschema", reason="judges the texts")

from djl_python_neuronx.backends.base import ModelSpec, Want  # noqa: E402
from djl_python_neuronx.engine.speculation import NgramProposer  # noqa: E402
from djl_python_neuronx.engine.streams import BlockingQueue  # noqa: E402
from djl_python_neuronx.errors import ServingError  # noqa: E402
from djl_python_neuronx.service import Service  # noqa: E402
from djl_python_neuronx.types import FinishReason  # noqa: E402
from tests.doubles.byte_tokenizer import ByteTokenizer  # noqa: E402
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend  # noqa: E402
from tests.doubles.toy_service import toy_service  # noqa: E402

SPEC = replace(TOY_SPEC, num_slots=16, max_model_len=512)
VERIFIES = replace(SPEC, num_speculative_tokens=3, outputs=Want.LOGITS | Want.ALL_LOGITS)
MIXED = replace(SPEC, outputs=Want.TOKENS | Want.LOGITS, largest_top_k=64)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "ab", 'é"\\']}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"place": {"const": {"x": [1, True, None]}}},
}
BOUNDED: list[dict[str, Any]] = [
    PERSON,
    {"type": "string", "pattern": "^[a-c]{2,5}-[0-9]{3}$"},
    {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"enum": [1, "x", None]}],
        "items": False,
    },
    {"oneOf": [{"const": "yes"}, {"type": "integer", "minimum": -5, "exclusiveMaximum": 5}]},
    {"type": "string", "format": "date"},
]
"""Their longest texts have fewer bytes than the slots have tokens."""
PATTERN = r"(yes|no)[,;] \d{1,4}(\.\d)?"
SAMPLED = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 400}


def json_of(text: str) -> Any:
    return json.loads(text)


def fulfils(schema: Mapping[str, Any]) -> Callable[[str], bool]:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    return lambda text: validator.is_valid(json.loads(text))


def serve(spec: ModelSpec = SPEC, **options: Any) -> Service:
    proposer = NgramProposer(spec, 3) if spec.num_speculative_tokens else None
    return toy_service(ToyBackend(spec), tokenizer=ByteTokenizer(), proposer=proposer, **options)


def generate(
    service: Service, requests: Iterable[Mapping[str, Any]]
) -> list[tuple[str, FinishReason | None, ServingError | None]]:
    """The text of each request (parameters of LMI), its finish reason and its error, all at the same time."""
    inbox, texts, ends = BlockingQueue(), defaultdict[str, str](str), {}
    parsed = [
        service.parse(json.dumps({"inputs": f"{one['seed']}", "parameters": one}).encode())
        for one in requests
    ]
    names = [one.request_id for answer in parsed for one in answer.requests]
    for answer in parsed:
        service.loop.submit_all(service.loop.prepare(*answer.requests), inbox)
    while len(ends) < len(names):
        for delta in inbox.drain(60):
            texts[delta.request_id] += delta.text
            if delta.finish_reason is not None:
                ends[delta.request_id] = (delta.finish_reason, delta.error)
    return [(texts[name], *ends[name]) for name in names]


@pytest.mark.parametrize("spec", [SPEC, VERIFIES, MIXED], ids=["plain", "drafts", "device samples"])
def test_sampled_texts_fulfil_bounded_schemas(spec: ModelSpec) -> None:
    """500 texts and some beside them that have no grammar; no text ends by its length."""
    count = 500 if spec is SPEC else 60
    wanted, requests = [], []
    for i in range(count):
        schema = BOUNDED[i % len(BOUNDED)]
        asked: dict[str, Any] = {"guided_json": schema}
        judge = fulfils(schema)
        if i % 7 == 5:
            asked, judge = (
                {"guided_regex": PATTERN},
                lambda text: bool(re.fullmatch(PATTERN, text, re.A)),
            )
        wanted.append(judge)
        requests.append({**SAMPLED, "seed": i, "top_p": 0.9 if i % 3 else 1, **asked})
    free = [{**SAMPLED, "seed": i, "max_new_tokens": 30} for i in range(20)]
    service = serve(spec)
    try:
        found = generate(service, requests)
        plain = generate(service, free)
        assert generate(service, [*requests[:20], *free])[20:] == plain
    finally:
        service.close()
    wrong = [
        (requests[i], found[i])
        for i, judge in enumerate(wanted)
        if found[i][1] is not FinishReason.EOS or not judge(found[i][0])
    ]
    assert wrong == []
    assert len({text for text, *_ in found}) > count / 3
