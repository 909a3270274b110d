"""Environment of a load: `variables` computes the variables, `applied` sets them temporarily; `count_cores`."""

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
# The library calls torch.load without `weights_only`, which runs the code in pickles before torch 2.6. A second line
# behind `artifacts.tensor_files.check_pickles`.
_SAFE = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}
# Variables that NxD Inference 0.9 sets for good: models/config.py and model_base.py, utils/compile_env.py and
# runtime_env.py, and the model builder of NxD 0.18. Those that packages set while they are imported stay: a later load
# imports nothing again.
_OF_THE_LIBRARY = (
    "DISABLE_NUMERIC_CC_TOKEN",
    "NEURON_PLATFORM_TARGET_OVERRIDE",
    "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS",
    "NEURON_RT_DBG_SCRATCHPAD_ON_SINGLE_CORE",
    "NEURON_RT_ENABLE_OCP",
    "NEURON_RT_ENABLE_OCP_SATURATION",
    "NEURON_RT_EXEC_TIMEOUT",
    "NEURON_RT_IO_RING_CACHE_SIZE",
    "NEURON_SCRATCHPAD_PAGE_SIZE",
    "XLA_HLO_DEBUG",
    "XLA_IR_DEBUG",
)


class _Runtime:
    """The Neuron runtime of this process. It takes its cores when it starts and keeps them until the process ends."""

    limit: CoreLimit | None = None
    """The limit that it was started with by a load here; None: not started, or without a limit."""


def variables(
    arguments: LibraryArguments, num_cores: int, current: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables to set in addition to `current`, the process's environment.

    An option wins over a variable. A limit on the cores that `current` sets is kept, and compiler flags that are set
    already stay in front of those of `arguments`.
    """
    wanted = {**arguments.environment, **_SAFE}
    there = shlex.split(current.get(_FLAGS, ""))
    missing = [flag for flag in arguments.compiler_flags if flag not in there]
    if missing:
        wanted[_FLAGS] = shlex.join([*there, *missing])
    if core_limit(current) is None:
        # Otherwise the runtime takes every core of the machine, and leaves none for a second process.
        wanted[_NUM_CORES] = str(num_cores)
    return {name: value for name, value in wanted.items() if current.get(name) != value}


def lacking(num_cores: int, limit: CoreLimit | None, started: CoreLimit | None) -> str | None:
    """Return why `num_cores` are unavailable to this process, or None.

    `limit`: set by its variables now. `started`: the limit that its runtime was started with.
    """
    bound = started or limit
    if bound is None or bound.num_cores is None or bound.num_cores >= num_cores:
        return None
    if started is not None:
        return (
            f"{num_cores} NeuronCores are needed, and the runtime of this process was started with {started}, which it "
            "keeps. Load the model with the largest tensor_parallel_degree first, start the process with "
            f"{_NUM_CORES}={num_cores}, or serve this model from its own process"
        )
    return (
        f"{num_cores} NeuronCores are needed, and {limit} gives this process {bound.num_cores}. Give it "
        f"{num_cores}, or lower tensor_parallel_degree"
    )


@contextlib.contextmanager
def applied(arguments: LibraryArguments, num_cores: int) -> Iterator[None]:
    """Set the variables in this process, where alone the libraries read them, and restore the old values.

    Those that the library sets by itself are restored too. The compiler runs inside a load and the runtime reads its
    variables when it starts, so no setting leaks from one model to the next. Models of one process share its first
    cores: `num_cores` is the largest degree among them.

    Raises:
        IncompatibleOptionsError: the variables spread the model over several machines.
        BackendUnavailableError: the process has fewer cores, because of its variables or of its running runtime.
    """
    if reason := machines.obstacle(num_cores, os.environ):
        raise IncompatibleOptionsError(reason)
    wanted = variables(arguments, num_cores, os.environ)
    limit = core_limit({**os.environ, **wanted})
    if reason := lacking(num_cores, limit, _Runtime.limit):
        raise BackendUnavailableError(reason)
    names = {*wanted, *_OF_THE_LIBRARY}
    before = {name: os.environ[name] for name in names if name in os.environ}
    for name, value in wanted.items():
        logger.info("environment name=%s value=%r", name, value)
    os.environ.update(wanted)
    try:
        yield
        _Runtime.limit = _Runtime.limit or limit
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)


def value(name: str) -> str | None:
    """Return a variable of this process; None: it is not set."""
    return os.environ.get(name)


def count_cores(root: Path = Path("/sys")) -> int:
    """Return the physical CPU cores within the process's affinity and its container's quota; at least 1.

    Hyper-threads are not counted: two of them share the vector unit that a matmul keeps busy.
    """
    usable = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    cores = {_siblings(root, cpu) for cpu in usable}
    return max(1, int(min(len(cores), _quota(root))))


def _siblings(root: Path, cpu: int) -> str:
    """Return the hardware threads of a CPU's core, as the kernel lists them; the same text for all of them."""
    try:
        return (root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _quota(root: Path) -> float:
    """Return the CPUs that cgroup v2 grants (`docker run --cpus`); infinite without a limit."""
    try:
        granted, period = (root / "fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if granted == "max" else int(granted) / int(period)
