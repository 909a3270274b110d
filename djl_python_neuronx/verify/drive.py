"""Drive a loaded backend as the engine does, with known tokens on its slots. Numpy only."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from djl_python_neuronx.backends.base import Backend, Rows, Step, StepOutput, Want
from djl_python_neuronx.engine.batching import plain_rows
from djl_python_neuronx.engine.runner import Runner
from djl_python_neuronx.verify.record import LogitFile, Record, Seen

GREEDY = (1.0, 1.0, 1.0)
_PERIOD = 16
_SAMPLE = 8
"""Rows of a decode that are recorded beside the newest one, others in each call: all fill disks."""


def make_texts(num: int, length: int, vocab_size: int, without: frozenset[int]) -> list[list[int]]:
    """Return `num` texts of `length` tokens, none of `without`.

    Each repeats itself, because models continue a repetition with more certainty than noise, so that a wrong token
    shows. The first one does so in its second half, so that far positions are read.
    """
    draw, known = np.random.default_rng(29), np.setdiff1d(np.arange(vocab_size), [*without])
    periods = [max(2, length // 2), *[_PERIOD] * (num - 1)]
    return [np.resize(draw.choice(known, period), length).tolist() for period in periods]


class Driver:
    """Texts on the slots of a backend, whose outputs it records."""

    def __init__(self, backend: Backend, *, quick: bool) -> None:
        """Every slot is empty. Texts: one for lengths, one for each slot, and one more."""
        self.backend, self.spec, self.quick = backend, backend.spec, quick
        spec = self.spec
        texts = make_texts(spec.num_slots + 2, spec.max_model_len, spec.vocab_size, spec.eos_ids)
        self.record = Record(spec, texts, LogitFile(spec.vocab_size))
        self.scenario = ""
        self.live: dict[int, tuple[int, int]] = {}
        """Slot to its text, and to the number of its tokens in the cache."""
        self.step = Step()
        """The last one."""
        self._wants = spec.outputs & (Want.TOKENS | Want.LOGITS)
        self._runner, self._num_joined = Runner(backend), 0

    def join(
        self, prompts: Mapping[int, tuple[int, int]], wants: Want | None = None, salt: str = ""
    ) -> None:
        """Prefill slot → (text, tokens) together; in mixed steps in chunks, beside the live rows.

        `salt`: prompts with the same one share prefixes; by default none does.
        """
        texts = {slot: text for slot, (text, _) in sorted(prompts.items())}
        ends = [prompts[slot][1] for slot in texts]
        starts = []
        for slot, end in zip(texts, ends, strict=True):
            self._num_joined += 1
            own = salt or f"verify-{self._num_joined}"
            starts.append(self.backend.acquire(slot, self._tokens(texts[slot], 0, end), 0, own))
        while starts != ends:
            self._leave_full()
            decode, room = None, self.spec.prefill_buckets[-1]
            if self.spec.mixed_steps and self.live:
                decode, room = self._rows(), room - len(self.live)
            stops = [min(end, start + room) for start, end in zip(starts, ends, strict=True)]
            tokens = [*map(self._tokens, texts.values(), starts, stops)]
            wanted = (wants or self._wants) if stops == ends else Want.NOTHING
            self._run(Step(plain_rows([*texts], tokens, starts, wanted), decode), texts)
            starts = stops
        self.live |= {slot: prompts[slot] for slot in texts}

    def decode(self, *, width: int = 1, wants: Want | None = None, keep: bool = True) -> None:
        """Run the next `width` tokens of every live slot; full ones leave before. `keep`: record the outputs."""
        self._leave_full(width)
        if self.live:
            self._run(Step(decode=self._rows(width, wants)), {}, keep=keep)

    def leave(self, *slots: int) -> None:
        """End the texts of these slots."""
        self.backend.release(slots)
        for slot in slots:
            del self.live[slot]

    def _leave_full(self, width: int = 1) -> None:
        limit = self.spec.max_model_len - width
        self.leave(*[slot for slot, (_, filled) in self.live.items() if filled > limit])

    def _tokens(self, text: int, start: int, end: int) -> list[int]:
        return self.record.texts[text][start:end]

    def _rows(self, width: int = 1, wants: Want | None = None) -> Rows:
        live = dict(sorted(self.live.items()))
        tokens = [self._tokens(text, done, done + width) for text, done in live.values()]
        return plain_rows(
            [*live], tokens, [done for _, done in live.values()], wants or self._wants
        )

    def _run(self, step: Step, joining: Mapping[int, int], *, keep: bool = True) -> None:
        """Run a step. `joining`: slot to text of its prompts."""
        self.step = step
        ran = self._runner.run(step)
        self.record.calls[ran.graph].append(ran.device_s)
        texts = {**{slot: text for slot, (text, _) in self.live.items()}, **joining}
        places = [(rows, i) for _, rows in step.parts for i in range(len(rows.slots))]
        every, call = -(-len(places) // _SAMPLE), len(self.record.calls[ran.graph])
        newest = [*texts][-1]
        for row, (rows, i) in enumerate(places):
            slot = int(rows.slots[i])
            sampled = slot == newest or rows is step.prefill or (i + call) % every == 0
            if keep and rows.wants and sampled:
                place = Seen(self.scenario, ran.graph, slot, len(places), texts[slot], -1)
                self._note(place, ran.output, row, rows, i)
        if step.decode is not None:
            for slot, (text, filled) in self.live.items():
                self.live[slot] = text, filled + step.decode.input_ids.shape[1]

    def _note(self, place: Seen, output: StepOutput, row: int, rows: Rows, i: int) -> None:
        """Record the outputs of one row, the one with index `i` in its part and `row` in the step."""
        start, count = int(rows.starts[i]), int(rows.lens[i])
        first = start if Want.ALL_LOGITS in rows.wants else start + count - 1
        for column, position in enumerate(range(first, start + count)):
            logits = token = None
            if output.logits is not None:
                logits = self.record.logits.add(output.logits[row, column])
            if output.ids is not None and self.spec.fixed_sampling in {None, GREEDY}:
                token = int(output.ids[row, column])
            self.record.seen.append(place._replace(position=position, logits=logits, token=token))
