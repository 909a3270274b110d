"""Requests as clients send them, and answers by schemas that were written without sight of the package."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.protocol.wire_schemas import SCHEMAS

RECORDED: dict[str, dict[str, Any]] = {
    f"{file.stem}: {request['name']}": request
    for file in sorted((Path(__file__).parent / "recorded").glob("*.json"))
    for request in json.loads(file.read_text(encoding="utf-8"))
}
"""Requests by family and name. Models and prompts are the toy service's, all else is what clients send."""

LMI = {"id": 4, "text": "a", "log_prob": -0.5}
LMI_DETAILS = {"finish_reason": "length", "generated_tokens": 1, "inputs": "p", "tokens": [LMI]}
LMI_END = {"finish_reason": "eos_token", "generated_tokens": 2, "inputs": "p"}
LMI_LINES = [{"token": LMI}, {"token": LMI, "generated_text": "aa"}]
TGI = {"id": 4, "text": "a", "logprob": -0.5, "special": False}
TGI_DETAILS = {
    "finish_reason": "stop_sequence",
    "generated_tokens": 1,
    "seed": None,
    "prefill": [],
    "tokens": [TGI],
}
TGI_END = {"finish_reason": "length", "generated_tokens": 2, "seed": 7, "input_length": 3}
TGI_EVENTS = [
    {"index": 1, "token": TGI, "generated_text": None, "details": None},
    {"index": 2, "token": TGI, "generated_text": "aa", "details": None},
]
USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
TOP = {"token": "a", "logprob": -0.5, "bytes": [97]}
CHAT = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 7,
    "model": "toy",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "a", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
    "usage": USAGE,
}
COMPLETION = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 7,
    "model": "toy",
    "choices": [{"index": 0, "text": "a", "logprobs": None, "finish_reason": "length"}],
    "usage": USAGE,
}
LOGPROBS = {
    "tokens": ["a"],
    "token_logprobs": [-0.5],
    "top_logprobs": [{"a": -0.5, "b": -1.5}],
    "text_offset": [0],
}


def chunk(of: dict[str, Any], choice: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    kind = "chat.completion.chunk" if of is CHAT else of["object"]
    top = {key: of[key] for key in ("id", "created", "model")}
    return {**top, "object": kind, "choices": [{"index": 0, **choice}] if choice else [], **more}


def chat_chunks(**more: Any) -> list[Any]:
    return [
        chunk(
            CHAT, {"delta": {"role": "assistant", "content": "a"}, "finish_reason": None}, **more
        ),
        chunk(CHAT, {"delta": {}, "finish_reason": "stop"}, **more),
    ]


def with_logprobs(answer: dict[str, Any], logprobs: Any) -> dict[str, Any]:
    return {**answer, "choices": [{**answer["choices"][0], "logprobs": logprobs}]}


PART = {"text": "a", "logprobs": None, "finish_reason": None}
LAST_PART = {**PART, "finish_reason": "length"}
CHAT_LOGPROBS = {"content": [{**TOP, "top_logprobs": [TOP, TOP]}], "refusal": None}
TOP_CHUNKS = chat_chunks()
TOP_CHUNKS[0]["choices"][0]["logprobs"] = CHAT_LOGPROBS
BEDROCK = {
    "body": {
        "generation": "pa",
        "prompt_token_count": 3,
        "generation_token_count": 1,
        "stop_reason": "length",
    },
    "metering": {"inputTokenCount": 3, "outputTokenCount": 1},
    "content_type": "application/json",
}
BEDROCK_LINES = [
    {
        "body": {**BEDROCK["body"], "generation": "a", "stop_reason": None},  # type: ignore[dict-item]
        "metering": BEDROCK["metering"],
        "content_type": "application/jsonlines",
    },
    {
        "body": {
            "generation": "b",
            "prompt_token_count": None,
            "generation_token_count": 2,
            "stop_reason": "length",
        },
        "metering": {"outputTokenCount": 2},
        "content_type": "application/jsonlines",
    },
]
MODEL = {"id": "toy", "object": "model", "created": 7, "owned_by": "me"}
WITH_TOP = {"top_tokens": [[LMI, LMI]]}
OTHER = {"finish_reason": "length", "generated_tokens": 1, "tokens": [LMI], "generated_text": "b"}
TGI_OTHER = {**TGI_DETAILS, "generated_text": "b"}
USAGE_CHUNK = [chunk(CHAT, None, usage=USAGE)]

EXAMPLES: dict[str, Any] = {
    "lmi_json": {"generated_text": "a"},
    "lmi_json_details": {"generated_text": "a", "details": LMI_DETAILS},
    "lmi_json_prefill": {
        "generated_text": "a",
        "details": {**LMI_DETAILS, "prefill": [{**LMI, "log_prob": None}]},
    },
    "lmi_json_top_tokens": {"generated_text": "a", "details": {**LMI_DETAILS, **WITH_TOP}},
    "lmi_json_best_of": {
        "generated_text": "a",
        "details": {**LMI_DETAILS, "best_of_sequences": [OTHER]},
    },
    "lmi_list": [{"generated_text": "a"}, {"generated_text": ""}],
    "lmi_list_details": [{"generated_text": "a", "details": LMI_DETAILS}],
    "lmi_jsonlines": LMI_LINES,
    "lmi_jsonlines_details": [LMI_LINES[0], {**LMI_LINES[1], "details": LMI_END}],
    "lmi_sse": LMI_LINES,
    "lmi_sse_details": [LMI_LINES[0], {**LMI_LINES[1], "details": LMI_END}],
    "lmi_error": {"code": 400, "error": "no", "type": "bad_request"},
    "tgi_json": {"generated_text": "a"},
    "tgi_json_details": {"generated_text": "a", "details": TGI_DETAILS},
    "tgi_json_prefill": {
        "generated_text": "a",
        "details": {**TGI_DETAILS, "prefill": [{"id": 1, "text": "p", "logprob": None}]},
    },
    "tgi_json_top_tokens": {
        "generated_text": "a",
        "details": {**TGI_DETAILS, "top_tokens": [[TGI, TGI]]},
    },
    "tgi_json_best_of": {
        "generated_text": "a",
        "details": {**TGI_DETAILS, "best_of_sequences": [TGI_OTHER]},
    },
    "tgi_list": [{"generated_text": "a"}],
    "tgi_list_details": [{"generated_text": "a", "details": TGI_DETAILS}],
    "tgi_list_prefill": [
        {
            "generated_text": "a",
            "details": {**TGI_DETAILS, "prefill": [{"id": 1, "text": "p", "logprob": None}]},
        }
    ],
    "tgi_stream": TGI_EVENTS,
    "tgi_stream_details": [TGI_EVENTS[0], {**TGI_EVENTS[1], "details": TGI_END}],
    "tgi_stream_top_2": [
        {**TGI_EVENTS[0], "top_tokens": [TGI, TGI]},
        {**TGI_EVENTS[1], "top_tokens": [TGI, TGI], "details": TGI_END},
    ],
    "tgi_info": {
        "model_id": "toy",
        "model_sha": None,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": 128,
        "max_best_of": 2,
        "max_stop_sequences": 4,
        "max_input_tokens": 1024,
        "max_total_tokens": 2048,
        "validation_workers": 2,
        "max_client_batch_size": 32,
        "router": "text-generation-router",
        "version": "3.3.6",
        "sha": None,
        "docker_label": None,
    },
    "tgi_error": {"error": "no", "error_type": "validation"},
    "bedrock_json": BEDROCK,
    "bedrock_jsonlines": BEDROCK_LINES,
    "plain_json": {"text": ["pa"]},
    "plain_jsonlines": [{"text": ["pa", "p"]}, {"text": ["paa", "pb"]}],
    "tokens": {"count": 1, "max_model_len": 9, "tokens": [4]},
    "prompt": {"prompt": "a"},
    "version": {"version": "1"},
    "chat": CHAT,
    "chat_logprobs": with_logprobs(
        CHAT, {"content": [{**TOP, "top_logprobs": []}], "refusal": None}
    ),
    "chat_top_2": with_logprobs(CHAT, CHAT_LOGPROBS),
    "chat_sse": chat_chunks(),
    "chat_sse_usage": [*chat_chunks(usage=None), *USAGE_CHUNK],
    "chat_sse_top_2": TOP_CHUNKS,
    "chat_jsonlines": chat_chunks(),
    "completion": COMPLETION,
    "completion_logprobs": with_logprobs(COMPLETION, {**LOGPROBS, "top_logprobs": None}),
    "completion_top_2": with_logprobs(COMPLETION, LOGPROBS),
    "completion_echo_top_2": with_logprobs(
        COMPLETION, {**LOGPROBS, "token_logprobs": [None], "top_logprobs": [None]}
    ),
    "completion_sse": [chunk(COMPLETION, PART), chunk(COMPLETION, LAST_PART)],
    "completion_sse_usage": [
        chunk(COMPLETION, PART, usage=None),
        chunk(COMPLETION, LAST_PART, usage=None),
        chunk(COMPLETION, None, usage=USAGE),
    ],
    "completion_sse_top_2": [
        chunk(COMPLETION, {**PART, "logprobs": LOGPROBS}),
        chunk(COMPLETION, {**LAST_PART, "logprobs": LOGPROBS}),
    ],
    "completion_jsonlines": [chunk(COMPLETION, PART), chunk(COMPLETION, LAST_PART)],
    "models": {"object": "list", "data": [MODEL]},
    "model": MODEL,
    "openai_error": {"error": {"message": "no", "type": "a", "param": None, "code": None}},
}
"""A good answer of each kind, as the sources show it."""

# A part of a chat may be without text; keys of a set of alternatives are the texts of tokens.
OPTIONAL = {("delta", "content"), ("top_logprobs", "a"), ("top_logprobs", "b")}


def encoded(name: str, example: Any) -> bytes:
    """An example as the body of its kind."""
    if "sse" in name or name.startswith("tgi_stream"):
        events = [json.dumps(record) for record in example]
        if not name.startswith(("lmi", "tgi")):
            events.append("[DONE]")
        return "".join(f"data: {event}\n\n" for event in events).encode()
    if "jsonlines" in name:
        return "".join(f"{json.dumps(record)}\n" for record in example).encode()
    return json.dumps(example).encode()


def records(value: Any, inside: str = "") -> Iterator[tuple[dict[str, Any], str]]:
    """Every object in `value`, with the key that it is found under."""
    if isinstance(value, dict):
        yield value, inside
        for key, item in value.items():
            yield from records(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from records(item, inside)


def test_every_kind_of_answer_has_an_example() -> None:
    assert set(EXAMPLES) | {"empty"} == set(SCHEMAS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_schema_takes_its_example_and_nothing_beside_it(name: str) -> None:
    """One key more, one key less, or a value of another type, at every depth."""
    if name.startswith(("chat", "completion", "model")):
        pytest.importorskip("openai", reason="needs the `dev` extra")
    check = SCHEMAS[name]
    check(encoded(name, EXAMPLES[name]))
    for number, (found, inside) in enumerate(records(EXAMPLES[name])):

        def changed(number: int = number) -> tuple[Any, dict[str, Any]]:
            example = copy.deepcopy(EXAMPLES[name])
            return example, list(records(example))[number][0]

        example, record = changed()
        record["surplus"] = "x"
        with pytest.raises((ValueError, AssertionError)):
            check(encoded(name, example))
        for key in found:
            example, record = changed()
            record[key] = {"another": ["type"]}
            with pytest.raises((ValueError, AssertionError, TypeError, KeyError)):
                check(encoded(name, example))
            if (inside, key) not in OPTIONAL:
                example, record = changed()
                del record[key]
                with pytest.raises((ValueError, AssertionError, KeyError)):
                    check(encoded(name, example))


@pytest.mark.parametrize("name", [name for name in EXAMPLES if isinstance(EXAMPLES[name], list)])
def test_a_schema_takes_no_shortened_stream(name: str) -> None:
    if name.startswith(("chat", "completion")):
        pytest.importorskip("openai", reason="needs the `dev` extra")
    content = encoded(name, EXAMPLES[name])
    for cut in (content[:-1], content[: len(content) // 2]):
        with pytest.raises((ValueError, AssertionError)):
            SCHEMAS[name](cut)
    if "list" not in name and name != "plain_jsonlines":
        with pytest.raises((ValueError, AssertionError, KeyError)):
            SCHEMAS[name](encoded(name, EXAMPLES[name][:-1]))


def test_recorded_requests_are_whole() -> None:
    known = {"name", "source", "options", "method", "path", "headers", "body", "raw", "expect"}
    for name, request in RECORDED.items():
        assert set(request) <= known, name
        assert request["source"], name
        assert request["expect"]["schema"] in SCHEMAS, name
        refused = request["expect"].get("status", 200) != 200
        assert refused == request["expect"]["schema"].endswith("_error"), name
