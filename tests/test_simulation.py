"""The simulation gives the times that theory gives, and no sequence waits for more than its scheduler allows."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from djl_python_neuronx.backends.base import ModelSpec
from djl_python_neuronx.errors import PromptTooLongError
from djl_python_neuronx.loading.check import check
from djl_python_neuronx.planning.machines import named
from djl_python_neuronx.simulation import Arrival, Record, Summary, simulate, spec_of, summarise
from tests.planning.settings import TINY

SPEC = ModelSpec(
    num_slots=4,
    max_model_len=4096,
    prefill_buckets=(128, 2048),
    vocab_size=7,
    token_buckets=(4096,),
)
MIXED = replace(
    SPEC,
    prefill_buckets=(8, 256),
    mixed_steps=True,
    max_prefill_batch=4,
    cache_buckets=(4 * 1024, 4 * 4096),
)
HOST_S = 0.25


@dataclass
class Times:
    """Seconds of a decode and of a prefill of 128 tokens; both are exact in binary."""

    decode: float = 1.0
    prefill: float = 4.0

    def decode_s(self, rows: int, positions: int) -> float:
        assert rows == SPEC.num_slots
        assert positions in {1024, 4096}
        return self.decode

    def prefill_s(self, tokens: int) -> float:
        assert tokens in {8, 128, 256, 2048}
        return self.prefill * tokens / 128


def test_one_slot_is_the_queue_of_poisson_arrivals_and_equal_services() -> None:
    """Lindley's recursion (1952) for each request; their mean wait by Pollaczek and Khinchine."""
    spec, output_len, draw = replace(SPEC, num_slots=1), 3, random.Random(1)

    class One(Times):
        def decode_s(self, rows: int, positions: int) -> float:
            assert (rows, positions) == (1, 4096)
            return self.decode

    service_s = 4.0 + 2 * 1.0 + output_len * HOST_S
    load = 0.3
    at_s, arrivals = 0.0, []
    for _ in range(8_000):
        at_s += draw.expovariate(load / service_s)
        arrivals.append(Arrival(at_s, draw.randint(1, 128), output_len))
    waits, free_s = [], 0.0
    for record in simulate(spec, One(), arrivals, host_s=HOST_S):
        wait_s = max(0.0, free_s - record.arrival.at_s)
        began_s = record.arrival.at_s + wait_s
        free_s = began_s + service_s
        expected = [began_s + 4.25, began_s + 5.5, began_s + 6.75]
        assert record.tokens_s == pytest.approx(expected, abs=1e-6)
        waits.append(wait_s)
        assert record.ttft_s - 4.25 == pytest.approx(wait_s, abs=1e-6)
    assert sum(waits) / len(waits) == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.1)


@pytest.mark.parametrize("interleave", [0, 1, 3])
def test_a_full_batch_takes_its_prefills_and_decodes(interleave: int) -> None:
    """Four answers of 30 tokens: four prefills, the decodes between them, and those of the last one."""
    arrivals = [Arrival(0.0, 100, 30)] * 4
    records = simulate(SPEC, Times(), arrivals, host_s=HOST_S, decode_interleave=interleave)
    decodes = 3 * interleave + 29
    whole_s = 4 * 4.0 + decodes * 1.0 + (4 + decodes) * HOST_S
    assert max(record.tokens_s[-1] for record in records) == whole_s
    assert summarise(records).tokens_per_s == 4 * 30 / whole_s
    first = [4.25 * (i + 1) + 1.25 * interleave * i for i in range(4)]
    assert [record.tokens_s[0] for record in records] == first
    assert [len(record.tokens_s) for record in records] == [30] * 4


def test_more_than_fit_wait_for_a_slot() -> None:
    """Answers of one token need no decode: nine prefills one after another, each in its bucket."""
    arrivals = [Arrival(0.0, 100, 1)] * 8 + [Arrival(10.0, 129, 1)]
    records = simulate(SPEC, Times(), arrivals)
    assert [record.ttft_s for record in records] == [4.0 * (i + 1) for i in range(8)] + [86.0]


def test_a_prompt_in_chunks_beside_a_stream() -> None:
    """Alone a decode costs its weights; a step with a chunk costs its bucket, and the stream has a token in each."""
    arrivals = [Arrival(0.0, 8, 40), Arrival(5.0, 2047, 2)]
    stream, prompt = simulate(MIXED, Times(), arrivals)
    # 255 tokens of the prompt beside one of the stream, eight times, and the rest; then both decode.
    assert stream.gaps_s[:15] == [1.0] * 4 + [8.0] * 8 + [1.0] * 3
    assert prompt.ttft_s == 8 * 8.0 + 1.0
    assert prompt.gaps_s == [1.0]


def test_a_burst_stalls_a_stream_by_one_prefill_and_one_decode() -> None:
    arrivals = [Arrival(0.0, 100, 60), *[Arrival(20.0, 2048, 100)] * 8]
    stream, *_ = records = simulate(SPEC, Times(), arrivals, host_s=HOST_S)
    assert stream.gaps_s.count(64.0 + 1.0 + 2 * HOST_S) == 3  # as many as find a free slot
    assert summarise(records).longest_stall_s == 64.0 + 1.0 + 2 * HOST_S


def test_prompts_of_one_call_run_one_after_another() -> None:
    spec = replace(SPEC, max_prefill_batch=3)
    records = simulate(spec, Times(), [Arrival(0.0, 100, 2)] * 4)
    assert [record.tokens_s for record in records] == [[12.0, 13.0]] * 3 + [[17.0, 18.0]]


def test_a_decode_has_the_time_of_the_fewest_slots_that_a_graph_has(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    options = {"token_generation_batches": "1,2", "max_rolling_batch_size": "4"}
    overrides = {**options, "model_loader": "nxdi", "tensor_parallel_degree": "2"}
    machine = named("trn1.32xlarge")
    report = check(str(tmp_path), environ={}, overrides=overrides, machine=machine)
    assert report.prepared is not None
    spec = spec_of(report.prepared.case)
    assert spec.decode_slots == (1, 2, 4)
    assert (spec.num_slots, spec.max_prefill_batch, spec.joins) == (4, 1, "free")

    class Rows:
        def decode_s(self, rows: int, positions: int) -> float:
            assert positions in spec.token_buckets
            return float(rows)

        def prefill_s(self, tokens: int) -> float:
            assert tokens in spec.prefill_buckets
            return 8.0

    # A stream alone, then beside a second one, then all three, which need the graph of four; at last the second alone.
    arrivals = [Arrival(0.0, 5, 8), Arrival(12.5, 5, 9), Arrival(14.0, 5, 2)]
    first, second, third = simulate(spec, Rows(), arrivals)
    assert first.tokens_s == [8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 23.0, 35.0]
    assert second.tokens_s == [21.0, 23.0, 35.0, *(37.0 + 2 * i for i in range(6))]
    assert third.tokens_s == [31.0, 35.0]


def test_figures() -> None:
    records = [
        Record(Arrival(1.0, 1, 3), [2.0, 3.0, 5.0]),
        Record(Arrival(2.0, 1, 2), [6.0, 10.0]),
        Record(Arrival(0.5, 1, 1), [1.5]),
    ]
    expected = Summary(6 / 9.5, 1.0, 1 + 0.98 * 3, 2.0, 2 + 0.98 * 2, 4.0)
    assert summarise(records) == pytest.approx(expected)
    assert simulate(SPEC, Times(), []) == []


def test_what_is_not_simulated_is_refused() -> None:
    with pytest.raises(ValueError, match="static batches cannot be simulated"):
        simulate(replace(SPEC, joins="reprefill"), Times(), [Arrival(0.0, 1, 1)])
    with pytest.raises(ValueError, match="3000 and an answer of 1100 tokens do not fit a slot"):
        simulate(MIXED, Times(), [Arrival(0.0, 3000, 1100)])
    with pytest.raises(PromptTooLongError, match="2049 tokens"):
        simulate(SPEC, Times(), [Arrival(0.0, 2049, 1)])
