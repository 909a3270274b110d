"""Traffic on a backend whose library is a double."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the tnx backend needs torch")
from djl_python_neuronx.backends.base import Backend
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.speculation import Proposer
from djl_python_neuronx.types import GenerationRequest
from tests.doubles.toy_backend import expected

VOCAB_SIZE = 101


def folder_of(directory: Path, model_type: str, **settings: object) -> Path:
    config = {"model_type": model_type, "vocab_size": VOCAB_SIZE, **settings}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def assert_expected(
    backend: Backend, seed: int, window: int = 0, proposer: Proposer | None = None
) -> None:
    """Random traffic; the tokens of each request are those that it gets alone."""
    draw, engine = random.Random(seed), Engine(backend, proposer=proposer)
    prompts = [draw.choices(range(1, VOCAB_SIZE), k=draw.randint(1, 20)) for _ in range(40)]
    lengths = [draw.randint(1, 48 - len(prompt)) for prompt in prompts]
    arrivals = [draw.randint(0, 150) for _ in prompts]
    found: dict[str, list[int]] = defaultdict(list)
    for turn in range(2000):
        for i, arrival in enumerate(arrivals):
            if arrival == turn:
                engine.add(GenerationRequest(str(i), prompts[i], max_new_tokens=lengths[i]))
        for output in engine.step().outputs:
            assert output.error is None, output.error
            found[output.request_id] += output.token_ids
    for i, prompt in enumerate(prompts):
        alone = expected(prompt, lengths[i], vocab_size=VOCAB_SIZE, window=window)
        assert found[str(i)] == alone
