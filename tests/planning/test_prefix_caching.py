"""Prefix caching of NxD Inference as planned: its keywords, graphs and memory, and what the library would stop at."""

import json

import pytest

from djl_python_neuronx.errors import IncompatibleOptionsError
from djl_python_neuronx.loading.load_plan import adapt_plan
from tests.loading.checking import folder, printed, run

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 22, "hidden_size": 2048, "intermediate_size": 5632,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16", "head_dim": 64,
}  # fmt: skip
GIVEN = {
    "model_loader": "nxdi",
    "tensor_parallel_degree": "2",
    "n_positions": "4096",
    "context_length_estimate": "128,1024,4096",
    "max_rolling_batch_size": "4",
    "enable_prefix_caching": "true",
}
KEYWORDS = ("is_prefix_caching", "is_block_kv_layout", "pa_block_size", "pa_num_blocks")


def planned(path, config=LLAMA, machine="trn2.3xlarge", **options):
    path.mkdir(exist_ok=True)
    return run(folder(path, config=config), machine=machine, **{**GIVEN, **options})


def test_the_blocks_and_the_graphs_that_a_plan_has(tmp_path):
    report = planned(tmp_path)
    assert not report.findings.errors
    config = report.prepared.planned.arguments.neuron_config
    assert [config[name] for name in KEYWORDS] == [True, True, 32, 4 * 128 + 1]
    # The longest prompt has all but 128 of its tokens in the cache at most: 3968, and a quarter of that, of 128 each.
    assert config["prefix_buckets"] == [1024, 3968]
    found = [
        (one.bucket, one.prefix) for one in report.prepared.planned.graphs if one.kind == "prefill"
    ]
    assert sorted(found) == sorted((n, p) for n in (128, 1024, 4096) for p in (0, 1024, 3968))
    assert "not in blocks" in printed(
        planned(tmp_path, enable_prefix_caching="false", pa_block_size="32")
    )
    for given in ({"pa_block_size": "32"}, {"pa_num_blocks": "513"}):
        assert "not in blocks" not in printed(planned(tmp_path, **given))
    text = printed(report)
    for part in ("prefill 128, 1024, 4096 x 1;", "x 1 after 1024 cached", "x 1 after 3968 cached"):
        assert part in text
    plain = planned(tmp_path / "plain", enable_prefix_caching="false")
    assert not {*KEYWORDS, "prefix_buckets"} & plain.prepared.planned.arguments.neuron_config.keys()
    more = planned(tmp_path / "more", pa_num_blocks=str(2 * 513))
    kv = [one.prepared.planned.memory.kv_cache for one in (plain, report, more)]
    assert kv[0] <= kv[1] <= kv[0] * 1.01
    assert kv[2] == 2 * kv[1]


def test_no_release_is_named_for_a_keyword_that_older_ones_have_under_another_name(tmp_path):
    report = planned(tmp_path, enable_prefix_caching="false", kv_cache_quantize="fp8")
    assert not [note for note in report.findings.messages("note") if "kv_quant_config" in note]


def test_vllms_keywords_are_these_options(tmp_path):
    """Of the feature guide."""
    override = {
        "is_prefix_caching": True,
        "is_block_kv_layout": True,
        "pa_num_blocks": 1024,
        "pa_block_size": 32,
        "prefix_buckets": [512, 4096],
    }
    given = {"enable_prefix_caching": None, "override_neuron_config": json.dumps(override)}
    options = {name: value for name, value in {**GIVEN, **given}.items() if value is not None}
    report = run(folder(tmp_path, config=LLAMA), machine="trn2.3xlarge", **options)
    assert not report.findings.errors
    assert override.items() <= report.prepared.planned.arguments.neuron_config.items()


MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 2048}
STOPS = [
    # options, configuration, words of the only error; None: there is none
    ({"context_length_estimate": "64,4096"}, LLAMA, "fewer than 128 tokens"),
    ({"context_length_estimate": "4096"}, LLAMA, "with one length"),
    ({"pa_block_size": "48"}, LLAMA, "a power of two"),
    ({"n_positions": "1024,4000", "context_length_estimate": "128,4000"}, LLAMA, None),
    ({"n_positions": "1024,4000", "context_length_estimate": "128,4000", "pa_block_size": "64"}, LLAMA, "divides"),
    ({"prefix_buckets": "100,4096"}, LLAMA, "divides"),
    ({"prefix_buckets": "2048"}, LLAMA, "up to 3968 cached tokens"),
    ({"prefix_buckets": "2048,3968"}, LLAMA, None),
    ({"pa_num_blocks": "512"}, LLAMA, "513 blocks"),
    ({"pa_num_blocks": "600"}, LLAMA, None),
    ({"max_rolling_batch_size": "1"}, LLAMA, None),
    ({"context_length_estimate": "2048,4096"}, MISTRAL, "sliding window"),
    ({"n_positions": "2048", "context_length_estimate": "128,2048"}, MISTRAL, None),
    ({"rolling_batch_strategy": "naive_rolling_batch"}, LLAMA, "static batch"),
]  # fmt: skip


def test_what_the_library_would_stop_at_is_an_error(tmp_path):
    wrong = []
    for number, (options, config, words) in enumerate(STOPS):
        errors = planned(tmp_path / str(number), config, **options).findings.messages("error")
        right = words in errors[0] if words and errors else not (words or errors)
        if not right:
            wrong.append((options, words, errors))
    assert not wrong


def test_experts_that_were_never_run_with_it_are_a_warning(tmp_path):
    experts = {
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 1024,
    }
    found = {}
    for name in ("qwen3_moe", "mixtral", "llama"):
        report = planned(tmp_path / name, {**LLAMA, "model_type": name, **experts})
        found[name] = [text for text in report.findings.messages("warning") if "never run" in text]
    assert "enable_prefix_caching" in found["qwen3_moe"][0]
    assert not found["mixtral"] + found["llama"]


def test_graphs_of_another_program_are_refused(tmp_path):
    """They may lack the mask of a prefix."""
    graphs = tmp_path / "graphs"
    graphs.mkdir()
    with pytest.raises(IncompatibleOptionsError, match=r"enable_prefix_caching.*another program"):
        adapt_plan(planned(tmp_path).prepared, None, graphs)
