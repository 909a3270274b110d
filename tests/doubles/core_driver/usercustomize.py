"""A driver for rigs and doubles, which gives the core to one process: the one that has a lock on the file `CORE`.

Each process of Python that has imported it passes it on to those that the package starts, by its name. In them a rig's
runtime takes the core when it starts, and fails as the real one does if another process has it.
"""

from __future__ import annotations

import fcntl
import os
import sys
from functools import wraps
from importlib import util
from importlib.abc import MetaPathFinder
from types import SimpleNamespace

STARTS = {
    "_nxdi_rig": lambda module: (module.RigNxDModel, "initialize"),
    "neuron_emulator.runtime": lambda module: (module.ParallelModel, "load"),
}
"""A rig's module -> the class and method in which its runtime starts."""
FAILURE = "The PyTorch Neuron Runtime could not be initialized. Neuron Driver issues are logged to your system logs."
_process = SimpleNamespace(core=None)


def take() -> None:
    """Take the core for the rest of the process."""
    if _process.core is not None:
        return
    core = os.open(os.environ["CORE"], os.O_RDONLY)
    try:
        fcntl.flock(core, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        reason = "Logical Neuron Core(s) not available - Requested:lnc0-lnc0 Available:0 (cores busy, ret=-16)"
        sys.stderr.write(f"ERROR NRT:nrt_allocate_neuron_cores {reason}\n")
        raise RuntimeError(FAILURE) from None
    _process.core = core


class _Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in STARTS:
            return None
        sys.meta_path.remove(self)
        try:
            spec = util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_and_wrap(module):
                execute(module)
                kind, method = STARTS[name](module)
                start = getattr(kind, method)

                @wraps(start)
                def starts(*given):
                    take()
                    return start(*given)

                setattr(kind, method, starts)

            spec.loader.exec_module = execute_and_wrap
        return spec


if __name__ == "usercustomize":
    sys.meta_path.insert(0, _Finder())
