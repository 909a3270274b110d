"""Clients of `soak.py`, ordinary and hostile: what each sends, how it reads, and what it may get.

A client is a function of a `Case` in `CLIENTS`. It returns the outcome of each of its requests (`judge`). An outcome
that its list does not have is wrong: so a body that is cut must not be answered, and one that is whole must be, even if
its client is slow.
"""

from __future__ import annotations

import io
import json
import math
import random
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from http.client import HTTPException, HTTPResponse, IncompleteRead
from pathlib import Path
from typing import Any, Protocol

from tests.clients.answers import FORMS, Question, Reply, judge

SSE = "text/event-stream"
PATIENCE_S = 60.0
"""A connection on which nothing comes for as long hangs."""
FLOOD = 64
"""Requests, or connections, of one client at once: more than have a place in the queue."""
RIGHT = frozenset({"right", "error 503 queue_full", "error 408 request_timeout"})
LIMIT_S = 2
"""Time limits of the embedded server: `LIMITS`."""
LIMITS: Mapping[str, Any] = {
    "max_body_bytes": 2**20,
    "request_head_timeout": LIMIT_S,
    "request_body_timeout": LIMIT_S,
    "write_timeout": LIMIT_S,
    "keep_alive_timeout": LIMIT_S,
}
BAD = frozenset({"error 400 bad_request", "error 400 unsupported_parameter"})


class Door(Protocol):
    """A way into the service."""

    port: int | None
    """Of HTTP; None: there is none."""

    def ask(self, question: Question, form: str, leave_s: float | None = None) -> Reply:
        """Send a request and read until its end, or leave after some seconds."""

    def post(self, body: bytes, headers: Mapping[str, str], leave_s: float | None = None) -> Reply:
        """The same with any body."""


@dataclass(frozen=True)
class Case:
    """A request to make."""

    door: Door
    question: Question
    form: str
    text: str
    """The right answer."""
    pick: random.Random

    def judge(self, reply: Reply, *, leaves: bool = False) -> str:
        """The outcome of an answer to the question. An error in the body of a batch is an error like others."""
        outcome = judge(reply, self.form, self.text, leaves=leaves, statuses=range(400, 600))
        return outcome.replace("error in body", "error")

    @property
    def body(self) -> bytes:
        """The request's body."""
        return self.question.body(self.form)

    def head(self, *lines: str, length: int | None = None) -> bytes:
        """The request's head. `lines`: headers beside those of an ordinary client."""
        accept = [f"accept: {SSE}"] if self.form == "sse" else []
        sizes = [] if length is None else [f"content-length: {length}"]
        lines = ("host: soak", *accept, *sizes, *lines)
        return "\r\n".join(["POST /invocations HTTP/1.1", *lines, "", ""]).encode("latin-1")


@dataclass(frozen=True)
class Client:
    """A kind of client."""

    run: Callable[[Case], list[str]]
    share: float
    """Of all clients that are made."""
    outcomes: frozenset[str]
    """Outcomes that its requests may have."""
    http: bool
    """True if it needs its own connection."""


CLIENTS: dict[str, Client] = {}
_Run = Callable[[Case], list[str]]


def client(
    share: float, *outcomes: str | Iterable[str], http: bool = False
) -> Callable[[_Run], _Run]:
    """Add a function to `CLIENTS`."""
    allowed = [[each] if isinstance(each, str) else each for each in outcomes]

    def add(run: _Run) -> _Run:
        CLIENTS[run.__name__] = Client(run, share, frozenset().union(*allowed), http)
        return run

    return add


@client(50, RIGHT)
def ordinary(case: Case) -> list[str]:
    return [case.judge(case.door.ask(case.question, case.form))]


@client(5, RIGHT, "left")
def leaves_before_the_answer(case: Case) -> list[str]:
    case = replace(case, form="json")
    reply = case.door.ask(case.question, case.form, leave_s=case.pick.uniform(0, 0.05))
    return [case.judge(reply, leaves=True)]


@client(8, RIGHT, "left")
def leaves_a_stream(case: Case) -> list[str]:
    case = replace(case, form=case.pick.choice(FORMS[1:]))
    reply = case.door.ask(case.question, case.form, leave_s=case.pick.uniform(0, 0.5))
    return [case.judge(reply, leaves=True)]


@client(0.15, RIGHT)
def flood(case: Case) -> list[str]:
    with ThreadPoolExecutor(FLOOD) as threads:
        asks = [threads.submit(case.door.ask, case.question, case.form) for _ in range(FLOOD)]
    return [case.judge(ask.result()) for ask in asks]


def _fields(prompt: str = "1 2 3", **parameters: Any) -> bytes:  # noqa: ANN401
    return json.dumps({"inputs": prompt, "parameters": parameters}).encode()


BODIES: Mapping[str, bytes] = {
    "empty": b"",
    "not UTF-8": _fields().replace(b"2", b"\xff"),
    "half a surrogate": _fields().replace(b"2", rb"\ud800"),
    "a control character": _fields().replace(b"2", b"\x00"),
    "deep": b"[" * 100_000,
    "deep inside": _fields(stop=0).replace(b"0", b"[" * 5000 + b"]" * 5000),
    "many keys": _fields(**{f"key{i}": i for i in range(20_000)}),
    "a number": _fields(max_new_tokens=10**400),
    "not a number": _fields(temperature=float("nan")),
    "a list": b"[1, 2]",
    "two values": _fields() * 2,
    "no text": b'{"inputs": {"a": 1}}',
    "no prompt": _fields(""),
    "unknown parameter": _fields(no_such_parameter=1),
    "a value": _fields(top_p=7),
    "stop strings": _fields(stop=["a"] * 10_000),
}


@client(10, BAD, "error 503 queue_full")
def bad_body(case: Case) -> list[str]:
    body = BODIES[case.pick.choice([*BODIES])]
    return [case.judge(case.door.post(body, {"content-type": "application/json"}))]


@client(3, BAD)
def cut_json(case: Case) -> list[str]:
    body = case.body[: case.pick.randrange(len(case.body))]
    return [case.judge(case.door.post(body, {}))]


@client(2, "error 413 prompt_too_long")
def long_prompt(case: Case) -> list[str]:
    return [case.judge(case.door.post(_fields("one two " * 500), {}))]


@client(5, RIGHT, BAD, "answered", "error 413 prompt_too_long")
def mutated_body(case: Case) -> list[str]:
    """Send a changed body. Its meaning is not known here, so the text of an answer is not judged."""
    body = bytearray(case.body)
    for _ in range(case.pick.randint(1, 4)):
        place = case.pick.randrange(len(body))
        match case.pick.randrange(3):
            case 0:
                body[place] = case.pick.randrange(256)
            case 1:
                del body[place]
            case 2:
                body[place:place] = case.pick.choice([b"0", b'"', b"}", b"[", b"\\", b"null"])
    reply = case.door.post(bytes(body), {})
    if reply.status != 200 or b'"code"' in reply.data:
        return [replace(case, form="json").judge(reply)]
    last = json.loads(reply.data.splitlines()[-1])
    return ["answered" if isinstance(last["generated_text"], str) else f"wrong: {last}"]


HEADERS: Sequence[Mapping[str, str]] = (
    {"x-request-id": "x" * 4000},
    {"x-request-id": "\" } \\ %s {0} ' \xe9 \t"},
    {"content-type": "application/x-www-form-urlencoded; charset=utf-16"},
    {"content-type": ";;;=,"},
    {"accept": "text/event-stream;q=0, */*, " + "a/b, " * 500},
    {f"x-header-{i}": str(i) for i in range(60)},
    {"content-encoding": "gzip"},
    {"x-amzn-sagemaker-custom-attributes": "handler=partition;model_id=/"},
    {"requestid": "same", "x-amzn-sagemaker-inference-id": "same"},
    {"batch_size": "3", "batch_000.data": "x", "reset_rollingbatch": "true", "seed": "x"},
    {"model_id": "/", "option.model_id": "/", "output_formatter": "json", "model_dir": "/"},
)


@client(4, RIGHT)
def odd_headers(case: Case) -> list[str]:
    case = replace(case, form="json")
    return [case.judge(case.door.post(case.body, case.pick.choice(HEADERS)))]


class _Received(io.BytesIO):
    """Bytes as the socket of an `HTTPResponse`, which stay open for the next one."""

    def makefile(self, _mode: str) -> _Received:
        return self

    def close(self) -> None:
        """Do nothing."""


def replies(data: bytes) -> list[Reply]:
    """The responses in what a connection has brought. One that is cut, or none, has `timed_out`: its client left."""
    received, found = _Received(data), []
    while not found or received.tell() < len(data):
        response = HTTPResponse(received, method="POST")
        try:
            response.begin()
            body, cut = response.read(), False
        except IncompleteRead as error:
            body, cut = error.partial, True
        except HTTPException:  # the head is cut, or no response
            return [*found, Reply(0, b"", timed_out=True)]
        found.append(Reply(response.status, body, timed_out=cut, headers=dict(response.headers)))
    return found


def talk(
    case: Case,
    *script: bytes | float | Callable[[socket.socket], bool],
    close_half: bool = False,
    reset: bool = False,
    max_bytes: float = math.inf,
    rate: tuple[int, float] = (65536, 0.0),
) -> list[Reply]:
    """Send bytes, with pauses in seconds or until something holds for the connection; read until the server closes.

    `close_half`: say that nothing more will be sent. `max_bytes`: leave when as many have come; `reset`: by a reset.
    `rate`: bytes to read at once, and the pause after them; then the receive buffer is as small.
    """
    data = b""
    with socket.socket() as wire:
        wire.settimeout(PATIENCE_S)
        if rate[1]:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rate[0])
        wire.connect(("127.0.0.1", case.door.port))
        with suppress(BrokenPipeError, ConnectionResetError):  # an answer may be there even so
            _send(wire, script)
            if close_half:
                wire.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            while len(data) < max_bytes and (chunk := wire.recv(rate[0])):
                data += chunk
                time.sleep(rate[1])
        if reset:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return replies(data)


def _send(
    wire: socket.socket, script: Iterable[bytes | float | Callable[[socket.socket], bool]]
) -> None:
    for part in script:
        if isinstance(part, bytes):
            wire.sendall(part)
        elif callable(part):
            deadline_s = time.monotonic() + PATIENCE_S
            while not part(wire) and time.monotonic() < deadline_s:
                time.sleep(0.05)
        else:
            time.sleep(part)


def _is_closed_by_server(wire: socket.socket) -> bool:
    """As the kernel has it: a client that does not read sees it too late. Source: proc_net_tcp.rst."""
    ends = [f"0100007F:{port:04X}" for _, port in (wire.getpeername(), wire.getsockname())]
    established = [*ends, "01"]
    lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()
    return not any(line.split()[1:4] == established for line in lines)


def _only(case: Case, found: list[Reply]) -> list[str]:
    if len(found) > 1:
        return [f"wrong: {len(found)} answers to one request: {found}"]
    outcome = case.judge(found[0], leaves=True)
    return ["closed" if outcome == "left" else outcome]


CLOSE = "connection: close"


@client(3, RIGHT, "closed", http=True)
def closes_its_half(case: Case) -> list[str]:
    whole = case.head(CLOSE, length=len(case.body)) + case.body
    return _only(case, talk(case, whole, close_half=True))


@client(3, "closed", BAD, http=True)
def cut_body(case: Case) -> list[str]:
    """Also one whose JSON is whole, but shorter than its length."""
    most = len(case.body)
    sent = case.body[: case.pick.choice([0, case.pick.randrange(most), most])]
    length = most + case.pick.randint(1, 10**6)
    return _only(case, talk(case, case.head(CLOSE, length=length), sent, close_half=True))


@client(3, "closed", BAD, http=True)
def cut_chunks(case: Case) -> list[str]:
    """Without the last chunk."""
    chunk = b"%x\r\n%b\r\n" % (len(case.body), case.body)
    sent = chunk[: case.pick.choice([case.pick.randrange(len(chunk)), len(chunk)])]
    head = case.head(CLOSE, "transfer-encoding: chunked")
    return _only(case, talk(case, head, sent, close_half=True))


@client(2, "closed", http=True)
def leaves_while_it_sends(case: Case) -> list[str]:
    whole = case.head(length=len(case.body)) + case.body
    sent = whole[: case.pick.randrange(len(whole))]
    return _only(case, talk(case, sent, max_bytes=0, reset=case.pick.random() < 0.5))


@client(3, RIGHT, "closed", http=True)
def resets(case: Case) -> list[str]:
    whole = case.head(CLOSE, length=len(case.body)) + case.body
    max_bytes = case.pick.choice([0, 1, 500, 2000])
    return _only(case, talk(case, whole, CLOSE_SOON_S, max_bytes=max_bytes, reset=True))


CLOSE_SOON_S = 0.02


@client(2, RIGHT, http=True)
def sends_slowly(case: Case) -> list[str]:
    whole = case.head(CLOSE, length=len(case.body)) + case.body
    step = len(whole) // 10 + 1
    parts = [whole[i : i + step] for i in range(0, len(whole), step)]
    return _only(case, talk(case, *[each for part in parts for each in (part, 0.05)]))


@client(2, RIGHT, http=True)
def sends_chunks(case: Case) -> list[str]:
    body = case.body
    chunks = [
        b"%x;a=b\r\n%b\r\n" % (len(body[i : i + 7]), body[i : i + 7])
        for i in range(0, len(body), 7)
    ]
    head = case.head(CLOSE, "transfer-encoding: chunked")
    return _only(case, talk(case, head, *chunks, b"0\r\n\r\n"))


@client(2, RIGHT, http=True)
def reads_slowly(case: Case) -> list[str]:
    whole = case.head(CLOSE, length=len(case.body)) + case.body
    return _only(case, talk(case, whole, rate=(512, 0.02)))


@client(1, "error 408 request_timeout", http=True)
def stops_in_its_request(case: Case) -> list[str]:
    whole = case.head(length=len(case.body)) + case.body
    return _only(case, talk(case, whole[: case.pick.randrange(1, len(whole))]))


@client(1, RIGHT, http=True)
def stays_when_it_has_its_answer(case: Case) -> list[str]:
    return _only(case, talk(case, case.head(length=len(case.body)) + case.body))


@client(0.5, "closed", http=True)
def never_reads(case: Case) -> list[str]:
    """Answers of many requests, which fill all buffers."""
    num_requests = 2000
    request = b"GET /metrics HTTP/1.1\r\nhost: soak\r\n\r\n"
    found = talk(case, request * num_requests, _is_closed_by_server, rate=(4096, 1e-6))
    whole = [reply for reply in found if not reply.timed_out]
    return ["closed" if len(whole) < num_requests else "wrong: everything was kept for it"]


@client(3, RIGHT, "error 400 bad_request", http=True)
def sends_several_at_once(case: Case) -> list[str]:
    """Two good requests around a bad one, on one connection, without waiting for the answers."""
    bad = b"[" * case.pick.randint(1, 2000)
    requests = [
        case.head(length=len(case.body)) + case.body,
        case.head(length=len(bad)) + bad,
        case.head(CLOSE, length=len(case.body)) + case.body,
    ]
    first, refused, last = talk(case, b"".join(requests))
    outcomes = [case.judge(reply) for reply in (first, refused, last)]
    if outcomes[1] != "error 400 bad_request" or not {outcomes[0], outcomes[2]} <= RIGHT:
        return [f"wrong: {outcome} among {outcomes}" for outcome in outcomes]
    return outcomes


_LINE = b"POST /invocations HTTP/1.1"
HEADS: Mapping[str, Sequence[bytes]] = {
    "TLS": [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"],
    "noise": [bytes(range(128, 256)) * 4],
    "no version": [b"GET /ping"],
    "version 9": [b"POST /invocations HTTP/9.9", b"host: a"],
    "negative length": [_LINE, b"host: a", b"content-length: -1"],
    "length in words": [_LINE, b"host: a", b"content-length: ten"],
    "two lengths": [_LINE, b"host: a", b"content-length: 1", b"content-length: 2"],
    "length and chunks": [_LINE, b"host: a", b"content-length: 5", b"transfer-encoding: chunked"],
    "no colon": [_LINE, b"host: a", b"no colon"],
    "name with a space": [_LINE, b"host: a", b"x y: 1"],
    "NUL": [_LINE, b"host: a", b"x: \x00"],
    "no host": [_LINE],
    "unknown coding": [_LINE, b"host: a", b"transfer-encoding: gzip"],
    "long": [_LINE, b"host: a", b"x: " + b"x" * 200_000],
    "many": [_LINE, b"host: a", *[b"x: y"] * 20_000],
    "long path": [b"POST /" + b"x" * 200_000 + b" HTTP/1.1", b"host: a"],
}


@client(4, *[f"error {status} http_error" for status in (400, 431, 501, 505)], http=True)
def bad_head(case: Case) -> list[str]:
    name = case.pick.choice([*HEADS])
    whole = b"\r\n".join([*HEADS[name], CLOSE.encode(), b"", b""])
    return [
        f"wrong: {name}: {each}" if "wrong" in each else each
        for each in _only(case, talk(case, whole))
    ]


@client(2, "error 404 http_error", "error 404 model_not_found", "error 405 http_error", http=True)
def wrong_route(case: Case) -> list[str]:
    line = case.pick.choice(
        ["GET /invocations", "DELETE /invocations", "POST /ping", "POST /nope", "POST /predictions/x",
         "GET /../../etc/passwd", "GET /%00", "POST /invocations/"]
    )  # fmt: skip
    head = case.head(CLOSE, length=0).replace(b"POST /invocations", line.encode())
    (outcome,) = _only(case, talk(case, head))
    return [outcome.replace("wrong:", f"wrong: {line}:")]


@client(1, "error 413 body_too_large", "error 503 queue_full", http=True)
def large_body(case: Case) -> list[str]:
    """Its length is refused, or what comes in chunks."""
    size = LARGE_BYTES
    if case.pick.random() < 0.5:
        return _only(case, talk(case, case.head(CLOSE, length=size), b" " * size))
    chunk = b"%x\r\n%b\r\n" % (2**16, b" " * 2**16)
    head = case.head(CLOSE, "transfer-encoding: chunked")
    return _only(case, talk(case, head, *[chunk] * (size // 2**16), b"0\r\n\r\n"))


LARGE_BYTES = 4 * 2**20


@client(0.3, RIGHT, http=True)
def idle_connections(case: Case) -> list[str]:
    """Connections that send nothing, or half a head, while another one asks."""
    half = case.head()[:30]
    idle = [socket.create_connection(("127.0.0.1", case.door.port)) for _ in range(FLOOD)]
    try:
        for wire in idle[::2]:
            wire.sendall(half)
        return ordinary(case)
    finally:
        for wire in idle:
            wire.close()


@client(2, "healthy", http=True)
def looks(case: Case) -> list[str]:
    path = case.pick.choice(["/ping", "/metrics", "/info"])
    (reply,) = talk(case, f"GET {path} HTTP/1.1\r\nhost: soak\r\n{CLOSE}\r\n\r\n".encode())
    return ["healthy" if reply.status == 200 else f"wrong: {path}: {reply}"]
