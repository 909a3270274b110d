"""The embedded server as a separate process, and its client."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from tests.clients.answers import MODEL, ROOT, SSE, Question, Reply
from tests.processes import held_port

DEADLINE_S = 120.0
"""Of each request: none waits or runs as long as this."""
START_S = 120.0
SETTLE_S = 15.0
"""After the last answer, for descriptors and threads of the front; after its end, for its processes."""
DRAIN_S = 20


class NotReadyError(Exception):
    """The server did not answer in time, or ended."""


class Embedded:
    """The embedded server, as a separate process."""

    def __init__(
        self,
        options: Mapping[str, Any],
        work: Path,
        environ: Mapping[str, str],
        program: Sequence[str] = ("-m", "djl_python_neuronx.cli"),
        models: Sequence[Path] = (MODEL,),
    ) -> None:
        """Start it. `program`: arguments of Python that run the command line `djl-neuronx`."""
        self._held = contextlib.ExitStack()
        self.port = self._held.enter_context(held_port())
        command = [sys.executable, *program, "serve", *map(str, models)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--drain", str(DRAIN_S)]
        command += [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        self.log = work / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=environ, cwd=ROOT, stderr=log)
        self.front = self.process.pid

    @classmethod
    def start(cls, options: Mapping[str, Any], work: Path, environ: Mapping[str, str]) -> Embedded:
        """Start a server, and wait until it answers."""
        door = cls(options, work, environ)
        try:
            door.wait_ready()
        except BaseException:
            door.kill()
            raise
        return door

    def wait_ready(self) -> None:
        """Return when the server answers."""
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            if self.send("GET", "/ping", b"", {}, deadline_s).status == 200:
                return
            time.sleep(0.05)
        msg = f"not ready within {START_S:g} s: {self.said}"
        raise NotReadyError(msg)

    def ask(self, question: Question, form: str, leave_s: float | None = None) -> Reply:
        """Send a request and read until its end, or leave after some seconds."""
        headers = {"accept": SSE} if form == "sse" else {}
        return self.post(question.body(form), headers, leave_s)

    def post(self, body: bytes, headers: Mapping[str, str], leave_s: float | None = None) -> Reply:
        """The same with any body."""
        deadline_s = time.monotonic() + (DEADLINE_S if leave_s is None else leave_s)
        return self.send("POST", "/invocations", body, headers, deadline_s)

    def send(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], deadline_s: float
    ) -> Reply:
        """Send a request and read until its end, or leave at the deadline."""
        status, data, headers_received = 0, b"", {}
        connection = HTTPConnection("127.0.0.1", self.port, timeout=left(deadline_s))
        try:
            connection.request(method, path, body, {**headers, "connection": "close"})
            wire = connection.sock
            wire.settimeout(left(deadline_s))
            with connection.getresponse() as response:
                status, length = response.status, response.length
                headers_received = dict(response.headers)
                while True:
                    wire.settimeout(left(deadline_s))
                    chunk = response.read1(2**16)
                    if not chunk:
                        break
                    data += chunk
                if length is not None and len(data) < length:
                    return Reply(status, data, broken=f"{length} bytes announced")
        except TimeoutError:
            return Reply(status, data, timed_out=True)
        except (OSError, HTTPException) as error:
            return Reply(status, data, broken=repr(error))
        finally:
            connection.close()
        return Reply(status, data, headers=headers_received)

    @property
    def log_text(self) -> str:
        """All of the log."""
        return self.log.read_text()

    @property
    def said(self) -> str:
        """The end of the log."""
        return self.log_text[-3000:]

    @property
    def alive(self) -> bool:
        """True until the process has ended."""
        return self.process.poll() is None

    def end(self) -> int:
        """SIGTERM. Returns the exit status."""
        self._held.close()
        self.process.terminate()
        return self.process.wait(DRAIN_S + SETTLE_S)

    def kill(self) -> None:
        """End it whatever its state; the guard ends the engine."""
        self._held.close()
        self.process.kill()
        self.process.wait()


def left(deadline_s: float) -> float:
    """Seconds until a time; above 0, which a socket takes for "do not wait"."""
    return max(deadline_s - time.monotonic(), 1e-3)
