"""The hub's resolve route and S3's GetObject on 127.0.0.1: as much as reading a config.json takes."""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_RESOLVE = re.compile(r"/(?P<model>.+)/resolve/(?P<revision>[^/]+)/(?P<file>[^?]+)")


class Quiet(BaseHTTPRequestHandler):
    """Speaks HTTP 1.0: no connection outlives its answer, so a server that was stopped answers no more."""

    requests: ClassVar[list[tuple[str, str, dict[str, str]]]]

    def log_message(self, *args):
        pass

    def answer(self, status, headers, body=b""):
        self.requests.append((self.command, self.path, dict(self.headers.items())))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextlib.contextmanager
def serving(handler: type[Quiet]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def hub(models, *, gated=(), tokens=()):
    """The hub with `models` (id to the bytes of config.json, None: a model without one); gives URL and log.

    `gated` ones want a token of `tokens`. The log lists (method, path, headers).
    """

    class Handler(Quiet):
        requests: ClassVar = []

        def refuse(self, status, code):
            self.answer(status, {"X-Error-Code": code, "X-Error-Message": code})

        def do_GET(self):
            found = _RESOLVE.fullmatch(self.path)
            if found is None or found["model"] not in models:
                return self.refuse(404, "RepoNotFound")
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            if found["model"] in gated and token not in tokens:
                return self.refuse(403, "GatedRepo")
            if found["revision"] not in {"main", "v1", COMMIT}:
                return self.refuse(404, "RevisionNotFound")
            body = models[found["model"]]
            if body is None or found["file"] != "config.json":
                return self.refuse(404, "EntryNotFound")
            tag = hashlib.sha1(body).hexdigest()
            return self.answer(200, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}, body)

        do_HEAD = do_GET  # noqa: N815  (http.server's name)

    with serving(Handler) as url:
        yield url, Handler.requests


@contextlib.contextmanager
def s3(objects, *, denied=()):
    """S3 with `objects` ("bucket/key" to bytes); reading one of `denied` buckets is refused. Gives URL and log."""

    class Handler(Quiet):
        requests: ClassVar = []

        def refuse(self, status, code):
            body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>"
            self.answer(status, {"Content-Type": "application/xml"}, body.encode())

        def do_GET(self):
            name = self.path.partition("?")[0].lstrip("/")
            bucket = name.partition("/")[0]
            if bucket in denied:
                return self.refuse(403, "AccessDenied")
            if not any(known.startswith(f"{bucket}/") for known in objects):
                return self.refuse(404, "NoSuchBucket")
            if name not in objects:
                return self.refuse(404, "NoSuchKey")
            return self.answer(200, {"ETag": '"x"'}, objects[name])

    with serving(Handler) as url:
        yield url, Handler.requests
