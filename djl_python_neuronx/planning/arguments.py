"""The arguments of a library and the graphs it compiles, with the parts that both libraries share."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel

from djl_python_neuronx.config.options import ServingOptions, option
from djl_python_neuronx.config.values import make_buckets

_KEYWORD = re.compile(r"[a-z]\w*")

Kind: TypeAlias = Literal[
    "prefill", "decode", "mixed", "speculation", "draft prefill", "draft decode"
]


@dataclass(frozen=True)
class PlannedGraph:
    """A graph to compile: one shape that the device can run."""

    kind: Kind
    bucket: int
    """Tokens: the prompt's for a prefill, the step's for a mixed one, the sequence's for the others."""
    batch: int
    """Rows of one call; of a mixed step the blocks of the KV cache that it reads."""
    prefix: int = 0
    """Tokens before the prompt's that a prefill reads from the KV cache."""


@dataclass(frozen=True)
class LibraryArguments:
    """All arguments of a library: plain values that JSON can hold, without those left at the library's default.

    A backend builds the library's objects from these values and decides nothing itself; `check` prints them.
    """

    constructor: dict[str, Any] = field(default_factory=dict)
    """Keywords of TNX's `from_pretrained` beside `neuron_config`; empty for NxDI."""
    neuron_config: dict[str, Any] = field(default_factory=dict)
    """Keywords of `NeuronConfig`. Where TNX takes an object (`quant`, `kv_cache_quant`, `continuous_batching`,
    `on_device_generation`) this is a dict of that object's keywords."""
    calls: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Methods of TNX that are called after the constructors, in this order, to their keywords.

    `init_cache_engine` is one of `ContinuousBatchingConfig`, the others are the model's."""
    compiler_flags: tuple[str, ...] = ()
    """One argument each; `shlex.join` makes `NEURON_CC_FLAGS` of them."""
    fused_draft: dict[str, Any] = field(default_factory=dict)
    """Keywords in which the `NeuronConfig` of a draft model in the same graphs differs; NxDI only."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables beside `NEURON_CC_FLAGS`, to be set before the library is imported."""


def handed_through(options: ServingOptions, loader: str) -> dict[str, Any]:
    """Return the options whose values the library's `NeuronConfig` takes as they are, by its own names."""
    written: dict[str, Any] = {}
    for name, entry in ServingOptions.model_fields.items():
        marker, value = option(name), getattr(options, name)
        keyword = marker.to.get(loader, "")
        unset = value is None or (value is False and entry.default is False)
        if not marker.computed and _KEYWORD.fullmatch(keyword) and not unset:
            written[keyword] = plain(value)
    return written


def override(config: dict[str, Any], options: ServingOptions) -> None:
    """Add the keywords of `override_neuron_config`, those of an object to the keywords that it has."""
    for keyword, value in (options.override_neuron_config or {}).items():
        if isinstance(own := config.get(keyword), dict) and isinstance(value, dict):
            config[keyword] = {**own, **value}
        else:
            config[keyword] = value


def environment_of(options: ServingOptions) -> dict[str, str]:
    """Return the variables that every library reads."""
    cache = options.compiled_graph_path
    return {} if cache is None else {"NEURON_COMPILE_CACHE_URL": cache}


def put(target: dict[str, Any], **values: object) -> dict[str, Any]:
    """Add the values that are not None to `target`, and return it."""
    target.update({name: value for name, value in values.items() if value is not None})
    return target


def degree_of(options: ServingOptions) -> int | None:
    """Return the tensor parallel degree; None if it is not a number yet."""
    degree = options.tensor_parallel_degree
    return degree if isinstance(degree, int) else None


def plain(value: object) -> object:
    """Return tuples as lists and models as dicts, which JSON can hold and the libraries sort in place."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    return [plain(entry) for entry in value] if isinstance(value, tuple) else value


def graph_lengths(options: ServingOptions) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the prompt lengths and the token lengths that are served; n_positions is set."""
    limit = options.max_model_len or 0
    # gpt_neox and gptj have no prompt lengths to choose from.
    return options.context_length_estimate or (limit,), options.token_buckets or make_buckets(limit)


def blocks_of(max_model_len: int, num_slots: int, block_size: int) -> int:
    """Return the number of KV-cache blocks that all slots need at their full length, with the one for padding."""
    return num_slots * -(-max_model_len // block_size) + 1
