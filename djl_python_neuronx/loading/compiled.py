"""The compiled graphs of a prepared model: the folder's own, those that an option names, the store's, or made now."""

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
from djl_python_neuronx.artifacts.compiled_formats import detect_graphs
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
from djl_python_neuronx.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    BackendError,
    UnknownFormatError,
)
from djl_python_neuronx.loading.compile_process import CompileProgress, Forecast, compile_guarded
from djl_python_neuronx.loading.fitting import graph_target
from djl_python_neuronx.loading.load_plan import load_plan
from djl_python_neuronx.loading.prepare import Prepared
from djl_python_neuronx.planning.graph_facts import flag_facts, graph_options, library_facts
from djl_python_neuronx.planning.loader import libraries
from djl_python_neuronx.types import Tokenizer

logger = logging.getLogger(__name__)

NEURON_CACHE = Path("/var/tmp/neuron-compile-cache")  # noqa: S108  (the Neuron compiler's own default)
_PACKAGES = ("djl-python-neuronx", "safetensors", "torch", "transformers")
_OPTION = "option.compiled_graph_path"


@dataclass(frozen=True)
class Compiled:
    """Graphs that fit a prepared model."""

    folder: Path | None
    """None: the backend compiles none."""
    plan: LoadPlan
    """The backend's orders to load them."""
    facts: CompileFacts
    """What they depend on."""
    options: Mapping[str, Any]
    """All options in force, as JSON has them."""
    packages: Mapping[str, str]
    """Versions of the libraries."""
    cache_hit: bool | None = None
    """Whether the compile cache had the graphs; None if they were not looked up there."""


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
    facts = _facts(prepared, plan, environ)
    options = {
        **prepared.options.model_dump(mode="json"),
        "model_loader": prepared.loader,
    }
    packages = _packages()
    folder: Path | None = None
    cache_hit: bool | None = None
    compiler = backends.compiler(prepared.loader)
    if compiler is None:
        pass
    elif reason := compiler.uncompilable(plan):
        if required:
            msg = f"{prepared.artifact.path} cannot be compiled ahead of time: {reason}. Serve it as it is"
            raise BackendError(msg)
        logger.warning("graphs_not_kept reason=%r", reason)
    else:
        folder = prepared.artifact.compiled if prepared.fits else None
        named = _named(prepared, environ)
        if isinstance(named, Path):
            folder = folder or _checked(named, facts)
        elif folder is None:
            place = locate(named, _origin(prepared), environ, NEURON_CACHE)
            folder, cache_hit = _from_store(
                prepared, plan, place, facts, options, packages, environ=environ, listener=listener
            )
        logger.info("compiled folder=%s", folder)
    plan = replace(plan, foreign_graphs=folder is not None and not _is_ours(folder))
    return Compiled(folder, plan, facts, options, packages, cache_hit)


def _facts(prepared: Prepared, plan: LoadPlan, environ: Mapping[str, str]) -> CompileFacts:
    loader = prepared.loader
    wanted: dict[str, Any] = {}
    package, version = "none", ""
    if (compiler := backends.compiler(loader)) is not None:
        wanted = {
            **graph_options(prepared.options, loader),
            **library_facts(loader),
            **flag_facts(environ),
        }
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


def _origin(prepared: Prepared) -> str:
    return prepared.resolved.origins.get("compiled_graph_path", _OPTION)


def _named(prepared: Prepared, environ: Mapping[str, str]) -> Path | str | None:
    """What `compiled_graph_path` names: a folder of saved graphs, as a local path, or else a place to keep compiles."""
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
        return value  # `locate` says what is wrong with it, or takes file://
    folder = (prepared.options.model_dir or Path()).absolute() / Path(value).expanduser()
    try:
        if detect_graphs(folder, origin=_OPTION).kind == "neff":
            return folder
    except (ArtifactNotFoundError, UnknownFormatError):
        pass  # a cache that is empty yet
    return str(folder)


def _checked(folder: Path, facts: CompileFacts) -> Path:
    """The folder itself; if a store of ours made it, it is whole and fits."""
    if (folder / manifests.FILE_NAME).is_file():
        manifest = manifests.read(folder)
        manifests.verify(folder, manifest, exact=False)
        check_facts(facts, manifest.facts, where=str(folder))
    return folder


def _is_ours(folder: Path) -> bool:
    """Whether this package compiled what is in a folder.

    The manifest that tells is the store's, which an output's folder of graphs has kept. The output's own tells nothing:
    one can be made with the graphs of another program.
    """
    with suppress(ArtifactError):
        manifests.read(folder)
        return True
    return False


def _from_store(
    prepared: Prepared,
    plan: LoadPlan,
    place: CompilePlace,
    facts: CompileFacts,
    options: Mapping[str, Any],
    packages: Mapping[str, str],
    *,
    environ: Mapping[str, str],
    listener: Callable[[CompileProgress], None] | None,
) -> tuple[Path, bool]:
    """The folder of the graphs, and whether the store had them."""
    writable = fetch.download_root(environ) / "compiled"
    mirror = None
    if place.is_remote:
        mirror = Mirror(place.store, fetch.download_root(environ), environ)
    root = writable if place.is_remote else Path(place.store)
    store = CompileStore(
        root,
        fallback=None if root == writable else writable,
        mirror=mirror,
        on_mismatch=prepared.options.on_mismatch,
    )
    logger.info("compile_store place=%s origin=%r", place.store, place.origin)
    planned = prepared.planned
    # A draft model is compiled by itself.
    own = [graph for graph in planned.graphs if not graph.kind.startswith("draft")]
    share = len(own) / max(1, len(planned.graphs))
    forecast = Forecast(len(own), share * planned.estimated_compile_s, listener)

    cache_hit = True

    def make(target: Path) -> None:
        nonlocal cache_hit
        cache_hit = False
        cache = (
            place.neff_cache
            if place.is_remote
            else str(_writable(Path(place.neff_cache), writable))
        )
        # The library is given the place that there is, not the option as it was written.
        arguments = plan.arguments
        placed = {**arguments.environment, URL_VARIABLE: cache}
        compile_guarded(
            prepared.loader,
            replace(plan, arguments=replace(arguments, environment=placed)),
            target,
            environ={**environ, URL_VARIABLE: cache},
            neff_cache=None if place.is_remote else Path(cache),
            forecast=forecast,
        )

    folder = store.build(facts, make, effective_options=options, packages=packages)
    return folder, cache_hit


def _writable(cache: Path, own: Path) -> Path:
    """The compiler's cache, or what it may write into instead: a copy, so that its graphs are found."""
    if is_writable(cache):
        return cache
    if cache.is_dir():
        return copy_once(cache, own / ".copies")
    return own / "neff"
