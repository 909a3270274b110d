"""Logging set-up, the metrics, and the observer that records the engine loop. A new metric is one row of `METRICS`."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import orjson

from djl_python_neuronx.errors import ServingError, load_failure

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from djl_python_neuronx.engine.detokenizer import Delta
    from djl_python_neuronx.engine.runner import StepInfo
    from djl_python_neuronx.engine.streams import Stream
    from djl_python_neuronx.tracing import Tracing

logger = logging.getLogger(__name__)

NAMESPACE = "djl_neuronx"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


@dataclass(frozen=True)
class Metric:
    """One row of the table."""

    kind: Literal["counter", "gauge", "histogram"]
    doc: str
    labels: tuple[str, ...] = ()


METRICS: dict[str, Metric] = {
    "requests_total": Metric(
        "counter", "Requests that ended or were aborted.", ("protocol", "finish_reason")
    ),
    "rejected_requests_total": Metric("counter", "Requests rejected before queueing.", ("code",)),
    "generated_tokens_total": Metric(
        "counter", "Generated tokens, including tokens that a stop string removed."
    ),
    "prompt_tokens_total": Metric("counter", "Prompt tokens of the requests that ended."),
    "cached_prompt_tokens_total": Metric(
        "counter", "Prompt tokens that the cache held, not run again."
    ),
    "padding_tokens_total": Metric("counter", "Padding computed in prefills, in tokens."),
    "reencoded_tokens_total": Metric(
        "counter", "Tokens prefilled again when a request joins a static batch."
    ),
    "queue_seconds": Metric("histogram", "From submission to the first slot."),
    "time_to_first_token_seconds": Metric("histogram", "From submission to the first token."),
    "inter_token_seconds": Metric(
        "histogram", "Mean time between the tokens of a request, after the first."
    ),
    "request_seconds": Metric("histogram", "From submission to the last token."),
    "prefill_seconds": Metric("histogram", "Device time of a prefill call.", ("bucket",)),
    "decode_seconds": Metric(
        "histogram",
        "Device time of a decode or verification.",
        ("kind", "bucket", "rows"),
    ),
    "mixed_seconds": Metric(
        "histogram", "Device time of a step of chunks and decodes.", ("bucket", "cache")
    ),
    "sampling_steps_total": Metric(
        "counter",
        "Steps, by the place of sampling: host, device or mixed.",
        ("place",),
    ),
    "drafts_total": Metric("counter", "Times that a sequence had draft tokens verified."),
    "draft_tokens_total": Metric("counter", "Draft tokens verified by the model."),
    "accepted_draft_tokens_total": Metric("counter", "Draft tokens accepted."),
    "draft_seconds": Metric("histogram", "Time to propose the drafts of a step."),
    "draft_failures_total": Metric("counter", "Steps without drafts because the proposer failed."),
    "speculating": Metric("gauge", "1 while the engine proposes drafts, 0 without.", ("copy",)),
    "slots_in_use": Metric("gauge", "Sequences with a slot.", ("copy",)),
    "waiting_requests": Metric("gauge", "Sequences waiting for a slot.", ("copy",)),
    "kv_cache_used_tokens": Metric("gauge", "Tokens of the sequences with a slot.", ("copy",)),
    "kv_cache_tokens": Metric("gauge", "Tokens that all slots hold.", ("copy",)),
    "compile_cache_hits_total": Metric("counter", "Compiled models found in a store or mirror."),
    "compile_cache_misses_total": Metric("counter", "Models compiled because none was found."),
    "engine_deaths_total": Metric(
        "counter",
        "Engine crashes, by signal or error.",
        ("cause", "copy"),
    ),
    "resumed_requests_total": Metric(
        "counter", "Requests with tokens that another engine went on with."
    ),
    "load_seconds": Metric("gauge", "Time to load the model."),
}


_GATEWAY = {
    "vllm:num_requests_running": ("slots_in_use", ""),
    "vllm:num_requests_waiting": ("waiting_requests", ""),
    "vllm:kv_cache_usage_perc": ("kv_cache_used_tokens", "kv_cache_tokens"),
}
"""vLLM's gauges that the Gateway API's inference extension reads of a model server, each to a gauge of ours and the one
that it is a share of. Source: gateway-api-inference-extension, docs/proposals/003-model-server-protocol (2026-08)."""
_GAUGES = {f"{NAMESPACE}_{name}" for name, row in METRICS.items() if row.kind == "gauge"}


class Metrics:
    """The metrics of `METRICS`, in their own registry: two services in one process do not share them."""

    def __init__(self) -> None:
        from prometheus_client import (
            CollectorRegistry,
            Counter,
            Gauge,
            Histogram,
            disable_created_metrics,
        )

        disable_created_metrics()  # type: ignore[no-untyped-call]  # no dashboard reads their lines
        self.registry: CollectorRegistry = CollectorRegistry()
        make: dict[str, Callable[..., Any]] = {
            "counter": Counter,
            "gauge": Gauge,
            "histogram": partial(Histogram, buckets=_SECONDS),
        }
        self._metrics: dict[str, Any] = {
            name: make[row.kind](f"{NAMESPACE}_{name}", row.doc, row.labels, registry=self.registry)
            for name, row in METRICS.items()
        }
        self._last: dict[str, float] = {}
        """Values that `_gained` read last."""

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401  (Counter, Gauge or Histogram, by the table)
        return self._metrics[name]

    def _gained(self) -> dict[str, float]:
        """The gauges' values, and what counters and the sums and counts of histograms gained since the last call."""
        values: dict[str, float] = defaultdict(float)
        for family in self.registry.collect():
            for sample in family.samples:
                if not sample.name.endswith("_bucket"):
                    values[sample.name] += sample.value
        gained = {
            name: value if name in _GAUGES else value - self._last.get(name, 0.0)
            for name, value in values.items()
        }
        self._last = values
        return gained

    def embedded(self, namespace: str, model: str) -> str:
        """A line of JSON from which CloudWatch Logs makes metrics below `namespace` (its Embedded Metric Format)."""
        gained = self._gained()
        directive = {
            "Namespace": namespace,
            "Dimensions": [["model"]],
            "Metrics": [{"Name": name} for name in gained],
        }
        about = {"Timestamp": int(1000 * time.time()), "CloudWatchMetrics": [directive]}
        return orjson.dumps({"_aws": about, "model": model, **gained}).decode()

    def for_java(self, model: str) -> list[str]:
        """Lines from which DJL Serving makes metrics, without counters that gained nothing.

        Source: PyProcess.java (d21927c), Metric.java of djl api 0.34.0: `name.unit:value|#dimension:value|type`; a
        counter's value is added.
        """
        label = re.sub(r"[,:|]", "_", model)
        return [
            f"[METRICS]{name}.Count:{value:.6f}|#Model:{label}|{'g' if name in _GAUGES else 'c'}"
            for name, value in self._gained().items()
            if value or name in _GAUGES
        ]


def exposition(models: Mapping[str, Metrics]) -> bytes:
    """The metrics of models, by the name of each, in Prometheus' text format, each once, with the label `model`.

    Those of `_GATEWAY` follow: a series for each model, over all its copies.
    """
    from prometheus_client import generate_latest
    from prometheus_client.core import GaugeMetricFamily

    found: dict[str, Any] = {}
    for model, metrics in models.items():
        totals: dict[str, float] = defaultdict(float)
        for metric in metrics.registry.collect():
            samples = [
                one._replace(labels={**one.labels, "model": model}) for one in metric.samples
            ]
            totals[metric.name] = sum([one.value for one in samples])
            metric.samples = []
            found.setdefault(metric.name, metric).samples += samples
        for name, (part, whole) in _GATEWAY.items():
            value = totals[f"{NAMESPACE}_{part}"] / (totals[f"{NAMESPACE}_{whole}"] or 1.0)
            gauge = GaugeMetricFamily(name, METRICS[part].doc, labels=["model_name", "model"])
            found.setdefault(name, gauge).add_metric([model, model], value)
    return generate_latest(SimpleNamespace(collect=found.values))


class Recorder:
    """The engine loop's observer: metrics, a log line per request, and its spans."""

    def __init__(self, metrics: Metrics, tracing: Tracing | None = None) -> None:
        self.metrics, self.tracing = metrics, tracing

    def rejected(self, error: ServingError) -> None:
        """See `Observer`."""
        self.metrics["rejected_requests_total"].labels(error.code).inc()

    def stepped(self, info: StepInfo | None, num_tokens: int) -> None:
        """See `Observer`."""
        metrics = self.metrics
        metrics["generated_tokens_total"].inc(num_tokens)
        if info is None:
            return
        metrics["reencoded_tokens_total"].inc(info.num_reprefilled)
        if info.cached:
            metrics["cached_prompt_tokens_total"].inc(sum(info.cached.values()))
        if info.draft_s:
            metrics["draft_seconds"].observe(info.draft_s)
        if info.draft_error is not None:
            metrics["draft_failures_total"].inc()
        if info.kind in {"prefill", "mixed"}:
            cache = () if info.kind == "prefill" else (info.cache,)
            metrics[f"{info.kind}_seconds"].labels(info.bucket, *cache).observe(info.device_s)
            columns = info.bucket * (info.rows if info.kind == "prefill" else 1)
            metrics["padding_tokens_total"].inc(max(0, columns - info.tokens))
        else:
            by_graph = metrics["decode_seconds"].labels(info.kind, info.bucket, info.slots)
            by_graph.observe(info.device_s)
        if info.place is not None:
            metrics["sampling_steps_total"].labels(info.place).inc()
        if info.drafted:
            metrics["drafts_total"].inc(info.drafts)
            metrics["draft_tokens_total"].inc(info.drafted)
            metrics["accepted_draft_tokens_total"].inc(info.accepted)

    def died(self, cause: str, copy: int) -> None:
        """See `Observer`."""
        self.metrics["engine_deaths_total"].labels(cause, copy).inc()

    def resumed(self, stream: Stream) -> None:
        """See `Observer`."""
        self.metrics["resumed_requests_total"].inc()
        logger.warning(
            "request_resumed request_id=%s generated_tokens=%d",
            stream.request.label,
            len(stream.output_ids),
        )

    def given_up(self, stream: Stream) -> None:
        """See `Observer`."""
        self.metrics["requests_total"].labels(stream.request.protocol, "aborted").inc()
        logger.info("request_aborted request_id=%s", stream.request.label)
        if self.tracing is not None:
            self.tracing.end(stream, "aborted", None, time.monotonic())

    def ended(self, stream: Stream, delta: Delta) -> None:
        """See `Observer`."""
        metrics, request = self.metrics, stream.request
        total_s = stream.last_token_s - stream.submitted_s
        reason = delta.finish_reason.value if delta.finish_reason else ""
        metrics["requests_total"].labels(request.protocol, reason).inc()
        metrics["prompt_tokens_total"].inc(len(request.prompt_ids))
        metrics["request_seconds"].observe(total_s)
        if stream.slots_s:
            metrics["queue_seconds"].observe(stream.slots_s[0] - stream.submitted_s)
        first_s = 0.0
        if stream.first_token_s is not None:
            first_s = stream.first_token_s - stream.submitted_s
            metrics["time_to_first_token_seconds"].observe(first_s)
            if delta.num_generated_tokens > 1:
                metrics["inter_token_seconds"].observe(
                    (total_s - first_s) / (delta.num_generated_tokens - 1)
                )
        logger.info(
            "request_finished request_id=%s protocol=%s reason=%s prompt_tokens=%d generated_tokens=%d "
            "first_token_s=%.4f total_s=%.4f%s",
            request.label,
            request.protocol,
            reason,
            len(request.prompt_ids),
            delta.num_generated_tokens,
            first_s,
            total_s,
            (f" adapter={request.adapter_name}" if request.adapter_name else "")
            + (f" error={delta.error.code}" if delta.error is not None else ""),
        )
        if self.tracing is not None:
            self.tracing.end(stream, reason, delta.error, stream.last_token_s)


def log_load_failure(error: BaseException, event: str = "load_failed") -> ServingError:
    """Log why a model could not be loaded, after the words `event`; returns the error for its clients."""
    failure = load_failure(error)
    # The message of an error of ours is for a user: no traceback.
    cause = None if failure is error else error
    logger.error("%s code=%s\n%s", event, failure.code, failure, exc_info=cause)
    return failure


class _Format(logging.Formatter):
    """Time, level and logger before each message, except for one with the attribute `bare`: a whole line of JSON.

    Further lines are indented: no name of a file and no text of a client can look like an event.
    """

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        if hasattr(record, "bare"):
            return record.getMessage()
        return "\n    ".join(map(printable, super().format(record).split("\n")))


def printable(text: str) -> str:
    """Escape what is no visible character: it would control a terminal, or end a line."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


class _JsonFormat(logging.Formatter):
    """An event as an object in one line, with its time in UTC; a record with the attribute `bare` is one already."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        if hasattr(record, "bare"):
            return record.getMessage()
        time_utc = datetime.fromtimestamp(record.created, timezone.utc)
        event = {
            "time": time_utc.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event)


def setup_logging(level: str = "INFO", form: str = "text") -> None:
    """Log to stderr, an event as `text` or as `json`; `djl`: to stdout, as DJL Serving's own engine does.

    For processes of our own: DJL's engine has set up its logging. Java logs all that comes from stderr as warnings.
    """
    handler = logging.StreamHandler(sys.stdout if form == "djl" else sys.stderr)
    package = logging.getLogger("djl_python_neuronx")
    package.handlers = [handler]
    package.setLevel(level)
    package.propagate = False
    if form == "json":
        handler.setFormatter(_JsonFormat())
        # What other packages log, too.
        logging.getLogger().handlers = [handler]
        logging.captureWarnings(True)
    elif form == "djl":
        handler.setFormatter(_Format("%(levelname)s::%(message)s"))
    else:
        handler.setFormatter(_Format("%(asctime)s %(levelname)s %(name)s %(message)s"))


def log_settings() -> tuple[str, str]:
    """The arguments of `setup_logging` for a process that logs as this one does."""
    package = logging.getLogger("djl_python_neuronx")
    root = logging.getLogger()
    form = "text"
    if any(isinstance(one.formatter, _JsonFormat) for one in package.handlers):
        form = "json"
    elif not package.handlers and any(
        vars(one).get("stream") is sys.stdout for one in root.handlers
    ):
        form = "djl"  # source: djl_python_engine.py (d21927c)
    return logging.getLevelName(package.getEffectiveLevel()), form
