"""What options ask for when they are read together, and what of it a library or an architecture leaves undone."""

from __future__ import annotations

from djl_python_neuronx.config.options import ServingOptions, option
from djl_python_neuronx.planning.capabilities import Capability


def honoured(options: ServingOptions, capability: Capability | None) -> ServingOptions:
    """The options without those that the architecture's code cannot use; all of them where it is not known.

    A library that is handed one all the same fails while it builds its graphs, hours later, or computes nonsense.
    """
    if capability is None:
        return options
    left = (*capability.unread, *capability.refused)
    changes: dict[str, object] = {name: ServingOptions.model_fields[name].default for name in left}
    if not capability.context_buckets:
        changes["context_length_estimate"] = None
    if not capability.token_buckets:
        changes["n_positions"] = options.max_model_len
    return options.model_copy(update=changes)


def continuous_batching(options: ServingOptions, capability: Capability | None = None) -> bool:
    """True if new sequences join a running batch without encoding the others anew.

    One slot needs no batching, unless it verifies drafts or its prompts come in chunks. Without `capability`, what the
    library can do with the architecture, the options alone decide.
    """
    if capability is not None and not capability.continuous_batching:
        return False
    if options.rolling_batch_strategy is not None:
        return options.rolling_batch_strategy == "continuous_batching"
    several = (options.max_rolling_batch_size or 0) > 1
    return several or speculating(options) or options.enable_chunked_prefill


def drafting(options: ServingOptions) -> bool:
    """True if a draft model is to be used."""
    return options.speculative_draft_model is not None and options.speculative_length > 0


def speculating(options: ServingOptions) -> bool:
    """True if drafts are to be verified, wherever they come from."""
    looking_up = options.ngram_prompt_lookup_max is not None and options.speculative_length > 0
    return looking_up or drafting(options)


def unmapped(options: ServingOptions, loader: str) -> tuple[str, ...]:
    """The options that ask for something of a library and have no equivalent in this one.

    Those whose marker has `tunes` are to be left out, the others to be refused. Options that are ours alone, and values
    that ask for what the library does anyway, are not among them.
    """
    found = []
    for name, entry in ServingOptions.model_fields.items():
        value = getattr(options, name)
        marker = option(name)
        given = marker.always.get(loader)
        nothing = value is None or value is False or value == entry.default or value == given
        missing = bool(marker.to) and loader not in marker.to
        lacking = value is not None and value == marker.never.get(loader)
        if lacking or (missing and not nothing):
            found.append(name)
    return tuple(found)
