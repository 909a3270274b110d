"""The cache: whole or not at all, once for all, and kept while it is used."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from djl_python_neuronx.artifacts import cache
from djl_python_neuronx.artifacts.cache import (
    PartialFolder,
    RemoteFile,
    boot_id,
    fetch,
)
from djl_python_neuronx.errors import ArtifactAccessError, ArtifactNotFoundError
from tests.artifacts.shelf import Shelf
from tests.doubles.s3_proxy import wait_until

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(cache, "PIECE_BYTES", 10)


@pytest.fixture
def shelf():
    return Shelf(config=b"{}", weights=bytes(range(35)), empty=b"")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def versions(root):
    return list(root.glob("*/versions/*"))


def interrupt(shelf, after, error=KeyboardInterrupt):
    """Break the next download before its piece number `after`."""
    count = iter(range(1000))

    def before(piece):
        if next(count) == after:
            shelf.before = lambda piece: None
            raise error

    shelf.before = before


def test_the_second_fetch_loads_nothing(shelf, tmp_path):
    folder = fetch(shelf, tmp_path)
    assert contents(folder) == shelf.files
    loaded = list(shelf.loaded)
    assert fetch(shelf, tmp_path) == folder
    assert shelf.loaded == loaded


@settings(deadline=None, max_examples=30)
@given(
    after=st.lists(st.integers(0, 6), max_size=4), sizes=st.lists(st.integers(0, 45), min_size=1)
)
def test_interrupted_anywhere_any_number_of_times(tmp_path_factory, after, sizes):
    files = {f"f{n}": bytes((n + i) % 256 for i in range(size)) for n, size in enumerate(sizes)}
    shelf, root = Shelf(**files), tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "PIECE_BYTES", 10)
        for number in after:
            interrupt(shelf, number)
            try:
                fetch(shelf, root)
            except KeyboardInterrupt:
                assert versions(root) == []
        shelf.before = lambda piece: None
        assert contents(fetch(shelf, root)) == files
    assert len(shelf.loaded) == len(set(shelf.loaded)), "no piece twice"


def test_a_torn_or_lying_journal_is_not_believed(shelf, tmp_path, small_pieces):
    interrupt(shelf, 4)
    with pytest.raises(KeyboardInterrupt):
        fetch(shelf, tmp_path)
    [journal] = tmp_path.glob("*/partial/journal")
    text = journal.read_text()
    journal.write_text(text[:-3])  # the last record was cut off
    last = shelf.loaded[-1]
    shelf.loaded.clear()
    assert contents(fetch(shelf, tmp_path)) == shelf.files
    assert last in shelf.loaded
    assert len(shelf.loaded) == 2  # that one and what was missing


@pytest.mark.parametrize("damage", ["cut", "gone", "crashed machine"])
def test_what_the_journal_vouches_for_must_be_there(shelf, tmp_path, small_pieces, damage):
    interrupt(shelf, 4)
    with pytest.raises(KeyboardInterrupt):
        fetch(shelf, tmp_path)
    [journal] = tmp_path.glob("*/partial/journal")
    weights = journal.parent / "files" / "weights"
    match damage:
        case "cut":
            os.truncate(weights, 20)
        case "gone":
            weights.unlink()
        case "crashed machine":
            weights.write_bytes(bytes(35))
            journal.write_text(journal.read_text().replace(boot_id(), "another boot"))
    assert contents(fetch(shelf, tmp_path)) == shelf.files


def test_an_etag_that_comes_goes_and_comes_again(shelf, tmp_path, small_pieces):
    first, second = shelf.files["weights"], bytes(35)
    interrupt(shelf, 4)
    with pytest.raises(KeyboardInterrupt):
        fetch(shelf, tmp_path)
    shelf.files["weights"] = second
    interrupt(shelf, 2)
    with pytest.raises(KeyboardInterrupt):
        fetch(shelf, tmp_path)
    shelf.files["weights"] = first
    assert contents(fetch(shelf, tmp_path)) == shelf.files


def test_a_change_while_loading_is_followed_once(shelf, tmp_path, small_pieces):
    def change(piece):
        if piece.start == 20:
            shelf.files["weights"] = bytes(40)

    shelf.before = change
    assert contents(fetch(shelf, tmp_path))["weights"] == bytes(40)

    def always(piece):
        shelf.files["weights"] += b"x"

    shelf.before = always
    shelf.files["weights"] += b"y"
    with pytest.raises(
        ArtifactAccessError, match="differed twice from what it lists, last: weights"
    ):
        fetch(shelf, tmp_path)


def test_files_become_folders_and_the_other_way_round(tmp_path):
    shelf = Shelf(a=b"1", **{"b/c": b"2"})
    interrupt(shelf, 1)
    with pytest.raises(KeyboardInterrupt):
        fetch(shelf, tmp_path)
    shelf.files = {"a/x": b"3", "b": b"4", "k": b"5"}
    folder = fetch(shelf, tmp_path)
    assert {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} == {
        "a/x",
        "b",
        "k",
    }


def test_no_room(tmp_path):
    class Huge(Shelf):
        def list(self):
            return [RemoteFile("weights", 2**60, "etag")]

        def download(self, pieces, into, on_bytes):
            pytest.fail("there is no room")

    with pytest.raises(ArtifactAccessError) as caught:
        fetch(Huge(), tmp_path)
    assert "needs 1073741824.00 GiB" in str(caught.value)
    assert "GiB are free there. Make room" in str(caught.value)
    assert not list(tmp_path.glob("*/partial"))


@pytest.mark.parametrize(
    ("number", "said"), [(errno.ENOSPC, "is full"), (errno.EROFS, "folder that it can write")]
)
def test_a_disk_that_refuses(shelf, tmp_path, number, said):
    interrupt(shelf, 1, OSError(number, os.strerror(number)))
    with pytest.raises(ArtifactAccessError, match=said):
        fetch(shelf, tmp_path)
    assert versions(tmp_path) == []
    assert contents(fetch(shelf, tmp_path)) == shelf.files


@pytest.mark.parametrize("most", [0, 1, 3, 7])
def test_a_disk_that_takes_a_part_of_a_write(shelf, tmp_path, small_pieces, monkeypatch, most):
    """And then all of it, or nothing more: `pwrite` says how much, and only the next one fails."""
    pwrite = os.pwrite
    room = 20

    def short(descriptor, content, at):
        nonlocal room
        taken = bytes(content[: min(most, room)])
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room -= len(taken)
        return pwrite(descriptor, taken, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", short)
        with pytest.raises(ArtifactAccessError, match="is full"):
            fetch(shelf, tmp_path)
    assert versions(tmp_path) == []
    assert contents(fetch(shelf, tmp_path)) == shelf.files
    if most:
        assert sorted(shelf.loaded) == sorted(set(shelf.loaded)), "what was whole is kept"
        assert len(shelf.loaded) == 5


@pytest.mark.parametrize("checksum", [True, False])
def test_only_what_has_no_checksum_is_judged_by_its_content(tmp_path, monkeypatch, checksum):
    """A file uploaded like that may be unused; `detect` judges the files that are served."""
    shelf = Shelf(**{"config.json": b"{}", "lfs.safetensors": b"version https://git-lfs"})
    if not checksum:
        monkeypatch.setattr(shelf, "verify", lambda file, path: None)
        with pytest.raises(ArtifactAccessError, match=r"differed twice .*lfs\.safetensors"):
            fetch(shelf, tmp_path)
    else:
        assert contents(fetch(shelf, tmp_path)) == shelf.files
    assert len(shelf.loaded) == (2 if checksum else 3)


def test_a_root_that_is_a_file(shelf, tmp_path):
    (tmp_path / "root").write_text("x")
    with pytest.raises(ArtifactAccessError, match="could not be stored in"):
        fetch(shelf, tmp_path / "root")


def test_the_remotes_own_errors_pass(shelf, tmp_path):
    interrupt(shelf, 0, ArtifactNotFoundError("there is none"))
    with pytest.raises(ArtifactNotFoundError, match=r"^there is none$"):
        fetch(shelf, tmp_path)


@pytest.mark.parametrize("damage", ["cut", "gone", "link", "manifest", "crashed machine"])
def test_a_damaged_version_is_loaded_again(shelf, tmp_path, damage):
    folder = fetch(shelf, tmp_path)
    manifest = folder.parent / "manifest.json"
    durable = folder.parent / "durable"
    wait_until(durable.exists, "the files to reach the disk")
    match damage:
        case "cut":
            os.truncate(folder / "weights", 5)
        case "gone":
            (folder / "weights").unlink()
        case "link":
            (folder / "weights").rename(tmp_path / "elsewhere")
            (folder / "weights").symlink_to(tmp_path / "elsewhere")
        case "manifest":
            manifest.write_text(manifest.read_text()[:-5])
        case "crashed machine":
            durable.unlink()
            (folder / "weights").write_bytes(bytes(35))
            manifest.write_text(manifest.read_text().replace(boot_id(), "another boot"))
    again = fetch(shelf, tmp_path)
    assert contents(again) == shelf.files
    assert not (again / "weights").is_symlink()


def test_what_did_not_reach_the_disk_is_loaded_again(shelf, tmp_path, monkeypatch):
    def sync_tree(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(cache, "sync_tree", sync_tree)
        folder = fetch(shelf, tmp_path)
        wait_until(lambda: not (folder.parent / "manifest.json").exists(), "the failed sync")
    assert contents(folder) == shelf.files, "this process goes on with it"
    shelf.loaded.clear()
    assert contents(fetch(shelf, tmp_path)) == shelf.files
    assert shelf.loaded


def test_a_version_on_disk_outlives_the_boot(shelf, tmp_path):
    folder = fetch(shelf, tmp_path)
    wait_until((folder.parent / "durable").exists, "the files to reach the disk")
    manifest = folder.parent / "manifest.json"
    manifest.write_text(manifest.read_text().replace(boot_id(), "another boot"))
    shelf.loaded.clear()
    assert fetch(shelf, tmp_path) == folder
    assert shelf.loaded == []


CHILD = """
import sys
from pathlib import Path
from djl_python_neuronx.artifacts.cache import fetch
from tests.artifacts.shelf import Shelf
shelf = Shelf(weights=b"old")
print(fetch(shelf, Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


def test_an_old_version_stays_while_another_process_uses_it(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    old = Path(child.stdout.readline().strip())
    fetch(Shelf(weights=b"new"), tmp_path)
    assert contents(old) == {"weights": b"old"}
    child.send_signal(signal.SIGKILL)
    child.communicate()
    newest = fetch(Shelf(weights=b"newest"), tmp_path)
    assert not old.exists(), "nobody uses it any more"
    assert contents(newest) == {"weights": b"newest"}


def test_threads_at_once_fetch_once(shelf, tmp_path, small_pieces):
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(fetch(shelf, tmp_path))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8
    assert len(set(answers)) == 1
    assert len(shelf.loaded) == len(set(shelf.loaded)) == 5


def test_who_waits_says_for_whom(shelf, tmp_path, caplog):
    caplog.set_level(logging.INFO, "djl_python_neuronx")
    entered, may_go = threading.Event(), threading.Event()

    def before(piece):
        entered.set()
        may_go.wait(60)

    shelf.before = before
    first = threading.Thread(target=fetch, args=(shelf, tmp_path))
    first.start()
    assert entered.wait(60)
    [place] = tmp_path.iterdir()
    holder = json.loads((place / "lock.json").read_text())
    assert holder["pid"] == os.getpid()
    second = threading.Thread(target=fetch, args=(shelf, tmp_path))
    second.start()
    said = f"lock_waiting what=shelf://one holder_pid={os.getpid()} holder_since={holder['since']}"
    wait_until(lambda: said in caplog.text, said)
    may_go.set()
    first.join()
    second.join()
    assert len(shelf.loaded) == 2


def test_progress_tells_what_was_there_already(shelf, tmp_path, small_pieces):
    interrupt(shelf, 3)
    with pytest.raises(KeyboardInterrupt):
        fetch(shelf, tmp_path)
    seen = []
    fetch(shelf, tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(32, 37), (37, 37)]


def test_identities_do_not_share_a_place(tmp_path):
    one, other = Shelf(a=b"1"), Shelf(a=b"2")
    other.identity = ("shelf", "other")
    folders = [fetch(one, tmp_path), fetch(other, tmp_path)]
    assert [contents(folder) for folder in folders] == [{"a": b"1"}, {"a": b"2"}]
    assert cache.fetch(one, tmp_path) == folders[0]


def test_a_partial_folder_never_writes_through_a_link_to_a_published_file(tmp_path, small_pieces):
    published = tmp_path / "published"
    published.write_bytes(b"0123456789abc")
    old = RemoteFile("weights", 13, "old")
    folder = PartialFolder(tmp_path / "partial")
    assert folder.prepare([old], {old: published}) == []
    new = RemoteFile("weights", 13, "new")
    missing = folder.prepare([new], {})
    with folder.open(new) as descriptor:
        os.pwrite(descriptor, bytes(13), 0)
    assert len(missing) == 2
    assert published.read_bytes() == b"0123456789abc"


def test_a_version_that_is_being_removed_is_not_used(tmp_path):
    """Its remover holds the lock; where there are none, nobody removes."""
    manifest = tmp_path / "manifest.json"
    manifest.touch()
    with manifest.open() as removing:
        fcntl.flock(removing, fcntl.LOCK_EX)
        assert cache._share(tmp_path) is None
    for why in (None, errno.ENOLCK):
        with pytest.MonkeyPatch.context() as patch:
            if why:
                patch.setattr(fcntl, "flock", raising(OSError(why, os.strerror(why))))
            os.close(cache._share(tmp_path))


def raising(error):
    def fail(*_):
        raise error

    return fail
