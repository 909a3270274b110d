"""Any Hugging Face causal LM on the CPU, in the shapes and limits of a compiled device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any

from djl_python_neuronx.backends.base import Backend
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.errors import BackendUnavailableError, DeviceMemoryError, did_you_mean

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
    kinds = {part.get("model_type") for part in (config, nested) if isinstance(part, Mapping)}
    known = _causal_types()
    if not known or "auto_map" in config or kinds & known:
        return None
    kind, version = str(config.get("model_type")), metadata.version("transformers")
    return (
        f"transformers {version} has no causal language model of model_type {kind!r}{did_you_mean(kind, known)}; "
        "correct config.json, or use a version that has it"
    )


@cache
def _causal_types() -> frozenset[str]:
    """Types of which the installed transformers has a causal language model; empty if that is not known.

    Its source is read, because an import takes seconds and brings torch.
    """
    if (found := util.find_spec("transformers")) is None or found.origin is None:
        return frozenset()
    source = Path(found.origin).parent / "models" / "auto" / "modeling_auto.py"
    with suppress(OSError, metadata.PackageNotFoundError):
        metadata.version("transformers")
        table = source.read_text(encoding="utf-8").partition("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = ")
        return frozenset(re.findall(r'\(\s*"([\w.-]+)",', table[2].partition("\n)\n")[0]))
    return frozenset()


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
