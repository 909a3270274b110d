"""The processes of tokenizers, seen from the front: connections, forks, ends. Their side is in `tokenizer_workers`."""

from __future__ import annotations

import marshal
import os
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import orjson

from djl_python_neuronx.backends import python_command
from djl_python_neuronx.config.sources import environment
from djl_python_neuronx.errors import revive
from djl_python_neuronx.loading import tokenizer_workers
from djl_python_neuronx.telemetry import log_settings

MOST_BYTES = 2**25
"""Longest message to the front. The texts of the tokens of a vocabulary of 256,000 have 2 MB."""
GRACE_S = 1.0
"""Time beyond a limit after which the front ends a process that the kernel did not: it is stopped, or gets no time."""
FORK_S = 10
"""Most time of a fork, and of a pause within a message."""
IMPORT_S = 300.0
"""Most time to import the library. It is read from a disk, which may be slow."""
_ENVIRON = {
    # Without threads, so that it can fork.
    "TOKENIZERS_PARALLELISM": "false",
    "OPENBLAS_NUM_THREADS": "1",
    "RUST_BACKTRACE": "0",
}
LOST = (EOFError, ConnectionError, TimeoutError)
"""Errors of a process that has ended, or is stopped. Others are of this process: no descriptors are left."""


class Process:
    """A process beside the front: its connection, its id, and the process that has forked it."""

    pid: int

    def __init__(self, connection: Connection, parent: Process | None = None) -> None:
        self._connection, self.parent = connection, parent or self
        self._events = select.poll()
        self._events.register(connection.fileno(), select.POLLIN)

    def fork(self) -> Process:
        """Fork a child of it.

        Raises:
            EOFError, ConnectionError, TimeoutError: it has ended, or is stopped.
            OSError, BackendUnavailableError: the system refuses a connection, or another process.
        """
        front, end = _pipe()
        with end:
            reduction.send_handle(self._connection, end.fileno(), None)
        child = Process(front, self)
        child.pid = child.receive(FORK_S)
        return child

    def send(self, message: Any) -> None:  # noqa: ANN401
        """Send plain values.

        Raises:
            OSError: it has ended, or does not read.
        """
        self._connection.send_bytes(marshal.dumps(message))

    def receive(self, limit_s: float) -> Any:  # noqa: ANN401
        """Its next message. It is JSON, so that it can make nothing run.

        Raises:
            EOFError, OSError: it has ended, or gives no answer in this time.
            ServingError: the message is one.
        """
        if not self.answers(limit_s):
            msg = f"no answer within {limit_s:g} s"
            raise TimeoutError(msg)
        made, *failure = orjson.loads(self._connection.recv_bytes(MOST_BYTES))
        if failure:
            code, message, param = failure
            raise revive(code, message, param=param)
        return made

    def answers(self, limit_s: float) -> bool:
        """True once it has sent a message or ended, False after this time."""
        return bool(self._events.poll(limit_s * 1000))

    def computed_s(self) -> float:
        """The processor time that it has taken, 0 if it has ended. Source: glibc, `clock_getcpuclockid`."""
        with suppress(OSError):
            return time.clock_gettime(~self.pid << 3 | 2)
        return 0.0

    @property
    def is_alive(self) -> bool:
        """True until it has ended, which closes its end of the connection."""
        # Not `_events`, which takes one thread at a time: calls that end together ask the same loader.
        events = select.poll()
        events.register(self._connection.fileno(), select.POLLIN)
        return not any(event & select.POLLHUP for _, event in events.poll(0))

    @property
    def is_stopped(self) -> bool:
        """True if a signal or a debugger has stopped it. Source: proc(5), after the name, which may hold anything."""
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0] in "Tt"
        return False

    def end(self, by: int = signal.SIGKILL) -> None:
        """End it, and with it those that it has forked: by this signal, or, if it is stopped, by SIGKILL."""
        if self.is_alive:  # so no other process has its id
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL if self.is_stopped else by)


_library: list[tuple[subprocess.Popen[bytes], Process]] = []
"""The process that has imported the library, once it is started."""
_starting = threading.Lock()


def new_loader() -> Process:
    """A new loader. Starts the library process if there is none that answers.

    Raises:
        EOFError, OSError: it cannot be started.
    """
    with _starting:
        while _library:
            process, library = _library[0]
            try:
                return library.fork()
            except LOST:
                process.kill()
                _library.clear()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
        connection, end = _pipe()
        with end:
            # In its own session: Ctrl-C in a terminal is for the front.
            process = subprocess.Popen(  # noqa: S603
                python_command(tokenizer_workers.__name__),
                stdin=end.fileno(),
                env={**environment(), **_ENVIRON},
                start_new_session=True,
            )
        library = Process(connection)
        _library.append((process, library))
        library.send(log_settings())
        library.receive(IMPORT_S)
        return library.fork()


def _pipe() -> tuple[Connection, Connection]:
    """The front's end of a connection, which gives up on a process that stands still, and the process's."""
    front, end = Pipe()
    with socket.fromfd(front.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as options:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            options.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", FORK_S, 0))
    return front, end
