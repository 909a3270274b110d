"""The backends of this folder: a module is a backend, its name is the backend's name.

A module has `supports(artifact)` and `load(plan)`; one that compiles also `compile(plan, target)`,
`compiler_version()` and `load(plan, compiled)`, and `uncompilable(plan)` where not all of its graphs can be kept. Which
kinds of weights it reads is told in `artifacts/layouts/artifact.py`.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

from djl_python_neuronx.backends.base import Backend
from djl_python_neuronx.backends.plan import LoadPlan, ModelFacts
from djl_python_neuronx.errors import BackendUnavailableError, did_you_mean

__all__ = [
    "LoadPlan",
    "ModelFacts",
    "compile",
    "compiler",
    "compiles",
    "load",
    "names",
    "supports",
    "uncompilable",
]

COMPILER = "neuronx-cc"
"""What compiles for every backend that compiles."""
_SHARED = frozenset(
    {
        *("attention", "base", "checkpoint", "cores", "env", "plan", "shapes"),
        *("slot_cache", "slot_model", "slots"),
        *(
            "tnx_cache",
            "tnx_continuous",
            "tnx_errors",
            "tnx_model",
            "tnx_paged",
            "tnx_sampling",
            "tnx_slots",
            "tnx_static",
        ),
    }
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


def compiles(name: str) -> bool:
    """True if a backend runs compiled graphs, so has `compile`.

    Raises:
        BackendUnavailableError: the backend does not exist or a package of it is missing.
    """
    return hasattr(_module(name), "compile")


def uncompilable(name: str, plan: LoadPlan) -> str | None:
    """Why the graphs of a plan cannot be kept apart from the model, so that `load` makes them; None: they can.

    Raises:
        BackendUnavailableError: the backend does not exist or a package of it is missing.
    """
    module = _module(name)
    reason: str | None = module.uncompilable(plan) if hasattr(module, "uncompilable") else None
    return reason


def compile(name: str, plan: LoadPlan, target: Path) -> None:
    """Compile the graphs of a plan into the folder `target`; takes minutes to hours.

    What is in `target` already is of an earlier try that was killed; see `CompileStore.build`.

    Raises:
        BackendUnavailableError: the backend does not exist or a package of it is missing.
        ArtifactError: the model's files cannot be used.
        BackendError: the backend cannot serve this model like this, or its compiler failed.
    """
    _module(name).compile(plan, target)


def compiler(name: str) -> tuple[str, str]:
    """Package and version of the compiler that a backend uses.

    Raises:
        BackendUnavailableError: the backend does not exist or a package of it is missing.
    """
    version: str = _module(name).compiler_version()
    return COMPILER, version


def load(name: str, plan: LoadPlan, compiled: Path | None = None) -> Backend:
    """A loaded model; takes seconds to minutes. `compiled`: the graphs that `compile` made for this plan.

    Raises:
        BackendUnavailableError: the backend does not exist or a package of it is missing.
        ArtifactError: the model's files or the graphs cannot be used.
        BackendError: the backend cannot serve this model like this.
    """
    module = _module(name)
    backend: Backend = module.load(plan) if compiled is None else module.load(plan, compiled)
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
