"""The ASGI app of the embedded server: SageMaker's container contract, DJL's routes and those of the protocols."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Union

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
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
    ADAPTER,
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
    PROBES,
)
from djl_python_neuronx.server.models import Model
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

_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"


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
        """200 if no model is loading, and one or all (`option.ping`) take requests; 503 also in an engine's restart."""
        loading = any(model.service is None and model.failure is None for model in self.models)
        broken = any if self.options.ping == "all" else all
        if self.failure or loading or broken(model.problem for model in self.models):
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
            self._loaded()
            return JSONResponse(
                [
                    {"model": model.names[0], "problem": model.problem}
                    if model.service is None or model.failure
                    else _facts(model)
                    for model in self.models
                ]
            )
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
        entries = [_entry(name, model) for model in self._loaded() for name in model.names]
        return JSONResponse({"object": "list", "data": entries})

    @answers(ModelEntry)
    async def model(self, request: Request) -> Response:
        """One of OpenAI's list of models."""
        name = request.path_params["model"]
        return JSONResponse(_entry(name, self.find(name)))

    async def invocations(self, request: Request) -> Response:
        """Generate."""
        name, payload = request.path_params.get("model"), None
        named = name is not None or len(self.models) == 1
        if named:
            self.find(name).ready()
        headers = _headers(request, self.models)
        request_id = headers.get("x-request-id") or headers.get("x-amzn-sagemaker-inference-id")
        async with self.bodies.read(request, self.max_body_bytes) as body:
            if not named:
                payload = await asyncio.to_thread(decode, body, headers, request.url.path)
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
    return app_of([route for route in routes if has(route.path)])


def app_of(routes: Sequence[Route]) -> Starlette:
    """The ASGI app for routes, with errors as JSON."""
    app = Starlette(
        routes=routes,
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


def _listed(models: Sequence[Model]) -> str:
    """The reason that no request can be served: the problem of the only model, or the state of each."""
    if len(models) == 1:
        return models[0].problem
    return "; ".join(f"{model.names[0]}: {model.problem or 'ready'}" for model in models)


def _entry(name: str, model: Model) -> ModelEntry:
    """The entry of OpenAI's list for a model."""
    service = model.ready()
    parent = model.names[0] if name in model.adapters else None
    return model_entry(name, service.loaded_s, service.loop.spec.max_model_len, parent)


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
        "simulated": spec.simulated,
        "copies": [
            {"state": "ready" if copy.alive else copy.loop.stage, "cores": copy.cores}
            for copy in service.loop.copies
        ],
    }


def _headers(request: Request, models: Sequence[Model]) -> dict[str, str]:
    """Headers by lower-case name. SageMaker's custom attributes (``k=v;k=v``) are among them, as in DJL Serving.

    So is an adapter of one of the models that the path names.
    """
    headers = dict(request.headers)
    pairs = [pair.split("=", 1) for pair in headers.pop(_ATTRIBUTES, "").split(";") if "=" in pair]
    found = {name.strip().lower(): value.strip() for name, value in pairs}
    named = request.path_params.get("model", "")
    if any(named in model.adapters for model in models):
        found[ADAPTER] = named
    return {**found, **headers}
