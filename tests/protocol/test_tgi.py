"""TGI's routes, and vLLM's plain server, which shares one of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from djl_python_neuronx.engine.detokenizer import Delta, Token
from djl_python_neuronx.errors import (
    BackendUnavailableError,
    BodyTooLargeError,
    DeviceMemoryError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
    ServingError,
    StepError,
    UnsupportedParameterError,
)
from djl_python_neuronx.protocol import answer_error
from djl_python_neuronx.protocol.base import ParsedRequest
from djl_python_neuronx.types import FinishReason
from tests.protocol.parsing import parse

TOP = Token(2, "<eos>", -0.5, True)
TOKEN = {"id": 7, "text": "one", "logprob": -0.5, "special": False}
EOS = {"id": 2, "text": "<eos>", "logprob": -1.0, "special": True}
STREAMED_EOS = {**EOS, "text": ""}


def generate(path: str = "/generate", stream: bool = False, **parameters: Any) -> ParsedRequest:
    body = {"inputs": "<5>", "parameters": parameters, **({"stream": True} if stream else {})}
    return parse(body, path=path)


def plain(**body: Any) -> ParsedRequest:
    return parse({"prompt": "<5>", **body}, path="/generate")


def finish(parsed: ParsedRequest) -> list[bytes]:
    """The events for the tokens "one" and eos of each sequence."""
    return [
        parsed.formatter.feed(delta)
        for request in parsed.requests
        for delta in (
            Delta(
                request.request_id, "one", (Token(7, "one", -0.5, False, (TOP,)),), None, None, 2, 1
            ),
            Delta(
                request.request_id,
                "",
                (Token(2, "", -1.0, True, (TOP,)),),
                FinishReason.EOS,
                None,
                2,
                2,
            ),
        )
    ]


def test_a_missing_parameter_is_tgis_default() -> None:
    request = generate().request
    assert (request.max_new_tokens, request.sampling.temperature) == (None, 0)
    assert request.protocol == "tgi"
    assert generate(max_new_tokens=3).request.max_new_tokens == 3


@pytest.mark.parametrize(
    ("path", "stream", "streams"),
    [
        ("/", False, False),
        ("/", True, True),
        ("/generate", True, False),
        ("/generate_stream", False, True),
    ],
)
def test_the_route_decides_whether_it_streams(path: str, stream: bool, streams: bool) -> None:
    parsed = generate(path, stream)
    kind = "text/event-stream" if streams else "application/json"
    assert (parsed.stream, parsed.formatter.content_type) == (streams, kind)
    if not streams:
        whole = {"generated_text": "one"}
        assert json.loads(finish(parsed)[-1]) == ([whole] if path == "/" else whole)


@pytest.mark.parametrize("option", ["/generate", "tgi_compat"])
def test_details(option: str) -> None:
    parsed = (
        generate(details=True, top_n_tokens=1, seed=3, return_full_text=True)
        if option == "/generate"
        else parse(
            {
                "inputs": "<5>",
                "parameters": {"top_n_tokens": 1, "seed": 3, "return_full_text": True},
            },
            tgi_compat=True,
        )
    )
    top = {"id": 2, "text": "<eos>", "logprob": -0.5, "special": True}
    whole = {
        "generated_text": "<5>one",
        "details": {
            "finish_reason": "eos_token",
            "generated_tokens": 2,
            "seed": 3,
            "prefill": [],
            "tokens": [TOKEN, EOS],
            "top_tokens": [[top], [top]],
        },
    }
    answer = json.loads(finish(parsed)[-1])
    assert answer == (whole if option == "/generate" else [whole])


def test_the_tokens_of_the_prompt_bring_the_details() -> None:
    parsed = generate(decoder_input_details=True)
    assert parsed.request.scores_prompt == 0
    scored = Delta("r", "", (), prompt=(Token(5, "<5>", -0.25, False, rank=1),))
    assert not parsed.formatter.feed(scored)
    details = json.loads(finish(parsed)[-1])["details"]
    assert details["prefill"] == [
        {"id": 1, "text": "", "logprob": None},
        {"id": 5, "text": "<5>", "logprob": -0.25},
    ]


def test_tgi_compatibility_gives_no_details_that_are_not_wanted_or_not_available() -> None:
    for given, has_logprobs in (({"details": False}, True), ({}, False)):
        body = {"inputs": "<5>", "parameters": given}
        parsed = parse(body, tgi_compat=True, has_logprobs=has_logprobs)
        assert not parsed.request.logprobs
        assert json.loads(finish(parsed)[-1]) == [{"generated_text": "one"}]
    streamed = parse({"inputs": "<5>", "stream": True}, tgi_compat=True)
    assert streamed.formatter.content_type == "text/event-stream"
    several = parse({"inputs": ["<5>", "<6>"]}, tgi_compat=True)
    assert len(json.loads(finish(several)[-1])) == 2


@pytest.mark.parametrize("details", [False, True])
def test_events(details: bool) -> None:
    events = finish(generate("/generate_stream", details=details, top_n_tokens=1, seed=3))
    assert all(
        event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2
        for event in events
    )
    first, last = (json.loads(event[6:]) for event in events)
    top = [{"id": 2, "text": "<eos>", "logprob": -0.5, "special": True}]
    none = {"generated_text": None, "details": None}
    assert first == {"index": 1, "token": TOKEN, "top_tokens": top, **none}
    end = {"finish_reason": "eos_token", "seed": 3, "generated_tokens": 2, "input_length": 2}
    assert last == {
        "index": 2,
        "token": STREAMED_EOS,
        "top_tokens": top,
        "generated_text": "one",
        "details": end if details else None,
    }


def test_a_deadline_without_a_token_has_an_empty_one() -> None:
    parsed = generate("/generate_stream", details=True)
    parsed.formatter.feed(Delta("r", "one", (Token(7, "one", -0.5, False),), None, None, 2, 1))
    last = parsed.formatter.feed(Delta("r", "x", (), FinishReason.TIME, None, 2, 1))
    event = json.loads(last[6:])
    assert event["token"] == {"id": 0, "text": "x", "logprob": 0.0, "special": True}
    assert event["generated_text"] == "onex"
    assert event["details"]["finish_reason"] == "length"


def test_an_error_in_a_stream_is_an_event() -> None:
    parsed = generate("/generate_stream")
    error = StepError("the device call failed")
    last = parsed.formatter.feed(Delta("r", "", (), FinishReason.ERROR, error))
    assert json.loads(last[6:]) == {"error": "the device call failed", "error_type": "generation"}


def test_the_best_sequence_has_the_most_likely_tokens() -> None:
    parsed = generate(best_of=2, do_sample=True, details=True)
    assert len(parsed.requests) == 2
    short, long = parsed.requests
    delta = Delta(
        short.request_id, "s", (Token(7, "s", -1.0, False),), FinishReason.EOS, None, 2, 1
    )
    parsed.formatter.feed(delta)
    tokens = tuple(Token(8, "l", -0.6, False) for _ in range(4))
    end = Delta(long.request_id, "llll", tokens, FinishReason.LENGTH, None, 2, 4)
    body = json.loads(parsed.formatter.feed(end))
    assert body["generated_text"] == "llll"
    [other] = body["details"]["best_of_sequences"]
    assert (other["generated_text"], other["finish_reason"], other["seed"]) == (
        "s",
        "eos_token",
        None,
    )
    assert "details" not in json.loads(finish(generate(best_of=2, do_sample=True))[-1])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "inputs is missing"),
        ({"inputs": ""}, "inputs is an empty string"),
        ({"inputs": ["<5>"]}, "inputs is a list"),
        ({"inputs": "<5>", "parameters": {"temperature": 0}}, "temperature is 0"),
        ({"inputs": "<5>", "parameters": {"typical_p": 1.5}}, "'typical_p' is 1.5; expected a"),
        ({"inputs": "<5>", "adapters": "a"}, "adapters names 'a', which is no adapter"),
    ],
)
def test_bad_requests(body: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        parse(body, path="/")
    assert caught.value.protocol == "tgi"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("no"), 422, "validation"),
        (UnsupportedParameterError("no"), 422, "validation"),
        (PromptTooLongError("no"), 422, "validation"),
        (BodyTooLargeError("no"), 422, "validation"),
        (QueueFullError("no"), 429, "overloaded"),
        (RequestTimeoutError("no"), 408, "overloaded"),
        (BackendUnavailableError("no"), 503, "overloaded"),
        (StepError("no"), 424, "generation"),
        (DeviceMemoryError("no"), 424, "generation"),
        (ServingError("no"), 500, "incomplete_generation"),
    ],
)
def test_errors(error: ServingError, status: int, kind: str) -> None:
    found, content = answer_error(error, path="/generate")
    assert (found, json.loads(content)) == (status, {"error": "no", "error_type": kind})


def test_a_plain_prompt() -> None:
    request = plain().request
    assert (request.max_new_tokens, request.sampling.temperature) == (16, 1.0)
    assert (request.protocol, request.prompt_ids) == ("plain", [1, 5])
    parsed = plain(n=2, max_tokens=3, temperature=0.5, stop="x")
    assert [one.max_new_tokens for one in parsed.requests] == [3, 3]
    assert parsed.request.stop_strings == ("x",)
    assert json.loads(finish(parsed)[-1]) == {"text": ["<5>one", "<5>one"]}


def test_plain_sequences_are_not_ranked_so_that_a_device_may_sample_them() -> None:
    requests = plain(n=2, temperature=0.5).requests
    assert [(one.logprobs, one.top_logprobs) for one in requests] == [(False, 0)] * 2
    assert generate(n=2, temperature=0.5).request.logprobs


def test_a_plain_stream_repeats_the_text() -> None:
    parsed = plain(stream=True)
    assert parsed.formatter.content_type == "application/jsonlines"
    assert finish(parsed) == [b'{"text":["<5>one"]}\n'] * 2
    several = finish(plain(stream=True, n=2, temperature=1.0))
    assert several == [b'{"text":["<5>one","<5>"]}\n'] * 2 + [b'{"text":["<5>one","<5>one"]}\n'] * 2
    error = Delta("r", "", (), FinishReason.ERROR, StepError("it failed"))
    last = json.loads(plain(stream=True).formatter.feed(error))
    assert last == {"code": 424, "error": "it failed", "type": "step_error"}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": 5}, "'prompt' is 5; expected a non-empty string"),
        ({"use_beam_search": True}, "'use_beam_search' is not supported"),
        ({"max_token": 3}, "unknown parameter 'max_token'; did you mean 'max_tokens'"),
    ],
)
def test_bad_plain_prompts(body: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        plain(**body)
    assert caught.value.protocol == "plain"


def test_generate_needs_a_prompt_under_one_of_its_names() -> None:
    with pytest.raises(
        RequestError, match=r"no known protocol: it has 'text'; expected tgi:.*plain"
    ):
        parse({"text": "<5>"}, path="/generate")


def test_elsewhere_a_body_is_not_of_these_protocols() -> None:
    assert parse({"inputs": "<5>"}).request.protocol == "lmi"
    with pytest.raises(RequestError, match="expected lmi") as caught:
        parse({"text": "<5>"})
    assert not any(f"{name}: " in str(caught.value) for name in ("tgi", "plain", "tokenize"))
