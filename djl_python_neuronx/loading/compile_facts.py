"""The facts that compiled graphs of a prepared model depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from djl_python_neuronx import backends
from djl_python_neuronx.artifacts.manifest import CompileFacts, artifact_digest
from djl_python_neuronx.loading.mismatch import graph_target
from djl_python_neuronx.loading.own_model import code_facts
from djl_python_neuronx.loading.prepared import Prepared
from djl_python_neuronx.planning.backend_choice import installed_versions, libraries
from djl_python_neuronx.planning.plan import flag_facts, graph_options, library_facts

_PACKAGES = ("djl-python-neuronx", "safetensors", "torch", "transformers")


def compile_facts(prepared: Prepared, model_dir: Path, *, here: bool = True) -> CompileFacts:
    """Return what graphs of a prepared model are compiled for; `model_dir` has the weights.

    `here`: this machine will serve, so that its compiler, which must be installed, counts.
    """
    backend = prepared.backend
    wanted: dict[str, Any] = {}
    package, version = "none", ""
    if (compiler := backends.compiler(backend)) is not None:
        wanted = graph_options(prepared.options, backend)
        wanted |= library_facts(backend) | flag_facts(prepared.environ)
        wanted |= code_facts(prepared.case.code)
        wanted |= prepared.case.draft_facts
        package, version = backends.COMPILER, compiler.compiler_version() if here else ""
    return CompileFacts(
        graph_options=wanted,
        artifact_digest=artifact_digest(model_dir),
        compiler=package,
        compiler_version=version,
        target=graph_target(prepared.machine, backend),
        role=prepared.role,
    )


def package_versions() -> dict[str, str]:
    """Return the versions of the installed libraries."""
    return installed_versions((*libraries(), *_PACKAGES))
