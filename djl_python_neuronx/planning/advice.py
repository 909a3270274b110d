"""What to do about a refusal: the loaders that a user may be sent to."""

from __future__ import annotations

from djl_python_neuronx.config.options import option
from djl_python_neuronx.planning.capabilities import CAPABILITIES, LIBRARIES, capability_of

NOT_SERVED = frozenset({"nxdi"})
"""Loaders that are planned for and cannot load in this version; advice that led there would be a dead end."""


def ways(*loaders: str, other: str = "") -> str:
    """What to do, in words: `other`, or take one of `loaders`. Those that cannot load yet are only mentioned."""
    served = " or ".join(f"model_loader={name}" for name in loaders if name not in NOT_SERVED)
    later = " or ".join(LIBRARIES[name] for name in loaders if name in NOT_SERVED)
    told = ", or ".join(filter(None, (other, served and f"set {served}")))
    return told + (
        f" ({later} would do, but this version cannot load with it yet)" if later else ""
    )


def without(name: str, model_type: str | None, loader: str) -> str:
    """What to do about an option that the library of `loader` cannot honour, be it for this architecture."""
    able = []
    for other in CAPABILITIES:
        entry = capability_of(other, model_type)
        if entry is not None and name not in {*entry.unread, *entry.refused}:
            able.append(other)
    more = ", and take more cores if the model does not fit then" if name == "quantize" else ""
    others = (other for other in able if other != loader and other in option(name).to)
    return ways(*others, other=f"remove it{more}")
