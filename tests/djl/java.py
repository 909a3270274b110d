"""DJL's released Java engine in a separate process: `Driver.java`, and the Python side of its protocol."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from tests.processes import PATIENCE_S, alive, children, command_line, wait_until

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROGRAMS = ("java", "javac", "mvn")
JVM_OPTIONS = (
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-Xmx256m",
    "-Dai.djl.offline=true",
    "-Dorg.slf4j.simpleLogger.logFile=System.err",
)


class MavenError(Exception):
    """Maven could not fetch the released engine."""


class LoadError(Exception):
    """Java could not load a model; the text has the messages of the exception and of its causes."""


def missing_programs():
    """The reason that the released engine cannot run here; None if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return (
        f"needs a JDK of version 17 and Maven; not found: {', '.join(missing)}" if missing else None
    )


def released_jars():
    """The folder with the jars of `pom.xml`. Maven fetches them once for each content of that file."""
    pom = HERE / "pom.xml"
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "djl-neuronx-tests"
    jars = cache / hashlib.sha256(pom.read_bytes()).hexdigest()[:16]
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{jars}.lock"):
        if not jars.is_dir():
            with tempfile.TemporaryDirectory(dir=cache) as work:
                command = ["mvn", "--batch-mode", "--quiet", "--file", pom]
                command += ["dependency:copy-dependencies", f"-DoutputDirectory={work}/jars"]
                ran = subprocess.run(command, capture_output=True, text=True, check=False)
                if ran.returncode:
                    raise MavenError(f"Maven could not fetch {pom}: {ran.stdout[-2000:]}")
                Path(work, "jars").rename(jars)
    return jars


def compile_driver(classes):
    """Returns the class path of the driver, compiled into the folder `classes`."""
    jars = f"{released_jars()}/*"
    subprocess.run(["javac", "-cp", jars, "-d", classes, HERE / "Driver.java"], check=True)
    return f"{classes}:{jars}"


class Answer:
    """The answer that the client of one request gets."""

    def __init__(self, request_id):
        self.request_id = request_id
        self.status = self.reason = None
        self.headers = {}
        self.chunks = []
        self.errors = []
        """Java's exception and its causes, if the call failed or no chunk came for two minutes."""
        self.started = threading.Event()
        self.done = threading.Event()

    @property
    def content(self):
        return b"".join(self.chunks)

    def wait(self):
        assert self.done.wait(PATIENCE_S), f"no answer to {self.request_id}"
        return self

    def feed(self, event):
        if "status" in event:
            self.status, self.reason = event["status"], event["reason"]
            self.headers = event["headers"]
        elif "chunk" in event:
            self.chunks.append(base64.b64decode(event["chunk"]))
            self.started.set()
        else:
            self.errors = event.get("errors", [])
            self.started.set()
            self.done.set()


class Java:
    """A JVM with the driver. `environ` is added to this process's environment; `work` takes sockets and caches."""

    def __init__(self, class_path, work, environ=None):
        self.log = []
        """Lines of Java's log, which has the Python processes' output."""
        self._events = {}
        self._answers = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        # Sockets lie here, in a path of at most 100 characters, and Java kills what another JVM started from here.
        self._sockets = tempfile.mkdtemp(prefix="djl-")
        search_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [
                "java",
                *JVM_OPTIONS,
                f"-Djava.io.tmpdir={self._sockets}",
                *("-cp", class_path, "Driver"),
            ],
            env={
                **os.environ,
                "PYTHON_EXECUTABLE": sys.executable,
                "PYTHONPATH": search_path,
                "DJL_CACHE_DIR": str(work),
                "OPT_OUT_TRACKING": "true",
                **(environ or {}),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for target in (self._read_events, self._read_log):
            threading.Thread(target=target, daemon=True).start()

    def load(self, model, folder, options=None):
        """Load the model of a folder with the thread that DJL Serving would use, and wait for it."""
        self.begin_load(model, folder, options)
        self.end_load(model)

    def begin_load(self, model, folder, options=None):
        self._events[model] = []
        self._send(run="load", model=model, folder=str(folder), options=options or {})

    def end_load(self, model):
        event = self._wait_event(model)
        if event["event"] == "failed":
            raise LoadError(" | ".join(event["errors"]))

    def unload(self, model):
        self._events[model] = []
        self._send(run="unload", model=model)
        self._wait_event(model)

    def submit(self, model, *bodies, headers=None, leave_after=0, together=False):
        """Send requests; returns an answer for each. `together`: one call for all, as DJL Serving's batches are.

        A body may be bytes, text, or an object; None is that of an empty form: a call without content.
        `leave_after`: number of chunks after which the client leaves; 0: it stays; -1: it leaves without reading.
        """
        requests, answers = [], []
        for body in bodies:
            answer = Answer(next(self._ids))
            self._answers[answer.request_id] = answer
            answers.append(answer)
            requests.append(
                {
                    "id": answer.request_id,
                    "body": _encoded(body),
                    "headers": {"Content-Type": "application/json", **(headers or {})},
                    "chunks": leave_after,
                }
            )
        self._send(run="batch" if together else "predict", model=model, requests=requests)
        return answers

    def workers(self, folder=None):
        """Ids of the living Python processes that Java has started, of all models or of that of a folder."""
        found = [pid for pid in children(self._process.pid) if alive(pid)]
        return [pid for pid in found if folder is None or str(folder) in command_line(pid)]

    def wait_log(self, text, count=1):
        """Wait until `count` lines of the log have the text."""
        wait_until(lambda: sum(text in line for line in self.log) >= count, self.tail)

    def tail(self):
        return "\n".join(self.log[-60:])

    def end(self):
        """Close all models and wait for the end of the JVM. Returns its status. Idempotent."""
        with suppress(OSError):
            self._process.stdin.close()
        return self._process.wait(PATIENCE_S)

    def close(self):
        """End the JVM and what it left: Java starts a worker of asynchronous mode again that it has stopped itself."""
        try:
            self.end()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            shutil.rmtree(self._sockets, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _send(self, **command):
        with self._lock:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()

    def _wait_event(self, model):
        wait_until(lambda: self._events[model], self.tail)
        return self._events[model].pop(0)

    def _lines(self):
        """The lines of the driver's events."""
        return self._process.stdout

    def _read_events(self):
        for line in self._lines():
            event = json.loads(line)
            if "id" in event:
                self._answers[event["id"]].feed(event)
            else:
                self._events[event["model"]].append(event)

    def _read_log(self):
        self.log.extend(line.rstrip("\n") for line in self._process.stderr)


def _encoded(body):
    if body is None:
        return None
    if not isinstance(body, bytes):
        body = (body if isinstance(body, str) else json.dumps(body)).encode()
    return base64.b64encode(body).decode()
