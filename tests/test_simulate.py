"""The comparison of benchmarks/simulate.py: claims of docs/simulation.md, its pictures, and the old engine's policy."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import pytest
import simulate
from simulate import old_policy, read_trace

from djl_python_neuronx.backends.base import ModelSpec
from djl_python_neuronx.planning.step_times import step_times
from djl_python_neuronx.simulation import Arrival, summarise

DOCS = Path(__file__).parents[1] / "docs"
NAMES = re.compile(r">([^<>]+)</text>")
ENDS = re.compile(r'H([\d.]+)V[\d.]+" fill="none"')
"""The ends of curves, in pixels from the left."""


def _arguments(*words: str) -> Namespace:
    return simulate.make_parser().parse_args(words)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, float]]:
    folder = tmp_path_factory.getbasetemp()
    found = simulate.compare(_arguments("--plots", str(folder)))
    return {(row["arrivals"], row["policy"]): row for row in found}


@pytest.fixture(scope="module")
def case() -> simulate.Case:
    options = {**simulate.OPTIONS, "max_rolling_batch_size": "32"}
    return simulate.case_of(simulate.CONFIG, "inf2.48xlarge", options)


def test_bursts_stall_a_stream_by_one_prefill_and_one_decode(rows, case) -> None:
    times = step_times(case)
    ours, chunks = rows["bursty", "ours"], rows["bursty", "ours, chunks"]
    longest_ms = 1e3 * (times.prefill_s(2048) + times.decode_s(32, 4096)) + 2e-3 * ours["host_us"]
    assert ours["stall_ms"] <= longest_ms + 0.05
    assert chunks["stall_ms"] < ours["stall_ms"] / 3
    for policy in ("old", "old, our host"):
        assert rows["bursty", policy]["gap_p99_ms"] >= 3 * ours["gap_p99_ms"]
        assert rows["bursty", policy]["stall_ms"] >= 6 * ours["stall_ms"]


def test_poisson_arrivals_lose_nothing(rows) -> None:
    ours, old = rows["poisson", "ours"], rows["poisson", "old, our host"]
    assert ours["host_us"] == old["host_us"]
    assert ours["gap_p99_ms"] <= old["gap_p99_ms"]
    assert ours["tokens_per_s"] >= 0.98 * old["tokens_per_s"]


def test_the_documentation_has_these_figures_and_pictures(rows, tmp_path_factory) -> None:
    """About: other estimates of the step times move them a little."""
    text = (DOCS / "simulation.md").read_text()
    for key, row in rows.items():
        names = ("ttft_p50_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p99_ms", "stall_ms")
        (line,) = re.findall(rf"^\| {key[0]} \| {key[1]} \| (.*) \|$", text, re.MULTILINE)
        kept = [*map(float, line.split(" | "))]
        assert kept == pytest.approx([row[name] for name in ("tokens_per_s", *names)], rel=0.1), key
    for name in ("bursty", "poisson"):
        made, kept = (
            (folder / f"simulation-{name}.svg").read_text()
            for folder in (tmp_path_factory.getbasetemp(), DOCS)
        )
        assert NAMES.findall(made) == NAMES.findall(kept)
        assert ENDS.findall(made), "no curves"
        found, known = ([*map(float, ENDS.findall(one))] for one in (made, kept))
        assert found == pytest.approx(known, abs=10), "run benchmarks/simulate.py --plots docs"


@dataclass
class Times:
    """Seconds of a decode, and of a prefill for each token of its bucket."""

    def decode_s(self, rows: int, positions: int) -> float:
        assert (rows, positions) == (3, 64)
        return 1.0

    def prefill_s(self, tokens: int) -> float:
        return float(tokens)


def test_the_old_policy() -> None:
    """Step by step, with 0.5 s of the host in each call.

    At 0 a prefill of 10 s. At 10.5 two more have come, which run in the bucket of the longer one until 43. A decode
    ends the third answer at 44.5, so the fourth request gets its slot, and all others pause until 55.
    """
    spec = ModelSpec(3, 64, (10, 16), 1, token_buckets=(64,))
    arrivals = [Arrival(2.0, 16, 2), Arrival(0.0, 3, 5), Arrival(3.0, 9, 3), Arrival(4.0, 1, 2)]
    third, first, second, fourth = old_policy(spec, Times(), arrivals, 0.5)
    assert third.tokens_s == [43.0, 44.5]
    assert fourth.tokens_s == [55.0, 56.5]
    assert first.tokens_s == [10.5, 44.5, 56.5, 58.0, 59.5]
    assert second.tokens_s == [43.0, 44.5, 56.5]
    assert summarise([first]).longest_stall_s == 34.0


def test_a_trace_in_the_form_of_azures(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_trace(path)
    assert first == (0.0, 374, 44)
    assert second == (pytest.approx(4.314579), 396, 109)
    found = [*simulate.compare(_arguments("--arrivals", "trace", "--trace", str(path)))]
    assert [row["requests"] for row in found] == [2] * 4
    for wrong in ("2023-11-16 18:15:46,374", "yesterday,374,44", "2023-11-16 18:15:46,x,44"):
        path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{wrong}\n")
        with pytest.raises(ValueError, match=f"line 2: {wrong}; expected timestamp"):
            read_trace(path)
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    with pytest.raises(ValueError, match="has no rows"):
        read_trace(path)
