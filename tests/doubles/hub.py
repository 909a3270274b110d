"""A double of the Hugging Face Hub on 127.0.0.1: lists, commits, redirects to a content store."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from tests.artifacts.folders import tensors

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": tensors(0, 256_000),
    "odd [name].txt": b"x",
    "pytorch_model.bin": b"pickled",
    "original/consolidated.00.pth": b"other",
    ".gitattributes": b"",
}
COMMITS = {"main": "a" * 40, "v2": "b" * 40}


class Hub:
    """`/api/models/…` and `/<model>/resolve/…`, as huggingface_hub 0.25 to 2.4 ask for them."""

    def __init__(self):
        self.models = {"ours/llama": dict(FILES)}
        self.gated = set()
        self.tokens = []
        self.loaded = []
        self.cut_next = 0
        self.twist = lambda _request, *answer: answer  # what a hostile one does to its answers
        outer = self

        class Handler(_Handler):
            hub = outer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.hub.tokens.append(self.headers.get("Authorization"))
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        if found := re.fullmatch(
            r"/api/models/([\w-]+/[\w.-]+)(?:/(revision|tree)/(\w+)/?)?", path
        ):
            self._api(*found.groups())
        elif found := re.fullmatch(r"/([\w-]+/[\w.-]+)/resolve/(\w+)/(.*)", path):
            self._resolve(*found.groups())
        else:
            self._fail(404, "EntryNotFound")

    do_HEAD = do_GET  # noqa: N815

    def _api(self, model, what, revision):
        commit = self._commit(model, revision or "main")
        if commit is None:
            return
        files = self.hub.models[model]
        if what == "tree":
            answer = [
                {"type": "file", "path": name, "size": len(content), "oid": _etag(content)}
                for name, content in files.items()
            ]
        else:
            answer = {
                "id": model,
                "sha": commit,
                "siblings": [
                    {"rfilename": name, "size": len(content), **_identity(name, content)}
                    for name, content in files.items()
                ],
            }
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _resolve(self, model, revision, name):
        commit = self._commit(model, revision)
        if commit is None:
            return
        content = self.hub.models[model].get(name)
        if content is None:
            self._fail(404, "EntryNotFound")
            return
        headers = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        start = 0
        if found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(found[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if self.command == "GET":
            self.hub.loaded.append((name, start))
        self._send(206 if start else 200, content[start:], headers)

    def _commit(self, model, revision):
        if model not in self.hub.models:
            self._fail(404 if self.headers.get("Authorization") else 401, "RepoNotFound")
        elif model in self.hub.gated:
            self._fail(403, "GatedRepo")
        elif revision in COMMITS.values():
            return revision
        elif revision in COMMITS:
            return COMMITS[revision]
        else:
            self._fail(404, "RevisionNotFound")
        return None

    def _fail(self, status, code):
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status, body, headers):
        status, body, headers = self.hub.twist(self, status, body, headers)
        self.send_response_only(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "HEAD":
            return
        if len(body) > 1000 and self.hub.cut_next:
            self.hub.cut_next -= 1
            body = body[: len(body) // 2]
        self.wfile.write(body)


def _identity(name, content):
    """As the hub describes small files, and large ones, which it keeps by their SHA-256."""
    if not name.endswith(".safetensors"):
        return {"blobId": _etag(content)}
    lfs = {"sha256": _etag(content), "size": len(content), "pointerSize": 130}
    return {"blobId": "0" * 40, "lfs": lfs}


def _etag(content):
    return hashlib.sha256(content).hexdigest()
