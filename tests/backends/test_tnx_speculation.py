"""Drafts verified by the real library: the same texts as without, greedy and sampled."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the tnx backend needs torch")

from djl_python_neuronx import backends  # noqa: E402
from djl_python_neuronx.backends.base import Backend, Step, Want  # noqa: E402
from djl_python_neuronx.backends.plan import LoadPlan  # noqa: E402
from djl_python_neuronx.engine.core import Engine  # noqa: E402
from djl_python_neuronx.engine.speculation import (  # noqa: E402
    DraftModel,
    NgramProposer,
    Proposer,
)
from djl_python_neuronx.sampling import SamplingParams  # noqa: E402
from djl_python_neuronx.types import GenerationRequest  # noqa: E402
from tests.backends.tnx_engine import assert_like_alone, reference  # noqa: E402
from tests.backends.tnx_plans import VARIANTS, tnx_plan  # noqa: E402
from tests.doubles.device_driver import Driver, assert_same, logits_of, make_rows  # noqa: E402
from tests.doubles.tiny_models import load_reference, save_tiny_model  # noqa: E402

pytestmark = pytest.mark.tnx
NUM_DRAFTS = 3


def verifying(directory: Path, num_slots: int = 5, **options: object) -> LoadPlan:
    """By default with more slots than columns, which is not what the library expects."""
    return tnx_plan(directory, num_slots, num_speculative_tokens=NUM_DRAFTS, **options)  # type: ignore[arg-type]


def proposer_of(kind: str, backend: Backend, target: Path, other: Path) -> Proposer:
    if kind == "lookup":
        return NgramProposer(backend.spec, 2)
    folder = target if kind == "same model" else other
    return DraftModel(backends.get("tnx").load(tnx_plan(folder, backend.spec.num_slots)))


@pytest.mark.parametrize(
    ("name", "drafts", "tp"),
    [
        *(
            (name, "other model", tp)
            for name in ("llama", "llama-mha", "llama3-rope")
            for tp in (1, 2)
        ),
        ("llama", "lookup", 1),
        ("llama", "lookup", 2),
        ("llama", "same model", 1),
    ],
)
def test_any_traffic_gives_what_transformers_gives(
    tmp_path: Path, name: str, drafts: str, tp: int
) -> None:
    model_type, settings = VARIANTS[name]
    target = save_tiny_model(model_type, tmp_path / "target", **settings)
    other = save_tiny_model(model_type, tmp_path / "other", seed=1, **settings)
    backend = backends.get("tnx").load(verifying(target, tp=tp))
    proposer = proposer_of(drafts, backend, target, other)
    try:
        assert backend.spec.num_speculative_tokens == NUM_DRAFTS
        assert assert_like_alone(backend, load_reference(target), seed=tp, proposer=proposer) > 100
    finally:
        proposer.close()
        backend.close()


@pytest.mark.parametrize("drafts", ["lookup", "same model", "other model"])
def test_seeds_give_the_tokens_that_they_give_without_drafts(tmp_path: Path, drafts: str) -> None:
    target = save_tiny_model("llama", tmp_path / "target")
    other = save_tiny_model("llama", tmp_path / "other", seed=1)
    parameters = (
        SamplingParams(temperature=0.7, seed=1),
        SamplingParams(temperature=1.2, top_k=12, seed=2),
        SamplingParams(temperature=0.9, top_p=0.8, repetition_penalty=1.3, seed=3),
        SamplingParams(repetition_penalty=1.5),
    )
    texts = []
    for speculates in (False, True):
        backend = backends.get("tnx").load(verifying(target) if speculates else tnx_plan(target))
        proposer = proposer_of(drafts, backend, target, other) if speculates else None
        engine = Engine(backend, proposer=proposer)
        for i, params in enumerate(parameters):
            engine.add(GenerationRequest(str(i), [7, 8, 9, 7, 8], params, max_new_tokens=30))
        texts.append(finished(engine))
    assert texts[0] == texts[1]


def finished(engine: Engine) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.error is None, output.error
            found[output.request_id] += output.token_ids
    return found


def test_sampled_texts_keep_the_models_distribution(tmp_path: Path) -> None:
    """A draft model that is often wrong: pairs of tokens come as often as the large model's probabilities say."""
    target = save_tiny_model("llama", tmp_path / "target")
    other = save_tiny_model("llama", tmp_path / "other", seed=1)
    backend = backends.get("tnx").load(verifying(target))
    engine = Engine(backend, proposer=proposer_of("other model", backend, target, other))
    count = 1200
    for i in range(count):
        params = SamplingParams(temperature=1.0, top_k=3, seed=i)
        engine.add(GenerationRequest(str(i), [7, 8, 9], params, max_new_tokens=4))
    found = Counter(tuple(text[1:3]) for text in finished(engine).values())
    wanted = pairs(load_reference(target), [7, 8, 9], top_k=3)
    distance = sum(abs(found[pair] / count - wanted[pair]) for pair in {*found, *wanted}) / 2
    # 27 pairs of at most 1200 draws: the expected distance is below 0.06.
    assert set(found) <= set(wanted)
    assert distance < 0.1


@torch.no_grad()
def pairs(model: object, prompt: list[int], top_k: int) -> dict[tuple[int, ...], float]:
    """Probability of each second and third token after a prompt, the first one summed out."""

    def best(ids: list[int]) -> list[tuple[int, float]]:
        logits = model(torch.tensor([ids])).logits[0, -1]  # type: ignore[operator]
        values, tokens = logits.topk(top_k)
        return list(zip(tokens.tolist(), values.softmax(0).tolist(), strict=True))

    found: dict[tuple[int, ...], float] = defaultdict(float)
    for first, p in best(prompt):
        for second, q in best([*prompt, first]):
            for third, r in best([*prompt, first, second]):
                found[second, third] += p * q * r
    return found


def test_every_column_is_verified_at_its_place_up_to_the_last_position(tmp_path: Path) -> None:
    target = save_tiny_model("llama", tmp_path)
    backend, model = backends.get("tnx").load(verifying(target)), load_reference(target)
    draw = random.Random(5)
    texts = {1: draw.choices(range(3, 90), k=20), 3: draw.choices(range(3, 90), k=2)}
    driver = Driver(backend)
    driver.join(texts)
    limit = backend.spec.max_model_len
    while len(texts[1]) < limit - 1:
        # Slot 1 comes to its end, where it has room for fewer columns than there are.
        fed = {slot: draw.choices(range(3, 90), k=4) for slot in texts}
        fed[1] = fed[1][: limit - len(texts[1]) - 1]
        rows = make_rows(fed, {slot: len(text) for slot, text in texts.items()}, Want.ALL_LOGITS)
        values = logits_of(backend, Step(decode=rows))
        for row, slot in enumerate(texts):
            whole = texts[slot] + fed[slot]
            with torch.no_grad():
                wanted = model(torch.tensor([whole])).logits[0, len(texts[slot]) :].numpy()
            np.testing.assert_allclose(values[row, : len(fed[slot])], wanted, atol=1e-4)
            # As if two of four drafts stood, or as many as fit.
            texts[slot] = whole[: len(texts[slot]) + min(3, len(fed[slot]))]
    backend.close()


def test_slots_that_verify_are_found_as_they_are_by_plain_decodes(tmp_path: Path) -> None:
    target = save_tiny_model("llama", tmp_path)
    backend = backends.get("tnx").load(verifying(target))
    driver = Driver(backend)
    model = load_reference(target)
    wanted = {slot: reference(model, [5, 6, 7 + slot], 12) for slot in (0, 2)}
    driver.join({0: [5, 6, 7], 2: [5, 6, 9]})
    for _ in range(4):
        starts = {s: len(t.prompt) + len(t.tokens) - 1 for s, t in driver.live.items()}
        fed = {s: [t.tokens[-1], 3, 4, 5] for s, t in driver.live.items()}
        values = logits_of(backend, Step(decode=make_rows(fed, starts, Want.ALL_LOGITS)))
        for text, row in zip(driver.live.values(), values, strict=True):
            text.add(row[0])
        driver.decode()
    for slot in (0, 2):
        assert_same(driver.leave(slot), wanted[slot])


def test_one_slot_speculates_too(tmp_path: Path) -> None:
    target = save_tiny_model("llama", tmp_path)
    backend = backends.get("tnx").load(verifying(target, num_slots=1))
    proposer = NgramProposer(backend.spec, 2)
    assert assert_like_alone(backend, load_reference(target), seed=4, proposer=proposer) > 100
