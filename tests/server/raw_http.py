"""HTTP by the byte over a socket, to a served toy, and its answers."""

from __future__ import annotations

import json
import socket
from typing import Any

from tests.processes import PATIENCE_S, wait_until
from tests.server.running import Running, body

SHORT_S = 0.2
"""A time limit that a test waits for."""


def connect(server: Running, **options: int) -> socket.socket:
    client = socket.socket()
    for name, value in options.items():
        client.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    client.settimeout(PATIENCE_S)
    client.connect(("127.0.0.1", server.port))
    return client


def read_all(client: socket.socket) -> bytes:
    """Everything until the server closes. A reset is an error of the test: the answer may be lost by it."""
    parts = []
    while part := client.recv(65536):
        parts.append(part)
    client.close()
    return b"".join(parts)


def talk(server: Running, content: bytes) -> bytes:
    client = connect(server)
    client.sendall(content)
    return read_all(client)


def status(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1])


def content(reply: bytes) -> dict[str, Any]:
    head, _, rest = reply.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower(), reply
    fields: dict[str, Any] = json.loads(rest)
    assert fields["code"] == status(reply)
    return fields


def post(payload: bytes, *headers: str, path: str = "/invocations", length: bool = True) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: toy", *headers]
    if length:
        lines.append(f"Content-Length: {len(payload)}")
    return "\r\n".join([*lines, "", ""]).encode() + payload


REQUEST = json.dumps(body([5, 6])).encode()
CLOSE = "Connection: close"
CHUNKED = "Transfer-Encoding: chunked"


def wait_for_connections(server: Running, number: int) -> list[Any]:
    connections = server._server.server_state.connections
    wait_until(lambda: len(connections) == number)
    return list(connections)
