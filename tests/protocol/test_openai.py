"""OpenAI's bodies in, OpenAI's bytes out."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from djl_python_neuronx.backends.base import Want
from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.engine import limits
from djl_python_neuronx.engine.detokenizer import Delta, TextStream, Token
from djl_python_neuronx.errors import (
    PROMPT,
    DeviceMemoryError,
    FormatterError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
    StepError,
    UnauthorizedError,
    UnknownModelError,
    UnsupportedParameterError,
)
from djl_python_neuronx.protocol import answer_error, parameters, parse_body
from djl_python_neuronx.protocol.base import (
    MAX_SCORED,
    MAX_SEQUENCES,
    ParseContext,
    ParsedRequest,
)
from djl_python_neuronx.protocol.neutral import NEUTRAL, WITHOUT_EFFECT
from djl_python_neuronx.protocol.openai_chat import ChatParameters
from djl_python_neuronx.protocol.openai_completions import CompletionParameters
from djl_python_neuronx.protocol.parameters import default_parameters
from djl_python_neuronx.sampling import SamplingParams
from djl_python_neuronx.types import (
    FinishReason,
    GenerationRequest,
    Rendering,
    TokenOutput,
)
from tests.doubles.toy_backend import TOY_SPEC
from tests.doubles.toy_tokenizer import TOKENIZER, ToyTokenizer
from tests.protocol.parsing import SAMPLED, SAMPLING, NotingTokenizer
from tests.protocol.wire_schemas import SCHEMAS

USER = {"role": "user", "content": "<5><6>"}
OPTIONS = ServingOptions(model_name="toy,other,toy")


def parse(payload: Mapping[str, Any], **context: Any) -> ParsedRequest:
    facts = {"tokenizer": TOKENIZER, "options": OPTIONS, "vocab_size": 300}
    given = {**facts, "path": path_of(payload), **context}
    return parse_body(json.dumps(payload).encode(), ParseContext(request_id="r", **given))


def path_of(payload: Mapping[str, Any]) -> str:
    return "/v1/completions" if "prompt" in payload else "/v1/chat/completions"


def chat(*messages: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages) or [USER], **more}


def complete(prompt: object = "<5><6>", **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, **more}


BOTH = pytest.mark.parametrize("body", [chat, complete])


def token(token_id: int, top: Sequence[int] = (), logprob: float = -0.5) -> Token:
    text = TOKENIZER.token_bytes(token_id).decode()
    others = tuple(Token(one, f"<{one}>", -1.0, False) for one in top)
    special = token_id in TOKENIZER.special_ids
    return Token(token_id, "" if special else text, logprob, special, others)


def deltas(
    request_id: str,
    *ids: int,
    reason: FinishReason = FinishReason.LENGTH,
    top: Sequence[int] = (),
    logprob: float = -0.5,
) -> list[Delta]:
    """A delta for each token; the last one ends the sequence."""
    tokens = [token(one, top, logprob) for one in ids]
    return [
        Delta(
            request_id,
            one.text,
            (one,),
            reason if i == len(tokens) else None,
            num_generated_tokens=i,
        )
        for i, one in enumerate(tokens, 1)
    ]


def answer(parsed: ParsedRequest, *parts: Sequence[Delta]) -> bytes:
    """The formatter's answer to the deltas of each sequence."""
    return b"".join(parsed.formatter.feed(delta) for part in parts for delta in part)


def events(content: bytes) -> list[Any]:
    """The chunks of a whole stream."""
    *chunks, done, rest = content.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(chunk.removeprefix(b"data: ")) for chunk in chunks]


def test_several_sequences_of_each_prompt() -> None:
    context = ParseContext(tokenizer=TOKENIZER, request_id="r", vocab_size=300)
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
    with pytest.raises(RequestError, match=r"150 sequences \(prompts: 3, n: 50\)"):
        context.requests(common, ["<5>"] * 3, count=50)
    listing = dataclasses.replace(common, top_logprobs=20)
    assert len(context.requests(listing, ["<5>"], count=12)) == 12
    with pytest.raises(
        RequestError, match=r"13 sequences with 20 .* list 273 tokens.* at most 256"
    ):
        context.requests(listing, ["<5>"], count=13)


def test_a_long_chat_is_refused_before_it_is_rendered() -> None:
    context = ParseContext(tokenizer=TOKENIZER, request_id="r", max_prompt_chars=7)
    message = {"role": "user", "content": "1234"}
    assert len(context.encode_chat([message])) == 5
    with pytest.raises(PromptTooLongError, match="the conversation has 8 characters"):
        context.encode_chat([message, message])


def test_what_a_missing_parameter_means() -> None:
    for body, most in ((chat, None), (complete, 16)):
        request = parse(body()).request
        assert request.sampling == SamplingParams(temperature=1.0)
        assert request.max_new_tokens == most
        assert (request.stop_strings, request.stop_token_ids) == ((), frozenset())
        assert (request.ignore_eos, request.logprobs, request.top_logprobs) == (False, False, 0)
        assert not parse(body()).stream


@BOTH
def test_every_parameter_arrives(body: Any) -> None:
    request = parse(
        body(
            **SAMPLING,
            max_tokens=3,
            stop="a",
            stop_token_ids=[4, 5],
            max_time=2.5,
            include_stop_str_in_output=True,
            ignore_eos=True,
            truncate_prompt_tokens=2,
        )
    ).request
    assert vars(request.sampling) == SAMPLED
    assert (request.max_new_tokens, request.max_seconds) == (3, 2.5)
    assert (request.stop_strings, request.stop_token_ids) == (("a",), {4, 5})
    assert request.include_stop
    assert request.ignore_eos
    assert request.prompt_ids == [5, 6]


def test_a_bad_word_has_the_tokens_of_its_two_places() -> None:
    """As in vLLM: behind a space too, if the word has as many tokens there and another first one."""
    texts = {
        "good": [10],
        " good": [11],
        "un": [12, 13],
        " un": [14, 13],
        "same": [15],
        " same": [15, 16],
        "as": [17, 18],
        " as": [17, 19],
    }

    class WordTokenizer(ToyTokenizer):
        def encode(self, text: str, *, special: bool = True) -> list[int]:
            return super().encode(text) if special else texts[text]

    body = complete(bad_words=["good", "  un", "same", "as"], allowed_token_ids=[5])
    words = parse(body, tokenizer=WordTokenizer()).request.sampling.bad_words
    assert words == ((10,), (11,), (12, 13), (14, 13), (15,), (17, 18))


@BOTH
def test_parameters_with_two_meanings(body: Any) -> None:
    assert parse(body(stop=["a", "b"])).request.stop_strings == ("a", "b")
    for seed in (-1, -(2**63)):
        assert parse(body(seed=seed)).request.sampling.seed == seed + 2**64
    for priority in (-(2**31), 2**31 - 1):
        options = ServingOptions(model_name="toy", scheduling_policy="priority")
        assert parse(body(priority=priority), options=options).request.priority == priority
    assert parse(body(temperature=0)).request.sampling == SamplingParams()
    assert parse(body(temperature=2, top_k=-1)).request.sampling == SamplingParams(temperature=2)


def test_errors_of_lengths_have_the_names_that_were_sent() -> None:
    least = {"inputs": "<5>", "parameters": {"min_tokens": 40}}  # more than the default
    plain = {"prompt": "<5>", "max_tokens": 5, "min_tokens": 9}
    bedrock = {"prompt": "<5>", "max_gen_len": 5, "min_tokens": 9}
    for found, names in (
        (parse(complete(max_tokens=5, min_tokens=9)), ("min_tokens is 9", "max_tokens is 5")),
        (parse(chat(max_tokens=5, min_new_tokens=9)), ("min_new_tokens is 9", "max_tokens is 5")),
        (
            parse(chat(max_completion_tokens=5, min_tokens=9)),
            ("min_tokens is 9", "max_completion_tokens is 5"),
        ),
        (parse(least, path="/invocations"), ("min_tokens is 40", "max_new_tokens is 30")),
        (parse(plain, path="/generate"), ("min_tokens is 9", "max_tokens is 5")),
        (
            parse(bedrock, path="", options=ServingOptions(bedrock_compat=True)),
            ("min_tokens is 9", "max_gen_len is 5"),
        ),
    ):
        with pytest.raises(RequestError, match="^{}, {}; lower".format(*names)) as caught:
            limits.check(found.request, TOY_SPEC)
        assert caught.value.param == names[0].split()[0]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, [7, 8, 9]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [1, 5, 6]),
        # As many as the longest bucket holds; fewer if the answer needs the positions.
        ({"truncate_prompt_tokens": -1}, [6, 7, 8, 9]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 7}, [7, 8, 9]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 70}, [9]),
        ({}, [1, 5, 6, 7, 8, 9]),
    ],
)
@BOTH
def test_a_prompt_is_truncated_where_the_request_says_so(body: Any, fields: Any, kept: Any) -> None:
    text = "<5><6><7><8><9>"
    prompt = {"role": "user", "content": text} if body is chat else text
    fields = {"max_tokens": 1, **fields}
    found = parse(body(prompt, **fields), longest_prompt=4, max_model_len=10)
    assert found.request.prompt_ids == kept


def test_a_prompt_without_special_tokens() -> None:
    assert parse(complete(add_special_tokens=False)).request.prompt_ids == [5, 6]
    with pytest.raises(RequestError, match="'truncate_prompt_tokens' is 0; expected an integer"):
        parse(complete(truncate_prompt_tokens=0))


def test_max_completion_tokens_counts_before_max_tokens() -> None:
    assert parse(chat(max_completion_tokens=3, max_tokens=5)).request.max_new_tokens == 3


def reference(name: str) -> list[str]:
    """Fields of a request, or of all messages, in the installed `openai` package."""
    openai = pytest.importorskip("openai.types", reason="needs the `dev` extra")
    if name == "messages":
        import openai.types.chat as messages

        kinds = [
            getattr(messages, kind)
            for kind in dir(messages)
            if kind.startswith("ChatCompletion") and kind.endswith("MessageParam")
        ]
        return [field for kind in kinds for field in getattr(kind, "__annotations__", ())]
    types = openai.chat if name == "chat" else openai
    params = types.completion_create_params.CompletionCreateParamsBase
    return [*params.__annotations__, "stream"]


@pytest.mark.parametrize(
    ("name", "model"), [("chat", ChatParameters), ("completion", CompletionParameters)]
)
def test_every_field_of_the_reference_is_known(name: str, model: Any) -> None:
    """A field without effect is accepted, one that the engine lacks is refused by name: see test_other_servers.py."""
    fields = reference(name)
    assert len(fields) > 10
    assert set(fields) <= {*model.model_fields, *NEUTRAL, *WITHOUT_EFFECT}


def test_what_libraries_put_into_messages_is_ignored() -> None:
    """Whatever messages of the installed `openai` have, and what other libraries add: the template gets the same."""
    tokenizer = NotingTokenizer()
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    plain = [
        {"role": "assistant", "content": "<7>", "tool_calls": [call]},
        {"role": "user", "content": "<5>"},
    ]
    parse(chat(*plain), tokenizer=tokenizer)
    expected = tokenizer.messages
    surplus = {
        "provider_specific_fields": {"refusal": None},
        "reasoning_details": [{"text": "x"}],
        "thinking_blocks": [{"type": "thinking", "thinking": "x"}],
        "prefix": True,
        "id": "msg_1",
        "weight": 1,
        "cache_control": {"type": "ephemeral"},
        "timestamp": 1764000000,
        "parts": [{"type": "text", "text": "<7>"}],
        "annotations": [{"type": "url_citation"}],
        "audio": None,
        "images": [],
        "function_call": None,
        "refusal": None,
    }
    surplus |= {name: None for name in reference("messages") if name not in plain[0]}
    more = {"index": 0, "type": "function", "cache_control": {}}
    calls = [{**call, **more, "function": {**call["function"], "parsed_arguments": {}}}]
    part = {
        "type": "text",
        "cache_control": {},
        "annotations": [],
        "id": "p",
        "prompt_cache_breakpoint": True,
    }
    for name, value in [*surplus.items(), ("content", None)]:
        messages = [{**message, name: value, "content": message["content"]} for message in plain]
        parse(chat(*messages), tokenizer=tokenizer)
        assert tokenizer.messages == expected, name
    parse(chat({**plain[0], "tool_calls": calls}, plain[1]), tokenizer=tokenizer)
    assert tokenizer.messages == expected
    ollamas = [{"function": {"name": "f", "arguments": {}}}]  # an object, and no id
    parse(chat({**plain[0], "tool_calls": ollamas}, plain[1]), tokenizer=tokenizer)
    assert tokenizer.messages[0]["tool_calls"] == [{"type": "function", **ollamas[0]}]
    parse(
        chat(
            *[{**message, "content": [{**part, "text": message["content"]}]} for message in plain]
        ),
        tokenizer=tokenizer,
    )
    assert [message["content"] for message in tokenizer.messages] == [
        [{"type": "text", "text": text}] for text in ("<7>", "<5>")
    ]


def test_reasoning_and_refusals_reach_the_template() -> None:
    tokenizer = NotingTokenizer()
    thought = {"reasoning_content": "hm", "reasoning": "hm"}
    for given, message in (
        (
            {
                "content": [
                    {"type": "input_text", "text": "a"},
                    {"type": "output_text", "text": "b"},
                ]
            },
            {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ),
        ({"content": "<7>", "reasoning_content": "hm"}, {"content": "<7>", **thought}),
        ({"content": "<7>", "reasoning": "hm"}, {"content": "<7>", **thought}),
        ({"content": "<7>", "reasoning": {"effort": "low"}}, {"content": "<7>"}),
        ({"content": None, "refusal": "No."}, {"content": "No."}),
        (
            {"content": [{"type": "refusal", "refusal": "No."}]},
            {"content": [{"type": "text", "text": "No."}]},
        ),
    ):
        parse(chat({"role": "assistant", **given}), tokenizer=tokenizer)
        assert tokenizer.messages == [{"role": "assistant", **message}]


@pytest.mark.parametrize("name", ["images", "audio", "videos", "files", "function_call"])
def test_a_message_loses_nothing_that_matters(name: str) -> None:
    with pytest.raises(UnsupportedParameterError, match=r"'messages\[0\]\.\w+' is not supported"):
        parse(chat({**USER, name: [{"url": "data:image/png;base64,AA=="}]}))


def test_unknown_fields_are_ignored_and_logged_once_if_an_option_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameters, "_ignored", set())
    options = ServingOptions(model_name="toy", unknown_parameters="warn")
    body = chat(colour="x" * 500, stream=True, stream_options={"nested_colour": 1})
    body["c" * 500] = 1
    for _ in range(2):
        assert parse(body, options=options).requests
    parse(complete(colour=1), options=options)
    for path in ("/generate", "/invocations"):
        generate = {"inputs": "<5>", "colour": 1, "parameters": {"colour": 1}}
        assert parse(generate, options=options, path=path).request.max_new_tokens in {None, 30}
        for known in ({"max_new_tokens": 5}, {"grammar": {"type": "json"}}):
            with pytest.raises(UnsupportedParameterError, match=next(iter(known))):
                parse({**generate, **known}, options=options, path=path)
    names = [record.args[0] for record in caplog.records if "parameter_ignored" in record.msg]
    assert sorted(map(len, names)) == [len("'colour'"), len("'nested_colour'"), 100]
    with pytest.raises(UnsupportedParameterError, match="'functions' is not supported"):
        parse(chat(functions=[{"name": "f"}]), options=options)
    with pytest.raises(RequestError, match=r"messages\[0\]\.role"):
        parse(chat({"role": "bot", "content": "Hi"}), options=options)


def test_the_log_has_a_bounded_number_of_ignored_fields(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameters, "_ignored", set())
    options = ServingOptions(model_name="toy", unknown_parameters="warn")
    parse(chat(**{f"surplus{i}": i for i in range(1000)}), options=options)
    assert len([one for one in caplog.records if "parameter_ignored" in one.msg]) == 100


@BOTH
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"typical_p": 0}, "'typical_p' is 0; expected a number above 0, up to 1"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5; expected a number from -2 to 2"),
        ({"frequency_penalty": "1"}, "frequency_penalty is a string"),
        ({"logit_bias": {"a": 1}}, r"logit_bias has 'a': 1; expected an object of"),
        ({"logit_bias": {"5": None}}, "logit_bias has 5: null"),
        ({"logit_bias": {"4": 1, "-1": 1}}, "logit_bias has '-1': 1; expected"),
        ({"logit_bias": [5]}, "logit_bias has 5; expected an object"),
        ({"allowed_token_ids": [7, -1]}, "allowed_token_ids has -1; expected a list of 1 to 1024"),
        ({"bad_words_ids": [[7], [8, -1]]}, "bad_words_ids has a list with -1; expected a list of"),
        ({"bad_words_ids": [[7], []]}, "bad_words_ids has a list of 0; expected a list of"),
        ({"bad_words_ids": [["secret"]]}, "bad_words_ids has a list with a string; expected"),
        ({"temperature": [1]}, "temperature has 1 values; expected a finite number"),
        (
            {"seed": -(2**63) - 1},
            r"seed is -9.*; expected .* from -2\*\*63 to 2\*\*64 - 1",
        ),
        ({"priority": -(2**31) - 1}, "'priority' is -2147483649; expected an integer of 32 bits"),
        ({"logit_bias": 3}, "logit_bias is 3; expected an object"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias has 1025 values"),
        ({"allowed_token_ids": []}, "allowed_token_ids has 0 values; expected a list of 1 to 1024"),
        ({"bad_words": [" "]}, "bad_words has a word without tokens"),
        ({"bad_words": ["x"] * 65}, "'bad_words' has 65 values; expected at most 64"),
        ({"bad_words": ["x" * 999, "y" * 26]}, "bad_words has 2 values; expected words of at most"),
        ({"bad_words_ids": [5]}, "bad_words_ids has 5; expected a list of lists"),
        ({"suppress_tokens": [5, "6"]}, "suppress_tokens has a string; expected"),
        ({"no_repeat_ngram_size": 65}, "no_repeat_ngram_size is 65; expected an integer from 0"),
        ({"min_tokens": -1}, "'min_tokens' is -1; expected an integer of at least 0"),
        ({"min_new_tokens": 2**31}, "min_new_tokens is 2147483648; expected an integer >= 0"),
    ],
)
def test_values_of_rules_that_are_refused(body: Any, fields: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        parse(body(**fields))
    assert caught.value.param == next(iter(fields))


@BOTH
def test_names_of_the_same_rule(body: Any) -> None:
    for fields in (
        {"min_tokens": 7},
        {"min_new_tokens": 7},
        {"min_tokens": 7, "min_new_tokens": 3},
    ):
        assert parse(body(**fields)).request.sampling.min_new_tokens == 7


def test_how_a_template_is_rendered() -> None:
    tokenizer = NotingTokenizer()
    options = ServingOptions(
        model_name="toy", chat_template_kwargs={"enable_thinking": True, "a": 1}
    )
    last = {"role": "assistant", "content": "<7>"}
    for more, expected in (
        ({}, ({"enable_thinking": True, "a": 1}, True, False)),
        (
            {"chat_template_kwargs": {"enable_thinking": False, "b": [{}]}},
            ({"enable_thinking": False, "a": 1, "b": [{}]}, True, False),
        ),
        ({"add_generation_prompt": False}, ({"enable_thinking": True, "a": 1}, False, False)),
        ({"continue_final_message": True}, ({"enable_thinking": True, "a": 1}, False, True)),
    ):
        for path in ("/v1/chat/completions", "/tokenize"):
            parse(chat(USER, last, **more), tokenizer=tokenizer, options=options, path=path)
            assert tokenizer.rendering == Rendering(*expected)
    for refused, param in (
        (chat(continue_final_message=True), "continue_final_message"),
        (chat({**last, "content": []}, continue_final_message=True), "continue_final_message"),
        (
            chat({**last, "content": [{"type": "text", "text": " "}]}, continue_final_message=True),
            "continue_final_message",
        ),
        (
            chat(last, continue_final_message=True, add_generation_prompt=True),
            "add_generation_prompt",
        ),
        (chat(chat_template_kwargs=[1]), "chat_template_kwargs"),
    ):
        with pytest.raises(RequestError) as caught:
            parse(refused)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("payload", "param", "says"),
    [
        ({}, "messages", "messages is missing"),
        (chat() | {"messages": []}, "messages", "is an empty list; expected a list of 1"),
        (chat() | {"messages": "Hi"}, "messages", "1 to 8192 messages"),
        (chat(5), "messages[0]", "an object"),
        (chat(*[USER] * 8193), "messages", "at most 8192"),
        (chat({"content": "Hi"}), "messages[0].role", "is missing"),
        (chat({"role": "bot", "content": "Hi"}), "messages[0].role", "'developer'"),
        (chat({"role": "user"}), "messages[0]", "only an assistant may leave out"),
        (chat({"role": "user", "content": 5}), "messages[0].content", "is 5"),
        (
            chat({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "file"}]}),
            "messages[0].content",
            "part 1 is 'file'",
        ),
        (chat({"role": "user", "content": ["a"]}), "messages[0].content", "part 0"),
        (chat({"role": "user", "content": [{"type": "text"}]}), "messages[0].content", "part 0"),
        (
            chat({"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]}),
            "messages[0].tool_calls[0].function",
            "is missing",
        ),
        (chat(logprobs=2), "logprobs", "true or false"),
        (chat(top_logprobs=2), "top_logprobs", "needs logprobs=true"),
        (chat(logprobs=True, top_logprobs=21), "top_logprobs", "from 0 to 20"),
        (chat(max_completion_tokens=0), "max_completion_tokens", "at least 1"),
        (chat(n=129), "n", "at most 128"),
        (chat(temperature=2.5), "temperature", "from 0 to 2"),
        (chat(temperature="hot"), "temperature", "a finite number"),
        (chat(seed="x"), "seed", "an integer"),
        (chat(temprature=1), "temprature", "did you mean 'temperature'?"),
        (chat(temprature=1), "temprature", "? Known: "),
        (chat(max_new_tokens=5), "max_new_tokens", "did you mean 'max_tokens'?"),
        (complete(max_length=5), "max_length", "did you mean 'max_tokens'?"),
        (chat(stop_sequences=["a"]), "stop_sequences", "did you mean 'stop'?"),
        (chat(truncate=5), "truncate", "did you mean 'truncate_prompt_tokens'?"),
        (chat(colour=1), "colour", "unknown parameter 'colour'; known: "),
        (chat(colour=1), "colour", "; or set option.unknown_parameters=warn"),
        (chat(stream_options={"include_usage": True}), "stream_options", "needs stream=true"),
        (
            chat(stream=True, stream_options={"include_usagee": True}),
            "stream_options.include_usagee",
            "unknown parameter 'stream_options.include_usagee'; leave it out",
        ),
        (
            chat(stream=True, stream_options={"include_usage": 1}),
            "stream_options.include_usage",
            "true or false",
        ),
        (chat(model=5), "model", "string"),
        (complete(None), "prompt", "prompt is missing"),
        (complete([]), "prompt", "expected a text"),
        (complete(["<5>", 5]), "prompt", "expected a text"),
        (complete(["<5>", [5]]), "prompt", "expected a text"),
        (complete({"a": 1}), "prompt", "expected a text"),
        (complete([5, "<5>"]), "prompt", "other values than integers"),
        (complete([5, True]), "prompt", "other values than integers"),
        (complete(["<5>"] * 65, n=2), "n", "at most 128"),
        (complete(best_of=129), "best_of", "(prompts: 1, best_of: 129); expected at most 128"),
        (complete(["<5>"] * 129), "prompt", "at most 128"),
        (complete([5, 999]), "prompt", "the token id 999"),
        (complete(max_gen_len=5), "max_gen_len", "option.bedrock_compat=true"),
        (complete(max_tokens=0), "max_tokens", "at least 1"),
        (complete(logprobs=6), "logprobs", "from 0 to 5"),
        (complete(logprobs=True), "logprobs", "from 0 to 5"),
        (complete(best_of=1, n=2), "best_of", "at least n"),
        (complete(best_of=2, stream=True), "best_of", "not streamed"),
        (complete(max_tokens=0), "max_tokens", "echo with logprobs, or prompt_logprobs"),
        (complete(max_tokens=0, echo=True), "max_tokens", "echo with logprobs"),
        (complete(max_tokens=-1, echo=True, logprobs=0), "max_tokens", "at least 0"),
        (chat(max_tokens=0, prompt_logprobs=0), "max_tokens", "at least 1"),
        (chat(prompt_logprobs=21), "prompt_logprobs", "from 0 to 20"),
        (complete(prompt_logprobs=0, stream=True), "prompt_logprobs", "not answered by a stream"),
    ],
)
def test_errors_name_the_field(payload: Any, param: str | None, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(payload)
    assert says in str(caught.value)
    status, body = answer_error(caught.value)
    assert (status, json.loads(body)["error"]["param"]) == (400, param)


def test_tools_that_are_switched_off_are_left_out() -> None:
    """OpenAI's API reference, tool_choice: with "none" the model calls no tool."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    parse(chat(tools=[tool], tool_choice="none"))
    parse(chat(functions=[tool["function"]], function_call="none"))
    for more in ({}, {"tool_choice": "auto"}, {"function_call": "none"}):
        with pytest.raises(UnsupportedParameterError, match="chat template lists none"):
            parse(chat(tools=[tool], **more))


@BOTH
def test_an_unknown_model(body: Any) -> None:
    with pytest.raises(UnknownModelError, match=r"'gpt'.* serves 'toy', 'other'$") as caught:
        parse(body(model="gpt"))
    assert (caught.value.status, caught.value.param) == (404, "model")
    for model, shown in ((None, "toy"), ("toy", "toy"), ("other", "other")):
        parsed = parse(body(model=model))
        assert json.loads(answer(parsed, deltas("r", 7)))["model"] == shown


def test_what_a_template_gets() -> None:
    tokenizer = NotingTokenizer()
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    empty = {"id": "b", "type": "function", "function": {"name": "g", "arguments": ""}}
    parse(
        chat(
            {"role": "system", "content": "<3>"},
            {"role": "developer", "content": [{"type": "text", "text": "a"}] * 2},
            {"role": "user", "content": "<5>", "name": "Ann"},
            {"role": "assistant", "content": None, "tool_calls": [call, empty], "refusal": None},
            {"role": "tool", "content": "<6>", "tool_call_id": "a"},
            {"role": "function", "content": "<6>", "name": "f"},
            {"role": "assistant", "content": "<7>", "annotations": [], "audio": None},
        ),
        tokenizer=tokenizer,
    )
    assert tokenizer.messages == [
        {"role": "system", "content": "<3>"},
        {"role": "developer", "content": [{"type": "text", "text": "a"}] * 2},
        {"role": "user", "content": "<5>", "name": "Ann"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call, {**empty, "function": {"name": "g", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "<6>", "tool_call_id": "a"},
        {"role": "function", "content": "<6>", "name": "f"},
        {"role": "assistant", "content": "<7>"},
    ]


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("<5>", [[1, 5]]),
        ([7, 8], [[7, 8]]),
        (["<5>", "<6><7>"], [[1, 5], [1, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_prompts_of_every_kind(prompt: Any, ids: list[list[int]]) -> None:
    assert [one.prompt_ids for one in parse(complete(prompt)).requests] == ids
    repeated = parse(complete(prompt, n=2)).requests
    assert [one.prompt_ids for one in repeated] == [one for one in ids for _ in range(2)]


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        (FinishReason.LENGTH, "length"),
        (FinishReason.TIME, "length"),
        (FinishReason.EOS, "stop"),
        (FinishReason.STOP, "stop"),
    ],
)
def test_finish_reasons(reason: FinishReason, word: str) -> None:
    for body in (chat, complete):
        whole = json.loads(answer(parse(body()), deltas("r", 7, reason=reason)))
        assert whole["choices"][0]["finish_reason"] == word
        chunks = events(answer(parse(body(stream=True)), deltas("r", 7, reason=reason)))
        assert chunks[-1]["choices"][0]["finish_reason"] == word


def test_a_whole_chat() -> None:
    content = answer(parse(chat(n=2)), deltas("r.1", 9), deltas("r", 7, 8))
    found = SCHEMAS["chat"](content)
    assert found.texts == ["<7><8>", "<9>"]
    assert (found.num_prompt_tokens, found.num_tokens) == (3, [3])


def test_a_whole_completion() -> None:
    content = answer(parse(complete(["<5>", "<6><7>"])), deltas("r.1", 9), deltas("r", 7, 8))
    found = SCHEMAS["completion"](content)
    assert found.texts == ["<7><8>", "<9>"]
    assert (found.num_prompt_tokens, found.num_tokens) == (5, [3])


def test_nothing_is_sent_before_the_end_of_a_whole_answer() -> None:
    parsed = parse(chat(n=2))
    first, *others = deltas("r", 7, 8) + deltas("r.1", 9)
    assert parsed.formatter.feed(first) == b""
    assert [parsed.formatter.feed(one) == b"" for one in others] == [True, False]


@BOTH
def test_a_stream(body: Any) -> None:
    kind = "chat" if body is chat else "completion"
    options = {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
    parsed = parse(body(**options))
    content = answer(parsed, deltas("r", 7), deltas("r.1", 8, 9, 2, reason=FinishReason.EOS))
    assert parsed.formatter.content_type == "text/event-stream"
    found = SCHEMAS[f"{kind}_sse_usage"](content)
    assert found.texts == ["<7>", "<8><9>"]
    assert found.finish_reasons == ["length", "stop"]
    assert (found.num_prompt_tokens, found.num_tokens) == (3, [4])
    plain = answer(parse(body(stream=True)), deltas("r", 7, 8))
    assert SCHEMAS[f"{kind}_sse"](plain).texts == ["<7><8>"]


@BOTH
def test_text_that_looks_like_a_chunks_own_bytes(body: Any) -> None:
    text = '\0text"}]\n\ndata: \ud83d'.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    parsed = parse(body(stream=True))
    delta = Delta("r", text, (token(7),), FinishReason.LENGTH, num_generated_tokens=1)
    kind = "chat" if body is chat else "completion"
    assert SCHEMAS[f"{kind}_sse"](parsed.formatter.feed(delta)).texts == [text]


@BOTH
def test_each_token_has_a_chunk_also_without_text(body: Any) -> None:
    """Text that is held back must not look like a stall."""
    parsed = parse(body(stream=True))
    held = Delta("r", "", (token(7),), num_generated_tokens=1)
    assert parsed.formatter.feed(held)
    assert parsed.formatter.feed(held).count(b"data: ") == 1
    silent = Delta("r", "", (), FinishReason.TIME, num_generated_tokens=2)
    assert parsed.formatter.feed(silent).count(b"data: ") == 2


@BOTH
def test_an_error_within_a_stream_is_its_last_event(body: Any) -> None:
    parsed = parse(body(stream=True))
    parsed.formatter.feed(deltas("r", 7, 8)[0])
    failed = Delta("r", "", (), FinishReason.ERROR, StepError("the device failed"))
    event = parsed.formatter.feed(failed)
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert b"[DONE]" not in event
    error = json.loads(event.removeprefix(b"data: "))["error"]
    assert error == {
        "message": "the device failed",
        "type": "server_error",
        "param": None,
        "code": "step_error",
    }


def test_an_error_of_a_whole_answer_after_blanks_is_a_body() -> None:
    failed = Delta("r", "", (), FinishReason.ERROR, StepError("the device failed"))
    assert json.loads(parse(chat()).formatter.feed(failed))["error"]["code"] == "step_error"


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_chat(stream: bool) -> None:
    parsed = parse(chat(logprobs=True, top_logprobs=2, stream=stream))
    assert (parsed.request.logprobs, parsed.request.top_logprobs) == (True, 2)
    parts = deltas("r", 7, 2, top=(7, 8), reason=FinishReason.EOS)
    content = answer(parsed, parts)
    if stream:
        assert SCHEMAS["chat_sse_top_2"](content).texts == ["<7>"]
        found = [one["choices"][0]["logprobs"] for one in events(content)]
        scores = [score for one in found if one for score in one["content"]]
    else:
        assert SCHEMAS["chat_top_2"](content).texts == ["<7>"]
        scores = json.loads(content)["choices"][0]["logprobs"]["content"]
    top = [
        {"token": "<7>", "logprob": -1.0, "bytes": [60, 55, 62]},
        {"token": "<8>", "logprob": -1.0, "bytes": [60, 56, 62]},
    ]
    assert scores == [
        {"token": "<7>", "logprob": -0.5, "bytes": [60, 55, 62], "top_logprobs": top},
        {"token": "<eos>", "logprob": -0.5, "bytes": list(b"<eos>"), "top_logprobs": top},
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_completion(stream: bool) -> None:
    parsed = parse(complete(logprobs=1, stream=stream))
    assert (parsed.request.logprobs, parsed.request.top_logprobs) == (True, 1)
    content = answer(parsed, deltas("r", 7, 10, 8, top=(9,)))
    choices = [one["choices"][0] for one in (events(content) if stream else [json.loads(content)])]
    scores = [one["logprobs"] for one in choices if one["logprobs"]]
    joined = {name: [value for one in scores for value in one[name]] for name in scores[0]}
    assert joined == {
        "tokens": ["<7>", "<10>", "<8>"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{name: -0.5, "<9>": -1.0} for name in ("<7>", "<10>", "<8>")],
        "text_offset": [0, 3, 7],
    }


@pytest.mark.parametrize("stream", [False, True])
def test_where_a_token_begins_does_not_depend_on_when_its_text_is_readable(stream: bool) -> None:
    tokenizer = ToyTokenizer()
    tokenizer.pieces = [b"", b"", b"", b"ab", "é".encode()[:1], "é".encode()[1:], b"x", b"1", b"2"]
    tokenizer.token_bytes = lambda one: tokenizer.pieces[one]  # type: ignore[method-assign, index]
    # The stop string holds "1" back, and the é is whole with its second token.
    parsed = parse(complete(logprobs=0, stream=stream, stop="12"), tokenizer=tokenizer)
    text = TextStream(parsed.request, tokenizer)
    ids = [3, 4, 5, 7, 1, 6, 7, 8]
    parts = [text.feed(TokenOutput("r", [one], logprobs=[-1.0])) for one in ids]
    content = answer(parsed, [one for one in parts if one is not None])
    choices = [one["choices"][0] for one in (events(content) if stream else [json.loads(content)])]
    assert "".join(one["text"] for one in choices) == "abé1x"
    offsets = [
        value for one in choices if one["logprobs"] for value in one["logprobs"]["text_offset"]
    ]
    assert offsets == [0, 2, 3, 3, 4, 4, 5, 6]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_are_parts_of_characters_have_their_bytes_as_names(stream: bool) -> None:
    """Not all one name. Offsets count the characters of the text before, also where its bytes are no UTF-8."""
    pieces = [
        b"",
        b"",
        b"",
        b" \xf0\x9f",
        b"\x8c",
        b"\x91",
        b"\x92",
        b"a",
        b"\xff",
        "é\u4e2d".encode(),
        b"a",
    ]
    tokenizer = ToyTokenizer()
    tokenizer.pieces = pieces
    tokenizer.token_bytes = lambda one: pieces[one]  # type: ignore[method-assign]
    parsed = parse(complete(logprobs=4, stream=stream), tokenizer=tokenizer)
    ids = [3, 4, 5, 9, 4, 8, 3, 7, 10, 4, 4, 7, 3, 8]
    top = [(7, -0.25), (5, -0.5), (6, -1.0), (3, -2.0)]
    text = TextStream(parsed.request, tokenizer)
    last = len(ids) - 1
    parts = [
        text.feed(
            TokenOutput(
                "r", [one], [None, FinishReason.LENGTH][i == last], None, None, 4, [-4.0 - i], [top]
            )
        )
        for i, one in enumerate(ids)
    ]
    content = answer(parsed, [one for one in parts if one is not None])
    found = [one["choices"][0] for one in (events(content) if stream else [json.loads(content)])]
    scores = [one["logprobs"] for one in found if one["logprobs"]]
    joined = {name: [value for one in scores for value in one[name]] for name in scores[0]}
    before = [b"".join(pieces[one] for one in ids[:i]) for i in range(len(ids))]
    assert joined["text_offset"] == [len(one.decode(errors="replace")) for one in before]
    assert "".join(one["text"] for one in found) == b"".join(pieces[i] for i in ids).decode(
        errors="replace"
    )
    names = {3: r"bytes: \xf0\x9f", 4: r"bytes:\x8c", 5: r"bytes:\x91", 6: r"bytes:\x92"}
    names |= {7: "a", 8: r"bytes:\xff", 9: "é\u4e2d", 10: "a"}
    assert joined["tokens"] == [names[one] for one in ids]
    assert joined["token_logprobs"] == [-4.0 - i for i in range(len(ids))]
    expected = {names[one]: score for one, score in top}
    for i, one in enumerate(ids):
        assert joined["top_logprobs"][i] == {**expected, names[one]: -4.0 - i}


def test_tokens_are_named_by_their_ids_where_the_request_says_so() -> None:
    more = {"return_tokens_as_token_ids": True}
    parsed = parse(complete(logprobs=1, echo=True, **more))
    content = answer(parsed, scored("r", 5, 6), deltas("r", 7, top=(9,)))
    found = json.loads(content)["choices"][0]["logprobs"]
    assert found["tokens"] == [f"token_id:{one}" for one in (1, 5, 6, 7)]
    assert [set(one or ()) for one in found["top_logprobs"]] == [
        set(),
        {"token_id:5", "token_id:9"},
        {"token_id:6", "token_id:9"},
        {"token_id:7", "token_id:9"},
    ]
    content = answer(parse(chat(logprobs=True, top_logprobs=1, **more)), deltas("r", 7, top=(9,)))
    (token,) = json.loads(content)["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["bytes"]) == ("token_id:7", list(b"<7>"))
    assert token["top_logprobs"][0]["token"] == "token_id:9"


def test_log_probabilities_without_alternatives() -> None:
    content = answer(parse(complete(logprobs=0)), deltas("r", 7, logprob=float("-inf")))
    found = json.loads(content)["choices"][0]["logprobs"]
    assert (found["token_logprobs"], found["top_logprobs"]) == ([-9999.0], None)
    assert not parse(complete()).request.logprobs


def test_best_of_returns_the_likeliest_by_token() -> None:
    parsed = parse(complete(["<5>", "<6>"], best_of=3, n=2))
    assert len(parsed.requests) == 6
    assert all(request.logprobs for request in parsed.requests)
    # In sum the one of two tokens is the least likely, by token the best.
    scores = [(-3.0, 1), (-2.0, 2), (-2.5, 1), (-1.0, 1), (-2.0, 1), (-3.0, 1)]
    names = ["r", "r.1", "r.2", "r.3", "r.4", "r.5"]
    parts = [
        deltas(name, *[10 + i] * count, logprob=score)
        for i, (name, (score, count)) in enumerate(zip(names, scores, strict=True))
    ]
    content = answer(parsed, *parts)
    found = SCHEMAS["completion"](content)
    assert found.texts == ["<11><11>", "<12>", "<13>", "<14>"]
    assert found.num_tokens == [7], "all that were generated"
    assert found.num_prompt_tokens == 4


@pytest.mark.parametrize("stream", [False, True])
def test_echo(stream: bool) -> None:
    for prompt, texts in (("<5>", ["<5>"]), ([1, 5, 6], ["<5><6>"]), (["<5>", "x"], ["<5>", "x"])):
        parsed = parse(complete(prompt, echo=True, stream=stream))
        parts = [deltas(request.request_id, 7) for request in parsed.requests]
        found = SCHEMAS["completion_sse" if stream else "completion"](answer(parsed, *parts))
        assert found.texts == [text + "<7>" for text in texts]


@pytest.mark.parametrize("stream", [False, True])
def test_a_truncated_prompt_is_repeated_as_it_was_read(stream: bool) -> None:
    for side, prompt, kept in (
        ("left", "<5><6><7>", ["<6>", "<7>"]),
        ("right", "<5><6><7>", ["", "<5>"]),
        ("left", [1, 5, 6, 7], ["<6>", "<7>"]),
        ("right", [1, 5, 6, 7], ["", "<5>"]),
    ):
        cut = {"truncate_prompt_tokens": 2, "truncation_side": side}
        parsed = parse(complete(prompt, echo=True, logprobs=1, max_tokens=1, stream=stream, **cut))
        content = answer(parsed, scored("r", *parsed.request.prompt_ids[1:]), deltas("r", 9))
        found = events(content) if stream else [json.loads(content)]
        choices = [choice for part in found for choice in part["choices"]]
        listed = [one["logprobs"] for one in choices if one["logprobs"]]
        texts = [*kept, "<9>"]
        assert "".join(choice["text"] for choice in choices) == "".join(texts)
        assert [text for one in listed for text in one["tokens"]][:3] == texts
        offsets = [offset for one in listed for offset in one["text_offset"]][:3]
        assert offsets == [len("".join(texts[:i])) for i in range(3)]


def scored(request_id: str, *ids: int) -> list[Delta]:
    """Deltas with the scores of a prompt's tokens; the likeliest in each place are 9, which is the token too, and 5."""
    return [
        Delta(request_id, "", (), prompt=(token(one, (9, 5), -2.0)._replace(rank=3),))
        for one in ids
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_probabilities_of_a_prompt_that_is_repeated(stream: bool) -> None:
    for more, parts in (({"max_tokens": 2}, deltas("r", 7, 2, top=(5,))), ({"max_tokens": 0}, [])):
        parsed = parse(complete("<5>é<9>", echo=True, logprobs=1, stream=stream, **more))
        assert parsed.request.scores_prompt == 1
        _, _, e_acute, _ = ids = parsed.request.prompt_ids
        ends = [*parts[:-1], Delta("r", "", parts[-1].tokens if parts else (), FinishReason.LENGTH)]
        content = answer(parsed, scored("r", *ids[1:]), ends)
        found = events(content) if stream else [json.loads(content)]
        choices = [choice for part in found for choice in part["choices"]]
        assert "".join(choice["text"] for choice in choices) == "<5>é<9>" + ("<7>" if parts else "")
        listed = {
            name: [one for choice in choices for one in (choice["logprobs"] or {}).get(name) or ()]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        name = f"<{e_acute}>"
        best = {"<9>": -1.0}
        generated = 2 if parts else 0
        # The text of the toy's tokens is longer than the prompt: offsets count back from where the text goes on.
        start = len("<5>é<9>") - len(f"<5>{name}<9>")
        offsets = [max(0, start + len(text)) for text in ("", "", "<5>", f"<5>{name}")]
        assert listed == {
            "tokens": ["", "<5>", name, "<9>", *["<7>", "<eos>"][:generated]],
            "token_logprobs": [None, -2.0, -2.0, -2.0, *[-0.5] * generated],
            "top_logprobs": [
                None,
                {**best, "<5>": -2.0},
                {**best, name: -2.0},
                {"<9>": -2.0},
                *[{"<5>": -1.0, "<7>": -0.5}, {"<5>": -1.0, "<eos>": -0.5}][:generated],
            ],
            "text_offset": [*offsets, *[7, 10][:generated]],
        }
        assert choices[-1]["finish_reason"] == "length"


def test_the_scores_of_prompts_in_vllms_shape() -> None:
    def score(token_id: int, logprob: float, rank: int) -> Any:
        return {str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": f"<{token_id}>"}}

    first, last = {**score(5, -2.0, 3), **score(9, -1.0, 1)}, score(9, -2.0, 3)
    for number, wanted in (
        (2, [None, first, {**last, **score(5, -1.0, 2)}]),
        (1, [None, first, last]),
        (0, [None, score(5, -2.0, 3), last]),
    ):
        parsed = parse(chat({"role": "user", "content": "<5><9>"}, prompt_logprobs=number))
        assert parsed.request.scores_prompt == number
        whole = json.loads(answer(parsed, scored("r", 5, 9), deltas("r", 7)))
        assert whole["prompt_logprobs"] == wanted
        assert whole["choices"][0]["logprobs"] is None
        parsed = parse(complete([[1, 5, 9], [5]], prompt_logprobs=number, max_tokens=0))
        ends = [Delta(one, "", (), FinishReason.LENGTH) for one in ("r", "r.1")]
        whole = json.loads(answer(parsed, scored("r", 5, 9), ends))
        assert [choice["prompt_logprobs"] for choice in whole["choices"]] == [wanted, [None]]
        assert whole["usage"] == {"prompt_tokens": 4, "completion_tokens": 0, "total_tokens": 4}
    assert "prompt_logprobs" not in json.loads(answer(parse(chat()), deltas("r", 7)))


def test_one_sequence_of_a_prompt_scores_it_for_all() -> None:
    """Unless the others could not be served without scores, or their stream begins before these are known."""
    both, room = [[1, 5, 9], [1, 6]], {"longest_prompt": 3}
    parsed = parse(complete(both, n=2, prompt_logprobs=1, max_tokens=1), **room)
    assert [one.scores_prompt for one in parsed.requests] == [1, None, 1, None]
    names = [one.request_id for one in parsed.requests]
    scores = [*scored(names[0], 5, 9), *scored(names[2], 6)]
    whole = json.loads(answer(parsed, scores, *[deltas(one, 7) for one in reversed(names)]))
    found = [[*map(len, choice["prompt_logprobs"][1:])] for choice in whole["choices"]]
    assert found == [[2, 1], [2, 1], [2], [2]]
    assert whole["choices"][1]["prompt_logprobs"] == whole["choices"][0]["prompt_logprobs"]
    for more, longest in (
        ({"max_tokens": 0}, 3),
        ({"max_tokens": 1}, 2),
        ({"max_tokens": 1, "stream": True}, 3),
    ):
        asked = complete([1, 5, 9], n=2, echo=True, logprobs=1, **more)
        requests = parse(asked, longest_prompt=longest).requests
        assert [one.scores_prompt for one in requests] == [1, 1], more


def test_the_scores_of_a_request_have_a_bound() -> None:
    prompt = [1] + [5] * (MAX_SCORED // 21 - 1)
    room = {"longest_prompt": len(prompt) + 1}
    asked = {"prompt_logprobs": 20, "max_tokens": 1}
    assert len(parse(complete(prompt, n=12, **asked), **room).requests) == 12
    for prompts in ([*prompt, 5], [prompt, [1, 5]]):
        with pytest.raises(RequestError, match=r"scores of \d prompts list 524") as caught:
            parse(complete(prompts, **asked), **room)
        assert caught.value.param == PROMPT


@pytest.mark.parametrize("token_id", [-1, 300, 2**32, 2**64 - 1])
def test_ids_that_the_model_lacks_are_refused_before_they_are_decoded(token_id: int) -> None:
    for prompt in ([5, token_id], [[5], [token_id]]):
        with pytest.raises(RequestError, match=f"the token id {token_id}; expected ids of the"):
            parse(complete(prompt, echo=True))


@pytest.mark.parametrize(
    ("path", "headers", "options", "sse"),
    [
        ("/v1/chat/completions", {}, {}, True),
        ("/v1/chat/completions", {}, {"output_formatter": "jsonlines"}, True),
        ("/invocations", {}, {}, False),
        ("", {}, {}, False),
        ("", {"accept": "text/event-stream"}, {}, True),
        ("", {"x-stainless-lang": "python"}, {}, True),
        ("", {"user-agent": "unknown/None; hf_hub/2.4.0; python/3.11.7"}, {}, True),
        ("", {}, {"output_formatter": "sse"}, True),
        ("", {}, {"output_formatter": "sse_chat"}, True),
    ],
)
def test_events_or_lines(path: str, headers: Any, options: Any, sse: bool) -> None:
    options = ServingOptions(model_name="toy", **options)
    parsed = parse(chat(stream=True), path=path, headers=headers, options=options)
    content = answer(parsed, deltas("r", 7, 8))
    assert SCHEMAS["chat_sse" if sse else "chat_jsonlines"](content).texts == ["<7><8>"]
    type_ = "text/event-stream" if sse else "application/jsonlines"
    assert parsed.formatter.content_type == type_


@pytest.mark.parametrize("path", ["/invocations", ""])
def test_the_body_names_the_protocol_where_the_path_does_not(path: str) -> None:
    assert parse(chat(), path=path).request.protocol == "openai_chat"
    assert parse(complete(), path=path).request.protocol == "openai_completion"


@pytest.mark.parametrize(
    ("error", "status", "type_", "code"),
    [
        (RequestError("no"), 400, "invalid_request_error", "bad_request"),
        (UnsupportedParameterError("no"), 400, "invalid_request_error", "unsupported_parameter"),
        (PromptTooLongError("no"), 400, "invalid_request_error", "context_length_exceeded"),
        (UnauthorizedError("no"), 401, "invalid_request_error", "invalid_api_key"),
        (UnknownModelError("no"), 404, "invalid_request_error", "model_not_found"),
        (RequestTimeoutError("no"), 408, "invalid_request_error", "request_timeout"),
        (StepError("no"), 500, "server_error", "step_error"),
        (FormatterError("no"), 500, "server_error", "formatter_error"),
        (QueueFullError("no"), 503, "server_error", "queue_full"),
        (DeviceMemoryError("no"), 507, "server_error", "device_memory"),
    ],
)
def test_status_and_body_of_an_error(error: Any, status: int, type_: str, code: str) -> None:
    error.param = "x" if isinstance(error, RequestError) else None
    for place in ({"path": "/v1/embeddings"}, {"protocol": "openai_chat"}):
        found, body = answer_error(error, **place)
        assert found == status
        expected = {"message": "no", "type": type_, "param": error.__dict__["param"], "code": code}
        assert json.loads(body) == {"error": expected}
    assert answer_error(error, path="/invocations")[0] == error.status


def test_the_defaults_of_the_models_author(caplog: pytest.LogCaptureFixture) -> None:
    generation = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.9,
        "do_sample": False,
        "seed": 3,
        "min_p": None,
        "typical_p": 0.5,
        "repetition_penalty": "high",
        "max_new_tokens": 40,
        "eos_token_id": 2,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 7,
        "min_length": 9,
        "frequency_penalty": 0,
        "begin_suppress_tokens": [],
        "suppress_tokens": [5],
        "bad_words_ids": [[6]],
        "logit_bias": {"5": 1},
    }
    defaults = default_parameters(generation)
    sampling: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    assert defaults == {**sampling, "max_new_tokens": 40}
    others = ["min_length", "min_new_tokens", "no_repeat_ngram_size", "seed", "typical_p"]
    others += ["bad_words_ids", "logit_bias", "suppress_tokens"]
    logged = re.findall(r"generation_config_unused name=(\w+)", caplog.text)
    assert sorted(logged) == sorted(others)
    more = {"min_p": 0.2, "repetition_penalty": 1.5}
    assert default_parameters(more) == more

    def request(body: Mapping[str, Any]) -> GenerationRequest:
        def with_defaults(given: Mapping[str, Any]) -> Mapping[str, Any]:
            return limits.with_defaults(given, configured=defaults, spec=TOY_SPEC)

        return parse(body, with_defaults=with_defaults, default_max_tokens=40).request

    for body in (chat, complete):
        assert request(body()).sampling == SamplingParams(**sampling)
        assert request(body()).max_new_tokens == 40
        given = request(body(temperature=1, top_k=-1, max_tokens=50))
        assert given.sampling == SamplingParams(temperature=1, top_p=0.9)
        assert given.max_new_tokens == 50


DEVICE = replace(TOY_SPEC, outputs=frozenset({Want.TOKENS}))


@pytest.mark.parametrize(
    ("spec", "row"),
    [
        (replace(DEVICE, fixed_sampling=(1.0, 1.0, 1.0)), (1, 1.0, 1.0)),
        (replace(DEVICE, fixed_sampling=(50.0, 0.9, 0.7)), (50, 0.9, 0.7)),
        (replace(DEVICE, largest_top_k=256), (256, 1.0, 1.0)),
        (replace(DEVICE, largest_top_k=256, default_top_k=256), (256, 1.0, 1.0)),
    ],
)
def test_a_device_that_samples_refuses_nothing_that_nobody_sent(spec: Any, row: Any) -> None:
    configured = {"min_p": 0.1, "repetition_penalty": 1.1}
    top_k, top_p, temperature = row
    same = {"top_k": top_k, "top_p": top_p, "temperature": temperature}
    for given, more in (
        ({}, {}),
        ({}, {"top_k": 500}),
        # What would be there anyway may be sent too, as clients do with OpenAI's defaults.
        *(({name: value}, {}) for name, value in same.items()),
    ):
        found = limits.with_defaults(given, configured={**configured, **more}, spec=spec)
        sampling = SamplingParams.from_mapping({"temperature": 1.0, **found})
        assert (sampling.top_k, sampling.top_p, sampling.temperature) == row
        limits.check(GenerationRequest("r", [1], sampling), spec)


def test_a_device_that_samples_refuses_what_was_sent_and_does_nothing_else_instead() -> None:
    spec = replace(DEVICE, fixed_sampling=(1.0, 1.0, 1.0))
    found = limits.with_defaults({"temperature": 0.7}, configured={}, spec=spec)
    with pytest.raises(UnsupportedParameterError, match="compiled in"):
        limits.check(GenerationRequest("r", [1], SamplingParams(**found)), spec)
    spec = replace(DEVICE, largest_top_k=64)
    configured = {"top_k": 100, "temperature": 0.5}
    found = limits.with_defaults({"top_p": 0.9}, configured=configured, spec=spec)
    assert found == {"top_k": 64, "temperature": 0.5, "top_p": 0.9}
    spec = replace(spec, applies_top_p=False)
    found = limits.with_defaults({}, configured={**configured, "top_p": 0.9}, spec=spec)
    assert found == {"top_k": 64, "temperature": 0.5}
