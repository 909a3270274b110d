"""Microseconds of one `Sampler.sample` call, median over fresh logits from a ring of at least 64 MB.

``read`` is the time to read the logits once (their maximum) with numpy on one thread. ``threads``: of the compiled
kernel; 0 is numpy. All settings of a batch take turns, so that a busy moment of the machine meets all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from itertools import product

import numpy as np
import numpy.typing as npt

from djl_python_neuronx.engine.native import LIBRARY, load
from djl_python_neuronx.engine.sampler import Sampler
from djl_python_neuronx.sampling import SamplingParams

Float32Array = npt.NDArray[np.float32]
Step = Callable[[Float32Array, int], object]

SETTINGS = {
    "greedy": SamplingParams(),
    "topk_topp": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "topp": SamplingParams(temperature=1.0, top_p=0.9),
    "topk_topp_rep": SamplingParams(temperature=0.8, top_k=50, top_p=0.9, repetition_penalty=1.1),
    "greedy_rep": SamplingParams(repetition_penalty=1.1),
}
_RING_BYTES = 64 << 20


def fresh_logits(batch: int, vocab: int, kind: str, rng: np.random.Generator) -> Float32Array:
    """float32[batch, vocab]: N(0, 1), or with 40 tokens raised until they hold 90 % of the mass (``peaked``)."""
    logits = rng.standard_normal((batch, vocab), dtype=np.float32)
    if kind == "peaked":
        tail = np.exp(logits).sum(axis=1)
        for row, mass in zip(logits, tail, strict=True):
            raised = rng.choice(vocab, 40, replace=False)
            row[raised] += np.log(9 * mass / np.exp(row[raised]).sum())
    return logits


def medians_us(steps: list[Step], ring: list[Float32Array], count: int) -> list[float]:
    """Median time of each step over `count` logits of the ring, after one that warms up."""
    times = np.empty((count, len(steps)))
    for i in range(-1, count):
        for j, step in enumerate(steps):
            logits = ring[(i * len(steps) + j) % len(ring)]
            start = time.perf_counter_ns()
            step(logits, i + 1)
            times[i, j] = time.perf_counter_ns() - start
    return [round(float(median) / 1000, 1) for median in np.median(times, axis=0)]


def sampling_step(
    params: SamplingParams, batch: int, vocab: int, prompt_len: int, threads: int
) -> Step:
    """A sampler with every slot taken, as a function of logits and position."""
    library = LIBRARY if threads else None
    sampler = Sampler(batch, vocab, library=library, threads=max(threads, 1))
    slots, positions = np.arange(batch, dtype=np.int32), np.zeros(batch, np.int32)
    rng = np.random.default_rng(1)
    for slot in range(batch):
        sampler.assign(slot, params, rng.integers(0, vocab, prompt_len).tolist(), slot)

    def step(logits: Float32Array, i: int) -> object:
        positions.fill(i)
        return sampler.sample(logits, slots, positions)

    return step


def main() -> None:
    """Print one JSON object per combination."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, 128_256])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--setting", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--logits", nargs="+", choices=["peaked", "flat"], default=["peaked"])
    parser.add_argument("--threads", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--calls", type=int, default=100, help="that a median is taken of")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of history at the start")
    args = parser.parse_args()
    if max(args.threads) and load(LIBRARY) is None:
        parser.error("no kernel: run python -m tools.build_native, or give --threads 0")
    rng = np.random.default_rng(0)
    for vocab, batch, kind in product(args.vocab, args.batch, args.logits):
        length = max(3, -(-_RING_BYTES // (batch * vocab * 4)))
        ring = [fresh_logits(batch, vocab, kind, rng) for _ in range(min(length, 64))]
        ring += [ring[i % 64].copy() for i in range(64, length)]
        names = list(product(args.setting, args.threads))
        steps: list[Step] = [lambda logits, _: logits.max(axis=1)]
        for name, threads in names:
            steps.append(sampling_step(SETTINGS[name], batch, vocab, args.prompt, threads))
        read, *found = medians_us(steps, ring, args.calls)
        for (name, threads), us in zip(names, found, strict=True):
            row = {"vocab": vocab, "batch": batch, "setting": name, "logits": kind}
            row |= {"threads": threads, "us": us, "read_us": read}
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
