"""Matrices of a LoRA adapter."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from djl_python_neuronx.artifacts import adapters
from djl_python_neuronx.errors import ArtifactError


def read_matrices(folder: Path) -> dict[str, torch.Tensor]:
    """Return the matrices of a PEFT folder in float32, by names as in `layers.0.self_attn.q_proj.lora_A`.

    `lora_A`: [rank, inputs], with the factor of the product B x A; `lora_B`: [outputs, rank].

    Raises:
        ArtifactError: it cannot be read, needs more than them, or has values that are not finite.
    """
    adapter, found = adapters.read(folder, folder.name), dict[str, torch.Tensor]()
    for name, tensor in load_file(folder / adapters.WEIGHTS).items():
        layer, side = adapters.part(name) or ("", "")
        matrix = tensor.float() * (adapter.scaling(layer) if side == "A" else 1)
        if not matrix.isfinite().all():
            msg = (
                f"the adapter {adapter.name!r} ({folder}) cannot be served: {name}, multiplied by its factor, has "
                "values that are not finite. Download it again, or correct lora_alpha"
            )
            raise ArtifactError(msg)
        found[f"{layer}.lora_{side}"] = matrix
    return found
