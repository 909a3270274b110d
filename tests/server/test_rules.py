"""Rules about the next token through HTTP, against `generate` of transformers on the same weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the `server` extra")
pytest.importorskip("torch", reason="the cpu backend needs torch")
pytest.importorskip("transformers", "4.57", reason="the cpu backend needs transformers 4.57")

import torch

from djl_python_neuronx.sampling import SamplingParams
from tests.distributions import hugging_face, p_value
from tests.doubles.tiny_models import (
    load_reference,
    save_tiny_model,
)
from tests.server.running import http, serving_tiny

PROMPT = [1, 5, 6, 7, 5, 6]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny_model("llama", folder)
    return folder


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with serving_tiny(model) as running:
        yield running.url


def spelled(ids: list[int]) -> str:
    return "".join(f"<{one}>" for one in ids)


GREEDY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Parameters of a request, and those of `generate` that mean the same.
    "none": ({}, {}),
    "repetition": ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    "n-grams": (
        {"no_repeat_ngram_size": 2, "logit_bias": {"70": 9}},
        {"no_repeat_ngram_size": 2, "sequence_bias": {(70,): 9.0}},
    ),
    "bias": (
        {"logit_bias": {"9": 7.5, "10": 7, "11": -3}},
        {"sequence_bias": {(9,): 7.5, (10,): 7.0, (11,): -3.0}},
    ),
    "least": (
        {"logit_bias": {"1": 60}, "stop_token_ids": [1], "min_new_tokens": 5},
        {"sequence_bias": {(1,): 60.0}, "min_new_tokens": 5, "eos_token_id": 1},
    ),
    "least of vLLM": (
        {"logit_bias": {"1": 60}, "stop_token_ids": [1], "min_tokens": 3},
        {"sequence_bias": {(1,): 60.0}, "min_new_tokens": 3, "eos_token_id": 1},
    ),
    "least length": (
        {"logit_bias": {"1": 60}, "stop_token_ids": [1], "min_length": 8},
        {"sequence_bias": {(1,): 60.0}, "min_length": 8, "eos_token_id": 1},
    ),
}


def test_greedy_answers_are_those_of_generate(url: str, model: Path) -> None:
    """All at once, so that rows with rules and without share steps."""
    reference = load_reference(model)
    cases = dict(GREEDY)

    def generated(**fields: Any) -> list[int]:
        ids = torch.tensor([PROMPT])
        found = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
            **{"eos_token_id": None, **fields},
        )
        return [int(one) for one in found[0, len(PROMPT) :]]

    usual = generated()
    words = [[usual[0]], usual[1:3], [PROMPT[-1], usual[2]], usual[3:6]]
    cases["bad words"] = {"bad_words_ids": words}, {"bad_words_ids": words}
    few = [*usual[:2], *usual[5:9]]
    cases["suppressed"] = {"suppress_tokens": few}, {"suppress_tokens": few}
    few = usual[:1]
    cases["begin"] = {"begin_suppress_tokens": few}, {"begin_suppress_tokens": few}
    several = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 1, "bad_words_ids": words}
    cases["several"] = several, several
    few = [*range(40, 60)]
    cases["allowed"] = {"allowed_token_ids": few}, {"prefix_allowed_tokens_fn": lambda *_: few}

    def served(parameters: dict[str, Any]) -> list[int]:
        given = {"max_new_tokens": 12, "details": True, "ignore_eos": True, **parameters}
        body = {"inputs": spelled(PROMPT[1:]), "parameters": given}
        answer = http.post(url + "/invocations", json=body)
        assert answer.status_code == 200, answer.text
        return [token["id"] for token in answer.json()["details"]["tokens"]]

    with ThreadPoolExecutor(len(cases)) as pool:
        found = [*pool.map(served, [parameters for parameters, _ in cases.values()])]
    wanted = {name: generated(**fields) for name, (_, fields) in cases.items()}
    assert dict(zip(cases, found, strict=True)) == wanted
    assert len(set(map(tuple, wanted.values()))) == len(cases), "each rule changes the answer"


def test_sampled_answers_follow_the_distribution_of_generate(url: str, model: Path) -> None:
    """LangChain's defaults, and others: the first tokens of 120 sequences, with their own seeds."""
    with torch.no_grad():
        logits = load_reference(model)(torch.tensor([PROMPT])).logits[0, -1].double().numpy()
    for fields in (
        {"temperature": 0.8, "top_k": 10, "top_p": 0.95, "typical_p": 0.95},
        {"temperature": 2.0, "typical_p": 0.5, "suppress_tokens": [int(logits.argmax())]},
        {"temperature": 1.5, "top_p": 0.9, "typical_p": 0.8, "logit_bias": {"9": 4.0}},
    ):
        given = {**fields, "max_new_tokens": 1, "n": 120, "seed": 3, "details": True}
        body = {"inputs": spelled(PROMPT[1:]), "parameters": given}
        answer = http.post(url + "/invocations", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        details = answer.json()["details"]
        drawn = [one["tokens"][0]["id"] for one in (details, *details["best_of_sequences"])]
        assert len(drawn) == 120
        wanted = hugging_face(logits, SamplingParams.from_mapping(fields), PROMPT)
        assert p_value(drawn, wanted) > 0.001, fields


def test_words_and_penalties_of_openai_s_route(url: str) -> None:
    """A text shows the ids."""

    def complete(**fields: Any) -> list[int]:
        body = {"prompt": spelled(PROMPT[1:]), "max_tokens": 12, "temperature": 0, **fields}
        answer = http.post(url + "/v1/completions", json={"ignore_eos": True, **body})
        assert answer.status_code == 200, answer.text
        return [int(one) for one in re.findall(r"\d+", answer.json()["choices"][0]["text"])]

    usual = complete()
    word = usual[3:5]
    changed = complete(bad_words=[spelled(word)])
    assert changed[:4] == usual[:4]
    assert word not in [changed[i : i + 2] for i in range(len(changed))]
    assert usual[3] in changed
    stop = complete(stop=spelled(usual[3:4]))
    assert stop == usual[: len(stop)]
    assert len(stop) < 4
    assert complete(stop=spelled(usual[3:4]), min_tokens=4)[:4] == usual[:4]
    biased = complete(presence_penalty=-2, frequency_penalty=-2, logit_bias={"50": 100})
    assert biased == [50] * 12


@pytest.mark.parametrize("stream", [False, True])
def test_rules_that_exclude_every_token_end_their_request_alone(url: str, stream: bool) -> None:
    rules = {"allowed_token_ids": [70, 71, 72], "no_repeat_ngram_size": 1, "stream": stream}

    def post(**fields: Any) -> Any:
        body = {"prompt": spelled(PROMPT[1:]), "temperature": 0, "max_tokens": 12, **fields}
        return http.post(url + "/v1/completions", json={"ignore_eos": True, **body})

    alone = post().json()["choices"][0]["text"]
    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(post)
        bad = pool.submit(post, **rules).result()
        assert good.result().json()["choices"][0]["text"] == alone
    says = (
        "the request's rules exclude each one (allowed_token_ids and no_repeat_ngram_size); loosen"
    )
    if not stream:
        error = bad.json()["error"]
        assert (bad.status_code, error["param"]) == (400, "allowed_token_ids")
        assert says in error["message"]
        return
    assert says in bad.text
    assert {int(one) for one in re.findall(r"<(\d+)>", bad.text)} == {70, 71, 72}
