"""Conversions there and back against the libraries' own readers and writers; what is cut short leaves nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from djl_python_neuronx.artifacts import convert as module  # noqa: E402
from djl_python_neuronx.artifacts.atomic import flock  # noqa: E402
from djl_python_neuronx.artifacts.convert import convert, write_first_layers  # noqa: E402
from djl_python_neuronx.artifacts.formats import detect  # noqa: E402
from djl_python_neuronx.artifacts.tensor_files import DTYPES  # noqa: E402
from djl_python_neuronx.errors import (  # noqa: E402
    ArtifactAccessError,
    ArtifactError,
    ArtifactNotFoundError,
)
from tests.artifacts import folders  # noqa: E402
from tests.doubles.tiny_models import load_reference, save_tiny_model  # noqa: E402


def tensors():
    """Of several types and shapes: none, empty, one element, not contiguous, part of a larger storage."""
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(4, 6, generator=generator) for name in folders.tensor_names()}
    made["model.norm.weight"] = made["model.norm.weight"].to(torch.bfloat16)
    made["model.layers.0.mlp.up_proj.weight"] = torch.randn(6, 4).t()
    made["model.layers.1.mlp.up_proj.weight"] = torch.randn(8, 6)[2:6]
    made["scale"] = torch.tensor(3.5, dtype=torch.float64)
    made["empty"] = torch.empty(0, 3, dtype=torch.float16)
    made["mask"] = torch.tensor([True, False, True])
    made["ids"] = torch.arange(7)
    made["nan bits/and a strange name"] = torch.tensor([float("nan"), -0.0, float("inf")])
    made["eight"] = torch.randn(5).to(torch.float8_e4m3fn)
    return made


def bits(tensor):
    return (
        tensor.dtype,
        tuple(tensor.shape),
        tensor.contiguous().reshape(-1).view(torch.uint8).tolist(),
    )


def same(one, other):
    return {name: bits(tensor) for name, tensor in one.items()} == {
        name: bits(tensor) for name, tensor in other.items()
    }


def read_split(folder):
    """As transformers-neuronx reads it: by the list, one file after the other."""
    inner = folder / "pytorch_model.bin"
    files = json.loads((inner / "key_to_filename.json").read_text(encoding="utf-8"))
    return {name: torch.load(inner / file, weights_only=True) for name, file in files.items()}


@pytest.fixture
def whole(tmp_path):
    """A model in one safetensors file, written by the library."""
    path = folders.huggingface(tmp_path / "whole")
    save_file(
        {name: one.contiguous() for name, one in tensors().items()}, path / "model.safetensors"
    )
    return path


@pytest.fixture
def split(tmp_path, whole):
    convert(whole, tmp_path / "split", "split")
    return tmp_path / "split"


def test_safetensors_to_split_has_each_tensor_in_a_file_of_its_own_size(whole, split):
    expected = load_file(whole / "model.safetensors")
    assert same(read_split(split), expected)
    assert detect(split).kind == "split"
    sizes = [file.stat().st_size for file in (split / "pytorch_model.bin").glob("p*")]
    assert len(sizes) == len(expected)
    assert max(sizes) < 4096, "a tensor was saved with the storage that it is a view of"


def test_there_and_back(tmp_path, whole, split):
    convert(split, tmp_path / "back", "safetensors")
    assert same(
        load_file(tmp_path / "back" / "model.safetensors"), load_file(whole / "model.safetensors")
    )
    # The library writes headers of such lengths too, so that tensors can be mapped.
    assert (tmp_path / "back" / "model.safetensors").read_bytes()[0] % 8 == 0
    beside = {"config.json", "generation_config.json", "tokenizer_config.json"}
    assert {file.name for file in (tmp_path / "back").iterdir()} == {*beside, "model.safetensors"}


def test_shards_get_an_index_that_the_library_reads(tmp_path, split):
    convert(split, tmp_path / "back", "safetensors", max_shard_bytes=300)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) > 3
    together = {}
    for shard in shards:
        loaded = load_file(tmp_path / "back" / shard)
        assert {index["weight_map"][name] for name in loaded} == {shard}
        together |= loaded
    assert same(together, read_split(split))
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in together.values())
    convert(tmp_path / "back", tmp_path / "again", "split")
    assert same(read_split(tmp_path / "again"), together)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("to", ["safetensors", "split"])
def test_a_pickle_can_be_the_source(tmp_path, whole, zipped, to):
    (whole / "model.safetensors").unlink()
    expected = tensors()
    if not zipped:
        del expected["eight"]  # torch 2.13 cannot load what it saves of that type in the old layout
    torch.save(expected, whole / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    convert(whole, tmp_path / "made", to)
    made = (
        read_split(tmp_path / "made")
        if to == "split"
        else load_file(tmp_path / "made" / "model.safetensors")
    )
    assert same(made, expected)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_real_model_computes_the_same_after_both_conversions(tmp_path, model_type):
    save_tiny_model(model_type, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", "split")
    convert(tmp_path / "b", tmp_path / "c", "safetensors")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        logits = [load_reference(tmp_path / name)(ids).logits for name in "ac"]
    assert torch.equal(*logits)


def test_optimums_checkpoint_becomes_a_plain_model(tmp_path, split):
    path = folders.optimum_tnx(tmp_path / "optimum")
    shutil.rmtree(path / "checkpoint")
    shutil.copytree(split, path / "checkpoint")
    convert(path, tmp_path / "made", "safetensors")
    artifact = detect(tmp_path / "made")
    assert (artifact.format, artifact.compiled) == ("huggingface", None)
    assert "neuron" not in artifact.config


def test_links_become_files(tmp_path, whole):
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    shutil.move(whole, repository / "blobs")
    for file in (repository / "blobs").iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    convert(snapshot, tmp_path / "made", "split")
    assert not [file for file in (tmp_path / "made").rglob("*") if file.is_symlink()]


# What is refused.


@pytest.mark.parametrize("name", ["tnx_presharded", "lmi_aot", "nxdi"])
def test_cut_weights_are_refused_with_the_reason(tmp_path, name):
    folders.BUILDERS[name](tmp_path / "cut")
    with pytest.raises(ArtifactError, match=r"cannot be converted: they are cut for .*checkpoint"):
        convert(tmp_path / "cut", tmp_path / "made", "safetensors")
    assert not (tmp_path / "made").exists()


def test_a_compiled_model_without_weights_tells_where_they_are(tmp_path):
    path = folders.optimum_tnx(tmp_path / "optimum")
    shutil.rmtree(path / "checkpoint")
    with pytest.raises(ArtifactNotFoundError, match="org/model@0a1b"):
        convert(path, tmp_path / "made", "safetensors")


def test_what_is_there_already_is_not_made_again(tmp_path, whole):
    with pytest.raises(ArtifactError, match="in the layout safetensors already"):
        convert(whole, tmp_path / "made", "safetensors")


def test_nothing_is_overwritten_but_an_empty_folder_is_filled(tmp_path, whole):
    (tmp_path / "made").mkdir()
    convert(whole, tmp_path / "made", "split")
    (tmp_path / "file").touch()
    for taken in ("made", "file"):
        with pytest.raises(ArtifactAccessError, match="nothing is overwritten"):
            convert(whole, tmp_path / taken, "split")
    assert detect(tmp_path / "made").kind == "split"


def test_a_disk_without_room_is_told_first(tmp_path, whole):
    # A sparse file: its header promises twice what the disk has, its holes take no room.
    elements = 2 * shutil.disk_usage(tmp_path).free // 4
    header = {
        name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        for name in folders.tensor_names()[1:]
    }
    header["model.embed_tokens.weight"] = {
        "dtype": "F32",
        "shape": [elements],
        "data_offsets": [0, elements * 4],
    }
    raw = json.dumps(header).encode()
    path = whole / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        try:
            file.truncate(8 + len(raw) + elements * 4)
        except OSError as error:
            pytest.skip(f"this file system makes no file of that size: {error.strerror}")
    with pytest.raises(ArtifactAccessError, match=r"needs .* GiB in .*, .* GiB are free"):
        convert(whole, tmp_path / "made", "split")


def test_a_destination_below_a_file_is_an_access_error(tmp_path, whole):
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactAccessError, match="made"):
        convert(whole, tmp_path / "file" / "made", "split")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"lm_head.weight": 3}, "holds a int as lm_head.weight"),
        ([1], "holds a list; expected a dictionary"),
        ({"lm_head.weight": torch.eye(3).to_sparse()}, "expected a dense tensor"),
        ({"lm_head.weight": torch.ones(2, dtype=torch.complex64)}, "expected a dense tensor"),
    ],
)
def test_a_pickle_of_something_else(tmp_path, whole, value, message):
    (whole / "model.safetensors").unlink()
    torch.save(value, whole / "pytorch_model.bin")
    with pytest.raises(ArtifactError, match=message):
        convert(whole, tmp_path / "made", "safetensors")


def test_types_have_the_names_and_sizes_of_torch():
    for num_bits, name in DTYPES.values():
        assert not name or getattr(torch, name).itemsize * 8 == num_bits


@pytest.mark.parametrize("dtype", ["U32", "C64"])
def test_a_type_that_torch_has_not_is_named(tmp_path, whole, dtype):
    tensors = {name: ("F32", [2]) for name in folders.tensor_names()}
    folders.safetensors(whole / "model.safetensors", {**tensors, "lm_head.weight": (dtype, [2])})
    with pytest.raises(ArtifactError, match=f"lm_head.weight as {dtype}; expected a dense tensor"):
        convert(whole, tmp_path / "made", "split")


def test_a_file_that_has_gone_is_named(whole):
    tensors = module._read(detect(whole).weights[0])
    (whole / "model.safetensors").unlink()
    with pytest.raises(ArtifactNotFoundError, match=r"model\.safetensors disappeared"):
        tensors["scale"].load()


def test_damage_inside_a_file_is_an_artifact_error(tmp_path, split):
    file = next(iter((split / "pytorch_model.bin").glob("p0.*")))
    raw = file.read_bytes()
    at = raw.index(b"_rebuild_tensor_v2")
    file.write_bytes(raw[: at - 4] + b"\xff\xff" + raw[at - 2 :])
    with pytest.raises(ArtifactError, match=file.name):
        convert(split, tmp_path / "made", "safetensors")


# What is cut short.


def test_a_source_that_changes_meanwhile_leaves_nothing(tmp_path, whole, monkeypatch):
    """The file is exchanged between writing and comparing."""
    write = module._write_split

    def write_then_change(files, into):
        write(files, into)
        raw = (whole / "model.safetensors").read_bytes()
        (whole / "model.safetensors").write_bytes(raw[:-20] + bytes(20))

    monkeypatch.setattr(module, "_write_split", write_then_change)
    with pytest.raises(ArtifactError, match="differ from their source"):
        convert(whole, tmp_path / "made", "split")
    assert [one.name for one in tmp_path.iterdir()] == ["whole"]


def test_a_killed_conversion_leaves_nothing_with_the_name(tmp_path, whole):
    """Killed at the last moment: all is written and compared, only the name is missing."""
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from djl_python_neuronx.artifacts import convert as module\n"
        "compare = module._compare\n"
        "def compare_and_die(*arguments):\n"
        "    compare(*arguments); os.kill(os.getpid(), signal.SIGKILL)\n"
        "module._compare = compare_and_die\n"
        "module.convert(Path(sys.argv[1]), Path(sys.argv[2]), 'split')\n"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", code, str(whole), str(tmp_path / "made")],
        check=False,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert run.returncode == -signal.SIGKILL
    assert not (tmp_path / "made").exists()
    assert list(tmp_path.glob(".made.output-*"))
    other = tmp_path / ".made.output-of-another"
    other.mkdir()
    with flock(other):
        convert(whole, tmp_path / "made", "split")
    assert detect(tmp_path / "made").kind == "split"
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "made", other.name}


def test_a_source_that_does_not_exist_is_named_with_its_argument(tmp_path):
    with pytest.raises(ArtifactNotFoundError, match=r"nothere .*argument `source`"):
        convert(tmp_path / "nothere", tmp_path / "out", "safetensors")


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bloom", "qwen2"])
def test_the_first_layers_are_those_of_the_model(tmp_path, model_type):
    """Their hidden states are those that the whole model has behind its first layer, but for the final norm."""
    source = save_tiny_model(model_type, tmp_path / "source")
    artifact = detect(source)
    write_first_layers(artifact, artifact.weights[0], 1, tmp_path / "first")
    whole, first = map(load_reference, (source, tmp_path / "first"))
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        behind = whole(ids, output_hidden_states=True).hidden_states[1]
        body = whole.base_model
        norm = getattr(body, "norm", None) or body.ln_f
        wanted = whole.get_output_embeddings()(norm(behind))
        torch.testing.assert_close(first(ids).logits, wanted)
    assert first.config.num_hidden_layers == 1
