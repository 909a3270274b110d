"""Does `djl-neuronx bench` report the times that a device's sleeps set?

    python benchmarks/load_generator.py --json           # 4 minutes on an idle machine; needs the extra `bench`

`djl-neuronx serve` with the sim backend, the device of `sleep_device.py`. Requests have prompts of 100 tokens and 21
new tokens each. Two devices, each of which sets the times alone:

* A prefill takes P ms, which gives the first token, and a decode step D ms. A request that is alone takes P to its
  first token, and D between two.
  * `alone`: one request at a time; means.
  * `poisson`: arrivals at a rate so low that most requests are alone; medians.
  * `replay`: requests of a file, each of which comes when the one before it has ended; medians.
* Each step takes S ms, whether it holds prompts, decodes or both (chunked prefill).
  * `together`: four requests at a time; medians. A request is sent at the end of a step, by the end of an answer, and
    waits for the step that has begun by then; its prompt is in the next one: 2 S to its first token, S between two.

Server, host and HTTP add to them. A row for each: expected and reported times in ms, the worst difference in percent,
and the machine's load. The exit status is 1 if a difference exceeds 3 %.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sleep_device import free_port, print_rows, process, save_model, serve_command, wait_ready

PREFILL_MS, DECODE_MS, MIXED_MS = 500, 50, 200
PROMPT_TOKENS, OUTPUT_TOKENS = 100, 21
MOST_PERCENT = 3.0
SHAPE = {
    "model_loader": "sim",
    "n_positions": 1024,
    "context_length_estimate": 512,
    "max_rolling_batch_size": 8,
}
TWO_TIMES = json.dumps({"prefill": {512: PREFILL_MS}, "decode": {1024: DECODE_MS}})
ALONE = PREFILL_MS, DECODE_MS
TRACE = "trace.jsonl"
LOADS: dict[str, tuple[list[str], str, tuple[int, int]]] = {
    "alone": (["--concurrency", "1", "--requests", "20"], "mean", ALONE),
    "poisson": (["--rate", "0.1", "--requests", "12"], "median", ALONE),
    "replay": (["--replay", TRACE], "median", ALONE),
    "together": (
        ["--concurrency", "4", "--requests", "40"],
        "median",
        (2 * MIXED_MS, MIXED_MS),
    ),
}
"""Arguments of a load; the value that is compared; to the first token and between tokens, in ms."""


def report(port: int, folder: Path, load: list[str]) -> dict[str, Any]:
    """Return guidellm's metrics of a run."""
    command = [sys.executable, "-m", "djl_python_neuronx", "bench", f"http://127.0.0.1:{port}"]
    command += ["--prompt-tokens", str(PROMPT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS)]
    command += ["--json", "report.json", *load]
    subprocess.run(command, check=True, stdout=sys.stderr, cwd=folder)
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    metrics: dict[str, Any] = found["benchmarks"][0]["metrics"]
    return metrics


def measure(name: str, port: int, folder: Path) -> dict[str, Any]:
    """Return the row of a load."""
    load, value, expected = LOADS[name]
    metrics = report(port, folder, load)
    names = "time_to_first_token_ms", "inter_token_latency_ms"
    first_ms, between_ms = (metrics[each]["successful"][value] for each in names)
    ratios = first_ms / expected[0], between_ms / expected[1]
    return {
        "load": name,
        "requests": metrics["request_totals"]["successful"],
        "value": value,
        "expected_first_ms": expected[0],
        "first_ms": round(first_ms, 2),
        "expected_between_ms": expected[1],
        "between_ms": round(between_ms, 2),
        "worst_percent": round(100 * max(abs(ratio - 1) for ratio in ratios), 2),
        "machine_load": round(os.getloadavg()[0], 2),
    }


@contextlib.contextmanager
def device(folder: Path, **how: object) -> Iterator[int]:
    """A server of the sim backend; its port."""
    port = free_port()
    command = ["-m", "djl_python_neuronx", *serve_command(folder / "model", port, {**SHAPE, **how})]
    with process(command) as server:
        wait_ready(server, port)
        yield port


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each load."""
    trace = [
        {"timestamp": 3000 * i, "input_length": 90 + 2 * i, "output_length": OUTPUT_TOKENS}
        for i in range(10)
    ]
    (folder / TRACE).write_text("\n".join(map(json.dumps, trace)))
    save_model(folder / "model", vocab=32_000, length=1024)
    with device(folder, sim_step_ms=TWO_TIMES) as port:
        for name in ("alone", "poisson", "replay"):
            yield measure(name, port, folder)
    with device(folder, sim_step_ms=MIXED_MS, enable_chunked_prefill="true") as port:
        yield measure("together", port, folder)


def main() -> int:
    """Print the rows; returns the exit status."""
    parser = argparse.ArgumentParser(description="Compares djl-neuronx bench with a device.")
    parser.add_argument("--json", action="store_true", help="a JSON object per line")
    as_json, worst = parser.parse_args().json, 0.0
    with tempfile.TemporaryDirectory() as name:
        for row in rows(Path(name)):
            print_rows([row], as_json=as_json)
            worst = max(worst, row["worst_percent"])
    return int(worst > MOST_PERCENT)


if __name__ == "__main__":
    sys.exit(main())
