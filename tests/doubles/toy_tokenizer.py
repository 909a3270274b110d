"""A tokenizer for the toy backend: token 65 is "<65>", so text shows the ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from djl_python_neuronx.artifacts.tokenizer import _no_panic
from djl_python_neuronx.grammar import checked
from djl_python_neuronx.types import RENDERING, Rendering, Tokenizer


class ToyTokenizer:
    """Ids as text; ids below 3 are special (0 pad, 1 bos, 2 eos)."""

    special_ids = frozenset({0, 1, 2})
    eos_id: int | None = None
    template = ""

    def __init__(self, vocab_size: int = 300) -> None:
        self.pieces: Sequence[bytes] | None = [
            b"" if i in self.special_ids else f"<{i}>".encode() for i in range(vocab_size)
        ]

    def special_id(self, text: str) -> int | None:
        """eos is written <eos>."""
        return {"<eos>": 2}.get(text)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """BOS (1) if `special`, and the ids in the text; other characters one id each."""
        return [
            *([1] if special else []),
            *(
                int(found[1:-1]) if len(found) > 1 else 3 + ord(found) % 297
                for found in re.findall(r"<\d{1,9}>|.", text)
            ),
        ]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_chars: int | None = None,
        rendering: Rendering = RENDERING,
    ) -> list[int]:
        """All contents in a row."""
        contents = [message["content"] for message in messages]
        texts = [
            text if isinstance(text, str) else "".join(part["text"] for part in text)
            for text in contents
        ]
        return self.encode("".join(texts))

    def decode(self, ids: Sequence[int], *, skip: bool = True, spaces: bool = False) -> str:
        """The text of ids."""
        return "".join(
            f"<{i}>" if i not in self.special_ids else "" if skip else self.token_bytes(i).decode()
            for i in ids
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The text of an id; of 2 the special token's own."""
        return b"<eos>" if token_id == 2 else self.decode([token_id]).encode()

    def grammar(self, kind: str, text: str) -> str:
        """The form of a grammar that the engine takes."""
        return checked(kind, text)

    def close(self) -> None:
        """Do nothing."""


class PanickingTokenizer(ToyTokenizer):
    """Fails where a prompt has a ~ as the `tokenizers` library does, behind the class that wraps it."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """See `ToyTokenizer`."""
        if "~" in text:
            with _no_panic():
                Split(Regex("(a+)+$"), "isolated").pre_tokenize_str("a" * 40 + "b")
        return super().encode(text, special=special)


TOKENIZER: Tokenizer = ToyTokenizer()
