"""Time to first token and between tokens of a load, by the engine on a virtual clock: ours beside the old engine's.

    python benchmarks/simulate.py                                        # bursts and Poisson arrivals, seconds
    python benchmarks/simulate.py --plots docs                           # docs/simulation-*.svg besides
    python benchmarks/simulate.py --arrivals trace --trace FILE.csv      # arrivals of a file

All policies serve the same arrivals in the same times, those of djl_python_neuronx/planning/step_times.py. A row for
each kind of arrivals and each policy:

* `arrivals`: bursty: eight at once, with prompts of 2,048 tokens, every `--every` s; poisson: at `--load` of the rate
  at which a full queue is served; trace: of a CSV file, whose first columns are those of Azure's traces of LLM
  inference: timestamp (seconds, or date and time), input tokens, output tokens.
* `policy`: ours; ours, chunks: with `enable_chunked_prefill` and `--chunk` tokens in a step; old: LMI's Neuron rolling
  batch, a call of which prefills all that wait and find a slot, one after another and each in the bucket of the
  longest, while the others pause, and gives their first tokens together; or else it decodes. old, our host: that with
  the host's cost of ours.
* `host_us`: what the host adds to each step: djl_python_neuronx/simulation.py (`host_s`) and `OLD`, or `--host-us` and
  `--old-host-us`.
* `ttft`, `gap`: time to the first token, and between tokens; `stall`: the longest gap.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import re
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from math import log10
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from sleep_device import print_rows

from djl_python_neuronx.backends.base import ModelSpec
from djl_python_neuronx.backends.shapes import choose_bucket
from djl_python_neuronx.config import flags
from djl_python_neuronx.config.flags import above_zero
from djl_python_neuronx.errors import ConfigError, ServingError
from djl_python_neuronx.loading.check import check
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.machines import INSTANCES, named
from djl_python_neuronx.planning.step_times import StepTimes, step_times
from djl_python_neuronx.simulation import Arrival, Record, host_s, simulate, spec_of, summarise

CONFIG = Path(__file__).parents[1] / "tests" / "planning" / "models" / "llama-3-8b.json"
OLD = (2083.0, 254.0)
"""µs that the old host adds to a step of 8 rows, and for each row more: greedy, vocabulary 128,256.

LMI's rolling batch, streaming, without its model: 1831 and 7577 µs for a step of 8 and of 32 rows, and 252 and 602 µs
for its exchange with Java over the socket (2 vCPU AMD EPYC, 2026-11-20, torch 2.13, transformers 4.57.6).
"""
OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "model_loader": "tnx",
        "tensor_parallel_degree": "24",
        "n_positions": "4096",
        "quantize": "static_int8",
    }
)
"""Of the model and machine whose times are published."""
BURST, BURST_PROMPT = 8, 2048
SEED = 1


def case_of(config: Path, instance: str, options: dict[str, str]) -> Case:
    """Return a model's case on a machine, with all options filled in.

    Raises:
        OSError: the file cannot be read.
        ServingError: `check` refuses it, or its steps have no known times.
    """
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(config, Path(folder) / "config.json")
        report = check(folder, environ={}, overrides=options, machine=named(instance))
    report.findings.raise_errors()
    assert report.prepared is not None
    case = report.prepared.case
    if case.on_cpu or case.options.speculating or case.worlds > 1:
        msg = "the times of CPUs, draft models and pipelines are not known; leave out the options that ask for them"
        raise ConfigError(msg)
    return case


def old_policy(
    spec: ModelSpec, times: StepTimes, arrivals: Sequence[Arrival], host_s: float
) -> list[Record]:
    """Serve arrivals as LMI's Neuron rolling batch does.

    Source: djl-serving before 1132e3ab, neuron_rolling_batch.py (`inference`: prefill if a request is new, else decode)
    and optimum_neuron_scheduler.py; transformers-neuronx 0.13, base.py (`_context_dynamic_batching`: one prompt after
    another).
    """
    records = [Record(arrival) for arrival in arrivals]
    coming = deque(sorted(records, key=lambda record: record.arrival.at_s))
    running: list[Record] = []
    decode_s, prefill_s, now_s = cache(times.decode_s), cache(times.prefill_s), 0.0
    while coming or running:
        if not running:
            now_s = max(now_s, coming[0].arrival.at_s)
        entering: list[Record] = []
        free = spec.num_slots - len(running)
        while coming and coming[0].arrival.at_s <= now_s and len(entering) < free:
            entering.append(coming.popleft())
        if entering:
            longest = max(record.arrival.prompt_len for record in entering)
            bucket = choose_bucket(longest, spec.prefill_buckets)
            now_s += len(entering) * prefill_s(bucket)
        else:
            end = max(one.arrival.prompt_len + len(one.tokens_s) for one in running)
            now_s += decode_s(spec.num_slots, choose_bucket(end, spec.token_buckets))
        now_s += host_s
        for record in entering or running:
            record.tokens_s.append(now_s)
        running = [one for one in running + entering if len(one.tokens_s) < one.arrival.output_len]
    return records


def bursts(count: int, every_s: float, output_len: tuple[int, int]) -> list[Arrival]:
    """Return bursts of arrivals, whose answers have a number of tokens between two."""
    draw = random.Random(SEED)
    return [
        Arrival(number * every_s, BURST_PROMPT, draw.randint(*output_len))
        for number in range(count)
        for _ in range(BURST)
    ]


def chats(count: int, longest: int) -> list[Arrival]:
    """Return requests that come at once: prompts about 512 tokens long, at most `longest`, and answers of about 200."""
    draw = random.Random(SEED)
    return [
        Arrival(
            0.0,
            min(longest, max(1, round(draw.lognormvariate(6.0, 0.7)))),
            min(800, max(2, round(draw.expovariate(1 / 200)))),
        )
        for _ in range(count)
    ]


def poisson(requests: Sequence[Arrival], per_s: float) -> list[Arrival]:
    """Return the requests with other times: those of a Poisson process."""
    draw, at_s, found = random.Random(SEED), 0.0, []
    for request in requests:
        at_s += draw.expovariate(per_s)
        found.append(request._replace(at_s=at_s))
    return found


DATE = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d|)")
COLUMNS = (
    "timestamp (seconds, or in all lines a date and time such as 2023-11-16 18:15:46.68), input tokens and output "
    "tokens (whole numbers above 0)"
)


def read_trace(path: Path) -> list[Arrival]:
    """Return the arrivals of a file whose columns are timestamp, input and output tokens, from the first one on.

    Raises:
        OSError: the file cannot be read.
        ValueError: a row has something else; the message has its line.
    """
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        reader = csv.reader(file)
        rows = [(reader.line_num, row) for row in reader if "".join(row).strip()]
    if rows and not re.search(r"\d", "".join(rows[0][1])):
        del rows[0]  # the names
    if not rows:
        msg = f"{path} has no rows; expected a line of names, then one for each request"
        raise ValueError(msg)
    dated = ":" in rows[0][1][0]
    found = [_arrival(row, f"{path}, line {line}", dated=dated) for line, row in rows]
    first_s = min(one.at_s for one in found)
    return [one._replace(at_s=one.at_s - first_s) for one in found]


def _arrival(row: Sequence[str], place: str, *, dated: bool) -> Arrival:
    try:
        at, *lengths = row[:3]
        prompt_len, output_len = (int(above_zero(int)(one)) for one in lengths)
        return Arrival(_seconds(at.strip(), dated=dated), prompt_len, output_len)
    except (ValueError, argparse.ArgumentTypeError) as error:
        msg = f"{place}: {','.join(row)}; expected {COLUMNS}"
        raise ValueError(msg) from error


def _seconds(text: str, *, dated: bool) -> float:
    if dated and (parts := DATE.fullmatch(text)):
        day, time, fraction, zone = parts.groups("0")
        at = datetime.fromisoformat(f"{day} {time}{zone.replace('Z', '') or '+00:00'}")
        return at.timestamp() + float(fraction)
    if not dated and math.isfinite(seconds := float(text)):
        return seconds
    raise ValueError(text)


@dataclass(frozen=True)
class Policy:
    """A way to serve arrivals."""

    name: str
    host_us: float
    serve: Callable[[Sequence[Arrival], float], list[Record]]
    """Gets the seconds of the host."""

    def records(self, arrivals: Sequence[Arrival]) -> list[Record]:
        """Return the records of arrivals."""
        return self.serve(arrivals, self.host_us / 1e6)


def policies(arguments: argparse.Namespace) -> tuple[ModelSpec, list[Policy]]:
    """Return the shapes of prompts that are served whole, and the policies that are compared."""
    slots = arguments.slots
    options = {**OPTIONS, **dict(arguments.option), "max_rolling_batch_size": str(slots)}
    case = case_of(arguments.config, arguments.instance, options)
    spec, times = spec_of(case), step_times(case)
    measured = 1e6 * host_s(slots), OLD[0] + OLD[1] * (slots - 8)
    our_us, old_us = (
        default if given is None else given
        for given, default in zip((arguments.host_us, arguments.old_host_us), measured, strict=True)
    )

    def ours(arrivals: Sequence[Arrival], host_s: float) -> list[Record]:
        return simulate(spec, times, arrivals, host_s=host_s)

    def old(arrivals: Sequence[Arrival], host_s: float) -> list[Record]:
        return old_policy(spec, times, arrivals, host_s)

    found = [
        Policy("ours", our_us, ours),
        Policy("old, our host", our_us, old),
        Policy("old", old_us, old),
    ]
    if arguments.chunk:
        # A decode runs in the smallest bucket that holds all slots.
        buckets = {"context_length_estimate": f"{slots},{arguments.chunk}"}
        chunked = {**options, **buckets, "enable_chunked_prefill": "true"}
        other = case_of(arguments.config, arguments.instance, chunked)
        shapes, steps = spec_of(other), step_times(other)

        def in_chunks(arrivals: Sequence[Arrival], host_s: float) -> list[Record]:
            return simulate(shapes, steps, arrivals, host_s=host_s)

        found.insert(1, Policy("ours, chunks", our_us, in_chunks))
    return spec, found


def loads(
    arguments: argparse.Namespace, spec: ModelSpec, policy: Policy
) -> Iterator[tuple[str, list[Arrival]]]:
    """Yield the arrivals that are compared, each with its name. `policy`: whose full rate Poisson arrivals load."""
    for name in arguments.arrivals:
        if name == "bursty":
            yield name, bursts(arguments.bursts, arguments.every, tuple(arguments.output))
        elif name == "poisson":
            longest = min(spec.prefill_buckets[-1], spec.max_model_len // 2)
            requests = chats(arguments.requests, longest)
            served = policy.records(requests)
            full_per_s = len(served) / max(record.tokens_s[-1] for record in served)
            yield name, poisson(requests, arguments.load * full_per_s)
        else:
            yield name, read_trace(arguments.trace)


def compare(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of `compare`, and write its plots."""
    spec, served = policies(arguments)
    for name, arrivals in loads(arguments, spec, served[0]):
        if all(one.output_len == 1 for one in arrivals):
            msg = f"{name}: all answers have one token, so there is no time between tokens; expected longer ones"
            raise ValueError(msg)
        gaps_s = {}
        for policy in served:
            records = policy.records(arrivals)
            gaps_s[policy.name] = [gap for record in records for gap in record.gaps_s]
            yield row(name, policy, records)
        if arguments.plots is not None:
            path = arguments.plots / f"simulation-{name}.svg"
            path.write_text(plot(TITLES[name], gaps_s))


def row(name: str, policy: Policy, records: Sequence[Record]) -> dict[str, Any]:
    """Return the figures of a policy."""
    found = summarise(records)
    seconds = zip(("ttft_p50", "ttft_p99", "gap_p50", "gap_p99", "stall"), found[1:], strict=True)
    return {
        "arrivals": name,
        "policy": policy.name,
        "host_us": round(policy.host_us),
        "requests": len(records),
        "tokens_per_s": round(found.tokens_per_s, 1),
        **{f"{figure}_ms": round(value * 1e3, 1) for figure, value in seconds},
    }


TITLES = {
    "bursty": "Time between tokens, bursts of eight prompts of 2,048 tokens",
    "poisson": "Time between tokens, Poisson arrivals",
    "trace": "Time between tokens, arrivals of a trace",
}
COLOURS = ("#1b6ca8", "#2a9d5c", "#e0a030", "#c0392b")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 400, 70, 40, 20, 60
LEAST_SHARE = 1e-5


def plot(title: str, gaps_s: Mapping[str, Sequence[float]]) -> str:
    """Return a picture (SVG): for each policy the share of gaps that are longer than a time. Both axes are logarithmic.

    The same figures give the same text.
    """
    low, high = log10(0.005), log10(max(map(max, gaps_s.values())) * 1.2)

    def x(gap_s: float) -> float:
        return LEFT + (log10(gap_s) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(share: float) -> float:
        return TOP + log10(share) / log10(LEAST_SHARE) * (HEIGHT - TOP - BOTTOM)

    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{title}</text>',
        f'<text x="{LEFT}" y="{HEIGHT - 14}">share of the times between two tokens that are longer</text>',
        f'<text x="{right}" y="{HEIGHT - 14}" text-anchor="end">ms</text>',
    ]
    for share in (1, 0.1, 0.01, 0.001, 0.0001, 0.00001):
        at = f"{y(share):.1f}"
        parts.append(f'<path d="M{LEFT} {at}H{right}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at}" text-anchor="end">{100 * share:g} %</text>')
    for gap_ms in (10, 20, 50, 100, 200, 500, 1000, 2000, 5000):
        if gap_ms / 1e3 < 10**high:
            at = f"{x(gap_ms / 1e3):.1f}"
            parts.append(f'<path d="M{at} {TOP}V{bottom}" stroke="#dddddd"/>')
            parts.append(f'<text x="{at}" y="{bottom + 18}" text-anchor="middle">{gap_ms}</text>')
    for number, (name, gaps) in enumerate(gaps_s.items()):
        values, counts = np.unique(np.round(gaps, 4), return_counts=True)
        longer = 1 - np.cumsum(counts) / len(gaps)
        points = f"M{LEFT} {y(1):.1f}"
        for value, share in zip(values, longer, strict=True):
            points += f"H{x(value):.1f}V{y(max(share, LEAST_SHARE)):.1f}"
        colour, height = COLOURS[number], TOP + 18 * (number + 1)
        parts.append(f'<path d="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(
            f'<text x="{right - 8}" y="{height}" text-anchor="end" fill="{colour}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def pair(text: str) -> tuple[str, str]:
    """Return name and value of an option."""
    name, value = flags.pair(text)
    if name == "max_rolling_batch_size":
        msg = f"{name} is set by --slots; write --slots {value}"
        raise argparse.ArgumentTypeError(msg)
    return name, value


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one object per line")
    parser.add_argument("--config", type=Path, default=CONFIG, help="a model's config.json")
    parser.add_argument(
        "--instance",
        choices=INSTANCES,
        default="inf2.48xlarge",
        metavar="TYPE",
        help="default inf2.48xlarge",
    )
    parser.add_argument("--slots", type=above_zero(int), default=32, help="default 32")
    words = " ".join(f"{name}={value}" for name, value in OPTIONS.items())
    parser.add_argument(
        *("-o", "--option"),
        action="append",
        type=pair,
        default=[],
        metavar="NAME=VALUE",
        help=f"an option of the model; default {words}",
    )
    parser.add_argument(
        "--chunk",
        type=above_zero(int, or_zero=True),
        default=512,
        help="tokens of a step with chunks; 0: none (default 512)",
    )
    parser.add_argument("--host-us", type=above_zero(float, or_zero=True))
    parser.add_argument("--old-host-us", type=above_zero(float, or_zero=True))
    parser.add_argument(
        "--arrivals", nargs="+", choices=list(TITLES), default=["bursty", "poisson"]
    )
    parser.add_argument("--bursts", type=above_zero(int), default=40, help="default 40")
    parser.add_argument(
        "--every", type=above_zero(float), default=2.0, help="s between bursts (default 2)"
    )
    parser.add_argument(
        "--output",
        type=above_zero(int),
        nargs=2,
        default=[64, 192],
        help="least and most tokens of a burst's answers (default 64 192)",
    )
    parser.add_argument(
        "--requests", type=above_zero(int), default=1000, help="of Poisson (default 1000)"
    )
    parser.add_argument(
        "--load", type=above_zero(float), default=0.8, help="of Poisson (default 0.8)"
    )
    parser.add_argument("--trace", type=Path, help="file with arrivals")
    parser.add_argument("--plots", type=Path, help="folder for a picture of each kind of arrivals")
    return parser


def main() -> int:
    """Print the table, or one JSON object per line."""
    parser = make_parser()
    arguments = parser.parse_args()
    if ("trace" in arguments.arrivals) != (arguments.trace is not None):
        parser.error("--arrivals trace needs --trace FILE, and the other way round")
    least, most = arguments.output
    if least > most:
        parser.error(f"--output {least} {most}: expected the least tokens, then the most")
    try:
        print_rows(compare(arguments), as_json=arguments.json)
    except (OSError, ServingError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
