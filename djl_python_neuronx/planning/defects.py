"""What is known to be wrong in the libraries, and when it gives wrong answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from djl_python_neuronx.config.findings import Finding
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning import capabilities
from djl_python_neuronx.planning.advice import ways
from djl_python_neuronx.planning.capabilities import Capability
from djl_python_neuronx.planning.intent import continuous_batching
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.tnx.arguments import context_lengths


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
    limit, slots = options.max_model_len or 0, options.max_rolling_batch_size
    prompts = options.context_length_estimate or (limit,)
    lengths = context_lengths(prompts, limit, slots, continuous=continuous_batching(options))
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
            "set context_length_estimate, for static batches n_positions, to the window at most",
        ),
    }
)
"""Defect to the options that it concerns, to whether it matters with them, and to the way around it."""


def _odd_heads(facts: ModelFacts) -> bool:
    hidden, heads, size = facts.hidden_size, facts.num_heads, facts.head_dim
    return bool(hidden and heads and size) and size != (hidden or 0) // (heads or 1)


class Trait(NamedTuple):
    """Something of a model's configuration that a library cannot do."""

    has: Callable[[ModelFacts], bool]
    problem: str
    loaders: tuple[str, ...]
    """Those that can."""
    silent: bool = True
    """The library goes on and its answers are wrong; else it stops."""


_NXDI = ("nxdi", "cpu")
_CPU = ("cpu",)
_ODD_HEADS = Trait(
    _odd_heads,
    "transformers-neuronx takes heads of hidden_size / num_attention_heads, which config.json's head_dim is not",
    _NXDI,
    silent=False,
)
_OTHER_ACTIVATION = Trait(
    lambda facts: facts.activation not in {None, "silu", "swish"},
    "transformers-neuronx computes silu, whatever hidden_act in config.json says",
    _NXDI,
)
_SCALED_POSITIONS = Trait(
    lambda facts: facts.rope_type is not None,
    "transformers-neuronx does not look at rope_scaling in config.json",
    _CPU,
)
_OF_MISTRAL = (_ODD_HEADS, _OTHER_ACTIVATION, _SCALED_POSITIONS)
TRAITS: Mapping[str, Mapping[str, tuple[Trait, ...]]] = MappingProxyType(
    {
        "tnx": MappingProxyType(
            {
                "gpt_neox": (
                    Trait(
                        lambda facts: not facts.parallel_residual,
                        "transformers-neuronx has no use_parallel_residual=false, which config.json asks for",
                        _CPU,
                        silent=False,
                    ),
                ),
                "llama": (
                    Trait(
                        lambda facts: facts.attention_bias,
                        "transformers-neuronx drops the biases that attention_bias=true in config.json stands for",
                        _NXDI,
                    ),
                    Trait(
                        lambda facts: facts.mlp_bias,
                        "transformers-neuronx drops the biases that mlp_bias=true in config.json stands for",
                        _NXDI,
                    ),
                    _OTHER_ACTIVATION,
                    _ODD_HEADS,
                    Trait(
                        lambda facts: facts.rope_type not in {None, "llama3"},
                        "transformers-neuronx scales positions like llama3 or not at all, and config.json asks for "
                        "another rope_scaling",
                        _CPU,
                        silent=False,
                    ),
                ),
                "mistral": _OF_MISTRAL,
                "mixtral": _OF_MISTRAL,
                "opt": (
                    Trait(
                        lambda facts: not facts.norm_first,
                        "transformers-neuronx has no do_layer_norm_before=false, which config.json asks for",
                        _CPU,
                        silent=False,
                    ),
                ),
            }
        )
    }
)
"""Loader to `model_type` to what of a configuration it cannot do.

Source: transformers-neuronx 0.13, `<architecture>/config.py`, `model.py` and `hlo.py`; run on a CPU.
"""


def options_of(defect: str) -> tuple[str, ...]:
    """The options that decide whether a defect matters; `model_loader`: it always does."""
    return _MATTERS[defect][0]


def of_model(options: ServingOptions, facts: ModelFacts, loader: str) -> Iterator[Finding]:
    """What of the model's own configuration the library cannot do."""
    for trait in TRAITS.get(loader, {}).get(facts.model_type or "", ()):
        if not trait.has(facts):
            continue
        fix = ways(*trait.loaders)
        if not trait.silent:
            yield Finding(("model_loader",), f"{trait.problem}: it would stop; {fix}")
        else:
            yield _told(("model_loader",), f"{trait.problem}: answers are wrong", fix, options)


def findings(
    options: ServingOptions, facts: ModelFacts, capability: Capability
) -> Iterator[Finding]:
    """The defects that matter with these options: errors, or warnings if they are accepted."""
    for defect, reason in capability.defects.items():
        names, matters, fix = _MATTERS[defect]
        if not matters(options, facts):
            continue
        window = f" (of {facts.sliding_window} tokens)" if facts.sliding_window else ""
        yield _told(names, f"{reason}{window}: answers are wrong", fix, options)


def _told(names: tuple[str, ...], what: str, fix: str, options: ServingOptions) -> Finding:
    if options.allow_known_defects:
        return Finding(names, f"{what}, which allow_known_defects=true accepts", "warning")
    return Finding(names, f"{what}; {fix}, or serve it as it is with allow_known_defects=true")
