"""Requests that come, go and are given up at random on an engine, and what Hugging Face makes of the same prompts."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import numpy as np
import torch

from djl_python_neuronx.backends.base import Backend
from djl_python_neuronx.engine.core import Engine
from djl_python_neuronx.engine.limits import longest_prompt
from djl_python_neuronx.engine.speculation import Proposer
from djl_python_neuronx.types import FinishReason, GenerationRequest
from tests.doubles.device_driver import TIE, Text


@torch.no_grad()
def reference(model: Any, prompt: list[int], num_tokens: int) -> Text:
    """Greedy tokens of a transformers model, the whole sequence at every token."""
    text = Text(prompt)
    for _ in range(num_tokens):
        text.add(model(torch.tensor([prompt + text.tokens])).logits[0, -1].numpy())
    return text


@torch.no_grad()
def assert_greedy(model: Any, prompt: list[int], tokens: list[int]) -> None:
    """Each token is the best one of a transformers model after the prompt and the tokens before it."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].numpy()
    behind = logits.max(axis=1) - logits[np.arange(len(tokens)), tokens]
    for i in np.flatnonzero(behind >= TIE).tolist():
        wanted = int(logits[i].argmax())
        message = f"token {i} after {len(prompt)} is {tokens[i]}, not {wanted} by {behind[i]}"
        raise AssertionError(message)


def assert_like_alone(
    backend: Backend,
    model: Any,
    seed: int,
    *,
    proposer: Proposer | None = None,
    num_requests: int = 14,
) -> int:
    """Run random traffic through an engine and compare every token; returns how many were compared."""
    draw, engine = random.Random(seed), Engine(backend, proposer=proposer)
    longest, limit = longest_prompt(backend.spec), backend.spec.max_model_len
    # One token looks like a decode; around a bucket's length the other bucket begins.
    edges = {1, 2, longest} | {
        bucket + more for bucket in backend.spec.prefill_buckets for more in (-1, 0, 1)
    }
    lengths = [length for length in sorted(edges) if 0 < length <= longest]
    lengths += [draw.randint(1, longest) for _ in range(num_requests - len(lengths))]
    draw.shuffle(lengths)
    prompts = [draw.choices(range(3, 90), k=length) for length in lengths]
    wanted = [draw.randint(1, limit - len(prompt)) for prompt in prompts]
    wanted[6] = limit - len(prompts[6])
    last = 8 * num_requests  # so that the slots are all taken at times, and nearly none at others
    arrivals = [draw.randint(0, last) for _ in prompts]
    cancels = {i: arrivals[i] + draw.randint(1, 50) for i in range(1, num_requests, 7)}
    found: dict[str, list[int]] = defaultdict(list)
    ends: dict[str, FinishReason] = {}
    for turn in range(100 * num_requests + 3000):
        for i, arrival in enumerate(arrivals):
            if arrival == turn:
                request = GenerationRequest(
                    str(i), prompts[i], max_new_tokens=wanted[i], ignore_eos=True
                )
                engine.add(request)
        for i, when in cancels.items():
            if when == turn:
                engine.abort(str(i))
        if turn > last and not engine.has_work:
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
        assert_greedy(model, prompt, tokens)
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    return sum(map(len, found.values()))
