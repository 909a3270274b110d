"""The sampler: from logits to tokens, in two stages for each row.

`edit` applies a slot's own rules to its logits: bias, penalties, and the mask that its constraints make (`masks.py`).
`draw` makes probabilities of them (temperature, top_k), applies all other rules, and draws. top_p and min_p judge the
same probabilities, and a token stays if both keep it; typical_p judges what they leave. All of them keep or drop equal
logits together: a tie at the k-th value, or at the edge of the nucleus, is kept whole. Greedy takes the lowest id of a
tie. A rule that a row does not use costs one test of its parameter. Order, and each rule: as in Hugging Face's
`generate`; presence and frequency penalty, which it has not, as in vLLM.

This module defines every rule, for one row. `sampling.c` has the same stages compiled, for all rows of a step in one
call; it is used where the package has it (`native.py`). Both give the same tokens on every machine: all arithmetic
consists of IEEE's elementary operations, each rounded by itself, and all sums have a defined order. So numpy's exp is
not used; its last bit depends on the processor.

No rule sorts the vocabulary. `largest` needs only the logits above a floor, which the k-th best of some maxima gives;
`draw` draws first and then checks whether the token is in the nucleus.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from djl_python_neuronx.engine.masks import BoolArray, Constraint, Masks
from djl_python_neuronx.engine.native import LIBRARY, Kernel, load
from djl_python_neuronx.sampling import SamplingParams

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]
IndexArray = npt.NDArray[np.intp]
ListedTokens = npt.NDArray[np.void]
"""An array of `LISTED`."""
Rules = Any
"""One element of an array of `RULES`."""

RULES = np.dtype(
    [
        ("stream", np.uint64),
        ("top_p", np.float64),
        ("typical_p", np.float64),
        ("scale", np.float32),
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("penalty", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("top_k", np.int32),
        ("penalises", np.int32),
        ("num_listed", np.int32),
        ("masked", np.int32),
    ],
    align=True,
)
"""The rules of a slot, as `struct rules` has them. `stream` of random numbers; `scale`: log2(e) / temperature. Greedy
is a top_k of 1. `penalises`: each token of the history is listed; `num_listed`: tokens in the slot's list."""
LISTED = np.dtype([("id", np.int32), ("count", np.int32), ("bias", np.float32)])
"""A token whose logit a slot's rules change, as `struct listed` has it. `count` of it in the output; -1 if the prompt
has it neither."""
NO_TOKEN, NONE_ALLOWED = -1, -2
"""In place of a token: the logits are no distribution, and the slot's mask leaves no finite logit."""
_COLUMNS = 1024
"""Columns of the table in which a row is summed: element i is in column i % 1024. Whole lines cost one pass of long
vectors (blocks of neighbours: five times slower), and the columns' sums locate a draw in two short searches."""
_CACHED = 32 * _COLUMNS
"""Elements whose weights are computed at once: what that needs stays in the core's cache."""
_SMALLEST, _LARGEST = 1e-30, 1e30
"""Range of parameters: neither they nor their inverse leave float32, nor do products of them become zero."""
_LOG2_E = 1.4426950408889634
_GREEDY = SamplingParams(temperature=1.0, top_k=1)
_LOWEST = np.finfo(np.float32).min
_INFINITY = np.float32(np.inf)
_ROUNDING = np.float32(1.5 * 2**23)
"""Adding it rounds to an integer."""
_POWER = np.array(
    [0.00132647273, 0.00967151299, 0.0555073358, 0.240222424, 0.693147004, 1], np.float32
)
"""Coefficients of 2**x from -0.5 to 0.5, the highest power first: least largest relative error (2e-7), exact at 0."""
_GOLDEN, _TURN, _WORD = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 2**64 - 1


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
    ids = largest(row, min(count, len(row)))
    found: list[int] = ids[(-row[ids]).argsort(kind="stable")[:count]].tolist()
    return found


def edit(
    row: Float32Array, rules: Rules, listed: ListedTokens, allowed: BoolArray | None
) -> Float32Array:
    """The row with the slot's own rules applied; the row itself if it has none. `allowed`: its mask, bool[V]."""
    listed = listed[: rules["num_listed"]]
    if allowed is None and not len(listed):
        return row
    row = row.copy() if allowed is None else np.where(allowed, row, -_INFINITY)
    values, counts = row[listed["id"]] + listed["bias"], listed["count"]
    # Source: CTRL (2019).
    penalised = np.where(values > 0, values / rules["penalty"], values * rules["penalty"])
    values = np.where(counts >= 0, penalised, values)
    # Source: OpenAI's API reference; the order is vLLM's.
    values -= rules["frequency"] * np.maximum(counts, 0).astype(np.float32)
    values -= rules["presence"] * (counts > 0)
    row[listed["id"]] = values
    return row


def largest(row: Float32Array, count: int) -> IndexArray:
    """Ascending ids of the `count` largest elements, and of those that equal the last of them; none of -inf."""
    lines, pool = len(row) // _COLUMNS, row
    if lines > 1 and 2 * count <= _COLUMNS:
        # At least `count` elements reach the k-th best column maximum, and few of the others do.
        pool = row[: lines * _COLUMNS].reshape(lines, _COLUMNS).max(axis=0)
    ids = np.flatnonzero(row >= _kth_largest(pool, count))
    if len(ids) > count:
        ids = ids[row[ids] >= _kth_largest(row[ids], count)]
    return ids


def draw(values: Float32Array, best: np.float32, rules: Rules, position: int) -> int:
    """The place of the drawn one among `values`, the largest of which is `best`.

    No sort: draw from all of them, then check whether the token is in the nucleus. If not, the token and all that are
    not heavier are outside it; draw again among the rest. The nucleus is never cut, so an accepted token follows its
    distribution; the likeliest token is always accepted, so this ends, after about 1 + ln(1 / top_p) draws. So it is
    with typical_p, whose nucleus consists of the tokens with the least `surprise`; that of top_p is cut before.
    """
    weights = weigh(values, best, rules["scale"])
    mass = cumulated(weights)
    keys, share = weights, rules["top_p"]
    least_mass = share * mass[-1]
    if rules["min_p"] > 0:  # the weight of the best is 1
        weights *= weights >= rules["min_p"]
        mass = cumulated(weights)
    if rules["typical_p"] < 1:
        if share < 1:
            weights *= weights >= nucleus_edge(weights, least_mass)
            mass = cumulated(weights)
        keys, share = -surprise(values, best, rules["scale"], weights, mass[-1]), rules["typical_p"]
        least_mass = share * mass[-1]
    turn = 0
    while True:
        place = locate(uniform(int(rules["stream"]), position, turn), weights, mass)
        if share == 1:
            return place
        weights *= keys > keys[place]
        mass = cumulated(weights)
        if mass[-1] < least_mass:
            return place
        turn += 1


def nucleus_edge(weights: Float32Array, least_mass: float) -> np.float32:
    """The smallest weight in the nucleus: all larger ones together have less than `least_mass`."""
    low, high = 0, int(np.float32(1).view(np.int32))
    while low < high:
        # Floats from 0 to 1 have the order of their bits.
        middle = (low + high) // 2
        if cumulated(weights * (weights > _float_of(middle)))[-1] < least_mass:
            high = middle
        else:
            low = middle + 1
    return _float_of(low)


def surprise(
    values: Float32Array, best: np.float32, scale: np.float32, weights: Float32Array, total: float
) -> Float32Array:
    """The distance of each token's log2 p from the mean of all, the negative entropy.

    Both have the same unknown summand, so no logarithm is needed. Source: Meister et al. 2022 (typical sampling).
    """
    exponents = (values - best) * scale
    mean = np.float32(cumulated(np.where(weights > 0, exponents * weights, 0))[-1] / total)
    distances: Float32Array = np.abs(exponents - mean)
    return distances


def weigh(values: Float32Array, best: np.float32, scale: np.float32) -> Float32Array:
    """exp((value - best) / temperature) of each value, by IEEE's elementary operations; below 2**-124: 0."""
    weights = np.empty_like(values)
    for start in range(0, len(values), _CACHED):
        part = weights[start : start + _CACHED]
        exponents = values[start : start + _CACHED] - best
        exponents *= scale
        kept = exponents >= -124
        shifted = np.maximum(exponents, -124, out=exponents) + _ROUNDING
        rest = np.subtract(exponents, shifted - _ROUNDING, out=exponents)
        np.multiply(rest, _POWER[0], out=part)
        for coefficient in _POWER[1:-1]:
            part += coefficient
            part *= rest
        part += _POWER[-1]
        bits = part.view(np.int32)
        bits += shifted.view(np.int32) << 23
        part *= kept
    return weights


def cumulated(weights: Float32Array) -> Float64Array:
    """float64[1024]: cumulated sums of the columns, each of which is summed in float32, line by line."""
    body = len(weights) // _COLUMNS * _COLUMNS
    columns = weights[:body].reshape(-1, _COLUMNS).sum(axis=0)
    columns[: len(weights) - body] += weights[body:]
    mass: Float64Array = columns.cumsum(dtype=np.float64)
    return mass


def locate(share: float, weights: Float32Array, mass: Float64Array) -> int:
    """The place at `share` of the cumulated weights: first its column, then its line."""
    target = share * mass[-1]
    column = int(mass.searchsorted(target, side="right"))
    within = weights[column::_COLUMNS].cumsum(dtype=np.float64)
    target -= mass[column - 1] if column else 0.0
    # A column's float32 sum may exceed its weights: then the last one that adds something.
    line = min(within.searchsorted(target, side="right"), within.searchsorted(within[-1]))
    return column + int(line) * _COLUMNS


def uniform(stream: int, position: int, turn: int) -> float:
    """A random number in [0, 1), of 52 bits, such that ``u * total < total`` also holds after rounding.

    A pure function of its arguments, whatever the row or the batch.
    """
    bits = _mix((stream + position * _GOLDEN + turn * _TURN) & _WORD)
    return float((bits >> 12) * 2.0**-52)


def _mix(z: int) -> int:
    """A bijection of 64 bits that spreads every input bit. Source: SplitMix64 (Steele, Lea, Flood 2014)."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _WORD
    return z ^ (z >> 31)


def _float_of(bits: int) -> np.float32:
    found: np.float32 = np.int32(bits).view(np.float32)
    return found


def _kth_largest(values: Float32Array, k: int) -> np.float32:
    found: np.float32 = np.partition(values, len(values) - k)[-k]
    return max(found, _LOWEST)


class Sampler:
    """Samples the next token of every slot. Engine thread only.

    The token of a slot depends on its logits, parameters, history, seed and position, never on its index or on other
    rows.
    """

    def __init__(
        self, num_slots: int, vocab_size: int, *, library: Path | None = LIBRARY, threads: int = 1
    ) -> None:
        """No slot holds a sequence yet. Memory: 8 bytes for each slot and token, touched for listed tokens only.

        `library`: see `native.load`; `threads`: the most that sample the rows of one call.
        """
        self._rules = np.zeros(num_slots, RULES)
        self._rules[:] = _packed(_GREEDY, vocab_size, 0)
        self._listed = np.zeros((num_slots, vocab_size), LISTED)
        self._masks = Masks(num_slots, vocab_size)
        compiled = load(library)
        self._kernel = compiled and Kernel(
            compiled, self._rules, self._listed, self._masks.bits, threads
        )

    def assign(
        self,
        slot: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        seed: int,
        output_ids: Sequence[int] = (),
        constraints: Sequence[Constraint] = (),
    ) -> None:
        """Start a sequence in a slot. `seed` is `params.seed`, or one drawn by the engine.

        `output_ids`: its generated tokens, if it has some already; `constraints`: see `Masks.assign`.
        """
        self.release(slot)
        self._rules[slot] = _packed(params, self._listed.shape[1], seed)
        penalises = self._rules["penalises"][slot]
        if penalises or params.logit_bias:
            history = (prompt_ids, output_ids) if penalises else ((), ())
            self._list(slot, dict(params.logit_bias), *history)
        if constraints:
            self._rules["masked"][slot] = True
            self._masks.assign(slot, constraints, output_ids)

    def _list(
        self,
        slot: int,
        biases: Mapping[int, float],
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
    ) -> None:
        """Make the slot's list: biased tokens, and those of the history."""
        groups = [np.asarray([*ids], np.int32) for ids in (biases, prompt_ids, output_ids)]
        ids = np.unique(np.concatenate(groups))
        biased, prompt, output = map(ids.searchsorted, groups)
        listed = self._listed[slot, : len(ids)]
        listed["id"], listed["count"], listed["bias"] = ids, -1, 0
        listed["bias"][biased] = [min(max(bias, -_LARGEST), _LARGEST) for bias in biases.values()]
        listed["count"][prompt] = listed["count"][output] = 0
        np.add.at(listed["count"], output, 1)
        self._rules["num_listed"][slot] = len(ids)

    def release(self, slot: int) -> None:
        """End the sequence of a slot; idempotent."""
        for name in ("penalises", "num_listed", "masked"):
            self._rules[name][slot] = 0
        self._masks.release(slot)

    def device_rows(self, slots: Int32Array) -> Float32Array:
        """float32[B, 3]: top_k (0: off), top_p, temperature, for a device that samples; greedy is (1, 1.0, 1.0)."""
        rules = self._rules[slots]
        columns = (rules["top_k"], rules["top_p"], rules["temperature"])
        return np.stack(columns, axis=1).astype(np.float32)

    def wait(self) -> None:
        """Wait until the masks of the noted tokens are made: constraints are at rest then."""
        self._masks.wait()

    def mask_error(self, slot: int) -> BaseException | None:
        """The error of a slot whose token is `NONE_ALLOWED`, if its constraints failed."""
        return self._masks.errors.get(slot)

    def sample(
        self, logits: Float32Array, slots: Int32Array, positions: Int32Array, *, note: bool = True
    ) -> Int32Array:
        """int32[B]: the next token of each slot, entered into its history; `NO_TOKEN` where no distribution exists.

        That is a row with a NaN, with +inf, or without any finite logit; where the slot's mask leaves none it is
        `NONE_ALLOWED`. `logits`, float32[B, V] with contiguous rows, is only read. `positions`, int32[B], is the index
        of the new token within its sequence; the draw depends on it. Without `note` masks are not used, and the history
        stays as it is: a draft is not yet a token.
        """
        masked = note and bool(self._masks)
        if masked:
            self._masks.wait()
        if self._kernel is not None:
            tokens = self._kernel.sample(logits, slots, positions, note)
        else:
            rows, tokens = np.asarray(logits, np.float32), np.zeros(len(slots), np.int32)
            with np.errstate(over="ignore", invalid="ignore"):
                for i, (slot, position) in enumerate(
                    zip(slots.tolist(), positions.tolist(), strict=True)
                ):
                    tokens[i] = self._token(rows[i], slot, position, note)
                    if note and tokens[i] >= 0 and self._rules["penalises"][slot]:
                        self._count(slot, tokens[i])
        if masked:
            self._masks.note(slots.tolist(), tokens.tolist())
        return tokens

    def _count(self, slot: int, token: np.int32) -> None:
        """Enter a generated token into the slot's list."""
        num_listed = self._rules["num_listed"][slot]
        listed = self._listed[slot]
        places = np.flatnonzero(listed["id"][:num_listed] == token)
        if not len(places):
            listed[num_listed] = token, 1, 0
            self._rules["num_listed"][slot] += 1
        else:
            listed["count"][places] = np.maximum(listed["count"][places], 0) + 1

    def _token(self, row: Float32Array, slot: int, position: int, note: bool) -> int:
        """The token of one row; see `sample`."""
        rules = self._rules[slot]
        masked = note and rules["masked"]
        allowed = self._masks.allowed(slot) if masked else None
        row = edit(row, rules, self._listed[slot], allowed)
        winner = row.argmax()  # the first NaN, if there is one
        best = row[winner]
        if not isfinite(best):
            return NONE_ALLOWED if masked and best == -np.inf else NO_TOKEN
        if rules["top_k"] == 1:
            return int(winner)
        if not 0 < rules["top_k"] < len(row):
            return draw(row, best, rules, position)
        ids = largest(row, int(rules["top_k"]))
        return int(ids[draw(row[ids], best, rules, position)])


def _packed(params: SamplingParams, vocab_size: int, seed: int) -> tuple[float, ...]:
    """The rules of a slot as an element of `RULES`."""
    drawing = _GREEDY if params.temperature == 0 or params.top_k == 1 else params
    temperature = min(max(drawing.temperature, _SMALLEST), _LARGEST)
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return (
        _mix(seed),
        max(drawing.top_p, _SMALLEST),
        max(drawing.typical_p, _SMALLEST),
        _LOG2_E / temperature,
        temperature,
        drawing.min_p,
        min(max(params.repetition_penalty, _SMALLEST), _LARGEST),
        params.presence_penalty,
        params.frequency_penalty,
        min(drawing.top_k, vocab_size),
        penalties != (1, 0, 0),
        0,
        0,
    )
