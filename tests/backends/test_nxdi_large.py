"""Large models: experts, and degrees that divide sequences and groups. Tokens are those of transformers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the nxdi backend needs torch")

from tests.backends.nxdi_plans import loaded, obtained
from tests.backends.tnx_engine import assert_like_alone
from tests.doubles.tiny_models import load_reference, save_tiny_model

pytestmark = pytest.mark.nxdi

EXPERTS = {
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mixtral": {},
    "qwen2": {"use_sliding_window": False, "sliding_window": None},
    "qwen3_moe": EXPERTS,
}
AHEAD = {"on_device_generation": "true", "async_execution": "true"}
SEQUENCES = {"sequence_parallel": "true"}
# One core for each expert in decode steps. In prefill graphs groups take kernels, which the rig does not run.
IN_DECODES = {
    "moe_cte_tp_degree": 2,
    "moe_cte_ep_degree": 1,
    "moe_tkg_tp_degree": 1,
    "moe_tkg_ep_degree": 2,
}
WAYS: Mapping[str, tuple[str, int, Mapping[str, str]]] = {
    "two cores as one": ("llama", 4, {"logical_nc_config": "2", "machine": "trn2.48xlarge"}),
    "sequences": ("llama", 4, {**SEQUENCES, "fuse_qkv": "true", "vocab_parallel": "true"}),
    "prompts": ("llama", 2, {"cp_degree": "2"}),
    "prompts, sequences": ("llama", 4, {**SEQUENCES, "cp_degree": "2", "mlp_cp_degree": "2"}),
    "prompts of qwen2": ("qwen2", 4, {"cp_degree": "2"}),
    "rows, ahead": ("llama", 4, {"attention_dp_degree": "2", **AHEAD}),
    "rows and prompts": ("llama", 4, {"attention_dp_degree": "2", "cp_degree": "4"}),
    "keys": ("llama", 4, {"shard_over_sequence": "true", **SEQUENCES, **AHEAD}),
    "experts": ("mixtral", 4, SEQUENCES),
    "experts of qwen3": ("qwen3_moe", 2, {"fuse_qkv": "true", **SEQUENCES, **AHEAD}),
    "experts, prompts": ("qwen3_moe", 4, {"cp_degree": "2"}),
    "experts, rows": ("qwen3_moe", 4, {"attention_dp_degree": "2"}),
    "experts in groups": (
        "qwen3_moe",
        2,
        {"hybrid_sharding_config": json.dumps(IN_DECODES)},
    ),
}
"""Name → model, tensor parallel degree and options: tokens of a prompt, rows of a decode, keys, and experts divided."""
GROUPS = (
    "neuronx_distributed_inference.modules.attention.attention_process_groups",
    "neuronx_distributed.modules.moe.moe_process_group",
)


@pytest.fixture(autouse=True)
def _groups() -> Iterator[None]:
    """Forget the library's groups of cores, which it makes once in a process: here models of other degrees follow."""
    yield
    for module in filter(None, map(sys.modules.get, GROUPS)):
        for name in [name for name in vars(module) if name.startswith("_") and name.isupper()]:
            setattr(module, name, None)


@pytest.mark.parametrize("name", WAYS)
def test_traffic_gives_what_transformers_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model_type, degree, settings = WAYS[name]
    settings = {"machine": "inf2.48xlarge", **settings}
    if settings["machine"].startswith("trn2"):
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    config = {"vocab_size": 96, **MODELS[model_type]}
    folder = save_tiny_model(model_type, tmp_path / "model", **config)
    made = obtained(
        folder,
        tmp_path,
        tensor_parallel_degree=str(degree),
        **settings,
    )
    with loaded(made.plan, made.folder) as backend:
        assert assert_like_alone(backend, load_reference(folder), seed=3, num_requests=10) > 100
