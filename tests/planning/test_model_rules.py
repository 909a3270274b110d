"""Rules on options, model and machine: for each, a situation that breaks it and the nearest that does not."""

import itertools
import json
import math
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_python_neuronx.config.options import ServingOptions, option
from djl_python_neuronx.planning import defaults, machines, model_rules
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.machines import DeviceInfo
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.model_rules import findings
from djl_python_neuronx.planning.nxdi.capabilities import REFUSED
from djl_python_neuronx.planning.nxdi.fields import NXDI_FIELDS
from djl_python_neuronx.planning.tnx.fields import TNX_FIELDS

CAPABILITIES = {name: facts.architectures for name, facts in NEURON_BACKENDS.items()}
LLAMA = ModelFacts(
    model_type="llama",
    architecture="LlamaForCausalLM",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    vocab_size=128256,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_positions=8192,
    dtype="bfloat16",
    num_parameters=8_030_261_248,
    embedding_parameters=525_336_576,
    cache_values_per_token=65536,
)
MHA = replace(LLAMA, num_kv_heads=32, cache_values_per_token=262144)
INF2 = machines.named("inf2.48xlarge")
SMALL = machines.named("inf2.xlarge")
TRN1 = machines.named("trn1.32xlarge")
TRN2 = machines.named("trn2.48xlarge")
NO_DEVICE = DeviceInfo(None, 0, 0, 2**36, 8, "")
UNKNOWN_TYPE = DeviceInfo(None, 1, 0, 0, 8, "")
FILLED = {
    "model_id": "m",
    "tensor_parallel_degree": 8,
    "n_positions": 4096,
    "context_length_estimate": (1024, 4096),
    "max_rolling_batch_size": 8,
    "dtype": "bfloat16",
}
CASE_ARGUMENTS = (
    "loader",
    "facts",
    "device",
    "draft",
    "estimated_load_s",
    "filled",
    "library_version",
)


def model_of(model_type, **values):
    """A model of Llama's sizes and another architecture."""
    return replace(LLAMA, model_type=model_type, **values)


def findings_of(**values):
    """The findings of a situation, given as options and as the arguments of `findings`."""
    arguments = {name: values.pop(name) for name in CASE_ARGUMENTS if name in values}
    options = ServingOptions.model_validate({**FILLED, **values})
    facts, device = arguments.pop("facts", LLAMA), arguments.pop("device", INF2)
    estimated_load_s = arguments.pop("estimated_load_s", None)
    case = Case(
        options, facts, device, NEURON_BACKENDS.get(arguments.pop("loader", "tnx")), **arguments
    )
    return [*findings(case, estimated_load_s=estimated_load_s)]


def matching(values, name, level, text):
    return [
        found
        for found in findings_of(**values)
        if name in found.names and found.level == level and text in found.problem
    ]


DRAFT = {
    "speculative_draft_model": "draft",
    "max_rolling_batch_size": 1,
    "draft": replace(LLAMA, num_layers=1, num_parameters=10**9),
}
PER_ROW = {"do_sample": True, "dynamic": True, "per_batch_line": True, "global_top_k": 64}
EXPERTS = model_of("qwen3_moe", num_experts=128, config={"num_experts_per_tok": 8})
NXDI = {"loader": "nxdi"}
PROMPTS = {"context_length_estimate": (1001, 4096)}
FLASH = {**NXDI, "tensor_parallel_degree": 16, "device": TRN1, "shard_over_sequence": True}
STRIDED = {
    **NXDI,
    "device": TRN2,
    "cp_degree": 2,
    "context_length_estimate": (2048, 4096),
    "strided_context_parallel_kernel_enabled": True,
}
GROUPS = {
    **NXDI,
    "device": TRN2,
    "facts": EXPERTS,
    "tensor_parallel_degree": 64,
    "max_rolling_batch_size": 16,
}
HYBRID = {"moe_cte_tp_degree": 8, "moe_tkg_ep_degree": 64}
WINDOW = {"sliding_window": 2048}
GQA = "group_query_attention"
DEGREE = "tensor_parallel_degree"


class Row(NamedTuple):
    """An option of a finding, its level, a part of its text, the situation that breaks the rule, and what mends it.

    A situation has options and arguments of `findings_of`.
    """

    option: str
    level: str
    says: str
    breaks: dict
    mends: dict


LENGTHS = [
    Row(
        "n_positions",
        "error",
        says="supports 8192",
        breaks={"n_positions": 8193},
        mends={"n_positions": 8192},
    ),
    Row(
        "n_positions",
        "error",
        says="at most",
        breaks={"n_positions": (128, 9000)},
        mends={"n_positions": (128, 8192)},
    ),
    Row(
        "context_length_estimate",
        "error",
        says="supports 8192",
        breaks={"n_positions": 8194, "context_length_estimate": (128, 8193)},
        mends={"filled": ("context_length_estimate",)},
    ),
    Row(
        "context_length_estimate",
        "error",
        says="supports 8192",
        breaks={"context_length_estimate": (128, 8193)},
        mends={"n_positions": 8193},
    ),
    Row(
        "attn_kernel_enabled",
        "warning",
        says="no kernels on inf2 since Neuron SDK 2.29",
        breaks={"attn_kernel_enabled": True, "loader": "nxdi"},
        mends={"attn_kernel_enabled": False},
    ),
    Row(
        "fused_rmsnorm_mlp",
        "warning",
        says="no kernels on inf2",
        breaks={"fused_rmsnorm_mlp": True, "loader": "nxdi"},
        mends={"loader": "tnx"},
    ),
    Row(
        "cpu_threads",
        "note",
        says="leave it out",
        breaks={"cpu_threads": 2},
        mends={"loader": "cpu"},
    ),
    Row(
        "max_join_wait_ms",
        "note",
        says="only static batches wait",
        breaks={"max_join_wait_ms": 0},
        mends={"max_join_wait_ms": 100},
    ),
    Row(
        "max_join_wait_ms",
        "note",
        says="only static batches wait",
        breaks={"max_join_wait_ms": 50},
        mends={"facts": model_of("opt")},
    ),
    Row(
        "max_join_wait_ms",
        "note",
        says="only static batches wait",
        breaks={"max_join_wait_ms": 50, "max_rolling_batch_size": 1, "facts": model_of("opt")},
        mends={"max_rolling_batch_size": 2},
    ),
    Row(
        "max_join_wait_ms",
        "note",
        says="only static batches wait",
        breaks={
            "max_join_wait_ms": 50,
            "loader": "cpu",
            "facts": model_of("opt"),
            "device": NO_DEVICE,
        },
        mends={"loader": "tnx"},
    ),
    Row(
        "max_rolling_batch_size",
        "note",
        says="again, token by token",
        breaks={"facts": model_of("gpt_neox")},
        mends={"facts": model_of("gpt2")},
    ),
    Row(
        "max_rolling_batch_size",
        "note",
        says="write option.max_rolling_batch_size=8",
        breaks={"rolling_batch": "tnx", "filled": ("max_rolling_batch_size",)},
        mends={"filled": ()},
    ),
    Row(
        "max_rolling_batch_size",
        "note",
        says="24 of them would wait",
        breaks={"rolling_batch": "tnx", "filled": ("max_rolling_batch_size",)},
        mends={"max_rolling_batch_size": 32},
    ),
    Row(
        "max_rolling_batch_size",
        "note",
        says="DJL Serving",
        breaks={"rolling_batch": "tnx", "filled": ("max_rolling_batch_size",)},
        mends={"rolling_batch": "auto", "async_mode": True},
    ),
    Row(
        "model_loading_timeout",
        "warning",
        says="set at least 3600",
        breaks={"estimated_load_s": 1800.0, "model_loading_timeout": 1799},
        mends={"model_loading_timeout": 1800},
    ),
    Row(
        "model_loading_timeout",
        "warning",
        says="30 minutes",
        breaks={"estimated_load_s": 1800.0},
        mends={"compiled_graph_path": "p"},
    ),
    Row(
        "model_loading_timeout",
        "warning",
        says="compile beforehand",
        breaks={"estimated_load_s": 1800.0},
        mends={"estimated_load_s": None},
    ),
    Row(
        "compilation_worker_count",
        "warning",
        says="192 CPUs",
        breaks={"compilation_worker_count": 193},
        mends={"compilation_worker_count": 192},
    ),
]
ADAPTERS = {**NXDI, "enable_lora": True, "tensor_parallel_degree": 2}
OF_QWEN2 = {**ADAPTERS, "facts": model_of("qwen2")}
RELEASES = [
    Row(
        "enable_lora",
        "error",
        says="0.7 (SDK 2.27) is the first for the keyword lora_config.dynamic_multi_lora; leave it out, or install",
        breaks={**ADAPTERS, "library_version": "0.6.10598"},
        mends={"library_version": "0.7.14366"},
    ),
    Row(
        "enable_lora",
        "error",
        says="0.8 (SDK 2.28) is the first for the keyword lora_config;",
        breaks={**OF_QWEN2, "library_version": "0.7.14366"},
        mends={"library_version": "0.8.16251"},
    ),
    Row(
        "enable_lora",
        "error",
        says="loses the biases",
        breaks={
            **ADAPTERS,
            "facts": replace(LLAMA, config={"attention_bias": True}),
            "library_version": "0.7.14366",
        },
        mends={"library_version": "0.8.16251"},
    ),
    Row(
        "enable_prefix_caching",
        "error",
        says="takes no adapters with blocks",
        breaks={**ADAPTERS, "enable_prefix_caching": True, "library_version": "0.7.14366"},
        mends={"enable_prefix_caching": None},
    ),
    Row(
        "lora_target_modules",
        "error",
        says="no adapters of up_proj in a mistral; set some of q_proj, k_proj, v_proj and o_proj",
        breaks={
            **ADAPTERS,
            "facts": model_of("mistral"),
            "lora_target_modules": ("up_proj", "q_proj"),
        },
        mends={"lora_target_modules": ("q_proj",)},
    ),
    Row(
        "tensor_parallel_degree",
        "error",
        says="divide the 11009 columns of the MLP",
        breaks={**ADAPTERS, "facts": replace(LLAMA, intermediate_size=11009)},
        mends={"lora_target_modules": ("v_proj",)},
    ),
    Row(
        "enable_lora",
        "error",
        says="no qwen3_moe was compared with PEFT",
        breaks={**ADAPTERS, "facts": EXPERTS},
        mends={"facts": LLAMA},
    ),
    Row(
        "lora_shard_linear_layer",
        "error",
        says="divide 4097 columns",
        breaks={
            **ADAPTERS,
            "facts": replace(LLAMA, hidden_size=4097),
            "lora_shard_linear_layer": True,
        },
        mends={"lora_shard_linear_layer": None},
    ),
    Row(
        "token_generation_batches",
        "error",
        says="0.7.14366 is installed, and 0.8 (SDK 2.28) is the first for the keyword token_generation_batches; leave",
        breaks={**NXDI, "token_generation_batches": (1, 2), "library_version": "0.7.14366"},
        mends={"library_version": "0.8.16251+f3ca5575"},
    ),
    Row(
        "token_generation_batches",
        "note",
        says="the keyword token_generation_batches needs 0.8 (SDK 2.28) of NxD Inference, or a newer one",
        breaks={**NXDI, "token_generation_batches": (1, 2)},
        mends={"library_version": "0.10.18399"},
    ),
    Row(
        "override_neuron_config",
        "error",
        says="0.5 (SDK 2.25) is the first for the keyword on_device_sampling_config.top_k_kernel_enabled",
        breaks={
            **NXDI,
            "override_neuron_config": {
                "on_device_sampling_config": {"top_k_kernel_enabled": False}
            },
            "on_device_generation": {"do_sample": False},
            "library_version": "0.4.7422",
        },
        mends={"library_version": "0.5.9230"},
    ),
    Row(
        "override_neuron_config",
        "error",
        says="no keyword mlp_kernel_enable; did you mean 'mlp_kernel_enabled'?",
        breaks={
            **NXDI,
            "override_neuron_config": {"mlp_kernel_enable": True},
            "library_version": "0.7.14366",
        },
        mends={"override_neuron_config": {"layer_boundary_markers": True}},
    ),
    Row(
        "override_neuron_config",
        "error",
        says="no keyword on_device_sampling_config.top_n",
        breaks={
            **NXDI,
            "override_neuron_config": {"on_device_sampling_config": {"top_n": 1}},
            "on_device_generation": {"do_sample": False},
            "library_version": "0.9.1",
        },
        mends={"override_neuron_config": {}},
    ),
    *(
        Row(
            "override_neuron_config",
            "warning",
            says="no keyword sliding_window_attention_dp_degree",
            breaks={
                **NXDI,
                "override_neuron_config": {"sliding_window_attention_dp_degree": 1},
                **version,
            },
            mends={"override_neuron_config": {}},
        )
        for version in ({}, {"library_version": "0.10.18399"})
    ),
    Row(
        "fuse_qkv",
        "error",
        says="0.9 (SDK 2.29) is the first for the keyword fused_qkv",
        breaks={
            **NXDI,
            "facts": model_of("qwen3"),
            "fuse_qkv": True,
            "library_version": "0.8.0",
        },
        mends={"facts": model_of("qwen2")},
    ),
    Row(
        "fuse_qkv",
        "error",
        says="0.7 (SDK 2.27) is the first for the keyword fused_qkv",
        breaks={
            **NXDI,
            "facts": model_of("qwen2"),
            "fuse_qkv": True,
            "library_version": "0.6.0",
        },
        mends={"facts": LLAMA},
    ),
    Row(
        "model_loader",
        "error",
        says="0.4.7422 is installed, and 0.5 (SDK 2.25) is the first for model_type qwen3; install",
        breaks={**NXDI, "facts": model_of("qwen3"), "library_version": "0.4.7422"},
        mends={"facts": model_of("qwen2")},
    ),
    Row(
        "model_loader",
        "note",
        says="model_type mistral needs the second release of 0.9 (SDK 2.29) of NxD Inference, or a newer one",
        breaks={**NXDI, "facts": model_of("mistral")},
        mends={"facts": LLAMA},
    ),
    Row(
        "model_loader",
        "warning",
        says="0.3.5591 is installed; this package is for 0.4 (SDK 2.24) to 0.10 (SDK 2.30 and 2.31)",
        breaks={**NXDI, "library_version": "0.3.5591"},
        mends={"library_version": "0.4.7422"},
    ),
    Row(
        "model_loader",
        "warning",
        says="0.11.1 is installed",
        breaks={**NXDI, "library_version": "0.11.1"},
        mends={"library_version": "0.10.18399"},
    ),
    Row(
        "attn_kernel_enabled",
        "warning",
        says="no kernels on inf2",
        breaks={**NXDI, "attn_kernel_enabled": True, "library_version": "0.9.1"},
        mends={"library_version": "0.8.1"},
    ),
    *(
        Row(
            name,
            "warning",
            says="no kernels on inf2",
            breaks={**NXDI, "facts": EXPERTS, name: True},
            mends={"device": TRN2},
        )
        for name in ("use_index_calc_kernel", "expert_mlp_nki_kernel_enabled")
    ),
    *(
        Row(
            "override_neuron_config",
            "warning",
            says="no kernels on inf2",
            breaks={**NXDI, "override_neuron_config": {**given}, "on_device_generation": PER_ROW},
            mends={"device": TRN2},
        )
        for given in (
            {"attn_block_cte_nki_kernel_enabled": True},
            {"on_device_sampling_config": {"top_k_kernel_enabled": True}},
        )
    ),
]
ON_CPU = [
    *(
        Row(
            name, "note", says="cpu backend", breaks={"loader": "cpu", **values}, mends={name: None}
        )
        for name, values in {
            "fuse_qkv": {"fuse_qkv": True},
            "quantize": {"quantize": "static_int8"},
            "draft_model_tp_size": {**DRAFT, "draft_model_tp_size": 4},
            "on_device_generation": {"on_device_generation": True},
            "override_neuron_config": {"override_neuron_config": {"a": 1}},
        }.items()
    ),
    Row(DEGREE, "note", says="left out", breaks={"loader": "cpu", DEGREE: 8}, mends={DEGREE: None}),
    Row(
        "speculative_draft_model",
        "error",
        says="128257 tokens and the model's 128256",
        breaks={"loader": "cpu", **DRAFT, "draft": replace(LLAMA, vocab_size=128257)},
        mends={"draft": LLAMA},
    ),
    Row(
        "speculative_draft_model",
        "error",
        says="supports 4095",
        breaks={"loader": "cpu", **DRAFT, "draft": replace(LLAMA, max_positions=4095)},
        mends={"n_positions": 4095},
    ),
]
EQUIVALENTS = [
    Row(
        "unroll",
        "note",
        says="cannot use it; left out",
        breaks={"facts": model_of("gptj"), "unroll": 4},
        mends={"facts": model_of("gpt2")},
    ),
    Row(
        "quantize",
        "error",
        says="use more cores",
        breaks={"facts": model_of("gpt_neox"), "quantize": "static_int8"},
        mends={"quantize": None},
    ),
    Row(
        "compiled_graph_path",
        "warning",
        says="cannot use graphs that transformers-neuronx compiled: all would be compiled again. If they are graphs of "
        "transformers-neuronx, set model_loader=tnx; else leave it out, or set model_loader=nxdi",
        breaks={"loader": "nxdi", "compiled_graph_path": "s3://b/k"},
        mends={"model_loader": "nxdi"},
    ),
    Row(
        "compiled_graph_path",
        "warning",
        says="compiled again",
        breaks={"loader": "nxdi", "compiled_graph_path": "s3://b/k"},
        mends={"facts": model_of("qwen2")},
    ),
    Row(
        "weight_tiling",
        "note",
        says="left out",
        breaks={"loader": "nxdi", "weight_tiling": True},
        mends={"loader": "tnx"},
    ),
    Row(
        "vocab_parallel",
        "note",
        says="left out",
        breaks={"vocab_parallel": True},
        mends={"loader": "nxdi"},
    ),
    Row(
        "bf16_rms_norm",
        "warning",
        says="which changes rounding and overflows only",
        breaks={"loader": "nxdi", "bf16_rms_norm": True},
        mends={"loader": "tnx"},
    ),
    Row(
        "pipeline_parallel_degree",
        "error",
        says="remove it",
        breaks={"pipeline_parallel_degree": 2},
        mends={"loader": "nxdi"},
    ),
    Row(
        "enable_saturate_infinity",
        "warning",
        says="which changes rounding and overflows only",
        breaks={"loader": "nxdi", "enable_saturate_infinity": True},
        mends={"enable_saturate_infinity": False},
    ),
    Row(
        "model_loader",
        "error",
        says="mixtral, opt; set model_loader=nxdi or model_loader=cpu",
        breaks={"facts": model_of("qwen2")},
        mends={"loader": "nxdi"},
    ),
    Row(
        "model_loader",
        "error",
        says="set model_loader=tnx or model_loader=cpu",
        breaks={"loader": "nxdi", "facts": model_of("opt")},
        mends={"loader": "tnx"},
    ),
    Row(
        "model_loader",
        "error",
        says="names none",
        breaks={"facts": model_of(None)},
        mends={"facts": LLAMA},
    ),
    Row(
        "model_loader",
        "note",
        says="never run",
        breaks={"loader": "nxdi", "facts": model_of("gpt_oss")},
        mends={"facts": LLAMA},
    ),
    Row(
        "fuse_mlp",
        "note",
        says="cannot use it",
        breaks={"facts": model_of("mistral"), "fuse_mlp": True},
        mends={"facts": LLAMA},
    ),
    Row(
        "bf16_rms_norm",
        "error",
        says="cannot use it",
        breaks={"facts": model_of("opt"), "bf16_rms_norm": True},
        mends={"facts": model_of("mistral")},
    ),
    Row(
        "enable_chunked_prefill",
        "error",
        says="cannot use it",
        breaks={
            "facts": model_of("mistral"),
            "enable_chunked_prefill": True,
            "cache_layout": "BSH",
        },
        mends={"facts": LLAMA},
    ),
    Row(
        "quantize",
        "error",
        says="experts",
        breaks={"facts": model_of("mixtral"), "quantize": "static_int8"},
        mends={"facts": model_of("mistral")},
    ),
    Row(
        "quantize",
        "error",
        says="no quantised weights",
        breaks={"facts": model_of("gpt_neox"), "quantize": "static_int8"},
        mends={"facts": model_of("gpt2")},
    ),
    Row(
        "kv_cache_quantize",
        "error",
        says="in dtype only",
        breaks={"facts": model_of("bloom"), "kv_cache_quantize": "fp8"},
        mends={"facts": model_of("mixtral")},
    ),
    Row(
        "attention_layout",
        "error",
        says="no BSH layout",
        breaks={"facts": model_of("opt"), "attention_layout": "BSH"},
        mends={"attention_layout": "HSB"},
    ),
    Row(
        "on_device_generation",
        "error",
        says="cannot use it",
        breaks={"facts": model_of("gpt_neox"), "on_device_generation": PER_ROW},
        mends={"facts": model_of("bloom")},
    ),
]
BATCHES = [
    Row(
        "max_rolling_batch_size",
        "note",
        says="prefilled again",
        breaks={"facts": model_of("opt")},
        mends={"max_rolling_batch_size": 1},
    ),
    Row(
        "max_rolling_batch_size",
        "note",
        says="prefilled again",
        breaks={
            "facts": model_of("opt"),
            "batch_size": 8,
            "rolling_batch": "disable",
            "async_mode": True,
        },
        mends={"async_mode": False},
    ),
    Row(
        "max_rolling_batch_size",
        "note",
        says="static batches",
        breaks={"facts": model_of("gpt_neox")},
        mends={"facts": LLAMA},
    ),
    Row(
        "rolling_batch_strategy",
        "error",
        says="leave it out",
        breaks={"facts": model_of("bloom"), "rolling_batch_strategy": "continuous_batching"},
        mends={"rolling_batch_strategy": "naive_rolling_batch"},
    ),
    Row(
        "padding_side",
        "error",
        says="on the left",
        breaks={"facts": model_of("opt"), "padding_side": "right"},
        mends={"padding_side": "left"},
    ),
    Row(
        "padding_side",
        "error",
        says="on the right",
        breaks={"padding_side": "left"},
        mends={"rolling_batch_strategy": "naive_rolling_batch"},
    ),
    Row(
        "padding_side",
        "error",
        says="on the right",
        breaks={"padding_side": "left"},
        mends={"padding_side": "right"},
    ),
    Row(
        "padding_side",
        "error",
        says="static batches pad on the left",
        breaks={"padding_side": "right", "rolling_batch_strategy": "naive_rolling_batch"},
        mends={"rolling_batch_strategy": None},
    ),
    *(
        Row(
            "collectives_layout",
            "error",
            says="wrong values",
            breaks={"facts": model_of(kind), "collectives_layout": "BSH"},
            mends={"facts": model_of(kind), "collectives_layout": "BSH", "attention_layout": "BSH"},
        )
        for kind in ("gpt2", "bloom")
    ),
    Row(
        "collectives_layout",
        "error",
        says="wrong values",
        breaks={"facts": model_of("opt"), "collectives_layout": "BSH"},
        mends={"facts": LLAMA},
    ),
    Row(
        "cache_layout",
        "error",
        says="continuous batching",
        breaks={
            "facts": model_of("opt"),
            "cache_layout": "BSH",
            "context_length_estimate": (4096,),
        },
        mends={"facts": LLAMA},
    ),
    Row(
        "n_positions",
        "error",
        says="one length",
        breaks={"facts": model_of("gpt2"), "n_positions": (1024, 4096)},
        mends={"n_positions": (4096,)},
    ),
    Row(
        "n_positions",
        "error",
        says="one length",
        breaks={"facts": model_of("gptj"), "n_positions": (1024, 4096)},
        mends={"facts": LLAMA},
    ),
    Row(
        "context_length_estimate",
        "warning",
        says="token by token",
        breaks={"facts": model_of("gpt_neox")},
        mends={"filled": ("context_length_estimate",)},
    ),
    Row(
        "context_length_estimate",
        "warning",
        says="token by token",
        breaks={"facts": model_of("gpt_neox")},
        mends={"facts": LLAMA},
    ),
    Row(
        "speculative_draft_model",
        "error",
        says="only for llama",
        breaks={**DRAFT, "facts": model_of("mistral")},
        mends={"facts": LLAMA},
    ),
    Row(
        "ngram_prompt_lookup_max",
        "error",
        says="only for llama",
        breaks={"ngram_prompt_lookup_max": 3, "facts": model_of("gpt2")},
        mends={"facts": LLAMA},
    ),
    Row(
        "speculative_draft_model",
        "error",
        says="static batches",
        breaks={**DRAFT, "draft": model_of("opt")},
        mends={"draft": model_of("mistral")},
    ),
    Row(
        "speculative_draft_model",
        "error",
        says="no class for the draft",
        breaks={**DRAFT, "draft": model_of("phi")},
        mends={"draft": LLAMA},
    ),
    Row(
        "speculative_draft_model",
        "error",
        says="128257 tokens and the model's 128256",
        breaks={**DRAFT, "draft": replace(LLAMA, vocab_size=128257)},
        mends={"draft": None},
    ),
    Row(
        "speculative_draft_model",
        "error",
        says="supports 4095",
        breaks={**DRAFT, "draft": replace(LLAMA, max_positions=4095)},
        mends={"draft": replace(LLAMA, max_positions=4096)},
    ),
    Row(
        "windowed_context_encoding_size",
        "error",
        says="set 2048",
        breaks={
            "loader": "nxdi",
            "facts": model_of("mistral", **WINDOW),
            "n_positions": 2048,
            "windowed_context_encoding_size": 2047,
        },
        mends={"windowed_context_encoding_size": 2048},
    ),
    Row(
        "windowed_context_encoding_size",
        "error",
        says="fails at a sliding window's ring",
        breaks={
            "loader": "nxdi",
            "facts": model_of("mistral", **WINDOW),
            "windowed_context_encoding_size": 2048,
        },
        mends={"n_positions": 2048},
    ),
    Row(
        "context_length_estimate",
        "error",
        says="at least 2047; leave it out, or set n_positions=2048 at most",
        breaks={
            "loader": "nxdi",
            "facts": model_of("mistral", **WINDOW),
            "context_length_estimate": (2046, 4096),
        },
        mends={"context_length_estimate": (2047, 4096)},
    ),
    Row(
        "n_positions",
        "error",
        says="each prefill graph fills a KV cache as long as the model's sliding window (2048 tokens)",
        breaks={
            "loader": "nxdi",
            "facts": model_of("mistral", **WINDOW),
            "n_positions": 2049,
            "context_length_estimate": (128, 2048),
        },
        mends={"n_positions": 2048},
    ),
    Row(
        "async_execution",
        "note",
        says="left out: a step ahead overwrites",
        breaks={
            "loader": "nxdi",
            "facts": model_of("mistral", **WINDOW),
            "context_length_estimate": (4096,),
            "on_device_generation": PER_ROW,
            "async_execution": True,
        },
        mends={"n_positions": 2048},
    ),
    Row(
        "on_device_generation",
        "note",
        says="top_k above 64",
        breaks={"on_device_generation": PER_ROW},
        mends={"on_device_generation": None},
    ),
    Row(
        "on_device_generation",
        "note",
        says="sampling without top_k except on OpenAI's routes) answer 400; on_device_default_top_k=global_top_k "
        "samples",
        breaks={"on_device_generation": PER_ROW},
        mends={"on_device_default_top_k": "global_top_k"},
    ),
    Row(
        "on_device_generation",
        "note",
        says="sampling without top_k is among the 64 most likely tokens",
        breaks={"on_device_generation": PER_ROW, "on_device_default_top_k": "global_top_k"},
        mends={"on_device_default_top_k": None},
    ),
    Row(
        "on_device_generation",
        "warning",
        says="16 bits",
        breaks={"on_device_generation": PER_ROW},
        mends={"dtype": "float32"},
    ),
    Row(
        "on_device_generation",
        "note",
        says="most probable token",
        breaks={"on_device_generation": {"top_k": 1}},
        mends={"on_device_generation": {"do_sample": True}},
    ),
    Row(
        "on_device_generation",
        "note",
        says="seed, top_p below 1, details",
        breaks={"loader": "nxdi", "on_device_generation": True},
        mends={"output_logits": True},
    ),
    Row(
        "output_logits",
        "note",
        says="seed, top_p below 1, details (sent, or from generation_config.json)",
        breaks={"loader": "nxdi", "on_device_generation": True, "output_logits": True},
        mends={"on_device_generation": {}},
    ),
]
CORES = [
    Row(DEGREE, "error", says="8, 12, 16, 20 or 24", breaks={DEGREE: 3}, mends={DEGREE: 8}),
    Row(
        DEGREE, "error", says="on trn1", breaks={DEGREE: 4, "device": TRN1}, mends={"device": INF2}
    ),
    Row(DEGREE, "error", says="on trn2", breaks={DEGREE: 24, "device": TRN2}, mends={DEGREE: 64}),
    Row(
        DEGREE,
        "error",
        says="leave it out, or set 1, 2, 4, 6, 8, 12, 16, 20, 24, 32 or 64",
        breaks={DEGREE: 5, "device": UNKNOWN_TYPE},
        mends={DEGREE: 64},
    ),
    Row(
        DEGREE,
        "error",
        says="leave it out, or set 1, 2, 4, 8 or 16",
        breaks={**NXDI, DEGREE: 3, "facts": replace(LLAMA, vocab_size=32000)},
        mends={"facts": LLAMA},
    ),
    Row(DEGREE, "note", says="used in practice", breaks={DEGREE: 12}, mends={DEGREE: 8}),
    Row(
        DEGREE, "error", says="on trn1", breaks={DEGREE: 12, "device": TRN1}, mends={"device": INF2}
    ),
    Row(
        DEGREE,
        "error",
        says="8 NeuronCores are needed and 2",
        breaks={"device": SMALL},
        mends={DEGREE: 2},
    ),
    Row(
        DEGREE,
        "error",
        says="and 8 can be used on inf2.48xlarge",
        breaks={DEGREE: 24, "device": replace(INF2, visible_cores=8)},
        mends={"device": INF2},
    ),
    Row(
        DEGREE, "error", says="are needed", breaks={"device": SMALL}, mends={"device": UNKNOWN_TYPE}
    ),
    Row(
        DEGREE,
        "error",
        says="on trn1; leave it out, or set 1, 2, 8, 16 or 32",
        breaks={DEGREE: 64, "device": TRN1},
        mends={"device": replace(TRN1, local_degree=32)},
    ),
    Row(
        DEGREE,
        "error",
        says="64 NeuronCores are needed and 32 can be used",
        breaks={DEGREE: 64, "device": TRN1},
        mends={"device": replace(TRN1, local_degree=32)},
    ),
    Row(
        DEGREE,
        "error",
        says="64 NeuronCores are needed and 32 can be used on 2 machines",
        breaks={DEGREE: 64, "device": replace(TRN1, local_degree=32, visible_cores=16)},
        mends={"device": replace(TRN1, local_degree=16, visible_cores=16)},
    ),
    Row(
        DEGREE,
        "note",
        says="8 KV heads are copied to 64",
        breaks={DEGREE: 64, "device": replace(TRN1, local_degree=32)},
        mends={"device": TRN1},
    ),
    Row(
        DEGREE,
        "error",
        says="each machine gives 24 cores (NEURON_LOCAL_TP); set a multiple",
        breaks={DEGREE: 64, "device": replace(INF2, local_degree=24)},
        mends={DEGREE: 48},
    ),
    Row(
        "pipeline_parallel_degree",
        "error",
        says="32 NeuronCores",
        breaks={"loader": "nxdi", "pipeline_parallel_degree": 4},
        mends={"pipeline_parallel_degree": 3},
    ),
    Row(
        "ep_degree",
        "error",
        says="32 NeuronCores",
        breaks={"loader": "nxdi", "facts": EXPERTS, "ep_degree": 4},
        mends={"ep_degree": 3},
    ),
    Row(
        "draft_model_tp_size",
        "error",
        says="2 NeuronCores can be used",
        breaks={**DRAFT, DEGREE: 2, "draft_model_tp_size": 4, "device": SMALL},
        mends={"draft_model_tp_size": 2},
    ),
    Row(
        "draft_model_tp_size",
        "error",
        says="leave it out, or set 1, 2, 4, 6, 8, 12, 16, 20 or 24",
        breaks={**DRAFT, "draft_model_tp_size": 3},
        mends={"draft_model_tp_size": 4},
    ),
    Row(
        DEGREE,
        "error",
        says="set 1, 2, 4 or 8",
        breaks={DEGREE: 24, "facts": model_of("gpt_neox")},
        mends={DEGREE: 8},
    ),
    Row(
        DEGREE,
        "error",
        says="must be a divisor of the 32 heads",
        breaks={DEGREE: 24, "facts": model_of("gptj")},
        mends={"facts": LLAMA},
    ),
    Row(
        DEGREE,
        "error",
        says="8 can be used on inf2.48xlarge, of 24: NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES limits this "
        "process; lower the degree, raise that limit, or use a larger machine "
        "(smallest that fits: tensor_parallel_degree=2)",
        breaks={DEGREE: 24, "device": replace(INF2, visible_cores=8)},
        mends={"device": INF2},
    ),
    Row(
        DEGREE,
        "error",
        says="no known machine holds it",
        breaks={"device": SMALL, "facts": replace(LLAMA, num_parameters=10**13)},
        mends={"facts": LLAMA},
    ),
    *(
        Row(
            DEGREE,
            "error",
            says=f"a divisor of the {what}",
            breaks={"loader": "nxdi", DEGREE: 24, "facts": model_of(model_type, **sizes)},
            mends={DEGREE: 4},
        )
        for model_type, sizes, what in (
            ("mixtral", {}, "hidden size of 4096"),
            ("dbrx", {"hidden_size": 6144}, "intermediate size of 14336"),
            (
                "qwen3_moe",
                {"hidden_size": 6144, "intermediate_size": 1536, "vocab_size": 128260},
                "vocab size of 128260",
            ),
        )
    ),
    Row(
        DEGREE,
        "error",
        says="the width of all 8 experts, 8 x 14336",
        breaks={DEGREE: 24, "facts": model_of("mixtral", num_experts=8)},
        mends={"facts": model_of("mixtral", num_experts=8, intermediate_size=14337)},
    ),
    Row(
        DEGREE,
        "error",
        says="a divisor or a multiple of the 8 experts",
        breaks={DEGREE: 12, "facts": model_of("mixtral", num_experts=8)},
        mends={DEGREE: 8},
    ),
    Row(
        DEGREE,
        "note",
        says="32 heads are padded to 48",
        breaks={DEGREE: 24, "facts": LLAMA},
        mends={DEGREE: 8},
    ),
    Row(DEGREE, "note", says="8 KV heads are copied to 24", breaks={DEGREE: 24}, mends={DEGREE: 8}),
    # 15.01e9 bytes of weights without the embedding, and 4096 x 131,072 of cache, on a core of 410e9 bytes/s.
    Row(
        DEGREE,
        "note",
        says="with 8 cores it reads 1.81 GiB on each in at least 4.7 ms",
        breaks={DEGREE: 24, "n_positions": 4096, "max_rolling_batch_size": 1},
        mends={DEGREE: 8},
    ),
    Row(
        DEGREE,
        "note",
        says="ms, which does not fit",
        breaks={DEGREE: 24, "facts": replace(LLAMA, num_parameters=10**11)},
        mends={"facts": LLAMA},
    ),
    Row(
        DEGREE,
        "note",
        says="GiB more on each core",
        breaks={DEGREE: 24},
        mends={"facts": replace(LLAMA, num_parameters=None)},
    ),
    Row(
        DEGREE,
        "warning",
        says="8 KV heads are copied to 48 so that 12 cores share them evenly: 6.92 GiB more on each core; "
        "tensor_parallel_degree=8 needs no more memory",
        breaks={DEGREE: 12, "max_rolling_batch_size": 32, "facts": replace(LLAMA, num_heads=40)},
        mends={DEGREE: 24},
    ),
]
LAYOUT = [
    Row(
        GQA,
        "warning",
        says="divides the 8 KV heads",
        breaks={DEGREE: 24, GQA: "shard-over-heads"},
        mends={DEGREE: 8},
    ),
    Row(
        GQA,
        "warning",
        says="divides the 9 slots",
        breaks={GQA: "shard-over-batch", "max_rolling_batch_size": 9},
        mends={GQA: "replicated-heads"},
    ),
    Row(
        GQA,
        "warning",
        says="copies the KV heads",
        breaks={DEGREE: 24, GQA: "all-gather-heads", "facts": replace(LLAMA, num_kv_heads=5)},
        mends={GQA: None},
    ),
    Row(
        GQA,
        "warning",
        says="divides KV heads and query heads",
        # 24 cores divide 6 KV heads of 128; the 16 heads that pad 32 to 48 are no multiple of 6
        breaks={DEGREE: 24, GQA: "all-gather-heads", "facts": replace(LLAMA, num_kv_heads=6)},
        mends={"facts": replace(LLAMA, num_kv_heads=6, num_heads=42)},
    ),
    Row(
        GQA,
        "warning",
        says="nothing is shared",
        breaks={GQA: "all-gather-heads", "facts": MHA},
        mends={"facts": LLAMA},
    ),
    Row(
        "shard_over_sequence",
        "error",
        says="multiple of the 8 KV heads",
        breaks={DEGREE: 4, "shard_over_sequence": True},
        mends={DEGREE: 24},
    ),
    Row(
        "shard_over_sequence",
        "error",
        says="each of the 8 KV heads has one core",
        breaks={DEGREE: 8, "shard_over_sequence": True},
        mends={DEGREE: 24},
    ),
    Row(
        "shard_over_sequence",
        "error",
        says="while group_query_attention is set",
        breaks={"shard_over_sequence": True, GQA: "replicated-heads", "facts": MHA},
        mends={GQA: None},
    ),
    Row(
        "shard_over_sequence",
        "error",
        says="multiple of the 8 KV heads",
        breaks={"loader": "nxdi", DEGREE: 4, "shard_over_sequence": True},
        mends={"facts": model_of("mistral")},
    ),
    Row(
        # 12 heads take no more than 12 of 16 cores, which 8 KV heads do not divide
        "shard_over_sequence",
        "error",
        says="multiple of the 8 KV heads",
        breaks={
            "loader": "nxdi",
            DEGREE: 16,
            "device": TRN1,
            "shard_over_sequence": True,
            "facts": replace(LLAMA, num_heads=12),
        },
        mends={"loader": "tnx"},
    ),
    Row(
        "shard_over_sequence",
        "error",
        says="the 42 heads are padded",
        breaks={
            DEGREE: 12,
            "shard_over_sequence": True,
            "facts": replace(LLAMA, num_kv_heads=6, num_heads=42),
        },
        mends={"facts": replace(LLAMA, num_kv_heads=6, num_heads=36)},
    ),
    Row(
        "shard_over_sequence",
        "error",
        says="the 6 heads are padded",
        breaks={"shard_over_sequence": True, "facts": replace(LLAMA, num_kv_heads=2, num_heads=6)},
        mends={"facts": replace(LLAMA, num_kv_heads=2, num_heads=4)},
    ),
    *(
        Row(
            name,
            "error",
            says="multiples of 8, and not 1001; round",
            breaks={**NXDI, name: value, **PROMPTS},
            mends=change,
        )
        for name, value, change in (
            ("sequence_parallel", True, {"context_length_estimate": (1008, 4096)}),
            ("sequence_parallel", True, {"windowed_context_encoding_size": 128}),
            ("cp_degree", 8, {"context_length_estimate": (1008, 4096)}),
            ("windowed_context_encoding_size", 8, {"context_length_estimate": (1008, 4096)}),
        )
    ),
    Row(
        "sequence_parallel",
        "error",
        says="not 1024 and 4096; round them up, to 4080 at most",
        breaks={
            **NXDI,
            DEGREE: 24,
            "sequence_parallel": True,
            "n_positions": 4096,
            "context_length_estimate": (1024, 4096),
        },
        mends={"context_length_estimate": (1032, 4080)},
    ),
    Row(
        "sequence_parallel",
        "error",
        says="multiples of 8, and not 100",
        breaks={**NXDI, "sequence_parallel": True, "windowed_context_encoding_size": 100},
        mends={"windowed_context_encoding_size": 64},
    ),
    *(
        Row(
            "shard_over_sequence",
            "error",
            says="multiples of 2, and not 1001",
            breaks={**FLASH, **uneven},
            mends=even,
        )
        for uneven, even in (
            (PROMPTS, {"context_length_estimate": (1002, 4096)}),
            ({"n_positions": (1001, 4096)}, {"n_positions": (1002, 4096)}),
        )
    ),
    Row(
        "windowed_context_encoding_size",
        "note",
        says="each prefill takes all 4 slots",
        breaks={
            **NXDI,
            "windowed_context_encoding_size": 128,
            "max_rolling_batch_size": 4,
            "rolling_batch_strategy": "naive_rolling_batch",
        },
        mends={"windowed_context_encoding_size": None},
    ),
    Row(
        "windowed_context_encoding_size",
        "error",
        says="cuts prompts in static",
        breaks={**NXDI, "windowed_context_encoding_size": 128},
        mends={"rolling_batch_strategy": "naive_rolling_batch"},
    ),
    Row(
        "windowed_context_encoding_size",
        "error",
        says="cuts prompts in static",
        breaks={**NXDI, "windowed_context_encoding_size": 1024},
        mends={"context_length_estimate": (1024,)},
    ),
    Row(
        "cp_degree",
        "error",
        says="4 cores of a decode are fewer than the 8 KV heads",
        breaks={**NXDI, "cp_degree": 2, DEGREE: 4},
        mends={DEGREE: 8},
    ),
    Row(
        "attention_dp_degree",
        "error",
        says="4 cores of a decode are fewer than the 8 KV heads",
        breaks={**NXDI, "attention_dp_degree": 2},
        mends={"cp_degree": 2},
    ),
    *(
        Row(
            "attn_kernel_enabled",
            "error",
            says=f"from {least} tokens on, has no sliding window",
            breaks={**NXDI, "device": TRN1, "facts": model_of("mistral", **WINDOW), **prompts},
            mends=change,
        )
        for least, prompts, change in (
            (4096, {"context_length_estimate": (2048, 4096)}, {"attn_kernel_enabled": False}),
            (4096, {"context_length_estimate": (2048, 4096)}, {"device": TRN2}),
            (4096, {"context_length_estimate": (4096,)}, {"context_length_estimate": (4095,)}),
            (4096, {"context_length_estimate": (4096,)}, {"cp_degree": 2}),
            (4096, {"context_length_estimate": (4096,)}, {"facts": model_of("mistral")}),
            (
                512,
                {"context_length_estimate": (2048,), "attn_kernel_enabled": True},
                {"attn_kernel_enabled": None},
            ),
        )
    ),
    *(
        Row(
            "strided_context_parallel_kernel_enabled",
            "error",
            says="more than 256 tokens",
            breaks=wrong,
            mends=right,
        )
        for wrong, right in (
            ({**STRIDED, "device": TRN1}, {"device": TRN2}),
            ({**STRIDED, "logical_nc_config": 1}, {"logical_nc_config": 2}),
            ({**STRIDED, "facts": model_of("mistral", **WINDOW)}, {"facts": model_of("mistral")}),
            (
                {**STRIDED, "context_length_estimate": (256, 4096)},
                {"context_length_estimate": (258, 4096)},
            ),
        )
    ),
    Row(
        "moe_ep_degree",
        "error",
        says="must be 256, the product of moe_ep_degree=32 and moe_tp_degree=8",
        breaks={**GROUPS, "moe_tp_degree": 8, "moe_ep_degree": 32},
        mends={"moe_ep_degree": 8},
    ),
    Row(
        "hybrid_sharding_config",
        "error",
        says="must be 8, the product of moe_cte_ep_degree=1",
        breaks={**GROUPS, "hybrid_sharding_config": HYBRID},
        mends={"hybrid_sharding_config": {**HYBRID, "moe_cte_tp_degree": 64}},
    ),
    Row(
        "hybrid_sharding_config",
        "error",
        says="moe_cte_tp is no key of it; expected moe_cte_tp_degree, moe_cte_ep_degree",
        breaks={**GROUPS, "hybrid_sharding_config": {"moe_cte_tp": 4}},
        mends={"hybrid_sharding_config": {**HYBRID, "moe_cte_tp_degree": 64}},
    ),
    Row(
        "hybrid_sharding_config",
        "error",
        says="moe_cte_ep_degree is [1]; expected a whole number",
        breaks={**GROUPS, "hybrid_sharding_config": {**HYBRID, "moe_cte_ep_degree": [1]}},
        mends={"hybrid_sharding_config": {**HYBRID, "moe_cte_tp_degree": 64}},
    ),
    Row(
        "moe_ep_degree",
        "error",
        says="divide the 96 experts",
        breaks={**GROUPS, "moe_ep_degree": 64, "facts": replace(EXPERTS, num_experts=96)},
        mends={"facts": EXPERTS},
    ),
    Row(
        "moe_ep_degree",
        "error",
        says="15 rows choose 120",
        breaks={**GROUPS, "moe_ep_degree": 64, "max_rolling_batch_size": 15},
        mends={"max_rolling_batch_size": 16},
    ),
    Row(
        "moe_ep_degree",
        "error",
        says="8 rows choose 64",
        breaks={**GROUPS, "moe_ep_degree": 64, "token_generation_batches": (8,)},
        mends={"token_generation_batches": None},
    ),
    Row(
        "moe_ep_degree",
        "note",
        says="cannot use it; left out",
        breaks={**NXDI, "moe_ep_degree": 8},
        mends={"facts": EXPERTS, "max_rolling_batch_size": 16},
    ),
    Row(
        "moe_ep_degree",
        "note",
        says="cannot use it; left out",
        breaks={**NXDI, "moe_ep_degree": 8, "facts": model_of("mixtral")},
        mends={"facts": EXPERTS, "max_rolling_batch_size": 16},
    ),
    Row(
        "moe_ep_degree",
        "error",
        says="set context_length_estimate to 64 at least",
        breaks={
            **NXDI,
            "facts": EXPERTS,
            "max_rolling_batch_size": 16,
            "moe_ep_degree": 8,
            "context_length_estimate": (32, 512),
        },
        mends={"context_length_estimate": (64, 512)},
    ),
    *(
        Row(
            name,
            "note",
            says="cannot use it; left out",
            breaks={**NXDI, "facts": model_of("mixtral"), name: 2},
            mends={"facts": EXPERTS},
        )
        for name in ("cp_degree", "attention_dp_degree")
    ),
    Row(
        "ep_degree",
        "error",
        says="cannot use it; remove",
        breaks={**NXDI, "ep_degree": 2},
        mends={"facts": EXPERTS},
    ),
    *(
        Row(
            "qkv_cte_nki_kernel_fuse_rope",
            "error",
            says="rotate queries and keys before their norms",
            breaks={**NXDI, "facts": model_of(name), "qkv_cte_nki_kernel_fuse_rope": True},
            mends={"facts": model_of("qwen2")},
        )
        for name in ("qwen3", "qwen3_moe")
    ),
    *(
        Row(
            "vocab_parallel",
            "note",
            says="cannot use it; left out",
            breaks={**NXDI, "facts": model_of(name), "vocab_parallel": True},
            mends={"facts": model_of("llama")},
        )
        for name in ("mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
    ),
    Row(
        "fused_rmsnorm_skip_gamma",
        "note",
        says="cannot use it; left out",
        breaks={**NXDI, "facts": model_of("qwen3"), "fused_rmsnorm_skip_gamma": True},
        mends={"facts": model_of("llama")},
    ),
    Row(
        "async_execution",
        "error",
        says="overwrites what the model's sliding window holds; ",
        breaks={
            **NXDI,
            "facts": model_of("gpt_oss"),
            "on_device_generation": PER_ROW,
            "async_execution": True,
        },
        mends={"facts": model_of("llama")},
    ),
    Row(
        "ep_degree",
        "error",
        says="fails to divide its experts",
        breaks={**NXDI, "ep_degree": 2, "facts": model_of("mixtral")},
        mends={"facts": EXPERTS},
    ),
    Row(
        "shard_over_sequence",
        "warning",
        says="switches it off",
        breaks={"shard_over_sequence": True, "facts": MHA},
        mends={"facts": LLAMA},
    ),
    Row(
        "shard_over_sequence",
        "warning",
        says="compiled for the longest only",
        breaks={"shard_over_sequence": True, "n_positions": (1024, 4096), DEGREE: 24},
        mends={"n_positions": 4096},
    ),
    Row(
        "shard_over_sequence",
        "warning",
        says="compiled for the longest only",
        breaks={"shard_over_sequence": True, "n_positions": (1024, 4096), DEGREE: 24},
        mends={"facts": MHA},
    ),
    Row(
        "shard_over_sequence",
        "warning",
        says="compiled for the longest only",
        breaks={"shard_over_sequence": True, "n_positions": (1024, 4096)},
        mends={"rolling_batch_strategy": "naive_rolling_batch"},
    ),
    Row(
        "weight_tiling",
        "error",
        says="128 wide",
        breaks={"weight_tiling": True, "facts": replace(LLAMA, hidden_size=4000)},
        mends={"facts": LLAMA},
    ),
    Row(
        "qkv_tiling",
        "error",
        says="each core is 4096 x 288",
        breaks={"qkv_tiling": True, "fuse_qkv": True, "facts": replace(LLAMA, head_dim=48)},
        mends={"facts": LLAMA},
    ),
    Row(
        "qkv_tiling",
        "error",
        says="each core is 4000 x 768",
        breaks={"qkv_tiling": True, "fuse_qkv": True, "facts": replace(LLAMA, hidden_size=4000)},
        mends={"facts": LLAMA},
    ),
    Row(
        "pa_num_blocks",
        "error",
        says="need 1025 blocks of 32 tokens",
        breaks={"enable_chunked_prefill": True, "pa_num_blocks": 1024, "pa_block_size": 32},
        mends={"pa_num_blocks": 1025},
    ),
    Row(
        "pa_num_blocks",
        "warning",
        says="never used",
        breaks={"enable_chunked_prefill": True, "pa_num_blocks": 1026, "pa_block_size": 32},
        mends={"pa_num_blocks": 1025},
    ),
    Row(
        "context_length_estimate",
        "error",
        says="the last must be above 8",
        breaks={"enable_chunked_prefill": True, "context_length_estimate": (8,)},
        mends={"context_length_estimate": (9,)},
    ),
    Row(
        "max_rolling_batch_size",
        "error",
        says="lower max_rolling_batch_size below 128, or raise n_positions above 128",
        breaks={
            "enable_chunked_prefill": True,
            "n_positions": 128,
            "max_rolling_batch_size": 128,
            "context_length_estimate": (128,),
        },
        mends={"n_positions": 129},
    ),
    Row(
        "context_length_estimate",
        "error",
        says="each must be at least 8",
        breaks={"enable_chunked_prefill": True, "context_length_estimate": (4, 128)},
        mends={"context_length_estimate": (8, 128)},
    ),
    Row(
        "fuse_mlp",
        "error",
        says="width 14336",
        breaks={"fuse_mlp": True, DEGREE: 24},
        mends={DEGREE: 8},
    ),
    Row(
        "sequence_parallel",
        "error",
        says="above 2048, and not 2500",
        breaks={"sequence_parallel": True, "context_length_estimate": (1001, 2500)},
        mends={"context_length_estimate": (1001, 2504)},
    ),
    Row(
        "sequence_parallel",
        "error",
        says="and not 1001",
        breaks={
            "sequence_parallel": True,
            "sequence_parallel_norm_threshold": 1000,
            "context_length_estimate": (1001,),
        },
        mends={"sequence_parallel_norm_threshold": 1001},
    ),
    Row(
        DEGREE,
        "error",
        says="does not fit: needs 24.0 GiB per core, has 16.0 GiB; smallest that fits: tensor_parallel_degree=4",
        breaks={DEGREE: 2, "max_rolling_batch_size": 64, "device": INF2},
        mends={DEGREE: 8},
    ),
    Row(DEGREE, "error", says="quantize=static_int8", breaks={DEGREE: 1}, mends={DEGREE: 2}),
    Row(
        "max_rolling_batch_size",
        "error",
        says="Take that, set max_rolling_batch_size=28 or set n_positions=1792",
        breaks={DEGREE: 2, "max_rolling_batch_size": 64, "device": SMALL},
        mends={"max_rolling_batch_size": 16},
    ),
    Row(
        DEGREE,
        "error",
        says="no known machine holds it; use a smaller model",
        breaks={"facts": replace(LLAMA, num_parameters=10**13)},
        mends={"device": replace(INF2, core_memory_bytes=0)},
    ),
    Row(
        "sequence_parallel",
        "error",
        says="not 2500",
        breaks={
            "sequence_parallel": True,
            "context_length_estimate": (1024,),
            "n_positions": 2500,
            "rolling_batch_strategy": "naive_rolling_batch",
        },
        mends={"rolling_batch_strategy": None},
    ),
    Row(
        DEGREE,
        "note",
        says="so the memory is not checked",
        breaks={"facts": replace(LLAMA, num_parameters=None)},
        mends={"facts": LLAMA},
    ),
]
# Words of a defect to what brings it up and what does not.
UPSTREAM = {
    "to whole numbers": Row(
        "kv_cache_quantize",
        "error",
        says="answers are wrong",
        breaks={"kv_cache_quantize": "int8"},
        mends={"kv_cache_quantize": "fp8"},
    ),
    "mixes up the rows": Row(
        GQA,
        "error",
        says="answers are wrong",
        breaks={GQA: "shard-over-batch"},
        mends={"facts": MHA},
    ),
    "look back one token more": Row(
        "n_positions",
        "error",
        says="answers are wrong",
        breaks={"facts": model_of("mistral", **WINDOW), "context_length_estimate": (1024, 2049)},
        mends={"context_length_estimate": (1024, 2048)},
    ),
    "attends to all tokens": Row(
        "n_positions",
        "error",
        says="answers are wrong",
        breaks={
            "facts": model_of("mixtral", **WINDOW),
            "n_positions": 2049,
            "context_length_estimate": (128,),
        },
        mends={"n_positions": 2048},
    ),
    "never gives the last tokens": Row(
        DEGREE,
        "error",
        says="answers are wrong",
        breaks={"loader": "nxdi", "facts": model_of("llama", vocab_size=32002), DEGREE: 4},
        mends={"on_device_generation": True},
    ),
    "takes other activations": Row(
        "fused_rmsnorm_mlp",
        "error",
        says="answers are wrong",
        breaks={
            "loader": "nxdi",
            "device": TRN2,
            "facts": model_of("llama", config={"mlp_bias": True, "hidden_act": "silu"}),
            "fused_rmsnorm_mlp": True,
        },
        mends={"facts": model_of("llama", config={"mlp_bias": False, "hidden_act": "swish"})},
    ),
    "gelu_pytorch_tanh for silu": Row(
        "fused_rmsnorm_mlp",
        "error",
        says="answers are wrong",
        breaks={
            "loader": "nxdi",
            "device": TRN2,
            "facts": model_of("qwen3", config={"hidden_act": "gelu"}),
            "fused_rmsnorm_mlp": True,
        },
        mends={"fused_rmsnorm_mlp": False},
    ),
    "gives groups of cores no cache": Row(
        "attention_dp_degree",
        "error",
        says="answers are wrong",
        breaks={
            "loader": "nxdi",
            "facts": model_of("mistral", **WINDOW),
            "n_positions": 4096,
            DEGREE: 16,
            "attention_dp_degree": 2,
        },
        mends={"n_positions": 2048},
    ),
}


@pytest.mark.parametrize(
    "row",
    [*LENGTHS, *RELEASES, *ON_CPU, *EQUIVALENTS, *BATCHES, *CORES, *LAYOUT],
    ids=lambda row: f"{row.option}-{row.says}",
)
def test_a_finding_is_told_only_when_it_holds(row):
    assert len(matching(row.breaks, row.option, row.level, row.says)) == 1
    assert matching({**row.breaks, **row.mends}, row.option, row.level, row.says) == []


class TestDefects:
    @pytest.mark.parametrize("defect", UPSTREAM)
    def test_wrong_answers_are_refused_with_the_way_to_have_them(self, defect):
        row = UPSTREAM[defect]
        (found,) = matching(row.breaks, row.option, "error", row.says)
        assert defect in found.problem
        assert "allow_known_defects=true" in found.problem
        assert matching({**row.breaks, **row.mends}, row.option, "error", row.says) == []

    @pytest.mark.parametrize("defect", UPSTREAM)
    def test_whoever_accepts_them_is_warned(self, defect):
        row = UPSTREAM[defect]
        accepted = {**row.breaks, "allow_known_defects": True}
        assert matching(accepted, row.option, "error", row.says) == []
        assert len(matching(accepted, row.option, "warning", row.says)) == 1

    def test_every_defect_that_is_written_down_matters_somewhere(self):
        written = {
            defect.problem
            for its in CAPABILITIES.values()
            for entry in its.values()
            for defect in entry.defects
            if not defect.backends and not defect.stops
        }
        seen = {words for words in UPSTREAM if any(words in problem for problem in written)}
        assert seen == UPSTREAM.keys()
        assert all(any(words in problem for words in UPSTREAM) for problem in written)

    def test_in_static_batches_a_sequence_is_encoded_beyond_the_window_too(self):
        short = {"facts": model_of("mistral", **WINDOW), "context_length_estimate": (1024,)}
        static = {**short, "rolling_batch_strategy": "naive_rolling_batch"}
        assert matching(short, "n_positions", "error", "answers are wrong") == []
        assert len(matching(static, "n_positions", "error", "answers are wrong")) == 1
        window = {**static, "n_positions": 2048}
        assert matching(window, "n_positions", "error", "answers are wrong") == []

    @pytest.mark.parametrize(
        ("loader", "model_type", "wrong"),
        [
            *(("nxdi", name, True) for name in ("mixtral", "qwen2", "qwen3", "qwen3_moe")),
            *(("nxdi", name, False) for name in ("mistral", "gpt_oss")),
            ("tnx", "mixtral", True),
            ("tnx", "llama", False),
        ],
    )
    def test_who_knows_a_sliding_window(self, loader, model_type, wrong):
        situation = {"loader": loader, "facts": model_of(model_type, **WINDOW)}
        found = matching(situation, "n_positions", "error", "beyond the model's window")
        assert bool(found) == wrong


# What the published models have, and their library's code takes for granted.
PUBLISHED = {
    "gpt_oss": {
        "initial_context_length": 4096,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "qwen3_moe": {"norm_topk_prob": True},
}


MODEL_TYPES = sorted({None, "phi3"}.union(*CAPABILITIES.values()), key=str)


class TestEveryModel:
    def test_has_an_answer_with_every_loader(self, subtests):
        for case in itertools.product(
            MODEL_TYPES, ("cpu", *CAPABILITIES), (SMALL, INF2, TRN1, TRN2, NO_DEVICE, UNKNOWN_TYPE)
        ):
            with subtests.test(str(case)):
                self.check_answer(*case)

    def check_answer(self, model_type, loader, device):
        facts = model_of(model_type, config=PUBLISHED.get(model_type, {}))
        options = ServingOptions(model_id="m")
        filled = defaults.fill(Case(options, facts, device, NEURON_BACKENDS.get(loader)))
        options = options.model_copy(update={name: value for name, (value, _) in filled.items()})
        found = [
            *findings(Case(options, facts, device, NEURON_BACKENDS.get(loader), filled=filled))
        ]
        unknown = loader != "cpu" and model_type not in CAPABILITIES[loader]
        errors = [entry for entry in found if entry.level == "error"]
        if unknown:
            (error,) = errors
            assert "supported types:" in error.problem
        else:
            about = {name for entry in errors for name in entry.names}
            # One value that is filled in may not do: too little memory.
            assert about <= {DEGREE, "max_rolling_batch_size", "n_positions"}
            assert all("does not fit" in entry.problem for entry in errors if DEGREE in entry.names)

    def test_a_model_of_which_nothing_is_known_has_one_too(self):
        for loader in ("cpu", *CAPABILITIES):
            assert all(found.problem for found in findings_of(loader=loader, facts=ModelFacts()))

    @pytest.mark.parametrize("model_type", ["llama", "opt", "gpt_neox"])
    def test_a_plan_that_fits_needs_nothing_to_be_changed(self, model_type):
        facts = model_of(
            model_type, config={"hidden_act": "gelu_new"} if model_type == "gpt_neox" else {}
        )
        assert [
            found for found in findings_of(facts=facts, filled=FILLED) if found.level != "note"
        ] == []


def test_findings_name_options_and_no_finding_is_told_twice():
    for _, _, _, situation, change in [*LENGTHS, *ON_CPU, *EQUIVALENTS, *BATCHES, *CORES, *LAYOUT]:
        for values in (situation, {**situation, **change}):
            found = findings_of(**values)
            assert len(found) == len(set(found))
            assert all(set(entry.names) <= ServingOptions.model_fields.keys() for entry in found)
            assert all(entry.names and not entry.problem.endswith(".") for entry in found)


def test_nothing_asked_of_the_cpu_is_nothing_told():
    assert findings_of(loader="cpu", tensor_parallel_degree=1) == []


@pytest.mark.parametrize(
    "values",
    [
        {**DRAFT, "speculative_length": 3},
        {"ngram_prompt_lookup_max": 3, "speculative_length": 3},
        {"enable_chunked_prefill": True, "context_length_estimate": (16, 128)},
    ],
)
def test_what_the_cpu_does_too_is_not_called_useless(values):
    assert findings_of(loader="cpu", tensor_parallel_degree=1, **values) == []


@pytest.mark.parametrize("loader", CAPABILITIES)
def test_every_option_without_an_equivalent_is_told(loader):
    """Whatever a library does not know is either left out with a note or refused; nothing vanishes."""
    values = {"override_neuron_config": {"a": 1}, "draft_model_compiled_path": "p"}
    values |= {
        name: True
        for name, field in ServingOptions.model_fields.items()
        if field.annotation in {bool, bool | None}
    }
    options = ServingOptions.model_validate({**FILLED, **values})
    found = [*findings(Case(options, LLAMA, INF2, NEURON_BACKENDS.get(loader)))]
    told = {
        name: entry.level
        for entry in found
        for name in entry.names
        if "no equivalent" in entry.problem
    }
    given = {"nxdi": {"on_device_embedding"}, "tnx": set()}[loader]
    missing = {name for name in values if option(name).to and loader not in option(name).to} - given
    levels = dict.fromkeys(model_rules._ROUNDING, "warning")
    assert told == {
        name: levels.get(name, "note" if option(name).tunes else "error") for name in missing
    }


@given(
    heads=st.integers(1, 200),
    groups=st.integers(1, 16),
    degree=st.sampled_from([1, 2, 4, 8, 16, 24, 32, 64]),
    slots=st.integers(1, 64),
    way=st.sampled_from(
        [None, "shard-over-heads", "shard-over-batch", "replicated-heads", "all-gather-heads"]
    ),
    loader=st.sampled_from([*CAPABILITIES]),
    model_type=st.sampled_from([*CAPABILITIES["tnx"], *CAPABILITIES["nxdi"]]),
    flash=st.booleans(),
)
def test_any_shape_of_heads_is_judged(heads, groups, degree, slots, way, loader, model_type, flash):
    facts = model_of(model_type, num_heads=heads * groups, num_kv_heads=heads)
    values = {
        DEGREE: degree,
        GQA: way,
        "max_rolling_batch_size": slots,
        "shard_over_sequence": flash,
    }
    for found in findings_of(loader=loader, facts=facts, device=TRN2, **values):
        assert found.level in {"error", "warning", "note"}


TRAITS = [
    # model type, what config.json says, whether the library goes on, who has it
    ("llama", {"attention_bias": True}, True, "nxdi"),
    ("llama", {"mlp_bias": True}, True, "nxdi"),
    ("llama", {"hidden_act": "gelu"}, True, "nxdi"),
    ("llama", {"head_dim": 64}, False, "nxdi"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, False, "nxdi"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, False, "nxdi"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, False, "cpu"),
    ("llama", {"rope_scaling": {"type": "linear"}}, False, "cpu"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": "8"}}, False, "cpu"),
    ("llama", {"rope_scaling": "linear"}, False, "cpu"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, False, "cpu"),
    ("llama", {"rotary_percentage": 0.5}, True, "nxdi"),
    ("mistral", {"head_dim": 160}, False, "cpu"),
    ("mistral", {"rope_scaling": {"rope_type": "llama3"}}, True, "cpu"),
    ("mixtral", {"hidden_act": "relu"}, True, "nxdi"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, True, "cpu"),
    ("bloom", {"layer_norm_epsilon": 1e-6}, True, "cpu"),
    ("gpt2", {"activation_function": "relu"}, True, "cpu"),
    ("gpt2", {"layer_norm_epsilon": 1e-6}, True, "cpu"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, True, "cpu"),
    ("gpt_neox", {"attention_bias": False}, False, "cpu"),
    ("gpt_neox", {"hidden_act": "relu"}, True, "cpu"),
    ("gpt_neox", {"layer_norm_eps": 1e-6}, True, "cpu"),
    ("gpt_neox", {"use_parallel_residual": False}, False, "cpu"),
    ("opt", {"activation_function": "gelu"}, False, "cpu"),
    ("opt", {"do_layer_norm_before": False}, False, "cpu"),
    ("opt", {"enable_bias": False}, False, "cpu"),
    ("opt", {"word_embed_proj_dim": 512}, False, "cpu"),
    ("opt", {"_remove_final_layer_norm": True}, False, "cpu"),
]


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8", "bitsandbytes", "compressed-tensors"])
def test_a_quantised_checkpoint_is_refused_with_a_way_that_works(method):
    """Neither library takes its tensors, and transformers fails without the packages of the method."""
    facts = model_of("llama", config={"quantization_config": {"quant_method": method}})
    for loader in ("nxdi", "tnx"):
        for accepted in (False, True):
            situation = {"facts": facts, "loader": loader, "allow_known_defects": accepted}
            (found,) = matching(situation, "model_loader", "error", "quantization_config")
            assert "checkpoint that is not quantised" in found.problem
            assert "set dequantize=true" in found.problem
            assert "quantize=static_int8" in found.problem
            assert "model_loader=" not in found.problem
            assert "allow_known_defects" not in found.problem
    on_cpu = {"facts": facts, "loader": "cpu"}
    (found,) = matching(on_cpu, "model_loader", "warning", "quantization_config")
    assert "checkpoint that is not quantised" in found.problem
    assert "set dequantize=true" in found.problem
    assert matching({**on_cpu, "facts": model_of("llama")}, "model_loader", "warning", "") == []


@pytest.mark.parametrize(("model_type", "changes", "silent", "fix"), TRAITS)
class TestWhatAConfigurationAsksFor:
    def test_is_refused_with_the_loader_that_has_it(self, model_type, changes, silent, fix):
        situation = {"facts": model_of(model_type, config=changes)}
        (found,) = matching(situation, "model_loader", "error", "set model_loader=cpu")
        ((name, value),) = changes.items()
        assert found.problem.startswith(f"config.json has {name}={json.dumps(value)[:30]}")
        assert ("answers are wrong" in found.problem) == silent
        assert (
            matching({"facts": model_of(model_type)}, "model_loader", "error", "config.json") == []
        )
        assert matching({**situation, "loader": fix}, "model_loader", "error", "config.json") == []

    def test_may_be_wrong_but_not_stop(self, model_type, changes, silent, fix):
        accepted = {"facts": model_of(model_type, config=changes), "allow_known_defects": True}
        stopped = matching(accepted, "model_loader", "error", "config.json")
        assert bool(stopped) != silent
        assert all(f"model_loader={fix}" in found.problem or fix == "nxdi" for found in stopped)
        assert bool(matching(accepted, "model_loader", "warning", "answers are wrong")) == silent


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_act": "swish", "rope_theta": 1e6, "head_dim": 128, "attention_bias": None},
        {"rope_scaling": {**dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), 2), "type": "llama3"}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ],
)  # fmt: skip
def test_a_configuration_as_the_library_expects_it_has_no_trait(config):
    known = model_of("llama", config=config)
    assert matching({"facts": known}, "model_loader", "error", "config.json") == []


@pytest.mark.parametrize("config", [{}, {"hidden_act": "gelu"}])
def test_what_is_nearly_right_gets_a_warning(config):
    (found,) = matching(
        {"facts": model_of("gpt_neox", config=config)}, "model_loader", "warning", "hidden_act"
    )
    assert "tanh" in found.problem


@pytest.mark.parametrize(
    ("config", "right"),
    [
        *(({"rotary_dim": value}, True) for value in (2, 64, 128)),
        *(({"rotary_dim": value}, False) for value in (None, 0, -2, 7, 130, 64.0, "64", True)),
        ({}, True),
    ],
)
def test_gptj_rotates_pairs_of_a_head(config, right):
    found = matching(
        {"facts": model_of("gptj", config=config)}, "model_loader", "error", "rotary_dim"
    )
    assert [
        "an even number within a head" in entry.problem
        and entry.problem.endswith("it would stop; correct config.json")
        for entry in found
    ] == [True] * (not right)


def test_a_window_is_left_by_one_sequence_at_a_time_only():
    beyond = {"facts": model_of("mistral", sliding_window=512), "context_length_estimate": (512,)}

    def wrong(**options):
        return [
            found.problem
            for found in findings_of(**{**beyond, **options})
            if found.level == "error" and ("window" in found.problem or "BSH" in found.problem)
        ]

    (problem,) = wrong()
    assert "over a BSH cache only" in problem
    assert "max_rolling_batch_size=1" in problem
    assert not wrong(max_rolling_batch_size=1)
    assert not wrong(n_positions=(512,))
    # A BSH cache takes one length: prompts beyond the window are wrong, and shorter graphs none of its own.
    assert wrong(cache_layout="BSH")
    assert wrong(cache_layout="BSH", context_length_estimate=(2048,), n_positions=(2048,))
    assert wrong(rolling_batch_strategy="naive_rolling_batch")


def test_where_nothing_fits_no_word_is_lost_on_the_rest():
    situation = {
        "rolling_batch": "tnx",
        "filled": ("max_rolling_batch_size",),
        DEGREE: 24,
        "estimated_load_s": 10**6,
    }
    fitting = findings_of(**situation)
    names = {name for found in fitting for name in found.names}
    assert {"max_rolling_batch_size", "model_loading_timeout", DEGREE} <= names
    (error,) = findings_of(**situation, facts=replace(LLAMA, num_parameters=10**13))
    assert error.level == "error"


def test_an_option_that_is_left_out_breaks_no_rule_of_the_library():
    divided = {
        "shard_over_sequence": True,
        "cache_layout": "BSH",
        "context_length_estimate": (4096,),
    }
    told = "a cache divided by tokens"
    assert matching(divided, "shard_over_sequence", "error", told)
    assert not matching(
        {**divided, "facts": model_of("mistral")}, "shard_over_sequence", "error", told
    )
    assert not matching({**divided, "loader": "nxdi"}, "shard_over_sequence", "error", told)


def test_single_cores_of_a_trn2_are_twice_as_many_and_half_as_large():
    pairs = {"loader": "nxdi", "device": machines.named("trn2.3xlarge"), DEGREE: 8}
    assert matching(pairs, DEGREE, "error", "and 4 can be used")
    assert not matching({**pairs, "logical_nc_config": 1}, DEGREE, "error", "can be used")
    full = {**pairs, DEGREE: 1}
    assert not matching(full, DEGREE, "error", "does not fit")
    assert matching({**full, "logical_nc_config": 1}, DEGREE, "error", "has 12.0 GiB")
    assert not matching({**pairs, "logical_nc_config": 2}, "logical_nc_config", "error", "")


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_that_is_not_served_is_refused_before_a_start_refuses_it(name):
    known = {"loader": "nxdi", "device": INF2, "facts": model_of(name)}
    [found] = matching(known, "model_loader", "error", f"has a class that {REFUSED[name]}, for")
    assert "model_loader=cpu" in found.problem
    assert not matching({**known, "facts": model_of("llama")}, "model_loader", "error", "")


@pytest.mark.parametrize("machine", ["inf2.48xlarge", "trn1.32xlarge"])
def test_cores_that_never_act_as_one_are_an_error(machine):
    alone = {"loader": "nxdi", "device": machines.named(machine), DEGREE: 8}
    assert matching({**alone, "logical_nc_config": 2}, "logical_nc_config", "error", "leave it out")
    assert not matching({**alone, "logical_nc_config": 1}, "logical_nc_config", "error", "")


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({**DRAFT, "speculative_length": 3}, "cache_layout"),
        ({"rolling_batch_strategy": "naive_rolling_batch"}, "cache_layout"),
        ({GQA: "shard-over-batch"}, "cache_layout"),
    ],
    ids=["drafts", "static-batches", "divided-by-rows"],
)
def test_a_layout_that_follows_from_chunks_is_not_blamed(values, name):
    chunks = {"enable_chunked_prefill": True, "pa_block_size": 128, name: "BSH", **values}
    assert any(name in found.names for found in findings_of(**chunks))
    assert not any(name in found.names for found in findings_of(**chunks, filled=(name,)))


@pytest.mark.parametrize("value", [math.nan, "many", [8], {"a": 1}, True])
def test_experts_of_a_token_that_are_no_number_are_told(value):
    odd = {**GROUPS, "facts": replace(EXPERTS, config={"num_experts_per_tok": value})}
    assert matching(odd, "model_loader", "error", "needs at least 2 experts")


@pytest.mark.parametrize("value", ["many", [8], [{}], {"a": []}, 7, math.nan, True])
def test_a_field_of_any_type_is_judged(value):
    tables = [*NXDI_FIELDS.values(), *TNX_FIELDS.values()]
    judged = [field.takes(value, LLAMA) for table in tables for field in table.values()]
    assert {True, False} == set(judged)
