"""The border between engine and device: the steps that a backend runs, and its outputs. Numpy only.

See `backends.BackendModule` for the functions of a backend package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Flag
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

LEAST_PREFIX = 8
"""Tokens below which no prefix is reused: all chats of a template begin with the same few."""


class Want(Flag):
    """The output that a step wants for its rows."""

    NOTHING = 0
    """None: fill the cache only, for a prompt chunk that is not the last."""
    TOKENS = 1
    """Token ids sampled on the device."""
    LOGITS = 2
    """Logits of each row's last valid column."""
    ALL_LOGITS = 4
    """Logits of every column (verification of drafts, log-probabilities of the prompt)."""


@dataclass(frozen=True)
class ModelSpec:
    """Facts of the loaded, compiled model, not of the options."""

    num_slots: int
    """Rows of the KV cache: most sequences at once."""
    max_model_len: int
    """Tokens per slot, prompt and output together."""
    prefill_buckets: tuple[int, ...]
    """Ascending. The last is the longest prompt, or with `mixed_steps` the most tokens of one step: prompts then run in
    chunks and may be as long as the slot."""
    vocab_size: int
    eos_ids: frozenset[int] = frozenset()
    max_prefill_batch: int = 1
    """Rows that one prefill call runs together (1 for continuous batching in TNX and NxDI)."""
    token_buckets: tuple[int, ...] = ()
    """Ascending context lengths that decode graphs exist for; empty: one graph, of max_model_len."""
    decode_slots: tuple[int, ...] = ()
    """Ascending numbers of slots that decode graphs exist for; a decode runs the smallest that holds its highest slot.
    Empty: all run num_slots."""
    outputs: Want = Want.LOGITS
    """Outputs that the model can give. TOKENS: it samples on the device; LOGITS besides: a step that wants both gives
    the logits too, for rows that only the host can sample."""
    largest_top_k: int | None = None
    """Largest top_k of a device that samples each row with its own parameters, else None."""
    default_top_k: int | None = None
    """The top_k of a request that sets none (0), at most `largest_top_k`, or None if the device cannot sample it."""
    temperatures: tuple[float, float | None] = (0.0, None)
    """Smallest and largest temperature of a request that a device draws rightly, None without a largest; greedy ones
    have none."""
    applies_top_p: bool = True
    """A device that samples keeps the tokens of a top_p below 1 that the host's sampler keeps."""
    fixed_sampling: tuple[float, float, float] | None = None
    """The compiled top_k, top_p and temperature of a device that samples every row alike, else None."""
    mixed_steps: bool = False
    """Prompt chunks and decodes can run in one call."""
    joins: Literal["free", "reprefill"] = "free"
    """`reprefill`: static batching, where a new sequence costs every running one a re-prefill; so new ones gather."""
    cache_buckets: tuple[int, ...] = ()
    """With `mixed_steps`: ascending numbers of cache columns that graphs exist for, counted over all sequences of a
    step; empty: graphs do not depend on them."""
    cache_block: int = 1
    """Cache columns that a sequence takes at a time, for `cache_buckets`."""
    score_columns: int = 0
    """Most tokens of a prompt of which one prefill returns all logits, to score them; 0: decode steps score them. The
    next prefill goes on behind them, and decodes between the two leave the slot alone."""
    num_speculative_tokens: int = 0
    """Draft tokens that a decode can verify after each row's own token; its rows then have one column more."""
    num_fused_drafts: int = 0
    """Draft tokens that the device itself proposes and verifies in a decode: its `StepOutput.ids` have one column more,
    of which each row fills at least the first. A slot has room for those beyond `max_model_len`, which no sequence gets
    (see `Sequence.take`)."""
    prefix_block: int = 0
    """Tokens that a prompt's prefix is reused by; 0: no prefix is ever reused (see `Backend.cached`)."""
    prefix_buckets: tuple[int, ...] = ()
    """Ascending lengths of reused prefixes that prompt graphs exist for, each with those of `prefill_buckets`; empty:
    these do not depend on the prefix."""
    simulated: bool = False
    """No model runs, and all answers are made up."""
    num_adapters: int = 0
    """Places for LoRA adapters, numbered from 1: place 0 is the model without one."""
    changes_adapters: bool = False
    """The adapters of the places can change between steps; else they stay those of the load."""

    @property
    def has_logits(self) -> bool:
        """True if the host can sample, and knows log-probabilities."""
        return Want.LOGITS in self.outputs


@dataclass
class Rows:
    """The rows of a device call, ascending by slot.

    The arrays may be views of buffers that the engine reuses: valid until `run` returns. A decode of the same slots
    after another may be the same `Step` again, with new `input_ids` and `starts`, and all else as it was.
    """

    input_ids: Int32Array
    """int32[B, S]: tokens not yet in the cache, right-padded with 0. S == 1: plain decode."""
    lens: Int32Array
    """int32[B]: valid columns of each row."""
    starts: Int32Array
    """int32[B]: tokens of the row already in the cache; 0: a fresh prompt."""
    slots: Int32Array
    """int32[B], strictly ascending."""
    adapters: Int32Array
    """int32[B]: the place of each row's adapter, at most `ModelSpec.num_adapters`; 0: none."""
    wants: Want
    """Where `ModelSpec.outputs` has TOKENS and LOGITS: TOKENS, or both if a row is sampled on the host."""
    sampling: Float32Array
    """float32[B, 3]: top_k, top_p, temperature for device sampling; greedy, and a row that is sampled on the host:
    (1, 1.0, 1.0)."""


PartKind = Literal["prefill", "decode"]
StepKind = Literal["prefill", "decode", "mixed"]


@dataclass
class Step:
    """One device call: prompts, decodes, or both; at least one of them.

    Both only where `ModelSpec.mixed_steps`: all valid tokens together are then at most `prefill_buckets[-1]`, and no
    slot is in both.
    """

    prefill: Rows | None = None
    """Fresh prompts or their next chunks. Slots that decode elsewhere stay untouched.

    With `mixed_steps` a chunk may start before the end of what is cached: it overwrites the cache from its start on,
    and what lay behind is no longer valid. The warm-up does so.
    """
    decode: Rows | None = None
    """One token for every live slot: the device may overwrite a slot that is left out.

    To verify drafts, rows have `ModelSpec.num_speculative_tokens` + 1 columns: the newest token, then the drafts. The
    next step overwrites rejected drafts, from its `starts` on.
    """

    @property
    def parts(self) -> list[tuple[PartKind, Rows]]:
        """The parts that are set, in the order of the output's rows: prefill, then decode."""
        parts: list[tuple[PartKind, Rows | None]] = [
            ("prefill", self.prefill),
            ("decode", self.decode),
        ]
        return [(kind, rows) for kind, rows in parts if rows is not None]

    @property
    def kind(self) -> StepKind:
        """The part that is set, or ``mixed`` for both."""
        if self.decode is None:
            return "prefill"
        return "decode" if self.prefill is None else "mixed"


@dataclass
class StepOutput:
    """The output of a step: logits to sample on the host, tokens that the device sampled, or both.

    The arrays are the caller's: the backend never writes them again.
    """

    logits: Float32Array | None = None
    """float32[B, K, V], writable, C-contiguous; K == 1 unless ALL_LOGITS was wanted. None only beside `ids`."""
    ids: Int32Array | None = None
    """int32[B, K]; from the first -1 of a row on: none. All others but the last are in the cache. None if the host
    samples all rows."""
    num_reprefilled: int = 0
    """Tokens that the step prefilled again although they had been in the cache (static batching)."""


class Backend(Protocol):
    """A loaded model. Engine thread only; `close`: any thread, once the engine thread has ended."""

    @property
    def spec(self) -> ModelSpec:
        """Facts of the loaded model; constant."""

    def run(self, step: Step) -> StepOutput:
        """Run one step on the device; blocks and releases the GIL.

        Output rows are in the order of `Step.parts`. In a mixed step every row has a column; that of a prompt chunk
        that is not the last has no meaning.

        Raises:
            BackendError: the step failed; `fatal` if the backend is lost.
        """

    def cached(self, prompt_ids: Sequence[int], adapter: int, salt: str = "") -> int:
        """Return how many tokens of a prompt are in the cache, so that its prefill need not run them.

        The engine chooses the prompt's bucket by it, then its slot (`place`), and acquires the slot. At most all but
        the last token, which gives the first new one. Only prompts of the same adapter and salt share tokens. A look-up
        without a device call; never raises.
        """

    def place(
        self, free: Sequence[int], prompt_ids: Sequence[int], adapter: int, salt: str = ""
    ) -> int:
        """Return the slot among the `free` ones, which ascend, that a prompt should get. As `cached` a look-up."""

    def acquire(self, slot: int, prompt_ids: Sequence[int], adapter: int, salt: str = "") -> int:
        """Reserve a slot for a prompt.

        Returns how many of its tokens the slot has in the cache now: as `cached`, unless another prompt that was
        acquired since has taken their place.

        Raises:
            StepError, DeviceMemoryError: the device failed; nothing is reserved.
            BackendError: the backend refuses this prompt; nothing is reserved.
        """

    def release(self, slots: Sequence[int]) -> None:
        """End the sequences of these slots."""

    def set_adapter(self, place: int, folder: Path | None) -> None:
        """Load the adapter of a PEFT folder, which has been checked, into a place; None: empty the place.

        Called between steps, while no sequence of the place lives. What is in the cache for the place is forgotten.

        Raises:
            ArtifactError: the adapter cannot be read, or does not fit; the place has none then.
            BackendError: the backend changes none.
        """

    def close(self) -> None:
        """Free the device; idempotent."""
