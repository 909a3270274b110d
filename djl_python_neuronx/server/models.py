"""The models of the embedded server: their state, their first load side by side, and the reload at SIGHUP."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.errors import BackendUnavailableError, ConfigError, ServingError
from djl_python_neuronx.loading.load_memory import freeze_heap
from djl_python_neuronx.telemetry import log_load_failure

if TYPE_CHECKING:
    # Imported with the load, which begins when the server listens.
    from djl_python_neuronx.service import Service

logger = logging.getLogger(__name__)

_STOPPED = BackendUnavailableError("the server is stopping; send the request elsewhere")

Load: TypeAlias = "Callable[..., Service]"
"""Loads a model, called with a function that takes each stage of the load, in words, and with `on_death`, `placed` and
`before` as in `Service.load`. Raises `ServingError`."""

Prepare: TypeAlias = "Callable[[], Sequence[Sequence[str] | ServingError]]"
"""Judges all models before any is loaded. Returns the cores of the copies of each (`placed` of `Service.load`), or the
error of one that cannot be loaded. Raises `ServingError`."""


class Model:
    """A model and its state: it is loading, served, being reloaded, or given up."""

    def __init__(self, name: str, options: ServingOptions | None = None) -> None:
        """`name`: of a model whose options give it none. `options`: those that hold until it is loaded."""
        self._name = name
        self._options = options or ServingOptions()
        self.service: Service | None = None
        """The service that takes requests, once it is loaded."""
        self._both: tuple[Service, ...] = ()
        """The old one and the new one during a reload."""
        self.stage = "starting"
        """The stage of the load, for people."""
        self.failure: ServingError | None = None
        """The error for which no request can be served any more."""
        self._door: Future[None] | None = None
        """While a reload leaves no copy that takes requests: cancelled when there is one again."""

    @property
    def options(self) -> ServingOptions:
        """The options that hold now."""
        return self._options if self.service is None else self.service.options

    @property
    def services(self) -> tuple[Service, ...]:
        """All that have engines: two during a reload."""
        return self._both or tuple(filter(None, [self.service]))

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of its adapters."""
        return tuple(self.service.loop.places if self.service else self.options.adapters or ())

    @property
    def names(self) -> tuple[str, ...]:
        """The names in paths and bodies, the first one for answers; those of its adapters are the last."""
        return (*(self.options.model_names or (self._name,)), *self.adapters)

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
        return self.service

    @property
    def problem(self) -> str:
        """The reason that no copy takes requests now; empty if one does."""
        try:
            loop = self.ready().loop
        except BackendUnavailableError as error:
            return str(error)
        if self._door is not None:
            return f"the model is being reloaded ({self.stage}); retry when /ping answers 200"
        if not loop.alive:
            return f"the engine is being started again ({loop.stage}); retry when /ping answers 200"
        return ""

    async def taking(self) -> Service:
        """The service for a request. Waits while a reload leaves no copy that takes requests.

        Raises:
            BackendUnavailableError: see `ready`; or the wait has lasted `option.restart_timeout`.
        """
        limit_s = self.options.restart_timeout or self.options.predict_timeout
        if (door := self._door) is not None:
            opened, _ = await asyncio.wait({asyncio.wrap_future(door)}, timeout=limit_s)
            if not opened:
                msg = (
                    f"the model was not reloaded within {limit_s:g} s (option.restart_timeout; default: "
                    "option.predict_timeout); retry later"
                )
                raise BackendUnavailableError(msg)
        return self.ready()

    def has_left(self, service: Service) -> bool:
        """True if a reload retired this service; retry the request on the next."""
        return self._door is not None or self.service is not service

    def admit(self, service: Service) -> None:
        """Give new requests, and those that wait, to a service."""
        service.show()
        self.service = service
        if self.failure is not _STOPPED:
            self.failure = None
        self._open()

    def stop(self) -> None:
        """Take no more requests; those that wait for a reload get an error."""
        self.failure = _STOPPED
        self._open()

    def _open(self) -> None:
        door, self._door = self._door, None
        if door is not None:
            door.cancel()  # unlike a result, twice is no error: a stop may come at any time

    def reload(self, load: Load) -> None:
        """Replace the service by one that `load` prepares, copy by copy. Each request is served by one of the two.

        Raises:
            ServingError: the new one cannot be prepared or started; the old one goes on.
        """
        old = self.service
        assert old is not None  # noqa: S101  (a reload follows the first load)
        new = load(before=old)
        was, cores = ([copy.cores for copy in each.loop.copies] for each in (old, new))
        if cores != was:
            before, after = (
                f"{len(each)} on {'; '.join(filter(None, each)) or 'no cores of their own'}"
                for each in (was, cores)
            )
            new.close()
            msg = f"copies and their cores would change, from {before}, to {after}; restart the server"
            raise ConfigError(msg)
        self._both = (old, new)
        copies = range(len(cores))
        kept, ended = old, new
        try:
            for i in copies:
                self._replace(i, old, new, last=i == copies[-1])
            kept, ended = new, old
        except BaseException:
            for j in reversed(copies[: i + 1]) if self.failure is not _STOPPED else ():
                try:
                    self._replace(j, new, old, last=j == 0)
                except ServingError as error:  # noqa: PERF203  (the other copies must be brought back)
                    log_load_failure(error, f"copy_lost model={self.names[0]} copy={j}")
                    old.loop.lose(j, error)
            raise
        finally:
            self.admit(kept)
            self._both = ()
            ended.close()

    def _replace(self, i: int, old: Service, new: Service, *, last: bool) -> None:
        """End a copy of a service and start that of another one."""
        if last and self.service is old:
            self._door = Future()
        old.loop.retire(i, new.loop if new.files == old.files else None)
        if self.failure is _STOPPED:
            raise _STOPPED
        new.loop.start(i)
        self.admit(new)


class Loader:
    """Loads the models side by side, then all of them again, one after the other, at each `reload`."""

    def __init__(
        self,
        loads: Mapping[Model, Load],
        prepare: Prepare,
        on_ready: Callable[[Model], None],
        on_failure: Callable[[ServingError], None],
        *,
        exit_on_error: bool = True,
    ) -> None:
        """Start nothing.

        Args:
            loads: the models, each with what loads it.
            prepare: called before the first load, and at each reload.
            on_ready: called when a model has been loaded.
            on_failure: called when no model is left, and with `exit_on_error` when a first load fails.
            exit_on_error: False: go on with the models that can be loaded.
        """
        self._loads = {
            model: partial(
                load, partial(setattr, model, "stage"), on_death=partial(self._give_up, model)
            )
            for model, load in loads.items()
        }
        self._prepare = prepare
        self._on_ready, self._on_failure = on_ready, on_failure
        self._exit_on_error = exit_on_error
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
            threading.Thread(target=self._load, args=(model, cores), daemon=True)
            for model, cores in zip(self._loads, placed, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        missing = [model for model in self._loads if model.service is None]
        if len(missing) == len(self._loads) or (missing and self._exit_on_error):
            return
        freeze_heap()
        while self._wanted.get():
            while not self._wanted.empty():  # several wishes are one
                if not self._wanted.get():
                    return
            self._reload_all()
            freeze_heap()

    def _load(self, model: Model, cores: Sequence[str] | ServingError) -> None:
        try:
            model.service = self._loads[model](placed=_usable(cores))
            if model.failure is not _STOPPED:
                model.failure = None
        except BaseException as error:  # noqa: BLE001  (see `_run`)
            failure = log_load_failure(error, f"load_failed model={model.names[0]}")
            self._give_up(model, failure)
        else:
            self._on_ready(model)

    def _give_up(self, model: Model, error: ServingError) -> None:
        """Go on without a model, or end if it is the last one, or was never loaded and that is an end."""
        if len(model.services) > 1 or model.failure is _STOPPED:
            return  # the end of a reload is judged below; at a stop engines end
        model.failure = error
        first = model.service is None and self._exit_on_error
        if first and len(self._loads) > 1:
            fix = "mend or leave it out, or serve the others with --exit-on-error=false"
            logger.error("server_ends model=%s cannot be loaded; %s", model.names[0], fix)
        if first or all(one.failure for one in self._loads):
            self._on_failure(error)

    def _reload_all(self) -> None:
        logger.info("reload_begins")
        try:
            placed = self._prepare()
        except BaseException as error:  # noqa: BLE001  (see `_run`)
            log_load_failure(error, "reload_failed: all models are served as before;")
            return
        for model, cores in zip(self._loads, placed, strict=True):
            if model.service is None:
                self._load(model, cores)
            elif model.failure is not _STOPPED:
                self._reload(model, cores)

    def _reload(self, model: Model, cores: Sequence[str] | ServingError) -> None:
        name = model.names[0]
        try:
            model.reload(partial(self._loads[model], placed=_usable(cores)))
        except BaseException as error:  # noqa: BLE001  (see `_run`)
            if model.failure is _STOPPED:
                return
            log_load_failure(error, f"reload_failed model={name}: it is served as before;")
        else:
            logger.info("reloaded model=%s", name)
        for service in model.services:
            if service.loop.error is not None:
                self._give_up(model, service.loop.error)


def _usable(placed: Sequence[str] | ServingError) -> Sequence[str]:
    if isinstance(placed, ServingError):
        raise placed
    return placed
