"""What would be compiled and loaded: graphs, time and memory, from options alone and before either costs anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from djl_python_neuronx.config.findings import Finding
from djl_python_neuronx.planning import memory
from djl_python_neuronx.planning.arguments import Graph, LibraryArguments
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.defaults import draft_lengths
from djl_python_neuronx.planning.machines import DeviceInfo
from djl_python_neuronx.planning.memory import CoreMemory
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.nxdi import arguments as nxdi
from djl_python_neuronx.planning.tnx import arguments as tnx

_SECONDS_PER_LAYER = 3.0
_UNKNOWN_LAYERS = 32
COMPILE_BASIS = "3 s per layer and graph, one after another, nothing cached; may be half or twice"
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


def make_plan(case: Case, *, artifact_format: str = "huggingface") -> ServingPlan:
    """The plan for a case whose options `assess` has filled in."""
    planned = tuple(graphs(case))
    return ServingPlan(
        loader=case.backend,
        format=artifact_format,
        graphs=planned,
        estimated_compile_s=60.0 * compile_minutes(planned, case.model, case.draft),
        memory=memory.core_memory(case),
        device=case.device,
        arguments=None if case.on_cpu else library_arguments(case),
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


def library_arguments(case: Case) -> LibraryArguments:
    """Return all arguments of the backend's library, for options that are filled in; none for the cpu backend.

    Options that the library cannot use for the architecture are left out.
    """
    if case.backend == "tnx":
        return tnx.write_arguments(case)
    return nxdi.write_arguments(case) if case.backend == "nxdi" else LibraryArguments()


def stored_findings(case: Case) -> Iterator[Finding]:
    """Return the findings about graphs that exist already: `Case.foreign_graphs`."""
    if case.backend == "tnx":
        yield from tnx.foreign_findings(case)


def graphs(case: Case) -> Iterator[Graph]:
    """Return the graphs that a load compiles, a draft model's included; none on a CPU or before n_positions is set."""
    if case.on_cpu or case.options.max_model_len is None:
        return
    if case.backend == "nxdi":
        yield from nxdi.graphs(case)
        return
    yield from tnx.graphs(library_arguments(case))
    if case.options.drafting:
        # A draft model has options of its own, and only architectures with continuous batching can be one.
        prompts, lengths = draft_lengths(case.options)
        yield from (Graph("draft prefill", prompt, 1) for prompt in prompts)
        yield from (Graph("draft decode", length, case.slots) for length in lengths)
