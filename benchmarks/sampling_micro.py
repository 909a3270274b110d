"""Microseconds of one `Sampler.sample` call, median over fresh logits from a ring of at least 64 MB.

``read`` is the time to read the logits once (their maximum), the floor on this machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

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
_MIN_CALLS = 40


def fresh_logits(batch: int, vocab: int, kind: str, rng: np.random.Generator) -> Float32Array:
    """float32[batch, vocab]: N(0, 1), or with 40 tokens raised until they hold 90 % of the mass (``peaked``)."""
    logits = rng.standard_normal((batch, vocab), dtype=np.float32)
    if kind == "peaked":
        tail = np.exp(logits).sum(axis=1)
        for row, mass in zip(logits, tail, strict=True):
            raised = rng.choice(vocab, 40, replace=False)
            row[raised] += np.log(9 * mass / np.exp(row[raised]).sum())
    return logits


def median_us(step: Step, ring: list[Float32Array], count: int) -> float:
    """Median time of a step over `count` logits of the ring, after one that warms up."""
    step(ring[-1], 0)
    times = []
    for i in range(count):
        start = time.perf_counter_ns()
        step(ring[i % len(ring)], i)
        times.append(time.perf_counter_ns() - start)
    return round(float(np.median(times)) / 1000, 1)


def sampling_step(params: SamplingParams, batch: int, vocab: int, prompt_len: int) -> Step:
    """A sampler with every slot taken, as a function of logits and position."""
    sampler, slots = Sampler(batch, vocab), np.arange(batch, dtype=np.int32)
    rng = np.random.default_rng(1)
    for slot in range(batch):
        sampler.assign(slot, params, rng.integers(0, vocab, prompt_len).tolist(), slot)
    return lambda logits, i: sampler.sample(logits, slots, np.full(batch, i, np.int32))


def main() -> None:
    """Print one JSON object per combination."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, 128_256])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--setting", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument(
        "--logits", nargs="+", choices=["peaked", "flat"], default=["peaked", "flat"]
    )
    parser.add_argument("--prompt", type=int, default=64, help="tokens of history at the start")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    for vocab in args.vocab:
        for batch in args.batch:
            for kind in args.logits:
                length = max(2, -(-_RING_BYTES // (batch * vocab * 4)))
                ring = [fresh_logits(batch, vocab, kind, rng) for _ in range(min(length, 64))]
                ring += [ring[i % 64].copy() for i in range(64, length)]
                calls = max(_MIN_CALLS, min(length, 400))
                read = median_us(lambda logits, _: logits.max(axis=1), ring, calls)
                for name in args.setting:
                    step = sampling_step(SETTINGS[name], batch, vocab, args.prompt)
                    row = {"vocab": vocab, "batch": batch, "setting": name, "logits": kind}
                    row |= {"us": median_us(step, ring, calls), "read_us": read}
                    sys.stdout.write(json.dumps(row) + "\n")
                    sys.stdout.flush()


if __name__ == "__main__":
    main()
