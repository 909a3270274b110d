"""Each format goes to S3 and comes back the same, whatever breaks on the way."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from djl_python_neuronx.artifacts.formats import detect
from djl_python_neuronx.errors import ArtifactAccessError
from tests.artifacts import folders
from tests.doubles.s3_proxy import Fault
from tests.doubles.s3_rig import URI, contents, published, put, s3, settings

pytest_plugins = ["tests.doubles.s3_fixtures"]


def pickled(path):
    """A whole model as torch.save writes it: fetched, because nothing safer lies beside it."""
    folders.huggingface(path)
    (path / "model.safetensors").unlink()
    folders.pickled(path / "pytorch_model.bin")
    return path


BUILDERS = {
    **folders.BUILDERS,
    "sharded": folders.sharded,
    "pickled": pickled,
    "optimum_hlo": folders.optimum_hlo,
    "optimum_cut": folders.optimum_cut,
}
KINDS = ("reset", "error", "cut", "lie")


def build(name, path, *, seed=0):
    """A folder whose tensors are not zeros, which is what a file has where nothing was written."""
    BUILDERS[name](path)
    for file in path.rglob("*.safetensors"):
        raw = file.read_bytes()
        begin = 8 + int.from_bytes(raw[:8], "little")
        choose = random.Random(f"{seed} {file.relative_to(path)}")
        file.write_bytes(raw[:begin] + choose.randbytes(len(raw) - begin))
    return path


def facts(folder):
    """The findings of `detect` in a folder, without its place."""
    found = detect(folder)
    return replace(
        found,
        path=None,
        weights=[replace(one, folder=one.folder.relative_to(folder)) for one in found.weights],
        compiled=found.compiled and found.compiled.relative_to(folder),
        unused=found.unused.replace(str(folder), ""),
    )


def load(proxy, root, **environ):
    """As the start of a server fetches: only what a format needs."""
    return s3.fetch(URI, root, settings(proxy, **environ))


def assert_same(folder, source):
    assert contents(folder) == contents(source)
    assert facts(folder) == facts(source)


def is_content_of(name):
    return lambda request: request.is_data and request.path == f"/models/llama/{name}"


@pytest.mark.parametrize("name", BUILDERS)
def test_what_comes_back_is_what_went_out(proxy, bucket, tmp_path, name):
    """The first answer for each object is broken; the next start asks for none."""
    source = build(name, tmp_path / "source")
    files = sorted(contents(source), key=lambda file: (source / file).stat().st_size, reverse=True)
    put(bucket, contents(source))
    # The largest files, which are weights, get one kind each.
    proxy.rules = [
        Fault(kind, when=is_content_of(file))
        for file, kind in zip(files, itertools.cycle(KINDS), strict=False)
    ]
    folder = load(proxy, tmp_path / "cache")
    assert_same(folder, source)
    assert {fault.done for fault in proxy.rules} == {1}
    asked = proxy.data_requests()
    assert load(proxy, tmp_path / "cache") == folder
    assert proxy.data_requests() == asked


@pytest.mark.parametrize("name", ["sharded", "djl_neuronx", "nxdi"])
def test_one_file_that_never_comes_holds_all_back(proxy, bucket, tmp_path, name):
    source = build(name, tmp_path / "source")
    largest = max(contents(source), key=lambda file: (source / file).stat().st_size)
    put(bucket, contents(source))
    proxy.rules = [Fault("error", when=is_content_of(largest), times=10**6)]
    with pytest.raises(ArtifactAccessError, match="SlowDown"):
        load(proxy, tmp_path / "cache", AWS_MAX_ATTEMPTS="1")
    assert published(tmp_path / "cache") == []
    proxy.rules = []
    assert_same(load(proxy, tmp_path / "cache"), source)


@pytest.mark.parametrize("name", ["sharded", "djl_neuronx", "nxdi"])
def test_a_model_that_is_replaced_meanwhile_is_not_mixed(proxy, bucket, tmp_path, name):
    """Names and sizes stay: what would be taken from the old one nobody could see later."""
    old, new = (contents(build(name, tmp_path / f"{seed}", seed=seed)) for seed in range(2))
    assert old.keys() == new.keys()
    put(bucket, old)
    # The change becomes known when one of the weights is asked for that differ.
    changed = max(file for file in old if old[file] != new[file])
    proxy.rules = [Fault("call", when=is_content_of(changed), action=lambda: put(bucket, new))]
    assert contents(load(proxy, tmp_path / "cache")) == new


def test_our_own_output_goes_up_and_comes_down_through_faults(proxy, bucket, tmp_path):
    source = build("djl_neuronx", tmp_path / "source")
    going_up = [
        Fault(kind, when=lambda r: r.method == "PUT", times=2) for kind in ("error", "reset")
    ]
    going_up.append(Fault("reset", when=lambda r: r.method == "GET", times=2))
    proxy.rules = list(going_up)
    s3.upload(source, URI, settings(proxy))
    coming_down = [Fault(kind, times=2) for kind in KINDS]
    proxy.rules = list(coming_down)
    assert_same(load(proxy, tmp_path / "cache"), source)
    assert {fault.done for fault in [*going_up, *coming_down]} == {2}
