"""Failed loads: noted between processes, and nowhere that another user could have prepared."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from djl_python_neuronx.loading.failed_loads import PAUSE_S, FailedLoads

ROOT = Path(__file__).parents[2]


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def in_another_process(temporary, call):
    """The last failed load after `call` of the failed loads of the folder /m; None if there is none."""
    script = (
        "import json; from djl_python_neuronx.loading.failed_loads import FailedLoads; loads = FailedLoads('/m'); "
        f"loads.{call}; print(json.dumps(loads.recent()))"
    )
    environ = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_processes_of_one_parent_know_of_each_others_failed_loads(temporary):
    for i in range(3):
        reason, pause_s = in_another_process(temporary, f"add('the device\\n{i} \\ud800')")
        assert reason == f"the device\n{i} \ud800"
        assert 0.5 * PAUSE_S * 2**i < pause_s <= PAUSE_S * 2**i
    assert in_another_process(temporary, "recent()")[0] == "the device\n2 \ud800"
    assert FailedLoads("/m").recent() is None  # this process has another parent
    assert in_another_process(temporary, "clear()") is None


def test_each_folder_fails_alone_and_a_success_forgets(temporary):
    FailedLoads("/a").add("of a")
    FailedLoads("/b").add("of b")
    assert [FailedLoads(name).recent().reason for name in ("/a", "/b")] == ["of a", "of b"]
    FailedLoads("/a").clear()
    assert FailedLoads("/a").recent() is None
    assert FailedLoads("/b").recent().reason == "of b"


@pytest.mark.parametrize("moved_s", [-PAUSE_S, 2 * PAUSE_S], ids=["clock set back", "pause over"])
def test_a_pause_ends(temporary, monkeypatch, moved_s):
    FailedLoads("/a").add("why")
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + moved_s)
    assert FailedLoads("/a").recent() is None


def test_clearing_nothing_writes_nothing_new(temporary):
    FailedLoads("/a").clear()
    assert FailedLoads("/a").recent() is None
    assert not [path for path in temporary.rglob("*") if path.is_file()]


def test_an_end_without_a_load_is_no_failed_load(temporary):
    """Another process of the model may have loaded it between the look of this one and its end."""
    assert FailedLoads("/a").add(None) == 1
    assert FailedLoads("/a").recent() is None
    assert FailedLoads("/a").add("why") == 2
    assert FailedLoads("/a").recent().reason == "why"


def test_the_folder_and_the_file_are_private(temporary):
    loads = FailedLoads("/a")
    loads.add("why")
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
    assert [loads.add("why"), loads.add("why")] == [1, 1]
    loads.clear()
    assert loads.recent() is None
    assert str(loads.folder) in caplog.text
    assert not list(temporary.rglob("failed-loads*"))


def test_a_folder_of_another_user_is_not_used(temporary, monkeypatch):
    loads = FailedLoads("/a")
    loads.folder.mkdir(0o700)
    folder = loads.folder
    monkeypatch.setattr(type(loads), "folder", folder)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert loads.add("why") == 1
    assert not list(loads.folder.iterdir())


def test_a_linked_count_is_not_followed(temporary):
    loads = FailedLoads("/a")
    loads.add("why")
    (file,) = loads.folder.iterdir()
    target = temporary / "target"
    target.write_bytes(b"")
    file.unlink()
    file.symlink_to(target)
    assert loads.add("why") == 1
    assert target.read_bytes() == b""


def test_nothing_is_left_of_a_count_that_is_forgotten(temporary):
    mine, others = FailedLoads("/mine"), FailedLoads("/others")
    mine.clear()
    assert list(temporary.iterdir()) == []
    mine.add("why")
    others.add("why")
    mine.clear()
    assert others.add(None) == 2
    assert others.recent().reason == "why"
    others.clear()
    assert list(temporary.iterdir()) == []
