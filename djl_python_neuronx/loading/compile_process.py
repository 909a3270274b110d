"""Compile in a child process that ends with this one, and report its progress.

The libraries start worker pools and compilers that survive a killed parent; the guard ends all of them. The cores and
the memory of a compile are free again before the model is loaded.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from djl_python_neuronx import backends
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.errors import BackendError, CompileError, ServingError
from djl_python_neuronx.loading.guarded_job import do_job, run_guarded
from djl_python_neuronx.planning.machines import oom_kills
from djl_python_neuronx.telemetry import log_settings, setup_logging

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 30.0
_DISK_FULL = re.compile(r"no space left|\bENOSPC\b|quota exceeded", re.IGNORECASE)


@dataclass(frozen=True)
class CompileProgress:
    """Progress of a compile."""

    num_done: int
    num_graphs: int
    elapsed_s: float
    remaining_s: float
    """Estimate: the plan's until the first graph is done, then by the pace so far."""

    def __str__(self) -> str:
        """Describe the progress in words."""
        return (
            f"graph {self.num_done}/{self.num_graphs}, {self.elapsed_s / 60:.0f} min, "
            f"about {self.remaining_s / 60:.0f} min left"
        )


@dataclass(frozen=True)
class Forecast:
    """The expected size and duration of a compile, and the callback for its progress."""

    num_graphs: int
    """0: weights are cut for the cores."""
    seconds: float
    listener: Callable[[CompileProgress], None] | None = None


@dataclass(frozen=True)
class _Job:
    backend: str
    plan: LoadPlan
    target: Path
    logging: tuple[str, str]


_JOB = TypeAdapter(_Job)


def compile_guarded(
    backend: str,
    plan: LoadPlan,
    target: Path,
    *,
    environ: Mapping[str, str],
    neff_cache: Path | None,
    forecast: Forecast,
) -> None:
    """Run a backend's `compile` in a process with the variables `environ`.

    A `neff_cache`, the compiler's own, is looked at only to count the graphs that are done.

    Raises:
        ArtifactError: the model's files cannot be used.
        BackendError: the backend cannot compile this model like this, or its compiler failed.
    """
    job = _JOB.dump_json(_Job(backend, plan, target, log_settings()))
    kills = oom_kills()
    watch = _Watch(target, neff_cache, forecast)
    try:
        run_guarded(__name__, job, environ, partial(_ended, backend), look=watch.report)
    except ServingError as error:
        _name_full_disks(error, [target, neff_cache, Path(tempfile.gettempdir())])
        raise _explained(error, kills) from None


def _ended(backend: str, status: int) -> CompileError:
    ended = f"ended with status {status}"
    if status > 128:
        ended = f"was killed ({signal.Signals(status - 128).name})"
    error = CompileError(
        f"the compile for the backend {backend} {ended} without an error message; see its output above. Finished "
        "graphs are kept"
    )
    error.host_full = status == 128 + signal.SIGKILL
    return error


def _name_full_disks(error: ServingError, places: Iterable[Path | None]) -> None:
    """Add the room in the folders that a compile writes, and the cure, to the error of a full disk."""
    if isinstance(error, BackendError) and _DISK_FULL.search(str(error)):
        free = "; ".join(
            f"{place}: {shutil.disk_usage(place).free / 2**20:,.0f} MiB free"
            for place in places
            if place and place.exists()
        )
        error.args = (
            f"{error}\nA disk is full ({free}). Make room, or name folders on a larger disk: "
            "option.compiled_graph_path or NEURON_COMPILE_CACHE_URL for graphs (SERVING_DOWNLOAD_DIR if that is an "
            "s3:// URI), TMPDIR for the compiler; what was finished is kept",
        )


def _explained(error: ServingError, kills: int | None) -> ServingError:
    """Add the cause to the error of a compile that was killed. `kills`: `oom_kills` before."""
    now = oom_kills()
    counted = kills is not None and now is not None and now > kills
    was_killed = isinstance(error, CompileError) and error.host_full
    if not isinstance(error, BackendError) or not (was_killed or counted):
        return error
    error.host_full, error.lasting = True, False
    if kills is None or now is None:
        reason = "most likely the kernel killed it because the host's memory was used up (dmesg shows it)"
    elif counted:
        reason = "the kernel killed it because the memory of the host or of this container was used up (oom_kill)"
    else:
        reason = "the kernel has killed no process here for memory: look for what sent the signal, or at ulimit -v"
    error.args = (f"{error}\nIt was killed: {reason}",)
    return error


def main() -> None:
    """Run a compile in its process, see `compile_guarded`."""
    do_job(_compile, lambda error: CompileError(str(error) or type(error).__name__))


def _compile(text: bytes) -> bytes:
    job = _JOB.validate_json(text)
    setup_logging(*job.logging)
    compiler = backends.compiler(job.backend)
    assert compiler is not None  # noqa: S101  (else there is no job)
    compiler.compile(job.plan, job.target)
    _follow_umask(job.target)
    return b""


def _follow_umask(folder: Path) -> None:
    """Give each file at least the mode that the umask leaves: safetensors 0.8 writes for the owner alone."""
    umask = os.umask(0o077)
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(path.stat().st_mode | 0o666 & ~umask)


class _Watch:
    """Counts the finished graphs of a compile and reports them, which the libraries do not."""

    def __init__(self, target: Path, neff_cache: Path | None, forecast: Forecast) -> None:
        self._target, self._cache, self._forecast = target, neff_cache, forecast
        self._started_s, self._since = time.monotonic(), time.time()
        self._done, self._reported = 0, -1
        self._logged_s = self._started_s

    def report(self) -> None:
        """Report the progress to the listener, and log it if a graph is done or it is time."""
        now_s, total = time.monotonic(), self._forecast.num_graphs
        with suppress(
            OSError
        ):  # what is counted can vanish meanwhile, which must not end the compile
            self._done = min(self._num_done(), total)
        elapsed_s, done = now_s - self._started_s, self._done
        left_s = elapsed_s / done * (total - done) if done else self._forecast.seconds - elapsed_s
        progress = CompileProgress(done, total, elapsed_s, max(0.0, left_s))
        if self._forecast.listener is not None:
            self._forecast.listener(progress)
        if done != self._reported or now_s - self._logged_s >= _LOG_EVERY_S:
            self._reported, self._logged_s = done, now_s
            if total == 0:
                logger.info("cutting_weights elapsed_s=%.0f", elapsed_s)
                return
            logger.info(
                "compile_progress graph=%d/%d elapsed_s=%.0f remaining_s=%.0f",
                done, total, elapsed_s, progress.remaining_s,
            )  # fmt: skip

    def _num_done(self) -> int:
        """Number of graphs saved, or put into the compiler's cache since the start."""
        saved = sum(1 for _ in self._target.rglob("*.neff"))
        if self._cache is None:
            return saved
        graphs = self._cache.glob("neuronxcc-*/*/model.neff")
        return max(saved, sum(graph.stat().st_mtime >= self._since for graph in graphs))
