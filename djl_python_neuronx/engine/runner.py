"""The one place where the engine calls a device: timed, watched, and noted by graph."""

from __future__ import annotations

import time
from typing import Literal, NamedTuple

from djl_python_neuronx.backends.base import Backend, Rows, Step, StepOutput, Want
from djl_python_neuronx.backends.shapes import choose_bucket

Kind = Literal["prefill", "decode", "verification", "mixed"]


class DeviceCall(NamedTuple):
    """A call that the device is busy with; read by the watchdog."""

    started_s: float
    first: bool
    """The first call of this graph: a runtime may load or even compile it now."""


class Graph(NamedTuple):
    """A program of the device."""

    kind: Kind
    bucket: int
    cache: int = 0
    """Of `ModelSpec.cache_buckets`; 0: there are none."""


class StepInfo(NamedTuple):
    """What a step was, for metrics."""

    kind: Kind
    bucket: int
    """Compiled length that ran: a prefill's prompt columns, a decode's cache columns, all tokens of a mixed step."""
    rows: int
    tokens: int
    """Valid tokens fed; a prefill's padding is rows * bucket - tokens."""
    device_s: float
    num_reencoded: int = 0
    """Tokens that were encoded again although they had been in the cache."""
    drafts_s: float = 0.0
    """Time that drafting for it took, the draft model's calls included."""
    draft_failed: bool = False
    """Nothing could be drafted for it, because the proposer failed."""
    drafted: int = 0
    """Drafts that were verified."""
    accepted: int = 0
    """Those of them that stand in the text."""


class Runner:
    """Runs steps on a backend. Engine thread; the attributes may be read by any."""

    def __init__(self, backend: Backend) -> None:
        """Nothing has run yet."""
        self.backend = backend
        self.device_call: DeviceCall | None = None
        self.graphs_run: set[Graph] = set()
        """Every graph that has run."""

    def run(self, step: Step, reach: int) -> tuple[StepOutput, StepInfo]:
        """Run a step that needs `reach` columns of what its buckets count.

        Raises:
            Exception: whatever the backend raises.
        """
        parts = [rows for _, rows in step.parts]
        kind = _kind_of(step)
        graph = self._graph(kind, reach, parts)
        started_s = time.monotonic()
        self.device_call = DeviceCall(started_s, graph not in self.graphs_run)
        try:
            output = self.backend.run(step)
        finally:
            self.device_call = None
        device_s = time.monotonic() - started_s
        self.graphs_run.add(graph)
        rows = sum(len(part.slots) for part in parts)
        tokens = rows if kind == "decode" else sum(int(part.lens.sum()) for part in parts)
        if self.backend.spec.mixed_steps and kind == "prefill":
            kind = "mixed"
        return output, StepInfo(kind, graph.bucket, rows, tokens, device_s, output.num_reencoded)

    def _graph(self, kind: Kind, reach: int, parts: list[Rows]) -> Graph:
        spec = self.backend.spec
        if not spec.mixed_steps:
            buckets = spec.prefill_buckets if kind == "prefill" else spec.token_buckets
            return Graph(kind, choose_bucket(reach, buckets or (spec.max_model_len,)))
        # Chunks and decodes run in the same graphs.
        cache = 0
        if spec.cache_buckets:
            size = spec.cache_block
            blocks = sum(int((-(-(part.starts + part.lens) // size)).sum()) for part in parts)
            cache = choose_bucket(min(blocks * size, spec.cache_buckets[-1]), spec.cache_buckets)
        return Graph("mixed", choose_bucket(reach, spec.prefill_buckets), cache)


def _kind_of(step: Step) -> Kind:
    if step.prefill is None and step.decode is not None and step.decode.wants == Want.ALL_LOGITS:
        return "verification"
    return step.kind
