"""The process that DJL Serving starts: one model, loaded by the first call, and the door that answers all others.

The first call is empty, and its properties are the options. Those of later calls are a client's and set nothing. Which
functions DJL Serving can call is decided in `handler.py`.
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
    RequestError,
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
PROMPT_ENDS = 8
"""Processes without a loaded model that end after `EXIT_GRACE_S`. Each further one waits twice as long as the last:
Java starts the next for ever."""
METRICS_S = 60.0
"""Pause between two reports of the metrics to Java."""


@dataclass
class _Process:
    """The loaded model of this process: DJL Serving gives each process one."""

    service: Service | None = None
    door: Door | None = None
    load_begun: bool = False
    dead: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)
    """Ends the thread that reports the metrics."""
    opening: threading.Lock = field(default_factory=threading.Lock)
    """Held while a door is opened: a load may end just when it has taken too long."""


_process = _Process()


def handle(inputs: Input) -> Output | Coroutine[Any, Any, Any] | None:
    """See `handler.handle`."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _handle(inputs)
    return _handle_async(inputs)


def partition(inputs: Input) -> None:
    """See `handler.partition`."""
    from djl_python_neuronx.config.sources import environment
    from djl_python_neuronx.loading import partition as compiling

    # Source: inputs.py, run_partition.py (0.23 to 0.36). DJL's engine notes the function that a request names in its
    # property `handler`; the script makes an `Input` itself, which names none.
    if _process.load_begun or inputs.get_function_name() is not None:
        msg = (
            "this process serves a model, and partition compiles one for DJL's partition script only; leave out the "
            "request's property handler, or run `djl-neuronx compile`"
        )
        raise RequestError(msg)
    compiling.partition(inputs.get_properties(), environ=environment())


def change_adapter(inputs: Input, change: str) -> Output | Coroutine[Any, Any, Output]:
    """Register, update or unregister an adapter; `change` is the word for what has become of it.

    DJL Serving calls it for its routes of adapters, and at the start for each folder in `adapters/`. A request can
    imitate these calls, so what they may do depends on `option.adapter_sources`.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _change_adapter(inputs, change)
    return asyncio.to_thread(_change_adapter, inputs, change)


def _change_adapter(inputs: Input, change: str) -> Output:
    from djl_python_neuronx.protocol.djl import Record, failure, new_output

    service, name = _process.service, inputs.get_property("name") or ""
    assert service is not None  # noqa: S101  (DJL's engine makes an error of it)
    try:
        if change == "unregistered":
            service.adapters.unregister(name)
        else:
            source = inputs.get_property("src") or ""
            service.adapters.register(name, source, replaces=change == "updated")
    except ServingError as error:
        return failure(error)
    message = f"Adapter {name} {change}"
    # Asynchronous mode reads the content, the others the message.
    record = Record(message.encode(), True, {})
    return new_output({}, message=message).add(record.encode(), key="data")


def close() -> None:
    """Abort running requests and free the device. Idempotent."""
    door, service = _process.door, _process.service
    _process.door = _process.service = None
    _process.closed.set()
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

        error = _begin_load(inputs) or _load(inputs, in_event_loop=False)
        return None if error is None else failure(error)
    output: Output = _process.door.answer(inputs)
    return output


async def _handle_async(inputs: Input) -> object:
    if _process.door is None:
        return await _load_or_end(inputs)
    return _process.door.answer(inputs)


async def _load_or_end(inputs: Input) -> Output | None:
    """Load the model; if that fails, answer requests with the reason for a moment, then end the process.

    A load that takes too long goes on for as long again, and serves if it ends well. If it fails, so ends the process.

    Source: PyProcess.java 0.34.0 and 0.36: once Java is connected, a load whose answer is an error, that takes longer
    than Java's limit or that ends the process makes the loading thread and the event loop wait for each other for ever.
    So a failed load is answered like any other. Java counts the end of the process, and starts the next within 2 s.
    Until a pause is over that one does not load: Java has counted `retry_threshold` of them in seconds, and `/ping`
    says that the model has failed, where it was healthy while the model was loaded again and again.
    """
    from djl_python_neuronx.loading.failed_loads import FailedLoads
    from djl_python_neuronx.protocol.djl import failure
    from djl_python_neuronx.protocol.djl_doors import FailedDoor

    refusal = _begin_load(inputs)
    if refusal is not None:
        return failure(refusal)
    properties = inputs.get_properties()
    failed_loads = FailedLoads(properties.get("model_dir", ""))
    late_s = 0.0
    if (failed := failed_loads.recent()) is not None:
        logger.error("load_skipped next_load_s=%.0f reason=%r", failed.pause_s, failed.reason)
        error: ServingError | None = BackendUnavailableError(failed.reason)
    else:
        limit_s = _loading_timeout_s(properties)
        load = asyncio.create_task(asyncio.to_thread(_load, inputs, in_event_loop=True))
        try:
            error = await asyncio.wait_for(asyncio.shield(load), max(limit_s - 5, limit_s / 2))
        except asyncio.TimeoutError:  # the load goes on
            msg = (
                f"the load is not finished shortly before DJL Serving's limit of {limit_s:g} s; raise "
                "option.model_loading_timeout, or compile beforehand"
            )
            error, late_s = log_load_failure(BackendUnavailableError(msg)), limit_s
    with _process.opening:
        if error is None or _process.door is not None:
            return None
        _process.door = door = FailedDoor(error)
    num_ends = failed_loads.add(str(error) if failed is None else None)
    grace_s = EXIT_GRACE_S * 2 ** min(max(0, num_ends - PROMPT_ENDS), 9)

    def end() -> None:
        if _process.door is door:
            logger.error("process_ends reason='failed load'")
            os._exit(EXIT_STATUS)

    event_loop = asyncio.get_running_loop()
    event_loop.call_later(late_s or grace_s, end)
    if late_s:
        load.add_done_callback(lambda _: event_loop.call_later(grace_s, end))
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


def _begin_load(inputs: Input) -> ServingError | None:
    """Note that the load begins. Returns why this call must not load: only DJL Serving's first call may."""
    if inputs.is_empty() and not _process.load_begun:
        _process.load_begun = True
        return None
    msg = (
        "no model is loaded: the first call must be DJL Serving's empty call with the options, and its load must "
        "succeed; read load_failed in the log, and restart DJL Serving"
    )
    return BackendUnavailableError(msg)


def _load(inputs: Input, *, in_event_loop: bool) -> ServingError | None:
    """Load the model. Returns why that failed, or None."""
    try:
        _open(inputs.get_properties(), in_event_loop=in_event_loop)
    except Exception as error:  # noqa: BLE001  (if raised, Java reports "invoke handler failure" and nothing else)
        return log_load_failure(error)
    return None


def _open(properties: Mapping[str, Any], *, in_event_loop: bool) -> None:
    from djl_python_neuronx.config.djl_serving import chunked_read_timeout_s
    from djl_python_neuronx.config.sources import environment
    from djl_python_neuronx.loading.failed_loads import FailedLoads
    from djl_python_neuronx.loading.load_memory import freeze_heap
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
    _process.closed.clear()
    threading.Thread(target=_report_metrics, args=(service,), daemon=True).start()
    freeze_heap()
    logger.info("ready door=%s", type(_process.door).__name__)


def _report_metrics(service: Service) -> None:
    """Write the metrics to the log, from which Java takes them, until the process is closed."""
    while not _process.closed.wait(METRICS_S):
        for line in service.metrics.for_java(service.options.model_names[0]):
            logger.info(line)


def _end_process(_error: ServingError) -> None:
    """End the process soon: DJL's asynchronous engine notices at once and starts another."""
    timer = threading.Timer(EXIT_GRACE_S, os._exit, (EXIT_STATUS,))
    timer.daemon = True
    timer.start()


def _end_at_next_call(_error: ServingError) -> None:
    _process.dead.set()


atexit.register(close)
