"""The models of the embedded server: their state, their first load side by side, and the reload at SIGHUP."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.errors import BackendUnavailableError, ConfigError, ServingError
from djl_python_neuronx.loading.load_memory import freeze_heap
from djl_python_neuronx.telemetry import log_load_failure

if TYPE_CHECKING:
    # Imported with the load, which begins when the server listens.
    from djl_python_neuronx.service import Service

logger = logging.getLogger(__name__)

_STOPPED = BackendUnavailableError("the server is stopping; send the request elsewhere")
POLL_S = 0.01
"""Pause between two looks for requests that are on their way to a service."""


class Load(Protocol):
    """Loads a model."""

    def __call__(
        self,
        stage: Callable[[str], None],
        on_death: Callable[[ServingError], None],
        *,
        placed: Sequence[str] = (),
        start: bool = True,
    ) -> Service:
        """Call `stage` for each stage of the load, in words, and `on_death` at the end of the last engine.

        `placed`, `start`: see `Service.load`.

        Raises:
            ServingError: it cannot be loaded.
        """


class Model:
    """A model and its state: it is loading, served, being reloaded, or given up."""

    def __init__(self, folder_name: str, options: ServingOptions | None = None) -> None:
        """`options`: those that hold until the model is loaded."""
        self._folder_name = folder_name
        self._options = options or ServingOptions()
        self.service: Service | None = None
        """What takes requests, once it is loaded."""
        self._both: tuple[Service, ...] = ()
        """The old one and the new one during a reload."""
        self.stage = "starting"
        """What the load is doing, for people."""
        self.failure: ServingError | None = None
        """Why no request can be served any more."""
        self._door: Future[None] | None = None
        """Done when requests are taken again; None while they are."""
        self._inside: Counter[Service] = Counter()
        """Requests that are parsed for a service, or about to be submitted to it."""
        self._lock = threading.Lock()
        """Held while `_door`, `_inside` and `service` change."""

    @property
    def options(self) -> ServingOptions:
        """The options that hold now."""
        return self._options if self.service is None else self.service.options

    @property
    def stopped(self) -> bool:
        """True after `stop`."""
        return self.failure is _STOPPED

    @property
    def reloading(self) -> bool:
        """True while its copies are replaced."""
        return bool(self._both)

    @property
    def services(self) -> tuple[Service, ...]:
        """All that have engines."""
        return self._both or tuple(filter(None, [self.service]))

    @property
    def names(self) -> tuple[str, ...]:
        """The names in paths and bodies, the first one for answers."""
        return self.options.model_names or (self._folder_name,)

    def ready(self) -> Service:
        """The loaded service.

        Raises:
            BackendUnavailableError: it is still loading, could not be loaded, or its engines have failed.
        """
        if self.failure is not None:
            raise BackendUnavailableError(str(self.failure)) from self.failure
        if self.service is None:
            msg = f"the model is still loading ({self.stage}); retry when /ping answers 200"
            raise BackendUnavailableError(msg)
        if (error := self.service.loop.error) is not None and self._door is None:
            raise BackendUnavailableError(str(error)) from error
        return self.service

    @property
    def problem(self) -> str:
        """Why no copy takes requests now; empty if one does."""
        try:
            loop = self.ready().loop
        except BackendUnavailableError as error:
            return str(error)
        if self._door is not None:
            return f"the model is being reloaded ({self.stage}); retry when /ping answers 200"
        if not loop.alive:
            return f"the engine is being started again ({loop.stage}); retry when /ping answers 200"
        return ""

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[Service]:
        """The service for a request, until it is submitted. Waits while a reload leaves no copy that takes requests.

        Raises:
            BackendUnavailableError: see `ready`; or the wait has lasted `option.predict_timeout`.
        """
        limit_s, began_s = self.options.predict_timeout, time.monotonic()
        while True:
            service = self.ready()
            with self._lock:
                if (door := self._door) is None and service is self.service:
                    self._inside[service] += 1
                    break
            if door is None:
                continue
            left_s = began_s + limit_s - time.monotonic()
            if not (await asyncio.wait({asyncio.wrap_future(door)}, timeout=left_s))[0]:
                msg = f"the model was not reloaded within {limit_s:g} s (option.predict_timeout); retry later"
                raise BackendUnavailableError(msg)
        try:
            yield service
        finally:
            with self._lock:
                self._inside[service] -= 1

    def admit(self, service: Service | None) -> None:
        """Give new requests, and those that wait, to a service. It goes on with the metrics of the one before."""
        if service is not None and self.service is not None:
            service.observe(self.service.metrics)
        with self._lock:
            self.service = service
            if not self.stopped:
                self.failure = None
            door, self._door = self._door, None
        if door is not None:
            door.set_result(None)

    def stop(self) -> None:
        """Take no more requests; those that wait for a reload get an error."""
        self.failure = _STOPPED
        self.admit(self.service)

    def reload(self, load: Callable[[], Service]) -> None:
        """Replace the service by one that `load` prepares, copy by copy. Each request is served by one of the two.

        Raises:
            ServingError: the new one cannot be prepared or started; the old one goes on.
        """
        old, new = self.service, load()
        assert old is not None  # noqa: S101  (a reload follows the first load)
        was, cores = ([copy.cores for copy in each.loop.copies] for each in (old, new))
        if cores != was:
            msg = f"the copies have the cores {was} and would get {cores}; restart the server"
            raise ConfigError(msg)
        self._both = (old, new)
        moved: list[int] = []
        kept, ended = old, new
        try:
            self._move(range(len(cores)), old, new, moved)
            kept, ended = new, old
        except BaseException:
            self._move(moved, new, old, [])
            raise
        finally:
            self.admit(kept)
            self._both = ()
            del self._inside[ended]
            ended.close()

    def _move(self, copies: Sequence[int], old: Service, new: Service, moved: list[int]) -> None:
        """End each copy of a service and start that of another one. `moved` gets them, the last one first."""
        for i in copies:
            if i == copies[-1]:
                self._vacate(old)
            old.loop.retire(i)
            moved.insert(0, i)
            if self.stopped:
                raise _STOPPED
            new.loop.start(i)
            self.admit(new)

    def _vacate(self, service: Service) -> None:
        """Wait until no request is on its way to a service; new ones wait if they would take it."""
        with self._lock:
            if self.service is service:
                self._door = Future()
        while self._inside[service]:
            time.sleep(POLL_S)


class Loader:
    """Loads the models side by side, then all of them again, one after the other, at each `reload`."""

    def __init__(
        self,
        loads: Mapping[Model, Load],
        prepare: Callable[[], Sequence[Sequence[str]]],
        on_ready: Callable[[Model], None],
        on_failure: Callable[[ServingError], None],
    ) -> None:
        """Start nothing.

        Args:
            loads: the models, each with what loads it.
            prepare: judges all of them together before they are loaded. Returns `placed` of each, see `Load`.
            on_ready: called when a model has been loaded.
            on_failure: called when the first load fails, and when no model is left.
        """
        self._loads = loads
        self._prepare = prepare
        self._on_ready, self._on_failure = on_ready, on_failure
        self._wanted = SimpleQueue[bool]()
        """True for each reload; False at the end."""
        self.thread = threading.Thread(target=self._run, name="djl-neuronx-load", daemon=True)

    def reload(self) -> None:
        """Load all models again when those before are loaded. Also for a signal handler."""
        self._wanted.put(True)

    def end(self, timeout_s: float) -> bool:
        """Stop after the load that runs, and wait for its end. False if it still runs after the time."""
        self._wanted.put(False)
        self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def _run(self) -> None:
        try:
            placed = self._prepare()
        except BaseException as error:  # noqa: BLE001  (a border: every failure is an answer, also `SystemExit`)
            self._on_failure(log_load_failure(error))
            return
        threads = [
            threading.Thread(target=self._load, args=(model, load, cores), daemon=True)
            for (model, load), cores in zip(self._loads.items(), placed, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if any(model.service is None for model in self._loads):
            return
        freeze_heap()
        while self._wanted.get():
            while not self._wanted.empty():  # several wishes are one
                if not self._wanted.get():
                    return
            self._reload_all()
            freeze_heap()

    def _load(self, model: Model, load: Load, cores: Sequence[str]) -> None:
        on_death = partial(self._give_up, model)
        try:
            model.service = load(partial(setattr, model, "stage"), on_death, placed=cores)
        except BaseException as error:  # noqa: BLE001  (see `_run`)
            on_death(log_load_failure(error, f"load_failed model={model.names[0]}"))
        else:
            self._on_ready(model)

    def _give_up(self, model: Model, error: ServingError) -> None:
        """Go on without a model, or end if it is the last one or was never loaded."""
        if model.reloading or model.stopped:
            return  # the end of a reload is judged below; at a stop engines end
        model.failure = error
        if model.service is None or all(one.failure for one in self._loads):
            self._on_failure(error)

    def _reload_all(self) -> None:
        logger.info("reload_begins")
        try:
            placed = self._prepare()
        except BaseException as error:  # noqa: BLE001  (see `_run`)
            log_load_failure(error, "reload_failed: all models are served as before;")
            return
        for (model, load), cores in zip(self._loads.items(), placed, strict=True):
            name = model.names[0]
            stage, on_death = partial(setattr, model, "stage"), partial(self._give_up, model)
            try:
                model.reload(partial(load, stage, on_death, placed=cores, start=False))
            except BaseException as error:  # noqa: BLE001  (see `_run`)
                log_load_failure(error, f"reload_failed model={name}: it is served as before;")
            else:
                logger.info("reloaded model=%s", name)
            for service in model.services:
                if service.loop.error is not None:
                    self._give_up(model, service.loop.error)
