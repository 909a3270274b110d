"""DJL Serving's entry point: ``option.entryPoint=djl_python_neuronx.handler``.

The first call is empty and loads the model; its properties are the options. Every other call is handed to the door
that fits the way in which DJL Serving sends requests. `partition` compiles ahead of time and serves nothing.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from djl_python_neuronx.errors import (
    BackendUnavailableError,
    DeviceMemoryError,
    IncompatibleOptionsError,
    ServingError,
)

if TYPE_CHECKING:
    from djl_python import Input, Output

    from djl_python_neuronx.protocol.djl_doors import AsyncDoor, PlainDoor, RollingBatchDoor
    from djl_python_neuronx.service import Service

    Door = Union[RollingBatchDoor, PlainDoor, AsyncDoor]

logger = logging.getLogger(__name__)

EXIT_STATUS = 70
EXIT_GRACE_S = 1.0
"""Between the death of the engine and the end of the process: DJL's engine writes the last answers meanwhile."""


class _State:
    """What the first call leaves behind. A process of DJL Serving has one model."""

    service: Service | None = None
    door: Door | None = None
    dead = threading.Event()


def handle(inputs: Input) -> Output | Coroutine[Any, Any, Any] | None:
    """Load the model or answer one call.

    In a running event loop (DJL's asynchronous engine) a coroutine that gives an `Output`, None or an asynchronous
    generator of `Output`; else the `Output` or None itself.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _handle(inputs)
    return _handle_async(inputs)


def partition(inputs: Input) -> None:
    """Compile the model ahead of time, as DJL's partition script asks for it.

    Raises:
        ServingError: what is wrong; the script reports it and ends with status 1.
    """
    from djl_python_neuronx.config.sources import environment
    from djl_python_neuronx.loading import partition as compiling

    compiling.partition(inputs.get_properties(), environ=environment())


def close() -> None:
    """Give up what is running and free the device; the next empty call loads again. Idempotent."""
    door, service, _State.door, _State.service = _State.door, _State.service, None, None
    if door is not None:
        door.close()
    if service is not None:
        service.close()
    _State.dead.clear()


def _handle(inputs: Input) -> Output | None:
    if _State.dead.is_set():
        # Source: PyProcess.java, PyPredictor.java: a process that ends while no call waits for it is never restarted,
        # every later request gets 400. One that ends during a call is, so the call after the last answers pays.
        os._exit(EXIT_STATUS)
    if _State.door is None:
        return _load(inputs, in_event_loop=False)
    output: Output = _State.door.answer(inputs)
    return output


async def _handle_async(inputs: Input) -> object:
    if _State.door is None:
        return await asyncio.to_thread(_load, inputs, in_event_loop=True)
    return _State.door.answer(inputs)


def _load(inputs: Input, *, in_event_loop: bool) -> Output | None:
    """None is success. DJL reads a failure's status (507 means out of memory) and message."""
    from djl_python_neuronx.protocol.djl import failure

    if not inputs.is_empty():
        msg = "no model is loaded; the first call must be DJL Serving's empty one, with the options"
        return failure(BackendUnavailableError(msg))
    try:
        _open(inputs.get_properties(), in_event_loop=in_event_loop)
    except ServingError as error:
        logger.error("load_failed code=%s\n%s", error.code, error)  # noqa: TRY400  (the message is for a user)
        return failure(error)
    except Exception as error:
        # Left to DJL's engine, Java would report no more than "invoke handler failure".
        logger.exception("load_failed")
        kind = DeviceMemoryError if isinstance(error, MemoryError) else ServingError
        return failure(kind(f"the model could not be loaded ({type(error).__name__}: {error})"))
    return None


def _open(properties: Mapping[str, Any], *, in_event_loop: bool) -> None:
    from djl_python_neuronx.protocol.djl_doors import AsyncDoor, PlainDoor, RollingBatchDoor
    from djl_python_neuronx.service import Service

    # Source: PyProcess.java: this is how Java decides; an option that it did not pass has no say.
    rolling = properties.get("rolling_batch", "disable") != "disable"
    if rolling and in_event_loop:
        msg = (
            f"async_mode=true and rolling_batch={properties['rolling_batch']}: DJL Serving would send requests one way "
            "and expect the answers the other; leave out option.rolling_batch"
        )
        raise IncompatibleOptionsError(msg)
    model_dir = Path(properties["model_dir"])
    service = Service.load(
        properties, model_dir, on_death=_end_process if in_event_loop else _end_at_next_call
    )
    timeout_s = service.options.predict_timeout
    if in_event_loop:
        _State.door = AsyncDoor(service)
    elif rolling:
        _State.door = RollingBatchDoor(service, timeout_s)
    else:
        _State.door = PlainDoor(service, timeout_s)
    _State.service = service
    logger.info("ready door=%s", type(_State.door).__name__)


def _end_process(_error: ServingError) -> None:
    """DJL's asynchronous engine notices at once that the process is gone, and starts another."""
    timer = threading.Timer(EXIT_GRACE_S, os._exit, (EXIT_STATUS,))
    timer.daemon = True
    timer.start()


def _end_at_next_call(_error: ServingError) -> None:
    _State.dead.set()


atexit.register(close)
