"""The formulas of quantised checkpoints: the weight of each linear layer in bfloat16.

A weight is (value - zero) * scale, computed in float32, which holds both factors exactly, and rounded once. Types and
shapes are checked by headers, before anything is computed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import gcd, prod
from typing import Final

import torch

from djl_python_neuronx.artifacts.quantised import Awq, CompressedTensors, Fp8, Gptq, Scheme
from djl_python_neuronx.artifacts.tensor_files import Tensor
from djl_python_neuronx.config.values import shortened
from djl_python_neuronx.errors import ArtifactError

_FLOATS = ("BF16", "F16", "F32")
_EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "I8")
_INTEGERS, _WORDS = ("I32", "I64"), ("I32",)
# Activations and caches are not quantised afterwards.
_OF_ACTIVATIONS = re.compile(r"(input|output|activation|[qkv])_(scale|zero_point|global_scale)")
_OF_WEIGHTS = re.compile(r"qweight|qzeros|g_idx|scales|weight_\w+")
_PACKED: Final = {
    "awq": ("qweight", "qzeros", "scales", "g_idx"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "compressed-tensors": ("weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx"),
}
"""Last parts of the names of a layer's tensors whose values are packed: values, zeros, scales, groups of inputs."""
# The outputs in a word of AutoAWQ, from the lowest bits on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def dequantised(tensors: Mapping[str, Tensor], scheme: Scheme) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint without quantised layers, whose weights are computed as they are loaded.

    Raises:
        ArtifactError: a tensor is missing, of a wrong type or shape, or of no layer.
    """
    restored: dict[str, Tensor] = {}
    used: set[str] = set()
    for name in tensors:
        prefix, _, last = name.rpartition(".")
        layer = _Layer(tensors, prefix, used)
        if not isinstance(scheme, Fp8) and last == _PACKED[scheme.quant_method][0]:
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
        """Return whether a tensor is a weight in 8 bits."""
        return last == "weight" and self.tensors[f"{self.prefix}.{last}"].dtype in _EIGHT_BITS

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

    def groups(
        self, last: str, inputs: int, size: int, *, needed: bool
    ) -> Callable[[], torch.Tensor]:
        """Return what reads the group of each input: neighbours share one, if the layer has no list."""
        if not needed and not self.has(last):
            return lambda: torch.arange(inputs) // size
        tensor, most = self.take(last, _INTEGERS, inputs), (inputs - 1) // size

        def read() -> torch.Tensor:
            index: torch.Tensor = tensor.load().long()
            if not 0 <= index.min() <= index.max() <= most:
                found = f"{int(index.min())} to {int(index.max())}"
                raise self.wrong(last, f"groups from 0 to {most}, and it has {found}")
            return index

        return read

    def shape_check(self, last: str, expected: list[int]) -> Callable[[], None]:
        """Return what refuses packed values of another shape than the layer records, if it does."""
        if not self.has(last):
            return lambda: None
        tensor = self.take(last, _INTEGERS, 2)

        def check() -> None:
            if (found := tensor.load().tolist()) != expected:
                raise self.wrong(last, f"the values {expected}, and it has {found}")

        return check

    def weight(
        self, last: str, shape: tuple[int, int], compute: Callable[[], torch.Tensor]
    ) -> Tensor:
        """Return the dequantised weight; it is stored where its values were."""
        path = self.tensors[f"{self.prefix}.{last}"].path
        return Tensor("BF16", shape, 2 * prod(shape), lambda: compute().bfloat16(), path)


def _packed(layer: _Layer, scheme: Awq | Gptq | CompressedTensors) -> Tensor:
    """Return a weight whose values and zero points are packed in words.

    AWQ: values [inputs, words of outputs], zero points [groups, words of outputs], scales [groups, outputs]. GPTQ: the
    same but values [words of inputs, outputs]. compressed-tensors: all of GPTQ's transposed.
    """
    of_values, of_zeros, of_scales, of_groups = _PACKED[scheme.quant_method]
    turned = isinstance(scheme, CompressedTensors)
    bits, order = scheme.bits, _AWQ_ORDER if isinstance(scheme, Awq) else ()
    values = layer.values(of_values, _WORDS)
    inputs, outputs = values.shape[::-1] if turned else values.shape
    inputs, outputs = (inputs, outputs * 8) if order else (inputs * 32 // bits, outputs)
    if bits == 3 and (inputs % 32 or outputs % 32):
        raise layer.wrong(of_values, "32 values in three words")
    size = min(scheme.group_size or inputs, inputs)
    count = -(-inputs // size)

    def take(last: str, dtypes: Collection[str], *shape: int) -> Tensor:
        return layer.take(last, dtypes, *(shape[::-1] if turned else shape))

    scales = take(of_scales, _FLOATS, count, outputs)
    zeros = None
    if layer.has(of_zeros) or not turned:
        zeros = take(of_zeros, _WORDS, count, -(-outputs * bits // 32))
    check = layer.shape_check("weight_shape", [outputs, inputs])
    index = layer.groups(of_groups, inputs, size, needed=scheme.desc_act)

    def load(tensor: Tensor) -> torch.Tensor:
        loaded: torch.Tensor = tensor.load()
        return loaded.T if turned else loaded

    def compute() -> torch.Tensor:
        check()
        words, places = load(values), index()
        value = _unpacked(words.T, bits, order) if order else _unpacked(words, bits).T
        zero = torch.tensor(1 << (bits - 1)).expand(outputs, count)
        if zeros is not None:
            zero = _unpacked(load(zeros).T, bits, order, scheme.added)[:outputs]
        return (value - zero[:, places]).float() * load(scales).float().T[:, places]

    return layer.weight(of_values, (outputs, inputs), compute)


def _scaled(layer: _Layer, scheme: CompressedTensors | Fp8) -> Tensor:
    """Return a weight in 8 bits. A scale holds for the whole weight, a row, or a block of rows and columns."""
    values = layer.values("weight", _EIGHT_BITS)
    last = "weight_scale_inv" if layer.has("weight_scale_inv") else "weight_scale"
    scales = layer.take(last, _FLOATS)
    counts = (*scales.shape, *(1 for _ in range(2 - len(scales.shape))))
    sizes = [
        size if -(-total // size) == count else total // max(count, 1)
        for total, count, size in zip(values.shape, counts, scheme.block, strict=False)
    ]
    spans = [-(-total // max(size, 1)) for total, size in zip(values.shape, sizes, strict=True)]
    if tuple(spans) != counts:
        raise layer.wrong(last, f"scales that divide {list(values.shape)}")
    zeros = None
    if layer.has("weight_zero_point"):
        zeros = layer.take("weight_zero_point", ("I8",), *scales.shape)
    rows, columns = values.shape

    def spread(tensor: Tensor) -> torch.Tensor:
        whole = tensor.load().float().reshape(counts).repeat_interleave(sizes[0], 0)
        wide: torch.Tensor = whole[:rows].repeat_interleave(sizes[1], 1)
        return wide[:, :columns]

    def compute() -> torch.Tensor:
        value: torch.Tensor = values.load().float()
        return (value if zeros is None else value - spread(zeros)) * spread(scales)

    return layer.weight("weight", (rows, columns), compute)


def _unpacked(
    words: torch.Tensor, bits: int, order: Collection[int] = (), added: int = 0
) -> torch.Tensor:
    """Return the values of `bits` bits in the columns of int32[N, M], the lowest first: int32[N * 32 / bits, M].

    `order`: the places of the values of a word. `added` to each value while they are together in words, so that it
    carries where it was borrowed.
    """
    block = bits // gcd(bits, 32)
    count = 32 * block // bits
    words = words.reshape(-1, block, words.shape[1])
    ones = sum(added << bits * i for i in range(count))
    each = torch.tensor([ones >> 32 * i & 0xFFFFFFFF for i in range(block)])
    words = words + each.to(torch.int32).unsqueeze(1)
    values = words.new_empty((words.shape[0], count, words.shape[2]))
    for i, place in enumerate(order or range(count)):
        word, start = divmod(bits * i, 32)
        value = words[:, word] >> start
        if start + bits > 32:
            value = value & (1 << 32 - start) - 1 | words[:, word + 1] << 32 - start
        values[:, place] = value & (1 << bits) - 1
    return values.flatten(0, 1)
