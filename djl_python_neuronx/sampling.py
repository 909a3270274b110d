"""SamplingParams and every sampling rule, vectorised over the batch.

The rules, in the order in which they apply: repetition penalty over prompt and output, temperature, top_k, top_p,
min_p, draw. All of them keep or drop equal logits together: a tie at the k-th value, or at the edge of the nucleus,
is kept whole. Greedy takes the lowest id of a tie.

No rule sorts the vocabulary. `top_k` needs only the logits above a floor that the k-th best of some 2000 maxima gives;
`top_p` without `top_k` draws first and then asks whether the token was allowed.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from djl_python_neuronx.errors import RequestError

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]
IndexArray = npt.NDArray[np.intp]
UInt64Array = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]


def _rule(default: Any, allowed: str, holds: Callable[[Any], bool], types: tuple[type, ...] = (int, float)) -> Any:
    """A field of SamplingParams that knows which values it takes."""
    return field(default=default, metadata={"allowed": allowed, "holds": holds, "types": types})


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen; the defaults are greedy.

    Raises:
        RequestError: a value of the wrong type or out of its range, by name.
    """

    temperature: float = _rule(0.0, "a finite number of at least 0 (0: greedy)", lambda v: 0 <= v < math.inf)
    top_k: int = _rule(0, "an integer of at least 0 (0: off)", lambda v: v >= 0, (int,))
    top_p: float = _rule(1.0, "a number above 0 and at most 1 (1: off)", lambda v: 0 < v <= 1)
    min_p: float = _rule(0.0, "a number from 0 to 1 (0: off)", lambda v: 0 <= v <= 1)
    repetition_penalty: float = _rule(1.0, "a finite number above 0 (1: off)", lambda v: 0 < v < math.inf)
    seed: int | None = _rule(None, "an integer from 0 to 2**64 - 1", lambda v: 0 <= v < 2**64, (int,))

    WIRE_NAMES: ClassVar[tuple[str, ...]]
    """What requests call the fields: every protocol reads the parameters by these names."""

    def __post_init__(self) -> None:
        """Refuse what no rule can honour."""
        for rule in fields(self):
            value = getattr(self, rule.name)
            if value is None and rule.default is None:
                continue
            numeric = isinstance(value, rule.metadata["types"]) and not isinstance(value, bool)
            if not numeric or not rule.metadata["holds"](value):
                msg = f"{rule.name} is {reprlib.repr(value)}; expected {rule.metadata['allowed']}"
                raise RequestError(msg)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """The parameters among a request's `values`; other names are the caller's, None counts as left out."""
        return cls(**{name: values[name] for name in cls.WIRE_NAMES if values.get(name) is not None})


SamplingParams.WIRE_NAMES = tuple(rule.name for rule in fields(SamplingParams))


def logprobs(logits: Float32Array, token_ids: npt.ArrayLike) -> Float32Array:
    """float32[n]: log-softmax of each row of `logits` (float32[n, V]) at its token; the model's own distribution."""
    found = np.empty(len(logits), np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        for i, (row, token_id) in enumerate(zip(logits, np.asarray(token_ids), strict=True)):
            # In place, row by row: the copy stays in the core's cache.
            shifted = row - row.max()
            chosen = shifted[token_id]
            found[i] = chosen - np.log(np.exp(shifted, out=shifted).sum())
    return found


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_DRAW = np.uint64(0xD1342543DE82EF95)


def _mix(z: UInt64Array) -> UInt64Array:
    """A bijection of 64 bits that spreads every input bit. Source: SplitMix64 (Steele, Lea, Flood 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _uniform(streams: UInt64Array, positions: npt.NDArray[np.integer[Any]], draw: int = 0) -> Float64Array:
    """float64[n] in [0, 1): a pure function of (stream, position, draw), whatever the row or the batch.

    52 bits, such that ``u * total < total`` also holds after rounding.
    """
    counters = positions.astype(np.uint64) * _GOLDEN + np.full(1, draw, np.uint64) * _DRAW
    return (_mix(streams + counters) >> np.uint64(12)) * 2.0**-52


def _penalise(values: Float32Array, seen: BoolArray | bool, penalty: np.float32) -> Float32Array:
    """`values` with those of `seen` tokens divided (if above 0) or multiplied by the penalty. Source: CTRL (2019)."""
    return np.where(seen, np.where(values > 0, values / penalty, values * penalty), values)


_GREEDY, _TOP_K, _WHOLE = range(3)
_COLUMNS = 2048
"""A row is read as a table with about this many columns: their maxima and sums are cheap, because numpy reduces the
long way with whole vectors (blocks of 64 neighbours: five times slower), and stay in the first-level cache."""
_SMALLEST, _LARGEST = 1e-30, 1e30
"""Temperature and penalty are held in this range: neither they nor their inverse leave float32."""


class Sampler:
    """Chooses the next token of every slot. Engine thread only.

    What a slot draws depends on its logits, parameters, history, seed and position, never on its index or company:
    every kernel works on one row, or element by element, or accumulates in a fixed order.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._kinds = np.zeros(num_slots, np.int8)
        self._temperatures = np.ones(num_slots)
        self._top_ks = np.zeros(num_slots, np.intp)
        self._top_ps = np.ones(num_slots)
        self._min_ps = np.zeros(num_slots)
        self._penalties = np.ones(num_slots, np.float32)
        self._penalised = np.zeros(num_slots, np.bool_)
        self._streams = np.zeros(num_slots, np.uint64)
        self._device_rows = np.tile(np.float32([1, 1, 1]), (num_slots, 1))
        # The history as a table: penalties then cost the same at token 64 and at token 4096.
        self._seen = np.zeros((num_slots, vocab_size), np.bool_)
        self._num_rows = max(1, vocab_size // _COLUMNS)
        self._num_columns = vocab_size // self._num_rows
        self._columns = np.empty(self._num_columns, np.float32)
        self._weights = np.empty(vocab_size, np.float32)
        self._mask = np.empty(vocab_size, np.bool_)

    def assign(self, slot: int, params: SamplingParams, prompt_ids: Sequence[int], seed: int) -> None:
        """Start a new sequence in a slot. `seed` is `params.seed`, or what the engine chose for it."""
        greedy = params.temperature == 0
        limited = 0 < params.top_k < self._vocab_size
        penalty = min(max(params.repetition_penalty, _SMALLEST), _LARGEST)
        # A greedy row with a penalty below 1 may have its winner anywhere in the history, which is the work of top 1.
        self._kinds[slot] = _TOP_K if limited or (greedy and penalty < 1) else _GREEDY if greedy else _WHOLE
        if greedy and penalty >= 1:
            self._kinds[slot] = _GREEDY
        self._temperatures[slot] = 1.0 if greedy else min(max(params.temperature, _SMALLEST), _LARGEST)
        self._top_ks[slot] = 1 if greedy else min(params.top_k, self._vocab_size)
        self._top_ps[slot] = 1.0 if greedy else params.top_p
        self._min_ps[slot] = 0.0 if greedy else params.min_p
        self._penalties[slot] = penalty
        self._streams[slot] = _mix(np.array([seed], np.uint64))[0]
        self._device_rows[slot] = (1, 1, 1) if greedy else (params.top_k, params.top_p, self._temperatures[slot])
        self._forget(slot)
        if penalty != 1:
            self._penalised[slot] = True
            self._seen[slot, np.asarray(prompt_ids, np.intp)] = True
