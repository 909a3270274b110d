"""The plan that a backend loads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from djl_python_neuronx.artifacts.weights import WeightsKind
from djl_python_neuronx.config.step_times import StepTimes
from djl_python_neuronx.errors import IncompatibleOptionsError
from djl_python_neuronx.planning.arguments import LibraryArguments
from djl_python_neuronx.planning.nxdi.contrib import Code


@dataclass(frozen=True)
class LoraPlan:
    """The LoRA adapters that a model is loaded with, and the room for others."""

    max_loras: int
    """Places for adapters: most that are loaded at once."""
    max_rank: int
    target_modules: tuple[str, ...]
    """Names of the layers that adapters may change, as in `q_proj`."""
    shard_linear: bool = False
    """Divide both matrices of an adapter across the cores."""
    adapters: tuple[Path, ...] = ()
    """PEFT folders, checked, of the places from 1 on at the start; at most `max_loras`."""


@dataclass(frozen=True)
class LoadPlan:
    """A local model and the shapes to serve it with, all of them resolved.

    It crosses to other processes as JSON, which pydantic's `TypeAdapter` writes and reads.

    Raises:
        IncompatibleOptionsError: the shapes contradict one another.
    """

    model_dir: Path
    num_slots: int
    max_model_len: int
    """Tokens per slot, prompt and output together."""
    prefill_buckets: tuple[int, ...]
    """Ascending; the last is the longest prompt, at most `max_model_len`."""
    token_buckets: tuple[int, ...] = ()
    """Ascending, the last is `max_model_len`; empty: that one alone."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    kind: WeightsKind = "safetensors"
    """Format of the weight files to read; the folder may hold others, which are ignored."""
    tensor_parallel_degree: int = 1
    """NeuronCores of the model; 1 on a CPU."""
    process_cores: int = 0
    """NeuronCores that all models of the process share; 0 if this is the only one."""
    trust_remote_code: bool = False
    code: Code | None = None
    """The model's code in the place of the library's own; run with `trust_remote_code` alone."""
    revision: str | None = None
    """Revision of the remote code."""
    num_threads: int | None = None
    """CPU threads of one step; None: one less than the physical cores that the process may use."""
    sim_step_ms: float | StepTimes = 0.0
    """Time of a step on the sim backend."""
    eos_ids: frozenset[int] = frozenset()
    num_speculative_tokens: int = 0
    """Drafts that a decode verifies; 0: none."""
    mixed_steps: bool = False
    """Prompts run in chunks beside decodes; the prefill buckets are then numbers of tokens of a whole step."""
    prefix_caching: bool = False
    """A prompt reuses the prefix that a slot has, where the backend can."""
    default_top_k: Literal["global_top_k"] | None = None
    """top_k of a row that sets none, if the device samples; None: such a row is refused."""
    lora: LoraPlan | None = None
    """None: no adapter is served."""
    compile_workers: int = 0
    """Compilers that run at once; 0: as many as the library starts."""
    presharded: bool = False
    """Store the weights beside the compiled graphs, as each core takes its part."""
    arguments: LibraryArguments = field(default_factory=LibraryArguments)
    """All arguments of a Neuron library."""
    fused_draft: Path | None = None
    """The draft model that is part of the model's own graphs; `arguments.fused_draft` has its keywords."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise IncompatibleOptionsError("; ".join(problems))

    def _problems(self) -> Iterator[str]:
        limit = self.max_model_len
        if self.num_slots < 1:
            yield f"num_slots is {self.num_slots}; expected at least 1"
        for name, buckets in (("prefill", self.prefill_buckets), ("token", self.token_buckets)):
            if list(buckets) != sorted({length for length in buckets if 0 < length <= limit}):
                yield f"{name}_buckets are {buckets}; expected ascending lengths from 1 to {limit}"
        if not self.prefill_buckets:
            yield "prefill_buckets are empty; expected at least one length"
        if self.mixed_steps and self.prefill_buckets and self.prefill_buckets[-1] <= self.num_slots:
            yield (
                f"a step has room for {self.prefill_buckets[-1]} tokens (context_length_estimate), which the decodes "
                f"of {self.num_slots} slots use up; expected more, or fewer slots (max_rolling_batch_size)"
            )
        if self.token_buckets and self.token_buckets[-1] != limit:
            yield f"token_buckets end with {self.token_buckets[-1]}; expected max_model_len {limit}"
