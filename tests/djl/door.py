"""DJL's released engine in one of its modes, as a way into the service."""

from __future__ import annotations

import itertools
import json
import queue
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tests.clients.answers import SSE, Question, Reply
from tests.djl.folders import write_model
from tests.djl.java import Java, compile_driver

DEADLINE_S = 300.0
"""Of each request: Java keeps back what the model has no place for."""
BATCH_SIZE = 16
JAVA_TIMEOUT = "Time out in: "
"""Rolling mode: Java gives up a request that has waited for a free row as long as `predict_timeout`."""


class Door:
    """The engine with one model, for the questions of `tests.clients.answers`."""

    port = None

    def __init__(self, mode: str, java: Java) -> None:
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
    ) -> Door:
        """Start a JVM and load the model."""
        classes, folder = work / "classes", work / "model"
        for each in (classes, folder):
            each.mkdir()
        batch = {"batch_size": BATCH_SIZE} if mode == "plain" else {}
        write_model(folder, mode, **batch, **options)
        jvm = Java(compile_driver(classes), work / "cache", environ)
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
        over = not answer.done.wait(DEADLINE_S)
        if any(JAVA_TIMEOUT in message for message in answer.errors) and not answer.chunks:
            return Reply(503, json.dumps({"code": 503, "error": JAVA_TIMEOUT}).encode())
        return Reply(
            answer.status or 0,
            answer.content,
            timed_out=over or num_chunks < 0 or len(answer.chunks) == num_chunks > 0,
            broken=" | ".join(answer.errors) or None,
            headers=answer.headers,
        )

    def _send(self, how: tuple[Any, ...], body: bytes) -> Any:
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
