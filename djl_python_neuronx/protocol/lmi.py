"""LMI: ``{"inputs": "…", "parameters": {…}, "stream": false}``.

The answer is ``{"generated_text": "…"}``, one line of JSON per token (jsonlines), or the same lines as server-sent
events. The answer to a list of prompts is the list of their answers. Source: djl-serving 0.31 LMI input and output
schema. Where the old engine differed from its documentation, this follows the documentation (docs/protocols.md).
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Annotated, Any

import orjson
from annotated_types import Len, MinLen
from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from djl_python_neuronx.engine.detokenizer import Delta, Token
from djl_python_neuronx.errors import (
    RequestError,
    ServingError,
    UnsupportedParameterError,
    did_you_mean,
    json_type,
)
from djl_python_neuronx.protocol.base import (
    MAX_SEQUENCES,
    ErrorFields,
    Formatter,
    ListFormatter,
    ParseContext,
    ParsedRequest,
    error_fields,
)
from djl_python_neuronx.protocol.parameters import (
    Count,
    Flag,
    GenerationParameters,
    Only,
    RequestModel,
    Strings,
    sampling_params,
    stop_strings,
    validated,
)
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.types import FinishReason, GenerationRequest

_FIELDS = ("inputs", "parameters", "stream")


class Parameters(GenerationParameters):
    """The parameters of LMI and TGI."""

    details: Flag = False
    do_sample: Flag = False
    ignore_eos_token: Flag = False
    max_new_tokens: Count = 30
    return_full_text: Flag = False
    stop_sequences: Strings = Field(default=[])
    stream: Flag = False
    decoder_input_details: Annotated[Any, Only(neutral=False)] = None
    top_n_tokens: Annotated[Any, Only(0)] = None
    best_of: Annotated[Any, Only(1)] = None
    n: Annotated[Any, Only(1)] = None
    num_beams: Annotated[Any, Only(1)] = None
    num_return_sequences: Annotated[Any, Only(1)] = None
    early_stopping: Annotated[Any, Only(neutral=False)] = None
    min_length: Annotated[Any, Only(1)] = None
    bad_sequences: Annotated[Any, Only(None)] = None
    logprobs: Annotated[Any, Only(None)] = None
    prompt_logprobs: Annotated[Any, Only(None)] = None
    watermark: Annotated[Any, Only(neutral=False)] = None
    truncate: Annotated[int | None, Field(ge=1, description="an integer of at least 1")] = None
    grammar: Annotated[Any, Only(None)] = None
    adapter_id: Annotated[Any, Only(None)] = None


_Text = Annotated[str, MinLen(1)]


class Body(RequestModel):
    """A request."""

    inputs: _Text | Annotated[list[_Text], Len(1, MAX_SEQUENCES)]
    parameters: Parameters = Parameters()
    stream: Flag = False


class TokenFields(TypedDict):
    """A token of an answer."""

    id: int
    text: str
    log_prob: float | None
    special_token: NotRequired[bool]


class Details(TypedDict):
    """How an answer ended; `tokens` only beside a whole one."""

    finish_reason: FinishReason
    generated_tokens: int
    inputs: str
    tokens: NotRequired[list[TokenFields]]


class Answer(TypedDict):
    """A whole answer."""

    generated_text: str
    details: NotRequired[Details]


class Line(TypedDict):
    """A part of a stream; the last one has the text and details, and those of an error if it ended by one."""

    token: NotRequired[TokenFields]
    generated_text: NotRequired[str]
    details: NotRequired[Details]
    code: NotRequired[int]
    error: NotRequired[str]
    type: NotRequired[str]


class LmiProtocol:
    """See `WireProtocol`."""

    name = "lmi"
    shape = '{"inputs": "…", "parameters": {…}}'
    paths: tuple[str, ...] = ()
    requests: Mapping[str, Any] = {"application/json": Body, "text/plain": _Text}
    answers: Mapping[str, Any] = {
        "application/json": Answer | list[Answer],
        "application/jsonlines": Line,
        "text/event-stream": Line,
    }
    error = ErrorFields

    def detect(self, payload: Mapping[str, Any], _context: ParseContext) -> bool:
        """True if the payload has `inputs` or `parameters`."""
        return "inputs" in payload or "parameters" in payload

    def answer_error(self, error: ServingError) -> tuple[int, dict[str, Any]]:
        """See `WireProtocol`."""
        return error.status, error_fields(error)

    def parse(self, payload: Mapping[str, Any], context: ParseContext) -> ParsedRequest:
        """See `WireProtocol.parse`."""
        inputs, values = _fields(payload)
        prompts = _prompts(inputs)
        given = validated(Parameters, values)
        output = _output_format(given.stream, context)
        streams = output != "json"
        if streams and isinstance(inputs, list):
            msg = (
                "inputs is a list, and a list is not answered by a stream; send one request for each prompt, or leave "
                f"out {'stream' if given.stream else 'option.output_formatter'}"
            )
            raise UnsupportedParameterError(msg)
        common = GenerationRequest(
            request_id=context.request_id,
            prompt_ids=(),
            sampling=_sampling(given),
            max_new_tokens=given.max_new_tokens,
            stop_token_ids=frozenset(given.stop_token_ids),
            stop_strings=stop_strings(given.stop, given.stop_sequences),
            include_stop=given.include_stop_str_in_output,
            ignore_eos=given.ignore_eos or given.ignore_eos_token,
            logprobs=given.details or (streams and context.has_logprobs),
            max_seconds=given.max_time,
            arrived_s=context.arrived_s,
            client_id=context.client_id,
            protocol=self.name,
        )
        requests = context.requests(common, prompts, truncate=given.truncate)
        formatters: dict[str, Formatter] = {}
        for request, prompt in zip(requests, prompts, strict=True):
            details = given.details or streams
            answer = _Answer(prompt, details=details, full_text=given.return_full_text)
            formatters[request.request_id] = (
                LinesFormatter(answer, sse=output == "sse") if streams else JsonFormatter(answer)
            )
        formatter = formatters[common.request_id]
        if isinstance(inputs, list):
            formatter = ListFormatter(formatters)
        return ParsedRequest(requests, formatter, stream=streams)


def _fields(payload: Mapping[str, Any]) -> tuple[object, dict[str, Any]]:
    """`inputs`, and the parameters without nulls; `stream` beside `inputs` takes precedence over the parameter."""
    for name in [name for name in payload if name not in _FIELDS]:
        hint = did_you_mean(name, [*_FIELDS, *Parameters.model_fields])
        if name in Parameters.model_fields:
            hint = ' (it belongs in "parameters")'
        msg = (
            f"unknown field {reprlib.repr(name)} beside inputs{hint}; expected {', '.join(_FIELDS)}"
        )
        raise UnsupportedParameterError(msg)
    if "inputs" not in payload:
        msg = "inputs is missing; expected a prompt"
        raise RequestError(msg)
    inputs, parameters, stream = map(payload.get, _FIELDS)
    if not isinstance(parameters, (dict, type(None))):
        msg = f"parameters is {json_type(parameters)}; expected an object"
        raise RequestError(msg)
    values = {**(parameters or {}), **({} if stream is None else {"stream": stream})}
    return inputs, values


def _prompts(inputs: object) -> list[str]:
    prompts: list[Any] = inputs if isinstance(inputs, list) else [inputs]
    if not 1 <= len(prompts) <= MAX_SEQUENCES:
        msg = f"inputs has {len(prompts)} prompts; expected 1 to {MAX_SEQUENCES}"
        raise RequestError(msg)
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str) or not prompt:
            name = f"inputs[{i}]" if isinstance(inputs, list) else "inputs"
            msg = f"{name} is {json_type(prompt)}; expected inputs to be a prompt or a list of prompts"
            raise RequestError(msg)
    return prompts


def _sampling(given: Parameters) -> SamplingParams:
    """`do_sample` decides; without it, any parameter that does not apply to greedy requests turns sampling on."""
    values = given.given_sampling()
    samples = given.do_sample
    if "do_sample" not in given.model_fields_set:
        samples = not values.keys() <= set(SamplingParams.GREEDY_NAMES)
    return sampling_params(values, samples=samples)


class JsonFormatter:
    """The whole answer at the end: ``{"generated_text": "…"[, "details": {…}]}``."""

    content_type = "application/json"

    def __init__(self, answer: _Answer) -> None:
        self._answer = answer
        self._tokens: list[Token] = []

    def feed(self, delta: Delta) -> bytes:
        """See `Formatter`."""
        if delta.error is not None:
            return orjson.dumps(error_fields(delta.error))
        self._answer.add(delta)
        if self._answer.details:
            self._tokens += delta.tokens
        if not delta.finished:
            return b""
        summary = self._answer.summary(delta)
        if self._answer.details:
            summary["details"]["tokens"] = [_token(token) for token in self._tokens]
        return orjson.dumps(summary)


class LinesFormatter:
    """One JSON object per token; the last one also has `generated_text` and `details`."""

    def __init__(self, answer: _Answer, *, sse: bool) -> None:
        self.content_type = "text/event-stream" if sse else "application/jsonlines"
        self._answer = answer
        self._prefix, self._suffix = (b"data: ", b"\n\n") if sse else (b"", b"\n")

    def feed(self, delta: Delta) -> bytes:
        """See `Formatter`."""
        self._answer.add(delta)
        lines: list[dict[str, Any]] = [{"token": _token(token)} for token in delta.tokens]
        if delta.finished:
            lines = lines or [{}]
            lines[-1] |= self._answer.summary(delta)
            if delta.error is not None:
                lines[-1] |= error_fields(delta.error)
        return b"".join([self._prefix + orjson.dumps(line) + self._suffix for line in lines])


class _Answer:
    """The text so far, and the fields that end an answer in every format."""

    def __init__(self, inputs: str, *, details: bool, full_text: bool) -> None:
        self.details = details
        self._inputs = inputs
        self._texts = [inputs] if full_text else []

    def add(self, delta: Delta) -> None:
        if delta.text:
            self._texts.append(delta.text)

    def summary(self, delta: Delta) -> dict[str, Any]:
        body: dict[str, Any] = {"generated_text": "".join(self._texts)}
        if self.details:
            body["details"] = {
                "finish_reason": delta.finish_reason,
                "generated_tokens": delta.num_generated_tokens,
                "inputs": self._inputs,
            }
        return body


def _output_format(stream: bool, context: ParseContext) -> str:
    """json, jsonlines or sse: `option.output_formatter` if set, else by `stream` and the Accept header."""
    if context.options.output_formatter is not None:
        return context.options.output_formatter
    if not stream:
        return "json"
    return "sse" if "text/event-stream" in context.headers.get("accept", "") else "jsonlines"


def _token(token: Token) -> dict[str, Any]:
    fields: dict[str, Any] = {"id": token.id, "text": token.text, "log_prob": token.logprob}
    if token.special:
        fields["special_token"] = True
    return fields
