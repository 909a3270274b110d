"""The benchmarks start, and `host_cost.py` compares two checkouts."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from several_models import LOST, Mark, Result, Run, faults
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
        timeout=120,
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


def _result(model, form="jsonlines", outcome="right", ended_s=30.0, num_tokens=5, *, sent_s=10.0):
    return Result(model, form, outcome, sent_s, ended_s, np.arange(num_tokens) + 11.0)


def test_what_a_kill_may_end_is_told_from_what_is_wrong():
    began, kill, recovered, end = (Mark(at_s, 0, 0, 0, 0) for at_s in (5.0, 20.0, 25.0, 35.0))
    runs = [Run(killed, began, kill, 20.5, recovered, end) for killed in (None, "a")]
    right = [_result(model) for model in "abc"]
    lost = [_result("a", form, LOST[form], sent_s=20.4) for form in LOST]
    assert faults([*right, *lost], runs, num_slots=3) == []
    (too_many,) = faults([*right, *lost], runs, num_slots=2)
    assert "ended 3 requests, expected 1 to 2" in too_many
    (none,) = faults(right, runs, num_slots=2)
    assert "ended 0 requests" in none
    for wrong in (
        _result("b", outcome=LOST["jsonlines"]),  # of another model
        _result("a", outcome=LOST["jsonlines"], ended_s=19.0),  # before the kill
        _result("a", outcome=LOST["jsonlines"], sent_s=20.6),  # after it
        _result("a", outcome=LOST["json"]),  # the status of an answer that is sent as a whole
        _result("a", outcome=LOST["jsonlines"], num_tokens=1),  # the error alone
        _result("a", outcome="wrong: stream"),
        _result("a", "json", "error 503 queue_full"),
    ):
        assert len(faults([*lost, wrong], runs, num_slots=4)) == 1, wrong


def _several(arguments):
    pytest.importorskip("uvicorn", reason="needs the `server` extra")
    return _rows("several_models.py", *arguments.split())


def test_one_of_several_models_is_killed():
    quiet, copy, single = _several("--streams 40 --step-ms 20 --seconds 0.5")
    assert [row["killed"] for row in (quiet, copy, single)] == [None, "a", "b"]
    assert quiet["failed"] == 0
    for row in (copy, single):
        assert (row["streams"], row["slots"]) == (40, 9)
        assert 0 < row["failed"] <= 9
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
