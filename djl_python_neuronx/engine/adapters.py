"""Changes of a model's LoRA adapters while requests run. `Replicas.places` has their names."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.engine.replicas import Replicas
from djl_python_neuronx.errors import (
    ArtifactAccessError,
    ArtifactError,
    ConfigError,
    RequestError,
)

logger = logging.getLogger(__name__)


@contextmanager
def _refusing() -> Iterator[None]:
    """Make the error of an adapter that is missing or wrong one of its request.

    Raises:
        ArtifactAccessError: it cannot be read or stored, which is no mistake of the request.
        RequestError: it is missing or wrong.
    """
    try:
        yield
    except ArtifactAccessError:
        raise
    except (ArtifactError, ConfigError) as error:
        raise RequestError(str(error)) from error


class Adapters:
    """The adapters of a model, for all doors and copies. Thread-safe.

    A request is for the adapter that its name has when it is queued, and has that one until its end: another adapter
    gets a place only when no open request has it.
    """

    def __init__(
        self,
        loop: Replicas,
        options: ServingOptions,
        found: Iterable[str],
        fetch: Callable[[str, str], Path],
    ) -> None:
        """`found`: the names of those that each engine loads at its start, in the order of their places.

        `fetch` makes a checked folder of a name and a source, or raises a `ServingError`.
        """
        self._loop, self._options, self._fetch = loop, options, fetch
        self._changing = threading.Lock()
        loop.places.update({name: place for place, name in enumerate(found, 1)})

    @_refusing()
    def register(self, name: str, source: str, *, replaces: bool = False) -> None:
        """Load an adapter, then give it its name, with `replaces` also that of another one, whose requests go on.

        One that is registered from the same folder stays: DJL Serving registers what the load has found already.

        Raises:
            RequestError: it is missing or wrong, or so is its name.
            ServingError: it cannot be fetched or loaded, there is no place for it, or the name is taken. All is as it
                was then.
        """
        folder = self._fetch(name, source)
        with self._changing:
            known = self._loop.adapter(self._loop.places.get(name, 0))
            if known is not None and not replaces and known.resolve() == folder.resolve():
                return
            self._check()
            if known is not None and not replaces:
                msg = (
                    f"the adapter {name!r} is registered already; update it, or unregister it first"
                )
                raise RequestError(msg)
            self._load(name, folder)

    def unregister(self, name: str) -> None:
        """Take an adapter's name away: new requests for it are refused, running ones go on.

        Raises:
            ServingError: no adapter has the name.
        """
        with self._changing:
            self._check()
            if self._loop.places.pop(name, None) is None:
                msg = f"the adapter {name[:200]!r} is not registered; expected one of {[*self._loop.places]}"
                raise RequestError(msg)
        logger.info("adapter_unregistered name=%r", name)

    def _load(self, name: str, folder: Path) -> None:
        """Load an adapter into a free place."""
        taken = {*self._loop.places.values(), *self._loop.places_in_use}
        free = [one for one in range(1, self._options.max_loras + 1) if one not in taken]
        if not free:
            msg = (
                f"no place is free for the adapter {name!r}: option.max_loras is {self._options.max_loras}, and "
                f"registered are {[*self._loop.places]}. An update needs a free place too, and requests keep that of "
                "an adapter that was unregistered until their end. Unregister one, or raise option.max_loras"
            )
            raise RequestError(msg)
        self._loop.set_adapter(free[0], folder)
        self._loop.places[name] = free[0]
        logger.info("adapter_registered name=%r folder=%s place=%d", name, folder, free[0])

    def _check(self) -> None:
        if self._options.adapter_sources is None:
            msg = (
                "the adapters of this server do not change; set option.adapter_sources to allow it"
            )
            raise RequestError(msg)
