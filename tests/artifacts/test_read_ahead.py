"""Reading ahead: what reaches the page cache, and what is left to the load."""

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from djl_python_neuronx.artifacts import read_ahead as module
from djl_python_neuronx.artifacts.read_ahead import read_ahead
from tests.processes import PATIENCE_S

PART = 2**12


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Of 2.5 parts, none, and one byte more than a part."""
    monkeypatch.setattr(module, "_PART_BYTES", PART)
    monkeypatch.setattr(module, "_BLOCK_BYTES", PART // 4)
    paths = []
    for i, size in enumerate([5 * PART // 2, 0, PART + 1]):
        paths.append(tmp_path / str(i))
        paths[-1].write_bytes(b"x" * size)
    return paths


def read_by_this_process():
    """Bytes that all of its calls of `read` have returned."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


@pytest.mark.parametrize(
    ("room", "expected"),
    [(2**40, 5 * PART // 2 + PART + 1), (2 * PART + 1, 2 * PART), (PART - 1, 0), (-PART, 0)],
)
def test_files_are_read_once_as_far_as_there_is_room(files, caplog, room, expected):
    caplog.set_level(logging.INFO)
    before = read_by_this_process()
    read_ahead(files, room).join()
    assert 0 <= read_by_this_process() - before - expected < 1000  # and that file of /proc
    assert f"read_ahead bytes={expected} of={5 * PART // 2 + PART + 1} " in caplog.text


def test_a_process_ends_while_a_file_is_read(tmp_path):
    (tmp_path / "weights").write_bytes(b"x")
    code = f"""
import sys, threading
from pathlib import Path
from djl_python_neuronx.artifacts import read_ahead as module
reads = threading.Event()
def hang(part):
    reads.set()
    threading.Event().wait()
module._read_part = hang
module.read_ahead([Path({str(tmp_path / "weights")!r})], 2**40)
reads.wait()
sys.exit(3)
"""
    ran = subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S, check=False)
    assert ran.returncode == 3


def test_a_file_that_is_gone_is_left_to_the_load(files, caplog):
    files[1].unlink()
    read_ahead(files, 2**40).join()
    assert "read_ahead_failed" in caplog.text
    assert str(files[1]) in caplog.text
