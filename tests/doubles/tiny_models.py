"""Tiny checkpoints with random weights, one per architecture, written to disk as a user's would be.

Weights are drawn wide (standard deviation 0.3), so that logits depend on every earlier token: at
the libraries' 0.02 a mixed-up cache would hardly show.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

VOCAB_SIZE = 97
MAX_POSITIONS = 64

_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": MAX_POSITIONS}

CONFIGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": _LLAMA,
        "mistral": {**_LLAMA, "sliding_window": 7},
        "mixtral": {**_LLAMA, "num_local_experts": 4, "sliding_window": None},
        "qwen2": {
            **_LLAMA,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
        "gpt2": _GPT2,
        "gpt_bigcode": {**_GPT2, "multi_query": True},
        "gptj": {**_GPT2, "rotary_dim": 4},
        "gpt_neox": {k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"},
        "opt": {
            "hidden_size": 32,
            "word_embed_proj_dim": 16,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": MAX_POSITIONS,
            "do_layer_norm_before": False,
        },
        "bloom": {"hidden_size": 24, "n_layer": 2, "n_head": 6},
    }
)
"""Model type → its settings; together they have grouped and multi-query heads, experts, windows
(everywhere and in some layers), rotary, learned and ALiBi positions, projected embeddings."""


def save_tiny_model(model_type: str, directory: Path, *, seed: int = 0, **settings: Any) -> Path:
    """Write a checkpoint of `CONFIGS[model_type]` (or llama's), changed by `settings`; returns its directory."""
    return write_model(
        model_type, directory, {**CONFIGS.get(model_type, _LLAMA), **settings}, seed=seed
    )


def write_model(
    model_type: str, directory: Path, settings: Mapping[str, Any], *, seed: int = 0
) -> Path:
    """Write a checkpoint with these settings, and those of `CONFIGS` not; returns its directory."""
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "vocab_size": VOCAB_SIZE}
    config = transformers.AutoConfig.for_model(model_type, **{**ids, **settings})
    make: Any = transformers.AutoModelForCausalLM
    model = make.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * 0.3)
            else:
                parameter.add_(noise * 0.1)
    model.save_pretrained(directory)
    return directory


def poison(weights: Path, *token_ids: int) -> None:
    """Make the input embeddings of these tokens NaN, in a llama's or mixtral's file."""
    tensors = load_file(weights)
    tensors["model.embed_tokens.weight"][list(token_ids)] = float("nan")
    save_file(tensors, weights, {"format": "pt"})


def load_reference(directory: Path, **more: Any) -> Any:
    """The model as transformers itself loads and runs it, float32. `more`: arguments of `from_pretrained`."""
    make: Any = transformers.AutoModelForCausalLM
    return make.from_pretrained(directory, **more).float().eval()
