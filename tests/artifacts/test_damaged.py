"""Damaged and hostile folders: each its own clear error, before anything is loaded, run or written."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from djl_python_neuronx.artifacts.formats import detect
from tests.artifacts import folders
from tests.artifacts.damages import CASES, MARK, Hostile, fail


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_each_has_its_own_class_and_names_the_file(tmp_path, name):
    path = tmp_path / "model"
    caught, named, error = fail(name, path)
    assert type(caught) is error
    assert named in str(caught)
    assert str(path) in str(caught)
    assert not (tmp_path / MARK).exists(), "code in a pickle was run"


def test_all_messages_are_different(tmp_path):
    """But for the path of the folder."""
    messages = {}
    for name in CASES:
        path = tmp_path / name / "model"
        path.parent.mkdir()
        messages[name] = str(fail(name, path)[0]).replace(str(path), "")
    twice = {name for name, one in messages.items() if list(messages.values()).count(one) > 1}
    assert not twice
    assert len(messages) >= 20


def test_the_code_in_the_hostile_pickle_would_run(tmp_path):
    """The oracle of the cases above: the full loader does what they refuse."""
    pickle.loads(pickle.dumps(Hostile(), protocol=2))
    assert (tmp_path / MARK).exists()


def test_torchs_weights_only_loader_refuses_what_is_refused_here(tmp_path):
    torch = pytest.importorskip("torch")
    for name in ("pickle_with_code", "pickle_with_newer_instructions"):
        CASES[name](tmp_path / name)
        with pytest.raises(pickle.UnpicklingError):
            torch.load(tmp_path / name / "pytorch_model.bin", weights_only=True)
    assert not (tmp_path / MARK).exists()


def test_nothing_in_the_folder_is_changed(tmp_path):
    path = folders.own_output(tmp_path / "model")
    before = {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in path.rglob("*")}
    detect(path)
    assert {
        file: (file.stat().st_mtime_ns, file.stat().st_size) for file in path.rglob("*")
    } == before


def test_detecting_imports_no_torch(tmp_path):
    path = folders.split(tmp_path / "model")
    code = (
        "import sys; from pathlib import Path; from djl_python_neuronx.artifacts.formats import detect; "
        f"detect(Path({str(path)!r})); sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=root).returncode == 0
