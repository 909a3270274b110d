"""Cores that another process holds: waited for and named, over HTTP, on a double and on both rigs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.clients.answers import ROOT, Reply
from tests.clients.embedded import Embedded
from tests.processes import engines, wait_until

pytest.importorskip("uvicorn", reason="needs the `server` extra")

DRIVER = ROOT / "tests" / "doubles" / "core_driver"
PROGRAM = """
import sys, usercustomize
from djl_python_neuronx import cli
from tests.doubles.neuron_machine import place_backend
if sys.argv.pop(1) == "double":
    place_backend()
sys.exit(cli.main(sys.argv[1:]))
"""
HOLD = "import fcntl, sys; core = open(sys.argv[1]); fcntl.flock(core, fcntl.LOCK_EX); print(flush=True); input()"
OPTIONS: dict[str, dict[str, str]] = {
    "double": {"model_loader": "tnx", "tensor_parallel_degree": "1"},
    "tnx": {"model_loader": "tnx", "tensor_parallel_degree": "2", "dtype": "fp32"},
    "nxdi": {"model_loader": "nxdi", "tensor_parallel_degree": "2", "dtype": "fp32"},
}
PLACES = [
    "double",
    *(pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("tnx", "nxdi")),
]


class Core:
    """A core, and who holds it: `neuron-ls` lists that process."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "core"
        self.list_holder()

    def list_holder(self, *pids: int) -> None:
        processes = [{"pid": pid, "command": "python train.py"} for pid in pids]
        chip = {
            "neuron_device": 0,
            "nc_count": 2,
            "memory_size": 2**35,
            "neuron_processes": processes,
        }
        self.file.write_text(json.dumps([chip]))

    @contextmanager
    def held(self) -> Iterator[int]:
        """Another process holds the core for the block. Yields its pid."""
        with subprocess.Popen(
            [sys.executable, "-c", HOLD, str(self.file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as holder:
            assert holder.stdout is not None
            holder.stdout.readline()
            self.list_holder(holder.pid)
            yield holder.pid
            holder.communicate(b"\n")
        self.list_holder()

    def serve(self, place: str, wait_s: int) -> Embedded:
        """Start a server whose engines need the core."""
        own = {
            "CORE": self.file,
            "PATH": f"{DRIVER / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": f"{DRIVER}:{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "SERVING_DOWNLOAD_DIR": self.file.parent / "downloads",
            "NEURON_COMPILE_CACHE_URL": self.file.parent / "cache",
            "TOYC_LOG": self.file.parent / "compiler.log",
        }
        environ = {**os.environ, **{name: str(value) for name, value in own.items()}}
        lengths = {
            "context_length_estimate": "64,128",
            "n_positions": "128",
            "max_rolling_batch_size": "2",
        }
        options = {**OPTIONS[place], **lengths, "core_wait_s": wait_s, "skip_warmup": "true"}
        return Embedded(options, self.file.parent, environ, ("-c", PROGRAM, place))


def text_of(server: Embedded) -> str:
    body = {"inputs": "One day, ", "parameters": {"max_new_tokens": 8, "do_sample": False}}
    reply = server.post(json.dumps(body).encode(), {})
    assert reply.status == 200, reply
    text: str = json.loads(reply.data)["generated_text"]
    return text


def ping(server: Embedded) -> Reply:
    return server.send("GET", "/ping", b"", {}, time.monotonic() + 60)


@pytest.mark.parametrize("place", PLACES)
def test_a_start_waits_for_the_core_and_names_its_holder(tmp_path: Path, place: str) -> None:
    core = Core(tmp_path)
    with core.held() as pid:
        server = core.serve(place, 600)
        try:
            holder = f"process {pid} (python train.py) has /dev/neuron0 open"
            wait_until(lambda: holder in server.log_text or not server.alive, lambda: server.said)
            assert "cores_taken" in server.log_text, server.said
            # Clients get that stage, not the compile before it; another line may come between.
            wait_until(lambda: b"waiting for NeuronCores" in ping(server).data)
            assert ping(server).status == 503
        except BaseException:
            server.kill()
            raise
    try:
        server.wait_ready()
        first = text_of(server)
        # The engine's own core is free again for the next one.
        (engine,) = engines(server.front)
        os.kill(engine, 9)
        wait_until(lambda: engine not in engines(server.front))
        assert text_of(server) == first
        assert server.end() == 0
    finally:
        server.kill()


@pytest.mark.parametrize("place", PLACES)
def test_the_wait_has_an_end(tmp_path: Path, place: str) -> None:
    core = Core(tmp_path)
    with core.held() as pid:
        server = core.serve(place, 1)
        try:
            status = server.process.wait(600)
        finally:
            server.kill()
    assert status == 1
    before, _, error = server.log_text.rpartition("load_failed")
    assert "option.core_wait_s=1 is over" in error
    assert str(pid) not in error  # clients of a server with other models get it
    assert f"process {pid} (python train.py)" in before
    assert "NEURON_RT_VISIBLE_CORES" in server.log_text
