"""A model of transformers-neuronx: its class, the library's objects for plain values, and its construction."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.errors import (
    ArtifactError,
    BackendError,
    BackendUnavailableError,
    IncompatibleOptionsError,
    did_you_mean,
)
from djl_python_neuronx.planning.capabilities import TNX, TNX_UNREADABLE
from djl_python_neuronx.planning.loader import SETUP_GUIDE, libraries
from djl_python_neuronx.planning.tnx.arguments import context_lengths

logger = logging.getLogger(__name__)

PACKAGE = "transformers-neuronx"

CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "bloom": "BloomForSampling",
        "gpt2": "GPT2ForSamplingWithContextBroadcasting",
        "gpt_neox": "GPTNeoXForSampling",
        "gptj": "GPTJForSampling",
        "llama": "LlamaForSampling",
        "mistral": "MistralForSampling",
        "mixtral": "MixtralForSampling",
        "opt": "OPTForSampling",
    }
)
"""`model_type` to the class that serves it."""

_AMP = MappingProxyType({"float32": "f32", "bfloat16": "bf16"})


def import_library() -> Any:  # noqa: ANN401  (a module without types)
    """The imported library.

    Raises:
        BackendUnavailableError: it is missing, a placeholder, or cannot be imported.
    """
    found = libraries()
    fakes = [library.name for library in found.values() if library.state == "placeholder"]
    advice = f"Install the Neuron packages as the AWS Neuron setup guide says ({SETUP_GUIDE})"
    if PACKAGE in fakes or (fakes and found[PACKAGE].state == "installed"):
        message = (
            f"the installed {' and '.join(fakes)} is PyPI's placeholder, not the library. {advice}"
        )
        raise BackendUnavailableError(message)
    try:
        return importlib.import_module("transformers_neuronx")
    except Exception as error:
        message = f"{PACKAGE} cannot be imported: {type(error).__name__}: {error}. {advice}"
        raise BackendUnavailableError(message) from error


def model_type_of(model_dir: Path) -> str:
    """The `model_type` in a folder's config.json.

    Raises:
        ArtifactError: there is none.
    """
    try:
        return str(json.loads((model_dir / "config.json").read_text())["model_type"])
    except (OSError, ValueError, KeyError) as error:
        message = f"{model_dir / 'config.json'} names no model_type; expected one such as 'llama'"
        raise ArtifactError(message) from error


def refusal(model_type: str | None) -> str | None:
    """Why the library cannot serve an architecture; None: it can."""
    if model_type in CLASSES:
        return None
    if reason := TNX_UNREADABLE.get(model_type or ""):
        return f"{PACKAGE} reads no checkpoint of {model_type}: {reason}"
    return f"{PACKAGE} has no class for model_type {model_type!r}; it has {', '.join(CLASSES)}"


def construct(plan: LoadPlan) -> Any:  # noqa: ANN401
    """The model, its weights known and not yet on the device: `to_neuron` is next."""
    library = import_library()
    model_type = model_type_of(plan.model_dir)
    if reason := refusal(model_type):
        message = f"the tnx backend cannot serve {plan.model_dir}: {reason}"
        raise BackendError(message)
    if _shared_cache(plan).get("optimized_paged_attention") and block_size_of(plan) is None:
        message = (
            "is_block_kv_layout keeps the KV cache in blocks, which the tnx backend drives only for prompts in chunks; "
            "set enable_chunked_prefill=true, or leave is_block_kv_layout out"
        )
        raise IncompatibleOptionsError(message)
    config = _neuron_config(library, plan)
    keywords: dict[str, Any] = {
        "amp": _AMP[plan.dtype],
        "tp_degree": plan.tensor_parallel_degree,
        **plan.arguments.constructor,
        **_shapes(plan, model_type),
    }
    return getattr(library, CLASSES[model_type]).from_pretrained(
        str(plan.model_dir), neuron_config=config, **keywords
    )


def block_size_of(plan: LoadPlan) -> int | None:
    """Tokens in a block where the cache is kept in blocks, for prompts in chunks; None: each slot has a row."""
    shared = _shared_cache(plan)
    return int(shared["block_size"]) if shared.get("enable_chunked_prefill") else None


def generation_of(plan: LoadPlan) -> dict[str, Any] | None:
    """Keywords of the library's GenerationConfig where the device samples; None: the host does."""
    written = plan.arguments.neuron_config.get("on_device_generation")
    if not isinstance(written, Mapping):
        return None
    generation: dict[str, Any] = dict(written)
    if generation.get("dynamic"):
        # Rows have parameters of their own, whatever else was asked for.
        generation["per_batch_line"] = True
        defaults = {"top_k": 50, "top_p": 1.0, "temperature": 1.0, "top_p_min_tokens": 1}
        for name, default in defaults.items():
            value = generation.get(name, default)
            generation[name] = value if isinstance(value, list) else [value] * plan.num_slots
    return generation


def _shared_cache(plan: LoadPlan) -> Mapping[str, Any]:
    """Keywords of the library's ContinuousBatchingConfig, and of its `init_cache_engine`; empty: static batches."""
    written = plan.arguments.neuron_config.get("continuous_batching")
    return written if isinstance(written, Mapping) else {}


def _shapes(plan: LoadPlan, model_type: str) -> dict[str, Any]:
    """Batch and buckets as keywords, in the form that the class takes them."""
    capability = TNX[model_type]
    shapes: dict[str, Any] = {"batch_size": plan.num_slots, "n_positions": plan.max_model_len}
    if capability.token_buckets:
        shapes["n_positions"] = list(_token_buckets(plan))
    if capability.context_buckets:
        shapes["context_length_estimate"] = list(_context_buckets(plan))
    if model_type == "gpt2":
        shapes["prompt_batch_size"] = plan.num_slots
    return shapes


def _context_buckets(plan: LoadPlan) -> tuple[int, ...]:
    """Lengths to compile prompts for, or to find compiled."""
    continuous = "continuous_batching" in plan.arguments.neuron_config
    lengths = context_lengths(
        plan.prefill_buckets, plan.max_model_len, plan.num_slots, continuous=continuous
    )
    if not plan.foreign_graphs or lengths == plan.prefill_buckets:
        return lengths
    reason = (
        "the graphs were compiled elsewhere, for the prompts of context_length_estimate alone: where sequences are "
        "encoded anew, what is beyond the longest of these runs token by token. Compile the model again to have it "
        "in one call"
    )
    logger.warning("context_bucket_left_out length=%d reason=%r", lengths[-1], reason)
    return plan.prefill_buckets


def _token_buckets(plan: LoadPlan) -> tuple[int, ...]:
    """Lengths to compile decodes for.

    Only the longest where continuous batching meets a cache that is divided by tokens: transformers-neuronx 0.13
    changes to the next length too late there (decoder.py: `forward_single` allows for the division only where all
    rows share a position). Seen: lengths 24 and 48, tp 4, wrong from position 24 on.
    """
    lengths = plan.token_buckets or (plan.max_model_len,)
    if size := block_size_of(plan):
        # A graph takes `length * slots // size` blocks: all that slots of this length can fill only if they are whole.
        return tuple(sorted({-(-length // size) * size for length in lengths}))
    config = plan.arguments.neuron_config
    if not config.get("shard_over_sequence") or "continuous_batching" not in config:
        return lengths
    if len(lengths) > 1:
        reason = "with shard_over_sequence and continuous batching the library loses tokens between lengths"
        logger.warning("token_buckets_left_out lengths=%s reason=%r", lengths[:-1], reason)
    return lengths[-1:]


def _neuron_config(library: Any, plan: LoadPlan) -> Any:  # noqa: ANN401
    """`NeuronConfig` with the objects that it takes; every one is new, for tracing changes some of them.

    Raises:
        IncompatibleOptionsError: the installed library has no such keyword, which it would only assert.
    """
    parameters = inspect.signature(library.NeuronConfig).parameters.values()
    known = [entry.name for entry in parameters if entry.kind is not entry.VAR_KEYWORD]
    for name, value in plan.arguments.neuron_config.items():
        if name not in known:
            hint = did_you_mean(name, known) or ";"
            message = (
                f"{name}={value!r}: the NeuronConfig of the installed {PACKAGE} has no such keyword{hint} correct or "
                "remove it in option.override_neuron_config, or leave out the option that is handed to it"
            )
            raise IncompatibleOptionsError(message)
    classes = importlib.import_module(f"{library.__name__}.config")
    makers = {
        "quant": library.QuantizationConfig,
        "kv_cache_quant": classes.KVCacheQuantizationConfig,
        "continuous_batching": partial(_batching, library.ContinuousBatchingConfig),
        "on_device_generation": library.GenerationConfig,
    }
    keywords = dict(plan.arguments.neuron_config)
    if plan.kind == "presharded":
        keywords["on_device_embedding"] = True  # cut weights hold no embedding for the host
    if generation := generation_of(plan):
        keywords["on_device_generation"] = generation
    if keywords.get("group_query_attention") is not None:
        keywords["group_query_attention"] = library.GQA(keywords["group_query_attention"])
    for name, maker in makers.items():
        written = keywords.get(name)
        if isinstance(written, Mapping):
            keywords[name] = maker(**written)
    return library.NeuronConfig(**keywords)


def _batching(
    config: type[Any],
    *,
    block_size: int | None = None,
    num_blocks: int | None = None,
    **keywords: object,
) -> Any:  # noqa: ANN401
    batching = config(**keywords)
    if block_size is not None:
        batching.init_cache_engine(block_size, num_blocks)
    return batching
