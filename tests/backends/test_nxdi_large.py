"""Large models: experts, and degrees that divide sequences and groups. Tokens are those of transformers."""

from __future__ import annotations

from collections.abc import Mapping
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
WAYS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, str]]] = {
    "qwen3_moe": ("qwen3_moe", EXPERTS, {"tensor_parallel_degree": "2"}),
}


@pytest.mark.parametrize("name", WAYS)
def test_traffic_gives_what_transformers_gives(tmp_path: Path, name: str) -> None:
    model_type, config, settings = WAYS[name]
    folder = save_tiny_model(model_type, tmp_path / "model", **{"vocab_size": 96, **config})
    made = obtained(folder, tmp_path, **settings)
    with loaded(made.plan, made.folder) as backend:
        assert assert_like_alone(backend, load_reference(folder), seed=3) > 100
