"""The embedded server through its front door: a real model, real sockets, known answers."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the `server` extra")
httpx = pytest.importorskip("httpx", reason="needs httpx")

from djl_python_neuronx.backends.base import ModelSpec, Want  # noqa: E402
from djl_python_neuronx.engine import worker  # noqa: E402
from djl_python_neuronx.engine.speculation import (  # noqa: E402
    DraftModel,
    NgramProposer,
)
from djl_python_neuronx.engine.streams import BlockingQueue  # noqa: E402
from djl_python_neuronx.errors import BackendError, DeviceMemoryError, ServingError, StepError  # noqa: E402
from djl_python_neuronx.loading.tokenizer_process import IDLE_WORKERS  # noqa: E402
from djl_python_neuronx.server.app import Application  # noqa: E402
from djl_python_neuronx.server.bodies import LONG_BODY_BYTES  # noqa: E402
from djl_python_neuronx.server.keys import read_keys  # noqa: E402
from djl_python_neuronx.server.models import Model  # noqa: E402
from djl_python_neuronx.telemetry import exposition  # noqa: E402
from djl_python_neuronx.types import GenerationRequest  # noqa: E402
from tests.clients import hostile  # noqa: E402
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend, expected  # noqa: E402
from tests.doubles.toy_service import toy_service  # noqa: E402
from tests.doubles.toy_tokenizer import TOKENIZER  # noqa: E402
from tests.processes import PATIENCE_S, held_port, wait_until  # noqa: E402
from tests.server.raw_http import talk  # noqa: E402
from tests.server.running import (  # noqa: E402
    CROSSING_S,
    TINY_LLAMA,
    Running,
    answer,
    body,
    checks,
    http,
    num_descriptors,
    serving,
)


def slots_in_use(url: str) -> float:
    """The sum of a gauge's samples."""
    lines = http.get(url + "/metrics").text.splitlines()
    return sum(
        float(line.split()[1]) for line in lines if line.startswith("djl_neuronx_slots_in_use{")
    )


@pytest.fixture
def backend() -> ToyBackend:
    return ToyBackend(replace(TOY_SPEC, num_slots=2))


@pytest.fixture
def server(backend: ToyBackend) -> Iterator[Running]:
    application = Application(Model("toy"))
    application.models[0].service = toy_service(backend, max_waiting=2)
    running = Running(application)
    yield running
    backend.resume.set()
    running.close()
    application.models[0].service.close()


def test_no_header_or_query_sets_anything(server: Running) -> None:
    plain = http.post(f"{server.url}/invocations", json=body([5, 6]))
    assert plain.json() == {"generated_text": answer([5, 6])}
    for more in ({"headers": hostile.PROPERTIES}, {"params": hostile.PROPERTIES}):
        found = http.post(f"{server.url}/invocations", json=body([5, 6]), **more)
        assert (found.content, found.headers["Content-Type"]) == (
            plain.content,
            plain.headers["Content-Type"],
        )


def test_json_and_streams_give_the_same_text(server: Running) -> None:
    text = answer([5, 6])
    for path in ("/invocations", "/predictions/toy"):
        response = http.post(server.url + path, json=body([5, 6]), headers={"x-request-id": "mine"})
        assert response.status_code == 200
        assert response.json() == {"generated_text": text}
        assert response.headers["content-type"] == "application/json"
        assert int(response.headers["content-length"]) == len(response.content)
        assert response.headers["x-request-id"] == "mine"
    streamed = http.post(server.url + "/invocations", json=body([5, 6], stream=True))
    assert streamed.headers["content-type"] == "application/jsonlines"
    lines = [json.loads(line) for line in streamed.text.splitlines()]
    assert "".join(line["token"]["text"] for line in lines) == lines[-1]["generated_text"] == text
    events = http.post(
        server.url + "/invocations",
        json=body([5, 6], stream=True),
        headers={"accept": "text/event-stream"},
    )
    assert events.headers["content-type"].startswith("text/event-stream")
    assert (
        json.loads(events.text.rstrip().split("\n\n")[-1].removeprefix("data: "))["generated_text"]
        == text
    )


DYNAMIC = replace(TOY_SPEC, outputs=Want.TOKENS, largest_top_k=64)
MIXED = replace(DYNAMIC, outputs=Want.TOKENS | Want.LOGITS)
GREEDY = replace(TOY_SPEC, outputs=Want.TOKENS, fixed_sampling=(1.0, 1.0, 1.0))
FIXED = replace(TOY_SPEC, outputs=Want.TOKENS, fixed_sampling=(50.0, 0.5, 2.0))


ROWS = {"mode": "dynamic", "largest_top_k": 64}


@pytest.mark.parametrize(
    ("spec", "sampling"),
    [
        (TOY_SPEC, {"place": "host"}),
        (GREEDY, {"place": "device", "mode": "greedy"}),
        (
            FIXED,
            {"place": "device", "mode": "fixed", "top_k": 50.0, "top_p": 0.5, "temperature": 2.0},
        ),
        (
            DYNAMIC,
            {**ROWS, "place": "device", "without_top_k": "refused", "with_top_p": "device"},
        ),
        (
            replace(DYNAMIC, default_top_k=64),
            {**ROWS, "place": "device", "without_top_k": 64, "with_top_p": "device"},
        ),
        (
            MIXED,
            {**ROWS, "place": "mixed", "without_top_k": "host", "with_top_p": "device"},
        ),
        (
            replace(MIXED, applies_top_p=False),
            {**ROWS, "place": "mixed", "without_top_k": "host", "with_top_p": "host"},
        ),
    ],
)
def test_info_tells_where_tokens_are_sampled(spec: ModelSpec, sampling: dict[str, object]) -> None:
    with serving(ToyBackend(spec)) as server:
        facts = http.get(server.url + "/info").json()
        assert (facts["model_id"], facts["max_input_tokens"], facts["max_total_tokens"]) == (
            "toy",
            64,
            128,
        )
        ours = {
            "model": "toy",
            "max_model_len": 128,
            "longest_prompt": 64,
            "num_slots": 4,
            "sampling": sampling,
            "speculation": None,
            "chunked_prefill": False,
            "simulated": False,
            "copies": [{"state": "ready", "cores": ""}],
        }
        assert {name: facts[name] for name in ours} == ours


def test_a_device_that_samples_and_returns_logits_serves_details_too() -> None:
    with serving(ToyBackend(MIXED)) as server:
        for parameters in ({"details": True}, {"seed": 3}, {}):
            found = http.post(server.url + "/invocations", json=body([5, 6], parameters=parameters))
            assert found.json()["generated_text"] == answer([5, 6])
            if "details" in parameters:
                scores = [token["log_prob"] for token in found.json()["details"]["tokens"]]
                assert all(-1 > score > -3 for score in scores)  # a tenth of the mass
        for count in ('place="host"} 10.0', 'place="device"} 5.0'):
            line = f'djl_neuronx_sampling_steps_total{{model="toy",{count}'
            wait_until(lambda line=line: line in http.get(server.url + "/metrics").text)


def test_the_routes_of_health_and_version(server: Running) -> None:
    for path in ("/ping", "/health"):
        assert http.get(server.url + path).json() == {"status": "healthy"}
    assert http.get(server.url + "/version").json().keys() == {"version"}


@pytest.mark.parametrize("path", ["/models/toy/invoke", "/predictions/toy", "/generate"])
def test_the_routes_of_other_servers(server: Running, path: str) -> None:
    found = http.post(server.url + path, json=body([5, 6]))
    assert found.json() == {"generated_text": answer([5, 6])}
    events = http.post(server.url + "/", json=body([5, 6], stream=True)).text
    assert json.loads(events[:-2].rpartition("data: ")[2])["generated_text"] == answer([5, 6])


def test_tokens_without_the_engine(server: Running) -> None:
    prompt = "<5>" * 1000  # a long body, which is parsed on a thread
    found = http.post(server.url + "/tokenize", json={"prompt": prompt}).json()
    assert (found["count"], found["max_model_len"]) == (1001, 128)
    text = http.post(server.url + "/detokenize", json={"tokens": found["tokens"]})
    assert text.json() == {"prompt": prompt}
    refused = http.post(server.url + "/tokenize", json={"prompt": prompt, "model": "other"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_custom_attributes_are_headers(server: Running) -> None:
    attributes = "accept_eula=true;x-request-id = mine ; nothing;accept=text/event-stream"
    headers = {"X-Amzn-SageMaker-Custom-Attributes": attributes, "Accept": "*/*"}
    url = server.url + "/invocations"
    found = http.post(url, json=body([5, 6], stream=True), headers=headers)
    assert found.headers["x-request-id"] == "mine"
    assert found.headers["content-type"] == "application/jsonlines"


def test_errors_of_tgis_routes(server: Running) -> None:
    for path, method in (("/generate", "POST"), ("/", "POST"), ("/generate", "GET")):
        found = http.request(method, server.url + path, content=b"{")
        assert set(found.json()) == {"error", "error_type"}
        assert found.status_code == (422 if method == "POST" else 405)


def test_info_tells_of_chunks() -> None:
    with serving(ToyBackend(replace(TOY_SPEC, mixed_steps=True))) as server:
        assert http.get(server.url + "/info").json()["chunked_prefill"] is True


VERIFYING = replace(TOY_SPEC, num_speculative_tokens=3, outputs=Want.LOGITS | Want.ALL_LOGITS)
DRAFTING = replace(TOY_SPEC, outputs=Want.LOGITS)


@pytest.mark.parametrize("source", ["draft model", "prompt lookup"])
def test_info_tells_who_drafts_and_when_it_was_given_up(source: str) -> None:
    draft = ToyBackend(DRAFTING)
    draft.fail_at = dict.fromkeys(range(1000), RuntimeError("told to"))
    proposer = DraftModel(draft) if source == "draft model" else NgramProposer(VERIFYING, 3)
    application = Application(Model("toy"))
    application.models[0].service = toy_service(ToyBackend(VERIFYING), proposer=proposer)
    running = Running(application)
    told = []
    for _ in range(2):
        told.append(http.get(running.url + "/info").json()["speculation"])
        response = http.post(running.url + "/invocations", json=body([5, 6], 20))
        assert response.json() == {"generated_text": answer([5, 6], 20)}
    running.close()
    application.models[0].service.close()
    active = [True, source == "prompt lookup"]
    assert told == [{"drafts": 3, "from": source, "active": now} for now in active]


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"seed": 1}, "deploy without option.on_device_generation"),
        ({"repetition_penalty": 1.1}, "deploy without option.on_device_generation"),
        ({"min_p": 0.1}, "deploy without option.on_device_generation"),
        ({"details": True}, "deploy without option.on_device_generation"),
        ({"do_sample": True}, "option.on_device_default_top_k=global_top_k"),
        ({"do_sample": True, "top_k": 0}, "option.on_device_default_top_k=global_top_k"),
        ({"top_k": 65}, "deploy without option.on_device_generation"),
        ({"frequency_penalty": 0.5}, "deploy without option.on_device_generation"),
        ({"no_repeat_ngram_size": 2}, "deploy without option.on_device_generation"),
        (
            {"grammar": {"type": "regex", "value": "a"}},
            "deploy without option.on_device_generation",
        ),
        ({"details": True, "top_n_tokens": 2}, "deploy without option.on_device_generation"),
        ({"logit_bias": {"5": 1.0}}, "deploy without option.on_device_generation"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_device_cannot_sample_is_refused(parameters: dict[str, Any], says: str) -> None:
    with serving(ToyBackend(DYNAMIC)) as server:
        for stream in (False, True):
            response = http.post(
                server.url + "/invocations", json=body([5, 6], parameters=parameters, stream=stream)
            )
            assert response.status_code == 400
            assert says in response.json()["error"]
            assert response.json()["type"] == "unsupported_parameter"
        assert http.post(server.url + "/invocations", json=body([5, 6])).status_code == 200
    if "default_top_k" in says:
        with serving(ToyBackend(replace(DYNAMIC, default_top_k=64))) as server:
            response = http.post(
                server.url + "/invocations", json=body([5, 6], parameters=parameters)
            )
            assert response.status_code == 200


def test_a_stream_arrives_as_it_is_made(server: Running, backend: ToyBackend) -> None:
    backend.hang_at = {3}
    with http.stream(
        "POST", server.url + "/invocations", json=body([5, 6], stream=True)
    ) as response:
        lines = response.iter_lines()
        first = [json.loads(next(lines))["token"]["text"] for _ in range(3)]
        assert backend.hanging.wait(PATIENCE_S)
        backend.resume.set()
        rest = [json.loads(line)["token"]["text"] for line in lines]
    assert "".join(first + rest) == answer([5, 6])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slot(
    server: Running, backend: ToyBackend, stream: bool
) -> None:
    backend.hang_at = {3}
    backend.step_s = CROSSING_S
    assert server.application.models[0].service is not None
    loop = server.application.models[0].service.loop
    connection = HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/invocations", json.dumps(body([5, 6], 100, stream=stream)))
    assert backend.hanging.wait(PATIENCE_S)
    connection.close() if not stream else connection.sock.close()
    wait_until(lambda: len(loop.streams) == 0)
    backend.resume.set()
    wait_until(lambda: not backend.acquired)
    assert backend.num_steps < 100  # it has not come to its own end
    assert http.post(server.url + "/invocations", json=body([5, 6])).json() == {
        "generated_text": answer([5, 6])
    }


@pytest.mark.parametrize(
    ("content", "status", "kind", "says"),
    [
        (b"{", 400, "bad_request", "not valid JSON"),
        (b"", 400, "bad_request", "empty"),
        (b'{"inputs": ""}', 400, "bad_request", "inputs is an empty string"),
        (b'{"inputs": [[5]]}', 400, "bad_request", "a list"),
        (
            b'{"inputs": ["a", "' + b"a" * 100 + b'"]}',
            413,
            "prompt_too_long",
            "prompt 2 of 2 has 101 tokens",
        ),
        (
            b'{"inputs": "a", "parameters": {"stop_token_ids": [300]}}',
            400,
            "bad_request",
            "stop_token_ids has 300; expected.*from 0 to 299",
        ),
        (b'{"inputs": ["a", "b", "c", "d", "e"]}', 400, "bad_request", "5 prompts.*at most 4"),
        (
            b'{"inputs": "a", "parameters": {"temprature": 1}}',
            400,
            "unsupported_parameter",
            "did you mean 'temperature'",
        ),
        (b'{"inputs": "a", "parameters": {"top_p": 3}}', 400, "bad_request", "top_p is 3"),
        (b'{"inputs": "' + b"a" * 100 + b'"}', 413, "prompt_too_long", "101 tokens.*at most 64"),
        (b'{"inputs": "' + b"a" * 20_000 + b'"}', 413, "prompt_too_long", "20000 characters"),
    ],
)
def test_bad_requests(server: Running, content: bytes, status: int, kind: str, says: str) -> None:
    response = http.post(server.url + "/invocations", content=content)
    assert response.status_code == response.json()["code"] == status
    assert response.json()["type"] == kind
    assert __import__("re").search(says, response.json()["error"])


def test_routes_that_do_not_exist(server: Running) -> None:
    long = http.post(server.url + "/predictions/" + "x" * 9999, json=body([5]))
    assert (long.status_code, len(long.content) < 500) == (404, True)
    missing = http.post(server.url + "/predictions/other", json=body([5]))
    assert missing.status_code == 404
    assert "'toy'" in missing.json()["error"]
    wrong = http.get(server.url + "/invocations")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    says, _, routes = wrong.json()["error"].partition("; expected ")
    assert says == "no route 'GET /invocations'"
    assert {"GET /ping", "POST /invocations", "POST /predictions/{model}"} <= {*routes.split(", ")}
    for path in ("/nothing", "/v2/completions", "/predictions", "/" + "x" * 9999):
        found = http.post(server.url + path, json=body([5]))
        assert (found.status_code, found.json()["code"], len(found.content) < 700) == (
            404,
            404,
            True,
        )
        assert found.json()["error"].endswith(f"; expected {routes}")


def test_no_redirect_to_a_host_that_the_client_names(server: Running) -> None:
    found = http.post(server.url + "/invocations/", json=body([5]), headers={"Host": "evil.test"})
    assert (found.status_code, found.json()["code"]) == (404, 404)
    assert "location" not in found.headers


def test_the_model_can_have_names(server: Running) -> None:
    service = server.application.models[0].service
    assert service is not None
    names = ("given", "org/given")
    service.options = service.options.model_copy(update={"model_name": names})
    for name in names:
        assert http.post(f"{server.url}/predictions/{name}", json=body([5])).status_code == 200
        entry = http.get(f"{server.url}/v1/models/{name.replace('/', '%2F')}").json()
        assert entry == http.get(f"{server.url}/v1/models/{name}").json()
        assert (entry["id"], entry["object"], entry["created"]) == (name, "model", service.loaded_s)
        chat = {"model": name, "messages": [{"role": "user", "content": "<5>"}], "max_tokens": 1}
        found = http.post(server.url + "/v1/chat/completions", json=chat)
        assert (found.status_code, found.json()["model"]) == (200, name)
    assert http.post(server.url + "/predictions/toy", json=body([5])).status_code == 404
    listed = http.get(server.url + "/v1/models").json()
    assert [entry["id"] for entry in listed["data"]] == list(names)
    assert http.get(server.url + "/info").json()["model"] == "given"


def test_errors_below_v1_are_openais(server: Running) -> None:
    """Whatever fails: the route, the method, the body before it is parsed, the model's name."""
    url, plain = server.url + "/v1/", {"content-type": "text/plain"}
    for found, status, code in (
        (http.post(url + "embeddings", json={"input": "x"}), 404, "http_error"),
        (http.get(url + "chat/completions"), 405, "http_error"),
        (http.post(url + "completions", content=b"{"), 400, "bad_request"),
        (http.post(url + "completions", content="x", headers=plain), 400, None),
        (http.get(url + "models/other"), 404, "model_not_found"),
        (http.post(url + "completions", json={"prompt": [5] * 999}), 400, None),
    ):
        error = found.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (found.status_code, error["type"]) == (status, "invalid_request_error")
        assert code in {None, error["code"]}


def test_a_stream_that_breaks_off_is_counted(server: Running, backend: ToyBackend) -> None:
    backend.fail_at[2] = StepError("the device failed")
    chat = {"messages": [{"role": "user", "content": "<5>"}], "stream": True}
    found = http.post(server.url + "/v1/chat/completions", json=chat)
    *_, last, rest = found.text.split("\n\n")
    assert found.status_code == 200
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "step_error"
    assert rest == ""
    metric = 'requests_total{finish_reason="error",model="toy",protocol="openai_chat"} 1.0'
    wait_until(lambda: metric in http.get(server.url + "/metrics").text)


def test_a_body_over_the_limit_is_refused_before_it_is_read(server: Running) -> None:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    connection.putrequest("POST", "/invocations")
    connection.putheader("content-length", str(6 * 2**20 + 1))
    connection.endheaders()
    response = connection.getresponse()
    assert response.status == 413
    assert json.load(response)["type"] == "body_too_large"
    connection.close()


def test_a_long_body_is_read_whole(server: Running) -> None:
    content = json.dumps(body([5])).ljust(LONG_BODY_BYTES + 20_000)
    response = http.post(server.url + "/invocations", content=content)
    assert (response.status_code, response.json()["generated_text"]) == (200, answer([5]))
    assert http.post(server.url + "/invocations", content=content + "]").status_code == 400


def test_a_full_queue_is_503_with_retry_after(server: Running, backend: ToyBackend) -> None:
    backend.hang_at = {0}

    async def scenario() -> None:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            held = [
                asyncio.create_task(client.post(server.url + "/invocations", json=body([5, i + 3])))
                for i in range(4)
            ]
            assert server.application.models[0].service is not None
            loop = server.application.models[0].service.loop
            while len(loop.streams) < 4:
                await asyncio.sleep(0.005)
            refused = await client.post(server.url + "/invocations", json=body([9]))
            assert refused.status_code == 503
            assert refused.json()["type"] == "queue_full"
            assert int(refused.headers["retry-after"]) >= 1
            backend.resume.set()
            for i, response in enumerate(await asyncio.gather(*held)):
                assert response.json() == {"generated_text": answer([5, i + 3])}

    asyncio.run(scenario())


def test_an_error_before_the_first_token_has_its_status_also_when_streaming(
    server: Running, backend: ToyBackend
) -> None:
    for stream in (False, True):
        backend.fail_at = {backend.num_steps: RuntimeError("device says no")}
        response = http.post(server.url + "/invocations", json=body([5, 6], stream=stream))
        assert response.status_code == 424
        assert "device says no" in response.json()["error"]
    backend.fail_at = {backend.num_steps + 2: RuntimeError("device says no")}
    response = http.post(server.url + "/invocations", json=body([5, 6], stream=True))
    assert response.status_code == 200
    assert json.loads(response.text.splitlines()[-1])["code"] == 424
    assert http.post(server.url + "/invocations", json=body([5, 6])).status_code == 200


def test_ping_tells_loading_ready_and_dead(backend: ToyBackend) -> None:
    application = Application(Model("toy"))
    running = Running(application)
    try:
        assert http.get(running.url + "/ping").status_code == 503
        loading = http.post(running.url + "/invocations", json=body([5]))
        assert (loading.status_code, loading.json()["type"]) == (503, "backend_unavailable")
        assert http.get(running.url + "/metrics").status_code == 200
        application.models[0].service = toy_service(backend)
        assert http.get(running.url + "/ping").status_code == 200
        http.post(running.url + "/invocations", json=body([5, 6], 40))
        backend.hang_at = {backend.num_steps + 2}
        (loop,) = application.models[0].service.loop._loops
        loop._settings = replace(loop._settings, step_timeout_s=0.2)  # other steps may be slow
        hung = http.post(running.url + "/invocations", json=body([5, 6], 40))
        assert hung.status_code == 503
        assert "option.step_timeout" in hung.json()["error"]
        assert http.get(running.url + "/ping").status_code == 503
        assert http.post(running.url + "/invocations", json=body([5])).status_code == 503
    finally:
        backend.resume.set()
        running.close()
        if application.models[0].service is not None:
            application.models[0].service.close()


def test_a_model_that_cannot_be_loaded_is_told() -> None:
    application = Application(Model("toy"))
    application.models[0].failure = ServingError("weights are missing")
    running = Running(application)
    try:
        response = http.get(running.url + "/ping")
        assert response.status_code == 503
        assert "weights are missing" in response.json()["error"]
    finally:
        running.close()


def test_metrics_count(server: Running) -> None:
    for _ in range(3):
        http.post(server.url + "/invocations", json=body([5, 6, 7]))
    http.post(server.url + "/invocations", content=b"{")
    assert server.application.models[0].service is not None
    wait_until(
        lambda: (
            'djl_neuronx_generated_tokens_total{model="toy"} 15.0'
            in http.get(server.url + "/metrics").text
        )
    )
    text = http.get(server.url + "/metrics").text
    assert (
        'djl_neuronx_requests_total{finish_reason="length",model="toy",protocol="lmi"} 3.0' in text
    )
    assert 'djl_neuronx_rejected_requests_total{code="bad_request",model="toy"} 1.0' in text
    assert 'djl_neuronx_prompt_tokens_total{model="toy"} 12.0' in text
    assert 'djl_neuronx_prefill_seconds_count{bucket="8",model="toy"} 3.0' in text
    assert 'djl_neuronx_padding_tokens_total{model="toy"} 12.0' in text
    assert 'djl_neuronx_sampling_steps_total{model="toy",place="host"} 15.0' in text
    assert slots_in_use(server.url) == 0


@pytest.mark.parametrize(("wait_ms", "reencoded"), [(0, 4), (3_600_000, 0)])
def test_what_joining_a_static_batch_costs_is_counted(
    wait_ms: int, reencoded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request comes during the first one's second token: it joins then, or after its end."""
    spec = replace(TOY_SPEC, num_slots=3, max_prefill_batch=3, joins="reprefill")
    backend = ToyBackend(spec)
    backend.hang_at = {1}
    made: list[Noted] = []

    class Noted(worker._Worker):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(worker, "_Worker", Noted)
    service = toy_service(backend, max_join_wait_ms=wait_ms)
    inbox = BlockingQueue()
    try:
        service.loop.submit(
            GenerationRequest("a", [5, 6, 7], max_new_tokens=8, ignore_eos=True), inbox
        )
        assert backend.hanging.wait(PATIENCE_S)
        service.loop.submit(
            GenerationRequest("b", [8, 9], max_new_tokens=3, ignore_eos=True), inbox
        )
        wait_until(lambda: made[0]._commands.qsize() == 1)
        backend.resume.set()
        wait_until(lambda: service.loop.state[:2] == (0, 0) and len(service.loop.streams) == 0)
        text = exposition({"toy": service.metrics}).decode()
        assert f'djl_neuronx_reencoded_tokens_total{{model="toy"}} {reencoded}.0' in text
        assert backend.violations == []
    finally:
        backend.resume.set()
        service.close()


def test_hundreds_at_once_a_third_given_up(server: Running, backend: ToyBackend) -> None:
    """Every answer that is waited for is right; afterwards nothing is left."""
    application = server.application
    assert application.models[0].service is not None
    application.models[0].service.close()
    spec = replace(TOY_SPEC, num_slots=8, max_prefill_batch=2)
    crowd = ToyBackend(spec, step_s=0.0005)
    application.models[0].service = service = toy_service(crowd, max_waiting=1000)
    pick = random.Random(3)
    http.post(server.url + "/invocations", json=body([5]))
    descriptors = num_descriptors()
    threads = threading.active_count()

    async def one(client: Any, i: int) -> None:
        prompt = [pick.randrange(3, 300) for _ in range(pick.randrange(1, 60))]
        num_tokens = pick.randrange(1, 60)
        payload = body(prompt, num_tokens, stream=bool(i % 2))
        if i % 3 == 0:
            async with client.stream("POST", server.url + "/invocations", json=payload) as response:
                if i % 2:
                    async for _ in response.aiter_lines():
                        break
            return
        response = await client.post(server.url + "/invocations", json=payload)
        assert response.status_code == 200
        if i % 2:
            lines = [json.loads(line) for line in response.text.splitlines()]
            assert len(lines) == num_tokens
            text = lines[-1]["generated_text"]
        else:
            text = response.json()["generated_text"]
        assert text == answer(prompt, num_tokens)

    async def all_of_them() -> None:
        limits = httpx.Limits(max_connections=400)
        async with httpx.AsyncClient(timeout=PATIENCE_S * 2, limits=limits) as client:
            await asyncio.gather(*(one(client, i) for i in range(300)))

    asyncio.run(all_of_them())
    wait_until(lambda: len(service.loop.streams) == 0 and not crowd.acquired)
    assert crowd.violations == []
    wait_until(lambda: service.loop.state[:2] == (0, 0))
    wait_until(lambda: num_descriptors() <= descriptors)
    wait_until(lambda: threading.active_count() <= threads)


@pytest.mark.parametrize("stream", [False, True])
def test_what_does_not_end_within_the_drain_time_gets_its_error(
    backend: ToyBackend, stream: bool
) -> None:
    backend.step_s = 0.05
    application = Application(Model("toy"))
    application.models[0].service = toy_service(backend)
    running = Running(application, drain_s=0.2)
    responses: list[Any] = []

    def ask() -> None:
        payload = body([5, 6], 100, stream=stream)
        responses.append(http.post(running.url + "/invocations", json=payload))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: len(backend.steps) > 3)
    running.close()
    asking.join(PATIENCE_S)
    (response,) = responses
    last = json.loads(response.text.splitlines()[-1])
    assert (last["code"], last["type"]) == (503, "backend_unavailable")
    assert response.status_code == (200 if stream else 503)
    assert stream or int(response.headers["retry-after"]) >= 1
    if stream:
        lines = [json.loads(line) for line in response.text.splitlines()]
        count = sum("token" in line for line in lines)
        assert 0 < last["details"]["generated_tokens"] == count < 100
        assert last["generated_text"] == answer([5, 6], count)
    wait_until(lambda: not backend.acquired)


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_an_answer_with_what_there_is(stream: bool) -> None:
    spec = replace(TOY_SPEC, max_model_len=4096, token_buckets=(4096,))
    application = Application(Model("toy"))
    application.models[0].service = toy_service(
        ToyBackend(spec, step_s=0.005), max_request_seconds=1.0
    )
    running = Running(application)
    parameters = {"details": True, "max_time": 60}
    payload = body([5, 6], 4000, parameters=parameters, stream=stream)
    response = http.post(running.url + "/invocations", json=payload)
    assert response.status_code == 200
    last = json.loads(response.text.splitlines()[-1])
    count = last["details"]["generated_tokens"]
    assert last["details"]["finish_reason"] == "time"
    assert last["generated_text"] == answer([5, 6], count)
    ended = 'djl_neuronx_requests_total{finish_reason="time",model="toy",protocol="lmi"} 1.0'
    assert ended in http.get(running.url + "/metrics").text
    running.close()
    application.models[0].service.close()


def test_the_log_has_the_reason_of_a_refusal(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "djl_python_neuronx")
    wrong = {**body([5]), "parameters": {"temperatur": 1}}
    http.post(server.url + "/invocations", json=wrong, headers={"x-request-id": "mine"})
    (line,) = [one.getMessage() for one in caplog.records if "request_rejected" in one.msg]
    assert line.startswith("request_rejected path='/invocations' request_id=mine code=")
    assert "did you mean 'temperature'" in line
    caplog.clear()
    hostile = f"{server.url}/predictions/x%20code=ok%20request_id=other"
    answer = http.post(hostile, json=wrong, headers={"x-request-id": "a code=ok"})
    (line,) = [one.getMessage() for one in caplog.records if "request_rejected" in one.msg]
    assert shlex.split(line)[1] == "path=/predictions/x code=ok request_id=other"
    assert shlex.split(line)[2] == f"request_id={answer.headers['x-request-id']}"
    caplog.clear()
    http.get(server.url + "/v1/models/none")
    assert "request_rejected" not in caplog.text


def test_a_list_is_answered_by_a_list(server: Running) -> None:
    prompts = [[5, 6], [7], [8, 9], [5, 6]]
    payload = body([5])
    payload["inputs"] = [body(prompt)["inputs"] for prompt in prompts]
    for path in ("/invocations", "/predictions/toy"):
        found = http.post(server.url + path, json=payload, headers={"x-request-id": "mine"})
        assert found.json() == [{"generated_text": answer(prompt)} for prompt in prompts]
        assert found.headers["x-request-id"] == "mine"
    refused = http.post(server.url + "/invocations", json={**payload, "stream": True})
    assert (refused.status_code, "list" in refused.json()["error"]) == (400, True)


def test_a_list_of_a_client_that_goes_away_frees_all_of_its_slots(
    server: Running, backend: ToyBackend
) -> None:
    backend.hang_at = {3}
    backend.step_s = CROSSING_S
    loop = server.application.models[0].service.loop  # type: ignore[union-attr]
    connection = HTTPConnection("127.0.0.1", server.port)
    payload = {**body([5], 100), "inputs": ["a", "b", "c", "d"]}
    connection.request("POST", "/invocations", json.dumps(payload))
    assert backend.hanging.wait(PATIENCE_S)
    assert len(loop.streams) == 4
    connection.close()
    wait_until(lambda: len(loop.streams) == 0)
    backend.resume.set()
    wait_until(lambda: not backend.acquired)
    assert backend.num_steps < 100


def test_a_failure_of_one_of_a_list_is_its_answer(server: Running, backend: ToyBackend) -> None:
    backend.fail_at = {1: RuntimeError("device says no")}
    backend.step_s = CROSSING_S
    payload = {**body([5], 100), "inputs": ["a", "b", "c"]}
    response = http.post(server.url + "/invocations", json=payload)
    assert (response.status_code, response.json()["type"]) == (424, "step_error")
    loop = server.application.models[0].service.loop  # type: ignore[union-attr]
    wait_until(lambda: len(loop.streams) == 0 and not backend.acquired)
    assert backend.num_steps < 100
    assert backend.violations == []


def test_a_body_of_text_is_the_prompt(server: Running) -> None:
    headers = {"content-type": "text/plain; charset=utf-8"}
    found = http.post(server.url + "/invocations", content=b"<5><6>", headers=headers)
    ids = expected([1, 5, 6], 30, stop_ids={2})
    assert found.json() == {"generated_text": TOKENIZER.decode(ids)}


@pytest.mark.parametrize("ends_by", ["length", "eos_token", "stop_id", "stop_sequence", "error"])
def test_a_streams_details_count_what_it_has_sent(
    server: Running, backend: ToyBackend, ends_by: str
) -> None:
    ids = expected([1, 5, 6], 12)
    parameters: dict[str, Any] = {"max_new_tokens": 7}
    prompt = [5, 6]
    if ends_by == "eos_token":  # the shortest prompt after which the toy comes to its end
        tries = ([a, b] for a in range(3, 300) for b in range(3, 300))
        prompt = next(p for p in tries if expected([1, *p], 6, stop_ids={2})[-1] == 2)
        parameters["ignore_eos"] = False
    elif ends_by == "stop_id":
        parameters["stop_token_ids"] = [ids[3]]
    elif ends_by == "stop_sequence":
        parameters["stop"] = f"<{ids[2]}><{ids[3]}>"
    elif ends_by == "error":
        backend.fail_at = {4: RuntimeError("device says no")}
    payload = body(prompt, parameters=parameters, stream=True)
    found = http.post(server.url + "/invocations", json=payload)
    lines = [json.loads(line) for line in found.text.splitlines()]
    tokens = [line["token"] for line in lines if "token" in line]
    assert lines[-1]["details"] == {
        "finish_reason": "eos_token" if ends_by == "stop_id" else ends_by,
        "generated_tokens": len(tokens),
        "inputs": payload["inputs"],
    }
    assert lines[-1]["generated_text"] == "".join(token["text"] for token in tokens)
    known = {"length": 7, "stop_id": 4, "stop_sequence": 4, "error": 4}
    assert len(tokens) == known.get(ends_by, len(tokens)) > 0


def test_a_stream_of_a_device_that_samples_has_details() -> None:
    with serving(ToyBackend(DYNAMIC)) as server:
        found = http.post(server.url + "/invocations", json=body([5, 6], stream=True))
        lines = [json.loads(line) for line in found.text.splitlines()]
    assert {line["token"]["log_prob"] for line in lines} == {None}
    assert lines[-1]["details"]["generated_tokens"] == len(lines) == 5


@pytest.mark.parametrize("include", [False, True])
def test_what_stops_a_text_is_shown_on_request(server: Running, include: bool) -> None:
    ids = expected([1, 5, 6], 12)
    stop = f"<{ids[7]}><{ids[8]}>"
    parameters = {"stop": [stop], "include_stop_str_in_output": include, "details": True}
    for stream in (False, True):
        payload = body([5, 6], 50, parameters=parameters, stream=stream)
        found = http.post(server.url + "/invocations", json=payload)
        last = json.loads(found.text.splitlines()[-1])
        assert last["generated_text"] == TOKENIZER.decode(ids[: 9 if include else 7])
        assert last["details"]["finish_reason"] == "stop_sequence"
        assert last["details"]["generated_tokens"] == 9


def test_gauges_fall_when_the_last_request_is_given_up(
    server: Running, backend: ToyBackend
) -> None:
    backend.hang_at = {3}
    loop = server.application.models[0].service.loop  # type: ignore[union-attr]
    connection = HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/invocations", json.dumps(body([5, 6], 100)))
    assert backend.hanging.wait(PATIENCE_S)
    wait_until(lambda: slots_in_use(server.url) == 1)
    connection.close()
    wait_until(lambda: len(loop.streams) == 0)
    backend.resume.set()
    wait_until(lambda: slots_in_use(server.url) == 0)
    aborted = 'djl_neuronx_requests_total{finish_reason="aborted",model="toy",protocol="lmi"} 1.0'
    assert aborted in http.get(server.url + "/metrics").text


def test_one_id_for_many_requests_is_only_a_label(server: Running, backend: ToyBackend) -> None:
    """Clients send one trace id with all they ask; answers must not find each other by it."""

    async def ask(client: Any, i: int) -> None:
        for turn in range(6):
            prompt = [3 + i, 3 + turn]
            response = await client.post(
                server.url + "/invocations", json=body(prompt, 3), headers={"x-request-id": "trace"}
            )
            assert response.headers["x-request-id"] == "trace"
            assert response.json() == {"generated_text": answer(prompt, 3)}

    async def all_of_them() -> None:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            await asyncio.gather(*(ask(client, i) for i in range(4)))

    asyncio.run(all_of_them())
    odd = http.post(server.url + "/invocations", json=body([5]), headers={"x-request-id": "a b"})
    assert odd.headers["x-request-id"] != "a b"


def test_every_answer_has_an_id_and_the_log_has_that_of_a_refusal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO), serving(api_keys=read_keys(None, "secret")) as server:
        key = {"authorization": "Bearer secret"}
        sent: list[tuple[str, str, Any, int]] = [
            ("POST", "/invocations", {}, 400),
            ("POST", "/v1/chat/completions", {"messages": []}, 400),
            ("POST", "/generate", {"inputs": ""}, 422),
            ("POST", "/v1/completions", {"prompt": "a", "model": "other"}, 404),
            ("GET", "/nowhere", None, 404),
            ("GET", "/invocations", None, 405),
            ("GET", "/v1/models", None, 200),
            ("GET", "/ping", None, 200),
        ]
        for i, (method, path, payload, status) in enumerate(sent):
            for name in ("x-request-id", "x-amzn-sagemaker-inference-id"):
                headers = {**key, name: f"mine-{i}-{name}"}
                found = http.request(method, server.url + path, json=payload, headers=headers)
                assert (found.status_code, found.headers["x-request-id"]) == (status, headers[name])
        refused = http.get(server.url + "/info", headers={"x-request-id": "keyless"})
        assert (refused.status_code, refused.headers["x-request-id"]) == (401, "keyless")
        ids = [http.get(server.url + "/info").headers["x-request-id"] for _ in range(3)]
        odd = http.get(server.url + "/info", headers={"x-request-id": "a b"})
        assert len({*ids, odd.headers["x-request-id"], ""}) == 5
        assert b"\r\nx-request-id: r" in talk(server, b"nonsense\r\n\r\n")
        lines = " ".join(record.getMessage() for record in caplog.records) + " "
    for i, (*_, path, _, status) in enumerate(sent):
        logged = f" request_id=mine-{i}-x-request-id " in lines
        assert logged == (path != "/ping" or status >= 400)
    assert " request_id=keyless " in lines


def test_a_stream_is_not_buffered_by_proxies(server: Running) -> None:
    for path, payload in (
        ("/invocations", body([5, 6], stream=True)),
        ("/v1/completions", {"prompt": "<5>", "stream": True}),
    ):
        headers = http.post(server.url + path, json=payload).headers
        assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")
    assert "cache-control" not in http.post(server.url + "/invocations", json=body([5])).headers


def test_what_the_only_model_may_be_called(server: Running) -> None:
    """A URL as Hugging Face's client in JavaScript sends it; on TGI's routes anything."""
    given = {"inputs": "<5>", "model": "whatever"}
    for path in ("/", "/generate", "/generate_stream"):
        assert http.post(server.url + path, json=given).status_code == 200
    assert http.post(server.url + "/invocations", json=given).status_code == 404
    for url in ("http://127.0.0.1:8080", "https://example.com/v1"):
        chat = {"model": url, "messages": [{"role": "user", "content": "<5>"}]}
        found = http.post(server.url + "/v1/chat/completions", json=chat)
        assert (found.status_code, found.json().get("model")) == (200, "toy")
        found = http.post(server.url + "/invocations", json={**given, "model": url})
        assert found.status_code == 200


def test_json_of_another_type(server: Running) -> None:
    chat = b'{"messages": [{"role": "user", "content": "<5>"}]}'
    for content_type in ("text/plain;charset=UTF-8", "application/x-www-form-urlencoded", None):
        headers = {} if content_type is None else {"content-type": content_type}
        for path, content in (("/v1/chat/completions", chat), ("/generate", b'{"inputs": "<5>"}')):
            found = http.post(server.url + path, content=content, headers=headers)
            assert found.status_code == 200, found.text
    text = {"content-type": "text/plain"}
    for content in (chat, b'{"inputs": "<5>"}', b' {"prompt": "<5>", "max_tokens": 3}'):
        found = http.post(server.url + "/invocations", content=content, headers=text)
        assert (found.status_code, "is text/plain" in found.text) == (400, True)
    for content in (b'{"a": 1}', b"{", b"[5]", b"{" * 50_000):
        found = http.post(server.url + "/invocations", content=content, headers=text)
        assert found.status_code in {200, 413}, content[:9]
    broken = http.post(server.url + "/v1/chat/completions", content=b"<5>", headers=text)
    assert "its Content-Type is 'text/plain'" in broken.json()["error"]["message"]


def test_a_port_in_use_is_said_and_ends_the_process(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = serve_process(tmp_path, port)
        _, log = process.communicate(timeout=PATIENCE_S)
    (line,) = log.splitlines()
    assert f" ERROR djl_python_neuronx.server.process not_listening --port {port} " in line
    assert process.returncode == 1
    assert "address already in use; end what uses the port" in log


@pytest.mark.parametrize("host", ["nosuchhost.invalid", "1.2.3.4"])
def test_a_host_that_is_not_this_machines_is_named_and_nothing_is_loaded(
    tmp_path: Path, host: str
) -> None:
    """The folder has no model, which a load would report."""
    process = serve_process(tmp_path, 8080, "--host", host)
    _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    (line,) = log.splitlines()
    assert f" ERROR djl_python_neuronx.server.process not_listening --host {host}: " in line
    assert "--port" not in line


def test_a_warm_up_that_fails_frees_the_device_and_says_what_it_was(backend: ToyBackend) -> None:
    backend.fail_at = {2: RuntimeError("no graph")}
    with pytest.raises(BackendError, match=r"first run of every graph failed.*no graph"):
        toy_service(backend, warm_up=True)
    assert backend.closed
    short = ToyBackend()
    short.fail_at = {1: DeviceMemoryError("no memory")}
    with pytest.raises(DeviceMemoryError):  # its 507 is what DJL Serving takes for out of memory
        toy_service(short, warm_up=True)
    assert short.closed


def serve_process(folder: Path, port: int, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "djl_python_neuronx.cli", "serve", str(folder)]
    return subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port), *arguments],
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as number:
        yield number


def test_a_folder_without_a_model_ends_the_process_with_the_reason(
    tmp_path: Path, port: int
) -> None:
    process = serve_process(tmp_path, port)
    _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert str(tmp_path) in log
    assert "config.json" in log
    assert "Traceback" not in log


def test_unknown_options_end_the_process_with_all_of_them(tmp_path: Path, port: int) -> None:
    (tmp_path / "serving.properties").write_text(
        "option.tensor_paralel_degree=2\noption.dtype=fp13\n"
    )
    process = serve_process(tmp_path, port, "-o", "n_positions=many")
    _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    for said in (
        "tensor_paralel_degree",
        "tensor_parallel_degree",
        "fp13",
        "n_positions",
        "command line",
    ):
        assert said in log
    assert "Traceback" not in log


@pytest.fixture
def quick_start(port: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process that `make serve` starts, and its URL."""
    pytest.importorskip("torch", reason="needs the `cpu` extra")
    options = ("-o", "max_rolling_batch_size=16", "--log-level", "warning")
    process = serve_process(TINY_LLAMA, port, *options)
    yield process, f"http://127.0.0.1:{port}"
    process.kill()
    process.communicate()


def test_the_quick_start(quick_start: tuple[subprocess.Popen[str], str]) -> None:
    """300 known answers at once, a third given up, then SIGTERM drains."""
    process, url = quick_start
    statuses = set()
    deadline = time.monotonic() + PATIENCE_S
    while 200 not in statuses:
        assert process.poll() is None
        assert time.monotonic() < deadline
        try:
            statuses.add(http.get(url + "/ping").status_code)
        except httpx.ConnectError:
            time.sleep(0.02)
    assert statuses <= {200, 503}
    descriptors = num_descriptors(process.pid)
    asyncio.run(known_answers(url))
    wait_until(lambda: slots_in_use(url) == 0)
    # Workers of the tokenizer that are idle are kept.
    most = descriptors + 1 + IDLE_WORKERS
    wait_until(lambda: num_descriptors(process.pid) <= most)
    asyncio.run(drains(url, process))
    assert process.wait(PATIENCE_S) == 0


async def known_answers(url: str) -> None:
    async def one(client: Any, i: int, check: dict[str, Any]) -> None:
        payload = {
            "inputs": check["prompt"],
            "parameters": {"max_new_tokens": check["max_new_tokens"]},
            "stream": i % 2 == 1,
        }
        if i % 3 == 0:
            try:
                await asyncio.wait_for(
                    client.post(url + "/invocations", json=payload), 0.05 + i / 300
                )
            except (TimeoutError, asyncio.TimeoutError):
                return
            return
        response = await client.post(url + "/invocations", json=payload)
        assert response.status_code == 200, response.text
        text = json.loads(response.text.splitlines()[-1])["generated_text"]
        assert text == check["completion"], check["prompt"]

    async with httpx.AsyncClient(
        timeout=PATIENCE_S * 2, limits=httpx.Limits(max_connections=400)
    ) as client:
        await asyncio.gather(*(one(client, i, check) for i, check in enumerate(checks()[:300])))


async def drains(url: str, process: subprocess.Popen[str]) -> None:
    """A request that runs when SIGTERM comes is answered in full."""
    check = max(checks(), key=lambda check: len(check["completion"]))
    payload = {
        "inputs": check["prompt"],
        "parameters": {"max_new_tokens": check["max_new_tokens"]},
        "stream": True,
    }
    async with (
        httpx.AsyncClient(timeout=PATIENCE_S) as client,
        client.stream("POST", url + "/invocations", json=payload) as response,
    ):
        lines = response.aiter_lines()
        last = await lines.__anext__()
        process.send_signal(signal.SIGTERM)
        async for line in lines:
            last = line
    assert json.loads(last)["generated_text"] == check["completion"]
