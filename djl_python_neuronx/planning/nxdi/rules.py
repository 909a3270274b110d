"""Combinations of options that NxD Inference refuses.

Source: neuronx-distributed-inference 0.9.0, models/config.py (`NeuronConfig.__init__` and its validators) and, where
stated, another file. Limits of architectures are in capabilities.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product

from djl_python_neuronx.config.findings import ANY, SET, UNSET, Finding, Rule, above, when
from djl_python_neuronx.config.keywords import OPTIONS, OVERRIDE
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.config.values import SMALLEST_BUCKET, join_words, shortened
from djl_python_neuronx.errors import did_you_mean
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.lora import MODULES
from djl_python_neuronx.planning.model import first_size
from djl_python_neuronx.planning.nxdi import contrib_rules, speculation, versions
from djl_python_neuronx.planning.nxdi.arguments import graphs, prefixes, write_arguments
from djl_python_neuronx.planning.nxdi.capabilities import QUANTISED_BIASES

_DEGREE, _PROMPTS = "tensor_parallel_degree", "context_length_estimate"
_WINDOW, _FLASH = "windowed_context_encoding_size", "shard_over_sequence"
_OF_ATTENTION, _OF_MLP = MODULES[:4], MODULES[4:]
_ADAPTED = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), MODULES),
    **dict.fromkeys(("mistral", "mixtral"), _OF_ATTENTION),
}
"""`model_type` to the layers whose adapters the library computes."""
_WITHOUT_PREFIXES = {"dbrx", "qwen3_moe"}
"""`model_type` of models that were run without cached prefixes only."""


def _degree(options: ServingOptions) -> int:
    degree = options.tensor_parallel_degree
    return degree if isinstance(degree, int) else 1


def _slots(options: ServingOptions) -> int:
    return options.max_rolling_batch_size or 1


def _uneven_degree(name: str) -> Callable[[ServingOptions], object]:
    return lambda options: _degree(options) % (getattr(options, name) or 1)


def _uneven_groups(options: ServingOptions) -> bool:
    prompts, decodes = options.cp_degree or 1, options.attention_dp_degree or 1
    return prompts > 1 and decodes > 1 and (prompts < decodes or prompts % decodes != 0)


def _static_batches(options: ServingOptions) -> bool:
    if options.rolling_batch_strategy is not None:
        return options.rolling_batch_strategy == "naive_rolling_batch"
    return _slots(options) == 1


_DEGREES = (
    # Source: no module of 0.4 to 0.9 divides layers or sends what one gives to another stage. Seen on the CPU rig, too.
    when(pipeline_parallel_degree=above(1)).refuse(
        "NxD Inference has no stages, and each would hold and compute all layers; leave it out and raise "
        "tensor_parallel_degree"
    ),
    *(
        when(_uneven_degree(name), **{name: ANY}, tensor_parallel_degree=ANY).refuse(
            f"tensor_parallel_degree has to be a multiple of {name}; change one of them"
        )
        for name in ("cp_degree", "attention_dp_degree")
    ),
    when(
        lambda options: _slots(options) % (options.attention_dp_degree or 1),
        attention_dp_degree=ANY,
        max_rolling_batch_size=ANY,
    ).refuse(
        "all groups have equally many slots: max_rolling_batch_size has to be a multiple of attention_dp_degree"
    ),
    when(
        _static_batches,
        attention_dp_degree=above(1),
        rolling_batch_strategy=ANY,
        max_rolling_batch_size=ANY,
    ).refuse(
        "groups of cores share sequences only with continuous batching; raise max_rolling_batch_size and leave "
        "rolling_batch_strategy out, or leave attention_dp_degree out"
    ),
    when(_uneven_groups, cp_degree=ANY, attention_dp_degree=ANY).refuse(
        "if both are above 1, cp_degree has to be a multiple of attention_dp_degree; change one of them"
    ),
    # Source: models/llama/modeling_llama.py too: its groups are those of attention.
    when(
        lambda options: not options.sequence_parallel or options.mlp_cp_degree != options.cp_degree,
        mlp_cp_degree=above(1),
        cp_degree=ANY,
        sequence_parallel=ANY,
    ).refuse(
        "the MLP divides a prompt as attention does, and only with sequence_parallel=true; set it, and cp_degree to "
        "the same, or leave mlp_cp_degree out"
    ),
    when(strided_context_parallel_kernel_enabled=True, cp_degree={None, 1}).refuse(
        "the kernel needs a cp_degree above 1; set that, or leave the kernel out"
    ),
    when(
        lambda options: _degree(options) > _slots(options),
        ep_dispatch_cc_option="RS_AG",
        tensor_parallel_degree=ANY,
        max_rolling_batch_size=ANY,
    ).refuse(
        "RS_AG needs at least as many slots as cores; raise max_rolling_batch_size or change the dispatch"
    ),
    when(
        lambda options: not options.attn_block_tkg_nki_kernel_cascaded_attention,
        attention_dp_degree=above(1),
        attn_block_tkg_nki_kernel_cache_update=True,
    ).refuse(
        "with groups of cores the kernel writes the cache only in cascaded attention; set "
        "attn_block_tkg_nki_kernel_cascaded_attention=true, or leave one of them out"
    ),
)
_BLOCK_KERNEL, _DRAFT = "attn_block_tkg_nki_kernel_enabled", "speculative_draft_model"
_DRAFTS = f"{_DRAFT} ngram_prompt_lookup_max"
_NOT_RUN = "the two were never run together here"
_NEEDS = {
    # Source: modules/attention/gqa.py.
    "fused_rmsnorm_qkv qkv_nki_kernel_enabled / fuse_qkv": "the kernel takes the fused projection only",
    # Source: models/llama/modeling_llama.py. Without the kernel the residuals of a prompt are lost.
    "qkv_kernel_fuse_residual_add / fused_rmsnorm_qkv": "the QKV kernel adds the residual",
    f"attn_block_tkg_nki_kernel_cache_update / {_BLOCK_KERNEL}": "it is part of the decode kernel",
    f"attn_block_tkg_nki_kernel_cascaded_attention / {_BLOCK_KERNEL}": "it is part of the decode kernel",
    # Source: modules/async_execution.py.
    "async_execution / on_device_generation": "the next step starts from the token that the device has sampled",
    # Source: models/model_base.py, which takes both outputs for one.
    "output_logits / on_device_generation": "the host has the logits anyway, and the library fails at a second output",
    "quantization_type modules_to_not_convert / quantize": "it is about weights in 8 bits",
    "is_block_kv_layout / enable_prefix_caching": "with NxD Inference blocks are for prefix caching alone",
    f"draft_model_kind enable_fused_speculation / {_DRAFT}": "it is about a draft model",
    "nxdi_model_class / nxdi_model_code": "it is a class of that code",
}
"""Options / the one that each of them needs -> why."""
_EXCLUDE = {
    "quantize / fused_rmsnorm_qkv fused_rmsnorm_mlp qkv_nki_kernel_enabled": "the kernel takes weights in dtype",
    f"quantize / out_proj_kernel_enabled {_BLOCK_KERNEL}": "the kernel takes weights in dtype",
    "cp_degree / quantize": "NxD Inference fails to load such weights",
    "kv_cache_quantize / shard_over_sequence": "keys that are divided are not cast",
    "kv_cache_quantize / k_cache_transposed": "keys that are transposed are not cast",
    "mlp_kernel_fuse_residual_add qkv_kernel_fuse_residual_add / sequence_parallel": (
        "no kernel adds residuals while tokens are divided among the cores"
    ),
    # Source: models/llama/modeling_llama.py, convert_hf_to_neuron_state_dict: the MLP's matrices get the weights of the
    # norm before attention, and with sequence_parallel nothing does, whereas decode steps skip them.
    "fused_rmsnorm_skip_gamma / fused_rmsnorm_mlp": "the MLP would get the weights of another norm",
    "fused_rmsnorm_skip_gamma / sequence_parallel": "decode steps would leave out the norm's weights",
    # Source: modules/attention/attention_base.py, attention_block_tokengen_nki_kernel.
    f"fused_rmsnorm_skip_gamma / {_BLOCK_KERNEL}": "the kernel multiplies by the norm's weights again",
    f"{_BLOCK_KERNEL} / shard_over_sequence": "the kernel reads whole sequences",
    "k_cache_transposed / shard_over_sequence": "keys that are divided are not transposed",
    # Source: modules/attention/attention_base.py: a core keeps the keys of its own part of a prompt alone, or stops.
    "cp_degree / shard_over_sequence": "cores that share a prompt keep part of its keys",
    "attention_dp_degree / shard_over_sequence": "groups of cores keep part of the keys",
    # Source: models/model_wrapper.py, which pads a step ahead to all slots.
    "async_execution / token_generation_batches": "a step that runs ahead has a graph for all slots only",
    # Source: modules/kvcache: a group has its share of the graph's rows, but the cache of its share of all slots.
    "attention_dp_degree / token_generation_batches": "groups of cores get rows of slots in another group's cache",
    # Source: modules/lora_serving, and the calls of is_lora_module in gqa.py and modeling_llama.py.
    "fuse_qkv / enable_lora": "the library leaves out the adapters of q_proj, k_proj and v_proj",
    "fused_rmsnorm_mlp out_proj_kernel_enabled / enable_lora": "the kernel has no adapters",
    "sequence_parallel / enable_lora": "an adapter's output is the whole prompt, and that of its layer a part",
    "token_generation_batches / enable_lora": "each slot's adapter is computed, also of slots that a graph lacks",
    # Source: models/config.py, models/model_base.py and modules/kvcache/block_kv_cache_manager.py.
    "token_generation_batches / enable_prefix_caching": "NxD Inference has graphs for fewer slots without blocks alone",
    "k_cache_transposed / enable_prefix_caching": "keys in blocks are not transposed",
    "enable_prefix_caching / rolling_batch_strategy": "a static batch prefills all its prompts again",
    # Source: models/model_base.py: `NeuronFusedSpecModel`, `_sample_on_device`.
    f"{_DRAFTS} / token_generation_batches": "the library verifies drafts of all slots together",
    f"{_DRAFTS} / rolling_batch_strategy": "rows of a static batch share no drafts",
    f"{_DRAFTS} / enable_prefix_caching": "drafts are verified without blocks alone",
    f"kv_cache_quantize / {_DRAFTS}": "a step's tokens see keys before these are cast: drafts would change answers",
    "ngram_prompt_lookup_max / on_device_generation": "the library samples the last of a step's tokens alone",
    f"{_DRAFT} / async_execution": "the step that runs ahead is not compared with the accepted drafts",
    f"{_DRAFT} / output_logits": "the host would sample other tokens than those that the device accepts",
    f"{_DRAFT} / quantize": "the library would take the draft model's weights in 8 bits too",
    f"{_DRAFT} / enable_lora": "the library gives its adapters to the model alone",
    f"{_DRAFTS} / shard_over_sequence attention_dp_degree cp_degree nxdi_model_code": _NOT_RUN,
    f"shard_over_sequence attention_dp_degree cp_degree {_WINDOW} / enable_lora enable_prefix_caching": _NOT_RUN,
    f"{_BLOCK_KERNEL} kv_cache_quantize / enable_prefix_caching": _NOT_RUN,
    "shard_over_sequence attention_dp_degree / quantize": _NOT_RUN,
    "attention_dp_degree cp_degree token_generation_batches / kv_cache_quantize": _NOT_RUN,
    "nxdi_model_code quantize / enable_lora": _NOT_RUN,
}
"""Options / those that each of them excludes -> why."""


def _pairs(table: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for names, reason in table.items():
        for name, other in product(*(part.split() for part in names.split("/"))):
            yield name, other, reason


def _in_use(name: str) -> object:
    """Return the condition that an option turns its feature on."""
    if name == "rolling_batch_strategy":
        return "naive_rolling_batch"
    return above(1) if name.endswith("_degree") else SET


def _speculating(options: ServingOptions) -> bool:
    return options.speculating


_PAIRS = (
    *(
        when(**{name: SET, other: UNSET}).refuse(f"{reason}; set {other}, or leave it out")
        for name, other, reason in _pairs(_NEEDS)
    ),
    *(
        when(
            _speculating if name in _DRAFTS.split() else None,
            **{name: _in_use(name), other: _in_use(other)},
        ).refuse(f"{reason}; leave one of them out")
        for name, other, reason in _pairs(_EXCLUDE)
    ),
)
_PREFIXES = (
    when(enable_prefix_caching=True, is_block_kv_layout=False).refuse(
        "prefixes are shared in blocks; leave is_block_kv_layout out, or set it to true"
    ),
    when(prefix_buckets=SET, enable_prefix_caching={None, False}).warn(
        "no effect without prefix caching; set enable_prefix_caching=true, or leave it out"
    ),
)
_KERNELS = (
    when(
        lambda options: options.dtype not in {"auto", options.attention_dtype},
        attention_dtype=SET,
        dtype=ANY,
        cast_type={None, "config"},
    ).refuse(
        "an attention_dtype other than dtype needs cast_type=as-declared; set it, or leave attention_dtype out"
    ),
    when(
        lambda options: not (options.fused_rmsnorm_qkv and options.qkv_nki_kernel_enabled),
        qkv_cte_nki_kernel_fuse_rope=True,
        fused_rmsnorm_qkv=ANY,
        qkv_nki_kernel_enabled=ANY,
    ).refuse(
        "it is part of the NKI kernel; set fused_rmsnorm_qkv=true and qkv_nki_kernel_enabled=true, or leave it out"
    ),
    when(
        attn_block_tkg_nki_kernel_enabled=True,
        fused_rmsnorm_qkv=UNSET,
        qkv_nki_kernel_enabled=UNSET,
    ).refuse(
        "it needs a QKV kernel; set fused_rmsnorm_qkv=true or qkv_nki_kernel_enabled=true, or leave it out"
    ),
)
_BATCHES = (
    when(
        lambda options: (options.token_generation_batches or (0,))[-1] > _slots(options),
        token_generation_batches=ANY,
        max_rolling_batch_size=ANY,
    ).refuse(
        "a step has at most as many sequences as slots; lower it or raise max_rolling_batch_size"
    ),
    # Source: models/model_wrapper.py, `_forward_with_pad`.
    when(
        _static_batches,
        output_logits=True,
        token_generation_batches=SET,
        rolling_batch_strategy=ANY,
        max_rolling_batch_size=ANY,
    ).refuse(
        "graphs for fewer sequences give logits beside tokens only with continuous batching; leave one of them out"
    ),
    # Source: backends/nxdi/calls.py: rows are written from position 0 on, static batches too.
    when(padding_side="left").refuse(
        "prompts are padded on the right with NxD Inference; leave padding_side out"
    ),
)
_SAMPLING = (
    # Source: modules/generation/sampling.py, as all here: DataParallelSampler takes the first rows' for every part.
    when(
        on_device_generation=lambda it: it.dynamic,
        override_neuron_config=lambda it: (
            dict(it.get("on_device_sampling_config") or {}).get("sampling_dp_degree")
            not in {None, 1}
        ),
    ).refuse(
        "with sampling_dp_degree rows would be sampled with the parameters of others; leave it out of "
        "on_device_sampling_config"
    ),
    when(
        on_device_generation=lambda it: it.do_sample and not it.dynamic and it.top_p < 1,
    ).refuse(
        "the device would leave out the token with which the sum reaches top_p; leave top_p out, or set dynamic=true "
        "and output_logits=true: the host then samples with each request's top_p"
    ),
    when(on_device_generation=lambda it: it.deterministic and (it.do_sample or it.dynamic)).refuse(
        "each draw would be the token in which the sum of probabilities reaches a half; leave deterministic out, or "
        "set do_sample=false and dynamic=false for greedy answers"
    ),
    when(on_device_generation=lambda it: it.dynamic and it.top_p < 1).note(
        "top_p has no effect with dynamic=true: each request has its own; leave it out"
    ),
    when(async_execution=SET, async_mode=ANY).note(
        "the library gets the first under its own name async_mode; the option async_mode is DJL Serving's way to send "
        "requests, so set each for itself"
    ),
)
# Source: neuronx-distributed 0.18, quantization/quantization_utils.py; modules/attention/gqa.py.
_QUANTISED = (
    when(quantize="static_fp8", quantization_type="per_tensor_symmetric").refuse(
        "the library fails to load a single scale in fp8; leave quantization_type out"
    ),
    when(kv_cache_quantize="int8").refuse(
        "NxD Inference casts keys and values to fp8 only; set kv_cache_quantize=fp8"
    ),
    *(
        when(**{name: SET}, quantization_type="per_tensor_symmetric").refuse(
            f"with a scale for each matrix {reason}; leave one of them out"
        )
        for name, reason in (
            ("modules_to_not_convert", "the library quantises all layers"),
            ("fuse_qkv", "the library does not merge the three scales"),
        )
    ),
)
_CODE = (
    when(nxdi_model_code=SET, trust_remote_code=False).refuse(
        "it is run, as all code that comes with a model, with trust_remote_code=true alone: read it, then set that"
    ),
)
NXDI_RULES: tuple[Rule, ...] = (
    *_CODE,
    *_DEGREES,
    *_PAIRS,
    *_PREFIXES,
    *_KERNELS,
    *_QUANTISED,
    *_BATCHES,
    *_SAMPLING,
    *speculation.RULES,
)
"""Checked in this order."""


def findings(case: Case) -> Iterator[Finding]:
    """Yield findings about lengths, degrees and sizes of the model at which the library stops or computes a part only.

    Source: models/model_base.py, modules/attention/attention_base.py and utils.py, modules/kvcache and flashdecode.
    """
    options, degree, kv_heads = case.effective, case.degree, case.model.num_kv_heads or 1
    prompts = {graph.bucket for graph in graphs(case) if graph.kind == "prefill"}
    limits = {graph.bucket for graph in graphs(case) if graph.kind != "prefill"}
    window = options.windowed_context_encoding_size
    steps = (_WINDOW, {window}) if window else (_PROMPTS, prompts)
    group = options.shard_over_sequence and min(degree, case.model.num_heads or 1) // kv_heads
    for name, parts, of, lengths in (
        (_WINDOW, window, _PROMPTS, prompts),
        ("sequence_parallel", options.sequence_parallel and degree, *steps),
        ("cp_degree", options.cp_degree, *steps),
        (_FLASH, group, _PROMPTS, prompts),
        (_FLASH, group, "n_positions", limits),
    ):
        if parts and (uneven := sorted(length for length in lengths if length % parts)):
            most = (options.max_model_len or 0) // parts * parts
            limit = f", to {most} at most" if of == _PROMPTS and uneven[-1] > most else ""
            problem = (
                f"expected multiples of {parts}, and not {join_words(uneven)}; round them up{limit}"
            )
            yield Finding((name, of, _DEGREE), problem)
    if window and case.continuous_batching and max(prompts, default=0) > window:
        problem = "NxD Inference cuts prompts in static batches only; set naive_rolling_batch, or leave it out"
        yield Finding((_WINDOW, "rolling_batch_strategy", "max_rolling_batch_size"), problem)
    if (
        window
        and not case.continuous_batching
        and case.slots > 1
        and max(prompts, default=0) > window
    ):
        problem = (
            f"NxD Inference cuts prompts in static batches only: each prefill takes all {case.slots} slots, and "
            "decoding waits for it; leave it out for continuous batching"
        )
        yield Finding(
            (_WINDOW, "rolling_batch_strategy", "max_rolling_batch_size"), problem, "note"
        )
    name, groups = "attention_dp_degree", options.attention_dp_degree or 1
    if (options.cp_degree or 1) != groups and degree // groups < kv_heads:
        name = name if groups > 1 else "cp_degree"
        problem = f"the {degree // groups} cores of a decode are fewer than the {kv_heads} KV heads; leave it out"
        yield Finding((name, _DEGREE), problem)
    yield from _prompt_kernels(case, max(prompts, default=0), min(prompts, default=0))
    yield from _experts(case, min(prompts, default=0))
    yield from _window(case)
    yield from _flash_decoding(case)
    yield from _lora(case)
    yield from _prefix_caching(case)
    keywords = write_arguments(case).neuron_config
    yield from _no_kernels(case, keywords)
    if options.quantize is not None and case.model.config.get("attention_bias"):
        yield Finding(("quantize",), f"{QUANTISED_BIASES}; leave it out")
    yield from speculation.findings(case)
    yield from contrib_rules.findings(case)
    yield from versions.findings(case, keywords)


def _window(case: Case) -> Iterator[Finding]:
    """Source: models/config.py; of the lengths see `Case.shortest_prompt_graph`."""
    window, size = case.model.sliding_window, case.options.windowed_context_encoding_size
    prompts, least = case.options.context_length_estimate, case.shortest_prompt_graph
    if case.rolling_cache and prompts and prompts[0] < least:
        problem = (
            f"each prefill graph fills a KV cache as long as the model's sliding window ({window} tokens): the first "
            f"must be at least {least}; leave it out, or set n_positions={window} at most"
        )
        yield Finding((_PROMPTS, "n_positions"), problem)
    if case.rolling_cache and case.options.async_execution:
        problem = f"left out: a step ahead overwrites what the sliding window holds; set n_positions={window} at most"
        yield Finding(("async_execution",), problem, "note")
    if case.rolling_cache and size:
        problem = f"NxD Inference fails at a sliding window's ring; leave it out, or set n_positions={window} at most"
        yield Finding((_WINDOW,), problem)
    elif window is not None and size not in {None, window}:
        problem = f"prompts of this model are prefilled by its sliding window of {window} tokens; set {window}"
        yield Finding((_WINDOW,), problem)


def _prefix_caching(case: Case) -> Iterator[Finding]:
    """Source: models/model_wrapper.py, modules/kvcache/block_kv_cache_manager.py and modules/attention."""
    name, options = "enable_prefix_caching", case.effective
    if not options.enable_prefix_caching:
        return
    if (model_type := case.model.model_type) in _WITHOUT_PREFIXES:
        problem = f"{model_type} was never run with it; verify its answers before you rely on them"
        yield Finding((name,), problem, "warning")
    prompts, size = options.context_length_estimate or (0,), options.pa_block_size or 1
    longest = prompts[-1] - prompts[0]
    if case.rolling_cache or case.model.model_type == "gpt_oss":
        problem = (
            "blocks hold no sliding window; leave it out, or set n_positions to the window at most"
        )
        yield Finding((name, "n_positions"), problem)
    if prompts[0] < SMALLEST_BUCKET:
        problem = f"a prompt graph for fewer than {SMALLEST_BUCKET} tokens would take a prefix for a decode; raise it"
        yield Finding((_PROMPTS, name), problem)
    elif not longest:
        problem = "with one length each prompt runs whole; set a shorter one too, or leave prefix caching out"
        yield Finding((_PROMPTS, name), problem)
    uneven = [one for one in (*(options.token_buckets or ()), *prefixes(case)) if one % size]
    if size & (size - 1) or uneven:
        problem = f"a power of two that divides n_positions and prefix_buckets is expected, and not {size}"
        yield Finding(("pa_block_size", "n_positions", "prefix_buckets"), problem)
    if max(prefixes(case), default=0) < longest:
        problem = (
            f"the longest prompt has up to {longest} cached tokens: the last must be at least that"
        )
        yield Finding(("prefix_buckets", _PROMPTS), problem)


def _flash_decoding(case: Case) -> Iterator[Finding]:
    """Check flash decoding: all KV heads need the same number of cores. Source: modules/flashdecode/utils.py."""
    heads, kv_heads = case.model.num_heads, case.model.num_kv_heads
    if not (case.effective.shard_over_sequence and heads and kv_heads):
        return
    splits = case.capability and not case.indivisible(case.degree)
    if splits and min(case.degree, heads) % kv_heads:
        problem = f"the number of cores must be a multiple of the {kv_heads} KV heads; set one, or remove {_FLASH}"
        yield Finding((_FLASH, _DEGREE), problem)


def _lora(case: Case) -> Iterator[Finding]:
    """Source: models/*/modeling_*.py, modules/lora_serving; neuronx-distributed 0.18, parallel_layers/layers.py."""
    options, model, name, layers = case.effective, case.model, "enable_lora", "lora_target_modules"
    if not options.enable_lora:
        return
    known, targets = (
        _ADAPTED.get(model.model_type or "", ()),
        options.lora_target_modules or MODULES,
    )
    if not known:
        yield Finding((name,), f"no {model.model_type} was compared with PEFT; leave it out")
    elif other := [one for one in targets if one not in known]:
        problem = f"no adapters of {join_words(other)} in a {model.model_type}; set some of {join_words(known)}"
        yield Finding((layers,), problem)
    if {*targets} & {*_OF_MLP} and (model.intermediate_size or 0) % case.degree:
        problem = f"cores have to divide the {model.intermediate_size} columns of the MLP evenly; set another degree"
        yield Finding((_DEGREE, name), problem)
    if options.lora_shard_linear_layer and (model.hidden_size or 0) % case.degree:
        problem = f"cores have to divide {model.hidden_size} columns evenly; leave it out"
        yield Finding(("lora_shard_linear_layer", _DEGREE), problem)
    if case.library_version and versions.numbers(case.library_version) < (0, 8):
        yield from _before_0_8(case)


def _before_0_8(case: Case) -> Iterator[Finding]:
    name, fix = "enable_lora", "install 0.8 or a later one"
    if case.model.config.get("attention_bias"):
        problem = (
            f"NxD Inference {case.library_version} loses the biases of layers with adapters; {fix}"
        )
        yield Finding((name,), problem)
    if case.effective.enable_prefix_caching:
        problem = f"NxD Inference {case.library_version} takes no adapters with blocks; {fix}"
        yield Finding((name, "enable_prefix_caching"), problem)


def _no_kernels(case: Case, keywords: Mapping[str, object]) -> Iterator[Finding]:
    """Warn of kernels that the installed version lacks, or newer ones. Source: release notes of Neuron SDK 2.29."""
    family = case.device.family
    objects = [value for value in keywords.values() if isinstance(value, Mapping)]
    names = {
        OPTIONS.get(name, OVERRIDE): None
        for given in (keywords, *objects)
        for name, value in given.items()
        if value is True and (name.endswith("_kernel_enabled") or name == "use_index_calc_kernel")
    }
    if names and not versions.has_kernels(family or "", case.library_version):
        problem = (
            f"NxD Inference has no kernels on {family} since Neuron SDK 2.29; leave it out, or stay with SDK 2.28 "
            "(https://github.com/aws-neuron/aws-neuron-sdk/issues/1322)"
        )
        yield Finding(tuple(names), problem, "warning")


def _prompt_kernels(case: Case, longest: int, shortest: int) -> Iterator[Finding]:
    """Source: modules/attention/attention_base.py, perform_prefill and the two functions for its strategy."""
    options, ranks = case.effective, case.effective.cp_degree or 1
    kernel, strided = "attn_kernel_enabled", "strided_context_parallel_kernel_enabled"
    least = 512 if options.attn_kernel_enabled else 4096
    on_trn1 = case.device.family == "trn1" and options.attn_kernel_enabled is not False
    if case.rolling_cache and on_trn1 and ranks == 1 and longest >= least:
        problem = (
            f"on trn1 the kernel for prompts, which NxD Inference takes from {least} tokens on, has no sliding window: "
            f"it would stop; set {kernel}=false, or n_positions={case.model.sliding_window} at most"
        )
        yield Finding((kernel, "n_positions"), problem)
    single = case.device.family in {"inf2", "trn1"} or options.logical_nc_config == 1
    size = case.model.head_dim or 0
    unusable = single or case.rolling_cache or shortest // ranks <= size
    if options.strided_context_parallel_kernel_enabled and ranks > 1 and unusable:
        problem = (
            "the kernel needs two physical cores that act as one, no sliding window, and more than "
            f"{size * ranks} tokens in each prefill graph: it would stop; leave it out"
        )
        yield Finding((strided, "cp_degree", _PROMPTS), problem)


def _experts(case: Case, shortest: int) -> Iterator[Finding]:
    """Source: modules/moe_v2.py, and neuronx-distributed 0.18, modules/moe/expert_mlps_v2.py."""
    options, experts = case.effective, case.model.num_experts
    rows = min((*(options.token_generation_batches or ()), case.slots))
    each = first_size(case.model.config, "num_experts_per_tok") or 1
    chosen, block = rows * each, (options.blockwise_matmul_config or {}).get("block_size", 512)
    given = {name: getattr(options, name) for name in ("moe_tp_degree", "moe_ep_degree")}
    known = [f"moe_{part}_{kind}_degree" for part in ("cte", "tkg") for kind in ("tp", "ep")]
    for name, value in (options.hybrid_sharding_config or {}).items():
        if name not in known:
            problem = f"{shortened(name)} is no key of it; expected {join_words(known)}{did_you_mean(name, known)}"
            yield Finding(("hybrid_sharding_config",), problem)
            return
        if type(value) is not int or value < 1:
            problem = f"{shortened(name)} is {shortened(repr(value))}; expected a whole number of at least 1"
            yield Finding(("hybrid_sharding_config",), problem)
            return
        given[name] = value
    for part in ("moe", "moe_cte", "moe_tkg"):
        cores, groups = (given.get(f"{part}_{kind}_degree") or 1 for kind in ("tp", "ep"))
        name = "moe_ep_degree" if part == "moe" else "hybrid_sharding_config"
        if cores * groups not in {1, case.degree}:
            problem = (
                f"{_DEGREE} must be {cores * groups}, the product of {part}_ep_degree={groups} and "
                f"{part}_tp_degree={cores}; change one of them"
            )
            yield Finding((name, _DEGREE), problem)
        elif experts % groups or (groups > 1 and part != "moe_cte" and chosen < experts):
            problem = (
                f"the groups must divide the {experts} experts, and decode steps choose as many; {rows} rows choose "
                f"{chosen}: set a divisor and more slots, or leave it out"
            )
            yield Finding((name, "max_rolling_batch_size"), problem)
        elif groups > 1 and part != "moe_tkg" and shortest * each < block:
            problem = (
                f"a prefill graph of {shortest} tokens would stop: with groups its tokens choose {block} experts at "
                f"least, {each} each; set {_PROMPTS} to {-(-block // each)} at least, or leave it out"
            )
            yield Finding((name, _PROMPTS), problem)
