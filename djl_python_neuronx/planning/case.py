"""The case that planning judges: a model, its options, the machine and the backend, with the facts that follow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from djl_python_neuronx.config.findings import Finding, Rule
from djl_python_neuronx.config.options import ServingOptions, option
from djl_python_neuronx.planning.arguments import LibraryArguments, PlannedGraph
from djl_python_neuronx.planning.capabilities import Capability, Heads, sequences_beyond_window
from djl_python_neuronx.planning.machines import DeviceInfo, on_single_cores
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.nxdi.contrib import Code

TILE = 128
"""Positions of the KV cache that the libraries' kernels take at a time."""

Filled: TypeAlias = dict[str, tuple[object, str]]
"""Option name to its value and the reason for it."""


@dataclass(frozen=True, eq=False)
class NeuronBackend:
    """A backend that drives a Neuron library: facts of the library, and its functions of planning.

    Cases that the functions get have options that are filled in, unless they say otherwise.
    """

    name: str
    """As in option.model_loader."""
    library: str
    """Name of the library, for messages."""
    package: str
    """Package that must be installed."""
    driven: str
    """The versions of it that are driven, as pip writes them."""
    architectures: Mapping[str, Capability]
    """`model_type` to what the library supports of it."""
    rules: tuple[Rule, ...]
    """Combinations of options that the library refuses, gets wrong or ignores."""
    padded_heads: Callable[[ModelFacts, int, str | None, int], Heads]
    """Return the heads that the library allocates for a model on as many cores, with a `group_query_attention`, for as
    many slots."""
    findings: Callable[[Case], Iterable[Finding]]
    """Return what the library refuses or gives up because of the model, the machine or lengths."""
    write_arguments: Callable[[Case], LibraryArguments]
    """Return all arguments of the library, without options that it cannot use for the architecture."""
    graphs: Callable[[Case], Iterable[PlannedGraph]]
    """Return the graphs that a load compiles, a draft model's included; n_positions is set."""
    fill: Callable[[Case, int, int], Filled] = lambda _case, _positions, _slots: {}
    """Return values for options of this library that are not set, for tokens per slot and slots."""
    stored_findings: Callable[[Case], Iterable[Finding]] = lambda _case: ()
    """Return what follows from what exists already: `Case.presharded`, `Case.foreign_graphs`."""
    traced_with: tuple[str, ...] = ()
    """Further packages whose versions change the graphs."""
    not_served: Mapping[str, str] = field(default_factory=dict)
    """Architectures of the library that are not served, and what their class does."""
    with_code: Capability | None = None
    """Support of models whose code is not the library's (`Case.code`); None: it takes none."""
    partly: tuple[str, ...] = ()
    """Options that it serves for greedy requests alone, and other libraries for all."""
    host_samples: tuple[str, ...] = ()
    """Parameters that only the host samples right, in words, beside those that no device knows."""
    embeds_on_host: bool = False
    """The embedding stays in the host's memory unless `on_device_embedding` is set."""
    weights: frozenset[str] = frozenset()
    """Kinds of weights that it reads (`artifacts.weights.WeightsKind`) beside whole safetensors and pickles."""
    writes_behind: bool = False
    """A step that verifies drafts writes all its columns, also those behind the last position of a slot."""
    fuses: bool = False
    """A draft model is compiled into the graphs of the model that it drafts for."""
    loads_by_layer: bool = False
    """The host cuts weights layer after layer. False: the whole checkpoint at once."""

    @cached_property
    def missing(self) -> Mapping[str, object]:
        """Options without an equivalent in the library, to their defaults."""
        fields = ServingOptions.model_fields
        lacks = (name for name in fields if (to := option(name).to) and self.name not in to)
        return {name: fields[name].default for name in lacks}

    def capability(self, model_type: str | None) -> Capability | None:
        """Return what the library supports of an architecture; None if that is unknown."""
        return self.architectures.get(model_type or "")

    def lacks(self, name: str, model_type: str | None) -> bool:
        """Return whether the library has no such option, or not for this architecture, or not in this version."""
        capability = self.capability(model_type)
        unsupported = capability is not None and not capability.supports(name)
        return unsupported or name in {*self.missing, *self.partly}


@dataclass(frozen=True)
class Case:
    """A model that a backend is to serve with these options on this machine.

    `assess` turns a case whose options are partly unset into one whose options are filled in; every other function of
    planning expects the latter. Replace a field with `dataclasses.replace`.
    """

    options: ServingOptions
    model: ModelFacts
    machine: DeviceInfo
    neuron: NeuronBackend | None
    """The backend; None: ``cpu`` or ``sim``, which have no library, no graphs and no NeuronCores."""
    draft: ModelFacts | None = None
    """The draft model; None: there is none, or its configuration is not known."""
    draft_digest: str = ""
    """Name of the draft model's content (`manifest.artifact_digest`); empty: unknown."""
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
    compiled: bool = False
    """Graphs of this library came with the model."""
    code: Code | None = None
    """Code of the model, for a library that can take it in the place of its own class."""
    library_version: str | None = None
    """Version of the library on the machine that serves; None: unknown."""

    def with_options(self, **values: object) -> Case:
        """Return the same case with other values of options, which are not validated."""
        return replace(self, options=self.options.model_copy(update=values))

    @property
    def on_cpu(self) -> bool:
        """True for a backend that drives no Neuron library: ``cpu`` and ``sim``."""
        return self.neuron is None

    @property
    def backend(self) -> str:
        """Name of the backend: ``cpu``, ``sim``, ``tnx`` or ``nxdi``."""
        if self.neuron is not None:
            return self.neuron.name
        return self.options.model_loader if self.options.simulated else "cpu"

    @property
    def library(self) -> str:
        """Name of the backend's library, for messages; without a library the backend's own name."""
        return self.backend if self.neuron is None else self.neuron.library

    @property
    def weights(self) -> frozenset[str]:
        """Kinds of weights that the backend reads beside whole ones."""
        return frozenset() if self.neuron is None else self.neuron.weights

    @cached_property
    def capability(self) -> Capability | None:
        """The library's support of the model's architecture; None: unknown architecture, or no library."""
        if self.neuron is None:
            return None
        if self.code is not None and self.neuron.with_code is not None:
            return self.neuron.with_code
        return self.neuron.capability(self.model.model_type)

    @cached_property
    def effective(self) -> ServingOptions:
        """The options as the library gets them: without those that it lacks, or cannot use for this architecture.

        A library that gets one nevertheless fails while it builds its graphs, hours later, or computes nonsense.
        """
        if self.neuron is None:
            return self.options
        changes = dict(self.neuron.missing)
        if (capability := self.capability) is not None:
            fields = ServingOptions.model_fields
            without = (*capability.ignored_options, *capability.unsupported_options)
            changes.update({name: fields[name].default for name in without})
            if not capability.context_buckets:
                changes["context_length_estimate"] = None
            if not capability.token_buckets:
                changes["n_positions"] = self.options.max_model_len
        if self.rolling_cache:
            changes["async_execution"] = None
        return self.options.model_copy(update=changes)

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
    def draft_degree(self) -> int | None:
        """Cores that share the draft model, from the model's first one on; None: as many as share the model."""
        return self.options.draft_model_tp_size if self.effective.drafting else None

    @property
    def fused(self) -> bool:
        """True if the draft model is part of the model's own graphs."""
        options = self.options
        of_library = self.neuron is not None and self.neuron.fuses
        return of_library and options.drafting and options.enable_fused_speculation is not False

    @property
    def draft_facts(self) -> dict[str, str]:
        """The draft model among what the model's own graphs depend on; empty if they do not."""
        return {"draft_digest": self.draft_digest} if self.fused and self.draft_digest else {}

    @property
    def lookahead(self) -> int:
        """Positions of each slot behind its last token, which drafts are written to; whole tiles if the others are."""
        options = self.options
        if self.neuron is None or not (self.neuron.writes_behind and options.speculating):
            return 0
        return options.speculative_length + 1 if (options.max_model_len or 1) % TILE else TILE

    @property
    def worlds(self) -> int:
        """Tensor parallel groups: one for each pipeline stage of each group of experts."""
        return self.options.pipeline_parallel_degree * self.options.ep_degree

    def indivisible(self, degree: int) -> str | None:
        """Name the condition on a degree that it breaks, see `Capability.indivisible`; None if it breaks none."""
        return None if self.capability is None else self.capability.indivisible(self.model, degree)

    def takes(self, degree: int) -> bool:
        """Return whether the library serves the model right with a degree and the other options."""
        options = self.options.model_copy(update={"tensor_parallel_degree": degree})
        capability = None if options.allow_known_defects else self.capability
        defects = () if capability is None else capability.defects
        wrong = any(
            "tensor_parallel_degree" in defect.names and defect.applies(options, self.model)
            for defect in defects
        )
        return not wrong and self.indivisible(degree) is None

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

    @property
    def windowed_cache(self) -> bool:
        """True if the KV cache is only as long as the model's sliding window."""
        return self.capability is not None and self.capability.window_cache

    @cached_property
    def rolling_cache(self) -> bool:
        """True if the KV cache is a ring as long as the model's sliding window, which sequences outgrow."""
        return self.windowed_cache and sequences_beyond_window(self.options, self.model)

    @cached_property
    def shortest_prompt_graph(self) -> int:
        """Least length of a prefill graph: a prompt's fills the ring, which has room for all of the window but a token.

        And it is longer than a step that verifies drafts (`nxdi.speculation`). Source: neuronx-distributed-inference
        0.9, modules/attention/utils.py, get_last_kv_window.
        """
        ring = (self.model.sliding_window or 0) - 1 if self.rolling_cache else 1
        return max(ring, self.options.speculative_length + 2) if self.lookahead else ring

    @cached_property
    def continuous_batching(self) -> bool:
        """True if a sequence joins a running batch without a second prefill of the others."""
        possible = self.capability is None or self.capability.continuous_batching
        return possible and self.options.continuous_batching

    @property
    def collected(self) -> bool:
        """True if DJL Serving collects `batch_size` requests for each call."""
        options = self.options
        by_calls = options.rolling_batch == "disable" and not options.async_mode
        return by_calls and options.batch_size > 1
