"""Chat template and tokenizer of a model folder in processes that can be ended.

Nothing in Python stops a template that loops or a regex that backtracks, and an allocation that fails may abort the
process. So the front runs neither. A *library process*, one for all models of the front, has imported transformers. It
forks a *loader* for each model, which loads the tokenizer, tells the front what it needs of it, and forks a *worker*
whenever all others are busy. A worker answers one call at a time, in a limited time and address space; the kernel ends
one that takes longer, and the next one is a fork away.

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
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import orjson

from djl_python_neuronx.artifacts.guard import outlive_stops
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
    RequestError,
    ServingError,
    TextLimitError,
    revive,
)
from djl_python_neuronx.telemetry import setup_logging

logger = logging.getLogger(__name__)

LOAD_S = 600.0
"""Most time of a load. Those of old files, which the library converts, take minutes."""
LOAD_BYTES = 4 * 2**30
"""Most address space that a load takes."""
WORK_BYTES = 2**30
"""Most address space that a call takes."""
DECODE_S = 1.0
"""Most time to decode a few tokens, for which a stream waits; each further token adds a millisecond."""
MOST_IDS = 2**22
"""Most ids of one text: to make a list of as many holds the front's GIL for 50 ms."""
MOST_TEXT = 2**24
"""Most bytes of the text of all tokens of a vocabulary (one of 256,000 has 2 MB), and characters of ids decoded."""
MOST_BYTES = 2**28
"""Longest message to the front."""
SLOW_S = 0.1
"""A worker that takes longer goes on with a low priority, behind the engine, and answers one call only."""
GRACE_S = 1.0
"""Time after which a worker is given up that the kernel should have ended."""
IDLE_WORKERS = 4
_ENVIRON = {
    # Without threads, so that it can fork.
    "TOKENIZERS_PARALLELISM": "false",
    "OPENBLAS_NUM_THREADS": "1",
    "RUST_BACKTRACE": "0",
}
_NICE = 10
_PR_SET_PDEATHSIG = 1
"""Source: Linux, include/uapi/linux/prctl.h."""


class TokenizerProcess(TokenTable):
    """The tokenizer of a folder behind the `Tokenizer` protocol. Each thread that calls it takes a worker."""

    def __init__(
        self,
        folder: Path,
        *,
        timeout_s: float,
        load_s: float = LOAD_S,
        **how: Any,  # noqa: ANN401
    ) -> None:
        """Load it. `timeout_s`: limit of a call; `how`: see `load_tokenizer`.

        Raises:
            ArtifactError: see `load_tokenizer`; or the load takes too much time or memory.
            BackendUnavailableError: the system refuses another process.
        """
        self._load = partial(load_tokenizer, folder, **how)
        self._folder, self._timeout_s, self._load_s = folder, timeout_s, load_s
        self._job = marshal.dumps((os.fspath(folder), how, load_s))
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._closed = False
        self._loader, facts = self._start()
        super().__init__(facts["special"], frozenset(facts["special_ids"]), facts["eos_id"])
        if facts["pieces"] is not None:
            self.pieces = [piece.encode("latin-1") for piece in facts["pieces"]]

    @property
    def library(self) -> Any:  # noqa: ANN401
        """The library's own object, loaded into this process for functions of `model.py`, which get one."""
        tokenizer = self._load()
        return getattr(tokenizer, "library", tokenizer)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """See `Tokenizer`; in addition raises `TextLimitError`."""
        ids: list[int] = self._call(self._timeout_s, "encode", text, special)
        return ids

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, max_chars: int | None = None
    ) -> list[int]:
        """See `Tokenizer`; in addition raises `TextLimitError`."""
        ids: list[int] = self._call(self._timeout_s, "encode_chat", messages, max_chars)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`; in addition raises `TextLimitError`."""
        limit_s = min(self._timeout_s, DECODE_S + len(ids) / 1000)
        text: str = self._call(limit_s, "decode", [*map(int, ids)], None)
        return text

    def close(self) -> None:
        """See `Tokenizer`."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            self._loader.close()
        for worker in idle:
            worker.connection.close()

    def _start(self) -> tuple[Connection, Any]:
        """A new loader and the facts that it tells."""
        try:
            loader = _new_loader()
        except OSError as error:
            msg = f"the tokenizer's process cannot be started: {error}; free memory or processes"
            raise BackendUnavailableError(msg) from error
        try:
            loader.send_bytes(self._job)
            made = loader.poll(self._load_s + GRACE_S) and _received(loader)
        except (EOFError, OSError):
            made = None
        if not made:
            loader.close()
            msg = (
                f"the tokenizer in {self._folder} cannot be loaded: it takes more than {self._load_s:g} s or "
                f"{LOAD_BYTES >> 30} GiB of memory, or ends the process (the log names the signal). Check that its "
                "files are whole and the right ones."
            )
            raise ArtifactError(msg)
        return loader, made

    def _call(self, limit_s: float, kind: str, given: Any, how: Any) -> Any:  # noqa: ANN401
        message = marshal.dumps((limit_s, kind, given, how))
        what = "chat template" if kind == "encode_chat" else "tokenizer"
        for new in (False, True):  # an idle worker may have been ended from outside
            worker = self._take(new=new)
            begun_s = time.monotonic()
            try:
                worker.connection.send_bytes(message)
                made = worker.answer(begun_s + limit_s + GRACE_S)
                if made is None:
                    what = "tokenizer"
                    made = worker.answer(begun_s + limit_s + GRACE_S)
            except (EOFError, OSError):
                worker.connection.close()
                why = f"takes more than {WORK_BYTES >> 30} GiB of memory, or crashes (the log names the signal)"
                if time.monotonic() - begun_s >= limit_s:
                    why = f"takes more than {limit_s:g} s (option.text_timeout)"
                    break
                if worker.is_new:
                    if self._is_lost():
                        msg = (
                            "the model's tokenizer is loaded again, or the model is replaced; retry"
                        )
                        raise BackendUnavailableError(msg) from None
                    break
                continue
            except ServingError:
                self._give(worker)
                raise
            self._give(worker)
            return made
        logger.warning("text_limit folder=%r what=%r: it %s", self._folder.name, what, why)
        msg = f"the model's {what} {why} on this text, and was ended; shorten or change the text, or correct the {what}"
        raise TextLimitError(msg)

    def _is_lost(self) -> bool:
        """Return True if the loader has ended, and its workers with it."""
        try:
            return self._closed or self._loader.poll()
        except (EOFError, OSError):
            return True

    def _take(self, *, new: bool) -> _Worker:
        """A worker: one that is idle, unless it must be `new`.

        Raises:
            BackendUnavailableError: the system refuses another process, or the tokenizer is closed.
        """
        with self._lock:
            if self._idle and not new:
                return self._idle.pop()
            if self._closed:
                msg = "the model is being replaced or the server stops; retry"
                raise BackendUnavailableError(msg)
            try:
                return _Worker(self._loader)
            except (EOFError, OSError):
                logger.warning("tokenizer_lost folder=%r: it is loaded again", self._folder.name)
            self._loader.close()
            try:
                self._loader, _ = self._start()
                return _Worker(self._loader)
            except (EOFError, OSError, ArtifactError) as error:
                msg = (
                    "the tokenizer's process cannot be started again; retry later, or read the log"
                )
                raise BackendUnavailableError(msg) from error

    def _give(self, worker: _Worker) -> None:
        worker.is_new = False
        with self._lock:
            if not self._closed and not worker.is_slow and len(self._idle) < IDLE_WORKERS:
                self._idle.append(worker)
                return
        worker.connection.close()


class _Worker:
    """A process that answers one call at a time."""

    def __init__(self, loader: Connection) -> None:
        self.connection = _fork(loader)
        self._pid: int = _received(self.connection)
        self.is_new, self.is_slow = True, False
        self._readable = select.poll()
        self._readable.register(self.connection.fileno(), select.POLLIN)

    def answer(self, until_s: float) -> Any:  # noqa: ANN401
        """The next message: None when the template is rendered, else what was made of a call.

        Raises:
            EOFError: the process has ended.
            OSError: it gives no answer.
            ServingError: the call has failed.
        """
        if not self._readable.poll(SLOW_S * 1000):
            self.is_slow = True
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._pid, _NICE)
            if not self._readable.poll(max(0.0, until_s - time.monotonic()) * 1000):
                raise TimeoutError
        return _received(self.connection)


_library: list[tuple[subprocess.Popen[bytes], Connection]] = []
"""The process that has imported the library, once it is started, and the connection to it."""
_starting = threading.Lock()


def _new_loader() -> Connection:
    """The connection to a new loader. Starts the library process if there is none."""
    with _starting:
        if not _library or _library[0][0].poll() is not None:
            connection, end = Pipe()
            environ = {**environment(), **_ENVIRON}
            with end:
                # A session of its own: Ctrl-C in a terminal is for the front.
                process = subprocess.Popen(  # noqa: S603
                    python_command(__name__),
                    stdin=end.fileno(),
                    env=environ,
                    start_new_session=True,
                )
            level = logging.getLogger("djl_python_neuronx").getEffectiveLevel()
            connection.send_bytes(logging.getLevelName(level).encode())
            _library[:] = [(process, connection)]
        return _fork(_library[0][1])


def _fork(parent: Connection) -> Connection:
    """Have a process fork a child. Returns the connection to it."""
    front, end = Pipe()
    with end:
        reduction.send_handle(parent, end.fileno(), None)
    return front


def _received(connection: Connection) -> Any:  # noqa: ANN401
    """A message to the front. It is JSON, so that it can make nothing run.

    Raises:
        ServingError: the message is one.
    """
    made, *failure = orjson.loads(connection.recv_bytes(MOST_BYTES))
    if failure:
        code, text, param = failure
        error = revive(code, text)
        if isinstance(error, RequestError):
            error.param = param
        raise error
    return made


# The processes


def main() -> None:
    """The library process: its standard input is the connection to the front."""
    outlive_stops()
    front = Connection(os.dup(sys.stdin.fileno()))
    with open(os.devnull) as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    setup_logging(front.recv_bytes().decode())
    with suppress(ImportError):  # the load says what is missing
        import_transformers(needs_torch=False)
        import jinja2.sandbox  # noqa: F401
    _fork_each(front, _load)


def _fork_each(front: Connection, child: Callable[[Connection], None]) -> None:
    """Fork a child for each connection that comes, until the front closes this one."""
    gc.freeze()
    signal.signal(signal.SIGCHLD, _reap)
    parent = os.getpid()
    with suppress(EOFError):
        while True:
            with Connection(reduction.recv_handle(front)) as connection:
                try:
                    is_parent = os.fork()
                except OSError as error:
                    msg = f"the system refuses another process for the tokenizer ({error}); retry"
                    connection.send_bytes(_failure(BackendUnavailableError(msg)))
                    continue
                if is_parent:
                    continue
                try:
                    front.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for number in (signal.SIGTERM, signal.SIGINT):
                        signal.signal(number, signal.SIG_IGN)
                    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                    if os.getppid() == parent:
                        child(connection)
                except (EOFError, OSError):  # the front has closed the connection
                    os._exit(0)
                except BaseException:
                    logger.exception("tokenizer_process_failed")
                finally:
                    os._exit(1)


def _reap(*_: object) -> None:
    """Note how children have ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if os.WIFSIGNALED(ended[1]):
                name = signal.Signals(os.WTERMSIG(ended[1])).name
                logger.warning("tokenizer_process_ended pid=%d signal=%s", ended[0], name)


def _limit_memory(num_bytes: int) -> None:
    """Let this process have so many bytes more than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would hold prompts
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (min(most, hard) if hard >= 0 else most, hard))


def _load(front: Connection) -> None:
    """A loader: load the tokenizer and tell the front about it, then fork workers."""
    folder, how, load_s = marshal.loads(front.recv_bytes())  # noqa: S302  (from the front)
    _limit_memory(LOAD_BYTES)
    signal.setitimer(signal.ITIMER_REAL, load_s)
    try:
        tokenizer = load_tokenizer(Path(folder), **{**how, "needs_torch": False})
        assert isinstance(tokenizer, PythonTokenizer)  # noqa: S101
        pieces = tokenizer.pieces
        if pieces is not None and (num_bytes := sum(map(len, pieces))) > MOST_TEXT:
            msg = (
                f"the tokenizer in {folder} cannot be loaded: its tokens have {num_bytes} bytes of text, more than "
                f"{MOST_TEXT}. Correct the decoder in its tokenizer.json."
            )
            raise ArtifactError(msg)
        facts = {
            "special": tokenizer.special,
            "special_ids": [*tokenizer.special_ids],
            "eos_id": tokenizer.eos_id,
            "pieces": None if pieces is None else [piece.decode("latin-1") for piece in pieces],
        }
    except ServingError as error:
        front.send_bytes(_failure(error))
        return
    signal.setitimer(signal.ITIMER_REAL, 0)
    front.send_bytes(orjson.dumps([facts]))
    _fork_each(front, partial(_work, tokenizer))


def _work(tokenizer: PythonTokenizer, front: Connection) -> None:
    """A worker: answer calls until the front closes the connection."""
    _limit_memory(WORK_BYTES)
    front.send_bytes(orjson.dumps([os.getpid()]))
    while True:
        limit_s, *call = marshal.loads(front.recv_bytes())  # noqa: S302  (from the front)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            made = orjson.dumps([_answer(tokenizer, front, *call)])
        except MemoryError:
            os._exit(1)  # what is left of the call may still take the memory
        except ServingError as error:
            made = _failure(error)
        except Exception as error:
            logger.exception("tokenizer_failed")
            name = type(error).__name__
            made = _failure(ServingError(f"the model's tokenizer failed on this text ({name})"))
        signal.setitimer(signal.ITIMER_REAL, 0)
        front.send_bytes(made)


def _answer(tokenizer: PythonTokenizer, front: Connection, kind: str, given: Any, how: Any) -> Any:  # noqa: ANN401
    if kind == "decode":
        text = tokenizer.decode(given)
        if len(text) > MOST_TEXT:
            msg = f"the model's tokenizer makes {len(text)} characters of these ids; expected at most {MOST_TEXT}"
            raise TextLimitError(msg)
        return text
    if kind == "encode":
        ids = tokenizer.encode(given, special=how)
    else:
        text = tokenizer.render(given)
        front.send_bytes(b"[null]")
        ids = tokenizer.encode_rendered(text, how)
    if len(ids) > MOST_IDS:
        msg = f"the model's tokenizer makes {len(ids)} tokens of this text; expected at most {MOST_IDS}. Shorten it."
        raise TextLimitError(msg)
    return ids


def _failure(error: ServingError) -> bytes:
    return orjson.dumps([None, error.code, str(error), getattr(error, "param", None)])
