"""Tiny checkpoints of the models under `contrib/models` of NxD Inference's repository.

Wide random weights, norms and biases that are not those of a fresh model, grouped heads, 3 layers or more, and sizes
that two cores divide: so a cache that is mixed up, a bias that is lost or a norm in the wrong place shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import transformers

from djl_python_neuronx.planning.fields import rope_type, with_rotary
from tests.doubles import tiny_models
from tests.doubles.tiny_models import MAX_POSITIONS, write_model

VOCAB_SIZE = 96


@dataclass(frozen=True)
class Tiny:
    """A tiny model for a folder."""

    model_type: str
    """The class of transformers that makes it, and that it is compared with."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its configuration beyond those of `_COMMON`, or in their place."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """Fields of config.json that are written over those of the class, for the folder alone."""
    alone: tuple[str, ...] = ()
    """Numbers of config.json that the folder does not read, or computes something else with, unless they are the tiny
    model's."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options that the folder's code needs."""


_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    # no class's own values, so that one that is not read shows
    **dict.fromkeys(("rope_theta", "rotary_emb_base"), 700.0),
    **dict.fromkeys(
        ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"), 2e-3
    ),
}
"""Settings of each tiny model whose class has such a field."""
_WITH_HEAD_DIM = {"head_dim": 8}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": MAX_POSITIONS}
_PLAIN = {"num_key_value_heads": 4}
_GLM = {**_WITH_HEAD_DIM, "partial_rotary_factor": 0.5, "attention_bias": True, "pad_token_id": 0}
_GEMMA = {**_WITH_HEAD_DIM, "tie_word_embeddings": True}
# Windows lie above the tests' sequences: see `sequences_beyond_window` of planning for shorter ones.
_WINDOWED = {
    **_GEMMA,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

FOLDERS: Mapping[str, Tiny] = MappingProxyType(
    {
        "AFM-4.5B-Base": Tiny(
            "arcee",
            {
                **_WITH_HEAD_DIM,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "mscale": 1.0,
                    "original_max_position_embeddings": 16,
                },
            },
        ),
        "Apertus-8B-Instruct-2509": Tiny("apertus", {"rope_scaling": _LLAMA3_ROPE}),
        "DeepSeek-V3": Tiny(
            "deepseek_v3",
            {
                "num_key_value_heads": 4,
                "q_lora_rank": 24,
                "kv_lora_rank": 16,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 8,
                "v_head_dim": 8,
                "first_k_dense_replace": 1,
                "n_routed_experts": 8,
                "n_group": 4,
                "topk_group": 2,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "rope_scaling": None,
            },
        ),
        "ERNIE-4.5-0.3B-PT": Tiny("ernie4_5", {**_WITH_HEAD_DIM, "tie_word_embeddings": True}),
        "EXAONE-4.0-1.2B": Tiny(
            "exaone4",
            {
                "tie_word_embeddings": True,
                "rope_scaling": _LLAMA3_ROPE,
                "sliding_window": None,
                "layer_types": ["full_attention"] * 3,
            },
        ),
        "Falcon-H1-0.5B-Instruct": Tiny(
            "falcon_h1",
            {
                **_WITH_HEAD_DIM,
                "mamba_d_ssm": 32,
                "mamba_n_heads": 4,
                "mamba_d_head": 8,
                "mamba_d_state": 8,
                "mamba_n_groups": 1,
            },
        ),
        "GLM-4-9B-0414": Tiny("glm4", _GLM),
        "Llama-2-7b-hf": Tiny("llama", _PLAIN),
        "MiniCPM4-8B": Tiny(
            "granite",
            {
                "embedding_multiplier": 12.0,
                "residual_multiplier": 1.4 / 3**0.5,
                "attention_multiplier": 8**-0.5,
                "logits_scaling": 2.0,
                "max_position_embeddings": 2 * MAX_POSITIONS,
                # of the class; the model's own is in its rope_scaling alone
                "original_max_position_embeddings": MAX_POSITIONS,
                "rope_scaling": {
                    "rope_type": "longrope",
                    "factor": 2.0,
                    "short_factor": [1.0, 1.1, 1.5, 2.0],
                    "long_factor": [1.5, 3.0, 6.0, 9.0],
                    "original_max_position_embeddings": MAX_POSITIONS,
                },
            },
            written={
                "model_type": "minicpm",
                "scale_emb": 12.0,
                "scale_depth": 1.4,
                "dim_model_base": 16,
            },
        ),
        "Ministral-4b-instruct": Tiny("mistral", {"sliding_window": 64}),
        "Mistral-Small-3.1-24B-Instruct-2503": Tiny(
            "mistral", {**_WITH_HEAD_DIM, "sliding_window": None}
        ),
        "Mixtral-8x7B-Instruct-v0.1": Tiny(
            "mixtral", {"num_local_experts": 4, "sliding_window": None}
        ),
        "OLMo-2-0425-1B-Instruct": Tiny("olmo2", _PLAIN),
        "OLMo-2-1124-7B": Tiny("olmo2", _PLAIN),
        "OLMo-3-7B-Think": Tiny("olmo3", {**_PLAIN, "sliding_window": 64}),
        "Phi-3-mini-4k-instruct": Tiny(
            "phi3",
            {**_PLAIN, "pad_token_id": 0, "sliding_window": 64},
            alone=("partial_rotary_factor",),
        ),
        "Phi-3.5-MoE-instruct": Tiny(
            "phimoe",
            {
                "num_local_experts": 4,
                "attention_bias": True,
                "lm_head_bias": True,
                "sliding_window": 64,
            },
        ),
        "Phi-3.5-mini-instruct": Tiny(
            "phi3",
            {
                **_PLAIN,
                "pad_token_id": 0,
                "sliding_window": 64,
                "max_position_embeddings": 2 * MAX_POSITIONS,
                "original_max_position_embeddings": MAX_POSITIONS,
                "rope_scaling": {
                    "type": "longrope",
                    "short_factor": [1.0, 1.1, 1.5, 2.0],
                    "long_factor": [1.5, 3.0, 6.0, 9.0],
                },
            },
            alone=("partial_rotary_factor",),
        ),
        "Qwen2-7B-Instruct": Tiny("qwen2", {"use_sliding_window": False}),
        "Qwen3-0.6B": Tiny("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
        "Seed-OSS-36B-Instruct": Tiny("seed_oss", {"head_dim": 16}),
        "SmolLM3-3B": Tiny(
            "smollm3",
            {
                "num_hidden_layers": 4,
                "no_rope_layers": [1, 1, 1, 0],
                "tie_word_embeddings": True,
                "pad_token_id": 0,
            },
        ),
        "biogpt": Tiny("biogpt", {"tie_word_embeddings": True}),
        "c4ai-command-r7b-12-2024": Tiny(
            "cohere2",
            {
                "num_hidden_layers": 4,
                "layer_types": [*["sliding_attention"] * 3, "full_attention"],
                "sliding_window": 64,
                "logit_scale": 0.25,
                "tie_word_embeddings": True,
            },
        ),
        "falcon-7b": Tiny(
            "falcon",
            {
                "multi_query": True,
                "new_decoder_architecture": False,
                "parallel_attn": True,
                "bias": False,
                "alibi": False,
                "tie_word_embeddings": True,
            },
        ),
        "gemma-2-9b": Tiny(
            "gemma2",
            {
                **_WINDOWED,
                "num_hidden_layers": 4,
                "query_pre_attn_scalar": 16,
                "attn_logit_softcapping": 5.0,
                "final_logit_softcapping": 3.0,
            },
        ),
        "gemma-2b-it": Tiny("gemma", {**_GEMMA, "num_key_value_heads": 1}),
        "gemma-3-1b-it": Tiny(
            "gemma3_text",
            {
                **_WINDOWED,
                "num_hidden_layers": 6,
                "layer_types": [*["sliding_attention"] * 5, "full_attention"],
                "num_key_value_heads": 1,
                "query_pre_attn_scalar": 16,
                "rope_theta": 1000000.0,
                "rope_local_base_freq": 100.0,
            },
        ),
        "glm-4-9b-chat-hf": Tiny("glm", _GLM),
        "gpt-j-6b": Tiny("gptj", {**_GPT, "rotary_dim": 4}),
        "gpt-neo-1.3B": Tiny(
            "gpt_neo",
            {
                "num_hidden_layers": 4,
                "num_layers": 4,
                "num_heads": 4,
                "attention_types": [[["global", "local"], 2]],
                "window_size": 256,
                "tie_word_embeddings": True,
            },
        ),
        "gpt2": Tiny("gpt2", {**_GPT, "tie_word_embeddings": True}),
        "gpt_bigcode-santacoder": Tiny(
            "gpt_bigcode", {**_GPT, "multi_query": True, "tie_word_embeddings": True}
        ),
        "granite-3.1-8b-instruct": Tiny(
            "granite",
            {
                "tie_word_embeddings": True,
                "embedding_multiplier": 12.0,
                "residual_multiplier": 0.22,
                "attention_multiplier": 0.25,
                "logits_scaling": 4.0,
            },
        ),
        "helium-1-2b": Tiny("helium", {**_PLAIN, **_WITH_HEAD_DIM}),
        "hunyuan-7b-instruct": Tiny(
            "hunyuan_v1_dense",
            {
                **_WITH_HEAD_DIM,
                "tie_word_embeddings": True,
                "rope_scaling": {
                    "rope_type": "dynamic",
                    "type": "dynamic",
                    "alpha": 50.0,
                    "factor": 1.0,
                },
            },
        ),
        "internlm3-8b-instruct": Tiny(
            "llama",
            # as for shorter sequences than max_position_embeddings
            {**_WITH_HEAD_DIM, "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}},
            written={"model_type": "internlm3", "qkv_bias": False, "bias": False},
        ),
        "lfm2-2.6b": Tiny(
            "lfm2",
            {
                "num_hidden_layers": 4,
                "layer_types": ["conv", "full_attention"] * 2,
                "block_auto_adjust_ff_dim": False,
                "tie_word_embeddings": True,
            },
        ),
        "openai-gpt": Tiny("openai-gpt", {**_GPT, "tie_word_embeddings": True}),
        "opt-1.3b": Tiny(
            "opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "tie_word_embeddings": True}
        ),
        "orion-14b-chat": Tiny(
            "stablelm",
            {**_PLAIN, "partial_rotary_factor": 1.0, "rms_norm_eps": 2e-3},
            written={"model_type": "orion"},
        ),
        "persimmon-8b-base": Tiny(
            "persimmon", {**_PLAIN, "layer_norm_eps": 1e-5}, alone=("layer_norm_eps",)
        ),
        "phi-1_5": Tiny("phi", _PLAIN),
        "pythia-2.8b": Tiny("gpt_neox", {"rotary_pct": 0.25, "use_parallel_residual": True}),
        "recurrentgemma-2b-it": Tiny(
            "recurrent_gemma",
            {
                **_GEMMA,
                "num_key_value_heads": 1,
                "lru_width": 32,
                "attention_window_size": 64,
                "block_types": ["recurrent", "recurrent", "attention"],
            },
        ),
        "stablelm-2-1_6b": Tiny(
            "stablelm", {**_PLAIN, "use_qkv_bias": True, "partial_rotary_factor": 0.25}
        ),
        "starcoder2-3b": Tiny("starcoder2", {"tie_word_embeddings": True, "sliding_window": 64}),
        "vaultgemma-1b": Tiny(
            "vaultgemma",
            {
                **_WINDOWED,
                "num_hidden_layers": 4,
                "query_pre_attn_scalar": 8,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
            },
            # Its configuration samples on the device whatever is set.
            options={"on_device_generation": "true", "output_logits": "true"},
        ),
        "xglm-564M": Tiny(
            "xglm",
            {"d_model": 32, "ffn_dim": 48, "attention_heads": 4, "tie_word_embeddings": True},
        ),
    }
)
"""Folder to the tiny model that is run through it."""


_NO_NUMBER = frozenset(
    {
        *("model_type", "transformers_version", "use_cache", "output_router_logits"),
        *("is_decoder", "add_cross_attention"),
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
        *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
        "reorder_and_upcast_attn",
        # the rows' `rotary`
        *("rope_type", "type"),
    }
)
"""Fields of config.json that change no logit, or none of a model that is not trained."""
_SCALED: Mapping[str, Mapping[str, Any]] = {
    "yarn": {
        "attention_factor": None,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": None,
        "truncate": True,
    },
    "longrope": {"attention_factor": None},
}
"""Type of scaled positions to what transformers reads of it beside lengths and factors, with the defaults."""
_OFF = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
"""Fields that turn something off if they are null."""


def settings(name: str) -> dict[str, Any]:
    """Return the fields of the configuration of a folder's tiny model."""
    tiny = FOLDERS[name]
    kind = transformers.AutoConfig.for_model(tiny.model_type)
    common = {name: value for name, value in _COMMON.items() if hasattr(kind, name)}
    return {**common, **tiny.settings}


def compared(name: str) -> dict[str, tuple[Any, ...]]:
    """Return the switches of config.json with the values that a folder is compared with: those of its tiny model.

    Numbers of its scaled positions that code may not read, as their defaults are the usual values, are among them.

    The text "absent" is there if the tiny model has null, or what transformers takes for a field that is absent.
    """
    kind, tiny = transformers.AutoConfig.for_model, FOLDERS[name]
    default = with_rotary(kind(tiny.model_type).to_dict())
    given = settings(name)
    made = {**with_rotary(kind(tiny.model_type, **given).to_diff_dict()), **tiny.written}
    scaling = given.get("rope_scaling") or {}
    scaled = _SCALED.get(rope_type(scaling) or "", {})
    default.update(scaled)
    made.update({field: scaling.get(field, value) for field, value in scaled.items()})
    # Some code ties whatever is set. Code that was compared untied lacks a weight of a tied checkpoint, or ties too.
    made.pop("tie_word_embeddings", None)
    if given.get("tie_word_embeddings"):
        made["tie_word_embeddings"] = True
    if "use_sliding_window" in made:
        del made["sliding_window"]
    switches = {
        field: value
        for field, value in sorted(made.items())
        if field not in _NO_NUMBER
        and (
            field in (*tiny.alone, *scaled)
            or isinstance(value, (bool, str))
            or (value is None and field in _OFF)
        )
    }
    return {
        field: (
            *([] if value is None else [value]),
            *(["absent"] if value in (None, default.get(field)) else []),
        )
        for field, value in switches.items()
    }


def save_checkpoint(name: str, directory: Path) -> Path:
    """Write the tiny model of a folder as transformers has it; returns `directory`."""
    return write_model(FOLDERS[name].model_type, directory, settings(name))


def load_reference(directory: Path) -> Any:
    """Return a tiny model as transformers runs it, all in float32, with the attention that no kernel simplifies."""
    return tiny_models.load_reference(directory, attn_implementation="eager")
