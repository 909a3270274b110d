"""Conversion to and from DJL Serving's objects: input rows to requests, deltas to records of answers.

`djl_python` is on no registry: DJL Serving provides it. It is imported with the first answer.

Source: djl-serving d21927c, engines/python: Request.java, inputs.py, outputs.py.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from fcntl import ioctl
from functools import cache
from socket import socket
from termios import TIOCOUTQ
from typing import TYPE_CHECKING, NamedTuple, Union

from djl_python_neuronx.engine.detokenizer import Delta
from djl_python_neuronx.engine.streams import BlockingQueue
from djl_python_neuronx.errors import ServingError
from djl_python_neuronx.protocol import answer_error
from djl_python_neuronx.protocol.base import ADAPTER, Formatter, ParsedRequest, Serving
from djl_python_neuronx.types import FinishReason

if TYPE_CHECKING:
    from djl_python import Input, Output

logger = logging.getLogger(__name__)

_JSON = "application/json"
_SILENT = {_JSON: b" ", "application/jsonlines": b"\n", "text/event-stream": b":\n\n"}
"""Media type to bytes that its readers ignore: a blank before a value, an empty line, a comment."""
ADMIT_S = 0.01
"""Most time that streams wait for new requests to be parsed."""


class Record(NamedTuple):
    """A part of the answer to one request. Java reads `data` and `last`, or the status and message of `error`."""

    data: bytes
    last: bool
    headers: Mapping[str, str]
    """HTTP headers. Java sends those that it received before the first bytes."""
    error: ServingError | None = None
    protocol: str = ""
    """The wire protocol of the request, if it is known."""

    @staticmethod
    def of(error: ServingError, protocol: str = "") -> Record:
        """The only record of a request that failed before its first bytes. Java answers ``{"code", "error"}``."""
        headers = {"Content-Type": _JSON}
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(error.retry_after_s)
        return Record(b"", True, headers, error, protocol)

    def encode(self) -> bytes:
        """DJL's token record. Java fails without `data` and drops a request only at `last`, so both are always set.

        Source: Request.java: of a record with `code` Java takes the status, and makes the body itself.
        """
        from djl_python import Output

        fields = {"data": self.data.decode(), "last": "true" if self.last else "false"}
        if self.error is not None:
            fields |= {"code": str(self.answer()[0]), "error": _one_line(self.error)}
        encoded: bytes = Output.binary_encode(fields)
        return encoded

    def answer(self) -> tuple[int, bytes]:
        """HTTP status and plain body, in the shape of the request's protocol."""
        if self.error is None:
            return 200, self.data
        return answer_error(self.error, protocol=self.protocol)


class Reply:
    """The answer to an accepted request as it grows: deltas in, records out.

    Java drops an answer whose next bytes take too long. After each `silence_s` without any, an answer gets bytes that
    its readers ignore (`_SILENT`). Status 200 and the headers leave with the first ones.

    The last record of several has no data. Source: djl api 0.34.0 and 0.36.0, ChunkedBytesSupplier.java: Java notes the
    end before it stores the data that comes with it, and a reader in between loses it (1 stream of 15,000, 2026-11).
    """

    def __init__(self, parsed: ParsedRequest, silence_s: float = math.inf) -> None:
        self.label = parsed.request.label
        self._last = Delta(parsed.request.request_id, "", ())
        """The last delta, whose counts an error repeats."""
        self._protocol = parsed.request.protocol
        self.open_ids = {request.request_id for request in parsed.requests}
        """Sequences of the answer that have not ended."""
        self.stream = parsed.stream
        self.finished = False
        """True once the answer is complete."""
        self.taken = False
        """True once its last record has been taken."""
        self.error: ServingError | None = None
        self._formatter: Formatter = parsed.formatter
        self._started = False
        self._pending: list[bytes] = []
        self._blank = _SILENT.get(self._formatter.content_type, b"")
        self._silence_s = silence_s if self._blank else math.inf
        self._blank_s = time.monotonic() + self._silence_s

    @property
    def ready(self) -> bool:
        """True if there is something to send."""
        return self.finished or any(self._pending) or time.monotonic() >= self._blank_s

    def feed(self, delta: Delta) -> bool:
        """Add a delta. Returns whether the answer has ended: with the last of its sequences, or an error of one.

        An error before the first bytes becomes the status; after them it is written in the format.
        """
        self._last = delta
        if delta.finished:
            self.open_ids.discard(delta.request_id)
        self.finished = delta.error is not None or not self.open_ids
        if delta.error is not None and not self._started:
            self.error = delta.error
            return True
        try:
            self._pending.append(self._formatter.feed(delta))
        except ServingError as error:
            self.fail(error)
        except Exception as error:
            logger.exception("format_failed request_id=%s", self.label)
            self.fail(unexpected(error), writable=False)
        return self.finished

    def fail(self, error: ServingError, *, writable: bool = True) -> None:
        """End the answer with an error from outside the engine. After the first bytes the status has left.

        Then it is the body of an answer in JSON, and the last part of a stream, if its formatter is `writable`.
        """
        self.finished = True
        if self._started and self._formatter.content_type == _JSON:
            self._pending.append(answer_error(error, protocol=self._protocol)[1])
        elif self._started and writable:
            failed = self._last._replace(
                text="", tokens=(), finish_reason=FinishReason.ERROR, error=error
            )
            self._pending.append(self._formatter.feed(failed))
        else:
            self.error = error

    def take(self) -> Record:
        """Everything since the last call; it may hold several tokens."""
        if self.error is not None:
            self.taken = True
            return Record.of(self.error, self._protocol)
        data, self._pending = b"".join(self._pending), []
        if not data and self.ready and not self.finished:
            data = self._blank
        if data:
            self._blank_s = time.monotonic() + self._silence_s
        self.taken = self.finished and not (data and self._started)
        self._started = self._started or bool(data)
        headers = {"Content-Type": self._formatter.content_type} if data or self.finished else {}
        return Record(data, self.taken, headers)


@dataclass(frozen=True)
class Rejection:
    """The answer to a request that was not accepted; complete from the start, with the attributes of a `Reply`."""

    error: ServingError
    protocol: str = ""
    """The wire protocol of the request, if it could be parsed."""
    stream = False
    ready = finished = taken = True

    def take(self) -> Record:
        """The error."""
        return Record.of(self.error, self.protocol)


@dataclass(frozen=True)
class Admission:
    """A request that is being parsed, with the attributes of a `Reply`."""

    parsing: Future[ParsedRequest]
    stream = ready = finished = taken = False

    def take(self) -> Record:
        """Nothing yet."""
        return Record(b"", False, {})


Row = Union[Reply, Rejection, Admission]
"""The answer to one row of a call."""


class Replies:
    """Answers in the order of their requests, fed from one inbox. Used by one thread at a time."""

    def __init__(self, service: Serving, silence_s: float = math.inf) -> None:
        """`silence_s`: see `Reply`."""
        self.rows: list[Row] = []
        self._silence_s = silence_s
        self._service = service
        self._inbox = BlockingQueue()

    def admit(self, rows: Sequence[Input]) -> None:
        """Begin to parse requests, on threads: a template or a tokenizer may take `option.text_timeout`."""
        self.rows.extend(map(self._begin, rows))
        self.settle(ADMIT_S, ALL_COMPLETED)  # those of a burst share a step

    def settle(self, timeout_s: float, until: str = FIRST_COMPLETED) -> None:
        """Submit the requests that are parsed; wait for the first one. If one is invalid, the error is its answer."""
        parsing = [row.parsing for row in self.rows if isinstance(row, Admission)]
        wait(parsing, timeout_s, until)
        for i, row in enumerate(self.rows):
            if isinstance(row, Admission) and row.parsing.done():
                self.rows[i] = self._submit(row.parsing)

    def _begin(self, row: Input) -> Row:
        try:
            return Admission(self._service.threads.submit(self._parse, row))
        except ServingError as error:
            return Rejection(error)

    def _parse(self, row: Input) -> ParsedRequest:
        body, headers = read(row)
        return self._service.parse(body, request_id=headers.get("requestid"), headers=headers)

    def _submit(self, parsing: Future[ParsedRequest]) -> Row:
        protocol = ""
        try:
            parsed = parsing.result()
            protocol = parsed.request.protocol
            loop = self._service.loop
            loop.submit_all(loop.prepare(*parsed.requests), self._inbox)
            return Reply(parsed, self._silence_s)
        except ServingError as error:
            return Rejection(error, protocol)
        except Exception as error:
            logger.exception("request_failed")
            return Rejection(unexpected(error), protocol)

    def collect(self, timeout_s: float) -> None:
        """Wait for deltas of unfinished requests, at most `timeout_s`, and feed them to their replies."""
        live = {
            request_id: row
            for row in self.rows
            if isinstance(row, Reply) and not row.finished
            for request_id in row.open_ids
        }
        if not live:
            return
        for delta in self._inbox.drain(timeout_s):
            reply = live.get(delta.request_id)
            if reply is None or reply.finished:
                continue
            if reply.feed(delta):
                self._abort(reply)

    def fail(self, error: ServingError) -> None:
        """End all unfinished answers."""
        for i, row in enumerate(self.rows):
            if isinstance(row, Admission):
                row.parsing.cancel()
                self.rows[i] = Rejection(error)
            elif isinstance(row, Reply) and not row.finished:
                self._abort(row)
                row.fail(error)

    def _abort(self, reply: Reply) -> None:
        """Abort what still runs of an answer."""
        for request_id in reply.open_ids:
            self._service.loop.abort(request_id)


def read(row: Input) -> tuple[bytes, dict[str, str]]:
    """Body and lower-case headers. Java's random `seed` item is ignored: the engine draws its own seeds."""
    headers = {name.lower(): str(value) for name, value in row.get_properties().items()}
    if row.contains_key("adapter"):  # of the query; workflows of DJL Serving add it, too
        headers.setdefault(ADAPTER, bytes(row.get_as_bytes("adapter")).decode(errors="replace"))
    return bytes(row.get_as_bytes() or b""), headers


def batch_rows(inputs: Input) -> list[Input] | None:
    """The rows of a batch that Java has made. None for one request, whose properties are a client's: `batch_size` too.

    Source: InferenceRequestHandler.java, InferenceService.java: a request has a `requestId` (HTTP) or a content without
    a name (gRPC). In a batch every name begins with that of its row.
    """
    names = inputs.get_content().get_keys()
    if not inputs.is_batch() or inputs.get_property("requestId") is not None:
        return None
    if not all(name is not None and name.startswith("batch_") for name in names):
        return None
    rows: list[Input] = inputs.get_batches()
    return rows


def is_new(row: Input) -> bool:
    """True if Java sends a row for the first time, with properties and a seed. Later it is an empty payload."""
    return bool(row.get_properties()) or row.contains_key("seed") or bool(row.get_as_bytes())


def unexpected(error: Exception) -> ServingError:
    """The client's error for an exception that is a bug. The log has its text, which may hold parts of a prompt."""
    return ServingError(f"the server failed on this request ({type(error).__name__})")


def new_output(headers: Mapping[str, str], status: int = 200, message: str = "OK") -> Output:
    """An `Output` without content; `headers` are HTTP headers."""
    from djl_python import Output

    output = Output(status, message)
    for name, value in headers.items():
        output.add_property(name, value)
    return output


def stream_output(headers: Mapping[str, str], chunks: Iterator[bytes]) -> Output:
    """An output whose content follows in chunks."""
    output = _stream_output_class()(200, "OK")
    for name, value in headers.items():
        output.add_property(name, value)
    return output.add_stream_content(chunks, output_formatter=None)


@cache
def _stream_output_class() -> type[Output]:
    from djl_python import Output

    class StreamOutput(Output):  # type: ignore[misc]
        def send(self, cl_socket: socket) -> None:
            super().send(_StreamSocket(cl_socket))

    return StreamOutput


class _StreamSocket:
    """A socket on which the end of a stream is sent alone, once Java has read everything before it.

    Source: djl-serving 0.34.0 to 0.36.0, Connection.java, OutputDecoder: if a read of Java ends within the last chunk,
    Java takes the rest for a new message, and ends the process. Without this class 3 of about 400 streams ended so (2
    busy cores, 2026-11-22).
    """

    def __init__(self, sock: socket) -> None:
        self._socket = sock

    def sendall(self, data: bytes) -> None:
        """Send a message of `Output.send`. The last one begins with 0, all other chunks with 1."""
        deadline_s = time.monotonic() + 1.0
        while data[0] == 0 and self._has_unread() and time.monotonic() < deadline_s:
            time.sleep(0.0005)
        self._socket.sendall(data)

    def _has_unread(self) -> bool:
        return any(ioctl(self._socket, TIOCOUTQ, bytes(4)))


def record_output(record: Record) -> Output:
    """A record as an output of the asynchronous mode."""
    return new_output(record.headers).add(record.encode(), key="data")


def failure(error: ServingError, protocol: str = "") -> Output:
    """An output for an error. Its message becomes the HTTP reason, and the log line of a failed load."""
    record = Record.of(error, protocol)
    status, body = record.answer()
    return new_output(record.headers, status, _one_line(error)).add(body, key="data")


def _one_line(error: ServingError) -> str:
    """The message as an HTTP reason phrase, which must not have line breaks."""
    return " ".join(str(error).split())
