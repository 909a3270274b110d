"""Anthropic's Messages: ``{"max_tokens": 100, "messages": [{"role": "user", "content": "…"}]}``, and counts of tokens.

A request becomes one of OpenAI's chat completions. Source: the types of the package anthropic 2.14 (PyPI); what Claude
Code sends: code.claude.com/docs/en/llm-gateway-protocol, anthropics/claude-code issues 68900 and 77698.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal, Union

import orjson
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError
from typing_extensions import NotRequired, TypedDict

from djl_python_neuronx.errors import RequestError, ServingError, json_type
from djl_python_neuronx.protocol import openai
from djl_python_neuronx.protocol.answers import (
    Answer,
    ArgumentsEvent,
    Call,
    CallEvent,
    EndEvent,
    Event,
    Part,
    Shape,
    StartEvent,
    TextEvent,
)
from djl_python_neuronx.protocol.base import ParseContext, ParsedRequest
from djl_python_neuronx.protocol.neutral import OF_MESSAGES
from djl_python_neuronx.protocol.openai_chat import (
    SOME_MESSAGES,
    ChatParameters,
    ChatProtocol,
    Effort,
)
from djl_python_neuronx.protocol.parameters import (
    EXPECTED,
    Count,
    Flag,
    GenerationParameters,
    LenientModel,
    MaybeCount,
    RequestModel,
    Strings,
    renamed,
    validated,
)
from djl_python_neuronx.protocol.tokenize import Ready
from djl_python_neuronx.types import FinishReason

_FIELDS: Mapping[str, Mapping[str, type]] = {
    "text": {"text": str},
    "tool_use": {"id": str, "name": str, "input": dict},
    "tool_result": {"tool_use_id": str},
    "tool_reference": {"tool_name": str},
    "thinking": {"thinking": str},
    "redacted_thinking": {},
}
"""Type of a block to the fields that it needs."""
_OF_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
"""Role of a message to the types of its blocks."""
_OF_RESULT = ("text", "tool_reference")
_ATTRIBUTION = "x-anthropic-billing-header:"
"""Start of a line of Claude Code's system prompt. Its end differs in each request, so that no prompt would begin like
the one before; to a model it says nothing (issue 68900)."""
_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
    529: "overloaded_error",
}
"""Status to the type of an error; any other is `invalid_request_error` below 500, else `api_error`."""
_OWN_NAMES = {
    ".function.parameters": ".input_schema",
    ".function.": ".",
    "guided_json": "output_config.format.schema",
}
"""Names in the chat that a request becomes, and the client's in their place."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_NO_THREADS = {"error_code": "thread_unsupported_request"}
"""Details of an error. With them the package's tool runner sends whole conversations."""
_EMPTY = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
_SIGNATURE = "unsigned"
"""Signature of reasoning. The types of the package need one; clients send it back, and it is not read."""
_Block = Mapping[str, Any]


def _blocks(content: object, kinds: Sequence[str]) -> list[_Block]:
    """The blocks of a content; a text is one."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    found: list[Any] = content if isinstance(content, list) else [content]
    for i, block in enumerate(found):
        kind: Any = block.get("type") if isinstance(block, dict) else json_type(block)
        fields = _FIELDS[kind].items() if kind in kinds else ()
        wrong = [name for name, one in fields if not isinstance(block.get(name), one)]
        if kind not in kinds or wrong:
            needed = [f"{one} ({', '.join(_FIELDS[one])})".removesuffix(" ()") for one in kinds]
            expected = (
                "a string or blocks of type {needed}, as the model reads text; block {i} is {kind}"
            )
            if wrong:
                kind = f"{kind}, whose {wrong[0]} is {json_type(block.get(wrong[0]))}"
            shown = {"needed": " or ".join(needed), "i": i, "kind": str(kind)[:100]}
            raise PydanticCustomError(EXPECTED, expected, shown)
        if kind == "tool_result":
            _blocks(block.get("content") or "", _OF_RESULT)
    return found


def _of_role(content: object, info: ValidationInfo) -> list[_Block]:
    return _blocks(content, _OF_ROLE[info.data.get("role", "system")])


# Not WithJsonSchema, to whose dictionary pydantic 2.6 adds the default of one of its fields.
_Content = Annotated[
    Any, AfterValidator(_of_role), Field(json_schema_extra={"type": ["string", "array"]})
]


class MessageParam(LenientModel):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: _Content


def _custom(kind: object) -> object:
    if isinstance(kind, str) and kind != "custom":
        expected = (
            "custom, with name and input_schema beside it"
            if kind == "function"
            else "custom: {kind} is a tool of Anthropic's, which a model does not know; leave it out"
        )
        raise PydanticCustomError(EXPECTED, expected, {"kind": kind[:100]})
    return kind


class ToolParam(LenientModel):
    """A tool."""

    type: Annotated[Literal["custom"], BeforeValidator(_custom)] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: Flag | None = None

    def chat(self) -> dict[str, Any]:
        """The same tool in OpenAI's chat."""
        given = self.model_dump(include={"name", "description", "strict"}, exclude_none=True)
        return {"type": "function", "function": {**given, "parameters": self.input_schema}}


class ToolChoiceParam(LenientModel):
    """A choice among the tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: Flag = False


class Thinking(LenientModel):
    """The choice to reason before the answer. A budget is no limit here."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    display: Any = None


class JsonFormat(LenientModel):
    """The form of the text."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    """Form and effort of the answer."""

    format: JsonFormat | None = None
    effort: Effort | None = None


class CountParameters(GenerationParameters):
    """A conversation."""

    without_effect = OF_MESSAGES
    model: str | None = None
    max_tokens: MaybeCount = None
    messages: Annotated[list[MessageParam], SOME_MESSAGES]
    system: _Content = None
    stop_sequences: Strings = Field(default=[])
    stream: Flag = False
    tools: list[ToolParam] = Field(default=[])
    tool_choice: ToolChoiceParam = Field(
        default=ToolChoiceParam(type="auto"),
        description="an object whose type is auto, any, tool or none",
    )
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: JsonFormat | None = None
    """The older name of `output_config.format`."""
    metadata: dict[str, Any] = Field(default={})
    chat_template_kwargs: dict[str, Any] = Field(default={})

    def chat(self, context: ParseContext) -> ChatParameters:
        """The same request in OpenAI's chat.

        Raises:
            RequestError: a value is not allowed.
        """
        shared = self.model_fields_set & ChatParameters.model_fields.keys()
        values: dict[str, Any] = {name: getattr(self, name) for name in shared}
        values["stop"] = [*self.stop, *self.stop_sequences]
        values["user"] = self.user or self.metadata.get("user_id")
        values["chat_template_kwargs"] = variables = dict(self.chat_template_kwargs)
        if self.thinking is not None:
            for name in ("enable_thinking", "thinking"):
                variables.setdefault(name, self.thinking.type != "disabled")
            values["include_reasoning"] = self.thinking.display != "omitted"
        values["reasoning_effort"] = self.output_config.effort
        values["tools"] = [one.chat() for one in self.tools]
        choice = self.tool_choice
        named = {"type": "function", "function": {"name": choice.name}}
        values["tool_choice"] = _CHOICES.get(choice.type, named)
        values["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if (form := self.output_config.format or self.output_format) is not None:
            values["guided_json"] = form.json_schema
        *_, last = values["messages"] = list(self._turns())
        values["continue_final_message"] = continues = last["role"] == "assistant"
        if continues and (last["tool_calls"] or not last["content"].strip()):
            msg = "the last of messages is the assistant's; expected one with text, which the answer goes on with"
            raise RequestError(msg, param="messages")
        return validated(ChatParameters, values, context.options)

    def _turns(self) -> Iterator[dict[str, Any]]:
        """The messages of a chat: the system's, and turns that alternate."""
        system = list(self.system or ())
        if system and system[0]["text"].startswith(_ATTRIBUTION):
            system[0] = {"text": system[0]["text"].partition("\n")[2]}
        if text := _text(system):
            yield {"role": "system", "content": text}
        for is_assistant, turn in groupby(self.messages, lambda one: one.role == "assistant"):
            yield from (_assistant_turn if is_assistant else _user_turn)(list(turn))


class MessagesParameters(CountParameters):
    """A request."""

    max_tokens: Count


def _text(blocks: Iterable[_Block]) -> str:
    return "\n".join(filter(None, [one.get("text", one.get("tool_name")) for one in blocks]))


def _assistant_turn(turn: Sequence[MessageParam]) -> Iterator[dict[str, Any]]:
    blocks = [block for one in turn for block in one.content]
    thoughts = [one["thinking"] for one in blocks if one["type"] == "thinking"]
    calls = [
        {"id": one["id"], "function": {"name": one["name"], "arguments": one["input"]}}
        for one in blocks
        if one["type"] == "tool_use"
    ]
    yield {
        "role": "assistant",
        "content": _text(blocks),
        "tool_calls": calls or None,
        "reasoning_content": "\n".join(thoughts) or None,
    }


def _user_turn(turn: Sequence[MessageParam]) -> Iterator[dict[str, Any]]:
    """The results of tools, then the texts.

    Claude Code sends instructions as messages of the system within the conversation. Many templates take none there,
    and many keep the reasoning behind the last message of the user alone. So they are added to the user's text, or if
    there is none to the last result.
    """
    blocks = [(message.role, block) for message in turn for block in message.content]
    texts = [(role, block) for role, block in blocks if block["type"] == "text"]
    results = [_result(block) for _, block in blocks if block["type"] == "tool_result"]
    text = _text(block for _, block in texts)
    if results and all(role == "system" for role, _ in texts):
        results[-1]["content"] += f"\n{text}" if text else ""
        text = ""
    yield from results
    if text or not results:
        yield {"role": "user", "content": text}


def _result(block: _Block) -> dict[str, str]:
    text = _text(_blocks(block.get("content") or "", _OF_RESULT))
    text = f"Error: {text}" if block.get("is_error") else text
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}


class ContentBlock(TypedDict):
    """A part of an answer, by its `type`."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


class Usage(TypedDict):
    """Tokens of a request. Those of the prompt that the cache held are not among the input's."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(TypedDict):
    """A whole answer, or its start, whose `stop_reason` is null."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: Usage


class StreamEvent(TypedDict):
    """An event of a stream, by its `type`. A `delta` has the text to add, or at the end `stop_reason`."""

    type: str
    message: NotRequired[Message]
    index: NotRequired[int]
    content_block: NotRequired[ContentBlock]
    delta: NotRequired[dict[str, Any]]
    usage: NotRequired[Usage]


class ErrorBody(TypedDict):
    """A body, or an event of a stream, that is an error."""

    type: Literal["error"]
    error: dict[str, Any]
    """Its type and message, and perhaps details."""


class TokenCount(TypedDict):
    """The number of tokens of a conversation."""

    input_tokens: int


class MessagesShape(Shape):
    """A message of blocks, whole or as events that begin, extend and end each block."""

    def __init__(
        self,
        given: ChatParameters,
        context: ParseContext,
        *_requests: object,
        **_more: object,
    ) -> None:
        """The arguments are those of `OpenAiShape`."""
        self._model = context.answering_model(given.model)
        self._shows = given.include_reasoning
        self._index, self._open = -1, ""
        """Of the newest block: its number, and its type while it is open."""

    def whole(self, answers: Sequence[Answer]) -> Mapping[str, Any]:
        """See `Shape`."""
        answer, content = answers[0], list[_Block]()
        if answer.reasoning and self._shows:
            thought = {"thinking": answer.reasoning, "signature": _SIGNATURE}
            content.append({"type": "thinking", **thought})
        content += [
            _call(one, orjson.Fragment(one.arguments))
            if isinstance(one, Call)
            else {"type": "text", "text": one.text}
            for one in answer.content
            if isinstance(one, Call) or one.text
        ]
        return {**self._message(answer), "content": content, **_end(answer)}

    def write(self, answer: Answer, event: Event, parts: list[Any]) -> None:
        """See `Shape`."""
        if isinstance(event, StartEvent):
            parts += [{"type": "message_start", "message": self._message(answer)}, {"type": "ping"}]
        elif not isinstance(event, EndEvent):
            self._grow(event, parts)
        elif event.error is not None:
            parts[:] = [self.error(event.error)]
        else:
            self._close(parts)
            end = {"type": "message_delta", "delta": _end(answer), "usage": _usage(answer)}
            parts += [end, {"type": "message_stop"}]

    def error(self, error: ServingError) -> Mapping[str, Any]:
        """See `Shape`."""
        return answer_error(error)[1]

    def _message(self, answer: Answer) -> Message:
        """The message without content and end."""
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(answer),
        }

    def _grow(self, event: Part, parts: list[Any]) -> None:
        """Begin or extend a block."""
        if isinstance(event, CallEvent):
            self._begin(_call(event.call, {}), parts)
        elif isinstance(event, ArgumentsEvent):
            self._extend("input_json_delta", "partial_json", event.text, parts)
        elif event.text and (self._shows or isinstance(event, TextEvent)):
            kind = "text" if isinstance(event, TextEvent) else "thinking"
            if self._open != kind:
                self._begin(_EMPTY[kind], parts)
            self._extend(f"{kind}_delta", kind, event.text, parts)

    def _extend(self, kind: str, name: str, text: str, parts: list[Any]) -> None:
        delta = {"type": kind, name: text}
        parts.append({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _begin(self, block: _Block, parts: list[Any]) -> None:
        self._close(parts)
        self._index, self._open = self._index + 1, block["type"]
        parts.append({"type": "content_block_start", "index": self._index, "content_block": block})

    def _close(self, parts: list[Any]) -> None:
        if self._open == "thinking":
            self._extend("signature_delta", "signature", _SIGNATURE, parts)
        if self._open:
            parts.append({"type": "content_block_stop", "index": self._index})
        self._open = ""


def _call(call: Call, arguments: object) -> _Block:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _end(answer: Answer) -> dict[str, str | None]:
    reason, stop = "tool_use" if answer.calls else "end_turn", None
    if answer.finish_reason in (FinishReason.LENGTH, FinishReason.TIME):
        reason = "max_tokens"
    elif answer.stop:
        reason, stop = "stop_sequence", answer.stop
    return {"stop_reason": reason, "stop_sequence": stop}


def _usage(answer: Answer) -> Usage:
    return {
        "input_tokens": len(answer.request.prompt_ids) - answer.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.num_cached,
        "output_tokens": answer.num_tokens,
    }


def answer_error(error: ServingError) -> tuple[int, ErrorBody]:
    """HTTP status and body of an error."""
    status, text = openai.answer_error(error)[0], str(error)
    if error.code == "queue_full":
        status = 529
    elif error.code == "prompt_too_long":
        text = (
            f"prompt is too long: {text}"  # the words by which Claude Code shortens a conversation
        )
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    more = {"details": _NO_THREADS} if getattr(error, "param", None) == "thread" else {}
    return status, {"type": "error", "error": {"type": kind, "message": text, **more}}


class MessagesProtocol(ChatProtocol):
    """Messages."""

    name = "anthropic"
    outline = '{"max_tokens": 100, "messages": [{"role": "user", "content": "…"}]}'
    key = "messages"
    paths = ("/v1/messages",)
    requests: Mapping[str, Any] = {"application/json": MessagesParameters}
    answers: Mapping[str, Any] = {
        "application/json": Message,
        "text/event-stream": Union[StreamEvent, ErrorBody],
    }
    error = ErrorBody
    answer_error = staticmethod(answer_error)

    def stream_form(self, context: ParseContext) -> str:  # noqa: ARG002
        """See `OpenAiProtocol`."""
        return "events"

    def detect(self, payload: Mapping[str, Any], context: ParseContext) -> bool:
        """See `WireProtocol`. False for OpenAI's chats."""
        if self.key not in payload or "anthropic-version" in context.headers:
            return self.key in payload
        if "anthropic_version" in payload or "max_tokens" not in payload:
            return "anthropic_version" in payload
        tools = payload.get("tools")
        first = tools[0] if isinstance(tools, list) and tools else None
        return "system" in payload or (isinstance(first, dict) and "input_schema" in first)

    def parse(self, payload: Mapping[str, Any], context: ParseContext) -> ParsedRequest:
        """See `WireProtocol`."""
        given = validated(self.requests["application/json"], payload, context.options)
        try:
            return self.answered(given.chat(context), context)
        except RequestError as error:
            failure = renamed(error, _OWN_NAMES)
        raise failure  # outside the except clause: the cause may hold a part of a prompt

    def answered(self, chat: ChatParameters, context: ParseContext) -> ParsedRequest:
        """The request of a chat, with the answer's formatter."""
        return self.parse_chat(chat, context, MessagesShape)


class CountProtocol(MessagesProtocol):
    """The number of tokens of a conversation, which needs no engine."""

    name = "anthropic_count"
    outline = '{"messages": [{"role": "user", "content": "…"}]}'
    paths = ("/v1/messages/count_tokens",)
    anywhere = False
    requests: Mapping[str, Any] = {"application/json": CountParameters}
    answers: Mapping[str, Any] = {"application/json": TokenCount}

    def answered(self, chat: ChatParameters, context: ParseContext) -> ParsedRequest:
        """See `MessagesProtocol`. The answer is complete."""
        count = len(chat.encode(chat.messages, context))
        return ParsedRequest((), Ready({"input_tokens": count}), stream=False)
