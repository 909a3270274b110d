"""Clients that exist against the embedded server, through sockets: openai, huggingface_hub and boto3."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the `server` extra")
pytest.importorskip("torch", reason="needs the `cpu` extra")

import huggingface_hub

from djl_python_neuronx.server.app import Application
from djl_python_neuronx.server.keys import read_keys
from djl_python_neuronx.server.models import Model
from djl_python_neuronx.service import Service
from tests.clients import sdks
from tests.clients.answers import TOOL_TEMPLATE
from tests.clients.front import forward, front
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend
from tests.doubles.toy_service import toy_service
from tests.server.running import Running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server with the example model."""
    application = Application(Model("tiny"))
    application.models[0].service = Service.load(
        None,
        sdks.MODEL,
        environ={},
        overrides={
            "model_loader": "cpu",
            "max_rolling_batch_size": "8",
            "served_model_name": "tiny",
            "chat_template": TOOL_TEMPLATE,
        },
    )
    running = Running(application)
    yield running
    running.close()
    application.models[0].service.close()


@pytest.fixture(scope="module")
def url(server: Running) -> Iterator[str]:
    with front(forward(server.port)) as url:
        yield url


def test_sagemaker(url: str) -> None:
    sdks.check_sagemaker(url)


def test_a_stream_that_breaks_is_an_error_of_sagemakers_client(server: Running, url: str) -> None:
    body = sdks.lmi_body({"prompt": sdks.COUNT, "max_new_tokens": 500}, stream=True)
    body["parameters"]["ignore_eos"] = True
    answer = sdks.sagemaker_client(url).invoke_endpoint_with_response_stream(
        EndpointName="tiny", ContentType="application/json", Body=json.dumps(body)
    )
    events = iter(answer["Body"])
    assert next(events)["PayloadPart"]["Bytes"]
    for connection in list(server._server.server_state.connections):
        connection.loop.call_soon_threadsafe(connection._raw.abort)
    with pytest.raises(sdks.ClientError, match="ModelStreamError"):
        list(events)


@pytest.mark.parametrize("ask", sdks.CHAT_CLIENTS, ids=lambda ask: ask.__name__)
def test_chats_are_answered_right(url: str, ask: Any) -> None:
    sdks.check_chats(url, ask)


def test_completions(url: str) -> None:
    sdks.check_completions(url)


def test_logprobs(url: str) -> None:
    sdks.check_logprobs(url)


def test_tools(url: str) -> None:
    sdks.check_tools(url)


def test_response_tools(url: str) -> None:
    sdks.check_response_tools(url)


def test_prompt_scores(url: str) -> None:
    sdks.check_prompt_scores(url)


def test_more_answers_than_slots(url: str) -> None:
    sdks.check_more_answers_than_slots(url)


def test_openai_errors(url: str) -> None:
    sdks.check_openai_errors(url)


def test_openai_models_and_raw_responses(server: Running) -> None:
    client = sdks.openai_client(server.url)
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert client.models.retrieve("tiny") == model
    with pytest.raises(sdks.openai.NotFoundError) as unknown:
        client.models.retrieve("other")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(sdks.openai.NotFoundError) as missing:
        client.embeddings.create(model="tiny", input="a")
    assert missing.value.type == "invalid_request_error"
    check = sdks.CHATS[0]
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", extra_headers={"x-request-id": "mine"}, **sdks.chat_body(check)
    )
    assert (raw.status_code, raw.request_id) == (200, "mine")
    assert raw.parse().choices[0].message.content == check["completion"]
    with client.chat.completions.with_streaming_response.create(
        model="tiny", stream=True, **sdks.chat_body(check)
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)


def test_a_wrong_key_is_an_authentication_error() -> None:
    application = Application(Model("toy"))
    application.models[0].service = toy_service(ToyBackend(TOY_SPEC))
    keyed = Running(application, api_keys=read_keys(None, "right"))
    with pytest.raises(sdks.openai.AuthenticationError) as refused:
        sdks.openai_client(keyed.url, "wrong").models.list()
    assert refused.value.code == "invalid_api_key"
    (model,) = sdks.openai_client(keyed.url, "right").models.list().data
    assert model.id == "toy"
    keyed.close()
    application.models[0].service.close()


def test_text_generation(url: str) -> None:
    sdks.check_text_generation(url)


def test_text_generation_has_tgis_details_and_errors(server: Running) -> None:
    client, check = sdks.hub_client(server.url), sdks.CHECKS[0]
    num_tokens = check["max_new_tokens"]
    whole = client.text_generation(
        check["prompt"],
        max_new_tokens=num_tokens,
        details=True,
        decoder_input_details=True,
        top_n_tokens=2,
    )
    assert whole.generated_text == check["completion"]
    details = whole.details
    assert details.finish_reason == "eos_token"
    assert len(details.tokens) == len(details.top_tokens) == details.generated_tokens
    assert [len(top) for top in details.top_tokens] == [2] * details.generated_tokens
    assert len(details.prefill) > 1
    texts = list(client.text_generation(check["prompt"], max_new_tokens=num_tokens, stream=True))
    assert "".join(texts) == check["completion"]
    events = list(
        client.text_generation(
            check["prompt"], max_new_tokens=num_tokens, stream=True, details=True
        )
    )
    assert [event.index for event in events] == list(range(1, len(events) + 1))
    assert events[-1].generated_text == check["completion"]
    assert events[-1].details.generated_tokens == details.generated_tokens
    assert [event.token.id for event in events] == [token.id for token in details.tokens]
    with pytest.raises(huggingface_hub.errors.ValidationError, match="top_p"):
        client.text_generation("a", top_p=7)
