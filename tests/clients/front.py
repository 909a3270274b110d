"""An HTTP front for clients: SageMaker's runtime API, and every other path as it is.

Behind it is whatever answers a POST: the embedded server, or DJL's released engine. Source: the API reference of
SageMaker Runtime, and botocore's model and event stream.
"""

from __future__ import annotations

import json
import re
import threading
from binascii import crc32
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from typing import Any, NamedTuple

PATIENCE_S = 120.0
_ENDPOINT = re.compile(r"/endpoints/[^/]+/invocations(-response-stream)?")
_ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
_PASSED = ("Content-Type", "Accept", _ATTRIBUTES, "X-Amzn-SageMaker-Inference-Id")
"""Headers of a client that reach the model; SageMaker takes away all others."""


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    chunks: Iterable[bytes]


Ask = Callable[[str, Mapping[str, str], bytes], Answer]
"""Answers a POST: path, headers, body."""


def forward(port: int) -> Ask:
    """Ask a server on this machine."""

    def ask(path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        connection.request("POST", path, body, dict(headers))
        response = connection.getresponse()
        chunks = iter(lambda: response.read1(65536), b"")
        return Answer(response.status, dict(response.getheaders()), chunks)

    return ask


@contextmanager
def front(ask: Ask) -> Iterator[str]:
    """The URL of a front."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.ask = ask  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        endpoint = _ENDPOINT.fullmatch(self.path)
        headers = dict(self.headers.items())
        if endpoint is None:
            self._send(*self.server.ask(self.path, headers, body))
            return
        streams = endpoint[1] is not None
        headers = {name: self.headers[name] for name in _PASSED if name in self.headers}
        if streams and "X-Amzn-SageMaker-Accept" in self.headers:
            headers["Accept"] = self.headers["X-Amzn-SageMaker-Accept"]
        status, given, chunks = self.server.ask("/invocations", headers, body)
        given = {name.lower(): value for name, value in given.items()}
        content_type = given.get("content-type", "")
        out = {"x-Amzn-Invoked-Production-Variant": "AllTraffic"}
        if _ATTRIBUTES.lower() in given:
            out[_ATTRIBUTES] = given[_ATTRIBUTES.lower()]
        if status >= 400:
            text = b"".join(chunks).decode()
            error = {"OriginalStatusCode": status, "OriginalMessage": text, "LogStreamArn": ""}
            error["Message"] = f'Received error ({status}) from primary with message "{text}"'
            out |= {"Content-Type": "application/json", "x-amzn-errortype": "ModelError"}
            self._send(424, out, [json.dumps(error).encode()])
        elif streams:
            out |= {"Content-Type": "application/vnd.amazon.eventstream"}
            out["X-Amzn-SageMaker-Content-Type"] = content_type
            self._send(200, out, _events(chunks))
        else:
            self._send(status, {**out, "Content-Type": content_type}, chunks)

    def _send(self, status: int, headers: Mapping[str, str], chunks: Iterable[bytes]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in {"transfer-encoding", "content-length", "connection"}:
                self.send_header(name, value)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        with suppress(BrokenPipeError):
            for chunk in chain(chunks, [b""]):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))

    def log_message(self, *_: Any) -> None:
        pass


def _events(chunks: Iterable[bytes]) -> Iterator[bytes]:
    try:
        for chunk in chunks:
            yield _event({":message-type": "event", ":event-type": "PayloadPart"}, chunk)
    except (HTTPException, OSError):
        error = {"Message": "the model closed the connection", "ErrorCode": "StreamBroken"}
        kind = {":message-type": "exception", ":exception-type": "ModelStreamError"}
        yield _event(kind, json.dumps(error).encode())


def _event(headers: Mapping[str, str], payload: bytes) -> bytes:
    """A message of `application/vnd.amazon.eventstream`: lengths, checksum, headers, payload, checksum."""
    head = b"".join(
        bytes([len(name)])
        + name.encode()
        + b"\x07"
        + len(value).to_bytes(2, "big")
        + value.encode()
        for name, value in headers.items()
    )
    prelude = (16 + len(head) + len(payload)).to_bytes(4, "big") + len(head).to_bytes(4, "big")
    message = prelude + crc32(prelude).to_bytes(4, "big") + head + payload
    return message + crc32(message).to_bytes(4, "big")
