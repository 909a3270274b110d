"""Measure the import of the handler: DJL imports it before it listens, within its two minutes.

    .venv/bin/python benchmarks/import_cost.py [--json]

Each run is a fresh interpreter; a bare one is the reference, in turn with the others.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

import orjson

STATEMENTS = {
    "bare": "pass",
    "handler": "import djl_python_neuronx.handler",
    "numpy": "import numpy",
}


def main() -> int:
    """Print median seconds over the runs, less the bare interpreter's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=int, default=9)
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for turn in range(arguments.runs + 1):
        for name, statement in STATEMENTS.items():
            started_s = time.perf_counter()
            subprocess.run([sys.executable, "-c", statement], check=True)
            if turn:  # the first warms the file cache
                times[name].append(time.perf_counter() - started_s)
    bare_s = statistics.median(times["bare"])
    for name, seconds in times.items():
        median_s = statistics.median(seconds)
        row = {
            "import": name,
            "total_s": round(median_s, 4),
            "above_bare_s": round(median_s - bare_s, 4),
            "ratio_to_bare": round(median_s / bare_s, 2),
        }
        print(
            orjson.dumps(row).decode()
            if arguments.json
            else "  ".join(f"{k}={v}" for k, v in row.items())
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
