"""A killed `compile` leaves nothing that the next one does not remove, and nothing at all in the system's folder."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from djl_python_neuronx.artifacts.atomic import flock
from djl_python_neuronx.loading.failed_loads import FailedLoads
from tests.doubles.neuron_machine import TINY

pytest.importorskip("torch", reason="torch is not installed")

ROOT = Path(__file__).parents[2]
COMPILE = """
import os, signal, sys
from types import SimpleNamespace
from djl_python_neuronx import cli
from djl_python_neuronx.artifacts import fetch, output

def upload(folder, uri, environ, *, progress=None):
    assert (folder / "manifest.json").exists() and (folder / "draft" / "manifest.json").exists()

def die(*_arguments, **_more):
    os.kill(os.getpid(), signal.SIGKILL)

moment, *arguments = sys.argv[1:]
fetch.s3_module = lambda uri: SimpleNamespace(check_free=lambda *_: None, upload=upload)
if moment == "upload":
    fetch.s3_module = lambda uri: SimpleNamespace(check_free=lambda *_: None, upload=die)
elif moment == "draft":
    fill = output._fill
    output._fill = lambda target, *more: die() if ".draft." in str(target) else fill(target, *more)
sys.exit(cli.main(["compile", *arguments]))
"""


def compile_in_a_process(tmp_path, output, moment):
    arguments = [str(TINY), "--output", output, "--log-level", "warning"]
    for pair in (
        *("n_positions=64", "max_rolling_batch_size=1", "model_loader=cpu", "skip_warmup=true"),
        f"speculative_draft_model={TINY}",
    ):
        arguments += ["-o", pair]
    return subprocess.run(
        [sys.executable, "-c", COMPILE, moment, *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "TMPDIR": str(tmp_path / "tmp"),
            "SERVING_DOWNLOAD_DIR": str(tmp_path / "downloads"),
        },
        check=False,
        timeout=120,
    ).returncode


@pytest.mark.parametrize(
    ("to", "moment"),
    [("s3", "upload"), pytest.param("folder", "draft", marks=pytest.mark.nightly)],
)
def test_what_it_leaves_goes_with_the_next_one(tmp_path, to, moment):
    (tmp_path / "tmp").mkdir()
    place = tmp_path / "downloads" / "djl-neuronx" if to == "s3" else tmp_path / "made"
    output, prefix = (
        ("s3://bucket/out", "output-") if to == "s3" else (str(place / "out"), ".out.output-")
    )
    place.mkdir(parents=True)
    assert compile_in_a_process(tmp_path, output, moment) == -signal.SIGKILL
    left = [path for path in place.iterdir() if path.name.startswith(prefix)]
    assert len(left) == 1
    assert not list((tmp_path / "tmp").iterdir())
    alive = place / f"{prefix}another0"
    alive.mkdir()
    with flock(alive):
        assert compile_in_a_process(tmp_path, output, "none") == 0
    found = {path.name for path in place.iterdir()}
    assert found - {"compiled"} == {alive.name, *(() if to == "s3" else ("out",))}
    assert not list((tmp_path / "tmp").iterdir())


def test_counts_of_processes_that_ended_long_ago_go(tmp_path, monkeypatch):
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    FailedLoads("/old").add("why")
    FailedLoads("/new").add("why")
    folder = FailedLoads("/old").folder
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    FailedLoads("/new").clear()
    assert FailedLoads("/new").add("why") == 1
    assert len(list(folder.iterdir())) == 1
