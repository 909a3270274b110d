"""The situation of a preparation: its purpose, the machine, the environment, and what collects its problems."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any

from djl_python_neuronx.artifacts import fetch
from djl_python_neuronx.artifacts.cache import Progress
from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.loading.compile_process import CompileProgress
from djl_python_neuronx.planning.machines import DeviceInfo

logger = logging.getLogger(__name__)


class Purpose(Enum):
    """The purpose of a preparation."""

    SERVE = auto()
    """Load the model on this machine."""
    CHECK = auto()
    """Report what a start would do. Fetch no more than config.json, accept absent weights, and plan for a Neuron
    machine where there is none."""
    COMPILE = auto()
    """Compile the model for a later start, perhaps elsewhere: there may be no Neuron device here."""


@dataclass(frozen=True)
class LoadProgress:
    """Progress callbacks for downloads and compilation. Without a callback, progress is logged periodically."""

    transfer: Progress | None = None
    """Downloads and uploads."""
    compile: Callable[[CompileProgress], None] | None = None
    stage: Callable[[str], None] = logger.debug
    """The stage of a load, in words."""

    def in_words(self, stage: Callable[[str], None]) -> LoadProgress:
        """Return callbacks that also describe the stages of a load and each progress of a compile to `stage`."""

        def compiled(progress: CompileProgress) -> None:
            stage(f"compiling, {progress}")
            if self.compile is not None:
                self.compile(progress)

        return replace(self, compile=compiled, stage=stage)


SILENT = LoadProgress()


@dataclass(frozen=True)
class Situation:
    """The facts that the steps of a preparation share, beside the settings and the model."""

    purpose: Purpose
    machine: DeviceInfo
    """The machine that will serve."""
    environ: Mapping[str, str] = field(repr=False)
    """Variables of the process that will serve."""
    problems: Problems
    """The collection for every error, warning and note."""
    is_named: bool = False
    """`machine` is not this one, so that the libraries that are installed there are unknown."""
    among_others: bool = False
    """The machine serves other models too, so that the default degree leaves cores for them."""
    progress: LoadProgress = SILENT

    @property
    def is_dry(self) -> bool:
        """True if nothing will be loaded or compiled."""
        return self.purpose is Purpose.CHECK

    @property
    def is_here(self) -> bool:
        """True if the files and the libraries of this machine are those that count."""
        return not self.is_dry or (self.machine.has_neuron and not self.is_named)

    def fetch(self, place: str, origin: str, **how: Any) -> Path:  # noqa: ANN401
        """Fetch a model or graphs; see `fetch.fetch`, also for `how`."""
        root = fetch.download_root(self.environ)
        progress = self.progress.transfer
        return fetch.fetch(
            place, environ=self.environ, root=root, progress=progress, origin=origin, **how
        )
