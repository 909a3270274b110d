"""Each feature of `NeuronConfig` that changes the graph, once: the tokens stay transformers' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the tnx backend needs torch")

from djl_python_neuronx import backends  # noqa: E402
from djl_python_neuronx.backends.base import Step  # noqa: E402
from djl_python_neuronx.config.options import ServingOptions  # noqa: E402
from djl_python_neuronx.errors import BackendError  # noqa: E402
from djl_python_neuronx.planning.case import Case  # noqa: E402
from djl_python_neuronx.planning.libraries import NEURON_BACKENDS  # noqa: E402
from djl_python_neuronx.planning.machines import named  # noqa: E402
from djl_python_neuronx.planning.model import ModelFacts  # noqa: E402
from tests.backends.tnx_engine import assert_like_alone  # noqa: E402
from tests.backends.tnx_plans import VARIANTS, tnx_plan  # noqa: E402
from tests.doubles.device_driver import Driver  # noqa: E402
from tests.doubles.tiny_models import load_reference, save_tiny_model  # noqa: E402

pytestmark = pytest.mark.tnx

WIDE = {"hidden_size": 256, "intermediate_size": 512}
EXACT: list[tuple[str, int, bool, dict[str, Any], dict[str, Any]]] = [
    ("llama", 2, True, {"fuse_qkv": True}, {}),
    ("mistral", 2, True, {"fuse_qkv": True, "attention_layout": "BSH", "collectives_layout": "BSH"}, {}),
    ("llama", 2, True, {"group_query_attention": "shard-over-heads"}, {}),
    ("llama", 4, True, {"group_query_attention": "replicated-heads"}, {}),
    ("mixtral", 4, True, {"group_query_attention": "all-gather-heads"}, {}),
    ("llama", 2, True, {"on_device_embedding": True}, {}),
    ("llama", 2, True, {"sequence_parallel": True, "sequence_parallel_norm_threshold": 8}, {}),
    ("llama", 2, True, {"weight_tiling": True, "fuse_qkv": True, "qkv_tiling": True, "attention_layout": "BSH"}, WIDE),
    ("llama", 2, True, {"bf16_rms_norm": False, "all_reduce_dtype": "float32"}, {}),
    ("llama", 4, False, {"shard_over_sequence": True, "group_query_attention": "replicated-heads"}, {}),
    ("llama", 4, True, {"shard_over_sequence": True, "group_query_attention": "replicated-heads"}, {}),
    ("gpt2", 2, False, {"attention_layout": "BSH", "fuse_qkv": True}, {}),
    *(
        (name, tp, continuous, {"attention_layout": "BSH", "collectives_layout": "BSH"}, {})
        for name, tp, continuous in (
            *(("llama", 2, True), ("llama", 2, False), ("llama", 4, True), ("llama-mha", 4, True)),
            *(("mistral", 2, True), ("mistral", 2, False)),
            *(("gpt2", 2, False), ("bloom", 2, False)),
        )
    ),
    *(
        (name, 2, True, {"collectives_layout": "BSH"}, {})
        for name in ("llama", "mistral", "mixtral")
    ),
    ("opt", 2, False, {"on_device_embedding": True}, {}),
    ("bloom", 2, False, {"fuse_qkv": True}, {}),
    ("gpt_bigcode", 2, False, {"on_device_embedding": True}, {}),
    ("gpt_bigcode", 3, False, {"weight_tiling": True}, {"n_embd": 384, "n_head": 3}),
    ("gpt_bigcode", 8, False, {"all_reduce_dtype": "float32"}, {}),
    ("llama", 4, True, {}, {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}),
]  # fmt: skip


def load(directory: Path, name: str, tp: int, continuous: bool, options: dict[str, Any]) -> Any:
    """A backend for these options, in the words of a deployment."""
    plan = tnx_plan(directory, tp=tp, continuous=continuous, **options)
    changed = set(options) - {"dtype"}
    assert (
        len(plan.arguments.neuron_config) == len(changed) + continuous
    )  # each option is a keyword
    return backends.get("tnx").load(plan)


@pytest.mark.parametrize(("name", "tp", "continuous", "options", "sizes"), EXACT)
def test_the_tokens_stay_the_same(
    tmp_path: Path,
    name: str,
    tp: int,
    continuous: bool,
    options: dict[str, Any],
    sizes: dict[str, Any],
) -> None:
    model_type, settings = VARIANTS[name]
    save_tiny_model(model_type, tmp_path, **{**settings, **sizes})
    backend = load(tmp_path, name, tp, continuous, options)
    try:
        assert assert_like_alone(backend, load_reference(tmp_path), seed=7) > 100
    finally:
        backend.close()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "way"),
    [
        (4, 2, 2, None),
        (4, 2, 2, "replicated-heads"),
        (4, 2, 4, None),
        (6, 3, 4, None),
        (4, 1, 1, None),
        (4, 4, 4, None),
        (4, 4, 4, "replicated-heads"),
        (4, 4, 8, "replicated-heads"),
        (6, 2, 4, None),
        (6, 2, 8, None),
        (4, 2, 8, None),
        (12, 2, 8, "replicated-heads"),
    ],
)
def test_flash_decoding_is_refused_where_the_library_stops_at_it(
    tmp_path: Path, heads: int, kv_heads: int, tp: int, way: str | None
) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    save_tiny_model("llama", tmp_path, hidden_size=8 * heads, **sizes)
    options = ServingOptions(
        tensor_parallel_degree=tp, shard_over_sequence=True, group_query_attention=way
    )
    facts = ModelFacts.from_config(json.loads((tmp_path / "config.json").read_text()))
    tnx = NEURON_BACKENDS["tnx"]
    found = tnx.findings(Case(options, facts, named("inf2.48xlarge"), tnx))
    errors = [
        each for each in found if each.level == "error" and "shard_over_sequence" in each.names
    ]
    more = {} if way is None else {"group_query_attention": way}
    plan = tnx_plan(tmp_path, tp=tp, shard_over_sequence=True, **more)
    if errors:
        with pytest.raises(BackendError, match="Error: "):
            backends.get("tnx").load(plan)
        return
    backend = backends.get("tnx").load(plan)
    assert assert_like_alone(backend, load_reference(tmp_path), seed=7) > 100
    backend.close()


COARSE = [
    ("llama", True, {"quantize": "int8"}, 0.25),
    ("mistral", True, {"quantize": "int8"}, 0.25),
    ("opt", False, {"quantize": "int8"}, 0.25),
    ("gpt2", False, {"quantize": "int8"}, 0.25),
    ("gpt_bigcode", False, {"quantize": "int8"}, 0.25),
    ("gpt_bigcode", False, {"dtype": "bfloat16"}, 0.25),
    ("gptj", False, {"dtype": "bfloat16"}, 0.25),
    ("llama", True, {"kv_cache_quantize": "fp8"}, 0.5),
    ("llama", True, {"dtype": "bfloat16"}, 0.25),
    ("llama", True, {"dtype": "float16"}, 0.05),
]


@pytest.mark.parametrize(("name", "continuous", "options", "share"), COARSE)
def test_rounding_changes_logits_little(
    tmp_path: Path, name: str, continuous: bool, options: dict[str, Any], share: float
) -> None:
    """Root mean square of the difference, as a share of the logits' own standard deviation."""
    model_type, settings = VARIANTS[name]
    save_tiny_model(model_type, tmp_path, **settings)
    backend = load(tmp_path, name, 2, continuous, options)
    model, driver = load_reference(tmp_path), Driver(backend)
    text = driver.alone([5, 6, 7, 8, 9], 12, slot=1)
    driver.join({2: [5, 6, 7, 8, 9]})
    worst = 0.0
    for i in range(10):
        ids = [5, 6, 7, 8, 9, *text.tokens[: i + 1]]
        with torch.no_grad():
            wanted = model(torch.tensor([ids])).logits[0, -1].numpy()
        rows = driver.next_rows()
        rows.input_ids[0, 0] = text.tokens[i]
        found = backend.run(Step(decode=rows)).logits[0, 0]
        driver.live[2].add(found)
        worst = max(worst, float(np.sqrt(np.mean((found - wanted) ** 2)) / wanted.std()))
    assert 0 < worst < share
    backend.close()
