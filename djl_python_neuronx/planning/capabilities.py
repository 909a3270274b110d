"""What transformers-neuronx supports of each architecture, and what it computes wrong.

Source: transformers-neuronx 0.13 (`<architecture>/model.py`, `config.py`, `hlo.py`, `decoder.py`, `layers/`), read and
run on a CPU. "Verified" means compared with Hugging Face's logits: tiny models with random weights on an emulated
device. The same of NxD Inference is in nxdi/capabilities.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning.model import ModelFacts

_NOTHING: Final[Mapping[str, str]] = {}
_LOADER = ("model_loader",)


@dataclass(frozen=True)
class Defect:
    """Something that a library computes wrong, or stops at, with some options or models."""

    problem: str
    applies: Callable[[ServingOptions, ModelFacts], object]
    """Whether it matters with these options, which are filled in, and this model."""
    names: tuple[str, ...] = _LOADER
    """Options that decide whether it matters; `model_loader`: the model alone decides."""
    fix: str = ""
    backends: tuple[str, ...] = ()
    """Backends without the defect."""
    stops: bool = False
    """The library fails. Otherwise its answers are wrong."""


@dataclass(frozen=True)
class Capability:
    """What a library supports of one architecture."""

    continuous_batching: bool = True
    """Sequences join and leave at any step. False: static batches, with a second prefill of all when one joins."""
    pads_heads: bool = True
    """Heads that the tensor parallel degree does not divide are padded. False: it must divide them."""
    context_buckets: bool = True
    """Several prompt lengths are compiled. False: a prompt runs token by token."""
    token_buckets: bool = True
    """Several sequence lengths are compiled for decode graphs."""
    prompt_batch_size: bool = False
    """The constructor takes the rows of a prefill apart from those of a decode."""
    speculation: bool = True
    """The model can verify the tokens that a draft model proposes."""
    degree_divides: tuple[str, ...] = ()
    """Sizes, as fields of `ModelFacts`, that the tensor parallel degree must divide."""
    whole_experts: bool = False
    """A core gets whole experts, or a group of cores shares one: the numbers must divide."""
    window_cache: bool = False
    """The KV cache is only as long as the sliding window."""
    verified: bool = True
    """Compared with Hugging Face's logits. False: only its source was read."""
    ignored_options: frozenset[str] = frozenset()
    """Options that the library has, and the code of this architecture ignores or fails on. They are not passed."""
    unsupported_options: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    """Option to the reason why the library stops at it."""
    bsh_collectives: str = ""
    """Why `collectives_layout=BSH` needs `attention_layout=BSH`; empty: it does not."""
    defects: tuple[Defect, ...] = ()

    def supports(self, name: str) -> bool:
        """Return whether an option of the library takes effect."""
        return name not in self.ignored_options and name not in self.unsupported_options


def _shard_over_batch(options: ServingOptions, model: ModelFacts) -> bool:
    degree = options.tensor_parallel_degree
    return (
        options.group_query_attention == "shard-over-batch"
        and model.num_heads != model.num_kv_heads
        and isinstance(degree, int)
        and degree > 1
        and (options.max_rolling_batch_size or 1) % degree == 0
    )


def _prompts_beyond_window(options: ServingOptions, model: ModelFacts) -> bool:
    limit = options.max_model_len or 0
    longest = (options.context_length_estimate or (limit,))[-1]
    if not options.continuous_batching and (options.max_rolling_batch_size or 1) > 1:
        longest = limit  # static batches are prefilled again at any length
    return model.sliding_window is not None and longest > model.sliding_window


def sequences_beyond_window(options: ServingOptions, model: ModelFacts) -> bool:
    """Return whether sequences can be longer than the model's sliding window."""
    return model.sliding_window is not None and (options.max_model_len or 0) > model.sliding_window


def _other_head_size(model: ModelFacts) -> bool:
    hidden, heads, size = model.hidden_size, model.num_heads, model.head_dim
    return bool(hidden and heads and size) and size != (hidden or 0) // (heads or 1)


def _config_defect(
    applies: Callable[[ModelFacts], object], problem: str, *backends: str, stops: bool = False
) -> Defect:
    """A value of `config.json` that the library cannot compute; `backends` can."""
    return Defect(problem, lambda _options, model: applies(model), backends=backends, stops=stops)


_NXDI, _CPU = ("nxdi", "cpu"), ("cpu",)
_ODD_HEADS = _config_defect(
    _other_head_size,
    "transformers-neuronx takes heads of hidden_size / num_attention_heads, which config.json's head_dim is not",
    *_NXDI,
    stops=True,
)
_OTHER_ACTIVATION = _config_defect(
    lambda model: model.activation not in {None, "silu", "swish"},
    "transformers-neuronx computes silu, whatever hidden_act in config.json is",
    *_NXDI,
)
_SCALED_POSITIONS = _config_defect(
    lambda model: model.rope_type is not None,
    "transformers-neuronx ignores rope_scaling in config.json",
    *_CPU,
)
_LLAMA_DEFECTS = (
    _config_defect(
        lambda model: model.attention_bias,
        "transformers-neuronx drops the biases that attention_bias=true in config.json stands for",
        *_NXDI,
    ),
    _config_defect(
        lambda model: model.mlp_bias,
        "transformers-neuronx drops the biases that mlp_bias=true in config.json stands for",
        *_NXDI,
    ),
    _OTHER_ACTIVATION,
    _ODD_HEADS,
    _config_defect(
        lambda model: model.rope_type not in {None, "llama3"},
        "transformers-neuronx scales positions like llama3 or not at all, and config.json has another rope_scaling",
        *_CPU,
        stops=True,
    ),
)
_MISTRAL_DEFECTS = (_ODD_HEADS, _OTHER_ACTIVATION, _SCALED_POSITIONS)
_GROUP_DEFECTS = (
    Defect(
        "transformers-neuronx cuts the KV cache's values off to whole numbers, without a scale",
        lambda options, _model: options.kv_cache_quantize == "int8",
        ("kv_cache_quantize",),
        "set kv_cache_quantize=fp8, or leave it out",
    ),
    Defect(
        "transformers-neuronx mixes up the rows that a prefill graph has written to the divided cache",
        _shard_over_batch,
        ("group_query_attention",),
        "set replicated-heads, or leave it out",
    ),
)
_WINDOW_PREFILL = Defect(
    "transformers-neuronx lets a prompt look back one token more than the model's window",
    _prompts_beyond_window,
    ("n_positions", "context_length_estimate"),
    "set context_length_estimate, for static batches n_positions, to the window at most",
)


def window_ignored(library: str) -> Defect:
    """The defect that a library ignores the model's sliding window."""
    return Defect(
        f"{library} attends to all tokens, beyond the model's window",
        sequences_beyond_window,
        ("n_positions",),
        "set n_positions to the window at most",
    )


# These two sets are facts of the architectures' code, not of the options, so they stand here and not on the markers.
# What only llama's code reads, of the options that transformers-neuronx has. Blocks of the cache and prompts in chunks:
# seen right with llamas of all kinds of heads; a mistral fails while its graph is traced, which has no mask for them.
_LLAMA_ONLY = frozenset(
    {
        "attn_output_transposed",
        "duplicate_q_weight_sos",
        "enable_chunked_prefill",
        "fuse_mlp",
        "fused_rmsnorm_mlp",
        "fused_rmsnorm_qkv",
        "is_block_kv_layout",
        "mlp_out_weight_transpose",
        "multi_node",
        "sequence_parallel",
        "sequence_parallel_norm_threshold",
        "shard_over_sequence",
    }
)
# gptj and gpt_neox predate the shared decoder: their code reads the degree, the dtype and hardly anything else.
_DECODER = frozenset(
    {
        "attention_layout",
        "bf16_rms_norm",
        "cache_layout",
        "collectives_layout",
        "fuse_qkv",
        "group_query_attention",
        "kv_cache_quantize",
        "on_device_embedding",
        "on_device_generation",
        "qkv_tiling",
        "weight_tiling",
    }
)
_WITHOUT_GROUPS = _LLAMA_ONLY | {"bf16_rms_norm", "group_query_attention"}
_NO_CACHE = {"kv_cache_quantize": "transformers-neuronx stores its KV cache in dtype only"}
_NO_WEIGHTS = {"quantize": "transformers-neuronx has no quantised weights for it"}
# Seen on the real library: gpt2, opt and bloom answer with other tokens, whatever the degree.
_COLLECTIVES = (
    "transformers-neuronx computes wrong values with BSH collectives in another attention layout"
)
_NO_MOE_WEIGHTS = {
    "quantize": "transformers-neuronx fails to build its experts from quantised weights",
    "attention_layout": "transformers-neuronx has no BSH layout for experts",
}

_GPT2 = Capability(
    continuous_batching=False,
    token_buckets=False,
    prompt_batch_size=True,
    # The library has it for one sequence at a time, in static batches only.
    speculation=False,
    ignored_options=_WITHOUT_GROUPS,
    unsupported_options=_NO_CACHE,
    bsh_collectives=_COLLECTIVES,
)
_GPT_NEOX = Capability(
    continuous_batching=False,
    pads_heads=False,
    context_buckets=False,
    token_buckets=False,
    speculation=False,
    degree_divides=("intermediate_size",),
    ignored_options=_LLAMA_ONLY | _DECODER | {"unroll"},
    unsupported_options=_NO_WEIGHTS,
    defects=(
        _config_defect(
            lambda model: not model.parallel_residual,
            "transformers-neuronx has no use_parallel_residual=false, which config.json has",
            *_CPU,
            stops=True,
        ),
    ),
)

TNX: Final[Mapping[str, Capability]] = {
    "bloom": Capability(
        continuous_batching=False,
        speculation=False,
        ignored_options=_WITHOUT_GROUPS,
        unsupported_options=_NO_CACHE,
        bsh_collectives=_COLLECTIVES,
    ),
    "gpt2": _GPT2,
    "gpt_bigcode": replace(
        _GPT2,
        ignored_options=_GPT2.ignored_options | {"fuse_qkv", "qkv_tiling"},
        unsupported_options={
            **_NO_CACHE,
            "attention_layout": "transformers-neuronx has no BSH layout for it",
            "collectives_layout": _COLLECTIVES,
        },
    ),
    "gpt_neox": _GPT_NEOX,
    "gptj": replace(_GPT_NEOX, defects=()),
    "llama": Capability(defects=(*_GROUP_DEFECTS, *_LLAMA_DEFECTS)),
    "mistral": Capability(
        speculation=False,
        ignored_options=_LLAMA_ONLY,
        defects=(*_GROUP_DEFECTS, _WINDOW_PREFILL, *_MISTRAL_DEFECTS),
    ),
    "mixtral": Capability(
        speculation=False,
        whole_experts=True,
        ignored_options=_LLAMA_ONLY | {"weight_tiling"},
        unsupported_options=_NO_MOE_WEIGHTS,
        defects=(*_GROUP_DEFECTS, window_ignored("transformers-neuronx"), *_MISTRAL_DEFECTS),
    ),
    "opt": Capability(
        continuous_batching=False,
        speculation=False,
        ignored_options=_WITHOUT_GROUPS,
        unsupported_options={
            **_NO_CACHE,
            "attention_layout": "transformers-neuronx has no BSH layout for it",
            "collectives_layout": _COLLECTIVES,
        },
        defects=(
            _config_defect(
                lambda model: not model.norm_first,
                "transformers-neuronx has no do_layer_norm_before=false, which config.json has",
                *_CPU,
                stops=True,
            ),
        ),
    ),
}
"""Architectures of transformers-neuronx, by `model_type`."""
