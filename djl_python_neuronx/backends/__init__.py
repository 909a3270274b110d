"""The backends of this folder: a module is a backend, its name is the backend's name."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from djl_python_neuronx.backends.base import Backend
from djl_python_neuronx.backends.plan import LoadPlan, ModelFacts
from djl_python_neuronx.errors import BackendUnavailableError, did_you_mean

__all__ = ["LoadPlan", "ModelFacts", "load", "names", "supports"]

_SHARED = frozenset(
    {"attention", "base", "checkpoint", "cores", "env", "plan", "shapes", "slot_cache"}
)
"""Modules of the folder that backends share; every other one is a backend."""


def names() -> tuple[str, ...]:
    """The backends, sorted; none is imported."""
    return tuple(sorted({module.name for module in pkgutil.iter_modules(__path__)} - _SHARED))


def supports(name: str, artifact: ModelFacts) -> str | None:
    """Why a backend cannot serve an artifact; None: it can.

    Raises:
        BackendUnavailableError: the backend does not exist or a package of it is missing.
    """
    reason: str | None = _module(name).supports(artifact)
    return reason


def load(name: str, plan: LoadPlan) -> Backend:
    """A loaded model; takes seconds to minutes.

    Raises:
        BackendUnavailableError: the backend does not exist or a package of it is missing.
        ArtifactError: the model's files cannot be used.
        BackendError: the backend cannot serve this model like this.
    """
    backend: Backend = _module(name).load(plan)
    return backend


def _module(name: str) -> ModuleType:
    if name not in names():
        message = f"backend {name!r} does not exist; expected one of {', '.join(names())}"
        raise BackendUnavailableError(message + did_you_mean(name, names()))
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ImportError as error:
        message = (
            f"backend {name!r} cannot be imported: {error}; it needs the packages of its extra. "
            f"Install them: pip install 'djl-python-neuronx[{name}]'"
        )
        raise BackendUnavailableError(message) from error
