"""Scheduling as a client sees it: prompts that the cache holds, and who is served first."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the `server` extra")
pytest.importorskip("torch", reason="the cpu backend needs torch")
pytest.importorskip("transformers", "4.57", reason="the cpu backend needs transformers 4.57")

from djl_python_neuronx.server.app import Application
from djl_python_neuronx.server.keys import read_keys
from djl_python_neuronx.server.models import Model
from tests.doubles.tiny_models import save_tiny_model
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend
from tests.doubles.toy_service import toy_service
from tests.processes import wait_until
from tests.server.running import Running, body, http, serving, serving_tiny


def spelled(ids: list[int]) -> str:
    return "".join(f"<{one}>" for one in ids)


def total(url: str, metric: str) -> float:
    lines = http.get(url + "/metrics").text.splitlines()
    return sum(float(one.split()[1]) for one in lines if one.startswith(f"djl_neuronx_{metric}"))


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Of a real model on the CPU, with four slots that reuse prefixes."""
    save_tiny_model("llama", tmp_path)
    with serving_tiny(tmp_path, prefix_caching=True) as running:
        yield running.url


def complete(url: str, prompt: str, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more}
    answer = http.post(url + "/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    details: dict[str, int] = answer["usage"].get("prompt_tokens_details", {"cached_tokens": 0})
    return details["cached_tokens"]


def served_order(
    requests: list[dict[str, Any]],
    keys: list[str],
    digests: list[bytes] | None = None,
    **options: Any,
) -> list[int]:
    """The order in which requests that wait for the only slot get it, by their numbers.

    The first one holds it until all wait; `requests` are parameters of each, `keys` their API keys, or whole headers.
    """
    backend = ToyBackend(replace(TOY_SPEC, num_slots=1), step_s=0.001)
    backend.hang_at.add(0)
    application = Application(Model("toy"))
    service = application.models[0].service = toy_service(backend, **options)
    running = Running(application, api_keys=digests or ())

    def send(number: int) -> int:
        # The first one has many steps, so that the engine gets the last one meanwhile.
        sent = body([7] * (number + 1), 2 if number else 100, parameters=requests[number])
        key = keys[number]
        headers = {"authorization": key if " " in key else f"Bearer {key}"}
        status: int = http.post(
            running.url + "/invocations", json=sent, headers=headers
        ).status_code
        return status

    try:
        with ThreadPoolExecutor(len(requests)) as pool:
            answers = []
            for number in range(len(requests)):
                answers.append(pool.submit(send, number))
                wait_until(lambda: len(service.loop.streams) == len(answers), patience_s=20)
            wait_until(lambda: backend.hanging.is_set())
            backend.resume.set()
            assert [answer.result() for answer in answers] == [200] * len(requests)
    finally:
        running.close()
    assert backend.violations == []
    # A prompt has BOS, and one token more than its number.
    return [step.lens[0] - 2 for step in backend.steps if step.kind == "prefill"]


def test_the_lowest_priority_is_served_first() -> None:
    requests = [{"priority": one} for one in (0, 5, 0, -1, 0)]
    keys = ["same"] * len(requests)
    assert served_order(requests, keys, scheduling_policy="priority") == [0, 3, 2, 4, 1]
    assert served_order([{} for _ in requests], keys) == [0, 1, 2, 3, 4]
    with serving() as running:
        answer = http.post(running.url + "/invocations", json=body([5], parameters=requests[1]))
        assert answer.status_code == 400
        assert "option.scheduling_policy=priority" in answer.text


@pytest.mark.parametrize("key", ["user", "api_key"])
def test_clients_take_turns(key: str) -> None:
    names = ["a", "a", "a", "a", "b", "c", "b"]
    requests = [{"user": name} if key == "user" else {} for name in names]
    keys = names if key == "api_key" else ["same"] * len(names)
    assert served_order(requests, keys, fairness_key=key) == [0, 1, 4, 5, 2, 6, 3]
    assert served_order(requests, keys) == [0, 1, 2, 3, 4, 5, 6]


def test_a_key_is_one_client_however_it_is_written() -> None:
    keys = ["a", "bearer a", "BEARER  a", "Bearer \ta", "b", "Bearer c", "bearer  b"]
    digests = read_keys(None, "a,b,c")
    order = served_order([{}] * len(keys), keys, digests, fairness_key="api_key")
    assert order == [0, 1, 4, 5, 2, 6, 3]


def test_the_next_turn_of_a_conversation_runs_what_is_new(url: str) -> None:
    first = complete(url, spelled([*range(5, 20)]))
    assert cached(first) == 0
    turn = spelled([*range(5, 20)]) + first["choices"][0]["text"] + spelled([30, 31, 32])
    for i in range(3):
        complete(url, spelled([40 + i, 41, 42, 43]))
    second = complete(url, turn)
    # With BOS; the last token of an answer is not in the cache.
    assert (second["usage"]["prompt_tokens"], cached(second)) == (25, 21)
    assert total(url, "cached_prompt_tokens_total") >= 21
    for alone in (complete(url, turn, cache_salt="mine"), complete(url, turn, cache_salt="other")):
        assert (cached(alone), alone["choices"]) == (0, second["choices"])
    assert cached(complete(url, turn, cache_salt="other")) == 24


def test_the_prompt_of_several_answers_is_run_once(url: str) -> None:
    prompt = spelled([*range(5, 20)])
    several = complete(url, prompt, n=3, temperature=1, seed=7)
    assert cached(several) == 0, "the prompt counts once"
    assert total(url, "cached_prompt_tokens_total") == 2 * 15
    texts = [choice["text"] for choice in several["choices"]]
    assert len(set(texts)) == 3
    again = complete(url, prompt, n=3, temperature=1, seed=7, cache_salt="a")
    assert [choice["text"] for choice in again["choices"]] == texts
    best = complete(url, prompt, n=1, best_of=3, temperature=1, seed=7, cache_salt="b")
    assert best["choices"][0]["text"] in texts
    assert complete(url, prompt, temperature=1, seed=7)["choices"][0]["text"] == texts[0]
    assert total(url, "cached_prompt_tokens_total") == 3 * 2 * 15
