"""Every field of `config.json` that changes a number, for each class of NxD Inference.

Source: neuronx-distributed-inference 0.9, `models/*/modeling_*.py`, models/config.py and modules/; the modelling code
of transformers 4.57 and 5.23. Fields that are not here change none. tests/backends/test_fields.py compares those of the
other architectures that the rig runs; those of dbrx, gpt_oss and qwen3_moe were read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from djl_python_neuronx.config.values import shortened
from djl_python_neuronx.planning.fields import (
    LIBRARY_ONLY,
    QUANTISED,
    ROTARY,
    SAME_HEAD_DIM,
    TRANSLATED,
    Field,
    read,
    rope_type,
    rotary,
)
from djl_python_neuronx.planning.model import ModelFacts

_WINDOW = Field("attends to all tokens: see above")
_NO_BIAS = Field("drops these biases", (False,), default=False)
_UNTIED = Field("ties no embeddings", (False,), default=False, stops=True)
_SEVERAL = Field(
    "needs at least 2 experts for a token",
    right=lambda value, _model: value is None or value > 1,
    stops=True,
)
_NUMBERS = read("hidden_size intermediate_size num_attention_heads num_hidden_layers") | read(
    "num_key_value_heads rms_norm_eps vocab_size"
)
_DENSE = {**_NUMBERS, **read("hidden_act tie_word_embeddings"), **rotary("default")}
_OTHERS_MLP = {"mlp_bias": Field(LIBRARY_ONLY, (False,), default=False)}
_QWEN = {
    **_DENSE,
    **_OTHERS_MLP,
    **dict.fromkeys(
        ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window"), _WINDOW
    ),
}


_MOE = {
    **_NUMBERS,
    **rotary("default"),
    "hidden_act": Field(
        "has no such activation",
        ("silu", "swish", "gelu", "relu", "leaky_relu", "sigmoid", "tanh"),
        "silu",
        stops=True,
    ),
    "num_experts_per_tok": _SEVERAL,
    "sliding_window": _WINDOW,
    "tie_word_embeddings": _UNTIED,
}


def _full_every_other(value: Any, _model: ModelFacts) -> bool:  # noqa: ANN401
    kinds = [kind == "full_attention" for kind in value or ()]
    return kinds == [number % 2 == 1 for number in range(len(kinds))]


def _untruncated(value: Any, _model: ModelFacts) -> bool:  # noqa: ANN401
    return value is None or (rope_type(value) == "yarn" and value.get("truncate") is False)


def _has_method(name: str) -> Field:
    return Field(
        f"takes weights in {name} only",
        right=lambda value, _model: (
            isinstance(value, Mapping) and value.get("quant_method") == name
        ),
        stops=True,
    )


_GPT_OSS_ROPE = Field("scales positions as yarn, without rounding its bounds", right=_untruncated)
_OF_ALL = {"quantization_config": QUANTISED}
_OF_ONE: Final[Mapping[str, Mapping[str, Field]]] = {
    "dbrx": {
        **read("attn_config d_model n_heads n_layers vocab_size"),
        "ffn_config": Field(
            "scales the experts' weights to a sum of 1",
            right=lambda value, _model: (value or {}).get("moe_normalize_expert_weights", 1) == 1,
        ),
        "tie_word_embeddings": _UNTIED,
    },
    "gpt_oss": {
        **_NUMBERS,
        **read("head_dim num_experts_per_tok num_local_experts sliding_window tie_word_embeddings"),
        "attention_bias": Field("has no layers without biases", (True,), default=True, stops=True),
        "initial_context_length": Field(
            "needs the length before scaling", right=lambda value, _model: bool(value), stops=True
        ),
        "layer_types": Field(
            "has a window in all but each layer 2, 4 ...", right=_full_every_other
        ),
        "quantization_config": _has_method("mxfp4"),
        "rms_norm_eps": Field("computes 1e-05", (1e-5,), 1e-5),
        **dict.fromkeys(ROTARY, _GPT_OSS_ROPE),
        "rope_theta": TRANSLATED,
    },
    "llama": {
        **_DENSE,
        **read("attention_bias head_dim mlp_bias"),
        **rotary("default", "linear", "llama3", "yarn"),
        "attention_chunk_size": Field(LIBRARY_ONLY, (None,)),
        "original_hidden_size": Field(LIBRARY_ONLY, (None,), stops=True),
        "sliding_window": Field(LIBRARY_ONLY, (None,)),
    },
    "mistral": {**_DENSE, **_OTHERS_MLP, **read("sliding_window"), "head_dim": SAME_HEAD_DIM},
    "mixtral": {**_MOE, **read("num_local_experts"), "head_dim": SAME_HEAD_DIM},
    "qwen2": {**_QWEN, "head_dim": SAME_HEAD_DIM},
    "qwen3": {**_QWEN, **read("head_dim"), "attention_bias": _NO_BIAS},
    "qwen3_moe": {
        **_MOE,
        **read("head_dim moe_intermediate_size num_experts"),
        "attention_bias": _NO_BIAS,
        "decoder_sparse_step": Field("has experts in each layer", (1,), 1, stops=True),
        "layer_types": _WINDOW,
        "mlp_only_layers": Field("has experts in each layer", ([],), default=[], stops=True),
        "norm_topk_prob": Field(
            "scales the experts' weights to a sum of 1", (True,), default=False
        ),
        "use_sliding_window": _WINDOW,
    },
}
NXDI_FIELDS: Final[Mapping[str, Mapping[str, Field]]] = {
    name: {**_OF_ALL, **fields} for name, fields in _OF_ONE.items()
}
"""`model_type` to its fields."""

_OF_ANY: Final = read(
    "hidden_size model_type num_attention_heads num_hidden_layers num_key_value_heads rms_norm_eps "
    "rope_theta vocab_size"
)
"""Fields that the library records as they are, whichever class the model has."""
_REWRITTEN: Final[Mapping[str, frozenset[str]]] = {
    "gpt_oss": frozenset(
        {"hidden_size", "intermediate_size", "quantization_config", "rms_norm_eps"}
    ),
    "qwen3_moe": frozenset({"intermediate_size", "moe_intermediate_size"}),
}
"""Fields that a class changes before it records them: padded sizes, those of the experts, and constants."""
_SCALING: Final = "rope_scaling"


def other_fields(recorded: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Return, in words, the fields in which the configuration that the library recorded is of another model.

    `config`: the content of `config.json`. A field that either lacks is not compared.
    """
    kind = str(config.get("model_type"))
    names = {*_OF_ANY, *_OF_ONE.get(kind, ())} - {*ROTARY} - _REWRITTEN.get(kind, frozenset())
    if kind in _OF_ONE:
        names.add(_SCALING)
    if False in (recorded.get("use_sliding_window"), config.get("use_sliding_window")):
        names.discard("sliding_window")
    # transformers 4, with which the library records, reads no `rope_parameters`; transformers 5 reads them first.
    own = recorded.get(_SCALING, recorded.get("rope_parameters"))
    scaling = _positions(own)
    found = {**scaling, **recorded, _SCALING: scaling[_SCALING]}
    wanted = {**config, **_positions(config.get("rope_parameters") or config.get(_SCALING))}
    return [
        f"{name} {shortened(found[name])!r} instead of {shortened(wanted[name])!r}"
        for name in sorted(names & found.keys() & wanted.keys())
        # Null stands for a value that follows from others, but for no window.
        if name == "sliding_window" or None not in (found[name], wanted[name])
        if _differ(found[name], wanted[name])
    ]


def _positions(scaling: object) -> dict[str, Any]:
    """Return `rope_scaling` with a type in any case, and `rope_theta` if it is among the parameters of positions."""
    values = dict(scaling) if isinstance(scaling, Mapping) else {}
    kind = values.pop("type", "default")
    theta = {"rope_theta": values.pop("rope_theta")} if "rope_theta" in values else {}
    return {**theta, _SCALING: {"rope_type": kind, **values}}


def _differ(one: object, other: object) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return any(_differ(one[name], other[name]) for name in one.keys() & other.keys())
    return one != other
