"""Detokenizer: token ids to text, one sequence at a time, never half a character. Output thread."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from djl_python_neuronx.errors import ServingError
from djl_python_neuronx.types import (
    FinishReason,
    GenerationRequest,
    Scored,
    Tokenizer,
    TokenOutput,
)

_REPLACEMENT = "\ufffd"

_CONTEXT_TOKENS = 6
"""Tokens of the prompt that the first token's text may depend on."""

_MAX_PENDING_TOKENS = 8
"""A character has at most 4 bytes, so this many tokens without text never become text."""


class Token(NamedTuple):
    """A generated token, as in the wire formats."""

    id: int
    text: str
    """Text that became readable with this token; "" while it is held back."""
    logprob: float | None
    special: bool
    top: tuple[Token, ...] = ()
    """The most likely tokens in its place, the likeliest first: `GenerationRequest.top_logprobs` of them. Their texts
    are those of the tokens by themselves: `Tokenizer.token_bytes`, with U+FFFD for a part of a character."""
    rank: int | None = 0
    """Of a token of the prompt, see `Scored.ranks`; None: the first one, which has no score."""


class Delta(NamedTuple):
    """The text and tokens that one step added to one request. Exactly one delta of a request is `finished`: its last.

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
    num_cached_tokens: int = 0
    """Tokens of the prompt that were in the cache and not run again."""
    prompt: tuple[Token, ...] = ()
    """The next tokens of the prompt, from the second on, with their scores; nothing else comes with them."""
    stop: str = ""
    """The stop string that ended the text, if one did."""

    @property
    def finished(self) -> bool:
        """True for the last delta of a request."""
        return self.finish_reason is not None


class TextStream:
    """The text of one sequence, up to a stop string. One thread at a time; O(1) per token at any length.

    The text is the same however the tokens are split into outputs: the concatenation of all `Delta.text` equals that of
    all `Token.text`, except at an end without a token, where only `Delta.text` has the text held back so far.
    """

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._special_ids = tokenizer.special_ids
        self._skips = request.skips_special
        self._detokenizer = _make_detokenizer(request, tokenizer)
        self._min_tokens = request.sampling.num_unending(len(request.prompt_ids))
        self._stops = [_StopString(text) for text in request.stop_strings if text]
        found = {tokenizer.special_id(text): text for text in request.stop_strings}
        self.stop_tokens = {
            token_id: text for token_id, text in found.items() if token_id is not None
        }
        """Special tokens that are stop strings, with their text."""
        self._shown_ends = request.stop_token_ids if request.include_stop else frozenset()
        self._held = ""
        self.num_generated = 0
        """Tokens fed so far, up to a stop string."""
        self.num_cached = 0
        """See `Delta.num_cached_tokens`; set from outside."""
        self._num_scored = 1
        """Tokens of the prompt up to which its scores are known; the first one has none."""
        self._closed = False

    def feed(self, output: TokenOutput) -> Delta | None:
        """The delta of an output, or None once the text has ended. Tokens after a stop string are left out.

        The token that ended the sequence (eos or a stop token) is marked special and has no text, but see
        `GenerationRequest.include_stop`.
        """
        if self._closed:
            return None
        if output.scored is not None:
            return self._score(output, output.scored)
        reason = output.finish_reason
        ids = output.token_ids
        scores, top = output.logprobs, output.top
        tokens: list[Token] = []
        text, stop = "", ""
        last = len(ids) - 1 if reason is not None else -1
        for i, token_id in enumerate(ids):
            ends = i == last and reason is FinishReason.EOS
            special = token_id in self._special_ids or (ends and token_id not in self._shown_ends)
            skipped = self._skips and token_id not in self._request.shown_ids
            hidden = special and (skipped or (ends and not self._request.include_stop))
            shown = "" if hidden else self._detokenizer.feed(token_id)
            if self._stops or i == last:
                early = self.num_generated + i < self._min_tokens
                shown, stop = self._show(shown, ends=i == last, early=early)
            if ends and hidden and self._request.include_stop:
                shown += self.stop_tokens.get(token_id, "")
            score = scores[i] if scores is not None else None
            others = self._named(top[i]) if top else ()
            tokens.append(Token(token_id, shown, score, special, others))
            text += shown
            if stop:
                break
        self.num_generated += len(tokens)
        if reason is not None and not ids:
            early = self.num_generated <= self._min_tokens
            text, stop = self._show("", ends=True, early=early)
        reason = FinishReason.STOP if stop else reason
        self._closed = reason is not None
        return Delta(
            self._request.request_id,
            text,
            tuple(tokens),
            reason,
            output.error,
            len(self._request.prompt_ids),
            self.num_generated,
            min(self.num_cached, len(self._request.prompt_ids)),
            stop=self.stop_tokens.get(ids[-1], "") if ids and reason is FinishReason.EOS else stop,
        )

    def use(self, tokenizer: Tokenizer) -> None:
        """Go on with another tokenizer of the same model."""
        self._tokenizer = self._detokenizer.tokenizer = tokenizer

    @property
    def lacks_scores(self) -> bool:
        """True until all scores of the prompt that the request wants are known."""
        request = self._request
        return request.scores_prompt is not None and self._num_scored < len(request.prompt_ids)

    def _score(self, output: TokenOutput, scored: Scored) -> Delta:
        """The delta with the tokens of an output that are new: another engine scores a prompt from its start."""
        request, skipped = self._request, max(0, self._num_scored - scored.start)
        self._num_scored += max(0, len(scored.ids) - skipped)
        tokens = self._named(zip(scored.ids, output.logprobs or (), strict=True))
        top = map(self._named, output.top or [()] * len(tokens))
        scores = [
            token._replace(top=others, rank=rank)
            for token, others, rank in zip(tokens, top, scored.ranks, strict=True)
        ]
        delta = Delta(request.request_id, "", (), num_prompt_tokens=len(request.prompt_ids))
        return delta._replace(prompt=tuple(scores[skipped:]))

    def _named(self, scores: Iterable[tuple[int, float]]) -> tuple[Token, ...]:
        """Tokens with their text."""
        text_of, special_ids = self._tokenizer.token_bytes, self._special_ids
        return tuple(
            [
                Token(one, text_of(one).decode(errors="replace"), score, one in special_ids)
                for one, score in scores
            ]
        )

    def _show(self, text: str, *, ends: bool, early: bool) -> tuple[str, str]:
        """The text that becomes readable with `text`, and the stop string that ends it there; none does `early`.

        Text that could still become a stop string is held back until `ends`.
        """
        if ends:
            text += self._detokenizer.flush()
        if not self._stops:
            return text, ""
        pending = self._held + text
        found = [
            (end, -len(stop.text), stop.text)
            for stop in self._stops
            if (end := stop.find_end(text, early=early)) is not None
        ]
        if found:
            end, negative_len, stop_text = min(found)  # the first to end, of those the longest
            cut = 0 if self._request.include_stop else negative_len
            return pending[: len(self._held) + end + cut], stop_text
        shows = ends or self._request.include_stop
        held_back = 0 if shows else max(stop.matched for stop in self._stops)
        readable = len(pending) - held_back
        self._held = pending[readable:]
        return pending[:readable], ""


class _StopString:
    """Finds a stop string in text that comes in parts (Knuth-Morris-Pratt: O(1) per character for any string)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        """Characters at the end of the text so far that are a beginning of the stop string."""
        # For each prefix: its longest proper prefix that is also its suffix. Made as far as the text has matched: to
        # make all of 64 strings of 1000 characters for 128 sequences takes 1.5 s (2 vCPU, 2026-11-23).
        self._borders = [0]

    def find_end(self, part: str, *, early: bool = False) -> int | None:
        """The index in the next part of the text where the stop string ends. Returns None if it does not end there.

        `early`: go on behind its end.
        """
        position = 0
        while position < len(part):
            if self.matched == 0:
                position = part.find(self.text[0], position)
                if position < 0:
                    return None
            self.matched = self._extend(self.matched, part[position])
            position += 1
            if self.matched == len(self.text):
                if not early:
                    return position
                self.matched = self._border(self.matched)
        return None

    def _extend(self, matched: int, char: str) -> int:
        while matched and self.text[matched] != char:
            matched = self._border(matched)
        return matched + (self.text[matched] == char)

    def _border(self, length: int) -> int:
        borders = self._borders
        while len(borders) < length:
            borders.append(self._extend(borders[-1], self.text[len(borders)]))
        return borders[length - 1]


class Detokenizer(Protocol):
    """The text of one sequence, token by token."""

    tokenizer: Tokenizer

    def feed(self, token_id: int) -> str:
        """Text that becomes readable with a token that is not special; "" while a character is incomplete."""

    def flush(self) -> str:
        """Remaining text at the end: an incomplete character becomes U+FFFD."""


def _make_detokenizer(request: GenerationRequest, tokenizer: Tokenizer) -> Detokenizer:
    """The cheapest detokenizer for a tokenizer. The prompt's text and its text together equal `Tokenizer.decode`."""
    ids, spaces = request.prompt_ids, request.spaces_special
    shown_ids = request.shown_ids if request.skips_special else tokenizer.special_ids
    if tokenizer.pieces is None:
        return _WindowDetokenizer(ids, tokenizer, shown_ids, spaces=spaces)
    return _TableDetokenizer(ids, tokenizer, tokenizer.pieces, shown_ids)


class _TableDetokenizer:
    """Looks up the bytes of each token and returns whole characters: 0.3 µs per token."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        tokenizer: Tokenizer,
        pieces: Sequence[bytes],
        shown_ids: frozenset[int],
    ) -> None:
        """`shown_ids`: special tokens that show their names."""
        self.tokenizer = tokenizer
        self._pieces = pieces
        self._named = shown_ids
        self._partial = b""
        self._at_start = not any(self._piece(token_id) for token_id in prompt_ids)

    def feed(self, token_id: int) -> str:
        """See `Detokenizer`."""
        piece = self._piece(token_id)
        if self._at_start and piece:
            piece = self._first(token_id, piece)
        if self._partial:
            piece = self._partial + piece
        text, used = utf_8_decode(piece, "replace", False)
        self._partial = piece[used:]
        return text

    def flush(self) -> str:
        """See `Detokenizer`."""
        text, _ = utf_8_decode(self._partial, "replace", True)
        self._partial = b""
        return text

    def _piece(self, token_id: int) -> bytes:
        # Models are often padded beyond their tokenizer's vocabulary.
        piece = self._pieces[token_id] if token_id < len(self._pieces) else b""
        if not piece and token_id in self._named:
            return self.tokenizer.token_bytes(token_id)
        return piece

    def _first(self, token_id: int, piece: bytes) -> bytes:
        """The bytes of a token at the very start of a text, where many decoders drop its space."""
        self._at_start = False
        if not piece.startswith(b" "):
            return piece
        shown = self.tokenizer.decode([token_id])
        return b" " * (len(shown) - len(shown.lstrip(" "))) + piece.lstrip(b" ")


class _WindowDetokenizer:
    """Decodes a short window again for each token and returns what is new: for tokenizers without a table.

    The window is the latest tokens that became text, as context, and those that have not yet.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        tokenizer: Tokenizer,
        shown_ids: frozenset[int],
        *,
        spaces: bool,
    ) -> None:
        """`shown_ids`: special tokens that show their names."""
        self.tokenizer = tokenizer
        self._special_ids = tokenizer.special_ids - shown_ids
        # The window has none of the others.
        self._how = {"skip": not shown_ids, "spaces": spaces}
        # Without special ids: a context that has no text would make the next token look like the start of one.
        written = (one for one in reversed(prompt_ids) if one not in self._special_ids)
        self._window = list(islice(written, _CONTEXT_TOKENS))[::-1]
        self._num_context = len(self._window)

    def feed(self, token_id: int) -> str:
        """See `Detokenizer`."""
        if token_id in self._special_ids:
            return ""
        self._window.append(token_id)
        text = self._new_text()
        is_whole = bool(text) and not text.endswith(_REPLACEMENT)
        if not is_whole and len(self._window) - self._num_context < _MAX_PENDING_TOKENS:
            return ""
        del self._window[: self._num_context]
        self._num_context = len(self._window)
        return text

    def flush(self) -> str:
        """See `Detokenizer`."""
        text = self._new_text()
        self._num_context = len(self._window)
        return text

    def _new_text(self) -> str:
        known = self.tokenizer.decode(self._window[: self._num_context], **self._how)
        return self.tokenizer.decode(self._window, **self._how)[len(known) :]
