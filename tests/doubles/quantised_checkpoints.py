"""Checkpoints of a tiny llama in the formats of quantisation, written from the definition of each format, in numpy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.doubles.tiny_models import save_tiny_model

# Multiples of the group.
SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
GROUP = 32
BLOCK = (48, 40)
"""Divides neither 64 nor 96, so that the last blocks are smaller."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Layer = tuple[dict[str, torch.Tensor], np.ndarray[Any, Any]]
"""Tensors by the last part of their name, and the weight that they stand for: float32[outputs, inputs]."""


def words(values: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Values [N, M] as a stream of bits along N, the lowest first, in words: uint32[N * bits / 32, M]."""
    stream = (values[:, None, :] >> np.arange(bits)[None, :, None]) & 1
    stream = stream.reshape(-1, values.shape[1])
    stream = np.pad(stream, ((0, -len(stream) % 32), (0, 0))).reshape(-1, 32, values.shape[1])
    return (
        (stream.astype(np.uint64) << np.arange(32, dtype=np.uint64)[None, :, None])
        .sum(1)
        .astype(np.uint32)
    )


def tensor(values: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values).view(np.int32))


def half(values: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).half()


def parts(
    choose: np.random.Generator, outputs: int, inputs: int, bits: int, size: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Values [outputs, inputs], and zero points and scales [outputs, groups]."""
    groups = inputs // size
    values = choose.integers(0, 1 << bits, (outputs, inputs))
    zeros = choose.integers(0, 1 << bits, (outputs, groups))
    scales = choose.uniform(0.01, 0.1, (outputs, groups)).astype(np.float16).astype(np.float32)
    return values, zeros, scales


def affine(values: Any, zeros: Any, scales: Any, groups: Any) -> np.ndarray[Any, Any]:
    return (values - zeros[:, groups]).astype(np.float32) * scales[:, groups]


def awq(size: int | None) -> Callable[..., Layer]:
    def make(choose: np.random.Generator, outputs: int, inputs: int) -> Layer:
        each = size or inputs
        values, zeros, scales = parts(choose, outputs, inputs, 4, each)

        def packed(matrix: np.ndarray[Any, Any]) -> torch.Tensor:  # [N, outputs]
            eights = matrix.reshape(len(matrix), -1, 8).astype(np.uint32)
            return tensor(sum(eights[:, :, AWQ_ORDER[i]] << np.uint32(4 * i) for i in range(8)))

        stored = {"qweight": packed(values.T), "qzeros": packed(zeros.T), "scales": half(scales.T)}
        return stored, affine(values, zeros, scales, np.arange(inputs) // each)

    return make


def gptq(
    bits: int, size: int | None, *, first: bool = True, ordered: bool = False
) -> Callable[..., Layer]:
    def make(choose: np.random.Generator, outputs: int, inputs: int) -> Layer:
        each = size or inputs
        values, zeros, scales = parts(choose, outputs, inputs, bits, each)
        groups = np.arange(inputs) // each
        if ordered:
            choose.shuffle(groups)
        qzeros = words(zeros, bits)  # along the outputs
        if first:
            # Each zero point is stored less 1, by one subtraction for each word.
            qzeros = qzeros - words(np.ones_like(zeros), bits)
        stored = {
            "qweight": tensor(words(values.T, bits)),
            "qzeros": tensor(qzeros.T),
            "scales": half(scales.T),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return stored, affine(values, zeros, scales, groups)

    return make


def scaled(shape: str, *, last: str = "weight_scale", dims: int = 2) -> Callable[..., Layer]:
    """`shape`, `dims`: of the scales."""

    def make(choose: np.random.Generator, outputs: int, inputs: int) -> Layer:
        weight = torch.from_numpy(
            choose.uniform(-100, 100, (outputs, inputs)).astype(np.float32)
        ).to(torch.float8_e4m3fn)
        rows, columns = {
            "tensor": (outputs, inputs),
            "channel": (1, inputs),
            "group": (1, GROUP),
            "block": BLOCK,
        }[shape]
        counts = -(-outputs // rows), -(-inputs // columns)
        scales = choose.uniform(0.001, 0.005, counts).astype(np.float32)
        place = np.ix_(np.arange(outputs) // rows, np.arange(inputs) // columns)
        stored = {"weight": weight, last: torch.from_numpy(scales)}
        if shape == "tensor":
            stored[last] = stored[last].reshape([1] * dims)
        stored["input_scale"] = torch.tensor(0.5)
        return stored, weight.float().numpy() * scales[place]

    return make


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
_GPTQ = {"quant_method": "gptq", "sym": False}
_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
FORMATS: Mapping[str, tuple[dict[str, Any], Callable[..., Layer]]] = {
    "awq": ({**_AWQ, "group_size": GROUP}, awq(GROUP)),
    "awq, one group": ({**_AWQ, "group_size": -1}, awq(None)),
    **{
        f"gptq {bits}": ({**_GPTQ, "bits": bits, "group_size": GROUP}, gptq(bits, GROUP))
        for bits in (2, 4, 8)
    },
    "gptq, one group": ({**_GPTQ, "bits": 4, "group_size": -1}, gptq(4, None)),
    "gptq, ordered, second format": (
        {**_GPTQ, "bits": 4, "group_size": GROUP, "desc_act": True, "checkpoint_format": "gptq_v2"},
        gptq(4, GROUP, first=False, ordered=True),
    ),
    "float, tensor": (
        compressed("float-quantized", strategy="tensor", **_FLOAT),
        scaled("tensor", dims=1),
    ),
    "float, channel": (
        compressed("float-quantized", strategy="channel", **_FLOAT),
        scaled("channel"),
    ),
    "float, block": (
        compressed("float-quantized", strategy="block", block_structure=list(BLOCK), **_FLOAT),
        scaled("block"),
    ),
    "naive, group": (
        compressed("naive-quantized", strategy="group", group_size=GROUP, **_FLOAT),
        scaled("group"),
    ),
    "fp8, blocks": (
        {"quant_method": "fp8", "weight_block_size": list(BLOCK), "fmt": "e4m3"},
        scaled("block", last="weight_scale_inv"),
    ),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, scaled("tensor", dims=0)),
}
"""Name of a format to its `quantization_config`, and to the function that makes a layer."""


def save_quantised(
    name: str, folder: Path, *, seed: int = 0, **settings: Any
) -> dict[str, torch.Tensor]:
    """Write a tiny llama whose linear layers are of a format; returns its tensors as they are dequantised."""
    config, make = FORMATS[name]
    save_tiny_model("llama", folder, **{**SIZES, **settings})
    file, choose = folder / "model.safetensors", np.random.default_rng(seed)
    stored: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for key, weight in load_file(file).items():
        if "_proj.weight" not in key:
            stored[key] = expected[key] = weight
            continue
        layer, restored = make(choose, *weight.shape)
        stored |= {f"{key.removesuffix('weight')}{last}": one for last, one in layer.items()}
        expected[key] = torch.from_numpy(restored).bfloat16()
    save_file(stored, file, {"format": "pt"})
    edit_config(folder, quantization_config=config)
    return expected


def edit_config(folder: Path, **fields: Any) -> None:
    """Set fields of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a checkpoint."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({key: one.contiguous() for key, one in tensors.items()}, file, {"format": "pt"})


def layers_of(tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """The names of the weights of linear layers."""
    return (key for key in tensors if "_proj.weight" in key)
