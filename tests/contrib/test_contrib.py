"""Verdicts in planning/nxdi/contrib.toml beside what a run on the rig gives of each folder below `contrib/models`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the nxdi backend needs torch")
pytest.importorskip("uvicorn", reason="needs the `server` extra")

from djl_python_neuronx.planning.nxdi import contrib
from tests.contrib.checkpoints import FOLDERS, compared
from tests.contrib.measure import measure
from tests.contrib.table import DEGREES, TABLE, is_right, shown, source, text_of
from tools.recipes import offline, recipes

ROWS = {row.folder: row for row in contrib.rows().values()}
has_sources = pytest.mark.skipif(
    "NXDI_CONTRIB" not in os.environ, reason="needs $NXDI_CONTRIB, contrib/models of a checkout"
)


def test_the_table_is_as_its_writer_writes_it() -> None:
    assert text_of(ROWS) == TABLE.read_text(encoding="utf-8")


def test_the_table_has_each_switch_that_was_compared() -> None:
    """So that no row is right for a model with another value, which nobody ran."""
    pytest.importorskip("transformers", "4.57", reason="older ones lack some of the classes")
    assert {name: dict(ROWS[name].only) for name in FOLDERS} == {
        name: compared(name) for name in FOLDERS
    }


def test_a_tiny_model_is_of_a_kind_that_its_row_names() -> None:
    made = {name: tiny.written.get("model_type", tiny.model_type) for name, tiny in FOLDERS.items()}
    assert {name: kind for name, kind in made.items() if kind not in ROWS[name].model_types} == {}


@pytest.mark.nxdi
@pytest.mark.nightly
@has_sources
@pytest.mark.parametrize("name", FOLDERS)
def test_a_run_gives_what_the_table_says(tmp_path: Path, name: str) -> None:
    """Behind this package's server, in batches with joins and slots reused, at each degree."""
    found = {n: measure(source() / name, n, tmp_path / str(n)) for n in DEGREES}
    assert shown(ROWS[name], found) == ROWS[name], {
        degree: result for degree, result in found.items() if not is_right(result)
    }


@pytest.mark.nxdi
@pytest.mark.nightly
@has_sources
def test_recipes_are_ready_with_the_code_itself(tmp_path: Path) -> None:
    """A check without it cannot judge its limits, such as a length."""
    environ = offline(tmp_path / "hub")
    contributed = [recipe for recipe in recipes() if recipe.code]
    assert contributed
    for recipe in contributed:
        (report,) = recipe.checked(environ, **recipe.placed(str(source()))).reports
        assert report.findings.messages("error") == (), recipe
        assert not any("not judged" in text for text in report.findings.messages("warning"))
        assert any(
            Path(recipe.code or "").name in text for text in report.findings.messages("note")
        )
