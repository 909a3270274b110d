"""LoRA adapters on the device: matrices in the weights of the graphs, one of each for every place.

The library's own manager is left out: it reads adapters into the host's memory, evicts them by itself, cannot add one
after a load (before the second release of 0.9), and divides those of heads that it pads wrongly. Its statement that
writes the device is used here as it is (0.7 to 0.9, modules/lora_serving/lora_model.py `swap_adapters`).

A prefill copies the matrices of its rows' places to those of their slots (`weight_active`), which decodes read. So a
place may change while sequences of others run, and its slots keep nothing that the next prompt would see. Place 0 stays
as loaded: zero, which adds 0 to each output of the model's own layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

_DIVIDED = re.compile(
    r"(?P<layer>layers\.\d+\.(?:self_attn|mlp)\.)(?:\w+\.)*?(?P<name>\w+_proj)\.(?P<kind>lora_[AB])\.weight"
)
_OF_ROWS = frozenset({"o_proj", "down_proj"})
"""Layers whose inputs are divided among the cores; of all others the outputs are."""


class Places:
    """The places of an application that is loaded."""

    def __init__(self, application: Any) -> None:  # noqa: ANN401
        """Every place is empty."""
        self._weights = application.traced_model.nxd_model.weights
        self._kv_heads = int(application.config.num_key_value_heads)
        self._shards = application.neuron_config.lora_config.lora_shard_linear_layer

    def write(self, place: int, matrices: Mapping[str, torch.Tensor]) -> None:
        """Write an adapter. `matrices`: those of `backends.adapters.read_matrices`; absent ones are 0."""
        for rank, weights in enumerate(self._weights):
            for name, weight in weights.items():
                if found := _DIVIDED.fullmatch(name):
                    part = torch.zeros(weight.shape[1:], dtype=weight.dtype)
                    layer, projection, kind = found.groups()
                    if (matrix := matrices.get(f"{layer}{projection}.{kind}")) is not None:
                        self._fill(part, matrix, projection, kind, rank)
                    weight[place] = part

    def _fill(
        self, part: torch.Tensor, matrix: torch.Tensor, projection: str, kind: str, rank: int
    ) -> None:
        """Write the part of a matrix that a core has: its heads or columns, as those of the model's own weights.

        Source: modules/attention/gqa.py. A core that has no KV head of its own gets a copy. Heads that pad the others
        come behind those of each KV head, or behind all if their number does not divide that of the cores.
        """
        cores, groups = len(self._weights), 1
        of_inputs = kind == "lora_A"
        values, target = (matrix.T, part) if of_inputs else (matrix, part.T)
        if cores > 1 and (self._shards or of_inputs == (projection in _OF_ROWS)):
            total = len(target) * cores
            if projection in {"k_proj", "v_proj"} and not of_inputs:
                heads = values.reshape(self._kv_heads, -1, values.shape[1])
                copies = max(total // len(values), 1)
                values = heads.repeat_interleave(copies, 0).flatten(0, 1)
            elif (projection, of_inputs) in {("q_proj", False), ("o_proj", True)}:
                groups = self._kv_heads if cores % self._kv_heads == 0 else 1
            whole = values.new_zeros(groups, total // groups, values.shape[1])
            whole[:, : len(values) // groups] = values.reshape(groups, -1, values.shape[1])
            values = whole.flatten(0, 1)[rank * len(target) : (rank + 1) * len(target)]
        target[: len(values), : values.shape[1]] = values
