"""What crosses the border to DJL Serving: input rows, and deltas as records of its answers.

`djl_python` is on no registry: DJL brings it, and it is imported when the first answer is made.

Source: djl-serving d21927c, engines/python: Request.java, inputs.py, outputs.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from djl_python_neuronx.engine.detokenizer import Delta
from djl_python_neuronx.engine.streams import BlockingQueue, OutputQueue
from djl_python_neuronx.errors import QueueFullError, ServingError
from djl_python_neuronx.protocol.base import Formatter, ParsedRequest, Serving, error_body

if TYPE_CHECKING:
    from djl_python import Input, Output

logger = logging.getLogger(__name__)


class Record(NamedTuple):
    """One answer to one request: Java reads `data` and `last`, or the status and the message of `error`."""

    data: bytes
    last: bool
    headers: Mapping[str, str]
    """HTTP headers; Java sends those that it has got by the first bytes."""
    error: ServingError | None = None

    @staticmethod
    def of(error: ServingError) -> Record:
        """The last record of a request that has sent nothing yet. Java makes ``{"code", "error"}`` of it."""
        headers = {"Content-Type": "application/json"}
        if isinstance(error, QueueFullError):
            headers["Retry-After"] = str(error.retry_after_s)
        return Record(b"", True, headers, error)

    def encode(self) -> bytes:
        """DJL's token record. Java fails without `data`, and drops a request only at `last`: both are always there."""
        from djl_python import Output

        fields = {"data": self.data.decode(), "last": "true" if self.last else "false"}
        if self.error is not None:
            fields |= {"code": str(self.error.status), "error": _one_line(self.error)}
        encoded: bytes = Output.binary_encode(fields)
        return encoded

    def body(self) -> bytes:
        """The same where a plain body is wanted."""
        return self.data if self.error is None else error_body(self.error)


class Reply:
    """The answer to one request as it grows: deltas in, records out."""

    def __init__(self, parsed: ParsedRequest) -> None:
        self.request_id = parsed.request.request_id
        self.stream = parsed.stream
        self.finished = False
        self.error: ServingError | None = None
        self._formatter: Formatter = parsed.formatter
        self._started = False
        self._pending: list[bytes] = []

    @property
    def ready(self) -> bool:
        """Something can be sent."""
        return self.finished or any(self._pending)

    def feed(self, delta: Delta) -> None:
        """Take a delta. An error before the first bytes is a status, after them a part of the format."""
        self.finished = delta.finished
        if delta.error is not None and not self._started:
            self.error = delta.error
            return
        try:
            self._pending.append(self._formatter.feed(delta))
        except Exception as error:
            logger.exception("format_failed request_id=%s", self.request_id)
            self.fail(ServingError(f"the answer cannot be written ({type(error).__name__})"))

    def fail(self, error: ServingError) -> None:
        """End it with an error that did not come from the engine."""
        self.error, self.finished = error, True

    def take(self) -> Record:
        """Everything since the last call; several tokens may travel together."""
        if self.error is not None:
            return Record.of(self.error)
        data, self._pending = b"".join(self._pending), []
        self._started = self._started or bool(data)
        headers = {"Content-Type": self._formatter.content_type} if data or self.finished else {}
        return Record(data, self.finished, headers)


class Refused:
    """Stands in a row for a request that was not accepted; its neighbours never notice."""

    request_id, stream, finished, ready = "", False, True, True

    def __init__(self, error: ServingError) -> None:
        self.error = error

    def take(self) -> Record:
        """The error."""
        return Record.of(self.error)


class Replies:
    """Replies in the order of their requests, fed from one inbox. One thread at a time."""

    def __init__(self, service: Serving) -> None:
        self.rows: list[Reply | Refused] = []
        self._service = service
        self._inbox = BlockingQueue()

    def admit(self, row: Input) -> None:
        """Submit a request; what is wrong with it is its own answer."""
        try:
            self.rows.append(Reply(_submit(self._service, row, self._inbox)))
        except ServingError as error:
            self.rows.append(Refused(error))

    def collect(self, timeout_s: float) -> None:
        """Feed what the engine has delivered; wait for it, if there is anything to wait for."""
        live = {
            row.request_id: row for row in self.rows if isinstance(row, Reply) and not row.finished
        }
        if not live:
            return
        for delta in self._inbox.drain(timeout_s):
            reply = live.get(delta.request_id)
            if reply is not None and not reply.finished:
                reply.feed(delta)
                if reply.error is not None:
                    self._service.loop.abort(reply.request_id)

    def fail(self, error: ServingError) -> None:
        """End what is not finished."""
        for row in self.rows:
            if isinstance(row, Reply) and not row.finished:
                self._service.loop.abort(row.request_id)
                row.fail(error)


def read(row: Input) -> tuple[bytes, dict[str, str]]:
    """Body and lower-case headers. Java's random `seed` item is not used: the engine draws its own if none is given."""
    headers = {name.lower(): str(value) for name, value in row.get_properties().items()}
    return bytes(row.get_as_bytes() or b""), headers


def is_new(row: Input) -> bool:
    """A row that Java sends for the first time has properties and a seed; afterwards it is an empty payload only."""
    return bool(row.get_properties()) or row.contains_key("seed") or bool(row.get_as_bytes())


def new_output(status: int = 200, message: str = "OK") -> Output:
    """An empty `djl_python.Output`."""
    from djl_python import Output

    return Output(status, message)


def with_headers(output: Output, headers: Mapping[str, str]) -> Output:
    """The same output with HTTP headers."""
    for name, value in headers.items():
        output.add_property(name, value)
    return output


def record_output(record: Record) -> Output:
    """One record of the asynchronous mode."""
    return with_headers(new_output(), record.headers).add(record.encode(), key="data")


def failure(error: ServingError, headers: Mapping[str, str] | None = None) -> Output:
    """An answer that is an error as a whole; its message becomes the HTTP reason and the log line of a failed load."""
    output = with_headers(
        new_output(error.status, _one_line(error)), headers or {"Content-Type": "application/json"}
    )
    return output.add(error_body(error), key="data")


def _one_line(error: ServingError) -> str:
    """Java makes it the HTTP reason phrase, where a line break is refused."""
    return " ".join(str(error).split())


def _submit(service: Serving, row: Input, outlet: OutputQueue) -> ParsedRequest:
    body, headers = read(row)
    try:
        parsed = service.parse(body, request_id=headers.get("requestid"), headers=headers)
    except ServingError:
        raise
    except Exception as error:
        logger.exception("request_failed")
        msg = f"the request cannot be read ({type(error).__name__})"
        raise ServingError(msg) from error
    service.loop.submit(parsed.request, outlet)
    return parsed
