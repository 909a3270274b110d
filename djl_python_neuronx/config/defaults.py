"""Values for options that nobody set: pure functions of the model's and the machine's facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from djl_python_neuronx.config.device import DeviceInfo
from djl_python_neuronx.config.options import Conflict, ServingOptions

MAX_ROLLING_BATCH_SIZE = 32
"""DJL Serving sends at most this many rows unless it is told another number, so fewer slots would lock rows out."""
MAX_POSITIONS = 4096
MAX_POSITIONS_CPU = 2048
SMALLEST_BUCKET = 128

_POSITION_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len")
_KNOWN_DTYPES = ("float32", "float16", "bfloat16")

Filled = dict[str, tuple[object, str]]
"""Option name to its value and the reason for it."""


@dataclass(frozen=True)
class ModelFacts:
    """What the defaults need to know of a model; None where its configuration does not say."""

    max_positions: int | None = None
    """Longest sequence that the model was trained for."""
    dtype: str | None = None
    """float32, float16 or bfloat16: what the checkpoint is stored in."""
    cache_values_per_token: int | None = None
    """Numbers that the KV cache holds for one token of one sequence, all layers together."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelFacts:
        """Facts from the content of `config.json`, whatever its architecture calls them."""
        nested = config.get("text_config")
        config = {**config, **nested} if isinstance(nested, Mapping) else config
        dtype = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
        return cls(
            max_positions=_first(config, *_POSITION_KEYS),
            dtype=dtype if dtype in _KNOWN_DTYPES else None,
            cache_values_per_token=_cache_values(config),
        )


def fill(options: ServingOptions, facts: ModelFacts, device: DeviceInfo, loader: str) -> Filled:
    """A value for every option that is still None or `auto` and follows from facts."""
    filled: Filled = {}
    slots = options.max_rolling_batch_size or MAX_ROLLING_BATCH_SIZE
    if options.max_rolling_batch_size is None:
        filled["max_rolling_batch_size"] = slots, "what DJL Serving sends at most"
    degree = tensor_parallel_degree(device, loader)
    if options.tensor_parallel_degree in {None, "max"}:
        filled["tensor_parallel_degree"] = degree, "all cores" if loader != "cpu" else "a CPU"
    dtype = options.dtype
    if dtype == "auto":
        filled["dtype"] = dtype_of(facts, loader), "the checkpoint's, but never float16 on a CPU"
    positions = options.n_positions
    if positions is None:
        positions = n_positions(facts, device, loader, slots)
        filled["n_positions"] = positions, "the model's limit, capped for this machine"
    if options.context_length_estimate is None:
        filled["context_length_estimate"] = buckets(positions), "powers of two up to n_positions"
    if options.cpu_threads is None:
        filled["cpu_threads"] = device.cpus, "the CPUs of this process"
    return filled


def unsuited(options: ServingOptions, facts: ModelFacts, loader: str) -> Iterator[Conflict]:
    """What the user set and the model or the loader cannot do."""
    limit = facts.max_positions
    if limit and options.n_positions and options.n_positions > limit:
        yield Conflict(
            ("n_positions",), f"the model was made for {limit} positions; set at most that"
        )
    if loader == "cpu" and options.dtype == "float16":
        yield Conflict(
            ("dtype",), "the cpu loader computes in float32 and bfloat16; set fp32, bf16 or auto"
        )


def unused(options: ServingOptions, loader: str) -> dict[str, str]:
    """Options that the user may set and that do nothing with this loader, with the reason."""
    if loader == "cpu" and options.tensor_parallel_degree not in {None, "max", 1}:
        return {"tensor_parallel_degree": "it counts NeuronCores, and the cpu loader uses none"}
    return {}


def n_positions(facts: ModelFacts, device: DeviceInfo, loader: str, slots: int) -> int:
    """Tokens per slot: the model's own limit within `MAX_POSITIONS`; on a CPU what half of its memory caches."""
    limit = min(facts.max_positions or MAX_POSITIONS, MAX_POSITIONS)
    if loader != "cpu":
        return limit
    limit = min(limit, MAX_POSITIONS_CPU)
    values, width = facts.cache_values_per_token, 4 if dtype_of(facts, loader) == "float32" else 2
    while (
        values
        and device.memory_bytes
        and limit > SMALLEST_BUCKET
        and slots * limit * values * width > device.memory_bytes // 2
    ):
        limit //= 2
    return limit


def buckets(max_len: int) -> tuple[int, ...]:
    """Ascending lengths that graphs exist for: doubling from `SMALLEST_BUCKET`, the last is `max_len` itself."""
    doubling = (SMALLEST_BUCKET << power for power in range(max_len.bit_length()))
    return (*(length for length in doubling if length < max_len), max_len)


def dtype_of(facts: ModelFacts, loader: str) -> str:
    """What `auto` computes in: the checkpoint's own type, float32 where that is unknown or float16 on a CPU."""
    dtype = facts.dtype or "float32"
    return "float32" if loader == "cpu" and dtype == "float16" else dtype


def tensor_parallel_degree(device: DeviceInfo, loader: str) -> int:
    """Every core of the machine; 1 on a CPU."""
    return 1 if loader == "cpu" else max(device.neuron_cores, 1)


def _cache_values(config: Mapping[str, Any]) -> int | None:
    layers = _first(config, "num_hidden_layers", "n_layer", "num_layers")
    heads = _first(config, "num_attention_heads", "n_head")
    hidden = _first(config, "hidden_size", "n_embd", "d_model")
    if layers is None or heads is None or hidden is None:
        return None
    kv_heads = (
        1 if config.get("multi_query") is True else _first(config, "num_key_value_heads") or heads
    )
    head_size = _first(config, "head_dim") or hidden // heads
    return 2 * layers * kv_heads * head_size


def _first(config: Mapping[str, Any], *keys: str) -> int | None:
    """The first of `keys` that holds a positive whole number."""
    values = (config.get(key) for key in keys)
    return next((value for value in values if type(value) is int and value > 0), None)
