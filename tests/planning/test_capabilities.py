"""What is written down of the libraries agrees with itself and with the options."""

import pytest

from djl_python_neuronx.config.options import ServingOptions, option
from djl_python_neuronx.planning import capabilities
from djl_python_neuronx.planning.capabilities import CAPABILITIES

# Source: transformers-neuronx 0.13, the packages with a model.py (the old engine listed gpt_bigcode, which is none);
# neuronx-distributed-inference 0.9.0, utils/constants.py MODEL_TYPES.
MODEL_TYPES = {
    "tnx": "bloom gpt2 gpt_neox gptj llama mistral mixtral opt",
    "nxdi": "dbrx gemma3 gpt_oss llama llama4 mistral mixtral mllama pixtral qwen2 qwen2_vl qwen3 qwen3_moe qwen3_vl",
}
ROWS = [
    pytest.param(loader, entry, id=f"{loader}-{model_type}")
    for loader, its in CAPABILITIES.items()
    for model_type, entry in its.items()
]
DEFECTS = {
    value
    for name, value in vars(capabilities).items()
    if name.isupper() and not name.startswith("_") and isinstance(value, str)
}


@pytest.mark.parametrize("loader", MODEL_TYPES)
def test_every_architecture_of_the_library_is_listed(loader):
    assert sorted(CAPABILITIES[loader]) == MODEL_TYPES[loader].split()


@pytest.mark.parametrize(("loader", "entry"), ROWS)
def test_only_options_of_the_library_are_named(loader, entry):
    for name in (*entry.unread, *entry.refused):
        assert name in ServingOptions.model_fields
        assert loader in option(name).to
    assert not entry.unread & entry.refused.keys()
    assert all(entry.refused.values())


@pytest.mark.parametrize(("loader", "entry"), ROWS)
def test_an_ability_that_is_missing_is_not_asked_for_in_silence(loader, entry):
    stopped = entry.unread | entry.refused.keys()
    assert entry.int8 == ("quantize" not in stopped)
    assert entry.on_device_sampling == ("on_device_generation" not in stopped)
    assert entry.on_device_greedy or not entry.on_device_sampling
    if loader == "tnx":
        assert entry.attention_bsh == ("attention_layout" not in stopped)
    if not entry.text_only:
        assert "speculative_draft_model" in stopped


def test_an_option_that_nobody_reads_is_no_option_of_the_library():
    for its in CAPABILITIES.values():
        assert not frozenset.intersection(*(entry.unread for entry in its.values()))


@pytest.mark.parametrize(("loader", "entry"), ROWS)
def test_defects_have_names_and_reasons(loader, entry):
    assert entry.defects.keys() <= DEFECTS
    assert all(len(reason) > 20 for reason in entry.defects.values())


def test_every_defect_is_somewhere():
    found = {
        name for its in CAPABILITIES.values() for entry in its.values() for name in entry.defects
    }
    assert found == DEFECTS


def test_who_was_seen_to_give_the_right_tokens():
    unseen = {
        (loader, name)
        for loader, its in CAPABILITIES.items()
        for name, entry in its.items()
        if not entry.verified
    }
    images = {"llama4", "mllama", "pixtral", "qwen2_vl", "qwen3_vl"}
    assert unseen == {
        ("nxdi", name) for name in {*images, "dbrx", "gemma3", "gpt_oss", "qwen3_moe"}
    }
