"""HTTP/1.1 connections of the embedded server: uvicorn's protocol with TLS, limits, errors in JSON and an access log.

uvicorn limits neither how slowly a client sends and reads nor the number of connections, and answers invalid HTTP in
plain text. The options are read at each use: those in a folder that is fetched are known only after the load.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import ssl
import sys
import weakref
from asyncio.sslproto import SSLProtocol
from collections import OrderedDict
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from fcntl import ioctl
from functools import lru_cache, partial
from http import HTTPStatus
from pathlib import Path
from termios import FIONREAD, TIOCOUTQ
from typing import Any

import h11
import orjson
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.errors import (
    BackendUnavailableError,
    ConfigError,
    HttpError,
    QueueFullError,
    RequestTimeoutError,
    ServingError,
)
from djl_python_neuronx.server.parser import MAX_HEAD_BYTES, Parser
from djl_python_neuronx.server.responses import GONE, WRITE_PARTS, error_response

logger = logging.getLogger(__name__)

LINGER_S = 2.0
"""Time that a client has to read the end of a connection's last answer. To close with unread data makes the kernel
reset the connection, and the client may lose the answer."""
DROP_PAUSE_S = 0.01
"""Pause after each read of bytes that are dropped (asyncio: up to 256 KiB), so that they take little of the machine."""
SPARE_CONNECTIONS = 64
"""Connections above the limit, with answers to probes and 503 for others. For each one more the oldest that has sent no
request is closed without an answer, so that a probe gets through however many connect and stay silent."""
BACKLOG = 128
"""Most connections that asyncio accepts in one turn of the event loop."""
KERNEL_BACKLOG = 4096
"""Connections that wait in the kernel, at most `net.core.somaxconn`. It drops one too many, whose client tries again
after a second."""
BUFFER_BYTES = 64 * 1024
"""Most unread bytes that wait for a client before its answer pauses; with TLS asyncio's own limit is 512 KiB."""
PROBES = frozenset({"/ping", "/health"})
"""Paths that need no API key."""
_QUIET = PROBES | {"/metrics"}
"""Paths of successful requests that are not logged."""
OTHER_DESCRIPTORS = 256 + 4 * BACKLOG
"""Descriptors that the process has besides connections: files, the engine, listening sockets. A connection is counted
two turns after it was accepted, and one that is closed has its descriptor for one turn more."""

_STOPPED = BackendUnavailableError("the server has stopped; send the request elsewhere")


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


def tls_context(
    ssl_certfile: str | None = None,
    ssl_keyfile: str | None = None,
    ssl_keyfile_password: str | None = None,
    ssl_ca_certs: str | None = None,
) -> ssl.SSLContext | None:
    """The certificate of TLS connections; None without any argument. The arguments are flags of uvicorn.

    With `ssl_ca_certs` clients must show a certificate of theirs.

    Raises:
        ConfigError: a file cannot be read or is not what its flag is for, or the certificate is missing.
    """
    if {ssl_certfile, ssl_keyfile, ssl_keyfile_password, ssl_ca_certs} == {None}:
        return None
    if ssl_certfile is None:
        msg = "--ssl-certfile is missing; the other flags of TLS need it"
        raise ConfigError(msg)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        for file in (ssl_certfile, ssl_keyfile, ssl_ca_certs):
            if file is not None:
                Path(file).read_bytes()  # the errors of ssl name no file
        # Without a password OpenSSL would wait for one from the terminal.
        context.load_cert_chain(ssl_certfile, ssl_keyfile, ssl_keyfile_password or "")
        if ssl_ca_certs is not None:
            context.load_verify_locations(ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:
        msg = (
            f"TLS with --ssl-certfile={ssl_certfile} --ssl-keyfile={ssl_keyfile} --ssl-ca-certs={ssl_ca_certs}: "
            f"{error}; expected files in PEM format, the key of the first certificate, and --ssl-keyfile-password if "
            "it has one"
        )
        raise ConfigError(msg) from error
    return context


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


def drop_oldest(silent: OrderedDict[LimitedProtocol, None]) -> None:
    """Close the connection that has been open longest without a request, if there is one."""
    for _ in range(len(silent)):
        connection, _ = silent.popitem(last=False)
        if not connection.waits_unread():
            connection.drop()
            return
        silent[connection] = None


class LimitedProtocol(H11Protocol):
    """One connection."""

    def __init__(
        self,
        options: Callable[[], ServingOptions],
        tls: ssl.SSLContext | None,
        silent: OrderedDict[LimitedProtocol, None],
        num_reserved: int = 0,
        **arguments: Any,  # noqa: ANN401
    ) -> None:
        """Take the connection's limits from `options`.

        Args:
            options: the options that hold now.
            tls: with it the connection begins with TLS.
            silent: the server's connections that have sent no request yet, the oldest first.
            num_reserved: connections above the limit that this port may have.
            arguments: uvicorn's.
        """
        super().__init__(**arguments)
        self._options = options
        self._tls = tls
        self._silent = silent
        self._num_reserved = num_reserved
        # What a connection holds does not hold it: each would leave 30 objects to collections, which stop all streams.
        this = weakref.proxy(self)
        self.conn: Parser = Parser(lambda error: this._refuse_invalid(error))
        self._gone: asyncio.Future[None] = self.loop.create_future()
        self.app_state = {
            **self.app_state,
            GONE: lambda: this.client_gone(),
            WRITE_PARTS: lambda parts: this.write_parts(parts),
        }
        self.timeout_keep_alive = options().keep_alive_timeout  # type: ignore[assignment]  # any number will do
        self._raw: asyncio.Transport
        self._tcp: asyncio.Transport
        """Without TLS the same as `_raw`."""
        self.ending = False
        self._awaited = ""
        """The part of a request that the client is sending: head, body or nothing."""
        self._timer: asyncio.TimerHandle | None = None
        """Ends the connection if that part does not arrive in time."""
        self._write_timer: asyncio.TimerHandle | None = None
        """Ends the connection of a client that does not read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request; above the limit for a probe alone. With TLS it is called after the keys again."""
        self._raw = transport
        super().connection_made(_Transport(transport, weakref.proxy(self)))  # type: ignore[arg-type]
        if self.scheme == "http":
            self._tcp = transport
        transport.set_write_buffer_limits(BUFFER_BYTES)
        limit = allowed_connections(self._options().max_connections) + self._num_reserved
        self._silent[self] = None
        if len(self.connections) > limit + SPARE_CONNECTIONS:
            drop_oldest(self._silent)
        if self.ending:
            return
        if self._tls is not None and self.scheme == "http":
            self._exchange_keys(self._tls)
        else:
            if len(self.connections) > limit:
                msg = f"the server has {limit} connections, the limit; retry later, or raise option.max_connections"
                self.app = partial(self._answer_probes, QueueFullError(msg))
                self.conn.is_extra = True
            self._watch()

    def _exchange_keys(self, tls: ssl.SSLContext) -> None:
        # Not by `create_server`, which would not count the clients that are at it, nor by `start_tls`, which loses what
        # comes behind the keys.
        timeouts: Any = {"ssl_handshake_timeout": self._options().request_head_timeout}
        if sys.version_info >= (3, 11):  # before, there was none
            timeouts["ssl_shutdown_timeout"] = math.inf  # `_expect_reading` judges by what is read
        done = self.loop.create_future()
        done.add_done_callback(self._keys_exchanged)
        layer = SSLProtocol(self.loop, self, tls, done, server_side=True, **timeouts)
        self._tcp.set_protocol(layer)
        layer.connection_made(self._tcp)

    def _keys_exchanged(self, done: asyncio.Future[None]) -> None:
        if self.scheme == "http":  # asyncio reports the end of a connection with keys only
            if not self.ending:
                reason = str(done.exception())
                logger.info("tls_refused client=%s reason=%r", self.client, reason)
            self.connection_lost(None)

    async def _answer_probes(
        self, error: ServingError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        # Without a place for a probe, many clients would make SageMaker or a load balancer end the server.
        if scope["path"] in PROBES:
            await self.config.loaded_app(scope, receive, send)
        else:
            self.refuse(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self.ending = True
        self._silent.pop(self, None)
        self._stop_timers()
        self._log_access(complete=False)
        self._leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes of requests; what comes after the last request or the last answer is dropped."""
        if self.ending or self.conn.their_state is h11.MUST_CLOSE:
            self._tcp.pause_reading()
            self.loop.call_later(DROP_PAUSE_S, self._tcp.resume_reading)
        else:
            super().data_received(data)
            if self.cycle is not None:
                self._silent.pop(self, None)
            self._watch()

    def eof_received(self) -> None:
        """End: the client has left, or sends no more, which is taken for the same."""
        self.end()

    def on_response_complete(self) -> None:
        """Go on with the next request, of which a part may be here already."""
        self._log_access(complete=True)
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """Wait until the client reads: the write buffer is full."""
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        """Go on writing: the client has read."""
        super().resume_writing()
        if self._write_timer is not None and not self.ending:
            self._write_timer.cancel()

    def client_gone(self) -> asyncio.Future[None]:
        """Return what is done when the client has left, or its request is refused.

        Only a connection that is read shows it: uvicorn stops reading where bytes of a body wait to be taken, or those
        of a next request, and goes on when the app asks for more.
        """
        self.flow.resume_reading()
        return self._gone

    def write_parts(self, parts: Iterable[bytes]) -> bool:
        """Write parts of a streamed body whose head is written, in one call, without uvicorn and h11.

        Returns False, and takes none, if the client must read first or has left.
        """
        if self.flow.write_paused or self.ending:
            return False
        if data := self.conn.frame(parts):
            self._raw.write(data)
        return True

    def refuse(self, error: ServingError) -> None:
        """Answer a request with an error, if it has begun and its answer has not, and close."""
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self.end()
        self._answer(error)

    def waits_unread(self) -> bool:
        """True if the client has sent bytes that are not read yet."""
        sock = self._tcp.get_extra_info("socket")
        return sock.fileno() >= 0 and any(ioctl(sock, FIONREAD, bytes(4)))

    def drop(self) -> None:
        """Close at once, without an answer."""
        self.ending = True
        self._stop_timers()
        self._tcp.abort()

    def stop(self) -> None:
        """End the connection because the server ends."""
        self.refuse(_STOPPED)
        self._tcp.abort()

    def shutdown(self) -> None:
        """See `H11Protocol`."""
        if self.conn.their_state is h11.IDLE:
            self.refuse(_STOPPED)
        elif not self.ending:
            super().shutdown()

    def _get_upgrade(self) -> None:
        """No other protocol is served: such a request is answered as if it had offered none."""

    def _refuse_invalid(self, error: h11.RemoteProtocolError) -> None:
        status = error.error_status_hint
        # h11 appends the bytes in Python's notation.
        text = f"this is not valid HTTP: {str(error).partition(': b')[0]}"
        if status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            text = f"the request line and headers have more than {MAX_HEAD_BYTES} bytes, the limit"
        self._answer(HttpError(text, status))

    def _answer(self, error: ServingError) -> None:
        conn = self.conn
        if not self.ending and conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            response = error_response(error, path=conn.access.get("path", ""))
            response.headers["connection"] = "close"
            status = response.status_code
            phrase = HTTPStatus(status).phrase
            body = b"" if conn.access.get("method") == "HEAD" else bytes(response.body)
            events = (
                h11.Response(status_code=status, headers=response.raw_headers, reason=phrase),
                h11.Data(data=body),
                h11.EndOfMessage(),
            )
            self._raw.write(b"".join(map(conn.send, events)))
            self._log_access(complete=True, reason=str(error))
        if self.cycle is not None:  # the app's side of the request ends as if the client had left
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._leave()
        self.end()

    def _leave(self) -> None:
        if not self._gone.done():
            self._gone.set_result(None)

    def _watch(self) -> None:
        """Limit the time for the part of a request that the client is sending."""
        state, part = self.conn.their_state, ""
        kept = self.timeout_keep_alive_task is not None and not self.conn.trailing_data[0]
        if state is h11.SEND_BODY:
            part = "body"
        elif state is h11.IDLE and not kept:
            part = "head"
        if part == self._awaited or self.ending:
            return
        self._awaited = part
        if self._timer is not None:
            self._timer.cancel()
        if part:
            limit_s = getattr(self._options(), f"request_{part}_timeout")
            msg = f"the request's {part} has not arrived within {limit_s:g} s (option.request_{part}_timeout)"
            self._timer = self.loop.call_later(limit_s, self.refuse, RequestTimeoutError(msg))

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
        self._stop_timers()
        self._expect_reading()
        # TLS has no half-closed connections: the client closes after the answer, or the wait for it ends.
        halves = self._tls is None
        sending = self.conn.their_state in {h11.SEND_BODY, h11.ERROR} or (
            self.conn.their_state is h11.IDLE and (halves or bool(self.conn.trailing_data[0]))
        )
        if sending and not self._raw.is_closing():
            if halves:
                self._raw.write_eof()
            self._raw.resume_reading()
        else:
            self._raw.close()

    def _expect_reading(self, num_before: int = sys.maxsize) -> None:
        """Close if the client has read nothing since `num_before` bytes waited for it, else wait once more."""
        sock = self._tcp.get_extra_info("socket")
        if sock.fileno() < 0:  # with TLS `connection_lost` comes later
            return
        # Those that wait in this process; TLS has a buffer above that of TCP.
        num_buffered = sum(each.get_write_buffer_size() for each in {self._raw, self._tcp})
        # The client's machine has not acknowledged those in the kernel either, up to megabytes (tcp(7)).
        num_unread = num_buffered + int.from_bytes(ioctl(sock, TIOCOUTQ, bytes(4)), sys.byteorder)
        if num_unread >= num_before:
            logger.info("client_dropped unread_bytes=%d", num_unread)
            self._raw.abort()
            return
        limit_s = self._options().write_timeout if num_buffered else LINGER_S
        self._write_timer = self.loop.call_later(limit_s, self._expect_reading, num_unread)

    def _log_access(self, *, complete: bool, reason: str = "") -> None:
        """Log the request, once. `complete`: its whole answer was written; `reason`: of a refusal before the app."""
        access, self.conn.access = self.conn.access, {}
        form = self._options().access_log
        quiet = complete and access and access["path"] in _QUIET and access["status"] < 400
        if form == "off" and reason:
            logger.info("connection_refused status=%d reason=%r", access["status"], reason)
        if quiet or not access or form == "off":
            return
        client = "{}:{}".format(*self.client or "--")
        access = {"client": client, **access, "total_ms": self.conn.num_ms(), "complete": complete}
        if reason:
            access["reason"] = reason if form == "json" else repr(reason)
        if form == "json":
            now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
            logger.info(orjson.dumps({"time": now, **access}).decode(), extra={"bare": True})
        else:
            words = " ".join(f"{key}={value}" for key, value in access.items())
            logger.info("access %s", words)
