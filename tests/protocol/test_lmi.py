"""LMI bodies in, LMI bytes out."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_python_neuronx.engine.detokenizer import Delta, Token
from djl_python_neuronx.errors import (
    BodyTooLargeError,
    PromptTooLongError,
    RequestError,
    StepError,
    UnsupportedParameterError,
)
from djl_python_neuronx.protocol import parse_body
from djl_python_neuronx.protocol.base import (
    BESIDE_PROMPT_BYTES,
    ParseContext,
    ParsedRequest,
)
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.types import FinishReason, GenerationRequest
from tests.doubles.toy_tokenizer import TOKENIZER
from tests.protocol.parsing import SAMPLED, SAMPLING, parse


def with_parameters(
    options: Mapping[str, Any] = MappingProxyType({}), **parameters: Any
) -> ParsedRequest:
    return parse({"inputs": "<5>", "parameters": parameters}, **options)


def deltas(finish: FinishReason = FinishReason.LENGTH) -> list[Delta]:
    return [
        Delta(
            "r", "one", (Token(7, "one", -0.5, False),), num_prompt_tokens=2, num_generated_tokens=1
        ),
        Delta("r", "", (Token(8, "", -0.25, False),), num_prompt_tokens=2, num_generated_tokens=2),
        Delta(
            "r", " é", (Token(9, " é", -1.0, False), Token(2, "", -2.0, True)), finish, None, 2, 4
        ),
    ]


def test_defaults() -> None:
    parsed = parse({"inputs": "<5><6>"})
    request = parsed.request
    assert request.prompt_ids == [1, 5, 6]
    assert request.sampling.temperature == 0
    assert request.max_new_tokens == 30
    assert (request.stop_strings, request.stop_token_ids, request.ignore_eos) == (
        (),
        frozenset(),
        False,
    )
    assert not parsed.stream
    assert parsed.formatter.content_type == "application/json"


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [
        ({}, 0),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.5}, 0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0}, 0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 2}, 2),
        ({"temperature": 0}, 0),
        ({"top_k": 5}, 1.0),
        ({"top_p": 0.5}, 1.0),
        ({"top_p": 0.5, "temperature": None}, 1.0),
        ({"repetition_penalty": 1.3}, 0),
        ({"top_k": -1}, 1.0),
        ({"top_k": 0}, 1.0),
        ({"top_p": 1.0}, 1.0),
        ({"min_p": 0.0}, 1.0),
        ({"seed": 3}, 0),
        ({"typical_p": 0.9}, 1.0),
        ({"typical_p": 1.0}, 1.0),
        ({"presence_penalty": 1, "frequency_penalty": 1, "logit_bias": {"5": 1}}, 0),
        ({"min_new_tokens": 2, "no_repeat_ngram_size": 2, "bad_words": ["<5>"]}, 0),
    ],
)
def test_when_it_samples(parameters: dict[str, Any], temperature: float) -> None:
    assert with_parameters(**parameters).request.sampling.temperature == temperature


def test_every_parameter_arrives() -> None:
    assert set(SAMPLING) == set(SamplingParams.WIRE_NAMES)
    request = with_parameters(
        **SAMPLING,
        do_sample=True,
        max_new_tokens=3,
        min_tokens=3,
        stop=["a"],
        stop_sequences=["b", "a"],
        stop_token_ids=[4, 5],
        include_stop_str_in_output=True,
        ignore_eos=True,
        max_time=2.5,
        cache_salt="mine",
        priority=-1,
        user="me",
        details=True,
        decoder_input_details=True,
        top_n_tokens=2,
        skip_special_tokens=False,
        spaces_between_special_tokens=True,
        truncation_side="right",
        add_special_tokens=False,
        truncate=2,
        guided_choice=["yes", "no"],
        options={"scheduling_policy": "priority", "fairness_key": "user"},
    ).request
    assert request.prompt_ids == [5], "without BOS"
    default = GenerationRequest("", ())
    same = {name for name, value in vars(request).items() if value == vars(default)[name]}
    others = {
        "adapter",
        "adapter_name",
        "client_id",
        "given_ids",
        "prompt_name",
        "most_name",
        "seed",
    }
    others |= {"shown_ids", "trace"}
    assert same == others, "give the others another value"
    assert vars(request.sampling) == {**SAMPLED, "min_new_tokens": 3}
    assert request.max_new_tokens == 3
    assert request.stop_strings == ("a", "b")
    assert request.stop_token_ids == {4, 5}
    assert request.include_stop
    assert request.ignore_eos
    assert request.max_seconds == 2.5
    assert (request.cache_salt, request.priority) == ("mine", -1)
    assert request.client
    assert "me" not in request.client
    assert request.logprobs
    assert (request.skips_special, request.spaces_special) == (False, True)
    assert request.grammar is not None
    assert '"yes" | "no"' in request.grammar


@pytest.mark.parametrize(
    ("most", "kept"),
    [
        (1, [9]),
        (2, [8, 9]),
        (5, [5, 6, 7, 8, 9]),
        (6, [1, 5, 6, 7, 8, 9]),
        (60, [1, 5, 6, 7, 8, 9]),
    ],
)
def test_a_prompt_is_truncated_at_its_start(most: int, kept: list[int]) -> None:
    inputs = ["<5><6><7><8><9>", "<7>"]
    requests = parse({"inputs": inputs, "parameters": {"truncate": most}}).requests
    assert [one.prompt_ids for one in requests] == [kept, [1, 7][-most:]]


def test_a_text_too_long_for_any_prompt_is_truncated_too() -> None:
    inputs, parameters = "<7><8>" + "<5>" * 10_000 + "<7><8>", {"truncate": 2}
    parsed = parse({"inputs": inputs, "parameters": parameters}, max_prompt_chars=30)
    assert parsed.request.prompt_ids == [7, 8]
    parameters |= {"truncation_side": "right", "truncate": 3}
    parsed = parse({"inputs": inputs, "parameters": parameters}, max_prompt_chars=30)
    assert parsed.request.prompt_ids == [1, 7, 8]
    with pytest.raises(PromptTooLongError):
        parse({"inputs": inputs}, max_prompt_chars=30)


def test_prompts_may_be_token_ids() -> None:
    context = ParseContext(tokenizer=TOKENIZER, request_id="r", vocab_size=300)
    common = parse({"inputs": "<5>"}).request
    requests = context.requests(common, [[5, 6, 7], "<8>"], truncate=2)
    assert [one.prompt_ids for one in requests] == [[6, 7], [1, 8]]
    for wrong in (["5"], [5, 6.0], [True], [None], [[5]]):
        with pytest.raises(RequestError, match="prompt 2 of 2 is a list with other values"):
            context.requests(common, [[5], wrong])


@pytest.mark.parametrize("name", ["ignore_eos", "ignore_eos_token"])
def test_two_names_of_one_parameter(name: str) -> None:
    assert with_parameters(**{name: True}).request.ignore_eos
    assert not with_parameters(**{name: False}).request.ignore_eos


def test_seeds_may_be_negative() -> None:
    assert with_parameters(seed=-5).request.sampling.seed == 2**64 - 5


@pytest.mark.parametrize("field", ["user", "safety_identifier"])
def test_who_takes_turns_has_a_name(field: str) -> None:
    for value in (5, {}, ["a"], False):
        with_parameters(**{field: value})
        with pytest.raises(RequestError, match=f"{field} is .*; expected a string") as caught:
            with_parameters({"fairness_key": "user"}, **{field: value})
        assert caught.value.param == field


def test_the_time_of_a_request_begins_before_it_is_tokenised() -> None:
    parsed = parse({"inputs": "<5>", "parameters": {"max_time": 3}}, arrived_s=5.0)
    assert (parsed.request.arrived_s, parsed.request.max_seconds) == (5.0, 3)
    assert parse({"inputs": "<5>"}).request.max_seconds == math.inf


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty; expected .*lmi: .*openai_chat: "),
        (b"{", "not valid JSON"),
        (b'{"inputs": "\xff"}', "UTF-8, no gzip"),
        (b'{"inputs": NaN}', "not valid JSON"),
        (b"[]", "an empty list"),
        (b"[5]", "a list"),
        (b'"text"', "a string"),
        (b"{}", "an empty object"),
        (b'{"input": "x"}', "'input'"),
        (b'{"parameters": {}}', "inputs is missing"),
        (b'{"inputs": null}', "null"),
        (b'{"inputs": ""}', "inputs is an empty string; expected"),
        (b'{"inputs": []}', "inputs has 0 prompts; expected 1 to 128"),
        (b'{"inputs": ["x", ""]}', r"inputs\[1\] is an empty string"),
        (b'{"inputs": [["x"]]}', r"inputs\[0\] is a list"),
        (b'{"inputs": [5, 6]}', r"inputs\[0\] is a number"),
        (b'{"inputs": ["x"], "stream": true}', "not answered by a stream.*leave out stream"),
        (b'{"inputs": ["x"], "parameters": {"stream": true}}', "not answered by a stream"),
        (b'{"inputs": 3}', "a number"),
        (b'{"inputs": "x", "parameters": [5]}', "parameters is a list"),
        (b'{"inputs": "x", "max_new_tokens": 3}', 'belongs in "parameters"'),
        (b'{"inputs": "x", "paramters": {}}', r"did you mean 'parameters'\? Expected inputs, "),
        (b'{"inputs": "x", "stream": "yes"}', "'stream' is a string"),
        (
            b'{"inputs": "x", "stream": false, "parameters": {"stream": "yes"}}',
            "'stream' is a string",
        ),
    ],
)
def test_bad_bodies(body: bytes, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        parse(body)
    assert caught.value.status == 400


def test_an_empty_body_has_the_shape_of_its_path() -> None:
    with pytest.raises(RequestError, match=r"is empty; expected openai_chat: .*…\"}\]}$"):
        parse(b"", path="/v1/chat/completions")


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"temprature": 0.5}, "unknown parameter 'temprature'; did you mean 'temperature'"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": -3}, "top_k is -3"),
        ({"min_p": 2}, "min_p is 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"seed": -(2**63) - 1}, "seed is -9"),
        ({"seed": 2**64}, "seed"),
        ({"max_new_tokens": 0}, "'max_new_tokens' is 0; expected an integer of at least 1"),
        ({"max_new_tokens": 1.5}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"max_new_tokens": "5"}, "max_new_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"ignore_eos": "true"}, "ignore_eos"),
        ({"ignore_eos_token": 1}, "'ignore_eos_token' is 1; expected true or false"),
        ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
        ({"max_time": 0}, "'max_time' is 0; expected seconds, a number above 0"),
        ({"max_time": -1.5}, "max_time"),
        ({"max_time": True}, "max_time"),
        ({"max_time": "5"}, "max_time"),
        ({"details": 1}, "details"),
        ({"do_sample": "false"}, "do_sample"),
        ({"do_sample": False, "top_p": 7}, "top_p is 7"),
        ({"n": 0}, "'n' is 0; expected an integer of at least 1"),
        ({"n": True}, "'n' is true"),
        ({"n": 2}, "n and best_of above 1 need sampling"),
        ({"n": 3, "best_of": 2, "top_k": 5}, "best_of is 2; expected at least n, which is 3"),
        ({"n": 129, "do_sample": True}, r"has 129 sequences \(prompts: 1, n: 129\)"),
        ({"best_of": 129, "do_sample": True}, r"has 129 sequences \(prompts: 1, best_of: 129\)"),
        ({"bad_sequences": [" "], "bad_words": ["a"]}, "^bad_sequences has a word without tokens"),
        ({"max_tokens": 9}, r"'max_tokens'; did you mean 'max_new_tokens'\?"),
        ({"max_length": 9}, r"'max_length'; did you mean 'max_new_tokens'\?"),
        ({"truncate_prompt_tokens": 9}, r"did you mean 'truncate'\?"),
        ({"best_of": 2, "top_k": 5, "stream": True}, "not answered by a stream"),
        ({"num_beams": 2}, "'num_beams' is not supported"),
        ({"top_n_tokens": 21}, "'top_n_tokens' is 21; expected an integer from 0 to 20"),
        (
            {"adapter_id": "a"},
            "adapter_id names 'a', which is no adapter of this model; it has none",
        ),
        ({"frequency_penalty": 3}, "frequency_penalty is 3; expected a number from -2 to 2"),
        ({"decoder_input_details": True, "stream": True}, "not answered by a stream"),
        ({"truncation_side": "top"}, '\'truncation_side\' is a string; expected "left" or "right"'),
        ({"length_penalty": 0.5}, "'length_penalty' is not supported"),
        ({"logprobs": 1}, "'logprobs' is not supported"),
    ],
)
def test_bad_parameters(parameters: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        with_parameters(**parameters)
    assert caught.value.status == 400


def test_values_that_change_nothing_are_accepted() -> None:
    with_parameters(
        n=1,
        best_of=1,
        frequency_penalty=0.0,
        presence_penalty=0,
        top_n_tokens=0,
        typical_p=1.0,
        watermark=False,
        num_beams=1,
        num_return_sequences=1,
        length_penalty=1.0,
        early_stopping=False,
        min_length=1,
        bad_sequences=None,
        logprobs=None,
        prompt_logprobs=None,
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
    )
    with pytest.raises(UnsupportedParameterError):
        with_parameters(num_beams=True)


def test_a_field_for_what_is_not_supported() -> None:
    assert parse({"inputs": "<5>", "cached_prompt": None}).requests
    with pytest.raises(UnsupportedParameterError, match="cached_prompt is not supported"):
        parse({"inputs": "<5>", "cached_prompt": "a"})


def test_an_adapter_of_a_model_without_adapters_is_refused() -> None:
    for more, headers in (
        ({"adapters": "a"}, {}),
        ({"adapters": ["a"]}, {}),
        ({}, {"x-amzn-sagemaker-adapter-identifier": "a"}),
    ):
        with pytest.raises(
            RequestError, match=r"names 'a', which is no adapter.*option\.enable_lora"
        ):
            parse({"inputs": "<5>", **more}, headers=headers)
    assert parse({"inputs": "<5>", "adapters": None}).request.adapter == 0


def answer_of(parsed: ParsedRequest, logprobs: Sequence[float] = (-1.0,)) -> Any:
    """The JSON answer if each sequence has one token, with these log-probabilities in turn."""
    for request in parsed.requests:
        scored = (Token(5, "<5>", -0.25, False, rank=1),)
        assert not parsed.formatter.feed(Delta(request.request_id, "", (), prompt=scored))
    parts = [
        parsed.formatter.feed(
            Delta(
                request.request_id,
                f"t{i}",
                (Token(7 + i, f"t{i}", logprob, False, (Token(2, "<eos>", -0.5, True),)),),
                FinishReason.LENGTH,
                None,
                2,
                1,
            )
        )
        for i, (request, logprob) in enumerate(zip(parsed.requests, logprobs, strict=True))
    ]
    assert not any(parts[:-1])
    return json.loads(parts[-1])


def test_the_tokens_of_the_prompt_have_log_probabilities_but_the_first() -> None:
    prefill = [
        {"id": 1, "text": "", "log_prob": None},
        {"id": 5, "text": "<5>", "log_prob": -0.25},
    ]
    parsed = with_parameters(details=True, decoder_input_details=True)
    assert parsed.request.scores_prompt == 0
    assert answer_of(parsed)["details"]["prefill"] == prefill
    assert with_parameters(decoder_input_details=True).request.scores_prompt is None
    assert "details" not in answer_of(with_parameters(decoder_input_details=True))


def test_the_best_sequence_alone_has_the_prompt() -> None:
    given = {"n": 3, "do_sample": True, "details": True, "decoder_input_details": True}
    details = answer_of(with_parameters(**given), [-3.0, -1.0, -2.0])["details"]
    assert len(details["prefill"]) == 2
    assert [other.keys() & {"prefill", "inputs"} for other in details["best_of_sequences"]] == [
        set(),
        set(),
    ]


def test_top_tokens() -> None:
    parsed = with_parameters(details=True, top_n_tokens=1)
    assert parsed.request.top_logprobs == 1
    top = {"id": 2, "text": "<eos>", "log_prob": -0.5, "special_token": True}
    assert answer_of(parsed)["details"]["top_tokens"] == [[top]]
    assert not with_parameters(top_n_tokens=3).request.top_logprobs
    streamed = with_parameters(top_n_tokens=1, stream=True)
    delta = Delta("r", "t", (Token(7, "t", -1.0, False, (Token(2, "<eos>", -0.5, True),)),))
    assert b"top_tokens" not in streamed.formatter.feed(delta)
    last = Delta("r", "", (), FinishReason.TIME, None, 2, 1)
    assert json.loads(streamed.formatter.feed(last))["details"]["top_tokens"] == [[top]]


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ({"n": 3}, ["t1", "t2", "t0"]),
        ({"best_of": 3}, ["t1", "t2", "t0"]),
        ({"n": 2, "best_of": 3}, ["t1", "t2"]),
        ({"n": 1, "best_of": 3}, ["t1"]),
    ],
)
def test_the_best_of_several_sequences(given: dict[str, int], texts: list[str]) -> None:
    parsed = with_parameters(do_sample=True, seed=2**64 - 1, **given)
    assert len({one.sampling.seed for one in parsed.requests}) == 3
    assert len({one.request_id for one in parsed.requests}) == 3
    assert all(one.logprobs and one.prompt_ids == [1, 5] for one in parsed.requests)
    body = answer_of(parsed, [-3.0, -1.0, -2.0])
    details = body["details"]
    others = details.get("best_of_sequences", [])
    assert [body["generated_text"], *(one["generated_text"] for one in others)] == texts
    tokens = [details["tokens"], *(one["tokens"] for one in others)]
    assert [[token["text"]] for [token] in tokens] == [[text] for text in texts]
    assert details["inputs"] == "<5>"


def test_several_sequences_of_several_prompts() -> None:
    given = {"n": 2, "do_sample": True, "seed": 5}
    parsed = parse({"inputs": ["<5>", "<6>"], "parameters": given})
    assert [one.prompt_ids[-1] for one in parsed.requests] == [5, 5, 6, 6]
    first, second = answer_of(parsed, [-1.0, -2.0, -4.0, -3.0])
    assert (first["generated_text"], second["generated_text"]) == ("t0", "t3")
    with pytest.raises(RequestError, match="130 sequences"):
        parse({"inputs": ["<5>"] * 65, "parameters": given})


def text_plain(body: bytes, content_type: str = "text/plain", **context: Any) -> ParsedRequest:
    return parse(body, headers={"content-type": content_type}, **context)


@pytest.mark.parametrize("content_type", ["text/plain", "Text/Plain; charset=utf-8"])
def test_a_body_of_text_is_the_prompt(content_type: str) -> None:
    parsed = text_plain(b'<5>{"inputs": "<6>"}', content_type)
    assert parsed.request.prompt_ids == TOKENIZER.encode('<5>{"inputs": "<6>"}')
    assert parsed.request.max_new_tokens == 30
    assert json.loads(feed(parsed, deltas())[-1]) == {"generated_text": "one é"}
    assert text_plain("[{,:é".encode() * 100_000).request.prompt_ids
    streamed = text_plain(b"<5>", output_formatter="sse")
    assert streamed.formatter.content_type == "text/event-stream"


@pytest.mark.parametrize(
    ("body", "context", "says"),
    [
        (b"", {}, "empty"),
        (b"a secret \xff", {}, "not UTF-8: invalid start byte at byte 9"),
        (b"a" * 21, {"max_body_bytes": 20}, "larger than 20 bytes"),
        (b"a" * 21, {"max_prompt_chars": 20}, "21 characters"),
    ],
)
def test_bad_bodies_of_text(body: bytes, context: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        text_plain(body, **context)
    assert caught.value.__cause__ is caught.value.__context__ is None


@pytest.mark.parametrize(
    "content_type", ["", "application/json; charset=utf-8", "application/x-www-form-urlencoded"]
)
def test_every_other_type_is_read_as_json(content_type: str) -> None:
    assert text_plain(b'{"inputs": "<5>"}', content_type).request.prompt_ids == [1, 5]
    with pytest.raises(RequestError, match="not valid JSON") as caught:
        text_plain(b"inputs\n<5>", content_type)
    named = "expected application/json or text/plain" in str(caught.value)
    assert named == ("urlencoded" in content_type)


def test_a_list_of_prompts_is_answered_by_a_list_in_its_order() -> None:
    given = {"max_new_tokens": 7, "seed": 3, "details": True, "return_full_text": True}
    parsed = parse({"inputs": ["<5>", "<6>", "<7>"], "parameters": given}, client_id="mine")
    assert [one.prompt_ids for one in parsed.requests] == [[1, 5], [1, 6], [1, 7]]
    ids = [one.request_id for one in parsed.requests]
    assert (len(set(ids)), ids[0]) == (3, "r")
    assert {one.client_id for one in parsed.requests} == {"mine"}
    assert {(one.max_new_tokens, one.sampling.seed) for one in parsed.requests} == {(7, 3)}
    assert not parsed.stream
    assert parsed.formatter.content_type == "application/json"
    parts = [
        parsed.formatter.feed(delta._replace(request_id=ids[i]))
        for i in (2, 0, 1)
        for delta in deltas()
    ]
    assert [bool(part) for part in parts] == [False] * 8 + [True]
    body = json.loads(parts[-1])
    assert [one["generated_text"] for one in body] == ["<5>one é", "<6>one é", "<7>one é"]
    assert [one["details"]["inputs"] for one in body] == ["<5>", "<6>", "<7>"]
    assert [one["details"]["generated_tokens"] for one in body] == [4, 4, 4]
    assert [len(one["details"]["tokens"]) for one in body] == [4, 4, 4]


def test_a_list_of_one_is_answered_by_a_list() -> None:
    parsed = parse({"inputs": ["<5>"]})
    assert json.loads(feed(parsed, deltas())[-1]) == [{"generated_text": "one é"}]


def test_an_error_of_one_of_a_list_is_the_answer() -> None:
    parsed = parse({"inputs": ["<5>", "<6>"]})
    failed = Delta("r", "", (), FinishReason.ERROR, StepError("the device failed"))
    assert json.loads(parsed.formatter.feed(failed))["type"] == "step_error"


def test_a_list_is_bounded_and_its_prompts_are_named() -> None:
    assert len(parse({"inputs": ["<5>"] * 128}).requests) == 128
    with pytest.raises(RequestError, match="has 129 prompts; expected 1 to 128"):
        parse({"inputs": ["<5>"] * 129})
    with pytest.raises(PromptTooLongError, match="prompt 2 of 2 has 11 characters"):
        parse({"inputs": ["a", "a" * 11]}, max_prompt_chars=10)
    for formatter in ("jsonlines", "sse"):
        with pytest.raises(UnsupportedParameterError, match=r"option\.output_formatter"):
            parse({"inputs": ["<5>"]}, output_formatter=formatter)
    assert parse({"inputs": ["<5>"], "stream": True}, output_formatter="json").requests


def test_a_text_never_enters_a_message() -> None:
    with pytest.raises(RequestError) as caught:
        with_parameters(stop=[{"secret": "prompt"}], details="secret")
    assert "secret" not in str(caught.value)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
        max_leaves=5,
    ),
    st.sampled_from(
        [
            "inputs",
            "parameters",
            "stream",
            "temperature",
            "stop",
            "seed",
            "max_new_tokens",
            "details",
        ]
    ),
)
def test_any_json_is_a_request_or_a_request_error(value: Any, name: str) -> None:
    payload: dict[str, Any] = {"inputs": "x", "parameters": {}}
    (payload if name in {"inputs", "parameters", "stream"} else payload["parameters"])[name] = value
    with contextlib.suppress(RequestError):
        parse(payload)


def feed(parsed: ParsedRequest, parts: list[Delta]) -> list[bytes]:
    return [parsed.formatter.feed(delta) for delta in parts]


def test_json_answers_at_the_end() -> None:
    assert feed(parse({"inputs": "<5>"}), deltas()) == [
        b"",
        b"",
        '{"generated_text":"one é"}'.encode(),
    ]


def test_json_with_details_and_full_text() -> None:
    parsed = with_parameters(details=True, return_full_text=True)
    body = json.loads(feed(parsed, deltas(FinishReason.EOS))[-1])
    assert body == {
        "generated_text": "<5>one é",
        "details": {
            "finish_reason": "eos_token",
            "generated_tokens": 4,
            "inputs": "<5>",
            "tokens": [
                {"id": 7, "text": "one", "log_prob": -0.5},
                {"id": 8, "text": "", "log_prob": -0.25},
                {"id": 9, "text": " é", "log_prob": -1.0},
                {"id": 2, "text": "", "log_prob": -2.0, "special_token": True},
            ],
        },
    }


def test_jsonlines_one_line_a_token() -> None:
    parsed = parse({"inputs": "<5>", "stream": True})
    assert parsed.stream
    assert parsed.formatter.content_type == "application/jsonlines"
    parts = feed(parsed, deltas())
    assert [part.count(b"\n") for part in parts] == [1, 1, 2]
    lines = [json.loads(line) for line in b"".join(parts).splitlines()]
    assert "".join(line["token"]["text"] for line in lines) == "one é"
    assert [line.get("generated_text") for line in lines] == [None, None, None, "one é"]
    assert all("details" not in line for line in lines[:-1])


@pytest.mark.parametrize("parameters", [{}, {"details": False}, {"details": True}])
def test_jsonlines_details_come_last_without_tokens(parameters: dict[str, Any]) -> None:
    parsed = parse({"inputs": "<5>", "parameters": parameters, "stream": True})
    lines = b"".join(feed(parsed, deltas(FinishReason.STOP))).splitlines()
    details = json.loads(lines[-1])["details"]
    assert details == {"finish_reason": "stop_sequence", "generated_tokens": 4, "inputs": "<5>"}


@pytest.mark.parametrize(
    ("stream", "option", "accept", "content_type"),
    [
        (False, None, "text/event-stream", "application/json"),
        (True, None, "*/*", "application/jsonlines"),
        (True, None, "text/event-stream", "text/event-stream"),
        (False, "sse", "", "text/event-stream"),
        (False, "jsonlines", "", "application/jsonlines"),
        (True, "json", "", "application/json"),
    ],
)
def test_who_chooses_the_format(
    stream: bool, option: str | None, accept: str, content_type: str
) -> None:
    parsed = parse(
        {"inputs": "<5>", "stream": stream}, output_formatter=option, headers={"accept": accept}
    )
    assert parsed.formatter.content_type == content_type
    assert parsed.stream == (content_type != "application/json")


def test_events_are_framed() -> None:
    parts = feed(parse({"inputs": "<5>"}, output_formatter="sse"), deltas())
    for event in b"".join(parts).removesuffix(b"\n\n").split(b"\n\n"):
        assert event.startswith(b"data: ")
        json.loads(event.removeprefix(b"data: "))


def test_an_error_is_told_in_the_formats_own_shape() -> None:
    failed = Delta("r", "", (), FinishReason.ERROR, StepError("the device failed"))
    whole = json.loads(parse({"inputs": "<5>"}).formatter.feed(failed))
    assert whole == {"code": 424, "error": "the device failed", "type": "step_error"}
    streaming = parse({"inputs": "<5>", "stream": True})
    first = deltas()[0]
    lines = b"".join(feed(streaming, [first, failed])).splitlines()
    last = json.loads(lines[-1])
    assert (last["code"], last["error"], last["generated_text"]) == (
        424,
        "the device failed",
        "one",
    )
    assert last["details"]["finish_reason"] == "error"


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    class Refusing:
        def encode(self, text: str, **_: object) -> list[int]:
            pytest.fail("tokenised")

    context = ParseContext(tokenizer=Refusing(), request_id="r", max_prompt_chars=10)  # type: ignore[arg-type]
    with pytest.raises(PromptTooLongError, match="11 characters"):
        parse_body(b'{"inputs": "12345678901"}', context)


def test_a_body_that_no_prompt_needs_is_refused_before_it_is_parsed() -> None:
    limits = {"max_prompt_chars": 10}
    longest = 6 * 10 + BESIDE_PROMPT_BYTES
    with pytest.raises(BodyTooLargeError, match=f"{longest + 1} bytes.*more than {longest}"):
        parse(b"no JSON".ljust(longest + 1), **limits)
    with pytest.raises(RequestError, match="not valid JSON"):
        parse(b"no JSON".ljust(longest), **limits)


def test_a_prompt_of_escapes_alone_fits_into_the_largest_body() -> None:
    escaped = "\\u0041" * 10
    stops = json.dumps(["\x01" * 1000] * 64)
    body = f'{{"inputs": "{escaped}", "parameters": {{"stop": {stops}}}}}'.encode()
    assert parse(body, max_prompt_chars=10).request.prompt_ids


def test_stop_strings_are_bounded() -> None:
    with pytest.raises(
        UnsupportedParameterError, match="'stop' has 65 values; expected at most 64"
    ):
        with_parameters(stop=["a"] * 65)
    with pytest.raises(UnsupportedParameterError, match="80 stop strings; expected at most 64"):
        with_parameters(stop=["a"] * 40, stop_sequences=["a"] * 40)
    with pytest.raises(RequestError, match="at most 1000 characters"):
        with_parameters(stop="a" * 1001)


@pytest.mark.parametrize("name", ["stop", "stop_sequences", "stop_token_ids"])
def test_lists_are_bounded_before_their_elements_are_looked_at(name: str) -> None:
    """pydantic makes an error for each wrong element, with the GIL."""
    with pytest.raises(
        UnsupportedParameterError, match=f"'{name}' has 65 values; expected at most 64"
    ):
        with_parameters(**{name: [None] * 65})


def test_as_many_stop_token_ids_as_are_allowed() -> None:
    assert len(with_parameters(stop_token_ids=list(range(64))).request.stop_token_ids) == 64


MUCH = 300_000


@pytest.mark.parametrize(
    "shape",
    [
        b'{"inputs": [' + b"{}," * MUCH + b"{}]}",
        b'{"inputs": [' + b"[]," * MUCH + b"[]]}",
        b'{"inputs": [' + b'"",' * MUCH + b'""]}',
        b'{"inputs": [' + b"1," * MUCH + b"1]}",
        b"{" + b'"a":1,' * MUCH + b'"a":1}',
        b"{" + b'"a":1,' * 40_000 + b'"a":1}',
        b'{"inputs": ' + b"[" * MUCH + b"]" * MUCH + b"}",
        rb'{"a\\": [' + b"{}," * MUCH + b"{}]}",
        rb'{"a\\\"": [' + b"{}," * MUCH + b"{}]}",
        b"[" * MUCH,
    ],
)
def test_bodies_of_many_parts_are_refused_before_they_are_parsed(
    shape: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("orjson.loads")
    with pytest.raises(RequestError, match="expected at most 32768 and 262144"):
        parse(shape)


@pytest.mark.parametrize(
    "text", ["[{,:" * 100_000, '"[{,:\\' * 100_000, '\\"\\\\{' * 100_000, '"{},' * 100_000]
)
def test_text_may_hold_any_number_of_brackets_and_commas(text: str) -> None:
    parsed = parse({"inputs": "<5>" + text})
    assert len(parsed.request.prompt_ids) == len(text) + 2


def test_the_largest_bodies_that_are_planned_are_within_the_bounds() -> None:
    ids = list(range(131_072))
    with pytest.raises(RequestError, match="inputs has 131072 prompts"):
        parse({"inputs": ids})
    content = [{"type": "text", "text": "hello, {you}"}]
    chat = [{"role": "user", "content": content}] * 4000
    with pytest.raises(RequestError, match="inputs has 4000 prompts"):
        parse({"inputs": chat})


def test_deep_bodies_are_refused() -> None:
    with pytest.raises(RequestError, match="not valid JSON"):
        parse(b'{"inputs": ' + b"[" * 2000 + b"]" * 2000 + b"}")
    for opens, closes in ((b"[", b"]"), (b'{"a":', b"}")):
        with pytest.raises(RequestError, match="expected at most 250"):
            parse(b'{"inputs": ' + opens * 250 + b"1" + closes * 250 + b"}")
        with pytest.raises(RequestError, match="inputs"):  # which is no text
            parse(b'{"inputs": ' + opens * 249 + b"1" + closes * 249 + b"}")


def test_a_body_above_the_limit_is_refused() -> None:
    with pytest.raises(BodyTooLargeError, match=r"larger than 20 bytes.*option\.max_body_bytes"):
        parse({"inputs": "a" * 20}, max_body_bytes=20)


def test_names_in_messages_are_cut() -> None:
    with pytest.raises(RequestError) as caught:
        with_parameters(**{"x" * 100_000: 1})
    assert len(str(caught.value)) < 1000
    with pytest.raises(RequestError) as caught:
        parse({"y" * 100_000: 1})
    assert len(str(caught.value)) < 1000


def test_text_where_a_number_belongs_is_not_shown() -> None:
    with pytest.raises(RequestError, match="temperature is a string") as caught:
        with_parameters(temperature="a secret prompt")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("", "'stop' is an empty string; expected a non-empty string"),
        (["a", 5], r"'stop\[1\]' is 5; expected"),
        (["a", ""], r"'stop\[1\]' is an empty string"),
    ],
)
def test_the_bad_one_of_several_stop_strings_is_named(stop: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        with_parameters(stop=stop)


def test_a_stream_wants_log_probabilities_only_where_there_are_any() -> None:
    payload = {"inputs": "<5>", "stream": True}
    assert parse(payload).request.logprobs
    assert not parse(payload, has_logprobs=False).request.logprobs
    asked = {**payload, "parameters": {"details": True}}
    assert parse(asked, has_logprobs=False).request.logprobs
