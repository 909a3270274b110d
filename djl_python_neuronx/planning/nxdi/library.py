"""The backend of NxD Inference for planning."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from djl_python_neuronx.config.device_sampling import OnDeviceGeneration
from djl_python_neuronx.config.findings import Finding
from djl_python_neuronx.planning.capabilities import Heads, round_up
from djl_python_neuronx.planning.case import Case, Filled, NeuronBackend
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.nxdi.arguments import BLOCK_SIZE, graphs, write_arguments
from djl_python_neuronx.planning.nxdi.capabilities import NXDI, REFUSED
from djl_python_neuronx.planning.nxdi.contrib_rules import WITH_CODE
from djl_python_neuronx.planning.nxdi.rules import NXDI_RULES, findings


def _padded_heads(model: ModelFacts, degree: int, _strategy: str | None, _slots: int) -> Heads:
    """Source: neuronx-distributed-inference 0.9, modules/attention/gqa.py."""
    heads, kv_heads = model.num_heads or 1, model.num_kv_heads or 1
    query = round_up(heads, degree)
    if heads == kv_heads:
        return Heads(query, query)
    if kv_heads % degree == 0:
        return Heads(query, kv_heads)
    return Heads(query, degree if degree % kv_heads == 0 else query)


def _fill(case: Case, positions: int, _slots: int) -> Filled:
    """Return the blocks of prefix caching, or for a fused draft model greedy sampling on the device.

    Without them: static batches where requests come in batches, as one call prefills all their prompts.
    """
    options = case.options
    if case.fused and options.on_device_generation is None:
        why = "the device verifies the drafts"
        return {"on_device_generation": (OnDeviceGeneration(top_k=1), why)}
    if case.effective.enable_prefix_caching:
        filled: Filled = {}
        if options.is_block_kv_layout is None:
            filled["is_block_kv_layout"] = True, "prefixes are shared in blocks"
        if options.pa_block_size is None:
            size = math.gcd(BLOCK_SIZE, positions, *(options.token_buckets or ()))
            filled["pa_block_size"] = (
                size,
                f"a power of two that divides n_positions, at most {BLOCK_SIZE}",
            )
        return filled
    if options.rolling_batch_strategy is not None or not case.collected or case.lookahead:
        return {}
    why = "one call prefills the batch that DJL Serving collects"
    return {"rolling_batch_strategy": ("naive_rolling_batch", why)}


def _stored_findings(case: Case) -> Iterator[Finding]:
    """Source: backends/nxdi/masks.py."""
    if case.foreign_graphs and case.effective.enable_prefix_caching:
        problem = (
            "another program compiled the graphs, which may weigh what is behind a prefix too: answers would be "
            "wrong; compile the model again, or leave it out"
        )
        yield Finding(("enable_prefix_caching",), problem)


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
    stored_findings=_stored_findings,
    # Source: neuronx-distributed-inference 0.9: torch traces modules of neuronx-distributed through torch-neuronx.
    traced_with=("neuronx-distributed", "torch", "torch-neuronx", "transformers"),
    not_served=REFUSED,
    with_code=WITH_CODE,
    partly=("speculative_draft_model",),
    # It leaves out the token with which the sum of probabilities reaches top_p.
    host_samples=("top_p below 1",),
    fuses=True,
    weights=frozenset({"ranks"}),
    writes_behind=True,
)
