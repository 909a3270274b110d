"""Support of each architecture by NxD Inference, and its known wrong results.

Source: neuronx-distributed-inference 0.9.0, `utils/constants.py` (MODEL_TYPES) and `models/*/modeling_*.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from djl_python_neuronx.planning.capabilities import (
    Capability,
    Defect,
    sequences_beyond_window,
    window_ignored,
)
from djl_python_neuronx.planning.fields import ROTARY, rope_type
from djl_python_neuronx.planning.nxdi.fields import NXDI_FIELDS

# Source: neuronx-distributed 0.18, quantization/quantization_layers.py, set_bias_to_state_dict.
QUANTISED_BIASES = "NxD Inference fails to load the biases of projections in 8 bits"
_WINDOW_IGNORED = window_ignored("NxD Inference")
# Source: models/model_wrapper.py: it casts the buffers of transformers' rotary classes too, and has its own for others.
_YARN_ROUNDED = Defect(
    "NxD Inference rounds the frequencies of positions that are scaled as yarn to dtype",
    lambda options, model: (
        options.dtype != "float32"
        and "yarn" in (rope_type(model.config.get(name)) for name in ROTARY)
    ),
    ("dtype",),
    "set dtype=float32",
    backends=("cpu",),
)
# Source: models/model_base.py, modules/generation/sampling.py (mask_padded_logits) and NxD's ColumnParallelLinear: the
# padding is masked after it has been cut off already, so real tokens are. Logits that are not gathered are right.
LAST_TOKENS = Defect(
    "NxD Inference never gives the last tokens of a vocabulary that tensor_parallel_degree does not divide, where the "
    "host samples",
    lambda options, model: (
        options.on_device_generation is None
        and isinstance(options.tensor_parallel_degree, int)
        and (model.vocab_size or 0) % options.tensor_parallel_degree
    ),
    ("tensor_parallel_degree",),
    "set on_device_generation=true, and output_logits=true for requests that the host has to sample, or a degree that "
    "divides the vocabulary",
)
# Source: models/llama/modeling_llama.py, NeuronLlamaMLP, which mistral, qwen2 and qwen3 take too.
_MLP_KERNEL = Defect(
    "the MLP kernel of NxD Inference has no biases, and takes other activations than gelu_pytorch_tanh for silu",
    lambda options, model: (
        options.fused_rmsnorm_mlp
        and (
            model.config.get("mlp_bias")
            or model.config.get("hidden_act", "silu") not in {"silu", "swish", "gelu_pytorch_tanh"}
        )
    ),
    ("fused_rmsnorm_mlp",),
    "leave it out",
)
# Source: models/model_base.py: the cache of groups gets no window, and what the layers write there is a ring.
_NO_RING_OF_GROUPS = Defect(
    "NxD Inference gives groups of cores no cache for the model's window",
    lambda options, model: (
        (options.attention_dp_degree or 1) > 1 and sequences_beyond_window(options, model)
    ),
    ("attention_dp_degree", "n_positions"),
    "leave attention_dp_degree out, or set n_positions to the window at most",
)
# Only llama divides cores among KV heads for flash decoding (num_cores_per_group), and the cache of their keys.
_NO_FLASH_DECODING = frozenset({"shard_over_sequence"})
# Only llama's layer reads these too.
_LLAMAS = frozenset(
    {"mlp_cp_degree", "mlp_kernel_fuse_residual_add", "qkv_kernel_fuse_residual_add"}
    # Only llama's weights are multiplied by those of the norms that its kernels then skip.
    | {"fused_rmsnorm_skip_gamma"}
)
# Source: modules/attention/attention_base.py, prep_qkv_tensors: the norms of the heads come after the kernel.
_LATE_NORMS = {
    "qkv_cte_nki_kernel_fuse_rope": "NxD Inference would rotate queries and keys before their norms, not after"
}
_NOT_LLAMAS = _NO_FLASH_DECODING | _LLAMAS
# Source: models/model_base.py, process_sequence_parallel_hidden_states: the embeddings of all cores are added up with
# vocab_parallel, also those of classes that give each core all of them.
_WHOLE_EMBEDDINGS = _NOT_LLAMAS | {"vocab_parallel"}
# Of the keywords of experts the older modules/moe.py reads capacity_factor alone.
_NEW_EXPERTS = frozenset(
    {
        *("moe_tp_degree", "moe_ep_degree", "hybrid_sharding_config", "router_config"),
        *("early_expert_affinity_modulation", "disable_normalize_top_k_affinities"),
        *("use_index_calc_kernel", "moe_mask_padded_tokens", "blockwise_matmul_config"),
        *("fused_shared_experts", "shared_experts_sequence_parallel_enabled"),
        "transpose_shared_experts_weights",
    }
)
# The configuration of a dense model takes none of them, and ep_degree gives it cores that repeat the others' work.
_OF_EXPERTS = _NEW_EXPERTS | {"capacity_factor", "ep_degree"}
# Layers of experts are built of parallel linear layers and an embedding that pad nothing.
_MOE = Capability(
    degree_divides=("hidden_size", "intermediate_size", "vocab_size"),
    ignored_options=_WHOLE_EMBEDDINGS | _NEW_EXPERTS,
    unsupported_options={
        "ep_degree": "NxD Inference fails to divide its experts into groups",
        "quantize": "NxD Inference does not stack the scales of its experts",
    },
    defects=(_WINDOW_IGNORED,),
)
_DENSE = Capability(ignored_options=_WHOLE_EMBEDDINGS | _OF_EXPERTS)

_OF_EACH: Final[Mapping[str, Capability]] = {
    "dbrx": replace(_MOE, defects=()),
    # Source: modules/kvcache/gpt_oss_kv_cache_manager.py: every other layer has a ring.
    "gpt_oss": Capability(
        verified=False,
        ignored_options=_NOT_LLAMAS,
        unsupported_options={
            "async_execution": "a step ahead overwrites what the model's sliding window holds",
            "quantize": "its weights are in MXFP4 already",
        },
    ),
    "llama": Capability(
        defects=(_YARN_ROUNDED, LAST_TOKENS, _MLP_KERNEL), ignored_options=_OF_EXPERTS
    ),
    "mistral": replace(
        _DENSE,
        window_cache=True,
        # Source: modules/attention/attention_base.py: of a layer with a window the cache is transposed, not the keys.
        ignored_options=_DENSE.ignored_options | {"k_cache_transposed"},
        defects=(_NO_RING_OF_GROUPS, LAST_TOKENS, _MLP_KERNEL),
    ),
    "mixtral": replace(
        _MOE,
        # Its cores have no numbers in attention (`self_attn.rank_util.rank`): each would take the first one's part of a
        # prompt. Seen on the CPU rig.
        ignored_options=_MOE.ignored_options | {"cp_degree", "attention_dp_degree"},
        unsupported_options={
            **_MOE.unsupported_options,
            "fuse_qkv": "NxD Inference does not merge the weights of its projections",
        },
    ),
    "qwen2": replace(
        _DENSE,
        defects=(_WINDOW_IGNORED, LAST_TOKENS, _MLP_KERNEL),
        unsupported_options={"quantize": QUANTISED_BIASES},
    ),
    "qwen3": replace(
        _DENSE,
        defects=(_WINDOW_IGNORED, LAST_TOKENS, _MLP_KERNEL),
        unsupported_options=_LATE_NORMS,
    ),
    "qwen3_moe": replace(
        _MOE,
        ignored_options=_WHOLE_EMBEDDINGS,
        unsupported_options={**_LATE_NORMS, "quantize": _MOE.unsupported_options["quantize"]},
    ),
}
NXDI: Final[Mapping[str, Capability]] = {
    # Source: modules/attention/gqa.py: of uneven KV heads it makes copies for all heads, and pads them with the number
    # that there was before.
    name: replace(entry, even_kv_heads=True, fields=NXDI_FIELDS.get(name, {}))
    for name, entry in _OF_EACH.items()
}
"""Architectures of NxD Inference, by `model_type`; others live in its contributed models, outside the wheel."""
REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("llama4", "mllama", "pixtral", "qwen2_vl", "qwen3_vl"),
            "takes images, which is not served yet",
        ),
        # Source: models/model_base.py: all layers get the first one's rotary positions. Besides, those with a window
        # write a ring that the mask of a decode does not know (models/gemma3/modeling_gemma3.py). Seen on the CPU rig.
        "gemma3": "gives wrong answers: its layers without a window get the rotary positions of those with one",
    }
)
"""Architectures of the library that are not served, and what their class does."""
