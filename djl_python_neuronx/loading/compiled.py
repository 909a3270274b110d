"""Compiled graphs of a prepared model: from its folder, from `compiled_graph_path`, from the compile store, or new."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from djl_python_neuronx import backends
from djl_python_neuronx.artifacts import fetch
from djl_python_neuronx.artifacts import manifest as manifests
from djl_python_neuronx.artifacts.atomic import is_writable
from djl_python_neuronx.artifacts.compiled_formats import NEURON_CONFIG, graphs_in, saved_by_nxdi
from djl_python_neuronx.artifacts.folder import EVERYTHING, read_json
from djl_python_neuronx.artifacts.mirror import Mirror
from djl_python_neuronx.artifacts.read_ahead import read_ahead
from djl_python_neuronx.artifacts.store import (
    URL_VARIABLE,
    CompilePlace,
    CompileStore,
    Miss,
    copy_once,
    locate,
)
from djl_python_neuronx.backends.holders import once_free
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.config.findings import Level, Problems
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.values import as_property, join_words
from djl_python_neuronx.errors import (
    ArtifactError,
    ArtifactMismatchError,
    ArtifactNotFoundError,
    BackendError,
    CompileError,
    describe_differences,
)
from djl_python_neuronx.loading.compile_facts import compile_facts, package_versions
from djl_python_neuronx.loading.compile_process import Forecast, compile_guarded
from djl_python_neuronx.loading.compile_risks import compile_risks, explained
from djl_python_neuronx.loading.load_plan import adapt_plan, load_plan
from djl_python_neuronx.loading.prepared import Prepared
from djl_python_neuronx.loading.situation import SILENT, LoadProgress, Purpose
from djl_python_neuronx.planning.machines import available_memory
from djl_python_neuronx.planning.nxdi.fields import other_fields
from djl_python_neuronx.planning.plan import PACKAGE_VERSIONS
from djl_python_neuronx.types import Tokenizer

logger = logging.getLogger(__name__)

NEURON_CACHE = Path("/var/tmp/neuron-compile-cache")  # noqa: S108  (the Neuron compiler's own default)
_OPTION = "option.compiled_graph_path"


@dataclass(frozen=True)
class Compiled:
    """Graphs that fit a prepared model, and what they were compiled for."""

    folder: Path | None
    """None: the backend compiles nothing, or `load` makes the graphs."""
    plan: LoadPlan
    """The backend's plan to load them."""
    facts: manifests.CompileFacts
    cache_hit: bool | None = None
    """True if the compile store had the graphs; None if they were not looked up there."""


def obtain(
    prepared: Prepared, tokenizer: Callable[[], Tokenizer], progress: LoadProgress = SILENT
) -> Compiled:
    """Find or compile the graphs of a prepared model. Compiling takes minutes to hours.

    `tokenizer`: the model's own; a draft model has that of the model that it drafts for. A model that is prepared to be
    compiled is refused if its graphs cannot be stored, and compiled whatever `option.compilation` is.

    Raises:
        ArtifactMismatchError: the user named a folder of graphs that are for other settings.
        ArtifactError: what is there is damaged, or cannot be read or stored; or a compile is needed and forbidden.
        BackendError: the backend cannot compile the model.
    """
    plan = load_plan(prepared, tokenizer)
    compiled = Compiled(None, plan, compile_facts(prepared, plan.model_dir))
    if prepared.purpose is Purpose.SERVE and prepared.weights is not None:
        # Not before the facts: the samples of the weights in them would wait for all that is read ahead. What the load
        # takes itself is left out, because the system would drop the rest for it.
        paths = [prepared.weights.folder / name for name in prepared.weights.names]
        read_ahead(paths, (available_memory() or 0) - (prepared.host_bytes or 0))
    compiler = backends.compiler(prepared.backend)
    if compiler is None:
        return compiled
    if reason := compiler.uncompilable(prepared.artifact.config):
        if prepared.purpose is Purpose.COMPILE:
            msg = f"{prepared.artifact.path} cannot be compiled ahead of time: {reason}. Serve it as it is"
            raise BackendError(msg)
        _check_allowed(prepared, reason)
        logger.warning("graphs_not_kept reason=%r", reason)
        return compiled
    place, has_graphs = _named_place(prepared)
    if prepared.own_graphs is not None:
        compiled = replace(compiled, folder=prepared.own_graphs)
    elif has_graphs and (folder := _named_graphs(prepared, str(place), compiled.facts, "all")):
        compiled = replace(compiled, folder=folder, plan=adapt_plan(prepared, plan, folder))
    else:
        compiled = _build(
            prepared,
            compiled,
            _locate(prepared, None if has_graphs else place),
            tokenizer,
            progress,
        )
    logger.info("compiled folder=%s", compiled.folder)
    return compiled


def foresee(prepared: Prepared, problems: Problems) -> None:
    """Report whether a start on this machine compiles. Reads manifests and sizes, no graphs, and writes nothing.

    Raises:
        ServingError: the start would end with it before a compile.
    """
    compiler = backends.compiler(prepared.backend)
    if compiler is None or prepared.own_graphs is not None or prepared.weights is None:
        return
    if reason := compiler.uncompilable(prepared.artifact.config):
        _check_allowed(prepared, reason)
        return
    facts = compile_facts(prepared, prepared.weights.folder)
    named, has_graphs = _named_place(prepared)
    if has_graphs and (
        fetch.uri_scheme(str(named)) or _named_graphs(prepared, str(named), facts, "none")
    ):
        return
    place = _locate(prepared, None if has_graphs else named)
    level: Level = "note"
    message = f"{place.store} has the graphs: a start compiles nothing"
    if (miss := _open_store(prepared, place).look(facts)) is not None:
        level, message = _judge(prepared, place, miss)
        prepared.resolved.report(compile_risks(prepared), problems)
    problems.add(level, message)


def foresee_elsewhere(prepared: Prepared, unknown: Collection[str]) -> None:
    """Judge the graphs in a folder that `compiled_graph_path` names, for a machine of which facts are `unknown`.

    Raises:
        ServingError: a start would end with it.
    """
    place = prepared.options.place("compiled_graph_path")
    if place is None or prepared.weights is None or fetch.uri_scheme(place):
        return
    if graphs_in(Path(place)) == prepared.backend:
        facts = compile_facts(prepared, prepared.weights.folder, here=False)
        _named_graphs(prepared, place, facts, "none", unknown)


def _named_place(prepared: Prepared) -> tuple[str | None, bool]:
    """The folder or URI in `compiled_graph_path`, and whether it holds saved graphs instead of stored compiles."""
    place = prepared.options.place("compiled_graph_path")
    if place is None:
        return None, False
    if not fetch.uri_scheme(place):
        return place, graphs_in(Path(place)) == prepared.backend
    listed = fetch.list_names(place, prepared.environ, origin=_OPTION)
    if prepared.backend == "nxdi":
        return place, saved_by_nxdi(listed)
    return place, any(name.endswith(".neff") and "/" not in name for name in listed)


def _named_graphs(
    prepared: Prepared,
    place: str,
    facts: manifests.CompileFacts,
    hashes: manifests.Hashes,
    unknown: Collection[str] = frozenset(),
) -> Path | None:
    """Return the local folder of saved graphs; None if they are for other facts and are to be compiled again.

    Only graphs that this package stored have a manifest to compare.

    Raises:
        ArtifactMismatchError: they are for other facts.
        ArtifactError: they are for another model, one is damaged, or they cannot be fetched.
    """
    environ = prepared.environ
    root = fetch.download_root(environ)
    folder = fetch.fetch(place, environ=environ, root=root, selection=EVERYTHING, origin=_OPTION)
    if not (folder / manifests.FILE_NAME).is_file():
        # NxD Inference's own record was compared before (`prepare`): they are for other settings.
        return None if prepared.backend == "nxdi" else folder
    manifest = manifests.read(folder)
    manifests.verify(folder, manifest, hashes=hashes, exact=False)
    found = manifests.differences(facts, manifest.facts)
    for name in {*unknown, *(PACKAGE_VERSIONS - manifest.facts.graph_options.keys())}:
        found.pop(name, None)
    if found and prepared.options.on_mismatch == "error":
        if "artifact_digest" in found:
            msg = (
                f"the graphs in {place} are of another model than {prepared.artifact.path}: "
                f"{_other_model(prepared, folder)}. Name those of this model in {_OPTION}, serve the model that was "
                "compiled, or set option.on_mismatch=recompile."
            )
            raise ArtifactError(msg)
        raise ArtifactMismatchError(found, place, prepared.resolved.origins)
    if found:
        listed = describe_differences(found, prepared.resolved.origins)
        logger.warning("compiled_graphs_not_used place=%s %s", place, listed)
    return None if found else folder


def _other_model(prepared: Prepared, folder: Path) -> str:
    """Return, in words, how the model of the graphs in a folder differs, by the configuration that lies beside them."""
    for path in (folder / NEURON_CONFIG, folder.parent / fetch.CONFIG):
        if path.is_file() and (found := other_fields(read_json(path), prepared.artifact.config)):
            return f"{path} has {', '.join(found)}"
    return "its weights, or files beside them, differ from those that were compiled"


def _locate(prepared: Prepared, named: str | None) -> CompilePlace:
    origin = prepared.resolved.origins.get("compiled_graph_path", _OPTION)
    return locate(named, origin, prepared.environ, NEURON_CACHE)


def _build(
    prepared: Prepared,
    compiled: Compiled,
    place: CompilePlace,
    tokenizer: Callable[[], Tokenizer],
    progress: LoadProgress,
) -> Compiled:
    """Return `compiled` with the folder of the graphs in the compile store, which makes them if it has none."""
    environ, made = prepared.environ, []

    def compile_into(target: Path) -> None:
        tokenizer()  # before hours of compiling: it may be damaged
        cache = place.neff_cache if place.is_remote else _writable_cache(place, environ)
        arguments = compiled.plan.arguments
        # The library gets the cache that can be written, not the option as it is set.
        placed = {**arguments.environment, URL_VARIABLE: cache}
        needed = prepared.compile_memory
        run = partial(
            compile_guarded,
            prepared.backend,
            replace(
                compiled.plan,
                arguments=replace(arguments, environment=placed),
                compile_workers=needed.workers if needed else 0,
            ),
            target,
            environ={**environ, URL_VARIABLE: cache},
            neff_cache=None if place.is_remote else Path(cache),
            forecast=replace(_forecast(prepared), listener=progress.compile),
        )
        with explained(prepared):
            # transformers-neuronx compiles on the device.
            once_free(
                run, wait_s=prepared.options.core_wait_s, pause=time.sleep, report=progress.stage
            )
        made.append(target)

    def judge(miss: Miss) -> None:
        risks = Problems()
        risks.add(*_judge(prepared, place, miss))
        prepared.resolved.report(compile_risks(prepared), risks)
        for risk in risks:
            level = logging.WARNING if risk.level == "warning" else logging.INFO
            logger.log(level, "compile_needed %s", risk.message)
        risks.raise_errors()

    new = not (place.is_remote or place.origin == "default" or Path(place.neff_cache).is_dir())
    # A compiler's cache is made at its first use, but the variable may have a typing error.
    level = logging.WARNING if new else logging.INFO
    logger.log(level, "compile_store place=%s origin=%r new=%s", place.store, place.origin, new)
    options = {**prepared.options.model_dump(mode="json"), "model_loader": prepared.backend}
    folder = _open_store(prepared, place).build(
        compiled.facts,
        compile_into,
        on_miss=judge,
        effective_options=options,
        packages=package_versions(),
    )
    return replace(compiled, folder=folder, cache_hit=not made)


def _open_store(prepared: Prepared, place: CompilePlace) -> CompileStore:
    """Open the compile store at a place; what cannot be written there goes below the download root."""
    environ, own = prepared.environ, _own_store(prepared.environ)
    if place.is_remote:
        mirror = Mirror(place.store, fetch.download_root(environ), environ)
        return CompileStore(own, mirror=mirror)
    root = Path(place.store)
    return CompileStore(root, fallback=None if root == own else own)


def _judge(prepared: Prepared, place: CompilePlace, miss: Miss) -> tuple[Level, str]:
    """Return the level and the words of a compile that a start needs.

    Raises:
        ArtifactNotFoundError: it is forbidden.
        CompileError: it failed before, and `option.retry_compile` is not set.
    """
    if miss.failure and not prepared.options.retry_compile:
        msg = (
            f"the compile for these settings and versions failed before and is not tried again. Change one of them, "
            f"or try it with --retry (option.retry_compile=true). {miss.failure}"
        )
        raise CompileError(msg)
    level: Level = "warning"
    if miss.damage is not None:
        reason = f"the graphs in {place.store} are damaged: {miss.damage}"
    elif miss.nearest is not None:
        where, other = miss.nearest
        found = manifests.differences(miss.wanted, other)
        listed = describe_differences(found, prepared.resolved.origins)
        reason = f"{place.store} has no graphs for these settings. Nearest, in {where}: {listed}"
        names = {key.partition(".")[0] for key in found}
        compiled = {name: other.graph_options.get(name) for name in sorted(names)}
        if compiled and names <= ServingOptions.model_fields.keys():
            back = [
                f"{name}={as_property(value)}" if value is not None else f"no {name}"
                for name, value in compiled.items()
            ]
            reason += f". To use these set {join_words(back)}"
    else:
        level = "note"
        whose = "as a draft model" if prepared.role == "draft" else "of this model"
        reason = f"{place.store} has no graphs {whose}"
    _check_allowed(prepared, reason)
    minutes = max(1, round(_forecast(prepared).seconds / 60))
    return level, f"{reason}. A start compiles, about {minutes} min"


def _check_allowed(prepared: Prepared, reason: str) -> None:
    """Refuse to compile at a start if `option.compilation` forbids it."""
    if prepared.options.compilation == "forbid" and prepared.purpose is not Purpose.COMPILE:
        origin = prepared.resolved.origins.get("compilation", "default")
        msg = (
            f"compilation=forbid ({origin}), and a start would compile: {reason}. Compile ahead of time "
            "(`djl-neuronx compile`), or start once with option.compilation=allow"
        )
        raise ArtifactNotFoundError(msg)


def _forecast(prepared: Prepared) -> Forecast:
    """Forecast the compile of the model alone: a draft model is compiled separately."""
    planned = prepared.planned
    share = prepared.num_graphs / max(1, len(planned.graphs))
    return Forecast(prepared.num_graphs, share * planned.estimated_compile_s)


def _writable_cache(place: CompilePlace, environ: Mapping[str, str]) -> str:
    """Return the compiler's cache, or a writable copy of it, so that its graphs are found."""
    cache, own = Path(place.neff_cache), _own_store(environ)
    if is_writable(cache):
        return str(cache)
    return str(copy_once(cache, own / ".copies") if cache.is_dir() else own / "neff")


def _own_store(environ: Mapping[str, str]) -> Path:
    return fetch.download_root(environ) / "compiled"
