"""Does work of the front delay tokens? Time between tokens at eight streams, quiet and under loads.

    python benchmarks/isolation.py --json                                # the whole table, 10 minutes
    python benchmarks/isolation.py --seconds 3 --runs 1 --loads quiet body

`djl-neuronx serve` with a device that only waits (`sleep_device.py`), vocabulary 32,000, greedy. This process reads all
sockets as tokens arrive; the kernel's timestamps are taken, so a late reader delays no token. Each load runs in a
process of its own, on the same cores:

* quiet: none.
* prompts: prompts of 8,000 tokens, one after the other. They are refused after tokenising, so that none gets a slot.
* body: bodies of 5 MB, one after the other. They are refused after parsing.
* idle: 2,000 connections that send nothing.
* metrics: `/metrics` ten times a second.
* chat: conversations of 80 bytes at `/tokenize`, one after the other.
* endless: four clients send conversations on which the chat template never ends. Each is refused after 2 s. `/ping`
  is asked twenty times a second, and must answer within one.

A row for each load and server, which take turns:

* `load`, `engine_process`: the option's value; `default`: it was not set. `streams`: tokens of so many are timed.
* `p50_ms`, `p99_ms`: of the times between two tokens of a stream, all streams together; medians of the runs.
* `max_ms`: the longest of all runs. `gaps`: how many times there are.
* `grew_ms`: `p99_ms` less that of `quiet` with the same server, if that is measured.
* `per_s`: requests of the load that were answered in a second.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import multiprocessing
import os
import resource
import selectors
import shutil
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import sleep_device
from sleep_device import endless, num_tokens, open_streams

STREAMS = 8
VOCAB = 32_000
STEP_MS = 10.45
PROMPT_LEN = 16
LONGEST_PROMPT = 4096
"""Prompts of more tokens are refused after tokenising, those of 64 times as many characters before."""
WARM_S = 0.5
QUIET_S = 1.0
ENDLESS = "endless"
TEMPLATE = (
    "{% if messages[0].content == 'endless' %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
)
SO_TIMESTAMPNS = 35
"""Linux, asm-generic/socket.h."""
LINE = "a line of some text, as documents have them; it is the 1st of many\n"
PROMPT = "one two three four five six seven eight nine ten " * 200
"""Every character is a token."""


def post(port: int, inputs: str, reason: bytes, counter: Any) -> None:  # noqa: ANN401
    """Send a prompt again and again; each must be refused for `reason`."""
    body = orjson.dumps({"inputs": inputs})
    connection = http.client.HTTPConnection("127.0.0.1", port)
    while True:
        connection.request("POST", "/invocations", body)
        response = connection.getresponse()
        content = response.read()
        if response.status != HTTPStatus.REQUEST_ENTITY_TOO_LARGE or reason not in content:
            sys.exit(f"expected 413 and {reason!r}, found {response.status}: {content!r}")
        counter.value += 1


def send_prompts(port: int, counter: Any) -> None:  # noqa: ANN401
    post(port, PROMPT[:8000], b"8000 tokens", counter)


def send_bodies(port: int, counter: Any) -> None:  # noqa: ANN401
    post(port, LINE * (5_000_000 // len(LINE)), b"bytes", counter)


def keep_idle(port: int, counter: Any) -> None:  # noqa: ANN401, ARG001
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(2000)]
    time.sleep(3600)
    del idle


def read_metrics(port: int, counter: Any) -> None:  # noqa: ANN401
    connection = http.client.HTTPConnection("127.0.0.1", port)
    while True:
        connection.request("GET", "/metrics")
        connection.getresponse().read()
        counter.value += 1
        time.sleep(0.1)


def ask(port: int, content: str, counter: Any) -> None:  # noqa: ANN401
    """Send a conversation again and again."""
    messages = [{"role": "user", "content": content}]
    body = orjson.dumps({"messages": messages})
    connection = http.client.HTTPConnection("127.0.0.1", port)
    while True:
        connection.request("POST", "/tokenize", body)
        response = connection.getresponse()
        answer = response.read()
        if (b"chat template takes more than 2 s" in answer) != (content == ENDLESS):
            sys.stderr.write(f"unexpected: {response.status} {answer!r}\n")
            os._exit(1)
        counter.value += 1


def send_chats(port: int, counter: Any) -> None:  # noqa: ANN401
    ask(port, "hello", counter)


def send_endless(port: int, counter: Any) -> None:  # noqa: ANN401
    for _ in range(4):
        threading.Thread(target=ask, args=(port, ENDLESS, counter), daemon=True).start()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
    while True:
        connection.request("GET", "/ping")
        if connection.getresponse().read() != b'{"status":"healthy"}':
            sys.exit("/ping has failed")
        time.sleep(0.05)


LOADS: dict[str, Callable[[int, Any], None] | None] = {
    "quiet": None,
    "prompts": send_prompts,
    "body": send_bodies,
    "idle": keep_idle,
    "metrics": read_metrics,
    "chat": send_chats,
    "endless": send_endless,
}


@contextlib.contextmanager
def loaded(name: str, port: int) -> Iterator[Any]:
    """A process that loads the server, if the load is one; the counter of its requests."""
    context = multiprocessing.get_context("spawn")
    counter, load = context.Value("q", 0), LOADS[name]
    if load is None:
        yield counter
        return
    client = context.Process(target=load, args=(port, counter), daemon=True)
    client.start()
    try:
        time.sleep(WARM_S + 1)
        yield counter
        if not client.is_alive():
            sys.exit(f"the load {name} has ended; its message is above")
    finally:
        client.terminate()
        client.join()


def token_gaps(port: int, length: int, seconds: float) -> list[float]:
    """Return the times between two tokens of a stream, in ms, of all streams together."""
    gaps: list[float] = []
    with (
        open_streams(port, STREAMS, endless(PROMPT_LEN, length, {})) as streams,
        selectors.DefaultSelector() as selector,
    ):
        for stream in streams:
            num_tokens(stream.recv(2**16), b"HTTP/1.1 200")
            stream.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            selector.register(stream, selectors.EVENT_READ)
        last_s: dict[int, float] = {}
        warm_s = time.monotonic() + WARM_S
        while (now_s := time.monotonic()) < warm_s + seconds:
            for key, _ in selector.select(1.0):
                data, facts, _, _ = key.fileobj.recvmsg(2**16, 64)
                count = num_tokens(data)
                if not facts:  # arrived before the kernel began to take the time
                    continue
                seconds_part, nanoseconds = struct.unpack("qq", facts[0][2])
                arrived_s = seconds_part + nanoseconds / 1e9
                if count and now_s > warm_s and key.fd in last_s:
                    # Of tokens that arrived together only the last time is known.
                    gaps += [(arrived_s - last_s[key.fd]) * 1e3, *[0.0] * (count - 1)]
                last_s[key.fd] = arrived_s if count else last_s.get(key.fd, arrived_s)
    time.sleep(QUIET_S)  # the server ends what nobody reads any more
    return gaps


def measure(options: argparse.Namespace, work: Path) -> Iterator[dict[str, Any]]:
    """The rows: `--runs` rounds of every load on every server."""
    length = PROMPT_LEN + int((options.seconds + WARM_S + 10) / STEP_MS * 1e3)
    length = max(length, LONGEST_PROMPT + 1)
    sleep_device.save_model(work / "model", vocab=VOCAB, length=length)
    sleep_device.Stamps(work / "model")
    path = work / "model" / "tokenizer_config.json"
    path.write_bytes(orjson.dumps({**orjson.loads(path.read_bytes()), "chat_template": TEMPLATE}))
    modes = ["true", "false"] if options.engine_process == "both" else [options.engine_process]
    cases = list(itertools.product(options.loads, modes))
    gaps: dict[tuple[str, str], list[list[float]]] = {case: [] for case in cases}
    rates: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    with contextlib.ExitStack() as stack:
        ports = {
            mode: stack.enter_context(
                sleep_device.sleep_server(
                    shutil.copytree(work / "model", work / mode),
                    {
                        "text_timeout": 2,
                        **sleep_device.options(
                            mode,
                            rows=STREAMS,
                            length=length,
                            longest_prompt=LONGEST_PROMPT,
                            step_ms=STEP_MS,
                        ),
                    },
                )
            )
            for mode in modes
        }
        for _, (load, mode) in itertools.product(range(options.runs), cases):
            with loaded(load, ports[mode]) as counter:
                before, began_s = counter.value, time.monotonic()
                gaps[load, mode].append(token_gaps(ports[mode], length, options.seconds))
                rates[load, mode].append((counter.value - before) / (time.monotonic() - began_s))
    p50, p99 = (
        {
            case: statistics.median(float(np.percentile(run, share)) for run in runs)
            for case, runs in gaps.items()
        }
        for share in (50, 99)
    )
    for load, mode in cases:
        quiet = p99.get(("quiet", mode))
        yield {
            "load": load,
            "engine_process": mode,
            "streams": STREAMS,
            "p50_ms": round(p50[load, mode], 3),
            "p99_ms": round(p99[load, mode], 3),
            "max_ms": round(max(map(max, gaps[load, mode])), 3),
            "grew_ms": None if quiet is None else round(p99[load, mode] - quiet, 3),
            "gaps": sum(map(len, gaps[load, mode])),
            "per_s": round(statistics.median(rates[load, mode]), 1),
        }


def main() -> int:
    """Print the table, or one JSON object per line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one object per line")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run's clock")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--loads", nargs="*", choices=list(LOADS), default=list(LOADS))
    parser.add_argument(
        "--engine-process",
        choices=sleep_device.ENGINE_PROCESS,
        default="default",
        help="option.engine_process of the servers; default: not set",
    )
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # of this process and all it starts
    with tempfile.TemporaryDirectory() as work:
        sleep_device.print_rows(measure(options, Path(work)), as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
