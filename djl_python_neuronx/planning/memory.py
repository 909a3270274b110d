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

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning.arguments import blocks_of
from djl_python_neuronx.planning.capabilities import round_up
from djl_python_neuronx.planning.case import Case, NeuronBackend
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.lora import adapter_values
from djl_python_neuronx.planning.machines import GIB, INSTANCES, legal_degrees, named
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.rules import OPEN

HEADROOM_BYTES = GIB
"""Left on every core for activations, scratch space, compiled programs and the runtime: an assumption."""
SPARE = 20
"""Defaults and advice leave 1/20 of a core's memory free on top of the headroom. Values that the user sets may use
it."""

_PROCESS_BYTES = GIB // 2
"""An engine's process with its libraries, before the first weight: 170 to 290 MiB measured with the cpu backend."""
_COMPILER_BYTES = (GIB, 4 * GIB)
"""One compiler at its peak, least and most: an assumption."""
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
    adapters: int = 0
    """Places for LoRA adapters, taken or not."""

    @property
    def needed(self) -> int:
        """All parts together, headroom included."""
        return self.weights + self.kv_cache + self.padding + self.adapters + self.headroom

    @property
    def read(self) -> int:
        """Bytes that a decode step of full slots reads: all weights and the whole cache, with padding, no adapters.

        Divided by `DeviceInfo.core_bytes_per_s` it is a lower bound of the step's time: AWS measured two to seven times
        as much, because each layer takes another 0.15 to 0.35 ms (Llama and Mistral, 7B to 70B, SDK 2.18).
        """
        return self.weights + self.kv_cache + self.padding

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


def core_memory(case: Case) -> CoreMemory | None:
    """Return the memory on each core of the case's machine, or on its host with the cpu backend.

    None if no model runs, sizes of the model are not known, or lengths and slots are not filled in.
    """
    options = case.options
    sizes = {options.max_model_len, options.max_rolling_batch_size, case.model.num_parameters}
    if options.simulated or None in sizes or options.dtype == "auto":
        return None
    weights, kv_cache, padding = _parts(case)
    most = case.degree * case.worlds
    if case.draft is not None and case.draft.num_parameters is not None:
        alone = _draft_alone(case, case.draft)
        extra = _parts(alone)
        weights, kv_cache, padding = weights + extra[0], kv_cache + extra[1], padding + extra[2]
        most = max(most, alone.degree)
    device = case.device
    cores = 0 if case.on_cpu else device.cores_for(case.degree)
    capacity = case.host_memory if case.on_cpu else device.core_memory_bytes
    possible = cores == 0 or most <= cores
    adapters = _adapters(case)
    return CoreMemory(weights, kv_cache, padding, HEADROOM_BYTES, capacity, possible, adapters)


def _draft_alone(case: Case, draft: ModelFacts) -> Case:
    """Return the case of the draft model: the same lengths, slots and dtype, and nothing of the layout."""
    options = case.options
    shape = {
        "n_positions": (options.max_model_len or 0) + case.lookahead,
        "max_rolling_batch_size": options.max_rolling_batch_size,
        "dtype": options.dtype,
        "tensor_parallel_degree": case.draft_degree or case.degree,
    }
    return Case(ServingOptions().model_copy(update=shape), draft, case.machine, case.neuron)


def _widths(case: Case) -> tuple[int, int, int]:
    """Return the bytes of a number: in embedding and output projection, in the layers' weights, and in the cache."""
    options = case.effective
    layers, cache = options.weight_dtype, options.kv_cache_quantize
    if options.modules_to_not_convert not in {None, ("lm_head",)}:
        layers = None  # which layers it names is not known here
    if case.on_cpu:
        layers = cache = None
    dtypes = (options.dtype, layers or options.dtype, cache or options.dtype)
    table_width, layer_width, cache_width = (_WIDTHS[dtype] for dtype in dtypes)
    return table_width, layer_width, cache_width


def weight_bytes(case: Case) -> int:
    """Return the bytes of all weights in a checkpoint of the options' types, tied ones once; 0 if unknown."""
    layers, head, embedding = _tensors(case.model)
    table = 0 if case.model.tied_embeddings else head
    width, layer_width, _ = _widths(case)
    return layers * layer_width + (table + embedding) * width


def float32_bytes(model: ModelFacts, count: int | None = None) -> int:
    """Return the bytes of a model's weights in float32, of its first `count` layers with a count; 0 if unknown."""
    layers, head, embedding = _tensors(model)
    total = model.num_layers or 1
    kept = layers * (total if count is None else count) // total
    return 4 * (kept + embedding + (0 if model.tied_embeddings else head))


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
    if core_memory(case) is None:
        return None
    weights = weight_bytes(case)
    if case.neuron is None:
        return _PROCESS_BYTES + weights + cache_bytes(case)
    dtype = stored if stored in _WIDTHS else case.options.dtype
    files = weight_bytes(case.with_options(dtype=dtype, quantize=None))
    # The cache is the device's.
    *_, padding = _parts(case.with_options(n_positions=1, max_rolling_batch_size=1))
    cut = weights + padding * case.degree
    if not case.neuron.loads_by_layer:
        return _PROCESS_BYTES + cut + (0 if kind == "ranks" else files)
    if kind == "pickle":
        return _PROCESS_BYTES + files + cut
    width = _widths(case)[0]
    layers, head, embedding = (number * width for number in _tensors(case.model))
    layer = layers // (case.model.num_layers or 1)
    table = 0 if case.effective.on_device_embedding else embedding
    return _PROCESS_BYTES + table + 2 * max(layer, head)


@dataclass(frozen=True)
class CompileMemory:
    """Host memory of a compile at its peak, with as many compilers at once as the host holds: an estimate."""

    least: int
    most: int
    workers: int
    """Compilers that run at once."""


def compile_memory(
    case: Case, num_graphs: int, load: int | None, available: int | None
) -> CompileMemory | None:
    """Return the host memory of a compile; None if it is unknown or nothing is compiled.

    While its compilers run, NxD Inference holds the part of one core twice, once more for each further kind of graph
    (torch's tensors and the copies that XLA traces), at most four times; transformers-neuronx what a load takes. A
    compiler takes 1 to 4 GiB. Source: neuronx-distributed 0.18, model_builder.py `_generate_hlo` and `trace`, which
    runs as many compilers as Python's ThreadPoolExecutor; transformers-neuronx 0.13, base.py `compile`: one for each
    graph. Not measured on a device; users report that an 8B model on one core is killed with 32 GiB while it is traced
    (github.com/aws-neuron/neuronx-distributed-inference/issues/26), and that a 1B model compiles with 16.
    To quantise weights, NxD Inference loads all in float32 first (application_base.py, `load_hf_model`).

    Args:
        case: With options that are filled in.
        num_graphs: The graphs to compile.
        load: See `host_bytes`.
        available: The host's memory; None if unknown, which limits no compilers.
    """
    core = core_memory(case.with_options(n_positions=1, max_rolling_batch_size=1))
    if case.neuron is None or core is None or load is None or num_graphs == 0:
        return None
    least = most = load
    workers = num_graphs
    if not case.neuron.loads_by_layer:
        part = core.weights + core.padding
        least, most = _PROCESS_BYTES + 2 * part, _PROCESS_BYTES + 4 * part
        workers = min(num_graphs, case.device.cpus + 4, 32)
    least_each, most_each = _COMPILER_BYTES
    # By the lower estimate, so that no compile that works without a limit gets slower.
    room = workers if available is None else (available - least) // least_each
    workers = case.options.compilation_worker_count or max(1, min(workers, room))
    quantised = 0
    if case.effective.quantize is not None and not case.neuron.loads_by_layer:
        quantised = _PROCESS_BYTES + float32_bytes(case.model) + weight_bytes(case)
    least = max(least + workers * least_each, quantised)
    return CompileMemory(least, max(most + workers * most_each, quantised), workers)


def cache_bytes(case: Case) -> int:
    """Return the bytes of the KV cache of all slots, without padding or copies; 0 if unknown.

    Some libraries allocate the model's sliding window alone. Source: neuronx-distributed-inference 0.9,
    modules/kvcache/kv_cache_manager.py: not with blocks or groups.
    """
    options, model = case.effective, case.model
    length, slots = (
        (options.max_model_len or 0) + case.lookahead,
        options.max_rolling_batch_size or 0,
    )
    tokens = length * slots
    if options.in_blocks and not case.on_cpu:
        size = options.pa_block_size or length
        tokens = size * (options.pa_num_blocks or blocks_of(length, slots, size))
    elif case.windowed_cache and model.sliding_window and (options.attention_dp_degree or 1) == 1:
        tokens = min(length, model.sliding_window) * slots
    return (model.cache_values_per_token or 0) * tokens * _widths(case)[2]


def _tensors(model: ModelFacts) -> tuple[int, int, int]:
    """Return the parameters of the layers, of the output projection (tied or not) and of the embedding."""
    table = (model.hidden_size or 0) * (model.vocab_size or 0)
    around = model.embedding_parameters + (0 if model.tied_embeddings else table)
    return max((model.num_parameters or 0) - around, 0), table, model.embedding_parameters


def _parts(case: Case) -> tuple[int, int, int]:
    """Return the bytes of weights, cache and padding on each core."""
    if case.neuron is None:
        return weight_bytes(case), cache_bytes(case), 0
    model, degree, cache = case.model, case.degree, cache_bytes(case)
    # As `placement` counts the cores, of a library that refuses it too.
    expert_groups = case.options.ep_degree
    layers, head, embedding = _tensors(model)
    if case.neuron.embeds_on_host and not case.effective.on_device_embedding:
        embedding = 0
    width, layer_width, _ = _widths(case)
    # Both libraries hold a second copy of a tied table for the output projection.
    apart = min(_expert_weights(model), layers) if expert_groups > 1 else 0
    layers = layers - apart + _share(apart, expert_groups)
    weights = layers * layer_width + (head + embedding) * width
    added, cached_heads = _laid_out(case, case.neuron)
    kv_heads = model.num_kv_heads or 1
    added_cache = cache * (cached_heads - kv_heads) // kv_heads
    vocab = model.vocab_size or 0
    padding = added * layer_width + added_cache
    padding += (round_up(vocab, degree) - vocab) * (model.hidden_size or 0) * width
    return _share(weights, degree), _share(cache, degree), _share(padding, degree)


def _adapters(case: Case) -> int:
    """Return the bytes of all places for adapters on each core.

    Each place has two matrices for each layer that adapters change, with the largest rank. One is divided among the
    cores, as the layer, and by choice the other, whose side is the hidden size. A copy for each slot has the other
    whole. Source: neuronx-distributed-inference 0.9, modules/lora_serving/lora_layer.py, `weight` and `weight_active`.
    """
    options, model, degree = case.effective, case.model, case.degree
    if not options.enable_lora:
        return 0
    if case.neuron is None:
        values = adapter_values(model, options.max_lora_rank, options.lora_target_modules or ())
        return options.max_loras * values * _widths(case)[0]
    padded = case.neuron.padded_heads(model, degree, None, case.slots)
    size, hidden, inner = (
        value or 0 for value in (model.head_dim, model.hidden_size, model.intermediate_size)
    )
    sides = {
        **dict.fromkeys(("q_proj", "o_proj"), padded.query * size),
        **dict.fromkeys(("k_proj", "v_proj"), padded.kv * size),
    }
    config = case.neuron.write_arguments(case).neuron_config["lora_config"]
    places, slots = config["max_loras"], config["batch_size"]
    stored = _share(hidden, degree if config["lora_shard_linear_layer"] else 1)
    parts = [_share(sides.get(layer, inner), degree) for layer in config["target_modules"]]
    numbers = sum(places * (stored + part) + slots * (hidden + part) for part in parts)
    return (model.num_layers or 0) * options.max_lora_rank * int(numbers) * _widths(case)[0]


def _laid_out(case: Case, neuron: NeuronBackend) -> tuple[int, int]:
    """Return the parameters that padded and copied heads add, and the KV heads of the cache."""
    options, model, degree = case.effective, case.model, case.degree
    heads, kv_heads, size = model.num_heads, model.num_kv_heads, model.head_dim
    if not heads or not kv_heads or not size or kv_heads > heads:
        return 0, kv_heads or 1
    if case.indivisible(degree):
        return 0, kv_heads
    strategy, slots = options.group_query_attention, options.max_rolling_batch_size or 0
    padded = neuron.padded_heads(model, degree, strategy, slots)
    per_layer = 2 * (model.hidden_size or 0) * size
    weights = (model.num_layers or 0) * per_layer * (padded.query - heads + padded.kv - kv_heads)
    by_slots = strategy == "shard-over-batch" and slots % degree == 0
    if options.shard_over_sequence or by_slots:
        return weights, kv_heads
    if (groups := options.attention_dp_degree or 1) > 1:
        degree = max(degree // groups, 1)
        padded = neuron.padded_heads(model, degree, strategy, slots)
    return weights, round_up(padded.kv, degree)


def _expert_weights(model: ModelFacts) -> int:
    """Return the parameters of all experts; each has three matrices."""
    if model.num_experts == 1:
        return 0
    expert = 3 * (model.hidden_size or 0) * (model.intermediate_size or 0)
    return (model.num_layers or 0) * model.num_experts * expert


def _share(value: int, degree: int) -> int:
    return -(-value // degree)


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


def smallest_fit(case: Case, *, below: int = 0) -> Fit | None:
    """Return the smallest choice that holds it with `SPARE`: more cores of this machine, else an instance type.

    Types of the same family come first. `below`: degrees up to this do not fit here. A draft model with fewer cores
    than the model may get as many as the model. None if nothing holds it.
    """
    if core_memory(case) is None or case.on_cpu:
        return None
    machines = [named(name) for name in INSTANCES]
    machines.sort(key=lambda one: (one.family != case.device.family, one.memory_bytes))
    here = [(None, case.machine, below)] if case.device.core_memory_bytes else []
    for name, machine, least in (*here, *((one.instance_type, one, 0) for one in machines)):
        there = replace(case, machine=machine)
        family, cores = there.device.family, there.device.visible_cores // case.worlds
        # The documented degrees, and all cores if guides use them.
        offered = {cores, *legal_degrees(family, cores)}
        for degree in sorted(offered.intersection(legal_degrees(family, cores, used=True))):
            if degree <= least or not case.takes(degree):
                continue
            divided = there.with_options(tensor_parallel_degree=degree)
            if _is_roomy(divided):
                return Fit(degree, name)
            spread = divided.with_options(draft_model_tp_size=degree)
            if case.draft_degree is not None and _is_roomy(spread):
                return Fit(degree, name, degree)
    return None


def _is_roomy(case: Case) -> bool:
    memory = core_memory(case)
    return memory is not None and memory.roomy


def savings(case: Case) -> Iterator[str]:
    """Yield settings that each make the model fit on these cores with `SPARE`, with the greatest value that does."""

    def fits(**changes: object) -> bool:
        return _is_roomy(case.with_options(**changes))

    length = case.options.max_model_len or 0
    if slots := _largest(case.slots - 1, lambda number: fits(max_rolling_batch_size=number)):
        yield f"max_rolling_batch_size={slots}"
    steps = _largest(
        (length - 1) // _LENGTH_STEP, lambda number: fits(n_positions=number * _LENGTH_STEP)
    )
    if steps:
        yield f"n_positions={steps * _LENGTH_STEP}"
    # A file that leaves the library open may be one for any of them.
    libraries = NEURON_BACKENDS.values() if case.options.model_loader in OPEN else [case.neuron]
    model_type = case.model.model_type
    quantised = any(
        model_type in one.architectures and not one.lacks("quantize", model_type)
        for one in libraries
        if one is not None
    )
    if case.effective.quantize is None and quantised and fits(quantize="static_int8"):
        yield "quantize=static_int8"
    if (case.draft_degree or case.degree) < case.degree and fits(draft_model_tp_size=case.degree):
        yield f"draft_model_tp_size={case.degree}"


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the greatest number up to `limit` that fits, if all smaller ones fit too; 0 if none does."""
    return bisect.bisect_left(range(1, limit + 1), True, key=lambda number: not fits(number))
