"""Requests as clients send them, and answers by schemas that were written without sight of the package."""

from __future__ import annotations

import collections
import contextlib
import copy
import json
import logging
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the `server` extra")
httpx = pytest.importorskip("httpx", reason="needs httpx")

from djl_python_neuronx.server.app import Application  # noqa: E402
from djl_python_neuronx.server.models import Model  # noqa: E402
from tests.doubles.toy_backend import ToyBackend, expected  # noqa: E402
from tests.doubles.toy_service import toy_service  # noqa: E402
from tests.doubles.toy_tokenizer import TOKENIZER  # noqa: E402
from tests.processes import PATIENCE_S  # noqa: E402
from tests.protocol.wire_schemas import SCHEMAS  # noqa: E402
from tests.server.running import Running, http  # noqa: E402

RECORDED: dict[str, dict[str, Any]] = {
    f"{file.stem}: {request['name']}": request
    for file in sorted((Path(__file__).parent / "recorded").glob("*.json"))
    for request in json.loads(file.read_text(encoding="utf-8"))
}
"""Requests by family and name. Models and prompts are the toy service's, all else is what clients send."""

LMI = {"id": 4, "text": "a", "log_prob": -0.5}
LMI_DETAILS = {"finish_reason": "length", "generated_tokens": 1, "inputs": "p", "tokens": [LMI]}
LMI_END = {"finish_reason": "eos_token", "generated_tokens": 2, "inputs": "p"}
LMI_LINES = [{"token": LMI}, {"token": LMI, "generated_text": "aa", "details": LMI_END}]
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
    "system_fingerprint": "1",
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
    "system_fingerprint": "1",
    "choices": [{"index": 0, "text": "a", "logprobs": None, "finish_reason": "length"}],
    "usage": USAGE,
}
LOGPROBS = {
    "tokens": ["a"],
    "token_logprobs": [-0.5],
    "top_logprobs": [{"a": -0.5, "b": -1.5}],
    "text_offset": [0],
}
ECHOED = {**LOGPROBS, "token_logprobs": [None], "top_logprobs": [None]}


PART_DONE = {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}
MESSAGE = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant"}
RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "created_at": 7,
    "completed_at": 8,
    "status": "completed",
    "incomplete_details": None,
    "error": None,
    "model": "toy",
    "output": [{**MESSAGE, "content": [PART_DONE]}],
    "usage": {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 1,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 4,
    },
    "instructions": None,
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": None, "summary": None},
    "temperature": 1.0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_logprobs": 0,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "truncation": "disabled",
    "metadata": None,
    "user": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
    "previous_response_id": None,
    "store": False,
    "background": False,
    "service_tier": "default",
}
RUNNING = {"status": "in_progress", "completed_at": None, "output": [], "usage": None}
PLACE = {"item_id": "msg_1", "output_index": 0, "content_index": 0}


def response_events(scores: list[Any]) -> list[Any]:
    part = {**PART_DONE, "logprobs": scores}
    done = {**MESSAGE, "content": [part]}
    started = {**MESSAGE, "status": "in_progress", "content": []}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {**RESPONSE, **RUNNING}},
        {"type": "response.in_progress", "response": {**RESPONSE, **RUNNING}},
        {"type": "response.output_item.added", "output_index": 0, "item": started},
        {"type": "response.content_part.added", **PLACE, "part": {**PART_DONE, "text": ""}},
        {"type": "response.output_text.delta", **PLACE, "delta": "a", "logprobs": scores},
        {"type": "response.output_text.done", **PLACE, "text": "a", "logprobs": scores},
        {"type": "response.content_part.done", **PLACE, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": done},
        {"type": "response.completed", "response": {**RESPONSE, "output": [done]}},
    ]
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


def chunk(of: dict[str, Any], choice: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    kind = "chat.completion.chunk" if of is CHAT else of["object"]
    top = {key: of[key] for key in ("id", "created", "model", "system_fingerprint")}
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
MODEL |= {"max_model_len": 9, "root": "toy", "parent": None}
WITH_TOP = {"top_tokens": [[LMI, LMI]]}
OTHER = {"finish_reason": "length", "generated_tokens": 1, "tokens": [LMI], "generated_text": "b"}
TGI_OTHER = {**TGI_DETAILS, "generated_text": "b"}
USAGE_CHUNK = [chunk(CHAT, None, usage=USAGE)]
MESSAGES_USAGE = {
    "input_tokens": 3,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 0,
    "output_tokens": 1,
}
MESSAGES = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "toy",
    "content": [
        {"type": "thinking", "thinking": "b", "signature": "s"},
        {"type": "text", "text": "a"},
    ],
    "stop_reason": "stop_sequence",
    "stop_sequence": "x",
    "usage": MESSAGES_USAGE,
}
NO_END = {"stop_reason": None, "stop_sequence": None}
MESSAGES_EVENTS = [
    {"type": "message_start", "message": {**MESSAGES, "content": [], **NO_END}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
    {"type": "content_block_stop", "index": 0},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": MESSAGES_USAGE,
    },
    {"type": "message_stop"},
]

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
    "lmi_sse": LMI_LINES,
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
    "tgi_tokens": [{"id": 4, "text": "a", "start": 0, "stop": 1}],
    "prompt": {"prompt": "a"},
    "version": {"version": "1"},
    "chat": CHAT,
    "chat_logprobs": with_logprobs(
        CHAT, {"content": [{**TOP, "top_logprobs": []}], "refusal": None}
    ),
    "chat_top_2": with_logprobs(CHAT, CHAT_LOGPROBS),
    "chat_sse": chat_chunks(),
    "chat_sse_usage": [*chat_chunks(usage=None), *USAGE_CHUNK],
    "chat_sse_usage_each": [*chat_chunks(usage=USAGE), *USAGE_CHUNK],
    "chat_sse_top_2": TOP_CHUNKS,
    "chat_jsonlines": chat_chunks(),
    "completion": COMPLETION,
    "completion_logprobs": with_logprobs(COMPLETION, {**LOGPROBS, "top_logprobs": None}),
    "completion_top_2": with_logprobs(COMPLETION, LOGPROBS),
    "completion_echo_top_2": {
        **with_logprobs(COMPLETION, ECHOED),
        "usage": {"prompt_tokens": 1, "completion_tokens": 0, "total_tokens": 1},
    },
    "completion_sse": [chunk(COMPLETION, PART), chunk(COMPLETION, LAST_PART)],
    "completion_sse_usage": [
        chunk(COMPLETION, PART, usage=None),
        chunk(COMPLETION, LAST_PART, usage=None),
        chunk(COMPLETION, None, usage=USAGE),
    ],
    "completion_sse_usage_each": [
        chunk(COMPLETION, PART, usage=USAGE),
        chunk(COMPLETION, LAST_PART, usage=USAGE),
        chunk(COMPLETION, None, usage=USAGE),
    ],
    "completion_sse_top_2": [
        chunk(COMPLETION, {**PART, "logprobs": LOGPROBS}),
        chunk(COMPLETION, {**LAST_PART, "logprobs": LOGPROBS}),
    ],
    "completion_jsonlines": [chunk(COMPLETION, PART), chunk(COMPLETION, LAST_PART)],
    "messages": MESSAGES,
    "messages_events": MESSAGES_EVENTS,
    "token_count": {"input_tokens": 3},
    "anthropic_error": {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "no"},
    },
    "response": RESPONSE,
    "response_top_2": {
        **RESPONSE,
        "output": [response_events(CHAT_LOGPROBS["content"])[7]["item"]],
    },
    "response_events": response_events([]),
    "response_events_top_2": response_events(CHAT_LOGPROBS["content"]),
    "response_jsonlines": response_events([]),
    "models": {"object": "list", "data": [MODEL]},
    "model": MODEL,
    "openai_error": {"error": {"message": "no", "type": "a", "param": None, "code": None}},
}
"""A good answer of each kind, as the sources show it."""

# A part of a chat may be without text; keys of a set of alternatives are the texts of tokens.
OPTIONAL = {("delta", "content"), ("top_logprobs", "a"), ("top_logprobs", "b")}


def encoded(name: str, example: Any) -> bytes:
    """An example as the body of its kind."""
    if name.startswith("response_events"):
        frames = [f"event: {record['type']}\ndata: {json.dumps(record)}\n\n" for record in example]
        return "".join([*frames, "data: [DONE]\n\n"]).encode()
    if "sse" in name or name.startswith("tgi_stream"):
        events = [json.dumps(record) for record in example]
        if not name.startswith(("lmi", "tgi")):
            events.append("[DONE]")
        return "".join(f"data: {event}\n\n" for event in events).encode()
    if name.endswith("_events"):
        events = [f"event: {one.get('type')}\ndata: {json.dumps(one)}\n\n" for one in example]
        return "".join(events).encode()
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
    assert set(EXAMPLES) | {"any"} == set(SCHEMAS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_schema_takes_its_example_and_nothing_beside_it(name: str) -> None:
    """One key more, one key less, or a value of another type, at every depth."""
    if name.startswith(("chat", "completion", "model", "response")):
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
    if name.startswith(("chat", "completion", "response")):
        pytest.importorskip("openai", reason="needs the `dev` extra")
    content = encoded(name, EXAMPLES[name])
    for cut in (content[:-1], content[: len(content) // 2]):
        with pytest.raises((ValueError, AssertionError)):
            SCHEMAS[name](cut)
    if "list" not in name and name not in {"plain_jsonlines", "tgi_tokens"}:
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


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[[dict[str, Any]], Running]]:
    """A server for each set of options."""
    running: dict[str, Running] = {}

    def serve(options: dict[str, Any]) -> Running:
        key = json.dumps(options, sort_keys=True)
        if key not in running:
            application = Application(Model("toy"))
            application.models[0].service = toy_service(ToyBackend(), **options)
            running[key] = Running(application)
        return running[key]

    yield serve
    for server in running.values():
        server.close()
        assert server.application.models[0].service is not None
        server.application.models[0].service.close()


def send(server: Running, request: dict[str, Any]) -> Any:
    """The answer to a request, sent as it was recorded."""
    url, headers = server.url + request["path"], request.get("headers", {})
    if request.get("method") == "GET":
        return http.get(url, headers=headers)
    content = request["raw"] if "raw" in request else json.dumps(request["body"])
    return http.post(url, content=content, headers={"Content-Type": "application/json", **headers})


def prompts(body: dict[str, Any]) -> list[str | list[int]]:
    """Each prompt of a body; the toy service's chat template is all contents in a row."""
    if "input" in body:
        items = body["input"]
        body = {"messages": [{"content": items}] if isinstance(items, str) else items}
    if "messages" in body:
        contents = [message["content"] or "" for message in body["messages"]]
        found = "".join(
            content if isinstance(content, str) else "".join(part["text"] for part in content)
            for content in contents
        )
    else:
        found = body.get("prompt", body.get("inputs"))
    return found if isinstance(found, list) and not isinstance(found[0], int) else [found]


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_request_gets_its_answer(
    servers: Callable[[dict[str, Any]], Running], name: str
) -> None:
    request = RECORDED[name]
    expect = request["expect"]
    if expect["schema"].startswith(("chat", "completion", "model", "response")):
        pytest.importorskip("openai", reason="needs the `dev` extra")
    response = send(servers(request.get("options", {})), request)
    assert response.status_code == expect.get("status", 200), response.text
    if content_type := expect.get("content_type", "application/json"):
        assert response.headers["content-type"].partition(";")[0] == content_type
    if request_id := request.get("headers", {}).get("x-request-id"):
        assert response.headers["x-request-id"] == request_id
    found = SCHEMAS[expect["schema"]](response.content)
    message = str(found.error.get("message", found.error.get("error", "")))
    assert expect.get("says", "") in message
    for key in ("code", "param", "error_type"):
        assert key not in expect or found.error[key] == expect[key], found.error
    for key, value in expect.get("record", {}).items():
        assert found.record[key] == value
    if "greedy" in expect:
        asked = [expect["prompt_ids"]] if "prompt_ids" in expect else prompts(request["body"])
        generated = [
            expected(TOKENIZER.encode(one) if isinstance(one, str) else one, expect["greedy"], {2})
            for one in asked
        ]
        assert found.texts == [
            (before if expect.get("with_prompt") else "") + TOKENIZER.decode(tokens)
            for before, tokens in zip(asked, generated, strict=True)
        ]
        for tokens, reason in zip(
            generated, found.finish_reasons, strict=bool(found.finish_reasons)
        ):
            assert reason in ({"eos_token", "stop"} if tokens[-1] == 2 else {"length"})
        assert not found.num_tokens or sum(found.num_tokens) == sum(map(len, generated))
    assert expect.get("texts", found.texts) == found.texts
    assert len(found.texts) == expect.get("choices", len(found.texts))
    assert expect.get("finish", found.finish_reasons) == found.finish_reasons
    assert expect.get("prompt_tokens", found.num_prompt_tokens) == found.num_prompt_tokens


ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**63, 10**400, 0.0, -0.5, 1.5, 1e308, 5e-324),
    *("", " ", "a", "<5>", "\x00", "é😀\u202e", "\ud83d", "null", "5", "-1", "NaN", "b" * 3000),
    *([], {}, [None], [[]], [5, 6], ["a", 5], [[5], "a"], {"a": None}, {"type": "text"}),
    *(float("nan"), float("inf"), [[[[[[[]]]]]]], ["a"] * 200, [7] * 500),
)
"""Values for the fields of a mutated body."""


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in `value` with each of its keys or indexes."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield value, key
        yield from places(value[key])


def mutated(pick: random.Random, body: Any, bodies: list[Any]) -> bytes:
    """A body after one to four mutations, as the bytes of a request."""
    body = copy.deepcopy(body)
    for _ in range(pick.choice((1, 1, 1, 2, 4))):
        container, key = pick.choice(list(places(body)) or [([None], 0)])
        other, name = pick.choice(list(places(pick.choice(bodies))))
        match pick.randrange(8):
            case 0:
                del container[key]
            case 1:
                container[key] = pick.choice(
                    [[container[key]], {"a": container[key]}, [container[key]] * 3]
                )
            case 2 if isinstance(container, dict) and isinstance(name, str):
                container[name] = copy.deepcopy(other[name])
            case 3:
                container[key] = copy.deepcopy(other[name])
            case 4 if isinstance(container[key], str):
                cut = pick.randrange(len(container[key]) + 1)
                container[key] = container[key][:cut] + str(pick.choice(ODD)) + container[key][cut:]
            case _:
                container[key] = copy.deepcopy(pick.choice(ODD))
    content = json.dumps(body, ensure_ascii=pick.random() < 0.5).encode(errors="surrogatepass")
    match pick.randrange(20):
        case 0:
            return content[: pick.randrange(len(content) + 1)]
        case 1:
            return content.replace(b"}", b', "stream": true, "stream": 1}', 1)
        case 2:
            cut = pick.randrange(len(content) + 1)
            return content[:cut] + pick.randbytes(3) + content[cut:]
    return content


HEADERS: tuple[dict[str, str], ...] = (
    *({"Content-Type": "application/json"},) * 5,
    {},
    {"Content-Type": "text/plain"},
    {"Content-Type": "application/json", "Accept": "text/event-stream"},
    {"X-Amzn-SageMaker-Forwarded-Api": "InvokeEndpointWithResponseStream"},
)
REFUSALS = {
    "/v1/messages": {"anthropic_error"},
    "/v1/": {"openai_error"},
    "/generate": {"tgi_error", "lmi_error"},
    "/tokenize": {"openai_error"},
    "/detokenize": {"openai_error"},
    "/invocations": {"lmi_error", "openai_error", "anthropic_error"},
    "/predictions/": {"lmi_error", "openai_error", "anthropic_error"},
    "/": {"tgi_error"},
}
"""The shapes of a refusal by the start of a path; the shape follows the body where a route takes several kinds."""


@pytest.mark.parametrize("num_bodies", [1_000, pytest.param(20_000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("options", [{}, {"bedrock_compat": True, "tgi_compat": True}])
def test_mutated_bodies_are_answered_or_refused_in_the_routes_shape(
    servers: Callable[[dict[str, Any]], Running],
    num_bodies: int,
    options: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Half of the bodies go to any route: never a 500, never a hang."""
    server = servers(options)
    posted = [request for request in RECORDED.values() if "body" in request]
    bodies = [request["body"] for request in posted]
    paths = sorted({request["path"] for request in posted})
    counts: collections.Counter[int] = collections.Counter()

    def some(seed: int) -> None:
        pick = random.Random(seed)
        with contextlib.closing(
            HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        ) as client:
            for _ in range(num_bodies // 8):
                request = pick.choice(posted)
                path = pick.choice([*[request["path"]] * len(paths), *paths])
                content = mutated(pick, request["body"], bodies)
                client.request("POST", path, content, pick.choice(HEADERS))
                response = client.getresponse()
                answer = response.read()
                counts[response.status] += 1
                assert response.status in {200, 400, 404, 413, 422}, (path, content, answer)
                if response.status != 200:
                    shapes = next(REFUSALS[start] for start in REFUSALS if path.startswith(start))
                    assert any(shown(answer, shape) for shape in shapes), (path, content, answer)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(some, range(8)))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert counts[200] > num_bodies // 50
    assert counts[400] > num_bodies // 50
    assert http.post(server.url + "/invocations", json={"inputs": "<5>"}).status_code == 200


def shown(content: bytes, schema: str) -> bool:
    """Return whether a body has this shape."""
    try:
        SCHEMAS[schema](content)
    except (ValueError, AssertionError):
        return False
    return True
