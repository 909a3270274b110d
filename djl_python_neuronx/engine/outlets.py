"""Where deltas go: an outlet takes one step's deltas of all its requests in one message."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Protocol

from djl_python_neuronx.engine.text import Delta


class Outlet(Protocol):
    """Where the deltas of a door's requests go."""

    def deliver(self, deltas: list[Delta]) -> None:
        """Take one step's deltas of all requests submitted with this outlet. Output thread; must not block."""


class Inbox:
    """An outlet for doors that wait: everything delivered since the last `drain`."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._arrived = threading.Condition()

    def deliver(self, deltas: list[Delta]) -> None:
        """See `Outlet`."""
        with self._arrived:
            self._deltas += deltas
            self._arrived.notify_all()

    def drain(self, timeout_s: float) -> list[Delta]:
        """Wait until something is there, at most `timeout_s`, and take all of it."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._deltas, timeout_s)
            deltas, self._deltas = self._deltas, []
            return deltas


class LoopMailbox:
    """The outlet of all requests of one event loop: one wake-up per step, however many requests it has."""

    def __init__(self, loop: asyncio.AbstractEventLoop, abort: Callable[[str], None]) -> None:
        self.queues: dict[str, asyncio.Queue[Delta | None]] = {}
        self._loop = loop
        self._abort = abort

    def deliver(self, deltas: list[Delta]) -> None:
        """See `Outlet`."""
        try:
            self._loop.call_soon_threadsafe(self._sort, deltas)
        except RuntimeError:  # the event loop is closed: nobody is left to read
            for delta in deltas:
                self._abort(delta.request_id)

    def _sort(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            waiting = self.queues.get(delta.request_id)
            if waiting is not None:
                waiting.put_nowait(delta)


class Mailboxes:
    """One mailbox for each event loop that asks."""

    def __init__(self, abort: Callable[[str], None]) -> None:
        self._abort = abort
        self._of: dict[asyncio.AbstractEventLoop, LoopMailbox] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._of)

    def of(self, loop: asyncio.AbstractEventLoop) -> LoopMailbox:
        """The mailbox of a running event loop; those of closed ones are forgotten."""
        with self._lock:
            if loop not in self._of:
                self._of = {known: box for known, box in self._of.items() if not known.is_closed()}
                self._of[loop] = LoopMailbox(loop, self._abort)
            return self._of[loop]


class Generation:
    """The deltas of one request, for ``async for``.

    Closing it before the end aborts the request and ends the iteration, also one that waits for a delta.
    """

    def __init__(self, request_id: str, mailbox: LoopMailbox, abort: Callable[[str], None]) -> None:
        self._abort = abort
        self._request_id = request_id
        self._mailbox = mailbox
        self._queue = mailbox.queues[request_id] = asyncio.Queue[Delta | None]()
        self._finished = False

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta:
        if self._finished:
            raise StopAsyncIteration
        delta = await self._queue.get()
        if delta is None:
            raise StopAsyncIteration
        if delta.finished:
            self._finish()
        return delta

    async def aclose(self) -> None:
        """Give the request up if it is not finished; idempotent."""
        self.close()

    def close(self) -> None:
        """Same as `aclose`, for callers that cannot wait."""
        if not self._finished:
            self._finish()
            self._queue.put_nowait(None)
            self._abort(self._request_id)

    def _finish(self) -> None:
        self._finished = True
        self._mailbox.queues.pop(self._request_id, None)
