"""Ways to run an engine of a toy, and what one sequence gets in a plain loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from djl_python_neuronx.backends.base import ModelSpec, Want
from djl_python_neuronx.engine.limits import sampled_on_host
from djl_python_neuronx.engine.masks import constraints_of
from djl_python_neuronx.engine.runner import Runner
from djl_python_neuronx.engine.sampler import Sampler
from djl_python_neuronx.engine.sequence import Sequence as Running
from djl_python_neuronx.engine.speculation import DraftModel, NgramProposer, Proposer
from djl_python_neuronx.types import GenerationRequest
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend, expected, toy_logits

LENGTH = 14
DEVICE_ADDS = 7
SPEC = replace(TOY_SPEC, prefill_buckets=(4, 8), eos_ids=frozenset())
VERIFIES = replace(SPEC, num_speculative_tokens=3, outputs=Want.LOGITS | Want.ALL_LOGITS)


class Guesser:
    """Proposes some right tokens and some wrong ones, and any number of them."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    runner: Runner | None = None

    def propose(
        self, sequences: Sequence[Running], counts: Sequence[int], sampler: Sampler
    ) -> list[list[int]]:
        return [self._guess(one, count) for one, count in zip(sequences, counts, strict=True)]

    def _guess(self, sequence: Running, count: int) -> list[int]:
        right = expected(sequence.tokens_from(0), max(count, 0))
        guesses = [t if self._draw.random() < 0.7 else self._draw.randrange(300) for t in right]
        return guesses[: self._draw.randint(0, len(guesses))]

    def release(self, slot: int) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held."""


def draft_toy(kind: type[ToyBackend] = ToyBackend, **facts: object) -> ToyBackend:
    return kind(replace(TOY_SPEC, max_prefill_batch=2, **facts), rewinds=True)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Mode:
    """A backend, and what proposes drafts for it."""

    spec: ModelSpec
    proposer: Callable[[], Proposer | None] = lambda: None


MODES = {
    "one prompt a call": Mode(SPEC),
    "two prompts a call": Mode(replace(SPEC, max_prefill_batch=2)),
    "static batches": Mode(replace(SPEC, max_prefill_batch=4, joins="reprefill")),
    "chunks": Mode(replace(SPEC, mixed_steps=True)),
    "guesses": Mode(VERIFIES, lambda: Guesser(1)),
    "prompt lookup": Mode(VERIFIES, lambda: NgramProposer(VERIFIES, 3)),
    "a draft model": Mode(VERIFIES, lambda: DraftModel(draft_toy(prefill_buckets=(8, 16)))),
    "both sample": Mode(replace(SPEC, outputs=Want.TOKENS | Want.LOGITS, largest_top_k=64)),
}
"""Ways to run an engine that has logits."""


def alone(one: GenerationRequest, spec: ModelSpec) -> list[int]:
    """The tokens of a request in a plain loop: the logits of all tokens so far, and the next one drawn from them."""
    on_device = Want.TOKENS in spec.outputs and not sampled_on_host(one, spec)
    sampler = Sampler(1, spec.vocab_size)
    constraints = constraints_of(one.sampling, one.prompt_ids, (), spec.vocab_size)
    sampler.assign(0, one.sampling, one.prompt_ids, one.sampling.seed or 0, (), constraints)
    ids = [*one.prompt_ids]
    for position in range(len(ids), len(ids) + LENGTH):
        logits = toy_logits(np.array(ids), spec.vocab_size)
        if on_device:
            ids.append((int(logits.argmax()) + DEVICE_ADDS) % spec.vocab_size)
        else:
            slots, positions = np.zeros(1, np.int32), np.array([position], np.int32)
            ids += sampler.sample(logits[None], slots, positions).tolist()
    return ids[len(one.prompt_ids) :]
