"""The CloudWatch dashboard of an endpoint, made of the package's metrics."""

from __future__ import annotations

from typing import Any

from djl_python_neuronx.telemetry import METRICS, NAMESPACE

LEFT_OUT: dict[str, str] = {}
"""Metrics that are not on the dashboard, each with the reason."""
_WIDTH, _HEIGHT, _COLUMNS = 8, 6, 3
_ABOUT = (
    "**{endpoint}**: metrics that the container logs once a minute (docs/metrics.md). Counters are sums of a minute; "
    "times are means. Percentiles: CloudWatch's Query Studio, from /metrics."
)


def namespace(endpoint: str) -> str:
    """The namespace of an endpoint's metrics in CloudWatch."""
    return f"djl-neuronx/{endpoint}"


def dashboard(endpoint: str, model: str, region: str) -> dict[str, Any]:
    """The body of the dashboard: a widget for each metric of `METRICS`, and SageMaker's own requests and errors."""
    widgets = [_widget(name, endpoint, model) for name in METRICS if name not in LEFT_OUT]
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


def _widget(name: str, endpoint: str, model: str) -> dict[str, Any]:
    """Title and lines of a metric: the sum of a counter, the mean of a histogram, mean and maximum of a gauge."""
    row = METRICS[name]

    def line(suffix: str = "", **extra: object) -> list[object]:
        return [namespace(endpoint), f"{NAMESPACE}_{name}{suffix}", "model", model, extra]

    if row.kind == "counter":
        lines = [line(stat="Sum")]
    elif row.kind == "gauge":
        lines = [line(stat="Average"), line(stat="Maximum")]
    else:
        mean = {"expression": "total / IF(number > 0, number, 1)", "label": "mean, s"}
        hidden = {"stat": "Sum", "visible": False}
        lines = [[mean], line("_sum", id="total", **hidden), line("_count", id="number", **hidden)]
    return {"title": row.doc, "metrics": lines}
