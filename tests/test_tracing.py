"""Traces of requests, as a collector of OpenTelemetry's protocol gets them."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from djl_python_neuronx import cli
from djl_python_neuronx.engine.streams import BlockingQueue
from djl_python_neuronx.errors import ConfigError, StepError
from djl_python_neuronx.protocol import djl
from djl_python_neuronx.protocol.djl_doors import RollingBatchDoor
from djl_python_neuronx.service import Service
from djl_python_neuronx.tracing import exporter_class
from djl_python_neuronx.types import GenerationRequest
from tests.doubles import djl_engine_double
from tests.doubles.djl_engine_double import Input
from tests.doubles.djl_peer import decode_record
from tests.doubles.toy_backend import TOY_SPEC, ToyBackend
from tests.doubles.toy_service import toy_service
from tests.processes import PATIENCE_S, held_port, wait_until
from tests.server.running import TINY_LLAMA, body, http, serving

ROOT = Path(__file__).parents[1]
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}


@dataclass
class Span:
    """A span with its attributes as plain values."""

    raw: Any
    resource: dict[str, Any]

    @property
    def name(self) -> str:
        return self.raw.name

    @property
    def ids(self) -> tuple[str, str]:
        return self.raw.trace_id.hex(), self.raw.parent_span_id.hex()

    @property
    def times(self) -> tuple[int, int]:
        return self.raw.start_time_unix_nano, self.raw.end_time_unix_nano

    @property
    def attributes(self) -> dict[str, Any]:
        return plain(self.raw.attributes)


def plain(attributes: Any) -> dict[str, Any]:
    def value(one: Any) -> Any:
        kind = one.WhichOneof("value")
        found = getattr(one, kind)
        return [value(each) for each in found.values] if kind == "array_value" else found

    return {one.key: value(one.value) for one in attributes}


class Collector:
    """An OTLP collector on a free port."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["content-length"]))
                collector.headers.append(self.headers)
                collector.bodies.append(content)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def spans(self) -> list[Span]:
        return [
            Span(span, plain(group.resource.attributes))
            for content in self.bodies
            for group in ExportTraceServiceRequest.FromString(content).resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]

    def tree(self) -> tuple[Span, dict[str, list[Span]]]:
        """The only span of a server, and all others by the name of their parent."""
        spans = self.spans
        names = {span.raw.span_id: span.name for span in spans}
        below: dict[str, list[Span]] = {}
        roots = [span for span in spans if span.raw.kind == span.raw.SPAN_KIND_SERVER]
        for span in sorted(spans, key=lambda one: one.times):
            if span not in roots:
                below.setdefault(names[span.raw.parent_span_id], []).append(span)
        (root,) = roots
        return root, below

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=of-the-operator")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    collector = Collector()
    yield collector
    collector.close()


def nested(parent: Span, children: list[Span]) -> bool:
    """The children lie in their parent, each from the end of the one before."""
    (start, _), (_, end) = children[0].times, children[-1].times
    joined = all(a.times[1] == b.times[0] for a, b in pairwise(children))
    return parent.times[0] <= start and end <= parent.times[1] and joined


def run(service: Service, *requests: GenerationRequest) -> None:
    inbox = BlockingQueue()
    service.loop.submit_all(service.loop.prepare(*requests), inbox)
    left = {one.request_id for one in requests}
    while left:
        left -= {delta.request_id for delta in inbox.drain(PATIENCE_S) if delta.finished}


def test_a_request_is_a_span_with_its_phases_below_the_clients(collector: Collector) -> None:
    backend = ToyBackend(replace(TOY_SPEC, num_slots=1))
    backend.hang_at = {0}
    begun_ns = time.time_ns()
    with serving(backend, otlp_traces_endpoint=collector.url) as server:
        loop = server.application.models[0].service.loop  # type: ignore[union-attr]
        chat = {
            "messages": [{"role": "user", "content": "<77><78>"}],
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
            "stop": ["a secret stop"],
            "user": "somebody",
            "stream": True,
        }
        headers = {**SAMPLED, "x-request-id": "mine", "authorization": "Bearer a-secret-key"}
        url = server.url + "/v1/chat/completions"
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(http.post, url, json=chat, headers=headers)
            assert backend.hanging.wait(PATIENCE_S)
            wait_until(lambda: loop.streams[0].running)
            prefilling_ns = time.time_ns()
            backend.resume.set()
            assert answer.result().status_code == 200
        wait_until(lambda: collector.bodies)
    ended_ns = time.time_ns()
    root, below = collector.tree()
    assert (root.name, root.ids, root.raw.trace_state) == ("chat toy", (TRACE, PARENT), "vendor=1")
    assert below.keys() == {"chat toy"}
    phases = below["chat toy"]
    assert [one.name for one in phases] == ["queue", "prefill", "decode"]
    assert {one.ids[0] for one in phases} == {TRACE}
    assert nested(root, phases)
    queue, prefill, decode = phases
    assert begun_ns <= root.times[0]
    assert queue.times[1] <= prefilling_ns <= prefill.times[1]
    assert decode.times[0] < decode.times[1] <= ended_ns
    assert root.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "djl_neuronx",
        "gen_ai.request.model": "toy",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "djl_neuronx.copy": 0,
        "djl_neuronx.resumed": 0,
        "djl_neuronx.protocol": "openai_chat",
        "djl_neuronx.request_id": "mine",
    }
    assert root.raw.status.code == root.raw.status.STATUS_CODE_UNSET
    # What leaves the machine: no prompt, text, stop string, user or key.
    for secret in (b"<7", b"secret", b"somebody"):
        assert not any(secret in content for content in collector.bodies)
    assert {one["x-token"] for one in collector.headers} == {"of-the-operator"}
    assert root.resource["service.name"] == "djl-neuronx"
    assert root.resource["deployment.environment"] == "test"


def test_the_clients_decision_and_the_sdks_sampler_hold(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a parent the sampler decides, here against a trace, with one the parent's flag does."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-1")
    with serving(otlp_traces_endpoint=collector.url) as server:
        unsampled = {"traceparent": f"00-{'1' * 32}-{PARENT}-00"}
        broken = {"traceparent": "00-no-trace-01"}
        for headers in ({}, unsampled, broken, SAMPLED):
            found = http.post(server.url + "/invocations", json=body([5, 6]), headers=headers)
            assert found.status_code == 200
        wait_until(lambda: collector.bodies)
    root, _ = collector.tree()
    assert (root.name, root.ids) == ("text_completion toy", (TRACE, PARENT))
    assert root.resource["service.name"] == "chat-1"


def test_the_first_sequences_of_one_request_have_phases_of_their_own(collector: Collector) -> None:
    with serving(otlp_traces_endpoint=collector.url) as server:
        completion = {"prompt": ["<5><6>", "<7>"], "n": 5, "max_tokens": 3, "ignore_eos": True}
        url = server.url + "/v1/completions"
        answer = http.post(url, json=completion, headers=SAMPLED).json()
        wait_until(lambda: len(collector.spans) >= 1 + 3 * 8)
    root, below = collector.tree()
    # As the answer counts them: each prompt once.
    assert root.attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"] == 5
    assert root.attributes["gen_ai.usage.output_tokens"] == 30
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"] * 10
    assert len(below[root.name]) == 3 * 8
    for i in range(8):
        phases = [one for one in below[root.name] if one.attributes["djl_neuronx.sequence"] == i]
        assert [one.name for one in phases] == ["queue", "prefill", "decode"]
        assert nested(root, phases)


def test_spans_end_however_a_request_does(collector: Collector) -> None:
    """At an error of the device, at the client's leave, and at its deadline, running and waiting."""
    backend = ToyBackend(replace(TOY_SPEC, num_slots=1))
    backend.fail_at = {1: StepError("a text that nobody shall see")}
    backend.hang_at = {3}
    with serving(backend, otlp_traces_endpoint=collector.url) as server:
        http.post(server.url + "/invocations", json=body([5, 6], 4))
        wait_until(lambda: len(collector.spans) == 4)
        connection = HTTPConnection("127.0.0.1", server.port)
        connection.request("POST", "/invocations", json.dumps(body([5, 6], 100)))
        assert backend.hanging.wait(PATIENCE_S)
        late = body([8, 9], 4, parameters={"max_time": 0.05})
        assert http.post(server.url + "/invocations", json=late).status_code == 408
        connection.close()
        wait_until(lambda: len(collector.spans) == 4 + 2 + 4)
        backend.resume.set()
        slow = body([8, 9], 100, parameters={"max_time": 0.5})
        backend.step_s = 0.05
        assert http.post(server.url + "/invocations", json=slow).status_code == 200
        wait_until(lambda: len(collector.spans) == 10 + 4)
    roots = sorted(
        (one for one in collector.spans if one.name == "text_completion toy"),
        key=lambda one: one.times,
    )
    statuses = [
        (
            one.attributes["gen_ai.response.finish_reasons"],
            one.attributes.get("error.type"),
            one.raw.status.code == one.raw.status.STATUS_CODE_ERROR,
        )
        for one in roots
    ]
    assert statuses == [
        (["error"], "step_error", True),
        (["aborted"], None, False),
        (["error"], "request_timeout", True),
        (["time"], None, False),
    ]
    assert not any(b"nobody" in content for content in collector.bodies)
    waited = [one for one in collector.spans if one.raw.parent_span_id == roots[2].raw.span_id]
    assert [one.name for one in waited] == ["queue"]


def test_a_request_that_another_engine_goes_on_with_is_one_trace(collector: Collector) -> None:
    first, second = (ToyBackend(TOY_SPEC) for _ in range(2))
    fatal = StepError("the device is lost")
    fatal.fatal = True
    first.fail_at = {3: fatal}
    service = toy_service(first, second, otlp_traces_endpoint=collector.url)
    try:
        run(service, GenerationRequest("a", [5], max_new_tokens=8, ignore_eos=True, trace=SAMPLED))
    finally:
        service.close()
    root, below = collector.tree()
    assert root.ids == (TRACE, PARENT)
    assert [one.name for one in below[root.name]] == ["queue", "prefill", "decode"]
    assert nested(root, below[root.name])
    assert (root.attributes["djl_neuronx.copy"], root.attributes["djl_neuronx.resumed"]) == (1, 1)
    (event,) = root.raw.events
    assert event.name == "resumed"
    decode = below[root.name][-1]
    assert decode.times[0] < event.time_unix_nano < decode.times[1]


def test_a_request_ends_with_the_last_engine(collector: Collector) -> None:
    backend = ToyBackend(TOY_SPEC)
    fatal = StepError("the device is lost")
    fatal.fatal = True
    backend.fail_at = {3: fatal}
    service = toy_service(backend, otlp_traces_endpoint=collector.url)
    try:
        run(service, GenerationRequest("a", [5], max_new_tokens=8, ignore_eos=True))
    finally:
        service.close()
    root, below = collector.tree()
    assert [one.name for one in below[root.name]] == ["queue", "prefill", "decode"]
    assert root.raw.status.code == root.raw.status.STATUS_CODE_ERROR
    assert root.raw.status.message == root.attributes["error.type"] == "step_error"
    assert root.attributes["gen_ai.usage.output_tokens"] == 3


def test_headers_come_with_the_request_under_djl_serving(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "djl_python", djl_engine_double.installed())
    monkeypatch.setattr(djl, "ADMIT_S", 1.0)
    service = toy_service(ToyBackend(TOY_SPEC), otlp_traces_endpoint=collector.url)
    door = RollingBatchDoor(service, 60.0)
    try:
        call = Input()
        headers = {"requestId": "r", "Traceparent": SAMPLED["traceparent"]}
        call.properties |= {"batch_size": "1"}
        call.properties |= {f"batch_000.{name}": value for name, value in headers.items()}
        call.content.add("batch_000.data", bytearray(json.dumps(body([5, 6], 2)).encode()))
        call.content.add("batch_000.seed", bytearray(b"7"))
        while True:
            (record,) = map(decode_record, door.answer(call).content.get_values())
            if record["last"] == "true":
                break
            call = Input()
            call.properties["batch_size"] = "1"
            call.content.add("batch_000.data", bytearray())
    finally:
        door.close()
        service.close()
    root, _ = collector.tree()
    assert (root.ids, root.attributes["djl_neuronx.protocol"]) == ((TRACE, PARENT), "lmi")


def test_the_last_spans_are_exported_at_the_end(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    with serving(otlp_traces_endpoint=collector.url) as server:
        http.post(server.url + "/invocations", json=body([5, 6]))
        assert collector.bodies == []
        server.close()
        assert len(collector.spans) == 4


def test_a_collector_that_is_down_costs_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "5")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setattr("djl_python_neuronx.tracing.FLUSH_S", 0.0)
    with held_port() as port, caplog.at_level(logging.INFO, "djl_python_neuronx"):
        service = toy_service(
            ToyBackend(TOY_SPEC), otlp_traces_endpoint=f"http://127.0.0.1:{port}/v1/traces"
        )

        def warnings() -> list[str]:
            found = [one.getMessage() for one in caplog.records]
            return [one for one in found if "traces_not_exported" in one]

        try:
            for i in range(3):
                run(service, GenerationRequest(f"a{i}", [5], max_new_tokens=2, ignore_eos=True))
                wait_until(warnings)
        finally:
            service.close()
    assert len(warnings()) == 1


HEADERS = {
    # A value of OTEL_EXPORTER_OTLP_HEADERS to the reason in the log.
    "Bearer sk-SECRET": "Header format invalid",
    "api key=sk-SECRET": "Header format invalid",
    "authorization=Bearer%20sk-%0ASECRET": "reason: InvalidHeader",
}


@pytest.mark.parametrize("value", HEADERS)
def test_no_header_for_the_collector_is_in_the_log(
    collector: Collector,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", value)
    service = toy_service(ToyBackend(TOY_SPEC), otlp_traces_endpoint=collector.url)
    try:
        # A client's header, which the SDK reports too, takes no other warning's place.
        trace = {**SAMPLED, "tracestate": "SECRET=,=SECRET"}
        run(service, GenerationRequest("a", [5], max_new_tokens=2, ignore_eos=True, trace=trace))
        wait_until(lambda: "traces_not_exported" in caplog.text)
    finally:
        service.close()
    assert HEADERS[value] in caplog.text
    assert "SECRET" not in caplog.text


def test_without_the_option_nothing_is_imported() -> None:
    code = """if True:
        import sys
        from djl_python_neuronx.engine.streams import BlockingQueue
        from djl_python_neuronx.types import GenerationRequest
        from tests.doubles.toy_backend import ToyBackend
        from tests.doubles.toy_service import toy_service
        service, inbox = toy_service(ToyBackend()), BlockingQueue()
        service.loop.submit(GenerationRequest("a", [5], max_new_tokens=2, ignore_eos=True), inbox)
        while not any(delta.finished for delta in inbox.drain(60.0)):
            pass
        service.close()
        print(sorted(name for name in sys.modules if name.startswith("opentelemetry")))
    """
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (found.stdout, found.returncode) == ("[]\n", 0), found.stderr


URL = "http://127.0.0.1:9/v1/traces"
PACKAGES = {
    "sdk.trace.export": r"pip install 'djl-python-neuronx\[otel\]'",
    "exporter.otlp.proto.http.trace_exporter": r"pip install 'djl-python-neuronx\[otel\]'",
    "exporter.otlp.proto.grpc.trace_exporter": "pip install 'opentelemetry-exporter-otlp-proto-grpc'",
}


@pytest.mark.parametrize("missing", PACKAGES)
def test_a_missing_package_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"opentelemetry.{missing}", None)
    environ = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"} if "grpc" in missing else {}
    with pytest.raises(ConfigError, match=PACKAGES[missing]):
        exporter_class(environ)


def test_the_variable_of_traces_goes_before_the_one_of_all_signals() -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json",
    }
    message = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is 'http/json'; expected http/protobuf or grpc"
    with pytest.raises(ConfigError, match=message):
        exporter_class(environ)


def test_check_and_start_name_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["-o", f"otlp_traces_endpoint={URL}"]
    assert cli.main(["check", str(TINY_LLAMA), *options]) == 0
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    assert cli.main(["check", str(TINY_LLAMA), *options]) == 1
    assert "pip install 'djl-python-neuronx[otel]'" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ConfigError, match=r"pip install 'djl-python-neuronx\[otel\]'"):
        Service.load(None, TINY_LLAMA, environ={}, overrides={"otlp_traces_endpoint": URL})
