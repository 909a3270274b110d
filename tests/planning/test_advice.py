"""Where a user is sent: nowhere that this version cannot go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from djl_python_neuronx import backends
from djl_python_neuronx.config.findings import is_set
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.planning import model_rules
from djl_python_neuronx.planning.case import NEURON_BACKENDS, Case
from djl_python_neuronx.planning.machines import named
from djl_python_neuronx.planning.model import ModelFacts
from djl_python_neuronx.planning.model_rules import findings, remove_or_switch, use_backend
from tests.config.option_table import TABLE

LATER = " (NxD Inference supports it, but this version cannot load with it yet)"
MORE_CORES = "remove it, and use more cores if the model then does not fit"
CAPABILITIES = {name: facts.architectures for name, facts in NEURON_BACKENDS.items()}
NOT_SERVED = {name for name, facts in NEURON_BACKENDS.items() if not facts.served}


def test_every_loader_has_a_backend():
    assert NEURON_BACKENDS.keys() <= set(backends.names())


@pytest.mark.parametrize(
    ("served", "loaders", "other", "expected"),
    [
        ((), ("tnx", "cpu"), "", "set model_loader=tnx or model_loader=cpu"),
        ((), ("nxdi", "cpu"), "", f"set model_loader=cpu{LATER}"),
        ((), ("nxdi",), "leave it out", f"leave it out{LATER}"),
        ((), (), "leave it out", "leave it out"),
        (("nxdi",), ("nxdi", "cpu"), "", "set model_loader=nxdi or model_loader=cpu"),
        (("nxdi",), ("nxdi",), "leave it out", "leave it out, or set model_loader=nxdi"),
    ],
)
def test_ways(monkeypatch, served, loaders, other, expected):
    known = {
        name: replace(facts, served=name in {"tnx", *served})
        for name, facts in NEURON_BACKENDS.items()
    }
    monkeypatch.setattr(model_rules, "NEURON_BACKENDS", known)
    assert use_backend(*loaders, other=other) == expected


@pytest.mark.parametrize(
    ("name", "model_type", "loader", "expected"),
    [
        ("quantize", "mixtral", "tnx", MORE_CORES),
        ("quantize", "gpt_neox", "tnx", MORE_CORES),
        ("bf16_rms_norm", "llama", "nxdi", "remove it, or set model_loader=tnx"),
        ("enable_prefix_caching", "llama", "tnx", "remove it"),
        ("pipeline_parallel_degree", "llama", "tnx", f"remove it{LATER}"),
        # the other library has the option, and not the model, or not for this model
        ("bf16_rms_norm", "qwen2", "nxdi", "remove it"),
        ("bf16_rms_norm", "gpt2", "nxdi", "remove it"),
        ("pipeline_parallel_degree", "gpt2", "tnx", "remove it"),
        ("pipeline_parallel_degree", None, "tnx", "remove it"),
    ],
)
def test_without_an_option(name, model_type, loader, expected):
    assert remove_or_switch(name, model_type, loader) == expected


@pytest.mark.parametrize("loader", CAPABILITIES)
def test_no_finding_names_a_loader_that_cannot_load(loader):
    rows = {name: row.good[0][0] for name, row in TABLE.items() if name != "model_loader"}
    everything = ServingOptions.model_validate(rows)
    assert sum(is_set(everything, name) for name in rows) > 100
    every = {kind for library in CAPABILITIES.values() for kind in library}
    for kind in sorted(every | {"t5"}):
        facts = ModelFacts(model_type=kind, config={"attention_bias": True, "hidden_act": "relu"})
        for found in findings(Case(everything, facts, named("inf2.48xlarge"), loader)):
            for other in NOT_SERVED:
                assert f"model_loader={other}" not in found.problem
