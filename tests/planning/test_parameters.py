"""Parameter counts against published totals and against the architectures themselves, built without memory."""

import json
from pathlib import Path

import pytest

from djl_python_neuronx.planning.model import Dimensions, ModelFacts, count

MODELS = Path(__file__).parent / "models"

PUBLISHED = {
    # `total_size` of the checkpoint's model.safetensors.index.json, divided by the bytes of its dtype
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-instruct-v0.2": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-32b": 32_763_876_352,
    # the parameter counts that the hub shows beside the checkpoint
    "tinyllama-1.1b": 1_100_048_384,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-2-70b": 68_976_648_192,
    "codellama-7b": 6_738_546_688,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-7b-instruct-v0.3": 7_248_023_552,
    "dbrx": 131_596_523_520,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-235b-a22b": 235_093_634_560,
    "starcoder": 15_517_456_384,
    "phi-3-mini-4k": 3_821_079_552,
    "gemma-2-9b": 9_241_705_984,
    # its tied lm_head counts once, of which the hub's 751,632,384 has two
    "qwen3-0.6b": 596_049_920,
    # model cards, and Pythia's paper (arXiv 2304.01373); Dolly is Pythia 12B with fewer tokens
    "pythia-2.8b": 2_775_208_960,
    "dolly-v2-12b": 11_841_894_400,
    "bloom-7b1": 7_069_016_064,
    "gpt-neox-20b": 20_554_567_680,
    "gpt-j-6b": 6_053_381_344,
    "bloom-176b": 176_247_271_424,
    # OPT's paper (arXiv 2205.01068, table 1) only rounds: 13B, 30B and 66B. The published checkpoints hold this many.
    "opt-1.3b": 1_315_758_080,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "opt-66b": 65_719_701_504,
}

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
GPT = {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 40, "vocab_size": 101}
UNGROUPED = {name: size for name, size in SMALL.items() if name != "num_key_value_heads"}
OPT = {**UNGROUPED, "ffn_dim": 80, "word_embed_proj_dim": 48}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
SMALL_CONFIGS = [
    ("llama", SMALL),
    ("llama", {**SMALL, "tie_word_embeddings": True}),
    ("llama", {**SMALL, "attention_bias": True, "mlp_bias": True}),
    ("llama", {**SMALL, "head_dim": 16}),
    ("mistral", SMALL),
    ("mistral", {**SMALL, "head_dim": 16, "tie_word_embeddings": True}),
    ("mixtral", {**SMALL, **EXPERTS}),
    ("qwen2", SMALL),
    ("qwen2", {**SMALL, "tie_word_embeddings": True}),
    ("qwen3", SMALL),
    ("qwen3", {**SMALL, "head_dim": 16, "attention_bias": True}),
    ("qwen3_moe", {**SMALL, **EXPERTS, "moe_intermediate_size": 24, "head_dim": 16}),
    ("qwen3_moe", {**SMALL, **EXPERTS, "moe_intermediate_size": 24, "mlp_only_layers": [1]}),
    ("qwen3_moe", {**SMALL, **EXPERTS, "moe_intermediate_size": 24, "decoder_sparse_step": 2}),
    ("gemma", SMALL),
    ("gemma", {**SMALL, "head_dim": 16}),
    ("gemma2", {**SMALL, "head_dim": 16}),
    ("gemma3_text", {**SMALL, "head_dim": 16}),
    ("gpt_oss", {**SMALL, **EXPERTS}),
    ("phi3", SMALL),
    ("gpt2", GPT),
    ("gpt2", {**GPT, "n_inner": 80, "tie_word_embeddings": False}),
    ("gpt_bigcode", GPT),
    ("gpt_bigcode", {**GPT, "multi_query": False}),
    ("gptj", {**GPT, "rotary_dim": 4}),
    ("gpt_neox", UNGROUPED),
    ("gpt_neox", {**UNGROUPED, "attention_bias": False}),
    ("gpt_neox", {**UNGROUPED, "tie_word_embeddings": True}),
    ("opt", OPT),
    ("opt", {**OPT, "word_embed_proj_dim": 32}),
    ("opt", {**OPT, "do_layer_norm_before": False, "enable_bias": False}),
    ("opt", {**OPT, "layer_norm_elementwise_affine": False}),
    ("opt", {**OPT, "_remove_final_layer_norm": True}),
    ("bloom", {"hidden_size": 48, "n_layer": 3, "n_head": 6, "vocab_size": 101}),
    (
        "dbrx",
        {
            "d_model": 48,
            "n_heads": 6,
            "n_layers": 3,
            "vocab_size": 101,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 80, "moe_num_experts": 4, "hidden_size": 48},
        },
    ),
]


def published(name):
    return json.loads((MODELS / f"{name}.json").read_text())


def counted(config):
    found = count(config, Dimensions.of(config))
    return None if found is None else found.total


def built(config):
    """Parameters of the model that transformers makes of `config`: tensors without memory, tied ones once."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    kind = config["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    try:
        made = transformers.CONFIG_MAPPING[kind](**{**config, "model_type": kind})
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(made)
    except (AttributeError, ValueError) as error:
        if transformers.__version__.startswith("4."):
            pytest.skip(f"transformers before 5 cannot build this {kind}: {error}")
        raise
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_totals(name):
    assert counted(published(name)) == pytest.approx(PUBLISHED[name], rel=1e-3)


@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("*.json")))
def test_published_configurations_are_built_with_as_many(name):
    config = published(name)
    if config.get("num_experts", 0) > 100:  # half a minute with transformers 4
        config["num_hidden_layers"] = 4
    assert counted(config) == built(config)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    SMALL_CONFIGS,
    ids=[f"{kind}-{i}" for i, (kind, _) in enumerate(SMALL_CONFIGS)],
)
def test_small_configurations_are_built_with_as_many(kind, sizes):
    config = {**sizes, "model_type": kind}
    assert counted(config) == built(config)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_the_embedding_and_the_head_are_told_apart(name):
    config = published(name)
    facts = ModelFacts.from_config(config)
    table = facts.vocab_size * facts.hidden_size
    tensors = count(config, Dimensions.of(config))
    assert tensors.embedding >= table
    assert (tensors.head == 0) is facts.tied_embeddings
    assert tensors.embedding + tensors.layers + tensors.head == tensors.total


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "unheard-of"},
        {"model_type": None},
        {"model_type": ["llama"]},
        {"hidden_size": None},
        {"max_position_embeddings": None, "model_type": "gpt2"},
        {"num_attention_heads": None},
    ],
)
def test_what_is_not_known_is_not_guessed(change):
    assert counted({**published("llama-3-8b"), **change}) is None


def test_sparse_layers_that_no_published_model_has_are_not_guessed():
    config = {**SMALL, **EXPERTS, "model_type": "qwen3_moe", "moe_intermediate_size": 24}
    assert counted({**config, "mlp_only_layers": [1], "decoder_sparse_step": 2}) is None
    assert counted({**config, "mlp_only_layers": "1"}) is None
