"""Model sizes and limits read from `config.json`, under the names of every architecture, and parameter counts.

Source of the parameter counts: the modelling code of transformers 5.23, which tests/planning/test_parameters.py builds
and compares with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple

from djl_python_neuronx.config.values import shortened
from djl_python_neuronx.errors import ArtifactError

_POSITION_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len")
_MISTRAL_WINDOW = 4096
"""Of a configuration that does not mention it; null means that there is none."""
_KNOWN_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class ModelFacts:
    """Sizes and limits of a model; None if its configuration does not contain one."""

    model_type: str | None = None
    """`model_type` of `config.json`, such as ``llama``."""
    architecture: str | None = None
    """Model class of the checkpoint, such as ``LlamaForCausalLM``."""
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
    """Longest sequence that the model supports, in tokens."""
    sliding_window: int | None = None
    """Tokens that attention covers in all or some layers; None: all tokens."""
    num_experts: int = 1
    """1: a dense model."""
    tied_embeddings: bool = False
    """True if the output projection is the token embedding."""
    dtype: str | None = None
    """Type of the stored weights: float32, float16 or bfloat16."""
    num_parameters: int | None = None
    """Parameter count, tied tensors once; None for an unknown architecture."""
    embedding_parameters: int = 0
    """Parameters of the token and position embeddings; 0 if `num_parameters` is None."""
    cache_values_per_token: int | None = None
    """Numbers in the KV cache for one token of one sequence, over all layers."""
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """Content of `config.json`; of a model with images, that of its text model above its own."""

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], checkpoint_dtype: str | None = None
    ) -> ModelFacts:
        """Read the facts from the content of `config.json`.

        `checkpoint_dtype`: type of the weight files, used if the configuration has none.

        Raises:
            ArtifactError: see `Dimensions.of`.
        """
        top, nested = config, config.get("text_config")
        config = {**config, **nested} if isinstance(nested, Mapping) else config
        sizes = Dimensions.of(config)
        # A vision tower's tensors are not counted, and a count without them would be a wrong one.
        tensors = None if isinstance(top.get("vision_config"), Mapping) else count(config, sizes)
        texts = (config.get("dtype"), config.get("torch_dtype"), checkpoint_dtype)
        dtypes = (text.removeprefix("torch.") for text in texts if isinstance(text, str))
        return cls(
            model_type=_text(top.get("model_type")),
            architecture=_architecture(top),
            num_layers=sizes.layers or None,
            hidden_size=sizes.hidden or None,
            intermediate_size=sizes.intermediate or None,
            vocab_size=sizes.vocab or None,
            num_heads=sizes.heads or None,
            num_kv_heads=sizes.kv_heads or None,
            head_dim=sizes.head_dim or None,
            max_positions=first_size(config, *_POSITION_KEYS),
            sliding_window=_sliding_window(config),
            num_experts=sizes.experts,
            tied_embeddings=sizes.tied,
            dtype=next((dtype for dtype in dtypes if dtype in _KNOWN_DTYPES), None),
            num_parameters=tensors.total if tensors else None,
            embedding_parameters=tensors.embedding if tensors else 0,
            # Keys and values.
            cache_values_per_token=2 * sizes.layers * sizes.keys or None,
            config=config,
        )

    def estimated(self) -> ModelFacts:
        """Return the facts with a parameter count for any architecture: of layers like llama's, or with experts.

        It is what the sizes of config.json give, and too much where a network has no gate.
        """
        sizes = Dimensions.of(self.config)
        sizes = replace(sizes, intermediate=sizes.intermediate or 4 * sizes.hidden)
        if self.num_parameters or not (sizes.layers and sizes.table and sizes.head_dim):
            return self
        network = _gated(sizes, sizes.intermediate) if sizes.experts == 1 else _experts(sizes)
        tensors = _rms_normed(sizes, _attention(sizes), network)
        return replace(self, num_parameters=tensors.total, embedding_parameters=tensors.embedding)

    def missing_sizes(self) -> list[str]:
        """Return the names of sizes without which the libraries would make a known architecture's usual large model."""
        sizes = {
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "num_attention_heads": self.num_heads,
        }
        return [name for name, size in sizes.items() if not size and self.model_type in _COUNTERS]


def _sliding_window(config: Mapping[str, Any]) -> int | None:
    kind = model_type(config)
    if kind == "mistral":
        return first_size({"sliding_window": _MISTRAL_WINDOW, **config}, "sliding_window")
    # Qwen2's configurations carry the size of a window that they do not use.
    unused = kind != "mixtral" and config.get("use_sliding_window") is False
    return None if unused else first_size(config, "sliding_window")


def _architecture(config: Mapping[str, Any]) -> str | None:
    listed = config.get("architectures")
    return _text(listed[0]) if isinstance(listed, list) and listed else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


_DEFAULT_HEAD_DIMS = {
    "gemma": 256,
    "gemma2": 256,
    "gemma3_text": 256,
    "gpt_oss": 64,
    "qwen3": 128,
}
_TIED_BY_DEFAULT = frozenset(
    ("bloom", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "gpt_bigcode", "opt")
)
_FOUR_TIMES_WIDE = frozenset(("bloom", "gpt2", "gpt_bigcode", "gptj"))
"""Architectures whose feed-forward network is by default four times the hidden size."""


def first_size(config: Mapping[str, Any], *keys: str) -> int | None:
    """Return the first positive integer among the values of `keys`, or None."""
    values = (config.get(key) for key in keys)
    return next((value for value in values if type(value) is int and 0 < value < 2**63), None)


def model_type(config: Mapping[str, Any]) -> str:
    """Return `model_type` of `config.json`; empty if it has none."""
    return _text(config.get("model_type")) or ""


def _dimension(config: Mapping[str, Any], *keys: str) -> int | None:
    """`first_size`, for sizes that a known architecture has as positive integers or not at all.

    Raises:
        ArtifactError: a value is something else.
    """
    is_known = model_type(config) in _COUNTERS
    given = [key for key in keys if is_known and config.get(key) is not None]
    if wrong := [key for key in given if not first_size(config, key)]:
        msg = f"config.json gives {wrong[0]} {shortened(config[wrong[0]])!r}; expected an integer above 0. Correct it."
        raise ArtifactError(msg)
    return first_size(config, *keys)


@dataclass(frozen=True)
class Dimensions:
    """Sizes of a model's tensors; 0 if the configuration does not contain one."""

    layers: int
    hidden: int
    intermediate: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    tied: bool

    @property
    def table(self) -> int:
        """Numbers of the token embedding."""
        return self.vocab * self.hidden

    @property
    def head(self) -> int:
        """Numbers of the output projection; 0 if it is the token embedding."""
        return 0 if self.tied else self.table

    @property
    def query(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Dimensions:
        """Read the sizes from the content of `config.json`, under the names of every architecture.

        Raises:
            ArtifactError: of a known architecture one is no positive integer.
        """
        kind = model_type(config)
        attention, experts = _part(config, "attn_config"), _part(config, "ffn_config")
        hidden = _dimension(config, "n_embed", "hidden_size", "n_embd", "d_model")
        names = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
        heads = _dimension(config, *names)
        head_dim = _dimension(config, "head_dim") or _DEFAULT_HEAD_DIMS.get(kind)
        if head_dim is None and hidden and heads:
            head_dim = hidden // heads
        intermediate = _dimension(config, "intermediate_size", "ffn_dim", "n_inner")
        intermediate = intermediate or first_size(experts, "ffn_hidden_size")
        if intermediate is None and hidden and kind in _FOUR_TIMES_WIDE:
            intermediate = 4 * hidden
        num_experts = first_size(config, "num_local_experts", "num_experts")
        if num_experts and kind == "qwen3_moe":
            intermediate = first_size(config, "moe_intermediate_size") or intermediate
        return cls(
            layers=_dimension(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
            or 0,
            hidden=hidden or 0,
            intermediate=intermediate or 0,
            vocab=_dimension(config, "vocab_size") or 0,
            heads=heads or 0,
            kv_heads=_kv_heads(config, attention, heads) or 0,
            head_dim=head_dim or 0,
            experts=num_experts or first_size(experts, "moe_num_experts") or 1,
            tied=_flag(config, "tie_word_embeddings", kind in _TIED_BY_DEFAULT),
        )


class Tensors(NamedTuple):
    """Parameter counts of a model by the place of the tensors."""

    embedding: int
    """Token and learned position embeddings."""
    layers: int
    """All layers and the tensors around them, norms included."""
    head: int
    """Output projection; 0 if it is the token embedding."""

    @property
    def total(self) -> int:
        """The parameter count of the model, tied tensors once."""
        return self.embedding + self.layers + self.head


def count(config: Mapping[str, Any], sizes: Dimensions) -> Tensors | None:
    """Count the parameters. Returns None for an unknown architecture or a missing size."""
    counter = _COUNTERS.get(model_type(config))
    known = all(size for name, size in vars(sizes).items() if name != "tied")
    return counter(config, sizes) if counter and known else None


def _kv_heads(
    config: Mapping[str, Any], attention: Mapping[str, Any], heads: int | None
) -> int | None:
    kind = model_type(config)
    if kind == "falcon" and config.get("new_decoder_architecture") is True:
        return _dimension(config, "num_kv_heads") or heads
    if heads and _flag(config, "multi_query", kind in {"gpt_bigcode", "falcon"}):
        return 1
    if kind == "dbrx":
        return first_size(attention, "kv_n_heads") or (1 if heads else None)
    return _dimension(config, "num_key_value_heads") or heads


def _attention(sizes: Dimensions, *, qkv_bias: bool = False, out_bias: bool = False) -> int:
    projections = sizes.hidden * (2 * sizes.query + 2 * sizes.keys)
    biases = qkv_bias * (sizes.query + 2 * sizes.keys) + out_bias * sizes.hidden
    return projections + biases


def _attention_of(config: Mapping[str, Any], sizes: Dimensions, *, default: bool = False) -> int:
    """Count attention with a bias on every projection or on none, by `attention_bias`."""
    biased = _flag(config, "attention_bias", default)
    return _attention(sizes, qkv_bias=biased, out_bias=biased)


def _gated(sizes: Dimensions, intermediate: int, *, bias: bool = False) -> int:
    """Count a feed-forward network with a gate: three matrices."""
    biases = bias * (2 * intermediate + sizes.hidden)
    return 3 * sizes.hidden * intermediate + biases


def _plain(sizes: Dimensions, *, bias: bool = True) -> int:
    """Count a feed-forward network without a gate: two matrices."""
    biases = bias * (sizes.intermediate + sizes.hidden)
    return 2 * sizes.hidden * sizes.intermediate + biases


def _rms_normed(sizes: Dimensions, attention: int, network: int, norms: int = 2) -> Tensors:
    """Count a decoder of equal layers with RMS norms, one of them at the end."""
    layer = attention + network + norms * sizes.hidden
    return Tensors(sizes.table, sizes.layers * layer + sizes.hidden, sizes.head)


def _llama(config: Mapping[str, Any], sizes: Dimensions, norms: int = 2) -> Tensors:
    network = _gated(sizes, sizes.intermediate, bias=_flag(config, "mlp_bias", default=False))
    return _rms_normed(sizes, _attention_of(config, sizes), network, norms)


def _unbiased(_config: Mapping[str, Any], sizes: Dimensions) -> Tensors:
    """Count Mistral, and Phi-3, whose fused projections are the same matrices."""
    return _rms_normed(sizes, _attention(sizes), _gated(sizes, sizes.intermediate))


def _experts(sizes: Dimensions, *, bias: bool = False) -> int:
    router = (sizes.hidden + bias) * sizes.experts
    return router + sizes.experts * _gated(sizes, sizes.intermediate, bias=bias)


def _mixtral(_config: Mapping[str, Any], sizes: Dimensions) -> Tensors:
    return _rms_normed(sizes, _attention(sizes), _experts(sizes))


def _gpt_oss(config: Mapping[str, Any], sizes: Dimensions) -> Tensors:
    sinks = sizes.heads
    attention = _attention_of(config, sizes, default=True) + sinks
    return _rms_normed(sizes, attention, _experts(sizes, bias=True))


def _qwen2(_config: Mapping[str, Any], sizes: Dimensions) -> Tensors:
    return _rms_normed(sizes, _attention(sizes, qkv_bias=True), _gated(sizes, sizes.intermediate))


def _qwen3_attention(config: Mapping[str, Any], sizes: Dimensions) -> int:
    # One norm for the queries' heads and one for the keys'.
    return _attention_of(config, sizes) + 2 * sizes.head_dim


def _qwen3(config: Mapping[str, Any], sizes: Dimensions, norms: int = 2) -> Tensors:
    attention = _qwen3_attention(config, sizes)
    return _rms_normed(sizes, attention, _gated(sizes, sizes.intermediate), norms)


def _qwen3_moe(config: Mapping[str, Any], sizes: Dimensions) -> Tensors | None:
    dense = config.get("mlp_only_layers") or []
    step = first_size(config, "decoder_sparse_step") or 1
    width = first_size(config, "intermediate_size")
    if not isinstance(dense, list) or width is None:
        return None
    if step == 1:
        sparse = sizes.layers - len({n for n in dense if type(n) is int and 0 <= n < sizes.layers})
    elif dense:
        return None  # both at once: no published model
    else:
        sparse = sizes.layers // step
    networks = sparse * _experts(sizes) + (sizes.layers - sparse) * _gated(sizes, width)
    layers = sizes.layers * (_qwen3_attention(config, sizes) + 2 * sizes.hidden)
    return Tensors(sizes.table, layers + networks + sizes.hidden, sizes.head)


def _layer_normed(sizes: Dimensions, layer: int, embedding: int, around: int = 0) -> Tensors:
    """Count a decoder of equal layers with a layer norm at the end; `around`: parameters outside the layers."""
    return Tensors(embedding, sizes.layers * layer + 2 * sizes.hidden + around, sizes.head)


def _gpt2(config: Mapping[str, Any], sizes: Dimensions) -> Tensors | None:
    positions = first_size(config, "n_positions", "max_position_embeddings")
    if positions is None:
        return None
    attention = _attention(sizes, qkv_bias=True, out_bias=True)
    layer = attention + _plain(sizes) + 4 * sizes.hidden
    return _layer_normed(sizes, layer, sizes.table + positions * sizes.hidden)


def _gptj(_config: Mapping[str, Any], sizes: Dimensions) -> Tensors:
    layer = _attention(sizes) + _plain(sizes) + 2 * sizes.hidden
    found = _layer_normed(sizes, layer, sizes.table)
    return found._replace(head=found.head + sizes.vocab)  # the only head with a bias, tied or not


def _gpt_neox(config: Mapping[str, Any], sizes: Dimensions) -> Tensors:
    attention = _attention_of(config, sizes, default=True)
    return _layer_normed(sizes, attention + _plain(sizes) + 4 * sizes.hidden, sizes.table)


def _bloom(_config: Mapping[str, Any], sizes: Dimensions) -> Tensors:
    attention = _attention(sizes, qkv_bias=True, out_bias=True)
    layer = attention + _plain(sizes) + 4 * sizes.hidden
    return _layer_normed(sizes, layer, sizes.table, around=2 * sizes.hidden)  # the embedding's norm


def _opt(config: Mapping[str, Any], sizes: Dimensions) -> Tensors | None:
    positions = first_size(config, "max_position_embeddings")
    if positions is None:
        return None
    width = first_size(config, "word_embed_proj_dim") or sizes.hidden
    biased = _flag(config, "enable_bias", default=True)
    norm = 2 * sizes.hidden if _flag(config, "layer_norm_elementwise_affine", default=True) else 0
    attention = _attention(sizes, qkv_bias=biased, out_bias=biased)
    layer = attention + _plain(sizes, bias=biased) + 2 * norm
    last = _flag(config, "do_layer_norm_before", default=True)
    last = last and not _flag(config, "_remove_final_layer_norm", default=False)
    projections = 0 if width == sizes.hidden else 2 * width * sizes.hidden
    table = sizes.vocab * width
    return Tensors(
        embedding=table + (positions + 2) * sizes.hidden,  # the table has two positions more
        layers=sizes.layers * layer + last * norm + projections,
        head=0 if sizes.tied else table,
    )


_COUNTERS: Final[Mapping[str, Callable[[Mapping[str, Any], Dimensions], Tensors | None]]] = {
    "bloom": _bloom,
    "dbrx": _mixtral,
    "gemma": _llama,
    "gemma2": partial(_llama, norms=4),
    "gemma3_text": partial(_qwen3, norms=4),
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt2,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "gptj": _gptj,
    "llama": _llama,
    "mistral": _unbiased,
    "mixtral": _mixtral,
    "opt": _opt,
    "phi3": _unbiased,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}


def _part(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    return value if isinstance(value, bool) else default
