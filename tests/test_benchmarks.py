"""The benchmarks start, and `host_cost.py` compares two checkouts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
        [sys.executable, script, "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
