"""Plain servers of vLLM and Neuron's examples: ``POST /generate {"prompt": "…", "max_tokens": 16}``.

The answer is ``{"text": ["prompt and text"]}``, a stream one such line after each step. Source: vllm 0.11,
vllm/entrypoints/api_server.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Union

from typing_extensions import TypedDict

from djl_python_neuronx.protocol.answers import Answer, EndEvent, Event, Shape, TextEvent
from djl_python_neuronx.protocol.base import (
    ErrorFields,
    ParseContext,
    ParsedRequest,
    WireProtocol,
)
from djl_python_neuronx.protocol.parameters import (
    Count,
    Flag,
    GenerationParameters,
    Text,
    validated,
)
from djl_python_neuronx.protocol.text_generation import Parameters, parsed_request


class PlainRequest(GenerationParameters):
    """A body."""

    model: str | None = None
    prompt: Text
    max_tokens: Count = 16
    n: Count = 1
    stream: Flag = False


class PlainAnswer(TypedDict):
    """The text of each sequence, with the prompt."""

    text: list[str]


class PlainProtocol(WireProtocol):
    """`/generate` with a prompt."""

    name = "plain"
    outline = '{"prompt": "…", "max_tokens": 16}'
    key = "prompt"
    paths = ("/generate",)
    anywhere = False
    requests: Mapping[str, Any] = {"application/json": PlainRequest}
    answers: Mapping[str, Any] = {
        "application/json": PlainAnswer,
        "application/jsonlines": Union[PlainAnswer, ErrorFields],
    }

    def parse(self, payload: Mapping[str, Any], context: ParseContext) -> ParsedRequest:
        """See `WireProtocol.parse`."""
        body = validated(PlainRequest, payload, context.options)
        given = Parameters.of(
            body,
            n=body.n,
            max_new_tokens=body.max_tokens,
            return_full_text=True,
            # With device-only sampling, a default must not cause a 400.
            **({"temperature": 1.0} if context.has_logprobs else {}),
        )
        stream = "jsonlines" if body.stream else None
        return parsed_request(
            [body.prompt],
            given,
            context,
            PlainShape(),
            self.name,
            stream=stream,
            most_name="max_tokens",
        )


class PlainShape(Shape):
    """The texts of all sequences, each with the prompt; a stream repeats the whole texts so far."""

    ranks = False

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """See `Shape`."""
        return {"text": [answer.text for answer in answers]}

    def write(self, answer: Answer, event: Event, parts: list[Any]) -> None:  # noqa: ARG002
        """See `Shape`."""
        if isinstance(event, TextEvent):
            parts.append(self.whole(self.groups[0]))
        elif isinstance(event, EndEvent) and event.error is not None:
            parts[:] = [self.error(event.error)]
