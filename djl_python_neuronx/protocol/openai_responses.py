"""OpenAI's responses, of which none is stored: ``{"input": "…"}``, or a list of the items of a conversation.

A request becomes one of OpenAI's chat completions. Source: the package openai 3.57 (PyPI); openresponses.org,
2026-04-24; what Codex sends: openai/codex 46a03873, codex-rs/codex-api, codex-rs/protocol and codex-rs/tools.
"""

from __future__ import annotations

import itertools
import reprlib
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import Self, TypedDict

from djl_python_neuronx.errors import (
    RequestError,
    ServingError,
    UnsupportedParameterError,
    json_type,
)
from djl_python_neuronx.protocol.answers import (
    Answer,
    ArgumentsEvent,
    Call,
    CallEvent,
    EndEvent,
    Event,
    ReasoningEvent,
    StartEvent,
    TextEvent,
)
from djl_python_neuronx.protocol.base import ParseContext, ParsedRequest
from djl_python_neuronx.protocol.neutral import OF_RESPONSES
from djl_python_neuronx.protocol.openai import StreamOptions, answer_error
from djl_python_neuronx.protocol.openai_chat import (
    MAX_MESSAGES,
    Arguments,
    ChatParameters,
    ChatProtocol,
    ChatShape,
    Content,
    TokenLogprob,
)
from djl_python_neuronx.protocol.parameters import (
    EXPECTED,
    Flag,
    GenerationParameters,
    LenientModel,
    MaybeCount,
    MaybeObject,
    log_ignored,
    renamed,
    validated,
)
from djl_python_neuronx.protocol.tools import SOME_TOOLS, ToolFunction
from djl_python_neuronx.types import FinishReason, GenerationRequest

_NEEDED: Mapping[str, Sequence[str]] = {
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
"""Type of an item of the input to its required fields."""
_TOOLS = ("function", "namespace")
_SEPARATOR = "__"
"""Text between the names of a namespace and of its tool, in a chat."""
_KINDS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "message": ("msg", "output_text", {"role": "assistant"}),
    "reasoning": ("rs", "reasoning_text", {"summary": []}),
    "function_call": ("fc", "function_call_arguments", {}),
}
"""Type of an item of the output to the beginning of its id, the name of its events, and its fields."""
_SHOWN = (
    *("instructions", "tool_choice", "parallel_tool_calls", "top_logprobs", "max_output_tokens"),
    *("truncation", "metadata", "user", "safety_identifier", "prompt_cache_key", "max_tool_calls"),
)
"""Fields of a request that its answer has."""
_SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
_OWN_NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "truncate_prompt_tokens": "truncation",
    ".function.": ".",
}
"""Names in OpenAI's chat and in this protocol, for errors."""


def _refuse(value: object) -> None:
    if value:
        expected = "null, because nothing is stored; send the whole conversation as input"
        raise PydanticCustomError(EXPECTED, expected)


_Stored = Annotated[Any, BeforeValidator(_refuse), WithJsonSchema({"type": "null"})]
"""A field that refers to something stored."""


def _known(kind: str) -> str:
    if kind not in _NEEDED:
        expected = "{known}; it is {kind}"
        if kind == "item_reference":
            expected += (
                ", and nothing is stored that it could name: send the item itself, as Vercel's "
                "@ai-sdk/openai does with store=false in providerOptions.openai"
            )
        shown = {"known": ", ".join(_NEEDED), "kind": reprlib.repr(kind)}
        raise PydanticCustomError(EXPECTED, expected, shown)
    return kind


class InputItem(LenientModel):
    """An item of the conversation, by its `type`."""

    type: Annotated[str, AfterValidator(_known)] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content = None
    summary: Content = None
    """The text of reasoning that has no content."""
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Arguments | None = None
    output: Content = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        for name in _NEEDED[self.type]:
            if getattr(self, name) is None:
                expected = "{name} in an item of type {kind}"
                raise PydanticCustomError(EXPECTED, expected, {"name": name, "kind": self.type})
        return self


def _items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponseTool(ToolFunction):
    """A tool, or a namespace of tools. Those of other types have other fields."""

    type: str
    name: str = ""
    tools: list[ResponseTool] = Field(default=[])

    def shown(self) -> dict[str, Any]:
        """The tool in an answer."""
        if not self.tools:
            return self.model_dump(exclude={"tools"})
        fields = self.model_dump(include={"type", "name", "description"})
        return {**fields, "tools": [one.shown() for one in self.tools]}


class ReasoningConfig(LenientModel):
    """How the model reasons."""

    effort: str | None = None


class TextConfig(LenientModel):
    """The form of the text."""

    format: MaybeObject = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesParameters(GenerationParameters):
    """A request."""

    without_effect = OF_RESPONSES
    input: Annotated[
        list[InputItem],
        BeforeValidator(_items),
        Field(
            min_length=1,
            max_length=MAX_MESSAGES,
            description=f"a text, or a list of 1 to {MAX_MESSAGES} items",
            json_schema_extra={"type": ["string", "array"]},
        ),
    ]
    instructions: str | None = None
    model: str | None = None
    stream: Flag = False
    stream_options: StreamOptions | None = None
    max_output_tokens: MaybeCount = None
    tools: Annotated[list[ResponseTool], SOME_TOOLS] = Field(default=[])
    tool_choice: Any = "auto"
    parallel_tool_calls: Flag = True
    reasoning: ReasoningConfig = ReasoningConfig()
    text: TextConfig = TextConfig()
    chat_template_kwargs: dict[str, Any] = Field(default={})
    include: list[str] = Field(default=[])
    top_logprobs: Annotated[int, Field(ge=0, le=20, description="an integer from 0 to 20")] = 0
    truncation: Literal["auto", "disabled"] = "disabled"
    metadata: MaybeObject = Field(default={})
    prompt_cache_key: Any = None
    max_tool_calls: Any = None
    background: _Stored = None
    conversation: _Stored = None
    previous_response_id: _Stored = None
    prompt: _Stored = None

    @property
    def functions(self) -> list[tuple[str, dict[str, str], ResponseTool]]:
        """The tools that the model may call, each with its place and the fields of its calls that name it."""
        return [
            (f"tools[{i}]", {"name": one.name}, one)
            if one is tool
            else (f"tools[{i}].tools[{j}]", {"namespace": tool.name, "name": one.name}, one)
            for i, tool in enumerate(self.tools)
            for j, one in enumerate(tool.tools or [tool])
            if one.type == "function"
        ]

    def chat(self, context: ParseContext) -> ChatParameters:
        """The same request in OpenAI's chat.

        Raises:
            RequestError: a value is not allowed.
        """
        shared = self.model_fields_set & ChatParameters.model_fields.keys()
        values: dict[str, Any] = {name: getattr(self, name) for name in shared}
        tools = []
        for i, (_, names, one) in enumerate(self.functions):
            if not one.name:
                msg = f"tools[{i}].name is missing or empty; expected name, description and parameters beside type"
                raise RequestError(msg, param=f"tools[{i}].name")
            given = one.model_dump(
                include={"description", "parameters", "strict"}, exclude_none=True
            )
            function = {"name": _SEPARATOR.join(names.values()), **given}
            tools.append({"type": "function", "function": function})
        values |= {
            "messages": _messages(self.instructions, self.input),
            "tools": tools,
            "tool_choice": _chat_choice(self.tool_choice),
            "reasoning_effort": self.reasoning.effort,
            "max_completion_tokens": self.max_output_tokens,
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
            "logprobs": "message.output_text.logprobs" in self.include or self.top_logprobs > 0,
        }
        if self.text.verbosity is not None:
            variables = {"verbosity": self.text.verbosity, **self.chat_template_kwargs}
            values["chat_template_kwargs"] = variables
        if (form := self.text.format) is not None:
            if self.response_format is not None:
                msg = "text.format and response_format each have a grammar; send one of them"
                raise RequestError(msg, param="text.format")
            if form.get("type") == "json_schema":
                schema = {name: value for name, value in form.items() if name != "type"}
                form = {"type": "json_schema", "json_schema": schema}
            values["response_format"] = form
        self._check_tools()
        return validated(ChatParameters, values, context.options)

    def _check_tools(self) -> None:
        """Log the types of tools that are left out beside functions: agents send them to any server."""
        others = [reprlib.repr(one.type) for one in self.tools if one.type not in _TOOLS]
        if others and not self.functions and self.tool_choice != "none":
            msg = f"no tool is a function; the first is of type {others[0]}, which this server does not run"
            raise UnsupportedParameterError(msg, param="tools")
        for kind in others:
            log_ignored(f"tools of type {kind}", "functions beside them")


def _message(item: InputItem) -> dict[str, Any]:
    """A message of a chat for an item, or a part of the assistant's."""
    if item.type == "function_call_output":
        return {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
    if item.type == "function_call":
        name = _SEPARATOR.join(filter(None, (item.namespace, item.name)))
        function = {"name": name, "arguments": item.arguments}
        return {"role": "assistant", "tool_calls": [{"id": item.call_id, "function": function}]}
    if item.type == "reasoning":
        return {"role": "assistant", "reasoning_content": _text(item.content or item.summary)}
    return {"role": item.role, "content": item.content}


def _messages(instructions: str | None, items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """The messages of a chat. Reasoning, text and calls of the assistant that follow each other are one.

    So are messages of the user, and instructions with messages of the system behind them: many templates take turns
    that alternate, and one message of the system, at the beginning.
    """
    first = {"role": "system", "content": instructions}
    messages: list[dict[str, Any]] = [] if instructions is None else [first]
    for message in map(_message, items):
        last: dict[str, Any] = messages[-1] if messages else {"role": None}
        leads = last is first and message["role"] in {"system", "developer"}
        if leads or (last["role"] == message["role"] and last["role"] in {"user", "assistant"}):
            _extend(last, message)
        else:
            messages.append(message)
    return messages


def _extend(last: dict[str, Any], message: Mapping[str, Any]) -> None:
    """Add the texts and calls of a message to those of the one before it."""
    if "tool_calls" in message:
        last.setdefault("tool_calls", []).extend(message["tool_calls"])
    for name in message.keys() & {"content", "reasoning_content"}:
        before, text = _text(last.get(name)), _text(message[name])
        gap = "\n\n" if before and text and not text[0].isspace() else ""
        last[name] = f"{before}{gap}{text}"


def _chat_choice(choice: object) -> object:
    """A choice among tools, in a chat."""
    match choice:
        case "none" | "auto" | "required":
            return choice
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "tools": [dict(), *_] as tools, **more} if more.get(
            "mode", "auto"
        ) in ("auto", "required"):
            allowed = {"mode": more.get("mode", "auto"), "tools": [*map(_chat_choice, tools)]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    expected = 'none, auto, required, {"type": "function", "name"} or {"type": "allowed_tools", "mode", "tools"}'
    msg = f"tool_choice is {json_type(choice)}; expected {expected}, with tools of type function"
    raise RequestError(msg, "tool_choice")


def _text(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    if isinstance(content, str):
        return content
    return "\n".join([one["text"] for one in content or ()])


_OPEN = ConfigDict(extra="allow")


class OutputItem(TypedDict):
    """An item of the output, with the fields of its `type`."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]

    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseUsage(TypedDict):
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class Response(TypedDict):
    """A response, whole or so far. Its other fields are those of the request."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[OutputItem]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    usage: ResponseUsage | None


class ResponseEvent(TypedDict):
    """An event of a stream, with the fields of its `type`."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]

    type: str
    sequence_number: int


class _Item:
    """An item of the output as it grows."""

    def __init__(self, kind: str, index: int, call: Call | None, **fields: object) -> None:
        """`fields`: those that do not change."""
        prefix, self.event, common = _KINDS[kind]
        self._fields = {**common, **fields}
        self.kind, self.index, self.call, self.status = kind, index, call, "in_progress"
        self._id = f"{prefix}_{uuid.uuid4().hex}"
        self.texts, self.logprobs = list[str](), list[TokenLogprob]()
        """Parts of the text, or of a call's arguments; log-probabilities of a message."""
        self.place = {"item_id": self._id, "output_index": index}
        if call is None:
            self.place["content_index"] = 0

    def text(self) -> dict[str, Any]:
        """The text so far."""
        text = {"text" if self.call is None else "arguments": "".join(self.texts)}
        return {**text, "logprobs": [*self.logprobs]} if self.kind == "message" else text

    def part(self) -> dict[str, Any]:
        """The content of a message or of reasoning."""
        part = {"type": self.event, **self.text()}
        return {**part, "annotations": []} if self.kind == "message" else part

    def value(self) -> dict[str, Any]:
        """The item; in progress it has no content."""
        item = {"type": self.kind, "id": self._id, "status": self.status, **self._fields}
        if self.call is not None:
            return {**item, **self.text()}
        return {**item, "content": [] if self.status == "in_progress" else [self.part()]}


class ResponsesShape(ChatShape):
    """A response with items: whole, or by events that begin, extend and end each item."""

    def __init__(
        self,
        asked: ResponsesParameters,
        given: ChatParameters,
        context: ParseContext,
        requests: Sequence[GenerationRequest],
        **more: Any,  # noqa: ANN401
    ) -> None:
        """The arguments are those of `OpenAiShape`, behind the request."""
        super().__init__(given, context, requests, **more)
        self._names = {_SEPARATOR.join(names.values()): names for _, names, _ in asked.functions}
        self._numbers = itertools.count()
        self._items: list[_Item] = []
        """The last one is open."""
        self._pending: list[TokenLogprob] = []
        """Log-probabilities of tokens without text, which may belong to the next message."""
        self._response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": self._body["created"],
            "model": self._body["model"],
            **{name: getattr(asked, name) for name in _SHOWN},
            **{name: getattr(requests[0].sampling, name) for name in _SAMPLING},
            "tools": [one.shown() for one in asked.tools if one.type in _TOOLS],
            "text": {"format": {"type": "text"}, **asked.text.model_dump(exclude_none=True)},
            "reasoning": {"effort": asked.reasoning.effort, "summary": None},
            "previous_response_id": None,
            **dict.fromkeys(("background", "store"), False),
            "service_tier": "default",
        }

    def whole(self, answers: Sequence[Answer]) -> Mapping[str, Any]:
        """See `Shape`. The last event of a stream has it too."""
        answer, parts = answers[0], list[Any]()
        events: list[Event] = [ReasoningEvent(answer.reasoning, ())]
        for one in answer.content:
            if isinstance(one, Call):
                events += [CallEvent(one), ArgumentsEvent(one, one.arguments)]
            else:
                events.append(one)
        events.append(EndEvent(answer.finish_reason or FinishReason.LENGTH, None))
        for event in events:
            self.write(answer, event, parts)
        response: Mapping[str, Any] = parts[-1]["response"]
        return response

    def write(self, answer: Answer, event: Event, parts: list[Any]) -> None:
        """See `Shape`."""
        if isinstance(event, StartEvent):
            for kind in ("created", "in_progress"):
                self._emit(parts, kind, response=self._made("in_progress", answer))
        elif isinstance(event, EndEvent):
            self._finish(answer, event, parts)
        elif isinstance(event, CallEvent):
            names = self._names.get(event.call.name, {"name": event.call.name})
            self._begin(parts, "function_call", event.call, call_id=event.call.id, **names)
        elif isinstance(event, ArgumentsEvent):
            self._extend(parts, event.text)
        elif isinstance(event, (ReasoningEvent, TextEvent)):
            self._write_text(parts, event)

    def _write_text(self, parts: list[Any], event: ReasoningEvent | TextEvent) -> None:
        """Add text to the open item, or to a new one if that is of another type."""
        kind = "message" if isinstance(event, TextEvent) else "reasoning"
        if kind == "message" and self._with_logprobs:
            self._pending += self.logprobs(0, event.tokens)["content"]
        is_open = bool(self._items) and self._items[-1].kind == kind
        if event.text and not is_open:
            self._begin(parts, kind)
        if event.text or (is_open and self._pending):
            self._extend(parts, event.text)

    def _begin(
        self, parts: list[Any], kind: str, call: Call | None = None, **fields: object
    ) -> None:
        self._close(parts, "completed")
        item = _Item(kind, len(self._items), call, **fields)
        self._items.append(item)
        self._emit(parts, "output_item.added", output_index=item.index, item=item.value())
        if call is None:
            self._emit(parts, "content_part.added", **item.place, part=item.part())

    def _extend(self, parts: list[Any], text: str) -> None:
        item, scores = self._items[-1], dict[str, Any]()
        item.texts.append(text)
        if item.kind == "message":
            scores["logprobs"], self._pending = self._pending, []
            item.logprobs += scores["logprobs"]
        self._emit(parts, f"{item.event}.delta", **item.place, delta=text, **scores)

    def _close(self, parts: list[Any], status: str) -> None:
        """End the open item, if there is one. `status`: of one that is no call."""
        if not self._items:
            return
        item = self._items[-1]
        item.status = status
        if item.call is not None:
            item.status = "completed" if item.call.whole else "incomplete"
        self._emit(parts, f"{item.event}.done", **item.place, **item.text())
        if item.call is None:
            self._emit(parts, "content_part.done", **item.place, part=item.part())
        self._emit(parts, "output_item.done", output_index=item.index, item=item.value())

    def _finish(self, answer: Answer, event: EndEvent, parts: list[Any]) -> None:
        if not self._items and event.error is None:
            self._begin(parts, "message")
            self._extend(parts, "")
        is_whole = event.finish_reason in (FinishReason.EOS, FinishReason.STOP)
        status = "completed" if is_whole else "incomplete"
        self._close(parts, status)
        status = status if event.error is None else "failed"
        self._emit(parts, status, response=self._made(status, answer, event.error))
        parts += self._done

    def _made(
        self, status: str, answer: Answer, error: ServingError | None = None
    ) -> dict[str, Any]:
        """The response so far."""
        cut = {"reason": "max_output_tokens"}
        return {
            **self._response,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": cut if status == "incomplete" else None,
            "error": None if error is None else _failure(error),
            "output": [one.value() for one in self._items],
            "usage": None if status == "in_progress" else _usage(answer),
        }

    def _emit(self, parts: list[Any], kind: str, **fields: object) -> None:
        number = next(self._numbers)
        parts.append({"type": f"response.{kind}", "sequence_number": number, **fields})


def _failure(error: ServingError) -> dict[str, str]:
    code = "invalid_prompt" if answer_error(error)[0] < 500 else "server_error"
    return {"code": code, "message": str(error)}


def _usage(answer: Answer) -> ResponseUsage:
    num_read = len(answer.request.prompt_ids)
    return {
        "input_tokens": num_read,
        "input_tokens_details": {"cached_tokens": answer.num_cached, "cache_write_tokens": 0},
        "output_tokens": answer.num_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.num_reasoning},
        "total_tokens": num_read + answer.num_tokens,
    }


_ONLY_HERE = {"instructions", "max_output_tokens", "text", "reasoning", "include", "truncation"}
"""Fields that make a body with `input` a response: no other protocol has them beside it."""


class ResponsesProtocol(ChatProtocol):
    """Responses."""

    name = "openai_responses"
    outline = '{"input": [{"role": "user", "content": "…"}]}'
    key = "input"
    paths = ("/v1/responses",)
    requests: Mapping[str, Any] = {"application/json": ResponsesParameters}
    answers: Mapping[str, Any] = {
        "application/json": Response,
        "text/event-stream": ResponseEvent,
        "application/jsonlines": ResponseEvent,
    }

    def detect(self, payload: Mapping[str, Any], context: ParseContext) -> bool:  # noqa: ARG002
        """See `WireProtocol`. A text alone may be that of another protocol: of embeddings, or of a wrong `inputs`."""
        items = payload.get(self.key)
        is_list = isinstance(items, list) and isinstance(next(iter(items), None), dict)
        return is_list or (items is not None and not _ONLY_HERE.isdisjoint(payload))

    def stream_form(self, context: ParseContext) -> str:
        """See `OpenAiProtocol`."""
        form = super().stream_form(context)
        return "events" if form == "sse" else form

    def common_request(self, *given: Any, **more: Any) -> GenerationRequest:  # noqa: ANN401
        """See `OpenAiProtocol`."""
        return super().common_request(*given, **{**more, "most_name": "max_output_tokens"})

    def parse(self, payload: Mapping[str, Any], context: ParseContext) -> ParsedRequest:
        """See `WireProtocol`."""
        asked = validated(ResponsesParameters, payload, context.options)
        try:
            return self.parse_chat(asked.chat(context), context, partial(ResponsesShape, asked))
        except RequestError as error:
            names = {f"tools[{i}]": place for i, (place, *_) in enumerate(asked.functions)}
            failure = renamed(error, names | (_OWN_NAMES if asked.response_format is None else {}))
        raise failure  # outside the except clause: the cause may hold a part of a prompt
