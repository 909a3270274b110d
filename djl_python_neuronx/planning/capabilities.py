"""What each Neuron library can do with each architecture: pure data, read in its source and seen on a CPU.

Sources: transformers-neuronx 0.13 (`<architecture>/model.py`, `decoder.py`, `layers/`) and
neuronx-distributed-inference 0.9.0 (`utils/constants.py`: MODEL_TYPES, and `models/*/modeling_*.py`). "Seen" means
compared with Hugging Face's logits, tiny models with random weights on an emulated device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

_NOTHING: Mapping[str, str] = MappingProxyType({})

LIBRARIES: Mapping[str, str] = MappingProxyType(
    {"tnx": "transformers-neuronx", "nxdi": "NxD Inference"}
)
"""Loader to the library that it drives."""

GPTJ_DECODE = "gptj-decode"
INT8_CACHE = "int8-kv-cache"
SHARD_OVER_BATCH = "shard-over-batch"
WINDOW_IGNORED = "sliding-window-ignored"
WINDOW_PREFILL = "sliding-window-prefill"


@dataclass(frozen=True)
class Capability:
    """What a library does with one architecture."""

    continuous_batching: bool = True
    """Sequences join and leave at any step. False: static batches, everyone encoded anew when one joins."""
    static_batching: bool = True
    """Several sequences that start together."""
    pads_heads: bool = True
    """Heads that the tensor parallel degree does not divide are padded. False: it has to divide them."""
    context_buckets: bool = True
    """Takes prompt lengths to compile for. False: a prompt runs token by token."""
    token_buckets: bool = True
    """Takes several sequence lengths to compile decode graphs for."""
    prompt_batch_size: bool = False
    """The constructor takes the rows of a prefill apart from those of a decode."""
    attention_bsh: bool = True
    """attention_layout=BSH works."""
    on_device_greedy: bool = True
    on_device_sampling: bool = True
    """Each row's own top_k, top_p and temperature on the device."""
    int8: bool = True
    """int8 weights."""
    speculation: bool = True
    """A draft model proposes tokens that this one verifies."""
    divides: tuple[str, ...] = ()
    """Sizes, as fields of `ModelFacts`, that the tensor parallel degree has to divide."""
    experts_apart: bool = False
    """Whole experts go to groups of cores, or groups of whole experts to a core: the numbers have to divide."""
    window_cache: bool = False
    """The KV cache has as many rows as the sliding window."""
    text_only: bool = True
    """False: the library's class takes images beside text; its text side alone is served."""
    verified: bool = True
    """Seen to give the right tokens. False: only read in the library's source."""
    unread: frozenset[str] = frozenset()
    """Options that other architectures of the library honour and this one's code cannot use: it never looks at them,
    or fails. They are not handed over."""
    refused: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    """Option to why the library stops at it."""
    collectives_follow: str = ""
    """Why `collectives_layout=BSH` needs `attention_layout=BSH`; empty: it does not."""
    defects: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    """Name of what is wrong upstream to what goes wrong; `suitability` knows when it does."""


_INT8_CACHE = {
    INT8_CACHE: "transformers-neuronx cuts the KV cache's values off to whole numbers, without a scale"
}
_ROWS_MIXED = {
    SHARD_OVER_BATCH: "transformers-neuronx mixes the rows up that a prompt graph has written to the divided cache"
}
_OF_GROUPS = {**_INT8_CACHE, **_ROWS_MIXED}

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
    unread=_WITHOUT_GROUPS,
    refused=_NO_CACHE,
    collectives_follow=_COLLECTIVES,
)
_GPT_NEOX = Capability(
    continuous_batching=False,
    pads_heads=False,
    context_buckets=False,
    token_buckets=False,
    attention_bsh=False,
    on_device_greedy=False,
    on_device_sampling=False,
    int8=False,
    speculation=False,
    unread=_LLAMA_ONLY | _DECODER | {"unroll"},
    refused=_NO_WEIGHTS,
)

TNX: Mapping[str, Capability] = MappingProxyType(
    {
        "bloom": Capability(
            continuous_batching=False,
            speculation=False,
            unread=_WITHOUT_GROUPS,
            refused=_NO_CACHE,
            collectives_follow=_COLLECTIVES,
        ),
        "gpt2": _GPT2,
        "gpt_neox": _GPT_NEOX,
        "gptj": Capability(
            continuous_batching=False,
            pads_heads=False,
            context_buckets=False,
            token_buckets=False,
            attention_bsh=False,
            on_device_greedy=False,
            on_device_sampling=False,
            int8=False,
            speculation=False,
            unread=_LLAMA_ONLY | _DECODER,
            refused=_NO_WEIGHTS,
            defects={
                GPTJ_DECODE: "transformers-neuronx lets each token of a GPT-J see no other than the first"
            },
        ),
        "llama": Capability(defects=_OF_GROUPS),
        "mistral": Capability(
            speculation=False,
            unread=_LLAMA_ONLY,
            defects={
                **_OF_GROUPS,
                WINDOW_PREFILL: "transformers-neuronx lets a prompt look back one token more than the model's window",
            },
        ),
        "mixtral": Capability(
            attention_bsh=False,
            int8=False,
            speculation=False,
            experts_apart=True,
            unread=_LLAMA_ONLY | {"weight_tiling"},
            refused=_NO_MOE_WEIGHTS,
            defects={
                **_OF_GROUPS,
                WINDOW_IGNORED: "transformers-neuronx attends to all tokens, beyond the model's window",
            },
        ),
        "opt": Capability(
            continuous_batching=False,
            attention_bsh=False,
            speculation=False,
            unread=_WITHOUT_GROUPS,
            refused={
                **_NO_CACHE,
                "attention_layout": "transformers-neuronx has no BSH layout for it",
                "collectives_layout": _COLLECTIVES,
            },
        ),
    }
)
"""Architectures of transformers-neuronx, by `model_type`."""

TNX_UNREADABLE: Mapping[str, str] = MappingProxyType(
    {
        "gpt_bigcode": "gpt2's class, which would be its own, expects the projections transposed, as gpt2's "
        "checkpoints have them, and stops while it builds its graphs"
    }
)
"""Architectures that transformers-neuronx computes and whose checkpoints it cannot read, to the reason. Seen."""

_NO_WINDOW = {WINDOW_IGNORED: "NxD Inference attends to all tokens, beyond the model's window"}
_IMAGES = "NxD Inference does not have it for models with images"
_NOT_WITH_IMAGES = dict.fromkeys(
    ("enable_prefix_caching", "is_block_kv_layout", "is_medusa", "speculative_draft_model"), _IMAGES
)
# Only the others divide cores among KV heads for flash decoding (num_cores_per_group).
_NO_FLASH_DECODING = frozenset({"shard_over_sequence"})
# Its layers of experts are built of parallel linear layers and an embedding that pad nothing.
_OF_EXPERTS = ("hidden_size", "intermediate_size", "vocab_size")


def _with_images(
    refused: Mapping[str, str] = _NOTHING,
    unread: frozenset[str] = frozenset(),
    *,
    pads_heads: bool = True,
) -> Capability:
    return Capability(
        pads_heads=pads_heads,
        speculation=False,
        text_only=False,
        verified=False,
        unread=unread,
        refused=MappingProxyType({**_NOT_WITH_IMAGES, **refused}),
    )


NXDI: Mapping[str, Capability] = MappingProxyType(
    {
        "dbrx": Capability(verified=False, divides=_OF_EXPERTS, unread=_NO_FLASH_DECODING),
        "gemma3": Capability(verified=False, divides=("hidden_size",), unread=_NO_FLASH_DECODING),
        "gpt_oss": Capability(verified=False),
        "llama": Capability(),
        "llama4": _with_images(),
        "mistral": Capability(window_cache=True, unread=_NO_FLASH_DECODING),
        "mixtral": Capability(divides=_OF_EXPERTS, unread=_NO_FLASH_DECODING, defects=_NO_WINDOW),
        # Its cross attention asserts that the degree divides query and KV heads.
        "mllama": _with_images(pads_heads=False),
        "pixtral": _with_images(),
        "qwen2": Capability(unread=_NO_FLASH_DECODING, defects=_NO_WINDOW),
        "qwen2_vl": _with_images(unread=_NO_FLASH_DECODING),
        "qwen3": Capability(unread=_NO_FLASH_DECODING, defects=_NO_WINDOW),
        "qwen3_moe": Capability(
            verified=False, divides=_OF_EXPERTS, unread=_NO_FLASH_DECODING, defects=_NO_WINDOW
        ),
        "qwen3_vl": _with_images(dict.fromkeys(("attention_dp_degree", "cp_degree"), _IMAGES)),
    }
)
"""Architectures of NxD Inference, by `model_type`; others live in its contributed models, outside the wheel."""

CAPABILITIES: Mapping[str, Mapping[str, Capability]] = MappingProxyType({"tnx": TNX, "nxdi": NXDI})
"""Loader to `model_type` to what the library can do; the cpu loader takes every causal model of transformers."""


def capability_of(loader: str, model_type: str | None) -> Capability | None:
    """What the library of a loader can do with an architecture; None: it is not known, or the loader has no library."""
    return CAPABILITIES.get(loader, {}).get(model_type or "")
