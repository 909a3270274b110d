"""What options, model and machine do not allow together, or what it costs: judged once every value is filled in."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from djl_python_neuronx.config.findings import Finding, asked
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning import architecture, defects, host, overrides, placement
from djl_python_neuronx.planning import draft as drafts
from djl_python_neuronx.planning.advice import ways
from djl_python_neuronx.planning.capabilities import LIBRARIES, Capability, capability_of
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.intent import continuous_batching
from djl_python_neuronx.planning.machines import DeviceInfo
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.rules import OPEN, library_conflicts

DJL_ROWS = 32
"""Rows that DJL Serving's rolling batch sends unless max_rolling_batch_size is written. Source: RollingBatch.java."""

_SLOTS = "max_rolling_batch_size"
_JOIN_WAIT = "max_join_wait_ms"


def findings(case: Case, *, estimated_load_s: float | None = None) -> Iterator[Finding]:
    """Everything that needs facts, and the rules of the library that was chosen.

    `estimated_load_s`: the seconds that loading is expected to take without a cache.
    """
    options, facts, loader, draft = case.options, case.model, case.backend, case.draft
    device, filled, capability = case.device, case.filled, case.capability
    yield from _lengths(options, facts, filled)
    yield from _useless(options, loader, capability)
    yield from _steps(options, loader)
    if loader == "cpu":
        yield from _djl(options, filled)
        yield from drafts.findings(options, facts, draft, loader)
        yield from host.findings(options, facts, device, draft)
        return
    used = case.effective
    if placement.fits(used, facts, device, loader, draft) is not False:
        # What is only good to know of a plan is not worth a word where there is no plan.
        yield from _djl(options, filled)
        yield from _patience(options, estimated_load_s)
    yield from _workers(options, device)
    yield from library_conflicts(used, loader)
    yield from overrides.findings(options)
    yield from _foreign_graphs(options, facts, loader)
    yield from architecture.findings(options, facts, loader, filled)
    if capability is None:
        return
    yield from drafts.findings(options, facts, draft, loader)
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


def _useless(
    options: ServingOptions, loader: str, capability: Capability | None
) -> Iterator[Finding]:
    if loader != "cpu" and options.cpu_threads is not None:
        problem = "only the cpu loader computes on the CPU; leave it out"
        yield Finding(("cpu_threads",), problem, "note")
    several = (options.max_rolling_batch_size or 1) > 1
    static = loader != "cpu" and several and not continuous_batching(options, capability)
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


def _foreign_graphs(options: ServingOptions, facts: ModelFacts, loader: str) -> Iterator[Finding]:
    if loader != "nxdi" or capability_of("tnx", facts.model_type) is None:
        return
    if options.compiled_graph_path and options.model_loader in OPEN:
        problem = (
            f"this model is loaded by {LIBRARIES[loader]}, and graphs that {LIBRARIES['tnx']} compiled do not fit it: "
            f"they would all be compiled anew. If they are its graphs, {ways('tnx')}; else "
            f"{ways('nxdi', other='leave it out')}"
        )
        yield Finding(("compiled_graph_path", "model_loader"), problem, "warning")


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
