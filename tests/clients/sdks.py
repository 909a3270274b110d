"""Calls of existing clients and the answers that they must get: checks for every door that serves the example model.

`url` is that of an HTTP server with SageMaker's API beside OpenAI's and TGI's routes (`tests.clients.front`), and the
model's name is `tiny`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import pydantic
import pytest
import transformers

boto3 = pytest.importorskip("boto3", reason="needs boto3")
openai = pytest.importorskip("openai", reason="needs openai")

from botocore.config import Config  # noqa: E402
from botocore.exceptions import ClientError  # noqa: E402

MODEL = Path(__file__).parents[2] / "examples" / "tiny-llama"
CHATS = [json.loads(line) for line in (MODEL / "chat_checks.jsonl").read_text().splitlines()]
CHECKS = [json.loads(line) for line in (MODEL / "checks.jsonl").read_text().splitlines()]
NUM_CLIENTS = 8
COUNT = "1 2 3 4 5"


def openai_client(url: str, key: str = "unused") -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0)


def hub_client(url: str) -> huggingface_hub.InferenceClient:
    return huggingface_hub.InferenceClient(model=url, timeout=120)


def sagemaker_client(url: str) -> Any:
    return boto3.client(
        "sagemaker-runtime",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="dummy",
        aws_secret_access_key="dummy",
        config=Config(retries={"total_max_attempts": 1}),
    )


def chat_body(check: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "messages": check["messages"],
        "max_tokens": check["max_new_tokens"],
        "temperature": 0,
        **more,
    }


def lmi_body(check: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "inputs": check["prompt"],
        "parameters": {"max_new_tokens": check["max_new_tokens"]},
        **more,
    }


# Chat: each gives the text of an answer.


def openai_chat(url: str, check: dict[str, Any]) -> str:
    answer = openai_client(url).chat.completions.create(model="tiny", **chat_body(check))
    (choice,) = answer.choices
    assert (answer.object, answer.model, choice.index) == ("chat.completion", "tiny", 0)
    assert choice.message.role == "assistant"
    assert choice.finish_reason in {"stop", "length"}
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens > len(check["messages"])
    return choice.message.content


def openai_chat_stream(url: str, check: dict[str, Any]) -> str:
    chunks = list(
        openai_client(url).chat.completions.create(
            model="tiny", stream=True, stream_options={"include_usage": True}, **chat_body(check)
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    *others, last = chunks
    assert (last.choices, last.usage.completion_tokens > 0) == ([], True)
    assert others[-1].choices[0].finish_reason in {"stop", "length"}
    return "".join(chunk.choices[0].delta.content or "" for chunk in others)


def openai_chat_async(url: str, check: dict[str, Any]) -> str:
    async def ask() -> str:
        client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0)
        async with client:
            stream = await client.chat.completions.create(
                model="tiny", stream=True, **chat_body(check)
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    return asyncio.run(ask())


def response_body(check: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "input": check["messages"],
        "max_output_tokens": check["max_new_tokens"],
        "temperature": 0,
        **more,
    }


def openai_response(url: str, check: dict[str, Any]) -> str:
    answer = openai_client(url).responses.create(**response_body(check))
    assert (answer.object, answer.model, answer.error) == ("response", "tiny", None)
    assert answer.status == ("incomplete" if answer.incomplete_details else "completed")
    assert answer.usage.input_tokens > len(check["messages"])
    return answer.output_text


def openai_response_stream(url: str, check: dict[str, Any]) -> str:
    events = list(openai_client(url).responses.create(stream=True, **response_body(check)))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type in {"response.completed", "response.incomplete"}
    text = "".join(one.delta for one in events if one.type == "response.output_text.delta")
    assert events[-1].response.output_text == text
    return text


def hub_chat(url: str, check: dict[str, Any]) -> str:
    answer = hub_client(url).chat_completion(**chat_body(check))
    assert answer.usage.completion_tokens > 0
    return answer.choices[0].message.content


def hub_chat_stream(url: str, check: dict[str, Any]) -> str:
    client = hub_client(url)  # which closes its streams when it is collected
    chunks = client.chat_completion(stream=True, **chat_body(check))
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def sagemaker_chat(url: str, check: dict[str, Any]) -> str:
    answer = sagemaker_client(url).invoke_endpoint(
        EndpointName="tiny", ContentType="application/json", Body=json.dumps(chat_body(check))
    )
    assert answer["ContentType"] == "application/json"
    return json.loads(answer["Body"].read())["choices"][0]["message"]["content"]


def sagemaker_chat_stream(url: str, check: dict[str, Any]) -> str:
    content_type, text = sagemaker_stream(url, chat_body(check, stream=True))
    assert content_type == "application/jsonlines"
    chunks = [json.loads(line) for line in text.splitlines()]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


CHAT_CLIENTS: tuple[Callable[[str, dict[str, Any]], str], ...] = (
    openai_chat,
    openai_chat_stream,
    openai_chat_async,
    openai_response,
    openai_response_stream,
    hub_chat,
    hub_chat_stream,
    sagemaker_chat,
    sagemaker_chat_stream,
)


def check_chats(
    url: str, ask: Callable[[str, dict[str, Any]], str], num_chats: int | None = None
) -> None:
    """The answers to the example model's chats are right; `num_chats`: those to the first ones."""
    chats = CHATS[:num_chats]
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        found = list(clients.map(lambda check: ask(url, check), chats))
    assert found == [check["completion"] for check in chats]


# Everything else.


def sagemaker_stream(url: str, body: dict[str, Any], **more: Any) -> tuple[str, str]:
    """Content type and text of a stream; its parts may end anywhere."""
    answer = sagemaker_client(url).invoke_endpoint_with_response_stream(
        EndpointName="tiny", ContentType="application/json", Body=json.dumps(body), **more
    )
    parts = [event["PayloadPart"]["Bytes"] for event in answer["Body"]]
    return answer["ContentType"], b"".join(parts).decode()


def check_sagemaker(url: str) -> None:
    check = CHECKS[0]
    client = sagemaker_client(url)
    whole = client.invoke_endpoint(
        EndpointName="tiny",
        ContentType="application/json",
        Body=json.dumps(lmi_body(check)),
        InferenceId="mine",
    )
    assert json.loads(whole["Body"].read()) == {"generated_text": check["completion"]}
    content_type, text = sagemaker_stream(url, lmi_body(check, stream=True))
    assert content_type == "application/jsonlines"
    lines = [json.loads(line) for line in text.splitlines()]
    assert "".join(line["token"]["text"] for line in lines) == check["completion"]
    assert lines[-1]["generated_text"] == check["completion"]
    for invoke in (client.invoke_endpoint, client.invoke_endpoint_with_response_stream):
        with pytest.raises(ClientError) as refused:
            invoke(EndpointName="tiny", ContentType="application/json", Body=b'{"inputs": 5}')
        error = refused.value.response
        assert error["Error"]["Code"] == "ModelError"
        assert error["OriginalStatusCode"] == 400
        assert "inputs" in json.loads(error["OriginalMessage"])["error"]


def check_completions(url: str) -> None:
    client, check = openai_client(url), CHECKS[0]
    settings = {"model": "tiny", "max_tokens": check["max_new_tokens"], "temperature": 0}
    answer = client.completions.create(prompt=check["prompt"], **settings)
    assert answer.choices[0].text == check["completion"]
    chunks = list(client.completions.create(prompt=check["prompt"], stream=True, **settings))
    assert "".join(chunk.choices[0].text for chunk in chunks) == check["completion"]
    several = client.completions.create(
        prompt=[one["prompt"] for one in CHECKS[:2]],
        n=2,
        echo=True,
        **{**settings, "max_tokens": CHECKS[1]["max_new_tokens"]},
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in several.choices] == [
        one["prompt"] + one["completion"] for one in CHECKS[:2] for _ in range(2)
    ]


def check_logprobs(url: str) -> None:
    client, check = openai_client(url), CHATS[0]
    body = chat_body(check, logprobs=True, top_logprobs=2)
    answer = client.chat.completions.create(model="tiny", **body)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(token.top_logprobs) == 2 for token in content)
    assert all(token.top_logprobs[0].logprob == token.logprob <= 0 for token in content)
    chunks = client.chat.completions.create(model="tiny", stream=True, **body)
    streamed = [
        token
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
        for token in chunk.choices[0].logprobs.content
    ]
    assert [token.token for token in streamed] == [token.token for token in content]
    data = b"".join(bytes(token.bytes) for token in content)
    assert data.decode().startswith(check["completion"])


class Weather(pydantic.BaseModel):
    """The weather. The arguments are short, whatever a model writes."""

    city: Literal["Paris", "Rome"]
    tomorrow: bool


def check_tools(url: str) -> None:
    """A conversation with a tool, whole and streamed; the template is `TOOL_TEMPLATE`."""
    completions: Any = openai_client(url).chat.completions
    messages: list[Any] = [{"role": "user", "content": "Is it cold?"}]
    settings = {
        "model": "tiny",
        "tools": [openai.pydantic_function_tool(Weather)],
        "temperature": 0,
        "max_tokens": 200,
    }
    for choice in ("required", {"type": "function", "function": {"name": "Weather"}}):
        forced = {**settings, "tool_choice": choice, "parallel_tool_calls": False}
        called = completions.parse(messages=messages, **forced).choices[0]
        assert called.finish_reason == "tool_calls"
        assert called.message.content is None
        (call,) = called.message.tool_calls
        assert isinstance(call.function.parsed_arguments, Weather)
        with completions.stream(messages=messages, **forced) as stream:
            events = [one for one in stream if one.type.startswith("tool_calls")]
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls"
        assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
        deltas = [one.arguments_delta for one in events if one.type.endswith("delta")]
        assert len(deltas) > 1
        assert "".join(deltas) == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "7 degrees"}
    history = [*messages, called.message, result]
    assert completions.create(messages=history, **settings).choices[0].finish_reason
    with pytest.raises(openai.BadRequestError):
        completions.create(messages=messages, **{**settings, "tools": [{"type": "custom"}]})


def check_response_tools(url: str) -> None:
    """The same by responses, and a text by a schema."""
    responses: Any = openai_client(url).responses
    asked = [{"role": "user", "content": "Is it cold?"}]
    tool = openai.pydantic_function_tool(Weather)
    named = {"type": "function", "name": "Weather"}
    settings = {"model": "tiny", "temperature": 0, "max_output_tokens": 200}
    for choice in (
        "required",
        named,
        {"type": "allowed_tools", "mode": "required", "tools": [named]},
    ):
        forced = {**settings, "tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
        called = responses.parse(input=asked, **forced)
        (call,) = called.output
        assert (called.status, call.type) == ("completed", "function_call")
        assert isinstance(call.parsed_arguments, Weather)
        with responses.stream(input=asked, **forced) as stream:
            events = [one for one in stream if "arguments.delta" in one.type]
            (streamed,) = stream.get_final_response().output
        assert streamed.arguments == "".join(one.delta for one in events) == call.arguments
        assert len(events) > 1
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "7 degrees"}
    history = [*asked, *called.output, result]
    assert responses.parse(input=history, tools=[tool], **settings).output
    parsed = responses.parse(input=asked, text_format=Weather, **settings)
    assert isinstance(parsed.output_parsed, Weather)


def check_prompt_scores(url: str) -> None:
    """Log-probabilities of prompts are those of transformers, whichever parameter asks for them."""
    from tests.doubles.tiny_models import load_reference

    reference, tokenizer = load_reference(MODEL), transformers.AutoTokenizer.from_pretrained(MODEL)
    client, prompts = openai_client(url), [CHECKS[0]["prompt"], CHECKS[1]["prompt"]]
    asked = {"model": "tiny", "prompt": prompts, "echo": True, "logprobs": 2, "temperature": 0}
    alone = client.completions.create(max_tokens=0, **asked)
    whole = client.completions.create(max_tokens=3, **asked)
    parts: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in client.completions.create(max_tokens=3, stream=True, **asked):
        parts[chunk.choices[0].index].append(chunk.choices[0])
    vllm = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    assert alone.usage.completion_tokens == 0 < whole.usage.completion_tokens
    for i, prompt in enumerate(prompts):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        exact = reference(ids).logits[0].detach().log_softmax(-1)
        wanted = [float(exact[place, one]) for place, one in enumerate(ids[0, 1:])]
        best = exact[:-1].max(-1).values.tolist()
        listed = alone.choices[i].logprobs
        for choice, found in (
            (alone.choices[i], listed),
            (whole.choices[i], whole.choices[i].logprobs),
            (parts[i][0], parts[i][0].logprobs),
        ):
            assert choice.text.startswith(prompt)
            assert found.token_logprobs[0] is None
            assert found.top_logprobs[0] is None
            assert found.token_logprobs[1 : ids.shape[1]] == pytest.approx(wanted, abs=1e-4)
            likeliest = [max(place.values()) for place in found.top_logprobs[1 : ids.shape[1]]]
            assert likeliest == pytest.approx(best, abs=1e-4)
        assert len(listed.tokens) == ids.shape[1]
        assert (alone.choices[i].text, alone.choices[i].finish_reason) == (prompt, "length")
        spans = zip(listed.text_offset, [*listed.text_offset[1:], len(prompt)], strict=True)
        texts = [prompt[start:end] for start, end in spans]
        assert "".join(texts) == prompt
        for text, name in zip(texts[1:], listed.tokens[1:], strict=True):
            assert text.strip() == name.strip() or name.startswith("bytes:")
        text = "".join(part.text for part in parts[i])
        assert text == whole.choices[i].text
        scores = vllm.choices[i].prompt_logprobs
        assert scores[0] is None
        chosen = [place[str(int(one))] for place, one in zip(scores[1:], ids[0, 1:], strict=True)]
        assert [one["logprob"] for one in chosen] == pytest.approx(wanted, abs=1e-4)
        assert [one["rank"] == 1 for one in chosen] == [
            abs(one - top) < 1e-4 for one, top in zip(wanted, best, strict=True)
        ]


def check_more_answers_than_slots(url: str) -> None:
    """They queue, and each has a stream of random numbers, the first one that of a request for one answer."""
    client = openai_client(url)
    asked = {"model": "tiny", "prompt": "a", "max_tokens": 4, "seed": 7, "temperature": 2}
    texts = [choice.text for choice in client.completions.create(n=20, **asked).choices]
    assert texts == [choice.text for choice in client.completions.create(n=20, **asked).choices]
    assert texts[0] == client.completions.create(**asked).choices[0].text
    assert len(set(texts)) > 10


def check_openai_errors(url: str, *, has_shape: bool = True) -> None:
    """Each error is of its class, and has OpenAI's object unless DJL Serving makes the body (not `has_shape`)."""
    client = openai_client(url)
    message = {"role": "user", "content": "copy: a ->"}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    refused: list[tuple[type[openai.APIStatusError], dict[str, Any], str | None]] = [
        (openai.NotFoundError, {"model": "other"}, "model"),
        (openai.BadRequestError, {"messages": []}, "messages"),
        (openai.BadRequestError, {"frequency_penalty": 3}, "frequency_penalty"),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": [image]}]}, None),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": "a " * 5000}]}, None),
    ]
    for kind, changes, param in refused:
        for stream in (False, True):
            body = {"model": "tiny", "messages": [message], "max_tokens": 2, **changes}
            with pytest.raises(kind) as error:
                client.chat.completions.create(stream=stream, **body)
            if has_shape:
                assert error.value.code
                assert error.value.type == "invalid_request_error"
                assert param in {error.value.param, None}


def check_text_generation(url: str) -> None:
    check = CHECKS[0]
    text = hub_client(url).text_generation(check["prompt"], max_new_tokens=check["max_new_tokens"])
    assert text == check["completion"]
