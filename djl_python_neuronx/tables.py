"""Data files of this package: TOML, beside the module that uses them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TypeVar

from pydantic import ConfigDict, TypeAdapter

T = TypeVar("T")


def read_table(module: str, name: str, kind: type[T]) -> T:
    """Return the contents of `name`, a TOML file beside the module with the file `module`, as `kind`.

    Read it when it is needed, once (`functools.cache`): no start pays for a table that it does not use.

    Raises:
        ValidationError: of pydantic: a field is missing, unknown to `kind`, or has another type.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    text = Path(module).with_name(name).read_text(encoding="utf-8")
    # A dataclass has the settings of what contains it.
    adapter = TypeAdapter(list[kind], config=ConfigDict(extra="forbid"))  # type: ignore[valid-type]
    return adapter.validate_python([tomllib.loads(text)])[0]
