"""Derived meaning of options."""

from __future__ import annotations

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning.capabilities import Capability
from djl_python_neuronx.planning.case import usable_options as honoured

__all__ = ["continuous_batching", "drafting", "honoured", "speculating"]


def continuous_batching(options: ServingOptions, capability: Capability | None = None) -> bool:
    """Whether sequences join a running batch."""
    return options.continuous_batching and (capability is None or capability.continuous_batching)


def drafting(options: ServingOptions) -> bool:
    """Whether a draft model is used."""
    return options.drafting


def speculating(options: ServingOptions) -> bool:
    """Whether steps verify drafts."""
    return options.speculating
