"""What does not go together, whatever the model and the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from djl_python_neuronx.config.options import MAX_ROWS, ServingOptions


@dataclass(frozen=True)
class Finding:
    """What is to be said of options; `problem` completes a sentence that lists them with their values."""

    names: tuple[str, ...]
    """The options concerned, as fields of `ServingOptions`."""
    problem: str
    """What is wrong, what was expected, what to do."""
    level: Literal["error", "warning", "note"] = "error"


def _one_batching(options: ServingOptions) -> Finding | None:
    if options.batch_size > 1 and options.rolling_batch in {"tnx", "vllm"}:
        problem = "batch_size is for rolling_batch=disable; set only one of them"
        return Finding(("batch_size", "rolling_batch"), problem)
    return None


def _one_route(options: ServingOptions) -> Finding | None:
    if options.async_mode and options.rolling_batch in {"tnx", "vllm"}:
        problem = "DJL Serving would send each request both ways; leave rolling_batch out or set async_mode=false"
        return Finding(("async_mode", "rolling_batch"), problem)
    return None


def _rows_countable(options: ServingOptions) -> Finding | None:
    # Source: djl-serving, inputs.py get_batches: the keys batch_iii.* have three digits.
    if (
        options.rolling_batch in {"tnx", "vllm"}
        and (options.max_rolling_batch_size or 0) > MAX_ROWS
    ):
        problem = f"DJL Serving's rolling batch has at most {MAX_ROWS} rows; lower it or use async_mode=true"
        return Finding(("max_rolling_batch_size", "rolling_batch"), problem)
    return None


def _prompts_fit(options: ServingOptions) -> Finding | None:
    buckets, limit = options.context_length_estimate, options.n_positions
    if buckets and limit and buckets[-1] > limit:
        problem = f"a prompt of {buckets[-1]} tokens would not fit; lower it or raise n_positions"
        return Finding(("context_length_estimate", "n_positions"), problem)
    return None


def _some_model(options: ServingOptions) -> Finding | None:
    if options.model_id is None and options.model_dir is None:
        problem = "there is no model to serve; give a model folder or set option.model_id"
        return Finding(("model_id", "model_dir"), problem)
    return None


_RULES: tuple[Callable[[ServingOptions], Finding | None], ...] = (
    _some_model,
    _one_batching,
    _one_route,
    _rows_countable,
    _prompts_fit,
)


def conflicts(options: ServingOptions) -> Iterator[Finding]:
    """Every rule across options that is broken."""
    return (found for rule in _RULES if (found := rule(options)))
