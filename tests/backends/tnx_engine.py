"""Requests that come, go and are given up at random on an engine, and what Hugging Face makes of the same prompts."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import torch

from djl_python_neuronx.backends.base import Backend
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.limits import longest_prompt
from djl_python_neuronx.engine.speculation import Proposer
from djl_python_neuronx.types import FinishReason, GenerationRequest
from tests.device_driver import Text, assert_same

NUM_REQUESTS = 14


@torch.no_grad()
def reference(model: Any, prompt: list[int], num_tokens: int) -> Text:
    """Greedy tokens of a transformers model, the whole sequence at every token."""
    text = Text(prompt)
    for _ in range(num_tokens):
        text.add(model(torch.tensor([prompt + text.tokens])).logits[0, -1].numpy())
    return text


def assert_like_alone(
    backend: Backend, model: Any, seed: int, *, proposer: Proposer | None = None
) -> int:
    """Run random traffic through an engine and compare every token; returns how many were compared."""
    draw, engine = random.Random(seed), Engine(backend, proposer=proposer)
    longest, limit = longest_prompt(backend.spec), backend.spec.max_model_len
    prompts = [draw.choices(range(3, 90), k=draw.randint(1, longest)) for _ in range(NUM_REQUESTS)]
    prompts[3], prompts[5] = prompts[3][:1], prompts[5][:2]  # one token looks like a decode
    wanted = [draw.randint(1, limit - len(prompt)) for prompt in prompts]
    wanted[6] = limit - len(prompts[6])
    arrivals = [draw.randint(0, 60) for _ in prompts]
    cancels = {1: draw.randint(10, 60), 8: draw.randint(10, 60)}
    found: dict[str, list[int]] = defaultdict(list)
    ends: dict[str, FinishReason] = {}
    for turn in range(3000):
        for i, arrival in enumerate(arrivals):
            if arrival == turn:
                engine.add(GenerationRequest(str(i), prompts[i], max_new_tokens=wanted[i]))
        for i, when in cancels.items():
            if when == turn:
                engine.abort(str(i))
        if turn > 60 and not engine.has_work:
            break
        for output in engine.step().outputs:
            assert output.error is None, output.error
            found[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                ends[output.request_id] = output.finish_reason
    for i, prompt in enumerate(prompts):
        tokens = found[str(i)]
        if i not in cancels:
            assert (ends[str(i)], len(tokens)) == (FinishReason.LENGTH, wanted[i])
        assert_same(Text(prompt, tokens), reference(model, prompt, len(tokens)))
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    return sum(map(len, found.values()))
