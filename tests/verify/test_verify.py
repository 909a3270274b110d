"""Verification of the cpu backend: sound models pass, and each planted fault is found and named by its place."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the reference needs torch")
pytest.importorskip("transformers", "4.57", reason="the cpu backend needs transformers 4.57")

from djl_python_neuronx import backends
from djl_python_neuronx.backends import LoadPlan
from djl_python_neuronx.verify.judge import judge, near_logits, p_value
from djl_python_neuronx.verify.record import Draws, LogitFile, Record, Seen
from djl_python_neuronx.verify.reference import Reference, distribution
from djl_python_neuronx.verify.scenarios import most_outputs, run_scenarios
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
    assert len(record.seen) <= most_outputs(plan, 1)
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


def test_every_slot_and_number_of_rows_is_compared_in_few_outputs(checkpoint: Path) -> None:
    plan = replace(plan_of(checkpoint), num_slots=32)
    seen = run_scenarios(backends.get("cpu").load(plan), quick=True).seen
    decodes = [one for one in seen if one.scenario == "slots" and one.graph[0] == "decode"]
    assert {one.slot for one in decodes} == {*range(32)}
    assert {one.rows for one in decodes} == {*range(1, 33)}
    assert len(seen) <= most_outputs(plan, 1)


def test_ties_at_the_edge_of_a_nucleus_are_kept_whole() -> None:
    """In bfloat16 some logits of many are equal. A nucleus ends with the value that completes its share."""
    random = np.random.default_rng(5)
    bits = random.normal(0, 2.5, 32_000).astype(np.float32).view(np.uint32)
    logits = (bits & 0xFFFF0000).view(np.float32)
    for settings in ({"top_p": 0.6}, {"top_p": 0.3}, {"top_k": 40, "top_p": 0.8}):
        values, places, counts = np.unique(-logits, return_inverse=True, return_counts=True)
        kept = values <= np.sort(-logits)[settings.get("top_k", len(logits)) - 1]
        masses = np.exp(-values.astype(float)) * counts * kept
        before = masses.cumsum() - masses
        kept &= before < settings["top_p"] * masses.sum()
        wanted = np.exp(logits.astype(float)) * kept[places]
        found = distribution(logits, {"temperature": 1.0, **settings})
        np.testing.assert_allclose(found, wanted / wanted.sum(), rtol=1e-6)


def test_a_test_of_draws_rejects_as_many_right_ones_as_it_states_and_wrong_ones() -> None:
    """Also of logits that are known up to rounding only: then it rejects fewer right ones, and still wrong ones."""
    random = np.random.default_rng(5)
    logits = random.normal(0, 2, 200).astype(np.float32)
    cpu, device = (
        logits + random.normal(0, 0.05, 200).astype(np.float32) for _ in ("cpu", "device")
    )
    settings = {"temperature": 1.0, "top_k": 20}
    wanted = distribution(logits, settings)
    near = [distribution(row, settings) for row in near_logits(logits, cpu)]
    rejected = [
        sum(p_value(random.choice(200, 256, p=drawn), wanted, known) < 0.05 for _ in range(400))
        for drawn, known in ((wanted, []), (distribution(device, settings), near))
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
        tokens = random.choice(200, 256, p=distribution(device, other))
        assert p_value(tokens, wanted, near) < 1e-3
    for unknown in (-1, 200):
        assert p_value([unknown, 5], wanted) == p_value([unknown, 5], wanted, near) == 0


def test_draws_of_more_tokens_than_top_k_are_wrong_whatever_the_logits_are(
    checkpoint: Path,
) -> None:
    """Nine of nearly equal probabilities in place of eight."""
    plan = plan_of(checkpoint, "bfloat16")
    random, spec = np.random.default_rng(5), backends.get("cpu").load(plan).spec
    seen = Seen("draws", None, 0, 1, 0, 0)
    record = Record(spec, [[5]], LogitFile(spec.vocab_size), [seen])
    ids = Reference(plan, "float32").logits([5], [0])[0].argsort()[-9:]
    settings = {"temperature": 50.0, "top_k": 8}
    for kept in (8, 9):
        tokens = random.choice(ids[-kept:], 100).tolist()
        record.draws.append(Draws(settings, "device", tokens, seen))
    assert [one["right"] for one in judge(record, plan)["draws"]] == [True, False]
