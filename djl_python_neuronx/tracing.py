"""OpenTelemetry's traces (`option.otlp_traces_endpoint`): a span for each request, made when it has ended.

Nothing of OpenTelemetry is imported without the option.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from djl_python_neuronx.engine.streams import Stream
from djl_python_neuronx.errors import ConfigError, ServingError
from djl_python_neuronx.types import GenerationRequest

if TYPE_CHECKING:
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

FLUSH_S = 2.0
"""Longest time at the end to export what is left."""
WARNING_S = 60.0
"""Least time between two warnings of the exporter."""
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_COMPLETIONS = {"lmi", "tgi", "plain", "bedrock", "openai_completion"}
"""Protocols that complete a text. All others answer a chat."""
_LARGEST = 2**31 - 1
"""A client may send numbers that no attribute can hold, and its batch of spans would be lost."""
_SAMPLING = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty")


def exporter_class(endpoint: str, environ: Mapping[str, str]) -> Any:  # noqa: ANN401
    """The exporter for the protocol that OpenTelemetry's variables choose.

    Raises:
        ConfigError: there is no such protocol, its package is not installed, or the endpoint does not fit it.
    """
    name = next((one for one in _PROTOCOLS if environ.get(one)), _PROTOCOLS[0])
    protocol = environ.get(name) or "http/protobuf"
    packages = {
        "http/protobuf": "djl-python-neuronx[otel]",
        "grpc": "opentelemetry-exporter-otlp-proto-grpc",
    }
    if protocol not in packages:
        msg = f"{name} is {protocol!r}; expected http/protobuf or grpc"
        raise ConfigError(msg)
    if protocol != "grpc" and urlsplit(endpoint).path in {"", "/"}:
        msg = (
            f"option.otlp_traces_endpoint is {endpoint}, without a path; expected one such as "
            f"http://collector:4318/v1/traces, or {name}=grpc for a port of gRPC"
        )
        raise ConfigError(msg)
    try:
        import_module("opentelemetry.sdk.trace.export")
        module = f"opentelemetry.exporter.otlp.proto.{protocol.partition('/')[0]}.trace_exporter"
        return import_module(module).OTLPSpanExporter
    except ImportError as error:
        msg = (
            f"option.otlp_traces_endpoint needs {error.name or 'opentelemetry-sdk'}, which is not installed: "
            f"pip install '{packages[protocol]}'"
        )
        raise ConfigError(msg) from error


class _Part(NamedTuple):
    """One sequence of a request, once it has ended."""

    request: GenerationRequest
    submitted_s: float
    slots_s: Sequence[float]
    first_token_s: float | None
    end_s: float
    reason: str
    error: ServingError | None
    num_tokens: int
    num_cached: int
    copy: int | None

    @property
    def facts(self) -> dict[str, Any]:
        """Attributes of a sequence; none has texts or keys."""
        facts: dict[str, Any] = {
            "gen_ai.response.finish_reasons": [self.reason],
            "gen_ai.usage.output_tokens": self.num_tokens,
            "djl_neuronx.resumed": max(0, len(self.slots_s) - 1),
        }
        if self.copy is not None:
            facts["djl_neuronx.copy"] = self.copy
        if self.error is not None:
            facts["error.type"] = self.error.code
        return facts


class Tracing:
    """Makes the spans of requests that have ended, and exports them on a thread of the SDK."""

    def __init__(self, endpoint: str, model: str, environ: Mapping[str, str]) -> None:
        """Start the thread. The SDK reads its own variables, such as OTEL_TRACES_SAMPLER.

        Raises:
            ConfigError: see `exporter_class`.
        """
        exporter = exporter_class(endpoint, environ)
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        reports = logging.getLogger("opentelemetry")
        reports.handlers, reports.propagate = [_Seldom()], False
        resource = Resource.create()
        if str(resource.attributes.get("service.name")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "djl-neuronx"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("djl_python_neuronx")
        self._model = model
        self._lock = threading.Lock()
        self._closing: threading.Thread | None = None

    def end(self, stream: Stream, reason: str, error: ServingError | None, end_s: float) -> None:
        """Note the end of a request, and make the spans of all that are answered together when the last one ends."""
        part = _Part(
            stream.request,
            stream.submitted_s,
            stream.slots_s,
            stream.first_token_s,
            end_s,
            reason,
            error,
            stream.text.num_generated,
            stream.text.num_cached,
            stream.copy,
        )
        with self._lock:
            stream.parts[stream.request.request_id] = part
            ended = all(stream.parts.values())
        if ended:
            self._make([*stream.parts.values()])

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Export what is left, for at most so long. A second call does nothing."""
        if self._closing is None:
            self._closing = threading.Thread(target=self._provider.shutdown, daemon=True)
            self._closing.start()
            self._closing.join(timeout_s)

    def _make(self, parts: list[_Part]) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        first, offset_s = parts[0].request, time.time() - time.monotonic()
        operation = "text_completion" if first.protocol in _COMPLETIONS else "chat"
        root = self._tracer.start_span(
            f"{operation} {self._model}",
            TraceContextTextMapPropagator().extract(first.trace),
            SpanKind.SERVER,
            {"gen_ai.operation.name": operation, **self._facts(parts)},
            start_time=_ns(first.arrived_s + offset_s),
        )
        if root.is_recording():
            for part in parts:
                span = root
                if len(parts) > 1:
                    span = self._tracer.start_span(
                        "sequence",
                        set_span_in_context(root),
                        attributes=part.facts,
                        start_time=_ns(part.submitted_s + offset_s),
                    )
                self._fill(span, part, offset_s)
                if span is not root:
                    span.end(_ns(part.end_s + offset_s))
            if error := next((one.error for one in parts if one.error is not None), None):
                _fail(root, error)
        root.end(_ns(max(one.end_s for one in parts) + offset_s))

    def _facts(self, parts: Sequence[_Part]) -> dict[str, Any]:
        """Attributes of the request as a whole."""
        first = parts[0].request
        prompts = {id(one.request.prompt_ids): len(one.request.prompt_ids) for one in parts}
        given = {name: getattr(first.sampling, name) for name in _SAMPLING}
        if first.max_new_tokens is not None:
            given["max_tokens"] = first.max_new_tokens
        return {
            **parts[0].facts,
            **{f"gen_ai.request.{name}": min(value, _LARGEST) for name, value in given.items()},
            "gen_ai.provider.name": "djl_neuronx",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": first.request_id,
            "gen_ai.response.finish_reasons": [one.reason for one in parts],
            "gen_ai.usage.input_tokens": sum(prompts.values()),
            "gen_ai.usage.output_tokens": sum(one.num_tokens for one in parts),
            "gen_ai.usage.cache_read.input_tokens": parts[0].num_cached,
            "djl_neuronx.request_id": first.label,
            "djl_neuronx.protocol": first.protocol,
        }

    def _fill(self, span: Span, part: _Part, offset_s: float) -> None:
        """Add a sequence's phases below its span, as far as it came, and an event for each time it was resumed."""
        from opentelemetry.trace import set_span_in_context

        starts = [part.submitted_s, *part.slots_s[:1]]
        if part.first_token_s is not None:
            starts.append(part.first_token_s)
        for name, start_s, end_s in zip(
            ("queue", "prefill", "decode"), starts, [*starts[1:], part.end_s], strict=False
        ):
            phase = self._tracer.start_span(
                name, set_span_in_context(span), start_time=_ns(start_s + offset_s)
            )
            phase.end(_ns(end_s + offset_s))
        for resumed_s in part.slots_s[1:]:
            span.add_event("resumed", timestamp=_ns(resumed_s + offset_s))
        if part.error is not None:
            _fail(span, part.error)


class _Seldom(logging.Handler):
    """Logs a warning for what OpenTelemetry reports, such as a collector that is down, and not each time."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._next_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + WARNING_S
            logger.warning("traces_not_exported reason=%r", record.getMessage())


def _fail(span: Span, error: ServingError) -> None:
    from opentelemetry.trace import Status, StatusCode

    # No message: one may name what a client has sent.
    span.set_status(Status(StatusCode.ERROR, error.code))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
