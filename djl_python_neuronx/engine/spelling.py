"""Token ids to text, id by id and never half a character."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from djl_python_neuronx.types import Tokenizer

_REPLACEMENT = "\ufffd"

_CONTEXT_TOKENS = 6
"""Tokens of the prompt that the first token's text may depend on."""

_MAX_PENDING_TOKENS = 8
"""More than a character's 4 bytes can take: what is still no text then, never will be."""


class Speller(Protocol):
    """Writes the text of one sequence."""

    def feed(self, token_id: int) -> str:
        """What a token that is not special makes readable; "" while a character is incomplete."""

    def flush(self) -> str:
        """What is left at the end: an incomplete character becomes U+FFFD."""


def make_speller(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> Speller:
    """The cheapest speller for a tokenizer. Together with the prompt's, its text is that of `Tokenizer.decode`."""
    if tokenizer.pieces is None:
        return _WindowSpeller(prompt_ids, tokenizer)
    return _TableSpeller(prompt_ids, tokenizer, tokenizer.pieces)


class _TableSpeller:
    """Looks the bytes up and lets out whole characters: 0.3 µs per token."""

    __slots__ = ("_at_start", "_partial", "_pieces", "_tokenizer")

    def __init__(
        self, prompt_ids: Sequence[int], tokenizer: Tokenizer, pieces: Sequence[bytes]
    ) -> None:
        self._tokenizer = tokenizer
        self._pieces = pieces
        self._partial = b""
        self._at_start = not any(self._piece(token_id) for token_id in prompt_ids)

    def feed(self, token_id: int) -> str:
        """See `Speller`."""
        piece = self._piece(token_id)
        if self._at_start and piece:
            piece = self._first(token_id, piece)
        if self._partial:
            piece = self._partial + piece
        text, used = utf_8_decode(piece, "replace", False)
        self._partial = piece[used:]
        return text

    def flush(self) -> str:
        """See `Speller`."""
        text, _ = utf_8_decode(self._partial, "replace", True)
        self._partial = b""
        return text

    def _piece(self, token_id: int) -> bytes:
        # Models are often padded beyond their tokenizer's vocabulary.
        return self._pieces[token_id] if token_id < len(self._pieces) else b""

    def _first(self, token_id: int, piece: bytes) -> bytes:
        """The piece as it looks at the very start of a text, where many decoders drop its space."""
        self._at_start = False
        if not piece.startswith(b" "):
            return piece
        shown = self._tokenizer.decode([token_id])
        return b" " * (len(shown) - len(shown.lstrip(" "))) + piece.lstrip(b" ")


class _WindowSpeller:
    """Decodes a short window again for each token and takes what is new: for tokenizers without a table.

    The window is the tokens that became text last, as context, and those that have not yet.
    """

    __slots__ = ("_num_context", "_special_ids", "_tokenizer", "_window")

    def __init__(self, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special_ids = tokenizer.special_ids
        # Without special ids: a context that has no text would make the next token look like the start of one.
        written = (
            token_id for token_id in reversed(prompt_ids) if token_id not in self._special_ids
        )
        self._window = list(islice(written, _CONTEXT_TOKENS))[::-1]
        self._num_context = len(self._window)

    def feed(self, token_id: int) -> str:
        """See `Speller`."""
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
        """See `Speller`."""
        text = self._new_text()
        self._num_context = len(self._window)
        return text

    def _new_text(self) -> str:
        known = self._tokenizer.decode(self._window[: self._num_context])
        return self._tokenizer.decode(self._window)[len(known) :]
