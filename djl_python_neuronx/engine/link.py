"""The connection between front and engine: messages are JSON arrays, their kind first, each after its length.

From the front: ``["vocabulary", [tokens, special ids]]``, then ``["add", request]``, ``["abort", id]`` and
``["adapter", [place, folder or null]]``; the end of the connection ends the engine. From the engine:
``["progress", text]``, then ``["ready", facts]`` or ``["failed", code, message]``; afterwards ``["entering", ids]``
before requests get slots, ``["first_call"]``, ``["step", …]`` (see `encode_step`), ``["adapter", error or null]`` for
each change in its order, and at last ``["dead", code, message]``.
"""

from __future__ import annotations

import logging
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple, Union

import numpy as np
import orjson
from pydantic import TypeAdapter

from djl_python_neuronx.backends.base import ModelSpec
from djl_python_neuronx.engine.core import StepResult
from djl_python_neuronx.engine.runner import StepInfo
from djl_python_neuronx.engine.sampler import logprobs, most_likely
from djl_python_neuronx.errors import ServingError, revive
from djl_python_neuronx.types import EngineRequest, FinishReason, Scored, TokenOutput

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_LARGEST = 2**31 - 1
"""JSON has no larger numbers than 64 bits; nothing that a request counts is larger than this."""
_FLUSH_S = 1.0
"""Time to send what is in the outbox when a link is closed."""


class Link:
    """One end of the connection. Messages are encoded and written by a separate thread; another one receives."""

    def __init__(self, end: socket.socket) -> None:
        self.opened_s = time.monotonic()
        self._socket = end
        self._reader = end.makefile("rb")
        self._outbox: queue.SimpleQueue[Callable[[], bytes] | None] = queue.SimpleQueue()
        self._writing = threading.Lock()
        self._writer = threading.Thread(target=self._write, name="djl-neuronx-outbox", daemon=True)
        self._writer.start()

    def send(self, *message: Any) -> None:  # noqa: ANN401
        """Send a message; never blocks. It is lost if the connection has ended."""
        self._outbox.put(partial(orjson.dumps, message))

    def send_made(self, make: Callable[[], tuple[Any, ...]]) -> None:
        """Send what `make` returns; see `send`. It may take its time: it is called on the writing thread."""
        self._outbox.put(lambda: orjson.dumps(make()))

    def send_encoded(self, message: bytes) -> None:
        """Send a message that is encoded; see `send`."""
        self._outbox.put(lambda: message)

    def send_step(self, finish: Callable[[], tuple[StepResult, EngineState]]) -> None:
        """Send the result of a step; see `send`. It and its log-probabilities are made on the writing thread."""
        self._outbox.put(lambda: orjson.dumps(("step", *encode_step(*finish()))))

    def send_now(self, *message: Any) -> None:  # noqa: ANN401
        """Send a message before this returns, so that it arrives even if this process dies in the next moment.

        It may overtake others.
        """
        with suppress(OSError):
            self._write_one(orjson.dumps(message))

    def receive(self) -> list[Any] | None:
        """Wait for the next message. Returns None at the end of the connection."""
        with suppress(OSError):
            head = self._reader.read(_LENGTH.size)
            if len(head) == _LENGTH.size:
                (length,) = _LENGTH.unpack(head)
                content = self._reader.read(length)
                if len(content) == length:
                    message: list[Any] = orjson.loads(content)
                    return message
        return None

    @property
    def backlog(self) -> int:
        """Messages that wait to be written; 0 once the connection has ended."""
        waiting = self._outbox.qsize()
        return waiting if waiting and self._writer.is_alive() else 0

    def end(self) -> None:
        """End the connection for both sides at once. Any thread; idempotent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Send what is left in the outbox, end the connection and free its descriptor. For the receiving thread."""
        self._outbox.put(None)
        self._writer.join(_FLUSH_S)
        self.end()
        self._writer.join()
        self._reader.close()
        self._socket.close()

    def _write(self) -> None:
        try:
            while (encode := self._outbox.get()) is not None:
                self._write_one(encode())
        except OSError:
            pass  # the other side has ended, which the receiving thread notices
        except Exception:
            logger.exception("message_not_sent")
            self.end()

    def _write_one(self, content: bytes) -> None:
        with self._writing:
            self._socket.sendall(_LENGTH.pack(len(content)) + content)


class EngineState(NamedTuple):
    """State of an engine, sent with each step."""

    running: int = 0
    """Sequences that hold a slot."""
    waiting: int = 0
    """Sequences that wait for a slot."""
    speculates: bool = True
    """False without drafts, and once they are given up or switched off."""


SPEC = TypeAdapter(ModelSpec)
"""Converts the facts of the loaded model to plain values and back."""
REQUEST = TypeAdapter(EngineRequest)
"""Makes a request of a message's fields."""
_REQUEST_FIELDS = tuple(one.name for one in fields(EngineRequest))


def encode_request(
    request: EngineRequest,
    stop_ids: Iterable[int] = (),
    **other: Any,  # noqa: ANN401
) -> bytes:
    """The message for a request. `stop_ids` end the sequence as `stop_token_ids` do. `other`: values of fields."""
    sampling, wanted = request.sampling, request.max_new_tokens
    sent = {
        **{name: getattr(request, name) for name in _REQUEST_FIELDS},
        "sampling": {**vars(sampling), "top_k": min(sampling.top_k, _LARGEST)},
        "max_new_tokens": None if wanted is None else min(wanted, _LARGEST),
        "stop_token_ids": request.stop_token_ids.union(stop_ids),
        **other,
    }
    return orjson.dumps(("add", sent), default=list)


def encode_error(error: ServingError | None) -> tuple[str, ...] | None:
    """Code and message of an error, and the field of the request that is wrong if it names one."""
    if error is None:
        return None
    # A file name in a message may hold bytes that are not UTF-8.
    fields = error.code, str(error).encode(errors="replace").decode()
    param = getattr(error, "param", None)
    return fields if param is None else (*fields, param)


def decode_error(fields: Sequence[str] | None) -> ServingError | None:
    """The inverse of `encode_error`."""
    if fields is None:
        return None
    code, message, *param = fields
    return revive(code, message, **({"param": param[0]} if param else {}))


def encode_step(result: StepResult, state: EngineState) -> tuple[Any, ...]:
    """A step's message: a row for each output, with log-probabilities that are made from the logits here."""
    outputs, info = result
    facts = None
    if info is not None:
        facts = {**info._asdict(), "draft_error": encode_error(info.draft_error)}
    rows = [
        (one.request_id, one.token_ids, one.finish_reason, encode_error(one.error), *_scores(one))
        for one in outputs
    ]
    return rows, facts, list(state)


def decode_step(rows: Any, facts: Any, state: Any) -> tuple[StepResult, EngineState]:  # noqa: ANN401
    """The inverse of `encode_step`; its outputs have log-probabilities instead of logits."""
    outputs = [
        TokenOutput(
            request_id,
            token_ids,
            None if reason is None else FinishReason(reason),
            decode_error(error),
            logprobs=chosen,
            top=top,
            scored=None if scored is None else Scored(*scored),
        )
        for request_id, token_ids, reason, error, chosen, top, scored in rows
    ]
    if facts is not None:
        facts = StepInfo(**{**facts, "draft_error": decode_error(facts["draft_error"])})
    return StepResult(outputs, facts), EngineState(*state)


_Scores = tuple[
    Union[list[float], None],
    Union[list[list[tuple[int, float]]], None],
    Union[tuple[Any, ...], None],
]


def _scores(output: TokenOutput) -> _Scores:
    """`TokenOutput.logprobs`, `TokenOutput.top` and `TokenOutput.scored` of an output, in plain values."""
    logits, ids, plain = output.logits, output.token_ids, None
    if logits is None:
        return None, None, None
    if output.scored is not None:
        start, ids, _ = output.scored
        ranks = (logits >= logits[np.arange(len(ids)), ids][:, None]).sum(axis=1)
        plain = (start, ids, ranks.tolist())
    chosen, top = [], []
    for row, token_id in zip(logits, ids, strict=True):
        others = most_likely(row, output.top_logprobs) if output.top_logprobs else []
        score, *scores = logprobs(row, [token_id, *others]).tolist()
        chosen.append(score)
        top.append(list(zip(others, scores, strict=True)))
    return chosen, top if output.top_logprobs else None, plain
