"""Verification of the cpu backend: sound models pass, and each planted fault is found and named by its place."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the reference needs torch")
pytest.importorskip("transformers", "4.57", reason="the cpu backend needs transformers 4.57")

from djl_python_neuronx import backends
from djl_python_neuronx.backends import LoadPlan
from djl_python_neuronx.verify.judge import judge, p_value
from djl_python_neuronx.verify.reference import distribution
from djl_python_neuronx.verify.scenarios import run_scenarios
from tests.doubles.tiny_models import save_tiny_model
from tests.verify.planted import FAULTS, assert_named, planted_in

SHAPES: Any = (4, 48, (4, 8, 20), (12, 24, 48))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def plan_of(folder: Path, dtype: Any = "float32", **more: Any) -> LoadPlan:
    return LoadPlan(folder, *SHAPES, dtype=dtype, num_threads=1, eos_ids=frozenset({1}), **more)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "more", [{"num_speculative_tokens": 2}, {"mixed_steps": True}], ids=["alone", "mixed"]
)
def test_a_sound_model_is_right(checkpoint: Path, dtype: str, more: dict[str, Any]) -> None:
    plan = plan_of(checkpoint, dtype, prefix_caching=True, **more)
    record = run_scenarios(backends.get("cpu").load(plan))
    found = judge(record, plan)
    assert found["findings"] == []
    assert len(found["draws"]) == 4
    kinds = {seen.graph.kind for seen in record.seen if seen.graph is not None}
    wanted = {"mixed"} if "mixed_steps" in more else {"prefill", "decode", "verification"}
    assert kinds == wanted
    # Each graph at both its ends, each slot, each number of rows, the last position of a slot.
    for kind, buckets, fewer in (("prefill", SHAPES[2], 0), ("decode", SHAPES[3], 1)):
        for below, bucket in zip((fewer, *buckets), buckets, strict=False):
            at = {s.position for s in record.seen if s.graph and s.graph[:2] == (kind, bucket)}
            assert kind not in kinds or {below, bucket - 1} <= at, (kind, bucket, at)
    placed = [seen for seen in record.seen if seen.graph is not None]
    assert {seen.slot for seen in placed} == {0, 1, 2, 3}
    assert {seen.rows for seen in placed if seen.graph and seen.graph.kind != "prefill"} >= {
        1,
        2,
        3,
        4,
    }
    assert max(seen.position for seen in placed) == 47


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAULTS)
def test_each_planted_fault_is_named_by_its_place(
    name: str, dtype: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = planted_in(
        plan_of(checkpoint, dtype),
        FAULTS[name],
        tmp_path,
        monkeypatch,
        lambda plan: closing(backends.get("cpu").load(plan)),
    )
    assert_named(found, FAULTS[name])


def test_a_test_of_draws_rejects_as_many_right_ones_as_it_states_and_wrong_ones() -> None:
    """Also where probabilities are known up to a fifth only: then it rejects fewer right ones, and still wrong ones."""
    random = np.random.default_rng(5)
    logits = random.normal(0, 2, 200).astype(np.float32)
    wanted = distribution(logits, {"temperature": 1.0, "top_k": 20})
    drawn = [random.choice(200, 256, p=wanted) for _ in range(400)]
    rejected = [
        sum(p_value(tokens, wanted, slack) < 0.05 for tokens in drawn) for slack in (0.0, 0.2)
    ]
    assert 5 < rejected[0] < 40  # of 400, 20 on the average, with a deviation of 4.4
    assert rejected[1] < rejected[0]
    for other in (
        {"temperature": 1.5},
        {"temperature": 4.0, "top_k": 20},
        {"temperature": 1.0, "top_k": 4},
    ):
        tokens = random.choice(200, 256, p=distribution(logits, other))
        assert p_value(tokens, wanted) < 1e-6
        assert p_value(tokens, wanted, 0.2) < 1e-3


@pytest.mark.parametrize(
    "shapes",
    [
        (8, 24, (10,), (24,), True),
        (1, 8, (8,), (8,), False),
        (2, 2, (2,), (2,), False),
        (12, 16, (4, 16), (16,), False),
        (1, 64, (4,), (64,), False),
    ],
)
def test_a_sound_model_of_tight_shapes_is_right(checkpoint: Path, shapes: Any) -> None:
    """Slots that are full before a scenario ends, as many rows as a mixed step has room for, prompts of a token."""
    plan = LoadPlan(checkpoint, *shapes[:-1], num_threads=1, mixed_steps=shapes[-1])
    found = judge(run_scenarios(backends.get("cpu").load(plan), quick=True), plan)
    assert found["findings"] == []
    assert found["left_out"] == ["the end of texts, of which the model's files say nothing"]
