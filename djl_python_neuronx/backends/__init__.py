"""The backends: each package of this folder is one, and its name is the backend's."""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from djl_python_neuronx.backends.base import Backend
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.errors import BackendUnavailableError, did_you_mean

__all__ = [
    "COMPILER",
    "BackendModule",
    "CompilingModule",
    "LoadPlan",
    "compiler",
    "get",
    "names",
    "python_command",
]

COMPILER = "neuronx-cc"
"""The package of the compiler that every `CompilingModule` uses."""
# The path first, so that the rest can be imported.
_START = (
    "import json, sys; sys.path[:], backend_path, modules = json.loads(sys.argv[2]); "
    "from importlib import import_module; [*map(import_module, modules)]; from djl_python_neuronx import backends; "
    "backends.__path__[:] = backend_path; import_module(sys.argv[1]).main()"
)
# Python imports them at its start; one that ignores its environment does not find them.
_CUSTOM = ("sitecustomize", "usercustomize")


class BackendModule(Protocol):
    """The functions of a backend's package. Importing it imports neither torch nor a Neuron library."""

    def load(self, plan: LoadPlan, compiled: Path | None = None) -> Backend:
        """Load a model; takes seconds to minutes.

        `compiled`: the folder that `CompilingModule.compile` has filled for this plan; None: load makes the graphs.

        Raises:
            BackendUnavailableError: a package or a device is missing.
            ArtifactError: the model's files cannot be used.
            BackendError: the backend cannot serve this model like this.
        """


@runtime_checkable
class CompilingModule(BackendModule, Protocol):
    """The functions of a backend's package that runs compiled graphs."""

    def compile(self, plan: LoadPlan, target: Path) -> None:
        """Compile the graphs of a plan into the folder `target`; takes minutes to hours.

        Files that `target` already holds are from an earlier attempt that was killed; see `CompileStore.build`.

        Raises:
            BackendUnavailableError: a package or a device is missing.
            ArtifactError: the model's files cannot be used.
            BackendError: the backend cannot serve this model like this, or the compiler failed.
        """

    def uncompilable(self, config: Mapping[str, Any]) -> str | None:
        """Return why the graphs of a model with this `config.json` cannot be stored apart from it; None if they can."""

    def compiler_version(self) -> str:
        """Return the version of the package `COMPILER`.

        Raises:
            BackendUnavailableError: it is missing.
        """


def names() -> tuple[str, ...]:
    """Return the backends, sorted, without importing them."""
    return tuple(sorted({module.name for module in pkgutil.iter_modules(__path__) if module.ispkg}))


def get(name: str) -> BackendModule:
    """Return a backend's package.

    Raises:
        BackendUnavailableError: there is no such backend.
    """
    if name not in names():
        message = f"backend {name!r} does not exist; expected one of {', '.join(names())}"
        raise BackendUnavailableError(message + did_you_mean(name, names()))
    return cast(BackendModule, importlib.import_module(f"{__name__}.{name}"))


def compiler(name: str) -> CompilingModule | None:
    """Return a backend's package if it runs compiled graphs; else None.

    Raises:
        BackendUnavailableError: there is no such backend.
    """
    module = get(name)
    return module if isinstance(module, CompilingModule) else None


def python_command(module: str) -> list[str]:
    """Return the command that calls `main()` of a module in a new Python.

    That Python finds the same packages and the same backends as this one, whatever its environment is, and imports what
    this one has imported to customise itself. A folder that this one has put on its path since then customises nothing.
    """
    customised = [name for name in _CUSTOM if name in sys.modules]
    paths = json.dumps([sys.path, [*map(str, __path__)], customised])
    return [sys.executable, "-I", "-u", "-c", _START, module, paths]
