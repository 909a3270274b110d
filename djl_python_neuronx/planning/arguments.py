"""What a library is given, and the pieces that are written alike for every library."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from pydantic import BaseModel

from djl_python_neuronx.config.options import ServingOptions, option

_KEYWORD = re.compile(r"[a-z]\w*")


@dataclass(frozen=True)
class LibraryArguments:
    """What a library is given: plain values that JSON can hold, nothing that was left at its default."""

    constructor: dict[str, object] = field(default_factory=dict)
    """Keywords of TNX's `from_pretrained` beside `neuron_config`; empty for NxDI."""
    neuron_config: dict[str, object] = field(default_factory=dict)
    """Keywords of `NeuronConfig`. Where TNX takes an object (`quant`, `kv_cache_quant`, `continuous_batching`,
    `on_device_generation`) this is a dict of that object's keywords."""
    compiler_flags: tuple[str, ...] = ()
    """One argument each; `shlex.join` makes `NEURON_CC_FLAGS` of them."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables beside `NEURON_CC_FLAGS` that are to be set before the library is imported."""


def handed_through(options: ServingOptions, loader: str) -> dict[str, object]:
    """The options whose values the library's `NeuronConfig` takes as they are, by its own names."""
    written: dict[str, object] = {}
    for name, entry in ServingOptions.model_fields.items():
        marker, value = option(name), getattr(options, name)
        keyword = marker.to.get(loader, "")
        unset = value is None or (value is False and entry.default is False)
        if not marker.computed and _KEYWORD.fullmatch(keyword) and not unset:
            written[keyword] = plain(value)
    return written


def environment_of(options: ServingOptions) -> dict[str, str]:
    """The variables that every library reads."""
    cache = options.compiled_graph_path
    return {} if cache is None else {"NEURON_COMPILE_CACHE_URL": cache}


def put(target: dict[str, object], **values: object) -> dict[str, object]:
    """`target` with the values that are not None."""
    target.update({name: value for name, value in values.items() if value is not None})
    return target


def degree_of(options: ServingOptions) -> int | None:
    """The tensor parallel degree; None where it is not a number yet."""
    degree = options.tensor_parallel_degree
    return degree if isinstance(degree, int) else None


def plain(value: object) -> object:
    """Tuples become lists, models dicts: what JSON holds and the libraries sort in place."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    return [plain(entry) for entry in value] if isinstance(value, tuple) else value
