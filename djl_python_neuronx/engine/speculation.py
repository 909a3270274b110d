"""Speculation: proposers of draft tokens, and the verification of their drafts.

A draft token is accepted if it is the token that the model's own distribution, with the request's own parameters, seed
and history, draws at its place. So the text equals the text without speculation, up to rounding of the dtype, sampled
or greedy, whatever is proposed: a bad draft costs time and nothing else. Accepting by the ratio of both models'
probabilities (Leviathan et al. 2023) accepts somewhat more of what a sampling draft model proposes, but gives other
tokens for a seed than a run without speculation, and needs every sampling rule twice; here a draft model draws with the
request's own random numbers instead, so that it hits what the large model will draw where both distributions agree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from djl_python_neuronx.backends.base import (
    Backend,
    Float32Array,
    Int32Array,
    ModelSpec,
    Rows,
    Step,
    Want,
)
from djl_python_neuronx.engine.batching import plain_rows
from djl_python_neuronx.engine.payoff import Payoff
from djl_python_neuronx.engine.runner import MAX_FAILED_STEPS, Runner, translate
from djl_python_neuronx.engine.sampler import NO_TOKEN, Sampler
from djl_python_neuronx.engine.sequence import Sequence
from djl_python_neuronx.errors import BackendError

logger = logging.getLogger(__name__)

_MIN_MATCH = 2
"""A match of one token predicts the next one badly."""
_NOT_CACHED = -1
_MOST_UNREAD = 32
"""Tokens that a draft model reads one by one, when it drafts again; more are prefilled with all before them."""


class Proposer(Protocol):
    """Proposes draft tokens for running sequences. Engine thread only."""

    @property
    def runner(self) -> Runner | None:
        """Runs the proposer's own device calls; None: it makes none."""

    def propose(
        self, sequences: list[Sequence], counts: list[int], sampler: Sampler
    ) -> list[list[int]]:
        """Draft tokens that may follow each sequence's newest token: at most `counts[i]`, possibly none.

        Raises:
            BackendError: it can propose nothing now; with `fatal`, never again.
        """

    def release(self, slot: int) -> None:
        """End the sequence of this slot; never raises."""

    def close(self) -> None:
        """Free its resources; idempotent."""


class Proposal(NamedTuple):
    """Draft tokens for one step, and what they cost."""

    drafts: list[list[int]]
    """One list for each sequence; empty if there are no drafts at all."""
    seconds: float = 0.0
    error: BackendError | None = None
    """The error of the proposer; None if it has not failed."""


NO_PROPOSAL = Proposal([])


class Speculator:
    """Calls the proposer while its drafts pay, and disables it after repeated failures, which fail no request.

    Tokens that a grammar forces are drafts without a proposer, and are never switched off. Engine thread only.
    """

    def __init__(
        self, proposer: Proposer | None, num_speculative_tokens: int, clock: Callable[[], float]
    ) -> None:
        """`num_speculative_tokens`: see `ModelSpec`; with 0 the proposer is not used. `clock`: seconds."""
        self.proposer = proposer if num_speculative_tokens else None
        """None: there is none, or it was disabled after its failures."""
        self._max_drafts = num_speculative_tokens
        self._failures = 0
        self._clock = clock
        self._payoff = Payoff()
        self._started_s = 0.0
        self._given = 0.0
        """The mean number of tokens that the sequences of the last call got; 0 unless it was a decode."""

    @property
    def is_on(self) -> bool:
        """Drafts are proposed, or withheld for a comparison alone."""
        return self.proposer is not None and not self._payoff.is_off

    def drafts(self, sequences: list[Sequence]) -> bool:
        """Return True if the next decode of these sequences may have drafts."""
        if self.proposer is None:
            return False
        return self._payoff.drafts or any(sequence.grammar for sequence in sequences)

    def begin(self) -> None:
        """Record that a device call begins, right behind the last one."""
        last_s, self._started_s = self._started_s, self._clock()
        if self._given:
            self._payoff.note(self._started_s - last_s, self._given)
        self._given = 0.0

    def note(self, tokens: Int32Array, num_sampled: int) -> None:
        """Record the tokens of the decode that has begun, int32[B, K], below 0: none, of so many sequences."""
        if self.proposer is not None and num_sampled:
            self._given = np.count_nonzero(tokens >= 0) / num_sampled

    def rest(self) -> None:
        """Record that the engine has nothing to do: the next call does not follow the last one at once."""
        self._given = 0.0

    def propose(self, sequences: list[Sequence], sampler: Sampler, min_drafts: int = 0) -> Proposal:
        """Draft tokens after each sequence's newest token. Never raises.

        A sequence with fewer than `min_drafts` gets as many of token 0 as it may: the warm-up verifies these.
        """
        if self.proposer is None or not (min_drafts or self.drafts(sequences)):
            return NO_PROPOSAL
        counts = [
            0 if sequence.num_ahead else min(self._max_drafts, sequence.num_missing - 1)
            for sequence in sequences
        ]
        if max(counts, default=0) < 1:
            return NO_PROPOSAL
        started_s = self._clock()
        drafts: list[list[int]] = []
        failure = None
        try:
            forced = _forced(sequences, counts, sampler)
            drafts = forced
            if min_drafts or self._payoff.drafts:
                others = [0 if ids else count for ids, count in zip(forced, counts, strict=True)]
                proposed = self.proposer.propose(sequences, others, sampler)
                drafts = [ids or own for ids, own in zip(forced, proposed, strict=True)]
            self._failures = 0
        except Exception as error:
            self._failures += 1
            failure = translate(error)
            disabled = failure.fatal or self._failures >= MAX_FAILED_STEPS
            if disabled:
                self.proposer = None
            logger.warning("drafts_failed given_up=%s", disabled, exc_info=error)
        seconds = self._clock() - started_s
        if min_drafts:
            drafts = [
                ids or [0] * min(min_drafts, count)
                for ids, count in zip(drafts, counts, strict=False)
            ]
        return Proposal(drafts, seconds, failure)

    def release(self, slot: int) -> None:
        """End the sequence of this slot."""
        if self.proposer is not None:
            self.proposer.release(slot)


def _forced(sequences: list[Sequence], counts: list[int], sampler: Sampler) -> list[list[int]]:
    """For each sequence the tokens that its grammar forces, at most `counts[i]`: they need no proposer."""
    grammars = [sequence.grammar for sequence in sequences]
    if any(grammars):
        sampler.wait()
    return [
        grammar.forced(count) if grammar and count > 0 else []
        for grammar, count in zip(grammars, counts, strict=True)
    ]


class NgramProposer:
    """Proposes what followed the newest tokens when they last occurred, in the prompt or in the output.

    No model is needed: summaries, code edits and answers from given documents repeat their prompt. Source: Saxena 2023,
    "Prompt Lookup Decoding". The longest match of newest tokens wins, among equally long ones the last.
    """

    runner = None

    def __init__(self, spec: ModelSpec, longest_match: int) -> None:
        """`longest_match`: most newest tokens to look up, at least 1."""
        self._longest = longest_match
        self._history = np.zeros((spec.num_slots, spec.max_model_len + 1), np.int32)
        self._known = np.zeros(spec.num_slots, np.int64)

    def propose(
        self,
        sequences: list[Sequence],
        counts: list[int],
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
        """Nothing to free."""

    def _tokens(self, sequence: Sequence) -> Int32Array:
        """Prompt and output; only the new ones are copied."""
        slot = sequence.held_slot
        row, known = self._history[slot], int(self._known[slot])
        new = sequence.tokens_from(known)
        end = known + len(new)
        row[known:end] = new
        self._known[slot] = end
        tokens: Int32Array = row[:end]
        return tokens

    def _look_up(self, tokens: Int32Array, count: int) -> list[int]:
        # Places of the newest token before its own; then of the two newest, and so on.
        places = np.flatnonzero(tokens[:-1] == tokens[-1])
        found, matched = places[:0], 0
        while len(places) and matched < self._longest:
            matched += 1
            if matched >= min(_MIN_MATCH, self._longest):
                found = places
            places = places[places >= matched]
            places = places[tokens[places - matched] == tokens[-1 - matched]]
        if not len(found):
            return []
        start = int(found[-1]) + 1
        drafts: list[int] = tokens[start : start + count].tolist()
        return drafts


class DraftModel:
    """A `Proposer` that runs a second, smaller model in the same slots.

    It prefills each prompt when the sequence first gets a proposal, and then reads the tokens that the large model has
    accepted; rejected drafts are overwritten. After a failure its cache is not trusted, and after decodes without
    drafts it lacks much: prompts and outputs so far are prefilled again, as long as they fit one call.
    """

    def __init__(self, backend: Backend) -> None:
        """`backend` has the slots, lengths and vocabulary of the model that verifies; this object closes it."""
        self._backend = backend
        self.runner = Runner(backend)
        self._cached = np.full(backend.spec.num_slots, _NOT_CACHED, np.int64)

    def propose(
        self, sequences: list[Sequence], counts: list[int], sampler: Sampler
    ) -> list[list[int]]:
        """See `Proposer`."""
        try:
            self._prefill([one for one, count in zip(sequences, counts, strict=True) if count > 0])
            return self._draft(sequences, counts, sampler)
        except Exception:
            for slot in np.flatnonzero(self._cached != _NOT_CACHED).tolist():
                self.release(slot)
            raise

    def release(self, slot: int) -> None:
        """See `Proposer`."""
        if self._cached[slot] != _NOT_CACHED:
            self._cached[slot] = _NOT_CACHED
            try:
                self._backend.release([slot])
            except Exception:
                logger.exception("draft_release_failed slot=%d", slot)

    def close(self) -> None:
        """Free the draft model."""
        self._backend.close()

    def _prefill(self, sequences: list[Sequence]) -> None:
        """Prefill the sequences that are not in the cache, all tokens but the newest."""
        spec = self._backend.spec
        new = []
        for sequence in sequences:
            slot, known = sequence.held_slot, sequence.next_position
            if known - self._cached[slot] > _MOST_UNREAD:
                self.release(slot)
            if self._cached[slot] == _NOT_CACHED and known <= spec.prefill_buckets[-1]:
                tokens = sequence.tokens_from(0)[:known]
                self._backend.acquire(slot, tokens, 0)
                # Acquired from here on, although empty: `release` must give it back whatever happens.
                self._cached[slot] = 0
                new.append((slot, tokens))
        for start in range(0, len(new), spec.max_prefill_batch):
            group = new[start : start + spec.max_prefill_batch]
            slots = [slot for slot, _ in group]
            rows = plain_rows(slots, [ids for _, ids in group], [0] * len(group), Want.NOTHING)
            self._run(Step(prefill=rows))
            self._cached[slots] = rows.lens

    def _draft(
        self, sequences: list[Sequence], counts: list[int], sampler: Sampler
    ) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in sequences]
        slots = [sequence.held_slot for sequence in sequences]
        held = [i for i, slot in enumerate(slots) if self._cached[slot] != _NOT_CACHED]
        # Accepted tokens that this model has not read: at least the newest one.
        unread: dict[int, list[int]] = {}
        for i in held:
            known = min(int(self._cached[slots[i]]), sequences[i].next_position)
            self._cached[slots[i]] = known
            unread[i] = sequences[i].tokens_from(known)
        while going := [i for i in held if unread[i] and len(drafts[i]) < counts[i]]:
            # Every slot is in every decode; the next token of an idle one overwrites what it is fed here.
            fed = [[unread[i].pop(0) if i in going else 0] for i in held]
            starts = [int(self._cached[slots[i]]) for i in held]
            step = Step(decode=plain_rows([slots[i] for i in held], fed, starts))
            logits = self._run(step)[:, 0]
            rows = [row for row, i in enumerate(held) if i in going and not unread[i]]
            for i in going:
                self._cached[slots[i]] += 1
            if rows:
                places = np.array([[slots[held[row]], starts[row] + 1] for row in rows], np.int32).T
                drawn = sampler.sample(logits[rows], places[0], places[1], note=False)
                for row, token_id in zip(rows, drawn.tolist(), strict=True):
                    if token_id >= 0:
                        drafts[held[row]].append(token_id)
                        unread[held[row]].append(token_id)
        return drafts

    def _run(self, step: Step) -> Float32Array:
        logits = self.runner.run(step).output.logits
        assert logits is not None  # noqa: S101  (`EngineJob.load` refuses a device that samples)
        return logits


def verify(sampler: Sampler, logits: Float32Array, rows: Rows, sampled: list[int]) -> Int32Array:
    """int32[B, K]: the token that the model draws after each row's own token and after its accepted drafts.

    Below 0: none.

    `logits`: float32[B, K, V], those after every column of `rows`. `sampled`: the rows that get tokens. The first token
    is always there, unless the row has no distribution; each one that equals the draft in its place is followed by
    another.
    """
    count, width = rows.input_ids.shape
    tokens = np.full((count, width), NO_TOKEN, np.int32)
    going = np.array(sampled, np.intp)
    for column in range(width):
        at = logits[:, column] if len(going) == count else logits[going, column]
        drawn = sampler.sample(at, rows.slots[going], rows.starts[going] + (column + 1))
        tokens[going, column] = drawn
        if column + 1 == width:
            break
        accepted = drawn == rows.input_ids[going, column + 1]
        going = going[accepted & (rows.lens[going] > column + 1)]
        if not len(going):
            break
    return tokens
