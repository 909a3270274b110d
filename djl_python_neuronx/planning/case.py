"""One case to plan: a model, its options, the machine and the backend, with the facts that follow from them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning import intent
from djl_python_neuronx.planning.capabilities import LIBRARIES, Capability, capability_of
from djl_python_neuronx.planning.machines import DeviceInfo, on_single_cores
from djl_python_neuronx.planning.model import ModelFacts


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
    filled: Collection[str] = ()
    """Options whose values `defaults.fill` chose."""
    presharded: bool = False
    """The weights are stored as each core takes its part."""
    foreign_graphs: bool = False
    """The graphs exist, and another program has compiled them."""

    def with_options(self, **values: object) -> Case:
        """The same case with other values of options, which are not validated."""
        return replace(self, options=self.options.model_copy(update=values))

    @cached_property
    def on_cpu(self) -> bool:
        """True for the cpu backend, which has no library, no graphs and no NeuronCores."""
        return self.backend not in LIBRARIES

    @cached_property
    def library(self) -> str:
        """Name of the backend's library, for messages; the cpu backend's own name."""
        return LIBRARIES.get(self.backend, self.backend)

    @cached_property
    def capability(self) -> Capability | None:
        """What the library supports of the model's architecture; None: unknown architecture, or the cpu backend."""
        return capability_of(self.backend, self.model.model_type)

    @cached_property
    def effective(self) -> ServingOptions:
        """The options as the library gets them: without those that it cannot use for this architecture."""
        return intent.honoured(self.options, self.capability)

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

    @cached_property
    def continuous_batching(self) -> bool:
        """Whether a sequence joins a running batch without a second prefill of the others."""
        return intent.continuous_batching(self.options, self.capability)

    @cached_property
    def speculating(self) -> bool:
        """Whether steps verify drafted tokens, of a draft model or of a lookup."""
        return intent.speculating(self.options)

    @cached_property
    def drafting(self) -> bool:
        """Whether a draft model is used."""
        return intent.drafting(self.options)
