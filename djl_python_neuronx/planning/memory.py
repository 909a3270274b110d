"""Device memory that a model needs on each core: weights, KV cache, and what padding to the degree adds.

Sizes are in bytes and, in words, in GiB (2**30). What is left out is small and lies within `HEADROOM_BYTES`: norms and
biases, which every core holds whole, scales of quantised weights, and feed-forward widths rounded up to the degree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning.capabilities import CAPABILITIES
from djl_python_neuronx.planning.division import keeps, padded_heads, round_up, takes
from djl_python_neuronx.planning.intent import drafting
from djl_python_neuronx.planning.machines import GIB
from djl_python_neuronx.planning.model import ModelFacts

HEADROOM_BYTES = GIB
"""Left on every core for activations, scratch space, compiled programs and the runtime: an assumption."""
SPARE = 20
"""One part in so many of a core that a value chosen or advised here leaves free beside the headroom: what nobody asked
for must not be what just fits. Values that the user set may take all of it."""

_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1}


@dataclass(frozen=True)
class CoreMemory:
    """Bytes on one core; where a draft model lies on other cores than the model, on those that hold both."""

    weights: int
    """An even share of the weights that are on the device."""
    kv_cache: int
    """An even share of the cache of all slots."""
    padding: int
    """What the degree adds to both: heads and vocabulary rounded up to it, KV heads copied until every core has one."""
    headroom: int
    capacity: int
    """What a core has; 0: not known."""
    possible: bool = True
    """False: there are fewer cores than the degree asks for, so nothing fits."""

    @property
    def needed(self) -> int:
        """All parts together, headroom included."""
        return self.weights + self.kv_cache + self.padding + self.headroom

    @property
    def fits(self) -> bool:
        """Whether the cores are there and hold what is needed; a `capacity` that is not known holds everything."""
        return self.possible and (self.capacity == 0 or self.needed <= self.capacity)

    @property
    def roomy(self) -> bool:
        """Whether it fits with `SPARE` to spare."""
        return self.fits and (
            self.capacity == 0 or self.needed <= self.capacity * (SPARE - 1) // SPARE
        )


@dataclass(frozen=True)
class Load:
    """What of the options decides how much memory a model needs."""

    max_model_len: int
    num_slots: int
    dtype: str
    """float32, float16 or bfloat16."""
    weight_dtype: str | None = None
    """int8 or fp8: of the layers' weights. Embedding and output projection keep `dtype`."""
    kv_dtype: str | None = None
    """int8 or fp8: of the KV cache; None: `dtype`."""
    on_device_embedding: bool = False
    """transformers-neuronx keeps the embedding in the host's memory otherwise; NxDI never does."""
    group_query_attention: str | None = None
    shard_over_sequence: bool = False
    stages: int = 1
    """Pipeline stages, each with cores and layers of its own."""
    expert_groups: int = 1
    """Groups of cores, each with experts of its own and a copy of all else."""
    attention_groups: int = 1
    """Groups of cores, each with sequences of its own in a decode step."""
    in_blocks: bool = False
    """The KV cache is kept in blocks, and one more than are asked for."""
    num_blocks: int | None = None
    """None: what all slots at their full length take."""
    block_size: int | None = None
    """Tokens; None: `max_model_len`."""
    draft: ModelFacts | None = None
    """The draft model, in `dtype`; one whose size is not known counts nothing."""
    draft_degree: int | None = None
    """Cores that share the draft model, from the model's first one on; None: as many as share the model."""

    @classmethod
    def of(cls, options: ServingOptions, loader: str, draft: ModelFacts | None = None) -> Load:
        """What filled-in options ask for.

        Raises:
            ValueError: the options are not filled in.
        """
        length, slots = options.max_model_len, options.max_rolling_batch_size
        if length is None or slots is None or options.dtype == "auto":
            message = "memory is counted of filled-in options; use resolve.assess before"
            raise ValueError(message)
        if loader == "cpu":
            return cls(length, slots, options.dtype, draft=draft)
        return cls(
            length,
            slots,
            options.dtype,
            weight_dtype=options.weight_dtype,
            kv_dtype=options.kv_cache_quantize,
            on_device_embedding=bool(options.on_device_embedding),
            group_query_attention=options.group_query_attention,
            shard_over_sequence=bool(options.shard_over_sequence),
            stages=options.pipeline_parallel_degree or 1,
            expert_groups=options.ep_degree or 1,
            attention_groups=options.attention_dp_degree or 1,
            in_blocks=bool(
                options.is_block_kv_layout
                or options.enable_prefix_caching
                or options.enable_chunked_prefill
            ),
            # transformers-neuronx counts the one more among them.
            num_blocks=options.pa_num_blocks and options.pa_num_blocks - (loader == "tnx"),
            block_size=options.pa_block_size,
            draft=draft,
            draft_degree=options.draft_model_tp_size if drafting(options) else None,
        )


def needed(
    facts: ModelFacts,
    load: Load,
    *,
    degree: int,
    core_memory_bytes: int,
    loader: str,
    cores: int = 0,
) -> CoreMemory:
    """Memory on each of `degree` cores; `cores` are those that there are, 0 if that is not known.

    Raises:
        ValueError: the architecture's parameters are not known (`facts.num_parameters` is None).
    """
    if facts.num_parameters is None:
        message = f"the parameters of {facts.model_type!r} are not known, so its memory is not"
        raise ValueError(message)
    weights, kv_cache, padding = _parts(facts, load, degree, loader)
    if load.draft is not None and load.draft.num_parameters is not None:
        draft_degree = load.draft_degree or degree
        unquantised = Load(load.max_model_len, load.num_slots, load.dtype)
        extra = _parts(load.draft, unquantised, draft_degree, loader)
        weights, kv_cache, padding = weights + extra[0], kv_cache + extra[1], padding + extra[2]
    world = degree * load.stages * load.expert_groups
    possible = cores == 0 or max(world, load.draft_degree or 0) <= cores
    return CoreMemory(weights, kv_cache, padding, HEADROOM_BYTES, core_memory_bytes, possible)


def per_core(
    facts: ModelFacts,
    *,
    degree: int,
    max_model_len: int,
    num_slots: int,
    dtype: str,
    weight_dtype: str | None,
    kv_dtype: str | None,
    draft: ModelFacts | None = None,
    core_memory_bytes: int,
    loader: str,
) -> CoreMemory:
    """`needed` of values instead of options.

    Raises:
        ValueError: the architecture's parameters are not known (`facts.num_parameters` is None).
    """
    load = Load(max_model_len, num_slots, dtype, weight_dtype, kv_dtype, draft=draft)
    return needed(facts, load, degree=degree, core_memory_bytes=core_memory_bytes, loader=loader)


def total(facts: ModelFacts, load: Load) -> int:
    """Bytes of all weights and of the cache, on however many cores: what guides give as a model's size.

    Nothing is padded, copied or left on the host. Raises ValueError as `needed` does.
    """
    whole = needed(facts, load, degree=1, core_memory_bytes=0, loader="cpu")
    return whole.weights + whole.kv_cache


def weight_bytes(facts: ModelFacts, load: Load) -> int:
    """All weights as they lie in a checkpoint of this dtype, tied ones once; 0: not known."""
    layers, head, embedding = _tensors(facts)
    table = 0 if facts.tied_embeddings else head
    width = _WIDTHS[load.dtype]
    return layers * _WIDTHS[load.weight_dtype or load.dtype] + (table + embedding) * width


def cache_bytes(facts: ModelFacts, load: Load) -> int:
    """The KV cache of all slots, nothing padded or copied; 0: not known."""
    tokens = load.max_model_len * load.num_slots
    if load.in_blocks:
        size = load.block_size or load.max_model_len
        blocks = load.num_blocks or blocks_of(load.max_model_len, load.num_slots, size)
        tokens = (blocks + 1) * size
    return (facts.cache_values_per_token or 0) * tokens * _WIDTHS[load.kv_dtype or load.dtype]


def blocks_of(max_model_len: int, num_slots: int, block_size: int) -> int:
    """Blocks that all slots at their full length take."""
    return num_slots * -(-max_model_len // block_size)


def _tensors(facts: ModelFacts) -> tuple[int, int, int]:
    """Numbers in the layers, in the output projection, whether or not it is the embedding, and in the embedding."""
    table = (facts.hidden_size or 0) * (facts.vocab_size or 0)
    around = facts.embedding_parameters + (0 if facts.tied_embeddings else table)
    return max((facts.num_parameters or 0) - around, 0), table, facts.embedding_parameters


def _parts(facts: ModelFacts, load: Load, degree: int, loader: str) -> tuple[int, int, int]:
    """Bytes on each core: weights, cache, padding."""
    if loader == "cpu":
        return weight_bytes(facts, load), cache_bytes(facts, load), 0
    cache = cache_bytes(facts, _windowed(facts, load, loader))
    layers, head, embedding = _tensors(facts)
    if loader == "tnx" and not load.on_device_embedding:
        embedding = 0
    width = _WIDTHS[load.dtype]
    weight_width = _WIDTHS[load.weight_dtype or load.dtype]
    # Both libraries hold a second copy of a tied table for the output projection.
    apart = min(_expert_weights(facts), layers) if load.expert_groups > 1 else 0
    layers = layers - apart + _share(apart, load.expert_groups)
    weights = _share(layers * weight_width, load.stages) + (head + embedding) * width
    added, cached_heads = _laid_out(facts, load, degree, loader)
    kv_heads = facts.num_kv_heads or 1
    added_cache = cache * (cached_heads - kv_heads) // kv_heads
    vocab = facts.vocab_size or 0
    padding = _share(added * weight_width + added_cache, load.stages)
    padding += (round_up(vocab, degree) - vocab) * (facts.hidden_size or 0) * width
    cores = degree * load.stages
    return _share(weights, degree), _share(cache, cores), _share(padding, degree)


def _laid_out(facts: ModelFacts, load: Load, degree: int, loader: str) -> tuple[int, int]:
    """Numbers that padded and copied heads add to the weights, and KV heads that the cache then has."""
    heads, kv_heads, size = facts.num_heads, facts.num_kv_heads, facts.head_dim
    if not heads or not kv_heads or not size or kv_heads > heads:
        return 0, kv_heads or 1
    if not takes(facts, degree, loader):
        return 0, kv_heads or 1
    way = load.group_query_attention
    if way and loader == "tnx" and not keeps(way, facts, load.num_slots, degree):
        way = None
    padded = padded_heads(heads, kv_heads, degree, loader, way)
    per_layer = 2 * (facts.hidden_size or 0) * size
    weights = (facts.num_layers or 0) * per_layer * (padded.query - heads + padded.kv - kv_heads)
    if load.shard_over_sequence or way == "shard-over-batch":
        return weights, kv_heads
    if loader == "nxdi" and load.attention_groups > 1:
        group = max(degree // load.attention_groups, 1)
        return weights, round_up(padded_heads(heads, kv_heads, group, loader).kv, group)
    return weights, round_up(padded.kv, degree)


def _windowed(facts: ModelFacts, load: Load, loader: str) -> Load:
    """The same with a cache of as many rows as the model's window has, where the library makes that.

    Source: neuronx-distributed-inference 0.9, modules/kvcache/kv_cache_manager.py: in neither blocks nor groups.
    """
    capability = CAPABILITIES[loader].get(facts.model_type or "")
    plain = not load.in_blocks and load.attention_groups == 1
    if capability is None or not capability.window_cache or not facts.sliding_window or not plain:
        return load
    return replace(load, max_model_len=facts.sliding_window)


def _expert_weights(facts: ModelFacts) -> int:
    """Numbers in the matrices of all experts, of which there are three each."""
    if facts.num_experts == 1:
        return 0
    expert = 3 * (facts.hidden_size or 0) * (facts.intermediate_size or 0)
    return (facts.num_layers or 0) * facts.num_experts * expert


def _share(value: int, degree: int) -> int:
    return -(-value // degree)
