"""Drafts of a prompt look-up, verified by the real library: the texts without them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the nxdi backend needs torch")

import torch

from djl_python_neuronx.backends.base import Step, Want
from djl_python_neuronx.engine.speculation import NgramProposer
from tests.backends.nxdi_plans import loaded, log_lines, obtained, save_variant
from tests.backends.tnx_engine import assert_like_alone
from tests.doubles.device_driver import Driver, logits_of, make_rows
from tests.doubles.tiny_models import load_reference

pytestmark = pytest.mark.nxdi

NUM_DRAFTS = 3
LOOKUP = {"ngram_prompt_lookup_max": "2", "speculative_length": str(NUM_DRAFTS)}


@pytest.mark.parametrize(
    ("name", "slots", "tp"),
    [
        ("llama", "4", "2"),
        ("llama", "1", "1"),
        ("mistral", "4", "1"),
        ("mixtral", "4", "1"),
        ("qwen2", "4", "1"),
        ("qwen3", "4", "1"),
    ],
)
def test_any_traffic_with_a_look_up_gives_what_transformers_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, slots: str, tp: str
) -> None:
    """Sequences join and leave, take slots again, and end at the last position of a slot."""
    log = tmp_path / "log"
    monkeypatch.setenv("NXDI_RIG_LOG", str(log))
    folder = save_variant(name, tmp_path / "model")
    made = obtained(
        folder, tmp_path, max_rolling_batch_size=slots, tensor_parallel_degree=tp, **LOOKUP
    )
    with loaded(made.plan, made.folder) as backend:
        assert backend.spec.num_speculative_tokens == NUM_DRAFTS
        proposer = NgramProposer(backend.spec, 2)
        assert assert_like_alone(backend, load_reference(folder), seed=1, proposer=proposer) > 100
    kinds = {line["model"] for line in log_lines(log, "run")}
    assert kinds >= {"speculation_model", "token_generation_model"}


def test_every_column_is_verified_at_its_place_up_to_the_last_position(tmp_path: Path) -> None:
    """Also in rows of different lengths, beside a free slot, and where drafts were rejected before."""
    folder = save_variant("llama", tmp_path / "model")
    made, model = obtained(folder, tmp_path, **LOOKUP), load_reference(folder)
    draw = random.Random(5)
    texts = {1: draw.choices(range(3, 90), k=20), 3: draw.choices(range(3, 90), k=2)}
    with loaded(made.plan, made.folder) as backend:
        driver = Driver(backend)
        driver.join(texts)
        limit = backend.spec.max_model_len
        while len(texts[1]) < limit - 1:
            fed = {slot: draw.choices(range(3, 90), k=NUM_DRAFTS + 1) for slot in texts}
            fed[1] = fed[1][: limit - len(texts[1]) - 1]
            starts = {slot: len(text) for slot, text in texts.items()}
            values = logits_of(backend, Step(decode=make_rows(fed, starts, Want.ALL_LOGITS)))
            for row, slot in enumerate(texts):
                whole = texts[slot] + fed[slot]
                with torch.no_grad():
                    wanted = model(torch.tensor([whole])).logits[0, len(texts[slot]) :].numpy()
                np.testing.assert_allclose(values[row, : len(fed[slot])], wanted, atol=1e-4)
                # As if two of four drafts stood, or as many as fit.
                texts[slot] = whole[: len(texts[slot]) + min(3, len(fed[slot]))]
