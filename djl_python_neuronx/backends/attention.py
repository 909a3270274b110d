"""What a query may see and how far positions reach: a model's configuration made into masks and limits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from djl_python_neuronx.backends.base import Rows

LAYER_TYPES = ("full_attention", "sliding_attention")
"""The kinds of layer that a mask over keys and values can serve."""
_TRIAL_WINDOW = 2

Windows = dict[str, int | None]
"""Kind of layer → its sliding window. More than one kind: the model takes a mask for each."""


def possible_windows(config: Any) -> list[Windows]:  # noqa: ANN401
    """What the configuration declares and, if that is more, full attention everywhere.

    A `sliding_window` proves nothing, llama and gpt_neox never look at theirs: try which it is.
    """
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or [LAYER_TYPES[window is not None]]
    declared = {k: window if k == LAYER_TYPES[1] else None for k in sorted(set(kinds))}
    plain: Windows = {LAYER_TYPES[0]: None}
    return [declared] if declared == plain else [declared, plain]


def unserved_layers(layer_types: object) -> str | None:
    """Why a model with layers of these types cannot be served; None: it can."""
    if not layer_types:
        return None
    if not isinstance(layer_types, list) or not all(isinstance(kind, str) for kind in layer_types):
        return f"its layer_types are {layer_types!r}; expected a list of names"
    other = ", ".join(sorted(set(layer_types) - set(LAYER_TYPES)))
    return f"its {other} layers need more than keys, values and a mask" if other else None


@contextlib.contextmanager
def short_windows(model: torch.nn.Module, config: Any) -> Iterator[None]:  # noqa: ANN401
    """Every sliding window is 2 tokens meanwhile, so that a trial of a few tokens shows it."""
    owners = [config, *model.modules()]
    found = [(owner, getattr(owner, "sliding_window", None)) for owner in owners]
    before = [(owner, window) for owner, window in found if type(window) is int]
    try:
        for owner, _ in before:
            owner.sliding_window = _TRIAL_WINDOW
        yield
    finally:
        for owner, window in before:
            owner.sliding_window = window


def position_limits(config: Any) -> dict[str, int]:  # noqa: ANN401
    """Name of a limit in the configuration → positions that a slot may have.

    Source: transformers 4.57 to 5.23, dynamic_rope_update: longrope takes its factors for the longest row of a batch,
    so beyond the original length a row's logits depend on the others. Dynamic NTK does so beyond
    max_position_embeddings only, where no slot reaches.
    """
    limits = {"max_position_embeddings": getattr(config, "max_position_embeddings", None)}
    ropes = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for rope in (ropes, *ropes.values()):  # transformers 5 has one for each kind of layer
        if isinstance(rope, Mapping) and "longrope" in (rope.get("rope_type"), rope.get("type")):
            name = "original_max_position_embeddings"
            limit = rope.get(name) or getattr(config, name, None)
            limits[f"{name}; with rope_type longrope, longer rows change the others"] = limit
    return {name: limit for name, limit in limits.items() if isinstance(limit, int)}


def causal_mask(
    positions: torch.Tensor, reach: int, dtype: torch.dtype, window: int | None
) -> torch.Tensor:
    """Additive mask [B, 1, S, reach]: a query at position p sees the columns up to p.

    With a sliding window it sees the last `window` of them, its own included.
    """
    columns = torch.arange(reach)
    hidden = columns > positions[:, :, None]
    if window is not None:
        hidden |= columns <= positions[:, :, None] - window
    mask = torch.zeros(hidden.shape, dtype=dtype)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]


def padded_positions(rows: Rows, width: int) -> torch.Tensor:
    """int64[B, width]: the position of every column; padding repeats the last valid one.

    Past the end of a learned position table, padding would be an index error.
    """
    starts = torch.from_numpy(rows.starts).long()[:, None]
    last = torch.from_numpy(rows.lens).long()[:, None] - 1
    return starts + torch.minimum(torch.arange(width), last)
