"""What would be compiled and loaded: graphs, time and memory, from options alone and before either costs anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from djl_python_neuronx.planning import instances, memory
from djl_python_neuronx.planning.arguments import Graph
from djl_python_neuronx.planning.capabilities import capability_of
from djl_python_neuronx.planning.draft import draft_lengths
from djl_python_neuronx.planning.intent import continuous_batching, drafting, honoured
from djl_python_neuronx.planning.mapping import library_arguments
from djl_python_neuronx.planning.memory import Load
from djl_python_neuronx.planning.nxdi.arguments import graphs as nxdi_graphs
from djl_python_neuronx.planning.tnx.arguments import graphs as tnx_graphs

if TYPE_CHECKING:
    from djl_python_neuronx.config.options import ServingOptions
    from djl_python_neuronx.config.resolve import Resolved
    from djl_python_neuronx.planning.arguments import LibraryArguments
    from djl_python_neuronx.planning.device import DeviceInfo
    from djl_python_neuronx.planning.memory import CoreMemory
    from djl_python_neuronx.planning.model import ModelFacts

_SECONDS_PER_LAYER = 3.0
_UNKNOWN_LAYERS = 32
COMPILE_BASIS = "3 s per layer and graph, one after another, nothing cached; assumed, it may be half or twice of it"
"""Where the estimate of the compile time comes from, for people.

Chosen so that 70B models (80 layers, ten to seventeen graphs) take the 40 to 70 minutes that their users tell of; the
compiler's real time depends on its version, on the host's CPUs and on how many graphs it compiles at once.
"""


@dataclass(frozen=True)
class ServingPlan:
    """What a load with these options does. Pure data: nothing was compiled, loaded or imported for it."""

    loader: str
    format: str
    """Name of the artifact's format, as `artifacts.formats` calls it."""
    graphs: tuple[Graph, ...]
    """Empty: nothing is compiled."""
    estimated_compile_s: float
    """Rough, see `COMPILE_BASIS`; 0 where nothing is compiled."""
    memory: CoreMemory | None
    """Bytes per core; None: the model's configuration does not tell enough."""
    device: DeviceInfo
    arguments: LibraryArguments | None
    """What the library is given; None: the loader is no library's."""


def make_plan(
    resolved: Resolved,
    facts: ModelFacts,
    device: DeviceInfo,
    loader: str,
    *,
    artifact_format: str = "huggingface",
    draft: ModelFacts | None = None,
) -> ServingPlan:
    """The plan for options that `assess` has filled in. `draft`: the facts of the draft model, if they are known."""
    options = resolved.options
    device = instances.on_single_cores(device, options.logical_nc_config)
    planned = tuple(graphs(options, facts, loader))
    capability = capability_of(loader, facts.model_type)
    arguments = library_arguments(options, loader, capability=capability)
    return ServingPlan(
        loader=loader,
        format=artifact_format,
        graphs=planned,
        estimated_compile_s=60.0 * compile_minutes(planned, facts, draft),
        memory=_memory(options, facts, device, loader, draft),
        device=device,
        arguments=None if loader == "cpu" else arguments,
    )


def compile_minutes(
    planned: Iterable[Graph], facts: ModelFacts, draft: ModelFacts | None = None
) -> float:
    """Minutes that compiling takes without a cache; rough, see `COMPILE_BASIS`.

    A draft model's graphs are as deep as it is, or as the large model where nothing is known of it.
    """
    models = (
        draft if draft is not None and graph.kind in {"draft prefill", "draft decode"} else facts
        for graph in planned
    )
    layers = sum(model.num_layers or _UNKNOWN_LAYERS for model in models)
    return layers * _SECONDS_PER_LAYER / 60.0


def graphs(options: ServingOptions, facts: ModelFacts, loader: str) -> Iterator[Graph]:
    """Return the graphs that a load compiles, a draft model's included; none on a CPU or before n_positions is set."""
    if loader == "cpu" or options.max_model_len is None:
        return
    capability = capability_of(loader, facts.model_type)
    if loader == "nxdi":
        continuous = continuous_batching(options, capability)
        yield from nxdi_graphs(honoured(options, capability), continuous=continuous)
        return
    yield from tnx_graphs(library_arguments(options, loader, capability=capability))
    if drafting(options):
        # A draft model has options of its own, and only architectures with continuous batching can be one.
        slots, (prompts, lengths) = options.max_rolling_batch_size or 1, draft_lengths(options)
        yield from (Graph("draft prefill", prompt, 1) for prompt in prompts)
        yield from (Graph("draft decode", length, slots) for length in lengths)


def _memory(
    options: ServingOptions,
    facts: ModelFacts,
    device: DeviceInfo,
    loader: str,
    draft: ModelFacts | None,
) -> CoreMemory | None:
    on_cpu = loader == "cpu"
    told = options.tensor_parallel_degree
    degree = told if isinstance(told, int) and not on_cpu else 1
    if facts.num_parameters is None:
        return None
    options = honoured(options, capability_of(loader, facts.model_type))
    return memory.needed(
        facts,
        Load.of(options, loader, draft),
        degree=degree,
        core_memory_bytes=_host_memory(device) if on_cpu else device.core_memory_bytes,
        loader=loader,
        cores=0 if on_cpu else device.cores_for(degree),
    )


def _host_memory(device: DeviceInfo) -> int:
    """Bytes of the host; 0 (unknown) on a Neuron machine, whose facts tell the devices' memory instead."""
    return 0 if device.has_neuron else device.memory_bytes
