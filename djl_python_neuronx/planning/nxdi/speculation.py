"""Rules of drafts with NxD Inference: of a model in the same graphs, and those that the engine proposes.

What excludes drafts altogether is in `rules`.

Source: neuronx-distributed-inference 0.4 to 0.9, models/model_base.py: `NeuronFusedSpecModel`, `_sample_on_device`,
`_is_context_encoding`; models/application_base.py: `checkpoint_loader_fn`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from djl_python_neuronx.config.findings import ANY, SET, UNSET, Finding, when
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.nxdi.versions import numbers

_DRAFT, _METHOD = "speculative_draft_model", "draft_model_kind"
_EAGLE = frozenset({"eagle", "eagle3"})
_EAGLE3_LAYERS = 7
"""Fewest layers of which three different ones give EAGLE3 its states."""


def _tokens(options: ServingOptions) -> int:
    """Return the tokens of a row in a step that verifies drafts; 0 without speculation."""
    return options.speculative_length + 1 if options.speculating else 0


RULES = (
    when(
        lambda options: 1 < _tokens(options) >= min(options.context_length_estimate or (math.inf,)),
        speculative_length=ANY,
        context_length_estimate=ANY,
    ).refuse(
        "a prompt graph has to be longer than the speculative_length + 1 tokens of a step that verifies drafts: the "
        "library takes one of that length for such a step, and steps write so many into free slots; change one of them"
    ),
    when(
        lambda options: 1 < _tokens(options) >= min(options.token_buckets or (math.inf,)) - 1,
        speculative_length=ANY,
        n_positions=ANY,
    ).refuse(
        "each of n_positions has to hold the tokens of a step that verifies drafts, and two more; raise it"
    ),
    when(
        speculative_draft_model=SET, on_device_generation=lambda it: it.do_sample or it.dynamic
    ).refuse(
        "the device verifies drafts greedily: the library samples the last of a step's tokens alone, and EAGLE was not "
        "run with sampling; leave on_device_generation out, or set do_sample=false and dynamic=false"
    ),
    when(
        lambda options: options.draft_model_tp_size != options.tensor_parallel_degree,
        speculative_draft_model=SET,
        draft_model_tp_size=SET,
        tensor_parallel_degree=ANY,
    ).refuse("in the same graphs both models share the same cores; leave draft_model_tp_size out"),
    # The states of a prompt's last token have four parts, of which other prefills gather one.
    when(draft_model_kind="eagle3", speculative_draft_model=SET, sequence_parallel=UNSET).refuse(
        "EAGLE3 needs prompts that are divided among the cores; set sequence_parallel=true"
    ),
    when(
        lambda options: options.neuron_cc_pipeline_factor != 1,
        draft_model_kind=_EAGLE,
        speculative_draft_model=SET,
        sequence_parallel=SET,
        neuron_cc_pipeline_factor=ANY,
    ).refuse(
        "the library would gather the states of a draft's prompt twice; set neuron_cc_pipeline_factor=1"
    ),
    when(draft_model_kind="draft_model", enable_eagle_draft_input_norm=SET).refuse(
        "it is of EAGLE drafts; set draft_model_kind=eagle, or leave it out"
    ),
    when(speculative_draft_model=SET, enable_fused_speculation=False).refuse(
        "with NxD Inference draft models are part of the model's own graphs; leave it out"
    ),
)


def findings(case: Case) -> Iterator[Finding]:
    """Yield what does not fit between a model, its drafts and the installed version."""
    if case.rolling_cache and case.lookahead:
        problem = (
            "rejected drafts would overwrite what the model's sliding window holds; set "
            f"n_positions={case.model.sliding_window} at most, or leave it out"
        )
        source = _DRAFT if case.options.drafting else "ngram_prompt_lookup_max"
        yield Finding((source, "n_positions"), problem)
    if not case.fused:
        return
    problem = "requests that sample are refused, because the device verifies greedily; set temperature=0 in them"
    yield Finding((_DRAFT,), problem, "warning")
    if case.draft is not None:
        yield from _pair(case, case.model, case.draft)


def _pair(case: Case, model: ModelFacts, draft: ModelFacts) -> Iterator[Finding]:
    method = case.options.draft_model_kind
    old = case.library_version is not None and numbers(case.library_version) < (0, 7)
    if method in _EAGLE and draft.model_type != "llama":
        problem = f"NxD Inference has layers of EAGLE for llama alone, not for {draft.model_type}; use another draft"
        yield Finding((_DRAFT, _METHOD), problem)
    elif draft.model_type != model.model_type and old:
        problem = (
            f"up to NxD Inference 0.6 draft and model have the same class; it is {draft.model_type}, the model's is "
            f"{model.model_type}: use another, or install 0.7 or a later one"
        )
        yield Finding((_DRAFT,), problem)
    if method in _EAGLE and draft.hidden_size != model.hidden_size:
        problem = (
            f"it reads states of {draft.hidden_size} numbers, and those of the model have {model.hidden_size}; use the "
            "draft that was trained for this model"
        )
        yield Finding((_DRAFT, _METHOD), problem)
    if method == "eagle3" and (model.num_layers or _EAGLE3_LAYERS) < _EAGLE3_LAYERS:
        problem = f"EAGLE3 needs a model of at least {_EAGLE3_LAYERS} layers, and it has {model.num_layers}; remove it"
        yield Finding((_METHOD,), problem)
