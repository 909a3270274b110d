"""Files in S3 are overwritten only with --overwrite, and a model never overwrites itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from djl_python_neuronx.artifacts import s3
from djl_python_neuronx.artifacts.manifest import unfinished
from djl_python_neuronx.errors import ArtifactError
from djl_python_neuronx.loading import partition as compiling
from tests.doubles.s3_rig import URI, put, settings

pytest_plugins = ["tests.doubles.s3_fixtures"]

TINY = Path(__file__).parents[2] / "examples" / "tiny-llama"
OURS = json.dumps(unfinished(["config.json"])).encode()


@pytest.mark.parametrize(
    ("output", "source", "is_apart"),
    [
        ("s3://b/x", "s3://b/x/", False),
        ("s3://b/x/y", "s3://b/x", False),
        ("s3://b/x", "s3://b/x/y", False),
        ("s3://b", "s3://b/x", False),
        ("s3://b/x2", "s3://b/x", True),
        ("s3://c/x", "s3://b/x", True),
    ],
)
def test_output_and_model_are_never_one(output, source, is_apart):
    if is_apart:
        s3.check_apart(output, source)
    else:
        with pytest.raises(ArtifactError, match="overlap; expected separate folders"):
            s3.check_apart(output, source)


@pytest.mark.parametrize(
    ("there", "is_free"),
    [
        ({}, True),
        ({"": b""}, True),
        ({"manifest.json": OURS, "config.json": b"{}"}, True),
        ({"config.json": b"{}"}, False),
        ({"manifest.json": b"a web page"}, False),
        ({"manifest.json": b'{"files": {"a": {}}}'}, False),
    ],
)
def test_what_is_not_ours_is_refused(proxy, bucket, there, is_free):
    put(bucket, there)
    if is_free:
        s3.check_free(URI, settings(proxy))
    else:
        with pytest.raises(ArtifactError, match="add --overwrite"):
            s3.check_free(URI, settings(proxy))


def test_it_is_refused_before_anything_is_compiled(proxy, bucket, monkeypatch):
    """Unless told; then, as well as where it is free, the compile begins."""
    put(bucket, {"thesis.txt": b"ten years of work"})

    class BegunError(Exception):
        pass

    def begin(*_args, **_more):
        raise BegunError

    monkeypatch.setattr(compiling, "obtain", begin)
    environ = settings(proxy)
    options = {"model_loader": "cpu", "n_positions": "128"}
    with pytest.raises(ArtifactError, match=r"thesis\.txt"):
        compiling.compile_model(str(TINY), URI, environ=environ, overrides=options)
    with pytest.raises(BegunError):
        compiling.compile_model(str(TINY), URI, environ=environ, overrides=options, overwrite=True)
    with pytest.raises(BegunError):
        compiling.compile_model(str(TINY), URI + "2", environ=environ, overrides=options)
