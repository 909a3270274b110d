"""Times of steps: those that AWS measured, and estimates of models that were left out."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from djl_python_neuronx.errors import ConfigError
from djl_python_neuronx.planning import step_times as module
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.machines import named
from djl_python_neuronx.planning.memory import core_memory
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.step_times import published, step_times, work
from tests.planning.test_memory import case_of, facts_of

VOCABULARIES = {"Llama-3-8B": 128256, "Llama-3-70B": 128256}
SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
"""Columns to names of config.json."""


class Row(NamedTuple):
    """A row of the table."""

    model: tuple[object, ...]
    """Sizes: Llama-2-13b and CodeLlama-13b are one, Llama-2-70b and Llama-3-70b too, whatever their weights' type."""
    case: Case
    rows: int
    positions: int
    prompt: int
    decode_s: float
    prefill_s: float

    @classmethod
    def of(cls, row):
        name, weights = row["model"], row["weights"]
        sizes = {key: int(row[column]) for column, key in SIZES.items()}
        config = sizes | {"model_type": "llama", "vocab_size": VOCABULARIES.get(name, 32000)}
        rows, positions, degree, prompt = (
            int(row[key]) for key in ("batch_size", "sequence_length", "tp_degree", "input_length")
        )
        quantised = {"quantize": "static_int8"} if weights == "int8" else {}
        facts = ModelFacts.from_config(config)
        case = case_of(facts, "tnx", positions, rows, degree, machine=row["instance"], **quantised)
        times = float(row["tpot_p50_ms"]) / 1e3, float(row["ttft_p50_ms"]) / 1e3
        return cls((*sizes.values(),), case, rows, positions, prompt, *times)


ROWS = [Row.of(row) for row in published()]
SINGLE = [row for row in ROWS if row.rows == 1]


def decodes(rows):
    """The parts of each decode, and its time."""
    parts = [work(one.case)[0] * (1, 1, one.rows * one.positions, one.rows) for one in rows]
    return np.array(parts), np.array([one.decode_s for one in rows])


def prefills(rows):
    """The parts of each prefill of a single prompt, and its time."""
    single = [row for row in rows if row.rows == 1]
    parts = [work(one.case)[1] * (1, one.prompt, one.prompt**2) for one in single]
    return np.array(parts), np.array([one.prefill_s for one in single])


def fitted(parts, times):
    """The costs with the least squares of the logarithms, by Gauss and Newton."""
    costs = np.linalg.lstsq(parts / times[:, None], np.ones(len(times)), rcond=None)[0]
    for _ in range(20):
        estimates = parts @ costs
        costs += np.linalg.lstsq(parts / estimates[:, None], np.log(times / estimates), rcond=None)[
            0
        ]
        costs = np.maximum(costs, 0)
    return costs


def model_of(row):
    return row.model


def machine_of(row):
    return row.case.machine.instance_type


def left_out(kind, rows, of):
    """Of each model or machine the measured by estimated times, with costs that are fitted on the others."""
    found = {}
    for one in {of(row) for row in rows}:
        costs = fitted(*kind([row for row in rows if of(row) != one]))
        parts, times = kind([row for row in rows if of(row) == one])
        found[one] = times / (parts @ costs)
    return found


def ratios_of(kind, rows):
    """All of these times, of models and of machines."""
    each = [left_out(kind, rows, of).values() for of in (model_of, machine_of)]
    return np.concatenate([*each[0], *each[1]])


def test_the_table_is_the_published_one():
    """Sums of the column tpot_p50_ms, by awk."""
    assert len(ROWS) == 78
    assert len(SINGLE) == 45
    by_machine = {
        name: sum(row.decode_s for row in ROWS if row.case.machine.instance_type == name)
        for name in ("inf2.48xlarge", "trn1.32xlarge")
    }
    assert by_machine == pytest.approx(
        {"inf2.48xlarge": 0.777201, "trn1.32xlarge": 0.712393}, abs=1e-6
    )
    assert {row.case.degree for row in ROWS} == {24, 32}


@pytest.mark.parametrize("kind", [decodes, prefills])
def test_costs_and_range_are_those_of_the_table(kind):
    name = kind.__name__.removesuffix("s").upper()
    costs, (low, high) = getattr(module, f"{name}_COSTS"), getattr(module, f"{name}_RANGE")
    assert fitted(*kind(ROWS)) == pytest.approx(costs, rel=1e-3)
    ratios = ratios_of(kind, ROWS)
    assert low <= ratios.min() <= low + 0.01
    assert high - 0.01 <= ratios.max() <= high


@pytest.mark.parametrize("kind", [decodes, prefills])
def test_a_model_that_was_not_measured_is_within_the_range(kind):
    """Neither the costs nor the range know the times of a model: both are those of the others. docs/plan.md has it."""
    inside = []
    for model, ratios in left_out(kind, ROWS, model_of).items():
        known = ratios_of(kind, [row for row in ROWS if row.model != model])
        inside += [*((known.min() <= ratios) & (ratios <= known.max()))]
    assert len(inside) == {decodes: 78, prefills: 45}[kind]
    assert round(np.mean(inside), 2) == {decodes: 0.85, prefills: 0.96}[kind]


def test_measured_times_are_reproduced():
    """Of equal work the mean counts, and never less for more work."""
    curves = [(row, step_times(row.case)) for row in ROWS]
    of_decode = [row.decode_s / times.decode_s(row.rows, row.positions) for row, times in curves]
    of_prefill = [row.prefill_s / step_times(row.case).prefill_s(row.prompt) for row in SINGLE]
    for factors, most in ((of_decode, 0.08), (of_prefill, 0.13)):
        apart = np.abs(np.array(factors) - 1)
        assert np.median(apart) < 0.02
        assert apart.max() < most
    assert all(times.decode.own.size and times.prefill.own.size for _, times in curves)
    measured = {name for name, case in CASES.items() if step_times(case).decode.own.size}
    assert measured == OWN


OWN = {"measured", "measured, of two models"}
CASES = {
    "measured": ROWS[0].case,
    "measured, of two models": next(row.case for row in ROWS if row.case.model.num_layers == 80),
    "one core": case_of(facts_of("tinyllama-1.1b"), "tnx", 2048, 4, 1, machine="inf2.xlarge"),
    "eight cores": case_of(facts_of("llama-3.1-8b"), "nxdi", 8192, 16, 8, machine="inf2.48xlarge"),
    "other chips": case_of(facts_of("qwen2.5-32b"), "nxdi", 4096, 8, 8, machine="trn2.48xlarge"),
    "experts": case_of(facts_of("mixtral-8x7b"), "nxdi", 4096, 8, 24, machine="inf2.48xlarge"),
    "blocks": case_of(
        facts_of("llama-3-8b"),
        "tnx",
        4096,
        8,
        8,
        machine="trn1.32xlarge",
        enable_chunked_prefill=True,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_more_work_never_takes_less_time(name):
    times = step_times(CASES[name])
    lengths, counts = range(128, 16385, 512), range(1, 33)
    for rows in counts:
        each = [times.decode_s(rows, positions) for positions in lengths]
        assert each == sorted(each)
    for positions in lengths:
        each = [times.decode_s(rows, positions) for rows in counts]
        assert each == sorted(each)
    each = [times.prefill_s(tokens) for tokens in range(1, 16385, 100)]
    assert each == sorted(each)


def test_no_step_is_faster_than_the_chip():
    """A decode reads what planning counts for memory; the matrices of a prompt take two operations for each weight."""
    for name, case in CASES.items():
        times, device = step_times(case), case.device
        slots, length = case.slots, case.options.max_model_len
        least_s = core_memory(case).read / device.core_bytes_per_s
        assert times.decode_s(slots, length) > least_s, name
        weights = case.model.num_parameters - case.model.embedding_parameters
        operations = 2 * weights * length / case.degree
        assert times.prefill_s(length) > operations / device.core_flops, name


def test_an_estimate_has_its_range_and_an_unknown_degree():
    for name, case in CASES.items():
        times, doubt = step_times(case), f", degree {case.degree} not measured"
        for curve, scale in (
            (times.decode, (1, 1, 10**6, 32)),
            (times.prefill, (1, 10**5, 10**10)),
        ):
            shown, time_ms = curve.explained(*scale), 1e3 * curve.time_s(*scale)
            assert shown.startswith(f"{time_ms:.1f} ms ("), name
            assert (doubt in shown) == (case.degree not in {24, 32}), name


def test_what_lies_beyond_the_measured_times_is_an_estimate():
    """Llama-3-8B was measured with 4096 and 8192 positions, of 1 and of 8 rows."""
    curve = step_times(ROWS[0].case).decode
    for rows, positions, inside in (
        (1, 4096, True),
        (8, 8192, True),
        (1, 128, False),
        (16, 8192, False),
    ):
        scale = 1, 1, rows * positions, rows
        assert curve.measured(*scale) is inside
        time_ms = 1e3 * curve.time_s(*scale)
        low, high = (factor * time_ms for factor in module.DECODE_RANGE)
        source = ", measured by AWS" if inside else f" ({low:.1f} to {high:.1f}), estimate: "
        assert curve.explained(*scale).startswith(f"{time_ms:.1f} ms{source}")


def test_a_model_of_unknown_size_has_no_times():
    case = case_of(ModelFacts.from_config({"model_type": "unheard"}), "nxdi", 2048, 4, 8)
    for machine in (named("inf2.48xlarge"), case.machine):
        with pytest.raises(ConfigError, match="time of a step is not known: the sizes of unheard"):
            step_times(replace(case, machine=machine))
