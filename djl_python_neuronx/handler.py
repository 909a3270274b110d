"""DJL Serving's entry point: ``option.entryPoint=djl_python_neuronx.handler``.

DJL Serving calls the function of this module that a request's property `handler` names, private and imported ones too.
So it has those below and no other (docs/security.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from djl_python_neuronx import djl_process

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from djl_python import Input, Output


def handle(inputs: Input) -> Output | Coroutine[Any, Any, Any] | None:
    """Load the model or answer one call.

    In a running event loop (DJL's asynchronous engine), returns a coroutine of an `Output`, of None or of an
    asynchronous generator of `Output`. Otherwise returns the `Output` or None itself.
    """
    return djl_process.handle(inputs)


def partition(inputs: Input) -> None:
    """Compile the model ahead of time, for DJL's partition script.

    Raises:
        RequestError: a request names this function, or the process has begun to load a model.
        ServingError: the compilation failed; the script reports the message and ends with status 1.
    """
    djl_process.partition(inputs)


def register_adapter(inputs: Input) -> Output | Coroutine[Any, Any, Output]:
    """Register the adapter that the properties `name` and `src` name; see `Adapters.register`."""
    return djl_process.change_adapter(inputs, "registered")


def update_adapter(inputs: Input) -> Output | Coroutine[Any, Any, Output]:
    """Replace the adapter of a name; see `Adapters.register`."""
    return djl_process.change_adapter(inputs, "updated")


def unregister_adapter(inputs: Input) -> Output | Coroutine[Any, Any, Output]:
    """Take the name of an adapter away; see `Adapters.unregister`."""
    return djl_process.change_adapter(inputs, "unregistered")
