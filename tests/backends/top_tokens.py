"""The most likely tokens of a served example model, compared with transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the cpu backend needs torch")
pytest.importorskip("transformers", "4.57", reason="the cpu backend needs transformers 4.57")
from transformers import AutoModelForCausalLM  # noqa: E402

from djl_python_neuronx.engine.detokenizer import Token  # noqa: E402
from djl_python_neuronx.engine.streams import BlockingQueue  # noqa: E402
from djl_python_neuronx.service import Service  # noqa: E402
from djl_python_neuronx.types import GenerationRequest  # noqa: E402

TINY = Path(__file__).parents[2] / "examples" / "tiny-llama"


def assert_top_tokens(service: Service, prompt: str) -> None:
    """They are transformers' most likely ones, with its log-probabilities."""
    prompt_ids = service.tokenizer.encode(prompt)
    asked = GenerationRequest("top", prompt_ids, max_new_tokens=12, ignore_eos=True, top_logprobs=4)
    inbox = BlockingQueue()
    service.loop.submit(asked, inbox)
    tokens: list[Token] = []
    delta = None
    while delta is None or not delta.finished:
        for delta in inbox.drain(60):
            tokens += delta.tokens
    ids = torch.tensor([[*prompt_ids, *(token.id for token in tokens)]])
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(TINY)(ids).logits[0].float()
    rows = logits[len(prompt_ids) - 1 : -1].log_softmax(-1)
    assert len(tokens) == len(rows) == 12
    for token, row in zip(tokens, rows, strict=True):
        top = row.topk(4)
        assert [one.id for one in token.top] == top.indices.tolist()
        assert [one.logprob for one in token.top] == pytest.approx(top.values.tolist(), abs=1e-3)
        assert (token.id, token.logprob) == (token.top[0].id, token.top[0].logprob)
