"""What crosses the border between the wire side and the engine: requests in, tokens out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from djl_python_neuronx.errors import ServingError
from djl_python_neuronx.sampling import SamplingParams


class FinishReason(str, Enum):
    """Why a sequence ended. The values are LMI's words; other protocols map them."""

    LENGTH = "length"
    EOS = "eos_token"
    STOP = "stop_sequence"
    ERROR = "error"


@dataclass(frozen=True)
class GenerationRequest:
    """One request, tokenised and validated as far as its protocol can tell.

    Nothing in it is about wire formats or slots. `Engine.check` compares it with the loaded model.
    """

    request_id: str
    """Ours, never used twice in a process: what a client sends as an id may come again at any moment."""
    prompt_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int | None = None
    """Most tokens to generate; None: what fits into the slot."""
    stop_token_ids: frozenset[int] = frozenset()
    """End the sequence like eos does; honoured also with `ignore_eos`."""
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    """Wants the log-probability of each generated token under the model's own (unwarped) distribution."""
    adapter: int = 0
    client_id: str = ""
    """The client's own id, for the echo and for logs."""
    protocol: str = ""
    """A label for logs and metrics."""

    @property
    def label(self) -> str:
        """What logs call the request: the client's id if it sent one."""
        return self.client_id or self.request_id


class TokenOutput(NamedTuple):
    """What one step gave one sequence. Token ids only: text is made on the door side.

    A sequence that ends gets exactly one output with a `finish_reason`, its last; with `FinishReason.ERROR`,
    `error` says why. A tuple, because one is made per row and step on the critical path.
    """

    request: GenerationRequest
    """Whose it is."""
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: ServingError | None = None
    logits: npt.NDArray[np.float32] | None = None
    """float32[len(token_ids), V], only for requests with `logprobs`: log-probabilities are made on the output side."""

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.request.request_id


class Tokenizer(Protocol):
    """Text to ids and back, independent of any library. Thread-safe."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that never show in text (bos, eos, pad, turn markers)."""

    @property
    def eos_id(self) -> int | None:
        """Id that ends a text; None: the tokenizer names none. What the model's own files say comes first."""

    @property
    def pieces(self) -> Sequence[bytes] | None:
        """UTF-8 bytes of every id, such that the text of ids is the concatenation; None if it is not that simple."""

    def special_id(self, text: str) -> int | None:
        """The id of a special token by its text, such as ``<|end|>``; None if there is none of that text."""

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that the model expects and never two BOS."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation through the model's chat template, ready for the assistant's turn."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""


class Constraint(Protocol):
    """A grammar that limits the next token. Reserved: no protocol sets one yet."""

    def allowed(self) -> npt.NDArray[np.bool_]:
        """bool[V]: which ids may come next."""

    def advance(self, token_id: int) -> None:
        """Take note of the token that was chosen."""
