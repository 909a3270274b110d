"""HTTP responses: a generation, whole or as a stream, and errors."""

from __future__ import annotations

import asyncio
import logging
import reprlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from djl_python_neuronx.engine.detokenizer import Delta
from djl_python_neuronx.engine.streams import Generation
from djl_python_neuronx.errors import RequestAbortedError, ServingError
from djl_python_neuronx.protocol.base import ParsedRequest, error_fields

logger = logging.getLogger(__name__)


async def generation_response(
    request: Request, parsed: ParsedRequest, generation: Generation
) -> Response:
    """The response to a generation: its first bytes decide on the status, and whether it is a stream.

    Raises:
        ClientDisconnect: the client left before the first bytes.
    """
    request_id = parsed.request.label
    chunks = _chunks(request, parsed, generation)
    first = await anext(chunks, None)
    if first is None:
        raise ClientDisconnect
    delta, chunk = first
    headers, media_type = {"x-request-id": request_id}, parsed.formatter.content_type
    if not generation.finished:
        return StreamingResponse(_stream(chunk, chunks), headers=headers, media_type=media_type)
    await chunks.aclose()
    if delta.error is not None:
        return error_response(delta.error, request_id)
    return Response(chunk, headers=headers, media_type=media_type)


_Chunks = AsyncGenerator[tuple[Delta, bytes], None]


async def _chunks(request: Request, parsed: ParsedRequest, generation: Generation) -> _Chunks:
    """The deltas that there is something to send for, with their bytes. Ends early if the client leaves."""
    watch = asyncio.create_task(_close_at_disconnect(request, parsed, generation))
    try:
        async for delta in generation:
            chunk = parsed.formatter.feed(delta)
            if chunk or generation.finished:
                yield delta, chunk
    finally:
        watch.cancel()
        generation.close()


async def _close_at_disconnect(
    request: Request, parsed: ParsedRequest, generation: Generation
) -> None:
    """Close the generation when the client leaves; a response itself may notice that at its next bytes only."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    logger.info("client_gone request_id=%s", parsed.request.label)
    generation.close()


async def _stream(first: bytes, chunks: _Chunks) -> AsyncGenerator[bytes, None]:
    async with aclosing(chunks):
        yield first
        async for _, chunk in chunks:
            yield chunk


def error_response(error: ServingError, request_id: str | None = None) -> Response:
    """The response to a request that failed."""
    headers = {} if request_id is None else {"x-request-id": request_id}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    return JSONResponse(error_fields(error), status_code=error.status, headers=headers)


async def on_serving_error(_request: Request, error: Exception) -> Response:
    """An error of this package, with its own status."""
    assert isinstance(error, ServingError)  # noqa: S101  (starlette's handler signature is wider than its use)
    return error_response(error)


async def on_client_disconnect(_request: Request, _error: Exception) -> Response:
    """A status for a connection that is already closed: the client left before the response began."""
    return error_response(RequestAbortedError("the client closed the connection"))


async def on_http_error(request: Request, error: Exception) -> Response:
    """An unknown route or method, as JSON like every other error, with the routes that exist."""
    assert isinstance(error, HTTPException)  # noqa: S101
    text = error.detail
    if text == HTTPStatus(error.status_code).phrase:  # starlette's own
        routes = [
            f"{method} {route.path}"
            for route in request.app.routes
            for method in route.methods - {"HEAD"}
        ]
        asked = reprlib.repr(f"{request.method} {request.url.path}")
        text = f"no route {asked}; expected {', '.join(routes)}"
    body = {"code": error.status_code, "error": text, "type": "http_error"}
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def on_bug(request: Request, error: Exception) -> Response:
    """Any other exception: its details are logged, not sent."""
    logger.error("request_failed path=%s", request.url.path, exc_info=error)
    return error_response(ServingError("the server failed on this request; its log says why"))
