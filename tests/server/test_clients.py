"""Clients that exist against the embedded server, through sockets: openai, huggingface_hub and boto3."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

pytest.importorskip("uvicorn", reason="needs the `server` extra")
pytest.importorskip("torch", reason="needs the `cpu` extra")

import huggingface_hub

from djl_python_neuronx.server.app import Application
from djl_python_neuronx.service import Service
from tests import clients
from tests.client_front import forward, front
from tests.server.test_app import Running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server with the example model."""
    application = Application("tiny")
    application.service = Service.load(
        None,
        clients.MODEL,
        environ={},
        overrides={
            "model_loader": "cpu",
            "max_rolling_batch_size": "8",
            "served_model_name": "tiny",
        },
    )
    running = Running(application)
    yield running
    running.close()
    application.service.close()


@pytest.fixture(scope="module")
def url(server: Running) -> Iterator[str]:
    with front(forward(server.port)) as url:
        yield url


def test_sagemaker(url: str) -> None:
    clients.check_sagemaker(url)


def test_a_stream_that_breaks_is_an_error_of_sagemakers_client(server: Running, url: str) -> None:
    body = clients.lmi_body({"prompt": clients.COUNT, "max_new_tokens": 500}, stream=True)
    body["parameters"]["ignore_eos"] = True
    answer = clients.sagemaker_client(url).invoke_endpoint_with_response_stream(
        EndpointName="tiny", ContentType="application/json", Body=json.dumps(body)
    )
    events = iter(answer["Body"])
    assert next(events)["PayloadPart"]["Bytes"]
    for connection in list(server._server.server_state.connections):
        connection.loop.call_soon_threadsafe(connection._raw.abort)
    with pytest.raises(clients.ClientError, match="ModelStreamError"):
        list(events)


def test_text_generation(url: str) -> None:
    clients.check_text_generation(url)


def test_text_generation_has_tgis_details_and_errors(server: Running) -> None:
    client, check = clients.hub_client(server.url), clients.CHECKS[0]
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
