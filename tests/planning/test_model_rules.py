"""Rules on options, model and machine: for each, a situation that breaks it and the nearest that does not."""

import itertools
import json
import math
from dataclasses import replace

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
NOWHERE = DeviceInfo(None, 0, 0, 2**36, 8, "")
UNSAID = DeviceInfo(None, 1, 0, 0, 8, "")
FILLED = {
    "model_id": "m",
    "tensor_parallel_degree": 8,
    "n_positions": 4096,
    "context_length_estimate": (1024, 4096),
    "max_rolling_batch_size": 8,
    "dtype": "bfloat16",
}
SITUATION = ("loader", "facts", "device", "draft", "estimated_load_s", "filled")


def of(model_type, **values):
    """A model of Llama's sizes and another architecture."""
    return replace(LLAMA, model_type=model_type, **values)


def say(**values):
    """The findings of a situation, given as options and as the arguments of `findings`."""
    told = {name: values.pop(name) for name in SITUATION if name in values}
    options = ServingOptions.model_validate({**FILLED, **values})
    facts, device = told.pop("facts", LLAMA), told.pop("device", INF2)
    estimated_load_s = told.pop("estimated_load_s", None)
    case = Case(options, facts, device, NEURON_BACKENDS.get(told.pop("loader", "tnx")), **told)
    return [*findings(case, estimated_load_s=estimated_load_s)]


def matching(values, name, level, text):
    return [
        found
        for found in say(**values)
        if name in found.names and found.level == level and text in found.problem
    ]


DRAFT = {
    "speculative_draft_model": "draft",
    "max_rolling_batch_size": 1,
    "draft": replace(LLAMA, num_layers=1, num_parameters=10**9),
}
PER_ROW = {"do_sample": True, "dynamic": True, "per_batch_line": True, "global_top_k": 64}
EXPERTS = of("qwen3_moe", num_experts=128, config={"num_experts_per_tok": 8})
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

# An option of the finding, its level, a part of its text, the situation, what changes so that it is not told.
LENGTHS = [
    ("n_positions", "error", "supports 8192", {"n_positions": 8193}, {"n_positions": 8192}),
    ("n_positions", "error", "at most", {"n_positions": (128, 9000)}, {"n_positions": (128, 8192)}),
    (
        "context_length_estimate",
        "error",
        "supports 8192",
        {"n_positions": 8194, "context_length_estimate": (128, 8193)},
        {"filled": ("context_length_estimate",)},
    ),
    (
        "context_length_estimate",
        "error",
        "supports 8192",
        {"context_length_estimate": (128, 8193)},
        {"n_positions": 8193},
    ),
    (
        "attn_kernel_enabled",
        "warning",
        "no kernels on inf2 since Neuron SDK 2.29",
        {"attn_kernel_enabled": True, "loader": "nxdi"},
        {"attn_kernel_enabled": False},
    ),
    (
        "fused_rmsnorm_mlp",
        "warning",
        "no kernels on inf2",
        {"fused_rmsnorm_mlp": True, "loader": "nxdi"},
        {"loader": "tnx"},
    ),
    ("cpu_threads", "note", "leave it out", {"cpu_threads": 2}, {"loader": "cpu"}),
    (
        "max_join_wait_ms",
        "note",
        "only static batches wait",
        {"max_join_wait_ms": 0},
        {"max_join_wait_ms": 100},
    ),
    (
        "max_join_wait_ms",
        "note",
        "only static batches wait",
        {"max_join_wait_ms": 50},
        {"facts": of("opt")},
    ),
    (
        "max_join_wait_ms",
        "note",
        "only static batches wait",
        {"max_join_wait_ms": 50, "max_rolling_batch_size": 1, "facts": of("opt")},
        {"max_rolling_batch_size": 2},
    ),
    (
        "max_join_wait_ms",
        "note",
        "only static batches wait",
        {"max_join_wait_ms": 50, "loader": "cpu", "facts": of("opt"), "device": NOWHERE},
        {"loader": "tnx"},
    ),
    (
        "max_rolling_batch_size",
        "note",
        "again, token by token",
        {"facts": of("gpt_neox")},
        {"facts": of("gpt2")},
    ),
    (
        "max_rolling_batch_size",
        "note",
        "write option.max_rolling_batch_size=8",
        {"rolling_batch": "tnx", "filled": ("max_rolling_batch_size",)},
        {"filled": ()},
    ),
    (
        "max_rolling_batch_size",
        "note",
        "24 of them would wait",
        {"rolling_batch": "tnx", "filled": ("max_rolling_batch_size",)},
        {"max_rolling_batch_size": 32},
    ),
    (
        "max_rolling_batch_size",
        "note",
        "DJL Serving",
        {"rolling_batch": "tnx", "filled": ("max_rolling_batch_size",)},
        {"rolling_batch": "auto", "async_mode": True},
    ),
    (
        "model_loading_timeout",
        "warning",
        "set at least 3600",
        {"estimated_load_s": 1800.0, "model_loading_timeout": 1799},
        {"model_loading_timeout": 1800},
    ),
    (
        "model_loading_timeout",
        "warning",
        "30 minutes",
        {"estimated_load_s": 1800.0},
        {"compiled_graph_path": "p"},
    ),
    (
        "model_loading_timeout",
        "warning",
        "compile beforehand",
        {"estimated_load_s": 1800.0},
        {"estimated_load_s": None},
    ),
    (
        "compilation_worker_count",
        "warning",
        "192 CPUs",
        {"compilation_worker_count": 193},
        {"compilation_worker_count": 192},
    ),
]
ON_CPU = [
    *(
        (name, "note", "cpu backend", {"loader": "cpu", **values}, {name: None})
        for name, values in {
            "fuse_qkv": {"fuse_qkv": True},
            "quantize": {"quantize": "static_int8"},
            "draft_model_tp_size": {**DRAFT, "draft_model_tp_size": 4},
            "on_device_generation": {"on_device_generation": True},
            "override_neuron_config": {"override_neuron_config": {"a": 1}},
        }.items()
    ),
    (DEGREE, "note", "left out", {"loader": "cpu", DEGREE: 8}, {DEGREE: None}),
    (
        "speculative_draft_model",
        "error",
        "128257 tokens and the model's 128256",
        {"loader": "cpu", **DRAFT, "draft": replace(LLAMA, vocab_size=128257)},
        {"draft": LLAMA},
    ),
    (
        "speculative_draft_model",
        "error",
        "supports 4095",
        {"loader": "cpu", **DRAFT, "draft": replace(LLAMA, max_positions=4095)},
        {"n_positions": 4095},
    ),
]
EQUIVALENTS = [
    (
        "unroll",
        "note",
        "cannot use it; left out",
        {"facts": of("gptj"), "unroll": 4},
        {"facts": of("gpt2")},
    ),
    (
        "quantize",
        "error",
        "use more cores",
        {"facts": of("gpt_neox"), "quantize": "static_int8"},
        {"quantize": None},
    ),
    (
        "compiled_graph_path",
        "warning",
        "cannot use graphs that transformers-neuronx compiled: all would be compiled again. If they are graphs of "
        "transformers-neuronx, set model_loader=tnx; else leave it out, or set model_loader=nxdi",
        {"loader": "nxdi", "compiled_graph_path": "s3://b/k"},
        {"model_loader": "nxdi"},
    ),
    (
        "compiled_graph_path",
        "warning",
        "compiled again",
        {"loader": "nxdi", "compiled_graph_path": "s3://b/k"},
        {"facts": of("qwen2")},
    ),
    (
        "weight_tiling",
        "note",
        "left out",
        {"loader": "nxdi", "weight_tiling": True},
        {"loader": "tnx"},
    ),
    ("vocab_parallel", "note", "left out", {"vocab_parallel": True}, {"loader": "nxdi"}),
    (
        "bf16_rms_norm",
        "warning",
        "which changes rounding and overflows only",
        {"loader": "nxdi", "bf16_rms_norm": True},
        {"loader": "tnx"},
    ),
    (
        "pipeline_parallel_degree",
        "error",
        "remove it, or set model_loader=nxdi",
        {"pipeline_parallel_degree": 2},
        {"loader": "nxdi"},
    ),
    (
        "enable_saturate_infinity",
        "warning",
        "which changes rounding and overflows only",
        {"loader": "nxdi", "enable_saturate_infinity": True},
        {"enable_saturate_infinity": False},
    ),
    (
        "model_loader",
        "error",
        "mixtral, opt; set model_loader=nxdi or model_loader=cpu",
        {"facts": of("qwen2")},
        {"loader": "nxdi"},
    ),
    (
        "model_loader",
        "error",
        "set model_loader=tnx or model_loader=cpu",
        {"loader": "nxdi", "facts": of("opt")},
        {"loader": "tnx"},
    ),
    ("model_loader", "error", "names none", {"facts": of(None)}, {"facts": LLAMA}),
    (
        "model_loader",
        "note",
        "never run",
        {"loader": "nxdi", "facts": of("dbrx")},
        {"facts": LLAMA},
    ),
    (
        "fuse_mlp",
        "note",
        "cannot use it",
        {"facts": of("mistral"), "fuse_mlp": True},
        {"facts": LLAMA},
    ),
    (
        "bf16_rms_norm",
        "error",
        "cannot use it",
        {"facts": of("opt"), "bf16_rms_norm": True},
        {"facts": of("mistral")},
    ),
    (
        "enable_chunked_prefill",
        "error",
        "cannot use it",
        {"facts": of("mistral"), "enable_chunked_prefill": True, "cache_layout": "BSH"},
        {"facts": LLAMA},
    ),
    (
        "quantize",
        "error",
        "experts",
        {"facts": of("mixtral"), "quantize": "static_int8"},
        {"facts": of("mistral")},
    ),
    (
        "quantize",
        "error",
        "no quantised weights",
        {"facts": of("gpt_neox"), "quantize": "static_int8"},
        {"facts": of("gpt2")},
    ),
    (
        "kv_cache_quantize",
        "error",
        "in dtype only",
        {"facts": of("bloom"), "kv_cache_quantize": "fp8"},
        {"facts": of("mixtral")},
    ),
    (
        "attention_layout",
        "error",
        "no BSH layout",
        {"facts": of("opt"), "attention_layout": "BSH"},
        {"attention_layout": "HSB"},
    ),
    (
        "on_device_generation",
        "error",
        "cannot use it",
        {"facts": of("gpt_neox"), "on_device_generation": PER_ROW},
        {"facts": of("bloom")},
    ),
]
BATCHES = [
    (
        "max_rolling_batch_size",
        "note",
        "prefilled again",
        {"facts": of("opt")},
        {"max_rolling_batch_size": 1},
    ),
    (
        "max_rolling_batch_size",
        "note",
        "prefilled again",
        {"facts": of("opt"), "batch_size": 8, "rolling_batch": "disable", "async_mode": True},
        {"async_mode": False},
    ),
    (
        "max_rolling_batch_size",
        "note",
        "static batches",
        {"facts": of("gpt_neox")},
        {"facts": LLAMA},
    ),
    (
        "rolling_batch_strategy",
        "error",
        "leave it out",
        {"facts": of("bloom"), "rolling_batch_strategy": "continuous_batching"},
        {"rolling_batch_strategy": "naive_rolling_batch"},
    ),
    (
        "padding_side",
        "error",
        "on the left",
        {"facts": of("opt"), "padding_side": "right"},
        {"padding_side": "left"},
    ),
    (
        "padding_side",
        "error",
        "on the right",
        {"padding_side": "left"},
        {"rolling_batch_strategy": "naive_rolling_batch"},
    ),
    ("padding_side", "error", "on the right", {"padding_side": "left"}, {"padding_side": "right"}),
    (
        "padding_side",
        "error",
        "static batches pad on the left",
        {"padding_side": "right", "rolling_batch_strategy": "naive_rolling_batch"},
        {"rolling_batch_strategy": None},
    ),
    *(
        (
            "collectives_layout",
            "error",
            "wrong values",
            {"facts": of(kind), "collectives_layout": "BSH"},
            {"facts": of(kind), "collectives_layout": "BSH", "attention_layout": "BSH"},
        )
        for kind in ("gpt2", "bloom")
    ),
    (
        "collectives_layout",
        "error",
        "wrong values",
        {"facts": of("opt"), "collectives_layout": "BSH"},
        {"facts": LLAMA},
    ),
    (
        "cache_layout",
        "error",
        "continuous batching",
        {"facts": of("opt"), "cache_layout": "BSH", "context_length_estimate": (4096,)},
        {"facts": LLAMA},
    ),
    (
        "n_positions",
        "error",
        "one length",
        {"facts": of("gpt2"), "n_positions": (1024, 4096)},
        {"n_positions": (4096,)},
    ),
    (
        "n_positions",
        "error",
        "one length",
        {"facts": of("gptj"), "n_positions": (1024, 4096)},
        {"facts": LLAMA},
    ),
    (
        "context_length_estimate",
        "warning",
        "token by token",
        {"facts": of("gpt_neox")},
        {"filled": ("context_length_estimate",)},
    ),
    (
        "context_length_estimate",
        "warning",
        "token by token",
        {"facts": of("gpt_neox")},
        {"facts": LLAMA},
    ),
    (
        "speculative_draft_model",
        "error",
        "only for llama",
        {**DRAFT, "facts": of("mistral")},
        {"facts": LLAMA},
    ),
    (
        "ngram_prompt_lookup_max",
        "error",
        "only for llama",
        {"ngram_prompt_lookup_max": 3, "facts": of("gpt2")},
        {"facts": LLAMA},
    ),
    (
        "speculative_draft_model",
        "error",
        "static batches",
        {**DRAFT, "draft": of("opt")},
        {"draft": of("mistral")},
    ),
    (
        "speculative_draft_model",
        "error",
        "no class for the draft",
        {**DRAFT, "draft": of("phi")},
        {"draft": LLAMA},
    ),
    (
        "speculative_draft_model",
        "error",
        "128257 tokens and the model's 128256",
        {**DRAFT, "draft": replace(LLAMA, vocab_size=128257)},
        {"draft": None},
    ),
    (
        "speculative_draft_model",
        "error",
        "supports 4095",
        {**DRAFT, "draft": replace(LLAMA, max_positions=4095)},
        {"draft": replace(LLAMA, max_positions=4096)},
    ),
    (
        "windowed_context_encoding_size",
        "error",
        "set 2048",
        {
            "loader": "nxdi",
            "facts": of("mistral", **WINDOW),
            "n_positions": 2048,
            "windowed_context_encoding_size": 2047,
        },
        {"windowed_context_encoding_size": 2048},
    ),
    (
        "windowed_context_encoding_size",
        "error",
        "fails at a sliding window's ring",
        {
            "loader": "nxdi",
            "facts": of("mistral", **WINDOW),
            "windowed_context_encoding_size": 2048,
        },
        {"n_positions": 2048},
    ),
    (
        "context_length_estimate",
        "error",
        "at least 2047; leave it out, or set n_positions=2048 at most",
        {
            "loader": "nxdi",
            "facts": of("mistral", **WINDOW),
            "context_length_estimate": (2046, 4096),
        },
        {"context_length_estimate": (2047, 4096)},
    ),
    (
        "n_positions",
        "error",
        "each prefill graph fills a KV cache as long as the model's sliding window (2048 tokens)",
        {
            "loader": "nxdi",
            "facts": of("mistral", **WINDOW),
            "n_positions": 2049,
            "context_length_estimate": (128, 2048),
        },
        {"n_positions": 2048},
    ),
    (
        "async_execution",
        "note",
        "left out: a step ahead overwrites",
        {
            "loader": "nxdi",
            "facts": of("mistral", **WINDOW),
            "context_length_estimate": (4096,),
            "on_device_generation": PER_ROW,
            "async_execution": True,
        },
        {"n_positions": 2048},
    ),
    (
        "on_device_generation",
        "note",
        "top_k above 64",
        {"on_device_generation": PER_ROW},
        {"on_device_generation": None},
    ),
    (
        "on_device_generation",
        "note",
        "sampling without top_k) answer 400; on_device_default_top_k=global_top_k samples",
        {"on_device_generation": PER_ROW},
        {"on_device_default_top_k": "global_top_k"},
    ),
    (
        "on_device_generation",
        "note",
        "sampling without top_k is among the 64 most likely tokens",
        {"on_device_generation": PER_ROW, "on_device_default_top_k": "global_top_k"},
        {"on_device_default_top_k": None},
    ),
    (
        "on_device_generation",
        "warning",
        "16 bits",
        {"on_device_generation": PER_ROW},
        {"dtype": "float32"},
    ),
    (
        "on_device_generation",
        "note",
        "most probable token",
        {"on_device_generation": {"top_k": 1}},
        {"on_device_generation": {"do_sample": True}},
    ),
    (
        "on_device_generation",
        "note",
        "seed, top_p below 1, details",
        {"loader": "nxdi", "on_device_generation": True},
        {"output_logits": True},
    ),
    (
        "output_logits",
        "note",
        "seed, top_p below 1, details (sent, or from generation_config.json)",
        {"loader": "nxdi", "on_device_generation": True, "output_logits": True},
        {"on_device_generation": {}},
    ),
]
CORES = [
    (DEGREE, "error", "1, 2, 4, 8, 12 and 24 on inf2", {DEGREE: 6}, {DEGREE: 8}),
    (DEGREE, "error", "on trn1", {DEGREE: 4, "device": TRN1}, {"device": INF2}),
    (DEGREE, "error", "on trn2", {DEGREE: 24, "device": TRN2}, {DEGREE: 64}),
    (DEGREE, "error", "set one of them", {DEGREE: 5, "device": UNSAID}, {DEGREE: 64}),
    (DEGREE, "note", "used in practice", {DEGREE: 12}, {DEGREE: 8}),
    (DEGREE, "error", "on trn1", {DEGREE: 12, "device": TRN1}, {"device": INF2}),
    (DEGREE, "error", "8 NeuronCores are needed and 2", {"device": SMALL}, {DEGREE: 2}),
    (
        DEGREE,
        "error",
        "and 8 can be used on inf2.48xlarge",
        {DEGREE: 24, "device": replace(INF2, visible_cores=8)},
        {"device": INF2},
    ),
    (DEGREE, "error", "are needed", {"device": SMALL}, {"device": UNSAID}),
    (
        DEGREE,
        "error",
        "16 and 32 on trn1; set one",
        {DEGREE: 64, "device": TRN1},
        {"device": replace(TRN1, local_degree=32)},
    ),
    (
        DEGREE,
        "error",
        "64 NeuronCores are needed and 32 can be used",
        {DEGREE: 64, "device": TRN1},
        {"device": replace(TRN1, local_degree=32)},
    ),
    (
        DEGREE,
        "error",
        "64 NeuronCores are needed and 32 can be used on 2 machines",
        {DEGREE: 64, "device": replace(TRN1, local_degree=32, visible_cores=16)},
        {"device": replace(TRN1, local_degree=16, visible_cores=16)},
    ),
    (
        DEGREE,
        "note",
        "8 KV heads are copied to 64",
        {DEGREE: 64, "device": replace(TRN1, local_degree=32)},
        {"device": TRN1},
    ),
    (
        DEGREE,
        "error",
        "each machine gives 24 cores (NEURON_LOCAL_TP); set a multiple",
        {DEGREE: 64, "device": replace(INF2, local_degree=24)},
        {DEGREE: 48},
    ),
    (
        "pipeline_parallel_degree",
        "error",
        "32 NeuronCores",
        {"loader": "nxdi", "pipeline_parallel_degree": 4},
        {"pipeline_parallel_degree": 3},
    ),
    (
        "ep_degree",
        "error",
        "32 NeuronCores",
        {"loader": "nxdi", "facts": EXPERTS, "ep_degree": 4},
        {"ep_degree": 3},
    ),
    (
        "draft_model_tp_size",
        "error",
        "2 NeuronCores can be used",
        {**DRAFT, DEGREE: 2, "draft_model_tp_size": 4, "device": SMALL},
        {"draft_model_tp_size": 2},
    ),
    (
        "draft_model_tp_size",
        "error",
        "set one of them",
        {**DRAFT, "draft_model_tp_size": 3},
        {"draft_model_tp_size": 4},
    ),
    (
        DEGREE,
        "error",
        "set 1, 2, 4 or 8",
        {DEGREE: 24, "facts": of("gpt_neox")},
        {DEGREE: 8},
    ),
    (
        DEGREE,
        "error",
        "must be a divisor of the 32 heads",
        {DEGREE: 24, "facts": of("gptj")},
        {"facts": LLAMA},
    ),
    (
        DEGREE,
        "error",
        "8 can be used on inf2.48xlarge, of 24: NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES limits this process; "
        "lower the degree, raise that limit, or use a larger machine (smallest that fits: tensor_parallel_degree=2)",
        {DEGREE: 24, "device": replace(INF2, visible_cores=8)},
        {"device": INF2},
    ),
    (
        DEGREE,
        "error",
        "no known machine holds it",
        {"device": SMALL, "facts": replace(LLAMA, num_parameters=10**13)},
        {"facts": LLAMA},
    ),
    *(
        (
            DEGREE,
            "error",
            f"a divisor of the {what}",
            {"loader": "nxdi", DEGREE: 24, "facts": of(model_type, **sizes)},
            {DEGREE: 4},
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
    (
        DEGREE,
        "error",
        "the width of all 8 experts, 8 x 14336",
        {DEGREE: 24, "facts": of("mixtral", num_experts=8)},
        {"facts": of("mixtral", num_experts=8, intermediate_size=14337)},
    ),
    (
        DEGREE,
        "error",
        "a divisor or a multiple of the 8 experts",
        {DEGREE: 12, "facts": of("mixtral", num_experts=8)},
        {DEGREE: 8},
    ),
    (DEGREE, "note", "32 heads are padded to 48", {DEGREE: 24, "facts": LLAMA}, {DEGREE: 8}),
    (DEGREE, "note", "8 KV heads are copied to 24", {DEGREE: 24}, {DEGREE: 8}),
    # 15.01e9 bytes of weights without the embedding, and 4096 x 131,072 of cache, on a core of 410e9 bytes/s.
    (
        DEGREE,
        "note",
        "with 8 cores it reads 1.81 GiB on each in at least 4.7 ms",
        {DEGREE: 24, "n_positions": 4096, "max_rolling_batch_size": 1},
        {DEGREE: 8},
    ),
    (
        DEGREE,
        "note",
        "ms, which does not fit",
        {DEGREE: 24, "facts": replace(LLAMA, num_parameters=10**11)},
        {"facts": LLAMA},
    ),
    (
        DEGREE,
        "note",
        "GiB more on each core",
        {DEGREE: 24},
        {"facts": replace(LLAMA, num_parameters=None)},
    ),
    (
        DEGREE,
        "warning",
        "8 KV heads are copied to 48 so that 12 cores share them evenly: 6.92 GiB more on each core; "
        "tensor_parallel_degree=8 needs no more memory",
        {DEGREE: 12, "max_rolling_batch_size": 32, "facts": replace(LLAMA, num_heads=40)},
        {DEGREE: 24},
    ),
]
LAYOUT = [
    (GQA, "warning", "divides the 8 KV heads", {DEGREE: 24, GQA: "shard-over-heads"}, {DEGREE: 8}),
    (
        GQA,
        "warning",
        "divides the 9 slots",
        {GQA: "shard-over-batch", "max_rolling_batch_size": 9},
        {GQA: "replicated-heads"},
    ),
    (
        GQA,
        "warning",
        "copies the KV heads",
        {DEGREE: 24, GQA: "all-gather-heads", "facts": replace(LLAMA, num_kv_heads=5)},
        {GQA: None},
    ),
    (
        GQA,
        "warning",
        "divides KV heads and query heads",
        # 24 cores divide 6 KV heads of 128; the 16 heads that pad 32 to 48 are no multiple of 6
        {DEGREE: 24, GQA: "all-gather-heads", "facts": replace(LLAMA, num_kv_heads=6)},
        {"facts": replace(LLAMA, num_kv_heads=6, num_heads=42)},
    ),
    (
        GQA,
        "warning",
        "nothing is shared",
        {GQA: "all-gather-heads", "facts": MHA},
        {"facts": LLAMA},
    ),
    (
        "shard_over_sequence",
        "error",
        "multiple of the 8 KV heads",
        {DEGREE: 4, "shard_over_sequence": True},
        {DEGREE: 24},
    ),
    (
        "shard_over_sequence",
        "error",
        "each of the 8 KV heads has one core",
        {DEGREE: 8, "shard_over_sequence": True},
        {DEGREE: 24},
    ),
    (
        "shard_over_sequence",
        "error",
        "while group_query_attention is set",
        {"shard_over_sequence": True, GQA: "replicated-heads", "facts": MHA},
        {GQA: None},
    ),
    (
        "shard_over_sequence",
        "error",
        "multiple of the 8 KV heads",
        {"loader": "nxdi", DEGREE: 4, "shard_over_sequence": True},
        {"facts": of("mistral")},
    ),
    (
        # 12 heads take no more than 12 of 16 cores, which 8 KV heads do not divide
        "shard_over_sequence",
        "error",
        "multiple of the 8 KV heads",
        {
            "loader": "nxdi",
            DEGREE: 16,
            "device": TRN1,
            "shard_over_sequence": True,
            "facts": replace(LLAMA, num_heads=12),
        },
        {"loader": "tnx"},
    ),
    (
        "shard_over_sequence",
        "error",
        "the 42 heads are padded",
        {
            DEGREE: 12,
            "shard_over_sequence": True,
            "facts": replace(LLAMA, num_kv_heads=6, num_heads=42),
        },
        {"facts": replace(LLAMA, num_kv_heads=6, num_heads=36)},
    ),
    (
        "shard_over_sequence",
        "error",
        "the 6 heads are padded",
        {"shard_over_sequence": True, "facts": replace(LLAMA, num_kv_heads=2, num_heads=6)},
        {"facts": replace(LLAMA, num_kv_heads=2, num_heads=4)},
    ),
    *(
        (
            name,
            "error",
            "multiples of 8, and not 1001; round",
            {**NXDI, name: value, **PROMPTS},
            change,
        )
        for name, value, change in (
            ("sequence_parallel", True, {"context_length_estimate": (1008, 4096)}),
            ("sequence_parallel", True, {"windowed_context_encoding_size": 128}),
            ("cp_degree", 8, {"context_length_estimate": (1008, 4096)}),
            ("windowed_context_encoding_size", 8, {"context_length_estimate": (1008, 4096)}),
        )
    ),
    (
        "sequence_parallel",
        "error",
        "multiples of 8, and not 100",
        {**NXDI, "sequence_parallel": True, "windowed_context_encoding_size": 100},
        {"windowed_context_encoding_size": 64},
    ),
    *(
        ("shard_over_sequence", "error", "multiples of 2, and not 1001", {**FLASH, **uneven}, even)
        for uneven, even in (
            (PROMPTS, {"context_length_estimate": (1002, 4096)}),
            ({"n_positions": (1001, 4096)}, {"n_positions": (1002, 4096)}),
        )
    ),
    (
        "windowed_context_encoding_size",
        "error",
        "cuts prompts in static",
        {**NXDI, "windowed_context_encoding_size": 128},
        {"rolling_batch_strategy": "naive_rolling_batch"},
    ),
    (
        "windowed_context_encoding_size",
        "error",
        "cuts prompts in static",
        {**NXDI, "windowed_context_encoding_size": 1024},
        {"context_length_estimate": (1024,)},
    ),
    (
        "cp_degree",
        "error",
        "4 cores of a decode are fewer than the 8 KV heads",
        {**NXDI, "cp_degree": 2, DEGREE: 4},
        {DEGREE: 8},
    ),
    (
        "attention_dp_degree",
        "error",
        "4 cores of a decode are fewer than the 8 KV heads",
        {**NXDI, "attention_dp_degree": 2},
        {"cp_degree": 2},
    ),
    *(
        (
            "attn_kernel_enabled",
            "error",
            f"from {least} tokens on, has no sliding window",
            {**NXDI, "device": TRN1, "facts": of("mistral", **WINDOW), **prompts},
            change,
        )
        for least, prompts, change in (
            (4096, {"context_length_estimate": (2048, 4096)}, {"attn_kernel_enabled": False}),
            (4096, {"context_length_estimate": (2048, 4096)}, {"device": TRN2}),
            (4096, {"context_length_estimate": (4096,)}, {"context_length_estimate": (4095,)}),
            (4096, {"context_length_estimate": (4096,)}, {"cp_degree": 2}),
            (4096, {"context_length_estimate": (4096,)}, {"facts": of("mistral")}),
            (
                512,
                {"context_length_estimate": (2048,), "attn_kernel_enabled": True},
                {"attn_kernel_enabled": None},
            ),
        )
    ),
    *(
        ("strided_context_parallel_kernel_enabled", "error", "more than 256 tokens", wrong, right)
        for wrong, right in (
            ({**STRIDED, "device": TRN1}, {"device": TRN2}),
            ({**STRIDED, "logical_nc_config": 1}, {"logical_nc_config": 2}),
            ({**STRIDED, "facts": of("mistral", **WINDOW)}, {"facts": of("mistral")}),
            (
                {**STRIDED, "context_length_estimate": (256, 4096)},
                {"context_length_estimate": (258, 4096)},
            ),
        )
    ),
    (
        "moe_ep_degree",
        "error",
        "as many as 32 x 8 cores of moe_ep_degree",
        {**GROUPS, "moe_tp_degree": 8, "moe_ep_degree": 32},
        {"moe_ep_degree": 8},
    ),
    (
        "hybrid_sharding_config",
        "error",
        "as many as 1 x 8 cores of moe_cte_ep_degree",
        {**GROUPS, "hybrid_sharding_config": HYBRID},
        {"hybrid_sharding_config": {**HYBRID, "moe_cte_tp_degree": 64}},
    ),
    (
        "hybrid_sharding_config",
        "error",
        "moe_cte_ep_degree is [1]; expected a whole number",
        {**GROUPS, "hybrid_sharding_config": {**HYBRID, "moe_cte_ep_degree": [1]}},
        {"hybrid_sharding_config": {**HYBRID, "moe_cte_tp_degree": 64}},
    ),
    (
        "moe_ep_degree",
        "error",
        "divide the 96 experts",
        {**GROUPS, "moe_ep_degree": 64, "facts": replace(EXPERTS, num_experts=96)},
        {"facts": EXPERTS},
    ),
    (
        "moe_ep_degree",
        "error",
        "15 rows choose 120",
        {**GROUPS, "moe_ep_degree": 64, "max_rolling_batch_size": 15},
        {"max_rolling_batch_size": 16},
    ),
    (
        "moe_ep_degree",
        "error",
        "8 rows choose 64",
        {**GROUPS, "moe_ep_degree": 64, "token_generation_batches": (8,)},
        {"token_generation_batches": None},
    ),
    (
        "moe_ep_degree",
        "note",
        "cannot use it; left out",
        {**NXDI, "moe_ep_degree": 8},
        {"facts": EXPERTS, "max_rolling_batch_size": 16},
    ),
    (
        "moe_ep_degree",
        "note",
        "cannot use it; left out",
        {**NXDI, "moe_ep_degree": 8, "facts": of("mixtral")},
        {"facts": EXPERTS, "max_rolling_batch_size": 16},
    ),
    ("ep_degree", "error", "cannot use it; remove", {**NXDI, "ep_degree": 2}, {"facts": EXPERTS}),
    *(
        (
            "qkv_cte_nki_kernel_fuse_rope",
            "error",
            "rotate queries and keys before their norms",
            {**NXDI, "facts": of(name), "qkv_cte_nki_kernel_fuse_rope": True},
            {"facts": of("qwen2")},
        )
        for name in ("qwen3", "qwen3_moe")
    ),
    *(
        (
            "vocab_parallel",
            "note",
            "cannot use it; left out",
            {**NXDI, "facts": of(name), "vocab_parallel": True},
            {"facts": of("llama")},
        )
        for name in ("mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
    ),
    (
        "fused_rmsnorm_skip_gamma",
        "note",
        "cannot use it; left out",
        {**NXDI, "facts": of("qwen3"), "fused_rmsnorm_skip_gamma": True},
        {"facts": of("llama")},
    ),
    (
        "async_execution",
        "error",
        "overwrites what the model's sliding window holds; ",
        {**NXDI, "facts": of("gpt_oss"), "on_device_generation": PER_ROW, "async_execution": True},
        {"facts": of("llama")},
    ),
    (
        "ep_degree",
        "error",
        "fails to divide its experts",
        {**NXDI, "ep_degree": 2, "facts": of("mixtral")},
        {"facts": EXPERTS},
    ),
    (
        "shard_over_sequence",
        "warning",
        "switches it off",
        {"shard_over_sequence": True, "facts": MHA},
        {"facts": LLAMA},
    ),
    (
        "shard_over_sequence",
        "warning",
        "compiled for the longest only",
        {"shard_over_sequence": True, "n_positions": (1024, 4096), DEGREE: 24},
        {"n_positions": 4096},
    ),
    (
        "shard_over_sequence",
        "warning",
        "compiled for the longest only",
        {"shard_over_sequence": True, "n_positions": (1024, 4096), DEGREE: 24},
        {"facts": MHA},
    ),
    (
        "shard_over_sequence",
        "warning",
        "compiled for the longest only",
        {"shard_over_sequence": True, "n_positions": (1024, 4096)},
        {"rolling_batch_strategy": "naive_rolling_batch"},
    ),
    (
        "weight_tiling",
        "error",
        "128 wide",
        {"weight_tiling": True, "facts": replace(LLAMA, hidden_size=4000)},
        {"facts": LLAMA},
    ),
    (
        "qkv_tiling",
        "error",
        "each core is 4096 x 288",
        {"qkv_tiling": True, "fuse_qkv": True, "facts": replace(LLAMA, head_dim=48)},
        {"facts": LLAMA},
    ),
    (
        "qkv_tiling",
        "error",
        "each core is 4000 x 768",
        {"qkv_tiling": True, "fuse_qkv": True, "facts": replace(LLAMA, hidden_size=4000)},
        {"facts": LLAMA},
    ),
    (
        "pa_num_blocks",
        "error",
        "need 1025 blocks of 32 tokens",
        {"enable_chunked_prefill": True, "pa_num_blocks": 1024, "pa_block_size": 32},
        {"pa_num_blocks": 1025},
    ),
    (
        "pa_num_blocks",
        "warning",
        "never used",
        {"enable_chunked_prefill": True, "pa_num_blocks": 1026, "pa_block_size": 32},
        {"pa_num_blocks": 1025},
    ),
    (
        "context_length_estimate",
        "error",
        "the last must be above 8",
        {"enable_chunked_prefill": True, "context_length_estimate": (8,)},
        {"context_length_estimate": (9,)},
    ),
    (
        "max_rolling_batch_size",
        "error",
        "lower max_rolling_batch_size below 128, or raise n_positions above 128",
        {
            "enable_chunked_prefill": True,
            "n_positions": 128,
            "max_rolling_batch_size": 128,
            "context_length_estimate": (128,),
        },
        {"n_positions": 129},
    ),
    (
        "context_length_estimate",
        "error",
        "each must be at least 8",
        {"enable_chunked_prefill": True, "context_length_estimate": (4, 128)},
        {"context_length_estimate": (8, 128)},
    ),
    (
        "fuse_mlp",
        "error",
        "width 14336",
        {"fuse_mlp": True, DEGREE: 24},
        {DEGREE: 8},
    ),
    (
        "sequence_parallel",
        "error",
        "above 2048, and not 2500",
        {"sequence_parallel": True, "context_length_estimate": (1001, 2500)},
        {"context_length_estimate": (1001, 2504)},
    ),
    (
        "sequence_parallel",
        "error",
        "and not 1001",
        {
            "sequence_parallel": True,
            "sequence_parallel_norm_threshold": 1000,
            "context_length_estimate": (1001,),
        },
        {"sequence_parallel_norm_threshold": 1001},
    ),
    (
        DEGREE,
        "error",
        "does not fit: needs 24.0 GiB per core, has 16.0 GiB; smallest that fits: tensor_parallel_degree=4",
        {DEGREE: 2, "max_rolling_batch_size": 64, "device": INF2},
        {DEGREE: 8},
    ),
    (DEGREE, "error", "quantize=static_int8", {DEGREE: 1}, {DEGREE: 2}),
    (
        "max_rolling_batch_size",
        "error",
        "Take that, set max_rolling_batch_size=28 or set n_positions=1792",
        {DEGREE: 2, "max_rolling_batch_size": 64, "device": SMALL},
        {"max_rolling_batch_size": 16},
    ),
    (
        DEGREE,
        "error",
        "no known machine holds it; use a smaller model",
        {"facts": replace(LLAMA, num_parameters=10**13)},
        {"device": replace(INF2, core_memory_bytes=0)},
    ),
    (
        "sequence_parallel",
        "error",
        "not 2500",
        {
            "sequence_parallel": True,
            "context_length_estimate": (1024,),
            "n_positions": 2500,
            "rolling_batch_strategy": "naive_rolling_batch",
        },
        {"rolling_batch_strategy": None},
    ),
    (
        DEGREE,
        "note",
        "so the memory is not checked",
        {"facts": replace(LLAMA, num_parameters=None)},
        {"facts": LLAMA},
    ),
]
# Words of a defect to what brings it up and what does not.
UPSTREAM = {
    "to whole numbers": (
        "kv_cache_quantize",
        {"kv_cache_quantize": "int8"},
        {"kv_cache_quantize": "fp8"},
    ),
    "mixes up the rows": (
        GQA,
        {GQA: "shard-over-batch"},
        {"facts": MHA},
    ),
    "look back one token more": (
        "n_positions",
        {"facts": of("mistral", **WINDOW), "context_length_estimate": (1024, 2049)},
        {"context_length_estimate": (1024, 2048)},
    ),
    "attends to all tokens": (
        "n_positions",
        {"facts": of("mixtral", **WINDOW), "n_positions": 2049, "context_length_estimate": (128,)},
        {"n_positions": 2048},
    ),
    "never gives the last tokens": (
        DEGREE,
        {"loader": "nxdi", "facts": of("llama", vocab_size=32002), DEGREE: 4},
        {"on_device_generation": True},
    ),
    "takes other activations": (
        "fused_rmsnorm_mlp",
        {
            "loader": "nxdi",
            "device": TRN2,
            "facts": of("llama", config={"mlp_bias": True, "hidden_act": "silu"}),
            "fused_rmsnorm_mlp": True,
        },
        {"facts": of("llama", config={"mlp_bias": False, "hidden_act": "swish"})},
    ),
    "gelu_pytorch_tanh for silu": (
        "fused_rmsnorm_mlp",
        {
            "loader": "nxdi",
            "device": TRN2,
            "facts": of("qwen3", config={"hidden_act": "gelu"}),
            "fused_rmsnorm_mlp": True,
        },
        {"fused_rmsnorm_mlp": False},
    ),
    "gives groups of cores no cache": (
        "attention_dp_degree",
        {
            "loader": "nxdi",
            "facts": of("mistral", **WINDOW),
            "n_positions": 4096,
            DEGREE: 16,
            "attention_dp_degree": 2,
        },
        {"n_positions": 2048},
    ),
}


@pytest.mark.parametrize(
    ("name", "level", "text", "situation", "change"),
    [*LENGTHS, *ON_CPU, *EQUIVALENTS, *BATCHES, *CORES, *LAYOUT],
)
def test_a_finding_is_told_only_when_it_holds(name, level, text, situation, change):
    assert len(matching(situation, name, level, text)) == 1
    assert matching({**situation, **change}, name, level, text) == []


class TestDefects:
    @pytest.mark.parametrize("defect", UPSTREAM)
    def test_wrong_answers_are_refused_with_the_way_to_have_them(self, defect):
        name, situation, change = UPSTREAM[defect]
        (found,) = matching(situation, name, "error", "answers are wrong")
        assert defect in found.problem
        assert "allow_known_defects=true" in found.problem
        assert matching({**situation, **change}, name, "error", "answers are wrong") == []

    @pytest.mark.parametrize("defect", UPSTREAM)
    def test_whoever_accepts_them_is_warned(self, defect):
        name, situation, _ = UPSTREAM[defect]
        accepted = {**situation, "allow_known_defects": True}
        assert matching(accepted, name, "error", "answers are wrong") == []
        assert len(matching(accepted, name, "warning", "answers are wrong")) == 1

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
        short = {"facts": of("mistral", **WINDOW), "context_length_estimate": (1024,)}
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
        situation = {"loader": loader, "facts": of(model_type, **WINDOW)}
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
            MODEL_TYPES, ("cpu", *CAPABILITIES), (SMALL, INF2, TRN1, TRN2, NOWHERE, UNSAID)
        ):
            with subtests.test(str(case)):
                self.check_answer(*case)

    def check_answer(self, model_type, loader, device):
        facts = of(model_type, config=PUBLISHED.get(model_type, {}))
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
            assert all(found.problem for found in say(loader=loader, facts=ModelFacts()))

    @pytest.mark.parametrize("model_type", ["llama", "opt", "gpt_neox"])
    def test_a_plan_that_fits_needs_nothing_to_be_changed(self, model_type):
        facts = of(
            model_type, config={"hidden_act": "gelu_new"} if model_type == "gpt_neox" else {}
        )
        assert [found for found in say(facts=facts, filled=FILLED) if found.level != "note"] == []


def test_findings_name_options_and_no_finding_is_told_twice():
    for _, _, _, situation, change in [*LENGTHS, *ON_CPU, *EQUIVALENTS, *BATCHES, *CORES, *LAYOUT]:
        for values in (situation, {**situation, **change}):
            found = say(**values)
            assert len(found) == len(set(found))
            assert all(set(entry.names) <= ServingOptions.model_fields.keys() for entry in found)
            assert all(entry.names and not entry.problem.endswith(".") for entry in found)


def test_nothing_asked_of_the_cpu_is_nothing_told():
    assert say(loader="cpu", tensor_parallel_degree=1) == []


@pytest.mark.parametrize(
    "values",
    [
        {**DRAFT, "speculative_length": 3},
        {"ngram_prompt_lookup_max": 3, "speculative_length": 3},
        {"enable_chunked_prefill": True, "context_length_estimate": (16, 128)},
    ],
)
def test_what_the_cpu_does_too_is_not_called_useless(values):
    assert say(loader="cpu", tensor_parallel_degree=1, **values) == []


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
    facts = of(model_type, num_heads=heads * groups, num_kv_heads=heads)
    values = {
        DEGREE: degree,
        GQA: way,
        "max_rolling_batch_size": slots,
        "shard_over_sequence": flash,
    }
    for found in say(loader=loader, facts=facts, device=TRN2, **values):
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
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, True, "cpu"),
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


@pytest.mark.parametrize(("model_type", "changes", "silent", "fix"), TRAITS)
class TestWhatAConfigurationAsksFor:
    def test_is_refused_with_the_loader_that_has_it(self, model_type, changes, silent, fix):
        situation = {"facts": of(model_type, config=changes)}
        loaders = "model_loader=nxdi or model_loader=cpu" if fix == "nxdi" else "model_loader=cpu"
        (found,) = matching(situation, "model_loader", "error", f"set {loaders}")
        ((name, value),) = changes.items()
        assert found.problem.startswith(f"config.json has {name}={json.dumps(value)[:30]}")
        assert ("answers are wrong" in found.problem) == silent
        assert matching({"facts": of(model_type)}, "model_loader", "error", "config.json") == []
        assert matching({**situation, "loader": fix}, "model_loader", "error", "config.json") == []

    def test_may_be_wrong_but_not_stop(self, model_type, changes, silent, fix):
        accepted = {"facts": of(model_type, config=changes), "allow_known_defects": True}
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
    known = of("llama", config=config)
    assert matching({"facts": known}, "model_loader", "error", "config.json") == []


@pytest.mark.parametrize("config", [{}, {"hidden_act": "gelu"}])
def test_what_is_nearly_right_gets_a_warning(config):
    (found,) = matching(
        {"facts": of("gpt_neox", config=config)}, "model_loader", "warning", "hidden_act"
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
    found = matching({"facts": of("gptj", config=config)}, "model_loader", "error", "rotary_dim")
    assert [
        "an even number within a head" in entry.problem
        and entry.problem.endswith("it would stop; correct config.json")
        for entry in found
    ] == [True] * (not right)


def test_a_window_is_left_by_one_sequence_at_a_time_only():
    beyond = {"facts": of("mistral", sliding_window=512), "context_length_estimate": (512,)}

    def wrong(**options):
        return [
            found.problem
            for found in say(**{**beyond, **options})
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
    fitting = say(**situation)
    names = {name for found in fitting for name in found.names}
    assert {"max_rolling_batch_size", "model_loading_timeout", DEGREE} <= names
    (error,) = say(**situation, facts=replace(LLAMA, num_parameters=10**13))
    assert error.level == "error"


def test_an_option_that_is_left_out_breaks_no_rule_of_the_library():
    divided = {
        "shard_over_sequence": True,
        "cache_layout": "BSH",
        "context_length_estimate": (4096,),
    }
    told = "a cache divided by tokens"
    assert matching(divided, "shard_over_sequence", "error", told)
    assert not matching({**divided, "facts": of("mistral")}, "shard_over_sequence", "error", told)
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
    known = {"loader": "nxdi", "device": INF2, "facts": of(name)}
    [found] = matching(known, "model_loader", "error", f"has a class that {REFUSED[name]}, for")
    assert "model_loader=cpu" in found.problem
    assert not matching({**known, "facts": of("llama")}, "model_loader", "error", "")


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
    assert any(name in found.names for found in say(**chunks))
    assert not any(name in found.names for found in say(**chunks, filled=(name,)))


@pytest.mark.parametrize("value", [math.nan, "many", [8], {"a": 1}, True])
def test_experts_of_a_token_that_are_no_number_are_told(value):
    odd = {**GROUPS, "facts": replace(EXPERTS, config={"num_experts_per_tok": value})}
    assert matching(odd, "model_loader", "error", "needs at least 2 experts")


@pytest.mark.parametrize("value", ["many", [8], [{}], {"a": []}, 7, math.nan, True])
def test_a_field_of_any_type_is_judged(value):
    tables = [*NXDI_FIELDS.values(), *TNX_FIELDS.values()]
    judged = [field.takes(value, LLAMA) for table in tables for field in table.values()]
    assert {True, False} == set(judged)
