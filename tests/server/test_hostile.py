"""Clients that mean harm or are broken, on raw sockets: limits of time, size and number, with short limits."""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from fcntl import ioctl
from http.client import HTTPResponse
from pathlib import Path
from termios import FIONREAD, TIOCOUTQ
from typing import Any, ClassVar

import pytest

pytest.importorskip("uvicorn", reason="needs the `server` extra")

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.engine import streams
from djl_python_neuronx.errors import ServingError
from djl_python_neuronx.server import bodies, http
from djl_python_neuronx.server.app import Application
from djl_python_neuronx.server.models import Loader, Model
from djl_python_neuronx.service import TEXT_THREADS
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend
from tests.doubles.toy_tokenizer import PanickingTokenizer, ToyTokenizer
from tests.processes import PATIENCE_S, held_port, wait_until
from tests.server.raw_http import (
    CHUNKED,
    CLOSE,
    REQUEST,
    SHORT_S,
    connect,
    content,
    post,
    read_all,
    status,
    talk,
    wait_for_connections,
)
from tests.server.running import CROSSING_S, Running, answer, body, num_descriptors, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(max_body_bytes=200_000) as running:
        yield running


PROBE = b"GET /ping HTTP/1.1\r\nHost: toy\r\n\r\n"


def assert_serves(server: Running) -> None:
    """Nobody else's request is touched. It has more time than the limits that a test waits for."""
    service = server.application.models[0].service
    assert service is not None
    patient = dict.fromkeys(("request_head_timeout", "request_body_timeout"), PATIENCE_S)
    service.options = service.options.model_copy(update=patient)
    reply = talk(server, post(REQUEST, CLOSE))
    assert json.loads(reply.partition(b"\r\n\r\n")[2]) == {"generated_text": answer([5, 6])}


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (post(REQUEST, CHUNKED), 400),
        (post(b"0\r\n\r\n", CHUNKED, "Content-Length: 5", length=False), 400),
        (post(REQUEST, "Content-Length: 7"), 400),
        (post(REQUEST, "Content-Length: -1", length=False), 400),
        (post(b"zz\r\n{}\r\n", CHUNKED, length=False), 400),
        (post(b"fffffffffffffffffffff\r\n", CHUNKED, length=False), 400),
        (post(REQUEST, "Transfer-Encoding: gzip"), 501),
        (post(REQUEST, "A\0: b"), 400),
        (post(REQUEST, "A: b\0c"), 400),
        (b"POST /invocations HTTP/1.1\r\n folded: x\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello \r\n\r\n", 400),
        (b"GET /ping HTTP/1.1\r\nHost: toy\r\nHost: other\r\n\r\n", 400),
        (b"GET /ping HTTP/1.1\r\n\r\n", 400),
        (post(REQUEST, "A: " + "x" * 33_000), 431),
        (post(REQUEST, *[f"A{i}: {'x' * 100}" for i in range(400)]), 431),
        (b"GET /" + b"p" * 33_000 + b" HTTP/1.1\r\nHost: toy\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 100_000, 431),
        (post(b"1\r\n \r\n" * 6000 + b"0\r\n\r\n", CHUNKED, length=False), 400),
        (post(b"2\r\n{}XX0\r\n\r\n", CHUNKED, length=False), 400),
        (post(b"", "Content-Length: " + "9" * 5000, length=False), 400),
        (b"\r\n\n\nGET /ping HTTP/1.1\r\nHost: toy\r\n\r\n", 400),
        (b"GET /ping HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
        (b"GET http://toy/ping HTTP/1.1\r\nHost: a/b\r\n\r\n", 400),
        (post(REQUEST, *["A:"] * 9000), 431),
    ],
    ids=range(25),
)
def test_invalid_http_is_answered_in_json_and_closes(
    server: Running, sent: bytes, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reply = talk(server, sent)
    fields = content(reply)
    assert fields["type"] == "http_error"
    assert status(reply) == code
    assert reply.count(b"connection: close") == 1
    assert not any(python in fields["error"] for python in ("bytearray", "b'", "\\"))
    lines = [record for record in caplog.records if record.levelno > logging.DEBUG]
    assert [line.levelno for line in lines if line.name.startswith("uvicorn.")] == []
    (line,) = [line for line in lines if line.name == "djl_python_neuronx.server.http"]
    assert line.levelno == logging.INFO
    assert line.getMessage().endswith(f" reason={fields['error']!r}")
    assert_serves(server)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"HEAD /invocations HTTP/1.1\r\nHost: toy\r\nConnection: close\r\n\r\n", 405),
        (b"OPTIONS /invocations HTTP/1.1\r\nHost: toy\r\nConnection: close\r\n\r\n", 405),
        (b"GET /ping HTTP/1.0\r\n\r\n", 200),
        (post(REQUEST, CLOSE, "Expect: 100-continue"), 200),
        (post(REQUEST, "Connection: close, upgrade", "Upgrade: websocket"), 200),
        (post(REQUEST, "Connection: close, upgrade", "Upgrade: h2c", "HTTP2-Settings: AAMA"), 200),
        (post(b"5\r\nabcde\r\n0\r\nTrailer: x\r\n\r\n", CHUNKED, CLOSE, length=False), 400),
        (
            b"GET /%00%ff/"
            + b"p" * 20_000
            + b" HTTP/1.1\r\nHost: toy\r\nConnection: close\r\n\r\n",
            404,
        ),
        (post(REQUEST, CLOSE, "X-Request-Id: " + "x" * 20_000), 200),
        (b"\r\n" * 3 + post(REQUEST, CLOSE), 200),
        (post(REQUEST, CLOSE, path="HTTP://other:80/invocations?a=b"), 200),
        (b"GET http://toy?a HTTP/1.1\r\nHost: toy\r\nConnection: close\r\n\r\n", 405),
        (b"GET /ping HTTP/1.1\r\nHost: [::1]:8080\r\nConnection: close\r\n\r\n", 200),
    ],
    ids=range(13),
)
def test_odd_but_valid_http_is_answered(server: Running, sent: bytes, code: int) -> None:
    reply = talk(server, sent)
    assert status(reply) in {code, 100}
    assert f" {code} ".encode() in reply


def test_pipelined_requests_are_answered_in_order(server: Running) -> None:
    reply = talk(server, post(REQUEST) + post(b"{") + post(REQUEST, CLOSE))
    assert reply.count(answer([5, 6]).encode()) == 2
    assert reply.index(b" 200 ") < reply.index(b" 400 ") < reply.rindex(b" 200 ")


EMPTY_LINE = b"\r\n"


def test_an_empty_line_before_a_request_is_ignored(server: Running) -> None:
    """Old clients send one after a body."""
    reply = talk(server, EMPTY_LINE + post(REQUEST) + EMPTY_LINE + post(REQUEST, CLOSE))
    assert reply.count(answer([5, 6]).encode()) == 2
    client = connect(server)
    for _ in range(2):
        client.sendall(post(REQUEST))
        reply = b""
        while not reply.endswith(b"}"):
            reply += client.recv(65536)
        assert status(reply) == 200
        client.sendall(EMPTY_LINE)
    client.sendall(post(b"", CLOSE, path="/nothing"))
    assert b" 404 " in read_all(client)


def test_bytes_after_the_last_request_are_dropped() -> None:
    backend = ToyBackend(replace(TOY_SPEC, num_slots=2))
    backend.hang_at = {2}
    with serving(backend) as server:
        client = connect(server)
        client.sendall(post(REQUEST, CLOSE))
        assert backend.hanging.wait(PATIENCE_S)
        client.sendall(EMPTY_LINE)
        wait_until(lambda: not unread_by_server(server, client))
        backend.resume.set()
        reply = read_all(client)
        assert status(reply) == 200
        assert answer([5, 6]).encode() in reply


def unread_by_server(server: Running, client: socket.socket) -> int:
    """Bytes that the client has sent and the server has not read."""
    connections: set[Any] = server._server.server_state.connections  # type: ignore[assignment]
    now = list(connections)  # in one piece: the server's thread changes the set
    raws = [each._raw for each in now if each.client == client.getsockname()]
    if not raws:
        return 1  # not accepted yet
    received = ioctl(raws[0].get_extra_info("socket"), FIONREAD, bytes(4))
    return sum(received + ioctl(client, TIOCOUTQ, bytes(4)))


def test_a_silent_connection_is_closed_without_an_answer() -> None:
    """An answer would be that of a request which the client sends at the same moment."""
    with serving(request_head_timeout=SHORT_S) as server:
        for sent in (b"", EMPTY_LINE):
            client = connect(server)
            client.sendall(sent)
            assert read_all(client) == b""
        assert_serves(server)


def test_an_answer_before_the_whole_body_ends_the_connection() -> None:
    """Else the rest of the body would take from the time of the next request."""
    with serving(request_body_timeout=10 * PATIENCE_S) as server:
        reply = talk(server, post(b" ", "Content-Length: 150000", path="/nothing", length=False))
        assert (status(reply), b"connection: close" in reply) == (404, True)
        assert_serves(server)


@pytest.mark.parametrize("sent", [b"P", b"POST /invoc", b"POST / HTTP/1.1\r\nHost: a\r\nX: "])
def test_a_slow_head_ends(sent: bytes) -> None:
    with serving(request_head_timeout=SHORT_S) as server:
        client = connect(server)
        client.sendall(sent)
        fields = content(read_all(client))
        assert fields["type"] == "request_timeout"
        assert "option.request_head_timeout" in fields["error"]
        assert_serves(server)


@pytest.mark.parametrize("part", ["head", "body"])
def test_a_byte_now_and_then_does_not_extend_the_limit(part: str) -> None:
    with serving(**{f"request_{part}_timeout": SHORT_S}) as server:
        client = connect(server)
        client.sendall(post(REQUEST)[:-50] if part == "body" else b"GET / HTTP/1.1\r\n")
        started = time.monotonic()
        client.settimeout(0.02)
        reply = b""
        while not reply:
            assert time.monotonic() - started < PATIENCE_S
            try:
                client.sendall(b"a")
                reply = client.recv(65536)
            except TimeoutError:
                continue
        assert content(reply)["type"] == "request_timeout"
        client.close()
        wait_until(lambda: not server._server.server_state.connections)


def test_a_slow_body_ends_also_after_its_answer() -> None:
    with serving(request_body_timeout=SHORT_S) as server:
        reply = talk(server, post(REQUEST)[:-5])
        assert "option.request_body_timeout" in content(reply)["error"]
        assert reply.count(b"connection: close") == 1
        reply = talk(server, post(REQUEST, path="/nothing")[:-5])
        assert content(reply)["code"] == 404


def test_an_idle_connection_ends() -> None:
    with serving(keep_alive_timeout=SHORT_S) as server:
        reply = talk(server, post(REQUEST))  # reads until the server closes
        assert status(reply) == 200


def test_a_pause_within_the_keep_alive_time_is_longer_than_a_head_may_take() -> None:
    with serving(request_head_timeout=SHORT_S) as server:
        client = connect(server)
        for _ in range(2):
            client.sendall(post(REQUEST))
            reply = b""
            while not reply.endswith(b"}"):
                reply += client.recv(65536)
            assert status(reply) == 200
            time.sleep(2 * SHORT_S)
        client.sendall(b"P")
        assert content(read_all(client))["type"] == "request_timeout"


def test_a_client_that_does_not_read_is_dropped() -> None:
    spec = replace(TOY_SPEC, num_slots=2, max_model_len=4096, token_buckets=(4096,))
    backend = ToyBackend(spec)
    with serving(backend, write_timeout=SHORT_S) as server:
        loop = server.application.models[0].service.loop  # type: ignore[union-attr]
        client = connect(server, SO_RCVBUF=4096)
        (connection,) = wait_for_connections(server, 1)
        raw = connection._raw.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.sendall(post(json.dumps(body([5, 6], 4000, stream=True)).encode()))
        wait_until(lambda: len(backend.steps) > 3)
        wait_until(lambda: len(loop.streams) == 0 and not backend.acquired)
        wait_until(lambda: not server._server.server_state.connections)
        assert_serves(server)
        client.close()


def test_a_client_that_reads_steadily_keeps_its_answer() -> None:
    """As a stream, and as a whole with the end of the connection; slower than the buffer empties within the limit."""
    spec = replace(TOY_SPEC, num_slots=2, max_model_len=2048, token_buckets=(2048,))
    with serving(ToyBackend(spec), write_timeout=3.0) as server:
        replies: dict[socket.socket, bytes] = {}
        for more in ({"stream": True}, {"parameters": {"details": True}}):
            client = connect(server, SO_RCVBUF=4096)
            for connection in wait_for_connections(server, len(replies) + 1):
                raw = connection._raw.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            client.sendall(post(json.dumps(body([5, 6], 1200, **more)).encode(), CLOSE))
            replies[client] = b""
        reading = set(replies)
        while reading:
            time.sleep(0.3)
            for client in list(reading):
                part = client.recv(4096)
                replies[client] += part
                if not part:
                    reading.remove(client)
                    client.close()
        stream, whole = replies.values()
        assert stream.endswith(b"0\r\n\r\n")
        assert stream.count(b'"token"') == 1200
        head, _, rest = whole.partition(b"\r\n\r\n")
        assert f"content-length: {len(rest)}".encode() in head
        assert min(len(stream), len(rest)) > 65_536


def test_an_answer_that_nobody_fetches_does_not_keep_its_connection() -> None:
    with serving(write_timeout=10 * SHORT_S) as server:
        client = connect(server, SO_RCVBUF=4096)
        (connection,) = wait_for_connections(server, 1)
        raw = connection._raw.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        get = b"GET /metrics HTTP/1.1\r\nHost: toy\r\n"
        # More than the kernel takes, and less than the 64 KiB at which writing pauses.
        client.sendall(3 * (get + b"\r\n") + get + b"Connection: close\r\n\r\n")
        wait_until(lambda: connection.ending)
        assert connection._raw.get_write_buffer_size()
        wait_until(lambda: not server._server.server_state.connections)
        client.close()


def test_a_client_that_half_closes_and_reads_nothing_does_not_keep_its_connection() -> None:
    with serving(write_timeout=SHORT_S) as server:
        client = connect(server, SO_RCVBUF=4096)
        (connection,) = wait_for_connections(server, 1)
        raw = connection._raw.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        # Less than the 64 KiB at which writing pauses.
        client.sendall(3 * b"GET /metrics HTTP/1.1\r\nHost: toy\r\n\r\n")
        wait_until(lambda: connection._raw.get_write_buffer_size())
        client.shutdown(socket.SHUT_WR)
        wait_for_connections(server, 0)
        client.close()


def test_deltas_of_a_slow_reader_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_UNREAD_DELTAS", 10)
    backend = ToyBackend(replace(TOY_SPEC, num_slots=2), step_s=CROSSING_S)
    with serving(backend) as server:
        loop = server.application.models[0].service.loop  # type: ignore[union-attr]
        client = connect(server)
        (connection,) = wait_for_connections(server, 1)
        connection.flow.pause_writing()  # as for a full buffer
        client.sendall(post(json.dumps(body([5, 6], 120, stream=True)).encode(), CLOSE))
        wait_until(lambda: len(backend.steps) > 10 and len(loop.streams) == 0)
        wait_until(lambda: not backend.acquired)
        assert len(backend.steps) < 120
        server._server.servers[0].get_loop().call_soon_threadsafe(connection.flow.resume_writing)
        reply = read_all(client)
        assert b"reads too slowly" in reply
        assert reply.count(b'"token"') < 20
        assert_serves(server)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_stream_is_framed_for_its_version(
    version: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with serving() as server:
        sent = post(json.dumps(body([5, 6], 30, stream=True)).encode(), CLOSE)
        reply = talk(server, sent.replace(b"HTTP/1.1", b"HTTP/" + version, 1))
        wire, end = socket.socketpair()
        with wire, end:
            end.sendall(reply)
            end.shutdown(socket.SHUT_WR)
            response = HTTPResponse(wire)
            response.begin()
            lines = response.read().splitlines()
        assert response.getheader("transfer-encoding") == ("chunked" if version == b"1.1" else None)
        assert "".join([json.loads(line)["token"]["text"] for line in lines]) == answer([5, 6], 30)
        wait_until(lambda: any(" bytes=" in line for line in caplog.messages))
        (line,) = [line for line in caplog.messages if " bytes=" in line]
        assert f" bytes={len(reply)} " in line


def test_a_connection_that_has_ended_leaves_no_garbage() -> None:
    """A collection stops all streams."""
    with serving() as server:
        client = connect(server)
        (connection,) = map(weakref.ref, wait_for_connections(server, 1))
        gc.disable()
        try:
            for stream in (True, False):
                client.sendall(post(json.dumps(body([5, 6], stream=stream)).encode()))
                wait_until(lambda: client.recv(65536).endswith((b"0\r\n\r\n", b'"}')))
            client.close()
            wait_until(lambda: connection() is None)
        finally:
            gc.enable()


@pytest.mark.parametrize("behind", [b"", b"\r\n"])
def test_a_client_that_half_closes_has_left(behind: bytes) -> None:
    """Also if reading was stopped at the end of its body, for what lies behind."""
    backend = ToyBackend(replace(TOY_SPEC, num_slots=2))
    backend.hang_at = {2}
    with serving(backend) as server:
        loop = server.application.models[0].service.loop  # type: ignore[union-attr]
        client = connect(server)
        (connection,) = wait_for_connections(server, 1)
        sent = post(json.dumps(body([5, 6], 100)).encode())
        client.sendall(sent[:-1])
        wait_until(lambda: connection.cycle is not None and connection.cycle.body == b"")
        client.sendall(sent[-1:] + behind)
        assert backend.hanging.wait(PATIENCE_S)
        client.shutdown(socket.SHUT_WR)
        wait_until(lambda: len(loop.streams) == 0)
        backend.resume.set()
        client.close()


def test_a_connection_too_many_gets_503_and_a_probe_its_answer() -> None:
    with serving(max_connections=2) as server:
        held = [connect(server) for _ in range(2)]
        wait_for_connections(server, 2)
        assert status(talk(server, PROBE)) == 200
        reply = talk(server, post(REQUEST))
        assert content(reply)["type"] == "queue_full"
        assert "option.max_connections" in content(reply)["error"]
        assert b"retry-after: 1" in reply
        for client in held:  # the last one that may be, too
            client.sendall(post(REQUEST, CLOSE))
            assert status(read_all(client)) == 200
        wait_for_connections(server, 0)
        assert_serves(server)


def test_of_too_many_connections_the_oldest_without_a_request_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "SPARE_CONNECTIONS", 1)
    with serving(max_connections=2, request_head_timeout=3600) as server:
        held = [connect(server)]
        held[0].sendall(post(REQUEST))
        assert status(held[0].recv(65536)) == 200
        for count in (2, 3):
            held.append(connect(server))
            held[-1].sendall(b"GET /pi")
            wait_for_connections(server, count)
        for _ in range(3):
            # Itself is not kept, or it would be in the way of the next one.
            reply = talk(server, PROBE)
            assert (status(reply), reply.count(b"connection: close")) == (200, 1)
        assert held[1].recv(1) == b""
        held[2].sendall(b"ng HTTP/1.1\r\nHost: toy\r\n\r\n")  # the last of those before the limit
        assert status(read_all(held[2])) == 200
        held.append(connect(server))
        held[-1].sendall(post(REQUEST))
        assert status(held[-1].recv(65536)) == 200
        monkeypatch.setattr(http, "SPARE_CONNECTIONS", 0)
        assert talk(server, b"") == b""  # itself: all others have sent a request
        held[0].sendall(post(REQUEST, CLOSE))
        assert answer([5, 6]).encode() in read_all(held[0])
        for client in held:
            client.close()


SOMAXCONN = Path("/proc/sys/net/core/somaxconn")
QUEUED = 400


@pytest.mark.skipif(
    not SOMAXCONN.exists() or int(SOMAXCONN.read_text()) < QUEUED,
    reason="the system's own limit of the queue is below",
)
@pytest.mark.parametrize("port", [0, 1])
def test_a_burst_of_connections_waits_in_the_kernel(port: int) -> None:
    """Of one that the kernel drops the client tries again after a second, then after two …"""
    with held_port() as admin_port, serving(admin_port=admin_port) as server:
        wait_until(lambda: len(server._server.servers) == 2)
        address = server._server.servers[port].sockets[0].getsockname()
        blocked, go_on = threading.Event(), threading.Event()
        server._server.servers[0].get_loop().call_soon_threadsafe(
            lambda: (blocked.set(), go_on.wait(2 * PATIENCE_S))
        )
        assert blocked.wait(PATIENCE_S)
        held, connected = [socket.socket() for _ in range(QUEUED)], select.poll()
        for client in held:
            client.setblocking(False)
            client.connect_ex(address)
            connected.register(client, select.POLLOUT)
        try:
            wait_until(lambda: len(connected.poll(0)) == QUEUED)
        finally:
            for client in held:
                client.close()
            go_on.set()
        assert_serves(server)


def test_a_connection_whose_bytes_are_not_read_yet_is_not_silent() -> None:
    with serving() as server:
        loop = server._server.servers[0].get_loop()
        clients = [connect(server)]
        (first,) = wait_for_connections(server, 1)
        clients.append(connect(server))
        (second,) = {*wait_for_connections(server, 2)} - {first}
        assert not first.waits_unread()
        loop.call_soon_threadsafe(first._raw.pause_reading)
        clients[0].sendall(PROBE)
        wait_until(first.waits_unread)
        for dropped, kept in ((second, [first]), (None, [first])):
            loop.call_soon_threadsafe(http.drop_oldest, server._server._silent)
            wait_until(lambda kept=kept: list(server._server._silent) == kept)
            assert dropped is None or dropped.ending
        assert not first.ending
        assert not second.waits_unread()
        loop.call_soon_threadsafe(first._raw.resume_reading)
        assert status(clients[0].recv(65536)) == 200
        for client in clients:
            client.close()


@pytest.mark.parametrize(("more", "code"), [(0, 200), (1, 431)])
def test_a_head_may_have_so_many_bytes_and_no_more(server: Running, more: int, code: int) -> None:
    """Each header's colon and line end count as three."""
    length = 32 * 1024 + more - sum(map(len, ["/ping?", "host", "toy", "connection", "close"])) - 6
    head = f"GET /ping?{'x' * length} HTTP/1.1\r\nHost: toy\r\n{CLOSE}\r\n\r\n"
    assert status(talk(server, head.encode())) == code


def test_the_limit_of_open_files_allows_for_the_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = [1024, 4000]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(state))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: state.__setitem__(slice(None), new))
    http.allowed_connections.cache_clear()
    assert http.allowed_connections(100) == 100
    assert state == [1024, 4000]
    assert http.allowed_connections(1000) == 1000
    assert state == [1000 + 64 + 768, 4000]
    assert http.allowed_connections(4096) == 4000 - 64 - 768
    assert state == [4000, 4000]
    http.allowed_connections.cache_clear()


@pytest.mark.parametrize("expects", [(), ("Expect: 100-continue",)])
def test_a_declared_body_over_the_limit_is_refused_unread(
    server: Running, expects: tuple[str, ...]
) -> None:
    client = connect(server)
    client.sendall(post(b"", *expects, "Content-Length: 200001", length=False))
    reply = read_all(client)
    assert content(reply)["type"] == "body_too_large"
    assert "200000 bytes" in content(reply)["error"]
    assert b" 100 " not in reply
    assert_serves(server)


def test_a_body_may_have_as_many_bytes_as_the_limit(server: Running) -> None:
    assert status(talk(server, post(REQUEST.ljust(200_000), CLOSE))) == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_who_sends_too_much_still_reads_the_answer(server: Running, chunked: bool) -> None:
    """Sent with one blocking call: bytes behind the limit are on the way when the answer is written."""
    much = b" " * 1_000_000
    sent = post(much)
    if chunked:
        sent = post(b"f4240\r\n" + much + b"\r\n0\r\n\r\n", CHUNKED, length=False)
    reply = talk(server, sent)
    assert content(reply)["type"] == "body_too_large"
    assert b"connection: close" in reply
    assert_serves(server)


def test_bytes_behind_a_refusal_are_read_in_small_parts(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "DROP_PAUSE_S", PATIENCE_S, raising=False)
    client = connect(server)
    client.sendall(post(REQUEST, "A: " + "x" * 33_000))
    assert status(client.recv(65536)) == 431
    client.settimeout(SHORT_S)
    taken = 0
    with suppress(TimeoutError):  # the kernel's buffers are full
        while taken < 2**26:
            taken += client.send(b" " * 2**20)
    assert taken < 2**26
    client.close()


def test_a_body_that_nobody_reads_keeps_the_connection(server: Running) -> None:
    kept = talk(server, post(b" " * 20_000, path="/nothing") + post(REQUEST, CLOSE))
    assert answer([5, 6]).encode() in kept


def test_bodies_in_flight_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODIES", 2)
    with serving(max_body_bytes=200_000) as server:
        application = server.application
        declaring = connect(server)  # declares much and sends little: keeps nobody out
        declaring.sendall(post(b"", "Content-Length: 200000", length=False) + b" ")
        sent = post(b"", "Content-Length: 190000", length=False) + b" " * 189_000
        held = [connect(server) for _ in range(2)]
        for client in held:
            client.sendall(sent)
        wait_until(lambda: application.bodies.num_bytes == 2 * 189_000)
        for _ in range(4):
            reply = talk(server, sent)
            assert content(reply)["type"] == "queue_full"
            assert b"retry-after: 1" in reply
        assert application.bodies.num_bytes == 2 * 189_000
        assert_serves(server)  # a short body is read in any case
        for client in [declaring, *held]:
            client.close()
        wait_until(lambda: application.bodies.num_bytes == 0)
        # Nor do short ones keep out long ones.
        short = [connect(server) for _ in range(8)]
        for client in short:
            client.sendall(post(b"", "Content-Length: 65536", length=False) + b" " * 65_000)
            wait_until(lambda client=client: not unread_by_server(server, client))
        assert status(talk(server, post(REQUEST.ljust(190_000), CLOSE))) == 200
        assert application.bodies.num_bytes == 0


def test_six_requests_of_128_sequences_do_not_starve_the_seventh() -> None:
    with serving(ToyBackend(replace(TOY_SPEC, num_slots=2), step_s=0.005)) as server:
        loop = server.application.models[0].service.loop  # type: ignore[union-attr]
        many = json.dumps(body([5, 6], parameters={"n": 128, "do_sample": True})).encode()
        greedy = [connect(server) for _ in range(6)]
        for client in greedy:
            client.sendall(post(many))
        wait_until(lambda: len(loop.streams) > 5 * 128)
        assert answer([7]).encode() in talk(server, post(json.dumps(body([7])).encode(), CLOSE))
        assert len(loop.streams) > 3 * 128
        for client in greedy:
            client.close()
        wait_until(lambda: not loop.streams)


def test_a_body_is_not_kept_while_its_answer_is_made() -> None:
    backend = ToyBackend(replace(TOY_SPEC, num_slots=2))
    backend.hang_at = {2}
    with serving(backend) as server:
        content = post(json.dumps(body([5, 6], 50)).encode().ljust(1_000_000), CLOSE)
        client = connect(server)
        tracemalloc.start()
        client.sendall(content)
        assert backend.hanging.wait(PATIENCE_S)
        # The engine may be at this step before the event loop lets go of the body.
        wait_until(lambda: tracemalloc.get_traced_memory()[0] < 500_000)
        _, most_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most_bytes > 1_000_000
        assert server.application.bodies.num_bytes == 0
        backend.resume.set()
        assert status(read_all(client)) == 200


@pytest.mark.parametrize("prompt", ["~", "~" * 3000])
def test_a_tokenizer_that_panics_fails_its_request_in_json(prompt: str) -> None:
    """A short prompt is tokenised in the event loop, a long one on a thread."""
    with serving() as server:
        server.application.models[0].service.tokenizer = PanickingTokenizer()  # type: ignore[union-attr]
        reply = talk(server, post(json.dumps({"inputs": prompt}).encode(), CLOSE))
        assert (status(reply), content(reply)["type"]) == (500, "serving_error")
        assert_serves(server)


class HoldingTokenizer(ToyTokenizer):
    """Waits for the test with each text that has a <77>, and notes them all."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.go_on = threading.Event()

    def encode(self, text: str, **how: Any) -> list[int]:
        self.seen.append(text)
        assert "<77>" not in text or self.go_on.wait(PATIENCE_S)
        return super().encode(text, **how)


def test_texts_that_wait_are_bounded_and_go_with_their_clients() -> None:
    with serving(max_waiting=TEXT_THREADS) as server:
        service: Any = server.application.models[0].service
        service.tokenizer = tokenizer = HoldingTokenizer()
        most = service.loop.most
        held = [connect(server) for _ in range(TEXT_THREADS)]
        for client in held:
            client.sendall(post(json.dumps(body([77], 1)).encode(), CLOSE))
        wait_until(lambda: len(tokenizer.seen) == TEXT_THREADS)
        waiting = [connect(server) for _ in range(most)]  # as many as the engine takes
        for i, client in enumerate(waiting):
            client.sendall(post(json.dumps(body([80 + i], 1)).encode(), CLOSE))
        wait_until(lambda: len(service.threads._open) == TEXT_THREADS + most)
        reply = talk(server, post(REQUEST, CLOSE))
        assert content(reply)["type"] == "queue_full"
        assert "option.max_waiting" in content(reply)["error"]
        assert b"retry-after: 1" in reply
        rejected = service.metrics["rejected_requests_total"].labels("queue_full")
        assert rejected._value.get() == 1
        for client in waiting[:-1]:
            client.close()
        wait_until(lambda: len(service.threads._open) == TEXT_THREADS + 1)
        last = connect(server)
        last.sendall(post(REQUEST, CLOSE))
        wait_until(lambda: len(service.threads._open) == TEXT_THREADS + 2)
        tokenizer.go_on.set()
        replies = [read_all(client) for client in (*held, waiting[-1], last)]
        assert [status(reply) for reply in replies] == [200] * len(replies)
        assert sorted(tokenizer.seen) == ["<5><6>", *["<77>"] * TEXT_THREADS, f"<{79 + most}>"]


def test_a_body_is_not_kept_when_its_client_has_left_the_queue() -> None:
    with serving() as server:
        service: Any = server.application.models[0].service
        service.tokenizer = tokenizer = HoldingTokenizer()
        held = [connect(server) for _ in range(TEXT_THREADS)]
        for client in held:
            client.sendall(post(REQUEST.replace(b"<5>", b"<77>"), CLOSE))
        wait_until(lambda: len(tokenizer.seen) == TEXT_THREADS)
        tracemalloc.start()
        client = connect(server)
        client.sendall(post(REQUEST.ljust(1_060_000)))
        wait_until(lambda: len(service.threads._open) == TEXT_THREADS + 1)
        assert tracemalloc.get_traced_memory()[0] > 1_000_000
        client.close()
        wait_until(lambda: tracemalloc.get_traced_memory()[0] < 500_000)
        tracemalloc.stop()
        tokenizer.go_on.set()
        for client in held:
            assert status(read_all(client)) == 200


def test_work_beside_the_event_loop_needs_no_new_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:

        def refuse(_: threading.Thread) -> None:
            msg = "can't start new thread"
            raise RuntimeError(msg)

        monkeypatch.setattr(threading.Thread, "start", refuse)
        for path in ("/metrics", "/openapi.json"):
            reply = talk(server, f"GET {path} HTTP/1.1\r\nHost: toy\r\n{CLOSE}\r\n\r\n".encode())
            assert status(reply) == 200
        assert status(talk(server, post(REQUEST.ljust(1_060_000), CLOSE))) == 200
        monkeypatch.undo()


class NotedIds(list[int]):
    """Token ids that note the threads by which they are gone through."""

    threads: ClassVar[set[str]] = set()

    def __iter__(self) -> Iterator[int]:
        self.threads.add(threading.current_thread().name)
        return super().__iter__()


class NotingTokenizer(ToyTokenizer):
    """Eight ids a letter."""

    def encode(self, text: str, **_: object) -> list[int]:
        return NotedIds(8 * len(text) * [5])


@pytest.mark.parametrize(("letters", "inline"), [(10, True), (1000, False)])
def test_long_prompts_are_not_gone_through_in_the_event_loop(letters: int, inline: bool) -> None:
    """128 prompts of 8,000 tokens would hold it for a tenth of a second."""
    long = replace(TOY_SPEC, max_model_len=8192, prefill_buckets=(8192,), token_buckets=())
    with serving(ToyBackend(long)) as server:
        server.application.models[0].service.tokenizer = NotingTokenizer()  # type: ignore[union-attr]
        NotedIds.threads.clear()
        prompts = ["x" * letters] * (1 if inline else 128)
        payload = {"inputs": prompts, "parameters": {"max_new_tokens": 1}}
        reply = talk(server, post(json.dumps(payload).encode(), CLOSE))
        assert reply.count(b"generated_text") == len(prompts), reply[:1000]
        assert NotedIds.threads
        assert (server._thread.name in NotedIds.threads) == inline


def test_a_load_that_ends_the_interpreter_is_a_failed_load() -> None:
    """Code of a model folder may call `sys.exit`; on a thread that goes unnoticed."""
    failures: list[ServingError] = []

    def load(*_: Any, **__: Any) -> Any:
        sys.exit(3)

    loader = Loader({Model("toy"): load}, lambda: [()], print, failures.append)
    loader.thread.start()
    loader.thread.join(PATIENCE_S)
    (failure,) = failures
    assert "SystemExit" in str(failure)


PROGRAM = """
import os, socket, sys, threading, time
from dataclasses import replace
from djl_python_neuronx.errors import BackendError
from djl_python_neuronx.server.process import Server, serve
from djl_python_neuronx.server.http import LimitedProtocol
from djl_python_neuronx.server.models import Model
from djl_python_neuronx.telemetry import setup_logging
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend
from tests.doubles.toy_service import toy_service
from tests.doubles.toy_tokenizer import ToyTokenizer
port, drain, state = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
setup_logging()
spec, step_s = TOY_SPEC, 0.02 if state == "burst" else 0.05
received, stop = LimitedProtocol.data_received, Server.stop

def data_received(self, data):
    received(self, data)
    if b"/ping" not in data:
        os.write(2, b"received\\n")

def noted_stop(self):
    stop(self)
    os.write(2, b"stopped\\n")

LimitedProtocol.data_received, Server.stop = data_received, noted_stop
if state == "unread":
    spec, step_s = replace(TOY_SPEC, max_model_len=4096, token_buckets=(4096,)), 0.0
    made, pause = LimitedProtocol.connection_made, LimitedProtocol.pause_writing

    def connection_made(self, transport):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    def pause_writing(self):
        os.write(2, b"paused\\n")
        pause(self)

    LimitedProtocol.connection_made, LimitedProtocol.pause_writing = connection_made, pause_writing

class LastTokenizer(ToyTokenizer):
    def encode(self, text, **_):
        on_death(BackendError("the engine is gone"))
        time.sleep(3600)

backend = ToyBackend(spec, step_s=step_s)
if state == "prefill":
    backend.hang_at = {0}
if state == "device":
    backend.hang_at = {2}

def note_hang():
    backend.hanging.wait()
    os.write(2, b"hanging\\n")

threading.Thread(target=note_hang, daemon=True).start()

def load(stage, **given):
    global on_death
    on_death = given["on_death"]
    while state == "load":
        time.sleep(0.1)
    options = {"max_connections": 20} if state == "burst" else {"request_body_timeout": 3600}
    service = toy_service(backend, on_death=on_death, **options)
    if state == "death":
        service.tokenizer = LastTokenizer()
    return service

loads, place = {Model("toy"): load}, {"host": "127.0.0.1", "port": port}
sys.exit(serve(loads, prepare=lambda: [()], exit_on_error=True, drain_s=drain, **place))
"""


class Program:
    """A server in a process of its own, with an open connection of the kind that `state` names."""

    def __init__(self, state: str, drain_s: float) -> None:
        with held_port() as self.port:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(self.port), str(drain_s), state],
                cwd=Path(__file__).parents[2],
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            )
            self._log = ""
            self.client = socket.socket()
            self.client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wait_until(self._connects)
        if state != "load":
            wait_until(lambda: b" 200 " in self._get_ping())
        stream = json.dumps(body([5, 6], 120, stream=True)).encode()
        sent = {
            "load": b"GET /pi",
            "body": post(stream)[:-5],
            "unread": post(json.dumps(body([5, 6], 4000, stream=True)).encode()),
            "prefill": post(stream),
            "device": post(stream),
            "burst": post(stream, CLOSE),
            "death": post(json.dumps(body([5] * 1000)).encode()),  # tokenised on a thread
        }
        self.client.sendall(sent[state])
        awaited = {"unread": "paused", "prefill": "hanging", "device": "hanging"}
        self.wait_for_line(awaited.get(state, "received"))

    def wait_for_line(self, awaited: str) -> None:
        """Read the log up to a line, or to its end."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._log += line
            if line == f"{awaited}\n":
                break

    def _connects(self) -> bool:
        return self.client.connect_ex(("127.0.0.1", self.port)) == 0

    def _get_ping(self) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE_S) as client:
            client.sendall(b"GET /ping HTTP/1.0\r\n\r\n")
            return client.recv(65536)

    def end(self, *signals: int) -> tuple[int, str]:
        """Send signals; returns status and log."""
        for number in signals:
            self.process.send_signal(number)
            self.wait_for_line("stopped")  # two that come at once are one
        code = self.process.wait(PATIENCE_S)
        self.wait_for_line("the end")
        self.client.close()
        return code, self._log


@pytest.mark.parametrize("spare_descriptors", [None, 50])
def test_probes_and_streams_go_on_in_bursts_of_connections(spare_descriptors: int | None) -> None:
    """Of more than twice as many as there may be; then the process has too few descriptors for those that may be."""
    program = Program("burst", 0.5)
    address = ("127.0.0.1", program.port)
    program.client.settimeout(PATIENCE_S)
    reply = program.client.recv(65536)  # from now on it needs no further file
    if spare_descriptors is not None:
        used = num_descriptors(program.process.pid)
        limit = used + spare_descriptors
        resource.prlimit(program.process.pid, resource.RLIMIT_NOFILE, (limit, limit))
    held, connected = [], select.poll()
    for _ in range(200):
        held.append(socket.socket())
        held[-1].setblocking(False)
        held[-1].connect_ex(address)
        connected.register(held[-1], select.POLLOUT)
    wait_until(lambda: len(connected.poll(0)) == len(held))
    for _ in range(5):
        assert b" 200 " in program._get_ping()
    reply += read_all(program.client)
    assert reply.count(b'"token"') == 120
    for client in held:
        client.close()
    code, log = program.end(signal.SIGTERM)
    assert code == 0
    assert "Traceback" not in log
    assert "although a thread still runs" not in log
    assert log.count("connection_not_accepted") == (spare_descriptors is not None)


STATES = ["load", "body", "unread", "prefill", "device"]


@pytest.mark.parametrize("state", STATES)
def test_a_stop_ends_after_the_drain_what_would_take_an_hour(state: str) -> None:
    program = Program(state, 0.5)
    client = program.client.dup()
    client.settimeout(PATIENCE_S)
    code, log = program.end(signal.SIGTERM)
    if state in {"load", "body", "device"}:
        reply = read_all(client)
        assert b'"backend_unavailable"' in reply or b'"request_aborted"' in reply
    client.close()
    assert (code, "Traceback" in log) == (0, False), log


def test_a_lost_engine_ends_the_process_as_a_signal_does() -> None:
    """A text is being tokenised, for an hour."""
    code, log = Program("death", 0.5).end()
    assert (code, "Traceback" in log) == (1, False), log


@pytest.mark.parametrize(
    ("state", "number"),
    [("load", signal.SIGTERM), ("unread", signal.SIGINT), ("device", signal.SIGTERM)],
)
def test_a_second_signal_ends_at_once(state: str, number: int) -> None:
    code, log = Program(state, 3600.0).end(number, number)
    # A load has no requests that are drained: the first signal may have ended it.
    assert code in ({128 + number} if state != "load" else {0, 128 + number}), log
    assert "Traceback" not in log


def test_the_default_drain_fits_the_grace_of_thirty_seconds() -> None:
    from djl_python_neuronx import cli

    drain_s = cli._parser().parse_args(["serve"]).drain
    assert drain_s + 2 <= 28


def test_the_limits_hold_before_the_model_is_loaded() -> None:
    application = Application(Model("toy", ServingOptions(request_head_timeout=SHORT_S)))
    running = Running(application)
    try:
        assert content(talk(running, b"G"))["type"] == "request_timeout"
    finally:
        running.close()
