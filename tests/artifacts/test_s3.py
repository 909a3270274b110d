"""Folders of S3 come and go as they are, and what is refused says why."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from djl_python_neuronx.artifacts.folder import Selection, check_names
from djl_python_neuronx.artifacts.formats import detect
from djl_python_neuronx.artifacts.manifest import is_unfinished
from djl_python_neuronx.errors import ArtifactAccessError, ArtifactError, ArtifactNotFoundError
from tests.doubles.s3_proxy import Fault
from tests.doubles.s3_rig import (
    EVERYTHING,
    KEYS,
    LARGE,
    NAME,
    SMALL,
    URI,
    contents,
    fetch,
    put,
    s3,
    settings,
    tensors,
)

pytest_plugins = ["tests.doubles.s3_fixtures"]


def test_a_folder_arrives_as_it_is(proxy, bucket, tmp_path):
    put(bucket, {**SMALL, NAME: LARGE})
    put(bucket, {"": b"", "tokenizer/": b"", "old_$folder$": b""})  # what consoles and Hadoop leave
    put(bucket, {"config.json": b"another model's"}, prefix="llama2/")
    progress = []
    folder = s3.fetch(
        URI,
        tmp_path,
        settings(proxy),
        selection=EVERYTHING,
        progress=lambda done, total: progress.append((done, total)),
    )
    assert contents(folder) == {**SMALL, NAME: LARGE}
    total = sum(map(len, [*SMALL.values(), LARGE]))
    assert progress[-1] == (total, total)


def test_only_what_a_format_needs_is_loaded(proxy, bucket, tmp_path):
    wanted = {
        "config.json",
        "model.safetensors",
        "pytorch_model.bin/p0.wte",
        "weights/model.pt",
        "adapters/a/adapter_model.bin",
        "LICENSE",
    }
    left = {
        "pytorch_model.bin.index.json",
        "pytorch_model-00001-of-00002.bin",
        "tf_model.h5",
        "flax_model.msgpack",
        "onnx/model.onnx",
        "original/consolidated.00.pth",
        ".git/config",
        "training_args.bin",
        "README.md",
    }
    put(bucket, {**dict.fromkeys(wanted | left, b"x"), NAME: tensors(5, 300)})
    folder = s3.fetch(URI, tmp_path, settings(proxy))
    assert set(contents(folder)) == wanted


def test_pickled_weights_are_loaded_where_there_are_no_others(proxy, bucket, tmp_path):
    put(bucket, {"config.json": b"{}", "pytorch_model.bin": b"x"})
    assert set(contents(s3.fetch(URI, tmp_path, settings(proxy)))) == {
        "config.json",
        "pytorch_model.bin",
    }


def test_a_listing_of_several_pages(proxy, bucket, tmp_path):
    from moto.s3.models import s3_backends

    # Past the server: a thousand requests would take long.
    for n in range(1010):
        s3_backends["123456789012"]["aws"].put_object("models", f"llama/p{n:04}", b"%d" % n)
    ends = Selection("ends", lambda names: [min(names), max(names)])
    folder = s3.fetch(URI, tmp_path, settings(proxy), selection=ends)
    assert contents(folder) == {"p0000": b"0", "p1009": b"1009"}


def test_a_changed_remote_is_loaded_anew_and_what_stayed_is_not(proxy, bucket, tmp_path):
    put(bucket, {**SMALL, NAME: LARGE})
    old = fetch(proxy, tmp_path)
    assert fetch(proxy, tmp_path) == old
    proxy.seen.clear()
    put(bucket, {"config.json": b"new"})
    new = fetch(proxy, tmp_path)
    assert [path for path, _ in proxy.data_requests()] == ["/models/llama/config.json"]
    assert contents(new) == {**SMALL, NAME: LARGE, "config.json": b"new"}
    assert contents(old) == {**SMALL, NAME: LARGE}, "this process still uses it"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["../evil.json"], "'../evil.json' is not a plain path"),
        (["a/../../evil"], "is not a plain path"),
        (["/etc/passwd"], "is not a plain path"),
        (["a//b"], "is not a plain path"),
        (["./a"], "is not a plain path"),
        (["a\\..\\b"], "is not a plain path"),
        (["a\0b"], "is not a plain path"),
        (["a\nb"], "is not a plain path"),
        (["x" * 256], "too long"),
        (["a", "a/b"], "'a' is a file and a folder"),
        (["sub/"], "is not a plain path"),
    ],
)
def test_keys_that_would_leave_the_folder_are_refused(names, said):
    with pytest.raises(ArtifactError) as caught:
        check_names(names, URI)
    assert said in str(caught.value)
    assert URI in str(caught.value)


@pytest.mark.parametrize("name", ["a\\b", "sub//x", "a\x7fb", "x" * 256, "config.json/x"])
def test_a_bucket_with_such_a_key_loads_nothing(proxy, bucket, tmp_path, name):
    put(bucket, {"config.json": b"{}", name: b"x"})
    with pytest.raises(ArtifactError, match="cannot be files of one folder"):
        s3.fetch(URI, tmp_path, settings(proxy))
    assert list(tmp_path.rglob("*")) == []


def test_what_is_not_wanted_refuses_no_model(proxy, bucket, tmp_path):
    """Keys that cannot be files, or not side by side on every disk."""
    wanted = {"config.json": b"{}", "LICENSE": b"1", "license": b"2", "weights": b"3"}
    unwanted = [
        "README.md",
        "readme.md",
        "../evil.json",
        "../../evil.png",
        "docs\\model.md",
        "a\x7fb.md",
        "x" * 256 + ".md",
        "images//a.png",
        "onnx/",
        "onnx/../../x",
        "weights/notes.md",
        "sub/",
        "",
    ]
    put(bucket, {**wanted, **dict.fromkeys(unwanted, b"x")})
    assert contents(s3.fetch(URI, tmp_path / "cache", settings(proxy))) == wanted
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_names_alone_are_listed_whatever_they_are(proxy, bucket):
    """A compile store is such a folder, with whatever others have put below it."""
    put(bucket, {"a.neff": b"x", "sub//x": b"x", "../y": b"x"})
    assert s3.list_names(URI, settings(proxy)) == ["../y", "a.neff", "sub//x"]
    with pytest.raises(ArtifactError, match="cannot be files of one folder"):
        s3.fetch(URI, Path("unused"), settings(proxy), selection=EVERYTHING)


def test_a_missing_bucket_prefix_or_object(proxy, bucket, tmp_path):
    with pytest.raises(ArtifactNotFoundError, match="no such bucket"):
        s3.fetch("s3://nowhere/x", tmp_path, settings(proxy))
    with pytest.raises(ArtifactNotFoundError, match="nothing is there"):
        s3.fetch("s3://models/x", tmp_path, settings(proxy))
    with pytest.raises(ArtifactNotFoundError, match="no such object"):
        s3.read(URI, "config.json", settings(proxy))
    with pytest.raises(ArtifactNotFoundError, match="names no bucket"):
        s3.fetch("s3://", tmp_path, settings(proxy))
    put(bucket, {"notes.md": b"x"})
    with pytest.raises(ArtifactNotFoundError, match="1 objects, and none belongs to a model"):
        s3.fetch(URI, tmp_path, settings(proxy))


def test_no_credentials(proxy, tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    without = {"AWS_ENDPOINT_URL": proxy.url, "AWS_REGION": "us-east-1"}
    with pytest.raises(ArtifactAccessError, match=r"no AWS credentials .*AWS_PROFILE"):
        s3.fetch(URI, tmp_path, without)
    with pytest.raises(ArtifactAccessError, match="Correct AWS_PROFILE"):
        s3.fetch(URI, tmp_path, {"AWS_PROFILE": "nobody"})


def test_no_server(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        unreachable = {**KEYS, "AWS_ENDPOINT_URL": url, "AWS_MAX_ATTEMPTS": "1"}
        with pytest.raises(ArtifactAccessError, match=r"cannot be reached: .*AWS_ENDPOINT_URL"):
            s3.fetch(URI, tmp_path, unreachable)
    malformed = {**KEYS, "AWS_ENDPOINT_URL": "nonsense"}
    with pytest.raises(ArtifactAccessError, match="correct AWS_ENDPOINT_URL"):
        s3.fetch(URI, tmp_path, malformed)


def test_an_upload_sends_the_manifest_last_and_comes_back_the_same(proxy, bucket, tmp_path):
    source = tmp_path / "source"
    files = {**SMALL, "manifest.json": b"{}", NAME: LARGE}
    for name, content in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    put(bucket, {"manifest.json": b"an older upload's"})
    s3.upload(source, URI, settings(proxy))
    writes = [(r.method, r.path) for r in proxy.seen if r.method in {"PUT", "POST", "DELETE"}]
    assert writes[0] == ("PUT", "/models/llama/manifest.json")
    assert writes[-1] == ("PUT", "/models/llama/manifest.json")
    assert contents(fetch(proxy, tmp_path / "cache")) == files
    assert s3.read(URI, "manifest.json", settings(proxy)) == b"{}"


def test_an_upload_that_fails_leaves_an_unfinished_one(proxy, bucket, tmp_path):
    (tmp_path / "manifest.json").write_bytes(b"{}")
    (tmp_path / "graph.neff").write_bytes(b"x")
    put(
        bucket,
        {"manifest.json": b"an older upload's", "graph.neff": b"older", "config.json": b"{}"},
    )
    proxy.rules = [
        Fault(
            "error",
            when=lambda r: r.method == "PUT" and r.path.endswith(".neff"),
            times=100,
            status=403,
            code="AccessDenied",
        )
    ]
    with pytest.raises(ArtifactAccessError, match="s3:PutObject"):
        s3.upload(tmp_path, URI, settings(proxy))
    left = json.loads(s3.read(URI, "manifest.json", settings(proxy)))
    assert is_unfinished(left)
    with pytest.raises(ArtifactError, match="unfinished output"):
        detect(fetch(proxy, tmp_path / "cache"))
    with pytest.raises(ArtifactNotFoundError, match=r"has no manifest.json"):
        s3.upload(tmp_path / "nothing", URI, settings(proxy))


def output_of(folder, files):
    """A finished output of these small files."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    listed = {name: {"bytes": len(content)} for name, content in files.items()}
    manifest = {"format": "djl_python_neuronx", "version": 1, "files": listed}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize("killed", [False, True])
def test_a_second_upload_leaves_nothing_of_the_first_and_all_of_the_user_s(
    proxy, bucket, tmp_path, killed
):
    first = {"config.json": b"1", "model-00001-of-00002.safetensors": b"old"}
    second = {"config.json": b"2", "model.safetensors": b"new"}
    third = {"config.json": b"3", "weights.bin": b"newest"}
    put(bucket, {"mine.txt": b"mine"})
    s3.upload(output_of(tmp_path / "1", first), URI, settings(proxy))
    refused = Fault(
        "error", when=lambda r: r.method == "DELETE", times=100, status=403, code="AccessDenied"
    )
    if killed:  # the third has to clear away what the first left
        proxy.rules = [refused]
        with pytest.raises(ArtifactAccessError):
            s3.upload(output_of(tmp_path / "2", second), URI, settings(proxy))
        proxy.rules = []
    else:
        s3.upload(output_of(tmp_path / "2", second), URI, settings(proxy))
    s3.upload(output_of(tmp_path / "3", third), URI, settings(proxy))
    found = contents(fetch(proxy, tmp_path / "cache"))
    assert found.pop("manifest.json") == (tmp_path / "3" / "manifest.json").read_bytes()
    assert found == {**third, "mine.txt": b"mine"}


def test_uris():
    assert s3.parse("s3://b") == s3.parse("s3://b/") == ("b", "")
    assert s3.parse("s3://b/x/y#z?/") == ("b", "x/y#z?/")
    arn = "arn:aws:s3:us-west-2:123456789012:accesspoint/mine"
    assert s3.parse(f"s3://{arn}/x") == (arn, "x/")
