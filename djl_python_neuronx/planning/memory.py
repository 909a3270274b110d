"""Device memory of a model on each core, how its heads divide among cores, and where it fits instead.

Sizes are in bytes and, in messages, in GiB (2**30). Not counted, because small and within `HEADROOM_BYTES`: norms,
biases and routers, which every core holds whole, scales of quantised weights, and widths of embeddings and feed-forward
layers rounded up to the degree.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from djl_python_neuronx.planning.arguments import blocks_of
from djl_python_neuronx.planning.capabilities import round_up
from djl_python_neuronx.planning.case import Case, NeuronBackend
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS, capability_of
from djl_python_neuronx.planning.machines import GIB, INSTANCES, DeviceInfo, legal_degrees, named
from djl_python_neuronx.planning.model import ModelFacts

HEADROOM_BYTES = GIB
"""Left on every core for activations, scratch space, compiled programs and the runtime: an assumption."""
SPARE = 20
"""Defaults and advice leave 1/20 of a core's memory free on top of the headroom. Values that the user sets may use
it."""

_PROCESS_BYTES = GIB // 2
"""An engine's process with its libraries, before the first weight: 170 to 290 MiB measured with the cpu backend."""
_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1}
_LENGTH_STEP = 128
"""Tokens: advised lengths are multiples of this."""


@dataclass(frozen=True)
class CoreMemory:
    """Bytes on one core; with a draft model on other cores than the model, on a core that holds both."""

    weights: int
    """An even share of the weights that are on the device."""
    kv_cache: int
    """An even share of the cache of all slots."""
    padding: int
    """Bytes that the degree adds to both: heads and vocabulary rounded up to it, KV heads copied to all cores."""
    headroom: int
    capacity: int
    """Memory of a core; 0: not known."""
    possible: bool = True
    """False: the degree needs more cores than there are."""

    @property
    def needed(self) -> int:
        """All parts together, headroom included."""
        return self.weights + self.kv_cache + self.padding + self.headroom

    @property
    def read(self) -> int:
        """Bytes that a decode step of full slots reads: all weights and the whole cache, with padding.

        Divided by `DeviceInfo.core_bytes_per_s` it is a lower bound of the step's time: AWS measured two to seven times
        as much, because each layer takes another 0.15 to 0.35 ms (Llama and Mistral, 7B to 70B, SDK 2.18).
        """
        return self.needed - self.headroom

    @property
    def fits(self) -> bool:
        """True if the cores exist and hold what is needed; an unknown `capacity` holds everything."""
        return self.possible and (self.capacity == 0 or self.needed <= self.capacity)

    @property
    def roomy(self) -> bool:
        """True if it fits with `SPARE` left."""
        return self.possible and (
            self.capacity == 0 or self.needed <= self.capacity * (SPARE - 1) // SPARE
        )


@dataclass(frozen=True)
class Load:
    """The options that decide how much memory a model needs."""

    max_model_len: int
    num_slots: int
    dtype: str
    """float32, float16 or bfloat16."""
    weight_dtype: str | None = None
    """int8 or fp8: of the layers' weights. Embedding and output projection keep `dtype`."""
    kv_dtype: str | None = None
    """int8 or fp8: of the KV cache; None: `dtype`."""
    on_device_embedding: bool = False
    """False: a library with `embeds_on_host` keeps the embedding in the host's memory."""
    group_query_attention: str | None = None
    shard_over_sequence: bool = False
    stages: int = 1
    """Pipeline stages, each with its own cores and layers."""
    expert_groups: int = 1
    """Groups of cores, each with its own experts and a copy of all else."""
    attention_groups: int = 1
    """Groups of cores, each with its own sequences in a decode step."""
    in_blocks: bool = False
    """The KV cache is kept in blocks."""
    num_blocks: int | None = None
    """With the one for padding; None: as many as all slots need at their full length."""
    block_size: int | None = None
    """Tokens; None: `max_model_len`."""
    draft: ModelFacts | None = None
    """The draft model, in `dtype`; not counted if its size is not known."""
    draft_degree: int | None = None
    """Cores that share the draft model, from the model's first one on; None: as many as share the model."""

    @classmethod
    def of(cls, case: Case) -> Load:
        """Return the load of a case whose options are filled in.

        Raises:
            ValueError: the options are not filled in.
        """
        options = case.effective
        length, slots = options.max_model_len, options.max_rolling_batch_size
        if length is None or slots is None or options.dtype == "auto":
            message = (
                "the memory of options that are not filled in is not known; call `assess` first"
            )
            raise ValueError(message)
        if case.on_cpu:
            return cls(length, slots, options.dtype, draft=case.draft)
        return cls(
            length,
            slots,
            options.dtype,
            weight_dtype=options.weight_dtype,
            kv_dtype=options.kv_cache_quantize,
            on_device_embedding=bool(options.on_device_embedding),
            group_query_attention=options.group_query_attention,
            shard_over_sequence=bool(options.shard_over_sequence),
            # As `placement` counts the cores, of a library that refuses these too.
            stages=case.options.pipeline_parallel_degree,
            expert_groups=case.options.ep_degree,
            attention_groups=options.attention_dp_degree or 1,
            in_blocks=options.in_blocks,
            num_blocks=options.pa_num_blocks,
            block_size=options.pa_block_size,
            draft=case.draft,
            draft_degree=options.draft_model_tp_size if case.effective.drafting else None,
        )

    @property
    def worlds(self) -> int:
        """Tensor parallel groups: one for each pipeline stage of each group of experts."""
        return self.stages * self.expert_groups


def core_memory(case: Case) -> CoreMemory | None:
    """Return the memory on each core of the case's machine, or on its host with the cpu backend.

    None if sizes of the model are not known or lengths and slots are not filled in.
    """
    options, device = case.options, case.device
    unknown = None in {options.max_model_len, options.max_rolling_batch_size}
    if case.model.num_parameters is None or unknown:
        return None
    if case.on_cpu:
        host, load = case.host_memory, Load.of(case)
        return needed(case.model, load, degree=1, core_memory_bytes=host, backend=case.backend)
    return _on(device, case.model, Load.of(case), case.degree, case.backend)


def needed(
    model: ModelFacts,
    load: Load,
    *,
    degree: int,
    core_memory_bytes: int,
    backend: str,
    cores: int = 0,
) -> CoreMemory:
    """Return the memory on each of `degree` cores. `cores`: how many exist, 0 if that is not known.

    Raises:
        ValueError: the number of parameters is not known (`model.num_parameters` is None).
    """
    if model.num_parameters is None:
        message = f"the number of parameters of a {model.model_type!r} model is not known"
        raise ValueError(message)
    weights, kv_cache, padding = _parts(model, load, degree, backend)
    if load.draft is not None and load.draft.num_parameters is not None:
        unquantised = Load(load.max_model_len, load.num_slots, load.dtype)
        extra = _parts(load.draft, unquantised, load.draft_degree or degree, backend)
        weights, kv_cache, padding = weights + extra[0], kv_cache + extra[1], padding + extra[2]
    possible = cores == 0 or max(degree * load.worlds, load.draft_degree or 0) <= cores
    return CoreMemory(weights, kv_cache, padding, HEADROOM_BYTES, core_memory_bytes, possible)


def weight_bytes(model: ModelFacts, load: Load) -> int:
    """Return the bytes of all weights in a checkpoint of this dtype, tied ones once; 0 if unknown."""
    layers, head, embedding = _tensors(model)
    table = 0 if model.tied_embeddings else head
    width = _WIDTHS[load.dtype]
    return layers * _WIDTHS[load.weight_dtype or load.dtype] + (table + embedding) * width


def host_bytes(case: Case, kind: str | None, stored: str | None) -> int | None:
    """Return the bytes of host memory that one load takes at its peak, its process included; None if unknown.

    Without a draft model. Memory that the kernel can take back is left out: mapped files of another type than `dtype`.

    cpu: the weights and the cache (measured: benchmarks/README.md, "Memory of a load"). transformers-neuronx: a layer
    after the other, each with the copy that is cut and padded, and the embedding if it stays there; of pickles first
    the whole checkpoint, and a copy. NxD Inference: the whole checkpoint and the copy that is cut; of `ranks` only
    that. Source: transformers-neuronx 0.13, module.py `materialize` and `load_pytorch_model_bin`;
    neuronx-distributed-inference 0.9, application_base.py `load_weights`; neuronx-distributed 0.18, model_builder.py
    `shard_checkpoint`. Not measured on a device.

    Args:
        case: With options that are filled in.
        kind: The weights' `WeightsKind`; None if they are not here, taken as safetensors.
        stored: The weights' type; None or one that is not known: `dtype`.
    """
    if case.model.num_parameters is None or core_memory(case) is None:
        return None
    load = Load.of(case)
    weights = weight_bytes(case.model, load)
    if case.neuron is None:
        return _PROCESS_BYTES + weights + cache_bytes(case.model, load)
    whole = replace(load, weight_dtype=None, dtype=stored if stored in _WIDTHS else load.dtype)
    files = weight_bytes(case.model, whole)
    small = replace(load, max_model_len=1, num_slots=1)  # the cache is the device's
    *_, padding = _parts(case.model, small, case.degree, case.backend)
    cut = weights + padding * case.degree
    if not case.neuron.loads_by_layer:
        return _PROCESS_BYTES + cut + (0 if kind == "ranks" else files)
    if kind == "pickle":
        return _PROCESS_BYTES + files + cut
    layers, head, embedding = (number * _WIDTHS[load.dtype] for number in _tensors(case.model))
    layer = layers // (case.model.num_layers or 1)
    table = 0 if load.on_device_embedding else embedding
    return _PROCESS_BYTES + table + 2 * max(layer, head)


def cache_bytes(model: ModelFacts, load: Load) -> int:
    """Return the bytes of the KV cache of all slots, without padding or copies; 0 if unknown."""
    tokens = load.max_model_len * load.num_slots
    if load.in_blocks:
        size = load.block_size or load.max_model_len
        blocks = load.num_blocks or blocks_of(load.max_model_len, load.num_slots, size)
        tokens = blocks * size
    return (model.cache_values_per_token or 0) * tokens * _WIDTHS[load.kv_dtype or load.dtype]


def _tensors(model: ModelFacts) -> tuple[int, int, int]:
    """Return the parameters of the layers, of the output projection (tied or not) and of the embedding."""
    table = (model.hidden_size or 0) * (model.vocab_size or 0)
    around = model.embedding_parameters + (0 if model.tied_embeddings else table)
    return max((model.num_parameters or 0) - around, 0), table, model.embedding_parameters


def _parts(model: ModelFacts, load: Load, degree: int, backend: str) -> tuple[int, int, int]:
    """Return the bytes of weights, cache and padding on each core."""
    if (neuron := NEURON_BACKENDS.get(backend)) is None:
        return weight_bytes(model, load), cache_bytes(model, load), 0
    cache = cache_bytes(model, _windowed(model, load, backend))
    layers, head, embedding = _tensors(model)
    if neuron.embeds_on_host and not load.on_device_embedding:
        embedding = 0
    width = _WIDTHS[load.dtype]
    weight_width = _WIDTHS[load.weight_dtype or load.dtype]
    # Both libraries hold a second copy of a tied table for the output projection.
    apart = min(_expert_weights(model), layers) if load.expert_groups > 1 else 0
    layers = layers - apart + _share(apart, load.expert_groups)
    weights = _share(layers * weight_width, load.stages) + (head + embedding) * width
    added, cached_heads = _laid_out(model, load, degree, neuron)
    kv_heads = model.num_kv_heads or 1
    added_cache = cache * (cached_heads - kv_heads) // kv_heads
    vocab = model.vocab_size or 0
    padding = _share(added * weight_width + added_cache, load.stages)
    padding += (round_up(vocab, degree) - vocab) * (model.hidden_size or 0) * width
    cores = degree * load.stages
    return _share(weights, degree), _share(cache, cores), _share(padding, degree)


def _laid_out(model: ModelFacts, load: Load, degree: int, neuron: NeuronBackend) -> tuple[int, int]:
    """Return the parameters that padded and copied heads add, and the KV heads of the cache."""
    heads, kv_heads, size = model.num_heads, model.num_kv_heads, model.head_dim
    if not heads or not kv_heads or not size or kv_heads > heads:
        return 0, kv_heads or 1
    if not can_split(model, degree, neuron.name):
        return 0, kv_heads
    strategy = load.group_query_attention
    padded = neuron.padded_heads(model, degree, strategy, load.num_slots)
    per_layer = 2 * (model.hidden_size or 0) * size
    weights = (model.num_layers or 0) * per_layer * (padded.query - heads + padded.kv - kv_heads)
    by_slots = strategy == "shard-over-batch" and load.num_slots % degree == 0
    if load.shard_over_sequence or by_slots:
        return weights, kv_heads
    if load.attention_groups > 1:
        degree = max(degree // load.attention_groups, 1)
        padded = neuron.padded_heads(model, degree, strategy, load.num_slots)
    return weights, round_up(padded.kv, degree)


def _windowed(model: ModelFacts, load: Load, backend: str) -> Load:
    """Return the load with a cache as long as the model's sliding window, if the library allocates only that.

    Source: neuronx-distributed-inference 0.9, modules/kvcache/kv_cache_manager.py: not with blocks or groups.
    """
    capability = capability_of(backend, model.model_type)
    plain = not load.in_blocks and load.attention_groups == 1
    if capability is None or not capability.window_cache or not model.sliding_window or not plain:
        return load
    return replace(load, max_model_len=min(load.max_model_len, model.sliding_window))


def _expert_weights(model: ModelFacts) -> int:
    """Return the parameters of all experts; each has three matrices."""
    if model.num_experts == 1:
        return 0
    expert = 3 * (model.hidden_size or 0) * (model.intermediate_size or 0)
    return (model.num_layers or 0) * model.num_experts * expert


def _share(value: int, degree: int) -> int:
    return -(-value // degree)


def can_split(model: ModelFacts, degree: int, backend: str) -> bool:
    """Return whether the library can split the model over `degree` cores, with padding if it pads."""
    return indivisible(model, degree, backend) is None


def indivisible(model: ModelFacts, degree: int, backend: str) -> str | None:
    """Name the condition on the degree that it breaks, see `Capability.indivisible`; None if it breaks none."""
    capability = capability_of(backend, model.model_type)
    return None if capability is None else capability.indivisible(model, degree)


class Fit(NamedTuple):
    """A degree and a machine that hold a model; as text, the settings."""

    degree: int
    instance_type: str | None
    """None: this machine."""
    draft_degree: int | None = None
    """None: as set."""

    def __str__(self) -> str:
        setting = f"tensor_parallel_degree={self.degree}"
        if self.draft_degree is not None:
            setting += f" with draft_model_tp_size={self.draft_degree}"
        return f"{setting} on {self.instance_type}" if self.instance_type else setting


def smallest_fit(
    model: ModelFacts, load: Load, device: DeviceInfo, backend: str, *, below: int = 0
) -> Fit | None:
    """Return the smallest choice that holds it with `SPARE`: more cores of this machine, else an instance type.

    Types of the same family come first. `below`: degrees up to this do not fit here. A draft model with fewer cores
    than the model may get as many as the model. None if nothing holds it.
    """
    if model.num_parameters is None or backend not in NEURON_BACKENDS:
        return None
    machines = [named(name) for name in INSTANCES]
    machines.sort(key=lambda machine: (machine.family != device.family, machine.memory_bytes))
    places = [(None, device, below)] if device.core_memory_bytes else []
    for name, machine, least in (*places, *((one.instance_type, one, 0) for one in machines)):
        cores = machine.visible_cores // load.worlds
        # The documented degrees, and all cores if guides use them.
        offered = {cores, *legal_degrees(machine.family, cores)}
        for degree in sorted(offered.intersection(legal_degrees(machine.family, cores, used=True))):
            if degree <= least or not can_split(model, degree, backend):
                continue
            if _on(machine, model, load, degree, backend).roomy:
                return Fit(degree, name)
            spread = replace(load, draft_degree=degree)
            if load.draft_degree is not None and _on(machine, model, spread, degree, backend).roomy:
                return Fit(degree, name, degree)
    return None


def _on(device: DeviceInfo, model: ModelFacts, load: Load, degree: int, backend: str) -> CoreMemory:
    """Return the memory on each of `degree` cores of a machine. A draft model may need more cores than the model."""
    size, cores = device.core_memory_bytes, device.cores_for(degree)
    return needed(model, load, degree=degree, core_memory_bytes=size, backend=backend, cores=cores)


def savings(case: Case) -> Iterator[str]:
    """Yield settings that each make the model fit on these cores with `SPARE`, with the greatest value that does."""
    load, degree = Load.of(case), case.degree

    def fits(**changes: object) -> bool:
        changed = replace(load, **changes)  # type: ignore[arg-type]
        return _on(case.device, case.model, changed, degree, case.backend).roomy

    if slots := _largest(load.num_slots - 1, lambda number: fits(num_slots=number)):
        yield f"max_rolling_batch_size={slots}"
    steps = _largest(
        (load.max_model_len - 1) // _LENGTH_STEP,
        lambda number: fits(max_model_len=number * _LENGTH_STEP),
    )
    if steps:
        yield f"n_positions={steps * _LENGTH_STEP}"
    quantised = case.capability is None or case.capability.supports("quantize")
    if load.weight_dtype is None and quantised and fits(weight_dtype="int8"):
        yield "quantize=static_int8"
    if (load.draft_degree or degree) < degree and fits(draft_degree=degree):
        yield f"draft_model_tp_size={degree}"


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the greatest number up to `limit` that fits, if all smaller ones fit too; 0 if none does."""
    return bisect.bisect_left(range(1, limit + 1), True, key=lambda number: not fits(number))
