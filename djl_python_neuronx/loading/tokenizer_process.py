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

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from djl_python_neuronx.artifacts.tokenizer import TokenTable, load_tokenizer
from djl_python_neuronx.errors import (
    ArtifactError,
    BackendUnavailableError,
    QueueFullError,
    ServingError,
    TextLimitError,
    revive,
)
from djl_python_neuronx.loading import forked, tokenizer_workers
from djl_python_neuronx.loading.forked import Process, new_loader
from djl_python_neuronx.types import RENDERING, Rendering

logger = logging.getLogger(__name__)

LOAD_S = 600.0
"""Most time of a load. Those of old files, which the library converts, take minutes."""
DECODE_S = 1.0
"""Most time to decode a few tokens, for which a stream waits; each further token adds a millisecond."""
GRAMMAR_S = 5.0
"""Most time to check a grammar. Those that the library's own limits allow take at most 0.5 s, and
those of 512 tools 1 s (2 vCPU, 2026-11)."""
MOST_VERDICTS = 64
"""Grammars of which the verdict is kept. Each may have `grammar.MOST_CHARS` characters."""
SLOW_S = 0.1
"""Time after which a call is slow, if its worker has computed for half of it: others may have the cores."""
MOST_SLOW = 8
"""Slow calls of a model at once. One more is ended: ordinary ones wait for no slow one."""
IDLE_WORKERS = 4

_WORDS = {"encode_chat": "chat template", "decode": "decoder", "grammar": "grammar compiler"}


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
        self._idle = deque[Process](maxlen=IDLE_WORKERS)
        self._closed = False
        self._slow = threading.Semaphore(MOST_SLOW)
        self._verdicts = OrderedDict[tuple[str, str], Future[tuple[str | None, str]]]()
        self._keeping = threading.Lock()
        """Held while `_verdicts` change."""
        self._forking = threading.Lock()
        """Held during a fork or a load. A call waits for it no longer than for a text."""
        special, special_ids, eos_id, self.template, pieces = self._load()
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

    def decode(self, ids: Sequence[int], *, skip: bool = True, spaces: bool = False) -> str:
        """See `Tokenizer`; in addition raises `TextLimitError` and `BackendUnavailableError`."""
        limit_s = min(self._timeout_s, DECODE_S + len(ids) / 1000)
        text: str = self._call(limit_s, "decode", [*map(int, ids)], (skip, spaces))
        return text

    def grammar(self, kind: str, text: str) -> str:
        """See `Tokenizer`; in addition raises `TextLimitError` and `BackendUnavailableError`.

        The verdicts on the last grammars are kept, so that clients that send one with each request wait once: one that
        comes meanwhile waits for the same verdict.
        """
        key, mine = (kind, text), Future[tuple[str | None, str]]()
        with self._keeping:
            verdict = self._verdicts.pop(key, mine)
            self._verdicts[key] = verdict
            if len(self._verdicts) > MOST_VERDICTS:
                self._verdicts.popitem(last=False)
        if verdict is mine:
            try:
                limit_s = min(self._timeout_s, GRAMMAR_S)
                mine.set_result(self._call(limit_s, "grammar", key, None))
            except BaseException as error:
                with self._keeping:
                    self._verdicts.pop(key, None)
                mine.set_exception(error)
                raise
        code, made = verdict.result()
        if code is not None:
            raise revive(code, made)
        return made

    def close(self) -> None:
        """See `Tokenizer`. Waits for nothing: loads and calls that run end with an error."""
        self._closed = True
        self._loader.end(tokenizer_workers.CLOSED)
        self._idle.clear()

    def _load(self) -> Any:  # noqa: ANN401
        """Start a loader. Returns the facts of the tokenizer, see `_load_and_fork`."""
        try:
            self._loader = new_loader()
        except (EOFError, OSError) as error:
            why = str(error) or "it has ended"
            msg = f"the tokenizer's process cannot be started ({why}); free memory or processes, or read the log"
            raise BackendUnavailableError(msg) from error
        if self._closed:  # meanwhile: `close` has ended the one before
            self._loader.end()
        try:
            how = {**self._how, "needs_torch": False}
            self._loader.send((os.fspath(self._folder), how, self._load_s))
            return self._loader.receive(self._load_s + forked.GRACE_S)
        except (EOFError, OSError):
            self._loader.end()
            msg = (
                f"the tokenizer in {self._folder} cannot be loaded: it takes more than {self._load_s:g} s, "
                f"{tokenizer_workers.LOAD_BYTES >> 30} GiB of memory or {forked.MOST_BYTES >> 20} MiB for the text of "
                f"its tokens, or ends the process (the log names the signal of pid {self._loader.pid}). Check that its "
                "files are whole and the right ones."
            )
            raise ArtifactError(msg) from None

    def _call(self, limit_s: float, kind: str, given: Any, how: Any) -> Any:  # noqa: ANN401
        what = _WORDS.get(kind, "tokenizer")
        worker = self._take()
        begun_s = time.monotonic()
        try:
            worker.send((limit_s, kind, given, how))
            for made in self._messages(worker, begun_s + limit_s + forked.GRACE_S):
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
            memory = f"{tokenizer_workers.WORK_BYTES >> 30} GiB of memory"
            why = f"takes more than {memory}, or crashes (the log names the signal)"
            if late:
                limit = self._limit if limit_s == self._timeout_s else "fixed"
                why = f"takes more than {limit_s:g} s ({limit})"
            logger.warning("text_limit folder=%r what=%r: it %s", self._folder.name, what, why)
            msg = (
                f"cannot be checked: it {why}; simplify it"
                if kind == "grammar"  # behind the field's name
                else f"the model's {what} {why} on this text, and was ended; shorten or change the text, or correct "
                f"the {what}"
            )
            raise TextLimitError(msg) from None
        except ServingError:
            self._idle.append(worker)
            raise
        self._idle.append(worker)
        return made

    def _messages(self, worker: Process, end_s: float) -> Iterator[Any]:
        """Yield what a worker sends until it is not None.

        Raises:
            QueueFullError: it is slow, and so are `MOST_SLOW` others; it was ended.
            EOFError, OSError: it has ended, or not answered at `end_s`.
        """
        made, is_slow, slow_s = None, False, worker.computed_s() + SLOW_S / 2
        try:
            while made is None:
                if worker.answers(SLOW_S):
                    made = worker.receive(forked.GRACE_S)
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

    def _take(self) -> Process:
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
            with suppress(*forked.LOST):
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
