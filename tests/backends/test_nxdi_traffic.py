"""NxD Inference through the whole engine against transformers: same weights, same tokens, any traffic."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the nxdi backend needs torch")

from tests.backends.nxdi_plans import VARIANTS, loaded, obtained, save_variant  # noqa: E402
from tests.backends.tnx_engine import assert_like_alone  # noqa: E402
from tests.tiny_models import load_reference  # noqa: E402

pytestmark = pytest.mark.nxdi

WAYS = {"continuous": {}, "static": {"rolling_batch": "disable"}}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", VARIANTS)
def test_any_traffic_gives_what_transformers_gives(
    tmp_path: Path, name: str, way: str, tp: int
) -> None:
    folder = save_variant(name, tmp_path / "model")
    made = obtained(folder, tmp_path, tensor_parallel_degree=str(tp), **WAYS[way])
    with loaded(made.plan, made.folder) as backend:
        assert backend.spec.joins == ("reprefill" if way == "static" else "free")
        assert assert_like_alone(backend, load_reference(folder), seed=tp, num_requests=20) > 200
