"""How much memory a checkpoint takes on its way in: loaded by the CPU backend, and converted.

    .venv/bin/python benchmarks/load_memory.py [--gib 2] [--dtype bfloat16 float32] [--work DIR] [--json]

Needs Linux, and somewhat more than twice `--gib` on the disk. Makes llama-like checkpoints of random weights, in
shards of 512 MiB. Each row is a fresh process that imports everything, is measured, and is sampled until its work is
done; a load ends when every page of every weight was read too. What is printed is above that first measurement.

* `peak_pss`: proportional set size of /proc/<pid>/smaps_rollup. Pages of files are in it while the process has them
  mapped and in use; the kernel can take those back at any time.
* `peak_anonymous`: what the kernel cannot take back, the process's own memory. The slot cache is in both.
* `high_water`: peak of the resident set as the kernel itself keeps it, so that nothing hides between two samples.
* `ratio`: `peak_pss` to the bytes of the source's weight files; at most 1.15 where the types are the same.
"""

from __future__ import annotations

import argparse
import math
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

SHARD_BYTES = 2**29
SAMPLE_S = 0.005
ALLOWED = 1.15
LOAD = """
import sys
from pathlib import Path
import transformers.models.llama.modeling_llama
from djl_python_neuronx.backends import LoadPlan, cpu
model_dir, dtype = sys.argv[1:]
plan = LoadPlan(Path(model_dir), num_slots=4, max_model_len=512, prefill_buckets=(512,), dtype=dtype)
print("ready", flush=True)
sys.stdin.readline()
backend = cpu.load(plan)
for weight in backend._model.module.parameters():
    weight.view(-1)[:: 4096 // weight.itemsize].sum()  # every page; what nothing has read yet is in no count
print(backend._model.cache_bytes, flush=True)
sys.stdin.readline()
"""
CONVERT = """
import sys
from pathlib import Path
import safetensors, torch
from djl_python_neuronx.artifacts.convert import convert
source, destination, to = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
convert(Path(source), Path(destination), to)
print(0, flush=True)
sys.stdin.readline()
"""


@dataclass(frozen=True)
class Measured:
    """Bytes of one process above those after its imports."""

    imports_pss: int
    peak_pss: int
    peak_anonymous: int
    high_water: int
    cache_bytes: int
    num_samples: int


def measure(program: str, *arguments: str | Path) -> Measured:
    """Run a program that says "ready", waits for a line, works, prints a number and waits for another line."""
    command = [sys.executable, "-c", program, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        if child.stdout.readline() != b"ready\n":
            sys.exit("the measured process failed before its work")
        proc = Path(f"/proc/{child.pid}")
        (proc / "clear_refs").write_text("5")  # resets VmHWM
        resident = read_fields(proc / "status")["VmRSS"]
        samples = [read_fields(proc / "smaps_rollup")]
        child.stdin.write(b"\n")
        while not select.select([child.stdout], [], [], SAMPLE_S)[0]:
            samples.append(read_fields(proc / "smaps_rollup"))
        answer = child.stdout.readline()
        if not answer:
            sys.exit("the measured process failed at its work")
        samples.append(read_fields(proc / "smaps_rollup"))
        high_water = read_fields(proc / "status")["VmHWM"] - resident
        child.stdin.write(b"\n")
    pss, anonymous = ([sample[name] for sample in samples] for name in ("Pss", "Anonymous"))
    return Measured(
        imports_pss=pss[0],
        peak_pss=max(pss) - pss[0],
        peak_anonymous=max(anonymous) - anonymous[0],
        high_water=high_water,
        cache_bytes=int(answer),
        num_samples=len(samples),
    )


def read_fields(path: Path) -> dict[str, int]:
    """Bytes by name, of a file of /proc that gives kB."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


def make_checkpoint(folder: Path, num_bytes: int, dtype: torch.dtype) -> int:
    """Write a llama with as many layers as this size takes, shard by shard; returns its weight files' bytes."""
    one, two = (sum(map(_numel, shapes_of(layers).values())) for layers in (1, 2))
    layers = 1 + max(0, math.ceil((num_bytes / dtype.itemsize - one) / (two - one)))
    weight_map: dict[str, str] = {}
    for shard in _shards(shapes_of(layers), SHARD_BYTES // dtype.itemsize):
        name = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        tensors = {
            # Small, so that logits stay finite; a norm's weights are around one.
            key: torch.randn(shape).mul_(0.02).add_(float(len(shape) == 1)).to(dtype)
            for key, shape in shard.items()
        }
        save_file(tensors, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_bytes(orjson.dumps(index))
    config_of(layers, dtype).save_pretrained(folder)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def config_of(layers: int, dtype: torch.dtype | None = None) -> LlamaConfig:
    """TinyLlama's shapes, with a number of layers."""
    return LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=2048,
        num_hidden_layers=layers,
        dtype=dtype,
    )


def shapes_of(layers: int) -> dict[str, torch.Size]:
    """Of all tensors of the model, by name."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config_of(layers))
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def _shards(shapes: dict[str, torch.Size], limit: int) -> Iterator[dict[str, torch.Size]]:
    """Parts of at most `limit` elements."""
    shard: dict[str, torch.Size] = {}
    for name, shape in shapes.items():
        if shard and sum(map(_numel, shard.values())) + _numel(shape) > limit:
            yield shard
            shard = {}
        shard[name] = shape
    yield shard


def _numel(shape: torch.Size) -> int:
    return shape.numel()


def main() -> int:
    """Print one row per kind of work."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    types = ("bfloat16", "float32")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--dtype", nargs="+", choices=types, default=types)
    parser.add_argument("--work", type=Path, help="a folder on the disk to write to")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for dtype in arguments.dtype:
        with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
            for row in measure_all(Path(folder), int(arguments.gib * 2**30), dtype, types):
                text = "  ".join(f"{key}={value}" for key, value in row.items())
                print(orjson.dumps(row).decode() if arguments.json else text, flush=True)
    return 0


def measure_all(
    work: Path, num_bytes: int, dtype: str, types: tuple[str, ...]
) -> Iterator[dict[str, object]]:
    """The rows for one type of weights."""
    source, split, back = work / "source", work / "split", work / "back"
    source.mkdir()
    size = make_checkpoint(source, num_bytes, getattr(torch, dtype))
    for loaded in sorted(types, key=lambda name: name != dtype):
        work_name = "load" if loaded == dtype else f"load as {loaded}"
        yield _row(work_name, dtype, size, measure(LOAD, source, loaded))
    yield _row("convert to split", dtype, size, measure(CONVERT, source, split, "split"))
    shutil.rmtree(source)
    yield _row("convert to safetensors", dtype, size, measure(CONVERT, split, back, "safetensors"))


def _row(work: str, dtype: str, size: int, measured: Measured) -> dict[str, object]:
    ratio = measured.peak_pss / size
    row: dict[str, object] = {
        "work": work,
        "files": dtype,
        "files_mib": size >> 20,
        "peak_pss_mib": measured.peak_pss >> 20,
        "peak_anonymous_mib": measured.peak_anonymous >> 20,
        "high_water_mib": measured.high_water >> 20,
        "ratio": round(ratio, 3),
        "cache_mib": measured.cache_bytes >> 20,
        "imports_mib": measured.imports_pss >> 20,
        "samples": measured.num_samples,
    }
    if " as " not in work:
        row["within"] = ratio <= ALLOWED
    return row


if __name__ == "__main__":
    sys.exit(main())
