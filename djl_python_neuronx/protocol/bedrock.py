"""Bedrock's models ("3p"): ``{"prompt": "…", "temperature": 0.5, "top_p": 0.9, "max_gen_len": 512}``.

Only with `option.bedrock_compat` or a 3p formatter: a body with `prompt` is OpenAI's otherwise. Source: djl-serving
0.36, djl_python/three_p/three_p_utils.py, output_formatter.py and tests/test_rolling_batch.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import NotRequired, TypedDict

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.protocol.answers import Answer, EndEvent, Event, Shape, TextEvent
from djl_python_neuronx.protocol.base import (
    ParseContext,
    ParsedRequest,
    WireProtocol,
)
from djl_python_neuronx.protocol.parameters import Count, GenerationParameters, Text, validated
from djl_python_neuronx.protocol.text_generation import Parameters, parsed_request

_FORWARDED = "x-amzn-sagemaker-forwarded-api"
_STREAMS = "invokeendpointwithresponsestream"


class BedrockRequest(GenerationParameters):
    """A body."""

    model: str | None = None
    prompt: Text
    max_gen_len: Count = 512


class BedrockAnswer(TypedDict):
    """A whole answer, or a part of a stream."""

    body: dict[str, Any]
    metering: dict[str, int]
    content_type: str
    error: NotRequired[dict[str, Any]]


class BedrockProtocol(WireProtocol):
    """Bodies of Bedrock on any route, if an option allows them."""

    name = "bedrock"
    outline = '{"prompt": "…", "max_gen_len": 512}'
    key = "prompt"
    requests: Mapping[str, Any] = {"application/json": BedrockRequest}
    answers: Mapping[str, Any] = {
        "application/json": BedrockAnswer,
        "application/jsonlines": BedrockAnswer,
    }

    def is_allowed(self, options: ServingOptions) -> bool:
        """True with `option.bedrock_compat` or a 3p formatter."""
        return options.bedrock_compat or (options.output_formatter or "").startswith("3p")

    def parse(self, payload: Mapping[str, Any], context: ParseContext) -> ParsedRequest:
        """See `WireProtocol.parse`."""
        body = validated(BedrockRequest, payload, context.options)
        given = Parameters.of(
            body,
            # With device-only sampling, defaults must not cause a 400.
            **({"temperature": 0.5, "top_p": 0.9} if context.has_logprobs else {}),
            return_full_text=True,
            max_new_tokens=body.max_gen_len,
        )
        streams = context.options.output_formatter == "3p_stream"
        streams = streams or context.headers.get(_FORWARDED, "").lower() == _STREAMS
        stream = "jsonlines" if streams else None
        return parsed_request(
            [body.prompt],
            given,
            context,
            BedrockShape(),
            self.name,
            stream=stream,
            most_name="max_gen_len",
        )


class BedrockShape(Shape):
    """The text of a whole answer begins with the prompt; the first line of a stream has its length."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """See `Shape`."""
        best = max(answers, key=lambda answer: answer.log_probability)
        whole = _part(best, best.text, best.num_tokens, first=True, kind="application/json")
        whole["body"]["stop_reason"] = best.finish_reason
        return whole

    def write(self, answer: Answer, event: Event, parts: list[Any]) -> None:
        """See `Shape`."""
        if isinstance(event, TextEvent):
            texts = [token.text for token in event.tokens] or [event.text]
            for count, text in enumerate(texts, answer.num_tokens - len(texts) + 1):
                parts.append(_part(answer, text, count, first=count <= 1))
        elif isinstance(event, EndEvent):
            parts[-1]["body"]["stop_reason"] = event.finish_reason
            if (error := event.error) is not None:
                parts[-1]["error"] = {"error_code": error.status, "error_msg": str(error)}


def _part(
    answer: Answer,
    text: str,
    count: int,
    *,
    first: bool,
    kind: str = "application/jsonlines",
) -> dict[str, Any]:
    """A whole answer, or a line of a stream, after `count` tokens."""
    num_prompt_tokens = len(answer.request.prompt_ids)
    metering = {"outputTokenCount": count}
    if first:
        metering["inputTokenCount"] = num_prompt_tokens
    body = {
        "generation": text,
        "prompt_token_count": num_prompt_tokens if first else None,
        "generation_token_count": count,
        "stop_reason": None,
    }
    return {"body": body, "metering": metering, "content_type": kind}
