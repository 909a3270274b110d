"""Chat template and tokenizer of a model folder in processes that can be ended.

Nothing in Python stops a template that loops or a regex that backtracks, and an allocation that fails may abort the
process. So the front runs neither. A *library process*, one for all models of the front, has imported transformers. It
forks a *loader* for each model, which loads the tokenizer, sends the front its special tokens and the text of each
token, and forks a *worker* whenever all others are busy. A worker answers one call at a time, in a limited time and
address space; the kernel ends one that takes longer, and the next call forks another. The front's wait is limited too:
it ends a worker that does not answer because it was stopped, for which the kernel's limit does not count.

The library process ends when its connection does, and the kernel ends the others with the process that forked them.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import marshal
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import orjson

from djl_python_neuronx.artifacts.tokenizer import (
    PythonTokenizer,
    TokenTable,
    import_transformers,
    load_tokenizer,
)
from djl_python_neuronx.backends import python_command
from djl_python_neuronx.config.sources import environment
from djl_python_neuronx.errors import (
    ArtifactError,
    BackendUnavailableError,
    QueueFullError,
    ServingError,
    TextLimitError,
    revive,
)
from djl_python_neuronx.telemetry import log_settings, setup_logging
from djl_python_neuronx.types import RENDERING, Rendering

logger = logging.getLogger(__name__)

LOAD_S = 600.0
"""Most time of a load. Those of old files, which the library converts, take minutes."""
LOAD_BYTES = 4 * 2**30
"""Most address space that a load takes."""
WORK_BYTES = 2**30
"""Most address space that a call takes."""
DECODE_S = 1.0
"""Most time to decode a few tokens, for which a stream waits; each further token adds a millisecond."""
MOST_MADE = 2**22
"""Most ids of one text, or characters of one list of ids. A list of so many holds the front's GIL for 50 ms."""
MOST_BYTES = 2**25
"""Longest message to the front. The texts of the tokens of a vocabulary of 256,000 have 2 MB."""
GRACE_S = 1.0
"""Time beyond a limit after which the front ends a process that the kernel did not: it is stopped, or gets no time."""
FORK_S = 10
"""Most time of a fork, and of a pause within a message."""
IMPORT_S = 300.0
"""Most time to import the library. It is read from a disk, which may be slow."""
SLOW_S = 0.1
"""Time after which a call is slow, if its worker has computed for half of it: others may have the cores."""
MOST_SLOW = 8
"""Slow calls of a model at once. One more is ended: ordinary ones wait for no slow one."""
IDLE_WORKERS = 4
_ENVIRON = {
    # Without threads, so that it can fork.
    "TOKENIZERS_PARALLELISM": "false",
    "OPENBLAS_NUM_THREADS": "1",
    "RUST_BACKTRACE": "0",
}
_LOST = (EOFError, ConnectionError, TimeoutError)
"""Errors of a process that has ended, or is stopped. Others are of this process: no descriptors are left."""
_CLOSED = signal.SIGUSR1
"""Signal that ends a loader whose tokenizer is closed: the log names others."""
_PR_SET_PDEATHSIG = 1
"""Source: Linux, include/uapi/linux/prctl.h."""


class TokenizerProcess(TokenTable):
    """The tokenizer of a folder behind the `Tokenizer` protocol. Each thread that calls it takes a worker."""

    def __init__(
        self,
        folder: Path,
        *,
        timeout_s: float,
        limit: str = "option.text_timeout",
        load_s: float = LOAD_S,
        **how: Any,  # noqa: ANN401
    ) -> None:
        """Load it. `timeout_s`: time of a call, by the named `limit`; `how`: see `load_tokenizer`.

        Raises:
            ArtifactError: see `load_tokenizer`; or the load takes too much time or memory.
            BackendUnavailableError: the system refuses another process.
        """
        self._folder, self._how, self._limit = folder, how, limit
        self._timeout_s, self._load_s = min(timeout_s, 1e6), load_s  # poll takes no more than weeks
        self._idle = deque[_Process](maxlen=IDLE_WORKERS)
        self._closed = False
        self._slow = threading.Semaphore(MOST_SLOW)
        self._forking = threading.Lock()
        """Held during a fork or a load. A call waits for it no longer than for a text."""
        special, special_ids, eos_id, pieces = self._load()
        super().__init__(special, frozenset(special_ids), eos_id)
        if pieces is not None:
            self.pieces = [piece.encode("latin-1") for piece in pieces]

    @property
    def library(self) -> Any:  # noqa: ANN401
        """The library's own object, loaded into this process for functions of `model.py`, which get one."""
        return load_tokenizer(self._folder, **self._how).library

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """See `Tokenizer`; in addition raises `TextLimitError` and `BackendUnavailableError`."""
        ids: list[int] = self._call(self._timeout_s, "encode", text, special)
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_chars: int | None = None,
        rendering: Rendering = RENDERING,
    ) -> list[int]:
        """See `Tokenizer`; in addition raises `TextLimitError` and `BackendUnavailableError`."""
        how = (dict(rendering.variables), *rendering[1:])
        ids: list[int] = self._call(self._timeout_s, "encode_chat", (messages, how), max_chars)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`; in addition raises `TextLimitError` and `BackendUnavailableError`."""
        limit_s = min(self._timeout_s, DECODE_S + len(ids) / 1000)
        text: str = self._call(limit_s, "decode", [*map(int, ids)], None)
        return text

    def close(self) -> None:
        """See `Tokenizer`. Waits for nothing: loads and calls that run end with an error."""
        self._closed = True
        self._loader.end(_CLOSED)
        self._idle.clear()

    def _load(self) -> Any:  # noqa: ANN401
        """Start a loader. Returns the facts of the tokenizer, see `_load_and_fork`."""
        try:
            self._loader = _new_loader()
        except (EOFError, OSError) as error:
            why = str(error) or "it has ended"
            msg = f"the tokenizer's process cannot be started ({why}); free memory or processes, or read the log"
            raise BackendUnavailableError(msg) from error
        if self._closed:  # meanwhile: `close` has ended the one before
            self._loader.end()
        try:
            how = {**self._how, "needs_torch": False}
            self._loader.send((os.fspath(self._folder), how, self._load_s))
            return self._loader.receive(self._load_s + GRACE_S)
        except (EOFError, OSError):
            self._loader.end()
            msg = (
                f"the tokenizer in {self._folder} cannot be loaded: it takes more than {self._load_s:g} s, "
                f"{LOAD_BYTES >> 30} GiB of memory or {MOST_BYTES >> 20} MiB for the text of its tokens, or ends the "
                f"process (the log names the signal of pid {self._loader.pid}). Check that its files are whole and the "
                "right ones."
            )
            raise ArtifactError(msg) from None

    def _call(self, limit_s: float, kind: str, given: Any, how: Any) -> Any:  # noqa: ANN401
        what = {"encode_chat": "chat template", "decode": "decoder"}.get(kind, "tokenizer")
        worker = self._take()
        begun_s = time.monotonic()
        try:
            worker.send((limit_s, kind, given, how))
            for made in self._messages(worker, begun_s + limit_s + GRACE_S):
                if made is None:  # the template is rendered
                    what = "tokenizer"
        except QueueFullError:
            raise
        except (EOFError, OSError) as error:
            late = time.monotonic() - begun_s >= limit_s
            # The kernel reports a lost connection of a process that has ended before it has read the whole call.
            lost = isinstance(error, ConnectionError) or not worker.parent.is_alive
            if lost or (worker.is_alive and (worker.is_stopped or not late)):
                worker.end()
                msg = (
                    f"a process of the model's tokenizer (pid {worker.pid}) was stopped or ended from outside, or the "
                    "model is replaced; retry"
                )
                raise BackendUnavailableError(msg) from None
            worker.end()
            why = f"takes more than {WORK_BYTES >> 30} GiB of memory, or crashes (the log names the signal)"
            if late:
                limit = self._limit if limit_s == self._timeout_s else "fixed"
                why = f"takes more than {limit_s:g} s ({limit})"
            logger.warning("text_limit folder=%r what=%r: it %s", self._folder.name, what, why)
            msg = (
                f"the model's {what} {why} on this text, and was ended; shorten or change the text, or correct the "
                f"{what}"
            )
            raise TextLimitError(msg) from None
        except ServingError:
            self._idle.append(worker)
            raise
        self._idle.append(worker)
        return made

    def _messages(self, worker: _Process, end_s: float) -> Iterator[Any]:
        """Yield what a worker sends until it is not None.

        Raises:
            QueueFullError: it is slow, and so are `MOST_SLOW` others; it was ended.
            EOFError, OSError: it has ended, or not answered at `end_s`.
        """
        made, is_slow, slow_s = None, False, worker.computed_s() + SLOW_S / 2
        try:
            while made is None:
                if worker.answers(SLOW_S):
                    made = worker.receive(GRACE_S)
                    yield made
                elif time.monotonic() > end_s:
                    raise TimeoutError
                elif not is_slow and worker.computed_s() >= slow_s:
                    is_slow = self._slow.acquire(blocking=False)
                    if not is_slow:
                        worker.end()
                        msg = (
                            f"{MOST_SLOW} texts take the model's chat template or tokenizer longer than {SLOW_S:g} s, "
                            "and so does this one; retry later"
                        )
                        raise QueueFullError(msg)
        finally:
            if is_slow:
                self._slow.release()

    def _take(self) -> _Process:
        """A worker: one that is idle, or a new one, of another loader if need be.

        Raises:
            BackendUnavailableError: the system refuses another process, or the tokenizer is closed.
        """
        with suppress(IndexError):
            while True:
                worker = self._idle.pop()
                if worker.is_alive:
                    return worker
        if self._closed or not self._forking.acquire(timeout=self._timeout_s):
            msg = "the model is replaced, or its tokenizer is loaded again; retry"
            raise BackendUnavailableError(msg)
        try:
            with suppress(*_LOST):
                return self._loader.fork()
            logger.warning("tokenizer_lost folder=%r: it is loaded again", self._folder.name)
            self._loader.end()
            self._load()
            return self._loader.fork()
        except (EOFError, OSError, ArtifactError) as error:
            logger.error("tokenizer_lost folder=%r: %s", self._folder.name, error)  # noqa: TRY400
            msg = "the tokenizer's process cannot be started again; retry later, or read the log"
            raise BackendUnavailableError(msg) from error
        finally:
            self._forking.release()


class _Process:
    """A process beside the front: its connection, its id, and the process that has forked it."""

    pid: int

    def __init__(self, connection: Connection, parent: _Process | None = None) -> None:
        self._connection, self.parent = connection, parent or self
        self._events = select.poll()
        self._events.register(connection.fileno(), select.POLLIN)

    def fork(self) -> _Process:
        """Fork a child of it.

        Raises:
            EOFError, ConnectionError, TimeoutError: it has ended, or is stopped.
            OSError, BackendUnavailableError: the system refuses a connection, or another process.
        """
        front, end = _pipe()
        with end:
            reduction.send_handle(self._connection, end.fileno(), None)
        child = _Process(front, self)
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
        return not any(event & select.POLLHUP for _, event in self._events.poll(0))

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


_library: list[tuple[subprocess.Popen[bytes], _Process]] = []
"""The process that has imported the library, once it is started."""
_starting = threading.Lock()


def _new_loader() -> _Process:
    """A new loader. Starts the library process if there is none that answers.

    Raises:
        EOFError, OSError: it cannot be started.
    """
    with _starting:
        while _library:
            process, library = _library[0]
            try:
                return library.fork()
            except _LOST:
                process.kill()
                _library.clear()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
        connection, end = _pipe()
        with end:
            # In its own session: Ctrl-C in a terminal is for the front.
            process = subprocess.Popen(  # noqa: S603
                python_command(__name__),
                stdin=end.fileno(),
                env={**environment(), **_ENVIRON},
                start_new_session=True,
            )
        library = _Process(connection)
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


# The processes


def main() -> None:
    """The library process: its standard input is the connection to the front."""
    # A system that stops a service signals all its processes; these have to run until the front ends them.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    front = Connection(os.dup(sys.stdin.fileno()))
    with open(os.devnull) as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    with suppress(EOFError, ConnectionError):  # the front may end at any time
        setup_logging(*marshal.loads(front.recv_bytes()))  # noqa: S302  (from the front)
        with suppress(ImportError):  # the error of the load names the package
            import_transformers(needs_torch=False)
            import jinja2.sandbox  # noqa: F401
        front.send_bytes(b"[null]")
        _fork_each(front, _load_and_fork, "(a loader)")


def _fork_each(front: Connection, child: Callable[[Connection], None], name: str) -> None:
    """Fork a child for each connection that comes, and send its id there.

    `name`: folder of the children, for the log.

    Raises:
        EOFError, ConnectionError: the front has closed this connection.
    """
    gc.freeze()
    signal.signal(signal.SIGCHLD, lambda *_: _reap(name))
    parent = os.getpid()
    while True:
        with Connection(reduction.recv_handle(front)) as connection:
            try:
                pid = os.fork()
                message = orjson.dumps([pid])
            except OSError as error:
                msg = f"the system refuses another process for the tokenizer ({error}); retry"
                pid, message = -1, _failure(BackendUnavailableError(msg))
            if pid:
                with suppress(ConnectionError):  # the front did not wait for it
                    connection.send_bytes(message)
                continue
            try:
                front.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() == parent:
                    child(connection)
            except (EOFError, ConnectionError):  # the front has closed the connection
                os._exit(0)
            except BaseException:
                logger.exception("tokenizer_process_failed")
            finally:
                os._exit(1)


def _reap(folder: str) -> None:
    """Log children that a signal has ended, except of tokenizers that are closed."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if os.WIFSIGNALED(ended[1]) and os.WTERMSIG(ended[1]) != _CLOSED:
                name = signal.Signals(os.WTERMSIG(ended[1])).name
                event = "tokenizer_process_ended folder=%r pid=%d signal=%s"
                logger.info(event, folder, ended[0], name)


def _limit_memory(num_bytes: int) -> None:
    """Limit the address space of this process to `num_bytes` more than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would hold prompts
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (min(most, hard) if hard >= 0 else most, hard))


def _load_and_fork(front: Connection) -> None:
    """A loader: load the tokenizer, send the front its facts, then fork workers."""
    folder, how, load_s = marshal.loads(front.recv_bytes())  # noqa: S302  (from the front)
    loaded: list[PythonTokenizer] = []

    def load() -> Any:  # noqa: ANN401
        _limit_memory(LOAD_BYTES)
        tokenizer = load_tokenizer(Path(folder), **how)
        pieces = tokenizer.pieces
        latin = None if pieces is None else [piece.decode("latin-1") for piece in pieces]
        loaded.append(tokenizer)
        return tokenizer.special, [*tokenizer.special_ids], tokenizer.eos_id, latin

    front.send_bytes(_made(load_s, load, f"the tokenizer in {folder} cannot be loaded"))
    if loaded:
        _fork_each(front, partial(_work, loaded[0]), Path(folder).name)


def _work(tokenizer: PythonTokenizer, front: Connection) -> None:
    """A worker: answer calls until the front closes the connection. The engine and the front go first."""
    _limit_memory(WORK_BYTES)
    os.nice(10)
    while True:
        limit_s, *call = marshal.loads(front.recv_bytes())  # noqa: S302  (from the front)
        answer = partial(_answer, tokenizer, front, *call)
        front.send_bytes(_made(limit_s, answer, "the model's tokenizer failed on this text"))


def _made(limit_s: float, make: Callable[[], Any], failed: str) -> bytes:
    """The message with what is made, or with the error. The kernel ends the process after `limit_s`."""
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return orjson.dumps([make()])
    except MemoryError:
        os._exit(1)  # what is left of the call may still take the memory
    except ServingError as error:
        return _failure(error)
    except Exception as error:
        logger.exception("tokenizer_failed")
        # Without the message, which may quote the text; that of the system does not.
        why = getattr(error, "strerror", None) or type(error).__name__
        return _failure(ServingError(f"{failed} ({why})"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(tokenizer: PythonTokenizer, front: Connection, kind: str, given: Any, how: Any) -> Any:  # noqa: ANN401
    made: Sequence[Any]
    if kind == "decode":
        made = tokenizer.decode(given)
    elif kind == "encode":
        made = tokenizer.encode(given, special=how)
    else:
        messages, rendering = given
        text = tokenizer.render(messages, Rendering(*rendering))
        front.send_bytes(b"[null]")
        made = tokenizer.encode_rendered(text, how)
    if len(made) > MOST_MADE:
        msg = f"the model's tokenizer makes {len(made)} tokens or characters; expected at most {MOST_MADE}. Shorten it."
        raise TextLimitError(msg)
    return made


def _failure(error: ServingError) -> bytes:
    return orjson.dumps([None, error.code, str(error), getattr(error, "param", None)])
