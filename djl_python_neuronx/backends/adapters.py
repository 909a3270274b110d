"""Matrices of a LoRA adapter."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from djl_python_neuronx.artifacts import adapters


class Matrices(NamedTuple):
    """An addition to the outputs of a layer: scaling x `two` x `one` x inputs."""

    one: torch.Tensor
    """[rank, inputs]: peft's `lora_A`."""
    two: torch.Tensor
    """[outputs, rank]: peft's `lora_B`."""
    scaling: float


def read_matrices(folder: Path) -> dict[str, Matrices]:
    """Return the matrices of a PEFT folder by layer, as in `layers.0.self_attn.q_proj`.

    Raises:
        ArtifactError: it cannot be read, or needs more than them.
    """
    adapter, loaded = adapters.read(folder, folder.name), load_file(folder / adapters.WEIGHTS)
    tensors = {adapters.part(name): tensor for name, tensor in loaded.items()}
    return {
        layer: Matrices(tensors[layer, "A"], tensors[layer, "B"], adapter.scaling(layer))
        for layer in adapter.layers
    }
