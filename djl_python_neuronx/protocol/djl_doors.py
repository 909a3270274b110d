"""DJL Serving's three ways to hand over requests: the rolling batch, one call at a time, and asynchronously.

Source: djl-serving d21927c, engines/python: RollingBatch.java, PyPredictor.java, AsyncRequestManager.java,
python_async_engine.py.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from typing import TYPE_CHECKING

from djl_python_neuronx.engine.streams import Generation
from djl_python_neuronx.errors import RequestError, RequestTimeoutError, ServingError
from djl_python_neuronx.protocol.base import Serving, generate
from djl_python_neuronx.protocol.djl import (
    Record,
    Refused,
    Replies,
    Reply,
    failure,
    is_new,
    new_output,
    read,
    record_output,
    with_headers,
)

if TYPE_CHECKING:
    from djl_python import Input, Output

logger = logging.getLogger(__name__)


class RollingBatchDoor:
    """Every call carries all live requests as rows, by position; new ones are at the end.

    Each call submits the new rows, waits for the next finished step and answers every row.
    """

    def __init__(self, service: Serving, predict_timeout_s: float) -> None:
        """Java kills the process when a call takes longer than `predict_timeout_s`."""
        self._service = service
        self._wait_s = min(1.0, predict_timeout_s / 4)
        self._patience_s = 2 * predict_timeout_s
        self._replies = Replies(service)
        self._called_s = time.monotonic()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name="djl-neuronx-rows", daemon=True)
        self._watchdog.start()

    @property
    def num_rows(self) -> int:
        """Requests that Java still has in its list, as far as is known here."""
        return len(self._replies.rows)

    def answer(self, inputs: Input) -> Output:
        """One turn of Java's loop. A call that does not fit fails whole: then Java drops its list and resets."""
        with self._lock:
            self._called_s = time.monotonic()
            if inputs.get_properties().get("reset_rollingbatch") == "true":
                self._abandon("reset by DJL Serving")
            if not inputs.is_batch():
                return failure(
                    RequestError("a call without batch_size in rolling batch mode; send a batch")
                )
            rows = inputs.get_batches()
            known = self.num_rows
            if len(rows) < known or any(is_new(row) != (i >= known) for i, row in enumerate(rows)):
                self._abandon(f"{len(rows)} rows do not continue {known}")
                return failure(
                    ServingError(
                        "the rows do not continue those of the last call; send all requests again"
                    )
                )
            for row in rows[known:]:
                self._replies.admit(row)
            return self._answer_rows()

    def close(self) -> None:
        """Give everything up; idempotent."""
        self._closed.set()
        with self._lock:
            self._abandon("the handler is closed")

    def _answer_rows(self) -> Output:
        replies = self._replies
        replies.collect(0.0 if any(row.ready for row in replies.rows) else self._wait_s)
        output = new_output()
        for i, row in enumerate(replies.rows):
            record = row.take()
            output.add(record.encode(), key="data", batch_index=i)
            for name, value in record.headers.items():
                output.add_property(f"batch_{i}_{name}", value)
        replies.rows = [row for row in replies.rows if not row.finished]
        return output

    def _abandon(self, why: str) -> None:
        if self.num_rows:
            logger.warning("rows_abandoned rows=%d why=%r", self.num_rows, why)
            self._replies.fail(ServingError(why))
            self._replies = Replies(self._service)

    def _watch(self) -> None:
        """Java keeps calling while it has live rows. If it stops, nobody is left to read them."""
        while not self._closed.wait(self._patience_s / 4):
            with self._lock:
                if time.monotonic() - self._called_s > self._patience_s:
                    self._abandon(f"no call for {self._patience_s:g} s")


class PlainDoor:
    """One request per call, or `batch_size` of them that end together. Nothing else is served meanwhile."""

    def __init__(self, service: Serving, predict_timeout_s: float) -> None:
        """An answer, or the first bytes of a stream, later than `predict_timeout_s` makes Java kill the process."""
        self._service = service
        self._limit_s = 0.9 * predict_timeout_s

    def answer(self, inputs: Input) -> Output:
        """Whole answers, or a stream for a single request that asks for one."""
        replies = Replies(self._service)
        deadline_s = time.monotonic() + self._limit_s
        for row in inputs.get_batches():
            replies.admit(row)
        if inputs.is_batch():
            return self._answer_batch(replies, deadline_s)
        reply = replies.rows[0]
        self._collect(replies, deadline_s, first=reply.stream)
        if not reply.finished:
            return self._answer_stream(replies, reply)
        record = reply.take()
        if record.error is not None:
            return failure(record.error, record.headers)
        return with_headers(new_output(), record.headers).add(record.data, key="data")

    def close(self) -> None:
        """Nothing outlives a call."""

    def _collect(self, replies: Replies, deadline_s: float, *, first: bool = False) -> None:
        """Until every reply is finished, or just ready if `first`; what is not in time is given up."""
        while not all(row.finished or (first and row.ready) for row in replies.rows):
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                msg = (
                    f"not answered within {self._limit_s:g} s, after which DJL Serving would restart the model; "
                    "ask for fewer tokens, or set option.async_mode=true, or raise option.predict_timeout"
                )
                replies.fail(RequestTimeoutError(msg))
                return
            replies.collect(remaining_s)

    def _answer_batch(self, replies: Replies, deadline_s: float) -> Output:
        """Java has one status and one set of headers for all rows: an error is a body like the others."""
        self._collect(replies, deadline_s)
        records = [row.take() for row in replies.rows]
        types = {record.headers["Content-Type"] for record in records}
        output = new_output().add_property(
            "Content-Type", types.pop() if len(types) == 1 else "application/json"
        )
        for i, record in enumerate(records):
            output.add(record.body(), key="data", batch_index=i)
        return output

    def _answer_stream(self, replies: Replies, reply: Reply | Refused) -> Output:
        first = reply.take()
        chunks = self._chunks(first.data, replies, reply)
        return with_headers(new_output(), first.headers).add_stream_content(
            chunks, output_formatter=None
        )

    def _chunks(self, first: bytes, replies: Replies, reply: Reply | Refused) -> Iterator[bytes]:
        """A stream from `first` on. Java sets no limit to it: the engine ends it, with an error if need be."""
        try:
            yield first
            while not reply.finished:
                replies.collect(self._limit_s)
                chunk = reply.take().body()
                if chunk:
                    yield chunk
        finally:
            replies.fail(ServingError("the stream was closed"))


class AsyncDoor:
    """Each request comes once; its records go back as they come, between those of the others."""

    def __init__(self, service: Serving) -> None:
        self._service = service

    async def answer(self, inputs: Input) -> AsyncGenerator[Output, None]:
        """The records of one request. Never raises: DJL would tell nobody, and the client would wait for ever."""
        generation: Generation | None = None
        try:
            body, headers = read(inputs)
            parsed, generation = await generate(
                self._service, body, request_id=headers.get("requestid"), headers=headers
            )
            reply = Reply(parsed)
            async for delta in generation:
                reply.feed(delta)
                if reply.ready:
                    yield record_output(reply.take())
                if reply.finished:
                    return
        except ServingError as error:
            yield record_output(Record.of(error))
        except Exception as error:
            logger.exception("request_failed")
            yield record_output(
                Record.of(ServingError(f"the request failed ({type(error).__name__})"))
            )
        finally:
            if generation is not None:
                generation.close()

    def close(self) -> None:
        """The engine loop answers what is running."""
