"""Bedrock's shapes, by option alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from djl_python_neuronx.engine.detokenizer import Delta, Token
from djl_python_neuronx.errors import RequestError, StepError
from djl_python_neuronx.protocol.base import ParsedRequest
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.types import FinishReason
from tests.protocol.parsing import parse

STREAMS = {"x-amzn-sagemaker-forwarded-api": "InvokeEndpointWithResponseStream"}


def bedrock(body: dict[str, Any] | None = None, **context: Any) -> ParsedRequest:
    return parse({"prompt": "<5>", **(body or {})}, **{"bedrock_compat": True, **context})


def deltas() -> list[Delta]:
    return [
        Delta("r", "one", (Token(7, "one", None, False),), None, None, 2, 1),
        Delta("r", "", (Token(2, "", None, True),), FinishReason.EOS, None, 2, 2),
    ]


def lines(parsed: ParsedRequest) -> list[Any]:
    return [json.loads(parsed.formatter.feed(delta)) for delta in deltas()]


def test_defaults_are_bedrocks() -> None:
    request = bedrock().request
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, request.max_new_tokens) == (0.5, 0.9, 512)
    assert (request.protocol, request.prompt_ids) == ("bedrock", [1, 5])
    given = bedrock({"temperature": 0, "top_p": 0.3, "max_gen_len": 4, "top_k": 3}).request
    assert (given.sampling.temperature, given.max_new_tokens) == (0, 4)


def test_a_device_that_samples_is_greedy_by_default() -> None:
    assert bedrock(has_logprobs=False).request.sampling == SamplingParams()
    plain = parse({"prompt": "<5>"}, path="/generate", has_logprobs=False)
    assert plain.request.sampling == SamplingParams()


@pytest.mark.parametrize("context", [{}, {"output_formatter": "3p", "bedrock_compat": False}])
def test_the_whole_answer_begins_with_the_prompt(context: dict[str, Any]) -> None:
    formatter = bedrock(**context).formatter
    first, last = (formatter.feed(delta) for delta in deltas())
    assert first == b""
    answer = json.loads(last)
    assert answer == {
        "body": {
            "generation": "<5>one",
            "prompt_token_count": 2,
            "generation_token_count": 2,
            "stop_reason": "eos_token",
        },
        "metering": {"inputTokenCount": 2, "outputTokenCount": 2},
        "content_type": "application/json",
    }


@pytest.mark.parametrize(
    "context", [{"headers": STREAMS}, {"output_formatter": "3p_stream", "bedrock_compat": False}]
)
def test_lines(context: dict[str, Any]) -> None:
    parsed = bedrock(**context)
    assert (parsed.stream, parsed.formatter.content_type) == (True, "application/jsonlines")
    first, last = lines(parsed)
    assert first == {
        "body": {
            "generation": "one",
            "prompt_token_count": 2,
            "generation_token_count": 1,
            "stop_reason": None,
        },
        "metering": {"inputTokenCount": 2, "outputTokenCount": 1},
        "content_type": "application/jsonlines",
    }
    assert last == {
        "body": {
            "generation": "",
            "prompt_token_count": None,
            "generation_token_count": 2,
            "stop_reason": "eos_token",
        },
        "metering": {"outputTokenCount": 2},
        "content_type": "application/jsonlines",
    }


def test_an_error_ends_the_stream() -> None:
    parsed = bedrock(headers=STREAMS)
    parsed.formatter.feed(deltas()[0])
    error = Delta("r", "", (), FinishReason.ERROR, StepError("it failed"), 2, 1)
    last = json.loads(parsed.formatter.feed(error))
    assert (last["body"]["stop_reason"], last["body"]["generation_token_count"]) == ("error", 1)
    assert last["error"] == {"error_code": 424, "error_msg": "it failed"}


@pytest.mark.parametrize("formatter", ["3p", "3p_stream"])
def test_a_3p_formatter_answers_lmi_requests_too(formatter: str) -> None:
    parsed = parse({"inputs": "<5>"}, output_formatter=formatter)
    assert parsed.request.max_new_tokens == 30
    answer = [parsed.formatter.feed(delta) for delta in deltas()][-1]
    assert json.loads(answer)["body"]["generation_token_count"] == 2


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"max_gen_len": "five"}, "'max_gen_len' is a string; expected an integer"),
        ({"prompt": ""}, "'prompt' is an empty string"),
        ({"images": ["a"]}, "unknown parameter 'images'"),
    ],
)
def test_bad_requests(body: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        bedrock(body)


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("body", [b"", b"{}", b'{"image": "a"}'])
def test_errors_have_its_outline_only_where_it_is_allowed(body: bytes, allowed: bool) -> None:
    with pytest.raises(RequestError, match="expected") as caught:
        parse(body, bedrock_compat=allowed)
    assert ("max_gen_len" in str(caught.value)) == allowed
