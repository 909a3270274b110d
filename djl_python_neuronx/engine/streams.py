"""The requests between submission and their last delta."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from djl_python_neuronx.engine.outlets import Outlet
from djl_python_neuronx.engine.runner import StepInfo
from djl_python_neuronx.engine.text import Delta, TextStream
from djl_python_neuronx.errors import (
    BackendUnavailableError,
    QueueFullError,
    RequestError,
    ServingError,
)
from djl_python_neuronx.types import FinishReason, GenerationRequest, Tokenizer


class Stream:
    """One request, its text and where its deltas go."""

    __slots__ = ("first_token_s", "last_token_s", "outlet", "request", "submitted_s", "text")

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer, outlet: Outlet) -> None:
        self.request = request
        self.text = TextStream(request, tokenizer)
        self.outlet = outlet
        self.submitted_s = time.monotonic()
        self.first_token_s: float | None = None
        self.last_token_s = self.submitted_s

    def failed(self, error: ServingError) -> Delta:
        """The last delta of a stream that ends with an error."""
        return Delta(
            self.request.request_id,
            text="",
            tokens=(),
            finish_reason=FinishReason.ERROR,
            error=error,
            num_prompt_tokens=len(self.request.prompt_ids),
        )


class Observer(Protocol):
    """Receives the loop's events, for metrics and logs. Output thread; `rejected` and `given_up`: any thread."""

    def rejected(self, error: ServingError) -> None:
        """A request was not accepted."""

    def stepped(self, info: StepInfo | None, num_tokens: int) -> None:
        """A step came back from the device with tokens; None: it failed."""

    def given_up(self, stream: Stream) -> None:
        """A request was aborted: it gets no last delta."""

    def ended(self, stream: Stream, delta: Delta) -> None:
        """A request got its last delta."""


class Streams:
    """All open streams, at most `most` of them; any thread.

    `then` is called under the lock, so that the engine hears of a request's end after its beginning.
    """

    def __init__(self, most: int) -> None:
        self.closed: ServingError | None = None
        """Why nothing is accepted any more."""
        self._most = most
        self._open: dict[str, Stream] = {}
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, request_id: str) -> Stream | None:
        """The stream of an id, if it is open."""
        return self._open.get(request_id)

    def open(self, stream: Stream, then: Callable[[], None]) -> None:
        """Accept a stream.

        Raises:
            BackendUnavailableError: nothing is accepted any more.
            QueueFullError: there are too many.
            RequestError: its id is in use.
        """
        with self._changed:
            if self.closed is not None:
                raise BackendUnavailableError(str(self.closed)) from self.closed
            if len(self._open) >= self._most:
                msg = (
                    f"{len(self._open)} requests are running or waiting, the most that this deployment holds; "
                    "retry later, or raise option.max_waiting or option.max_rolling_batch_size"
                )
                raise QueueFullError(msg)
            if stream.request.request_id in self._open:
                msg = f"request id {stream.request.request_id!r} is already in use; send another"
                raise RequestError(msg)
            self._open[stream.request.request_id] = stream
            then()

    def end(self, request_id: str, then: Callable[[], None] | None = None) -> Stream | None:
        """Let go of a stream; None if it was not open, and then nothing happens."""
        with self._changed:
            stream = self._open.pop(request_id, None)
            if stream is not None:
                if then is not None:
                    then()
                if not self._open:
                    self._changed.notify_all()
            return stream

    def end_all(self) -> list[Stream]:
        """Let go of every stream."""
        with self._changed:
            streams = list(self._open.values())
            self._open.clear()
            self._changed.notify_all()
            return streams

    def close(self, why: ServingError) -> None:
        """Accept nothing more; the first reason stays."""
        with self._changed:
            self.closed = self.closed or why

    def wait_until_empty(self, timeout_s: float) -> bool:
        """True once no stream is open; False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, timeout_s)
