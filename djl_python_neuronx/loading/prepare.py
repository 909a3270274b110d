"""From settings to a model that can be loaded: fetched, recognised, judged, planned; nothing is on a device yet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from djl_python_neuronx import backends
from djl_python_neuronx.artifacts import fetch, formats
from djl_python_neuronx.artifacts.artifact import Artifact
from djl_python_neuronx.artifacts.cache import Progress
from djl_python_neuronx.artifacts.manifest import Role
from djl_python_neuronx.artifacts.tokenizer import load_tokenizer
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.config import sources
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.resolve import Resolved
from djl_python_neuronx.config.values import shown
from djl_python_neuronx.errors import (
    BackendError,
    ConfigError,
    ServingError,
)
from djl_python_neuronx.loading.compile_process import CompileProgress
from djl_python_neuronx.loading.fitting import check_fit, graph_target, proved, with_recorded
from djl_python_neuronx.loading.load_plan import load_plan
from djl_python_neuronx.planning import machines
from djl_python_neuronx.planning.assess import assess, examine
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.draft import ORIGIN, alone, draft_settings
from djl_python_neuronx.planning.graph_facts import library_facts
from djl_python_neuronx.planning.intent import drafting
from djl_python_neuronx.planning.loader import choose_loader, libraries
from djl_python_neuronx.planning.machines import DeviceInfo
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.plan import ServingPlan, make_plan
from djl_python_neuronx.types import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadProgress:
    """Who wants to know how far a load has come; what nobody listens to is logged from time to time."""

    transfer: Progress | None = None
    """Downloads and uploads."""
    compile: Callable[[CompileProgress], None] | None = None


SILENT = LoadProgress()


@dataclass(frozen=True)
class Prepared:
    """A model on this machine's disk and what is to be done with it."""

    resolved: Resolved
    """The options, filled in."""
    artifact: Artifact
    loader: str
    machine: DeviceInfo
    planned: ServingPlan
    plan: LoadPlan
    """The backend's orders."""
    tokenizer: Tokenizer
    fits: bool
    """What the folder has been compiled or cut for is these options; False: it is not, or it is another backend's."""
    draft: Prepared | None
    """The draft model, for the same slots and lengths."""
    role: Role = "model"
    """What it is compiled as."""

    @property
    def options(self) -> ServingOptions:
        """The options, filled in."""
        return self.resolved.options


def prepare(
    properties: Mapping[str, Any] | None,
    model_dir: Path | None,
    *,
    environ: Mapping[str, str],
    overrides: Mapping[str, str] = MappingProxyType({}),
    machine: DeviceInfo | None = None,
    progress: Progress | None = None,
) -> Prepared:
    """Resolve the settings, fetch the model, and see to it that both fit; downloads take minutes.

    `machine`: to prepare for another one than this. `progress` gets the bytes of downloads, which else are logged.

    Raises:
        ServingError: what is wrong with the settings, the model's files or the machine.
    """
    examined = examine(properties, model_dir, environ, overrides)
    _log_settings(examined[0])
    machine = machines.detect(environ=environ) if machine is None else machine
    machine = machines.for_process(machine, environ)
    if machine.assumed:
        logger.warning("device_assumed reason=%r", machine.assumed)
    limit = machines.core_limit(environ)
    if limit is not None and (problem := limit.problem or limit.beyond(machine)):
        logger.warning("core_limit reason=%r", problem)
    return _prepare(examined, environ, machine, progress)


def _prepare(
    examined: tuple[Resolved, list[ConfigError]],
    environ: Mapping[str, str],
    machine: DeviceInfo,
    progress: Progress | None,
    drafts_for: Prepared | None = None,
) -> Prepared:
    """As `prepare`. `drafts_for`: it is the draft model of this one, whose tokenizer is its own."""
    settings, problems = examined
    try:
        artifact, loader = _chosen(settings, machine, environ, progress)
    except ServingError as error:
        if not problems:
            raise
        raise ConfigError.collect([*problems, ConfigError(str(error))]) from error
    recorded = with_recorded(settings, artifact, loader)
    if drafts_for is not None:
        recorded = replace(recorded, options=alone(recorded.options))
    named_by_artifact = "speculative_draft_model" not in settings.origins
    base = artifact.path if named_by_artifact else settings.options.model_dir
    draft_dir = _fetch_draft(recorded, base, environ, progress)
    draft = None
    if draft_dir is not None:
        draft = ModelFacts.from_config(formats.read_json(draft_dir / fetch.CONFIG))
    facts = ModelFacts.from_config(artifact.config, artifact.dtype)
    resolved, case, unsuitable = assess(
        recorded, Case(recorded.options, facts, machine, loader, draft)
    )
    _log_settings(resolved, told=settings)
    if problems or unsuitable:
        raise ConfigError.collect([*problems, *unsuitable])
    planned = make_plan(case, artifact_format=artifact.format)
    _log_plan(artifact, planned, facts)
    options = resolved.options
    fits = check_fit(artifact, options, loader, _surroundings(artifact, loader, machine))
    tokenizer = _tokenizer(artifact, options) if drafts_for is None else drafts_for.tokenizer
    plan = load_plan(options, artifact, tokenizer, planned.arguments, loader, fits=fits)
    prepared = Prepared(resolved, artifact, loader, machine, planned, plan, tokenizer, fits, None)
    if draft_dir is None or not drafting(options):
        return prepared
    return _with_draft(prepared, _prepare_draft(prepared, draft_dir, environ, progress))


def _surroundings(artifact: Artifact, loader: str, machine: DeviceInfo) -> dict[str, object]:
    """What graphs depend on beside options; empty where there are none."""
    compiler = backends.compiler(loader)
    if artifact.backend != loader or compiler is None:
        return {}
    return {
        "target": graph_target(machine, loader),
        "library_version": None,
        **library_facts(loader),
        "compiler_version": compiler.compiler_version(),
    }


def _with_draft(prepared: Prepared, draft: Prepared) -> Prepared:
    cores = max(one.plan.tensor_parallel_degree for one in (prepared, draft))
    return replace(
        prepared,
        plan=replace(prepared.plan, process_cores=cores),
        draft=replace(draft, plan=replace(draft.plan, process_cores=cores)),
    )


def _prepare_draft(
    prepared: Prepared, folder: Path, environ: Mapping[str, str], progress: Progress | None
) -> Prepared:
    """The draft model, as every model is prepared: what is compiled of it is used where it fits.

    Its folder's `serving.properties` is for serving it, so it is not read.
    """
    settings = draft_settings(prepared.options, prepared.loader, str(folder.absolute()))
    examined = examine(
        None, None, sources.without_options(environ), settings, overrides_from=ORIGIN
    )
    try:
        draft = _prepare(examined, environ, prepared.machine, progress, drafts_for=prepared)
    except ServingError as error:
        msg = f"the draft model (option.speculative_draft_model, {folder}): {error}"
        raise ConfigError(msg) from error
    # Graphs in a folder are somebody's choice. Those in the store are ours, of other lengths or another model's draft.
    options = draft.options.model_copy(update={"on_mismatch": "recompile"})
    return replace(draft, resolved=replace(draft.resolved, options=options), role="draft")


def _tokenizer(artifact: Artifact, options: ServingOptions) -> Tokenizer:
    return load_tokenizer(
        artifact.path, trust_remote_code=options.trust_remote_code, revision=options.revision
    )


def _chosen(
    resolved: Resolved,
    machine: DeviceInfo,
    environ: Mapping[str, str],
    progress: Progress | None,
) -> tuple[Artifact, str]:
    """The model's files and the name of the backend that is to load them."""
    artifact = _fetch(resolved, environ, progress)
    loader = choose_loader(
        resolved.options,
        machine,
        libraries(),
        backends.names(),
        artifact.backend,
        artifact.model_type,
    )
    obstacle = backends.get(loader).supports(artifact)
    if obstacle is not None:
        msg = f"the {loader} backend cannot serve the model in {artifact.path}: {obstacle}"
        raise BackendError(msg)
    return artifact, loader


def _fetch_draft(
    resolved: Resolved,
    base: Path | None,
    environ: Mapping[str, str],
    progress: Progress | None,
) -> Path | None:
    """The draft model's folder; `base` is where a relative name starts."""
    name = resolved.options.speculative_draft_model
    if name is None:
        return None
    return _fetched(name, "speculative_draft_model", base, resolved, environ, progress)


def _fetch(resolved: Resolved, environ: Mapping[str, str], progress: Progress | None) -> Artifact:
    model_id, model_dir = resolved.options.model_id, resolved.options.model_dir
    if model_id is None:
        return proved(formats.detect(model_dir or Path(), origin="the model_dir argument"))
    folder = _fetched(model_id, "model_id", model_dir, resolved, environ, progress)
    return proved(formats.detect(folder, origin="option.model_id"))


def _fetched(
    model_id: str,
    option: str,
    base: Path | None,
    resolved: Resolved,
    environ: Mapping[str, str],
    progress: Progress | None,
) -> Path:
    """The local folder of the model that an option names; relative ones are in `base`."""
    return fetch.fetch(
        model_id,
        environ=environ,
        root=fetch.download_root(environ),
        model_dir=base,
        revision=resolved.options.revision if option == "model_id" else None,
        progress=progress,
        origin=f"option.{option}, {resolved.origins.get(option, 'default')}",
    )


def _log_settings(resolved: Resolved, told: Resolved | None = None) -> None:
    """Options that are not at their default and what is to be said of them, without what was `told` before.

    In two steps, so that the log of a start that fails in between says where its settings came from.
    """
    before = set() if told is None else {(name, where) for name, _, where in told.explain()}
    for option, value, origin in resolved.explain():
        if (option, origin) not in before:
            level = logging.DEBUG if origin == "default" else logging.INFO
            logger.log(level, "option name=%s value=%s origin=%r", option, shown(value), origin)
    if told is None:
        for key, doubt in resolved.suspicious.items():
            logger.warning("option_suspicious name=%s reason=%r", key, doubt)
        for option, reason in resolved.ignored.items():
            logger.info("option_ignored name=%s reason=%r", option, reason)
    for finding in resolved.findings[len(told.findings) if told else 0 :]:
        level = logging.WARNING if finding.level == "warning" else logging.INFO
        logger.log(level, "option_finding level=%s %s", finding.level, resolved.describe(finding))


def _log_plan(artifact: Artifact, planned: ServingPlan, facts: ModelFacts) -> None:
    """What is about to be compiled and loaded, so that the log of a start that was killed tells why."""
    logger.info(
        "planned backend=%s format=%s parameters=%s graphs=%d estimated_compile_s=%.0f needed_gib_per_core=%s",
        planned.loader,
        artifact.format,
        facts.num_parameters,
        len(planned.graphs),
        planned.estimated_compile_s,
        f"{planned.memory.needed / 2**30:.2f}" if planned.memory else "unknown",
    )
