"""Models of the hub, from a server of our own that speaks the part of its protocol that downloads use."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from djl_python_neuronx.artifacts import hub
from djl_python_neuronx.artifacts.fetch import fetch
from djl_python_neuronx.artifacts.folder import EVERYTHING, MAX_JSON_BYTES, SERVING
from djl_python_neuronx.artifacts.hub import check_whole
from djl_python_neuronx.errors import ArtifactAccessError, ArtifactError, ArtifactNotFoundError
from tests.artifacts.folders import tensors
from tests.doubles.hub import COMMITS, FILES, Hub, _etag

WANTED = {"config.json", "model.safetensors", "odd [name].txt"}


@pytest.fixture
def server():
    running = Hub()
    yield running
    running.close()


@pytest.fixture
def environ(server, tmp_path):
    return {"HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(tmp_path / "cache")}


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_only_what_a_format_needs_and_only_once(server, environ):
    folder = hub.fetch("ours/llama", environ=environ)
    assert contents(folder) == {name: FILES[name] for name in WANTED}
    assert {name for name, _ in server.loaded} == WANTED
    server.loaded.clear()
    assert hub.fetch("ours/llama", environ=environ) == folder
    assert server.loaded == []


@pytest.mark.parametrize("damage", ["cut", "zeros", "cut text"])
def test_a_damaged_file_in_the_cache_is_fetched_again_alone(server, environ, damage):
    """The library itself looks at names only."""
    folder = hub.fetch("ours/llama", environ=environ)
    name = "config.json" if damage == "cut text" else "model.safetensors"
    file = (folder / name).resolve()
    size = file.stat().st_size
    file.write_bytes(bytes(size) if damage == "zeros" else file.read_bytes()[: size // 2])
    server.loaded.clear()
    assert contents(hub.fetch("ours/llama", environ=environ)) == {n: FILES[n] for n in WANTED}
    assert server.loaded == [(name, 0)]


@pytest.mark.parametrize("half", [False, True])
def test_what_is_fetched_again_in_place_of_a_damaged_file_is_looked_at_too(server, environ, half):
    folder = hub.fetch("ours/llama", environ=environ)
    file = (folder / "model.safetensors").resolve()
    file.write_bytes(file.read_bytes()[:100])
    server.twist = shorter if half else flipped
    with pytest.raises(ArtifactAccessError, match=r"model\.safetensors differs twice from what"):
        hub.fetch("ours/llama", environ=environ)
    server.twist = lambda _request, *answer: answer
    assert contents(hub.fetch("ours/llama", environ=environ)) == {n: FILES[n] for n in WANTED}


def test_what_is_damaged_on_the_hub_is_fetched_once(server, environ, caplog):
    """As a file that nobody reads: `detect` judges what is served."""
    pointer = {"lfs.safetensors": b"version https://git-lfs"}
    server.models["ours/pointer"] = {**FILES, **pointer}
    for _ in range(2):
        folder = hub.fetch("ours/pointer", environ=environ)
        assert contents(folder).items() >= pointer.items()
    assert [name for name, _ in server.loaded].count("lfs.safetensors") == 1
    assert "hub_file_damaged" not in caplog.text


def flipped(request, status, body, headers):
    if request.command == "GET" and request.path.endswith("model.safetensors"):
        body = body[:-1] + bytes([body[-1] ^ 1])
    return status, body, headers


def shorter(request, status, body, headers):
    """Consistent in itself, only the listing says otherwise."""
    if request.path.endswith("model.safetensors"):
        body = body[:1000]
    return status, body, headers


def of_another_commit(request, status, body, headers):
    if "/resolve/" in request.path:
        headers = {**headers, "X-Repo-Commit": "c" * 40}
    return status, body, headers


@pytest.mark.parametrize(
    ("twist", "said"),
    [
        (flipped, r"\('a+', \d+, '[0-9a-f]{64}'\), listed are \('a+', \d+, '"),
        (shorter, r"\('a+', 1000, .*listed are \('a+', 256"),
        (of_another_commit, r"\('c+', \d+, .*listed are \('a+', "),
    ],
)
def test_what_differs_twice_from_the_listing_ends_the_fetch(server, environ, twist, said):
    server.twist = twist
    for _ in range(2):  # nor does the next start take it from the cache
        server.loaded.clear()
        with pytest.raises(
            ArtifactAccessError, match=f"^{server.url}/ours/llama/resolve/a+/.* are {said}"
        ):
            hub.fetch("ours/llama", environ=environ)
        assert [name for name, _ in server.loaded].count("model.safetensors") <= 2
    server.twist = lambda _request, *answer: answer
    assert contents(hub.fetch("ours/llama", environ=environ)) == {n: FILES[n] for n in WANTED}


@pytest.mark.parametrize(
    ("name", "plain", "other"),
    [
        ("X-Repo-Commit", "a" * 40, "main"),
        ("X-Linked-ETag", '"a"', '"../a"'),
        ("ETag", 'W/"a"', '"/a"'),
        ("X-Xet-Hash", "a" * 64, "a" * 63),
        ("X-Xet-Cas-Url", "https://hub", "local:///a"),
        ("Location", "/a", "file:///a"),
    ],
)
def test_each_header_is_taken_in_its_plain_form_alone(name, plain, other):
    headers = {"X-Repo-Commit": "a" * 40, name: plain}
    answer = SimpleNamespace(url="http://hub/a", headers=headers, iter_bytes=iter, status_code=200)
    hub._check_answer(answer)
    headers[name] = other
    with pytest.raises(ArtifactAccessError, match=f"answers with {name} '"):
        hub._check_answer(answer)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_body_ends_where_the_listing_says(server, environ, name):
    def longer(request, status, body, headers):
        if request.path.endswith(name):
            body += b" "
        return status, body, headers

    server.twist = longer
    most = len(FILES[name])
    with pytest.raises(ArtifactAccessError, match=f"{name} answers with more than {most} bytes"):
        hub.fetch("ours/llama", environ=environ)


def test_a_redirect_and_an_error_may_be_longer_than_the_file(server, environ):
    """The library reads their texts too."""
    name = "odd [name].txt"
    text = b"Temporary Redirect or an error, in more words than the file has. " * 3
    seen = []

    def elsewhere(request, status, body, headers):
        if request.command == "GET" and quote(name) in request.path:
            seen.append(request.path)
            if len(seen) == 1:
                return 307, text, {"Location": request.path + "?again=1"}
        return status, body, headers

    server.twist = elsewhere
    assert contents(hub.fetch("ours/llama", environ=environ))[name] == FILES[name]
    assert len(seen) == 2

    def broken(request, status, body, headers):
        if request.command == "GET" and quote(name) in request.path:
            return 403, text, {}
        return status, body, headers

    server.twist = broken
    environ = {**environ, "HF_HUB_CACHE": environ["HF_HUB_CACHE"] + "2"}
    with pytest.raises(ArtifactAccessError, match="HTTP status 403"):
        hub.fetch("ours/llama", environ=environ)


@pytest.mark.parametrize("path", ["/api/models/", "config.json"])
def test_a_body_that_grows_when_it_is_decompressed_is_not_stored(server, environ, tmp_path, path):
    """A listing that is fetched for a start, and the file that `check` reads."""
    bomb = gzip.compress(b" " * (2 * MAX_JSON_BYTES + 1))

    def grow(request, status, body, headers):
        if request.command == "GET" and path in request.path:
            body, headers = bomb, {**headers, "Content-Encoding": "gzip"}
        return status, body, headers

    server.twist = grow
    read = {
        "/api/models/": partial(hub.fetch, environ=environ),
        "config.json": partial(hub.fetch_config, revision=None, environ=environ, origin="a line"),
    }
    with pytest.raises(ArtifactAccessError, match="answers with more than"):
        read[path]("ours/llama")
    stored = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert stored <= MAX_JSON_BYTES


def test_what_differs_once_is_fetched_again(server, environ):
    def once(request, *answer):
        is_first = not [name for name, _ in server.loaded].count("model.safetensors") > 1
        return flipped(request, *answer) if is_first else answer

    server.twist = once
    assert contents(hub.fetch("ours/llama", environ=environ)) == {n: FILES[n] for n in WANTED}


def test_a_revision_leaves_no_folder(server, environ):
    with pytest.raises(ArtifactError, match=r"option\.revision .*'\.\./x' is not a plain path"):
        hub.fetch("ours/llama", revision="../x", environ=environ)
    assert server.tokens == []


def test_a_library_that_cannot_be_guarded_is_not_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(__version__="0.1"))
    with pytest.raises(ArtifactAccessError, match=r"0\.1 cannot be checked: it has neither"):
        hub._guard_client.__wrapped__()


def test_a_revision_and_a_token(server, environ):
    folder = hub.fetch("ours/llama", revision="v2", environ={**environ, "HF_TOKEN": "hf_secret"})
    assert folder.name == COMMITS["v2"]
    assert hub.fetch("ours/llama", revision=COMMITS["v2"], environ=environ) == folder
    assert "Bearer hf_secret" in server.tokens
    server.tokens.clear()
    hub.fetch("ours/llama", environ={**environ, "HF_TOKEN": "hf_other"})
    assert "Bearer hf_other" in server.tokens


@pytest.mark.parametrize("selection", [SERVING, EVERYTHING])
def test_a_model_of_the_hub_is_that_of_its_revision(server, environ, tmp_path, selection):
    given = {"environ": environ, "root": tmp_path, "selection": selection}
    folder = fetch("ours/llama", revision="v2", **given)
    assert folder.name == COMMITS["v2"]
    assert contents(folder).keys() == (FILES.keys() if selection is EVERYTHING else WANTED)


def test_a_download_that_breaks_off_goes_on_where_it_was(server, environ):
    # The library writes ten megabytes at a time; what comes after the last ten is asked for again.
    weights = tensors(0, 24_000_000)
    server.models["ours/large"] = {"config.json": b"{}", "model.safetensors": weights}
    server.cut_next = 1
    try:
        folder = hub.fetch("ours/large", environ=environ)
    except ArtifactAccessError:  # huggingface_hub before 1.0 leaves it to the next start
        folder = hub.fetch("ours/large", environ=environ)
    assert contents(folder)["model.safetensors"] == weights
    starts = [start for name, start in server.loaded if name == "model.safetensors"]
    assert starts[0] == 0
    assert starts[-1] >= 10_000_000


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_takes_what_is_there(server, environ, variable):
    folder = hub.fetch("ours/llama", environ=environ)
    server.models.clear()
    offline = {**environ, variable: "yes"}
    assert hub.fetch("ours/llama", environ=offline) == folder
    server.tokens.clear()
    with pytest.raises(ArtifactAccessError, match=f"Load it once without {variable}, or name"):
        hub.fetch("ours/llama", revision="v2", environ=offline)
    assert server.tokens == [], "nobody was asked"


SHARDED = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors.index.json": json.dumps(
        {
            "weight_map": {
                "a": "model-00001-of-00002.safetensors",
                "b": "model-00002-of-00002.safetensors",
            }
        }
    ).encode(),
    "model-00001-of-00002.safetensors": b"1",
    "model-00002-of-00002.safetensors": b"2",
    "LICENSE.txt": b"free",
    "README.md": b"read",
}


@pytest.fixture(params=["listed", "not listed"])
def snapshot(request, server, environ):
    """A model in the cache, and what the library noted of its files, or an older one did not."""
    server.models["ours/sharded"] = SHARDED
    folder = hub.fetch("ours/sharded", environ=environ)
    trees = folder.parents[1] / "trees"
    shutil.rmtree(trees, ignore_errors=True)
    if request.param == "listed":
        trees.mkdir()
        noted = {"format_version": 1, "files": {name: {} for name in SHARDED}}
        (trees / f"{folder.name}.json").write_text(json.dumps(noted))
    return folder


def offline(environ):
    return hub.fetch("ours/sharded", environ={**environ, "HF_HUB_OFFLINE": "1"})


def test_offline_does_not_miss_what_nobody_reads(snapshot, environ, caplog):
    (snapshot / "LICENSE.txt").unlink()
    (snapshot.parents[1] / "blobs" / f"{_etag(b'1')}.0a1b.incomplete").write_bytes(
        b"of one that is whole"
    )
    assert offline(environ) == snapshot
    assert "hub_download_unfinished" not in caplog.text


@pytest.mark.parametrize("damage", ["no shard", "no link's file"])
def test_offline_refuses_what_was_cut_off(snapshot, environ, damage):
    shard = snapshot / "model-00002-of-00002.safetensors"
    if damage == "no shard":
        shard.unlink()
    else:
        shard.resolve().unlink()
    with pytest.raises(ArtifactAccessError, match="Start once without HF_HUB_OFFLINE") as caught:
        offline(environ)
    assert f"model in {snapshot} is incomplete" in str(caught.value)
    assert ": model-00002-of-00002.safetensors missing" in str(caught.value)


@pytest.mark.parametrize("snapshot", ["listed"], indirect=True)
def test_offline_refuses_a_model_without_a_file_that_the_hub_has(snapshot, environ):
    (snapshot / "generation_config.json").unlink()
    with pytest.raises(ArtifactAccessError, match=r": generation_config\.json missing"):
        offline(environ)


@pytest.mark.parametrize("snapshot", ["not listed"], indirect=True)
@pytest.mark.parametrize(
    ("gone", "named"),
    [
        ("config.json", "config.json"),
        ("tokenizer.json", "tokenizer"),
        ("model.safetensors.index.json", "weights"),
    ],
)
def test_offline_names_what_a_model_lacks_where_a_file_is_in_the_making(snapshot, gone, named):
    (snapshot / gone).unlink()
    check_whole(snapshot, SERVING)  # without `offline`: the library remembers its list of the files
    making = snapshot.parents[1] / "blobs" / "abc.incomplete"
    making.write_bytes(b"{")
    said = f": {named} (unfinished: {making}) missing"
    with pytest.raises(ArtifactAccessError, match=re.escape(said)):
        check_whole(snapshot, SERVING)


@pytest.mark.parametrize("snapshot", ["not listed"], indirect=True)
def test_offline_takes_a_whole_model_beside_another_download(snapshot, environ, caplog):
    """As of another commit, or of a file that nobody selected: nothing tells which file a blob belongs to."""
    making = snapshot.parents[1] / "blobs" / "abc.incomplete"
    making.write_bytes(b"{")
    assert offline(environ) == snapshot
    assert f"hub_download_unfinished folder={snapshot} blobs='{making}'" in caplog.text


@pytest.mark.parametrize("snapshot", ["not listed"], indirect=True)
def test_offline_refuses_single_weights_whose_link_leads_nowhere(snapshot, environ):
    (snapshot / "model.safetensors.index.json").unlink()
    (snapshot / "model.safetensors").symlink_to("../../blobs/gone")
    with pytest.raises(ArtifactAccessError, match=r": model\.safetensors missing"):
        offline(environ)


@pytest.mark.parametrize("snapshot", ["listed"], indirect=True)
def test_offline_a_list_of_another_form_is_not_read(snapshot, environ):
    (snapshot / "generation_config.json").unlink()
    listed = snapshot.parents[1] / "trees" / f"{snapshot.name}.json"
    listed.write_text(listed.read_text().replace('"format_version": 1', '"format_version": 2'))
    assert offline(environ) == snapshot


@pytest.mark.parametrize("snapshot", ["not listed"], indirect=True)
def test_offline_an_index_that_is_none_is_left_to_who_reads_it(snapshot, environ):
    index = {
        "weight_map": {
            "a": ["model-00001-of-00002.safetensors"],
            "b": "model-9.safetensors",
            "c": 3,
        }
    }
    (snapshot / "model.safetensors.index.json").unlink()
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ArtifactAccessError, match=r": model-9\.safetensors missing"):
        offline(environ)
    del index["weight_map"]["b"]
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert offline(environ) == snapshot


@pytest.mark.parametrize(
    ("model", "revision", "kind", "said"),
    [
        ("ours/none", None, ArtifactNotFoundError, "has no model 'ours/none'"),
        ("ours/llama", "v3", ArtifactNotFoundError, "has no revision 'v3'"),
        ("ours/gated", None, ArtifactAccessError, "is gated: accept its terms"),
        ("not a model", None, ArtifactNotFoundError, "is not a model id"),
        ("ours/readme", None, ArtifactNotFoundError, "none belongs to a model"),
    ],
)
def test_what_the_hub_refuses_says_what_to_do(server, environ, model, revision, kind, said):
    server.models |= {"ours/gated": FILES, "ours/readme": {"README.md": b"x"}}
    server.gated = {"ours/gated"}
    with pytest.raises(kind) as caught:
        hub.fetch(model, revision=revision, environ=environ)
    assert said in str(caught.value)
    assert model in str(caught.value)


def test_a_hub_that_cannot_be_reached(environ):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            ArtifactAccessError, match=r"HF_HUB_OFFLINE=1 takes what is in the cache"
        ):
            hub.fetch("ours/llama", environ={**environ, "HF_ENDPOINT": url})


def test_a_hub_that_stops_to_answer_is_not_taken_for_offline_mode(server, environ, monkeypatch):
    def stops(*_, **__):
        raise LocalEntryNotFoundError("away")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", stops)
    with pytest.raises(ArtifactAccessError, match=f"{server.url} did not answer") as caught:
        hub.fetch("ours/llama", environ=environ)
    assert "OFFLINE" not in str(caught.value)


@pytest.mark.parametrize("model", ["ours/none", "ours/gated", "ours/readme", "ours/broken"])
def test_a_password_in_the_endpoint_is_told_to_nobody(server, environ, model, caplog):
    server.models |= {"ours/gated": FILES, "ours/readme": {"README.md": b"x"}}
    server.gated = {"ours/gated"}
    url = server.url.replace("//", "//me:s3cr@t@")
    if model == "ours/broken":
        server.close()
    caplog.set_level("INFO", "djl_python_neuronx")
    with pytest.raises((ArtifactAccessError, ArtifactNotFoundError)) as caught:
        hub.fetch(model, environ={**environ, "HF_ENDPOINT": url})
    assert server.url in str(caught.value)
    assert "s3cr" not in str(caught.value) + caplog.text
    assert "me:" not in str(caught.value)


def test_no_room(server, environ):
    class Endless(bytes):
        def __len__(self):
            return 2**60

    server.models["ours/endless"] = {"config.json": b"{}", "model.safetensors": Endless()}
    with pytest.raises(ArtifactAccessError, match=r"needs 1073741824\.00 GiB"):
        hub.fetch("ours/endless", environ=environ)
    assert server.loaded == []


def test_the_process_environment_counts_too(server, tmp_path):
    command = "from djl_python_neuronx.artifacts import hub; print(hub.fetch('ours/llama'))"
    environ = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home")}

    def run(**more):
        return subprocess.run(
            [sys.executable, "-c", command],
            env={**environ, **more},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    folder = run()
    assert folder.startswith(str(tmp_path / "home" / "hub"))
    server.models.clear()
    assert run(HF_HUB_OFFLINE="1") == folder
