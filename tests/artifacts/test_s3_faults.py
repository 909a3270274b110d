"""S3 through a proxy that breaks things: the right bytes or a clear error, never wrong bytes."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import random
import zlib

import boto3
import pytest
from botocore.config import Config

from djl_python_neuronx.artifacts import cache, s3, s3_checksums
from djl_python_neuronx.artifacts.formats import detect
from djl_python_neuronx.artifacts.s3_checksums import is_intact
from djl_python_neuronx.errors import ArtifactAccessError, ArtifactError
from tests.doubles.s3_proxy import Fault
from tests.doubles.s3_rig import (
    LARGE,
    NAME,
    PIECE_BYTES,
    SMALL,
    contents,
    fetch,
    published,
    put,
    tensors,
)

pytest_plugins = ["tests.doubles.s3_fixtures"]


@pytest.mark.parametrize(
    "fault",
    [
        Fault("reset", times=3),
        Fault("cut", times=3),
        Fault("lie", times=3),
        Fault("stall", times=2, seconds=600),
        Fault("trickle", seconds=0.1),
        Fault("error", times=4),
        Fault("error", times=2, status=500, code="InternalError"),
        Fault("error", when=lambda request: "list-type" in request.query, times=2),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.status}",
)
def test_what_breaks_for_a_while_is_mended(proxy, bucket, tmp_path, fault, monkeypatch):
    put(bucket, {**SMALL, NAME: LARGE})
    proxy.rules = [fault]
    fault.done = 0
    # Short where it has to pass; a busy machine's silence is none of the faults.
    monkeypatch.setattr(s3, "_READ_TIMEOUT_S", 1.0 if fault.kind == "stall" else 60.0)
    assert contents(fetch(proxy, tmp_path)) == {**SMALL, NAME: LARGE}
    assert fault.done == fault.times


def test_a_wrong_bit_is_found_by_the_objects_checksum(proxy, bucket, tmp_path):
    put(bucket, SMALL)
    weights = "model-00001-of-00001.safetensors"
    proxy.rules = [Fault("flip", when=lambda r: r.is_data and r.path.endswith(weights))]
    assert contents(fetch(proxy, tmp_path)) == SMALL
    assert proxy.rules[0].done == 1


def is_second_piece(request):
    return (request.range or "").startswith(f"bytes={PIECE_BYTES}-")


@pytest.mark.parametrize("times", [1, 2])
def test_a_wrong_bit_in_a_range_is_found_and_the_file_fetched_again(
    proxy, bucket, tmp_path, caplog, times
):
    caplog.set_level(logging.INFO, "djl_python_neuronx")
    put(bucket, {**SMALL, NAME: LARGE})
    proxy.rules = [Fault("flip", when=is_second_piece, times=times)]
    if times > 1:
        with pytest.raises(
            ArtifactError, match=r"last: .*model.safetensors differs from its checksum"
        ):
            fetch(proxy, tmp_path)
        assert published(tmp_path) == []
    proxy.seen.clear()
    assert contents(fetch(proxy, tmp_path)) == {**SMALL, NAME: LARGE}
    assert "remote_differs uri=s3://models/llama/ reason=" in caplog.text
    assert "fetch_unverified" not in caplog.text
    again = [path for path, _ in proxy.data_requests() if not path.endswith("/" + NAME)]
    assert len(again) == (0 if times > 1 else len([c for c in SMALL.values() if c]))


def without_checksums(bucket):
    """A client that uploads as those before 2025 did."""
    return boto3.client(
        "s3",
        endpoint_url=bucket.meta.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
        config=Config(request_checksum_calculation="when_required"),
    )


def test_a_wrong_bit_is_found_by_the_md5_sum_that_an_etag_is(proxy, bucket, tmp_path, caplog):
    put(without_checksums(bucket), {"config.json": b"{}", NAME: LARGE})
    proxy.rules = [Fault("flip", when=is_second_piece)]
    caplog.set_level(logging.INFO, "djl_python_neuronx")
    assert contents(fetch(proxy, tmp_path))[NAME] == LARGE
    assert proxy.rules[0].done == 1
    assert "differs from its checksum" in caplog.text
    assert "fetch_unverified" not in caplog.text


def test_objects_without_a_checksum_are_counted(proxy, bucket, tmp_path, caplog):
    plain = without_checksums(bucket)
    put(bucket, SMALL)
    put(plain, {NAME: LARGE})
    caplog.set_level(logging.INFO, "djl_python_neuronx")
    large = Fault("error", lambda r: r.method == "HEAD" and NAME in r.path, 99, status=403)
    proxy.rules = [large]  # its ETag may be an MD5 sum or not
    assert contents(fetch(proxy, tmp_path)) == {**SMALL, NAME: LARGE}
    counted = [r.getMessage() for r in caplog.records if "fetch_unverified" in r.msg]
    assert counted == [
        f"fetch_unverified uri=s3://models/llama/ files=1 of=4 bytes={len(LARGE)} "
        "reason='no checksum that can be computed'"
    ]


def test_a_header_that_arrived_wrong_is_found_without_a_checksum(proxy, bucket, tmp_path):
    refused = Fault("error", when=lambda r: r.method == "HEAD", times=99, status=403, code="403")
    # The proxy's wrong bit is in the middle of a piece: here in the length of the header.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "PIECE_BYTES", 16)
        put(bucket, {"config.json": b"{}", NAME: tensors(3, 200)})
        proxy.rules = [
            refused,
            Fault("flip", when=lambda r: (r.range or "").startswith("bytes=0-")),
        ]
        assert contents(fetch(proxy, tmp_path))[NAME] == tensors(3, 200)
    assert proxy.rules[1].done == 1


def test_an_object_that_is_damaged_itself_is_fetched_once(proxy, bucket, tmp_path):
    put(bucket, {"config.json": b'{"model_type": "llama"}', NAME: LARGE[:-1]})
    tmp_path /= "long" * 40
    for _ in range(2):
        folder = fetch(proxy, tmp_path)
        with pytest.raises(ArtifactError, match=r"model.safetensors is cut off"):
            detect(folder)
    assert len(proxy.data_requests()) == 4, "S3's checksum is right: nothing changes"


class Parts:
    """S3's answers about an object that was uploaded in parts, in pages of two."""

    def __init__(self, content, size):
        starts = range(0, len(content), size)
        self.parts = [
            {"PartNumber": n, "Size": len(part), "ChecksumCRC32": checksum(part)}
            for n, start in enumerate(starts, 1)
            if (part := content[start : start + size])
        ]
        whole = b"".join(base64.b64decode(part["ChecksumCRC32"]) for part in self.parts)
        self.head = {
            "ChecksumCRC32": f"{checksum(whole)}-{len(self.parts)}",
            "ChecksumType": "COMPOSITE",
        }
        self.asked = []

    def head_object(self, **asked):
        assert asked == {"Bucket": "b", "Key": "k", "IfMatch": '"0-3"', "ChecksumMode": "ENABLED"}
        return self.head

    def get_object_attributes(self, PartNumberMarker, **asked):  # noqa: N803
        assert asked == {"Bucket": "b", "Key": "k", "ObjectAttributes": ["ObjectParts"]}
        self.asked.append(PartNumberMarker)
        left = [part for part in self.parts if part["PartNumber"] > PartNumberMarker]
        return {"ObjectParts": {"Parts": left[:2]} if left else {}}


def checksum(content):
    return base64.b64encode(zlib.crc32(content).to_bytes(4, "big")).decode()


def test_the_checksums_of_parts(tmp_path):
    content, path = random.Random(4).randbytes(2500), tmp_path / "file"
    file = cache.RemoteFile("file", len(content), '"0-3"')

    def intact(client):
        return is_intact(client, "b", "k", file, path)

    path.write_bytes(content)
    client = Parts(content, 1000)
    assert intact(client) is True
    assert client.asked == [0, 2]
    for wrong in (0, 999, 1000, 2499):
        path.write_bytes(content[:wrong] + bytes([content[wrong] ^ 4]) + content[wrong + 1 :])
        assert intact(client) is False
    path.write_bytes(content)
    client.parts = []
    assert intact(client) is None, "no checksums of parts"
    client = Parts(content[:-1], 1000)
    assert intact(client) is None, "other parts than the listed object's"
    client.head = {"ChecksumCRC32": checksum(content), "ChecksumType": "FULL_OBJECT"}
    assert intact(client) is True
    client.head = {"ChecksumCRC64NVME": "AAAAAAAAAAA=", "ChecksumType": "FULL_OBJECT"}
    if "crc64nvme" not in s3_checksums._ALGORITHMS:
        assert intact(client) is None


@pytest.mark.parametrize(
    ("head", "bucket", "etag", "verdict"),
    [
        ({}, "b", None, False),
        ({"ServerSideEncryption": "AES256"}, "b", None, False),
        ({"ServerSideEncryption": "aws:kms"}, "b", None, None),
        ({"ServerSideEncryption": "aws:kms:dsse"}, "b", None, None),
        ({"SSECustomerAlgorithm": "AES256"}, "b", None, None),
        ({}, "b--use1-az4--x-s3", None, None),
        ({}, "b", '"0123456789abcdef0123456789abcdef-1"', None),
        ({}, "b", '"a word"', None),
    ],
)
def test_which_etags_are_md5_sums(tmp_path, head, bucket, etag, verdict):
    """Amazon S3 API reference, "Object", ETag; the user guide on directory buckets."""
    content, path = b"weights", tmp_path / "file"
    file = cache.RemoteFile("file", len(content), etag or f'"{hashlib.md5(content).hexdigest()}"')

    class Client:
        def head_object(self, **_):
            return head

        def get_object_attributes(self, **_):
            return {}

    path.write_bytes(content)
    assert is_intact(Client(), bucket, "k", file, path) is (None if verdict is None else True)
    path.write_bytes(b"weighty")
    assert is_intact(Client(), bucket, "k", file, path) is verdict


@pytest.mark.parametrize("kind", ["cut", "flip"])
def test_what_stays_broken_is_an_error_and_nothing_is_taken_for_whole(
    proxy, bucket, tmp_path, kind
):
    # An empty half: no attempt gets anywhere.
    files = {"config.json": b"{}", "generation_config.json": b"x"}
    put(bucket, files)
    broken = Fault(kind, when=lambda r: r.is_data and "generation" in r.path, times=10**6)
    proxy.rules = [broken]
    with pytest.raises(ArtifactAccessError, match=r"generation_config.json breaks off at byte 0"):
        fetch(proxy, tmp_path)
    assert published(tmp_path) == []
    proxy.rules = []
    assert contents(fetch(proxy, tmp_path)) == files


def test_a_disk_that_takes_a_part_of_each_write(proxy, bucket, tmp_path, monkeypatch):
    put(bucket, {**SMALL, NAME: LARGE})
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:9_999], at))
    assert contents(fetch(proxy, tmp_path)) == {**SMALL, NAME: LARGE}


def test_a_changed_object_is_listed_again(proxy, bucket, tmp_path):
    put(bucket, {**SMALL, NAME: LARGE})
    new = tensors(2, len(LARGE))

    def replace():
        put(bucket, {NAME: new})

    def is_large(request):
        return request.is_data and request.path.endswith("/" + NAME)

    # Between two pieces of the same object: the worst moment.
    proxy.rules = [
        Fault("call", when=lambda r: is_large(r) and r.range.startswith("bytes=0-"), action=replace)
    ]
    assert contents(fetch(proxy, tmp_path)) == {**SMALL, NAME: new}


def test_an_object_that_keeps_changing_is_an_error(proxy, bucket, tmp_path):
    put(bucket, {**SMALL, NAME: LARGE})
    count = iter(range(100))
    proxy.rules = [
        Fault(
            "call",
            when=lambda r: r.is_data and r.path.endswith("/" + NAME),
            times=100,
            action=lambda: put(bucket, {NAME: tensors(next(count), len(LARGE))}),
        )
    ]
    with pytest.raises(ArtifactAccessError, match=r"differed twice .* last: model.safetensors"):
        fetch(proxy, tmp_path)
    assert published(tmp_path) == []


def test_an_object_that_goes_away_is_left_out(proxy, bucket, tmp_path):
    put(bucket, {"a": b"1", "b": b"2"})
    proxy.rules = [
        Fault("call", action=lambda: bucket.delete_object(Bucket="models", Key="llama/b"), times=1)
    ]
    # Which of the two is asked for first is up to the threads: b may have been loaded before it went.
    assert contents(fetch(proxy, tmp_path)) in ({"a": b"1"}, {"a": b"1", "b": b"2"})
