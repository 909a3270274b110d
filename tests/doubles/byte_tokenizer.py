"""A tokenizer whose tokens are bytes, and pieces of JSON and of letters that have several."""

from __future__ import annotations

from collections.abc import Sequence

from tests.doubles.toy_tokenizer import ToyTokenizer

_PIECES = (
    'true false null the and of to {" ": ", ", [" "] "} }, ], : , 12 07 -1 .5 e+ \\\\ \\" \\n ab abc cab aa ba '
    "an id name é ß 日"
)


class ByteTokenizer(ToyTokenizer):
    """Ids 0 to 2 are special as in `ToyTokenizer`, 3 to 258 the bytes, those behind them pieces."""

    def __init__(self, vocab_size: int = 300) -> None:
        single = [bytes([i]) for i in range(256)]
        pieces = [b"", b"", b"", *single, *(one.encode() for one in _PIECES.split())]
        self.pieces = (pieces + [b""] * vocab_size)[:vocab_size]

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """BOS (1) if `special`, and an id for each byte."""
        return [*([1] if special else []), *(3 + byte for byte in text.encode())]

    def decode(self, ids: Sequence[int], *, skip: bool = True, spaces: bool = False) -> str:
        """The text of ids."""
        assert self.pieces is not None
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of an id; of special ones a name."""
        assert self.pieces is not None
        return f"<{token_id}>".encode() if token_id < 3 else self.pieces[token_id]
