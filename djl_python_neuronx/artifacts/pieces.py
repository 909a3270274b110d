"""The bytes that each token id stands for, so that text grows by concatenation instead of decoding again."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_CONCATENATING = {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}
_SAMPLE_SIZE = 1000


def make_pieces(
    vocab: Mapping[str, int],
    added: Mapping[int, str],
    decoder: Mapping[str, Any],
    *,
    special_ids: Collection[int],
    decode: Callable[[Sequence[int]], str],
) -> list[bytes] | None:
    """UTF-8 bytes of every id (special and unused ones: empty), or None if text is not their concatenation.

    `added` tokens hide those of `vocab` with the same id. `decoder` is that part of tokenizer.json. The outcome is
    compared with `decode` on all added tokens and on a sample of the others; the start of a text is left out, because
    many decoders drop a space there.
    """
    rule = _rule(decoder)
    if rule is None or not vocab:
        return None
    pieces = [b""] * (max(*vocab.values(), *added) + 1)
    for token, token_id in vocab.items():
        pieces[token_id] = rule(token)
    for token_id, token in added.items():
        pieces[token_id] = b"" if token_id in special_ids else rule(token)
    sample = {*range(0, len(pieces), len(pieces) // _SAMPLE_SIZE + 1), *added}
    ids = [token_id for token_id in sorted(sample) if _is_text(pieces[token_id])]
    text = b"".join(pieces[token_id] for token_id in ids).decode()
    return pieces if decode(ids).lstrip(" ") == text.lstrip(" ") else None


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def _rule(decoder: Mapping[str, Any]) -> Callable[[str], bytes] | None:
    """How a decoder turns a token into bytes; None if that depends on the tokens around it."""
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level
    if not set(kinds) <= _CONCATENATING or any(
        "Regex" in step.get("pattern", {}) for step in steps
    ):
        return None
    swaps = [_swap(step) for step in steps if step["type"] in {"Replace", "Metaspace"}]
    has_bytes = "ByteFallback" in kinds

    def sentencepiece(token: str) -> bytes:
        if has_bytes and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in swaps:
            token = token.replace(old, new)
        return token.encode()

    return sentencepiece


def _swap(step: Mapping[str, Any]) -> tuple[str, str]:
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    return step["pattern"]["String"], step["content"]


def _byte_alphabet() -> dict[int, int]:
    """Code point that a byte-level vocabulary writes for a byte → the byte.

    Source: GPT-2's encoder: printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards, in
    order. Characters that stand for no byte map to one that Latin-1 lacks.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {
        **dict.fromkeys(others, 0xFFFF),
        **{byte: byte for byte in printable},
        **{0x100 + rank: byte for rank, byte in enumerate(others)},
    }


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_BYTE_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        # An added token in plain writing: the library's decoder takes it as it is, too.
        return token.encode()
