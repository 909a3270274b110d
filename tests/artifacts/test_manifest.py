"""Manifests, facts and digests: what they prove, and what they refuse."""

import hashlib
import json
import os
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.numpy import save

from djl_python_neuronx.artifacts import manifest as manifests
from djl_python_neuronx.artifacts.atomic import whole_file
from djl_python_neuronx.artifacts.folder import read_json
from djl_python_neuronx.artifacts.manifest import (
    ABSENT,
    CompileFacts,
    Manifest,
    artifact_digest,
    check_facts,
    differences,
)
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.errors import (
    ArtifactAccessError,
    ArtifactError,
    ArtifactMismatchError,
    ArtifactNotFoundError,
)
from tests.artifacts.folders import safetensors
from tests.artifacts.store_worker import make_facts

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
_OPTIONS = st.dictionaries(st.text(max_size=3), _JSON, max_size=3)


@given(_OPTIONS, _OPTIONS)
def test_keys_are_equal_if_and_only_if_nothing_differs(first, second):
    facts = [
        CompileFacts(**{**make_facts().model_dump(), "graph_options": one})
        for one in (first, second)
    ]
    assert (facts[0].key == facts[1].key) == (not differences(*facts))


def test_the_key_of_a_model_is_the_one_of_before_roles():
    text = json.dumps(make_facts("model").model_dump(exclude={"role"}), sort_keys=True)
    assert make_facts("model").key == hashlib.sha256(text.encode()).hexdigest()[:32]
    assert make_facts("draft").key != make_facts("model").key


@given(_OPTIONS)
def test_the_key_does_not_depend_on_order_or_on_being_read_back(options):
    facts = CompileFacts(**{**make_facts().model_dump(), "graph_options": options})
    turned = dict(reversed(options.items()))
    again = CompileFacts(**{**make_facts().model_dump(), "graph_options": turned})
    read = CompileFacts.model_validate(json.loads(facts.model_dump_json()))
    assert facts.key == again.key == read.key
    assert differences(facts, read) == {}


@pytest.mark.parametrize(
    ("wanted", "compiled", "expected"),
    [
        ({"a": 1}, {"a": 2}, ("a", 2, 1)),
        ({"a": 1}, {"a": 1.0}, ("a", 1.0, 1)),
        ({"a": 1}, {"a": True}, ("a", True, 1)),
        ({"a": None}, {}, ("a", ABSENT, None)),
        ({}, {"a": 1}, ("a", 1, ABSENT)),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3, "c": 2}}, ("a.b", 3, 1)),
        ({"a": {}}, {}, ("a", ABSENT, {})),
        ({"a.b": 1}, {"a.b": 2}, ('"a.b"', 2, 1)),
        ({"a": [1, 2]}, {"a": [2, 1]}, ("a", [2, 1], [1, 2])),
    ],
)  # fmt: skip
def test_a_difference_is_named(wanted, compiled, expected):
    facts = [
        CompileFacts(**{**make_facts().model_dump(), "graph_options": one})
        for one in (wanted, compiled)
    ]
    assert differences(*facts) == {expected[0]: expected[1:]}


def test_a_dotted_name_is_not_taken_for_a_table():
    assert differences(make_facts(a={"b": 1}), make_facts(**{"a.b": 1})) == {
        '"a.b"': (1, ABSENT),
        "a.b": (ABSENT, 1),
    }


def test_every_differing_fact_is_in_the_error():
    wanted = make_facts(tp_degree=2).model_copy(
        update={"compiler_version": "2.17", "target": "trn1"}
    )
    with pytest.raises(ArtifactMismatchError) as caught:
        check_facts(wanted, make_facts(), "there")
    assert caught.value.differences == {
        "compiler_version": ("2.16.372.0", "2.17"),
        "target": ("inf2", "trn1"),
        "tp_degree": (ABSENT, 2),
    }
    assert "tp_degree: compiled (absent), wanted 2" in str(caught.value)
    check_facts(wanted, wanted, "there")


def test_no_option_has_the_name_of_a_fact():
    assert not {*CompileFacts.model_fields} & {*ServingOptions.model_fields}


@pytest.mark.parametrize("options", [{"a": float("nan")}, {"a": object()}, {"a": {1}}])
def test_options_that_no_manifest_can_hold_are_refused(options):
    with pytest.raises(ValidationError):
        make_facts(**options)


def test_tuples_are_lists_as_after_reading():
    assert make_facts(a=(1, 2)) == make_facts(a=[1, 2])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("a", "b", "sub/c"):
        (tmp_path / name).write_bytes(name.encode() * 100)
    manifests.write(tmp_path, make(tmp_path))
    return tmp_path


def make(folder):
    return Manifest.of(folder, make_facts(), effective_options={"x": (1,)}, packages={"torch": "2"})


def test_what_is_written_reads_back_and_holds(folder):
    read = manifests.read(folder)
    assert read.model_copy(update={"created": ""}) == make(folder).model_copy(
        update={"created": ""}
    )
    assert set(read.files) == {"a", "b", "sub/c"}
    manifests.verify(folder, read)


def test_each_fault_is_named(folder):
    read = manifests.read(folder)
    (folder / "a").unlink()
    (folder / "b").write_bytes(b"B" * 100)
    (folder / "sub" / "d").write_bytes(b"")
    with pytest.raises(ArtifactError, match="missing a; changed b; not of it sub/d"):
        manifests.verify(folder, read)
    with pytest.raises(ArtifactError, match="missing a; not of it sub/d"):
        manifests.verify(folder, read, hashes="none")
    with pytest.raises(ArtifactError, match=r"missing a\."):
        manifests.verify(folder, read, hashes="none", exact=False)


def test_of_a_folder_that_nobody_has_looked_at_a_bounded_part_is_hashed(folder, monkeypatch):
    """The smallest files: whoever made the folder could list right hashes of all others too."""
    monkeypatch.setattr(manifests, "_MAX_HASHED_BYTES", 250)
    (folder / "large").write_bytes(b"x" * 300)
    read = make(folder)
    (folder / "large").write_bytes(b"y" * 300)
    manifests.verify(folder, read, hashes="without weights")
    with pytest.raises(ArtifactError, match="changed large"):
        manifests.verify(folder, read)
    (folder / "a").write_bytes(b"A" * 100)
    with pytest.raises(ArtifactError, match=r"changed a\."):
        manifests.verify(folder, read, hashes="without weights")


@pytest.mark.parametrize(
    "name",
    ["a.safetensors", "sub/b.bin", "c.pt", "pytorch_model.bin/p1", "sub/pytorch_model.bin/p1"],
)
def test_weights_are_hashed_only_with_all_and_else_sampled(folder, name):
    """Of 64 KiB a tensor is 16, of which 4 in the middle are read; of another file all are."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {key: np.full(2**12, key, np.float32) for key in range(4)}
    content = save({str(key): tensor for key, tensor in tensors.items()})
    path.write_bytes(content)
    read = make(folder)
    assert read.files[name].sampled
    tensors[1], tensors[2] = tensors[2], tensors[1]
    path.write_bytes(save({str(key): tensor for key, tensor in tensors.items()}))
    manifests.verify(folder, read, hashes="none")
    for hashes in ("without weights", "all"):
        with pytest.raises(ArtifactError, match=f"changed {name}"):
            manifests.verify(folder, read, hashes=hashes)
    path.write_bytes(content[:-1] + b"y")
    with pytest.raises(ArtifactError, match=f"changed {name}"):
        manifests.verify(folder, read, hashes="all")
    if name.endswith(".safetensors"):
        manifests.verify(folder, read, hashes="without weights")
        path.write_bytes(b"damaged".ljust(len(content)))
        with pytest.raises(ArtifactError, match=f"changed {name}"):
            manifests.verify(folder, read, hashes="without weights")
        assert make(folder).files[name].sampled == ""
    entry = read.files[name].model_copy(update={"sampled": ""})
    before = read.model_copy(update={"files": {**read.files, name: entry}})
    manifests.verify(folder, before, hashes="without weights")


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_what_is_no_file_is_refused(folder, kind):
    if kind == "link":
        (folder / "e").symlink_to(folder / "a")
    else:
        os.mkfifo(folder / "e")
    with pytest.raises(ArtifactError, match="e is a link or a special file"):
        make(folder)
    with pytest.raises(ArtifactError, match="e is a link or a special file"):
        manifests.verify(folder, manifests.read(folder))


def test_a_manifest_that_is_a_link_is_refused(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere.json"
    (folder / manifests.FILE_NAME).rename(elsewhere)
    (folder / manifests.FILE_NAME).symlink_to(elsewhere)
    with pytest.raises(ArtifactError, match=r"manifest\.json is a link or a special file"):
        manifests.verify(folder, manifests.read(folder))


def change(folder, **changes):
    path = folder / "manifest.json"
    value = read_json(path)
    value.update(changes)
    path.write_text(json.dumps(value))


ENTRY = {"bytes": 1, "sha256": "0" * 64}
BAD = {
    "future": ({"version": 2, "package_version": "9.9"}, r"version 2, of 9\.9 .*Install"),
    "past": ({"version": 0}, "expected 'djl_python_neuronx', 1"),
    "text version": ({"version": "1"}, "version '1'"),
    "another's": ({"format": "web"}, "'web'"),
    "parent": ({"files": {"../a": ENTRY}}, r"'\.\./a' is not the path"),
    "inner parent": ({"files": {"sub/../../a": ENTRY}}, "is not the path"),
    "absolute": ({"files": {"/etc/passwd": ENTRY}}, "'/etc/passwd' is not the path"),
    "backslash": ({"files": {"..\\a": ENTRY}}, "is not the path"),
    "nul": ({"files": {"a\0b": ENTRY}}, "is not the path"),
    "itself": ({"files": {"manifest.json": ENTRY}}, "is not the path"),
    "empty": ({"files": {"": ENTRY}}, "is not the path"),
    "negative": ({"files": {"a": {**ENTRY, "bytes": -1}}}, r"files\.a\.bytes"),
    "text size": ({"files": {"a": {**ENTRY, "bytes": "1"}}}, r"files\.a\.bytes"),
    "no hash": ({"files": {"a": {"bytes": 1}}}, r"files\.a\.sha256"),
    "short hash": ({"files": {"a": {**ENTRY, "sha256": "00"}}}, r"files\.a\.sha256"),
    "list": ({"files": []}, "files"),
    "no facts": ({"facts": None}, "facts"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_manifest_that_is_not_right_is_refused(folder, kind):
    changes, message = BAD[kind]
    change(folder, **changes)
    with pytest.raises(ArtifactError, match=message) as caught:
        manifests.read(folder)
    assert str(folder / "manifest.json") in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_manifest_that_is_no_json_object_is_refused(folder, content):
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        manifests.read(folder)


def test_no_manifest_means_not_finished(tmp_path):
    with pytest.raises(ArtifactNotFoundError, match="written last"):
        manifests.read(tmp_path)


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "folder").write_bytes(b"a file")
    with pytest.raises(ArtifactAccessError, match="folder"):
        manifests.write(tmp_path / "folder", make(tmp_path))


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "graph"
    path.write_bytes(b"old")

    def fail():
        with whole_file(path) as temporary:
            temporary.write_bytes(b"new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [one.name for one in tmp_path.iterdir()] == ["graph"]
    assert path.read_bytes() == b"old"
    with whole_file(path) as temporary:
        temporary.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    safetensors(folder / "model.safetensors", {"a": ("F32", [16, 256]), "b": ("BF16", [128, 128])})
    return folder


def test_a_digest_does_not_depend_on_what_no_graph_does(model, tmp_path):
    before = artifact_digest(model)
    (model / "README.md").write_text("new")
    (model / "tokenizer.json").write_text("{}")
    (model / "pytorch_model.bin").write_bytes(b"the same weights, once more")
    (model / ".cache").mkdir()
    os.utime(model / "model.safetensors", (0, 0))
    moved = model.rename(tmp_path / "moved")
    assert before == artifact_digest(moved)
    assert before.startswith("sampled:")


@pytest.mark.parametrize("kind", ["safetensors", "pickle", "split"])
def test_a_digest_sees_another_model(model, kind):
    weights = model / "model.safetensors"
    if kind != "safetensors":
        weights.unlink()
        weights = model / "pytorch_model.bin"
        if kind == "split":
            weights.mkdir()
            weights = weights / "p0.wte"
        weights.write_bytes(random.Random(0).randbytes(50_000))
    seen = {artifact_digest(model)}
    trained = random.Random(1).randbytes(weights.stat().st_size)
    if kind == "safetensors":
        content = weights.read_bytes()
        header = 8 + int.from_bytes(content[:8], "little")
        trained = content[:header] + trained[header:]
    weights.write_bytes(trained)
    seen.add(artifact_digest(model))
    (model / "config.json").write_text('{"model_type": "llama", "rope_theta": 1}')
    seen.add(artifact_digest(model))
    (model / "modeling_x.py").write_text("")
    seen.add(artifact_digest(model))
    assert len(seen) == 4


def test_a_digest_sees_another_shape_of_the_same_bytes(model):
    before = artifact_digest(model)
    safetensors(model / "model.safetensors", {"a": ("F32", [32, 128]), "b": ("BF16", [128, 128])})
    assert artifact_digest(model) != before


def test_a_damaged_checkpoint_has_no_digest(model):
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[:-1])
    with pytest.raises(ArtifactError, match="cut off"):
        artifact_digest(model)
