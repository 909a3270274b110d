"""Chunked prefill from the options to the answers, on the CPU: the texts that there are without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the cpu backend needs torch")
pytest.importorskip("transformers", "4.57", reason="the cpu backend needs transformers 4.57")

from djl_python_neuronx.engine.streams import BlockingQueue
from djl_python_neuronx.errors import PromptTooLongError
from djl_python_neuronx.service import Service
from djl_python_neuronx.telemetry import exposition

TINY = Path(__file__).parents[1] / "examples" / "tiny-llama"
WHOLE = {
    "model_loader": "cpu",
    "n_positions": "256",
    "max_rolling_batch_size": "3",
    "dtype": "fp32",
    "engine_process": "false",
}
CHUNKED = {**WHOLE, "enable_chunked_prefill": "true", "context_length_estimate": "8,16"}
PROMPTS = ["8 + 5 =", "a b c d " * 20, "1 2 3 4 5 6 7 8 9 " * 10, "the cat"]


def texts(options: dict[str, str]) -> tuple[list[str], str]:
    """Texts in the order of the requests, and the metrics."""
    service = Service.load(None, TINY, environ={}, overrides=options)
    found: dict[str, str] = {}
    inbox = BlockingQueue()
    open_requests = set()
    try:
        for prompt in PROMPTS:
            for parameters in ({}, {"do_sample": True, "temperature": 0.8, "seed": 5}):
                body = {"inputs": prompt, "parameters": {"max_new_tokens": 30, **parameters}}
                request = service.parse(json.dumps(body).encode()).request
                open_requests.add(request.request_id)
                found[request.request_id] = ""
                service.loop.submit(request, inbox)
        while open_requests:
            for delta in inbox.drain(60):
                assert delta.error is None, delta.error
                found[delta.request_id] += delta.text
                if delta.finish_reason is not None:
                    open_requests.remove(delta.request_id)
        long = service.parse(json.dumps({"inputs": "a b c d " * 200}).encode())
        with pytest.raises(PromptTooLongError) as caught:
            service.loop.submit(long.request, inbox)
        assert ("context_length_estimate" in str(caught.value)) == (options is WHOLE)
        return list(found.values()), exposition({"": service.metrics}).decode()
    finally:
        service.close()


def test_chunks_change_no_text() -> None:
    wanted, without = texts(WHOLE)
    found, metrics = texts(CHUNKED)
    assert found == wanted
    assert 'djl_neuronx_mixed_seconds_count{bucket="16",cache="0",model=""}' in metrics
    assert "mixed_seconds_count{" not in without
