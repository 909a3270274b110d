"""The facts of an application of NxD Inference that is loaded. Imports no torch."""

from __future__ import annotations

from typing import Any

from djl_python_neuronx.backends.base import ModelSpec, Want
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.backends.slots import make_spec

GREEDY = (1.0, 1.0, 1.0)
TEMPERATURES = 0.0, 100.0
"""The library drops tokens by a logit of -3000, which it then divides by the temperature: from about 150 on they are
drawn (modules/generation/sampling.py, 0.9)."""


def read_spec(application: Any, plan: LoadPlan, **of_mode: Any) -> ModelSpec:  # noqa: ANN401
    """Return the spec of a loaded application. `of_mode`: fields that depend on how it batches."""
    config = application.neuron_config
    lookahead = config.speculation_length if plan.fused_draft else 0
    wrapper = application.fused_spec_model if lookahead else application.token_generation_model
    sampling = config.on_device_sampling_config
    dynamic = sampling is not None and sampling.dynamic
    vocab_size = int(application.config.vocab_size)
    buckets = [] if config.is_prefix_caching else wrapper.neuron_config.buckets
    batches = {plan.num_slots, *(b[0] for b in buckets if isinstance(b, list))}
    outputs = Want.LOGITS if sampling is None else Want.TOKENS
    if config.output_logits:
        outputs |= Want.LOGITS
    if plan.num_speculative_tokens:
        outputs |= Want.ALL_LOGITS
    return make_spec(
        plan,
        vocab_size,
        # A decode reads and writes as many positions further, which the last graph has besides.
        [length - lookahead for length in lengths(wrapper)],
        num_fused_drafts=max(lookahead - 1, 0),
        decode_slots=tuple(sorted(batches)) if len(batches) > 1 else (),
        outputs=outputs,
        num_speculative_tokens=plan.num_speculative_tokens,
        largest_top_k=min(int(sampling.global_topk), vocab_size) if dynamic else None,
        temperatures=TEMPERATURES,
        applies_top_p=False,
        fixed_sampling=None if sampling is None or dynamic else _fixed(sampling),
        num_adapters=plan.lora.max_loras if plan.lora else 0,
        changes_adapters=plan.lora is not None,
        **of_mode,
    )


def prompt_lengths(application: Any) -> tuple[int, ...]:  # noqa: ANN401
    """Return the lengths of new tokens that prompt graphs exist for, ascending."""
    wrapper = application.context_encoding_model
    if not application.neuron_config.is_prefix_caching:
        return lengths(wrapper)
    return tuple(sorted({length for length, _ in wrapper.neuron_config.buckets}))


def prefix_lengths(application: Any) -> tuple[int, ...]:  # noqa: ANN401
    """Return the lengths of prefixes that graphs of an application with prefix caching exist for, ascending; not 0."""
    buckets = application.context_encoding_model.neuron_config.buckets
    return tuple(sorted({prefix for _, prefix in buckets if prefix}))


def lengths(wrapper: Any) -> tuple[int, ...]:  # noqa: ANN401
    """Return the lengths that graphs of a submodel exist for, ascending."""
    buckets = wrapper.neuron_config.buckets
    return tuple(sorted({b[1] if isinstance(b, list) else b for b in buckets}))


def _fixed(sampling: Any) -> tuple[float, float, float]:  # noqa: ANN401
    """Return the top_k, top_p and temperature that every row is sampled with."""
    if not sampling.do_sample:
        return GREEDY
    return float(sampling.top_k), float(sampling.top_p), float(sampling.temperature)
