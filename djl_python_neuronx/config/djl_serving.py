"""Warnings about how DJL Serving changes a user's settings before the handler gets them.

Source throughout: djl-serving d21927c, LmiConfigRecommender.java and PyModel.java; for older versions: 1132e3ab^.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

from djl_python_neuronx.config import sources
from djl_python_neuronx.config.findings import Finding, Level
from djl_python_neuronx.config.legacy import DJL_ARGUMENTS, DJL_READS
from djl_python_neuronx.config.options import (
    INVALID,
    NAMES,
    ServingOptions,
    names_where,
    option,
    parse_value,
)
from djl_python_neuronx.config.sources import Inputs, Setting, try_path
from djl_python_neuronx.config.values import join_words, shortened

ENTRY_POINT = "djl_python_neuronx.handler"
ARGUMENTS: Final = {"retry_threshold": "3", "minWorkers": "1", "maxWorkers": "1"}
"""Keys without ``option.`` for `serving.properties`, each with the value for one model on the cores that it gets."""
_ONE_WORKER = (
    "on a CPU DJL Serving starts a second process under load and stops it later, which counts as a death in "
    "asynchronous mode"
)
_COSTS = {
    "retry_threshold": "after the first death of its process DJL Serving refuses the model's requests for ever",
    "minWorkers": _ONE_WORKER,
    "maxWorkers": _ONE_WORKER,
}
"""Consequences of leaving out one of `ARGUMENTS`."""
NO_HANDLERS = ("djl_python.", "djl_python_neuronx")
"""Prefixes of DJL Serving's own handlers and of modules of this package, of which only `ENTRY_POINT` is a handler."""
_OVERRULED = names_where(lambda marker: marker.djl.overrules)
_READS: Final[Mapping[str, str]] = {
    **DJL_READS,
    **{name: option(name).djl.reads for name in names_where(lambda marker: marker.djl.reads != "")},
}
"""Name to how DJL Serving reads its value, see `Djl.reads`; with ``option.`` unless it is in `_BARE`."""
_BARE = DJL_ARGUMENTS | {"batch_size"}
"""Names that DJL Serving reads without ``option.``."""
_DIGITS = "[+-]?0*(?:[0-9]{1,9}|1[0-9]{9}|2[01][0-9]{8})"  # of 32 bits
_NO_NUMBER = "does not read {} as a number, and does not start the model; write only digits"
_KINDS = {
    "whole": (_DIGITS, _NO_NUMBER),
    "rows": (f"{_DIGITS}|", _NO_NUMBER),
    "cores": (f"{_DIGITS}|max", f"{_NO_NUMBER}, or max"),
    "seconds": (
        f"{_DIGITS}|",
        "reads whole seconds only, and uses its own default otherwise; write a whole number",
    ),
    "truth": (r"(?i:true)|(?!\s*(?i:true|1|yes|on)\s*$).*", "reads {} as false; write true"),
    "word": (r"s3://.*|(?!\s).*(?<!\s)|", "keeps the blanks of {}; remove them"),
    "mode": (
        r"auto|disable|(?!(?i:auto|disable)$)\S+",
        "reads {} as the name of a rolling batch; write it in lower case, without blanks",
    ),
}
"""Kind of `Djl.reads` to the pattern of values that mean the same here, and what DJL Serving does with others."""
_ONE = r"-.*|\+?0*[01]|"
_MPI = "starts processes by MPI, which DJL Serving refuses without GPUs"
_EXPECTED = {
    "engine": ("Python", "Python", "does not run this handler in one process for all cores"),
    "handler": ("handle", "handle", "is not a function of this handler"),
    "mpi_mode": ("(?!(?i:true)$).*", "false", _MPI),
    "minWorkers": (_ONE, "1", "processes share the cores of one"),
    "maxWorkers": (_ONE, "1", "processes share the cores of one"),
}
"""Name to the pattern of values that work with this handler, the one to write, and what any other value does."""
_VARIABLES = {
    "SERVING_RETRY_THRESHOLD": ("retry_threshold",),
    "SERVING_MIN_WORKERS": ("minWorkers",),
    "SERVING_MAX_WORKERS": ("maxWorkers",),
    "SAGEMAKER_NUM_MODEL_WORKERS": ("minWorkers", "maxWorkers"),
}
"""Variable to those of `ARGUMENTS` that it sets."""
_SIGNS: Final = {
    sources.FILE_NAME: {"engine", "entryPoint"} | names_where(lambda marker: marker.djl.sign),
    sources.ENVIRONMENT: {"engine", "entryPoint", "rolling_batch"},
}
"""Names whose presence shows that a file, or the variables, were written for DJL Serving. Other variables configure the
embedded server in its images just as well."""
_ROWS = {"vllm": 256}
"""Rolling batch to the rows that DJL Serving sends if max_rolling_batch_size is not set; for all others 32."""
_USUAL_ROWS = 32


def findings(
    inputs: Inputs,
    written: Sequence[Setting],
    options: ServingOptions,
    planned: ServingOptions,
    keywords: Sequence[Setting] = (),
) -> Iterator[Finding]:
    """Errors and warnings about what DJL Serving reads, or would read, in place of what the user has `written`.

    Outside DJL Serving most of them are left out if the settings were not written for it, and the caller drops the
    other warnings. `planned`: the options with what is `handed_over`. `keywords`: settings that stand in
    `override_neuron_config`, and count.
    """
    java = _read_by_java(inputs)
    yield from _misread(java, is_for_djl(written) or inputs.properties is not None)
    yield from _twice(written)
    yield from _batches(java, written, planned)
    if inputs.properties is not None:
        yield from _inside(inputs.properties, java, written, planned)
        if sources.API_KEYS in inputs.environ or planned.api_key_file is not None:
            problem = (
                "DJL Serving answers the clients and checks no API keys; have a gateway in front of it check them, "
                f"and unset {sources.API_KEYS} and option.api_key_file"
            )
            yield Finding((), problem)
    elif is_for_djl(written):
        yield from _ahead(inputs, java, written, planned)
    else:
        return
    yield from _unread(java, written, options, keywords)


def handed_over(
    inputs: Inputs, written: Sequence[Setting], options: ServingOptions
) -> dict[str, object]:
    """How DJL Serving hands over requests, where that is not what `options` have.

    It decides by keys with prefix, and by `batch_size` without it, in the file: `max_dynamic_batch_size` and variables
    come too late. Inside DJL Serving `rolling_batch` is what it has decided.
    """
    java = _read_by_java(inputs)
    arguments = {one.name for one in written if not one.by_user} - java.keys()
    batch = java.get("batch_size")
    in_time = batch is not None and batch.source == sources.FILE_NAME and _number(batch) > 1
    features = inputs.environ.get("SERVING_FEATURES", "")
    outside = inputs.properties is None
    mode = "auto" if outside and "rolling_batch" in arguments else options.rolling_batch
    decided = _text(java["rolling_batch"].value) if "rolling_batch" in java else "auto"
    forced = decided == "auto" and not in_time and ("vllm" in features or "trtllm" in features)
    if (outside and (in_time or forced)) or (mode == "auto" and options.batch_size > 1):
        mode = "disable"
    asynchronous = forced or (options.async_mode and "async_mode" not in arguments)
    wanted = {"rolling_batch": mode, "async_mode": asynchronous}
    return {name: value for name, value in wanted.items() if getattr(options, name) != value}


def _number(setting: Setting | None) -> int:
    """The number of a batch, 1 without one."""
    text = "1" if setting is None else str(setting.value)
    return int(text) if re.fullmatch(_DIGITS, text) else 1


def _read_by_java(inputs: Inputs) -> dict[str, Setting]:
    """Name to the setting that DJL Serving itself reads, as written; those in the wrong place are left out.

    Options of the command line count as if they stood in the file, as they do in what `compile` writes.
    """
    found = {one.name: one for one in sources.from_overrides(inputs, ())}
    for setting in (
        *sources.from_sagemaker(inputs, ()),
        *_workers(inputs.environ.get(sources.WORKERS)),
        *inputs.file,
        *sources.from_option_variables(inputs, ()),
        # Not the variables of `option.env`, which are for the Python process.
        *sources.from_fallbacks(inputs, ()),
    ):
        anywhere = (
            setting.source not in {sources.FILE_NAME, sources.ENVIRONMENT}
            or setting.name == "engine"
        )
        in_place = anywhere or setting.by_user != (setting.name in _BARE)
        if in_place and (setting.value or setting.source == sources.FILE_NAME):
            found.setdefault(setting.name, setting)
    return found


def _workers(number: str | None) -> list[Setting]:
    """The settings of SageMaker's number of processes, which override the file's."""
    names = _VARIABLES[sources.WORKERS] if number else ()
    return [Setting(n, number, f"environment {sources.WORKERS}", "SageMaker", False) for n in names]


def _misread(java: Mapping[str, Setting], for_djl: bool) -> Iterator[Finding]:
    """Errors about values that DJL Serving reads otherwise than this package, or fails at.

    Warnings about seconds, about words for true that only DJL Serving reads, and, in settings that were not written for
    it, about empty values, which are none at all here.
    """
    for name, setting in java.items():
        text, kind = str(setting.value), _READS.get(name, "")
        plain = text.strip()
        refused = bool(plain) and name in NAMES and parse_value(name, plain) is INVALID
        if refused or kind not in _KINDS or setting.source == sources.COMMAND_LINE:
            continue
        pattern, problem = _KINDS[kind]
        if not re.fullmatch(pattern, text, re.DOTALL):
            known, empty = name in NAMES, not plain
            where = f"{name}=" if known and empty else ""
            where += "" if known and plain else f"{shortened(text)!r} ({setting.origin}): "
            problem = f"{where}DJL Serving {problem.format(repr(shortened(text)))}"
            unmeant = (kind == "truth" and not known) or (empty and kind != "mode" and not for_djl)
            level: Level = "warning" if kind == "seconds" or unmeant else "error"
            yield Finding(() if known and empty else (name,), problem, level)


def _twice(written: Sequence[Setting]) -> Iterator[Finding]:
    """Warnings about a key without prefix beside the one with it, which DJL Serving passes in its place."""
    places, passed = {sources.FILE_NAME, sources.ENVIRONMENT}, dict[str, Setting]()
    for setting in written:
        name = setting.name
        if setting.by_user and setting.source in places:
            passed.setdefault(name, setting)
        elif setting.source == sources.OTHER_SERVERS:
            continue  # which DJL Serving does not read
        elif name in passed and name not in _BARE and setting.value != passed[name].value:
            problem = (
                f"{name}={shortened(setting.value)} ({setting.origin}) has no effect: DJL Serving passes the value "
                f"with the prefix ({passed[name].origin}); keep one"
            )
            yield Finding((NAMES.get(name, name),), problem, "warning")


def _batches(
    java: Mapping[str, Setting], written: Sequence[Setting], options: ServingOptions
) -> Iterator[Finding]:
    """Findings about the batches that DJL Serving collects, which it does whatever the mode."""
    collected = _number(java.get("batch_size"))
    rolling = options.rolling_batch in {"tnx", "vllm"}
    mode = "async_mode" if options.async_mode else "rolling_batch"
    # `planning.rules` refuses a larger one beside a rolling batch.
    if collected > 1 and (options.async_mode or (rolling and options.batch_size == 1)):
        problem = (
            f"DJL Serving would collect {collected} requests ({java['batch_size'].origin}) and hand them over as one, "
            f"which fails for all of them; remove batch_size or {mode}"
        )
        yield Finding(("batch_size", mode), problem)
    elif options.batch_size != collected and not rolling:
        slots = f"write {_spelled('max_rolling_batch_size', written)}={options.batch_size} for its slots"
        batch = f"write batch_size={options.batch_size} in {sources.FILE_NAME}, without `option.`"
        fix = batch if _disabled(written) else slots
        problem = (
            f"no effect on DJL Serving, which collects {collected} and reads batch_size without `option.` only; "
            f"{'leave it out' if options.async_mode else fix}"
        )
        yield Finding(("batch_size",), problem, "warning")


def missing_arguments(
    in_file: Sequence[Setting], environ: Mapping[str, str], *, on_cpu: bool
) -> Iterator[Finding]:
    """Warning about `ARGUMENTS` that a file lacks; none for a file that was not written for DJL Serving.

    On Neuron devices a model has one process by default.
    """
    given = {setting.name.rpartition(".")[2] for setting in in_file if not setting.by_user}
    given.update(*(names for variable, names in _VARIABLES.items() if variable in environ))
    needed = [name for name in ARGUMENTS if on_cpu or _COSTS[name] != _ONE_WORKER]
    missing = [name for name in needed if name not in given]
    if missing and is_for_djl(in_file):
        costs = "; ".join(dict.fromkeys(_COSTS[name] for name in missing))
        lines = join_words(f"{name}={ARGUMENTS[name]}" for name in missing)
        problem = f"{join_words(missing)} not set: {costs}; write {lines}, without `option.`"
        yield Finding(tuple(missing), problem, "warning")


def chunked_read_timeout_s(environ: Mapping[str, str]) -> int:
    """Seconds that DJL Serving waits for the next bytes of an answer: `chunked_read_timeout`.

    Only the variable is known here, not DJL Serving's config.properties. Source: ConfigManager.java.
    """
    with suppress(ValueError):
        return max(1, int(environ.get("SERVING_CHUNKED_READ_TIMEOUT", "")))
    return 120


def _firsts(written: Sequence[Setting]) -> dict[str, Setting]:
    """Name to the first setting of that name: the one that counts."""
    return {setting.name: setting for setting in reversed(written)}


def _inside(
    properties: Mapping[str, object],
    java: Mapping[str, Setting],
    written: Sequence[Setting],
    options: ServingOptions,
) -> Iterator[Finding]:
    if _text(properties.get("rolling_batch")).lower() in {"", "disable"}:
        yield from _waiting(java, written, options)
    firsts = _firsts(written)
    for name in sorted(firsts.keys() & _OVERRULED):
        passed, wanted = _text(properties.get(name)), _text(firsts[name].value)
        if passed and wanted not in {"auto", passed}:
            problem = (
                f"DJL Serving passes {passed!r} in place of {wanted!r} ({firsts[name].origin})"
            )
            yield Finding((name,), problem, "warning")


def _ahead(
    inputs: Inputs,
    java: Mapping[str, Setting],
    written: Sequence[Setting],
    options: ServingOptions,
) -> Iterator[Finding]:
    firsts = _firsts(written)
    setting = firsts.get("rolling_batch")
    if options.rolling_batch == "disable" and setting and _text(setting.value) in {"tnx", "vllm"}:
        problem = (
            f"DJL Serving passes 'disable' in place of {setting.value!r} ({setting.origin}), because it collects "
            f"batches of {options.batch_size}; remove batch_size or rolling_batch"
        )
        yield Finding(("rolling_batch", "batch_size"), problem, "warning")
    yield from _waiting(java, written, options)
    for name, (pattern, value, why) in _EXPECTED.items():
        found = java.get(name)
        if found is not None and not re.fullmatch(pattern, str(found.value)):
            _, _, variable = found.origin.partition("environment ")
            problem = (
                f"{shortened(found.value)} ({found.origin}) {why}; set {variable or name}={value}"
            )
            by_mpi = name == "mpi_mode" or (name == "engine" and found.value == "MPI")
            yield Finding((name,), problem, "error" if by_mpi else "warning")
    if options.replicas != 1:
        # Source: djl-serving d21927c, Connection.java getNeuronVisibleCores, ModelInfo.java getLoadOnDevices.
        problem = (
            "on Neuron devices DJL Serving gives a process the cores of one copy, and starts as many as fit; leave it "
            "out there, or use the embedded server"
        )
        yield Finding(("replicas",), problem, "warning")
    yield from _entry_point(inputs, java, written)


def is_for_djl(written: Sequence[Setting]) -> bool:
    """True if a file or the variables were probably written for DJL Serving."""
    return any(setting.name in _SIGNS.get(setting.source, ()) for setting in written)


def _spelled(name: str, written: Sequence[Setting]) -> str:
    """The option as the user should write it: in the place where it, or else any other option, is set."""
    own = [setting.source for setting in written if setting.name == name]
    places = own or [setting.source for setting in written if setting.by_user]
    in_file = sources.FILE_NAME in places or sources.ENVIRONMENT not in places
    return f"option.{name}" if in_file else f"OPTION_{name.upper()}"


def _waiting(
    java: Mapping[str, Setting], written: Sequence[Setting], options: ServingOptions
) -> Iterator[Finding]:
    """Warning about sequences that wait for others to end, although the user did not choose that."""
    setting, collected = java.get("rolling_batch"), _number(java.get("batch_size"))
    chosen = collected > 1 if setting is None else _text(setting.value) != "auto"
    if chosen or _disabled(written) or options.async_mode or options.max_rolling_batch_size == 1:
        return
    mode, batch = (_spelled(name, written) for name in ("async_mode", "rolling_batch"))
    served = (
        "one sequence" if collected == 1 else f"the {collected} requests that batch_size collects"
    )
    removed = "" if collected == 1 else ", without batch_size,"
    problem = (
        "under DJL Serving, whose recent versions turn rolling_batch=auto or unset into disable, the device serves "
        f"{served} while all others wait. Set {mode}=true or {batch}=tnx{removed} to serve them together, or "
        f"{batch}=disable to accept this"
    )
    yield Finding(("rolling_batch", "async_mode"), problem, "warning")


def _disabled(written: Sequence[Setting]) -> bool:
    """True if the user chose one call after the other."""
    return any(
        setting.name == "rolling_batch" and _text(setting.value).lower() == "disable"
        for setting in written
    )


def _unread(
    java: Mapping[str, Setting],
    written: Sequence[Setting],
    options: ServingOptions,
    keywords: Sequence[Setting],
) -> Iterator[Finding]:
    """Warnings about options that DJL Serving reads itself, but not under the name or in the place that they have."""
    rows = _ROWS.get(options.rolling_batch, _USUAL_ROWS)
    by_rows = options.rolling_batch in {"tnx", "vllm"}
    slots = options.max_rolling_batch_size if by_rows else rows
    if slots is None and rows != _USUAL_ROWS:
        problem = (
            f"DJL Serving sends up to {rows} rows, and those without a slot wait; set max_rolling_batch_size, or "
            "rolling_batch=tnx"
        )
        yield Finding(("rolling_batch",), problem, "warning")
    for name in sorted(_READS.keys() - _BARE - {"entryPoint"}):
        read, places = java.get(name), keywords if name in java else (*keywords, *written)
        setting = next((one for one in places if NAMES.get(one.name, one.name) == name), None)
        if setting is None or setting.source in {sources.COMMAND_LINE, sources.HUB_SOURCE}:
            continue
        otherwise = option(name).djl.otherwise if name in NAMES else "does without it"
        if read is not None:
            same = parse_value(name, read.value) == parse_value(name, setting.value)
            otherwise = f"reads {shortened(read.value)!r} ({read.origin})"
        else:
            read_rows = by_rows or not setting.by_user
            count = options.max_rolling_batch_size if read_rows else rows
            same = name == "max_rolling_batch_size" and count in {None, rows}
        if not same and (read is None or by_rows or name != "max_rolling_batch_size"):
            place = setting.source if setting in keywords else f"{setting.name} ({setting.origin})"
            problem = (
                f"DJL Serving does not read {place} and {otherwise.format(rows=rows)}; "
                f"write {_spelled(name, written)}={shortened(setting.value)} instead"
            )
            yield Finding((name,), problem, "warning")


def _entry_point(
    inputs: Inputs, java: Mapping[str, Setting], written: Sequence[Setting]
) -> Iterator[Finding]:
    setting = java.get("entryPoint")
    value = inputs.environ.get("DJL_ENTRY_POINT", "") if setting is None else _text(setting.value)
    origin = "environment DJL_ENTRY_POINT" if setting is None else setting.origin
    if value:
        # A module of the user's own may well wrap this handler.
        wrong = value != ENTRY_POINT and value.startswith(NO_HANDLERS)
    else:
        folder = inputs.model_dir
        wrong = folder is None or not try_path((folder / "model.py").exists, failed=False)
    if wrong:
        current = f"{value} ({origin})" if value else "not set"
        fix = f"set {_spelled('entryPoint', written)}={ENTRY_POINT}"
        problem = f"{current}: DJL Serving would not load this handler; {fix}"
        yield Finding(("entryPoint",), problem, "warning")


def _text(value: object) -> str:
    """The value without blanks; empty if it is not text, the only type that Java passes."""
    return value.strip() if isinstance(value, str) else ""
