"""Weights are mapped, not copied: measured in processes of their own, as benchmarks/load_memory.py does."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the cpu backend needs torch")
pytest.importorskip(
    "transformers", "4.57", reason="the cpu backend needs transformers 4.57 or newer"
)

from tests.doubles.tiny_models import save_tiny_model

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="no /proc/<pid>/smaps_rollup"
)
MIB = 2**20
NOISE, ROOM = 8 * MIB, 40 * MIB
"""Bytes that an amount may lack, and that the interpreter may add: less than any amount counted twice."""
KNOWN = """
import mmap, sys
print("ready", flush=True)
sys.stdin.readline()
gone = bytearray(b"x") * (96 << 20)
del gone
kept = bytearray(b"x") * (48 << 20)
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    mapped[::4096]
print(7, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("load_memory")


def test_known_amounts_are_measured(benchmark, tmp_path):
    (tmp_path / "file").write_bytes(bytes(32 * MIB))
    found = benchmark.measure(KNOWN, tmp_path / "file")
    # What is gone again may lie between two samples; only the kernel's own mark is sure to have it.
    assert 48 * MIB - NOISE < found.peak_anonymous < 96 * MIB + ROOM
    assert 80 * MIB - NOISE < found.peak_pss < 96 * MIB + ROOM
    assert 96 * MIB - NOISE < found.high_water < 96 * MIB + ROOM
    assert found.cache_bytes == 7


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_in_the_type_of_its_files_is_not_copied(benchmark, tmp_path, dtype):
    """
    Loading itself takes some 30 MB at any size, 15 of them anonymous: the bounds leave room for that.

    The high-water mark also counts pages of libraries that others have mapped too, and how many the kernel maps with
    one fault depends on what its page cache holds: its bound is far from both 1.3, as loaded, and 2, a copy.
    """
    save_tiny_model(
        "llama",
        tmp_path,
        dtype=dtype,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8 if dtype == "float32" else 20,
        vocab_size=8192,
        max_position_embeddings=512,
    )
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 128 * MIB
    found = benchmark.measure(benchmark.LOAD, tmp_path, dtype)
    assert found.high_water > 0.95 * size, "the weights were not all looked at"
    assert found.peak_anonymous - found.cache_bytes < 0.4 * size
    assert found.high_water - found.cache_bytes < 1.7 * size
