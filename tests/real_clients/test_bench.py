"""`djl-neuronx bench` with the newest guidellm, against `djl-neuronx serve` with the sim backend."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

pytest.importorskip("uvicorn", reason="needs the `server` extra")
pytest.importorskip("torch", reason="needs the `cpu` extra")

from tests.clients.answers import ROOT
from tests.clients.embedded import Embedded
from tests.processes import PATIENCE_S, wait_until
from tests.real_clients.test_real_clients import environment

pytestmark = pytest.mark.nightly
PROMPT, OUTPUT = 12, 7


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = {"model_loader": "sim", "sim_step_ms": 5, "max_rolling_batch_size": 2}
    server = Embedded.start(options, tmp_path_factory.mktemp("server"), os.environ)
    yield f"http://127.0.0.1:{server.port}"
    server.end()


def start(url: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the command in a process group, as a shell does."""
    command = [environment("torch") / "python", "-m", "djl_python_neuronx", "bench", url]
    lengths = ["--prompt-tokens", str(PROMPT), "--output-tokens", str(OUTPUT)]
    return subprocess.Popen(
        [*map(str, command), *lengths, *arguments],
        env={"HOME": str(folder), "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def unreported(out: str, count: int) -> int:
    """Return how many of `count` requests are not in the report: on a busy machine guidellm may miss the last one."""
    found = re.match(r"(\d+) requests done, 0 failed, 0 cut off, ([01]) unreported in ", out)
    assert found, out
    assert int(found[1]) + int(found[2]) == count
    return int(found[2])


def run(url: str, folder: Path, *arguments: str) -> str:
    process = start(url, folder, *arguments, "--json", "report.json", "--plot", "page.html")
    out, err = process.communicate(timeout=2 * PATIENCE_S)
    assert process.returncode == 0, out + err
    assert err == ""
    return out


def test_a_closed_loop(url: str, tmp_path: Path) -> None:
    """The server counts the tokens as asked for; the table has the report's numbers."""
    limits = ["--goodput", "ttft:100000", "itl:100000", "e2e:0.001"]
    out = run(url, tmp_path, "--requests", "9", "--concurrency", "2", *limits)
    (measured,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    sent = measured["requests"]["successful"]
    lengths = [(one["prompt_tokens"], one["output_tokens"]) for one in sent]
    assert lengths == [(PROMPT, OUTPUT)] * (9 - unreported(out, 9))
    for title, name in (
        ("time to first token, ms", "time_to_first_token_ms"),
        ("between tokens, ms", "inter_token_latency_ms"),
        ("end to end, s", "request_latency"),
    ):
        found = measured["metrics"][name]["successful"]
        points = (found["percentiles"][p] for p in ("p50", "p90", "p95", "p99"))
        values = [found["mean"], *points, found["max"]]
        shown = re.search(rf"^{title} +(.+)$", out, re.MULTILINE)
        assert shown
        assert [*map(float, shown[1].split())] == pytest.approx(values, rel=1e-3)
    assert "goodput 0 requests/s (0.0%)" in out
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r"<(script|img|iframe)[^>]*\ssrc=|<link[^>]*\shref=|@import|url\(", page)


def test_requests_of_a_trace_are_sent_when_it_says(url: str, tmp_path: Path) -> None:
    times_ms, lengths = [0, 700, 900, 2000], [(5, 2), (40, 3), (9, 4), (11, 5)]
    rows = [
        {"timestamp": ms, "input_length": given, "output_length": new}
        for ms, (given, new) in zip(times_ms, lengths, strict=True)
    ]
    (tmp_path / "trace").write_text("\n".join(map(json.dumps, rows)))
    num_sent = 4 - unreported(run(url, tmp_path, "--replay", "trace"), 4)
    (measured,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    sent = sorted(
        (one["info"]["timings"]["targeted_start"], one["prompt_tokens"], one["output_tokens"])
        for one in measured["requests"]["successful"]
    )
    assert [one[1:] for one in sent] == lengths[:num_sent]
    offsets = [1e3 * (one[0] - sent[0][0]) for one in sent]
    assert offsets == pytest.approx(times_ms[:num_sent], abs=0.1)


def num_requests(url: str) -> float:
    """The requests that the server has answered."""
    time.sleep(0.5)
    with urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(r"^djl_neuronx_requests_total\S* (\S+)", text, re.MULTILINE)
    return sum(map(float, found))


def test_an_interrupt_prints_what_was_measured(url: str, tmp_path: Path) -> None:
    """^C reaches all processes of a terminal."""
    before = num_requests(url)
    process = start(url, tmp_path, "--duration", "1000", "--requests", "5000", "--json", "r.json")
    wait_until(lambda: num_requests(url) >= before + 20)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (130, ""), out + err
    assert re.match(r"[1-9]\d* requests done, 0 failed", out)
    assert "between tokens, ms" in out
    assert json.loads((tmp_path / "r.json").read_text())["benchmarks"]
