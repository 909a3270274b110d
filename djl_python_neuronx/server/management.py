"""The routes that change the adapters of a model, for the operator: only `option.admin_port` has them.

Source: vllm 0.11, vllm/entrypoints/openai/protocol.py and serving_models.py.
"""

from __future__ import annotations

import asyncio
from functools import partial

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from djl_python_neuronx.errors import RequestError
from djl_python_neuronx.protocol import decode
from djl_python_neuronx.protocol.parameters import Flag, RequestModel, Text, validated
from djl_python_neuronx.server.app import Application

_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class AdapterBody(RequestModel):
    """An adapter to register or unregister."""

    lora_name: Text
    lora_path: str = ""
    """The place to register it from: required then."""
    load_inplace: Flag = False
    """Replace the adapter of this name, if there is one."""
    base_model_name: str | None = None
    """The model that it belongs to, where several are served."""


def routes(application: Application) -> list[Route]:
    """The routes, which are those of vLLM."""

    async def change(request: Request) -> Response:
        async with application.bodies.read(request, application.max_body_bytes) as content:
            payload = decode(content, {}, request.url.path)
        body = validated(AdapterBody, payload, application.options)
        model = application.find(body.base_model_name)
        adapters = model.ready().adapters
        work, word = partial(adapters.unregister, body.lora_name), "removed"
        if request.url.path == _LOAD:
            if body.lora_name in {*application.model_names} - {*model.names}:
                msg = f"another model, or an adapter of it, is named {body.lora_name!r}; choose another name"
                raise RequestError(msg, param="lora_name")
            if not body.lora_path:
                msg = "lora_path is missing; expected the place of the adapter"
                raise RequestError(msg, param="lora_path")
            replaces, word = body.load_inplace, "added"
            work = partial(adapters.register, body.lora_name, body.lora_path, replaces=replaces)
        await asyncio.to_thread(work)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' {word} successfully.")

    return [Route(path, change, methods=["POST"]) for path in (_LOAD, _UNLOAD)]
