"""Code that the backends of the Neuron libraries share. Imports neither torch nor a library."""

from __future__ import annotations

import importlib
import logging
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from djl_python_neuronx.backends.env import count_cores
from djl_python_neuronx.backends.faults import of_load
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.errors import (
    BackendUnavailableError,
    IncompatibleOptionsError,
    did_you_mean,
)
from djl_python_neuronx.planning.backend_choice import SETUP_GUIDE, libraries

logger = logging.getLogger(__name__)

ADVICE = f"Install the Neuron packages as the AWS Neuron setup guide says ({SETUP_GUIDE})"


def import_library(package: str, module: str) -> Any:  # noqa: ANN401  (a module without types)
    """Import a module of a Neuron package.

    Raises:
        BackendUnavailableError: it is missing, PyPI's placeholder, or cannot be imported.
    """
    found = libraries()
    fakes = [library.name for library in found.values() if library.state == "placeholder"]
    if package in fakes or (fakes and found[package].state == "installed"):
        message = (
            f"the installed {' and '.join(fakes)} is PyPI's placeholder, not the library. {ADVICE}"
        )
        raise BackendUnavailableError(message)
    began, is_new = time.monotonic(), module not in sys.modules
    try:
        imported = importlib.import_module(module)
    except Exception as error:
        message = f"{package} cannot be imported: {type(error).__name__}: {error}. {ADVICE}"
        raise BackendUnavailableError(message) from error
    if is_new:
        logger.info("imported module=%s seconds=%.2f", module, time.monotonic() - began)
    return imported


def check_keywords(
    keywords: Mapping[str, object], known: Collection[str], owner: str, prefix: str = ""
) -> None:
    """Refuse keywords that a library's class does not have. `owner`: the class and its package, for the message.

    Raises:
        IncompatibleOptionsError: the first of them, with its value; `prefix` stands before its name.
    """
    for name, value in keywords.items():
        if name not in known:
            hint = did_you_mean(name, known) or ";"
            message = (
                f"{prefix}{name}={value!r}: the {owner} has no such keyword{hint} correct or remove it in "
                "option.override_neuron_config, or leave out the option that sets it"
            )
            raise IncompatibleOptionsError(message)


def compiler_version() -> str:
    """Return the version of the compiler's package. Graphs of one version do not run with another.

    Raises:
        BackendUnavailableError: it is missing.
    """
    try:
        return metadata.version("neuronx-cc")
    except metadata.PackageNotFoundError:
        pass
    try:
        return str(importlib.import_module("neuronxcc").__version__)
    except ImportError as error:
        message = f"neuronx-cc, the compiler, cannot be imported: {error}. {ADVICE}"
        raise BackendUnavailableError(message) from error


def limit_threads() -> None:
    """Limit torch to the cores that the process is granted, whatever OMP_NUM_THREADS and the host's size are.

    A step waits for threads that wait for a core: handing over 8 rows of 128 256 logits takes 0.2 to 0.4 ms with 1 or 2
    threads on 2 vCPU, 1.1 to 1.5 with 4 or 8 (torch 2.13, 2026-11-22).
    """
    torch = importlib.import_module("torch")
    torch.set_num_threads(min(torch.get_num_threads(), count_cores()))


@contextmanager
def translated(plan: LoadPlan, work_dir: Path | None = None) -> Iterator[None]:
    """Raise errors of a load or a compilation as a `ServingError`. `work_dir`: see `of_load`."""
    try:
        yield
    except Exception as error:
        raise of_load(error, f"the model in {plan.model_dir}", work_dir) from error
