"""LoRA adapters of a model on the CPU: each row of a step gets the product of its adapter's matrices added."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from djl_python_neuronx.backends.adapters import read_matrices
from djl_python_neuronx.backends.base import Int32Array
from djl_python_neuronx.errors import ArtifactError


class Lora:
    """The adapters in their places, and those of the rows of the present step."""

    def __init__(self, module: torch.nn.Module) -> None:
        """No place has an adapter. `module`: the decoder, which has `layers`."""
        self._module = module
        self._matrices: dict[str, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        """Path of a layer to the matrices A, scaled, and B of each place that changes it."""
        self._rows: dict[int, torch.Tensor] = {}

    def aim(self, places: Int32Array) -> None:
        """Set the places of the rows of the next step."""
        self._rows = {
            place: torch.from_numpy((places == place).nonzero()[0])
            for place in {*places.tolist()} - {0}
        }

    def set(self, place: int, folder: Path | None) -> None:
        """Load an adapter into a place, or empty it, which it also is after an error.

        Raises:
            ArtifactError: it cannot be read, or the model has no such layer.
        """
        for places in self._matrices.values():
            places.pop(place, None)
        if folder is None:
            return
        linears, found = dict(self._module.named_modules()), {}
        read = read_matrices(folder)
        for layer in dict.fromkeys(name.rpartition(".")[0] for name in read):
            one, two = read[f"{layer}.lora_A"], read[f"{layer}.lora_B"]
            linear = linears.get(layer)
            if not isinstance(linear, torch.nn.Linear) or linear.weight.shape != (
                len(two),
                one.shape[1],
            ):
                msg = f"{folder} changes {layer} as if it had {len(two)} outputs; the model has {linear}"
                raise ArtifactError(msg)
            if layer not in self._matrices:
                self._matrices[layer] = {}
                linear.register_forward_hook(partial(self._add, self._matrices[layer]))
            dtype = linear.weight.dtype
            found[layer] = one.T.to(dtype), two.T.to(dtype)
        for layer, matrices in found.items():
            self._matrices[layer][place] = matrices

    def _add(self, places: Any, _linear: object, inputs: Any, outputs: torch.Tensor) -> None:  # noqa: ANN401
        for place, rows in self._rows.items():
            if place in places:
                one, two = places[place]
                outputs[rows] += (inputs[0][rows] @ one) @ two
