"""Blocks of the KV cache: which slot has which, and the prefixes that blocks hold. Numpy only."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from djl_python_neuronx.backends.base import Int32Array
from djl_python_neuronx.backends.prefixes import Owner

NOBODYS = 0
"""The block that fills up tables: nobody gets it, so that no step writes it."""


class Blocks:
    """The blocks of each slot, and those without a slot, which keep their tokens until they are taken.

    A full block is known by the digest of its tokens, of those before them and of their owner, as soon as its keys are
    in the cache and known not to be NaN. Slots with the same prefix have its blocks together; none of them writes them
    again. Blocks that no slot has are taken without a prefix first, then the one that was left longest ago, of a
    sequence its last one first. There are enough for all slots at their full length, so a slot always gets one.
    """

    def __init__(self, num_blocks: int, size: int, num_slots: int, max_model_len: int) -> None:
        """No slot has a block.

        Raises:
            ValueError: there are fewer blocks than all slots need.
        """
        self.size = size
        self.tables: Int32Array = np.zeros((num_slots, -(-max_model_len // size)), np.int32)
        """int32[slots, blocks of a slot]; `NOBODYS` behind its last one."""
        if num_blocks <= self.tables.size:
            message = f"{num_blocks} blocks; expected at least {self.tables.size + 1}, for all slots at full length"
            raise ValueError(message)
        self._counts = [0] * num_slots
        self._chains: list[list[bytes]] = [[b""] for _ in range(num_slots)]
        """Digests of each slot's owner and of its blocks, as far as they are known."""
        self._sharers = [0] * num_blocks
        self._unused = OrderedDict.fromkeys(range(1, num_blocks))
        """Blocks that no slot has, the next one to take first."""
        self._held: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        """The same, by block."""
        self._spoilt: set[int] = set()
        """Blocks that may hold NaN, which spoils what is read with it, masked or not."""
        self._turns: dict[int, int] = {}
        """How often the adapter of each place was changed."""

    def find(self, prompt_ids: Sequence[int], owner: Owner) -> list[int]:
        """Return the blocks that hold a prefix of a prompt, at most all but its last token."""
        digests = self._chain(self._root(owner), prompt_ids, 0, (len(prompt_ids) - 1) // self.size)
        found = []
        for digest in digests:
            if digest not in self._held:
                break
            found.append(self._held[digest])
        return found

    def acquire(self, slot: int, prompt_ids: Sequence[int], owner: Owner) -> int:
        """Give an empty slot the blocks that hold a prefix of a prompt; returns their tokens."""
        found = self.find(prompt_ids, owner)
        for block in found:
            self._sharers[block] += 1
            self._unused.pop(block, None)
        self.tables[slot, : len(found)] = found
        self._counts[slot] = len(found)
        self._chains[slot] = [self._root(owner), *(self._digests[block] for block in found)]
        return len(found) * self.size

    def extend(self, slot: int, end: int) -> list[int]:
        """Give a slot blocks for its first `end` tokens; returns those of them that may hold NaN."""
        last = -(-end // self.size)
        for place in range(self._counts[slot], last):
            block, _ = self._unused.popitem(last=False)
            if (digest := self._digests.pop(block, None)) is not None:
                del self._held[digest]
            self._sharers[block] = 1
            self.tables[slot, place] = block
            self._counts[slot] = place + 1
        return [one for one in self.tables[slot, :last].tolist() if one in self._spoilt]

    def clean(self, blocks: Iterable[int]) -> None:
        """Record that blocks hold no NaN."""
        self._spoilt.difference_update(blocks)

    def keep(self, slot: int, ids: Int32Array, count: int) -> None:
        """Record that the first `count` tokens of a slot, those of `ids`, are in the cache, and that none is NaN."""
        chain = self._chains[slot]
        first = len(chain) - 1
        for place, digest in enumerate(
            self._chain(chain[-1], ids, first, count // self.size), first
        ):
            chain.append(digest)
            block = int(self.tables[slot, place])
            # Another slot may have run the same tokens at the same time.
            if self._held.setdefault(digest, block) == block:
                self._digests[block] = digest

    def release(self, slot: int, doubtful: range) -> None:
        """Take a slot's blocks; those with the `doubtful` positions may hold NaN."""
        spoilt = range(
            doubtful.start // self.size, -(-doubtful.stop // self.size) if doubtful else 0
        )
        for place in reversed(range(self._counts[slot])):
            block = int(self.tables[slot, place])
            if place in spoilt:
                self._spoilt.add(block)
            self._sharers[block] -= 1
            if self._sharers[block] == 0:
                self._unused[block] = None
                self._unused.move_to_end(block, last=block in self._digests)
        self.tables[slot], self._counts[slot], self._chains[slot] = NOBODYS, 0, [b""]

    def forget(self, adapter: int) -> None:
        """Share no block of an adapter's place any more: its adapter is another one."""
        self._turns[adapter] = self._turns.get(adapter, 0) + 1

    def _root(self, owner: Owner) -> bytes:
        turn = self._turns.get(owner[0], 0)
        return hashlib.sha256(repr((*owner, turn)).encode()).digest()

    def _chain(
        self, digest: bytes, ids: Sequence[int] | Int32Array, first: int, end: int
    ) -> Iterator[bytes]:
        """Yield the digests of the blocks from `first` to `end`; `digest`: of what is before them."""
        for place in range(first, end):
            tokens = np.asarray(ids[place * self.size : (place + 1) * self.size], np.int32)
            digest = hashlib.sha256(digest + tokens.tobytes()).digest()
            yield digest
