"""Facts of a model from its configuration."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_python_neuronx.errors import ArtifactError
from djl_python_neuronx.planning.model import ModelFacts

MODELS = Path(__file__).parent / "models"


def published(name):
    return json.loads((MODELS / f"{name}.json").read_text())


def test_every_fact_of_a_grouped_query_model():
    assert ModelFacts.from_config(published("llama-3-8b")) == ModelFacts(
        model_type="llama",
        architecture="LlamaForCausalLM",
        num_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        vocab_size=128256,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_positions=8192,
        dtype="bfloat16",
        num_parameters=8_030_261_248,
        embedding_parameters=128256 * 4096,
        cache_values_per_token=2 * 32 * 8 * 128,
    )


# layers, hidden, intermediate, vocabulary, heads, KV heads, head size, longest sequence: from the model cards
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gpt2", (12, 768, 3072, 50257, 12, 12, 64, 1024)),
        ("gpt-j-6b", (28, 4096, 16384, 50400, 16, 16, 256, 2048)),
        ("gpt-neox-20b", (44, 6144, 24576, 50432, 64, 64, 96, 2048)),
        ("bloom-176b", (70, 14336, 57344, 250880, 112, 112, 128, 2048)),
        ("opt-66b", (64, 9216, 36864, 50272, 72, 72, 128, 2048)),
        ("mixtral-8x7b", (32, 4096, 14336, 32000, 32, 8, 128, 32768)),
        ("qwen2.5-32b", (64, 5120, 27648, 152064, 40, 8, 128, 131072)),
    ],
)
def test_sizes_under_every_name(name, sizes):
    facts = ModelFacts.from_config(published(name))
    assert sizes == (
        facts.num_layers,
        facts.hidden_size,
        facts.intermediate_size,
        facts.vocab_size,
        facts.num_heads,
        facts.num_kv_heads,
        facts.head_dim,
        facts.max_positions,
    )


@pytest.mark.parametrize(("name", "experts"), [("mixtral-8x7b", 8), ("llama-3-8b", 1), ("gpt2", 1)])
def test_experts(name, experts):
    assert ModelFacts.from_config(published(name)).num_experts == experts


@pytest.mark.parametrize(
    ("name", "tied"), [("gpt2", True), ("opt-13b", True), ("bloom-176b", True), ("gpt-j-6b", False)]
)
def test_tied_embeddings(name, tied):
    assert ModelFacts.from_config(published(name)).tied_embeddings is tied


@pytest.mark.parametrize(
    ("name", "window"),
    [("mistral-7b-v0.1", 4096), ("mixtral-8x7b", None), ("qwen2.5-32b", None), ("gpt2", None)],
)
def test_a_sliding_window_counts_where_it_is_used(name, window):
    assert ModelFacts.from_config(published(name)).sliding_window == window


@pytest.mark.parametrize(
    ("config", "told", "dtype"),
    [
        ({"torch_dtype": "float16"}, None, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, None, "bfloat16"),
        ({"torch_dtype": "torch.float32"}, "bfloat16", "float32"),
        ({"torch_dtype": None}, "bfloat16", "bfloat16"),
        ({"torch_dtype": "float8_e4m3fn"}, "f8_e4m3", None),
        ({"dtype": 7}, None, None),
        ({}, None, None),
    ],
)
def test_dtype(config, told, dtype):
    assert ModelFacts.from_config(config, told).dtype == dtype


@pytest.mark.parametrize(
    ("config", "kv_heads"),
    [
        ({"n_head": 12}, 12),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 3),
        ({"num_attention_heads": 12, "num_key_value_heads": None}, 12),
        ({"model_type": "gpt_bigcode", "n_head": 12}, 1),
        ({"model_type": "gpt_bigcode", "n_head": 12, "multi_query": False}, 12),
        ({"model_type": "falcon", "num_attention_heads": 71}, 1),
        (
            {
                "model_type": "falcon",
                "num_attention_heads": 128,
                "new_decoder_architecture": True,
                "num_kv_heads": 8,
            },
            8,
        ),
        ({"model_type": "dbrx", "n_heads": 48, "attn_config": {"kv_n_heads": 8}}, 8),
        ({}, None),
    ],
)
def test_kv_heads(config, kv_heads):
    assert ModelFacts.from_config(config).num_kv_heads == kv_heads


def test_text_beside_images():
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {"model_type": "gemma3_text", **published("llama-3-8b")},
    }
    text = ModelFacts.from_config(config)
    assert (text.model_type, text.num_layers) == ("gemma3", 32)
    assert text.architecture == "Gemma3ForConditionalGeneration"
    assert text.num_parameters
    # The tower for images has parameters too, which are not counted here.
    assert ModelFacts.from_config({**config, "vision_config": {}}).num_parameters is None


def test_nothing_is_known_of_nothing():
    assert ModelFacts.from_config({}) == ModelFacts()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("hidden_size", [1]), ("vocab_size", 1e308), ("num_attention_heads", 3.5)],
        *[("intermediate_size", -1), ("num_key_value_heads", 0), ("head_dim", "x" * 999)],
        *[("num_hidden_layers", True), ("vocab_size", 10**30), ("n_embd", {})],
        *[("hidden_size", "4096"), ("vocab_size", 0)],
    ],
)
def test_a_size_of_a_known_architecture_that_is_none(key, value):
    config = {**published("llama-3-8b"), key: value}
    with pytest.raises(ArtifactError, match=f"gives {key} .*expected an integer above 0") as caught:
        ModelFacts.from_config(config)
    assert len(str(caught.value)) < 400
    with pytest.raises(ArtifactError, match=key):
        ModelFacts.from_config({"model_type": "gemma3", "text_config": config})
    # Others may have a size for each layer, or mean something else.
    ModelFacts.from_config({**config, "model_type": "other"})
    ModelFacts.from_config({**config, key: None})


KEYS = sorted({key for path in MODELS.glob("*.json") for key in json.loads(path.read_text())})
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(
    name=st.sampled_from(sorted(path.stem for path in MODELS.glob("*.json"))),
    junk=st.dictionaries(
        st.sampled_from([*KEYS, "text_config", "vision_config", "attn_config", "ffn_config"]),
        JUNK | st.integers(min_value=10**30),
        max_size=6,
    ),
)
def test_no_configuration_is_too_odd(name, junk):
    config = {**published(name), **junk}
    facts = ModelFacts()
    with suppress(ArtifactError):
        facts = ModelFacts.from_config(config)
    for value in (facts.num_layers, facts.num_heads, facts.max_positions, facts.vocab_size):
        assert value is None or (type(value) is int and value > 0)
    assert facts.num_parameters is None or facts.num_parameters > facts.embedding_parameters
