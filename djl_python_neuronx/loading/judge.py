"""Judge what a preparation finds: the machine, the places of graphs, and the graphs and weights of a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from djl_python_neuronx import backends
from djl_python_neuronx.artifacts import fetch
from djl_python_neuronx.artifacts.artifact import CUT, WHOLE, Artifact
from djl_python_neuronx.artifacts.compiled_formats import graphs_in
from djl_python_neuronx.artifacts.tokenizer import has_vocabulary, no_tokenizer
from djl_python_neuronx.artifacts.weights import Weights
from djl_python_neuronx.backends import cpu
from djl_python_neuronx.config.findings import Finding, Level, Problems
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.resolve import Resolved
from djl_python_neuronx.config.sources import try_path
from djl_python_neuronx.errors import (
    ArtifactMismatchError,
    ArtifactNotFoundError,
    BackendError,
    BackendUnavailableError,
)
from djl_python_neuronx.loading.find import Model
from djl_python_neuronx.loading.mismatch import FLAGS, find_mismatch, graph_target
from djl_python_neuronx.loading.own_model import code_facts
from djl_python_neuronx.loading.situation import Purpose, Situation
from djl_python_neuronx.planning import machines
from djl_python_neuronx.planning.backend_choice import libraries
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.machines import DeviceInfo
from djl_python_neuronx.planning.plan import flag_facts, library_facts
from djl_python_neuronx.tracing import exporter_class

ASSUMED_INSTANCES = ("inf2.48xlarge", "trn1.32xlarge", "trn2.48xlarge")
"""Machines that a dry run plans for without a Neuron device: the first one whose runtime takes the degrees."""


def judge_support(artifact: Artifact, case: Case, situation: Situation) -> None:
    """Report a model that the cpu backend does not run, or a compile for sim; rules judge what the libraries lack."""
    if case.options.simulated and situation.purpose is Purpose.COMPILE:
        msg = "model_loader=sim compiles nothing; set the backend that will serve the model"
        situation.problems.add_error(BackendError(msg))
    runs = case.on_cpu and not case.options.simulated
    if runs and (obstacle := cpu.supports(artifact.config)):
        msg = f"the cpu backend cannot serve the model in {artifact.path}: {obstacle}"
        situation.problems.add_error(BackendError(msg))


def judge_vocabulary(model: Model, options: ServingOptions, situation: Situation) -> None:
    """Report a missing tokenizer in a dry run; a start loads it."""
    if situation.is_dry and model.whole and not options.trust_remote_code:
        folder = model.artifact.path
        if not has_vocabulary(entry.name for entry in folder.iterdir()):
            situation.problems.add("error", no_tokenizer(folder))


def judge_tracing(options: ServingOptions, situation: Situation) -> None:
    """Report what the export of traces lacks, unless another machine will serve."""
    serves = not (situation.is_named or situation.purpose is Purpose.COMPILE)
    if options.otlp_traces_endpoint is not None and serves:
        with situation.problems.catch():
            exporter_class(situation.environ)


def choose_machine(settings: Resolved, backend: str, situation: Situation) -> DeviceInfo:
    """Return the machine with the cores that the environment leaves to this process, or an assumed machine."""
    machine, environ = situation.machine, situation.environ
    if backend not in NEURON_BACKENDS:
        return machines.for_process(machine, environ)
    if machine.assumed:
        situation.problems.add("note" if situation.is_dry else "warning", machine.assumed)
    if not machine.has_neuron:
        if situation.is_dry:
            machine = _assume_machine(settings.options, situation)
        else:
            _report_no_device(backend, situation)
    machine = machines.on_single_cores(machine, settings.options.logical_nc_config)
    machine = machines.for_process(machine, environ)
    _judge_core_limit(machine, settings, situation)
    return machine


def _report_no_device(backend: str, situation: Situation) -> None:
    problem = f"no Neuron device is visible here ({situation.machine.seen})"
    if situation.purpose is Purpose.COMPILE:
        fix = "cores and memory are not checked. Name the machine that will serve with --instance"
        situation.problems.add("warning", f"{problem}: {fix}")
    else:
        fix = "Give the devices /dev/neuron* to this process or container, or set option.model_loader=cpu"
        error = BackendUnavailableError(f"{problem}, and the {backend} backend needs one. {fix}")
        situation.problems.add_error(error)


def _assume_machine(options: ServingOptions, situation: Situation) -> DeviceInfo:
    candidates = [
        machines.for_process(machines.named(name), situation.environ) for name in ASSUMED_INSTANCES
    ]
    chosen = next((one for one in candidates if _takes_degrees(one, options)), candidates[0])
    message = (
        f"no Neuron device here: planned for {chosen.instance_type}, name another with --instance"
    )
    situation.problems.add("note", message)
    return chosen


def _takes_degrees(machine: DeviceInfo, options: ServingOptions) -> bool:
    """Return True if the machine's runtime takes the degrees that are set. Limits of the process are left aside."""
    of_draft = options.draft_model_tp_size if options.drafting else None
    legal = machines.legal_degrees(machine.family, machine.neuron_cores)
    degrees = (options.tensor_parallel_degree, of_draft)
    numbers = [degree for degree in degrees if isinstance(degree, int)]
    return bool(numbers) and all(degree // machine.machines(degree) in legal for degree in numbers)


def _judge_core_limit(machine: DeviceInfo, settings: Resolved, situation: Situation) -> None:
    limit = machines.core_limit(situation.environ)
    if limit is None:
        return
    setting = settings.worker_variables.get(limit.name)
    where = "environment" if setting is None else f"option.env, {setting.origin}"
    if limit.problem is not None:
        situation.problems.add("warning", f"{limit.problem} ({where})")
    elif beyond := limit.beyond(machine):
        # The runtime of this machine is the judge of its own numbers: a container may count from 0.
        level: Level = "warning" if situation.is_here else "error"
        situation.problems.add(level, f"{beyond} ({where})")
    elif machine.limited_by is not None:
        whole = f" of the {machine.neuron_cores}" if machine.neuron_cores else ""
        situation.problems.add(
            "note",
            f"{limit} ({where}) leaves {machine.visible_cores}{whole} NeuronCores: the plan counts these alone",
        )


def judge_places(resolved: Resolved, case: Case, situation: Situation) -> None:
    """Report folders of compiled graphs that do not exist or are damaged; a draft model's with its target's."""
    if case.on_cpu or case.is_draft:
        return
    level: Level = "error" if situation.is_here else "warning"
    names = ("compiled_graph_path", "draft_model_compiled_path")
    for name in names[: 1 + case.options.drafting]:
        place = case.options.place(name)
        if place is None or fetch.uri_scheme(place):
            continue
        problem = ""
        if not try_path(Path(place).is_dir, failed=False):
            problem = f"there is no folder {place}; correct it, or create it with `mkdir -p`"
        else:
            with situation.problems.catch():
                held = graphs_in(Path(place))
                if held not in {None, case.backend}:
                    problem = f"it holds graphs of the backend {held}; name another folder, or set model_loader={held}"
        if problem:
            resolved.report([Finding((name,), problem, level)], situation.problems)


def judge_draft_kind(artifact: Artifact, kind: str, problems: Problems) -> None:
    """Report a model that is no whole one, or a draft that is of another kind than `draft_model_kind`."""
    for weights in artifact.weights[:1]:
        wants_eagle = kind != "draft_model"
        # The names in a pickle are not read.
        if weights.eagle == wants_eagle or (wants_eagle and weights.kind != "safetensors"):
            continue
        found, fix = "a whole model", "leave draft_model_kind out"
        if weights.eagle:
            found = "the layers of an EAGLE draft"
            fix = "name them in speculative_draft_model, with draft_model_kind=eagle or eagle3"
        problems.add("error", f"{artifact.path} has {found}; {fix}", ("draft_model_kind",))


def judge_graphs(
    artifact: Artifact, case: Case, origins: Mapping[str, str], situation: Situation
) -> tuple[Weights | None, bool]:
    """Choose the weights, and compare what the folder was compiled for with the settings.

    Returns the weights, None if no model runs, and True if the folder's graphs can be used.
    """
    weights, fits = None, False
    if case.options.simulated:
        return weights, fits
    if artifact.unused and not case.on_cpu:
        situation.problems.add("warning", artifact.unused)
    with situation.problems.catch():
        flags = {}
        if not case.on_cpu:
            flags = flag_facts(situation.environ) | code_facts(case.code) | case.draft_facts
        others: set[str] = set()
        refused = False
        if artifact.backend == case.backend and not case.on_cpu:
            mismatch = find_mismatch(artifact, case, {**_surroundings(case, situation), **flags})
            fits = mismatch is None
            if mismatch is not None:
                others = mismatch.differences.keys() - {FLAGS}
                # Flags are the machine's, not the folder's: a draft model is compiled again for them.
                own_flags = case.is_draft and not others
                refused = case.options.on_mismatch == "error" and not own_flags
                _report_mismatch(mismatch, origins, situation, refused=refused)
        # A dry run does without the weights of a model elsewhere, and not without those of a compiled folder.
        known = artifact.weights or artifact.weights_source or not situation.is_dry
        if known and not (refused and others):
            kinds = WHOLE | case.weights
            # Weights that are cut were cut for the graphs beside them; NxD Inference's lie in their folder.
            cut_fit = fits if "ranks" in kinds else not others
            weights = artifact.weights_for(case.backend, kinds if cut_fit else kinds - CUT)
            _check_beside(artifact, weights)
    return weights, fits


def _report_mismatch(
    mismatch: ArtifactMismatchError,
    origins: Mapping[str, str],
    situation: Situation,
    *,
    refused: bool,
) -> None:
    names = tuple(sorted(mismatch.differences))
    if refused:
        error = ArtifactMismatchError(mismatch.differences, mismatch.where, origins)
        situation.problems.add_error(error, names)
    else:
        message = (
            f"what is compiled in {mismatch.where} is not used: it differs in {', '.join(names)}, so that the "
            "model is compiled again"
        )
        situation.problems.add("warning", message, names)


def _surroundings(case: Case, situation: Situation) -> dict[str, object]:
    """Facts that graphs depend on beside options, as far as they are known of the machine that will serve."""
    known: dict[str, object] = {}
    if not situation.is_dry or situation.machine.has_neuron:
        known["target"] = graph_target(case.machine, case.backend)
    if not situation.is_here:
        return known
    if situation.is_dry:
        if (version := libraries()["neuronx-cc"].version) is not None:
            known["compiler_version"] = version
    else:
        known["library_version"] = None
        if (compiler := backends.compiler(case.backend)) is not None:
            known["compiler_version"] = compiler.compiler_version()
    return known | library_facts(case.backend)


def _check_beside(artifact: Artifact, weights: Weights) -> None:
    """Refuse weights in a separate folder without a configuration beside them, which those of NxD need not have."""
    apart = weights.folder != artifact.path and weights.kind != "ranks"
    if apart and not (weights.folder / fetch.CONFIG).is_file():
        msg = (
            f"the weights of {artifact.path} lie in {weights.folder}, without the {fetch.CONFIG} that the libraries "
            "look for beside them. Copy or compile the model again"
        )
        raise ArtifactNotFoundError(msg)
