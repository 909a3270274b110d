"""How much of a search or of a grid a run does: a part that each change can wait for, or all with `--nightly`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
_nightly = False
SHARE = 4
"""Of what `--nightly` does, a run without it does one part of so many."""


def choose(*, nightly: bool) -> None:
    """Set it for this run; called before test modules are imported."""
    global _nightly
    _nightly = nightly


def examples(most: int) -> int:
    """Number of examples of a property, of which `--nightly` tries `most`."""
    return most if _nightly else most // SHARE


def some(items: Sequence[T], turn: int) -> Sequence[T]:
    """Every fourth of the items, others in the next turn; all with `--nightly`."""
    return items if _nightly else items[turn % SHARE :: SHARE]
