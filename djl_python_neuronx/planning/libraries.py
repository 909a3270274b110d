"""The backends that drive a Neuron library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from djl_python_neuronx.planning.capabilities import Capability
from djl_python_neuronx.planning.case import NeuronBackend
from djl_python_neuronx.planning.nxdi import library as nxdi
from djl_python_neuronx.planning.tnx import library as tnx

NEURON_BACKENDS: Final[Mapping[str, NeuronBackend]] = {
    neuron.name: neuron for neuron in (nxdi.LIBRARY, tnx.LIBRARY)
}
"""Backends by name, the preferred one first. ``cpu`` and ``sim`` are none of them."""


def capability_of(backend: str, model_type: str | None) -> Capability | None:
    """Return what the library of a backend supports of an architecture; None if unknown, or without a library."""
    neuron = NEURON_BACKENDS.get(backend)
    return None if neuron is None else neuron.capability(model_type)
