"""A first run of every graph, so that no request pays for it."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Tokens
from itertools import pairwise
from typing import NamedTuple

from djl_python_neuronx.backends.base import ModelSpec, Step, Want
from djl_python_neuronx.engine.batching import plain_rows
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.drafts import Proposer
from djl_python_neuronx.engine.limits import longest_prompt
from djl_python_neuronx.engine.runner import DeviceCall, Graph, Kind, Runner
from djl_python_neuronx.engine.sampler import Sampler
from djl_python_neuronx.engine.sequence import Sequence
from djl_python_neuronx.types import GenerationRequest

logger = logging.getLogger(__name__)


def warm_up(engine: Engine) -> tuple[Graph, ...]:
    """Run real sequences through an engine that has no others yet, and what only several long ones reach by itself.

    Returns the graphs that stay cold: those that a sequence reaches only by generating far beyond the longest prompt.

    Raises:
        ServingError: a graph does not run, the draft model's among them.
    """
    spec, drafting, proposer = engine.spec, engine.drafting, engine.proposer
    if proposer is not None:
        drafting.proposer = _Eager(proposer)
    for length, max_new_tokens in _runs(spec, drafts=proposer is not None):
        name, prompt_ids = f"warm-up-{length}-{max_new_tokens}", [0] * length
        engine.add(
            GenerationRequest(name, prompt_ids, max_new_tokens=max_new_tokens, ignore_eos=True)
        )
        while engine.has_work:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
            if drafting.error is not None:
                raise drafting.error
    drafting.proposer = proposer
    if spec.cache_buckets:
        _fill_caches(engine.runner)
    wanted = _graphs(spec, drafts=proposer is not None)
    return tuple(graph for graph in wanted if graph not in engine.graphs_run)


def _decodes(spec: ModelSpec) -> tuple[int, ...]:
    """Lengths of the decode graphs; with mixed steps there are none, as decodes run in those of the chunks."""
    return () if spec.mixed_steps else spec.token_buckets or (spec.max_model_len,)


def _runs(spec: ModelSpec, *, drafts: bool) -> list[tuple[int, int]]:
    """Lengths of prompts, with the number of tokens to generate."""
    longest, limit = longest_prompt(spec), spec.max_model_len
    lengths = {min(bucket, longest) for bucket in spec.prefill_buckets}
    # The second token of a prompt of this length is the decode that reaches the bucket's end.
    lengths |= {max(1, min(end - 1, longest, limit - 2)) for end in _decodes(spec)}
    runs = [(length, 2) for length in lengths]
    if drafts:
        # Drafts are worth their while only where a further token is wanted.
        ends = {min(end - 1 - spec.max_drafts, longest, limit - 3) for end in _decodes(spec)}
        runs += [(length, 3) for length in {*lengths, *(max(1, length) for length in ends)}]
    return sorted(runs)


def _graphs(spec: ModelSpec, *, drafts: bool) -> list[Graph]:
    """All that a step may need, but for prefills, which `_runs` has."""
    if spec.mixed_steps:
        return _mixed_graphs(spec)
    kinds: list[Kind] = ["decode", "verification"] if drafts else ["decode"]
    return [Graph(kind, end) for kind in kinds for end in _decodes(spec)]


def _mixed_graphs(spec: ModelSpec) -> list[Graph]:
    """Those that some step fits: its tokens lie in the cache, and its sequences end within their slots."""
    graphs = []
    for fewer, tokens in pairwise((0, *spec.prefill_buckets)):
        longest = min(tokens, spec.num_slots) * spec.max_model_len
        graphs += [
            Graph("mixed", tokens, cache)
            for less, cache in pairwise((0, *spec.cache_buckets))
            if fewer < cache and less < longest
        ]
    return graphs if spec.cache_buckets else [Graph("mixed", n) for n in spec.prefill_buckets]


def _fill_caches(runner: Runner) -> None:
    """Fill every slot, then write chunks again that need less and less of the cache: each graph of a mixed step once.

    No request asks for these steps, so nothing is wanted of them; a token of a chunk and one of a decode are alike.

    Raises:
        ServingError: a graph does not run.
    """
    backend, spec = runner.backend, runner.backend.spec
    slots, most = range(spec.num_slots), spec.prefill_buckets[-1]
    steps = sorted({_step_of(graph, spec) for graph in _mixed_graphs(spec)}, reverse=True)
    longest = steps[0].end
    ends = (*range(most, longest, most), longest)
    logger.info(
        "warm_up_cache slots=%d tokens=%d calls=%d", spec.num_slots, longest, len(ends) * len(slots)
    )
    for slot in slots:
        backend.acquire(slot, [0] * longest, 0)
        for start, end in pairwise((0, *ends)):
            _write(runner, [slot], end, [end - start])
    for end, num_rows, num_tokens in steps:
        lens = [(num_tokens + row) // num_rows for row in range(num_rows)]
        _write(runner, slots[:num_rows], end, lens)
    backend.release(slots)


def _write(runner: Runner, slots: Tokens[int], end: int, lens: Tokens[int]) -> None:
    """One call that writes chunks of these lengths, each up to position `end` of its slot."""
    starts = [end - length for length in lens]
    rows = plain_rows(slots, [[0] * length for length in lens], starts, Want.NOTHING)
    runner.run(Step(prefill=rows), sum(lens))


class _Step(NamedTuple):
    """Chunks that together have `num_tokens`, in slots that each hold `end` with them."""

    end: int
    num_rows: int
    num_tokens: int


def _step_of(graph: Graph, spec: ModelSpec) -> _Step:
    """As many tokens, and as much of the cache, as a graph has room for."""
    blocks = graph.cache // spec.cache_block
    num_rows = min(spec.num_slots, graph.bucket, blocks)
    end = min(blocks // num_rows * spec.cache_block, spec.max_model_len)
    return _Step(end, num_rows, min(graph.bucket, num_rows * end))


class _Eager:
    """A proposer that always drafts something."""

    def __init__(self, behind: Proposer) -> None:
        self.behind = behind

    @property
    def device_call(self) -> DeviceCall | None:
        return self.behind.device_call

    def propose(
        self, sequences: Tokens[Sequence], counts: Tokens[int], sampler: Sampler
    ) -> list[list[int]]:
        drafts = self.behind.propose(sequences, counts, sampler)
        return [
            ids or [0] * min(1, max(0, count)) for ids, count in zip(drafts, counts, strict=True)
        ]

    def release(self, slot: int) -> None:
        self.behind.release(slot)

    def close(self) -> None:
        self.behind.close()
