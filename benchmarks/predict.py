"""Does the simulation predict the tokens per second of a server, from the step times of a bare loop?

    python benchmarks/predict.py                    # the sleeping device, a minute and a half
    export TNX_SRC=<a checkout of transformers-neuronx> PYTHONPATH=<its CPU rig>:$TNX_SRC/src
    python benchmarks/predict.py --device rig       # 3 minutes

In turn: a loop that only calls the device measures its prefills and decodes; a server (`djl-neuronx serve`) on that
device gets requests of all lengths within two seconds, more than it has slots; and the simulation gets these requests
and those times. A row for each run, and the median of all.

* `off`: simulated tokens per second, divided by the measured ones, less 1. `met`: at most 5 %.
* `ttft`, `gap`: time to the first token and between tokens, medians, the client's and the simulated ones.
* `--device sleep`: the sim backend, which only waits; prefills of 128 and of 512 tokens take 1.5 and 4 decodes.
* `--device rig`: transformers-neuronx on its CPU rig, as in device_bound.py; prompts have one bucket.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import device_bound
import sleep_device
from device_bound import PROMPT_LEN, ROWS, bare_times, wait_bare
from sleep_device import free_port, print_rows, process, serve_command, wait_ready

from djl_python_neuronx.backends.base import ModelSpec
from djl_python_neuronx.loading.check import check
from djl_python_neuronx.planning.machines import named
from djl_python_neuronx.simulation import Arrival, Record, host_s, simulate, spec_of, summarise

AIM = 0.05
STEP_MS = 30.0
LENGTH = 1024
PREFILLS = ((128, 1.5), (512, 4.0))
"""Buckets of the sleeping device, and the decodes that a prefill takes."""
PATIENCE_S = 300
BARE_STEPS = """
for line in sys.stdin:
    with torch.inference_mode():
        began = time.perf_counter()
        for _ in range(3):
            ids, position = model(prompts, prompts, slots).argmax(dim=1, keepdim=True), prompt_len
        decoding = time.perf_counter()
        prefill, count = (decoding - began) / 3 / rows, 0
        while time.perf_counter() < decoding + float(line):
            ids = model(ids, torch.full((rows, 1), position), slots).argmax(dim=1, keepdim=True)
            position, count = min(position + 1, lengths[-1] - 1), count + 1
    print(prefill, (time.perf_counter() - decoding) / count, flush=True)
"""
"""Behind `BARE_TNX`: measures the prefill of one prompt and the decode of all rows, in seconds."""


class BareTimes(NamedTuple):
    """The `StepTimes` that a bare loop has measured."""

    decode: float
    prefills: Mapping[int, float]
    """By bucket."""

    def decode_s(self, rows: int, positions: int) -> float:  # noqa: ARG002
        """See `StepTimes`."""
        return self.decode

    def prefill_s(self, tokens: int) -> float:
        """See `StepTimes`."""
        return self.prefills[tokens]


class Device(NamedTuple):
    """A device with a server and a bare loop on it."""

    spec: ModelSpec
    port: int
    bare: Callable[[], BareTimes]


def shapes(model: Path, options: Mapping[str, object]) -> ModelSpec:
    """Return the shapes that a server with these options has."""
    given = {name: str(value) for name, value in options.items()}
    report = check(str(model), environ={}, overrides=given, machine=named("inf2.xlarge"))
    if report.prepared is None:
        sys.exit("\n".join(report.findings.messages("error")))
    return spec_of(report.prepared.case)


@contextlib.contextmanager
def on_sleep(arguments: argparse.Namespace, work: Path) -> Iterator[Device]:
    """The sim backend."""
    model, step_ms = work / "model", arguments.step_ms
    sleep_device.save_model(model, vocab=32_000, length=LENGTH)
    prefill_ms = {bucket: decodes * step_ms for bucket, decodes in PREFILLS}
    options = {
        "model_loader": "sim",
        "sim_step_ms": json.dumps({"prefill": prefill_ms, "decode": {LENGTH: step_ms}}),
        "n_positions": LENGTH,
        "context_length_estimate": ",".join(map(str, prefill_ms)),
        "max_rolling_batch_size": ROWS,
    }
    port = free_port()
    bare = [sleep_device.__file__, "bare", str(model), str(ROWS)]
    with contextlib.ExitStack() as stack:
        command = ["-m", "djl_python_neuronx", *serve_command(model, port, options)]
        server = stack.enter_context(process(command))
        loops = {
            ms: stack.enter_context(process([*bare, str(ms)]))
            for ms in (step_ms, *prefill_ms.values())
        }
        wait_ready(server, port)
        for loop in loops.values():
            wait_bare(loop)

        def times() -> BareTimes:
            found = {ms: bare_times(loop, arguments.seconds)[0] for ms, loop in loops.items()}
            return BareTimes(found[step_ms], {n: found[ms] for n, ms in prefill_ms.items()})

        yield Device(shapes(model, options), port, times)


@contextlib.contextmanager
def on_rig(arguments: argparse.Namespace, work: Path) -> Iterator[Device]:
    """transformers-neuronx on its CPU rig."""
    rig, first = device_bound.RIGS["tnx"], device_bound.FIRST_LENGTH
    device_bound.require(rig)
    lengths = [str(first), str(2 * first)]
    model = work / "model"
    device_bound.save_model(model, 2 * first)
    environ = device_bound.rig_environ(rig, work, arguments.step_ms)
    options = device_bound.rig_options("tnx", lengths)
    port = free_port()
    shape = [str(ROWS), str(PROMPT_LEN), "0"]
    loop = ["-c", device_bound.BARE_TNX + BARE_STEPS, str(model), "greedy", *shape, *lengths]
    command = ["-m", "djl_python_neuronx", *serve_command(model, port, options)]
    apart = {"BASE_COMPILE_WORK_DIR": f"{work / 'bare'}/"}
    with process(loop, environ | apart) as bare, process(command, environ) as server:
        wait_ready(server, port)
        wait_bare(bare)
        bare_times(bare, arguments.seconds)  # the first call of each program takes longer

        def times() -> BareTimes:
            prefill_s, decode_s = bare_times(bare, arguments.seconds)
            return BareTimes(decode_s, {PROMPT_LEN: prefill_s})

        yield Device(shapes(model, options), port, times)


def backlog(longest: int, output_len: Sequence[int], count: int, seed: int) -> list[Arrival]:
    """Return requests that come within two seconds."""
    draw = random.Random(seed)
    return [
        Arrival(draw.uniform(0, 2), draw.randint(1, longest), draw.randint(*output_len))
        for _ in range(count)
    ]


def serve(port: int, arrivals: Sequence[Arrival]) -> list[Record]:
    """Send requests to a server of this machine. Returns the times at which the clients got their tokens."""
    began_s = time.monotonic()

    def send(arrival: Arrival) -> Record:
        time.sleep(max(0.0, began_s + arrival.at_s - time.monotonic()))
        wanted = {"max_new_tokens": arrival.output_len, "ignore_eos": True, "do_sample": False}
        body = {"inputs": "x" * arrival.prompt_len, "parameters": wanted, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request("POST", "/invocations", json.dumps(body))
            times_s = [time.monotonic() - began_s for _ in connection.getresponse()]
        if len(times_s) != arrival.output_len:
            sys.exit(f"a stream has {len(times_s)} lines; expected {arrival.output_len} tokens")
        return Record(arrival, times_s)

    with ThreadPoolExecutor(len(arrivals)) as threads:
        return list(threads.map(send, arrivals))


def rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each run, and the median."""
    offs = []
    open_device = on_sleep if arguments.device == "sleep" else on_rig
    with tempfile.TemporaryDirectory() as work, open_device(arguments, Path(work)) as device:
        longest = device.spec.prefill_buckets[-1]
        for seed in range(arguments.runs):
            arrivals = backlog(longest, arguments.output, arguments.requests, seed)
            times = device.bare()
            found = summarise(serve(device.port, arrivals))
            expected = summarise(simulate(device.spec, times, arrivals, host_s=host_s(ROWS)))
            offs.append(expected.tokens_per_s / found.tokens_per_s - 1)
            yield {
                "device": arguments.device,
                "decode_ms": round(times.decode * 1e3, 2),
                "prefill_ms": [round(one * 1e3, 2) for one in times.prefills.values()],
                "tokens_per_s": round(found.tokens_per_s, 2),
                "simulated": round(expected.tokens_per_s, 2),
                "ttft_ms": [round(one.ttft_p50_s * 1e3) for one in (found, expected)],
                "gap_ms": [round(one.gap_p50_s * 1e3, 1) for one in (found, expected)],
                "off": round(offs[-1], 4),
            }
    off = statistics.median(offs)
    yield {"device": arguments.device, "off": round(off, 4), "met": abs(off) <= AIM}


def main() -> int:
    """Print the rows, or one JSON object per line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one object per line")
    parser.add_argument("--device", choices=["sleep", "rig"], default="sleep")
    parser.add_argument("--step-ms", type=float, default=STEP_MS, help=f"default {STEP_MS:g}")
    parser.add_argument("--requests", type=int, default=32, help="of a run (default 32)")
    parser.add_argument(
        "--output", type=int, nargs=2, default=[20, 80], help="least and most tokens of an answer"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="of a bare loop (default 2)")
    parser.add_argument("--runs", type=int, default=3, help="default 3")
    print_rows(rows(arguments := parser.parse_args()), as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
