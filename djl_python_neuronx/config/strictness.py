"""Who may say what: strictness follows origin.

What the user addressed to us is refused if it cannot be honoured, or listed if it rightly does nothing. What DJL
Serving adds is kept quietly. Each function gives the problems of one setting, or the reason to pass over it.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from pydantic import ValidationError

from djl_python_neuronx.config import sources
from djl_python_neuronx.config.legacy import DJL_ARGUMENTS, IGNORED, UNSUPPORTED
from djl_python_neuronx.config.options import NAMES, ServingOptions
from djl_python_neuronx.config.sources import Setting
from djl_python_neuronx.errors import (
    ConfigError,
    IncompatibleOptionsError,
    InvalidOptionError,
    UnknownOptionError,
    did_you_mean,
)


def unknown(
    setting: Setting, ignored: dict[str, str], suspicious: dict[str, str]
) -> Iterator[ConfigError]:
    """What to say of a name that is no option."""
    name, value, origin = setting.name, setting.value, setting.origin
    if name in UNSUPPORTED:
        yield from _unsupported(setting, ignored, suspicious)
    elif name in IGNORED:
        ignored[name] = IGNORED[name].reason
    elif name in DJL_ARGUMENTS and setting.by_user:
        expected = f"{name} without 'option.' in serving.properties, where DJL Serving reads it"
        yield InvalidOptionError(name, value, origin, expected)
    elif setting.by_user:
        yield UnknownOptionError(name, origin, [*NAMES, *IGNORED, *UNSUPPORTED])
    elif setting.source != sources.FILE_NAME or name in DJL_ARGUMENTS:
        ignored.setdefault(name, "DJL Serving's own")
    elif _means_option(name):
        yield UnknownOptionError(name, origin, [f"option.{known}" for known in NAMES])
    else:
        hint = did_you_mean(name, NAMES) or "."
        suspicious[name] = (
            f"{origin}: neither an option nor a key that DJL Serving reads{hint} Options are option.<name>"
        )


def _unsupported(
    setting: Setting, ignored: dict[str, str], suspicious: dict[str, str]
) -> Iterator[ConfigError]:
    name, value, origin = setting.name, setting.value, setting.origin
    if UNSUPPORTED[name].accepts(value) or not (
        setting.by_user or setting.source == sources.FILE_NAME
    ):
        ignored[name] = "it is not supported in this version, and not asked for"
    elif setting.by_user:
        yield InvalidOptionError(name, value, origin, UNSUPPORTED[name].expected)
    else:
        suspicious[name] = f"{origin}: not supported in this version"


def passed_over(name: str, setting: Setting) -> str | None:
    """Why the value of an option does not count, though nobody is to blame; None if it counts."""
    if callable(setting.value):
        return "functions of a model.py are not called; the built-in formats are served"
    if setting.origin == sources.DJL and not _valid(name, setting.value):
        return f"DJL Serving's own {setting.value!r} means nothing here"
    return None


def misplaced(name: str, setting: Setting) -> Iterator[ConfigError]:
    """The one option that is not the user's to write."""
    if name == "model_dir" and setting.by_user:
        expected = (
            "nothing: whoever starts the model sets it; name another folder with option.model_id"
        )
        yield InvalidOptionError(name, setting.value, setting.origin, expected)


def contradiction(first: Setting, other: Setting) -> Iterator[ConfigError]:
    """Two names for one option with two values in one source, both written by the user."""
    if first.name != other.name and first.value != other.value and first.by_user and other.by_user:
        yield IncompatibleOptionsError(
            f"{first.name}={first.value!r} ({first.origin}) and {other.name}={other.value!r} ({other.origin}) "
            "are one option; keep one of them"
        )


def _means_option(key: str) -> bool:
    """True for a key that begins with a misspelt ``option.``."""
    head, dot, _ = key.lower().partition(".")
    return bool(dot and (head == "opt" or get_close_matches(head, ["option"], cutoff=0.7)))


def _valid(name: str, value: object) -> bool:
    try:
        ServingOptions.model_validate({name: value})
    except ValidationError:
        return False
    return True
