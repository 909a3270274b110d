"""A first run of every graph, so that no request pays for it."""

from __future__ import annotations

from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.limits import longest_prompt
from djl_python_neuronx.types import GenerationRequest


def warm_up(engine: Engine) -> tuple[int, ...]:
    """Run real sequences through an engine that has no others yet.

    Returns the decode graphs that stay cold: those that a sequence reaches only by generating far beyond the longest
    prompt.

    Raises:
        ServingError: a graph does not run.
    """
    spec = engine.spec
    longest = longest_prompt(spec)
    decodes = spec.token_buckets or (spec.max_model_len,)
    lengths = {min(bucket, longest) for bucket in spec.prefill_buckets}
    # The second token of a prompt of this length is the decode that reaches the bucket's end.
    lengths |= {max(1, min(end - 1, longest, spec.max_model_len - 2)) for end in decodes}
    for length in sorted(lengths):
        name, prompt_ids = f"warm-up-{length}", [0] * length
        engine.add(GenerationRequest(name, prompt_ids, max_new_tokens=2, ignore_eos=True))
        while engine.has_work:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
    return tuple(bucket for bucket in decodes if (False, bucket) not in engine.graphs_run)
