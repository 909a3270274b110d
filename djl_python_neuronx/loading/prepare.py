"""Preparation of a model: find it, choose the backend, fill in the options, plan, and judge all of it.

A start, `compile` and DJL's partition script call `prepare_or_raise`, `check` a `Preparation` of its own. Nothing is
loaded onto a device.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from djl_python_neuronx import backends
from djl_python_neuronx.artifacts import fetch, formats
from djl_python_neuronx.artifacts.artifact import CUT, WHOLE, Artifact
from djl_python_neuronx.artifacts.cache import Progress
from djl_python_neuronx.artifacts.compiled_formats import graphs_in, saved_by_nxdi, with_graphs
from djl_python_neuronx.artifacts.folder import read_json
from djl_python_neuronx.artifacts.manifest import Role
from djl_python_neuronx.artifacts.tokenizer import has_vocabulary, load_tokenizer, no_tokenizer
from djl_python_neuronx.artifacts.weights import Weights
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.config import sources, trust
from djl_python_neuronx.config.findings import Finding, Level, Problem, Problems
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.resolve import Resolved
from djl_python_neuronx.config.sources import try_path
from djl_python_neuronx.config.values import as_property, make_buckets
from djl_python_neuronx.errors import (
    ArtifactError,
    ArtifactMismatchError,
    ArtifactNotFoundError,
    BackendError,
    BackendUnavailableError,
    ConfigError,
    ServingError,
    UnknownFormatError,
)
from djl_python_neuronx.loading.compile_process import CompileProgress
from djl_python_neuronx.loading.mismatch import (
    FLAGS,
    fill_recorded,
    find_mismatch,
    graph_target,
    has_own_graphs,
)
from djl_python_neuronx.loading.tokenizer_process import LOAD_S, TokenizerProcess
from djl_python_neuronx.planning import machines, memory
from djl_python_neuronx.planning.arguments import LibraryArguments
from djl_python_neuronx.planning.backend_choice import choose_backend, libraries
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.cores import Need
from djl_python_neuronx.planning.defaults import DRAFT_ORIGIN, as_draft_model, draft_settings
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.machines import DeviceInfo
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.plan import (
    ServingPlan,
    assess,
    examine,
    flag_facts,
    library_facts,
    make_plan,
    stored_findings,
)
from djl_python_neuronx.planning.rules import OPEN, library_conflicts
from djl_python_neuronx.types import Tokenizer

logger = logging.getLogger(__name__)

ASSUMED_INSTANCES = ("inf2.48xlarge", "trn1.32xlarge", "trn2.48xlarge")
"""Machines that a dry run plans for without a Neuron device: the first one whose runtime takes the degrees."""
_DRAFT = "speculative_draft_model"
DRAFT_PREFIX = "the draft model: "


@dataclass(frozen=True)
class LoadProgress:
    """Progress callbacks for downloads and compilation. Without a callback, progress is logged periodically."""

    transfer: Progress | None = None
    """Downloads and uploads."""
    compile: Callable[[CompileProgress], None] | None = None
    stage: Callable[[str], None] = logger.debug
    """The stage of a load, in words."""

    def in_words(self, stage: Callable[[str], None]) -> LoadProgress:
        """Return callbacks that also describe the stages of a load and each progress of a compile to `stage`."""

        def compiled(progress: CompileProgress) -> None:
            stage(f"compiling, {progress}")
            if self.compile is not None:
                self.compile(progress)

        return replace(self, compile=compiled, stage=stage)


SILENT = LoadProgress()


@dataclass(frozen=True)
class Prepared:
    """A model with the settings, the machine and the plan to serve it with."""

    resolved: Resolved
    """The settings, filled in."""
    name: str
    """The model, as the settings name it, or its folder."""
    source: str
    """The place of its configuration, for people."""
    artifact: Artifact
    """Without weights where a dry run found config.json only."""
    case: Case
    planned: ServingPlan
    weights: Weights | None
    """The weights to load; None: they are absent or unusable, which only a dry run accepts."""
    fits: bool
    """True if the folder holds graphs that were compiled for exactly these settings, versions and flags."""
    environ: Mapping[str, str] = field(repr=False)
    """Variables of the process that will serve."""
    progress: LoadProgress
    draft: Prepared | None = None
    """The draft model, for the same slots and lengths."""
    role: Role = "model"
    """Role in the compile store."""
    process_cores: int = 0
    """NeuronCores that the model and its draft model share; 0 without a draft model."""
    ahead: bool = False
    """See `Preparation`."""

    @property
    def options(self) -> ServingOptions:
        """The options, filled in."""
        return self.resolved.options

    @property
    def backend(self) -> str:
        """The backend that serves the model."""
        return self.case.backend

    @property
    def machine(self) -> DeviceInfo:
        """The machine, with the cores that this process may use."""
        return self.case.machine

    @property
    def need(self) -> Need:
        """The cores of each copy, those of a draft model included."""
        options, cores = self.options, 0
        if not self.case.on_cpu:
            groups = options.pipeline_parallel_degree * options.ep_degree
            cores = max(self.case.degree * groups, self.process_cores)
        return Need(self.name, cores, options.replicas)

    @property
    def host_bytes(self) -> int | None:
        """Host memory that the load of a copy takes at its peak, see `memory.host_bytes`; None if unknown."""
        sizes = [
            memory.host_bytes(one.case, one.artifact.kind, one.artifact.dtype) or 0
            for one in (self, self.draft)
            if one is not None
        ]
        return sum(sizes) if all(sizes) else None

    def load_tokenizer(self, *, needs_torch: bool = True) -> Tokenizer:
        """Load the tokenizer beside the model. `needs_torch`: false in a process that loads no model.

        Raises:
            ArtifactError: it is missing or damaged.
        """
        return load_tokenizer(
            self.artifact.path, **{**self._tokenizer_how, "needs_torch": needs_torch}
        )

    def start_tokenizer(self, load_s: float = LOAD_S, **limits: Any) -> TokenizerProcess:  # noqa: ANN401
        """Load the tokenizer beside the model, to serve it: in separate processes, within `load_s`.

        `limits`: `timeout_s` and `limit` of `TokenizerProcess`; by default `option.text_timeout`.

        Raises:
            ArtifactError: it is missing or damaged, or takes too much time or memory.
        """
        limits = {"timeout_s": self.options.text_timeout, **limits}
        return TokenizerProcess(self.artifact.path, load_s=load_s, **limits, **self._tokenizer_how)

    @property
    def _tokenizer_how(self) -> dict[str, Any]:
        return {
            "trust_remote_code": self.options.trust_remote_code,
            "revision": self.options.revision,
            "chat_template": self.options.chat_template,
            "needs_torch": not self.options.engine_process,
        }


def prepare_or_raise(
    properties: Mapping[str, Any] | None,
    model_dir: Path | None,
    *,
    environ: Mapping[str, str],
    overrides: Mapping[str, str] = MappingProxyType({}),
    machine: DeviceInfo | None = None,
    ahead: bool = False,
    among_others: bool = False,
    progress: LoadProgress = SILENT,
) -> Prepared:
    """Read the settings, download the model and prepare it; log settings, problems and plan. Takes minutes.

    `machine`: the one that will serve, if it is not this one. `ahead`, `among_others`: see `Preparation`.

    Raises:
        ServingError: the only error, or a `ConfigError` that lists all errors of settings, model and machine.
    """
    problems = Problems()
    settings = examine(properties, model_dir, environ, problems, overrides)
    _log_settings(settings)
    preparation = Preparation.of(
        settings,
        environ,
        problems,
        machine,
        inherited=properties is not None,
        ahead=ahead,
        among_others=among_others,
        progress=progress,
    )
    logged = _log_problems(problems)
    prepared = preparation.prepare(settings)
    if prepared is not None:
        _log_settings(prepared.resolved, logged=settings)
    _log_problems(problems, logged)
    problems.raise_errors()
    if prepared is None:
        msg = "option.model_id is not set; expected a Hugging Face id, a folder or a URI"
        raise ConfigError(msg)
    _log_plan(prepared)
    return prepared


@dataclass(frozen=True)
class _Model:
    """A model that was found; see `Prepared`."""

    name: str
    source: str
    artifact: Artifact
    whole: bool = True
    """False: config.json only."""

    @cached_property
    def facts(self) -> ModelFacts:
        return ModelFacts.from_config(self.artifact.config, self.artifact.dtype)


@dataclass(frozen=True)
class Preparation:
    """State shared by the preparation of a model and of its draft model."""

    machine: DeviceInfo
    """The machine that will serve."""
    environ: Mapping[str, str] = field(repr=False)
    """Variables of the process that will serve."""
    problems: Problems
    """The collection for every error, warning and note."""
    fetch_weights: bool = True
    """False for a dry run. It downloads no more than config.json, accepts absent weights, plans for a Neuron machine
    where there is none, and imports no library."""
    named: bool = False
    """`machine` is not this one, so that the libraries that are installed there are unknown."""
    ahead: bool = False
    """The model is compiled for a later start, perhaps elsewhere: there may be no Neuron device here."""
    among_others: bool = False
    """The machine serves other models too, so that the default degree leaves cores for them."""
    progress: LoadProgress = SILENT

    @classmethod
    def of(
        cls,
        settings: Resolved,
        environ: Mapping[str, str],
        problems: Problems,
        machine: DeviceInfo | None,
        *,
        inherited: bool = False,
        **how: Any,  # noqa: ANN401  (further fields)
    ) -> Preparation:
        """Return one for this machine, or the named `machine`, with the variables of `option.env` added.

        `inherited`: `environ` has them already.
        """
        environ = trust.serving_environ(
            environ,
            settings.worker_variables,
            problems,
            inherited=inherited,
        )
        here = machine or machines.detect(environ=environ)
        return cls(here, environ, problems, named=machine is not None, **how)

    def prepare(self, settings: Resolved) -> Prepared | None:
        """Find the model, choose the backend, fill in the options, plan graphs and memory, and judge all of it.

        `settings`: from `examine`, with the options that are set. Returns None if the model's configuration cannot be
        read or nothing can serve it.
        """
        options = settings.options
        try:
            model = self._find(options.model_id, options.model_dir, "model_id", settings)
            if model is not None:
                model = self._with_named_graphs(model, settings)
                choice = choose_backend(
                    options,
                    self.machine,
                    model.facts.model_type,
                    installed=libraries() if self.fetch_weights or self._here else None,
                    artifact_backend=model.artifact.backend,
                    dry_run=not self.fetch_weights,
                )
                backend = choice.backend
                if choice.reason:
                    level: Level = "warning" if self.fetch_weights and backend == "cpu" else "note"
                    self.problems.add(level, choice.reason, ("model_loader",))
                self._check_support(backend, model.artifact)
        except ServingError as error:
            self.problems.add_error(error)
            model = None
        if model is None:
            # The library that the user named limits the options whatever the model is.
            settings.report(library_conflicts(options, options.model_loader), self.problems)
            return None
        self._check_vocabulary(model, options)
        # A draft model that an artifact records is relative to the artifact.
        base = options.model_dir if _DRAFT in settings.origins else model.artifact.path
        with self.problems.catch():
            settings = fill_recorded(settings, model.artifact, backend)
        own, draft = replace(self, problems=Problems()), None
        if (name := settings.options.speculative_draft_model) is not None:
            with own.problems.catch():
                draft = own._find(name, base, _DRAFT, settings, weights_needed=model.whole)
        self.problems.include(own.problems, DRAFT_PREFIX, (_DRAFT,))
        machine = self._choose_machine(settings, backend)
        draft_facts = None if draft is None else draft.facts
        found = model.artifact.backend == backend and bool(model.artifact.neuron_config)
        case = Case(
            settings.options,
            model.facts,
            machine,
            NEURON_BACKENDS.get(backend),
            draft_facts,
            foreign_graphs=found,
            among_others=self.among_others,
        )
        prepared = self._plan(settings, model, case)
        if draft is not None and prepared.options.drafting and not self.problems.errors:
            prepared = own._prepare_draft(prepared, draft)
            self.problems.include(own.problems, DRAFT_PREFIX, (_DRAFT,))
        return prepared

    @property
    def _here(self) -> bool:
        """True if this is the Neuron machine that will serve."""
        return self.machine.has_neuron and not self.named

    def _find(
        self,
        model_id: str | None,
        base: Path | None,
        option: str,
        settings: Resolved,
        *,
        weights_needed: bool = False,
    ) -> _Model | None:
        """Find the model that an option names, relative to `base`. Returns None if nothing names one.

        Raises:
            ServingError: it cannot be read; in a dry run only without config.json, or if `weights_needed`.
        """
        origin = f"option.{option}, {settings.origins.get(option, 'default')}"
        revision = settings.options.revision if option == "model_id" else None
        folder = fetch.local_folder(model_id, base)
        if model_id is None:
            if folder is None or option in settings.refused:
                return None
            try:
                return self._detect(
                    folder, str(folder), "the model argument", weights_needed=weights_needed
                )
            except UnknownFormatError as error:
                msg = (
                    f"no model: set option.model_id to a Hugging Face id, a folder or s3://bucket/key, or give the "
                    f"folder of a model. Without it, {error}"
                )
                raise UnknownFormatError(msg) from error
        if self.fetch_weights:
            folder = fetch.fetch(
                model_id,
                environ=self.environ,
                root=fetch.download_root(self.environ),
                model_dir=base,
                revision=revision,
                progress=self.progress.transfer,
                origin=origin,
            )
        if folder is not None:
            return self._detect(folder, model_id, origin, weights_needed=weights_needed)
        config = fetch.fetch_config(model_id, revision, self.environ, origin=origin)
        if not isinstance(config.get("model_type"), str):
            msg = f"{fetch.CONFIG} of {model_id!r} has no model_type; expected one such as 'llama'"
            raise ArtifactError(msg)
        source = f"{fetch.CONFIG} from {fetch.uri_scheme(model_id) or 'the hub'}"
        return _without_weights(Path(model_id), model_id, source, config)

    def _detect(self, folder: Path, name: str, origin: str, *, weights_needed: bool) -> _Model:
        try:
            return _Model(name, str(folder), formats.detect(folder, origin=origin))
        except ArtifactNotFoundError as error:
            if self.fetch_weights or not formats.is_configuration(folder):
                raise
            if weights_needed:
                self.problems.add_error(error)
            else:
                self.problems.add("warning", f"{error} Only the plan is checked.")
            path = folder / fetch.CONFIG
            return _without_weights(folder, name, str(path), read_json(path))

    def _with_named_graphs(self, model: _Model, settings: Resolved) -> _Model:
        """Return the model, with the graphs that NxD Inference has saved in `compiled_graph_path`, if it has.

        Those that this package has stored there have a manifest, which `loading.compiled` reads.

        Raises:
            ArtifactError: they cannot be fetched or read, or are of another model.
        """
        place = settings.options.place("compiled_graph_path")
        if place is None or settings.options.model_loader not in {*OPEN, "nxdi"}:
            return model
        folder = Path(place)
        if fetch.uri_scheme(place):
            origin = f"option.compiled_graph_path, {settings.origins.get('compiled_graph_path')}"
            if not self.fetch_weights or not saved_by_nxdi(
                fetch.list_names(place, self.environ, origin=origin)
            ):
                return model
            folder = fetch.fetch(
                place,
                environ=self.environ,
                root=fetch.download_root(self.environ),
                everything=True,
                progress=self.progress.transfer,
                origin=origin,
            )
        is_foreign = try_path(folder.is_dir, failed=False) and not has_own_graphs(folder)
        if not is_foreign or graphs_in(folder) != "nxdi":
            return model
        return replace(model, artifact=with_graphs(model.artifact, folder))

    def _check_support(self, backend: str, artifact: Artifact) -> None:
        """Refuse a model that the backend's own code rules out. A dry run skips it: it imports the library."""
        if self.fetch_weights and (obstacle := backends.get(backend).supports(artifact.config)):
            msg = f"the {backend} backend cannot serve the model in {artifact.path}: {obstacle}"
            raise BackendError(msg)

    def _check_vocabulary(self, model: _Model, options: ServingOptions) -> None:
        """Report a missing tokenizer in a dry run; a start loads it."""
        if self.fetch_weights or options.trust_remote_code or not model.whole:
            return
        folder = model.artifact.path
        if not has_vocabulary(entry.name for entry in folder.iterdir()):
            self.problems.add("error", no_tokenizer(folder))

    def _choose_machine(self, settings: Resolved, backend: str) -> DeviceInfo:
        """Return the machine with the cores that the environment leaves to this process, or an assumed machine."""
        if backend == "cpu":
            return machines.for_process(self.machine, self.environ)
        machine = self.machine
        if machine.assumed:
            self.problems.add("warning" if self.fetch_weights else "note", machine.assumed)
        if not machine.has_neuron:
            if self.fetch_weights:
                self._report_no_device(backend)
            else:
                machine = self._assume_machine(settings.options)
        machine = machines.on_single_cores(machine, settings.options.logical_nc_config)
        machine = machines.for_process(machine, self.environ)
        self._check_core_limit(machine, settings)
        return machine

    def _report_no_device(self, backend: str) -> None:
        problem = f"no Neuron device is visible here ({self.machine.seen})"
        if self.ahead:
            fix = (
                "cores and memory are not checked. Name the machine that will serve with --instance"
            )
            self.problems.add("warning", f"{problem}: {fix}")
        else:
            fix = "Give the devices /dev/neuron* to this process or container, or set option.model_loader=cpu"
            error = BackendUnavailableError(
                f"{problem}, and the {backend} backend needs one. {fix}"
            )
            self.problems.add_error(error)

    def _assume_machine(self, options: ServingOptions) -> DeviceInfo:
        candidates = [
            machines.for_process(machines.named(name), self.environ) for name in ASSUMED_INSTANCES
        ]
        chosen = next((one for one in candidates if _takes_degrees(one, options)), candidates[0])
        self.problems.add(
            "note",
            f"no Neuron device here: planned for {chosen.instance_type}, name another with --instance",
        )
        return chosen

    def _check_core_limit(self, machine: DeviceInfo, settings: Resolved) -> None:
        limit = machines.core_limit(self.environ)
        if limit is None:
            return
        setting = settings.worker_variables.get(limit.name)
        where = "environment" if setting is None else f"option.env, {setting.origin}"
        if limit.problem is not None:
            self.problems.add("warning", f"{limit.problem} ({where})")
        elif beyond := limit.beyond(machine):
            # The runtime of this machine is the judge of its own numbers: a container may count from 0.
            lenient = self._here or self.fetch_weights
            self.problems.add("warning" if lenient else "error", f"{beyond} ({where})")
        elif machine.limited_by is not None:
            whole = f" of the {machine.neuron_cores}" if machine.neuron_cores else ""
            self.problems.add(
                "note",
                f"{limit} ({where}) leaves {machine.visible_cores}{whole} NeuronCores: the plan counts these alone",
            )

    def _plan(self, settings: Resolved, model: _Model, case: Case) -> Prepared:
        """Fill in the options, judge them and what the folder holds, and plan.

        `case`: with the options of `settings`.
        """
        resolved, case = assess(settings, case, self.problems)
        self._judge_places(resolved, case)
        weights, fits = self._judge_graphs(model.artifact, case, resolved.origins)
        compiled = model.artifact.compiled if fits else None
        case = replace(
            case,
            presharded=weights is not None and weights.kind in CUT,
            foreign_graphs=compiled is not None and not has_own_graphs(compiled),
        )
        resolved.report(stored_findings(case), self.problems)
        return Prepared(
            resolved=resolved,
            name=model.name,
            source=model.source,
            artifact=model.artifact,
            case=case,
            planned=make_plan(case, artifact_format=model.artifact.format),
            weights=weights,
            fits=fits,
            environ=self.environ,
            progress=self.progress,
            role="draft" if case.is_draft else "model",
            ahead=self.ahead,
        )

    def _judge_places(self, resolved: Resolved, case: Case) -> None:
        """Report folders of compiled graphs that do not exist or are damaged; a draft model's with its target's."""
        if case.on_cpu or case.is_draft:
            return
        level: Level = "error" if self.fetch_weights or self._here else "warning"
        names = ("compiled_graph_path", "draft_model_compiled_path")
        for name in names[: 1 + case.options.drafting]:
            place = case.options.place(name)
            if place is None or fetch.uri_scheme(place):
                continue
            if not try_path(Path(place).is_dir, failed=False):
                problem = f"there is no folder {place}; correct it, or create it with `mkdir -p`"
                resolved.report([Finding((name,), problem, level)], self.problems)
                continue
            with self.problems.catch():
                held = graphs_in(Path(place))
                if held not in {None, case.backend}:
                    problem = f"it holds graphs of the backend {held}; name another folder, or set model_loader={held}"
                    resolved.report([Finding((name,), problem, level)], self.problems)

    def _judge_graphs(
        self, artifact: Artifact, case: Case, origins: Mapping[str, str]
    ) -> tuple[Weights | None, bool]:
        """Choose the weights, and compare what the folder was compiled for with the settings.

        Returns the weights, and whether the folder's graphs can be used.
        """
        weights, fits = None, False
        if artifact.unused and not case.on_cpu:
            self.problems.add("warning", artifact.unused)
        with self.problems.catch():
            flags = {} if case.on_cpu else flag_facts(self.environ)
            others: set[str] = set()
            refused = False
            if artifact.backend == case.backend and not case.on_cpu:
                mismatch = find_mismatch(artifact, case, {**self._surroundings(case), **flags})
                fits = mismatch is None
                if mismatch is not None:
                    others = mismatch.differences.keys() - {FLAGS}
                    # Flags are the machine's, not the folder's: a draft model is compiled again for them.
                    own_flags = case.is_draft and not others
                    refused = case.options.on_mismatch == "error" and not own_flags
                    self._report_mismatch(mismatch, origins, refused=refused)
            if not (refused and others) and (artifact.weights or self.fetch_weights):
                kinds = WHOLE | case.weights
                # Weights that are cut were cut for the graphs beside them; NxD Inference's lie in their folder.
                cut_fit = fits if "ranks" in kinds else not others
                weights = artifact.weights_for(case.backend, kinds if cut_fit else kinds - CUT)
                _check_beside(artifact, weights)
        return weights, fits

    def _report_mismatch(
        self, mismatch: ArtifactMismatchError, origins: Mapping[str, str], *, refused: bool
    ) -> None:
        names = tuple(sorted(mismatch.differences))
        if refused:
            error = ArtifactMismatchError(mismatch.differences, mismatch.where, origins)
            self.problems.add_error(error, names)
        else:
            message = (
                f"what is compiled in {mismatch.where} is not used: it differs in {', '.join(names)}, so that the "
                "model is compiled again"
            )
            self.problems.add("warning", message, names)

    def _surroundings(self, case: Case) -> dict[str, object]:
        """Facts that graphs depend on beside options, as far as they are known of the machine that will serve."""
        known: dict[str, object] = {}
        if self.fetch_weights or self.machine.has_neuron:
            known["target"] = graph_target(case.machine, case.backend)
        if self.fetch_weights:
            known["library_version"] = None
            if (compiler := backends.compiler(case.backend)) is not None:
                known["compiler_version"] = compiler.compiler_version()
        elif self._here and (version := libraries()["neuronx-cc"].version) is not None:
            known["compiler_version"] = version
        return known | library_facts(case.backend) if self.fetch_weights or self._here else known

    def _prepare_draft(self, prepared: Prepared, draft: _Model) -> Prepared:
        """Prepare the draft model as every model; its folder's `serving.properties` is for serving it and unread."""
        backend = prepared.backend
        settings = examine(
            None,
            None,
            sources.without_options(self.environ),
            self.problems,
            draft_settings(prepared.options, backend, draft.name),
            overrides_from=DRAFT_ORIGIN,
        )
        with self.problems.catch():
            self._check_support(backend, draft.artifact)
        with self.problems.catch():
            settings = fill_recorded(settings, draft.artifact, backend)
        settings = replace(settings, options=as_draft_model(settings.options))
        neuron = prepared.case.neuron
        case = Case(settings.options, draft.facts, prepared.machine, neuron, is_draft=True)
        other = self._plan(settings, draft, case)
        if self.problems.errors:
            return prepared
        cores = max(prepared.case.degree, other.case.degree)
        other = replace(other, process_cores=cores)
        return replace(prepared, draft=other, process_cores=cores)


def load_plan(prepared: Prepared, tokenizer: Callable[[], Tokenizer]) -> LoadPlan:
    """Write the backend's plan for a prepared model.

    Raises:
        ConfigError: options are not filled in.
        ArtifactNotFoundError: the weights are absent.
        IncompatibleOptionsError: the shapes contradict each other.
    """
    artifact, options = prepared.artifact, prepared.options
    max_model_len, num_slots = options.max_model_len, options.max_rolling_batch_size
    if max_model_len is None or num_slots is None or options.dtype == "auto":
        msg = "n_positions, max_rolling_batch_size and dtype must be filled in first"
        raise ConfigError(msg)
    weights = prepared.weights
    if weights is None:
        msg = f"the weights of {artifact.path} are not here; prepare the model with fetch_weights"
        raise ArtifactNotFoundError(msg)
    return LoadPlan(
        # The weights of the ranks lie beside the graphs: the folder is that of the configuration.
        model_dir=artifact.path if weights.kind == "ranks" else weights.folder,
        kind=weights.kind,
        num_slots=num_slots,
        max_model_len=max_model_len,
        # None where the library has no prompt lengths to choose from: gpt_neox, gptj.
        prefill_buckets=options.context_length_estimate or (max_model_len,),
        token_buckets=options.token_buckets or make_buckets(max_model_len),
        dtype=options.dtype,
        tensor_parallel_degree=prepared.case.degree,
        process_cores=prepared.process_cores,
        trust_remote_code=options.trust_remote_code,
        revision=options.revision,
        num_threads=options.cpu_threads,
        eos_ids=_eos_ids(artifact, tokenizer),
        num_speculative_tokens=options.speculative_length if options.speculating else 0,
        mixed_steps=bool(options.enable_chunked_prefill),
        default_top_k=options.on_device_default_top_k,
        arguments=prepared.planned.arguments or LibraryArguments(),
    )


def _without_weights(path: Path, name: str, source: str, config: Mapping[str, Any]) -> _Model:
    artifact = Artifact(path, "huggingface", None, config, ())
    return _Model(name, source, artifact, whole=False)


def _takes_degrees(machine: DeviceInfo, options: ServingOptions) -> bool:
    """Return True if the machine's runtime takes the degrees that are set. Limits of the process are left aside."""
    of_draft = options.draft_model_tp_size if options.drafting else None
    legal = machines.legal_degrees(machine.family, machine.neuron_cores)
    degrees = (options.tensor_parallel_degree, of_draft)
    numbers = [degree for degree in degrees if isinstance(degree, int)]
    return bool(numbers) and all(degree // machine.machines(degree) in legal for degree in numbers)


def _log_settings(resolved: Resolved, logged: Resolved | None = None) -> None:
    """Log the options and where they come from, except those already `logged`.

    In two steps, so that the log of a start that fails in between has the origins of its settings.
    """
    before = set() if logged is None else {(name, where) for name, _, where in logged.explain()}
    for option, value, origin in resolved.explain():
        if (option, origin) not in before:
            level = logging.DEBUG if origin == "default" else logging.INFO
            logger.log(
                level, "option name=%s value=%s origin=%r", option, as_property(value), origin
            )
    for option, reason in resolved.ignored.items() if logged is None else ():
        logger.info("option_ignored name=%s reason=%r", option, reason)


def _log_problems(problems: Problems, logged: Collection[Problem] = ()) -> tuple[Problem, ...]:
    """Log warnings and notes, except those already `logged`; return all."""
    for problem in problems:
        if problem.level != "error" and problem not in logged:
            level = logging.WARNING if problem.level == "warning" else logging.INFO
            logger.log(level, "option_finding level=%s %s", problem.level, problem.message)
    return tuple(problems)


def _log_plan(prepared: Prepared) -> None:
    """Log what will be compiled and loaded, so that the log of a start that is killed later has the reason."""
    planned = prepared.planned
    logger.info(
        "planned backend=%s format=%s parameters=%s graphs=%d estimated_compile_s=%.0f needed_gib_per_core=%s",
        planned.backend,
        planned.format,
        prepared.case.model.num_parameters,
        len(planned.graphs),
        planned.estimated_compile_s,
        f"{planned.memory.needed / 2**30:.2f}" if planned.memory else "unknown",
    )


def _check_beside(artifact: Artifact, weights: Weights) -> None:
    """Refuse weights in a separate folder without a configuration beside them, which those of NxD need not have."""
    apart = weights.folder != artifact.path and weights.kind != "ranks"
    if apart and not (weights.folder / fetch.CONFIG).is_file():
        msg = (
            f"the weights of {artifact.path} lie in {weights.folder}, without the {fetch.CONFIG} that the libraries "
            "look for beside them. Copy or compile the model again"
        )
        raise ArtifactNotFoundError(msg)


def _eos_ids(artifact: Artifact, tokenizer: Callable[[], Tokenizer]) -> frozenset[int]:
    """Return the model's ids, else the tokenizer's. Without any, only lengths and stop strings end a text."""
    if artifact.eos_ids:
        return artifact.eos_ids
    vocab_size = artifact.config.get("vocab_size") or sys.maxsize
    eos_id = tokenizer().eos_id
    if eos_id is not None and eos_id < vocab_size:
        return frozenset({eos_id})
    reason = "no id of the vocabulary in configuration or tokenizer"
    logger.warning("no_eos path=%s reason=%r", artifact.path, reason)
    return frozenset()
