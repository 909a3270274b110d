"""The outputs of a model that is verified, each with its place. Numpy only."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from djl_python_neuronx.backends.base import Float32Array, ModelSpec
from djl_python_neuronx.engine.runner import Graph


class LogitFile:
    """Rows of float32[V], on the disk: those of hundreds of places do not fit into memory beside a model."""

    def __init__(self, vocab_size: int) -> None:
        """No row yet; the file ends with the object."""
        self._num_bytes, self._count = 4 * vocab_size, 0
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (as long as the object)
        weakref.finalize(self, self._file.close)

    def add(self, row: Float32Array) -> int:
        """Append a row; return its number."""
        self._file.write(np.ascontiguousarray(row, np.float32).tobytes())
        self._count += 1
        return self._count - 1

    def __getitem__(self, number: int) -> Float32Array:
        raw = os.pread(self._file.fileno(), self._num_bytes, number * self._num_bytes)
        return np.frombuffer(raw, np.float32)


class Seen(NamedTuple):
    """An output, and the place that gave it."""

    scenario: str
    graph: Graph | None
    """None: the engine's choice, as are slot and rows."""
    slot: int
    rows: int
    """Rows of the call."""
    text: int
    position: int
    """Of the token behind which this output comes."""
    logits: int | None = None
    """Number of its logits in `Record.logits`; None: the device gives none."""
    token: int | None = None
    """The token that the device or the engine has chosen greedily, -1 for none; None: the host samples."""


class Draws(NamedTuple):
    """Tokens drawn behind one prompt."""

    settings: dict[str, Any]
    """Sampling parameters."""
    place: str
    """host or device."""
    tokens: list[int]
    seen: Seen
    """The output that they are drawn from."""


class Finding(NamedTuple):
    """A fault, and the place where it shows."""

    place: str
    problem: str


@dataclass
class Record:
    """The outputs of a backend."""

    spec: ModelSpec
    texts: list[list[int]]
    """Token ids that rows were fed with, and those that the engine has made."""
    logits: LogitFile
    seen: list[Seen] = field(default_factory=list)
    calls: dict[Graph, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds of each call."""
    draws: list[Draws] = field(default_factory=list)
    failures: list[Finding] = field(default_factory=list)
    """Steps that failed."""
    left_out: list[str] = field(default_factory=list)
    """Subjects that are not compared, and the reason."""
