"""LMI: ``{"inputs": "…", "parameters": {…}, "stream": false}``.

The answer is ``{"generated_text": "…"}``, one line of JSON per token (jsonlines), or the same lines as server-sent
events. The answer to a list of prompts is the list of their answers. Source: djl-serving 0.31 LMI input and output
schema. Where the old engine differed from its documentation, this follows the documentation (docs/protocols.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Union

from annotated_types import Len
from typing_extensions import NotRequired, TypedDict

from djl_python_neuronx.engine.detokenizer import Token
from djl_python_neuronx.errors import (
    RequestError,
    UnsupportedParameterError,
    json_type,
)
from djl_python_neuronx.protocol.answers import Answer, EndEvent, Event, Shape, TextEvent
from djl_python_neuronx.protocol.base import (
    MAX_SEQUENCES,
    ParseContext,
    ParsedRequest,
    WireProtocol,
    error_fields,
)
from djl_python_neuronx.protocol.bedrock import BedrockShape
from djl_python_neuronx.protocol.parameters import Text
from djl_python_neuronx.protocol.text_generation import (
    Body,
    DetailedShape,
    Details,
    GeneratedText,
    TokenFields,
    fields,
    parsed_request,
)
from djl_python_neuronx.protocol.tgi import TgiShape


class LmiBody(Body):
    """A request of LMI, for one prompt or several."""

    inputs: Union[Text, Annotated[list[Text], Len(1, MAX_SEQUENCES)]]  # type: ignore[assignment]
    adapters: Union[str, list[Union[str, None]], None] = None
    """The name of an adapter; of a list of prompts also a list with one for each, "" for the model itself."""


class Line(TypedDict):
    """A part of a stream; the last one has the text and details, and those of an error if it ended by one."""

    token: NotRequired[TokenFields]
    generated_text: NotRequired[str]
    details: NotRequired[Details]
    code: NotRequired[int]
    error: NotRequired[str]
    type: NotRequired[str]


class LmiProtocol(WireProtocol):
    """LMI: every route that is no other protocol's, and DJL Serving."""

    name = "lmi"
    outline = '{"inputs": "…", "parameters": {…}}'
    key = "inputs"
    requests: Mapping[str, Any] = {"application/json": LmiBody, "text/plain": Text}
    answers: Mapping[str, Any] = {
        "application/json": Union[GeneratedText, list[GeneratedText]],
        "application/jsonlines": Line,
        "text/event-stream": Line,
    }

    def detect(self, payload: Mapping[str, Any], context: ParseContext) -> bool:
        """True if the payload has `inputs` or `parameters`."""
        return super().detect(payload, context) or "parameters" in payload

    def parse(self, payload: Mapping[str, Any], context: ParseContext) -> ParsedRequest:
        """See `WireProtocol.parse`."""
        inputs, given = fields(payload, context.options, refused=("cached_prompt",))
        prompts = _prompts(inputs)
        output = _output_format(given.stream, context)
        streams = output not in {"json", "3p"}
        if streams and isinstance(inputs, list):
            msg = (
                "inputs is a list, and a list is not answered by a stream; send one request for each prompt, or leave "
                f"out {'stream' if given.stream else 'option.output_formatter'}"
            )
            raise UnsupportedParameterError(msg)
        compat = context.options.tgi_compat
        if compat and "details" not in given.model_fields_set:
            given.details = context.has_logprobs
        if not compat and given.num_sequences > 1:
            given.details = True
        shape: Shape = (TgiShape if compat else LmiShape)(given, context)
        if output.startswith("3p"):
            shape = BedrockShape()
        stream = "jsonlines" if output == "3p_stream" else output
        return parsed_request(
            prompts,
            given,
            context,
            shape,
            self.name,
            stream=stream if streams else None,
            listed=isinstance(inputs, list) or isinstance(shape, TgiShape),
        )


def _prompts(inputs: object) -> list[str]:
    prompts: list[Any] = inputs if isinstance(inputs, list) else [inputs]
    if not 1 <= len(prompts) <= MAX_SEQUENCES:
        msg = f"inputs has {len(prompts)} prompts; expected 1 to {MAX_SEQUENCES}"
        raise RequestError(msg, param="inputs")
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str) or not prompt:
            name = f"inputs[{i}]" if isinstance(inputs, list) else "inputs"
            msg = f"{name} is {json_type(prompt)}; expected inputs to be a prompt or a list of prompts"
            raise RequestError(msg, param="inputs")
    return prompts


class LmiShape(DetailedShape):
    """The last line of a stream has the text, and the details without their tokens."""

    logprob_name = "log_prob"

    def token(self, token: Token) -> dict[str, Any]:
        """See `DetailedShape`."""
        fields: dict[str, Any] = {"id": token.id, "text": token.text, "log_prob": token.logprob}
        if token.special:
            fields["special_token"] = True
        return fields

    def prompt_details(self, prompt: str) -> dict[str, Any]:
        """See `Shape`."""
        return {"inputs": prompt}

    def write(self, answer: Answer, event: Event, parts: list[Any]) -> None:
        """See `Shape`."""
        if isinstance(event, TextEvent):
            parts += [{"token": self.token(token)} for token in event.tokens]
        elif isinstance(event, EndEvent):
            details = self.details(answer)
            del details["tokens"]
            last = parts.pop() if parts else {}
            failure = {} if event.error is None else error_fields(event.error)
            parts.append({**last, "generated_text": answer.text, "details": details, **failure})


def _output_format(stream: bool, context: ParseContext) -> str:
    """json, jsonlines, sse, 3p or 3p_stream: by `option.output_formatter`, unless it is for chats; by the request."""
    name = context.options.output_formatter
    if name is not None and not name.endswith("chat"):
        return name
    if not stream:
        return "json"
    wants_events = "text/event-stream" in context.headers.get("accept", "")
    return "sse" if wants_events or context.options.tgi_compat else "jsonlines"
