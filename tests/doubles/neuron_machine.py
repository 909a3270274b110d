"""A machine with one Neuron device, the library and a backend that compiles, none of them real."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from djl_python_neuronx import backends
from djl_python_neuronx.service import Service

FOLDER = Path(__file__).parent / "neuron_double"
TINY = Path(__file__).parents[2] / "examples" / "tiny-llama"
GRAPHS = ["prefill-64.neff", "prefill-128.neff", "decode-128.neff"]
"""Graphs that the double compiles with `options`."""


class Machine:
    """Its folders, its variables and the log of its compiler."""

    def __init__(self, folder, monkeypatch):
        self.folder, self._monkeypatch = folder, monkeypatch
        self.set(TOYC_LOG=folder / "compiler.log", SERVING_DOWNLOAD_DIR=folder / "downloads")

    @property
    def environ(self):
        return dict(os.environ)

    def set(self, **variables):
        for name, value in variables.items():
            self._monkeypatch.setenv(name, str(value))

    def compiled(self):
        """The graphs whose compile began, in order."""
        path = self.folder / "compiler.log"
        return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []

    def compiler_pid(self):
        return int((self.folder / "compiler.log").read_text().split()[-1])


def place_backend():
    """Make the double the package's backend; in a process of its own there is nothing to undo."""
    backends.__path__.insert(0, str(FOLDER / "backends"))
    sys.path.insert(0, str(FOLDER))


def load(machine, options, model=TINY, **more):
    """Load and close; the service's counts of the store's hits and misses."""
    service = Service.load(None, model, environ=machine.environ, overrides=options, **more)
    service.close()
    names = ("compile_cache_hits_total", "compile_cache_misses_total")
    return tuple(service.metrics[name]._value.get() for name in names)
