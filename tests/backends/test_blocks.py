"""Blocks of the KV cache against a model that keeps every token: what a slot reads is what its sequence has written."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from djl_python_neuronx.backends.nxdi.blocks import NOBODYS, Blocks

SLOTS, LIMIT = 3, 13
IDS = st.lists(st.sampled_from((1, 2)), min_size=1, max_size=LIMIT)
OWNERS = st.tuples(st.sampled_from((0, 1)), st.sampled_from(("", "a")))
NAN = -1


class Cache(RuleBasedStateMachine):
    """A cache of which each position holds the tokens up to its own, with owner; slots come, grow, fail and leave."""

    @initialize(size=st.sampled_from((1, 2, 4)), spare=st.integers(0, 4))
    def begin(self, size: int, spare: int) -> None:
        needed = SLOTS * -(-LIMIT // size) + 1
        self.blocks = Blocks(needed + spare, size, SLOTS, LIMIT)
        self.size, self.num_blocks = size, needed + spare
        self.memory: dict[int, object] = {}
        self.live: dict[int, list[int]] = {}
        self.owners: dict[int, tuple[int, str, int]] = {}
        self.turns = [0, 0]
        self.seen: set[tuple[object, ...]] = set()

    def _written(self, slot: int, ids: list[int], place: int) -> tuple[object, ...]:
        return (*self.owners[slot], *ids[: place + 1])

    def _places(self, slot: int, count: int) -> list[int]:
        table = self.blocks.tables[slot].tolist()
        return [table[i // self.size] * self.size + i % self.size for i in range(count)]

    @precondition(lambda self: len(self.live) < SLOTS)
    @rule(ids=IDS, owner=OWNERS, data=st.data())
    def join(self, ids: list[int], owner: tuple[int, str], data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([s for s in range(SLOTS) if s not in self.live]))
        self.owners[slot] = (*owner, self.turns[owner[0]])
        found = self.blocks.find(ids, owner)
        count = self.blocks.acquire(slot, ids, owner)
        assert count == len(found) * self.size < len(ids)
        self.live[slot] = ids[:count]
        self._grow(slot, ids[count:])

    @precondition(lambda self: self.live)
    @rule(more=IDS, data=st.data())
    def go_on(self, more: list[int], data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.live)))
        self._grow(slot, more[: LIMIT - len(self.live[slot])])

    def _grow(self, slot: int, new: list[int]) -> None:
        ids = self.live[slot] + new
        spoilt = self.blocks.extend(slot, len(ids))
        for block in spoilt:
            for place in range(block * self.size, (block + 1) * self.size):
                self.memory[place] = None
        self.blocks.clean(spoilt)
        for i, place in list(enumerate(self._places(slot, len(ids))))[len(self.live[slot]) :]:
            self.memory[place] = self._written(slot, ids, i)
        self.live[slot] = ids
        self.blocks.keep(slot, np.array(ids, np.int32), len(ids))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.live)))
        self.blocks.release(slot, range(0))
        del self.live[slot]

    @precondition(lambda self: self.live)
    @rule(new=IDS, data=st.data())
    def fail(self, new: list[int], data: st.DataObject) -> None:
        """Write NaN from somewhere on, of which some is not proven, and leave."""
        slot = data.draw(st.sampled_from(sorted(self.live)))
        count = len(self.live[slot])
        end = min(count + len(new), LIMIT)
        self.blocks.clean(self.blocks.extend(slot, end))
        for place in self._places(slot, end)[count:]:
            self.memory[place] = NAN
        self.blocks.release(slot, range(count, end))
        del self.live[slot]

    @rule(adapter=st.sampled_from((0, 1)))
    def change(self, adapter: int) -> None:
        if all(owner[0] != adapter for s, owner in self.owners.items() if s in self.live):
            self.turns[adapter] += 1
            self.blocks.forget(adapter)

    @rule(ids=IDS, owner=OWNERS)
    def look(self, ids: list[int], owner: tuple[int, str]) -> None:
        """Find only what is the prompt's own."""
        for i, block in enumerate(self.blocks.find(ids, owner)):
            for place in range(self.size):
                end = i * self.size + place + 1
                wanted = (*owner, self.turns[owner[0]], *ids[:end])
                assert self.memory[block * self.size + place] == wanted

    @invariant()
    def each_slot_reads_its_own(self) -> None:
        if not hasattr(self, "blocks"):
            return
        used: set[int] = set()
        for slot in range(SLOTS):
            table = self.blocks.tables[slot].tolist()
            count = -(-len(self.live.get(slot, ())) // self.size)
            assert NOBODYS not in table[:count]
            assert set(table[count:]) <= {NOBODYS}
            used.update(table[:count])
            for i, place in enumerate(self._places(slot, len(self.live.get(slot, ())))):
                assert self.memory[place] == self._written(slot, self.live[slot], i)
            # What is masked is read too.
            for block in table[:count]:
                for place in range(block * self.size, (block + 1) * self.size):
                    assert self.memory.get(place) != NAN
        assert len(self.blocks._unused) == len(self.blocks._sharers) - 1 - len(used)


Cache.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCache = Cache.TestCase


def test_a_conversation_stays_while_there_is_room_and_its_end_goes_first() -> None:
    blocks = Blocks(2 * 4 + 1, 2, 2, 8)
    first, second = [1, 2, 3, 4, 5, 6, 7], [8, 9, 8, 9, 8, 9, 8]

    def run(slot: int, ids: list[int], salt: str = "") -> int:
        count = blocks.acquire(slot, ids, (0, salt))
        blocks.extend(slot, len(ids))
        blocks.keep(slot, np.array(ids, np.int32), len(ids))
        blocks.release(slot, range(0))
        return count

    assert [run(0, first), run(0, second), run(1, first), run(0, second)] == [0, 0, 6, 6]
    assert run(0, first, "salt") == 0
    # Three of the six blocks of the others were taken: the end of what was used longest ago.
    assert (len(blocks.find([*first, 1], (0, ""))), len(blocks.find([*second, 1], (0, "")))) == (
        1,
        3,
    )
    assert run(0, [1, 2], "") == 0
    assert run(1, [1, 2, 3], "") == 2


def test_a_block_is_to_be_cleaned_until_it_is() -> None:
    """The call that cleans it may fail, and the step comes again."""
    blocks = Blocks(2 * 2 + 1, 4, 2, 8)
    blocks.acquire(0, [1, 2, 3], (0, ""))
    blocks.extend(0, 4)
    blocks.release(0, range(4))
    blocks.acquire(1, [1, 2, 3], (0, ""))
    spoilt = blocks.extend(1, 4)
    assert spoilt
    assert blocks.extend(1, 4) == blocks.extend(1, 8) == spoilt
    blocks.clean(spoilt)
    assert not blocks.extend(1, 8)


def test_too_few_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="expected at least 9"):
        Blocks(8, 2, 2, 8)
