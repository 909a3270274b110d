"""What DJL Serving makes of a user's settings before a handler sees them, and what to say of it.

Source throughout: djl-serving d21927c, LmiConfigRecommender.java and PyModel.java; what is said of older versions:
1132e3ab^.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from djl_python_neuronx.config import sources
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.rules import Finding
from djl_python_neuronx.config.sources import Setting

ENTRY_POINT = "djl_python_neuronx.handler"
_NO_HANDLERS = ("djl_python.", "djl_python_neuronx")
"""How the names of DJL Serving's own handlers begin, and of modules here; only one of these is this handler."""
_REWRITTEN = frozenset({"rolling_batch", "async_mode"})
"""Options that DJL Serving overrules: `batch_size` above 1 turns rolling batches off, for one."""
_WHOLE_SECONDS = ("predict_timeout", "model_loading_timeout")
_BATCHING = (
    "the device then works for one sequence while all others wait. Set option.async_mode=true or "
    "option.rolling_batch=tnx to serve them together; option.rolling_batch=disable accepts it"
)


def wrote(file: Sequence[Setting], environ: Mapping[str, str]) -> bool:
    """True for the file that DJL Serving writes for a model of the hub: it holds the variables and nothing else."""
    variables = {name: variable for variable, name in sources.HUB.items()}
    return any(setting.name == "model_id" for setting in file) and all(
        setting.by_user
        and setting.name in variables
        and environ.get(variables[setting.name]) == setting.value
        for setting in file
    )


def retold(file: Sequence[Setting]) -> list[Setting]:
    """The settings of a file that DJL Serving `wrote`, with the variables as the origin of its values."""
    variables = {name: variable for variable, name in sources.HUB.items()}
    return [
        replace(setting, origin=f"environment {variables[setting.name]}", source=sources.HUB_SOURCE)
        for setting in file
    ]


def inside(
    properties: Mapping[str, object], written: Sequence[Setting], options: ServingOptions
) -> Iterator[Finding]:
    """What to say when DJL Serving has passed `properties` and the user had `written` something else."""
    if _text(properties.get("rolling_batch")).lower() in {"", "disable"} and _one_at_a_time(
        written, options
    ):
        yield Finding(
            ("rolling_batch", "async_mode"),
            "DJL Serving sends one request at a time (recent versions turn rolling_batch=auto, or none, into disable): "
            f"{_BATCHING}",
            "warning",
        )
    firsts = {setting.name: setting for setting in reversed(written)}
    yield from _numbers(firsts)
    for name in sorted(firsts.keys() & _REWRITTEN):
        passed, wanted = _text(properties.get(name)), _text(firsts[name].value)
        if passed and wanted not in {"auto", passed}:
            problem = (
                f"DJL Serving passes {passed!r} in place of {wanted!r} ({firsts[name].origin})"
            )
            yield Finding((name,), problem, "warning")


def ahead(
    written: Sequence[Setting],
    options: ServingOptions,
    model_dir: Path | None,
    environ: Mapping[str, str],
) -> Iterator[Finding]:
    """What DJL Serving would do with what is `written`, outside of it; nothing if it was not written for DJL."""
    firsts = {setting.name: setting for setting in reversed(written)}
    if not {"engine", "entryPoint"} & firsts.keys():
        return
    if options.rolling_batch == "auto" and _one_at_a_time(written, options):
        yield Finding(
            ("rolling_batch", "async_mode"),
            "under DJL Serving, whose recent versions turn rolling_batch=auto, or none, into disable, "
            f"{_BATCHING}",
            "warning",
        )
    yield from _numbers(firsts)
    engine = firsts.get("engine")
    if engine is not None and engine.value != "Python":
        said = f"it is {engine.value} ({engine.origin})"
        problem = f"{said}, which does not run this handler in one process for all cores; set engine=Python"
        yield Finding(("engine",), problem, "warning")
    yield from _entry_point(firsts.get("entryPoint"), model_dir, environ)


def _numbers(firsts: Mapping[str, Setting]) -> Iterator[Finding]:
    for name in _WHOLE_SECONDS:
        setting = firsts.get(name)
        if setting is not None and not re.fullmatch(r"[+-]?[0-9]{1,10}", _text(setting.value)):
            problem = "DJL Serving takes whole seconds only and goes by its own default otherwise; write a whole number"
            yield Finding((name,), problem, "warning")


def _entry_point(
    setting: Setting | None, model_dir: Path | None, environ: Mapping[str, str]
) -> Iterator[Finding]:
    value = environ.get("DJL_ENTRY_POINT", "") if setting is None else _text(setting.value)
    origin = "environment DJL_ENTRY_POINT" if setting is None else setting.origin
    if value:
        # A module of the user's own may well wrap this handler.
        wrong, said = value != ENTRY_POINT and value.startswith(_NO_HANDLERS), f"{value} ({origin})"
    else:
        wrong, said = not _has_model_py(model_dir), "not set"
    if wrong:
        problem = f"it is {said}, so DJL Serving would not load this handler; set option.entryPoint={ENTRY_POINT}"
        yield Finding(("entryPoint",), problem, "warning")


def _one_at_a_time(written: Sequence[Setting], options: ServingOptions) -> bool:
    """True if nobody asked for it: neither for batches of DJL's nor for the mode itself."""
    asked = any(
        setting.name == "rolling_batch" and _text(setting.value).lower() == "disable"
        for setting in written
    )
    return not (asked or options.async_mode or options.batch_size > 1)


def _has_model_py(model_dir: Path | None) -> bool:
    try:
        return model_dir is not None and (model_dir / "model.py").exists()
    except (OSError, ValueError):
        return False


def _text(value: object) -> str:
    """Java passes text only; anything else says nothing."""
    return value.strip() if isinstance(value, str) else ""
