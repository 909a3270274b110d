"""The value of `on_device_generation`: sampling on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from djl_python_neuronx.config.values import (
    Allowed,
    Count,
    Positive,
    allowed_words,
    parse_object,
    truth,
)
from djl_python_neuronx.errors import did_you_mean


class OnDeviceGeneration(BaseModel):
    """Sampling on the device, with the names and defaults of TNX's `GenerationConfig`."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    do_sample: bool = False
    """False: always the most probable token, whatever the request sets."""
    dynamic: bool = False
    """Use each request's own parameters. Otherwise those below are compiled into the graph."""
    top_k: Count = 50
    top_p: Annotated[
        float, Field(gt=0, le=1, allow_inf_nan=False), Allowed("a number above 0, at most 1")
    ] = 1.0
    temperature: Positive = 1.0
    top_p_min_tokens: Count = 1
    """Fewest tokens that `top_p` keeps."""
    global_top_k: Annotated[
        Count | None, Field(validation_alias=AliasChoices("global_top_k", "global_topk"))
    ] = None
    """Largest number of tokens to sample from (`global_topk` in NxDI). The libraries' kernels take at most 256."""
    per_batch_line: bool = False
    """Each sequence has its own parameters; with `dynamic`."""
    deterministic: bool = False
    """Accept at 0.5 instead of drawing a random number."""


PER_REQUEST = OnDeviceGeneration(
    do_sample=True, dynamic=True, per_batch_line=True, top_k=50, global_top_k=256
)
"""Value of ``on_device_generation=true``: the device samples, with each request's own parameters."""


_OUTSIDE: Final[Mapping[str, str]] = {
    "max_length": "a request sets max_new_tokens; leave it out",
    "eos_token_id": "the model's own ends a text; leave it out",
}
"""Keyword of TNX's `GenerationConfig` that is set elsewhere, to where."""


def parse_generation(value: object) -> object:
    """Return the fields of `on_device_generation`; true and false become their meaning."""
    if isinstance(value, OnDeviceGeneration):
        return value
    enabled = truth(value)
    if enabled is not None:
        return PER_REQUEST if enabled else None
    fields = parse_object(value) if isinstance(value, str) else value
    if not isinstance(fields, Mapping):
        return fields
    given = {
        key: entry for key, entry in fields.items() if entry is not None or key not in _OUTSIDE
    }
    most = given.get("global_top_k", given.get("global_topk"))
    if isinstance(most, int) and 0 < most < PER_REQUEST.top_k:
        given.setdefault("top_k", most)  # the default is within the limit
    return given


def wrong_part(key: str) -> str:
    """Describe the error of a key of an option's object that is not valid."""
    if key in _OUTSIDE:
        return f"{key}: {_OUTSIDE[key]}"
    field = OnDeviceGeneration.model_fields.get("global_top_k" if key == "global_topk" else key)
    if field is not None:
        return f"{key}: expected {allowed_words(field)}"
    return f"{key!r} is wrong{did_you_mean(key, OnDeviceGeneration.model_fields)}"
