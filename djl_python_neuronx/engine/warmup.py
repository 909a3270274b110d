"""Warm-up: the first call of every graph, so that no request waits for one."""

from __future__ import annotations

import logging
from itertools import pairwise, product

from djl_python_neuronx.backends.base import ModelSpec, Step, Want
from djl_python_neuronx.engine.batching import plain_rows
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.limits import longest_prompt
from djl_python_neuronx.engine.runner import Graph, GraphKind, Runner
from djl_python_neuronx.types import GenerationRequest

logger = logging.getLogger(__name__)


def warm_up(engine: Engine) -> tuple[Graph, ...]:
    """Run real sequences through an idle engine, and steps that only several long sequences need.

    Returns the graphs that stay cold: those that a sequence reaches only by generating far beyond the longest prompt.

    Raises:
        ServingError: a graph does not run, the draft model's included.
    """
    spec, speculates = engine.spec, engine.speculates
    for length, max_new_tokens in _runs(spec, speculates=speculates):
        _generate(engine, length, max_new_tokens)
    if spec.cache_buckets:
        _fill_caches(engine.runner)
    _prefill_behind_prefixes(engine.runner)
    if spec.joins == "reprefill":
        # When a sequence joins, the others are prompts as long as they have become.
        _fill(engine.runner, 0, spec.max_model_len)
        engine.runner.backend.release([0])
    for count in spec.decode_slots[1:]:
        _decode_in(engine.runner, count - 1)
    wanted = _graphs(spec, speculates=speculates)
    return tuple(graph for graph in wanted if graph not in engine.runner.graphs_run)


def _generate(engine: Engine, length: int, max_new_tokens: int) -> None:
    """Run a separate sequence.

    Raises:
        ServingError: a graph does not run.
    """
    name, prompt_ids = f"warm-up-{length}-{max_new_tokens}", [0] * length
    request = GenerationRequest(
        name,
        prompt_ids,
        max_new_tokens=max_new_tokens,
        ignore_eos=True,
        cache_salt=name,  # no prompt is a prefix of the next one
    )
    engine.add(request)
    while engine.has_work:
        outputs, info = engine.step(min_drafts=1)
        errors = [output.error for output in outputs]
        for error in [*errors, info and info.draft_error]:
            if error is not None:
                raise error
    if engine.dead is not None:
        raise engine.dead


def _decodes(spec: ModelSpec) -> tuple[int, ...]:
    """Lengths of the decode graphs; none with mixed steps, where decodes run in the graphs of the chunks."""
    return () if spec.mixed_steps else spec.token_buckets or (spec.max_model_len,)


def _first_positions(spec: ModelSpec) -> tuple[int, ...]:
    """The first position of each decode graph: near its end a library may already run the next one."""
    ends = _decodes(spec)
    return (1, *ends)[: len(ends)]


def _runs(spec: ModelSpec, *, speculates: bool) -> list[tuple[int, int]]:
    """Lengths of prompts, with the number of tokens to generate."""
    longest, limit = longest_prompt(spec), spec.max_model_len
    lengths = {min(bucket, longest) for bucket in spec.prefill_buckets}
    # The second token of a prompt of this length is a decode in the bucket.
    lengths |= {max(1, min(start, longest, limit - 2)) for start in _first_positions(spec)}
    runs = [(length, 2) for length in lengths]
    if speculates:
        # Drafts are verified only where a further token is wanted.
        ends = {
            min(end - 1 - spec.num_speculative_tokens, longest, limit - 3) for end in _decodes(spec)
        }
        runs += [(length, 3) for length in {*lengths, *(max(1, length) for length in ends)}]
    return sorted(runs)


def _graphs(spec: ModelSpec, *, speculates: bool) -> list[Graph]:
    """All graphs that a step may need, except prefills, which `_runs` covers."""
    if spec.mixed_steps:
        return _mixed_graphs(spec)
    kinds: list[GraphKind] = ["decode", "verification"] if speculates else ["decode"]
    counts = spec.decode_slots or (0,)
    return [
        Graph(kind, end, slots=count)
        for kind in kinds
        for end in _decodes(spec)
        for count in counts
    ]


def _mixed_graphs(spec: ModelSpec) -> list[Graph]:
    """The graphs that some step fits: its tokens lie in the cache, and its sequences end within their slots."""
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
    """Fill every slot, then rewrite chunks that need less and less of the cache: each graph of a mixed step once.

    No request needs these steps, so they want no output; a token of a chunk and one of a decode cost the same.

    Raises:
        ServingError: a graph does not run.
    """
    backend, spec = runner.backend, runner.backend.spec
    slots = list(range(spec.num_slots))
    steps = sorted({_step_of(graph, spec) for graph in _mixed_graphs(spec)}, reverse=True)
    longest, *_ = steps[0]
    calls = -(-longest // spec.prefill_buckets[-1]) * len(slots)
    logger.info("warm_up_cache slots=%d tokens=%d calls=%d", len(slots), longest, calls)
    for slot in slots:
        _fill(runner, slot, longest)
    for end, num_rows, num_tokens in steps:
        lens = [(num_tokens + row) // num_rows for row in range(num_rows)]
        _write(runner, slots[:num_rows], end, lens)
    backend.release(slots)


def _prefill_behind_prefixes(runner: Runner) -> None:
    """Run each prompt graph behind a prefix that only it holds (`ModelSpec.prefix_buckets`).

    Raises:
        ServingError: a graph does not run.
    """
    backend, spec = runner.backend, runner.backend.spec
    most = spec.prefill_buckets[-1]
    for (shorter, prefix), length in product(
        pairwise((0, *spec.prefix_buckets)), spec.prefill_buckets
    ):
        end = min(prefix + length, spec.max_model_len)
        start = end - length
        if start > shorter:
            backend.acquire(0, [0] * end, 0, f"warm-up-{prefix}-{length}")
            for first, last in pairwise((*range(0, start, most), start, end)):
                _write(runner, [0], last, [last - first], _wants(spec))
            backend.release([0])


def _wants(spec: ModelSpec) -> Want:
    return Want.TOKENS if Want.TOKENS in spec.outputs else Want.LOGITS


def _fill(runner: Runner, slot: int, end: int) -> None:
    """Write `end` tokens into a free slot, in chunks of the longest prompt.

    Raises:
        ServingError: a graph does not run.
    """
    most = runner.backend.spec.prefill_buckets[-1]
    runner.backend.acquire(slot, [0] * end, 0, f"warm-up-{slot}")
    for start, stop in pairwise((*range(0, end, most), end)):
        _write(runner, [slot], stop, [stop - start])


def _decode_in(runner: Runner, slot: int) -> None:
    """Fill one slot, then decode in it at ever shorter lengths: the sequences above run in slot 0.

    Raises:
        ServingError: a graph does not run.
    """
    backend, spec = runner.backend, runner.backend.spec
    wants = _wants(spec)
    longest = min(longest_prompt(spec), spec.max_model_len - 1)
    backend.acquire(slot, [0] * longest, 0, f"warm-up-{slot}")
    runner.run(Step(prefill=plain_rows([slot], [[0] * longest], [0], wants)))
    for start in sorted({min(start, longest) for start in _first_positions(spec)}, reverse=True):
        runner.run(Step(decode=plain_rows([slot], [[0]], [start], wants)))
    backend.release([slot])


def _write(
    runner: Runner, slots: list[int], end: int, lens: list[int], wants: Want = Want.NOTHING
) -> None:
    """Run one call that writes chunks of these lengths, each up to position `end` of its slot."""
    starts = [end - length for length in lens]
    rows = plain_rows(slots, [[0] * length for length in lens], starts, wants)
    runner.run(Step(prefill=rows))


def _step_of(graph: Graph, spec: ModelSpec) -> tuple[int, int, int]:
    """A step that fills a graph's tokens and cache.

    Returns the tokens that each slot holds with its chunk, the number of chunks, and their tokens in all.
    """
    blocks = graph.cache // spec.cache_block
    num_rows = min(spec.num_slots, graph.bucket, blocks)
    end = min(blocks // num_rows * spec.cache_block, spec.max_model_len)
    return end, num_rows, min(graph.bucket, num_rows * end)
