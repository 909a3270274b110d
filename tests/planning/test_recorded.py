"""NxD Inference's own record of a compile, as options and compared with what this package would write."""

from __future__ import annotations

from dataclasses import replace

import pytest

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning import machines
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.nxdi.recorded import as_options, differences
from djl_python_neuronx.planning.plan import library_arguments
from tests.artifacts.folders import NXDI_KEYWORDS, NXDI_RECORD

LLAMA = ModelFacts(model_type="llama", num_layers=2, vocab_size=512)

NXD_0_13 = {"use_block_parallel": False, "parallelize_token_to_block_mapping": False}
"""Of what neuronx-distributed 0.13 writes by default; from 0.14 on the second is true."""


def wanted(record, **changes):
    """The keywords that this package gives the library, with the recorded options and `changes`."""
    options = ServingOptions.model_validate({**as_options(record), **changes})
    experts = "router_config" in record or options.ep_degree > 1
    facts = replace(LLAMA, model_type="qwen3_moe") if experts else LLAMA
    return library_arguments(
        Case(options, facts, machines.named("inf2.48xlarge"), NEURON_BACKENDS["nxdi"])
    ).neuron_config


def recorded(**keywords):
    return {**NXDI_RECORD, **keywords}


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"output_logits": True},
        {"padding_side": "left"},
        {"async_mode": True, "on_device_sampling_config": {"dynamic": True, "global_topk": 64}},
        {"on_device_sampling_config": {"do_sample": True, "top_k": 5, "temperature": 0.5}},
        {"is_continuous_batching": False, "ctx_batch_size": 4},
        {"is_continuous_batching": False, **dict.fromkeys(("batch_size", "tkg_batch_size"), 1)}
        | dict.fromkeys(("max_batch_size", "kv_cache_batch_size", "spec_batch_size"), 1),
        {"token_generation_batches": [1, 2]},
        {"fused_qkv": True, "qkv_kernel_enabled": True, "sequence_parallel_enabled": True},
        {"attn_block_tkg_nki_kernel_use_online_softmax": False, "cp_degree": 2, "ep_degree": 2}
        | {"world_size": 4, "local_ranks_size": 4},
        {"quantization_scale_dtype": "f16", "modules_to_not_convert": ["lm_head"]},
        {"normalize_top_k_affinities": False, "router_config": {"act_fn": "sigmoid"}},
        {"scratchpad_page_size": 512, "logical_nc_config": 2, "lm_head_pad": True},
        {"a_flag_of_a_later_version": True, "a_number_of_one": 7},
        {"trace_tokengen_model": True, "rpl_reduce_dtype": "bfloat16"},
        {"lm_head_pad": None, "router_config": {}, "blockwise_matmul_config": NXD_0_13},
        {"attn_cls": {"__module__": "models.qwen2", "__name__": "NeuronQwen2Attention"}},
    ],
)
def test_a_recorded_configuration_is_reached_by_its_options(keywords):
    record = recorded(**keywords)
    assert differences(record, wanted(record)) == {}


@pytest.mark.parametrize(
    ("keywords", "name", "pair"),
    [
        ({"tp_degree": 8, "local_ranks_size": 8}, "tensor_parallel_degree", (8, 2)),
        ({"torch_dtype": "float32"}, "dtype", ("float32", "bfloat16")),
        ({"seq_len": 128, "max_length": 128}, "n_positions", (128, 64)),
        ({"context_encoding_buckets": [64]}, "context_length_estimate", ([64], [32, 64])),
        ({"token_generation_buckets": [32, 64]}, "n_positions", ([32, 64], [64])),
        ({"enable_bucketing": False}, "context_length_estimate", ([64], [32, 64])),
        ({"padding_side": "left"}, "padding_side", ("left", "right")),
        ({"output_logits": True}, "output_logits", (True, False)),
        ({"fused_qkv": True}, "fuse_qkv", (True, None)),
        ({"on_device_sampling_config": {}}, "on_device_generation", ({}, None)),
        ({"token_generation_batches": [2]}, "token_generation_batches", ([2], None)),
        ({"is_continuous_batching": False}, "rolling_batch_strategy", None),
        ({"kv_cache_batch_size": 8}, "max_rolling_batch_size", (8, None)),
        ({"lora_config": {"max_loras": 1}}, "enable_lora", ({"max_loras": 1}, None)),
        (
            {"lm_head_pad": False, "blockwise_matmul_config": NXD_0_13},
            "blockwise_matmul_config",
            ({"parallelize_token_to_block_mapping": False}, None),
        ),
        ({"attn_cls": "Other"}, "attn_cls", ("Other", "NeuronLlamaAttention")),
        ({"a_place_of_a_later_version": "/etc"}, "a_place_of_a_later_version", ("/etc", None)),
        ({"start_rank_id": 2, "local_ranks_size": 1}, "start_rank_id", (2, None)),
    ],
)
def test_each_keyword_that_differs_is_named_with_both_values(keywords, name, pair):
    found = differences(recorded(**keywords), wanted(NXDI_RECORD))
    assert name in found
    assert pair is None or found[name] == pair


@pytest.mark.parametrize("keyword", ["async_mode", "skip_warmup", "save_sharded_checkpoint"])
def test_what_changes_no_graph_is_no_difference(keyword):
    changed = recorded(**{keyword: not NXDI_RECORD[keyword]})
    assert differences(changed, wanted(NXDI_RECORD)) == {}


def test_vllms_buckets_are_the_ones_that_the_library_chose():
    """vllm-neuron turns bucketing on and names no lengths."""
    record = recorded(
        context_encoding_buckets=None, **dict.fromkeys(("seq_len", "max_length"), 2500)
    )
    record["max_context_length"] = 2500
    options = as_options(record)
    assert (
        options["n_positions"] == options["context_length_estimate"] == [128, 256, 512, 1024, 2500]
    )
    assert differences(record, wanted(record)) == {}


def test_a_record_names_no_places_and_no_code():
    hostile = {
        "quantized_checkpoints_path": "/etc/passwd",
        "lora_config": {"lora_ckpt_paths": {"a": "/etc"}},
        "tensor_replacement_config": {"ref_dir": "/etc"},
        "attn_cls": "os.system",
        "later": "/etc",
    }
    assert as_options(recorded(**hostile)) == as_options(NXDI_RECORD)


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        *((name, True) for name in ("apply_seq_ids_mask", "output_all_logits", "on_cpu")),
        *((name, True) for name in ("is_eagle_draft", "is_medusa")),
        ("start_rank_id", 1),
        ("local_ranks_size", 1),
    ],
)
def test_a_keyword_that_an_option_file_may_not_have_is_none_of_a_record_either(keyword, value):
    record = recorded(**{keyword: value})
    assert as_options(record) == as_options(NXDI_RECORD)
    assert keyword in differences(record, wanted(record))


def test_a_record_in_short_is_the_record_in_full():
    """Older versions wrote fewer keywords; the data file has all of 0.9."""
    assert differences(NXDI_RECORD, NXDI_KEYWORDS) == {}
    assert as_options(NXDI_KEYWORDS) == {
        name: value
        for name, value in as_options(NXDI_RECORD).items()
        if name != "logical_nc_config"
    }
