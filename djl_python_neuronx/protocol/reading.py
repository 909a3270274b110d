"""The reader of answers: text as it comes, into reasoning, text and calls of tools.

Each character is looked at a bounded number of times, and the events are the same however the text is divided into
tokens. Whitespace beside marks is part of nothing. What begins as a call and is none comes back as text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import Any

import orjson

from djl_python_neuronx.engine.detokenizer import Delta, Token
from djl_python_neuronx.protocol.answers import (
    ArgumentsEvent,
    Call,
    CallEvent,
    Part,
    ReasoningEvent,
    TextEvent,
)
from djl_python_neuronx.protocol.tools import NAME, ReasoningFormat, ToolFormat, ToolUse
from djl_python_neuronx.types import Tokenizer

MOST_SPACE = 64
"""Most whitespace before a mark that is held back, and left out if the mark comes."""
MOST_HEADER = 512
"""Most characters between the start of a call and its arguments, where the name is no string of JSON."""
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})
"""Keys of a call that an answer begins with; another one shows that it is none."""
_LAST_TOKENS = 16
"""Tokens at the end of a prompt that may have the beginning of the reasoning: one may be of a single letter."""
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r"[^\s\w.+-]")
"""The structure of JSON outside of its strings, and what is of no JSON."""
_DEPTHS = {"{": 1, "[": 1, "}": -1, "]": -1, ":": 0, ",": 0, "": 0}
"""Character of the structure, or "" for none, to the change of depth."""


def _any_of(texts: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))


class _Marks:
    """Some texts to be found in text that grows, with the whitespace before them."""

    def __init__(self, texts: Iterable[str]) -> None:
        space = rf"\s{{0,{MOST_SPACE}}}"
        begun = {one[:i] for one in texts for i in range(1, len(one))}
        self._whole = re.compile(f"{space}(?:{_any_of(texts)})" if begun else "(?!)")
        self._begun = re.compile(rf"{space}(?:{_any_of(begun)})?\Z" if begun else r"\Z")
        self._most = MOST_SPACE + max(map(len, begun), default=0)

    def split(self, text: str, *, ends: bool) -> tuple[str, str, str]:
        """The text before the first mark, the mark, and the text behind it.

        Without a mark the last one is the text that may become one, unless the text `ends`.
        """
        if found := self._whole.search(text):
            return text[: found.start()], found[0], text[found.end() :]
        held = None if ends else self._begun.search(text, max(0, len(text) - self._most))
        size = held.start() if held else len(text)
        return text[:size], "", text[size:]


class _Syntax:
    """A format's calls as they are read."""

    def __init__(self, form: ToolFormat) -> None:
        self.starts = _Marks(form.starts)
        start = next((one for one in form.starts if form.before.startswith(one)), "")
        before = form.before.removeprefix(start)
        self.is_object = '"' in before
        self.least_depth = 0 if self.is_object else 1
        self.header = re.compile(rf"\s*{re.escape(before)}\s*({NAME})\s*(?:[^\w\s{{]\S*)?\s*")
        """The text before the arguments of a call that is no object, with its name."""
        self.object = re.compile(r"\s*\[?\s*\{" if form.opens.endswith("[") else r"\s*\{")
        first = re.match(r"<[^>]*>|\{", before)
        self.next = () if start or first is None else (first[0],)
        """The text with which a further call begins behind another one, if there is one."""
        ends = f"{form.after}{form.separator}{form.closes}"
        self.ends = tuple(re.findall(r"<[^>]*>|`+|[\],;]", ends))
        self.bare, self.id_chars, self.texts = form.bare, form.id_chars, form.starts


_NO_CALLS = ToolFormat("none", "", (), "", "")
_syntax = cache(_Syntax)
_marks = cache(_Marks)


@dataclass(slots=True)
class _Open:
    """A call that is being read."""

    raw: list[str]
    """The text so far, in parts, with the mark at which it began."""
    name: str = ""
    depth: int = 0
    """Braces and brackets that are open; within the object of a call 1, within its arguments 2 and more."""
    quoted: bool = False
    escaped: bool = False
    key: str | None = None
    value: list[str] = field(default_factory=list)
    """The text of the key, or behind it of the value, in parts."""
    arguments: list[str] = field(default_factory=list)
    flows: bool = False
    """True while the arguments are sent as they come."""
    call: Call | None = None
    """None until it is sent."""


class AnswerReader:
    """The `Reader` of a model's formats. One sequence."""

    def __init__(
        self, use: ToolUse | None, reasoning: ReasoningFormat | None, *, inside: bool = False
    ) -> None:
        """Without `use` and `reasoning` all is text. `inside`: the answer begins within its reasoning."""
        self._syntax = _syntax(use.format if use else _NO_CALLS)
        self._names: Collection[str] = use.functions if use else ()
        self._most = inf if use and use.parallel and use.mode != "named" else 1
        self._num_calls = 0
        self._begins = reasoning.begins if reasoning else ()
        self._ends = _marks(reasoning.ends if reasoning else ())
        self._state = self._think if inside else self._start
        self._open = _Open([])
        self._held = ""
        self._drops = inside
        """True where whitespace is left out, behind a mark."""
        self._tokens: list[Token] = []
        self._parts: list[Part] = []

    def feed(self, delta: Delta) -> list[Part]:
        """See `Reader`."""
        self._parts, size = [], 0
        for token in delta.tokens:
            self._tokens.append(token)
            self._read(token.text, ends=False)
            size += len(token.text)
        if delta.finish_reason is not None:
            self._read(delta.text[size:], ends=True)
            if self._tokens:
                self._emit(TextEvent("", ()))
        return self._parts

    def _read(self, text: str, *, ends: bool) -> None:
        self._held += text
        going = True
        while going:
            if self._drops:
                self._held = self._held.lstrip()
                self._drops = not self._held
            going = self._state(ends)

    def _emit(self, part: Part) -> None:
        """Add a part, or its text to that of the last one, with the tokens that have come since."""
        last: Any = self._parts[-1] if self._parts else None
        if isinstance(part, CallEvent) or type(last) is not type(part):
            self._parts.append(part)
            last = part
        else:
            last.text += part.text
        last.tokens += tuple(self._tokens)
        self._tokens.clear()

    # The states. Each takes what it can from `_held`, and returns True if another one can go on with the rest.

    def _start(self, ends: bool) -> bool:
        """The beginning of an answer, or of what follows its reasoning."""
        text = self._held.lstrip()
        space = self._held[: len(self._held) - len(text)]
        if len(space) <= MOST_SPACE:
            for mark in self._begins:
                if text.startswith(mark):
                    self._held, self._drops = text[len(mark) :], True
                    self._state = self._think
                    return True
            bare = ("{",) if self._syntax.bare else ()
            if bare and text.startswith(bare):
                self._held = text
                return self._begin(space)
            if not ends and any(one.startswith(text) for one in (*self._begins, *bare)):
                return False
        self._state = self._write
        return True

    def _think(self, ends: bool) -> bool:
        """Reasoning."""
        thought, mark, self._held = self._ends.split(self._held, ends=ends)
        if thought or (mark and self._tokens):
            self._emit(ReasoningEvent(thought, ()))
        if mark:
            self._begins, self._drops = (), True
            self._state = self._start
        return bool(mark)

    def _write(self, ends: bool) -> bool:
        """Text."""
        text, mark, self._held = self._held, "", ""
        if self._num_calls < self._most:
            text, mark, self._held = self._syntax.starts.split(text, ends=ends)
        if text:
            self._emit(TextEvent(text, ()))
        return bool(mark) and self._begin(mark)

    def _begin(self, mark: str) -> bool:
        self._open = _Open([mark])
        self._state = self._enter if self._syntax.is_object else self._name
        return True

    def _enter(self, ends: bool) -> bool:
        """The beginning of a call that is an object."""
        if found := self._syntax.object.match(self._held):
            self._held = self._held[found.end() :]
            self._open.raw.append(found[0])
            self._open.depth = 1
            self._state = self._scan
            return True
        if not ends and len(self._held) <= MOST_SPACE and not self._held.strip().strip("["):
            return False
        return self._fail(0)

    def _name(self, ends: bool) -> bool:
        """The name of a call that is no object."""
        size = self._held.find("{")
        if size < 0 and not ends and len(self._held) <= MOST_HEADER:
            return False
        found = self._syntax.header.fullmatch(self._held, 0, max(0, size))
        if not found or found[1] not in self._names or size > MOST_HEADER:
            return self._fail(0)
        self._held = self._held[size:]
        self._open = _Open([*self._open.raw, found[0]], found[1], 1, key=_ARGUMENTS[0])
        self._state = self._scan
        return True

    def _scan(self, ends: bool) -> bool:
        """The members of a call's object, or the arguments alone."""
        one, size = self._open, 0
        for text, char in _segments(one, self._held):
            size += len(text) + len(char)
            if char not in _DEPTHS:
                return self._fail(size - 1)
            if not self._step(text, char):
                return self._fail(size)
            if one.depth == self._syntax.least_depth:
                return self._finish(size)
        one.raw.append(self._held)
        self._held = ""
        return ends and self._fail(0)

    def _step(self, text: str, char: str) -> bool:
        """Take text up to a brace, bracket, colon or comma, and this. Returns False if it is of no call."""
        one = self._open
        if char == "{" and one.depth == 1 and self._may_flow(text):
            one.flows, text = True, ""
        one.depth += _DEPTHS[char]
        if one.flows:
            self._send(text + char)
            one.flows = one.depth > 1
        elif char and one.depth == (1 if char in ":," else 0):
            return self._member(char, text)
        else:
            one.value.append(text + char)
        return True

    def _may_flow(self, before: str) -> bool:
        """True if the object that begins can be sent as it comes. `before`: text before it."""
        one = self._open
        known = one.name and one.key in _ARGUMENTS and not one.arguments
        return bool(known) and not "".join([*one.value, before]).strip()

    def _send(self, arguments: str) -> Call:
        one = self._open
        if one.call is None:
            one.call = Call(one.name, self._num_calls, new_call_id(self._syntax.id_chars))
            self._num_calls += 1
            self._emit(CallEvent(one.call))
        if arguments:
            one.arguments.append(arguments)
            self._emit(ArgumentsEvent(one.call, arguments))
        return one.call

    def _member(self, end: str, text: str) -> bool:
        """Take a key or a value of the call's object. Returns False if it is none, or shows that this is no call."""
        one = self._open
        text = "".join([*one.value, text]).strip()
        one.value.clear()
        if one.key is None:
            if end != ":":
                return not text
            one.key = key = _loads(text)
            return isinstance(key, str) and (key in _KEYS or not self._syntax.bare)
        if end in ":]":
            return False
        key, one.key = one.key, None
        if key == "name":
            name = _loads(text)
            one.name = name if isinstance(name, str) and name in self._names else ""
            return bool(one.name)
        if key in _ARGUMENTS and text:
            fits, one.arguments = not one.arguments, [text]
            return fits
        return True

    def _finish(self, size: int) -> bool:
        """End a call with the next `size` characters, or fail."""
        one = self._open
        text = "".join(one.arguments)
        value = _loads(text)
        if isinstance(value, str):  # JSON in a string
            text, value = value, _loads(value)
        if text in ("", "null"):
            text, value = "{}", {}
        if not one.name or not isinstance(value, dict):
            return self._fail(size)
        call = one.call or self._send(text)
        call.arguments, call.whole = text, True
        call.raw = "".join([*one.raw, self._held[:size]])
        self._held, self._drops = self._held[size:], True
        self._state = self._after
        return True

    def _fail(self, size: int) -> bool:
        """Make text of what began as a call, with the next `size` characters."""
        one = self._open
        raw = "".join([*one.raw, self._held[:size]])
        self._held = self._held[size:]
        if one.call is None:
            self._emit(TextEvent(raw, ()))
        else:
            one.call.raw, one.call.arguments = raw, "".join(one.arguments)
        self._state = self._write
        return True

    def _after(self, ends: bool) -> bool:
        """Behind a call: its end, and perhaps another one."""
        text, syntax = self._held, self._syntax
        for mark in syntax.ends:
            if text.startswith(mark):
                self._held, self._drops = text[len(mark) :], True
                return True
        more = (*syntax.texts, *syntax.next) if self._num_calls < self._most else ()
        for mark in more:
            if text.startswith(mark):
                taken = 0 if mark in syntax.next else len(mark)
                self._held = text[taken:]
                return self._begin(text[:taken])
        if not ends and any(mark.startswith(text) for mark in (*syntax.ends, *more)):
            return False
        self._state = self._write
        return bool(text)


def _segments(one: _Open, text: str) -> Iterator[tuple[str, str]]:
    """The next text of a call as pairs: text, and a character outside of strings; "" at its end."""
    size = start = 0
    while size < len(text):
        found = (_IN_STRING if one.quoted else _OUTSIDE).search(text, size + one.escaped)
        one.escaped = False
        if found is None:
            break
        size = found.end()
        if one.quoted:
            one.escaped = one.quoted = found[0] == "\\"
        elif found[0] == '"':
            one.quoted = True
        else:
            yield text[start : found.start()], found[0]
            start = size
    yield text[start:], ""


def _loads(text: str) -> Any:  # noqa: ANN401
    """The value of a text of JSON; None if it is none."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def new_call_id(num_chars: int | None) -> str:
    """An id of a call, of so many letters and digits if a template asks for it."""
    return secrets.token_hex(16)[:num_chars] if num_chars else f"call_{secrets.token_hex(12)}"


def marked_ids(
    tokenizer: Tokenizer, *formats: ToolFormat | ReasoningFormat | None
) -> frozenset[int]:
    """The special tokens that are marks of formats."""
    ids = [tokenizer.special_id(mark) for one in formats if one for mark in one.marks]
    return frozenset([one for one in ids if one is not None])


def begins_within(
    reasoning: ReasoningFormat, prompt_ids: Sequence[int], tokenizer: Tokenizer
) -> bool:
    """True if a prompt ends with the beginning of the reasoning."""
    end = b"".join(map(tokenizer.token_bytes, prompt_ids[-_LAST_TOKENS:]))
    return end.decode(errors="ignore").rstrip().endswith(reasoning.begins)
