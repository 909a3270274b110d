"""Writer of what runs on the rig have shown into planning/nxdi/contrib.toml.

``NXDI_CONTRIB=<contrib/models> python -m tests.contrib.table [FOLDER...]``, with the rig on the path, runs the folders,
or all, and writes digests, verdicts and degrees. How a folder is loaded, its limits and why it is wrong are written by
hand.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from djl_python_neuronx.artifacts import model_code
from djl_python_neuronx.planning.fields import rope_type
from djl_python_neuronx.planning.nxdi import contrib
from djl_python_neuronx.planning.nxdi.contrib import Row
from tests.contrib.checkpoints import FOLDERS, compared
from tests.contrib.measure import Comparison, measure

_ROW = TypeAdapter(Row)
TABLE = Path(contrib.__file__).with_name("contrib.toml")
DEGREES = (1, 2)
"""Tensor parallel degrees of the runs."""


def source() -> Path:
    """`contrib/models` of a checkout."""
    return Path(os.environ["NXDI_CONTRIB"])


def shown(row: Row, found: Mapping[int, Comparison | str]) -> Row:
    """Return the row with what was found at each degree."""
    right = [degree for degree, result in found.items() if is_right(result)]
    tiny = FOLDERS[row.folder]
    ran = any(isinstance(result, Comparison) for result in found.values())
    return replace(
        row,
        sha256=model_code.read(source() / row.folder).digest,
        verdict="right" if right else "wrong" if ran else "fails",
        degrees=tuple(right) or DEGREES,
        stand_in=tiny.model_type if "model_type" in tiny.written else "",
        only=compared(row.folder),
        rotary=(rope_type(tiny.settings.get("rope_scaling")),),
    )


def is_right(result: Comparison | str) -> bool:
    return isinstance(result, Comparison) and not result.first


def text_of(rows: Mapping[str, Row]) -> str:
    """The table, without what is at its default."""
    head, _, _ = TABLE.read_text(encoding="utf-8").partition("\n[[model]]")
    return f"{head}\n" + "\n".join(
        "\n".join(_lines(rows[name])) for name in sorted(rows, key=str.lower)
    )


def _lines(row: Row) -> Iterator[str]:
    yield "[[model]]"
    for name, value in _ROW.dump_python(row, mode="json", exclude_defaults=True).items():
        yield f"{name} = {_value(value)}"
    yield ""


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_value(each)}" for name, each in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)


def main(names: list[str]) -> None:
    """Run the folders and write the table after each, so that a stop loses nothing."""
    rows = {row.folder: row for row in contrib.rows().values()}
    for name in names or FOLDERS:
        found: dict[int, Comparison | str] = {}
        for degree in DEGREES:
            with tempfile.TemporaryDirectory() as work:
                found[degree] = measure(source() / name, degree, Path(work))
            print(name, degree, found[degree], flush=True)  # noqa: T201
        rows[name] = shown(rows[name], found)
        TABLE.write_text(text_of(rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
