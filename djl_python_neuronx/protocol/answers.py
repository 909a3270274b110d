"""Answers as they grow: the engine's deltas become events, a `Shape` writes events as JSON, one formatter sends it.

A wire format has one shape. A new kind of event is a class here and a branch in `Shape.write` of each format that has
it (CONTRIBUTING.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, Union

import orjson

from djl_python_neuronx.engine.detokenizer import Delta, Token
from djl_python_neuronx.errors import ServingError
from djl_python_neuronx.protocol.base import error_fields
from djl_python_neuronx.types import FinishReason, GenerationRequest, Tokenizer

FRAMES = {
    None: ("application/json", b"", b""),
    "jsonlines": ("application/jsonlines", b"", b"\n"),
    "sse": ("text/event-stream", b"data: ", b"\n\n"),
    "events": ("text/event-stream", b"data: ", b"\n\n"),
}
"""Form of a stream, or None for a whole answer, to its media type, and the bytes before and after each part.
A part of "events" has a line with its `type` before it, but for the mark of the end."""


@dataclass(slots=True)
class StartEvent:
    """The start of a sequence, before its first token."""

    text: str
    """The prompt, if the answer repeats it, else ""."""


@dataclass(slots=True)
class TextEvent:
    """Text of a step with its tokens. Tokens may have no text yet; the last text may have no token."""

    text: str
    tokens: tuple[Token, ...]


@dataclass(slots=True)
class ReasoningEvent:
    """Text of the model's reasoning with its tokens, otherwise as `TextEvent`."""

    text: str
    tokens: tuple[Token, ...]


@dataclass(slots=True, eq=False)
class Call:
    """A call of a tool, as it grows."""

    name: str
    index: int
    """Among the calls of its sequence."""
    id: str = ""
    arguments: str = ""
    """JSON, as the model wrote it."""
    whole: bool = False
    """True from its end on."""
    raw: str = ""
    """The text that the model wrote for it, with the marks."""


@dataclass(slots=True)
class CallEvent:
    """The beginning of a call, whose name is known."""

    call: Call
    tokens: tuple[Token, ...] = ()


@dataclass(slots=True)
class ArgumentsEvent:
    """Further text of a call's arguments, which are JSON when it is whole."""

    call: Call
    text: str
    tokens: tuple[Token, ...] = ()


@dataclass(slots=True)
class EndEvent:
    """The end of a sequence, or its failure, which ends the whole answer."""

    finish_reason: FinishReason
    error: ServingError | None


Part = Union[TextEvent, ReasoningEvent, CallEvent, ArgumentsEvent]
"""Events between start and end."""
Event = Union[StartEvent, Part, EndEvent]


class Reader(Protocol):
    """The division of one sequence's text into reasoning, text and calls."""

    def feed(self, delta: Delta) -> list[Part]:
        """The parts that a delta completes, in the text's order, with all tokens of the sequence so far.

        Text that may become a mark is held back, until the last delta at most. A call that ends without being one is
        never `whole`: a whole answer has its `raw` text instead.
        """


class Answer:
    """One sequence of an answer as it grows."""

    def __init__(
        self,
        request: GenerationRequest,
        *,
        keeps_tokens: bool,
        index: int = 0,
        text: str = "",
        prompt_details: Mapping[str, Any] = MappingProxyType({}),
        reader: Reader | None = None,
    ) -> None:
        """`index`: among the sequences; `text`: its start; `prompt_details`: those that `Shape` makes of the prompt.

        Without a `reader` all is text.
        """
        self.start = text
        self.request, self.index, self.prompt_details = request, index, prompt_details
        self.tokens: list[Token] = []
        self.prompt: list[Token] = []
        """The tokens of the prompt, from the second on, as far as they have scores."""
        self.num_tokens = 0
        self.num_cached = 0
        """See `Delta.num_cached_tokens`."""
        self.num_reasoning = 0
        """Generated tokens of the reasoning and its marks."""
        self.finish_reason: FinishReason | None = None
        """None until the end."""
        self.stop = ""
        """See `Delta.stop`."""
        self._parts: list[tuple[list[str], list[Token]] | Call] = [([text], [])]
        """The content: texts, with their tokens if these are kept, and calls between them."""
        self._thoughts: list[str] = []
        self._reader, self._read = reader, list[Part]()
        self._keeps_tokens = keeps_tokens
        self._start: list[Event] = [StartEvent(text)]

    def take(self, delta: Delta) -> None:
        """Keep what a whole answer needs of a delta."""
        if self._reader is None:
            self._add_text(delta)
        else:
            self._read = self._reader.feed(delta)
            for event in self._read:
                if isinstance(event, TextEvent):
                    self._add_text(event)
                elif isinstance(event, ReasoningEvent):
                    self._thoughts.append(event.text)
                    self.num_reasoning += len(event.tokens)
                elif isinstance(event, CallEvent):
                    self._parts.append(event.call)
        self.prompt += delta.prompt
        if self._keeps_tokens:
            self.tokens += delta.tokens
        self.num_tokens = delta.num_generated_tokens
        self.num_cached = delta.num_cached_tokens
        self.finish_reason, self.stop = delta.finish_reason, delta.stop

    def events(self, delta: Delta) -> list[Event]:
        """The events of a delta that it has taken, for a stream. The scores of a prompt are part of its start."""
        if delta.prompt:
            return []
        events, self._start = self._start, []
        events += [TextEvent(delta.text, delta.tokens)] if self._reader is None else self._read
        if delta.finish_reason is not None:
            events.append(EndEvent(delta.finish_reason, delta.error))
        return events

    def prompt_tokens(self, tokenizer: Tokenizer) -> list[Token]:
        """All tokens of the prompt; the first one has no log-probability."""
        first = self.request.prompt_ids[0]
        text = tokenizer.token_bytes(first).decode(errors="replace")
        begin = Token(first, text, None, first in tokenizer.special_ids, rank=None)
        return [begin, *self.prompt]

    def _add_text(self, event: Delta | TextEvent) -> None:
        last = self._parts[-1]
        if isinstance(last, Call):
            last = [], []
            self._parts.append(last)
        texts, tokens = last
        texts.append(event.text)
        if self._keeps_tokens:
            tokens += event.tokens

    @property
    def content(self) -> list[TextEvent | Call]:
        """The texts so far and the calls that are whole, in their order. A call that breaks off is text."""
        found: list[TextEvent | Call] = []
        for one in self._parts:
            if isinstance(one, Call) and one.whole:
                found.append(one)
                continue
            text, tokens = (one.raw, ()) if isinstance(one, Call) else ("".join(one[0]), one[1])
            if found and isinstance(found[-1], TextEvent):
                found[-1].text += text
                found[-1].tokens += (*tokens,)
            elif text or tokens:
                found.append(TextEvent(text, (*tokens,)))
        return found

    @property
    def text(self) -> str:
        """The text so far, without reasoning and whole calls."""
        return "".join([one.text for one in self.content if isinstance(one, TextEvent)])

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._thoughts)

    @property
    def calls(self) -> list[Call]:
        """The calls that are whole."""
        return [one for one in self.content if isinstance(one, Call)]

    @property
    def log_probability(self) -> float:
        """The sum over its tokens, if it keeps them."""
        return sum(token.logprob or 0.0 for token in self.tokens)

    @property
    def mean_logprob(self) -> float:
        """The mean over its tokens, if it keeps them."""
        return self.log_probability / max(1, len(self.tokens))


class Shape(ABC):
    """A wire format's answers to one request as values for JSON. Errors are LMI's by default."""

    ranks = True
    """True if several sequences are ordered by their log-probabilities."""
    groups: Sequence[Sequence[Answer]] = ()
    """The sequences of each prompt; the formatter sets it."""

    @abstractmethod
    def whole(self, answers: Sequence[Answer]) -> Mapping[str, Any]:
        """The answer for one prompt, when all of its sequences have ended."""

    @abstractmethod
    def write(self, answer: Answer, event: Event, parts: list[Any]) -> None:
        """Write an event of a stream to the parts of its step; one that the format lacks is left out.

        The `answer` has taken the whole step already.
        """

    def error(self, error: ServingError) -> Mapping[str, Any]:
        """An answer that is an error as a whole."""
        return error_fields(error)

    def prompt_details(self, prompt: str) -> Mapping[str, Any]:  # noqa: ARG002
        """The details that are known before the first token."""
        return {}


class AnswerFormatter:
    """The `Formatter` of generated answers: a stream of parts, or the whole when the last sequence ends."""

    def __init__(
        self,
        groups: Sequence[Sequence[Answer]],
        shape: Shape,
        *,
        stream: str | None,
        listed: bool = False,
    ) -> None:
        """`groups`: the sequences of each prompt; `stream`: see `FRAMES`; `listed`: the whole is a list of answers."""
        self.content_type, self._prefix, self._suffix = FRAMES[stream]
        self._shape, self._streams, self._listed = shape, stream is not None, listed
        self._named = stream == "events"
        shape.groups = groups
        scores: list[Token] = []
        for one in [one for group in groups for one in group]:
            if one.request.scores_prompt is None:
                one.prompt = scores  # those of the first sequence of its prompt, if it has some
            else:
                scores = one.prompt
        self._answers = {one.request.request_id: (one, group) for group in groups for one in group}
        self._bodies = dict.fromkeys([group[0] for group in groups], b"")

    def feed(self, delta: Delta) -> bytes:
        """See `Formatter`."""
        answer, group = self._answers[delta.request_id]
        answer.take(delta)
        if not self._streams:
            return self._whole(group, delta) if delta.finish_reason is not None else b""
        parts: list[Any] = []
        for event in answer.events(delta):
            self._shape.write(answer, event, parts)
        frames = [self._prefix + orjson.dumps(part) + self._suffix for part in parts]
        if self._named:
            frames = [_name(part) + frame for part, frame in zip(parts, frames, strict=True)]
        return b"".join(frames)

    def _whole(self, group: Sequence[Answer], delta: Delta) -> bytes:
        """The whole answer, if it has ended. Each prompt's is encoded at its own end: all at once would take long."""
        if delta.error is not None:
            return orjson.dumps(self._shape.error(delta.error))
        if all(one.finish_reason is not None for one in group):
            self._bodies[group[0]] = orjson.dumps(self._shape.whole(group))
        bodies = list(self._bodies.values())
        if not all(bodies):
            return b""
        return b"[" + b",".join(bodies) + b"]" if self._listed else bodies[0]


def _name(part: Any) -> bytes:  # noqa: ANN401
    """The line before a part of "events"."""
    return b"event: %b\n" % part["type"].encode() if isinstance(part, dict) else b""
