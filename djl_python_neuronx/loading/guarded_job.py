"""A job in a process that ends with this one, with all that it has started: both sides.

The job, and its result or error behind it, are in a file without a name: nothing of it is left, however a process ends.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress

from djl_python_neuronx import backends
from djl_python_neuronx.errors import ServingError, revive, to_json
from djl_python_neuronx.loading.guard import guarded

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0


def run_guarded(
    module: str,
    job: bytes,
    environ: Mapping[str, str],
    ended: Callable[[int], ServingError],
    *,
    look: Callable[[], None] = lambda: None,
    stdout: int | None = None,
) -> bytes:
    """Call `main()` of a module, which calls `do_job`, in a process with the variables `environ`; return its result.

    `ended`: the error for the status of a process that ended without a result. `look` is called each second meanwhile.

    Raises:
        ServingError: that of the job, or `ended`.
    """
    with tempfile.TemporaryFile() as file:
        file.write(job)
        file.seek(0)
        process = subprocess.Popen(  # noqa: S603
            guarded(backends.python_command(module)),
            stdin=file,
            stdout=stdout,
            env=dict(environ),
        )
        try:
            while process.poll() is None:
                look()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_EVERY_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.send_signal(signal.SIGCONT)  # in case it is stopped
                process.wait()
        look()
        file.seek(len(job))
        result = file.read()
    if process.returncode == 0:
        return result
    raise revive(**json.loads(result)) if result else ended(process.returncode)


def do_job(run: Callable[[bytes], bytes], failure: Callable[[Exception], ServingError]) -> None:
    """Run the job on standard input, and end this process: with its result, or status 1 and its error.

    `failure`: the error for an exception that is no `ServingError`.
    """
    status = 0
    try:
        result = run(sys.stdin.buffer.read())
    except Exception as error:
        if not isinstance(error, ServingError):
            logger.exception("job_failed")
            error = failure(error)
        status, result = 1, json.dumps(to_json(error), default=str).encode()
    os.write(sys.stdin.fileno(), result)
    sys.exit(status)
