"""HTTP answers: a generation as it comes or whole, and errors."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from djl_python_neuronx.engine.outlets import Generation
from djl_python_neuronx.errors import QueueFullError, RequestAbortedError, ServingError
from djl_python_neuronx.protocol.base import Formatter, ParsedRequest, error_body

logger = logging.getLogger(__name__)


class GenerationResponse(Response):
    """Sends a generation as it comes, or whole; a client that goes away aborts it."""

    def __init__(self, generation: Generation, parsed: ParsedRequest) -> None:
        self.background = None
        self._generation = generation
        self._formatter: Formatter = parsed.formatter
        self._request_id = parsed.request.label

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or stop when the client has gone."""
        answer = asyncio.ensure_future(self._answer(send))
        gone = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
            else:
                logger.info("client_gone request_id=%s", self._request_id)
        finally:
            self._generation.close()
            for task in (answer, gone):
                task.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)

    async def _answer(self, send: Send) -> None:
        """The status waits for the first bytes: an error before them is a plain error response."""
        started = False
        async for delta in self._generation:
            chunk = self._formatter.feed(delta)
            if not started:
                if delta.error is not None:
                    await error_response(delta.error, self._request_id)(
                        {"type": "http"}, _nothing, send
                    )
                    return
                if delta.finished:
                    await self._whole(chunk)({"type": "http"}, _nothing, send)
                    return
                if not chunk:
                    continue
                await send(self._start())
                started = True
            await send(
                {"type": "http.response.body", "body": chunk, "more_body": not delta.finished}
            )

    def _whole(self, body: bytes) -> Response:
        return Response(
            body,
            headers={"x-request-id": self._request_id},
            media_type=self._formatter.content_type,
        )

    def _start(self) -> dict[str, Any]:
        headers = self._whole(b"").raw_headers
        return {
            "type": "http.response.start",
            "status": HTTPStatus.OK,
            "headers": [header for header in headers if header[0] != b"content-length"],
        }


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nothing() -> dict[str, Any]:
    return {"type": "http.disconnect"}


def error_response(error: ServingError, request_id: str | None = None) -> Response:
    """An error as a whole answer."""
    headers = {} if request_id is None else {"x-request-id": request_id}
    if isinstance(error, QueueFullError):
        headers["retry-after"] = str(error.retry_after_s)
    return Response(
        error_body(error), status_code=error.status, headers=headers, media_type="application/json"
    )


async def on_serving_error(_request: Request, error: Exception) -> Response:
    """One of ours: it knows its status."""
    assert isinstance(error, ServingError)  # noqa: S101  (starlette's handler signature is wider than its use)
    return error_response(error)


async def on_client_gone(_request: Request, _error: Exception) -> Response:
    """Nobody reads it: the client left while it sent its request."""
    return error_response(RequestAbortedError("the client closed the connection"))


async def on_http_error(_request: Request, error: Exception) -> Response:
    """No such route or method, as JSON like every other error."""
    assert isinstance(error, HTTPException)  # noqa: S101
    body = {"code": error.status_code, "error": error.detail, "type": "http_error"}
    return Response(
        orjson.dumps(body),
        status_code=error.status_code,
        headers=error.headers,
        media_type="application/json",
    )


async def on_bug(request: Request, error: Exception) -> Response:
    """Anything else: the log has it, the client does not."""
    logger.error("request_failed path=%s", request.url.path, exc_info=error)
    return error_response(ServingError("the server failed on this request; its log says why"))
