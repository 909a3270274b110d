"""From a body to a running request: the way that every door takes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from djl_python_neuronx.engine.loop import EngineLoop
from djl_python_neuronx.engine.outlets import Generation, Outlet
from djl_python_neuronx.errors import ServingError
from djl_python_neuronx.protocol.base import ParsedRequest

INLINE_BODY_BYTES = 8 * 1024
"""Bodies up to this size are tokenised in the event loop: a thread hop would take longer than the work."""


class Serving(Protocol):
    """What the doors need of a `Service`."""

    @property
    def loop(self) -> EngineLoop:
        """Where requests are submitted."""

    def parse(
        self, body: bytes, *, request_id: str | None, headers: Mapping[str, str]
    ) -> ParsedRequest:
        """Understand and check a body."""

    def count_rejected(self, error: ServingError) -> None:
        """Note a request that was not accepted."""


async def parse_beside(
    service: Serving, body: bytes, *, request_id: str | None, headers: Mapping[str, str]
) -> ParsedRequest:
    """`Serving.parse` for an event loop: on a thread if the body is long, so that the other streams go on."""
    if len(body) <= INLINE_BODY_BYTES:
        return service.parse(body, request_id=request_id, headers=headers)
    return await asyncio.to_thread(service.parse, body, request_id=request_id, headers=headers)


def submit(service: Serving, parsed: ParsedRequest, outlet: Outlet) -> None:
    """`EngineLoop.submit`, with a refusal counted."""
    try:
        service.loop.submit(parsed.request, outlet)
    except ServingError as error:
        service.count_rejected(error)
        raise


def generate(service: Serving, parsed: ParsedRequest) -> Generation:
    """`EngineLoop.generate`, with a refusal counted."""
    try:
        return service.loop.generate(parsed.request)
    except ServingError as error:
        service.count_rejected(error)
        raise
