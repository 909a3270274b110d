"""Where a user is sent."""

from __future__ import annotations

import pytest

from djl_python_neuronx import backends
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS
from djl_python_neuronx.planning.model_rules import remove_or_switch, use_backend

MORE_CORES = "remove it, and use more cores if the model then does not fit"
CAPABILITIES = {name: facts.architectures for name, facts in NEURON_BACKENDS.items()}


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


@pytest.mark.parametrize(
    ("name", "model_type", "loader", "expected"),
    [
        ("quantize", "llama", "nxdi", f"{MORE_CORES}, or set model_loader=tnx"),
        ("quantize", "gpt_neox", "tnx", MORE_CORES),
        ("bf16_rms_norm", "llama", "nxdi", "remove it, or set model_loader=tnx"),
        ("output_logits", "llama", "tnx", "remove it, or set model_loader=nxdi"),
        # what this version does not serve with the other library either
        ("quantize", "mixtral", "tnx", MORE_CORES),
        # the other library has the option, and not the model, or not for this model
        ("bf16_rms_norm", "qwen2", "nxdi", "remove it"),
        ("bf16_rms_norm", "gpt2", "nxdi", "remove it"),
        ("output_logits", "gpt2", "tnx", "remove it"),
        ("output_logits", None, "tnx", "remove it"),
    ],
)
def test_without_an_option(name, model_type, loader, expected):
    assert remove_or_switch(name, model_type, loader) == expected
