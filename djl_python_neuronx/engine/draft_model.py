"""A small model that drafts for a large one."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Tokens

import numpy as np

from djl_python_neuronx.backends.base import (
    Backend,
    Float32Array,
    HostLogits,
    Step,
    Want,
)
from djl_python_neuronx.engine.batching import plain_rows
from djl_python_neuronx.engine.runner import DeviceCall, Runner
from djl_python_neuronx.engine.sampler import Sampler
from djl_python_neuronx.engine.sequence import Sequence
from djl_python_neuronx.errors import StepError

logger = logging.getLogger(__name__)

_NOT_HELD = -1


class DraftModel:
    """A `Proposer` that runs a second model in the same slots.

    It gets each prompt when the sequence is first drafted for, and then the tokens that the large model has accepted;
    drafts that were refused are written over. After a failure its cache is not trusted: prompts and texts so far are
    encoded again, as long as they fit one call.
    """

    def __init__(self, backend: Backend) -> None:
        """`backend` has the slots, lengths and vocabulary of the model that verifies, and belongs to this object."""
        self._backend = backend
        self._runner = Runner(backend)
        self._cached = np.full(backend.spec.num_slots, _NOT_HELD, np.int64)

    @property
    def device_call(self) -> DeviceCall | None:
        """See `Proposer`."""
        return self._runner.device_call

    def propose(
        self, sequences: Tokens[Sequence], counts: Tokens[int], sampler: Sampler
    ) -> list[list[int]]:
        """See `Proposer`.

        A sequence whose last drafts all stood gets one less than it may, for this model has yet to read the last one.
        """
        try:
            self._enter([one for one, count in zip(sequences, counts, strict=True) if count > 0])
            return self._draft(sequences, counts, sampler)
        except Exception:
            self._forget()
            raise

    def release(self, slot: int) -> None:
        """See `Proposer`."""
        if self._cached[slot] != _NOT_HELD:
            self._cached[slot] = _NOT_HELD
            try:
                self._backend.release([slot])
            except Exception:
                logger.exception("draft_release_failed slot=%d", slot)

    def close(self) -> None:
        """Free the draft model."""
        self._backend.close()

    def _forget(self) -> None:
        for slot in np.flatnonzero(self._cached != _NOT_HELD).tolist():
            self.release(slot)

    def _enter(self, sequences: Tokens[Sequence]) -> None:
        """Encode the sequences that are not in the cache, all tokens but the newest."""
        spec = self._backend.spec
        new = []
        for sequence in sequences:
            slot, known = _slot(sequence), sequence.next_position
            if self._cached[slot] == _NOT_HELD and known <= spec.prefill_buckets[-1]:
                tokens = sequence.tokens_from(0)[:known]
                self._backend.acquire(slot, tokens, 0)
                # Held from here on, although empty: `release` must give it back whatever happens.
                self._cached[slot] = 0
                new.append((slot, tokens))
        for start in range(0, len(new), spec.max_prefill_batch):
            group = new[start : start + spec.max_prefill_batch]
            slots = [slot for slot, _ in group]
            prompts = [tokens for _, tokens in group]
            self._run(Step(prefill=plain_rows(slots, prompts, [0] * len(group), Want.NOTHING)))
            self._cached[slots] = [len(tokens) for _, tokens in group]

    def _draft(
        self, sequences: Tokens[Sequence], counts: Tokens[int], sampler: Sampler
    ) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in sequences]
        slots = [_slot(sequence) for sequence in sequences]
        held = [i for i, slot in enumerate(slots) if self._cached[slot] != _NOT_HELD]
        # What the large model has accepted and this one has not read: the newest token, at least.
        unread: dict[int, list[int]] = {}
        for i in held:
            known = min(int(self._cached[slots[i]]), sequences[i].next_position)
            self._cached[slots[i]] = known
            unread[i] = sequences[i].tokens_from(known)
        for _ in range(max(counts)):
            going = [i for i in held if unread[i] and len(drafts[i]) < counts[i]]
            if not going:
                break
            # Every slot is in every decode; what an idle one is fed is written over by its next token.
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
        [(kind, rows)] = step.parts
        reach = rows.input_ids.shape[1] + (int(rows.starts.max()) if kind == "decode" else 0)
        output, _ = self._runner.run(step, reach)
        if not isinstance(output, HostLogits):
            message = "the draft model samples on the device; expected logits. Leave that out of its options"
            raise StepError(message)
        return output.values


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None  # noqa: S101  (narrowing for mypy: it runs)
    return sequence.slot
