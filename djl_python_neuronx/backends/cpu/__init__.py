"""Any Hugging Face causal LM on the CPU, in the shapes and limits of a compiled device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from djl_python_neuronx.backends.base import Backend
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.errors import BackendUnavailableError, DeviceMemoryError

LAYER_TYPES = ("full_attention", "sliding_attention")
"""The kinds of layer that need no more than keys, values and a mask."""


def supports(config: Mapping[str, Any]) -> str | None:
    """Return why a model with this `config.json` cannot be served; None if it can."""
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, Mapping) else {}):
        if reason := unserved_layers(part.get("layer_types")):
            return reason
    if config.get("is_encoder_decoder"):
        return "it is an encoder-decoder; expected a causal language model"
    return None


def load(plan: LoadPlan, compiled: Path | None = None) -> Backend:  # noqa: ARG001
    """Load a model; see `backend.load`. Nothing is ever compiled for a CPU."""
    try:
        from djl_python_neuronx.backends.cpu import backend
    except ImportError as error:
        if "failed to map" in str(error) or "allocate memory" in str(error):  # ld.so(8)
            message = f"the cpu backend's libraries do not fit into memory: {error}. Raise the limit (ulimit -v)"
            raise DeviceMemoryError(message) from error
        message = (
            f"the cpu backend cannot be imported: {error}. "
            "Install its packages: pip install 'djl-python-neuronx[cpu]'"
        )
        raise BackendUnavailableError(message) from error
    return backend.load(plan)


def unserved_layers(layer_types: object) -> str | None:
    """Return why a model with layers of these types cannot be served; None if it can."""
    if not layer_types:
        return None
    if not isinstance(layer_types, list) or not all(isinstance(kind, str) for kind in layer_types):
        return f"its layer_types are {layer_types!r}; expected a list of names"
    other = ", ".join(sorted(set(layer_types) - set(LAYER_TYPES)))
    return f"its {other} layers need more than keys, values and a mask" if other else None
