"""Who may say what: strictness follows origin.

What the user addressed to us is refused if it cannot be honoured, or listed if it rightly does nothing. What DJL
Serving adds is kept quietly. Each function gives the problems of one setting, or the reason to pass over it.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from pydantic import ValidationError

from djl_python_neuronx.config import sources
from djl_python_neuronx.config.findings import Finding
from djl_python_neuronx.config.legacy import DJL_ARGUMENTS, IGNORED, TRANSLATED, UNSUPPORTED
from djl_python_neuronx.config.options import NAMES, ServingOptions, option
from djl_python_neuronx.config.sources import Setting
from djl_python_neuronx.config.values import truth
from djl_python_neuronx.errors import (
    ConfigError,
    IncompatibleOptionsError,
    InvalidOptionError,
    UnknownOptionError,
    did_you_mean,
)

_MAX_SHOWN = 200


def shown(value: object) -> object:
    """For messages: `value` itself, or the beginning of its text where that is too long."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or endless nesting
        return f"<{type(value).__name__}>"
    return value if len(text) <= _MAX_SHOWN else cut(text)


def cut(text: str) -> str:
    """The text, or its beginning where it is too long for a message."""
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def invalid(setting: Setting, expected: str) -> InvalidOptionError:
    """The error for a value that is not allowed; one too long for a message is cut."""
    return InvalidOptionError(setting.name, shown(setting.value), setting.origin, expected)


def unknown(
    setting: Setting, ignored: dict[str, str], suspicious: dict[str, str]
) -> Iterator[ConfigError]:
    """What to say of a name that is no option."""
    name, origin = cut(setting.name), setting.origin
    if name in UNSUPPORTED:
        yield from _unsupported(setting, ignored, suspicious)
    elif name in IGNORED:
        ignored[name] = IGNORED[name].reason
    elif name in DJL_ARGUMENTS and setting.by_user:
        expected = f"{name} without 'option.' in serving.properties, where DJL Serving reads it"
        yield invalid(setting, expected)
    elif setting.by_user:
        yield UnknownOptionError(name, origin, [*NAMES, *TRANSLATED, *IGNORED, *UNSUPPORTED])
    elif setting.source != sources.FILE_NAME or name in DJL_ARGUMENTS:
        ignored.setdefault(name, "DJL Serving's own")
    elif _means_option(name):
        yield UnknownOptionError(name, origin, [f"option.{known}" for known in NAMES])
    else:
        hint = did_you_mean(name, NAMES) or "."
        suspicious[name] = (
            f"{origin}: neither an option nor a key that DJL Serving reads{hint} Options are option.<name>"
        )


def translated(setting: Setting, ignored: dict[str, str]) -> tuple[str, str] | None:
    """Option and value that one of the `TRANSLATED` names stands for; None if it asks for nothing.

    Raises:
        InvalidOptionError: the name has no such value.
    """
    translation = TRANSLATED[setting.name]
    word = str(setting.value).strip().lower() if isinstance(setting.value, str | bool) else ""
    if word not in translation.values:
        if setting.source == sources.DJL:  # refused where the user wrote it, if he did
            ignored[setting.name] = _means_nothing(setting)
            return None
        *most, last = translation.values
        raise invalid(setting, f"{', '.join(most)} or {last}" if most else last)
    value = translation.values[word]
    if value is None:
        ignored[setting.name] = f"it asks for nothing; the option is {translation.option}"
        return None
    return translation.option, value


def passed_over(name: str, setting: Setting, *, all_cores: bool) -> str | None:
    """Why the value of an option does not count, though nobody is to blame; None if it counts.

    `all_cores`: the user wrote `max` for the degree, of which DJL Serving makes the number that it counts.
    """
    if callable(setting.value):
        return "functions of a model.py are not called; the built-in formats are served"
    if setting.origin != sources.DJL:
        return None
    if parsed(name, setting.value) is INVALID:
        return _means_nothing(setting)
    counted = name == "tensor_parallel_degree" and all_cores
    if counted or str(setting.value).strip() in option(name).djl.fills_in:
        return f"DJL Serving's own {setting.value} gives way to what follows from the model and the cores"
    return None


def misplaced(name: str, setting: Setting) -> Iterator[ConfigError]:
    """The one option that is not the user's to write."""
    if name == "model_dir" and setting.by_user:
        expected = (
            "nothing: whoever starts the model sets it; name another folder with option.model_id"
        )
        yield invalid(setting, expected)


def contradiction(
    name: str, first: tuple[Setting, object], other: tuple[Setting, object]
) -> Iterator[ConfigError]:
    """Two names for the option `name` with two values in one source, both written by the user.

    Each comes with the value that counts. Spellings of one value agree; what is invalid is not compared.
    """
    (one, one_value), (two, two_value) = first, other
    if one.name == two.name or not (one.by_user and two.by_user):
        return
    values = [parsed(name, one_value), parsed(name, two_value)]
    if INVALID not in values and values[0] != values[1]:
        yield IncompatibleOptionsError(
            f"{one.name}={shown(one.value)!r} ({one.origin}) and {two.name}={shown(two.value)!r} ({two.origin}) "
            "are one option; keep one of them"
        )


def overruled(
    name: str, winner: tuple[Setting, object], other: tuple[Setting, object]
) -> Iterator[Finding]:
    """What a user wrote for the option `name` and another of his places overrules; the command line may do so."""
    (one, one_value), (two, two_value) = winner, other
    places = {sources.FILE_NAME, sources.ENVIRONMENT, sources.HUB_SOURCE}
    if (
        one.origin in {two.origin, sources.DJL, sources.COMMAND_LINE}
        or one.source == two.source
        or two.source not in places
        or not two.by_user
    ):
        return
    if parsed(name, one_value) != parsed(name, two_value):
        problem = f"{two.name}={shown(two.value)} ({two.origin}) does not count beside it"
        yield Finding((name,), problem, "note")


def told_off(name: str, negative: Setting, other: tuple[Setting, object]) -> Finding | None:
    """The note that an old name's `true` does not count beside the `false` of a stronger place; None if it does.

    The option's own words are another matter: the old engine let them decide.
    """
    setting, value = other
    if setting.source == negative.source or not (setting.name in TRANSLATED or truth(value)):
        return None
    one, two = (
        f"{entry.name}={shown(entry.value)} ({entry.origin})" for entry in (negative, setting)
    )
    return Finding((name,), f"{two} does not count beside {one}", "note")


def idle(options: ServingOptions) -> Iterator[Finding]:
    """What is accepted and does nothing."""
    for name in ServingOptions.model_fields:
        if option(name).unused and getattr(options, name) is not None:
            yield Finding((name,), option(name).unused, "note")


def reasons(error: ValidationError) -> dict[str, str]:
    """The options that are not valid, with what is to be added to the values that they take."""
    found: dict[str, str] = {}
    for entry in error.errors(include_url=False, include_context=False, include_input=False):
        name, *inner = map(str, entry["loc"])
        # Within an object, the name that is wrong; of a union's branches the message would only confuse.
        where = f"; {'.'.join(inner)}: {entry['msg']}" if inner and option(name).file else ""
        found.setdefault(name, where)
    return found


class _Invalid:
    """What no option can be."""


INVALID = _Invalid()
"""`parsed` of a value that is not allowed."""


def parsed(name: str, value: object) -> object:
    """The value as the options hold it, or `INVALID`."""
    try:
        return getattr(ServingOptions.model_validate({name: value}), name)
    except ValidationError:
        return INVALID


def _unsupported(
    setting: Setting, ignored: dict[str, str], suspicious: dict[str, str]
) -> Iterator[ConfigError]:
    name = setting.name
    if UNSUPPORTED[name].accepts(shown(setting.value)) or not (
        setting.by_user or setting.source == sources.FILE_NAME
    ):
        ignored[name] = "it is not supported in this version, and not asked for"
    elif setting.by_user:
        yield invalid(setting, UNSUPPORTED[name].expected)
    else:
        suspicious[name] = f"{setting.origin}: not supported in this version"


def _means_option(key: str) -> bool:
    """True for a key that begins with a misspelt ``option.``."""
    head, dot, _ = key[:_MAX_SHOWN].lower().partition(".")
    return bool(dot and (head == "opt" or get_close_matches(head, ["option"], cutoff=0.7)))


def _means_nothing(setting: Setting) -> str:
    return f"DJL Serving's own {shown(setting.value)!r} means nothing here"
