"""The output of a compilation ahead of time is served as it is, and costs no file of the user's."""

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from djl_python_neuronx.artifacts import atomic
from djl_python_neuronx.artifacts import manifest as manifests
from djl_python_neuronx.artifacts.atomic import flock
from djl_python_neuronx.artifacts.folder import SERVING
from djl_python_neuronx.artifacts.formats import detect
from djl_python_neuronx.artifacts.output import properties_file
from djl_python_neuronx.config.sources import from_file
from djl_python_neuronx.errors import ArtifactAccessError, ArtifactError
from tests.artifacts.outputs import (
    OPTIONS,
    ROOT,
    TINY,
    check_whole,
    contents,
    write,
)
from tests.planning.settings import resolve


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.jsonl", "train.py", "tasks.py"))
    (folder / "serving.properties").write_text("engine=MPI\noption.tgi_compat=false\n")
    (folder / "LICENSE").write_text("mine")
    (folder / "pytorch_model.h5").write_bytes(b"another library's")
    (folder / ".git").mkdir()
    return folder


@pytest.fixture
def compiled(tmp_path):
    folder = tmp_path / "compiled"
    (folder / "graphs").mkdir(parents=True)
    (folder / "graphs" / "0.neff").write_bytes(b"neff" * 1000)
    (folder / "manifest.json").write_text("{}")
    return folder


def test_the_output_has_what_serving_needs(model, compiled, tmp_path):
    destination = tmp_path / "deep" / "out"
    before = contents(model)
    made = write(model, destination, compiled=compiled)
    assert contents(model) == before
    found = contents(destination)
    copied = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    for name in (*copied, "model.safetensors", "LICENSE"):
        assert found.pop(name) == before[name]
    assert found.pop("compiled/graphs/0.neff") == b"neff" * 1000
    assert set(found) == {"compiled/manifest.json", "manifest.json", "serving.properties"}
    assert manifests.read(destination) == made
    manifests.verify(destination, made)
    assert made.effective_options["context_length_estimate"] == [64, 128]
    assert [path.name for path in destination.parent.iterdir()] == ["out"]


def test_the_output_is_detected_and_its_options_are_those_that_were_in_force(model, tmp_path):
    destination = tmp_path / "out"
    write(model, destination)
    artifact = detect(destination)
    assert artifact.format == "djl_neuronx"
    assert artifact.kind == "safetensors"
    assert artifact.compiled_for["n_positions"] == 128
    resolved = resolve(None, destination, {})
    for name in set(OPTIONS) - {"cpu_threads", "model_id"}:
        assert getattr(resolved.options, name) == OPTIONS[name]
    assert resolved.options.model_id is None


@pytest.mark.parametrize(
    ("weights", "added", "is_refused"),
    [
        ("link", "model-00001-of-00002.safetensors", True),
        ("link", "model.safetensors.index.json", True),
        ("link", "weights.bin", True),
        ("link", "pytorch_model.bin.index.json", False),
        ("link", "training_args.bin", False),
        ("link", "notes.txt", False),
        ("none", "model.safetensors", False),
    ],
)
def test_weights_that_are_not_the_output_s_are_not_served(
    model, tmp_path, weights, added, is_refused
):
    destination = tmp_path / "out"
    write(model, destination, weights=weights)
    if added == "model.safetensors":
        shutil.copy(model / added, destination / added)
    else:
        (destination / added).write_text("{}")
    if is_refused:
        with pytest.raises(ArtifactError, match=rf"does not list: {added};"):
            detect(destination)
    else:
        assert detect(destination).kind == "safetensors"


def test_the_entry_point_and_djl_s_own_keys_are_there(model, tmp_path):
    write(model, tmp_path / "out")
    found = {one.name: one.value for one in from_file(tmp_path / "out")}
    assert found["entryPoint"] == "djl_python_neuronx.handler"
    assert found["engine"] == "Python"
    assert "tgi_compat" not in found


def test_djl_s_own_keys_are_the_user_s_or_the_advised_ones(model, tmp_path):
    keys = {"retry_threshold": "7", "engine": "MPI", "option.env": "A=1,B=x y", "option.tgi": "no"}
    write(model, tmp_path / "out", for_djl=keys)
    found = {one.name: one.value for one in from_file(tmp_path / "out")}
    assert found["retry_threshold"] == "7"
    assert found["maxWorkers"] == "1"
    assert found["engine"] == "Python"
    assert found["env"] == "A=1,B=x y"


# DJL Serving's keys and ours have no control characters; values may have any text.
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z_]{1,12}", fullmatch=True), _TEXT))
def test_every_value_reads_back(tmp_path_factory, options):
    folder = tmp_path_factory.mktemp("properties")
    local = {"model_id", "model_dir", "revision"}
    (folder / "serving.properties").write_bytes(properties_file(options))
    found = {one.name: one.value for one in from_file(folder) if one.by_user}
    wanted = {name: value for name, value in options.items() if name not in local}
    assert found == {"entryPoint": "djl_python_neuronx.handler", **wanted}


def test_java_s_spelling_of_values():
    lines = properties_file(
        {
            "a": True,
            "b": (1, 2),
            "c": {"top_p": 1, "top_k": 1},
            "d": None,
            "e": 0.5,
            "f": [],
            "g": 2400.0,
        }
    ).decode()
    assert "option.a=true\noption.b=1,2\n" in lines
    assert 'option.c={"top_k"\\: 1, "top_p"\\: 1}\n' in lines
    assert "option.d" not in lines
    assert "option.e=0.5\n" in lines
    assert "option.g=2400\n" in lines


@pytest.mark.parametrize(
    ("weights", "links"), [("none", None), ("link", 2), ("copy", 1)], ids=["none", "link", "copy"]
)
def test_weights_are_left_out_linked_or_copied(model, tmp_path, weights, links):
    (model / "adapters" / "a").mkdir(parents=True)
    (model / "adapters" / "a" / "adapter_config.json").write_text("{}")
    write(model, tmp_path / "out", weights=weights)
    there = tmp_path / "out" / "model.safetensors"
    assert (there.stat().st_nlink if there.exists() else None) == links
    adapter = tmp_path / "out" / "adapters" / "a" / "adapter_config.json"
    assert adapter.stat().st_nlink == 1, "weights alone are linked"


def test_a_hugging_face_cache_s_links_become_files(model, tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0a1b"
    blob = tmp_path / "models--a--b" / "blobs" / "0123"
    for folder in (snapshot.parent, blob.parent):
        folder.mkdir(parents=True)
    model = model.rename(snapshot)
    (model / "model.safetensors").rename(blob)
    (model / "model.safetensors").symlink_to(blob)
    write(model, tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").is_symlink()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == blob.read_bytes()


def test_split_weights_adapters_and_code_come_too(model, tmp_path):
    names = ("pytorch_model.bin/p0.wte", "adapters/one/adapter_config.json", "modeling_x.py")
    for name in (*names, "additional_chat_templates/rag.jinja"):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_bytes(name.encode())
    write(model, tmp_path / "out")
    found = contents(tmp_path / "out")
    assert found["pytorch_model.bin/p0.wte"] == b"pytorch_model.bin/p0.wte"
    assert found["adapters/one/adapter_config.json"] == b"adapters/one/adapter_config.json"
    assert found["modeling_x.py"] == b"modeling_x.py"
    assert "additional_chat_templates/rag.jinja" in found


def test_an_unchanged_output_is_replaced(model, tmp_path):
    write(model, tmp_path / "out")
    write(model, tmp_path / "out", options={"n_positions": 64}, weights="none")
    assert "model.safetensors" not in contents(tmp_path / "out")
    assert b"option.n_positions=64" in contents(tmp_path / "out")["serving.properties"]


@pytest.mark.parametrize("theirs", ["a folder", "a file", "a changed output", "another manifest"])
def test_what_is_not_ours_stays_unless_told(model, tmp_path, theirs):
    destination = tmp_path / "out"
    match theirs:
        case "a folder":
            destination.mkdir()
            (destination / "thesis.txt").write_text("ten years of work")
        case "a file":
            destination.write_text("ten years of work")
        case "a changed output":
            write(model, destination)
            (destination / "thesis.txt").write_text("ten years of work")
        case "another manifest":
            destination.mkdir()
            (destination / "manifest.json").write_text('{"name": "a web page"}')
    before = contents(destination) if destination.is_dir() else destination.read_bytes()
    with pytest.raises(ArtifactError, match=r"out.*[Nn]ame another"):
        write(model, destination)
    assert before == (contents(destination) if destination.is_dir() else destination.read_bytes())
    write(model, destination, overwrite=True)
    assert "thesis.txt" not in contents(destination)
    assert "config.json" in contents(destination)


@pytest.mark.parametrize("where", [".", "out", ".."], ids=["same", "inside", "around"])
def test_output_and_model_are_never_one(model, where):
    before = contents(model.parent)
    with pytest.raises(ArtifactError, match="overlap; expected separate folders"):
        write(model, model / where, overwrite=True)
    assert contents(model.parent) == before


def test_a_link_out_of_the_model_is_not_copied_out(model, tmp_path):
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    (model / "preprocessor_config.json").symlink_to(secret)
    with pytest.raises(ArtifactAccessError, match=r"preprocessor_config\.json"):
        write(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


_KILLED = """
import os, signal, sys
from pathlib import Path
from tests.artifacts import outputs
steps, last = 0, int(sys.argv[3])
def on_event(event, args):
    global steps
    made = event == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT
    if (made or event in ("os.rename", "os.link", "os.remove", "os.mkdir", "shutil.rmtree")) and "out" in str(args):
        steps += 1
        if steps == last:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(on_event)
for last in range(1, 200):
    steps = 0
    pid = os.fork()
    if pid == 0:
        outputs.write(Path(sys.argv[1]), Path(sys.argv[2]), options={"n_positions": 64})
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    outputs.check_whole(Path(sys.argv[2]))
    if status == 0:
        print(last)
        break
"""


def test_killed_at_every_step_the_old_output_or_the_new_one_is_whole(model, tmp_path):
    write(model, tmp_path / "out")
    ran = subprocess.run(
        [sys.executable, "-c", _KILLED, str(model), str(tmp_path / "out"), "0"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 10
    assert b"option.n_positions=64" in contents(tmp_path / "out")["serving.properties"]
    write(model, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


_MOUNTED = """
import subprocess, sys
from pathlib import Path
from tests.artifacts import outputs
model, destination = map(Path, sys.argv[1:])
destination.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(destination)], check=True)
def on_event(event, args):
    # Nobody finds a manifest there before, or after, its files.
    if event in ("os.rename", "os.remove", "os.rmdir") and (destination / "manifest.json").exists():
        outputs.check_files_are_there_or_it_says_unfinished(destination)
sys.addaudithook(on_event)
for positions in (64, 32):
    made = outputs.write(model, destination, options={"n_positions": positions})
    outputs.check_whole(destination)
    assert destination.is_mount()
    assert not list(destination.glob(".*"))
print("done")
"""


def test_a_mounted_destination_is_written_in_place(model, tmp_path):
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*unshare, "true"], check=False).returncode
    ):
        pytest.skip("this user may not mount in a namespace of its own (unshare)")
    ran = subprocess.run(
        [*unshare, sys.executable, "-c", _MOUNTED, str(model), str(tmp_path / "out")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.stdout == "done\n", ran.stderr


def test_an_interrupted_move_is_not_served_and_is_taken_up_again(model, tmp_path, monkeypatch):
    destination = tmp_path / "out"
    write(model, destination)
    rename = Path.rename

    def is_cut(path, target):
        if Path(target).name == "tokenizer.json":
            raise OSError(errno.EIO, "the disk went away")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_mount", lambda path: path == destination)
        patch.setattr(Path, "rename", is_cut)
        with pytest.raises(ArtifactAccessError):
            write(model, destination, options={"n_positions": 64})
    with pytest.raises(ArtifactError, match="unfinished output"):
        detect(destination)
    (destination / "thesis.txt").write_text("ten years of work")
    with pytest.raises(ArtifactError, match=r"thesis\.txt"):
        write(model, destination)
    (destination / "thesis.txt").unlink()
    write(model, destination)
    check_whole(destination)


def test_all_of_an_output_is_fetched_from_a_remote(model, compiled, tmp_path):
    """Else it would be refused there: files that its manifest lists would be missing."""
    for name in (
        "training_args.bin",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "optimizer.bin",
        "README.txt",
    ):
        (model / name).write_bytes(b"x")
    adapter = model / "adapters" / "a"
    adapter.mkdir(parents=True)
    for name in ("adapter_model.safetensors", "adapter_model.bin", "README.md", ".hidden"):
        (adapter / name).write_bytes(b"x")
    (adapter / "runs").mkdir()
    (adapter / "runs" / "events").write_bytes(b"x")
    files = write(model, tmp_path / "out", compiled=compiled).files
    assert set(SERVING.choose(files)) == set(files)
    assert {"model.safetensors", "adapters/a/adapter_model.safetensors", "README.txt"} <= set(files)


def test_a_file_that_another_program_replaces_is_not_listed(model, tmp_path):
    made = write(model, tmp_path / "out", own_properties=False)
    assert (tmp_path / "out" / "serving.properties").exists()
    assert "serving.properties" not in made.files
    assert manifests.read(tmp_path / "out") == made


@pytest.mark.parametrize("mounted", [False, True])
def test_what_a_killed_process_left_goes_and_what_is_in_use_stays(
    model, tmp_path, monkeypatch, mounted
):
    destination = tmp_path / "a[b]"
    write(model, destination)
    parent = destination if mounted else tmp_path
    monkeypatch.setattr(Path, "is_mount", lambda path: mounted and path == destination)
    dead = parent / ".a[b].output-dead_123"
    (dead / "new").mkdir(parents=True)
    write(model, destination)
    assert not dead.exists()
    alive = tmp_path / ".a[b].output-alive123"
    alive.mkdir()
    with flock(alive):
        write(model, destination)
        assert alive.exists()


@pytest.mark.parametrize("exchanges", [True, False])
def test_an_output_is_replaced_where_the_kernel_exchanges_no_names(
    model, tmp_path, monkeypatch, exchanges
):
    if not exchanges:
        monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    destination = tmp_path / "out"
    write(model, destination)
    before = (destination / "config.json").stat().st_ino
    write(model, destination)
    assert (destination / "config.json").stat().st_ino != before
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == ["out"]


def test_files_and_the_names_of_folders_reach_the_disk(tmp_path, monkeypatch):
    """A file that is written and renamed survives a power failure only if it was synchronised before."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "c").touch()
    reached = []
    monkeypatch.setattr(atomic, "sync", reached.append)
    atomic.sync_tree(tmp_path)
    assert sorted(reached) == sorted([tmp_path, *tmp_path.rglob("*")])
