"""Every field of `config.json` that changes a number, for each class of transformers-neuronx.

Source: transformers-neuronx 0.13, `<architecture>/config.py`, `model.py` and `hlo.py`; the modelling code of
transformers 4.57 and 5.23. Fields that are not here change none. tests/backends/test_fields.py compares all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from djl_python_neuronx.planning.fields import (
    LIBRARY_ONLY,
    QUANTISED,
    SAME_HEAD_DIM,
    TRANSLATED,
    Field,
    read,
    rotary,
)
from djl_python_neuronx.planning.model import ModelFacts

_ROTARY_DIM = 64
_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")


def _as_wide(value: object, model: ModelFacts) -> bool:
    return value in (None, model.hidden_size)


def _in_pairs(_value: object, model: ModelFacts) -> bool:
    """Return whether transformers computes the value; null is not the default here, and fails."""
    given = model.config.get("rotary_dim", _ROTARY_DIM)
    size = (model.hidden_size or 0) // (model.num_heads or 1)
    return isinstance(given, int) and given % 2 == 0 and 0 < given <= size


_EPSILON = Field("computes 1e-05", (1e-5,), 1e-5)
_GELU = Field("computes gelu's tanh form", _TANH, "gelu_new", near=("gelu",))
_SCALES = Field("scales attention", (True,), default=True)
_GROUPED = {
    **read("hidden_size intermediate_size num_attention_heads num_hidden_layers"),
    **read("num_key_value_heads rms_norm_eps tie_word_embeddings vocab_size"),
    "hidden_act": Field("computes silu", ("silu", "swish"), "silu"),
    "head_dim": SAME_HEAD_DIM,
    "rotary_percentage": Field(LIBRARY_ONLY, (1,), 1),
    "position_interpolation_factor": Field(LIBRARY_ONLY, (None,)),
}
_MISTRAL = {**_GROUPED, **read("sliding_window"), **rotary("default", "linear")}

_OF_ALL = {"quantization_config": QUANTISED}
_OF_ONE: Final[Mapping[str, Mapping[str, Field]]] = {
    "bloom": {
        **read("hidden_size n_head n_layer tie_word_embeddings vocab_size"),
        "apply_residual_connection_post_layernorm": Field(
            "adds what goes into the norm", (False,), default=False
        ),
        "layer_norm_epsilon": _EPSILON,
    },
    "gpt2": {
        **read("n_embd n_head n_inner n_layer n_positions tie_word_embeddings vocab_size"),
        "activation_function": _GELU,
        "layer_norm_epsilon": _EPSILON,
        "n_kv_head": Field(LIBRARY_ONLY, (None,), stops=True),
        "pruned_heads": Field("prunes none", ({},), default={}),
        "scale_attn_by_inverse_layer_idx": Field(
            "scales all layers alike", (False,), default=False
        ),
        "scale_attn_weights": _SCALES,
    },
    "gpt_bigcode": {
        **read("n_embd n_head n_inner n_layer n_positions tie_word_embeddings vocab_size"),
        "activation_function": Field(_GELU.does, _TANH, "gelu_pytorch_tanh", near=_GELU.near),
        "layer_norm_epsilon": _EPSILON,
        "multi_query": TRANSLATED,
        "scale_attn_weights": _SCALES,
    },
    "gpt_neox": {
        **read("hidden_size intermediate_size num_attention_heads num_hidden_layers"),
        **read("tie_word_embeddings vocab_size"),
        **rotary("default"),
        "rotary_emb_base": TRANSLATED,
        "rotary_pct": TRANSLATED,
        "attention_bias": Field("has no layers without biases", (True,), default=True, stops=True),
        "hidden_act": Field(_GELU.does, _TANH, "gelu", near=_GELU.near),
        "layer_norm_eps": _EPSILON,
        "use_parallel_residual": Field("has no such layers", (True,), default=True, stops=True),
    },
    "gptj": {
        **read("n_embd n_head n_layer tie_word_embeddings vocab_size"),
        "activation_function": _GELU,
        "layer_norm_epsilon": _EPSILON,
        "n_inner": TRANSLATED,
        "rotary_dim": Field(
            "needs an even number within a head, as transformers does",
            right=_in_pairs,
            default=_ROTARY_DIM,
            stops=True,
            backends=(),
        ),
    },
    "llama": {
        **_GROUPED,
        **rotary("default", "linear", "llama3", stops=True),
        "attention_bias": Field("drops these biases", (False,), default=False),
        "mlp_bias": Field("drops these biases", (False,), default=False),
    },
    "mistral": _MISTRAL,
    "mixtral": {**_MISTRAL, **read("num_experts_per_tok num_local_experts")},
    "opt": {
        **read("ffn_dim hidden_size max_position_embeddings num_attention_heads"),
        **read("num_hidden_layers tie_word_embeddings vocab_size"),
        "activation_function": Field(
            "has no such activation", ("relu", "gelu_new", "silu", "sigmoid"), "relu", stops=True
        ),
        "do_layer_norm_before": Field("has no such layers", (True,), default=True, stops=True),
        "enable_bias": Field("has no layers without biases", (True,), default=True, stops=True),
        "layer_norm_elementwise_affine": Field(
            "needs the norms' weights", (True,), default=True, stops=True
        ),
        "word_embed_proj_dim": Field("projects no embeddings", right=_as_wide, stops=True),
        "_remove_final_layer_norm": Field("needs that norm", (False,), default=False, stops=True),
    },
}
TNX_FIELDS: Final[Mapping[str, Mapping[str, Field]]] = {
    name: {**fields, **_OF_ALL} for name, fields in _OF_ONE.items()
}
"""`model_type` to its fields."""
