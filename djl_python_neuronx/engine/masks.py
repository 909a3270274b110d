"""Masks: for each slot with constraints, the tokens that may follow its output. And the constraints of parameters."""

from __future__ import annotations

import threading
import weakref
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from math import inf
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import numpy.typing as npt

from djl_python_neuronx.sampling import Ids, SamplingParams

UInt32Array = npt.NDArray[np.uint32]
BoolArray = npt.NDArray[np.bool_]
_ALL = np.uint32(0xFFFFFFFF)


class Constraint(Protocol):
    """A rule of one sequence that excludes tokens by the output so far. One thread at a time."""

    def narrow(self, bits: UInt32Array, output_ids: list[int]) -> None:
        """Clear the bits of the tokens that may not follow `output_ids`. See `Masks.bits`.

        `output_ids` grows from call to call; the first call may have any number of them. It is only read. An error ends
        the sequence.
        """


class Masks:
    """The masks of the slots with constraints. Engine thread only.

    They are made on another thread while the device runs: whoever reads them calls `wait` first.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        """Memory: num_slots * vocab_size bits, touched for slots with constraints only."""
        self.bits: UInt32Array = np.zeros((num_slots, -(-vocab_size // 32)), np.uint32)
        """uint32[slots, ceil(V / 32)]: token i of a slot may follow if bit i % 32 of word i // 32 is 1."""
        self._vocab_size = vocab_size
        self._constrained: dict[int, tuple[list[int], tuple[Constraint, ...]]] = {}
        """Slot to its output and constraints."""
        self.errors: dict[int, BaseException] = {}
        """Slot to the error of its constraints, whose mask is empty then."""
        self._orders = SimpleQueue[Callable[[], None] | None]()
        self._made = SimpleQueue[BaseException | None]()
        self._num_ordered = 0
        """Orders whose end `wait` has not seen."""
        queues = self._orders, self._made
        threading.Thread(
            target=_make_each, args=queues, name="djl-neuronx-masks", daemon=True
        ).start()
        weakref.finalize(self, self._orders.put, None)

    def __bool__(self) -> bool:
        """True if some slot has constraints."""
        return bool(self._constrained)

    def assign(
        self, slot: int, constraints: Sequence[Constraint], output_ids: Sequence[int]
    ) -> None:
        """Start a sequence with constraints, behind `output_ids`. The first of them may set all bits."""
        self._constrained[slot] = [*output_ids], (*constraints,)
        self._order(partial(self._make, slot))

    def release(self, slot: int) -> None:
        """End the sequence of a slot; idempotent."""
        if slot in self._constrained:
            self.wait()
            del self._constrained[slot]
            self.errors.pop(slot, None)

    def note(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """Begin to make the masks that follow a step's tokens; -1 or less is none."""
        # Chosen now: a slot may have another sequence when the order is carried out.
        noted = [
            (slot, token_id)
            for slot, token_id in zip(slots, token_ids, strict=True)
            if token_id >= 0 and slot in self._constrained
        ]
        self._order(partial(self._note, noted))

    def wait(self) -> None:
        """Wait until the masks are made."""
        while self._num_ordered:
            self._num_ordered -= 1
            if (error := self._made.get()) is not None:
                raise error

    def allowed(self, slot: int) -> BoolArray:
        """bool[V]: the mask of a slot."""
        bits = np.unpackbits(
            self.bits[slot].astype("<u4", copy=False).view(np.uint8),
            bitorder="little",
            count=self._vocab_size,
        )
        return bits.view(np.bool_)

    def _order(self, order: Callable[[], None]) -> None:
        self._num_ordered += 1
        self._orders.put(order)

    def _note(self, noted: Sequence[tuple[int, int]]) -> None:
        for slot, token_id in noted:
            self._constrained[slot][0].append(token_id)
            self._make(slot)

    def _make(self, slot: int) -> None:
        output_ids, constraints = self._constrained[slot]
        bits = self.bits[slot]
        bits[:] = _ALL
        try:
            for constraint in constraints:
                constraint.narrow(bits, output_ids)
        except BaseException as error:  # noqa: BLE001  (a border: a library's panic is no Exception)
            self.errors[slot], bits[:] = error, 0


def _make_each(
    orders: SimpleQueue[Callable[[], None] | None], made: SimpleQueue[BaseException | None]
) -> None:
    """Carry out orders until one is None. It holds no `Masks`, whose end sends that."""
    while (order := orders.get()) is not None:
        error: BaseException | None = None
        try:
            order()
        except BaseException as caught:  # noqa: BLE001  (raised by `wait`)
            error = caught
        del order
        made.put(error)


def constraints_of(
    params: SamplingParams, prompt_ids: Sequence[int], end_ids: Collection[int], vocab_size: int
) -> list[Constraint]:
    """The constraints that a request's parameters set. `end_ids`: eos, and the tokens that end it like eos."""
    found: list[Constraint] = []
    if params.allowed_token_ids is not None:
        found.append(Excluded(~bits_of(params.allowed_token_ids, vocab_size)))
    for ids, until in (
        (end_ids, params.num_unending(len(prompt_ids))),
        (params.begin_suppress_tokens, 1),
        (params.suppress_tokens, inf),
    ):
        if ids and until > 0:
            found.append(Excluded(bits_of([*ids], vocab_size), until))
    # As in transformers, where the parameter comes from: it cannot keep a text from its end.
    bad_ids = [word for word in params.bad_words_ids if len(word) > 1 or word[0] not in end_ids]
    for words, before_ids in ((params.bad_words, ()), (bad_ids, prompt_ids)):
        single = [word[0] for word in words if len(word) == 1]
        if single:
            found.append(Excluded(bits_of(single, vocab_size)))
        if len(words) > len(single):
            found.append(BadWords([word for word in words if len(word) > 1], before_ids))
    if params.no_repeat_ngram_size:
        found.append(NoRepeat(params.no_repeat_ngram_size, prompt_ids, vocab_size))
    return found


def bits_of(ids: npt.ArrayLike, vocab_size: int) -> UInt32Array:
    """A mask in which the bits of `ids` are 1. See `Masks.bits`."""
    # Not by bits, of which each takes its time: a list may have as many tokens as a prompt.
    chosen = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    chosen[np.asarray(ids, np.intp)] = True
    return np.packbits(chosen, bitorder="little").view("<u4").astype(np.uint32, copy=False)


class Excluded:
    """No token of `bits` among the first `until` tokens."""

    def __init__(self, bits: UInt32Array, until: float = inf) -> None:
        self._others, self._until = ~bits, until

    def narrow(self, bits: UInt32Array, output_ids: list[int]) -> None:
        """See `Constraint`."""
        if len(output_ids) < self._until:
            bits &= self._others


class BadWords:
    """No last token of a word behind its other tokens, of which it has some."""

    def __init__(self, words: Sequence[Ids], before_ids: Sequence[int]) -> None:
        """`before_ids`: tokens before the output, in which a word may begin."""
        self._longest = max(map(len, words))
        self._before_ids = [*before_ids[-self._longest :]]
        self._lasts = defaultdict[tuple[int, ...], list[int]](list)
        """Last tokens of words by the tokens before them."""
        for word in words:
            self._lasts[tuple(word[:-1])].append(word[-1])
        self._sizes = {*map(len, self._lasts)}

    def narrow(self, bits: UInt32Array, output_ids: list[int]) -> None:
        """See `Constraint`."""
        tail = self._before_ids + output_ids[-self._longest :]
        for size in self._sizes:
            if lasts := self._lasts.get((*tail[-size:],)):
                bits &= ~bits_of(lasts, 32 * len(bits))


class NoRepeat:
    """No n-gram of prompt and output twice. Source: Paulus et al. 2017."""

    def __init__(self, size: int, prompt_ids: Sequence[int], vocab_size: int) -> None:
        """`size`: tokens of an n-gram."""
        self._size, self._prompt_len, self._vocab_size = size, len(prompt_ids), vocab_size
        self._ids = array("i", prompt_ids)

    def narrow(self, bits: UInt32Array, output_ids: list[int]) -> None:
        """See `Constraint`."""
        self._ids.extend(output_ids[len(self._ids) - self._prompt_len :])
        ids = np.frombuffer(self._ids, np.int32)
        follow = ids[self._size - 1 :]
        repeat = np.ones(len(follow), np.bool_)
        for back in range(1, self._size):
            repeat &= ids[self._size - 1 - back : -back] == ids[-back]
            if not repeat.any():
                return
        bits &= ~bits_of(follow[repeat], self._vocab_size)
