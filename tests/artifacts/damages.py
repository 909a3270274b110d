"""Builders of damaged and hostile folders, each with the error that it must get and what the message must name."""

from __future__ import annotations

import inspect
import io
import json
import os
import pickle
import shutil
import struct
import tarfile
import zipfile

import pytest

from djl_python_neuronx.artifacts.compiled_formats import graphs_in
from djl_python_neuronx.artifacts.formats import detect
from djl_python_neuronx.errors import (
    ArtifactAccessError,
    ArtifactError,
    ArtifactMismatchError,
    ArtifactNotFoundError,
    UnknownFormatError,
)
from tests.artifacts import folders

WANTED = {
    "tensor_parallel_degree": 2,
    "max_rolling_batch_size": 4,
    "n_positions": 64,
    "dtype": "bfloat16",
    "compiler_version": folders.COMPILER,
}
MARK = "pickle-was-run"


class Hostile:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, (f"touch {MARK}",)


class Evaluated:
    """Runs an expression when it is unpickled."""

    def __reduce__(self):
        return eval, (f"open({MARK!r}, 'w')",)


class Reaching:
    """Calls a function of torch that unpickles without limits."""

    def __reduce__(self):
        import torch

        return torch.storage._load_from_bytes, (b"",)


def rewrite_header(path, change):
    """Change the header of a safetensors file and keep its data."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    written = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(written)) + written + raw[8 + length :])


def split_file(path):
    """A file of a model in split files."""
    return folders.split(path) / "pytorch_model.bin" / "p1.model.layers.0.input_layernorm.weight"


def lone_pickle(path):
    """The place of the only weights of a model."""
    (folders.huggingface(path) / "model.safetensors").unlink()
    return path / "pytorch_model.bin"


def add_member(file, name, content):
    """Write a harmless file of `torch.save` with one member more."""
    folders.pickled(file)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(name, content)


# Each makes a folder below `path` and gives what the message must name and the error's class.


def missing_shard(path):
    (folders.sharded(path) / "two.safetensors").unlink()
    return "two.safetensors", ArtifactNotFoundError


def missing_pickle_shard(path):
    folders.huggingface(path)
    (path / "model.safetensors").unlink()
    places = dict.fromkeys(folders.tensor_names(), "pytorch_model-00001-of-00002.bin")
    folders.write_json(path / "pytorch_model.bin.index.json", {"weight_map": places})
    return "pytorch_model-00001-of-00002.bin", ArtifactNotFoundError


def no_weights(path):
    (folders.huggingface(path) / "model.safetensors").unlink()
    return "model.safetensors", ArtifactNotFoundError


def cut_header(path):
    file = folders.huggingface(path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    return "model.safetensors", ArtifactError


def cut_data(path):
    file = folders.sharded(path) / "one.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    return "one.safetensors", ArtifactError


def empty_file(path):
    (folders.huggingface(path) / "model.safetensors").write_bytes(b"")
    return "model.safetensors", ArtifactError


def malformed_header(path):
    file = folders.huggingface(path) / "model.safetensors"
    rewrite_header(file, lambda header: header["lm_head.weight"].pop("dtype"))
    return "model.safetensors", ArtifactError


def overlapping_tensors(path):
    file = folders.huggingface(path) / "model.safetensors"
    rewrite_header(file, lambda header: header["lm_head.weight"].update(data_offsets=[0, 32]))
    return "model.safetensors", ArtifactError


def unknown_dtype(path):
    file = folders.huggingface(path) / "model.safetensors"
    rewrite_header(file, lambda header: header["lm_head.weight"].update(dtype="F13"))
    return "lm_head.weight", ArtifactError


def dtype_that_does_not_fit(path):
    file = folders.huggingface(path) / "model.safetensors"
    rewrite_header(file, lambda header: header["lm_head.weight"].update(dtype="F32"))
    return "lm_head.weight", ArtifactError


def integers_as_weights(path):
    file = folders.huggingface(path) / "model.safetensors"
    folders.safetensors(file, {name: ("I64", [2]) for name in folders.tensor_names()})
    return "model.safetensors", ArtifactError


def missing_tensor(path):
    file = folders.huggingface(path) / "model.safetensors"
    lost = "model.layers.1.self_attn.o_proj.weight"
    names = [name for name in folders.tensor_names() if name != lost]
    folders.safetensors(file, {name: ("F32", [2]) for name in names})
    return lost, ArtifactError


def missing_layer(path):
    folders.huggingface(path, num_hidden_layers=3)
    return "model.layers.2.*", ArtifactError


def missing_head(path):
    file = folders.huggingface(path) / "model.safetensors"
    folders.safetensors(file, {name: ("F32", [2]) for name in folders.tensor_names()[:-1]})
    return "lm_head.weight", ArtifactError


def index_of_another_model(path):
    names = [name.replace("up_proj", "down_proj") for name in folders.tensor_names()[5:]]
    folders.safetensors(
        folders.sharded(path) / "two.safetensors", {name: ("F32", [3]) for name in names}
    )
    return "two.safetensors", ArtifactError


def index_that_leaves_the_folder(path):
    file = folders.sharded(path) / "model.safetensors.index.json"
    folders.write_json(file, {"weight_map": {"lm_head.weight": "../../other/model.safetensors"}})
    return "../../other/model.safetensors", ArtifactError


def split_key_that_leaves_the_folder(path):
    folders.split(path)
    file = path / "pytorch_model.bin" / "key_to_filename.json"
    folders.edit_json(file, **{"lm_head.weight": "/etc/passwd"})
    return "key_to_filename.json", ArtifactError


def split_without_its_list(path):
    (folders.split(path) / "pytorch_model.bin" / "key_to_filename.json").unlink()
    return "key_to_filename.json", ArtifactNotFoundError


def split_without_a_file(path):
    (folders.split(path) / "pytorch_model.bin" / "p0.model.embed_tokens.weight").unlink()
    return "p0.model.embed_tokens.weight", ArtifactNotFoundError


def empty_config(path):
    (folders.huggingface(path) / "config.json").write_text("", encoding="utf-8")
    return "config.json", ArtifactError


def config_without_a_type(path):
    folders.write_json(folders.huggingface(path) / "config.json", {})
    return "config.json", ArtifactError


def cut_config(path):
    (folders.huggingface(path) / "config.json").write_text('{"model_type": "lla', encoding="utf-8")
    return "config.json", ArtifactError


def lfs_pointer_for_weights(path):
    folders.lfs_pointer(folders.huggingface(path) / "model.safetensors")
    return "model.safetensors", ArtifactError


def lfs_pointer_for_a_setting(path):
    folders.lfs_pointer(folders.huggingface(path) / "generation_config.json")
    return "generation_config.json", ArtifactError


def lfs_pointer_for_a_graph(path):
    folders.lfs_pointer(folders.lmi_aot(path) / "compiled" / "0123456789abcdef0123.neff")
    return "0123456789abcdef0123.neff", ArtifactError


def pickle_with_code(path):
    file = lone_pickle(path)
    folders.pickled(file, {"lm_head.weight": Hostile()})
    return "system", ArtifactError


def old_pickle_with_code(path):
    """Without the archive around it, as before torch 1.6."""
    file = lone_pickle(path)
    magic = 119547037146038801333356
    file.write_bytes(pickle.dumps(magic, protocol=2) + pickle.dumps(Evaluated(), protocol=2))
    return "eval", ArtifactError


def pickle_with_code_of_torch(path):
    file = split_file(path)
    pytest.importorskip("torch")
    folders.pickled(file, Reaching())
    return "torch.storage._load_from_bytes", ArtifactError


def pickle_with_newer_instructions(path):
    file = lone_pickle(path)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Hostile(), protocol=4))
        archive.writestr("archive/version", "3\n")
    return "FRAME", ArtifactError


def pickle_that_is_torchscript(path):
    """Which torch.load hands to torch.jit.load, `weights_only` or not, before torch 2.6."""
    add_member(lone_pickle(path), "archive/constants.pkl", pickle.dumps((), protocol=2))
    return "archive/constants.pkl instead of one data.pkl", ArtifactError


def pickle_in_a_tar_file(path):
    """As before torch 0.1.10; CVE-2025-32434 is in the loader of these."""
    file = split_file(path)
    with tarfile.open(file, "w") as archive:
        member = tarfile.TarInfo("storages")
        content = pickle.dumps(Hostile(), protocol=2)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return "not a whole file of torch.save", ArtifactError


def tar_file_that_starts_with_pickles(path):
    """Five harmless pickles are the name of its first member; torch reads the other members."""
    file = split_file(path)
    content = pickle.dumps(Hostile(), protocol=2)
    with tarfile.open(file, "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as archive:
        archive.addfile(tarfile.TarInfo("\x80\x02N." * 5))
        for name in ("storages", "tensors", "pickle"):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return "both pickles and a tar file", ArtifactError


def pickles_before_an_archive(path):
    """Torch takes a file for an archive by its first bytes, `zipfile` by its last ones."""
    file = split_file(path)
    folders.pickled(file)
    file.write_bytes(pickle.dumps(Hostile(), protocol=2) * 5 + file.read_bytes())
    return "both pickles and a zip archive", ArtifactError


def archive_before_an_archive(path):
    """Torch takes the members from the place that the end record gives, `zipfile` from just before that record."""
    file = split_file(path)
    folders.pickled(file, Hostile())
    hostile = file.read_bytes()
    folders.pickled(file)
    file.write_bytes(hostile + file.read_bytes())
    return "data before or behind its zip archive", ArtifactError


def pickle_with_code_in_capitals(path):
    """Torch looks up the members of an archive without regard to case."""
    file = split_file(path)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/DATA.PKL", pickle.dumps(Hostile(), protocol=2))
        archive.writestr("archive/version", "3\n")
    return "system", ArtifactError


def torchscript_in_capitals(path):
    add_member(split_file(path), "archive/CONSTANTS.PKL", pickle.dumps((), protocol=2))
    return "archive/constants.pkl instead of one data.pkl", ArtifactError


def members_of_one_name(path):
    add_member(split_file(path), "ARCHIVE/version", "3\n")
    return "two members of one name", ArtifactError


def cut_pickle(path):
    file = lone_pickle(path)
    folders.pickled(file)
    file.write_bytes(file.read_bytes()[:-30])
    return "pytorch_model.bin", ArtifactError


def link_out(path):
    (folders.huggingface(path) / "config.json").unlink()
    (path / "config.json").symlink_to("/etc/passwd")
    return "/etc/passwd", ArtifactAccessError


def link_out_of_an_inner_folder(path):
    secret = path.parent / "secret"
    secret.write_text("x", encoding="utf-8")
    (folders.lmi_aot(path) / "compiled" / "a.neff").symlink_to("../../secret")
    return "a.neff", ArtifactAccessError


def folder_that_is_a_link_out(path):
    folders.optimum_tnx(path)
    shutil.move(path / "checkpoint", path.parent / "elsewhere")
    (path / "checkpoint").symlink_to(path.parent / "elsewhere")
    return "elsewhere", ArtifactAccessError


def dangling_link(path):
    (folders.huggingface(path) / "tokenizer.json").symlink_to("../../blobs/0a1b")
    return "tokenizer.json", ArtifactNotFoundError


def link_in_a_circle(path):
    (folders.huggingface(path) / "tokenizer.json").symlink_to("tokenizer.json")
    return "tokenizer.json", ArtifactAccessError


def unreadable_weights(path):
    """A folder in the file's place: permissions do not stop root, whom these tests may run as."""
    (folders.huggingface(path) / "model.safetensors").unlink()
    (path / "model.safetensors").mkdir()
    return "model.safetensors", ArtifactAccessError


def unreadable_config(path):
    (folders.huggingface(path) / "config.json").unlink()
    (path / "config.json").mkdir()
    return "config.json", ArtifactAccessError


def two_compiled_formats(path):
    folders.lmi_aot(path)
    folders.nxdi(path)
    return "lmi_aot", ArtifactError


def presharded_layer_missing(path):
    (folders.presharded(path) / "decoder_layer_1.safetensors").unlink()
    return "decoder_layer_1.safetensors", ArtifactNotFoundError


def presharded_for_two_degrees(path):
    folders.presharded(path / "other", tp=4)
    folders.presharded(path)
    (path / "other" / "decoder_layer_0.safetensors").replace(path / "decoder_layer_0.safetensors")
    return "decoder_layer_0.safetensors", ArtifactError


def presharded_with_foreign_names(path):
    file = folders.presharded(path) / "decoder_layer_0.safetensors"
    folders.safetensors(file, {"model.layers.0.weight": ("F32", [2])})
    return "decoder_layer_0.safetensors", ArtifactError


def presharded_whose_config_was_replaced(path):
    folders.write_json(folders.presharded(path) / "config.json", folders.CONFIG)
    return "is_presharded_checkpoint", ArtifactError


def aot_without_graphs(path):
    for file in (folders.lmi_aot(path) / "compiled").glob("*.neff"):
        file.unlink()
    return "compiled", ArtifactNotFoundError


def aot_without_its_folder(path):
    shutil.rmtree(folders.lmi_aot(path) / "compiled")
    return "compiled is missing", ArtifactNotFoundError


def aot_of_two_degrees(path):
    folders.presharded(folders.lmi_aot(path) / "compiled", tp=8)
    return "cut for 8", ArtifactError


def aot_of_two_compilers(path):
    (folders.lmi_aot(path) / "compiled" / "VERSION").write_text("2.15.128.0", encoding="utf-8")
    return "VERSION", ArtifactError


def nxdi_without_graphs(path):
    (folders.nxdi(path) / "model.pt").unlink()
    return "model.pt", ArtifactNotFoundError


def nxdi_without_its_configuration(path):
    (folders.nxdi(path) / "neuron_config.json").unlink()
    return "neuron_config.json", ArtifactNotFoundError


def nxdi_with_cut_graphs(path):
    file = folders.nxdi(path) / "model.pt"
    file.write_bytes(file.read_bytes()[:-10])
    return "model.pt", ArtifactError


def nxdi_rank_missing(path):
    (folders.nxdi(path) / "weights" / "tp1_sharded_checkpoint.safetensors").unlink()
    return "weight files of the ranks", ArtifactNotFoundError


def nxdi_without_weights(path):
    shutil.rmtree(folders.nxdi(path) / "weights")
    return "weights", ArtifactNotFoundError


def nxdi_with_a_foreign_configuration(path):
    folders.write_json(folders.nxdi(path) / "neuron_config.json", {"model_type": "llama"})
    return "neuron_config.json", ArtifactError


def optimum_without_weights_or_source(path):
    shutil.rmtree(folders.optimum_nxd(path) / "checkpoint")
    folders.edit_json(path / "neuron_config.json", checkpoint_id=None)
    return "checkpoint_id", ArtifactNotFoundError


def nxdi_with_absurd_ranks(path):
    folders.nxdi(path, local_ranks_size=10**12)
    return "local_ranks_size", ArtifactError


def manifest_with_a_missing_file(path):
    (folders.own_output(path) / "serving.properties").unlink()
    return "serving.properties", ArtifactNotFoundError


def manifest_with_a_changed_file(path):
    with (folders.own_output(path) / "compiled" / "VERSION").open("a", encoding="utf-8") as file:
        file.write("x")
    return "compiled/VERSION", ArtifactError


def manifest_that_leaves_the_folder(path):
    file = folders.own_output(path) / "manifest.json"
    folders.edit_json(file, files={"compiled/../../secret": {"bytes": 1}})
    return "compiled/../../secret", ArtifactError


def manifest_of_another_version(path):
    folders.edit_json(folders.own_output(path) / "manifest.json", version=99)
    return "99", ArtifactError


def manifest_of_an_unknown_layout(path):
    folders.edit_json(folders.own_output(path) / "manifest.json", layout="magnetic tape")
    return "magnetic tape", ArtifactError


def cache_in_place_of_a_model(path):
    folders.neff_cache(path)
    return "NEURON_COMPILE_CACHE_URL", UnknownFormatError


def folder_of_split_files_alone(path):
    folders.split(path.parent / "split")
    shutil.move(path.parent / "split" / "pytorch_model.bin", path)
    return "key_to_filename.json", UnknownFormatError


def empty_folder(path):
    path.mkdir()
    return "found nothing", UnknownFormatError


def wrong_compiler(path):
    folders.lmi_aot(path)
    return "compiler_version", ArtifactMismatchError, {**WANTED, "compiler_version": "2.23.1"}


def wrong_tp(path):
    folders.lmi_aot(path)
    return "tensor_parallel_degree", ArtifactMismatchError, {**WANTED, "tensor_parallel_degree": 8}


def wrong_n_positions(path):
    folders.lmi_aot(path)
    return "n_positions", ArtifactMismatchError, {**WANTED, "n_positions": 4096}


def wrong_batch(path):
    folders.lmi_aot(path)
    return "max_rolling_batch_size", ArtifactMismatchError, {**WANTED, "max_rolling_batch_size": 1}


def wrong_dtype_of_the_graphs(path):
    folders.lmi_aot(path)
    return "dtype", ArtifactMismatchError, {**WANTED, "dtype": "float32"}


def cut_weights_on_the_cpu(path):
    folders.lmi_aot(path)
    return "cpu", ArtifactError, {**WANTED, "n_positions": (64,)}


def empty_graph(path):
    (folders.presharded(path) / "0123456789abcdef0123.neff").write_bytes(b"")
    return "0123456789abcdef0123.neff", ArtifactError


def cache_with_an_empty_graph(path):
    (neff,) = folders.neff_cache(path).glob("*/*/model.neff")
    neff.write_bytes(b"")
    return str(neff), ArtifactError


def cache_with_a_graph_that_was_never_fetched(path):
    (neff,) = folders.neff_cache(path / "PRE_COMPILED_NEURON_GRAPH_INFER").glob("*/*/model.neff")
    neff.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    return str(neff), ArtifactError


HELPERS = {"rewrite_header", "split_file", "lone_pickle", "add_member"}
CASES = {
    name: one
    for name, one in list(globals().items())
    if inspect.isfunction(one) and one.__module__ == __name__ and name not in HELPERS
}
GRAPHS = {
    "empty_graph",
    "cache_with_an_empty_graph",
    "cache_with_a_graph_that_was_never_fetched",
}


def fail(name, path):
    """The error of a case, what its message must name, and the class expected."""
    named, error, *wanted = CASES[name](path)
    with pytest.raises(ArtifactError) as caught:
        look(name, path, *wanted or [WANTED])
    return caught.value, named, error


def look(name, path, wanted):
    """All that is asked of a folder before the cpu backend loads it."""
    if name in GRAPHS:
        graphs_in(path)
        return
    artifact = detect(path)
    artifact.check_fit(wanted)
    artifact.weights_for("cpu", {"safetensors", "pickle"})
