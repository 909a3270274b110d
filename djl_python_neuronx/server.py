"""HTTP for machines without DJL Serving: SageMaker's container contract and DJL's routes as an ASGI app.

It listens before it loads: `/ping` is 503 until every graph has run once, and again when the engine has died.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from djl_python_neuronx.engine.outlets import Generation
from djl_python_neuronx.errors import (
    BackendUnavailableError,
    QueueFullError,
    RequestAbortedError,
    RequestError,
    ServingError,
)
from djl_python_neuronx.protocol.base import Formatter, ParsedRequest, error_body
from djl_python_neuronx.service import Service

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024 * 1024
"""DJL Serving's default limit."""

ANSWER_S = 5.0
"""Time to write the last answers after the drain."""

INLINE_BODY_BYTES = 8 * 1024
"""Bodies up to this size are tokenised in the event loop: a thread hop would take longer than the work."""


class _BodyTooLargeError(RequestError):
    """The body is over the limit."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    code = "body_too_large"


class Application:
    """The state behind the routes: a service that is loading, there, or failed to load."""

    def __init__(self, folder_name: str) -> None:
        self._folder_name = folder_name
        self.service: Service | None = None
        self.failure: ServingError | None = None

    @property
    def model_name(self) -> str:
        """What the model is called in paths: `option.model_name`, or its folder."""
        configured = None if self.service is None else self.service.options.model_name
        return configured or self._folder_name

    def load(self, load: Callable[[], Service]) -> None:
        """Load the service; a failure is kept and logged, for a person to read."""
        try:
            self.service = load()
        except ServingError as error:
            logger.error("load_failed code=%s\n%s", error.code, error)  # noqa: TRY400  (no traceback: it is explained)
            self.failure = error
        except Exception as error:
            logger.exception("load_failed")
            message = f"the model could not be loaded ({type(error).__name__}: {error})"
            self.failure = ServingError(message)

    def ready(self) -> Service:
        """The service.

        Raises:
            BackendUnavailableError: it is still loading, could not be loaded, or its engine is dead.
        """
        if self.failure is not None:
            raise BackendUnavailableError(str(self.failure)) from self.failure
        if self.service is None:
            msg = "the model is still loading; retry when /ping answers 200"
            raise BackendUnavailableError(msg)
        if not self.service.loop.alive:
            error = self.service.loop.error
            raise BackendUnavailableError(str(error or "the engine has stopped")) from error
        return self.service

    async def ping(self, _request: Request) -> Response:
        """200 when requests are answered."""
        self.ready()
        return Response(orjson.dumps({"status": "healthy"}), media_type="application/json")

    async def metrics(self, _request: Request) -> Response:
        """Prometheus metrics; none before the model is there."""
        body = b"" if self.service is None else self.service.metrics.exposition()
        return Response(body, media_type="text/plain; version=0.0.4")

    async def predictions(self, request: Request) -> Response:
        """DJL's route: the model is named in the path."""
        name = request.path_params["model"]
        if name != self.model_name:
            msg = f"there is no model {name!r} here; this server serves {self.model_name!r}"
            raise HTTPException(HTTPStatus.NOT_FOUND, msg)
        return await self.invocations(request)

    async def invocations(self, request: Request) -> Response:
        """Generate."""
        service = self.ready()
        headers = dict(request.headers)
        request_id = headers.get("x-request-id") or headers.get("x-amzn-sagemaker-inference-id")
        body = await _read(request)
        if len(body) <= INLINE_BODY_BYTES:
            parsed = service.parse(body, request_id=request_id, headers=headers)
        else:
            parsed = await asyncio.to_thread(
                service.parse, body, request_id=request_id, headers=headers
            )
        try:
            generation = service.loop.generate(parsed.request)
        except ServingError as error:
            service.count_rejected(error)
            raise
        return GenerationResponse(generation, parsed)


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
                    await _error_response(delta.error, self._request_id)(
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


class _Server(uvicorn.Server):
    """Closes the engine loop while the connections are still there to be answered."""

    def __init__(self, config: uvicorn.Config, application: Application, drain_s: float) -> None:
        super().__init__(config)
        self._application = application
        self._drain_s = drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening; requests that do not end within the drain time get their error, not a cut connection."""
        service = self._application.service
        closing = None
        if service is not None:
            closing = asyncio.create_task(asyncio.to_thread(service.loop.close, self._drain_s))
        await super().shutdown(sockets)
        if closing is not None:
            await closing


def create_app(application: Application) -> Starlette:
    """The ASGI app around the state."""
    return Starlette(
        routes=[
            Route("/ping", application.ping, methods=["GET"]),
            Route("/metrics", application.metrics, methods=["GET"]),
            Route("/invocations", application.invocations, methods=["POST"]),
            Route("/predictions/{model}", application.predictions, methods=["POST"]),
        ],
        exception_handlers={
            ServingError: _on_serving_error,
            ClientDisconnect: _on_client_gone,
            HTTPException: _on_http_error,
            Exception: _on_bug,
        },
    )


def serve(
    load: Callable[[], Service], *, folder_name: str, host: str, port: int, drain_s: float = 30.0
) -> int:
    """Listen, load, serve until SIGTERM or SIGINT, drain. The exit status: 1 if it cannot listen or load."""
    application = Application(folder_name)
    config = uvicorn.Config(
        create_app(application),
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=math.ceil(drain_s + ANSWER_S),
        timeout_keep_alive=75,
    )
    server = _Server(config, application, drain_s)

    def load_model() -> None:
        application.load(load)
        if application.failure is not None:
            server.should_exit = True
        else:
            name = application.model_name
            logger.info("ready url=http://%s:%d/invocations model=%s", host, port, name)

    def on_signal(_number: int, _frame: object) -> None:
        """Uvicorn raises the signal that stopped it once more when it is done; by default that ends the process."""
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    threading.Thread(target=load_model, name="djl-neuronx-load", daemon=True).start()
    try:
        server.run()
    except SystemExit:  # uvicorn's way to say that it cannot listen; it has logged why
        return 1
    if application.service is not None:
        application.service.close()
    return 1 if application.failure is not None else 0


async def _read(request: Request) -> bytes:
    """The body, refused as soon as it is known to be too large."""
    limit = f"the body is larger than {MAX_BODY_BYTES} bytes, the most that is accepted"
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise _BodyTooLargeError(limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise _BodyTooLargeError(limit)
        chunks.append(chunk)
    return b"".join(chunks)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nothing() -> dict[str, Any]:
    return {"type": "http.disconnect"}


def _error_response(error: ServingError, request_id: str | None = None) -> Response:
    headers = {} if request_id is None else {"x-request-id": request_id}
    if isinstance(error, QueueFullError):
        headers["retry-after"] = str(error.retry_after_s)
    return Response(
        error_body(error), status_code=error.status, headers=headers, media_type="application/json"
    )


async def _on_serving_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)  # noqa: S101  (starlette's handler signature is wider than its use)
    return _error_response(error)


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    """Nobody reads it: the client left while it sent its request."""
    return _error_response(RequestAbortedError("the client closed the connection"))


async def _on_http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101
    body = {"code": error.status_code, "error": error.detail, "type": "http_error"}
    return Response(
        orjson.dumps(body),
        status_code=error.status_code,
        headers=error.headers,
        media_type="application/json",
    )


async def _on_bug(request: Request, error: Exception) -> Response:
    logger.error("request_failed path=%s", request.url.path, exc_info=error)
    return _error_response(ServingError("the server failed on this request; its log says why"))
