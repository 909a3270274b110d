"""A TCP-level proxy before an S3 server that breaks answers on purpose, and counts what is asked.

    with S3Proxy(server_port) as proxy:
        proxy.rules.append(Fault("reset", when=lambda r: r.method == "GET", times=2))

It speaks HTTP/1.1 with one request per connection, so that a broken body breaks nothing else.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import unquote, urlsplit

Kind = Literal["reset", "error", "cut", "lie", "stall", "flip", "call", "trickle", "answer"]


@dataclass(frozen=True)
class Request:
    """The request of a client."""

    method: str
    path: str
    """Decoded, without the query."""
    query: str
    range: str | None

    @property
    def is_data(self) -> bool:
        """An object's content is wanted, not a listing or a bucket's facts."""
        return self.method == "GET" and self.path.strip("/").count("/") > 0


@dataclass
class Fault:
    """One way of breaking, done to the first `times` requests that fit.

    * reset: half of the body, then RST
    * cut: half of the body, then FIN; the length was announced in full
    * lie: half of the body, announced as such
    * stall: half of the body, then nothing for `seconds`
    * trickle: everything, but slowly: `seconds` between quarters
    * flip: one bit of the body is wrong
    * error: `status` and S3's `code` instead of an answer
    * answer: `status`, `headers` in place of the answer's own, and `body` if it is not None
    * call: `action` is called, then all goes on as usual
    """

    kind: Kind
    when: Callable[[Request], bool] = lambda request: request.is_data
    times: int = 1
    seconds: float = 0.0
    status: int = 503
    code: str = "SlowDown"
    action: Callable[[], object] = lambda: None
    headers: dict[str, str] = field(default_factory=dict)
    body: Callable[[Request], bytes] | None = None
    done: int = 0


@dataclass
class S3Proxy:
    """Listens on a port of its own on 127.0.0.1 until the block ends."""

    server_port: int
    rules: list[Fault] = field(default_factory=list)
    seen: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> S3Proxy:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._server.shutdown()
        self._server.server_close()

    def take(self, request: Request) -> Fault | None:
        """The fault for this request, used up by one."""
        with self._lock:
            self.seen.append(request)
            for fault in self.rules:
                if fault.done < fault.times and fault.when(request):
                    fault.done += 1
                    return fault
        return None

    def pause(self, seconds: float) -> None:
        """Wait, but not beyond the end of the block."""
        self._stopping.wait(seconds)

    def data_requests(self) -> list[tuple[str, str | None]]:
        """Path and range of each request for content, so far."""
        return [(request.path, request.range) for request in self.seen if request.is_data]


class _Handler(BaseHTTPRequestHandler):
    owner: S3Proxy
    protocol_version = "HTTP/1.1"  # else `Expect: 100-continue` stays without an answer, and botocore waits a second

    def log_message(self, *_: object) -> None:
        pass

    def _pass(self) -> None:
        parts = urlsplit(self.path)
        request = Request(self.command, unquote(parts.path), parts.query, self.headers["Range"])
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length) if length else None
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            body = self._read_chunks()
        fault = self.owner.take(request)
        if fault and fault.kind == "error":
            text = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>No.</Message></Error>"
            self._reply(fault.status, [("Content-Type", "application/xml")], text.encode())
            return
        if fault and fault.body is not None:
            self._reply(fault.status, list(fault.headers.items()), fault.body(request))
            return
        if fault and fault.kind == "call":
            fault.action()
        headers = {
            name: value
            for name, value in self.headers.items()
            if name.lower() not in {"connection", "transfer-encoding", "content-length", "expect"}
        }
        server = http.client.HTTPConnection("127.0.0.1", self.owner.server_port, timeout=60)
        with contextlib.closing(server):
            server.request(self.command, self.path, body=body, headers=headers)
            answer = server.getresponse()
            content = answer.read()
        kept = [
            (name, value)
            for name, value in answer.getheaders()
            if name.lower() not in {"connection", "transfer-encoding", "content-length"}
        ]
        if fault and fault.kind == "answer":
            others = [(n, v) for n, v in kept if n.title() not in map(str.title, fault.headers)]
            kept = [*others, *fault.headers.items()]
        if self.command == "HEAD":
            kept.append(("Content-Length", answer.headers.get("Content-Length", "0")))
            self._reply(answer.status, kept, b"", announced=None)
        else:
            self._break(answer.status, kept, content, fault)

    def _read_chunks(self) -> bytes:
        whole = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return whole

    def _break(self, status: int, headers: list, content: bytes, fault: Fault | None) -> None:
        half = content[: len(content) // 2]
        match fault.kind if fault else None:
            case "reset":
                self._reply(status, headers, half, announced=len(content))
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.connection.close()
            case "cut":
                self._reply(status, headers, half, announced=len(content))
            case "lie":
                self._reply(status, headers, half)
            case "stall":
                self._reply(status, headers, half, announced=len(content))
                self.owner.pause(fault.seconds)
            case "trickle":
                quarter = len(content) // 4 + 1
                self._reply(status, headers, content[:quarter], announced=len(content))
                for start in range(quarter, len(content), quarter):
                    self.owner.pause(fault.seconds)
                    self.wfile.write(content[start : start + quarter])
            case "flip":
                middle = len(content) // 2
                wrong = bytes([content[middle] ^ 1])
                self._reply(status, headers, content[:middle] + wrong + content[middle + 1 :])
            case _:
                self._reply(status, headers, content)

    def _reply(self, status: int, headers: list, sent: bytes, announced: int | None = -1) -> None:
        try:
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            if announced is not None:
                self.send_header("Content-Length", str(len(sent) if announced == -1 else announced))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(sent)
            self.wfile.flush()
        except (ConnectionError, TimeoutError):
            pass  # the client gave up first

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass  # noqa: N815


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    """Return once `condition` holds; fail, naming `what`, if it never does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.01)
