"""The refusals of S3, in our words."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import ClassVar

import pytest

from djl_python_neuronx.artifacts import fetch as remotes
from djl_python_neuronx.artifacts import s3, s3_checksums
from djl_python_neuronx.errors import ArtifactAccessError, ArtifactError, ArtifactNotFoundError
from tests.doubles.remote_doubles import Quiet, serving
from tests.doubles.s3_proxy import Fault
from tests.doubles.s3_rig import (
    SMALL,
    URI,
    fetch,
    published,
    put,
    settings,
)

pytest_plugins = ["tests.doubles.s3_fixtures"]


def is_listing(request):
    return "list-type" in request.query


def is_data(request):
    return request.is_data


@pytest.mark.parametrize(
    ("when", "status", "code", "kind", "said"),
    [
        (is_listing, 404, "NoSuchBucket", ArtifactNotFoundError, "no such bucket"),
        (is_listing, 403, "AccessDenied", ArtifactAccessError, "s3:ListBucket"),
        (is_data, 403, "AccessDenied", ArtifactAccessError, "s3:GetObject"),
        (is_listing, 403, "InvalidAccessKeyId", ArtifactAccessError, "Renew them"),
        (is_data, 400, "ExpiredToken", ArtifactAccessError, "Renew them"),
        (is_listing, 301, "PermanentRedirect", ArtifactAccessError, "Set AWS_REGION"),
        (is_listing, 403, "RequestTimeTooSkewed", ArtifactAccessError, "clock"),
        (is_data, 403, "InvalidObjectState", ArtifactAccessError, "Restore"),
        (is_listing, 503, "SlowDown", ArtifactAccessError, "AWS_MAX_ATTEMPTS"),
        (is_data, 503, "SlowDown", ArtifactAccessError, "AWS_MAX_ATTEMPTS"),
        (is_data, 418, "Teapot", ArtifactAccessError, "Teapot: No"),
    ],
)
def test_what_s3_refuses_says_what_to_do(proxy, bucket, tmp_path, when, status, code, kind, said):
    put(bucket, SMALL)
    proxy.rules = [Fault("error", when=when, times=10**6, status=status, code=code)]
    with pytest.raises(kind) as caught:
        fetch(proxy, tmp_path, AWS_MAX_ATTEMPTS="2")
    assert said in str(caught.value)
    assert URI in str(caught.value)
    assert caught.value.__cause__ is not None
    assert published(tmp_path) == []


def test_an_absent_file_is_absent_to_those_who_may_list_its_folder_alone(proxy, bucket):
    """S3 answers AccessDenied where a policy's `s3:prefix` leaves out the rest of the bucket."""
    put(bucket, SMALL)
    denied = Fault("error", times=10**6, status=403, code="AccessDenied")
    denied.when = lambda request: not is_listing(request)
    proxy.rules = [denied]
    assert remotes.read_file(URI, "serving.properties", settings(proxy)) is None
    with pytest.raises(ArtifactAccessError, match="s3:GetObject"):
        remotes.read_file(URI, "config.json", settings(proxy))
    denied.when = lambda _: True
    with pytest.raises(ArtifactAccessError, match="s3:ListBucket"):
        remotes.read_file(URI, "serving.properties", settings(proxy))


def listing(*items, more=""):
    """S3's answer to a request for a list; `items`: key, size, ETag."""
    told = "".join(
        f"<Contents><Key>{key}</Key><Size>{size}</Size>{etag and f'<ETag>{etag}</ETag>'}</Contents>"
        for key, size, etag in items
    )
    return f"<ListBucketResult>{more}{told}</ListBucketResult>".encode()


def endless(*items):
    numbers = itertools.count()
    more = "<IsTruncated>true</IsTruncated><NextContinuationToken>{}</NextContinuationToken>"
    return lambda _request: listing(*items, more=more.format(next(numbers)))


FILE = ("llama/config.json", 2, '"x"')
NO_KEY = b"<ListBucketResult><Contents><Size>2</Size></Contents></ListBucketResult>"
REDIRECT = b"<Error><Code>PermanentRedirect</Code><Message>x</Message></Error>"


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (200, lambda _: b"<a", "or its answer is not S3's XML"),
        (
            200,
            lambda _: listing(("llama/config.json", "x", '"x"')),
            "a server there that answers as S3",
        ),
        (200, lambda _: listing(("llama/config.json", -5, '"x"')), "'Size': -5.* a size from 0 on"),
        (200, lambda _: listing(("llama/config.json", 5, "")), "a size from 0 on and an ETag"),
        (200, lambda _: listing(("x/config.json", 2, '"x"')), "expected a key that begins with 'l"),
        (200, lambda _: NO_KEY, "expected a key that begins with 'llama/'"),
        (200, endless(), "has more than 100,000 objects"),
        (200, endless(*[FILE] * 1000), "has more than 100,000 objects"),
        (301, lambda _: REDIRECT, "RecursionError.* without redirects in a"),
    ],
    ids=[
        *("no XML", "no size", "size below 0", "no ETag", "key elsewhere", "no key"),
        *("endless", "endless and full", "circle"),
    ],
)
def test_a_server_that_is_not_s3(proxy, tmp_path, status, body, said):
    headers = {"Content-Type": "application/xml", "Location": "/models?x"}
    proxy.rules = [Fault("answer", lambda _: True, 10**6, 0, status, body=body, headers=headers)]
    environ = settings(proxy, AWS_MAX_ATTEMPTS="2")
    with pytest.raises(ArtifactAccessError, match=f"{URI}/?:?.*{said}") as caught:
        remotes.fetch(URI, root=tmp_path, environ=environ)
    assert "AWS_ENDPOINT_URL" in str(caught.value) or "Name its own folder" in str(caught.value)
    assert "HF_" not in str(caught.value)


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"ETag": '"another"'}, "differed twice .* last: generation_config.json"),
        ({"Content-Range": "bytes 7-9/10"}, "requested from byte 0, got 'bytes 7-9/10'"),
    ],
)
def test_an_answer_that_is_not_the_requested_one(proxy, bucket, tmp_path, headers, said):
    """Of a server that knows neither If-Match nor Range."""
    put(bucket, {"config.json": b"{}", "generation_config.json": b"ab" * 3 * 2**20})
    ranged = Fault(
        "answer", lambda r: r.is_data and bool(r.range), 10**6, status=206, headers=headers
    )
    proxy.rules = [ranged]
    with pytest.raises(ArtifactAccessError, match=said):
        fetch(proxy, tmp_path)
    assert published(tmp_path) == []


def test_checksums_that_cannot_be_computed_are_an_error(proxy, bucket, tmp_path, monkeypatch):
    put(bucket, SMALL)
    monkeypatch.setattr(s3_checksums, "_ALGORITHMS", {})
    with pytest.raises(ArtifactAccessError, match=r"botocore [\d.]+ has no httpchecksum"):
        fetch(proxy, tmp_path)
    assert proxy.seen == []


class Endless(Quiet):
    """An object of 10 bytes by its header, whose body has 64 MiB."""

    requests: ClassVar = []
    protocol_version = "HTTP/1.1"

    def do_GET(self):  # noqa: N802
        self.send_response(200)
        for name, value in {"Content-Length": "10", "Transfer-Encoding": "chunked"}.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(OSError):  # the client has left
            for _ in range(64):
                self.wfile.write(b"100000\r\n" + bytes(2**20) + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")


def test_a_small_object_that_never_ends_is_read_to_the_limit(monkeypatch):
    monkeypatch.setattr(s3, "MAX_JSON_BYTES", 2**20)
    environ = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "x"}
    with serving(Endless) as url, pytest.raises(ArtifactError, match="has more than 1048576 byt"):
        s3.read(URI, "config.json", {**environ, "AWS_ENDPOINT_URL": url})
