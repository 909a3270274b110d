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
    PromptScores,
    Usage,
    finite,
)
from djl_python_neuronx.protocol.parameters import Flag, MaybeCount, MaybeFromZero, validated

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
    max_tokens: MaybeFromZero = None
    best_of: MaybeCount = None
    echo: Flag = False
    logprobs: Annotated[int | None, Field(ge=0, le=5, description="an integer from 0 to 5")] = None


class CompletionLogprobs(TypedDict):
    """The generated tokens, the one that ended the text included; `text_offset`: where in the text each begins.

    With `echo` those of the prompt come first, of which the first one has no log-probability.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """An answer, or a part of one."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    prompt_logprobs: NotRequired[PromptScores]


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
        choice: CompletionChoice = {
            "text": answer.text,
            "index": index,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        if self._given.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self.prompt_scores(answer)
        return choice

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

    def listed_prompt(self, answer: Answer) -> list[Token]:
        """See `OpenAiShape`."""
        if not (self._given.echo and self._with_logprobs):
            return []
        tokens = answer.prompt_tokens(self._tokenizer)
        text = b"".join(map(self._shown_bytes, tokens)).decode(errors="replace")
        # The tokens' text may have a space more at its start than the prompt.
        self._num_chars[answer.index] = len(answer.start) - len(text)
        return tokens

    def logprobs(self, index: int, tokens: Sequence[Token]) -> CompletionLogprobs:
        """See `OpenAiShape`."""

        def named(token: Token) -> str:
            if self._given.return_tokens_as_token_ids:
                return f"token_id:{token.id}"
            return token_name(self._tokenizer.token_bytes(token.id))

        found: CompletionLogprobs = {
            "tokens": [named(token) for token in tokens],
            "token_logprobs": [
                None if token.rank is None else finite(token.logprob) for token in tokens
            ],
            "top_logprobs": None,
            "text_offset": [self._offset(index, token) for token in tokens],
        }
        if most := self._given.logprobs:
            # Two tokens may have one text: the one in the place counts, then the likeliest.
            found["top_logprobs"] = [
                None
                if token.rank is None
                else {named(one): finite(one.logprob) for one in (*token.top[:most][::-1], token)}
                for token in tokens
            ]
        return found

    def _offset(self, index: int, token: Token) -> int:
        """The place of a sequence's next token: the characters that begin before it, whenever they are readable."""
        decoder = self._decoders[index]
        offset = self._num_chars[index] + bool(decoder.getstate()[0])
        self._num_chars[index] += len(decoder.decode(self._shown_bytes(token)))
        return max(0, offset)

    def _shown_bytes(self, token: Token) -> bytes:
        """The bytes of a token as a part of the text."""
        hidden = token.special and self._given.skip_special_tokens
        return b"" if hidden else self._tokenizer.token_bytes(token.id)


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
            max_new_tokens=context.default_max_tokens or DEFAULT_MAX_TOKENS
            if given.max_tokens is None
            else given.max_tokens,
            most_name="max_tokens",
            scores_prompt=given.logprobs if given.echo else None,
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
        RequestError: `best_of` is below `n`, or nothing is to generate or to score.
        UnsupportedParameterError: the parameters are not supported together.
    """
    if count < given.n:
        msg = f"best_of is {count} and n is {given.n}; expected best_of to be at least n"
        raise RequestError(msg, param="best_of")
    if count > given.n and given.stream:
        msg = "best_of above n is not streamed: the best are known at the end; leave out best_of or stream"
        raise UnsupportedParameterError(msg, param="best_of")
    scores = given.prompt_logprobs is not None or (given.echo and given.logprobs is not None)
    if given.max_tokens == 0 and not scores:
        msg = "max_tokens is 0, which needs echo with logprobs, or prompt_logprobs; expected at least 1"
        raise RequestError(msg, param="max_tokens")
