"""Helpers of the S3 tests: a model to load, and ways to put, load and compare it."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("boto3", reason="boto3 is not installed")
pytest.importorskip("moto.server", reason="moto[server] is not installed")

from botocore.loaders import JSONFileLoader
from botocore.retries.standard import ExponentialBackoff

from djl_python_neuronx.artifacts import cache, s3, s3_transfer
from djl_python_neuronx.artifacts.folder import EVERYTHING
from tests.artifacts.folders import tensors

PIECE_BYTES = 2**20
KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_REGION": "us-east-1",
}
URI = "s3://models/llama"

LARGE = tensors(0, 2 * PIECE_BYTES + 400_001)
"""Three pieces."""
SMALL = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer/vocab.txt": b"a\nb\n",
    "compiled/VERSION": b"",
    "model-00001-of-00001.safetensors": tensors(1, 300_000),
}
NAME = "model.safetensors"


_load_file = functools.cache(JSONFileLoader().load_file)


def make_small_and_quick(patch):
    """Pieces as small as `PIECE_BYTES`, read in smaller parts still, and next to no wait before a retry."""
    patch.setattr(cache, "PIECE_BYTES", PIECE_BYTES)
    patch.setattr(s3_transfer, "_READ_BYTES", PIECE_BYTES // 16)
    patch.setattr(s3_transfer, "_BACKOFF_S", 0.005)
    patch.setattr(ExponentialBackoff, "delay_amount", lambda self, context: 0.01)
    # botocore reads its models, megabytes of JSON, anew for every client.
    patch.setattr(JSONFileLoader, "load_file", lambda self, path: _load_file(path))


def settings(proxy, **more):
    return {**KEYS, "AWS_ENDPOINT_URL": proxy.url, **more}


def put(bucket, files, prefix="llama/"):
    for name, content in files.items():
        bucket.put_object(Bucket="models", Key=prefix + name, Body=content)


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def fetch(proxy, root, **more):
    return s3.fetch(URI, root, settings(proxy, **more), selection=EVERYTHING)


def published(root):
    return list(root.glob("*/versions/*"))
