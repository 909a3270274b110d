"""The benchmarks start, and `host_cost.py` compares two checkouts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sleep_device import right_answers, save_model

from djl_python_neuronx import backends
from tests.djl.java import missing_programs

ROOT = Path(__file__).parents[1]


def test_host_cost_of_a_pair_of_checkouts():
    narrow = "--vocab 500 --batch 2 --setting greedy --format json --steps 20 --runs 1 --json"
    ran = subprocess.run(
        [sys.executable, ROOT / "benchmarks/host_cost.py", "--pair", ROOT, ROOT, *narrow.split()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    row, worst = map(json.loads, ran.stdout.splitlines())
    assert min(row["critical_us_before"], row["critical_us_after"]) > 0
    assert worst["worst"] == "500/2/greedy/flat/json"
    assert worst["ratio"] == max(row["critical_us_ratio"], row["total_us_ratio"])
    assert ran.returncode == (0 if worst["met"] else 1), ran.stderr


@pytest.mark.parametrize("script", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda p: p.name)
def test_a_benchmark_starts(script):
    if "import torch" in script.read_text():
        pytest.importorskip("torch", reason="needs the `cpu` extra")
    ran = subprocess.run(
        [sys.executable, script, "--help"], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_the_sleep_device_replaces_no_backend_of_the_process_that_uses_it(tmp_path):
    save_model(tmp_path / "model", vocab=300, length=8)
    (text,) = right_answers(tmp_path / "model", ["x"], 4)
    assert len(text.split()) == 4
    assert list(backends.__path__) == [str(Path(backends.__file__).parent)]


def _rows(script, *arguments):
    ran = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return list(map(json.loads, ran.stdout.splitlines()))


def test_streams_from_a_device_that_sleeps():
    narrow = "--device sleep --rows 3 --vocab 500 --step-ms 2 --seconds 0.2 --runs 1"
    given = ["--settings", "greedy", "topp", "--formats", "lmi", "chat"]
    rows = _rows("device_bound.py", *narrow.split(), *given)
    assert [(row["setting"], row["format"]) for row in rows] == [
        *[("greedy", "lmi"), ("greedy", "chat")],
        *[("topp", "lmi"), ("topp", "chat")],
    ]
    for row in rows:
        assert row["device_us"] >= 2000
        assert abs(row["step_us"] - row["device_us"] - row["loss_us"]) <= 1
        assert (row["door"], row["rows"], row["vocab"]) == ("embedded", 3, 500)
        assert row["read_us"] > 0
        assert row["clients_us"] > 0
    (row,) = _rows("device_bound.py", *narrow.split(), "--settings", "greedy", "--device-samples")
    assert row["arrived"] > 0


@pytest.mark.djl
def test_streams_through_djls_released_engine():
    if why := missing_programs():
        pytest.skip(why)
    narrow = "--device sleep --rows 2 --vocab 500 --step-ms 2 --seconds 0.2 --runs 1"
    doors = ["--settings", "greedy", "--doors", "djl_async", "djl_rolling"]
    rows = _rows("device_bound.py", *narrow.split(), *doors)
    assert [row["door"] for row in rows] == ["djl_async", "djl_rolling"]
    assert min(row["arrived"] for row in rows) > 0


def test_time_between_tokens_under_a_load():
    narrow = "--loads quiet body --seconds 0.5 --runs 1"
    quiet, body = _rows("isolation.py", *narrow.split())
    assert (quiet["load"], quiet["per_s"], quiet["grew_ms"]) == ("quiet", 0, 0)
    assert (body["load"], body["streams"]) == ("body", 8)
    assert body["per_s"] > 0
    for row in (quiet, body):
        assert row["p50_ms"] <= row["p99_ms"] <= row["max_ms"]
        assert row["gaps"] > 8


def _predicted(arguments):
    pytest.importorskip("uvicorn", reason="needs the `server` extra")
    return _rows("predict.py", *arguments.split())


def test_a_prediction():
    given = "--step-ms 3 --requests 5 --output 2 4 --runs 1 --seconds 0.2"
    run, last = _predicted(given)
    assert run["decode_ms"] >= 3
    assert min(run["prefill_ms"]) >= 4.5
    assert (
        run["off"]
        == last["off"]
        == pytest.approx(run["simulated"] / run["tokens_per_s"] - 1, abs=0.01)
    )


@pytest.mark.nightly
def test_a_prediction_of_the_sleeping_device_is_right():
    """By the median of the runs: too high and too low alike."""
    *runs, last = _predicted("--runs 5")
    assert last["met"], runs


@pytest.mark.nightly
@pytest.mark.tnx
def test_a_prediction_of_transformers_neuronx_on_its_rig_is_right():
    *_, last = _predicted("--device rig --runs 3")
    assert last["met"], last


def _several(arguments):
    pytest.importorskip("uvicorn", reason="needs the `server` extra")
    return _rows("several_models.py", *arguments.split())


def test_one_of_several_models_is_killed():
    quiet, copy, single = _several("--streams 40 --step-ms 20 --seconds 0.5")
    assert [row["killed"] for row in (quiet, copy, single)] == [None, "a", "b"]
    assert quiet["resumed"] == 0
    for row in (copy, single):
        assert (row["streams"], row["slots"]) == (40, 9)
        assert 0 < row["resumed"] <= 9
        assert row["recovery_s"] > 0


@pytest.mark.nightly
def test_one_of_several_models_is_killed_under_400_streams():
    rows = _several("--seconds 5")
    assert [row["streams"] for row in rows] == [400] * 3


@pytest.mark.nightly
def test_tokens_of_several_engines():
    rows = _several("--seconds 2 --streams 40 --engines 1 3")
    assert [(row["engines"], row["streams"], row["bound"]) for row in rows] == [
        (1, 10, 90),
        (3, 30, 270),
    ]
