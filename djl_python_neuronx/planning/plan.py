"""What would be compiled and loaded: graphs, time and memory, from options alone and before either costs anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from djl_python_neuronx.planning import memory
from djl_python_neuronx.planning.arguments import LibraryArguments
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.defaults import make_buckets
from djl_python_neuronx.planning.intent import drafting, speculating
from djl_python_neuronx.planning.machines import DeviceInfo
from djl_python_neuronx.planning.mapping import library_arguments
from djl_python_neuronx.planning.memory import CoreMemory, Load
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.tnx.arguments import context_lengths

Kind: TypeAlias = Literal[
    "prefill", "decode", "mixed", "speculation", "draft prefill", "draft decode"
]

_SECONDS_PER_LAYER = 3.0
_UNKNOWN_LAYERS = 32
COMPILE_BASIS = "3 s per layer and graph, one after another, nothing cached; may be half or twice"
"""Where the estimate of the compile time comes from, for people.

Chosen so that 70B models (80 layers, ten to seventeen graphs) take the 40 to 70 minutes that their users tell of; the
compiler's real time depends on its version, on the host's CPUs and on how many graphs it compiles at once.
"""


@dataclass(frozen=True)
class Graph:
    """One program to compile: a shape that the device can run."""

    kind: Kind
    bucket: int
    """Tokens: the prompt's for a prefill, the step's for a mixed one, the sequence's for the others."""
    batch: int
    """Rows of one call; of a mixed step the blocks of the KV cache that it reads."""


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


def make_plan(case: Case, *, artifact_format: str = "huggingface") -> ServingPlan:
    """The plan for a case whose options `assess` has filled in."""
    planned = tuple(graphs(case))
    arguments = library_arguments(case.options, case.backend, capability=case.capability)
    return ServingPlan(
        loader=case.backend,
        format=artifact_format,
        graphs=planned,
        estimated_compile_s=60.0 * compile_minutes(planned, case.model, case.draft),
        memory=_memory(case),
        device=case.device,
        arguments=None if case.on_cpu else arguments,
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


def graphs(case: Case) -> Iterator[Graph]:
    """The programs that a load compiles; none on a CPU, and none before n_positions is known.

    Source: transformers-neuronx 0.13 and neuronx-distributed-inference 0.9: a prefill graph per context bucket, a
    decode graph per token bucket; with continuous batching a prefill runs one row, without it sequences of any length
    are encoded anew when one joins (`context_lengths`). Where transformers-neuronx takes no
    list of token buckets it doubles from 128 by itself. For prompts in chunks it makes no decode graph, and a mixed one
    for each number of tokens and of blocks that all slots at one of the lengths take. NxD Inference
    (modules/autobucketing.py) makes a prefill for each length of a cached prefix, none included, and a decode graph for
    each number of sequences.
    """
    options, loader, slots = case.effective, case.backend, case.slots
    if case.on_cpu or options.max_model_len is None:
        return
    continuous = case.continuous_batching
    rows = 1 if continuous else slots
    length = options.max_model_len or 0
    lengths = options.token_buckets or make_buckets(length)
    prompts = options.context_length_estimate or ()
    if loader == "tnx" and options.enable_chunked_prefill and options.pa_block_size:
        yield from _mixed(prompts, lengths, slots, options.pa_block_size)
        return
    batches = [slots]
    if loader == "tnx":
        prompts = context_lengths(prompts, length, slots, continuous=continuous)
    if loader == "nxdi":
        batches = sorted({*(options.token_generation_batches or ()), slots})
        if options.enable_prefix_caching:
            prompts = tuple(
                prompt for prompt in prompts for _ in (0, *(options.prefix_buckets or ()))
            )
    speculative = speculating(options)
    # NxDI fuses draft and target into one graph, which takes the place of the decode graph.
    separate = speculative and loader == "tnx"
    decode: Kind = "speculation" if speculative and not separate else "decode"
    yield from (Graph("prefill", bucket, rows) for bucket in prompts)
    yield from (Graph(decode, bucket, size) for size in batches for bucket in lengths)
    if separate:
        yield from (Graph("speculation", bucket, slots) for bucket in lengths)
    if separate and drafting(options):
        yield from (Graph("draft prefill", bucket, rows) for bucket in prompts)
        yield from (Graph("draft decode", bucket, slots) for bucket in lengths)


def _mixed(
    steps: tuple[int, ...], lengths: tuple[int, ...], slots: int, block_size: int
) -> Iterator[Graph]:
    for blocks in sorted({memory.blocks_of(length, slots, block_size) for length in lengths}):
        yield from (Graph("mixed", tokens, blocks) for tokens in steps)


def _memory(case: Case) -> CoreMemory | None:
    if case.model.num_parameters is None:
        return None
    return memory.needed(
        case.model,
        Load.of(case.effective, case.backend, case.draft),
        degree=case.degree,
        core_memory_bytes=_host_memory(case.device)
        if case.on_cpu
        else case.device.core_memory_bytes,
        loader=case.backend,
        cores=0 if case.on_cpu else case.device.cores_for(case.degree),
    )


def _host_memory(device: DeviceInfo) -> int:
    """Bytes of the host; 0 (unknown) on a Neuron machine, whose facts tell the devices' memory instead."""
    return 0 if device.has_neuron else device.memory_bytes
