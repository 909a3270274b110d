"""OpenAI's completions: ``{"prompt": "…"}``, with the answers of each prompt one after the other in `choices`."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Union

from pydantic import Field, WithJsonSchema
from typing_extensions import NotRequired, TypedDict

from djl_python_neuronx.engine.detokenizer import Token
from djl_python_neuronx.errors import (
    RequestError,
    UnsupportedParameterError,
    json_type,
)
from djl_python_neuronx.protocol.answers import Answer, EndEvent, Event, StartEvent, TextEvent
from djl_python_neuronx.protocol.base import ParseContext, ParsedRequest
from djl_python_neuronx.protocol.openai import (
    AnswerFields,
    OpenAiErrorBody,
    OpenAiParameters,
    OpenAiProtocol,
    OpenAiShape,
    Usage,
    finite,
)
from djl_python_neuronx.protocol.parameters import Flag, MaybeCount, validated

DEFAULT_MAX_TOKENS = 16
_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer"}}


class CompletionParameters(OpenAiParameters):
    """A request."""

    # Validated by `_prompts`: pydantic makes an error for each element and each type that it could have.
    prompt: Annotated[
        Any,
        WithJsonSchema(
            {"anyOf": [_TEXT, _IDS, {"type": "array", "items": {"anyOf": [_TEXT, _IDS]}}]}
        ),
    ]
    best_of: MaybeCount = None
    echo: Flag = False
    logprobs: Annotated[int | None, Field(ge=0, le=5, description="an integer from 0 to 5")] = None


class CompletionLogprobs(TypedDict):
    """The generated tokens, the one that ended the text included; `text_offset`: where in the text each begins."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """An answer, or a part of one."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(AnswerFields):
    """The body of a whole answer, or a part of a stream, where only the last one has the usage, if it is wanted."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


def token_name(data: bytes) -> str:
    r"""The text of a token, or OpenAI's name for bytes that are no text by themselves: ``bytes:\xf0\x9f``."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + data.decode("ascii", "backslashreplace")


class CompletionShape(OpenAiShape):
    """A choice is a text, or a part of it."""

    id_prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, *given: Any, **more: Any) -> None:  # noqa: ANN401
        super().__init__(*given, **more)
        self._decoders = [getincrementaldecoder("utf-8")("replace") for _ in self._requests]
        self._num_chars = [0] * len(self._requests)
        """Whole characters of each sequence's tokens so far."""

    def choice(
        self, answer: Answer, index: int, logprobs: CompletionLogprobs | None, reason: str
    ) -> CompletionChoice:
        """See `OpenAiShape`."""
        return {"text": answer.text, "index": index, "logprobs": logprobs, "finish_reason": reason}

    def part(
        self, event: Event, index: int, logprobs: CompletionLogprobs | None, reason: str | None
    ) -> CompletionChoice | None:
        """See `OpenAiShape`. The start has a part if there is a prompt to repeat."""
        if isinstance(event, EndEvent):
            text = ""
        elif isinstance(event, TextEvent) or (isinstance(event, StartEvent) and event.text):
            text = event.text
        else:
            return None
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, index: int, tokens: Sequence[Token]) -> CompletionLogprobs:
        """See `OpenAiShape`."""

        def named(token: Token) -> str:
            return token_name(self._tokenizer.token_bytes(token.id))

        found: CompletionLogprobs = {
            "tokens": [named(token) for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": None,
            "text_offset": [self._offset(index, token) for token in tokens],
        }
        if any(token.top for token in tokens):
            # Two tokens may have one text: the generated one counts, then the likeliest.
            found["top_logprobs"] = [
                {named(one): finite(one.logprob) for one in (*token.top[::-1], token)}
                for token in tokens
            ]
        return found

    def _offset(self, index: int, token: Token) -> int:
        """The place of a sequence's next token: the characters that begin before it, whenever they are readable."""
        decoder = self._decoders[index]
        offset = self._num_chars[index] + bool(decoder.getstate()[0])
        if not token.special:
            self._num_chars[index] += len(decoder.decode(self._tokenizer.token_bytes(token.id)))
        return offset


class CompletionProtocol(OpenAiProtocol):
    """Completions of text."""

    name = "openai_completion"
    outline = '{"prompt": "…"}'
    key = "prompt"
    paths = ("/v1/completions",)
    requests: Mapping[str, Any] = {"application/json": CompletionParameters}
    answers: Mapping[str, Any] = {
        "application/json": Completion,
        "text/event-stream": Union[Completion, OpenAiErrorBody],
        "application/jsonlines": Union[Completion, OpenAiErrorBody],
    }
    shape = CompletionShape

    def parse(self, payload: Mapping[str, Any], context: ParseContext) -> ParsedRequest:
        """See `WireProtocol`."""
        if payload.get("max_gen_len") is not None:
            msg = (
                "max_gen_len is a parameter of Bedrock's format; send max_tokens, or deploy with "
                "option.bedrock_compat=true and use /invocations"
            )
            raise UnsupportedParameterError(msg, param="max_gen_len")
        given = validated(CompletionParameters, payload, context.options)
        prompts = _prompts(given.prompt)
        count = given.best_of or given.n
        _check(given, count)
        common = self.common_request(
            given,
            context,
            max_new_tokens=given.max_tokens or context.default_max_tokens or DEFAULT_MAX_TOKENS,
            logprobs=given.logprobs is not None or count > given.n,
            top_logprobs=given.logprobs or 0,
        )
        return self.parsed(
            common,
            prompts,
            given,
            context,
            count=count,
            with_logprobs=given.logprobs is not None,
            echo=given.echo,
        )


def _prompts(prompt: object) -> list[str | list[Any]]:
    """The prompts of a text, a list of ids, or a list of either.

    Raises:
        RequestError: it is another value.
    """
    is_list = isinstance(prompt, list) and type(next(iter(prompt), None)) is not int
    prompts: Any = prompt if is_list else [prompt]
    if set(map(type, prompts)) not in ({str}, {list}):
        msg = (
            f"prompt is {json_type(prompt)} without a prompt, or with other values; expected a text, a list of token "
            "ids, a list of texts or a list of lists of token ids"
        )
        raise RequestError(msg, param="prompt")
    found: list[str | list[Any]] = prompts
    return found


def _check(given: CompletionParameters, count: int) -> None:
    """Refuse parameters that exclude each other.

    Raises:
        RequestError: `best_of` is below `n`.
        UnsupportedParameterError: the parameters are not supported together.
    """
    if count < given.n:
        msg = f"best_of is {count} and n is {given.n}; expected best_of to be at least n"
        raise RequestError(msg, param="best_of")
    if count > given.n and given.stream:
        msg = "best_of above n is not streamed: the best are known at the end; leave out best_of or stream"
        raise UnsupportedParameterError(msg, param="best_of")
    if given.echo and given.logprobs is not None:
        msg = "echo with logprobs is not supported: the device returns no logits of a prompt; leave out one of them"
        raise UnsupportedParameterError(msg, param="logprobs")
