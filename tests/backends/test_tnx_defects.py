"""What the library gets wrong, as `planning/capabilities.py` states it: refused unless accepted, and wrong that way."""

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
from djl_python_neuronx.service import Service  # noqa: E402
from tests.backends.test_tnx_service import BASE, ENVIRON  # noqa: E402
from tests.backends.tnx_plans import tnx_plan  # noqa: E402
from tests.device_driver import logits_of, make_rows  # noqa: E402
from tests.server.test_app import TINY_LLAMA, Running  # noqa: E402
from tests.tiny_models import load_reference, save_tiny_model  # noqa: E402

pytestmark = pytest.mark.tnx


def test_gptj_is_served_only_with_its_defect_accepted(tmp_path: Path) -> None:
    vocab_size = json.loads((TINY_LLAMA / "config.json").read_text())["vocab_size"]
    save_tiny_model("gptj", tmp_path, vocab_size=vocab_size)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_LLAMA / name, tmp_path)
    settings = {**BASE, "n_positions": "64"}
    with pytest.raises(
        ConfigError, match=r"attends only to the first position.*allow_known_defects=true"
    ):
        Service.load(None, tmp_path, environ=ENVIRON, overrides=settings)
    settings["allow_known_defects"] = "true"
    application = Application("gptj")
    application.service = Service.load(None, tmp_path, environ=ENVIRON, overrides=settings)
    server = Running(application)
    try:
        payload = {"inputs": "once upon", "parameters": {"max_new_tokens": 3, "details": True}}
        response = httpx.post(server.url + "/invocations", json=payload, timeout=60)
        assert response.status_code == 200, response.text
        assert response.json()["details"]["generated_tokens"] in {1, 2, 3}
    finally:
        server.close()
        application.service.close()


@pytest.mark.parametrize("tp", [1, 2])
def test_gptj_sees_the_first_position_alone(tmp_path: Path, tp: int) -> None:
    """transformers gives the same logits where its mask leaves that position only, and others where it is causal."""
    save_tiny_model("gptj", tmp_path)
    backend = backends.get("tnx").load(tnx_plan(tmp_path, tp=tp, continuous=False))
    ids = [5, 6, 7, 8, 9, 10]
    backend.acquire(0, ids[:1], 0)
    steps = [Step(prefill=make_rows({0: ids[:1]}))]
    steps += [Step(decode=make_rows({0: [ids[i]]}, {0: i})) for i in range(1, len(ids))]
    found = np.stack([logits_of(backend, step)[0, 0] for step in steps])
    backend.close()
    hidden = torch.full((1, 1, len(ids), len(ids)), -1e9)
    hidden[..., 0] = 0
    with torch.no_grad():
        model = load_reference(tmp_path)
        causal = model(torch.tensor([ids])).logits[0].numpy()
        masked = model(torch.tensor([ids]), attention_mask=hidden).logits[0].numpy()
    assert np.abs(found - masked).max() < 1e-4
    assert np.abs(found[0] - causal[0]).max() < 1e-4
    assert (np.abs(found - causal)[1:].max(axis=1) > 0.5).all()


def test_a_window_moves_over_a_bsh_cache_only(tmp_path: Path) -> None:
    save_tiny_model("mistral", tmp_path, sliding_window=10)
    with pytest.raises(BackendError, match="unmatched batch_sizes"):
        backends.get("tnx").load(tnx_plan(tmp_path))
    plan = tnx_plan(tmp_path, prefill_buckets=(48,), token_buckets=(48,), cache_layout="BSH")
    backend = backends.get("tnx").load(plan)
    ids = [3 + i * i % 83 for i in range(30)]
    backend.acquire(2, ids[:9], 0)
    steps = [Step(prefill=make_rows({2: ids[:9]}))]
    steps += [Step(decode=make_rows({2: [ids[i]]}, {2: i})) for i in range(9, len(ids))]
    found = np.stack([logits_of(backend, step)[0, 0] for step in steps])
    backend.close()
    with torch.no_grad():
        wanted = load_reference(tmp_path)(torch.tensor([ids])).logits[0, 8:].numpy()
    assert np.abs(found - wanted).max() < 1e-4
