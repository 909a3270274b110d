"""Times of device steps: those that AWS measured, else estimates with a range.

Measured: neuron_decoder_benchmarks.csv, the decoder models of the pages "Inf2 Inference Performance" and "Trn1/Trn1n
Inference Performance" of the AWS Neuron documentation (github.com/aws-neuron/aws-neuron-sdk, about-neuron/benchmarks),
transformers-neuronx of SDK 2.18. A decode takes a row's median time of an output token, and reads `sequence_length`
positions for each sequence. A prefill takes a row's median time to first token; only rows with one prompt count,
because batches were prefilled by graphs of their own, in 2 to 21 times that.

Estimated: a sum of parts (`_work`), each times a cost. The costs fit the measured rows best; the range is that of the
errors with which each model is predicted from the others. docs/plan.md has both.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.errors import ConfigError
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.machines import named
from djl_python_neuronx.planning.memory import core_memory
from djl_python_neuronx.planning.model import ModelFacts

Array: TypeAlias = npt.NDArray[np.float64]

_MODELS: Final = {
    "Llama-2-7b": (32, 4096, 11008, 32000, 32, 32),
    "Llama-2-13b": (40, 5120, 13824, 32000, 40, 40),
    "CodeLlama-13b-hf": (40, 5120, 13824, 32016, 40, 40),
    "Llama-2-70b": (80, 8192, 28672, 32000, 64, 8),
    "Llama-3-8B": (32, 4096, 14336, 128256, 32, 8),
    "Llama-3-70B": (80, 8192, 28672, 128256, 64, 8),
    "Mistral-7B-Instruct-v0.2": (32, 4096, 14336, 32000, 32, 8),
}
"""The `_SIZES` of the models that were measured. Source: config.json of each."""
_SIZES: Final = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
)
_SAMPLE: Final = 4096
"""Positions by which the bytes of one in the cache are counted."""
_FIT_STEPS: Final = 20
"""More than a fit needs to settle."""


class StepTimes(Protocol):
    """The times of a model's steps."""

    def decode_s(self, rows: int, positions: int) -> float:
        """Return the seconds of a decode. `rows`: of the graph, live or not; `positions`: read for each, a bucket."""

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds of the prefill of one prompt. `tokens`: with its padding, a bucket."""


class Measured(NamedTuple):
    """A row of the table."""

    case: Case
    """The model with `rows` slots of `positions` tokens."""
    rows: int
    positions: int
    prompt: int
    """Tokens of each prompt."""
    decode_s: float
    prefill_s: float
    """Of all prompts."""


@cache
def published() -> tuple[Measured, ...]:
    """Return the measured rows. The models have Llama's architecture, or one with the same tensors."""
    path = Path(__file__).with_name("neuron_decoder_benchmarks.csv")
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(map(_measured, csv.DictReader(file)))


def _measured(row: dict[str, str]) -> Measured:
    config = {"model_type": "llama", **dict(zip(_SIZES, _MODELS[row["model"]], strict=True))}
    rows, positions = int(row["batch_size"]), int(row["sequence_length"])
    options = {
        "tensor_parallel_degree": int(row["tp_degree"]),
        "dtype": "bfloat16",
        "quantize": "static_int8" if row["weights"] == "int8" else None,
        "max_rolling_batch_size": rows,
        "n_positions": positions,
    }
    model, machine = ModelFacts.from_config(config), named(row["instance"])
    filled = ServingOptions().model_copy(update=options)
    case = Case(filled, model, machine, NEURON_BACKENDS["tnx"])
    decode_s, prefill_s = float(row["tpot_p50_ms"]) / 1e3, float(row["ttft_p50_ms"]) / 1e3
    return Measured(case, rows, positions, int(row["input_length"]), decode_s, prefill_s)


class _Known(NamedTuple):
    """A measured time."""

    group: tuple[object, ...]
    """See `_group`."""
    parts: Array
    time_s: float


class _Law(NamedTuple):
    """The estimate of one kind of step."""

    costs: Array
    """Of each part."""
    low: float
    """The least that a time may be, as a factor."""
    high: float
    known: Sequence[_Known]

    @classmethod
    def fit(cls, known: Sequence[_Known]) -> _Law:
        """Fit the costs. The range is that of measured by estimated times, from costs without those of the model."""
        ratios: list[float] = []
        for model in {one.group[0] for one in known}:
            costs = _costs([one for one in known if one.group[0] != model])
            left_out = [one for one in known if one.group[0] == model]
            ratios += [one.time_s / float(one.parts @ costs) for one in left_out]
        return cls(_costs(known), min(ratios), max(ratios), known)


@dataclass(frozen=True)
class Curve:
    """The times of one kind of step, of one model on one machine."""

    seconds: Array
    """Of each part."""
    low: float
    """The least that a time may be, as a factor."""
    high: float
    own: Array
    """Estimated and measured times of this very model, degree and machine, ascending. Empty: all is estimated."""

    @classmethod
    def of(cls, work: Array, law: _Law, group: tuple[object, ...]) -> Curve:
        """Return the times of a case with this `_work` and `_group`."""
        measured: dict[float, list[float]] = defaultdict(list)
        for one in law.known:
            if one.group == group:
                measured[float(one.parts @ law.costs)].append(one.time_s)
        estimates = sorted(measured)
        times = np.maximum.accumulate([np.mean(measured[one]) for one in estimates])
        own = np.array([estimates, times])
        ratios = [one / time for at, time in own.T for one in measured[at]] or [law.low, law.high]
        return cls(work * law.costs, min(ratios), max(ratios), own)

    def time_s(self, *scale: float) -> float:
        """Return the time of as much of each part: never less for more.

        Between measured times it is interpolated, beyond them it grows and shrinks with the estimate.
        """
        estimate_s = float(self.seconds @ scale)
        if not self.own.size:
            return estimate_s
        estimates, times = self.own
        beyond = estimate_s / np.clip(estimate_s, estimates[0], estimates[-1])
        return float(np.interp(estimate_s, estimates, times) * beyond)

    @property
    def slowest(self) -> Curve:
        """The longest times of the range."""
        return replace(self, seconds=self.seconds * self.high, own=self.own * self.high)


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

    @property
    def slowest(self) -> DeviceTimes:
        """The longest times of the range."""
        return DeviceTimes(self.decode.slowest, self.prefill.slowest)


def step_times(case: Case, measured: tuple[Measured, ...] | None = None) -> DeviceTimes:
    """Return the times of a model's steps, for options that are filled in.

    `measured`: by default all rows that are `published`.

    Raises:
        ConfigError: sizes of the model or the machine are not known.
    """
    laws = _laws(published() if measured is None else measured)
    return DeviceTimes(*map(partial(Curve.of, group=_group(case)), _work(case), laws))


@cache
def _laws(measured: tuple[Measured, ...]) -> tuple[_Law, _Law]:
    """Return the estimates of decodes and of prefills."""
    decodes, prefills = [], []
    for case, rows, positions, prompt, decode_s, prefill_s in measured:
        decode, prefill = _work(case)
        parts = decode * (1, 1, rows * positions, rows)
        decodes.append(_Known(_group(case), parts, decode_s))
        if rows == 1:
            parts = prefill * (1, prompt, prompt**2)
            prefills.append(_Known(_group(case), parts, prefill_s))
    return _Law.fit(decodes), _Law.fit(prefills)


def _group(case: Case) -> tuple[object, ...]:
    """Return the model, its degree and its machine: what measured times of a case have in common."""
    facts = case.model
    sizes = (facts.num_layers, facts.hidden_size, facts.intermediate_size)
    model = (*sizes, facts.num_heads, facts.num_kv_heads, case.effective.weight_dtype)
    return model, case.degree, case.device.instance_type


def _work(case: Case) -> tuple[Array, Array]:
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
    cache_bytes = two.read - one.read
    weights_s, position_s = (
        (one.read - cache_bytes) / bytes_per_s,
        cache_bytes / _SAMPLE / bytes_per_s,
    )
    token = 2 * (model.num_parameters - model.embedding_parameters) / case.degree
    pair = 4 * layers * (model.num_heads or 0) * (model.head_dim or 0) / case.degree
    decode = np.array([layers, weights_s, position_s, layers])
    return decode, np.array([layers, token / flops, pair / flops])


def _costs(known: Sequence[_Known]) -> Array:
    """Return the costs with the least squares of the logarithm of measured by estimated time; none below 0."""
    parts, times = np.array([one.parts for one in known]), np.array([one.time_s for one in known])
    costs = np.linalg.lstsq(parts / times[:, None], np.ones(len(times)), rcond=None)[0]
    for _ in range(_FIT_STEPS):
        estimates = parts @ costs
        change = np.linalg.lstsq(parts / estimates[:, None], np.log(times / estimates), rcond=None)
        costs = np.maximum(costs + change[0], 0.0)
    return np.asarray(costs)
