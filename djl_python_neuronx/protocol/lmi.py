"""LMI: ``{"inputs": "…", "parameters": {…}, "stream": false}``.

Answers are ``{"generated_text": "…"}``, a line of JSON per token (jsonlines), or the same lines as server-sent
events. Source: djl-serving 0.31 LMI input and output schema; where the old engine differed from its documentation, the
documentation is followed (docs/protocols.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from djl_python_neuronx.engine.detokenizer import Delta, Token
from djl_python_neuronx.errors import RequestError, UnsupportedParameterError, did_you_mean
from djl_python_neuronx.protocol.base import (
    Formatter,
    ParseContext,
    ParsedRequest,
    error_body,
    shown,
)
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.types import FinishReason, GenerationRequest

DEFAULT_MAX_NEW_TOKENS = 30
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LEN = 1000
"""Every stop string is looked for in every token of its request, beside those of all others."""

_FIELDS = frozenset({"inputs", "parameters", "stream"})

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "decoder_input_details": (False, None),
    "top_n_tokens": (0, None),
    "best_of": (1, None),
    "n": (1, None),
    "num_beams": (1, None),
    "watermark": (False, None),
    "typical_p": (1, 1.0, None),
    "frequency_penalty": (0, 0.0, None),
    "presence_penalty": (0, 0.0, None),
    "truncate": (None,),
    "grammar": (None,),
    "adapter_id": (None,),
}
"""Parameters of LMI and TGI that are not supported yet: accepted with the value that changes nothing."""


class LmiProtocol:
    """See `WireProtocol`."""

    name = "lmi"
    shape = '{"inputs": "…", "parameters": {…}}'

    def detect(self, payload: Mapping[str, Any]) -> bool:
        """True if there are `inputs`, or parameters to them."""
        return "inputs" in payload or "parameters" in payload

    def parse(self, payload: Mapping[str, Any], context: ParseContext) -> ParsedRequest:
        """See `WireProtocol.parse`."""
        for name in payload:
            if name not in _FIELDS:
                known = [*_FIELDS, *_PARAMETERS]
                where = (
                    ' (it belongs into "parameters")'
                    if name in _PARAMETERS
                    else did_you_mean(name, known)
                )
                msg = f"unknown field {shown(name)} beside inputs{where}; expected inputs, parameters, stream"
                raise UnsupportedParameterError(msg)
        if "inputs" not in payload:
            msg = "inputs is missing; expected a prompt"
            raise RequestError(msg)
        inputs = payload["inputs"]
        if not isinstance(inputs, str):
            msg = f"inputs is {_kind(inputs)}; expected one string (send a request for each prompt)"
            raise RequestError(msg)
        if not inputs:
            msg = "inputs is empty; expected a prompt"
            raise RequestError(msg)
        parameters = payload.get("parameters")
        if not isinstance(parameters, (dict, type(None))):
            msg = f"parameters is {_kind(parameters)}; expected an object"
            raise RequestError(msg)
        given = _Parameters(parameters or {})
        stream = (
            _boolean("stream", payload["stream"])
            if payload.get("stream") is not None
            else given.flag("stream")
        )
        details = given.flag("details")
        output = _output_format(stream, context)
        # A special token has no text in which its name could be found, so its id stops as well.
        stops = given.stop_strings()
        special_ids = [context.tokenizer.special_id(text) for text in stops]
        request = GenerationRequest(
            request_id=context.request_id,
            prompt_ids=context.encode(inputs),
            sampling=given.sampling(),
            max_new_tokens=given.integer(
                "max_new_tokens", at_least=1, default=DEFAULT_MAX_NEW_TOKENS
            ),
            stop_token_ids=given.stop_token_ids().union(i for i in special_ids if i is not None),
            stop_strings=stops,
            ignore_eos=given.flag("ignore_eos"),
            logprobs=details or (output != "json" and context.has_logprobs),
            client_id=context.client_id,
            protocol=self.name,
        )
        full_text = given.flag("return_full_text")
        formatter: Formatter
        if output == "json":
            formatter = JsonFormatter(inputs, details=details, full_text=full_text)
        else:
            formatter = LinesFormatter(
                inputs, details=details, full_text=full_text, sse=output == "sse"
            )
        return ParsedRequest(request, formatter, stream=output != "json")


class _Parameters:
    """The parameters of one request, each read by name and checked."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        for name, value in values.items():
            if name in _NEUTRAL:
                if not _is_neutral(value, _NEUTRAL[name]):
                    msg = f"parameter {name!r} is not supported; leave it out"
                    raise UnsupportedParameterError(msg)
            elif name not in _PARAMETERS:
                msg = (
                    f"unknown parameter {shown(name)}{did_you_mean(name, _PARAMETERS)}; "
                    f"known: {', '.join(sorted(_PARAMETERS))}"
                )
                raise UnsupportedParameterError(msg)

    def flag(self, name: str) -> bool:
        return _boolean(name, self._values.get(name, False))

    def integer(self, name: str, *, at_least: int, default: int) -> int:
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise _invalid(name, value, f"an integer of at least {at_least}")
        return value

    def stop_strings(self) -> tuple[str, ...]:
        found: list[str] = []
        for name in ("stop", "stop_sequences"):
            value = self._values.get(name, [])
            strings = [value] if isinstance(value, str) else value
            if not isinstance(strings, list) or not all(
                isinstance(string, str) and string for string in strings
            ):
                raise _invalid(name, value, "a non-empty string or a list of them")
            found += strings
        if len(found) > MAX_STOP_STRINGS or any(len(text) > MAX_STOP_STRING_LEN for text in found):
            msg = f"too many or too long stop strings; at most {MAX_STOP_STRINGS} of {MAX_STOP_STRING_LEN} characters"
            raise UnsupportedParameterError(msg)
        return tuple(dict.fromkeys(found))

    def stop_token_ids(self) -> frozenset[int]:
        value = self._values.get("stop_token_ids", [])
        ids = value if isinstance(value, list) else [value]
        if not all(
            isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0
            for token_id in ids
        ):
            raise _invalid("stop_token_ids", value, "a token id (0 or more) or a list of them")  # noqa: EM101  (a name, no message)
        return frozenset(ids)

    def sampling(self) -> SamplingParams:
        """do_sample decides; without it, naming any of the distribution's parameters means sampling.

        Temperature 0 is greedy in any case. Penalties work in both.
        """
        values = {
            name: self._values[name] for name in SamplingParams.WIRE_NAMES if name in self._values
        }
        if values.get("top_k") == -1:  # vLLM's way to say "off"
            del values["top_k"]
        if "do_sample" in self._values:
            samples = self.flag("do_sample")
        else:
            samples = any(name in values for name in ("temperature", "top_k", "top_p", "min_p"))
        params = SamplingParams.from_mapping({"temperature": 1.0, **values})
        if samples and params.temperature > 0:
            return params
        return SamplingParams(repetition_penalty=params.repetition_penalty, seed=params.seed)


_PARAMETERS = frozenset(
    {
        *SamplingParams.WIRE_NAMES,
        *_NEUTRAL,
        "details",
        "do_sample",
        "ignore_eos",
        "max_new_tokens",
        "return_full_text",
        "stop",
        "stop_sequences",
        "stop_token_ids",
        "stream",
    }
)


class JsonFormatter:
    """The whole answer at the end: ``{"generated_text": "…"[, "details": {…}]}``."""

    content_type = "application/json"

    def __init__(self, inputs: str, *, details: bool, full_text: bool) -> None:
        self._answer = _Answer(inputs, details=details, full_text=full_text)

    def feed(self, delta: Delta) -> bytes:
        """See `Formatter`."""
        if delta.error is not None:
            return error_body(delta.error)
        self._answer.add(delta)
        return orjson.dumps(self._answer.summary(delta, tokens=True)) if delta.finished else b""


class LinesFormatter:
    """A JSON object per token; the last one carries `generated_text` and, if asked for, `details`."""

    def __init__(self, inputs: str, *, details: bool, full_text: bool, sse: bool) -> None:
        self.content_type = "text/event-stream" if sse else "application/jsonlines"
        self._frame: Callable[[bytes], bytes] = _event if sse else _line
        self._answer = _Answer(inputs, details=details, full_text=full_text, keep_tokens=False)

    def feed(self, delta: Delta) -> bytes:
        """See `Formatter`."""
        self._answer.add(delta)
        if not delta.finished:
            return b"".join(
                [self._frame(orjson.dumps({"token": _token(token)})) for token in delta.tokens]
            )
        last = self._answer.summary(delta, tokens=False)
        if delta.error is not None:
            last |= {
                "code": delta.error.status,
                "error": str(delta.error),
                "type": delta.error.code,
            }
        lines = [{"token": _token(token)} for token in delta.tokens] or [{}]
        lines[-1] |= last
        return b"".join([self._frame(orjson.dumps(line)) for line in lines])


class _Answer:
    """The text so far, and the tokens if details are wanted."""

    def __init__(
        self, inputs: str, *, details: bool, full_text: bool, keep_tokens: bool = True
    ) -> None:
        self._inputs = inputs
        self._details = details
        self._texts = [inputs] if full_text else []
        self._tokens: list[Token] | None = [] if details and keep_tokens else None

    def add(self, delta: Delta) -> None:
        if delta.text:
            self._texts.append(delta.text)
        if self._tokens is not None:
            self._tokens += delta.tokens

    def summary(self, delta: Delta, *, tokens: bool) -> dict[str, Any]:
        body: dict[str, Any] = {"generated_text": "".join(self._texts)}
        if self._details or delta.finish_reason is FinishReason.ERROR:
            body["details"] = {
                "finish_reason": delta.finish_reason,
                "generated_tokens": delta.num_generated_tokens,
                "inputs": self._inputs,
            }
            if tokens and self._tokens is not None:
                body["details"]["tokens"] = [_token(token) for token in self._tokens]
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


def _line(data: bytes) -> bytes:
    return data + b"\n"


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    return any(
        value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
        for allowed in neutral
    )


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _invalid(name, value, "true or false")
    return value


def _invalid(name: str, value: object, expected: str) -> RequestError:
    what = orjson.dumps(value).decode() if isinstance(value, (bool, int, float)) else _kind(value)
    return RequestError(f"parameter {name!r} is {what}; expected {expected}")


def _kind(value: object) -> str:
    """What a value is, without showing it: it may be a part of a prompt."""
    names = {
        list: "a list",
        str: "a string",
        dict: "an object",
        bool: "a boolean",
        type(None): "null",
    }
    return names.get(type(value), "a number")
