"""What a backend is asked to load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class LoadPlan:
    """A local model and the shapes to serve it with; every wish is resolved already."""

    model_dir: Path
    num_slots: int
    max_model_len: int
    """Tokens per slot, prompt and output together."""
    prefill_buckets: tuple[int, ...]
    """Ascending; the last is the longest prompt, at most `max_model_len`."""
    token_buckets: tuple[int, ...] = ()
    """Ascending, the last is `max_model_len`; empty: that one alone."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    tensor_parallel_degree: int = 1
    """NeuronCores of one model; the CPU has none."""
    trust_remote_code: bool = False
    revision: str | None = None
    num_threads: int | None = None
    """CPU threads of one step; None: one per physical core that the process may use."""
    eos_ids: frozenset[int] = frozenset()
