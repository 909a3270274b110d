"""Host cost of one decode step, on a device that takes no time.

    .venv/bin/python benchmarks/host_cost.py                       # the whole table
    .venv/bin/python benchmarks/host_cost.py --json --vocab 32000 --batch 8 --setting greedy
    .venv/bin/python benchmarks/host_cost.py --pair BEFORE AFTER   # two checkouts of this repository

The device is the sim backend, which returns logits from a ring of at least 64 MB, so that each step's are not in the
cache (one reused buffer flatters 3x). It records when it returns and when it is called again: `critical_us` is the
median time between, which is what the device waits for, measured from outside the engine. `total_us` is the CPU time
of all threads per step, without the device's. `read_us` is the reference of the same run: one numpy maximum over the
same logits, after a sleep of the device's time, the least that any sampler must do; `ratio` is critical over it.
`p99_us`: the 99th percentile of the critical times; `steps`: their number.

A run of the device releases the GIL, as a real one does, for `--device-ms` (default 0: it yields and returns).

`--pair` runs each checkout's own copy of this file, in `--runs` processes of each, in turn (before, after,
before, ...), and compares the smallest `critical_us` and `total_us` of each setting. Single runs of the same
code differ by up to 1.8 x on two shared cores; minima of 9 do not. Exit status 1: a setting is slower than 1.05 x.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from djl_python_neuronx.backends.base import Float32Array, ModelSpec, Step, StepOutput
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.backends.sim.backend import SimBackend
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.loop import LoopSettings
from djl_python_neuronx.engine.replicas import Replicas
from djl_python_neuronx.engine.streams import BlockingQueue
from djl_python_neuronx.engine.worker import EngineThread
from djl_python_neuronx.grammar import checked
from djl_python_neuronx.protocol.base import Formatter, ParseContext
from djl_python_neuronx.protocol.lmi import LmiProtocol
from djl_python_neuronx.protocol.tools import TOOL_FORMATS
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.telemetry import Metrics, Recorder
from djl_python_neuronx.types import GenerationRequest

PROMPT_LEN = 64
TEMPERATURE = 0.8
PEAKS = 40
PEAK_MASS = 0.9
WARM_STEPS = 8
COMPARED = ("critical_us", "total_us")
LIMIT = 1.05
PAIR_STEPS = 60
TOKENIZER_DIR = Path(__file__).parent.parent / "examples" / "tiny-llama"

TOPK_TOPP = SamplingParams(temperature=TEMPERATURE, top_k=50, top_p=0.9)
SETTINGS = {
    "greedy": SamplingParams(),
    "topk_topp": TOPK_TOPP,
    "topp": SamplingParams(temperature=TEMPERATURE, top_p=0.9),
    "topk_topp_rep": replace(TOPK_TOPP, repetition_penalty=1.1),
    # LangChain's defaults.
    "topk_topp_typical": replace(TOPK_TOPP, top_k=10, top_p=0.95, typical_p=0.95),
    "typical": SamplingParams(temperature=TEMPERATURE, typical_p=0.9),
    "topp_typical": SamplingParams(temperature=TEMPERATURE, top_p=0.9, typical_p=0.9),
    "penalties": replace(TOPK_TOPP, presence_penalty=0.5, frequency_penalty=0.5),
    "bias": replace(TOPK_TOPP, logit_bias=tuple((token, -5.0) for token in range(300))),
    "allowed": replace(TOPK_TOPP, allowed_token_ids=tuple(range(1000))),
    "bad_words": replace(TOPK_TOPP, bad_words=tuple((i, i + 1) for i in range(0, 200, 2))),
    "suppress": replace(TOPK_TOPP, suppress_tokens=(5, 6), begin_suppress_tokens=(7,)),
    "ngrams": replace(TOPK_TOPP, no_repeat_ngram_size=3),
    "min_tokens": SamplingParams(min_new_tokens=1),
    "greedy_grammar": SamplingParams(),
    "auto_tools": SamplingParams(),
}
CALLS = {
    **vars(TOOL_FORMATS[0]),
    "special": {},
    "tools": [(f"tool_{i}", {"properties": {"a": {"type": "string"}}}, True) for i in range(20)],
    "choice": "auto",
    "parallel": True,
    "text": None,
}
GRAMMARS = {
    "greedy_grammar": "start: /( t[0-9]+)*!/",
    "auto_tools": checked("tools", orjson.dumps([CALLS, None]).decode()),
}
"""Of the settings whose rows have one. All tokens may follow, and the first one's text never ends: no token has its
last letter. The second is of free text and 20 tools, with no token in which a call opens."""
USUAL = ("greedy", "topk_topp", "topp", "topk_topp_rep")


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    vocab: int
    batch: int
    setting: str
    logits: str
    format: str


class TimedBackend(SimBackend):
    """Notes the time between two full decodes, and the CPU time of the device."""

    def __init__(self, case: Case, *, num_tokens: int, device_s: float) -> None:
        self._logits = case.logits
        length = PROMPT_LEN + num_tokens + 1
        plan = LoadPlan(Path(), case.batch, length, (PROMPT_LEN,), sim_step_ms=device_s * 1e3)
        super().__init__(plan, case.vocab, seed=0)
        self.spec = replace(self.spec, max_prefill_batch=case.batch)
        self.ring = self._model.ring
        self.gaps_ns: list[int] = []
        self.cpu_ns = 0
        self._left_ns: int | None = None

    def _noise(self, spec: ModelSpec, seed: int) -> Float32Array:
        """Flat, or with peaks that have most of the mass."""
        noise = super()._noise(spec, seed)
        if self._logits == "peaked":
            noise *= TEMPERATURE  # so that the mass is right after the division by the temperature
            random = np.random.default_rng(seed)
            peaks = random.choice(spec.vocab_size, PEAKS, replace=False)
            rest = np.exp(noise / TEMPERATURE, dtype=np.float64).sum()
            each = np.log(PEAK_MASS / (1 - PEAK_MASS) * rest / PEAKS)
            noise[peaks] = TEMPERATURE * (each + 0.3 * random.standard_normal(PEAKS))
        return noise

    def run(self, step: Step) -> StepOutput:
        """See `Backend`; full decodes are timed."""
        entered_ns, began_ns = time.perf_counter_ns(), time.thread_time_ns()
        full = step.decode is not None and len(step.decode.slots) == self.spec.num_slots
        if self._left_ns is not None and full:
            self.gaps_ns.append(entered_ns - self._left_ns)
        output = super().run(step)
        self.cpu_ns += time.thread_time_ns() - began_ns
        self._left_ns = time.perf_counter_ns() if full else None
        return output


class TableTokenizer:
    """Every id is a short word, as a byte-level vocabulary's table would say."""

    special_ids: frozenset[int] = frozenset()
    eos_id: int | None = None

    def __init__(self, vocab: int) -> None:
        self.pieces: Sequence[bytes] | None = [b" t%d" % i for i in range(vocab)]

    def special_id(self, text: str) -> int | None:  # noqa: ARG002
        """There are none."""
        return None

    def encode(self, text: str, *, special: bool = True) -> list[int]:  # noqa: ARG002
        """One token: the prompts are ids here."""
        return [0]

    def encode_chat(self, messages: Any, *, max_chars: Any = None) -> list[int]:  # noqa: ANN401
        """Not used."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int], *, skip: bool = True, spaces: bool = False) -> str:
        """Not used while there are pieces."""
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        """Not used: no request wants other tokens than its own."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to do."""


def measure(
    case: Case, *, num_tokens: int, device_s: float, sampling: SamplingParams | None = None
) -> dict[str, Any]:
    """One row: the critical path and the whole CPU time of a step. `sampling` in place of the setting's."""
    backend = TimedBackend(case, num_tokens=num_tokens, device_s=device_s)
    cpu_s = _generate(case, backend, num_tokens, sampling)
    gaps = backend.gaps_ns[WARM_STEPS:]
    read_us = _read_us(backend.ring, device_s)
    critical_us = statistics.median(gaps) / 1e3
    return {
        **vars(case),
        "critical_us": round(critical_us, 1),
        "total_us": round(cpu_s / num_tokens * 1e6, 1),
        "p99_us": round(float(np.percentile(gaps, 99)) / 1e3, 1),
        "read_us": round(read_us, 1),
        "ratio": round(critical_us / read_us, 2),
        "steps": len(gaps),
    }


def growth(vocab: int, batch: int) -> dict[str, Any]:
    """The critical path at token 64 and at token 4096 of the same sequences, repetition penalty on."""
    case = Case(vocab, batch, "topk_topp_rep", "flat", "json")
    num_tokens = 4160
    backend = TimedBackend(case, num_tokens=num_tokens, device_s=0.0)
    _generate(case, backend, num_tokens)
    early = statistics.median(backend.gaps_ns[32:160]) / 1e3
    late = statistics.median(backend.gaps_ns[4032:4160]) / 1e3
    return {
        "growth": "topk_topp_rep",
        "vocab": vocab,
        "batch": batch,
        "us_at_64": round(early, 1),
        "us_at_4096": round(late, 1),
        "ratio": round(late / early, 3),
    }


def under_load(vocab: int, batch: int) -> Iterator[dict[str, Any]]:
    """The critical path, greedy, with and without a thread that tokenises prompts of 8k tokens all the time."""
    from djl_python_neuronx.artifacts.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(TOKENIZER_DIR)
    text = "one two three four five six seven eight nine ten " * 1000
    while len(tokenizer.encode(text)) > 8192:
        text = text[: int(len(text) * 0.95)]
    case = Case(vocab, batch, "greedy", "flat", "jsonlines")
    for busy in (False, True):
        stop = threading.Event()

        def front_end(stop: threading.Event = stop) -> None:
            while not stop.is_set():
                tokenizer.encode(text)

        thread = threading.Thread(target=front_end, daemon=True)
        if busy:
            thread.start()
        row = measure(case, num_tokens=500, device_s=0.005)
        stop.set()
        yield {"front_end": "8k prompts" if busy else "idle", "device_ms": 5.0, **row}


def _generate(
    case: Case, backend: TimedBackend, num_tokens: int, sampling: SamplingParams | None = None
) -> float:
    """Run a full batch to its end through loop, text and formatter; CPU seconds of all but the device."""
    sampling = sampling or SETTINGS[case.setting]
    if sampling.min_new_tokens:
        sampling = replace(sampling, min_new_tokens=num_tokens)
    random = np.random.default_rng(1)
    tokenizer = TableTokenizer(case.vocab)
    loop = Replicas(
        [lambda: EngineThread(lambda: Engine(backend))],
        lambda: tokenizer,
        observer=Recorder(Metrics()),
        settings=LoopSettings(),
    )
    loop.start_all()
    body = {"inputs": "-", "stream": case.format == "jsonlines"}
    inbox = BlockingQueue()
    formatters: dict[str, Formatter] = {}
    requests: list[GenerationRequest] = []
    for i in range(case.batch):
        parsed = LmiProtocol().parse(body, ParseContext(tokenizer, request_id=str(i)))
        prompt = random.integers(0, case.vocab, PROMPT_LEN).tolist()
        requests.append(
            replace(
                parsed.request,
                prompt_ids=prompt,
                sampling=sampling,
                max_new_tokens=num_tokens,
                grammar=GRAMMARS.get(case.setting),
                stop_token_ids=frozenset({case.vocab - 1}),
            )
        )
        formatters[str(i)] = parsed.formatter
    started_s = time.process_time()
    for request in requests:
        loop.submit(request, inbox)
    open_requests = case.batch
    sent = 0
    while open_requests:
        for delta in inbox.drain(60.0):
            sent += len(formatters[delta.request_id].feed(delta))
            open_requests -= delta.finished
            if delta.error is not None:
                raise delta.error
    cpu_s = time.process_time() - started_s - backend.cpu_ns / 1e9
    loop.close()
    return cpu_s


def _read_us(ring: Float32Array, device_s: float) -> float:
    times = []
    for turn in range(max(20, len(ring))):
        if device_s:
            time.sleep(device_s)
        started_ns = time.perf_counter_ns()
        ring[turn % len(ring)].max()
        times.append(time.perf_counter_ns() - started_ns)
    return statistics.median(times) / 1e3


def _num_tokens(case: Case) -> int:
    """Enough steps for a steady median, few enough for the whole table in minutes."""
    return max(60, min(400, 400 * 8 * 32_000 // (case.batch * case.vocab)))


_Minima = dict[tuple[Any, ...], dict[str, float]]
"""Case to the smallest value of each measure."""


def compare(
    before: Path, after: Path, *, runs: int, arguments: list[str]
) -> Iterator[dict[str, Any]]:
    """Yield one row per setting: the minima over all processes and their ratios, after to before.

    The two checkouts share an interpreter, not an API: each runs its own copy of this file.
    """
    minima: tuple[_Minima, _Minima] = ({}, {})
    for _ in range(runs):
        for checkout, found in zip((before, after), minima, strict=True):
            for row in _run(checkout, arguments):
                case = tuple(row[name] for name in Case.__dataclass_fields__)
                best = found.setdefault(case, dict.fromkeys(COMPARED, float("inf")))
                for name in COMPARED:
                    best[name] = min(best[name], row[name])
    for case, old in minima[0].items():
        new = minima[1][case]
        row = dict(zip(Case.__dataclass_fields__, case, strict=True))
        for name in COMPARED:
            row[f"{name}_before"], row[f"{name}_after"] = old[name], new[name]
            row[f"{name}_ratio"] = round(new[name] / old[name], 3)
        yield row


def worst(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the setting and measure with the largest ratio."""
    ratio, name, row = max(
        ((row[f"{name}_ratio"], name, row) for row in rows for name in COMPARED),
        key=lambda found: found[0],
    )
    case = "/".join(str(row[field]) for field in Case.__dataclass_fields__)
    return {"worst": case, "measure": name, "ratio": ratio, "limit": LIMIT, "met": ratio <= LIMIT}


def _run(checkout: Path, arguments: list[str]) -> Iterator[dict[str, Any]]:
    """Run a checkout's own benchmark on its own package, in a new process; its rows."""
    script = checkout.resolve() / "benchmarks" / "host_cost.py"
    ran = subprocess.run(
        [sys.executable, str(script), "--json", "--only", "table", *arguments],
        env={**os.environ, "PYTHONPATH": str(checkout.resolve())},
        stdout=subprocess.PIPE,
        check=True,
    )
    return map(orjson.loads, ran.stdout.splitlines())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one object per line")
    parser.add_argument("--vocab", type=int, nargs="*", default=[32_000, 128_256])
    parser.add_argument("--batch", type=int, nargs="*", help="default 1 8 32 128; with --pair 8")
    parser.add_argument(
        "--setting",
        nargs="*",
        choices=list(SETTINGS),
        help=f"default all; with --pair {' '.join(USUAL)}",
    )
    parser.add_argument(
        "--logits", nargs="*", choices=["peaked", "flat"], help="default both; with --pair flat"
    )
    parser.add_argument(
        "--format", nargs="*", choices=["json", "jsonlines"], default=["json", "jsonlines"]
    )
    parser.add_argument("--device-ms", type=float, default=0.0)
    parser.add_argument(
        "--steps", type=int, help=f"tokens per request (default by size; with --pair {PAIR_STEPS})"
    )
    parser.add_argument(
        "--only", choices=["table", "growth", "load"], help="leave the other parts out"
    )
    parser.add_argument(
        "--pair", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="compare two checkouts"
    )
    parser.add_argument(
        "--runs", type=int, default=9, help="processes of each checkout (default 9)"
    )
    return parser


def _pair(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    handed_on = [
        *("--vocab", *map(str, arguments.vocab)),
        *("--batch", *map(str, arguments.batch or [8])),
        *("--setting", *(arguments.setting or USUAL)),
        *("--logits", *(arguments.logits or ["flat"])),
        *("--format", *arguments.format),
        *("--device-ms", str(arguments.device_ms)),
        *("--steps", str(arguments.steps or PAIR_STEPS)),
    ]
    rows = []
    for row in compare(*arguments.pair, runs=arguments.runs, arguments=handed_on):
        rows.append(row)
        yield row
    yield worst(rows)


def _single(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    settings = arguments.setting or list(SETTINGS)
    cases = itertools.product(
        arguments.vocab,
        arguments.batch or [1, 8, 32, 128],
        settings,
        arguments.logits or ["peaked", "flat"],
        arguments.format,
    )
    if arguments.only in (None, "table"):
        for values in cases:
            case = Case(*values)
            yield measure(
                case,
                num_tokens=arguments.steps or _num_tokens(case),
                device_s=arguments.device_ms / 1e3,
            )
    narrowed = "topk_topp_rep" not in settings and arguments.only != "growth"
    if arguments.only in (None, "growth") and not narrowed:
        yield growth(min(arguments.vocab), 8)
    if arguments.only in (None, "load") and ("greedy" in settings or arguments.only == "load"):
        yield from under_load(min(arguments.vocab), 8)


def main() -> int:
    """Print the table, or one JSON object per line."""
    arguments = _parser().parse_args()
    row: dict[str, Any] = {}
    for row in _pair(arguments) if arguments.pair else _single(arguments):
        if arguments.json:
            print(orjson.dumps(row).decode(), flush=True)
        else:
            print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)
    return 0 if row.get("met", True) else 1


if __name__ == "__main__":
    sys.exit(main())
