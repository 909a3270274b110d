"""OpenTelemetry's traces (`option.otlp_traces_endpoint`): a span for each request, made when it has ended.

Nothing of OpenTelemetry is imported without the option.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from djl_python_neuronx.engine.streams import Stream
from djl_python_neuronx.errors import ConfigError, ServingError

logger = logging.getLogger(__name__)

DELAY_MS = 500
"""Pause between two exports, if OTEL_BSP_SCHEDULE_DELAY sets none. A process under DJL Serving ends a second after its
engine was given up, and the spans of that moment are wanted."""
FLUSH_S = 0.5
"""Longest time at the end to export what is left."""
WARNING_S = 60.0
"""Least time between two warnings of the exporter."""
_PACKAGES = {
    "http/protobuf": "djl-python-neuronx[otel]",
    "grpc": "opentelemetry-exporter-otlp-proto-grpc",
}
"""Protocol to what installs its exporter."""
_COMPLETIONS = {"lmi", "tgi", "plain", "bedrock", "openai_completion"}
"""Protocols that complete a text. All others answer a chat."""
_PHASES = ("queue", "prefill", "decode")
_SAMPLING = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty")
MOST_SEQUENCES = 8
"""Sequences of a request with spans of their phases: those of one are made in 0.08 ms, in which no text is made."""
_LARGEST = 2**31 - 1
"""Largest number of an attribute. A batch of spans with one that OTLP cannot hold, as a client may send, is lost."""


def exporter_class(environ: Mapping[str, str]) -> Any:  # noqa: ANN401
    """The exporter for the protocol that OpenTelemetry's variables choose.

    Raises:
        ConfigError: there is no such protocol, or its package is not installed.
    """
    variables = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    name = next((one for one in variables if environ.get(one)), "")
    protocol = environ.get(name, "http/protobuf")
    if protocol not in _PACKAGES:
        msg = f"{name} is {protocol!r}; expected {' or '.join(_PACKAGES)}"
        raise ConfigError(msg)
    kind = protocol.partition("/")[0]
    try:
        import_module("opentelemetry.sdk.trace.export")
        module = import_module(f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter")
    except ImportError as error:
        msg = f"option.otlp_traces_endpoint needs {error.name}: pip install '{_PACKAGES[protocol]}'"
        raise ConfigError(msg) from error
    return module.OTLPSpanExporter


class _End(NamedTuple):
    """The end of one sequence of a request."""

    stream: Stream
    reason: str
    error: ServingError | None
    at_s: float


class Tracing:
    """Makes the spans of requests that have ended, and exports them on a thread of the SDK."""

    def __init__(self, endpoint: str, model: str, environ: Mapping[str, str]) -> None:
        """Start the thread. The SDK reads its own variables, such as OTEL_TRACES_SAMPLER.

        Raises:
            ConfigError: see `exporter_class`.
        """
        exporter_type = exporter_class(environ)
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        reports = logging.getLogger("opentelemetry")
        reports.handlers, reports.propagate = [_RareWarnings()], False
        exporter = exporter_type(endpoint=endpoint)
        ours = Resource({"service.name": "djl-neuronx"})
        resource = Resource.create().merge(ours).merge(OTELResourceDetector().detect())
        delay_ms = None if environ.get("OTEL_BSP_SCHEDULE_DELAY") else DELAY_MS
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        processor = BatchSpanProcessor(exporter, schedule_delay_millis=delay_ms)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("djl_python_neuronx")
        self._model = model
        self._lock = threading.Lock()
        self._closed = False

    def end(self, stream: Stream, reason: str, error: ServingError | None, at_s: float) -> None:
        """Note the end of a request, and make the spans of all that are answered together when the last one ends."""
        with self._lock:
            stream.ends[stream.request.request_id] = _End(stream, reason, error, at_s)
            ends = [*stream.ends.values()]
        if all(ends):
            stream.ends.clear()  # references among streams would form a cycle
            self._make(ends)

    def close(self) -> None:
        """Export what is left, for at most `FLUSH_S`. A second call does nothing."""
        if not self._closed:
            self._closed = True
            closing = threading.Thread(target=self._provider.shutdown, daemon=True)
            closing.start()
            closing.join(FLUSH_S)

    def _make(self, ends: Sequence[_End]) -> None:
        """Make the span of a request and, below it, the phases of its first sequences, as far as they came."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        request, wall_s = ends[0].stream.request, time.time() - time.monotonic()

        def ns(at_s: float) -> int:
            return int((at_s + wall_s) * 1e9)

        attributes, start = self._attributes(ends), self._tracer.start_span
        root = start(
            f"{attributes['gen_ai.operation.name']} {self._model}",
            TraceContextTextMapPropagator().extract(request.trace),
            SpanKind.SERVER,
            attributes,
            start_time=ns(request.arrived_s),
        )
        below = set_span_in_context(root)
        for i, (stream, _, error, at_s) in enumerate(ends):
            which = {"djl_neuronx.sequence": i}
            times = [stream.submitted_s, *stream.slots_s[:1], stream.first_token_s or at_s, at_s]
            for name, begin_s, end_s in zip(_PHASES, times, times[1:], strict=False):
                if end_s > begin_s and i < MOST_SEQUENCES:
                    phase = start(name, below, attributes=which, start_time=ns(begin_s))
                    phase.end(ns(end_s))
            for resumed_s in stream.slots_s[1:]:
                root.add_event("resumed", which, ns(resumed_s))
            if error is not None:
                # No message: one may name what a client has sent.
                root.set_status(Status(StatusCode.ERROR, error.code))
                root.set_attribute("error.type", error.code)
        root.end(ns(max(end.at_s for end in ends)))

    def _attributes(self, ends: Sequence[_End]) -> dict[str, Any]:
        """Facts about a request; none is a text or a key."""
        streams = [end.stream for end in ends]
        request, sampling = streams[0].request, streams[0].request.sampling
        prompts = {id(one.request.prompt_ids): len(one.request.prompt_ids) for one in streams}
        given = {name: getattr(sampling, name) for name in _SAMPLING}
        given["max_tokens"] = request.max_new_tokens
        facts = {f"gen_ai.request.{name}": value for name, value in given.items()}
        completes = request.protocol in _COMPLETIONS
        facts |= {
            "gen_ai.operation.name": "text_completion" if completes else "chat",
            "gen_ai.provider.name": "djl_neuronx",
            "gen_ai.request.model": self._model,
            "gen_ai.response.finish_reasons": [end.reason for end in ends],
            "gen_ai.usage.input_tokens": sum(prompts.values()),
            "gen_ai.usage.output_tokens": sum(one.text.num_generated for one in streams),
            "gen_ai.usage.cache_read.input_tokens": streams[0].text.num_cached,
            "djl_neuronx.request_id": request.label,
            "djl_neuronx.protocol": request.protocol,
            "djl_neuronx.copy": streams[0].copy,
            "djl_neuronx.resumed": sum(len(one.slots_s[1:]) for one in streams),
        }
        return {
            name: min(value, _LARGEST) if isinstance(value, int) else value
            for name, value in facts.items()
            if value is not None
        }


class _RareWarnings(logging.Handler):
    """Logs what OpenTelemetry reports, such as a collector that is down, at most once in `WARNING_S`."""

    next_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        now_s, by_client = time.monotonic(), record.name.startswith("opentelemetry.trace.")
        if record.levelno >= logging.WARNING and now_s >= self.next_s and not by_client:
            self.next_s = now_s + WARNING_S
            logger.warning("traces_not_exported reason=%r", _reason(record))


def _reason(record: logging.LogRecord) -> str:
    """The message without what may quote a header for the collector: variables, and the texts of exceptions."""
    if not record.name.startswith("opentelemetry.exporter."):
        return str(record.msg)
    given = record.args if isinstance(record.args, tuple) else ()
    args = [type(one).__name__ if isinstance(one, Exception) else one for one in given]
    return str(record.msg) % tuple(args)
