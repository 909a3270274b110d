"""Strict schemas of the protocols' answers, written from the protocols' own sources without sight of the package.

Keys that a source does not have are errors, at every depth. Where DJL's engine and its documentation differ, the
documentation counts. `SCHEMAS` has a checker for each kind of answer: it takes the bytes of the body, raises
`ValueError` or `AssertionError` for a breach, and returns what was generated.

Sources:
- LMI: deepjavalibrary/djl-serving v0.36.0, serving/docs/lmi/user_guides/lmi_input_output_schema.md and
  engines/python/setup/djl_python/{output_formatter,request_io}.py; the same formatters in v0.29.0.
- Bedrock 3p: djl-serving v0.36.0, djl_python/three_p/three_p_utils.py, djl_python/output_formatter.py and
  djl_python/tests/test_rolling_batch.py.
- TGI: huggingface/text-generation-inference db931fcf (3.3.6-dev0), router/src/{lib,server,validation}.rs,
  router/src/infer/mod.rs and docs/openapi.json; huggingface_hub ee0a4510 (1.29.0.dev0),
  inference/_generated/types/text_generation.py and inference/_common.py.
- Plain server: vllm-project/vllm 03f86117, vllm/entrypoints/api_server.py; /tokenize and /detokenize: 030ea52e,
  vllm/entrypoints/serve/tokenize/protocol.py; /version: vllm/entrypoints/openai/api_server.py.
- Anthropic: the package anthropic 2.14 (PyPI), types/{message,usage,raw_message_stream_event}.py and what these
  name, types/shared/error_object.py, lib/streaming/_messages.py.
- OpenAI: the response models of the installed `openai` package, and what openai/openai-openapi (openapi.json) requires
  beyond them. Responses: openresponses/openresponses 1e33c10f, schema/*.tsp, beyond them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter
from typing_extensions import NotRequired, TypedDict

FinishReason = Literal["length", "eos_token", "stop_sequence"]


@dataclass
class Answer:
    """The content of an answer in any protocol: an entry per choice."""

    texts: list[str] = field(default_factory=list)
    finish_reasons: list[str | None] = field(default_factory=list)
    """Empty where the shape has none."""
    num_tokens: list[int] = field(default_factory=list)
    """Empty where the shape has none."""
    num_prompt_tokens: int | None = None
    error: dict[str, Any] = field(default_factory=dict)
    """The record of a refusal."""
    record: Any = None
    """The body of an answer that generates nothing."""


# LMI


class LmiToken(TypedDict):
    """DJL's `Token.as_dict`: `special_token` only where it is true."""

    id: int
    text: str
    log_prob: float
    special_token: NotRequired[Literal[True]]


class LmiPromptToken(TypedDict):
    """A token of the prompt: the first one has no probability."""

    id: int
    text: str
    log_prob: float | None
    special_token: NotRequired[Literal[True]]


class LmiStreamDetails(TypedDict):
    """`details` of a last line: without tokens."""

    finish_reason: FinishReason
    generated_tokens: int
    inputs: str
    prefill: NotRequired[list[LmiPromptToken]]
    top_tokens: NotRequired[list[list[LmiToken]]]


class LmiSequence(TypedDict):
    """An entry of `best_of_sequences`."""

    finish_reason: FinishReason
    generated_tokens: int
    tokens: list[LmiToken]
    generated_text: str
    prefill: NotRequired[list[LmiPromptToken]]
    top_tokens: NotRequired[list[list[LmiToken]]]


class LmiDetails(LmiStreamDetails):
    """`details` of an answer that is not streamed."""

    tokens: list[LmiToken]
    best_of_sequences: NotRequired[list[LmiSequence]]


class LmiText(TypedDict):
    """An answer without details."""

    generated_text: str


class LmiDetailed(LmiText):
    """An answer with details."""

    details: LmiDetails


class LmiLine(TypedDict):
    """A line of a stream but the last."""

    token: LmiToken


class LmiLastLine(LmiLine):
    """The last line; the documentation gives it details, whether or not the request wants them."""

    generated_text: str
    details: LmiStreamDetails


class LmiError(TypedDict):
    """A refusal; `type` is this server's addition, a fixed word for each class of errors."""

    code: int
    error: str
    type: str


# TGI


class TgiToken(TypedDict):
    """`Token` of the router."""

    id: int
    text: str
    logprob: float
    special: bool


class TgiPrefillToken(TypedDict):
    """`PrefillToken` of the router: the first one has no probability."""

    id: int
    text: str
    logprob: float | None


class TgiSequence(TypedDict):
    """`BestOfSequence` of the router."""

    generated_text: str
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[TgiPrefillToken]
    tokens: list[TgiToken]
    top_tokens: NotRequired[list[list[TgiToken]]]


class TgiDetails(TypedDict):
    """`Details` of the router."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[TgiPrefillToken]
    tokens: list[TgiToken]
    best_of_sequences: NotRequired[list[TgiSequence]]
    top_tokens: NotRequired[list[list[TgiToken]]]


class TgiText(TypedDict):
    """`GenerateResponse` without details."""

    generated_text: str


class TgiDetailed(TgiText):
    """`GenerateResponse` with details."""

    details: TgiDetails


class TgiStreamDetails(TypedDict):
    """`StreamDetails` of the router."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int


class TgiEvent(TypedDict):
    """`StreamResponse` but the last one."""

    index: int
    token: TgiToken
    top_tokens: NotRequired[list[TgiToken]]
    generated_text: None
    details: None


class TgiLastEvent(TypedDict):
    """The last `StreamResponse` without details."""

    index: int
    token: TgiToken
    top_tokens: NotRequired[list[TgiToken]]
    generated_text: str
    details: None


class TgiLastDetailedEvent(TypedDict):
    """The last `StreamResponse` with details."""

    index: int
    token: TgiToken
    top_tokens: NotRequired[list[TgiToken]]
    generated_text: str
    details: TgiStreamDetails


class TgiError(TypedDict):
    """`ErrorResponse` of the router; the words that huggingface_hub makes its exceptions of."""

    error: str
    error_type: Literal["generation", "incomplete_generation", "overloaded", "validation"]


class CopyInfo(TypedDict):
    """A copy in `/info`."""

    state: str
    cores: str


class TgiInfo(TypedDict):
    """`Info` of the router, and this server's own keys."""

    model: NotRequired[str]
    max_model_len: NotRequired[int]
    longest_prompt: NotRequired[int]
    num_slots: NotRequired[int]
    sampling: NotRequired[dict[str, Any]]
    speculation: NotRequired[dict[str, Any] | None]
    chunked_prefill: NotRequired[bool]
    copies: NotRequired[list[CopyInfo]]
    simulated: NotRequired[bool]
    model_id: str
    model_sha: str | None
    model_pipeline_tag: str | None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None


# Bedrock 3p


class BedrockBody(TypedDict):
    """`body` of an answer that is not streamed; `generation` begins with the prompt."""

    generation: str
    prompt_token_count: int
    generation_token_count: int
    stop_reason: FinishReason


class BedrockMetering(TypedDict):
    """`metering` of an answer and of a stream's first line."""

    inputTokenCount: int
    outputTokenCount: int


class BedrockAnswer(TypedDict):
    """An answer that is not streamed."""

    body: BedrockBody
    metering: BedrockMetering
    content_type: Literal["application/json"]


class BedrockPart(TypedDict):
    """`body` of a line: the prompt's count on the first, the reason on the last."""

    generation: str
    prompt_token_count: int | None
    generation_token_count: int
    stop_reason: FinishReason | None


class BedrockLaterMetering(TypedDict):
    """`metering` of a line but the first."""

    outputTokenCount: int


class BedrockLine(TypedDict):
    """A line of a stream."""

    body: BedrockPart
    metering: BedrockMetering | BedrockLaterMetering
    content_type: Literal["application/jsonlines"]


# Plain server, tokenizer


class PlainText(TypedDict):
    """The answer of vLLM's plain server: prompt and text of each sequence."""

    text: list[str]


class Tokens(TypedDict):
    """The answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str] | None]


class TgiSimpleToken(TypedDict):
    """`SimpleToken` of the router: `start` and `stop` are places in the text."""

    id: int
    text: str
    start: int
    stop: int


class Prompt(TypedDict):
    """The answer of `/detokenize`."""

    prompt: str


class Version(TypedDict):
    """The answer of `/version`."""

    version: str


# Anthropic


class MessagesText(TypedDict):
    """`TextBlock`."""

    type: Literal["text"]
    text: str


class MessagesThinking(TypedDict):
    """`ThinkingBlock`."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class MessagesCall(TypedDict):
    """`ToolUseBlock`."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessagesUsage(TypedDict):
    """`Usage`."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessagesEnd(TypedDict):
    """`Delta` of a `RawMessageDeltaEvent`."""

    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None


class MessagesAnswer(MessagesEnd):
    """`Message`, whole: its reason is not null."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessagesText | MessagesThinking | MessagesCall]
    usage: MessagesUsage


class MessagesBegun(TypedDict):
    """`Message` at the start of a stream."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[None]
    stop_reason: None
    stop_sequence: None
    usage: MessagesUsage


class MessagesTextDelta(TypedDict):
    """`TextDelta`."""

    type: Literal["text_delta"]
    text: str


class MessagesThinkingDelta(TypedDict):
    """`ThinkingDelta`."""

    type: Literal["thinking_delta"]
    thinking: str


class MessagesSignatureDelta(TypedDict):
    """`SignatureDelta`."""

    type: Literal["signature_delta"]
    signature: str


class MessagesInputDelta(TypedDict):
    """`InputJSONDelta`."""

    type: Literal["input_json_delta"]
    partial_json: str


class MessagesStart(TypedDict):
    """`RawMessageStartEvent`."""

    type: Literal["message_start"]
    message: MessagesBegun


class MessagesBlockStart(TypedDict):
    """`RawContentBlockStartEvent`."""

    type: Literal["content_block_start"]
    index: int
    content_block: MessagesText | MessagesThinking | MessagesCall


class MessagesBlockDelta(TypedDict):
    """`RawContentBlockDeltaEvent`."""

    type: Literal["content_block_delta"]
    index: int
    delta: MessagesTextDelta | MessagesThinkingDelta | MessagesSignatureDelta | MessagesInputDelta


class MessagesBlockStop(TypedDict):
    """`RawContentBlockStopEvent`."""

    type: Literal["content_block_stop"]
    index: int


class MessagesDelta(TypedDict):
    """`RawMessageDeltaEvent`."""

    type: Literal["message_delta"]
    delta: MessagesEnd
    usage: MessagesUsage


class MessagesOther(TypedDict):
    """`RawMessageStopEvent`, and the event that keeps a connection open."""

    type: Literal["message_stop", "ping"]


class AnthropicError(TypedDict):
    """The objects of types/shared/error_object.py; `request_too_large` of the API's page of errors."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "timeout_error",
        "api_error",
        "overloaded_error",
    ]
    message: str


class AnthropicRefusal(TypedDict):
    """`ErrorResponse`."""

    type: Literal["error"]
    error: AnthropicError


class TokenCount(TypedDict):
    """`MessageTokensCount`."""

    input_tokens: int


# OpenAI


class OpenAIError(TypedDict):
    """`Error` of the reference: all four keys are required."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIRefusal(TypedDict):
    """`ErrorResponse` of the reference."""

    error: OpenAIError


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """An adapter of a list: pydantic passes a configuration on to the records in it, but takes none for a record."""
    return TypeAdapter(list[kind], config=ConfigDict(extra="forbid", strict=True))


def _validate(kind: Any, records: Sequence[Any]) -> None:
    _adapter(kind).validate_python(list(records))


def _one(kind: Any, content: bytes) -> Any:
    record = json.loads(content)
    _validate(kind, [record])
    return record


def json_lines(content: bytes) -> list[Any]:
    """The records of a body in which each line is one."""
    assert content.endswith(b"\n"), "the last line does not end"
    return [json.loads(line) for line in content[:-1].split(b"\n")]


def sse_events(content: bytes) -> list[str]:
    """The data of the events of a body, in the form that clients take apart by `data: ` and an empty line."""
    assert content.endswith(b"\n\n"), "the last event does not end"
    events = content[:-2].decode().split("\n\n")
    for event in events:
        assert event.startswith("data: "), f"{event[:80]!r} is not an event of data"
        assert "\n" not in event, f"{event[:80]!r} has several lines"
    return [event.removeprefix("data: ") for event in events]


def _sse(content: bytes) -> list[Any]:
    return [json.loads(event) for event in sse_events(content)]


def _sse_done(content: bytes) -> list[Any]:
    *events, end = sse_events(content)
    assert end == "[DONE]", f"the stream ends with {end[:80]!r}"
    return [json.loads(event) for event in events]


def _log_probs_hold(tokens: Sequence[Any], key: str) -> None:
    for token in tokens:
        assert token[key] is None or token[key] <= 0, f"{token} has a probability above 1"


def _lmi_sequence(record: Any, details: Any, answer: Answer) -> None:
    answer.texts.append(record["generated_text"])
    answer.finish_reasons.append(details["finish_reason"])
    answer.num_tokens.append(details["generated_tokens"])
    assert len(details["tokens"]) == details["generated_tokens"]
    key = "log_prob" if not details["tokens"] or "log_prob" in details["tokens"][0] else "logprob"
    prefill = details.get("prefill", ())
    _log_probs_hold([*details["tokens"], *prefill], key)
    assert [token[key] is None for token in prefill] == [i == 0 for i in range(len(prefill))]
    if "top_tokens" in details:
        assert len(details["top_tokens"]) == details["generated_tokens"]
        for chosen, best in zip(details["tokens"], details["top_tokens"], strict=True):
            found = [token[key] for token in best]
            assert found == sorted(found, reverse=True), "the most likely token does not come first"
            assert found[0] >= chosen[key] - 1e-4, "the chosen token is likelier than the best"


def _whole(kind: Any, records: Sequence[Any], *, wants: frozenset[str]) -> Answer:
    """Whole answers of LMI and TGI; `wants` names the keys of details that the request asked for."""
    _validate(kind, records)
    answer = Answer()
    for record in records:
        if details := record.get("details"):
            for key in ("prefill", "top_tokens", "best_of_sequences"):
                if key == "prefill" and kind is TgiDetailed:
                    assert bool(details[key]) == (key in wants), f"prefill: {details[key]}"
                else:
                    assert (key in details) == (key in wants), f"{key} in details: {key in details}"
            _lmi_sequence(record, details, answer)
            for other in details.get("best_of_sequences", ()):
                _lmi_sequence(other, other, answer)
        else:
            answer.texts.append(record["generated_text"])
    return answer


def _lmi_json(content: bytes, kind: Any = LmiText, wants: Sequence[str] = ()) -> Answer:
    return _whole(kind, [json.loads(content)], wants=frozenset(wants))


def _json_list(content: bytes, kind: Any = LmiText, wants: Sequence[str] = ()) -> Answer:
    records = json.loads(content)
    assert isinstance(records, list)
    return _whole(kind, records, wants=frozenset(wants))


def _lmi_stream(content: bytes, read: Callable[[bytes], list[Any]]) -> Answer:
    lines = read(content)
    _validate(LmiLine, lines[:-1])
    _validate(LmiLastLine, lines[-1:])
    _log_probs_hold([line["token"] for line in lines], "log_prob")
    text = "".join(line["token"]["text"] for line in lines)
    assert lines[-1]["generated_text"].endswith(text), "the text is not that of the tokens"
    details = lines[-1]["details"]
    assert details["generated_tokens"] == len(lines)
    return Answer(
        [lines[-1]["generated_text"]], [details["finish_reason"]], [details["generated_tokens"]]
    )


def _tgi_stream(content: bytes, last: Any, num_top: int = 0) -> Answer:
    events = _sse(content)
    _validate(TgiEvent, events[:-1])
    _validate(last, events[-1:])
    assert [event["index"] for event in events] == list(range(1, len(events) + 1))
    _log_probs_hold([event["token"] for event in events], "logprob")
    for event in events:
        assert len(event.get("top_tokens", ())) == num_top
    text = "".join(event["token"]["text"] for event in events if not event["token"]["special"])
    assert events[-1]["generated_text"].endswith(text), "the text is not that of the tokens"
    answer = Answer([events[-1]["generated_text"]])
    if details := events[-1]["details"]:
        assert details["generated_tokens"] == len(events)
        answer.finish_reasons = [details["finish_reason"]]
        answer.num_tokens = [details["generated_tokens"]]
        answer.num_prompt_tokens = details["input_length"]
    return answer


def _bedrock(content: bytes) -> Answer:
    record = _one(BedrockAnswer, content)
    body, metering = record["body"], record["metering"]
    assert metering["inputTokenCount"] == body["prompt_token_count"]
    assert metering["outputTokenCount"] == body["generation_token_count"]
    return Answer(
        [body["generation"]],
        [body["stop_reason"]],
        [body["generation_token_count"]],
        body["prompt_token_count"],
    )


def _bedrock_stream(content: bytes) -> Answer:
    lines = json_lines(content)
    _validate(BedrockLine, lines)
    bodies = [line["body"] for line in lines]
    assert [body["generation_token_count"] for body in bodies] == list(range(1, len(bodies) + 1))
    for number, line in enumerate(lines):
        assert (line["body"]["prompt_token_count"] is None) == (number > 0)
        assert ("inputTokenCount" in line["metering"]) == (number == 0)
        assert (line["body"]["stop_reason"] is None) == (number < len(lines) - 1)
        assert line["metering"]["outputTokenCount"] == number + 1
    return Answer(
        ["".join(body["generation"] for body in bodies)],
        [bodies[-1]["stop_reason"]],
        [len(bodies)],
        bodies[0]["prompt_token_count"],
    )


def _plain(content: bytes) -> Answer:
    return Answer(_one(PlainText, content)["text"])


def _plain_stream(content: bytes) -> Answer:
    lines = json_lines(content)
    _validate(PlainText, lines)
    for before, after in pairwise(lines):
        for old, new in zip(before["text"], after["text"], strict=True):
            assert new.startswith(old), "a line is not the whole text so far"
    return Answer(lines[-1]["text"])


_REASONS = {"max_tokens": "length"}
"""Anthropic's words for ends in those of the other protocols, for comparisons; any other end is a stop."""
_DELTAS = {
    "text": {"text_delta": "text"},
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "tool_use": {"input_json_delta": "partial_json"},
}
"""Type of a block to the types of its deltas, each with the field of its text."""


def _messages_answer(content: Sequence[Any], end: Any, usage: Any) -> Answer:
    assert (end["stop_sequence"] is None) == (end["stop_reason"] != "stop_sequence")
    calls = any(one["type"] == "tool_use" for one in content)
    assert calls or end["stop_reason"] != "tool_use"
    return Answer(
        ["".join(one["text"] for one in content if one["type"] == "text")],
        [_REASONS.get(end["stop_reason"], "stop")],
        [usage["output_tokens"]],
        usage["input_tokens"] + usage["cache_read_input_tokens"],
        record={"content": list(content), **end},
    )


def _messages(content: bytes) -> Answer:
    record = _one(MessagesAnswer, content)
    assert record["id"].startswith("msg_")
    end = {name: record[name] for name in ("stop_reason", "stop_sequence")}
    return _messages_answer(record["content"], end, record["usage"])


def _named_events(content: bytes) -> list[Any]:
    """The data of events whose names are their types."""
    assert content.endswith(b"\n\n"), "the last event does not end"
    found = []
    for event in content[:-2].decode().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def _messages_events(content: bytes) -> Answer:
    """A stream, put together as `accumulate_event` of the package does."""
    first, *events, delta, last = _named_events(content)
    _validate(MessagesStart, [first])
    _validate(MessagesDelta, [delta])
    _validate(MessagesOther, [last])
    assert last["type"] == "message_stop"
    blocks: list[Any] = []
    is_open = False
    for event in [event for event in events if event["type"] != "ping"]:
        if event["type"] == "content_block_start":
            _validate(MessagesBlockStart, [event])
            assert not is_open, "two blocks are open"
            blocks.append(event["content_block"])
            texts: dict[str, str] = {}
        else:
            stops = event["type"] == "content_block_stop"
            _validate(MessagesBlockStop if stops else MessagesBlockDelta, [event])
            assert is_open, "no block is open"
            if not stops:
                name = _DELTAS[blocks[-1]["type"]][event["delta"]["type"]]
                texts[name] = texts.get(name, "") + event["delta"][name]
        is_open = event["type"] != "content_block_stop"
        assert event["index"] == len(blocks) - 1
        if not is_open:
            arguments = texts.pop("partial_json", "{}")
            blocks[-1] |= texts
            if "input" in blocks[-1] and delta["delta"]["stop_reason"] != "max_tokens":
                blocks[-1]["input"] = json.loads(arguments)
    assert not is_open, "the last block does not end"
    for name in ("input_tokens", "cache_read_input_tokens"):
        assert delta["usage"][name] == first["message"]["usage"][name]
    return _messages_answer(blocks, delta["delta"], delta["usage"])


def _no_extras(model: Any, path: str = "") -> None:
    """Raises `AssertionError` for a key that no model of the `openai` package has."""
    if isinstance(model, BaseModel):
        assert not model.model_extra, f"unknown keys in {path or 'the answer'}: {model.model_extra}"
        for name in type(model).model_fields:
            _no_extras(getattr(model, name), f"{path}.{name}")
    elif isinstance(model, list):
        for number, item in enumerate(model):
            _no_extras(item, f"{path}[{number}]")


def _openai_model(name: str) -> Any:
    from openai import types
    from openai.types import chat

    return getattr(chat if name.startswith("Chat") else types, name)


def _openai(name: str, record: Any) -> None:
    model = _openai_model(name).model_validate_json(json.dumps(record), strict=True)
    _no_extras(model)


def _has(record: Any, *keys: str) -> None:
    """The reference requires keys that the package's models leave open: it takes null for them, not their absence."""
    for key in keys:
        assert key in record, f"{key!r} is missing in {sorted(record)}"


def _usage(record: Any) -> int:
    usage = record["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return int(usage["completion_tokens"])


def _chat_logprobs(logprobs: Any, num_top: int | None) -> int:
    """The number of tokens; `num_top` None: the request asked for no log-probabilities."""
    assert (logprobs is None) == (num_top is None)
    if logprobs is None:
        return 0
    _has(logprobs, "content", "refusal")
    for token in logprobs["content"]:
        _has(token, "bytes")
        assert (
            token["bytes"] is None
            or bytes(token["bytes"]).decode(errors="replace") == token["token"]
        )
        assert len(token["top_logprobs"]) == num_top
        _log_probs_hold([token, *token["top_logprobs"]], "logprob")
        for other in token["top_logprobs"]:
            _has(other, "bytes")
    return len(logprobs["content"])


def _chat(content: bytes, num_top: int | None = None) -> Answer:
    record = json.loads(content)
    _openai("ChatCompletion", record)
    assert record["system_fingerprint"], "TGI's client needs it"
    assert record["id"].startswith("chatcmpl-")
    choices = record["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    num_tokens = _usage(record)
    counted = 0
    for choice in choices:
        _has(choice, "logprobs")
        _has(choice["message"], "content", "refusal")
        assert "tool_calls" not in choice["message"], "tools are a later matter"
        counted += _chat_logprobs(choice["logprobs"], num_top)
    assert num_top is None or counted == num_tokens
    return Answer(
        [choice["message"]["content"] for choice in choices],
        [choice["finish_reason"] for choice in choices],
        [num_tokens],
        record["usage"]["prompt_tokens"],
    )


def _stream_usage(chunks: list[Any], *, usage: bool | str) -> tuple[list[Any], Answer]:
    """Chunks but that of the usage: the reference gives it one of its own without choices, and null in the others.

    "each": vLLM's continuous usage, in every chunk that of its choice so far.
    """
    answer = Answer()
    for key in ("id", "created", "model", "system_fingerprint"):
        assert len({chunk[key] for chunk in chunks}) == 1, f"{key!r} changes within a stream"
    if usage:
        *chunks, last = chunks
        assert last["choices"] == [], "the last chunk has the usage alone"
        answer.num_tokens = [_usage(last)]
        answer.num_prompt_tokens = last["usage"]["prompt_tokens"]
        so_far: dict[int, int] = {}
        for chunk in chunks:
            assert (chunk["usage"] is not None) == (usage == "each"), "a chunk before the last"
            if usage == "each":
                index = chunk["choices"][0]["index"]
                assert so_far.get(index, 0) <= _usage(chunk)
                so_far[index] = _usage(chunk)
        assert usage != "each" or [sum(so_far.values())] == answer.num_tokens
    else:
        assert not any(chunk.get("usage") for chunk in chunks), "nobody asked for the usage"
    return chunks, answer


def _chunks_by_choice(chunks: Sequence[Any]) -> list[list[Any]]:
    """The parts of each choice in turn; only its last one has a finish reason."""
    parts: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            _has(choice, "finish_reason")
            parts.setdefault(choice["index"], []).append(choice)
    assert sorted(parts) == list(range(len(parts)))
    found = [parts[index] for index in sorted(parts)]
    for choices in found:
        assert [bool(choice["finish_reason"]) for choice in choices] == [
            *[False] * (len(choices) - 1),
            True,
        ], "not the last part alone has a finish reason"
    return found


def _chat_stream(
    content: bytes,
    num_top: int | None = None,
    *,
    usage: bool | str = False,
    read: Callable[[bytes], list[Any]] = _sse_done,
) -> Answer:
    chunks = read(content)
    for chunk in chunks:
        _openai("ChatCompletionChunk", chunk)
    chunks, answer = _stream_usage(chunks, usage=usage)
    assert chunks[0]["id"].startswith("chatcmpl-")
    counted = 0
    for parts in _chunks_by_choice(chunks):
        assert parts[0]["delta"].get("role") == "assistant", "the first part has no role"
        assert not any("role" in part["delta"] for part in parts[1:]), "the role comes again"
        for part in parts:
            if part.get("logprobs"):
                counted += _chat_logprobs(part["logprobs"], num_top)
        answer.texts.append("".join(part["delta"].get("content") or "" for part in parts))
        answer.finish_reasons.append(parts[-1]["finish_reason"])
    assert (counted > 0) == (num_top is not None)
    assert num_top is None or not usage or [counted] == answer.num_tokens
    return answer


def _completion_logprobs(choice: Any, num_top: int | None, *, echo: bool = False) -> int:
    """The number of tokens; `num_top` None: the request asked for no log-probabilities.

    With `echo` the first one has none. The package's model knows no null there, so that it is replaced.
    """
    _has(choice, "logprobs")
    logprobs = choice["logprobs"]
    if num_top is None:
        assert logprobs is None
        return 0
    if logprobs is None:
        assert not choice["text"], "a text without log-probabilities"
        return 0
    columns = {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    _has(logprobs, *columns)
    if echo:
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        logprobs["token_logprobs"][0], logprobs["top_logprobs"][0] = 0.0, {}
    assert len({len(logprobs[name]) for name in columns if logprobs[name] is not None}) == 1
    assert all(found <= 0 for found in logprobs["token_logprobs"])
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert num_top == 0 or logprobs["top_logprobs"] is not None
    # The reference: the chosen token comes on top where it is not among the best.
    assert all(len(best) <= num_top + 1 for best in logprobs["top_logprobs"] or ())
    return len(logprobs["tokens"])


def _completion(content: bytes, num_top: int | None = None, *, echo: bool = False) -> Answer:
    record = json.loads(content)
    choices = record["choices"]
    counted = sum(_completion_logprobs(choice, num_top, echo=echo) for choice in choices)
    _openai("Completion", record)
    assert record["system_fingerprint"], "TGI's client needs it"
    assert record["id"].startswith("cmpl-")
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    num_tokens = _usage(record)
    num_listed = record["usage"]["total_tokens"] if echo else num_tokens
    assert num_top is None or counted == num_listed
    for choice in choices:
        if choice["logprobs"]:
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    return Answer(
        [choice["text"] for choice in choices],
        [choice["finish_reason"] for choice in choices],
        [num_tokens],
        record["usage"]["prompt_tokens"],
    )


def _completion_stream(
    content: bytes,
    num_top: int | None = None,
    *,
    usage: bool | str = False,
    read: Callable[[bytes], list[Any]] = _sse_done,
) -> Answer:
    every = read(content)
    chunks, answer = _stream_usage(every, usage=usage)
    assert chunks[0]["id"].startswith("cmpl-")
    for parts in _chunks_by_choice(chunks):
        answer.texts.append("".join(part["text"] for part in parts))
        answer.finish_reasons.append(parts[-1]["finish_reason"])
        for part in parts:
            _completion_logprobs(part, num_top)
            # OpenAI streams null before the end, though the package's model does not say so.
            part["finish_reason"] = part["finish_reason"] or "stop"
    for chunk in every:
        _openai("Completion", chunk)
    return answer


RESPONSE_KEYS = {
    *(
        "id",
        "object",
        "created_at",
        "completed_at",
        "status",
        "incomplete_details",
        "model",
        "previous_response_id",
    ),
    *(
        "instructions",
        "output",
        "error",
        "tools",
        "tool_choice",
        "truncation",
        "parallel_tool_calls",
        "text",
        "top_p",
    ),
    *(
        "presence_penalty",
        "frequency_penalty",
        "top_logprobs",
        "temperature",
        "reasoning",
        "user",
        "usage",
        "store",
    ),
    *(
        "max_output_tokens",
        "max_tool_calls",
        "background",
        "service_tier",
        "metadata",
        "safety_identifier",
    ),
    "prompt_cache_key",
}
"""Those that Open Responses requires."""
_ONLY_OPEN_RESPONSES = {
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
    "store": bool,
}
"""Keys that the package's model lacks, and their types."""
_ITEM_KEYS = {
    "message": {"type", "id", "status", "role", "content"},
    "reasoning": {"type", "id", "status", "summary", "content"},
    "function_call": {"type", "id", "status", "call_id", "name", "arguments"},
}
_PART_KEYS = {
    "output_text": {"type", "text", "annotations", "logprobs"},
    "reasoning_text": {"type", "text"},
}
_PLACE = {"item_id", "output_index"}
_EVENT_KEYS: dict[str, set[str]] = {
    **{
        f"response.{name}": {"response"}
        for name in ("created", "in_progress", "completed", "incomplete", "failed")
    },
    **{f"response.output_item.{name}": {"output_index", "item"} for name in ("added", "done")},
    **{
        f"response.content_part.{name}": {*_PLACE, "content_index", "part"}
        for name in ("added", "done")
    },
    "response.output_text.delta": {*_PLACE, "content_index", "delta", "logprobs"},
    "response.output_text.done": {*_PLACE, "content_index", "text", "logprobs"},
    "response.reasoning_text.delta": {*_PLACE, "content_index", "delta"},
    "response.reasoning_text.done": {*_PLACE, "content_index", "text"},
    "response.function_call_arguments.delta": {*_PLACE, "delta"},
    "response.function_call_arguments.done": {*_PLACE, "arguments"},
}


def check_response(record: Any, num_top: int | None = None) -> None:
    """A response by the package's model, and what Open Responses requires beyond it."""
    assert set(record) == RESPONSE_KEYS
    for key, kind in _ONLY_OPEN_RESPONSES.items():
        assert isinstance(record[key], kind), key
    known = {key: value for key, value in record.items() if key not in _ONLY_OPEN_RESPONSES}
    _strictly("Response", known)
    assert record["id"].startswith("resp_")
    assert record["store"] is False, "nothing is stored"
    _has(record["text"], "format")
    assert set(record["reasoning"]) == {"effort", "summary"}
    for tool in record["tools"]:
        for one in tool.get("tools", [tool]):
            assert set(one) == {"type", "name", "description", "parameters", "strict"}
    assert (record["completed_at"] is not None) == (record["status"] == "completed")
    assert (record["incomplete_details"] is not None) == (record["status"] == "incomplete")
    assert (record["error"] is not None) == (record["status"] == "failed")
    assert (record["usage"] is None) == (record["status"] == "in_progress")
    for item in record["output"]:
        check_item(item, num_top)
    assert len({item["id"] for item in record["output"]}) == len(record["output"])
    if record["usage"] is not None:
        usage = record["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert usage["output_tokens_details"]["reasoning_tokens"] <= usage["output_tokens"]
    if record["status"] == "completed":
        assert record["output"], "an answer without items"
        assert {item["status"] for item in record["output"]} == {"completed"}


def check_item(item: Any, num_top: int | None = None) -> None:
    """An item of an output; `num_top` None: its text has no log-probabilities."""
    assert set(item) - {"namespace"} == _ITEM_KEYS[item["type"]]
    assert (item.get("content") == []) <= (item["status"] == "in_progress")
    for part in item.get("content", ()):
        assert set(part) == _PART_KEYS[part["type"]]
        if "logprobs" in part:
            assert (num_top is None) == (part["logprobs"] == [])
            _chat_logprobs({"content": part["logprobs"], "refusal": None}, num_top or 0)


@cache
def _of_responses(name: str) -> TypeAdapter[Any]:
    from openai.types import responses

    return TypeAdapter(getattr(responses, name))


def _strictly(name: str, record: Any) -> None:
    _no_extras(_of_responses(name).validate_json(json.dumps(record), strict=True))


def _response(content: bytes, num_top: int | None = None) -> Answer:
    record = json.loads(content)
    check_response(record, num_top)
    assert record["status"] in {"completed", "incomplete"}
    return _response_answer(record)


def _response_answer(record: Any) -> Answer:
    texts = [
        part["text"]
        for item in record["output"]
        if item["type"] == "message"
        for part in item["content"]
    ]
    return Answer(
        texts,
        ["stop" if record["status"] == "completed" else "length"],
        [record["usage"]["output_tokens"]],
        record["usage"]["input_tokens"],
        record=record,
    )


def _done_events(content: bytes) -> list[Any]:
    end = b"data: [DONE]\n\n"
    assert content.endswith(end), "the stream does not end with its mark"
    return _named_events(content.removesuffix(end))


def _response_stream(
    content: bytes,
    num_top: int | None = None,
    *,
    read: Callable[[bytes], list[Any]] = _done_events,
) -> Answer:
    return check_response_events(read(content), num_top)


def check_response_events(events: list[Any], num_top: int | None = None) -> Answer:
    """A stream: items that begin, grow and end one after the other, and at the end a response of the same items."""
    created, running, *_, last = events
    assert [one["type"] for one in (created, running)] == [
        "response.created",
        "response.in_progress",
    ]
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    items: list[Any] = []
    grown = ""
    for event in events:
        kind = event["type"]
        assert set(event) == {"type", "sequence_number", *_EVENT_KEYS[kind]}
        _check_event(event, num_top)
        if "output_index" in event:
            assert event["output_index"] == len(items) - (kind != "response.output_item.added")
        if "item_id" in event:
            assert (event["item_id"], event.get("content_index", 0)) == (items[-1]["id"], 0)
        if kind == "response.output_item.added":
            assert not items or items[-1]["status"] != "in_progress", "two items are open"
            assert event["item"]["status"] == "in_progress"
            grown = ""
            items.append(event["item"])
        elif kind.endswith(".delta"):
            assert items[-1]["status"] == "in_progress"
            grown += event["delta"]
        elif kind.endswith(("_text.done", "_arguments.done")):
            assert event.get("text", event.get("arguments")) == grown
        elif kind == "response.content_part.added":
            assert (event["part"]["text"], event["part"].get("logprobs", [])) == ("", [])
        elif kind == "response.content_part.done":
            assert event["part"]["text"] == grown
        elif kind == "response.output_item.done":
            parts = event["item"].get("content") or [{"text": event["item"].get("arguments")}]
            assert [part["text"] for part in parts] == [grown]
            assert event["item"]["id"] == items[-1]["id"]
            items[-1] = event["item"]
    assert last["type"] == f"response.{last['response']['status']}"
    assert last["response"]["status"] != "in_progress", "the stream does not end"
    assert last["response"]["output"] == items
    for event in (created, running):
        response = event["response"]
        assert (response["status"], response["output"]) == ("in_progress", [])
        changing = ("status", "output", "usage", "completed_at", "incomplete_details", "error")
        for key in RESPONSE_KEYS.difference(changing):
            assert response[key] == last["response"][key]
    return _response_answer(last["response"])


def _check_event(event: Any, num_top: int | None) -> None:
    known = dict(event)
    if "response" in event:
        check_response(event["response"], num_top)
        known["response"] = {
            key: value
            for key, value in event["response"].items()
            if key not in _ONLY_OPEN_RESPONSES
        }
    if "item" in event:
        check_item(event["item"], num_top)
    if "part" in event:
        assert set(event["part"]) == _PART_KEYS[event["part"]["type"]]
    if (
        "logprobs" in event
    ):  # Open Responses requires the bytes, which the package's model of a delta lacks
        scores = event["logprobs"]
        _chat_logprobs({"content": scores, "refusal": None}, num_top or 0)
        known["logprobs"] = [
            {**_without_bytes(one), "top_logprobs": [*map(_without_bytes, one["top_logprobs"])]}
            for one in scores
        ]
    _strictly("ResponseStreamEvent", known)


def _without_bytes(record: Any) -> Any:
    return {key: value for key, value in record.items() if key != "bytes"}


def _models(content: bytes) -> Answer:
    record = json.loads(content)
    assert set(record) == {"object", "data"}
    assert record["object"] == "list"
    assert record["data"]
    for model in record["data"]:
        _check_model(model)
    return Answer(record=record)


def _model(content: bytes) -> Answer:
    record = json.loads(content)
    _check_model(record)
    return Answer(record=record)


def _check_model(record: Any) -> None:
    """The reference's model, with vLLM's length and family."""
    assert isinstance(record, dict)
    others = {"max_model_len", "root", "parent"}
    _openai("Model", {key: value for key, value in record.items() if key not in others})
    assert isinstance(record["max_model_len"], int)
    assert isinstance(record["root"], str)
    assert isinstance(record["parent"], (str, type(None)))


def _refusal(content: bytes, kind: Any) -> Answer:
    record = _one(kind, content)
    return Answer(error=record["error"] if isinstance(record["error"], dict) else record)


def _tgi_tokens(content: bytes) -> Answer:
    tokens = json.loads(content)
    _validate(TgiSimpleToken, tokens)
    return Answer(record=tokens)


def _record(content: bytes, kind: Any) -> Answer:
    return Answer(record=_one(kind, content))


SCHEMAS: dict[str, Callable[[bytes], Answer]] = {
    "lmi_json": _lmi_json,
    "lmi_json_details": partial(_lmi_json, kind=LmiDetailed),
    "lmi_json_prefill": partial(_lmi_json, kind=LmiDetailed, wants=["prefill"]),
    "lmi_json_top_tokens": partial(_lmi_json, kind=LmiDetailed, wants=["top_tokens"]),
    "lmi_json_best_of": partial(_lmi_json, kind=LmiDetailed, wants=["best_of_sequences"]),
    "lmi_list": _json_list,
    "lmi_list_details": partial(_json_list, kind=LmiDetailed),
    "lmi_jsonlines": partial(_lmi_stream, read=json_lines),
    "lmi_sse": partial(_lmi_stream, read=_sse),
    "lmi_error": partial(_refusal, kind=LmiError),
    "tgi_json": partial(_lmi_json, kind=TgiText),
    "tgi_json_details": partial(_lmi_json, kind=TgiDetailed),
    "tgi_json_prefill": partial(_lmi_json, kind=TgiDetailed, wants=["prefill"]),
    "tgi_json_top_tokens": partial(_lmi_json, kind=TgiDetailed, wants=["top_tokens"]),
    "tgi_json_best_of": partial(_lmi_json, kind=TgiDetailed, wants=["best_of_sequences"]),
    "tgi_list": partial(_json_list, kind=TgiText),
    "tgi_list_details": partial(_json_list, kind=TgiDetailed),
    "tgi_list_prefill": partial(_json_list, kind=TgiDetailed, wants=["prefill"]),
    "tgi_stream": partial(_tgi_stream, last=TgiLastEvent),
    "tgi_stream_details": partial(_tgi_stream, last=TgiLastDetailedEvent),
    "tgi_stream_top_2": partial(_tgi_stream, last=TgiLastDetailedEvent, num_top=2),
    "tgi_info": partial(_record, kind=TgiInfo),
    "tgi_error": partial(_refusal, kind=TgiError),
    "bedrock_json": _bedrock,
    "bedrock_jsonlines": _bedrock_stream,
    "plain_json": _plain,
    "plain_jsonlines": _plain_stream,
    "tokens": partial(_record, kind=Tokens),
    "tgi_tokens": _tgi_tokens,
    "prompt": partial(_record, kind=Prompt),
    "version": partial(_record, kind=Version),
    "chat": _chat,
    "chat_logprobs": partial(_chat, num_top=0),
    "chat_top_2": partial(_chat, num_top=2),
    "chat_sse": _chat_stream,
    "chat_sse_usage": partial(_chat_stream, usage=True),
    "chat_sse_usage_each": partial(_chat_stream, usage="each"),
    "chat_sse_top_2": partial(_chat_stream, num_top=2),
    "chat_jsonlines": partial(_chat_stream, read=json_lines),
    "completion": _completion,
    "completion_logprobs": partial(_completion, num_top=0),
    "completion_top_2": partial(_completion, num_top=2),
    "completion_echo_top_2": partial(_completion, num_top=2, echo=True),
    "completion_sse": _completion_stream,
    "completion_sse_usage": partial(_completion_stream, usage=True),
    "completion_sse_usage_each": partial(_completion_stream, usage="each"),
    "completion_sse_top_2": partial(_completion_stream, num_top=2),
    "completion_jsonlines": partial(_completion_stream, read=json_lines),
    "messages": _messages,
    "messages_events": _messages_events,
    "token_count": partial(_record, kind=TokenCount),
    "anthropic_error": partial(_refusal, kind=AnthropicRefusal),
    "response": _response,
    "response_top_2": partial(_response, num_top=2),
    "response_events": _response_stream,
    "response_events_top_2": partial(_response_stream, num_top=2),
    "response_jsonlines": partial(_response_stream, read=json_lines),
    "models": _models,
    "model": _model,
    "openai_error": partial(_refusal, kind=OpenAIRefusal),
    "any": lambda content: Answer(record=content),
}
"""The check for each kind of answer; `recorded/*.json` names them."""
