"""The rows of the KV cache."""

from __future__ import annotations

import heapq


class SlotPool:
    """Free slots, lowest first: rows then ascend by slot with no reordering, and small batches stay dense."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    @property
    def num_taken(self) -> int:
        """Slots in use."""
        return len(self._taken)

    def take(self) -> int:
        """The lowest free slot.

        Raises:
            IndexError: there is none; ask `num_free` first.
        """
        slot = heapq.heappop(self._free)
        self._taken.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """Free a slot.

        Raises:
            KeyError: nobody holds it; freeing twice would hand one slot to two sequences.
        """
        self._taken.remove(slot)
        heapq.heappush(self._free, slot)
