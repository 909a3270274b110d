"""One door for each of DJL Serving's three modes: rolling batch, plain (one call at a time) and asynchronous.

Source: djl-serving d21927c, engines/python: RollingBatch.java, PyPredictor.java, AsyncRequestManager.java,
python_async_engine.py.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

from djl_python_neuronx.engine.streams import Generation
from djl_python_neuronx.errors import (
    BackendUnavailableError,
    RequestError,
    RequestTimeoutError,
    ServingError,
)
from djl_python_neuronx.protocol.base import Serving, generate, parse
from djl_python_neuronx.protocol.djl import (
    Admission,
    Record,
    Replies,
    Reply,
    Row,
    batch_rows,
    failure,
    is_new,
    new_output,
    read,
    record_output,
    stream_output,
    unexpected,
)

if TYPE_CHECKING:
    from djl_python import Input, Output

logger = logging.getLogger(__name__)


class RollingBatchDoor:
    """Rolling batch: each call carries all live requests as rows, by position, with new ones at the end.

    A call submits the new rows, waits for the next finished step and answers every row.
    """

    def __init__(
        self, service: Serving, predict_timeout_s: float, read_timeout_s: float = math.inf
    ) -> None:
        """Java kills the process when a call takes longer than `predict_timeout_s`.

        It drops an answer whose next bytes take longer than `read_timeout_s`.
        """
        self._service = service
        self._wait_s = min(1.0, predict_timeout_s / 4, read_timeout_s / 4)
        self._patience_s = 2 * predict_timeout_s
        self._silence_s = read_timeout_s / 2
        self._replies = Replies(service, self._silence_s)
        self._called_s = time.monotonic()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name="djl-neuronx-rows", daemon=True)
        self._watchdog.start()

    @property
    def num_rows(self) -> int:
        """Number of requests in Java's list, as of its last call."""
        return len(self._replies.rows)

    def answer(self, inputs: Input) -> Output:
        """Answer one turn of Java's loop. A call that does not fit fails whole: Java then drops its list and resets."""
        with self._lock:
            self._called_s = time.monotonic()
            rows = batch_rows(inputs)
            if rows is None:
                msg = "a call that is no batch in rolling batch mode; leave out the request's property handler"
                return failure(RequestError(msg))
            if inputs.get_properties().get("reset_rollingbatch") == "true":
                self._abandon("reset by DJL Serving")
            known = self.num_rows
            if len(rows) < known or any(is_new(row) != (i >= known) for i, row in enumerate(rows)):
                self._abandon(f"{len(rows)} rows do not continue {known}")
                msg = "the rows do not continue those of the last call; send all requests again"
                return failure(ServingError(msg))
            self._replies.admit(rows[known:])
            return self._answer_rows()

    def close(self) -> None:
        """Abort all requests. Idempotent."""
        self._closed.set()
        with self._lock:
            self._abandon("the handler is closed")

    def _answer_rows(self) -> Output:
        replies = self._replies
        # With other answers a slow template or tokenizer waits for them, not they for it.
        replies.settle(self._wait_s * all(isinstance(row, Admission) for row in replies.rows))
        replies.collect(0.0 if any(row.ready for row in replies.rows) else self._wait_s)
        output = new_output({})
        for i, row in enumerate(replies.rows):
            record = row.take()
            output.add(record.encode(), key="data", batch_index=i)
            for name, value in record.headers.items():
                output.add_property(f"batch_{i}_{name}", value)
        replies.rows = [row for row in replies.rows if not row.taken]
        return output

    def _abandon(self, why: str) -> None:
        if self.num_rows:
            logger.warning("rows_abandoned rows=%d why=%r", self.num_rows, why)
            self._replies.fail(ServingError(why))
            self._replies = Replies(self._service, self._silence_s)

    def _watch(self) -> None:
        """Java calls again while it has live rows. If it stops, their answers have no reader: abort them."""
        while not self._closed.wait(self._patience_s / 4):
            with self._lock:
                if time.monotonic() - self._called_s > self._patience_s:
                    self._abandon(f"no call for {self._patience_s:g} s")


class PlainDoor:
    """Plain mode: one request per call, or `batch_size` of them that end together. Calls do not overlap."""

    def __init__(self, service: Serving, predict_timeout_s: float) -> None:
        """Java kills the process when an answer, or the first bytes of a stream, take over `predict_timeout_s`."""
        self._service = service
        self._limit_s = 0.9 * predict_timeout_s

    def answer(self, inputs: Input) -> Output:
        """Answer a call: with whole answers, or with a stream if its only request streams."""
        replies = Replies(self._service)
        deadline_s = time.monotonic() + self._limit_s
        rows = batch_rows(inputs)
        replies.admit([inputs] if rows is None else rows)
        self._collect(replies, deadline_s, first=rows is None)
        if rows is not None:
            return self._answer_batch(replies)
        reply = replies.rows[0]
        finished, record = reply.finished, reply.take()
        if record.error is not None:
            return failure(record.error, record.protocol)
        if finished:
            return new_output(record.headers).add(record.data, key="data")
        return stream_output(record.headers, self._chunks(record.data, replies, reply))

    def close(self) -> None:
        """Do nothing: no request outlives its call."""

    def _collect(self, replies: Replies, deadline_s: float, *, first: bool = False) -> None:
        """Wait until every reply is finished, or ready if `first` and a stream. Replies that are late are aborted."""
        while not all(row.finished or (first and row.stream and row.ready) for row in replies.rows):
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                msg = (
                    f"no answer within {self._limit_s:g} s, the limit before DJL Serving restarts the model; "
                    "request fewer tokens, set option.async_mode=true, or raise option.predict_timeout"
                )
                replies.fail(RequestTimeoutError(msg))
                return
            if any(isinstance(row, Reply) and not row.finished for row in replies.rows):
                replies.collect(remaining_s)
                remaining_s = 0.0
            replies.settle(remaining_s)

    def _answer_batch(self, replies: Replies) -> Output:
        """Java has one status and one set of headers for all rows, so an error is a body like the others."""
        records = [row.take() for row in replies.rows]
        types = {record.headers["Content-Type"] for record in records}
        content_type = types.pop() if len(types) == 1 else "application/json"
        output = new_output({"Content-Type": content_type})
        for i, record in enumerate(records):
            output.add(record.answer()[1], key="data", batch_index=i)
        return output

    def _chunks(self, first: bytes, replies: Replies, reply: Row) -> Iterator[bytes]:
        """The stream from `first` on. Java has no time limit for it: the engine ends it, with an error if it fails."""
        try:
            yield first
            while not reply.finished:
                replies.collect(self._limit_s)
                chunk = reply.take().answer()[1]
                if chunk:
                    yield chunk
        finally:
            replies.fail(ServingError("the stream was closed"))


class AsyncDoor:
    """Asynchronous mode: each request comes once, and its records are interleaved with those of the others."""

    def __init__(self, service: Serving, read_timeout_s: float = math.inf) -> None:
        """Java drops an answer whose next bytes take longer than `read_timeout_s`."""
        self._service = service
        self._read_timeout_s = read_timeout_s

    async def answer(self, inputs: Input) -> AsyncGenerator[Output, None]:
        """The records of one request. Never raises: DJL would drop the exception and the client would wait forever."""
        protocol = ""
        with ExitStack() as closing:
            try:
                body, headers = read(inputs)
                parsed = await parse(
                    self._service, body, request_id=headers.get("requestid"), headers=headers
                )
                protocol = parsed.request.protocol
                generation = await generate(self._service, parsed)
                closing.callback(generation.close)
                reply = Reply(parsed, self._read_timeout_s / 2)
                closing.callback(asyncio.create_task(self._wake(generation)).cancel)
                async for delta in generation:
                    # Else it only wakes.
                    if delta.text or delta.tokens or delta.prompt or delta.finished:
                        await parsed.run(reply.feed, delta)
                    while reply.ready and not reply.taken:
                        yield record_output(reply.take())
                    if reply.finished:
                        return
            except ServingError as error:
                yield record_output(Record.of(error, protocol))
            except Exception as error:
                logger.exception("request_failed")
                yield record_output(Record.of(unexpected(error), protocol))

    async def _wake(self, generation: Generation) -> None:
        """Wake the reader of a generation that has no deltas, so that its reply can send ignored bytes in time."""
        while True:
            await asyncio.sleep(self._read_timeout_s / 4)
            generation.wake()

    def close(self) -> None:
        """Do nothing: the engine loop answers running requests when it closes."""


class FailedDoor:
    """Asynchronous mode in a process whose load failed: each request is answered with the reason."""

    def __init__(self, error: ServingError) -> None:
        self._error = BackendUnavailableError(f"the model could not be loaded: {error}")

    async def answer(self, _inputs: Input) -> AsyncGenerator[Output, None]:
        """The records of one request."""
        yield record_output(Record.of(self._error))

    def close(self) -> None:
        """Do nothing: no request is running."""
