"""What a model's `config.json` tells about it, whatever its architecture calls it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from djl_python_neuronx.planning.parameters import Dimensions, count, first_size

_POSITION_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len")
_KNOWN_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class ModelFacts:
    """Sizes and limits of a model; None where its configuration does not say."""

    model_type: str | None = None
    """What `config.json` calls the architecture: ``llama``."""
    architecture: str | None = None
    """The class that the checkpoint was saved from: ``LlamaForCausalLM``."""
    num_layers: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    """Of the feed-forward network, or of one expert."""
    vocab_size: int | None = None
    num_heads: int | None = None
    """Query heads."""
    num_kv_heads: int | None = None
    """Key and value heads; equal to `num_heads` without grouping."""
    head_dim: int | None = None
    max_positions: int | None = None
    """Longest sequence that the model was trained for."""
    sliding_window: int | None = None
    """Tokens that attention looks back in all or some layers; None: all."""
    num_experts: int = 1
    """1: a dense model."""
    tied_embeddings: bool = False
    """Whether the output projection is the token embedding."""
    dtype: str | None = None
    """float32, float16 or bfloat16: what the checkpoint is stored in."""
    num_parameters: int | None = None
    """Numbers in all tensors, tied ones once; None: the architecture's tensors are not known here."""
    embedding_parameters: int = 0
    """Those of them in the tables of tokens and learned positions; 0 where `num_parameters` is None."""
    cache_values_per_token: int | None = None
    """Numbers that the KV cache holds for one token of one sequence, all layers together."""
    attention_bias: bool = False
    """Whether the configuration switches biases of the attention's projections on."""
    mlp_bias: bool = False
    """The same for the feed-forward network."""
    activation: str | None = None
    """Of the feed-forward network: ``silu``."""
    rope_type: str | None = None
    """How rotary positions are scaled: ``llama3``; None: they are not."""
    parallel_residual: bool = True
    """False: GPT-NeoX's layers add attention and feed-forward network one after the other."""
    norm_first: bool = True
    """False: OPT's layers normalise what they give instead of what they get (opt-350m)."""

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], checkpoint_dtype: str | None = None
    ) -> ModelFacts:
        """Facts from the content of `config.json`.

        `checkpoint_dtype` is what the weight files say, for a configuration that does not.
        """
        top, nested = config, config.get("text_config")
        config = {**config, **nested} if isinstance(nested, Mapping) else config
        sizes = Dimensions.of(config)
        # A vision tower's tensors are not counted, and a count without them would be a wrong one.
        tensors = None if isinstance(top.get("vision_config"), Mapping) else count(config, sizes)
        told = (config.get("dtype"), config.get("torch_dtype"), checkpoint_dtype)
        dtypes = (text.removeprefix("torch.") for text in told if isinstance(text, str))
        return cls(
            model_type=_text(top.get("model_type")),
            architecture=_architecture(top),
            num_layers=sizes.layers,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.intermediate,
            vocab_size=sizes.vocab,
            num_heads=sizes.heads,
            num_kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            max_positions=first_size(config, *_POSITION_KEYS),
            sliding_window=_sliding_window(config),
            num_experts=sizes.experts,
            tied_embeddings=sizes.tied,
            dtype=next((dtype for dtype in dtypes if dtype in _KNOWN_DTYPES), None),
            num_parameters=tensors.total if tensors else None,
            embedding_parameters=tensors.embedding if tensors else 0,
            cache_values_per_token=_cache_values(sizes),
            attention_bias=config.get("attention_bias") is True,
            mlp_bias=config.get("mlp_bias") is True,
            activation=_text(config.get("hidden_act", config.get("activation_function"))),
            rope_type=_rope_type(config),
            parallel_residual=config.get("use_parallel_residual") is not False,
            norm_first=config.get("do_layer_norm_before") is not False,
        )


def _cache_values(sizes: Dimensions) -> int | None:
    if sizes.layers is None or sizes.kv_heads is None or sizes.head_dim is None:
        return None
    return 2 * sizes.layers * sizes.kv_heads * sizes.head_dim


def _sliding_window(config: Mapping[str, Any]) -> int | None:
    # Qwen2's configurations carry the size of a window that they do not use.
    return (
        None if config.get("use_sliding_window") is False else first_size(config, "sliding_window")
    )


def _rope_type(config: Mapping[str, Any]) -> str | None:
    # transformers 5 writes rope_parameters.
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, Mapping):
        return None
    kind = _text(scaling.get("rope_type", scaling.get("type")))
    return None if kind == "default" else kind


def _architecture(config: Mapping[str, Any]) -> str | None:
    listed = config.get("architectures")
    return _text(listed[0]) if isinstance(listed, list) and listed else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
