"""Values for options that nobody set: pure functions of the model's and the machine's facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from djl_python_neuronx.config.device import DeviceInfo
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.rules import Finding

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
    def from_config(
        cls, config: Mapping[str, Any], checkpoint_dtype: str | None = None
    ) -> ModelFacts:
        """Facts from the content of `config.json`, whatever its architecture calls them.

        `checkpoint_dtype` is what the weight files say, for a configuration that does not.
        """
        nested = config.get("text_config")
        config = {**config, **nested} if isinstance(nested, Mapping) else config
        told = (config.get("dtype"), config.get("torch_dtype"), checkpoint_dtype)
        dtypes = (str(dtype).removeprefix("torch.") for dtype in told)
        return cls(
            max_positions=_first(config, *_POSITION_KEYS),
            dtype=next((dtype for dtype in dtypes if dtype in _KNOWN_DTYPES), None),
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
    if options.dtype == "auto":
        filled["dtype"] = dtype_of(facts, loader), "the checkpoint's, but never float16 on a CPU"
    elif loader == "cpu" and options.dtype == "float16":
        filled["dtype"] = "float32", "what the cpu loader computes float16 in"
        facts = replace(facts, dtype="float32")
    else:
        facts = replace(facts, dtype=options.dtype)
    positions = options.n_positions
    if positions is None:
        positions = n_positions(facts, device, loader, slots)
        why = "the model's limit, capped for this machine"
        wanted = (options.context_length_estimate or (0,))[-1]
        if wanted > positions:
            positions = min(wanted, facts.max_positions or wanted)
            why = "what context_length_estimate asks for, within the model's limit"
        filled["n_positions"] = positions, why
    if options.context_length_estimate is None:
        filled["context_length_estimate"] = (
            make_buckets(positions),
            "powers of two up to n_positions",
        )
    return filled


def unsuited(options: ServingOptions, facts: ModelFacts) -> Iterator[Finding]:
    """What the user set and the model cannot do."""
    limit = facts.max_positions
    lengths = {
        "n_positions": options.n_positions,
        "context_length_estimate": (options.context_length_estimate or (0,))[-1],
    }
    for name, length in lengths.items():
        if limit and length and length > limit:
            yield Finding((name,), f"the model was made for {limit} positions; set at most that")


def unused(options: ServingOptions, loader: str) -> dict[str, str]:
    """Options that the user may set and that do nothing, or not what they say, with this loader; with the reason."""
    found = {}
    if options.revision is not None and not options.trust_remote_code:
        # This version loads local folders only.
        found["revision"] = "a local folder has one version, and no code of the model's own is run"
    if loader != "cpu" and options.cpu_threads is not None:
        found["cpu_threads"] = "only the cpu loader computes on the CPU"
    if loader == "cpu" and options.dtype == "float16":
        found["dtype"] = "the cpu loader computes float16 in float32"
    if loader == "cpu" and options.tensor_parallel_degree not in {None, "max", 1}:
        found["tensor_parallel_degree"] = "it counts NeuronCores, and the cpu loader uses none"
    return found


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


def make_buckets(max_len: int, smallest: int = SMALLEST_BUCKET) -> tuple[int, ...]:
    """Doubling lengths from `smallest`, ending with `max_len` itself.

    At most half of a padded row is padding, and a model has few graphs: eight up to 16 384.

    Raises:
        ValueError: a length is not positive.
    """
    if max_len < 1 or smallest < 1:
        message = f"buckets from {smallest} to {max_len} do not exist; expected positive lengths"
        raise ValueError(message)
    doubling = (smallest << power for power in range(max_len.bit_length()))
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
