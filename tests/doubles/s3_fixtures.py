"""A bucket of moto's S3 server behind the breaking proxy: a plugin for the tests of S3."""

from __future__ import annotations

import urllib.request

import boto3
import pytest
from moto import server as moto_server

from tests.doubles.s3_proxy import S3Proxy
from tests.doubles.s3_rig import make_small_and_quick


@pytest.fixture(scope="module")
def moto():
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture(scope="module")
def direct(moto):
    return boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{moto}",
        region_name="us-east-1",
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
    )


@pytest.fixture
def bucket(moto, direct):
    """A client for the empty bucket `models`, past the proxy."""
    direct.create_bucket(Bucket="models")
    yield direct
    urllib.request.urlopen(f"http://127.0.0.1:{moto}/moto-api/reset", data=b"").close()


@pytest.fixture
def proxy(moto, bucket, monkeypatch):
    make_small_and_quick(monkeypatch)
    with S3Proxy(moto) as running:
        yield running
