"""Tokens that NxD Inference samples on the device: each row with its own parameters, whatever its neighbours have."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the nxdi backend needs torch")

from djl_python_neuronx.backends.base import Rows, Step, Want  # noqa: E402
from djl_python_neuronx.backends.nxdi.batching import LARGEST_TEMPERATURE  # noqa: E402
from tests.backends.nxdi_plans import loaded, obtained, save_variant  # noqa: E402
from tests.device_driver import make_rows  # noqa: E402
from tests.tiny_models import load_reference  # noqa: E402

pytestmark = pytest.mark.nxdi

PROMPT, NEXT, DRAWS = [5, 6, 7], 9, 500
PARAMETERS = [(1, 1.0, 1.0), (3, 1.0, 4.0), (16, 0.6, 3.0), (16, 0.01, 5.0)]
"""top_k, top_p and temperature of each slot; the first and the last can only give the best token."""


def chances(logits: Any, top_k: float, top_p: float, temperature: float) -> dict[int, float]:
    """Token → its probability as the library has it: it keeps the tokens whose sum is at most top_p, and the best."""
    best = torch.topk(logits, int(top_k))
    shares = torch.softmax(best.values / temperature, 0)
    outside = shares.cumsum(0) > top_p + 1e-6
    outside[0] = False
    shares[outside] = 0
    return dict(zip(best.indices.tolist(), (shares / shares.sum()).tolist(), strict=True))


def assert_drawn(found: Counter[int], wanted: dict[int, float]) -> None:
    assert sum(found.values()) == DRAWS
    possible = {token: share for token, share in wanted.items() if share > 0}
    assert found.keys() <= possible.keys()
    for token, share in possible.items():
        # Five standard deviations: one run in a million is farther off, and the seed is fixed.
        limit = 5 * np.sqrt(DRAWS * share * (1 - share)) + 1e-6
        assert abs(found[token] - DRAWS * share) <= limit, (token, found, wanted)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_each_row_is_sampled_as_its_own_parameters_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int
) -> None:
    monkeypatch.setenv("NXDI_RIG_SEED", "7")
    folder = save_variant("llama", tmp_path / "model")
    generation = '{"do_sample": true, "dynamic": true, "global_top_k": 16, "top_k": 16}'
    made = obtained(
        folder, tmp_path, on_device_generation=generation, tensor_parallel_degree=str(tp)
    )
    with torch.no_grad():
        logits = load_reference(folder)(torch.tensor([[*PROMPT, NEXT]])).logits[0, -2:]
    with loaded(made.plan, made.folder) as backend:
        assert (backend.spec.outputs, backend.spec.largest_top_k) == (Want.TOKENS, 16)

        def draw(rows: Rows, run: Callable[[Rows], Step]) -> list[Counter[int]]:
            found: list[Counter[int]] = [Counter() for _ in rows.slots]
            for _ in range(DRAWS):
                output: Any = backend.run(run(rows))
                for counts, token in zip(found, output.ids[:, 0].tolist(), strict=True):
                    counts[token] += 1
            return found

        for slot, parameters in enumerate(PARAMETERS):
            backend.acquire(slot, PROMPT, 0)
            rows = make_rows({slot: PROMPT}, wants=Want.TOKENS)
            rows.sampling[0] = parameters
            backend.run(Step(prefill=rows))
            if slot == 1:
                [found] = draw(rows, lambda rows: Step(prefill=rows))
                assert_drawn(found, chances(logits[0], *parameters))
        slots = range(len(PARAMETERS))
        rows = make_rows(
            {slot: [NEXT] for slot in slots}, dict.fromkeys(slots, len(PROMPT)), Want.TOKENS
        )
        rows.sampling[:] = PARAMETERS
        before = rows.sampling.copy()
        for parameters, found in zip(
            PARAMETERS, draw(rows, lambda rows: Step(decode=rows)), strict=True
        ):
            assert_drawn(found, chances(logits[1], *parameters))
        assert (rows.sampling == before).all()


def test_no_neighbour_and_no_temperature_changes_what_a_row_is_drawn_from() -> None:
    """The library raises each top_p to the smallest cumulative probability found in the batch.

    That is at most the probability of the row's own likeliest token, which it keeps whatever the top_p is.
    """
    library = "neuronx_distributed_inference"
    module = importlib.import_module(f"{library}.modules.generation.sampling")
    kind = importlib.import_module(f"{library}.models.config").OnDeviceSamplingConfig
    own = kind(do_sample=True, dynamic=True, global_topk=64)
    sampler = module.Sampler(
        SimpleNamespace(on_cpu=True, is_medusa=False, on_device_sampling_config=own)
    )

    def drawn_from(logits: Any, parameters: Any) -> Any:
        ids, found = sampler(logits.clone(), parameters.clone(), return_values=True)
        return torch.zeros_like(logits).scatter_(1, ids, found)

    torch.manual_seed(0)
    for _ in range(300):
        logits = torch.randn(5, 97) * torch.rand(5, 1) * 20
        top_ps = (torch.rand(5) ** torch.randint(1, 30, (5,))).clamp(1e-30)
        parameters = torch.stack([torch.randint(1, 65, (5,)), top_ps, torch.rand(5) * 3 + 0.01], 1)
        together = drawn_from(logits, parameters)
        rows = [drawn_from(logits[i : i + 1], parameters[i : i + 1]) for i in range(5)]
        torch.testing.assert_close(together, torch.cat(rows), rtol=0, atol=1e-6)
        hot = drawn_from(logits, torch.tensor([[2.0, 1.0, LARGEST_TEMPERATURE]] * 5))
        torch.testing.assert_close(hot.topk(2).values.sum(1), torch.ones(5))
        assert (hot > 1e-9).sum() <= 10
