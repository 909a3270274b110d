"""Types between protocols and engine: requests in, tokens out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import SkipValidation

from djl_python_neuronx.errors import ServingError
from djl_python_neuronx.sampling import SamplingParams


class FinishReason(str, Enum):
    """The reason that a sequence ended. The values are LMI's words; other protocols map them."""

    LENGTH = "length"
    EOS = "eos_token"
    STOP = "stop_sequence"
    TIME = "time"
    ERROR = "error"


@dataclass(frozen=True)
class EngineRequest:
    """The part of a request that crosses to the engine: token ids and plain values, no text."""

    request_id: str
    """Assigned here, unique in the process: an id sent by a client may come again at any moment."""
    prompt_ids: Annotated[Sequence[int], SkipValidation]  # a look at each would cost 2 ms for 100k
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int | None = None
    """Most tokens to generate; None: as many as fit into the slot."""
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end the sequence like eos does, also with `ignore_eos`."""
    ignore_eos: bool = False
    logprobs: bool = False
    """True to return the log-probability of each generated token under the model's own (unwarped) distribution."""
    top_logprobs: int = 0
    """Most likely tokens to return in place of each generated one, with their log-probabilities."""
    scores_prompt: int | None = None
    """Most likely tokens to return in the place of each token of the prompt, with that token's log-probability; None:
    the prompt has no scores."""
    adapter: int = 0
    """The place of its LoRA adapter; 0: the model without one."""
    seed: int | None = None
    """The seed where `sampling` has none, so that another engine draws the same tokens. None: the engine draws it."""
    given_ids: Annotated[Sequence[int], SkipValidation] = ()
    """The first generated tokens, which an engine gave before: the sequence goes on behind them. They count in all that
    counts generated tokens, and no output has them."""
    priority: int = 0
    """Requests with a lower number get their slots first."""
    client: str = ""
    """The client, if clients take turns; none of its names or keys."""
    cache_salt: str = ""
    """Requests with the same one, and with the same adapter, share what the cache has of their prompts."""
    grammar: str | None = None
    """The grammar that the text fulfils, in the form of `Tokenizer.grammar`. It ends where the grammar does."""
    client_id: str = ""
    """The client's own id, for its response and for logs."""
    least_name: str = "min_new_tokens"
    """The client's name of that parameter, for errors."""

    @property
    def group(self) -> str:
        """The id of what the client sent: further sequences of an answer add a dot and their number."""
        return self.request_id.partition(".")[0]

    def sent_names(self, parameters: Iterable[str]) -> list[str]:
        """The client's names of sampling parameters."""
        return [self.least_name if name == "min_new_tokens" else name for name in parameters]

    @property
    def label(self) -> str:
        """The request's name in logs: the client's id if it sent one."""
        return self.client_id or self.request_id


@dataclass(frozen=True)
class GenerationRequest(EngineRequest):
    """One tokenised request, valid for its protocol; free of wire formats and slots. Its own fields stay in the front.

    `engine.limits.check` checks it against the loaded model.
    """

    stop_strings: tuple[str, ...] = ()
    """The text of a special token stops at that token, which has no text in which it could be found."""
    include_stop: bool = False
    """True if the text keeps the stop string, or the token of `stop_token_ids`, that ended it."""
    skips_special: bool = True
    """False if special tokens within the text show their names."""
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that show their names in any case: marks by which a text is divided."""
    spaces_special: bool = False
    """See `Tokenizer.decode`."""
    adapter_name: str = ""
    """The name of the adapter, whose place was `adapter` when the request was parsed."""
    max_seconds: float = inf
    """Longest time from `arrived_s` to the end; then the sequence ends with what there is (`FinishReason.TIME`)."""
    arrived_s: float = field(default_factory=time.monotonic)
    trace: Mapping[str, str] = field(default_factory=dict)
    """The client's `traceparent` and `tracestate`, empty without."""
    protocol: str = ""
    """A label for logs and metrics."""
    prompt_name: str = "the prompt"
    """The prompt's name in errors, which tells those of a list apart."""
    most_name: str = "max_new_tokens"
    """The client's name of the most new tokens, for errors."""


class Scored(NamedTuple):
    """The tokens of a prompt that an output scores, in place of generated ones."""

    start: int
    """Position of the first."""
    ids: Sequence[int]
    ranks: Sequence[int] = ()
    """Of each, the number of tokens that are at least as likely. Made as `TokenOutput.logprobs` is."""


class TokenOutput(NamedTuple):
    """The tokens that one step gave one sequence. Token ids only: the output thread makes the text.

    A sequence that ends gets exactly one output with a `finish_reason`, its last; with `FinishReason.ERROR`, `error` is
    the reason. A tuple, because one is made per row and step on the critical path.
    """

    request_id: str
    token_ids: Sequence[int]
    finish_reason: FinishReason | None = None
    error: ServingError | None = None
    logits: npt.NDArray[np.float32] | None = None
    """float32[len(token_ids), V], only for requests with `logprobs` or `top_logprobs`."""
    top_logprobs: int = 0
    """As in the request. Like `logits` it stays in the engine process."""
    logprobs: Sequence[float] | None = None
    """Log-probabilities of the tokens, made from `logits` on the way to the front."""
    top: Sequence[Sequence[tuple[int, float]]] | None = None
    """For each token the most likely ones in its place, the likeliest first, each with its log-probability. Made as
    `logprobs` is, only for requests with `top_logprobs`."""
    scored: Scored | None = None
    """Tokens of the prompt to which all of these belong; there are no `token_ids` then."""


class Rendering(NamedTuple):
    """How a chat template is rendered."""

    variables: Mapping[str, Any] = MappingProxyType({})
    """Variables of the template besides its own, in plain values."""
    begins_turn: bool = True
    """The text ends with the beginning of the assistant's turn."""
    continues: bool = False
    """The text ends with that of the last message, which the model goes on with."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The tools that the template lists, as the client has sent them; () if it lists none."""


RENDERING = Rendering()


class Tokenizer(Protocol):
    """Text to ids and back, independent of any library. Thread-safe."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that never show in text (bos, eos, pad, turn markers)."""

    @property
    def eos_id(self) -> int | None:
        """Id that ends a text, or None if the tokenizer names none. Ids from the model's own files have priority."""

    @property
    def template(self) -> str:
        """The chat template, that for tools if there are several; "" if there is none."""

    @property
    def pieces(self) -> Sequence[bytes] | None:
        """UTF-8 bytes of every id, if the text of ids is their concatenation, else None."""

    def special_id(self, text: str) -> int | None:
        """The id of a special token by its text, such as ``<|end|>``, or None if there is no such token."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a prompt, never two BOS; `special`: with the special tokens that the model expects around it."""

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_chars: int | None = None,
        rendering: Rendering = RENDERING,
    ) -> list[int]:
        """Ids of a conversation in the model's chat template. A content is text, or a list of parts of type text.

        Raises `PromptTooLongError` if it has more than `max_chars` characters there.
        """

    def decode(self, ids: Sequence[int], *, skip: bool = True, spaces: bool = False) -> str:
        """Text of ids; `skip`: special tokens are left out.

        `spaces`: around added tokens, where a tokenizer in the library's Python adds them (transformers 4).
        """

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of a token by itself, within a text: a special token's own text, b"" for an unknown id.

        A token that is a part of a character has that part's bytes, or those of U+FFFD if `pieces` is None.
        """

    def grammar(self, kind: str, text: str) -> str:
        """The engine's form of a grammar; see `grammar.checked`."""

    def close(self) -> None:
        """End what it has started. Idempotent."""
