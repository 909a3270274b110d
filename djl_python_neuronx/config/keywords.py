"""The keywords in `override_neuron_config`, translated into settings of options.

Most names follow from `Option.to`; this module adds further names of the same things, and values that the libraries
count or turn round differently. Sources: transformers-neuronx 0.13 (config.py), NxD Inference 0.9 (models/config.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any, Final

from djl_python_neuronx.config import sources
from djl_python_neuronx.config.findings import Level
from djl_python_neuronx.config.legacy import NOT_SERVED
from djl_python_neuronx.config.options import NAMES, SECTIONS, option, parse_value
from djl_python_neuronx.config.sources import Setting
from djl_python_neuronx.config.values import make_buckets, truth
from djl_python_neuronx.errors import ConfigError

OVERRIDE: Final = "override_neuron_config"
"""The option, and the source of the settings that its keywords stand for."""

_INNER = (OVERRIDE, OVERRIDE.replace("_", "-"))
"""Names of the keywords in vLLM's `additional_config`. Source: vllm-neuron a5ef7c8; with hyphens: AWS's guide."""
_BESIDE = "no effect; of additional_config override_neuron_config alone is read, and a keyword belongs into it"
_KEYWORD = re.compile(r"[a-z]\w*(\.[a-z]\w*)?")
_SLOTS = (
    *("ctx_batch_size", "tkg_batch_size", "max_batch_size", "spec_batch_size"),
    "kv_cache_batch_size",
    *("continuous_batching.max_num_seqs", "continuous_batching.batch_size_for_shared_caches"),
    "chunked_prefill_config.max_num_seqs",
)
_FURTHER: Mapping[str, tuple[str, ...]] = {
    "n_positions": ("max_length", "token_generation_buckets", "continuous_batching.max_model_len"),
    "context_length_estimate": ("max_context_length",),
    "max_rolling_batch_size": _SLOTS,
    "skip_warmup": ("skip_warmup",),
    "rolling_batch_strategy": ("is_continuous_batching", "continuous_batching."),
    "enable_chunked_prefill": ("chunked_prefill_config.",),
    "padding_side": ("use_2d_cache_ids", "lhs_aligned"),
    "quantize": ("quantized",),
    "enable_lora": ("lora_config", "lora_config.dynamic_multi_lora"),
    "logical_nc_config": ("logical_neuron_cores",),
    "draft_model_kind": ("is_eagle3",),
    "save_sharded_checkpoint": ("skip_sharding",),
    "attn_block_tkg_nki_kernel_enabled": (
        *("attn_tkg_nki_kernel_enabled", "attn_tkg_builtin_kernel_enabled"),
    ),
    "fused_rmsnorm_mlp": ("mlp_tkg_nki_kernel_enabled",),
}
OPTIONS: Final[Mapping[str, str]] = {
    **{
        keyword: name
        for name in reversed([name for names in SECTIONS.values() for name in names])
        for keyword in option(name).to.values()
        if _KEYWORD.fullmatch(keyword)
    },
    **{keyword: name for name, keywords in _FURTHER.items() for keyword in keywords},
}
"""Keyword to its option. Of two options with one keyword the first counts: the second is computed from it."""

_OF_EAGLE = ("is_eagle3", "enable_eagle_speculation")
_SIDES: Mapping[object, object] = {True: "right", False: "left"}
_MEANINGS: Mapping[str, Mapping[object, object]] = {
    "skip_sharding": {True: False, False: True},
    "enable_eagle_speculation": {True: "eagle"},
    "is_eagle3": {True: "eagle3"},
    "is_continuous_batching": {True: "continuous_batching", False: "naive_rolling_batch"},
    **dict.fromkeys(("use_2d_cache_ids", "lhs_aligned"), _SIDES),
}
"""Keyword to the option's value for true and for false."""
_IMPLIED: Mapping[str, Mapping[str, object]] = {
    "quant": {"quant_dtype": "int8"},
    "kv_cache_quant": {"quant_dtype": "int8"},
    "kv_quant_config": {"quant_dtype": "fp8"},
    "continuous_batching": {"": "continuous_batching"},
    "chunked_prefill_config": {"": True},
}
"""Keyword that takes an object, to what the library does where one is given."""
OBJECTS: Final = _IMPLIED.keys() - {"kv_cache_quant"}  # a flag in NxDI
_SAMPLING: Mapping[str, Mapping[str, object]] = {
    "on_device_generation": {},
    "on_device_sampling_config": {"top_k": 1},
}
"""Keyword that takes an object which is one option, to the library's defaults that differ from the option's."""
_APART = frozenset({"on_device_sampling_config", "top_k_kernel_enabled", "sampling_dp_degree"})
"""Keywords of NxDI's `OnDeviceSamplingConfig` without an equivalent."""

_SHAPE = "it changes what a call takes or returns, which the server relies on"
_HOSTS = "only models on one machine are served"
_LATER = "not served in this version"
_MEDUSA = (
    "NxD Inference returns the tokens of one sequence alone with Medusa; use a draft model or EAGLE"
)
_TREE = "drafts are verified as a chain; leave the tree out"
_DRAFTS = "set option.speculative_draft_model, and draft_model_kind for EAGLE"
RESERVED: Final[Mapping[str, tuple[object, str]]] = {
    **dict.fromkeys(("output_all_logits", "log_softmax_scores"), (False, _SHAPE)),
    **dict.fromkeys(("return_expert_index", "return_router_logits"), (False, _SHAPE)),
    **dict.fromkeys(("bucket_n_active_tokens", "apply_seq_ids_mask"), (False, _SHAPE)),
    **dict.fromkeys(("n_active_tokens", "max_new_tokens"), (None, _SHAPE)),
    **dict.fromkeys(("tensor_capture_config", "tensor_replacement_config"), (None, _SHAPE)),
    "kv_cache_padding_size": (0, _SHAPE),
    "allow_input_truncation": (False, "prompts that are too long are refused, not cut"),
    "enable_bucketing": (True, "without lengths; set seq_len or option.n_positions too"),
    "buckets": (None, "set context_encoding_buckets or token_generation_buckets"),
    "quantization_dtype": ("int8", "no effect without quantized=true; set that too"),
    "quantized_checkpoints_path": (None, "quantised weights are stored beside the graphs"),
    "overrides_torch_dtype": (True, "torch_dtype always counts"),
    **dict.fromkeys(("world_size", "local_ranks_size"), (None, _HOSTS)),
    "start_rank_id": (0, _HOSTS),
    "on_cpu": (False, "set option.model_loader=cpu"),
    "is_eagle_draft": (False, _DRAFTS),
    "sparse_attn": (None, "it is an object, which a file cannot hold"),
    "lora_config": (None, "set option.enable_lora, and the other options of adapters"),
    "is_eagle_target": (False, _LATER),
    **{name: (harmless, _LATER) for name, harmless in NOT_SERVED.items()},
    "is_medusa": (False, _MEDUSA),
    **dict.fromkeys(("medusa_speculation_length", "num_medusa_heads"), (0, _MEDUSA)),
    **dict.fromkeys(("medusa_tree", "token_tree_config"), (None, _TREE)),
}
"""Keyword to the one value that changes nothing, and why any other is refused."""
_NO_EFFECT: Mapping[str, object] = {
    **{keyword: value for keyword, (value, _) in RESERVED.items()},
    **dict.fromkeys(("attn_tkg_nki_kernel_enabled", "attn_tkg_builtin_kernel_enabled"), False),
    "mlp_tkg_nki_kernel_enabled": False,
    **dict.fromkeys(_OF_EAGLE, False),
    "ctx_batch_size": 1,
    **dict.fromkeys(("continuous_batching", "chunked_prefill_config"), None),
    "kv_quant_config.direct_cast": True,
    "on_device_sampling_config.on_device_sampling_config": True,
}


def translated(settings: Sequence[Setting], folder: Path) -> list[Setting]:
    """Put a setting of its option in the place of each keyword in `override_neuron_config` that has one.

    `settings`: highest precedence first, so that only the first override counts. Its keywords precede all settings but
    stronger ones of the command line, as in the old engine. Its other keywords go to the library as they are.
    """
    override = next((entry for entry in settings if _is_override(entry)), None)
    keywords = _read(override, folder) if override else None
    if override is None or keywords is None:
        return list(settings)
    keywords, remarks = _inside(keywords, override)
    chosen = {NAMES.get(entry.name): entry.value for entry in reversed(settings)}
    given = _combined(keywords, chosen.get("n_positions"))
    found, left = _divided(given, override)
    refused: list[tuple[Level, str]] = [
        ("error", f"{name}: {RESERVED[name][1]}; correct or remove it")
        for name in left
        if name in RESERVED
    ]
    refused += [
        ("error", f"{name}: expected an object of keywords, or null")
        for name, value in left.items()
        if name in OBJECTS and not isinstance(value, Mapping)
    ]
    rest = replace(
        override,
        value=left or (None if keywords else {}),
        remarks=(*override.remarks, *remarks, *refused),
    )
    before = {"argument", sources.COMMAND_LINE} - {override.source}
    return [
        *(entry for entry in settings if entry.source in before),
        *found,
        *(rest if entry is override else entry for entry in settings if entry.source not in before),
    ]


def options_of(keywords: Mapping[str, Any]) -> tuple[dict[str, object], dict[str, Any]]:
    """The options that keywords of a `NeuronConfig` stand for, with values as a source has them, and what is left."""
    found, left = _divided(_combined(keywords, None), Setting(OVERRIDE, None, "", OVERRIDE, False))
    return {setting.name: setting.value for setting in reversed(found)}, left


def explained(keyword: str, values: tuple[object, object]) -> tuple[str, tuple[object, object]]:
    """A keyword by the name of its option, if it has one, and its values as the option has them."""
    first, second = (_MEANINGS.get(keyword, {}).get(truth(value), value) for value in values)
    return OPTIONS.get(keyword, keyword), (first, second)


def _is_override(setting: Setting) -> bool:
    return NAMES.get(setting.name) == OVERRIDE and not setting.unused


def _read(override: Setting, folder: Path) -> dict[str, Any] | None:
    """The keywords, of a file if the value names one; None if they cannot be read, which `_Reader.validate` reports."""
    with suppress(ConfigError):
        read = sources.content(override.value, folder, by_operator=override.by_operator)
        keywords = parse_value(OVERRIDE, read)
        if isinstance(keywords, dict):
            return keywords
    return None


def _inside(
    keywords: dict[str, Any], override: Setting
) -> tuple[dict[str, Any], list[tuple[Level, str]]]:
    """The keywords, those of an inner object too, and remarks about names beside it that vLLM does not read."""
    inner: dict[str, Any] = {}
    remarks: list[tuple[Level, str]] = []
    left: dict[str, Any] = {}
    for name, value in keywords.items():
        if name in _INNER and isinstance(value, (Mapping, NoneType)):
            inner |= value or {}
        elif name in _INNER:
            remarks.append(("error", f"{name}: expected an object of keywords, or null"))
        elif override.name == OVERRIDE:
            left[name] = value
        else:
            remarks.append(("warning", f"{name}: {_BESIDE}"))
    return {**left, **inner}, remarks


def _divided(given: Mapping[str, Any], override: Setting) -> tuple[list[Setting], dict[str, Any]]:
    """The settings of the keywords that have an option, and the other keywords, but those that change nothing."""
    found: list[Setting] = []
    left: dict[str, Any] = {}
    for keyword, value in _flat(given):
        outer, _, inner = keyword.partition(".")
        if keyword in _NO_EFFECT and value == _NO_EFFECT[keyword]:
            continue
        if keyword in OPTIONS and keyword not in RESERVED:
            origin = f"{OVERRIDE} in {override.origin}: {keyword.rstrip('.')}"
            meant = _MEANINGS.get(keyword, {}).get(truth(value), value)
            found.append(Setting(OPTIONS[keyword], meant, origin, OVERRIDE, override.by_user))
        elif inner:
            left.setdefault(outer, {})[inner] = value
        else:
            left[keyword] = value
    return found, left


def _combined(keywords: Mapping[str, Any], positions: object) -> dict[str, Any]:
    """The keywords, those that mean something together as one. `positions`: `n_positions` of another source."""
    # EAGLE3 is EAGLE too.
    hidden = _OF_EAGLE[1:] if truth(keywords.get(_OF_EAGLE[0])) else ()
    given = _in_8_bits({name: keywords[name] for name in keywords if name not in hidden})
    tokens = parse_value("speculative_length", given.get("speculation_length"))
    if isinstance(tokens, int):
        given["speculation_length"] = max(tokens - 1, 0)  # the last is the large model's own
    if given.get("ctx_batch_size", 1) != 1:
        given.setdefault("is_continuous_batching", False)  # whose prompts are prefilled one by one
    names = ("seq_len", "max_length", "n_positions")
    limit = parse_value("n_positions", next((given[n] for n in names if n in given), positions))
    prompt = parse_value("n_positions", given.get("max_context_length"))
    if truth(given.get("enable_bucketing")) is False and isinstance(limit, int):
        del given["enable_bucketing"]
        given["token_generation_buckets"] = [limit]
        given["context_encoding_buckets"] = [given.get("max_context_length") or limit]
    elif isinstance(prompt, int) and "context_encoding_buckets" not in given:
        given["max_context_length"] = make_buckets(prompt)
    for buckets, lengths, elsewhere in (
        ("token_generation_buckets", names, limit),
        ("context_encoding_buckets", ("max_context_length",), None),
    ):
        found = {parse_value("n_positions", given[name]) for name in lengths if name in given}
        found = found or {elsewhere}
        longest = found.pop() if len(found) == 1 else None
        shorter = parse_value("context_length_estimate", given.get(buckets))
        if isinstance(shorter, tuple) and isinstance(longest, int) and shorter[-1] <= longest:
            given = {name: value for name, value in given.items() if name not in lengths}
            given[buckets] = sorted({*shorter, longest})
    return given


def _in_8_bits(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords, with NxDI's flags for weights and cache as the types that they are stored in."""
    given = dict(keywords)
    quantized = truth(given.get("quantized"))
    if quantized is not None:
        dtype = given.pop("quantization_dtype", "int8")
        given["quantized"] = dtype if quantized else None
    cache = truth(given.get("kv_cache_quant"))
    if cache is not None:
        del given["kv_cache_quant"]
    if cache and not given.get("kv_quant_config"):
        given["kv_quant_config"] = {}
    return given


def _flat(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each keyword with its value, those of an object as ``keyword.inner``."""
    for keyword, value in given.items():
        implied = _IMPLIED.get(keyword)
        if implied is not None and value is None and keyword not in _NO_EFFECT:
            value = dict.fromkeys(implied)
        if implied is not None and isinstance(value, Mapping):
            for inner, entry in {**implied, **value}.items():
                yield f"{keyword}.{inner}", entry
        elif keyword in _SAMPLING and isinstance(value, Mapping):
            together = {inner: entry for inner, entry in value.items() if inner not in _APART}
            yield keyword, {**_SAMPLING[keyword], **together}
            for inner in [inner for inner in value if inner in _APART]:
                yield f"{keyword}.{inner}", value[inner]
        else:
            yield keyword, value
