"""Where values come from: the model's `serving.properties`, the environment, DJL Serving, the command line.

Nothing is interpreted here but names: a source gives `Setting`s, `resolve` decides. What a user wrote is marked,
because only that is ours to refuse.
"""

from __future__ import annotations

import codecs
import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import javaproperties

from djl_python_neuronx.config.options import ServingOptions, option
from djl_python_neuronx.errors import ConfigError

FILE_NAME = "serving.properties"
_HUB_VARIABLES = ("HF_MODEL_ID", "HF_REVISION")
DJL = "DJL"
"""Source, and origin, of what DJL Serving passes; a value that the user wrote has the user's origin."""
_PREFIX, _ENV_PREFIX = "option.", "OPTION_"
# Source: DJL Serving's ModelInfo.java: other names are lower-cased, and only if they are upper-case throughout.
_ENV_SPECIAL = {"ENTRYPOINT": "entryPoint", "ENGINE": "engine"}
_UPPER = re.compile(r"[A-Z_\d]+")
_LINE_END = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True)
class Setting:
    """One value with the place it comes from."""

    name: str
    """As written, without prefix."""
    value: object
    origin: str
    source: str
    """File, environment …: the settings of one source contradict each other, those of two override each other."""
    by_user: bool
    """The user addressed it to us (`option.*`, `OPTION_*`, command line), so an unknown name is an error."""


def environment() -> dict[str, str]:
    """A copy of the process environment; everything else takes it as an argument."""
    return dict(os.environ)


def from_file(model_dir: Path) -> list[Setting]:
    """Settings of the folder's `serving.properties`, those with the `option.` prefix first; none without the file.

    Read as Java's `Properties.load` reads bytes: ISO-8859-1 and escapes, the last of equal keys counts. Keys without
    the prefix are DJL Serving's arguments, which reach a handler too (`batch_size`, `engine`, `minWorkers` …). The mark
    that Windows editors put in front of UTF-8 is skipped.

    Raises:
        ConfigError: the file cannot be read or holds a broken escape.
    """
    path = model_dir / FILE_NAME
    try:
        content = path.read_bytes() if path.exists() else b""
        entries = list(javaproperties.parse(io.BytesIO(content.removeprefix(codecs.BOM_UTF8))))
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}. Make it a readable file, or remove it"
        raise ConfigError(message) from error
    except ValueError as error:
        message = f"{path} is not a properties file: {error}. Write \\\\ for a backslash, \\uXXXX for a character"
        raise ConfigError(message) from error
    found: dict[str, Setting] = {}
    line = 1
    for entry in entries:
        if isinstance(entry, javaproperties.KeyValue):
            by_user = entry.key.startswith(_PREFIX)
            name, origin = entry.key.removeprefix(_PREFIX), f"{path} line {line}"
            found[entry.key] = Setting(name, entry.value, origin, FILE_NAME, by_user)
        line += len(_LINE_END.findall(entry.source))
    return sorted(found.values(), key=lambda setting: not setting.by_user)


def from_environ(environ: Mapping[str, str]) -> list[Setting]:
    """Settings of the `OPTION_*` variables, named as DJL Serving names them."""
    found = []
    for variable, value in environ.items():
        if not variable.startswith(_ENV_PREFIX) or variable == _ENV_PREFIX:
            continue
        name = variable.removeprefix(_ENV_PREFIX)
        if _UPPER.fullmatch(name):
            name = _ENV_SPECIAL.get(name, name.lower())
        found.append(Setting(name, value, f"environment {variable}", "environment", by_user=True))
    return found


def from_fallbacks(environ: Mapping[str, str]) -> list[Setting]:
    """Settings of the variables that stand in for options, such as `TENSOR_PARALLEL_DEGREE`."""
    return [
        Setting(name, environ[variable], f"environment {variable}", "fallbacks", by_user=True)
        for name in ServingOptions.model_fields
        for variable in option(name).env
        if variable in environ
    ]


def overruled(
    environ: Mapping[str, str], model_dir: Path | None, *, in_djl: bool
) -> dict[str, str]:
    """The variables that name a model of the hub and say nothing about this one, with the reason."""
    if in_djl:
        reason = "DJL Serving makes a model folder of its own from it"
    elif model_dir is not None and _holds_model(model_dir):
        reason = f"{model_dir} holds a model itself"
    else:
        return {}
    return {name: reason for name in _HUB_VARIABLES if environ.get(name, "").strip()}


def from_djl(properties: Mapping[str, object], written: Sequence[Setting]) -> list[Setting]:
    """Settings that DJL Serving passes: what the user wrote, changed or not, mixed with DJL's own keys.

    The prefix is gone by then, so a value keeps the origin of the setting in `written` that it equals. They come in
    the order of `written`, not in that of Java's hash map: of two names for one option the user's first one counts.
    """
    origins: dict[tuple[str, object], str] = {}
    ranks: dict[str, int] = {}
    for rank, setting in enumerate(written):
        origins.setdefault((setting.name, setting.value), setting.origin)
        ranks.setdefault(setting.name, rank)
    return [
        Setting(name, value, _origin(origins, name, value), DJL, by_user=False)
        for name, value in sorted(
            properties.items(), key=lambda entry: (ranks.get(entry[0], len(ranks)), entry[0])
        )
    ]


def from_overrides(overrides: Mapping[str, str]) -> list[Setting]:
    """Settings of the command line."""
    return [
        Setting(name, value, "command line", "command line", True)
        for name, value in overrides.items()
    ]


def _origin(origins: Mapping[tuple[str, object], str], name: str, value: object) -> str:
    return origins.get((name, value), DJL) if isinstance(value, str) else DJL


def _holds_model(model_dir: Path) -> bool:
    try:
        return (model_dir / "config.json").exists()
    except (OSError, ValueError):
        return False
