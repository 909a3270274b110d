"""The orders for a backend, from options that are filled in and a model that lies here."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from djl_python_neuronx.artifacts import fetch
from djl_python_neuronx.artifacts.artifact import Artifact
from djl_python_neuronx.artifacts.weights import Weights
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.errors import ArtifactNotFoundError, ConfigError
from djl_python_neuronx.loading.prepare import Prepared
from djl_python_neuronx.planning.arguments import LibraryArguments
from djl_python_neuronx.planning.defaults import make_buckets
from djl_python_neuronx.types import Tokenizer

logger = logging.getLogger(__name__)


def load_plan(prepared: Prepared, tokenizer: Tokenizer) -> LoadPlan:
    """Write the backend's plan for a prepared model.

    Raises:
        ConfigError: options are not filled in.
        ArtifactError: the weights are absent or lie apart from their configuration.
        IncompatibleOptionsError: the shapes contradict each other.
    """
    artifact, options = prepared.artifact, prepared.options
    arguments = prepared.planned.arguments
    max_model_len, num_slots = options.max_model_len, options.max_rolling_batch_size
    if max_model_len is None or num_slots is None or options.dtype == "auto":
        msg = "n_positions, max_rolling_batch_size and dtype must be filled in first"
        raise ConfigError(msg)
    # None where the library has no prompt lengths to choose from: gpt_neox, gptj.
    prefill_buckets = options.context_length_estimate or (max_model_len,)
    weights = prepared.weights
    if weights is None:
        msg = f"the weights of {artifact.path} are not here; prepare the model with fetch_weights"
        raise ArtifactNotFoundError(msg)
    return LoadPlan(
        model_dir=_folder_to_load(artifact, weights),
        kind=weights.kind,
        num_slots=num_slots,
        max_model_len=max_model_len,
        prefill_buckets=prefill_buckets,
        token_buckets=options.token_buckets or make_buckets(max_model_len),
        dtype=options.dtype,
        tensor_parallel_degree=prepared.case.degree,
        process_cores=prepared.process_cores,
        trust_remote_code=options.trust_remote_code,
        revision=options.revision,
        num_threads=options.cpu_threads,
        eos_ids=_eos_ids(artifact, tokenizer),
        num_speculative_tokens=options.speculative_length if options.speculating else 0,
        mixed_steps=bool(options.enable_chunked_prefill),
        default_top_k=options.on_device_default_top_k,
        arguments=arguments or LibraryArguments(),
    )


def _folder_to_load(artifact: Artifact, weights: Weights) -> Path:
    """The folder of the weights, which has a configuration of its own where it is not the model's."""
    if weights.folder != artifact.path and not (weights.folder / fetch.CONFIG).is_file():
        msg = (
            f"the weights of {artifact.path} lie in {weights.folder}, without the {fetch.CONFIG} that the libraries "
            "look for beside them. Copy or compile the model again"
        )
        raise ArtifactNotFoundError(msg)
    return weights.folder


def _eos_ids(artifact: Artifact, tokenizer: Tokenizer) -> frozenset[int]:
    """The model's own, else the tokenizer's; without any, only lengths and stop strings end a text."""
    if artifact.eos_ids:
        return artifact.eos_ids
    vocab_size = artifact.config.get("vocab_size")
    beyond = tokenizer.eos_id is not None and tokenizer.eos_id >= (vocab_size or sys.maxsize)
    if tokenizer.eos_id is None or beyond:
        logger.warning(
            "no_eos path=%s reason='no id of the vocabulary in configuration or tokenizer'",
            artifact.path,
        )
        return frozenset()
    return frozenset({tokenizer.eos_id})
