"""HTTP server for machines without DJL Serving: SageMaker's container contract and DJL's routes as an ASGI app.

It listens before it loads: `/ping` answers 503 until every graph has run once, and again after the engine has failed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from djl_python_neuronx.artifacts.manifest import package_version
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.engine.detokenizer import Delta
from djl_python_neuronx.engine.limits import longest_prompt, sampling_facts
from djl_python_neuronx.errors import (
    BackendUnavailableError,
    BodyTooLargeError,
    QueueFullError,
    ServingError,
)
from djl_python_neuronx.protocol import PROTOCOLS, tgi
from djl_python_neuronx.protocol.base import generate, over_limit, parse
from djl_python_neuronx.protocol.openai import (
    ModelEntry,
    ModelList,
    check_model,
    model_entry,
)
from djl_python_neuronx.server.http import PROBES, SPARE_CONNECTIONS, LimitedProtocol
from djl_python_neuronx.server.keys import KeyCheck
from djl_python_neuronx.server.openapi import answers, document
from djl_python_neuronx.server.responses import (
    failure_response,
    generation_response,
    on_bug,
    on_client_disconnect,
    on_http_error,
    on_serving_error,
)
from djl_python_neuronx.telemetry import log_load_failure

if TYPE_CHECKING:
    # Imported with the load, which begins when the server listens.
    from djl_python_neuronx.service import Service

logger = logging.getLogger(__name__)

ADMIN_PATHS = frozenset({"/info", "/metrics"})
"""Paths that `option.admin_port` moves to the second port."""
RESERVED_CONNECTIONS = 2 * SPARE_CONNECTIONS
"""Connections of the second port, for which there is room when the first one has all that are allowed."""
LONG_BODY_BYTES = 1024 * 1024
PACE_S = 0.01
"""Pause after each part (at most 256 KiB) of what a body has above `LONG_BODY_BYTES`. Without it a client that sends
bodies of 5 MB takes the event loop, at 12 ms of CPU time each, from the tokens of all others (2 vCPU, 2026-11)."""

BODIES = 8
"""Bodies of the largest size that may be read and parsed at once."""
SHORT_BODY_BYTES = 64 * 1024
"""Bodies up to this size are read in any case and not counted: neither can keep the other out."""

LOG_METRICS_S = 60
"""Pause between two lines of the metrics: CloudWatch's usual resolution."""

_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"

JOIN_S = 0.5
"""Time after the drain for the engine to end by itself, and then for its threads."""
ANSWER_S = 0.3
"""Time after that to write the last answers."""
END_S = 1.7
"""Time after the drain until the process ends, whatever still runs."""


Load: TypeAlias = "Callable[[Callable[[str], None], Callable[[ServingError], None]], Service]"
"""Loads a model. Its arguments: a function for each stage of the load in words, and one for the end of the engine."""


class Application:
    """The routes and their state: a service that is loading, loaded, or failed to load."""

    def __init__(self, folder_name: str, options: ServingOptions | None = None) -> None:
        """`options`: those that hold until the model is loaded."""
        self._folder_name = folder_name
        self._options = options or ServingOptions()
        self.body_bytes = 0
        """Bytes of bodies above `SHORT_BODY_BYTES` that are being read or parsed."""
        self.service: Service | None = None
        self.needs_key = False
        """Whether requests need an API key."""
        self._document: bytes | None = None
        """See `openapi`."""
        self.stop: Callable[[], None] = lambda: None
        """Stops the server."""
        self.stage = "starting"
        """What the load is doing, for people."""
        self.failure: ServingError | None = None
        """Why no request can be served any more."""

    @property
    def options(self) -> ServingOptions:
        """The options that hold now."""
        return self._options if self.service is None else self.service.options

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model's names in paths and bodies, the first one for answers."""
        return self.options.model_names or (self._folder_name,)

    def load(self, load: Load) -> None:
        """Load the service; a failure is logged and stops the server."""
        try:
            self.service = load(partial(setattr, self, "stage"), self.on_death)
        except BaseException as error:  # noqa: BLE001  (a border: every failure is an answer, also `SystemExit`)
            self.on_death(log_load_failure(error))

    def on_death(self, error: ServingError) -> None:
        """Stop the server: there is no engine, and none is started again."""
        self.failure = error
        self.stop()

    def ready(self) -> Service:
        """The loaded service.

        Raises:
            BackendUnavailableError: it is still loading, could not be loaded, or its engine has failed.
        """
        if self.failure is not None:
            raise BackendUnavailableError(str(self.failure)) from self.failure
        if self.service is None:
            msg = f"the model is still loading ({self.stage}); retry when /ping answers 200"
            raise BackendUnavailableError(msg)
        if (error := self.service.loop.error) is not None:
            raise BackendUnavailableError(str(error)) from error
        return self.service

    @answers(dict[str, str])
    async def ping(self, _request: Request) -> Response:
        """200 if requests are served; 503 also while the engine is started again."""
        loop = self.ready().loop
        if not loop.alive:
            msg = f"the engine is being started again ({loop.stage}); retry when /ping answers 200"
            raise BackendUnavailableError(msg)
        return JSONResponse({"status": "healthy"})

    @answers(str, "text/plain")
    async def metrics(self, _request: Request) -> Response:
        """Prometheus metrics; empty until the model is loaded."""
        # On a thread: a millisecond of Python that tokens would wait for in the event loop.
        metrics = None if self.service is None else self.service.metrics
        body = b"" if metrics is None else await asyncio.to_thread(metrics.exposition)
        return Response(body, media_type="text/plain; version=0.0.4")

    async def log_metrics(self) -> None:
        """Log the metrics for CloudWatch, if `option.cloudwatch_namespace` is set."""
        service, namespace = self.service, self.options.cloudwatch_namespace
        if service is not None and namespace is not None:
            name = self.model_names[0]
            line = await asyncio.to_thread(service.metrics.embedded, namespace, name)
            logger.info(line, extra={"bare": True})

    @answers(dict[str, Any])
    async def info(self, _request: Request) -> Response:
        """Facts of the loaded model: lengths, slots, sampling, speculation, chunked prefill."""
        service = self.ready()
        spec = service.loop.spec
        facts = {
            **tgi.info(self.model_names[0], spec, service.options, package_version()),
            "model": self.model_names[0],
            "max_model_len": spec.max_model_len,
            "longest_prompt": longest_prompt(spec),
            "num_slots": spec.num_slots,
            "sampling": sampling_facts(spec),
            "speculation": service.speculation,
            "chunked_prefill": spec.mixed_steps,
        }
        return JSONResponse(facts)

    @answers(dict[str, str])
    async def version(self, _request: Request) -> Response:
        """The version of the package; vLLM's route."""
        return JSONResponse({"version": package_version()})

    @answers(dict[str, Any])
    async def openapi(self, request: Request) -> Response:
        """The OpenAPI document of the routes."""
        if self._document is None:
            routes = request.app.routes
            free = PROBES if self.needs_key else {route.path for route in routes}
            # On a thread: a tenth of a second of Python that tokens would wait for in the event loop.
            self._document = await asyncio.to_thread(document, routes, free)
        return Response(self._document, media_type="application/json")

    async def predictions(self, request: Request) -> Response:
        """Generate; DJL's route, with the model's name in the path."""
        check_model(request.path_params["model"], self.model_names)
        return await self.invocations(request)

    @answers(ModelList)
    async def models(self, _request: Request) -> Response:
        """OpenAI's list of models: an entry for each name."""
        created = self.ready().loaded_s
        entries = [model_entry(name, created) for name in self.model_names]
        return JSONResponse({"object": "list", "data": entries})

    @answers(ModelEntry)
    async def model(self, request: Request) -> Response:
        """One of OpenAI's list of models."""
        service, name = self.ready(), request.path_params["model"]
        check_model(name, self.model_names)
        return JSONResponse(model_entry(name, service.loaded_s))

    async def invocations(self, request: Request) -> Response:
        """Generate."""
        service = self.ready()
        headers = _headers(request)
        request_id = headers.get("x-request-id") or headers.get("x-amzn-sagemaker-inference-id")
        with self._counting() as count:
            body = await _read(request, self.options.max_body_bytes, count)
            path = request.url.path
            parsed = await parse(service, body, request_id=request_id, headers=headers, path=path)
        del body  # it may be large, and an answer takes long
        if not parsed.requests:
            return Response(parsed.formatter.feed(Delta("", "", ())), media_type="application/json")
        try:
            generation = await generate(service, parsed)
        except ServingError as error:
            return failure_response(error, parsed.request)
        return await generation_response(request, parsed, generation)

    @contextmanager
    def _counting(self) -> Iterator[Callable[[int], None]]:
        """Count one body in `body_bytes` until it is parsed, with the function that it gives; it takes the size so far.

        What has arrived is counted, not what a client declares: one that declares much and sends slowly keeps nobody
        out. The function raises `QueueFullError`.
        """
        counted, most = 0, BODIES * self.options.max_body_bytes

        def count(size: int) -> None:
            nonlocal counted
            if size > SHORT_BODY_BYTES:
                self.body_bytes += size - counted
                counted = size
            if counted and self.body_bytes > most:
                msg = (
                    f"the long bodies that are being read have more than {most} bytes together, the limit "
                    f"({BODIES} x option.max_body_bytes); retry later"
                )
                raise QueueFullError(msg)

        try:
            yield count
        finally:
            self.body_bytes -= counted


class Server(uvicorn.Server):
    """Closes the engine loop while connections are open, so that every request gets a response."""

    def __init__(
        self,
        application: Application,
        host: str,
        port: int,
        drain_s: float,
        *,
        tls: ssl.SSLContext | None = None,
        api_keys: Sequence[bytes] = (),
    ) -> None:
        """Configure the ports. `api_keys`: digests, see `keys.read_keys`; none: all requests are served."""
        options = application.options
        moved = ADMIN_PATHS if options.admin_port else ()
        app: ASGIApp = create_app(application, lambda path: path not in moved)
        if api_keys:
            application.needs_key = True
            app = KeyCheck(app, api_keys)
        if options.cors_allow_origins:
            app = CORSMiddleware(
                app,
                allow_origins=options.cors_allow_origins,
                allow_headers=["*"],
                allow_methods=["GET", "POST"],
                expose_headers=["retry-after", "x-request-id"],
            )
        # The same one whatever is installed.
        self._protocol: Any = partial(LimitedProtocol, lambda: application.options, tls)
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            http=self._protocol,  # type: ignore[arg-type]
            loop="asyncio",
            ws="none",
            lifespan="off",
            proxy_headers=False,
            log_config=None,
            access_log=False,
            callback_notify=application.log_metrics,
            timeout_notify=LOG_METRICS_S,
        )
        super().__init__(config)
        self._application = application
        self._drain_s = drain_s
        self._signalled = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Stop; at a second signal end the process at once, with the status of a shell for it."""
        if self._signalled:
            os.write(2, b"djl-neuronx: ended by a second signal; running requests are lost\n")
            os._exit(128 + sig)
        self._signalled = True
        self.stop()

    def stop(self) -> None:
        """Begin the end: drain, and end the process after that whatever still runs. Any thread; idempotent."""
        if not self.should_exit:
            self.should_exit = True
            last = threading.Timer(self._drain_s + END_S, self._end_late)
            last.daemon = True
            last.start()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, also on `option.admin_port`. Ends the process if it cannot."""
        await super().startup(sockets)
        options = self._application.options
        if options.admin_port is None:
            return
        config = copy(self.config)
        config.loaded_app = create_app(self._application, lambda path: path in ADMIN_PATHS | PROBES)
        protocol = partial(
            self._protocol,
            RESERVED_CONNECTIONS,
            config=config,
            server_state=self.server_state,
            app_state={},
        )
        host, port = options.admin_host or config.host, options.admin_port
        try:
            server = await asyncio.get_running_loop().create_server(protocol, host, port)
        except OSError as error:
            logger.error("option.admin_port=%d: %s; set another one", port, error)  # noqa: TRY400
            raise SystemExit(1) from error
        self.servers.append(server)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening. Requests that do not end within the drain time get an error, not a closed connection."""
        ending = asyncio.create_task(super().shutdown(sockets))
        if (service := self._application.service) is not None:
            logger.info("stopping drain_s=%g requests=%d", self._drain_s, len(service.loop.streams))
            await asyncio.to_thread(service.loop.close, self._drain_s, JOIN_S)
        await asyncio.wait([ending], timeout=ANSWER_S)
        for connection in list(self.server_state.connections):
            assert isinstance(connection, LimitedProtocol)  # noqa: S101  (of `Config`)
            connection.stop()
        await ending

    def _end_late(self) -> None:
        """End the process because something is stuck: a device call, a text that is being tokenised, a load."""
        os.write(2, b"djl-neuronx: ended after the drain although a thread still runs\n")
        os._exit(1 if self._application.failure is not None else 0)


def create_app(
    application: Application, has: Callable[[str], bool] = lambda _path: True
) -> Starlette:
    """The ASGI app for those of the application's routes whose path `has` accepts."""
    paths = dict.fromkeys(path for protocol in PROTOCOLS for path in protocol.paths)
    routes = [
        Route("/ping", application.ping, methods=["GET"]),
        Route("/health", application.ping, methods=["GET"]),
        Route("/metrics", application.metrics, methods=["GET"]),
        Route("/info", application.info, methods=["GET"]),
        Route("/version", application.version, methods=["GET"]),
        Route("/openapi.json", application.openapi, methods=["GET"]),
        Route("/invocations", application.invocations, methods=["POST"]),
        Route("/predictions/{model:path}", application.predictions, methods=["POST"]),
        Route("/v1/models", application.models, methods=["GET"]),
        Route("/v1/models/{model:path}", application.model, methods=["GET"]),
        Route("/models/{model:path}/invoke", application.predictions, methods=["POST"]),
        *(Route(path, application.invocations, methods=["POST"]) for path in paths),
    ]
    app = Starlette(
        routes=[route for route in routes if has(route.path)],
        exception_handlers={
            ServingError: on_serving_error,
            ClientDisconnect: on_client_disconnect,
            HTTPException: on_http_error,
            Exception: on_bug,
        },
    )
    # Starlette would send a path with a slash at its end to the host that the client names.
    app.router.redirect_slashes = False
    return app


def serve(
    load: Load,
    *,
    folder_name: str,
    options: ServingOptions,
    host: str,
    port: int,
    drain_s: float,
    tls: ssl.SSLContext | None = None,
    api_keys: Sequence[bytes] = (),
) -> int:
    """Listen, load, serve until SIGTERM or SIGINT, drain. Returns the exit status: 1 if it cannot listen or load.

    `options` hold until the model is loaded.
    """
    application = Application(folder_name, options)
    server = Server(application, host, port, drain_s, tls=tls, api_keys=api_keys)
    application.stop = server.stop

    def load_model() -> None:
        application.load(load)
        if application.failure is None:
            name = application.model_names[0]
            scheme = "http" if tls is None else "https"
            url = f"{scheme}://{host}:{port}/invocations"
            logger.info("ready url=%s model=%s api_keys=%d", url, name, len(api_keys))

    for number in (signal.SIGTERM, signal.SIGINT):  # also before and after uvicorn handles them
        signal.signal(number, server.handle_exit)
    loader = threading.Thread(target=load_model, name="djl-neuronx-load", daemon=True)
    loader.start()
    status = 0
    try:
        server.run()
    except SystemExit:  # uvicorn cannot listen, and has logged why
        status = 1
    if loader.is_alive():
        # The interpreter sometimes aborts when it ends while a thread runs torch's code.
        logging.shutdown()
        os._exit(status)
    if application.service is not None:
        application.service.close()
    return 1 if application.failure is not None else status


def _headers(request: Request) -> dict[str, str]:
    """Headers by lower-case name. SageMaker's custom attributes (``k=v;k=v``) are among them, as in DJL Serving."""
    headers = dict(request.headers)
    pairs = [pair.split("=", 1) for pair in headers.pop(_ATTRIBUTES, "").split(";") if "=" in pair]
    return {**{name.strip().lower(): value.strip() for name, value in pairs}, **headers}


async def _read(request: Request, limit: int, count: Callable[[int], None]) -> bytes:
    """The body, rejected as soon as it is over the limit. `count` is called with the size so far."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise BodyTooLargeError(over_limit(limit))
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        count(size)
        if size > limit:
            raise BodyTooLargeError(over_limit(limit))
        chunks.append(chunk)
        if size > LONG_BODY_BYTES:
            await asyncio.sleep(PACE_S)
    if size > LONG_BODY_BYTES:  # a millisecond or more, without the GIL
        return await asyncio.to_thread(b"".join, chunks)
    return b"".join(chunks)
