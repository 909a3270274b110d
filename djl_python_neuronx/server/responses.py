"""HTTP responses: a generation, whole or as a stream, and errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from djl_python_neuronx.engine.detokenizer import Delta
from djl_python_neuronx.engine.streams import Generation
from djl_python_neuronx.errors import (
    HttpError,
    RequestAbortedError,
    ServingError,
)
from djl_python_neuronx.protocol import answer_error
from djl_python_neuronx.protocol.base import ParsedRequest, client_label, new_id
from djl_python_neuronx.protocol.parameters import shown_name
from djl_python_neuronx.types import FinishReason, GenerationRequest

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
WRITE_PARTS, GONE = "write_parts", "gone"
"""Names in the state of an ASGI scope of a connection's methods; see `LimitedProtocol`."""
_UNBUFFERED = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Headers of a stream: nginx would gather its parts."""


async def generation_response(
    request: Request, parsed: ParsedRequest, generation: Generation
) -> Response:
    """The response to a generation: its first bytes decide on the status, and whether it is a stream.

    Raises:
        ClientDisconnect: the client left before the first bytes.
    """
    request_id = parsed.request.label
    chunks = _chunks(request, parsed, generation)
    sink = _sink(request, parsed)
    if not parsed.stream:
        generation.sink = sink
    first = await anext(chunks, None)
    if first is None:
        raise ClientDisconnect
    delta, chunk = first
    headers, media_type = {"x-request-id": request_id}, parsed.formatter.content_type
    if not generation.finished and delta.error is None:
        headers |= _UNBUFFERED
        body = _stream(chunk, chunks, generation, sink)
        return _Stream(body, headers=headers, media_type=media_type)
    await chunks.aclose()
    if delta.error is not None:
        return failure_response(delta.error, parsed.request)
    return Response(chunk, headers=headers, media_type=media_type)


_Chunks = AsyncGenerator[tuple[Delta, bytes], None]


async def _chunks(request: Request, parsed: ParsedRequest, generation: Generation) -> _Chunks:
    """The deltas that there is something to send for, with their bytes. Ends early if the client leaves."""

    def leave(_gone: asyncio.Future[None]) -> None:
        logger.info("client_gone request_id=%s", parsed.request.label)
        generation.close()

    gone = _gone(request)
    gone.add_done_callback(leave)
    try:
        async for delta in generation:
            try:
                chunk = await parsed.run(parsed.formatter.feed, delta)
            except ServingError as error:  # of a formatter of `model.py`
                delta = delta._replace(
                    text="", tokens=(), finish_reason=FinishReason.ERROR, error=error
                )
                yield delta, parsed.formatter.feed(delta)
                return
            if chunk or generation.finished:
                yield delta, chunk
    finally:
        gone.remove_done_callback(leave)
        generation.close()


async def while_connected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, or its error.

    Raises:
        ClientDisconnect: the client has left, and the work is cancelled.
    """
    task = asyncio.create_task(work)
    either: list[asyncio.Future[Any]] = [task, _gone(request)]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()


def _gone(request: Request) -> asyncio.Future[None]:
    """Done when the client has left: a response itself may notice that at its next bytes only.

    Never where the connection is not a `LimitedProtocol`.
    """
    client_gone: Callable[[], asyncio.Future[None]] = request.scope.get("state", {}).get(
        GONE, asyncio.get_running_loop().create_future
    )
    return client_gone()


_Sink = Callable[[list[Delta]], bool]


def _sink(request: Request, parsed: ParsedRequest) -> _Sink | None:
    """A sink that writes an answer to its connection. None where the connection or the formatter must be waited for."""
    write_parts = request.scope.get("state", {}).get(WRITE_PARTS)
    if write_parts is None or parsed.thread is not None:
        return None
    feed = parsed.formatter.feed
    return lambda deltas: write_parts(map(feed, deltas))


async def _stream(
    first: bytes, chunks: _Chunks, generation: Generation, sink: _Sink | None
) -> AsyncGenerator[bytes, None]:
    async with aclosing(chunks):
        yield first
        generation.sink = sink  # from here on: the head of the answer is written
        async for _, chunk in chunks:
            yield chunk


class _Stream(StreamingResponse):
    """A streamed answer. It ends with its body: `_chunks` already watches the connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """See ASGI. Bytes of the body go past `send`, which waits if the connection cannot take them."""
        write_parts = scope.get("state", {}).get(WRITE_PARTS, lambda _: False)

        async def write(message: Message) -> None:
            if not (body := message.get("body")) or not write_parts([body]):
                await send(message)

        await self.stream_response(write)


def error_response(
    error: ServingError, *, path: str = "", protocol: str = "", request_id: str | None = None
) -> Response:
    """The response to a request that failed, in the shape of its protocol."""
    headers = {} if request_id is None else {"x-request-id": request_id}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    status, body = answer_error(error, protocol=protocol, path=path)
    return Response(body, status, headers, media_type="application/json")


def failure_response(error: ServingError, request: GenerationRequest) -> Response:
    """The response to a request that was parsed and failed later."""
    return error_response(error, protocol=request.protocol, request_id=request.label)


async def on_serving_error(request: Request, error: Exception) -> Response:
    """An error of this package, with its own status."""
    assert isinstance(error, ServingError)  # noqa: S101  (starlette's handler signature is wider than its use)
    path, headers = request.url.path, request.headers
    if request.method != "POST":
        return error_response(error, path=path)
    sent = headers.get("x-request-id") or headers.get("x-amzn-sagemaker-inference-id")
    request_id = client_label(sent) or new_id()
    logger.info(
        "request_rejected path=%s request_id=%s code=%s reason=%r",
        shown_name(path), request_id, error.code, str(error),
    )  # fmt: skip
    return error_response(error, path=path, request_id=request_id)


async def on_client_disconnect(request: Request, _error: Exception) -> Response:
    """A status for a connection that is already closed: the client left before the response began."""
    error = RequestAbortedError("the client closed the connection")
    return error_response(error, path=request.url.path)


async def on_http_error(request: Request, error: Exception) -> Response:
    """An unknown route or method, as JSON like every other error, with the routes that exist."""
    assert isinstance(error, HTTPException)  # noqa: S101
    text = error.detail
    if text == HTTPStatus(error.status_code).phrase:  # starlette's own
        routes = [
            f"{method} {route.path_format}"
            for route in request.app.routes
            for method in route.methods - {"HEAD"}
        ]
        asked = shown_name(f"{request.method} {request.url.path}")
        text = f"no route {asked}; expected {', '.join(routes)}"
        if request.url.path.startswith("/v1/responses/"):
            text = f"no route {asked}: no response is stored; send whole conversations to /v1/responses"
    response = error_response(HttpError(text, error.status_code), path=request.url.path)
    response.headers.update(error.headers or {})
    return response


async def on_bug(request: Request, error: Exception) -> Response:
    """Any other exception: its details are logged, not sent."""
    logger.error("request_failed path=%s", request.url.path, exc_info=error)
    failure = ServingError("the server failed on this request; its log has the reason")
    return error_response(failure, path=request.url.path)
