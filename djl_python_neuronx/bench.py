"""``djl-neuronx bench``: load on a running server, sent and measured by guidellm (extra `bench`).

This module asks the server for its models and limits, makes prompts of an exact number of tokens, and draws when
requests arrive. guidellm (0.8.1) draws the gaps of its own Poisson process from one seed in each of its ten processes,
so that ten gaps in a row are equal: arrivals are drawn here, and replayed there. docs/bench.md says why guidellm.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from itertools import islice, repeat, takewhile
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from djl_python_neuronx.config.flags import above_zero
from djl_python_neuronx.config.sources import API_KEYS, environment
from djl_python_neuronx.errors import ConfigError, redacted

if TYPE_CHECKING:
    import httpx
    from guidellm.benchmark import GenerativeBenchmark, GenerativeBenchmarksReport
    from guidellm.scheduler import SchedulerUpdateAction

DEFAULT_URL = "http://127.0.0.1:8080"
NUM_REQUESTS = 100
LENGTH = 128
MOST_PROMPTS = 256
"""Different prompts of one length: more than a cache of prompts keeps."""
MOST_TRIES = 50
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "world", "hand")
GOODPUT = {"ttft": "ttft_ms", "itl": "tpot_ms", "e2e": "e2el_ms"}
"""Name of a limit → guidellm's name."""
_INTERRUPT = {signal.SIGINT}
_FINISHED = re.compile(
    r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)[.,](\d{3}).*request_finished .*"
    r" prompt_tokens=(\d+) generated_tokens=(\d+) .*total_s=([\d.]+)"
)
"""A line of the server's log, text or JSON: when a request ended, its tokens, and seconds since it was queued."""
_TRACED = re.compile(
    r'(?=.*"timestamp": *([\d.]+))(?=.*"input_length": *(\d+)).*"output_length": *(\d+)'
)
"""A line of a trace in Mooncake's form: a time in ms, and tokens."""


class Planned(NamedTuple):
    """A request to send."""

    time_s: float
    """Since the first one. In a closed loop 0: it waits for an answer's end."""
    prompt_tokens: int
    output_tokens: int


class BenchedServer:
    """A running server. Its methods raise ConfigError with the route, and the server's error if it refuses."""

    def __init__(self, url: str, http: httpx.Client) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._http = http

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> Any:  # noqa: ANN401
        """Return the JSON of a GET, or of a POST of `body`."""
        import httpx

        advice = "start a server with `djl-neuronx serve`, or give the URL of a running one"
        try:
            answer = self._http.request("POST" if body else "GET", self.url + path, json=body)
            if answer.status_code == 401:
                advice = f"set --api-key or the variable {API_KEYS} to a key of the server"
            elif answer.status_code == 404 and path == "/info":
                advice = "give the URL of `djl-neuronx serve` without option.admin_port, which moves /info elsewhere"
            elif answer.status_code != 200:
                advice = answer.text[:500]
            answer.raise_for_status()
            return answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            msg = f"{self.url}{path}: {str(error).partition(chr(10))[0]}; {advice}"
            raise ConfigError(redacted(msg)) from error

    def facts(self, name: str) -> Mapping[str, Any]:
        """Return the facts of a model in `/info`. An empty name is that of the server's only model."""
        found = self.request("/info")
        models = {one["model"]: one for one in (found if isinstance(found, list) else [found])}
        name = name or (next(iter(models)) if len(models) == 1 else "")
        problem = "there is no such model" if name else "it has to name one of several models"
        facts: Mapping[str, Any] = models.get(name, {"problem": problem})
        if "problem" in facts:
            msg = f"--model is {name!r}: {facts['problem']}; the server has {', '.join(map(repr, models))}"
            raise ConfigError(msg)
        return facts

    def prompt(self, model: str, num_tokens: int, seed: int) -> str:
        """Return a text that the server counts as `num_tokens`, special ones included."""
        draw = random.Random(seed)  # noqa: S311
        for _ in range(MOST_TRIES):
            text = " ".join(draw.choices(WORDS, k=num_tokens))
            pieces = self.request("/tokenize", {"model": model, "inputs": text})
            text = text[: pieces[num_tokens - 1]["stop"]].rstrip()
            counted = self.request("/tokenize", {"model": model, "prompt": text})["count"]
            if text and counted == num_tokens:
                return text
        msg = f"found no text of {num_tokens} tokens, special ones included; set --prompt-tokens to another length"
        raise ConfigError(msg)

    def seconds_alone(self, model: str, request: Planned) -> float:
        """Send a request, and return its time from end to end."""
        given = {"model": model, "prompt": self.prompt(model, request.prompt_tokens, 0)}
        body = {**given, "max_tokens": request.output_tokens, "ignore_eos": True}
        began_s = time.monotonic()
        self.request("/v1/completions", body)
        return time.monotonic() - began_s

    def rows(self, model: str, requests: Sequence[Planned]) -> dict[str, list[Any]]:
        """Return guidellm's columns."""
        prompt = cache(self.prompt)
        times, prompt_tokens, output_tokens = map(list, zip(*requests, strict=True))
        return {
            "prompt": [prompt(model, n, i % MOST_PROMPTS) for i, n in enumerate(prompt_tokens)],
            "prompt_tokens_count": prompt_tokens,
            "output_tokens_count": output_tokens,
            "relative_timestamp": times,
        }


def read_trace(path: Path) -> list[Planned]:
    """Return the requests of a log of the server or of a trace, as they arrived; other lines are skipped.

    Raises:
        ConfigError: there is no request.
        OSError: the file cannot be read.
    """
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if ended := _FINISHED.search(line):
            day, clock, ms, prompt_tokens, output_tokens, total_s = ended.groups()
            time_s = datetime.fromisoformat(f"{day} {clock}.{ms}+00:00").timestamp()
            lengths = int(prompt_tokens), int(output_tokens)
            found.append(Planned(time_s - float(total_s), *lengths))
        elif traced := _TRACED.search(line):
            found.append(Planned(float(traced[1]) / 1e3, int(traced[2]), int(traced[3])))
    found = sorted(one for one in found if one.prompt_tokens and one.output_tokens)
    if not found:
        msg = (
            f"--replay {path}: no line has a request; expected a log of the server with `request_finished`, or JSON "
            'such as {"timestamp": 1500, "input_length": 128, "output_length": 64} in each line'
        )
        raise ConfigError(msg)
    return [one._replace(time_s=one.time_s - found[0].time_s) for one in found]


def poisson(rate: float, request: Planned) -> Iterator[Planned]:
    """Requests of one length that arrive at random, `rate` a second."""
    draw, time_s = random.Random(0), 0.0  # noqa: S311
    while True:
        yield request._replace(time_s=time_s)
        time_s += draw.expovariate(rate)


def check(requests: Iterable[Planned], facts: Mapping[str, Any]) -> None:
    """Raise ConfigError if the model does not take a request."""
    longest, most = facts["longest_prompt"], facts["max_model_len"]
    for _, prompt_tokens, output_tokens in requests:
        if prompt_tokens > longest or prompt_tokens + output_tokens > most:
            msg = (
                f"a prompt of {prompt_tokens} tokens with an answer of {output_tokens} does not fit: "
                f"{facts['model']!r} takes {longest} tokens, and {most} with the answer; lower "
                "--prompt-tokens, --output-tokens or those in the file of --replay"
            )
            raise ConfigError(msg)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    whole, number = above_zero(int), above_zero(float)
    key = environment().get(API_KEYS, "").partition(",")[0]
    command.add_argument("url", nargs="?", default=DEFAULT_URL, help="server (default %(default)s)")
    for flag, kind, metavar, text in (
        ("--model", str, "NAME", "one of several models, by its name in /info"),
        ("--prompt-tokens", whole, "N", f"exact length of prompts (default {LENGTH} if they fit)"),
        ("--output-tokens", whole, "N", f"length of answers (default {LENGTH} if they fit)"),
        ("--requests", whole, "N", f"end after so many (default {NUM_REQUESTS}; see --duration)"),
        ("--duration", number, "S", "send for so many seconds any number of requests"),
        ("--api-key", str, "KEY", f"default: the first key of the variable {API_KEYS}"),
        ("--json", Path, "FILE", "write guidellm's report, with each request"),
        ("--plot", Path, "FILE", "write its charts, as a page of HTML"),
    ):
        command.add_argument(flag, type=kind, metavar=metavar, help=text)
    load = command.add_mutually_exclusive_group()
    for flag, kind, metavar, text in (
        ("--concurrency", whole, "N", "requests at a time (default: the model's slots)"),
        ("--rate", number, "R", "arrivals a second, a Poisson process"),
        ("--replay", Path, "FILE", "arrivals and lengths of a server's log or Mooncake trace"),
    ):
        load.add_argument(flag, type=kind, metavar=metavar, help=text)
    text = "count requests within limits in ms: ttft:500 itl:50 e2e:5000"
    command.add_argument("--goodput", type=_limit, nargs="+", metavar="NAME:MS", help=text)
    command.set_defaults(model="", duration=math.inf, api_key=key, goodput=())


def _limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in GOODPUT:
        msg = f"{text!r} is not a limit; expected {', '.join(GOODPUT)}, each with ms behind a colon: ttft:500"
        raise argparse.ArgumentTypeError(msg)
    return GOODPUT[name], above_zero(float)(value)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status of the process.

    Raises:
        ConfigError: the server, a length, a file or the installation does not suit.
    """
    try:
        import httpx

        key = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
        with httpx.Client(headers=key, timeout=httpx.Timeout(None, connect=10)) as http:
            spec = plan(arguments, BenchedServer(arguments.url, http))
        (measured,) = measure(spec).benchmarks
    except OSError as error:
        raise ConfigError(str(error)) from error
    except ImportError as error:
        msg = f"bench needs {error.name}; install it: pip install 'djl-python-neuronx[bench]'"
        raise ConfigError(msg) from error
    sys.stdout.write(table(measured))
    if signal.sigpending() >= _INTERRUPT:
        return 130  # as a shell reports SIGINT
    return 0 if measured.requests.successful else 1


def plan(arguments: argparse.Namespace, server: BenchedServer) -> dict[str, Any]:
    """Return what guidellm is to run, after two requests that are not measured."""
    facts = server.facts(arguments.model)
    model, duration_s, most = facts["model"], arguments.duration, arguments.requests
    fitting = min(LENGTH, facts["longest_prompt"], facts["max_model_len"] // 2)
    lengths = arguments.prompt_tokens or fitting, arguments.output_tokens or fitting
    request = Planned(0.0, *lengths)
    check([request], facts)
    source: Iterable[Planned] = repeat(request)
    if arguments.replay:
        source = read_trace(arguments.replay)
        check(source, facts)
    elif arguments.rate:
        source = poisson(arguments.rate, request)
    outputs = {"json": arguments.json, "html": arguments.plot}
    for path in filter(None, outputs.values()):
        path.touch()  # rather than fail when all is measured
    alone_s = min(server.seconds_alone(model, request) for _ in range(2))  # the first may warm up
    streams = arguments.concurrency or facts["num_slots"]
    profile, constraints = {"kind": "replay", "schedule_turn": "timestamp"}, []
    if not (arguments.rate or arguments.replay):
        profile = {"kind": "concurrent", "streams": streams}
        if duration_s < math.inf:
            constraints = [{"kind": "max_duration", "seconds": duration_s}]
            # More than there is time for: few requests are faster than one that is alone.
            most = most or streams + math.ceil(2 * streams * duration_s / alone_s)
    if duration_s == math.inf and not arguments.replay:
        most = most or NUM_REQUESTS
    requests = [*takewhile(lambda one: one.time_s <= duration_s, islice(source, most))]
    return {
        "backend": {
            "kind": "openai_http",
            "target": server.url,
            "model": model,
            "api_key": arguments.api_key or None,
            "request_format": "/v1/completions",
            "http2": False,
            "verify": True,
        },
        "profile": profile,
        "constraints": constraints,
        "data": [{"kind": "in_memory_dict", "data": server.rows(model, requests)}],
        "outputs": [{"kind": kind, "path": path} for kind, path in outputs.items() if path],
        "metrics": {"kind": "generative", "sample_size": 0, "slo": dict(arguments.goodput) or None},
    }


def measure(spec: Mapping[str, Any]) -> GenerativeBenchmarksReport:
    """Run guidellm, until its end or ^C, which the caller finds pending."""
    # A terminal interrupts guidellm's processes too. They inherit the mask, and go on.
    resource_tracker.ensure_running()  # which removes the mask
    signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPT)
    from guidellm import configure_logger, settings
    from guidellm.entrypoints import benchmark_generative_text
    from guidellm.scheduler import SchedulerUpdateAction
    from guidellm.schemas.benchmark import BenchmarkScenario

    def until_interrupt(_state: object, _request: object) -> SchedulerUpdateAction:
        if signal.sigpending() >= _INTERRUPT:
            return SchedulerUpdateAction(request_queuing="stop", request_processing="stop_all")
        return SchedulerUpdateAction()

    configure_logger(settings.logging.model_copy(update={"console_log_level": "ERROR"}))
    settings.max_worker_processes = min(settings.max_worker_processes, os.cpu_count() or 1)
    scenario, shown = BenchmarkScenario(spec=spec), sys.stdout.isatty()
    run = benchmark_generative_text(scenario, progress=shown, interrupt=until_interrupt)
    report, _ = asyncio.run(run)
    return report


def table(measured: GenerativeBenchmark) -> str:
    """Return the results as text."""
    metrics, failed = measured.metrics, measured.requests.errored
    totals, span_s = metrics.request_totals, max(0.0, measured.duration)
    # guidellm (0.8.1) may end between the last answer and its own count of it.
    unreported = measured.scheduler_state.processing_requests
    lines = [
        f"{totals.successful} requests done, {totals.errored} failed, {totals.incomplete} cut off, "
        f"{unreported} unreported in {span_s:.1f} s",
        *(f"first error: {one.info.error}" for one in failed[:1]),
    ]
    if totals.successful:
        head = "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p95", "p99", "max"))
        lines.append(f"{'':25}{head}")
        for title, metric in (
            ("time to first token, ms", metrics.time_to_first_token_ms.successful),
            ("between tokens, ms", metrics.inter_token_latency_ms.successful),
            ("end to end, s", metrics.request_latency.successful),
        ):
            points = metric.percentiles
            values = (metric.mean, points.p50, points.p90, points.p95, points.p99, metric.max)
            lines.append(f"{title:25}" + "".join(f"{value:10.4g}" for value in values))
        requests = metrics.requests_per_second.successful.mean
        tokens = metrics.output_tokens_per_second.successful.mean
        lines.append(f"{requests:.4g} requests/s, {tokens:.4g} tokens/s")
    if metrics.request_goodput is not None:
        within = metrics.request_goodput.successful.mean
        lines.append(f"goodput {within:.4g} requests/s ({metrics.slo_attainment or 0:.1%})")
    return "\n".join(lines) + "\n"
