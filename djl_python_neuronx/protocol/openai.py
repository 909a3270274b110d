"""Code that OpenAI's endpoints share: parameters, whole and streamed answers, and error objects.

Source: OpenAI's API reference, 2026-11; vLLM's names of the parameters that the reference lacks.
"""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import orjson
from typing_extensions import TypedDict

from djl_python_neuronx.engine.detokenizer import Delta, Token
from djl_python_neuronx.errors import RequestError, ServingError
from djl_python_neuronx.protocol.base import (
    UNNAMED,
    Formatter,
    ParseContext,
    ParsedRequest,
    WireProtocol,
)
from djl_python_neuronx.protocol.parameters import (
    Count,
    Flag,
    GenerationParameters,
    MaybeCount,
    Only,
    RequestModel,
    sampling_params,
)
from djl_python_neuronx.protocol.sequences import FRAMES, Answer, JsonFormatter
from djl_python_neuronx.types import FinishReason, GenerationRequest, Tokenizer

MAX_TEMPERATURE = 2
LEAST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON lacks."""
_FINISH_REASONS: Mapping[FinishReason | None, str] = {
    FinishReason.LENGTH: "length",
    FinishReason.TIME: "length",
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
}
_STATUS = {"prompt_too_long": 400, "step_error": 500, "formatter_error": 500}
_CODES = {"prompt_too_long": "context_length_exceeded"}
# Placeholders in a chunk for what differs between its parts.
_TEXT, _LOGPROBS = "\0text", "\0logprobs"


class Usage(TypedDict):
    """Tokens of a request: each prompt counts once, each generated token of every sequence."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ErrorFields(TypedDict):
    """An error; `param` is the field that is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """A body, or a part of a stream, that is an error."""

    error: ErrorFields


class ModelEntry(TypedDict):
    """A name of the model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(TypedDict):
    """All names of the model."""

    object: Literal["list"]
    data: list[ModelEntry]


class StreamOptions(RequestModel):
    """See OpenAI's reference."""

    include_usage: Flag = False
    include_obfuscation: Annotated[Any, Only(neutral=False)] = None
    continuous_usage_stats: Annotated[Any, Only(neutral=False)] = None


class OpenAiParameters(GenerationParameters):
    """The parameters of all endpoints."""

    model: str | None = None
    n: Count = 1
    stream: Flag = False
    stream_options: StreamOptions | None = None
    max_tokens: MaybeCount = None
    truncate_prompt_tokens: MaybeCount = None
    user: Any = None
    """Without effect, as any field of this type."""
    logit_bias: Annotated[Any, Only({})] = None
    extra_body: Annotated[Any, Only({})] = None


def model_entry(name: str, created: int) -> ModelEntry:
    """A model of the list; `created` is the time of its load."""
    return {"id": name, "object": "model", "created": created, "owned_by": "djl-neuronx"}


def answer_error(error: ServingError) -> tuple[int, ErrorBody]:
    """HTTP status and body of an error."""
    status = _STATUS.get(error.code, error.status)
    return status, {
        "error": {
            "message": str(error),
            "type": "invalid_request_error" if status < 500 else "server_error",
            "param": getattr(error, "param", None),
            "code": _CODES.get(error.code, error.code),
        }
    }


def finite(logprob: float | None) -> float:
    """A log-probability that JSON has."""
    return LEAST_LOGPROB if logprob is None else max(logprob, LEAST_LOGPROB)


def num_chars(token: Token, tokenizer: Tokenizer) -> int:
    """Number of characters that start in this token. `Token.text` may lag behind."""
    if token.special:
        return 0
    return sum(byte & 0xC0 != 0x80 for byte in tokenizer.token_bytes(token.id))


class OpenAiProtocol(WireProtocol):
    """An endpoint. Its choices are values for JSON."""

    error = ErrorBody
    id_prefix: str
    kind: str
    """`object` of a whole answer."""
    chunk_kind: str

    answer_error = staticmethod(answer_error)

    @abstractmethod
    def choice(
        self,
        index: int,
        text: str,
        logprobs: Any,  # noqa: ANN401
        reason: str,
    ) -> Mapping[str, Any]:
        """A choice of a whole answer."""

    @abstractmethod
    def first(self, index: int, text: str) -> Mapping[str, Any] | None:
        """The first part of a choice in a stream, before any token; `text` is that of an echoed prompt. Or None."""

    @abstractmethod
    def part(self, index: int, text: str, logprobs: Any) -> Mapping[str, Any]:  # noqa: ANN401
        """A further part."""

    @abstractmethod
    def last(self, index: int, reason: str) -> Mapping[str, Any]:
        """The last part."""

    @abstractmethod
    def logprobs(self, tokens: Sequence[Token], offset: int, tokenizer: Tokenizer) -> Any:  # noqa: ANN401
        """The log-probabilities of tokens whose text begins at `offset`."""

    def common_request(
        self,
        given: OpenAiParameters,
        context: ParseContext,
        **more: Any,  # noqa: ANN401
    ) -> GenerationRequest:
        """The request that its sequences share. `more`: further fields of `GenerationRequest`.

        Raises:
            RequestError: a value is not allowed.
        """
        if given.model in UNNAMED:
            given.model = None
        if given.stream_options is not None and not given.stream:
            msg = "stream_options needs stream=true; set it, or leave stream_options out"
            raise RequestError(msg, param="stream_options")
        values = given.given_sampling()
        if given.top_k == -1:
            values["top_k"] = 0
        if type(given.seed) is int and -(2**63) <= given.seed < 0:
            values["seed"] = given.seed + 2**64
        sampling = sampling_params(context.with_defaults(values))
        if values.get("temperature", 0) > MAX_TEMPERATURE:
            msg = (
                f"temperature is {given.temperature}; expected a number from 0 to {MAX_TEMPERATURE}"
            )
            raise RequestError(msg, param="temperature")
        return given.request(context, self.name, sampling, **more)

    def parsed(
        self,
        common: GenerationRequest,
        prompts: Sequence[str | list[Any]],
        given: OpenAiParameters,
        context: ParseContext,
        *,
        count: int,
        with_logprobs: bool,
        echo: bool = False,
    ) -> ParsedRequest:
        """The request of `count` sequences for each prompt; `echo`: each text begins with its prompt.

        Raises:
            RequestError: a prompt is not allowed.
        """
        requests = context.requests(
            common, prompts, count=count, truncate=given.truncate_prompt_tokens
        )
        head = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "object": self.chunk_kind if given.stream else self.kind,
            "created": int(time.time()),
            "model": given.model or context.options.model_names[0],
        }
        decode = context.tokenizer.decode
        echoes = [one if isinstance(one, str) else decode(one) for one in prompts if echo]
        texts = [text for text in echoes for _ in range(count)] or [""] * len(requests)
        tokenizer = context.tokenizer if with_logprobs else None
        answer = _Completion(head, self, requests, texts, count, tokenizer)
        formatter: Formatter
        if given.stream:
            with_usage = given.stream_options is not None and given.stream_options.include_usage
            formatter = ChunkFormatter(answer, _stream(context), with_usage=with_usage)
        else:
            answers = [
                Answer(request, text=text, keeps_tokens=common.logprobs)
                for request, text in zip(requests, texts, strict=True)
            ]
            whole = partial(answer.whole, num_returned=given.n)
            formatter = JsonFormatter([answers], whole, lambda error: answer_error(error)[1])
        return ParsedRequest(requests, formatter, stream=given.stream)


def _stream(context: ParseContext) -> str:
    """The form of a stream, see `FRAMES`. LMI's clients, which use other routes, read lines of JSON.

    Through DJL Serving the route is unknown, but the clients of OpenAI and huggingface_hub name themselves.
    """
    headers = context.headers
    named = "x-stainless-lang" in headers or "hf_hub/" in headers.get("user-agent", "")
    accepts = "text/event-stream" in headers.get("accept", "")
    chosen = context.options.output_formatter in {"sse", "sse_chat"}
    is_sse = context.path.startswith("/v1/") or named or accepts or chosen
    return "sse" if is_sse else "jsonlines"


class _Completion:
    """The fields of an answer, and its sequences."""

    def __init__(
        self,
        head: Mapping[str, Any],
        protocol: OpenAiProtocol,
        requests: Sequence[GenerationRequest],
        texts: Sequence[str],
        count: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        """`count` sequences for each prompt follow each other in `requests`. No tokenizer: without logprobs."""
        self.head, self.protocol, self.count = head, protocol, count
        self.requests, self.texts = requests, texts
        self.num_prompt_tokens = sum(len(one.prompt_ids) for one in requests[::count])
        self.tokenizer = tokenizer

    def usage(self, num_tokens: int) -> Usage:
        """The usage of an answer with so many generated tokens."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": self.num_prompt_tokens + num_tokens,
        }

    def whole(self, answers: Sequence[Answer], num_returned: int) -> Mapping[str, Any]:
        """The whole answer. Of the sequences of a prompt it has the `num_returned` likeliest, by token."""
        best: list[Answer] = []
        for i in range(0, len(answers), self.count):
            group = list(answers[i : i + self.count])
            if num_returned < self.count:
                group.sort(key=lambda one: -one.mean_logprob)
            best += group[:num_returned]
        choices = [
            self.protocol.choice(
                index, one.text, self.logprobs(one.tokens), _FINISH_REASONS[one.end.finish_reason]
            )
            for index, one in enumerate(best)
        ]
        usage = self.usage(sum(one.end.num_generated_tokens for one in answers))
        return {**self.head, "choices": choices, "usage": usage}

    def logprobs(self, tokens: Sequence[Token], offset: int = 0) -> Any:  # noqa: ANN401
        """Log-probabilities, if the client wants them."""
        if self.tokenizer is None:
            return None
        return self.protocol.logprobs(tokens, offset, self.tokenizer)


class ChunkFormatter:
    """A chunk for each delta, as server-sent events or lines of JSON."""

    def __init__(self, answer: _Completion, stream: str, *, with_usage: bool) -> None:
        """`stream`: see `FRAMES`."""
        self.content_type, self._prefix, self._suffix = FRAMES[stream]
        self._done = b"data: [DONE]\n\n" if stream == "sse" else b""
        self._answer, self._with_usage = answer, with_usage
        self._usage = {"usage": None} if with_usage else {}
        self._num_open, self._num_tokens = len(answer.requests), 0
        self._indices = {request.request_id: i for i, request in enumerate(answer.requests)}
        self._offsets = [len(text) for text in answer.texts]
        # Only text and log-probabilities differ: encoding the rest for each token costs as much as all else.
        self._frames = [self._frame(index) for index in range(len(answer.requests))]
        self._firsts = [self._first(i, text) for i, text in enumerate(answer.texts)]

    def feed(self, delta: Delta) -> bytes:
        """See `Formatter`."""
        if delta.error is not None:
            return self._line(answer_error(delta.error)[1])
        index = self._indices[delta.request_id]
        logprobs = b"null"
        parts = [self._firsts[index]]
        self._firsts[index] = b""
        tokenizer = self._answer.tokenizer
        if tokenizer is not None and delta.tokens:
            offset = self._offsets[index]
            logprobs = orjson.dumps(self._answer.logprobs(delta.tokens, offset))
            self._offsets[index] += sum([num_chars(one, tokenizer) for one in delta.tokens])
        if delta.text or not delta.finished or logprobs != b"null":
            head, middle, tail = self._frames[index]
            parts += (head, orjson.dumps(delta.text), middle, logprobs, tail)
        if delta.finished:
            parts.append(
                self._chunk(self._answer.protocol.last(index, _FINISH_REASONS[delta.finish_reason]))
            )
            self._num_tokens += delta.num_generated_tokens
            self._num_open -= 1
            if not self._num_open:
                if self._with_usage:
                    usage = self._answer.usage(self._num_tokens)
                    parts.append(self._line({**self._answer.head, "choices": [], "usage": usage}))
                parts.append(self._done)
        return b"".join(parts)

    def _line(self, value: Mapping[str, Any]) -> bytes:
        return self._prefix + orjson.dumps(value) + self._suffix

    def _chunk(self, choice: Mapping[str, Any]) -> bytes:
        return self._line({**self._answer.head, "choices": [choice], **self._usage})

    def _first(self, index: int, text: str) -> bytes:
        first = self._answer.protocol.first(index, text)
        return b"" if first is None else self._chunk(first)

    def _frame(self, index: int) -> tuple[bytes, bytes, bytes]:
        """The bytes of a chunk before, between and after its text and log-probabilities."""
        chunk = self._chunk(self._answer.protocol.part(index, _TEXT, _LOGPROBS))
        head, rest = chunk.split(orjson.dumps(_TEXT))
        middle, tail = rest.split(orjson.dumps(_LOGPROBS))
        return head, middle, tail
