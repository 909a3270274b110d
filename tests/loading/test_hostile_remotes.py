"""Remotes that choose where files are written: a folder's own, the operator's mirror that was broken into."""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import suppress
from typing import ClassVar

import pytest
from huggingface_hub import constants

from djl_python_neuronx.errors import ServingError
from djl_python_neuronx.loading.check import check
from djl_python_neuronx.loading.partition import compile_model
from djl_python_neuronx.service import Service
from tests.artifacts.folders import tensors
from tests.doubles.hub import Hub
from tests.doubles.remote_doubles import Quiet, serving

MODEL = "evil/m"
PAYLOAD = b"import os; os.system('touch pwned')"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": PAYLOAD,
    "model.safetensors": tensors(0, 4096),
}
UP = "../../../../site"
"""From a folder of the model in the cache to the folder of the Python packages."""
WRITTEN = re.compile(
    r"home|home/hf|home/hf/hub(/CACHEDIR\.TAG|(/\.locks)?(/models--evil--m(/(refs|blobs|snapshots)"
    r"(/[0-9a-f]{40}(/[a-z_]+\.(json|safetensors))?|/main|/[0-9a-f]{64}(\.lock|\.incomplete)?)?)?"
    r"|/models--evil--m/[0-9a-f]{64}\.lock)?)?"
    r"|home/(hf|\.cache|\.cache/huggingface)(/xet.*)?|home/hf/agent_harnesses\.json|home/got"
)
"""Paths that downloads may write."""


def header(name, value, *, after=0):
    """Set a header of the answers that serve files; the first `after` answers are good."""

    def twist(request, number, status, body, headers):
        if "/resolve/" in request.path and number > after:
            headers[name] = value
        return status, body, headers

    return twist


def missing(value):
    """Answer that there is no such file, at a commit."""

    def twist(request, _number, status, body, headers):
        if "/resolve/" in request.path:
            code = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "no"}
            return 404, b"{}", {**code, "X-Repo-Commit": value}
        return status, body, headers

    return twist


def redirect(to, **more):
    """Redirect requests for files, and set headers in what is there."""

    def twist(request, _number, status, body, headers):
        if "/resolve/main/" in request.path or "/resolve/aaa" in request.path:
            return 307, b"", {**headers, "Location": to, **more}
        return status, body, headers

    return twist


def xet(content_hash, endpoint):
    """Say that files are in the Xet store of another server."""

    def twist(request, _number, status, body, headers):
        if "/resolve/" in request.path:
            route = f"http://{request.headers['Host']}/xet"
            headers |= {"X-Xet-Hash": content_hash, "X-Xet-Refresh-Route": route}
        elif request.path == "/xet":
            headers |= {"X-Xet-Cas-Url": endpoint, "X-Xet-Access-Token": "x"}
            headers["X-Xet-Token-Expiration"] = "9999999999"
            return 200, json.dumps({"casUrl": endpoint}).encode(), headers
        return status, body, headers

    return twist


def listing(change):
    """Change the answer that lists files."""

    def twist(request, _number, status, body, headers):
        if "/api/models/" in request.path and status == 200:
            answer = json.loads(body)
            if isinstance(answer, dict):
                change(answer)
                body = json.dumps(answer).encode()
        return status, body, headers

    return twist


def listed(name):
    """List the tokenizer under another name."""
    return listing(lambda answer: answer["siblings"][1].update(rfilename=name))


def size(number):
    return listing(lambda answer: answer["siblings"][2].update(size=number))


def large(sha256):
    """List the weights as a large file."""
    lfs = {"size": 4096, "sha256": sha256, "pointerSize": 1}
    return listing(lambda answer: answer["siblings"][2].update(lfs=lfs))


def content(request, _number, status, body, headers):
    """Send other content than the listed SHA-256."""
    status, body, headers = large("0" * 64)(request, 0, status, body, headers)
    if "/resolve/" in request.path and request.command == "GET":
        body = body[:-1] + b"\xff"
    return status, body, headers


KINDS = {
    "good": header("X-Good", "yes"),
    "ETag absolute": header("ETag", '"{site}/pwn.pth"'),
    "ETag relative": header("ETag", f'"{UP}/pwn.pth"'),
    "ETag weak": header("ETag", f'W/"{UP}/pwn.pth"'),
    "ETag parent": header("ETag", '".."'),
    "ETag hidden": header("ETag", '".x"'),
    "ETag in a folder": header("ETag", '"new/x"'),
    "ETag too long": header("ETag", '"' + "a" * 300 + '"'),
    "ETag with a backslash": header("ETag", '"..\\..\\x"'),
    "linked ETag absolute": header("X-Linked-ETag", '"{site}/pwn.pth"'),
    "linked ETag relative": header("X-Linked-ETag", f"{UP}/pwn.pth"),
    "second ETag": header("ETag", '"{site}/pwn.pth"', after=1),
    "third ETag": header("ETag", '"{site}/pwn.pth"', after=2),
    "commit absolute": header("X-Repo-Commit", "{site}"),
    "commit relative": header("X-Repo-Commit", UP),
    "commit parent": header("X-Repo-Commit", ".."),
    "commit a name": header("X-Repo-Commit", "main"),
    "second commit": header("X-Repo-Commit", "{site}", after=1),
    "other commit": header("X-Repo-Commit", "c" * 40, after=1),
    "missing, commit absolute": missing("{site}"),
    "missing, commit relative": missing(UP),
    "redirect to an ETag": redirect("/other/m/resolve/main/x", ETag='"{site}/pwn.pth"'),
    "redirect to a file": redirect("file:///etc/hostname"),
    "redirect to itself": redirect("/evil/m/resolve/main/config.json"),
    "Xet hash": xet(UP, "https://127.0.0.1:9"),
    "Xet store in a folder": xet("a" * 64, "local://{site}"),
    "listed commit absolute": listing(lambda answer: answer.update(sha="{site}")),
    "listed commit relative": listing(lambda answer: answer.update(sha=UP)),
    "listed commit missing": listing(lambda answer: answer.pop("sha")),
    "listed commit a list": listing(lambda answer: answer.update(sha=["a"])),
    "listed name absolute": listed("{site}/tokenizer.json"),
    "listed name relative": listed(f"{UP}/tokenizer.json"),
    "listed name through a folder": listed(f"a/../{UP}/tokenizer.json"),
    "listed name with a backslash": listed("..\\..\\tokenizer.json"),
    "listed name with NUL": listed("tokenizer\0.json"),
    "listed name in a file": listed("config.json/tokenizer.json"),
    "listed size negative": size(-1),
    "listed size a text": size("x"),
    "listed size wrong": size(999),
    "listed SHA-256 a path": large(f"{UP}/pwn.pth"),
    "listed SHA-256 wrong": content,
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    for name in ("home", "site", "tmp", "model", "work"):
        (tmp_path / name).mkdir()
    for name, folder in {"HOME": "home", "TMPDIR": "tmp"}.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(
        constants, "HF_XET_CACHE", str(tmp_path / "home" / "hf" / "xet"), raising=False
    )
    (tmp_path / "site" / "package.py").write_text("")
    (tmp_path / "model" / "serving.properties").write_text(f"option.model_id={MODEL}\n")
    return tmp_path


def state(place):
    """Everything below a folder."""
    return {
        path.relative_to(place).as_posix(): path.is_file() and path.read_bytes()
        for path in place.rglob("*")
    }


def start(door, place, environ):
    """Go through a door; without good weights none gets far."""
    model = place / "model"
    calls = {
        "check": lambda: check(str(model), environ=environ, overrides={}),
        "serve": lambda: Service.load(None, model, environ=environ),
        "compile": lambda: compile_model(str(model), str(place / "work" / "out"), environ=environ),
    }
    with suppress(ServingError):
        calls[door]()


def twisted(server, place, twist):
    """Have `server` answer so, and count its answers."""
    asked = Counter()

    def answer(request, status, body, headers):
        if "/resolve/" in request.path:
            asked[request.path] += 1
        text = json.dumps(str(place / "site"))[1:-1]
        status, body, headers = twist(request, asked[request.path], status, body, dict(headers))
        named = {name: value.replace("{site}", text) for name, value in headers.items()}
        return status, body.replace(b"{site}", text.encode()), named

    server.twist = answer
    return asked


@pytest.mark.parametrize("kind", KINDS)
def test_a_hub_cannot_choose_where_files_are_written(kind, place):
    before = state(place)
    for door in ("check", "serve", "compile"):
        server = Hub()
        server.models = {MODEL: FILES, "other/m": {"x": PAYLOAD}}
        environ = {"HF_ENDPOINT": server.url, "HF_HOME": str(place / "home" / "hf")}
        environ |= {"SERVING_DOWNLOAD_DIR": str(place / "home" / "got")}
        asked = twisted(server, place, KINDS[kind])
        try:
            start(door, place, environ)
        finally:
            server.close()
        after = state(place)
        assert asked or door != "check"
        if kind == "good":
            (folder,) = (place / "home" / "hf" / "hub" / "models--evil--m" / "snapshots").iterdir()
            there = {path.name: path.read_bytes() for path in folder.iterdir()}
            assert there == (FILES if door != "check" else {"config.json": FILES["config.json"]})
        assert {name: after.get(name) for name in before} == before
        new = after.keys() - before.keys()
        assert [name for name in sorted(new) if not WRITTEN.fullmatch(name)] == []


OBJECTS = {f"bucket/m/{name}": content for name, content in FILES.items()}
LIST = "<ListBucketResult>{}</ListBucketResult>"
OBJECT = "<Contents><Key>{key}</Key><Size>{size}</Size><ETag>&quot;{etag}&quot;</ETag></Contents>"
S3_KINDS = {
    # What is listed of the tokenizer, and the headers of answers with content.
    "good": ({}, {}),
    "key relative": ({"key": f"m/../{UP}/tokenizer.json"}, {}),
    "key absolute": ({"key": "m//{site}/tokenizer.json"}, {}),
    "key of another folder": ({"key": "../../site/tokenizer.json"}, {}),
    "key with a backslash": ({"key": "m/..\\..\\tokenizer.json"}, {}),
    "key in a file": ({"key": "m/config.json/tokenizer.json"}, {}),
    "ETag a path": ({"etag": "{site}/pwn.pth"}, {"ETag": '"{site}/pwn.pth"'}),
    "ETag relative": ({"etag": UP}, {"ETag": f'"{UP}"'}),
    "ETag another": ({}, {"ETag": f'"{UP}/pwn.pth"'}),
    "size below 0": ({"size": -1}, {}),
    "size too small": ({"size": 3}, {}),
    "ranges of another place": ({}, {"Content-Range": "bytes 9-99/100"}),
    "redirect to a file": ({}, {"Location": "file:///etc/hostname"}),
}


@pytest.mark.parametrize("kind", S3_KINDS)
def test_an_s3_cannot_choose_where_files_are_written(kind, place):
    pytest.importorskip("boto3", reason="boto3 is not installed")
    site = str(place / "site")
    told, sent = json.loads(json.dumps(S3_KINDS[kind]).replace("{site}", site))

    class Handler(Quiet):
        requests: ClassVar = []

        def do_GET(self):  # noqa: N802
            name = self.path.partition("?")[0].lstrip("/")
            if "list-type" in self.path:
                listed = [
                    {"key": key[7:], "size": len(content), "etag": "x"}
                    for key, content in OBJECTS.items()
                ]
                listed[1] |= told
                body = LIST.format("".join(OBJECT.format(**one) for one in listed))
                return self.answer(200, {"Content-Type": "application/xml"}, body.encode())
            if "Location" in sent:
                return self.answer(307, sent)
            # Any key has content.
            return self.answer(200, {"ETag": '"x"', **sent}, OBJECTS.get(name, PAYLOAD))

        do_HEAD = do_GET  # noqa: N815

    (place / "model" / "serving.properties").write_text("option.model_id=s3://bucket/m\n")
    before = state(place)
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1"}
    with serving(Handler) as url:
        environ = {**keys, "AWS_ENDPOINT_URL": url, "AWS_MAX_ATTEMPTS": "1"}
        environ |= {"SERVING_DOWNLOAD_DIR": str(place / "home" / "got")}
        for door in ("check", "serve", "compile"):
            start(door, place, environ)
            after = state(place)
            assert Handler.requests
            assert {name: after.get(name) for name in before} == before
            new = after.keys() - before.keys()
            form = r"home/got(/djl-neuronx(/m-[0-9a-f]{16}(/(lock|partial|versions).*)?)?)?"
            assert [name for name in sorted(new) if not re.fullmatch(form, name)] == []
            if kind == "good" and door != "check":
                assert set(FILES.values()) <= set(after.values())


@pytest.mark.parametrize("target", ["{site}/package.py", f"{UP}/package.py", "/etc/hostname"])
def test_a_conversion_takes_nothing_from_elsewhere(target, place):
    """It reads a local folder only: what chooses places there are links."""
    pytest.importorskip("torch", reason="needs the `cpu` extra")
    from djl_python_neuronx.artifacts.convert import convert

    source = place / "a" / "b" / "c" / "source"
    source.mkdir(parents=True)
    for name, content in FILES.items():
        (source / name).write_bytes(content)
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").symlink_to(target.replace("{site}", str(place / "site")))
    before = state(place)
    with pytest.raises(ServingError):
        convert(source, place / "work" / "out", "split")
    assert state(place) == before
