"""Temporary folders: those of killed processes go at the next start, and nothing else does."""

import errno
import fcntl
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from djl_python_neuronx.artifacts import atomic
from djl_python_neuronx.artifacts.atomic import (
    flock,
    is_writable,
    require_space,
    temporary_folder,
    whole_file,
)
from djl_python_neuronx.errors import ArtifactAccessError

ROOT = Path(__file__).parents[2]
PREFIX = ".a[b]*.output-"

KILLED = """
import os, signal, sys
from pathlib import Path
from djl_python_neuronx.artifacts.atomic import temporary_folder
with temporary_folder(Path(sys.argv[1]), sys.argv[2]) as folder:
    (folder / "new").mkdir()
    (folder / "new" / "weights").write_bytes(b"x" * 1000)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """And the name is there before anybody goes on: a crash of the machine cuts neither."""
    done, fsync, replace = [], os.fsync, Path.replace

    def recorded(descriptor):
        fsync(descriptor)
        place = Path(f"/proc/self/fd/{descriptor}").readlink()
        if place.is_relative_to(tmp_path):  # else of a thread that an earlier test has left
            done.append((place, place.is_dir() or place.read_bytes(), (tmp_path / "file").exists()))

    def named(path, target):
        done.append((path, "renamed"))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(Path, "replace", named)
    with whole_file(tmp_path / "file") as temporary:
        temporary.write_bytes(b"whole")
    expected = [(temporary, b"whole", False), (temporary, "renamed"), (tmp_path, True, True)]
    assert done == expected


@pytest.mark.parametrize(
    ("needed", "free", "said"),
    [
        (2 << 30, 1 << 30, r"needs 2\.00 GiB in .*, 1\.00 GiB are free"),
        (5 << 20, 4_194_303, r"needs 5,242,880 bytes in .*, 4,194,303 bytes are free"),
    ],
)
def test_what_does_not_fit_is_told_in_numbers_that_differ(
    tmp_path, monkeypatch, needed, free, said
):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(ArtifactAccessError, match=said):
        require_space("a model", tmp_path, needed, "name another")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_process_left_goes(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path), PREFIX]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    (left,) = names(tmp_path)
    (tmp_path / left / "new").chmod(0o500)
    with temporary_folder(tmp_path, PREFIX) as folder:
        assert names(tmp_path) == [folder.name]
        assert folder.stat().st_mode & 0o077 == 0
    assert names(tmp_path) == []


def test_it_goes_after_an_error_too(tmp_path):
    with pytest.raises(OSError, match="gone"), temporary_folder(tmp_path / "new", PREFIX) as folder:
        (folder / "gone").read_bytes()
    assert names(tmp_path / "new") == []


def test_what_is_in_use_or_not_of_this_kind_stays(tmp_path, monkeypatch):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis").touch()
    (tmp_path / f"{PREFIX}a_link_0").symlink_to("precious")
    (tmp_path / f"{PREFIX}a_file_0").touch()
    os.mkfifo(tmp_path / f"{PREFIX}a_pipe_0")
    (tmp_path / f"{PREFIX}backup").mkdir()
    (tmp_path / f"{PREFIX}2026-11-22").mkdir()
    (tmp_path / ".axb.output-other12").mkdir()
    with temporary_folder(tmp_path, PREFIX) as alive, temporary_folder(tmp_path, PREFIX):
        assert alive.exists()
    assert names(tmp_path) == sorted(
        [
            *("precious", ".axb.output-other12", f"{PREFIX}backup", f"{PREFIX}2026-11-22"),
            *(f"{PREFIX}a_{kind}_0" for kind in ("link", "file", "pipe")),
        ]
    )
    assert names(tmp_path / "precious") == ["thesis"]
    # Of another user.
    (tmp_path / f"{PREFIX}theirs_0").mkdir()
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with temporary_folder(tmp_path, PREFIX):
        pass
    assert f"{PREFIX}theirs_0" in names(tmp_path)


@pytest.mark.parametrize("moment", ["before it is opened", "before it is locked"])
def test_one_removed_before_it_is_locked_is_made_again(tmp_path, monkeypatch, moment):
    lock, calls = fcntl.flock, []

    def swept(descriptor, operation):
        calls.append(descriptor)
        if len(calls) == 1:
            (folder,) = tmp_path.iterdir()
            folder.rmdir()
            if moment == "before it is opened":
                raise FileNotFoundError
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", swept)
    with temporary_folder(tmp_path, PREFIX) as folder:
        assert folder.is_dir()
    assert len(calls) == 2


def test_a_disk_without_locks_will_do_and_nothing_is_removed_there(tmp_path, monkeypatch):
    def refuse(_descriptor, _operation):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with temporary_folder(tmp_path, PREFIX) as one, temporary_folder(tmp_path, PREFIX):
        assert one.exists()


def make_and_remove(place, count):
    for _ in range(count):
        with temporary_folder(place, PREFIX) as folder:
            (folder / "file").touch()
            assert (folder / "file").exists()


def test_many_processes_leave_each_other_alone(tmp_path):
    processes = multiprocessing.get_context("forkserver")
    started = [processes.Process(target=make_and_remove, args=(tmp_path, 60)) for _ in range(4)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * 4
    assert names(tmp_path) == []


def test_a_lock_is_on_the_folder_itself(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    with pytest.raises(OSError, match="link"), flock(tmp_path / "link"):
        pass


def test_a_trial_write_has_no_name(tmp_path, monkeypatch):
    """Killed in it, a process leaves nothing."""
    opened = []
    real = atomic.tempfile.TemporaryFile

    def watch(**more):
        file = real(**more)
        opened.append(names(tmp_path))
        return file

    monkeypatch.setattr(atomic.tempfile, "TemporaryFile", watch)
    assert is_writable(tmp_path)
    assert opened == [[]]
