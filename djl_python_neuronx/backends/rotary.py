"""Rotary positions in a configuration of transformers, whichever version wrote and read it."""

from __future__ import annotations

from typing import Any

from djl_python_neuronx.planning.fields import rope_type

_OTHER_NAMES = {
    "rope_theta": ("rope_theta", "rotary_emb_base"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
}
"""Names in `rope_parameters`, where transformers 5 has all, to the fields that transformers 4 has instead."""


def rotary_fields(config: Any) -> dict[str, Any]:  # noqa: ANN401  (a class of transformers)
    """Return the fields that transformers 4 reads, as far as the configuration has them in `rope_parameters`.

    Raises:
        ValueError: they differ from layer to layer, for which transformers 4 has no fields.
    """
    found = getattr(config, "rope_scaling", None) or getattr(config, "rope_parameters", None)
    if not found:
        return {}
    if any(isinstance(value, dict) for value in found.values()):
        message = "rope_parameters for each type of layer: only transformers 5 and newer have them"
        raise ValueError(message)
    fields = {
        name: found[key] for key, names in _OTHER_NAMES.items() if key in found for name in names
    }
    scaling = {key: value for key, value in found.items() if key not in _OTHER_NAMES}
    return {**fields, "rope_scaling": None if rope_type(scaling) == "default" else scaling}
