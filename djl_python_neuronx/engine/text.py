"""Tokens to text, one sequence at a time, on the output thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from djl_python_neuronx.errors import ServingError
from djl_python_neuronx.types import FinishReason


class Token(NamedTuple):
    """A generated token as the wire formats show it."""

    id: int
    text: str
    """What became readable with this token; "" while it is held back."""
    logprob: float | None
    special: bool


@dataclass(frozen=True)
class Delta:
    """What one step added to one request. Exactly one delta of a request is `finished`, its last."""

    request_id: str
    text: str
    """Newly readable text: the concatenation over all deltas is the generated text."""
    tokens: tuple[Token, ...]
    finish_reason: FinishReason | None = None
    error: ServingError | None = None
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    """Generated so far, this delta included."""
    index: int = 0

    @property
    def finished(self) -> bool:
        """True for the last delta of a request."""
        return self.finish_reason is not None
