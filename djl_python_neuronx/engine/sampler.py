"""The sampler: every sampling rule, vectorised over the batch.

The order is: repetition penalty over prompt and output, temperature, top_k, all other rules, draw. After temperature
and top_k every rule judges the same probabilities; a token stays if all rules keep it. Each rule is one function, used
by both ways to draw: among the candidates of a top_k (`_draw_sorted`), or from a whole row (`_draw_whole`). A rule that
no row uses costs one test of its parameter. All rules keep or drop equal logits together: a tie at the k-th value, or
at the edge of the nucleus, is kept whole. Greedy takes the lowest id of a tie.

No rule sorts the vocabulary. `top_k` needs only the logits above a floor, which the k-th best of some 2000 maxima
gives; `top_p` without `top_k` draws first and then checks whether the token is in the nucleus.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from typing import Any, Union

import numpy as np
import numpy.typing as npt

from djl_python_neuronx.sampling import SamplingParams

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]
IndexArray = npt.NDArray[np.intp]
UInt64Array = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]
Candidates = tuple[IndexArray, Float32Array]
Weights = Union[npt.NDArray[np.floating[Any]], np.floating[Any]]


def logprobs(row: Float32Array, token_ids: Sequence[int]) -> Float32Array:
    """float32[n]: log-softmax of a row of logits (float32[V]) at each token: the model's own distribution.

    The largest logit must be finite, as that of every row that gave a token.
    """
    shifted = row - row.max()
    chosen = shifted[np.asarray(token_ids)]
    # In place: the copy stays in the core's cache.
    found: Float32Array = chosen - np.log(np.exp(shifted, out=shifted).sum())
    return found


def most_likely(row: Float32Array, count: int) -> list[int]:
    """The ids of the largest logits of a row, the largest first, of equal ones the lowest id first.

    At most `count`: tokens with a logit of -inf are left out. The largest logit must be finite.
    """
    floor = _Table(len(row)).floor(row, min(count, len(row)))
    ids = np.flatnonzero(row >= floor)
    found: list[int] = ids[(-row[ids]).argsort(kind="stable")[:count]].tolist()
    return found


_GREEDY, _TOP_K, _WHOLE = range(3)
_COLUMNS = 2048
"""Columns of a row's table, about. Their maxima and sums cost one pass of long vectors (blocks of 64 neighbours: five
times slower) and stay in the first-level cache."""
_WIDE = 4096
"""A row with more candidates (ties, a huge top_k) is sorted alone: the others are not padded to its width."""
_FEW = 1 / 64
"""Below this share of a row, picking the marked elements is cheaper than multiplying all with the mask."""
_SMALLEST, _LARGEST = 1e-30, 1e30
"""Range of parameters: neither they nor their inverse leave float32, nor do products of them become zero."""
_LOWEST = float(np.finfo(np.float32).min)


def penalise(logits: Float32Array, seen: BoolArray | bool, penalty: np.float32) -> Float32Array:
    """`logits` with those of `seen` tokens divided (if above 0) or multiplied by the penalty. Source: CTRL (2019)."""
    return np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)


def in_top_k(logits: Float32Array, kth: Float32Array) -> BoolArray:
    """Tokens among the k best, given the k-th best logit; none without a finite logit."""
    kept: BoolArray = logits >= np.maximum(kth, _LOWEST)
    return kept


def in_nucleus(heavier: Weights, total: Weights, top_p: Weights) -> BoolArray:
    """Tokens of the top_p nucleus, given the mass of all heavier tokens and of all tokens."""
    kept: BoolArray = heavier < top_p * total
    return kept


def above_min_p(weights: Weights, best: Weights, min_p: Weights) -> BoolArray:
    """Tokens with at least `min_p` times the weight of the best one."""
    kept: BoolArray = weights >= min_p * best
    return kept


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_DRAW = 0xD1342543DE82EF95


def _mix(z: UInt64Array) -> UInt64Array:
    """A bijection of 64 bits that spreads every input bit. Source: SplitMix64 (Steele, Lea, Flood 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


class _Draws:
    """Random numbers: a pure function of a slot's seed, the position and the draw, whatever the row or the batch."""

    def __init__(self, num_slots: int) -> None:
        self._streams = np.zeros(num_slots, np.uint64)

    def seed(self, slot: int, seed: int) -> None:
        """Start the stream of a slot."""
        self._streams[slot] = _mix(np.array([seed], np.uint64))[0]

    def uniform(self, slots: Int32Array, positions: Int32Array, draw: int = 0) -> Float64Array:
        """float64[n] in [0, 1), of 52 bits, such that ``u * total < total`` also holds after rounding."""
        counters = positions.astype(np.uint64) * _GOLDEN + np.uint64(draw * _DRAW % 2**64)
        bits: UInt64Array = _mix(self._streams[slots] + counters) >> np.uint64(12)
        return np.multiply(bits, 2.0**-52)


class _History:
    """The tokens that the slots with a repetition penalty have seen.

    A table of num_slots * vocab_size bytes: a look-up costs the same at token 64 and at token 4096.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.seen = np.zeros((num_slots, vocab_size), np.bool_)
        self.penalised = np.zeros(num_slots, np.bool_)
        self.penalties = np.ones(num_slots, np.float32)
        self._row = np.empty(vocab_size, np.float32)

    def start(self, slot: int, penalty: float, prompt_ids: Sequence[int]) -> None:
        """Start the history of a slot that has none."""
        self.penalties[slot] = min(max(penalty, _SMALLEST), _LARGEST)
        if penalty != 1:
            self.penalised[slot] = True
            self.seen[slot, np.asarray(prompt_ids, np.intp)] = True

    def add(self, slots: Int32Array, tokens: Int32Array) -> None:
        """Add a token to each slot; -1 adds none."""
        noted = self.penalised[slots] & (tokens >= 0)
        if noted.any():
            self.seen[slots[noted], tokens[noted]] = True

    def clear(self, slot: int) -> None:
        """Forget the history of a slot; idempotent."""
        if self.penalised[slot]:
            self.penalised[slot] = False
            self.seen[slot] = False

    def penalised_row(self, row: Float32Array, slot: int) -> Float32Array:
        """A copy of the row with the whole history penalised, valid until the next call."""
        np.copyto(self._row, row)
        seen = np.flatnonzero(self.seen[slot])
        self._row[seen] = penalise(row[seen], True, self.penalties[slot])
        return self._row


def _kth_largest(values: Float32Array, k: int) -> float:
    return float(np.partition(values, len(values) - k)[-k])


class _Table:
    """One row of logits or weights, read as a table: element i stands in column i % `num_columns`.

    ::

        line 0    |  0     1     2   ...  C-1 |
        line 1    |  C   C+1   C+2   ... 2C-1 |
        ...       |                           |
        rest      | nC  nC+1 ...              |
                     |     |
                     fold: maximum or sum of each column

    The k-th best column maximum is a floor for top_k; column sums locate a draw in two short searches.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_lines = max(1, vocab_size // _COLUMNS)
        self._num_columns = vocab_size // self._num_lines
        self._columns = np.empty(self._num_columns, np.float32)
        self.weights = np.empty(vocab_size, np.float32)
        self.mask = np.empty(vocab_size, np.bool_)

    def floor(self, row: Float32Array, top_k: int) -> float:
        """A logit that at least `top_k` tokens reach, or all with a finite one; NaN, which none reaches, for a bad row.

        The k-th best column maximum is such a floor, and few tokens above it are not among the k best.
        """
        pool = self.fold(np.maximum, row) if 2 * top_k <= self._num_columns else row
        return max(_kth_largest(pool, top_k), _LOWEST) if isfinite(pool.max()) else nan

    def locate(self, sums: Float32Array, uniform: float) -> int:
        """The token at `uniform` of the cumulated weights: first its column, then its place in it."""
        mass = sums.cumsum(dtype=np.float64)
        target = uniform * mass[-1]
        column = int(mass.searchsorted(target, side="right"))
        within = self.weights[column :: self._num_columns].cumsum(dtype=np.float64)
        target -= mass[column - 1] if column else 0.0
        # A float32 sum may exceed the exact one by a rounding: stay at the last token that has weight.
        place = min(within.searchsorted(target, side="right"), within.searchsorted(within[-1]))
        return column + int(place) * self._num_columns

    def weigh(self, row: Float32Array, inverse_temperature: np.float32) -> Float32Array:
        """Fill `weights` with exp(row / temperature) up to a factor; returns its column sums (NaN: no distribution).

        The largest logit is subtracted only where the sum shows that weights may have left float32's range: that saves
        two passes.
        """
        weights = self.weights
        # Also where the temperature is 1: exp straight from memory that is not in the cache is twice as slow as both.
        np.multiply(row, inverse_temperature, out=weights)
        sums = self.fold(np.add, np.exp(weights, out=weights))
        if 1e-10 < sums.sum(dtype=np.float64) < 1e30:
            return sums
        np.subtract(row, row.max(), out=weights)
        np.multiply(weights, inverse_temperature, out=weights)
        return self.fold(np.add, np.exp(weights, out=weights))

    def fold(self, reduce: np.ufunc, row: Float32Array) -> Float32Array:
        """float32[columns]: maximum or sum of each column (elements c, c + columns, c + 2 columns, ...) of a row."""
        columns, body = self._columns, self._num_lines * self._num_columns
        reduce.reduce(row[:body].reshape(self._num_lines, self._num_columns), axis=0, out=columns)
        rest = self._vocab_size - body
        if rest:
            reduce(columns[:rest], row[body:], out=columns[:rest])
        return columns


class Sampler:
    """Samples the next token of every slot. Engine thread only.

    The token of a slot depends on its logits, parameters, history, seed and position, never on its index or on other
    rows: every kernel works on one row, or element by element, or accumulates along a row in order.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        """No slot holds a sequence yet. Memory: see `_History`; touched for penalties only."""
        self._vocab_size = vocab_size
        self._each = np.arange(num_slots)
        self._kinds = np.zeros(num_slots, np.int8)
        self._temperatures = np.ones(num_slots)
        self._top_ks = np.ones(num_slots, np.intp)
        self._top_ps = np.ones(num_slots)
        self._min_ps = np.zeros(num_slots)
        self._draws = _Draws(num_slots)
        self._history = _History(num_slots, vocab_size)
        self._table = _Table(vocab_size)
        # Slots that need more than an argmax; while there are none, a step is five calls of numpy.
        self._elaborate: set[int] = set()

    def assign(
        self, slot: int, params: SamplingParams, prompt_ids: Sequence[int], seed: int
    ) -> None:
        """Start a new sequence in a slot. `seed` is `params.seed`, or one drawn by the engine."""
        greedy = params.temperature == 0 or params.top_k == 1
        if greedy:
            params = SamplingParams(top_k=1, repetition_penalty=params.repetition_penalty)
            # A penalty below 1 raises: the winner may be anywhere in the history, which is the top 1 of the raised row.
            self._kinds[slot] = _GREEDY if params.repetition_penalty >= 1 else _TOP_K
        else:
            self._kinds[slot] = _TOP_K if 0 < params.top_k < self._vocab_size else _WHOLE
        self._temperatures[slot] = (
            1.0 if greedy else min(max(params.temperature, _SMALLEST), _LARGEST)
        )
        self._top_ks[slot] = min(params.top_k, self._vocab_size)
        self._top_ps[slot] = max(params.top_p, _SMALLEST)
        self._min_ps[slot] = params.min_p
        self._draws.seed(slot, seed)
        self.release(slot)
        if not greedy or params.repetition_penalty != 1:
            self._elaborate.add(slot)
        self._history.start(slot, params.repetition_penalty, prompt_ids)

    def release(self, slot: int) -> None:
        """End the sequence of a slot; idempotent."""
        self._elaborate.discard(slot)
        self._history.clear(slot)

    def device_rows(self, slots: Int32Array) -> Float32Array:
        """float32[B, 3]: top_k (0: off), top_p, temperature, for a device that samples; greedy is (1, 1.0, 1.0)."""
        columns = (self._top_ks[slots], self._top_ps[slots], self._temperatures[slots])
        return np.stack(columns, axis=1).astype(np.float32)

    def sample(
        self, logits: Float32Array, slots: Int32Array, positions: Int32Array, *, note: bool = True
    ) -> Int32Array:
        """int32[B]: the next token of each slot, entered into its history; -1 where no distribution exists.

        That is a row with a NaN, with +inf, or without any finite logit. `logits`, float32[B, V] with contiguous rows,
        is only read. `positions`, int32[B], is the index of the new token within its sequence; the draw depends on it.
        Without `note` the history stays as it is: a draft is not yet a token.
        """
        if not self._elaborate:
            # argmax finds the first NaN, if there is one.
            best = logits.argmax(axis=1)
            valid = np.isfinite(logits[self._each[: len(best)], best])
            return np.where(valid, best, -1).astype(np.int32)
        tokens = np.full(len(slots), -1, np.int32)
        kinds = self._kinds[slots]
        with np.errstate(over="ignore", invalid="ignore"):
            rows = np.flatnonzero(kinds == _TOP_K)
            greedy = np.flatnonzero(kinds == _GREEDY)
            if len(greedy):
                rows = np.concatenate((rows, self._take_best(logits, slots, greedy, tokens)))
            if len(rows) or kinds.any():
                uniforms = self._draws.uniform(slots, positions)
                if len(rows):
                    table = [logits[i] for i in rows]
                    tokens[rows] = self._draw_top_k(table, slots[rows], uniforms[rows])
                for i in np.flatnonzero(kinds == _WHOLE):
                    one = slice(i, i + 1)
                    tokens[i] = self._draw_whole(logits[i], slots[one], positions[one], uniforms[i])
        if note:
            self._history.add(slots, tokens)
        return tokens

    def _take_best(
        self, logits: Float32Array, slots: Int32Array, rows: IndexArray, tokens: Int32Array
    ) -> IndexArray:
        """Fill in the greedy rows. Returns the undecided ones: a penalty lowers their best logit."""
        if len(rows) == len(logits):
            best = logits.argmax(axis=1)
        else:
            best = np.array([logits[i].argmax() for i in rows], np.intp)
        valid = np.isfinite(logits[rows, best])
        lowered = valid & self._history.seen[slots[rows], best]
        tokens[rows] = np.where(valid & ~lowered, best, -1)
        undecided: IndexArray = rows[lowered]
        return undecided

    def _draw_top_k(
        self, rows: list[Float32Array], slots: Int32Array, uniforms: Float64Array
    ) -> IndexArray:
        """One token of each row with a top_k, or -1; all of them from one table of candidates."""
        found = [self._candidates(row, slot) for row, slot in zip(rows, slots, strict=True)]
        if max(len(ids) for ids, _ in found) <= _WIDE:
            return self._draw_sorted(found, slots, uniforms)
        alone = [slice(i, i + 1) for i in range(len(rows))]
        drawn = [self._draw_sorted(found[i], slots[i], uniforms[i]) for i in alone]
        return np.concatenate(drawn)

    def _candidates(self, row: Float32Array, slot: int) -> Candidates:
        """Ascending ids and penalised logits of a set that holds the top_k and their ties; empty for a bad row."""
        top_k, penalty = int(self._top_ks[slot]), self._history.penalties[slot]
        if penalty < 1:
            row = self._history.penalised_row(row, slot)
        floor = self._table.floor(row, top_k)
        if penalty > 1:
            # The tokens that reach the floor reach this one even if all of them are penalised, so the k-th best does
            # too. No look at the history: its length costs nothing.
            floor = max(floor / float(penalty) if floor > 0 else floor * float(penalty), _LOWEST)
        ids = np.flatnonzero(np.greater_equal(row, floor, out=self._table.mask))
        values = row[ids]
        if penalty > 1:
            values = penalise(values, self._history.seen[slot, ids], penalty)
            if len(ids) > top_k:
                best = values >= _kth_largest(values, top_k)
                ids, values = ids[best], values[best]
        return ids, values

    def _draw_sorted(
        self, found: list[Candidates], slots: Int32Array, uniforms: Float64Array
    ) -> IndexArray:
        """intp[n]: one token of each candidate set, in float64; -1 for an empty set.

        With the candidates in descending order each rule keeps a prefix, and the shortest one counts.
        """
        widths = np.array([len(ids) for ids, _ in found])
        each = np.arange(len(found))
        filled = np.arange(max(1, widths.max())) < widths[:, None]
        ids = np.zeros(filled.shape, np.intp)
        ids[filled] = np.concatenate([ids for ids, _ in found])
        values: Float32Array = np.full(filled.shape, -np.inf, np.float32)
        values[filled] = np.concatenate([values for _, values in found])
        order = (-values).argsort(axis=1, kind="stable")
        values = values[each[:, None], order]
        below = values.astype(np.float64) - values[:, :1]
        weights = np.exp(below / self._temperatures[slots][:, None])
        mass = weights.cumsum(axis=1)

        top_ks = self._top_ks[slots]
        kth = values[each, np.minimum(top_ks, values.shape[1]) - 1]
        kept = in_top_k(values, kth[:, None]).sum(axis=1)
        total, top_ps = mass[each, kept - 1][:, None], self._top_ps[slots][:, None]
        nucleus = np.minimum(kept, 1 + in_nucleus(mass, total, top_ps).sum(axis=1))
        kept = (values >= values[each, nucleus - 1][:, None]).sum(axis=1)
        min_ps = self._min_ps[slots][:, None]
        if min_ps.any():
            kept = np.minimum(kept, above_min_p(weights, weights[:, :1], min_ps).sum(axis=1))
        kept = np.where(top_ks == 1, 1, kept)
        chosen = (mass <= (uniforms * mass[each, kept - 1])[:, None]).sum(axis=1)
        return np.where(widths > 0, ids[each, order[each, chosen]], -1)

    def _draw_whole(
        self, row: Float32Array, slots: Int32Array, position: Int32Array, uniform: float
    ) -> int:
        """One token of a row without top_k, or -1. `slots` and `position` hold one element each.

        No sort: draw from the whole row, then check whether the token is in the nucleus. If not, the token and all that
        are not heavier are outside it; draw again among the rest. The nucleus is never cut, so an accepted token
        follows its distribution; the likeliest token is always accepted, so this ends, after about 1 + ln(1 / top_p)
        draws.
        """
        slot = slots[0]
        if self._history.penalised[slot]:
            row = self._history.penalised_row(row, slot)
        sums = self._table.weigh(row, np.float32(1 / self._temperatures[slot]))
        total = sums.sum(dtype=np.float64)
        if not total > 0:
            return -1
        sums = self._drop_unlikely(slot, sums)
        weights, mask, top_p = self._table.weights, self._table.mask, self._top_ps[slot]
        draws = 0
        while True:
            token = self._table.locate(sums, uniform)
            if top_p == 1:
                return token
            weight = weights[token]
            np.greater(weights, weight, out=mask)
            # At most total / weight tokens are heavier.
            few = total < weight * (_FEW * self._vocab_size)
            if few and in_nucleus(weights[mask].sum(dtype=np.float64), total, top_p):
                return token
            np.multiply(weights, mask, out=weights)
            sums = self._table.fold(np.add, weights)
            if in_nucleus(sums.sum(dtype=np.float64), total, top_p):
                return token
            draws += 1
            uniform = self._draws.uniform(slots, position, draws)[0]

    def _drop_unlikely(self, slot: int, sums: Float32Array) -> Float32Array:
        """Set to 0 the weights that a rule other than top_p drops; returns the new column sums."""
        weights, min_p = self._table.weights, np.float32(self._min_ps[slot])
        if self._min_ps[slot] > 0:
            np.multiply(weights, above_min_p(weights, weights.max(), min_p), out=weights)
            sums = self._table.fold(np.add, weights)
        return sums
