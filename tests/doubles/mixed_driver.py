"""Drives a backend with mixed steps: prompts in random chunks beside the decodes of those who are done with theirs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from djl_python_neuronx.backends.base import Backend, Step, Want
from tests.doubles.device_driver import Driver, Text, assert_same, logits_of, make_rows

NUM_SEQUENCES = 16


class MixedDriver(Driver):
    """Sequences on the slots of a backend, whose prompts arrive bit by bit."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.arriving: dict[int, tuple[list[int], int]] = {}
        """Slot → prompt, and how much of it is in the cache."""

    @property
    def free(self) -> list[int]:
        """Slots that hold nothing."""
        return [slot for slot in super().free if slot not in self.arriving]

    def begin(self, slot: int, prompt: Sequence[int]) -> None:
        """Give a slot to a prompt of which nothing has run yet."""
        assert self.backend.acquire(slot, prompt, 0) == 0
        self.arriving[slot] = list(prompt), 0

    def leave(self, slot: int) -> Text:
        """Release a slot, whatever it has come to; returns what it has generated."""
        if slot not in self.arriving:
            return super().leave(slot)
        self.backend.release([slot])
        return Text(self.arriving.pop(slot)[0])

    def run(self, chunks: dict[int, int]) -> None:
        """One step: so many more tokens of these prompts, and a token of every live slot."""
        chunks = dict(sorted(chunks.items()))
        new, starts, ended = {}, {}, []
        for slot, size in chunks.items():
            prompt, done = self.arriving[slot]
            new[slot], starts[slot] = prompt[done : done + size], done
            self.arriving[slot] = prompt, done + size
            if done + size >= len(prompt):
                ended.append(slot)
        prefill = make_rows(new, starts, Want.LOGITS if ended else Want.NOTHING)
        step = Step(prefill if chunks else None, self.next_rows() if self.live else None)
        values = logits_of(self.backend, step)
        rows = [*chunks, *sorted(self.live)]
        if not values.shape[1]:
            assert not ended
            assert not self.live
            return
        assert len(values) == len(rows)
        for slot, row in zip(rows, values, strict=True):
            if slot in ended:
                self.live[slot] = Text(self.arriving.pop(slot)[0])
            if slot in self.live:
                self.live[slot].add(row[0])

    def chunks(self, draw: random.Random) -> dict[int, int]:
        """Random chunks of some of the prompts, as many tokens as a step holds beside the live slots."""
        room = self.backend.spec.prefill_buckets[-1] - len(self.live)
        chosen: dict[int, int] = {}
        for slot in draw.sample(sorted(self.arriving), len(self.arriving)):
            prompt, done = self.arriving[slot]
            size = min(room, len(prompt) - done, draw.choice([0, 1, 2, 7, room]))
            if size:
                chosen[slot] = size
                room -= size
        return chosen


def assert_like_alone_in_chunks(
    backend: Backend, best: Callable[[list[int], list[int]], Text], seed: int
) -> int:
    """Random traffic of mixed steps; each gets what it gets alone. Returns how many tokens were compared.

    `best` gives the best token after a prompt and after each beginning of the tokens behind it, all but the last. Some
    prompts are as long as a slot allows, some sequences run to its end, and some are given up on the way.
    """
    draw, driver = random.Random(seed), MixedDriver(backend)
    limit = backend.spec.max_model_len
    lengths = [1, 2, limit - 1, *(draw.randint(1, limit - 1) for _ in range(NUM_SEQUENCES - 3))]
    waiting = [
        draw.choices(range(3, 90), k=length) for length in draw.sample(lengths, k=len(lengths))
    ]
    wanted: dict[int, int] = {}
    done: list[Text] = []
    while waiting or driver.arriving or driver.live:
        while waiting and driver.free and draw.random() < 0.5:
            slot, prompt = draw.choice(driver.free), waiting.pop()
            driver.begin(slot, prompt)
            wanted[slot] = draw.choice([limit - len(prompt), draw.randint(1, limit - len(prompt))])
        chunks = driver.chunks(draw)
        if chunks or driver.live:
            driver.run(chunks)
        over = [slot for slot in driver.live if len(driver.live[slot].tokens) == wanted[slot]]
        given_up = [slot for slot in driver.live if draw.random() < 0.01]
        given_up += [slot for slot in driver.arriving if draw.random() < 0.08]
        done += [driver.leave(slot) for slot in {*over, *given_up}]
    for text in done:
        assert_same(text, best(text.prompt, text.tokens))
    return sum(len(text.tokens) for text in done)
