"""Compiled graphs of a prepared model: from its folder, from `compiled_graph_path`, from the compile store, or new."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from djl_python_neuronx import backends
from djl_python_neuronx.artifacts import fetch
from djl_python_neuronx.artifacts import manifest as manifests
from djl_python_neuronx.artifacts.atomic import is_writable
from djl_python_neuronx.artifacts.manifest import CompileFacts, artifact_digest, check_facts
from djl_python_neuronx.artifacts.mirror import Mirror
from djl_python_neuronx.artifacts.store import (
    URL_VARIABLE,
    CompilePlace,
    CompileStore,
    copy_once,
    locate,
)
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.errors import BackendError
from djl_python_neuronx.loading.compile_process import Forecast, compile_guarded
from djl_python_neuronx.loading.mismatch import graph_target, has_own_graphs
from djl_python_neuronx.loading.prepare import Prepared, load_plan, local_graphs
from djl_python_neuronx.planning.backend_choice import libraries
from djl_python_neuronx.planning.plan import (
    flag_facts,
    graph_options,
    library_arguments,
    library_facts,
    stored_findings,
)
from djl_python_neuronx.types import Tokenizer

logger = logging.getLogger(__name__)

NEURON_CACHE = Path("/var/tmp/neuron-compile-cache")  # noqa: S108  (the Neuron compiler's own default)
_PACKAGES = ("djl-python-neuronx", "safetensors", "torch", "transformers")
_OPTION = "option.compiled_graph_path"


@dataclass(frozen=True)
class Compiled:
    """Graphs that fit a prepared model, and what they were compiled for."""

    folder: Path | None
    """None: the backend compiles nothing, or `load` makes the graphs."""
    plan: LoadPlan
    """The backend's plan to load them."""
    facts: CompileFacts
    options: Mapping[str, Any]
    """All options in force, as JSON values."""
    packages: Mapping[str, str]
    """Versions of the installed libraries."""
    cache_hit: bool | None = None
    """Whether the compile store had the graphs; None: they were not looked up there."""


def obtain(
    prepared: Prepared, tokenizer: Callable[[], Tokenizer], *, required: bool = False
) -> Compiled:
    """Find or compile the graphs of a prepared model. Compiling takes minutes to hours.

    `tokenizer`: the model's own; a draft model has that of the model that it drafts for. `required`: refuse a model
    whose graphs cannot be stored.

    Raises:
        ArtifactMismatchError: there are graphs, but for other settings; see `CompileStore.build`.
        ArtifactError: what is there is damaged, or cannot be read or stored.
        BackendError: the backend cannot compile the model.
    """
    plan = load_plan(prepared, tokenizer)
    options = {**prepared.options.model_dump(mode="json"), "model_loader": prepared.backend}
    compiled = Compiled(None, plan, _facts(prepared, plan), options, _packages())
    compiler = backends.compiler(prepared.backend)
    if compiler is None:
        return compiled
    tokenizer()  # before hours of compiling: it may be damaged
    if reason := compiler.uncompilable(plan):
        if required:
            msg = f"{prepared.artifact.path} cannot be compiled ahead of time: {reason}. Serve it as it is"
            raise BackendError(msg)
        logger.warning("graphs_not_kept reason=%r", reason)
        return compiled
    named = _resolve_path(prepared)
    if prepared.fits and prepared.artifact.compiled is not None:
        compiled = replace(compiled, folder=prepared.artifact.compiled)
    elif isinstance(named, Path):
        _check(named, compiled.facts)
        compiled = replace(compiled, folder=named, plan=_adapt_plan(prepared, plan, named))
    else:
        origin = prepared.resolved.origins.get("compiled_graph_path", _OPTION)
        place = locate(named, origin, prepared.environ, NEURON_CACHE)
        compiled = _build(prepared, compiled, place)
    logger.info("compiled folder=%s", compiled.folder)
    return compiled


def _facts(prepared: Prepared, plan: LoadPlan) -> CompileFacts:
    backend = prepared.backend
    wanted: dict[str, Any] = {}
    package, version = "none", ""
    if (compiler := backends.compiler(backend)) is not None:
        wanted = graph_options(prepared.options, backend)
        wanted |= library_facts(backend) | flag_facts(prepared.environ)
        package, version = backends.COMPILER, compiler.compiler_version()
    return CompileFacts(
        graph_options=wanted,
        artifact_digest=artifact_digest(plan.model_dir),
        compiler=package,
        compiler_version=version,
        target=graph_target(prepared.machine, backend),
        role=prepared.role,
    )


def _packages() -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    versions = {library.name: library.version for library in libraries().values()}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {name: version for name, version in versions.items() if version is not None}


def _resolve_path(prepared: Prepared) -> Path | str | None:
    """Resolve `compiled_graph_path`: a `Path` is a local folder of saved graphs, a `str` a place to store compiles."""
    value, environ = prepared.options.compiled_graph_path, prepared.environ
    if (local := local_graphs(prepared.options)) is not None:
        folder, has_graphs = local
        return folder if has_graphs else str(folder)
    if value is None or fetch.uri_scheme(value) != "s3":
        return value  # `locate` takes file:// and refuses others
    listed = fetch.list_names(value, environ, origin=_OPTION)
    if not any(name.endswith(".neff") and "/" not in name for name in listed):
        return value
    root = fetch.download_root(environ)
    return fetch.fetch(value, environ=environ, root=root, everything=True, origin=_OPTION)


def _check(folder: Path, facts: CompileFacts) -> None:
    """Refuse a folder that this package stored and that is not whole, or was compiled for other facts."""
    if (folder / manifests.FILE_NAME).is_file():
        manifest = manifests.read(folder)
        manifests.verify(folder, manifest, exact=False)
        check_facts(facts, manifest.facts, where=str(folder))


def _adapt_plan(prepared: Prepared, plan: LoadPlan, folder: Path) -> LoadPlan:
    """Return the plan that loads the graphs in a folder that an option names."""
    if has_own_graphs(folder):
        return plan
    case = replace(prepared.case, foreign_graphs=True)
    for finding in stored_findings(case):
        logger.warning("option_finding %s", prepared.resolved.describe(finding))
    return replace(plan, arguments=library_arguments(case))


def _build(prepared: Prepared, compiled: Compiled, place: CompilePlace) -> Compiled:
    """Return `compiled` with the folder of the graphs in the compile store, which makes them if it has none."""
    environ, made = prepared.environ, []

    def compile_into(target: Path) -> None:
        cache = place.neff_cache if place.is_remote else _writable_cache(place, environ)
        arguments = compiled.plan.arguments
        # The library gets the cache that can be written, not the option as it is set.
        placed = {**arguments.environment, URL_VARIABLE: cache}
        compile_guarded(
            prepared.backend,
            replace(compiled.plan, arguments=replace(arguments, environment=placed)),
            target,
            environ={**environ, URL_VARIABLE: cache},
            neff_cache=None if place.is_remote else Path(cache),
            forecast=_forecast(prepared),
        )
        made.append(target)

    folder = _open_store(prepared, place).build(
        compiled.facts,
        compile_into,
        effective_options=compiled.options,
        packages=compiled.packages,
    )
    return replace(compiled, folder=folder, cache_hit=not made)


def _open_store(prepared: Prepared, place: CompilePlace) -> CompileStore:
    """Open the compile store at a place; what cannot be written there goes below the download root."""
    logger.info("compile_store place=%s origin=%r", place.store, place.origin)
    environ, own = prepared.environ, _own_store(prepared.environ)
    # Graphs of a draft model in the store are never the user's choice: they are of other lengths, or for another model.
    on_mismatch = "recompile" if prepared.role == "draft" else prepared.options.on_mismatch
    if place.is_remote:
        mirror = Mirror(place.store, fetch.download_root(environ), environ)
        return CompileStore(own, mirror=mirror, on_mismatch=on_mismatch)
    root = Path(place.store)
    return CompileStore(root, fallback=None if root == own else own, on_mismatch=on_mismatch)


def _forecast(prepared: Prepared) -> Forecast:
    """Forecast the compile of the model alone: a draft model is compiled separately."""
    planned = prepared.planned
    own = [graph for graph in planned.graphs if not graph.kind.startswith("draft")]
    share = len(own) / max(1, len(planned.graphs))
    return Forecast(len(own), share * planned.estimated_compile_s, prepared.progress.compile)


def _writable_cache(place: CompilePlace, environ: Mapping[str, str]) -> str:
    """Return the compiler's cache, or a writable copy of it, so that its graphs are found."""
    cache, own = Path(place.neff_cache), _own_store(environ)
    if is_writable(cache):
        return str(cache)
    return str(copy_once(cache, own / ".copies") if cache.is_dir() else own / "neff")


def _own_store(environ: Mapping[str, str]) -> Path:
    return fetch.download_root(environ) / "compiled"
