"""One place for compiled files, and writable copies of it."""

import multiprocessing
import os
from pathlib import Path

import pytest

from djl_python_neuronx.artifacts.store import copy_once, locate
from djl_python_neuronx.errors import (
    ArtifactAccessError,
    IncompatibleOptionsError,
    InvalidOptionError,
)

DEFAULT = Path("/default")


@pytest.mark.parametrize(
    ("option", "environ", "neff_cache", "origin"),
    [
        (None, {}, "/default", "default"),
        ("", {"NEURON_COMPILE_CACHE_URL": " "}, "/default", "default"),
        ("/a/", {}, "/a", "option.x"),
        ("s3://b/c/", {}, "s3://b/c", "option.x"),
        (None, {"NEURON_COMPILE_CACHE_URL": "s3://b"}, "s3://b", "environment NEURON_COMPILE_CACHE_URL"),
        (None, {"NEURON_COMPILE_CACHE_URL": "file:///a"}, "/a", "environment NEURON_COMPILE_CACHE_URL"),
        (None, {"NEURON_CC_FLAGS": "-O1 --cache_dir=/a -O2"}, "/a", "--cache_dir in environment NEURON_CC_FLAGS"),
        ("/a", {"NEURON_COMPILE_CACHE_URL": "/a/", "NEURON_CC_FLAGS": "--cache_dir /a"}, "/a", "option.x"),
    ],
)  # fmt: skip
def test_whoever_names_it_the_store_lies_in_it(option, environ, neff_cache, origin):
    place = locate(option, "option.x", environ, DEFAULT)
    assert (place.neff_cache, place.origin) == (neff_cache, origin)
    assert place.store == f"{neff_cache}/djl-neuronx"
    assert place.is_remote == neff_cache.startswith("s3:")


def test_two_places_are_an_error_with_both_and_who_named_them():
    environ = {"NEURON_COMPILE_CACHE_URL": "s3://b/c", "NEURON_CC_FLAGS": "--cache_dir=/a"}
    with pytest.raises(IncompatibleOptionsError) as caught:
        locate("/d", "option.x", environ, DEFAULT)
    for part in ("/d (option.x)", "s3://b/c (environment NEURON_C", "/a (--cache_dir in env"):
        assert part in str(caught.value)


@pytest.mark.parametrize("value", ["relative/folder", "gs://bucket/x", "s3://", "file://host/a"])
def test_other_places_are_refused(value):
    with pytest.raises(InvalidOptionError, match="NEURON_COMPILE_CACHE_URL") as caught:
        locate(None, "option.x", {"NEURON_COMPILE_CACHE_URL": value}, DEFAULT)
    assert repr(value) in str(caught.value)


@pytest.fixture
def cache(tmp_path):
    module = tmp_path / "ro" / "neuronxcc-2.16" / "MODULE_1"
    module.mkdir(parents=True)
    (module / "model.neff").write_bytes(b"neff")
    (module / "model.neff").chmod(0o444)
    module.chmod(0o555)
    return tmp_path / "ro"


def test_a_copy_can_be_written_and_stays(cache, tmp_path):
    copy = copy_once(cache, tmp_path / "copies")
    neff = copy / "neuronxcc-2.16" / "MODULE_1" / "model.neff"
    assert neff.stat().st_mode & 0o200
    assert neff.parent.stat().st_mode & 0o200
    neff.with_name("new").write_bytes(b"new")
    assert copy_once(cache, tmp_path / "copies") == copy
    assert neff.with_name("new").read_bytes() == b"new"
    assert [path.name for path in cache.rglob("new")] == []


def test_another_source_is_another_copy(cache, tmp_path):
    first = copy_once(cache, tmp_path / "copies")
    (cache / "neuronxcc-2.16" / "MODULE_2").mkdir()
    (cache / "neuronxcc-2.16" / "MODULE_2" / "model.neff").write_bytes(b"more")
    second = copy_once(cache, tmp_path / "copies")
    assert first != second
    assert (second / "neuronxcc-2.16" / "MODULE_2" / "model.neff").read_bytes() == b"more"


def test_many_processes_get_one_copy(cache, tmp_path):
    pool = multiprocessing.get_context("forkserver").Pool(8)
    with pool:
        places = pool.starmap(copy_once, [(cache, tmp_path / "copies")] * 16)
    assert len(set(places)) == 1
    shown = [path.name for path in (tmp_path / "copies").iterdir() if path.name[0] != "."]
    assert shown == [places[0].name]


def test_a_killed_copy_is_not_taken_for_one(cache, tmp_path):
    name = copy_once(cache, tmp_path / "elsewhere").name
    (tmp_path / "copies" / ".partial" / name).mkdir(parents=True)
    copy = copy_once(cache, tmp_path / "copies")
    assert (copy / "neuronxcc-2.16" / "MODULE_1" / "model.neff").exists()


def test_a_copy_reaches_the_disk_before_it_gets_its_name(cache, tmp_path, monkeypatch):
    """Else a crash of the machine leaves files of zeros, which nothing would notice."""
    fsync, rename, synced, before = os.fsync, Path.rename, set(), {}

    def note(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def note_rename(path, target):
        before[target] = set(synced)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Path, "rename", note_rename)
    copy = copy_once(cache, tmp_path / "copies")
    files = {path.stat().st_ino for path in copy.rglob("*") if path.is_file()}
    assert files
    assert files <= before[copy]


def test_nowhere_to_copy_to_is_told(cache, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ArtifactAccessError, match="file"):
        copy_once(cache, tmp_path / "file")
