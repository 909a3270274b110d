"""DJL Serving's entry point: ``option.entryPoint=djl_python_neuronx.handler``.

The first call is empty and loads the model; its properties are the options. A door for DJL Serving's mode (rolling
batch, plain or asynchronous) answers all other calls. `partition` compiles ahead of time and serves nothing.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from djl_python_neuronx.errors import (
    BackendUnavailableError,
    IncompatibleOptionsError,
    ServingError,
)
from djl_python_neuronx.telemetry import log_load_failure

if TYPE_CHECKING:
    from djl_python import Input, Output

    from djl_python_neuronx.protocol.djl_doors import (
        AsyncDoor,
        FailedDoor,
        PlainDoor,
        RollingBatchDoor,
    )
    from djl_python_neuronx.service import Service

    Door = Union[RollingBatchDoor, PlainDoor, AsyncDoor, FailedDoor]

logger = logging.getLogger(__name__)

EXIT_STATUS = 70
EXIT_GRACE_S = 1.0
"""Time between the failure of the engine and the end of the process, in which DJL's engine writes the last answers."""


@dataclass
class _Process:
    """The loaded model of this process: DJL Serving gives each process one."""

    service: Service | None = None
    door: Door | None = None
    dead: threading.Event = field(default_factory=threading.Event)
    opening: threading.Lock = field(default_factory=threading.Lock)
    """Held while a door is opened: a load may end just when it has taken too long."""


_process = _Process()


def handle(inputs: Input) -> Output | Coroutine[Any, Any, Any] | None:
    """Load the model or answer one call.

    In a running event loop (DJL's asynchronous engine), returns a coroutine of an `Output`, of None or of an
    asynchronous generator of `Output`. Otherwise returns the `Output` or None itself.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _handle(inputs)
    return _handle_async(inputs)


def partition(inputs: Input) -> None:
    """Compile the model ahead of time. Called by DJL's partition script.

    Raises:
        ServingError: the compilation failed; the script reports the message and ends with status 1.
    """
    from djl_python_neuronx.config.sources import environment
    from djl_python_neuronx.loading import partition as compiling

    compiling.partition(inputs.get_properties(), environ=environment())


def close() -> None:
    """Abort running requests and free the device; the next empty call loads again. Idempotent."""
    door, service = _process.door, _process.service
    _process.door = _process.service = None
    if door is not None:
        door.close()
    if service is not None:
        service.close()
    _process.dead.clear()


def _handle(inputs: Input) -> Output | None:
    if _process.dead.is_set():
        # Source: PyProcess.java, PyPredictor.java: a process that ends while no call waits for it is never restarted,
        # every later request gets 400. One that ends during a call is, so the call after the last answers pays.
        os._exit(EXIT_STATUS)
    if _process.door is None:
        from djl_python_neuronx.protocol.djl import failure

        error = _load(inputs, in_event_loop=False)
        return None if error is None else failure(error)
    output: Output = _process.door.answer(inputs)
    return output


async def _handle_async(inputs: Input) -> object:
    if _process.door is None:
        return await _load_or_end(inputs)
    return _process.door.answer(inputs)


async def _load_or_end(inputs: Input) -> Output | None:
    """Load the model; if that fails, answer requests with the reason for a while, then end the process.

    Source: PyProcess.java 0.34.0 and 0.36: once Java is connected, a load whose answer is an error, that takes longer
    than Java's limit or that ends the process makes the loading thread and the event loop wait for each other for ever.
    So a failed load is answered like any other. Java counts the end of the process, and starts the next within 2 s.
    """
    from djl_python_neuronx.loading.failed_loads import FailedLoads
    from djl_python_neuronx.protocol.djl import failure
    from djl_python_neuronx.protocol.djl_doors import FailedDoor

    properties = inputs.get_properties()
    limit_s = _loading_timeout_s(properties)
    load = asyncio.to_thread(_load, inputs, in_event_loop=True)
    try:
        error = await asyncio.wait_for(load, max(limit_s - 5, limit_s / 2))
    except asyncio.TimeoutError:  # the load goes on
        msg = (
            f"the load is not finished shortly before DJL Serving's limit of {limit_s:g} s; raise "
            "option.model_loading_timeout, or compile beforehand"
        )
        error = log_load_failure(BackendUnavailableError(msg))
    if error is not None and not inputs.is_empty():
        return failure(error)
    with _process.opening:
        if error is None or _process.door is not None:
            return None
        _process.door = door = FailedDoor(error)
    num_failures = FailedLoads(properties.get("model_dir", "")).add()
    pause_s = EXIT_GRACE_S * 2 ** min(num_failures - 1, 9)
    logger.error("process_ends reason='failed load %d in a row' seconds=%g", num_failures, pause_s)

    def end() -> None:
        if _process.door is door:
            os._exit(EXIT_STATUS)

    asyncio.get_running_loop().call_later(pause_s, end)
    return None


def _loading_timeout_s(properties: Mapping[str, Any]) -> float:
    """Java's limit. Source: PyModel.java, PyEnv.java."""
    from djl_python_neuronx.config.sources import environment

    variable = environment().get("MODEL_LOADING_TIMEOUT", "")
    for value in (properties.get("model_loading_timeout", ""), variable):
        with suppress(ValueError):
            if (limit_s := int(value)) > 0:
                return limit_s
    return 240


def _load(inputs: Input, *, in_event_loop: bool) -> ServingError | None:
    """Load the model. Returns why that failed, or None."""
    if not inputs.is_empty():
        msg = "no model is loaded; the first call must be DJL Serving's empty call with the options"
        return BackendUnavailableError(msg)
    try:
        _open(inputs.get_properties(), in_event_loop=in_event_loop)
    except Exception as error:  # noqa: BLE001  (if raised, Java reports "invoke handler failure" and nothing else)
        return log_load_failure(error)
    return None


def _open(properties: Mapping[str, Any], *, in_event_loop: bool) -> None:
    from djl_python_neuronx.config.djl_serving import chunked_read_timeout_s
    from djl_python_neuronx.config.sources import environment
    from djl_python_neuronx.loading.failed_loads import FailedLoads
    from djl_python_neuronx.protocol.djl_doors import AsyncDoor, PlainDoor, RollingBatchDoor
    from djl_python_neuronx.service import Service

    # Source: PyProcess.java. Java decides by this property alone, so options from other sources do not count.
    rolling = properties.get("rolling_batch", "disable") != "disable"
    if rolling and in_event_loop:
        msg = (
            f"async_mode=true and rolling_batch={properties['rolling_batch']} exclude each other: DJL Serving would "
            "send requests in one mode and expect answers in the other; leave out option.rolling_batch"
        )
        raise IncompatibleOptionsError(msg)
    model_dir = Path(properties["model_dir"])
    service = Service.load(
        properties, model_dir, on_death=_end_process if in_event_loop else _end_at_next_call
    )
    timeout_s = service.options.predict_timeout
    read_timeout_s = chunked_read_timeout_s(environment())
    with _process.opening:
        _process.service = service
        if in_event_loop:
            _process.door = AsyncDoor(service, read_timeout_s)
            FailedLoads(properties["model_dir"]).clear()
        elif rolling:
            _process.door = RollingBatchDoor(service, timeout_s, read_timeout_s)
        else:
            _process.door = PlainDoor(service, timeout_s)
    logger.info("ready door=%s", type(_process.door).__name__)


def _end_process(_error: ServingError) -> None:
    """End the process soon: DJL's asynchronous engine notices at once and starts another."""
    timer = threading.Timer(EXIT_GRACE_S, os._exit, (EXIT_STATUS,))
    timer.daemon = True
    timer.start()


def _end_at_next_call(_error: ServingError) -> None:
    _process.dead.set()


atexit.register(close)
