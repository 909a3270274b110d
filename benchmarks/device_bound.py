"""Does the device set the speed? Tokens/s of eight streams over HTTP, next to a loop that only calls the model.

    export TNX_SRC=<a checkout of transformers-neuronx> PYTHONPATH=<its CPU rig>:$TNX_SRC/src
    python benchmarks/device_bound.py                                        # the whole table, 15 minutes
    python benchmarks/device_bound.py --seconds 5 --runs 3 --settings greedy # a minute

Both sides run transformers-neuronx itself on one llama of random weights. XLA's CPU computes in place of the device,
and a program takes at least `--exec-ms`: by default the published decode step of Llama-3-8B, whose vocabulary it has,
on an inf2.48xlarge with a batch of 8. The rig's sleep overshoots, so only ratios count.

* `ours`: `djl-neuronx serve` in a process of its own, read over eight sockets by this one. The clock starts when all
  eight stream, and none of them ends within it.
* `bare`: another process, which calls the model with eight rows and takes the argmax. The two take turns.
* `ratio`: of the medians. `of_device`: the bare loop's share of what eight rows per `--exec-ms` would be. Below 0.9
  the machine is busy or too slow to stand in for the device: `met` is then unknown (None).
* `host_us`: the critical path that `host_cost.py` finds for the setting, on flat logits as these are.
* `bound`: what `ratio` should reach: 0.98 for greedy; else a loss of `host_us` per step of the bare loop and 1 %.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson
import torch
from host_cost import PROMPT_LEN, Case, measure
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from djl_python_neuronx.sampling import SamplingParams

VOCAB = 128_256
ROWS = 8
HIDDEN = 64
EXEC_MS = 10.45
"""Median time per output token: Llama-3-8B, int8, 8192 positions, tp 24, batch 8 (AWS Neuron SDK 2.18, benchmarks)."""
WARM_STEPS = 100
FIRST_LENGTH = 128
"""The shorter of two decode programs; it is left behind before the clock starts."""
POLL_S = 0.05
"""Clients that woke up for every token would take the server's cores; the sockets hold what comes meanwhile."""
QUIET_S = 1.0
START_S = 300.0
SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "greedy": {},
        "topk_topp": {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
        "topp": {"temperature": 0.8, "top_p": 0.95},
    }
)
TRUSTED = 0.9
GREEDY_BOUND = 0.98
ALLOWANCE = 0.01
MODULES = ("transformers_neuronx", "neuron_emulator")
BARE = """
import sys, time, torch
from transformers_neuronx import ContinuousBatchingConfig, LlamaForSampling, NeuronConfig
folder, rows, prompt_len, warm_steps, *lengths = sys.argv[1], *map(int, sys.argv[2:])
model = LlamaForSampling.from_pretrained(
    folder, batch_size=rows, tp_degree=1, n_positions=lengths, context_length_estimate=[prompt_len],
    neuron_config=NeuronConfig(continuous_batching=ContinuousBatchingConfig(batch_size_for_shared_caches=rows)))
model.to_neuron()
slots, prompts = torch.arange(rows), torch.arange(prompt_len).repeat(rows, 1)
print("ready", flush=True)

@torch.inference_mode()
def run(seconds):
    ids, position = model(prompts, prompts, slots).argmax(dim=1, keepdim=True), prompt_len
    end = None
    while end is None or time.perf_counter() < end:
        if position == prompt_len + warm_steps:
            began = time.perf_counter()
            end = began + seconds
        ids = model(ids, torch.full((rows, 1), position), slots).argmax(dim=1, keepdim=True)
        position += 1
    return rows * (position - prompt_len - warm_steps) / (time.perf_counter() - began)

for line in sys.stdin:
    print(run(float(line)), flush=True)
"""


def save_model(folder: Path, length: int) -> None:
    """Write a llama of one layer, whose logits vary by about 1, with a byte-level tokenizer of its whole vocabulary."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=length,
        initializer_range=HIDDEN**-0.5,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(f"Ġ{i}" for i in range(VOCAB - len(alphabet)))]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@contextlib.contextmanager
def process(command: list[str], environ: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process of this interpreter that is told to end."""
    with subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            yield running
        finally:
            running.terminate()


def wait_ready(server: subprocess.Popen[str], port: int) -> None:
    """Return when the server answers."""
    deadline_s = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(OSError):  # refused, or 503 while it loads
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=5).close()
            return
        time.sleep(0.2)
    sys.exit(f"the server is not ready after {START_S:g} s, or has ended; its messages are above")


def bare_rate(bare: subprocess.Popen[str], seconds: float) -> float:
    """Tokens/s of the loop that only calls the model."""
    assert bare.stdin is not None
    assert bare.stdout is not None
    bare.stdin.write(f"{seconds}\n")
    bare.stdin.flush()
    return float(bare.stdout.readline())


def served_rate(port: int, parameters: Mapping[str, Any], length: int, seconds: float) -> float:
    """Tokens/s of eight streams together."""
    sampling = {"do_sample": bool(parameters), **parameters}
    endless = {"max_new_tokens": length - PROMPT_LEN, "ignore_eos": True}
    payload = {"inputs": "x" * PROMPT_LEN, "parameters": {**endless, **sampling}, "stream": True}
    body = orjson.dumps(payload)
    head = f"POST /invocations HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with contextlib.ExitStack() as stack:
        streams = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(ROWS)
        ]
        for stream in streams:
            stream.sendall(head.encode() + body)
        received = [_num_tokens(stream.recv(2**16), b"HTTP/1.1 200") for stream in streams]

        def poll() -> tuple[int, float]:
            time.sleep(POLL_S)
            for i, stream in enumerate(streams):
                received[i] += _num_tokens(stream.recv(2**20))
            return sum(received), time.perf_counter()

        while min(received) < WARM_STEPS:
            first, began = poll()
        last, now = first, began
        while now < began + seconds:
            last, now = poll()
    time.sleep(QUIET_S)  # the server ends what nobody reads any more
    return (last - first) / (now - began)


def _num_tokens(data: bytes, start: bytes = b"") -> int:
    """Lines of JSON end in a bare line feed, HTTP's own in two characters."""
    if not data or not data.startswith(start):
        sys.exit(f"a stream has ended; expected tokens, found {data[:500].decode()!r}")
    return data.count(b"\n") - data.count(b"\r")


def compare(
    setting: str, bare: subprocess.Popen[str], port: int, length: int, options: argparse.Namespace
) -> dict[str, Any]:
    """A row: the two in turns."""
    pairs = []
    for _ in range(options.runs):
        bare_s = bare_rate(bare, options.seconds)
        ours_s = served_rate(port, SETTINGS[setting], length, options.seconds)
        print(f"{setting}: bare {bare_s:.1f}, ours {ours_s:.1f} tokens/s", file=sys.stderr)
        pairs.append((bare_s, ours_s))
    bare_s, ours_s = map(statistics.median, zip(*pairs, strict=True))
    case = Case(VOCAB, ROWS, setting, "flat", "json")
    sampling = SamplingParams(**SETTINGS[setting])
    host_us = measure(case, num_tokens=200, device_s=0.0, sampling=sampling)["critical_us"]
    bound = 1 - host_us / 1e6 * bare_s / ROWS - ALLOWANCE if SETTINGS[setting] else GREEDY_BOUND
    of_device = bare_s / ROWS * options.exec_ms / 1e3
    return {
        "setting": setting,
        "bare": round(bare_s, 1),
        "ours": round(ours_s, 1),
        "ratio": round(ours_s / bare_s, 4),
        "of_device": round(of_device, 4),
        "host_us": host_us,
        "bound": round(bound, 4),
        "met": ours_s / bare_s >= bound if of_device >= TRUSTED else None,
    }


def rows(options: argparse.Namespace, work: Path) -> Iterator[dict[str, Any]]:
    """A row for each setting."""
    most_steps = options.seconds / options.exec_ms * 1e3
    length = FIRST_LENGTH * (2 + int((PROMPT_LEN + WARM_STEPS + most_steps) / FIRST_LENGTH))
    save_model(work / "model", length)
    environ = {
        "NEURON_EMU_EXEC_MS": str(options.exec_ms),
        "NEURON_RT_NUM_CORES": "1",
        "NEURON_COMPILE_CACHE_URL": str(work / "programs"),
        "DJL_CACHE_DIR": str(work / "cache"),
        # The rig copies with torch, whose threads spin while they wait: a device takes no such time from the host.
        "OMP_NUM_THREADS": "1",
        "NEURON_EMU_LOG_LEVEL": "WARNING",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    lengths = [str(FIRST_LENGTH), str(length)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "model_loader": "tnx",
        "tensor_parallel_degree": 1,
        "dtype": "fp32",
        "n_positions": ",".join(lengths),
        "context_length_estimate": PROMPT_LEN,
        "max_rolling_batch_size": ROWS,
    }
    serve = ["-m", "djl_python_neuronx.cli", "serve", str(work / "model")]
    serve += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    serve += [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    shapes = [str(number) for number in (ROWS, PROMPT_LEN, WARM_STEPS)]
    bare_loop = ["-c", BARE, str(work / "model"), *shapes, *lengths]
    with process(bare_loop, environ) as bare, process(serve, environ) as server:
        wait_ready(server, port)
        assert bare.stdout is not None
        if bare.stdout.readline() != "ready\n":
            sys.exit("the bare loop could not load the model; its messages are above")
        for setting in options.settings:
            yield compare(setting, bare, port, length, options)


def main() -> int:
    """Print the table, or one JSON object per line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one object per line")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run's clock")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--settings", nargs="*", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--exec-ms", type=float, default=EXEC_MS)
    options = parser.parse_args()
    if missing := [name for name in MODULES if importlib.util.find_spec(name) is None]:
        sys.exit(
            f"{' and '.join(missing)} cannot be imported; expected transformers-neuronx and its CPU rig on PYTHONPATH. "
            "Set PYTHONPATH=<rig>:$TNX_SRC/src, where TNX_SRC is a checkout of transformers-neuronx"
        )
    with tempfile.TemporaryDirectory() as work:
        for row in rows(options, Path(work)):
            if options.json:
                print(orjson.dumps(row).decode(), flush=True)
            else:
                print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
