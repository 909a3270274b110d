"""The server's OpenAPI document, made from what its routes and protocols declare."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from http import HTTPStatus
from typing import Any, TypeVar, Union

import orjson
from pydantic import TypeAdapter
from starlette.routing import Route

from djl_python_neuronx.artifacts.manifest import package_version
from djl_python_neuronx.errors import (
    BackendError,
    BackendUnavailableError,
    RequestError,
    ServingError,
    UnauthorizedError,
    UnknownModelError,
    kinds,
    revive,
)
from djl_python_neuronx.protocol import PROTOCOLS, beside

JSON = "application/json"
_WHOLE = frozenset({JSON, "text/plain"})
"""Media types whose body is one value. A body of any other is a stream of values."""
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}

_Handler = TypeVar("_Handler", bound=Callable[..., Any])
_Types = Mapping[str, Any]
"""Types by media type."""
_Schemas = dict[Any, dict[str, Any]]
"""Types, each with the object that takes its schema."""


def answers(type_: object, media_type: str = JSON) -> Callable[[_Handler], _Handler]:
    """Declare the type of a handler's answer."""

    def declare(handler: _Handler) -> _Handler:
        handler.__dict__["answers"] = {media_type: type_}
        return handler

    return declare


def document(routes: Iterable[Route], free: Container[str]) -> bytes:
    """The document of the routes, OpenAPI 3.1 in JSON; all but the `free` paths need an API key.

    The handler of a route has `answers`, or it serves the protocols of its path.
    """
    schemas: _Schemas = {}
    paths: dict[str, dict[str, Any]] = defaultdict(dict)
    for route in routes:
        for method in (route.methods or set()) - {"HEAD"}:
            path = route.path_format
            name = re.sub(r"\W+", "_", f"{method}{path}").strip("_").lower()
            operation = _operation(route, schemas, keyed=route.path not in free)
            paths[path][method.lower()] = {"operationId": name, **operation}
    found, definitions = TypeAdapter.json_schemas(
        [(one, "validation", TypeAdapter(one)) for one in schemas],
        ref_template="#/components/schemas/{model}",
    )
    for one, place in schemas.items():
        place |= found[one, "validation"]
    made = {
        "openapi": "3.1.0",
        "info": {"title": "djl-neuronx", "version": package_version()},
        "paths": paths,
        "components": {"schemas": definitions["$defs"], "securitySchemes": _KEYS},
    }
    return orjson.dumps(made)


def _operation(route: Route, schemas: _Schemas, *, keyed: bool) -> dict[str, Any]:
    of_path = [one for one in PROTOCOLS if route.path in one.paths]
    protocols = of_path or beside(route.path) or PROTOCOLS
    errors: tuple[type[ServingError], ...]
    declared = getattr(route.endpoint, "answers", None)
    operation: dict[str, Any] = {
        "summary": (inspect.getdoc(route.endpoint) or "").partition("\n")[0],
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.param_convertors
        ],
    }
    if declared is None:
        media = _content([protocol.requests for protocol in protocols], schemas)
        operation["requestBody"] = {"required": True, "content": media}
        errors = (ServingError, *kinds(RequestError), *kinds(BackendError))
    else:
        errors = (ServingError, UnauthorizedError, BackendUnavailableError)
        if route.param_convertors:
            errors += (UnknownModelError,)
    if keyed:
        operation["security"] = [{name: []} for name in _KEYS]
    shapes: dict[int, list[_Types]] = defaultdict(list)
    for error in errors:
        if error is UnauthorizedError and not keyed:
            continue
        for protocol in protocols:
            status, _ = protocol.answer_error(revive(error.code, ""))
            shapes[status].append({JSON: protocol.error})
    shapes[200] = [protocol.answers for protocol in protocols] if declared is None else [declared]
    operation["responses"] = {
        str(status): {"description": _phrase(status), "content": _content(each, schemas)}
        for status, each in sorted(shapes.items())
    }
    return operation


def _content(bodies: Iterable[_Types], schemas: _Schemas) -> dict[str, Any]:
    """The media types of bodies with their schemas."""
    merged: dict[str, list[Any]] = defaultdict(list)
    for types in bodies:
        for media_type, type_ in types.items():
            merged[media_type].append(type_)
    content = {}
    for media_type, several in merged.items():
        schema = schemas.setdefault(Union[tuple(several)], {})
        if media_type not in _WHOLE:
            # A validator sees the text; tools that read `contentSchema` see its parts.
            parts = {"type": "array", "items": schema}
            schema = {"type": "string", "contentMediaType": media_type, "contentSchema": parts}
        content[media_type] = {"schema": schema}
    return content


def _phrase(status: int) -> str:
    own = {499: "Client Closed Request", 529: "Overloaded"}
    return own.get(status) or HTTPStatus(status).phrase
