"""The variables of a load: a pure function tells them, another sets them for as long as a load takes."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
from collections.abc import Iterator, Mapping

from djl_python_neuronx.config.mapping import LibraryArguments

logger = logging.getLogger(__name__)

_FLAGS = "NEURON_CC_FLAGS"
_NUM_CORES = "NEURON_RT_NUM_CORES"
# The library loads pickles with torch.load's own default, which ran their code before torch 2.6.
_SAFE = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}
_PLACED_BY = (_NUM_CORES, "NEURON_RT_VISIBLE_CORES")


def variables(
    arguments: LibraryArguments, num_cores: int, current: Mapping[str, str]
) -> dict[str, str]:
    """What has to be set beside `current`, the process's environment.

    An option of ours wins over a variable. Cores that whoever started the process has given it are left as they are,
    and flags of the compiler that are there already stay in front of ours.
    """
    wanted = {**arguments.environment, **_SAFE}
    there = shlex.split(current.get(_FLAGS, ""))
    missing = [flag for flag in arguments.compiler_flags if flag not in there]
    if missing:
        wanted[_FLAGS] = shlex.join([*there, *missing])
    if not any(name in current for name in _PLACED_BY):
        # The runtime takes every core of the machine otherwise, and no second model finds one.
        wanted[_NUM_CORES] = str(int(current.get("NEURON_LOCAL_TP", num_cores)))
    return {name: value for name, value in wanted.items() if current.get(name) != value}


@contextlib.contextmanager
def applied(arguments: LibraryArguments, num_cores: int) -> Iterator[None]:
    """Set them in this process, for the libraries read them nowhere else, and put the old values back.

    Compilers run inside a load and the runtime looks at its variables when it starts, so that a second model of the
    process is not compiled with the flags of the first.
    """
    wanted = variables(arguments, num_cores, os.environ)
    before = {name: os.environ.get(name) for name in wanted}
    for name, value in wanted.items():
        logger.info("environment name=%s value=%r", name, value)
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = old
