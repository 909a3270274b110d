"""Code that OpenAI's endpoints share: parameters, whole and streamed answers, and error objects.

Source: OpenAI's API reference, 2026-11; vLLM's names of the parameters that the reference lacks.
"""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Annotated, Any, Literal, Union

import orjson
from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from djl_python_neuronx.artifacts.manifest import package_version
from djl_python_neuronx.engine.detokenizer import Token
from djl_python_neuronx.errors import (
    PROMPT,
    RequestError,
    ServingError,
    UnsupportedParameterError,
)
from djl_python_neuronx.protocol.answers import (
    Answer,
    AnswerFormatter,
    EndEvent,
    Event,
    Reader,
    Shape,
    StartEvent,
    TextEvent,
)
from djl_python_neuronx.protocol.base import (
    ParseContext,
    ParsedRequest,
    WireProtocol,
)
from djl_python_neuronx.protocol.parameters import (
    Count,
    Flag,
    GenerationParameters,
    MaybeCount,
    RequestModel,
    sampling_params,
)
from djl_python_neuronx.types import FinishReason, GenerationRequest

MAX_TEMPERATURE = 2
MAX_PROMPT_LOGPROBS = 20
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
_Choice = Mapping[str, Any]
_Logprobs = Any
"""The log-probabilities of a choice, of a type of its endpoint; None if the client does not want them."""


class PromptTokensDetails(TypedDict):
    """Tokens of the prompts by how they were read."""

    cached_tokens: int
    """Those that the cache held already."""


class CompletionTokensDetails(TypedDict):
    """Generated tokens by what they are part of."""

    reasoning_tokens: int


class Usage(TypedDict):
    """Tokens of a request: each prompt counts once, each generated token of every sequence."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]
    """Left out if no token of the prompts was in the cache."""
    completion_tokens_details: NotRequired[CompletionTokensDetails]
    """Left out if there was no reasoning."""


class AnswerFields(TypedDict):
    """The fields that all answers and all parts of a stream have."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    """The version of the server, and the revision of the model if one is set."""


class PromptScore(TypedDict):
    """A token in a place of the prompt; `rank`: the number of tokens that are at least as likely."""

    logprob: float
    rank: int
    decoded_token: str


PromptScores = list[Union[dict[str, PromptScore], None]]
"""vLLM's: for each token of the prompt it and the likeliest in its place, by their ids; null for the first one."""


class OpenAiErrorFields(TypedDict):
    """An error; `param` is the field that is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAiErrorBody(TypedDict):
    """A body, or a part of a stream, that is an error."""

    error: OpenAiErrorFields


class ModelEntry(TypedDict):
    """A name of the model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    """vLLM's: tokens of prompt and output together."""
    root: str
    parent: str | None
    """Of an adapter the name of its model; so is `root`. A model is its own root."""


class ModelList(TypedDict):
    """All names of the model."""

    object: Literal["list"]
    data: list[ModelEntry]


class StreamOptions(RequestModel):
    """See OpenAI's reference."""

    include_usage: Flag = False
    continuous_usage_stats: Flag = False
    """With `include_usage` every part has the usage so far of its choice, as in vLLM."""
    include_obfuscation: Any = None
    """Without effect: answers are not padded."""


class OpenAiParameters(GenerationParameters):
    """The parameters of all endpoints."""

    model: str | None = None
    n: Count = 1
    stream: Flag = False
    stream_options: StreamOptions | None = None
    max_tokens: MaybeCount = None
    return_tokens_as_token_ids: Flag = False
    """Tokens of log-probabilities are named by their ids: two tokens may have one text."""
    prompt_logprobs: Annotated[
        int | None,
        Field(
            ge=0, le=MAX_PROMPT_LOGPROBS, description=f"an integer from 0 to {MAX_PROMPT_LOGPROBS}"
        ),
    ] = None
    truncate_prompt_tokens: Annotated[
        Union[Literal[-1], Annotated[int, Field(ge=1)], None],
        Field(description="an integer of at least 1, or -1 for as many as fit"),
    ] = None


def model_entry(
    name: str, created: int, max_model_len: int, parent: str | None = None
) -> ModelEntry:
    """A model of the list, or an adapter of its `parent`; `created` is the time of the model's load."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "djl-neuronx",
        "max_model_len": max_model_len,
        "root": parent or name,
        "parent": parent,
    }


def answer_error(error: ServingError) -> tuple[int, OpenAiErrorBody]:
    """HTTP status and body of an error."""
    status = _STATUS.get(error.code, error.status)
    return status, {
        "error": {
            "message": str(error),
            "type": "invalid_request_error" if status < 500 else "server_error",
            "param": None if (param := getattr(error, "param", None)) == PROMPT else param,
            "code": _CODES.get(error.code, error.code),
        }
    }


def finite(logprob: float | None) -> float:
    """A log-probability that JSON has."""
    return LEAST_LOGPROB if logprob is None else max(logprob, LEAST_LOGPROB)


@cache
def _fingerprint(revision: str | None) -> str:
    return "-".join(filter(None, (package_version(), revision)))


class OpenAiShape(Shape):
    """An answer with choices: an object as a whole, or one such object for each event. A subclass makes the choices."""

    id_prefix: str
    kind: str
    """`object` of a whole answer."""
    chunk_kind: str

    def __init__(
        self,
        given: OpenAiParameters,
        context: ParseContext,
        requests: Sequence[GenerationRequest],
        *,
        count: int,
        with_logprobs: bool,
        stream: str | None,
    ) -> None:
        """`count` sequences for each prompt follow each other in `requests`; `stream`: see `FRAMES`."""
        self._num_returned, self._count, self._with_logprobs = given.n, count, with_logprobs
        self._given: Any = given
        self._tokenizer = context.tokenizer
        self._body: dict[str, Any] = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "object": self.chunk_kind if given.stream else self.kind,
            "created": int(time.time()),
            "model": context.answering_model(given.model),
            "system_fingerprint": _fingerprint(context.options.revision),
            "choices": [],
        }
        wanted = given.stream_options or StreamOptions()
        if wanted.include_usage:
            self._body["usage"] = None
        self._counts_on = wanted.include_usage and wanted.continuous_usage_stats
        self._requests, self._ended = requests, list[Answer]()
        self._done = [orjson.Fragment(b"[DONE]")] if stream in {"sse", "events"} else []

    @abstractmethod
    def choice(self, answer: Answer, index: int, logprobs: _Logprobs, reason: str) -> _Choice:
        """A choice of a whole answer."""

    @abstractmethod
    def part(
        self, event: Event, index: int, logprobs: _Logprobs, reason: str | None
    ) -> _Choice | None:
        """The choice of a stream for an event; None if it has none."""

    @abstractmethod
    def logprobs(self, index: int, tokens: Sequence[Token]) -> _Logprobs:
        """The log-probabilities of a sequence's next tokens."""

    def finish_reason(self, answer: Answer) -> str:
        """The reason that a sequence ended; "" if it failed."""
        return _FINISH_REASONS.get(answer.finish_reason, "")

    def listed_prompt(self, answer: Answer) -> list[Token]:  # noqa: ARG002
        """The tokens of the prompt, if an answer that repeats it lists them before its own."""
        return []

    def prompt_scores(self, answer: Answer) -> PromptScores:
        """The value of `prompt_logprobs`."""
        scores: PromptScores = [None]
        for token in answer.prompt:
            place: dict[str, PromptScore] = {}
            for rank, one in enumerate((token, *token.top[: self._given.prompt_logprobs])):
                place.setdefault(
                    str(one.id),
                    {
                        "logprob": finite(one.logprob),
                        "rank": rank or token.rank or 0,
                        "decoded_token": one.text,
                    },
                )
            scores.append(place)
        return scores

    def whole(self, answers: Sequence[Answer]) -> Mapping[str, Any]:
        """See `Shape`. Of the sequences of each prompt it has the likeliest, by token."""
        best: list[Answer] = []
        for i in range(0, len(answers), self._count):
            group = list(answers[i : i + self._count])
            if self._num_returned < self._count:
                group.sort(key=lambda one: -one.mean_logprob)
            best += group[: self._num_returned]
        choices = [
            self.choice(
                one,
                index,
                self.logprobs(one.index, [*self.listed_prompt(one), *one.tokens])
                if self._with_logprobs
                else None,
                self.finish_reason(one),
            )
            for index, one in enumerate(best)
        ]
        return {**self._body, "choices": choices, "usage": self._usage(answers)}

    def write(self, answer: Answer, event: Event, parts: list[Any]) -> None:
        """See `Shape`. After the last sequence follow the usage, if it is wanted, and the mark of the end."""
        logprobs = reason = None
        tokens: Sequence[Token] = getattr(event, "tokens", ())
        tokens = self.listed_prompt(answer) if isinstance(event, StartEvent) else tokens
        if tokens and self._with_logprobs:
            logprobs = self.logprobs(answer.index, tokens)
        if isinstance(event, TextEvent):
            if not event.text and logprobs is None and answer.finish_reason is not None:
                return
        elif isinstance(event, EndEvent):
            reason = self.finish_reason(answer)
        choice = self.part(event, answer.index, logprobs, reason)
        if choice is not None:
            part = {**self._body, "choices": [choice]}
            if self._counts_on:
                part["usage"] = _usage(len(answer.request.prompt_ids), answer.num_tokens)
            parts.append(part)
        if isinstance(event, EndEvent):
            self._end(answer, event.error, parts)

    def _end(self, answer: Answer, error: ServingError | None, parts: list[Any]) -> None:
        if error is not None:
            parts[:] = [self.error(error)]
            return
        self._ended.append(answer)
        if len(self._ended) == len(self._requests):
            if "usage" in self._body:
                parts.append({**self._body, "usage": self._usage(self._ended)})
            parts += self._done

    def error(self, error: ServingError) -> Mapping[str, Any]:
        """See `Shape`."""
        return answer_error(error)[1]

    def _usage(self, answers: Sequence[Answer]) -> Usage:
        num_prompt_tokens = sum(len(one.prompt_ids) for one in self._requests[:: self._count])
        usage = _usage(num_prompt_tokens, sum(one.num_tokens for one in answers))
        # Those of the first sequence of each prompt: the others may have them from it.
        num_cached = sum(one.num_cached for one in answers if one.index % self._count == 0)
        if num_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": num_cached}
        if num_reasoning := sum(one.num_reasoning for one in answers):
            usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        return usage


def _usage(num_prompt_tokens: int, num_tokens: int) -> Usage:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }


class OpenAiProtocol(WireProtocol):
    """An endpoint."""

    error: Any = OpenAiErrorBody
    shape: type[OpenAiShape]

    def stream_form(self, context: ParseContext) -> str:
        """The form of a stream, see `FRAMES`. LMI's clients, which use other routes, read lines of JSON.

        Through DJL Serving the route is unknown, but the clients of OpenAI and huggingface_hub name themselves.
        """
        headers = context.headers
        named = "x-stainless-lang" in headers or "hf_hub/" in headers.get("user-agent", "")
        accepts = "text/event-stream" in headers.get("accept", "")
        chosen = context.options.output_formatter in {"sse", "sse_chat"}
        is_sse = context.path.startswith("/v1/") or named or accepts or chosen
        return "sse" if is_sse else "jsonlines"

    def answer_error(self, error: ServingError) -> tuple[int, Mapping[str, Any]]:
        """See `WireProtocol`."""
        status, body = answer_error(error)
        if getattr(error, "param", None) == PROMPT:
            body["error"]["param"] = self.key
        return status, body

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
        if given.stream_options is not None and not given.stream:
            msg = "stream_options needs stream=true; set it, or leave stream_options out"
            raise RequestError(msg, param="stream_options")
        if given.prompt_logprobs is not None:
            if given.stream:
                msg = "prompt_logprobs is not answered by a stream; leave it out"
                raise UnsupportedParameterError(msg, param="prompt_logprobs")
            more["scores_prompt"] = max(given.prompt_logprobs, more.get("scores_prompt") or 0)
        values = given.given_sampling()
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
        shape: Callable[..., Shape] | None = None,
        reader: Callable[[], Reader] | None = None,
    ) -> ParsedRequest:
        """The request of `count` sequences for each prompt; `echo`: each text begins with its prompt.

        `shape`: makes the shape of the answers, from the arguments of `OpenAiShape`, by default the protocol's;
        `reader`: makes the reader of a sequence, see `Answer`.

        Raises:
            RequestError: a prompt is not allowed.
        """
        requests = context.requests(
            common,
            prompts,
            count=count,
            truncate=given.truncate_prompt_tokens,
            side=given.truncation_side,
            special=given.add_special_tokens,
            count_name="n" if count == given.n else "best_of",
            scores_once=not given.stream,
        )
        stream = self.stream_form(context) if given.stream else None
        make_shape = shape or self.shape
        writer = make_shape(
            given, context, requests, count=count, with_logprobs=with_logprobs, stream=stream
        )
        decode = partial(context.tokenizer.decode, skip=given.skip_special_tokens)
        is_cut = given.truncate_prompt_tokens is not None
        texts = [
            decode(requests[i * count].prompt_ids) if is_cut or not isinstance(one, str) else one
            for i, one in enumerate(prompts if echo else ())
        ]
        answers = [
            Answer(
                request,
                index=i,
                text=texts[i // count] if echo else "",
                keeps_tokens=common.logprobs and not given.stream,
                reader=reader() if reader is not None else None,
            )
            for i, request in enumerate(requests)
        ]
        formatter = AnswerFormatter([answers], writer, stream=stream)
        return ParsedRequest(requests, formatter, stream=given.stream)
