"""The field `quantization_config` of checkpoints that can be dequantised; `dequantise` has the formulas."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from djl_python_neuronx.config.values import shortened
from djl_python_neuronx.errors import ArtifactError

METHODS: Final = "awq, compressed-tensors, fp8 or gptq"
"""Values of `quant_method` that are dequantised."""
_Size = Annotated[int, Field(ge=1, lt=2**31, strict=True)]
_GroupSize = Annotated[_Size | None, BeforeValidator(lambda value: None if value == -1 else value)]
"""Inputs that share a scale; None: all of a layer's."""
_Block: TypeAlias = tuple[_Size, _Size]
_Form = Literal["float-quantized", "naive-quantized"]


class Awq(BaseModel):
    """Source: AutoAWQ 0.2, utils/packing_utils.py and modules/linear/gemm.py; gemv has another layout."""

    quant_method: Literal["awq"]
    version: Literal["gemm", "GEMM"] = "gemm"
    bits: Literal[4]
    group_size: _GroupSize


class Gptq(BaseModel):
    """Source: AutoGPTQ 0.7, nn_modules/qlinear; GPTQModel 2.0, utils/model.py."""

    quant_method: Literal["gptq"]
    bits: Literal[2, 4, 8]
    group_size: _GroupSize
    checkpoint_format: Literal["gptq", "gptq_v2"] = "gptq"
    """The first one stores zero points less 1."""
    desc_act: bool = False
    """Inputs of a group are not neighbours: each layer has a list of groups."""
    dynamic: dict[Annotated[str, Field(pattern="^-:")], Any] | None = None
    """Layers that are not quantised. Other numbers of bits for some layers are not supported."""


class _Weights(BaseModel):
    type: Literal["float"]
    num_bits: Literal[8]
    symmetric: Literal[True] = True
    """False: a value has a zero point, which compressed-tensors has for integers alone."""
    actorder: Literal["weight", "static", False] | None = None
    """Others give each layer a list of groups."""
    block_structure: _Block | None = None


class _Group(BaseModel):
    format: _Form | None = None
    weights: _Weights


class _Sparsity(BaseModel):
    format: Literal["dense"]


class CompressedTensors(BaseModel):
    """FP8 alone. Source: compressed-tensors 0.15, compressors and quantization/quant_args.py."""

    quant_method: Literal["compressed-tensors"]
    format: _Form
    config_groups: dict[str, _Group] = Field(min_length=1, max_length=1)
    """Layers that are quantised alike; several ways in one model are not supported."""
    sparsity_config: _Sparsity | None = None
    transform_config: dict[str, Any] | None = Field(None, max_length=0)
    """Rotations of activations, which weights alone do not undo."""

    @property
    def block(self) -> _Block | None:
        """Outputs and inputs that share a scale; None: it follows from the scales' shape."""
        return next(iter(self.config_groups.values())).weights.block_structure


class Fp8(BaseModel):
    """Source: transformers 4.57, FineGrainedFP8Config; DeepSeek-V3, inference/kernel.py."""

    quant_method: Literal["fp8"]
    block: _Block | None = Field(None, alias="weight_block_size")
    """See `CompressedTensors.block`."""


Scheme: TypeAlias = Awq | Gptq | CompressedTensors | Fp8
_SCHEMES: Final = {
    get_args(kind.model_fields["quant_method"].annotation)[0]: kind for kind in get_args(Scheme)
}
_EXPECTED: Final = {
    "missing": "a value",
    "model_type": "an object",
    "dict_type": "an object",
    "tuple_type": "a list of two numbers",
    "too_long": "fewer entries",
    "too_short": "more entries",
    "string_pattern_mismatch": "layers that are not quantised, which begin with '-:'",
}
"""Types of pydantic's errors -> the value that is expected; of all others a number."""


def read_scheme(config: Mapping[str, Any], folder: Path) -> Scheme:
    """Read `quantization_config` of the config.json in a folder.

    Raises:
        ArtifactError: it is absent, malformed, or of a format that is not dequantised, which the message names.
    """
    name, value = "quantization_config", config.get("quantization_config")
    if isinstance(value, Mapping):
        name, value = f"{name}.quant_method", value.get("quant_method")
        if isinstance(value, str) and value in _SCHEMES:
            return _validated(_SCHEMES[value], config["quantization_config"], folder)
    raise _refusal(folder, name, value, METHODS)


def _validated(kind: type[Scheme], value: object, folder: Path) -> Scheme:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(("quantization_config", *map(str, first["loc"])))
        given = None if first["type"] == "missing" else first["input"]
        numbers = "a whole number from 1 to 2147483647"
        words = first.get("ctx", {}).get("expected") or _EXPECTED.get(first["type"], numbers)
        raise _refusal(folder, name, given, words) from error


def _refusal(folder: Path, name: str, value: object, expected: str) -> ArtifactError:
    found = "missing" if value is None else repr(shortened(value))
    return ArtifactError(
        f"{folder / 'config.json'} cannot be dequantised: {name} is {found}; expected {expected}. Take the model's "
        "checkpoint that is not quantised"
    )


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the dequantised model."""
    dropped = {"quantization_config", "dtype"}
    return {key: config[key] for key in config.keys() - dropped} | {"torch_dtype": "bfloat16"}
