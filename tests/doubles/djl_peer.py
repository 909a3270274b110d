"""The Java side of DJL Serving's Python engine, as far as a handler can tell the difference.

Models PyProcess, Connection, RollingBatch, Request, AsyncRequestManager, PyPredictor and the worker thread of
djl-serving d21927c, their weak places included: what Java forgets without a word is `Answer.lost` here.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import queue
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import NamedTuple

from tests.doubles.djl_engine_double import TRACKING_ID, Connection, encoded_string

ROOT = Path(__file__).parents[2]
DOUBLE = Path(__file__).with_name("djl_engine_double.py")
ENTRY = "tests.doubles.djl_entry"
STARTUP_TIMEOUT_S = 120.0
PATIENCE_S = 60.0
MAX_CONTENT_BYTES = 20 * 1024 * 1024
REST = {"rows": 0, "streams": 0, "running": 0, "waiting": 0, "slots": 0, "violations": []}
"""`Peer.usage` when nothing is going on."""


def real_engine():
    """DJL's own engine script in the checkout that DJL_SRC names."""
    return Path(os.environ["DJL_SRC"]) / "engines/python/setup/djl_python_engine.py"


class EngineError(Exception):
    """Java's EngineException: the process is lost."""


class TranslateError(Exception):
    """Java's TranslateException: the client gets 400, nothing else happens."""


class Message(NamedTuple):
    """An `Output` as Java decodes it."""

    code: int
    message: str | None
    properties: dict[str, str]
    content: list[tuple[str | None, bytes]] | None
    """None: the content follows in chunks."""


class Answer:
    """The answer as the HTTP client sees it; ``lost``: nothing more comes until the client's time-out."""

    def __init__(self, body, headers):
        self.body, self.request_headers = body, headers
        self.status, self.message = 200, "OK"
        self.headers = {}
        self.chunks = []
        self.status_sent = None
        """The status line goes out with the first chunk; a later change of `status` is not seen."""
        self.lost = False
        self.started = threading.Event()
        self._done = threading.Event()

    @property
    def done(self):
        return self._done.is_set()

    @property
    def content(self):
        return b"".join(self.chunks)

    def wait(self, timeout_s=PATIENCE_S):
        assert self._done.wait(timeout_s), "no answer"
        return self

    def append(self, chunk, last):
        if not chunk and not last:
            return
        if self.status_sent is None:
            # Java: HttpResponseStatus refuses line breaks in the reason phrase.
            assert not re.search(r"[\r\n]", self.message or "")
            self.status_sent = self.status
        self.chunks.append(chunk)
        self.started.set()
        if last:
            self._done.set()

    def end(self, status, body):
        """Java's own error: status and body together."""
        self.status = status
        self.append(json.dumps(body).encode(), True)

    def lose(self):
        self.lost = True
        self._done.set()


class Request:
    """Request.java: an entry of the rolling batch or of the asynchronous manager."""

    def __init__(self, answer):
        self.answer = answer
        self.next_token = None
        self.last = False
        self.seed = str(random.randrange(2**31))

    @property
    def new(self):
        return self.next_token is None

    def add_response(self, record, properties):
        self.answer.headers.update(properties)
        fields = decode_record(record)
        self.next_token = fields.get("data", self.next_token)
        if "last" in fields:
            self.last = fields["last"].lower() == "true"
        if not self.next_token and not self.last:
            return
        if "code" in fields:
            self.answer.status = int(fields["code"])
            body = {"code": self.answer.status}
            if "error" in fields:
                body["error"] = self.answer.message = fields["error"]
            # The response is closed, but the entry stays in the list unless `last` came too.
            self.answer.append(json.dumps(body).encode(), True)
        else:
            self.answer.append(self.next_token.encode(), self.last)


def decode_record(record):
    """The fields of a token record; none may be null."""
    (count,) = struct.unpack_from(">h", record)
    offset, strings = 2, []
    for _ in range(2 * count):
        (length,) = struct.unpack_from(">i", record, offset)
        assert length >= 0, "Java fails on null"
        strings.append(record[offset + 4 : offset + 4 + length].decode())
        offset += 4 + length
    assert offset == len(record)
    return dict(zip(strings[::2], strings[1::2], strict=True))


def encode_input(properties, content):
    parts = [struct.pack(">h", len(properties))]
    parts += [encoded_string(text) for pair in properties.items() for text in pair]
    parts.append(struct.pack(">h", len(content)))
    parts += [encoded_string(key) + struct.pack(">i", len(value)) + value for key, value in content]
    return b"".join(parts)


def read_message(connection):
    code, message = connection.short(), connection.string()
    properties = {}
    for _ in range(connection.short()):
        key = connection.string()
        properties[key] = connection.string()
    count = connection.short()
    if count == -1:
        return Message(code, message, properties, None)
    content = []
    for _ in range(count):
        key, length = connection.string(), connection.int()
        assert length <= MAX_CONTENT_BYTES
        content.append((key, connection.read(length)))
    return Message(code, message, properties, content)


class _Tee(Connection):
    """Remembers the bytes that it reads."""

    def __init__(self, sock):
        super().__init__(sock)
        self.received = bytearray()

    def read(self, count):
        data = super().read(count)
        self.received += data
        return data


class Channel:
    """Connection.java: one socket, one outstanding future."""

    def __init__(self, path, on_message, on_chunk, on_inactive):
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.connect(str(path))
        self.tee = _Tee(self._sock)
        self._future = None
        self._callbacks = on_message, on_chunk, on_inactive
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def send(self, data):
        self._future = future = Future()
        try:
            self._sock.sendall(data)
        except OSError as error:
            raise EngineError("cannot send to the process") from error
        return future

    def time_out(self):
        """End the outstanding call, or the next one, as its limit would."""
        while True:
            with contextlib.suppress(InvalidStateError):
                return self._future.set_exception(FutureTimeoutError())
            time.sleep(0.01)

    def close(self):
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(PATIENCE_S)
        self.tee.close()
        self._sock.close()

    def _read(self):
        on_message, on_chunk, on_inactive = self._callbacks
        try:
            while True:
                message = read_message(self.tee)
                on_message(message)
                with contextlib.suppress(InvalidStateError):  # it was timed out
                    self._future.set_result(message)
                more = message.content is None
                while more:
                    more = self.tee.read(1) == b"\1"
                    on_chunk(self.tee.read(self.tee.int()), not more)
        except (EOFError, OSError):
            future = self._future
            if future is not None and not future.done():
                future.set_exception(EngineError("Python worker disconnected."))
            on_inactive()


class Peer:
    """A model of DJL Serving with one worker. `properties` are the options as Python gets them, prefix gone."""

    def __init__(self, model_dir, properties, sock_dir, *, entry_point, engine=DOUBLE, env=None):
        self.properties = {"engine": "Python", "handler": "handle", **properties}
        self.rolling = self.properties.get("rolling_batch", "disable") != "disable"
        self.async_mode = self.properties.get("async_mode") == "true"
        self.timeout_s = float(self.properties.get("predict_timeout", "120"))
        self.loading_timeout_s = float(self.properties.get("model_loading_timeout", "0")) or 240.0
        self.max_rolling_batch_size = int(self.properties.get("max_rolling_batch_size", "32"))
        self.log = []
        self.num_starts = self.failures = 0
        self.unrecoverable = self.started = self.loaded = False
        self.spoil_next_reply = False
        """Pretend once that a row of the reply is missing: Java then fails everyone and resets."""
        self.batch_sizes = []
        """Rows of each rolling-batch call."""
        self._model_dir, self._entry_point, self._engine = (
            Path(model_dir),
            entry_point,
            Path(engine),
        )
        self._sock_path = Path(sock_dir) / "djl_sock.19000"
        search_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._env = {
            **os.environ,
            "PYTHONPATH": search_path,
            "PYTHONUNBUFFERED": "1",
            **(env or {}),
        }
        self._process = self._channel = None
        self._state = threading.RLock()
        self._sending = threading.Lock()
        self._stop = False
        self._list, self._reset = [], False
        self._changed = threading.Condition()
        self._jobs = queue.SimpleQueue()
        self._active = {}
        self._streaming = None
        self._worker = None

    # PyProcess

    @property
    def ready(self):
        return self.started and self.loaded

    def start(self):
        """Start the process and load the model; raises `EngineError` if that fails."""
        self._start_process()
        target = self._roll if self.rolling else None if self.async_mode else self._work
        if target is not None:
            self._worker = threading.Thread(target=target, daemon=True)
            self._worker.start()
        return self

    def kill(self, number=signal.SIGKILL):
        """From outside: the process is gone, and nobody told Java."""
        self._process.send_signal(number)

    def time_out(self):
        """End the call now as if it had taken `timeout_s`."""
        self._channel.time_out()

    @property
    def pid(self):
        return self._process.pid

    def wait_ready(self):
        deadline_s = time.monotonic() + PATIENCE_S
        while not self.ready:
            assert time.monotonic() < deadline_s, "\n".join(self.log)
            time.sleep(0.01)

    def usage(self):
        """Resources that `djl_entry` still holds once it is at rest, or when the time for that is over."""
        deadline_s = time.monotonic() + PATIENCE_S
        found = None
        while found != REST and time.monotonic() < deadline_s:
            seen, lines = len(self.log), []
            self.kill(signal.SIGUSR1)
            # Sent again: one that comes just before the process reads from its socket is handled after the read.
            again_s = time.monotonic() + 5
            while not lines and time.monotonic() < again_s:
                time.sleep(0.02)
                lines = [line for line in self.log[seen:] if line.startswith("usage ")]
            found = ast.literal_eval(lines[0].removeprefix("usage ")) if lines else None
        return found

    def received(self):
        """Bytes read from the present process."""
        return bytes(self._channel.tee.received)

    def close(self):
        self._stop = True
        with self._changed:
            self._changed.notify_all()
        self._jobs.put(None)
        with self._state:
            self._stop_process(error=False)
        if self._worker is not None:
            self._worker.join(PATIENCE_S)

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.close()

    def _start_process(self):
        with self._state:
            if self._stop:
                return
            self.loaded = False
            self.num_starts += 1
            self._sock_path.unlink(missing_ok=True)
            command = [
                sys.executable,
                self._engine,
                "--sock-type",
                "unix",
                "--sock-name",
                self._sock_path,
            ]
            command += [
                "--model-dir",
                self._model_dir,
                "--entry-point",
                self._entry_point,
                "--device-id",
                "-1",
            ]
            command += [
                "--cluster-size",
                "1",
                "--recommended-entry-point",
                "",
                "--log-level",
                "info",
            ]
            command.append("--async-mode" if self.async_mode else "--no-async-mode")
            self._process = process = subprocess.Popen(
                command,
                env=self._env,
                cwd=self._model_dir,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            latch = threading.Event()
            threading.Thread(target=self._read_log, args=(process, latch), daemon=True).start()
            try:
                if not latch.wait(STARTUP_TIMEOUT_S) or not self.started:
                    raise EngineError("the process did not start:\n" + "\n".join(self.log))
                self._channel = Channel(
                    self._sock_path, self._on_message, self._on_chunk, self._on_inactive
                )
                self._predict(self.properties, [], self.loading_timeout_s, initial=True)
                self.loaded = True
            finally:
                if not self.loaded and self.started:
                    self._stop_process(error=True)

    def _read_log(self, process, latch):
        with process.stdout as lines:
            for line in lines:
                self.log.append(line.rstrip("\n"))
                if "Python engine started." in line and process is self._process:
                    self.started = True
                    latch.set()
        if process is self._process:
            self.started = False
        latch.set()

    def _stop_process(self, *, error):
        self.failures += error
        with self._sending:
            channel, self._channel, self.started = self._channel, None, False
        process, self._process = self._process, None
        if channel is not None:
            channel.close()
        if process is not None:
            process.kill()
            process.wait()
        self._terminate_in_flight()

    def _predict(self, properties, content, timeout_s, *, initial=False):
        """predictStandard: a call that fails or takes too long costs the process its life."""
        try:
            channel = self._channel
            if channel is None:
                raise EngineError("not connected")
            future = channel.send(encode_input({"handler": "handle", **properties}, content))
            message = future.result(timeout_s)
            if initial and message.code >= 300:
                raise EngineError(
                    "OOM"
                    if message.code == 507
                    else f"Failed to initialize model: {message.message}"
                )
        except (EngineError, FutureTimeoutError) as error:
            with self._state:
                self._stop_process(error=not initial)
            if initial:
                self.unrecoverable = True
            elif not self._stop:
                threading.Thread(target=self._start_process, daemon=True).start()
            raise error if isinstance(error, EngineError) else EngineError("timed out") from error
        return message

    def _on_message(self, message):
        if self.async_mode and self.ready:
            self._add_output(message)

    def _on_inactive(self):
        if self.async_mode and not self._stop:
            threading.Thread(target=self._restart, args=(self._channel,), daemon=True).start()

    def _restart(self, lost):
        with self._state:
            if lost is not None and lost is self._channel and self.loaded:
                self._stop_process(error=True)
                self._start_process()

    # What the front end does

    def submit(self, body, headers=None):
        """Send a request as the front end would."""
        headers = {
            "Content-Type": "application/json",
            "requestId": str(uuid.uuid4()),
            **(headers or {}),
        }
        answer = Answer(body if isinstance(body, bytes) else json.dumps(body).encode(), headers)
        try:
            if not self.ready:
                raise TranslateError("Backend Python process is stopped.")
            self._accept(answer)
        except TranslateError as error:
            answer.end(400, {"code": 400, "message": str(error)})
        return answer

    def _accept(self, answer):
        if self.rolling:
            self._add_input(answer)
        elif self.async_mode:
            self._send_request(answer)
        else:
            self._jobs.put(answer)

    def _send_request(self, answer):
        tracking_id = str(uuid.uuid4())
        properties = {"handler": "handle", **answer.request_headers, TRACKING_ID: tracking_id}
        with self._sending:
            if self._channel is None:
                raise TranslateError("Backend Python process is stopped.")
            self._active[tracking_id] = Request(answer)
            # A dead process is noticed by the reader, which answers everyone.
            with contextlib.suppress(EngineError):
                self._channel.send(encode_input(properties, [("data", answer.body)]))

    # RollingBatch

    @property
    def num_rows(self):
        return len(self._list)

    def _add_input(self, answer):
        with self._changed:
            deadline_s = time.monotonic() + self.timeout_s
            while len(self._list) >= self.max_rolling_batch_size:
                if not self._changed.wait(deadline_s - time.monotonic()):
                    raise TranslateError(f"Time out in: {self.timeout_s:g}")
            self._list.append(Request(answer))
            self._changed.notify_all()

    def _roll(self):
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._list or self._stop)
                if self._stop:
                    return
                requests = list(self._list)
                properties, content = self._batch(requests)
            try:
                message = self._predict(properties, content, self.timeout_s)
            except EngineError:
                with self._changed:
                    for request in self._list:
                        request.answer.lose()
                    self._list.clear()
                    self._reset = True
                    self._changed.notify_all()
                continue
            with self._changed:
                self._answer_rows(message, requests)
                self._changed.notify_all()

    def _batch(self, requests):
        properties, content = {}, []
        if self._reset:
            properties["reset_rollingbatch"], self._reset = "true", False
        for i, request in enumerate(requests):
            prefix = f"batch_{i:03d}."
            if request.new:
                properties |= {
                    prefix + key: value for key, value in request.answer.request_headers.items()
                }
            content.append((prefix + "data", request.answer.body if request.new else b""))
            if request.new:
                content.append((prefix + "seed", request.seed.encode()))
        properties["batch_size"] = str(len(requests))
        self.batch_sizes.append(len(requests))
        return properties, content

    def _answer_rows(self, message, requests):
        content = list(message.content)
        if self.spoil_next_reply:
            self.spoil_next_reply = False
            content = content[1:]
        if message.code != 200 or len(content) != len(requests):
            for request in self._list:
                request.answer.end(
                    message.code, {"code": message.code, "message": "Batch inference failed"}
                )
            self._list.clear()
            self._reset = True
            return
        headers = [{} for _ in requests]
        for key, value in message.properties.items():
            found = re.fullmatch(r"batch_(\d+)_(.+)", key)
            if found:
                headers[int(found[1])][found[2]] = value
        for request, (_, record), properties in zip(requests, content, headers, strict=True):
            request.add_response(record, properties)
        self._list = [request for request in self._list if not request.last]

    # AsyncRequestManager

    @property
    def num_active(self):
        return len(self._active)

    def _add_output(self, message):
        tracking_id = message.properties.get(TRACKING_ID)
        request = self._active.get(tracking_id)
        if request is None:
            return
        if message.code != 200:
            text = f"Async Inference Failure {message.message}"
            request.answer.end(message.code, {"code": message.code, "message": text})
            request.last = True
        else:
            request.add_response(message.content[0][1], message.properties)
        if request.last:
            del self._active[tracking_id]

    def _terminate_in_flight(self):
        for request in list(self._active.values()):
            if not request.answer.done:
                request.answer.end(500, {"code": 500, "message": "Inference Engine Failure"})
        self._active.clear()

    # PyPredictor and WorkerThread

    def _work(self):
        while (answer := self._jobs.get()) is not None:
            self._answer_plain(answer)

    def _answer_plain(self, answer):
        try:
            if not self.ready:
                raise TranslateError("Backend Python process is stopped.")
            self._predict_one(answer)
        except TranslateError as error:
            answer.end(400, {"code": 400, "message": str(error)})
        except EngineError as error:
            if not answer.done:
                answer.end(503, {"code": 503, "message": str(error)})

    def _predict_one(self, answer):
        self._streaming, self._headed = answer, threading.Event()
        message = self._predict(answer.request_headers, [("data", answer.body)], self.timeout_s)
        answer.status, answer.message, answer.headers = (
            message.code,
            message.message,
            dict(message.properties),
        )
        self._headed.set()
        if message.content is None:
            answer.wait(PATIENCE_S)
        else:
            answer.append(b"".join(value for _, value in message.content), True)

    def _on_chunk(self, chunk, last):
        # The reader thread is often ahead of the one that takes status and headers.
        assert self._headed.wait(PATIENCE_S), "no head"
        self._streaming.append(chunk, last)
