"""Preparation of a model: find it, choose the backend, fill in the options, plan, and judge all of it.

A start, `compile` and DJL's partition script call `prepare_or_raise`, `check` calls `prepare`. Nothing is loaded onto a
device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from djl_python_neuronx.artifacts.artifact import CUT
from djl_python_neuronx.artifacts.fetch import CONFIG
from djl_python_neuronx.artifacts.manifest import artifact_digest
from djl_python_neuronx.config import sources, trust
from djl_python_neuronx.config.findings import Level, Problems
from djl_python_neuronx.config.resolve import Resolved
from djl_python_neuronx.errors import ConfigError, ServingError
from djl_python_neuronx.loading.adapters import find_adapters
from djl_python_neuronx.loading.find import DRAFT, Model, find_model, find_named
from djl_python_neuronx.loading.judge import (
    choose_machine,
    judge_draft_kind,
    judge_graphs,
    judge_places,
    judge_support,
    judge_tracing,
    judge_vocabulary,
)
from djl_python_neuronx.loading.mismatch import fill_recorded, has_own_graphs
from djl_python_neuronx.loading.own_model import with_code
from djl_python_neuronx.loading.preparation_log import log_plan, log_problems, log_settings
from djl_python_neuronx.loading.prepared import Prepared
from djl_python_neuronx.loading.situation import SILENT, LoadProgress, Purpose, Situation
from djl_python_neuronx.planning import machines
from djl_python_neuronx.planning.backend_choice import choose_backend, libraries
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.defaults import DRAFT_ORIGIN, as_draft_model, draft_settings
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.plan import (
    assess,
    examine,
    judge,
    make_plan,
    stored_findings,
)
from djl_python_neuronx.planning.rules import library_conflicts

DRAFT_PREFIX = "the draft model: "
_VLLM_GRAPHS = "NEURON_COMPILED_ARTIFACTS"
"""Variable of vLLM's plugin: what it names is NxD Inference's."""


def prepare_or_raise(
    properties: Mapping[str, Any] | None,
    model_dir: Path | None,
    *,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, str] = MappingProxyType({}),
    file: str | None = None,
    content: bytes | None = None,
    machine: machines.DeviceInfo | None = None,
    purpose: Purpose = Purpose.SERVE,
    progress: LoadProgress = SILENT,
) -> Prepared:
    """Read the settings, download the model and prepare it; log settings, problems and plan. Takes minutes.

    `environ`: by default this process's. `file` and `content`: see `read_settings`. `machine`: the one that will serve,
    if it is not this one.

    Raises:
        ServingError: the only error, or a `ConfigError` that lists all errors of settings, model and machine.
    """
    problems = Problems()
    environ = sources.environment() if environ is None else environ
    settings = examine(
        properties,
        model_dir,
        environ,
        problems,
        overrides,
        file=file,
        content=content,
        embedded=True,
    )
    log_settings(settings)
    variables, inherited = settings.worker_variables, properties is not None
    environ = trust.serving_environ(environ, variables, problems, inherited=inherited)
    here = machine or machines.detect(environ=environ)
    is_named = machine is not None
    situation = Situation(purpose, here, environ, problems, is_named, progress=progress)
    logged = log_problems(problems)
    prepared = prepare(settings, situation)
    if prepared is not None:
        log_settings(prepared.resolved, logged=settings)
    log_problems(problems, logged)
    problems.raise_errors()
    if prepared is None:
        msg = "option.model_id is not set; expected a Hugging Face id, a folder or a URI"
        raise ConfigError(msg)
    log_plan(prepared)
    return prepared


def prepare(settings: Resolved, situation: Situation) -> Prepared | None:
    """Find the model, choose the backend, fill in the options, plan graphs and memory, and judge all of it.

    `settings`: from `examine`, with the options that are set. Returns None if the model's configuration cannot be read
    or nothing can serve it.
    """
    problems, options = situation.problems, settings.options
    judge_tracing(options, situation)
    try:
        model = find_model(settings, situation)
        if model is not None:
            model = with_code(model, settings, settings.origins, situation)
            backend = _choose_backend(model, settings, situation)
    except ServingError as error:
        problems.add_error(error)
        model = None
    if model is None:
        # The library that the user named limits the options whatever the model is.
        settings.report(library_conflicts(options, options.model_loader), problems)
        return None
    judge_vocabulary(model, options, situation)
    # A draft model that an artifact records is relative to the artifact, and one of settings that have no folder.
    base = options.model_dir if DRAFT in settings.origins else None
    base = base or model.artifact.path
    with problems.catch():
        given, settings = settings, fill_recorded(settings, model.artifact, backend)
        if settings is not given:
            model = with_code(model, settings, given.origins, situation)
    draft, of_draft = None, replace(situation, problems=Problems())
    if (name := settings.options.speculative_draft_model) is not None:
        held = model.artifact.manifest
        if held is not None and not model.whole and f"{name}/{CONFIG}" in held.files:
            name = f"{model.name.rstrip('/')}/{name}"  # in the remote folder of the model
        with of_draft.problems.catch():
            draft = find_named(name, base, DRAFT, settings, of_draft, weights_needed=model.whole)
    problems.include(of_draft.problems, DRAFT_PREFIX, (DRAFT,))
    settings, adapters = find_adapters(model, settings, backend, situation)
    case = _case(settings, model, backend, situation)
    with problems.catch():
        case = _add_draft(case, draft)
    prepared = replace(_plan(settings, model, case, situation), adapters=adapters)
    if draft is not None and prepared.options.drafting and not problems.errors:
        prepared = _with_draft(prepared, draft, of_draft)
        problems.include(of_draft.problems, DRAFT_PREFIX, (DRAFT,))
    return prepared


def _add_draft(case: Case, draft: Model | None) -> Case:
    """Add the facts of a draft model, and its content if the model's graphs depend on it."""
    if draft is None:
        return case
    is_known = case.fused and draft.artifact.weights
    digest = artifact_digest(draft.artifact.path) if is_known else ""
    return replace(case, draft=draft.facts, draft_digest=digest)


def _case(settings: Resolved, model: Model, backend: str, situation: Situation) -> Case:
    of_vllm = settings.origins.get("compiled_graph_path") == f"environment {_VLLM_GRAPHS}"
    saved = model.artifact.backend == backend and bool(model.artifact.neuron_config)
    neuron = NEURON_BACKENDS.get(backend)
    library = libraries()[neuron.package] if neuron is not None and situation.is_here else None
    return Case(
        settings.options,
        model.facts,
        choose_machine(settings, backend, situation),
        neuron,
        foreign_graphs=saved or (of_vllm and backend == "nxdi"),
        among_others=situation.among_others,
        compiled=model.artifact.backend == backend and model.artifact.compiled is not None,
        code=model.code,
        library_version=library.version if library and library.state == "installed" else None,
    )


def _choose_backend(model: Model, settings: Resolved, situation: Situation) -> str:
    unheard = replace(situation, problems=Problems())
    choice = choose_backend(
        settings.options,
        situation.machine,
        model.facts.model_type,
        # Without the draft model's sizes, which decide nothing between these libraries.
        lambda backend: judge(_case(settings, model, backend, unheard), settings.origins),
        installed=libraries() if situation.is_here else None,
        artifact_backend=model.artifact.backend,
        dry_run=situation.is_dry,
    )
    if choice.reason:
        level: Level = "warning" if choice.backend == "cpu" and not situation.is_dry else "note"
        situation.problems.add(level, choice.reason, ("model_loader",))
    return choice.backend


def _plan(settings: Resolved, model: Model, case: Case, situation: Situation) -> Prepared:
    """Fill in the options, judge them and what the folder holds, and plan.

    `case`: with the options of `settings`.
    """
    is_bound = case.on_cpu or case.is_draft or model.artifact.backend is not None
    others = () if is_bound else [one for one in NEURON_BACKENDS.values() if one != case.neuron]
    resolved, case = assess(settings, case, situation.problems, others)
    if not case.is_draft:
        judge_draft_kind(model.artifact, "draft_model", situation.problems)
    judge_support(model.artifact, case, situation)
    judge_places(resolved, case, situation)
    weights, fits = judge_graphs(model.artifact, case, resolved.origins, situation)
    compiled = model.artifact.compiled if fits else None
    case = replace(
        case,
        presharded=weights is not None and weights.kind in CUT,
        foreign_graphs=compiled is not None and model.whole and not has_own_graphs(compiled),
    )
    resolved.report(stored_findings(case), situation.problems)
    return Prepared(
        resolved=resolved,
        name=model.name,
        source=model.source,
        artifact=model.artifact,
        case=case,
        planned=make_plan(case),
        weights=weights,
        own_graphs=compiled,
        environ=situation.environ,
        purpose=situation.purpose,
        role="draft" if case.is_draft else "model",
    )


def _with_draft(prepared: Prepared, draft: Model, situation: Situation) -> Prepared:
    """Prepare the draft model as every model; its folder's `serving.properties` is for serving it and unread."""
    backend, problems = prepared.backend, situation.problems
    judge_draft_kind(draft.artifact, prepared.options.draft_model_kind, problems)
    settings = examine(
        None,
        None,
        sources.without_options(situation.environ),
        problems,
        draft_settings(prepared.options, backend, draft.name),
        overrides_from=DRAFT_ORIGIN,
    )
    with problems.catch():
        settings = fill_recorded(settings, draft.artifact, backend)
    settings = replace(settings, options=as_draft_model(settings.options))
    neuron = prepared.case.neuron
    case = Case(settings.options, draft.facts, prepared.machine, neuron, is_draft=True)
    other = _plan(settings, draft, case, situation)
    if problems.errors:
        return prepared
    cores = max(prepared.case.degree, other.case.degree)
    other = replace(other, process_cores=cores)
    return replace(prepared, draft=other, process_cores=cores)
