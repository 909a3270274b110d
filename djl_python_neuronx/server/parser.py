"""Requests of one HTTP/1.1 connection, parsed by h11 and judged, and the facts of each for the access log."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import h11

from djl_python_neuronx.errors import RequestAbortedError
from djl_python_neuronx.protocol.base import client_label, new_id

MAX_HEAD_BYTES = 32 * 1024
"""Longest request line and headers together."""
FREE_PARTS, PART_BYTES = 4096, 64
"""A body may come in so many parts of any size; all further ones must have so many bytes on average. A part takes h11
6 µs, so without a limit 256 KiB of parts of one byte hold the event loop for 0.3 s (2 vCPU, 2026-11)."""
MAX_PATH = 256
"""Characters of a path in the log."""
_EMPTY_LINES = re.compile(rb"(?:\r\n)+")
_AUTHORITY = re.compile(rb"https?://[^/?]*", re.IGNORECASE)
# RFC 3986, 3.2.2 and 3.2.3: characters of a host and a port.
_HOST = re.compile(rb"[\w.~!$&'()*+,;=%:\[\]-]*")


class Parser(h11.Connection):
    """h11's parser. It also refuses what a proxy in front may read in another way, and what takes too long to parse.

    `on_invalid` is called with the error of a request that is refused.
    """

    def __init__(self, on_invalid: Callable[[h11.RemoteProtocolError], None]) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._on_invalid = on_invalid
        self.access: dict[str, Any] = {}
        """The access log's fields for the request that is read or answered; empty between requests."""
        self.is_extra = False
        """The connection is one too many, and ends with its first answer."""
        self._head = b""
        """The head of an answer until its next bytes: one packet for both."""
        self._started_s = 0.0
        self._num_parts = self._num_bytes = 0
        self._client_id = ""
        """The id that the client sent with the request that is read or answered."""

    def next_event(self) -> Any:  # noqa: ANN401
        """See `h11.Connection`. After invalid HTTP there are no events; uvicorn would log a warning for each error."""
        # RFC 9112, 2.2: empty lines in front of a request are ignored; old clients send one after a body.
        if self.their_state is h11.IDLE and (empty := _EMPTY_LINES.match(self.trailing_data[0])):
            self._receive_buffer.maybe_extract_at_most(empty.end())
        try:
            event = super().next_event()
            if type(event) is h11.Request:
                if authority := _AUTHORITY.match(event.target):  # RFC 9112, 3.2.2: proxies send it
                    rest = event.target[authority.end() :]
                    event = replace(event, target=rest if rest.startswith(b"/") else b"/" + rest)
                path = event.target.partition(b"?")[0][:MAX_PATH]
                self._open_access(event.method.decode(), path.decode())
                headers = dict(event.headers)
                sent = headers.get(b"x-request-id") or headers.get(b"x-amzn-sagemaker-inference-id")
                self._client_id = client_label((sent or b"").decode("latin-1"))
                self._check_head(event)
            elif type(event) is h11.Data:
                self._check_part(len(event.data))
        except h11.RemoteProtocolError as error:
            self._on_invalid(error)
            return h11.NEED_DATA
        return event

    def send(self, event: h11.Event) -> Any:  # noqa: ANN401
        """See `h11.Connection`; a head is sent with what follows it.

        After an answer that comes before the whole body, the rest is not read.
        """
        if type(event) is h11.Response:
            headers: Any = [*event.headers]
            known = dict(headers)
            ends = self.is_extra or self.their_state is h11.SEND_BODY
            if ends and known.get(b"connection") != b"close":
                headers.append((b"connection", b"close"))
            if b"x-request-id" not in known:
                headers.append((b"x-request-id", (self._client_id or new_id()).encode()))
            self._client_id = ""
            if len(headers) > len(event.headers):  # h11 checks all of them again
                event = replace(event, headers=headers)
            self._note_answer(event)
            self._head = super().send(event) or b""
            return b""
        return self._sent(super().send(event) or b"")

    def frame(self, parts: Iterable[bytes]) -> bytes:
        """The bytes that `send` makes of parts of a body that has no length, a chunk of each. Source: RFC 9112, 7.1."""
        if self.their_http_version != b"1.0":  # there the end of the connection is that of the body
            parts = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts if part]
        return self._sent(b"".join(parts))

    def num_ms(self) -> float:
        """Milliseconds since the end of the request's head."""
        return round((time.monotonic() - self._started_s) * 1000, 1)

    def _sent(self, data: bytes) -> bytes:
        data, self._head = self._head + data, b""
        if self.access:
            self.access["bytes"] += len(data)
        return data

    def _open_access(self, method: str, path: str) -> None:
        self._started_s = time.monotonic()
        self.access = {"method": method, "path": path, "status": RequestAbortedError.status}
        self.access |= {"bytes": 0, "first_byte_ms": None, "request_id": "-"}

    def _note_answer(self, answer: h11.Response) -> None:
        if not self.access:  # to bytes that are no request
            self._open_access("-", "-")
        request_id = dict(answer.headers)[b"x-request-id"]
        self.access["status"] = answer.status_code
        self.access["first_byte_ms"] = self.num_ms()
        self.access["request_id"] = request_id.decode("latin-1")

    def _check_head(self, request: h11.Request) -> None:
        self._num_parts = self._num_bytes = 0
        if request.http_version not in {b"1.0", b"1.1"}:
            msg = "this server speaks HTTP/1.1"
            raise h11.RemoteProtocolError(msg, HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
        names = [name for name, _ in request.headers]
        if b"content-length" in names and b"transfer-encoding" in names:
            msg = "Content-Length beside Transfer-Encoding; send one of them"
            raise h11.RemoteProtocolError(msg)
        if not all(_HOST.fullmatch(value) for name, value in request.headers if name == b"host"):
            msg = "the Host header is not a name or an address, with or without a port"
            raise h11.RemoteProtocolError(msg)
        # h11 limits a head that is incomplete only. Each line has a colon and its end too.
        size = len(request.target) + sum(
            [len(name) + len(value) + 3 for name, value in request.headers]
        )
        if size > MAX_HEAD_BYTES:
            msg = "too long"
            raise h11.RemoteProtocolError(msg, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def _check_part(self, size: int) -> None:
        self._num_parts += 1
        self._num_bytes += size
        if self._num_parts > FREE_PARTS + self._num_bytes / PART_BYTES:
            msg = f"the body has more than {FREE_PARTS} parts of less than {PART_BYTES} bytes; send larger parts"
            raise h11.RemoteProtocolError(msg)
