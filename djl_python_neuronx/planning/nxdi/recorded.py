"""The `NeuronConfig` that NxD Inference wrote beside its graphs: as options, and compared with the wanted one.

The library loads graphs that were compiled for another one, and fails at the first call, or never. Source:
neuronx-distributed-inference 0.9.0, models/config.py, and its history since 0.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any, Final

from djl_python_neuronx.config import keywords
from djl_python_neuronx.config.values import shortened
from djl_python_neuronx.planning.nxdi.arguments import library_buckets

Config = Mapping[str, Any]

_AT_SEQ_LEN = ("max_context_length", "max_length", "pa_block_size")
_AT_BATCH_SIZE = ("tkg_batch_size", "max_batch_size", "spec_batch_size", "pa_num_blocks")
_DEFAULTS: Final[Config] = {
    "seq_len": 128,
    "torch_dtype": "bfloat16",
    **dict.fromkeys(("batch_size", "tp_degree", "pp_degree", "ep_degree", "cp_degree"), 1),
    **dict.fromkeys(("mlp_cp_degree", "attention_dp_degree", "moe_tp_degree", "moe_ep_degree"), 1),
    "attn_block_tkg_nki_kernel_use_online_softmax": True,
    "attn_cls": "NeuronLlamaAttention",
    "cast_type": "config",
    "cc_pipeline_tiling_factor": 2,
    "ep_dispatch_cc_option": "AR_AG",
    "lm_head_pad_alignment_size": 1,
    "padding_side": "right",
    "quantization_scale_dtype": "f32",
    "quantize_clamp_bound": inf,
    "seq_len_threshold_for_cc_tiling": 16384,
    "weight_gather_seq_len_threshold": 32768,
}
"""Keyword to the library's default; of all others that is null, false, 0 or empty."""
_INNER_DEFAULTS: Final[Mapping[str, Config]] = {
    "on_device_sampling_config": {
        **dict.fromkeys(("top_k", "top_p", "temperature", "sampling_dp_degree"), 1),
        "global_topk": 256,
        "on_device_sampling_config": True,
    },
    "router_config": {"act_fn": "softmax", "dtype": "float32"},
    "blockwise_matmul_config": {
        "block_size": 512,
        "optimized_block_to_token_mapping": True,
        "parallelize_token_to_block_mapping": True,
    },
    "kv_quant_config": {"direct_cast": True, "quant_dtype": "float8_e4m3fn"},
    "lora_config": {
        "eviction_policy": "lru",
        "lfu_decay_period": 128,
        "lora_bias": "none",
        "lora_memory_transpose": True,
        "max_cpu_loras": 100,
    },
}
"""The same of keywords that take an object."""
_OFF_BY_DEFAULT = ("on_device_sampling_config", "kv_quant_config", "lora_config")
"""Those of them that are null by default: an object turns something on, whatever is in it."""
_NUMBERS = (
    *("seq_len", "max_length", "max_context_length", "batch_size", "tkg_batch_size"),
    *("tp_degree", "pp_degree", "ep_degree", "attention_dp_degree"),
)
_DERIVED: Final = frozenset(
    {
        # computed from other keywords or by the model's class, some of them no keywords at all
        *("buckets", "n_active_tokens", "n_positions", "max_new_tokens", "world_size", "tile_cc"),
        *("enable_long_context_mode", "enable_token_tree", "is_chunked_prefill", "kv_cache_tiling"),
        *("is_hidden_dim_shuffled", "is_intermediate_dim_shuffled", "is_prefill_stage"),
        *("kv_cache_padding_size", "kv_cache_update_with_kernel", "overrides_torch_dtype"),
        *("glu_mlp", "glu_type", "hidden_act_bias", "hidden_act_scaling_factor"),
        *("gate_clamp_lower_limit", "gate_clamp_upper_limit", "up_clamp_lower_limit"),
        *("up_clamp_upper_limit", "trace_tokengen_model", "quantized_kernel_lower_bound"),
        # without a part in the graphs: how to load, and places on the machine that compiled
        *("allow_input_truncation", "save_sharded_checkpoint", "skip_sharding", "skip_warmup"),
        *("quantized_checkpoints_path", "enable_bucketing", "max_context_length"),
    }
)
_QUANTIZATION = (
    *("quantization_type", "quantization_dtype", "quantization_block_axis"),
    *("quantization_block_size", "quantization_scale_dtype", "modules_to_not_convert"),
)
_ALWAYS = ("batch_size", "seq_len", "tp_degree", "torch_dtype")
_FLAGS = ("is_continuous_batching", "output_logits", "async_mode")
"""With `_ALWAYS`: keywords that become options even at the library's default, as this package's own may differ."""
_HOSTS = ("async_mode",)
"""Keywords that change no graph: unset options adopt them; a difference needs no recompile."""


def as_options(recorded: Config) -> dict[str, object]:
    """The options that give NxD Inference a recorded configuration: name to value, which is not validated.

    Keywords without an option are `override_neuron_config`: numbers and flags alone, as text and objects can name
    places and code, and none that is refused there. `differences` then has the others.

    Raises:
        TypeError, ValueError: a field is not a valid number.
    """
    given = {**dict.fromkeys(_FLAGS, False), **_normal(recorded)}
    if given["batch_size"] == 1 and not given["is_continuous_batching"]:
        del given["is_continuous_batching"]  # what one slot is anyway
    found, left = keywords.options_of(given)
    override = {
        name: value
        for name, value in left.items()
        if isinstance(value, (int, float)) and name not in keywords.RESERVED
    }
    return {**found, "override_neuron_config": override} if override else found


def differences(recorded: Config, wanted: Config) -> dict[str, tuple[object, object]]:
    """Keywords that differ, each by the name of its option where it has one, to its recorded and its wanted value."""
    compiled, ours = _normal(recorded), _normal(wanted)
    found: dict[str, tuple[object, object]] = {}
    # What other keywords follow from comes first: of those with one option only the first is named.
    for name in sorted({*compiled, *ours}, key=lambda name: (name not in _DEFAULTS, name)):
        default = _DEFAULTS.get(name, False if name in _FLAGS else None)
        pair = compiled.get(name, default), ours.get(name, default)
        by_platform = name == "logical_nc_config" and None in pair
        if pair[0] != pair[1] and name not in _HOSTS and not by_platform:
            found.setdefault(*keywords.explained(name, pair))
    return found


def _normal(config: Config) -> dict[str, Any]:
    """The keywords that are neither defaults nor follow from others, with lengths written out."""
    given = _written_out(config)
    follows = {**_DEFAULTS, **_follows(given)}
    return {
        name: value
        for name, value in given.items()
        if name not in _DERIVED
        and (name in _ALWAYS or value != follows.get(name))
        and (value or name in _OFF_BY_DEFAULT or follows.get(name))
    }


def _written_out(config: Config) -> dict[str, Any]:
    given = {**_DEFAULTS, **{name: value for name, value in config.items() if value is not None}}
    given = {**_by_size(given), **given}
    for name in _NUMBERS:
        if type(given[name]) is not int or given[name] < 1:
            msg = f"{name} is {shortened(given[name])!r}, expected a number of at least 1"
            raise ValueError(msg)
    bucketing = bool(given.get("enable_bucketing"))
    for name, limit in (
        ("context_encoding_buckets", given["max_context_length"]),
        ("token_generation_buckets", given["max_length"]),
    ):
        given[name] = sorted(given.get(name) or library_buckets(limit)) if bucketing else [limit]
    if "normalize_top_k_affinities" in given:
        given["disable_normalize_top_k_affinities"] = not given.pop("normalize_top_k_affinities")
    if "logical_neuron_cores" in given:
        given["logical_nc_config"] = given.pop("logical_neuron_cores")
    for name, inner in _inner_defaults(given).items():
        if isinstance(value := given.get(name), Mapping):
            given[name] = _without_defaults(value, inner)
    return given


def _inner_defaults(given: Config) -> Mapping[str, Config]:
    """Return those of the version that has written a configuration, as its keywords show it."""
    name, flag = "blockwise_matmul_config", "parallelize_token_to_block_mapping"
    whole = "use_block_parallel" in (given.get(name) or {})
    if not whole or "lm_head_pad" in given:
        return _INNER_DEFAULTS
    # neuronx-distributed 0.13, with NxD Inference 0.4, which has no lm_head_pad.
    return {**_INNER_DEFAULTS, name: {**_INNER_DEFAULTS[name], flag: False}}


def _by_size(given: Config) -> dict[str, Any]:
    return {
        **dict.fromkeys(_AT_SEQ_LEN, given["seq_len"]),
        **dict.fromkeys(_AT_BATCH_SIZE, given["batch_size"]),
    }


def _follows(given: Config) -> dict[str, Any]:
    """Keywords as the library sets them by default, or where their value does not matter."""
    rows = given["tkg_batch_size"]
    follows = {
        **_by_size(given),
        "ctx_batch_size": 1 if given.get("is_continuous_batching") else given["batch_size"],
        "kv_cache_batch_size": rows // given["attention_dp_degree"],
        "lm_head_pad": given.get("logical_nc_config", 1) > 1,
        "local_ranks_size": given["tp_degree"] * given["pp_degree"] * given["ep_degree"],
        "rpl_reduce_dtype": given["torch_dtype"],
        "scratchpad_page_size": 1024 if given["max_context_length"] >= 2**15 else None,
    }
    # A class, which the architecture names: qwen2, qwen3.
    if isinstance(given["attn_cls"], Mapping):
        follows["attn_cls"] = given["attn_cls"]
    if given.get("token_generation_batches") == [rows]:
        follows["token_generation_batches"] = [rows]
    if not given.get("is_block_kv_layout"):
        follows |= {name: given[name] for name in ("pa_block_size", "pa_num_blocks")}
    if not (given.get("quantized") or given.get("quantized_mlp_kernel_enabled")):
        follows |= {name: given.get(name) for name in _QUANTIZATION}
    return follows


def _without_defaults(value: Mapping[str, Any], defaults: Config) -> dict[str, Any]:
    # An object in an object is a class or an enumeration, which the platform decides, as it does on a kernel.
    return {
        name: entry
        for name, entry in value.items()
        if (entry or name in defaults)
        and entry != defaults.get(name)
        and not (isinstance(entry, Mapping) or name == "top_k_kernel_enabled")
    }
