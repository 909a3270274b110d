"""The process of a verification: loads the model, runs the scenarios, and then the reference."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.config.values import jsonable
from djl_python_neuronx.errors import BackendError, load_failure
from djl_python_neuronx.loading.engine_process import ModelJob
from djl_python_neuronx.loading.guarded_job import do_job, run_guarded
from djl_python_neuronx.telemetry import setup_logging
from djl_python_neuronx.verify.scenarios import run_scenarios

_STANDARD_ERROR = 2


@dataclass(frozen=True)
class Job:
    """A model to verify: its graphs are compiled, its checkpoint is here."""

    model: ModelJob
    reference: LoadPlan
    """The model's plan, with the folder of its checkpoint."""
    quick: bool = False
    logging: tuple[str, str] = ("INFO", "text")
    """See `log_settings`."""


_JOB = TypeAdapter(Job)


def verify_job(job: Job) -> dict[str, Any]:
    """Verify a model in this process; see `judge`.

    Raises:
        ServingError: the model or its reference cannot be loaded, or the device is lost.
    """
    backend = job.model.load()
    try:
        record = run_scenarios(backend, quick=job.quick)
    finally:
        backend.close()
    del backend  # its memory is the reference's
    from djl_python_neuronx.verify.judge import judge  # imports torch

    return judge(record, job.reference)


def verify_guarded(job: Job, environ: Mapping[str, str]) -> dict[str, Any]:
    """Verify a model in a process with the variables `environ`, which ends with all that it has started.

    Raises:
        ServingError: as `verify_job`; a `BackendError` if the process ended without a result.
    """
    # Libraries print to standard output, which is the verdict's.
    text = _JOB.dump_json(job)
    found: dict[str, Any] = json.loads(
        run_guarded(__name__, text, environ, _ended, stdout=_STANDARD_ERROR)
    )
    return found


def _ended(status: int) -> BackendError:
    return BackendError(
        f"the process of the verification ended with status {status} without a result; see its output above. If the "
        "system killed it, memory ran out: give --layers"
    )


def main() -> None:
    """Run a verification in its process, see `verify_guarded`."""
    do_job(_verify, load_failure)


def _verify(text: bytes) -> bytes:
    job = _JOB.validate_json(text)
    setup_logging(*job.logging)
    return json.dumps(jsonable(verify_job(job))).encode()
