"""Tokens that the slots hold of a prompt, against a plain list for each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from djl_python_neuronx.backends.base import LEAST_PREFIX
from djl_python_neuronx.backends.prefixes import Prefixes
from djl_python_neuronx.engine.batching import plain_rows


class Prompt(Sequence[int]):
    """A prompt that counts the tokens that are read."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.num_read = ids, 0

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Any) -> Any:
        found = self.ids[index]
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found


def test_prefixes_are_those_of_the_tokens_that_were_written() -> None:
    """By prompts, decodes, drafts that are written over, and cuts."""
    rng, owners = random.Random(5), [(0, ""), (1, ""), (0, "a")]
    prefixes, held = Prefixes(4, 60), [list[int]() for _ in range(4)]
    of = [owners[0]] * 4
    num_long = 0
    for _ in range(3000):
        owner, base = rng.choice(owners), [3] * rng.randrange(30)
        prompt = base + rng.choices([3, 4], k=rng.randint(1, 20))
        wanted = [0] * 4
        for slot in range(4):
            common = 0
            while common < min(len(prompt) - 1, len(held[slot])) and (
                prompt[common] == held[slot][common]
            ):
                common += 1
            if of[slot] == owner and common >= LEAST_PREFIX:
                wanted[slot] = common
        assert prefixes.find(prompt, owner).tolist() == wanted
        num_long += max(wanted) > 15
        slots = rng.sample(range(4), rng.randint(1, 3))
        if rng.random() < 0.2:
            slot = slots[0]
            source, count = prefixes.take(slot, prompt, owner)
            assert count == max(wanted) == wanted[source]
            prefixes.keep(slot, prompt, len(prompt))
            held[slot], of[slot] = prompt, owner
            continue
        if rng.random() < 0.1:
            cut = rng.randint(0, len(held[slots[0]]))
            prefixes.cut(np.array(slots[:1]), cut)
            del held[slots[0]][cut:]
            continue
        width = rng.choice([1, 1, 1, 4])
        starts = [max(0, min(len(held[slot]), 55) - rng.choice([0, 0, 2])) for slot in slots]
        tokens = [rng.choices([3, 3, 3, 4], k=rng.randint(1, width)) for _ in slots]
        prefixes.note(plain_rows(slots, tokens, starts))
        for slot, start, ids in zip(slots, starts, tokens, strict=True):
            held[slot] = held[slot][:start] + ids
    assert num_long > 100


def test_a_prompt_that_begins_otherwise_is_not_compared_as_a_whole() -> None:
    prefixes, owner = Prefixes(2, 5000), (0, "")
    prefixes.take(0, [5] * 4000, owner)
    prefixes.keep(0, [5] * 4000, 4000)
    for first, found, most in ((6, 0, LEAST_PREFIX), (5, 4000, 5000)):
        prompt = Prompt([first] + [5] * 4000)
        assert prefixes.find(prompt, owner).tolist() == [found, 0]
        assert prompt.num_read <= most
