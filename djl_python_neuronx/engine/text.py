"""Tokens to text, one sequence at a time, on the output thread."""

from __future__ import annotations

from typing import NamedTuple

from djl_python_neuronx.engine.sampler import logprobs
from djl_python_neuronx.engine.spelling import make_speller
from djl_python_neuronx.errors import ServingError
from djl_python_neuronx.types import FinishReason, GenerationRequest, Tokenizer, TokenOutput


class Token(NamedTuple):
    """A generated token as the wire formats show it."""

    id: int
    text: str
    """What became readable with this token; "" while it is held back."""
    logprob: float | None
    special: bool


class Delta(NamedTuple):
    """What one step added to one request. Exactly one delta of a request is `finished`, its last.

    A tuple, because one is made per row and step: a frozen dataclass costs 1 µs more.
    """

    request_id: str
    text: str
    """Newly readable text: the concatenation over all deltas is the generated text."""
    tokens: tuple[Token, ...]
    finish_reason: FinishReason | None = None
    error: ServingError | None = None
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    """Generated so far, this delta included."""
    index: int = 0  # type: ignore[assignment]  # a field may hide tuple.index

    @property
    def finished(self) -> bool:
        """True for the last delta of a request."""
        return self.finish_reason is not None


class TextStream:
    """The text of one sequence, as it becomes readable. One thread at a time; O(1) per token at any length.

    The text is the same however the tokens are split into outputs: the concatenation of all `Delta.text` and that of
    all `Token.text`. Only an end that comes without a token releases what was held back in `Delta.text` alone.
    """

    __slots__ = (
        "_closed",
        "_held",
        "_num_generated",
        "_request",
        "_special_ids",
        "_speller",
        "_stopped",
        "_stops",
    )

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._special_ids = tokenizer.special_ids
        self._speller = make_speller(request.prompt_ids, tokenizer)
        self._stops = [_StopString(text) for text in request.stop_strings if text]
        self._held = ""
        self._num_generated = 0
        self._stopped: int | None = None
        self._closed = False

    @property
    def stopped(self) -> int | None:
        """Number of tokens up to and including the one that completed a stop string; None: none did."""
        return self._stopped

    def feed(self, output: TokenOutput) -> Delta | None:
        """What an output adds; None once the text has ended. Tokens behind a stop string are left out.

        The token that ended the sequence (eos or a stop token) is listed as special, without text.
        """
        if self._closed:
            return None
        reason = output.finish_reason
        ids = output.token_ids
        scores = None if output.logits is None else logprobs(output.logits, ids).tolist()
        tokens: list[Token] = []
        text, stopped = "", False
        last = len(ids) - 1 if reason is not None else -1
        for i, token_id in enumerate(ids):
            special = token_id in self._special_ids or (i == last and reason is FinishReason.EOS)
            shown = "" if special else self._speller.feed(token_id)
            if self._stops or i == last:
                shown, stopped = self._show(shown, ends=i == last)
            tokens.append(
                Token(token_id, shown, scores[i] if scores is not None else None, special)
            )
            text += shown
            if stopped:
                break
        self._num_generated += len(tokens)
        if reason is not None and not ids:
            text, stopped = self._show("", ends=True)
        if stopped:
            self._stopped = self._num_generated
            reason = FinishReason.STOP
        self._closed = reason is not None
        return Delta(
            self._request.request_id,
            text,
            tuple(tokens),
            reason,
            output.error,
            len(self._request.prompt_ids),
            self._num_generated,
            output.index,
        )

    def _show(self, text: str, *, ends: bool) -> tuple[str, bool]:
        """What becomes readable with `text`, and whether a stop string ends it there.

        Text that could still become a stop string is held back until `ends`.
        """
        if ends:
            text += self._speller.flush()
        if not self._stops:
            return text, False
        pending = self._held + text
        found = [
            (end, -len(stop.text))
            for stop in self._stops
            if (end := stop.find_end(text)) is not None
        ]
        if found:
            end, negative_len = min(found)  # the first to end, of those the longest
            return pending[: len(self._held) + end + negative_len], True
        readable = (
            len(pending) if ends else len(pending) - max(stop.matched for stop in self._stops)
        )
        self._held = pending[readable:]
        return pending[:readable], False


class _StopString:
    """Finds a stop string in text that comes in parts (Knuth-Morris-Pratt: O(1) per character for any string)."""

    __slots__ = ("_borders", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        """Characters at the end of the text so far that the stop string begins with."""
        # For each prefix: its longest proper prefix that is also its suffix.
        self._borders = [0]
        for char in text[1:]:
            self._borders.append(self._extend(self._borders[-1], char))

    def find_end(self, part: str) -> int | None:
        """Where in the next part of the text the stop string ends; None: not yet."""
        position = 0
        while position < len(part):
            if self.matched == 0:
                position = part.find(self.text[0], position)
                if position < 0:
                    return None
            self.matched = self._extend(self.matched, part[position])
            position += 1
            if self.matched == len(self.text):
                return position
        return None

    def _extend(self, matched: int, char: str) -> int:
        while matched and self.text[matched] != char:
            matched = self._borders[matched - 1]
        return matched + (self.text[matched] == char)
