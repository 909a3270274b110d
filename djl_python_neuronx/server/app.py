"""HTTP server for machines without DJL Serving: SageMaker's container contract and DJL's routes as an ASGI app.

It listens before it loads: `/ping` answers 503 until every graph has run once, and again after the engine has failed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import signal
import socket
import ssl
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from types import FrameType
from typing import Any, Union

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp
from typing_extensions import NotRequired, TypedDict

from djl_python_neuronx.artifacts.manifest import package_version
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.engine.detokenizer import Delta
from djl_python_neuronx.engine.limits import longest_prompt, sampling_facts
from djl_python_neuronx.errors import (
    BackendUnavailableError,
    RequestError,
    ServingError,
)
from djl_python_neuronx.protocol import PROTOCOLS, decode, tgi
from djl_python_neuronx.protocol.base import (
    Threads,
    check_model,
    generate,
    named_model,
    parse,
)
from djl_python_neuronx.protocol.openai import (
    ModelEntry,
    ModelList,
    model_entry,
)
from djl_python_neuronx.server.bodies import Bodies
from djl_python_neuronx.server.http import (
    BACKLOG,
    KERNEL_BACKLOG,
    PROBES,
    SPARE_CONNECTIONS,
    LimitedProtocol,
    drop_oldest,
)
from djl_python_neuronx.server.keys import KeyCheck
from djl_python_neuronx.server.models import Load, Loader, Model
from djl_python_neuronx.server.openapi import answers, document
from djl_python_neuronx.server.responses import (
    failure_response,
    generation_response,
    on_bug,
    on_client_disconnect,
    on_http_error,
    on_serving_error,
    while_connected,
)
from djl_python_neuronx.telemetry import Metrics, exposition

logger = logging.getLogger(__name__)

ADMIN_PATHS = frozenset({"/info", "/metrics"})
"""Paths that `option.admin_port` moves to the second port."""
RESERVED_CONNECTIONS = 2 * SPARE_CONNECTIONS
"""Connections of the second port, for which there is room when the first one has all that are allowed."""
SERVER_THREADS = 4
"""Threads for what would hold the event loop for a millisecond or more."""
LOG_METRICS_S = 60
"""Pause between two lines of the metrics: CloudWatch's usual resolution."""

_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"

JOIN_S = 0.5
"""Time after the drain for the engine to end by itself, and then for its threads."""
ANSWER_S = 0.3
"""Time after that to write the last answers."""
END_S = 1.7
"""Time after the drain until the process ends, whatever still runs."""


class Health(TypedDict):
    """The server takes requests."""

    status: str
    models: NotRequired[dict[str, str]]
    """The state of each of several models: `ready`, or why it takes no requests."""


class Application:
    """The routes, and the models behind them."""

    def __init__(self, *models: Model) -> None:
        self.models = models
        self.bodies = Bodies()
        self.needs_key = False
        """True if requests need an API key."""
        self._document: bytes | None = None
        """See `openapi`."""
        self.stop: Callable[[], None] = lambda: None
        """Stops the server."""
        self.failure: ServingError | None = None
        """The error for which no model can be served any more."""

    @property
    def options(self) -> ServingOptions:
        """Current server options (identical for all models)."""
        return self.models[0].options

    @property
    def max_body_bytes(self) -> int:
        """The longest body of a request for any model; each model has its own limit below it."""
        return max(model.options.max_body_bytes for model in self.models)

    @property
    def model_names(self) -> list[str]:
        """The names of all models in paths and bodies."""
        return [name for model in self.models for name in model.names]

    def fail(self, error: ServingError) -> None:
        """Stop the server: there is no model to serve."""
        self.failure = error
        self.stop()

    def find(self, name: str | None) -> Model:
        """The model of a name, or the only one.

        Raises:
            UnknownModelError: there is none of this name.
            RequestError: there is no name, and there are several models.
        """
        check_model(name, self.model_names)
        found = [one for one in self.models if name in one.names or len(self.models) == 1]
        if not found:
            listed = ", ".join(map(repr, self.model_names))
            msg = f"the request names no model; set model to one of {listed}"
            raise RequestError(msg, param="model")
        return found[0]

    def _loaded(self) -> list[Model]:
        """The models that are loaded and not given up.

        Raises:
            BackendUnavailableError: there is none.
        """
        loaded = [one for one in self.models if one.service is not None and one.failure is None]
        if not loaded:
            raise BackendUnavailableError(_listed(self.models))
        return loaded

    @answers(Health)
    async def ping(self, _request: Request) -> Response:
        """200 if all models have been loaded and one takes requests; 503 also while its engine is started again."""
        loading = any(model.service is None for model in self.models)
        if loading or all(model.problem for model in self.models):
            raise BackendUnavailableError(_listed(self.models))
        body: dict[str, Any] = {"status": "healthy"}
        if len(self.models) > 1:
            body["models"] = {one.names[0]: one.problem or "ready" for one in self.models}
        return JSONResponse(body)

    def _metrics(self) -> dict[str, Metrics]:
        """The metrics of the models that are loaded, by name."""
        return {one.names[0]: one.service.metrics for one in self.models if one.service}

    @answers(str, "text/plain")
    async def metrics(self, _request: Request) -> Response:
        """Prometheus metrics; those of a model from the end of its load on."""
        # On a thread: a millisecond of Python that tokens would wait for in the event loop.
        body = await asyncio.to_thread(exposition, self._metrics())
        return Response(body, media_type="text/plain; version=0.0.4")

    async def log_metrics(self) -> None:
        """Log the metrics of each model for CloudWatch, if `option.cloudwatch_namespace` is set."""
        if (namespace := self.options.cloudwatch_namespace) is not None:
            for name, metrics in self._metrics().items():
                line = await asyncio.to_thread(metrics.embedded, namespace, name)
                logger.info(line, extra={"bare": True})

    @answers(Union[dict[str, Any], list[dict[str, Any]]])
    async def info(self, _request: Request) -> Response:
        """Facts of a loaded model: lengths, slots, sampling, speculation, chunked prefill. Of several a list."""
        if len(self.models) > 1:
            return JSONResponse([_facts(model) for model in self._loaded()])
        return JSONResponse(_facts(self.models[0]))

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

    @answers(ModelList)
    async def list_models(self, _request: Request) -> Response:
        """OpenAI's list of models: an entry for each name."""
        entries = [
            model_entry(name, model.ready().loaded_s)
            for model in self._loaded()
            for name in model.names
        ]
        return JSONResponse({"object": "list", "data": entries})

    @answers(ModelEntry)
    async def model(self, request: Request) -> Response:
        """One of OpenAI's list of models."""
        name = request.path_params["model"]
        return JSONResponse(model_entry(name, self.find(name).ready().loaded_s))

    async def invocations(self, request: Request) -> Response:
        """Generate."""
        name, payload = request.path_params.get("model"), None
        named = name is not None or len(self.models) == 1
        if named:
            self.find(name).ready()
        headers = _headers(request)
        request_id = headers.get("x-request-id") or headers.get("x-amzn-sagemaker-inference-id")
        async with self.bodies.read(request, self.max_body_bytes) as body:
            if not named:
                payload = await asyncio.to_thread(decode, body, headers)
                name = named_model(payload, self.model_names)
            model = self.find(name)
            while True:
                service, parsed = await model.taking(), None
                work = parse(
                    service,
                    body,
                    request_id=request_id,
                    headers=headers,
                    path=request.url.path,
                    payload=payload,
                )
                try:
                    parsed = await while_connected(request, work)
                    if not parsed.requests:
                        answer = parsed.formatter.feed(Delta("", "", ()))
                        return Response(answer, media_type="application/json")
                    generation = await generate(service, parsed)
                    break
                except ServingError as error:
                    if not model.has_left(service):
                        if parsed is None:
                            raise
                        return failure_response(error, parsed.request)
            del body, payload  # they may be large, and an answer takes long
        return await generation_response(request, parsed, generation)


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
        self._silent: OrderedDict[LimitedProtocol, None] = OrderedDict()
        self._protocol: Any = partial(
            LimitedProtocol, lambda: application.options, tls, self._silent
        )
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
            backlog=BACKLOG,
            callback_notify=application.log_metrics,
            timeout_notify=LOG_METRICS_S,
        )
        super().__init__(config)
        self._application = application
        self._drain_s = drain_s
        self.on_listening: Callable[[], None] = lambda: None
        """Called when all ports listen."""
        self._signalled = False
        self._no_descriptor_s = -math.inf
        """The time at which the log last said that no connection could be accepted."""

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
        host, port = self.config.host, self.config.port
        event_loop = asyncio.get_running_loop()
        event_loop.set_exception_handler(self._on_loop_error)
        event_loop.set_default_executor(Threads(SERVER_THREADS, "djl-neuronx-server"))
        uvicorns = logging.getLogger("uvicorn.error")
        uvicorns.disabled = True  # its line of the error has neither time nor flag
        try:
            await super().startup(sockets)
        except SystemExit as ended:
            logger.error(_refused(ended.__context__, f"--host {host}", f"--port {port}"))  # noqa: TRY400
            raise
        finally:
            uvicorns.disabled = False
        if self._application.options.admin_port is not None:
            await self._listen_for_admin(self._application.options)
        # asyncio's `backlog` is also the number of connections that it accepts at once.
        for bound in [one for server in self.servers for one in server.sockets]:
            with bound.dup() as sock:
                sock.listen(KERNEL_BACKLOG)
        self.on_listening()

    async def _listen_for_admin(self, options: ServingOptions) -> None:
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
        event_loop = asyncio.get_running_loop()
        try:
            server = await event_loop.create_server(protocol, host, port, backlog=BACKLOG)
        except OSError as error:
            of_host = f"option.admin_host={host}" if options.admin_host else f"--host {host}"
            logger.error(_refused(error, of_host, f"option.admin_port={port}"))  # noqa: TRY400
            raise SystemExit(1) from error
        self.servers.append(server)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening. Requests that do not end within the drain time get an error, not a closed connection."""
        ending = asyncio.create_task(super().shutdown(sockets))
        services = [one for model in self._application.models for one in model.services]
        for model in self._application.models:
            model.stop()
        if services:
            count = sum(len(service.loop.streams) for service in services)
            logger.info("stopping drain_s=%g requests=%d", self._drain_s, count)
            pool, event_loop = ThreadPoolExecutor(len(services)), asyncio.get_running_loop()
            closes = [partial(one.loop.close, self._drain_s, JOIN_S) for one in services]
            await asyncio.gather(*(event_loop.run_in_executor(pool, close) for close in closes))
        await asyncio.wait([ending], timeout=ANSWER_S)
        for connection in list(self.server_state.connections):
            assert isinstance(connection, LimitedProtocol)  # noqa: S101  (of `Config`)
            connection.stop()
        await ending

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Make room if no connection can be accepted, which asyncio reports up to `BACKLOG` times a second."""
        error = context.get("exception")
        if "socket" not in context or getattr(error, "errno", None) not in _NO_ROOM:
            loop.default_exception_handler(context)
            return
        drop_oldest(self._silent)
        if loop.time() - self._no_descriptor_s > LOG_METRICS_S:
            self._no_descriptor_s = loop.time()
            logger.warning(
                "connection_not_accepted reason=%r connections=%d fix='raise the limit of open files (ulimit -n), or "
                "lower option.max_connections'",
                str(error), len(self.server_state.connections),
            )  # fmt: skip

    def _end_late(self) -> None:
        """End the process because something is stuck: a device call, a text that is being tokenised, a load."""
        os.write(2, b"djl-neuronx: ended after the drain although a thread still runs\n")
        os._exit(1 if self._application.failure is not None else 0)


def create_app(
    application: Application, has: Callable[[str], bool] = lambda _path: True
) -> Starlette:
    """The ASGI app for those of the application's routes whose path `has` accepts."""
    get = {
        "/ping": application.ping,
        "/health": application.ping,
        "/metrics": application.metrics,
        "/info": application.info,
        "/version": application.version,
        "/openapi.json": application.openapi,
        "/v1/models": application.list_models,
        "/v1/models/{model:path}": application.model,
    }
    post = ["/invocations", "/predictions/{model:path}", "/models/{model:path}/invoke"]
    post += dict.fromkeys(path for protocol in PROTOCOLS for path in protocol.paths)
    routes = [Route(path, handler, methods=["GET"]) for path, handler in get.items()]
    routes += [Route(path, application.invocations, methods=["POST"]) for path in post]
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
    loads: Mapping[Model, Load],
    *,
    host: str,
    port: int,
    drain_s: float,
    prepare: Callable[[], Sequence[Sequence[str]]],
    tls: ssl.SSLContext | None = None,
    api_keys: Sequence[bytes] = (),
) -> int:
    """Listen, load, serve until SIGTERM or SIGINT, drain. Returns the exit status: 1 if it cannot listen or load.

    At SIGHUP the models are loaded again. `prepare`: see `Loader`.
    """
    application = Application(*loads)
    server = Server(application, host, port, drain_s, tls=tls, api_keys=api_keys)
    application.stop = server.stop
    scheme = "http" if tls is None else "https"

    def log_ready(model: Model) -> None:
        url = f"{scheme}://{host}:{port}/invocations"
        logger.info("ready url=%s model=%s api_keys=%d", url, model.names[0], len(api_keys))

    loader = Loader(loads, prepare, log_ready, application.fail)
    for number in (signal.SIGTERM, signal.SIGINT):  # also before and after uvicorn handles them
        signal.signal(number, server.handle_exit)
    signal.signal(signal.SIGHUP, lambda *_: loader.reload())
    server.on_listening = loader.thread.start
    try:
        server.run()
    except SystemExit:  # it cannot listen, has logged why, and loads nothing
        return 1
    if not loader.end(JOIN_S):
        # The interpreter sometimes aborts when it ends while a thread runs torch's code.
        logging.shutdown()
        os._exit(0)
    for model in application.models:
        for service in model.services:
            service.close()
    return 0 if application.failure is None else 1


def _refused(error: BaseException | None, host: str, port: str) -> str:
    """The reason that a port cannot be opened, after the setting to change, `host` or `port`."""
    why = getattr(error, "strerror", None) or error
    if getattr(error, "errno", None) in {errno.EADDRINUSE, errno.EACCES}:
        return f"{port} ({host}): {why}; end what uses the port, or set another one"
    return f"{host}: {why}; set a name or an address of this machine, or 0.0.0.0 for all of them"


def _listed(models: Sequence[Model]) -> str:
    """The reason that no request can be served: the problem of the only model, or the state of each."""
    if len(models) == 1:
        return models[0].problem
    return "; ".join(f"{model.names[0]}: {model.problem or 'ready'}" for model in models)


def _facts(model: Model) -> dict[str, Any]:
    """The facts of a model for `/info`."""
    service, name = model.ready(), model.names[0]
    spec = service.loop.spec
    return {
        **tgi.info(name, spec, service.options, package_version()),
        "model": name,
        "max_model_len": spec.max_model_len,
        "longest_prompt": longest_prompt(spec),
        "num_slots": spec.num_slots,
        "sampling": sampling_facts(spec),
        "speculation": service.speculation,
        "chunked_prefill": spec.mixed_steps,
        "copies": [
            {"state": "ready" if copy.alive else copy.loop.stage, "cores": copy.cores}
            for copy in service.loop.copies
        ],
    }


def _headers(request: Request) -> dict[str, str]:
    """Headers by lower-case name. SageMaker's custom attributes (``k=v;k=v``) are among them, as in DJL Serving."""
    headers = dict(request.headers)
    pairs = [pair.split("=", 1) for pair in headers.pop(_ATTRIBUTES, "").split(";") if "=" in pair]
    return {**{name.strip().lower(): value.strip() for name, value in pairs}, **headers}
