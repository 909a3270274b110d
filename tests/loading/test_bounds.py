"""`check` of a folder that is made to hang or to exhaust it: an error within seconds and little memory."""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from djl_python_neuronx.artifacts import formats, hub, tensor_files, weights
from djl_python_neuronx.artifacts.folder import MAX_JSON_BYTES
from djl_python_neuronx.errors import ArtifactError
from djl_python_neuronx.loading.check import check
from tests.artifacts import folders
from tests.doubles import remote_doubles

BYTES = 1 << 30
"""Of memory, beside what is in use before."""


@pytest.fixture(autouse=True)
def _little_memory():
    """More is a MemoryError, which no check catches."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    used = int(pages) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def errors(path, **overrides):
    found = check(str(path), environ={}, overrides=overrides).findings.messages("error")
    assert sum(map(len, found)) < 20_000
    return "\n".join(found)


def whole(path):
    folders.huggingface(path)
    (path / "tokenizer.json").touch()
    return path


HANGING = (
    *("config.json", "model.safetensors", "tokenizer.json", "serving.properties", "manifest.json"),
    *("generation_config.json", "tokenizer_config.json", "model.safetensors.index.json", "other"),
)


@pytest.mark.parametrize("name", HANGING)
def test_a_pipe_in_place_of_a_file(tmp_path, name):
    """In a process of its own: what opens it never returns."""
    path = whole(tmp_path)
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    command = [sys.executable, "-m", "djl_python_neuronx.cli", "check", str(path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    assert f"{path / name}" in ran.stdout
    assert ran.stdout.count("is a pipe, a socket or a device") == 1


def test_what_a_manifest_lists(tmp_path):
    """Its files are read to compare their hashes: a pipe never ends, a hole on the disk has any size."""
    path = folders.own_output(tmp_path / "output")
    listed = json.loads((path / "manifest.json").read_text())["files"]
    other = path / "compiled" / "other"
    empty = {"bytes": 0, "sha256": "0" * 64}
    folders.edit_json(path / "manifest.json", files={**listed, "compiled/other": empty})
    os.mkfifo(other)
    assert "missing compiled/other" in errors(path)
    other.unlink()
    other.touch()
    os.truncate(other, 1 << 40)
    large = {**empty, "bytes": 1 << 40}
    folders.edit_json(path / "manifest.json", files={**listed, "compiled/other": large})
    (path / "tokenizer.json").touch()
    assert not errors(path)  # without reading it, which takes an hour


@pytest.mark.parametrize("build", [folders.sharded, folders.presharded, folders.nxdi])
def test_headers_of_all_files_are_bounded_together(tmp_path, monkeypatch, build):
    path = build(tmp_path / "model")
    files = list(path.rglob("*.safetensors"))
    size = sum(struct.unpack("<Q", file.read_bytes()[:8])[0] for file in files)
    assert len(files) > 1
    monkeypatch.setattr(tensor_files, "MAX_JSON_BYTES", size)
    formats.detect(path)
    monkeypatch.setattr(tensor_files, "MAX_JSON_BYTES", size - 1)
    with pytest.raises(ArtifactError, match=rf"{size - 1} with the files before it"):
        formats.detect(path)


def test_pipes_elsewhere(tmp_path):
    path = folders.own_output(tmp_path / "output")
    os.mkfifo(path / "compiled" / "other.neff")
    assert "is a pipe" in errors(path)
    path = whole(tmp_path / "model")
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(path / "end"))
    assert "is a pipe, a socket" in errors(path)
    (path / "end").unlink()
    os.mkfifo(path / "README.md")  # which nobody opens
    assert not errors(path)


SIZES = (10**9, 10**18, 10**400, -1, 1.5, float("nan"), float("inf"), 0, True, "2", [[]], None)
KEYS = ("num_hidden_layers", "vocab_size", "hidden_size", "max_position_embeddings", "eos_token_id")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("build", ["huggingface", "split", "presharded", "nxdi"])
def test_absurd_sizes(tmp_path, build, key):
    for i, value in enumerate(SIZES):
        path = folders.BUILDERS.get(build, folders.presharded)(tmp_path / f"{build}{i}")
        file = path / "config.json"
        folders.edit_json(file if file.exists() else path / "neuron_config.json", **{key: value})
        found = errors(path)
        if key == "num_hidden_layers" and build != "nxdi" and type(value) is int and value:
            assert f"expected 1 to {weights.MAX_LAYERS}" in found


def nested(path):
    (path / "config.json").write_text('{"model_type": "llama", "a": ' + "[" * 10**6)
    return "is not valid JSON"


def long_number(path):
    (path / "config.json").write_text('{"model_type": "llama", "vocab_size": ' + "9" * 10**6 + "}")
    return "is not valid JSON"


def large_config(path):
    (path / "config.json").write_bytes(b'{"a": "' + b"x" * MAX_JSON_BYTES + b'"}')
    return "config.json has more than"


def long_model_type(path):
    folders.write_json(path / "config.json", {"model_type": "x" * 10**6})
    return "names no model_type"


def large_index(path):
    (path / "model.safetensors").unlink()
    with (path / "model.safetensors.index.json").open("wb") as file:
        file.truncate(1 << 40)
        file.write(b"{")
    return "index.json has more than"


def large_header(path):
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", MAX_JSON_BYTES + 1))
        file.truncate(1 << 40)
    return "has a header of"


def header(path, entries):
    raw = json.dumps(entries).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)


def huge_shape(path):
    entry = {"dtype": "F32", "shape": [10**4000] * 500, "data_offsets": [0, 0]}
    header(path, {"weight": entry})
    return "malformed safetensors header"


def deep_shape(path):
    header(path, {"weight": {"dtype": "F32", "shape": [2] * 10**6, "data_offsets": [0, 0]}})
    return "malformed safetensors header"


def long_tensor_name(path):
    header(path, {"x" * 10**6: {"dtype": "F32", "shape": [1], "data_offsets": [0, 0]}})
    return "xxx…"


def long_dtype(path):
    header(path, {"x": {"dtype": "F" * 10**6, "shape": [1], "data_offsets": [0, 0]}})
    return "FFF…"


def long_layer_number(path):
    names = {f"model.layers.{'1' * 5000}.x": ("F32", [1])}
    folders.safetensors(path / "model.safetensors", names)
    return "lack"


def many_tensors(path):
    """A tensor of its own in each layer: all are missing in all others."""
    folders.edit_json(path / "config.json", num_hidden_layers=9000)
    names = {f"model.layers.{i}.own{i}": ("F32", [0]) for i in range(9000)}
    folders.safetensors(path / "model.safetensors", names)
    return "lack"


def index_of_long_names(path):
    (path / "model.safetensors").unlink()
    places = {"a": "x" * 10**6, "b": "y/" * 10**6}
    folders.write_json(path / "model.safetensors.index.json", {"weight_map": places})
    return "…"


def thousands_of_shards(path):
    (path / "model.safetensors").unlink()
    places = {f"tensor{i}": f"shard{i}.safetensors" for i in range(100_000)}
    folders.write_json(path / "model.safetensors.index.json", {"weight_map": places})
    return "lacks 100000 of the 100000"


def absurd_layer_file(path):
    """Without a number of layers in config.json, the files count."""
    folders.presharded(path)
    folders.write_json(path / "config.json", {"model_type": "llama"})
    (path / f"decoder_layer_{'9' * 200}.safetensors").touch()
    return "is_presharded_checkpoint"


def absurd_core(path):
    folders.presharded(path)
    name = path / "decoder_layer_0.safetensors"
    folders.safetensors(name, {"a*" + "9" * 5000: ("F32", [1])})
    return "tensors that are not shards"


def many_lines(path):
    """The parser takes an hour for it."""
    (path / "serving.properties").write_text("a\\\n" * 300_000)
    return "or 2000 lines"


def many_settings(path):
    (path / "serving.properties").write_text("option.x=1\n" * 60_000)
    return "or 2000 lines"


BOMBS = (
    *(many_lines, many_settings),
    *(nested, long_number, large_config, long_model_type, large_index, large_header, huge_shape),
    *(deep_shape, long_tensor_name, long_dtype, long_layer_number, many_tensors),
    *(index_of_long_names, thousands_of_shards, absurd_layer_file, absurd_core),
)


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb.__name__)
def test_a_bomb(tmp_path, bomb):
    path = whole(tmp_path)
    said = bomb(path)
    assert said in errors(path)


def test_a_large_configuration_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "MAX_JSON_BYTES", 1000)
    config = json.dumps({"model_type": "llama", "a": "x" * 1000}).encode()
    with remote_doubles.hub({"owner/model": config}) as (url, _):
        environ = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path)}
        report = check("owner/model", environ=environ, overrides={})
    assert "expected at most 1000" in "".join(report.findings.messages("error"))
    assert not list(tmp_path.rglob("*.json"))


def test_a_directory_of_an_archive_that_fills_the_memory(tmp_path):
    path = whole(tmp_path)
    (path / "model.safetensors").unlink()
    size = 1 << 36
    end = struct.pack("<4sQ", b"PK\6\6", 44) + bytes(28) + struct.pack("<QQ", size, 4)
    with (path / "pytorch_model.bin").open("wb") as file:
        file.write(b"PK\3\4")
        file.seek(size)
        file.write(end + struct.pack("<4s4xQ4x", b"PK\6\7", size) + b"PK\5\6" + bytes(18))
    assert "a directory of" in errors(path)
    with pytest.raises(ArtifactError):
        tensor_files.check_pickles(tensor_files.Folder.open(path), ["pytorch_model.bin"])
