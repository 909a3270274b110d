"""Findings that need the model, the machine or the backend: `findings` judges a case whose options are filled in."""

from __future__ import annotations

from collections.abc import Iterator

from djl_python_neuronx.config.findings import Finding, is_set
from djl_python_neuronx.config.keywords import OPTIONS, OVERRIDE, RESERVED
from djl_python_neuronx.config.options import ServingOptions, option
from djl_python_neuronx.config.step_times import StepTimes
from djl_python_neuronx.errors import did_you_mean
from djl_python_neuronx.planning import placement
from djl_python_neuronx.planning.capabilities import Capability, Defect
from djl_python_neuronx.planning.case import Case, NeuronBackend
from djl_python_neuronx.planning.fields import unusual_fields
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS, capability_of
from djl_python_neuronx.planning.machines import GIB
from djl_python_neuronx.planning.memory import core_memory
from djl_python_neuronx.planning.rules import OPEN, broken_rules
from djl_python_neuronx.sampling import SamplingParams

DJL_ROWS = 32
"""Rows that DJL Serving's rolling batch sends unless max_rolling_batch_size is set. Source: RollingBatch.java."""

_SLOTS = "max_rolling_batch_size"
_JOIN_WAIT = "max_join_wait_ms"
_STEP_MS = "sim_step_ms"
_DRAFT, _LOOKUP = "speculative_draft_model", "ngram_prompt_lookup_max"
_ROUNDING = ("bf16_rms_norm", "enable_mixed_precision_accumulation", "enable_saturate_infinity")
_KEYWORDS = sorted({keyword.partition(".")[0] for keyword in OPTIONS})
_MOST_THREADS_PER_CPU = 4
"""Some thousand threads exhaust the process's limit, and torch then crashes."""


def findings(case: Case, *, estimated_load_s: float | None = None) -> Iterator[Finding]:
    """Yield the findings about a case. `estimated_load_s`: seconds to load without a compile cache."""
    yield from _lengths(case)
    yield from _no_effect(case)
    yield from _steps(case)
    neuron = case.neuron
    if neuron is None:
        yield from _djl(case)
        yield from _speculation(case)
        yield from _cpu(case)
        if case.options.simulated:
            yield from _simulated(case)
        return
    if placement.fits(case) is not False:
        # Notes about a plan that cannot be carried out would distract.
        yield from _djl(case)
        yield from _load_time(case, estimated_load_s)
    yield from _compilers(case)
    # The layout that enable_chunked_prefill implies: that option's own rules give the reason.
    implied = {"cache_layout"}.intersection(case.filled)
    rules = (rule for rule in neuron.rules if implied.isdisjoint(rule.names))
    yield from broken_rules(rules, case.effective)
    yield from overrides(case.options)
    yield from _foreign_graphs(case, neuron)
    yield from _no_equivalent(case)
    if case.capability is None:
        yield _unknown_architecture(case, neuron)
        return
    yield from _architecture(case, case.capability)
    yield from _batching(case, case.capability)
    yield from _buckets(case, case.capability)
    yield from _speculation(case)
    yield from _defects(case, case.capability)
    yield from neuron.findings(case)
    yield from _device_sampling(case, neuron)
    yield from placement.findings(case)


def use_backend(*backends: str, other: str = "") -> str:
    """Advise `other`, or one of the backends."""
    named = " or ".join(f"model_loader={name}" for name in backends)
    return ", or ".join(filter(None, (other, named and f"set {named}")))


def overrides(options: ServingOptions) -> Iterator[Finding]:
    """Yield a note with the keywords in `override_neuron_config` that have no option."""
    for name in options.override_neuron_config or {}:
        if name in RESERVED:
            continue  # refused where it was read
        hint = "" if name in _KEYWORDS else did_you_mean(name, _KEYWORDS)
        yield Finding((OVERRIDE,), f"{name}: checked when the model loads{hint}", "note")


def unsupported_options(options: ServingOptions, backend: str) -> tuple[str, ...]:
    """Return the options that are set and have no equivalent in the library of a backend.

    Those whose marker has `tunes` are to be left out, the others refused. Options of the server alone, and values that
    the library uses anyway, are not among them.
    """
    return tuple(
        name
        for name in NEURON_BACKENDS[backend].missing
        if is_set(options, name) and getattr(options, name) != option(name).always.get(backend)
    )


def _lengths(case: Case) -> Iterator[Finding]:
    limit, length = case.model.max_positions, case.options.max_model_len
    if not limit:
        return
    problem = f"the model supports {limit} positions; set at most that"
    if length and length > limit:
        yield Finding(("n_positions",), problem)
    longest = (case.options.context_length_estimate or (0,))[-1]
    # Prompts as long as a sequence usually follow from it: one finding is enough.
    if longest > limit and longest != length and "context_length_estimate" not in case.filled:
        yield Finding(("context_length_estimate",), problem)


def _no_effect(case: Case) -> Iterator[Finding]:
    simulated = case.options.simulated
    if (not case.on_cpu or simulated) and case.options.cpu_threads is not None:
        problem = "only the cpu backend computes on the CPU; leave it out"
        yield Finding(("cpu_threads",), problem, "note")
    if is_set(case.options, _STEP_MS) and not simulated:
        problem = "only steps of model_loader=sim have a time that is set; leave it out"
        yield Finding((_STEP_MS,), problem, "note")
    static = not case.on_cpu and case.slots > 1 and not case.continuous_batching
    if is_set(case.options, _JOIN_WAIT) and not static:
        problem = "no effect: only static batches wait for more requests; leave it out"
        yield Finding((_JOIN_WAIT,), problem, "note")


def _steps(case: Case) -> Iterator[Finding]:
    """Source: transformers-neuronx 0.13, decoder.py: a graph has at least as many tokens as rows."""
    options, slots = case.effective, case.slots
    steps, limit = options.context_length_estimate, options.max_model_len
    if not options.enable_chunked_prefill or not steps:
        return
    names = ("context_length_estimate", "enable_chunked_prefill", _SLOTS)
    what = "with enable_chunked_prefill these are the tokens of a step, including one of each slot"
    if steps[-1] <= slots and limit and limit <= slots:
        problem = (
            f"{what}, and n_positions={limit} leaves no room for chunks; lower {_SLOTS} below {limit}, or "
            f"raise n_positions above {slots}"
        )
        yield Finding((*names, "n_positions"), problem)
    elif steps[-1] <= slots:
        yield Finding(names, f"{what}; the last must be above {slots} to leave room for chunks")
    elif not case.on_cpu and steps[0] < max(slots, 2):
        yield Finding(names, f"{what}; each must be at least {max(slots, 2)}")


def _djl(case: Case) -> Iterator[Finding]:
    slots = case.options.max_rolling_batch_size or DJL_ROWS
    by_rows = case.options.rolling_batch == "tnx"  # `djl_serving` warns of the rows of vllm
    if by_rows and _SLOTS in case.filled and slots < DJL_ROWS:
        problem = (
            f"DJL Serving sends up to {DJL_ROWS} rows by default, and {DJL_ROWS - slots} of them would wait for a slot "
            f"until queue_timeout; write option.max_rolling_batch_size={slots}"
        )
        yield Finding((_SLOTS,), problem, "note")


def _load_time(case: Case, estimated_load_s: float | None) -> Iterator[Finding]:
    # A draft model loads within the timeout of the model that it drafts for.
    if estimated_load_s is None or case.is_draft or case.compiled:
        return
    if case.options.compiled_graph_path is not None:
        return
    if estimated_load_s > case.options.model_loading_timeout:
        problem = (
            f"compiling takes about {estimated_load_s / 60:.0f} minutes without a compile cache, and DJL Serving stops "
            f"the load after {case.options.model_loading_timeout} s; set at least {2 * estimated_load_s:.0f}, or "
            "compile beforehand"
        )
        yield Finding(("model_loading_timeout",), problem, "warning")


def _compilers(case: Case) -> Iterator[Finding]:
    workers, cpus = case.options.compilation_worker_count, case.device.cpus
    if workers is not None and 0 < cpus < workers:
        problem = f"each compiler uses one of the {cpus} CPUs; set at most {cpus}"
        yield Finding(("compilation_worker_count",), problem, "warning")


def _foreign_graphs(case: Case, neuron: NeuronBackend) -> Iterator[Finding]:
    """Warn of a folder whose graphs another library may have compiled, which `auto` prefers less."""
    order = list(NEURON_BACKENDS.values())
    others = order[order.index(neuron) + 1 :]
    named = case.options.compiled_graph_path and not case.foreign_graphs
    for other in others if named and case.options.model_loader in OPEN else ():
        if case.model.model_type in other.architectures:
            problem = (
                f"this model is loaded by {neuron.library}, which cannot use graphs that {other.library} compiled: all "
                f"would be compiled again. If they are graphs of {other.library}, {use_backend(other.name)}; else "
                f"{use_backend(neuron.name, other='leave it out')}"
            )
            yield Finding(("compiled_graph_path", "model_loader"), problem, "warning")


def _device_sampling(case: Case, neuron: NeuronBackend) -> Iterator[Finding]:
    sampled = case.options.on_device_generation
    if sampled is None:
        return
    hosts = ", ".join((*SamplingParams.HOST_NAMES, *neuron.host_samples, "details"))
    if case.options.output_logits:
        problem = f"the host samples for requests with {hosts} (sent, or from generation_config.json) or without top_k"
        if sampled.dynamic:
            yield Finding(("output_logits",), problem, "note")
        return
    if not sampled.dynamic:
        served = "the compiled-in parameters" if sampled.do_sample else "the most probable token"
        effect = (
            f"every request gets {served}, and a request for anything else is answered with 400"
        )
    else:
        most = min(sampled.global_top_k or 256, case.model.vocab_size or 256)
        hosts += f", top_k above {most}"
        likely = f"the {most} most likely tokens"
        if case.options.on_device_default_top_k is None:
            hosts += ", sampling without top_k except on OpenAI's routes"
            default = f"on_device_default_top_k=global_top_k samples without top_k among {likely}"
        else:
            default = f"sampling without top_k is among {likely}"
        effect = f"requests that only the host can serve ({hosts}) answer 400; {default}"
    problem = f"the device returns tokens and no logits: {effect}"
    yield Finding(("on_device_generation",), problem, "note")


def _cpu(case: Case) -> Iterator[Finding]:
    options, device = case.options, case.device
    ignored = tuple(
        name
        for name in ServingOptions.model_fields
        if option(name).to
        and not option(name).cpu
        and is_set(options, name)
        # 1 is the default on a CPU.
        and not (name == "tensor_parallel_degree" and options.tensor_parallel_degree == 1)
    )
    if ignored:
        problem = f"no effect with the {case.backend} backend, which compiles no graph and uses no NeuronCore; left out"
        yield Finding(ignored, problem, "note")
    if case.model.config.get("quantization_config"):
        problem = (
            "config.json has quantization_config: transformers needs the packages of its method, and some need a GPU; "
            "set dequantize=true, or take the model's checkpoint that is not quantised"
        )
        yield Finding(("model_loader",), problem, "warning")
    if options.replicas == "max":
        yield Finding(("replicas",), "1 on a CPU, where no cores limit it; set a number", "note")
    if (options.cpu_threads or 0) > _MOST_THREADS_PER_CPU * device.cpus > 0:
        problem = f"more threads than the {device.cpus} CPUs only slow each other down; set at most {device.cpus}"
        yield Finding(("cpu_threads",), problem)
    memory = core_memory(case)
    if memory is not None and not memory.fits:
        each, copies = (" for each copy", ("replicas",)) if options.replicas != 1 else ("", ())
        problem = (
            f"does not fit: needs {memory.needed / GIB:.2f} GiB, and this machine has {memory.capacity / GIB:.2f} GiB"
            f"{each}; set less, or use a machine with more memory"
        )
        yield Finding(("n_positions", _SLOTS, *copies), problem)


def _simulated(case: Case) -> Iterator[Finding]:
    options = case.options
    if not case.model.vocab_size:
        yield Finding(
            ("model_loader",), "config.json gives no vocab_size; add the number of logits"
        )
    problem = "no model runs, and all answers are made up: for load tests alone"
    yield Finding(("model_loader",), problem, "warning")
    if options.speculating:
        source = _DRAFT if options.drafting else _LOOKUP
        yield Finding((source,), "model_loader=sim verifies no drafts; leave it out")
    times, limit = options.sim_step_ms, options.max_model_len or 0
    if isinstance(times, StepTimes):
        longest = {"prefill": (options.context_length_estimate or (limit,))[-1], "decode": limit}
        for part, length in longest.items():
            if length > max(getattr(times, part)):
                yield Finding((_STEP_MS,), f"{part} has no time for {length} tokens; add one")


def _no_equivalent(case: Case) -> Iterator[Finding]:
    names = unsupported_options(case.options, case.backend)
    if ignored := tuple(name for name in names if option(name).tunes):
        problem = f"{case.library} has no equivalent; left out, which changes speed and memory only"
        yield Finding(ignored, problem, "note")
    for name in names:
        if name in _ROUNDING:
            problem = f"{case.library} has no equivalent; left out, which changes rounding and overflows only"
            yield Finding((name,), problem, "warning")
        elif not option(name).tunes:
            yield Finding((name,), f"{case.library} has no equivalent; remove it")


def _unknown_architecture(case: Case, neuron: NeuronBackend) -> Finding:
    model_type = case.model.model_type or "(config.json names none)"
    known = ", ".join(sorted(neuron.architectures))
    others = [
        name
        for name, facts in NEURON_BACKENDS.items()
        if case.model.model_type in facts.architectures
    ]
    refused = neuron.not_served.get(model_type)
    served = f"a class that {refused}," if refused else "no class"
    problem = (
        f"{case.library} has {served} for model_type {model_type}; supported types: {known}; "
        f"{use_backend(*others, 'cpu')}"
    )
    return Finding(("model_loader",), problem)


def _architecture(case: Case, capability: Capability) -> Iterator[Finding]:
    options, model_type = case.options, case.model.model_type
    code = f"the code of {case.library} for {model_type}"
    if not capability.verified:
        problem = f"{code} was read but never run; verify its answers before you rely on them"
        yield Finding(("model_loader",), problem, "note")
    unused = [
        name
        for name in ServingOptions.model_fields
        if name in capability.ignored_options and is_set(options, name)
    ]
    if ignored := tuple(name for name in unused if option(name).tunes):
        problem = f"{code} cannot use it; left out, which changes speed and memory only"
        yield Finding(ignored, problem, "note")
    for name in unused:
        if not option(name).tunes:
            yield Finding((name,), f"{code} cannot use it; remove it")
    layouts = (options.collectives_layout, options.attention_layout)
    if capability.bsh_collectives and layouts[0] == "BSH" and layouts[1] != "BSH":
        problem = f"{capability.bsh_collectives}; set attention_layout=BSH too, or leave it out"
        yield Finding(("collectives_layout", "attention_layout"), problem)
    for name, reason in capability.unsupported_options.items():
        # attention_layout has a harmless value too: the library's own.
        if is_set(options, name) and getattr(options, name) != "HSB":
            more = (
                ", and use more cores if the model then does not fit" if name == "quantize" else ""
            )
            yield Finding((name,), f"{reason}; remove it{more}")


def _batching(case: Case, capability: Capability) -> Iterator[Finding]:
    options, model_type = case.options, case.model.model_type
    if capability.continuous_batching:
        return
    if options.rolling_batch_strategy == "continuous_batching":
        problem = f"{case.library} has no continuous batching for {model_type}; leave it out"
        yield Finding(("rolling_batch_strategy",), problem)
    elif options.continuous_batching and (options.rolling_batch != "disable" or options.async_mode):
        how = "again" if capability.context_buckets else "again, token by token"
        problem = (
            f"{case.library} has no continuous batching for {model_type}: static batches are served, and when a "
            f"sequence joins, all of them are prefilled {how}"
        )
        yield Finding((_SLOTS,), problem, "note")
    if options.padding_side == "right":
        problem = f"{case.library} pads {model_type} on the left; leave it out"
        yield Finding(("padding_side",), problem)
    if options.cache_layout == "BSH" and "cache_layout" not in capability.ignored_options:
        problem = f"the BSH cache needs continuous batching, which {case.library} does not have for {model_type}"
        yield Finding(("cache_layout",), f"{problem}; leave it out")


def _buckets(case: Case, capability: Capability) -> Iterator[Finding]:
    model_type = case.model.model_type
    if not capability.token_buckets and len(case.options.token_buckets or ()) > 1:
        problem = f"{case.library} takes one length for {model_type}; set the largest alone"
        yield Finding(("n_positions",), problem)
    prompts = case.options.context_length_estimate
    if not capability.context_buckets and prompts and "context_length_estimate" not in case.filled:
        problem = f"{case.library} compiles no prefill graph for {model_type}: prompts run token by token; left out"
        yield Finding(("context_length_estimate",), problem, "warning")


def _speculation(case: Case) -> Iterator[Finding]:
    options, model, draft = case.options, case.model, case.draft
    if not options.speculating:
        return
    if case.neuron is not None and case.capability is not None:
        yield from _verification(case, case.neuron, case.capability)
    if draft is None or not options.drafting:
        return
    capability = capability_of(case.backend, draft.model_type)
    if not case.on_cpu and capability is None:
        problem = f"{case.library} has no class for the draft model's type {draft.model_type}; use another"
        yield Finding((_DRAFT,), problem)
    elif capability is not None and not capability.continuous_batching:
        problem = f"{case.library} runs {draft.model_type} in static batches, whose rows share a position; use another"
        yield Finding((_DRAFT,), problem)
    if draft.vocab_size and model.vocab_size and draft.vocab_size != model.vocab_size:
        problem = (
            f"its vocabulary has {draft.vocab_size} tokens and the model's {model.vocab_size}, so their token ids "
            "differ; use a draft model of the same vocabulary"
        )
        yield Finding((_DRAFT,), problem)
    if draft.max_positions and (options.max_model_len or 0) > draft.max_positions:
        problem = f"the draft model supports {draft.max_positions} positions; set at most that, or use another"
        yield Finding(("n_positions", _DRAFT), problem)


def _verification(case: Case, neuron: NeuronBackend, capability: Capability) -> Iterator[Finding]:
    options, architectures = case.options, neuron.architectures
    source = _DRAFT if options.drafting else _LOOKUP
    if not capability.speculation and _DRAFT not in capability.unsupported_options:
        able = ", ".join(sorted(name for name, entry in architectures.items() if entry.speculation))
        problem = f"{case.library} does not speculate for {case.model.model_type}, only for {able}; remove it"
        yield Finding((source,), problem)


def _defects(case: Case, capability: Capability) -> Iterator[Finding]:
    for defect in capability.defects:
        if defect.applies(case.options, case.model):
            yield _defect(case, defect)
    for has, value, field in unusual_fields(capability.fields, case.model):
        problem = f"{has}, and {case.library} {field.does}"
        if value in field.near:
            yield Finding(("model_loader",), f"{problem}, which differs by up to 0.0005", "warning")
        else:
            fix = "" if field.backends else field.fix
            backends = field.backends
            yield _defect(case, Defect(problem, fix=fix, backends=backends, stops=field.stops))


def _defect(case: Case, defect: Defect) -> Finding:
    """An error, or a warning if wrong answers are accepted."""
    window = case.model.sliding_window
    where = f" (of {window} tokens)" if window and "window" in defect.problem else ""
    advice = use_backend(*defect.backends, other=defect.fix)
    if defect.stops:
        return Finding(defect.names, f"{defect.problem}{where}: it would stop; {advice}")
    problem = f"{defect.problem}{where}: answers are wrong"
    if case.options.allow_known_defects:
        return Finding(
            defect.names, f"{problem}, which allow_known_defects=true accepts", "warning"
        )
    problem += f"; {advice}, or serve it as it is with allow_known_defects=true"
    return Finding(defect.names, problem)
