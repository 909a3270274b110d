"""The count of failed loads: kept between processes, and nowhere that another user could have prepared."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from djl_python_neuronx.loading.failed_loads import FailedLoads

ROOT = Path(__file__).parents[2]


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def add_in_another_process(temporary, model_dir):
    script = (
        "import sys; from djl_python_neuronx.loading.failed_loads import FailedLoads; "
        "print(FailedLoads(sys.argv[1]).add())"
    )
    command = [sys.executable, "-c", script, model_dir]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_processes_of_one_parent_count_together(temporary):
    assert [add_in_another_process(temporary, "/m") for _ in range(3)] == [1, 2, 3]
    # This process has another parent: it counts on its own.
    assert FailedLoads("/m").add() == 1


def test_each_folder_counts_alone_and_a_success_forgets(temporary):
    assert [FailedLoads("/a").add() for _ in range(2)] == [1, 2]
    assert FailedLoads("/b").add() == 1
    FailedLoads("/a").clear()
    assert FailedLoads("/a").add() == 1
    assert FailedLoads("/b").add() == 2


def test_clearing_nothing_writes_nothing_new(temporary):
    FailedLoads("/a").clear()
    assert not [path for path in temporary.rglob("*") if path.is_file()]


def test_the_folder_and_the_file_are_private(temporary):
    loads = FailedLoads("/a")
    loads.add()
    (file,) = loads.folder.iterdir()
    assert stat.S_IMODE(loads.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def link_to_another_folder(folder):
    (folder.parent / "elsewhere").mkdir(0o700)
    folder.symlink_to("elsewhere")


def file_in_its_place(folder):
    folder.write_bytes(b"")


def folder_for_all(folder):
    folder.mkdir()
    folder.chmod(0o777)


@pytest.mark.parametrize("prepare", [link_to_another_folder, file_in_its_place, folder_for_all])
def test_a_prepared_folder_is_not_used(temporary, caplog, prepare):
    loads = FailedLoads("/a")
    prepare(loads.folder)
    assert [loads.add(), loads.add()] == [1, 1]
    loads.clear()
    assert str(loads.folder) in caplog.text
    assert not list(temporary.rglob("failed-loads*"))


def test_a_folder_of_another_user_is_not_used(temporary, monkeypatch):
    loads = FailedLoads("/a")
    loads.folder.mkdir(0o700)
    folder = loads.folder
    monkeypatch.setattr(type(loads), "folder", folder)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert loads.add() == 1
    assert not list(loads.folder.iterdir())


def test_a_linked_count_is_not_followed(temporary):
    loads = FailedLoads("/a")
    loads.add()
    (file,) = loads.folder.iterdir()
    target = temporary / "target"
    target.write_bytes(b"")
    file.unlink()
    file.symlink_to(target)
    assert loads.add() == 1
    assert target.read_bytes() == b""


def test_nothing_is_left_of_a_count_that_is_forgotten(temporary):
    mine, others = FailedLoads("/mine"), FailedLoads("/others")
    mine.clear()
    assert list(temporary.iterdir()) == []
    mine.add()
    others.add()
    mine.clear()
    assert others.add() == 2
    others.clear()
    assert list(temporary.iterdir()) == []
