"""OpenAI's bodies in, OpenAI's bytes out."""

from __future__ import annotations

import pytest

from djl_python_neuronx.errors import PromptTooLongError, RequestError
from djl_python_neuronx.protocol.base import MAX_SEQUENCES, ParseContext
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.types import GenerationRequest
from tests.toy_tokenizer import TOKENIZER


def test_several_sequences_of_each_prompt() -> None:
    context = ParseContext(tokenizer=TOKENIZER, request_id="r")
    common = GenerationRequest("r", (), SamplingParams(temperature=1.0, seed=2**64 - 1))
    found = context.requests(common, ["<5>", [7, 8]], count=3)
    assert [one.request_id for one in found] == ["r", "r.1", "r.2", "r.3", "r.4", "r.5"]
    assert [one.prompt_ids for one in found] == [[1, 5]] * 3 + [[7, 8]] * 3
    seeds = [one.sampling.seed for one in found]
    assert seeds[0] == 2**64 - 1, "the first answer is that of a request for one"
    assert len(set(seeds)) == 3
    assert seeds[:3] == seeds[3:], "the answer to a prompt is the same beside others"
    next_seeds = [
        one.sampling.seed
        for one in context.requests(
            GenerationRequest("r", (), SamplingParams(seed=0)), ["<5>"], count=3
        )
    ]
    assert not set(seeds) & set(next_seeds)
    unseeded = context.requests(GenerationRequest("r", ()), ["<5>"], count=2)
    assert [one.sampling.seed for one in unseeded] == [None, None]


def test_too_many_sequences() -> None:
    context = ParseContext(tokenizer=TOKENIZER, request_id="r")
    common = GenerationRequest("r", ())
    assert len(context.requests(common, ["<5>"] * 2, count=MAX_SEQUENCES // 2)) == MAX_SEQUENCES
    with pytest.raises(RequestError, match="3 prompts with 50 answers each are 150 sequences"):
        context.requests(common, ["<5>"] * 3, count=50)


def test_a_long_chat_is_refused_before_it_is_rendered() -> None:
    context = ParseContext(tokenizer=TOKENIZER, request_id="r", max_prompt_chars=7)
    message = {"role": "user", "content": "1234"}
    assert len(context.encode_chat([message])) == 5
    with pytest.raises(PromptTooLongError, match="the conversation has 8 characters"):
        context.encode_chat([message, message])
