"""What the library of a loader cannot do at all, and what it cannot do with the model's architecture."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from djl_python_neuronx.config.findings import Finding, asked
from djl_python_neuronx.config.options import ServingOptions, option
from djl_python_neuronx.planning.advice import ways, without
from djl_python_neuronx.planning.capabilities import (
    CAPABILITIES,
    LIBRARIES,
    TNX_UNREADABLE,
    Capability,
    capability_of,
)
from djl_python_neuronx.planning.intent import continuous_batching, unmapped
from djl_python_neuronx.planning.model import ModelFacts

_SLOTS = "max_rolling_batch_size"


def findings(
    options: ServingOptions, facts: ModelFacts, loader: str, filled: Collection[str] = ()
) -> Iterator[Finding]:
    """What is to be said of a Neuron loader and an architecture; `options` are filled in.

    `filled` names the values that `defaults.fill` gave.
    """
    yield from _no_equivalent(options, facts, loader)
    capability = capability_of(loader, facts.model_type)
    if capability is None:
        yield _unknown(facts, loader)
        return
    yield from _architecture(options, facts, loader, capability)
    yield from _batching(options, facts, loader, capability)
    yield from _buckets(options, facts, loader, capability, filled)
    yield from _window(options, facts, loader)


def _no_equivalent(options: ServingOptions, facts: ModelFacts, loader: str) -> Iterator[Finding]:
    names = unmapped(options, loader)
    library = LIBRARIES[loader]
    if left := tuple(name for name in names if option(name).tunes):
        problem = f"{library} has no equivalent; left out, which changes speed and memory only"
        yield Finding(left, problem, "note")
    for name in names:
        if not option(name).tunes:
            way = without(name, facts.model_type, loader)
            yield Finding((name,), f"{library} has no equivalent; {way}")


def _unknown(facts: ModelFacts, loader: str) -> Finding:
    asked = facts.model_type or "(config.json names none)"
    known = ", ".join(sorted(CAPABILITIES[loader]))
    others = [other for other in CAPABILITIES if facts.model_type in CAPABILITIES[other]]
    reason = TNX_UNREADABLE.get(asked) if loader == "tnx" else None
    lack = (
        f"reads no checkpoint of {asked}: {reason}"
        if reason
        else f"has no class for model_type {asked}"
    )
    problem = f"{LIBRARIES[loader]} {lack}; it knows {known}; {ways(*others, 'cpu')}"
    return Finding(("model_loader",), problem)


def _architecture(
    options: ServingOptions, facts: ModelFacts, loader: str, capability: Capability
) -> Iterator[Finding]:
    whose = f"the code of {LIBRARIES[loader]} for {facts.model_type}"
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
            yield Finding((name,), f"{reason}; {without(name, facts.model_type, loader)}")


def _batching(
    options: ServingOptions, facts: ModelFacts, loader: str, capability: Capability
) -> Iterator[Finding]:
    library, whose = LIBRARIES[loader], facts.model_type
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
    library, whose = LIBRARIES[loader], facts.model_type
    if not capability.token_buckets and len(options.token_buckets or ()) > 1:
        problem = f"{library} takes one length for {whose}; set the largest alone"
        yield Finding(("n_positions",), problem)
    prompts = options.context_length_estimate
    if not capability.context_buckets and prompts and "context_length_estimate" not in filled:
        problem = (
            f"{library} compiles no prompt graph for {whose}: prompts run token by token; left out"
        )
        yield Finding(("context_length_estimate",), problem, "warning")


def _window(options: ServingOptions, facts: ModelFacts, loader: str) -> Iterator[Finding]:
    """Source: neuronx-distributed-inference 0.9, models/config.py."""
    window, size = facts.sliding_window, options.windowed_context_encoding_size
    if loader == "nxdi" and window is not None and size not in {None, window}:
        problem = f"prompts of this model are encoded by its sliding window of {window} tokens; set {window}"
        yield Finding(("windowed_context_encoding_size",), problem)
