"""Times of steps: those that AWS measured, and estimates of models that were left out."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from djl_python_neuronx.errors import ConfigError
from djl_python_neuronx.planning.machines import named
from djl_python_neuronx.planning.memory import core_memory
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.step_times import published, step_times
from tests.planning.test_memory import case_of, facts_of

ROWS = published()


def model_of(row):
    """Sizes and weights: Llama-2-13b and CodeLlama-13b are one model here, Llama-2-70b and Llama-3-70b too."""
    facts, options = row.case.model, row.case.options
    return facts.num_layers, facts.intermediate_size, facts.num_kv_heads, options.quantize


def as_factors(times, rows):
    """Measured by calculated time of decodes, and of the prefills of single prompts."""
    decodes = [row.decode_s / times(row).decode_s(row.rows, row.positions) for row in rows]
    prefills = [row.prefill_s / times(row).prefill_s(row.prompt) for row in rows if row.rows == 1]
    return np.array(decodes), np.array(prefills)


def test_the_table_is_the_published_one():
    """Sums of the column tpot_p50_ms, by awk."""
    assert len(ROWS) == 78
    by_machine = {
        name: sum(row.decode_s for row in ROWS if row.case.machine.instance_type == name)
        for name in ("inf2.48xlarge", "trn1.32xlarge")
    }
    assert by_machine == pytest.approx(
        {"inf2.48xlarge": 0.777201, "trn1.32xlarge": 0.712393}, abs=1e-6
    )
    assert {row.case.degree for row in ROWS} == {24, 32}


def test_measured_times_are_reproduced():
    """Equal work was measured up to 8 % apart, prefills up to 21 %: the longer time counts."""
    decodes, prefills = as_factors(lambda row: step_times(row.case), ROWS)
    for factors, apart in ((decodes, 0.08), (prefills, 0.21)):
        assert np.median(np.abs(factors - 1)) < 0.01
        assert factors.min() >= 1 - apart
        assert factors.max() <= 1 + apart / 2


def test_a_model_that_was_not_measured_is_within_the_range():
    """Each model is left out in turn: neither the costs nor the range know its times."""
    inside = {"decode": [], "prefill": []}
    for model in {model_of(row) for row in ROWS}:
        rest = tuple(row for row in ROWS if model_of(row) != model)
        left_out = [row for row in ROWS if model_of(row) == model]
        factors = as_factors(lambda row, rest=rest: step_times(row.case, rest), left_out)
        times = step_times(left_out[0].case, rest)
        assert not times.decode.own.size
        for kind, found in zip(inside, factors, strict=True):
            curve = getattr(times, kind)
            inside[kind] += [*((curve.low <= found) & (found <= curve.high))]
    assert len(inside["decode"]) == 78
    assert len(inside["prefill"]) == 45
    assert {kind: np.mean(found) >= 0.9 for kind, found in inside.items()} == {
        "decode": True,
        "prefill": True,
    }


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


def test_the_longest_times_are_those_of_the_range():
    for name, case in CASES.items():
        times = step_times(case)
        for rows, positions in itertools.product((1, 8), (128, 4096, 16384)):
            longest = times.slowest.decode_s(rows, positions)
            assert longest == pytest.approx(times.decode.high * times.decode_s(rows, positions)), (
                name
            )
        assert times.decode.low <= 1 <= times.decode.high


def test_a_model_of_unknown_size_has_no_times():
    case = case_of(ModelFacts.from_config({"model_type": "unheard"}), "nxdi", 2048, 4, 8)
    for machine in (named("inf2.48xlarge"), case.machine):
        with pytest.raises(ConfigError, match="time of a step is not known: the sizes of unheard"):
            step_times(replace(case, machine=machine))
