"""TGI's routes, and the shape of its answers.

Source: text-generation-inference db931fcf, router/src/lib.rs, server.rs, validation.rs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Union

from typing_extensions import NotRequired, TypedDict

from djl_python_neuronx.backends.base import ModelSpec
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.engine.detokenizer import Token
from djl_python_neuronx.engine.limits import longest_prompt
from djl_python_neuronx.errors import QueueFullError, RequestError, ServingError, json_type
from djl_python_neuronx.protocol.answers import Answer, EndEvent, Event, TextEvent
from djl_python_neuronx.protocol.base import (
    MAX_SEQUENCES,
    ParseContext,
    ParsedRequest,
    WireProtocol,
)
from djl_python_neuronx.protocol.parameters import MAX_STOP_STRINGS
from djl_python_neuronx.protocol.text_generation import (
    Body,
    DetailedShape,
    Details,
    GeneratedText,
    TokenFields,
    fields,
    parsed_request,
)
from djl_python_neuronx.types import FinishReason


class StreamPart(TypedDict):
    """A part of a stream."""

    index: int
    token: TokenFields
    top_tokens: NotRequired[list[TokenFields]]
    generated_text: str | None
    details: Details | None


class Failure(TypedDict):
    """An error."""

    error: str
    error_type: str


_ERRORS = {
    **dict.fromkeys((400, 413), (422, "validation")),
    **dict.fromkeys((424, 507), (424, "generation")),
    500: (500, "incomplete_generation"),
}
"""Our status to TGI's, and its name for the kind of error."""


def answer_error(error: ServingError) -> tuple[int, dict[str, Any]]:
    """See `WireProtocol`."""
    status, kind = _ERRORS.get(error.status, (error.status, "validation"))
    if status in {408, 499, 503}:
        kind = "overloaded"
    if isinstance(error, QueueFullError):
        status = 429
    return status, {"error": str(error), "error_type": kind}


def info(model: str, spec: ModelSpec, options: ServingOptions, version: str) -> dict[str, Any]:
    """The facts that TGI's `/info` has of a loaded model."""
    return {
        "model_id": model,
        "model_sha": None,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": spec.num_slots + options.max_waiting,
        "max_best_of": MAX_SEQUENCES,
        "max_stop_sequences": MAX_STOP_STRINGS,
        "max_input_tokens": longest_prompt(spec),
        "max_total_tokens": spec.max_model_len,
        "validation_workers": 1,
        "max_client_batch_size": 1,
        "router": "djl-neuronx",
        "version": version,
        "sha": None,
        "docker_label": None,
    }


class TgiProtocol(WireProtocol):
    """TGI's routes. The answer of `/` is a list of one, or a stream if the request has `stream`."""

    name = "tgi"
    outline = '{"inputs": "…", "parameters": {…}}'
    key = "inputs"
    paths = ("/", "/generate", "/generate_stream")
    anywhere = False
    names_model = False
    requests: Mapping[str, Any] = {"application/json": Body}
    answers: Mapping[str, Any] = {
        "application/json": Union[GeneratedText, list[GeneratedText]],
        "text/event-stream": Union[StreamPart, Failure],
    }
    error = Failure

    answer_error = staticmethod(answer_error)

    def parse(self, payload: Mapping[str, Any], context: ParseContext) -> ParsedRequest:
        """See `WireProtocol.parse`."""
        inputs, given = fields(payload, context.options)
        if not isinstance(inputs, str) or not inputs:
            msg = f"inputs is {json_type(inputs)}; expected a prompt"
            raise RequestError(msg, param="inputs")
        if given.temperature == 0:
            msg = "temperature is 0; expected a number above 0, or none for greedy"
            raise RequestError(msg, param="temperature")
        streams = given.stream if context.path == "/" else context.path == "/generate_stream"
        given.details = given.details or given.decoder_input_details
        if "max_new_tokens" not in given.model_fields_set:
            given.max_new_tokens = None
        return parsed_request(
            [inputs],
            given,
            context,
            TgiShape(given, context),
            self.name,
            stream="sse" if streams else None,
            listed=context.path == "/",
        )


class TgiShape(DetailedShape):
    """The last event of a stream has the text, and the details if the client wants them."""

    logprob_name = "logprob"

    def error(self, error: ServingError) -> dict[str, Any]:
        """See `Shape`."""
        return answer_error(error)[1]

    def token(self, token: Token) -> dict[str, Any]:
        """See `DetailedShape`."""
        return {
            "id": token.id,
            "text": token.text,
            "logprob": token.logprob,
            "special": token.special,
        }

    def score(self, answer: Answer) -> float:
        """See `DetailedShape`. The mean over the tokens."""
        return answer.mean_logprob

    def facts(self, answer: Answer) -> dict[str, Any]:
        """See `DetailedShape`. A special token has its name there; in a stream it is no text of the answer."""
        facts = {"prefill": [], **super().facts(answer), **_end(answer)}
        for token in facts["tokens"]:
            if token["special"] and not token["text"]:
                token["text"] = self._tokenizer.token_bytes(token["id"]).decode(errors="replace")
        return facts

    def write(self, answer: Answer, event: Event, parts: list[Any]) -> None:
        """See `Shape`. A text without a token has an empty special one, because every part has a token."""
        if isinstance(event, TextEvent):
            tokens = event.tokens or (Token(0, event.text, 0.0, special=True),)
            for index, token in enumerate(tokens, answer.num_tokens - len(event.tokens) + 1):
                part: dict[str, Any] = {"index": index, "token": self.token(token)}
                if token.top:
                    part["top_tokens"] = [self.token(other) for other in token.top]
                parts.append({**part, "generated_text": None, "details": None})
        elif isinstance(event, EndEvent):
            parts[-1]["generated_text"] = answer.text
            if self._given.details:
                parts[-1]["details"] = {
                    **_end(answer),
                    "generated_tokens": answer.num_tokens,
                    "input_length": len(answer.request.prompt_ids),
                }
            if event.error is not None:
                parts[:] = [self.error(event.error)]


def _end(answer: Answer) -> dict[str, Any]:
    """The end of a sequence, for which TGI has no word if it is a deadline."""
    reason = answer.finish_reason
    return {
        "finish_reason": FinishReason.LENGTH if reason is FinishReason.TIME else reason,
        "seed": answer.request.sampling.seed,
    }
