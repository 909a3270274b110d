"""Rules about combinations of options, whatever the model and the machine.

A rule is judged as soon as all that it reads is known: a general one when the settings are read (`conflicts`), one of a
backend's library when the backend is chosen and the options are filled in (`model_rules.findings`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from djl_python_neuronx.config.findings import Finding, Rule, excluding, lacking
from djl_python_neuronx.config.options import MAX_ROWS, ServingOptions
from djl_python_neuronx.planning.nxdi.rules import NXDI_RULES
from djl_python_neuronx.planning.tnx.rules import TNX_RULES

BACKEND_RULES: Final[Mapping[str, tuple[Rule, ...]]] = {"tnx": TNX_RULES, "nxdi": NXDI_RULES}
"""Backend to the rules of its library."""
OPEN: Final = frozenset({"auto", "optimum", "vllm"})
"""Values of model_loader that leave the backend open."""

_BY_ROWS = frozenset({"tnx", "vllm"})


def conflicts(options: ServingOptions) -> Iterator[Finding]:
    """Yield the findings of the rules that hold with every backend."""
    return broken_rules(RULES, options)


def broken_rules(rules: Iterable[Rule], options: ServingOptions) -> Iterator[Finding]:
    """Yield a finding for each rule that the options break."""
    for rule in rules:
        if rule.broken(options):
            yield Finding(rule.names, rule.problem, rule.level)


def _paged(options: ServingOptions) -> bool:
    return bool(
        options.is_block_kv_layout
        or options.enable_prefix_caching
        or options.enable_chunked_prefill
    )


def _prompts_too_long(options: ServingOptions) -> bool:
    buckets, limit = options.context_length_estimate, options.max_model_len
    return bool(buckets and limit and buckets[-1] > limit)


def _useless_sampling(options: ServingOptions) -> bool:
    sampled = options.on_device_generation
    return (
        sampled is not None
        and not sampled.do_sample
        and not sampled.dynamic
        and ((sampled.top_p, sampled.temperature) != (1.0, 1.0))
    )


def _too_many_candidates(options: ServingOptions) -> bool:
    sampled = options.on_device_generation
    return (
        sampled is not None
        and sampled.global_top_k is not None
        and sampled.top_k > sampled.global_top_k
    )


_DRAFT = "speculative_draft_model"
_NO_DRAFT = "nothing is drafted without speculative_draft_model; set that, or leave this out"
_LOOKUP = "ngram_prompt_lookup_max"
_NO_BLOCKS = "the KV cache is not kept in blocks; set is_block_kv_layout=true, or leave this out"
_NO_8_BITS = "no weight is quantised; set quantize, or leave this out"
_NEEDS_BLOCKS = "it keeps the KV cache in blocks; leave is_block_kv_layout out or set it to true"
_NEEDS_CONTINUOUS = "it needs continuous batching; leave rolling_batch_strategy out or set it to continuous_batching"


def _without_blocks(name: str) -> Rule:
    return Rule(
        (name, "is_block_kv_layout"),
        lambda options: getattr(options, name) is not None and not _paged(options),
        _NO_BLOCKS,
        "warning",
    )


def _whole_rows(name: str) -> Rule:
    return Rule(
        (name, "is_block_kv_layout"),
        lambda options: getattr(options, name) and options.is_block_kv_layout is False,
        _NEEDS_BLOCKS,
    )


def _continuous_only(name: str) -> Rule:
    return Rule(
        (name, "rolling_batch_strategy"),
        lambda options: (
            getattr(options, name) and options.rolling_batch_strategy == "naive_rolling_batch"
        ),
        _NEEDS_CONTINUOUS,
    )


_REQUESTS = (
    Rule(
        ("model_id", "model_dir"),
        lambda options: options.model_id is None and options.model_dir is None,
        "there is no model to serve; give a model folder or set option.model_id",
    ),
    Rule(
        ("batch_size", "rolling_batch"),
        lambda options: options.batch_size > 1 and options.rolling_batch in _BY_ROWS,
        "batch_size is for rolling_batch=disable; set only one of them",
    ),
    Rule(
        ("async_mode", "rolling_batch"),
        lambda options: options.async_mode and options.rolling_batch in _BY_ROWS,
        "DJL Serving would send each request both ways; leave rolling_batch out or set async_mode=false",
    ),
    Rule(
        ("batch_size", "async_mode"),
        lambda options: options.batch_size > 1 and options.async_mode,
        "with async_mode each request comes alone and shares the device anyway; leave batch_size out",
        "warning",
    ),
    Rule(
        ("batch_size", "max_rolling_batch_size"),
        lambda options: options.batch_size > (options.max_rolling_batch_size or options.batch_size),
        "requests of one batch would wait for each other's slots; raise max_rolling_batch_size or lower batch_size",
        "warning",
    ),
    Rule(
        ("max_join_wait_ms", "predict_timeout"),
        lambda options: options.max_join_wait_ms / 1000 >= options.predict_timeout,
        "requests would time out while they gather; lower max_join_wait_ms, or raise predict_timeout",
    ),
    # Source: djl-serving, inputs.py get_batches: the keys batch_iii.* have three digits.
    Rule(
        ("max_rolling_batch_size", "rolling_batch"),
        lambda options: (
            options.rolling_batch in _BY_ROWS and (options.max_rolling_batch_size or 0) > MAX_ROWS
        ),
        f"DJL Serving's rolling batch has at most {MAX_ROWS} rows; lower it or use async_mode=true",
    ),
    Rule(
        ("context_length_estimate", "n_positions"),
        _prompts_too_long,
        "prompts of the longest length would not fit; lower it or raise n_positions",
    ),
    Rule(
        ("rolling_batch_strategy", "rolling_batch"),
        lambda options: (
            options.rolling_batch_strategy is not None
            and options.rolling_batch == "disable"
            and not options.async_mode
        ),
        "DJL Serving sends one call at a time, so nobody joins a running batch; set rolling_batch=tnx or "
        "async_mode=true, or leave rolling_batch_strategy out",
        "note",
    ),
    Rule(
        ("model_loader",),
        lambda options: options.model_loader in {"optimum", "vllm"},
        "a loader of the old engine that is not here; taken as auto, and the library's own class loads the model",
        "note",
    ),
    Rule(
        ("pipeline_parallel_degree",),
        lambda options: options.pipeline_parallel_degree > 1,
        "DJL Serving starts no Neuron worker with more than 1 (Connection.java raises); set 1, or use the embedded "
        "server",
        "warning",
    ),
)
_SPECULATION = (
    Rule(
        (_DRAFT, "speculative_length"),
        lambda options: (
            options.speculative_draft_model is not None and options.speculative_length == 0
        ),
        "speculative_length=0 drafts nothing; set at least 1, or leave the draft model out",
    ),
    Rule(
        ("speculative_length", _DRAFT, _LOOKUP),
        # 5 is the default and 0 asks for none.
        lambda options: (
            options.speculative_length not in {0, 5}
            and options.speculative_draft_model is None
            and options.ngram_prompt_lookup_max is None
            and not options.is_medusa
        ),
        f"nothing is drafted without {_DRAFT} or {_LOOKUP}; set one of them, or leave this out",
        "warning",
    ),
    lacking("draft_model_tp_size", _DRAFT, _NO_DRAFT),
    lacking("draft_model_compiled_path", _DRAFT, _NO_DRAFT),
    lacking("draft_model_modules_to_not_convert", _DRAFT, _NO_DRAFT),
    lacking(
        "enable_eagle_speculation",
        _DRAFT,
        "EAGLE needs its draft model; set speculative_draft_model",
        "error",
    ),
    Rule(
        (_LOOKUP, "speculative_length"),
        lambda options: (
            options.ngram_prompt_lookup_max is not None and options.speculative_length == 0
        ),
        "speculative_length=0 drafts nothing; set at least 1, or leave the lookup out",
    ),
    excluding(_LOOKUP, _DRAFT, "drafts come from one of them; leave the other out"),
    excluding(
        _LOOKUP,
        "enable_chunked_prefill",
        "a step with chunks of prompts has no room for drafts; leave one of them out",
    ),
    excluding(
        _DRAFT,
        "enable_chunked_prefill",
        "a step with chunks of prompts has no room for drafts; leave one of them out",
    ),
)
_CACHE = (
    _whole_rows("enable_prefix_caching"),
    _whole_rows("enable_chunked_prefill"),
    _without_blocks("pa_block_size"),
    _without_blocks("pa_num_blocks"),
    _continuous_only("enable_prefix_caching"),
    _continuous_only("enable_chunked_prefill"),
    _continuous_only("is_block_kv_layout"),
    Rule(
        ("padding_side", "rolling_batch_strategy"),
        lambda options: (
            options.padding_side == "left"
            and options.rolling_batch_strategy == "continuous_batching"
        ),
        "continuous batching pads on the right; leave padding_side out",
    ),
)
_SAMPLING = (
    Rule(
        ("on_device_generation",),
        _too_many_candidates,
        "top_k is above global_top_k, the most that is ever sampled from; lower it or raise global_top_k",
    ),
    Rule(
        ("on_device_generation",),
        lambda options: (
            options.on_device_generation is not None
            and options.on_device_generation.per_batch_line
            and not options.on_device_generation.dynamic
        ),
        "per_batch_line gives every row parameters that requests set, which needs dynamic=true; set it, or leave "
        "per_batch_line out",
    ),
    Rule(
        ("on_device_generation",),
        _useless_sampling,
        "top_p and temperature do nothing without do_sample or dynamic; set do_sample=true, or leave them out",
        "warning",
    ),
    Rule(
        ("on_device_default_top_k", "on_device_generation"),
        lambda options: (
            options.on_device_default_top_k is not None
            and not (options.on_device_generation and options.on_device_generation.dynamic)
        ),
        "it is for devices that sample with each request's own top_k; set on_device_generation=true, or leave it out",
        "warning",
    ),
)
_FILES = (
    Rule(
        ("partition_schema", "save_mp_checkpoint_path"),
        lambda options: (
            options.partition_schema == "optimum" and options.save_mp_checkpoint_path is not None
        ),
        "the layout of optimum-neuron is read and not written; set safetensors or compile_only",
    ),
    Rule(
        ("load_split_model", "partition_schema"),
        lambda options: options.load_split_model and options.partition_schema == "safetensors",
        "weights are stored either split or as safetensors; leave one of them out",
    ),
    Rule(
        ("load_split_model", "save_mp_checkpoint_path"),
        lambda options: options.load_split_model and options.save_mp_checkpoint_path is not None,
        "a split checkpoint cannot be partitioned again; give the original model, or leave save_mp_checkpoint_path out",
    ),
    Rule(
        ("quantize", "dtype"),
        lambda options: options.quantize is not None and options.dtype == "float32",
        "8-bit weights are computed in float32 then, and all else takes four bytes; set dtype=bf16 for the gain in "
        "speed and memory",
        "warning",
    ),
    *(
        lacking(name, "quantize", _NO_8_BITS)
        for name in (
            "modules_to_not_convert",
            "quantization_block_axis",
            "quantization_block_size",
            "quantization_scale_dtype",
            "quantization_type",
            "quantized_checkpoints_path",
        )
    ),
)
RULES: tuple[Rule, ...] = (*_REQUESTS, *_SPECULATION, *_CACHE, *_SAMPLING, *_FILES)
"""The rules that hold with every backend."""
