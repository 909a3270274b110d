"""HTTP/1.1 connections of the embedded server: uvicorn's protocol with limits of time and size, and errors in JSON.

uvicorn limits neither how slowly a client sends and reads nor the number of connections, and answers invalid HTTP in
plain text. The options are read at each use: those in a folder that is fetched are known only after the load.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable
from functools import lru_cache
from http import HTTPStatus
from typing import Any

import h11
import orjson
from uvicorn.protocols.http.h11_impl import H11Protocol

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.values import shortened
from djl_python_neuronx.errors import (
    BackendUnavailableError,
    QueueFullError,
    RequestTimeoutError,
    ServingError,
)
from djl_python_neuronx.protocol.base import error_fields

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 32 * 1024
"""Longest request line and headers together."""
FREE_PARTS, PART_BYTES = 4096, 64
"""A body may come in so many parts of any size; all further ones must have so many bytes on average. A part takes h11
6 µs, so without a limit 256 KiB of parts of one byte hold the event loop for 0.3 s (2 vCPU, 2026-11)."""
MAX_DROPPED_BYTES = 64 * 1024
"""Bytes of a body that are read and dropped after its answer, to keep the connection."""
LINGER_S = 2.0
"""Time that a client has to read the last answer of a connection. To close with unread data makes the kernel reset the
connection, and the client may lose the answer."""
SPARE_CONNECTIONS = 64
"""Connections above the limit that are answered with 503; any more are closed without an answer."""
OTHER_DESCRIPTORS = 256
"""Descriptors that the process has besides connections: files, the engine, listening sockets."""


@lru_cache(maxsize=4)
def allowed_connections(wanted: int) -> int:
    """The number of connections that the process may hold, at most `wanted`. Raises its limit of open files for them.

    Source: getrlimit(2); a process without privileges may raise its soft limit up to the hard one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + SPARE_CONNECTIONS + OTHER_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    possible = max(1, wanted - (needed - soft))
    if possible < wanted:
        logger.warning(
            "connections_limited max_connections=%d possible=%d reason='the hard limit of open files (ulimit -Hn) is "
            "%d; raise it to %d'",
            wanted, possible, hard, needed,
        )  # fmt: skip
    return possible


class _Connection(h11.Connection):
    """h11's parser. It also refuses what a proxy in front may read in another way, and what takes too long to parse."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self.error = h11.RemoteProtocolError("invalid")
        """The last one raised; uvicorn does not pass it on."""
        self._num_parts = self._num_bytes = self._num_dropped = 0

    def next_event(self) -> Any:  # noqa: ANN401
        """See `h11.Connection`."""
        try:
            event = super().next_event()
            if type(event) is h11.Request:
                self._check_head(event)
            elif type(event) is h11.Data:
                self._check_part(len(event.data))
        except h11.RemoteProtocolError as error:
            self.error = error
            raise
        return event

    def _check_head(self, request: h11.Request) -> None:
        self._num_parts = self._num_bytes = self._num_dropped = 0
        if request.http_version not in {b"1.0", b"1.1"}:
            msg = "this server speaks HTTP/1.1"
            raise h11.RemoteProtocolError(msg, HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
        names = [name for name, _ in request.headers]
        if b"content-length" in names and b"transfer-encoding" in names:
            msg = "Content-Length beside Transfer-Encoding; send one of them"
            raise h11.RemoteProtocolError(msg)
        # h11 limits a head that is incomplete only.
        size = len(request.target) + sum(
            [len(name) + len(value) for name, value in request.headers]
        )
        if size > MAX_HEAD_BYTES:
            msg = "too long"
            raise h11.RemoteProtocolError(msg, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def _check_part(self, size: int) -> None:
        self._num_parts += 1
        self._num_bytes += size
        if self._num_parts > FREE_PARTS + self._num_bytes / PART_BYTES:
            msg = f"a body in more than {FREE_PARTS} parts of less than {PART_BYTES} bytes; send larger chunks"
            raise h11.RemoteProtocolError(msg)
        if self.our_state is h11.DONE:
            self._num_dropped += size
            if self._num_dropped > MAX_DROPPED_BYTES:
                msg = "the rest of the body is not read"
                raise h11.RemoteProtocolError(msg)


class _Transport:
    """A connection's transport. To close it ends the connection in a way that lets the client read the last answer."""

    def __init__(self, transport: asyncio.Transport, connection: LimitedProtocol) -> None:
        self._transport = transport
        self._connection = connection
        self.write = transport.write

    def close(self) -> None:
        self._connection.end()

    def is_closing(self) -> bool:
        return self._connection.ending or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._transport, name)


class LimitedProtocol(H11Protocol):
    """One connection. `options` gives the limits."""

    def __init__(self, options: Callable[[], ServingOptions], **arguments: Any) -> None:  # noqa: ANN401
        """`arguments`: uvicorn's."""
        super().__init__(**arguments)
        self._options = options
        self._parser = self.conn = _Connection()
        self.timeout_keep_alive = options().keep_alive_timeout  # type: ignore[assignment]  # any number will do
        self._raw: asyncio.Transport
        self.ending = False
        self._awaited = ""
        """The part of a request that the client is sending: head, body or nothing."""
        self._timer: asyncio.TimerHandle | None = None
        """Ends the wait for that part."""
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse a connection above the limit, else wait for a request."""
        self._raw = transport
        super().connection_made(_Transport(transport, self))  # type: ignore[arg-type]
        limit = allowed_connections(self._options().max_connections)
        if len(self.connections) > limit + SPARE_CONNECTIONS:
            transport.abort()
        elif len(self.connections) > limit:
            msg = f"the server has {limit} connections, the limit; retry later, or raise option.max_connections"
            self.refuse(QueueFullError(msg))
        else:
            self._wait_for("head", self._options().request_head_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self.ending = True
        self._stop_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request; what comes after the last answer is dropped."""
        if not self.ending:
            super().data_received(data)
            self._watch()

    def on_response_complete(self) -> None:
        """Go on with the next request, of which a part may be here already."""
        super().on_response_complete()
        if not self.ending:
            self._watch()

    def pause_writing(self) -> None:
        """Drop a client that does not read: the write buffer is full."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(
            self._options().write_timeout, self._drop, "reads nothing"
        )

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Answer invalid HTTP, in JSON."""
        status = self._parser.error.error_status_hint
        text = f"this is not valid HTTP: {shortened(str(self._parser.error))}"
        if status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            text = f"the request line and headers have more than {MAX_HEAD_BYTES} bytes, the limit"
        self._answer(status, {"code": status, "error": text, "type": "http_error"})

    def refuse(self, error: ServingError) -> None:
        """Answer with an error, if no answer has begun, and close."""
        self._answer(error.status, error_fields(error), retry=isinstance(error, QueueFullError))

    def stop(self) -> None:
        """End the connection because the server ends."""
        self.refuse(BackendUnavailableError("the server has stopped; send the request elsewhere"))
        self._raw.abort() if self._raw.get_write_buffer_size() else self._raw.close()

    def shutdown(self) -> None:
        """See `H11Protocol`."""
        if not self.ending:
            super().shutdown()

    def _get_upgrade(self) -> None:
        """No other protocol is served: such a request is answered as if it had not offered one."""

    def _answer(self, status: int, fields: dict[str, Any], *, retry: bool = False) -> None:
        if not self.ending and self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            body = orjson.dumps(fields)
            lines = [
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
                "content-type: application/json",
                f"content-length: {len(body)}",
                "connection: close",
                *(["retry-after: 1"] if retry else []),
            ]
            self._raw.write("\r\n".join([*lines, "", ""]).encode() + body)
        if self.cycle is not None:  # the app's side of the request ends as if the client had left
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.end()

    def _watch(self) -> None:
        """Limit the time for what the client has begun to send."""
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            self._wait_for("body", self._options().request_body_timeout)
        elif state is h11.IDLE and self.conn.trailing_data[0]:
            self._wait_for("head", self._options().request_head_timeout)
        else:
            self._wait_for("", 0)

    def _wait_for(self, part: str, limit_s: float) -> None:
        if part == self._awaited or self.ending:
            return
        self._awaited = part
        if self._timer is not None:
            self._timer.cancel()
        msg = f"the request's {part} has not arrived within {limit_s:g} s (option.request_{part}_timeout)"
        self._timer = (
            self.loop.call_later(limit_s, self.refuse, RequestTimeoutError(msg)) if part else None
        )

    def _stop_timers(self) -> None:
        self._unset_keepalive_if_required()
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()

    def end(self) -> None:
        """Close; idempotent. A client that has not sent its whole request may still read the answer."""
        if self.ending:
            return
        self.ending = True
        state, fresh = self.conn.their_state, self.cycle is None
        sending = state in {h11.SEND_BODY, h11.ERROR} or (
            state is h11.IDLE and (fresh or self._awaited != "")
        )
        self._stop_timers()
        limit_s = LINGER_S
        if self._raw.get_write_buffer_size():
            limit_s = self._options().write_timeout
        self._timer = self.loop.call_later(limit_s, self._raw.abort)
        if sending and not self._raw.is_closing():
            self._raw.write_eof()
            self._raw.resume_reading()
        else:
            self._raw.close()

    def _drop(self, reason: str) -> None:
        logger.info("client_dropped reason=%r", reason)
        self._raw.abort()
