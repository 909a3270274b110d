"""A compile store's twin in S3: moto's server behind the breaking proxy."""

import json
import shutil

import pytest

from djl_python_neuronx.artifacts import manifest as manifests
from djl_python_neuronx.artifacts.manifest import unfinished
from djl_python_neuronx.artifacts.mirror import Mirror
from djl_python_neuronx.artifacts.store import CompileStore
from djl_python_neuronx.errors import ArtifactNotFoundError
from tests.artifacts.store_worker import (
    MissedError,
    build,
    expected_files,
    files_of,
    find_or_fail,
    graphs_made,
    make,
    make_facts,
)
from tests.doubles.s3_rig import settings

pytest_plugins = ["tests.doubles.s3_fixtures"]


@pytest.fixture
def machine(proxy, tmp_path):
    """A store on a machine of that name, with the common twin."""

    def settings_of(name):
        return {
            "root": tmp_path / name / "store",
            "mirror": Mirror(
                "s3://models/compiled", tmp_path / name / "downloads", settings(proxy)
            ),
        }

    return settings_of


def test_one_machine_compiles_all_others_fetch(machine, bucket, tmp_path):
    journal = tmp_path / "journal"
    build(journal=journal, **machine("one"))
    for name in ("two", "three"):
        folder = find_or_fail(CompileStore(**machine(name)), make_facts())
        assert files_of(folder) == expected_files()
        manifests.verify(folder, manifests.read(folder))
    assert graphs_made(journal) == [0, 1, 2]
    keys = {item["Key"] for item in bucket.list_objects_v2(Bucket="models")["Contents"]}
    assert keys == {
        *(f"compiled/{make_facts().key}/{name}" for name in (*expected_files(), "manifest.json")),
        "compiled/latest/sampled-aa/manifest.json",
        "compiled/write-test/manifest.json",
    }


def test_a_download_that_is_damaged_on_this_machine_is_fetched_again(machine, tmp_path):
    build(journal=tmp_path / "journal", **machine("one"))
    two = CompileStore(**machine("two"))
    folder = find_or_fail(two, make_facts())
    shutil.rmtree(folder)
    (graph,) = (tmp_path / "two" / "downloads").glob("*/versions/*/files/graphs/0.neff")
    graph.write_bytes(bytes(graph.stat().st_size))
    assert files_of(find_or_fail(two, make_facts())) == expected_files()


@pytest.mark.parametrize("left", [None, unfinished(expected_files())])
def test_a_push_that_was_cut_off_is_no_compile(machine, bucket, tmp_path, left):
    journal = tmp_path / "journal"
    build(journal=journal, **machine("one"))
    manifest = {"Bucket": "models", "Key": f"compiled/{make_facts().key}/manifest.json"}
    if left is None:
        bucket.delete_object(**manifest)
    else:
        bucket.put_object(**manifest, Body=json.dumps(left).encode())
    build(journal=journal, **machine("two"))
    assert graphs_made(journal) == [0, 1, 2] * 2
    find_or_fail(CompileStore(**machine("three")), make_facts())


def test_a_changed_option_names_itself_with_the_place_in_s3(machine, tmp_path):
    build(journal=tmp_path / "journal", **machine("one"))
    with pytest.raises(MissedError) as caught:
        find_or_fail(CompileStore(**machine("two")), make_facts(n_positions=256))
    assert caught.value.differences == {"n_positions": (128, 256)}
    assert caught.value.miss.nearest[0] == f"s3://models/compiled/{make_facts().key}"


def test_a_bucket_that_is_not_there_is_told_before_the_compile(proxy, tmp_path):
    mirror = Mirror("s3://modles/compiled", tmp_path / "downloads", settings(proxy))
    store = CompileStore(tmp_path / "store", mirror=mirror)
    with pytest.raises(ArtifactNotFoundError, match="modles"):
        make(store, make_facts(), None)
