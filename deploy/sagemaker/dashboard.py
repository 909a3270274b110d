"""The CloudWatch dashboard of an endpoint, made of the package's metrics."""

from __future__ import annotations

from typing import Any

from djl_python_neuronx.telemetry import METRICS, NAMESPACE

_WIDTH, _HEIGHT, _COLUMNS = 8, 6, 3
_ABOUT = (
    "**{endpoint}**: metrics that the container logs once a minute (docs/metrics.md). Counters are sums of a minute; "
    "times are means. Percentiles: CloudWatch's Query Studio, from /metrics."
)


def dashboard(endpoint: str, namespace: str | None, model: str, region: str) -> dict[str, Any]:
    """The body of the dashboard: a widget for each metric of `METRICS`, and SageMaker's own requests and errors.

    `namespace`: where the container's metrics are; None if it logs none, and there are no widgets for them.
    """
    widgets = [_widget(name, namespace, model) for name in METRICS if namespace]
    own = [
        ["AWS/SageMaker", name, "EndpointName", endpoint, "VariantName", "main", {"stat": stat}]
        for name, stat in (
            ("ConcurrentRequestsPerModel", "Maximum"),
            ("Invocations", "Sum"),
            ("Invocation4XXErrors", "Sum"),
            ("Invocation5XXErrors", "Sum"),
        )
    ]
    widgets.append({"title": "SageMaker's requests and errors", "metrics": own})
    head = {"type": "text", "x": 0, "y": 0, "width": 24, "height": 2}
    about = {**head, "properties": {"markdown": _ABOUT.format(endpoint=endpoint)}}
    placed = [
        {
            "type": "metric",
            "x": index % _COLUMNS * _WIDTH,
            "y": 2 + index // _COLUMNS * _HEIGHT,
            "width": _WIDTH,
            "height": _HEIGHT,
            "properties": {"view": "timeSeries", "region": region, "period": 60, **properties},
        }
        for index, properties in enumerate(widgets)
    ]
    return {"widgets": [about, *placed]}


def _widget(name: str, namespace: str, model: str) -> dict[str, Any]:
    """Title and lines of a metric: the sum of a counter, the mean of a histogram, mean and maximum of a gauge."""
    row = METRICS[name]

    def line(suffix: str = "", **extra: object) -> list[object]:
        return [namespace, f"{NAMESPACE}_{name}{suffix}", "model", model, extra]

    if row.kind == "counter":
        lines = [line(stat="Sum")]
    elif row.kind == "gauge":
        lines = [line(stat="Average"), line(stat="Maximum")]
    else:
        mean = {"expression": "total / IF(number > 0, number, 1)", "label": "mean, s"}
        hidden = {"stat": "Sum", "visible": False}
        lines = [[mean], line("_sum", id="total", **hidden), line("_count", id="number", **hidden)]
    return {"title": row.doc, "metrics": lines}
