"""Compare a record with the reference by the rule of `RULE`, and name each fault by its place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from djl_python_neuronx.backends.base import Float32Array
from djl_python_neuronx.backends.plan import LoadPlan
from djl_python_neuronx.engine.runner import Graph
from djl_python_neuronx.verify.record import Finding, Record, Seen
from djl_python_neuronx.verify.reference import Float64Array, Reference, chi_square, distribution

_MULTIPLE, _QUANTILE, _MEDIANS = 4, 0.99, 3
_FLOOR = 1e-3
"""Least bound: a device computes functions such as exp by tables, and sums in another order than a CPU."""
_ALPHA = 0.001
_FEWEST = 5
"""Expected draws of a bin of chi-square, and least outputs whose median counts."""
RULE = (
    "The difference of an output is the largest of any logit from that of transformers in float32, in standard "
    f"deviations of the logits of that place. Its bound is {_MULTIPLE} times the difference that transformers itself "
    f"has there on the CPU in the served dtype, at least {_MULTIPLE} times the {_QUANTILE:.0%} quantile of these, and "
    f"at least {_FLOOR}. A token that the device or the engine has chosen greedily may lie two bounds behind the best "
    f"one. The median difference of a graph or slot may be {_MEDIANS} times that of the CPU, or {_FLOOR}. Draws must "
    f"pass a chi-square test of their distribution, as transformers defines it, at {_ALPHA} divided by the number of "
    "tests."
)


_Place: TypeAlias = tuple[int, int]
"""A text and a position in it."""


class _Judged(NamedTuple):
    seen: Seen
    error: float | None
    """The difference; None for a token alone."""
    usual: float
    """That of the CPU in the served dtype; 0 in float32."""
    wrong: bool


def judge(record: Record, plan: LoadPlan) -> dict[str, Any]:
    """Compare a record with the checkpoint of a plan; return a part of the report. The model must not be loaded.

    Raises:
        ServingError: the reference cannot be loaded.
    """
    reference = Reference(plan, "float32")
    logits = record.logits
    eos_ids = {token for token in reference.eos_ids if token < record.spec.vocab_size}
    exact = {place: logits.add(row) for place, row in _run(record, reference)}
    del reference
    usual = dict.fromkeys(exact, 0.0)
    if plan.dtype != "float32":
        rounded = _run(record, Reference(plan, plan.dtype))
        usual = {place: difference(row, logits[exact[place]]) for place, row in rounded}
    cpu_error = float(np.quantile([*usual.values()] or [0.0], _QUANTILE))
    least = max(_FLOOR, _MULTIPLE * cpu_error)
    groups: dict[str, list[_Judged]] = defaultdict(list)
    for seen in record.seen:
        if seen.logits is seen.token is None:
            continue
        place = seen.text, seen.position
        bound = max(least, _MULTIPLE * usual[place])
        error, wrong = _compare(seen, record, logits[exact[place]], bound)
        one = _Judged(seen, error, usual[place], wrong)
        groups[_name(seen.graph)].append(one)
        if seen.graph is not None:
            groups["all graphs"].append(one)
            groups[f"slot {seen.slot}"].append(one)
    draws = [*_judge_draws(record, exact, cpu_error or _FLOOR)]
    left_out = list(record.left_out)
    if least > 1:
        left_out.append(
            f"small errors, as {plan.dtype} alone changes logits by {cpu_error:.2g}: use -o dtype=fp32"
        )
    if not groups["all graphs"]:
        left_out.append("graphs: the device gives neither logits nor greedy tokens")
    if not eos_ids or not record.spec.eos_ids:
        left_out.append("the end of texts, of which the model's files say nothing")
    found = [*_locate(groups), *record.failures, *_others(record, eos_ids, draws)]
    return {
        "findings": [one._asdict() for one in found],
        "left_out": left_out,
        "rule": RULE,
        "cpu_difference": cpu_error,
        "least_bound": least,
        "graphs": [*_graphs(record, groups)],
        "draws": draws,
    }


def _run(record: Record, reference: Reference) -> Iterator[tuple[_Place, Float32Array]]:
    """Yield the reference's logits behind all places of a record."""
    wanted = defaultdict(set)
    for seen in record.seen:
        wanted[seen.text].add(seen.position)
    for text, positions in wanted.items():
        rows = reference.logits(record.texts[text], sorted(positions))
        for position, row in zip(sorted(positions), rows, strict=True):
            yield (text, position), row[: record.spec.vocab_size]


def _compare(
    seen: Seen, record: Record, wanted: Float32Array, bound: float
) -> tuple[float | None, bool]:
    """Return the difference of an output, None of a token alone, and True if it is wrong."""
    error, wrong = None, False
    if seen.logits is not None:
        error = difference(record.logits[seen.logits], wanted)
        wrong = error > bound
    if seen.token is not None:
        behind = wanted.max() - wanted[seen.token] if seen.token >= 0 else np.inf
        wrong = wrong or bool(behind > 2 * bound * wanted.std())
    return error, wrong


def difference(found: Float32Array, wanted: Float32Array) -> float:
    """Return the largest difference of a logit in standard deviations of the wanted ones; infinite for NaN."""
    with np.errstate(invalid="ignore"):
        largest = float(np.abs(found - wanted).max() / wanted.std())
    return float("inf") if np.isnan(largest) else largest


def _judge_draws(
    record: Record, exact: Mapping[_Place, int], usual: float
) -> Iterator[dict[str, Any]]:
    for settings, place, tokens, seen in record.draws:
        number, slack = seen.logits, 0.0
        logits = record.logits[exact[seen.text, seen.position] if number is None else number]
        if number is None:  # the device keeps its own
            slack = float(np.expm1(2 * usual * logits.std()))
        p = p_value(tokens, distribution(logits, settings), slack)
        passed = p > _ALPHA / len(record.draws)
        yield {"settings": settings, "place": place, "draws": len(tokens), "p": p, "right": passed}


def p_value(drawn: Sequence[int], wanted: Float64Array, slack: float = 0.0) -> float:
    """Return the chance of a chi-square at least as large; 0 if a token without probability was drawn.

    `slack`: probabilities are known up to this part of them, and only what lies beyond counts.
    """
    counts, expected = np.bincount(drawn, minlength=len(wanted)), wanted * len(drawn)
    if not slack and counts[wanted == 0].any():
        return 0.0
    bins = [[0.0, 0.0]]
    for token in expected.argsort():
        if bins[-1][1] >= _FEWEST:  # rarer tokens share a bin
            bins.append([0.0, 0.0])
        bins[-1][0] += counts[token]
        bins[-1][1] += expected[token]
    beyond = [max(abs(count - mass) - slack * mass, 0.0) ** 2 / mass for count, mass in bins]
    return chi_square(sum(beyond), len(bins) - 1) if len(bins) > 1 else 1.0


def _graphs(record: Record, groups: Mapping[str, Sequence[_Judged]]) -> Iterator[dict[str, Any]]:
    """Yield the outputs and the speed of each graph, without its first call if there are more."""
    for graph in dict.fromkeys(seen.graph for seen in record.seen):
        found, calls = groups[_name(graph)], [] if graph is None else record.calls[graph]
        yield {
            "graph": _name(graph),
            "outputs": len(found),
            "wrong": sum(one.wrong for one in found),
            "difference": max((one.error for one in found if one.error is not None), default=None),
            "calls": len(calls),
            "median_ms": 1000 * median(calls[1:] or calls) if calls else None,
        }


def _name(graph: Graph | None) -> str:
    if graph is None:
        return "greedy requests through the engine"
    cache = f", {graph.cache} in the cache" if graph.cache else ""
    slots = f", {graph.slots} slots" if graph.slots else ""
    return f"{graph.kind} graph of {graph.bucket} tokens{cache}{slots}"


def _locate(groups: Mapping[str, Sequence[_Judged]]) -> Iterator[Finding]:
    """Find places with wrong outputs, or with differences that are on the whole larger than those of rounding.

    A slot is named by the latter, unless it holds for all of them.
    """
    everywhere = _median_problem(groups["all graphs"])
    for place, found in groups.items():
        wrong, is_slot = [one for one in found if one.wrong], place.startswith("slot")
        if wrong and not is_slot:
            yield Finding(place, _describe(wrong, found))
        elif (problem := _median_problem(found)) and not (is_slot and everywhere):
            yield Finding(place, problem)


def _median_problem(found: Sequence[_Judged]) -> str:
    """Describe a median difference that is too large; empty if it is not, or the outputs are few."""
    errors = [one.error for one in found if one.error is not None]
    usual = median(one.usual for one in found) if found else 0.0
    if len(errors) < _FEWEST or median(errors) <= max(_FLOOR, _MEDIANS * usual):
        return ""
    return f"the median difference of {len(errors)} outputs is {median(errors):.3g}, on the CPU {usual:.3g}"


def _describe(wrong: Sequence[_Judged], found: Sequence[_Judged]) -> str:
    """Describe wrong outputs of a place: slots, rows, positions and scenarios, each of those that were compared."""
    parts = [f"{len(wrong)} of {len(found)} outputs are wrong"]
    for name, nouns in (("slot", "slots"), ("rows", "rows"), ("position", "positions")):
        every = sorted({getattr(one.seen, name) for one in found})
        bad = {getattr(one.seen, name) for one in wrong}
        parts += [f"{nouns} {_ranges(bad, every)} of {_ranges({*every}, every)}"] * (every != [-1])
    parts.append(f"scenarios {', '.join(sorted({one.seen.scenario for one in wrong}))}")
    seen, error, _, _ = max(wrong, key=lambda one: one.error or 0.0)
    off = "another token" if error is None else f"off by {error:.3g}"
    row = "" if seen.graph is None else f"slot {seen.slot} of {seen.rows} rows, "
    parts.append(f"worst at {row}position {seen.position}: {off}")
    return "; ".join(parts)


def _ranges(some: set[int], every: Sequence[int]) -> str:
    """Return numbers of an ascending list as text; neighbours in it are a range."""
    runs: list[list[int]] = []
    for before, number in zip([None, *every], every, strict=False):
        if number in some and before in some:
            runs[-1][1:] = [number]
        elif number in some:
            runs.append([number])
    return ", ".join(" to ".join(map(str, run)) for run in runs)


def _others(
    record: Record, eos_ids: Collection[int], draws: Sequence[Mapping[str, Any]]
) -> Iterator[Finding]:
    served, wanted = sorted(record.spec.eos_ids), sorted(eos_ids)
    if served and wanted and served != wanted:
        yield Finding("end of text", f"texts end with {served}, in transformers with {wanted}")
    for draw in draws:
        if not draw["right"]:
            problem = (
                f"{draw['draws']} draws with {draw['settings']} do not follow their distribution"
            )
            yield Finding(f"sampling on the {draw['place']}", f"{problem} (p={draw['p']:.1g})")
