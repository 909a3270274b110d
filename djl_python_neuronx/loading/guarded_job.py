"""Run a job in a process that ends with this one, with all that it has started, and take its result."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress

from djl_python_neuronx import backends
from djl_python_neuronx.loading.guard import guarded

_LOOK_EVERY_S = 1.0


def run_guarded(
    module: str,
    job: bytes,
    environ: Mapping[str, str],
    *,
    look: Callable[[], None] = lambda: None,
    stdout: int | None = None,
) -> tuple[int, bytes]:
    """Call `main()` of a module in a process with the variables `environ`, and `look` each second meanwhile.

    Standard input is a file with the job, to which `main` appends its result. Returns the status and the result.
    """
    # A file without a name: nothing of it is left, however this process ends.
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
        return process.returncode, file.read()
