"""What options, model and machine do not allow together, or what it costs: judged once every value is filled in."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

from djl_python_neuronx.config import defects, memory, placement
from djl_python_neuronx.config.capabilities import CAPABILITIES, TNX_UNREADABLE, Capability
from djl_python_neuronx.config.findings import Finding, asked
from djl_python_neuronx.config.instances import GIB, DeviceInfo, on_single_cores
from djl_python_neuronx.config.mapping import (
    continuous_batching,
    drafting,
    honoured,
    speculating,
    unmapped,
)
from djl_python_neuronx.config.memory import Load
from djl_python_neuronx.config.model import ModelFacts
from djl_python_neuronx.config.options import ServingOptions, option
from djl_python_neuronx.config.rules import OPEN, library_conflicts

DJL_ROWS = 32
"""Rows that DJL Serving's rolling batch sends unless max_rolling_batch_size is written. Source: RollingBatch.java."""

_LIBRARIES: Mapping[str, str] = MappingProxyType(
    {"tnx": "transformers-neuronx", "nxdi": "NxD Inference"}
)
_ON_CPU = frozenset(
    {
        *("context_length_estimate", "dtype", "enable_chunked_prefill"),
        *("max_rolling_batch_size", "n_positions", "speculative_length"),
        *("speculative_draft_model", "ngram_prompt_lookup_max", "enable_eagle_speculation"),
    }
)
"""Options of the libraries that mean the same on a CPU, or are refused there."""
_MOST_THREADS_PER_CPU = 4
"""Some thousand threads exhaust the process's limit, and torch then crashes."""
_SLOTS = "max_rolling_batch_size"
_JOIN_WAIT = "max_join_wait_ms"
_DRAFT, _LOOKUP = "speculative_draft_model", "ngram_prompt_lookup_max"


def findings(
    options: ServingOptions,
    facts: ModelFacts,
    device: DeviceInfo,
    loader: str,
    *,
    draft: ModelFacts | None = None,
    estimated_load_s: float | None = None,
    filled: Collection[str] = (),
) -> Iterator[Finding]:
    """Everything that needs facts, and the rules of the library that was chosen.

    `options` are filled in, `filled` names the values that `defaults.fill` gave. `draft` are the facts of the draft
    model where they are known, `estimated_load_s` the seconds that loading is expected to take without a cache.
    """
    yield from _lengths(options, facts, filled)
    yield from _useless(options, facts, loader)
    yield from _steps(options, loader)
    if loader == "cpu":
        yield from _djl(options, filled)
        yield from _cpu(options)
        yield from _drafts(options, facts, draft)
        yield from _host(options, facts, device, draft)
        return
    device = on_single_cores(device, options.logical_nc_config)
    capability = CAPABILITIES[loader].get(facts.model_type or "")
    used = honoured(options, capability)
    if placement.fits(used, facts, device, loader, draft) is not False:
        # What is only good to know of a plan is not worth a word where there is no plan.
        yield from _djl(options, filled)
        yield from _patience(options, estimated_load_s)
    yield from _workers(options, device)
    yield from library_conflicts(used, loader)
    yield from _no_equivalent(options, loader)
    yield from _foreign_graphs(options, loader)
    if capability is None:
        yield _unknown(facts, loader)
        return
    yield from _architecture(options, facts, loader, capability)
    yield from _batching(options, facts, loader, capability)
    yield from _buckets(options, facts, loader, capability, filled)
    yield from _speculation(options, facts, draft, loader, capability)
    yield from _window(options, facts, loader)
    yield from defects.findings(options, facts, capability)
    yield from defects.of_model(options, facts, loader)
    yield from _sampling(options, facts)
    yield from placement.findings(used, facts, device, loader, draft)


def _lengths(
    options: ServingOptions, facts: ModelFacts, filled: Collection[str]
) -> Iterator[Finding]:
    limit, length = facts.max_positions, options.max_model_len
    if not limit:
        return
    problem = f"the model was made for {limit} positions; set at most that"
    if length and length > limit:
        yield Finding(("n_positions",), problem)
    longest = (options.context_length_estimate or (0,))[-1]
    # Prompts as long as a sequence mostly follow from it, and one word is enough for both.
    if longest > limit and longest != length and "context_length_estimate" not in filled:
        yield Finding(("context_length_estimate",), problem)


def _useless(options: ServingOptions, facts: ModelFacts, loader: str) -> Iterator[Finding]:
    if loader != "cpu" and options.cpu_threads is not None:
        problem = "only the cpu loader computes on the CPU; leave it out"
        yield Finding(("cpu_threads",), problem, "note")
    capability = CAPABILITIES.get(loader, {}).get(facts.model_type or "")
    able = capability is None or capability.continuous_batching
    several = (options.max_rolling_batch_size or 1) > 1
    static = loader != "cpu" and several and not (able and continuous_batching(options))
    if asked(options, _JOIN_WAIT) and not static:
        problem = "it is for static batches, and here a sequence joins at no cost to the others; leave it out"
        yield Finding((_JOIN_WAIT,), problem, "note")


def _steps(options: ServingOptions, loader: str) -> Iterator[Finding]:
    """Source: transformers-neuronx 0.13, decoder.py: a graph takes its rows' number from no more than its tokens."""
    steps, slots = options.context_length_estimate, options.max_rolling_batch_size or 1
    if not options.enable_chunked_prefill or not steps:
        return
    names = ("context_length_estimate", "enable_chunked_prefill", _SLOTS)
    told = "with prompts in chunks these are the tokens of a step, one of each slot among them"
    limit = options.max_model_len
    if steps[-1] <= slots and limit and limit <= slots:
        problem = (
            f"{told}, and there are at most {limit}, which leaves no room for chunks; lower {_SLOTS} below {limit}, or "
            f"raise n_positions above {slots}"
        )
        yield Finding((*names, "n_positions"), problem)
    elif steps[-1] <= slots:
        yield Finding(names, f"{told}; the last has to be above {slots}, to leave room for chunks")
    elif loader == "tnx" and steps[0] < max(slots, 2):
        yield Finding(names, f"{told}; each of them has to be at least {max(slots, 2)}")


def _djl(options: ServingOptions, filled: Collection[str]) -> Iterator[Finding]:
    slots = options.max_rolling_batch_size or DJL_ROWS
    if options.rolling_batch in {"tnx", "vllm"} and _SLOTS in filled and slots < DJL_ROWS:
        problem = (
            f"DJL Serving sends up to {DJL_ROWS} rows unless it is told another number, and {DJL_ROWS - slots} of them "
            f"would wait for a slot until predict_timeout; write option.max_rolling_batch_size={slots}"
        )
        yield Finding((_SLOTS,), problem, "note")


def _cpu(options: ServingOptions) -> Iterator[Finding]:
    left = tuple(
        name
        for name in ServingOptions.model_fields
        if option(name).to and name not in _ON_CPU and asked(options, name)
    )
    if options.tensor_parallel_degree == 1:
        # What a CPU is filled in with.
        left = tuple(name for name in left if name != "tensor_parallel_degree")
    if left:
        problem = (
            "of no use to the cpu loader, which compiles no graph and uses no NeuronCore; left out"
        )
        yield Finding(left, problem, "note")

    if options.enable_eagle_speculation:
        problem = (
            "the cpu loader runs no EAGLE model, whose drafts need the hidden states of the large one; leave it out, "
            "and give a draft model that drafts by itself"
        )
        yield Finding(("enable_eagle_speculation",), problem)


def _host(
    options: ServingOptions, facts: ModelFacts, device: DeviceInfo, draft: ModelFacts | None
) -> Iterator[Finding]:
    """What the cpu loader's machine cannot hold or do. A Neuron machine tells its devices' memory, not its own."""
    threads = options.cpu_threads or 0
    if threads > _MOST_THREADS_PER_CPU * device.cpus > 0:
        problem = f"there are {device.cpus} CPUs, and more threads only wait for each other; set at most that"
        yield Finding(("cpu_threads",), problem)
    if facts.num_parameters is None or device.has_neuron or not device.memory_bytes:
        return
    load = Load.of(options, "cpu", draft)
    size = memory.needed(facts, load, degree=1, core_memory_bytes=device.memory_bytes, loader="cpu")
    if not size.fits:
        problem = (
            f"does not fit: needs {size.needed / GIB:.2f} GiB, and this machine has {size.capacity / GIB:.2f} GiB; set "
            "less, or take a machine with more memory"
        )
        yield Finding(("n_positions", _SLOTS), problem)


def _patience(options: ServingOptions, estimated_load_s: float | None) -> Iterator[Finding]:
    if (
        estimated_load_s is None
        or options.compiled_graph_path is not None
        or estimated_load_s <= options.model_loading_timeout
    ):
        return
    problem = (
        f"compiling takes some {estimated_load_s / 60:.0f} minutes if no cache has the graphs, and DJL Serving ends "
        f"a load after this; set at least {2 * estimated_load_s:.0f}, or compile beforehand"
    )
    yield Finding(("model_loading_timeout",), problem, "warning")


def _workers(options: ServingOptions, device: DeviceInfo) -> Iterator[Finding]:
    workers = options.compilation_worker_count
    if workers is not None and 0 < device.cpus < workers:
        problem = (
            f"there are {device.cpus} CPUs, and each compiler keeps one busy; set at most that"
        )
        yield Finding(("compilation_worker_count",), problem, "warning")


def _foreign_graphs(options: ServingOptions, loader: str) -> Iterator[Finding]:
    if loader == "nxdi" and options.compiled_graph_path and options.model_loader in OPEN:
        problem = (
            "this model is loaded by NxD Inference, and graphs that transformers-neuronx compiled do not fit it: they "
            "would all be compiled anew. If they are its graphs, set model_loader=tnx; else set model_loader=nxdi"
        )
        yield Finding(("compiled_graph_path", "model_loader"), problem, "warning")


def _no_equivalent(options: ServingOptions, loader: str) -> Iterator[Finding]:
    names = unmapped(options, loader)
    library = _LIBRARIES[loader]
    if left := tuple(name for name in names if option(name).tunes):
        problem = f"{library} has no equivalent; left out, which changes speed and memory only"
        yield Finding(left, problem, "note")
    for name in names:
        if not option(name).tunes:
            known = next(iter(option(name).to))
            problem = f"{library} has no equivalent; remove it, or set model_loader={known}"
            yield Finding((name,), problem)


def _unknown(facts: ModelFacts, loader: str) -> Finding:
    asked = facts.model_type or "(config.json names none)"
    known = ", ".join(sorted(CAPABILITIES[loader]))
    others = [other for other in CAPABILITIES if facts.model_type in CAPABILITIES[other]]
    fix = " or ".join(f"model_loader={other}" for other in [*others, "cpu"])
    reason = TNX_UNREADABLE.get(asked) if loader == "tnx" else None
    lack = (
        f"reads no checkpoint of {asked}: {reason}"
        if reason
        else f"has no class for model_type {asked}"
    )
    problem = f"{_LIBRARIES[loader]} {lack}; it knows {known}. Set {fix}"
    return Finding(("model_loader",), problem)


def _architecture(
    options: ServingOptions, facts: ModelFacts, loader: str, capability: Capability
) -> Iterator[Finding]:
    whose = f"the code of {_LIBRARIES[loader]} for {facts.model_type}"
    if not capability.verified:
        problem = (
            f"{whose} was read and never seen to run; compare its answers before relying on them"
        )
        yield Finding(("model_loader",), problem, "note")
    unread = [
        name
        for name in ServingOptions.model_fields
        if name in capability.unread and asked(options, name)
    ]
    if left := tuple(name for name in unread if option(name).tunes):
        problem = f"{whose} cannot use it; left out, which changes speed and memory only"
        yield Finding(left, problem, "note")
    for name in unread:
        if not option(name).tunes:
            yield Finding((name,), f"{whose} cannot use it; remove it")
    layouts = (options.collectives_layout, options.attention_layout)
    if capability.collectives_follow and layouts[0] == "BSH" and layouts[1] != "BSH":
        problem = f"{capability.collectives_follow}; set attention_layout=BSH too, or leave it out"
        yield Finding(("collectives_layout", "attention_layout"), problem)
    for name, reason in capability.refused.items():
        # attention_layout has a harmless value too: the library's own.
        if asked(options, name) and getattr(options, name) != "HSB":
            yield Finding((name,), f"{reason}; {_way_out(name, facts, loader)}")


def _way_out(name: str, facts: ModelFacts, loader: str) -> str:
    """What to do about an option that a library refuses for an architecture."""
    for other, its in CAPABILITIES.items():
        entry = its.get(facts.model_type or "")
        able = entry is not None and name not in {*entry.unread, *entry.refused}
        if other != loader and able and other in option(name).to:
            return f"remove it, or set model_loader={other}"
    more = ", and take more cores if the model does not fit then" if name == "quantize" else ""
    return f"remove it{more}"


def _batching(
    options: ServingOptions, facts: ModelFacts, loader: str, capability: Capability
) -> Iterator[Finding]:
    library, whose = _LIBRARIES[loader], facts.model_type
    if capability.continuous_batching:
        # Asked for by name, continuous batching and left padding are a rule of their own.
        left = options.padding_side == "left" and options.rolling_batch_strategy is None
        if loader == "tnx" and left and continuous_batching(options):
            problem = "continuous batching pads on the right; leave padding_side out"
            yield Finding(("padding_side", _SLOTS), problem)
        if loader == "tnx" and options.padding_side == "right" and not continuous_batching(options):
            yield Finding(("padding_side",), "static batches pad on the left; leave it out")
        return
    if options.rolling_batch_strategy == "continuous_batching":
        problem = f"{library} has none for {whose}; leave it out"
        yield Finding(("rolling_batch_strategy",), problem)
    elif continuous_batching(options) and (
        options.rolling_batch != "disable" or options.async_mode
    ):
        how = "anew" if capability.context_buckets else "anew, token by token"
        problem = (
            f"{library} has no continuous batching for {whose}: static batches are served, and when a sequence joins, "
            f"all of them are encoded {how}"
        )
        yield Finding((_SLOTS,), problem, "note")
    if options.padding_side == "right":
        problem = f"{library} pads {whose} on the left; leave it out"
        yield Finding(("padding_side",), problem)
    if options.cache_layout == "BSH" and "cache_layout" not in capability.unread:
        problem = f"the BSH cache needs continuous batching, which {library} has not for {whose}"
        yield Finding(("cache_layout",), f"{problem}; leave it out")


def _buckets(
    options: ServingOptions,
    facts: ModelFacts,
    loader: str,
    capability: Capability,
    filled: Collection[str],
) -> Iterator[Finding]:
    library, whose = _LIBRARIES[loader], facts.model_type
    if not capability.token_buckets and len(options.token_buckets or ()) > 1:
        problem = f"{library} takes one length for {whose}; set the largest alone"
        yield Finding(("n_positions",), problem)
    prompts = options.context_length_estimate
    if not capability.context_buckets and prompts and "context_length_estimate" not in filled:
        problem = (
            f"{library} compiles no prompt graph for {whose}: prompts run token by token; left out"
        )
        yield Finding(("context_length_estimate",), problem, "warning")


def _speculation(
    options: ServingOptions,
    facts: ModelFacts,
    draft: ModelFacts | None,
    loader: str,
    capability: Capability,
) -> Iterator[Finding]:
    if not speculating(options):
        return
    library = _LIBRARIES[loader]
    if not capability.speculation and _DRAFT not in capability.refused:
        able = sorted(name for name, entry in CAPABILITIES[loader].items() if entry.speculation)
        problem = f"{library} does not speculate for {facts.model_type}, only for {', '.join(able)}; remove it"
        yield Finding((_DRAFT if drafting(options) else _LOOKUP,), problem)
    if draft is None:
        return
    drafts = CAPABILITIES[loader].get(draft.model_type or "")
    if drafts is None:
        problem = (
            f"{library} has no class for the draft model's type {draft.model_type}; take another"
        )
        yield Finding((_DRAFT,), problem)
    elif not drafts.continuous_batching:
        problem = f"{library} runs {draft.model_type} in static batches only, whose rows share a position; take another"
        yield Finding((_DRAFT,), problem)
    yield from _drafts(options, facts, draft)


def _drafts(
    options: ServingOptions, facts: ModelFacts, draft: ModelFacts | None
) -> Iterator[Finding]:
    """Whether the two models have the same tokens, and positions enough."""
    if draft is None or not drafting(options):
        return
    if draft.vocab_size and facts.vocab_size and draft.vocab_size != facts.vocab_size:
        problem = (
            f"its vocabulary has {draft.vocab_size} tokens and the model's {facts.vocab_size}: drafts would mean other "
            "tokens; take a draft model of the same vocabulary"
        )
        yield Finding((_DRAFT,), problem)
    length = options.max_model_len or 0
    if draft.max_positions and length > draft.max_positions:
        problem = f"the draft model was made for {draft.max_positions} positions; set at most that, or take another"
        yield Finding(("n_positions", _DRAFT), problem)


def _window(options: ServingOptions, facts: ModelFacts, loader: str) -> Iterator[Finding]:
    """Source: neuronx-distributed-inference 0.9, models/config.py and modules/attention/attention_base.py."""
    window, size = facts.sliding_window, options.windowed_context_encoding_size
    if loader != "nxdi" or window is None:
        return
    if size is not None and size != window:
        problem = f"prompts of this model are encoded by its sliding window of {window} tokens; set {window}"
        yield Finding(("windowed_context_encoding_size",), problem)
    kernels = ("attn_block_tkg_nki_kernel_enabled", "attn_block_tkg_nki_kernel_cascaded_attention")
    if speculating(options) and not all(getattr(options, name) for name in kernels):
        problem = f"with a sliding window speculation needs {' and '.join(kernels)}; set both, or leave the draft out"
        yield Finding((_DRAFT, *kernels), problem)


def _sampling(options: ServingOptions, facts: ModelFacts) -> Iterator[Finding]:
    sampled = options.on_device_generation
    if sampled is None or options.output_logits:
        return
    if not sampled.dynamic:
        served = "the compiled-in parameters" if sampled.do_sample else "the most probable token"
        what = f"every request gets {served}, and one that asks for another answers 400"
    else:
        most = min(sampled.global_top_k or 256, facts.vocab_size or 256)
        hosts = f"seeds, penalties, min_p, log-probabilities, top_k above {most}"
        likely = f"the {most} most likely tokens"
        if options.on_device_default_top_k is None:
            hosts += ", sampling without top_k"
            default = f"on_device_default_top_k=global_top_k samples without top_k among {likely}"
        else:
            default = f"sampling without top_k is among {likely}"
        what = f"requests that only the host can serve ({hosts}) answer 400; {default}"
    yield Finding(
        ("on_device_generation",), f"the device gives tokens and no logits: {what}", "note"
    )
