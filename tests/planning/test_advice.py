"""Where a user is sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from djl_python_neuronx import backends
from djl_python_neuronx.config.device_sampling import OnDeviceGeneration
from djl_python_neuronx.config.findings import Problems
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning import machines
from djl_python_neuronx.planning.case import Case
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.memory import Fit, savings, smallest_fit
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.model_rules import use_backend
from djl_python_neuronx.planning.plan import assess, examine

MODELS = Path(__file__).parent / "models"


def test_every_loader_has_a_backend():
    assert NEURON_BACKENDS.keys() <= set(backends.names())


@pytest.mark.parametrize(
    ("loaders", "other", "expected"),
    [
        (("tnx", "cpu"), "", "set model_loader=tnx or model_loader=cpu"),
        ((), "leave it out", "leave it out"),
        (("nxdi",), "leave it out", "leave it out, or set model_loader=nxdi"),
    ],
)
def test_ways(loaders, other, expected):
    assert use_backend(*loaders, other=other) == expected


QUANTIZE, SPLIT = {"quantize": "static_int8"}, {"load_split_model": "true"}
LOGITS = {"on_device_generation": "true", "output_logits": "true"}
ADVISED = [
    # loader, model, its config.json, options, each option of an error to its end and whether it names the other library
    (
        "nxdi",
        "llama-3-8b",
        {"attention_bias": True},
        QUANTIZE,
        {"quantize": ("leave it out", False)},
    ),
    ("nxdi", "qwen2.5-32b", {}, QUANTIZE, {"quantize": ("model then does not fit", False)}),
    ("nxdi", "mixtral-8x7b", {}, QUANTIZE, {"quantize": ("model then does not fit", False)}),
    ("tnx", "gpt-neox-20b", {}, QUANTIZE, {"quantize": ("model then does not fit", False)}),
    ("nxdi", "llama-3-8b", {}, SPLIT, {"load_split_model": ("remove it", True)}),
    ("nxdi", "qwen2.5-32b", {}, SPLIT, {"load_split_model": ("remove it", False)}),
    ("tnx", "llama-3-8b", {}, LOGITS, {"output_logits": ("remove it", True)}),
    ("tnx", "gpt2", {}, LOGITS, {"output_logits": ("remove it", False)}),
    # each library lacks one of them
    ("nxdi", "llama-3-8b", {}, SPLIT | LOGITS, {"load_split_model": ("remove it", False)}),
    # what both refuse stays, and the rest names the other
    (
        "nxdi",
        "llama-3-8b",
        {},
        SPLIT | {"n_positions": "9000"},
        {"load_split_model": ("remove it", True), "n_positions": ("set at most that", False)},
    ),
    # the model alone, and with the machine
    (
        "tnx",
        "llama-3-8b",
        {"attention_bias": True},
        {},
        {"model_loader": ("with allow_known_defects=true", True)},
    ),
    (
        "nxdi",
        "llama-2-13b",
        {},
        {"tensor_parallel_degree": "12"},
        {"tensor_parallel_degree": ("with allow_known_defects=true", True)},
    ),
    (
        "nxdi",
        "llama-3-70b",
        {},
        {"tensor_parallel_degree": "12"},
        {"tensor_parallel_degree": ("set 1, 2, 4, 8 or 24", True)},
    ),
    # degrees that do not divide the vocabulary are not advised
    (
        "nxdi",
        "llama-3-70b",
        {"vocab_size": 32000},
        {"tensor_parallel_degree": "12", "on_device_generation": "true"},
        {"tensor_parallel_degree": ("set 1, 2, 4, 8 or 24", True)},
    ),
]


@pytest.mark.parametrize(("loader", "model", "config", "options", "expected"), ADVISED)
def test_an_error_names_the_library_that_would_do(loader, model, config, options, expected):
    problems, neuron = Problems(), NEURON_BACKENDS[loader]
    settings = examine(options, MODELS, {}, problems)
    (other,) = (one for one in NEURON_BACKENDS.values() if one is not neuron)
    content = json.loads((MODELS / f"{model}.json").read_text()) | config
    machine = machines.named("inf2.48xlarge")
    case = Case(settings.options, ModelFacts.from_config(content), machine, neuron)
    assess(settings, case, problems, [other])
    found = {one.options[0]: one.message for one in problems if one.level == "error"}
    assert found.keys() == expected.keys()
    for name, (end, is_advised) in expected.items():
        advice = f", or set model_loader={other.name}" * is_advised
        assert found[name].endswith(end + advice), found[name]


def test_degrees_that_the_library_refuses_for_the_model_are_not_advised():
    """32,000 tokens are divided by 16 and not by 24, where the host samples."""
    model = ModelFacts.from_config(json.loads((MODELS / "llama-2-13b.json").read_text()))
    filled = {"n_positions": 4096, "max_rolling_batch_size": 64, "dtype": "bfloat16"}
    options = ServingOptions.model_validate({**filled, "tensor_parallel_degree": 8})
    case = Case(options, model, machines.named("inf2.48xlarge"), NEURON_BACKENDS["nxdi"])
    assert smallest_fit(case) == Fit(32, "trn1.32xlarge")
    on_device = case.with_options(on_device_generation=OnDeviceGeneration())
    assert smallest_fit(on_device) == Fit(24, None)
    accepted = case.with_options(allow_known_defects=True)
    assert smallest_fit(accepted) == Fit(24, None)


@pytest.mark.parametrize(
    ("model", "loader", "chosen", "is_advised"),
    [
        ("llama-3-70b", "tnx", "tnx", True),
        ("llama-3-70b", "nxdi", "nxdi", True),
        # the file would then be taken by transformers-neuronx, which has this model and not the next
        ("llama-3-70b", "auto", "nxdi", True),
        ("qwen2.5-32b", "auto", "nxdi", False),
    ],
)
def test_quantised_weights_are_advised_where_a_library_has_them(model, loader, chosen, is_advised):
    facts = ModelFacts.from_config(json.loads((MODELS / f"{model}.json").read_text()))
    filled = {"n_positions": 4096, "max_rolling_batch_size": 1, "dtype": "bfloat16"}
    options = ServingOptions.model_validate(
        {**filled, "tensor_parallel_degree": 4 if "qwen" in model else 8, "model_loader": loader}
    )
    case = Case(options, facts, machines.named("inf2.48xlarge"), NEURON_BACKENDS[chosen])
    assert ("quantize=static_int8" in [*savings(case)]) == is_advised
