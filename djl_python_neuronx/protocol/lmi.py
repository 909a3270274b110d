"""LMI: ``{"inputs": "…", "parameters": {…}, "stream": false}``.

The answer is ``{"generated_text": "…"}``, one line of JSON per token (jsonlines), or the same lines as server-sent
events. The answer to a list of prompts is the list of their answers. Source: djl-serving 0.31 LMI input and output
schema. Where the old engine differed from its documentation, this follows the documentation (docs/protocols.md).
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from math import inf
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from djl_python_neuronx.engine.detokenizer import Delta, Token
from djl_python_neuronx.errors import (
    RequestError,
    UnsupportedParameterError,
    did_you_mean,
    json_type,
)
from djl_python_neuronx.protocol.base import (
    MAX_SEQUENCES,
    Formatter,
    ListFormatter,
    ParseContext,
    ParsedRequest,
    error_body,
    error_fields,
)
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.types import GenerationRequest

MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LEN = 1000
"""Every stop string is searched for in every token of its request."""
MAX_STOP_TOKEN_IDS = 64
_LONGEST = {
    "stop": MAX_STOP_STRINGS,
    "stop_sequences": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
}
"""Most elements of a list. Checked first: pydantic collects an error for each that is wrong, 0.6 s for 200,000."""

_FIELDS = ("inputs", "parameters", "stream")
_NEUTRAL: dict[str, object] = {
    "decoder_input_details": False,
    "top_n_tokens": 0,
    "best_of": 1,
    "n": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "length_penalty": 1,
    "early_stopping": False,
    "min_length": 1,
    "bad_sequences": None,
    "logprobs": None,
    "prompt_logprobs": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "watermark": False,
    "typical_p": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "truncate": None,
    "grammar": None,
    "adapter_id": None,
}
"""Unsupported parameters of LMI and TGI, each with the value that has no effect: that one and null are accepted."""


def _as_list(value: object) -> object:
    return value if isinstance(value, list) else [value]


_Flag = Annotated[bool, Field(description="true or false")]
_Strings = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    BeforeValidator(_as_list),
    Field(description="a non-empty string or a list of them"),
]
_TokenIds = Annotated[
    list[Annotated[int, Field(ge=0)]],
    BeforeValidator(_as_list),
    Field(description="a token id (0 or more) or a list of them"),
]


class _Parameters(BaseModel):
    """The parameters other than `SamplingParams`. A field's description is the expected value in error messages."""

    model_config = ConfigDict(strict=True)

    details: _Flag = False
    do_sample: _Flag = False
    ignore_eos: _Flag = False
    ignore_eos_token: _Flag = False
    include_stop_str_in_output: _Flag = False
    max_new_tokens: Annotated[int, Field(ge=1, description="an integer of at least 1")] = 30
    max_time: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="seconds, a number above 0")
    ] = inf
    return_full_text: _Flag = False
    stop: _Strings = []
    stop_sequences: _Strings = []
    stop_token_ids: _TokenIds = []
    stream: _Flag = False


_PARAMETERS = frozenset({*SamplingParams.WIRE_NAMES, *_NEUTRAL, *_Parameters.model_fields})


class LmiProtocol:
    """See `WireProtocol`."""

    name = "lmi"
    shape = '{"inputs": "…", "parameters": {…}}'

    def detect(self, payload: Mapping[str, Any]) -> bool:
        """True if the payload has `inputs` or `parameters`."""
        return "inputs" in payload or "parameters" in payload

    def parse(self, payload: Mapping[str, Any], context: ParseContext) -> ParsedRequest:
        """See `WireProtocol.parse`."""
        inputs, values = _fields(payload)
        prompts = _prompts(inputs)
        given = _validated(values)
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
            sampling=_sampling(values, given),
            max_new_tokens=given.max_new_tokens,
            stop_token_ids=frozenset(given.stop_token_ids),
            stop_strings=_stop_strings(given),
            include_stop=given.include_stop_str_in_output,
            ignore_eos=given.ignore_eos or given.ignore_eos_token,
            logprobs=given.details or (streams and context.has_logprobs),
            max_seconds=given.max_time,
            arrived_s=context.arrived_s,
            client_id=context.client_id,
            protocol=self.name,
        )
        requests = context.requests(common, prompts)
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
        hint = did_you_mean(name, [*_FIELDS, *_PARAMETERS])
        if name in _PARAMETERS:
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
    for name, value in values.items():
        _check_supported(name, value)
    return inputs, {name: value for name, value in values.items() if value is not None}


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


def _check_supported(name: str, value: object) -> None:
    if name not in _PARAMETERS:
        msg = (
            f"unknown parameter {reprlib.repr(name)}{did_you_mean(name, _PARAMETERS)}; "
            f"known: {', '.join(sorted(_PARAMETERS))}"
        )
        raise UnsupportedParameterError(msg)
    if name in _NEUTRAL and value is not None:
        neutral = _NEUTRAL[name]
        if value != neutral or isinstance(value, bool) != isinstance(neutral, bool):
            msg = f"parameter {name!r} is not supported; leave it out"
            raise UnsupportedParameterError(msg)


def _validated(values: Mapping[str, Any]) -> _Parameters:
    for name, most in _LONGEST.items():
        if isinstance(values.get(name), list) and len(values[name]) > most:
            msg = f"parameter {name!r} has {len(values[name])} values; expected at most {most}"
            raise UnsupportedParameterError(msg)
    try:
        return _Parameters.model_validate(values)
    except ValidationError as error:
        place = error.errors()[0]["loc"]
    # Outside the except clause: the cause would hold the value, which may be part of a prompt.
    name, index = str(place[0]), place[-1]
    value, expected = values[name], _Parameters.model_fields[name].description
    if isinstance(index, int) and isinstance(value, list):
        value, name = value[index], f"{name}[{index}]"
    given = orjson.dumps(value).decode() if isinstance(value, (int, float)) else json_type(value)
    msg = f"parameter {name!r} is {given}; expected {expected}"
    raise RequestError(msg)


def _stop_strings(given: _Parameters) -> tuple[str, ...]:
    texts = given.stop + given.stop_sequences
    if len(texts) > MAX_STOP_STRINGS or any(len(text) > MAX_STOP_STRING_LEN for text in texts):
        msg = f"too many or too long stop strings; at most {MAX_STOP_STRINGS} of {MAX_STOP_STRING_LEN} characters"
        raise UnsupportedParameterError(msg)
    return tuple(dict.fromkeys(texts))


def _sampling(values: Mapping[str, Any], given: _Parameters) -> SamplingParams:
    """`do_sample` decides; without it, any parameter that does not apply to greedy requests turns sampling on.

    Temperature 0 is greedy in any case.
    """
    values = {name: values[name] for name in SamplingParams.WIRE_NAMES if name in values}
    if values.get("top_k") == -1:  # off, as in vLLM
        del values["top_k"]
    samples = given.do_sample
    if "do_sample" not in given.model_fields_set:
        samples = not values.keys() <= set(SamplingParams.GREEDY_NAMES)
    params = SamplingParams.from_mapping({"temperature": 1.0, **values})
    if samples and params.temperature > 0:
        return params
    return SamplingParams(**{name: getattr(params, name) for name in SamplingParams.GREEDY_NAMES})


class JsonFormatter:
    """The whole answer at the end: ``{"generated_text": "…"[, "details": {…}]}``."""

    content_type = "application/json"

    def __init__(self, answer: _Answer) -> None:
        self._answer = answer
        self._tokens: list[Token] = []

    def feed(self, delta: Delta) -> bytes:
        """See `Formatter`."""
        if delta.error is not None:
            return error_body(delta.error)
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
    if context.output_formatter is not None:
        return context.output_formatter
    if not stream:
        return "json"
    return "sse" if "text/event-stream" in context.headers.get("accept", "") else "jsonlines"


def _token(token: Token) -> dict[str, Any]:
    fields: dict[str, Any] = {"id": token.id, "text": token.text, "log_prob": token.logprob}
    if token.special:
        fields["special_token"] = True
    return fields
