"""From a prepared model to the plan that its backend loads."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from djl_python_neuronx.artifacts.artifact import Artifact
from djl_python_neuronx.backends.plan import LoadPlan, LoraPlan
from djl_python_neuronx.errors import (
    ArtifactNotFoundError,
    ConfigError,
    IncompatibleOptionsError,
)
from djl_python_neuronx.loading.mismatch import has_own_graphs
from djl_python_neuronx.loading.prepared import Prepared
from djl_python_neuronx.planning.arguments import LibraryArguments, graph_lengths
from djl_python_neuronx.planning.plan import library_arguments, stored_findings
from djl_python_neuronx.types import Tokenizer

logger = logging.getLogger(__name__)


def load_plan(prepared: Prepared, tokenizer: Callable[[], Tokenizer]) -> LoadPlan:
    """Write the backend's plan for a prepared model.

    Raises:
        ConfigError: options are not filled in.
        ArtifactNotFoundError: the weights are absent.
        IncompatibleOptionsError: the shapes contradict each other.
    """
    artifact, options = prepared.artifact, prepared.options
    max_model_len, num_slots = options.max_model_len, options.max_rolling_batch_size
    if max_model_len is None or num_slots is None or options.dtype == "auto":
        msg = "n_positions, max_rolling_batch_size and dtype must be filled in first"
        raise ConfigError(msg)
    weights = prepared.weights
    if weights is None and not options.simulated:
        msg = f"the weights of {artifact.path} are not here; prepare the model for a start"
        raise ArtifactNotFoundError(msg)
    # The weights of the ranks lie beside the graphs: the folder is that of the configuration.
    folder = artifact.path if weights is None or weights.kind == "ranks" else weights.folder
    prompts, lengths = graph_lengths(options)
    return LoadPlan(
        model_dir=folder,
        kind="safetensors" if weights is None else weights.kind,
        num_slots=num_slots,
        max_model_len=max_model_len,
        prefill_buckets=prompts,
        token_buckets=lengths,
        dtype=options.dtype,
        tensor_parallel_degree=prepared.case.degree,
        process_cores=prepared.process_cores,
        trust_remote_code=options.trust_remote_code,
        code=prepared.case.code,
        revision=options.revision,
        num_threads=options.cpu_threads,
        sim_step_ms=options.sim_step_ms,
        eos_ids=_eos_ids(artifact, tokenizer),
        num_speculative_tokens=(
            options.speculative_length if options.speculating and not prepared.case.fused else 0
        ),
        mixed_steps=bool(options.enable_chunked_prefill),
        prefix_caching=options.enable_prefix_caching is not False and not prepared.case.is_draft,
        default_top_k=options.on_device_default_top_k,
        lora=_lora(prepared),
        arguments=prepared.planned.arguments or LibraryArguments(),
        fused_draft=_fused_draft(prepared),
    )


def _lora(prepared: Prepared) -> LoraPlan | None:
    options = prepared.options
    if not options.enable_lora:
        return None
    return LoraPlan(
        max_loras=options.max_loras,
        max_rank=options.max_lora_rank,
        target_modules=options.lora_target_modules or (),
        shard_linear=bool(options.lora_shard_linear_layer),
        adapters=tuple(one.folder for one in prepared.adapters),
    )


def _fused_draft(prepared: Prepared) -> Path | None:
    """Return the folder of a draft model that is part of the model's graphs."""
    if prepared.draft is None or not prepared.case.fused:
        return None
    weights = prepared.draft.weights
    return prepared.draft.artifact.path if weights is None else weights.folder


def _eos_ids(artifact: Artifact, tokenizer: Callable[[], Tokenizer]) -> frozenset[int]:
    """Return the model's ids, else the tokenizer's. Without any, only lengths and stop strings end a text."""
    if artifact.eos_ids:
        return artifact.eos_ids
    vocab_size = artifact.config.get("vocab_size") or sys.maxsize
    eos_id = tokenizer().eos_id
    if eos_id is not None and eos_id < vocab_size:
        return frozenset({eos_id})
    reason = "no id of the vocabulary in configuration or tokenizer"
    logger.warning("no_eos path=%s reason=%r", artifact.path, reason)
    return frozenset()


def adapt_plan(prepared: Prepared, plan: LoadPlan, folder: Path) -> LoadPlan:
    """Return the plan that loads the graphs in a folder that an option names.

    Raises:
        IncompatibleOptionsError: graphs of another program give wrong answers with an option.
    """
    if has_own_graphs(folder):
        return plan
    case = replace(prepared.case, foreign_graphs=True)
    for finding in stored_findings(case):
        if finding.level == "error":
            raise IncompatibleOptionsError(prepared.resolved.describe(finding))
        logger.warning("option_finding %s", prepared.resolved.describe(finding))
    return replace(plan, arguments=library_arguments(case))
