"""The backend of transformers-neuronx for planning."""

from __future__ import annotations

from typing import Final

from djl_python_neuronx.planning.case import NeuronBackend
from djl_python_neuronx.planning.tnx.arguments import (
    fill,
    graphs,
    stored_findings,
    write_arguments,
)
from djl_python_neuronx.planning.tnx.capabilities import TNX
from djl_python_neuronx.planning.tnx.heads import padded_heads
from djl_python_neuronx.planning.tnx.rules import TNX_RULES, findings

LIBRARY: Final = NeuronBackend(
    name="tnx",
    library="transformers-neuronx",
    package="transformers-neuronx",
    driven=">=0.13",
    architectures=TNX,
    rules=TNX_RULES,
    padded_heads=padded_heads,
    findings=findings,
    write_arguments=write_arguments,
    graphs=graphs,
    fill=fill,
    stored_findings=stored_findings,
    # Source: transformers-neuronx 0.13, compiler.py: torch-neuronx writes the graphs. transformers reads and changes
    # config.json; torch computes nothing of them.
    traced_with=("torch-neuronx", "transformers"),
    embeds_on_host=True,
    weights=frozenset({"split", "presharded"}),
    loads_by_layer=True,
)
