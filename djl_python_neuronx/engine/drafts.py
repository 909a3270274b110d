"""Speculation: who drafts the next tokens, and which drafts stand.

A draft stands if it is the token that the model's own distribution, with the request's own parameters, seed and
history, draws at its place. So the text is the one that there is without drafts, up to rounding of the dtype, sampled
or greedy, whatever a proposer proposes: a bad draft costs time and nothing else. Accepting by the ratio of both
models' probabilities (Leviathan et al. 2023) accepts some more of what a sampling draft model proposes, but gives
other tokens for a seed than a run without drafts, and needs every rule of the sampler twice; here a draft model draws
with the request's own random numbers instead, so that where both distributions agree it hits what the large model will
draw.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import Protocol

import numpy as np

from djl_python_neuronx.backends.base import Float32Array, Int32Array, ModelSpec, Rows
from djl_python_neuronx.engine.runner import DeviceCall
from djl_python_neuronx.engine.sampler import Sampler
from djl_python_neuronx.engine.sequence import Sequence

_LEAST_MATCH = 2
"""A single token that occurred before says little about what comes next."""


class Proposer(Protocol):
    """Drafts tokens for running sequences. Engine thread only, but for `device_call`."""

    @property
    def device_call(self) -> DeviceCall | None:
        """The call that its device is busy with, for the watchdog."""

    def propose(
        self, sequences: Tokens[Sequence], counts: Tokens[int], sampler: Sampler
    ) -> list[list[int]]:
        """Drafts that may follow each sequence's newest token: at most `counts[i]`, perhaps none.

        Raises:
            BackendError: nothing can be drafted now; `fatal`: nor ever again.
        """

    def release(self, slot: int) -> None:
        """The sequence of this slot is over; never raises."""

    def close(self) -> None:
        """Free what it holds; idempotent."""


class PromptLookup:
    """Drafts what followed the newest tokens when they last occurred, in the prompt or in the text so far.

    No model is needed: summaries, code edits and answers from given documents repeat their prompt. Source: Saxena 2023,
    "Prompt Lookup Decoding". The longest run of newest tokens counts, of equally long ones the last.
    """

    def __init__(self, spec: ModelSpec, longest_match: int) -> None:
        """`longest_match`: most newest tokens that are looked up, at least 1."""
        self._longest = longest_match
        self._history = np.zeros((spec.num_slots, spec.max_model_len + 1), np.int32)
        self._known = np.zeros(spec.num_slots, np.int64)

    @property
    def device_call(self) -> DeviceCall | None:
        """None: it has no device."""
        return None

    def propose(
        self,
        sequences: Tokens[Sequence],
        counts: Tokens[int],
        sampler: Sampler,  # noqa: ARG002
    ) -> list[list[int]]:
        """See `Proposer`."""
        return [
            self._look_up(self._tokens(sequence), count) if count > 0 else []
            for sequence, count in zip(sequences, counts, strict=True)
        ]

    def release(self, slot: int) -> None:
        """See `Proposer`."""
        self._known[slot] = 0

    def close(self) -> None:
        """Nothing is held."""

    def _tokens(self, sequence: Sequence) -> Int32Array:
        """Prompt and output, of which only the new ones are copied."""
        slot = sequence.slot
        assert slot is not None  # noqa: S101  (narrowing for mypy: it runs)
        row, known = self._history[slot], int(self._known[slot])
        prompt_len = sequence.prompt_len
        if not known:
            row[:prompt_len] = sequence.request.prompt_ids
            known = prompt_len
        end = prompt_len + len(sequence.output_ids)
        row[known:end] = sequence.output_ids[known - prompt_len :]
        self._known[slot] = end
        tokens: Int32Array = row[:end]
        return tokens

    def _look_up(self, tokens: Int32Array, count: int) -> list[int]:
        # Places of the newest token before its own; then of the two newest, and so on.
        places = np.flatnonzero(tokens[:-1] == tokens[-1])
        found, matched = places[:0], 0
        while len(places) and matched < self._longest:
            matched += 1
            if matched >= min(_LEAST_MATCH, self._longest):
                found = places
            places = places[places >= matched]
            places = places[tokens[places - matched] == tokens[-1 - matched]]
        if not len(found):
            return []
        start = int(found[-1]) + 1
        drafts: list[int] = tokens[start : start + count].tolist()
        return drafts


def verify(sampler: Sampler, logits: Float32Array, rows: Rows) -> Int32Array:
    """int32[B, K]: what the model draws after each row's own token and after the drafts that stand; -1: nothing.

    `logits`: float32[B, K, V], those after every column of `rows`. The first token is always there, unless the row has
    no distribution; each one that equals the draft in its place is followed by another.
    """
    count, width = rows.input_ids.shape
    tokens = np.full((count, width), -1, np.int32)
    going = np.arange(count)
    for column in range(width):
        at = logits[:, column] if len(going) == count else logits[going, column]
        drawn = sampler.sample(at, rows.slots[going], rows.starts[going] + (column + 1))
        tokens[going, column] = drawn
        if column + 1 == width:
            break
        stands = drawn == rows.input_ids[going, column + 1]
        going = going[stands & (rows.lens[going] > column + 1)]
        if not len(going):
            break
    return tokens
