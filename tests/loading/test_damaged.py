"""Damaged and hostile folders: `check` refuses what a start refuses, with the same message."""

from __future__ import annotations

import pytest

from djl_python_neuronx.artifacts.compiled_formats import graphs_in
from djl_python_neuronx.errors import ServingError
from djl_python_neuronx.loading.check import check
from djl_python_neuronx.loading.prepare import prepare_or_raise
from djl_python_neuronx.planning.machines import named
from tests.artifacts import folders
from tests.artifacts.damages import CASES, GRAPHS

ON_CPU = {"model_loader": "cpu"}
MISMATCHES = {name for name in CASES if name.startswith("wrong_")}
"""Of options, not of the folder: tests/loading/test_check_compiled.py has them."""
PLANNED = {"no_weights"}
"""A configuration alone is enough for a plan."""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refusal(path, overrides):
    """The error of a start."""
    with pytest.raises(ServingError) as caught:
        prepare_or_raise(None, path, environ={}, overrides=overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(CASES.keys() - MISMATCHES - GRAPHS))
def test_check_refuses_what_a_start_refuses(tmp_path, name):
    path = tmp_path / "model"
    CASES[name](path)
    report = check(str(path), environ={}, overrides=ON_CPU)
    level = "warning" if name in PLANNED else "error"
    said = "\n".join(report.findings.messages(level))
    assert refusal(path, ON_CPU) in said
    assert not report.loadable


@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_check_refuses_damaged_graphs_as_a_start_does(tmp_path, name):
    path = tmp_path / "graphs"
    named_file, error = CASES[name](path)
    model = folders.huggingface(tmp_path / "model")
    (model / "tokenizer.json").touch()
    overrides = {"model_loader": "tnx", "compiled_graph_path": str(path)}
    report = check(str(model), environ={}, overrides=overrides, machine=named("inf2.xlarge"))
    with pytest.raises(error) as caught:
        graphs_in(path)
    assert str(caught.value) in report.findings.messages("error")
    assert named_file in str(caught.value)


def test_weights_apart_from_their_configuration(tmp_path):
    path = folders.optimum_tnx(tmp_path / "model")
    (path / "tokenizer.json").touch()
    machine = named("inf2.xlarge")
    before = check(str(path), environ={}, overrides={}, machine=machine)
    assert not before.findings.messages("error")
    (path / "checkpoint" / "config.json").unlink()
    report = check(str(path), environ={}, overrides={}, machine=machine)
    (error,) = report.findings.messages("error")
    assert "checkpoint, without the config.json" in error
