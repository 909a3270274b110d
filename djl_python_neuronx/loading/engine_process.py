"""The engine in a separate process: what it loads, how it is started and ended."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from djl_python_neuronx import backends
from djl_python_neuronx.backends.base import Backend, Want
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.link import Link
from djl_python_neuronx.engine.native import LIBRARY
from djl_python_neuronx.engine.sampler import Sampler
from djl_python_neuronx.engine.speculation import DraftModel, NgramProposer, Proposer
from djl_python_neuronx.engine.worker import WorkerSettings, work
from djl_python_neuronx.errors import BackendUnavailableError, IncompatibleOptionsError
from djl_python_neuronx.loading.guard import guarded, outlive_stops
from djl_python_neuronx.loading.load_memory import freeze_heap
from djl_python_neuronx.telemetry import setup_logging

logger = logging.getLogger(__name__)

_KILL = signal.SIGUSR1


@dataclass(frozen=True)
class ModelJob:
    """A model to load: its graphs are compiled, its files are here."""

    backend: str
    plan: LoadPlan
    compiled: Path | None = None
    """Folder of the graphs; see `BackendModule.load`."""

    def load(self) -> Backend:
        """Load the model onto the device."""
        return backends.get(self.backend).load(self.plan, self.compiled)


@dataclass(frozen=True)
class EngineJob:
    """An engine to load and run, in plain values."""

    models: tuple[ModelJob, ...]
    """The model, and its draft model if it has one."""
    ngram_prompt_lookup_max: int = 1
    """Longest match of the prompt look-up, which proposes drafts if there is no draft model."""
    decode_interleave: int = 1
    max_join_wait_s: float = 0.0
    native_sampling: bool = True
    """Sample with the compiled kernel, where the package has one."""
    sampling_threads: int = 1
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    logging: tuple[str, str] = ("INFO", "text")
    """See `log_settings`."""
    copy: int = 0
    """The number of this copy of the model, for logs."""

    def load(self) -> Engine:
        """Load the models onto the device.

        Raises:
            ServingError: they cannot be loaded, or do not fit each other.
        """
        model, *drafts = self.models
        backend = model.load()
        try:
            proposer = self._load_proposer(backend, *drafts)
        except BaseException:
            backend.close()
            raise
        return Engine(
            backend,
            decode_interleave=self.decode_interleave,
            max_join_wait_s=self.max_join_wait_s,
            proposer=proposer,
            make_sampler=partial(
                Sampler,
                library=LIBRARY if self.native_sampling else None,
                threads=self.sampling_threads,
            ),
        )

    def _load_proposer(self, backend: Backend, draft: ModelJob | None = None) -> Proposer | None:
        """The source of proposed tokens for a model that verifies them, or None."""
        spec = backend.spec
        if not spec.num_speculative_tokens:
            return None
        if draft is None:
            return NgramProposer(spec, self.ngram_prompt_lookup_max)
        proposing = draft.load()
        problem = None
        if proposing.spec.vocab_size != spec.vocab_size:
            problem = f"has a vocabulary of {proposing.spec.vocab_size} tokens, the model of {spec.vocab_size}"
        elif Want.TOKENS in proposing.spec.outputs:
            problem = "samples on the device"
        if problem is not None:
            proposing.close()
            msg = f"the draft model {problem}; set another speculative_draft_model"
            raise IncompatibleOptionsError(msg)
        return DraftModel(proposing)


_JOB = TypeAdapter(EngineJob)


class EngineProcess:
    """An engine in a separate process, with all processes that it starts. It ends with this process."""

    restartable = True

    def __init__(self, job: EngineJob, environ: Mapping[str, str]) -> None:
        """Start the process with the variables `environ`.

        Raises:
            BackendUnavailableError: the system refuses another process.
        """
        command = guarded(backends.python_command(__name__), stop=[_KILL])
        try:
            front, end = socket.socketpair()
            with end, ExitStack() as undo:
                undo.callback(front.close)
                # In its own session: Ctrl-C in a terminal is for the front.
                self._process = subprocess.Popen(  # noqa: S603
                    command, stdin=end.fileno(), env=dict(environ), start_new_session=True
                )
                self.link = Link(front)
                undo.pop_all()
        except (OSError, RuntimeError) as error:  # no memory, descriptors or threads are left
            msg = f"the engine process cannot be started: {error}"
            raise BackendUnavailableError(msg) from error
        self.link.send(_JOB.dump_json(job).decode())
        cores = environ.get("NEURON_RT_VISIBLE_CORES", "")
        logger.info(
            "engine_started copy=%d guard_pid=%d cores=%r", job.copy, self._process.pid, cores
        )

    def kill(self) -> None:
        """See `Host`."""
        if self._process.poll() is None:
            self._process.send_signal(_KILL)
            self._process.send_signal(signal.SIGCONT)  # in case it is stopped
        # A process that is blocked in the device's driver ends late; the front goes on without it.
        self.link.end()

    def wait(self, timeout_s: float) -> str | None:
        """See `Host`."""
        with suppress(subprocess.TimeoutExpired):
            status = self._process.wait(timeout_s)
            number = -status if status < 0 else status - 128
            if number > 0:
                with suppress(ValueError):
                    return signal.Signals(number).name
            return f"status {status}"
        return None


def load_engine(job: EngineJob) -> Engine:
    """Load an engine that no collection of Python's garbage delays for long: most objects of the process exist then."""
    engine = job.load()
    freeze_heap()
    return engine


def main() -> None:
    """The engine process: its standard input is the connection to the front."""
    outlive_stops()
    # The import of torch takes 3.2 instead of 4.1 CPU seconds (2 vCPU VM, 2026-11).
    gc.set_threshold(50_000)
    faulthandler.enable()  # a crash in a library's code writes the Python stack to the log
    end = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    # The processes that a library starts must not hold the connection.
    with open(os.devnull) as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    link = Link(end)
    if (message := link.receive()) is None:
        sys.exit("the connection ended before the engine's job came")
    job = _JOB.validate_json(message[0])
    setup_logging(*job.logging)
    logger.info("engine_process pid=%d copy=%d", os.getpid(), job.copy)
    sys.exit(0 if work(link, partial(load_engine, job), job.worker) else 1)
