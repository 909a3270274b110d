"""A compile store and its remote twin, which is a folder of this machine here; `test_mirror` has S3."""

import logging
import shutil
from pathlib import Path

import pytest

from djl_python_neuronx.artifacts import fetch
from djl_python_neuronx.artifacts import manifest as manifests
from djl_python_neuronx.artifacts.mirror import Mirror
from djl_python_neuronx.artifacts.store import CompileStore
from djl_python_neuronx.errors import (
    ArtifactAccessError,
    ArtifactNotFoundError,
)
from tests.artifacts.store_worker import (
    Compiler,
    MissedError,
    build,
    expected_files,
    files_of,
    find_or_fail,
    finished,
    graphs_made,
    make,
    make_facts,
)


class FolderS3:
    """Folders of this machine in place of S3; `asked` records the requests in order."""

    ATTEMPTS = 1

    def __init__(self, root):
        self.root = root
        self.asked = []
        self.broken = None
        self.read_only = False

    def _path(self, uri):
        if self.broken:
            raise ArtifactAccessError(self.broken)
        return self.root / uri.removeprefix("s3://")

    def read(self, uri, name, environ, *, attempts):
        path = self._path(uri) / name
        self.asked.append("read")
        if not path.exists():
            raise ArtifactNotFoundError(str(path))
        return path.read_bytes()

    def fetch(self, uri, root, environ, *, selection):
        self.asked.append("download")
        return self._path(uri)

    def upload(self, folder, uri, environ):
        self.asked.append("upload")
        if self.read_only:
            msg = "may not write"
            raise ArtifactAccessError(msg)
        shutil.copytree(folder, self._path(uri), dirs_exist_ok=True)


@pytest.fixture
def transport(tmp_path, monkeypatch):
    remote = FolderS3(tmp_path / "remote")
    monkeypatch.setattr(fetch, "s3_module", lambda uri: remote)
    return remote


def mirror(_transport):
    return Mirror("s3://bucket/compiled/", Path("unused"), {})


def test_what_one_machine_compiled_the_next_one_fetches(tmp_path, transport):
    journal = tmp_path / "journal"
    first = build(tmp_path / "one", journal, mirror=mirror(transport))
    second = find_or_fail(CompileStore(tmp_path / "two", mirror=mirror(transport)), make_facts())
    assert files_of(second) == files_of(first) == expected_files()
    assert manifests.read(second) == manifests.read(first)
    assert graphs_made(journal) == [0, 1, 2]
    transport.asked.clear()
    find_or_fail(CompileStore(tmp_path / "two", mirror=mirror(transport)), make_facts())
    assert transport.asked == []


def test_a_changed_option_names_itself_on_a_fresh_machine_too(tmp_path, transport):
    build(tmp_path / "one", tmp_path / "journal", mirror=mirror(transport))
    fresh = CompileStore(tmp_path / "two", mirror=mirror(transport))
    with pytest.raises(MissedError) as caught:
        find_or_fail(fresh, make_facts(n_positions=256))
    assert caught.value.differences == {"n_positions": (128, 256)}
    assert fresh.look(make_facts(n_positions=256)) == caught.value.miss
    assert fresh.look(make_facts()) is None
    assert not finished(tmp_path / "two")


def test_a_damaged_copy_of_what_the_mirror_has_is_no_compile(tmp_path, transport):
    for role in ("model", "draft"):
        folder = build(tmp_path / "one", tmp_path / "journal", mirror=mirror(transport))
        (folder / "graphs" / "1.neff").unlink()
        store = CompileStore(tmp_path / "one", mirror=mirror(transport))
        assert store.look(make_facts(role)) is None
        assert files_of(find_or_fail(store, make_facts(role))) == expected_files()


def test_a_damaged_latest_manifest_explains_nothing_and_stops_nothing(tmp_path, transport):
    journal = tmp_path / "journal"
    build(tmp_path / "one", journal, mirror=mirror(transport))
    for path in (transport.root / "bucket/compiled/latest").rglob("manifest.json"):
        path.write_text("{")
    build(tmp_path / "two", journal, mirror=mirror(transport), options={"n_positions": 256})
    assert graphs_made(journal) == [0, 1, 2] * 2


def test_a_draft_model_s_compile_is_not_the_latest_of_the_model(tmp_path, transport):
    build(tmp_path / "one", tmp_path / "journal", mirror=mirror(transport))
    drafts = {"options": {"n_positions": 64}, "role": "draft"}
    build(tmp_path / "one", tmp_path / "journal", mirror=mirror(transport), **drafts)
    fresh = CompileStore(tmp_path / "two", mirror=mirror(transport))
    for role, compiled in (("model", 128), ("draft", 64)):
        with pytest.raises(MissedError) as caught:
            find_or_fail(fresh, make_facts(role, n_positions=256))
        assert caught.value.differences == {"n_positions": (compiled, 256)}


@pytest.mark.parametrize("server", ["one", "another"])
def test_a_draft_model_s_compile_that_is_served_is_the_latest_of_the_model_too(
    tmp_path, transport, server
):
    build(tmp_path / "one", tmp_path / "journal", mirror=mirror(transport), role="draft")
    serving = CompileStore(tmp_path / server, mirror=mirror(transport))
    find_or_fail(serving, make_facts("model"))
    transport.asked.clear()
    for role in ("model", "draft"):
        find_or_fail(serving, make_facts(role))
    assert transport.asked == [], "known of both roles"
    fresh = CompileStore(tmp_path / "fresh", mirror=mirror(transport))
    for role in ("model", "draft"):
        with pytest.raises(MissedError):
            find_or_fail(fresh, make_facts(role, n_positions=256))


def test_a_remote_place_that_cannot_be_read_stops_before_the_compile(tmp_path, transport):
    transport.broken = "access denied"
    with pytest.raises(ArtifactAccessError, match="access denied"):
        find_or_fail(CompileStore(tmp_path / "one", mirror=mirror(transport)), make_facts())


def test_a_remote_place_that_may_only_be_read_is_told_and_does_not_stop(
    tmp_path, transport, caplog
):
    transport.read_only = True
    folder = build(tmp_path / "one", tmp_path / "journal", mirror=mirror(transport))
    assert files_of(folder) == expected_files()
    events = [
        record.message.split()[0] for record in caplog.records if record.levelno > logging.INFO
    ]
    assert events == ["compile_will_not_be_pushed", "compile_not_pushed"]


def test_what_was_not_fetched_whole_is_no_compile(tmp_path, transport, monkeypatch):
    build(tmp_path / "one", tmp_path / "journal", mirror=mirror(transport))

    def lose_the_network(*_, **__):
        msg = "connection lost"
        raise ArtifactAccessError(msg)

    monkeypatch.setattr(transport, "fetch", lose_the_network)
    with pytest.raises(ArtifactAccessError, match="connection lost"):
        find_or_fail(CompileStore(tmp_path / "two", mirror=mirror(transport)), make_facts())
    assert not finished(tmp_path / "two")


def test_a_push_that_fails_is_made_up_for_at_the_next_start(tmp_path, transport, caplog):
    root, journal = tmp_path / "one", tmp_path / "journal"

    def compile_and_lose_the_network(folder):
        Compiler(journal)(folder)
        transport.broken = "connection lost"

    store = CompileStore(root, mirror=mirror(transport))
    made = make(store, make_facts(), compile_and_lose_the_network)
    assert files_of(made) == expected_files()
    assert "connection lost" in caplog.text
    transport.broken = None
    find_or_fail(store, make_facts())
    assert files_of(transport.root / "bucket/compiled" / make_facts().key) == expected_files()


@pytest.mark.parametrize("damage", ["cut", "{", "[]", "[" * 100_000], ids=lambda text: text[:3])
def test_a_damaged_remote_compile_is_never_taken(tmp_path, transport, damage):
    journal = tmp_path / "journal"
    build(tmp_path / "one", journal, mirror=mirror(transport))
    remote = transport.root / "bucket/compiled" / make_facts().key
    if damage == "cut":
        (remote / "graphs" / "1.neff").write_bytes(b"cut")
    else:
        (remote / "manifest.json").write_text(damage)
    fresh = tmp_path / "two"
    with pytest.raises(MissedError) as caught:
        find_or_fail(CompileStore(fresh, mirror=mirror(transport)), make_facts())
    assert caught.value.miss.damage is not None
    assert not finished(fresh)
    assert files_of(build(fresh, journal, mirror=mirror(transport))) == expected_files()
    assert graphs_made(journal) == [0, 1, 2] * 2
    third = find_or_fail(CompileStore(tmp_path / "three", mirror=mirror(transport)), make_facts())
    assert files_of(third) == expected_files()
