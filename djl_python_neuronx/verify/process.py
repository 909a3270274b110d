"""The process of a verification: loads the model, runs the scenarios, and then the reference."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from djl_python_neuronx.config.values import jsonable
from djl_python_neuronx.errors import BackendError, ServingError, load_failure, revive, to_json
from djl_python_neuronx.loading.engine_process import ModelJob
from djl_python_neuronx.loading.guarded_job import run_guarded
from djl_python_neuronx.telemetry import setup_logging
from djl_python_neuronx.verify.scenarios import run_scenarios

logger = logging.getLogger(__name__)

_STANDARD_ERROR = 2


@dataclass(frozen=True)
class Job:
    """A model to verify: its graphs are compiled, its checkpoint is here."""

    model: ModelJob
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

    return judge(record, job.model.plan)


def verify_guarded(job: Job, environ: Mapping[str, str]) -> dict[str, Any]:
    """Verify a model in a process with the variables `environ`, which ends with all that it has started.

    Raises:
        ServingError: as `verify_job`; a `BackendError` if the process ended without a result.
    """
    # Libraries print to standard output, which is the verdict's.
    status, result = run_guarded(__name__, _JOB.dump_json(job), environ, stdout=_STANDARD_ERROR)
    if status == 0:
        found: dict[str, Any] = json.loads(result)
        return found
    if result:
        raise revive(**json.loads(result))
    msg = (
        f"the process of the verification ended with status {status} without a result; see its output above. If the "
        "system killed it, memory ran out: give --layers"
    )
    raise BackendError(msg)


def main() -> None:
    """Run the job in the file on standard input; append the outcome, or the error, to it."""
    job = _JOB.validate_json(sys.stdin.buffer.read())
    setup_logging(*job.logging)
    status, result = 0, b""
    try:
        result = json.dumps(jsonable(verify_job(job))).encode()
    except Exception as error:
        if not isinstance(error, ServingError):
            logger.exception("verification_failed")
        status, result = 1, json.dumps(to_json(load_failure(error)), default=str).encode()
    os.write(sys.stdin.fileno(), result)
    sys.exit(status)
