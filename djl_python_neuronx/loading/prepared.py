"""A prepared model: everything that a start, a compile or a report needs of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from djl_python_neuronx.artifacts.adapters import Adapter
from djl_python_neuronx.artifacts.artifact import Artifact
from djl_python_neuronx.artifacts.manifest import Role
from djl_python_neuronx.artifacts.tokenizer import load_tokenizer
from djl_python_neuronx.artifacts.weights import Weights
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.resolve import Resolved
from djl_python_neuronx.loading.situation import Purpose
from djl_python_neuronx.loading.tokenizer_process import LOAD_S, TokenizerProcess
from djl_python_neuronx.planning import machines, memory
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.cores import Need
from djl_python_neuronx.planning.machines import DeviceInfo
from djl_python_neuronx.planning.plan import ServingPlan
from djl_python_neuronx.types import Tokenizer


@dataclass(frozen=True)
class Prepared:
    """A model with the settings, the machine and the plan to serve it with."""

    resolved: Resolved
    """The settings, filled in."""
    name: str
    """The model, as the settings name it, or its folder."""
    source: str
    """The place of its configuration, for people."""
    artifact: Artifact
    """Without weights where a dry run found config.json only."""
    case: Case
    planned: ServingPlan
    weights: Weights | None
    """The weights to load; None: they are absent or unusable, which only a dry run accepts."""
    own_graphs: Path | None
    """The folder of graphs that came with the model, if they were compiled for exactly these settings, versions and
    flags."""
    environ: Mapping[str, str] = field(repr=False)
    """Variables of the process that will serve."""
    purpose: Purpose
    draft: Prepared | None = None
    """The draft model, for the same slots and lengths."""
    role: Role = "model"
    """Role in the compile store."""
    adapters: tuple[Adapter, ...] = ()
    """The LoRA adapters in the places from 1 on."""
    process_cores: int = 0
    """NeuronCores that the model and its draft model share; 0 without a draft model."""

    @property
    def models(self) -> tuple[Prepared, ...]:
        """The models that have graphs of their own: this one, and a draft model that is not part of its graphs."""
        return (self,) if self.draft is None or self.case.fused else (self, self.draft)

    @property
    def options(self) -> ServingOptions:
        """The options, filled in."""
        return self.resolved.options

    @property
    def backend(self) -> str:
        """The backend that serves the model."""
        return self.case.backend

    @property
    def machine(self) -> DeviceInfo:
        """The machine, with the cores that this process may use."""
        return self.case.machine

    @property
    def need(self) -> Need:
        """The cores of each copy, those of a draft model included."""
        options, cores = self.options, 0
        if not self.case.on_cpu:
            cores = max(self.case.degree * self.case.worlds, self.process_cores)
        return Need(self.name, cores, options.replicas)

    @property
    def host_bytes(self) -> int | None:
        """Host memory that the load of a copy takes at its peak, see `memory.host_bytes`; None if unknown."""
        sizes = [
            memory.host_bytes(one.case, one.artifact.kind, one.artifact.dtype) or 0
            for one in (self, self.draft)
            if one is not None
        ]
        return sum(sizes) if all(sizes) else None

    @property
    def compile_host_bytes(self) -> int | None:
        """Host memory that a compile may take: what is free here; in a dry run what the instance type has."""
        if self.purpose is not Purpose.CHECK:
            return machines.available_memory()
        instance = machines.known(self.machine.instance_type)
        return None if instance is None else (instance.host_memory_gib - 1) * machines.GIB

    @property
    def compile_memory(self) -> memory.CompileMemory | None:
        """Host memory that the compile of the model alone takes; None if unknown, or if nothing is compiled."""
        load = memory.host_bytes(self.case, self.artifact.kind, self.artifact.dtype)
        return memory.compile_memory(self.case, self.num_graphs, load, self.compile_host_bytes)

    @property
    def num_graphs(self) -> int:
        """Graphs of the model alone: a draft model is compiled separately."""
        return sum(not graph.kind.startswith("draft") for graph in self.planned.graphs)

    def load_tokenizer(self, *, needs_torch: bool = True) -> Tokenizer:
        """Load the tokenizer beside the model. `needs_torch`: false in a process that loads no model.

        Raises:
            ArtifactError: it is missing or damaged.
        """
        return load_tokenizer(
            self.artifact.path, **{**self._tokenizer_how, "needs_torch": needs_torch}
        )

    def start_tokenizer(self, load_s: float = LOAD_S, **limits: Any) -> TokenizerProcess:  # noqa: ANN401
        """Load the tokenizer beside the model, to serve it: in separate processes, within `load_s`.

        `limits`: `timeout_s` and `limit` of `TokenizerProcess`; by default `option.text_timeout`.

        Raises:
            ArtifactError: it is missing or damaged, or takes too much time or memory.
        """
        limits = {"timeout_s": self.options.text_timeout, **limits}
        return TokenizerProcess(self.artifact.path, load_s=load_s, **limits, **self._tokenizer_how)

    @property
    def _tokenizer_how(self) -> dict[str, Any]:
        return {
            "trust_remote_code": self.options.trust_remote_code,
            "revision": self.options.revision,
            "chat_template": self.options.chat_template,
            "needs_torch": not self.options.engine_process,
        }
