"""Rules about combinations of options, independent of the model and the machine.

General rules are checked when the settings are read (`conflicts`), those of a backend's library when the backend is
chosen and the options are filled in (`model_rules.findings`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from djl_python_neuronx.config.device_sampling import OnDeviceGeneration
from djl_python_neuronx.config.findings import ANY, SET, UNSET, Finding, Rule, above, is_set, when
from djl_python_neuronx.config.options import MAX_ROWS, ServingOptions
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS

OPEN: Final = frozenset({"auto", "optimum", "vllm"})
"""Values of model_loader that leave the backend open."""

_BY_ROWS = frozenset({"tnx", "vllm"})
_FILLED_IN = (
    *("dtype", "tensor_parallel_degree"),
    *("n_positions", "max_rolling_batch_size", "context_length_estimate"),
)


def conflicts(options: ServingOptions) -> Iterator[Finding]:
    """Yield the findings of the rules that hold with every backend."""
    return broken_rules(RULES, options)


def library_conflicts(options: ServingOptions, backend: str) -> Iterator[Finding]:
    """Yield the findings of a library's rules about options that are not filled in yet.

    Rules about one that is still to be filled in are left out. No findings for a backend without a library.
    """
    unset = {name for name in _FILLED_IN if getattr(options, name) in (None, "auto", "max")}
    neuron = NEURON_BACKENDS.get(backend)
    rules = () if neuron is None else neuron.rules
    return broken_rules((rule for rule in rules if unset.isdisjoint(rule.names)), options)


def broken_rules(rules: Iterable[Rule], options: ServingOptions) -> Iterator[Finding]:
    """Yield a finding for each rule that the options break."""
    for rule in rules:
        if rule.holds(options):
            yield Finding(rule.names, rule.problem, rule.level)


def _prompts_too_long(options: ServingOptions) -> bool:
    buckets, limit = options.context_length_estimate, options.max_model_len
    return bool(buckets and limit and buckets[-1] > limit)


def _unused_sampling(sampled: OnDeviceGeneration) -> bool:
    changed = (sampled.top_p, sampled.temperature) != (1.0, 1.0)
    return changed and not sampled.do_sample and not sampled.dynamic


_REQUESTS = (
    when(model_id=None, model_dir=None).refuse(
        "no model to serve; give a model folder or set option.model_id"
    ),
    when(batch_size=above(1), rolling_batch=_BY_ROWS).refuse(
        "batch_size is for rolling_batch=disable; set only one of them"
    ),
    # Source: djl-serving d21927c, PyPredictor.java, batchPredict.
    when(batch_size=above(1), async_mode=False).note(
        "a batch that DJL Serving collects has one status, 200: look for `code` in each answer; to give each request "
        "its status, set async_mode=true and leave batch_size out"
    ),
    when(async_mode=True, rolling_batch=_BY_ROWS).refuse(
        "DJL Serving would send each request both ways; leave rolling_batch out or set async_mode=false"
    ),
    when(
        lambda options: options.batch_size > (options.max_rolling_batch_size or options.batch_size),
        batch_size=ANY,
        max_rolling_batch_size=ANY,
    ).warn(
        "requests of one batch would wait for free slots; raise max_rolling_batch_size or lower batch_size"
    ),
    when(
        lambda options: (
            options.join_wait_s < options.max_join_wait_ms / 1000
            and (options.queue_timeout or is_set(options, "predict_timeout"))
        ),
        max_join_wait_ms=SET,
    ).refuse(
        "requests would time out while they wait to join a batch; lower max_join_wait_ms, or raise queue_timeout "
        "(default: predict_timeout)"
    ),
    # Source: djl-serving, inputs.py get_batches: the keys batch_iii.* have three digits.
    when(max_rolling_batch_size=above(MAX_ROWS), rolling_batch=_BY_ROWS).refuse(
        f"DJL Serving's rolling batch has at most {MAX_ROWS} rows; lower it or use async_mode=true"
    ),
    when(_prompts_too_long, context_length_estimate=ANY, n_positions=ANY).refuse(
        "the longest prompt does not fit into n_positions; lower it or raise n_positions"
    ),
    when(rolling_batch_strategy=SET, rolling_batch="disable", async_mode=False).note(
        "no effect: DJL Serving sends one call at a time, so no request joins a running batch; set rolling_batch=tnx "
        "or async_mode=true, or leave rolling_batch_strategy out"
    ),
    when(model_loader={"optimum", "vllm"}).note(
        "a loader of the former engine, which is not available; taken as auto, and the Neuron library loads the model"
    ),
    when(tensor_parallel_degree="max", replicas=SET).refuse(
        "one copy would take all cores; leave tensor_parallel_degree out or set a number, or leave replicas out"
    ),
    when(replicas=SET, engine_process=False).refuse(
        "each copy needs its own process; leave one of them out"
    ),
)
_SPECULATION = (
    when(speculative_draft_model=SET, speculative_length=0).refuse(
        "speculative_length=0 switches speculation off; set at least 1, or leave the draft model out"
    ),
    # 5 is the default, and 0 switches speculation off.
    when(
        lambda options: options.speculative_length not in {0, 5},
        speculative_length=ANY,
        speculative_draft_model=UNSET,
        ngram_prompt_lookup_max=UNSET,
    ).warn(
        "no effect without a source of drafts; set speculative_draft_model or ngram_prompt_lookup_max, or leave this "
        "out"
    ),
    *(
        when(**{name: SET}, speculative_draft_model=UNSET).warn(
            "no effect without a draft model; set speculative_draft_model, or leave this out"
        )
        for name in ("draft_model_tp_size", "draft_model_compiled_path")
    ),
    when(ngram_prompt_lookup_max=SET, speculative_length=0).refuse(
        "speculative_length=0 switches speculation off; set at least 1, or leave the lookup out"
    ),
    when(ngram_prompt_lookup_max=SET, speculative_draft_model=SET).refuse(
        "only one source of drafts is possible; leave one of them out"
    ),
    *(
        when(**{name: SET}, enable_chunked_prefill=SET).refuse(
            "speculation and chunked prefill exclude each other; leave one of them out"
        )
        for name in ("ngram_prompt_lookup_max", "speculative_draft_model")
    ),
)
_CACHE = (
    when(enable_chunked_prefill=True, is_block_kv_layout=False).refuse(
        "it needs the KV cache in blocks; leave is_block_kv_layout out or set it to true"
    ),
    *(
        when(
            lambda options: not (options.in_blocks or options.enable_prefix_caching),
            **{name: SET},
            is_block_kv_layout=ANY,
        ).warn(
            "no effect: the KV cache is not in blocks; set enable_prefix_caching=true (NxD Inference) or "
            "enable_chunked_prefill=true (transformers-neuronx), or leave this out"
        )
        for name in ("pa_block_size", "pa_num_blocks")
    ),
    *(
        when(**{name: True}, rolling_batch_strategy="naive_rolling_batch").refuse(
            "it needs continuous batching; leave rolling_batch_strategy out or set it to continuous_batching"
        )
        for name in ("enable_chunked_prefill", "is_block_kv_layout")
    ),
    when(padding_side="left", rolling_batch_strategy="continuous_batching").refuse(
        "continuous batching pads on the right; leave padding_side out"
    ),
)
_SAMPLING = (
    when(on_device_generation=lambda it: it.global_top_k and it.top_k > it.global_top_k).refuse(
        "top_k is above global_top_k, the most candidates of any request; lower it or raise global_top_k"
    ),
    when(
        on_device_generation=lambda sampled: sampled.per_batch_line and not sampled.dynamic
    ).refuse(
        "per_batch_line takes each row's parameters from its request, which needs dynamic=true; set it, or leave "
        "per_batch_line out"
    ),
    when(on_device_generation=_unused_sampling).warn(
        "top_p and temperature have no effect without do_sample or dynamic; set do_sample=true, or leave them out"
    ),
    when(
        lambda options: not (options.on_device_generation and options.on_device_generation.dynamic),
        on_device_default_top_k=SET,
        on_device_generation=ANY,
    ).warn(
        "no effect unless the device samples with each request's top_k; set on_device_generation=true, or leave it out"
    ),
)
_FILES = (
    when(partition_schema="optimum", save_mp_checkpoint_path=SET).refuse(
        "the layout of optimum-neuron can be read but not written; set safetensors or compile_only"
    ),
    when(partition_schema="optimum", save_mp_checkpoint_path=UNSET).warn(
        "no effect: the layout of a model's folder is detected, and this one cannot be written; leave it out"
    ),
    when(load_split_model=True, partition_schema="safetensors").refuse(
        "weights are stored either split or as safetensors; leave one of them out"
    ),
    when(load_split_model=True, save_mp_checkpoint_path=SET).refuse(
        "a split checkpoint cannot be partitioned again; give the original model, or leave save_mp_checkpoint_path out"
    ),
    when(quantize=SET, dtype="float32").warn(
        "8-bit weights are then computed in float32, and all other tensors take four bytes a number; set dtype=bf16 "
        "to save time and memory"
    ),
)
_LORA = tuple(
    when(**{name: SET}, enable_lora=False).refuse(
        "adapters are served only with enable_lora=true; set it, or leave this out"
    )
    for name in ("adapters", "max_loras", "max_lora_rank", "lora_target_modules")
)
RULES: tuple[Rule, ...] = (*_REQUESTS, *_SPECULATION, *_CACHE, *_SAMPLING, *_FILES, *_LORA)
"""The rules that hold with every backend."""
