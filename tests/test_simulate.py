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


def test_a_full_queue_is_served_as_fast_as_by_the_old_policy() -> None:
    """Of Poisson arrivals below the full rate all policies serve what is offered."""
    spec, served = simulate.policies(_arguments("--chunk", "0"))
    requests = simulate.chats(300, spec.max_model_len // 2)
    rate = {one.name: summarise(one.records(requests)).tokens_per_s for one in served}
    assert rate["ours"] >= 0.98 * rate["old, our host"]


def test_the_documentation_has_these_figures_and_pictures(rows, tmp_path_factory) -> None:
    text = (DOCS / "simulation.md").read_text()
    for key, row in rows.items():
        names = ("ttft_p50_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p99_ms", "stall_ms")
        (line,) = re.findall(rf"^\| {key[0]} \| {key[1]} \| (.*) \|$", text, re.MULTILINE)
        found = [f"{row[name]:.0f}" for name in ("tokens_per_s", *names)]
        assert line.split(" | ") == found, (key, "run benchmarks/simulate.py")
    for name in ("bursty", "poisson"):
        made, kept = (
            (folder / f"simulation-{name}.svg").read_text()
            for folder in (tmp_path_factory.getbasetemp(), DOCS)
        )
        assert made == kept, "run benchmarks/simulate.py --plots docs"


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


NAMES_LINE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_traces(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    first, second = (0.0, 374, 44), (pytest.approx(4.314579), 396, 109)
    azure = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    later, earlier = "2024-05-10 01:59:59.900000+02:00,3,4", "2024-05-09T23:59:58.4Z,1,2"
    for name, text, expected in (
        ("Azure's", NAMES_LINE + azure, [first, second]),
        ("BOM, CRLF", "\ufeff" + (NAMES_LINE + azure).replace("\n", "\r\n"), [first, second]),
        ("no names, blank lines", f"\n{azure}\n ,\n", [first, second]),
        ("zones, unsorted", f"a,b,c\n{later}\n{earlier}\n", [(1.5, 3, 4), (0.0, 1, 2)]),
        ("small numbers", f"{NAMES_LINE}1,10,20\n2,11,21\n", [(0.0, 10, 20), (1.0, 11, 21)]),
        ("unsorted numbers", "a,b,c\n5.5, 3, 4,x,y\n-1,1,2\n", [(6.5, 3, 4), (0.0, 1, 2)]),
        ("Unix", f"{NAMES_LINE}1700000000.25,1,2\n1700000001,3,4\n", [(0.0, 1, 2), (0.75, 3, 4)]),
    ):
        path.write_bytes(text.encode())
        assert read_trace(path) == expected, name
    found = [*simulate.compare(_arguments("--arrivals", "trace", "--trace", str(path)))]
    assert [row["requests"] for row in found] == [2] * 4


def test_a_trace_with_an_error_names_line_and_form(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    for wrong in (
        *("2,374", "2,374,4.5", "2,x,44", "2,-374,44", "2,374,0", "2;374;44"),
        *("yesterday,3,4", "nan,3,4", "inf,3,4", "2023-11-16,3,4", "2023-11-16 18:15:46,3,4"),
    ):
        path.write_text(f"{NAMES_LINE}1,2,3\n\n{wrong}\n")
        expected = re.escape(f"{path}, line 4: {wrong}; expected timestamp (seconds, or")
        with pytest.raises(ValueError, match=expected):
            read_trace(path)
    path.write_text(f"{NAMES_LINE}2023-11-16 18:15:46,3,4\n2023-13-16 18:15:46,3,4\n")
    with pytest.raises(ValueError, match="line 3: 2023-13-16"):
        read_trace(path)
    for empty in ("", NAMES_LINE):
        path.write_text(empty)
        with pytest.raises(ValueError, match="has no rows"):
            read_trace(path)


def test_what_cannot_be_simulated_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The last line has the reason, and no figures come before it."""
    single = tmp_path / "single.csv"
    single.write_text("1,10,1\n")
    llama_70b = simulate.CONFIG.with_name("llama-3-70b.json")
    wrong = []
    for words, reason in (
        ("--instance inf2.xlarge", "24 NeuronCores are needed and 2 can be used"),
        (f"--config {llama_70b} -o tensor_parallel_degree=2", "does not fit"),
        ("-o foo=1", "unknown option 'foo'"),
        ("-o option.n_position=1024", "did you mean 'n_positions'"),
        ("-o foo", "'foo' is not NAME=VALUE"),
        ("-o max_rolling_batch_size=8", "write --slots 8"),
        ("-o max_num_seqs=8", "two values of one option"),
        ("-o model_loader=cpu", "the times of CPUs"),
        ("-o n_positions=1024 --chunk 0 --arrivals bursty", "this deployment takes at most 1023"),
        ("--slots 0", "--slots: '0' is not a whole number above 0"),
        ("--slots -1", "--slots: '-1' is not"),
        ("--chunk -1", "--chunk: '-1' is not a whole number from 0 on"),
        ("--chunk 16", "must be above 32"),
        ("--load -1", "--load: '-1' is not a number above 0"),
        ("--load nan", "--load: 'nan' is not"),
        ("--every -1", "--every: '-1' is not"),
        ("--host-us -5", "--host-us: '-5' is not a number from 0 on"),
        ("--old-host-us nan", "--old-host-us: 'nan' is not"),
        ("--bursts 0", "--bursts: '0' is not"),
        ("--requests 0", "--requests: '0' is not"),
        ("--output 10 5", "expected the least tokens, then the most"),
        ("--output 0 5", "--output: '0' is not"),
        ("--instance foo", "--instance: invalid choice: 'foo'"),
        ("--config /nope", "No such file or directory: '/nope'"),
        ("--arrivals", "--arrivals: expected at least one argument"),
        ("--arrivals trace", "needs --trace"),
        ("--arrivals trace --trace /nope.csv", "No such file or directory: '/nope.csv'"),
        (f"--arrivals trace --trace {single} --chunk 0", "all answers have one token"),
    ):
        monkeypatch.setattr("sys.argv", ["simulate.py", *words.split()])
        with pytest.raises(SystemExit) as end:
            simulate.main()
        found = capsys.readouterr()
        if end.value.code != 2 or found.out or reason not in found.err.splitlines()[-1]:
            wrong.append((words, found))
    assert not wrong
