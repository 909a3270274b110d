"""The double of DJL's engine answers byte for byte as the real one, and DJL's partition script compiles."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doubles import djl_peer
from tests.doubles.djl_peer import DOUBLE, Peer, real_engine

pytestmark = pytest.mark.djl_src

SCRIPTED = """
from djl_python import Input, Output


def seen(inputs):
    content = inputs.get_content()
    names = sorted(inputs.get_properties().items())
    items = [(key, bytes(value)) for key, value in zip(content.get_keys(), content.get_values())]
    facts = inputs.is_empty(), inputs.is_batch(), inputs.get_property("CONTENT-type"), inputs.contains_key("data")
    return repr((names, items, facts))


def handle(inputs):
    if inputs.is_empty():
        return None
    if inputs.is_batch():
        return rows(inputs)
    return globals()[bytes(inputs.get_as_bytes()).decode()](inputs)


def rows(inputs):
    output = Output()
    for i, row in enumerate(inputs.get_batches()):
        last = not row.get_properties() or bytes(row.get_as_bytes()) == b"once"
        record = {"data": seen(row), "last": last}
        if bytes(row.get_as_bytes()) == b"refuse":
            record = {"data": "", "last": True, "code": 413, "error": "too long"}
        output.add(Output.binary_encode(record), key="data", batch_index=i)
        output.add_property(f"batch_{i}_Content-Type", "application/json")
    return output


def echo(inputs):
    return Output(201, "as you like").add_property("x-n", 5).add(seen(inputs), key="data").add(b"\\x00\\xff", key="b")


def unnamed(inputs):
    return Output().add({"a": [1, None, "\\u00e4"]})


def nothing(inputs):
    return None


def refuse(inputs):
    return Output().error("no", 418, "teapot")


def fail(inputs):
    raise ValueError("it broke")


def memory(inputs):
    raise MemoryError("too big")


def wrong(inputs):
    return 5


def stream(inputs):
    return Output().add_property("Content-Type", "x").add_stream_content(iter([b"one", "two", {"n": 3}]), None)


def doubled(inputs):
    return Output().add_stream_content(iter([b"one"]), lambda chunk: chunk + chunk)


def broken(inputs):
    def chunks():
        yield b"first"
        raise ValueError("in the middle")

    return Output().add_stream_content(chunks(), None)
"""
ASYNC = """
import scripted


async def handle(inputs):
    if inputs.is_empty():
        return None
    if bytes(inputs.get_as_bytes()) == b"records":
        return records(inputs)
    return scripted.handle(inputs)


async def records(inputs):
    for i in range(3):
        record = {"data": f"{i}", "last": i == 2}
        yield scripted.Output().add(scripted.Output.binary_encode(record), key="data")
"""
ROUTES = [
    "echo",
    "unnamed",
    "nothing",
    "refuse",
    "fail",
    "memory",
    "wrong",
    "stream",
    "doubled",
    "broken",
    "handler=no_such_function",
    "handler=__class__",
]


def conversation(tmp_path, monkeypatch, engine, properties, bodies):
    """Everything that the engine sends for these calls, and the answers."""
    numbers = iter(range(10**6))
    monkeypatch.setattr(djl_peer.uuid, "uuid4", lambda: f"id-{next(numbers)}")
    random.seed(5)
    (tmp_path / "scripted.py").write_text(SCRIPTED)
    (tmp_path / "model.py").write_text(ASYNC if "async_mode" in properties else SCRIPTED)
    env = {"PYTHONPATH": f"{djl_peer.ROOT}:{tmp_path}"}
    with Peer(
        tmp_path, properties, tmp_path, entry_point="model.py", engine=engine, env=env
    ) as peer:
        answers = [peer.submit(body.encode(), named(body)).wait() for body in bodies]
        return peer.received(), [
            (answer.status, answer.headers, answer.content) for answer in answers
        ]


def named(body):
    """Headers of a client that names the function."""
    name, _, value = body.partition("=")
    return {name: value} if value else {}


@pytest.mark.parametrize(
    ("properties", "bodies"),
    [
        ({}, ROUTES),
        ({"rolling_batch": "tnx"}, ["once", "twice", "refuse", "", "ä"]),
        (
            {"async_mode": "true"},
            ["records", "echo", "nothing", "refuse", "memory", "unnamed", *ROUTES[-2:]],
        ),
    ],
    ids=["plain", "rolling", "async"],
)
def test_the_double_sends_what_the_real_one_sends(tmp_path, monkeypatch, properties, bodies):
    if "async_mode" in properties:
        # Java asks for a token record: other answers would end the test, not the comparison.
        monkeypatch.setattr(djl_peer.Request, "add_response", lambda self, *_: first_wins(self))
    double = conversation(tmp_path, monkeypatch, DOUBLE, properties, bodies)
    real = conversation(tmp_path, monkeypatch, real_engine(), properties, bodies)
    assert double == real


def first_wins(request):
    request.last = True
    if not request.answer.done:
        request.answer.append(b"", True)


def test_djls_partition_script_may_call_partition(tmp_path):
    script = Path(os.environ["DJL_SRC"], "serving/docker/partition/run_partition.py")
    out = tmp_path / "out"
    properties = {
        "model_dir": str(djl_peer.ROOT / "examples" / "tiny-llama"),
        "entryPoint": "djl_python_neuronx.handler",
        "option.model_loader": "cpu",
        "option.save_mp_checkpoint_path": str(out),
    }
    search_path = f"{djl_peer.ROOT}:{real_engine().parent}"
    subprocess.run(
        [sys.executable, script, "--properties", json.dumps(properties)],
        env={**os.environ, "PYTHONPATH": search_path},
        check=True,
    )
    assert (out / "manifest.json").exists()
