"""Models of this package as an application of Ray Serve: `import_path: neuronx_serve:build`; docs/ray.md explains all.

A deployment for each model, whose replicas hold NeuronCores and run the server's own app, and a gateway before them,
which reads the body: it finds the model, the replica that has the prefix, and ends a stream whose replica has died.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import orjson
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.sources import API_KEYS, LOG_FORMAT, environment, taken
from djl_python_neuronx.config.values import as_property
from djl_python_neuronx.errors import (
    BackendUnavailableError,
    ConfigError,
    QueueFullError,
    RequestError,
)
from djl_python_neuronx.loading.check import check_all
from djl_python_neuronx.loading.load_memory import freeze_heap
from djl_python_neuronx.planning.machines import named
from djl_python_neuronx.protocol import answer_error, decode
from djl_python_neuronx.protocol.base import named_model
from djl_python_neuronx.server.app import Application, app_of, create_app
from djl_python_neuronx.server.http import PROBES
from djl_python_neuronx.server.keys import read_keys
from djl_python_neuronx.server.models import Model
from djl_python_neuronx.server.process import wrapped
from djl_python_neuronx.server.responses import WRITE_PARTS
from djl_python_neuronx.service import Service
from djl_python_neuronx.telemetry import setup_logging

CLOSE_S = 10
"""Time from the end of a replica's drain for its engine to end."""
BEGINNING_CHARS = 256
"""Length of the beginning of a prompt that is a text: later turns of its conversation go on behind it."""
REFUSED = {
    "admin_port": "it opens no port there, and /metrics and /info would be public",
    "cloudwatch_namespace": "no replica logs its metrics",
}
"""Options of the server that would do something else than elsewhere, each with the reason."""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_SENT = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string")
_SENT += ("headers", "client", "server")
_ENDS = (RayActorError, StopAsyncIteration)
_ENDED = "the replica that ran this request has ended; the answer is not complete, send the request again"


class ModelSettings(BaseModel):
    """A model and how each of its replicas serves it."""

    model_config = ConfigDict(extra="forbid")

    model: str
    """Model folder, `.properties` file, Hugging Face id or `s3://` URI, as `djl-neuronx serve` takes it; a path must be
    the same on each node."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options, as after `-o`; they take precedence over the model's `serving.properties`."""
    instance: str | None = None
    """The instance type of the nodes that serve it, `inf2.48xlarge`; None: that of the node that plans."""
    ray_actor_options: dict[str, Any] = Field(default_factory=dict)
    """Ray's options of a replica, `num_cpus` or `runtime_env`. The cores follow from the plan."""


class Settings(BaseModel):
    """The `args` of the application."""

    model_config = ConfigDict(extra="forbid")

    models: list[ModelSettings] = Field(min_length=1)
    drain_s: float = Field(default=120, ge=0)
    """Longest time that a replica which is stopped lets its requests run."""
    accept_s: float = Field(default=30, gt=0)
    """Longest time that a request waits for a replica that takes it, such as one that is starting; then it gets 503."""


def build(args: dict[str, Any]) -> serve.Application:
    """Plan the models, and make their deployments and the gateway. `args`: see `Settings`.

    Raises:
        ValidationError: `args` are others.
        ServingError: a model cannot be served like this.
    """
    settings = Settings.model_validate(args)
    plans = [_plan(one) for one in settings.models]
    options = [one.options for one in plans]
    names = [name for one in options for name in one.model_names]
    if len(names) > len(set(names)):
        msg = f"two models have one name, of {', '.join(names)}; set model_name in the options of each"
        raise ConfigError(msg)
    for name in ("api_key_file", "cors_allow_origins", "page", "ping"):
        if any(getattr(one, name) != getattr(options[0], name) for one in options):
            msg = f"option.{name} holds for the whole application, and differs between its models; write one value"
            raise ConfigError(msg)
    replicas = [_deployment(*one, settings) for one in zip(settings.models, plans, strict=True)]
    gateway = Gateway.options(
        max_ongoing_requests=options[0].max_connections,
        max_surge_percent=100,  # it needs no cores: an update starts the new one first
        graceful_shutdown_timeout_s=settings.drain_s + CLOSE_S,
    )
    return gateway.bind(options, settings.accept_s, *replicas)


class _Plan(BaseModel):
    """The part of a plan that a deployment needs."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    options: ServingOptions
    cores: int
    """NeuronCores of all copies of a replica; 0 on a CPU."""
    copies: int
    pinned: dict[str, str]
    """Options that the plan has chosen: a replica that sees its own cores alone must not choose others."""


def _plan(one: ModelSettings) -> _Plan:
    machine = None if one.instance is None else named(one.instance)
    overrides = _overrides(one)
    placement = check_all([one.model], environ=environment(), overrides=overrides, machine=machine)
    placement.raise_errors()
    (prepared,), (cores,) = placement.models, placement.placed
    # All that a replica will have: the gateway finds a model by the names of its adapters, too.
    found = {each.name: each.place for each in prepared.adapters} or None
    options, need = prepared.options.model_copy(update={"adapters": found}), prepared.need
    for name, reason in REFUSED.items():
        if getattr(options, name) is not None:
            msg = f"option.{name} is not for Ray Serve: {reason}; leave it out"
            raise ConfigError(msg)
    pinned = {"replicas": str(len(cores))}
    if need.cores:
        pinned["tensor_parallel_degree"] = str(prepared.case.degree)
    return _Plan(options=options, cores=need.cores * len(cores), copies=len(cores), pinned=pinned)


def _set_up_logging() -> None:
    setup_logging(form=environment().get(LOG_FORMAT, "text"))


def _overrides(one: ModelSettings) -> dict[str, str]:
    return {name.removeprefix("option."): as_property(each) for name, each in one.options.items()}


def _deployment(one: ModelSettings, plan: _Plan, settings: Settings) -> serve.Application:
    options, slots = plan.options, plan.copies * plan.options.max_rolling_batch_size
    actor = {"num_cpus": 1, **one.ray_actor_options}
    if plan.cores:
        actor["resources"] = {**actor.get("resources", {}), "neuron_cores": plan.cores}
    ongoing = slots + plan.copies * options.max_waiting
    deployment = Replica.options(
        name=options.model_names[0].replace("/", "--"),  # Ray names files after it
        ray_actor_options=actor,
        max_ongoing_requests=ongoing,
        max_queued_requests=ongoing,
        graceful_shutdown_timeout_s=settings.drain_s + CLOSE_S,
        request_router_config=RequestRouterConfig(
            request_router_class="neuronx_routing.PrefixRouter", request_routing_stats_period_s=2
        ),
    )
    return deployment.bind(one.model, {**_overrides(one), **plan.pinned})


@serve.deployment
class Replica:
    """A loaded model behind the server's own app; each replica is an actor with its own cores."""

    def __init__(self, target: str, overrides: dict[str, str]) -> None:
        """Load the model, as `djl-neuronx serve` does. Ray has set `NEURON_RT_VISIBLE_CORES`.

        Raises:
            ServingError: it cannot be loaded; Ray tries again, on another node too.
        """
        self.model = Model(target)
        _set_up_logging()
        has_keys = taken(API_KEYS) is not None
        self.application = Application(self.model)
        self.model.service = Service.load_target(
            target, overrides, on_death=partial(setattr, self.model, "failure")
        )
        options = self.model.options
        self.application.needs_key = has_keys or options.api_key_file is not None
        self.app = create_app(self.application)
        freeze_heap()

    async def ask(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[list[Message]]:
        """Answer a request: yields at once that it is here, then the ASGI messages of its answer as they come."""
        yield []
        answer = _Answer(body)
        task = asyncio.create_task(answer.run(self.app, scope))
        try:
            async for messages in answer.batches():
                yield messages
        finally:
            task.cancel()  # the client has left, or has its answer

    async def whole(self, scope: dict[str, Any]) -> tuple[str, int, bytes]:
        """The id of this replica, and the status and the body of its answer to a GET."""
        head, *rest = [each async for some in self.ask(scope, b"") for each in some]
        replica = serve.get_replica_context().replica_id.unique_id
        return replica, head["status"], b"".join(one["body"] for one in rest)

    def check_health(self) -> None:
        """Raise the error for which no engine is started again; Ray replaces the replica then.

        An engine that is being started again is no failure: its requests go on, and new ones go to other replicas.
        """
        if self.model.failure is not None:
            raise self.model.failure

    def record_routing_stats(self) -> dict[str, Any]:
        """See `PrefixRouter`. Ray sends each change to all gateways: so no numbers."""
        return {"alive": not self.model.problem, "full": self._load >= self._slots}

    def record_replica_metadata(self) -> dict[str, Any]:
        """See `PrefixRouter`."""
        return {"slots": self._slots}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """See `replicas_by_load`."""
        return {"load": float(self._load)}

    @property
    def _slots(self) -> int:
        loops = [one.loop for one in self.model.services]
        return sum(one.spec.num_slots * len(one.copies) for one in loops)

    @property
    def _load(self) -> int:
        """The number of sequences that run or wait."""
        return sum(len(one.loop.streams) for one in self.model.services)

    def __del__(self) -> None:
        """End the engine. Ray calls it when the requests have ended."""
        for service in self.model.services:
            service.close()


class _Answer:
    """The app's side of a request: an ASGI connection whose messages are taken in batches."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()

    async def run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        """Run the app."""
        state = {WRITE_PARTS: self._write_parts}
        try:
            with suppress(Exception):  # the app has logged it
                await app({**scope, "state": state}, self._receive, self._messages.put)
        finally:
            self._messages.put_nowait(None)

    async def batches(self) -> AsyncIterator[list[Message]]:
        """The messages until the end, as many at once as are there."""
        ended = False
        while not ended:
            found = [await self._messages.get()]
            while not self._messages.empty():
                found.append(self._messages.get_nowait())
            ended = found[-1] is None
            if batch := [one for one in found if one is not None]:
                yield batch

    async def _receive(self) -> Message:
        if (body := self._body) is not None:
            self._body = None
            return {"type": "http.request", "body": body, "more_body": False}
        return await asyncio.Future()  # a client that leaves cancels the task

    def _write_parts(self, parts: Iterable[bytes]) -> bool:
        """See `LimitedProtocol`. Ray takes all messages at once, however slowly the client reads."""
        if data := b"".join(parts):
            self._messages.put_nowait(
                {"type": "http.response.body", "body": data, "more_body": True}
            )
        return True


@serve.deployment(name="gateway")
@serve.ingress()
class Gateway:
    """The one URL of all models: checks API keys, reads bodies, and passes requests on to replicas."""

    def __init__(
        self, options: Sequence[ServingOptions], accept_s: float, *replicas: DeploymentHandle
    ) -> None:
        """`replicas`: the deployment of each model."""
        _set_up_logging()
        models = [Model(one.model_names[0], one) for one in options]
        self._application = Application(*models)
        self._replicas = dict(zip(models, replicas, strict=True))
        self._accept_s = accept_s

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """See `serve.ingress`."""
        options = self._application.options
        routes = [Route("/metrics", self._metrics)]
        named_in = (
            "/predictions/{model:path}",
            "/models/{model:path}/invoke",
            "/v1/models/{model:path}",
        )
        routes += [Route(path, self._pass_on, methods=METHODS) for path in named_in]
        if len(self._replicas) > 1:
            routes += [Route(path, self._all_ready) for path in PROBES]
            routes += [Route("/info", self._infos), Route("/v1/models", self._model_list)]
        routes.append(Route("/{path:path}", self._pass_on, methods=METHODS))
        app = app_of(routes)
        checked = wrapped(app, options, read_keys(options.api_key_file, taken(API_KEYS)))

        async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
            await (checked if scope["type"] == "http" else app)(scope, receive, send)

        return dispatch

    async def _pass_on(self, request: Request) -> ASGIApp:
        """Pass a request on to the model that its path or body names.

        Raises:
            ServingError: it names none, or no replica takes it.
        """
        name, payload, begun = request.path_params.get("model"), {}, ""
        named = name is not None or len(self._replicas) == 1
        async with self._application.bodies.read(request, self._application.max_body_bytes) as body:
            if request.method == "POST":
                try:
                    payload, begun = await asyncio.to_thread(_read, request, body)
                except RequestError:
                    if not named:
                        raise  # else the replica judges it: a formatter of `model.py` may take any body
            elif not named:
                name = self._application.model_names[0]  # what all models answer alike
            if not named:
                name = name or named_model(payload, self._application.model_names)
            replicas = self._replicas[self._application.find(name)]
            handle = replicas.options(stream=True, method_name="ask", session_id=begun)
            messages = handle.remote(_scope(request), body)
        return _Passed(messages, request.url.path, self._accept_s)

    async def _metrics(self, request: Request) -> Response:
        """The metrics of all replicas, with the label `replica`."""
        found = await asyncio.gather(
            *(
                one.broadcast("whole", _scope(request)).results_async(
                    timeout_s=self._accept_s, return_exceptions=True
                )
                for one in self._replicas.values()
            ),
            return_exceptions=True,
        )
        answers = [one for some in found if isinstance(some, list) for one in some]
        texts = {one[0]: one[2].decode() for one in answers if isinstance(one, tuple)}
        return Response(together(texts), media_type="text/plain; version=0.0.4")

    async def _ask_all(self, request: Request) -> dict[str, Any]:
        """The answer of one replica of each model to a GET, by the model's name; None: it has none."""
        asked = [one.whole.remote(_scope(request)) for one in self._replicas.values()]
        waits = [asyncio.wait_for(one, self._accept_s) for one in asked]
        found = await asyncio.gather(*waits, return_exceptions=True)
        return {
            model.names[0]: orjson.loads(one[2])
            if isinstance(one, tuple) and one[1] == 200
            else None
            for model, one in zip(self._replicas, found, strict=True)
        }

    async def _all_ready(self, request: Request) -> Response:
        """200 if one or all models (`option.ping`) have a replica that takes requests."""
        states = {
            name: "no replica takes requests" if answer is None else "ready"
            for name, answer in (await self._ask_all(request)).items()
        }
        ready = [state == "ready" for state in states.values()]
        if not (all if self._application.options.ping == "all" else any)(ready):
            raise BackendUnavailableError(
                "; ".join(f"{name}: {one}" for name, one in states.items())
            )
        return JSONResponse({"status": "healthy", "models": states})

    async def _infos(self, request: Request) -> Response:
        answers = await self._ask_all(request)
        return JSONResponse([answer or {"model": name} for name, answer in answers.items()])

    async def _model_list(self, request: Request) -> Response:
        answers = filter(None, (await self._ask_all(request)).values())
        return JSONResponse(
            {"object": "list", "data": [entry for one in answers for entry in one["data"]]}
        )


class _Passed:
    """An answer of a replica on its way to the client, as an ASGI app."""

    def __init__(self, messages: DeploymentResponseGenerator, path: str, accept_s: float) -> None:
        self._messages, self._path, self._accept_s = messages, path, accept_s
        self._kind = ""
        """The content type, once the answer has begun."""
        self._complete = False

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer until its end, or until the client leaves, which a header of Ray hides from its proxy.

        Raises:
            ServingError: no replica takes the request, or it ends before the answer has begun.
        """
        answer, left = asyncio.create_task(self._answer(send)), asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
        finally:
            left.cancel()
            answer.cancel()

    async def _answer(self, send: Send) -> None:
        try:
            await self._send(await self._first(), send)
            with suppress(*_ENDS):
                while not self._complete:
                    await self._send(await anext(self._messages), send)
        finally:
            if not self._complete:
                self._messages.cancel()
        if not self._complete:
            await self._break_off(send)

    async def _first(self) -> list[Message]:
        """The head of the answer.

        A request is not given to a second replica: one that ends a process would end them all.
        """
        try:
            await asyncio.wait_for(anext(self._messages), self._accept_s)
            return await anext(self._messages)
        except BackPressureError as error:
            msg = "all replicas have as many requests as may wait; send it again later"
            raise QueueFullError(msg) from error
        except DeploymentUnavailableError as error:
            msg = "the replicas of this model cannot be started; their log has the reason"
            raise BackendUnavailableError(msg) from error
        except asyncio.TimeoutError as error:
            msg = f"no replica takes the request within {self._accept_s:g} s (accept_s); send it again"
            raise BackendUnavailableError(msg) from error
        except _ENDS as error:
            raise BackendUnavailableError(_ENDED) from error

    async def _break_off(self, send: Send) -> None:
        """End an answer with an error, or where its format has none without the end that HTTP requires."""
        part = answer_error(BackendUnavailableError(_ENDED), path=self._path)[1]
        if self._kind.startswith("text/event-stream"):
            part = b"event: error\ndata: " + part + b"\n\n"
        elif "jsonlines" in self._kind:
            part += b"\n"
        else:
            raise ConnectionAbortedError(_ENDED)
        await send({"type": "http.response.body", "body": part})

    async def _send(self, messages: Sequence[Message], send: Send) -> None:
        for message in messages:
            if message["type"] == "http.response.start":
                # Ray's proxy writes this one.
                kept = [one for one in message["headers"] if one[0] != b"x-request-id"]
                message = {**message, "headers": kept}
                self._kind = dict(kept).get(b"content-type", b"").decode()
            else:
                self._complete = not message.get("more_body", False)
            await send(message)


async def _left(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _scope(request: Request) -> dict[str, Any]:
    """The part of an ASGI scope that can be sent to a replica."""
    return {name: request.scope[name] for name in _SENT if name in request.scope}


def _read(request: Request, body: bytes) -> tuple[dict[str, Any], str]:
    """The payload of a request and its prompt's beginning."""
    payload = decode(body, request.headers, request.url.path)
    return payload, beginning(payload)


def beginning(payload: Mapping[str, Any]) -> str:
    """A digest of a prompt's beginning, which all turns of a conversation share; empty without a prompt.

    Of a chat it is all up to the first message of the user, of a text its first `BEGINNING_CHARS`.
    """
    parts = [_text(payload.get(name)) for name in ("system", "instructions")]
    for name in ("messages", "input"):
        turns = payload.get(name)
        if isinstance(turns, list):
            users = [isinstance(one, dict) and one.get("role") == "user" for one in turns]
            turns = turns[: users.index(True) + 1] if True in users else turns
        parts.append(_text(turns))
    parts += [_text(payload.get(name))[:BEGINNING_CHARS] for name in ("prompt", "inputs")]
    if not any(parts):
        return ""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _text(value: Any) -> str:
    """The text in a message, its content or its parts."""
    if isinstance(value, list):
        return "".join(map(_text, value))
    if isinstance(value, dict):
        return _text(value.get("text") or value.get("content"))
    return value if isinstance(value, str) else str(value or "")


def together(texts: Mapping[str, str]) -> bytes:
    """The metrics of replicas, by the id of each, in one text, with the label `replica`."""
    families: dict[str, Any] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            labelled = [
                one._replace(labels={**one.labels, "replica": replica}) for one in family.samples
            ]
            family.samples = []
            families.setdefault(family.name, family).samples += labelled
    return generate_latest(SimpleNamespace(collect=families.values))
