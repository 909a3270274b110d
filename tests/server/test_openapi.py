"""The OpenAPI document, and the server's answers by it: to what the document allows, and to what it does not."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the `server` extra")
schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")

import jsonschema_rs  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    negative_data_rejection,
    positive_data_acceptance,
    response_schema_conformance,
)

from djl_python_neuronx.server import app, openapi  # noqa: E402
from djl_python_neuronx.server.app import Application, create_app  # noqa: E402
from djl_python_neuronx.server.http import PROBES  # noqa: E402
from djl_python_neuronx.server.keys import read_keys  # noqa: E402
from djl_python_neuronx.server.models import Model  # noqa: E402
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend  # noqa: E402
from tests.doubles.toy_service import toy_service  # noqa: E402
from tests.server.running import Running, http, serving  # noqa: E402

NIGHTLY_EXAMPLES = 300
EXAMPLES = {GenerationMode.POSITIVE: 30, GenerationMode.NEGATIVE: 10}
STREAMS = {"application/jsonlines": "\n", "text/event-stream": "\n\n"}
"""Media types of streams, with what ends a part."""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    application = Application(Model("toy"))
    application.models[0].service = toy_service(ToyBackend(replace(TOY_SPEC, max_model_len=64)))
    running = Running(application)
    yield running
    running.close()
    application.models[0].service.close()


def strict(document: dict[str, Any]) -> dict[str, Any]:
    """The document with schemas that allow only what they name.

    The schemas of streams are left to `check_stream`: schemathesis takes events for values, as in OpenAPI 3.2.
    """
    for operations in document["paths"].values():
        for operation in operations.values():
            for media_type, content in operation["responses"]["200"]["content"].items():
                if media_type in STREAMS:
                    content["schema"] = {"x-parts": content["schema"]["contentSchema"]}
    for schema in document["components"]["schemas"].values():
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
    return document


@pytest.fixture(scope="module")
def document(server: Running) -> dict[str, Any]:
    return strict(http.get(server.url + "/openapi.json").json())


def test_it_has_each_route(document: dict[str, Any]) -> None:
    routes = create_app(Application(Model("toy"))).routes
    assert document["paths"].keys() == {route.path_format for route in routes}
    schemathesis.openapi.from_dict(document).validate()


def test_one_text_is_no_stream(document: dict[str, Any]) -> None:
    (content,) = document["paths"]["/metrics"]["get"]["responses"]["200"]["content"].items()
    assert content == ("text/plain", {"schema": {"type": "string"}})


def test_each_body_has_a_schema(document: dict[str, Any]) -> None:
    for operations in document["paths"].values():
        for method, operation in operations.items():
            assert ("requestBody" in operation) == (method == "post")
            assert operation["summary"]
            requests = [operation["requestBody"]] if method == "post" else []
            for body in [*requests, *operation["responses"].values()]:
                assert body["content"]
                for media in body["content"].values():
                    schema = media["schema"]
                    assert schema.get("contentSchema", {"items": schema})["items"]


def test_defaults_are_values_of_their_parameters(document: dict[str, Any]) -> None:
    def with_default(schema: Any) -> Iterator[dict[str, Any]]:
        if isinstance(schema, dict) and "default" in schema:
            yield schema
        if isinstance(schema, (dict, list)):
            for inner in schema.values() if isinstance(schema, dict) else schema:
                yield from with_default(inner)

    found = list(with_default(document["components"]["schemas"]))
    assert found
    for schema in found:
        jsonschema_rs.validate({**schema, "components": document["components"]}, schema["default"])


def test_it_has_the_statuses_of_each_error(document: dict[str, Any]) -> None:
    responses = document["paths"]["/invocations"]["post"]["responses"]
    assert {"200", "400", "404", "408", "413", "424", "500", "503", "507"} <= responses.keys()
    assert document["paths"]["/ping"]["get"]["responses"].keys() == {"200", "500", "503"}
    assert "404" in document["paths"]["/v1/models/{model}"]["get"]["responses"]


def test_routes_other_than_probes_need_a_key_if_there_are_keys(document: dict[str, Any]) -> None:
    application = Application(Model("toy"))
    running = Running(application, api_keys=read_keys(None, "secret"))
    found = http.get(
        running.url + "/openapi.json", headers={"authorization": "Bearer secret"}
    ).json()
    running.close()
    schemathesis.openapi.from_dict(found).validate()
    assert "security" not in json.dumps(document["paths"])
    for path, operations in found["paths"].items():
        for operation in operations.values():
            needs_key = path not in PROBES
            assert ("security" in operation) == ("401" in operation["responses"]) == needs_key


def test_it_is_made_once_and_not_in_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def document(*arguments: Any) -> bytes:
        made.append(threading.current_thread().name)
        return openapi.document(*arguments)

    monkeypatch.setattr(app, "document", document)
    with serving() as server:
        first, second = (http.get(server.url + "/openapi.json").content for _ in range(2))
    assert first == second
    (thread,) = made
    assert thread.startswith("djl-neuronx-server")


def parts(text: str, media_type: str) -> list[Any]:
    """The values of a stream."""
    found = [part for part in text.split(STREAMS[media_type]) if part]
    texts = [re.sub(r"^(event: [\w.]+\n)?data: ", "", part) for part in found]
    return [json.loads(part) for part in texts if part != "[DONE]"]


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_every_answer_is_one_of_the_document(
    server: Running, document: dict[str, Any], mode: GenerationMode, pytestconfig: pytest.Config
) -> None:
    num_examples = NIGHTLY_EXAMPLES if pytestconfig.getoption("nightly") else EXAMPLES[mode]
    seen: set[tuple[int, str]] = set()
    # Without bodies and parameters there is nothing that the document does not allow.
    operations = [
        found.ok() for found in schemathesis.openapi.from_dict(document).get_all_operations()
    ]
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue

        @settings(
            max_examples=num_examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode), stream=st.booleans())
        def ask(case: Any, stream: bool) -> None:
            if "model" in case.path_parameters:
                case.path_parameters["model"] = "toy"
            if isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = "toy"
            if stream and isinstance(case.body, dict) and streams(document, case.operation):
                case.body.setdefault("stream", True)  # by chance alone it is rare
            answer = case.call(base_url=server.url)
            seen.add((answer.status_code, answer.headers["content-type"][0].partition(";")[0]))
            # What the document allows may still be refused: by its length, or for another parameter. What it does not
            # allow may have been the name of the model alone, which is replaced above.
            excluded = [positive_data_acceptance, negative_data_rejection]
            if "text/event-stream" in answer.headers["content-type"][0]:
                excluded.append(response_schema_conformance)  # it takes OpenAPI 3.2's `itemSchema`
            case.validate_response(answer, excluded_checks=excluded)
            check_stream(document, case, answer)

        ask()
    assert (400, "application/json") in seen
    if mode is GenerationMode.POSITIVE:
        assert {(200, "application/json"), (200, "application/jsonlines")} <= seen


def streams(document: dict[str, Any], operation: Any) -> dict[str, Any]:
    """The media types in which an operation answers by a stream."""
    responses = document["paths"][operation.path][operation.method.lower()]["responses"]
    content = responses["200"]["content"]
    return {name: found for name, found in content.items() if name in STREAMS}


def check_stream(document: dict[str, Any], case: Any, answer: Any) -> None:
    """Each part of a stream is valid by the `contentSchema` of its media type."""
    media_type = answer.headers["content-type"][0].partition(";")[0]
    if media_type not in STREAMS or answer.status_code != 200:
        return
    schema = streams(document, case.operation)[media_type]["schema"]["x-parts"]
    found = parts(answer.text, media_type)
    assert found
    jsonschema_rs.validate({**schema, "components": document["components"]}, found)
