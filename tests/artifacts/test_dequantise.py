"""Quantised checkpoints against the formula of their format, and what is not dequantised."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from djl_python_neuronx.artifacts.convert import convert  # noqa: E402
from djl_python_neuronx.errors import ArtifactError  # noqa: E402
from tests.doubles.quantised_checkpoints import (  # noqa: E402
    FORMATS,
    edit_config,
    edit_tensors,
    save_quantised,
)

LAYER = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("name", FORMATS)
def test_each_weight_is_the_formula_bit_for_bit(name, tmp_path):
    expected = save_quantised(name, tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "out", "safetensors", dequantize=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["torch_dtype"] == "bfloat16"


def change(last, to):
    def edit(tensors):
        name = f"{LAYER}.{last}"
        tensors[name] = to(tensors[name])

    return edit


def drop(last):
    return lambda tensors: tensors.pop(f"{LAYER}.{last}")


def add(last, tensor):
    return lambda tensors: tensors.update({f"{LAYER}.{last}": tensor})


def narrower(tensor):
    return tensor[:, :-1]


def out_of_range(tensor):
    tensor[3] = 2
    return tensor


def negative(tensor):
    tensor[3] = -1
    return tensor


def infinite(tensor):
    tensor[-1, 0] = torch.inf
    return tensor


def not_a_number(tensor):
    tensor[0] = torch.nan
    return tensor


ORDERED = "gptq, ordered, second format"
BAD_TENSORS = {
    # format, change, words of the error
    "awq without zeros": ("awq", drop("qzeros"), ("without", "qzeros")),
    "awq, floats": ("awq", change("qweight", lambda one: one.float()), ("F32", "expected I32")),
    "awq, a vector": ("awq", change("qweight", lambda one: one.flatten()), ("two dimensions",)),
    "awq, empty": ("awq", change("qweight", lambda one: one[:0]), ("two dimensions",)),
    "awq, scales": ("awq", change("scales", narrower), ("F16 [2, 95]", "[2, 96]")),
    "awq, scaled activations": (
        "awq",
        add("act.scales", torch.ones(4)),
        ("act.scales", "no layer"),
    ),
    "awq, both weights": ("awq", add("weight", torch.ones(96, 64)), (".weight", "no layer")),
    "gptq without g_idx": (ORDERED, drop("g_idx"), ("without", "g_idx")),
    "gptq, a far group": (ORDERED, change("g_idx", out_of_range), ("g_idx", "0 to 1", "to 2")),
    "gptq, a group below 0": (ORDERED, change("g_idx", negative), ("g_idx", "-1 to 1")),
    "gptq, g_idx too short": (ORDERED, change("g_idx", lambda one: one[:-1]), ("[63]", "[64]")),
    "awq, an infinite scale": ("awq", change("scales", infinite), ("qweight", "finite")),
    "gptq, a scale that is no number": (
        "gptq 4",
        change("scales", not_a_number),
        ("qweight", "finite"),
    ),
    "fp8, a scale that is no number": (
        "float, channel",
        change("weight_scale", not_a_number),
        (".weight is F8", "finite"),
    ),
    "gptq, zeros": ("gptq 8", change("qzeros", narrower), ("qzeros", "[2, 23]", "[2, 24]")),
    "float, zero points": (
        "float, channel",
        add("weight_zero_point", torch.ones(96, 1)),
        ("zero_point", "no layer"),
    ),
    "float, values of int8": (
        "float, channel",
        change("weight", lambda one: one.to(torch.int8)),
        ("weight is I8", "F8_E4M3"),
    ),
    "float without scales": ("float, channel", drop("weight_scale"), ("without", "weight_scale")),
    "float, scales": ("float, channel", change("weight_scale", lambda one: one[:-1]), ("[95, 1]",)),
    "float, integer scales": ("fp8", change("weight_scale", lambda one: one.int()), ("I32",)),
    "float, three dimensions": (
        "fp8",
        change("weight_scale", lambda one: one.reshape(1, 1, 1)),
        ("weight_scale", "[1, 1, 1]"),
    ),
    "float, no scales in a row": (
        "float, channel",
        change("weight_scale", lambda one: one[:0]),
        ("[0, 1]",),
    ),
    "fp8, experts in one tensor": (
        "fp8",
        add("gate_up_proj", torch.ones(4, 4).to(torch.float8_e4m3fn)),
        ("gate_up_proj", "no layer"),
    ),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_a_wrong_tensor_is_named_with_its_file(name, tmp_path):
    form, edit, expected = BAD_TENSORS[name]
    save_quantised(form, tmp_path / "model")
    edit_tensors(tmp_path / "model", edit)
    with pytest.raises(ArtifactError) as error:
        convert(tmp_path / "model", tmp_path / "out", "safetensors", dequantize=True)
    for words in (LAYER, "model.safetensors", *expected):
        assert words in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_missing_layer_is_named_with_the_models_folder(tmp_path):
    model = tmp_path / "model"
    save_quantised("awq", model)

    def edit(tensors):
        for name in [one for one in tensors if one.startswith(LAYER)]:
            del tensors[name]

    edit_tensors(model, edit)
    with pytest.raises(ArtifactError, match=rf"{model} lack 1 .*{LAYER}\.weight"):
        convert(model, tmp_path / "out", "safetensors", dequantize=True)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
FLOAT = FORMATS["float, channel"][0]
PLAIN_GROUP = {"weights": {"num_bits": 8, "type": "float"}}
REFUSED = {
    "no object": "awq",
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "mxfp4": {"quant_method": "mxfp4"},
    "gemv": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"},
    "awq, 3 bits": {"quant_method": "awq", "bits": 3, "group_size": 32},
    "gptq, 3 bits": {**GPTQ, "bits": 3},
    "gptq without bits": {"quant_method": "gptq", "group_size": 32},
    "no method": {"bits": 4},
    "a list as method": {"quant_method": ["gptq"]},
    "gptq, group_size of 0": {**GPTQ, "group_size": 0},
    "gptq, group_size of -2": {**GPTQ, "group_size": -2},
    "gptq, group_size of 2**40": {**GPTQ, "group_size": 2**40},
    "gptq, group_size of true": {**GPTQ, "group_size": True},
    "gptq, group_size as text": {**GPTQ, "group_size": "32"},
    "gptq, marlin": {**GPTQ, "checkpoint_format": "marlin"},
    "gptq, other bits": {**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}},
    "no groups": {**FLOAT, "config_groups": {}},
    "two groups": {**FLOAT, "config_groups": {"a": PLAIN_GROUP, "b": PLAIN_GROUP}},
    "int8": {**FLOAT, "config_groups": {"a": {"weights": {"num_bits": 8, "type": "int"}}}},
    "zero points": {
        **FLOAT,
        "config_groups": {"a": {"weights": {**PLAIN_GROUP["weights"], "symmetric": False}}},
    },
    "inputs in another order": {
        **FLOAT,
        "config_groups": {"a": {"weights": {**PLAIN_GROUP["weights"], "actorder": "group"}}},
    },
    "int-quantized": {**FLOAT, "format": "int-quantized"},
    "pack-quantized": {**FLOAT, "format": "pack-quantized"},
    "nvfp4": {**FLOAT, "format": "nvfp4-pack-quantized"},
    "marlin-24": {**FLOAT, "format": "marlin-24"},
    "sparse": {**FLOAT, "sparsity_config": {"format": "sparse-24-bitmask"}},
    "rotated": {**FLOAT, "transform_config": {"config_groups": {"R1": {}}}},
    "blocks of 0": {"quant_method": "fp8", "weight_block_size": [0, 128]},
    "three block sizes": {"quant_method": "fp8", "weight_block_size": [1, 1, 1]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_format_that_is_not_dequantised_is_named(name, tmp_path):
    save_quantised("awq", tmp_path / "model")
    edit_config(tmp_path / "model", quantization_config=REFUSED[name])
    with pytest.raises(ArtifactError, match=r"quantization_config.*not quantised") as error:
        convert(tmp_path / "model", tmp_path / "out", "safetensors", dequantize=True)
    assert "config.json" in str(error.value)
    assert "; expected " in str(error.value)
    for words in ("discriminator", "should", "Field required"):  # pydantic's
        assert words not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_group_size_beyond_the_layer_is_one_group(tmp_path):
    expected = save_quantised("gptq, one group", tmp_path / "model")
    edit_config(tmp_path / "model", quantization_config={**GPTQ, "group_size": 2**31 - 1})
    convert(tmp_path / "model", tmp_path / "out", "safetensors", dequantize=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
