"""The formulas of quantised checkpoints: the weight of each linear layer in bfloat16.

A weight is (value - zero) * scale, computed in float32, which holds both factors exactly, and rounded once. Types and
shapes are checked by headers, before anything is computed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from djl_python_neuronx.artifacts.artifact import Artifact
from djl_python_neuronx.artifacts.quantised import (
    Awq,
    CompressedTensors,
    Fp8,
    Gptq,
    plain_config,
    read_scheme,
)
from djl_python_neuronx.artifacts.tensor_files import Tensor
from djl_python_neuronx.artifacts.weights import check_tensors
from djl_python_neuronx.config.values import shortened
from djl_python_neuronx.errors import ArtifactError

if TYPE_CHECKING:  # at run time only where tensors are loaded: `check` has no torch
    import torch

_FLOATS = ("BF16", "F16", "F32")
_EIGHT_BITS = ("F8_E4M3", "F8_E5M2")
_INTEGERS, _WORDS = ("I32", "I64"), ("I32",)
_GROUPS = "g_idx"
# Activations and caches are not quantised afterwards.
_OF_ACTIVATIONS = re.compile(r"(input|output|activation|[qkv])_(scale|zero_point|global_scale)")
_OF_WEIGHTS = re.compile(r"qweight|qzeros|g_idx|scales|weight_\w+")
# The outputs in a word of AutoAWQ, from the lowest bits on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def dequantised(artifact: Artifact, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint without quantised layers, whose weights are computed as they are loaded.

    Raises:
        ArtifactError: the format is not dequantised, or a tensor is missing, of a wrong type or shape, or of no layer.
    """
    scheme = read_scheme(artifact.config, artifact.path)
    restored: dict[str, Tensor] = {}
    used: set[str] = set()
    for name in tensors:
        prefix, _, last = name.rpartition(".")
        layer = _Layer(tensors, prefix, used)
        if isinstance(scheme, (Awq, Gptq)) and last == "qweight":
            restored[f"{prefix}.weight"] = _packed(layer, scheme)
        elif isinstance(scheme, (CompressedTensors, Fp8)) and layer.is_scaled(last):
            restored[name] = _scaled(layer, scheme)
    for name in [name for name in tensors if name not in used]:
        prefix, _, last = name.rpartition(".")
        # AutoAWQ's scaled activations of some architectures are among these.
        is_plain = tensors[name].dtype in _FLOATS and name not in restored
        if not is_plain or _OF_WEIGHTS.fullmatch(last):
            found = f"no tensor that is of no layer of {scheme.quant_method}"
            raise _Layer(tensors, prefix, used).wrong(last, found)
        if not _OF_ACTIVATIONS.fullmatch(last):
            restored[name] = tensors[name]
    check_tensors(restored, plain_config(artifact.config), artifact.path)
    return restored


@dataclass(frozen=True)
class _Layer:
    """The tensors of one layer, by the last parts of their names."""

    tensors: Mapping[str, Tensor]
    prefix: str
    used: set[str]
    """Gets the names of those that are taken."""

    def has(self, last: str) -> bool:
        """Return whether the layer has a tensor."""
        return f"{self.prefix}.{last}" in self.tensors

    def is_scaled(self, last: str) -> bool:
        """Return whether a tensor is a weight that needs a scale."""
        return last == "weight" and self.tensors[f"{self.prefix}.{last}"].dtype not in _FLOATS

    def take(self, last: str, dtypes: Collection[str], *shape: int) -> Tensor:
        """Return a tensor of one of the types and, if it is given, of the shape.

        Raises:
            ArtifactError: it is of others, or missing.
        """
        if not self.has(last):
            beside = next(one for key, one in self.tensors.items() if key.startswith(self.prefix))
            missing = shortened(f"{self.prefix}.{last}")
            msg = f"{beside.path} has a layer without {missing}. Download the model again"
            raise ArtifactError(msg)
        tensor = self.tensors[f"{self.prefix}.{last}"]
        if tensor.dtype not in dtypes or (shape and tensor.shape != shape):
            raise self.wrong(last, f"{' or '.join(dtypes)} {list(shape) if shape else ''}")
        self.used.add(f"{self.prefix}.{last}")
        return tensor

    def values(self, last: str, dtypes: Collection[str]) -> Tensor:
        """Return the tensor of a layer's values, a matrix that is not empty."""
        tensor = self.take(last, dtypes)
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise self.wrong(last, "two dimensions above 0")
        return tensor

    def wrong(self, last: str, expected: str) -> ArtifactError:
        """Return the error of a tensor."""
        dtype, shape, _, _, path = self.tensors[f"{self.prefix}.{last}"]
        name = shortened(f"{self.prefix}.{last}")
        return ArtifactError(
            f"{path} cannot be dequantised: {name} is {dtype} {list(shape)}; expected {expected}. Correct "
            "quantization_config, or take the model's checkpoint that is not quantised"
        )

    def groups(self, inputs: int, size: int, *, needed: bool) -> Callable[[], torch.Tensor]:
        """Return what reads the group of each input: neighbours share one, if the layer has no list."""
        if not needed and not self.has(_GROUPS):
            return lambda: _neighbours(inputs, size)
        tensor, most = self.take(_GROUPS, _INTEGERS, inputs), (inputs - 1) // size

        def read() -> torch.Tensor:
            index: torch.Tensor = tensor.load().long()
            if not 0 <= index.min() <= index.max() <= most:
                found = f"{int(index.min())} to {int(index.max())}"
                raise self.wrong(_GROUPS, f"groups from 0 to {most}, and it has {found}")
            return index

        return read

    def weight(
        self, last: str, shape: tuple[int, int], compute: Callable[[], torch.Tensor]
    ) -> Tensor:
        """Return the dequantised weight; it is stored where its values were."""
        path = self.tensors[f"{self.prefix}.{last}"].path

        def load() -> torch.Tensor:
            weight = compute().bfloat16()
            if not weight.isfinite().all():
                raise self.wrong(last, "finite values and scales, and the product has others")
            return weight

        return Tensor("BF16", shape, 2 * prod(shape), load, path)


def _packed(layer: _Layer, scheme: Awq | Gptq) -> Tensor:
    """Return a weight whose values and zero points are packed in words.

    AWQ: values [inputs, words of outputs], zero points [groups, words of outputs], scales [groups, outputs]. GPTQ: the
    same but values [words of inputs, outputs].
    """
    values, in_word = layer.values("qweight", _WORDS), 32 // scheme.bits
    inputs, outputs = values.shape
    if isinstance(scheme, Awq):
        outputs *= in_word
    else:
        inputs *= in_word
    size = min(scheme.group_size or inputs, inputs)
    count = -(-inputs // size)
    scales = layer.take("scales", _FLOATS, count, outputs)
    zeros = layer.take("qzeros", _WORDS, count, -(-outputs // in_word))
    index = layer.groups(inputs, size, needed=isinstance(scheme, Gptq) and scheme.desc_act)

    def compute() -> torch.Tensor:
        words, zero_words, groups = values.load(), zeros.load().T, index()
        if isinstance(scheme, Awq):
            value, zero = _unpacked(words.T, _AWQ_ORDER), _unpacked(zero_words, _AWQ_ORDER)
        else:
            order = range(in_word)
            if scheme.checkpoint_format == "gptq":
                # 1 to each of a word's values at once, so that it carries where it was borrowed.
                zero_words = zero_words + 0xFFFFFFFF // ((1 << scheme.bits) - 1)
            value, zero = _unpacked(words, order).T, _unpacked(zero_words, order)[:outputs]
        scale: torch.Tensor = scales.load().float().T[:, groups]
        weight: torch.Tensor = (value - zero[:, groups]).float() * scale
        return weight

    return layer.weight("qweight", (outputs, inputs), compute)


def _scaled(layer: _Layer, scheme: CompressedTensors | Fp8) -> Tensor:
    """Return a weight in 8 bits. A scale holds for the whole weight, a row, or a block of rows and columns."""
    values = layer.values("weight", _EIGHT_BITS)
    last = "weight_scale_inv" if layer.has("weight_scale_inv") else "weight_scale"
    scales = layer.take(last, _FLOATS)
    counts = (*scales.shape, *(1 for _ in range(2 - len(scales.shape))))
    sizes = [
        size if -(-total // size) == count else total // max(count, 1)
        for total, count, size in zip(values.shape, counts, scheme.block or (1, 1), strict=False)
    ]
    spans = [-(-total // max(size, 1)) for total, size in zip(values.shape, sizes, strict=True)]
    if tuple(spans) != counts:
        raise layer.wrong(last, f"scales that divide {list(values.shape)}")
    rows, columns = values.shape

    def compute() -> torch.Tensor:
        scale = scales.load().float().reshape(counts)
        scale = scale.repeat_interleave(sizes[0], 0)[:rows].repeat_interleave(sizes[1], 1)
        weight: torch.Tensor = values.load().float() * scale[:, :columns]
        return weight

    return layer.weight("weight", (rows, columns), compute)


def _neighbours(inputs: int, size: int) -> torch.Tensor:
    """Return the group of each input, where neighbours share one."""
    import torch  # not at the top: see there

    return torch.arange(inputs) // size


def _unpacked(words: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return the values in int32[N, M], the lowest of a word first: int32[N * len(order), M].

    `order`: the places of a word's values.
    """
    values, bits = words.new_empty((len(words), len(order), words.shape[1])), 32 // len(order)
    for i, place in enumerate(order):
        values[:, place] = words >> bits * i & (1 << bits) - 1
    return values.flatten(0, 1)
