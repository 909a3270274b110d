"""The toy in place of the cpu backend, for engine processes that die.

Files in the folder `MORTAL`: while `hold` exists, a load waits; a load that begins while `doomed` exists kills its
process; `steps_left` has the number of steps after which an engine kills its process, and is gone then; `prefilled`
gets a line with the second id (the first is bos) of each prompt that a step begins. Variables: `MORTAL_LOAD_S`,
`MORTAL_PREFILL_S` and `MORTAL_STEP_S` are the seconds of a load, a prefill and a decode; a prompt with the token
`MORTAL_POISON` kills the process.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from djl_python_neuronx.backends.base import ModelSpec
from djl_python_neuronx.backends.plan import LoadPlan
from tests.doubles.toy_backend import ToyBackend

FOLDER = Path(os.environ.get("MORTAL", "/nonexistent"))


def supports(config):
    return None


def load(plan: LoadPlan, compiled: Path | None = None):
    if (FOLDER / "doomed").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(_seconds("LOAD"))
    while (FOLDER / "hold").exists():
        time.sleep(0.01)
    spec = ModelSpec(
        num_slots=plan.num_slots,
        max_model_len=plan.max_model_len,
        prefill_buckets=plan.prefill_buckets,
        token_buckets=plan.token_buckets,
        vocab_size=400,
        max_prefill_batch=1,
    )
    return Mortal(spec, step_s=_seconds("STEP"), prefill_s=_seconds("PREFILL"))


def _seconds(what):
    return float(os.environ.get(f"MORTAL_{what}_S", "0"))


class Mortal(ToyBackend):
    last_step = None

    def run(self, step):
        steps_left = FOLDER / "steps_left"
        try:
            left = int(steps_left.read_text() or "1")  # it is being written
            if self.last_step is None:
                self.last_step = self.num_steps + left
            if self.last_step == self.num_steps:
                steps_left.unlink()  # by one alone of several copies
                os.kill(os.getpid(), signal.SIGKILL)
        except FileNotFoundError:
            self.last_step = None
        if step.prefill is not None:
            ids = step.prefill.input_ids[0].tolist()
            with (FOLDER / "prefilled").open("a") as log:
                log.write(f"{ids[1]}\n")
            if int(os.environ.get("MORTAL_POISON", "-1")) in ids:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().run(step)
