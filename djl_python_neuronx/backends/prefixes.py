"""Prefixes: the tokens that the cache of each slot holds, which a new prompt need not run again. Numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from djl_python_neuronx.backends.base import LEAST_PREFIX, Int32Array, Rows

_END = -1
"""Behind the last token of a slot."""


Owner = tuple[int, str]
"""Adapter and `EngineRequest.cache_salt` of those who share prefixes. An adapter's keys are of no use to another."""


class Prefixes:
    """The tokens in the cache of every slot. Those of an ended sequence stay until the slot is taken for another."""

    def __init__(self, num_slots: int, max_model_len: int) -> None:
        """Every slot is empty."""
        self._tokens = np.full((num_slots, max_model_len + 1), _END, np.int32)
        self._owners: list[Owner | None] = [None] * num_slots
        self._used = [0] * num_slots
        """Turn in which each slot was last taken, copied from or left."""
        self._turn = 0

    def find(self, prompt_ids: Sequence[int], owner: Owner) -> Int32Array:
        """Return int32[slots]: the first tokens of a prompt that each slot holds, at most all but the last."""
        found = np.zeros(len(self._owners), np.int32)
        if len(prompt_ids) <= LEAST_PREFIX:
            return found
        # Most slots differ in the first tokens already.
        alike = (self._tokens[:, :LEAST_PREFIX] == prompt_ids[:LEAST_PREFIX]).all(axis=1)
        slots = [slot for slot in alike.nonzero()[0].tolist() if self._owners[slot] == owner]
        if slots:
            wanted = np.append(np.asarray(prompt_ids[:-1], np.int32), _END - 1)
            wanted = wanted[: self._tokens.shape[1]]
            for slot in slots:
                found[slot] = (self._tokens[slot, : len(wanted)] != wanted).argmax()
        return found

    def choose(self, free: Sequence[int], prompt_ids: Sequence[int], owner: Owner) -> int:
        """Return the free slot that loses least: one with the prefix and not much else, or the oldest."""
        found = self.find(prompt_ids, owner)
        best = max(free, key=found.__getitem__)
        held = int((self._tokens[best] == _END).argmax())
        if found[best] == found.max() > 0 and 2 * found[best] >= held:
            return best
        return min(free, key=self._used.__getitem__)

    def take(self, slot: int, prompt_ids: Sequence[int], owner: Owner) -> tuple[int, int]:
        """Empty a slot for a prompt. Returns a slot that holds a prefix of it, maybe the same one, and its length."""
        found = self.find(prompt_ids, owner)
        source = slot if found[slot] == found.max() else int(found.argmax())
        self._owners[slot] = owner
        self.touch([source, slot])
        self._tokens[slot, 0] = _END
        return source, int(found[source])

    def keep(self, slot: int, prompt_ids: Sequence[int], count: int) -> None:
        """Record that a slot holds the first `count` tokens of a prompt."""
        self._tokens[slot, :count] = prompt_ids[:count]
        self._tokens[slot, count] = _END

    def note(self, rows: Rows) -> None:
        """Record the tokens that a step has written; those behind them have no meaning any more."""
        if rows.input_ids.shape[1] == 1:
            # In each decode: of a flat array this is several times cheaper.
            places = rows.slots * self._tokens.shape[1] + rows.starts
            self._tokens.put(places, rows.input_ids)
            self._tokens.put(places + 1, _END)
            return
        ends = rows.starts + rows.lens
        for slot, start, end, ids in zip(
            rows.slots, rows.starts, ends, rows.input_ids, strict=True
        ):
            self._tokens[slot, start:end] = ids[: end - start]
        self._tokens[rows.slots, ends] = _END

    def cut(self, slots: Int32Array, lens: Int32Array | int) -> None:
        """Forget the tokens of these slots behind the first `lens`."""
        self._tokens[slots, lens] = _END

    def forget(self, adapter: int) -> None:
        """Forget the tokens of all slots that an adapter's sequences have filled."""
        owned = [slot for slot, owner in enumerate(self._owners) if owner and owner[0] == adapter]
        self._tokens[owned, 0] = _END

    def touch(self, slots: Sequence[int]) -> None:
        """Record that these slots are used now."""
        self._turn += 1
        for slot in slots:
            self._used[slot] = self._turn
