"""A backend that compiles: one file per graph, each told in a log; it answers as the cpu backend does.

Variables: `TOYC_LOG` names the log, `TOYC_VERSION` the compiler's version, `TOYC_STOP_AT` the graph whose compile
hangs, `TOYC_FAIL` and `TOYC_UNCOMPILABLE` what is wrong.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from djl_python_neuronx.artifacts.atomic import whole_file
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.errors import CompileError


def supports(config):
    return None


def compiler_version():
    return os.environ.get("TOYC_VERSION", "1.0")


def uncompilable(config):
    return os.environ.get("TOYC_UNCOMPILABLE")


def compile(plan: LoadPlan, target: Path) -> None:
    for name in _graphs(plan):
        if (target / name).exists():
            continue
        with Path(os.environ["TOYC_LOG"]).open("a") as log:
            log.write(f"{name} {os.getpid()}\n")
        if os.environ.get("TOYC_FAIL"):
            raise CompileError(os.environ["TOYC_FAIL"])
        if name == os.environ.get("TOYC_STOP_AT"):
            time.sleep(60)
        with whole_file(target / name) as temporary:
            temporary.write_text(repr((plan.num_slots, plan.tensor_parallel_degree)))


def load(plan: LoadPlan, compiled: Path | None = None):
    from djl_python_neuronx.backends import cpu

    if uncompilable({}):
        assert compiled is None
        return cpu.load(plan)
    assert compiled is not None
    for name in _graphs(plan):
        assert (compiled / name).read_text() == repr((plan.num_slots, plan.tensor_parallel_degree))
    return cpu.load(plan)


def _graphs(plan):
    yield from (f"prefill-{length}.neff" for length in plan.prefill_buckets)
    yield from (f"decode-{length}.neff" for length in plan.token_buckets)
