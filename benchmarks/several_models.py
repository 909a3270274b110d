"""Do several models on one machine leave each other alone? Streams of three models, while an engine is killed.

    python benchmarks/several_models.py                    # a run without a kill, and two with one: 2 minutes
    python benchmarks/several_models.py --engines 1 2 4 8  # how many engines one front serves: 2 minutes

One `djl-neuronx serve` with models `a` (two copies), `b` and `c`: four engine processes, on a device that only waits
(`sleep_device.py`). Its answers follow from prompt and model, so each request has one right text. A process has all
clients: `--streams` requests at any time, a half of them for `a` and a quarter for each other model; eight in ten are
lines of JSON, the others events, or answered as a whole. A tenth has no slot and waits. With 400 streams and steps of
100 ms front and clients take less than a core together: a front that is the limit would delay everyone, whatever ends.

An engine of `a`, and later that of `b`, gets SIGKILL. Every answer must be right, also those of the requests that it
ran, and `/ping` is 200 all the time: anything else is wrong, and an exit status of 1.

A column for each run, and the number of wrong things; with `--json` an object for each run. `killed`: the model.
`streams`: at once. `slots`: of each engine. `requests`: ended in the run; `resumed`: with tokens, by another engine
after the kill. `recovery_s`:
from the kill until every copy of the model has requests again. p50 and p99 of the times between two tokens of a stream,
in ms, of models whose engines live: `before` the kill and `after` it, each for `--seconds` (a pause of the machine is
more than a hundredth of a shorter time), and from the kill until the recovery (`during`). `moved`: `p99_after` to
`p99_before`; the run without a kill has the same halves. `met`: less than 1.2. `front_us`: CPU time of the front per
token. `front_cores`, `client_cores`: CPU time per second.

With `--engines`: a column for each number of copies of one model, each with a quarter of `--streams`. `tokens_s`:
tokens that the front delivered per second; `bound`: what the devices could make; `share`: of the bound;
`engine_cores`: CPU time of all engines per second. One front is the limit when `front_cores` is 1, as it is one process
of Python, if the machine has cores enough for clients and engines too.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import resource
import selectors
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sleep_device
from soak import CLOSE, RECOVERY_S, SHOWN, SoakError, replies

from tests.clients.answers import FORMS, SSE, Question, judge
from tests.clients.embedded import DEADLINE_S, Embedded
from tests.processes import engines, engines_of

VOCAB = 1000
PROMPT_LEN = 16
NUM_PROMPTS = 500
"""Of each model."""
NUM_TOKENS = (20, 60)
"""Fewest and most of an answer, by default."""
COPIES: Mapping[str, int] = {"a": 2, "b": 1, "c": 1}
NUM_ENGINES = sum(COPIES.values())
MOST_MOVED = 1.2
RUNNING = 0.9
"""Slots for each stream."""
SETTLE_S = 3.0
POLL_S = 0.1
SO_TIMESTAMPNS = 35
"""Linux, asm-generic/socket.h."""


@dataclass(frozen=True)
class Result:
    """The outcome of a request. Times are of the clock, as the kernel's are."""

    model: str
    form: str
    outcome: str
    sent_s: float
    ended_s: float
    token_times: npt.NDArray[np.float64]
    """Of a stream: one for each token, and for the error. Tokens that arrive together have the last one's."""


@dataclass
class Ask:
    """A request on its own connection."""

    question: Question
    form: str
    text: str
    """The right answer."""
    sent_s: float = 0.0
    data: bytearray = field(default_factory=bytearray)
    token_times: list[float] = field(default_factory=list)

    def send(self, port: int) -> socket.socket:
        """Send it."""
        body = self.question.body(self.form)
        accept = [f"accept: {SSE}"] if self.form == "sse" else []
        lines = ["POST /invocations HTTP/1.1", "host: a", CLOSE, *accept]
        head = "\r\n".join([*lines, f"content-length: {len(body)}", "", ""])
        wire = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
        wire.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self.sent_s = time.time()
        wire.sendall(head.encode() + body)
        return wire

    def receive(self, wire: socket.socket) -> bool:
        """Take what has come. False: it has ended."""
        data, facts = b"", []
        with contextlib.suppress(OSError):  # a reset: what has come is judged
            data, facts, _, _ = wire.recvmsg(2**16, 64)
        self.data += data
        if facts and self.form != "json":
            seconds, nanoseconds = struct.unpack("qq", facts[0][2])
            # Lines and events end in a bare line feed, HTTP's own in two characters; an event ends in two.
            count = data.count(b"\n") - data.count(b"\r") - data.count(b"\n\n")
            self.token_times += [seconds + nanoseconds / 1e9] * count
        return bool(data)

    def result(self, ended_s: float) -> Result:
        """Judge it."""
        reply, *more = replies(bytes(self.data))
        outcome = judge(reply, self.form, self.text) if not more else f"wrong: {len(more)} more"
        times = np.array(self.token_times)
        return Result(str(self.question.model), self.form, outcome, self.sent_s, ended_s, times)


def ask_all(
    port: int,
    folders: Mapping[str, Path],
    streams: Sequence[str],
    seed: int,
    tokens: tuple[int, int],
    end: Connection,
) -> None:
    """Be a client for each name of a model in `streams`, until a message comes. Sends the results.

    `tokens`: fewest and most of an answer. A request that has no end within `DEADLINE_S` is judged as it is.
    """
    pick = random.Random(seed)
    texts = {name: right_texts(one, tokens[1]) for name, one in folders.items()}
    ended: list[tuple[Ask, float]] = []
    with selectors.DefaultSelector() as selector:

        def ask(model: str) -> None:
            (prompt, words), num_tokens = pick.choice(texts[model]), pick.randint(*tokens)
            parameters = (("max_new_tokens", num_tokens), ("ignore_eos", True))
            (form,) = pick.choices(FORMS, (1, 8, 1))
            text = "".join(f" {word}" for word in words[:num_tokens])
            one = Ask(Question(prompt, parameters, model=model), form, text)
            selector.register(one.send(port), selectors.EVENT_READ, one)

        for model in streams:
            ask(model)
        selector.register(end, selectors.EVENT_READ)
        over_s = 0.0
        while len(selector.get_map()) > bool(not over_s) and not 0 < over_s < time.time():
            for key, _ in selector.select(1.0):
                wire: Any = key.fileobj
                if wire is end:
                    selector.unregister(end)
                    over_s = time.time() + DEADLINE_S
                elif not key.data.receive(wire):
                    selector.unregister(wire)
                    wire.close()
                    ended.append((key.data, time.time()))
                    if not over_s:
                        ask(key.data.question.model)
        ended += [(key.data, time.time()) for key in selector.get_map().values()]
    end.send([one.result(ended_s) for one, ended_s in ended])


def right_texts(folder: Path, most_tokens: int) -> list[tuple[str, list[str]]]:
    """Prompts, all different, with the words of their longest answers."""
    prompts = [f"{i:0{PROMPT_LEN}}" for i in range(NUM_PROMPTS)]
    texts = sleep_device.right_answers(folder, prompts, most_tokens)
    return [(prompt, text.split()) for prompt, text in zip(prompts, texts, strict=True)]


@dataclass(frozen=True)
class Mark:
    """A moment of the clock, CPU times and tokens so far."""

    at_s: float
    front_s: float
    engines_s: float
    clients_s: float
    tokens: float

    def since(self, began: Mark) -> Mark:
        """The increase since `began`, per second."""
        seconds = self.at_s - began.at_s
        return Mark(
            seconds,
            (self.front_s - began.front_s) / seconds,
            (self.engines_s - began.engines_s) / seconds,
            (self.clients_s - began.clients_s) / seconds,
            (self.tokens - began.tokens) / seconds,
        )


@dataclass(frozen=True)
class Run:
    """A part of the time of a bench."""

    killed: str | None
    """The model whose engine was killed."""
    began: Mark
    kill: Mark
    """Taken before the kill."""
    recovered: Mark
    end: Mark
    resumed: int


def cpu_s(pid: int | None) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Bench:
    """A server of several models, and its clients. A context."""

    def __init__(self, copies: Mapping[str, int], options: argparse.Namespace) -> None:
        """`copies`: of each model."""
        num_streams = options.streams // NUM_ENGINES
        self.num_slots = int(num_streams * RUNNING)
        self._copies = copies
        self.streams = [name for name, count in copies.items() for _ in range(count * num_streams)]
        self._options = options
        self.wrong: list[str] = []
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Bench:
        """Start all, and wait until every engine has requests."""
        length = PROMPT_LEN + self._options.tokens[1]
        with contextlib.ExitStack() as undo:
            work = Path(undo.enter_context(tempfile.TemporaryDirectory()))
            self.folders = {name: work / name for name in self._copies}
            for number, (name, folder) in enumerate(self.folders.items()):
                sleep_device.save_model(folder, vocab=VOCAB, length=length, number=number)
                sleep_device.Stamps(folder)
                lines = f"option.replicas={self._copies[name]}\n"
                (folder / "serving.properties").write_text(lines)
            options = sleep_device.options(
                "default",
                rows=self.num_slots,
                length=length,
                longest_prompt=PROMPT_LEN,
                step_ms=self._options.step_ms,
            )
            program = [str(Path(sleep_device.__file__))]
            folders = [*self.folders.values()]
            self.server = Embedded(options, work, os.environ, program, folders)
            undo.callback(self.server.kill)
            self.server.wait_ready()
            context = multiprocessing.get_context("spawn")
            self._end, end = context.Pipe()
            self._clients = context.Process(
                target=ask_all,
                args=(
                    self.server.port,
                    self.folders,
                    self.streams,
                    self._options.seed,
                    self._options.tokens,
                    end,
                ),
                daemon=True,
            )
            self._clients.start()
            undo.callback(self._clients.kill)
            end.close()
            for name in self._copies:
                self.wait_busy(name)
            time.sleep(min(SETTLE_S, self._options.seconds))
            self._open = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End all."""
        self._open.close()

    def results(self) -> list[Result]:
        """Let the clients end; what became of all requests."""
        self._end.send("end")
        found: list[Result] = self._end.recv()
        return found

    def samples(self, name: str, model: str) -> list[float]:
        """The values of a metric of a model."""
        reply = self.server.send("GET", "/metrics", b"", {}, time.monotonic() + DEADLINE_S)
        return [
            float(line.rpartition(" ")[2])
            for line in reply.data.decode().splitlines()
            if line.startswith(f"djl_neuronx_{name}{{") and f'model="{model}"' in line
        ]

    def wait_busy(self, model: str) -> None:
        """Wait until every copy of a model has requests."""

        def busy() -> bool:
            running = self.samples("slots_in_use", model)
            return len(running) == self._copies[model] and min(running) > 0

        self._wait(busy, f"not every copy of {model} has requests")

    def kill(self, model: str) -> None:
        """End one of its engines, and wait until the front has seen it."""
        before = sum(self.samples("engine_deaths_total", model))
        os.kill(engines_of(self.server.front, self.folders[model])[0], signal.SIGKILL)
        self._wait(
            lambda: sum(self.samples("engine_deaths_total", model)) > before,
            f"the end of an engine of {model} is not in the metrics",
        )

    def mark(self) -> Mark:
        """Take the time, the CPU times of all processes, and the tokens of all models."""
        front = self.server.front
        return Mark(
            time.time(),
            cpu_s(front),
            sum(map(cpu_s, engines(front))),
            cpu_s(self._clients.pid),
            sum(sum(self.samples("generated_tokens_total", name)) for name in self._copies),
        )

    def _wait(self, condition: Callable[[], bool], failure: str) -> None:
        deadline_s = time.monotonic() + RECOVERY_S
        while not condition():
            reply = self.server.send("GET", "/ping", b"", {}, deadline_s)
            if reply.status != HTTPStatus.OK:
                self.wrong.append(f"/ping: {reply}")
            if time.monotonic() > deadline_s:
                msg = f"{failure} within {RECOVERY_S:g} s: {self.server.said}"
                raise SoakError(msg)
            time.sleep(POLL_S)


def faults(results: Iterable[Result]) -> list[str]:
    """Describe the wrong outcomes."""
    return [
        f"model {one.model}, {one.form}: {one.outcome}" for one in results if one.outcome != "right"
    ]


def gaps_ms(results: Iterable[Result], began: Mark, end: Mark) -> npt.NDArray[np.float64]:
    """Times between two tokens of a stream, of those that arrived between two moments."""
    streams = [np.sort(result.token_times) for result in results if result.form != "json"]
    inside = [
        np.diff(times)[(began.at_s <= times[1:]) & (times[1:] < end.at_s)] for times in streams
    ]
    return np.concatenate(inside) * 1e3


def percentiles(results: Iterable[Result], began: Mark, end: Mark) -> list[float]:
    """p50 and p99 of `gaps_ms`."""
    return [round(float(one), 2) for one in np.percentile(gaps_ms(results, began, end), (50, 99))]


def kill_rows(options: argparse.Namespace, wrong: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each run; nothing is killed in the first one."""
    runs = []
    with Bench(COPIES, options) as bench:
        for killed in (None, "a", "b"):
            began = bench.mark()
            time.sleep(options.seconds)
            kill = bench.mark()
            if killed is not None:
                bench.kill(killed)
                bench.wait_busy(killed)
            recovered = bench.mark()
            time.sleep(max(0.0, kill.at_s + options.seconds - time.time()))
            resumed = sum(sum(bench.samples("resumed_requests_total", model)) for model in COPIES)
            resumed -= sum(run.resumed for run in runs)
            runs.append(Run(killed, began, kill, recovered, bench.mark(), int(resumed)))
        results = bench.results()
    wrong += bench.wrong + faults(results)
    for run in runs:
        others = [result for result in results if result.model != run.killed]
        mine = [one for one in results if run.began.at_s <= one.ended_s < run.end.at_s]
        before = percentiles(others, run.began, run.kill)
        during = percentiles(others, run.kill, run.recovered) if run.killed else None
        after = percentiles(others, run.kill, run.end)
        moved = after[1] / before[1]
        rates = run.kill.since(run.began)
        yield {
            "killed": run.killed,
            "streams": len(bench.streams),
            "slots": bench.num_slots,
            "step_ms": options.step_ms,
            "requests": len(mine),
            "resumed": run.resumed,
            "recovery_s": round(run.recovered.at_s - run.kill.at_s, 2) if run.killed else None,
            "p50_before": before[0],
            "p50_after": after[0],
            "p99_before": before[1],
            "p99_during": during and during[1],
            "p99_after": after[1],
            "moved": round(moved, 3),
            "met": moved < MOST_MOVED if run.killed else None,
            "front_us": round(rates.front_s / rates.tokens * 1e6),
            "front_cores": round(rates.front_s, 2),
            "client_cores": round(rates.clients_s, 2),
        }


def engine_rows(options: argparse.Namespace, wrong: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each number of engines."""
    for count in options.engines:
        with Bench({"a": count}, options) as bench:
            began = bench.mark()
            time.sleep(options.seconds)
            end = bench.mark()
            results = bench.results()
        wrong += bench.wrong + faults(results)
        rates = end.since(began)
        bound = count * bench.num_slots / options.step_ms * 1e3
        p50, p99 = percentiles(results, began, end)
        yield {
            "engines": count,
            "streams": len(bench.streams),
            "slots": bench.num_slots,
            "step_ms": options.step_ms,
            "tokens_s": round(rates.tokens),
            "bound": round(bound),
            "share": round(rates.tokens / bound, 3),
            "p50": p50,
            "p99": p99,
            "front_us": round(rates.front_s / rates.tokens * 1e6),
            "front_cores": round(rates.front_s, 2),
            "engine_cores": round(rates.engines_s, 2),
            "client_cores": round(rates.clients_s, 2),
        }


def print_columns(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each name, with the value of each row."""
    for name in rows[0]:
        values = ("-" if row[name] is None else str(row[name]) for row in rows)
        print(f"{name:<14}", *(f"{value:>9}" for value in values))


def main() -> int:
    """Print the runs, or one JSON object per line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one object per line")
    parser.add_argument("--streams", type=int, default=400, help=f"of {NUM_ENGINES} engines")
    parser.add_argument("--step-ms", type=float, default=100.0, help="the devices' time per step")
    parser.add_argument(
        "--tokens", type=int, nargs=2, default=NUM_TOKENS, help="fewest and most of an answer"
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="before and after a kill")
    parser.add_argument("--seed", type=int, default=1, help="of questions")
    parser.add_argument("--engines", type=int, nargs="*", help="measure so many, without kills")
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # of this process and all it starts
    wrong: list[str] = []
    rows = (engine_rows if options.engines else kill_rows)(options, wrong)
    if options.json:
        sleep_device.print_rows(rows, as_json=True)
    else:
        print_columns([*rows])
        print(f"{'wrong':<14} {len(wrong):>9}")
    for each in wrong[:SHOWN]:
        print(f"wrong: {each}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
