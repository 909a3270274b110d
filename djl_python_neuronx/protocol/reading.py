"""The reader of answers: text as it comes, into reasoning, text and calls of tools.

The events are the same however the text is divided into tokens, and each character is looked at a bounded number of
times. Whitespace beside marks is part of nothing, but for that between texts, once. What begins as a call and is none
comes back as text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import Any

from djl_python_neuronx.engine.detokenizer import Delta, Token
from djl_python_neuronx.grammar import BARE
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
MOST_HEAD = 512
"""Most characters of a call before arguments that are sent as they come, and of an object behind them."""
_LAST_TOKENS = 16
"""Tokens at the end of a prompt that may have a mark of the reasoning: one may be of a single letter."""
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r"[^\s\w\[\]:,.+-]")
"""Outside strings: quotes, braces, and what no JSON has, as an end mark where a brace is missing."""
_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"'
_REST = re.compile(rf"(?s)(?:\s*,\s*{_STRING}\s*:\s*(?:{_STRING}|[\w.+-]+))*\s*\}}")
"""The rest of an object, behind the arguments."""
_REST_BEGUN = re.compile(r'(?s)\s*(?:,\s*(?:".*)?)?')
_OBJECT_HEAD = rf"(?:\s*\[)?{BARE % f'({NAME})'}\s*(?=\{{)"
_KEYS = "name|type|id|arguments|parameters"
_NO_OBJECT = re.compile(rf'\s*(?:\[\s*)?(?:[^\s\[{{]|\{{\s*(?:[^\s"]|"(?!(?:{_KEYS})")[^"]*"))')
"""A beginning that is none of a call: the first key is another."""
_NO_NAME = re.compile(r"[^{]*\{")


def _any_of(texts: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))


class _Marks:
    """Some texts to be found in text that grows, with the whitespace before them."""

    def __init__(self, texts: Iterable[str]) -> None:
        space = rf"\s{{0,{MOST_SPACE}}}"
        begun = {one[:i] for one in texts for i in range(len(one))}
        self._whole = re.compile(f"{space}(?:{_any_of(texts)})" if begun else "(?!)")
        self._begun = re.compile(rf"{space}(?:{_any_of(begun)})\Z" if begun else r"\Z")
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
        self.starts = _marks(form.starts)
        start = next(filter(form.before.startswith, form.starts), "")
        before = form.before.removeprefix(start)
        self.is_object = '"' in before
        begin = rf"\s*{re.escape(before)}" if before else ""
        # No run of characters has two ways to match: a head is matched again with each token.
        named = rf"{begin}\s*({NAME})(?![\w.:-])\s*(?:[^\w\s{{][^\s{{]*\s*)?(?=\{{)"
        self.head = re.compile(_OBJECT_HEAD if self.is_object else named)
        self.no_head = _NO_OBJECT if self.is_object else _NO_NAME
        self.bare = ("{",) if form.bare else ()
        self.next = () if start else tuple(re.findall(r"^(?:<[^>]*>|\{)", before))
        """The text with which a further call begins behind another one, if there is one."""
        ends = f"{form.after}{form.separator}{form.closes}"
        self.ends = tuple(re.findall(r"<[^>]*>|`+|[\],;]", ends))
        self.id_chars = form.id_chars


_NO_CALLS = ToolFormat("none", "", (), "", "")
_marks = cache(_Marks)
_syntax = cache(_Syntax)


@dataclass(slots=True)
class _Open:
    """A call that is being read."""

    raw: list[str]
    """The text so far, in parts; the first is the mark at which it began."""
    size: int = 0
    """Characters behind the mark that were looked at."""
    depth: int = 0
    """Braces that are open."""
    quoted: bool = False
    escaped: bool = False
    arguments: list[str] = field(default_factory=list)
    call: Call | None = None
    """None until it is sent."""


class AnswerReader:
    """The `Reader` of a model's formats. One sequence."""

    def __init__(
        self,
        use: ToolUse | None,
        reasoning: ReasoningFormat | None,
        *,
        inside: bool = False,
        separate: bool = True,
        is_held: bool = False,
    ) -> None:
        """Without `use` and `reasoning` all is text. `inside`: the answer begins within its reasoning.

        `separate`: False makes the reasoning text, with its marks; there are no calls in it all the same.
        `is_held`: a grammar holds the calls, and one without a mark begins as there (`grammar.BARE`).
        """
        self._separates, self._is_held = separate, is_held
        self._syntax = _syntax(use.format if use else _NO_CALLS)
        self._names: Collection[str] = use.functions if use else ()
        self._most = inf if use and use.parallel and use.mode != "named" else 1
        self._num_calls = 0
        self._begins = reasoning.begins if reasoning else ()
        self._ends = _marks(reasoning.ends if reasoning else ())
        self._leads = _marks((*self._begins, *self._syntax.bare))
        self._state = self._think if inside else self._lead
        self._open = _Open([])
        self._held, self._drops = "", inside and separate
        """Text that no state has taken yet; True where its whitespace is left out, behind a mark."""
        self._has_text, self._before, self._behind = False, "", ""
        """True behind text; the whitespace that was left out before and behind the last call."""
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
                kept = self._held.lstrip()
                self._behind += self._held.removesuffix(kept)
                self._held, self._drops = kept, not kept
            going = self._state(ends)

    def _emit(self, part: Part) -> None:
        """Add a part, or its text to that of the last one, with the tokens that have come since."""
        if isinstance(part, TextEvent) and part.text:
            part.text, self._has_text = self._gap() + part.text, True
        last: Any = self._parts[-1] if self._parts else None
        if isinstance(part, CallEvent) or type(last) is not type(part):
            self._parts.append(part)
            last = part
        else:
            last.text += part.text
        last.tokens += tuple(self._tokens)
        self._tokens.clear()

    def _gap(self) -> str:
        """Take the whitespace between text and what follows calls: that behind the last one, or before it."""
        gap = (self._behind or self._before) if self._has_text else ""
        self._before = self._behind = ""
        return gap

    # The states. Each takes what it can from `_held`, and returns True if another one can go on with the rest.

    def _lead(self, ends: bool) -> bool:
        """The beginning of an answer, or of what follows its reasoning or a call."""
        text, mark, rest = self._leads.split(self._held, ends=ends)
        if text:
            self._state = self._write
            return True
        known = mark.lstrip()
        if known in self._begins:
            self._held, self._drops, self._state = rest, self._separates, self._think
            if not self._separates:
                self._emit(TextEvent(mark, ()))
        elif known in self._syntax.ends:
            self._held, self._drops, self._behind = rest, True, ""
        elif mark:
            self._held = known + rest
            self._begin(mark.removesuffix(known))
        return bool(mark)

    def _think(self, ends: bool) -> bool:
        """Reasoning."""
        thought, mark, self._held = self._ends.split(self._held, ends=ends)
        text = thought if self._separates else thought + mark
        if text or (mark and self._tokens):
            self._emit((ReasoningEvent if self._separates else TextEvent)(text, ()))
        if mark:
            self._begins, self._drops = (), self._separates
            self._leads, self._state = _marks(self._syntax.bare), self._lead
        return bool(mark)

    def _write(self, ends: bool) -> bool:
        """Text."""
        text, mark, self._held = self._held, "", ""
        if self._num_calls < self._most:
            text, mark, self._held = self._syntax.starts.split(text, ends=ends)
        if text:
            self._emit(TextEvent(text, ()))
        if mark:
            self._begin(mark)
        return bool(mark)

    def _begin(self, mark: str) -> None:
        self._open, self._state = _Open([self._gap() + mark]), self._enter

    def _enter(self, ends: bool) -> bool:
        """A call up to its arguments; or all of it, if these come before its name, or in a string."""
        one, syntax = self._open, self._syntax
        text, self._held = self._held, ""
        one.raw.append(text)
        if one.size < MOST_HEAD:
            begun = "".join(one.raw[1:])
            found = syntax.head.match(begun[:MOST_HEAD])
            if found and found[1] in self._names:
                self._open = _Open([one.raw[0], found[0]], depth=syntax.is_object)
                self._held, self._state = begun[found.end() :], self._flow
                self._announce(found[1])
                return True
            if found or syntax.no_head.match(begun[:MOST_HEAD]):
                return self._fail()
        one.size += len(text)
        if not syntax.is_object:
            return (ends or one.size >= MOST_HEAD) and self._fail()
        size, closes = self._close(text, 0)
        one.raw[-1], self._held = text[:size], text[size:]
        if not closes:
            return (ends or closes is False) and self._cut()
        whole = "".join(one.raw[1:])
        name, arguments = _call(whole)
        is_free = self._is_held and not one.raw[0].strip() and not syntax.head.match(whole)
        if name in self._names and _is_object(arguments) and not is_free:
            self._announce(name)
            self._send(arguments)
        return self._finish()

    def _flow(self, ends: bool) -> bool:
        """The arguments of a call, sent as they come."""
        size, closes = self._close(self._held, int(self._syntax.is_object))
        part, self._held = self._held[:size], self._held[size:]
        self._open.raw.append(part)
        self._send(part)
        if not closes:
            return (ends or closes is False) and self._cut()
        self._state = self._rest
        return True

    def _rest(self, ends: bool) -> bool:
        """The rest of an object, behind the arguments. They are whole already: its end may be missing."""
        size, begun = 0, self._held[:MOST_HEAD]
        if self._syntax.is_object:
            if found := _REST.match(begun):
                size = found.end()
            elif not ends and len(begun) < MOST_HEAD and _REST_BEGUN.fullmatch(begun):
                return False
        self._open.raw.append(self._held[:size])
        self._held = self._held[size:]
        return self._finish()

    def _close(self, text: str, depth: int) -> tuple[int, bool | None]:
        """Count the braces of a call's next text.

        Returns the size of what is of the call, and True if that closes all braces but `depth`, False if what follows
        can be of no JSON, None if all of the text is of the call.
        """
        one, size = self._open, 0
        while size < len(text):
            found = (_IN_STRING if one.quoted else _OUTSIDE).search(text, size + one.escaped)
            one.escaped = False
            if found is None:
                break
            char, size = found[0], found.end()
            if one.quoted:
                one.escaped = one.quoted = char == "\\"
            elif char == '"':
                one.quoted = True
            elif char in "{}":
                one.depth += 1 if char == "{" else -1
                if one.depth <= depth:
                    return size, True
            else:
                return size - 1, False
        return len(text), None

    def _announce(self, name: str) -> None:
        self._open.call = Call(name, self._num_calls, _new_call_id(self._syntax.id_chars))
        self._num_calls += 1
        self._emit(CallEvent(self._open.call))

    def _send(self, arguments: str) -> None:
        if arguments and self._open.call is not None:
            self._open.arguments.append(arguments)
            self._emit(ArgumentsEvent(self._open.call, arguments))

    def _finish(self) -> bool:
        """End a call, of which all text was taken."""
        call, syntax = self._open.call, self._syntax
        if call is not None:
            call.whole = _is_object("".join(self._open.arguments))
        self._cut()
        if call is not None and call.whole:
            more = syntax.next if self._num_calls < self._most else ()
            self._leads, self._state = _marks((*syntax.ends, *more)), self._lead
            mark = self._open.raw[0]
            self._drops, self._before = True, mark.removesuffix(mark.lstrip())
        return True

    def _cut(self) -> bool:
        """Keep the text of a call; it comes back as text if the call is not whole."""
        one = self._open
        raw = "".join(one.raw)
        if not one.call and not one.raw[0].strip():
            return self._fail()  # JSON at the beginning, in which a call may have its mark
        if one.call is None:
            self._emit(TextEvent(raw, ()))
        else:
            one.call.raw, one.call.arguments = raw, "".join(one.arguments)
        self._state = self._write
        return True

    def _fail(self) -> bool:
        """Go on with text behind the mark, which begins no call."""
        mark, *rest = self._open.raw
        if mark:
            self._emit(TextEvent(mark, ()))
        self._held, self._state = "".join([*rest, self._held]), self._write
        return True


def _call(text: str) -> tuple[str, str]:
    """Name and arguments, as JSON, of a call that is an object; empty where it has none."""
    try:
        found = json.loads(text[text.index("{") :])
        name, arguments = found.get("name"), found.get("arguments", found.get("parameters"))
        if not isinstance(arguments, str):  # which is JSON in a string
            arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    except (ValueError, RecursionError):
        return "", ""
    return name if isinstance(name, str) else "", arguments or "{}"


def _is_object(text: str) -> bool:
    """True for JSON of an object, with numbers of any size, and without halves of characters, which no answer has."""
    try:
        found = json.loads(text, parse_int=float, parse_constant=int)
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict)


def _new_call_id(num_chars: int | None) -> str:
    """An id of a call, of so many letters and digits if a template asks for it."""
    return secrets.token_hex(16)[:num_chars] if num_chars else f"call_{secrets.token_hex(12)}"


def special_marks(
    tokenizer: Tokenizer, *formats: ToolFormat | ReasoningFormat | None
) -> dict[str, int]:
    """The ids of special tokens that are marks of formats, by their text."""
    ids = {mark: tokenizer.special_id(mark) for one in formats if one for mark in one.marks}
    return {mark: one for mark, one in ids.items() if one is not None}


def is_thinking(
    reasoning: ReasoningFormat, prompt_ids: Sequence[int], tokenizer: Tokenizer
) -> bool | None:
    """True if a prompt ends with the beginning of the reasoning, False if it ends with its end, else None."""
    end = b"".join(map(tokenizer.token_bytes, prompt_ids[-_LAST_TOKENS:]))
    text = end.decode(errors="ignore").rstrip()
    if text.endswith(reasoning.begins):
        return True
    return False if text.endswith(reasoning.ends) else None
