"""The Grafana dashboard: its PromQL names metrics and labels that `/metrics` has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from djl_python_neuronx.telemetry import METRICS, NAMESPACE

DASHBOARD = json.loads(
    (Path(__file__).parents[2] / "deploy" / "grafana" / "dashboard.json").read_text()
)
TOKEN = re.compile(
    r'\s*(?:(?P<string>"[^"]*")|(?P<range>\[[^\]]*\])|(?P<word>[A-Za-z_:][A-Za-z0-9_:]*)'
    r"|(?P<number>\d+(?:\.\d+)?)|(?P<sign>=~|!~|!=|[=(){},/*+-]))"
)
FUNCTIONS = {"histogram_quantile", "increase", "max", "rate", "sum"}
OF_COUNTERS = {"rate", "increase"}
RANGES = {"[$__rate_interval]", "[1h]"}


def tokens(text: str) -> list[str]:
    """The tokens of an expression; text that is none is an error."""
    found, at = [], 0
    while at < len(text.rstrip()):
        match = TOKEN.match(text, at)
        assert match, f"no PromQL at {text[at:]!r}"
        found.append(match.group().strip())
        at = match.end()
    return found


def series() -> dict[str, tuple[set[str], bool]]:
    """Every series of `/metrics`, to its labels, and whether it only grows."""
    found = {}
    for name, row in METRICS.items():
        labels = {*row.labels, "model"}
        if row.kind == "histogram":
            found[f"{NAMESPACE}_{name}_bucket"] = ({*labels, "le"}, True)
            for suffix in ("sum", "count"):
                found[f"{NAMESPACE}_{name}_{suffix}"] = (labels, True)
        else:
            found[f"{NAMESPACE}_{name}"] = (labels, row.kind == "counter")
    return found


SERIES = series()


def listed(words: list[str], opening: int) -> tuple[list[str], int]:
    """The words from the bracket at `opening` to its end, without commas, and the place behind it."""
    closing = {"(": ")", "{": "}"}[words[opening]]
    end = words.index(closing, opening)
    return [word for word in words[opening + 1 : end] if word != ","], end + 1


def faults(text: str) -> Iterator[str]:
    """The faults of an expression, in words."""
    words, at, depth = tokens(text), 0, 0
    kept: set[str] | None = None
    while at < len(words):
        word, after = words[at], words[at + 1] if at + 1 < len(words) else ""
        depth += {"(": 1, ")": -1}.get(word, 0)
        if depth < 0:
            yield "a bracket is closed that is not open"
        at += 1
        if word in {"sum", "max"}:
            kept = None
        elif word == "by":
            labels, at = listed(words, at)
            kept = set(labels)
        elif word in SERIES:
            has, grows = SERIES[word]
            called = words[at - 3] if words[at - 2] == "(" else ""
            if called in OF_COUNTERS and not grows:
                yield f"{called} of the gauge {word}"
            if kept is not None and not kept <= has:
                yield f"{word} has no label {kept - has}"
            if after == "{":
                matchers, at = listed(words, at)
                if not {*matchers[::3]} <= has:
                    yield f"{word} has no label {set(matchers[::3]) - has}"
            if (called in OF_COUNTERS) != (at < len(words) and words[at] in RANGES):
                yield f"{word}: a range is for {OF_COUNTERS}"
            if word.endswith("_bucket") and kept is not None and "le" not in kept:
                yield f"{word} is summed without le"
        elif re.match(r"[A-Za-z_:]", word) and word not in FUNCTIONS:
            yield f"{word} is neither a metric nor a function"
    if depth:
        yield "a bracket is not closed"


def expressions() -> list[tuple[str, str, str]]:
    """Title of the panel, expression and legend of each query."""
    return [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", [])
    ]


def test_every_expression_names_what_the_server_has() -> None:
    wrong = [
        f"{title}: {fault}\n    {expression}"
        for title, expression, _ in expressions()
        for fault in faults(expression)
    ]
    assert not wrong, "\n".join(wrong)


def test_a_legend_shows_labels_that_the_query_keeps() -> None:
    for title, expression, legend in expressions():
        kept = {
            label.strip()
            for part in re.findall(r"by \(([^)]*)\)", expression)
            for label in part.split(",")
        }
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) == kept - {"le"}, title


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {word for _, expression, _ in expressions() for word in tokens(expression)}
    missing = [
        name
        for name in METRICS
        if not any(f"{NAMESPACE}_{name}{suffix}" in shown for suffix in ("", "_bucket", "_sum"))
    ]
    assert not missing, f"{missing}: add a panel to deploy/grafana/dashboard.json"


def test_it_can_be_imported_for_any_data_source_model_and_copy() -> None:
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert variables.keys() == {"datasource", "model", "copy"}
    assert variables["datasource"]["query"] == "prometheus"
    for name in ("model", "copy"):
        query = variables[name]["query"]["query"]
        metric, label = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert label == name
        assert label in SERIES[metric][0]
        matched = re.findall(r'(\w+)=~"\$(\w+)"', query)
        assert all(one == other and one in SERIES[metric][0] for one, other in matched)
    text = json.dumps(DASHBOARD)
    used = {*re.findall(r"\$\{?(\w+)", text)} - {"__rate_interval", "__all"}
    assert used == variables.keys()
    assert "id" not in DASHBOARD  # Grafana gives it one
    sources: list[Any] = [
        one["datasource"]
        for panel in DASHBOARD["panels"]
        if panel["type"] != "row"
        for one in (panel, *panel["targets"])
    ]
    assert {one["uid"] for one in sources} == {"${datasource}"}
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            assert 'model=~"$model"' in target["expr"]


def test_panels_do_not_lie_on_each_other() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_a_wrong_expression_is_found() -> None:
    """The walk itself: each of these has a fault."""
    good = f'sum by (le) (rate({NAMESPACE}_request_seconds_bucket{{model=~"$model"}}[1h]))'
    assert [*faults(good)] == []
    for wrong in (
        good.replace("request_seconds", "request_secondes"),
        good.replace("model=~", "modell=~"),
        good.replace("by (le)", "by (le, code)"),
        good.replace("by (le)", "by (model)"),
        good.replace("rate(", "irate("),
        good.replace("[1h]", ""),
        good.replace("))", ")"),
        f"rate({NAMESPACE}_slots_in_use[1h])",
    ):
        assert [*faults(wrong)], wrong
