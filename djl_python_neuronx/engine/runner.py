"""Device calls: timed, and recorded by graph; a backend's failures as our errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from djl_python_neuronx.backends.base import Backend, Rows, Step, StepOutput, Want
from djl_python_neuronx.backends.shapes import choose_bucket
from djl_python_neuronx.errors import BackendError, ServingError, StepError

MAX_FAILED_STEPS = 3
"""Device calls that may fail in a row before a model is given up: a lost device fails every call, and would fail every
request sent to it, one by one."""

GraphKind = Literal["prefill", "decode", "verification", "mixed"]
SamplingPlace = Literal["host", "device", "mixed"]


class Graph(NamedTuple):
    """A compiled program of the device."""

    kind: GraphKind
    bucket: int
    cache: int = 0
    """KV-cache bucket (see `ModelSpec.cache_buckets`); 0 if the model has none."""
    slots: int = 0
    """Slots of a decode (see `ModelSpec.decode_slots`); 0 if all have the same number."""


class StepInfo(NamedTuple):
    """The graph that a step ran and its tokens, for metrics."""

    kind: GraphKind
    bucket: int
    """Compiled length that ran: a prefill's prompt columns, a decode's cache columns, all tokens of a mixed step."""
    rows: int
    tokens: int
    """Valid tokens fed; a prefill's padding is rows * bucket - tokens."""
    device_s: float
    cache: int = 0
    """See `Graph.cache`."""
    slots: int = 0
    """Rows that a decode's graph computes, however many of them run."""
    num_reprefilled: int = 0
    """Tokens prefilled again although they had been in the cache."""
    draft_s: float = 0.0
    """Time that its proposal took, the draft model's calls included."""
    draft_error: ServingError | None = None
    """The error of the proposer; None if it has not failed."""
    drafts: int = 0
    """Rows with draft tokens to verify."""
    drafted: int = 0
    """Their draft tokens."""
    accepted: int = 0
    """Draft tokens that became output."""
    place: SamplingPlace | None = None
    """Where its tokens were sampled; mixed: some of them on the host. None if it gave none."""
    cached: Mapping[str, int] = MappingProxyType({})
    """Id of each sequence that has just got its slot, to the tokens of its prefill that were in the cache."""


class Ran(NamedTuple):
    """A device call that has succeeded."""

    output: StepOutput
    kind: GraphKind
    graph: Graph
    device_s: float


class Runner:
    """Runs steps on a backend. Engine thread only; `describe`: any thread."""

    def __init__(self, backend: Backend, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing has run yet. `clock`: seconds."""
        self.backend = backend
        self._clock = clock
        self.on_first_call: Callable[[], None] | None = None
        """Called before the first call of each graph: a runtime may load or even compile it in that call."""
        self.graphs_run: set[Graph] = set()
        self._decode: Rows | None = None
        """The rows of the last step if it was a decode. The same rows again are one position further (`Batcher`)."""
        self._num_left = 0
        """Positions until they need another graph."""
        self._kind: GraphKind = "decode"
        self._graph = Graph("decode", 0)

    def run(self, step: Step) -> Ran:
        """Run a step.

        Raises:
            Exception: any error of the backend.
        """
        if step.prefill is not None or step.decode is not self._decode or self._num_left < 1:
            self._choose_graph(step)
        kind, graph = self._kind, self._graph
        self._num_left -= 1
        started_s = self._clock()
        output = self.backend.run(step)
        device_s = self._clock() - started_s
        self.graphs_run.add(graph)
        return Ran(output, kind, graph, device_s)

    def _choose_graph(self, step: Step) -> None:
        """Set the graph of a step, and report its first call."""
        parts = [rows for _, rows in step.parts]
        verifies = step.prefill is None and parts[-1].wants is Want.ALL_LOGITS
        self._kind = "verification" if verifies else step.kind
        self._graph, self._decode, self._num_left = self._find(self._kind, parts), None, 0
        if self._kind == "decode" and not self.backend.spec.mixed_steps:
            self._decode = step.decode
            self._num_left = self._graph.bucket - int(parts[0].starts.max())
        if self._graph not in self.graphs_run and self.on_first_call is not None:
            self.on_first_call()

    def describe(self, step: Step, ran: Ran) -> StepInfo:
        """Return the facts of a step that has run."""
        parts, kind = [rows for _, rows in step.parts], ran.kind
        rows = sum([len(part.slots) for part in parts])
        tokens = rows if kind == "decode" else sum([int(part.lens.sum()) for part in parts])
        if self.backend.spec.mixed_steps and kind == "prefill":
            kind = "mixed"
        _, bucket, cache, slots = ran.graph
        slots, again = slots or self.backend.spec.num_slots, ran.output.num_reprefilled
        return StepInfo(kind, bucket, rows, tokens, ran.device_s, cache, slots, again)

    def _find(self, kind: GraphKind, parts: list[Rows]) -> Graph:
        spec, rows = self.backend.spec, parts[-1]
        width, limit = rows.input_ids.shape[1], spec.max_model_len
        if not spec.mixed_steps:
            if kind == "prefill":
                return Graph(kind, choose_bucket(width, spec.prefill_buckets))
            # Columns of drafts may lie behind the slot's end.
            end = min(max(rows.starts.tolist()) + width, limit)
            counts = spec.decode_slots
            slots = choose_bucket(int(rows.slots[-1]) + 1, counts) if counts else 0
            return Graph(kind, choose_bucket(end, spec.token_buckets or (limit,)), slots=slots)
        # Chunks and decodes run in the same graphs.
        cache = 0
        if spec.cache_buckets:
            size = spec.cache_block
            blocks = sum(int((-(-(part.starts + part.lens) // size)).sum()) for part in parts)
            cache = choose_bucket(min(blocks * size, spec.cache_buckets[-1]), spec.cache_buckets)
        num_tokens = sum(int(part.lens.sum()) for part in parts)
        return Graph("mixed", choose_bucket(num_tokens, spec.prefill_buckets), cache)


def require_shape(found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Refuse an output of another shape than the step wanted.

    Raises:
        StepError: the shapes differ, or there is no second axis.
    """
    if found != expected or len(found) == 1:
        msg = f"the backend answered with shape {found}, expected {expected}; this is a bug of the backend"
        raise StepError(msg)


def translate(error: Exception) -> BackendError:
    """A backend's own error as it is, any other as a new StepError, so that no two rows share one."""
    if isinstance(error, BackendError):
        return error
    step_error = StepError(
        f"the device call failed ({type(error).__name__}: {error}); this request is lost, retry it"
    )
    step_error.__cause__ = error
    return step_error
