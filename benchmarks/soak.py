"""Does the service hold? Kills of the engine process, or clients that are broken or mean harm.

    python benchmarks/soak.py --kills 50                    # the embedded server, about 10 minutes
    python benchmarks/soak.py --requests 10000              # about 5 minutes
    python benchmarks/soak.py --requests 3000 --door async  # DJL's released engine: async, rolling or plain

`--kills`: 200 ordinary streams at a time, while the engine process (front -> guard -> engine, found in /proc) gets
SIGKILL, SIGSEGV, SIGABRT, or SIGSTOP, which the watchdog must notice (`--predict-timeout`). One kill in five hits the
engine while it loads. `--seed` fixes the signals and their delays.

`--requests`: 32 clients at a time, half of them ordinary. `soak_clients.py` has the others, with what each may get:
they leave, cut bodies, send what is no request, are slow, or flood the queue. `--seed` fixes who comes when.

Every request ends with one of these; anything else is wrong, and so is one that does not end (`DEADLINE_S`):

* `right`: the text of the quiet pass at the start, with the same prompt, parameters and seed. The quiet pass itself is
  compared with the example model's known answers.
* `error 503 backend_unavailable` and the like: an error status with a JSON body. With `--kills`: 408, 500 or 503.
* `error event …`: the last event of a stream has the error; the text before it is a prefix of the right one.
* `left`: the client closed the connection in the middle; the text so far is a prefix of the right one.
* `closed`: the server closed the connection of a client that had not sent its request to the end.

After each kill a request that is sent later must be answered right, within `RECOVERY_S`; the time from the kill to
that answer is the recovery. At the end the quiet pass is repeated, SIGTERM must end the server with status 0, and
nothing may be left: compared are descriptors, threads and child processes of the front (idle, before and after the
kills), then processes, the port, temporary files and shared memory. With `--requests` those of the engine are compared
too, since the end of a warm-up of 2,000 requests, and the memory of both, which may grow by 5 %.

One JSON object; exit status 1 if anything was wrong. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import queue
import random
import re
import resource
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from soak_clients import BODIES, CLIENTS, FLOOD, LIMITS, SSE, Case

from djl_python_neuronx.loading.tokenizer_process import IDLE_WORKERS
from tests.clients.answers import FORMS, MODEL, ROOT, Question, Reply, judge, questions
from tests.clients.embedded import SETTLE_S, Embedded
from tests.processes import alive, descendants, engines, read

DJL_DEADLINE_S = 300.0
"""`DEADLINE_S` through Java, which keeps back what the model has no place for."""
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
MAX_WAITING = 32
IDLE_S = 2.0
"""After the warm-up, until requests whose clients left have ended."""
SHOWN = 20
LOST = r"(?m)^.*(?:engine_process|engine_ended|watchdog|CRITICAL|ERROR).*$"
"""Lines of the log that say why an engine has ended."""


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
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def count(self, outcome: str, sent_s: float) -> None:
        """Count a request that was sent at a time."""
        now = time.monotonic()
        with self._changed:
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
            self._open.append(time.monotonic())

    def wait_recovered(self, timeout_s: float) -> bool:
        """Wait until a request sent after the last kill was answered right."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, timeout_s)


class Djl:
    """DJL's released engine in one of its modes, through the driver of its tests."""

    port = None

    def __init__(self, mode: str, java: Any) -> None:  # noqa: ANN401  (of its tests, which have no types)
        """`java`: a JVM that has loaded the model as "tiny"."""
        self._java = java
        (self.front,) = java.workers()
        self._batches: queue.SimpleQueue[tuple[tuple[Any, ...], bytes, Future[Any]]] | None = None
        if mode == "plain":
            # As DJL Serving does: one call at a time, with what has come meanwhile.
            self._batches = queue.SimpleQueue()
            threading.Thread(target=self._send_batches, daemon=True).start()

    @classmethod
    def start(
        cls, mode: str, options: Mapping[str, Any], work: Path, environ: Mapping[str, str]
    ) -> Djl:
        """Start a JVM and load the model."""
        sys.path.insert(0, str(ROOT))
        from tests.djl import java

        classes, folder = work / "classes", work / "model"
        for each in (classes, folder):
            each.mkdir()
        lines = ["engine=Python", "minWorkers=1", "maxWorkers=1"]
        settings = {
            "model_id": MODEL, "entryPoint": "djl_python_neuronx.handler", **MODES[mode], **options
        }  # fmt: skip
        lines += [f"option.{name}={value}" for name, value in settings.items()]
        (folder / "serving.properties").write_text("\n".join(lines) + "\n")
        jvm = java.Java(java.compile_driver(classes), work / "cache", environ)
        try:
            jvm.load("tiny", folder)
            return cls(mode, jvm)
        except BaseException:
            jvm.close()
            raise

    @property
    def log_text(self) -> str:
        """All of the log."""
        return "\n".join(self._java.log)

    @property
    def said(self) -> str:
        """The end of the log."""
        return self._java.tail()

    @property
    def alive(self) -> bool:
        """True while Java has the process that it started first."""
        return self._java.workers() == [self.front]

    def ask(self, question: Question, form: str, leave_s: float | None = None) -> Reply:
        """Send a request and read until its end, or leave: a stream after some chunks, else without reading."""
        headers = {"Accept": SSE if form == "sse" else "application/json"}
        num_chunks = 0 if leave_s is None else -1 if form == "json" else 1 + int(10 * leave_s)
        return self._post(question.body(form), headers, num_chunks)

    def post(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        """The same with any body."""
        return self._post(body, headers)

    def _post(self, body: bytes, headers: Mapping[str, str], num_chunks: int = 0) -> Reply:
        answer = self._send((*sorted(headers.items()), num_chunks), body)
        over = not answer.done.wait(DJL_DEADLINE_S)
        if any(JAVA_TIMEOUT in message for message in answer.errors) and not answer.chunks:
            return Reply(503, json.dumps({"code": 503, "error": JAVA_TIMEOUT}).encode())
        return Reply(
            answer.status or 0,
            answer.content,
            timed_out=over or num_chunks < 0 or len(answer.chunks) == num_chunks > 0,
            broken=" | ".join(answer.errors) or None,
            headers=answer.headers,
        )

    def _send(self, how: tuple[Any, ...], body: bytes) -> Any:  # noqa: ANN401  (the driver's answer)
        if self._batches is not None:
            self._batches.put((how, body, sent := Future()))
            return sent.result()
        return self._submit(how, body)[0]

    def _submit(self, how: tuple[Any, ...], *bodies: bytes) -> list[Any]:
        """`how`: headers, and the number of chunks after which the client leaves."""
        *headers, num_chunks = how
        return self._java.submit(
            "tiny", *bodies, headers=dict(headers), leave_after=num_chunks, together=len(bodies) > 1
        )

    def _send_batches(self) -> None:
        last = None
        while True:
            batch = [self._batches.get()]
            while len(batch) < BATCH_SIZE and not self._batches.empty():
                batch.append(self._batches.get())
            if last is not None:
                last.started.wait()  # Java's thread is busy until the answers begin
            for _, alike in itertools.groupby(sorted(batch, key=_how), _how):
                how, bodies, sent = zip(*alike, strict=True)
                for future, answer in zip(sent, self._submit(how[0], *bodies), strict=True):
                    future.set_result(last := answer)

    def end(self) -> int:
        """Close the model. Returns the exit status of the JVM."""
        return self._java.end()

    def kill(self) -> None:
        """End it whatever its state."""
        self._java.close()


def _how(sent: tuple[tuple[Any, ...], bytes, Future[Any]]) -> str:
    return repr(sent[0])


BATCH_SIZE = 16
JAVA_TIMEOUT = "Time out in: "
"""Rolling mode: Java gives up a request that has waited for a free row as long as `predict_timeout`."""
MODES = {
    "async": {"async_mode": "true", "rolling_batch": "disable"},
    "rolling": {"rolling_batch": "tnx"},
    "plain": {"rolling_batch": "disable", "batch_size": BATCH_SIZE},
}
DOORS: dict[str, Callable[..., Any]] = {
    "embedded": Embedded.start, **{mode: partial(Djl.start, mode) for mode in MODES}
}  # fmt: skip


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
        self, door: Embedded | Djl, pick: random.Random, num_streams: int, num_questions: int
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
            sent_s = time.monotonic()
            try:
                reply = self.door.ask(question, form, leave_s)
                outcome = judge(reply, form, self.texts[question], leaves=leave_s is not None)
            except Exception as error:  # noqa: BLE001  (a client that ends unnoticed would prove nothing)
                outcome = f"wrong: the client failed: {error!r}"
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
        seeds = [self.pick.randrange(2**32) for _ in range(self.num_streams)]
        clients = [threading.Thread(target=self.client, args=(seed,)) for seed in seeds]
        for thread in clients:
            thread.start()
        try:
            while (done := self.kills.total()) < num_kills:
                # A kill while it loads comes after another one.
                loading = done % 5 == 3 and done + 2 <= num_kills
                self.kill(self.pick.choice(SIGNALS), loading=loading)
                print(f"{self.kills.total()} kills, {dict(self.tally.outcomes)}", file=sys.stderr)
            self.over.wait(0 if num_kills else 5)
        finally:
            self.over.set()
            for thread in clients:
                thread.join()
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

        def ask(seed: int, names: list[str]) -> None:
            pick = random.Random(seed)
            while self.tally.outcomes.total() < end:
                chosen = pick.choices([*found], [one.share for one in found.values()])
                self.serve(names.pop() if names else chosen[0], pick)

        threads = [
            threading.Thread(
                target=ask, args=(self.pick.randrange(2**32), [*found][i :: self.num_streams])
            )
            for i in range(self.num_streams)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
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


@contextlib.contextmanager
def no_core_files() -> Iterator[None]:
    """SIGSEGV and SIGABRT write none."""
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, limits)


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
    options = {
        "model_loader": "cpu",
        "predict_timeout": predict_timeout or PREDICT_TIMEOUT_S[door_name == "embedded"],
        **({"max_waiting": MAX_WAITING, **LIMITS} if requests else {}),
        **({"engine_restarts": 2 * kills + 10} if kills else {}),
    }
    if door_name != "plain":
        options["max_rolling_batch_size"] = 16 if requests else 64
    with tempfile.TemporaryDirectory() as work_name, no_core_files():
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
        "--predict-timeout", type=int, help="option of the server, s; default: 10, DJL 30"
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
