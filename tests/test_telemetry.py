"""Metrics by graph, of the cache, and under the names that gateways read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from djl_python_neuronx.engine.streams import BlockingQueue
from djl_python_neuronx.service import Service
from djl_python_neuronx.telemetry import Metrics, exposition
from djl_python_neuronx.types import GenerationRequest
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend
from tests.doubles.toy_service import toy_service
from tests.processes import PATIENCE_S, wait_until


def samples(**models: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The samples that Prometheus reads, by name and labels."""
    families = text_string_to_metric_families(exposition(models).decode())
    return {
        (one.name, frozenset(one.labels.items())): one.value
        for family in families
        for one in family.samples
    }


def labelled(name: str, **labels: object) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset({"model": "toy", **{k: str(v) for k, v in labels.items()}}.items())


def run(service: Service, prompt_len: int, num_tokens: int) -> None:
    """Generate an answer of exactly so many tokens, and wait for its last step's metrics."""
    inbox = BlockingQueue()
    request = GenerationRequest("a", [5] * prompt_len, max_new_tokens=num_tokens, ignore_eos=True)
    service.loop.submit(request, inbox)
    wait_until(lambda: any(delta.finished for delta in inbox.drain(1.0)))
    wait_until(
        lambda: (
            samples(toy=service.metrics)[labelled("djl_neuronx_generated_tokens_total")]
            == num_tokens
        )
    )


def test_times_of_decodes_are_counted_by_graph() -> None:
    """40 tokens behind a prompt of 3: the decode of token i reads 2 + i positions."""
    service = toy_service(ToyBackend(replace(TOY_SPEC, decode_slots=(1, 4))))
    try:
        run(service, prompt_len=3, num_tokens=40)
        found = samples(toy=service.metrics)
        counts = {
            key: value
            for key, value in found.items()
            if key[0] == "djl_neuronx_decode_seconds_count"
        }
        by_bucket = {32: 29.0, 64: 10.0}
        assert counts == {
            labelled("djl_neuronx_decode_seconds_count", kind="decode", bucket=bucket, rows=1): n
            for bucket, n in by_bucket.items()
        }
        assert found[labelled("djl_neuronx_queue_seconds_count")] == 1.0
        # What CloudWatch and Java get is the sum over labels.
        java = dict(
            line.removeprefix("[METRICS]").split(".Count:")
            for line in service.metrics.for_java("toy")
        )
        assert java["djl_neuronx_decode_seconds_count"] == "39.000000|#Model:toy|c"
    finally:
        service.close()


def test_a_graph_of_all_slots_has_their_number() -> None:
    service = toy_service(ToyBackend(replace(TOY_SPEC, token_buckets=())))
    try:
        run(service, prompt_len=3, num_tokens=3)
        key = labelled("djl_neuronx_decode_seconds_count", kind="decode", bucket=128, rows=4)
        assert samples(toy=service.metrics)[key] == 2.0
    finally:
        service.close()


@pytest.mark.parametrize(("block", "used"), [(1, 5.0), (16, 16.0)])
def test_the_cache_in_use_is_that_of_running_sequences(block: int, used: float) -> None:
    backend = ToyBackend(replace(TOY_SPEC, cache_block=block))
    backend.hang_at = {0}
    service = toy_service(backend)
    inbox = BlockingQueue()

    def now(name: str) -> float:
        return samples(toy=service.metrics)[labelled(f"djl_neuronx_kv_cache_{name}", copy=0)]

    try:
        assert (now("used_tokens"), now("tokens")) == (0.0, 512.0)
        request = GenerationRequest("a", [5] * 5, max_new_tokens=2, ignore_eos=True)
        service.loop.submit(request, inbox)
        assert backend.hanging.wait(PATIENCE_S)
        wait_until(lambda: now("used_tokens") == used)
        backend.resume.set()
        wait_until(lambda: now("used_tokens") == 0.0)
    finally:
        backend.resume.set()
        service.close()


def test_gateways_read_one_series_a_model_under_vllms_names() -> None:
    models = {"a": Metrics(), "b": Metrics()}
    for name, values in {
        "slots_in_use": (3, 1),
        "waiting_requests": (0, 7),
        "kv_cache_used_tokens": (96, 32),
        "kv_cache_tokens": (256, 256),
    }.items():
        for copy, value in enumerate(values):
            models["a"][name].labels(copy).set(value)
    found = {key: value for key, value in samples(**models).items() if key[0].startswith("vllm:")}
    wanted = {"num_requests_running": 4.0, "num_requests_waiting": 7.0, "kv_cache_usage_perc": 0.25}
    assert found == {
        (f"vllm:{name}", frozenset({("model_name", model), ("model", model)})): value
        if model == "a"
        else 0.0
        for name, value in wanted.items()
        for model in models
    }
