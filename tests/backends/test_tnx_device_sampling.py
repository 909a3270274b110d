"""Tokens that the device itself chooses: greedily, or with parameters of each slot's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the tnx backend needs torch")

from djl_python_neuronx import backends  # noqa: E402
from djl_python_neuronx.backends.base import Decode, DeviceTokens, Prefill, Want  # noqa: E402
from djl_python_neuronx.errors import StepError  # noqa: E402
from tests.backends.tnx_engine import assert_like_alone  # noqa: E402
from tests.backends.tnx_plans import VARIANTS, tnx_plan  # noqa: E402
from tests.device_driver import make_rows  # noqa: E402
from tests.tiny_models import load_reference, save_tiny_model  # noqa: E402

pytestmark = pytest.mark.tnx

GREEDY: Mapping[str, Any] = {"do_sample": False, "top_k": 1}
DYNAMIC: Mapping[str, Any] = {
    "do_sample": True,
    "dynamic": True,
    "per_batch_line": True,
    "global_top_k": 16,
    "top_k": [16] * 4,
    "top_p": [1.0] * 4,
    "temperature": [1.0] * 4,
    "top_p_min_tokens": [1] * 4,
}


@pytest.mark.parametrize("generation", [GREEDY, DYNAMIC], ids=["greedy", "dynamic"])
@pytest.mark.parametrize(
    ("name", "continuous"), [("llama", True), ("mixtral", True), ("opt", False)]
)
def test_a_greedy_request_gets_the_best_tokens(
    tmp_path: Path, name: str, continuous: bool, generation: Mapping[str, Any]
) -> None:
    model_type, settings = VARIANTS[name]
    save_tiny_model(model_type, tmp_path, **settings)
    plan = tnx_plan(tmp_path, tp=2, continuous=continuous, on_device_generation=generation)
    backend = backends.load("tnx", plan)
    try:
        assert backend.spec.outputs == Want.TOKENS
        assert assert_like_alone(backend, load_reference(tmp_path), seed=5) > 100
    finally:
        backend.close()


def test_each_slot_samples_with_its_own_parameters(tmp_path: Path) -> None:
    """Slot 0 is greedy, slot 2 draws from its three best: as often as their probabilities say."""
    save_tiny_model("llama", tmp_path)
    backend: Any = backends.load("tnx", tnx_plan(tmp_path, on_device_generation=DYNAMIC))
    assert (backend.spec.largest_top_k, backend.spec.fixed_sampling) == (16, None)
    temperature = 4.0
    with torch.no_grad():
        logits = load_reference(tmp_path)(torch.tensor([[5, 6, 7, 9]])).logits[0, -1]
    best = torch.topk(logits, 3)
    wanted = torch.softmax(best.values / temperature, 0).numpy()
    rows = make_rows({0: [9], 2: [9]}, {0: 3, 2: 3}, Want.TOKENS)
    rows.sampling[1] = (3, 1.0, temperature)
    for slot in (0, 2):
        backend.acquire(slot, [5, 6, 7], 0)
        backend.run(Prefill(make_rows({slot: [5, 6, 7]}, wants=Want.TOKENS)))
    num_sent = backend._sampling.num_sent
    counts = dict.fromkeys(best.indices.tolist(), 0)
    draws = 600
    for _ in range(draws):
        output = backend.run(Decode(rows))
        assert isinstance(output, DeviceTokens)
        assert (output.ids.dtype, output.ids.shape) == (np.int32, (2, 1))
        assert output.ids[0, 0] == int(logits.argmax())
        counts[int(output.ids[1, 0])] += 1
    # Five standard deviations: one run in a million is farther off.
    limits = 5 * np.sqrt(draws * wanted * (1 - wanted))
    assert (np.abs(np.array(list(counts.values())) - draws * wanted) < limits).all(), counts
    assert backend._sampling.num_sent == num_sent + 1
    rows.sampling[1, 0] = 17
    with pytest.raises(StepError, match="1 to 16"):
        backend.run(Decode(rows))
    backend.close()
