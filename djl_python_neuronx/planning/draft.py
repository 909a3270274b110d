"""Draft models: what they are served with, the slots and lengths of the large model, and whether they suit it."""

from __future__ import annotations

from collections.abc import Iterator

from djl_python_neuronx.config.findings import Finding
from djl_python_neuronx.config.options import ServingOptions, option
from djl_python_neuronx.errors import ConfigError
from djl_python_neuronx.planning.capabilities import CAPABILITIES, LIBRARIES, capability_of
from djl_python_neuronx.planning.defaults import make_buckets
from djl_python_neuronx.planning.intent import drafting, speculating
from djl_python_neuronx.planning.model import ModelFacts

ORIGIN = "as the model that it drafts for"
_DRAFT, _LOOKUP = "speculative_draft_model", "ngram_prompt_lookup_max"
_KERNELS = ("attn_block_tkg_nki_kernel_enabled", "attn_block_tkg_nki_kernel_cascaded_attention")


def draft_settings(options: ServingOptions, loader: str, model: str) -> dict[str, str]:
    """The options of a draft model, as text, from those of the large one, which `assess` has filled in.

    Options of the large model that do not concern it (sampling on the device, layouts, quantisation) are not among
    them. What an architecture is known to get wrong is accepted: a wrong draft costs time and changes no text.

    Raises:
        ConfigError: the options are not filled in.
    """
    limit, degree = options.max_model_len, options.tensor_parallel_degree
    if limit is None:
        msg = "n_positions must be filled in before the draft model's options are known"
        raise ConfigError(msg)
    slots = options.max_rolling_batch_size
    prompts, lengths = draft_lengths(options)
    fields = ServingOptions.model_fields
    same = {name: getattr(options, name) for name in fields if option(name).draft == "same"}
    wanted = {
        **same,
        "model_id": model,
        "model_loader": loader,
        "tensor_parallel_degree": options.draft_model_tp_size or degree,
        "n_positions": _listed(lengths),
        "context_length_estimate": _listed(prompts),
        "allow_known_defects": True,
        "compiled_graph_path": options.draft_model_compiled_path or options.compiled_graph_path,
        # A single slot too is driven as the large model is, whose slots have positions of their own.
        "rolling_batch_strategy": (
            "continuous_batching" if loader != "cpu" and slots == 1 else None
        ),
    }
    return {name: str(value) for name, value in wanted.items() if value is not None}


def draft_lengths(options: ServingOptions) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the prompt lengths and the token lengths of the draft model's graphs; n_positions is set."""
    limit = options.max_model_len or 0
    return options.context_length_estimate or (limit,), options.token_buckets or make_buckets(limit)


def alone(options: ServingOptions) -> ServingOptions:
    """Options that a folder brings along, without what a draft model has no use for."""
    fields = ServingOptions.model_fields
    off = {name: fields[name].default for name in fields if option(name).draft == "off"}
    return options.model_copy(update=off)


def findings(
    options: ServingOptions, facts: ModelFacts, draft: ModelFacts | None, loader: str
) -> Iterator[Finding]:
    """What is to be said of drafts, wherever they come from; `draft` are the facts of the draft model, if known."""
    if not speculating(options):
        return
    if loader != "cpu":
        yield from _verifying(options, facts, loader)
    if draft is None or not drafting(options):
        return
    if loader != "cpu":
        yield from _made(draft, loader)
    yield from _alike(options, facts, draft)


def _verifying(options: ServingOptions, facts: ModelFacts, loader: str) -> Iterator[Finding]:
    """Whether the library verifies drafts for the large model."""
    capability = capability_of(loader, facts.model_type)
    if capability and not capability.speculation and _DRAFT not in capability.refused:
        able = sorted(name for name, entry in CAPABILITIES[loader].items() if entry.speculation)
        library, whose = LIBRARIES[loader], facts.model_type
        problem = f"{library} does not speculate for {whose}, only for {', '.join(able)}; remove it"
        yield Finding((_DRAFT if drafting(options) else _LOOKUP,), problem)
    # Source: neuronx-distributed-inference 0.9, modules/attention/attention_base.py.
    windowed = loader == "nxdi" and facts.sliding_window is not None
    if windowed and not all(getattr(options, name) for name in _KERNELS):
        problem = f"with a sliding window speculation needs {' and '.join(_KERNELS)}; set both, or leave the draft out"
        yield Finding((_DRAFT, *_KERNELS), problem)


def _made(draft: ModelFacts, loader: str) -> Iterator[Finding]:
    """Whether the library runs the draft model, each of its rows at a position of its own."""
    library, capability = LIBRARIES[loader], capability_of(loader, draft.model_type)
    if capability is None:
        problem = (
            f"{library} has no class for the draft model's type {draft.model_type}; take another"
        )
        yield Finding((_DRAFT,), problem)
    elif not capability.continuous_batching:
        problem = f"{library} runs {draft.model_type} in static batches only, whose rows share a position; take another"
        yield Finding((_DRAFT,), problem)


def _alike(options: ServingOptions, facts: ModelFacts, draft: ModelFacts) -> Iterator[Finding]:
    """Whether the two models have the same tokens, and positions enough."""
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


def _listed(lengths: tuple[int, ...]) -> str:
    return ",".join(map(str, lengths))
