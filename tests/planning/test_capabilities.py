"""The tables about the libraries agree with each other and with the options."""

import pytest

from djl_python_neuronx.config.options import ServingOptions, option
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS

CAPABILITIES = {name: facts.architectures for name, facts in NEURON_BACKENDS.items()}

# Source: transformers-neuronx 0.13, the packages with a model.py, and gpt_bigcode, which gpt2's serves;
# neuronx-distributed-inference 0.9.0, utils/constants.py MODEL_TYPES, without those that take images.
MODEL_TYPES = {
    "tnx": "bloom gpt2 gpt_bigcode gpt_neox gptj llama mistral mixtral opt",
    "nxdi": "dbrx gpt_oss llama mistral mixtral qwen2 qwen3 qwen3_moe",
}
ROWS = [
    pytest.param(loader, entry, id=f"{loader}-{model_type}")
    for loader, its in CAPABILITIES.items()
    for model_type, entry in its.items()
]


@pytest.mark.parametrize("loader", MODEL_TYPES)
def test_every_architecture_of_the_library_is_listed(loader):
    assert sorted(CAPABILITIES[loader]) == MODEL_TYPES[loader].split()


@pytest.mark.parametrize(("loader", "entry"), ROWS)
def test_only_options_of_the_library_are_named(loader, entry):
    for name in (*entry.ignored_options, *entry.unsupported_options):
        assert name in ServingOptions.model_fields
        assert loader in option(name).to
    assert not entry.ignored_options & entry.unsupported_options.keys()
    assert all(entry.unsupported_options.values())


@pytest.mark.parametrize(("loader", "entry"), ROWS)
def test_models_with_images_do_not_draft(loader, entry):
    if any("images" in reason for reason in entry.unsupported_options.values()):
        assert not entry.supports("speculative_draft_model")
        assert not entry.speculation


def test_an_option_that_nobody_reads_is_no_option_of_the_library():
    for its in CAPABILITIES.values():
        assert not frozenset.intersection(*(entry.ignored_options for entry in its.values()))


@pytest.mark.parametrize(("loader", "entry"), ROWS)
def test_defects_have_reasons_and_a_way_out(loader, entry):
    assert len(set(entry.defects)) == len(entry.defects)
    for defect in entry.defects:
        assert len(defect.problem) > 20
        assert set(defect.names) <= ServingOptions.model_fields.keys()
        assert defect.fix or "cpu" in defect.backends


def test_who_was_seen_to_give_the_right_tokens():
    unseen = {
        (loader, name)
        for loader, its in CAPABILITIES.items()
        for name, entry in its.items()
        if not entry.verified
    }
    assert unseen == {("nxdi", "gpt_oss")}
