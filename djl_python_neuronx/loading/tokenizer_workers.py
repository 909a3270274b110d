"""The processes of chat template and tokenizer: the library process, the loaders that it forks, and their workers.

See `tokenizer_process`, whose front starts the library process and talks to all of them.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import marshal
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import orjson

from djl_python_neuronx.artifacts.tokenizer import (
    PythonTokenizer,
    import_transformers,
    load_tokenizer,
)
from djl_python_neuronx.errors import (
    BackendUnavailableError,
    RequestError,
    ServingError,
    TextLimitError,
)
from djl_python_neuronx.telemetry import setup_logging
from djl_python_neuronx.types import Rendering

logger = logging.getLogger(__name__)

LOAD_BYTES = 4 * 2**30
"""Most address space that a load takes."""
WORK_BYTES = 2**30
"""Most address space that a call takes."""
MOST_MADE = 2**22
"""Most ids of one text, or characters of one list of ids. A list of so many holds the front's GIL for 50 ms."""
CLOSED = signal.SIGUSR1
"""Signal that ends a loader whose tokenizer is closed: the log names others."""
_PR_SET_PDEATHSIG = 1
"""Source: Linux, include/uapi/linux/prctl.h."""


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
            import llguidance  # noqa: F401
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
            if os.WIFSIGNALED(ended[1]) and os.WTERMSIG(ended[1]) != CLOSED:
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
        facts = tokenizer.special, [*tokenizer.special_ids], tokenizer.eos_id
        return *facts, tokenizer.template, latin

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
        skip, spaces = how
        made = tokenizer.decode(given, skip=skip, spaces=spaces)
    elif kind == "grammar":
        made = _verdict(tokenizer, *given)
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


def _verdict(tokenizer: PythonTokenizer, kind: str, text: str) -> tuple[str | None, str]:
    """The engine's form of a grammar behind None, or the code and the message of the error that refuses it."""
    try:
        return None, tokenizer.grammar(kind, text)
    except RequestError as error:
        return error.code, str(error)


def _failure(error: ServingError) -> bytes:
    return orjson.dumps([None, error.code, str(error), getattr(error, "param", None)])
