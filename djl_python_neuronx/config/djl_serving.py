"""Warnings about how DJL Serving changes a user's settings before the handler gets them.

Source throughout: djl-serving d21927c, LmiConfigRecommender.java and PyModel.java; for older versions: 1132e3ab^.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

from djl_python_neuronx.config import sources
from djl_python_neuronx.config.findings import Finding
from djl_python_neuronx.config.options import ServingOptions, names_where, option
from djl_python_neuronx.config.sources import Inputs, Setting, try_path
from djl_python_neuronx.config.values import join_words

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
"""What it costs to leave out one of `ARGUMENTS`."""
NO_HANDLERS = ("djl_python.", "djl_python_neuronx")
"""Prefixes of DJL Serving's own handlers and of modules of this package, of which only `ENTRY_POINT` is a handler."""
_OVERRULED = names_where(lambda marker: marker.djl.overrules)
_WHOLE_SECONDS = names_where(lambda marker: marker.djl.whole_seconds)
_SIGNS = {"engine", "entryPoint"} | names_where(lambda marker: marker.djl.sign)
"""Names whose presence shows that a file was written for DJL Serving. Any `OPTION_*` variable shows it too."""
_ROWS = {"vllm": 256}
"""Rolling batch to the rows that DJL Serving sends if max_rolling_batch_size is not set; for all others 32."""
_USUAL_ROWS = 32


def findings(
    inputs: Inputs, written: Sequence[Setting], options: ServingOptions
) -> Iterator[Finding]:
    """Warnings about what DJL Serving passes, or would pass, in place of what the user has `written`.

    Outside DJL Serving there are none if the settings were not written for it.
    """
    if inputs.properties is not None:
        yield from _inside(inputs.properties, written, options)
    elif _for_djl(written):
        yield from _ahead(inputs, written, options)
    else:
        return
    firsts = _firsts(written)
    yield from _numbers(firsts)
    yield from _rows(firsts, options)


def missing_arguments(in_file: Sequence[Setting], environ: Mapping[str, str]) -> Finding | None:
    """Warning about `ARGUMENTS` that a file lacks; None for a file that was not written for DJL Serving."""
    given = {setting.name.rpartition(".")[2] for setting in in_file if not setting.by_user}
    if "SERVING_RETRY_THRESHOLD" in environ:
        given.add("retry_threshold")
    missing = [name for name in ARGUMENTS if name not in given]
    if not missing or not _for_djl(in_file):
        return None
    costs = "; ".join(dict.fromkeys(_COSTS[name] for name in missing))
    lines = join_words(f"{name}={ARGUMENTS[name]}" for name in missing)
    problem = f"{join_words(missing)} not set: {costs}; write {lines}, without `option.`"
    return Finding(tuple(missing), problem, "warning")


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
    properties: Mapping[str, object], written: Sequence[Setting], options: ServingOptions
) -> Iterator[Finding]:
    if _text(properties.get("rolling_batch")).lower() in {"", "disable"} and _one_at_a_time(
        written, options
    ):
        yield Finding(
            ("rolling_batch", "async_mode"),
            "DJL Serving sends one request at a time (recent versions turn rolling_batch=auto or unset into disable): "
            f"{_batching(written)}",
            "warning",
        )
    firsts = _firsts(written)
    for name in sorted(firsts.keys() & _OVERRULED):
        passed, wanted = _text(properties.get(name)), _text(firsts[name].value)
        if passed and wanted not in {"auto", passed}:
            problem = (
                f"DJL Serving passes {passed!r} in place of {wanted!r} ({firsts[name].origin})"
            )
            yield Finding((name,), problem, "warning")


def _ahead(
    inputs: Inputs, written: Sequence[Setting], options: ServingOptions
) -> Iterator[Finding]:
    firsts = _firsts(written)
    if collects(written, options):
        setting = firsts["rolling_batch"]
        problem = (
            f"DJL Serving passes 'disable' in place of {setting.value!r} ({setting.origin}), because it collects "
            f"batches of {options.batch_size}; remove batch_size or rolling_batch"
        )
        yield Finding(("rolling_batch", "batch_size"), problem, "warning")
    if options.rolling_batch == "auto" and _one_at_a_time(written, options):
        yield Finding(
            ("rolling_batch", "async_mode"),
            "under DJL Serving, whose recent versions turn rolling_batch=auto or unset into disable, "
            f"{_batching(written)}",
            "warning",
        )
    engine = firsts.get("engine")
    if engine is not None and engine.value != "Python":
        problem = (
            f"{engine.value} ({engine.origin}) does not run this handler in one process for all cores; "
            "set engine=Python"
        )
        yield Finding(("engine",), problem, "warning")
    yield from _entry_point(inputs, written)


def collects(written: Sequence[Setting], options: ServingOptions) -> bool:
    """True if DJL Serving turns the rolling batch off, because it collects batches itself.

    It reads the key without prefix only: `option.batch_size` and `max_dynamic_batch_size` contradict a rolling batch.
    """
    batch = next((entry for entry in written if entry.name == "batch_size"), None)
    others = [entry.origin for entry in written if entry.name == "max_dynamic_batch_size"]
    return (
        batch is not None
        and batch.source == sources.FILE_NAME
        and not batch.by_user
        and batch.origin not in others
        and options.batch_size > 1
        and options.rolling_batch in {"tnx", "vllm"}
    )


def _for_djl(written: Sequence[Setting]) -> bool:
    """True if a file or the variables were probably written for DJL Serving."""
    return any(
        setting.name in _SIGNS
        if setting.source == sources.FILE_NAME
        else setting.source == sources.ENVIRONMENT and setting.by_user
        for setting in written
    )


def _spelled(name: str, written: Sequence[Setting]) -> str:
    """The option as the user should write it: in the place where it, or else any other option, is set."""
    own = [setting.source for setting in written if setting.name == name]
    places = own or [setting.source for setting in written if setting.by_user]
    in_file = sources.FILE_NAME in places or sources.ENVIRONMENT not in places
    return f"option.{name}" if in_file else f"OPTION_{name.upper()}"


def _batching(written: Sequence[Setting]) -> str:
    mode, batch = (_spelled(name, written) for name in ("async_mode", "rolling_batch"))
    return (
        f"the device then serves one sequence while all others wait. Set {mode}=true or {batch}=tnx to serve them "
        f"together, or {batch}=disable to accept this"
    )


def _rows(firsts: Mapping[str, Setting], options: ServingOptions) -> Iterator[Finding]:
    """Warning about an alias for the slots, which DJL Serving does not read."""
    name, rows = "max_rolling_batch_size", _ROWS.get(options.rolling_batch, _USUAL_ROWS)
    slots = options.max_rolling_batch_size
    alias = next((other for other in option(name).aliases if other in firsts), None)
    if alias is None or name in firsts or options.rolling_batch not in {"tnx", "vllm"}:
        return
    if slots is not None and slots != rows:
        problem = (
            f"DJL Serving does not read {alias} ({firsts[alias].origin}) and sends up to {rows} rows; write "
            f"{name}={slots} instead"
        )
        yield Finding((name,), problem, "warning")


def _numbers(firsts: Mapping[str, Setting]) -> Iterator[Finding]:
    for name in sorted(_WHOLE_SECONDS):
        setting = firsts.get(name)
        if setting is not None and not re.fullmatch(r"[+-]?[0-9]{1,10}", _text(setting.value)):
            problem = "DJL Serving reads whole seconds only, and uses its own default otherwise; write a whole number"
            yield Finding((name,), problem, "warning")


def _entry_point(inputs: Inputs, written: Sequence[Setting]) -> Iterator[Finding]:
    setting = _firsts(written).get("entryPoint")
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


def _one_at_a_time(written: Sequence[Setting], options: ServingOptions) -> bool:
    """True if DJL Serving sends one request at a time although the user did not choose that."""
    chosen = any(
        setting.name == "rolling_batch" and _text(setting.value).lower() == "disable"
        for setting in written
    )
    one_slot = options.max_rolling_batch_size == 1
    return not (chosen or options.async_mode or options.batch_size > 1 or one_slot)


def _text(value: object) -> str:
    """The value without blanks; empty if it is not text, the only type that Java passes."""
    return value.strip() if isinstance(value, str) else ""
