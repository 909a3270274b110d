"""Measure a request's cost of the template's and tokenizer's processes, against the same calls in this process.

    python benchmarks/text_cost.py --json

The tokenizer of `isolation.py`, and a chat template of one line. A row for each text, in µs: the median of `--count`
calls in this process (`here_us`), in a worker (`worker_us`), their difference, and `new_us`: the first call of a worker
that is forked for it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sleep_device

from djl_python_neuronx.artifacts.tokenizer import load_tokenizer
from djl_python_neuronx.loading.tokenizer_process import TokenizerProcess

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = "one two three four five six seven eight nine ten " * 164
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


def median_us(call: Callable[[], object], count: int) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(count):
        began_s = time.perf_counter()
        call()
        times.append((time.perf_counter() - began_s) * 1e6)
    return statistics.median(times)


def measure(count: int) -> Iterator[dict[str, Any]]:
    """The rows."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "model"
        sleep_device.save_model(folder, vocab=32_000, length=9000)
        how: dict[str, Any] = {"trust_remote_code": False, "revision": None}
        here = load_tokenizer(folder, needs_torch=False, chat_template=TEMPLATE)
        worker = TokenizerProcess(folder, timeout_s=60.0, chat_template=TEMPLATE, **how)
        calls = {
            "chat of 80 bytes": (lambda one: one.encode_chat(CHAT)),
            "prompt of 8,000 tokens": (lambda one: one.encode(PROMPT[:8000])),
        }
        for name, call in calls.items():
            news = []
            for _ in range(10):
                fresh = TokenizerProcess(folder, timeout_s=60.0, chat_template=TEMPLATE, **how)
                news.append(median_us(lambda: call(fresh), 1))  # noqa: B023
                fresh.close()
            mine, other = (median_us(lambda: call(one), count) for one in (here, worker))  # noqa: B023
            yield {
                "text": name,
                "here_us": round(mine),
                "worker_us": round(other),
                "more_us": round(other - mine),
                "new_us": round(statistics.median(news)),
            }
        worker.close()


def main() -> int:
    """Print the table, or one JSON object per line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one object per line")
    parser.add_argument("--count", type=int, default=1000)
    options = parser.parse_args()
    sleep_device.print_rows(measure(options.count), as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
