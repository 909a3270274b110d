"""S3 through a proxy that breaks things: the right bytes or a clear error, never wrong bytes."""

from __future__ import annotations

import os

import pytest

from djl_python_neuronx.artifacts import s3
from djl_python_neuronx.errors import ArtifactAccessError
from tests.artifacts.s3_proxy import Fault
from tests.artifacts.s3_rig import (
    LARGE,
    NAME,
    SMALL,
    contents,
    fetch,
    published,
    put,
)

pytest_plugins = ["tests.artifacts.s3_fixtures"]


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
    new = LARGE[::-1]

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
            action=lambda: put(bucket, {NAME: LARGE + b"%d" % next(count)}),
        )
    ]
    with pytest.raises(ArtifactAccessError, match="changed twice"):
        fetch(proxy, tmp_path)
    assert published(tmp_path) == []


def test_an_object_that_goes_away_is_left_out(proxy, bucket, tmp_path):
    put(bucket, {"a": b"1", "b": b"2"})
    proxy.rules = [
        Fault("call", action=lambda: bucket.delete_object(Bucket="models", Key="llama/b"), times=1)
    ]
    # Which of the two is asked for first is up to the threads: b may have been loaded before it went.
    assert contents(fetch(proxy, tmp_path)) in ({"a": b"1"}, {"a": b"1", "b": b"2"})
