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
# Only the others divide cores among KV heads for flash decoding (num_cores_per_group).
_NO_FLASH_DECODING = frozenset({"shard_over_sequence"})
# Its layers of experts are built of parallel linear layers and an embedding that pad nothing.
_OF_EXPERTS = ("hidden_size", "intermediate_size", "vocab_size")

_OF_EACH: Final[Mapping[str, Capability]] = {
    "dbrx": Capability(
        verified=False, degree_divides=_OF_EXPERTS, ignored_options=_NO_FLASH_DECODING
    ),
    "gemma3": Capability(
        verified=False, degree_divides=("hidden_size",), ignored_options=_NO_FLASH_DECODING
    ),
    "gpt_oss": Capability(verified=False),
    "llama": Capability(defects=(_YARN_ROUNDED, _LAST_TOKENS)),
    "mistral": Capability(
        window_cache=True, ignored_options=_NO_FLASH_DECODING, defects=(_LAST_TOKENS,)
    ),
    "mixtral": Capability(
        degree_divides=_OF_EXPERTS, ignored_options=_NO_FLASH_DECODING, defects=(_WINDOW_IGNORED,)
    ),
    "qwen2": Capability(
        ignored_options=_NO_FLASH_DECODING, defects=(_WINDOW_IGNORED, _LAST_TOKENS)
    ),
    "qwen3": Capability(
        ignored_options=_NO_FLASH_DECODING, defects=(_WINDOW_IGNORED, _LAST_TOKENS)
    ),
    "qwen3_moe": Capability(
        verified=False,
        degree_divides=_OF_EXPERTS,
        ignored_options=_NO_FLASH_DECODING,
        defects=(_WINDOW_IGNORED,),
    ),
}
NXDI: Final[Mapping[str, Capability]] = {
    name: replace(entry, fields=NXDI_FIELDS.get(name, {})) for name, entry in _OF_EACH.items()
}
"""Architectures of NxD Inference, by `model_type`; others live in its contributed models, outside the wheel."""
WITH_IMAGES: Final = frozenset({"llama4", "mllama", "pixtral", "qwen2_vl", "qwen3_vl"})
"""Architectures of the library that take images, which is not served yet."""
