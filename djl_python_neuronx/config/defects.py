"""What is known to be wrong in the libraries, and when it gives wrong answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from djl_python_neuronx.config import capabilities
from djl_python_neuronx.config.capabilities import Capability
from djl_python_neuronx.config.findings import Finding
from djl_python_neuronx.config.model import ModelFacts
from djl_python_neuronx.config.options import ServingOptions


def _mixed_rows(options: ServingOptions, facts: ModelFacts) -> bool:
    degree = options.tensor_parallel_degree
    return (
        options.group_query_attention == "shard-over-batch"
        and facts.num_heads != facts.num_kv_heads
        and isinstance(degree, int)
        and degree > 1
        and (options.max_rolling_batch_size or 1) % degree == 0
    )


def _long_prompts(options: ServingOptions, facts: ModelFacts) -> bool:
    lengths = options.context_length_estimate or (options.max_model_len or 0,)
    return facts.sliding_window is not None and lengths[-1] > facts.sliding_window


def _long_sequences(options: ServingOptions, facts: ModelFacts) -> bool:
    return facts.sliding_window is not None and (options.max_model_len or 0) > facts.sliding_window


_MATTERS: Mapping[
    str, tuple[tuple[str, ...], Callable[[ServingOptions, ModelFacts], bool], str]
] = MappingProxyType(
    {
        capabilities.GPTJ_DECODE: (
            ("model_loader",),
            lambda _options, _facts: True,
            "set model_loader=cpu",
        ),
        capabilities.INT8_CACHE: (
            ("kv_cache_quantize",),
            lambda options, _facts: options.kv_cache_quantize == "int8",
            "set kv_cache_quantize=fp8, or leave it out",
        ),
        capabilities.SHARD_OVER_BATCH: (
            ("group_query_attention",),
            _mixed_rows,
            "set replicated-heads, or leave it out",
        ),
        capabilities.WINDOW_IGNORED: (
            ("n_positions",),
            _long_sequences,
            "set n_positions to the window at most",
        ),
        capabilities.WINDOW_PREFILL: (
            ("n_positions", "context_length_estimate"),
            _long_prompts,
            "set context_length_estimate to the window at most",
        ),
    }
)
"""Defect to the options that it concerns, to whether it matters with them, and to the way around it."""


def findings(
    options: ServingOptions, facts: ModelFacts, capability: Capability
) -> Iterator[Finding]:
    """The defects that matter with these options: errors, or warnings if they are accepted."""
    for defect, reason in capability.defects.items():
        names, matters, fix = _MATTERS[defect]
        if not matters(options, facts):
            continue
        window = f" (of {facts.sliding_window} tokens)" if facts.sliding_window else ""
        what = f"{reason}{window}: answers are wrong"
        if options.allow_known_defects:
            yield Finding(names, f"{what}, which allow_known_defects=true accepts", "warning")
        else:
            problem = f"{what}; {fix}, or serve it as it is with allow_known_defects=true"
            yield Finding(names, problem)
