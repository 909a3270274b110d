"""The variables of a load: a pure function tells them, another sets them for as long as a load takes."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from djl_python_neuronx.errors import BackendUnavailableError, IncompatibleOptionsError
from djl_python_neuronx.planning import machines
from djl_python_neuronx.planning.arguments import LibraryArguments
from djl_python_neuronx.planning.machines import CoreLimit, core_limit

logger = logging.getLogger(__name__)

_FLAGS = "NEURON_CC_FLAGS"
_NUM_CORES = "NEURON_RT_NUM_CORES"


class _Runtime:
    """The Neuron runtime of this process: it takes its cores when it starts, and keeps them until the process ends."""

    limit: CoreLimit | None = None
    """What it was started with by a load of ours."""


def variables(
    arguments: LibraryArguments, num_cores: int, current: Mapping[str, str]
) -> dict[str, str]:
    """What has to be set beside `current`, the process's environment.

    An option of ours wins over a variable. Cores that whoever started the process has given it are left as they are,
    and flags of the compiler that are there already stay in front of ours.
    """
    wanted = dict(arguments.environment)
    there = shlex.split(current.get(_FLAGS, ""))
    missing = [flag for flag in arguments.compiler_flags if flag not in there]
    if missing:
        wanted[_FLAGS] = shlex.join([*there, *missing])
    if core_limit(current) is None:
        # The runtime takes every core of the machine otherwise, and no second process finds one.
        wanted[_NUM_CORES] = str(num_cores)
    return {name: value for name, value in wanted.items() if current.get(name) != value}


def lacking(num_cores: int, limit: CoreLimit | None, started: CoreLimit | None) -> str | None:
    """Why a process has fewer than `num_cores` cores; None: as far as is known here it has them.

    `limit` is what its variables say now, `started` what its runtime was started with.
    """
    if started is not None and started.num_cores is not None:
        if started.num_cores >= num_cores:
            return None
        return (
            f"{num_cores} NeuronCores are needed, and the runtime of this process was started with {started}, which it "
            "keeps. Load the model with the largest tensor_parallel_degree first, start the process with "
            f"{_NUM_CORES}={num_cores}, or serve this model from a process of its own"
        )
    if (
        started is not None
        or limit is None
        or limit.num_cores is None
        or limit.num_cores >= num_cores
    ):
        return None
    return (
        f"{num_cores} NeuronCores are needed, and {limit} gives this process {limit.num_cores}. Give it "
        f"{num_cores}, or lower tensor_parallel_degree"
    )


@contextlib.contextmanager
def applied(arguments: LibraryArguments, num_cores: int) -> Iterator[None]:
    """Set them in this process, for the libraries read them nowhere else, and put the old values back.

    Compilers run inside a load and the runtime looks at its variables when it starts, so that a second model of the
    process is not compiled with the flags of the first. Models of one process share its first cores, so `num_cores`
    is the largest degree among those that are loaded together.

    Raises:
        IncompatibleOptionsError: variables say that the model lies on several machines.
        BackendUnavailableError: the process has fewer cores, by its variables or since its runtime was started.
    """
    if reason := machines.obstacle(num_cores, os.environ):
        raise IncompatibleOptionsError(reason)
    wanted = variables(arguments, num_cores, os.environ)
    limit = core_limit({**os.environ, **wanted})
    if reason := lacking(num_cores, limit, _Runtime.limit):
        raise BackendUnavailableError(reason)
    before = {name: os.environ.get(name) for name in wanted}
    for name, value in wanted.items():
        logger.info("environment name=%s value=%r", name, value)
    os.environ.update(wanted)
    try:
        yield
        _Runtime.limit = _Runtime.limit or limit
    finally:
        for name, old in before.items():
            if old is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = old


def count_cores(root: Path = Path("/sys")) -> int:
    """Physical cores within the process's affinity and its container's quota; at least 1.

    Hyper-threads are not counted: two of them share the vector unit that a matmul keeps busy.
    """
    usable = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    cores = {_siblings(root, cpu) for cpu in usable}
    return max(1, int(min(len(cores), _quota(root))))


def _siblings(root: Path, cpu: int) -> str:
    """The hardware threads of one core as the kernel writes them; equal for all of them."""
    try:
        return (root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _quota(root: Path) -> float:
    """CPUs that cgroup v2 grants (`docker run --cpus`); infinite without a limit."""
    try:
        granted, period = (root / "fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if granted == "max" else int(granted) / int(period)
