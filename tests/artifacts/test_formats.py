"""What `detect` sees in good, damaged and foreign folders."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from djl_python_neuronx.artifacts import formats
from djl_python_neuronx.artifacts.formats import detect
from djl_python_neuronx.errors import (
    ArtifactAccessError,
    ArtifactError,
    ArtifactNotFoundError,
    UnknownFormatError,
)

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}
SIZES = {"F32": 4, "BF16": 2}
EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-llama"


def safetensors(path, **tensors):
    """Write a file by the format's description; name=(dtype, number of elements)."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, count) in tensors.items():
        begin, end = end, end + SIZES[dtype] * count
        header[name] = {"dtype": dtype, "shape": [count], "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(end))


def write_json(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture
def folder(tmp_path):
    """A whole model in one file."""
    write_json(tmp_path / "config.json", CONFIG)
    safetensors(tmp_path / "model.safetensors", a=("BF16", 8), b=("F32", 2))
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    """A whole model in two files."""
    write_json(tmp_path / "config.json", CONFIG)
    safetensors(tmp_path / "one.safetensors", a=("F32", 3))
    safetensors(tmp_path / "two.safetensors", b=("F32", 3))
    index = {"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    write_json(tmp_path / "model.safetensors.index.json", index)
    return tmp_path


def test_one_file(folder):
    artifact = detect(folder)
    assert artifact.path == folder
    assert (artifact.format, artifact.backend, artifact.kind) == (
        "huggingface",
        None,
        "safetensors",
    )
    assert (artifact.model_type, artifact.architectures) == ("llama", ("LlamaForCausalLM",))
    assert artifact.config == CONFIG
    assert artifact.eos_ids == {2}
    assert artifact.dtype == "bfloat16", "16 bytes of it against 8 of float32"


def test_shards(sharded):
    assert detect(sharded).dtype == "float32"


def test_the_committed_example_agrees_with_the_safetensors_library():
    safe_open = pytest.importorskip("safetensors").safe_open
    artifact = detect(EXAMPLE)
    with safe_open(EXAMPLE / "model.safetensors", framework="numpy") as file:
        dtypes = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert {formats._DTYPES[dtype] for dtype in dtypes} == {artifact.dtype}


def test_safetensors_are_preferred_to_pickle_and_pickle_is_accepted(folder):
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    assert detect(folder).kind == "safetensors"
    (folder / "model.safetensors").unlink()
    write_json(folder / "config.json", {**CONFIG, "torch_dtype": "float16"})
    artifact = detect(folder)
    assert artifact.kind == "pickle"
    assert artifact.dtype == "float16", "a pickle is not opened: config.json tells"


def test_links_out_of_the_folder_are_followed(folder, tmp_path_factory):
    """The hub's cache: snapshots/<revision>/* are links to ../../blobs/*."""
    snapshot = tmp_path_factory.mktemp("snapshot")
    for file in folder.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert detect(snapshot).dtype == "bfloat16"
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ArtifactNotFoundError, match=r"model\.safetensors is a link to a file that is gone"
    ):
        detect(snapshot)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [2, 5]}, {"eos_token_id": 9}, {2, 5}),
        ({"eos_token_id": 0}, {"eos_token_id": 9}, {0}),
        ({"eos_token_id": None}, {"eos_token_id": 9}, {9}),
        (None, {"eos_token_id": [7, 8]}, {7, 8}),
        (None, {"text_config": {"eos_token_id": 3}}, {3}),
        ({}, {}, set()),
    ],
)
def test_eos_ids(folder, generation, config, expected):
    write_json(folder / "config.json", {"model_type": "x", **config})
    if generation is not None:
        write_json(folder / "generation_config.json", generation)
    assert detect(folder).eos_ids == expected


@pytest.mark.parametrize("wrong", ["</s>", [2, "5"], -1, True])
def test_an_eos_that_is_no_id_is_an_error(folder, wrong):
    write_json(folder / "config.json", {"model_type": "x", "eos_token_id": wrong})
    with pytest.raises(ArtifactError, match="eos_token_id is"):
        detect(folder)


@pytest.mark.parametrize("nested", [False, True])
def test_eos_ids_beyond_the_vocabulary_are_dropped_and_told(folder, caplog, nested):
    config = {"vocab_size": 10, "eos_token_id": [9, 10**30]}
    whole = {"model_type": "x", **({"text_config": config} if nested else config)}
    write_json(folder / "config.json", whole)
    write_json(folder / "generation_config.json", {"eos_token_id": 10})
    artifact = detect(folder)
    assert artifact.eos_ids == artifact.eos_ids == {9}, "config.json's, as the other has none left"
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "eos_ids_unused ids=[10] vocab_size=10",
        f"eos_ids_unused ids=[{10**30}] vocab_size=10",
    ]


@pytest.mark.parametrize(
    ("written", "read"),
    [("LlamaForCausalLM", ("LlamaForCausalLM",)), (["A", 5], ("A",)), (5, ()), (None, ())],
)
def test_architectures_of_any_type(folder, written, read):
    write_json(folder / "config.json", {**CONFIG, "architectures": written})
    assert detect(folder).architectures == read


def test_a_missing_folder_names_path_origin_and_fix(tmp_path):
    with pytest.raises(
        ArtifactNotFoundError, match=r"/gone \(from OPTION_MODEL_ID\) does not exist.*[Cc]orrect"
    ):
        detect(tmp_path / "gone", origin="OPTION_MODEL_ID")
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactNotFoundError, match="is a file; expected a folder"):
        detect(tmp_path / "file")


def test_an_unknown_format_lists_what_was_sought_and_found(tmp_path):
    with pytest.raises(UnknownFormatError, match=r"looked for config\.json.*found nothing"):
        detect(tmp_path)
    for i in range(12):
        (tmp_path / f"file{i:02}").touch()
    with pytest.raises(UnknownFormatError, match=r"found file00, .*file07 and 4 more"):
        detect(tmp_path)


def test_two_formats_that_fit_are_an_error_that_lists_both(folder, monkeypatch):
    class Twin(formats.HuggingFace):
        name = "twin"
        looks_for = "config.json too"

    monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, Twin()))
    with pytest.raises(
        ArtifactError, match=r"huggingface \(config.*\) and twin \(config\.json too\)"
    ):
        detect(folder)


def test_missing_weights_list_what_was_expected_and_found(folder):
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    with pytest.raises(
        ArtifactNotFoundError,
        match=r"expected model\.safetensors or .*found config\.json, weights\.",
    ):
        detect(folder)


def test_missing_shards_are_listed(sharded):
    (sharded / "two.safetensors").unlink()
    with pytest.raises(ArtifactNotFoundError, match=r"1 of 2 weight files .*: two\.safetensors"):
        detect(sharded)


@pytest.mark.parametrize("kept", [0, 3, 8, 40, -1])
def test_a_truncated_file_names_both_sizes(sharded, kept):
    path = sharded / "two.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    with pytest.raises(
        ArtifactError, match=rf"two\.safetensors is cut off.* the file has {len(whole[:kept])}\."
    ) as caught:
        detect(sharded)
    if kept == -1:
        assert f"asks for {len(whole)} bytes" in str(caught.value)


def test_a_file_with_bytes_to_spare_is_damaged_too(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ArtifactError, match="cut off or damaged"):
        detect(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32"}}',
        b'{"a": {"dtype": "F32", "data_offsets": [0]}}',
        b"\xff\xfe\xff",
        b'{"a": {"dtype": "F32", "data_offsets": [0, 1e999]}}',
        b'{"a": {"dtype": "F32", "data_offsets": [0, 4.0]}}',
        b'{"a": {"dtype": "F32", "data_offsets": [0, "4"]}}',
        b'{"a": {"dtype": 5, "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "data_offsets": [-8, 0]}}',
        b'{"a": {"dtype": "F32", "data_offsets": [0, -8]}}',
        b'{"a": {"dtype": "F32", "data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "F32", "data_offsets": [0, 8]}, "b": {"dtype": "F32", "data_offsets": [4, 12]}}',
        b'{"a": {"dtype": "F32", "data_offsets": [0, 8]}, "b": {"dtype": "F32", "data_offsets": [40, 0]}}',
    ],
)
def test_a_malformed_header(folder, header):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ArtifactError, match="malformed safetensors header"):
        detect(folder)


def test_a_huge_header_length_is_not_read(folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + bytes(100))
    with pytest.raises(ArtifactError, match="the file has 108"):
        detect(folder)


def test_a_git_lfs_pointer_is_named_as_such(folder):
    (folder / "model.safetensors").write_bytes(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )
    with pytest.raises(ArtifactError, match="git lfs pull"):
        detect(folder)


def test_an_index_of_another_model(sharded):
    safetensors(sharded / "two.safetensors", c=("F32", 3))
    with pytest.raises(
        ArtifactError, match=r"two\.safetensors lacks tensors that the index places there: b\."
    ):
        detect(sharded)


@pytest.mark.parametrize("shard", ["../config.json", "/etc/passwd", "sub/one.safetensors", 3, ""])
def test_an_index_names_only_files_beside_it(sharded, shard):
    write_json(sharded / "model.safetensors.index.json", {"weight_map": {"a": shard}})
    with pytest.raises(ArtifactError, match="expected the name of a file beside it"):
        detect(sharded)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {}}])
def test_an_index_without_a_map(sharded, index):
    write_json(sharded / "model.safetensors.index.json", index)
    with pytest.raises(ArtifactError, match="no weight_map"):
        detect(sharded)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff{}", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[]", "holds a JSON list; expected an object"),
        (b"{}", "names no model_type"),
        (b'{"model_type": 3}', "names no model_type"),
    ],
)
def test_a_malformed_config(folder, text, message):
    (folder / "config.json").write_bytes(text)
    with pytest.raises(ArtifactError, match=message):
        detect(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_what_cannot_be_read_is_an_access_error(folder, name):
    """A folder in a file's place: permissions do not stop the user that many containers run as."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    with pytest.raises(ArtifactAccessError, match="cannot be read: Is a directory"):
        detect(folder)
