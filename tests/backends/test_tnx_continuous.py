"""Continuous batching on transformers-neuronx against transformers: same weights, same tokens, any traffic."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the tnx backend needs torch")

from safetensors.torch import load_file  # noqa: E402

from djl_python_neuronx import backends  # noqa: E402
from djl_python_neuronx.backends.base import Step  # noqa: E402
from tests.backends.tnx_engine import assert_like_alone, reference  # noqa: E402
from tests.backends.tnx_plans import VARIANTS, tnx_plan  # noqa: E402
from tests.doubles.device_driver import Driver, assert_same, make_rows  # noqa: E402
from tests.doubles.tiny_models import load_reference, save_tiny_model  # noqa: E402

pytestmark = pytest.mark.tnx


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["llama", "llama-mha", "llama3-rope", "mistral", "mixtral"])
def test_any_traffic_gives_what_transformers_gives(tmp_path: Path, name: str, tp: int) -> None:
    model_type, settings = VARIANTS[name]
    save_tiny_model(model_type, tmp_path, **settings)
    backend = backends.get("tnx").load(tnx_plan(tmp_path, tp=tp))
    try:
        assert backend.spec.joins == "free"
        assert assert_like_alone(backend, load_reference(tmp_path), seed=tp) > 100
    finally:
        backend.close()


def test_a_bsh_cache_gives_the_same(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    plan = tnx_plan(tmp_path, 4, 48, (48,), (48,), cache_layout="BSH")
    backend = backends.get("tnx").load(plan)
    try:
        assert assert_like_alone(backend, load_reference(tmp_path), seed=3) > 100
    finally:
        backend.close()


def test_a_slot_left_out_of_a_decode_keeps_its_cache(tmp_path: Path) -> None:
    """The library itself would write into it."""
    save_tiny_model("llama", tmp_path)
    backend = backends.get("tnx").load(tnx_plan(tmp_path))
    driver = Driver(backend)
    wanted = reference(load_reference(tmp_path), [5, 6, 7], 20)
    driver.join({0: [5, 6, 7], 2: [9, 8]})
    for turn in range(5):
        alone = {2: [driver.live[2].tokens[-1]]}
        output = backend.run(Step(decode=make_rows(alone, {2: 2 + turn})))
        assert output.logits is not None
        driver.live[2].add(output.logits[0, 0])
    for _ in range(7):
        driver.decode()
    assert_same(driver.leave(0), wanted)
    assert np.isfinite(driver.leave(2).gaps).all()
    backend.close()


@pytest.mark.parametrize("num_shards", [1, 2])
def test_pickled_weights_give_the_same(tmp_path: Path, num_shards: int) -> None:
    save_tiny_model("llama", tmp_path)
    wanted = reference(load_reference(tmp_path), [5, 6, 7], 10)
    weights = sorted(load_file(tmp_path / "model.safetensors").items())
    (tmp_path / "model.safetensors").unlink()
    if num_shards == 1:
        torch.save(dict(weights), tmp_path / "pytorch_model.bin")
    else:
        places = {}
        for i, part in enumerate((weights[::2], weights[1::2])):
            torch.save(dict(part), tmp_path / f"pytorch_model-{i}.bin")
            places.update(dict.fromkeys(dict(part), f"pytorch_model-{i}.bin"))
        index = tmp_path / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": places}))
    found = Driver(backends.get("tnx").load(tnx_plan(tmp_path))).alone([5, 6, 7], 10)
    assert_same(found, wanted)
