"""Compiled graphs of a prepared model: from its folder, from `compiled_graph_path`, from the compile store, or new."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from djl_python_neuronx import backends
from djl_python_neuronx.artifacts import fetch
from djl_python_neuronx.artifacts import manifest as manifests
from djl_python_neuronx.artifacts.atomic import is_writable
from djl_python_neuronx.artifacts.compiled_formats import holds_graphs
from djl_python_neuronx.artifacts.manifest import CompileFacts, artifact_digest, check_facts
from djl_python_neuronx.artifacts.mirror import Mirror
from djl_python_neuronx.artifacts.store import (
    URL_VARIABLE,
    CompilePlace,
    CompileStore,
    OnMismatch,
    copy_once,
    locate,
)
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.errors import BackendError
from djl_python_neuronx.loading.compile_process import CompileProgress, Forecast, compile_guarded
from djl_python_neuronx.loading.fitting import compiled_here, graph_target
from djl_python_neuronx.loading.prepare import Prepared, load_plan
from djl_python_neuronx.planning.backend_choice import libraries
from djl_python_neuronx.planning.plan import (
    ServingPlan,
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
    prepared: Prepared,
    tokenizer: Tokenizer,
    *,
    environ: Mapping[str, str],
    listener: Callable[[CompileProgress], None] | None = None,
    required: bool = False,
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
    options = {**prepared.options.model_dump(mode="json"), "model_loader": prepared.loader}
    compiled = Compiled(None, plan, _facts(prepared, plan, environ), options, _packages())
    compiler = backends.compiler(prepared.loader)
    if compiler is None:
        return compiled
    if reason := compiler.uncompilable(plan):
        if required:
            msg = f"{prepared.artifact.path} cannot be compiled ahead of time: {reason}. Serve it as it is"
            raise BackendError(msg)
        logger.warning("graphs_not_kept reason=%r", reason)
        return compiled
    folder = prepared.artifact.compiled if prepared.fits else None
    cache_hit: bool | None = None
    named = _named(prepared, environ)
    if isinstance(named, Path):
        if folder is None:
            folder = _checked(named, compiled.facts)
            plan = _for_graphs(prepared, plan, folder)
    elif folder is None:
        origin = prepared.resolved.origins.get("compiled_graph_path", _OPTION)
        place = locate(named, origin, environ, NEURON_CACHE)
        folder, cache_hit = _from_store(prepared, compiled, place, environ, listener)
    logger.info("compiled folder=%s", folder)
    return replace(compiled, folder=folder, plan=plan, cache_hit=cache_hit)


def _facts(prepared: Prepared, plan: LoadPlan, environ: Mapping[str, str]) -> CompileFacts:
    loader = prepared.loader
    wanted: dict[str, Any] = {}
    package, version = "none", ""
    if (compiler := backends.compiler(loader)) is not None:
        wanted = graph_options(prepared.options, loader)
        wanted |= library_facts(loader) | flag_facts(environ)
        package, version = backends.COMPILER, compiler.compiler_version()
    return CompileFacts(
        graph_options=wanted,
        artifact_digest=artifact_digest(plan.model_dir),
        compiler=package,
        compiler_version=version,
        target=graph_target(prepared.machine, loader),
        role=prepared.role,
    )


def _packages() -> dict[str, str]:
    installed = [(one.name, one.version) for one in libraries().values()]
    installed += [(name, _version(name)) for name in _PACKAGES]
    return {name: version for name, version in installed if version is not None}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _named(prepared: Prepared, environ: Mapping[str, str]) -> Path | str | None:
    """Resolve `compiled_graph_path`: a `Path` is a local folder of saved graphs, a `str` a place to store compiles."""
    value = prepared.options.compiled_graph_path
    if value is None:
        return None
    if fetch.uri_scheme(value) == "s3":
        listed = fetch.list_names(value, environ, origin=_OPTION)
        if not any(name.endswith(".neff") and "/" not in name for name in listed):
            return value
        root = fetch.download_root(environ)
        return fetch.fetch(value, environ=environ, root=root, everything=True, origin=_OPTION)
    if fetch.uri_scheme(value):
        return value  # `locate` takes file:// and refuses others
    folder = (prepared.options.model_dir or Path()).absolute() / Path(value).expanduser()
    return folder if holds_graphs(folder) else str(folder)


def _checked(folder: Path, facts: CompileFacts) -> Path:
    """Return the folder, after a check of what this package stored there: it must be whole and fit."""
    if (folder / manifests.FILE_NAME).is_file():
        manifest = manifests.read(folder)
        manifests.verify(folder, manifest, exact=False)
        check_facts(facts, manifest.facts, where=str(folder))
    return folder


def _for_graphs(prepared: Prepared, plan: LoadPlan, folder: Path) -> LoadPlan:
    """Return the plan that loads the graphs in a folder that an option names."""
    if compiled_here(folder):
        return plan
    case = replace(prepared.case, foreign_graphs=True)
    for finding in stored_findings(case):
        logger.warning("option_finding %s", prepared.resolved.describe(finding))
    return replace(plan, arguments=library_arguments(case))


def _from_store(
    prepared: Prepared,
    compiled: Compiled,
    place: CompilePlace,
    environ: Mapping[str, str],
    listener: Callable[[CompileProgress], None] | None,
) -> tuple[Path, bool]:
    """Return the folder of the graphs in the compile store, and whether it held them already."""
    store = _open_store(place, prepared.options.on_mismatch, environ)
    forecast = _forecast(prepared.planned, listener)
    made = []

    def compile_into(target: Path) -> None:
        cache = place.neff_cache if place.is_remote else _writable_cache(place, environ)
        arguments = compiled.plan.arguments
        # The library gets the cache that can be written, not the option as it is set.
        placed = {**arguments.environment, URL_VARIABLE: cache}
        compile_guarded(
            prepared.loader,
            replace(compiled.plan, arguments=replace(arguments, environment=placed)),
            target,
            environ={**environ, URL_VARIABLE: cache},
            neff_cache=None if place.is_remote else Path(cache),
            forecast=forecast,
        )
        made.append(target)

    folder = store.build(
        compiled.facts,
        compile_into,
        effective_options=compiled.options,
        packages=compiled.packages,
    )
    return folder, not made


def _open_store(
    place: CompilePlace, on_mismatch: OnMismatch, environ: Mapping[str, str]
) -> CompileStore:
    """Open the compile store at a place; what cannot be written there goes below the download root."""
    logger.info("compile_store place=%s origin=%r", place.store, place.origin)
    own = _own_store(environ)
    if place.is_remote:
        mirror = Mirror(place.store, fetch.download_root(environ), environ)
        return CompileStore(own, mirror=mirror, on_mismatch=on_mismatch)
    root = Path(place.store)
    return CompileStore(root, fallback=None if root == own else own, on_mismatch=on_mismatch)


def _forecast(planned: ServingPlan, listener: Callable[[CompileProgress], None] | None) -> Forecast:
    """Forecast the compile of the model alone: a draft model is compiled separately."""
    own = [graph for graph in planned.graphs if not graph.kind.startswith("draft")]
    share = len(own) / max(1, len(planned.graphs))
    return Forecast(len(own), share * planned.estimated_compile_s, listener)


def _writable_cache(place: CompilePlace, environ: Mapping[str, str]) -> str:
    """Return the compiler's cache, or a writable copy of it, so that its graphs are found."""
    cache, own = Path(place.neff_cache), _own_store(environ)
    if is_writable(cache):
        return str(cache)
    return str(copy_once(cache, own / ".copies") if cache.is_dir() else own / "neff")


def _own_store(environ: Mapping[str, str]) -> Path:
    return fetch.download_root(environ) / "compiled"
