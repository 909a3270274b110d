"""Stand-ins for closed parts below NxD Inference that its CPU rig lacks: a module for each subject.

A function below `@after("module")` runs once, right after that module was imported, and gets it: it replaces what is
closed there. The modules are the library's or the rig's (`_nxdi_rig`, whose `_worker` runs in each rank). `REAL` has
the rig's names of closed packages: `REAL["nki.some.name"] = function`.

A stand-in computes what the closed part is defined to compute, and names that definition (a paper, a function of
torch). It never makes a wrong call right.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType

from _neuron_stub import REAL, _PostImport

__all__ = ["REAL", "after", "install"]


def after(name: str) -> Callable[[Callable[[ModuleType], None]], Callable[[ModuleType], None]]:
    """Register a function that changes a module when it has been imported."""

    def register(change: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        sys.meta_path.insert(0, _PostImport(name, change))
        return change

    return register


def install() -> None:
    """Import each module of this package, which registers its stand-ins. They import nothing of the library."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
