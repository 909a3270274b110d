"""Data files: every field is known."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import ValidationError

from djl_python_neuronx.tables import read_table


@dataclass(frozen=True)
class Row:
    name: str
    count: int = 0


@dataclass(frozen=True)
class Table:
    row: tuple[Row, ...]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Table, '[[row]]\nname = "a"\ncuont = 1'),
        (Table, "row = []\nrows = []"),
        (Table, "[[row]]\ncount = 1"),
        (dict[str, Row], '[a]\nname = "a"\ncuont = 1'),
    ],
)
def test_a_field_that_is_unknown_or_missing_is_an_error(
    tmp_path: Path, kind: type, text: str
) -> None:
    (tmp_path / "rows.toml").write_text(text)
    with pytest.raises(ValidationError):
        read_table(str(tmp_path / "module.py"), "rows.toml", kind)


def test_a_table_is_read_beside_its_module(tmp_path: Path) -> None:
    (tmp_path / "rows.toml").write_text('[[row]]\nname = "a"\ncount = 1')
    found = read_table(str(tmp_path / "module.py"), "rows.toml", Table)
    assert found == Table((Row("a", 1),))
