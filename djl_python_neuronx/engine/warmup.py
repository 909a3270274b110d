"""A first run of every graph, so that no request pays for it."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from djl_python_neuronx.backends.base import ModelSpec
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.drafts import Proposer
from djl_python_neuronx.engine.limits import longest_prompt
from djl_python_neuronx.engine.runner import DeviceCall, Graph, Kind
from djl_python_neuronx.engine.sequence import Sequence
from djl_python_neuronx.sampling import Sampler
from djl_python_neuronx.types import GenerationRequest


def warm_up(engine: Engine) -> tuple[Graph, ...]:
    """Run real sequences through an engine that has no others yet.

    Returns the graphs that stay cold: those that a sequence reaches only by generating far beyond the longest prompt,
    and those that only a full cache needs.

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
        caches = spec.cache_buckets or (0,)
        return [
            Graph("mixed", tokens, cache) for tokens in spec.prefill_buckets for cache in caches
        ]
    kinds: list[Kind] = ["decode", "verification"] if drafts else ["decode"]
    return [Graph(kind, end) for kind in kinds for end in _decodes(spec)]


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
