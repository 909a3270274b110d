"""How long a start takes, from `serve` with a warm compile store to the first token, beside the disk's rate.

    .venv/bin/python benchmarks/cold_start.py [--gib 1] [--rate 200] [--runs 3] [-o name=value] [--work DIR] [--json]

Makes a llama of random weights (TinyLlama's shapes) of `--gib` GiB; needs Linux, and that much of the disk. Each run
first drops the weight files from the page cache and measures the rate at which one reader gets them from the disk, then
drops them again and starts the server; the files of Python's packages are in the page cache. `--rate` limits this
script and the server to so many MB/s of that disk; it needs root and cgroups (v1 `blkio`, or v2 `io`). The first start,
whose compile fills the store with a Neuron library, is not counted. `--runs 0` drops nothing and measures nothing.

* `total_s`: from the server's start until the first token of a request, which is sent when the server is ready.
* `bound_s`: the aim, 1.2 times the weights' bytes by the measured rate, and 5 s. `ratio`: `total_s` to it.
* The parts are consecutive. `front`: imports and settings. `graphs`: the compile's facts and its files' hashes.
  `import`: the engine process with its libraries. `load`: reading, dividing and handing over, which the libraries do in
  one call. `heap`: a collection of Python's garbage. `warm_up`: each graph once. `token`: the first request.
* `read_s`: when the reader ahead had read everything, from its start; beside the other parts.
* `cpu_s`: processor time of all processes.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import torch
from load_memory import make_checkpoint
from sleep_device import free_port, print_rows

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "examples" / "tiny-llama"
FACTOR, FIXED_S = 1.2, 5.0
OPTIONS = {"n_positions": "128", "context_length_estimate": "16", "max_rolling_batch_size": "4"}
_CGROUPS = Path("/sys/fs/cgroup")
_BLOCK_BYTES = 2**20
_EVENTS = {
    "front": r"planned backend=",
    "graphs": r"engine_started ",
    "import": r"stage='loading the model'",
    "load": r"\bloaded backend=(?!.*copies=)",
    "heap": r"stage='running every graph once'",
    "warm_up": r"\bready url=",
}
"""Each part -> the line of the log with which it ends."""
_IMPORTED = re.compile(r"imported module=\S+ seconds=([\d.]+)")
_LOADED = re.compile(r"loaded backend=cpu (?!.*copies=).*seconds=([\d.]+)")
"""The cpu backend's time is without its imports, that of others includes them."""
_READ = re.compile(r"read_ahead bytes=\d+ of=\d+ seconds=([\d.]+)")


def main() -> int:
    """Print a row for each start, and the median."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rate", type=float, help="MB/s")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("-o", dest="options", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--work", type=Path, help="a folder on the disk to read from")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    given = dict(option.split("=", 1) for option in arguments.options)
    options = {"model_loader": "cpu", **OPTIONS, **given}
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        model = Path(work) / "model"
        model.mkdir()
        make_checkpoint(model, int(arguments.gib * 2**30), getattr(torch, arguments.dtype))
        for path in TOKENIZER.glob("*token*.json"):
            shutil.copy(path, model)
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "NEURON_COMPILE_CACHE_URL": f"{work}/store",
            "SERVING_DOWNLOAD_DIR": f"{work}/downloads",
        }
        start(model, options, environ)
        rows = [measured(model, options, environ, arguments.rate) for _ in range(arguments.runs)]
    if rows:
        median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        print_rows([*rows, {"median of": len(rows), **median}], as_json=arguments.json)
    return 0


def measured(
    model: Path, options: Mapping[str, str], environ: Mapping[str, str], rate: float | None
) -> dict[str, float]:
    """Return the row of one cold start."""
    files = sorted(model.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    with limited(model, rate):
        drop(files)
        rate_bytes = size / read(files)
        drop(files)
        row = start(model, options, environ)
    bound_s = FACTOR * size / rate_bytes + FIXED_S
    ratio = row["total_s"] / bound_s
    found = {"mb": size / 1e6, "mb_per_s": rate_bytes / 1e6, "bound_s": bound_s, "ratio": ratio}
    return {**{name: round(value, 2) for name, value in found.items()}, **row}


def drop(files: Sequence[Path]) -> None:
    """Drop files from the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(files: Sequence[Path]) -> float:
    """Read files one after the other. Returns the seconds."""
    block, began_s = bytearray(_BLOCK_BYTES), time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return time.perf_counter() - began_s


@contextmanager
def limited(path: Path, rate: float | None) -> Iterator[None]:
    """Limit this process, and those that it starts, to a rate of the disk that has `path`, in MB/s."""
    if rate is None:
        yield
        return
    device = path.stat().st_dev
    disk = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    whole = disk.resolve().parent if (disk / "partition").exists() else disk.resolve()
    number, num_bytes = (whole / "dev").read_text().strip(), int(rate * 1e6)
    is_v1 = (_CGROUPS / "blkio").is_dir()
    parent = _CGROUPS / "blkio" if is_v1 else _CGROUPS
    group, members = parent / f"cold-start-{os.getpid()}", "tasks" if is_v1 else "cgroup.procs"
    group.mkdir()
    try:
        if is_v1:
            (group / "blkio.throttle.read_bps_device").write_text(f"{number} {num_bytes}")
        else:
            (group / "io.max").write_text(f"{number} rbps={num_bytes}")
        (group / members).write_text(str(os.getpid()))
        yield
    finally:
        (parent / members).write_text(str(os.getpid()))
        for _ in range(50):  # processes that end are members for a while
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def start(model: Path, options: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, object]:
    """Start a server, send one request, and end it. Returns the seconds of each part."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "djl_python_neuronx.cli",
        "serve",
        str(model),
        "--port",
        str(port),
    ]
    command += ["--host", "127.0.0.1"]
    command += [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    cpu_s, began_s = children_cpu_s(), time.perf_counter()
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            ends_s, imports_s, read_s = follow(server.stderr)
            ask(port)
            ends_s["token"] = time.perf_counter()
        finally:
            server.send_signal(signal.SIGTERM)
            server.stderr.read()
    parts: dict[str, float] = {}
    before_s = began_s
    for name, at_s in ends_s.items():
        parts[name], before_s = at_s - before_s, at_s
    parts["import"], parts["load"] = parts["import"] + imports_s, parts["load"] - imports_s
    row = {"total_s": ends_s["token"] - began_s, **parts, "read_s": read_s}
    row["cpu_s"] = children_cpu_s() - cpu_s
    return {name: round(value, 2) for name, value in row.items()}


def follow(log: IO[str]) -> tuple[dict[str, float], float, float]:
    """Read a log until the server is ready. Returns the end of each part, the imports of a load, the reader's time."""
    ends_s: dict[str, float] = {}
    lines, imports_s, read_s = [], 0.0, 0.0
    for line in log:
        lines.append(line)
        for name, pattern in _EVENTS.items():
            if name not in ends_s and re.search(pattern, line):
                ends_s[name] = time.perf_counter()
        if found := _IMPORTED.search(line):
            imports_s += float(found[1])
        if found := _LOADED.search(line):
            imports_s = ends_s["load"] - ends_s["import"] - float(found[1])
        if found := _READ.search(line):
            read_s = float(found[1])
        if "warm_up" in ends_s:
            return {name: ends_s[name] for name in _EVENTS}, imports_s, read_s
    sys.exit("the server ended:\n" + "".join(lines[-20:]))


def ask(port: int) -> None:
    """Get one token."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = json.dumps({"inputs": "One day", "parameters": {"max_new_tokens": 1}})
    connection.request("POST", "/invocations", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    if answer.status != http.client.OK:
        sys.exit(f"no token: {answer.status} {answer.read().decode()}")
    answer.read()
    connection.close()


def children_cpu_s() -> float:
    """Processor time of all processes that have ended below this one."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
