"""Which files are a tokenizer's. Apart from the tokenizer itself, whose import is not light: `check` asks too."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_SUFFIXES = (".model", ".tiktoken")


def has_vocabulary(names: Iterable[str]) -> bool:
    """True if one of the files that lie beside config.json is a tokenizer's."""
    return any(name in _VOCABULARIES or name.endswith(_SUFFIXES) for name in names)


def no_tokenizer(folder: Path) -> str:
    """What is wrong with a folder that has none, and what to do; without a full stop."""
    return (
        f"no tokenizer in {folder}: expected one of {', '.join(_VOCABULARIES)}, *.model or *.tiktoken. "
        "Copy the tokenizer's files beside config.json"
    )
