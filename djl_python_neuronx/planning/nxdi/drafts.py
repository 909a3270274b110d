"""Rules of drafts that the engine proposes, and a graph of NxD Inference verifies.

Source: neuronx-distributed-inference 0.4 to 0.9, models/model_base.py: `_sample_on_device`, `_is_context_encoding`.
"""

from __future__ import annotations

from collections.abc import Iterator

from djl_python_neuronx.config.findings import ANY, SET, Finding, above, when
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning.case import Case

_LOOKUP = "ngram_prompt_lookup_max"
_EXCLUDED = {
    "on_device_generation": (SET, "the library samples the last of a step's tokens alone"),
    "rolling_batch_strategy": ("naive_rolling_batch", "rows of a static batch share no drafts"),
    "token_generation_batches": (SET, "the library verifies drafts of all slots together"),
    "pipeline_parallel_degree": (above(1), "it was not run with drafts"),
    "shard_over_sequence": (SET, "it was not run with drafts"),
    "attention_dp_degree": (above(1), "it was not run with drafts"),
    "cp_degree": (above(1), "it was not run with drafts"),
    "enable_prefix_caching": (True, "drafts are verified without blocks alone"),
    "nxdi_model_code": (SET, "code of a model was run without drafts alone"),
}
"""Option to the values that exclude drafts, and why."""


def _tokens(options: ServingOptions) -> int:
    """Return the tokens of a row in a step that verifies drafts; 0 without speculation."""
    return options.speculative_length + 1 if options.speculating else 0


RULES = (
    *(
        when(_tokens, **{_LOOKUP: SET, name: values}).refuse(f"{reason}; leave one of them out")
        for name, (values, reason) in _EXCLUDED.items()
    ),
    when(
        lambda options: (
            _tokens(options) >= min(options.context_length_estimate or (_tokens(options) + 2,))
        ),
        speculative_length=ANY,
        context_length_estimate=ANY,
    ).refuse(
        "a prompt graph has to be longer than the speculative_length + 1 tokens of a step that verifies drafts: the "
        "library takes one of that length for such a step, and steps write so many into free slots; change one of them"
    ),
    when(
        lambda options: (
            1 < _tokens(options) >= min(options.token_buckets or (_tokens(options) + 2,)) - 1
        ),
        speculative_length=ANY,
        n_positions=ANY,
    ).refuse(
        "each of n_positions has to hold the tokens of a step that verifies drafts, and two more; raise it"
    ),
)


def findings(case: Case) -> Iterator[Finding]:
    """Yield what a model's cache does not allow."""
    if case.rolling_cache and case.lookahead:
        problem = (
            "rejected drafts would overwrite what the model's sliding window holds; set "
            f"n_positions={case.model.sliding_window} at most, or leave it out"
        )
        source = "speculative_draft_model" if case.options.drafting else _LOOKUP
        yield Finding((source, "n_positions"), problem)
