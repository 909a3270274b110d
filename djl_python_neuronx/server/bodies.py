"""Bodies of requests: read with limits of size, in pieces that leave the event loop to others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from djl_python_neuronx.errors import BodyTooLargeError, QueueFullError
from djl_python_neuronx.protocol.base import over_limit

LONG_BODY_BYTES = 1024 * 1024
PACE_S = 0.01
"""Pause after each part (at most 256 KiB) of what a body has above `LONG_BODY_BYTES`. Without it a client that sends
bodies of 5 MB takes the event loop, at 12 ms of CPU time each, from the tokens of all others (2 vCPU, 2026-11)."""
BODIES = 8
"""Bodies of the largest size that may be read and parsed at once."""
SHORT_BODY_BYTES = 64 * 1024
"""Bodies up to this size are read in any case and not counted: neither can keep the other out."""


class Bodies:
    """The bodies that are being read or parsed. Event loop only."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes of those above `SHORT_BODY_BYTES`, as far as they have arrived: a client that declares much and sends
        slowly keeps nobody out."""

    @asynccontextmanager
    async def read(self, request: Request, limit: int) -> AsyncIterator[bytes]:
        """Read a body, which counts until the end of the block.

        Raises:
            BodyTooLargeError: it has more than `limit` bytes; as soon as that is known.
            QueueFullError: all together have more than `BODIES` times the limit.
        """
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise BodyTooLargeError(over_limit(limit))
        chunks: list[bytes] = []
        size = counted = 0
        try:
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise BodyTooLargeError(over_limit(limit))
                if size > SHORT_BODY_BYTES:
                    self.num_bytes += size - counted
                    counted = size
                    self._check_room(BODIES * limit)
                chunks.append(chunk)
                if size > LONG_BODY_BYTES:
                    await asyncio.sleep(PACE_S)
            # A long one on a thread: a millisecond or more, without the GIL.
            joined = (
                b"".join(chunks)
                if size <= LONG_BODY_BYTES
                else await asyncio.to_thread(b"".join, chunks)
            )
            chunks.clear()
            yield joined
        finally:
            self.num_bytes -= counted

    def _check_room(self, most: int) -> None:
        if self.num_bytes > most:
            msg = (
                f"the long bodies that are being read have more than {most} bytes together, the limit "
                f"({BODIES} x option.max_body_bytes); retry later"
            )
            raise QueueFullError(msg)
