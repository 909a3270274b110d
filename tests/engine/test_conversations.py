"""Conversations of several users over copies of a model on the CPU that reuse prefixes."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the cpu backend needs torch")
pytest.importorskip("transformers", "4.57", reason="the cpu backend needs transformers 4.57")

from djl_python_neuronx import backends
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.loop import LoopSettings
from djl_python_neuronx.engine.replicas import Replicas
from djl_python_neuronx.engine.streams import BlockingQueue
from djl_python_neuronx.engine.worker import EngineThread
from tests.doubles.tiny_models import save_tiny_model
from tests.doubles.toy_tokenizer import TOKENIZER
from tests.engine.loops import Recorder, collect, request

COPIES, SLOTS, LENGTH = 3, 2, 384
NUM_FIRST, NUM_NEW, NUM_ANSWERED = 200, 20, 8


def test_each_turn_finds_those_before_it_and_what_a_full_copy_has_is_run_elsewhere(
    tmp_path: Path,
) -> None:
    folder = save_tiny_model("llama", tmp_path, max_position_embeddings=LENGTH)
    plan = backends.LoadPlan(
        folder, SLOTS, LENGTH, (32, 256, LENGTH), (LENGTH,), num_threads=1, prefix_caching=True
    )
    launch = partial(EngineThread, lambda: Engine(backends.get("cpu").load(plan)))
    copies = Replicas(
        [launch] * COPIES, lambda: TOKENIZER, observer=Recorder(), settings=LoopSettings()
    )
    copies.start_all()

    def ask(prompts: dict[str, list[int]]) -> tuple[dict[str, int], dict[str, list[int]]]:
        """Submit prompts at once. Returns the cached tokens of each, and the tokens of its answer."""
        inbox, loads = BlockingQueue(), []
        with copies._lock:  # none ends before all are placed
            for name, prompt in prompts.items():
                copies.submit(request(name, prompt, NUM_ANSWERED), inbox)
            loads += [len(copy.loop.streams) for copy in copies.copies]
        assert max(loads) <= SLOTS
        deltas = collect(inbox, *prompts)
        assert not any(one[-1].error for one in deltas.values())
        answers = {
            name: [token.id for delta in one for token in delta.tokens]
            for name, one in deltas.items()
        }
        return {
            name: max(one.num_cached_tokens for one in deltas[name]) for name in deltas
        }, answers

    draw = random.Random(0)
    try:
        users = [f"user {i}" for i in range(COPIES * SLOTS)]
        history = {user: draw.choices(range(3, 90), k=NUM_FIRST) for user in users}
        for turn in range(3):
            draw.shuffle(users)
            cached, answers = ask({user: history[user] for user in users})
            for user in users:
                # The last token of an answer has never been run.
                had = len(history[user]) - NUM_NEW - 1 if turn else 0
                assert cached[user] == had, (turn, user)
                history[user] += answers[user] + draw.choices(range(3, 90), k=NUM_NEW)
        forks = {f"fork {i}": [*history[users[0]], i + 3] for i in range(COPIES * SLOTS)}
        cached, answers = ask(forks)
        assert min(cached[f"fork {i}"] for i in range(SLOTS)) > NUM_FIRST
        assert cached[f"fork {SLOTS}"] == 0
    finally:
        copies.close()
