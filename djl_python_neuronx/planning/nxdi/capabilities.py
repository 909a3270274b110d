"""What NxD Inference supports of each architecture, and what it computes wrong.

Source: neuronx-distributed-inference 0.9.0, `utils/constants.py` (MODEL_TYPES) and `models/*/modeling_*.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from djl_python_neuronx.planning.capabilities import Capability, Defect, window_ignored
from djl_python_neuronx.planning.fields import ROTARY, rope_type
from djl_python_neuronx.planning.nxdi.fields import NXDI_FIELDS

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
_LAST_TOKENS = Defect(
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
_IMAGES = "NxD Inference does not have it for models with images"
_NOT_WITH_IMAGES = dict.fromkeys(
    ("enable_prefix_caching", "is_block_kv_layout", "is_medusa", "speculative_draft_model"), _IMAGES
)
# Only the others divide cores among KV heads for flash decoding (num_cores_per_group).
_NO_FLASH_DECODING = frozenset({"shard_over_sequence"})
# Its layers of experts are built of parallel linear layers and an embedding that pad nothing.
_OF_EXPERTS = ("hidden_size", "intermediate_size", "vocab_size")


def _with_images(
    unsupported_options: Mapping[str, str] | None = None,
    ignored_options: frozenset[str] = frozenset(),
    *,
    pads_heads: bool = True,
) -> Capability:
    return Capability(
        pads_heads=pads_heads,
        speculation=False,
        verified=False,
        ignored_options=ignored_options,
        unsupported_options={**_NOT_WITH_IMAGES, **(unsupported_options or {})},
    )


_OF_EACH: Final[Mapping[str, Capability]] = {
    "dbrx": Capability(
        verified=False, degree_divides=_OF_EXPERTS, ignored_options=_NO_FLASH_DECODING
    ),
    "gemma3": Capability(
        verified=False, degree_divides=("hidden_size",), ignored_options=_NO_FLASH_DECODING
    ),
    "gpt_oss": Capability(verified=False),
    "llama": Capability(defects=(_YARN_ROUNDED, _LAST_TOKENS)),
    "llama4": _with_images(),
    "mistral": Capability(
        window_cache=True, ignored_options=_NO_FLASH_DECODING, defects=(_LAST_TOKENS,)
    ),
    "mixtral": Capability(
        degree_divides=_OF_EXPERTS, ignored_options=_NO_FLASH_DECODING, defects=(_WINDOW_IGNORED,)
    ),
    # Its cross attention asserts that the degree divides query and KV heads.
    "mllama": _with_images(pads_heads=False),
    "pixtral": _with_images(),
    "qwen2": Capability(
        ignored_options=_NO_FLASH_DECODING, defects=(_WINDOW_IGNORED, _LAST_TOKENS)
    ),
    "qwen2_vl": _with_images(ignored_options=_NO_FLASH_DECODING),
    "qwen3": Capability(
        ignored_options=_NO_FLASH_DECODING, defects=(_WINDOW_IGNORED, _LAST_TOKENS)
    ),
    "qwen3_moe": Capability(
        verified=False,
        degree_divides=_OF_EXPERTS,
        ignored_options=_NO_FLASH_DECODING,
        defects=(_WINDOW_IGNORED,),
    ),
    "qwen3_vl": _with_images(dict.fromkeys(("attention_dp_degree", "cp_degree"), _IMAGES)),
}
NXDI: Final[Mapping[str, Capability]] = {
    name: replace(entry, fields=NXDI_FIELDS.get(name, {})) for name, entry in _OF_EACH.items()
}
"""Architectures of NxD Inference, by `model_type`; others live in its contributed models, outside the wheel."""
