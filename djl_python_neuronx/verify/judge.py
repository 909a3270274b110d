"""Compare a record with the reference by the rule of `RULE`, and name each fault by its place."""

from __future__ import annotations

import logging
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

logger = logging.getLogger(__name__)

_MULTIPLE, _QUANTILE, _MEDIANS = 4, 0.99, 3
_FLOOR = 1e-3
"""Least bound: a device computes functions such as exp by tables, and sums in another order than a CPU."""
_ALPHA = 0.001
_FEWEST = 5
"""Expected draws of a bin of chi-square, and least outputs whose median counts."""
_NEAR = 16
"""Logits that rounding may make of those of the reference, for a device that returns none."""
RULE = (
    "The difference of an output is the largest of any logit from that of transformers in float32, in standard "
    f"deviations of the logits of that place. Its bound is {_MULTIPLE} times the difference that transformers itself "
    f"has there on the CPU in the served dtype, at least {_MULTIPLE} times the {_QUANTILE:.0%} quantile of these, and "
    f"at least {_FLOOR}. A token that the device or the engine has chosen greedily may lie two bounds behind the best "
    "one. The median difference of a graph or slot, and the median distance of its tokens from the best ones, may be "
    f"{_MEDIANS} times that of the CPU, or {_FLOOR}. Draws must pass a chi-square test of their distribution, as "
    f"transformers defines it but with ties whole, at {_ALPHA} divided by the number of tests."
)


_Place: TypeAlias = tuple[int, int]
"""A text and a position in it."""


class _Off(NamedTuple):
    """Distances of an output, in standard deviations of the reference's logits; None: it has none of the kind."""

    logits: float | None
    """The difference."""
    token: float | None
    """The distance of the token from the best one."""


class _Judged(NamedTuple):
    seen: Seen
    off: _Off
    usual: _Off
    """That of the CPU in the served dtype; 0 in float32."""
    wrong: bool


def judge(record: Record, plan: LoadPlan) -> dict[str, Any]:
    """Compare a record with the checkpoint of a plan; return a part of the report. The model must not be loaded.

    A failure of that is a part of the report too: the record may have taken hours.
    """
    try:
        return _judge(record, plan)
    except Exception as error:
        logger.exception("comparison_failed")
        # Of the error its class alone: its message may hold paths.
        failed = f"all outputs: the comparison failed ({type(error).__name__}), see its log"
        return {
            "verdict": "wrong" if record.failures else "unknown",
            "findings": [one._asdict() for one in record.failures],
            "left_out": [*record.left_out, failed],
            "rule": RULE,
            "cpu_difference": None,
            "least_bound": None,
            "graphs": [*_graphs(record, defaultdict(list))],
            "draws": [],
        }


def _judge(record: Record, plan: LoadPlan) -> dict[str, Any]:
    reference = Reference(plan, "float32")
    logits = record.logits
    eos_ids = {token for token in reference.eos_ids if token < record.spec.vocab_size}
    exact = {place: logits.add(row) for place, row in _run(record, reference)}
    del reference
    usual, rounded = _run_rounded(record, plan, exact)
    cpu_error = float(np.quantile([one.logits for one in usual.values()] or [0.0], _QUANTILE))
    least = max(_FLOOR, _MULTIPLE * cpu_error)
    groups = _judge_outputs(record, exact, usual, least)
    draws = [*_judge_draws(record, exact, rounded)]
    left_out = list(record.left_out)
    if least > 1:
        left_out.append(
            f"small errors, as {plan.dtype} alone changes logits by {cpu_error:.2g}: use -o dtype=fp32"
        )
    if not groups["all graphs"]:
        left_out.append("graphs: the device gives neither logits nor greedy tokens")
    if not eos_ids or not record.spec.eos_ids:
        left_out.append("the end of texts: the model's files name no token for it")
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


def _run_rounded(
    record: Record, plan: LoadPlan, exact: Mapping[_Place, int]
) -> tuple[dict[_Place, _Off], dict[_Place, Float32Array]]:
    """Run the CPU in the served dtype: how far each place is off, and the logits of those with draws."""
    logits, drawn = record.logits, {(one.seen.text, one.seen.position) for one in record.draws}
    usual, rounded = dict.fromkeys(exact, _Off(0.0, 0.0)), {at: logits[exact[at]] for at in drawn}
    if plan.dtype != "float32":
        for place, row in _run(record, Reference(plan, plan.dtype)):
            usual[place] = _compare(row, int(row.argmax()), logits[exact[place]])
            if place in drawn:
                rounded[place] = row
    return usual, rounded


def _judge_outputs(
    record: Record, exact: Mapping[_Place, int], usual: Mapping[_Place, _Off], least: float
) -> dict[str, list[_Judged]]:
    """Return the outputs of each graph, slot, and of all graphs. `least`: the least bound."""
    groups: dict[str, list[_Judged]] = defaultdict(list)
    for seen in record.seen:
        if seen.logits is seen.token is None:
            continue
        place = seen.text, seen.position
        row = None if seen.logits is None else record.logits[seen.logits]
        off = _compare(row, seen.token, record.logits[exact[place]])
        bound = max(least, _MULTIPLE * (usual[place].logits or 0.0))
        wrong = (off.logits or 0.0) > bound or (off.token or 0.0) > 2 * bound
        one = _Judged(seen, off, usual[place], wrong)
        groups[_name(seen.graph)].append(one)
        if seen.graph is not None:
            groups["all graphs"].append(one)
            groups[f"slot {seen.slot}"].append(one)
    return groups


def _run(record: Record, reference: Reference) -> Iterator[tuple[_Place, Float32Array]]:
    """Yield the reference's logits behind all places of a record."""
    wanted = defaultdict(set)
    for seen in record.seen:
        wanted[seen.text].add(seen.position)
    for text, positions in wanted.items():
        rows = reference.logits(record.texts[text], sorted(positions))
        for position, row in zip(sorted(positions), rows, strict=True):
            yield (text, position), row[: record.spec.vocab_size]


def _compare(found: Float32Array | None, token: int | None, wanted: Float32Array) -> _Off:
    """Compare an output with the reference's logits; an id outside the vocabulary is infinitely off."""
    behind = None
    if token is not None:
        known = 0 <= token < len(wanted)
        behind = float((wanted.max() - wanted[token]) / wanted.std()) if known else float("inf")
    return _Off(None if found is None else difference(found, wanted), behind)


def difference(found: Float32Array, wanted: Float32Array) -> float:
    """Return the largest difference of a logit in standard deviations of the wanted ones; infinite for NaN."""
    with np.errstate(invalid="ignore"):
        largest = float(np.abs(found - wanted).max() / wanted.std())
    return float("inf") if np.isnan(largest) else largest


def _judge_draws(
    record: Record, exact: Mapping[_Place, int], rounded: Mapping[_Place, Float32Array]
) -> Iterator[dict[str, Any]]:
    """Yield the test of each setting. `rounded`: logits of the CPU in the served dtype."""
    for settings, place, tokens, seen in record.draws:
        at, kept = (seen.text, seen.position), int(settings.get("top_k", 0))
        if seen.logits is not None:
            p = p_value(tokens, distribution(record.logits[seen.logits], settings))
        else:
            logits = record.logits[exact[at]]
            near = [distribution(row, settings) for row in near_logits(logits, rounded[at])]
            p = p_value(tokens, distribution(logits, settings), near)
            p = 0.0 if 0 < kept < len({*tokens}) else p  # whatever the logits are
        passed = p > _ALPHA / len(record.draws)
        yield {"settings": settings, "place": place, "draws": len(tokens), "p": p, "right": passed}


def near_logits(logits: Float32Array, rounded: Float32Array) -> Iterator[Float32Array]:
    """Yield logits with twice the errors of the CPU's, each moved to another token of nearly the same rank."""
    order = logits.argsort()
    errors = 2 * (rounded - logits)[order]
    for ranks in range(_NEAR):
        near = logits.copy()
        near[order] += np.roll(errors, ranks)
        yield near


def p_value(drawn: Sequence[int], wanted: Float64Array, near: Sequence[Float64Array] = ()) -> float:
    """Return the chance of a chi-square at least as large; 0 if a token without probability was drawn.

    `near`: distributions that rounding may make of the wanted one, if it is not known better; the variance of a bin is
    larger by theirs, and tokens without probability may be drawn.
    """
    if not 0 <= min(drawn) <= max(drawn) < len(wanted):
        return 0.0
    counts, expected = np.bincount(drawn, minlength=len(wanted)), wanted * len(drawn)
    if not near and counts[wanted == 0].any():
        return 0.0
    order, starts, filled = expected.argsort(), [0], 0.0
    for i, mass in enumerate(expected[order]):
        if filled >= _FEWEST:  # rarer tokens share a bin
            starts.append(i)
            filled = 0.0
        filled += mass
    found, mean, *others = (
        np.add.reduceat(values[order], starts)
        for values in (counts, expected, *(one * len(drawn) for one in near or [wanted]))
    )
    variance = mean + np.max([(other - mean) ** 2 for other in others], axis=0)
    statistic = float(((found - mean) ** 2 / variance).sum())
    return chi_square(statistic, len(starts) - 1) if len(starts) > 1 else 1.0


def _graphs(record: Record, groups: Mapping[str, Sequence[_Judged]]) -> Iterator[dict[str, Any]]:
    """Yield the outputs and the speed of each graph, without its first call if there are more."""
    for graph in dict.fromkeys(seen.graph for seen in record.seen):
        found, calls = groups[_name(graph)], [] if graph is None else record.calls[graph]
        yield {
            "graph": _name(graph),
            "outputs": len(found),
            "wrong": sum(one.wrong for one in found),
            "difference": max(
                (one.off.logits for one in found if one.off.logits is not None), default=None
            ),
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
    """Describe a median that is too large; empty if none is, or the outputs are few."""
    for kind, what in enumerate(("difference", "distance from the best token")):
        pairs = [(one.off[kind], one.usual[kind]) for one in found if one.off[kind] is not None]
        if len(pairs) >= _FEWEST:
            here, usual = (median(values) for values in zip(*pairs, strict=True))
            if here > max(_FLOOR, _MEDIANS * usual):
                return f"the median {what} of {len(pairs)} outputs is {here:.3g}, on the CPU {usual:.3g}"
    return ""


def _describe(wrong: Sequence[_Judged], found: Sequence[_Judged]) -> str:
    """Describe wrong outputs of a place: slots, rows, positions and scenarios, each of those that were compared."""
    parts = [f"{len(wrong)} of {len(found)} outputs are wrong"]
    for name, nouns in (("slot", "slots"), ("rows", "rows"), ("position", "positions")):
        every = sorted({getattr(one.seen, name) for one in found})
        bad = {getattr(one.seen, name) for one in wrong}
        parts += [f"{nouns} {_ranges(bad, every)} of {_ranges({*every}, every)}"] * (every != [-1])
    parts.append(f"scenarios {', '.join(sorted({one.seen.scenario for one in wrong}))}")
    seen, (error, behind), *_ = max(wrong, key=lambda one: one.off.logits or one.off.token or 0.0)
    off = [] if error is None else [f"off by {error:.3g}"]
    off += [f"token {seen.token} is {behind:.3g} behind the best one"] if behind else []
    row = "" if seen.graph is None else f"slot {seen.slot} of {seen.rows} rows, "
    parts.append(f"worst at {row}position {seen.position}: {', '.join(off)}")
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
