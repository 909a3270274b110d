"""OpenAI's chat completions: ``{"messages": [{"role": "user", "content": "…"}]}``, in the model's chat template."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Union

import orjson
from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import NotRequired, Self, TypedDict

from djl_python_neuronx.engine.detokenizer import Token
from djl_python_neuronx.errors import RequestError, json_type
from djl_python_neuronx.protocol.answers import Answer, Event, StartEvent, TextEvent
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
from djl_python_neuronx.protocol.parameters import (
    EXPECTED,
    Flag,
    MaybeCount,
    Only,
    RequestModel,
    validated,
)

MAX_MESSAGES = 8192
_FOR_TEMPLATE = {"role", "content", "name", "tool_calls", "tool_call_id"}


def _text(content: object) -> object:
    """The text of a content; parts of type text are lines."""
    if not isinstance(content, list):
        return content
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else json_type(part)
        if kind != "text" or set(part) != {"type", "text"} or not isinstance(part["text"], str):
            expected = "parts of type text with a text and nothing else; part {i} is {kind}"
            raise PydanticCustomError(EXPECTED, expected, {"i": i, "kind": reprlib.repr(kind)})
    return "\n".join(part["text"] for part in content)


def _object(text: object) -> object:
    """The object that a text of JSON has."""
    try:
        found = orjson.loads(text or "{}") if isinstance(text, str) else None
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise PydanticCustomError(EXPECTED, "a string with the JSON of an object")
    return found


class Function(RequestModel):
    """A call in the history."""

    name: str
    arguments: Annotated[
        dict[str, Any], BeforeValidator(_object), WithJsonSchema({"type": "string"})
    ]


class ToolCall(RequestModel):
    """A call in the history, with the id that its answer names."""

    id: str
    type: Literal["function"]
    function: Function


class Message(RequestModel):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        str | None,
        BeforeValidator(_text),
        WithJsonSchema({"type": ["string", "array", "null"]}),
    ] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: Annotated[Any, Only(None)] = None
    annotations: Annotated[Any, Only([])] = None
    audio: Annotated[Any, Only(None)] = None
    function_call: Annotated[Any, Only(None)] = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError(EXPECTED, "content, which only an assistant may leave out")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: with a content, without fields that are not set."""
        return {"content": "", **self.model_dump(include=_FOR_TEMPLATE, exclude_none=True)}


class ChatParameters(OpenAiParameters):
    """A request."""

    messages: Annotated[
        list[Message],
        Field(
            min_length=1,
            max_length=MAX_MESSAGES,
            description=f"a list of 1 to {MAX_MESSAGES} messages",
        ),
    ]
    max_completion_tokens: MaybeCount = None
    logprobs: Flag = False
    top_logprobs: Annotated[int, Field(ge=0, le=20, description="an integer from 0 to 20")] = 0
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    parallel_tool_calls: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    tools: Annotated[Any, Only([])] = None
    tool_choice: Annotated[Any, Only("none")] = None
    functions: Annotated[Any, Only([])] = None
    function_call: Annotated[Any, Only("none")] = None
    response_format: Annotated[Any, Only({"type": "text"})] = None
    modalities: Annotated[Any, Only(["text"])] = None
    audio: Annotated[Any, Only(None)] = None
    prediction: Annotated[Any, Only(None)] = None
    reasoning_effort: Annotated[Any, Only(None)] = None
    verbosity: Annotated[Any, Only(None)] = None
    web_search_options: Annotated[Any, Only(None)] = None
    moderation: Annotated[Any, Only(None)] = None
    add_generation_prompt: Annotated[Any, Only(neutral=True)] = None
    continue_final_message: Annotated[Any, Only(neutral=False)] = None


class TopLogprob(TypedDict):
    """A token with its log-probability and UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A generated token, and the likeliest ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """The generated tokens, the one that ended the text included."""

    content: list[TokenLogprob]
    refusal: None


class AnswerMessage(TypedDict):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    """An answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(AnswerFields):
    """The body of a whole answer."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChunkDelta(TypedDict, total=False):
    """A chunk's addition to a message."""

    role: Literal["assistant"]
    content: str


class ChunkChoice(TypedDict):
    """A part of an answer."""

    index: int
    delta: ChunkDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatCompletionChunk(AnswerFields):
    """A part of a stream; the last one has the usage alone, if it is wanted."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]


class ChatShape(OpenAiShape):
    """A choice is a message, or an addition to it."""

    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def choice(
        self, answer: Answer, index: int, logprobs: ChatLogprobs | None, reason: str
    ) -> ChatChoice:
        """See `OpenAiShape`."""
        message: AnswerMessage = {"role": "assistant", "content": answer.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def part(
        self, event: Event, index: int, logprobs: ChatLogprobs | None, reason: str | None
    ) -> ChunkChoice:
        """See `OpenAiShape`."""
        delta: ChunkDelta = {}
        if isinstance(event, TextEvent):
            delta = {"content": event.text}
        elif isinstance(event, StartEvent):
            delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, index: int, tokens: Sequence[Token]) -> ChatLogprobs:  # noqa: ARG002
        """See `OpenAiShape`."""

        def named(token_id: int, logprob: float | None) -> TopLogprob:
            data = self._tokenizer.token_bytes(token_id)
            text = data.decode(errors="replace")
            return {"token": text, "logprob": finite(logprob), "bytes": list(data)}

        content: list[TokenLogprob] = [
            {
                **named(token.id, token.logprob),
                "top_logprobs": [named(one.id, one.logprob) for one in token.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


class ChatProtocol(OpenAiProtocol):
    """Chat completions."""

    name = "openai_chat"
    outline = '{"messages": [{"role": "user", "content": "…"}]}'
    key = "messages"
    paths = ("/v1/chat/completions",)
    requests: Mapping[str, Any] = {"application/json": ChatParameters}
    answers: Mapping[str, Any] = {
        "application/json": ChatCompletion,
        "text/event-stream": Union[ChatCompletionChunk, OpenAiErrorBody],
        "application/jsonlines": Union[ChatCompletionChunk, OpenAiErrorBody],
    }
    shape = ChatShape

    def parse(self, payload: Mapping[str, Any], context: ParseContext) -> ParsedRequest:
        """See `WireProtocol`."""
        given = validated(ChatParameters, payload)
        if given.top_logprobs and not given.logprobs:
            msg = "top_logprobs needs logprobs=true; set it, or leave top_logprobs out"
            raise RequestError(msg, param="top_logprobs")
        common = self.common_request(
            given,
            context,
            max_new_tokens=given.max_completion_tokens
            or given.max_tokens
            or context.default_max_tokens,
            logprobs=given.logprobs,
            top_logprobs=given.top_logprobs,
            prompt_name="the conversation",
        )
        prompt_ids = context.encode_chat([message.for_template() for message in given.messages])
        return self.parsed(
            common, [prompt_ids], given, context, count=given.n, with_logprobs=given.logprobs
        )
