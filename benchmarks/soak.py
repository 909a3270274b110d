"""Does the service hold? Kills of the engine process, or clients that are broken or mean harm.

    python benchmarks/soak.py --kills 50                    # the embedded server, about 10 minutes
    python benchmarks/soak.py --requests 10000              # about 5 minutes
    python benchmarks/soak.py --requests 3000 --door async  # DJL's released engine: async, rolling or plain

`--kills`: 200 ordinary streams at a time, while the engine process (front -> guard -> engine, found in /proc) gets
SIGKILL, SIGSEGV, SIGABRT, or SIGSTOP, which the watchdog must notice (`--predict-timeout`). One kill in five hits the
engine while it loads. `--seed` fixes the signals and their delays. The embedded server must answer every request right.

`--requests`: 32 clients at a time, half of them ordinary. The others leave, cut bodies, send what is no request, are
slow, or flood the queue. A client is a function of a `Case` in `CLIENTS`, with the outcomes that its requests may have:
so a body that is cut must not be answered, and one that is whole must be, even if its client is slow. `--seed` fixes
who comes when.

Every request ends with one of these; anything else is wrong, and so is one that does not end (`DEADLINE_S`):

* `right`: the text of the quiet pass at the start, with the same prompt, parameters and seed. The quiet pass itself is
  compared with the example model's known answers.
* `error 503 backend_unavailable` and the like: an error status with a JSON body. With `--kills`: 408, 500 or 503, and
  only under DJL.
* `error event …`: the last event of a stream has the error; the text before it is a prefix of the right one.
* `left`: the client closed the connection in the middle; the text so far is a prefix of the right one.
* `closed`: the server closed the connection of a client that had not sent its request to the end.

After each kill a request that is sent later must be answered right, within `RECOVERY_S`; the time from the kill to
that answer is the recovery. The next kill comes when all requests that were open at the last one have ended. At the end
the quiet pass is repeated, SIGTERM must end the server with status 0, and nothing may be left: compared are
descriptors, threads and child processes of the front (idle, before and after the kills), then processes, the port,
temporary files and shared memory. With `--requests` those of the engine are compared too, since the end of a warm-up of
2,000 requests, and the memory of both, which may grow by 5 %.

One JSON object; exit status 1 if anything was wrong. Linux only.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import os
import random
import re
import resource
import signal
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from http.client import HTTPException, HTTPResponse, IncompleteRead
from operator import contains
from pathlib import Path
from typing import Any

from djl_python_neuronx.loading.tokenizer_process import IDLE_WORKERS
from tests.clients.answers import FORMS, ROOT, SSE, Question, Reply, judge, questions
from tests.clients.embedded import SETTLE_S, Embedded
from tests.djl.door import Door
from tests.djl.folders import MODES
from tests.processes import alive, descendants, engines, read

RECOVERY_S = 120.0
PREDICT_TIMEOUT_S = {True: 10, False: 30}
"""Of the embedded server, and of DJL's engine, which ends a process that lets a call wait as long."""
MARK = "SOAK_RUN"
"""Environment variable that every process of a run inherits."""
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGSTOP)
WARM_UP = 2000
"""Requests before descriptors, threads and memory are compared: the front's memory grows for so long, and then no more
(it keeps what the largest bodies at once took)."""
MEMORY = 1.05
IDLE_S = 2.0
"""After the warm-up, until requests whose clients left have ended."""
SHOWN = 20
LOST = r"(?m)^.*(?:engine_process|engine_ended|watchdog|CRITICAL|ERROR).*$"
"""Lines of the log that say why an engine has ended."""
PATIENCE_S = 60.0
"""A connection on which nothing comes for as long hangs."""
FLOOD = 64
"""Requests, or connections, of one client at once: more than have a place in the queue."""
LIMIT_S = 2
LIMITS: Mapping[str, Any] = {
    "max_waiting": 32,
    "max_body_bytes": 2**20,
    "request_head_timeout": LIMIT_S,
    "request_body_timeout": LIMIT_S,
    "write_timeout": LIMIT_S,
    "keep_alive_timeout": LIMIT_S,
}
"""Options with hostile clients."""
FULL = "error 503 queue_full"
RIGHT = frozenset({"right", FULL, "error 408 request_timeout"})
BAD = frozenset({"error 400 bad_request", "error 400 unsupported_parameter", FULL})
"""Outcomes of a bad body. It may be refused before it is parsed, if there is no place for it."""
CLOSE, CHUNKED = "connection: close", "transfer-encoding: chunked"
DOORS: dict[str, Callable[..., Embedded | Door]] = {
    "embedded": Embedded.start, **{mode: partial(Door.start, mode) for mode in MODES}
}  # fmt: skip


class SoakError(Exception):
    """The service did not start, or did not recover."""


@dataclass
class Holdings:
    """Resources that a process holds."""

    descriptors: int
    threads: int
    children: int
    rss_mib: float

    @classmethod
    def of(cls, pid: int) -> Holdings:
        """Read from /proc."""
        resident_pages = int(read(pid, "statm").split()[1])
        return cls(
            descriptors=len([*Path(f"/proc/{pid}/fd").iterdir()]),
            threads=len([*Path(f"/proc/{pid}/task").iterdir()]),
            children=len(descendants(pid)),
            rss_mib=round(resident_pages * resource.getpagesize() / 2**20, 1),
        )

    def grown(self, before: Holdings, memory: float = math.inf) -> list[str]:
        """Names of the resources that have grown. `memory`: factor by which memory may grow."""
        names = ("descriptors", "threads", "children")
        found = [name for name in names if getattr(self, name) > getattr(before, name)]
        return [*found, *(["memory"] if self.rss_mib > memory * before.rss_mib else [])]


@dataclass
class Tally:
    """Outcomes of the requests, and the recovery from each kill. Any thread."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    _open: list[float] = field(default_factory=list)
    _asked: list[float] = field(default_factory=list)
    _killed_s: float = -math.inf
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def ask(self) -> float:
        """Note a request that is sent now; returns the time."""
        with self._changed:
            self._asked.append(time.monotonic())
            return self._asked[-1]

    def count(self, outcome: str, sent_s: float) -> None:
        """Count a request that was sent at a time."""
        now = time.monotonic()
        with self._changed:
            if sent_s in self._asked:
                self._asked.remove(sent_s)
            kind, _, detail = outcome.partition(": ")
            self.outcomes[kind] += 1
            if kind == "wrong":
                self.wrong.append(detail)
                if len(self.wrong) <= SHOWN:
                    print(outcome, file=sys.stderr)
            if kind == "right":
                healed = [killed_s for killed_s in self._open if killed_s < sent_s]
                self.recoveries += [now - killed_s for killed_s in healed]
                self._open = [killed_s for killed_s in self._open if killed_s >= sent_s]
            self._changed.notify_all()

    def killed(self) -> None:
        """Note a kill."""
        with self._changed:
            self._killed_s = time.monotonic()
            self._open.append(self._killed_s)

    def wait_recovered(self, timeout_s: float) -> bool:
        """Wait until a request sent after the last kill was answered right, and those sent before have ended.

        A request that was running at two kills may end with an error.
        """

        def recovered() -> bool:
            return not self._open and min(self._asked, default=math.inf) > self._killed_s

        with self._changed:
            return self._changed.wait_for(recovered, timeout_s)


def wait_until(condition: Callable[[], Any], timeout_s: float) -> bool:
    """Returns whether it became true in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def marked(mark: str) -> list[int]:
    """Living processes of a run."""
    wanted = f"{MARK}={mark}".encode()
    return [
        int(path.name)
        for path in Path("/proc").glob("[0-9]*")
        if wanted in read(int(path.name), "environ").split(b"\0")
    ]


def shared_memory(pids: Iterable[int]) -> set[str]:
    """Shared memory that these processes map."""
    maps = b"".join(read(pid, "maps") for pid in pids)
    return {line.split()[-1].decode() for line in maps.splitlines() if b" /dev/shm/" in line}


class Soak:
    """A run against a door that serves."""

    def __init__(
        self, door: Embedded | Door, pick: random.Random, num_streams: int, num_questions: int
    ) -> None:
        self.door = door
        self.pick = pick
        self.num_streams = num_streams
        self.questions = questions(num_questions, pick)
        self.texts: dict[Question, str] = {}
        self.tally = Tally()
        self.wrong: list[str] = []
        self.memory: set[str] = set()
        """Files in /dev/shm that processes of this run were seen to map."""

    def learn(self) -> None:
        """Get every text in a quiet pass; the known ones must agree."""
        for question in self.questions:
            reply = self.door.ask(question, "json")
            if reply.status != 200:
                msg = f"the quiet pass failed: {reply}"
                raise SoakError(msg)
            text = self.texts[question] = json.loads(reply.data)["generated_text"]
            if question.known not in (None, text):
                self.wrong.append(f"quiet pass: {text!r}, known is {question.known!r}")

    def repeat(self) -> None:
        """Ask everything again in the end, in every form in turn: all must be right."""
        for question, form in zip(self.questions, itertools.cycle(FORMS), strict=False):
            reply = self.door.ask(question, form)
            outcome = judge(reply, form, self.texts[question])
            if outcome != "right":
                self.wrong.append(f"in the end: {form}: {outcome}")


class Kills(Soak):
    """Ordinary clients, while the engine process is killed."""

    def __init__(self, *given: Any) -> None:  # noqa: ANN401
        super().__init__(*given)
        self.kills: Counter[str] = Counter()
        self.over = threading.Event()

    def report(self) -> dict[str, Any]:
        """The part of the printed report."""
        recoveries = self.tally.recoveries
        return {
            "kills": dict(self.kills),
            "recovery_s": {
                "median": round(statistics.median(recoveries), 2) if recoveries else None,
                "max": round(max(recoveries), 2) if recoveries else None,
            },
        }

    def client(self, seed: int) -> None:
        """Ask until the run is over; one request in eight is left in the middle."""
        pick = random.Random(seed)
        while not self.over.is_set():
            question, form = pick.choice(self.questions), pick.choice(FORMS)
            leave_s = pick.uniform(0, 3) if pick.random() < 1 / 8 else None
            sent_s = self.tally.ask()
            try:
                reply = self.door.ask(question, form, leave_s)
                outcome = judge(reply, form, self.texts[question], leaves=leave_s is not None)
            except Exception as error:  # noqa: BLE001  (a client that ends unnoticed would prove nothing)
                outcome = f"wrong: the client failed: {error!r}"
            if self.door.port is not None and outcome.startswith("error"):
                outcome = f"wrong: a kill ended a request: {outcome}"
            self.tally.count(outcome, sent_s)
            if outcome.startswith("error 503"):
                self.over.wait(pick.uniform(0.05, 0.5))

    def kill(self, number: signal.Signals, *, loading: bool) -> None:
        """Kill the engine at a random moment and wait for the recovery."""
        old = engines(self.door.front)
        self.over.wait(self.pick.uniform(0, 3))
        self._kill_once(number)
        if loading and wait_until(lambda: set(engines(self.door.front)) - set(old), RECOVERY_S):
            self.over.wait(self.pick.uniform(0, 3))
            self._kill_once(signal.SIGKILL)
        if not self.tally.wait_recovered(RECOVERY_S):
            msg = f"no right answer within {RECOVERY_S:g} s of {number.name}"
            raise SoakError(msg)

    def _kill_once(self, number: signal.Signals) -> None:
        if not wait_until(lambda: engines(self.door.front), RECOVERY_S):
            msg = f"no engine process within {RECOVERY_S:g} s"
            raise SoakError(msg)
        (engine,) = engines(self.door.front)
        self.memory |= shared_memory([self.door.front, *descendants(self.door.front)])
        self.tally.killed()
        os.kill(engine, number)
        self.kills[number.name] += 1
        if not wait_until(lambda: not alive(engine), RECOVERY_S):
            msg = f"the engine has not ended {RECOVERY_S:g} s after {number.name}"
            raise SoakError(msg)

    def run(self, num_kills: int) -> None:
        """All clients at once, and the kills one after the other."""
        with ThreadPoolExecutor(self.num_streams) as threads:
            for _ in range(self.num_streams):
                threads.submit(self.client, self.pick.randrange(2**32))
            try:
                while (done := self.kills.total()) < num_kills:
                    # A kill while it loads comes after another one.
                    loading = done % 5 == 3 and done + 2 <= num_kills
                    self.kill(self.pick.choice(SIGNALS), loading=loading)
                    outcomes = dict(self.tally.outcomes)
                    print(f"{self.kills.total()} kills, {outcomes}", file=sys.stderr)
                self.over.wait(0 if num_kills else 5)
            finally:
                self.over.set()
        self.wrong += self.tally.wrong


class Mix(Soak):
    """Clients of all kinds, and no kills."""

    def __init__(self, *given: Any) -> None:  # noqa: ANN401
        super().__init__(*given)
        self.clients: dict[str, Counter[str]] = defaultdict(Counter)
        """Outcomes of each kind of client."""

    def report(self) -> dict[str, Any]:
        """The part of the printed report."""
        return {"clients": {name: dict(found) for name, found in sorted(self.clients.items())}}

    def warm_up(self, num_requests: int) -> None:
        """As many long bodies at once as start every thread for them, then so many requests.

        The other way round the memory of the burst would hide what is compared with it.
        """
        with ThreadPoolExecutor(FLOOD) as threads:
            [*threads.map(lambda body: self.door.post(body, {}), [BODIES["many keys"]] * FLOOD)]
        self.run(num_requests)

    def run(self, num_requests: int) -> None:
        """At least as many requests, by `num_streams` clients at once; every kind has a turn at the start."""
        found = {name: one for name, one in CLIENTS.items() if self.door.port or not one.http}
        end = self.tally.outcomes.total() + num_requests

        def ask(pick: random.Random, names: list[str]) -> None:
            while self.tally.outcomes.total() < end:
                chosen = pick.choices([*found], [one.share for one in found.values()])
                self.serve(names.pop() if names else chosen[0], pick)

        picks = [random.Random(self.pick.randrange(2**32)) for _ in range(self.num_streams)]
        turns = [[*found][i :: self.num_streams] for i in range(self.num_streams)]
        with ThreadPoolExecutor(self.num_streams) as threads:
            [*threads.map(ask, picks, turns)]
        self.wrong, self.tally.wrong = self.wrong + self.tally.wrong, []

    def serve(self, name: str, pick: random.Random) -> None:
        """Be a client of a kind, and count its outcomes."""
        client = CLIENTS[name]
        question = pick.choice(self.questions)
        case = Case(self.door, question, pick.choice(FORMS), self.texts[question], pick)
        sent_s = time.monotonic()
        try:
            outcomes = client.run(case)
        except Exception as error:  # noqa: BLE001  (a client that ends unnoticed would prove nothing)
            outcomes = [f"wrong: the client failed: {error!r}"]
        for outcome in outcomes:
            allowed = client.outcomes
            if self.door.port is None:  # Java leaves out an error's type
                outcome, allowed = _untyped(outcome), {*map(_untyped, allowed)}
            kind, _, detail = outcome.partition(": ")
            if outcome not in allowed:
                kind, outcome = "wrong", f"wrong: {name}: {detail or outcome}"
            self.clients[name][kind] += 1
            self.tally.count(outcome, sent_s)
        if any(outcome.startswith("error 503") for outcome in outcomes):
            time.sleep(pick.uniform(0.05, 0.5))


def _untyped(outcome: str) -> str:
    return re.sub(r"^(error \d+) .*", r"\1", outcome)


@dataclass(frozen=True)
class Case:
    """A request to make."""

    door: Embedded | Door
    question: Question
    form: str
    text: str
    """The right answer."""
    pick: random.Random

    def judge(self, reply: Reply, *, leaves: bool = False) -> str:
        """The outcome of an answer to the question. An error in the body of a batch is an error like others."""
        outcome = judge(reply, self.form, self.text, leaves=leaves, statuses=range(400, 600))
        return outcome.replace("error in body", "error")

    @property
    def body(self) -> bytes:
        """The request's body."""
        return self.question.body(self.form)

    def head(self, *lines: str, length: int | None = None) -> bytes:
        """The request's head. `lines`: headers beside those of an ordinary client."""
        accept = [f"accept: {SSE}"] if self.form == "sse" else []
        sizes = [] if length is None else [f"content-length: {length}"]
        lines = ("host: soak", *accept, *sizes, *lines)
        return "\r\n".join(["POST /invocations HTTP/1.1", *lines, "", ""]).encode("latin-1")

    @property
    def whole(self) -> bytes:
        """The request of a client that makes no other on its connection."""
        return self.head(CLOSE, length=len(self.body)) + self.body


@dataclass(frozen=True)
class Client:
    """A kind of client."""

    run: Callable[[Case], list[str]]
    share: float
    """Of all clients that are made."""
    outcomes: frozenset[str]
    """Outcomes that its requests may have."""
    http: bool
    """True if it needs its own connection."""


CLIENTS: dict[str, Client] = {}
Part = bytes | float | Callable[[socket.socket], bool]
"""Bytes to send, a pause in seconds, or what to wait for."""
_Run = Callable[[Case], list[str]]
_Script = Callable[[Case], Iterable[Part]]


def client(
    share: float, *outcomes: str | Iterable[str], http: bool = False
) -> Callable[[_Run], _Run]:
    """Add a function to `CLIENTS`."""
    allowed = [[each] if isinstance(each, str) else each for each in outcomes]

    def add(run: _Run) -> _Run:
        CLIENTS[run.__name__] = Client(run, share, frozenset().union(*allowed), http)
        return run

    return add


def wire(share: float, *outcomes: str | Iterable[str], **how: Any) -> Callable[[_Script], _Run]:  # noqa: ANN401
    """Add a client of one request on its own connection. The function gives the parts to send. `how`: see `talk`."""

    def add(script: _Script) -> _Run:
        def run(case: Case) -> list[str]:
            return _only(case, talk(case, *script(case), **how))

        run.__name__ = script.__name__
        return client(share, *outcomes, http=True)(run)

    return add


@client(50, RIGHT)
def ordinary(case: Case) -> list[str]:
    return [case.judge(case.door.ask(case.question, case.form))]


@client(5, RIGHT, "left")
def leaves_before_the_answer(case: Case) -> list[str]:
    case = replace(case, form="json")
    reply = case.door.ask(case.question, case.form, leave_s=case.pick.uniform(0, 0.05))
    return [case.judge(reply, leaves=True)]


@client(8, RIGHT, "left")
def leaves_a_stream(case: Case) -> list[str]:
    case = replace(case, form=case.pick.choice(FORMS[1:]))
    reply = case.door.ask(case.question, case.form, leave_s=case.pick.uniform(0, 0.5))
    return [case.judge(reply, leaves=True)]


@client(0.15, RIGHT)
def flood(case: Case) -> list[str]:
    with ThreadPoolExecutor(FLOOD) as threads:
        asks = [threads.submit(case.door.ask, case.question, case.form) for _ in range(FLOOD)]
    return [case.judge(ask.result()) for ask in asks]


def _fields(prompt: str = "1 2 3", **parameters: Any) -> bytes:  # noqa: ANN401
    return json.dumps({"inputs": prompt, "parameters": parameters}).encode()


BODIES: Mapping[str, bytes] = {
    "empty": b"",
    "not UTF-8": _fields().replace(b"2", b"\xff"),
    "half a surrogate": _fields().replace(b"2", rb"\ud800"),
    "a control character": _fields().replace(b"2", b"\x00"),
    "deep": b"[" * 100_000,
    "deep inside": _fields(stop=0).replace(b"0", b"[" * 5000 + b"]" * 5000),
    "many keys": _fields(**{f"key{i}": i for i in range(20_000)}),
    "a number": _fields(max_new_tokens=10**400),
    "not a number": _fields(temperature=float("nan")),
    "a list": b"[1, 2]",
    "two values": _fields() * 2,
    "no text": b'{"inputs": {"a": 1}}',
    "no prompt": _fields(""),
    "unknown parameter": _fields(no_such_parameter=1),
    "a value": _fields(top_p=7),
    "stop strings": _fields(stop=["a"] * 10_000),
}


@client(10, BAD)
def bad_body(case: Case) -> list[str]:
    body = BODIES[case.pick.choice([*BODIES])]
    return [case.judge(case.door.post(body, {"content-type": "application/json"}))]


@client(3, BAD)
def cut_json(case: Case) -> list[str]:
    body = case.body[: case.pick.randrange(len(case.body))]
    return [case.judge(case.door.post(body, {}))]


@client(2, "error 413 prompt_too_long", FULL)
def long_prompt(case: Case) -> list[str]:
    return [case.judge(case.door.post(_fields("one two " * 500), {}))]


@client(5, RIGHT, BAD, "answered", "error 413 prompt_too_long")
def mutated_body(case: Case) -> list[str]:
    """Send a changed body. Its meaning is not known here, so the text of an answer is not judged."""
    body = bytearray(case.body)
    for _ in range(case.pick.randint(1, 4)):
        place = case.pick.randrange(len(body))
        match case.pick.randrange(3):
            case 0:
                body[place] = case.pick.randrange(256)
            case 1:
                del body[place]
            case 2:
                body[place:place] = case.pick.choice([b"0", b'"', b"}", b"[", b"\\", b"null"])
    reply = case.door.post(bytes(body), {})
    if reply.status != 200 or b'"code"' in reply.data:
        return [replace(case, form="json").judge(reply)]
    last = json.loads(reply.data.splitlines()[-1])
    return ["answered" if isinstance(last["generated_text"], str) else f"wrong: {last}"]


HEADERS: Sequence[Mapping[str, str]] = (
    {"x-request-id": "x" * 4000},
    {"x-request-id": "\" } \\ %s {0} ' \xe9 \t"},
    {"content-type": "application/x-www-form-urlencoded; charset=utf-16"},
    {"content-type": ";;;=,"},
    {"accept": "text/event-stream;q=0, */*, " + "a/b, " * 500},
    {f"x-header-{i}": str(i) for i in range(60)},
    {"content-encoding": "gzip"},
    {"x-amzn-sagemaker-custom-attributes": "handler=partition;model_id=/"},
    {"requestid": "same", "x-amzn-sagemaker-inference-id": "same"},
    {"batch_size": "3", "batch_000.data": "x", "reset_rollingbatch": "true", "seed": "x"},
    {"model_id": "/", "option.model_id": "/", "output_formatter": "json", "model_dir": "/"},
)


@client(4, RIGHT)
def odd_headers(case: Case) -> list[str]:
    case = replace(case, form="json")
    return [case.judge(case.door.post(case.body, case.pick.choice(HEADERS)))]


class _Received(io.BytesIO):
    """Bytes as the socket of an `HTTPResponse`, which stay open for the next one."""

    def makefile(self, _mode: str) -> _Received:
        return self

    def close(self) -> None:
        """Do nothing."""


def replies(data: bytes) -> list[Reply]:
    """The responses in what a connection has brought. One that is cut, or none, has `timed_out`: its client left."""
    received, found = _Received(data), []
    while not found or received.tell() < len(data):
        response = HTTPResponse(received, method="POST")
        try:
            response.begin()
            body, cut = response.read(), False
        except IncompleteRead as error:
            body, cut = error.partial, True
        except HTTPException:  # the head is cut, or no response
            return [*found, Reply(0, b"", timed_out=True)]
        found.append(Reply(response.status, body, timed_out=cut, headers=dict(response.headers)))
    return found


def talk(
    case: Case,
    *script: Part,
    close_half: bool = False,
    reset: float = 0,
    max_bytes: Callable[[random.Random], float] = lambda _: math.inf,
    rate: tuple[int, float] = (65536, 0.0),
) -> list[Reply]:
    """Send bytes, with pauses in seconds or until something holds for the connection; read until the server closes.

    `close_half`: say that nothing more will be sent. `max_bytes`: leave when as many have come; `reset`: the
    probability that it is by a reset. `rate`: bytes to read at once, and the pause after them; then the receive buffer
    is as small.
    """
    data, most = b"", max_bytes(case.pick)
    with socket.socket() as connection:
        connection.settimeout(PATIENCE_S)
        if rate[1]:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rate[0])
        connection.connect(("127.0.0.1", case.door.port))
        with suppress(BrokenPipeError, ConnectionResetError):  # an answer may be there even so
            _send(connection, script)
            if close_half:
                connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            while len(data) < most and (chunk := connection.recv(rate[0])):
                data += chunk
                time.sleep(rate[1])
        if case.pick.random() < reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return replies(data)


def _send(connection: socket.socket, script: Iterable[Part]) -> None:
    for part in script:
        if isinstance(part, bytes):
            connection.sendall(part)
        elif callable(part):
            wait_until(partial(part, connection), PATIENCE_S)
        else:
            time.sleep(part)


def _is_closed_by_server(connection: socket.socket) -> bool:
    """As the kernel has it: a client that does not read sees it too late. Source: proc_net_tcp.rst."""
    ends = [
        f"0100007F:{port:04X}" for _, port in (connection.getpeername(), connection.getsockname())
    ]
    established = [*ends, "01"]
    lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()
    return not any(line.split()[1:4] == established for line in lines)


def _only(case: Case, found: list[Reply]) -> list[str]:
    if len(found) > 1:
        return [f"wrong: {len(found)} answers to one request: {found}"]
    outcome = case.judge(found[0], leaves=True)
    return ["closed" if outcome == "left" else outcome]


@wire(3, RIGHT, "closed", close_half=True)
def closes_its_half(case: Case) -> list[Part]:
    return [case.whole]


@wire(3, "closed", BAD, close_half=True)
def cut_body(case: Case) -> list[Part]:
    """Also one whose JSON is whole, but shorter than its length."""
    most = len(case.body)
    sent = case.body[: case.pick.choice([0, case.pick.randrange(most), most])]
    return [case.head(CLOSE, length=most + case.pick.randint(1, 10**6)), sent]


@wire(3, "closed", BAD, close_half=True)
def cut_chunks(case: Case) -> list[Part]:
    """Without the last chunk."""
    chunk = b"%x\r\n%b\r\n" % (len(case.body), case.body)
    sent = chunk[: case.pick.choice([case.pick.randrange(len(chunk)), len(chunk)])]
    return [case.head(CLOSE, CHUNKED), sent]


@wire(2, "closed", max_bytes=lambda _: 0, reset=0.5)
def leaves_while_it_sends(case: Case) -> list[Part]:
    return [case.whole[: case.pick.randrange(len(case.whole))]]


@wire(3, RIGHT, "closed", max_bytes=lambda pick: pick.choice([0, 1, 500, 2000]), reset=1)
def resets(case: Case) -> list[Part]:
    return [case.whole, 0.02]


@wire(2, RIGHT)
def sends_slowly(case: Case) -> Iterator[Part]:
    step = len(case.whole) // 10 + 1
    for i in range(0, len(case.whole), step):
        yield case.whole[i : i + step]
        yield 0.05


@wire(2, RIGHT)
def sends_chunks(case: Case) -> list[Part]:
    parts = [case.body[i : i + 7] for i in range(0, len(case.body), 7)]
    chunks = [b"%x;a=b\r\n%b\r\n" % (len(part), part) for part in parts]
    return [case.head(CLOSE, CHUNKED), *chunks, b"0\r\n\r\n"]


@wire(2, RIGHT, rate=(512, 0.02))
def reads_slowly(case: Case) -> list[Part]:
    return [case.whole]


@wire(1, "error 408 request_timeout")
def stops_in_its_request(case: Case) -> list[Part]:
    return [case.whole[: case.pick.randrange(1, len(case.whole))]]


@wire(1, RIGHT)
def stays_when_it_has_its_answer(case: Case) -> list[Part]:
    return [case.head(length=len(case.body)), case.body]


@client(0.5, "closed", http=True)
def never_reads(case: Case) -> list[str]:
    """Answers of many requests, which fill all buffers."""
    num_requests = 2000
    request = b"GET /metrics HTTP/1.1\r\nhost: soak\r\n\r\n"
    found = talk(case, request * num_requests, _is_closed_by_server, rate=(4096, 1e-6))
    whole = [reply for reply in found if not reply.timed_out]
    return ["closed" if len(whole) < num_requests else "wrong: everything was kept for it"]


@client(3, RIGHT, "error 400 bad_request", http=True)
def sends_several_at_once(case: Case) -> list[str]:
    """Two good requests around a bad one, on one connection, without waiting for the answers."""
    bad = b"[" * case.pick.randint(1, 2000)
    first = case.head(length=len(case.body)) + case.body
    outcomes = [
        case.judge(reply)
        for reply in talk(case, first + case.head(length=len(bad)) + bad + case.whole)
    ]
    expected = [RIGHT, {"error 400 bad_request", FULL}, RIGHT]
    if [*map(contains, expected, outcomes)] != [True] * 3:
        return [f"wrong: {outcome} among {outcomes}" for outcome in outcomes]
    return outcomes


_LINE = b"POST /invocations HTTP/1.1"
HEADS: Mapping[str, Sequence[bytes]] = {
    "TLS": [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"],
    "noise": [bytes(range(128, 256)) * 4],
    "no version": [b"GET /ping"],
    "version 9": [b"POST /invocations HTTP/9.9", b"host: a"],
    "negative length": [_LINE, b"host: a", b"content-length: -1"],
    "length in words": [_LINE, b"host: a", b"content-length: ten"],
    "two lengths": [_LINE, b"host: a", b"content-length: 1", b"content-length: 2"],
    "length and chunks": [_LINE, b"host: a", b"content-length: 5", b"transfer-encoding: chunked"],
    "no colon": [_LINE, b"host: a", b"no colon"],
    "name with a space": [_LINE, b"host: a", b"x y: 1"],
    "NUL": [_LINE, b"host: a", b"x: \x00"],
    "no host": [_LINE],
    "unknown coding": [_LINE, b"host: a", b"transfer-encoding: gzip"],
    "long": [_LINE, b"host: a", b"x: " + b"x" * 200_000],
    "many": [_LINE, b"host: a", *[b"x: y"] * 20_000],
    "long path": [b"POST /" + b"x" * 200_000 + b" HTTP/1.1", b"host: a"],
}


@client(4, *[f"error {status} http_error" for status in (400, 431, 501, 505)], http=True)
def bad_head(case: Case) -> list[str]:
    name = case.pick.choice([*HEADS])
    whole = b"\r\n".join([*HEADS[name], CLOSE.encode(), b"", b""])
    return [
        f"wrong: {name}: {each}" if "wrong" in each else each
        for each in _only(case, talk(case, whole))
    ]


@client(2, "error 404 http_error", "error 404 model_not_found", "error 405 http_error", http=True)
def wrong_route(case: Case) -> list[str]:
    line = case.pick.choice(
        ["GET /invocations", "DELETE /invocations", "POST /ping", "POST /nope", "POST /predictions/x",
         "GET /../../etc/passwd", "GET /%00", "POST /invocations/"]
    )  # fmt: skip
    head = case.head(CLOSE, length=0).replace(b"POST /invocations", line.encode())
    (outcome,) = _only(case, talk(case, head))
    return [outcome.replace("wrong:", f"wrong: {line}:")]


@wire(1, "error 413 body_too_large", FULL)
def large_body(case: Case) -> list[Part]:
    """Its length is refused, or what comes in chunks."""
    size, part = 4 * 2**20, 2**16
    if case.pick.random() < 0.5:
        return [case.head(CLOSE, length=size), b" " * size]
    chunk = b"%x\r\n%b\r\n" % (part, b" " * part)
    return [case.head(CLOSE, CHUNKED), *[chunk] * (size // part), b"0\r\n\r\n"]


@client(0.3, RIGHT, http=True)
def idle_connections(case: Case) -> list[str]:
    """Connections that send nothing, or half a head, while another one asks."""
    half = case.head()[:30]
    idle = [socket.create_connection(("127.0.0.1", case.door.port)) for _ in range(FLOOD)]
    try:
        for wire in idle[::2]:
            wire.sendall(half)
        return ordinary(case)
    finally:
        for wire in idle:
            wire.close()


@client(2, "healthy", http=True)
def looks(case: Case) -> list[str]:
    path = case.pick.choice(["/ping", "/metrics", "/info"])
    (reply,) = talk(case, f"GET {path} HTTP/1.1\r\nhost: soak\r\n{CLOSE}\r\n\r\n".encode())
    return ["healthy" if reply.status == 200 else f"wrong: {path}: {reply}"]


def settled(
    before: Mapping[int, Holdings], memory: float = math.inf
) -> tuple[dict[int, Holdings], list[str]]:
    """Holdings of processes when they have come down to those before, or at the end of the patience; what has grown."""

    def grown() -> list[str]:
        found = []
        for i, (pid, held) in enumerate(before.items()):
            if not i:
                # Made on demand and kept: idle workers of the tokenizer, and the threads of asyncio's own pool.
                held = replace(
                    held,
                    descriptors=held.descriptors + IDLE_WORKERS,
                    children=held.children + IDLE_WORKERS,
                    threads=held.threads + min(32, (os.cpu_count() or 1) + 4),
                )
            whose = "of the engine" if i else "of the front"
            names = Holdings.of(pid).grown(held, memory) if alive(pid) else ["end"]
            found += [f"{name} {whose}" for name in names]
        return found

    wait_until(lambda: not grown(), SETTLE_S)
    return {pid: Holdings.of(pid) for pid in before if alive(pid)}, grown()


def soak(
    door_name: str,
    *,
    kills: int = 0,
    requests: int = 0,
    warm_up: int = WARM_UP,
    streams: int,
    seed: int,
    predict_timeout: int | None = None,
    num_questions: int = 60,
) -> dict[str, Any]:
    """Run it. Returns the object that is printed; `wrong` is empty if nothing was.

    Memory is judged after `requests` requests, if at least `WARM_UP` have warmed up the processes.

    Raises:
        SoakError: the service did not start or did not recover.
    """
    mark = uuid.uuid4().hex
    # The embedded server's requests wait for a slot and for an engine as long as by default.
    limit = "step_timeout" if kills and door_name == "embedded" else "predict_timeout"
    options = {
        "model_loader": "cpu",
        limit: predict_timeout or PREDICT_TIMEOUT_S[door_name == "embedded"],
        **(LIMITS if requests else {}),
        **({"engine_restarts": 2 * kills + 10} if kills else {}),
    }
    if door_name != "plain":
        options["max_rolling_batch_size"] = 16 if requests else 64
    # SIGSEGV and SIGABRT write no core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with tempfile.TemporaryDirectory() as work_name:
        work, temporary = Path(work_name), Path(work_name) / "tmp"
        temporary.mkdir()
        search_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environ = {**os.environ, MARK: mark, "TMPDIR": str(temporary), "PYTHONPATH": search_path}
        environ["TORCHINDUCTOR_CACHE_DIR"] = str(work / "torch")  # made by an import, and kept
        door = DOORS[door_name](options, work, environ)
        try:
            soak = (Mix if requests else Kills)(door, random.Random(seed), streams, num_questions)
            soak.learn()
            if requests:
                soak.warm_up(warm_up)
                time.sleep(IDLE_S)
            pids = [door.front, *(engines(door.front) if requests else [])]
            before = {pid: Holdings.of(pid) for pid in pids}
            began_s = time.monotonic()
            soak.run(requests or kills)
            run_s = time.monotonic() - began_s
            soak.repeat()
            if not door.alive:
                soak.wrong.append(f"the front has ended: {door.said}")
            limit = MEMORY if requests and warm_up >= WARM_UP else math.inf
            after, grown = settled(before, limit)
            log = door.log_text
            began_s = time.monotonic()
            exit_status = door.end()
            end_s = time.monotonic() - began_s
            wait_until(lambda: not marked(mark), SETTLE_S)
            processes = [read(pid, "cmdline").decode() for pid in marked(mark)]
            # Java starts a worker of asynchronous mode again that it has stopped itself: docs/djl.md.
            own = "djl_python_engine.py" if door_name == "async" else mark
            processes = [each for each in processes if own not in each]
        finally:
            door.kill()
        leftovers = {
            "grown": grown,
            "processes": processes,
            "port": door.port is not None and port_taken(door.port),
            "files": sorted(str(path) for path in temporary.iterdir()),
            "shared_memory": sorted(name for name in soak.memory if Path(name).exists()),
        }
        wrong = soak.wrong + [f"left: {name} {found}" for name, found in leftovers.items() if found]
        if door_name == "embedded":  # whose every error before the first bytes has its status
            wrong += [name for name in soak.tally.outcomes if name.startswith("error in body")]
        if exit_status != 0:
            wrong.append(f"exit status {exit_status} at the end: {door.said}")
        if wrong and not kills:
            wrong.append(f"the log has {re.findall(LOST, log)}")
        _, found, trace = log.partition("Traceback (most")
        if found and not kills:
            wrong.append(f"a traceback in the log: {trace[:2000]}")
        return {
            "door": door_name,
            "seed": seed,
            "streams": streams,
            "run_s": round(run_s, 1),
            "requests": soak.tally.outcomes.total(),
            **soak.report(),
            "outcomes": dict(sorted(soak.tally.outcomes.items())),
            "before": [*map(vars, before.values())],
            "after": [*map(vars, after.values())],
            "exit_status": exit_status,
            "end_s": round(end_s, 2),
            "leftovers": {name: found for name, found in leftovers.items() if found},
            "num_wrong": len(wrong),
            "wrong": wrong[:SHOWN],
        }


def port_taken(port: int) -> bool:
    """True if something listens on the port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def main() -> int:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--door", choices=list(DOORS), default="embedded")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--kills", type=int, default=50)
    what.add_argument("--requests", type=int, default=0, help="with hostile clients, and no kills")
    parser.add_argument("--streams", type=int, help="clients at a time; default: 200, or 32")
    parser.add_argument(
        "--seed", type=int, help="of questions, signals and delays; default: random"
    )
    parser.add_argument(
        "--predict-timeout",
        type=int,
        help="limit of a step, or of Java's calls, s; default: 10, DJL 30",
    )
    parser.add_argument("--json", action="store_true", help="no effect: it is one object anyway")
    options = parser.parse_args()
    seed = random.randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", file=sys.stderr)
    report = soak(
        options.door,
        kills=0 if options.requests else options.kills,
        requests=options.requests,
        streams=options.streams or (32 if options.requests else 200),
        seed=seed,
        predict_timeout=options.predict_timeout,
    )
    print(json.dumps(report))
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
