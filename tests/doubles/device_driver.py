"""Drives a `Backend` as an engine would, greedily and without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from djl_python_neuronx.backends.base import Backend, Float32Array, Rows, Step, Want

TIE = 1e-4
"""Logits nearer than this may be ranked either way by correct implementations."""


def make_rows(
    ids: Mapping[int, Sequence[int]],
    starts: Mapping[int, int] | None = None,
    wants: Want = Want.LOGITS,
) -> Rows:
    """Rows for slot → new tokens, in the order given; `starts` defaults to 0."""
    longest = max((len(tokens) for tokens in ids.values()), default=0)
    padded = [[*tokens, *[0] * (longest - len(tokens))] for tokens in ids.values()]
    return Rows(
        input_ids=np.array(padded, np.int32).reshape(len(ids), longest),
        lens=np.array([len(tokens) for tokens in ids.values()], np.int32),
        starts=np.array([(starts or {}).get(slot, 0) for slot in ids], np.int32),
        slots=np.array(list(ids), np.int32),
        adapters=np.zeros(len(ids), np.int32),
        wants=wants,
        sampling=np.ones((len(ids), 3), np.float32),
    )


def logits_of(backend: Backend, step: Step) -> Float32Array:
    """float32[B, K, V] of a step."""
    output = backend.run(step)
    assert output.logits is not None
    return output.logits


@dataclass
class Text:
    """A prompt and what was generated from it."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """How far the second best logit was behind, for each token."""

    def add(self, logits: Float32Array) -> None:
        """Append the best token of float32[V]."""
        second, first = np.sort(logits)[-2:]
        self.tokens.append(int(logits.argmax()))
        self.gaps.append(float(first - second))


class Driver:
    """Sequences on the slots of a backend."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.live: dict[int, Text] = {}

    @property
    def free(self) -> list[int]:
        """Slots that hold nothing."""
        return [slot for slot in range(self.backend.spec.num_slots) if slot not in self.live]

    def join(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Prefill slot → prompt, as many at once as it takes; each gets its first token."""
        slots = sorted(prompts)
        for slot in slots:
            assert self.backend.acquire(slot, prompts[slot], 0) == 0
        spec = self.backend.spec
        # With mixed steps the tokens of a call count, not its rows.
        size = 1 if spec.mixed_steps else spec.max_prefill_batch
        for i in range(0, len(slots), size):
            batch = {slot: prompts[slot] for slot in slots[i : i + size]}
            for slot, row in zip(
                batch, logits_of(self.backend, Step(prefill=make_rows(batch))), strict=True
            ):
                self.live[slot] = Text(list(prompts[slot]))
                self.live[slot].add(row[0])

    def decode(self) -> None:
        """One token for every live slot."""
        if self.live:
            values = logits_of(self.backend, self.next())
            for slot, row in zip(sorted(self.live), values, strict=True):
                self.live[slot].add(row[0])

    def next(self) -> Step:
        """The next decode of every live slot."""
        return Step(decode=self.next_rows())

    def next_rows(self) -> Rows:
        """Rows of the next decode, one for every live slot."""
        texts = dict(sorted(self.live.items()))
        starts = {slot: len(text.prompt) + len(text.tokens) - 1 for slot, text in texts.items()}
        return make_rows({slot: text.tokens[-1:] for slot, text in texts.items()}, starts)

    def leave(self, slot: int) -> Text:
        """Release a slot; returns what it has generated."""
        self.backend.release([slot])
        return self.live.pop(slot)

    def alone(self, prompt: Sequence[int], num_tokens: int, slot: int = 0) -> Text:
        """The text of a prompt in an otherwise idle backend."""
        self.join({slot: prompt})
        for _ in range(num_tokens - 1):
            self.decode()
        return self.leave(slot)


def assert_same(found: Text, wanted: Text) -> int:
    """Compare up to the shorter one; returns 1 if they part at a tie, else 0."""
    for i, (mine, theirs) in enumerate(zip(found.tokens, wanted.tokens, strict=False)):
        if mine != theirs:
            assert wanted.gaps[i] < TIE, f"token {i} is {mine}, not {theirs} by {wanted.gaps[i]}"
            return 1
    return 0
