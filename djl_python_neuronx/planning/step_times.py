"""Times of device steps: those that AWS measured, else estimates with a range.

Measured: neuron_decoder_benchmarks.csv, the decoder models of the pages "Inf2 Inference Performance" and "Trn1/Trn1n
Inference Performance" of the AWS Neuron documentation (github.com/aws-neuron/aws-neuron-sdk, about-neuron/benchmarks),
transformers-neuronx of SDK 2.18. A decode takes a row's median time of an output token, and reads `sequence_length`
positions for each sequence. A prefill takes a row's median time to first token; only rows with one prompt count,
because batches were prefilled by graphs of their own, in 2 to 21 times that.

The table is licensed under CC BY-SA 4.0, see NOTICE. The columns from num_layers on were added.

Estimated: a sum of parts (`work`), each times a cost. The costs are those with the least squares of the logarithm of
measured by estimated time; the range is that of measured by estimated time where the costs are fitted on models of
other sizes alone, or on the other machine. tests/planning/test_step_times.py derives both from the table.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from djl_python_neuronx.config.values import long_dtype
from djl_python_neuronx.errors import ConfigError
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.memory import core_memory

Array: TypeAlias = npt.NDArray[np.float64]

DECODE_COSTS: Final = (1.549e-4, 1.262, 1.689, 4.81e-6)
"""Seconds of a layer; factors for weights and cache, which are read at 79 and 59 % of the chip's bandwidth; seconds of
a row in a layer."""
DECODE_RANGE: Final = (0.74, 1.48)
PREFILL_COSTS: Final = (5.735e-4, 3.075, 59.74)
"""Seconds of a layer; factors for matrices and attention, which reach 33 and 1.7 % of the chip's operations."""
PREFILL_RANGE: Final = (0.30, 2.98)
_PUBLISHED: Final = 14
"""Columns of AWS; those behind it are the model's `ModelFacts` from its config.json."""
_SAMPLE: Final = 4096
"""Positions by which the bytes of one in the cache are counted."""


class StepTimes(Protocol):
    """The times of a model's steps."""

    def decode_s(self, rows: int, positions: int) -> float:
        """Return the seconds of a decode. `rows`: of the graph, live or not; `positions`: read for each, a bucket."""

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds of the prefill of one prompt. `tokens`: with its padding, a bucket."""


@dataclass(frozen=True)
class Curve:
    """The times of one kind of step, of one model on one machine."""

    parts_s: Array
    """Seconds of each part."""
    bounds: tuple[float, float]
    """The least and the most that an estimated time may be, as factors."""
    own: Array
    """Estimated and measured times of this very model, degree and machine, ascending. Empty: all is estimated."""
    doubt: str
    """Behind "estimate": what was not measured with any model."""

    def time_s(self, *scale: float) -> float:
        """Return the time of as much of each part: never less for more.

        Between measured times it is interpolated, beyond them it grows and shrinks with the estimate.
        """
        estimate_s = float(self.parts_s @ scale)
        if not self.own.size:
            return estimate_s
        within = np.clip(estimate_s, self.own[0, 0], self.own[0, -1])
        return float(np.interp(within, *self.own) * estimate_s / within)

    def measured(self, *scale: float) -> bool:
        """Return whether the time lies within those that were measured."""
        estimate_s = self.parts_s @ scale
        return bool(self.own.size and self.own[0, 0] <= estimate_s <= self.own[0, -1])

    def explained(self, *scale: float) -> str:
        """Return the time of as much of each part and its source; of an estimate its range and parts."""
        time_ms, (low, high) = 1e3 * self.time_s(*scale), self.bounds
        if self.measured(*scale):
            return f"{time_ms:.1f} ms, measured by AWS"
        parts = " + ".join(f"{1e3 * part_s:.1f}" for part_s in self.parts_s * scale)
        scaled = ", scaled to what was measured" if self.own.size else ""
        bounds = f"{low * time_ms:.1f} to {high * time_ms:.1f}"
        return f"{time_ms:.1f} ms ({bounds}), estimate{self.doubt}: {parts}{scaled}"


@dataclass(frozen=True)
class DeviceTimes:
    """The `StepTimes` of a model on Neuron cores."""

    decode: Curve
    prefill: Curve

    def decode_s(self, rows: int, positions: int) -> float:
        """Return the seconds of a decode, see `StepTimes`."""
        return self.decode.time_s(1, 1, rows * positions, rows)

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds of a prefill, see `StepTimes`; at least those of a decode, which reads the weights too."""
        return max(self.prefill.time_s(1, tokens, tokens**2), self.decode_s(1, tokens))


def step_times(case: Case) -> DeviceTimes:
    """Return the times of a model's steps, for options that are filled in.

    Raises:
        ConfigError: sizes of the model or the machine are not known.
    """
    decodes, prefills = [], []
    for row in published():
        if _is_of(row, case):
            rows, prompt = int(row["batch_size"]), int(row["input_length"])
            scale = 1, 1, rows * int(row["sequence_length"]), rows
            decodes.append((scale, float(row["tpot_p50_ms"]) / 1e3))
            if rows == 1:
                prefills.append(((1, prompt, prompt**2), float(row["ttft_p50_ms"]) / 1e3))
    known = case.degree in {int(row["tp_degree"]) for row in published()}
    doubt = "" if known else f", degree {case.degree} not measured"
    decode_s, prefill_s = work(case)
    decode_s, prefill_s = decode_s * DECODE_COSTS, prefill_s * PREFILL_COSTS
    return DeviceTimes(
        Curve(decode_s, DECODE_RANGE, _own(decode_s, decodes), doubt),
        Curve(prefill_s, PREFILL_RANGE, _own(prefill_s, prefills), doubt),
    )


def _own(parts_s: Array, measured: Sequence[tuple[tuple[float, ...], float]]) -> Array:
    """Return estimated and `measured` times, see `Curve`, of equal estimates the mean, never less for more.

    `measured`: each with as much of each part as it took.
    """
    found = defaultdict(list)
    for scale, time_s in measured:
        found[float(parts_s @ scale)].append(time_s)
    means = [np.mean(found[one]) for one in sorted(found)]
    return np.array([sorted(found), np.maximum.accumulate(means)])


@cache
def published() -> tuple[Mapping[str, str], ...]:
    """Return the rows of the table."""
    path = Path(__file__).with_name("neuron_decoder_benchmarks.csv")
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def _is_of(row: Mapping[str, str], case: Case) -> bool:
    """Return whether a row was measured with such a model, degree, machine and weights."""
    sizes = [int(row[name]) == getattr(case.model, name) for name in [*row][_PUBLISHED:]]
    weights = case.effective.weight_dtype or case.options.dtype
    shape = row["instance"], int(row["tp_degree"]), long_dtype(row["weights"])
    return all(sizes) and shape == (case.device.instance_type, case.degree, weights)


def work(case: Case) -> tuple[Array, Array]:
    """Return the work of each core in the seconds that it takes at the full speed of the chip, layers as their number.

    Of a decode: layers, reading the weights, reading one position of one sequence, and layers once more, for each row.
    Of a prefill: layers, the matrices of one token, and the attention of one token to another. With the padding of the
    degree, and with all experts.

    Raises:
        ConfigError: sizes of the model or the machine are not known.
    """
    model, device = case.model, case.device
    cached = case.with_options(n_positions=_SAMPLE, pa_num_blocks=None)
    one, two = (core_memory(cached.with_options(max_rolling_batch_size=n)) for n in (1, 2))
    bytes_per_s, flops, layers = device.core_bytes_per_s, device.core_flops, model.num_layers or 0
    if one is None or two is None or model.num_parameters is None or not bytes_per_s:
        msg = f"the time of a step is not known: the sizes of {model.model_type} or of the machine are not"
        raise ConfigError(msg)
    position = (two.read - one.read) / _SAMPLE
    weights_s, position_s = (one.read - _SAMPLE * position) / bytes_per_s, position / bytes_per_s
    token = 2 * (model.num_parameters - model.embedding_parameters) / case.degree
    pair = 4 * layers * (model.num_heads or 0) * (model.head_dim or 0) / case.degree
    decode = np.array([layers, weights_s, position_s, layers])
    return decode, np.array([layers, token / flops, pair / flops])
