"""The files that values come from: `serving.properties`, and JSON that an option's value names."""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import javaproperties

from djl_python_neuronx.config.findings import Level
from djl_python_neuronx.config.sources import FILE_NAME, Setting
from djl_python_neuronx.errors import ConfigError

_PREFIX = "option."
MAX_FILE_BYTES = 1 << 20
_MAX_PATH = 4096  # Linux's own limit
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "1", "0", "none", "null"})
_LINE_END = re.compile(r"\r\n|\r|\n")


def from_file(model_dir: Path) -> list[Setting]:
    """Settings of the folder's `serving.properties`, as `from_properties` reads them; none without the file.

    Raises:
        ConfigError: the file cannot be read or holds a broken escape.
    """
    path = model_dir / FILE_NAME
    try:
        there = path.exists()
    except (OSError, ValueError):
        there = True  # reading it says what is wrong
    return from_properties(path) if there else []


def from_properties(path: Path) -> list[Setting]:
    """Settings of a properties file, those with the `option.` prefix first.

    Read as Java's `Properties.load` reads bytes: ISO-8859-1 and escapes, the last of equal keys counts. Keys without
    the prefix are DJL Serving's arguments, which reach a handler too (`batch_size`, `engine`, `minWorkers` …). The mark
    that Windows editors put in front of UTF-8 is skipped.

    Raises:
        ConfigError: the file cannot be read, is larger than 1 MiB or holds a broken escape.
    """
    content = _read(path)
    try:
        entries = list(javaproperties.parse(io.BytesIO(content.removeprefix(codecs.BOM_UTF8))))
    except ValueError as error:
        fix = r"Write \\ for a backslash, \uXXXX for a character"
        message = f"{str(path)!r} is not a properties file: {error}. {fix}"
        raise ConfigError(message) from error
    marked = content.startswith(codecs.BOM_UTF8)
    found: dict[str, Setting] = {}
    line = 1
    for entry in entries:
        if isinstance(entry, javaproperties.KeyValue):
            by_user = entry.key.startswith(_PREFIX)
            name, origin = entry.key.removeprefix(_PREFIX), f"{path} line {line}"
            remarks = (*_unseen(origin, marked=marked and line == 1), *_again(found.get(entry.key)))
            found[entry.key] = Setting(name, entry.value, origin, FILE_NAME, by_user, remarks)
        line += len(_LINE_END.findall(entry.source))
    if "max_dynamic_batch_size" in found:
        # Source: djl-serving d21927c, ModelInfo.java configPerModelSettings: it is passed on under this name.
        found.setdefault("batch_size", replace(found["max_dynamic_batch_size"], name="batch_size"))
    return sorted(found.values(), key=lambda setting: not setting.by_user)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}. Make it a readable file, or remove it"
        raise ConfigError(message) from error
    except ValueError as error:
        message = f"{str(path)!r} is no path: {error}"
        raise ConfigError(message) from error
    if len(content) > MAX_FILE_BYTES:
        message = f"{path} has more than {MAX_FILE_BYTES} bytes; expected a properties file"
        raise ConfigError(message)
    return content


def _unseen(origin: str, *, marked: bool) -> Iterator[tuple[Level, str]]:
    if marked:
        yield (
            "warning",
            f"{origin} begins with a byte order mark, which DJL Serving takes for a part of the key: it does not see "
            "this setting. Save the file without the mark",
        )


def _again(earlier: Setting | None) -> Iterator[tuple[Level, str]]:
    if earlier is not None:
        yield "note", f"{earlier.origin} sets it too, and the last one counts"


def content(value: object, folder: Path) -> tuple[object, str]:
    """The JSON of the file that `value` names, absolute or relative to `folder`; `value` itself if it is no path.

    A path is a text that is neither a word for yes, no or nothing nor the beginning of an object or list. The second
    part says what is wrong with the file: at most 1 MiB of JSON is expected.
    """
    if not isinstance(value, str) or value.lower() in _WORDS or value[:1] in {"{", "[", "("}:
        return value, ""
    if len(value) > _MAX_PATH:
        return None, f"a path has at most {_MAX_PATH} characters"
    path, named = folder / value, repr(str(folder / value))
    try:
        if not path.is_file():
            return None, f"there is no file {named}"
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        return None, f"the file {named} cannot be read: {error.strerror}"
    except ValueError as error:
        return None, f"{named} is no path: {error}"
    if len(data) > MAX_FILE_BYTES:
        return None, f"the file {named} has more than {MAX_FILE_BYTES} bytes"
    try:
        return json.loads(data), ""
    except (ValueError, RecursionError) as error:
        return None, f"the file {named} is not JSON: {error}"
