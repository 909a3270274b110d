"""The case that planning judges: a model, its options, the machine and the backend, with the facts that follow."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning.capabilities import Capability, sequences_beyond_window
from djl_python_neuronx.planning.machines import DeviceInfo, on_single_cores
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.nxdi.capabilities import NXDI
from djl_python_neuronx.planning.tnx.capabilities import TNX


@dataclass(frozen=True)
class NeuronBackend:
    """Facts of a backend that drives a Neuron library."""

    library: str
    """Name of the library, for messages."""
    package: str
    """Package that must be installed."""
    architectures: Mapping[str, Capability]
    """`model_type` to what the library supports of it."""
    traced_with: tuple[str, ...] = ()
    """Further packages whose versions change the graphs."""


NEURON_BACKENDS: Final[Mapping[str, NeuronBackend]] = {
    "nxdi": NeuronBackend(
        "NxD Inference",
        "neuronx-distributed-inference",
        NXDI,
        # Source: neuronx-distributed-inference 0.9: torch traces modules of neuronx-distributed through torch-neuronx.
        ("neuronx-distributed", "torch", "torch-neuronx", "transformers"),
    ),
    # Source: transformers-neuronx 0.13, compiler.py: torch-neuronx writes the graphs. transformers reads and changes
    # config.json; torch computes nothing of them.
    "tnx": NeuronBackend(
        "transformers-neuronx", "transformers-neuronx", TNX, ("torch-neuronx", "transformers")
    ),
}
"""Backends that drive a Neuron library, the preferred one first. The cpu backend serves what transformers does."""


def capability_of(backend: str, model_type: str | None) -> Capability | None:
    """Return what the library of a backend supports of an architecture; None if unknown, and for the cpu backend."""
    facts = NEURON_BACKENDS.get(backend)
    return None if facts is None else facts.architectures.get(model_type or "")


def usable_options(options: ServingOptions, capability: Capability | None) -> ServingOptions:
    """Return the options without those that the code of an architecture cannot use."""
    if capability is None:
        return options
    fields = ServingOptions.model_fields
    without = (*capability.ignored_options, *capability.unsupported_options)
    changes: dict[str, object] = {name: fields[name].default for name in without}
    if not capability.context_buckets:
        changes["context_length_estimate"] = None
    if not capability.token_buckets:
        changes["n_positions"] = options.max_model_len
    return options.model_copy(update=changes)


@dataclass(frozen=True)
class Case:
    """A model that a backend is to serve with these options on this machine.

    `assess` turns a case whose options are partly unset into one whose options are filled in; every other function of
    planning expects the latter. Replace a field with `dataclasses.replace`.
    """

    options: ServingOptions
    model: ModelFacts
    machine: DeviceInfo
    backend: str
    """``cpu``, ``tnx`` or ``nxdi``."""
    draft: ModelFacts | None = None
    """The draft model; None: there is none, or its configuration is not known."""
    is_draft: bool = False
    """The model is the draft model of another one."""
    filled: Collection[str] = ()
    """Options whose values `defaults.fill` chose."""
    presharded: bool = False
    """The weights are stored as each core takes its part."""
    foreign_graphs: bool = False
    """The graphs exist, and another program has compiled them."""
    among_others: bool = False
    """The machine serves other models too."""

    def with_options(self, **values: object) -> Case:
        """Return the same case with other values of options, which are not validated."""
        return replace(self, options=self.options.model_copy(update=values))

    @cached_property
    def on_cpu(self) -> bool:
        """True for the cpu backend, which has no library, no graphs and no NeuronCores."""
        return self.backend not in NEURON_BACKENDS

    @cached_property
    def library(self) -> str:
        """Name of the backend's library, for messages; of the cpu backend its own name."""
        return self.backend if self.on_cpu else NEURON_BACKENDS[self.backend].library

    @cached_property
    def capability(self) -> Capability | None:
        """The library's support of the model's architecture; None: unknown architecture, or the cpu backend."""
        return capability_of(self.backend, self.model.model_type)

    @cached_property
    def effective(self) -> ServingOptions:
        """The options as the library gets them: without those that it cannot use for this architecture.

        A library that gets one nevertheless fails while it builds its graphs, hours later, or computes nonsense.
        """
        usable = usable_options(self.options, self.capability)
        return usable.model_copy(update={"async_execution": None}) if self.rolling_cache else usable

    @cached_property
    def device(self) -> DeviceInfo:
        """The machine with its cores divided as `logical_nc_config` sets it."""
        return on_single_cores(self.machine, self.options.logical_nc_config)

    @cached_property
    def degree(self) -> int:
        """Tensor parallel degree; 1 on a CPU and while it is not a number."""
        degree = self.options.tensor_parallel_degree
        return degree if isinstance(degree, int) and not self.on_cpu else 1

    @cached_property
    def slots(self) -> int:
        """Sequences that are generated at once; 1 while it is not set."""
        return self.options.max_rolling_batch_size or 1

    @property
    def host_memory(self) -> int:
        """Bytes of the host's memory for each copy on a CPU; 0 if unknown: of a Neuron machine it is the devices'."""
        copies = self.options.replicas
        whole = 0 if self.device.has_neuron else self.device.memory_bytes
        return whole // (1 if copies == "max" else copies)

    @property
    def shares_cores(self) -> bool:
        """True if other models, or other copies of this one, are served from cores of the same machine."""
        return self.among_others or self.options.replicas != 1

    @cached_property
    def rolling_cache(self) -> bool:
        """True if the KV cache is a ring as long as the model's sliding window, which sequences outgrow."""
        windowed = self.capability is not None and self.capability.window_cache
        return windowed and sequences_beyond_window(self.options, self.model)

    @cached_property
    def shortest_prompt_graph(self) -> int:
        """Least length of a prefill graph: a prompt's fills the ring, which has room for all of the window but a token.

        Source: neuronx-distributed-inference 0.9, modules/attention/utils.py, get_last_kv_window.
        """
        return (self.model.sliding_window or 0) - 1 if self.rolling_cache else 1

    @cached_property
    def continuous_batching(self) -> bool:
        """True if a sequence joins a running batch without a second prefill of the others."""
        possible = self.capability is None or self.capability.continuous_batching
        return possible and self.options.continuous_batching
