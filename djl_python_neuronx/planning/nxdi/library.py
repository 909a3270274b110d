"""The backend of NxD Inference for planning."""

from __future__ import annotations

from typing import Final

from djl_python_neuronx.planning.capabilities import Heads, round_up
from djl_python_neuronx.planning.case import Case, Filled, NeuronBackend
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.nxdi.arguments import graphs, write_arguments
from djl_python_neuronx.planning.nxdi.capabilities import NXDI, REFUSED
from djl_python_neuronx.planning.nxdi.contrib_rules import WITH_CODE
from djl_python_neuronx.planning.nxdi.rules import LATER, NXDI_RULES, findings


def _padded_heads(model: ModelFacts, degree: int, _strategy: str | None, _slots: int) -> Heads:
    """Source: neuronx-distributed-inference 0.9, modules/attention/gqa.py."""
    heads, kv_heads = model.num_heads or 1, model.num_kv_heads or 1
    query = round_up(heads, degree)
    if heads == kv_heads:
        return Heads(query, query)
    if kv_heads % degree == 0:
        return Heads(query, kv_heads)
    return Heads(query, degree if degree % kv_heads == 0 else query)


def _fill(case: Case, _positions: int, _slots: int) -> Filled:
    """Return static batches where requests come in batches: one call prefills all their prompts."""
    if case.options.rolling_batch_strategy is not None or not case.collected or case.lookahead:
        return {}
    why = "one call prefills the batch that DJL Serving collects"
    return {"rolling_batch_strategy": ("naive_rolling_batch", why)}


LIBRARY: Final = NeuronBackend(
    name="nxdi",
    library="NxD Inference",
    package="neuronx-distributed-inference",
    driven=">=0.4",
    architectures=NXDI,
    rules=NXDI_RULES,
    padded_heads=_padded_heads,
    findings=findings,
    write_arguments=write_arguments,
    graphs=graphs,
    fill=_fill,
    # Source: neuronx-distributed-inference 0.9: torch traces modules of neuronx-distributed through torch-neuronx.
    traced_with=("neuronx-distributed", "torch", "torch-neuronx", "transformers"),
    not_served=REFUSED,
    with_code=WITH_CODE,
    later=LATER,
    # It leaves out the token with which the sum of probabilities reaches top_p.
    host_samples=("top_p below 1",),
    weights=frozenset({"ranks"}),
    writes_behind=True,
)
