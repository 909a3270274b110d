"""Log set-up and the metric table. A new metric is one row of `METRICS`."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

NAMESPACE = "djl_neuronx"
_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)


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
    "rejected_requests_total": Metric(
        "counter", "Requests refused before they were queued.", ("code",)
    ),
    "generated_tokens_total": Metric(
        "counter", "Tokens generated, those that a stop string cut off included."
    ),
    "prompt_tokens_total": Metric("counter", "Prompt tokens of the requests that ended."),
    "padding_tokens_total": Metric(
        "counter", "Prompt columns computed for nothing, up to the bucket's length."
    ),
    "reencoded_tokens_total": Metric(
        "counter",
        "Tokens encoded again although they were cached: in static batches a joiner costs that.",
    ),
    "time_to_first_token_seconds": Metric("histogram", "From submission to the first token."),
    "inter_token_seconds": Metric(
        "histogram", "Mean time between the tokens of a request, after the first."
    ),
    "request_seconds": Metric("histogram", "From submission to the last token."),
    "prefill_seconds": Metric("histogram", "Device time of a prefill call.", ("bucket",)),
    "decode_seconds": Metric(
        "histogram", "Device time of a decode step, whether it verifies drafts or not."
    ),
    "mixed_seconds": Metric(
        "histogram", "Device time of a step of prompt chunks and decodes.", ("bucket",)
    ),
    "draft_tokens_total": Metric("counter", "Drafts that were verified."),
    "accepted_draft_tokens_total": Metric("counter", "Drafts that stand in a text."),
    "draft_seconds": Metric("histogram", "Time that drafting for a step took."),
    "draft_failures_total": Metric("counter", "Steps without drafts because drafting failed."),
    "slots_in_use": Metric("gauge", "Sequences that hold a slot."),
    "waiting_requests": Metric("gauge", "Sequences that wait for a slot."),
    "compile_cache_hits_total": Metric(
        "counter", "Compiled models that were found, on this machine or in the remote store."
    ),
    "compile_cache_misses_total": Metric("counter", "Models that had to be compiled."),
    "load_seconds": Metric("gauge", "Time that loading the model took."),
}


class Metrics:
    """The table's metrics in a registry of their own, so that two services in one process do not mix."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry: CollectorRegistry = CollectorRegistry()
        self._metrics: dict[str, Any] = {}
        for name, row in METRICS.items():
            full = f"{NAMESPACE}_{name}"
            if row.kind == "counter":
                self._metrics[name] = Counter(full, row.doc, row.labels, registry=self.registry)
            elif row.kind == "gauge":
                self._metrics[name] = Gauge(full, row.doc, row.labels, registry=self.registry)
            else:
                self._metrics[name] = Histogram(
                    full, row.doc, row.labels, registry=self.registry, buckets=_SECONDS
                )

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401  (Counter, Gauge or Histogram, by the table)
        return self._metrics[name]

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)


def setup_logging(level: str = "INFO") -> None:
    """One line per event on stderr; for programs that own their process, never called under DJL's engine."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    package = logging.getLogger("djl_python_neuronx")
    package.handlers = [handler]
    package.setLevel(level)
    package.propagate = False
