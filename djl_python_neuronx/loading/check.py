"""Dry run of a start: resolve the settings, plan graphs and memory, and report every problem without loading anything.

No weights are read or downloaded, and neither torch nor transformers is imported into this process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from djl_python_neuronx.artifacts import fetch
from djl_python_neuronx.artifacts.tokenizer import has_vocabulary
from djl_python_neuronx.config import djl_serving, sources, trust
from djl_python_neuronx.config.findings import Finding, Problems
from djl_python_neuronx.config.resolve import Resolved
from djl_python_neuronx.config.server_options import ServerOptions
from djl_python_neuronx.config.values import as_property, join_words
from djl_python_neuronx.engine.limits import most_characters
from djl_python_neuronx.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    ConfigError,
    ServingError,
    UnsupportedParameterError,
    redacted,
)
from djl_python_neuronx.loading.compiled import foresee
from djl_python_neuronx.loading.prepare import DRAFT_PREFIX, Prepared, prepare
from djl_python_neuronx.loading.situation import Purpose, Situation
from djl_python_neuronx.planning import machines
from djl_python_neuronx.planning.backend_choice import libraries
from djl_python_neuronx.planning.cores import place
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.machines import GIB, DeviceInfo
from djl_python_neuronx.planning.plan import examine
from djl_python_neuronx.types import Rendering, Tokenizer

TRY_S = 30.0
"""Most time that `check` gives a tokenizer to load."""
TRY_TEXT_S = 5.0
"""Most time that `check` gives a text, whatever `option.text_timeout` the folder sets."""
_TRIED = ("Hello, 42 worlds! \u4f60\u597d", "a" * 200 + "!", " " * 200 + "\n")
"""Texts that a tokenizer is tried on: a pattern that backtracks does so on repetitions."""


@dataclass(frozen=True)
class Report:
    """The result of a check."""

    target: str
    findings: Problems
    """Every error, warning and note."""
    resolved: Resolved | None = None
    """The settings, filled in as far as possible; None: they could not be read."""
    prepared: Prepared | None = None
    """None: the model's configuration could not be read."""
    lacking: tuple[str, ...] = ()
    """Reasons why a valid plan could not be loaded here and now."""

    @property
    def ok(self) -> bool:
        """True if there are no errors."""
        return not self.findings.errors

    @property
    def error(self) -> ServingError | None:
        """Its errors as one."""
        try:
            self.findings.raise_errors()
        except ServingError as error:
            return error
        return None

    @property
    def loadable(self) -> bool:
        """True if this version could load the model like this, from the files that are here."""
        return self.ok and self.prepared is not None and not self.lacking


@dataclass(frozen=True)
class Placement:
    """The models of one server, and the cores of their copies."""

    reports: tuple[Report, ...]
    findings: Problems
    """The errors of all models together; of a single model its own findings."""
    placed: tuple[tuple[str, ...], ...] = ()
    """For each model the cores of each copy, see `cores.place`; empty if there is an error."""

    @property
    def ok(self) -> bool:
        """True if there are no errors."""
        return not self.findings.errors and all(report.ok for report in self.reports)

    @property
    def models(self) -> list[Prepared]:
        """The models whose configuration could be read."""
        return [report.prepared for report in self.reports if report.prepared is not None]

    @property
    def device(self) -> DeviceInfo:
        """The machine of the models, with the cores of those that are not on its CPU."""
        on_cpu = DeviceInfo(None, 0, 0, 0, 0, "only CPUs are used")
        return next((one.case.device for one in self.models if not one.case.on_cpu), on_cpu)

    def raise_errors(self) -> None:
        """Raise all errors; return if there are none.

        Raises:
            ServingError: the only error as it is, or a `ConfigError` that lists all of them.
        """
        together = Problems()
        for report in self.reports if len(self.reports) > 1 else ():
            together.include(report.findings, f"{report.target}: ", ())
        together.include(self.findings, "", ())
        together.raise_errors()

    def without_broken(self) -> tuple[tuple[str, ...] | ServingError, ...]:
        """For each model the cores of each copy, as if those with errors were not there, or its error.

        Raises:
            ServingError: the others cannot be placed together, or there are none.
        """
        sound = tuple(report for report in self.reports if report.ok)
        if not sound:
            self.raise_errors()
        together = _together(sound, several=True)
        together.raise_errors()
        cores = iter(together.placed)
        return tuple(report.error or next(cores) for report in self.reports)


def check_all(
    targets: Sequence[str | None],
    *,
    environ: Mapping[str, str],
    overrides: Mapping[str, str],
    machine: DeviceInfo | None = None,
    purpose: Purpose = Purpose.CHECK,
) -> Placement:
    """Check all models of one server, and place their copies on the machine's cores.

    `purpose`: `SERVE` to prepare each model as a start does. Others: see `check`.
    """
    several = len(targets) > 1
    checked = partial(check, environ=environ, overrides=overrides, machine=machine)
    reports = tuple(checked(one, among_others=several, purpose=purpose) for one in targets)
    return _together(reports, several=several)


def _together(reports: tuple[Report, ...], *, several: bool) -> Placement:
    """Judge models together, and place them if there is no error."""
    found = Placement(reports, Problems() if several else reports[0].findings)
    for conflict in _conflicts(reports) if several else ():
        found.findings.add("error", conflict)
    if found.ok and len(found.models) == len(reports):
        with found.findings.catch():
            return replace(found, placed=tuple(_place(found)))
    return found


def _conflicts(reports: Sequence[Report]) -> Iterator[str]:
    """Yield why models cannot be served together: equal names, options of the server itself that differ, no process."""
    read = [(report.target, report.resolved) for report in reports if report.resolved is not None]
    for target, resolved in read:
        if not resolved.options.engine_process:
            why = "each of several models needs its own process; leave it out"
            yield f"{target}: {resolved.describe(Finding(('engine_process',), why))}"
    for name in dict.fromkeys(name for _, each in read for name in each.options.model_names):
        named = [target for target, each in read if name in each.options.model_names]
        if len(named) > 1:
            fix = "set option.model_name in each folder, or option.replicas for copies of one model"
            yield f"{join_words(named)} are models named {name!r}; {fix}"
    for (one, first), (other, second) in product(read[:1], read[1:]):
        for name in ServerOptions.model_fields:
            value, another = (getattr(each.options, name) for each in (first, second))
            if value != another:
                yield (
                    f"option.{name} holds for the whole server: it is {as_property(value)} for {one} and "
                    f"{as_property(another)} for {other}; write one value, or set it with -o {name}=…"
                )


def _place(found: Placement) -> list[tuple[str, ...]]:
    """Return the cores of each copy.

    Raises:
        ConfigError: the cores do not hold all copies, or the models are not planned for the same cores.
    """
    for model in found.models:
        mine, first = model.case.device, found.device
        if not model.case.on_cpu and mine.core_numbers != first.core_numbers:
            seen = [
                f"{one.visible_cores} cores ({one.limited_by or one.instance_type})"
                for one in (mine, first)
            ]
            msg = (
                f"{model.name} is planned for {', another model for '.join(seen)}; name the machine (--instance), set "
                "NEURON_RT_VISIBLE_CORES for the server, not in option.env, and give all models the same "
                "logical_nc_config"
            )
            raise ConfigError(msg)
    return place([model.need for model in found.models], found.device)


def check(
    target: str | None,
    *,
    environ: Mapping[str, str],
    overrides: Mapping[str, str],
    machine: DeviceInfo | None = None,
    among_others: bool = False,
    purpose: Purpose = Purpose.CHECK,
) -> Report:
    """Check the model folder, `.properties` file, Hugging Face id or URI `target`.

    Never raises for problems of settings or model; the report has them.

    Args:
        target: None for SageMaker's folder or, without it, the model that variables or `overrides` name.
        environ: the environment's variables.
        overrides: options of the command line.
        machine: the machine to plan for; None for this one or, without a Neuron device, an assumed one.
        among_others: the machine serves other models too.
        purpose: see `check_all`.
    """
    problems = Problems()
    name = redacted(target or str(sources.MODEL_DIR))
    try:
        settings, in_file = _read_settings(target, environ, overrides, problems)
    except ServingError as error:
        problems = Problems()  # without settings nothing else is worth reporting
        problems.add_error(error)
        return Report(name, problems)
    variables = settings.worker_variables
    serving = trust.serving_environ(environ, variables, problems, inherited=False)
    here = machine or machines.detect(environ=serving)
    on_cpu = not here.has_neuron
    _add(problems, djl_serving.missing_arguments(in_file, environ, on_cpu=on_cpu))
    is_named = machine is not None
    situation = Situation(purpose, here, serving, problems, is_named, among_others)
    prepared = prepare(settings, situation)
    if prepared is None:
        return Report(name, problems, settings)
    if purpose is not Purpose.CHECK:
        return Report(name, problems, prepared.resolved, prepared)
    serves_here = not is_named and not on_cpu
    if obstacle := _missing_here(prepared.backend):
        problems.add("warning" if serves_here else "note", obstacle)
    if not problems.errors:
        _foresee(prepared, problems, here=serves_here and not obstacle)
        _add(problems, _small_host(prepared))
    _add(problems, (*_size(prepared), *_one_core_each(settings, prepared)))
    _add(problems, _long_answers(prepared))
    return Report(name, problems, prepared.resolved, prepared, tuple(_lacking(prepared)))


def _foresee(prepared: Prepared, problems: Problems, *, here: bool) -> None:
    """Report whether a start compiles the model and its draft model, where this is the machine that serves."""
    own = Problems()
    if here and prepared.weights is not None:
        with problems.catch():
            foresee(prepared, problems)
        with own.catch():
            if prepared.draft is not None:
                foresee(prepared.draft, own)
        problems.include(own, DRAFT_PREFIX, ("speculative_draft_model",))
    elif prepared.options.compilation == "forbid" and not prepared.case.on_cpu:
        unseen = "compilation=forbid: only the machine that serves shows, with the weights, whether it has the graphs"
        problems.add("note", unseen, ("compilation",))


def _read_settings(
    target: str | None,
    environ: Mapping[str, str],
    overrides: Mapping[str, str],
    problems: Problems,
) -> tuple[Resolved, Sequence[sources.Setting]]:
    """Read the options of a folder, of a file as if it lay beside the model, or of a model that only has a name.

    Also returns the settings of the file alone.
    """
    # Not pathlib, which raises for the home of an unknown user, for a NUL and for a name that is too long.
    name = os.path.expanduser(str(sources.MODEL_DIR) if target is None else target)  # noqa: PTH111
    path = Path(name)
    file = path if os.path.isfile(name) else None  # noqa: PTH113
    if file and file.suffix != ".properties":
        msg = f"{name!r} is not a .properties file; expected one, or a model folder"
        raise ArtifactError(msg)
    folder = path.parent if file else path if os.path.isdir(name) else None  # noqa: PTH112
    if folder is None and target is not None:
        is_hub_model = fetch.is_hub_id(target) and not target.endswith(".properties")
        if not is_hub_model and not fetch.uri_scheme(target):
            msg = (
                f"there is no {target!r}; expected a model folder, a .properties file, a Hugging Face id "
                "('owner/name') or s3://bucket/folder"
            )
            raise ArtifactNotFoundError(msg)
        overrides = {"model_id": target, **overrides}
    settings = examine(None, folder, environ, problems, overrides, file=file)
    in_file: Sequence[sources.Setting] = ()
    with problems.catch():
        in_file = sources.from_properties(file) if file else sources.from_file(folder or path)
    if folder is None and settings.options.model_id is None:
        msg = (
            f"there is no {str(path)!r}, and neither variables nor command line name a model; expected a target, or "
            "HF_MODEL_ID, or OPTION_MODEL_ID"
        )
        raise ArtifactNotFoundError(msg)
    return settings, in_file


def _add(problems: Problems, findings: Iterable[Finding]) -> None:
    for finding in findings:
        problems.add(finding.level, finding.problem, finding.names)


def _missing_here(backend: str) -> str:
    """Return what this installation lacks to load with a backend; empty if nothing."""
    facts = NEURON_BACKENDS.get(backend)
    if facts is not None and (state := libraries()[facts.package].state) != "installed":
        what = "not installed" if state == "missing" else "PyPI's placeholder, not the library,"
        return f"{facts.package} is {what} here; the machine that serves needs it"
    return ""


def _size(prepared: Prepared) -> Iterator[Finding]:
    """Warn of a model of unknown size."""
    unknown = prepared.case.on_cpu and prepared.case.model.num_parameters is None
    if unknown and not prepared.options.simulated:
        kind = prepared.case.model.model_type or "(config.json names none)"
        doubt = "only a load shows whether transformers supports it and what it needs"
        problem = f"the size of this model, of model_type {kind}, is not known here: {doubt}"
        yield Finding((), problem, "warning")


def _one_core_each(settings: Resolved, prepared: Prepared) -> Iterator[Finding]:
    """Warn that DJL Serving would start other processes than this plan's, because it reads no degree.

    Source: djl-serving d21927c, ModelInfo.java getLoadOnDevices, Connection.java.
    """
    degree = prepared.case.degree
    unset = settings.written_for_djl and settings.options.tensor_parallel_degree is None
    unset = unset and "tensor_parallel_degree" not in settings.refused
    if unset and not prepared.case.on_cpu and degree > 1:
        problem = (
            "option.tensor_parallel_degree is not set: DJL Serving would start a process for each NeuronCore, with "
            f"that core alone, instead of one with {degree}; write option.tensor_parallel_degree={degree}"
        )
        yield Finding(("tensor_parallel_degree",), problem, "warning")


def _small_host(prepared: Prepared) -> Iterator[Finding]:
    """Warn that a load takes more host memory at its peak than the instance type has."""
    instance, taken = machines.known(prepared.machine.instance_type), prepared.host_bytes or 0
    if instance is not None and taken > instance.host_memory_gib * GIB:
        problem = (
            f"a load takes up to {taken / GIB:.1f} GiB of the host's memory, and {instance.name} has "
            f"{instance.host_memory_gib} GiB: the kernel may end it; add swap space, use a larger machine, or with "
            "NxD Inference serve what `djl-neuronx compile --weights presharded` has written on one"
        )
        yield Finding((), problem, "warning")


def _long_answers(prepared: Prepared) -> Iterator[Finding]:
    """Note that DJL Serving would wait too long for the longest answer, at the least time that a token takes.

    That is the time to read the weights once. Nothing where that is not known, or for settings that are not DJL
    Serving's. Llama-2-70b on inf2.48xlarge: 14 ms, 33 ms measured by AWS with SDK 2.18.
    """
    options, memory, speed = (
        prepared.options,
        prepared.planned.memory,
        prepared.machine.core_bytes_per_s,
    )
    together = options.async_mode or options.rolling_batch in {"tnx", "vllm"}
    if not together or prepared.case.on_cpu or not speed or memory is None:
        return
    if prepared.case.model.num_experts > 1 or options.speculating or options.max_model_len is None:
        return  # a token reads a part of the weights, or a step gives several
    answer_s = options.max_model_len * memory.weights / speed
    timeout_s = djl_serving.chunked_read_timeout_s(prepared.environ)
    if answer_s > timeout_s:
        problem = (
            f"n_positions={options.max_model_len}: the longest answer takes at least {answer_s:.0f} s, the time to "
            f"read the weights for each token, and DJL Serving waits {timeout_s} s for the next bytes of an answer "
            "(chunked_read_timeout). A late JSON answer begins with blanks and status 200, and a later error is in "
            f"its body. Set SERVING_CHUNKED_READ_TIMEOUT to {2 * math.ceil(answer_s)}, request streams, or lower "
            "n_positions"
        )
        yield Finding(("n_positions",), problem, "note")


def try_texts(placement: Placement) -> None:
    """Report where tokenizer or chat template fail, or go too far, on short texts. They run in separate processes.

    Nothing of a tokenizer with its own code, or without the library, is tried.
    """
    for report in placement.reports:
        prepared = report.prepared
        if prepared is None or not report.ok or prepared.options.trust_remote_code:
            continue
        folder = prepared.artifact.path
        here = folder.is_dir() and has_vocabulary(entry.name for entry in folder.iterdir())
        if not here or find_spec("transformers") is None:
            continue
        limits: dict[str, Any] = {}
        if prepared.options.text_timeout > TRY_TEXT_S:
            limits = {"timeout_s": TRY_TEXT_S, "limit": "of check"}
        with (
            report.findings.catch(),
            closing(prepared.start_tokenizer(TRY_S, **limits)) as tokenizer,
        ):
            most = most_characters(tokenizer.pieces or (), prepared.options.max_model_len or 0)
            _try(report.findings, lambda text: tokenizer.decode(tokenizer.encode(text)))
            rendering = Rendering(prepared.options.chat_template_kwargs or {})
            _try(report.findings, partial(_render, tokenizer, most, rendering))


def _render(tokenizer: Tokenizer, most: int | None, rendering: Rendering, text: str) -> None:
    messages = [{"role": "user", "content": text}]
    with suppress(UnsupportedParameterError):  # no template
        tokenizer.encode_chat(messages, max_chars=most, rendering=rendering)


def _try(findings: Problems, call: Callable[[str], object]) -> None:
    """Report the first text on which a call fails."""
    text = ""
    try:
        for text in _TRIED:
            call(text)
    except ServingError as error:
        findings.add("warning", f"tried with {len(text)} characters: {error}")


def _lacking(prepared: Prepared) -> Iterator[str]:
    """Reasons why a valid plan cannot be loaded."""
    case = prepared.case
    if not case.on_cpu and (found := machines.spanning(case.degree, prepared.environ)):
        yield f"a model on several machines ({', '.join(found)}) is not served by this version"
    if not (prepared.artifact.weights or prepared.options.simulated):
        yield "the weights were not downloaded or checked"
