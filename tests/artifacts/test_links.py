"""Files from outside a model folder get nowhere: not into outputs, not into messages; and nothing waits for a pipe."""

import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from djl_python_neuronx import links
from djl_python_neuronx.artifacts import folder as folders
from djl_python_neuronx.artifacts import manifest as manifests
from djl_python_neuronx.artifacts.atomic import storing
from djl_python_neuronx.artifacts.folder import copy_file, copy_tree, file_names, read_json
from djl_python_neuronx.artifacts.formats import detect
from djl_python_neuronx.artifacts.store import copy_once
from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.config.resolve import read_settings
from djl_python_neuronx.config.sources import from_file
from djl_python_neuronx.errors import ArtifactAccessError, ArtifactError, ConfigError
from djl_python_neuronx.loading.check import check
from tests.artifacts.outputs import TINY, contents, write

SECRET = "hf_5ecret"


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text(json.dumps({"model_type": SECRET, SECRET: SECRET}))
    return path


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.jsonl", "*.py", "*.md"))
    return folder


def out(path, secret):
    path.symlink_to(secret)


def out_by_dots(path, secret):
    path.symlink_to(os.path.relpath(secret, path.parent))


def out_through_a_folder(path, secret):
    (path.parent / ".up").symlink_to(secret.parent)
    path.symlink_to(f".up/{secret.name}")


def gone(path, _secret):
    path.symlink_to("nowhere")


def loop(path, _secret):
    path.symlink_to(path.name)


def pipe(path, _secret):
    os.mkfifo(path)


def listening(path, _secret):
    # A path of a socket has at most 107 bytes.
    with socket.socket(socket.AF_UNIX) as end:
        descriptor = os.open(path.parent, os.O_RDONLY)
        end.bind(f"/proc/self/fd/{descriptor}/{path.name}")
        os.close(descriptor)


def endless(path, _secret):
    path.symlink_to("/dev/zero")


def another_cache(path, secret):
    blob(path, secret, "models--priv--secret/blobs/0a1b")


def not_a_cache(path, secret):
    blob(path, secret, "blobs/0a1b")


def not_a_shared_cache(path, secret):
    blob(path, secret, "blobs/0a/1b")


def blob(path, secret, name):
    target = secret.parent / name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(secret, target)
    path.symlink_to(target)


NEVER_READ = ("runs", "original", "logs", "checkpoint-100", "LICENSE", "events.out.tfevents.1.x")
CACHES = (another_cache, not_a_cache, not_a_shared_cache)
BAD = (out, out_by_dots, out_through_a_folder, *CACHES, gone, loop, pipe, listening, endless)
PLACES = (
    "chat_template.jinja",
    "modeling_x.py",
    "special_tokens_map.json",
    "adapters/a/adapter_config.json",
    "adapters/a/deep/er/x.bin",
    "pytorch_model.bin/p0.wte",
    "additional_chat_templates/tools.jinja",
)


def place(model, name, make, secret):
    path = model / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    make(path, secret)


@pytest.mark.parametrize("make", BAD)
@pytest.mark.parametrize("name", PLACES)
def test_compile_writes_nothing_with_it(model, secret, tmp_path, name, make):
    place(model, name, make, secret)
    with pytest.raises(ArtifactError) as caught:
        write(model, tmp_path / "out")
    assert name.rpartition("/")[2] in str(caught.value)
    assert SECRET not in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


@pytest.fixture
def snapshot(model, tmp_path):
    """The model in the Hugging Face cache `hub`."""
    folder = tmp_path / "hub" / "models--me--m" / "snapshots" / "0a"
    shutil.copytree(model, folder)
    return folder


@pytest.mark.parametrize("make", BAD)
def test_a_snapshot_leads_nowhere_else_either(snapshot, secret, tmp_path, make):
    place(snapshot, "modeling_x.py", make, secret)
    with pytest.raises(ArtifactError, match=r"modeling_x\.py"):
        write(snapshot, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["models--me--m/blobs/0a1b", "blobs/0a/1b"])
def test_a_snapshot_leads_to_the_blobs_of_its_cache(snapshot, secret, tmp_path, name):
    shutil.copy(secret, tmp_path / "hub" / "secret")
    blob(snapshot / "modeling_x.py", tmp_path / "hub" / "secret", name)
    write(snapshot, tmp_path / "out")
    assert (tmp_path / "out" / "modeling_x.py").read_bytes() == secret.read_bytes()


@pytest.mark.parametrize("make", BAD)
def test_no_template_of_another_place_is_served(model, secret, make):
    place(model, "additional_chat_templates/tools.jinja", make, secret)
    with pytest.raises(ArtifactError, match=r"tools\.jinja"):
        detect(model)


@pytest.mark.parametrize("name", PLACES[3:])
def test_what_an_output_gets_is_judged_before_the_compile(model, secret, name):
    for make in BAD:
        place(model, name, make, secret)
        with pytest.raises(ArtifactError, match=Path(name).name):
            detect(model)


def test_a_link_to_a_folder_is_too(model):
    (model / "adapters").mkdir()
    (model / "adapters" / "a").symlink_to("..")
    with pytest.raises(ArtifactError, match="adapters/a is a folder"):
        detect(model)


def test_a_tree_too_deep_for_the_system_is_a_short_error(model, monkeypatch):
    (model / "adapters").mkdir()
    monkeypatch.chdir(model / "adapters")
    for _ in range(25):
        Path("a" * 200).mkdir()
        os.chdir("a" * 200)
    with pytest.raises(ArtifactAccessError, match=r"File name too long\. Shorten names") as caught:
        detect(model)
    assert len(str(caught.value)) < 1000
    message = r"File name too long\. Shorten names"
    with pytest.raises(ArtifactAccessError, match=message) as caught, storing("it", model):
        file_names(model)
    assert len(str(caught.value)) < 1000


def test_an_adapters_read_me_is_left_out_as_in_the_output(model, secret, tmp_path):
    place(model, "adapters/a/README.md", out, secret)
    detect(model)
    write(model, tmp_path / "out")


@pytest.mark.parametrize("make", BAD)
def test_graphs_of_a_stranger_are_judged_too(model, secret, tmp_path, make):
    (tmp_path / "compiled").mkdir()
    make(tmp_path / "compiled" / "a.neff", secret)
    with pytest.raises(ArtifactError, match=r"a\.neff"):
        write(model, tmp_path / "out", compiled=tmp_path / "compiled")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("make", BAD)
@pytest.mark.parametrize("name", ["README.md", "notes.rst", ".cache", "logo.png", *NEVER_READ])
def test_what_nothing_reads_is_left_out(model, secret, tmp_path, name, make):
    make(model / name, secret)
    assert name not in folders.Folder.open(model).names
    write(model, tmp_path / "out")
    assert SECRET.encode() not in b"".join(contents(tmp_path / "out").values())


@pytest.mark.parametrize("make", BAD)
def test_convert_copies_no_read_me_from_elsewhere(model, secret, tmp_path, make):
    pytest.importorskip("torch")
    from djl_python_neuronx.artifacts.convert import convert

    make(model / "README.md", secret)
    (model / "LICENSE.md").write_text("mine")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "rag.jinja").write_text("rag")
    convert(model, tmp_path / "made", "split")
    found = contents(tmp_path / "made")
    assert found["LICENSE.md"] == b"mine"
    assert found["additional_chat_templates/rag.jinja"] == b"rag"
    assert "README.md" not in found
    assert not (tmp_path / "made" / "README.md").is_symlink()


def test_a_message_names_what_the_link_leads_to(model):
    (model / "eval.json").symlink_to("/mnt/gone/runs/eval.json")
    with pytest.raises(ArtifactError, match=r"that is gone, /mnt/gone/runs/eval\.json\. "):
        detect(model)


@pytest.mark.parametrize("make", [None, out, out_by_dots, pipe])
def test_without_proc_the_path_decides(model, secret, monkeypatch, make):
    """As on macOS."""
    file, real = model / "tokenizer.json", os.readlink

    def readlink(path, **more):
        if str(path).startswith("/proc/"):
            raise FileNotFoundError(path)
        return real(path, **more)

    if make:
        place(model, file.name, make, secret)
    monkeypatch.setattr(os, "readlink", readlink)
    if make is None:
        assert read_json(file)["version"]
    else:
        monkeypatch.setattr(links, "check", lambda *_, **__: None)  # exchanged after it
        with pytest.raises(ArtifactAccessError, match=r"tokenizer\.json is a"):
            read_json(file)


def test_links_inside_the_model_become_files(model, tmp_path):
    (model / "adapters" / "a").mkdir(parents=True)
    (model / "adapters" / "a" / "tokenizer.json").symlink_to("../../tokenizer.json")
    write(model, tmp_path / "out")
    copied = tmp_path / "out" / "adapters" / "a" / "tokenizer.json"
    assert not copied.is_symlink()
    assert copied.read_bytes() == (model / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("target", [".", "..", "../a"])
def test_a_link_to_a_folder_ends_no_copy_in_a_circle(model, tmp_path, target):
    (model / "adapters" / "a").mkdir(parents=True)
    (model / "adapters" / "a" / "again").symlink_to(target)
    with pytest.raises(ArtifactError, match="again is a folder"):
        write(model, tmp_path / "out")
    assert file_names(model / "adapters") == {"a/again"}


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("kind", [out, pipe])
def test_a_file_exchanged_after_the_check_is_not_copied(
    model, secret, tmp_path, monkeypatch, link, kind
):
    file, judged = model / "tokenizer.json", links.check

    def check_then_change(path, root, **more):
        judged(path, root, **more)
        file.unlink()
        kind(file, secret)

    monkeypatch.setattr(links, "check", check_then_change)
    with pytest.raises(ArtifactAccessError, match=r"tokenizer\.json"):
        copy_file(file, tmp_path / "copy", model, link=link)
    assert not (tmp_path / "copy").exists()


def test_a_file_exchanged_before_it_is_linked_is_copied_as_it_was(
    model, secret, tmp_path, monkeypatch
):
    file, real = model / "tokenizer.json", os.link
    content = file.read_bytes()

    def change_then_link(source, target, **more):
        file.unlink()
        file.symlink_to(secret)
        real(source, target, **more)

    monkeypatch.setattr(os, "link", change_then_link)
    copy_file(file, tmp_path / "copy", model, link=True)
    assert not (tmp_path / "copy").is_symlink()
    assert (tmp_path / "copy").read_bytes() == content


@pytest.mark.parametrize("make", BAD)
def test_a_cache_is_copied_without_what_lies_elsewhere(secret, tmp_path, make):
    module = tmp_path / "cache" / "neuronxcc-2" / "MODULE_1"
    module.mkdir(parents=True)
    make(module / "model.neff", secret)
    with pytest.raises(ArtifactError):
        copy_once(tmp_path / "cache", tmp_path / "copies")
    assert not [path for path in (tmp_path / "copies").rglob("*") if "MODULE" in path.name]


def test_what_may_be_copied_is(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_text("1")
    (tmp_path / "a" / "d").symlink_to("b/c")
    copy_tree(tmp_path / "a", tmp_path / "copy")
    assert contents(tmp_path / "copy") == {"b/c": b"1", "d": b"1"}
    assert not (tmp_path / "copy" / "b" / "c").samefile(tmp_path / "a" / "b" / "c")


# What is read and quoted.


@pytest.mark.parametrize("make", BAD)
@pytest.mark.parametrize("name", ["config.json", "serving.properties", "generation_config.json"])
def test_check_repeats_nothing_of_it(model, secret, name, make):
    place(model, name, make, secret)
    reports = [check(str(model), environ={}, overrides={})]
    # Where a file is missing the folder is looked at once more, for its configuration alone.
    (model / "a").symlink_to("nowhere")
    reports.append(check(str(model), environ={}, overrides={}))
    assert not reports[0].ok or make is gone
    assert SECRET not in "".join(str(one) for report in reports for one in report.findings)


def test_settings_from_elsewhere_are_an_error(model, secret):
    place(model, "serving.properties", out, secret)
    with pytest.raises(ConfigError, match="link out of the model's folder") as caught:
        from_file(model)
    assert SECRET not in str(caught.value)


def test_settings_may_be_a_link_as_kubernetes_mounts_them(model):
    (model / "..data").mkdir()
    (model / "..data" / "serving.properties").write_text("option.max_waiting=7\n")
    place(model, "serving.properties", out, Path("..data/serving.properties"))
    assert [setting.value for setting in from_file(model)] == ["7"]


@pytest.mark.parametrize("by", ["folder", "folder by a link", "variable", "command line"])
def test_only_the_operator_names_a_json_file_elsewhere(model, tmp_path, by):
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text('{"secret": 1}')
    value = str(elsewhere)
    if by == "folder by a link":
        (model / "own.json").symlink_to(elsewhere)
        value = "own.json"
    name = "override_neuron_config"
    if by.startswith("folder"):
        (model / "serving.properties").write_text(f"option.{name}={value}\n")
    problems = Problems()
    settings = read_settings(
        None,
        model,
        {f"OPTION_{name.upper()}": value} if by == "variable" else {},
        problems,
        {name: value} if by == "command line" else {},
    )
    is_operator = not by.startswith("folder")
    assert settings.options.override_neuron_config == ({"secret": 1} if is_operator else None)
    said = "link out of the model's folder" if "link" in by else "is outside the model's folder"
    assert [said in str(one) for one in problems.errors] == ([] if is_operator else [True])
    assert "secret" not in "".join(map(str, problems))


def test_a_folder_names_none_through_djl_either(model, tmp_path):
    """Java has read the file; where a value is from is found out by comparing."""
    (tmp_path / "elsewhere.json").write_text("{}")
    problems, value = Problems(), str(tmp_path / "elsewhere.json")
    (model / "serving.properties").write_text(f"option.override_neuron_config={value}\n")
    read_settings({"override_neuron_config": value}, model, {}, problems)
    assert ["is outside the model's folder" in str(one) for one in problems.errors] == [True]


@pytest.mark.parametrize("make", [pipe, endless, out])
def test_a_manifest_that_lists_it_is_refused(model, secret, tmp_path, make):
    made = write(model, tmp_path / "out")
    bad = tmp_path / "out" / "adapters" / "a"
    bad.parent.mkdir()
    make(bad, secret)
    num_bytes = secret.stat().st_size if make is out else 0
    entry = manifests.FileEntry(bytes=num_bytes, sha256="0" * 64)
    listed = made.model_copy(update={"files": {**made.files, "adapters/a": entry}})
    manifests.write(tmp_path / "out", listed)
    with pytest.raises(ArtifactError, match="adapters/a"):
        detect(tmp_path / "out")


@pytest.mark.parametrize("make", BAD)
def test_no_json_file_is_read_elsewhere(secret, tmp_path, make):
    (tmp_path / "folder").mkdir()
    make(tmp_path / "folder" / "x.json", secret)
    with pytest.raises(ArtifactError, match=r"x\.json"):
        read_json(tmp_path / "folder" / "x.json")
