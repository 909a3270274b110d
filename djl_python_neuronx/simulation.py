"""Simulation: the real engine on a virtual clock, with a device whose steps only take time.

Scheduler, batches, slots and sequences are those that serve; each step takes the device as long as `StepTimes` has it
for the graph that the engine chose, and the host a constant. So times follow from shapes and arrivals alone, in a small
part of them: some 40,000 steps a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from djl_python_neuronx.backends.base import ModelSpec, Step, StepOutput, Want
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.backends.slots import SlotBackend, make_spec
from djl_python_neuronx.engine import limits
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.runner import Graph
from djl_python_neuronx.engine.sampler import Sampler
from djl_python_neuronx.planning.arguments import graph_lengths
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.plan import graphs
from djl_python_neuronx.planning.step_times import StepTimes
from djl_python_neuronx.types import GenerationRequest


class Arrival(NamedTuple):
    """A request: its time, and its lengths in tokens. No eos comes: an answer is as long as it may be."""

    at_s: float
    prompt_len: int
    output_len: int


@dataclass
class Record:
    """The times at which an arrival got its tokens."""

    arrival: Arrival
    tokens_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.tokens_s[0] - self.arrival.at_s

    @property
    def gaps_s(self) -> list[float]:
        """Times between its tokens."""
        return [after - before for before, after in pairwise(self.tokens_s)]


class Summary(NamedTuple):
    """Figures of a simulation, in seconds; percentiles are of all requests, or of all gaps between two tokens."""

    tokens_per_s: float
    """All tokens, by the time from the first arrival to the last token."""
    ttft_p50_s: float
    ttft_p99_s: float
    gap_p50_s: float
    gap_p99_s: float
    longest_stall_s: float
    """The longest gap."""


def summarise(records: Iterable[Record]) -> Summary:
    """Return the figures of records; without gaps those of gaps are 0."""
    records = [*records]
    began_s = min(record.arrival.at_s for record in records)
    ended_s = max(record.tokens_s[-1] for record in records)
    gaps_s = [gap for record in records for gap in record.gaps_s] or [0.0]
    ttft_p50_s, ttft_p99_s = np.percentile([record.ttft_s for record in records], (50, 99))
    gap_p50_s, gap_p99_s = np.percentile(gaps_s, (50, 99))
    rate = sum(len(record.tokens_s) for record in records) / (ended_s - began_s)
    found = (rate, ttft_p50_s, ttft_p99_s, gap_p50_s, gap_p99_s, max(gaps_s))
    return Summary(*map(float, found))


def host_s(slots: int) -> float:
    """Return the seconds that the host adds to a step of all slots: greedy, vocabulary 128,256, logits in host memory.

    Measured: `loss` in benchmarks/README.md ("What the host adds to a step", 191 µs for 8 rows), and one read of a
    row's logits (517 - 145 µs for 24 rows, "Sampling alone").
    """
    return 191e-6 + 16e-6 * (slots - 8)


def spec_of(case: Case) -> ModelSpec:
    """Return the shapes of a case whose options are filled in, as its backend has them once it is loaded."""
    options, num_slots = case.options, case.slots
    prompts, lengths = graph_lengths(options)
    planned = [*graphs(case)]
    decodes = {(graph.bucket, graph.batch) for graph in planned if graph.kind == "decode"}
    rows = {batch for _, batch in decodes}
    mixed, block = bool(options.enable_chunked_prefill), options.pa_block_size or 1
    free = case.continuous_batching or num_slots == 1
    return make_spec(
        LoadPlan(Path(), num_slots, options.max_model_len or 0, prompts),
        1,
        () if mixed else {bucket for bucket, _ in decodes} or lengths,
        max_prefill_batch=num_slots if mixed or not free else 1,
        decode_slots=(*sorted(rows),) if len(rows) > 1 else (),
        cache_buckets=(*sorted({block * one.batch for one in planned if one.kind == "mixed"}),),
        cache_block=block,
        mixed_steps=mixed,
        joins="free" if free else "reprefill",
    )


class _Device(SlotBackend):
    """The slots of a device that samples: each token is 0, at once."""

    name = "simulation"

    def _run(self, step: Step) -> StepOutput:
        count = sum(len(rows.slots) for _, rows in step.parts)
        return StepOutput(ids=np.zeros((count, 1), np.int32))


def simulate(
    spec: ModelSpec,
    times: StepTimes,
    arrivals: Iterable[Arrival],
    *,
    host_s: float = 0.0,
    decode_interleave: int = 1,
) -> list[Record]:
    """Serve `arrivals` in the shapes of `spec`; returns their records in the same order.

    `spec`: without reuse of prefixes and speculation, as of `spec_of`. `host_s`: the host's time between two steps, its
    critical path. Not simulated: the way of tokens to the client, limits of the queue and of a request's time.

    Raises:
        ValueError: the batches are static, or an answer does not fit its slot.
        RequestError: the model takes no prompt as long as one of them.
    """
    if spec.joins == "reprefill":
        message = "static batches cannot be simulated; expected continuous batching"
        raise ValueError(message)
    spec = replace(spec, outputs=Want.TOKENS)
    now_s, records = 0.0, [Record(arrival) for arrival in arrivals]
    engine = Engine(
        _Device(spec, times),
        decode_interleave=decode_interleave,
        make_sampler=partial(Sampler, library=None),  # the device samples
        clock=lambda: now_s,
    )
    coming = deque(sorted(enumerate(records), key=lambda one: one[1].arrival.at_s))
    step_s = cache(lambda graph, num_prompts: _step_s(graph, num_prompts, spec, times))
    while coming or engine.has_work:
        if not engine.has_work:
            now_s = max(now_s, coming[0][1].arrival.at_s)
        while coming and coming[0][1].arrival.at_s <= now_s:
            number, record = coming.popleft()
            engine.add(_request(str(number), record.arrival, spec))
        call = engine.run(engine.schedule())
        if call.error is not None or call.ran is None:
            message = f"the engine ran no step at {now_s} s; this is a bug of the simulation"
            raise RuntimeError(message) from call.error
        now_s += step_s(call.ran.graph, len(call.batch.chunks)) + host_s
        for output in engine.advance(call).outputs:
            records[int(output.request_id)].tokens_s.append(now_s)
    return records


def _request(name: str, arrival: Arrival, spec: ModelSpec) -> GenerationRequest:
    """Return the request of an arrival.

    Raises:
        ValueError, RequestError: see `simulate`.
    """
    _, prompt_len, output_len = arrival
    request = GenerationRequest(name, [0] * prompt_len, max_new_tokens=output_len)
    limits.check(request, spec)
    if prompt_len + output_len > spec.max_model_len:
        message = (
            f"a prompt of {prompt_len} and an answer of {output_len} tokens do not fit a slot of {spec.max_model_len}; "
            "shorten them, or raise n_positions"
        )
        raise ValueError(message)
    return request


def _step_s(graph: Graph, num_prompts: int, spec: ModelSpec, times: StepTimes) -> float:
    """Return the seconds of a device call. A prefill takes one prompt after another."""
    if graph.kind == "prefill":
        return num_prompts * times.prefill_s(graph.bucket)
    rows = graph.slots or spec.num_slots
    if graph.kind == "decode":
        return times.decode_s(rows, graph.bucket)
    # A mixed step reads weights and cache as a decode does, and computes as a prefill does, at the same time.
    positions = graph.cache // spec.num_slots or spec.max_model_len
    return max(times.decode_s(rows, positions), times.prefill_s(graph.bucket))
