"""OpenAI's chat completions: ``{"messages": [{"role": "user", "content": "…"}]}``, in the model's chat template."""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, Union

import orjson
from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import NotRequired, Self, TypedDict

from djl_python_neuronx.engine.detokenizer import Token
from djl_python_neuronx.errors import RequestError, json_type
from djl_python_neuronx.protocol.answers import (
    Answer,
    ArgumentsEvent,
    Call,
    CallEvent,
    Event,
    ReasoningEvent,
    Shape,
    StartEvent,
    TextEvent,
)
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
from djl_python_neuronx.protocol.parameters import (
    EXPECTED,
    Absent,
    Flag,
    LenientModel,
    MaybeCount,
    validated,
)
from djl_python_neuronx.protocol.reading import AnswerReader, is_thinking, special_marks
from djl_python_neuronx.protocol.structured_output import requested_grammar
from djl_python_neuronx.protocol.tools import (
    ToolFields,
    reasoning_format,
    tool_format,
)
from djl_python_neuronx.types import Rendering

MAX_MESSAGES = 8192
SOME_MESSAGES: Any = Field(
    min_length=1, max_length=MAX_MESSAGES, description=f"a list of 1 to {MAX_MESSAGES} messages"
)
_TEXTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
"""Types of parts that are text; the longer names are those of OpenAI's responses."""
_FOR_TEMPLATE = {"role", "content", "name", "tool_calls", "tool_call_id"}


def content_parts(content: object) -> object:
    """A content; of parts that are text what templates expect of them."""
    if not isinstance(content, list):
        if not isinstance(content, (str, type(None))):
            raise PydanticCustomError(EXPECTED, "a string or a list of parts")
        return content
    parts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else json_type(part)
        name = "refusal" if kind == "refusal" else "text"
        text = part.get(name) if kind in ("refusal", *_TEXTS) else None
        if not isinstance(text, str):
            expected = "parts of type text or refusal, with that as a string; part {i} is {kind}"
            raise PydanticCustomError(EXPECTED, expected, {"i": i, "kind": reprlib.repr(kind)})
        parts.append({"type": "text", "text": text})
    return parts or ""


def json_object(text: object) -> object:
    """An object, or the text of its JSON as it is."""
    found = text
    if isinstance(text, str):
        try:
            # orjson is stricter, but for integers above 64 bits.
            orjson.dumps(json.loads(text or "{}", parse_int=float, parse_constant=int))
            found = json.loads(text or "{}")
        except (ValueError, TypeError, RecursionError):
            found = None
    if not isinstance(found, dict):
        expected = "an object, or a string with its JSON, nested at most 254 deep"
        raise PydanticCustomError(EXPECTED, expected)
    return "{}" if text == "" else text


Content = Annotated[
    Any, BeforeValidator(content_parts), WithJsonSchema({"type": ["string", "array"]})
]
"""A text, or parts that are text."""
Arguments = Annotated[
    Any, BeforeValidator(json_object), WithJsonSchema({"type": ["string", "object"]})
]
"""Those of a call in the history."""


class Function(LenientModel):
    """A call in the history."""

    name: str
    arguments: Arguments


class ToolCall(LenientModel):
    """A call in the history, with the id that its answer names."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class Message(LenientModel):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    """In place of the content."""
    reasoning_content: Any = None
    reasoning: Any = None
    """vLLM's and OpenRouter's name of `reasoning_content`."""
    images: Absent = None
    audio: Absent = None
    videos: Absent = None
    files: Absent = None
    function_call: Absent = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError(EXPECTED, "content, which only an assistant may leave out")
        return self

    def for_template(self, id_chars: int | None = None) -> dict[str, Any]:
        """The message as chat templates expect it: with a content, without fields that are not set.

        `id_chars`: letters and digits that the ids of calls have there, see `ToolFormat`.
        """
        found = {"content": "", **self.model_dump(include=_FOR_TEMPLATE, exclude_none=True)}
        if id_chars:
            for named, key in [
                (found, "tool_call_id"),
                *((one, "id") for one in found.get("tool_calls", ())),
            ]:
                if key in named and not re.fullmatch(f"[A-Za-z0-9]{{{id_chars}}}", named[key]):
                    named[key] = hashlib.sha256(named[key].encode()).hexdigest()[:id_chars]
        found["content"] = found["content"] or self.refusal or ""
        thought = self.reasoning_content or self.reasoning
        if isinstance(thought, str):
            found |= {"reasoning_content": thought, "reasoning": thought}
        return found


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Conversation(ToolFields):
    """Parameters of the chat template."""

    add_generation_prompt: bool | None = None
    """By default true without `continue_final_message`."""
    continue_final_message: Flag = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: Effort | None = None

    def encode(self, messages: Sequence[Message], context: ParseContext) -> list[int]:
        """The token ids of a conversation.

        Raises:
            RequestError: see `ParseContext.encode_chat`; or there is no text to go on with.
        """
        last, continues = messages[-1], self.continue_final_message
        if continues:
            text = last.content[-1]["text"] if isinstance(last.content, list) else last.content
            if last.role != "assistant" or last.tool_calls or not (text or "").strip():
                msg = "continue_final_message needs a last message of the assistant that ends with text"
                raise RequestError(msg, param="continue_final_message")
        begins = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        if begins and continues:
            msg = "add_generation_prompt begins another message than continue_final_message goes on with; leave out one"
            raise RequestError(msg, param="add_generation_prompt")
        given = self.reasoning_effort
        effort: dict[str, Any] = {"reasoning_effort": given} if given else {}
        if given == "none":
            # The variables of Qwen's and DeepSeek's templates, as in SGLang.
            effort |= {"enable_thinking": False, "thinking": False}
        tokenizer, options = context.tokenizer, context.options
        use = self.tool_use(tokenizer, options)
        tools = tuple([one.for_template() for one in self.tools if use is not None])
        form = tool_format(options.tool_call_parser, tokenizer.template)
        id_chars = form.id_chars if form is not None else None
        rendering = Rendering({**effort, **self.chat_template_kwargs}, begins, continues, tools)
        return context.encode_chat([one.for_template(id_chars) for one in messages], rendering)


class ChatParameters(Conversation, OpenAiParameters):
    """A request."""

    messages: Annotated[list[Message], SOME_MESSAGES]
    max_completion_tokens: MaybeCount = None
    logprobs: Flag = False
    top_logprobs: Annotated[int, Field(ge=0, le=20, description="an integer from 0 to 20")] = 0
    add_special_tokens: Absent = None
    """The template writes them."""
    include_reasoning: Flag = True
    """vLLM's: false leaves the reasoning out."""
    separate_reasoning: Flag = True
    """SGLang's: false leaves it in the text, as the model wrote it."""


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


class FunctionCall(TypedDict):
    """The function of a call."""

    name: NotRequired[str]
    arguments: str


class AnswerCall(TypedDict):
    """A call of a tool; in a stream, where it has an index, an addition to it: the first one has all fields."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCall


class ReasoningFields(TypedDict, total=False):
    """The reasoning of an answer, if there is some."""

    reasoning_content: str
    reasoning: str
    """vLLM's newer name."""


class AnswerMessage(ReasoningFields):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    """Null if there are calls alone."""
    refusal: None
    tool_calls: NotRequired[list[AnswerCall]]


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
    prompt_logprobs: NotRequired[PromptScores]


class ChunkDelta(ReasoningFields, total=False):
    """A chunk's addition to a message."""

    role: Literal["assistant"]
    content: str
    tool_calls: list[AnswerCall]


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


def _call(call: Call, arguments: str) -> AnswerCall:
    function: FunctionCall = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


class ChatShape(OpenAiShape):
    """A choice is a message, or an addition to it."""

    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def choice(
        self, answer: Answer, index: int, logprobs: ChatLogprobs | None, reason: str
    ) -> ChatChoice:
        """See `OpenAiShape`."""
        calls = [_call(one, one.arguments) for one in answer.calls]
        content = answer.text or (None if calls else "")
        message: AnswerMessage = {"role": "assistant", "content": content, "refusal": None}
        message.update(self._thought(answer.reasoning))
        if calls:
            message["tool_calls"] = calls
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def part(
        self, event: Event, index: int, logprobs: ChatLogprobs | None, reason: str | None
    ) -> ChunkChoice | None:
        """See `OpenAiShape`."""
        delta: ChunkDelta = {}
        if isinstance(event, TextEvent):
            delta = {"content": event.text}
        elif isinstance(event, StartEvent):
            delta = {"role": "assistant", "content": ""}
        elif isinstance(event, ReasoningEvent):
            delta = self._thought(event.text)
            if not delta and logprobs is None:
                return None
        elif isinstance(event, CallEvent):
            delta = {"tool_calls": [{"index": event.call.index, **_call(event.call, "")}]}
        elif isinstance(event, ArgumentsEvent):
            more: FunctionCall = {"arguments": event.text}
            delta = {"tool_calls": [{"index": event.call.index, "function": more}]}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _thought(self, text: str) -> Any:  # noqa: ANN401
        """The `ReasoningFields` of a text."""
        if not text or not self._given.include_reasoning:
            return {}
        return {"reasoning_content": text, "reasoning": text}

    def finish_reason(self, answer: Answer) -> str:
        """See `OpenAiShape`."""
        reason = super().finish_reason(answer)
        return "tool_calls" if reason == "stop" and answer.calls else reason

    def whole(self, answers: Sequence[Answer]) -> Mapping[str, Any]:
        """See `Shape`."""
        whole = super().whole(answers)
        if self._given.prompt_logprobs is None:
            return whole
        return {**whole, "prompt_logprobs": self.prompt_scores(answers[0])}

    def logprobs(self, index: int, tokens: Sequence[Token]) -> ChatLogprobs:  # noqa: ARG002
        """See `OpenAiShape`."""

        def named(token_id: int, logprob: float | None) -> TopLogprob:
            data = self._tokenizer.token_bytes(token_id)
            text = data.decode(errors="replace")
            if self._given.return_tokens_as_token_ids:
                text = f"token_id:{token_id}"
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
        return self.parse_chat(validated(ChatParameters, payload, context.options), context)

    def parse_chat(
        self,
        given: ChatParameters,
        context: ParseContext,
        shape: Callable[..., Shape] | None = None,
    ) -> ParsedRequest:
        """The request of a conversation, for the protocols that have one. `shape`: see `parsed`.

        Raises:
            RequestError: a value is not allowed.
        """
        if given.top_logprobs and not given.logprobs:
            msg = "top_logprobs needs logprobs=true; set it, or leave top_logprobs out"
            raise RequestError(msg, param="top_logprobs")
        tokenizer, options = context.tokenizer, context.options
        use = given.tool_use(tokenizer, options)
        if use is not None:
            # Where no text may follow a call, a further one would have to.
            given.min_tokens = given.min_new_tokens = given.min_length = 0
            if use.format.bare and use.mode == "auto" and requested_grammar(given) is not None:
                # JSON is the text then, and a call has its mark.
                use = replace(use, format=replace(use.format, bare=False))
        thoughts = reasoning_format(options.reasoning_parser, tokenizer.template)
        prompt_ids = given.encode(given.messages, context)
        special = special_marks(tokenizer, use.format if use else None, thoughts)
        inside = is_thinking(thoughts, prompt_ids, tokenizer) if thoughts else None
        if inside is False:
            thoughts = None
        common = self.common_request(
            given,
            context,
            max_new_tokens=given.max_completion_tokens
            or given.max_tokens
            or context.default_max_tokens,
            most_name="max_completion_tokens" if given.max_completion_tokens else "max_tokens",
            logprobs=given.logprobs,
            top_logprobs=given.top_logprobs,
            prompt_name="the conversation",
            shown_ids=frozenset(special.values()),
            calls=use.grammar(special) if use else None,
            reasoning={**vars(thoughts), "special": special, "inside": bool(inside)}
            if thoughts
            else None,
        )
        return self.parsed(
            common,
            [prompt_ids],
            given,
            context,
            count=given.n,
            with_logprobs=given.logprobs,
            shape=shape,
            reader=partial(
                AnswerReader,
                use,
                thoughts,
                inside=bool(inside),
                separate=given.separate_reasoning,
                is_held=common.grammar is not None,
            )
            if use or (thoughts and given.separate_reasoning)
            else None,
        )
