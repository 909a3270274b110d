"""Static batches on transformers-neuronx against transformers: requests join and leave at any time all the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the tnx backend needs torch")

from djl_python_neuronx import backends
from djl_python_neuronx.backends.tnx_static import StaticBackend
from tests.backends.tnx_engine import assert_like_alone, reference
from tests.backends.tnx_plans import VARIANTS, tnx_plan
from tests.device_driver import Driver, assert_same
from tests.tiny_models import load_reference, poison, save_tiny_model

pytestmark = pytest.mark.tnx


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    "name", ["gpt2", "gpt_neox", "opt", "bloom", "llama", "mistral", "mixtral"]
)
def test_any_traffic_gives_what_transformers_gives(tmp_path: Path, name: str, tp: int) -> None:
    model_type, settings = VARIANTS[name]
    save_tiny_model(model_type, tmp_path, **settings)
    backend = backends.load("tnx", tnx_plan(tmp_path, tp=tp, continuous=False))
    assert isinstance(backend, StaticBackend)
    try:
        assert backend.spec.joins == "reencode"
        assert assert_like_alone(backend, load_reference(tmp_path), seed=tp) > 100
        assert backend.num_reencoded > 0
    finally:
        backend.close()


@pytest.mark.parametrize(
    ("name", "sizes"), [("gpt2", "n_positions"), ("gpt_neox", "max_position_embeddings")]
)
def test_positions_beyond_128_are_right(tmp_path: Path, name: str, sizes: str) -> None:
    """These classes choose lengths of their own, powers of two from 128: the row goes on in another program."""
    model_type, settings = VARIANTS[name]
    save_tiny_model(model_type, tmp_path, **{**settings, sizes: 256})
    plan = tnx_plan(tmp_path, 2, 160, (32, 150), (160,), continuous=False)
    backend = backends.load("tnx", plan)
    prompt = [3 + i * i % 83 for i in range(120)]
    wanted = reference(load_reference(tmp_path), prompt, 30)
    try:
        found = Driver(backend).alone(prompt, 30, slot=1)
        assert_same(found, wanted)
        assert len(set(found.tokens)) > 3
    finally:
        backend.close()


def test_a_free_row_spoils_nothing(tmp_path: Path) -> None:
    """What a slot was fed last is not what its row is fed once it is free: here, a token that is not a number."""
    save_tiny_model("llama", tmp_path)
    poison(tmp_path / "model.safetensors", 96)
    backend = backends.load("tnx", tnx_plan(tmp_path, continuous=False))
    driver = Driver(backend)
    wanted = driver.alone([5, 6, 7], 20, slot=3)
    driver.join({1: [8, 9], 2: [9, 8]})
    for text in driver.live.values():
        text.tokens[-1] = 96
    driver.decode()
    driver.leave(1)
    driver.leave(2)
    driver.join({2: [5, 6, 7]})
    for _ in range(12):
        driver.decode()
    driver.leave(2)
    assert_same(driver.alone([5, 6, 7], 20, slot=1), wanted)
    assert np.isfinite(wanted.gaps).all()
    backend.close()
