"""Plans for transformers-neuronx, and the tiny models that it can load."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter

from djl_python_neuronx.backends import LoadPlan
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.machines import named
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.plan import library_arguments

# A process has its cores once: those of the largest model here. The cache keeps the rig's programs for one run.
os.environ.setdefault("NEURON_RT_NUM_CORES", "8")
os.environ.setdefault("NEURON_EMU_LOG_LEVEL", "WARNING")
CACHE = os.environ.setdefault("NEURON_COMPILE_CACHE_URL", tempfile.mkdtemp(prefix="neuron-cache-"))

PLANS = TypeAdapter(LoadPlan)

VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama": ("llama", {}),
        "llama-mha": ("llama", {"num_key_value_heads": 4}),
        "llama3-rope": (
            "llama",
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            },
        ),
        "mistral": ("mistral", {"sliding_window": None}),
        "mixtral": ("mixtral", {}),
        "gpt2": ("gpt2", {}),
        "gpt_neox": (
            "gpt_neox",
            {"hidden_act": "gelu_new", "rotary_pct": 0.5, "use_parallel_residual": True},
        ),
        "gptj": ("gptj", {}),
        # int(44 * (30 / 44)) is 29: so GPT-NeoX counts, whose fraction this class has to give.
        "gptj-odd": ("gptj", {"n_embd": 88, "n_head": 2, "rotary_dim": 30, "n_inner": 50}),
        "gpt_bigcode": ("gpt_bigcode", {}),
        "gpt_bigcode-mha": ("gpt_bigcode", {"multi_query": False, "n_inner": 50}),
        "opt": ("opt", {"word_embed_proj_dim": 32, "do_layer_norm_before": True}),
        "bloom": ("bloom", {"hidden_size": 32, "n_head": 4}),
    }
)
"""Name → model type and what differs from `tiny_models`: transformers-neuronx knows no projected embeddings."""


def library_plan(
    backend: str,
    directory: Path,
    num_slots: int = 4,
    max_model_len: int = 48,
    prefill_buckets: tuple[int, ...] = (8, 20),
    token_buckets: tuple[int, ...] = (24, 48),
    *,
    continuous: bool = True,
    tp: int = 1,
    facts: Mapping[str, Any] = MappingProxyType({}),
    foreign_graphs: bool = False,
    **more: object,
) -> LoadPlan:
    """The plan of a start; `more` are options, or else keywords of `override_neuron_config`; `facts`: of `LoadPlan`."""
    assert token_buckets[-1] == max_model_len
    fields = ServingOptions.model_fields
    options = ServingOptions.model_validate(
        {
            "dtype": "float32",
            "max_rolling_batch_size": num_slots,
            "n_positions": token_buckets,
            "context_length_estimate": prefill_buckets,
            "tensor_parallel_degree": tp,
            "rolling_batch_strategy": "continuous_batching"
            if continuous
            else "naive_rolling_batch",
            "override_neuron_config": {k: v for k, v in more.items() if k not in fields} or None,
            **{name: value for name, value in more.items() if name in fields},
        }
    )
    path = directory / "config.json"
    model = ModelFacts.from_config(json.loads(path.read_text()) if path.exists() else {})
    case = Case(
        options,
        model,
        named("trn1.32xlarge"),
        NEURON_BACKENDS.get(backend),
        foreign_graphs=foreign_graphs,
    )
    plan = LoadPlan(
        directory,
        num_slots,
        max_model_len,
        prefill_buckets,
        token_buckets,
        tensor_parallel_degree=tp,
        arguments=library_arguments(case),
        **facts,
    )
    # As the process that loads it has it.
    crossed = PLANS.validate_json(PLANS.dump_json(plan))
    assert crossed == plan
    return crossed


def tnx_plan(
    directory: Path,
    *lengths: Any,
    block_size: int | None = None,
    num_speculative_tokens: int = 0,
    **more: Any,
) -> LoadPlan:
    """See `library_plan`. `block_size`: prompts in chunks, the cache in blocks."""
    in_blocks = {"enable_chunked_prefill": True, "pa_block_size": block_size, "cache_layout": "BSH"}
    return library_plan(
        "tnx",
        directory,
        *lengths,
        facts={
            "mixed_steps": block_size is not None,
            "num_speculative_tokens": num_speculative_tokens,
        },
        ngram_prompt_lookup_max=1 if num_speculative_tokens else None,
        speculative_length=num_speculative_tokens,
        **{**(in_blocks if block_size else {}), **more},
    )


BASE = {
    "model_loader": "tnx",
    "tensor_parallel_degree": "2",
    "dtype": "fp32",
    "n_positions": "256",
    "max_rolling_batch_size": "4",
}
ENVIRON = {"NEURON_RT_NUM_CORES": "8", "NEURON_COMPILE_CACHE_URL": CACHE}


def cached_in(cache: Path, plan: LoadPlan) -> LoadPlan:
    """The plan with a compiler's cache of its own, in which every compilation leaves a folder."""
    environment = {"NEURON_COMPILE_CACHE_URL": str(cache)}
    return replace(plan, arguments=replace(plan.arguments, environment=environment))
