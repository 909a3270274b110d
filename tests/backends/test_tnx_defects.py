"""The library's defects, as `planning/tnx/capabilities.py` states them: refused unless accepted, and wrong that way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the tnx backend needs torch")
pytest.importorskip("uvicorn", reason="needs the `server` extra")
httpx = pytest.importorskip("httpx", reason="needs httpx")

from djl_python_neuronx import backends  # noqa: E402
from djl_python_neuronx.backends.base import Step  # noqa: E402
from djl_python_neuronx.errors import BackendError, ConfigError  # noqa: E402
from djl_python_neuronx.server.app import Application  # noqa: E402
from djl_python_neuronx.server.models import Model  # noqa: E402
from djl_python_neuronx.service import Service  # noqa: E402
from tests.backends.tnx_engine import assert_like_alone  # noqa: E402
from tests.backends.tnx_plans import (  # noqa: E402
    BASE,
    ENVIRON,
    tnx_plan,
)
from tests.doubles.device_driver import logits_of, make_rows  # noqa: E402
from tests.doubles.tiny_models import load_reference, save_tiny_model  # noqa: E402
from tests.server.running import TINY_LLAMA, Running  # noqa: E402

pytestmark = pytest.mark.tnx


WINDOW = 7


def test_a_model_is_served_only_with_its_defect_accepted(tmp_path: Path) -> None:
    vocab_size = json.loads((TINY_LLAMA / "config.json").read_text())["vocab_size"]
    save_tiny_model("mistral", tmp_path, vocab_size=vocab_size, sliding_window=WINDOW)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_LLAMA / name, tmp_path)
    settings = {**BASE, "n_positions": "64", "rolling_batch_strategy": "naive_rolling_batch"}
    with pytest.raises(ConfigError, match=r"look back one token more.*allow_known_defects=true"):
        Service.load(None, tmp_path, environ=ENVIRON, overrides=settings)
    settings["allow_known_defects"] = "true"
    application = Application(Model("mistral"))
    application.models[0].service = Service.load(
        None, tmp_path, environ=ENVIRON, overrides=settings
    )
    server = Running(application)
    try:
        payload = {"inputs": "once upon", "parameters": {"max_new_tokens": 3, "details": True}}
        response = httpx.post(server.url + "/invocations", json=payload, timeout=60)
        assert response.status_code == 200, response.text
        assert response.json()["details"]["generated_tokens"] in {1, 2, 3}
    finally:
        server.close()
        application.models[0].service.close()


def test_mistral_s_prompts_look_back_one_token_too_far(tmp_path: Path) -> None:
    """transformers gives the same logits with a window of one token more, and others with the model's."""
    save_tiny_model("mistral", tmp_path, sliding_window=WINDOW)
    backend = backends.get("tnx").load(tnx_plan(tmp_path, continuous=False))
    ids = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    backend.acquire(0, ids, 0)
    found = logits_of(backend, Step(prefill=make_rows({0: ids})))[0, 0]
    backend.close()
    model = load_reference(tmp_path)
    with torch.no_grad():
        right = model(torch.tensor([ids])).logits[0, -1].numpy()
        model.config.sliding_window = WINDOW + 1
        wrong = model(torch.tensor([ids])).logits[0, -1].numpy()
    assert np.abs(found - wrong).max() < 1e-4 < np.abs(found - right).max()


def test_a_window_moves_over_a_bsh_cache_of_several_rows(tmp_path: Path) -> None:
    """Where no prompt is longer than the window, though its graph is."""
    save_tiny_model("mistral", tmp_path, sliding_window=10)
    with pytest.raises(BackendError, match="unmatched batch_sizes"):
        backends.get("tnx").load(tnx_plan(tmp_path))
    plan = tnx_plan(tmp_path, prefill_buckets=(48,), token_buckets=(48,), cache_layout="BSH")
    lengths = {0: 3, 1: 9, 3: 6}
    ids = {slot: [3 + (i * i + 7 * slot) % 83 for i in range(30)] for slot in lengths}
    with torch.no_grad():
        wanted = load_reference(tmp_path)(torch.tensor(list(ids.values()))).logits.numpy()
    backend = backends.get("tnx").load(plan)
    for slot, length in lengths.items():
        backend.acquire(slot, ids[slot][:length], 0)
        logits_of(backend, Step(prefill=make_rows({slot: ids[slot][:length]})))
    for turn in range(20):
        starts = {slot: length + turn for slot, length in lengths.items()}
        rows = make_rows({slot: [ids[slot][at]] for slot, at in starts.items()}, starts)
        found = logits_of(backend, Step(decode=rows))[:, 0]
        assert np.abs(found - wanted[range(3), list(starts.values())]).max() < 1e-4
    backend.close()


def test_a_window_moves_with_one_sequence_at_a_time(tmp_path: Path) -> None:
    save_tiny_model("mistral", tmp_path, sliding_window=10)
    backend = backends.get("tnx").load(tnx_plan(tmp_path, 1, 48, (10,), (48,), continuous=False))
    assert assert_like_alone(backend, load_reference(tmp_path), seed=3) > 100
    backend.close()
