"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from djl_python_neuronx.engine.detokenizer import Delta
from djl_python_neuronx.errors import PromptTooLongError, RequestError, UnknownModelError
from djl_python_neuronx.protocol import answer_error
from tests.protocol.parsing import parse

FACTS = {"max_model_len": 128, "vocab_size": 300}


def tokens(path: str = "/tokenize", **body: Any) -> Any:
    parsed = parse(body, path=path, **FACTS)
    assert not parsed.requests
    return json.loads(parsed.formatter.feed(Delta("", "", ())))


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "<5><6>"},
        {"messages": [{"role": "system", "content": "<5>"}, {"role": "user", "content": "<6>"}]},
    ],
)
def test_the_ids_of_a_prompt_and_of_a_conversation(body: dict[str, Any]) -> None:
    found = {"count": 3, "max_model_len": 128, "tokens": [1, 5, 6]}
    assert tokens(**body) == {**found, "token_strs": None}
    assert tokens(**body, return_token_strs=True) == {**found, "token_strs": ["", "<5>", "<6>"]}


def test_a_prompt_without_special_tokens() -> None:
    assert tokens(prompt="<5><6>", add_special_tokens=False)["tokens"] == [5, 6]
    assert tokens(prompt="<5><6>", add_special_tokens=True)["tokens"] == [1, 5, 6]


def test_tgis_pieces() -> None:
    assert tokens(inputs="<5><16>", parameters={"max_new_tokens": 3}) == [
        {"id": 1, "text": "", "start": 0, "stop": 0},
        {"id": 5, "text": "<5>", "start": 0, "stop": 3},
        {"id": 16, "text": "<16>", "start": 3, "stop": 7},
    ]


def test_the_text_of_ids() -> None:
    assert tokens("/detokenize", tokens=[1, 5, 6]) == {"prompt": "<5><6>"}
    assert tokens("/detokenize", tokens=[]) == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/tokenize", {}, "one of prompt, messages and inputs"),
        ("/tokenize", {"prompt": "a", "messages": []}, "messages"),
        ("/tokenize", {"prompt": 5}, "'prompt' is 5"),
        ("/tokenize", {"messages": [{"role": "me", "content": "a"}]}, r"messages\[0\].role"),
        ("/tokenize", {"inputs": ["a"]}, "'inputs' is a list"),
        ("/tokenize", {"inputs": "a", "parameters": {"top_k": "5"}}, "top_k is a string"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}], "continue_final_message": True},
            "last message of the assistant",
        ),
        ("/detokenize", {}, "tokens is missing"),
        ("/detokenize", {"tokens": "5"}, "tokens is a string; expected a list of token ids"),
        ("/detokenize", {"tokens": [5, True]}, "tokens is a list with other values than integers"),
        (
            "/detokenize",
            {"tokens": [300]},
            "tokens has the token id 300; expected ids of the model, from 0 to 299",
        ),
        ("/detokenize", {"tokens": [5, -1]}, "tokens has the token id -1"),
    ],
)
def test_bad_requests(path: str, body: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        tokens(path, **body)
    status, content = answer_error(caught.value, path=path)
    assert (status, set(json.loads(content)["error"])) == (
        400,
        {"message", "type", "param", "code"},
    )


def test_limits_and_names_are_those_of_completions() -> None:
    with pytest.raises(PromptTooLongError):
        parse({"prompt": "a" * 11}, path="/tokenize", max_prompt_chars=10)
    with pytest.raises(UnknownModelError, match="'other'"):
        tokens(prompt="a", model="other")
    with pytest.raises(UnknownModelError, match="'other'"):
        tokens("/detokenize", tokens=[5], model="other")
